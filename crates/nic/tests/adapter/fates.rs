//! Failures on purpose end what real ones end, at both sides.

#![allow(clippy::needless_range_loop)]

use crate::pair::{Pair, WAYS, Way, connected, connected_with};
use quipu_nic::mem::Sge;
use quipu_nic::*;

const MS: u64 = 1_000_000;

/// Every status that a request can fail with.
const STATUSES: [WcStatus; 15] = [
    WcStatus::LocLenErr,
    WcStatus::LocQpOpErr,
    WcStatus::LocEecOpErr,
    WcStatus::LocProtErr,
    WcStatus::MwBindErr,
    WcStatus::BadRespErr,
    WcStatus::LocAccessErr,
    WcStatus::RemInvReqErr,
    WcStatus::RemAccessErr,
    WcStatus::RemOpErr,
    WcStatus::RetryExcErr,
    WcStatus::RnrRetryExcErr,
    WcStatus::RemAbortErr,
    WcStatus::FatalErr,
    WcStatus::GeneralErr,
];

fn fated_send(pair: &mut Pair, qp: QpId, wr_id: u64, op: SendOp, sges: &[Sge], fate: Fate) {
    let (flags, payload) = (SendFlags::SIGNALED, Payload::Sges(sges));
    let wr = SendWr { wr_id, op, flags, payload, to: To::Peer };
    let adapter = &mut pair.hosts[0].adapter;
    adapter.post_send_fated(pair.now, qp, &wr, fate).unwrap();
    adapter.ring_doorbell(pair.now, qp);
}

fn fated_recv(pair: &mut Pair, qp: QpId, wr_id: u64, sges: &[Sge], fate: Fate) {
    pair.hosts[1].adapter.post_recv_fated(pair.now, qp, wr_id, sges, fate).unwrap();
}

fn raised(pair: &Pair, host: usize, event: AsyncEvent) -> bool {
    pair.hosts[host].events.contains(&Event::Async(event))
}

#[test]
fn a_send_fails_in_its_turn_and_flushes_what_is_behind() {
    for way in WAYS {
        for status in STATUSES {
            let (mut pair, qps) = connected(way);
            pair.recv(1, qps[1], 50, &[]);
            pair.recv(1, qps[1], 51, &[]);
            pair.send(0, qps[0], 1, SendOp::Send, &[]);
            fated_send(&mut pair, qps[0], 2, SendOp::Send, &[], Fate::Fail(status));
            pair.send(0, qps[0], 3, SendOp::Send, &[]);
            pair.run();
            let expected = [(1, WcStatus::Success), (2, status), (3, WcStatus::WrFlushErr)];
            assert_eq!(pair.polled(0), expected, "{way:?}");
            assert_eq!(pair.state(0, qps[0]), QpState::Err);
            // The peer has what came before, and is alone from now on.
            assert_eq!(pair.polled(1), [(50, WcStatus::Success)], "{way:?}");
            pair.send(1, qps[1], 60, SendOp::Send, &[]);
            pair.later(1000 * MS);
            let expected = [(60, WcStatus::RetryExcErr), (51, WcStatus::WrFlushErr)];
            assert_eq!(pair.polled(1), expected, "{way:?}");
        }
    }
}

#[test]
fn a_key_that_is_refused_is_refused_by_the_peer() {
    for way in WAYS {
        for remote in 0..4 {
            let (mut pair, qps) = connected(way);
            let (here, there) = (pair.buffer(0, 64), pair.buffer(1, 64));
            let (addr, rkey) = (there.addr(), there.key());
            let op = match remote {
                0 => SendOp::Write { addr, rkey },
                1 => SendOp::WriteImm { addr, rkey, imm: 1 },
                2 => SendOp::Read { addr, rkey },
                _ => SendOp::FetchAdd { addr, rkey, add: 1 },
            };
            let fate = Fate::Fail(WcStatus::RemAccessErr);
            fated_send(&mut pair, qps[0], 1, op, &[here.sge(0, 8)], fate);
            pair.run();
            assert_eq!(pair.polled(0), [(1, WcStatus::RemAccessErr)], "{way:?} {op:?}");
            assert!(raised(&pair, 1, AsyncEvent::QpAccessErr(qps[1])), "{way:?} {op:?}");
            assert_eq!(there.bytes(0, 8), [0; 8]);
        }
    }
}

