//! The lock by which one thread at a time sends into a ring. It lies in the shared memory, since several
//! processes may have the socket.

use std::sync::atomic::{AtomicU32, Ordering};

use crate::map::Map;
use crate::sys;

/// The lock by which threads send into a ring.
pub(crate) struct SendLock<'a>(&'a AtomicU32);

/// For how long a thread waits for another that is copying octets.
const LOCK_NS: u64 = 20_000_000;

impl<'a> SendLock<'a> {
    /// None if this thread has it, in a signal handler, or its holder does not give it back: a
    /// handler left the call by longjmp(3), or the process died.
    #[inline]
    pub(crate) fn take(map: &'a Map) -> Option<Self> {
        let word = &map.own().sending;
        let own = sys::thread();
        match word.compare_exchange(0, own, Ordering::SeqCst, Ordering::SeqCst) {
            Ok(_) => Some(Self(word)),
            Err(_) => Self::wait(word, own),
        }
    }

    #[cold]
    fn wait(word: &'a AtomicU32, own: u32) -> Option<Self> {
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

impl Drop for SendLock<'_> {
    #[inline]
    fn drop(&mut self) {
        self.0.store(0, Ordering::SeqCst);
    }
}
