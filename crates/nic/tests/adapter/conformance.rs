//! Rules of the InfiniBand architecture specification that programs notice at the edges.

use crate::pair::{Pair, WAYS, Way, connected};
use quipu_nic::mem::Access;
use quipu_nic::*;

fn asynchronous(pair: &Pair, host: usize) -> Vec<AsyncEvent> {
    let event = |event: &Event| match event {
        Event::Async(event) => Some(*event),
        Event::Completion { .. }
        | Event::Stream { .. }
        | Event::Tcp { .. }
        | Event::TcpRequest { .. }
        | Event::TcpStream { .. } => None,
    };
    pair.hosts[host].events.iter().filter_map(event).collect()
}

fn modify(pair: &mut Pair, host: usize, qp: QpId, attr: QpAttr, mask: QpAttrMask) {
    pair.hosts[host].adapter.modify_qp(pair.now, qp, &attr, mask).unwrap();
}

fn to_state(pair: &mut Pair, host: usize, qp: QpId, state: QpState) {
    let attr = QpAttr { state, en_sqd_async_notify: true, ..QpAttr::default() };
    let notify = match state {
        QpState::Sqd => QpAttrMask::EN_SQD_ASYNC_NOTIFY,
        _ => QpAttrMask::empty(),
    };
    modify(pair, host, qp, attr, QpAttrMask::STATE | notify);
}

/// IBA 9.7.4.1: the right is needed though there is nothing to write, and no key to check.
#[test]
fn an_empty_write_with_immediate_needs_the_right_to_write() {
    for way in WAYS {
        let (mut pair, qps) = connected(way);
        let access = Access::REMOTE_READ;
        let attr = QpAttr { access, ..QpAttr::default() };
        modify(&mut pair, 1, qps[1], attr, QpAttrMask::ACCESS_FLAGS);
        pair.recv(1, qps[1], 5, &[]);
        pair.send(0, qps[0], 1, SendOp::WriteImm { addr: 0, rkey: 0, imm: 9 }, &[]);
        pair.run();
        let sent = pair.polled(0);
        assert_eq!(sent, [(1, WcStatus::RemInvReqErr)], "{way:?}");
        let received = pair.polled(1);
        assert_eq!(received, [(5, WcStatus::WrFlushErr)], "{way:?}: it consumes no receive");
        assert!(asynchronous(&pair, 1).contains(&AsyncEvent::QpReqErr(qps[1])), "{way:?}");
    }
}

/// IBA 11.6.2: memory management operations that fail have a status of their own.
#[test]
fn an_invalidation_that_fails_is_a_bind_error() {
    for way in WAYS {
        let (mut pair, qps) = connected(way);
        pair.send(0, qps[0], 1, SendOp::LocalInv { key: 0x1234_5678 }, &[]);
        pair.run();
        assert_eq!(pair.polled(0), [(1, WcStatus::MwBindErr)], "{way:?}");
    }
}

/// Receives of a shared queue name memory of the queue's protection domain (IBA 10.2.9.2), whatever that
/// of the queue pair is.
#[test]
fn a_shared_receive_queue_has_a_protection_domain_of_its_own() {
    for way in WAYS {
        for len in [8, 200, 20_000] {
            let mut pair = Pair::new(way);
            let own = pair.buffer(1, 1 << 16);
            let pd = pair.hosts[1].pd;
            pair.hosts[1].pd = pair.hosts[1].adapter.alloc_pd().unwrap();
            let shared = pair.buffer(1, 1 << 16);
            let other = pair.hosts[1].pd;
            pair.hosts[1].pd = pd;
            let srq = pair.hosts[1].adapter.create_srq(other, 16, 2, 0).unwrap();
            let qps = [pair.hosts[0].qp(), pair.hosts[1].qp_with(|init| init.srq = Some(srq))];
            pair.connect(qps);
            let here = pair.buffer(0, 1 << 16);
            here.fill(0, b"shared");
            let (now, adapter) = (pair.now, &mut pair.hosts[1].adapter);
            adapter.post_srq_recv(now, srq, 5, &[shared.sge(0, 1 << 16)]).unwrap();
            adapter.post_srq_recv(now, srq, 6, &[own.sge(0, 1 << 16)]).unwrap();
            pair.send(0, qps[0], 1, SendOp::Send, &[here.sge(0, len)]);
            pair.send(0, qps[0], 2, SendOp::Send, &[here.sge(0, len)]);
            pair.run();
            let received = pair.polled(1);
            let expected = [(5, WcStatus::Success), (6, WcStatus::LocProtErr)];
            assert_eq!(received, expected, "{way:?} {len}");
            assert_eq!(shared.bytes(0, 6), b"shared");
        }
    }
}

