//! Two stacks and whoever is between them: frames are lost, repeated, kept back, changed (with a right
//! checksum, if they like) and made up, among calls of users who do what they like.
#![no_main]

#[allow(dead_code)]
#[path = "adapter/input.rs"]
mod input;
mod shares;
mod stranger;

use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use libfuzzer_sys::fuzz_target;
use quipu_inet::stack::{
    Arrival, Carriage, Config, DatagramError, Departure, Event, Frame, ListenerId, Offload,
    Payload, Stack, TcpId, UdpId,
};
use quipu_inet::tcp::{self, Mode, Secret};
use quipu_wire::checksum::{Sum, sum};
use quipu_wire::{ethernet, ipv4, ipv6};
use shares::Shares;
use stranger::Place;

static SHARES: Shares<6> = Shares::new([
    "a connection",
    "a segment with payload",
    "a datagram",
    "made up",
    "a stranger's connection",
    "reassembled",
]);

const MTU: u32 = 1_500;
/// Room that a user posts.
const ROOM: u64 = 1 << 16;
/// Connections of a stack.
const MOST: u32 = 32;

struct Input<'a>(&'a [u8]);

impl Input<'_> {
    fn byte(&mut self) -> Option<u8> {
        let (&byte, rest) = self.0.split_first()?;
        self.0 = rest;
        Some(byte)
    }

    fn number(&mut self) -> usize {
        usize::from(self.byte().unwrap_or(0)) << 8 | usize::from(self.byte().unwrap_or(0))
    }
}

/// A stack and what its user knows.
struct Host {
    stack: Stack,
    address: IpAddr,
    connections: Vec<TcpId>,
    listeners: Vec<ListenerId>,
    sockets: Vec<UdpId>,
    link: usize,
    segment: u32,
    /// The last frame that it has sent.
    sent: Vec<u8>,
}

/// Where the IP header and the upper layer of a frame of ours begin.
fn layers(link: usize, frame: &[u8]) -> Option<(usize, usize, u8)> {
    if link > 0 && frame[12..14] == ethernet::kind::ARP.to_be_bytes() {
        return None;
    }
    let ip = &frame[link..];
    Some(if ip[0] >> 4 == 6 {
        (link, link + ipv6::LEN, ip[6])
    } else {
        (link, link + ipv4::LEN, ip[9])
    })
}

/// Whether it is the address of neither host.
fn is_stranger(address: IpAddr) -> bool {
    let last = match address {
        IpAddr::V4(address) => address.octets()[3],
        IpAddr::V6(address) => address.octets()[15],
    };
    !(1..=2).contains(&last)
}

fn addresses(ip: &[u8]) -> (IpAddr, IpAddr) {
    let word = |at: usize| -> [u8; 16] { ip[at..at + 16].try_into().expect("16 octets") };
    let short = |at: usize| -> [u8; 4] { ip[at..at + 4].try_into().expect("4 octets") };
    if ip[0] >> 4 == 6 {
        (word(8).into(), word(24).into())
    } else {
        (short(12).into(), short(16).into())
    }
}

/// Where the checksum of a protocol stands.
fn checksum_at(protocol: u8) -> Option<usize> {
    match protocol {
        6 => Some(16),
        17 => Some(6),
        1 | 58 => Some(2),
        _ => None,
    }
}

fn pseudo(ip: &[u8], protocol: u8, len: usize) -> Sum {
    let (from, to) = addresses(ip);
    if protocol == 1 { Sum::default() } else { Sum::of_pseudo_header(from, to, protocol, len) }
}

/// Makes the checksum right again after a change.
fn reseal(link: usize, frame: &mut [u8]) {
    if frame.len() < link + ipv6::LEN + 8 {
        return;
    }
    let Some((ip, upper, protocol)) = layers(link, frame) else { return };
    if upper == link + ipv4::LEN {
        frame[ip + 10..ip + 12].fill(0);
        let value = sum(&frame[ip..upper]).checksum();
        frame[ip + 10..ip + 12].copy_from_slice(&value.to_be_bytes());
    }
    let Some(at) = checksum_at(protocol).map(|at| upper + at) else { return };
    if at + 2 > frame.len() {
        return;
    }
    frame[at..at + 2].fill(0);
    let others = pseudo(&frame[ip..], protocol, frame.len() - upper);
    let value = others.and(sum(&frame[upper..])).checksum();
    frame[at..at + 2].copy_from_slice(&value.to_be_bytes());
}

