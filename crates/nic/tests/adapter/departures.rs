//! Peers that have left: destroyed, reset, in error, or gone with their process. Nobody says so on hardware:
//! who sends to them repeats it for the time of the queue pair, and what they had sent arrives.

#![allow(clippy::needless_range_loop)]

use crate::pair::{Host, Pair, WAYS, Way, connected, connected_with};
use WcStatus::{LocLenErr, MwBindErr, RemAccessErr, RetryExcErr, Success, WrFlushErr};
use quipu_nic::mem::{Access, Key};
use quipu_nic::*;

const SECOND: u64 = 1_000_000_000;

/// 4.096 us << 10, for each of two tries.
const REPEATS: u64 = 2 * (4096 << 10);

fn impatient(attr: &mut QpAttr) {
    attr.timeout = 10;
    attr.retry_cnt = 1;
}

fn for_ever(attr: &mut QpAttr) {
    attr.timeout = 0;
}

/// How a queue pair can leave.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Leave {
    Destroyed,
    Reset,
    Error,
    /// With its process: the link goes down, or the stream ends.
    Killed,
}

const LEAVES: [Leave; 4] = [Leave::Destroyed, Leave::Reset, Leave::Error, Leave::Killed];

fn set_state(pair: &mut Pair, host: usize, qp: QpId, state: QpState) {
    let attr = QpAttr { state, ..QpAttr::default() };
    pair.hosts[host].adapter.modify_qp(pair.now, qp, &attr, QpAttrMask::STATE).unwrap();
}

/// The queue pair of host 1 leaves.
fn leave(pair: &mut Pair, qp: QpId, how: Leave) {
    let now = pair.now;
    match how {
        Leave::Destroyed => pair.hosts[1].adapter.destroy_qp(now, qp).unwrap(),
        Leave::Reset => set_state(pair, 1, qp, QpState::Reset),
        Leave::Error => set_state(pair, 1, qp, QpState::Err),
        Leave::Killed if matches!(pair.way, Way::Stream(_)) => {
            let conn = pair.stream_ends()[0];
            pair.hosts[0].adapter.handle_lost(now, conn, Loss::Closed);
        }
        Leave::Killed => {
            let link = pair.link()[0];
            pair.hosts[0].adapter.handle_link_down(now, link);
        }
    }
}

/// Two connected queue pairs of host 0.
fn own_pair(change: impl Fn(&mut QpAttr)) -> (Pair, [QpId; 2]) {
    let mut pair = Pair::new(Way::Link);
    let qps = [pair.hosts[0].qp(), pair.hosts[0].qp()];
    let elsewhere = pair.hosts[1].qp();
    for (from, to) in [(qps[0], qps[1]), (qps[1], qps[0])] {
        let dest_qp_num = pair.hosts[0].adapter.query_qp(to).unwrap().num.0;
        let dgid = pair.hosts[0].adapter.config().gid;
        let peer = |attr: &mut QpAttr| {
            change(attr);
            attr.dest_qp_num = dest_qp_num;
            attr.av.dgid = dgid;
        };
        pair.to_rtr(0, [from, elsewhere], &peer);
        pair.to_rts(0, from, &peer);
    }
    pair.run();
    (pair, qps)
}

#[test]
fn requests_to_a_peer_that_has_left_are_repeated_and_then_fail() {
    for way in WAYS {
        for how in LEAVES {
            let (mut pair, qps) = connected_with(way, impatient);
            let start = pair.now;
            pair.recv(0, qps[0], 50, &[]);
            // Under way, for want of a receive.
            pair.send(0, qps[0], 1, SendOp::Send, &[]);
            pair.run();
            leave(&mut pair, qps[1], how);
            pair.run();
            pair.run_until(start.after(REPEATS / 2));
            pair.send(0, qps[0], 2, SendOp::Send, &[]);
            pair.run_until(start.after(REPEATS - 1));
            assert_eq!(pair.polled(0), [], "{way:?} {how:?}");
            assert_eq!(pair.state(0, qps[0]), QpState::Rts, "{way:?} {how:?}");
            pair.run_until(start.after(REPEATS));
            let expected = [(1, RetryExcErr), (2, WrFlushErr), (50, WrFlushErr)];
            assert_eq!(pair.polled(0), expected, "{way:?} {how:?}");
            assert_eq!(pair.state(0, qps[0]), QpState::Err, "{way:?} {how:?}");
            assert_eq!(pair.hosts[0].adapter.poll_timeout(), None, "{way:?} {how:?}");
        }
    }
}

