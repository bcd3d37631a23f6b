//! The event kernel of the simulators: a virtual clock and the events ahead of it, in order.
//!
//! Two events at one time come out in the order in which they were scheduled, so a run is the same each
//! time. The unit of time is the caller's: `quipu-sim` counts nanoseconds, `quipu-machine` picoseconds.
//!
//! The next events are in a short sorted queue. If that becomes long, the later ones go to a wheel
//! (module `wheel`), which takes and gives an event in constant time. Neither compares more than times:
//! both keep events of one time in their order.
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

use std::collections::VecDeque;

use wheel::{Entry, Wheel};

mod wheel;

/// The sorted queue is full with so many events. Finding a place in it is then as dear as the wheel.
const FULL: usize = 64;

/// A virtual clock and the events ahead of it.
pub struct Kernel<E> {
    now: u64,
    scheduled: u64,
    /// The next events, in order.
    near: VecDeque<Entry<E>>,
    /// Events until here belong to `near`, later ones to the wheel. None: all belong to the wheel.
    until: Option<u64>,
    wheel: Wheel<E>,
}

impl<E> Default for Kernel<E> {
    fn default() -> Self {
        Self {
            now: 0,
            scheduled: 0,
            near: VecDeque::new(),
            until: Some(u64::MAX),
            wheel: Wheel::default(),
        }
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
        self.scheduled
    }

    /// Number of events that are still ahead.
    #[must_use]
    pub fn pending(&self) -> usize {
        self.near.len() + self.wheel.len()
    }

    /// The time of the next event; none if nothing is ahead.
    #[must_use]
    #[inline]
    pub fn next_at(&self) -> Option<u64> {
        match self.near.front() {
            Some(next) => Some(next.at),
            None => self.wheel.next_at(),
        }
    }

    /// Schedules `event` at `at`, or now if that is past.
    pub fn at(&mut self, at: u64, event: E) {
        self.scheduled += 1;
        let entry = Entry { at: at.max(self.now), event };
        if self.near.len() >= FULL {
            self.spill(entry.at);
        }
        if self.until.is_some_and(|until| entry.at <= until) {
            self.insert(entry);
        } else {
            self.wheel.insert(entry);
        }
    }

    /// Schedules `event` after `delay`.
    pub fn after(&mut self, delay: u64, event: E) {
        self.at(self.now.saturating_add(delay), event);
    }

    /// Takes the next event and moves the clock to its time.
    #[allow(clippy::should_implement_trait)]
    pub fn next(&mut self) -> Option<E> {
        if self.near.is_empty() {
            self.until = Some(self.wheel.take(&mut self.near)?);
            if self.wheel.len() == 0 && self.near.len() < FULL {
                self.until = Some(u64::MAX);
            }
        }
        let next = self.near.pop_front()?;
        self.now = next.at;
        Some(next.event)
    }

    /// Puts an event after those of the same time. Most events are later than most others: the search
    /// begins at the end.
    fn insert(&mut self, entry: Entry<E>) {
        let later = self.near.iter().rev().take_while(|other| other.at > entry.at).count();
        if later == 0 {
            self.near.push_back(entry);
        } else {
            self.near.insert(self.near.len() - later, entry);
        }
    }

    /// Moves the sorted queue to the wheel before an event at `at` comes, unless all are of that time.
    fn spill(&mut self, at: u64) {
        let one = |entry: Option<&Entry<E>>| entry.is_some_and(|entry| entry.at == at);
        if one(self.near.front()) && one(self.near.back()) {
            return;
        }
        self.wheel.turn(self.now);
        self.near.drain(..).for_each(|entry| self.wheel.insert(entry));
        self.until = None;
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

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

    /// Runs a kernel and a sorted list with the same events. `delay` draws from two numbers.
    fn compare(steps: u32, mut delay: impl FnMut(u64, u64) -> u64) {
        let mut state = 7u64;
        let mut draw = || {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            state >> 33
        };
        let (mut kernel, mut model) = (Kernel::default(), BTreeMap::new());
        for step in 0..u64::from(steps) {
            // Phases in which events become more, and fewer.
            let more = (step / 1000).is_multiple_of(2);
            if draw().is_multiple_of(4) != more {
                let at = kernel.now().saturating_add(delay(draw(), draw()));
                kernel.at(at, step);
                model.insert((at, step), ());
            } else {
                let expected = model.pop_first().map(|((at, event), ())| (at, event));
                assert_eq!(kernel.next_at(), expected.map(|next| next.0));
                assert_eq!(kernel.next(), expected.map(|next| next.1));
                assert!(expected.is_none_or(|next| kernel.now() == next.0));
            }
            assert_eq!(kernel.pending(), model.len());
        }
        while let Some(event) = kernel.next() {
            assert_eq!(model.pop_first().map(|next| next.0), Some((kernel.now(), event)));
        }
        assert!(model.is_empty());
    }

    #[test]
    fn events_come_in_the_order_of_a_sorted_list() {
        compare(20_000, |a, _| a % 3);
        compare(20_000, |a, _| a % 1_000);
        compare(20_000, |a, b| if a % 8 == 0 { b } else { b % 64 });
        // All orders of magnitude, up to the end of time.
        compare(20_000, |a, b| (b << 33 | b) >> (a % 64));
        compare(2_000, |a, _| if a % 2 == 0 { u64::MAX } else { 0 });
        compare(20_000, |a, b| if a % 100 == 0 { 1 << 40 } else { b % 2 });
    }
}
