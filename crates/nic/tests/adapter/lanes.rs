//! Quality of service in simulated time: queue pairs of several lanes that are always backlogged share a port
//! with a rate as its tables say, whatever carries their messages.

use std::sync::{Arc, Mutex};

use crate::pair::{Buffer, Pair, Way};
use quipu_nic::qos::{Config as Qos, Demand, Entry, LANES, LaneUse, Port};
use quipu_nic::*;

mod rates;

const GBIT: u64 = 1_000_000_000;

fn table(entries: &[(u8, u8)]) -> Vec<Entry> {
    entries.iter().map(|&(lane, weight)| Entry { lane, weight }).collect()
}

fn config(high: &[(u8, u8)], low: &[(u8, u8)], rate: u64) -> Qos {
    Qos { rate, high: table(high), low: table(low), ..Qos::default() }
}

/// A queue pair that always has requests.
struct Flow {
    qps: [QpId; 2],
    op: SendOp,
    message: usize,
    /// Requests that are not complete.
    posted: usize,
    done: u64,
}

struct Bench {
    pair: Pair,
    flows: Vec<Flow>,
    from: Buffer,
    depth: usize,
    /// The host with the port.
    sender: usize,
}

impl Bench {
    /// One flow of messages of so many bytes for each service level.
    fn new(way: Way, qos: Qos, levels: &[u8], mtu: u8, message: usize) -> Self {
        let write = |addr, rkey| SendOp::Write { addr, rkey };
        Self::with(Pair::new(way), (0, qos), levels, mtu, message, write)
    }

    /// The same, of reads: the other side has the port.
    fn reading(way: Way, qos: Qos, levels: &[u8], message: usize) -> Self {
        let read = |addr, rkey| SendOp::Read { addr, rkey };
        Self::with(Pair::new(way), (1, qos), levels, 5, message, read)
    }

    fn with(
        mut pair: Pair,
        (sender, qos): (usize, Qos),
        levels: &[u8],
        mtu: u8,
        message: usize,
        op: impl Fn(u64, u32) -> SendOp,
    ) -> Self {
        pair.hosts[sender].adapter.set_qos(qos, None);
        let from = pair.buffer(0, message);
        let to = pair.buffer(1, message);
        let op = op(to.addr(), to.key());
        let flow = |&sl: &u8| {
            let qps = [pair.hosts[0].qp(), pair.hosts[1].qp()];
            pair.connect_with(qps, |attr| {
                attr.av.sl = sl;
                attr.path_mtu = mtu;
            });
            Flow { qps, op, message, posted: 0, done: 0 }
        };
        let flows = levels.iter().map(flow).collect();
        pair.run();
        // 4 MB of memory are enough for a backlog.
        let depth = (4 << 20) / message;
        Self { pair, flows, from, depth: depth.clamp(4, 64), sender }
    }

    /// Keeps all flows backlogged for so long.
    fn run(&mut self, ns: u64) {
        let end = self.pair.now.after(ns);
        while self.pair.now < end {
            for (index, flow) in self.flows.iter_mut().enumerate() {
                let list = [self.from.sge(0, flow.message)];
                while flow.posted < self.depth {
                    self.pair.send(0, flow.qps[0], index as u64, flow.op, &list);
                    flow.posted += 1;
                }
            }
            // Small messages are posted as soon as there is room.
            let step_ns = if self.flows[0].message < 1000 { 10_000 } else { 50_000 };
            self.pair.run_until(self.pair.now.after(step_ns));
            for (index, status) in self.pair.polled(0) {
                assert_eq!(status, WcStatus::Success);
                let flow = &mut self.flows[index as usize];
                flow.posted -= 1;
                flow.done += 1;
            }
        }
    }

    fn used(&self) -> [LaneUse; 15] {
        self.pair.hosts[self.sender].adapter.lane_use().unwrap()
    }

