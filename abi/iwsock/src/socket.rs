//! One socket in the mode.

use std::collections::VecDeque;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use libc::{c_int, c_short};
use quipu_cabi::Errno;
use quipu_iwsock::{
    Completion, Config, Endpoint, Failure, MAX_POSTED, Operation, Piece, PostError, Span,
};

use crate::sys::{self, Moved, Process};
use crate::{counters, thread};

/// How the parts of a message get to TCP.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Gather {
    Copy,
    Writev,
    Cork,
}

/// In the number of a work: it is of write(2), with a copy of the program's bytes.
const OWN: u64 = 1 << 63;
/// Longest message of write(2).
const MAX_MESSAGE: usize = 64 * 1024;
/// Bytes of write(2) that are copied and not sent.
const MAX_COPIED: usize = 256 * 1024;
/// For how long close(2) waits until everything is sent.
const LINGER: Duration = Duration::from_secs(5);

/// A socket in the mode.
pub(crate) struct Socket {
    /// The TCP connection.
    tcp: c_int,
    gather: Gather,
    /// For progress by the thread: the end of a pair whose other end is the program's descriptor.
    bell: Option<c_int>,
    inner: Mutex<Inner>,
    changed: Condvar,
}

pub(crate) struct Inner {
    pub(crate) endpoint: Endpoint,
    /// Completions of works other than those of write(2).
    done: VecDeque<Completion>,
    /// Bytes of write(2) that are not sent: the number of the work, and the bytes.
    copies: VecDeque<(u64, Box<[u8]>)>,
    copied: usize,
    next: u64,
    /// The bell has a byte.
    rings: bool,
    /// The descriptors are, or are about to be, another's.
    is_closed: bool,
}

impl Socket {
    /// Over a connected socket. `bell` is for progress by the thread.
    pub(crate) fn new(tcp: c_int, config: Config, gather: Gather, bell: Option<c_int>) -> Self {
        let endpoint = Endpoint::new(config);
        let (done, copies) = (VecDeque::new(), VecDeque::new());
        let (rings, is_closed) = (false, false);
        let inner = Inner { endpoint, done, copies, copied: 0, next: 0, rings, is_closed };
        Self { tcp, gather, bell, inner: Mutex::new(inner), changed: Condvar::new() }
    }

    /// The descriptor of its TCP connection.
    pub(crate) fn tcp(&self) -> c_int {
        self.tcp
    }

