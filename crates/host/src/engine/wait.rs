//! Waiting for events. A thread that waits for a completion event drives the engine meanwhile, so
//! that what it waits for wakes it directly, not by way of the helper.

use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::time::{Duration, Instant};

use quipu_cabi::interrupted_call_goes_on;
use quipu_fault::Call;
use quipu_nic::{AsyncEvent, ChannelId, CqId};

use super::core::{Core, HelperMode};
use super::{CompletionEvent, ContextId, Engine};
use crate::error::EngineError;
use crate::lock::Guard;
use crate::sys::{self, ReadyList, wait_either};

pub(super) fn is_non_blocking(fd: RawFd) -> bool {
    sys::status_flags(fd).is_ok_and(|flags| flags & libc::O_NONBLOCK != 0)
}

/// Waits for a descriptor, for `most` at most, or until a signal handler ran after which a read(2) goes on.
///
/// # Errors
///
/// [`EngineError::Interrupted`], or what the system says.
pub(super) fn wait_readable(fd: RawFd, most: Option<Duration>) -> Result<(), EngineError> {
    match sys::wait_readable(fd, most) {
        Ok(true) => Ok(()),
        Ok(false) if interrupted_call_goes_on() => Ok(()),
        Ok(false) => Err(EngineError::Interrupted),
        Err(error) => Err(EngineError::system("a wait", error)),
    }
}

/// poll(2) without an engine: how many of these descriptors have something to say, waiting for `most` at
/// most.
///
/// # Errors
///
/// [`EngineError::Interrupted`], or what the system says.
pub fn poll_descriptors(
    fds: &mut [libc::pollfd],
    most: Option<Duration>,
) -> Result<usize, EngineError> {
    look(fds, most)
}

/// How many of these descriptors have something to say, waiting for `most` at most.
fn look(fds: &mut [libc::pollfd], most: Option<Duration>) -> Result<usize, EngineError> {
    match sys::poll(fds, most) {
        Ok(ready) => ready.ok_or(EngineError::Interrupted),
        Err(error) => Err(EngineError::system("a wait", error)),
    }
}

/// After so many sleeps of one thread alone it is taken for the only one that sleeps.
const ALONE: u32 = 16;

/// Threads of the program that sleep in [`Engine::poll_within`], or for what `news.rs` looks for. One alone
/// makes the engine's progress itself. Of several, the one that did would leave the others without any while
/// it does something else; then the helper does that for all.
#[derive(Default)]
pub(crate) struct Sleepers {
    asleep: u32,
    /// How many sleeps ago it was of several, counted backwards.
    company: u32,
    /// Threads that wait for a descriptor because another one waits inside the engine.
    beside: u32,
}

impl Sleepers {
    /// A thread is about to sleep; whether it has been the only one of late.
    pub(super) fn lies_down(&mut self) -> bool {
        self.company = if self.asleep > 0 { ALONE } else { self.company.saturating_sub(1) };
        self.asleep += 1;
        self.company == 0
    }

    pub(super) fn gets_up(&mut self) {
        self.asleep -= 1;
    }

    /// Whether there are more than `own`.
    pub(super) fn others_sleep(&self, own: u32) -> bool {
        self.asleep > own
    }
}

/// How long a call may wait, in all its waits together.
pub(super) struct Patience {
    most: Option<Duration>,
    until: Option<Instant>,
}

impl Patience {
    /// `None`: without end.
    pub(super) fn new(most: Option<Duration>) -> Self {
        Self { most, until: None }
    }

    /// How long the next wait may last. The clock runs from the first one on.
    ///
    /// # Errors
    ///
    /// The time is over.
    pub(super) fn left(&mut self) -> Result<Option<Duration>, EngineError> {
        let Some(most) = self.most else { return Ok(None) };
        let now = Instant::now();
        // So long that no clock says when: without end.
        let Some(until) = self.until.or_else(|| now.checked_add(most)) else { return Ok(None) };
        self.until = Some(until);
        let left = until.saturating_duration_since(now);
        if left.is_zero() { Err(EngineError::WaitOn) } else { Ok(Some(left)) }
    }
}

