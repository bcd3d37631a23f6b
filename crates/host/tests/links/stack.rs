//! The adapter's stack over links, with the kernel's sockets as its peer: connections both ways, neighbours
//! found by themselves, as much as fits through at once.

use std::io::{Read, Write};
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream};
use std::ops::Range;
use std::os::fd::AsRawFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use quipu_host::packet::interface::{Setup, set_up};
use quipu_host::packet::{self, Outgoing, PacketLink};
use quipu_inet::stack::{Arrival, Config, Event, Frame, Offload, Stack, TcpId};
use quipu_inet::tcp::{self, Secret};

use super::af_packet::pair;
use super::peer::{KERNEL, OURS};
use super::space::{self, inside, offload};

/// Nothing here takes that long unless it hangs.
const PATIENCE: Duration = Duration::from_secs(60);
/// What goes over a connection each way.
const LEN: u64 = 3_000_000;
/// Room for what arrives.
const ROOM: u64 = 1 << 20;

/// An octet of the stream that each end sends.
fn octet(offset: u64) -> u8 {
    (offset.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 56) as u8
}

fn stream(range: Range<u64>) -> Vec<u8> {
    range.map(octet).collect()
}

/// A stack over a link, with one connection at a time.
struct Host {
    stack: Stack,
    link: Box<dyn PacketLink>,
    start: Instant,
    connection: Option<TcpId>,
    received: Vec<u8>,
    events: Vec<tcp::Event>,
    config: Arc<tcp::Config>,
}

impl Host {
    fn new(link: Box<dyn PacketLink>, addresses: Vec<(IpAddr, u8)>) -> Self {
        let features = link.features();
        let config = Config {
            hardware: features.hardware,
            addresses,
            gateways: Vec::new(),
            mtu: features.mtu,
            offload: Offload { checksum: features.checksum, segment: features.segment },
            max_connections: 64,
            secret: Secret([1, 2]),
        };
        Self {
            stack: Stack::new(config),
            link,
            start: Instant::now(),
            connection: None,
            received: Vec::new(),
            events: Vec::new(),
            config: Arc::new(tcp::Config::default()),
        }
    }

    fn now(&self) -> u64 {
        // A stack's time begins anywhere.
        self.start.elapsed().as_nanos() as u64 + 1
    }

    /// Goes on until `done`.
    fn run(&mut self, mut done: impl FnMut(&Self) -> bool) {
        let deadline = Instant::now() + PATIENCE;
        while !done(self) {
            let counters = self.stack.counters();
            assert!(Instant::now() < deadline, "{:?} {counters:?}", self.events);
            self.turn();
        }
    }

    fn turn(&mut self) {
        let wants = if self.link.wants_writable() { libc::POLLOUT } else { 0 };
        let fd = self.link.descriptor().as_raw_fd();
        let mut poll = libc::pollfd { fd, events: libc::POLLIN | wants, revents: 0 };
        // SAFETY: one pollfd in a live variable.
        unsafe { libc::poll(&raw mut poll, 1, 1) };
        let now = self.now();
        if self.stack.poll_timeout().is_some_and(|at| at <= now) {
            self.stack.handle_timeout(now);
        }
        let Self { stack, link, received, .. } = self;
        link.receive(64, &mut |frame| take(stack, received, now, frame)).unwrap();
        while let Some(event) = self.stack.poll_event() {
            match event {
                Event::Incoming { connection, .. } => self.adopt(connection),
                // One before it may still have something to say.
                Event::Tcp { connection, event } if self.connection == Some(connection) => {
                    self.events.push(event);
                }
                _ => {}
            }
        }
        self.transmit(now);
    }

    /// Has the link take what the stack has to send, as far as it takes it.
    fn transmit(&mut self, now: u64) {
        let offload = self.link.features().checksum;
        while let Some(slot) = self.link.slot() {
            let Some(departure) = self.stack.poll_transmit(now, slot) else { break };
            let len = departure.len();
            if departure.of.is_some() {
                let payload = stream(departure.payload.clone());
                slot[departure.headers..len].copy_from_slice(&payload);
            }
            let checksum = departure.checksum.filter(|_| offload);
            if let Some(checksum) = departure.checksum.filter(|_| !offload) {
                Stack::seal(&mut slot[..len], checksum);
            }
            let segment = departure.segment;
            self.link.send(Outgoing { len, checksum, segment, priority: 5 });
        }
        self.link.flush().unwrap();
    }

    fn adopt(&mut self, connection: TcpId) {
        self.connection = Some(connection);
        self.received.clear();
        self.events.clear();
        self.stack.set_receive_space(connection, ROOM);
    }

    /// Sends and receives a stream, and closes. Of that the peer may still have to hear.
    fn exchange(&mut self) {
        let connection = self.connection.unwrap();
        self.run(|host| host.events.contains(&tcp::Event::Connected));
        self.stack.send(connection, LEN, true).unwrap();
        self.stack.close(connection);
        self.run(|host| {
            host.events.contains(&tcp::Event::PeerClosed(LEN))
                && host.events.contains(&tcp::Event::Acked(LEN))
        });
        assert!(self.received == stream(0..LEN));
    }
}

