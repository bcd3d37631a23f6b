//! How often polls look at what, and what they leave to others.

use std::net::UdpSocket;
use std::time::{Duration, Instant};

use quipu_nic::{QpCap, QpInit, QpNum, QpType, SendFlags, SendWr, Time};

use super::*;
use crate::SameHost;
use crate::engine::Engine;
use crate::engine::helper::Helper;
use crate::engine::tests::{EMPTY, End};

/// Sends one, for which there may be room only when earlier ones are acknowledged.
fn send(from: &End, mut meanwhile: impl FnMut()) {
    let end = Instant::now() + Duration::from_secs(20);
    while from.engine.post_send(from.qp, &EMPTY).is_err() {
        from.engine.progress().unwrap();
        meanwhile();
        assert!(Instant::now() < end, "nothing is acknowledged");
    }
}

/// Where one thread polls and another waits for descriptors, the acknowledgement of a message travels
/// with the answer to it, too; and the waiting thread is called, in case that there is none.
#[test]
fn acknowledgements_wait_for_the_answer_while_somebody_waits_for_descriptors() {
    let [a, b] = End::pair(SameHost::Never);
    a.send();
    b.receive();
    b.send();
    a.receive();

    let mut core = b.engine.inner.core.lock();
    core.adapter.release_acks();
    let now = core.now();
    core.settle(now);
    // Before all that is due otherwise.
    core.wakes_at = Some(now);
    core.polls_beside_waiter = POLLS_BESIDE_HELPER;
    let (sends, _) = core.net.calls();
    a.send();
    let end = Instant::now() + Duration::from_secs(20);
    while core.adapter.poll_cq_each(b.cq, 1, |_| {}).unwrap() == 0 {
        core.poll();
        assert!(Instant::now() < end, "nothing comes");
    }
    assert!(core.adapter.owes_acks());
    assert_eq!(core.net.calls().0, sends, "nothing is sent for the acknowledgement alone");
    assert_eq!(core.wakes_at, Some(Time(0)), "who waits is called");
    core.adapter.post_send(b.qp, &EMPTY).unwrap();
    core.adapter.ring_doorbell(now, b.qp);
    core.adapter.release_acks();
    core.settle(now);
    assert_eq!(core.net.calls().0, sends + 1, "both are sent together");
    core.stop_waiting();
}

/// To be in epoll's set costs a stream time with every segment, so one that polls find bytes on again and
/// again leaves it; and comes back before anybody waits, so that what arrives then wakes him.
#[test]
fn a_stream_that_is_polled_steadily_is_watched_only_while_somebody_waits() {
    let [a, b] = End::pair(SameHost::Never);
    let end = Instant::now() + Duration::from_secs(20);
    // The helper does not wait in between, which would have it watched.
    let mut core = b.engine.inner.core.lock();
    core.stop_waiting();
    while core.net.unwatched() == 0 {
        send(&a, || _ = core.poll());
        while core.adapter.poll_cq_each(b.cq, 1, |_| {}).unwrap() == 0 {
            core.poll();
            assert!(Instant::now() < end, "it stays in the set");
        }
        let now = core.now();
        core.adapter.post_recv(now, b.qp, 0, &[]).unwrap();
    }
    while core.run() {}
    assert!(core.prepare_wait().is_some());
    assert_eq!(core.net.unwatched(), 0);
    core.stop_waiting();
    drop(core);
    // Nobody polls: the helper takes it.
    send(&a, || ());
    while b.engine.inner.core.lock().adapter.poll_cq_each(b.cq, 1, |_| {}).unwrap() == 0 {
        assert!(Instant::now() < end, "nobody notices");
        std::thread::yield_now();
    }
}