    /// Octets that each lane sends in so long.
    fn measure(&mut self, ns: u64) -> Vec<f64> {
        self.run(2_000_000);
        let before = self.used();
        self.run(ns);
        let after = self.used();
        before
            .iter()
            .zip(&after)
            .map(|(before, after)| (after.octets - before.octets) as f64)
            .collect()
    }
}

fn assert_near(value: f64, expected: f64, error: f64, what: &str) {
    let off = (value / expected - 1.0).abs();
    assert!(off <= error, "{what}: {value}, not {expected}");
}

const WAYS: [Way; 3] = [Way::Stream(usize::MAX), Way::Link, Way::LinkCopying];

#[test]
fn two_backlogged_flows_share_by_weight() {
    for way in WAYS {
        for message in [64, 4096, 65536, 1 << 20] {
            let qos = config(&[], &[(0, 4), (1, 1)], GBIT);
            let mut bench = Bench::new(way, qos, &[0, 1], 5, message);
            let ms = if message < 1000 { 20 } else { 60 };
            let sent = bench.measure(ms * 1_000_000);
            let what = format!("{way:?}, {message} bytes");
            assert_near(sent[0] / sent[1], 4.0, 0.01, &what);
            assert_near(sent[0] + sent[1], ms as f64 * 125_000.0, 0.01, &what);
        }
    }
}

#[test]
fn every_weight_gives_its_ratio() {
    for weight in [1, 2, 16, 64, 255] {
        let qos = config(&[], &[(0, weight), (1, 1)], 4 * GBIT);
        let mut bench = Bench::new(Way::Link, qos, &[0, 1], 2, 65536);
        // A hundred turns of the lane with weight 1.
        let ns = (u64::from(weight) + 1) * 100 * 538 * 2;
        let sent = bench.measure(ns.max(10_000_000));
        assert_near(sent[0] / sent[1], weight.into(), 0.01, &format!("weight {weight}"));
    }
}

#[test]
fn strict_weights_follow_the_closed_rule() {
    for (weight, ratio) in [(4, 1.0), (33, 1.0), (64, 2.0), (128, 4.0), (255, 8.0)] {
        let qos = Qos { strict: true, ..config(&[], &[(0, weight), (1, 1)], GBIT) };
        let mut bench = Bench::new(Way::Link, qos, &[0, 1], 4, 65536);
        let sent = bench.measure(40_000_000);
        // 255 units are 7.7 packets of 33.
        assert_near(sent[0] / sent[1], ratio, 0.01, &format!("weight {weight}"));
    }
}

#[test]
fn a_high_limit_gives_the_low_lane_its_packets() {
    for (limit, ratio) in [(0u8, 1.0), (1, 2.0), (4, 8.0), (16, 32.0)] {
        // Two lanes share the high table, 3:1.
        let qos = Qos { high_limit: limit, ..config(&[(0, 3), (2, 1)], &[(1, 1)], 4 * GBIT) };
        let mut bench = Bench::new(Way::Link, qos, &[0, 1, 2], 4, 65536);
        let sent = bench.measure(40_000_000);
        let what = format!("high_limit {limit}");
        assert_near((sent[0] + sent[2]) / sent[1], ratio, 0.01, &what);
        assert_near(sent[0] / sent[2], 3.0, 0.01, &what);
        assert_near(sent[0] + sent[1] + sent[2], 4.0 * 125_000.0 * 40.0, 0.01, &what);
    }
    let qos = Qos { high_limit: 255, ..config(&[(0, 1)], &[(1, 255)], GBIT) };
    let mut bench = Bench::new(Way::Link, qos, &[0, 1], 4, 65536);
    assert_eq!(bench.measure(5_000_000)[1], 0.0, "no limit: the low lane is starved");
}

/// A port that another process gives tables.
struct Shared {
    port: Port,
    wanted: Arc<Mutex<Option<Qos>>>,
    changed: Option<Qos>,
}

