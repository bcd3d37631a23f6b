//! `quipu qpip`: tools whose queue pairs are connections of the adapter's own TCP.

mod answer;
mod conditions;
mod cpu;
mod echo;
mod files;
mod get;
mod http;
mod iperf3;
mod memory;
mod nc;
mod pingpong;
mod places;
mod response;
mod sample;
mod serve;
mod stamp;
mod ttcp;

use std::net::{IpAddr, SocketAddr};
use std::process::ExitCode;
use std::sync::atomic::{AtomicI32, Ordering};
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::sync::{Arc, OnceLock};
use std::thread;
use std::time::Duration;

use quipu::qpip::{Adapter, LinkSpec, Mode, QpipConfig, TcpQueuePair, TcpSettings, parse_address};
use quipu::{Config, Error};
use quipu_host::Interrupts;

use super::capture::PcapOptions;
use super::failure::Failure;
use super::variables::trimmed;

/// Which tool.
#[derive(clap::Args)]
#[command(after_long_help = SIGNALS)]
pub(crate) struct Options {
    #[command(subcommand)]
    tool: Tool,
}

#[derive(clap::Subcommand)]
enum Tool {
    /// Serve files or a page by HTTP from queue pairs, for curl and browsers.
    Serve(serve::Options),
    /// Fetch pages by HTTP through a queue pair, from any server.
    Get(get::Options),
    /// Measure bulk transfer as iperf3 does, with iperf3 at the other end.
    Iperf3(iperf3::Options),
    /// Send standard input to a peer, and write what it sends to standard output, like netcat.
    Nc(nc::Options),
    /// Measure bulk transfer between queue pairs, or between a queue pair and a socket.
    Ttcp(ttcp::Options),
    /// Measure round trips between queue pairs, or between a queue pair and a socket.
    Pingpong(pingpong::Options),
}

const SIGNALS: &str = "\
Exit codes: 0 done, 1 failed. Ctrl-C and SIGTERM end a server with 0. A tool that they end early
exits with 130 or 143.";

/// Runs it.
pub(crate) fn run(options: &Options) -> Result<ExitCode, Failure> {
    let outcome = match &options.tool {
        Tool::Serve(options) => serve::run(options),
        Tool::Get(options) => get::run(options),
        Tool::Iperf3(options) => iperf3::run(options),
        Tool::Nc(options) => nc::run(options),
        Tool::Ttcp(options) => ttcp::run(options),
        Tool::Pingpong(options) => pingpong::run(options),
    };
    // What failed since a signal came is no failure.
    u8::try_from(ENDS_WITH.load(Ordering::SeqCst)).map_or(outcome, |code| Ok(code.into()))
}

/// The exit code of a tool that a signal ends; negative as long as none does.
static ENDS_WITH: AtomicI32 = AtomicI32::new(-1);

/// What a signal is for a tool.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Signal {
    /// The end of a server, which has no other.
    Ends,
    /// The end of what is not done.
    Cuts,
}

impl Signal {
    /// The exit code that follows.
    fn code(self, signal: i32) -> i32 {
        match self {
            Self::Ends => 0,
            Self::Cuts => 128 + signal,
        }
    }
}
/// How long it may take to leave.
const LEAVE: Duration = Duration::from_secs(2);
/// After so long without an answer a tool says that it waits for one. A neighbour that is not there is told
/// of sooner.
const PATIENCE: Duration = Duration::from_secs(4);

/// Where the adapter is.
#[derive(clap::Args, Clone, Debug, Default)]
pub(crate) struct LinkOptions {
    /// Packet link: `tap:NAME`, `packet:INTERFACE`, `xdp:INTERFACE`, `ns:NAME` or `udp:ADDRESS:PORT`.
    /// `share:NAME` is the adapter of a `quipu nic --share NAME` of this user or, if there is none, of root;
    /// `share:NAME,user=USER` is that of another user.
    #[arg(long, short = 'L', env = "QUIPU_QPIP_LINK", value_name = "LINK",
          value_parser = trimmed::<LinkSpec>)]
    link: Option<LinkSpec>,
    /// Address of the adapter with its prefix length, such as 10.9.0.2/24. Neither the kernel nor another
    /// station on the link may have it. May be given several times.
    ///
    /// Default: the address that the link provides; on Ethernet, a link-local IPv6 address.
    #[arg(long, short, env = "QUIPU_QPIP_ADDRESS", value_name = "ADDRESS/LEN",
          value_delimiter = ',', value_parser = address)]
    address: Vec<(IpAddr, u8)>,
    /// Router to hosts on other networks. May be given several times.
    #[arg(long, short, env = "QUIPU_QPIP_GATEWAY", value_name = "ADDRESS", value_delimiter = ',',
          value_parser = peer_address)]
    gateway: Vec<IpAddr>,
    #[command(flatten)]
    capture: PcapOptions,
}

