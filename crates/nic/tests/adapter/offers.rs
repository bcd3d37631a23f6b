//! Small requests that a peer is offered: it executes them if it looks, and leaves them to the poster if not.

use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use crate::pair::{Buffer, Host, Pair, Way, statuses};
use quipu_nic::*;

/// So often that whoever looks at all comes first: for many seconds.
const LONG: u32 = 1_000_000_000;
/// Longer than anything here takes.
const PATIENCE: Duration = Duration::from_secs(60);

/// Two sides that have met, so that both look for themselves. The first one offers requests.
struct Met {
    pair: Pair,
    qps: [QpId; 2],
    buffers: [Buffer; 2],
    /// Where receives of the other one complete.
    glanced: CqId,
}

/// A request, of the peer's place and key.
type Op = fn(u64, u32) -> SendOp;

const WRITE: Op = |addr, rkey| SendOp::Write { addr, rkey };
const READ: Op = |addr, rkey| SendOp::Read { addr, rkey };
/// Where the 8 bytes are that a request is about.
fn place_of(wr_id: u64) -> usize {
    8 * (wr_id as usize % 32)
}

/// Posts a request at once; whether that was done.
fn post(
    host: &mut Host,
    (qp, now): (QpId, Time),
    [here, there]: [&Buffer; 2],
    (op, rkey): (Op, u32),
    wr_id: u64,
) -> bool {
    let list = [here.sge(place_of(wr_id), 8)];
    let op = op(there.addr() + place_of(wr_id) as u64, rkey);
    let (flags, payload) = (SendFlags::SIGNALED, Payload::Sges(&list));
    host.adapter.post_at_once(now, qp, &SendWr { wr_id, to: To::Peer, op, flags, payload })
}

fn word(buffer: &Buffer, wr_id: u64) -> u64 {
    u64::from_ne_bytes(buffer.bytes(place_of(wr_id), 8).try_into().unwrap())
}

/// Says that it is over, also where an assertion fails meanwhile.
struct Over<'a>(&'a AtomicBool);

impl Drop for Over<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// What the peer does all the time while requests are posted.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Peer {
    Nothing,
    /// It serves all that comes.
    Looks,
    /// It takes what it sees, and executes it later.
    Glances,
}

impl Met {
    fn new(way: Way, looks: u32) -> Self {
        let offers = move |config: &mut Config| config.offer_looks = looks;
        let mut pair = Pair::with(way, [offers; 2]);
        let glanced = pair.hosts[1].adapter.create_cq(64, None, 0).unwrap().0;
        let poster = pair.hosts[0].qp();
        let qps = [poster, pair.hosts[1].qp_with(|init| init.recv_cq = glanced)];
        pair.connect(qps);
        let buffers = [0, 1].map(|host| pair.buffer(host, 256));
        let mut met = Self { pair, qps, buffers, glanced };
        met.meet();
        met
    }

    /// Exchanges messages, which arrive.
    fn meet(&mut self) {
        for (host, other) in [(0, 1), (1, 0)] {
            self.pair.recv(other, self.qps[other], 50, &[]);
            self.pair.send(host, self.qps[host], 51, SendOp::Send, &[]);
            self.pair.run();
            let received = if other == 1 { self.received() } else { self.pair.polled(0) };
            assert_eq!(received, [(50, WcStatus::Success)]);
            assert_eq!(self.pair.polled(host), [(51, WcStatus::Success)]);
        }
    }

    /// What has completed of the peer's receives.
    fn received(&mut self) -> Vec<(u64, WcStatus)> {
        let mut out = [Completion::default(); 64];
        let count = self.pair.hosts[1].adapter.poll_cq(self.glanced, &mut out).unwrap();
        statuses(&out[..count])
    }

    /// Posts writes of 8 bytes, each of its number, as [`post`](Self::post).
    fn write(&mut self, wr_ids: Range<u64>, rkey: u32, does: Peer) -> usize {
        wr_ids
            .clone()
            .for_each(|wr_id| self.buffers[0].fill(place_of(wr_id), &wr_id.to_ne_bytes()));
        self.post(WRITE, wr_ids, rkey, does)
    }

