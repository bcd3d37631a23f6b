//! Processes on a network that loses, duplicates, delays and reorders datagrams.

use std::collections::BTreeMap;
use std::net::SocketAddr;

use quipu_am::datagram::{DatagramFabric, Limits, Memory, Place, answer_lookup};
use quipu_am::{BundleId, Config, Core, Hello, Local, Name, Remote, Tag};
use rand_core::{RngCore, SeedableRng};
use rand_pcg::Pcg64Mcg;

pub const MS: u64 = 1_000_000;
pub const GIVE_UP: u64 = 5_000 * MS;
const DATAGRAM: usize = 1024;
const SLOT: usize = 20_480;

/// Faults of the network, each in a thousandth of all datagrams.
#[derive(Clone, Copy, Debug)]
pub struct Faults {
    pub loss: u64,
    pub duplicate: u64,
    /// Up to 20 ms later than others.
    pub late: u64,
}

impl Faults {
    pub fn is_any(&self) -> bool {
        self.loss + self.duplicate + self.late > 0
    }
}

/// The memory of a process: one region with the key 1.
pub struct Bytes(Vec<u8>);

impl Bytes {
    pub fn part(&self, addr: u64, len: u64) -> &[u8] {
        &self.0[addr as usize..(addr + len) as usize]
    }

    pub fn put(&mut self, addr: u64, bytes: &[u8]) {
        self.0[addr as usize..][..bytes.len()].copy_from_slice(bytes);
    }

    fn range(&self, (addr, len, key): (u64, u64, u32), offset: u64, n: usize) -> Option<usize> {
        let end = addr.checked_add(offset)?.checked_add(n as u64)?;
        let is_in = key == 1 && offset + n as u64 <= len && end <= self.0.len() as u64;
        is_in.then_some((addr + offset) as usize)
    }
}

impl Memory for Bytes {
    fn read(&self, from: Local, offset: u64, out: &mut [u8]) -> bool {
        self.read_shown(Remote { addr: from.addr, len: from.len, key: from.key }, offset, out)
    }

    fn read_shown(&self, from: Remote, offset: u64, out: &mut [u8]) -> bool {
        let Some(at) = self.range((from.addr, from.len, from.key), offset, out.len()) else {
            return false;
        };
        out.copy_from_slice(&self.0[at..at + out.len()]);
        true
    }

    fn write(&mut self, to: Local, offset: u64, bytes: &[u8]) -> bool {
        self.write_shown(Remote { addr: to.addr, len: to.len, key: to.key }, offset, bytes)
    }

    fn write_shown(&mut self, to: Remote, offset: u64, bytes: &[u8]) -> bool {
        let Some(at) = self.range((to.addr, to.len, to.key), offset, bytes.len()) else {
            return false;
        };
        self.0[at..at + bytes.len()].copy_from_slice(bytes);
        true
    }
}

pub struct Node {
    pub core: Core<DatagramFabric<Bytes>, u16>,
    pub bundle: Option<BundleId>,
    pub is_alive: bool,
    place: Place,
    /// The UDP port of an endpoint, and the name that its socket answers with.
    pub door: Option<(SocketAddr, Name)>,
    /// Datagrams that have come and were not read: as many as a socket keeps.
    inbox: Vec<(Place, Vec<u8>)>,
}

pub struct Network {
    pub nodes: Vec<Node>,
    pub now: u64,
    pub hash: u64,
    pub may_nap: bool,
    pub forges: bool,
    /// Something was sent or taken since the last step.
    pub is_busy: bool,
    rng: Pcg64Mcg,
    faults: Faults,
    queue: BTreeMap<(u64, u64), (usize, Place, Vec<u8>)>,
    serial: u64,
}

impl Network {
    pub fn new(seed: u64, count: usize, faults: Faults, config: &Config, memory: usize) -> Self {
        let make = |index: usize| {
            let address = SocketAddr::from(([10, 0, 0, 1], 1000 + index as u16));
            let incarnation = (seed + 1) << 16 | (index as u64) << 8 | 3;
            let limits = Limits {
                datagram: DATAGRAM,
                slot: SLOT,
                send_buffers: config.send_buffers,
                messages: 1024,
                reads: 4,
                give_up_ns: config.give_up_ns,
                seed: seed * 100 + index as u64,
            };
            let fabric = DatagramFabric::new(Bytes(vec![0; memory]), limits);
            let core = Core::new(fabric, config.clone(), address, incarnation).unwrap();
            let place = Place { ip: address.ip(), number: u32::from(address.port()) << 8 | 3 };
            Node { core, bundle: None, is_alive: true, place, door: None, inbox: Vec::new() }
        };
        Self {
            nodes: (0..count).map(make).collect(),
            now: 0,
            hash: 0,
            may_nap: true,
            forges: false,
            is_busy: true,
            rng: Pcg64Mcg::seed_from_u64(seed),
            faults,
            queue: BTreeMap::new(),
            serial: 0,
        }
    }

    pub fn random(&mut self, below: u64) -> u64 {
        if below == 2000 && !self.may_nap {
            return 1;
        }
        if below == 0 { 0 } else { self.rng.next_u64() % below }
    }

    fn carry(&mut self, to: usize, from: Place, bytes: Vec<u8>) {
        let Faults { loss, duplicate, late } = self.faults;
        if self.random(1000) < loss {
            return;
        }
        let copies = 1 + u64::from(self.random(1000) < duplicate);
        for _ in 0..copies {
            let is_late = self.random(1000) < late;
            let delay = 20_000 + if is_late { self.random(20 * MS) } else { 0 };
            self.serial += 1;
            self.queue.insert((self.now + delay, self.serial), (to, from, bytes.clone()));
        }
    }

