//! Active Messages over datagrams in simulated time. Seeds draw processes, traffic, loss, duplication,
//! reordering, delay, naps and deaths. An oracle checks that each request ends once, that its handler runs at
//! most once and once if the reply comes, that payloads are right, that requests of one process to another
//! run in order, that memory is bounded, and that all of it ends.

mod network;

use std::collections::HashMap;
use std::net::SocketAddr;

use quipu_am::datagram::{LOOKUP_LEN, Place, answer_lookup};
use quipu_am::{
    Arg, Body, CallError, Config, Delivery, DeliveryKind, EndpointId, Fabric, Local, Mode, Name,
    Outgoing, Payload, Remote, Status, Tag,
};

use network::{Faults, GIVE_UP, MS, Network};

const TAG: Tag = Tag(77);
const REQUEST: u16 = 1;
const REPLY: u16 = 2;
const GOT: u16 = 3;
const NOBODY: u16 = 9;
/// Bytes of the segment that others write, and of what they read; the sources of bulk messages follow.
const SEGMENT: u64 = 32_768;
const SOURCES: u64 = 2 * SEGMENT;
const PIECE: u64 = 5000;

/// What is known of a request.
#[derive(Debug, Default)]
struct Request {
    to: usize,
    is_bad: bool,
    executed: u32,
    replied: u32,
    returned: u32,
}

struct Run {
    net: Network,
    endpoints: Vec<EndpointId>,
    requests: HashMap<(Arg, Arg), Request>,
    next: Vec<Arg>,
    left: Vec<u32>,
    asleep_until: Vec<u64>,
    /// The bulk request of each process that is under way: its place in the segment of others is its own.
    bulk: Vec<Option<Arg>>,
    /// The last request of each process that ran at each other.
    last: HashMap<(Arg, usize), Arg>,
    is_disturbed: bool,
}

fn bytes(process: Arg, number: Arg, len: usize) -> Vec<u8> {
    (0..len).map(|at| (process * 31 + number * 7 + at as Arg * 13) as u8).collect()
}

impl Run {
    fn new(seed: u64, processes: usize, faults: Faults, requests: u32) -> Self {
        let config = Config {
            max_outstanding: 16,
            shared_credits: 32,
            max_window: 8,
            initial_window: 4,
            max_connections: 64,
            max_medium: 20_000,
            send_buffers: 8,
            give_up_ns: GIVE_UP,
            lane_after: 16,
        };
        let is_disturbed = faults.is_any();
        let memory = (SOURCES + SEGMENT) as usize;
        let mut net = Network::new(seed, processes, faults, &config, memory);
        let mut endpoints = Vec::new();
        for (index, node) in net.nodes.iter_mut().enumerate() {
            let bundle = node.core.create_bundle(Mode::Sequential);
            let endpoint = node.core.create_endpoint(bundle).unwrap();
            node.bundle = Some(bundle);
            node.core.set_tag(endpoint, TAG).unwrap();
            for handler in [0, REQUEST, REPLY, GOT] {
                node.core.set_handler(endpoint, handler.into(), Some(handler)).unwrap();
            }
            let segment = Remote { addr: 0, len: 2 * SEGMENT, key: 1 };
            node.core.set_segment(endpoint, Some(segment)).unwrap();
            let shown = bytes(index as Arg, 0, PIECE as usize);
            node.core.fabric_mut().memory_mut().put(SEGMENT, &shown);
            endpoints.push(endpoint);
        }
        let name = |node: &network::Node, endpoint: &EndpointId| node.core.name(*endpoint).unwrap();
        let names: Vec<_> = net.nodes.iter().zip(&endpoints).map(|(n, e)| name(n, e)).collect();
        for (node, endpoint) in net.nodes.iter_mut().zip(&endpoints) {
            for (index, name) in (0..).zip(&names) {
                node.core.map(*endpoint, index, *name, TAG).unwrap();
            }
        }
        Self {
            net,
            endpoints,
            requests: HashMap::new(),
            next: vec![1; processes],
            left: vec![requests; processes],
            asleep_until: vec![0; processes],
            bulk: vec![None; processes],
            last: HashMap::new(),
            is_disturbed,
        }
    }

