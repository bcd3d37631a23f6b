//! Files that are written beside a program, which did not ask for them.

use std::ffi::{OsStr, OsString};
use std::mem::MaybeUninit;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::ptr;

/// What stands for the process in the name of a file.
const PROCESS: &[u8] = b"%p";

/// Where the process stands in a name.
fn place(name: &[u8]) -> Option<usize> {
    name.windows(PROCESS.len()).position(|part| part == PROCESS)
}

/// Whether each process has a file of its own by that name.
#[must_use]
pub fn is_per_process(name: &OsStr) -> bool {
    place(name.as_bytes()).is_some()
}

/// The name of this process's file: `%p` is its number.
#[must_use]
pub fn per_process(name: &OsStr) -> OsString {
    let process = std::process::id().to_string();
    let (mut rest, mut named) = (name.as_bytes(), Vec::new());
    while let Some(at) = place(rest) {
        named.extend_from_slice(&rest[..at]);
        named.extend_from_slice(process.as_bytes());
        rest = &rest[at + PROCESS.len()..];
    }
    named.extend_from_slice(rest);
    OsString::from_vec(named)
}

/// Runs a write, which fails with EFBIG where it goes beyond the longest file that the process may make
/// (`RLIMIT_FSIZE`, as of `ulimit -f`). Without this there is a signal, SIGXFSZ, which ends the process.
pub fn spared<T>(write: impl FnOnce() -> T) -> T {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: the kernel fills in one struct.
    let asked = unsafe { libc::getrlimit(libc::RLIMIT_FSIZE, &raw mut limit) };
    if asked == 0 && limit.rlim_cur == libc::RLIM_INFINITY {
        return write();
    }
    let (mut signal, mut before) = (MaybeUninit::uninit(), MaybeUninit::uninit());
    // SAFETY: a set of one signal, and room for what was blocked before. A write raises it in its own thread.
    unsafe {
        libc::sigemptyset(signal.as_mut_ptr());
        libc::sigaddset(signal.as_mut_ptr(), libc::SIGXFSZ);
        libc::pthread_sigmask(libc::SIG_BLOCK, signal.as_ptr(), before.as_mut_ptr());
    }
    let written = write();
    let at_once = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: both sets were filled in.
    unsafe {
        let errno = crate::Errno::last();
        libc::sigtimedwait(signal.as_ptr(), ptr::null_mut(), &raw const at_once);
        libc::pthread_sigmask(libc::SIG_SETMASK, before.as_ptr(), ptr::null_mut());
        errno.set();
    }
    written
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_process_stands_in_a_name_of_any_bytes() {
        let named = |name: &[u8]| per_process(OsStr::from_bytes(name)).into_vec();
        let process = std::process::id().to_string();
        let process = process.as_bytes();
        assert_eq!(named(b"a\xff"), b"a\xff");
        assert_eq!(named(b"%p\xff-%p.%"), [process, b"\xff-", process, b".%"].concat());
        assert!(is_per_process(OsStr::from_bytes(b"\xff%p")) && !is_per_process(OsStr::new("p%")));
    }
}
