//! `quipu qos` and the options of `quipu run` for it: quality of service of this user's ports.

mod bench;
mod process;
mod stream;
mod streams;

use std::ffi::OsString;
use std::io::{self, ErrorKind};
use std::net::IpAddr;
use std::path::PathBuf;
use std::process::ExitCode;

use quipu_host::QosConfig;
use quipu_host::nic::qos::{Config as Rules, LANES, LaneUse, Note, Service, parse_rate, show_rate};
use quipu_host::qos::{PortView, QosFileError, ports, replace};
use serde_json::{Value, json};

use super::failure::Failure;
use super::output::table;

fn rate(text: &str) -> Result<u64, String> {
    parse_rate(text).ok_or_else(|| "it is no rate from 1kbps to 1Tbps, such as 10Gbps".to_owned())
}

/// The port of a program.
#[derive(clap::Args, Clone, Debug, Default)]
pub(crate) struct QosOptions {
    /// Send at no more than this rate, such as 10Gbps. Programs of one user on one address share it.
    #[arg(long, env = "QUIPU_RATE", value_name = "RATE", value_parser = rate)]
    rate: Option<u64>,
    /// Tables and rules of quality of service: OpenSM's options, or TOML (docs/qos.md).
    #[arg(long, env = "QUIPU_QOS", value_name = "FILE")]
    qos: Option<PathBuf>,
}

impl QosOptions {
    /// Refuses a file that makes no sense, and shows what its author had better know.
    pub(crate) fn check(&self) -> Result<(), Failure> {
        let wanted = QosConfig { file: self.qos.clone(), rate: self.rate };
        let (_, notes) = wanted.read().map_err(|why| wrong(why).with_code(125))?;
        if self.qos.is_some() {
            show_notes(&notes);
        }
        Ok(())
    }

    /// What an adapter of this process is to do; `None` if nothing is asked for.
    pub(crate) fn config(&self) -> Option<QosConfig> {
        let wanted = QosConfig { file: self.qos.clone(), rate: self.rate };
        (wanted != QosConfig::default()).then_some(wanted)
    }

    /// The service level that the rules give a service of this process.
    pub(crate) fn level_of(&self, service: &Service<'_>) -> u8 {
        let read = self.config().and_then(|wanted| wanted.read().ok());
        read.and_then(|(rules, _)| rules.service_level(service)).unwrap_or(0)
    }

    /// The variables of the program's environment.
    pub(crate) fn variables(&self) -> Vec<(&'static str, OsString)> {
        let file = self.qos.as_ref().and_then(|file| std::path::absolute(file).ok());
        let file = file.map(|file| ("QUIPU_QOS", file.into()));
        let rate = self.rate.map(|rate| ("QUIPU_RATE", rate.to_string().into()));
        file.into_iter().chain(rate).collect()
    }
}

fn wrong(why: QosFileError) -> Failure {
    let remedy = match &why {
        QosFileError::Unreadable { .. } => "name a file that you can read",
        QosFileError::Wrong(_) => "correct it; docs/qos.md has every key",
    };
    Failure::new("cannot use this configuration of quality of service", why, remedy)
}

fn show_notes(notes: &[Note]) {
    for note in notes {
        match note.line {
            0 => eprintln!("quipu: note: {}", note.what),
            line => eprintln!("quipu: note: line {line}: {}", note.what),
        }
    }
}

/// What to do.
#[derive(clap::Args)]
#[command(after_long_help = EXAMPLES)]
pub(crate) struct Options {
    #[command(subcommand)]
    task: Task,
}

const EXAMPLES: &str = "\
Examples:
  quipu qos check opensm.conf        says what is wrong with a file, or how it is understood
  quipu run --rate 1Gbps --qos opensm.conf -- ib_write_bw --sl 1
  quipu qos show                     the ports of your programs: lanes, weights, what was sent
  quipu qos set other.toml           changes them while programs run
  quipu qos bench --quick            measures weights, and pings next to bulk data
  quipu qos streams --quick          measures SDP, IP over the adapter and bulk data at one port

A port is shared by all programs of one user with one address that were started with --rate or --qos.";