#[test]
fn a_receive_fails_when_a_message_comes_for_it() {
    for way in WAYS {
        for status in STATUSES {
            for op in [SendOp::Send, SendOp::SendImm(3)] {
                let (mut pair, qps) = connected(way);
                let (here, there) = (pair.buffer(0, 64), pair.buffer(1, 64));
                pair.recv(1, qps[1], 50, &[there.sge(0, 8)]);
                fated_recv(&mut pair, qps[1], 51, &[there.sge(8, 8)], Fate::Fail(status));
                pair.recv(1, qps[1], 52, &[there.sge(16, 8)]);
                pair.run();
                assert_eq!(pair.polled(1), []);
                for wr_id in 0..3 {
                    pair.send(0, qps[0], wr_id, op, &[here.sge(0, 8)]);
                }
                pair.run();
                let expected = [(50, WcStatus::Success), (51, status), (52, WcStatus::WrFlushErr)];
                assert_eq!(pair.polled(1), expected, "{way:?}");
                let remote = match status {
                    WcStatus::LocLenErr => WcStatus::RemInvReqErr,
                    _ => WcStatus::RemOpErr,
                };
                let expected = [(0, WcStatus::Success), (1, remote), (2, WcStatus::WrFlushErr)];
                assert_eq!(pair.polled(0), expected, "{way:?} {status:?}");
            }
        }
    }
}

#[test]
fn a_write_with_immediate_data_meets_the_fate_of_its_receive() {
    for way in WAYS {
        let (mut pair, qps) = connected(way);
        let (here, there) = (pair.buffer(0, 64), pair.buffer(1, 64));
        fated_recv(&mut pair, qps[1], 50, &[], Fate::Fail(WcStatus::LocQpOpErr));
        let op = SendOp::WriteImm { addr: there.addr(), rkey: there.key(), imm: 1 };
        pair.send(0, qps[0], 1, op, &[here.sge(0, 8)]);
        pair.run();
        assert_eq!(pair.polled(1), [(50, WcStatus::LocQpOpErr)], "{way:?}");
        assert_eq!(pair.polled(0), [(1, WcStatus::RemOpErr)], "{way:?}");
    }
}

#[test]
fn completions_show_up_late_and_in_order() {
    for way in WAYS {
        let (mut pair, qps) = connected(way);
        let start = pair.now;
        fated_recv(&mut pair, qps[1], 50, &[], Fate::Late(5 * MS));
        pair.recv(1, qps[1], 51, &[]);
        let cqs = [0, 1].map(|host| pair.hosts[host].cq);
        for host in 0..2 {
            pair.hosts[host].adapter.req_notify_cq(pair.now, cqs[host], false).unwrap();
        }
        fated_send(&mut pair, qps[0], 1, SendOp::Send, &[], Fate::Late(9 * MS));
        pair.send(0, qps[0], 2, SendOp::Send, &[]);
        pair.run_until(start.after(4 * MS));
        assert_eq!((pair.polled(0), pair.polled(1)), (vec![], vec![]), "{way:?}");
        let told = |pair: &Pair, host: usize| {
            let events = &pair.hosts[host].events;
            events.iter().filter(|event| matches!(event, Event::Completion { .. })).count()
        };
        assert_eq!((told(&pair, 0), told(&pair, 1)), (0, 0));
        pair.run_until(start.after(6 * MS));
        let both = |a, b| vec![(a, WcStatus::Success), (b, WcStatus::Success)];
        assert_eq!((pair.polled(0), pair.polled(1)), (vec![], both(50, 51)), "{way:?}");
        pair.run_until(start.after(10 * MS));
        assert_eq!(pair.polled(0), both(1, 2), "{way:?}");
        assert_eq!((told(&pair, 0), told(&pair, 1)), (1, 1));
        // And never again.
        pair.recv(1, qps[1], 52, &[]);
        pair.send(0, qps[0], 3, SendOp::Send, &[]);
        pair.run();
        assert_eq!(pair.polled(0), [(3, WcStatus::Success)]);
    }
}