#[test]
fn an_idle_queue_pair_notices_with_its_next_request() {
    for way in WAYS {
        for how in LEAVES {
            let (mut pair, qps) = connected_with(way, impatient);
            let there = pair.buffer(1, 64);
            let here = pair.buffer(0, 64);
            leave(&mut pair, qps[1], how);
            pair.later(SECOND);
            assert_eq!(pair.state(0, qps[0]), QpState::Rts, "{way:?} {how:?}");
            let start = pair.now;
            // What would not need the peer's processor is nothing else.
            let op = SendOp::Write { addr: there.addr(), rkey: there.key() };
            pair.send(0, qps[0], 1, op, &[here.sge(0, 8)]);
            pair.run_until(start.after(REPEATS - 1));
            assert_eq!(pair.polled(0), [], "{way:?} {how:?}");
            pair.run_until(start.after(REPEATS));
            assert_eq!(pair.polled(0), [(1, RetryExcErr)], "{way:?} {how:?}");
        }
    }
}

#[test]
fn it_is_the_same_within_one_adapter() {
    for how in [Leave::Destroyed, Leave::Reset, Leave::Error] {
        let (mut pair, qps) = own_pair(impatient);
        let start = pair.now;
        pair.send(0, qps[0], 1, SendOp::Send, &[]);
        pair.run();
        match how {
            Leave::Destroyed => pair.hosts[0].adapter.destroy_qp(start, qps[1]).unwrap(),
            Leave::Reset => set_state(&mut pair, 0, qps[1], QpState::Reset),
            _ => set_state(&mut pair, 0, qps[1], QpState::Err),
        }
        pair.run();
        pair.send(0, qps[0], 2, SendOp::Send, &[]);
        pair.run_until(start.after(REPEATS - 1));
        assert_eq!(pair.polled(0), [], "{how:?}");
        pair.run_until(start.after(REPEATS));
        assert_eq!(pair.polled(0), [(1, RetryExcErr), (2, WrFlushErr)], "{how:?}");
    }
}

#[test]
fn what_the_peer_sent_before_it_left_arrives() {
    for way in WAYS {
        for how in LEAVES {
            let (mut pair, qps) = connected(way);
            let (here, there) = (pair.buffer(0, 64), pair.buffer(1, 64));
            there.fill(0, b"the last");
            pair.recv(0, qps[0], 50, &[here.sge(0, 64)]);
            pair.recv(0, qps[0], 51, &[here.sge(0, 64)]);
            pair.send(1, qps[1], 60, SendOp::Send, &[there.sge(0, 8)]);
            if matches!(way, Way::Stream(_)) {
                pair.run();
            }
            leave(&mut pair, qps[1], how);
            // Sent before it is known that nobody is there.
            pair.send(0, qps[0], 1, SendOp::Send, &[]);
            pair.later(SECOND / 10);
            assert_eq!(pair.polled(0), [(50, Success)], "{way:?} {how:?}");
            assert_eq!(here.bytes(0, 8), b"the last");
            pair.later(SECOND);
            assert_eq!(pair.polled(0), [(1, RetryExcErr), (51, WrFlushErr)], "{way:?} {how:?}");
        }
    }
}

