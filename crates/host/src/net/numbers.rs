//! Queue pair numbers: which are in use, and which comes next.
//!
//! A number is a port and an index behind it, so each listening port gives 256. A number that was
//! freed is used again as late as possible: a peer that still speaks of the old queue pair should
//! find nobody, not a stranger.

use std::collections::VecDeque;

use quipu_nic::QpNum;

/// Indexes behind one port.
const PER_PORT: usize = 256;
/// While fewer numbers than this are free, another port is wanted.
const RESERVE: usize = 64;

/// The numbers of one engine.
#[derive(Debug, Default)]
pub(crate) struct Numbers {
    free: VecDeque<QpNum>,
    ports: usize,
}

impl Numbers {
    /// True if another port should be opened before the next number is taken: there are few free
    /// ones, so that they would be used again soon.
    pub(crate) fn wants_port(&self) -> bool {
        self.ports == 0 || self.free.len() < RESERVE
    }

    /// Adds the numbers behind a port.
    pub(crate) fn add_port(&mut self, port: u16) {
        self.ports += 1;
        // New numbers go first: they have never been used.
        for index in (0..PER_PORT).rev() {
            self.free.push_front(QpNum::new(port, index as u8));
        }
    }

    /// The number that has been free for longest.
    pub(crate) fn take(&mut self) -> Option<QpNum> {
        self.free.pop_front()
    }

    /// Gives a number back.
    pub(crate) fn give_back(&mut self, number: QpNum) {
        self.free.push_back(number);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_come_back_only_after_a_round() {
        let mut numbers = Numbers::default();
        assert!(numbers.wants_port());
        numbers.add_port(5000);
        let first = numbers.take().unwrap();
        assert_eq!(first, QpNum(5000 << 8));
        numbers.give_back(first);
        let round: Vec<_> = (0..PER_PORT).map(|_| numbers.take().unwrap()).collect();
        assert_eq!(round[PER_PORT - 1], first);
        assert!(numbers.wants_port() && numbers.take().is_none());
    }

    #[test]
    fn ten_thousand_need_forty_ports() {
        let mut numbers = Numbers::default();
        let mut seen = std::collections::BTreeSet::new();
        for _ in 0..10_000 {
            if numbers.wants_port() {
                numbers.add_port(5000 + numbers.ports as u16);
            }
            assert!(seen.insert(numbers.take().unwrap()));
        }
        assert_eq!(numbers.ports, 40);
    }
}