#[test]
fn a_queue_with_completions_held_back_overruns_as_ever_and_can_be_destroyed() {
    let (mut pair, qps) = connected(Way::Link);
    let (small, _) = pair.hosts[0].adapter.create_cq(1, None, 0).unwrap();
    let qp = pair.hosts[0].qp_with(|init| init.send_cq = small);
    let peer = pair.hosts[1].qp();
    pair.connect([qp, peer]);
    for wr_id in 0..3 {
        pair.recv(1, peer, wr_id, &[]);
    }
    fated_send(&mut pair, qp, 1, SendOp::Send, &[], Fate::Late(5 * MS));
    pair.send(0, qp, 2, SendOp::Send, &[]);
    pair.run();
    assert!(raised(&pair, 0, AsyncEvent::CqErr(small)));
    pair.hosts[0].adapter.destroy_qp(pair.now, qp).unwrap();
    pair.hosts[0].adapter.destroy_cq(small).unwrap();
    pair.run_until(pair.now.after(20 * MS));
    assert_eq!(pair.state(0, qps[0]), QpState::Rts);
}

#[test]
fn a_slow_peer_takes_its_time_over_each_request() {
    for way in WAYS {
        let (mut pair, qps) = connected(way);
        let there = pair.buffer(1, 64);
        let here = pair.buffer(0, 64);
        here.fill(0, &[7; 8]);
        let start = pair.now;
        let op = SendOp::Write { addr: there.addr(), rkey: there.key() };
        for wr_id in 0..2u64 {
            let fate = Fate::From(start.after((3 + 3 * wr_id) * MS));
            fated_send(&mut pair, qps[0], wr_id, op, &[here.sge(0, 8)], fate);
        }
        pair.send(0, qps[0], 2, op, &[here.sge(0, 8)]);
        pair.run_until(start.after(2 * MS));
        assert_eq!((pair.polled(0), there.bytes(0, 8)), (vec![], vec![0; 8]), "{way:?}");
        pair.run_until(start.after(4 * MS));
        assert_eq!(pair.polled(0), [(0, WcStatus::Success)], "{way:?}");
        assert_eq!(there.bytes(0, 8), [7; 8]);
        pair.run_until(start.after(7 * MS));
        assert_eq!(pair.polled(0), [(1, WcStatus::Success), (2, WcStatus::Success)]);
    }
}

#[test]
fn refusals_count_against_rnr_retry() {
    for way in WAYS {
        for (rnr_retry, times, expected) in [
            (7, 20, WcStatus::Success),
            (3, 3, WcStatus::Success),
            (3, 4, WcStatus::RnrRetryExcErr),
            (0, 1, WcStatus::RnrRetryExcErr),
        ] {
            let (mut pair, qps) = connected_with(way, |attr| attr.rnr_retry = rnr_retry);
            let start = pair.now;
            pair.recv(1, qps[1], 50, &[]);
            let fate = Fate::Refused { times, wait_ns: MS };
            fated_send(&mut pair, qps[0], 1, SendOp::Send, &[], fate);
            let waits =
                u64::from(times.min(u32::from(if rnr_retry == 7 { 99 } else { rnr_retry })));
            if waits > 0 {
                pair.run_until(start.after(waits * MS - 1));
                assert_eq!(pair.polled(0), [], "{way:?} {rnr_retry} {times}");
            }
            pair.run_until(start.after(waits * MS + 1));
            assert_eq!(pair.polled(0), [(1, expected)], "{way:?} {rnr_retry} {times}");
        }
    }
}

#[test]
fn a_receive_that_is_held_back_makes_the_peer_wait() {
    for way in WAYS {
        for (rnr_retry, expected) in [(7, WcStatus::Success), (1, WcStatus::RnrRetryExcErr)] {
            let (mut pair, qps) = connected_with(way, |attr| attr.rnr_retry = rnr_retry);
            let start = pair.now;
            pair.recv(1, qps[1], 50, &[]);
            fated_recv(&mut pair, qps[1], 51, &[], Fate::From(start.after(20 * MS)));
            pair.recv(1, qps[1], 52, &[]);
            for wr_id in 1..4 {
                pair.send(0, qps[0], wr_id, SendOp::Send, &[]);
            }
            pair.run_until(start.after(MS / 2));
            assert_eq!(pair.polled(1), [(50, WcStatus::Success)], "{way:?}");
            pair.run_until(start.after(40 * MS));
            let sent = pair.polled(0);
            assert_eq!(sent[..2], [(1, WcStatus::Success), (2, expected)], "{way:?} {rnr_retry}");
            if expected == WcStatus::Success {
                let both = [(51, WcStatus::Success), (52, WcStatus::Success)];
                assert_eq!(pair.polled(1), both, "{way:?}");
            }
        }
    }
}

