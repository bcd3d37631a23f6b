//! `quipu sim`: thousands of simulated networks, each decided by its seed.

mod goodput;

use std::io::IsTerminal;
use std::process::ExitCode;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread;
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use quipu_sim::{Failure as SimFailure, Options as RunOptions, Report, Service};
use serde_json::json;

use super::failure::Failure;

/// What to simulate.
#[derive(clap::Args)]
#[command(after_long_help = EXAMPLES, args_conflicts_with_subcommands = true)]
pub(crate) struct Options {
    #[command(subcommand)]
    task: Option<Task>,
    /// Number of seeds to run.
    #[arg(long, default_value_t = 1000, value_name = "N", conflicts_with = "minutes",
          value_parser = clap::value_parser!(u64).range(1..))]
    seeds: u64,
    /// Run for this long, instead of a number of seeds.
    #[arg(long, value_name = "MINUTES")]
    minutes: Option<f64>,
    /// The first seed.
    #[arg(long, default_value_t = 1, value_name = "SEED")]
    from: u64,
    /// Run only this seed, and show the last lines of its log if it fails.
    #[arg(long, conflicts_with_all = ["seeds", "minutes", "from"])]
    seed: Option<u64>,
    /// Run only programs of this transport service. Default: drawn from the seed.
    #[arg(long, value_name = "SERVICE", value_parser = service)]
    service: Option<Service>,
    /// Run each seed twice, and fail if the runs differ.
    #[arg(long)]
    twice: bool,
    /// Number of threads. Default: the number of processors.
    #[arg(long, value_name = "N")]
    threads: Option<usize>,
    /// Print the result as JSON, without progress.
    #[arg(long)]
    json: bool,
}

/// What else the simulated world is good for.
#[derive(clap::Subcommand)]
enum Task {
    /// Measure the throughput of a QPIP stream by loss, delay and window.
    Goodput(goodput::Options),
}

const EXAMPLES: &str = "\
Examples:
  quipu sim                       1000 seeds
  quipu sim --minutes 60          runs for an hour
  quipu sim --seed 4711           one seed again, with its log if it fails
  quipu sim --service ud          datagrams only; or rc, uc, xrc, iwarp, iwarp-tcp, qpip, am

A seed decides the network, its faults and all actions of the programs. The same seed gives the same
run, to the last byte. For a run that breaks a rule, the output has the command that replays it.";

/// Lines of the log that are shown of a failed seed.
const LOG_LINES: usize = 200;
/// So many failures are enough to stop.
const MAX_FAILURES: usize = 10;

/// The service of a name.
fn service(name: &str) -> Result<Service, String> {
    let found = Service::ALL.into_iter().find(|service| service.name() == name);
    found.ok_or_else(|| "give one of rc, uc, ud, xrc, iwarp, iwarp-tcp, qpip and am".into())
}

/// Sums over all runs.
#[derive(Default)]
struct Sum {
    seeds: u64,
    events: u64,
    virtual_ns: u64,
    ops: u64,
    completions: u64,
    errors: u64,
    bytes: u64,
    faults: u64,
    failures: Vec<SimFailure>,
}

impl Sum {
    fn add(&mut self, report: Report) {
        self.seeds += 1;
        self.events += report.events;
        self.virtual_ns += report.virtual_ns;
        self.ops += report.ops;
        self.completions += report.completions;
        self.errors += report.errors;
        self.bytes += report.bytes;
        self.faults += u64::from(report.faults);
        self.failures.extend(report.failure);
    }
}