impl Host {
    fn new(host: usize, kind: u8) -> Self {
        let address: IpAddr = match kind & 1 {
            0 => std::net::Ipv6Addr::new(0xfd00, 0, 0, 0, 0, 0, 0, host as u16 + 1).into(),
            _ => [10, 0, 0, host as u8 + 1].into(),
        };
        let hardware = (kind & 2 != 0).then_some([2, 0, 0, 0, 0, host as u8 + 1]);
        let segment = if kind & 4 != 0 { 65_000 } else { 0 };
        let config = Config {
            hardware,
            mtu: MTU,
            offload: Offload { checksum: false, segment },
            max_connections: MOST,
            ..Config::new(address, 24, Secret([host as u64, 9]))
        };
        let link = if hardware.is_some() { ethernet::HEADER } else { 0 };
        Self {
            stack: Stack::new(config),
            address,
            connections: Vec::new(),
            listeners: Vec::new(),
            sockets: Vec::new(),
            link,
            segment,
            sent: Vec::new(),
        }
    }

    /// A frame as it goes to the link: it must be right in every respect.
    fn finish(&self, departure: &Departure, frame: &mut Vec<u8>) {
        frame.truncate(departure.len());
        frame[departure.headers..].fill(0x5a);
        if let Some(checksum) = departure.checksum {
            Stack::seal(frame, checksum);
        }
        let most = if departure.segment.is_some() { self.segment as usize + 200 } else { 1_500 };
        assert!(frame.len() <= most + self.link, "{departure:?}");
        let Some((ip, upper, protocol)) = layers(self.link, frame) else { return };
        if upper == self.link + ipv4::LEN {
            assert!(sum(&frame[ip..upper]).is_valid(), "the header's checksum");
        }
        // Reports of groups stand behind options.
        if protocol == 0 {
            return;
        }
        assert!(checksum_at(protocol).is_some(), "a protocol that is spoken here");
        let others = pseudo(&frame[ip..], protocol, frame.len() - upper);
        assert!(others.and(sum(&frame[upper..])).is_valid(), "the checksum: {departure:?}");
    }

    fn pick(&self, which: u8) -> Option<TcpId> {
        (!self.connections.is_empty())
            .then(|| self.connections[usize::from(which) % self.connections.len()])
    }

    fn poll_events(&mut self, generous: bool) {
        while let Some(event) = self.stack.poll_event() {
            match event {
                Event::Incoming { connection, .. } if generous => {
                    let peer = self.stack.flow(connection).map(|flow| flow.remote.ip());
                    if peer.is_some_and(is_stranger) {
                        SHARES.reach("a stranger's connection");
                    }
                    self.stack.set_receive_space(connection, ROOM);
                    self.connections.push(connection);
                }
                Event::Incoming { connection, .. } => self.stack.release(connection),
                Event::Tcp { connection, event } => {
                    if event == tcp::Event::Connected {
                        SHARES.reach("a connection");
                    }
                    assert!(self.stack.connection(connection).is_some(), "events of the living");
                }
                _ => {}
            }
        }
        let stack = &self.stack;
        self.connections.retain(|id| stack.connection(*id).is_some());
        assert!(self.connections.len() <= MOST as usize);
        assert!(stack.memory() < 8 << 20, "{}", stack.memory());
    }

    fn arrive(&mut self, now: u64, frame: &[u8], checked: bool) {
        self.arrive_by(frame, |stack| stack.handle_frame(now, &Frame { bytes: frame, checked }));
    }

