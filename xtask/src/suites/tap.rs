//! Suites that print their results in the TAP form: the programs in `tests/suites`, and libuv's tests.

use std::path::Path;
use std::process::Command;
use std::time::Duration;

use anyhow::Result;

use super::results::{Outcome, Results};
use super::{Prefix, Suite};
use crate::process::{Ended, capture};

/// Programs that `tests/suites/programs.py` has a job for.
const PROGRAMS: [&str; 15] = [
    "redis",
    "nginx",
    "haproxy",
    "http_server",
    "postgres",
    "memcached",
    "ssh",
    "node",
    "java",
    "go",
    "rsync",
    "socat",
    "iperf3",
    "sockperf",
    "stress",
];

/// The programs of `tests/suites`.
pub(crate) fn programs() -> Vec<Suite> {
    let suite = |name: &'static str| Suite {
        name: format!("programs/{name}"),
        run: Box::new(move |prefix, limit| program(name, prefix, limit)),
    };
    PROGRAMS.into_iter().map(suite).collect()
}

fn program(name: &str, prefix: &Prefix, limit: Duration) -> Result<Results> {
    let mut command = Command::new("python3");
    command.arg(crate::root().join("tests/suites/programs.py")).arg(name);
    command.env("RUN", prefix.join(" "));
    Ok(read(&capture(command, limit)?))
}

/// libuv's own tests.
pub(crate) fn libuv(program: &Path) -> Suite {
    let program = program.to_path_buf();
    let run = move |prefix: &Prefix, limit: Duration| {
        let mut words = prefix.iter();
        let mut command = match words.next() {
            Some(first) => Command::new(first),
            None => Command::new(&program),
        };
        command.args(words);
        if !prefix.is_empty() {
            command.arg(&program);
        }
        let folder = program.parent().filter(|folder| !folder.as_os_str().is_empty());
        command.current_dir(folder.unwrap_or(Path::new("."))).env("UV_RUN_AS_ROOT", "1");
        Ok(read(&capture(command, limit)?))
    };
    Suite { name: "libuv".into(), run: Box::new(run) }
}

/// The results in what a suite has printed.
pub(crate) fn read(ended: &Ended) -> Results {
    let mut results = Results::default();
    ended.stdout.lines().filter_map(result).for_each(|(name, outcome)| results.add(name, outcome));
    if !ended.success() && !results.has_failed() {
        let last = ended.stderr.lines().last().unwrap_or("");
        results.add(&format!("the suite {} {last}", ended.verdict()), Outcome::Failed);
    }
    results
}

/// Name and outcome in a line, if it has a result: `ok 1 - NAME # SKIP REASON`.
fn result(line: &str) -> Option<(&str, Outcome)> {
    let (rest, outcome) = match line.strip_prefix("not ok ") {
        Some(rest) => (rest, Outcome::Failed),
        None => (line.strip_prefix("ok ")?, Outcome::Passed),
    };
    let (number, name) = rest.split_once(' ')?;
    number.parse::<u32>().ok()?;
    let name = name.strip_prefix("- ").unwrap_or(name);
    match name.split_once(" # SKIP") {
        Some(_) => Some((name, Outcome::Skipped)),
        None => Some((name, outcome)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_with_results_are_read() {
        assert_eq!(result("ok 1 - tcp_open"), Some(("tcp_open", Outcome::Passed)));
        assert_eq!(result("not ok 22 - udp_send"), Some(("udp_send", Outcome::Failed)));
        assert_eq!(result("ok 3 - a b # SKIP no c"), Some(("a b # SKIP no c", Outcome::Skipped)));
        for other in ["1..410", "# ok 1 - a", "ok", "okay 1 - a", "ok then - a"] {
            assert_eq!(result(other), None);
        }
    }

    #[test]
    fn every_program_has_a_job() {
        let script = crate::root().join("tests/suites/programs.py");
        let text = std::fs::read_to_string(script).unwrap();
        for name in PROGRAMS {
            assert!(text.contains(&format!("\ndef {name}():\n")), "{name}");
        }
    }
}
