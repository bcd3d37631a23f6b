//! When the completion queue of sends is worth a poll.

/// The number of a send that asks for a completion only to make room in the send queue.
const CHECKPOINT: u64 = 0;
/// Completions of such sends that are taken together. A queue has room for many more sends than these
/// stand for.
const CHECKPOINTS_PER_POLL: u32 = 2;

/// Posts whose completions are to come.
#[derive(Debug, Default)]
pub(super) struct Signaled {
    /// Those that the engine waits for: a buffer or a source is free then, a get is done.
    awaited: u32,
    /// Those that only make room in a send queue, since the last poll.
    checkpoints: u32,
}

impl Signaled {
    /// Counts a post.
    #[inline]
    pub(super) fn add(&mut self, number: u64) {
        match number {
            CHECKPOINT => self.checkpoints += 1,
            _ => self.awaited += 1,
        }
    }

    /// A completion with that number has come.
    #[inline]
    pub(super) fn take(&mut self, number: u64) {
        if number != CHECKPOINT {
            self.awaited = self.awaited.saturating_sub(1);
        }
    }

    /// Whether the queue may have something that the engine waits for.
    #[inline]
    pub(super) fn is_worth_a_poll(&self) -> bool {
        self.awaited > 0 || self.checkpoints >= CHECKPOINTS_PER_POLL
    }

    /// The queue is about to be polled.
    pub(super) fn note_poll(&mut self) {
        self.checkpoints = 0;
    }

    /// No queue pair is left.
    pub(super) fn forget(&mut self) {
        *self = Self::default();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_queue_is_polled_while_something_is_awaited() {
        let mut signaled = Signaled::default();
        signaled.add(CHECKPOINT);
        assert!(!signaled.is_worth_a_poll());
        signaled.add(CHECKPOINT);
        assert!(signaled.is_worth_a_poll());
        signaled.note_poll();
        assert!(!signaled.is_worth_a_poll());
        signaled.add(7);
        signaled.note_poll();
        assert!(signaled.is_worth_a_poll(), "until it has come");
        signaled.take(CHECKPOINT);
        assert!(signaled.is_worth_a_poll());
        signaled.take(7);
        assert!(!signaled.is_worth_a_poll());
        signaled.take(7);
        assert!(
            !signaled.is_worth_a_poll(),
            "a queue pair that fails completes more than was asked for"
        );
    }
}
