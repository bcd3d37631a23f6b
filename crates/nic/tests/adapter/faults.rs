//! Faults of the peer, of the application and of the network: each ends what it must and nothing else.

#![allow(clippy::needless_range_loop)]

use crate::pair::{ALL_ACCESS, Pair, WAYS, Way, connected, connected_with, statuses};
use quipu_nic::mem::Access;
use quipu_nic::*;

fn events(pair: &Pair, host: usize) -> Vec<AsyncEvent> {
    pair.hosts[host]
        .events
        .iter()
        .filter_map(|event| match event {
            Event::Async(event) => Some(*event),
            Event::Completion { .. }
            | Event::Stream { .. }
            | Event::Tcp { .. }
            | Event::TcpRequest { .. }
            | Event::TcpStream { .. } => None,
        })
        .collect()
}

/// One bad request between two good ones: the first completes, the second fails with `expected`, the third
/// is flushed, and both queue pairs end in error.
fn bad_request(way: Way, access: Access, make: impl Fn(u64, u32) -> SendOp, expected: WcStatus) {
    let (mut pair, qps) = connected(way);
    let here = pair.buffer(0, 4096);
    let there = pair.buffer_with(1, 4096, access);
    let guard = there.bytes(0, 4096);
    pair.recv(1, qps[1], 50, &[]);
    pair.recv(1, qps[1], 51, &[]);
    pair.send(0, qps[0], 1, SendOp::Send, &[]);
    pair.send(0, qps[0], 2, make(there.addr(), there.key()), &[here.sge(0, 8)]);
    pair.send(0, qps[0], 3, SendOp::Send, &[]);
    pair.run();
    assert_eq!(
        pair.polled(0),
        [(1, WcStatus::Success), (2, expected), (3, WcStatus::WrFlushErr)],
        "{way:?}"
    );
    assert_eq!(pair.polled(1), [(50, WcStatus::Success), (51, WcStatus::WrFlushErr)], "{way:?}");
    assert_eq!((pair.state(0, qps[0]), pair.state(1, qps[1])), (QpState::Err, QpState::Err));
    assert_eq!(there.bytes(0, 4096), guard, "nothing else is touched");
    let event = match expected {
        WcStatus::RemAccessErr => AsyncEvent::QpAccessErr(qps[1]),
        _ => AsyncEvent::QpReqErr(qps[1]),
    };
    assert!(events(&pair, 1).contains(&event), "{way:?} {:?}", events(&pair, 1));
}

#[test]
fn requests_that_the_peer_may_not_make() {
    use WcStatus::{RemAccessErr, RemInvReqErr};
    let write = |addr, rkey| SendOp::Write { addr, rkey };
    let read = |addr, rkey| SendOp::Read { addr, rkey };
    for way in WAYS {
        bad_request(way, ALL_ACCESS, |addr, key| write(addr, key ^ 0x10), RemAccessErr);
        bad_request(way, ALL_ACCESS, |addr, key| read(addr, key ^ 0x1000), RemAccessErr);
        bad_request(way, ALL_ACCESS, |addr, key| write(addr + 4089, key), RemAccessErr);
        bad_request(way, ALL_ACCESS, |addr, key| write(addr - 1, key), RemAccessErr);
        bad_request(way, ALL_ACCESS, |_, key| write(u64::MAX - 3, key), RemAccessErr);
        bad_request(way, ALL_ACCESS - Access::REMOTE_WRITE, write, RemAccessErr);
        bad_request(way, ALL_ACCESS - Access::REMOTE_READ, read, RemAccessErr);
        let add = |addr, rkey| SendOp::FetchAdd { addr, rkey, add: 1 };
        bad_request(way, ALL_ACCESS - Access::REMOTE_ATOMIC, add, RemAccessErr);
        let odd = |addr, rkey| SendOp::FetchAdd { addr: addr + 4, rkey, add: 1 };
        bad_request(way, ALL_ACCESS, odd, RemInvReqErr);
    }
}

