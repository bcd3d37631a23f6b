//! Polls that wait for the answer of a conversation, while the other end is a thread of its own.

use std::sync::mpsc::{RecvTimeoutError, channel};
use std::time::Duration;

use crate::glances::Met;
use crate::pair::{Pair, Way};
use quipu_nic::*;

/// After so long the other end answers.
const SOON: Duration = Duration::from_millis(20);
/// After so long it does, unless the poll is over by then, as it is at once where it does not wait.
const LATE: Duration = Duration::from_secs(6);

/// Two ends that have met, whose polls wait for longer than that, if they wait.
fn met() -> Met {
    let patient = |config: &mut Config| config.answer_looks = u32::MAX;
    Met::of(Pair::with(Way::Link, [patient; 2]), false)
}

/// Host 0 has asked, and has been answered.
fn answered() -> Met {
    let mut met = met();
    met.asked();
    met.send(1, 2, b"answered");
    assert_eq!(met.glance(0).0, Glance::Taken);
    met
}

/// A glance of host 0 for `cq`, while host 1 serves what it was asked, and answers, after `delay`.
fn glance_beside(met: &mut Met, cq: CqId, delay: Duration) -> Glance {
    let (now, qp) = (met.pair.now, met.qps[1]);
    let [asks, answers] = &mut met.pair.hosts;
    let (over, is_over) = channel::<()>();
    std::thread::scope(|scope| {
        scope.spawn(move || {
            if is_over.recv_timeout(delay) != Err(RecvTimeoutError::Timeout) {
                return;
            }
            answers.adapter.serve(now, qp);
            let (to, op, flags) = (To::Peer, SendOp::Send, SendFlags::empty());
            let payload = Payload::Inline(b"answered");
            let wr = SendWr { wr_id: 4, to, op, flags, payload };
            answers.adapter.post_send(qp, &wr).unwrap();
            answers.adapter.ring_doorbell(now, qp);
        });
        let glance = asks.adapter.glance(now, cq, |_| {});
        drop(over);
        glance
    })
}

#[test]
fn a_poll_of_a_conversation_waits_for_the_answer() {
    let mut met = answered();
    for _ in 0..3 {
        met.send(0, 3, b"and now?");
        let cq = met.cqs[0];
        assert_eq!(glance_beside(&mut met, cq, SOON), Glance::Taken);
    }
}

/// As it is where the program wants to be told of it.
#[test]
fn what_is_answered_through_the_queue_is_a_conversation_too() {
    let mut met = met();
    met.asked();
    met.pair.hosts[0].adapter.req_notify_cq(met.pair.now, met.cqs[0], false).unwrap();
    met.send(1, 2, b"answered");
    assert_eq!(met.glance(0), (Glance::Found(met.qps[0]), None));
    assert!(met.pair.hosts[0].adapter.serve(met.pair.now, met.qps[0]));
    assert_eq!(met.received(0), [10]);
    met.send(0, 3, b"and now?");
    let cq = met.cqs[0];
    assert_eq!(glance_beside(&mut met, cq, SOON), Glance::Taken);
}

#[test]
fn nobody_waits_before_there_was_an_answer() {
    let mut met = met();
    met.send(0, 1, b"question");
    let cq = met.cqs[0];
    assert_eq!(glance_beside(&mut met, cq, LATE), Glance::Vain);
}

#[test]
fn nobody_waits_who_has_asked_nothing_or_more_than_once() {
    for questions in [0, 2] {
        let mut met = answered();
        met.rest(0);
        met.rest(1);
        for _ in 0..questions {
            met.send(0, 3, b"and now?");
        }
        let cq = met.cqs[0];
        assert_eq!(glance_beside(&mut met, cq, LATE), Glance::Vain, "{questions} questions");
    }
}

#[test]
fn a_stream_that_is_answered_is_no_conversation() {
    let mut met = met();
    for wr_id in 0..2 {
        met.send(0, wr_id, b"question");
    }
    met.pair.hosts[1].adapter.progress(met.pair.now);
    assert_eq!(met.received(1), [10, 11]);
    met.send(1, 2, b"answered");
    assert_eq!(met.glance(0).0, Glance::Taken);
    met.rest(0);
    met.rest(1);
    met.send(0, 3, b"and now?");
    let cq = met.cqs[0];
    assert_eq!(glance_beside(&mut met, cq, LATE), Glance::Vain);
}

#[test]
fn nobody_waits_who_polls_the_queue_of_another() {
    let mut met = answered();
    let (other, _) = met.pair.hosts[0].adapter.create_cq(1, None, 0).unwrap();
    met.send(0, 3, b"and now?");
    assert_eq!(glance_beside(&mut met, other, LATE), Glance::Vain);
}
