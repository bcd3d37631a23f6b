//! What became of the tests of a suite.

use std::collections::BTreeMap;
use std::fmt;

/// What became of one test.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Outcome {
    Passed,
    Skipped,
    Failed,
}

/// What became of all tests of a suite, by name.
#[derive(Clone, Debug, Default)]
pub(crate) struct Results(BTreeMap<String, Outcome>);

impl Results {
    /// Notes a test. One that comes twice has failed if it has failed once.
    pub(crate) fn add(&mut self, name: &str, outcome: Outcome) {
        let now = self.0.entry(name.to_owned()).or_insert(outcome);
        if outcome == Outcome::Failed {
            *now = outcome;
        }
    }

    /// Whether a test has failed.
    pub(crate) fn has_failed(&self) -> bool {
        self.0.values().any(|outcome| *outcome == Outcome::Failed)
    }

    /// The first test that was skipped.
    pub(crate) fn first_skipped(&self) -> Option<&str> {
        let mut skipped = self.0.iter().filter(|(_, outcome)| **outcome == Outcome::Skipped);
        skipped.next().map(|(name, _)| name.as_str())
    }

    /// Tests that pass in another run, and fail, are skipped or missing in this one; and those that fail here
    /// only.
    pub(crate) fn worse_than(&self, other: &Self) -> Vec<String> {
        let is_worse = |name: &&String| {
            let (here, there) = (self.0.get(*name), other.0.get(*name));
            match there {
                Some(Outcome::Passed) => here != Some(&Outcome::Passed),
                Some(Outcome::Failed) => false,
                Some(Outcome::Skipped) | None => here == Some(&Outcome::Failed),
            }
        };
        let mut names: Vec<String> =
            self.0.keys().chain(other.0.keys()).filter(is_worse).cloned().collect();
        names.sort();
        names.dedup();
        names
    }

    /// How many there are of each.
    pub(crate) fn tally(&self) -> Tally {
        let count = |which| self.0.values().filter(|outcome| **outcome == which).count();
        Tally {
            passed: count(Outcome::Passed),
            failed: count(Outcome::Failed),
            skipped: count(Outcome::Skipped),
        }
    }
}

/// How many tests passed, failed and were skipped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Tally {
    passed: usize,
    failed: usize,
    skipped: usize,
}

impl fmt::Display for Tally {
    fn fmt(&self, to: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(to, "{} passed, {} failed, {} skipped", self.passed, self.failed, self.skipped)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn results(list: &[(&str, Outcome)]) -> Results {
        let mut results = Results::default();
        list.iter().for_each(|(name, outcome)| results.add(name, *outcome));
        results
    }

    #[test]
    fn a_test_that_does_not_pass_in_one_run_only_is_worse_there() {
        use Outcome::{Failed, Passed, Skipped};
        let plain =
            results(&[("a", Passed), ("b", Passed), ("c", Passed), ("d", Failed), ("e", Skipped)]);
        let quipu =
            results(&[("a", Passed), ("b", Failed), ("d", Failed), ("e", Failed), ("f", Failed)]);
        assert_eq!(quipu.worse_than(&plain), ["b", "c", "e", "f"]);
        assert!(plain.worse_than(&plain).is_empty());
        assert_eq!(quipu.tally(), Tally { passed: 1, failed: 4, skipped: 0 });
    }

    #[test]
    fn a_test_that_comes_twice_has_failed_if_it_failed_once() {
        use Outcome::{Failed, Passed};
        assert!(results(&[("a", Passed), ("a", Failed)]).has_failed());
        assert!(results(&[("a", Failed), ("a", Passed)]).has_failed());
    }
}
