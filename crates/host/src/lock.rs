//! The one lock of an engine: no locked instruction for the thread that it leans towards, one for others
//! where nobody competes, a short spin, then sleep in the kernel.
//!
//! There is one lock per engine, and the engine takes no other while it holds it. Whoever holds it
//! through a [`Doorbell`](crate::Doorbell) may take locks of his own, under which he must not call
//! the engine: so there is one order of locks, this one first.

mod lean;

use std::cell::UnsafeCell;
use std::ops::{Deref, DerefMut};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::{Duration, Instant};

use self::lean::{Lean, Seat};

const FREE: u32 = 0;
const HELD: u32 = 1;

/// Turns of the spin, each a pause instruction: a holder that is running lets go within it.
const SPINS: u32 = 200;
/// How long a sleeper sleeps at most. Whoever lets go may miss one that is about to sleep: the lock is given
/// back by a plain store, which the look for sleepers may overtake. In practice the kernel's own look at the
/// word, on the way to sleep, comes long behind that store.
const NAP: Duration = Duration::from_millis(1);

/// Data behind a lock.
pub(crate) struct Lock<T> {
    /// The usual lock, for all but the favourite.
    state: AtomicU32,
    lean: Lean,
    /// Somebody may sleep, and was not woken yet.
    awaited: AtomicBool,
    /// Whether waiting with a busy loop makes sense: not where there is one processor.
    spin: bool,
    data: UnsafeCell<T>,
}

// SAFETY: the data is reached through the guard only, which one thread at a time has.
unsafe impl<T: Send> Sync for Lock<T> {}

/// The right to use the data, until dropped.
pub(crate) struct Guard<'a, T> {
    lock: &'a Lock<T>,
    /// The seat of the favourite, if that has taken it.
    seat: Option<Seat>,
}

impl<T> Lock<T> {
    /// A free lock. `spin` says whether more than one processor is there.
    pub(crate) fn new(data: T, spin: bool) -> Self {
        let (state, awaited) = (AtomicU32::new(FREE), AtomicBool::new(false));
        Self { state, lean: Lean::new(spin), awaited, spin, data: UnsafeCell::new(data) }
    }

    /// Waits for the lock.
    #[inline(always)]
    pub(crate) fn lock(&self) -> Guard<'_, T> {
        let seat = self.lean.enter();
        if seat.is_none() {
            self.lock_usual();
        }
        Guard { lock: self, seat }
    }

    /// Whether somebody has the lock at this moment.
    #[inline]
    pub(crate) fn is_held(&self) -> bool {
        self.state.load(Ordering::Relaxed) != FREE || self.lean.is_inside()
    }

    /// Waits for the lock, but not for ever: for when this very thread may have been interrupted
    /// by a signal while it held it.
    pub(crate) fn lock_within(&self, limit: Duration) -> Option<Guard<'_, T>> {
        let end = Instant::now() + limit;
        let wait = || {
            std::thread::yield_now();
            Instant::now() <= end
        };
        if let Some(seat) = self.lean.enter() {
            return Some(Guard { lock: self, seat: Some(seat) });
        }
        while !self.try_take() {
            if !wait() {
                return None;
            }
        }
        self.lean.take_back();
        while !self.lean.is_upright() && !self.lean.has_left() {
            if !wait() {
                self.state.store(FREE, Ordering::Release);
                return None;
            }
        }
        // What the favourite cleared may have been another's.
        self.awaited.store(true, Ordering::Relaxed);
        Some(Guard { lock: self, seat: None })
    }

    #[inline]
    fn try_take(&self) -> bool {
        self.state.compare_exchange(FREE, HELD, Ordering::Acquire, Ordering::Relaxed).is_ok()
    }

    #[inline]
    fn lock_usual(&self) {
        if !self.try_take() {
            self.wait(&self.state, HELD, || self.try_take());
        }
        if !self.lean.is_upright() {
            self.straighten();
        }
    }

    /// Has all of the lock, for the holder of the usual one.
    #[cold]
    fn straighten(&self) {
        self.lean.take_back();
        let (door, inside) = self.lean.door();
        self.wait(door, inside, || self.lean.has_left());
        // The favourite may have cleared it for this thread, while another sleeps on the usual lock.
        self.awaited.store(true, Ordering::Relaxed);
    }

    /// Waits until `is_done`, which may come true when `word` is no longer `busy`.
    #[cold]
    fn wait(&self, word: &AtomicU32, busy: u32, is_done: impl Fn() -> bool) {
        let turns = if self.spin { SPINS } else { 0 };
        for _ in 0..turns {
            if word.load(Ordering::Relaxed) != busy && is_done() {
                return;
            }
            std::hint::spin_loop();
        }
        loop {
            // It stays so when the wait is over: there may be others, of whom one is woken in turn.
            self.awaited.store(true, Ordering::SeqCst);
            if is_done() {
                return;
            }
            futex_wait(word, busy, Some(NAP));
        }
    }

    /// Wakes one of those that wait for `word`. Once: who was woken may be long in coming, where others have
    /// its processor.
    #[cold]
    fn wake(&self, word: &AtomicU32) {
        self.awaited.store(false, Ordering::Relaxed);
        futex_wake(word);
    }
}