#[test]
fn a_send_longer_than_its_receive() {
    for way in WAYS {
        for len in [20, 200, 20_000] {
            let (mut pair, qps) = connected(way);
            let (here, there) = (pair.buffer(0, 1 << 16), pair.buffer(1, 1 << 16));
            pair.recv(1, qps[1], 5, &[there.sge(0, 10)]);
            pair.send(0, qps[0], 1, SendOp::Send, &[here.sge(0, len)]);
            pair.run();
            assert_eq!(pair.polled(0), [(1, WcStatus::RemInvReqErr)], "{way:?}");
            assert_eq!(pair.polled(1), [(5, WcStatus::LocLenErr)], "{way:?}");
            assert_eq!(there.bytes(10, 100), vec![0; 100]);
        }
    }
}

/// The peer refuses a request of which it has seen the beginning only.
#[test]
fn a_send_refused_before_it_is_sent() {
    for way in WAYS {
        let (mut pair, qps) = connected(way);
        pair.socket_bytes = 5000;
        let (here, there) = (pair.buffer(0, 1 << 20), pair.buffer(1, 64));
        pair.recv(1, qps[1], 5, &[there.sge(0, 10)]);
        pair.send(0, qps[0], 1, SendOp::Send, &[here.sge(0, 1 << 20)]);
        pair.run();
        assert_eq!(pair.polled(0), [(1, WcStatus::RemInvReqErr)], "{way:?}");
        assert_eq!(pair.polled(1), [(5, WcStatus::LocLenErr)], "{way:?}");
    }
}

#[test]
fn a_receive_into_memory_that_it_may_not_write() {
    for way in WAYS {
        let (mut pair, qps) = connected(way);
        let here = pair.buffer(0, 64);
        let there = pair.buffer_with(1, 64, Access::empty());
        pair.recv(1, qps[1], 5, &[there.sge(0, 64)]);
        pair.send(0, qps[0], 1, SendOp::Send, &[here.sge(0, 8)]);
        pair.run();
        assert_eq!(pair.polled(0), [(1, WcStatus::RemOpErr)], "{way:?}");
        assert_eq!(pair.polled(1), [(5, WcStatus::LocProtErr)], "{way:?}");
    }
}

#[test]
fn a_send_from_memory_that_is_not_registered() {
    for way in WAYS {
        let (mut pair, qps) = connected(way);
        let here = pair.buffer(0, 64);
        let there = pair.buffer(1, 64);
        let mut bad = here.sge(0, 8);
        bad.len = 65;
        pair.recv(1, qps[1], 5, &[there.sge(0, 64)]);
        pair.recv(1, qps[1], 6, &[there.sge(0, 64)]);
        pair.send(0, qps[0], 1, SendOp::Send, &[here.sge(0, 8)]);
        pair.send(0, qps[0], 2, SendOp::Send, &[bad]);
        pair.send(0, qps[0], 3, SendOp::Send, &[]);
        pair.run();
        assert_eq!(
            pair.polled(0),
            [(1, WcStatus::Success), (2, WcStatus::LocProtErr), (3, WcStatus::WrFlushErr)],
            "{way:?}"
        );
        assert_eq!(pair.polled(1), [(5, WcStatus::Success)]);
    }
}

#[test]
fn a_receiver_that_is_late_is_waited_for() {
    for way in WAYS {
        let (mut pair, qps) = connected(way);
        let (here, there) = (pair.buffer(0, 1 << 16), pair.buffer(1, 1 << 16));
        for wr_id in 1..=3 {
            let len = 1000 * wr_id as usize;
            pair.send(0, qps[0], wr_id, SendOp::Send, &[here.sge(0, len)]);
        }
        let op = SendOp::WriteImm { addr: there.addr(), rkey: there.key(), imm: 4 };
        pair.send(0, qps[0], 4, op, &[here.sge(0, 100)]);
        let op = SendOp::Read { addr: there.addr(), rkey: there.key() };
        pair.send(0, qps[0], 5, op, &[here.sge(100, 100)]);
        let mut now = pair.now;
        for wr_id in 11..=14 {
            now = now.after(20_000_000);
            pair.run_until(now);
            assert!(pair.hosts[1].poll().is_empty(), "{way:?}");
            pair.recv(1, qps[1], wr_id, &[there.sge(4096, 8192)]);
            now = now.after(20_000_000);
            pair.run_until(now);
            assert_eq!(pair.polled(1), [(wr_id, WcStatus::Success)], "{way:?}");
        }
        let expected: Vec<_> = (1..=5).map(|wr_id| (wr_id, WcStatus::Success)).collect();
        assert_eq!(pair.polled(0), expected, "{way:?}");
    }
}

