//! Waiting: counters that wake a thread, sets of descriptors, and polls of one or a few.

use std::io;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::time::Duration;

use libc::{c_int, c_short, c_void};
use quipu_cabi::Hold;

use super::{adopt, check, straight, with_more_descriptors};

/// A counter that another thread can wait for. It is never given to another process, which could fill it
/// or make it block.
#[derive(Debug)]
pub(crate) struct EventFd(OwnedFd);

impl EventFd {
    /// A counter at 0. Reads and writes never wait.
    pub(crate) fn new() -> io::Result<Self> {
        let flags = libc::EFD_CLOEXEC | libc::EFD_NONBLOCK;
        // SAFETY: takes integers only.
        with_more_descriptors(|| adopt(unsafe { libc::eventfd(0, flags) })).map(Self)
    }

    /// A counter by another of its descriptors.
    pub(crate) fn from_fd(fd: OwnedFd) -> Self {
        Self(fd)
    }

    /// Adds 1: whoever waits wakes up.
    pub(crate) fn set(&self) {
        let _hold = Hold::new();
        let one = 1u64.to_ne_bytes();
        // SAFETY: the kernel reads 8 bytes from a live array. The one error is a full counter,
        // which wakes just as well.
        unsafe { libc::write(self.0.as_raw_fd(), one.as_ptr().cast(), one.len()) };
    }

    /// Puts the counter back to 0.
    pub(crate) fn clear(&self) {
        let _hold = Hold::new();
        // A program may have read a counter that is its own to wait for, though it should not;
        // reading at 0 would then wait for ever.
        if !is_readable(self.0.as_raw_fd()) {
            return;
        }
        let mut count = [0u8; 8];
        // SAFETY: the kernel writes 8 bytes to a live array.
        unsafe { libc::read(self.0.as_raw_fd(), count.as_mut_ptr().cast(), count.len()) };
    }

    /// The descriptor.
    pub(crate) fn fd(&self) -> &OwnedFd {
        &self.0
    }

    /// The descriptor alone.
    pub(crate) fn into_fd(self) -> OwnedFd {
        self.0
    }
}

/// A set of descriptors to wait for. Level-triggered.
#[derive(Debug)]
pub(crate) struct Epoll(OwnedFd);

/// What [`Epoll::wait`] found for one descriptor.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Ready {
    /// As given to [`Epoll::add`].
    pub(crate) token: u64,
    /// `EPOLLIN` and so on.
    pub(crate) events: u32,
}

/// How many descriptors one [`Epoll::wait`] reports at most.
const READY_BATCH: usize = 64;

/// Room for the answers of [`Epoll::wait`].
pub(crate) struct ReadyList {
    events: [libc::epoll_event; READY_BATCH],
    len: usize,
}

impl ReadyList {
    /// An empty list.
    pub(crate) fn new() -> Self {
        Self { events: [libc::epoll_event { events: 0, u64: 0 }; READY_BATCH], len: 0 }
    }

    /// What was found.
    pub(crate) fn iter(&self) -> impl Iterator<Item = Ready> + '_ {
        self.events[..self.len].iter().map(|e| Ready { token: e.u64, events: e.events })
    }
}

impl Epoll {
    /// An empty set.
    pub(crate) fn new() -> io::Result<Self> {
        // SAFETY: takes integers only.
        with_more_descriptors(|| adopt(unsafe { libc::epoll_create1(libc::EPOLL_CLOEXEC) }))
            .map(Self)
    }

    /// Adds a descriptor.
    pub(crate) fn add(&self, fd: &impl AsRawFd, events: c_int, token: u64) -> io::Result<()> {
        self.control(libc::EPOLL_CTL_ADD, fd, events, token)
    }

    /// Changes what is waited for.
    pub(crate) fn modify(&self, fd: &impl AsRawFd, events: c_int, token: u64) -> io::Result<()> {
        self.control(libc::EPOLL_CTL_MOD, fd, events, token)
    }

    /// Removes a descriptor, which a duplicate elsewhere could otherwise keep in the set.
    pub(crate) fn remove(&self, fd: &impl AsRawFd) {
        // The one possible error is that it is not in the set.
        let _ = self.control(libc::EPOLL_CTL_DEL, fd, 0, 0);
    }

