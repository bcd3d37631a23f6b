//! Rows of unmodified programs with sockets under `quipu sockets`: the jobs of `tests/suites` that take
//! seconds. `cargo xtask suites` runs the others, and compares each with the same job without Quipu.

use std::process::Command;
use std::time::Instant;

use crate::process::Running;
use crate::stage::Staged;
use crate::suites::tap;

use super::{LIMIT, Row, SKIPPED};

/// Jobs, and whether connections are raised in them for sure.
const JOBS: [(&str, bool); 8] = [
    ("redis", true),
    ("nginx", true),
    ("haproxy", false),
    ("postgres", false),
    ("memcached", false),
    ("http_server", false),
    ("rsync", false),
    ("socat", false),
];

/// All of them.
pub(super) fn rows(staged: &Staged) -> Vec<Row<'_>> {
    let row = |(job, raises): (&'static str, bool)| Row {
        name: format!("one-host/sockets/{job}"),
        run: Box::new(move || run(staged, job, raises)),
    };
    JOBS.into_iter().map(row).collect()
}

fn run(staged: &Staged, job: &str, raises: bool) -> Result<(), String> {
    let mut command = Command::new("python3");
    command.arg(crate::root().join("tests/suites/programs.py")).arg(job);
    command.env("RUN", format!("{} sockets --", staged.quipu.display()));
    command.envs(raises.then_some(("RAISED", "1")));
    let running = Running::start(command).map_err(|error| error.to_string())?;
    let ended = running.finish(Instant::now() + LIMIT);
    let results = tap::read(&ended);
    match results.first_skipped() {
        _ if results.has_failed() => Err(ended.text(job)),
        Some(why) => Err(format!("{SKIPPED}{why}")),
        None => Ok(()),
    }
}
