//! What a poll does that finds its queue empty.

use std::sync::atomic::Ordering;

use quipu_cabi::Hold;
use quipu_nic::{Completion, CqId, Glance, QpId, Time};

use super::core::Core;
use super::turn::Spared;

/// Polls that share one reading of the clock, while they find nothing or have to look at memory only.
const POLLS_PER_READING: u32 = 16;
/// Polls between two questions to epoll: while hot streams are tried directly but others are
/// open; while there are UDP sockets, and polls try them, which takes as long as the question; while
/// there are UDP sockets that had nothing for long, as those of a program that met its peer by datagrams
/// (UCX) and then talks to it by a connection; and while only listeners and links are there.
const POLLS_PER_LOOK_HOT: u32 = 8;
const POLLS_PER_LOOK_DATAGRAMS: u32 = 16;
const POLLS_PER_LOOK_QUIET: u32 = 128;
const POLLS_PER_LOOK_IDLE: u32 = 256;
/// The longest between two such questions, by a clock that is read now and then. A program that moves
/// megabytes from one poll to the next makes few: tens of gigabytes could go to a peer that is dead.
const LOOK_NS: u64 = 1_000_000;
/// Polls that find completions at once for each that makes progress all the same: what completes while it is
/// being posted would keep everything else waiting otherwise, and the end of the peer unknown.
const HITS_PER_POLL: u32 = 16;
/// Rounds in a row that find something, after which acknowledgements wait no longer for one that does not:
/// others may send without end, and peers wait.
const BUSY_ROUNDS: u32 = 16;
/// Polls of a program beside a helper that waits for descriptors, after which they are taken for many more.
const POLLS_BESIDE_HELPER: u32 = 1024;

impl Core {
    /// What a poll does that found its queue empty. Returns how many polls in a row were fruitless.
    #[inline(always)]
    pub(crate) fn poll(&mut self) -> u32 {
        if self.calm > 0 {
            self.calm -= 1;
            return self.poll_memory();
        }
        self.poll_all()
    }

    /// [`poll`](Self::poll) where it is not known yet what is to be looked at.
    #[inline(never)]
    fn poll_all(&mut self) -> u32 {
        let due = self.polls_since_reading + 1 >= POLLS_PER_READING;
        // While somebody waits for descriptors nobody polls steadily: the last reading may be an hour old,
        // and waits that begin now would be over.
        let idle = self.wakes_at.is_some();
        let fresh = due || idle || self.empty_polls.is_multiple_of(POLLS_PER_READING);
        self.polls_since_reading = if fresh { 0 } else { self.polls_since_reading + 1 };
        let now = if fresh { self.clock.now() } else { self.clock.recent() };
        let looks = self.polls_since_look + 1 >= self.polls_per_look() || self.has_not_looked(now);
        // To receive from streams and to look at memory are no cancellation points; what is one in that
        // which comes of them has a hold of its own.
        let elsewhere = self.qpip.is_some() || self.attached.is_some();
        let _hold = (looks || elsewhere).then(Hold::new);
        let mut any = self.adapter.progress(now);
        any |= self.net.poll_hot(&mut self.adapter, now, self.wakes_at.is_none());
        any |= self.datagrams.poll_hot(&mut self.adapter, now, any);
        any |= self.poll_packets(now);
        any |= self.poll_attached(now);
        self.polls_since_look += 1;
        if looks {
            any |= self.look(now);
        }
        if fresh {
            self.run_timers(now);
            self.publish(now);
        }
        self.count_poll(any);
        // Anyone who waits for descriptors is called for those that wait, in case that no other poll comes.
        self.release_acks(any);
        self.settle(now);
        if self.wakes_at.is_some() {
            self.poll_beside_waiter();
        }
        self.empty_polls
    }

    /// Has the next poll read the clock.
    pub(super) fn want_reading(&mut self) {
        self.polls_since_reading = POLLS_PER_READING;
        self.calm = 0;
    }

    /// Whether the last question to epoll was long ago.
    #[inline]
    fn has_not_looked(&self, now: Time) -> bool {
        now.since(Time(self.looked_at.load(Ordering::Relaxed))) >= LOOK_NS
    }

