//! Active Messages in simulated time: seeds draw nodes, traffic, delays and deaths, and an oracle
//! checks that each request ends once, with a reply or by coming back; that its handler runs at
//! most once, and at least once if the reply arrives; that handlers of a bundle or of an endpoint
//! do not overlap; that memory is bounded; and that all of it comes to an end.

mod barrier;
mod fabric;
mod network;

use std::collections::HashMap;

use quipu_am::{
    Arg, Body, CallError, Config, Delivery, DeliveryKind, EndpointId, Local, Mode, Name, Outgoing,
    Payload, Remote, Replied, Sent, Status, Tag, Ticket,
};
use rand_core::SeedableRng;
use rand_pcg::Pcg64Mcg;

use fabric::SimFabric;
use network::{Engine, Network};

const TAG: Tag = Tag(77);
const MS: u64 = 1_000_000;
const REQUEST: u16 = 1;
const REPLY: u16 = 2;
const GOT: u16 = 3;
/// Bytes of a segment, which the sources of bulk messages follow in memory.
const SEGMENT: u64 = 4096;
const SOURCES: u64 = 64;
const SOURCE: u64 = 64;

/// What a run is like.
#[derive(Clone, Debug)]
struct Plan {
    seed: u64,
    nodes: usize,
    endpoints: usize,
    requests: u32,
    mode: Mode,
    config: Config,
    loss: u32,
    /// Nodes that die.
    deaths: usize,
    /// Nodes that do not poll for long.
    sleepers: usize,
}

/// What the oracle knows of a request.
#[derive(Default)]
struct Fate {
    executed: u32,
    replied: u32,
    returned: u32,
}

struct Run {
    plan: Plan,
    net: Network,
    endpoints: Vec<Vec<EndpointId>>,
    fates: HashMap<(i32, i32), Fate>,
    next: Vec<i32>,
    /// Handlers that run now, and until when.
    running: Vec<(usize, u64, Box<Delivery<u16>>)>,
    asleep_until: Vec<u64>,
    /// Bulk sources in use: the node, the place, and the request.
    sources: Vec<(usize, u64, Ticket)>,
    slots_most: usize,
}

/// The bytes that belong to a request.
fn pattern(node: i32, number: i32, len: usize) -> Vec<u8> {
    (0..len).map(|at| (node * 31 + number * 7 + at as i32) as u8).collect()
}

impl Run {
    fn new(plan: Plan) -> Self {
        let rng = Pcg64Mcg::seed_from_u64(plan.seed);
        let ports: Vec<u16> = (0..plan.nodes as u16).map(|node| 1000 + node).collect();
        let memory = (SEGMENT + SOURCES * SOURCE) as usize;
        let make = |(index, port): (usize, &u16)| {
            let fabric = SimFabric::new(plan.config.send_buffers.max(4), memory);
            let address = format!("10.0.0.1:{port}").parse().unwrap();
            Engine::new(fabric, plan.config.clone(), address, 1 + index as u64).unwrap()
        };
        let mut nodes: Vec<Engine> = ports.iter().enumerate().map(make).collect();
        let (mut bundles, mut endpoints) = (Vec::new(), Vec::new());
        for node in &mut nodes {
            let bundle = node.create_bundle(plan.mode);
            let mut own = Vec::new();
            for _ in 0..plan.endpoints {
                let endpoint = node.create_endpoint(bundle).unwrap();
                node.set_tag(endpoint, TAG).unwrap();
                for handler in [0, REQUEST, REPLY, GOT] {
                    node.set_handler(endpoint, handler.into(), Some(handler)).unwrap();
                }
                let segment = Remote { addr: 0, len: SEGMENT, key: 1 };
                node.set_segment(endpoint, Some(segment)).unwrap();
                own.push(endpoint);
            }
            bundles.push(bundle);
            endpoints.push(own);
        }
        let names: Vec<Name> = (0..plan.nodes)
            .flat_map(|node| {
                endpoints[node].iter().map(|id| nodes[node].name(*id).unwrap()).collect::<Vec<_>>()
            })
            .collect();
        for (node, own) in nodes.iter_mut().zip(&endpoints) {
            for endpoint in own {
                for (index, name) in (0..).zip(&names) {
                    node.map(*endpoint, index, *name, TAG).unwrap();
                }
            }
        }
        let mut net = Network::new(nodes, &ports, rng, plan.loss);
        net.bundles = bundles;
        let next = vec![0; plan.nodes];
        let asleep_until = vec![0; plan.nodes];
        let (fates, running, sources) = Default::default();
        Self { plan, net, endpoints, fates, next, running, asleep_until, sources, slots_most: 0 }
    }

