//! `quipu am`: Active Messages, measured.

mod bench;
mod costs;
mod parts;
mod peers;
mod rows;

use std::process::{Command, ExitCode};

use serde_json::json;

use super::failure::Failure;
use bench::{Extent, Line, quartile};
use peers::{Comparison, Peer};

/// What to do with Active Messages.
#[derive(clap::Args)]
pub(crate) struct Options {
    #[command(subcommand)]
    task: Task,
}

#[derive(clap::Subcommand)]
enum Task {
    /// Measure Active Messages next to the queue pair below, between two processes.
    Bench(BenchOptions),
    /// Measure what Active Messages cost, part by part: LogP, a request and its reply, bandwidth by size.
    Costs(CostOptions),
    /// Run the other process of a measurement.
    #[command(hide = true)]
    Answer,
}

/// How much to measure.
#[derive(clap::Args)]
#[command(after_long_help = EXAMPLES)]
struct BenchOptions {
    /// Rounds: how often each value is measured, alternating.
    #[arg(long, default_value_t = 15, value_name = "N",
          value_parser = clap::value_parser!(u32).range(1..))]
    rounds: u32,
    /// Short messages in each round.
    #[arg(long, default_value_t = 20_000, value_name = "N",
          value_parser = clap::value_parser!(u32).range(2..))]
    messages: u32,
    /// What carries the messages. Default: what QUIPU_AM_TRANSPORT says, or rc.
    #[arg(long, value_name = "TRANSPORT")]
    transport: Option<Carrier>,
    /// Measure UCX's active messages and Open MPI next to ours, in turns, as far as they are installed.
    #[arg(long)]
    peers: bool,
    /// Print JSON instead of a table.
    #[arg(long)]
    json: bool,
}

/// What carries Active Messages.
#[derive(Clone, Copy, Debug, clap::ValueEnum)]
enum Carrier {
    /// Reliable queue pairs: shared memory on one host, TCP between hosts.
    Rc,
    /// UD queue pairs, which send UDP datagrams.
    Udp,
}

impl Carrier {
    fn name(self) -> &'static str {
        match self {
            Self::Rc => "rc",
            Self::Udp => "udp",
        }
    }
}

/// The variable that says what carries Active Messages, for this command and the process that answers.
const TRANSPORT: &str = "QUIPU_AM_TRANSPORT";

/// How much to measure.
#[derive(clap::Args)]
#[command(after_long_help = COST_EXAMPLES)]
struct CostOptions {
    /// What carries the messages. Default: what QUIPU_AM_TRANSPORT says, or rc.
    #[arg(long, value_name = "TRANSPORT")]
    transport: Option<Carrier>,
    /// Take fewer samples: rough numbers within seconds.
    #[arg(long)]
    quick: bool,
    /// Print JSON instead of a table.
    #[arg(long)]
    json: bool,
}

const COST_EXAMPLES: &str = "\
Examples:
  quipu am costs                                through shared memory
  QUIPU_SAME_HOST=never quipu am costs --json   over TCP, for programs

LogP: L latency, o_s and o_r overheads of sender and receiver, g gap, by the method of Culler et al.
The parts of a request and its reply are measured one by one, in one thread that is both ends. Their
sum is less than the whole: caches serve a part that is repeated better.";

const EXAMPLES: &str = "\
Examples:
  quipu am bench                                through shared memory
  QUIPU_SAME_HOST=never quipu am bench          over TCP
  quipu am bench --transport udp --peers        over UDP, next to UCX over TCP
  QUIPU_ADDRESS=::1 quipu am bench --json       of IPv6, for programs
  quipu am bench --peers --rounds 5             next to UCX and Open MPI

Each line has the lower quartile, median and upper quartile over the rounds. The last column is the
median of the differences or ratios within a round, which cancels disturbances of both.";

/// The failure of a measurement.
fn failed(error: Box<dyn std::error::Error>) -> Failure {
    let remedy = "`quipu doctor` says what works on this machine";
    Failure::new("the measurement has failed", error, remedy)
}

/// Measures and judges what `quipu bench --am` prints.
pub(crate) fn rows(quick: bool, json: bool) -> Result<ExitCode, Failure> {
    let (rounds, messages) = if quick { (3, 5_000) } else { (9, 20_000) };
    rows::run(Extent { rounds, messages }, json).map_err(failed)?;
    Ok(ExitCode::SUCCESS)
}

/// Runs this command again with the variable that names the transport, unless it names that already.
fn run_over(carrier: Option<Carrier>) -> Result<Option<ExitCode>, Failure> {
    let Some(name) = carrier.map(Carrier::name) else { return Ok(None) };
    if std::env::var(TRANSPORT).is_ok_and(|value| value == name) {
        return Ok(None);
    }
    let mut again = Command::new(std::env::current_exe()?);
    let status = again.args(std::env::args_os().skip(1)).env(TRANSPORT, name).status()?;
    Ok(Some(ExitCode::from(status.code().map_or(1, |code| code as u8))))
}

