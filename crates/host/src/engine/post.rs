//! The data path: posting, ringing the doorbell, polling.

use std::sync::atomic::Ordering;

use quipu_cabi::Hold;
use quipu_fault::{Call, Occasion};
use quipu_nic::{Completion, CqId, Fault, QpId, QpType, SendWr, Sge, SrqId, Time, into_list};

use super::Engine;
use super::core::Core;
use super::faults::About;
use crate::error::EngineError;
use crate::lock::Guard;

/// Polls between two yields of a thread that polls without result, at first and while nobody else wants
/// its processor: the yields of a thread that is alone are spread further and further.
const YIELD_EVERY: u32 = 512;
const YIELD_EVERY_MAX: u32 = 16_384;
/// And while others do, the peer perhaps among them.
const YIELD_EVERY_SHARED: u32 = 16;
/// A yield that takes longer let somebody else run.
const YIELD_TOOK_NS: u64 = 2_000;

thread_local! {
    /// How many polls this thread makes between two yields.
    static YIELD_AFTER: std::cell::Cell<u32> = const { std::cell::Cell::new(YIELD_EVERY) };
}

/// Several posts under one lock. When it is dropped the doorbell rings: what was posted is
/// transmitted together. Until then no other method of the engine may be called by this thread, nor
/// memory be registered with another engine, nor a lock be taken under which one is called elsewhere.
pub struct Doorbell<'a> {
    core: Guard<'a, Core>,
    /// The queue pair whose doorbell is still to ring.
    posted: Option<QpId>,
}

impl Doorbell<'_> {
    /// Posts a send request.
    ///
    /// # Errors
    ///
    /// As [`Adapter::post_send`](quipu_nic::Adapter::post_send).
    #[inline]
    pub fn post_send(&mut self, qp: QpId, wr: &SendWr<'_>) -> Result<(), EngineError> {
        if self.posted.is_some_and(|posted| posted != qp) {
            self.ring();
        }
        if let Some(posted) = self.core.post_send_elsewhere(qp, wr) {
            // The bell rings at the end.
            return posted;
        }
        if self.core.watched {
            self.core.post_send_watched(qp, wr)?;
        } else {
            self.core.adapter.post_send(qp, wr)?;
        }
        self.posted = Some(qp);
        Ok(())
    }

    /// The service of a queue pair.
    #[inline]
    #[must_use]
    pub fn service_of(&self, qp: QpId) -> Option<QpType> {
        self.core.adapter.service_of(qp)
    }

    /// Checks a request that is to be posted behind `ahead` others, before any of them is.
    ///
    /// # Errors
    ///
    /// As [`Adapter::check_send`](quipu_nic::Adapter::check_send).
    pub fn check_send(&mut self, qp: QpId, wr: &SendWr<'_>, ahead: u32) -> Result<(), EngineError> {
        let outcome = self.core.adapter.check_send(qp, wr, ahead);
        if let Err(fault) = &outcome {
            self.core.watch_refused(qp, wr, fault);
        } else if self.core.watched && self.core.is_full_strictly(qp, ahead) {
            return Err(Fault::QueueFull.into());
        }
        Ok(outcome?)
    }

    /// Posts a receive request.
    ///
    /// # Errors
    ///
    /// As [`Adapter::post_recv`](quipu_nic::Adapter::post_recv).
    #[inline]
    pub fn post_recv(&mut self, qp: QpId, wr_id: u64, sges: &[Sge]) -> Result<(), EngineError> {
        if let Some(posted) = self.core.post_recv_elsewhere(qp, wr_id, sges) {
            return posted;
        }
        if self.core.watched {
            return self.core.post_recv_watched(qp, wr_id, sges);
        }
        let Core { adapter, clock, .. } = &mut *self.core;
        Ok(adapter.post_recv(clock, qp, wr_id, sges)?)
    }

    /// Posts a receive request to a shared queue.
    ///
    /// # Errors
    ///
    /// As [`Adapter::post_srq_recv`](quipu_nic::Adapter::post_srq_recv).
    #[inline]
    pub fn post_srq_recv(
        &mut self,
        srq: SrqId,
        wr_id: u64,
        sges: &[Sge],
    ) -> Result<(), EngineError> {
        if self.core.watched {
            return self.core.post_srq_recv_watched(srq, wr_id, sges);
        }
        let Core { adapter, clock, .. } = &mut *self.core;
        Ok(adapter.post_srq_recv(clock, srq, wr_id, sges)?)
    }

    /// Posts a receive request to a work queue.
    ///
    /// # Errors
    ///
    /// As [`Adapter::post_wq_recv`](quipu_nic::Adapter::post_wq_recv).
    pub fn post_wq_recv(&mut self, wq: SrqId, wr_id: u64, sges: &[Sge]) -> Result<(), EngineError> {
        if self.core.faults.is_some() {
            self.core.post_wq_recv_planned(wr_id, sges)?;
        }
        let Core { adapter, clock, .. } = &mut *self.core;
        Ok(adapter.post_wq_recv(clock, wq, wr_id, sges)?)
    }

    #[inline]
    fn ring(&mut self) {
        if let Some(qp) = self.posted.take() {
            if self.core.adapter.ring_at_once(qp) {
                // Most often the peer is awake, and nothing else is to be done.
                return self.core.settle_rung();
            }
            let exact = self.core.adapter.doorbell_wants_time(qp);
            let now = if exact { self.core.now() } else { self.core.recent() };
            self.core.adapter.ring_doorbell(now, qp);
            self.core.settle_posts(now);
        }
    }
}

