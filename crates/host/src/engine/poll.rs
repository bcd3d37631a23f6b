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
        // Whoever waits for descriptors is called for those that wait, in case that no other poll comes.
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

    /// Behind a round that has found something, or not. Acknowledgements wait for a message to travel with,
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
mod tests {
    use std::net::UdpSocket;
    use std::time::{Duration, Instant};

    use quipu_nic::{QpCap, QpInit, QpNum, QpType, SendFlags, SendWr, Time};

    use super::*;
    use crate::SameHost;
    use crate::engine::Engine;
    use crate::engine::helper::Helper;
    use crate::engine::tests::{EMPTY, End};

    /// Sends one, for which there may be room only when earlier ones are acknowledged.
    fn send(from: &End, mut meanwhile: impl FnMut()) {
        let end = Instant::now() + Duration::from_secs(20);
        while from.engine.post_send(from.qp, &EMPTY).is_err() {
            from.engine.progress().unwrap();
            meanwhile();
            assert!(Instant::now() < end, "nothing is acknowledged");
        }
    }

    /// Where one thread polls and another waits for descriptors, the acknowledgement of a message travels
    /// with the answer to it, too; and whoever waits is called, in case that there is none.
    #[test]
    fn acknowledgements_wait_for_the_answer_while_somebody_waits_for_descriptors() {
        let [a, b] = End::pair(SameHost::Never);
        a.send();
        b.receive();
        b.send();
        a.receive();

        let mut core = b.engine.inner.core.lock();
        core.adapter.release_acks();
        let now = core.now();
        core.settle(now);
        // Before all that is due otherwise.
        core.wakes_at = Some(now);
        core.polls_beside_waiter = POLLS_BESIDE_HELPER;
        let (sends, _) = core.net.calls();
        a.send();
        let end = Instant::now() + Duration::from_secs(20);
        while core.adapter.poll_cq_each(b.cq, 1, |_| {}).unwrap() == 0 {
            core.poll();
            assert!(Instant::now() < end, "nothing comes");
        }
        assert!(core.adapter.owes_acks());
        assert_eq!(core.net.calls().0, sends, "nothing is sent for the acknowledgement alone");
        assert_eq!(core.wakes_at, Some(Time(0)), "who waits is called");
        core.adapter.post_send(b.qp, &EMPTY).unwrap();
        core.adapter.ring_doorbell(now, b.qp);
        core.adapter.release_acks();
        core.settle(now);
        assert_eq!(core.net.calls().0, sends + 1, "both are sent together");
        core.stop_waiting();
    }

    /// To be in epoll's set costs a stream time with every segment, so one that polls find bytes on again and
    /// again leaves it; and comes back before anybody waits, so that what arrives then wakes him.
    #[test]
    fn a_stream_that_is_polled_steadily_is_watched_only_while_somebody_waits() {
        let [a, b] = End::pair(SameHost::Never);
        let end = Instant::now() + Duration::from_secs(20);
        // The helper does not wait in between, which would have it watched.
        let mut core = b.engine.inner.core.lock();
        core.stop_waiting();
        while core.net.unwatched() == 0 {
            send(&a, || _ = core.poll());
            while core.adapter.poll_cq_each(b.cq, 1, |_| {}).unwrap() == 0 {
                core.poll();
                assert!(Instant::now() < end, "it stays in the set");
            }
            let now = core.now();
            core.adapter.post_recv(now, b.qp, 0, &[]).unwrap();
        }
        while core.run() {}
        assert!(core.prepare_wait().is_some());
        assert_eq!(core.net.unwatched(), 0);
        core.stop_waiting();
        drop(core);
        // Nobody polls: the helper takes it.
        send(&a, || ());
        while b.engine.inner.core.lock().adapter.poll_cq_each(b.cq, 1, |_| {}).unwrap() == 0 {
            assert!(Instant::now() < end, "nobody notices");
            std::thread::yield_now();
        }
    }

