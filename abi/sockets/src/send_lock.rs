//! The locks by which threads take turns: sending into a ring, and taking octets back. Several processes
//! may have the socket, so they lie in memory that those share. The other end does not have it.

use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use crate::conn::Conn;
use crate::sys;

/// The lock by which threads send into a ring.
pub(crate) struct SendLock(&'static AtomicU32);

/// For how long a thread waits for another that is copying octets.
const LOCK_NS: u64 = 20_000_000;

impl SendLock {
    /// None if this thread has it, in a signal handler, or its holder does not give it back: a
    /// handler left the call by longjmp(3), or the process died.
    #[inline]
    pub(crate) fn take(conn: &Conn) -> Option<Self> {
        let word = &conn.shared()?.sending;
        let own = sys::thread();
        match word.compare_exchange(0, own, Ordering::SeqCst, Ordering::SeqCst) {
            Ok(_) => Some(Self(word)),
            Err(_) => Self::wait(word, own),
        }
    }

    #[cold]
    fn wait(word: &'static AtomicU32, own: u32) -> Option<Self> {
        let begin = sys::now_ns();
        loop {
            match word.compare_exchange(0, own, Ordering::SeqCst, Ordering::SeqCst) {
                Ok(_) => return Some(Self(word)),
                Err(holder) if holder == own => return None,
                Err(_) if sys::now_ns() - begin > LOCK_NS => return None,
                Err(_) => std::thread::yield_now(),
            }
        }
    }
}

impl Drop for SendLock {
    #[inline]
    fn drop(&mut self) {
        self.0.store(0, Ordering::SeqCst);
    }
}

/// The lock by which threads take octets of a ring back: two that do so at a time would send them twice. A
/// thread that could not have the [`SendLock`] takes this one all the same.
pub(crate) struct WithdrawLock(&'static AtomicU32);

/// A holder blocks signals, and waits for nothing: after so long, its process has died.
const DEAD_NS: u64 = 2_000_000_000;
/// Time between two looks.
const NAP: Duration = Duration::from_micros(100);

impl WithdrawLock {
    /// The caller blocks signals.
    pub(crate) fn take(conn: &Conn) -> Option<Self> {
        let word = &conn.shared()?.withdrawing;
        let (own, begin) = (sys::thread(), sys::now_ns());
        loop {
            match word.compare_exchange(0, own, Ordering::SeqCst, Ordering::SeqCst) {
                Err(_) if sys::now_ns() - begin > DEAD_NS => word.store(own, Ordering::SeqCst),
                Err(holder) if holder != own => {
                    sys::quietly(|| sys::futex_wait(word.as_ptr(), holder, Some(NAP)));
                    continue;
                }
                _ => {}
            }
            return Some(Self(word));
        }
    }
}

impl Drop for WithdrawLock {
    fn drop(&mut self) {
        self.0.store(0, Ordering::SeqCst);
    }
}
