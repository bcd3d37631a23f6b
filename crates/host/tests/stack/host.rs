//! A host made of a stack and a TAP device, with a small program on it: whoever connects to port 80 is sent a
//! stream, datagrams to port 7 are answered by their sum.

use std::collections::HashMap;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::AsRawFd;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use quipu_host::packet::{self, Outgoing, PacketLink};
use quipu_inet::stack::{
    Arrival, Carriage, Config, Datagram, Departure, Event, Frame, Offload, Payload, Stack, TcpId,
    UdpId,
};
use quipu_inet::tcp::{self, Secret, State};

use super::space::{ip, wait_until_local};

/// The kernel's addresses on the TAP device, and the stack's.
pub const KERNEL: [&str; 2] = ["10.9.0.1", "fd09::1"];
pub const OURS: [&str; 2] = ["10.9.0.2", "fd09::2"];
/// IPv4 and IPv6: which of the addresses.
pub const VERSIONS: [usize; 2] = [0, 1];
/// The ports of the program.
pub const STREAM: u16 = 80;
pub const SUM: u16 = 7;
/// Octets of a stream.
pub const TOTAL: u64 = 2_000_000;
/// Nothing here takes that long unless it hangs.
const PATIENCE: Duration = Duration::from_secs(60);
/// The most that waits to be acknowledged.
const AHEAD: u64 = 1 << 20;
const ROOM: u64 = 1 << 18;

/// The octet at an offset of each stream.
pub fn octet(offset: u64) -> u8 {
    (offset * 7 + offset / 251) as u8
}

#[derive(Default)]
pub struct User {
    written: u64,
    pub acked: u64,
    /// Octets that have come without a gap, and whether they were right.
    pub received: u64,
    pub wrong: bool,
    pub failed: Option<tcp::Failure>,
    /// What the connection counted, and its segments, when all was acknowledged.
    pub end: Option<(tcp::Counters, u32)>,
}

pub struct Host {
    link: Box<dyn PacketLink>,
    pub stack: Stack,
    pub config: Arc<tcp::Config>,
    begun: Instant,
    pub users: HashMap<TcpId, User>,
    socket: UdpId,
    answers: Vec<(SocketAddr, u64)>,
    /// Lengths of datagrams that came in parts.
    pub reassembled: Vec<usize>,
    pub refused: Vec<SocketAddr>,
    pub lost: Vec<IpAddr>,
}

impl Host {
    /// The host, on the device `qp0`; none, and said, if there can be no such device here. `cuts` says
    /// whether the device is to cut segments.
    pub fn new(cuts: bool) -> Option<Self> {
        let name = "qp0";
        if std::fs::OpenOptions::new().read(true).write(true).open("/dev/net/tun").is_err() {
            println!("SKIPPED: no /dev/net/tun here");
            return None;
        }
        let link = packet::open(&format!("tap:{name}").parse().unwrap()).unwrap();
        ip(&format!("link set {name} up"));
        ip(&format!("address add {}/24 dev {name}", KERNEL[0]));
        ip(&format!("address add {}/64 dev {name} nodad", KERNEL[1]));
        wait_until_local(KERNEL[1]);
        let features = link.features();
        let segment = if cuts { features.segment } else { 0 };
        let ours = OURS.map(|address| address.parse().unwrap());
        let mut stack = Stack::new(Config {
            hardware: features.hardware,
            addresses: vec![(ours[0], 24), (ours[1], 64)],
            gateways: KERNEL.map(|address| address.parse().unwrap()).to_vec(),
            mtu: features.mtu,
            offload: Offload { checksum: features.checksum, segment },
            max_connections: 100,
            secret: Secret([3, 4]),
        });
        let (receive_mss, path_mss) = (u16::MAX, u16::MAX);
        let config = Arc::new(tcp::Config { receive_mss, path_mss, ..tcp::Config::default() });
        let (listener, _) = stack.listen(STREAM, &config, 16).unwrap();
        stack.set_idle(listener, 100);
        let (socket, _) = stack.bind(SUM).unwrap();
        Some(Self {
            link,
            stack,
            config,
            begun: Instant::now(),
            users: HashMap::new(),
            socket,
            answers: Vec::new(),
            reassembled: Vec::new(),
            refused: Vec::new(),
            lost: Vec::new(),
        })
    }

    pub fn now(&self) -> u64 {
        1_000_000_000 + self.begun.elapsed().as_nanos() as u64
    }

    /// Lives until somebody has finished.
    pub fn until<T>(&mut self, somebody: JoinHandle<T>) -> T {
        self.run(|_| somebody.is_finished());
        somebody.join().unwrap()
    }

    /// Lives until `done`.
    pub fn run(&mut self, mut done: impl FnMut(&Self) -> bool) {
        let deadline = Instant::now() + PATIENCE;
        while !done(self) {
            assert!(Instant::now() < deadline, "{:?}", self.stack.counters());
            self.turn();
        }
    }

