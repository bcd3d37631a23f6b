//! Bytes that requests refer to and that the kernel does not let be fetched (any more): the peer hands them
//! over.

use crate::pair::{Pair, Way, connected, connected_with};
use WcStatus::{LocProtErr, RetryExcErr, Success, WrFlushErr};
use quipu_nic::*;

const LEN: usize = 300_000;

fn pattern(seed: usize) -> Vec<u8> {
    (0..LEN).map(|at| ((at + seed) % 251) as u8).collect()
}

/// As behind `setuid`: what the link was promised does not hold.
fn forbid(pair: &Pair) {
    pair.memory.0.lock().unwrap().clear();
}

#[test]
fn what_cannot_be_fetched_is_handed_over() {
    for way in [Way::Link, Way::LinkMapped] {
        let (mut pair, qps) = connected(way);
        let (here, there) = (pair.buffer(0, 2 * LEN), pair.buffer(1, 2 * LEN));
        forbid(&pair);
        for round in 0..2 {
            // Of several pieces, in several slots.
            let (sent, written) = (pattern(round), pattern(round + 7));
            here.fill(0, &sent);
            here.fill(LEN, &written);
            let pieces: Vec<_> = (0..10).map(|at| here.sge(at * LEN / 10, LEN / 10)).collect();
            pair.recv(1, qps[1], 1, &[there.sge(0, 1000), there.sge(1000, LEN - 1000)]);
            pair.recv(1, qps[1], 2, &[]);
            pair.send(0, qps[0], 3, SendOp::Send, &pieces);
            let (addr, rkey) = (there.addr() + LEN as u64, there.key());
            let write = SendOp::WriteImm { addr, rkey, imm: 5 };
            pair.send(0, qps[0], 4, write, &[here.sge(LEN, LEN)]);
            pair.run();
            assert_eq!(pair.polled(1), [(1, Success), (2, Success)]);
            assert_eq!(pair.polled(0), [(3, Success), (4, Success)]);
            assert!(there.bytes(0, LEN) == sent && there.bytes(LEN, LEN) == written);

            // Both ways without the peer's program.
            let (addr, rkey) = (there.addr(), there.key());
            pair.send(0, qps[0], 5, SendOp::Write { addr, rkey }, &[here.sge(LEN, LEN)]);
            pair.run();
            pair.send(0, qps[0], 6, SendOp::Read { addr, rkey }, &[here.sge(0, LEN)]);
            pair.run();
            assert_eq!(pair.polled(0), [(5, Success), (6, Success)]);
            assert!(there.bytes(0, LEN) == written && here.bytes(0, LEN) == written);
        }
    }
}

/// It waits meanwhile, and so does what follows.
#[test]
fn a_queue_pair_whose_peer_leaves_in_the_middle_ends() {
    let (mut pair, qps) = connected_with(Way::Link, |attr| attr.timeout = 8);
    let (here, there) = (pair.buffer(0, LEN), pair.buffer(1, LEN));
    forbid(&pair);
    pair.recv(1, qps[1], 1, &[there.sge(0, LEN)]);
    pair.stopped = Some(0);
    pair.send(0, qps[0], 2, SendOp::Send, &[here.sge(0, LEN)]);
    pair.later(1_000_000);
    pair.hosts[0].adapter.destroy_qp(pair.now, qps[0]).unwrap();
    pair.stopped = None;
    pair.later(1_000_000_000);
    pair.send(1, qps[1], 3, SendOp::Send, &[]);
    pair.later(10_000_000_000);
    assert_eq!(pair.polled(1), [(3, RetryExcErr), (1, WrFlushErr)]);
}

/// The memory of a request that is under way is not the peer's any more: there the request has failed, and
/// what it is asked for does not come.
#[test]
fn what_the_peer_has_taken_back_does_not_come() {
    let (mut pair, qps) = connected_with(Way::Link, |attr| attr.timeout = 8);
    let (here, there) = (pair.buffer(0, LEN), pair.buffer(1, LEN));
    forbid(&pair);
    pair.recv(1, qps[1], 1, &[there.sge(0, LEN)]);
    pair.stopped = Some(0);
    pair.send(0, qps[0], 2, SendOp::Send, &[here.sge(0, LEN)]);
    pair.later(1_000_000);
    pair.hosts[0].adapter.dereg_mr(here.region.id).unwrap();
    pair.stopped = None;
    pair.later(1_000_000_000);
    assert_eq!(pair.polled(0), [(2, LocProtErr)]);
    assert_eq!(pair.polled(1), []);
    assert!(there.bytes(0, LEN) == [0; LEN]);
    pair.send(1, qps[1], 3, SendOp::Send, &[]);
    pair.later(10_000_000_000);
    assert_eq!(pair.polled(1), [(3, RetryExcErr), (1, WrFlushErr)]);
}
