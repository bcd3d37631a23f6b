//! The one lock of an engine: one locked instruction where nobody competes, a short spin, then
//! sleep in the kernel.
//!
//! There is one lock per engine, and the engine takes no other while it holds it. Anyone who holds it
//! through a [`Doorbell`](crate::Doorbell) may take locks of his own, under which he must not call
//! the engine: so there is one order of locks, this one first. Anyone who replaces pages of the process
//! holds those of all engines meanwhile (`pages::still`).

use std::cell::UnsafeCell;
use std::ops::{Deref, DerefMut};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::{Duration, Instant};

const FREE: u32 = 0;
const HELD: u32 = 1;

/// Turns of the spin, each a pause instruction: a holder that is running lets go within it.
const SPINS: u32 = 200;
/// How long one who gives way looks out for one who is woken: first it keeps its processor, for as long as
/// that takes where another is free, then it yields.
const COMES_WITHIN: Duration = Duration::from_micros(50);
const YIELDS_FOR: Duration = Duration::from_micros(500);
/// How long a sleeper sleeps at most. Whoever lets go may miss one that is about to sleep: the lock is given
/// back by a plain store, which the look for sleepers may overtake. In practice the kernel's own look at the
/// word, on the way to sleep, comes long behind that store.
const NAP: Duration = Duration::from_millis(1);

/// Data that a lock guards, for short critical sections: one locked instruction if it is free, else a short
/// spin, then sleep in the kernel. It is not fair, and a panic of its holder only releases it.
pub struct Lock<T> {
    state: AtomicU32,
    /// Somebody may sleep, and was not woken yet.
    awaited: AtomicBool,
    /// How often it went to one who had to wait for it.
    waits: AtomicU32,
    /// Whether waiting with a busy loop makes sense: not where there is one processor.
    spin: bool,
    data: UnsafeCell<T>,
}

// SAFETY: the data is reached through the guard only, which one thread at a time has.
unsafe impl<T: Send> Sync for Lock<T> {}

/// The right to use the data, until dropped.
pub struct Guard<'a, T> {
    lock: &'a Lock<T>,
}

impl<T> Lock<T> {
    /// A free lock. `spin` says whether more than one processor is there.
    pub fn new(data: T, spin: bool) -> Self {
        let (state, waits) = (AtomicU32::new(FREE), AtomicU32::new(0));
        Self { state, awaited: AtomicBool::new(false), waits, spin, data: UnsafeCell::new(data) }
    }

    #[inline]
    fn try_take(&self) -> bool {
        self.state.compare_exchange(FREE, HELD, Ordering::Acquire, Ordering::Relaxed).is_ok()
    }

    /// Waits for the lock.
    #[inline]
    pub fn lock(&self) -> Guard<'_, T> {
        if !self.try_take() {
            self.lock_contended();
        }
        Guard { lock: self }
    }

    /// Whether somebody has the lock at this moment.
    #[inline]
    pub(crate) fn is_held(&self) -> bool {
        self.state.load(Ordering::Relaxed) != FREE
    }

    /// Waits for the lock, but not for ever: for when this very thread may have been interrupted
    /// by a signal while it held it.
    pub(crate) fn lock_within(&self, limit: Duration) -> Option<Guard<'_, T>> {
        let end = Instant::now() + limit;
        while !self.try_take() {
            if Instant::now() > end {
                return None;
            }
            std::thread::yield_now();
        }
        Some(Guard { lock: self })
    }

    #[cold]
    fn lock_contended(&self) {
        self.wait();
        self.waits.fetch_add(1, Ordering::Relaxed);
    }

    fn wait(&self) {
        let turns = if self.spin { SPINS } else { 0 };
        for _ in 0..turns {
            std::hint::spin_loop();
            if self.state.load(Ordering::Relaxed) == FREE && self.try_take() {
                return;
            }
        }
        loop {
            // It stays so when the lock is taken: there may be others, of whom one is woken in turn.
            self.awaited.store(true, Ordering::SeqCst);
            if self.try_take() {
                return;
            }
            futex_wait(&self.state, HELD, Some(NAP));
        }
    }
}

impl<T> Guard<'_, T> {
    /// Gives the lock back, for somebody who takes it again at once, and again: whoever sleeps for it is
    /// woken, has a while to come, and would find it held each time otherwise.
    ///
    /// It is over as soon as one has come, even if that one is gone again, and by the clock: where others
    /// compute on this processor, a single yield gives them milliseconds.
    pub(crate) fn give_way(self) {
        let lock = self.lock;
        let awaited = lock.awaited.load(Ordering::Relaxed);
        let waits = lock.waits.load(Ordering::Relaxed);
        drop(self);
        if !awaited {
            return;
        }
        let begun = Instant::now();
        loop {
            let waited = begun.elapsed();
            if lock.waits.load(Ordering::Relaxed) != waits || waited > YIELDS_FOR {
                return;
            }
            if lock.spin && waited < COMES_WITHIN {
                std::hint::spin_loop();
            } else {
                std::thread::yield_now();
            }
        }
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
    #[inline]
    fn drop(&mut self) {
        self.lock.state.store(FREE, Ordering::Release);
        if self.lock.awaited.load(Ordering::Relaxed) {
            // Once: who was woken may be long in coming, where others have its processor.
            self.lock.awaited.store(false, Ordering::Relaxed);
            futex_wake(&self.lock.state);
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

    /// How soon somebody who sleeps for it comes is up to the system: it finds the lock free, that is all.
    #[test]
    fn who_gives_way_has_given_the_lock_back() {
        for awaited in [false, true] {
            let lock = Lock::new(0, true);
            lock.awaited.store(awaited, Ordering::Relaxed);
            lock.lock().give_way();
            assert!(!lock.is_held());
        }
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