    /// Posts a request for each of `wr_ids`, of 32 at most, once the peer has begun with what it does; how
    /// many were done at once before one was not.
    fn post(&mut self, op: Op, wr_ids: Range<u64>, rkey: u32, does: Peer) -> usize {
        let [over, begun] = [does == Peer::Nothing; 2].map(AtomicBool::new);
        let (now, qp, glanced) = (self.pair.now, self.qps[0], self.glanced);
        let [poster, peer] = &mut self.pair.hosts;
        let [here, there] = &self.buffers;
        std::thread::scope(|scope| {
            let _over = Over(&over);
            scope.spawn(|| {
                while !over.load(Ordering::Relaxed) {
                    match does {
                        Peer::Glances => drop(peer.adapter.glance(now, glanced, |_| {})),
                        _ => drop(peer.adapter.progress(now)),
                    }
                    begun.store(true, Ordering::Relaxed);
                    std::thread::yield_now();
                }
            });
            while !begun.load(Ordering::Relaxed) {
                std::thread::yield_now();
            }
            let post = |wr_id| post(poster, (qp, now), [here, there], (op, rkey), wr_id);
            wr_ids.map(post).take_while(|done| *done).count()
        })
    }

    fn at_peer(&self, wr_id: u64) -> u64 {
        word(&self.buffers[1], wr_id)
    }

    /// How many writes and reads the peer has executed itself.
    fn executed(&self) -> u64 {
        let num = self.pair.hosts[1].adapter.query_qp(self.qps[1]).unwrap().num;
        let mut pairs = self.pair.hosts[1].adapter.queue_pairs();
        let done = pairs.find(|pair| pair.num == num).unwrap().counters.responder;
        done.writes + done.reads
    }
}

fn successes(wr_ids: Range<u64>) -> Vec<(u64, WcStatus)> {
    wr_ids.map(|wr_id| (wr_id, WcStatus::Success)).collect()
}

#[test]
fn a_peer_that_looks_executes_writes_while_they_are_posted() {
    let mut met = Met::new(Way::Link, LONG);
    let key = met.buffers[1].key();
    for first in [1, 33, 65] {
        assert_eq!(met.write(first..first + 32, key, Peer::Looks), 32);
        assert!((first..first + 32).all(|wr_id| met.at_peer(wr_id) == wr_id));
        assert_eq!(met.pair.polled(0), successes(first..first + 32), "known to be executed, too");
    }
    assert_eq!(met.executed(), 96);
    met.meet();
}

#[test]
fn a_peer_that_looks_answers_while_it_is_asked() {
    let mut met = Met::new(Way::Link, LONG);
    let key = met.buffers[1].key();
    (0..32).for_each(|wr_id| met.buffers[1].fill(place_of(wr_id), &(70 + wr_id).to_ne_bytes()));
    assert_eq!(met.post(READ, 0..32, key, Peer::Looks), 32);
    assert_eq!(met.pair.polled(0), successes(0..32));
    assert!((0..32).all(|wr_id| word(&met.buffers[0], wr_id) == 70 + wr_id));
    assert_eq!(met.executed(), 32);
    met.meet();
}

#[test]
fn a_peer_that_does_not_look_leaves_them_to_the_poster() {
    let mut met = Met::new(Way::Link, 3);
    let key = met.buffers[1].key();
    for first in (0..512).step_by(32) {
        assert_eq!(met.write(first..first + 32, key, Peer::Nothing), 32);
        assert!((first..first + 32).all(|wr_id| met.at_peer(wr_id) == wr_id));
        assert_eq!(met.pair.polled(0), successes(first..first + 32));
        assert_eq!(met.post(READ, first + 1..first + 32, key, Peer::Nothing), 31);
        assert_eq!(met.pair.polled(0), successes(first + 1..first + 32));
    }
    let now = met.pair.now;
    assert!(!met.pair.hosts[1].adapter.progress(now), "nothing is left for it");
    assert_eq!(met.executed(), 0);
    met.meet();
}

#[test]
fn a_peer_that_looks_again_is_asked_again() {
    // So few looks that the peer comes first now and then.
    let mut met = Met::new(Way::Link, 20_000);
    let key = met.buffers[1].key();
    met.write(0..32, key, Peer::Nothing);
    assert_eq!((met.pair.polled(0).len(), met.executed()), (32, 0));
    let begun = Instant::now();
    while met.executed() == 0 {
        assert!(begun.elapsed() < PATIENCE, "it is not asked any more");
        met.write(0..32, key, Peer::Looks);
        met.pair.run();
        met.pair.polled(0);
    }
}

