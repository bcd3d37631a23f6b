//! The gate: every step in order, each with its time, and a table at the end.

use std::io::{BufRead, BufReader};
use std::process::{Child, Command, ExitCode, Stdio};

use anyhow::{Context, Result, bail, ensure};

use crate::clients::{self, Hosts};
use crate::heard::Heard;
use crate::report::{Report, Tally};
use crate::stage::{self, Staged};
use crate::{fuzz, man, matrix, programs, soak, tidy, tools};

/// Which steps to run.
#[derive(clap::Args)]
pub(crate) struct Options {
    /// Only the steps with these names.
    #[arg(long, value_delimiter = ',')]
    only: Vec<String>,
    /// All steps but those with these names.
    #[arg(long, value_delimiter = ',')]
    skip: Vec<String>,
    /// Print the steps' names and end.
    #[arg(long)]
    list: bool,
}

type Outcome = Result<(Tally, String)>;

/// A step's name, what it does, and the function that does it.
type Step = (&'static str, &'static str, fn() -> Outcome);

const STEPS: [Step; 15] = [
    ("format", "cargo fmt --all -- --check", format),
    ("lint", "cargo clippy --workspace --all-targets -- -D warnings", lint),
    ("cross", "cargo check for the other architecture", cross),
    ("tidy", "the rules of the house", || tidy::run().map(one)),
    ("tests", "the tests of all crates", tests),
    ("doctests", "cargo test --workspace --doc", doctests),
    ("docs", "cargo doc without warnings", docs),
    ("licences", "cargo deny check", licences),
    ("fuzz", "every fuzz target, 50000 inputs", fuzz_targets),
    ("stage", "release build", || stage::run().map(|_| one(()))),
    ("symbols", "the symbols of the staged libraries", || {
        matrix::check(&Staged::places().lib).map(one)
    }),
    ("man", "cargo xtask man --check", || man::run(true).map(one)),
    ("sim", "quipu sim, 2000 seeds of the commit, each twice", sim),
    ("one-host", "client programs, two processes on one host", || client_programs(Hosts::One)),
    ("two-hosts", "client programs on two hosts", || client_programs(Hosts::Two)),
];

/// Seeds of the simulator's smoke, and those of QPIP by itself.
const SEEDS: &str = "2000";
const QPIP_SEEDS: &str = "500";

/// The architecture on which the gate does not run.
const OTHER: &str = if cfg!(target_arch = "aarch64") {
    "x86_64-unknown-linux-gnu"
} else {
    "aarch64-unknown-linux-gnu"
};