#[test]
fn a_receiver_that_never_comes_is_given_up() {
    for way in WAYS {
        let (mut pair, qps) = connected_with(way, |attr| attr.rnr_retry = 2);
        let here = pair.buffer(0, 64);
        let start = pair.now;
        pair.send(0, qps[0], 1, SendOp::Send, &[here.sge(0, 8)]);
        pair.send(0, qps[0], 2, SendOp::Send, &[here.sge(0, 8)]);
        pair.run_until(start.after(1_000_000));
        assert!(pair.hosts[0].poll().is_empty(), "{way:?}: two waits of 0.64 ms come first");
        pair.run_until(start.after(5_000_000));
        assert_eq!(
            pair.polled(0),
            [(1, WcStatus::RnrRetryExcErr), (2, WcStatus::WrFlushErr)],
            "{way:?}"
        );
    }
}

#[test]
fn what_was_received_before_the_peer_died_counts() {
    for way in WAYS {
        let (mut pair, qps) = connected(way);
        let (here, there) = (pair.buffer(0, 64), pair.buffer(1, 64));
        pair.recv(1, qps[1], 5, &[there.sge(0, 64)]);
        pair.send(0, qps[0], 1, SendOp::Send, &[here.sge(0, 8)]);
        pair.run();
        assert_eq!(pair.polled(1), [(5, WcStatus::Success)]);
        let now = pair.now;
        pair.hosts[1].adapter.destroy_qp(now, qps[1]).unwrap();
        pair.run();
        assert_eq!(pair.polled(0), [(1, WcStatus::Success)], "{way:?}");
    }
}

#[test]
fn a_peer_that_never_answers_is_given_up_after_the_retry_time() {
    for way in WAYS {
        let mut pair = Pair::new(way);
        let qps = [pair.hosts[0].qp(), pair.hosts[1].qp()];
        for host in [0, 1] {
            // Only one end gets ready, whichever has to reach out.
            let mut pair = Pair::new(way);
            let qps = [pair.hosts[0].qp(), pair.hosts[1].qp()];
            pair.to_rtr(host, qps, &|_: &mut QpAttr| {});
            pair.to_rts(host, qps[host], &|attr| attr.timeout = 10);
            let buffer = pair.buffer(host, 64);
            let start = pair.now;
            pair.send(host, qps[host], 1, SendOp::Send, &[buffer.sge(0, 8)]);
            // 4.096 us << 10, four times, eight tries.
            let retry_time = (4096u64 << 10) * 4 * 8;
            pair.run_until(start.after(retry_time - 1_000_000));
            assert!(pair.hosts[host].poll().is_empty(), "{way:?}");
            // The end that was asked refuses after a second; until then its process may be stopped.
            pair.run_until(
                start.after(retry_time + if host == 0 { 1_000_000_000 } else { 1_000_000 }),
            );
            let done = pair.hosts[host].poll();
            assert_eq!(statuses(&done), [(1, WcStatus::RetryExcErr)], "{way:?}");
        }
        drop((pair.buffer(0, 1), qps));
        pair.run();
    }
}