impl Drop for Doorbell<'_> {
    #[inline]
    fn drop(&mut self) {
        if self.posted.is_some() {
            return self.ring();
        }
        // A receive may set going what waited for it, and one of a queue pair in error completes at once.
        let now = self.core.recent();
        self.core.settle_posts(now);
    }
}

impl Engine {
    /// Takes the lock for a list of posts.
    ///
    /// # Errors
    ///
    /// [`EngineError::EngineGone`].
    #[inline]
    pub fn doorbell(&self) -> Result<Doorbell<'_>, EngineError> {
        Ok(Doorbell { core: self.inner.enter_quickly()?, posted: None })
    }

    /// Posts a send request behind which no other comes, and rings, by the shortest way: where that is no
    /// more than to fill a slot in memory that is shared with the peer, or to reach into the peer's own, see
    /// [`Adapter::post_at_once`](quipu_nic::Adapter::post_at_once), or over a stream, see
    /// [`Adapter::post_to_stream`](quipu_nic::Adapter::post_to_stream). `false` if it is to be posted as any
    /// other, and was not.
    #[inline(always)]
    #[must_use]
    pub fn post_at_once(&self, qp: QpId, wr: &SendWr<'_>) -> bool {
        let Ok(mut core) = self.inner.enter_quickly() else { return false };
        if core.watched || core.attached.is_some() {
            return false;
        }
        let Core { adapter, clock, .. } = &mut *core;
        if adapter.post_at_once(clock, qp, wr) {
            core.settle_rung();
        } else if core.adapter.post_to_stream(qp, wr) {
            let now = core.now();
            core.settle_posts(now);
        } else {
            return false;
        }
        true
    }

    /// Posts one send request and rings the doorbell.
    ///
    /// # Errors
    ///
    /// As [`Adapter::post_send`](quipu_nic::Adapter::post_send).
    #[inline]
    pub fn post_send(&self, qp: QpId, wr: &SendWr<'_>) -> Result<(), EngineError> {
        if self.post_at_once(qp, wr) {
            return Ok(());
        }
        self.doorbell()?.post_send(qp, wr)
    }

    /// Posts one receive request.
    ///
    /// # Errors
    ///
    /// As [`Adapter::post_recv`](quipu_nic::Adapter::post_recv).
    #[inline]
    pub fn post_recv(&self, qp: QpId, wr_id: u64, sges: &[Sge]) -> Result<(), EngineError> {
        self.doorbell()?.post_recv(qp, wr_id, sges)
    }

    /// Posts one receive request to a shared queue.
    ///
    /// # Errors
    ///
    /// As [`Adapter::post_srq_recv`](quipu_nic::Adapter::post_srq_recv).
    #[inline]
    pub fn post_srq_recv(&self, srq: SrqId, wr_id: u64, sges: &[Sge]) -> Result<(), EngineError> {
        self.doorbell()?.post_srq_recv(srq, wr_id, sges)
    }

    /// Takes up to `max` completions out of a queue, oldest first, and hands each to `taker`, which must
    /// not call the engine; how many. If there are none, makes progress on everything and looks again,
    /// unless that was just done without result for another queue.
    ///
    /// # Errors
    ///
    /// No such queue; [`EngineError::AdapterLost`], [`EngineError::LinkGone`] if it is empty and nothing more
    /// will come.
    #[inline]
    pub fn poll_cq_each(
        &self,
        cq: CqId,
        max: usize,
        taker: impl FnMut(&Completion),
    ) -> Result<usize, EngineError> {
        Ok(self.poll_cq_and_move(cq, max, taker)?.0)
    }

    /// Whether a poll of `cq` finds nothing, as is known without a look; this is that poll. The others do
    /// this themselves; it is for callers to whom the little that they take before that is too much.
    #[inline(always)]
    #[must_use]
    pub fn take_spared(&self, cq: CqId) -> bool {
        self.inner.spared.take(cq) && self.is_here()
    }

    /// The same, and whether any progress was made, of which completions may come later.
    #[inline]
    pub(crate) fn poll_cq_and_move(
        &self,
        cq: CqId,
        max: usize,
        mut taker: impl FnMut(&Completion),
    ) -> Result<(usize, bool), EngineError> {
        if self.take_spared(cq) {
            return Ok((0, false));
        }
        let mut core = self.inner.enter_quickly()?;
        self.inner.count_poll();
        if core.is_spared(cq) {
            return Ok((0, false));
        }
        if let Some(found) = core.glance(cq, max, &self.inner.spared, &mut taker) {
            let empty_polls = core.empty_polls;
            drop(core);
            self.let_others_run(empty_polls);
            return Ok((found, empty_polls == 0));
        }
        self.poll_thoroughly(core, cq, max, taker)
    }

    /// The same, where a glance will not do. Out of line, so that a glance is short.
    #[inline(never)]
    fn poll_thoroughly(
        &self,
        mut core: Guard<'_, Core>,
        cq: CqId,
        max: usize,
        mut taker: impl FnMut(&Completion),
    ) -> Result<(usize, bool), EngineError> {
        core.adapter.settle_taken();
        if core.watched {
            let found = self.poll_watched(core, cq, max, &mut taker)?;
            return Ok((found, found > 0));
        }
        let found = core.adapter.poll_cq_each(cq, max, &mut taker)?;
        if found > 0 {
            core.poll_hit();
            return Ok((found, true));
        }
        core.still_there()?;
        if core.take_news() {
            return Ok((core.adapter.poll_cq_each(cq, max, taker)?, true));
        }
        // Where a look costs next to nothing, none is spared.
        if core.calm == 0 && core.last_look.serves(cq) {
            return Ok((0, false));
        }
        let empty_polls = core.poll();
        core.last_look.made(cq, empty_polls > 0);
        if empty_polls == 0 {
            return Ok((core.adapter.poll_cq_each(cq, max, taker)?, true));
        }
        drop(core);
        self.let_others_run(empty_polls);
        Ok((0, false))
    }

    /// The same, where a plan of faults or the strict mode looks on.
    #[cold]
    fn poll_watched(
        &self,
        mut core: Guard<'_, Core>,
        cq: CqId,
        max: usize,
        taker: &mut dyn FnMut(&Completion),
    ) -> Result<usize, EngineError> {
        let _hold = Hold::new();
        core.consult(Occasion::of(Call::PollCq), About::Cq(cq))?;
        let mut found = Vec::new();
        let mut empty_polls = 0;
        core.adapter.poll_cq_each(cq, max, |completion| found.push(*completion))?;
        if found.is_empty() {
            empty_polls = core.poll();
            core.adapter.poll_cq_each(cq, max, |completion| found.push(*completion))?;
        } else {
            core.poll_hit();
        }
        core.watch_poll(cq, &found);
        if found.is_empty() {
            core.still_there()?;
        }
        drop(core);
        found.iter().for_each(taker);
        if found.is_empty() {
            self.let_others_run(empty_polls);
        }
        Ok(found.len())
    }

    /// As [`poll_cq_each`](Self::poll_cq_each), into a list.
    ///
    /// # Errors
    ///
    /// As there.
    #[inline]
    pub fn poll_cq(&self, cq: CqId, out: &mut [Completion]) -> Result<usize, EngineError> {
        self.poll_cq_each(cq, out.len(), into_list(out))
    }

    /// Takes the oldest completion out of a queue that keeps stamps, with the time at which it was
    /// made. If there is none, makes progress on everything and looks again.
    ///
    /// # Errors
    ///
    /// As [`poll_cq`](Self::poll_cq).
    pub fn poll_cq_stamped(&self, cq: CqId) -> Result<Option<(Completion, Time)>, EngineError> {
        let mut core = self.enter_for_cq(Call::PollCq, cq)?;
        self.inner.count_poll();
        let found = core.adapter.poll_cq_stamped(cq)?;
        if let Some((completion, _)) = found {
            core.poll_hit();
            if core.watched {
                core.watch_poll(cq, &[completion]);
            }
            return Ok(found);
        }
        // What it finds now is not to bear the time of an earlier poll.
        core.want_reading();
        let empty_polls = core.poll();
        let found = core.adapter.poll_cq_stamped(cq)?;
        if let Some((completion, _)) = found.filter(|_| core.watched) {
            core.watch_poll(cq, &[completion]);
        }
        drop(core);
        if found.is_none() {
            self.let_others_run(empty_polls);
        }
        Ok(found)
    }

    /// Counts a look at memory that peers write into without requests as a poll. To the helper thread, a
    /// program that looks there is as busy as one that polls.
    #[inline(always)]
    pub fn count_look(&self) {
        self.inner.count_poll();
    }

    /// Yields now and then, as others may need this processor: the peer may be among them. The caller has
    /// polled, or looked, so often without result.
    #[inline]
    pub fn let_others_run(&self, empty_polls: u32) {
        if empty_polls > 0 && empty_polls.is_multiple_of(YIELD_EVERY_SHARED) {
            self.yield_in_turn(empty_polls);
        }
    }

    #[cold]
    fn yield_in_turn(&self, empty_polls: u32) {
        let after = if self.inner.uniprocessor { YIELD_EVERY_SHARED } else { YIELD_AFTER.get() };
        if empty_polls == 0 || !empty_polls.is_multiple_of(after) {
            return;
        }
        let before = crate::clock::kernel_ns();
        self.inner.yields_since.store(before, Ordering::Relaxed);
        std::thread::yield_now();
        self.inner.yields_since.store(0, Ordering::Relaxed);
        let took = crate::clock::kernel_ns().saturating_sub(before);
        YIELD_AFTER.set(match (took > YIELD_TOOK_NS, after) {
            (true, _) => YIELD_EVERY_SHARED,
            (false, YIELD_EVERY_SHARED) => YIELD_EVERY,
            (false, after) => (after * 2).min(YIELD_EVERY_MAX),
        });
    }

    /// How often queues have been polled so far, but for polls that needed no look.
    #[must_use]
    pub fn polls(&self) -> u64 {
        self.inner.polls.load(Ordering::Relaxed)
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use quipu_nic::{
        AddressVector, Payload, QpAttr, QpAttrMask, QpCap, QpInit, QpState, SendFlags, SendOp, To,
        WqState,
    };

    use super::*;
    use crate::clock::kernel_ns;
    use crate::engine::tests::idle;

    /// More than the engine's clock may differ from the kernel's.
    const SLACK_NS: u64 = 1_000_000;

    /// Who waits for descriptors does not read the clock meanwhile.
    #[test]
    fn completions_of_a_post_are_stamped_behind_it() {
        let engine = idle();
        let (context, _) = engine.open_context().unwrap();
        let pd = engine.alloc_pd().unwrap();
        let (cq, _) = engine.create_cq(context, 8, None, 0).unwrap();
        engine.set_cq_traits(cq, true, false).unwrap();
        let cap = QpCap { max_send_wr: 4, max_recv_wr: 4, ..QpCap::default() };
        let (qp_type, sq_sig_all) = (QpType::Ud, true);
        let init = QpInit { pd, send_cq: cq, recv_cq: cq, srq: None, cap, qp_type, sq_sig_all };
        let [(sends, num, _), (ended, ..)] =
            [(); 2].map(|()| engine.create_qp(context, &init).unwrap());
        let to = |qp, state, mask| {
            let attr = QpAttr { state, port_num: 1, qkey: 5, ..QpAttr::default() };
            engine.modify_qp(qp, &attr, QpAttrMask::STATE | mask).unwrap();
        };
        let first = QpAttrMask::PKEY_INDEX | QpAttrMask::PORT | QpAttrMask::QKEY;
        to(sends, QpState::Init, first);
        to(ended, QpState::Init, first);
        to(sends, QpState::Rtr, QpAttrMask::empty());
        to(sends, QpState::Rts, QpAttrMask::SQ_PSN);
        to(ended, QpState::Err, QpAttrMask::empty());
        let (wq, ..) = engine.create_wq(pd, cq, 4, 1).unwrap();
        engine.modify_wq(wq, None, WqState::Err).unwrap();
        let dgid = engine.gid();
        let av = AddressVector { dgid, is_global: true, port_num: 1, ..AddressVector::default() };
        let ah = engine.create_ah(pd, &av).unwrap();
        let datagram = SendWr {
            wr_id: 1,
            to: To::Datagram { ah, qpn: num.0, qkey: 5 },
            op: SendOp::Send,
            flags: SendFlags::empty(),
            payload: Payload::Sges(&[]),
        };

        let posts: [&dyn Fn(&mut Doorbell<'_>); 3] = [
            &|doorbell| doorbell.post_send(sends, &datagram).unwrap(),
            &|doorbell| doorbell.post_recv(ended, 2, &[]).unwrap(),
            &|doorbell| doorbell.post_wq_recv(wq, 3, &[]).unwrap(),
        ];
        for (post, wr_id) in posts.into_iter().zip(1..) {
            // Nobody else reads the clock meanwhile.
            let core = engine.inner.core.lock();
            std::thread::sleep(Duration::from_millis(20));
            let before = kernel_ns();
            let mut doorbell = Doorbell { core, posted: None };
            post(&mut doorbell);
            drop(doorbell);
            let (completion, stamp) = engine.poll_cq_stamped(cq).unwrap().unwrap();
            assert_eq!(completion.wr_id, wr_id);
            assert!(stamp.0 + SLACK_NS >= before, "{wr_id}");
        }
    }

    /// What a program finds that seldom looks would be stamped with the time of its last looks.
    #[test]
    fn polls_of_a_queue_with_stamps_read_the_clock() {
        let engine = idle();
        let (context, _) = engine.open_context().unwrap();
        let (cq, _) = engine.create_cq(context, 8, None, 0).unwrap();
        engine.set_cq_traits(cq, true, false).unwrap();
        for _ in 0..4 {
            std::thread::sleep(Duration::from_millis(5));
            let before = kernel_ns();
            assert_eq!(engine.poll_cq_stamped(cq).unwrap(), None);
            let recent = engine.inner.core.lock().recent();
            assert!(recent.0 + SLACK_NS >= before);
        }
    }
}
