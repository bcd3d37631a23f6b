//! `quipu machine list` and `quipu machine show`.

use std::path::PathBuf;
use std::process::ExitCode;

use quipu_machine::{Plan, Setting, examples};
use serde_json::json;

use super::Source;
use crate::cmd::failure::Failure;

/// How to list.
#[derive(clap::Args)]
pub(crate) struct ListOptions {
    /// Print the list as JSON.
    #[arg(long)]
    json: bool,
}

/// Which plan.
#[derive(clap::Args)]
pub(crate) struct ShowOptions {
    /// A file, or the name of a plan that comes with Quipu.
    plan: PathBuf,
    /// Replace a value of the plan.
    #[arg(long, value_name = "KEY=VALUE")]
    set: Vec<String>,
}

/// Lists the plans that come with Quipu.
pub(crate) fn list(options: &ListOptions) -> Result<ExitCode, Failure> {
    if options.json {
        let list: Vec<_> = examples()
            .iter()
            .map(|example| json!({ "name": example.name, "about": example.about() }))
            .collect();
        println!("{:#}", json!(list));
        return Ok(ExitCode::SUCCESS);
    }
    let width = examples().iter().map(|example| example.name.len()).max().unwrap_or(0);
    for example in examples() {
        println!("{:<width$}  {}", example.name, example.about());
    }
    Ok(ExitCode::SUCCESS)
}

/// Prints a plan with all its keys.
pub(crate) fn show(options: &ShowOptions) -> Result<ExitCode, Failure> {
    let source = Source::find(&options.plan)?;
    let settings = options.set.iter().map(|text| {
        let (key, value) = text.split_once('=').unwrap_or((text, ""));
        Setting { key: key.into(), value: value.into() }
    });
    let plan = Plan::parse_with(&source.text, &settings.collect::<Vec<_>>()).map_err(|error| {
        Failure::new(format!("{} is not a plan that can run", source.name), error, "correct it")
    })?;
    print!("{}", plan.to_toml());
    Ok(ExitCode::SUCCESS)
}