#[test]
fn queue_pairs_connect_in_any_order() {
    for way in WAYS {
        for first in [0, 1] {
            let mut pair = Pair::new(way);
            let qps = [pair.hosts[0].qp(), pair.hosts[1].qp()];
            let keep = |_: &mut QpAttr| {};
            pair.to_rtr(first, qps, &keep);
            pair.to_rts(first, qps[first], &keep);
            let (here, there) = (pair.buffer(first, 64), pair.buffer(1 - first, 64));
            pair.send(first, qps[first], 1, SendOp::Send, &[here.sge(0, 8)]);
            pair.run_until(pair.now.after(30_000_000));
            pair.to_rtr(1 - first, qps, &keep);
            pair.recv(1 - first, qps[1 - first], 5, &[there.sge(0, 64)]);
            pair.run_until(pair.now.after(200_000_000));
            assert_eq!(pair.polled(1 - first), [(5, WcStatus::Success)], "{way:?} {first}");
            let established = AsyncEvent::CommEst(qps[1 - first]);
            assert!(events(&pair, 1 - first).contains(&established));
            assert_eq!(pair.polled(first), [(1, WcStatus::Success)]);
        }
    }
}

#[test]
fn error_flushes_everything_and_reset_forgets_it() {
    for way in WAYS {
        let (mut pair, qps) = connected(way);
        let buffer = pair.buffer(0, 64);
        pair.recv(0, qps[0], 5, &[buffer.sge(0, 8)]);
        pair.recv(0, qps[0], 6, &[buffer.sge(0, 8)]);
        let error = QpAttr { state: QpState::Err, ..QpAttr::default() };
        let now = pair.now;
        let adapter = &mut pair.hosts[0].adapter;
        adapter.modify_qp(now, qps[0], &error, QpAttrMask::STATE).unwrap();
        pair.send(0, qps[0], 1, SendOp::Send, &[]);
        pair.recv(0, qps[0], 7, &[]);
        let flushed: Vec<_> =
            [5, 6, 1, 7].into_iter().map(|wr_id| (wr_id, WcStatus::WrFlushErr)).collect();
        assert_eq!(pair.polled(0), flushed, "{way:?}");
        let reset = QpAttr { state: QpState::Reset, ..QpAttr::default() };
        let adapter = &mut pair.hosts[0].adapter;
        adapter.modify_qp(now, qps[0], &reset, QpAttrMask::STATE).unwrap();
        assert_eq!(adapter.post_recv(now, qps[0], 9, &[]), Err(Fault::WrongState));
        pair.run();
    }
}

#[test]
fn a_connection_can_be_made_again_after_reset() {
    for way in WAYS {
        let (mut pair, qps) = connected(way);
        let (here, there) = (pair.buffer(0, 64), pair.buffer(1, 64));
        for round in 0..3 {
            pair.recv(1, qps[1], 5, &[there.sge(0, 64)]);
            pair.send(0, qps[0], 1, SendOp::Send, &[here.sge(0, 8)]);
            pair.run();
            assert_eq!(pair.polled(0), [(1, WcStatus::Success)], "{way:?} {round}");
            assert_eq!(pair.polled(1), [(5, WcStatus::Success)]);
            let reset = QpAttr { state: QpState::Reset, ..QpAttr::default() };
            let now = pair.now;
            for (host, qp) in qps.into_iter().enumerate() {
                let adapter = &mut pair.hosts[host].adapter;
                adapter.modify_qp(now, qp, &reset, QpAttrMask::STATE).unwrap();
            }
            pair.run();
            pair.connect(qps);
            pair.run_until(pair.now.after(100_000_000));
        }
    }
}

#[test]
fn sqd_drains_and_goes_on() {
    for way in WAYS {
        let (mut pair, qps) = connected(way);
        let (here, there) = (pair.buffer(0, 4096), pair.buffer(1, 4096));
        let now = pair.now;
        let drain = QpAttr { state: QpState::Sqd, en_sqd_async_notify: true, ..QpAttr::default() };
        pair.send(0, qps[0], 1, SendOp::Send, &[here.sge(0, 8)]);
        let mask = QpAttrMask::STATE | QpAttrMask::EN_SQD_ASYNC_NOTIFY;
        pair.run();
        pair.hosts[0].adapter.modify_qp(now, qps[0], &drain, mask).unwrap();
        pair.send(0, qps[0], 2, SendOp::Send, &[here.sge(0, 8)]);
        pair.run();
        assert!(!events(&pair, 0).contains(&AsyncEvent::SqDrained(qps[0])), "{way:?}");
        pair.recv(1, qps[1], 5, &[there.sge(0, 64)]);
        pair.recv(1, qps[1], 6, &[there.sge(0, 64)]);
        pair.run_until(now.after(50_000_000));
        assert_eq!(pair.polled(0), [(1, WcStatus::Success)], "{way:?}");
        assert!(events(&pair, 0).contains(&AsyncEvent::SqDrained(qps[0])), "{way:?}");
        let go_on = QpAttr { state: QpState::Rts, ..QpAttr::default() };
        let now = pair.now;
        pair.hosts[0].adapter.modify_qp(now, qps[0], &go_on, QpAttrMask::STATE).unwrap();
        pair.run();
        assert_eq!(pair.polled(0), [(2, WcStatus::Success)], "{way:?}");
    }
}

