//! Whether there is something for the program: completions in a queue, or events about connections. Whoever
//! looks or waits here leaves them to those who take them, so any number of threads may.
//!
//! Who sleeps does so behind an empty queue, of whose next completion an event has been asked for, or with
//! that event in the channel: an event stays there until the queue is empty and another is asked for, both
//! under one lock, unless nobody else sleeps. So each that comes wakes all.

use std::time::Duration;

use quipu_nic::{ChannelId, CqId};

use super::core::Core;
use super::events::For;
use super::wait::Patience;
use super::{ContextId, Engine};
use crate::error::EngineError;
use crate::lock::Guard;
use crate::sys;

impl Engine {
    /// Whether a completion queue has completions, or a context has an event about a connection. If not,
    /// makes progress on everything, as a poll does, and looks again.
    ///
    /// # Errors
    ///
    /// No such queue; [`EngineError::AdapterLost`], [`EngineError::LinkGone`] if nothing more will come.
    pub fn look(&self, cq: CqId, context: ContextId) -> Result<bool, EngineError> {
        let mut core = self.enter()?;
        self.inner.count_poll();
        if core.has_news(cq, Some(context))? {
            return Ok(true);
        }
        core.still_there()?;
        let empty_polls = core.poll();
        let any = core.has_news(cq, Some(context))?;
        drop(core);
        if !any {
            self.let_others_run(empty_polls);
        }
        Ok(any)
    }

    /// The same for a program that is about to sleep at the descriptors of the channel and of the events: if
    /// there is nothing, one of them is readable as soon as there is.
    ///
    /// # Errors
    ///
    /// As [`look`](Self::look); no such channel.
    pub fn look_and_arm(
        &self,
        cq: CqId,
        channel: ChannelId,
        context: ContextId,
    ) -> Result<bool, EngineError> {
        let mut core = self.enter()?;
        core.run_before_wait();
        if core.has_news(cq, Some(context))? {
            return Ok(true);
        }
        core.still_there()?;
        core.drain(channel)?;
        core.events.not_driven(channel);
        self.ask(core, cq, false)?;
        Ok(false)
    }

    /// Waits until a completion queue, whose channel is `channel`, has completions, or a context has an event
    /// about a connection. It returns without either after `limit`.
    ///
    /// # Errors
    ///
    /// No such queue, channel or context; [`EngineError::Interrupted`]; [`EngineError::AdapterLost`],
    /// [`EngineError::LinkGone`] if nothing more will come.
    pub fn wait_completion_or_tcp(
        &self,
        cq: CqId,
        channel: ChannelId,
        context: ContextId,
        limit: Option<Duration>,
    ) -> Result<(), EngineError> {
        match self.wait_news(cq, channel, Some(context), limit) {
            Err(EngineError::WaitOn) => Ok(()),
            waited => waited,
        }
    }

    /// Waits until a completion queue, whose channel is `channel`, has completions; or where events are held
    /// back, until it gives one.
    ///
    /// # Errors
    ///
    /// As [`wait_completion_or_tcp`](Self::wait_completion_or_tcp).
    pub fn wait_completion(&self, cq: CqId, channel: ChannelId) -> Result<(), EngineError> {
        self.wait_news(cq, channel, None, None)
    }

    /// As [`wait_completion`](Self::wait_completion), but not for longer than `limit`: then it
    /// returns without a completion.
    ///
    /// # Errors
    ///
    /// As there.
    pub fn wait_completion_within(
        &self,
        cq: CqId,
        channel: ChannelId,
        limit: Duration,
    ) -> Result<(), EngineError> {
        match self.wait_news(cq, channel, None, Some(limit)) {
            Err(EngineError::WaitOn) => Ok(()),
            waited => waited,
        }
    }

    fn wait_news(
        &self,
        cq: CqId,
        channel: ChannelId,
        context: Option<ContextId>,
        limit: Option<Duration>,
    ) -> Result<(), EngineError> {
        let mut core = self.enter()?;
        core.run_before_wait();
        if core.has_news(cq, context)? {
            return Ok(());
        }
        core.still_there()?;
        core.drain(channel)?;
        let Core { adapter, clock, .. } = &mut *core;
        adapter.req_notify_cq(clock, cq, false)?;
        core.hasten_sleep(cq);
        core.sleepers.lies_down();
        let slept = self.sleep_for_news(core, cq, channel, context, limit);
        self.enter()?.sleepers.gets_up();
        slept
    }

