//! Nodes on a network whose messages take time: loss makes them late, and death ends them.

use std::collections::{BTreeMap, HashMap, VecDeque};

use quipu_am::memory_lanes::{MemoryLanes, SharedLanes};
use quipu_am::{BundleId, ConnId, Core, Delivery, Event, FromLane, Hello, Name, Refusal, Welcome};
use rand_core::RngCore;
use rand_pcg::Pcg64Mcg;

use crate::fabric::{Post, SimFabric};

/// What handlers are to the test: their indices.
pub type Engine = Core<SimFabric, u16>;

const US: u64 = 1000;
/// How long it takes until the loss of a node is known.
const DETECTED: u64 = 50_000 * US;

/// A connection of the network: its two ends, each a node and that node's number of it.
#[derive(Clone, Copy, Debug)]
struct Pipe {
    ends: [(usize, Option<ConnId>); 2],
    is_open: bool,
    /// When the last thing that was sent each way arrives: it is not overtaken.
    last: [u64; 2],
}

/// What arrives.
#[derive(Debug)]
enum Arrival {
    Hello { pipe: usize, hello: Hello },
    Welcome { pipe: usize, welcome: Welcome },
    Refused { node: usize, conn: ConnId, why: Refusal },
    Message { pipe: usize, to: usize, bytes: Vec<u8> },
    Write { pipe: usize, to: usize, from: (u64, u64), addr: u64 },
    Done { pipe: usize, to: usize, notify: u64 },
    Read { pipe: usize, to: usize, into: u64, addr: u64, len: u64, notify: u64 },
    Broken { pipe: usize, to: usize },
    Buffer { pipe: usize, to: usize, buffer: u32, len: usize },
}

/// The nodes and what is between them.
pub struct Network {
    pub lanes: SharedLanes,
    pub nodes: Vec<Engine>,
    pub is_alive: Vec<bool>,
    pub now: u64,
    rng: Pcg64Mcg,
    /// One arrival in so many is late, as if it had been lost at first; 0 for none.
    pub loss: u32,
    pipes: Vec<Pipe>,
    by_conn: HashMap<(usize, u64), usize>,
    queue: BTreeMap<(u64, u64), Arrival>,
    serial: u64,
    ports: HashMap<u16, usize>,
    /// Sums up all that happened, in order.
    pub hash: u64,
    /// The bundle of each node, and what was given out for it with an event.
    pub bundles: Vec<BundleId>,
    given: Vec<VecDeque<Box<Delivery<u16>>>>,
}

impl Network {
    pub fn new(mut nodes: Vec<Engine>, ports: &[u16], rng: Pcg64Mcg, loss: u32) -> Self {
        let lanes = SharedLanes::default();
        for node in &mut nodes {
            node.fabric_mut().lanes = MemoryLanes::new(lanes.clone());
        }
        Self {
            lanes,
            is_alive: vec![true; nodes.len()],
            given: nodes.iter().map(|_| VecDeque::new()).collect(),
            bundles: Vec::new(),
            nodes,
            now: 0,
            rng,
            loss,
            pipes: Vec::new(),
            by_conn: HashMap::new(),
            queue: BTreeMap::new(),
            serial: 0,
            ports: ports.iter().enumerate().map(|(node, port)| (*port, node)).collect(),
            hash: 0,
        }
    }

    pub fn random(&mut self, below: u32) -> u32 {
        if below == 0 { 0 } else { self.rng.next_u32() % below }
    }

    fn delay(&mut self) -> u64 {
        let late = self.loss > 0 && self.random(self.loss) == 0;
        let base = u64::from(self.random(20)) + 1;
        (base + if late { 2000 } else { 0 }) * US
    }

    fn at(&mut self, time: u64, arrival: Arrival) {
        self.serial += 1;
        self.queue.insert((time, self.serial), arrival);
    }