impl<T> Deref for Guard<'_, T> {
    type Target = T;

    #[inline]
    fn deref(&self) -> &T {
        // SAFETY: this guard holds the lock, so nobody else has a reference to the data.
        unsafe { &*self.lock.data.get() }
    }
}

impl<T> DerefMut for Guard<'_, T> {
    #[inline]
    fn deref_mut(&mut self) -> &mut T {
        // SAFETY: as in `deref`; the guard itself is borrowed exclusively.
        unsafe { &mut *self.lock.data.get() }
    }
}

impl<T> Drop for Guard<'_, T> {
    #[inline(always)]
    fn drop(&mut self) {
        let lock = self.lock;
        let word = match self.seat {
            Some(seat) => {
                lock.lean.leave(seat);
                lock.lean.seat(seat)
            }
            None => {
                lock.lean.count_turn();
                lock.state.store(FREE, Ordering::Release);
                &lock.state
            }
        };
        if lock.awaited.load(Ordering::Relaxed) {
            lock.wake(word);
        }
    }
}

/// Sleeps while `word` is `expected`, until woken, interrupted, or `timeout` is over.
pub(crate) fn futex_wait(word: &AtomicU32, expected: u32, timeout: Option<Duration>) {
    let limit = timeout.map(|t| libc::timespec {
        tv_sec: t.as_secs() as libc::time_t,
        tv_nsec: t.subsec_nanos().into(),
    });
    let limit = limit.as_ref().map_or(std::ptr::null(), std::ptr::from_ref);
    let what = libc::FUTEX_WAIT | libc::FUTEX_PRIVATE_FLAG;
    // SAFETY: the word is a live, aligned atomic, and the timespec null or live. Every way to
    // return is one that the callers check for themselves.
    unsafe { libc::syscall(libc::SYS_futex, word.as_ptr(), what, expected, limit) };
}

