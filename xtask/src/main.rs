//! The gate and its helpers: `cargo xtask ci` is everything that a change has to pass.
#![forbid(unsafe_code)]

mod ci;
mod clients;
mod demo;
mod fuzz;
mod heard;
mod install;
mod man;
mod matrix;
mod process;
mod profile;
mod programs;
mod report;
mod soak;
mod stage;
mod suites;
mod tidy;
mod tools;

use std::path::PathBuf;
use std::process::{Command, ExitCode};

use anyhow::Result;
use clap::{Parser, Subcommand};

/// Quipu's gate and its helpers.
#[derive(Parser)]
#[command(name = "cargo xtask", bin_name = "cargo xtask", disable_version_flag = true)]
struct Cli {
    #[command(subcommand)]
    task: Task,
}

#[derive(Subcommand)]
enum Task {
    /// Run everything that a change has to pass.
    Ci(ci::Options),
    /// Build everything in release mode and put it into target/quipu.
    Stage(stage::Options),
    /// Run three programs of the distribution over Quipu and show their results.
    Demo,
    /// Run the client programs of the distribution over Quipu.
    Clients(clients::Options),
    /// Part of `clients`: runs inside a network namespace that it fills with two hosts.
    #[command(hide = true)]
    ClientsInside(clients::Options),
    /// Copy what was staged to its place in the system.
    Install(install::Options),
    /// Write the matrix of verbs symbols, or compare it (--check).
    Matrix {
        /// Passed on: --check, --library FILE.
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        args: Vec<String>,
    },
    /// Write the manual pages, or compare them.
    Man {
        /// Fail if a page is out of date instead of writing it.
        #[arg(long)]
        check: bool,
    },
    /// Check the rules of the house that no other tool checks.
    Tidy,
    /// Run every fuzz target for a bounded number of inputs, on stable Rust.
    Fuzz(fuzz::Options),
    /// Run a million seeds of the simulator that follow from the commit; goes on where it was interrupted.
    Soak(soak::Options),
    /// Run test suites of other projects, and programs with sockets, with and without `quipu sockets`.
    Suites(suites::Options),
}

fn main() -> ExitCode {
    match run(Cli::parse().task) {
        Ok(code) => code,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(task: Task) -> Result<ExitCode> {
    match task {
        Task::Ci(options) => return ci::run(&options),
        Task::Stage(options) => drop(stage::run_for(&options)?),
        Task::Demo => return demo::run(),
        Task::Suites(options) => return suites::run(&options),
        Task::Clients(options) => return clients::run(&options),
        Task::ClientsInside(options) => return clients::run_inside(&options),
        Task::Install(options) => install::run(&options)?,
        Task::Matrix { args } => matrix::run(&args)?,
        Task::Man { check } => man::run(check)?,
        Task::Tidy => tidy::run()?,
        Task::Fuzz(options) => fuzz::run(&options)?,
        Task::Soak(options) => soak::run(&options)?,
    }
    Ok(ExitCode::SUCCESS)
}

/// The folder of the workspace.
fn root() -> PathBuf {
    let mut root = PathBuf::from(env!("CARGO_MANIFEST_DIR"));
    root.pop();
    root
}

/// The cargo that runs this, without what it says of the package that it runs: build scripts that ask for
/// that would be run again, and all that depends on them would be built again.
fn cargo() -> Command {
    let mut command = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    forget_package(&mut command);
    command
}

/// Keeps what cargo says of the package that it runs from a command.
fn forget_package(command: &mut Command) {
    for (name, _) in std::env::vars_os() {
        let text = name.to_string_lossy();
        if ["CARGO_PKG_", "CARGO_MANIFEST_"].iter().any(|start| text.starts_with(start)) {
            command.env_remove(&name);
        }
    }
}

/// Where cargo puts what it builds.
fn target_dir() -> PathBuf {
    std::env::var_os("CARGO_TARGET_DIR")
        .map_or_else(|| root().join("target"), |dir| root().join(PathBuf::from(dir)))
}
