//! What the commands in the hosts do.

use std::io::{Read as _, Write as _};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, Shutdown, SocketAddr, TcpListener, TcpStream};
use std::path::Path;
use std::time::{Duration, Instant};

use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketType, ipproto, sockopt};

const PORT: u16 = 5001;
const BYTES: usize = 4 << 20;
const PATIENCE: Duration = Duration::from_secs(20);

/// The sizes of echo requests: up to one with two fragments in datagram mode, and up to what one IP packet
/// holds in connected mode.
const SIZES: [usize; 5] = [0, 56, 1400, 2000, 5000];
const LARGE_SIZES: [usize; 7] = [0, 56, 1400, 2000, 5000, 30_000, 65_000];

/// Plays a role: `serve COUNT`, `ask ADDRESS... [mtu=BYTES]`, `ask-large ADDRESS... [mtu=BYTES]`,
/// `ask-twice ADDRESS FILE`, `ask-around ADDRESS FILE OTHER`, `iperf -s`, `iperf ADDRESS`, or
/// `stay SECONDS`.
pub fn play(role: &str) {
    let mut words = role.split(' ');
    let kind = words.next();
    let mut number = || words.next().unwrap().parse().unwrap();
    match kind {
        Some("serve") => serve(number()),
        Some("iperf") => iperf(words.next().unwrap()),
        Some("stay") => std::thread::sleep(Duration::from_secs(number().into())),
        Some(kind @ ("ask-twice" | "ask-around")) => {
            let to = words.next().unwrap().parse().unwrap();
            let file = Path::new(words.next().unwrap());
            match kind {
                "ask-twice" => ask_twice(to, file),
                _ => ask_around(to, file, words.next().unwrap().parse().unwrap()),
            }
        }
        Some("ask" | "ask-large") => words.for_each(|word| match word.strip_prefix("mtu=") {
            Some(mtu) => assert!(interfaces().contains(&format!("{mtu}\n")), "{}", interfaces()),
            None if kind == Some("ask") => ask(word.parse().unwrap(), &SIZES),
            None => ask(word.parse().unwrap(), &LARGE_SIZES),
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

/// Pings a host, makes a file, and pings the host again when the file is gone.
fn ask_twice(to: IpAddr, file: &Path) {
    ping(to, &LARGE_SIZES);
    offer(file);
    ping(to, &LARGE_SIZES);
    println!("{to} answered twice");
}

/// Makes a file, and waits until it is gone.
fn offer(file: &Path) {
    std::fs::write(file, "").unwrap();
    let begun = Instant::now();
    while file.exists() {
        assert!(begun.elapsed() < PATIENCE, "{} stays", file.display());
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// Serves one client of iperf3, or is one, for a second. The server may not be there yet.
fn iperf(to: &str) {
    let arguments = if to == "-s" { vec!["-s", "-1"] } else { vec!["-t", "1", "-c", to] };
    let begun = Instant::now();
    loop {
        let output = std::process::Command::new("iperf3").args(&arguments).output().unwrap();
        let said = String::from_utf8_lossy(&output.stdout).into_owned();
        if output.status.success() {
            return println!("{said}");
        }
        assert!(begun.elapsed() < PATIENCE, "{said}");
        std::thread::sleep(Duration::from_millis(100));
    }
}

/// Pings a host, which then is stopped; sends it much, and pings another one meanwhile; and pings it again
/// when it goes on.
fn ask_around(to: IpAddr, file: &Path, other: IpAddr) {
    ping(to, &LARGE_SIZES);
    offer(file);
    let socket = std::net::UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 0)).unwrap();
    for _ in 0..1000 {
        // What there is no room for is lost.
        let _ = socket.send_to(&[7; 60_000], (to, 9));
    }
    ping(other, &LARGE_SIZES);
    println!("{other} answered meanwhile");
    offer(file);
    ping(to, &LARGE_SIZES);
    println!("{to} answered again");
}

/// Pings a host, and sends it a stream.
fn ask(to: IpAddr, sizes: &[usize]) {
    ping(to, sizes);
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

/// Sends echo requests of these sizes, until all were answered.
fn ping(to: IpAddr, sizes: &[usize]) {
    let (family, protocol, kinds) = match to {
        IpAddr::V4(_) => (AddressFamily::INET, ipproto::ICMP, (8, 0)),
        IpAddr::V6(_) => (AddressFamily::INET6, ipproto::ICMPV6, (128, 129)),
    };
    let socket = rustix::net::socket(family, SocketType::RAW, Some(protocol)).unwrap();
    let limit = Some(Duration::from_millis(500));
    sockopt::set_socket_timeout(&socket, sockopt::Timeout::Recv, limit).unwrap();
    for (number, &len) in sizes.iter().enumerate() {
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
