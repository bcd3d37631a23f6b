//! Two stacks in simulated time, and a link between them that does to frames what networks do.

use std::collections::{BTreeMap, HashMap};
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use quipu_inet::stack::{
    Arrival, Carriage, Checksum, Config, Datagram, DatagramError, Departure, Event, Frame,
    ListenerId, Parts, Payload, Stack, TcpId, UdpId,
};
use quipu_inet::tcp::{self, MILLISECOND, Mode, Secret};
use quipu_wire::checksum::{Sum, sum};
use quipu_wire::{ethernet, ipv4, ipv6, tcp as wire};
use rand_core::{RngCore, SeedableRng};
use rand_pcg::Pcg64Mcg;

/// What the link does to a frame; chances are of a thousand.
#[derive(Clone, Copy, Debug, Default)]
pub struct Faults {
    pub lose: u64,
    pub repeat: u64,
    pub reorder: u64,
    /// One bit is turned.
    pub corrupt: u64,
    /// How much later a frame can be that is repeated or overtaken.
    pub jitter: u64,
}

/// A connection as its user sees it.
#[derive(Debug, Default)]
pub struct User {
    pub events: Vec<tcp::Event>,
    /// What was placed, by offset.
    pub received: Vec<u8>,
    pub contiguous: u64,
    /// Ends of messages, or of pushes.
    pub pushes: Vec<u64>,
    pub acked: u64,
    /// Room that is posted again after each delivery.
    pub room: u64,
    /// What it sends begins here in a pseudo-random stream; what it receives, here.
    salt: u64,
}

pub struct Host {
    pub stack: Stack,
    pub address: IpAddr,
    pub users: HashMap<TcpId, User>,
    pub accepted: Vec<TcpId>,
    pub notices: Vec<Event>,
    pub datagrams: Vec<(Datagram, Vec<u8>)>,
    /// Frames that have gone out: length, and of what size segments are.
    pub frames: Vec<(usize, Option<u16>)>,
    pub room: u64,
    message: bool,
}

pub struct Net {
    pub now: u64,
    pub hosts: [Host; 2],
    link: BTreeMap<(u64, u64), (usize, Vec<u8>, bool)>,
    pub delay: u64,
    pub mtu: u32,
    pub faults: Faults,
    /// Somewhere on the way is a link that takes less; what was too long for it.
    pub narrow: Option<usize>,
    pub too_long: Vec<Vec<u8>>,
    /// Everything that may be is marked CE (RFC 3168 5); IPv6 on a link of bare packets.
    pub mark: bool,
    pub carried: u64,
    /// The link carries joined segments as they are.
    pub joins: bool,
    rng: Pcg64Mcg,
    pub config: Arc<tcp::Config>,
}

pub fn octet(salt: u64, offset: u64) -> u8 {
    let mixed = (offset ^ salt.rotate_left(32)).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    (mixed >> 56) as u8
}

/// What a link does with a frame that it is to cut: headers as the stack has written them, with their own
/// lengths, numbers and checksums; PSH and FIN on the last only.
fn cut(frame: &[u8], departure: &Departure, size: u16) -> Vec<Vec<u8>> {
    // Ethernet, if the first octet is that of a station of ours.
    let ip = if frame[0] == STATION[0] { ethernet::HEADER } else { 0 };
    let v6 = frame[ip] >> 4 == 6;
    let tcp = ip + if v6 { ipv6::LEN } else { ipv4::LEN };
    let (headers, payload) = frame.split_at(departure.headers);
    let (repr, _) = wire::Repr::parse(&headers[tcp..]).expect("a legal header");
    assert!(!repr.flags.has(wire::Flags::CWR), "CWR belongs to the first only");
    let count = payload.len().div_ceil(usize::from(size));
    let pieces = payload.chunks(usize::from(size)).enumerate();
    let cut = pieces.map(|(n, piece)| {
        let mut frame = [headers, piece].concat();
        let len = (piece.len() + departure.headers - tcp) as u16;
        if v6 {
            let (repr, _) = ipv6::Repr::parse_quoted(&headers[ip..]).expect("a legal header");
            ipv6::Repr { payload_len: len, ..repr }.emit(&mut frame[ip..]);
        } else {
            let (repr, _) = ipv4::Repr::parse_quoted(&headers[ip..]).expect("a legal header");
            ipv4::Repr { payload_len: len, ..repr }.emit(&mut frame[ip..]);
        }
        let ends = wire::Flags::PSH.bits() | wire::Flags::FIN.bits();
        let bits = repr.flags.bits() & if n + 1 == count { !0 } else { !ends };
        let seq = repr.seq + (n * usize::from(size)) as u32;
        wire::Repr { seq, flags: wire::Flags::from_bits(bits), ..repr }.emit(&mut frame[tcp..]);
        let (from, to) = addresses(&headers[ip..]);
        let sum = Sum::of_pseudo_header(from, to, 6, usize::from(len)).partial();
        let at = tcp + wire::CHECKSUM_AT;
        frame[at..at + 2].copy_from_slice(&sum.to_be_bytes());
        Stack::seal(&mut frame, Checksum { start: tcp as u16, at: at as u16 });
        frame
    });
    cut.collect()
}