/// Runs `quipu am`.
pub(crate) fn run(options: &Options) -> Result<ExitCode, Failure> {
    let carrier = match &options.task {
        Task::Bench(options) => options.transport,
        Task::Costs(options) => options.transport,
        Task::Answer => None,
    };
    if let Some(code) = run_over(carrier)? {
        return Ok(code);
    }
    match &options.task {
        Task::Answer => bench::answer().map_err(failed)?,
        Task::Costs(options) => {
            let (rounds, messages) = if options.quick { (3, 2000) } else { (9, 20_000) };
            let bytes = if options.quick { 4 << 20 } else { 16 << 20 };
            let extent = costs::Extent { rounds, messages, bytes };
            let costs = costs::measure(answering()?, extent).map_err(failed)?;
            if options.json { println!("{costs}") } else { costs::print(&costs) }
        }
        Task::Bench(options) => {
            let peer = answering()?;
            let extent = Extent { rounds: options.rounds, messages: options.messages };
            if options.peers {
                let is = |name, value: &str| std::env::var(name).is_ok_and(|how| how == value);
                let is_tcp = is("QUIPU_SAME_HOST", "never") || is(TRANSPORT, "udp");
                let comparison = peers::compare(peer, extent, is_tcp).map_err(failed)?;
                if options.json {
                    print_peers_json(&comparison)
                } else {
                    print_peers(&comparison)
                }
                return Ok(ExitCode::SUCCESS);
            }
            let mut lines = bench::measure(peer, extent).map_err(failed)?;
            lines.push(bench::cost(extent).map_err(failed)?);
            if options.json { print_json(&lines) } else { print_table(&lines) }
        }
    }
    Ok(ExitCode::SUCCESS)
}

/// The command that answers measurements.
fn answering() -> Result<Command, Failure> {
    let mut peer = Command::new(std::env::current_exe()?);
    peer.args(["am", "answer"]);
    Ok(peer)
}

fn quartiles(values: &[f64]) -> String {
    match values {
        [] => "-".into(),
        _ => [1, 2, 3].map(|which| format!("{:.1}", quartile(values, which))).join(" / "),
    }
}

/// The difference of times, or the ratio of rates, within rounds.
fn comparison(line: &Line) -> String {
    let within = line.raw.iter().zip(&line.am);
    if line.raw.is_empty() {
        return String::new();
    }
    if line.what.ends_with("ns") {
        let differences: Vec<f64> = within.map(|(raw, am)| am - raw).collect();
        return format!("{:+.1} ns", quartile(&differences, 2));
    }
    let ratios: Vec<f64> = within.map(|(raw, am)| am / raw).collect();
    format!("x {:.3}", quartile(&ratios, 2))
}

fn print_table(lines: &[Line]) {
    println!("{:34} {:26} {:26} Active Messages cost", "", "queue pair", "Active Messages");
    for line in lines {
        let (raw, am) = (quartiles(&line.raw), quartiles(&line.am));
        println!("{:34} {raw:26} {am:26} {}", line.what, comparison(line));
    }
}

/// The median of the ratios within rounds: how often their time ours is.
fn ratio(peer: &Peer) -> f64 {
    let within = peer.ours.iter().zip(&peer.theirs);
    quartile(&within.map(|(ours, theirs)| ours / theirs).collect::<Vec<_>>(), 2)
}

fn print_peers(comparison: &Comparison) {
    println!("{:34} {:12} {:26} {:26} ours / theirs", "", "peer", "theirs", "Active Messages");
    for peer in &comparison.peers {
        let (theirs, ours) = (quartiles(&peer.theirs), quartiles(&peer.ours));
        println!("{:34} {:12} {theirs:26} {ours:26} {:.2}", peer.what, peer.name, ratio(peer));
    }
    for reason in &comparison.skipped {
        println!("{reason}");
    }
}

fn print_peers_json(comparison: &Comparison) {
    let values = |values: &[f64]| [1, 2, 3].map(|which| quartile(values, which));
    let value = |peer: &Peer| {
        let (theirs, ours) = (values(&peer.theirs), values(&peer.ours));
        json!({ "what": peer.what, "peer": peer.name, "theirs": theirs, "active_messages": ours,
                "ratio": ratio(peer) })
    };
    let peers: Vec<_> = comparison.peers.iter().map(value).collect();
    println!("{}", json!({ "peers": peers, "skipped": comparison.skipped }));
}

fn print_json(lines: &[Line]) {
    let values = |values: &[f64]| [1, 2, 3].map(|which| quartile(values, which));
    let list: Vec<_> = lines
        .iter()
        .map(|line| {
            let raw = (!line.raw.is_empty()).then(|| values(&line.raw));
            json!({ "what": line.what, "queue_pair": raw, "active_messages": values(&line.am) })
        })
        .collect();
    println!("{}", json!(list));
}
