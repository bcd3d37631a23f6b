//! Waiting: for one socket, and for many descriptors.

use std::sync::MutexGuard;
use std::time::{Duration, Instant};

use libc::{c_int, pollfd};
use quipu_abi_types::RDMA_CM_EVENT_USER;
use quipu_cabi::{Errno, interrupted_call_goes_on};
use quipu_facade::{check, engine};

use super::connection::Connection;
use super::socket::{Socket, State};
use super::spin::Spin;
use crate::event::rdma_write_cm_event;

/// What waits until a descriptor is readable.
pub(crate) fn readable(fd: c_int) -> pollfd {
    pollfd { fd, events: libc::POLLIN, revents: 0 }
}

/// poll(2), for at most `limit`, in which this thread makes the engine's progress: what comes wakes it and
/// no other. How many have something to say; none when the time is over, or sooner.
///
/// # Errors
///
/// EINTR; ENODEV in a forked child.
pub(crate) fn sleep(fds: &mut [pollfd], limit: Option<Duration>) -> Result<usize, Errno> {
    let limit = limit.map_or(-1, |limit| i64::try_from(limit.as_nanos()).unwrap_or(i64::MAX));
    let (api, mut ready) = (engine()?, 0);
    // SAFETY: as many entries as there are, and a live variable.
    check(unsafe { (api.poll)(fds.as_mut_ptr(), fds.len(), limit, &mut ready) })?;
    Ok(ready)
}

/// Whether a call goes on that this has interrupted: as one of a socket of the kernel does (signal(7)), if it
/// has all the time that there is.
fn goes_on(errno: Errno, deadline: Option<Instant>) -> bool {
    errno == Errno::EINTR && deadline.is_none() && interrupted_call_goes_on()
}

impl Socket {
    /// Makes progress until `done` has an answer.
    ///
    /// # Errors
    ///
    /// EAGAIN where `patient` is false and there is none yet; EINTR.
    pub(crate) fn wait<T>(
        &self,
        patient: bool,
        done: impl FnMut(&mut State) -> Option<Result<T, Errno>>,
    ) -> Result<T, Errno> {
        self.wait_until(patient, None, done)
    }

    /// As [`wait`](Self::wait); not beyond `deadline`, if there is one.
    ///
    /// # Errors
    ///
    /// As [`wait`](Self::wait); EAGAIN also at the deadline.
    pub(crate) fn wait_until<T>(
        &self,
        patient: bool,
        deadline: Option<Instant>,
        mut done: impl FnMut(&mut State) -> Option<Result<T, Errno>>,
    ) -> Result<T, Errno> {
        let mut state = self.lock();
        let mut spin = Spin::default();
        // What can be done at once is done before there is a look at what came: that would send
        // acknowledgements alone which travel with the answer otherwise.
        if let Some(result) = done(&mut state) {
            return result;
        }
        loop {
            state.progress();
            if let Some(result) = done(&mut state) {
                return result;
            }
            let left = deadline.map(|at| at.saturating_duration_since(Instant::now()));
            if !patient || left == Some(Duration::ZERO) {
                return Err(Errno::EAGAIN);
            }
            if state.led || state.sleepers.are_called() {
                state = match self.wait_turn(state, left) {
                    Err(errno) if goes_on(errno, deadline) => self.lock(),
                    waited => waited?,
                };
                continue;
            }
            if state.is_polled() && spin.goes_on() {
                // Others who use the socket get their turn.
                drop(state);
                state = self.lock();
                continue;
            }
            state.arm();
            let more = state.progress();
            if let Some(result) = done(&mut state) {
                return result;
            }
            if more {
                continue;
            }
            state.led = true;
            let mut fds = self.lies_down(&mut state).map(readable);
            drop(state);
            let slept = sleep(&mut fds, left);
            state = self.lock();
            state.led = false;
            self.gets_up(&mut state, fds[0].revents | fds[1].revents != 0);
            match slept {
                Err(errno) if !goes_on(errno, deadline) => return Err(errno),
                _ => spin = Spin::default(),
            }
        }
    }

    /// Waits until a thread that sleeps at the descriptors is back, at most for the time left.
    ///
    /// # Errors
    ///
    /// EINTR; ENODEV in a forked child, which has no such thread.
    fn wait_turn<'a>(
        &'a self,
        mut state: MutexGuard<'a, State>,
        left: Option<Duration>,
    ) -> Result<MutexGuard<'a, State>, Errno> {
        let next = self.turn.next();
        state.waiting += 1;
        drop(state);
        let waited = self.turn.wait(next, left);
        state = self.lock();
        state.waiting -= 1;
        waited.map(|()| state)
    }

    /// As [`lock`](Self::lock), for one that is about to sleep and sleeps nowhere yet.
    ///
    /// # Errors
    ///
    /// EINTR; ENODEV in a forked child.
    pub(crate) fn lock_to_sleep(&self) -> Result<MutexGuard<'_, State>, Errno> {
        let mut state = self.lock();
        while state.sleepers.are_called() {
            state = self.wait_turn(state, None)?;
        }
        Ok(state)
    }

    /// Begins to sleep inside the engine. At what: the descriptor of connection events and that of
    /// completions; until there is a queue pair, the one that will tell of both.
    pub(super) fn lies_down(&self, state: &mut State) -> [c_int; 2] {
        state.slept_inside = true;
        state.sleepers.lies_down();
        // SAFETY: the identifier is this socket's, and so is its channel.
        let events = unsafe { (*(*state.id).channel).fd };
        [events, state.connection.as_ref().map_or(self.fd, Connection::descriptor)]
    }

    /// Is back from there; whether one of the descriptors was `readable`.
    pub(super) fn gets_up(&self, state: &mut State, readable: bool) {
        if state.sleepers.gets_up(readable) {
            state.take_event();
        }
        if !state.watchers.is_empty() && !state.sleepers.any() {
            state.disturbed = true;
            state.progress();
        }
        if state.waiting > 0 {
            self.turn.comes();
        }
    }
}

impl State {
    /// Asks to be woken by the next completion.
    pub(crate) fn arm(&mut self) {
        if let Some(connection) = &mut self.connection {
            connection.arm();
        }
    }

    /// Takes the event that has been asked for, if it has come; or leaves it to those who sleep at it.
    pub(super) fn take_event(&mut self) {
        if !self.sleepers.leave()
            && let Some(connection) = &mut self.connection
        {
            self.disturbed |= connection.take_event();
        }
    }

    /// Wakes those who sleep at the descriptors, for a change of which nothing that comes tells: by an event
    /// of the identifier that means nothing.
    pub(crate) fn ring(&mut self) {
        if self.sleepers.any() {
            // SAFETY: the identifier is this socket's.
            unsafe { rdma_write_cm_event(self.id, RDMA_CM_EVENT_USER, 0, 0) };
        }
    }

    /// A thread is about to sleep outside of the engine. Where others have slept inside, the engine may think
    /// that they still do, and that nobody has to be called. While they do, nobody has to.
    pub(crate) fn sleeps_outside(&mut self) {
        if !self.sleepers.any()
            && std::mem::take(&mut self.slept_inside)
            && let Some(connection) = &mut self.connection
        {
            while connection.ask_event() {
                self.disturbed = true;
            }
        }
    }
}
