//! The RDMA programs of the distribution, unmodified, over Quipu: two processes on one host, and on
//! two hosts that are network namespaces.

mod capture;
mod checked;
mod datagrams;
mod faults;
mod hosts;
mod infiniband;
mod iw0;
mod iwarp;
mod libfabric;
mod multihome;
mod openmpi;
mod others;
mod pair;
mod planned;
mod preloaded;
mod qp0;
mod qpip;
mod rdmacm;
mod rows;
mod single;
mod sockets;
mod suite;
mod trace;

use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};

use crate::report::{self, Tally};
use crate::stage::Staged;
use crate::tools;

pub(crate) use hosts::{Family, unshare};
pub(crate) use pair::{Pairing, run_pair};

/// Which part of the programs to run.
#[derive(clap::Args, Clone, Debug, Default)]
pub(crate) struct Options {
    /// Only rows whose name contains this, such as `write_bw` or `two-hosts/v6`.
    #[arg(long, default_value = "")]
    filter: String,
    /// Only on one host, or only on two.
    #[arg(long, value_enum)]
    hosts: Option<Hosts>,
    /// Every combination of options, which takes twice as long.
    #[arg(long)]
    full: bool,
    /// Print the rows' names and end.
    #[arg(long)]
    list: bool,
}

/// Where the two processes are.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum Hosts {
    /// On one host, over its loopback address.
    One,
    /// On two hosts.
    Two,
}

impl Hosts {
    fn name(self) -> &'static str {
        match self {
            Self::One => "one-host",
            Self::Two => "two-hosts",
        }
    }
}

/// How long a row may take. Most take a second; those that measure latency by spinning take long where
/// others want the processors.
const LIMIT: Duration = Duration::from_secs(300);

/// How a row's error begins that says why it cannot be run on this machine.
const SKIPPED: &str = "skipped: ";

/// How the line begins that ends what is printed of a row that failed: how to run it again.
const AGAIN: &str = "  again: ";

/// Something to run, by its name.
struct Row<'a> {
    name: String,
    run: Box<dyn Fn() -> Result<(), String> + Send + Sync + 'a>,
}

/// Parts of the names of rows that want to be alone: they look at all of a user's programs, cut the wire, or
/// have frames that the program does not let one choose.
const ALONE: [&str; 5] =
    ["/wire-cut", "/command/", "/suite/flow", "/suite/rss", "/pingpong/nobody"];

/// Parts of the names of rows that may not be beside each other, but beside all others: they have a port or a
/// group that the program does not let one choose.
const IN_TURN: [&[&str]; 2] = [&["/udaddy/"], &["/mckey", "multicast"]];

impl Row<'_> {
    fn is_one_of(&self, parts: &[&str]) -> bool {
        parts.iter().any(|part| self.name.contains(part))
    }

    /// Runs it, and says how it went.
    fn report(&self) -> Tally {
        let begun = Instant::now();
        let outcome = (self.run)();
        let (name, took) = (&self.name, begun.elapsed().as_secs_f64());
        match outcome {
            Ok(()) => {
                println!("ok    {name} ({took:.2} s)");
                Tally::ONE
            }
            Err(why) if why.starts_with(SKIPPED) => {
                println!("skip  {name}\n  {why}");
                Tally::SKIPPED
            }
            Err(text) => {
                let text = text.trim_end();
                let again = format!("{AGAIN}cargo xtask clients --full --filter '{name}'");
                let text = format!("FAIL  {name} ({took:.2} s)\n{text}\n{again}");
                println!("{text}");
                report::note_failure(&text);
                Tally { failed: 1, ..Tally::default() }
            }
        }
    }
}

/// A file of the target folder that no other row has.
fn scratch_file(stem: &str, extension: &str) -> PathBuf {
    static NEXT: AtomicUsize = AtomicUsize::new(0);
    let (process, number) = (std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed));
    crate::target_dir().join(format!("{stem}-{process}-{number}.{extension}"))
}

