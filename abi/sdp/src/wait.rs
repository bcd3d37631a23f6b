//! Threads that wait for a socket. One of them polls, then sleeps in the engine, where what comes wakes
//! it directly; others wait for that one.
//!
//! Signals are blocked while a thread polls: a handler that ran meanwhile would go unnoticed, and the
//! thread would fall asleep that the handler was to wake. So a call ends with EINTR as one of the kernel
//! does.

use std::time::{Duration, Instant};

use quipu_cabi::{Errno, interrupted_call_goes_on};
use quipu_host::EngineError;

use crate::helper;
use crate::link::Link;
use crate::socket::{Locked, Socket, State};
use crate::sys::{BlockedSignals, errno_of};

/// How long a call polls before it sleeps: about what a sleep costs beyond the time slept.
const SPIN: Duration = Duration::from_micros(50);
/// After so many polls in a row that found nothing, calls sleep at once: the peer does not run meanwhile,
/// or is slow.
const PATIENT_FAILURES: u32 = 3;
/// Of those calls, one in so many polls all the same.
const PROBE: u32 = 32;
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
        // It is dropped after the lock, since handlers run then.
        let mut spin: Option<Spin> = None;
        let mut state = self.lock();
        state.unattend();
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
                if spin.is_some() && result.is_some() {
                    state.lost_polls = 0;
                }
                self.settle_call(&mut state);
                return result.unwrap_or(Err(Errno::EAGAIN));
            }
            let nap = left.map_or(NAP, |left| left.min(NAP));
            let polls = spin.get_or_insert_with(|| Spin::new(state.poll_time()));
            let slept = if state.led || state.link.is_none() {
                state = self.wait_change(state, Some(nap));
                if !polls.signals.any_pending() {
                    continue;
                }
                drop(state);
                Err(Errno::EINTR)
            } else if polls.goes_on() {
                drop(state);
                std::hint::spin_loop();
                state = self.lock();
                continue;
            } else if polls.is_signalled {
                drop(state);
                Err(Errno::EINTR)
            } else {
                state.lost_polls = state.lost_polls.wrapping_add(1);
                self.sleep(state, nap, &mut spin)
            };
            // Handlers run here, at the latest.
            spin = None;
            let ends =
                slept.is_err() && !(slept == Err(Errno::EINTR) && interrupted_call_goes_on());
            state = self.lock();
            if ends {
                let result = done(&mut state);
                self.settle_call(&mut state);
                return result.unwrap_or(slept.and(Err(Errno::EAGAIN)));
            }
        }
    }

    /// A call is over: shows readiness where the program watches it, and wakes who waits.
    fn settle_call(&self, state: &mut State) {
        if let Some(link) = &mut state.link {
            link.flush();
        }
        if state.ready.is_attended() || state.waiting > 0 {
            self.settle(state);
        }
    }

    /// Sleeps in the engine until a completion comes. Signals end that.
    fn sleep(
        &self,
        mut state: Locked<'_>,
        nap: Duration,
        spin: &mut Option<Spin>,
    ) -> Result<(), Errno> {
        let Some(link) = &state.link else { return Ok(()) };
        let (adapter, cq, channel) = (link.queue.adapter, link.queue.cq, link.queue.channel);
        state.unattend();
        state.led = true;
        drop(state);
        *spin = None;
        let slept = adapter.engine.wait_completion_within(cq, channel, nap);
        let mut state = self.lock();
        state.led = false;
        if state.waiting > 0 {
            self.changed.notify_all();
        }
        match slept {
            Ok(()) | Err(EngineError::WaitOn) => Ok(()),
            Err(error) => Err(errno_of(&error)),
        }
    }
}

impl State {
    /// A call of the program is at the socket: the helper hears no more of what comes, unless the program
    /// waits by poll, select or epoll, too. Otherwise each completion would wake both.
    fn unattend(&mut self) {
        if std::mem::take(&mut self.attended)
            && !self.ready.was_watched()
            && let Some(link) = &self.link
        {
            helper::leave(link.queue.fd);
        }
    }

    /// How long a call polls before it sleeps: not at all where polls have found nothing for a while.
    fn poll_time(&self) -> Duration {
        if self.lost_polls >= PATIENT_FAILURES && !self.lost_polls.is_multiple_of(PROBE) {
            return Duration::ZERO;
        }
        SPIN + self.link.as_ref().map_or(Duration::ZERO, Link::read_time)
    }
}

/// The polls before one sleep.
struct Spin {
    signals: BlockedSignals,
    time: Duration,
    until: Option<Instant>,
    polls: u32,
    /// A signal has come.
    is_signalled: bool,
}

impl Spin {
    fn new(time: Duration) -> Self {
        let signals = BlockedSignals::new();
        Self { signals, time, until: None, polls: 0, is_signalled: false }
    }

    /// Whether to poll once more. The time runs from the first question on.
    fn goes_on(&mut self) -> bool {
        self.polls += 1;
        if self.polls % 16 != 1 {
            return true;
        }
        let now = Instant::now();
        self.is_signalled = self.signals.any_pending();
        !self.is_signalled && now < *self.until.get_or_insert(now + self.time)
    }
}