/// Waits for events of a channel inside the engine.
fn attend(channel: ChannelId) -> impl FnOnce(&mut Core) {
    move |core| core.events.attend(channel)
}

/// Does so no longer, and takes one if there is one.
fn leave(
    channel: ChannelId,
) -> impl FnOnce(&mut Core) -> Result<Option<CompletionEvent>, EngineError> {
    move |core| {
        let event = core.events.take_completion(channel);
        core.events.leave();
        event
    }
}

impl Engine {
    /// Takes the next event of a completion channel, and waits for one unless the program has made
    /// the channel's descriptor non-blocking.
    ///
    /// # Errors
    ///
    /// [`EngineError::WouldBlock`], [`EngineError::Interrupted`], or no such channel;
    /// [`EngineError::AdapterLost`], [`EngineError::LinkGone`] if nothing more will come.
    pub fn wait_channel(&self, channel: ChannelId) -> Result<CompletionEvent, EngineError> {
        self.wait_channel_within(channel, None)
    }

    /// [`wait_channel`](Self::wait_channel), which waits for `most` at most.
    ///
    /// # Errors
    ///
    /// As there; [`EngineError::WaitOn`] if nothing has come in that time.
    pub fn wait_channel_within(
        &self,
        channel: ChannelId,
        most: Option<Duration>,
    ) -> Result<CompletionEvent, EngineError> {
        let (mut first, mut patience) = (true, Patience::new(most));
        loop {
            let mut core = self.enter()?;
            if let Some(event) = core.events.take_completion(channel)? {
                return Ok(event);
            }
            // What this thread takes at once no descriptor has to say. Another thread may wait in its place.
            let holds = !core.driver;
            if holds {
                core.events.hold(channel);
            }
            let any = core.run_before_wait();
            let event = core.events.take_completion(channel);
            if holds {
                core.events.leave();
            }
            if let Some(event) = event? {
                return Ok(event);
            }
            core.still_there()?;
            let fd = core.events.channel_fd(channel)?;
            if std::mem::take(&mut first) && is_non_blocking(fd) {
                core.events.not_driven(channel);
                return Err(EngineError::WouldBlock);
            }
            let most = patience.left()?;
            if core.driver {
                self.sleep_beside_driver(core, || wait_readable(fd, most))?;
                continue;
            }
            if any {
                core.give_way();
            } else if let Some(event) = self.drive(core, most, attend(channel), leave(channel))? {
                return Ok(event);
            }
        }
    }

    /// Takes the next event of a completion channel. If there is none, sleeps, once and for `most` at most,
    /// until there may be one or a descriptor of somebody else's is readable.
    ///
    /// # Errors
    ///
    /// No such channel; [`EngineError::AdapterLost`], [`EngineError::LinkGone`] if nothing more will come.
    pub(crate) fn wait_channel_beside(
        &self,
        channel: ChannelId,
        other: &OwnedFd,
        most: Option<Duration>,
    ) -> Result<Option<CompletionEvent>, EngineError> {
        let mut core = self.enter()?;
        let any = core.run_before_wait();
        let event = core.events.take_completion(channel)?;
        if event.is_some() {
            return Ok(event);
        }
        core.still_there()?;
        if any {
            return Ok(None);
        }
        if core.driver {
            let fd = core.events.channel_fd(channel)?;
            let wait = || {
                wait_either(&fd, &other.as_raw_fd(), most);
                Ok(())
            };
            return self.sleep_beside_driver(core, wait).map(|()| None);
        }
        let others = [sys::poll_entry(other, libc::POLLIN)];
        match self.drive_beside(core, (&others, 0), most, attend(channel), leave(channel)) {
            Err(EngineError::Interrupted) => Ok(None),
            waited => waited,
        }
    }

