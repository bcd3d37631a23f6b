//! rdma-core's own test suite, of which the distribution's Python bindings bring a copy: the modules that
//! belong to no vendor. A test passes, or is skipped for a reason that `suite-skips.txt` allows it.

use std::process::Command;

use crate::process::{Ended, capture};
use crate::stage::Staged;

use super::hosts::Family;
use super::{LIMIT, Row};

/// Each module with the tests that it has in the distribution's version: fewer, and something was not run.
const MODULES: [(&str, usize); 20] = [
    ("addr", 3),
    ("atomic", 9),
    ("cq", 4),
    ("cq_events", 2),
    ("cqex", 5),
    ("cuda_dmabuf", 1),
    ("device", 22),
    ("flow", 5),
    ("fork", 1),
    ("mr", 27),
    ("odp", 17),
    ("parent_domain", 6),
    ("pd", 4),
    ("qp", 26),
    ("qpex", 20),
    ("rdmacm", 10),
    ("relaxed_ordering", 3),
    ("rss_traffic", 1),
    ("shared_pd", 1),
    ("tag_matching", 4),
];

const RUNNER: &str = include_str!("../../../tests/clients/suite.py");
const SKIPS: &str = include_str!("../../../tests/clients/suite-skips.txt");
/// The distribution's interpreter, for which its bindings are.
pub(super) const PYTHON: &str = "/usr/bin/python3";

/// One row for each module.
pub(super) fn rows(staged: &Staged) -> Vec<Row<'_>> {
    MODULES.iter().map(|&(module, count)| row(staged, module, count)).collect()
}

fn row<'a>(staged: &'a Staged, module: &'static str, count: usize) -> Row<'a> {
    Row {
        name: format!("one-host/suite/{module}"),
        run: Box::new(move || {
            let ended = run(staged, module)?;
            let said = judge(&ended.stdout, count);
            let whole = |why| format!("  {why}\n{}", ended.text(module));
            if ended.success() { said.map_err(whole) } else { Err(whole(ended.verdict())) }
        }),
    }
}

fn run(staged: &Staged, module: &str) -> Result<Ended, String> {
    let front = staged.run(Family::V4.loopback());
    let mut command = Command::new(&front[0]);
    command.args(&front[1..]).args([PYTHON, "-c", RUNNER, "quipu0", module]);
    capture(command, LIMIT).map_err(|error| format!("{error:#}"))
}

/// Judges what the runner said of each test.
fn judge(output: &str, count: usize) -> Result<(), String> {
    let tests: Vec<&str> = output.lines().filter_map(|line| line.strip_prefix('\t')).collect();
    if tests.len() < count {
        return Err(format!("{} tests where there are {count}", tests.len()));
    }
    let bad: Vec<&str> = tests.into_iter().filter(|test| !is_good(test)).collect();
    if bad.is_empty() { Ok(()) } else { Err(bad.join("\n  ")) }
}

/// Whether a test passed, or may be skipped.
fn is_good(line: &str) -> bool {
    let mut words = line.split_whitespace();
    match (words.next(), words.next()) {
        (Some("ok"), Some(_)) => true,
        (Some("skipped"), Some(name)) => allowed().any(|pattern| matches(pattern, name)),
        _ => false,
    }
}

/// The names of tests that may be skipped.
fn allowed() -> impl Iterator<Item = &'static str> {
    SKIPS.lines().filter(|line| !line.starts_with('#')).filter_map(|l| l.split_whitespace().next())
}

fn matches(pattern: &str, name: &str) -> bool {
    pattern.strip_suffix('*').map_or(pattern == name, |start| name.starts_with(start))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_outcome_is_judged() {
        assert!(is_good("ok test_pd.PDTest.test_alloc_pd"));
        assert!(!is_good("failed test_pd.PDTest.test_alloc_pd Error: no"));
        assert!(!is_good("skipped test_pd.PDTest.test_alloc_pd no device"));
        assert!(!is_good("") && !is_good("ok"));
        let skip = allowed().next().expect("some are allowed").replace('*', "x");
        assert!(is_good(&format!("skipped {skip} for a reason")));
        assert!(judge("noise\n\tok a.b.c\nnoise\n", 1).is_ok());
        assert!(judge("ok a.b.c\n", 1).is_err(), "only marked lines count");
        assert!(judge("\tok a.b.c\n\tfailed a.b.d\n", 2).is_err());
    }

    #[test]
    fn every_allowance_names_its_reason() {
        let reasons: Vec<&str> = SKIPS
            .lines()
            .filter_map(|line| line.strip_prefix("#   ")?.split_whitespace().next())
            .collect();
        for line in SKIPS.lines().filter(|line| !line.starts_with('#') && !line.is_empty()) {
            let words: Vec<&str> = line.split_whitespace().collect();
            assert!(words.len() == 2 && reasons.contains(&words[1]), "{line}");
        }
    }
}
