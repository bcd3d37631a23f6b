//! Behaviour that simulated worlds found wrong once, each with the smallest case that shows it.

#![allow(clippy::needless_range_loop)]

use crate::pair::{Pair, WAYS, Way};
use quipu_nic::mem::Access;
use quipu_nic::*;

const STREAM: Way = Way::Stream(usize::MAX);

fn connected_with(way: Way, change: impl Fn(&mut QpAttr)) -> (Pair, [QpId; 2]) {
    let mut pair = Pair::new(way);
    let qps = [pair.hosts[0].qp(), pair.hosts[1].qp()];
    pair.connect_with(qps, change);
    (pair, qps)
}

use WcStatus::{MwBindErr, RemAccessErr, RetryExcErr, RnrRetryExcErr, Success, WrFlushErr};

/// A window that is bound behind a send is bound once, though the send is refused and sent again.
#[test]
fn going_back_does_not_bind_twice() {
    for way in WAYS {
        let (mut pair, qps) = connected_with(way, |_| {});
        let here = pair.buffer(0, 64);
        let pd = pair.hosts[0].pd;
        let (mw, key) = pair.hosts[0].adapter.alloc_mw(pd, WindowType::Two).unwrap();
        let bind = BindMw {
            mw,
            rkey: key.next_tag().0,
            mr: here.region.id,
            addr: here.addr(),
            len: 64,
            access: Access::REMOTE_READ,
        };
        pair.send(0, qps[0], 1, SendOp::Send, &[]);
        pair.send(0, qps[0], 2, SendOp::BindMw(bind), &[]);
        pair.run();
        pair.recv(1, qps[1], 9, &[]);
        pair.later(100_000_000);
        let done = pair.polled(0);
        assert_eq!(done, [(1, Success), (2, Success)], "{way:?}");
    }
}

/// What was asked for before a request that is refused is answered: it is not the one at fault.
#[test]
fn a_read_before_a_refusal_is_answered() {
    for way in WAYS {
        let (mut pair, qps) = connected_with(way, |_| {});
        let (here, there) = (pair.buffer(0, 1 << 20), pair.buffer(1, 1 << 20));
        there.fill(0, &[7; 4096]);
        there.fill((1 << 20) - 1, &[9]);
        let (addr, rkey) = (there.addr(), there.key());
        pair.send(0, qps[0], 1, SendOp::Read { addr, rkey }, &[here.sge(0, 1 << 20)]);
        let wrong = SendOp::Read { addr, rkey: rkey ^ 0x100 };
        pair.send(0, qps[0], 2, wrong, &[here.sge(0, 8)]);
        pair.send(0, qps[0], 3, SendOp::Write { addr, rkey }, &[here.sge(0, 8)]);
        pair.run();
        let done = pair.polled(0);
        assert_eq!(done, [(1, Success), (2, RemAccessErr), (3, WrFlushErr)], "{way:?}");
        assert_eq!((here.bytes(0, 1), here.bytes((1 << 20) - 1, 1)), (vec![7], vec![9]));
    }
}

/// A request that cannot be transmitted waits for those before it, which the peer must hear of.
#[test]
fn the_peer_hears_of_what_stands_before_a_failure() {
    for way in WAYS {
        let (mut pair, qps) = connected_with(way, |_| {});
        let there = pair.buffer(1, 64);
        let op = SendOp::FetchAdd { addr: there.addr(), rkey: there.key(), add: 1 };
        let here = pair.buffer(0, 64);
        let adapter = &mut pair.hosts[0].adapter;
        let flags = SendFlags::SIGNALED;
        let sges = [here.sge(0, 8)];
        let wr = SendWr { wr_id: 1, to: To::Peer, op, flags, payload: Payload::Sges(&sges) };
        adapter.post_send(qps[0], &wr).unwrap();
        let wr = SendWr { wr_id: 2, to: To::Peer, op: SendOp::LocalInv { key: 5 }, ..wr };
        adapter.post_send(qps[0], &wr).unwrap();
        // Nobody looks by himself: only a bell wakes the peer.
        for host in &mut pair.hosts {
            assert!(host.adapter.arm());
        }
        pair.hosts[0].adapter.ring_doorbell(pair.now, qps[0]);
        pair.run();
        let done = pair.polled(0);
        assert_eq!(done, [(1, Success), (2, MwBindErr)], "{way:?}");
    }
}

/// A refusal of the last resort comes while an answer is on its way: the answer counts, and nothing behind
/// it on the stream is lost.
#[test]
fn retries_exceeded_behind_a_read() {
    for way in WAYS {
        let (mut pair, qps) = connected_with(way, |attr| attr.rnr_retry = 0);
        let (here, there) = (pair.buffer(0, 1 << 18), pair.buffer(1, 1 << 18));
        let op = SendOp::Read { addr: there.addr(), rkey: there.key() };
        pair.send(0, qps[0], 1, op, &[here.sge(0, 1 << 18)]);
        pair.send(0, qps[0], 2, SendOp::Send, &[]);
        pair.later(1_000_000_000);
        let done = pair.polled(0);
        assert_eq!(done, [(1, Success), (2, RnrRetryExcErr)], "{way:?}");
    }
}

