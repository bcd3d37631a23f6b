//! Steps with a header, a time and a verdict, and the table at the end.

use std::time::{Duration, Instant};

use anyhow::Result;

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
        println!("\n{sum} in {:.0} s", self.begun.elapsed().as_secs_f64());
        sum.failed == 0
    }
}