/// Takes a frame, and what of a stream is in it.
fn take(stack: &mut Stack, into: &mut Vec<u8>, now: u64, frame: &Frame<'_>) {
    let Arrival::Segment { connection, received, .. } = stack.handle_frame(now, frame) else {
        return;
    };
    if let Some(placement) = received.placement {
        let payload = &frame.bytes[placement.payload];
        let end = placement.offset as usize + payload.len();
        into.resize(into.len().max(end), 0);
        into[placement.offset as usize..end].copy_from_slice(payload);
    }
    assert!(stack.poll_held(connection).is_none(), "a stream is never held");
    stack.set_receive_space(connection, ROOM);
}

/// The kernel's end: sends and receives the same.
fn echo(socket: TcpStream) {
    socket.set_read_timeout(Some(PATIENCE)).unwrap();
    socket.set_write_timeout(Some(PATIENCE)).unwrap();
    let mut writer = socket.try_clone().unwrap();
    let sender = std::thread::spawn(move || {
        writer.write_all(&stream(0..LEN)).unwrap();
        writer.shutdown(std::net::Shutdown::Write).unwrap();
    });
    let mut got = Vec::new();
    (&socket).read_to_end(&mut got).unwrap();
    assert!(got == stream(0..LEN));
    sender.join().unwrap();
}

/// Connections in both directions by both versions of IP, with `interface` as the kernel's end of the link.
fn connections(link: Box<dyn PacketLink>, interface: &str) {
    let address = |text: &str, v4: u8, v6: u8| {
        let ip: IpAddr = text.parse().unwrap();
        (ip, if ip.is_ipv4() { v4 } else { v6 })
    };
    let addresses = KERNEL.map(|text| address(text, 24, 64)).to_vec();
    set_up(interface, &Setup { mtu: None, addresses }).unwrap();
    space::wait_until_local(KERNEL[1]);
    let mut host = Host::new(link, OURS.map(|text| address(text, 24, 64)).to_vec());
    let (listener, port) = host.stack.listen(0, &host.config, 8).unwrap();
    for (kernel, ours) in KERNEL.into_iter().zip(OURS) {
        let (kernel, ours): (IpAddr, IpAddr) = (kernel.parse().unwrap(), ours.parse().unwrap());
        let theirs = TcpListener::bind((kernel, 0)).unwrap();
        let remote = theirs.local_addr().unwrap();
        let end = std::thread::spawn(move || echo(theirs.accept().unwrap().0));
        let now = host.now();
        let id = host.stack.connect(now, None, remote, &host.config).unwrap();
        host.adopt(id);
        host.exchange();
        host.run(|_| end.is_finished());
        end.join().unwrap();
        host.stack.set_idle(listener, 1);
        host.connection = None;
        let place = SocketAddr::new(ours, port);
        let end = std::thread::spawn(move || {
            echo(TcpStream::connect_timeout(&place, PATIENCE).unwrap());
        });
        host.run(|host| host.connection.is_some());
        host.exchange();
        host.run(|_| end.is_finished());
        end.join().unwrap();
    }
}

fn open(spec: &str) -> Box<dyn PacketLink> {
    packet::open(&spec.parse().unwrap()).unwrap()
}

#[test]
fn the_stack_talks_to_the_kernel_over_a_tap_device() {
    if inside("stack::the_stack_talks_to_the_kernel_over_a_tap_device") && super::tap::possible() {
        connections(open("tap:qp0"), "qp0");
    }
}

#[test]
fn the_stack_talks_to_the_kernel_over_a_packet_socket() {
    if inside("stack::the_stack_talks_to_the_kernel_over_a_packet_socket") {
        pair();
        connections(open("packet:ours"), "theirs");
    }
}

#[test]
fn the_stack_talks_to_the_kernel_over_an_xdp_socket() {
    if inside("stack::the_stack_talks_to_the_kernel_over_an_xdp_socket") && super::xdp::possible() {
        offload("theirs", space::Offload::Checksum, false);
        connections(open("xdp:ours"), "theirs");
    }
}

#[test]
fn two_stacks_talk_over_udp() {
    let link = || open("udp:127.0.0.1:0");
    let host = |link: Box<dyn PacketLink>| {
        let address = link.features().address.unwrap();
        Host::new(link, vec![address])
    };
    let (mut client, mut server) = (host(link()), host(link()));
    let (listener, port) = server.stack.listen(0, &server.config, 8).unwrap();
    server.stack.set_idle(listener, 1);
    let place = SocketAddr::new(server.link.features().address.unwrap().0, port);
    let served = Arc::new(AtomicUsize::new(0));
    // Each goes on until the other has everything.
    let finish = |mut host: Host, served: &AtomicUsize| {
        host.exchange();
        served.fetch_add(1, Ordering::Relaxed);
        host.run(|_| served.load(Ordering::Relaxed) == 2);
    };
    let count = Arc::clone(&served);
    let end = std::thread::spawn(move || {
        server.run(|host| host.connection.is_some());
        finish(server, &count);
    });
    let now = client.now();
    let id = client.stack.connect(now, None, place, &client.config).unwrap();
    client.adopt(id);
    finish(client, &served);
    end.join().unwrap();
}