/// A program whose requests complete while they are being posted never finds its queue empty.
#[test]
fn progress_is_made_although_every_poll_finds_a_completion() {
    let [a, b] = End::pair(SameHost::Never);
    a.send();
    b.receive();
    // The helper is kept out.
    let mut core = b.engine.inner.core.lock();
    let looks = core.calls.looks;
    a.engine.post_send(a.qp, &SendWr { flags: SendFlags::SIGNALED, ..EMPTY }).unwrap();
    let end = Instant::now() + Duration::from_secs(20);
    // Its completion says that the other end has taken it.
    while a.engine.poll_cq_each(a.cq, 1, |_| {}).unwrap() == 0 {
        core.poll_hit();
        assert!(Instant::now() < end, "everything else waits");
    }
    (0..HITS_PER_POLL * POLLS_PER_LOOK_IDLE).for_each(|_| core.poll_hit());
    assert!(core.calls.looks > looks, "descriptors are asked, too");
}

#[test]
fn descriptors_are_asked_in_time_however_few_polls_there_are() {
    let engine = crate::engine::tests::idle();
    let (context, _) = engine.open_context().unwrap();
    let (cq, _) = engine.create_cq(context, 4, None, 0).unwrap();
    let looks = || engine.inner.core.lock().calls.looks;
    let hits = || (0..HITS_PER_POLL).for_each(|_| engine.inner.core.lock().poll_hit());
    let poll = || assert_eq!(engine.poll_cq_each(cq, 1, |_| {}).unwrap(), 0);
    let empty = || (0..2 * POLLS_PER_READING).for_each(|_| poll());
    for polls in [&hits as &dyn Fn(), &empty] {
        for _ in 0..3 {
            let before = looks();
            std::thread::sleep(Duration::from_nanos(LOOK_NS));
            polls();
            assert!(looks() > before);
        }
    }
}

/// Gives an engine a socket of datagrams.
fn add_datagrams(engine: &Engine) -> QpNum {
    let (context, _) = engine.open_context().unwrap();
    let pd = engine.alloc_pd().unwrap();
    let (cq, _) = engine.create_cq(context, 8, None, 0).unwrap();
    let cap = QpCap { max_send_wr: 4, max_recv_wr: 4, ..QpCap::default() };
    let (qp_type, sq_sig_all, srq) = (QpType::Ud, true, None);
    let init = QpInit { pd, send_cq: cq, recv_cq: cq, srq, cap, qp_type, sq_sig_all };
    engine.create_qp(context, &init).unwrap().1
}

/// Anyone who sends datagrams, be it nothing that makes sense, would have peers of others wait for ever.
#[test]
fn acknowledgements_do_not_wait_for_all_that_comes_from_others() {
    let [a, b] = End::pair(SameHost::Never);
    let stranger = UdpSocket::bind("127.0.0.1:0").unwrap();
    let socket = ("127.0.0.1", add_datagrams(&b.engine).port());
    let end = Instant::now() + Duration::from_secs(20);
    for round in [|core: &mut Core| _ = core.run(), |core: &mut Core| _ = core.poll()] {
        let mut core = b.engine.inner.core.lock();
        core.stop_waiting();
        core.datagrams.heat(1);
        a.send();
        while core.adapter.poll_cq_each(b.cq, 1, |_| {}).unwrap() == 0 {
            stranger.send_to(&[0], socket).unwrap();
            round(&mut core);
            assert!(Instant::now() < end, "nothing comes");
        }
        for _ in 0..2 * BUSY_ROUNDS {
            stranger.send_to(&[0], socket).unwrap();
            round(&mut core);
        }
        assert!(!core.adapter.owes_acks());
    }
}

/// A program whose ends have met by datagrams and go on by something else would wait for a system call in
/// each poll.
#[test]
fn sockets_of_datagrams_are_tried_for_long_only_where_nothing_else_comes() {
    let engine = crate::engine::tests::idle();
    add_datagrams(&engine);
    let mut core = engine.inner.core.lock();
    let core = &mut *core;
    let mut tries = |hits, elsewhere| {
        core.datagrams.heat(hits);
        let now = core.clock.now();
        let mut tries = 0;
        while core.datagrams.is_hot() {
            assert!(!core.datagrams.poll_hot(&mut core.adapter, now, elsewhere));
            tries += 1;
        }
        tries
    };
    assert_eq!((tries(1, false), tries(1, true)), (4096, 16));
    assert_eq!(tries(64, true), 4096, "one that is in steady use is not given up sooner");
}

