//! Test suites of other projects, and programs with a known result, each run without Quipu and under
//! `quipu sockets`. A test that fails only under Quipu is a failure.
//!
//! This takes half an hour, so it is no part of the gate.

mod cpython;
mod results;
pub(crate) mod tap;

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};

use crate::stage::Staged;
use results::{Results, Tally};

/// Which suites to run.
#[derive(clap::Args)]
pub(crate) struct Options {
    /// Only suites whose name contains this, such as `cpython`, `asyncio` or `programs/redis`.
    #[arg(long, default_value = "")]
    filter: String,
    /// Print the suites' names and end.
    #[arg(long)]
    list: bool,
    /// The Python whose `test` package is run.
    #[arg(long, default_value = "python3", value_name = "PROGRAM")]
    python: PathBuf,
    /// libuv's own tests: the program `uv_run_tests` of a build of libuv.
    #[arg(long, value_name = "PROGRAM")]
    libuv: Option<PathBuf>,
    /// Longest time of one suite, once, in seconds.
    #[arg(long, default_value_t = 900)]
    limit: u64,
}

/// What a suite is started with: nothing, or `quipu sockets --`.
pub(crate) type Prefix = Vec<String>;

/// Runs a suite within a time.
type Run = Box<dyn Fn(&Prefix, Duration) -> Result<Results>>;

/// One suite.
pub(crate) struct Suite {
    name: String,
    run: Run,
}

fn all(options: &Options) -> Result<Vec<Suite>> {
    let mut suites = tap::programs();
    suites.extend(options.libuv.as_deref().map(tap::libuv));
    suites.extend(cpython::suites(&options.python));
    suites.retain(|suite| suite.name.contains(&options.filter));
    ensure!(!suites.is_empty(), "no suite has {:?} in its name", options.filter);
    Ok(suites)
}

/// How one suite went.
struct Row {
    name: String,
    plain: Tally,
    quipu: Tally,
    /// Tests that failed with Quipu only, twice.
    only: Vec<String>,
    seconds: f64,
}

/// Runs the suites, each without Quipu and with it, and prints a table.
pub(crate) fn run(options: &Options) -> Result<ExitCode> {
    let suites = all(options)?;
    if options.list {
        suites.iter().for_each(|suite| println!("{}", suite.name));
        return Ok(ExitCode::SUCCESS);
    }
    let staged = Staged::places();
    ensure!(staged.quipu.exists(), "nothing is staged: run `cargo xtask stage`");
    let prefix = [&staged.quipu.display().to_string(), "sockets", "--"].map(str::to_owned).to_vec();
    let limit = Duration::from_secs(options.limit);
    let (mut rows, count) = (Vec::new(), suites.len());
    for (number, suite) in suites.iter().enumerate() {
        let row = compare(suite, &prefix, limit)?;
        println!("[{}/{count}] {}", number + 1, row.line());
        row.only.iter().for_each(|test| println!("    fails with Quipu only: {test}"));
        rows.push(row);
    }
    println!("\n{}", table(&rows));
    for missing in [
        cpython::missing(&options.python),
        options
            .libuv
            .is_none()
            .then(|| "libuv: pass --libuv with the uv_run_tests of a build".into()),
    ] {
        missing.iter().for_each(|line| println!("not run: {line}"));
    }
    let failed: usize = rows.iter().map(|row| row.only.len()).sum();
    println!("{failed} tests fail with Quipu only");
    Ok(if failed == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// Runs a suite both ways. If tests fail with Quipu only, both runs are repeated: those that fail so twice
/// count.
fn compare(suite: &Suite, prefix: &Prefix, limit: Duration) -> Result<Row> {
    let begun = Instant::now();
    let both = || -> Result<[Results; 2]> {
        Ok([(suite.run)(&Prefix::new(), limit)?, (suite.run)(prefix, limit)?])
    };
    let [plain, quipu] = both()?;
    let mut only = quipu.worse_than(&plain);
    if !only.is_empty() {
        println!("{}: {} fail with Quipu only; once more", suite.name, only.join(", "));
        let [plain, quipu] = both()?;
        let again = quipu.worse_than(&plain);
        only.retain(|test| again.contains(test));
    }
    let (plain, quipu) = (plain.tally(), quipu.tally());
    Ok(Row { name: suite.name.clone(), plain, quipu, only, seconds: begun.elapsed().as_secs_f64() })
}

impl Row {
    fn line(&self) -> String {
        let Self { name, plain, quipu, only, seconds } = self;
        format!(
            "{name}: without {plain}; with {quipu}; {} with Quipu only, {seconds:.0} s",
            only.len()
        )
    }
}

/// The rows as a table in Markdown.
fn table(rows: &[Row]) -> String {
    let mut text =
        String::from("| suite | without | with | fail with Quipu only |\n|---|---|---|---|\n");
    for Row { name, plain, quipu, only, .. } in rows {
        let only = if only.is_empty() { "none".into() } else { only.join(", ") };
        text += &format!("| {name} | {plain} | {quipu} | {only} |\n");
    }
    text
}