fn address(text: &str) -> Result<(IpAddr, u8), String> {
    parse_address(text).ok_or_else(|| {
        "give a host address with its prefix length, such as 10.9.0.2/24 or fd09::2/64".into()
    })
}

/// The address of somebody else. What the kernel's tools print may name an interface behind it.
fn peer_address(text: &str) -> Result<IpAddr, String> {
    let text = text.trim();
    text.parse().map_err(|error: std::net::AddrParseError| match text.split_once('%') {
        Some((address, zone)) if address.parse::<IpAddr>().is_ok() => {
            format!("leave out \"%{zone}\": the adapter has only one link")
        }
        _ => error.to_string(),
    })
}

impl LinkOptions {
    /// Brings the adapter up.
    pub(crate) fn open(&self) -> Result<Adapter, Failure> {
        let Some(link) = self.link.clone() else {
            let remedy = "give one with --link, such as tap:qp0 or udp:127.0.0.1:4000, or set \
                QUIPU_QPIP_LINK; `quipu help nic` lists the links";
            return Err(Failure::new("cannot start an adapter", "no link was given", remedy));
        };
        let (addresses, gateways) = (self.address.clone(), self.gateway.clone());
        let config = Config::from_env().map_err(|error| Failure::new("cannot begin", error, ""))?;
        if self.capture.is_wanted() && matches!(link, LinkSpec::Share { .. }) {
            let remedy = "give --pcap to the `quipu nic` that shares the adapter";
            let why = "another process handles the packets of a shared adapter";
            return Err(Failure::new("cannot capture packets", why, remedy));
        }
        let capture = self.capture.config(config.capture)?;
        let qpip = QpipConfig { link, addresses, gateways };
        let adapter = Adapter::open_with(Config { qpip: Some(qpip), capture, ..config })
            .map_err(|error| Failure::new("cannot start the adapter", error, ""))?;
        if adapter.info().map_err(failed)?.addresses.is_empty() {
            let remedy = "give an address with --address, such as fd09::2/64";
            let why = "no address was given, and this link provides none";
            return Err(Failure::new("cannot start the adapter", why, remedy));
        }
        Ok(adapter)
    }
}

impl LinkOptions {
    /// The same for a tool that a signal may end at any time: its peers are then told so, by resets.
    ///
    /// To be called before there are other threads.
    fn open_until_signal(&self, signal: Signal) -> Result<Adapter, Failure> {
        let (adapter, leave) = self.open_with_leave(signal)?;
        let aborter = adapter.aborter();
        leave.is(move || {
            aborter.abort();
            exit();
        });
        Ok(adapter)
    }

    /// The same for one that says itself what it does when a signal comes.
    ///
    /// To be called before there are other threads.
    fn open_with_leave(&self, signal: Signal) -> Result<(Adapter, Leave), Failure> {
        let leave = Leave::prepare(signal)?;
        Ok((self.open()?, leave))
    }
}

/// Ends the process that a signal ends.
fn exit() {
    std::process::exit(ENDS_WITH.load(Ordering::SeqCst))
}

/// What a tool does when a signal comes; before it has said so, it ends. Whatever it does, it ends soon: the
/// adapter may be that of a process that is stopped, which answers nobody.
#[derive(Clone, Default)]
struct Leave(Arc<OnceLock<Does>>);

type Does = Box<dyn Fn() + Send + Sync>;

impl Leave {
    /// From now on a signal ends the tool.
    fn prepare(signal: Signal) -> Result<Self, Failure> {
        let interrupts = Interrupts::block()
            .map_err(|error| Failure::new("cannot wait for signals", error, ""))?;
        let leave = Self::default();
        let said = leave.clone();
        thread::spawn(move || {
            ENDS_WITH.store(signal.code(interrupts.wait()), Ordering::SeqCst);
            thread::spawn(move || said.0.get().map_or_else(exit, |does| does()));
            thread::sleep(LEAVE);
            exit();
        });
        Ok(leave)
    }