#[test]
fn receives_that_are_held_back_are_flushed_with_all_others() {
    let (mut pair, qps) = connected(Way::Stream(usize::MAX));
    let later = pair.now.after(20 * MS);
    fated_recv(&mut pair, qps[1], 50, &[], Fate::From(later));
    fated_recv(&mut pair, qps[1], 51, &[], Fate::Fail(WcStatus::LocLenErr));
    pair.recv(1, qps[1], 52, &[]);
    let attr = QpAttr { state: QpState::Err, ..QpAttr::default() };
    pair.hosts[1].adapter.modify_qp(pair.now, qps[1], &attr, QpAttrMask::STATE).unwrap();
    assert_eq!(pair.polled(1), [50, 51, 52].map(|wr_id| (wr_id, WcStatus::WrFlushErr)));
}

#[test]
fn shared_receives_meet_their_fates() {
    for way in WAYS {
        let (mut pair, qps) = connected(way);
        let pd = pair.hosts[1].pd;
        let srq = pair.hosts[1].adapter.create_srq(pd, 8, 1, 0).unwrap();
        let peer = pair.hosts[1].qp_with(|init| init.srq = Some(srq));
        let own = pair.hosts[0].qp();
        pair.connect([own, peer]);
        let adapter = &mut pair.hosts[1].adapter;
        let start = pair.now;
        adapter.post_srq_recv_fated(start, srq, 50, &[], Fate::Late(5 * MS)).unwrap();
        let failing = Fate::Fail(WcStatus::LocProtErr);
        adapter.post_srq_recv_fated(start, srq, 51, &[], failing).unwrap();
        pair.send(0, own, 1, SendOp::Send, &[]);
        pair.run_until(start.after(MS));
        assert_eq!(pair.polled(1), [], "{way:?}");
        pair.run_until(start.after(6 * MS));
        assert_eq!(pair.polled(1), [(50, WcStatus::Success)], "{way:?}");
        pair.send(0, own, 2, SendOp::Send, &[]);
        pair.run();
        assert_eq!(pair.polled(1), [(51, WcStatus::LocProtErr)], "{way:?}");
        assert!(raised(&pair, 1, AsyncEvent::QpLastWqeReached(peer)), "{way:?}");
        assert_eq!(pair.state(0, qps[0]), QpState::Rts);
    }
}

#[test]
fn shared_receives_that_are_held_back_make_peers_wait() {
    for way in WAYS {
        for (rnr_retry, expected) in [(7, WcStatus::Success), (1, WcStatus::RnrRetryExcErr)] {
            let (mut pair, _) = connected(way);
            let pd = pair.hosts[1].pd;
            let srq = pair.hosts[1].adapter.create_srq(pd, 8, 1, 0).unwrap();
            let peer = pair.hosts[1].qp_with(|init| init.srq = Some(srq));
            let own = pair.hosts[0].qp();
            pair.connect_with([own, peer], |attr| attr.rnr_retry = rnr_retry);
            let start = pair.now;
            let adapter = &mut pair.hosts[1].adapter;
            adapter.post_srq_recv(start, srq, 50, &[]).unwrap();
            let held = Fate::From(start.after(20 * MS));
            adapter.post_srq_recv_fated(start, srq, 51, &[], held).unwrap();
            adapter.post_srq_recv(start, srq, 52, &[]).unwrap();
            for wr_id in 1..4 {
                pair.send(0, own, wr_id, SendOp::Send, &[]);
            }
            pair.run_until(start.after(MS / 2));
            assert_eq!(pair.polled(1), [(50, WcStatus::Success)], "{way:?}");
            // One that comes for those who wait waits behind the others.
            let late = Fate::Late(0);
            let now = pair.now;
            pair.hosts[1].adapter.post_srq_recv_fated(now, srq, 53, &[], late).unwrap();
            pair.run_until(start.after(40 * MS));
            let sent = pair.polled(0);
            assert_eq!(sent[..2], [(1, WcStatus::Success), (2, expected)], "{way:?} {rnr_retry}");
            if expected == WcStatus::Success {
                let both = [(51, WcStatus::Success), (52, WcStatus::Success)];
                assert_eq!(pair.polled(1), both, "{way:?}");
            }
            // Nothing is left to wake up for.
            pair.hosts[1].adapter.destroy_qp(pair.now, peer).unwrap();
            let held = Fate::From(pair.now.after(20 * MS));
            let now = pair.now;
            pair.hosts[1].adapter.post_srq_recv_fated(now, srq, 54, &[], held).unwrap();
            pair.hosts[1].adapter.destroy_srq(srq).unwrap();
            pair.run_until(pair.now.after(40 * MS));
        }
    }
}

