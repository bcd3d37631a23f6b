//! Threads that wait for events, alone and several.

use std::cell::Cell;
use std::sync::{Arc, mpsc};

use super::*;
use crate::SameHost;
use crate::engine::tests::End;

const PATIENCE: Duration = Duration::from_secs(20);

thread_local! {
    /// What this thread does once, before it asks peers to ring.
    pub(super) static BEFORE_ARMING: Cell<Option<Box<dyn FnOnce()>>> = Cell::default();
}

/// The helper has been about to sleep for long, and is late for what would have woken it; a thread that
/// is about to wait in its place then finds what it wants. Nobody rings from then on.
#[test]
fn who_finds_an_event_instead_of_waiting_for_it_wakes_the_helper() {
    let [here, there] = End::pair(SameHost::Auto);
    there.send();
    here.receive();
    here.send();
    there.receive();
    let (says, asleep) = mpsc::channel();
    let (wake, waits) = mpsc::channel::<()>();
    *here.engine.inner.helper.before_sleep.lock().unwrap() = Some(Box::new(move || {
        says.send(()).unwrap();
        let _ = waits.recv();
    }));
    there.send();
    asleep.recv_timeout(PATIENCE).unwrap();
    here.receive();
    here.engine.req_notify_cq(here.cq, false).unwrap();
    // An answer to this may come at any time, so that memory is looked at.
    here.send();
    let there = Arc::new(there);
    let late = Arc::clone(&there);
    BEFORE_ARMING.set(Some(Box::new(move || late.send())));
    here.engine.wait_channel_within(here.channel, Some(PATIENCE)).unwrap();
    assert!(BEFORE_ARMING.take().is_none(), "it came too soon");
    here.receive();

    here.engine.req_notify_cq(here.cq, false).unwrap();
    wake.send(()).unwrap();
    there.send();
    let fd = here.engine.inner.core.lock().events.channel_fd(here.channel).unwrap();
    assert!(sys::wait_readable_within(&fd, PATIENCE), "nobody makes progress");
}

/// A completion of `here` that nobody had asked for, while somebody waits for descriptors.
fn complete_silently([here, there]: &[End; 2], waits: impl Fn(&Core) -> bool) {
    let end = Instant::now() + PATIENCE;
    let until = |what: &dyn Fn(&Core) -> bool| {
        while !what(&here.engine.inner.core.lock()) {
            assert!(Instant::now() < end, "it does not come to that");
            std::thread::yield_now();
        }
    };
    until(&waits);
    there.send();
    until(&|core| core.adapter.has_completions(here.cq).unwrap());
    until(&waits);
}

#[test]
fn an_event_that_is_given_at_once_wakes_who_waits_for_it_inside() {
    for same_host in [SameHost::Auto, SameHost::Never] {
        let ends = End::pair(same_host);
        let here = &ends[0];
        std::thread::scope(|scope| {
            let waits =
                scope.spawn(|| here.engine.wait_channel_within(here.channel, Some(PATIENCE)));
            complete_silently(&ends, |core| core.driver);
            here.engine.req_notify_cq(here.cq, false).unwrap();
            waits.join().unwrap().unwrap();
        });
    }
}

#[test]
fn an_event_that_is_held_back_comes_in_time_though_the_helper_sleeps() {
    let ends = End::pair(SameHost::Auto);
    let here = &ends[0];
    here.engine.moderate_cq(here.cq, 16, 1_000_000).unwrap();
    // The helper watches for who sleeps at the descriptor.
    let fd = here.engine.inner.core.lock().events.channel_fd(here.channel).unwrap();
    here.engine.req_notify_cq(here.cq, true).unwrap();
    complete_silently(&ends, |core| core.wakes_at.is_some());
    here.engine.req_notify_cq(here.cq, false).unwrap();
    assert!(sys::wait_readable_within(&fd, PATIENCE), "nobody knows of the deadline");
}

fn entry(fd: RawFd) -> libc::pollfd {
    sys::poll_entry(&fd, libc::POLLIN)
}

/// Polls until a descriptor is readable; false if it is not in time.
fn is_told(engine: &Engine, fd: RawFd) -> bool {
    let end = Instant::now() + PATIENCE;
    while Instant::now() < end {
        if engine.poll_within(&mut [entry(fd)], Some(PATIENCE)).unwrap() == 1 {
            return true;
        }
    }
    false
}

/// Waits until so many threads sleep, the first of which makes the engine's progress.
fn wait_for_sleepers(engine: &Engine, count: u32) {
    let end = Instant::now() + PATIENCE;
    let asleep = || {
        let core = engine.inner.core.lock();
        core.sleepers.asleep == count && (core.driver || count > 1)
    };
    while !asleep() {
        assert!(Instant::now() < end, "they do not sleep");
        std::thread::yield_now();
    }
}

#[test]
fn who_polls_alone_makes_the_progress_that_wakes_it() {
    for same_host in [SameHost::Auto, SameHost::Never] {
        let [here, there] = End::pair(same_host);
        here.engine.req_notify_cq(here.cq, false).unwrap();
        let fd = here.engine.inner.core.lock().events.channel_fd(here.channel).unwrap();
        std::thread::scope(|scope| {
            let sleeper = scope.spawn(|| is_told(&here.engine, fd));
            wait_for_sleepers(&here.engine, 1);
            there.send();
            assert!(sleeper.join().unwrap());
        });
        here.receive();
    }
}

#[test]
fn who_polls_is_served_when_the_one_that_made_the_progress_has_left() {
    let [here, there] = End::pair(SameHost::Never);
    here.engine.req_notify_cq(here.cq, false).unwrap();
    let fd = here.engine.inner.core.lock().events.channel_fd(here.channel).unwrap();
    let mine = sys::EventFd::new().unwrap();
    std::thread::scope(|scope| {
        let first = scope.spawn(|| is_told(&here.engine, mine.fd().as_raw_fd()));
        wait_for_sleepers(&here.engine, 1);
        let second = scope.spawn(|| is_told(&here.engine, fd));
        wait_for_sleepers(&here.engine, 2);
        mine.set();
        assert!(first.join().unwrap());
        there.send();
        assert!(second.join().unwrap());
    });
}

#[test]
fn a_poll_ends_when_its_time_is_over() {
    let engine = crate::engine::tests::idle();
    let (_, fd) = engine.create_channel().unwrap();
    let (begun, most) = (Instant::now(), Duration::from_millis(30));
    while begun.elapsed() < most {
        let left = most.saturating_sub(begun.elapsed());
        assert_eq!(engine.poll_within(&mut [entry(fd)], Some(left)).unwrap(), 0);
        assert!(begun.elapsed() < PATIENCE);
    }
    assert_eq!(engine.poll_within(&mut [], Some(Duration::ZERO)).unwrap(), 0);
}

#[test]
fn one_of_several_sleepers_is_alone_again_after_some_sleeps() {
    let mut sleepers = Sleepers::default();
    assert!(sleepers.lies_down());
    assert!(!sleepers.lies_down() && sleepers.others_sleep(1));
    sleepers.gets_up();
    assert!(!sleepers.others_sleep(1));
    sleepers.gets_up();
    let alone = (0..ALONE).filter(|_| {
        let alone = sleepers.lies_down();
        sleepers.gets_up();
        alone
    });
    assert_eq!(alone.count(), 1);
}
