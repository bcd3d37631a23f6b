//! A thread with descriptors of its own: one that may hang in the kernel keeps no others open then, not even
//! when its process is killed.

use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::sync::mpsc;

use libc::{c_int, c_uint};

use super::check;

/// Starts a thread that has just these two descriptors. Before Linux 5.9 it has them with all others.
pub(crate) fn spawn_apart(
    name: &str,
    fds: [OwnedFd; 2],
    work: impl FnOnce([OwnedFd; 2]) + Send + 'static,
) -> io::Result<()> {
    let numbers = fds.each_ref().map(AsRawFd::as_raw_fd);
    let (tell, told) = mpsc::sync_channel(1);
    std::thread::Builder::new().name(name.to_owned()).spawn(move || {
        let _ = tell.send(close_others(numbers).is_ok());
        work(fds);
    })?;
    if told.recv() == Ok(true) {
        // SAFETY: the thread owns these in its own table; in this one they are nobody's any more.
        drop(numbers.map(|fd| unsafe { OwnedFd::from_raw_fd(fd) }));
    }
    Ok(())
}

/// Gives this thread a table of descriptors of its own, with two of those that there are. If that fails it
/// has the one that it had.
fn close_others(mut kept: [RawFd; 2]) -> io::Result<()> {
    kept.sort_unstable();
    let [low, high] = kept.map(|fd| fd as c_uint);
    // The first of these makes the table; the others close what is left in it.
    close_range(high + 1, c_uint::MAX, libc::CLOSE_RANGE_UNSHARE)?;
    for (first, end) in [(0, low), (low + 1, high)] {
        if first < end {
            // Cannot fail: the range is none that is empty.
            let _ = close_range(first, end - 1, 0);
        }
    }
    Ok(())
}

fn close_range(first: c_uint, last: c_uint, flags: c_uint) -> io::Result<()> {
    // SAFETY: takes integers only. Where it closes anything the table is this thread's alone, which uses
    // nothing of what is closed.
    check(unsafe { libc::syscall(libc::SYS_close_range, first, last, flags) } as c_int).map(drop)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sys::EventFd;

    #[test]
    fn it_has_two_descriptors_and_the_others_stay_open_here() {
        let (other, bell) = (EventFd::new().unwrap(), EventFd::new().unwrap());
        let others = other.fd().as_raw_fd();
        let (given, copy) = (EventFd::new().unwrap().into_fd(), bell.fd().try_clone().unwrap());
        let (tell, told) = mpsc::channel();
        spawn_apart("apart", [given, copy], move |[given, copy]| {
            // SAFETY: F_GETFD takes a number, whether it is open or not.
            let is_open = |fd: RawFd| unsafe { libc::fcntl(fd, libc::F_GETFD) } >= 0;
            let open = (0..1 << 16).filter(|fd| is_open(*fd)).count();
            let outcome = (open, is_open(others), is_open(given.as_raw_fd()));
            EventFd::from_fd(copy).set();
            tell.send(outcome).unwrap();
        })
        .unwrap();
        let (open, others, given) = told.recv().unwrap();
        // All of them, where the kernel has no such call.
        assert!(given && (others || open == 2), "{open}");
        assert!(crate::sys::is_readable(bell.fd().as_raw_fd()));
        other.set();
        assert!(crate::sys::is_readable(other.fd().as_raw_fd()));
    }
}