#[derive(clap::Subcommand)]
enum Task {
    /// Show the ports that your programs send by.
    Show(ShowOptions),
    /// Give ports another configuration while programs run.
    Set(SetOptions),
    /// Check a file, and show how it is understood.
    Check(CheckOptions),
    /// Measure a port on this machine: weights, the high limit, and pings next to bulk data.
    Bench(bench::Options),
    /// Measure SDP, IP over the adapter and bulk data that leave by one port of this machine.
    Streams(streams::Options),
    /// A process that sends by the port, for `bench`.
    #[command(hide = true)]
    Worker(bench::WorkerOptions),
    /// A sockets program, for `streams`.
    #[command(hide = true)]
    Stream(stream::Options),
}

#[derive(clap::Args)]
struct ShowOptions {
    /// Print JSON.
    #[arg(long)]
    json: bool,
}

#[derive(clap::Args)]
struct SetOptions {
    /// The file: OpenSM's options, or TOML.
    #[arg(required_unless_present = "rate")]
    file: Option<PathBuf>,
    /// The rate, whatever the file says. Without a file, nothing else is changed.
    #[arg(long, value_name = "RATE", value_parser = rate)]
    rate: Option<u64>,
    /// The port of this address only. Default: all ports of your programs.
    #[arg(long, value_name = "ADDRESS")]
    address: Option<IpAddr>,
}

#[derive(clap::Args)]
struct CheckOptions {
    /// The file: OpenSM's options, or TOML.
    file: PathBuf,
}

/// Does it.
pub(crate) fn run(options: &Options) -> Result<ExitCode, Failure> {
    match &options.task {
        Task::Show(options) => show(options),
        Task::Set(options) => set(options),
        Task::Check(options) => check(options),
        Task::Bench(options) => bench::run(options),
        Task::Streams(options) => streams::run(options),
        Task::Worker(options) => bench::work(options),
        Task::Stream(options) => stream::run(options),
    }
}

/// What was measured at a port.
trait Measured {
    fn print(&self) -> io::Result<()>;
    fn as_json(&self) -> Value;
}

/// Prints what was measured, as a table or as JSON.
fn print_measured<M: Measured>(
    measured: Result<M, process::Trouble>,
    as_json: bool,
) -> Result<M, Failure> {
    let remedy = "`quipu doctor` checks what works on this machine";
    let measured =
        measured.map_err(|error| Failure::new("cannot measure the port", error, remedy))?;
    match as_json {
        true => println!("{:#}", measured.as_json()),
        false => measured.print()?,
    }
    Ok(measured)
}

fn check(options: &CheckOptions) -> Result<ExitCode, Failure> {
    let wanted = QosConfig { file: Some(options.file.clone()), rate: None };
    let (rules, notes) = wanted.read().map_err(wrong)?;
    show_notes(&notes);
    print!("{}", rules.to_toml());
    Ok(ExitCode::SUCCESS)
}

fn looked_up() -> Result<Vec<PortView>, Failure> {
    let what = "cannot look at the ports";
    ports().map_err(|error| {
        Failure::new(what, error, "check the folder of this user in /run/user or /dev/shm")
    })
}

const START: &str = "start one with `quipu run --rate RATE --qos FILE -- PROGRAM`";

fn set(options: &SetOptions) -> Result<ExitCode, Failure> {
    let file = QosConfig { file: options.file.clone(), rate: options.rate };
    let read = options.file.as_ref().map(|_| file.read().map_err(wrong)).transpose()?;
    let chosen = |port: &PortView| options.address.is_none_or(|address| address == port.address);
    let ports: Vec<_> = looked_up()?.into_iter().filter(chosen).collect();
    if ports.is_empty() {
        let what = "cannot set quality of service";
        return Err(Failure::new(what, "no program of yours sends by such a port", START));
    }
    if let Some((_, notes)) = &read {
        show_notes(notes);
    }
    for port in ports {
        let rules = match &read {
            Some((rules, _)) => rules.clone(),
            None => Rules { rate: options.rate.unwrap_or_default(), ..port.rules },
        };
        replace(port.address, &rules).map_err(|error| {
            let why = match error.kind() {
                ErrorKind::NotFound => "its programs have ended".to_owned(),
                ErrorKind::ResourceBusy => "its programs do not let go of it".to_owned(),
                _ => error.to_string(),
            };
            Failure::new(format!("cannot set the port of {}", port.address), why, "try it again")
        })?;
        println!("{}: {}", port.address, show_rate(rules.rate));
    }
    Ok(ExitCode::SUCCESS)
}

