//! Sending and receiving.

use std::sync::Arc;
use std::time::Duration;

use libc::{c_int, iovec};
use quipu_cabi::Errno;
use quipu_sdp::{Readable, Way};

use crate::socket::{Direction, KERNELS, Patience, Socket, State};
use crate::wait::Step;

/// Most bytes that one advertised buffer has.
const MOST_ADVERTISED: usize = 8 << 20;
/// A reader with less room than this, and less than there is, has the rest sent through buffers.
const LEAST_READ: usize = 2048;

/// The program's buffers.
///
/// # Safety
///
/// The program passes a list of that length.
pub(crate) unsafe fn pieces<'a>(list: *const iovec, count: usize) -> Result<&'a [iovec], Errno> {
    if count == 0 {
        return Ok(&[]);
    }
    if count > 1024 || list.is_null() {
        return Err(Errno::EINVAL);
    }
    // SAFETY: passed on from the caller.
    Ok(unsafe { std::slice::from_raw_parts(list, count) })
}

/// The bytes of a piece.
fn bytes(piece: &iovec) -> &[u8] {
    if piece.iov_base.is_null() {
        return &[];
    }
    // SAFETY: the program lends its buffer for the call. (If it changes it meanwhile, so does what is sent.)
    unsafe { std::slice::from_raw_parts(piece.iov_base.cast(), piece.iov_len) }
}

/// The room of a piece.
#[allow(clippy::mut_from_ref)]
fn room(piece: &iovec) -> &mut [u8] {
    if piece.iov_base.is_null() {
        return &mut [];
    }
    // SAFETY: the program lends its buffer for the call, which is the only one to write there.
    unsafe { std::slice::from_raw_parts_mut(piece.iov_base.cast(), piece.iov_len) }
}

/// The place `done` bytes into a list: a piece, and how far into it.
fn place(list: &[iovec], mut done: usize) -> Option<(usize, usize)> {
    for (index, piece) in list.iter().enumerate() {
        if done < piece.iov_len {
            return Some((index, done));
        }
        done -= piece.iov_len;
    }
    None
}

/// Where a call that sends is.
struct Sending<'a> {
    list: &'a [iovec],
    done: usize,
    urgent: bool,
    /// Bytes above which a piece is advertised; 0: none is.
    threshold: usize,
    /// Bytes of this call that are advertised.
    advertised: Option<usize>,
}

impl Sending<'_> {
    fn step(&mut self, state: &mut State) -> Step<()> {
        let link = match state.connected() {
            Ok(link) => link,
            Err(Errno::EAGAIN) => return None,
            Err(errno) => return Some(Err(errno)),
        };
        if let Some(len) = self.advertised {
            let taken = link.take_source_end()?;
            self.advertised = None;
            self.done += taken;
            if taken < len {
                // What the peer does not read goes through buffers.
                self.threshold = 0;
            }
        }
        loop {
            if link.connection.has_shut_write() || link.failure().is_some() {
                return Some(Err(Errno(libc::EPIPE)));
            }
            let Some((index, at)) = place(self.list, self.done) else { return Some(Ok(())) };
            let rest = &bytes(&self.list[index])[at..];
            if self.threshold > 0 && rest.len() >= self.threshold {
                let part = &rest[..rest.len().min(MOST_ADVERTISED)];
                if link.advertise(part) {
                    self.advertised = Some(part.len());
                    return None;
                }
            }
            let is_last = index + 1 == self.list.len();
            let sent = link.send(rest, self.urgent && is_last);
            self.done += sent;
            if sent < rest.len() {
                return None;
            }
        }
    }
}

impl State {
    /// From how many bytes on a piece of this list goes without a copy; 0: none does.
    fn zero_copy_threshold(&mut self, list: &[iovec]) -> usize {
        let threshold = self.options.zero_copy_threshold;
        if threshold == 0 || !self.options.chooses {
            return threshold;
        }
        let long = list.iter().map(|piece| piece.iov_len).filter(|&len| len >= threshold);
        let (len, Some(link)) = (long.sum::<usize>(), &self.link) else { return threshold };
        if len == 0 {
            return threshold;
        }
        match self.choice.next(link.queue.adapter.now(), len as u64) {
            Way::Advertised => threshold,
            Way::Buffered => 0,
        }
    }
}