/// Wakes one thread that sleeps on `word`.
pub(crate) fn futex_wake(word: &AtomicU32) {
    let what = libc::FUTEX_WAKE | libc::FUTEX_PRIVATE_FLAG;
    // SAFETY: the word is a live, aligned atomic, of which the kernel uses only the address.
    unsafe { libc::syscall(libc::SYS_futex, word.as_ptr(), what, 1) };
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_exactly_under_contention() {
        for spin in [false, true] {
            let lock = Lock::new(0u64, spin);
            std::thread::scope(|scope| {
                for _ in 0..4 {
                    scope.spawn(|| (0..20_000).for_each(|_| *lock.lock() += 1));
                }
            });
            assert_eq!(*lock.lock(), 80_000);
        }
    }

    #[test]
    fn counts_exactly_while_it_leans_now_here_now_there() {
        // Longer and longer turns of one thread, so that it is favoured, cut off by others all the time.
        const TURNS: u32 = 40_000;
        let lock = Lock::new(0u64, true);
        let worked = AtomicBool::new(true);
        std::thread::scope(|scope| {
            let add = || (0..TURNS).for_each(|_| *lock.lock() += 1);
            let workers = [scope.spawn(add), scope.spawn(add)];
            scope.spawn(|| {
                while worked.load(Ordering::Relaxed) {
                    drop(lock.lock());
                    std::thread::sleep(Duration::from_micros(50));
                }
            });
            workers.into_iter().for_each(|worker| worker.join().unwrap());
            worked.store(false, Ordering::Relaxed);
        });
        assert_eq!(*lock.lock(), 2 * u64::from(TURNS));
    }

    /// A lock that leans towards this thread; `None` where the kernel has no barrier for it.
    fn leaning() -> Option<Lock<u32>> {
        let lock = Lock::new(0, true);
        if !crate::barrier::register() {
            return None;
        }
        while lock.lock().seat.is_none() {}
        Some(lock)
    }

    #[test]
    fn a_favourite_loses_the_favour_to_who_comes_and_earns_it_again() {
        let Some(lock) = leaning() else { return };
        std::thread::scope(|scope| {
            scope.spawn(|| *lock.lock() += 1);
        });
        assert!(lock.lock().seat.is_none());
        while lock.lock().seat.is_none() {}
        assert_eq!(*lock.lock(), 1);
    }

    #[test]
    fn whoever_comes_waits_for_a_favourite_that_is_inside() {
        let Some(lock) = leaning() else { return };
        let held = lock.lock();
        assert!(held.seat.is_some() && lock.is_held());
        std::thread::scope(|scope| {
            let other = scope.spawn(|| lock.lock_within(Duration::ZERO).is_none());
            assert!(other.join().unwrap());
            let other = scope.spawn(|| *lock.lock());
            // It sleeps by now, or will find the lock free.
            std::thread::sleep(Duration::from_millis(5));
            let mut held = held;
            *held = 7;
            drop(held);
            assert_eq!(other.join().unwrap(), 7);
        });
    }

    /// Who was stopped between its look and its store writes to its seat when another has long been favoured.
    #[test]
    fn who_was_favoured_and_comes_late_lets_nobody_in() {
        let Some(lock) = leaning() else { return };
        let late = lock.lock().seat.unwrap();
        std::thread::scope(|scope| {
            let (inside, is_inside) = std::sync::mpsc::channel();
            let (over, is_over) = std::sync::mpsc::channel::<()>();
            let lock = &lock;
            scope.spawn(move || {
                while lock.lock().seat.is_none() {}
                let held = lock.lock();
                inside.send(held.seat).unwrap();
                is_over.recv().unwrap();
                drop(held);
            });
            let other = is_inside.recv().unwrap();
            assert!(other.is_some() && other != Some(late));
            lock.lean.seat(late).store(1, Ordering::Relaxed);
            assert!(lock.is_held() && lock.lock_within(Duration::ZERO).is_none());
            lock.lean.leave(late);
            assert!(lock.lock_within(Duration::ZERO).is_none());
            over.send(()).unwrap();
            drop(lock.lock());
        });
    }

    #[test]
    fn more_threads_than_seats_are_favoured_or_not() {
        let Some(lock) = leaning() else { return };
        for _ in 0..20 {
            // Side by side, so that each is another thread.
            std::thread::scope(|scope| {
                for _ in 0..10 {
                    scope.spawn(|| (0..3000).for_each(|_| *lock.lock() += 1));
                }
            });
        }
        assert_eq!(*lock.lock(), 20 * 10 * 3000);
    }

    #[test]
    fn a_favourite_is_not_let_in_twice() {
        let Some(lock) = leaning() else { return };
        let held = lock.lock();
        assert!(lock.lock_within(Duration::ZERO).is_none());
        drop(held);
        assert!(lock.lock_within(Duration::ZERO).is_some());
    }

    #[test]
    fn a_bounded_wait_ends() {
        let lock = Lock::new(0, false);
        let held = lock.lock();
        assert!(lock.lock_within(Duration::ZERO).is_none());
        drop(held);
        assert!(lock.lock_within(Duration::ZERO).is_some());
    }
}