    /// Over a pipe, after everything that was sent that way before.
    fn over(&mut self, pipe: usize, side: usize, arrival: Arrival) {
        let time = (self.now + self.delay()).max(self.pipes[pipe].last[side]);
        self.pipes[pipe].last[side] = time;
        self.at(time, arrival);
    }

    /// The pipe of a connection, and which side a node is.
    fn pipe_of(&self, node: usize, conn: ConnId) -> Option<(usize, usize)> {
        let pipe = *self.by_conn.get(&(node, conn.to_u64()))?;
        let side = usize::from(self.pipes[pipe].ends[0] != (node, Some(conn)));
        self.pipes[pipe].is_open.then_some((pipe, side))
    }

    /// Carries out what a node has posted.
    pub fn take_posts(&mut self, node: usize) {
        let posts = std::mem::take(&mut self.nodes[node].fabric_mut().posts);
        if !self.is_alive[node] {
            return;
        }
        for post in posts {
            self.carry_out(node, post);
        }
    }

    fn carry_out(&mut self, node: usize, post: Post) {
        match post {
            Post::Connect { conn, to, hello } => self.connect(node, conn, &to, hello),
            Post::Accept { incoming, conn, welcome } => {
                let pipe = incoming as usize;
                self.pipes[pipe].ends[1].1 = Some(conn);
                self.by_conn.insert((node, conn.to_u64()), pipe);
                self.over(pipe, 1, Arrival::Welcome { pipe, welcome });
            }
            Post::Reject { incoming, why } => {
                let (node, conn) = self.pipes[incoming as usize].ends[0];
                self.pipes[incoming as usize].is_open = false;
                if let Some(conn) = conn {
                    let time = self.now + self.delay();
                    self.at(time, Arrival::Refused { node, conn, why: Refusal::Said(why) });
                }
            }
            Post::Close { conn } => {
                if let Some((pipe, side)) = self.pipe_of(node, conn) {
                    self.pipes[pipe].is_open = false;
                    let time = self.now + self.delay();
                    self.at(time, Arrival::Broken { pipe, to: 1 - side });
                }
            }
            Post::Send { conn, bytes, notify } => {
                let Some((pipe, side)) = self.pipe_of(node, conn) else { return };
                self.over(pipe, side, Arrival::Message { pipe, to: 1 - side, bytes });
                self.acknowledge(pipe, side, notify);
            }
            Post::SendBuffer { conn, buffer, len, notify } => {
                let Some((pipe, side)) = self.pipe_of(node, conn) else { return };
                self.over(pipe, side, Arrival::Buffer { pipe, to: 1 - side, buffer, len });
                self.acknowledge(pipe, side, Some(notify));
            }
            Post::Write { conn, from, to, notify } => {
                let Some((pipe, side)) = self.pipe_of(node, conn) else { return };
                let (from, addr) = ((from.addr, from.len), to.addr);
                self.over(pipe, side, Arrival::Write { pipe, to: 1 - side, from, addr });
                self.acknowledge(pipe, side, notify);
            }
            Post::WriteNow { conn, from, to } => {
                let Some((pipe, side)) = self.pipe_of(node, conn) else { return };
                let bytes = self.nodes[node].fabric_mut().part(from.addr, from.len).to_vec();
                let (there, _) = self.pipes[pipe].ends[1 - side];
                self.nodes[there].fabric_mut().part(to.addr, to.len).copy_from_slice(&bytes);
            }
            Post::Read { conn, into, from, notify } => {
                let Some((pipe, side)) = self.pipe_of(node, conn) else { return };
                let (into, addr, len) = (into.addr, from.addr, from.len);
                let to = 1 - side;
                self.over(pipe, side, Arrival::Read { pipe, to, into, addr, len, notify });
            }
        }
    }