impl Socket {
    /// As send(2), of a list of buffers, for the program.
    ///
    /// # Errors
    ///
    /// [`KERNELS`], in addition to those of send(2).
    pub(crate) fn send(&self, list: &[iovec], flags: c_int) -> Result<usize, Errno> {
        let _call = self.call(Direction::Out)?;
        self.send_now(list, flags, None)
    }

    /// As send(2), also where the socket is relayed. `patience`: none for that of the program.
    pub(crate) fn send_now(
        &self,
        list: &[iovec],
        flags: c_int,
        patience: Option<Patience>,
    ) -> Result<usize, Errno> {
        let urgent = flags & libc::MSG_OOB != 0;
        let (patient, limit, threshold) = {
            let mut state = self.lock();
            let programs = || (self.is_patient(flags), state.options.send_timeout);
            let (patient, limit) = patience.unwrap_or_else(programs);
            let may = patient && !urgent;
            (patient, limit, if may { state.zero_copy_threshold(list) } else { 0 })
        };
        let mut sending = Sending { list, done: 0, urgent, threshold, advertised: None };
        let mut result = self.wait(patient, limit, |state| sending.step(state));
        if sending.advertised.is_some() {
            // The program may use its buffer again only when the peer reads no more of it.
            self.take_back(&mut sending);
            if result == Err(Errno::EAGAIN) {
                // Buffers take as much of the rest as they can. When they are full, a call has sent nothing.
                sending.threshold = 0;
                result = self.wait(false, None, |state| sending.step(state));
            }
        }
        match result {
            Err(Errno(libc::EPIPE)) if sending.done == 0 => {
                let failure = self.lock().link.as_ref().and_then(|link| link.failure());
                if flags & libc::MSG_NOSIGNAL == 0 {
                    // SAFETY: raise(3) of a signal, as the kernel does it.
                    unsafe { libc::raise(libc::SIGPIPE) };
                }
                Err(failure
                    .filter(|errno| *errno == Errno::ETIMEDOUT)
                    .unwrap_or(Errno(libc::EPIPE)))
            }
            Err(errno) if sending.done == 0 => Err(errno),
            _ => Ok(sending.done),
        }
    }

    /// Takes an advertised buffer back. The protocol bounds how long that lasts.
    fn take_back(&self, sending: &mut Sending<'_>) {
        self.lock().connected().map(|link| link.connection.cancel_source()).ok();
        let taken = loop {
            let waited = self.wait(true, None, |state| match state.connected() {
                Ok(link) => link.take_source_end().map(Ok),
                Err(_) => Some(Ok(0)),
            });
            match waited {
                Ok(taken) => break taken,
                // Another signal; or the engine is lost, and with it the peer's access.
                Err(Errno::EINTR) => {}
                Err(_) => break 0,
            }
        };
        sending.advertised = None;
        sending.done += taken;
    }

    /// As recv(2), into a list of buffers, for the program.
    ///
    /// # Errors
    ///
    /// [`KERNELS`], in addition to those of recv(2).
    pub(crate) fn receive(&self, list: &[iovec], flags: c_int) -> Result<usize, Errno> {
        let _call = self.call(Direction::In)?;
        self.receive_while(list, flags, None, || !self.is_relayed())
    }

    /// The same as long as something holds; then it ends with [`KERNELS`], unless it has octets. `patience`:
    /// none for that of the program.
    pub(crate) fn receive_while(
        &self,
        list: &[iovec],
        flags: c_int,
        patience: Option<Patience>,
        holds: impl Fn() -> bool,
    ) -> Result<usize, Errno> {
        if flags & libc::MSG_OOB != 0 {
            return self.receive_urgent(list, flags);
        }
        if flags & libc::MSG_ERRQUEUE != 0 {
            return Err(Errno::EAGAIN);
        }
        let wanted: usize = list.iter().map(|piece| piece.iov_len).sum();
        let (peek, all) = (flags & libc::MSG_PEEK != 0, flags & libc::MSG_WAITALL != 0);
        let least = if all { wanted } else { wanted.min(1) };
        let programs = || (self.is_patient(flags), self.lock().options.receive_timeout);
        let (patient, limit) = patience.unwrap_or_else(programs);
        let mut done = 0;
        let mut is_reading = false;
        let result = self.wait(patient, limit, |state| {
            if peek {
                done = 0;
            }
            if done == 0 && !is_reading && !holds() {
                return Some(Err(KERNELS));
            }
            step(state, list, &mut done, &mut is_reading, (least, peek))
        });
        if is_reading {
            self.finish_read(&mut done);
        }
        match result {
            Err(errno) if done == 0 => Err(errno),
            _ => Ok(done),
        }
    }