    fn turn(&mut self) {
        let now = self.now();
        self.stack.handle_timeout(now);
        let Self { link, stack, users, answers, reassembled, .. } = self;
        link.receive(64, &mut |frame| {
            let mut arrival = stack.handle_frame(now, frame);
            // It has its room since its SYN came.
            if arrival == Arrival::Again {
                arrival = stack.handle_frame(now, frame);
            }
            match arrival {
                Arrival::Segment { connection, received, reassembled } => {
                    let user = users.entry(connection).or_default();
                    let bytes = if reassembled { stack.reassembled() } else { frame.bytes };
                    user.take(&Frame { bytes, ..*frame }, &received);
                    stack.set_receive_space(connection, ROOM);
                }
                Arrival::Datagram(datagram) => {
                    let Datagram { from, payload, .. } = datagram;
                    let octets = match payload {
                        Payload::Frame(range) => &frame.bytes[range],
                        Payload::Reassembled => {
                            reassembled.push(stack.reassembled().len());
                            stack.reassembled()
                        }
                    };
                    answers.push((from, octets.iter().map(|octet| u64::from(*octet)).sum()));
                }
                Arrival::Nothing | Arrival::Again => {}
            }
        })
        .unwrap();
        self.hear();
        self.speak(now);
        let sent = self.transmit(now);
        self.link.flush().unwrap();
        if sent == 0 {
            self.sleep(now);
        }
    }

    fn hear(&mut self) {
        while let Some(event) = self.stack.poll_event() {
            match event {
                Event::Incoming { connection, .. } => {
                    self.users.entry(connection).or_default();
                    self.stack.set_receive_space(connection, ROOM);
                }
                Event::Tcp { connection, event: tcp::Event::Acked(acked) } => {
                    let user = self.users.entry(connection).or_default();
                    user.acked = acked;
                    let now = self.stack.connection(connection).filter(|_| acked == TOTAL);
                    user.end = now.map(|it| (*it.counters(), it.mss())).or(user.end);
                }
                Event::Tcp { connection, event: tcp::Event::Failed(failure) } => {
                    self.users.entry(connection).or_default().failed = Some(failure);
                }
                Event::Tcp { .. } => {}
                Event::Refused { to, .. } => self.refused.push(to),
                Event::Neighbours => {}
                Event::Neighbour { next_hop, found } => {
                    self.lost.extend((!found).then_some(next_hop));
                }
            }
        }
    }

    /// The program.
    fn speak(&mut self, now: u64) {
        for (id, user) in &mut self.users {
            let stands =
                self.stack.connection(*id).is_some_and(|it| it.state() >= State::Established);
            while stands && user.written < TOTAL && user.written - user.acked < AHEAD {
                self.stack.send(*id, 50_000, true).unwrap();
                user.written += 50_000;
                if user.written == TOTAL {
                    self.stack.close(*id);
                }
            }
        }
        while let Some((to, sum)) = self.answers.pop() {
            self.send_datagram(now, to, sum.to_string().as_bytes());
        }
    }

    /// Sends a datagram from [`SUM`]; to somebody unknown it is lost.
    pub fn send_datagram(&mut self, now: u64, to: SocketAddr, payload: &[u8]) {
        let slot = self.link.slot().expect("the link is idle");
        let plain = Carriage::default();
        let departure =
            self.stack.compose_datagram(now, self.socket, to, plain, payload.len(), slot);
        if let Ok(departure) = departure {
            slot[departure.headers..departure.len()].copy_from_slice(payload);
            self.link.send(outgoing(&departure));
        }
    }

    fn transmit(&mut self, now: u64) -> usize {
        for sent in 0..64 {
            let Some(slot) = self.link.slot() else { return sent };
            let Some(departure) = self.stack.poll_transmit(now, slot) else { return sent };
            let room = &mut slot[departure.headers..departure.len()];
            for (to, offset) in room.iter_mut().zip(departure.payload.clone()) {
                *to = octet(offset);
            }
            self.link.send(outgoing(&departure));
        }
        64
    }

    fn sleep(&self, now: u64) {
        let events = if self.link.wants_writable() { libc::POLLOUT } else { libc::POLLIN };
        let wait = self.stack.poll_timeout().map_or(10, |at| at.saturating_sub(now) / 1_000_000);
        let descriptor = self.link.descriptor().as_raw_fd();
        let mut poll = libc::pollfd { fd: descriptor, events, revents: 0 };
        // SAFETY: one pollfd in a live variable.
        unsafe { libc::poll(&raw mut poll, 1, wait.min(10) as libc::c_int) };
    }
}

/// A TAP device computes checksums and cuts segments.
fn outgoing(departure: &Departure) -> Outgoing {
    let Departure { checksum, segment, .. } = *departure;
    Outgoing { len: departure.len(), checksum, segment, priority: 0 }
}

impl User {
    fn take(&mut self, frame: &Frame<'_>, received: &tcp::Received) {
        if let Some(placement) = &received.placement {
            let octets = &frame.bytes[placement.payload.clone()];
            let right = (placement.offset..).map(octet);
            self.wrong |= !octets.iter().copied().zip(right).all(|(is, should)| is == should);
        }
        self.received = received.contiguous;
    }
}
