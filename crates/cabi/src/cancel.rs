//! Cancellation of threads, `pthread_cancel(3)`.
//!
//! The C library ends a cancelled thread by unwinding its stack from within a system call. Rust's
//! frames are no place for that: [`catch_unwind`](std::panic::catch_unwind) would take it for an
//! exception and end the process. So nothing here can be cancelled ([`Hold`]), and a call that
//! waits comes back now and then to where there is only a C frame above, to be ended there
//! ([`end_if_cancelled`]).

use libc::c_int;

/// `PTHREAD_CANCEL_DISABLE`
const DISABLE: c_int = 1;

unsafe extern "C" {
    fn pthread_setcancelstate(state: c_int, old: *mut c_int) -> c_int;
}

unsafe extern "C-unwind" {
    fn pthread_testcancel();
}

/// While it lives, its thread is not cancelled.
#[derive(Debug)]
pub struct Hold {
    before: c_int,
}

impl Hold {
    /// From now on.
    #[inline]
    #[must_use]
    pub fn new() -> Self {
        let mut before = 0;
        // SAFETY: a known state, and a live variable for the old one.
        unsafe { pthread_setcancelstate(DISABLE, &raw mut before) };
        Self { before }
    }
}

impl Default for Hold {
    fn default() -> Self {
        Self::new()
    }
}

impl Drop for Hold {
    #[inline]
    fn drop(&mut self) {
        // SAFETY: the state that it had before; null where nobody asks for the old one.
        unsafe { pthread_setcancelstate(self.before, std::ptr::null_mut()) };
    }
}

/// Ends the thread if it was cancelled and may be.
///
/// # Safety
///
/// No frame of Rust between here and the C program has anything to drop, or catches what unwinds.
#[inline]
pub unsafe fn end_if_cancelled() {
    // SAFETY: "creates a cancellation point"; the caller's promise is about what it may unwind.
    unsafe { pthread_testcancel() };
}
