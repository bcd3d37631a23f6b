//! The descriptor by which a program waits for a queue of events.

use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};

use libc::c_int;
use quipu_cabi::Hold;
use quipu_cabi::descriptors::are_hidden;

use super::wait::is_readable;
use super::{above_standard, check, descriptor_limit, move_up, with_more_descriptors};

/// The descriptor of a queue of events for a program: readable exactly while events are queued, never
/// writable, and able to send SIGIO (`O_ASYNC`), as the files of the kernel's uverbs are. Each event wakes,
/// so that a program that waits for edges (`EPOLLET`) hears of it even if earlier ones are still queued.
///
/// It is the reading end of a pipe, in which there is a byte or more for what is queued.
#[derive(Debug)]
pub(crate) struct QueueFd {
    /// What the program has.
    theirs: OwnedFd,
    /// The same end by a number of ours: the program may close its own and open something else by it, and
    /// to write where nobody can read would send SIGPIPE.
    reader: OwnedFd,
    writer: OwnedFd,
    /// Events of which it tells.
    shown: usize,
}

impl QueueFd {
    /// That of an empty queue. It blocks unless the program changes it, as programs look at that flag; its
    /// number is a low one, as programs give it to `select`, and counts against the limit of the program.
    ///
    /// # Errors
    ///
    /// The program has as many descriptors as it may have (EMFILE), or those of pipe(2).
    pub(crate) fn new() -> io::Result<Self> {
        let [theirs, writer] = with_more_descriptors(pipe)?;
        let theirs = above_standard(theirs)?;
        let (soft, _) = descriptor_limit()?;
        let is_shown = !are_hidden();
        if is_shown && u64::try_from(theirs.as_raw_fd()).is_ok_and(|fd| fd >= soft) {
            return Err(io::Error::from_raw_os_error(libc::EMFILE));
        }
        let reader = with_more_descriptors(|| move_up(theirs.try_clone()?))?;
        let writer = move_up(writer)?;
        // SAFETY: both take integers only. The flag is of the writing end alone.
        unsafe {
            check(libc::fcntl(writer.as_raw_fd(), libc::F_SETFL, libc::O_NONBLOCK))?;
            // One page is room for thousands of events. Users have a limit of such pages.
            libc::fcntl(writer.as_raw_fd(), libc::F_SETPIPE_SZ, 1);
        }
        Ok(Self { theirs, reader, writer, shown: 0 })
    }

    /// Has the descriptor tell of as many events as are queued now. It never waits.
    pub(crate) fn show(&mut self, queued: usize) {
        if queued > self.shown {
            self.wake();
        } else if queued == 0 && self.shown > 0 {
            self.clear();
        }
        self.shown = queued;
    }

    /// Wakes once more for what is queued, of which the program was told and could not take it yet.
    pub(crate) fn show_again(&self) {
        if self.shown > 0 {
            self.wake();
        }
    }

    /// Its number.
    pub(crate) fn as_raw_fd(&self) -> RawFd {
        self.theirs.as_raw_fd()
    }

    fn wake(&self) {
        let _hold = Hold::new();
        let put = || {
            // SAFETY: the kernel reads one byte from a live array.
            unsafe { libc::write(self.writer.as_raw_fd(), [1u8].as_ptr().cast(), 1) }
        };
        if put() < 0 {
            // It is full of events of which the program has taken none. One more must wake all the same.
            self.clear();
            put();
        }
    }

    /// Empties the pipe.
    fn clear(&self) {
        let _hold = Hold::new();
        let mut bytes = [0u8; 512];
        // The end may block, as the program wants it. Reading where nothing is would then wait for ever.
        while is_readable(self.reader.as_raw_fd()) {
            let room = bytes.as_mut_ptr().cast();
            // SAFETY: the kernel writes at most as many bytes as there are to a live array.
            if unsafe { libc::read(self.reader.as_raw_fd(), room, bytes.len()) } <= 0 {
                break;
            }
        }
    }
}

/// Reading and writing end of a pipe, which are closed on exec.
fn pipe() -> io::Result<[OwnedFd; 2]> {
    let mut ends: [c_int; 2] = [-1; 2];
    // SAFETY: the kernel writes two descriptors.
    check(unsafe { libc::pipe2(ends.as_mut_ptr(), libc::O_CLOEXEC) })?;
    // SAFETY: the kernel has just made them, and nobody else knows them.
    Ok(ends.map(|end| unsafe { OwnedFd::from_raw_fd(end) }))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sys::{Epoll, ReadyList, poll, poll_entry};
    use std::time::Duration;

    #[test]
    fn it_is_readable_while_something_is_queued_and_never_writable() {
        let mut queue = QueueFd::new().unwrap();
        let fd = queue.as_raw_fd();
        let ready = || {
            let mut entry = [poll_entry(&fd, libc::POLLIN | libc::POLLOUT)];
            let _ = poll(&mut entry, Some(Duration::ZERO));
            entry[0].revents
        };
        assert_eq!(ready(), 0);
        for queued in [1, 2, 1, 10_000] {
            queue.show(queued);
            assert_eq!(ready(), libc::POLLIN, "{queued}");
        }
        queue.show(0);
        assert_eq!(ready(), 0);
    }

    #[test]
    fn each_event_is_an_edge_also_when_the_pipe_is_full() {
        let mut queue = QueueFd::new().unwrap();
        let (epoll, mut list) = (Epoll::new().unwrap(), ReadyList::new());
        epoll.add(&queue.theirs, libc::EPOLLIN | libc::EPOLLET, 7).unwrap();
        for queued in 1..6000 {
            queue.show(queued);
            assert!(!epoll.wait(&mut list, Some(Duration::ZERO)).unwrap());
            assert_eq!(list.iter().count(), 1, "{queued}");
        }
    }

    #[test]
    fn a_program_that_closes_it_harms_only_itself() {
        let mut queue = QueueFd::new().unwrap();
        let [other, _writer] = pipe().unwrap();
        let number = queue.as_raw_fd();
        // SAFETY: integers only. The number is another file's from now on.
        check(unsafe { libc::dup3(other.as_raw_fd(), number, libc::O_CLOEXEC) }).unwrap();
        queue.show(1);
        queue.show(0);
        queue.show(1);
        assert!(is_readable(queue.reader.as_raw_fd()) && !is_readable(number));
    }
}
