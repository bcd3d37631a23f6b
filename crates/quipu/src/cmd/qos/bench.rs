//! `quipu qos bench`: what the arbiter and the clock of a port do to processes of this machine.
//!
//! Two processes send bulk data by one port, in two lanes; a third one sends pings. All of them go to this
//! process, which does not send by the port. The tables change while they run.

mod report;
pub(super) mod sink;
mod worker;

use std::fs;
use std::net::IpAddr;
use std::path::PathBuf;
use std::process::{Command, ExitCode};
use std::thread;
use std::time::Duration;

use quipu_host::WantedAddress;
use quipu_host::nic::qos::{Config as Rules, Entry, LANES, LaneUse};
use quipu_host::qos::{ports, replace};

use self::report::{Pings, Report, Share};
use self::sink::Sink;
use super::super::failure::Failure;
use super::super::variables;
use super::process::{Process, Trouble};
use super::{print_measured, rate};

/// The lanes, and service levels, of the two bulk senders and of the pings.
const BULK_LANES: [u8; 2] = [0, 1];
const PING_LANE: u8 = 2;
/// Octets of the greatest packet of these queue pairs: 4096 and its headers.
pub(super) const PACKET: u32 = 4122;
/// Octets of a unit of weight, and of `high_limit`.
const UNIT: u32 = 64;
pub(super) const LIMIT_UNIT: u32 = 4096;
/// How long tables are in force before anything is counted.
const SETTLE: Duration = Duration::from_millis(150);

/// What to measure.
#[derive(clap::Args)]
#[command(after_long_help = EXAMPLES)]
pub(super) struct Options {
    /// The port's rate.
    #[arg(long, value_name = "RATE", default_value = "1Gbps", value_parser = rate)]
    rate: u64,
    /// An address of this machine that no other program of yours sends by.
    #[arg(long, short, env = "QUIPU_ADDRESS", value_name = "ADDRESS", default_value = "127.0.0.1",
          value_parser = variables::trimmed::<WantedAddress>)]
    address: WantedAddress,
    /// Seconds for each setting.
    #[arg(long, value_name = "SECONDS", default_value_t = 2.0)]
    seconds: f64,
    /// Fewer settings, and a second for each.
    #[arg(long, short)]
    quick: bool,
    /// Print JSON.
    #[arg(long)]
    json: bool,
    /// Draw the ratios as SVG.
    #[arg(long, value_name = "FILE")]
    plot: Option<PathBuf>,
}

const EXAMPLES: &str = "\
Examples:
  quipu qos bench                             about a minute
  quipu qos bench --quick --rate 500Mbps
  quipu qos bench --plot weights.svg --json > qos.json

The pings' answers do not go by the port: a ping waits there once. Numbers of a machine with fewer
free processors than processes (four) include waits for a processor.";

/// The level of a worker.
#[derive(clap::Args)]
pub(super) struct WorkerOptions {
    /// Its service level.
    level: u8,
}

/// Runs a worker.
pub(super) fn work(options: &WorkerOptions) -> Result<ExitCode, Failure> {
    let failed = |error: Trouble| Failure::new("a worker has failed", error, "");
    worker::run(options.level).map_err(failed)?;
    Ok(ExitCode::SUCCESS)
}

/// Measures, and shows.
pub(super) fn run(options: &Options) -> Result<ExitCode, Failure> {
    let report = print_measured(measure(options), options.json)?;
    if let Some(path) = &options.plot {
        fs::write(path, report.plot().svg()).map_err(|error| {
            let what = format!("cannot write {}", path.display());
            Failure::new(what, error, "give --plot a file that you can write")
        })?;
    }
    Ok(ExitCode::SUCCESS)
}

/// The processes and the port between them.
struct Bench {
    address: IpAddr,
    rate: u64,
    seconds: f64,
    bulk: [Process; 2],
    pings: Process,
    shares: Vec<Share>,
    /// Has the memory that they write to.
    _sink: Sink,
}

fn measure(options: &Options) -> Result<Report, Trouble> {
    let mut bench = Bench::start(options)?;
    let quick = options.quick;
    let weights: &[u8] = if quick { &[1, 4, 64] } else { &[1, 2, 4, 8, 16, 32, 64, 128, 255] };
    let strict: &[u8] = if quick { &[64, 255] } else { &[1, 16, 64, 128, 255] };
    let limits: &[u8] = if quick { &[0, 16] } else { &[0, 1, 2, 4, 8, 16, 64, 254] };
    let count = if quick { 300 } else { 2000 };
    let idle = bench.ping("idle", "port without bulk data", bench.one_lane(), count)?;
    bench.tell_bulk("go\n")?;
    for &weight in weights {
        let rules = bench.rules(&[], &[(0, weight), (1, 1)]);
        bench.share("weights", weight, f64::from(weight), &rules)?;
    }
    for &weight in strict {
        // While an entry has weight left, a whole packet goes.
        let packets = (u32::from(weight) * UNIT).div_ceil(PACKET.div_ceil(UNIT) * UNIT);
        let rules = Rules { strict: true, ..bench.rules(&[], &[(0, weight), (1, 1)]) };
        bench.share("strict", weight, f64::from(packets), &rules)?;
    }
    for &limit in limits {
        let packets = (u32::from(limit) * LIMIT_UNIT).div_ceil(PACKET).max(1);
        let rules = Rules { high_limit: limit, ..bench.rules(&[(0, 255)], &[(1, 1)]) };
        bench.share("high_limit", limit, f64::from(packets), &rules)?;
    }
    let mut pings = vec![idle];
    pings.push(bench.ping(
        "one lane",
        "next to bulk data, without lanes",
        bench.one_lane(),
        count,
    )?);
    let rules = bench.rules(&[(PING_LANE, 255)], &[(0, 1), (1, 1)]);
    pings.push(bench.ping(
        "high lane",
        "next to bulk data, in a lane that goes first",
        rules,
        count,
    )?);
    bench.tell_bulk("stop\n")?;
    for bulk in &mut bench.bulk {
        bulk.line()?;
    }
    Ok(Report { rate: options.rate, packet: PACKET, shares: bench.shares, pings })
}