    /// Tries to send the next request of a node.
    fn send(&mut self, node: usize) {
        let number = self.next[node];
        let is_over = number as u32 >= self.plan.requests;
        let busy =
            self.plan.mode == Mode::Sequential && self.running.iter().any(|(n, ..)| *n == node);
        if is_over || busy {
            return;
        }
        let peers = (self.plan.nodes * self.plan.endpoints) as u32;
        let (from, to) = (self.net.random(self.plan.endpoints as u32), self.net.random(peers));
        let endpoint = self.endpoints[node][from as usize];
        if to as usize / self.plan.endpoints == node {
            // Own requests have a test of their own.
            return;
        }
        let len = self.net.random(300) as usize;
        let payload = pattern(node as i32, number, len);
        let kind = self.net.random(8);
        let args = [node as i32, number, self.net.random(4) as i32, len as i32];
        let place = SEGMENT + (number as u64 % SOURCES) * SOURCE;
        let held = self.sources.iter().any(|(n, at, _)| (*n, *at) == (node, place));
        let bulk = pattern(node as i32, number, SOURCE as usize);
        let offset = u64::from(self.net.random((SEGMENT / SOURCE) as u32)) * SOURCE;
        let body = match kind {
            0..=2 => Body::Medium(&payload),
            3 if !held => {
                self.net.nodes[node].fabric_mut().part(place, SOURCE).copy_from_slice(&bulk);
                Body::Bulk { from: Local { addr: place, len: SOURCE, key: 1 }, offset }
            }
            _ => Body::Short,
        };
        if kind == 4 {
            let got = self.net.nodes[node].get(endpoint, to, 0, (offset, 32), (GOT, &args));
            return self.sent(node, number, got.map(|()| Sent::Done), place);
        }
        let out = Outgoing { handler: REQUEST, args: &args, body };
        let sent = self.net.nodes[node].request(endpoint, to, &out);
        self.sent(node, number, sent, place);
    }

    fn sent(&mut self, node: usize, number: i32, sent: Result<Sent<u16>, CallError>, place: u64) {
        match sent {
            Err(CallError::WouldBlock) => {}
            Err(error) => panic!("{error}"),
            Ok(Sent::Own(_)) => panic!("no request is to the endpoint itself"),
            Ok(sent) => {
                self.next[node] += 1;
                self.fates.insert((node as i32, number), Fate::default());
                if let Sent::Pending(ticket) = sent {
                    self.sources.push((node, place, ticket));
                }
            }
        }
        self.net.take_posts(node);
    }

    /// Overwrites the sources of bulk requests that need them no more.
    fn scribble(&mut self) {
        let nodes = &mut self.net.nodes;
        self.sources.retain(|(node, place, ticket)| {
            let held = nodes[*node].holds_source(*ticket);
            if !held {
                nodes[*node].fabric_mut().part(*place, SOURCE).fill(0xee);
            }
            held
        });
    }

    /// Begins the handlers that may run at a node.
    fn poll(&mut self, node: usize) {
        while let Some(mut delivery) = self.net.next_delivery(node) {
            for (other, _, running) in &self.running {
                let same =
                    running.endpoint == delivery.endpoint || self.plan.mode == Mode::Sequential;
                assert!(*other != node || !same, "two handlers at once");
            }
            self.check(node, &delivery);
            let wants_reply = delivery.args().get(2) != Some(&0);
            if matches!(delivery.kind(), DeliveryKind::Request(_)) && wants_reply {
                self.reply(node, &mut delivery);
            }
            let busy = u64::from(self.net.random(3)) * MS / 20;
            if busy == 0 {
                self.net.nodes[node].finish(&mut delivery);
            } else {
                self.running.push((node, self.net.now + busy, delivery));
            }
            self.net.take_posts(node);
        }
        self.net.take_posts(node);
    }

    fn reply(&mut self, node: usize, delivery: &mut Delivery<u16>) {
        let args: Vec<Arg> = delivery.args().to_vec();
        let payload = pattern(args[0], args[1], args[3] as usize);
        let body = if args[2] == 1 { Body::Medium(&payload) } else { Body::Short };
        let out = Outgoing { handler: REPLY, args: &args, body };
        let engine = &mut self.net.nodes[node];
        assert!(matches!(engine.reply(delivery, &out).unwrap(), Replied::Done));
        assert_eq!(engine.reply(delivery, &out).unwrap_err(), CallError::NoReply);
    }