/// A card answers what has arrived, whatever its program does next.
#[test]
fn what_had_arrived_before_a_queue_pair_left_is_executed() {
    for way in [Way::Link, Way::LinkCopying] {
        for how in [Leave::Destroyed, Leave::Reset, Leave::Error] {
            let (mut pair, qps) = connected(way);
            let (here, there) = (pair.buffer(0, 64), pair.buffer(1, 64));
            here.fill(0, &[7; 8]);
            pair.recv(1, qps[1], 50, &[there.sge(8, 8)]);
            let op = SendOp::Write { addr: there.addr(), rkey: there.key() };
            pair.send(0, qps[0], 1, SendOp::Send, &[here.sge(0, 8)]);
            pair.send(0, qps[0], 2, op, &[here.sge(0, 8)]);
            leave(&mut pair, qps[1], how);
            pair.run();
            assert_eq!(pair.polled(0), [(1, Success), (2, Success)], "{way:?} {how:?}");
            assert_eq!(there.bytes(0, 16), [7; 16], "{way:?} {how:?}");
            let kept = if how == Leave::Error { vec![(50, Success)] } else { vec![] };
            assert_eq!(pair.polled(1), kept, "{way:?} {how:?}");
        }
    }
    let (mut pair, qps) = own_pair(impatient);
    pair.recv(0, qps[1], 50, &[]);
    pair.hosts[0].adapter.post_send(qps[0], &send(1, SendOp::Send)).unwrap();
    pair.hosts[0].adapter.destroy_qp(pair.now, qps[1]).unwrap();
    pair.run();
    assert_eq!(pair.polled(0), [(1, Success)]);
}

/// Over a stream as well: what is acknowledged as executed is answered.
#[test]
fn reads_and_atomics_that_had_arrived_are_answered() {
    const LEN: usize = 20_000;
    for how in [Leave::Destroyed, Leave::Reset, Leave::Error] {
        let (mut pair, qps) = connected_with(Way::Stream(usize::MAX), impatient);
        let (here, there) = (pair.buffer(0, LEN + 8), pair.buffer(1, LEN));
        there.fill(0, &5_u64.to_ne_bytes());
        there.fill(LEN - 1, &[9]);
        let (addr, rkey) = (there.addr(), there.key());
        pair.send(0, qps[0], 1, SendOp::FetchAdd { addr, rkey, add: 3 }, &[here.sge(0, 8)]);
        pair.send(0, qps[0], 2, SendOp::Read { addr, rkey }, &[here.sge(8, LEN)]);
        ask(&mut pair);
        leave(&mut pair, qps[1], how);
        pair.run();
        assert_eq!(pair.polled(0), [(1, Success), (2, Success)], "{how:?}");
        assert_eq!((here.bytes(0, 8)[0], there.bytes(0, 8)[0]), (5, 8), "{how:?}");
        assert_eq!(here.bytes(8, LEN), there.bytes(0, LEN), "{how:?}");
    }
}

/// The bytes of a large one stay in memory that is the program's again: they are not for the peer any more.
#[test]
fn nothing_is_read_from_memory_once_a_queue_pair_has_left() {
    const LEN: usize = 300_000;
    for how in [Leave::Destroyed, Leave::Reset, Leave::Error] {
        for begun in [0, 1, 10] {
            let (mut pair, qps) = connected_with(Way::Stream(usize::MAX), impatient);
            let (here, there) = (pair.buffer(0, LEN + 8), pair.buffer(1, LEN));
            there.fill(0, &[1; LEN]);
            let (addr, rkey) = (there.addr(), there.key());
            pair.send(0, qps[0], 1, SendOp::Read { addr, rkey }, &[here.sge(0, LEN)]);
            pair.send(0, qps[0], 2, SendOp::FetchAdd { addr, rkey, add: 0 }, &[here.sge(LEN, 8)]);
            ask(&mut pair);
            let (ends, mut bytes) = (pair.stream_ends(), vec![0; 8192]);
            for _ in 0..begun {
                let used = pair.hosts[1].adapter.transmit(pair.now, ends[1], &mut bytes);
                pair.inject(0, &bytes[..used]);
            }
            leave(&mut pair, qps[1], how);
            there.fill(0, &[2; LEN]);
            pair.run();
            assert!(!here.bytes(0, LEN).contains(&2), "{how:?} {begun}");
            assert_eq!(pair.polled(0), [], "{how:?} {begun}");
            pair.later(SECOND);
            assert_eq!(pair.polled(0), [(1, RetryExcErr), (2, WrFlushErr)], "{how:?} {begun}");
        }
    }
}