impl PortShare for Shared {
    fn exchange(&mut self, now: Time, demand: &Demand) -> ([u32; LANES], Time) {
        if let Some(config) = self.wanted.lock().unwrap().take() {
            self.port.configure(&config);
            self.changed = Some(config);
        }
        (self.port.exchange(0, now.0, demand), Time(self.port.next_ns()))
    }

    fn configure(&mut self, config: &Qos) {
        self.port.configure(config);
    }

    fn changed(&mut self) -> Option<Qos> {
        self.changed.take()
    }

    fn is_shared(&self) -> bool {
        true
    }
}

#[test]
fn a_starved_lane_sends_once_another_process_gives_it_a_weight() {
    let mut bench = Bench::new(Way::Link, config(&[], &[(0, 1)], GBIT), &[1], 5, 4096);
    let wanted = Arc::new(Mutex::new(None));
    let starving = config(&[], &[(0, 1)], GBIT);
    let port = Port::new(&starving, 1);
    let shared = Shared { port, wanted: Arc::clone(&wanted), changed: None };
    bench.pair.hosts[0].adapter.set_qos(starving, Some(Box::new(shared)));
    bench.run(100_000_000);
    assert_eq!(bench.used()[1].octets, 0);
    *wanted.lock().unwrap() = Some(config(&[], &[(1, 1)], GBIT));
    bench.run(100_000_000);
    assert!(bench.used()[1].octets > 0, "the adapter never looks at the port again");
}

/// The small message waits for the packet that is on its way, and for a look at the port.
#[test]
fn a_small_message_passes_a_backlog_of_another_lane() {
    for way in WAYS {
        let qos = config(&[(1, 255)], &[(0, 255)], GBIT);
        let mut bench = Bench::new(way, qos, &[0, 1], 5, 65536);
        let ping = bench.flows.pop().unwrap();
        bench.run(3_000_000);
        let mut worst = 0;
        for _ in 0..50 {
            bench.run(150_000);
            let list = [bench.from.sge(0, 8)];
            let posted = bench.pair.now;
            bench.pair.send(0, ping.qps[0], 99, ping.op, &list);
            loop {
                bench.pair.run_until(bench.pair.now.after(1_000));
                let done = bench.pair.polled(0);
                let found = done.iter().any(|&(wr_id, _)| wr_id == 99);
                bench.flows[0].posted -= done.iter().filter(|&&(wr_id, _)| wr_id == 0).count();
                if found {
                    break;
                }
                assert!(bench.pair.now.since(posted) < 10_000_000, "{way:?}: it waits");
            }
            worst = worst.max(bench.pair.now.since(posted));
        }
        // A packet of 4122 octets takes 33 us at this rate.
        assert!(worst <= 33_000 + 16_000 + 2_000, "{way:?}: {worst} ns");
    }
}

#[test]
fn the_queue_pairs_of_a_lane_take_turns() {
    let levels: Vec<u8> = (0..60).map(|index| index % 15).collect();
    let tables: Vec<(u8, u8)> = (0..15).map(|lane| (lane, 1 + lane)).collect();
    let mut bench = Bench::new(Way::Link, config(&[], &tables, 8 * GBIT), &levels, 3, 65536);
    bench.depth = 8;
    let sent = bench.measure(60_000_000);
    for (lane, &octets) in sent.iter().enumerate() {
        assert_near(octets / sent[0], 1.0 + lane as f64, 0.05, &format!("VL{lane}"));
    }
    let done: Vec<_> = bench.flows.iter().map(|flow| flow.done).collect();
    // The first of each lane had begun before the others were there.
    for lane in 0..15 {
        for round in 2..4 {
            let (one, other) = (done[lane + 15], done[lane + 15 * round]);
            assert!(one.abs_diff(other) <= 1, "VL{lane}: {done:?}");
        }
    }
}