    /// Waits for the end of a read into the program's buffer. The queue pair bounds how long that lasts.
    fn finish_read(&self, done: &mut usize) {
        let read = loop {
            let waited = self.wait(true, None, |state| match state.connected() {
                Ok(link) => link.take_read().map(Ok),
                Err(_) => Some(Ok(0)),
            });
            match waited {
                Ok(read) => break read,
                Err(Errno::EINTR) => {}
                Err(_) => break 0,
            }
        };
        *done += read;
    }

    fn receive_urgent(&self, list: &[iovec], flags: c_int) -> Result<usize, Errno> {
        let peek = flags & libc::MSG_PEEK != 0;
        let mut state = self.lock();
        self.settle(&mut state);
        let link = state.connected()?;
        // As tcp(7): it is on its way, or there is none.
        let none = if link.connection.is_urgent_due() { Errno::EAGAIN } else { Errno::EINVAL };
        let byte = link.connection.urgent(peek).ok_or(none)?;
        let Some((index, _)) = place(list, 0) else { return Ok(0) };
        room(&list[index])[0] = byte;
        state.show();
        Ok(1)
    }

    /// How long a call may wait, as a number of bytes for FIONREAD.
    pub(crate) fn unread(&self) -> usize {
        let mut state = self.lock();
        self.settle(&mut state);
        state.connected().map_or(0, |link| link.connection.unread() as usize)
    }

    /// As shutdown(2).
    pub(crate) fn shut_down(self: &Arc<Self>, how: c_int) -> Result<(), Errno> {
        if !(libc::SHUT_RD..=libc::SHUT_RDWR).contains(&how) {
            return Err(Errno::EINVAL);
        }
        let mut state = self.lock();
        if state.phase == crate::socket::Phase::Listening {
            return Ok(());
        }
        let link = state.connected().map_err(|_| Errno::ENOTCONN)?;
        if how != libc::SHUT_RD {
            link.shut_write();
        }
        state.shut_read |= how != libc::SHUT_WR;
        self.settle(&mut state);
        Ok(())
    }
}

/// What a call that receives does at a time.
fn step(
    state: &mut State,
    list: &[iovec],
    done: &mut usize,
    is_reading: &mut bool,
    (least, peek): (usize, bool),
) -> Step<()> {
    if state.shut_read && !*is_reading {
        return Some(Ok(()));
    }
    let link = match state.connected() {
        Ok(link) => link,
        Err(Errno::EAGAIN) => return None,
        Err(errno) => return Some(Err(errno)),
    };
    if *is_reading {
        *done += link.take_read()?;
        *is_reading = false;
    }
    while let Some((index, at)) = place(list, *done) {
        let out = &mut room(&list[index])[at..];
        let got = if peek { peek_at(link, out, *done) } else { link.take(out) };
        *done += got;
        if got == out.len() && !peek {
            continue;
        }
        if let Readable::Remote(rest) = link.connection.readable() {
            let out = &mut out[got..];
            let is_small = out.len() < LEAST_READ && (out.len() as u64) < u64::from(rest.len);
            if !out.is_empty() && !is_small && !peek && link.begin_read(out) {
                *is_reading = true;
                // On one host it is done by now.
                link.progress();
                *done += link.take_read()?;
                *is_reading = false;
                continue;
            }
            if *done < least {
                link.connection.refuse_sink();
                link.flush();
            }
        }
        break;
    }
    if *done >= least || *done > 0 && link.connection.is_at_mark() {
        return Some(Ok(()));
    }
    if link.connection.readable() == Readable::End {
        return Some(Ok(()));
    }
    link.failure().map(Err)
}

/// Peeks into the first buffer only.
fn peek_at(link: &crate::link::Link, out: &mut [u8], done: usize) -> usize {
    if done == 0 { link.peek(out) } else { 0 }
}

/// The time of a `SO_RCVTIMEO`: none for ever.
pub(crate) fn timeout_of(time: libc::timeval) -> Option<Duration> {
    let time = Duration::new(time.tv_sec.max(0) as u64, 0)
        + Duration::from_micros(time.tv_usec.max(0) as u64);
    (!time.is_zero()).then_some(time)
}
