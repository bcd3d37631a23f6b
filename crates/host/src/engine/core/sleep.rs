//! Waiting for descriptors on behalf of the engine, and waking the thread that waits.

use std::time::Duration;

use quipu_nic::Time;

use super::{Core, earliest};
use crate::sys::ReadyList;

impl Core {
    /// Gets ready to wait for descriptors, after [`run`](Self::run) has found nothing: how long at
    /// most. `None` if there is something to do after all.
    pub(crate) fn prepare_wait(&mut self) -> Option<Option<Duration>> {
        let now = self.clock.now();
        let watched = self.net.watch_all(&mut self.adapter, now);
        let armed = watched && !self.net.wants_turn() && self.adapter.arm();
        let Some(batch) = armed.then(|| self.arm_for_sleep(now)).flatten() else {
            self.stop_waiting();
            return None;
        };
        self.settle(now);
        self.watch_sleep();
        self.publish(now);
        let deadline = earliest([self.deadline(), self.news_due(), batch]);
        self.wakes_at = Some(deadline.unwrap_or(Time(u64::MAX)));
        self.polls_beside_waiter = 0;
        Some(deadline.map(|at| Duration::from_nanos(at.since(now))))
    }

    /// After the wait: handles what it found.
    pub(crate) fn finish_wait(&mut self, ready: &ReadyList) {
        let mut any = self.wake_attached();
        self.stop_waiting();
        let now = self.clock.now();
        any |= self.dispatch(now, ready) | self.adapter.progress(now);
        any |= self.poll_attached(now);
        self.calls.rounds += u64::from(any);
        self.run_timers(now);
        self.release_acks(any);
        self.settle(now);
    }

    /// After the wait, if somebody else handles what it found.
    pub(crate) fn stop_waiting(&mut self) {
        self.wakes_at = None;
        self.want_reading();
        self.adapter.disarm();
        if let Some(attached) = &mut self.attached {
            attached.woken();
        }
    }

    /// Wakes the thread that waits for descriptors if it would wake too late for the next deadline.
    #[inline]
    pub(crate) fn call_waiter(&mut self) {
        if let Some(wakes_at) = self.wakes_at {
            self.call_before(wakes_at);
        }
    }

    /// Wakes the thread that waits for descriptors.
    pub(in crate::engine) fn call_sleeper(&self) {
        self.bell.set();
    }

    fn call_before(&mut self, wakes_at: Time) {
        let deadline = earliest([self.deadline(), self.news_due()]);
        // Acknowledgements that wait for a message are its to release, if nobody polls any more.
        let owes = wakes_at > Time(0) && self.adapter.owes_acks();
        let early = owes || deadline.is_some_and(|deadline| deadline < wakes_at);
        // What it waits for has come, by a call of another thread.
        let served =
            self.events.attended_waits() || self.cm.as_ref().is_some_and(|cm| cm.attended_waits());
        if early || served || self.net.wants_turn() || self.adapter.hot_channels() > 0 {
            // Once is enough: it computes its next deadline anew.
            self.wakes_at = Some(Time(0));
            self.bell.set();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsRawFd;

    use quipu_nic::Time;

    use crate::clock::kernel_ns;
    use crate::engine::tests::idle;
    use crate::sys::is_readable;

    /// A program that slept has not read the clock since. What its first polls find may begin a wait, which
    /// is not to be over at once.
    #[test]
    fn polls_beside_one_who_waits_for_descriptors_know_the_time() {
        let engine = idle();
        let mut core = engine.inner.core.lock();
        core.stop_waiting();
        core.wakes_at = Some(Time(u64::MAX));
        for _ in 0..40 {
            let before = kernel_ns();
            core.poll();
            assert!(core.recent() >= Time(before.saturating_sub(1_000_000)));
            while kernel_ns() < before + 2_000_000 {}
        }
        core.stop_waiting();
        let before = kernel_ns();
        core.poll();
        assert!(core.recent() >= Time(before.saturating_sub(1_000_000)));
    }

    /// On a busy machine the thread that waits for descriptors wakes long after it was called. Calls of
    /// others in between must not take back what it was called by: it would sleep on, past deadlines that
    /// it does not know of.
    #[test]
    fn who_waits_for_descriptors_hears_the_bell_although_others_look_first() {
        let engine = idle();
        let mut core = engine.inner.core.lock();
        core.stop_waiting();
        core.wakes_at = Some(Time(u64::MAX));
        core.call_sleeper();
        core.run();
        let bell = core.bell.fd().as_raw_fd();
        assert!(is_readable(bell), "for the one that waits");
        core.stop_waiting();
        core.run();
        assert!(!is_readable(bell), "nobody waits any more");
    }
}