/// Tables that change under load lose and double nothing.
#[test]
fn tables_change_under_load() {
    for (seed, way) in WAYS.into_iter().enumerate() {
        let first = config(&[], &[(0, 1), (1, 3)], GBIT);
        let others = [
            Qos { strict: true, ..config(&[(0, 200)], &[(1, 1)], 2 * GBIT) },
            config(&[(1, 5)], &[(0, 7)], GBIT / 2),
            Qos { max_vls: 1, ..config(&[], &[(0, 9)], 0) },
            first.clone(),
        ];
        let mut bench = Bench::new(way, first, &[0, 1], 5, 20_000);
        const COUNT: usize = 60;
        let from = bench.pair.buffer(0, 20_000 * COUNT);
        let to = bench.pair.buffer(1, 2 * 20_000 * COUNT);
        for at in 0..COUNT {
            from.fill(at * 20_000, &[1 + at as u8; 20_000]);
        }
        let flows: Vec<_> = bench.flows.iter().map(|flow| flow.qps).collect();
        for at in 0..COUNT {
            for (index, qps) in flows.iter().enumerate() {
                let place = to.sge((index * COUNT + at) * 20_000, 20_000);
                bench.pair.recv(1, qps[1], (index * COUNT + at) as u64, &[place]);
                let list = [from.sge(at * 20_000, 20_000)];
                bench.pair.send(0, qps[0], (index * COUNT + at) as u64, SendOp::Send, &list);
            }
        }
        let (mut sent, mut received) = (vec![Vec::new(); 2], vec![Vec::new(); 2]);
        for step in 0..400 {
            bench.pair.run_until(bench.pair.now.after(97_000 + 1000 * seed as u64));
            let other = others[(step * 7 + seed) % others.len()].clone();
            bench.pair.hosts[0].adapter.set_qos(other, None);
            for (host, done) in [&mut sent, &mut received].into_iter().enumerate() {
                for (wr_id, status) in bench.pair.polled(host) {
                    assert_eq!(status, WcStatus::Success);
                    done[wr_id as usize / COUNT].push(wr_id as usize % COUNT);
                }
            }
        }
        let all: Vec<_> = (0..COUNT).collect();
        assert_eq!(sent, [all.clone(), all.clone()], "{way:?}");
        assert_eq!(received, [all.clone(), all], "{way:?}");
        for index in 0..2 * COUNT {
            let bytes = to.bytes(index * 20_000, 20_000);
            assert!(bytes.iter().all(|&byte| byte == 1 + (index % COUNT) as u8), "{index}");
        }
    }
}

/// A service level whose lane is VL15: what a reliable queue pair sends fails, and what a datagram queue pair
/// sends is lost; neither waits for ever, nor disturbs others.
#[test]
fn what_has_vl15_is_discarded() {
    for way in WAYS {
        let mut sl2vl = Qos::default().sl2vl;
        sl2vl[3] = 15;
        let qos = Qos { sl2vl, ..config(&[], &[(0, 1), (1, 1)], GBIT) };
        let mut bench = Bench::new(way, qos, &[3, 0], 5, 5000);
        let list = [bench.from.sge(0, 5000)];
        for index in 0..2 {
            let flow = &bench.flows[index];
            let (qp, op) = (flow.qps[0], flow.op);
            bench.pair.send(0, qp, index as u64, op, &list);
        }
        bench.pair.run_until(bench.pair.now.after(2_000_000));
        let mut done = bench.pair.polled(0);
        done.sort_by_key(|it| it.0);
        assert_eq!(done, [(0, WcStatus::RetryExcErr), (1, WcStatus::Success)], "{way:?}");
        let qps = [bench.pair.datagram_qp(0), bench.pair.datagram_qp(1)];
        let dgid = bench.pair.hosts[1].adapter.config().gid;
        let ah = bench.pair.ah_with(0, dgid, |av| av.sl = 3);
        let qpn = bench.pair.number(1, qps[1]).0;
        let to = To::Datagram { ah, qpn, qkey: crate::pair::QKEY };
        let (flags, payload) = (SendFlags::SIGNALED, Payload::Sges(&[]));
        let wr = SendWr { wr_id: 9, to, op: SendOp::Send, flags, payload };
        bench.pair.send_datagram(0, qps[0], &wr).unwrap();
        bench.pair.run_until(bench.pair.now.after(2_000_000));
        assert_eq!(bench.pair.polled(0), [(9, WcStatus::Success)], "{way:?}");
        assert_eq!(bench.pair.hosts[1].adapter.datagram_drops(), DatagramDrops::default());
    }
}