    /// Tries to send the next request of a process.
    fn send(&mut self, n: usize) {
        let to = self.net.random(self.endpoints.len() as u64) as usize;
        if self.left[n] == 0 || to == n {
            return;
        }
        let (process, number) = (n as Arg, self.next[n]);
        let kind = self.net.random(8);
        let wants = self.net.random(3) as Arg;
        let len = 1 + self.net.random([200, 20_000][(kind % 2) as usize]) as usize;
        let medium = bytes(process, number, len);
        let mut args = [process, number, wants, len as Arg];
        let is_free = self.bulk[n].is_none();
        let core = &mut self.net.nodes[n].core;
        let (mut handler, mut body) = (REQUEST, Body::Short);
        match kind {
            0 if is_free => {
                args[2] = 1;
                let whole = bytes(process, number, PIECE as usize);
                core.fabric_mut().memory_mut().put(SOURCES, &whole);
                let from = Local { addr: SOURCES, len: PIECE, key: 1 };
                body = Body::Bulk { from, offset: n as u64 * PIECE };
            }
            1 if is_free => {
                let to_offset = SEGMENT + PIECE * (1 + n as u64 % 2);
                let (from, args) = (SEGMENT, &args[..]);
                let got =
                    core.get(self.endpoints[n], to as u32, from, (to_offset, PIECE), (GOT, args));
                return self.sent(n, to, got.err(), (false, true));
            }
            2 => handler = NOBODY,
            3..=5 => body = Body::Medium(&medium),
            _ => {}
        }
        let is_bulk = matches!(body, Body::Bulk { .. });
        let out = Outgoing { handler, args: &args, body };
        let sent = core.request(self.endpoints[n], to as u32, &out);
        self.sent(n, to, sent.err(), (handler == NOBODY, is_bulk));
    }

    fn sent(
        &mut self,
        n: usize,
        to: usize,
        error: Option<CallError>,
        (is_bad, is_bulk): (bool, bool),
    ) {
        match error {
            Some(CallError::WouldBlock) => {}
            Some(error) => panic!("{error}"),
            None => {
                let number = self.next[n];
                self.next[n] += 1;
                self.left[n] -= 1;
                self.net.is_busy = true;
                if is_bulk {
                    self.bulk[n] = Some(number);
                }
                let request = Request { to, is_bad, ..Request::default() };
                self.requests.insert((n as Arg, number), request);
            }
        }
    }

    fn run_handlers(&mut self, n: usize) {
        let bundle = self.net.nodes[n].bundle.unwrap();
        while let Some(mut delivery) = self.net.nodes[n].core.next_delivery(bundle) {
            self.check(n, &delivery);
            self.net.is_busy = true;
            let args = delivery.args().to_vec();
            let core = &mut self.net.nodes[n].core;
            if matches!(delivery.kind(), DeliveryKind::Request(_)) && args[2] > 0 {
                let reply = bytes(args[0], args[1], 3000);
                let body = if args[2] == 2 { Body::Medium(&reply) } else { Body::Short };
                let args = [args[0], args[1], n as Arg];
                core.reply(&mut delivery, &Outgoing { handler: REPLY, args: &args, body }).unwrap();
            }
            core.finish(&mut delivery);
        }
    }

    fn check(&mut self, n: usize, delivery: &Delivery<u16>) {
        let args = delivery.args().to_vec();
        let key = (args[0], args[1]);
        let request = self.requests.get_mut(&key).expect("somebody has sent it");
        match delivery.kind() {
            DeliveryKind::Request(_) => {
                request.executed += 1;
                assert_eq!(request.to, n);
                let last = self.last.insert((args[0], n), args[1]).unwrap_or(0);
                assert!(last < args[1], "request {key:?} came after {last}");
            }
            DeliveryKind::Reply => request.replied += 1,
            DeliveryKind::Got => (request.executed, request.replied) = (1, request.replied + 1),
            DeliveryKind::Returned { status, .. } => {
                request.returned += 1;
                let is_alive = self.net.nodes[request.to].is_alive;
                assert!(request.is_bad || self.is_disturbed, "{key:?}: {status}");
                assert!(
                    status == Status::Unreachable
                        || (request.is_bad && status == Status::BadHandler),
                    "{key:?}: {status}, peer alive: {is_alive}"
                );
            }
        }
        assert!(request.executed <= 1 && request.replied + request.returned <= 1, "{request:?}");
        assert!(request.replied <= request.executed && (!request.is_bad || request.executed == 0));
        let is_end = !matches!(delivery.kind(), DeliveryKind::Request(_));
        if is_end && self.bulk[n] == Some(args[1]) {
            self.bulk[n] = None;
        }
        self.check_payload(n, delivery, &args);
    }

