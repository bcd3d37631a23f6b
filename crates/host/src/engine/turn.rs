//! Which polls look, where a program polls several completion queues in turn.

use std::sync::atomic::{AtomicU64, Ordering};

use quipu_nic::CqId;

/// Queues that one look serves.
const QUEUES: u8 = 8;

/// A look serves all queues. Programs that poll several in turn (middleware has one for sends and one for
/// receives) would look once for each, and notice what comes all the later: so polls of other queues behind a
/// look that found nothing do without, each once, until the turn is over.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct LastLook(Option<Vain>);

/// A look that found nothing.
#[derive(Clone, Copy, Debug)]
struct Vain {
    /// The queue that it was made for.
    cq: CqId,
    /// The queue that was polled last.
    last: CqId,
    /// How many polls did without one since.
    spared: u8,
}

impl LastLook {
    /// Whether a poll of `cq` need not look.
    #[inline]
    pub(crate) fn serves(&mut self, cq: CqId) -> bool {
        let serves = self.would_serve(cq);
        if let Some(vain) = self.0.as_mut().filter(|_| serves) {
            vain.last = cq;
            vain.spared += 1;
        }
        serves
    }

    /// Whether the last look would, for the next poll.
    #[inline]
    pub(super) fn would_serve(&self, cq: CqId) -> bool {
        self.0.is_some_and(|vain| vain.cq != cq && vain.last != cq && vain.spared < QUEUES - 1)
    }

    /// A look for `cq` was without result, or not.
    #[inline]
    pub(crate) fn made(&mut self, cq: CqId, in_vain: bool) {
        self.0 = in_vain.then_some(Vain { cq, last: cq, spared: 0 });
    }

    /// The queue that was polled between the last look, which was without result, and one for `cq`.
    #[inline(always)]
    pub(super) fn polled_between(&self, cq: CqId) -> Option<CqId> {
        match self.0 {
            Some(Vain { last, .. }) if last != cq => Some(last),
            _ => None,
        }
    }

    /// As [`made`](Self::made) in vain, where the next poll of `spared` counts as done without a look.
    #[inline(always)]
    pub(super) fn made_in_turn(&mut self, cq: CqId, spared: Option<CqId>) {
        let last = spared.unwrap_or(cq);
        self.0 = Some(Vain { cq, last, spared: spared.is_some().into() });
    }

    /// There were completions: what comes of them is looked for.
    #[inline]
    pub(crate) fn forget(&mut self) {
        self.0 = None;
    }
}

/// The queue whose next poll does without a look, as [`LastLook`] has found already, and so needs not even
/// the engine's lock. Anyone who takes that, so that something may come into the queue, takes this back.
pub(super) struct Spared(AtomicU64);

impl Spared {
    const NONE: u64 = u64::MAX;

    pub(super) fn new() -> Self {
        Self(AtomicU64::new(Self::NONE))
    }

    /// Whether it is `cq`; once.
    #[inline(always)]
    pub(super) fn take(&self, cq: CqId) -> bool {
        let is = self.0.load(Ordering::Relaxed) == cq.0;
        if is {
            self.clear();
        }
        is
    }

    /// The lock is held.
    #[inline(always)]
    pub(super) fn clear(&self) {
        self.0.store(Self::NONE, Ordering::Relaxed);
    }

    /// The lock is held.
    #[inline(always)]
    pub(super) fn set(&self, cq: Option<CqId>) {
        self.0.store(cq.map_or(Self::NONE, |cq| cq.0), Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use quipu_nic::{Completion, Time};

    use super::*;

    /// Polls queues that stay empty in this order; those whose polls looked.
    fn looks(last: &mut LastLook, order: &[u64]) -> Vec<u64> {
        let looks = |cq: &u64| {
            let cq = CqId(*cq);
            let looks = !last.serves(cq);
            if looks {
                last.made(cq, true);
            }
            looks
        };
        order.iter().copied().filter(looks).collect()
    }

    #[test]
    fn a_quick_look_serves_the_other_queues_of_a_turn_too() {
        let engine = crate::engine::tests::idle();
        let (context, _) = engine.open_context().unwrap();
        let queue = || engine.create_cq(context, 4, None, 0).unwrap().0;
        let (one, other) = (queue(), queue());
        let left = || engine.inner.core.lock().calm;
        let poll = |cq| {
            assert_eq!(engine.poll_cq_each(cq, 1, |_| {}).unwrap(), 0);
            left()
        };
        let [.., before] = [one; 3].map(poll);
        assert!(before > 2);
        assert_eq!([other, one, other, other].map(poll), [0, 1, 1, 2].map(|looks| before - looks));
        // What is there is found without a look.
        let done = Completion { wr_id: 7, ..Completion::default() };
        engine.inner.core.lock().adapter.complete(Time(0), one, done);
        let mut found = Vec::new();
        engine.poll_cq_each(one, 1, |completion| found.push(completion.wr_id)).unwrap();
        assert_eq!(found, [7]);
    }

    #[test]
    fn a_queue_that_is_polled_between_looks_is_spared_without_the_lock() {
        let engine = crate::engine::tests::idle();
        let (context, _) = engine.open_context().unwrap();
        let queue = || engine.create_cq(context, 4, None, 0).unwrap().0;
        let (one, other) = (queue(), queue());
        let poll = |cq| assert_eq!(engine.poll_cq_each(cq, 1, |_| {}).unwrap(), 0);
        [one; 3].into_iter().for_each(poll);
        [other, one].into_iter().for_each(poll);
        let spared = &engine.inner.spared;
        let core = engine.inner.core.lock();
        // This would wait for the lock.
        poll(other);
        drop(core);
        assert!(!spared.take(other), "once");
        poll(one);
        drop(engine.enter().unwrap());
        assert!(!spared.take(other), "something may have come");
        [other, one].into_iter().for_each(poll);
        let done = Completion { wr_id: 7, ..Completion::default() };
        engine.enter().unwrap().adapter.complete(Time(0), other, done);
        let mut found = Vec::new();
        engine.poll_cq_each(other, 1, |completion| found.push(completion.wr_id)).unwrap();
        assert_eq!(found, [7]);
    }

    #[test]
    fn one_look_serves_a_turn_of_polls() {
        let mut last = LastLook::default();
        assert_eq!(looks(&mut last, &[1, 2, 1, 2, 1, 2]), [1, 1, 1]);
        assert_eq!(looks(&mut last, &[3, 4, 5, 1, 3, 4, 5]), [1]);
    }

    #[test]
    fn whoever_polls_one_queue_looks() {
        let mut last = LastLook::default();
        assert_eq!(looks(&mut last, &[1, 1, 1]), [1, 1, 1]);
        assert_eq!(looks(&mut last, &[2, 2, 2]), [2, 2], "the first was served");
        last.forget();
        assert_eq!(looks(&mut last, &[3]), [3]);
    }

    #[test]
    fn a_queue_that_is_polled_no_more_holds_up_nobody() {
        let mut last = LastLook::default();
        assert_eq!(looks(&mut last, &[1]), [1]);
        assert_eq!(looks(&mut last, &[2, 3, 2, 3, 2, 3, 2, 3, 2, 3]), [3, 3]);
    }
}