/// Taken is not executed: what comes behind it waits for it.
#[test]
fn behind_what_the_peer_has_taken_everything_goes_its_way() {
    let mut met = Met::new(Way::Link, 200_000);
    let key = met.buffers[1].key();
    // Some may be taken back before the peer has begun; the one behind that which is taken is not done.
    let (mut first, begun) = (1, Instant::now());
    let taken = loop {
        let done = met.write(first..first + 32, key, Peer::Glances);
        let at_once = met.pair.polled(0);
        assert!(at_once.iter().all(|(_, status)| *status == WcStatus::Success));
        if done > at_once.len() {
            break first + done as u64 - 1;
        }
        first += 32;
        assert!(begun.elapsed() < PATIENCE, "nothing is ever taken");
    };
    assert_ne!(met.at_peer(taken), taken);
    assert_eq!(met.write(200..201, key, Peer::Nothing), 0, "it would overtake");
    let [here, there] = &met.buffers;
    let (addr, lists) = (there.addr(), [here.sge(64, 8), here.sge(72, 8)]);
    here.fill(64, b"written2");
    let qp = met.qps[0];
    met.pair.send(0, qp, 1001, SendOp::Write { addr: addr + 128, rkey: key }, &lists[..1]);
    met.pair.send(0, qp, 1002, SendOp::Read { addr: addr + 128, rkey: key }, &lists[1..]);
    met.pair.run();
    assert_eq!(met.pair.polled(0), [taken, 1001, 1002].map(|wr_id| (wr_id, WcStatus::Success)));
    assert_eq!((met.at_peer(taken), met.buffers[0].bytes(72, 8)), (taken, b"written2".to_vec()));
    met.meet();
}

#[test]
fn what_the_peer_has_taken_it_may_refuse() {
    // As many looks as there are pass before it is known that it was not executed.
    let (mut met, begun) = (Met::new(Way::Link, 1_000_000), Instant::now());
    while met.write(7..8, 0xdead_0000, Peer::Looks) == 0 {
        assert!(begun.elapsed() < PATIENCE, "it is never the peer's");
    }
    met.pair.run();
    assert_eq!(met.pair.polled(0), [(7, WcStatus::RemAccessErr)]);
    assert_eq!(met.pair.state(0, met.qps[0]), QpState::Err);

    let mut met = Met::new(Way::Link, 3);
    assert_eq!(met.write(7..8, 0xdead_0000, Peer::Nothing), 0, "it is for others to tell of");
    assert_eq!(met.pair.polled(0), []);
    met.meet();
}

#[test]
fn what_the_peer_is_asked_it_may_refuse_too() {
    let mut met = Met::new(Way::Link, LONG);
    assert_eq!(met.post(READ, 7..8, 0xdead_0000, Peer::Looks), 1);
    assert_eq!(met.pair.polled(0), [(7, WcStatus::RemAccessErr)], "it is known at once");
    assert_eq!(met.pair.state(0, met.qps[0]), QpState::Err);
}

/// What it answers has to wait for nothing else, nor to be told from other answers.
#[test]
fn nobody_is_asked_twice_at_once() {
    let (mut met, begun) = (Met::new(Way::Link, 200_000), Instant::now());
    let key = met.buffers[1].key();
    met.buffers[1].fill(8, b"answered");
    // Until one was taken that is not answered.
    while met.post(READ, 1..2, key, Peer::Glances) == 1 && !met.pair.polled(0).is_empty() {
        assert!(begun.elapsed() < PATIENCE, "nothing is ever taken");
    }
    assert_eq!(met.post(READ, 2..3, key, Peer::Nothing), 0);
    met.pair.run();
    assert_eq!(met.pair.polled(0), successes(1..2));
    assert_eq!(met.buffers[0].bytes(8, 8), b"answered");
    met.meet();
}

#[test]
fn what_is_reached_without_the_kernel_or_not_by_it_is_not_offered() {
    for (way, at_once) in [(Way::LinkMapped, 32), (Way::LinkCopying, 0)] {
        let mut met = Met::new(way, LONG);
        let key = met.buffers[1].key();
        assert_eq!(met.write(0..32, key, Peer::Looks), at_once, "{way:?}");
        met.pair.run();
        assert_eq!(met.executed(), 0, "{way:?}");
    }
}

#[test]
fn nothing_is_offered_behind_what_is_not_executed() {
    let mut met = Met::new(Way::Link, LONG);
    let key = met.buffers[1].key();
    // It waits for a receive.
    met.pair.send(0, met.qps[0], 1, SendOp::Send, &[]);
    assert_eq!(met.write(2..3, key, Peer::Looks), 0);
    assert_eq!((met.executed(), met.at_peer(2)), (0, 0));
}