/// A queue pair changes its lane while it sends.
#[test]
fn a_service_level_changes_under_way() {
    let mut bench = Bench::new(Way::Link, config(&[], &[(0, 1), (1, 1)], GBIT), &[0], 5, 65536);
    bench.run(3_000_000);
    let qp = bench.flows[0].qps[0];
    bench.pair.hosts[0].adapter.set_service_level(qp, 1, 0).unwrap();
    let sent = bench.measure(3_000_000);
    assert!(sent[0] == 0.0 && sent[1] > 300_000.0, "{sent:?}");
}

/// The peer reads: the port of the side that answers counts, whatever carries the answers.
#[test]
fn answers_to_reads_share_by_weight() {
    for way in [Way::Stream(usize::MAX), Way::LinkCopying] {
        for message in [4096, 65536, 1 << 20] {
            let qos = config(&[], &[(0, 4), (1, 1)], GBIT);
            let mut bench = Bench::reading(way, qos, &[0, 1], message);
            let sent = bench.measure(60_000_000);
            let what = format!("{way:?}, {message} bytes");
            assert_near(sent[0] / sent[1], 4.0, 0.01, &what);
            assert_near(sent[0] + sent[1], 60.0 * 125_000.0, 0.01, &what);
        }
    }
}

/// What a peer puts into this side's memory itself is counted by its side, but not what it has to ask for.
#[test]
fn reads_that_the_peer_has_to_ask_for_wait_for_their_turn() {
    let mut bench = Bench::reading(Way::Link, config(&[], &[(0, 1)], GBIT), &[0], 1 << 20);
    let (qp, op) = (bench.flows[0].qps[0], bench.flows[0].op);
    let SendOp::Read { addr, rkey } = op else { unreachable!() };
    let begun = bench.pair.now;
    for round in 0..4 {
        // Never executed directly: as long as it is not acknowledged, the read after it is not either.
        bench.pair.send(0, qp, 7, SendOp::AtomicWrite { addr, rkey }, &[bench.from.sge(0, 8)]);
        bench.pair.send(0, qp, round, op, &[bench.from.sge(0, 1 << 20)]);
    }
    let mut done = 0;
    while done < 8 {
        bench.pair.run_until(bench.pair.now.after(20_000));
        done += bench.pair.polled(0).iter().filter(|it| it.1 == WcStatus::Success).count();
        assert!(bench.pair.now.since(begun) < 1_000_000_000, "they wait for ever");
    }
    let sent = bench.used()[0].octets;
    // A packet has 26 octets more.
    assert_near(sent as f64, 4.0 * f64::from(1 << 20) * 4122.0 / 4096.0, 0.01, "octets");
    let ns = bench.pair.now.since(begun) as f64;
    assert_near(ns, sent as f64 * 8.0, 0.05, "time at 1 Gbit/s");
}