    /// A program whose requests complete while they are being posted never finds its queue empty.
    #[test]
    fn progress_is_made_although_every_poll_finds_a_completion() {
        let [a, b] = End::pair(SameHost::Never);
        a.send();
        b.receive();
        // The helper is kept out.
        let mut core = b.engine.inner.core.lock();
        let looks = core.calls.looks;
        a.engine.post_send(a.qp, &SendWr { flags: SendFlags::SIGNALED, ..EMPTY }).unwrap();
        let end = Instant::now() + Duration::from_secs(20);
        // Its completion says that the other end has taken it.
        while a.engine.poll_cq_each(a.cq, 1, |_| {}).unwrap() == 0 {
            core.poll_hit();
            assert!(Instant::now() < end, "everything else waits");
        }
        (0..HITS_PER_POLL * POLLS_PER_LOOK_IDLE).for_each(|_| core.poll_hit());
        assert!(core.calls.looks > looks, "descriptors are asked, too");
    }

    #[test]
    fn descriptors_are_asked_in_time_however_few_polls_there_are() {
        let engine = crate::engine::tests::idle();
        let (context, _) = engine.open_context().unwrap();
        let (cq, _) = engine.create_cq(context, 4, None, 0).unwrap();
        let looks = || engine.inner.core.lock().calls.looks;
        let hits = || (0..HITS_PER_POLL).for_each(|_| engine.inner.core.lock().poll_hit());
        let poll = || assert_eq!(engine.poll_cq_each(cq, 1, |_| {}).unwrap(), 0);
        let empty = || (0..2 * POLLS_PER_READING).for_each(|_| poll());
        for polls in [&hits as &dyn Fn(), &empty] {
            for _ in 0..3 {
                let before = looks();
                std::thread::sleep(Duration::from_nanos(LOOK_NS));
                polls();
                assert!(looks() > before);
            }
        }
    }

    /// Gives an engine a socket of datagrams.
    fn add_datagrams(engine: &Engine) -> QpNum {
        let (context, _) = engine.open_context().unwrap();
        let pd = engine.alloc_pd().unwrap();
        let (cq, _) = engine.create_cq(context, 8, None, 0).unwrap();
        let cap = QpCap { max_send_wr: 4, max_recv_wr: 4, ..QpCap::default() };
        let (qp_type, sq_sig_all, srq) = (QpType::Ud, true, None);
        let init = QpInit { pd, send_cq: cq, recv_cq: cq, srq, cap, qp_type, sq_sig_all };
        engine.create_qp(context, &init).unwrap().1
    }

    /// Whoever sends datagrams, be it nothing that makes sense, would have peers of others wait for ever.
    #[test]
    fn acknowledgements_do_not_wait_for_all_that_comes_from_others() {
        let [a, b] = End::pair(SameHost::Never);
        let stranger = UdpSocket::bind("127.0.0.1:0").unwrap();
        let socket = ("127.0.0.1", add_datagrams(&b.engine).port());
        let end = Instant::now() + Duration::from_secs(20);
        for round in [|core: &mut Core| _ = core.run(), |core: &mut Core| _ = core.poll()] {
            let mut core = b.engine.inner.core.lock();
            core.stop_waiting();
            core.datagrams.heat(1);
            a.send();
            while core.adapter.poll_cq_each(b.cq, 1, |_| {}).unwrap() == 0 {
                stranger.send_to(&[0], socket).unwrap();
                round(&mut core);
                assert!(Instant::now() < end, "nothing comes");
            }
            for _ in 0..2 * BUSY_ROUNDS {
                stranger.send_to(&[0], socket).unwrap();
                round(&mut core);
            }
            assert!(!core.adapter.owes_acks());
        }
    }

    /// A program whose ends have met by datagrams and go on by something else would wait for a system call in
    /// each poll.
    #[test]
    fn sockets_of_datagrams_are_tried_for_long_only_where_nothing_else_comes() {
        let engine = crate::engine::tests::idle();
        add_datagrams(&engine);
        let mut core = engine.inner.core.lock();
        let core = &mut *core;
        let mut tries = |hits, beside| {
            core.datagrams.heat(hits);
            let now = core.clock.now();
            let mut tries = 0;
            while core.datagrams.is_hot() {
                assert!(!core.datagrams.poll_hot(&mut core.adapter, now, beside));
                tries += 1;
            }
            tries
        };
        assert_eq!((tries(1, false), tries(1, true)), (4096, 16));
        assert_eq!(tries(64, true), 4096, "one that is in steady use is not given up sooner");
    }