/// What the peer asked before it asked for what it may not have is answered, as by a card, which comes to a
/// request when those before are executed. Then the queue pair ends.
#[test]
fn answers_come_before_the_end_that_the_peer_is_to_blame_for() {
    const LEN: usize = 300_000;
    let (mut pair, qps) = connected_with(Way::Stream(usize::MAX), impatient);
    let (here, there) = (pair.buffer(0, LEN), pair.buffer(1, LEN));
    there.fill(0, &[1; LEN]);
    let (addr, rkey) = (there.addr(), there.key());
    pair.send(0, qps[0], 1, SendOp::Read { addr, rkey }, &[here.sge(0, LEN)]);
    let wrong = SendOp::Write { addr, rkey: rkey ^ 1 };
    pair.send(0, qps[0], 2, wrong, &[here.sge(0, 8)]);
    ask(&mut pair);
    assert_eq!(pair.state(1, qps[1]), QpState::Rts);
    pair.run();
    assert_eq!(pair.polled(0), [(1, Success), (2, RemAccessErr)]);
    assert_eq!(here.bytes(0, LEN), [1; LEN]);
    assert_eq!(pair.state(1, qps[1]), QpState::Err);
    assert_eq!(pair.hosts[1].adapter.poll_timeout(), None);
    pair.later(SECOND);
    assert_eq!(pair.hosts[1].adapter.connections(), 0);
}

/// Also where it is gone before it has taken the answers: a receive that was too short waits for nothing.
#[test]
fn who_is_to_blame_for_an_end_may_leave_before_it() {
    let (mut pair, qps) = asked_too_much();
    assert_eq!(pair.polled(1), []);
    let conn = pair.stream_ends()[1];
    pair.hosts[1].adapter.handle_lost(pair.now, conn, Loss::Closed);
    assert_eq!(pair.polled(1), [(3, LocLenErr)]);
    assert_eq!(pair.state(1, qps[1]), QpState::Err);
    assert_eq!(pair.hosts[1].adapter.poll_timeout(), None);
}

/// It says no end that would be taken for the end of a read that it has not answered.
#[test]
fn who_leaves_with_answers_owed_blames_no_request() {
    for how in [Leave::Destroyed, Leave::Reset, Leave::Error] {
        let (mut pair, qps) = asked_too_much();
        leave(&mut pair, qps[1], how);
        pair.later(SECOND);
        assert_eq!(pair.polled(0), [(1, RetryExcErr), (2, WrFlushErr)], "{how:?}");
    }
}

/// A long read, and a send that is too long for its receive, have arrived; nothing is answered.
fn asked_too_much() -> (Pair, [QpId; 2]) {
    const LEN: usize = 300_000;
    let (mut pair, qps) = connected_with(Way::Stream(usize::MAX), impatient);
    let (here, there) = (pair.buffer(0, LEN), pair.buffer(1, LEN));
    pair.recv(1, qps[1], 3, &[there.sge(0, 4)]);
    let read = SendOp::Read { addr: there.addr(), rkey: there.key() };
    pair.send(0, qps[0], 1, read, &[here.sge(0, LEN)]);
    pair.send(0, qps[0], 2, SendOp::Send, &[here.sge(0, 8)]);
    ask(&mut pair);
    (pair, qps)
}

/// The requests of host 0 arrive, and nothing else happens.
fn ask(pair: &mut Pair) {
    let (ends, mut bytes) = (pair.stream_ends(), vec![0; 8192]);
    let used = pair.hosts[0].adapter.transmit(pair.now, ends[0], &mut bytes);
    let peer = &mut pair.hosts[1].adapter;
    assert_eq!(peer.handle_stream(pair.now, ends[1], &bytes[..used]), used);
}

fn send(wr_id: u64, op: SendOp) -> SendWr<'static> {
    let (flags, payload) = (SendFlags::SIGNALED, Payload::Sges(&[]));
    SendWr { wr_id, to: To::Peer, op, flags, payload }
}

#[test]
fn without_a_timeout_nothing_fails_and_nothing_lingers() {
    for way in WAYS {
        for how in LEAVES {
            let (mut pair, qps) = connected_with(way, for_ever);
            pair.send(0, qps[0], 1, SendOp::Send, &[]);
            leave(&mut pair, qps[1], how);
            pair.later(1000 * SECOND);
            assert_eq!(pair.polled(0), [], "{way:?} {how:?}");
            assert_eq!(pair.hosts[0].adapter.poll_timeout(), None, "{way:?} {how:?}");
            pair.hosts[0].adapter.destroy_qp(pair.now, qps[0]).unwrap();
            pair.run();
            assert_eq!(pair.hosts[0].adapter.connections(), 0, "{way:?} {how:?}");
        }
    }
}