    fn check(&mut self, node: usize, delivery: &Delivery<u16>) {
        let args = delivery.args();
        let (origin, number) = (args[0], args[1]);
        let fate = self.fates.get_mut(&(origin, number)).expect("somebody has sent it");
        match delivery.kind() {
            DeliveryKind::Request(tag) => {
                assert_eq!((tag, delivery.handler), (TAG, Some(REQUEST)));
                fate.executed += 1;
            }
            DeliveryKind::Reply => fate.replied += 1,
            DeliveryKind::Got => {
                fate.executed += 1;
                fate.replied += 1;
            }
            DeliveryKind::Returned { status, .. } => {
                assert_eq!(status, Status::Unreachable);
                fate.returned += 1;
            }
        }
        let (executed, ends) = (fate.executed, fate.replied + fate.returned);
        assert!(executed <= 1 && ends <= 1, "request {origin}/{number}: {executed} {ends}");
        assert!(fate.replied <= executed, "a reply to what was not executed");
        let engine = &mut self.net.nodes[node];
        match &delivery.payload {
            Payload::Slot { slot, at, len } => {
                let mut bytes = vec![0; *len as usize];
                quipu_am::Fabric::load(engine.fabric(), *slot, *at as usize, &mut bytes);
                assert_eq!(bytes, pattern(origin, number, args[3] as usize));
            }
            Payload::Segment(part) if matches!(delivery.kind(), DeliveryKind::Request(_)) => {
                // Another message may have been written to the same place since.
                let bytes = engine.fabric_mut().part(part.addr, part.len);
                assert!(!bytes.iter().all(|byte| *byte == 0xee), "the source was freed too early");
            }
            _ => {}
        }
    }

    fn check_memory(&mut self, node: usize) {
        let slots = self.net.nodes[node].fabric().slots.len();
        self.slots_most = self.slots_most.max(slots);
        let lanes = &self.net.nodes[node].fabric().lanes;
        assert!(!lanes.has_overflowed, "more than a lane has room for");
        let config = &self.plan.config;
        let peers = self.plan.nodes * self.plan.endpoints * self.plan.endpoints;
        let most =
            config.max_outstanding as usize + config.shared_credits as usize + 96 + 3 * peers;
        assert!(slots <= most, "{slots} slots, {most} at most");
    }

    fn end_handlers(&mut self) {
        let now = self.net.now;
        let (over, running): (Vec<_>, Vec<_>) =
            std::mem::take(&mut self.running).into_iter().partition(|(_, until, _)| *until <= now);
        self.running = running;
        for (node, _, mut delivery) in over {
            if self.net.is_alive[node] {
                self.net.nodes[node].finish(&mut delivery);
                self.net.take_posts(node);
            }
        }
    }

    fn is_over(&self) -> bool {
        (0..self.plan.nodes).filter(|node| self.net.is_alive[*node]).all(|node| {
            let own = |(origin, _): &(i32, i32)| *origin == node as i32;
            let sent = self.next[node] as u32 >= self.plan.requests;
            sent && self
                .fates
                .iter()
                .filter(|(key, _)| own(key))
                .all(|(_, fate)| fate.replied + fate.returned == 1 || fate.executed == 1)
        })
    }

    /// Runs until all requests of nodes that live have ended; what happened, as a number.
    fn run(self) -> u64 {
        self.run_and_count(&mut [0; 3])
    }

    /// The same; adds the messages that went into lanes, those that had to wake their receiver, and the
    /// payloads that were written past the queue pair.
    fn run_and_count(mut self, pushed: &mut [u64; 3]) -> u64 {
        let deaths: Vec<(u64, usize)> = (0..self.plan.deaths)
            .map(|node| (u64::from(self.net.random(20)) * MS / 4, node))
            .collect();
        for node in 0..self.plan.sleepers {
            self.asleep_until[self.plan.nodes - 1 - node] = 40 * MS;
        }
        let mut round: u64 = 0;
        while !self.is_over() {
            round += 1;
            assert!(round < 400_000, "it does not end: seed {}", self.plan.seed);
            for (time, node) in &deaths {
                if self.net.now >= *time && self.net.is_alive[*node] {
                    self.net.kill(*node);
                    self.running.retain(|(other, ..)| other != node);
                }
            }
            let until = self.net.now + u64::from(self.net.random(10)) * 1000 + 500;
            while self.net.step(until) {}
            self.end_handlers();
            for node in 0..self.plan.nodes {
                if !self.net.is_alive[node] || self.asleep_until[node] > self.net.now {
                    continue;
                }
                let now = self.net.now;
                self.net.nodes[node].handle_timeout(now);
                self.net.take_posts(node);
                self.send(node);
                self.poll(node);
                self.check_memory(node);
            }
            self.scribble();
        }
        let executed: u64 = self.fates.values().map(|fate| u64::from(fate.executed)).sum();
        if self.plan.deaths == 0 {
            assert_eq!(executed, u64::from(self.plan.requests) * self.plan.nodes as u64);
            assert!(self.fates.values().all(|fate| fate.returned == 0));
        }
        for node in &self.net.nodes {
            let lanes = &node.fabric().lanes;
            let counts = [lanes.pushed[0], lanes.pushed[1], lanes.written];
            pushed.iter_mut().zip(counts).for_each(|(sum, count)| *sum += count);
        }
        self.net.hash ^ executed
    }
}

