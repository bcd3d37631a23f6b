//! Calls by which the C library or the kernel moves octets of a descriptor by itself: stdio and splice.

use std::sync::{Mutex, MutexGuard, PoisonError};

use libc::{FILE, c_char, c_int, c_uint, ssize_t};
use quipu_cabi::Void;

use super::descriptors::forget;
use super::process::serve;
use crate::real::address_of;
use crate::table::{self, Entry};
use crate::{fork, real};

/// The kernel, or the C library, is about to move octets of a descriptor by itself.
pub(super) fn hand_over(fd: c_int) {
    if matches!(table::get(fd), Some(Entry::Sdp(_) | Entry::Lost(_))) {
        serve::<Void>("relay", || {
            fork::relay(fd);
            Ok(())
        });
    }
}

/// A child is about to use a descriptor of its parent's.
pub(super) fn claim(fd: c_int) {
    if matches!(table::get(fd), Some(Entry::Lost(_))) {
        hand_over(fd);
    }
}

/// stdio uses the standard descriptors without a call of this library.
pub(super) fn leave_to_stdio(fd: c_int) {
    if fd <= libc::STDERR_FILENO {
        hand_over(fd);
    }
}

#[unsafe(no_mangle)]
unsafe extern "C-unwind" fn splice(
    from: c_int,
    from_at: *mut i64,
    to: c_int,
    to_at: *mut i64,
    len: usize,
    flags: c_uint,
) -> ssize_t {
    hand_over(from);
    hand_over(to);
    // SAFETY: as the program called this.
    unsafe { real::splice(from, from_at, to, to_at, len, flags) }
}

/// Streams of stdio that [`fdopen`] has made of connections, by their addresses.
static STREAMS: Mutex<Vec<usize>> = Mutex::new(Vec::new());

/// Keeps streams from coming and going: a child of fork(2) has no thread that may hold the lock.
pub(super) fn streams() -> MutexGuard<'static, Vec<usize>> {
    STREAMS.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The result is a pointer.
#[unsafe(no_mangle)]
unsafe extern "C-unwind" fn fdopen(fd: c_int, mode: *const c_char) -> isize {
    hand_over(fd);
    // SAFETY: as the program called this.
    let stream = unsafe { real::fdopen(fd, mode) };
    if stream != 0 && table::relayed(fd).is_some() {
        streams().push(stream as usize);
    }
    stream
}

#[unsafe(no_mangle)]
unsafe extern "C-unwind" fn fclose(stream: *mut FILE) -> c_int {
    streams().retain(|known| *known != stream.addr());
    // SAFETY: an open stream. The C library closes its descriptor by itself.
    forget(unsafe { libc::fileno(stream) });
    // SAFETY: as the program called this.
    unsafe { real::fclose(stream) }
}

/// Defines freopen and its twin. The result is a pointer.
macro_rules! freopen_like {
    ($($name:ident)*) => {$(
        #[unsafe(no_mangle)]
        unsafe extern "C-unwind" fn $name(
            path: *const c_char, mode: *const c_char, stream: *mut FILE,
        ) -> isize {
            if !path.is_null() {
                // SAFETY: an open stream. The C library closes its descriptor by itself.
                forget(unsafe { libc::fileno(stream) });
            }
            // SAFETY: as the program called this.
            unsafe { real::$name(path, mode, stream) }
        }
    )*};
}
freopen_like! { freopen freopen64 }

unsafe extern "C" {
    static stdout: *mut FILE;
    static stderr: *mut FILE;
    fn ftrylockfile(stream: *mut FILE) -> c_int;
    fn funlockfile(stream: *mut FILE);
    fn fflush_unlocked(stream: *mut FILE) -> c_int;
}

/// Has stdio write what it has for connections, except to streams that other threads use now.
pub(super) fn flush_stdio() {
    // SAFETY: the C library's own streams.
    let standard = unsafe { [(1, stdout), (2, stderr)] };
    let is_relayed = |(fd, _): &(c_int, *mut FILE)| table::relayed(*fd).is_some();
    let standard = standard.into_iter().filter(is_relayed).map(|(_, stream)| stream);
    let streams = streams();
    let opened = streams.iter().map(|at| std::ptr::with_exposed_provenance_mut(*at));
    for stream in standard.chain(opened) {
        // SAFETY: open streams: `fclose` forgets those of `fdopen` first.
        unsafe {
            if ftrylockfile(stream) == 0 {
                fflush_unlocked(stream);
                funlockfile(stream);
            }
        }
    }
}

quipu_cabi::dprintf_after! { hand_over, address_of }