/// A request that will fail stands behind one that is refused and sent again: both get their turn.
#[test]
fn a_failure_behind_a_request_that_is_sent_again() {
    for way in WAYS {
        let (mut pair, qps) = connected_with(way, |_| {});
        pair.send(0, qps[0], 1, SendOp::Send, &[]);
        pair.send(0, qps[0], 2, SendOp::LocalInv { key: 5 }, &[]);
        pair.run();
        pair.recv(1, qps[1], 9, &[]);
        pair.later(100_000_000);
        let done = pair.polled(0);
        assert_eq!(done, [(1, Success), (2, MwBindErr)], "{way:?}");
    }
}

/// A write with immediate data is two messages on a stream: the second follows though the send queue was
/// stopped between them.
#[test]
fn a_stopped_queue_finishes_what_it_has_begun() {
    let (mut pair, qps) = connected_with(STREAM, |_| {});
    let (here, there) = (pair.buffer(0, 3000), pair.buffer(1, 3000));
    pair.recv(1, qps[1], 9, &[]);
    let op = SendOp::WriteImm { addr: there.addr(), rkey: there.key(), imm: 5 };
    let adapter = &mut pair.hosts[0].adapter;
    let sges = [here.sge(0, 2980)];
    let (flags, payload) = (SendFlags::SIGNALED, Payload::Sges(&sges));
    adapter.post_send(qps[0], &SendWr { wr_id: 1, to: To::Peer, op, flags, payload }).unwrap();
    adapter.ring_doorbell(pair.now, qps[0]);
    // Room for the write and not for what follows it.
    let [conn, peer_conn] = pair.stream_ends();
    let mut bytes = vec![0; 3010];
    let now = pair.now;
    let adapter = &mut pair.hosts[0].adapter;
    assert_eq!(adapter.next_transmit(), Some(conn));
    let used = adapter.transmit(now, conn, &mut bytes);
    assert!(used > 2980, "the whole write was taken");
    let attr = QpAttr { state: QpState::Sqd, en_sqd_async_notify: true, ..QpAttr::default() };
    let mask = QpAttrMask::STATE | QpAttrMask::EN_SQD_ASYNC_NOTIFY;
    adapter.modify_qp(now, qps[0], &attr, mask).unwrap();
    pair.hosts[1].adapter.handle_stream(now, peer_conn, &bytes[..used]);
    let adapter = &mut pair.hosts[0].adapter;
    let used = adapter.transmit(now, conn, &mut bytes);
    pair.hosts[1].adapter.handle_stream(now, peer_conn, &bytes[..used]);
    pair.run();
    assert_eq!(pair.polled(0), [(1, Success)]);
    assert_eq!(pair.polled(1), [(9, Success)]);
    let drained = Event::Async(AsyncEvent::SqDrained(qps[0]));
    assert!(pair.hosts[0].events.contains(&drained));
}

/// A refused write with immediate data consumes no receive.
#[test]
fn a_refused_write_with_immediate_consumes_nothing() {
    for way in WAYS {
        let (mut pair, qps) = connected_with(way, |_| {});
        let (here, there) = (pair.buffer(0, 64), pair.buffer(1, 64));
        pair.recv(1, qps[1], 9, &[]);
        let op = SendOp::WriteImm { addr: there.addr(), rkey: there.key() ^ 0x100, imm: 5 };
        pair.send(0, qps[0], 1, op, &[here.sge(0, 8)]);
        pair.run();
        assert_eq!(pair.polled(0), [(1, RemAccessErr)], "{way:?}");
        assert_eq!(pair.polled(1), [(9, WrFlushErr)], "{way:?}");
    }
}

/// A pair whose second end, which waits for the first to reach out, has posted a request. It gives up after
/// [`RETRY_TIME`].
fn unconnected_with_a_request() -> (Pair, [QpId; 2]) {
    let mut pair = Pair::new(STREAM);
    let qps = [pair.hosts[0].qp(), pair.hosts[1].qp()];
    for host in 0..2 {
        pair.to_rtr(host, qps, &|_| {});
    }
    for host in 0..2 {
        pair.to_rts(host, qps[host], &|attr| {
            attr.timeout = 16;
            attr.retry_cnt = 1;
        });
    }
    pair.recv(0, qps[0], 9, &[]);
    pair.send(1, qps[1], 1, SendOp::Send, &[]);
    (pair, qps)
}

/// Four times the nominal timeout for each time that a request is sent.
const RETRY_TIME: u64 = 4 * 2 * (4096 << 16);

