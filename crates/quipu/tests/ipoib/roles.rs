//! What the commands in the hosts do.

use std::io::{Read as _, Write as _};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, Shutdown, SocketAddr, TcpListener, TcpStream};
use std::time::{Duration, Instant};

use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketType, ipproto, sockopt};

const PORT: u16 = 5001;
const BYTES: usize = 4 << 20;
const PATIENCE: Duration = Duration::from_secs(20);

/// Plays a role: `serve COUNT`, or `ask ADDRESS... [mtu=BYTES]`.
pub fn play(role: &str) {
    let mut words = role.split(' ');
    match words.next() {
        Some("serve") => serve(words.next().unwrap().parse().unwrap()),
        Some("ask") => words.for_each(|word| match word.strip_prefix("mtu=") {
            Some(mtu) => assert!(interfaces().contains(&format!("{mtu}\n")), "{}", interfaces()),
            None => ask(word.parse().unwrap()),
        }),
        other => panic!("{other:?}"),
    }
}

fn interfaces() -> String {
    // /sys is that of another network namespace: `ip` asks the kernel.
    let output = std::process::Command::new("ip").args(["-o", "link"]).output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let after = |line: &str| {
        line.split("mtu ").nth(1).and_then(|it| it.split(' ').next()).map(str::to_owned)
    };
    text.lines().filter_map(after).map(|mtu| mtu + "\n").collect()
}

fn pattern(at: usize) -> u8 {
    (at * 7 + at / 251) as u8
}

/// Takes so many streams, and answers each with the sum of its bytes.
fn serve(streams: u32) {
    let listener = TcpListener::bind((Ipv6Addr::UNSPECIFIED, PORT))
        .or_else(|_| TcpListener::bind((Ipv4Addr::UNSPECIFIED, PORT)))
        .unwrap();
    for _ in 0..streams {
        let (mut stream, _) = listener.accept().unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        let mut bytes = Vec::new();
        stream.read_to_end(&mut bytes).unwrap();
        let sum: u64 = bytes.iter().map(|&byte| u64::from(byte)).sum();
        stream.write_all(&sum.to_be_bytes()).unwrap();
    }
    println!("{streams} streams");
}

/// Pings a host, and sends it a stream.
fn ask(to: IpAddr) {
    ping(to);
    let begun = Instant::now();
    let mut stream = loop {
        match TcpStream::connect((to, PORT)) {
            Ok(stream) => break stream,
            Err(error) => assert!(begun.elapsed() < PATIENCE, "{error}"),
        }
        std::thread::sleep(Duration::from_millis(50));
    };
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    let bytes: Vec<u8> = (0..BYTES).map(pattern).collect();
    stream.write_all(&bytes).unwrap();
    stream.shutdown(Shutdown::Write).unwrap();
    let mut sum = [0; 8];
    stream.read_exact(&mut sum).unwrap();
    let expected: u64 = bytes.iter().map(|&byte| u64::from(byte)).sum();
    assert_eq!(u64::from_be_bytes(sum), expected);
    println!("{to} answered");
}

/// Sends echo requests of all sizes up to one with two fragments, until all were answered.
fn ping(to: IpAddr) {
    let (family, protocol, kinds) = match to {
        IpAddr::V4(_) => (AddressFamily::INET, ipproto::ICMP, (8, 0)),
        IpAddr::V6(_) => (AddressFamily::INET6, ipproto::ICMPV6, (128, 129)),
    };
    let socket = rustix::net::socket(family, SocketType::RAW, Some(protocol)).unwrap();
    let limit = Some(Duration::from_millis(500));
    sockopt::set_socket_timeout(&socket, sockopt::Timeout::Recv, limit).unwrap();
    for (number, len) in [0, 56, 1400, 2000, 5000].into_iter().enumerate() {
        let mut message = vec![kinds.0, 0, 0, 0, 0x12, 0x34, 0, number as u8];
        message.extend((0..len).map(pattern));
        if to.is_ipv4() {
            // The kernel fills in the checksum of ICMPv6 only.
            let sum = quipu_ipoib::wire::checksum::sum(&message).checksum();
            message[2..4].copy_from_slice(&sum.to_be_bytes());
        }
        let begun = Instant::now();
        let mut buffer = vec![0; 1 << 16];
        // The other host may not be there yet.
        while !answered(&socket, to, &message, kinds.1, &mut buffer) {
            assert!(begun.elapsed() < PATIENCE, "{to} does not answer {len} bytes");
        }
    }
}

fn answered(
    socket: &rustix::fd::OwnedFd,
    to: IpAddr,
    message: &[u8],
    reply: u8,
    buffer: &mut [u8],
) -> bool {
    let place = SocketAddr::new(to, 0);
    if rustix::net::sendto(socket, message, SendFlags::empty(), &place).is_err() {
        std::thread::sleep(Duration::from_millis(50));
        return false;
    }
    // Other messages come, too, and answers to what was sent before.
    for _ in 0..20 {
        let Ok((len, _)) = rustix::net::recv(socket, &mut *buffer, RecvFlags::empty()) else {
            return false;
        };
        let header = if to.is_ipv4() { 20 } else { 0 };
        let got = buffer[..len].get(header..).unwrap_or_default();
        if got.first() == Some(&reply) && got.get(4..) == Some(&message[4..]) {
            return true;
        }
    }
    false
}