#[test]
fn fences_wait_for_reads() {
    for way in WAYS {
        let (mut pair, qps) = connected(way);
        let (here, there) = (pair.buffer(0, 8192), pair.buffer(1, 8192));
        there.fill(0, b"fresh");
        let (addr, rkey) = (there.addr(), there.key());
        pair.send(0, qps[0], 1, SendOp::Read { addr, rkey }, &[here.sge(0, 5)]);
        let flags = SendFlags::SIGNALED | SendFlags::FENCE;
        let list = [here.sge(0, 5)];
        let op = SendOp::Write { addr: addr + 100, rkey };
        pair.send_with(0, qps[0], 2, op, flags, Payload::Sges(&list));
        pair.run();
        assert_eq!(pair.hosts[0].poll().len(), 2, "{way:?}");
        assert_eq!(there.bytes(100, 5), b"fresh", "{way:?}");
    }
}

#[test]
fn garbage_on_the_stream_ends_that_connection_only() {
    let garbage: [&[u8]; 5] = [
        &[0xff; 70_000],
        &[0; 64],
        &[0, 18, 0x41, 0x43, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 9, 9, 9, 9],
        &[0, 14, 0xc1, 0x40, 1, 2, 3, 4, 0, 0, 0, 0, 0, 0, 0, 0, 1, 2, 3, 4],
        &b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n".repeat(1000),
    ];
    for bytes in garbage {
        let (mut pair, qps) = connected(Way::Stream(usize::MAX));
        let others = [pair.hosts[0].qp(), pair.hosts[1].qp()];
        let (here, there) = (pair.buffer(0, 4096), pair.buffer(1, 4096));
        pair.recv(1, qps[1], 5, &[there.sge(0, 64)]);
        pair.inject(1, bytes);
        pair.run();
        pair.send(0, qps[0], 1, SendOp::Send, &[here.sge(0, 8)]);
        pair.later(1_000_000_000);
        let name = &bytes[..20];
        assert_eq!(pair.polled(1), [(5, WcStatus::WrFlushErr)], "{name:?}");
        assert_eq!(pair.state(1, qps[1]), QpState::Err);
        let failed = pair.hosts[0].poll();
        assert_eq!(failed.len(), 1);
        assert_ne!(failed[0].status, WcStatus::Success);
        pair.connect(others);
        pair.recv(1, others[1], 7, &[there.sge(0, 64)]);
        pair.send(0, others[0], 8, SendOp::Send, &[here.sge(0, 8)]);
        pair.run();
        assert_eq!(pair.polled(1), [(7, WcStatus::Success)]);
    }
}

#[test]
fn half_open_connections_are_bounded_and_end() {
    let mut pair = Pair::new(Way::Stream(usize::MAX));
    let now = pair.now;
    let peer = |n: u32| format!("10.9.9.{}:1", n % 8).parse().unwrap();
    let adapter = &mut pair.hosts[0].adapter;
    let limit = adapter.config().max_half_open;
    let conns: Vec<_> =
        (0..limit).map(|n| adapter.handle_accepted(now, peer(n)).unwrap()).collect();
    assert_eq!(adapter.poll_action(), None);
    adapter.handle_accepted(now, peer(0)).unwrap();
    assert_eq!(adapter.poll_action(), Some(Action::Close { conn: conns[0] }));
    adapter.handle_lost(now, conns[0], Loss::Closed);
    adapter.handle_stream(now, conns[2], b"MPA ID Req Frame");
    adapter.handle_stream(now, conns[1], &[0xaa; 600]);
    adapter.handle_timeout(now.after(11_000_000_000));
    let mut closed = 0;
    while let Some(action) = adapter.poll_action() {
        if let Action::Close { conn } = action {
            adapter.handle_lost(now, conn, Loss::Closed);
            closed += 1;
        }
    }
    assert_eq!(closed, limit);
    assert_eq!(adapter.poll_timeout(), None);
    assert_eq!(adapter.connections(), 0);
}

