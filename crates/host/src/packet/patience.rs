//! A frame that the kernel refuses for want of room, again and again. A queue of the interface may be full;
//! or the frame is one that something on its way out drops (a filter of tc or nftables, a queue for its class
//! alone), which a packet socket says in the same word, each time.

use std::time::{Duration, Instant};

/// How long a frame is offered: the queue of an interface that sends has had room long before.
const PATIENCE: Duration = Duration::from_millis(10);
/// How long others are not offered again after that, so that many that are dropped do not hold up the rest.
const MEMORY: Duration = Duration::from_secs(1);

/// How often the first frame that waits was refused.
#[derive(Debug, Default)]
pub(super) struct Patience {
    /// When it was first.
    since: Option<Instant>,
    /// When a frame was last offered for so long in vain.
    ended: Option<Instant>,
}

impl Patience {
    /// The first frame has been taken, or dropped.
    #[inline]
    pub(super) fn begin_anew(&mut self) {
        self.since = None;
    }

    /// The first frame was refused: whether it is to be dropped.
    pub(super) fn is_over(&mut self) -> bool {
        self.is_over_at(Instant::now())
    }

    fn is_over_at(&mut self, now: Instant) -> bool {
        if self.ended.is_some_and(|at| now < at + MEMORY) {
            return true;
        }
        let since = *self.since.get_or_insert(now);
        let over = now >= since + PATIENCE;
        if over {
            if self.ended.is_none() {
                tracing::warn!("something on the interface drops frames that the adapter sends");
            }
            self.ended = Some(now);
        }
        over
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_full_queue_is_waited_for_and_a_filter_is_not() {
        let (mut patience, begin) = (Patience::default(), Instant::now());
        assert!(!patience.is_over_at(begin) && !patience.is_over_at(begin + PATIENCE / 2));
        // It was taken; the next one has as long.
        patience.begin_anew();
        let next = begin + PATIENCE;
        assert!(!patience.is_over_at(next) && patience.is_over_at(next + PATIENCE));
        // Those behind it wait no more, but for one in a while.
        patience.begin_anew();
        assert!(patience.is_over_at(next + PATIENCE) && patience.is_over_at(next + MEMORY));
        patience.begin_anew();
        assert!(!patience.is_over_at(next + PATIENCE + MEMORY));
    }
}