    fn check_payload(&self, n: usize, delivery: &Delivery<u16>, args: &[Arg]) {
        let fabric = self.net.nodes[n].core.fabric();
        match (&delivery.payload, delivery.kind()) {
            (_, DeliveryKind::Returned { .. }) | (Payload::None | Payload::Copy(_), _) => {}
            (Payload::Slot { slot, at, len }, _) => {
                let mut payload = vec![0; *len as usize];
                fabric.load(*slot, *at as usize, &mut payload);
                assert_eq!(payload, bytes(args[0], args[1], payload.len()));
            }
            (Payload::Segment(part), kind) => {
                let whole = fabric.memory().part(part.addr, part.len);
                let to = self.requests[&(args[0], args[1])].to as Arg;
                let expected = match kind {
                    DeliveryKind::Got => bytes(to, 0, whole.len()),
                    _ => bytes(args[0], args[1], whole.len()),
                };
                assert_eq!(whole, expected);
            }
        }
    }

    fn is_over(&self) -> bool {
        let ends = |((from, _), request): (&(Arg, Arg), &Request)| {
            !self.net.nodes[*from as usize].is_alive
                || request.replied + request.returned == 1
                || (request.executed == 1 && request.replied == 0)
        };
        let sends = (0..self.left.len()).any(|n| self.net.nodes[n].is_alive && self.left[n] > 0);
        let waits = |n: usize| {
            self.net.nodes[n].is_alive
                && self.net.nodes[n].core.outstanding(self.endpoints[n]).unwrap() > 0
        };
        !sends && self.requests.iter().all(ends) && !(0..self.left.len()).any(waits)
    }

    /// Requests that have not ended.
    fn waiting(&self) -> Vec<(&(Arg, Arg), &Request)> {
        let all = self.requests.iter();
        all.filter(|(_, request)| request.replied + request.returned == 0).collect()
    }

    /// Runs to the end; `deaths` processes die on the way.
    fn go(&mut self, deaths: usize) {
        let mut death_at = 3 * MS;
        let mut dead = 0;
        while !self.is_over() {
            assert!(self.net.now < 120_000 * MS, "it never ends: {:?}", self.waiting());
            if dead < deaths && self.net.now >= death_at {
                self.net.nodes[dead].is_alive = false;
                self.is_disturbed = true;
                (dead, death_at) = (dead + 1, death_at + 50 * MS);
            }
            for n in 0..self.endpoints.len() {
                if !self.net.nodes[n].is_alive || self.asleep_until[n] > self.net.now {
                    continue;
                }
                if self.net.random(2000) == 0 {
                    // It computes, and hears nothing.
                    self.asleep_until[n] = self.net.now + self.net.random(400) * MS;
                }
                self.net.poll(n);
                self.run_handlers(n);
                self.send(n);
                self.net.transmit(n);
                let (slots, held) = self.net.nodes[n].core.fabric().in_use();
                assert!(slots <= 400 && held <= 1024, "{slots} slots, {held} fragments");
            }
            self.net.step();
        }
    }
}

/// How many seeds a test runs: as many as it says, or as the variable QUIPU_AM_SEEDS does.
fn seeds(count: u64) -> u64 {
    std::env::var("QUIPU_AM_SEEDS").ok().and_then(|text| text.parse().ok()).unwrap_or(count)
}