    /// poll(2) by a thread that makes the engine's progress meanwhile, where no other sleeps so: what comes
    /// wakes it, and not the helper first. Descriptors of channels and identifiers may be among them. How
    /// many have something to say; 0 after `most`, or sooner where something has been done.
    ///
    /// # Errors
    ///
    /// [`EngineError::Interrupted`], or what the system says.
    pub fn poll_within(
        &self,
        fds: &mut [libc::pollfd],
        most: Option<Duration>,
    ) -> Result<usize, EngineError> {
        let mut core = self.enter()?;
        core.events.drive(fds.iter().map(|entry| entry.fd));
        let alone = core.sleepers.lies_down();
        let slept = if core.driver || !alone {
            self.sleep_beside(core, fds, most)
        } else if core.run_before_wait() {
            drop(core);
            Ok(None)
        } else {
            self.drive_beside(core, (fds, 1), most, |_| (), |_| Ok(None::<usize>))
        };
        self.enter()?.sleepers.gets_up();
        // Of what came its descriptors tell by now.
        match slept {
            Ok(Some(ready)) => Ok(ready),
            slept => match look(fds, Some(Duration::ZERO))? {
                0 => slept.map(|_| 0),
                ready => Ok(ready),
            },
        }
    }

    /// Sleeps at descriptors alone: another thread makes the progress, or the helper.
    fn sleep_beside(
        &self,
        core: Guard<'_, Core>,
        fds: &mut [libc::pollfd],
        most: Option<Duration>,
    ) -> Result<Option<usize>, EngineError> {
        self.inner.note_asked();
        let call = !core.driver && core.helper == HelperMode::Dozing;
        drop(core);
        if call {
            self.inner.helper.call();
        }
        look(fds, most).map(Some)
    }

    /// Waits for a descriptor while another thread waits inside the engine.
    pub(super) fn sleep_beside_driver(
        &self,
        mut core: Guard<'_, Core>,
        wait: impl FnOnce() -> Result<(), EngineError>,
    ) -> Result<(), EngineError> {
        core.sleepers.beside += 1;
        drop(core);
        let waited = wait();
        self.enter()?.sleepers.beside -= 1;
        waited
    }

    /// Waits for descriptors on behalf of the whole engine, once, for `most` at most, or until a signal
    /// handler ran after which a read(2) goes on. `attend` says what for, `leave` takes what has come.
    pub(super) fn drive<T>(
        &self,
        core: Guard<'_, Core>,
        most: Option<Duration>,
        attend: impl FnOnce(&mut Core),
        leave: impl FnOnce(&mut Core) -> Result<Option<T>, EngineError>,
    ) -> Result<Option<T>, EngineError> {
        self.drive_as(core, 0, most, attend, leave)
    }

    /// The same. `own` is how many of the [`Sleepers`] this thread is.
    pub(super) fn drive_as<T>(
        &self,
        core: Guard<'_, Core>,
        own: u32,
        most: Option<Duration>,
        attend: impl FnOnce(&mut Core),
        leave: impl FnOnce(&mut Core) -> Result<Option<T>, EngineError>,
    ) -> Result<Option<T>, EngineError> {
        match self.drive_beside(core, (&[], own), most, attend, leave) {
            Err(EngineError::Interrupted) if interrupted_call_goes_on() => Ok(None),
            waited => waited,
        }
    }