#[test]
fn sockets_of_datagrams_are_given_up_soon_beside_a_stream_that_delivers() {
    let [a, b] = End::pair(SameHost::Never);
    add_datagrams(&b.engine);
    a.send();
    b.receive();
    let end = Instant::now() + Duration::from_secs(20);
    let mut core = b.engine.inner.core.lock();
    core.datagrams.heat(1);
    // As many as it takes, and one that came by a look at all descriptors.
    for _ in 0..=16 {
        let now = core.now();
        core.adapter.post_recv(now, b.qp, 0, &[]).unwrap();
        send(&a, || _ = core.poll());
        while core.adapter.poll_cq_each(b.cq, 1, |_| {}).unwrap() == 0 {
            core.poll();
            assert!(Instant::now() < end, "nothing comes");
        }
    }
    assert!(!core.datagrams.is_hot());
}

/// Nothing comes that would wake it: a peer that reads and writes memory rings nobody.
#[test]
fn the_helper_does_not_wait_for_long_beside_a_program_that_polls() {
    let engine = crate::engine::tests::idle();
    let (context, _) = engine.open_context().unwrap();
    let (cq, _) = engine.create_cq(context, 4, None, 0).unwrap();
    Helper::start(&engine.inner).unwrap();
    let waits = || engine.inner.core.lock().wakes_at.is_some();
    let end = Instant::now() + Duration::from_secs(20);
    let polls_to_the_end = || {
        while !waits() {
            assert!(Instant::now() < end, "it does not begin");
            std::thread::sleep(Duration::from_millis(1));
        }
        let mut polls = 0;
        while waits() {
            assert!(Instant::now() < end, "it does not end");
            assert_eq!(engine.poll_cq_each(cq, 1, |_| {}).unwrap(), 0);
            polls += 1;
        }
        polls
    };
    // Something else may wake it before that, such as news of an interface.
    while polls_to_the_end() < POLLS_BESIDE_HELPER {}
}

#[test]
fn a_thread_that_waits_for_events_goes_on_beside_one_that_polls() {
    let engine = crate::engine::tests::idle();
    let mut core = engine.inner.core.lock();
    assert!(core.prepare_wait().is_some());
    (core.driver, core.wakes_at) = (true, Some(Time(u64::MAX)));
    (0..2 * POLLS_BESIDE_HELPER).for_each(|_| _ = core.poll());
    assert_eq!(core.wakes_at, Some(Time(u64::MAX)), "it is not called");
    core.driver = false;
    core.stop_waiting();
}

#[test]
fn polls_ask_again_what_there_is_to_look_at_after_any_other_call() {
    let engine = crate::engine::tests::idle();
    let (context, _) = engine.open_context().unwrap();
    let (cq, _) = engine.create_cq(context, 4, None, 0).unwrap();
    let calm = || engine.inner.core.lock().calm;
    let poll = || assert_eq!(engine.poll_cq_each(cq, 1, |_| {}).unwrap(), 0);
    // The first reads the clock.
    (0..2).for_each(|_| poll());
    let before = calm();
    assert!(before > 1);
    poll();
    assert_eq!(calm(), before - 1);
    drop(engine.doorbell().unwrap());
    assert_eq!(calm(), before - 1, "nothing was to be done for what was posted");
    drop(engine.enter().unwrap());
    assert_eq!(calm(), 0);
    // Now and then the clock is read and the descriptors are asked all the same.
    let looks = engine.inner.core.lock().calls.looks;
    (0..2 * POLLS_PER_LOOK_IDLE).for_each(|_| poll());
    let after = engine.inner.core.lock().calls.looks;
    assert!(after - looks >= 2, "more, if that took long");
}