fn faults(loss: u64, duplicate: u64, late: u64) -> Faults {
    Faults { loss, duplicate, late }
}

#[test]
fn without_faults_everything_arrives_and_nothing_is_sent_twice() {
    let mut run = Run::new(1, 3, faults(0, 0, 0), 200);
    run.asleep_until = vec![0; 3];
    run.net.may_nap = false;
    run.go(0);
    let again: u64 = run.net.nodes.iter().map(|node| node.core.fabric().counters().resent).sum();
    assert_eq!(again, 0);
}

#[test]
fn seeds_with_loss_duplication_reordering_and_naps_end_well() {
    for seed in 0..seeds(8) {
        let faults = faults([0, 5, 50, 200][seed as usize % 4], 20 * (seed % 3), 100 * (seed % 2));
        Run::new(seed, 2 + seed as usize % 4, faults, 100).go(0);
    }
}

#[test]
fn requests_to_the_dead_come_back_and_the_others_go_on() {
    for seed in 100..100 + seeds(4) {
        Run::new(seed, 4, faults(20, 20, 50), 100).go(1 + seed as usize % 2);
    }
}

#[test]
fn a_seed_gives_the_same_run_twice() {
    let run = || {
        let mut run = Run::new(9, 4, faults(50, 50, 50), 60);
        run.go(1);
        (run.net.hash, run.net.now)
    };
    assert_eq!(run(), run());
}

/// Random datagrams, and true ones with changed bytes, from anywhere.
#[test]
fn forged_datagrams_cost_bounded_memory_and_nothing_else() {
    for seed in 200..200 + seeds(4) {
        let mut run = Run::new(seed, 3, faults(10, 10, 10), 60);
        run.net.forges = true;
        // What is forged in the name of a peer may end its connection.
        run.is_disturbed = true;
        run.go(0);
    }
}

/// Has processes poll and send until something is so.
fn until(run: &mut Run, mut is_so: impl FnMut(&mut Run) -> bool) {
    while !is_so(run) {
        assert!(run.net.now < 60_000 * MS, "it does not come about");
        for n in 0..run.endpoints.len() {
            run.net.poll(n);
            run.run_handlers(n);
            run.net.transmit(n);
        }
        run.net.step();
    }
}

/// A stranger sends hellos with forged sources. It cannot receive there, so nothing is kept of them.
#[test]
fn hellos_with_forged_sources_take_no_place() {
    let mut run = Run::new(400, 2, faults(0, 0, 0), 0);
    let to = run.net.nodes[1].core.name(run.endpoints[1]).unwrap();
    for number in 1..=2000_u64 {
        let address = std::net::SocketAddr::from(([10, 9, 0, 1], number as u16));
        let incarnation = 3 | number << 8;
        run.net.say_hello(1, &Name { port: address, endpoint: 0, incarnation }, &to, TAG, number);
    }
    assert_eq!(run.net.nodes[1].core.connections(), 0);
    let [a, b] = [run.endpoints[0], run.endpoints[1]];
    until(&mut run, |run| run.net.nodes[0].core.signal(a, 1).is_ok());
    until(&mut run, |run| run.net.nodes[1].core.take_signal(b, 0).unwrap());
    assert_eq!(run.net.nodes[1].core.connections(), 1);
}

/// A stranger that receives what it is sent, and takes all places there are: a peer gets one of them.
#[test]
fn a_peer_takes_the_place_of_a_stranger() {
    let mut run = Run::new(401, 3, faults(0, 0, 0), 0);
    let most = 64;
    let name = |run: &Run, n: usize| run.net.nodes[n].core.name(run.endpoints[n]).unwrap();
    let (stranger, to) = (name(&run, 2), name(&run, 1));
    let begin = |run: &mut Run, number: u64| {
        run.net.say_hello(1, &stranger, &to, Tag(5), number);
        while let Some((place, cookie)) = run.net.challenge(1) {
            run.net.answer_challenge(1, place, &stranger, &to, Tag(5), (number, cookie));
        }
    };
    (1..=2 * most).for_each(|number| begin(&mut run, number));
    assert_eq!(run.net.nodes[1].core.connections(), most as usize);
    let [a, b] = [run.endpoints[0], run.endpoints[1]];
    until(&mut run, |run| run.net.nodes[0].core.signal(a, 1).is_ok());
    until(&mut run, |run| run.net.nodes[1].core.take_signal(b, 0).unwrap());
    assert_eq!(run.net.nodes[1].core.connections(), most as usize);
}