#[test]
fn completion_queues_overrun_loudly() {
    for way in WAYS {
        let mut pair = Pair::new(way);
        let (cq, _) = pair.hosts[1].adapter.create_cq(2, None, 0).unwrap();
        let qps = [pair.hosts[0].qp(), pair.hosts[1].qp_with(|init| init.recv_cq = cq)];
        pair.connect(qps);
        for wr_id in 0..3 {
            pair.recv(1, qps[1], wr_id, &[]);
            pair.send(0, qps[0], wr_id, SendOp::Send, &[]);
        }
        pair.run();
        assert!(events(&pair, 1).contains(&AsyncEvent::CqErr(cq)), "{way:?}");
        assert!(events(&pair, 1).contains(&AsyncEvent::QpFatal(qps[1])), "{way:?}");
        let mut out = [Completion::default(); 4];
        let adapter = &mut pair.hosts[1].adapter;
        assert_eq!(adapter.poll_cq(cq, &mut out), Ok(2), "what it has is not lost");
        assert_eq!(adapter.poll_cq(cq, &mut out), Err(Fault::Overrun));
        assert_eq!(adapter.poll_cq(cq, &mut []), Ok(0));
        assert_eq!(pair.state(1, qps[1]), QpState::Err);
    }
}

#[test]
fn completion_events_come_once_and_solicited_ones_when_asked() {
    for way in WAYS {
        let (mut pair, qps) = connected(way);
        let cq = pair.hosts[1].cq;
        pair.hosts[1].adapter.req_notify_cq(pair.now, cq, true).unwrap();
        let flags = [SendFlags::empty(), SendFlags::SOLICITED, SendFlags::SOLICITED];
        for (wr_id, flags) in flags.into_iter().enumerate() {
            pair.recv(1, qps[1], wr_id as u64, &[]);
            let payload = Payload::Sges(&[]);
            pair.send_with(0, qps[0], wr_id as u64, SendOp::Send, flags, payload);
            pair.run();
            let count = pair.hosts[1]
                .events
                .iter()
                .filter(|event| matches!(event, Event::Completion { .. }))
                .count();
            assert_eq!(count, wr_id.min(1), "{way:?}");
        }
    }
}

/// A receiver that has gone to sleep while a request waited for a receive goes on when one is posted.
#[test]
fn a_receive_posted_late_wakes_what_waited_for_it() {
    for way in [Way::Link, Way::LinkCopying] {
        let mut pair = Pair::new(way);
        let pd = pair.hosts[1].pd;
        let srq = pair.hosts[1].adapter.create_srq(pd, 16, 2, 0).unwrap();
        let mine = [0, 1, 2].map(|_| pair.hosts[0].qp());
        let theirs =
            [Some(srq), Some(srq), None].map(|srq| pair.hosts[1].qp_with(|init| init.srq = srq));
        for n in 0..3 {
            pair.connect([mine[n], theirs[n]]);
            pair.send(0, mine[n], 1, SendOp::Send, &[]);
        }
        pair.run();
        assert!(pair.hosts[1].adapter.arm());
        let adapter = &mut pair.hosts[1].adapter;
        for wr_id in 5..7 {
            adapter.post_srq_recv(pair.now, srq, wr_id, &[]).unwrap();
            let mut done = [Completion::default(); 2];
            assert_eq!(adapter.poll_cq(pair.hosts[1].cq, &mut done), Ok(1), "{way:?}");
            assert_eq!(done[0].wr_id, wr_id);
        }
        adapter.post_recv(pair.now, theirs[2], 7, &[]).unwrap();
        assert_eq!(pair.polled(1), [(7, WcStatus::Success)], "{way:?}");
    }
}

