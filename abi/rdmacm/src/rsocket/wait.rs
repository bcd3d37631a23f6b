//! Waiting: for one socket, and for many descriptors.

use std::sync::{MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use libc::{c_int, pollfd};
use quipu_cabi::Errno;
use quipu_facade::{check, engine};

use super::connection::Connection;
use super::socket::{Socket, State};
use super::spin::Spin;

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
            if state.led {
                state = self.wait_turn(state, left);
                continue;
            }
            if state.is_polled() && spin.goes_on() {
                // Others who use the socket get their turn.
                drop(state);
                state = self.lock();
                continue;
            }
            state.led = true;
            state.arm();
            let more = state.progress();
            let result = done(&mut state);
            let mut slept = Ok(0);
            if result.is_none() && !more {
                let mut fds = self.descriptors(&mut state).map(readable);
                drop(state);
                slept = sleep(&mut fds, left);
                state = self.lock();
                // Others that heard of the event may have come to the lock first.
                if std::mem::take(&mut state.left_behind) || fds[1].revents != 0 {
                    state.take_event();
                }
                spin = Spin::default();
            }
            state.led = false;
            self.turn.notify_all();
            if let Some(result) = result {
                return result;
            }
            slept?;
        }
    }

    /// Waits until a thread that waits at the descriptor has looked at what came, at most for the time left.
    fn wait_turn<'a>(
        &self,
        state: MutexGuard<'a, State>,
        left: Option<Duration>,
    ) -> MutexGuard<'a, State> {
        match left {
            None => self.turn.wait(state).unwrap_or_else(PoisonError::into_inner),
            Some(left) => {
                self.turn.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0
            }
        }
    }

    /// Takes the completion event after waiting for it, unless another thread waits, too, and will.
    pub(crate) fn woken(&self, state: &mut State) {
        self.heard(state);
        state.progress();
        self.turn.notify_all();
    }

    /// As [`woken`](Self::woken), for one that makes the progress itself.
    pub(crate) fn heard(&self, state: &mut State) {
        if state.led {
            state.left_behind = true;
        } else {
            state.take_event();
        }
    }

    /// What a thread sleeps at, inside the engine: the descriptor of connection events and that of
    /// completions; until there is a queue pair, the one that will tell of both.
    pub(super) fn descriptors(&self, state: &mut State) -> [c_int; 2] {
        state.slept_inside = true;
        // SAFETY: the identifier is this socket's, and so is its channel.
        let events = unsafe { (*(*state.id).channel).fd };
        [events, state.connection.as_ref().map_or(self.fd, Connection::descriptor)]
    }
}
