//! Completion queues: which work queue has a descriptor that is done.

use std::collections::VecDeque;

use crate::codes::{Code, Outcome};
use crate::vi::Side;

/// Most entries of a completion queue.
pub const MAX_ENTRIES: usize = 1 << 20;

/// One entry for each descriptor that completed. `V` names a VI.
#[derive(Debug)]
pub struct CompletionQueue<V> {
    entries: VecDeque<(V, Side)>,
    capacity: usize,
    /// Whether an entry was lost for lack of room.
    overflowed: bool,
}

impl<V: Copy + PartialEq> CompletionQueue<V> {
    /// An empty queue of `capacity` entries.
    ///
    /// # Errors
    ///
    /// [`Code::InvalidParameter`] for no entries; [`Code::ErrorResource`] for more than [`MAX_ENTRIES`].
    pub fn new(capacity: u64) -> Outcome<Self> {
        let capacity = Self::checked(capacity)?;
        Ok(Self { entries: VecDeque::new(), capacity, overflowed: false })
    }

    fn checked(capacity: u64) -> Outcome<usize> {
        match usize::try_from(capacity) {
            Ok(0) => Err(Code::InvalidParameter),
            Ok(capacity) if capacity <= MAX_ENTRIES => Ok(capacity),
            _ => Err(Code::ErrorResource),
        }
    }

    /// Changes the number of entries it holds.
    ///
    /// # Errors
    ///
    /// As [`new`](Self::new), and [`Code::ErrorResource`] if more are queued; nothing has changed then.
    pub fn resize(&mut self, capacity: u64) -> Outcome {
        let capacity = Self::checked(capacity)?;
        if capacity < self.entries.len() {
            return Err(Code::ErrorResource);
        }
        self.capacity = capacity;
        Ok(())
    }

    /// Appends an entry. Returns false the first time that one is lost for lack of room.
    pub fn push(&mut self, vi: V, side: Side) -> bool {
        if self.entries.len() < self.capacity {
            self.entries.push_back((vi, side));
            return true;
        }
        std::mem::replace(&mut self.overflowed, true)
    }

    /// Takes the oldest entry.
    pub fn pop(&mut self) -> Option<(V, Side)> {
        self.entries.pop_front()
    }

    /// Removes the entries of a VI that is destroyed.
    pub fn forget(&mut self, vi: V) {
        self.entries.retain(|(other, _)| *other != vi);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn entries_come_in_order_and_are_lost_beyond_the_capacity() {
        let mut cq = CompletionQueue::new(2).unwrap();
        assert!(cq.push(1, Side::Send) && cq.push(2, Side::Receive));
        assert!(!cq.push(3, Side::Send), "the first loss is reported");
        assert!(cq.push(3, Side::Send), "and only that");
        assert_eq!(cq.pop(), Some((1, Side::Send)));
        assert_eq!(cq.pop(), Some((2, Side::Receive)));
        assert_eq!(cq.pop(), None);
    }

    #[test]
    fn a_queue_does_not_shrink_below_its_entries() {
        let mut cq = CompletionQueue::new(4).unwrap();
        for vi in 0..3 {
            cq.push(vi, Side::Send);
        }
        assert_eq!(cq.resize(2), Err(Code::ErrorResource));
        assert_eq!(cq.resize(0), Err(Code::InvalidParameter));
        assert_eq!(cq.resize(MAX_ENTRIES as u64 + 1), Err(Code::ErrorResource));
        assert_eq!(cq.resize(3), Ok(()));
        cq.forget(1);
        assert_eq!((cq.pop(), cq.pop()), (Some((0, Side::Send)), Some((2, Side::Send))));
        assert!(CompletionQueue::<u32>::new(0).is_err());
    }
}
