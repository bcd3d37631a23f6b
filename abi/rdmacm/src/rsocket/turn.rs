//! Where threads wait that do not sleep at the descriptors of a socket themselves: until one who does is
//! back.

use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;
use std::{process, ptr};

use quipu_cabi::Errno;

/// A word to sleep at. Unlike a condition variable it lets signals interrupt that.
pub(crate) struct Turn {
    /// Counts the times.
    word: AtomicU32,
    /// Who was forked from this process waits for threads that it has not.
    process: u32,
}

impl Turn {
    pub(crate) fn new() -> Self {
        Self { word: AtomicU32::new(0), process: process::id() }
    }

    /// Which time comes next.
    pub(crate) fn next(&self) -> u32 {
        self.word.load(Ordering::Acquire)
    }

    /// Waits until `next` has come, at most for the time left.
    ///
    /// # Errors
    ///
    /// EINTR; ENODEV in a forked child.
    pub(crate) fn wait(&self, next: u32, left: Option<Duration>) -> Result<(), Errno> {
        if process::id() != self.process {
            return Err(Errno(libc::ENODEV));
        }
        let limit = left.map(|left| libc::timespec {
            tv_sec: left.as_secs() as libc::time_t,
            tv_nsec: left.subsec_nanos().into(),
        });
        let limit = limit.as_ref().map_or(ptr::null(), ptr::from_ref);
        let what = libc::FUTEX_WAIT | libc::FUTEX_PRIVATE_FLAG;
        // SAFETY: the word is a live, aligned atomic, and the timespec null or live.
        let waited =
            unsafe { libc::syscall(libc::SYS_futex, self.word.as_ptr(), what, next, limit) };
        match (waited, Errno::last()) {
            (-1, errno @ Errno(libc::EINTR)) => Err(errno),
            _ => Ok(()),
        }
    }

    /// Wakes all who wait.
    pub(crate) fn comes(&self) {
        self.word.fetch_add(1, Ordering::Release);
        let what = libc::FUTEX_WAKE | libc::FUTEX_PRIVATE_FLAG;
        // SAFETY: the word is a live, aligned atomic, of which the kernel uses only the address.
        unsafe { libc::syscall(libc::SYS_futex, self.word.as_ptr(), what, i32::MAX) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_turn_that_has_come_is_not_waited_for_and_no_other_without_end() {
        let turn = Turn::new();
        let next = turn.next();
        assert_eq!(turn.wait(next, Some(Duration::from_millis(1))), Ok(()));
        turn.comes();
        assert_eq!(turn.wait(next, None), Ok(()));
    }

    #[test]
    fn who_waits_is_woken() {
        let turn = Turn::new();
        let next = turn.next();
        std::thread::scope(|scope| {
            let waiter = scope.spawn(|| turn.wait(next, None));
            std::thread::sleep(Duration::from_millis(20));
            turn.comes();
            assert_eq!(waiter.join().unwrap(), Ok(()));
        });
    }
}