    fn has_thread(&self) -> bool {
        self.bell.is_some()
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Sends and receives what is possible without waiting.
    fn advance(&self, inner: &mut Inner) {
        while !inner.is_closed {
            inner.endpoint.prepare(&Process);
            let sent = self.send(inner);
            let received = self.receive(inner);
            inner.sort();
            if !sent && !received {
                return;
            }
        }
    }

    fn send(&self, inner: &mut Inner) -> bool {
        if !inner.endpoint.has_outgoing() {
            return false;
        }
        let corks = self.gather == Gather::Cork;
        let cork = |on| sys::set_option(self.tcp, libc::IPPROTO_TCP, libc::TCP_CORK, on);
        if corks {
            cork(1);
        }
        let mut some = false;
        while inner.endpoint.has_outgoing() {
            let (pieces, used) = inner.endpoint.outgoing();
            match sys::send(self.tcp, pieces, used, !corks) {
                Moved::Bytes(len) => inner.endpoint.sent(len),
                Moved::Later => break,
                Moved::Over => {
                    // A Terminate that says why may have come before.
                    while self.receive(inner) {}
                    inner.endpoint.ended();
                    break;
                }
            }
            some = true;
            if !corks {
                inner.endpoint.prepare(&Process);
            }
        }
        if corks {
            cork(0);
        }
        some
    }

    fn receive(&self, inner: &mut Inner) -> bool {
        let space = inner.endpoint.space();
        if space.is_empty() {
            return false;
        }
        match sys::receive(self.tcp, space) {
            Moved::Bytes(len) => {
                inner.endpoint.received(&mut Process, len);
                true
            }
            Moved::Later => false,
            Moved::Over => {
                inner.endpoint.ended();
                false
            }
        }
    }

    /// The events for which progress waits.
    fn awaits(inner: &mut Inner) -> c_short {
        let takes = !inner.endpoint.space().is_empty();
        let sends = inner.endpoint.has_outgoing();
        (if takes { libc::POLLIN } else { 0 }) | (if sends { libc::POLLOUT } else { 0 })
    }

    /// The thread's turn. The events that it is to wait for.
    pub(crate) fn advance_by_thread(&self) -> c_short {
        let mut inner = self.lock();
        self.advance(&mut inner);
        self.ring(&mut inner);
        self.changed.notify_all();
        if inner.endpoint.is_open().is_err() { 0 } else { Self::awaits(&mut inner) }
    }

    /// Has the program's descriptor be readable exactly while there is something to report.
    fn ring(&self, inner: &mut Inner) {
        let Some(bell) = self.bell else { return };
        let news = inner.has_news();
        if news && !inner.rings {
            let byte = [Piece::Bytes(vec![1])];
            inner.rings = matches!(sys::send(bell, byte.iter(), 0, true), Moved::Bytes(_));
        }
    }

    /// Takes the byte out of the program's descriptor, if there is nothing to report any more.
    fn hush(&self, inner: &mut Inner, fd: c_int) {
        if inner.rings && !inner.has_news() {
            let mut byte = [0; 8];
            sys::receive(fd, &mut byte);
            inner.rings = false;
        }
    }

    /// Lets what was posted be sent.
    fn push(&self, inner: &mut Inner) {
        if self.has_thread() {
            thread::wake();
        } else {
            self.advance(inner);
        }
    }

    /// Waits until `ready` gives something, or the time is over, making progress.
    fn wait_until<T>(
        &self,
        deadline: Option<Instant>,
        mut ready: impl FnMut(&mut Inner) -> Option<T>,
    ) -> Option<T> {
        let mut inner = self.lock();
        loop {
            if !self.has_thread() {
                self.advance(&mut inner);
            }
            if let Some(result) = ready(&mut inner) {
                return Some(result);
            }
            let left = sys::left(deadline);
            if left.is_some_and(|left| left.is_zero()) {
                return None;
            }
            if self.has_thread() {
                let time = left.unwrap_or(Duration::from_secs(3600));
                let waited = self.changed.wait_timeout(inner, time);
                inner = waited.unwrap_or_else(PoisonError::into_inner).0;
                continue;
            }
            let events = Self::awaits(&mut inner);
            drop(inner);
            if !sys::wait(self.tcp, events, left) && sys::errno() == libc::EINTR {
                return None;
            }
            inner = self.lock();
        }
    }

    /// Waits until start-up is over.
    pub(crate) fn start(&self, timeout: Duration) -> Result<(), Errno> {
        let deadline = Some(Instant::now() + timeout);
        let opened = |inner: &mut Inner| match inner.endpoint.is_open() {
            Ok(false) => None,
            Ok(true) if inner.endpoint.has_outgoing() => None,
            other => Some(other),
        };
        match self.wait_until(deadline, opened) {
            Some(Ok(_)) => Ok(()),
            Some(Err(_)) => Err(Errno(libc::EPROTO)),
            None => Err(Errno::ETIMEDOUT),
        }
    }

    /// Calls a function with the endpoint, then lets what was posted be sent.
    pub(crate) fn with<T>(&self, work: impl FnOnce(&mut Endpoint) -> T) -> T {
        let mut inner = self.lock();
        let result = work(&mut inner.endpoint);
        self.push(&mut inner);
        result
    }

    /// Posts a send, a write or a read.
    pub(crate) fn post(&self, id: u64, what: Operation, spans: &[Span]) -> Result<(), Errno> {
        let mut inner = self.lock();
        if inner.done.len() >= MAX_POSTED {
            return Err(Errno::EAGAIN);
        }
        let posted = inner.endpoint.post(id & !OWN, what, spans);
        posted.map_err(|error| refused(error, &inner))?;
        self.push(&mut inner);
        Ok(())
    }

    /// Posts a receive.
    pub(crate) fn post_receive(&self, id: u64, spans: &[Span]) -> Result<(), Errno> {
        let mut inner = self.lock();
        let posted = inner.endpoint.post_receive(&mut Process, id, spans);
        posted.map_err(|error| refused(error, &inner))?;
        self.push(&mut inner);
        // A message that had come may be complete now.
        self.ring(&mut inner);
        self.changed.notify_all();
        Ok(())
    }

    /// Takes completions, waiting for the first.
    pub(crate) fn take(
        &self,
        fd: c_int,
        receives: bool,
        room: usize,
        timeout_ms: c_int,
    ) -> Result<Vec<Completion>, Errno> {
        let deadline = sys::deadline(timeout_ms);
        let taken = self.wait_until(deadline, |inner| {
            let taken: Vec<Completion> = if receives {
                let next = || inner.endpoint.poll_receive().inspect(counters::note_complete);
                std::iter::from_fn(next).take(room).collect()
            } else {
                let count = room.min(inner.done.len());
                inner.done.drain(..count).collect()
            };
            if !taken.is_empty() {
                return Some(Ok(taken));
            }
            inner.endpoint.is_open().err().map(|failure| Err(errno_of(failure)))
        });
        self.hush(&mut self.lock(), fd);
        taken.unwrap_or(Ok(Vec::new()))
    }

    /// write(2): the bytes become messages.
    pub(crate) fn write(&self, bytes: &[u8], waits: bool) -> Result<usize, Errno> {
        let mut done = 0;
        while done < bytes.len() {
            let room = |inner: &mut Inner| match inner.endpoint.is_open() {
                Err(_) => Some(Err(Errno(libc::EPIPE))),
                Ok(_) => (inner.copied < MAX_COPIED).then_some(Ok(())),
            };
            let deadline = if waits { None } else { Some(Instant::now()) };
            match self.wait_until(deadline, room) {
                Some(Ok(())) => {}
                _ if done > 0 => return Ok(done),
                Some(Err(errno)) => return Err(errno),
                None => return Err(if waits { Errno::EINTR } else { Errno::EAGAIN }),
            }
            let len = (bytes.len() - done).min(MAX_MESSAGE);
            let copy: Box<[u8]> = bytes[done..done + len].into();
            let mut inner = self.lock();
            let id = OWN | inner.next;
            inner.next = (inner.next + 1) & !OWN;
            let span = Span { address: copy.as_ptr().expose_provenance() as u64, len };
            let posted = inner.endpoint.post(id, Operation::Send, &[span]);
            if let Err(error) = posted {
                let errno = refused(error, &inner);
                return if done > 0 { Ok(done) } else { Err(errno) };
            }
            inner.copied += len;
            inner.copies.push_back((id, copy));
            self.push(&mut inner);
            done += len;
        }
        Ok(done)
    }

    /// read(2): messages for which no receive was posted, as a stream. 0 at its end.
    pub(crate) fn read(&self, fd: c_int, into: &mut [u8], waits: bool) -> Result<usize, Errno> {
        let deadline = if waits { None } else { Some(Instant::now()) };
        let read = self.wait_until(deadline, |inner| inner.endpoint.read(&mut Process, into));
        let mut inner = self.lock();
        self.hush(&mut inner, fd);
        self.push(&mut inner);
        read.ok_or(if waits { Errno::EINTR } else { Errno::EAGAIN })
    }

    /// Waits until everything that was posted is sent, and ends the connection.
    pub(crate) fn close(&self) {
        let deadline = Some(Instant::now() + LINGER);
        self.wait_until(deadline, |inner| {
            let is_busy = inner.endpoint.has_outgoing() && inner.endpoint.is_open().is_ok();
            (!is_busy).then_some(())
        });
        let mut inner = self.lock();
        inner.is_closed = true;
        inner.endpoint.ended();
        drop(inner);
        self.changed.notify_all();
        if let Some(bell) = self.bell {
            thread::remove(self.tcp);
            for fd in [self.tcp, bell] {
                // SAFETY: descriptors of this socket, which nothing uses any more.
                unsafe { libc::syscall(libc::SYS_close, fd) };
            }
        }
    }
}

impl Inner {
    /// Keeps completions of the program's works, and drops the copies of write(2) that are sent.
    fn sort(&mut self) {
        while let Some(completion) = self.endpoint.poll_send() {
            counters::note_complete(&completion);
            if completion.id & OWN == 0 {
                self.done.push_back(completion);
                continue;
            }
            if let Some((_, copy)) = self.copies.pop_front() {
                self.copied -= copy.len();
            }
        }
    }

    fn has_news(&self) -> bool {
        !self.done.is_empty() || self.endpoint.has_news()
    }
}

fn refused(error: PostError, inner: &Inner) -> Errno {
    match error {
        PostError::Full => Errno::EAGAIN,
        PostError::TooLarge => Errno(libc::EMSGSIZE),
        PostError::NotRegistered => Errno::EFAULT,
        PostError::Over => inner.endpoint.is_open().err().map_or(Errno::ENOTCONN, errno_of),
    }
}

fn errno_of(failure: Failure) -> Errno {
    match failure {
        Failure::Ended => Errno(libc::ECONNRESET),
        Failure::Refused | Failure::Protocol => Errno(libc::EPROTO),
        Failure::Terminated(_) => Errno(libc::EREMOTEIO),
    }
}