impl Bench {
    fn start(options: &Options) -> Result<Self, Trouble> {
        let mut sink = Sink::open(&options.address)?;
        let address = options.address.ip;
        if port(address).is_some() {
            return Err(format!("programs of yours send by the port of {address} already").into());
        }
        let own = std::env::current_exe()?;
        let mut start = |level: u8, answers| {
            let mut command = Command::new(&own);
            command.args(["qos", "worker", &level.to_string()]);
            command.env("QUIPU_ADDRESS", options.address.to_string());
            command.env("QUIPU_RATE", options.rate.to_string()).env_remove("QUIPU_QOS");
            sink.start(command, answers)
        };
        let bulk = [start(BULK_LANES[0], false)?, start(BULK_LANES[1], false)?];
        let pings = start(PING_LANE, true)?;
        let seconds = if options.quick { 1.0 } else { options.seconds.clamp(0.2, 3600.0) };
        let bench = Self {
            address,
            rate: options.rate,
            seconds,
            bulk,
            pings,
            shares: Vec::new(),
            _sink: sink,
        };
        // A worker that could not join measures nothing.
        let members = port(address).map(|port| port.processes).unwrap_or_default();
        let mut all = bench.bulk.iter().chain([&bench.pings]).map(Process::number);
        if !all.all(|number| members.contains(&number)) {
            return Err("the workers do not share a port".into());
        }
        drop(all);
        Ok(bench)
    }

    fn tell_bulk(&mut self, line: &str) -> Result<(), Trouble> {
        self.bulk.iter_mut().try_for_each(|bulk| bulk.tell(line))
    }

    fn rules(&self, high: &[(u8, u8)], low: &[(u8, u8)]) -> Rules {
        let table = |entries: &[(u8, u8)]| {
            entries.iter().map(|&(lane, weight)| Entry { lane, weight }).collect()
        };
        Rules { rate: self.rate, high: table(high), low: table(low), ..Rules::default() }
    }

    /// All service levels in one lane: as without quality of service.
    fn one_lane(&self) -> Rules {
        Rules { sl2vl: [0; 16], ..self.rules(&[], &[(0, 1)]) }
    }

    /// Has the port follow other rules.
    fn set(&self, rules: &Rules) -> Result<(), Trouble> {
        replace(self.address, rules)?;
        thread::sleep(SETTLE);
        Ok(())
    }

    /// What each lane has sent so far.
    fn used(&self) -> Result<[LaneUse; LANES], Trouble> {
        Ok(port(self.address).ok_or("the port is gone")?.lanes)
    }

    /// Measures how the bulk senders share the port.
    fn share(
        &mut self,
        rule: &'static str,
        value: u8,
        expected: f64,
        rules: &Rules,
    ) -> Result<(), Trouble> {
        self.set(rules)?;
        let (begun, before) = (std::time::Instant::now(), self.used()?);
        thread::sleep(Duration::from_secs_f64(self.seconds));
        let (after, elapsed) = (self.used()?, begun.elapsed().as_secs_f64());
        let octets = BULK_LANES.map(|lane| {
            let lane = usize::from(lane);
            (after[lane].octets.wrapping_sub(before[lane].octets)) as f64
        });
        let ratio = octets[0] / octets[1];
        let of_rate = (octets[0] + octets[1]) * 8.0 / elapsed / self.rate as f64;
        self.shares.push(Share { rule, value, expected, ratio, of_rate });
        Ok(())
    }

    /// Measures pings.
    fn ping(
        &mut self,
        name: &'static str,
        what: &'static str,
        rules: Rules,
        count: u32,
    ) -> Result<Pings, Trouble> {
        self.set(&rules)?;
        self.pings.tell(&format!("ping {count}\n"))?;
        let line = self.pings.line()?;
        let times: Result<Vec<u64>, _> = line.split_whitespace().map(str::parse).collect();
        Ok(Pings::of(name, what, times?))
    }
}

/// The port of an address, if a program of this user sends by it.
pub(super) fn port(address: IpAddr) -> Option<quipu_host::qos::PortView> {
    ports().ok()?.into_iter().find(|port| port.address == address)
}