/// What a seed draws.
fn plan(seed: u64) -> Plan {
    let pick = |salt: u64, below: u64| (seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> salt) % below;
    let nodes = 2 + pick(8, 4) as usize;
    let config = Config {
        max_outstanding: 1 + pick(12, 20) as u16,
        shared_credits: pick(16, 30) as u32,
        max_window: 1 + pick(20, 16) as u16,
        initial_window: 1 + pick(24, 4) as u16,
        max_medium: 1024,
        send_buffers: 4 + pick(28, 8) as u32,
        give_up_ns: 100 * MS,
        lane_after: 1 + pick(52, 8) as u16,
        ..Config::default()
    };
    Plan {
        seed,
        nodes,
        endpoints: 1 + pick(32, 2) as usize,
        requests: 60,
        mode: if pick(36, 2) == 0 { Mode::Sequential } else { Mode::Parallel },
        config,
        loss: [0, 50, 5][pick(40, 3) as usize],
        deaths: pick(44, 3) as usize % nodes,
        sleepers: pick(48, 2) as usize,
    }
}

#[test]
fn each_request_ends_once_whatever_the_network_does() {
    let seeds = std::env::var("QUIPU_AM_SEEDS").ok().and_then(|text| text.parse().ok());
    let mut pushed = [0; 3];
    for seed in 0..seeds.unwrap_or(60) {
        let hash = Run::new(plan(seed)).run_and_count(&mut pushed);
        if seed % 10 == 0 {
            assert_eq!(hash, Run::new(plan(seed)).run(), "seed {seed} is not repeated");
        }
    }
    let were_used = pushed[0] > 100 && pushed[1] > 10 && pushed[2] > 50;
    assert!(were_used, "lanes were used: {pushed:?}");
}

#[test]
fn everybody_asks_everybody_with_one_credit() {
    let config = Config {
        max_outstanding: 1,
        shared_credits: 0,
        max_window: 1,
        initial_window: 1,
        max_medium: 1024,
        send_buffers: 4,
        ..Config::default()
    };
    for mode in [Mode::Sequential, Mode::Parallel] {
        let plan = Plan {
            seed: 5,
            nodes: 6,
            endpoints: 1,
            requests: 200,
            mode,
            config: config.clone(),
            loss: 20,
            deaths: 0,
            sleepers: 2,
        };
        Run::new(plan).run();
    }
}

/// A peer that forges messages costs a connection and bounded memory; the others go on.
#[test]
fn a_hostile_peer_stops_nobody_else() {
    for seed in 0..40 {
        let mut drawn = plan(seed);
        drawn.nodes = 3;
        (drawn.deaths, drawn.sleepers, drawn.endpoints) = (0, 0, 1);
        let mut run = Run::new(drawn);
        // Node 2 is hostile: what it receives is dropped, and it sends anything.
        for round in 0..4000u32 {
            let until = run.net.now + 5000;
            while run.net.step(until) {}
            for node in 0..2 {
                let now = run.net.now;
                run.net.nodes[node].handle_timeout(now);
                run.net.take_posts(node);
                run.send(node);
                while let Some(mut delivery) = run.net.next_delivery(node) {
                    run.net.nodes[node].finish(&mut delivery);
                }
                run.net.take_posts(node);
                run.check_memory(node);
            }
            if run.net.now < MS {
                run.send(2);
            }
            let len = run.net.random(90) as usize;
            let mut bytes: Vec<u8> = (0..len).map(|_| run.net.random(256) as u8).collect();
            if round % 2 == 0 && len > 7 {
                // One that is well formed.
                bytes[0] = 1 + run.net.random(15) as u8;
                bytes[1] = ((len - 8) / 4) as u8;
                bytes[5] = 0;
                bytes[7] = run.net.random(11) as u8;
                bytes.truncate(8 + (len - 8) / 4 * 4);
            }
            if round % 4 == 0 {
                // And something in a lane, which may be well formed, too.
                let mut line = [0; 8].map(|_: u64| run.net.random(u32::MAX).into());
                line[0] = u64::from(1 + run.net.random(15)) | u64::from(run.net.random(3)) << 8;
                line[7] = run.net.random(20).into();
                let which = run.net.random(u32::MAX).into();
                run.net.lanes.forge(which, line);
            }
            let victim = run.net.random(2) as usize;
            run.net.forge(victim, 2, bytes);
        }
        let ended = |origin: i32, run: &Run| run.next[origin as usize];
        assert!(ended(0, &run) as u32 == 60 && ended(1, &run) as u32 == 60, "seed {seed}");
    }
}
