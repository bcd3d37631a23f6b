//! Any thread may call anything: what one finds, another may have waited for.

use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use super::*;

/// Milliseconds after which a wait has failed.
const PATIENCE: c_int = 20_000;

/// An object, for other threads.
struct Shared(*mut Opaque);

// SAFETY: any thread may call anything.
unsafe impl Sync for Shared {}

impl Shared {
    fn raw(&self) -> *mut Opaque {
        self.0
    }
}

#[track_caller]
fn poll(cq: *mut qpip_cq) -> Option<qpip_completion> {
    // SAFETY: a completion consists of integers, and the queue lives.
    unsafe {
        let mut one: qpip_completion = std::mem::zeroed();
        (done(qpip_poll(cq, &mut one, 1)) == 1).then_some(one)
    }
}

/// A datagram queue pair that sends to itself.
fn own() -> (End, sockaddr_storage) {
    let end = End::new(UDP);
    // SAFETY: as above.
    let port = unsafe { done(qpip_bind(end.qp, 0)) };
    let to = end.address(port as u16);
    (end, to)
}

#[test]
fn completions_stay_in_order_while_another_thread_waits() {
    const COUNT: u64 = 20_000;
    let (mut end, to) = own();
    let over = AtomicBool::new(false);
    let cq = Shared(end.cq);
    thread::scope(|scope| {
        scope.spawn(|| {
            while !over.load(Ordering::Relaxed) {
                // SAFETY: the queue lives until the scope ends.
                done(unsafe { qpip_wait(cq.raw(), 0) });
            }
        });
        let (mut posted, mut next) = (0, 0);
        let mut found = Vec::new();
        while next < COUNT {
            while posted < COUNT && posted - next < 8 {
                done(end.send(posted, 8, 2, Some(&to)));
                posted += 1;
            }
            while let Some(completion) = poll(end.cq) {
                found.push(completion.id);
                next += 1;
            }
        }
        over.store(true, Ordering::Relaxed);
        let wrong = found.iter().enumerate().find(|(at, id)| *at as u64 != **id);
        assert_eq!(wrong, None);
    });
    end.end();
}

#[test]
fn of_two_that_wait_each_gets_one_of_two_completions() {
    let (mut end, to) = own();
    let cq = Shared(end.cq);
    for _ in 0..20 {
        end.receive(1, 0, 1000);
        thread::scope(|scope| {
            for _ in 0..2 {
                scope.spawn(|| {
                    let cq = cq.raw();
                    while poll(cq).is_none() {
                        // SAFETY: the queue lives until the scope ends.
                        let woken = done(unsafe { qpip_wait(cq, PATIENCE) });
                        assert_eq!(woken, 1, "nobody woke it");
                    }
                });
            }
            thread::sleep(Duration::from_millis(20));
            done(end.send(2, 8, 2, Some(&to)));
        });
    }
    end.end();
}

#[test]
fn an_event_wakes_all_that_wait_whoever_looks_first() {
    for _ in 0..8 {
        let (a, mut b) = (End::new(TCP), End::new(TCP));
        // SAFETY: what is passed is valid, here and in all of this.
        unsafe {
            let listener = made(qpip_listen(b.adapter, 0, 0, 4));
            b.receive(1, 0, 1000);
            done(qpip_offer(listener, b.qp));
            let to = b.address(qpip_listener_port(listener));
            let others = made(qpip_cq_create(b.adapter, 16));
            let (sleeps, looks) = (Shared(b.cq), Shared(others));
            let over = AtomicBool::new(false);
            thread::scope(|scope| {
                let sleeper = scope.spawn(|| qpip_wait(sleeps.raw(), PATIENCE));
                scope.spawn(|| {
                    let cq = looks.raw();
                    while !over.load(Ordering::Relaxed) {
                        done(qpip_wait(cq, 10));
                        assert!(poll(cq).is_none());
                    }
                });
                thread::sleep(Duration::from_millis(20));
                let length = size_of::<sockaddr_in6>() as u32;
                done(qpip_connect(a.qp, (&raw const to).cast(), length, 0, 0));
                assert_eq!(sleeper.join().unwrap(), 1, "nobody woke it");
                over.store(true, Ordering::Relaxed);
            });
            assert_eq!(b.event().kind, 1);
            done(qpip_cq_destroy(others));
            done(qpip_unlisten(listener));
        }
        a.end();
        b.end();
    }
}

#[test]
fn completions_of_a_destroyed_queue_pair_are_gone_though_a_wait_has_seen_them() {
    let (mut end, to) = own();
    end.receive(42, 0, 1000);
    done(end.send(1, 8, 3, Some(&to)));
    // SAFETY: what is passed is valid.
    unsafe {
        assert_eq!(done(qpip_wait(end.cq, PATIENCE)), 1);
        done(qpip_destroy(end.qp));
        assert!(poll(end.cq).is_none());
        end.qp = made(qpip_create(end.adapter, &init(UDP, end.cq)));
    }
    end.end();
}