/// Both sides of a queue pair get their share of its turns.
#[test]
fn answers_and_own_requests_of_a_queue_pair_take_turns() {
    let mut bench = Bench::reading(Way::LinkCopying, config(&[], &[(0, 1)], GBIT), &[0], 65536);
    let own = bench.flows[0].qps[1];
    let (there, here) = (bench.pair.buffer(0, 65536), bench.pair.buffer(1, 65536));
    let op = SendOp::Write { addr: there.addr(), rkey: there.key() };
    let (mut posted, mut written) = (0, 0);
    let before = bench.flows[0].done;
    for _ in 0..200 {
        while posted < 16 {
            bench.pair.send(1, own, 1, op, &[here.sge(0, 65536)]);
            posted += 1;
        }
        bench.run(200_000);
        let done = bench.pair.polled(1).len();
        (posted, written) = (posted - done, written + done);
    }
    let read = bench.flows[0].done - before;
    // 40 ms are 76 messages.
    assert!(read >= 25 && written >= 25, "{read} read, {written} written");
}

/// A read whose answer would have VL15, and one of a lane that gets a weight later.
#[test]
fn answers_without_a_lane_are_refused_and_those_of_a_starved_one_wait() {
    let mut sl2vl = Qos::default().sl2vl;
    sl2vl[3] = 15;
    let qos = Qos { sl2vl, ..config(&[], &[(0, 1)], GBIT) };
    let mut bench = Bench::reading(Way::LinkCopying, qos, &[3, 1], 5000);
    for (index, flow) in bench.flows.iter().enumerate() {
        bench.pair.send(0, flow.qps[0], index as u64, flow.op, &[bench.from.sge(0, 5000)]);
    }
    bench.pair.run_until(bench.pair.now.after(50_000_000));
    assert_eq!(bench.pair.polled(0), [(0, WcStatus::RemOpErr)]);
    bench.pair.hosts[1].adapter.set_qos(config(&[], &[(1, 1)], GBIT), None);
    bench.pair.run_until(bench.pair.now.after(50_000_000));
    assert_eq!(bench.pair.polled(0), [(1, WcStatus::Success)]);
}

/// A port that keeps what it is told.
struct Recorder {
    port: Option<Port>,
    told: Arc<Mutex<Vec<Demand>>>,
}

impl PortShare for Recorder {
    fn exchange(&mut self, now: Time, demand: &Demand) -> ([u32; 15], Time) {
        self.told.lock().unwrap().push(demand.clone());
        match &mut self.port {
            Some(port) => (port.exchange(0, now.0, demand), Time(port.next_ns())),
            None => ([0; 15], now.after(1000)),
        }
    }

    fn configure(&mut self, _: &Qos) {}
}

/// Has a bench send by a port that keeps what it is told: by one that grants nothing, or by one of `rules`.
fn record(bench: &mut Bench, rules: &Qos, grants: bool) -> Arc<Mutex<Vec<Demand>>> {
    let told = Arc::new(Mutex::new(Vec::new()));
    let port = grants.then(|| Port::new(rules, 1));
    let recorder = Recorder { port, told: Arc::clone(&told) };
    bench.pair.hosts[0].adapter.set_qos(rules.clone(), Some(Box::new(recorder)));
    told
}

/// The port is told everything that waits, also of many queue pairs, and nothing of those that are gone.
#[test]
fn the_port_is_told_what_waits() {
    for way in WAYS {
        let qos = config(&[], &[(0, 1), (1, 1)], GBIT);
        let levels: Vec<u8> = (0..40).map(|index| index / 39).collect();
        let mut bench = Bench::new(way, qos.clone(), &levels, 4, 5000);
        let told = record(&mut bench, &qos, false);
        let list = [bench.from.sge(0, 5000)];
        let post = |bench: &mut Bench| {
            for index in 0..40 {
                let (qp, op) = (bench.flows[index].qps[0], bench.flows[index].op);
                bench.pair.send(0, qp, index as u64, op, &list);
            }
            bench.pair.run_until(bench.pair.now.after(100_000));
            let told = told.lock().unwrap().last().unwrap().clone();
            (told.octets[..2].to_vec(), told.packet[..2].to_vec())
        };
        // Three packets each.
        let message = 5000 + 3 * 26;
        assert_eq!(post(&mut bench), (vec![39 * message, message], vec![2074; 2]), "{way:?}");
        let (twice, _) = post(&mut bench);
        // Two messages of a queue pair are counted as one, and the packet with which the second one begins.
        let two = 10_000 + 5 * 26 + 26;
        assert_eq!(twice, [39 * two, two], "{way:?}");
        let last = bench.flows.pop().unwrap();
        let now = bench.pair.now;
        bench.pair.hosts[0].adapter.destroy_qp(now, last.qps[0]).unwrap();
        bench.pair.run_until(now.after(100_000));
        let told = told.lock().unwrap().last().unwrap().clone();
        assert_eq!((&told.octets[..2], told.packet[1]), (&[39 * two, 0][..], 0), "{way:?}");
    }
}