    fn connect(&mut self, node: usize, conn: ConnId, to: &Name, hello: Hello) {
        let time = self.now + self.delay();
        let there = self.ports.get(&to.port.port()).copied().filter(|there| self.is_alive[*there]);
        let Some(there) = there else {
            return self.at(time, Arrival::Refused { node, conn, why: Refusal::Absent });
        };
        let pipe = self.pipes.len();
        let ends = [(node, Some(conn)), (there, None)];
        self.pipes.push(Pipe { ends, is_open: true, last: [0; 2] });
        self.by_conn.insert((node, conn.to_u64()), pipe);
        self.at(time, Arrival::Hello { pipe, hello });
    }

    /// What was posted is done when it has arrived, and the sender has heard of that.
    fn acknowledge(&mut self, pipe: usize, side: usize, notify: Option<u64>) {
        if let Some(notify) = notify {
            let time = self.pipes[pipe].last[side] + self.delay();
            self.at(time, Arrival::Done { pipe, to: side, notify });
        }
    }

    /// Ends a node, as a signal would.
    pub fn kill(&mut self, node: usize) {
        self.is_alive[node] = false;
        self.nodes[node].fabric_mut().posts.clear();
        for pipe in 0..self.pipes.len() {
            let Pipe { ends, is_open, .. } = self.pipes[pipe];
            if let (true, Some(side)) = (is_open, ends.iter().position(|end| end.0 == node)) {
                let time = self.now + DETECTED;
                self.at(time, Arrival::Broken { pipe, to: 1 - side });
            }
        }
    }

    /// Goes on to the next arrival that is not later than `until`; whether there was one.
    pub fn step(&mut self, until: u64) -> bool {
        let Some((&(time, serial), _)) = self.queue.first_key_value() else {
            self.now = self.now.max(until);
            return false;
        };
        if time > until {
            self.now = self.now.max(until);
            return false;
        }
        self.now = self.now.max(time);
        if let Some(arrival) = self.queue.remove(&(time, serial)) {
            self.hash = self.hash.wrapping_mul(0x100_0000_01b3) ^ time ^ serial;
            self.arrive(arrival);
        }
        true
    }

    fn end_of(&self, pipe: usize, to: usize) -> Option<(usize, ConnId)> {
        let (node, conn) = self.pipes[pipe].ends[to];
        (self.is_alive[node]).then_some((node, conn?))
    }

    fn event(&mut self, node: usize, event: Event) {
        if self.is_alive[node] {
            if let Event::Done { conn, notify } = event
                && notify >> 56 > 1
            {
                self.nodes[node].fabric_mut().lanes.count_done(conn);
            }
            // Half of the messages go to their handlers at once, as far as these may run.
            match self.bundles.get(node).copied() {
                Some(bundle) if self.random(2) == 0 => {
                    let delivery = self.nodes[node].deliver_event(bundle, event);
                    self.given[node].extend(delivery);
                }
                _ => self.nodes[node].handle_event(event),
            }
            self.take_posts(node);
        }
    }

    /// The next message of a node whose handler may run.
    pub fn next_delivery(&mut self, node: usize) -> Option<Box<Delivery<u16>>> {
        let (bundle, engine) = (self.bundles[node], &mut self.nodes[node]);
        if let Some(delivery) =
            self.given[node].pop_front().or_else(|| engine.next_delivery(bundle))
        {
            return Some(delivery);
        }
        engine.fabric_mut().lanes.disarm();
        let found = loop {
            match engine.take_from_lane(bundle) {
                FromLane::Taken => {}
                FromLane::Run(delivery) => break Some(delivery),
                FromLane::Nothing | FromLane::Waits => break engine.next_delivery(bundle),
            }
        };
        if found.is_none() && self.random(3) == 0 {
            // What is to be noticed after a while has been noticed if this says that nothing is there.
            let _ = self.nodes[node].arm_lanes(2);
        }
        self.take_posts(node);
        found
    }

    /// A message lies down in the next slot. That there is one is what credits are for.
    fn receive(&mut self, node: usize, conn: ConnId, bytes: Vec<u8>) {
        let len = bytes.len();
        let fabric = self.nodes[node].fabric_mut();
        let slot = fabric.posted.pop_front().expect("a receive for every message");
        fabric.slots[slot as usize] = bytes;
        self.event(node, Event::Received { conn: Some(conn), slot, len });
    }