/// Runs the seeds; exit code 1 if one fails.
pub(crate) fn run(options: &Options) -> Result<ExitCode, Failure> {
    if let Some(Task::Goodput(options)) = &options.task {
        return goodput::run(options);
    }
    let begun = Instant::now();
    let sum = match options.seed {
        Some(seed) => one(seed, options),
        None => many(options, begun)?,
    };
    if options.json {
        print_json(&sum, begun.elapsed());
    } else {
        print(&sum, options.seed.is_some(), begun.elapsed());
    }
    Ok(if sum.failures.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

fn one(seed: u64, options: &Options) -> Sum {
    let service = options.service;
    let run = RunOptions { log_lines: LOG_LINES, service, ..RunOptions::default() };
    let mut sum = Sum::default();
    sum.add(run_seed(seed, &run, options.twice));
    sum
}

/// Runs a seed; where asked, once more, and compares.
fn run_seed(seed: u64, options: &RunOptions, twice: bool) -> Report {
    let mut report = quipu_sim::run(seed, options);
    if twice && report.failure.is_none() {
        let again = quipu_sim::run(seed, options);
        if again != report {
            let (first, second) = (report.trace_hash, again.trace_hash);
            report.failure = Some(SimFailure {
                seed,
                service: options.service,
                what: format!("two runs differ: trace hash {first:016x} and {second:016x}"),
                at_ns: report.virtual_ns,
                log: Vec::new(),
            });
        }
    }
    report
}

fn many(options: &Options, begun: Instant) -> Result<Sum, Failure> {
    let limit = match options.minutes {
        Some(minutes) => Some(duration(minutes)?),
        None => None,
    };
    let last = match limit {
        Some(_) => u64::MAX,
        None => options.from.saturating_add(options.seeds),
    };
    let threads = options
        .threads
        .unwrap_or_else(|| thread::available_parallelism().map_or(1, std::num::NonZero::get));
    let (next, stop) = (AtomicU64::new(options.from), AtomicBool::new(false));
    let (send, reports) = channel();
    Ok(thread::scope(|scope| {
        for _ in 0..threads.max(1) {
            let (send, next, stop) = (send.clone(), &next, &stop);
            scope.spawn(move || work(&send, next, last, stop, options));
        }
        drop(send);
        let progress = progress(options, limit);
        let sum = collect(&reports, &stop, limit, begun, &progress);
        progress.finish_and_clear();
        sum
    }))
}

fn duration(minutes: f64) -> Result<Duration, Failure> {
    Duration::try_from_secs_f64(minutes * 60.0).map_err(|error| {
        Failure::new(format!("wrong value --minutes {minutes}"), error, "give a number above 0")
    })
}

/// Takes seeds until there are no more.
fn work(send: &Sender<Report>, next: &AtomicU64, last: u64, stop: &AtomicBool, options: &Options) {
    let run = RunOptions { service: options.service, ..RunOptions::default() };
    while !stop.load(Ordering::Relaxed) {
        let seed = next.fetch_add(1, Ordering::Relaxed);
        if seed >= last || send.send(run_seed(seed, &run, options.twice)).is_err() {
            return;
        }
    }
}

fn collect(
    reports: &Receiver<Report>,
    stop: &AtomicBool,
    limit: Option<Duration>,
    begun: Instant,
    progress: &ProgressBar,
) -> Sum {
    let mut sum = Sum::default();
    for report in reports {
        sum.add(report);
        let elapsed = begun.elapsed();
        if limit.is_some_and(|limit| elapsed >= limit) || sum.failures.len() >= MAX_FAILURES {
            stop.store(true, Ordering::Relaxed);
        }
        progress.set_position(if limit.is_some() { elapsed.as_secs() } else { sum.seeds });
        progress.set_message(format!("{} seeds, {} failed", sum.seeds, sum.failures.len()));
    }
    sum.failures.sort_by_key(|failure| failure.seed);
    sum
}

fn progress(options: &Options, limit: Option<Duration>) -> ProgressBar {
    if options.json || !std::io::stderr().is_terminal() {
        return ProgressBar::hidden();
    }
    let total = limit.map_or(options.seeds, |limit| limit.as_secs());
    let bar = ProgressBar::with_draw_target(Some(total), ProgressDrawTarget::stderr_with_hz(10));
    let style = ProgressStyle::with_template("{wide_bar} {msg}, {eta} to go");
    bar.with_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()))
}

fn print(sum: &Sum, with_log: bool, took: Duration) {
    for failure in &sum.failures {
        if with_log {
            failure.log.iter().for_each(|line| println!("    {line}"));
        }
        println!("FAILED {failure}");
    }
    println!(
        "{} seeds, {} failed: {} work requests besides receives, {} completions with an error, {:.1} MB, \
         {} faults, {} events, {:.0} s of virtual time in {:.1} s",
        sum.seeds,
        sum.failures.len(),
        sum.ops,
        sum.errors,
        sum.bytes as f64 / 1e6,
        sum.faults,
        sum.events,
        sum.virtual_ns as f64 / 1e9,
        took.as_secs_f64(),
    );
}

fn print_json(sum: &Sum, took: Duration) {
    let failures: Vec<_> = sum
        .failures
        .iter()
        .map(|failure| {
            json!({
                "seed": failure.seed,
                "what": failure.what,
                "at_ns": failure.at_ns,
                "replay": failure.replay(),
                "log": failure.log,
            })
        })
        .collect();
    let result = json!({
        "seeds": sum.seeds,
        "failed": sum.failures.len(),
        "work_requests": sum.ops,
        "completions": sum.completions,
        "errors": sum.errors,
        "bytes": sum.bytes,
        "faults": sum.faults,
        "events": sum.events,
        "virtual_seconds": sum.virtual_ns as f64 / 1e9,
        "seconds": took.as_secs_f64(),
        "failures": failures,
    });
    println!("{result:#}");
}
