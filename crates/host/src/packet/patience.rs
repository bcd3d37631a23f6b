//! A frame that the kernel refuses for want of room, again and again. A queue of the interface may be full;
//! or the frame is one that something on its way out drops (a filter of tc or nftables, a queue for its class
//! alone), which a packet socket says in the same word, each time.

use std::time::{Duration, Instant};

/// How long a frame is offered: a train of 64 KiB takes as long at 1 Mbit/s, and nothing else is taken then.
const PATIENCE: Duration = Duration::from_millis(500);
/// How long others are not offered again after that, so that many that are dropped do not hold up the rest.
const MEMORY: Duration = Duration::from_secs(1);

/// How often the first frame that waits was refused.
#[derive(Debug, Default)]
pub(super) struct Patience {
    /// When it was first.
    since: Option<Instant>,
    /// When a frame was last offered for so long without result.
    ended: Option<Instant>,
    /// What became of the frame behind that one: if it was taken, there was room, and the one before is of a
    /// kind that is dropped. If not, nothing passes, and the first that does ends it.
    passes: Option<bool>,
}

impl Patience {
    /// The first frame has been taken.
    #[inline]
    pub(super) fn taken(&mut self) {
        self.since = None;
        if self.ended.is_some() && !*self.passes.get_or_insert(true) {
            self.ended = None;
        }
    }

    /// The first frame has been dropped.
    pub(super) fn dropped(&mut self) {
        self.since = None;
    }

    /// The first frame was refused: whether it is to be dropped.
    pub(super) fn is_over(&mut self) -> bool {
        self.is_over_at(Instant::now())
    }

    fn is_over_at(&mut self, now: Instant) -> bool {
        if self.ended.is_some_and(|at| now < at + MEMORY) {
            self.passes.get_or_insert(false);
            return true;
        }
        let since = *self.since.get_or_insert(now);
        let over = now >= since + PATIENCE;
        if over {
            if self.ended.is_none() {
                tracing::warn!(
                    "the interface has taken no frame for {PATIENCE:?}: it is stuck, or a filter \
                     on it drops the adapter's frames"
                );
            }
            (self.ended, self.passes) = (Some(now), None);
        }
        over
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A frame was offered without result, and dropped.
    fn ended(begin: Instant) -> Patience {
        let mut patience = Patience::default();
        assert!(!patience.is_over_at(begin) && patience.is_over_at(begin + PATIENCE));
        patience.dropped();
        patience
    }

    #[test]
    fn a_slow_queue_is_waited_for() {
        let (mut patience, begin) = (Patience::default(), Instant::now());
        for n in 0..10 {
            // Each is taken in the end; the next one has as long.
            let at = begin + n * PATIENCE;
            assert!(!patience.is_over_at(at) && !patience.is_over_at(at + PATIENCE * 9 / 10));
            patience.taken();
        }
    }

    #[test]
    fn a_filter_is_not_waited_for_while_others_pass() {
        let begin = Instant::now();
        let (mut patience, end) = (ended(begin), begin + PATIENCE);
        for n in 0..10 {
            patience.taken();
            assert!(patience.is_over_at(end + MEMORY * n / 10));
            patience.dropped();
        }
        patience.taken();
        // One is offered for long again, now and then.
        assert!(!patience.is_over_at(end + MEMORY));
    }

    #[test]
    fn what_was_stuck_and_sends_again_is_waited_for() {
        let begin = Instant::now();
        let (mut patience, end) = (ended(begin), begin + PATIENCE);
        assert!(patience.is_over_at(end) && patience.is_over_at(end + MEMORY / 2));
        patience.dropped();
        patience.taken();
        assert!(!patience.is_over_at(end + MEMORY / 2));
    }
}