    fn arrive(&mut self, arrival: Arrival) {
        match arrival {
            Arrival::Hello { pipe, hello } => {
                let (node, _) = self.pipes[pipe].ends[1];
                if self.pipes[pipe].is_open && self.is_alive[node] {
                    self.event(node, Event::Incoming { incoming: pipe as u64, hello });
                } else if let Some((node, conn)) = self.end_of(pipe, 0) {
                    self.event(node, Event::Refused { conn, why: Refusal::Absent });
                }
            }
            Arrival::Welcome { pipe, welcome } => {
                if let Some((node, conn)) = self.end_of(pipe, 0) {
                    self.event(node, Event::Connected { conn, welcome });
                }
            }
            Arrival::Refused { node, conn, why } => self.event(node, Event::Refused { conn, why }),
            Arrival::Message { pipe, to, bytes } => {
                if let Some((node, conn)) =
                    self.end_of(pipe, to).filter(|_| self.pipes[pipe].is_open)
                {
                    self.receive(node, conn, bytes);
                }
            }
            Arrival::Buffer { pipe, to, buffer, len } => {
                let (from, _) = self.pipes[pipe].ends[1 - to];
                let bytes = self.nodes[from].fabric().buffers[buffer as usize][..len].to_vec();
                if let Some((node, conn)) =
                    self.end_of(pipe, to).filter(|_| self.pipes[pipe].is_open)
                {
                    self.receive(node, conn, bytes);
                }
            }
            Arrival::Write { pipe, to, from: (from, len), addr } => {
                let (source, _) = self.pipes[pipe].ends[1 - to];
                let bytes = self.nodes[source].fabric_mut().part(from, len).to_vec();
                if let Some((node, _)) = self.end_of(pipe, to).filter(|_| self.pipes[pipe].is_open)
                {
                    self.nodes[node].fabric_mut().part(addr, len).copy_from_slice(&bytes);
                }
            }
            Arrival::Read { pipe, to, into, addr, len, notify } => {
                let here = self.end_of(pipe, 1 - to);
                let there = self.end_of(pipe, to).filter(|_| self.pipes[pipe].is_open);
                if let (Some((node, conn)), Some((there, _))) = (here, there) {
                    let bytes = self.nodes[there].fabric_mut().part(addr, len).to_vec();
                    self.nodes[node].fabric_mut().part(into, len).copy_from_slice(&bytes);
                    self.event(node, Event::Done { conn, notify });
                }
            }
            Arrival::Done { pipe, to, notify } => {
                let flows =
                    self.pipes[pipe].is_open && self.is_alive[self.pipes[pipe].ends[1 - to].0];
                if let Some((node, conn)) = self.end_of(pipe, to).filter(|_| flows) {
                    self.event(node, Event::Done { conn, notify });
                }
            }
            Arrival::Broken { pipe, to } => {
                self.pipes[pipe].is_open = false;
                if let Some((node, conn)) = self.end_of(pipe, to) {
                    self.event(node, Event::Failed { conn });
                }
            }
        }
    }

    /// A message that one node forges arrives at another, over a connection that both have.
    pub fn forge(&mut self, to: usize, by: usize, bytes: Vec<u8>) {
        let between = |pipe: &&Pipe| {
            let ends = pipe.ends.map(|end| end.0);
            pipe.is_open && (ends == [to, by] || ends == [by, to])
        };
        let found = self.pipes.iter().rev().find(between).copied();
        let conn = found.and_then(|pipe| pipe.ends.iter().find(|end| end.0 == to)?.1);
        if let Some(conn) = conn {
            // A queue pair would hold it back where there is no receive.
            if !self.nodes[to].fabric().posted.is_empty() {
                self.receive(to, conn, bytes);
            }
        }
    }
}