    #[test]
    fn sockets_of_datagrams_are_given_up_soon_beside_a_stream_that_delivers() {
        let [a, b] = End::pair(SameHost::Never);
        add_datagrams(&b.engine);
        a.send();
        b.receive();
        let end = Instant::now() + Duration::from_secs(20);
        let mut core = b.engine.inner.core.lock();
        core.datagrams.heat(1);
        // As many as it takes, and one that came by a look at all descriptors.
        for _ in 0..=16 {
            let now = core.now();
            core.adapter.post_recv(now, b.qp, 0, &[]).unwrap();
            send(&a, || _ = core.poll());
            while core.adapter.poll_cq_each(b.cq, 1, |_| {}).unwrap() == 0 {
                core.poll();
                assert!(Instant::now() < end, "nothing comes");
            }
        }
        assert!(!core.datagrams.is_hot());
    }

    /// Nothing comes that would wake it: a peer that reads and writes memory rings nobody.
    #[test]
    fn the_helper_does_not_wait_for_long_beside_a_program_that_polls() {
        let engine = crate::engine::tests::idle();
        let (context, _) = engine.open_context().unwrap();
        let (cq, _) = engine.create_cq(context, 4, None, 0).unwrap();
        Helper::start(&engine.inner).unwrap();
        let waits = || engine.inner.core.lock().wakes_at.is_some();
        let end = Instant::now() + Duration::from_secs(20);
        let polls_to_the_end = || {
            while !waits() {
                assert!(Instant::now() < end, "it does not begin");
                std::thread::sleep(Duration::from_millis(1));
            }
            let mut polls = 0;
            while waits() {
                assert!(Instant::now() < end, "it does not end");
                assert_eq!(engine.poll_cq_each(cq, 1, |_| {}).unwrap(), 0);
                polls += 1;
            }
            polls
        };
        // Something else may wake it before that, such as news of an interface.
        while polls_to_the_end() < POLLS_BESIDE_HELPER {}
    }

    #[test]
    fn a_thread_that_waits_for_events_goes_on_beside_one_that_polls() {
        let engine = crate::engine::tests::idle();
        let mut core = engine.inner.core.lock();
        assert!(core.prepare_wait().is_some());
        (core.driver, core.wakes_at) = (true, Some(Time(u64::MAX)));
        (0..2 * POLLS_BESIDE_HELPER).for_each(|_| _ = core.poll());
        assert_eq!(core.wakes_at, Some(Time(u64::MAX)), "it is not called");
        core.driver = false;
        core.stop_waiting();
    }

    #[test]
    fn polls_ask_again_what_there_is_to_look_at_after_any_other_call() {
        let engine = crate::engine::tests::idle();
        let (context, _) = engine.open_context().unwrap();
        let (cq, _) = engine.create_cq(context, 4, None, 0).unwrap();
        let calm = || engine.inner.core.lock().calm;
        let poll = || assert_eq!(engine.poll_cq_each(cq, 1, |_| {}).unwrap(), 0);
        // The first reads the clock.
        (0..2).for_each(|_| poll());
        let before = calm();
        assert!(before > 1);
        poll();
        assert_eq!(calm(), before - 1);
        drop(engine.doorbell().unwrap());
        assert_eq!(calm(), before - 1, "nothing was to be done for what was posted");
        drop(engine.enter().unwrap());
        assert_eq!(calm(), 0);
        // Now and then the clock is read and the descriptors are asked all the same.
        let looks = engine.inner.core.lock().calls.looks;
        (0..2 * POLLS_PER_LOOK_IDLE).for_each(|_| poll());
        let after = engine.inner.core.lock().calls.looks;
        assert!(after - looks >= 2, "more, if that took long");
    }
}