/// The addresses in an IP header.
fn addresses(header: &[u8]) -> (IpAddr, IpAddr) {
    match ipv6::Repr::parse_quoted(header) {
        Ok((ip, _)) => (ip.source.into(), ip.destination.into()),
        Err(_) => {
            let (ip, _) = ipv4::Repr::parse_quoted(header).expect("one or the other");
            (ip.source.into(), ip.destination.into())
        }
    }
}

/// The stream from one address and port to another.
fn salt(from: SocketAddr, to: SocketAddr) -> u64 {
    let bits = |ip| match ip {
        IpAddr::V4(ip) => u64::from(ip.to_bits()),
        IpAddr::V6(ip) => ip.to_bits() as u64,
    };
    let ports = u64::from(from.port()) << 16 | u64::from(to.port());
    bits(from.ip()).wrapping_mul(31) ^ bits(to.ip()).wrapping_mul(17) ^ ports.rotate_left(40)
}

/// The station of host 0; the other's ends in 2.
pub const STATION: [u8; 6] = [2, 0, 0, 0, 0, 1];

pub fn station(host: usize) -> [u8; 6] {
    [2, 0, 0, 0, 0, host as u8 + 1]
}

pub const V6: [&str; 2] = ["fd00::1", "fd00::2"];
pub const V4: [&str; 2] = ["10.0.0.1", "10.0.0.2"];

impl Host {
    fn new(config: Config) -> Self {
        Self {
            address: config.addresses[0].0,
            stack: Stack::new(config),
            users: HashMap::new(),
            accepted: Vec::new(),
            notices: Vec::new(),
            datagrams: Vec::new(),
            frames: Vec::new(),
            room: 1 << 20,
            message: false,
        }
    }

    /// Makes the user of a connection.
    pub fn adopt(&mut self, id: TcpId) {
        let flow = self.stack.flow(id).expect("it has just been made");
        let user = User { salt: salt(flow.local, flow.remote), room: self.room, ..User::default() };
        self.users.insert(id, user);
        self.stack.set_receive_space(id, self.room);
    }

    fn place(user: &mut User, offset: u64, payload: &[u8]) {
        let (from, to) = (offset as usize, offset as usize + payload.len());
        if user.received.len() < to {
            user.received.resize(to, 0);
        }
        user.received[from..to].copy_from_slice(payload);
    }

    fn take(&mut self, id: TcpId, received: &tcp::Received, frame: &[u8]) {
        let user = self.users.get_mut(&id).expect("a segment of a known connection");
        if let Some(placement) = &received.placement {
            let payload = &frame[placement.payload.clone()];
            Self::place(user, placement.offset, payload);
            if self.message && received.push {
                user.pushes.push(placement.offset + payload.len() as u64);
            }
        }
        if !self.message && received.push {
            user.pushes.push(received.contiguous);
        }
        while let Some(held) = self.stack.poll_held(id) {
            Self::place(user, held.offset, &held.payload);
            if held.end_of_message {
                user.pushes.push(held.offset + held.payload.len() as u64);
            }
        }
        assert!(received.contiguous >= user.contiguous, "a stream goes forward");
        user.contiguous = received.contiguous;
        self.stack.set_receive_space(id, user.room);
    }