    /// The frame that completes a handshake, and has more, comes twice; others do not.
    fn arrive_by(&mut self, frame: &[u8], handle: impl Fn(&mut Stack) -> Arrival) {
        let mut arrival = handle(&mut self.stack);
        if arrival == Arrival::Again {
            self.poll_events(true);
            arrival = handle(&mut self.stack);
            assert_ne!(arrival, Arrival::Again);
        }
        self.take(arrival, frame);
    }

    fn take(&mut self, arrival: Arrival, frame: &[u8]) {
        match arrival {
            Arrival::Nothing | Arrival::Again => {}
            Arrival::Segment { connection, received, reassembled } => {
                if reassembled {
                    SHARES.reach("reassembled");
                }
                let whole = if reassembled { self.stack.reassembled() } else { frame };
                let placed = received.placement.map(|placement| {
                    SHARES.reach("a segment with payload");
                    assert!(!whole[placement.payload].is_empty());
                });
                assert!(placed.is_none() || self.stack.connection(connection).is_some());
                while let Some(held) = self.stack.poll_held(connection) {
                    assert!(held.payload.len() <= frame.len().max(65_535));
                }
                self.stack.set_receive_space(connection, ROOM);
            }
            Arrival::Datagram(datagram) => match datagram.payload {
                Payload::Frame(range) => {
                    SHARES.reach("a datagram");
                    assert!(range.end <= frame.len());
                }
                Payload::Reassembled => {
                    SHARES.reach("reassembled");
                    assert!(self.stack.reassembled().len() <= 65_535);
                }
            },
        }
    }

    /// A call of the user.
    fn call(&mut self, now: u64, peer: IpAddr, config: &Arc<tcp::Config>, input: &mut Input<'_>) {
        let (what, which) = (input.byte().unwrap_or(0), input.byte().unwrap_or(0));
        let id = self.pick(which);
        let listener = self.listeners.get(usize::from(which) % 4).copied();
        let port = 80 + u16::from(which % 4);
        match (what % 16, id, listener) {
            (0, ..) => {
                let local = (which & 64 != 0).then_some(port);
                let to = SocketAddr::new(peer, port);
                if let Ok(id) = self.stack.connect(now, local, to, config) {
                    self.stack.set_receive_space(id, ROOM);
                    self.connections.push(id);
                }
            }
            (1, ..) => {
                if let Ok((listener, _)) = self.stack.listen(port, config, u32::from(which >> 6)) {
                    self.stack.set_idle(listener, 4);
                    self.listeners.push(listener);
                }
            }
            (2, _, Some(listener)) => self.stack.set_idle(listener, u32::from(which)),
            (3, _, Some(listener)) => {
                self.stack.unlisten(listener);
                self.listeners.retain(|it| *it != listener);
            }
            (4..=7, Some(id), _) => {
                let _ = self.stack.send(id, input.number() as u64, what & 16 != 0);
            }
            (8, Some(id), _) => self.stack.set_receive_space(id, input.number() as u64),
            (9, Some(id), _) => self.stack.close(id),
            (10, Some(id), _) => self.stack.abort(id),
            (11, Some(id), _) => self.stack.release(id),
            (12, ..) => {
                if let Ok((socket, _)) = self.stack.bind(port) {
                    self.sockets.push(socket);
                }
            }
            (13, ..) => {
                if let Some(socket) = self.sockets.pop() {
                    self.stack.unbind(socket);
                }
            }
            _ => {}
        }
    }
}

/// The link, and whoever sits on it.
struct World {
    now: u64,
    hosts: [Host; 2],
    link: Vec<(usize, Vec<u8>)>,
}

impl World {
    /// Everything that a host has to send.
    fn flush(&mut self, host: usize) {
        if !self.hosts[host].stack.wants_transmit() {
            return;
        }
        let mut out = vec![0; 65_600];
        let mut frames = 0;
        while self.hosts[host].stack.wants_transmit() {
            let Some(departure) = self.hosts[host].stack.poll_transmit(self.now, &mut out) else {
                break;
            };
            let mut frame = out[..departure.len()].to_vec();
            self.hosts[host].finish(&departure, &mut frame);
            self.carry(host, &departure, frame);
            frames += 1;
            assert!(frames < 20_000, "no end");
        }
        assert!(!self.hosts[host].stack.wants_transmit());
    }