/// A turn is used for as many small messages as it has octets for: most need no exchange with the port.
/// A peer that posts no receives holds up its own lane, and no other.
#[test]
fn a_stalled_receiver_does_not_delay_another_lane() {
    for way in WAYS {
        let qos = config(&[], &[(0, 255), (1, 1)], GBIT);
        let mut bench = Bench::new(way, qos, &[0, 1], 5, 65536);
        bench.flows[0].op = SendOp::Send;
        bench.run(5_000_000);
        let sent = bench.measure(20_000_000);
        assert_eq!(bench.flows[0].done, 0, "{way:?}");
        // 20 ms at 1 Gbit/s, of which what is refused and repeated takes a part.
        assert!(sent[1] >= 0.9 * 2_500_000.0, "{way:?}: {sent:?}");
    }
}

/// A processor does not wake up for each packet of a long backlog, unless its lane goes first.
#[test]
fn a_long_backlog_is_looked_at_seldom() {
    let exchanges = |high: &[(u8, u8)], message: usize| {
        let rules = config(high, &[(0, 1)], GBIT);
        let mut bench = Bench::new(Way::Link, rules.clone(), &[0], 5, message);
        let told = record(&mut bench, &rules, true);
        bench.run(2_000_000);
        told.lock().unwrap().clear();
        let before = bench.used()[0].octets;
        bench.run(10_000_000);
        let sent = bench.used()[0].octets - before;
        assert_near(sent as f64, 1_250_000.0, 0.02, "octets in 10 ms");
        told.lock().unwrap().len()
    };
    // A packet takes 33 us.
    let (long, first) = (exchanges(&[], 1 << 20), exchanges(&[(0, 255)], 1 << 20));
    assert!(long <= 250, "{long} exchanges for a long backlog");
    assert!(first >= 300, "{first} exchanges for a lane that goes first");
}

#[test]
fn small_messages_share_a_turn() {
    let qos = config(&[], &[(0, 3), (1, 1)], GBIT);
    let mut bench = Bench::new(Way::Stream(usize::MAX), qos.clone(), &[0, 1], 5, 64);
    let told = record(&mut bench, &qos, true);
    bench.run(10_000_000);
    let packets = bench.used()[..2].iter().map(|lane| lane.packets).sum::<u64>();
    let exchanges = told.lock().unwrap().len() as u64;
    assert!(packets > 13_000, "{packets}");
    assert!(exchanges * 5 < packets, "{exchanges} exchanges for {packets} packets");
}

/// A port grants by the time: a doorbell that names an old one would wait for an alarm instead of a packet.
#[test]
fn doorbells_need_the_time_with_lanes() {
    let mut bench = Bench::new(Way::Link, config(&[], &[(0, 1)], GBIT), &[0], 5, 64);
    assert!(bench.pair.hosts[0].adapter.doorbell_wants_time(bench.flows[0].qps[0]));
    let (without, with) = (bench.pair.datagram_qp(1), bench.pair.datagram_qp(0));
    assert!(bench.pair.hosts[0].adapter.doorbell_wants_time(with));
    assert!(!bench.pair.hosts[1].adapter.doorbell_wants_time(without));
}