    /// Takes a frame, which may have to be handled once more behind its events.
    fn hear_all(&mut self, bytes: &[u8], mut handle: impl FnMut(&mut Stack) -> Arrival) -> Arrival {
        let mut arrival = handle(&mut self.stack);
        self.hear(&arrival, bytes);
        if arrival == Arrival::Again {
            arrival = handle(&mut self.stack);
            assert_ne!(arrival, Arrival::Again, "once");
            self.hear(&arrival, bytes);
        }
        arrival
    }

    /// Takes what has come of a frame.
    fn hear(&mut self, arrival: &Arrival, bytes: &[u8]) {
        match arrival {
            Arrival::Nothing | Arrival::Again => {}
            Arrival::Segment { connection, received, reassembled } => {
                let whole = reassembled.then(|| self.stack.reassembled().to_vec());
                self.take(*connection, received, whole.as_deref().unwrap_or(bytes));
            }
            Arrival::Datagram(datagram) => {
                let payload = match &datagram.payload {
                    Payload::Frame(range) => bytes[range.clone()].to_vec(),
                    Payload::Reassembled => self.stack.reassembled().to_vec(),
                };
                self.datagrams.push((datagram.clone(), payload));
            }
        }
        self.poll_events();
    }

    pub fn poll_events(&mut self) {
        while let Some(event) = self.stack.poll_event() {
            match event {
                Event::Incoming { connection, .. } => {
                    self.adopt(connection);
                    self.accepted.push(connection);
                }
                Event::Tcp { connection, event: tcp::Event::Acked(offset) } => {
                    let user = self.users.get_mut(&connection).expect("known");
                    assert!(offset > user.acked, "news");
                    user.acked = offset;
                }
                Event::Tcp { connection, event } => {
                    self.users.get_mut(&connection).expect("known").events.push(event);
                }
                notice => self.notices.push(notice),
            }
        }
    }

    pub fn user(&self, id: TcpId) -> &User {
        &self.users[&id]
    }

    pub fn knows(&self, id: TcpId, event: tcp::Event) -> bool {
        self.users.get(&id).is_some_and(|user| user.events.contains(&event))
    }

    /// Writes the payload of a departure, and finishes the frame as a link without offload would.
    fn finish(&mut self, departure: &Departure, frame: &mut Vec<u8>, datagram: &[u8]) {
        let (start, len) = (departure.headers, departure.len());
        match departure.of {
            Some(id) if !departure.payload.is_empty() => {
                let salt = self.users[&id].salt;
                for (at, offset) in departure.payload.clone().enumerate() {
                    frame[start + at] = octet(salt, offset);
                }
            }
            _ => frame[start..len].copy_from_slice(datagram),
        }
        frame.truncate(len);
        self.frames.push((len, departure.segment));
    }
}

impl Net {
    /// Two stacks with these addresses.
    pub fn new(addresses: [&str; 2], mtu: u32, config: tcp::Config, seed: u64) -> Self {
        Self::with(mtu, config, seed, |host| {
            let address: IpAddr = addresses[host].parse().expect("an address");
            Config { mtu, ..Config::new(address, 24, Secret([seed, host as u64])) }
        })
    }

    /// The same on a link with stations.
    pub fn ethernet(addresses: [&str; 2], config: tcp::Config, seed: u64) -> Self {
        Self::with(1_500, config, seed, |host| {
            let address: IpAddr = addresses[host].parse().expect("an address");
            let config = Config::new(address, 24, Secret([seed, host as u64]));
            Config { hardware: Some(station(host)), ..config }
        })
    }

    pub fn with(mtu: u32, config: tcp::Config, seed: u64, of: impl Fn(usize) -> Config) -> Self {
        println!("seed {seed}");
        let mut hosts = [0, 1].map(|host| Host::new(of(host)));
        for host in &mut hosts {
            host.message = config.mode == Mode::Message;
        }
        Self {
            now: 1_000 * MILLISECOND,
            hosts,
            link: BTreeMap::new(),
            delay: 5 * MILLISECOND,
            mtu,
            faults: Faults::default(),
            narrow: None,
            too_long: Vec::new(),
            mark: false,
            carried: 0,
            joins: false,
            rng: Pcg64Mcg::seed_from_u64(seed),
            config: Arc::new(config),
        }
    }

    pub fn chance(&mut self, of_a_thousand: u64) -> bool {
        self.rng.next_u64() % 1000 < of_a_thousand
    }

