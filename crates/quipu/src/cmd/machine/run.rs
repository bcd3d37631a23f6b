//! `quipu machine run`.

use std::cell::Cell;
use std::io::IsTerminal;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use quipu_machine::{
    Options as RunOptions, Plan, Point, Report, Results, RunError, Setting, Shard, expand, label,
    perfetto, run_with,
};

use super::{Output, Source};
use crate::cmd::failure::Failure;

/// Which plan, with which values.
#[derive(clap::Args)]
pub(crate) struct Options {
    /// A file, or the name of a plan that comes with Quipu (`quipu machine list`).
    plan: PathBuf,
    /// Replace a value of the plan: one run for each value, and for each combination if it is given
    /// several times.
    #[arg(long, value_name = "KEY=VALUE,...")]
    set: Vec<String>,
    /// Run only a part of these runs, for example 3/16. `quipu machine merge` joins the parts.
    #[arg(long, value_name = "N/OF", value_parser = Shard::parse)]
    shard: Option<Shard>,
    /// Print the timeline of one packet, by its number in the run, in the format that ui.perfetto.dev
    /// opens.
    #[arg(long, value_name = "PACKET", conflicts_with_all = ["json", "svg", "shard"],
          value_parser = clap::value_parser!(u64).range(1..))]
    trace: Option<u64>,
    /// Run each plan twice, and fail if the results differ.
    #[arg(long)]
    twice: bool,
    /// Number of threads. Default: the number of processors.
    #[arg(long, value_name = "N")]
    threads: Option<usize>,
    #[command(flatten)]
    output: Output,
}

/// A run that is to be made.
struct Job {
    index: usize,
    label: String,
    plan: Plan,
}

/// Runs the plans.
pub(crate) fn run(options: &Options) -> Result<ExitCode, Failure> {
    let source = Source::find(&options.plan)?;
    let points = expand(&options.set).map_err(|error| {
        Failure::new("the values of --set cannot be used", error, "see quipu machine run --help")
    })?;
    // All of them first: a value that is wrong must not be found after an hour.
    let mut jobs = points
        .iter()
        .enumerate()
        .map(|(index, point)| {
            let plan = read(&source, point)?;
            Ok(Job { index, label: label(&plan.name, point), plan })
        })
        .collect::<Result<Vec<Job>, Failure>>()?;
    let name = jobs.first().map_or(String::new(), |job| job.plan.name.clone());
    let points = jobs.len();
    if let Some(packet) = options.trace {
        return trace(&source, &jobs, packet);
    }
    let shard = options.shard.unwrap_or(Shard::ALL);
    jobs.retain(|job| shard.has(job.index));
    let results = run_all(options, &jobs)?;
    let results = Results { plan: name, settings: options.set.clone(), points, results };
    options.output.show(&results)?;
    Ok(ExitCode::SUCCESS)
}

fn read(source: &Source, point: &[Setting]) -> Result<Plan, Failure> {
    Plan::parse_with(&source.text, point).map_err(|error| {
        let remedy = "correct it; quipu machine show prints a plan with all its keys";
        Failure::new(format!("{} is not a plan that can run", source.name), error, remedy)
    })
}

fn stopped(name: &str, error: &RunError) -> Failure {
    let remedy = match error {
        RunError::Driver { .. } => "correct the driver",
        RunError::TooManyEvents(_) => "raise run.max_events or shorten run.sample",
        RunError::Standstill(_)
        | RunError::Circle(_)
        | RunError::Costs(_)
        | RunError::Adapter(_)
        | RunError::NoSockets => "correct the plan",
    };
    Failure::new(format!("the run of {name} stopped"), error, remedy)
}

/// Prints the timeline of a packet of the only run.
fn trace(source: &Source, jobs: &[Job], packet: u64) -> Result<ExitCode, Failure> {
    let [job] = jobs else {
        let why = format!("there are {} runs", jobs.len());
        return Err(Failure::new(
            "--trace shows a packet of one run",
            why,
            "give --set one value each",
        ));
    };
    let options = RunOptions { trace: packet, progress: None };
    let (_, stages) =
        run_with(&job.plan, options).map_err(|error| stopped(&source.name, &error))?;
    if stages.is_empty() {
        let what = format!("packet {packet} was not seen");
        let why = "fewer packets were sent in this run";
        return Err(Failure::new(what, why, "give a smaller number, or lengthen run.sample"));
    }
    println!("{:#}", perfetto(packet, &stages));
    Ok(ExitCode::SUCCESS)
}

fn run_all(options: &Options, jobs: &[Job]) -> Result<Vec<Point>, Failure> {
    let threads = options
        .threads
        .unwrap_or_else(|| thread::available_parallelism().map_or(1, std::num::NonZero::get));
    let progress = progress(options, jobs.len());
    let next = AtomicUsize::new(0);
    let done: Mutex<Vec<Result<Point, Failure>>> = Mutex::new(Vec::new());
    thread::scope(|scope| {
        for _ in 0..threads.clamp(1, jobs.len().max(1)) {
            scope.spawn(|| {
                while let Some(job) = jobs.get(next.fetch_add(1, Ordering::Relaxed)) {
                    let result = run_job(job, options.twice, &progress);
                    if let Ok(mut done) = done.lock() {
                        done.push(result);
                    }
                }
            });
        }
    });
    progress.finish_and_clear();
    let done = done.into_inner().unwrap_or_default();
    let mut results = done.into_iter().collect::<Result<Vec<Point>, Failure>>()?;
    results.sort_by_key(|point| point.index);
    Ok(results)
}

/// Steps of the progress bar for each run.
const STEPS: u64 = 1000;

fn run_job(job: &Job, twice: bool, progress: &ProgressBar) -> Result<Point, Failure> {
    let at = Cell::new(0);
    let mut step = |part: f64| {
        let now = (part * STEPS as f64) as u64;
        progress.inc(now.saturating_sub(at.get()));
        at.set(at.get().max(now));
    };
    let options = RunOptions { trace: 0, progress: Some(&mut step) };
    let once = |options| -> Result<Report, Failure> {
        run_with(&job.plan, options)
            .map(|(report, _)| report)
            .map_err(|it| stopped(&job.label, &it))
    };
    let report = once(options)?;
    progress.inc(STEPS.saturating_sub(at.get()));
    if twice {
        let again = once(RunOptions::default())?;
        if again != report {
            let why = format!("trace hash {} and {}", report.trace_hash, again.trace_hash);
            let what = format!("two runs of {} differ", job.label);
            return Err(Failure::new(what, why, "report this, with the plan"));
        }
    }
    Ok(Point { index: job.index, label: job.label.clone(), report })
}

fn progress(options: &Options, runs: usize) -> ProgressBar {
    if options.output.json || !std::io::stderr().is_terminal() {
        return ProgressBar::hidden();
    }
    let total = runs as u64 * STEPS;
    let bar = ProgressBar::with_draw_target(Some(total), ProgressDrawTarget::stderr_with_hz(10));
    let style = ProgressStyle::with_template("{wide_bar} {percent} %, {eta} to go");
    bar.with_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()))
}