#[test]
fn the_longest_timeout_is_nineteen_hours() {
    let (mut pair, qps) = connected_with(Way::Link, |attr| attr.timeout = 31);
    let start = pair.now;
    leave(&mut pair, qps[1], Leave::Destroyed);
    pair.run();
    pair.send(0, qps[0], 1, SendOp::Send, &[]);
    let expected = start.after(8 * (4096 << 31));
    assert_eq!(pair.hosts[0].adapter.poll_timeout(), Some(expected));
    pair.run_until(expected);
    assert_eq!(pair.polled(0), [(1, RetryExcErr)]);
}

/// Anyone who has heard of it otherwise, from `rdma_cm` above all, waits for nothing.
#[test]
fn the_wait_ends_with_the_queue_pair() {
    for way in WAYS {
        for how in LEAVES {
            for state in [Some(QpState::Err), Some(QpState::Reset), None] {
                let (mut pair, qps) = connected(way);
                pair.recv(0, qps[0], 50, &[]);
                pair.send(0, qps[0], 1, SendOp::Send, &[]);
                leave(&mut pair, qps[1], how);
                pair.run();
                assert_eq!(pair.polled(0), []);
                assert!(pair.hosts[0].adapter.poll_timeout().is_some());
                match state {
                    Some(state) => set_state(&mut pair, 0, qps[0], state),
                    None => pair.hosts[0].adapter.destroy_qp(pair.now, qps[0]).unwrap(),
                }
                let flushed = match state {
                    Some(QpState::Err) => vec![(1, WrFlushErr), (50, WrFlushErr)],
                    _ => vec![],
                };
                assert_eq!(pair.polled(0), flushed, "{way:?} {how:?} {state:?}");
                assert_eq!(pair.hosts[0].adapter.poll_timeout(), None, "{way:?} {how:?}");
            }
        }
    }
}

#[test]
fn a_queue_pair_that_is_reset_meanwhile_can_be_connected_anew() {
    for way in WAYS {
        for again in [false, true] {
            let (mut pair, qps) = connected_with(way, impatient);
            pair.send(0, qps[0], 1, SendOp::Send, &[]);
            leave(&mut pair, qps[1], Leave::Reset);
            pair.run();
            // The peer comes back before this end knows: that is another connection.
            if again {
                pair.to_rtr(1, qps, &impatient);
                pair.to_rts(1, qps[1], &impatient);
                pair.later(REPEATS / 2);
                assert_eq!(pair.polled(0), [], "{way:?}");
                set_state(&mut pair, 1, qps[1], QpState::Reset);
            }
            set_state(&mut pair, 0, qps[0], QpState::Reset);
            pair.connect_with(qps, impatient);
            pair.later(SECOND);
            pair.recv(1, qps[1], 50, &[]);
            pair.send(0, qps[0], 2, SendOp::Send, &[]);
            pair.later(SECOND);
            assert_eq!(pair.polled(0), [(2, Success)], "{way:?} {again}");
            assert_eq!(pair.polled(1), [(50, Success)], "{way:?} {again}");
        }
    }
}

/// Requests that need no peer.
#[test]
fn what_concerns_this_end_alone_is_done() {
    for way in WAYS {
        let (mut pair, qps) = connected_with(way, impatient);
        let memory = pair.buffer(0, 64);
        let Host { adapter, pd, .. } = &mut pair.hosts[0];
        let (mw, key) = adapter.alloc_mw(*pd, WindowType::Two).unwrap();
        let rkey = key.next_tag().0;
        leave(&mut pair, qps[1], Leave::Destroyed);
        pair.run();
        let bind = BindMw {
            mw,
            rkey,
            mr: memory.region.id,
            addr: memory.addr(),
            len: 64,
            access: Access::REMOTE_WRITE,
        };
        pair.send(0, qps[0], 1, SendOp::BindMw(bind), &[]);
        pair.send(0, qps[0], 2, SendOp::LocalInv { key: rkey }, &[]);
        pair.run();
        assert_eq!(pair.polled(0), [(1, Success), (2, Success)], "{way:?}");
        pair.later(SECOND);
        assert_eq!(pair.state(0, qps[0]), QpState::Rts);
        pair.send(0, qps[0], 3, SendOp::LocalInv { key: Key::NONE.0 }, &[]);
        pair.run();
        assert_eq!(pair.polled(0), [(3, MwBindErr)], "{way:?}");
    }
}