/// The event belongs to one stay in SQD (IBA 10.3.1.5): leaving it undrained forfeits it.
#[test]
fn a_send_queue_that_left_sqd_raises_no_event_when_it_drains() {
    for way in WAYS {
        for leave in [QpState::Rts, QpState::Err] {
            let (mut pair, qps) = connected(way);
            pair.send(0, qps[0], 1, SendOp::Send, &[]);
            pair.run();
            to_state(&mut pair, 0, qps[0], QpState::Sqd);
            pair.run();
            to_state(&mut pair, 0, qps[0], leave);
            pair.recv(1, qps[1], 5, &[]);
            let later = pair.now.after(50_000_000);
            pair.run_until(later);
            let sent = pair.polled(0);
            let status =
                if leave == QpState::Rts { WcStatus::Success } else { WcStatus::WrFlushErr };
            assert_eq!(sent, [(1, status)], "{way:?}");
            let events = asynchronous(&pair, 0);
            assert!(!events.contains(&AsyncEvent::SqDrained(qps[0])), "{way:?} {leave:?}");
        }
    }
}

/// `sq_draining` is 1 while something is to be finished, be it a message half transmitted.
#[test]
fn a_queue_with_half_a_message_is_draining() {
    let (mut pair, qps) = connected(Way::LinkCopying);
    let (here, there) = (pair.buffer(0, 3 << 20), pair.buffer(1, 3 << 20));
    pair.recv(1, qps[1], 5, &[there.sge(0, 3 << 20)]);
    pair.send(0, qps[0], 1, SendOp::Send, &[here.sge(0, 3 << 20)]);
    to_state(&mut pair, 0, qps[0], QpState::Sqd);
    let draining = |pair: &Pair| pair.hosts[0].adapter.query_qp(qps[0]).unwrap().attr.sq_draining;
    assert!(draining(&pair));
    assert!(pair.hosts[0].poll().is_empty());
    pair.run();
    assert!(!draining(&pair));
    assert_eq!(pair.polled(0), [(1, WcStatus::Success)]);
    assert!(asynchronous(&pair, 0).contains(&AsyncEvent::SqDrained(qps[0])));
}

/// Affiliated events are for errors that no completion reports (IBA 11.6.3.2, 9.9.3 class C).
#[test]
fn an_error_that_a_completion_reports_raises_no_event() {
    for way in WAYS {
        let (mut pair, qps) = connected(way);
        let (here, there) = (pair.buffer(0, 64), pair.buffer(1, 64));
        pair.recv(1, qps[1], 5, &[there.sge(0, 10)]);
        pair.send(0, qps[0], 1, SendOp::Send, &[here.sge(0, 20)]);
        pair.run();
        assert_eq!(pair.polled(1), [(5, WcStatus::LocLenErr)], "{way:?}");
        assert_eq!(asynchronous(&pair, 1), [], "{way:?}");

        let (mut pair, qps) = connected(way);
        let here = pair.buffer(0, 64);
        let there = pair.buffer_with(1, 64, Access::empty());
        pair.recv(1, qps[1], 5, &[there.sge(0, 64)]);
        pair.send(0, qps[0], 1, SendOp::Send, &[here.sge(0, 8)]);
        pair.run();
        assert_eq!(pair.polled(1), [(5, WcStatus::LocProtErr)], "{way:?}");
        assert_eq!(asynchronous(&pair, 1), [], "{way:?}");
    }
}

/// The requester reports answers that make no sense with the oldest request, if there is one.
#[test]
fn garbage_on_the_stream_is_reported_once() {
    for busy in [false, true] {
        let (mut pair, qps) = connected(Way::Stream(usize::MAX));
        if busy {
            pair.send(0, qps[0], 1, SendOp::Send, &[]);
            // What is transmitted is lost: the request has begun, and is never answered.
            let conn = pair.stream_ends()[0];
            assert!(pair.hosts[0].adapter.transmit(pair.now, conn, &mut [0; 1024]) > 0);
        }
        pair.inject(0, &[0xff; 70_000]);
        pair.run();
        let failed = pair.polled(0);
        let fatal = AsyncEvent::QpFatal(qps[0]);
        if busy {
            assert_eq!(failed, [(1, WcStatus::BadRespErr)]);
            assert!(!asynchronous(&pair, 0).contains(&fatal));
        } else {
            assert_eq!(failed, []);
            assert!(asynchronous(&pair, 0).contains(&fatal));
        }
    }
}

#[test]
fn the_current_state_is_named_only_where_a_program_may_doubt_it() {
    let (mut pair, qps) = connected(Way::Stream(usize::MAX));
    let (now, qp) = (pair.now, qps[0]);
    let adapter = &mut pair.hosts[0].adapter;
    let named = QpAttrMask::STATE | QpAttrMask::CUR_STATE;
    let mut go = |from, to| {
        let attr = QpAttr { cur_state: from, state: to, ..QpAttr::default() };
        adapter.modify_qp(now, qp, &attr, named)
    };
    assert_eq!(go(QpState::Rts, QpState::Rts), Ok(()));
    assert!(matches!(go(QpState::Sqd, QpState::Rts), Err(Fault::Transition(_))), "it is not");
    for to in [QpState::Sqd, QpState::Err, QpState::Reset] {
        assert!(matches!(go(QpState::Rts, to), Err(Fault::Transition(_))), "RTS to {to:?}");
    }
}