    pub fn listen(&mut self, host: usize, port: u16, idle: u32) -> ListenerId {
        let stack = &mut self.hosts[host].stack;
        let (listener, got) = stack.listen(port, &self.config, 64).expect("the port is free");
        assert!(port == 0 || got == port);
        stack.set_idle(listener, idle);
        listener
    }

    pub fn connect(&mut self, from: usize, port: u16) -> TcpId {
        let to = SocketAddr::new(self.hosts[1 - from].address, port);
        let host = &mut self.hosts[from];
        let id = host.stack.connect(self.now, None, to, &self.config).expect("it can be tried");
        host.adopt(id);
        id
    }

    /// A connection from host 0 to a listener of host 1; both ends.
    pub fn pair(&mut self) -> [TcpId; 2] {
        self.listen(1, 80, 1);
        let client = self.connect(0, 80);
        let stands = self.run_until(400_000 * MILLISECOND, |net| {
            let accepted = net.hosts[1].accepted.last().copied();
            net.hosts[0].knows(client, tcp::Event::Connected)
                && accepted.is_some_and(|id| net.hosts[1].knows(id, tcp::Event::Connected))
        });
        assert!(stands, "{:?}", [&self.hosts[0].stack, &self.hosts[1].stack].map(Stack::counters));
        [client, self.hosts[1].accepted[0]]
    }

    pub fn send_datagram(
        &mut self,
        from: usize,
        socket: UdpId,
        to: SocketAddr,
        payload: &[u8],
    ) -> Result<(), DatagramError> {
        let mut frame = vec![0; 65_600];
        let host = &mut self.hosts[from];
        let plain = Carriage::default();
        let departure =
            host.stack.compose_datagram(self.now, socket, to, plain, payload.len(), &mut frame)?;
        host.finish(&departure, &mut frame, payload);
        self.carry(from, &departure, frame);
        Ok(())
    }

    /// Begins a datagram that is longer than a packet.
    pub fn cut(
        &mut self,
        from: usize,
        socket: UdpId,
        to: SocketAddr,
        payload: &[u8],
    ) -> Result<Parts, DatagramError> {
        let stack = &mut self.hosts[from].stack;
        let plain = Carriage::default();
        stack.cut_datagram(self.now, socket, to, plain, payload.len(), sum(payload))
    }

    /// Sends the next part of one; its frame.
    pub fn send_part(
        &mut self,
        from: usize,
        parts: &mut Parts,
        payload: &[u8],
    ) -> Result<Vec<u8>, DatagramError> {
        let mut frame = vec![0; 65_600];
        let host = &mut self.hosts[from];
        let departure = host.stack.compose_part(self.now, parts, &mut frame)?;
        assert_eq!(
            (departure.checksum, departure.of),
            (None, None),
            "a part has no sum of its own"
        );
        let [start, end] = [departure.payload.start, departure.payload.end].map(|it| it as usize);
        host.finish(&departure, &mut frame, &payload[start..end]);
        self.carry(from, &departure, frame.clone());
        Ok(frame)
    }

    /// Sends a datagram of any length at once; its frames.
    pub fn send_long(
        &mut self,
        from: usize,
        socket: UdpId,
        to: SocketAddr,
        payload: &[u8],
    ) -> Vec<Vec<u8>> {
        let mut parts = self.cut(from, socket, to, payload).unwrap();
        let mut frames = Vec::new();
        while !parts.is_done() {
            frames.push(self.send_part(from, &mut parts, payload).unwrap());
        }
        frames
    }

    /// Everything that a host has to send goes to the link.
    pub fn flush(&mut self, from: usize) {
        while self.hosts[from].stack.wants_transmit() {
            let mut frame = vec![0; 65_549 + 14];
            let host = &mut self.hosts[from];
            let Some(departure) = host.stack.poll_transmit(self.now, &mut frame) else { break };
            host.finish(&departure, &mut frame, &[]);
            self.carry(from, &departure, frame);
        }
    }