/// A stream that ends because nothing came for the time of the queue pair: that time is over.
#[test]
fn a_peer_that_was_silent_for_so_long_already_is_given_up_at_once() {
    for loss in [Loss::TimedOut, Loss::Unavailable] {
        let (mut pair, qps) = connected(Way::Stream(usize::MAX));
        pair.send(0, qps[0], 1, SendOp::Send, &[]);
        pair.run();
        let conn = pair.stream_ends()[0];
        pair.hosts[0].adapter.handle_lost(pair.now, conn, loss);
        assert_eq!(pair.polled(0), [(1, RetryExcErr)], "{loss:?}");
    }
}

/// In SQD nothing that was not begun is sent, so nothing is repeated.
#[test]
fn what_is_posted_in_sqd_waits_for_rts() {
    for way in WAYS {
        let (mut pair, qps) = connected_with(way, impatient);
        leave(&mut pair, qps[1], Leave::Destroyed);
        pair.run();
        set_state(&mut pair, 0, qps[0], QpState::Sqd);
        pair.send(0, qps[0], 1, SendOp::Send, &[]);
        pair.later(SECOND);
        assert_eq!(pair.polled(0), [], "{way:?}");
        set_state(&mut pair, 0, qps[0], QpState::Rts);
        pair.later(REPEATS - 1);
        assert_eq!(pair.polled(0), [], "{way:?}");
        pair.later(1);
        assert_eq!(pair.polled(0), [(1, RetryExcErr)], "{way:?}");
    }
}

/// A plan of faults may cut a queue pair off, and its peer leave then: the time that began first counts.
#[test]
fn a_peer_can_leave_while_it_is_cut_off() {
    for way in WAYS {
        let (mut pair, qps) = connected_with(way, impatient);
        let start = pair.now;
        pair.hosts[0].adapter.cut_off(start, qps[0]);
        pair.send(0, qps[0], 1, SendOp::Send, &[]);
        pair.hosts[0].adapter.cut_off(start, qps[0]);
        leave(&mut pair, qps[1], Leave::Destroyed);
        pair.later(REPEATS);
        pair.hosts[0].adapter.restore(pair.now, qps[0]);
        pair.later(SECOND);
        assert_eq!(pair.polled(0), [(1, RetryExcErr)], "{way:?}");
        assert_eq!(pair.hosts[0].adapter.poll_timeout(), None, "{way:?}");
    }
}

/// An unreliable connection repeats nothing, and the requester of an extended reliable one does.
#[test]
fn services_differ() {
    for way in WAYS {
        for (unreliable, expected) in [(true, Success), (false, RetryExcErr)] {
            let mut pair = Pair::new(way);
            let domain = pair.hosts[1].adapter.alloc_xrcd().unwrap();
            let types = match unreliable {
                true => [QpType::Uc, QpType::Uc],
                false => [QpType::XrcSend, QpType::XrcRecv(domain)],
            };
            let qps =
                [0, 1].map(|host| pair.hosts[host].qp_with(|init| init.qp_type = types[host]));
            pair.connect_with(qps, impatient);
            leave(&mut pair, qps[1], Leave::Destroyed);
            pair.later(10 * SECOND);
            let to = if unreliable { To::Peer } else { To::Srq(1) };
            let start = pair.now;
            let adapter = &mut pair.hosts[0].adapter;
            adapter.post_send(qps[0], &SendWr { to, ..send(1, SendOp::Send) }).unwrap();
            adapter.ring_doorbell(start, qps[0]);
            pair.later(REPEATS - 1);
            let early = pair.polled(0);
            pair.later(10 * SECOND);
            let ended = [early.clone(), pair.polled(0)].concat();
            assert_eq!(ended, [(1, expected)], "{way:?}");
            assert!(early.is_empty() || unreliable, "{way:?}");
        }
    }
}