    fn carry(&mut self, from: usize, departure: &Departure, frame: Vec<u8>) {
        if departure.loops {
            let now = self.now;
            self.hosts[from].arrive_by(&frame, |stack| stack.handle_looped(now, &frame));
            self.hosts[from].poll_events(true);
        } else if self.link.len() < 64 {
            self.hosts[from].sent.clone_from(&frame);
            self.link.push((1 - from, frame));
        }
    }

    /// A frame of a third party for a host.
    fn make_up(&mut self, to: usize, input: &mut Input<'_>) {
        SHARES.reach("made up");
        let checked = input.byte().unwrap_or(0) & 1 != 0;
        let place = Place {
            own: self.hosts[to].address,
            other: self.hosts[1 - to].address,
            station: (self.hosts[to].link > 0).then_some([2, 0, 0, 0, 0, to as u8 + 1]),
            sent: &self.hosts[to].sent,
        };
        let mut rest = input::Input(input.0);
        let frame = place.frame(&mut rest);
        input.0 = rest.0;
        self.hosts[to].arrive(self.now, &frame, checked);
    }

    /// Sends a datagram that is longer than a packet. Anything may happen between its parts.
    fn send_in_parts(
        &mut self,
        from: usize,
        socket: UdpId,
        to: SocketAddr,
        len: usize,
        input: &mut Input<'_>,
    ) {
        let payload = sum(&vec![0x5a; len]);
        let stack = &mut self.hosts[from].stack;
        let plain = Carriage::default();
        let Ok(mut parts) = stack.cut_datagram(self.now, socket, to, plain, len, payload) else {
            return;
        };
        let (mut written, mut out) = (0, vec![0; 65_600]);
        while !parts.is_done() {
            let stack = &mut self.hosts[from].stack;
            let Ok(departure) = stack.compose_part(self.now, &mut parts, &mut out) else {
                return;
            };
            assert_eq!(departure.payload.start, written, "in order, and nothing twice");
            written = departure.payload.end;
            let mut frame = out[..departure.len()].to_vec();
            frame[departure.headers..].fill(0x5a);
            assert!(frame.len() <= MTU as usize + self.hosts[from].link, "{departure:?}");
            self.carry(from, &departure, frame);
            if let Some(how) = input.byte().filter(|how| how & 0x80 != 0) {
                self.deliver(how, input);
            }
        }
        assert_eq!(written, len as u64);
    }

    fn deliver(&mut self, how: u8, input: &mut Input<'_>) {
        if self.link.is_empty() {
            return;
        }
        let at = usize::from(input.byte().unwrap_or(0)) % self.link.len();
        let (to, mut frame) = match how % 8 {
            // Again and again, one of them.
            7 => self.link[at].clone(),
            // The oldest, mostly.
            0..=4 => self.link.remove(0),
            _ => self.link.remove(at),
        };
        if how & 8 != 0 {
            let links = self.hosts[to].link;
            for _ in 0..1 + how % 3 {
                // The headers, mostly.
                let at = links + input.number() % 90;
                if let Some(octet) = frame.get_mut(at) {
                    *octet = input.byte().unwrap_or(0);
                }
            }
            if how & 16 != 0 && frame.len() > links {
                reseal(links, &mut frame);
            }
        }
        if how & 32 != 0 {
            frame.truncate(input.number());
        }
        self.hosts[to].arrive(self.now, &frame, how & 64 != 0);
    }

    /// Time goes on, to the next deadline or beyond.
    fn pass(&mut self, more: u64) {
        let deadlines = self.hosts.iter().filter_map(|host| host.stack.poll_timeout());
        let next = deadlines.min().unwrap_or(0);
        self.now = self.now.max(next.min(self.now + 400_000_000_000)) + more;
        for host in 0..2 {
            // What has arrived since the last flush may have set timers that ran out meanwhile.
            let over = (0..2).all(|_| self.wake(host));
            assert!(!over, "a deadline that is over");
        }
    }