/// A request that cannot be sent fails once those before it are acknowledged. What the peer has asked for
/// meanwhile is answered, before and behind it, though nothing else makes the stream transmit.
#[test]
fn who_is_about_to_fail_still_answers() {
    let (mut pair, qps) = connected(Way::Stream(usize::MAX));
    let (here, there) = (pair.buffer(0, 4096), pair.buffer(1, 4096));
    here.fill(0, &[7; 256]);
    pair.recv(1, qps[1], 50, &[]);
    for wr_id in 0..4 {
        let from = here.addr() + 64 * wr_id;
        let read = SendOp::Read { addr: from, rkey: here.key() };
        pair.send(1, qps[1], wr_id, read, &[there.sge(64 * wr_id as usize, 64)]);
    }
    pair.step();
    let unknown = Sge { lkey: Key(here.region.key.0 ^ 0x1000), ..here.sge(0, 8) };
    pair.send(0, qps[0], 1, SendOp::Send, &[]);
    pair.send(0, qps[0], 2, SendOp::Send, &[unknown]);
    pair.run();
    assert_eq!(pair.polled(0), [(1, WcStatus::Success), (2, WcStatus::LocProtErr)]);
    let done = pair.polled(1);
    assert!(done.iter().all(|&(_, status)| status == WcStatus::Success), "{done:?}");
    assert_eq!((done.len(), there.bytes(0, 256)), (5, vec![7; 256]));
}

/// A peer that fills the ring before this side has joined the channel rings for nothing of it later:
/// all of it must be served nevertheless, though one look serves only a part.
#[test]
fn a_ring_filled_before_this_side_joined_is_emptied() {
    for way in WAYS {
        let mut pair = Pair::new(way);
        let qps = [0, 1].map(|host| {
            pair.hosts[host].qp_with(|init| {
                init.cap.max_send_wr = 256;
                init.cap.max_recv_wr = 256;
            })
        });
        let keep = |_: &mut QpAttr| {};
        for host in 0..2 {
            pair.to_rtr(host, qps, &keep);
            pair.to_rts(host, qps[host], &keep);
        }
        for host in 0..2 {
            for wr_id in 0..200 {
                pair.recv(host, qps[host], wr_id, &[]);
                pair.send(host, qps[host], 1000 + wr_id, SendOp::Send, &[]);
            }
        }
        pair.run();
        for host in &mut pair.hosts {
            assert_eq!(host.poll().len() + host.poll().len(), 400, "{way:?}");
        }
    }
}

/// Both ends of a stream give a silent peer up, whichever of them made the connection and though neither
/// knew its timeout when the connection was made; and a change of the timeout counts from then on.
#[test]
fn silence_is_limited_at_both_ends() {
    // 4.096 us x 2^10, for each of 1 + 3 tries, four times as long at most (IBA 9.7.6.1.3).
    let expected = (4096 << 10) * 4 * 4;
    let (mut pair, qps) = connected_with(Way::Stream(usize::MAX), |attr| {
        (attr.timeout, attr.retry_cnt) = (10, 3);
    });
    for host in 0..2 {
        assert_eq!(pair.hosts[host].silence, Some(expected), "host {host}");
    }
    let adapter = &mut pair.hosts[1].adapter;
    let (drained, timeout) = (QpState::Sqd, QpAttrMask::STATE);
    adapter
        .modify_qp(pair.now, qps[1], &QpAttr { state: drained, ..QpAttr::default() }, timeout)
        .unwrap();
    let never = QpAttr { state: drained, timeout: 0, ..QpAttr::default() };
    adapter.modify_qp(pair.now, qps[1], &never, timeout | QpAttrMask::TIMEOUT).unwrap();
    pair.run();
    assert_eq!((pair.hosts[0].silence, pair.hosts[1].silence), (Some(expected), None));
}
