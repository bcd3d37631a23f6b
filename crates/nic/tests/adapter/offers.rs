//! Small writes that a peer is offered: it executes them if it looks, and leaves them to the poster if not.

use std::sync::atomic::{AtomicBool, Ordering};

use crate::pair::{Buffer, Host, Pair, Way};
use quipu_nic::*;

/// So often that whoever looks at all comes first: for seconds.
const LONG: u32 = 50_000_000;

/// Two sides that have met, so that both look for themselves. The first one offers writes.
struct Met {
    pair: Pair,
    qps: [QpId; 2],
    buffers: [Buffer; 2],
}

/// Posts a write of `len` bytes at `offset` at once; whether that was done.
fn post(
    host: &mut Host,
    (qp, now): (QpId, Time),
    [here, there]: [&Buffer; 2],
    (wr_id, rkey): (u64, u32),
    (offset, len): (usize, usize),
) -> bool {
    let list = [here.sge(offset, len)];
    let op = SendOp::Write { addr: there.addr() + offset as u64, rkey };
    let (flags, payload) = (SendFlags::SIGNALED, Payload::Sges(&list));
    host.adapter.post_at_once(now, qp, &SendWr { wr_id, to: To::Peer, op, flags, payload })
}

impl Met {
    fn new(way: Way, looks: u32) -> Self {
        let offers = move |config: &mut Config| config.offer_looks = looks;
        let mut pair = Pair::with(way, [offers; 2]);
        let qps = [0, 1].map(|host| pair.hosts[host].qp());
        pair.connect(qps);
        let buffers = [0, 1].map(|host| pair.buffer(host, 256));
        let mut met = Self { pair, qps, buffers };
        met.meet();
        met
    }

    /// Exchanges messages, which arrive.
    fn meet(&mut self) {
        for (host, other) in [(0, 1), (1, 0)] {
            self.pair.recv(other, self.qps[other], 50, &[]);
            self.pair.send(host, self.qps[host], 51, SendOp::Send, &[]);
            self.pair.run();
            assert_eq!(self.pair.polled(other), [(50, WcStatus::Success)]);
            assert_eq!(self.pair.polled(host), [(51, WcStatus::Success)]);
        }
    }

    /// Posts writes of 8 bytes, one for each of `wr_ids`, while the peer looks all the time, or not at all.
    fn write(&mut self, wr_ids: std::ops::Range<u64>, rkey: u32, peer_looks: bool) -> bool {
        let over = AtomicBool::new(!peer_looks);
        let (now, qp) = (self.pair.now, self.qps[0]);
        let [poster, peer] = &mut self.pair.hosts;
        let [here, there] = &self.buffers;
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while !over.load(Ordering::Relaxed) {
                    peer.adapter.progress(now);
                    std::thread::yield_now();
                }
            });
            let mut posted = wr_ids.map(|wr_id| {
                here.fill(8 * (wr_id as usize % 32), &wr_id.to_ne_bytes());
                let place = (8 * (wr_id as usize % 32), 8);
                post(poster, (qp, now), [here, there], (wr_id, rkey), place)
            });
            let all = posted.all(|posted| posted);
            over.store(true, Ordering::Relaxed);
            all
        })
    }

    fn at_peer(&self, wr_id: u64) -> u64 {
        let bytes = self.buffers[1].bytes(8 * (wr_id as usize % 32), 8);
        u64::from_ne_bytes(bytes.try_into().unwrap())
    }

    /// How many writes the peer has executed itself.
    fn executed(&self) -> u64 {
        let num = self.pair.hosts[1].adapter.query_qp(self.qps[1]).unwrap().num;
        let mut pairs = self.pair.hosts[1].adapter.queue_pairs();
        pairs.find(|pair| pair.num == num).unwrap().counters.responder.writes
    }
}

#[test]
fn a_peer_that_looks_executes_writes_while_they_are_posted() {
    let mut met = Met::new(Way::Link, LONG);
    let key = met.buffers[1].key();
    for first in [1, 33, 65] {
        assert!(met.write(first..first + 32, key, true));
        assert!((first..first + 32).all(|wr_id| met.at_peer(wr_id) == wr_id));
        let done: Vec<_> = (first..first + 32).map(|wr_id| (wr_id, WcStatus::Success)).collect();
        assert_eq!(met.pair.polled(0), done, "each is known to be executed, too");
    }
    assert_eq!(met.executed(), 96);
    met.meet();
}

#[test]
fn a_peer_that_does_not_look_leaves_them_to_the_poster() {
    let mut met = Met::new(Way::Link, 3);
    let key = met.buffers[1].key();
    assert!(met.write(1..33, key, false));
    assert!((1..33).all(|wr_id| met.at_peer(wr_id) == wr_id));
    assert_eq!(met.pair.polled(0).len(), 32);
    let now = met.pair.now;
    assert!(!met.pair.hosts[1].adapter.progress(now), "nothing is left for it");
    assert_eq!(met.executed(), 0);
    met.meet();
    // It is asked again all the same.
    met.pair.hosts[1].adapter.progress(now);
    for first in (100..400).step_by(30) {
        assert!(met.write(first..first + 30, key, false));
        assert_eq!(met.pair.polled(0).len(), 30);
    }
    assert_eq!(met.executed(), 0);
}

#[test]
fn what_the_peer_has_taken_it_may_refuse() {
    let mut met = Met::new(Way::Link, LONG);
    assert!(met.write(7..8, 0xdead_0000, true), "it is the peer's");
    met.pair.run();
    assert_eq!(met.pair.polled(0), [(7, WcStatus::RemAccessErr)]);
    assert_eq!(met.pair.state(0, met.qps[0]), QpState::Err);

    let mut met = Met::new(Way::Link, 3);
    assert!(!met.write(7..8, 0xdead_0000, false), "it is for others to tell of");
    assert_eq!(met.pair.polled(0), []);
    met.meet();
}

#[test]
fn what_is_reached_without_the_kernel_or_not_by_it_is_not_offered() {
    for (way, at_once) in [(Way::LinkMapped, true), (Way::LinkCopying, false)] {
        let mut met = Met::new(way, LONG);
        let key = met.buffers[1].key();
        assert_eq!(
            met.write(1..2, key, false),
            at_once,
            "{way:?}: it would be waited for, for ever"
        );
    }
}

#[test]
fn nothing_is_offered_behind_what_is_not_executed() {
    let mut met = Met::new(Way::Link, LONG);
    let key = met.buffers[1].key();
    met.pair.send(0, met.qps[0], 1, SendOp::Send, &[]);
    assert!(!met.write(2..3, key, false));
}
