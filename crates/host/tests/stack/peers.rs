//! The kernel next door.

use std::io::{ErrorKind, Read, Write};
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::process::Command;
use std::thread;
use std::time::Duration;

use quipu_inet::tcp::Failure;
use quipu_wire::checksum::sum;

use super::host::{Host, KERNEL, OURS, STREAM, SUM, TOTAL, VERSIONS, octet};
use super::space::inside;

const PATIENCE: Duration = Duration::from_secs(20);

pub fn ours(version: usize, port: u16) -> SocketAddr {
    SocketAddr::new(OURS[version].parse().unwrap(), port)
}

/// Reads a stream of the host to its end: whether it is the right one.
pub fn download(from: SocketAddr) -> bool {
    let mut stream = TcpStream::connect(from).unwrap();
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    let mut octets = Vec::new();
    stream.read_to_end(&mut octets).unwrap();
    octets.len() as u64 == TOTAL && octets.iter().zip((0..).map(octet)).all(|(is, it)| *is == it)
}

#[test]
fn streams_there_and_back() {
    if !inside("peers::streams_there_and_back") {
        return;
    }
    let Some(mut host) = Host::new(true) else { return };
    for version in VERSIONS {
        let client = thread::spawn(move || download(ours(version, STREAM)));
        assert!(host.until(client));
        // As a client, to a server that sends what it is sent.
        let server = TcpListener::bind((KERNEL[version], 0)).unwrap();
        let to = server.local_addr().unwrap();
        let echo = thread::spawn(move || {
            let (mut stream, _) = server.accept().unwrap();
            stream.set_read_timeout(Some(PATIENCE)).unwrap();
            let mut octets = Vec::new();
            stream.read_to_end(&mut octets).unwrap();
            stream.write_all(&octets).unwrap();
        });
        let config = host.config.clone();
        let id = host.stack.connect(host.now(), None, to, &config).unwrap();
        host.users.entry(id).or_default();
        host.run(|host| host.users[&id].received == TOTAL);
        assert!(!host.users[&id].wrong && host.users[&id].acked == TOTAL);
        host.until(echo);
    }
}

#[test]
fn datagrams_come_in_parts_and_answers_go_back() {
    if !inside("peers::datagrams_come_in_parts_and_answers_go_back") {
        return;
    }
    let Some(mut host) = Host::new(true) else { return };
    let lens = [1, 1_400, 4_000, 30_001, 65_000];
    for version in VERSIONS {
        let asker = thread::spawn(move || {
            let socket = UdpSocket::bind((KERNEL[version], 0)).unwrap();
            socket.set_read_timeout(Some(PATIENCE)).unwrap();
            for len in lens {
                let octets: Vec<u8> = (0..len).map(octet).collect();
                socket.send_to(&octets, ours(version, SUM)).unwrap();
                let mut answer = [0; 32];
                let len = socket.recv(&mut answer).unwrap();
                let sum: u64 = octets.iter().map(|octet| u64::from(*octet)).sum();
                assert_eq!(str::from_utf8(&answer[..len]).unwrap(), sum.to_string());
            }
        });
        host.until(asker);
    }
    assert_eq!(host.reassembled, [4_000, 30_001, 65_000, 4_000, 30_001, 65_000]);
}

#[test]
fn ports_where_nobody_is() {
    if !inside("peers::ports_where_nobody_is") {
        return;
    }
    let Some(mut host) = Host::new(true) else { return };
    for version in VERSIONS {
        let asker = thread::spawn(move || {
            let socket = UdpSocket::bind((KERNEL[version], 0)).unwrap();
            socket.set_read_timeout(Some(PATIENCE)).unwrap();
            socket.connect(ours(version, 9)).unwrap();
            socket.send(b"anybody?").unwrap();
            let datagram = socket.recv(&mut [0; 9]).map_err(|error| error.kind());
            let stream = TcpStream::connect(ours(version, 9)).map_err(|error| error.kind());
            (datagram, stream.err())
        });
        let refused = ErrorKind::ConnectionRefused;
        assert_eq!(host.until(asker), (Err(refused), Some(refused)));
        // And the other way round.
        let to = SocketAddr::new(KERNEL[version].parse().unwrap(), 9);
        let now = host.now();
        host.send_datagram(now, to, b"anybody?");
        host.run(|host| host.refused.contains(&to));
        let config = host.config.clone();
        let id = host.stack.connect(host.now(), None, to, &config).unwrap();
        host.run(|host| host.users.get(&id).is_some_and(|user| user.failed.is_some()));
        assert_eq!(host.users[&id].failed, Some(Failure::Refused));
    }
}

/// What comes back of an echo request: the data (icmp(7), icmpv6(7)).
fn ping(version: usize, data: &[u8]) -> Vec<u8> {
    let (family, protocol, kind) =
        [(libc::AF_INET, libc::IPPROTO_ICMP, 8), (libc::AF_INET6, libc::IPPROTO_ICMPV6, 128)]
            [version];
    // SAFETY: takes and gives integers; the descriptor is ours alone.
    let socket = unsafe { OwnedFd::from_raw_fd(libc::socket(family, libc::SOCK_RAW, protocol)) };
    assert!(socket.as_raw_fd() >= 0);
    let socket = UdpSocket::from(socket);
    socket.set_read_timeout(Some(PATIENCE)).unwrap();
    let mut request = [&[kind, 0, 0, 0, 0x12, 0x34, 0, 1], data].concat();
    if version == 0 {
        let checksum = sum(&request).checksum();
        request[2..4].copy_from_slice(&checksum.to_be_bytes());
    }
    socket.send_to(&request, ours(version, 0)).unwrap();
    let mut answer = vec![0; 70_000];
    loop {
        let len = socket.recv(&mut answer).unwrap();
        // Over IPv4 the IP header comes along.
        let message = &answer[if version == 0 { 20 } else { 0 }..len];
        if message[0] == [0, 129][version] && message[4..8] == request[4..8] {
            return message[8..].to_vec();
        }
    }
}

#[test]
fn echoes_are_answered() {
    if !inside("peers::echoes_are_answered") {
        return;
    }
    let Some(mut host) = Host::new(true) else { return };
    for version in VERSIONS {
        for len in [0, 56, 1_400] {
            let data: Vec<u8> = (0..len).map(octet).collect();
            let sent = data.clone();
            assert_eq!(host.until(thread::spawn(move || ping(version, &sent))), data);
        }
    }
}

/// What the kernel knows of our neighbours.
fn neighbour(address: &str) -> String {
    let output = Command::new("ip").args(["neigh", "show", address]).output().unwrap();
    String::from_utf8(output.stdout).unwrap()
}

#[test]
fn neighbours_find_each_other_and_one_who_is_not_there_is_not_found() {
    let name = "peers::neighbours_find_each_other_and_one_who_is_not_there_is_not_found";
    if !inside(name) {
        return;
    }
    let Some(mut host) = Host::new(true) else { return };
    for version in VERSIONS {
        let data = host.until(thread::spawn(move || ping(version, b"there?")));
        assert_eq!(data, b"there?");
        let known = neighbour(OURS[version]);
        assert!(known.contains("REACHABLE"), "{known}");
        let nobody: IpAddr = ["10.9.0.77", "fd09::77"][version].parse().unwrap();
        let now = host.now();
        host.send_datagram(now, SocketAddr::new(nobody, 9), b"there?");
        host.run(|host| host.lost.contains(&nobody));
    }
}