    fn carry(&mut self, from: usize, departure: &Departure, mut frame: Vec<u8>) {
        if departure.loops {
            let (now, host) = (self.now, &mut self.hosts[from]);
            host.hear_all(&frame, |stack| stack.handle_looped(now, &frame));
            return;
        }
        if let Some(checksum) = departure.checksum {
            Stack::seal(&mut frame, checksum);
        }
        match departure.segment {
            // A link that joins segments (GRO) hands over what its peer has not cut.
            Some(_) if self.joins => self.queue(1 - from, frame, true),
            Some(size) => cut(&frame, departure, size).into_iter().for_each(|frame| {
                self.put(1 - from, frame);
            }),
            None => self.put(1 - from, frame),
        }
    }

    fn put(&mut self, to: usize, frame: Vec<u8>) {
        if self.narrow.is_some_and(|narrow| frame.len() > narrow) {
            self.too_long.push(frame);
        } else if frame.len() <= self.mtu as usize + ethernet::HEADER {
            self.queue(to, frame, false);
        }
    }

    /// Puts a frame on the link.
    fn queue(&mut self, to: usize, mut frame: Vec<u8>, checked: bool) {
        self.carried += 1;
        if self.mark && frame[0] >> 4 == 6 && frame[1] & 0x30 == 0x20 {
            frame[1] |= 0x30;
        }
        if self.chance(self.faults.lose) {
            return;
        }
        if self.chance(self.faults.corrupt) {
            let bit = self.rng.next_u64() as usize % (frame.len() * 8);
            frame[bit / 8] ^= 1 << (bit % 8);
        }
        let mut at = self.now + self.delay;
        if self.chance(self.faults.reorder) {
            at += self.rng.next_u64() % self.faults.jitter.max(1);
        }
        let number = self.link.len() as u64 | self.carried << 20;
        if self.chance(self.faults.repeat) {
            let later = at + self.rng.next_u64() % self.faults.jitter.max(1);
            self.link.insert((later, number << 1), (to, frame.clone(), checked));
        }
        self.link.insert((at, number << 1 | 1), (to, frame, checked));
    }

    /// A frame comes to a host.
    pub fn arrive(&mut self, to: usize, bytes: &[u8], checked: bool) -> Arrival {
        let now = self.now;
        let frame = Frame { bytes, checked };
        self.hosts[to].hear_all(bytes, |stack| stack.handle_frame(now, &frame))
    }

    /// The next instant, if it is not after `end`; false if nothing will ever happen.
    fn step(&mut self, end: u64) -> bool {
        (0..2).for_each(|host| self.flush(host));
        let arrival = self.link.keys().next().map(|(at, _)| *at);
        let deadlines = self.hosts.iter().filter_map(|host| host.stack.poll_timeout());
        let Some(next) = deadlines.chain(arrival).min() else { return false };
        if next > end {
            self.now = end + 1;
            return true;
        }
        self.now = self.now.max(next);
        while let Some(entry) = self.link.first_entry() {
            if entry.key().0 > self.now {
                break;
            }
            let (to, frame, checked) = entry.remove();
            self.arrive(to, &frame, checked);
        }
        for host in 0..2 {
            self.hosts[host].stack.handle_timeout(self.now);
            self.hosts[host].poll_events();
            self.flush(host);
            let deadline = self.hosts[host].stack.poll_timeout();
            assert!(deadline.is_none_or(|at| at > self.now), "a deadline that is over");
        }
        true
    }

    /// Runs until `done`, for at most `limit` of simulated time; false if it never is.
    pub fn run_until(&mut self, limit: u64, mut done: impl FnMut(&mut Self) -> bool) -> bool {
        let end = self.now + limit;
        while !done(self) {
            if self.now > end || !self.step(end) {
                return done(self);
            }
        }
        true
    }

    /// Lets time pass.
    pub fn run(&mut self, time: u64) {
        let end = self.now + time;
        self.run_until(time, |_| false);
        self.now = self.now.max(end);
    }

    /// What host `to` has received on `id` is what the other has sent.
    pub fn check(&self, to: usize, id: TcpId, len: u64) {
        let flow = self.hosts[to].stack.flow(id).expect("it is there");
        let user = self.hosts[to].user(id);
        assert_eq!(user.contiguous, len, "all of the stream");
        let salt = salt(flow.remote, flow.local);
        let expected: Vec<u8> = (0..len).map(|offset| octet(salt, offset)).collect();
        assert!(user.received[..len as usize] == expected[..], "every octet");
    }
}