/// A hello that names another place than the one it comes from is not heard, cookie or not.
#[test]
fn nobody_takes_the_name_of_another() {
    let mut run = Run::new(402, 3, faults(0, 0, 0), 0);
    let name = |run: &Run, n: usize| run.net.nodes[n].core.name(run.endpoints[n]).unwrap();
    let (victim, forger, to) = (name(&run, 0), name(&run, 2), name(&run, 1));
    run.net.say_hello(1, &forger, &to, TAG, 7);
    let (place, cookie) = run.net.challenge(1).expect("it asks for a cookie");
    run.net.answer_challenge(1, place, &victim, &to, TAG, (7, cookie));
    assert_eq!(run.net.nodes[1].core.connections(), 0);
    run.net.answer_challenge(1, place, &forger, &to, TAG, (7, cookie + 2));
    assert_eq!(run.net.nodes[1].core.connections(), 0, "with a wrong cookie");
    run.net.answer_challenge(1, place, &forger, &to, TAG, (7, cookie));
    assert_eq!(run.net.nodes[1].core.connections(), 1);
}

/// An endpoint at a UDP port of its own is found by its address, also if it comes later than its peer, and
/// though questions and answers are lost. Its own requests carry that address as their source.
#[test]
fn an_endpoint_at_a_known_port_is_found_by_its_address() {
    for seed in 420..420 + seeds(20) {
        let mut run = Run::new(seed, 2, faults(300, 100, 100), 0);
        let [known, named] = [9001, 9002].map(|port| SocketAddr::from(([10, 0, 0, 1], port)));
        let [a, b] = [run.endpoints[0], run.endpoints[1]];
        let inner = |run: &Run, n: usize| run.net.nodes[n].core.name(run.endpoints[n]).unwrap();
        let doors = [(known, inner(&run, 0)), (named, inner(&run, 1))];
        for (n, at, peer) in [(0, known, named), (1, named, known)] {
            let core = &mut run.net.nodes[n].core;
            core.set_name(run.endpoints[n], Name::of_address(at)).unwrap();
            core.map(run.endpoints[n], 7, Name::of_address(peer), TAG).unwrap();
        }
        run.net.nodes[0].door = Some(doors[0]);
        let mut requests = [(0, a), (1, b)].map(|(n, endpoint)| {
            let sent = run.net.nodes[n].core.signal(endpoint, 7);
            (n, endpoint, sent.is_ok())
        });
        let (mut signals, opens_at) = ([0; 2], run.net.now + 700 * MS);
        until(&mut run, |run| {
            if run.net.now >= opens_at {
                run.net.nodes[1].door = Some(doors[1]);
            }
            for (n, endpoint, is_sent) in &mut requests {
                let core = &mut run.net.nodes[*n].core;
                *is_sent = *is_sent || core.signal(*endpoint, 7).is_ok();
                // The peer is that of index 7: by its address, not by the name of its queue pair.
                signals[*n] += u32::from(core.take_signal(*endpoint, 7).unwrap());
            }
            signals == [1, 1]
        });
        assert!(run.net.now >= opens_at, "one of them opens late");
    }
}

