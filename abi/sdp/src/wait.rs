//! Threads that wait for a socket. One of them polls, then sleeps in the engine, where what comes wakes
//! it directly; others wait for that one.

use std::sync::MutexGuard;
use std::time::{Duration, Instant};

use quipu_cabi::{Errno, interrupted_call_goes_on};
use quipu_host::EngineError;

use crate::socket::{Socket, State};
use crate::sys::errno_of;

/// How long a call polls before it sleeps: about what a sleep costs beyond the time slept.
const SPIN: Duration = Duration::from_micros(50);
/// The longest sleep, after which a call sees what another thread did to the socket.
const NAP: Duration = Duration::from_millis(100);

/// What a call does at a time.
pub(crate) type Step<T> = Option<Result<T, Errno>>;

impl Socket {
    /// Makes progress until `done` has a result.
    ///
    /// # Errors
    ///
    /// EAGAIN where `patient` is false and there is none yet, or after `limit`; EINTR after a signal, unless
    /// `done` says nothing of it.
    pub(crate) fn wait<T>(
        &self,
        patient: bool,
        limit: Option<Duration>,
        mut done: impl FnMut(&mut State) -> Step<T>,
    ) -> Result<T, Errno> {
        let deadline = limit.and_then(|limit| Instant::now().checked_add(limit));
        let mut state = self.lock();
        let mut spin = Spin::default();
        if let Some(result) = done(&mut state) {
            self.settle_call(&mut state);
            return result;
        }
        loop {
            if !state.led {
                state.progress();
            }
            let result = done(&mut state);
            let left = deadline.map(|at| at.saturating_duration_since(Instant::now()));
            if result.is_some() || !patient || left == Some(Duration::ZERO) {
                self.settle_call(&mut state);
                return result.unwrap_or(Err(Errno::EAGAIN));
            }
            let nap = left.map_or(NAP, |left| left.min(NAP));
            if state.led || state.link.is_none() {
                state = self.wait_change(state, Some(nap));
            } else if spin.goes_on() {
                drop(state);
                std::hint::spin_loop();
                state = self.lock();
            } else {
                let (locked, slept) = self.sleep(state, nap);
                (state, spin) = (locked, Spin::default());
                if let Err(errno) = slept {
                    self.settle_call(&mut state);
                    return done(&mut state).unwrap_or(Err(errno));
                }
            }
        }
    }

    /// A call is over: shows readiness where the program watches it, and wakes who waits.
    fn settle_call(&self, state: &mut State) {
        if let Some(link) = &mut state.link {
            link.flush();
        }
        if state.ready.is_watched() || state.waiting > 0 {
            self.settle(state);
        }
    }

    /// Sleeps in the engine until a completion comes.
    fn sleep<'a>(
        &'a self,
        mut state: MutexGuard<'a, State>,
        nap: Duration,
    ) -> (MutexGuard<'a, State>, Result<(), Errno>) {
        let Some(link) = &state.link else { return (state, Ok(())) };
        let (adapter, cq, channel) = (link.queue.adapter, link.queue.cq, link.queue.channel);
        state.led = true;
        drop(state);
        let slept = adapter.engine.wait_completion_within(cq, channel, nap);
        let mut state = self.lock();
        state.led = false;
        let slept = match slept {
            Ok(()) | Err(EngineError::WaitOn) => Ok(()),
            Err(EngineError::Interrupted) if interrupted_call_goes_on() => Ok(()),
            Err(error) => Err(errno_of(&error)),
        };
        if state.waiting > 0 {
            self.changed.notify_all();
        }
        (state, slept)
    }
}

/// The polls before one sleep.
#[derive(Default)]
struct Spin {
    until: Option<Instant>,
    polls: u32,
}

impl Spin {
    /// Whether to poll once more. The time runs from the first question on.
    fn goes_on(&mut self) -> bool {
        self.polls += 1;
        if self.polls % 16 != 1 {
            return true;
        }
        let now = Instant::now();
        now < *self.until.get_or_insert(now + SPIN)
    }
}