    /// Has the helper leave its wait to a program that polls steadily. Otherwise, while no bell wakes it,
    /// peers would hold the program for one that sleeps, and each poll would look at more than memory.
    fn poll_beside_waiter(&mut self) {
        self.polls_beside_waiter = self.polls_beside_waiter.saturating_add(1);
        if self.polls_beside_waiter == POLLS_BESIDE_HELPER && !self.driver {
            self.wakes_at = Some(Time(0));
            self.call_sleeper();
        }
    }

    /// Does what is due without a descriptor that says so.
    #[inline]
    pub(super) fn run_timers(&mut self, now: Time) {
        if self.faults.is_some() || self.deadline().is_some_and(|at| at <= now) {
            self.run_due_timers(now);
        }
    }

    #[cold]
    fn run_due_timers(&mut self, now: Time) {
        let _hold = Hold::new();
        let due = |at: Option<Time>| at.is_some_and(|at| at <= now);
        if self.faults.is_some() {
            self.run_faults(now);
        }
        if due(self.adapter.poll_timeout()) {
            self.adapter.handle_timeout(now);
        }
        if due(self.net.poll_timeout()) {
            self.net.handle_timeout(&mut self.adapter, now);
        }
        if due(self.links.poll_timeout()) {
            self.links.handle_timeout(&mut self.adapter, now);
        }
        if let Some(qpip) = &mut self.qpip
            && due(qpip.poll_timeout())
        {
            qpip.handle_timeout(&mut self.adapter, now);
        }
        if let Some(cm) = &mut self.cm
            && due(cm.poll_timeout().map(Time))
        {
            cm.handle_timeout(now.0);
        }
    }

    /// Whether a poll of `cq` need not even take a quick look: that for another queue has just found nothing.
    #[inline(always)]
    pub(super) fn is_spared(&mut self, cq: CqId) -> bool {
        self.calm > 0 && self.last_look.serves(cq) && self.adapter.is_idle(cq)
    }

    /// A poll of `cq` by as quick a look as there is, where that is to be had: how many completions it has
    /// handed out, or `None` if it was none.
    #[inline(always)]
    pub(super) fn glance(
        &mut self,
        cq: CqId,
        max: usize,
        spared: &Spared,
        mut taker: impl FnMut(&Completion),
    ) -> Option<usize> {
        let busy_elsewhere = self.calm == 0 && (self.net.has_hot_streams() || !self.calm_down(cq));
        if busy_elsewhere || max == 0 {
            return None;
        }
        let now = self.clock.recent();
        match self.adapter.glance(now, cq, &mut taker) {
            Glance::Unsure => None,
            Glance::Found(id) => self.serve_found(now, id, cq, max, taker),
            Glance::Vain => {
                self.count_quick_poll(false);
                let between = match self.last_look.polled_between(cq) {
                    Some(last) if self.adapter.is_idle(last) => Some(last),
                    _ => None,
                };
                self.last_look.made_in_turn(cq, between);
                spared.set(between);
                Some(0)
            }
            Glance::Taken => {
                self.count_quick_poll(true);
                self.last_look.forget();
                self.finish_round(now);
                Some(1)
            }
        }
    }

    /// Serves the channel in which a glance has found something, and takes what that completes.
    #[inline(never)]
    fn serve_found(
        &mut self,
        now: Time,
        id: QpId,
        cq: CqId,
        max: usize,
        taker: impl FnMut(&Completion),
    ) -> Option<usize> {
        if !self.adapter.serve(now, id) {
            return None;
        }
        self.count_quick_poll(true);
        self.last_look.forget();
        self.finish_round(now);
        self.adapter.poll_cq_each(cq, max, taker).ok()
    }

    /// Counts a poll that looked at memory only.
    #[inline(always)]
    fn count_quick_poll(&mut self, any: bool) {
        self.calm -= 1;
        self.polls_since_reading += 1;
        self.polls_since_look += 1;
        self.count_poll(any);
    }