/// The first end reaches out and the second one grants it: the names of the stream at both, and the reply
/// with the request after it, which nobody has read.
fn granted(pair: &mut Pair) -> ([ConnId; 2], Vec<u8>) {
    let now = pair.now;
    let Some(Action::Connect { conn, .. }) = pair.hosts[0].adapter.poll_action() else {
        panic!("the lower address reaches out");
    };
    let from = std::net::SocketAddr::from((pair.hosts[0].address, 55_555));
    let accepted = pair.hosts[1].adapter.handle_accepted(now, from).unwrap();
    pair.hosts[0].adapter.handle_reached_stream(now, conn);
    let limit = pair.hosts[0].adapter.poll_action();
    assert!(matches!(limit, Some(Action::LimitSilence { .. })), "{limit:?}");
    let mut bytes = vec![0; 1500];
    let used = pair.hosts[0].adapter.transmit(now, conn, &mut bytes);
    pair.hosts[1].adapter.handle_stream(now, accepted, &bytes[..used]);
    let sent = pair.hosts[1].adapter.transmit(now, accepted, &mut bytes);
    assert!(sent > 88, "the reply and the send behind it");
    bytes.truncate(sent);
    ([conn, accepted], bytes)
}

/// Lets time pass of which nothing but the adapters' own alarms comes.
fn wait(pair: &mut Pair, ns: u64) {
    pair.now = pair.now.after(ns);
    for host in &mut pair.hosts {
        host.adapter.handle_timeout(pair.now);
        assert!(host.adapter.poll_timeout().is_none_or(|next| next > pair.now));
    }
}

/// The reply to a request for a connection is lost with its stream: the side that granted it takes the
/// next attempt, with everything that it had sent without result.
#[test]
fn a_grant_that_nobody_heard_is_taken_back() {
    let (mut pair, _) = unconnected_with_a_request();
    let ([conn, accepted], _) = granted(&mut pair);
    pair.hosts[0].adapter.handle_lost(pair.now, conn, Loss::TimedOut);
    pair.hosts[1].adapter.handle_lost(pair.now, accepted, Loss::Closed);
    assert_eq!(pair.hosts[1].poll(), []);
    pair.later(10_000_000);
    assert_eq!(pair.polled(1), [(1, Success)]);
    assert_eq!(pair.polled(0), [(9, Success)]);
}

/// The peer asked for a stream and was silent for the whole retry time: requests do not wait once more.
#[test]
fn requests_to_a_peer_that_was_never_heard_fail_with_their_stream() {
    let (mut pair, _) = unconnected_with_a_request();
    let ([_, accepted], _) = granted(&mut pair);
    pair.hosts[1].adapter.handle_lost(pair.now, accepted, Loss::TimedOut);
    assert_eq!(pair.polled(1), [(1, RetryExcErr)]);
}

/// Nothing that this side says reaches the peer, which asks again and again: requests wait for the retry time
/// over all attempts, not for that of each.
#[test]
fn requests_do_not_wait_for_ever_for_a_peer_that_asks_in_vain() {
    let (mut pair, _) = unconnected_with_a_request();
    for attempt in 0..4 {
        let ([conn, accepted], _) = granted(&mut pair);
        wait(&mut pair, RETRY_TIME * 3 / 10);
        assert_eq!(pair.hosts[1].poll(), [], "{attempt}: the peer may be about to speak");
        pair.hosts[0].adapter.handle_lost(pair.now, conn, Loss::TimedOut);
        pair.hosts[1].adapter.handle_lost(pair.now, accepted, Loss::Closed);
        wait(&mut pair, 50_000_000);
    }
    assert_eq!(pair.polled(1), [(1, RetryExcErr)]);
}

/// The same, but the peer speaks at last, later than the retry time: a peer that is slow is not dead.
#[test]
fn a_peer_that_speaks_late_is_not_given_up() {
    let (mut pair, _) = unconnected_with_a_request();
    let ([conn, accepted], said) = granted(&mut pair);
    wait(&mut pair, RETRY_TIME * 2);
    assert_eq!(pair.hosts[1].poll(), []);
    pair.hosts[0].adapter.handle_stream(pair.now, conn, &said);
    pair.hosts[0].adapter.release_acks();
    let mut bytes = vec![0; 1500];
    let used = pair.hosts[0].adapter.transmit(pair.now, conn, &mut bytes);
    pair.hosts[1].adapter.handle_stream(pair.now, accepted, &bytes[..used]);
    assert_eq!(pair.polled(1), [(1, Success)]);
    assert_eq!(pair.hosts[1].adapter.poll_timeout(), None);
}

/// A queue pair that was connected before is not taken for its successor, nor the other way round.
#[test]
fn queue_pairs_with_other_psns_do_not_meet() {
    let mut pair = Pair::new(STREAM);
    let qps = [pair.hosts[0].qp(), pair.hosts[1].qp()];
    pair.to_rtr(1, qps, &|attr| attr.rq_psn = 100);
    pair.to_rts(1, qps[1], &|attr| attr.sq_psn = 100);
    pair.to_rtr(0, qps, &|attr| attr.rq_psn = 200);
    pair.to_rts(0, qps[0], &|attr| attr.sq_psn = 200);
    pair.send(0, qps[0], 1, SendOp::Send, &[]);
    pair.recv(1, qps[1], 9, &[]);
    pair.later(10_000_000);
    assert_eq!((pair.hosts[0].poll(), pair.hosts[1].poll()), (vec![], vec![]));
}