/// Runs what the command line asks for.
pub(crate) fn run(options: &Options) -> Result<ExitCode> {
    let mut tally = Tally::default();
    for hosts in [Hosts::One, Hosts::Two] {
        if options.hosts.is_none_or(|only| only == hosts) {
            tally.add(check_some(hosts, options)?);
        }
    }
    println!("{tally}");
    Ok(if tally.failed == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// Runs all rows of one place.
pub(crate) fn check(hosts: Hosts) -> Result<Tally> {
    let all = Options { hosts: Some(hosts), ..Options::default() };
    check_some(hosts, &all)
}

fn check_some(hosts: Hosts, options: &Options) -> Result<Tally> {
    let staged = Staged::places();
    ensure!(staged.quipu.exists(), "nothing is staged: run `cargo xtask stage`");
    for program in ["ib_write_bw", "ibv_rc_pingpong", "ibv_devices", "tshark"] {
        ensure!(tools::find(program).is_some(), "{program} is missing: run `make check`");
    }
    match hosts {
        Hosts::One => Ok(run_rows(rows::one_host(&staged, options.full), options)),
        Hosts::Two => hosts::enter(options),
    }
}

/// The part that runs inside the network namespace made by [`hosts::enter`].
pub(crate) fn run_inside(options: &Options) -> Result<ExitCode> {
    let staged = Staged::places();
    hosts::build()?;
    let tally = run_rows(rows::two_hosts(&staged, options.full), options);
    hosts::print_tally(tally);
    Ok(if tally.failed == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

fn run_rows(mut rows: Vec<Row<'_>>, options: &Options) -> Tally {
    rows.retain(|row| row.name.contains(&options.filter));
    if options.list {
        rows.iter().for_each(|row| println!("{}", row.name));
        return Tally::default();
    }
    let (alone, beside): (Vec<_>, Vec<_>) = rows.into_iter().partition(|row| row.is_one_of(&ALONE));
    let mut tally = run_beside(&queues(beside));
    alone.iter().for_each(|row| tally.add(row.report()));
    tally
}

/// Rows to be run one after the other, by queue: first those that may not be beside each other, which take
/// longest, then all others, each by itself.
fn queues(rows: Vec<Row<'_>>) -> Vec<Vec<Row<'_>>> {
    let mut queues: Vec<_> = IN_TURN.iter().map(|_| Vec::new()).collect();
    for row in rows {
        match IN_TURN.iter().position(|parts| row.is_one_of(parts)) {
            Some(queue) => queues[queue].push(row),
            None => queues.push(vec![row]),
        }
    }
    queues
}

/// How many rows are beside each other on each processor: most wait more than they work, for the programs'
/// own pauses above all.
const EACH: usize = 2;

/// Runs queues beside each other.
fn run_beside(queues: &[Vec<Row<'_>>]) -> Tally {
    let processors = thread::available_parallelism().map_or(1, |count| count.get().min(8));
    let (next, tally) = (AtomicUsize::new(0), Mutex::new(Tally::default()));
    thread::scope(|scope| {
        for _ in 0..processors * EACH {
            scope.spawn(|| {
                while let Some(queue) = queues.get(next.fetch_add(1, Ordering::Relaxed)) {
                    for row in queue {
                        let one = row.report();
                        tally.lock().unwrap_or_else(|poison| poison.into_inner()).add(one);
                    }
                }
            });
        }
    });
    tally.into_inner().unwrap_or_else(|poison| poison.into_inner())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_row_is_run_once_and_counted() {
        let runs: [AtomicUsize; 20] = Default::default();
        let rows = runs.iter().enumerate().map(|(number, runs)| Row {
            name: format!("{number}{}", ["/wire-cut", "/udaddy/", "", "multicast"][number % 4]),
            run: Box::new(move || match runs.fetch_add(1, Ordering::Relaxed) {
                0 if number == 8 => Err(format!("{SKIPPED}not here")),
                0 if number != 7 => Ok(()),
                _ => Err("on purpose".into()),
            }),
        });
        let tally = run_rows(rows.collect(), &Options::default());
        assert_eq!(tally, Tally { passed: 18, failed: 1, skipped: 1 });
        assert!(runs.iter().all(|runs| runs.load(Ordering::Relaxed) == 1));
    }

    #[test]
    fn rows_that_share_a_port_are_in_one_queue() {
        let names = ["a/udaddy/x", "b", "a/mckey", "c/udaddy/y", "send_lat/multicast"];
        let row = |name: &str| Row { name: name.into(), run: Box::new(|| Ok(())) };
        let queues = queues(names.map(row).into());
        let names: Vec<Vec<&str>> =
            queues.iter().map(|queue| queue.iter().map(|row| &*row.name).collect()).collect();
        let wanted =
            [vec!["a/udaddy/x", "c/udaddy/y"], vec!["a/mckey", "send_lat/multicast"], vec!["b"]];
        assert_eq!(names, wanted);
    }
}