    /// Whether quick looks will do for the next polls, the first of which is of `cq`. What is due now and
    /// then is done first.
    #[inline(never)]
    fn calm_down(&mut self, cq: CqId) -> bool {
        // A look for another queue may serve this one.
        if !self.memory_is_all() || self.last_look.would_serve(cq) {
            return false;
        }
        if self.polls_since_reading + 1 >= POLLS_PER_READING {
            self.polls_since_reading = 0;
            self.settle_taken();
            let now = self.clock.now();
            self.run_timers(now);
            self.publish(now);
            self.finish_round(now);
            if !self.memory_is_all() || self.has_not_looked(now) {
                return false;
            }
        }
        let before_reading = POLLS_PER_READING - 1 - self.polls_since_reading;
        let before_look = self.polls_per_quiet_look() - 1 - self.polls_since_look;
        self.calm = before_reading.min(before_look);
        true
    }

    /// Whether a poll has to look at memory that is shared with peers only: nothing else was busy lately, and
    /// nobody waits for descriptors. It stays so for the next polls unless something else is done in between:
    /// see `calm`.
    fn memory_is_all(&self) -> bool {
        !self.watched
            && !self.net.has_hot_streams()
            && !self.net.has_cold_streams()
            && !self.net.holds_bytes()
            && !self.datagrams.is_hot()
            && self.qpip.is_none()
            && self.attached.is_none()
            && self.wakes_at.is_none()
            && self.polls_since_look + 1 < self.polls_per_quiet_look()
    }

    /// [`poll`](Self::poll) where that is so, as it is for a program that waits for a peer on the same host.
    #[inline]
    fn poll_memory(&mut self) -> u32 {
        let now = self.clock.recent();
        self.polls_since_reading += 1;
        self.polls_since_look += 1;
        let any = self.adapter.progress(now);
        self.count_poll(any);
        self.release_acks(any);
        self.finish_round(now);
        self.empty_polls
    }

    /// Counts a poll, which found something to do or not.
    #[inline(always)]
    fn count_poll(&mut self, any: bool) {
        self.calls.polls += 1;
        if any {
            self.calls.rounds += 1;
            self.empty_polls = 0;
        } else {
            self.calls.empty_polls += 1;
            self.empty_polls = self.empty_polls.wrapping_add(1);
        }
    }

    /// After a round that has found something, or not. Acknowledgements wait for a message to travel with,
    /// as long as another round is to be expected soon.
    #[inline(always)]
    pub(super) fn release_acks(&mut self, any: bool) {
        if any && self.busy_rounds < BUSY_ROUNDS {
            self.busy_rounds += 1;
            return;
        }
        self.busy_rounds = 0;
        self.adapter.release_acks();
    }

    /// What a look at memory ends with.
    #[inline(always)]
    fn finish_round(&mut self, now: Time) {
        if self.adapter.has_output() || self.adapter.has_events() {
            self.settle(now);
        }
        self.adapter.probe_mut().flush();
    }

    /// A poll that found completions at once: progress was made, so nobody need yield.
    #[inline]
    pub(crate) fn poll_hit(&mut self) {
        self.hits = self.hits.wrapping_add(1);
        if self.hits.is_multiple_of(HITS_PER_POLL) || self.adapter.owes_progress() {
            self.keep_up();
        }
        self.empty_polls = 0;
        self.last_look.forget();
    }

    /// Out of line, so that a poll that finds completions stays short.
    #[cold]
    #[inline(never)]
    fn keep_up(&mut self) {
        let now = self.clock.now();
        if self.has_not_looked(now) {
            self.calm = 0;
        }
        self.poll();
    }

    /// Whether a poll that might do without is to read the clock.
    #[inline]
    pub(super) fn is_reading_due(&mut self) -> bool {
        self.polls_since_look += 1;
        self.polls_since_look.is_multiple_of(POLLS_PER_READING)
    }

    #[inline]
    fn polls_per_look(&self) -> u32 {
        match (self.net.has_cold_streams(), self.net.has_hot_streams()) {
            (true, false) => 1,
            (true, true) => POLLS_PER_LOOK_HOT,
            (false, _) if self.datagrams.is_hot() => POLLS_PER_LOOK_DATAGRAMS,
            (false, _) => self.polls_per_quiet_look(),
        }
    }

    /// The same where neither is to be expected.
    #[inline]
    fn polls_per_quiet_look(&self) -> u32 {
        if self.datagrams.is_in_use() { POLLS_PER_LOOK_QUIET } else { POLLS_PER_LOOK_IDLE }
    }
}

#[cfg(test)]
mod tests;