    /// From now on the tool does this.
    fn is(&self, does: impl Fn() + Send + Sync + 'static) {
        let _ = self.0.set(Box::new(does));
    }
}

/// What a tool made of its adapter. If that failed since the adapter is gone, this is what there is to say.
pub(super) fn unless_gone<T>(adapter: &Adapter, outcome: Result<T, Failure>) -> Result<T, Failure> {
    outcome.map_err(|failure| adapter.check().err().map_or(failure, failed))
}

/// What an adapter is, in a line; in another, how programs get to its network if that is one of its own.
pub(crate) fn describe(adapter: &Adapter) -> Result<String, Failure> {
    let info = adapter.info().map_err(failed)?;
    let addresses: Vec<_> = info.addresses.iter().map(ToString::to_string).collect();
    let station = info.hardware.map(|octets| {
        let pairs: Vec<_> = octets.iter().map(|octet| format!("{octet:02x}")).collect();
        format!(" ({})", pairs.join(":"))
    });
    let mut text = format!("{}{}", info.link, station.unwrap_or_default());
    text += &format!(": {}, MTU {}", addresses.join(", "), info.mtu);
    if info.checksum {
        text += ", checksums by the link";
    }
    if info.segment > 0 {
        text += &format!(", segments of up to {} bytes cut by the link", info.segment);
    }
    if !info.enter.is_empty() {
        text += &format!("\nto run a command in its network: {} COMMAND", info.enter.join(" "));
    }
    Ok(text)
}

/// A failure of the adapter on the way.
pub(crate) fn failed(error: Error) -> Failure {
    Failure::new("the adapter", error, "")
}

/// Whether the connection keeps message boundaries or is a byte stream.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
enum ModeOption {
    /// The other queue pair receives each send whole, in one receive.
    #[default]
    Message,
    /// A byte stream without message boundaries, as for sockets.
    Stream,
}

impl ModeOption {
    fn settings(self) -> TcpSettings {
        let mode = match self {
            Self::Message => Mode::Message,
            Self::Stream => Mode::Stream,
        };
        TcpSettings { mode, ..TcpSettings::default() }
    }
}

/// Connects. Without any reply, TCP retries for minutes (RFC 9293, MUST-23): then this says on standard
/// error that it waits.
fn connect(qp: &TcpQueuePair, to: SocketAddr, settings: &TcpSettings) -> Result<(), Failure> {
    let (waiting, end) = channel::<()>();
    let outcome = thread::scope(|scope| {
        scope.spawn(move || {
            if end.recv_timeout(PATIENCE) == Err(RecvTimeoutError::Timeout) {
                say_waiting(to);
            }
        });
        let outcome = qp.connect(to, settings);
        drop(waiting);
        outcome
    });
    outcome.map_err(|error| unreachable(to, &error))
}

/// Anyone who waits for a connection is told so.
fn say_waiting(to: SocketAddr) {
    eprintln!(
        "quipu: waiting for an answer from {to}; gives up after three minutes, Ctrl-C ends it \
         now"
    );
}

/// What there is to say when a request of a connection was refused, or has not succeeded: the connection may
/// have failed, of which an event tells.
fn broken(qp: &TcpQueuePair, error: Error, remedy: &str) -> Failure {
    let cause = match qp.flow() {
        Ok(None) => qp.wait_closed().err(),
        _ => None,
    };
    Failure::new("the transfer", cause.unwrap_or(error), remedy)
}

/// The same, if it names a port: 0 is none that a server can have.
fn with_port(to: SocketAddr) -> Result<SocketAddr, Failure> {
    if to.port() != 0 {
        return Ok(to);
    }
    let why = "a server cannot have port 0";
    Err(Failure::new(format!("cannot connect to {}", to.ip()), why, "give the server's port"))
}

/// How the engine says that nothing leads to a peer, before it has sent anything and after.
const NO_ROUTE: &str = "no route to the peer";

