//! `quipu bench`: compares Quipu with the best that the machine offers (raw sockets, memory) and with
//! the messaging software that is installed.
//!
//! It contains no test of Quipu: nothing here passes or fails. Contenders alternate in every round,
//! because machines drift. Reports show medians over the rounds, and medians of the ratios within rounds.
//!
//! | module | is |
//! |---|---|
//! | `plan` | what is measured: a TOML file |
//! | `run`, `rounds` | the whole run, and the rounds of it |
//! | `congestion` | the same congestion control for all |
//! | `contender` | what can be measured |
//! | `pair`, `worker` | Quipu and the floors: two processes of this program's own |
//! | `qpip` | QPIP and the kernel's sockets on packet links: a process with both ends |
//! | `peers` | UCX, libfabric, Open MPI; perftest, cmtime, UCX, Open MPI over Quipu: programs that are started |
//! | `results`, `targets` | medians, ratios, and which targets are reached |
//! | `report` | the tables and the plot |

mod congestion;
mod contender;
mod machine;
mod model;
mod nearness;
mod pair;
mod peers;
mod plan;
pub mod plot;
mod qpip;
mod report;
mod results;
mod rounds;
mod run;
mod scratch;
mod stats;
mod sys;
mod targets;
mod worker;

pub use sys::{cycles_per_ns, processors};

use std::path::{Path, PathBuf};

use anyhow::{Context, Result};

/// Options of `quipu bench`.
#[derive(clap::Args, Clone, Debug, Default)]
#[command(after_long_help = EXAMPLES)]
pub struct Options {
    /// Plan of the measurements, as TOML. Default: the built-in one, bench/plan.toml.
    #[arg(long, value_name = "FILE")]
    plan: Option<PathBuf>,
    /// Run the quick part of the plan: less than a minute on a quiet machine, with rough numbers. Ratios
    /// are compared with their targets only after at least three rounds.
    #[arg(long)]
    pub quick: bool,
    /// Measure network block devices instead, over queue pairs, sockets, and servers of others.
    #[arg(long)]
    pub nbd: bool,
    /// Measure Active Messages and Split-C instead, each value next to its target.
    #[arg(long)]
    pub am: bool,
    /// Measure sockets programs instead, with and without `quipu sockets`: redis, nginx, sockperf and
    /// haproxy, where they are installed, and this command's own; on one host and on two.
    #[arg(long)]
    pub sockets: bool,
    /// Write results.json, results.txt, plot.svg and qpip.svg into this folder; with --sockets: sockets.json,
    /// sockets.txt and sockets.svg.
    #[arg(long, value_name = "DIR")]
    pub out: Option<PathBuf>,
    /// List the contenders of each measurement, and those that are not installed. Measure nothing.
    #[arg(long)]
    list: bool,
    /// Print the results as JSON instead of tables, without progress.
    #[arg(long)]
    pub json: bool,
    /// Measure only contenders whose names contain this, such as UCX; with --sockets: only such tests. May be
    /// repeated.
    #[arg(long, value_name = "NAME")]
    pub only: Vec<String>,
    /// Be one end of a measurement: for this command's own use.
    #[arg(long, hide = true)]
    worker: bool,
    /// Be both ends of packet links: for this command's own use.
    #[arg(long, hide = true)]
    stage: bool,
    /// Be an adapter that the ends of packet links attach to: for this command's own use.
    #[arg(long, hide = true)]
    adapter: bool,
}

const EXAMPLES: &str = "\
Examples:
  quipu bench --quick                     rough numbers in a minute
  quipu bench --out bench/results         the whole plan; writes tables, JSON and plots
  quipu bench --only lossy                only goodput over loss and delay
  quipu bench --list                      the contenders of each measurement
  quipu bench --sockets --quick           sockets programs with and without Quipu

Two processes, pinned to two processors, send to each other through shared memory, and by TCP and
UDP over the loopback interface. Quipu, and perftest, cmtime, UCX and Open MPI over Quipu, alternate
with raw sockets, memcpy, UCX, libfabric and Open MPI, if these are installed. Run nothing else on
the machine meanwhile: it would change the numbers.";

/// Runs the benchmark and prints the results.
///
/// # Errors
///
/// The plan is not usable, a file cannot be written, or nothing could be measured. The printed notes
/// name contenders that fail.
pub fn run(options: &Options, print: impl FnOnce(&str)) -> Result<()> {
    if options.worker {
        return worker::main();
    }
    if options.stage {
        return qpip::main();
    }
    if options.adapter {
        return qpip::adapter();
    }
    let plan = plan::Plan::load(options.plan.as_deref(), options.quick)?;
    if let Some(folder) = &options.out {
        // Better now than after a quarter of an hour.
        std::fs::create_dir_all(folder)
            .with_context(|| format!("cannot create {}", folder.display()))?;
    }
    let launcher = pair::Launcher {
        program: std::env::current_exe().context("cannot find this program")?,
        arguments: vec!["bench".into(), "--worker".into()],
    };
    if options.list {
        print(&run::list(&plan, &options.only, &launcher)?);
        return Ok(());
    }
    let results = run::run(plan, &options.only, &launcher, options.json)?;
    let links = !results.qpip.0.is_empty() || !results.goodput.is_empty();
    let json = serde_json::to_string_pretty(&results)? + "\n";
    let text = report::text(&results);
    if let Some(folder) = &options.out {
        write(folder, "results.json", Some(&json))?;
        write(folder, "results.txt", Some(&text))?;
        let plot = (!results.series.is_empty()).then(|| report::plot(&results));
        write(folder, "plot.svg", plot.as_deref())?;
        let plot = links.then(|| report::qpip_plot(&results));
        write(folder, "qpip.svg", plot.as_deref())?;
    }
    print(if options.json { &json } else { &text });
    let any = !results.series.is_empty() || links;
    anyhow::ensure!(any, "nothing could be measured; the notes say why");
    Ok(())
}

/// Writes a file, or removes that of an earlier run.
fn write(folder: &Path, name: &str, text: Option<&str>) -> Result<()> {
    let file = folder.join(name);
    let done = match text {
        Some(text) => std::fs::write(&file, text),
        None => match std::fs::remove_file(&file) {
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(()),
            other => other,
        },
    };
    done.with_context(|| format!("cannot write {}", file.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_not_measured_does_not_stay_beside_what_was() {
        let scratch = scratch::Scratch::new("out").unwrap();
        let there = || scratch.path().join("plot.svg").exists();
        for (text, stays) in [(None, false), (Some("<svg/>"), true), (None, false)] {
            write(scratch.path(), "plot.svg", text).unwrap();
            assert_eq!(there(), stays);
        }
    }
}
