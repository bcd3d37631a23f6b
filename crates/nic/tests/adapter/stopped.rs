//! Peers whose process is stopped, by a debugger or SIGSTOP, while their host lives: requests wait for them.

use crate::pair::{ALL_ACCESS, Pair, WAYS, Way};
use WcStatus::{BadRespErr, RetryExcErr, Success};
use quipu_nic::*;

const SECOND: u64 = 1_000_000_000;
/// Four times 4.096 us << 14, eight tries: after that a peer that cannot be reached is given up.
const RETRY_TIME: u64 = (4096 << 14) * 4 * 8;

/// Requests of all kinds from host 0 to host 1, which has receives for them.
fn request_everything(pair: &mut Pair, qps: [QpId; 2]) {
    let (here, there) = (pair.buffer(0, 64), pair.buffer_with(1, 64, ALL_ACCESS));
    let (addr, rkey) = (there.addr(), there.key());
    pair.recv(1, qps[1], 9, &[there.sge(32, 8)]);
    pair.send(0, qps[0], 1, SendOp::Write { addr, rkey }, &[here.sge(0, 8)]);
    pair.send(0, qps[0], 2, SendOp::Read { addr, rkey }, &[here.sge(8, 8)]);
    pair.send(0, qps[0], 3, SendOp::Send, &[here.sge(16, 8)]);
}

/// Queue pairs that are ready, with the process of host 1 stopped before it has heard of the connection.
fn asked_while_stopped(way: Way) -> (Pair, [QpId; 2]) {
    let mut pair = Pair::new(way);
    let qps = [pair.hosts[0].qp(), pair.hosts[1].qp()];
    pair.stopped = Some(1);
    for host in 0..2 {
        pair.to_rtr(host, qps, &|_| {});
        pair.to_rts(host, qps[host], &|_| {});
    }
    (pair, qps)
}

#[test]
fn requests_wait_for_a_peer_that_is_stopped_before_it_is_connected() {
    for way in WAYS {
        let (mut pair, qps) = asked_while_stopped(way);
        request_everything(&mut pair, qps);
        pair.later(100 * RETRY_TIME);
        assert_eq!(pair.polled(0), [], "{way:?}");
        pair.stopped = None;
        pair.later(SECOND);
        assert_eq!(pair.polled(0), [1, 2, 3].map(|wr_id| (wr_id, Success)), "{way:?}");
        assert_eq!(pair.polled(1), [(9, Success)], "{way:?}");
        // Nothing of the past is left: a peer that cannot be reached then is given up in time.
        pair.reset(1, qps[1]);
        pair.run();
        pair.send(0, qps[0], 4, SendOp::Send, &[]);
        pair.later(RETRY_TIME);
        assert_eq!(pair.polled(0), [(4, RetryExcErr)], "{way:?}");
    }
}

#[test]
fn requests_wait_for_a_peer_that_is_stopped_while_it_is_connected() {
    for way in WAYS {
        let (mut pair, qps) = crate::pair::connected(way);
        pair.stopped = Some(1);
        request_everything(&mut pair, qps);
        pair.later(100 * RETRY_TIME);
        let done = pair.polled(0);
        // On one host writes and reads need nothing of the peer's process.
        assert!(done.iter().all(|&(wr_id, status)| wr_id < 3 && status == Success), "{done:?}");
        assert!(done.is_empty() || !matches!(way, Way::Stream(_)), "{way:?} {done:?}");
        pair.stopped = None;
        pair.run();
        let done = [done, pair.polled(0)].concat();
        assert_eq!(done, [1, 2, 3].map(|wr_id| (wr_id, Success)), "{way:?}");
        assert_eq!(pair.polled(1), [(9, Success)], "{way:?}");
    }
}

/// Its host is silent, or its process is killed: requests whose time has passed meanwhile fail at once.
#[test]
fn a_stopped_peer_that_goes_fails_what_waits_for_it() {
    for way in WAYS {
        for late in [false, true] {
            let (mut pair, qps) = asked_while_stopped(way);
            request_everything(&mut pair, qps);
            pair.later(if late { 2 * RETRY_TIME } else { RETRY_TIME / 2 });
            let now = pair.now;
            match way {
                Way::Stream(_) => {
                    let conn = pair.stream_ends()[0];
                    pair.hosts[0].adapter.handle_lost(now, conn, Loss::TimedOut);
                }
                _ => {
                    let link = pair.link()[0];
                    pair.hosts[0].adapter.handle_link_down(now, link);
                }
            }
            pair.cut = true;
            pair.run();
            let failed = |pair: &mut Pair| pair.polled(0).first().copied();
            if !late {
                assert_eq!(failed(&mut pair), None, "{way:?}");
                pair.later(RETRY_TIME / 2);
            }
            assert_eq!(failed(&mut pair), Some((1, RetryExcErr)), "{way:?} {late}");
        }
    }
}