/// 4.096 us << 10, four times, for each of two tries.
const PATIENCE: u64 = 2 * 4 * (4096 << 10);

fn impatient(attr: &mut QpAttr) {
    attr.timeout = 10;
    attr.retry_cnt = 1;
}

#[test]
fn what_is_cut_off_waits_and_then_fails() {
    for way in WAYS {
        let (mut pair, qps) = connected_with(way, impatient);
        let start = pair.now;
        for wr_id in 0..4 {
            pair.recv(1, qps[1], 50 + wr_id, &[]);
        }
        pair.hosts[0].adapter.cut_off(pair.now, qps[0]);
        pair.send(0, qps[0], 1, SendOp::Send, &[]);
        pair.hosts[0].adapter.cut_off(pair.now, qps[0]);
        pair.run_until(start.after(PATIENCE / 2));
        assert_eq!(pair.polled(0), [], "{way:?}");
        // In time: everything goes on.
        pair.hosts[0].adapter.restore(pair.now, qps[0]);
        pair.run_until(start.after(3 * PATIENCE));
        assert_eq!(pair.polled(0), [(1, WcStatus::Success)], "{way:?}");
        pair.send(0, qps[0], 2, SendOp::Send, &[]);
        pair.run();
        assert_eq!(pair.polled(0), [(2, WcStatus::Success)], "{way:?}");
        // Too late.
        let start = pair.now;
        pair.send(0, qps[0], 3, SendOp::Send, &[]);
        pair.run();
        pair.hosts[0].adapter.cut_off(pair.now, qps[0]);
        pair.send(0, qps[0], 4, SendOp::Send, &[]);
        pair.hosts[0].adapter.cut_off(pair.now, qps[0]);
        pair.run_until(start.after(PATIENCE - 1));
        assert_eq!(pair.polled(0), [(3, WcStatus::Success)], "{way:?}");
        pair.run_until(start.after(PATIENCE + 1));
        assert_eq!(pair.polled(0), [(4, WcStatus::RetryExcErr)], "{way:?}");
        assert_eq!(pair.state(0, qps[0]), QpState::Err);
    }
}

#[test]
fn who_was_cut_off_before_the_connection_stood_connects_afterwards() {
    for way in WAYS {
        for cut in 0..2 {
            let mut pair = Pair::new(way);
            let qps = [pair.hosts[0].qp(), pair.hosts[1].qp()];
            for host in 0..2 {
                pair.to_rtr(host, qps, &|_| {});
                pair.hosts[cut].adapter.cut_off(pair.now, qps[cut]);
            }
            for host in 0..2 {
                pair.to_rts(host, qps[host], &|_| {});
            }
            pair.recv(1, qps[1], 50, &[]);
            pair.send(0, qps[0], 1, SendOp::Send, &[]);
            pair.run_until(pair.now.after(100 * MS));
            assert_eq!(pair.polled(0), [], "{way:?}");
            pair.hosts[cut].adapter.restore(pair.now, qps[cut]);
            pair.run_until(pair.now.after(500 * MS));
            assert_eq!(pair.polled(0), [(1, WcStatus::Success)], "{way:?} {cut}");
        }
    }
}

#[test]
fn refusals_of_the_peer_are_answered_after_the_cut() {
    for way in WAYS {
        let (mut pair, qps) = connected(way);
        let start = pair.now;
        pair.send(0, qps[0], 1, SendOp::Send, &[]);
        pair.run();
        pair.hosts[0].adapter.cut_off(pair.now, qps[0]);
        pair.run_until(start.after(5 * MS));
        pair.recv(1, qps[1], 50, &[]);
        pair.hosts[0].adapter.restore(pair.now, qps[0]);
        pair.run_until(start.after(10 * MS));
        assert_eq!(pair.polled(0), [(1, WcStatus::Success)], "{way:?}");
        assert_eq!(pair.polled(1), [(50, WcStatus::Success)], "{way:?}");
    }
}

