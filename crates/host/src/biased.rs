//! A lock that is free of locked instructions for the one thread that uses it, as long as that is so.
//!
//! A locked instruction waits until all earlier stores of the thread are in the cache. A thread that has just
//! stored a message into a line that its peer polls would wait for that line, some hundred cycles, before it
//! may look for the answer.
//!
//! The first thread that takes the lock becomes its owner. The owner only stores that it is inside, and then
//! reads whether its right was revoked. Another thread revokes it for ever: it stores so, and has the kernel
//! order the memory accesses of all threads of the process (`membarrier(2)`). So either the owner sees the
//! revocation, or the other thread sees that the owner is inside. From then on all use an ordinary lock.

use std::cell::UnsafeCell;
use std::ops::{Deref, DerefMut};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering, compiler_fence};

use crate::lock::{Guard, Lock};

thread_local! {
    /// Its address tells threads apart.
    static TOKEN: u8 = const { 0 };
}

/// A number of this thread; never 0.
#[inline(always)]
fn this_thread() -> usize {
    TOKEN.with(|token| std::ptr::from_ref(token).addr())
}

/// Data that a lock guards; see the module.
pub struct BiasedLock<T> {
    /// The thread that needs no locked instruction; 0 for none yet.
    owner: AtomicUsize,
    /// The owner uses the data.
    is_inside: AtomicBool,
    is_revoked: AtomicBool,
    lock: Lock<()>,
    data: UnsafeCell<T>,
}

// SAFETY: the data is reached through the guard only, which one thread at a time has.
unsafe impl<T: Send> Sync for BiasedLock<T> {}

/// The right to use the data, until dropped.
pub struct BiasedGuard<'a, T> {
    of: &'a BiasedLock<T>,
    /// None for the owner.
    _ordinary: Option<Guard<'a, ()>>,
}

impl<T> BiasedLock<T> {
    /// A free lock. `spin` says whether more than one processor is there.
    pub fn new(data: T, spin: bool) -> Self {
        // Without the kernel's help it is an ordinary lock.
        let is_revoked = !membarrier(libc::MEMBARRIER_CMD_REGISTER_PRIVATE_EXPEDITED);
        Self {
            owner: AtomicUsize::new(0),
            is_inside: AtomicBool::new(false),
            is_revoked: AtomicBool::new(is_revoked),
            lock: Lock::new((), spin),
            data: UnsafeCell::new(data),
        }
    }

    /// Waits for the lock.
    #[inline(always)]
    pub fn lock(&self) -> BiasedGuard<'_, T> {
        if self.owner.load(Ordering::Relaxed) == this_thread() {
            self.is_inside.store(true, Ordering::Relaxed);
            // The processor may do the next read first: `membarrier` of the other thread is what prevents it.
            compiler_fence(Ordering::SeqCst);
            if !self.is_revoked.load(Ordering::Acquire) {
                return BiasedGuard { of: self, _ordinary: None };
            }
            self.is_inside.store(false, Ordering::Release);
        }
        self.lock_ordinarily()
    }

    #[inline(never)]
    fn lock_ordinarily(&self) -> BiasedGuard<'_, T> {
        let guard = self.lock.lock();
        if !self.is_revoked.load(Ordering::Relaxed) {
            if self.owner.load(Ordering::Relaxed) == 0 {
                self.owner.store(this_thread(), Ordering::Relaxed);
            } else {
                self.revoke();
            }
        }
        BiasedGuard { of: self, _ordinary: Some(guard) }
    }

    /// Takes the owner's right away. When this returns it is not inside, and needs the ordinary lock, which
    /// the caller holds.
    #[cold]
    fn revoke(&self) {
        self.is_revoked.store(true, Ordering::SeqCst);
        // It was registered for, so it cannot fail.
        membarrier(libc::MEMBARRIER_CMD_PRIVATE_EXPEDITED);
        while self.is_inside.load(Ordering::Acquire) {
            std::thread::yield_now();
        }
    }
}

/// Whether the kernel did it.
fn membarrier(command: libc::c_int) -> bool {
    // SAFETY: the call takes three integers and touches no memory.
    unsafe { libc::syscall(libc::SYS_membarrier, command, 0, 0) == 0 }
}

impl<T> Drop for BiasedGuard<'_, T> {
    #[inline(always)]
    fn drop(&mut self) {
        if self._ordinary.is_none() {
            self.of.is_inside.store(false, Ordering::Release);
        }
    }
}

impl<T> Deref for BiasedGuard<'_, T> {
    type Target = T;

    #[inline(always)]
    fn deref(&self) -> &T {
        // SAFETY: this guard holds the lock, so nobody else has a reference to the data.
        unsafe { &*self.of.data.get() }
    }
}

impl<T> DerefMut for BiasedGuard<'_, T> {
    #[inline(always)]
    fn deref_mut(&mut self) -> &mut T {
        // SAFETY: as in `deref`; the guard itself is borrowed exclusively.
        unsafe { &mut *self.of.data.get() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_exactly_while_the_owner_loses_its_right() {
        for round in 0..200 {
            let lock = BiasedLock::new(0_u64, true);
            *lock.lock() += 1;
            assert_ne!(lock.owner.load(Ordering::Relaxed), 0);
            std::thread::scope(|scope| {
                for late in 0..2 {
                    let lock = &lock;
                    scope.spawn(move || {
                        for _ in 0..round * late {
                            std::hint::spin_loop();
                        }
                        (0..500).for_each(|_| *lock.lock() += 1);
                    });
                }
                (0..2000).for_each(|_| *lock.lock() += 1);
            });
            assert_eq!(*lock.lock(), 3001);
        }
    }

    #[test]
    fn one_thread_keeps_its_right() {
        let lock = BiasedLock::new(0, true);
        (0..100).for_each(|_| *lock.lock() += 1);
        assert!(lock._is_biased() || lock.is_revoked.load(Ordering::Relaxed));
        assert_eq!(*lock.lock(), 100);
    }

    impl<T> BiasedLock<T> {
        fn _is_biased(&self) -> bool {
            self.lock()._ordinary.is_none()
        }
    }
}
