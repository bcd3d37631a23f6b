//! The event kernel of the simulators: a virtual clock and the events ahead of it, in order.
//!
//! Two events at one time come out in the order in which they were scheduled, so a run is the same each
//! time. The unit of time is the caller's: `quipu-sim` counts nanoseconds, `quipu-machine` picoseconds.
//!
//! ```
//! use quipu_events::Kernel;
//!
//! let mut kernel = Kernel::default();
//! kernel.at(20, "second");
//! kernel.after(10, "first");
//! assert_eq!(kernel.next(), Some("first"));
//! assert_eq!(kernel.now(), 10);
//! ```
#![forbid(unsafe_code)]

use std::cmp::Reverse;
use std::collections::BinaryHeap;

/// Something that happens at a time. Of two at one time, the one scheduled first happens first.
struct Scheduled<E> {
    at: u64,
    order: u64,
    event: E,
}

impl<E> PartialEq for Scheduled<E> {
    fn eq(&self, other: &Self) -> bool {
        (self.at, self.order) == (other.at, other.order)
    }
}

impl<E> Eq for Scheduled<E> {}

impl<E> PartialOrd for Scheduled<E> {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl<E> Ord for Scheduled<E> {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        (self.at, self.order).cmp(&(other.at, other.order))
    }
}

/// A virtual clock and the events ahead of it.
pub struct Kernel<E> {
    now: u64,
    order: u64,
    queue: BinaryHeap<Reverse<Scheduled<E>>>,
}

impl<E> Default for Kernel<E> {
    fn default() -> Self {
        Self { now: 0, order: 0, queue: BinaryHeap::new() }
    }
}

impl<E> Kernel<E> {
    /// The time since the run began.
    #[must_use]
    #[inline]
    pub fn now(&self) -> u64 {
        self.now
    }

    /// How many events have been scheduled.
    #[must_use]
    pub fn scheduled(&self) -> u64 {
        self.order
    }

    /// Number of events that are still ahead.
    #[must_use]
    pub fn pending(&self) -> usize {
        self.queue.len()
    }

    /// The time of the next event; none if nothing is ahead.
    #[must_use]
    pub fn next_at(&self) -> Option<u64> {
        self.queue.peek().map(|Reverse(next)| next.at)
    }

    /// Schedules `event` at `at`, or now if that is past.
    pub fn at(&mut self, at: u64, event: E) {
        let order = self.order;
        self.order += 1;
        self.queue.push(Reverse(Scheduled { at: at.max(self.now), order, event }));
    }

    /// Schedules `event` after `delay`.
    pub fn after(&mut self, delay: u64, event: E) {
        self.at(self.now.saturating_add(delay), event);
    }

    /// Takes the next event and moves the clock to its time.
    #[allow(clippy::should_implement_trait)]
    pub fn next(&mut self) -> Option<E> {
        let Reverse(next) = self.queue.pop()?;
        self.now = next.at;
        Some(next.event)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn events_come_in_order_of_time_and_then_of_scheduling() {
        let mut kernel = Kernel::default();
        kernel.at(20, 'c');
        kernel.at(10, 'a');
        kernel.at(20, 'd');
        kernel.at(10, 'b');
        let mut seen = String::new();
        while let Some(event) = kernel.next() {
            seen.push(event);
            if event == 'b' {
                kernel.at(5, 'x');
                assert_eq!(kernel.now(), 10, "the past is now");
            }
        }
        assert_eq!((seen.as_str(), kernel.now()), ("abxcd", 20));
    }
}