#[test]
fn a_dead_peer_is_given_up_after_the_time_of_the_queue_pair() {
    for way in WAYS {
        let (mut pair, qps) = connected_with(way, impatient);
        let start = pair.now;
        // Under way, for want of a receive.
        pair.send(0, qps[0], 1, SendOp::Send, &[]);
        pair.run();
        pair.hosts[0].adapter.lose_peer(pair.now, qps[0]);
        pair.send(0, qps[0], 2, SendOp::Send, &[]);
        pair.run_until(start.after(PATIENCE - 1));
        assert_eq!(pair.polled(0), [], "{way:?}");
        pair.run_until(start.after(PATIENCE + 1));
        let expected = [(1, WcStatus::RetryExcErr), (2, WcStatus::WrFlushErr)];
        assert_eq!(pair.polled(0), expected, "{way:?}");
        // The peer takes this side for dead, too.
        pair.send(1, qps[1], 60, SendOp::Send, &[]);
        pair.run_until(start.after(3 * PATIENCE));
        assert_eq!(pair.polled(1), [(60, WcStatus::RetryExcErr)], "{way:?}");
    }
}

#[test]
fn a_peer_can_be_dead_before_it_is_reached() {
    for way in WAYS {
        let mut pair = Pair::new(way);
        let qps = [pair.hosts[0].qp(), pair.hosts[1].qp()];
        for host in 0..2 {
            pair.to_rtr(host, qps, &impatient);
            pair.hosts[host].adapter.lose_peer(pair.now, qps[host]);
        }
        for host in 0..2 {
            pair.to_rts(host, qps[host], &impatient);
            pair.send(host, qps[host], 1, SendOp::Send, &[]);
        }
        pair.run_until(pair.now.after(2 * PATIENCE));
        for host in 0..2 {
            assert_eq!(pair.polled(host), [(1, WcStatus::RetryExcErr)], "{way:?}");
        }
    }
}

#[test]
fn events_take_with_them_what_belongs_to_them() {
    type Make = fn(&Pair, QpId) -> AsyncEvent;
    let fatal: [(Make, bool); 5] = [
        (|_, qp| AsyncEvent::QpFatal(qp), false),
        (|_, qp| AsyncEvent::QpReqErr(qp), false),
        (|_, qp| AsyncEvent::QpAccessErr(qp), false),
        (|_, _| AsyncEvent::DeviceFatal, false),
        (|pair, _| AsyncEvent::CqErr(pair.hosts[0].cq), true),
    ];
    for way in WAYS {
        for (make, queue_fails) in fatal {
            let (mut pair, qps) = connected(way);
            pair.recv(0, qps[0], 50, &[]);
            let event = make(&pair, qps[0]);
            pair.hosts[0].adapter.strike(pair.now, event);
            pair.run();
            assert!(raised(&pair, 0, event), "{way:?} {event:?}");
            assert_eq!(pair.state(0, qps[0]), QpState::Err, "{way:?} {event:?}");
            if queue_fails {
                let mut out = [Completion::default(); 4];
                let polled = pair.hosts[0].adapter.poll_cq(pair.hosts[0].cq, &mut out);
                assert_eq!(polled, Err(Fault::Overrun));
                assert!(raised(&pair, 0, AsyncEvent::QpFatal(qps[0])));
            } else {
                assert_eq!(pair.polled(0), [(50, WcStatus::WrFlushErr)]);
            }
            pair.send(1, qps[1], 60, SendOp::Send, &[]);
            // A connection that was never used may be made anew, until the time for that is over.
            pair.run_until(pair.now.after(10_000 * MS));
            assert_eq!(pair.polled(1), [(60, WcStatus::RetryExcErr)], "{way:?} {event:?}");
        }
        let harmless: [Make; 11] = [
            |_, qp| AsyncEvent::CommEst(qp),
            |_, qp| AsyncEvent::SqDrained(qp),
            |_, qp| AsyncEvent::QpLastWqeReached(qp),
            |_, qp| AsyncEvent::PathMig(qp),
            |_, qp| AsyncEvent::PathMigErr(qp),
            |_, _| AsyncEvent::LidChange,
            |_, _| AsyncEvent::PkeyChange,
            |_, _| AsyncEvent::SmChange,
            |_, _| AsyncEvent::ClientReregister,
            |_, _| AsyncEvent::GidChange,
            |_, _| AsyncEvent::PortErr,
        ];
        let (mut pair, qps) = connected(way);
        for make in harmless {
            let event = make(&pair, qps[0]);
            pair.hosts[0].adapter.strike(pair.now, event);
            pair.run();
            assert!(raised(&pair, 0, event), "{way:?} {event:?}");
        }
        pair.recv(1, qps[1], 50, &[]);
        pair.send(0, qps[0], 1, SendOp::Send, &[]);
        pair.run();
        assert_eq!(pair.polled(0), [(1, WcStatus::Success)], "{way:?}");
    }
}

