//! The event kernel: a virtual clock and what is going to happen, in order.

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

/// A virtual clock in nanoseconds and the events ahead of it.
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
    /// The time, in nanoseconds since the run began.
    #[must_use]
    pub fn now(&self) -> u64 {
        self.now
    }

    /// How many events have been scheduled.
    #[must_use]
    pub fn scheduled(&self) -> u64 {
        self.order
    }

    /// Has `event` happen at `at`, or now if that is past.
    pub fn at(&mut self, at: u64, event: E) {
        let order = self.order;
        self.order += 1;
        self.queue.push(Reverse(Scheduled { at: at.max(self.now), order, event }));
    }

    /// Has `event` happen `delay` nanoseconds from now.
    pub fn after(&mut self, delay: u64, event: E) {
        self.at(self.now.saturating_add(delay), event);
    }

    /// The next event, to whose time the clock goes.
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