    /// Sleeps until there is something. This thread is one of the sleepers.
    fn sleep_for_news<'a>(
        &'a self,
        mut core: Guard<'a, Core>,
        cq: CqId,
        channel: ChannelId,
        context: Option<ContextId>,
        limit: Option<Duration>,
    ) -> Result<(), EngineError> {
        let mut patience = Patience::new(limit);
        loop {
            // One thread that serves all is not held back; a queue alone may hold its event back.
            let any = context.is_some() && core.has_news(cq, context)?;
            if any || core.events.has_completion(channel)? {
                return Ok(());
            }
            core.still_there()?;
            let left = patience.left()?;
            if core.driver {
                let fd = core.events.channel_fd(channel)?;
                let other = context.map(|context| core.events.tcp_fd(context, For::Program));
                let other = other.unwrap_or(Ok(fd))?;
                drop(core);
                sys::wait_either(&fd, &other, left);
            } else {
                let attend = |core: &mut Core| {
                    core.events.attend(channel);
                    if let Some(context) = context {
                        core.events.attend_tcp(context, For::Program);
                    }
                };
                let leave = |core: &mut Core| {
                    core.events.leave_tcp();
                    let found = core.events.has_completion(channel)?;
                    // Where nobody else sleeps, no descriptor need tell of it.
                    if !core.sleepers.others_sleep(1) {
                        core.drain(channel)?;
                    }
                    core.events.leave();
                    Ok(found.then_some(()))
                };
                if self.drive_as(core, 1, left, attend, leave)?.is_some() {
                    return Ok(());
                }
            }
            core = self.enter()?;
            core.run_before_wait();
        }
    }
}

impl Core {
    /// Whether a queue has completions, or a context has an event about a connection.
    fn has_news(&self, cq: CqId, context: Option<ContextId>) -> Result<bool, EngineError> {
        let event = context.is_some_and(|context| self.events.has_tcp(context, For::Program));
        Ok(event || self.adapter.has_completions(cq)?)
    }

    /// Takes the events of a channel, of which none is news: its queue is empty.
    fn drain(&mut self, channel: ChannelId) -> Result<(), EngineError> {
        while self.events.take_completion(channel)?.is_some() {}
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use quipu_nic::Completion;

    use super::*;
    use crate::SameHost;
    use crate::engine::tests::End;
    use crate::sys::is_readable;

    const PATIENCE: Duration = Duration::from_secs(20);

    /// Two completions at once, which are one event.
    fn complete_two(here: &End) {
        let mut core = here.engine.inner.core.lock();
        let now = core.now();
        for _ in 0..2 {
            assert!(core.adapter.complete(now, here.cq, Completion::default()));
        }
        core.settle(now);
    }

    fn take_one(here: &End) -> bool {
        here.engine.poll_cq(here.cq, &mut [Completion::default()]).unwrap() == 1
    }

    #[test]
    fn of_two_that_sleep_each_finds_one_of_two_completions() {
        let [here, _there] = End::pair(SameHost::Auto);
        for _ in 0..20 {
            std::thread::scope(|scope| {
                for _ in 0..2 {
                    scope.spawn(|| {
                        let wait =
                            || here.engine.wait_news(here.cq, here.channel, None, Some(PATIENCE));
                        loop {
                            wait().unwrap();
                            if take_one(&here) {
                                break;
                            }
                        }
                    });
                }
                let end = Instant::now() + PATIENCE;
                while !here.engine.inner.core.lock().sleepers.others_sleep(1) {
                    assert!(Instant::now() < end, "they do not sleep");
                    std::thread::yield_now();
                }
                complete_two(&here);
            });
        }
        // Who sleeps alone needs no descriptor.
        let fd = here.engine.inner.core.lock().events.channel_fd(here.channel).unwrap();
        assert!(!here.engine.inner.core.lock().sleepers.others_sleep(0));
        assert!(matches!(
            here.engine.wait_news(here.cq, here.channel, None, Some(Duration::from_millis(1))),
            Err(EngineError::WaitOn)
        ));
        assert!(!is_readable(fd));
    }

    #[test]
    fn a_descriptor_is_readable_until_the_queue_is_empty() {
        let [here, _there] = End::pair(SameHost::Auto);
        let engine = &here.engine;
        let (context, _) = engine.open_context().unwrap();
        engine.tcp_events(context).unwrap();
        let fd = engine.inner.core.lock().events.channel_fd(here.channel).unwrap();
        let looks = || engine.look_and_arm(here.cq, here.channel, context).unwrap();
        assert!(!looks() && !is_readable(fd));
        complete_two(&here);
        for _ in 0..2 {
            assert!(is_readable(fd) && looks() && is_readable(fd));
            assert!(engine.look(here.cq, context).unwrap() && take_one(&here));
        }
        assert!(is_readable(fd) && !looks() && !is_readable(fd));
    }
}