    fn control(&self, what: c_int, fd: &impl AsRawFd, events: c_int, token: u64) -> io::Result<()> {
        let mut event = libc::epoll_event { events: events as u32, u64: token };
        // SAFETY: the kernel reads one event from a live variable.
        check(unsafe {
            libc::epoll_ctl(self.0.as_raw_fd(), what, fd.as_raw_fd(), &raw mut event)
        })?;
        Ok(())
    }

    /// Waits until something is ready, at most `timeout` (`None`: without end). An interruption
    /// by a signal counts as nothing ready, and is reported as `Ok(true)`.
    pub(crate) fn wait(&self, list: &mut ReadyList, timeout: Option<Duration>) -> io::Result<bool> {
        list.len = 0;
        let found = if timeout == Some(Duration::ZERO) {
            // SAFETY: the kernel writes at most READY_BATCH events to `list.events`.
            // The signal mask is null.
            unsafe {
                let (events, mask) = (list.events.as_mut_ptr(), std::ptr::null::<c_void>());
                straight!(SYS_epoll_pwait, self.0, events, READY_BATCH, 0, mask, 0usize) as c_int
            }
        } else {
            self.wait_precisely(list, timeout)
        };
        match check(found) {
            Ok(found) => {
                list.len = found as usize;
                Ok(false)
            }
            Err(e) if e.kind() == io::ErrorKind::Interrupted => Ok(true),
            Err(e) => Err(e),
        }
    }

    /// `epoll_pwait2` where there is one (Linux 5.11), else `epoll_wait` rounded up to milliseconds.
    fn wait_precisely(&self, list: &mut ReadyList, timeout: Option<Duration>) -> c_int {
        let limit = timeout.map(|t| libc::timespec {
            tv_sec: t.as_secs().min(1 << 30) as libc::time_t,
            tv_nsec: t.subsec_nanos().into(),
        });
        let pointer = limit.as_ref().map_or(std::ptr::null(), std::ptr::from_ref);
        // SAFETY: the kernel writes at most READY_BATCH events to `list.events`, and reads a
        // timespec that is null or lives across the call; the signal mask is null.
        let found = unsafe {
            libc::syscall(
                libc::SYS_epoll_pwait2,
                self.0.as_raw_fd(),
                list.events.as_mut_ptr(),
                READY_BATCH as c_int,
                pointer,
                std::ptr::null::<c_void>(),
                0usize,
            )
        };
        let no_such_call = found < 0
            && matches!(
                io::Error::last_os_error().raw_os_error(),
                Some(libc::ENOSYS | libc::EPERM)
            );
        if !no_such_call {
            return found as c_int;
        }
        let milliseconds = timeout.map_or(-1, |t| {
            c_int::try_from(t.as_nanos().div_ceil(1_000_000)).unwrap_or(c_int::MAX)
        });
        // SAFETY: as above.
        unsafe {
            libc::epoll_wait(
                self.0.as_raw_fd(),
                list.events.as_mut_ptr(),
                READY_BATCH as c_int,
                milliseconds,
            )
        }
    }

    /// The descriptor.
    pub(crate) fn fd(&self) -> &OwnedFd {
        &self.0
    }
}

pub(crate) fn poll_entry(fd: &impl AsRawFd, events: c_short) -> libc::pollfd {
    libc::pollfd { fd: fd.as_raw_fd(), events, revents: 0 }
}

/// Waits for one of many descriptors, at most `timeout` (`None`: without end). How many are ready; negative
/// if none is because of an error or a signal.
fn poll_all(polls: &mut [libc::pollfd], timeout: Option<Duration>) -> c_int {
    let limit = timeout.map(|t| libc::timespec {
        tv_sec: t.as_secs().min(1 << 30) as libc::time_t,
        tv_nsec: t.subsec_nanos().into(),
    });
    let limit = limit.as_ref().map_or(std::ptr::null(), std::ptr::from_ref);
    // SAFETY: pollfds of a live slice; the timespec is null or lives across the call; a null mask leaves
    // the signals as they are.
    unsafe { libc::ppoll(polls.as_mut_ptr(), polls.len() as libc::nfds_t, limit, std::ptr::null()) }
}