/// Runs the steps.
pub(crate) fn run(options: &Options) -> Result<ExitCode> {
    let names = STEPS.map(|(name, ..)| name);
    for name in options.only.iter().chain(&options.skip) {
        ensure!(names.contains(&name.as_str()), "no step {name}; there are {}", names.join(", "));
    }
    let wanted = |name: &str| {
        let listed = |list: &[String]| list.iter().any(|listed| listed == name);
        (options.only.is_empty() || listed(&options.only)) && !listed(&options.skip)
    };
    let steps: Vec<_> = STEPS.iter().filter(|(name, ..)| wanted(name)).collect();
    if options.list {
        steps.iter().for_each(|(name, what, _)| println!("{name:<12} {what}"));
        return Ok(ExitCode::SUCCESS);
    }
    let mut report = Report::new(steps.len());
    let mut early = None;
    for (name, what, run) in steps {
        match *name {
            "tests" if wanted("stage") => early = Some(EarlyBuild::begin()?),
            "stage" => drop(early.take()),
            _ => {}
        }
        report.step(name, what, run);
    }
    Ok(if report.finish() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// A release build while the tests run, which wait more than they compute. Whatever becomes of it, the step
/// `stage` builds what is missing then.
struct EarlyBuild(Child);

impl EarlyBuild {
    fn begin() -> Result<Self> {
        let mut command = Command::new("nice");
        command.args(["-n", "10"]).arg(std::env::current_exe()?).arg("stage");
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        Ok(Self(command.spawn().context("nice")?))
    }
}

impl Drop for EarlyBuild {
    fn drop(&mut self) {
        let _ = self.0.wait();
    }
}

fn one((): ()) -> (Tally, String) {
    (Tally::ONE, String::new())
}

fn skipped(why: &str) -> Outcome {
    println!("skipped: {why}");
    Ok((Tally::SKIPPED, format!("skipped: {why}")))
}

/// A cargo command at the root.
fn cargo(args: &[&str]) -> Command {
    let mut command = crate::cargo();
    command.args(args).current_dir(crate::root());
    command
}

fn must(mut command: Command) -> Outcome {
    ensure!(command.status().context("cargo")?.success(), "failed; see above");
    Ok(one(()))
}

fn format() -> Outcome {
    if !tools::cargo_has("fmt", Some("rustfmt")) {
        return skipped("rustfmt is not installed");
    }
    must(cargo(&["fmt", "--all", "--", "--check"]))
}

fn lint() -> Outcome {
    if !tools::cargo_has("clippy", Some("clippy")) {
        return skipped("clippy is not installed");
    }
    must(cargo(&["clippy", "--workspace", "--all-targets", "--", "-D", "warnings"]))
}

/// Whether it compiles for the other architecture, which takes no linker.
fn cross() -> Outcome {
    if !tools::has_target(OTHER) {
        return skipped(&format!("`rustup target add {OTHER}` was not run"));
    }
    // rustls's cryptography is in part C and assembly.
    let compiler = OTHER.replace("-unknown", "") + "-gcc";
    if tools::find(&compiler).is_none() {
        return skipped(&format!("{compiler} is not installed"));
    }
    let mut command = cargo(&["check", "--workspace", "--target", OTHER]);
    command.env("RUSTFLAGS", "-D warnings");
    must(command)
}

fn tests() -> Outcome {
    let (tally, reasons) = programs::run()?;
    reasons.iter().for_each(|reason| println!("{reason}"));
    Ok((tally, reasons.join("; ")))
}

/// Runs the documentation's examples, and adds up what they report.
fn doctests() -> Outcome {
    let mut command = cargo(&["test", "--workspace", "--doc", "--no-fail-fast"]);
    // The packages that examples need are installed: none may do without.
    command.args(["--", "--show-output"]).env("QUIPU_TEST_ALL", "1").stdout(Stdio::piped());
    let mut child = command.spawn().context("cargo")?;
    let output = child.stdout.take().context("no standard output")?;
    let mut heard = Heard::default();
    for line in BufReader::new(output).lines() {
        heard.hear(&line?);
    }
    let (tally, reasons) = heard.finish();
    reasons.iter().for_each(|reason| println!("{reason}"));
    let status = child.wait()?;
    if !status.success() && tally.failed == 0 {
        bail!("the examples do not build; see above");
    }
    Ok((tally, reasons.join("; ")))
}

fn docs() -> Outcome {
    let mut command = cargo(&["doc", "--workspace", "--no-deps", "--quiet"]);
    command.env("RUSTDOCFLAGS", "-D warnings");
    must(command)
}

fn licences() -> Outcome {
    if !tools::cargo_has("deny", None) {
        return skipped("cargo-deny is not installed");
    }
    must(cargo(&["deny", "check", "licenses", "bans", "sources"]))
}

fn fuzz_targets() -> Outcome {
    let passed = fuzz::count(&fuzz::Options::default())?;
    Ok((Tally { passed, ..Tally::default() }, String::new()))
}

/// Each commit tries seeds of its own: those that every run tries find nothing new.
fn sim() -> Outcome {
    let base = soak::base();
    let from = base.seed.to_string();
    let all: [&[&str]; 2] = [&["--seeds", SEEDS], &["--seeds", QPIP_SEEDS, "--service", "qpip"]];
    for which in all {
        let args = [&["sim", "--twice", "--from", &from], which].concat();
        println!("base seed {from} ({}); replay: quipu {}", base.of, args.join(" "));
        let mut command = Command::new(Staged::places().quipu);
        command.args(args);
        ensure!(command.status().context("quipu sim")?.success(), "failed; see above");
    }
    let note = format!("{SEEDS} seeds, {QPIP_SEEDS} of QPIP, from {from} on");
    Ok((Tally { passed: 2, ..Tally::default() }, note))
}

fn client_programs(hosts: Hosts) -> Outcome {
    let tally = clients::check(hosts)?;
    if tally.failed > 0 {
        return Ok((tally, "see the rows above".into()));
    }
    Ok((tally, String::new()))
}
