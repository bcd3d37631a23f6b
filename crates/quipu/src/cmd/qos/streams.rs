//! `quipu qos streams`: what weights and limits do to SDP, to IP over the adapter (IPoIB) and to bulk data of
//! queue pairs that leave by one port of this machine.
//!
//! | lane and level | what sends |
//! |---|---|
//! | 0 | writes of 256 KB, of `quipu qos worker` |
//! | 1 | a sockets program under `quipu sockets --sdp` |
//! | 2 | the same program over the kernel's TCP under `quipu ipoib` |
//! | 3 | writes of 256 KB, of a second process |
//!
//! All of them send all the time. Lanes that a setting does not compare have no weight there: they wait.

mod report;
mod sources;

use std::net::{IpAddr, Ipv4Addr};
use std::process::ExitCode;
use std::thread;
use std::time::{Duration, Instant};

use quipu_host::WantedAddress;
use quipu_host::nic::qos::{Config as Rules, Entry, LANES, LaneUse};
use quipu_host::qos::replace;

use self::report::{Report, Share, Skipped};
use self::sources::Sources;
use super::super::failure::Failure;
use super::super::variables;
use super::bench::{LIMIT_UNIT, PACKET, port};
use super::process::Trouble;
use super::{print_measured, rate};

/// How long tables are in force before anything is counted.
const SETTLE: Duration = Duration::from_millis(200);

/// How often it is looked whether a lane has sent a packet, and for how long at most.
const LOOK: Duration = Duration::from_millis(1);
const LONGEST_PERIOD: Duration = Duration::from_millis(500);

/// What to measure.
#[derive(clap::Args)]
#[command(after_long_help = EXAMPLES)]
pub(super) struct Options {
    /// The port's rate. If a sender alone moves less than four times this rate, the rate is reduced,
    /// because the tables decide the shares only while all lanes are full.
    #[arg(long, value_name = "RATE", default_value = "100Mbps", value_parser = rate)]
    rate: u64,
    /// An address of this machine that no other program of yours sends by. Default: one of 127.0.0.0/8 that
    /// depends on the process number.
    #[arg(long, short, value_name = "ADDRESS", value_parser = variables::trimmed::<WantedAddress>)]
    address: Option<WantedAddress>,
    /// Seconds for each setting.
    #[arg(long, value_name = "SECONDS", default_value_t = 1.5)]
    seconds: f64,
    /// 0.35 seconds for each setting.
    #[arg(long, short)]
    quick: bool,
    /// Print JSON.
    #[arg(long)]
    json: bool,
}

const EXAMPLES: &str = "\
Examples:
  quipu qos streams                           about a minute
  quipu qos streams --quick --rate 200Mbps    about 15 seconds

Each row compares what two lanes have sent with the ratio that follows from the tables. Rows without
a limit show what one sender alone moves when the port has no rate. IPoIB needs user namespaces and
/dev/net/tun; without them, its rows are left out.";

/// What sends; the value is its lane and service level.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Bulk = 0,
    Sdp = 1,
    Ipoib = 2,
    Bulk2 = 3,
}

impl Kind {
    fn lane(self) -> u8 {
        self as u8
    }

    fn name(self) -> &'static str {
        match self {
            Self::Bulk | Self::Bulk2 => "bulk",
            Self::Sdp => "sdp",
            Self::Ipoib => "ipoib",
        }
    }
}

/// Tables of a setting.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Tables {
    /// One lane only, at a port without a rate.
    Alone,
    /// The first lane has so much weight, the other one has 1.
    Weights(u8),
    /// The first lane goes first, with this `high_limit`.
    Limit(u8),
}

