//! What can be measured: Quipu, a floor, a peer.

use std::collections::BTreeMap;

use anyhow::Result;

use crate::model::{Kind, Path, Role, Sample, Test};

/// What holds for a whole round.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Round {
    /// How long a size is to be measured.
    pub(crate) slice_ns: f64,
    /// The processors of the two ends.
    pub(crate) cpus: [usize; 2],
    /// Messages in flight in a stream.
    pub(crate) depth: u32,
}

/// Something that moves messages and can be measured.
pub(crate) trait Contender {
    /// How it is called.
    fn name(&self) -> &str;
    /// Between which ends it works.
    fn path(&self) -> Path;
    /// What it is in the comparison.
    fn role(&self) -> Role;
    /// Which of the sizes it can be measured with; none if it does not take part in the test.
    fn sizes(&self, test: Test, sizes: &[u64]) -> Vec<u64>;
    /// Measures each size for a slice of time. Nanoseconds per message, as [`Kind`] says.
    ///
    /// # Errors
    ///
    /// It failed; the next round may try again.
    fn run(&mut self, round: &Round, test: Test, sizes: &[u64]) -> Result<Vec<Sample>>;
}

/// How many messages make a slice, learned from round to round.
pub(crate) struct Pace {
    kind: Kind,
    ns: BTreeMap<u64, f64>,
}

/// Bounds of a slice in messages: below, an average says little; above, one slip costs minutes.
const MESSAGES: std::ops::RangeInclusive<f64> = 4.0..=1_000_000.0;

impl Pace {
    pub(crate) fn new(test: Test) -> Self {
        Self { kind: test.kind, ns: BTreeMap::new() }
    }

    pub(crate) fn knows(&self, size: u64) -> bool {
        self.ns.contains_key(&size)
    }

    /// Messages in a slice of `slice_ns`. A guess, pessimistic, until something was learned.
    pub(crate) fn count(&self, size: u64, slice_ns: f64) -> u64 {
        let fixed = match self.kind {
            Kind::Latency => 5_000.0,
            Kind::Stream | Kind::Crowd => 1_000.0,
            Kind::Wake => 60_000.0,
            // How many connections there are is the size.
            Kind::Connect => 1.0,
        };
        let ns = self.ns.get(&size).copied().unwrap_or(fixed + size as f64 / 2.0);
        (slice_ns / ns.max(1.0)).clamp(*MESSAGES.start(), *MESSAGES.end()) as u64
    }

    /// Takes note of what a message took. Moves slowly, as a slice may have been disturbed.
    pub(crate) fn learn(&mut self, size: u64, ns: f64) {
        self.ns.entry(size).and_modify(|known| *known = (*known * ns).sqrt()).or_insert(ns);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::Op;

    #[test]
    fn a_slice_follows_what_was_learned_within_bounds() {
        let mut pace = Pace::new(Test { kind: Kind::Latency, op: Op::Send });
        assert_eq!(pace.count(8, 1e7), 1998);
        pace.learn(8, 500.0);
        assert!(pace.knows(8) && !pace.knows(9));
        assert_eq!(pace.count(8, 1e7), 20_000);
        pace.learn(8, 2_000.0);
        assert_eq!(pace.count(8, 1e7), 10_000);
        assert_eq!(pace.count(8 << 20, 1e6), 4);
    }
}