/// Only the address that was asked is believed, and only about a queue pair at its own IP address.
#[test]
fn answers_of_others_find_nobody() {
    let mut run = Run::new(403, 3, faults(0, 0, 0), 0);
    let at = SocketAddr::from(([10, 0, 0, 1], 9001));
    let stranger = Place::of_socket(SocketAddr::from(([10, 0, 0, 1], 9002)));
    let name = run.net.nodes[1].core.name(run.endpoints[1]).unwrap();
    run.net.nodes[0].core.map(run.endpoints[0], 7, Name::of_address(at), TAG).unwrap();
    let _ = run.net.nodes[0].core.signal(run.endpoints[0], 7);
    let mut out = [0; 1024];
    let now = run.net.now;
    let mut send = |run: &mut Run| run.net.nodes[0].core.fabric_mut().poll_transmit(now, &mut out);
    let (to, len) = send(&mut run).expect("it asks");
    assert_eq!((to, len), (Place::of_socket(at), LOOKUP_LEN));
    let question = out[..len].to_vec();
    let answer = answer_lookup(&question, &name).unwrap();
    assert_eq!(answer_lookup(&answer, &name), None, "an answer is no question");
    assert_eq!(answer_lookup(&question[..len - 1], &name), None);

    let mut send = |run: &mut Run| run.net.nodes[0].core.fabric_mut().poll_transmit(now, &mut out);
    let mut forged = answer.to_vec();
    forged[8] ^= 1;
    let nameless = answer_lookup(&question, &Name::of_address(at)).unwrap();
    for (from, bytes) in [
        (stranger, answer.to_vec()),
        (Place::of(&name), answer.to_vec()),
        (Place::of_socket(at), forged),
        (Place::of_socket(at), nameless.to_vec()),
        (Place::of_socket(at), answer[..len - 1].to_vec()),
        (Place::of_socket(at), question),
    ] {
        run.net.deliver(0, from, bytes);
        // It may ask once more.
        let next = send(&mut run);
        assert!(next.is_none_or(|(to, _)| to == Place::of_socket(at)), "{next:?}");
    }
    let elsewhere = Name { port: SocketAddr::from(([10, 9, 9, 9], name.port.port())), ..name };
    let answer = answer_lookup(&answer_question(&answer), &elsewhere).unwrap();
    run.net.deliver(0, Place::of_socket(at), answer.to_vec());
    let (to, _) = send(&mut run).expect("it says hello");
    assert_eq!(to, Place::of(&name), "a host names queue pairs of its own only");
}

/// The question that an answer belongs to.
fn answer_question(answer: &[u8]) -> Vec<u8> {
    let mut question = answer.to_vec();
    question[2] = 9;
    question.copy_within(8..16, 16);
    question
}

/// A process maps its peer twice, so that it has two connections of one name: signals of both count.
#[test]
fn signals_of_two_connections_of_one_peer_all_count() {
    for seed in 410..410 + seeds(20) {
        let mut run = Run::new(seed, 2, faults(50, 0, 50), 0);
        let [a, b] = [run.endpoints[0], run.endpoints[1]];
        let name = run.net.nodes[1].core.name(b).unwrap();
        run.net.nodes[0].core.map(a, 7, name, TAG).unwrap();
        let mut sent = [0; 2];
        let mut taken = 0;
        until(&mut run, |run| {
            for (index, sent) in [1, 7].into_iter().zip(&mut sent) {
                *sent += u32::from(*sent < 20 && run.net.nodes[0].core.signal(a, index).is_ok());
            }
            while run.net.nodes[1].core.take_signal(b, 0).unwrap() {
                taken += 1;
            }
            taken == 40
        });
    }
}

/// A process signals its peer and unmaps it at once: the signal still has to be sent again.
#[test]
fn a_signal_comes_though_its_peer_is_unmapped_at_once() {
    for seed in 300..300 + seeds(20) {
        let mut run = Run::new(seed, 2, faults(300, 0, 0), 0);
        run.net.may_nap = false;
        let (sender, receiver) = (run.endpoints[0], run.endpoints[1]);
        let (mut is_sent, mut is_taken) = (false, false);
        while !is_taken {
            assert!(run.net.now < 20_000 * MS, "seed {seed}: the signal does not come");
            for n in 0..2 {
                run.net.poll(n);
                run.net.transmit(n);
            }
            if !is_sent {
                is_sent = run.net.nodes[0].core.signal(sender, 1).is_ok();
                if is_sent {
                    run.net.nodes[0].core.unmap(sender, 1).unwrap();
                }
            }
            is_taken = run.net.nodes[1].core.take_signal(receiver, 0).unwrap();
            run.net.step();
        }
    }
}