/// Waits until one of two descriptors is readable, at most `timeout` (`None`: without end). Whatever the
/// outcome, the callers look for themselves. False if one of them is none: somebody has closed it.
pub(crate) fn wait_either<F: AsRawFd>(first: &F, second: &F, timeout: Option<Duration>) -> bool {
    let mut polls = [first, second].map(|fd| poll_entry(fd, libc::POLLIN));
    poll_all(&mut polls, timeout);
    polls.iter().all(|entry| entry.revents & libc::POLLNVAL == 0)
}

/// poll(2): how many of these descriptors have something to say, for which this waits at most `timeout`.
/// `Ok(None)` if a signal handler ran instead.
pub(crate) fn poll(
    polls: &mut [libc::pollfd],
    timeout: Option<Duration>,
) -> io::Result<Option<usize>> {
    match check(poll_all(polls, timeout)) {
        Ok(ready) => Ok(Some(ready as usize)),
        Err(e) if e.kind() == io::ErrorKind::Interrupted => Ok(None),
        Err(e) => Err(e),
    }
}

/// Waits until `first` is readable or one of `others` has something to say, at most `timeout` (`None`:
/// without end). `Ok(true)` if a signal handler ran instead.
pub(crate) fn wait_beside(
    first: &OwnedFd,
    others: &[libc::pollfd],
    timeout: Option<Duration>,
) -> io::Result<bool> {
    let first = [poll_entry(first, libc::POLLIN)];
    let mut polls: Vec<_> = first.iter().chain(others).copied().collect();
    Ok(poll(&mut polls, timeout)?.is_none())
}

/// Waits until one of these descriptors is writable or broken. `false` if none is for so long.
pub(crate) fn wait_writable<'a>(fds: impl Iterator<Item = &'a OwnedFd>, timeout: Duration) -> bool {
    let mut polls: Vec<_> = fds.map(|fd| poll_entry(fd, libc::POLLOUT)).collect();
    poll_all(&mut polls, Some(timeout)) != 0
}

/// Waits until `fd` is readable, at most `timeout` (`None`: without end). `Ok(false)` if a signal handler ran
/// instead.
pub(crate) fn wait_readable(fd: RawFd, timeout: Option<Duration>) -> io::Result<bool> {
    let entry = libc::pollfd { fd, events: libc::POLLIN, revents: 0 };
    Ok(poll(&mut [entry], timeout)?.is_some())
}

/// Waits until `fd` is readable or broken. `false` if it is neither for so long.
pub(crate) fn wait_readable_within(fd: &impl AsRawFd, timeout: Duration) -> bool {
    poll_all(&mut [poll_entry(fd, libc::POLLIN)], Some(timeout)) > 0
}

/// Whether `fd` is readable now.
pub(crate) fn is_readable(fd: RawFd) -> bool {
    let mut poll = libc::pollfd { fd, events: libc::POLLIN, revents: 0 };
    // SAFETY: one pollfd, in a live variable.
    unsafe { libc::poll(&raw mut poll, 1, 0) == 1 && poll.revents & libc::POLLIN != 0 }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sys::QueueFd;

    #[test]
    fn every_event_wakes_a_program_that_waits_for_edges() {
        let mut queue = QueueFd::new().unwrap();
        let epoll = Epoll::new().unwrap();
        epoll.add(&queue.as_raw_fd(), libc::EPOLLIN | libc::EPOLLET, 7).unwrap();
        let mut list = ReadyList::new();
        let mut wakes = || {
            epoll.wait(&mut list, Some(Duration::ZERO)).unwrap();
            list.iter().count() == 1
        };
        assert!(!wakes());
        // As many as are queued after each change, and whether that is an edge.
        for (queued, edge) in [(1, true), (2, true), (2, false), (1, false), (3, true), (0, false)]
        {
            queue.show(queued);
            assert_eq!(wakes(), edge, "{queued}");
            assert_eq!(is_readable(queue.as_raw_fd()), queued > 0, "{queued}");
            assert!(!wakes(), "an edge is told once");
        }
    }
}
