//! The requests of one queue, as the program's end knows them.

use std::collections::VecDeque;

/// Room that is made for a queue at once, whatever its depth is said to be.
const MAX_DEPTH: u32 = 1 << 15;

/// A request under way.
#[derive(Clone, Copy, Debug)]
pub(super) struct Posted {
    pub(super) wr_id: u64,
    /// Octets of its memory.
    pub(super) len: u64,
    /// Whether the program is told of a success.
    pub(super) signaled: bool,
    done: bool,
}

/// A completion that cannot be: of more octets than its request has memory for, or of one that the adapter
/// cannot have seen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Impossible;

/// The requests of one queue that are under way, or before such ones.
#[derive(Debug)]
pub(super) struct Queue {
    requests: VecDeque<Posted>,
    /// How many of them are done, or before one that is.
    reached: usize,
    /// The sequence number of the next request.
    pub(super) next: u32,
    /// How many of the newest wait for room in the ring.
    pub(super) waiting: u32,
    depth: u32,
    /// Behind the newest request whose place is known to be free again.
    taken: u32,
    /// Requests behind the last that tells when it is done.
    silent: u32,
}

impl Queue {
    pub(super) fn new(depth: u32) -> Self {
        Self {
            requests: VecDeque::with_capacity(depth.min(MAX_DEPTH) as usize),
            reached: 0,
            next: 0,
            waiting: 0,
            depth,
            taken: 0,
            silent: 0,
        }
    }

    /// Whether the next request is to tell when it is done: if the program wants to know, or so many before
    /// it do not, as only what tells makes room again.
    #[inline]
    pub(super) fn must_tell(&self, signaled: bool) -> bool {
        signaled || self.silent >= self.depth / 4
    }

    /// Whether the queue has room. A request keeps its place until its completion was taken, as in an engine
    /// of one's own, so that programs which post as long as there is room overrun no completion queue; how
    /// many are `unread` is looked up only where it seems full.
    #[inline]
    pub(super) fn has_room(&mut self, unread: impl FnOnce() -> u32) -> bool {
        !self.seems_full() || self.taken_but(unread())
    }

    #[inline]
    fn seems_full(&self) -> bool {
        self.next.wrapping_sub(self.taken) >= self.depth
    }

    #[cold]
    fn taken_but(&mut self, unread: u32) -> bool {
        self.taken = self.next.wrapping_sub(self.requests.len() as u32).wrapping_sub(unread);
        !self.seems_full()
    }

    #[inline]
    pub(super) fn push(&mut self, wr_id: u64, len: u64, signaled: bool) {
        self.silent = if self.must_tell(signaled) { 0 } else { self.silent + 1 };
        self.requests.push_back(Posted { wr_id, len, signaled, done: false });
        self.next = self.next.wrapping_add(1);
    }

    fn index(&self, sequence: u32) -> usize {
        let oldest = self.next.wrapping_sub(self.requests.len() as u32);
        sequence.wrapping_sub(oldest) as usize
    }

    /// The request of a number is done, with so many octets of its memory; `Ok(None)` if it is not under way.
    /// Those before it that nobody is told of are, too.
    ///
    /// # Errors
    ///
    /// It has not so much memory, or is not in the ring yet.
    #[inline]
    pub(super) fn finish(
        &mut self,
        sequence: u32,
        octets: u64,
    ) -> Result<Option<Posted>, Impossible> {
        let newer = self.next.wrapping_sub(sequence).wrapping_sub(1);
        if newer < self.waiting {
            return Err(Impossible);
        }
        let index = self.index(sequence);
        let Some(posted) = self.requests.get_mut(index).filter(|posted| !posted.done) else {
            return Ok(None);
        };
        if octets > posted.len {
            return Err(Impossible);
        }
        posted.done = true;
        let posted = *posted;
        self.reached = self.reached.max(index + 1);
        while self.reached > 0
            && self.requests.front().is_some_and(|first| first.done || !first.signaled)
        {
            self.requests.pop_front();
            self.reached -= 1;
        }
        Ok(Some(posted))
    }

    /// Forgets everything that is under way. What waits for the ring goes there all the same.
    pub(super) fn clear(&mut self) {
        let (next, waiting) = (self.next, self.waiting);
        *self = Self { next, waiting, taken: next, ..Self::new(self.depth) };
    }

    /// Takes everything that is under way.
    pub(super) fn flush(&mut self) -> impl Iterator<Item = Posted> {
        std::mem::take(&mut self.requests).into_iter().filter(|posted| !posted.done)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_so_many_requests_one_tells_when_it_is_done() {
        let mut queue = Queue::new(8);
        let tells = |queue: &mut Queue, signaled| {
            let tells = queue.must_tell(signaled);
            queue.push(0, 0, signaled);
            tells
        };
        let told: Vec<_> = (0..8).map(|index| tells(&mut queue, index == 3)).collect();
        assert_eq!(told, [false, false, true, true, false, false, true, false]);
        // A program that asks often enough is told of nothing else.
        let mut queue = Queue::new(64);
        assert!((0..64).all(|at| tells(&mut queue, at % 16 == 15) == (at % 16 == 15)));
        assert!(Queue::new(1).must_tell(false));
    }

    #[test]
    fn a_queue_knows_what_is_under_way() {
        let mut queue = Queue::new(4);
        for (wr_id, signaled) in [(10, true), (11, false), (12, true), (13, false)] {
            queue.push(wr_id, 1, signaled);
        }
        assert!(!queue.has_room(|| 0));
        // Out of order, twice, and never posted.
        let mut finish = |sequence, octets| {
            queue.finish(sequence, octets).map(|posted| posted.map(|posted| posted.wr_id))
        };
        assert_eq!(finish(2, 1), Ok(Some(12)));
        assert_eq!([2, 4, u32::MAX].map(|sequence| finish(sequence, 1)), [Ok(None); 3]);
        assert_eq!((finish(0, 2), finish(0, 1)), (Err(Impossible), Ok(Some(10))));
        // 11 was not asked for, and is behind what is done: only 13 is left.
        assert_eq!(queue.requests.len(), 1);
        // A completion that was not taken keeps its place.
        assert_eq!([3, 2].map(|unread| queue.has_room(|| unread)), [false, true]);
        queue.push(14, 1, true);
        assert!(!queue.has_room(|| 2) && queue.has_room(|| 1));
        let left: Vec<_> = queue.flush().map(|posted| posted.wr_id).collect();
        assert_eq!(left, [13, 14]);
        assert_eq!(queue.finish(4, 0).map(|posted| posted.is_none()), Ok(true));
    }

    #[test]
    fn what_waits_for_the_ring_cannot_be_done() {
        let mut queue = Queue::new(4);
        (0..3).for_each(|wr_id| queue.push(wr_id, 1, true));
        queue.waiting = 2;
        let mut finish = |sequence| queue.finish(sequence, 0).map(|posted| posted.is_some());
        let found = [u32::MAX, 0, 1, 2, 3].map(&mut finish);
        let never = Err(Impossible);
        assert_eq!(found, [Ok(false), Ok(true), never, never, Ok(false)]);
        // Of a queue that is reset they are not known any more, but still not done.
        queue.clear();
        assert_eq!(queue.finish(2, 0).err(), Some(Impossible));
        queue.waiting -= 1;
        assert!(matches!(queue.finish(1, 0), Ok(None)));
    }
}
