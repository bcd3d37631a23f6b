//! `quipu machine merge`.

use std::fs;
use std::path::PathBuf;
use std::process::ExitCode;

use quipu_machine::{Results, merge};

use super::Output;
use crate::cmd::failure::Failure;

/// Which parts.
#[derive(clap::Args)]
pub(crate) struct Options {
    /// Outputs of `quipu machine run --shard N/OF --json`, in any order.
    #[arg(required = true)]
    parts: Vec<PathBuf>,
    #[command(flatten)]
    output: Output,
}

/// Joins the parts of a sweep and shows the whole.
pub(crate) fn run(options: &Options) -> Result<ExitCode, Failure> {
    let mut parts = Vec::with_capacity(options.parts.len());
    for file in &options.parts {
        let name = file.display();
        let text = fs::read_to_string(file).map_err(|error| {
            Failure::new(format!("{name} cannot be read"), error, "give files that exist")
        })?;
        let part: Results = serde_json::from_str(&text).map_err(|error| {
            let remedy = "give the output of quipu machine run --shard N/OF --json";
            Failure::new(format!("{name} is not a part of a sweep"), error, remedy)
        })?;
        parts.push(part);
    }
    let whole = merge(parts).map_err(|error| {
        Failure::new("the parts are not a whole sweep", error, "give each part of one sweep once")
    })?;
    options.output.show(&whole)?;
    Ok(ExitCode::SUCCESS)
}