fn show(options: &ShowOptions) -> Result<ExitCode, Failure> {
    let ports = looked_up()?;
    if options.json {
        println!("{:#}", json!(ports.iter().map(as_json).collect::<Vec<_>>()));
        return Ok(ExitCode::SUCCESS);
    }
    if ports.is_empty() {
        println!("no program of yours sends by a port with quality of service; {START}");
    }
    for (index, port) in ports.iter().enumerate() {
        if index > 0 {
            println!("");
        }
        show_port(port)?;
    }
    Ok(ExitCode::SUCCESS)
}

/// The lanes of a port that may send, or have sent something.
fn lanes(port: &PortView) -> impl Iterator<Item = usize> + '_ {
    let served = port.rules.used_lanes() & !port.rules.starved_lanes();
    (0..LANES).filter(move |&lane| served & 1 << lane != 0 || port.lanes[lane].packets > 0)
}

fn weight(table: &[quipu_host::nic::qos::Entry], lane: usize) -> u32 {
    let entries = table.iter().filter(|entry| usize::from(entry.lane) == lane);
    entries.map(|entry| u32::from(entry.weight)).sum()
}

/// Microseconds that a queue pair has waited for a turn, on average.
fn wait_us(used: &LaneUse) -> f64 {
    used.wait_ns as f64 / used.waits.max(1) as f64 / 1000.0
}

fn show_port(port: &PortView) -> io::Result<()> {
    let PortView { address, rules, processes, .. } = port;
    let processes: Vec<_> = processes.iter().map(ToString::to_string).collect();
    println!("port {address}: {}, processes {}", show_rate(rules.rate), processes.join(", "));
    let mode = if rules.strict { "strict" } else { "carried over" };
    println!("high_limit {}, {} lanes, weights {mode}", rules.high_limit, rules.max_vls);
    let heading = ["lane", "service levels", "high", "low", "bytes", "packets", "wait us", ""];
    let mut rows = vec![heading.map(str::to_owned).into()];
    for lane in lanes(port) {
        let levels = (0..16u8).filter(|&sl| rules.lane_of(sl).map(usize::from) == Some(lane));
        let levels: Vec<_> = levels.map(|sl| sl.to_string()).collect();
        let used = &port.lanes[lane];
        let starved = rules.starved_lanes() & 1 << lane != 0;
        rows.push(vec![
            format!("VL{lane}"),
            levels.join(","),
            weight(&rules.high, lane).to_string(),
            weight(&rules.low, lane).to_string(),
            used.octets.to_string(),
            used.packets.to_string(),
            format!("{:.1}", wait_us(used)),
            if starved { "starved" } else { "" }.to_owned(),
        ]);
    }
    table(&mut io::stdout().lock(), &rows)?;
    for note in rules.notes() {
        println!("note: {}", note.what);
    }
    Ok(())
}

fn as_json(port: &PortView) -> serde_json::Value {
    let rules = &port.rules;
    let lane = |lane: usize| {
        let used = &port.lanes[lane];
        json!({
            "lane": lane,
            "high": weight(&rules.high, lane),
            "low": weight(&rules.low, lane),
            "octets": used.octets,
            "packets": used.packets,
            "wait_ns": used.wait_ns,
            "waits": used.waits,
            "starved": rules.starved_lanes() & 1 << lane != 0,
        })
    };
    json!({
        "address": port.address.to_string(),
        "rate": rules.rate,
        "strict": rules.strict,
        "high_limit": rules.high_limit,
        "max_vls": rules.max_vls,
        "sl2vl": rules.sl2vl,
        "processes": port.processes,
        "lanes": lanes(port).map(lane).collect::<Vec<_>>(),
    })
}
