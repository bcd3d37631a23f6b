//! Steps with a header, a time and a verdict, and the table at the end.

use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use anyhow::Result;

/// What failed so far, with what it printed last.
static FAILURES: Mutex<Vec<String>> = Mutex::new(Vec::new());
/// Lines of a failure that are said again.
const LINES: usize = 30;

/// Notes a failure, to be said again behind the table: of a long log often only the end is kept.
pub(crate) fn note_failure(text: &str) {
    FAILURES.lock().unwrap_or_else(PoisonError::into_inner).push(shortened(text));
}

/// The first line and the last ones.
fn shortened(text: &str) -> String {
    let mut lines: Vec<_> = text.lines().collect();
    if lines.len() > LINES {
        lines.splice(1..=lines.len() - LINES, ["  ..."]);
    }
    lines.join("\n")
}

/// How many checks of a step passed, failed and were skipped.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Tally {
    pub(crate) passed: usize,
    pub(crate) failed: usize,
    pub(crate) skipped: usize,
}

impl Tally {
    /// One check that passed.
    pub(crate) const ONE: Self = Self { passed: 1, failed: 0, skipped: 0 };
    /// One check that was skipped.
    pub(crate) const SKIPPED: Self = Self { passed: 0, failed: 0, skipped: 1 };

    pub(crate) fn add(&mut self, other: Self) {
        self.passed += other.passed;
        self.failed += other.failed;
        self.skipped += other.skipped;
    }
}

impl std::fmt::Display for Tally {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} passed, {} failed", self.passed, self.failed)?;
        if self.skipped > 0 {
            write!(f, ", {} skipped", self.skipped)?;
        }
        Ok(())
    }
}

/// What became of one step.
struct Line {
    name: &'static str,
    tally: Tally,
    took: Duration,
    remark: String,
}

/// All steps so far.
pub(crate) struct Report {
    total: usize,
    lines: Vec<Line>,
    begun: Instant,
}

impl Report {
    /// A report of `total` steps.
    pub(crate) fn new(total: usize) -> Self {
        Self { total, lines: Vec::new(), begun: Instant::now() }
    }

    /// Runs a step. One that fails does not keep the others from being run.
    pub(crate) fn step(
        &mut self,
        name: &'static str,
        what: &str,
        run: impl FnOnce() -> Result<(Tally, String)>,
    ) {
        println!("\n=== {}/{} {name}: {what}", self.lines.len() + 1, self.total);
        let begun = Instant::now();
        let (tally, remark) = run().unwrap_or_else(|error| {
            println!("{error:#}");
            let first = format!("{error:#}").lines().next().unwrap_or_default().to_owned();
            (Tally { failed: 1, ..Tally::default() }, first)
        });
        let took = begun.elapsed();
        println!("--- {name}: {tally} ({:.1} s)", took.as_secs_f64());
        self.lines.push(Line { name, tally, took, remark });
    }

    /// Prints the table and the last line. True if nothing failed.
    pub(crate) fn finish(&self) -> bool {
        let mut sum = Tally::default();
        println!("\n{:<12} {:>7} {:>7} {:>8} {:>8}", "step", "passed", "failed", "skipped", "time");
        for Line { name, tally, took, remark } in &self.lines {
            sum.add(*tally);
            let Tally { passed, failed, skipped } = tally;
            let took = took.as_secs_f64();
            println!("{name:<12} {passed:>7} {failed:>7} {skipped:>8} {took:>6.1} s  {remark}");
        }
        let failures = FAILURES.lock().unwrap_or_else(PoisonError::into_inner);
        failures.iter().for_each(|failure| println!("\n{failure}"));
        println!("\n{sum} in {:.0} s", self.begun.elapsed().as_secs_f64());
        sum.failed == 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn of_a_long_failure_the_first_line_and_the_last_ones_are_kept() {
        assert_eq!(shortened("one\ntwo"), "one\ntwo");
        let long: Vec<_> = (0..100).map(|number| number.to_string()).collect();
        let short = shortened(&long.join("\n"));
        assert!(short.starts_with("0\n  ...\n71\n") && short.ends_with("\n99"), "{short}");
        assert_eq!(short.lines().count(), LINES + 1);
    }
}
