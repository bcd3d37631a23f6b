//! `quipu machine`: simulated hosts, by plans.

mod merge;
mod run;
mod show;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use quipu_machine::{Results, breakdown, example, examples, figure, table};

use super::failure::Failure;

/// What to do with simulated hosts.
#[derive(clap::Args)]
#[command(after_long_help = EXAMPLES)]
pub(crate) struct Options {
    #[command(subcommand)]
    task: Task,
}

#[derive(clap::Subcommand)]
enum Task {
    /// Run a plan: measures throughput, and where the cycles go.
    Run(run::Options),
    /// List the plans that come with Quipu.
    List(show::ListOptions),
    /// Print a plan with all its keys.
    Show(show::ShowOptions),
    /// Join the parts of a sweep.
    Merge(merge::Options),
}

const EXAMPLES: &str = "\
Examples:
  quipu machine list
  quipu machine run sinic
  quipu machine run plan.toml --set l2.size=1MB,2MB,4MB,8MB --svg sweep.svg
  quipu machine run sinic --trace 2000 > packet.json       for ui.perfetto.dev
  quipu machine run plan.toml --set seed=1,2,3,4 --shard 1/2 --json > part1.json
  quipu machine merge part1.json part2.json

docs/machine.md explains plans, and docs/add-a-nic.md how to add a NIC.";

/// Runs the command.
pub(crate) fn run(options: &Options) -> Result<ExitCode, Failure> {
    match &options.task {
        Task::Run(options) => run::run(options),
        Task::List(options) => show::list(options),
        Task::Show(options) => show::show(options),
        Task::Merge(options) => merge::run(options),
    }
}

/// Which plan: a file, or one that comes with Quipu.
struct Source {
    name: String,
    text: String,
}

impl Source {
    /// The plan of a file, or of a name.
    fn find(plan: &Path) -> Result<Self, Failure> {
        let name = plan.display().to_string();
        if let Some(example) = example(&name).filter(|_| !plan.exists()) {
            return Ok(Self { name, text: example.text.to_owned() });
        }
        let text = fs::read_to_string(plan).map_err(|error| {
            let names: Vec<&str> = examples().iter().map(|example| example.name).collect();
            let remedy = format!("give a file, or one of {}", names.join(", "));
            Failure::new(format!("the plan {name} cannot be read"), error, remedy)
        })?;
        Ok(Self { name, text })
    }
}

/// How results are to be shown.
#[derive(clap::Args)]
struct Output {
    /// Print the results as JSON, without progress.
    #[arg(long)]
    json: bool,
    /// Also draw bandwidth, cycles and cache misses of each run into this SVG file.
    #[arg(long, value_name = "FILE")]
    svg: Option<PathBuf>,
}

impl Output {
    /// Shows results.
    fn show(&self, results: &Results) -> Result<(), Failure> {
        let rows: Vec<_> =
            results.results.iter().map(|it| (it.label.clone(), it.report.clone())).collect();
        if let Some(file) = &self.svg {
            fs::write(file, figure(&results.plan, &rows)).map_err(|error| {
                let what = format!("{} cannot be written", file.display());
                Failure::new(what, error, "give --svg a file in a folder that you may write to")
            })?;
        }
        if self.json {
            let text = serde_json::to_string_pretty(results).map_err(|error| {
                Failure::new(
                    "the results cannot be written as JSON",
                    error,
                    "report this, with the plan",
                )
            })?;
            println!("{text}");
            return Ok(());
        }
        print!("{}", table(&rows));
        if let [(_, report)] = rows.as_slice() {
            print!("{}", breakdown(report));
        }
        Ok(())
    }
}
