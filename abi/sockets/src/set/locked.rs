//! Locks of sets, which a handler of a signal knows of: it may not wait for what its own thread has.

use std::cell::Cell;
use std::ops::{Deref, DerefMut};
use std::sync::{Mutex, MutexGuard};

thread_local! {
    /// Locks that this thread has, or is about to take or to give back.
    static LOCKS: Cell<u32> = const { Cell::new(0) };
}

/// Whether this thread, which is in a handler then, cannot take any.
pub(super) fn is_interrupted() -> bool {
    LOCKS.get() > 0
}

struct Counted;

impl Drop for Counted {
    fn drop(&mut self) {
        LOCKS.set(LOCKS.get() - 1);
    }
}

/// What a lock protects.
pub(super) struct Locked<'a, T> {
    guard: MutexGuard<'a, T>,
    /// Dropped after the guard.
    _counted: Counted,
}

pub(super) fn lock<T>(mutex: &Mutex<T>) -> Locked<'_, T> {
    LOCKS.set(LOCKS.get() + 1);
    let _counted = Counted;
    Locked { guard: mutex.lock().unwrap_or_else(|error| error.into_inner()), _counted }
}

impl<T> Deref for Locked<'_, T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.guard
    }
}

impl<T> DerefMut for Locked<'_, T> {
    fn deref_mut(&mut self) -> &mut T {
        &mut self.guard
    }
}