    /// Says whether there is still a deadline that is over.
    fn wake(&mut self, host: usize) -> bool {
        self.hosts[host].stack.handle_timeout(self.now);
        self.hosts[host].poll_events(true);
        self.flush(host);
        self.hosts[host].stack.poll_timeout().is_some_and(|at| at <= self.now)
    }
}

fuzz_target!(|input: &[u8]| {
    SHARES.begin();
    let mut input = Input(input);
    let kind = input.byte().unwrap_or(0);
    let mode = if kind & 8 != 0 { Mode::Message } else { Mode::Stream };
    let config = Arc::new(tcp::Config {
        mode,
        receive_mss: u16::MAX,
        path_mss: u16::MAX,
        max_messages: 64,
        ..tcp::Config::default()
    });
    let hosts = [Host::new(0, kind), Host::new(1, kind)];
    let mut world = World { now: 1_000_000_000, hosts, link: Vec::new() };
    world.pass(0);
    let addresses = [0, 1].map(|host: usize| world.hosts[host].address);
    // Something to begin with, unless they do without.
    if kind & 16 == 0 {
        let stack = &mut world.hosts[1].stack;
        let (listener, _) = stack.listen(80, &config, 8).expect("a free port");
        stack.set_idle(listener, 8);
        let to = SocketAddr::new(addresses[1], 80);
        let id = world.hosts[0].stack.connect(world.now, None, to, &config).expect("a free port");
        world.hosts[0].stack.set_receive_space(id, ROOM);
        world.hosts[0].connections.push(id);
        for _ in 0..12 {
            (0..2).for_each(|host| world.flush(host));
            world.deliver(0, &mut Input(&[]));
            (0..2).for_each(|host| world.hosts[host].poll_events(true));
        }
    }
    // And one of a stranger, who says SYN and then answers.
    if kind & 0x30 == 0 {
        world.make_up(1, &mut Input(&[1, 2, 7]));
        world.flush(1);
        world.make_up(1, &mut Input(&[1, 3, 7]));
        world.hosts[1].poll_events(true);
    }
    while let Some(what) = input.byte() {
        let host = usize::from(what >> 7);
        // Somebody else, or itself.
        let peer = addresses[if what & 32 == 0 { 1 - host } else { host }];
        match what % 8 {
            0..=2 => {
                let how = input.byte().unwrap_or(0);
                world.deliver(how, &mut input);
            }
            3 | 4 => world.hosts[host].call(world.now, peer, &config, &mut input),
            5 => {
                let more = input.number() as u64 * 10_000;
                world.pass(more);
            }
            6 => {
                let (len, mut frame) = (input.number() % 9_000, vec![0; 65_600]);
                let to = SocketAddr::new(peer, 80 + u16::from(what >> 4 & 3));
                if let Some(socket) = world.hosts[host].sockets.first().copied() {
                    let stack = &mut world.hosts[host].stack;
                    let plain = Carriage::default();
                    let sent =
                        stack.compose_datagram(world.now, socket, to, plain, len, &mut frame);
                    if let Ok(departure) = sent {
                        world.hosts[host].finish(&departure, &mut frame);
                        world.carry(host, &departure, frame);
                    } else if let Err(DatagramError::Long { .. }) = sent {
                        world.send_in_parts(host, socket, to, len, &mut input);
                    }
                }
            }
            _ if what & 8 == 0 => world.make_up(host, &mut input),
            _ => drop((!world.link.is_empty()).then(|| world.link.remove(0))),
        }
        (0..2).for_each(|host| world.hosts[host].poll_events(what & 64 == 0));
        world.flush(host);
    }
    // Whatever has happened, time brings everything to rest.
    for host in &mut world.hosts {
        let ids = std::mem::take(&mut host.connections);
        ids.into_iter().for_each(|id| host.stack.release(id));
    }
    for _ in 0..10_000 {
        world.pass(0);
        world.link.clear();
        let quiet = |host: &Host| {
            host.stack.poll_timeout().is_none_or(|at| at > world.now + 1_000_000_000_000)
        };
        if world.hosts.iter().all(quiet) {
            return;
        }
    }
    panic!("it does not come to rest");
});