    /// Sends what a process has to send.
    pub fn transmit(&mut self, n: usize) {
        let mut out = [0; DATAGRAM];
        let now = self.now;
        while let Some((to, len)) = self.nodes[n].core.fabric_mut().poll_transmit(now, &mut out) {
            let from = self.nodes[n].place;
            self.is_busy = true;
            if let Some(at) = to.socket() {
                self.ask(n, at, &out[..len]);
            }
            if let Some(to) = self.nodes.iter().position(|node| node.place == to) {
                self.carry(to, from, out[..len].to_vec());
                if self.forges && self.random(10) == 0 {
                    self.forge(to, from, &out[..len]);
                }
            }
        }
    }

    /// Has the socket at an address answer a question, unless the network loses it.
    fn ask(&mut self, n: usize, at: SocketAddr, question: &[u8]) {
        let is_lost = self.random(1000) < self.faults.loss;
        let doors = self.nodes.iter().filter(|node| node.is_alive && !is_lost);
        let own = doors.filter_map(|node| node.door).find(|door| door.0 == at);
        let answer = own.and_then(|(_, name)| answer_lookup(question, &name));
        if let Some(answer) = answer {
            assert!(answer.len() <= question.len(), "an answer is no longer than its question");
            self.carry(n, Place::of_socket(at), answer.to_vec());
        }
    }

    /// Sends a datagram that nobody has sent.
    fn forge(&mut self, to: usize, from: Place, model: &[u8]) {
        let mut bytes = model.to_vec();
        for _ in 0..1 + self.random(3) {
            let at = self.random(bytes.len() as u64) as usize;
            // The bytes of the payload are protected by the checksums of UDP only: they stay as they are.
            bytes[at.min(63)] = self.random(256) as u8;
        }
        let keep = self.random(2) * bytes.len() as u64 + self.random(60);
        bytes.truncate(keep as usize);
        let stranger = Place { number: 77, ..from };
        // A forger who does not know the numbers of a connection.
        let from = if self.random(2) == 0 { stranger } else { from };
        if from == stranger || bytes.get(8..24) != model.get(8..24) {
            self.carry(to, from, bytes);
        }
    }

    /// Has a process read a hello in the name of somebody, without a cookie.
    pub fn say_hello(&mut self, n: usize, from: &Name, to: &Name, tag: Tag, number: u64) {
        self.answer_challenge(n, Place::of(from), from, to, tag, (number, 0));
    }

    /// The same from any place, with a cookie.
    pub fn answer_challenge(
        &mut self,
        n: usize,
        place: Place,
        from: &Name,
        to: &Name,
        tag: Tag,
        (number, cookie): (u64, u64),
    ) {
        let mut bytes = vec![0x41, 0x75, 1, 0, 0, 0, 0, 0];
        bytes.extend(cookie.to_le_bytes());
        bytes.extend(number.to_le_bytes());
        bytes.extend([0; 12]);
        let (endpoint, incarnation) = (to.endpoint, to.incarnation);
        bytes.extend(Hello { from: *from, endpoint, incarnation, tag }.to_bytes());
        self.nodes[n].inbox.push((place, bytes));
        self.poll(n);
    }

    /// The next challenge that a process sends: where to, and the cookie. What else it sends is lost.
    pub fn challenge(&mut self, n: usize) -> Option<(Place, u64)> {
        let mut out = [0; DATAGRAM];
        let now = self.now;
        while let Some((to, _)) = self.nodes[n].core.fabric_mut().poll_transmit(now, &mut out) {
            if out[2] == 8 {
                return Some((to, u64::from_le_bytes(out[16..24].try_into().unwrap())));
            }
        }
        None
    }

    /// Has a process read a datagram from anywhere.
    pub fn deliver(&mut self, n: usize, from: Place, bytes: Vec<u8>) {
        self.nodes[n].inbox.push((from, bytes));
        self.poll(n);
    }

    /// Has a process read what has come, and the time.
    pub fn poll(&mut self, n: usize) {
        let now = self.now;
        let node = &mut self.nodes[n];
        for (from, bytes) in std::mem::take(&mut node.inbox) {
            node.core.fabric_mut().handle_datagram(now, from, &bytes);
        }
        node.core.fabric_mut().handle_timeout(now);
        let after = node.core.fabric().poll_timeout();
        assert!(after.is_none_or(|at| at > now), "a stale deadline");
        while let Some(event) = node.core.fabric_mut().poll_event() {
            node.core.handle_event(event);
        }
        node.core.handle_timeout(now);
    }

    /// Goes on for 10 us; where nothing was sent, to the next thing that happens, but 1 ms at most.
    pub fn step(&mut self) {
        let first = self.queue.first_key_value().map(|((time, _), _)| *time);
        let nodes = self.nodes.iter().filter(|node| node.is_alive);
        let timers = nodes.flat_map(|node| {
            let core = &node.core;
            [core.poll_timeout(), core.fabric().poll_timeout()].into_iter().flatten()
        });
        // The timers of a process that computes are late.
        let next = timers.chain(first).filter(|at| *at > self.now).min().unwrap_or(u64::MAX);
        let most = if std::mem::take(&mut self.is_busy) { 10_000 } else { MS };
        self.now = next.clamp(self.now + 10_000, self.now + most);
        while let Some((&(time, serial), _)) = self.queue.first_key_value() {
            if time > self.now {
                break;
            }
            let (to, from, bytes) = self.queue.remove(&(time, serial)).unwrap();
            self.hash = self.hash.wrapping_mul(0x100_0000_01b3) ^ time ^ serial;
            let node = &mut self.nodes[to];
            // A socket that nobody reads overflows.
            if node.is_alive && node.inbox.len() < 256 {
                node.inbox.push((from, bytes));
            }
        }
    }
}