    /// The same, or until one of these descriptors of somebody else's has something to say.
    fn drive_beside<T>(
        &self,
        mut core: Guard<'_, Core>,
        (others, own): (&[libc::pollfd], u32),
        most: Option<Duration>,
        attend: impl FnOnce(&mut Core),
        leave: impl FnOnce(&mut Core) -> Result<Option<T>, EngineError>,
    ) -> Result<Option<T>, EngineError> {
        #[cfg(test)]
        if let Some(step) = tests::BEFORE_ARMING.take() {
            step();
        }
        let limit = core.prepare_wait();
        if limit.is_some() {
            core.driver = true;
            core.drives += 1;
            attend(&mut core);
        }
        // The helper's wait is over in either case: where there is something to do nobody rings any more.
        let armed = core.helper == HelperMode::Armed;
        drop(core);
        if armed {
            self.inner.helper.call_off();
        }
        let Some(limit) = limit else { return Ok(None) };

        let mut ready = ReadyList::new();
        let limit = [limit, most].into_iter().flatten().min();
        let epoll = &self.inner.epoll;
        let waited = if others.is_empty() {
            epoll.wait(&mut ready, limit)
        } else {
            let waited = sys::wait_beside(epoll.fd(), others, limit);
            // The set and the list are valid, so this cannot fail.
            let _ = epoll.wait(&mut ready, Some(Duration::ZERO));
            waited
        };

        let mut core = self.enter()?;
        core.driver = false;
        core.finish_wait(&ready);
        let event = leave(&mut core);
        // Where another process does the work the helper dozes for long.
        let left = core.sleepers.others_sleep(own)
            || (core.sleepers.beside > 0 && core.attached.is_some());
        let call =
            (left && core.helper == HelperMode::Dozing) || core.helper == HelperMode::Resting;
        drop(core);
        if call {
            self.inner.helper.call();
        }
        match (event?, waited) {
            (Some(event), _) => Ok(Some(event)),
            (None, Ok(false)) => Ok(None),
            (None, Ok(true)) => Err(EngineError::Interrupted),
            (None, Err(error)) => Err(EngineError::system("a wait", error)),
        }
    }

    /// Takes the next asynchronous event of a context, and waits for one unless the program has
    /// made the context's descriptor non-blocking.
    ///
    /// # Errors
    ///
    /// [`EngineError::WouldBlock`], [`EngineError::Interrupted`], or no such context.
    pub fn wait_async(&self, context: ContextId) -> Result<AsyncEvent, EngineError> {
        self.wait_async_within(context, None)
    }

    /// [`wait_async`](Self::wait_async), which waits for `most` at most.
    ///
    /// # Errors
    ///
    /// As there; [`EngineError::WaitOn`] if nothing has come in that time.
    pub fn wait_async_within(
        &self,
        context: ContextId,
        most: Option<Duration>,
    ) -> Result<AsyncEvent, EngineError> {
        let mut patience = Patience::new(most);
        loop {
            let mut core = self.enter()?;
            if let Some(event) = core.events.take_asynchronous(context)? {
                return Ok(event);
            }
            let fd = core.events.context_fd(context)?;
            // Where another process does the work it dozes for long.
            let dozes = core.attached.is_some() && core.helper == HelperMode::Dozing;
            drop(core);
            if is_non_blocking(fd) {
                return Err(EngineError::WouldBlock);
            }
            if dozes {
                self.inner.helper.call();
            }
            wait_readable(fd, patience.left()?)?;
        }
    }

    /// Asks for one event at the next completion of a queue (or the next solicited or failed one).
    /// From now on progress does not depend on the program's polling.
    ///
    /// # Errors
    ///
    /// No such queue.
    pub fn req_notify_cq(&self, cq: CqId, solicited_only: bool) -> Result<(), EngineError> {
        let core = self.enter_for_cq(Call::ReqNotifyCq, cq)?;
        self.ask(core, cq, solicited_only)
    }

    /// The same under the lock, which it gives up.
    pub(super) fn ask(
        &self,
        mut core: Guard<'_, Core>,
        cq: CqId,
        solicited_only: bool,
    ) -> Result<(), EngineError> {
        let alarm = core.adapter.poll_timeout();
        let Core { adapter, clock, .. } = &mut *core;
        adapter.req_notify_cq(clock, cq, solicited_only)?;
        core.hasten_sleep(cq);
        // What is there already gives the event at once, or, where events are held back, in a while.
        let gives = core.adapter.has_events() || core.adapter.poll_timeout() != alarm;
        core.collect_events();
        if gives {
            core.call_waiter();
        }
        // A program that sleeps on the descriptor itself needs the helper to watch for it, and at
        // once; one that waits inside the engine does not.
        let outside = core.events.waits_outside(cq);
        if outside {
            self.inner.note_asked();
        }
        let call = core.helper == HelperMode::Dozing && outside;
        drop(core);
        if call {
            self.inner.helper.call();
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests;