/// Two senders, the number of streams of each (of SDP and IPoIB), and the settings to measure.
type Mix = ((Kind, Kind), usize, &'static [Tables]);

const OVER_BULK: &[Tables] = &[
    Tables::Weights(1),
    Tables::Weights(4),
    Tables::Weights(16),
    Tables::Weights(64),
    Tables::Limit(2),
    Tables::Limit(64),
];
const OVER_STREAMS: &[Tables] = &[Tables::Weights(1), Tables::Weights(4), Tables::Weights(64)];
const PAIR: &[Tables] = &[
    Tables::Weights(1),
    Tables::Weights(4),
    Tables::Weights(16),
    Tables::Weights(255),
    Tables::Limit(4),
];

const ALONE: &[Tables] = &[Tables::Alone];

/// What one sender moves alone comes first: it decides the rate of the others.
const MIXES: [Mix; 8] = [
    ((Kind::Ipoib, Kind::Ipoib), 1, ALONE),
    ((Kind::Sdp, Kind::Sdp), 1, ALONE),
    ((Kind::Bulk2, Kind::Bulk2), 1, ALONE),
    ((Kind::Ipoib, Kind::Bulk), 3, OVER_BULK),
    ((Kind::Ipoib, Kind::Sdp), 1, OVER_STREAMS),
    ((Kind::Sdp, Kind::Ipoib), 1, OVER_STREAMS),
    ((Kind::Sdp, Kind::Bulk), 3, OVER_BULK),
    ((Kind::Bulk2, Kind::Bulk), 1, PAIR),
];

impl Tables {
    /// What a port is to follow.
    fn rules(self, (first, other): (Kind, Kind), rate: u64) -> Rules {
        let entry = |kind: Kind, weight| Entry { lane: kind.lane(), weight };
        let (rate, high_limit, high, low) = match self {
            Self::Alone => (0, 0, vec![], vec![entry(first, 255)]),
            Self::Weights(weight) => (rate, 0, vec![], vec![entry(first, weight), entry(other, 1)]),
            Self::Limit(limit) => (rate, limit, vec![entry(first, 255)], vec![entry(other, 1)]),
        };
        Rules { rate, high_limit, high, low, ..Rules::default() }
    }

    /// The ratio of the first lane to the other one that follows, if both always have something to send.
    fn expected(self) -> f64 {
        match self {
            Self::Alone => f64::INFINITY,
            Self::Weights(weight) => f64::from(weight),
            Self::Limit(limit) => {
                f64::from((u32::from(limit) * LIMIT_UNIT).div_ceil(PACKET).max(1))
            }
        }
    }
}

/// Measures, and shows.
pub(super) fn run(options: &Options) -> Result<ExitCode, Failure> {
    print_measured(measure(options), options.json)?;
    Ok(ExitCode::SUCCESS)
}

/// An address of the loopback network that other processes hardly have.
fn own_address() -> WantedAddress {
    let [.., high, low] = std::process::id().to_be_bytes();
    WantedAddress::from(IpAddr::V4(Ipv4Addr::new(127, 77, high, low.clamp(1, 254))))
}

fn measure(options: &Options) -> Result<Report, Trouble> {
    let address = options.address.clone().unwrap_or_else(own_address);
    let ip = address.ip;
    if port(ip).is_some() {
        return Err(format!("programs of yours send by the port of {ip} already").into());
    }
    let seconds = if options.quick { 0.35 } else { options.seconds.clamp(0.1, 3600.0) };
    let mut sources = Sources::new(address, options.rate)?;
    let mut report = Report { shares: Vec::new(), skipped: Vec::new() };
    for kind in [Kind::Bulk, Kind::Bulk2, Kind::Sdp, Kind::Ipoib] {
        eprintln!("starting {}", kind.name());
        match sources.start(kind) {
            Ok(()) => {}
            // Queue pairs have to work; what stands on them may be missing here.
            Err(why) if matches!(kind, Kind::Bulk | Kind::Bulk2) => return Err(why),
            Err(why) => report.skipped.push(Skipped { kind: kind.name(), why: why.to_string() }),
        }
    }
    for (kinds, streams, settings) in MIXES {
        let (Some(first), Some(other)) = (sources.find(kinds.0), sources.find(kinds.1)) else {
            continue;
        };
        for source in [first, other] {
            sources.all[source].set_streams(streams)?;
        }
        for &tables in settings {
            eprintln!("{} over {}: {tables:?}", kinds.0.name(), kinds.1.name());
            let rate = report.rate_of(kinds, options.rate);
            report.shares.push(share(ip, rate, kinds, tables, seconds)?);
        }
        for source in [first, other] {
            sources.all[source].set_streams(0)?;
        }
    }
    Ok(report)
}

/// Measures how two lanes share the port.
fn share(
    address: IpAddr,
    rate: u64,
    kinds: (Kind, Kind),
    tables: Tables,
    seconds: f64,
) -> Result<Share, Trouble> {
    replace(address, &tables.rules(kinds, rate))?;
    thread::sleep(SETTLE);
    let (begun, before) = used_after_packet(address, kinds.1)?;
    thread::sleep(Duration::from_secs_f64(seconds));
    let (ended, after) = used_after_packet(address, kinds.1)?;
    let elapsed = ended.duration_since(begun).as_secs_f64();
    let mbps = |kind: Kind| {
        let lane = usize::from(kind.lane());
        after[lane].octets.wrapping_sub(before[lane].octets) as f64 * 8e-6 / elapsed
    };
    Ok(Share { kinds, tables, rate, mbps: (mbps(kinds.0), mbps(kinds.1)) })
}

/// What the lanes have sent, just after a packet of one of them: whole periods of a lane that sends few
/// packets are counted. At 255:1 and 100 Mbit/s it sends 12 a second.
fn used_after_packet(address: IpAddr, of: Kind) -> Result<(Instant, [LaneUse; LANES]), Trouble> {
    let used = || port(address).map(|port| port.lanes).ok_or("the port is gone");
    let (lane, before) = (usize::from(of.lane()), used()?);
    let deadline = Instant::now() + LONGEST_PERIOD;
    loop {
        thread::sleep(LOOK);
        let (now, lanes) = (Instant::now(), used()?);
        if lanes[lane].octets != before[lane].octets || now >= deadline {
            return Ok((now, lanes));
        }
    }
}