#[test]
fn a_shared_queue_that_fails_takes_its_queue_pairs_with_it() {
    let mut pair = Pair::new(Way::Link);
    let pd = pair.hosts[0].pd;
    let srq = pair.hosts[0].adapter.create_srq(pd, 8, 1, 0).unwrap();
    let own = pair.hosts[0].qp_with(|init| init.srq = Some(srq));
    let peer = pair.hosts[1].qp();
    pair.connect([own, peer]);
    pair.hosts[0].adapter.strike(pair.now, AsyncEvent::SrqErr(srq));
    pair.run();
    assert!(raised(&pair, 0, AsyncEvent::SrqErr(srq)));
    assert!(raised(&pair, 0, AsyncEvent::QpFatal(own)));
    assert!(raised(&pair, 0, AsyncEvent::QpLastWqeReached(own)));
    assert_eq!(pair.state(0, own), QpState::Err);
}

#[test]
fn what_has_not_begun_does_not_fail_and_a_queue_fails_once() {
    let mut pair = Pair::new(Way::Link);
    let qp = pair.hosts[0].qp();
    for event in [AsyncEvent::QpFatal(qp), AsyncEvent::QpReqErr(qp), AsyncEvent::QpAccessErr(qp)] {
        pair.hosts[0].adapter.strike(pair.now, event);
        pair.run();
        assert_eq!(pair.state(0, qp), QpState::Reset, "{event:?}");
        assert!(!raised(&pair, 0, event), "{event:?}");
    }
    let event = AsyncEvent::CqErr(pair.hosts[0].cq);
    for _ in 0..3 {
        pair.hosts[0].adapter.strike(pair.now, event);
        pair.run();
    }
    let count = pair.hosts[0].events.iter().filter(|&other| *other == Event::Async(event)).count();
    assert_eq!(count, 1);
}

#[test]
fn an_unreliable_peer_refuses_nothing() {
    for way in WAYS {
        let mut pair = Pair::new(way);
        let qps =
            [0, 1].map(|host: usize| pair.hosts[host].qp_with(|init| init.qp_type = QpType::Uc));
        pair.connect(qps);
        let (here, there) = (pair.buffer(0, 64), pair.buffer(1, 64));
        let op = SendOp::Write { addr: there.addr(), rkey: there.key() };
        fated_send(&mut pair, qps[0], 1, op, &[here.sge(0, 8)], Fate::Fail(WcStatus::RemAccessErr));
        pair.run();
        assert_eq!(pair.polled(0), [(1, WcStatus::RemAccessErr)], "{way:?}");
        assert_eq!(pair.state(0, qps[0]), QpState::Sqe, "{way:?}");
    }
}

#[test]
fn a_receive_that_is_held_back_is_there_for_who_watches() {
    for way in WAYS {
        let (mut pair, qps) = connected(way);
        pair.hosts[1].adapter.watch_peers();
        let at = pair.now.after(5 * MS);
        fated_recv(&mut pair, qps[1], 50, &[], Fate::From(at));
        pair.send(0, qps[0], 1, SendOp::Send, &[]);
        pair.run_until(at.after(5 * MS));
        assert_eq!(pair.polled(0), [(1, WcStatus::Success)], "{way:?}");
        assert_eq!(pair.hosts[1].adapter.take_starved(), [], "{way:?}");
        pair.send(0, qps[0], 2, SendOp::Send, &[]);
        pair.run();
        assert_eq!(pair.hosts[1].adapter.take_starved(), [qps[1]], "{way:?}");
    }
}