/// Why a peer cannot be reached, and what to do.
fn unreachable(to: SocketAddr, error: &dyn std::fmt::Display) -> Failure {
    let why = error.to_string();
    // Then the server has no part in it: nothing was sent, or nobody has the address.
    let remedy = if why.contains(NO_ROUTE) {
        "give the adapter an address in the peer's network (--address) or a router (--gateway), \
         and check that both ends are on one link"
    } else {
        "check that the server runs on that port, and (except over a udp: link) that `ping` \
         reaches this adapter from there"
    };
    Failure::new(format!("cannot connect to {to}"), why, remedy)
}

/// The same of a socket, which has no adapter of ours.
fn no_server(to: SocketAddr, error: &dyn std::fmt::Display) -> Failure {
    let remedy = "check that the server runs on that port";
    Failure::new(format!("cannot connect to {to}"), error, remedy)
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Parser)]
    struct Line {
        #[command(flatten)]
        link: LinkOptions,
    }

    /// On a UDP link, which needs no right.
    pub(super) fn adapter() -> Adapter {
        let qpip = QpipConfig::new("udp:127.0.0.1:0".parse().unwrap());
        let address = Some([127, 0, 0, 1].into());
        let config = Config { address, counters: false, qpip: Some(qpip), ..Config::default() };
        Adapter::open_with(config).unwrap()
    }

    #[test]
    fn where_nothing_leads_the_server_is_not_asked_for() {
        let adapter = adapter();
        let (pd, cq) = (adapter.protection_domain().unwrap(), adapter.completion_queue(4).unwrap());
        let qp = pd.queue_pair(&cq, &cq).build_tcp().unwrap();
        let to = "192.0.2.1:80".parse().unwrap();
        let said = connect(&qp, to, &TcpSettings::default()).unwrap_err().to_string();
        assert!(said.contains("--gateway") && !said.contains("server"), "{said}");
        let said = unreachable(to, &quipu_host::inet::tcp::Failure::Unreachable).to_string();
        assert!(said.contains("--gateway"), "{said}");
        let said = unreachable(to, &quipu_host::inet::tcp::Failure::Refused).to_string();
        assert!(said.contains("the server runs on that port"), "{said}");
    }

    #[test]
    fn a_server_has_a_port() {
        assert!(with_port("[::1]:1".parse().unwrap()).is_ok());
        let said = with_port("[::1]:0".parse().unwrap()).unwrap_err().to_string();
        assert!(said.contains("cannot connect to ::1: a server cannot have port 0"), "{said}");
    }

    #[test]
    fn an_adapter_is_a_link_and_addresses() {
        let words =
            ["x", "--link", "tap:qp0", "-a", "10.9.0.2/24", "-a", "fd09::2/64", "-g", "10.9.0.1"];
        let line = Line::try_parse_from(words).unwrap().link;
        assert_eq!(line.link, Some("tap:qp0".parse().unwrap()));
        assert_eq!(line.address, [([10, 9, 0, 2].into(), 24), ("fd09::2".parse().unwrap(), 64)]);
        assert_eq!(line.gateway, [IpAddr::from([10, 9, 0, 1])]);
        for bad in
            [["--link", "carrier:pigeon"], ["--address", "10.9.0.2"], ["--address", "::1/64"]]
        {
            assert!(Line::try_parse_from(["x"].into_iter().chain(bad)).is_err(), "{bad:?}");
        }
        for zone in ["fe80::1%qp0", "fe80::1%2"] {
            let said = peer_address(zone).unwrap_err();
            assert!(said.starts_with("leave out \"%") && said.contains(&zone[7..]), "{said}");
        }
        for bad in ["%qp0", "fe80::1:%qp0", "a%b"] {
            assert_eq!(peer_address(bad).unwrap_err(), "invalid IP address syntax");
        }
        let missing = Line::try_parse_from(["x"]).unwrap().link.open().unwrap_err();
        assert!(missing.to_string().contains("--link"));
        let words = ["x", "--link", "share:lab", "--pcap", "/dev/null"];
        let foreign = Line::try_parse_from(words).unwrap().link.open().unwrap_err();
        assert!(foreign.to_string().contains("another process"), "{foreign}");
        let words = ["x", "--link", "udp:[::1]:0"];
        let nowhere = Line::try_parse_from(words).unwrap().link.open().unwrap_err();
        assert!(nowhere.to_string().contains("--address"), "{nowhere}");
    }
}