/// The world below has found the peer on this host, and tries to agree with it on shared memory.
#[test]
fn requests_wait_for_a_peer_of_this_host_that_does_not_answer() {
    for nearby in [true, false] {
        let mut pair = Pair::new(Way::Link);
        let qps = [pair.hosts[0].qp(), pair.hosts[1].qp()];
        pair.to_rtr(0, qps, &|_| {});
        pair.to_rts(0, qps[0], &|_| {});
        let adapter = &mut pair.hosts[0].adapter;
        let Some(Action::Connect { conn, .. }) = adapter.poll_action() else {
            panic!("no attempt")
        };
        if nearby {
            adapter.handle_nearby(conn);
        }
        pair.send(0, qps[0], 1, SendOp::Send, &[]);
        pair.later(2 * RETRY_TIME);
        let failed = [(1, RetryExcErr)];
        assert_eq!(pair.polled(0), failed[..usize::from(!nearby)]);
        if nearby {
            let now = pair.now;
            pair.hosts[0].adapter.handle_lost(now, conn, Loss::Refused);
            assert_eq!(pair.polled(0), failed);
        }
    }
}

/// A host that falls silent while the connection starts up is noticed as early as it was reached late.
#[test]
fn the_silence_of_a_peer_that_has_not_replied_is_limited() {
    const MOST: u64 = 10 * SECOND;
    for (timeout, limit) in [(14, RETRY_TIME), (20, MOST), (0, MOST)] {
        let mut pair = Pair::new(Way::Stream(usize::MAX));
        let qps = [pair.hosts[0].qp(), pair.hosts[1].qp()];
        pair.to_rtr(1, qps, &|_| {});
        pair.to_rtr(0, qps, &|_| {});
        pair.to_rts(0, qps[0], &|attr| attr.timeout = timeout);
        let adapter = &mut pair.hosts[0].adapter;
        let Some(Action::Connect { conn, .. }) = adapter.poll_action() else {
            panic!("no attempt")
        };
        adapter.handle_reached_stream(pair.now, conn);
        let said = Action::LimitSilence { conn, user_timeout_ns: Some(limit) };
        assert_eq!(adapter.poll_action(), Some(said));
    }
}

/// The process of host 0 is stopped when its socket has taken a part of a message.
#[test]
fn the_rest_of_a_message_is_waited_for() {
    const MINUTE: u64 = 60 * SECOND;
    for (stopped, status) in [(9 * MINUTE, Success), (11 * MINUTE, BadRespErr)] {
        let (mut pair, qps) = crate::pair::connected(Way::Stream(usize::MAX));
        let (here, there) = (pair.buffer(0, 64), pair.buffer(1, 64));
        pair.recv(1, qps[1], 9, &[there.sge(0, 64)]);
        pair.run();
        pair.send(0, qps[0], 1, SendOp::Send, &[here.sge(0, 64)]);
        let (now, conn, mut message) = (pair.now, pair.stream_ends()[0], [0; 4096]);
        let len = pair.hosts[0].adapter.transmit(now, conn, &mut message);
        pair.inject(1, &message[..len / 2]);
        pair.stopped = Some(0);
        pair.later(stopped);
        assert_eq!(pair.polled(0), []);
        pair.inject(1, &message[len / 2..len]);
        pair.stopped = None;
        pair.run();
        assert_eq!(pair.polled(0), [(1, status)], "{stopped}");
    }
}

/// A reply whose length was damaged never ends: the attempt is given up as an unfinished message is.
#[test]
fn the_rest_of_a_reply_is_waited_for() {
    const MINUTE: u64 = 60 * SECOND;
    let mut pair = Pair::new(Way::Stream(usize::MAX));
    let qps = [pair.hosts[0].qp(), pair.hosts[1].qp()];
    pair.to_rtr(0, qps, &|_| {});
    pair.to_rts(0, qps[0], &|_| {});
    let Some(Action::Connect { conn, .. }) = pair.hosts[0].adapter.poll_action() else {
        panic!("no attempt")
    };
    let now = pair.now;
    pair.hosts[0].adapter.handle_reached_stream(now, conn);
    pair.send(0, qps[0], 1, SendOp::Send, &[]);
    pair.hosts[0].adapter.handle_stream(now, conn, b"MPA ID Rep");
    pair.later(9 * MINUTE);
    assert_eq!(pair.polled(0), []);
    pair.later(2 * MINUTE);
    assert_eq!(pair.polled(0), [(1, RetryExcErr)]);
}
