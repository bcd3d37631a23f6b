//! `quipu ipoib`: a network interface whose packets travel in datagrams of the adapter.

mod carrier;
mod connected;
mod recorder;
mod summary;
mod transmitter;

use std::ffi::OsString;
use std::net::IpAddr;
use std::os::unix::process::ExitStatusExt as _;
use std::path::PathBuf;
use std::process::{Child, Command, ExitCode};
use std::time::Duration;

use quipu::{Config, Device};
use quipu_host::nic::qos::Service;
use quipu_host::packet::interface::Setup;
use quipu_host::packet::tun::{Tun, TunError};
use quipu_host::{Interrupts, WantedAddress};
use quipu_ipoib::{CONNECTED_MTU, HEADER_LEN};

use self::carrier::{Carrier, Link, Settings};
use self::recorder::Recorder;
use super::capture::prepared;
use super::failure::Failure;
use super::qos::QosOptions;
use super::variables;

/// What IPv6 needs (RFC 8200 5).
const IPV6_MTU: usize = 1280;
/// Adapters that are opened at most until the TCP port that belongs to the queue pair's number is free.
const PORT_TRIES: usize = 16;
/// How often it is looked whether the command, or the interface, is still there.
const LOOK: Duration = Duration::from_millis(20);

/// The interface, and what is to use it.
#[derive(clap::Args)]
#[command(after_long_help = EXAMPLES)]
pub(crate) struct Options {
    /// An address of the interface with the length of its prefix, such as 10.7.0.1/24 or fd07::1/64. May be
    /// given several times.
    #[arg(long, value_name = "ADDRESS/LENGTH", required = true, value_parser = address)]
    address: Vec<(IpAddr, u8)>,
    /// A neighbour that takes packets for all other networks. Once for IPv4 and once for IPv6.
    #[arg(long, value_name = "ADDRESS")]
    gateway: Vec<IpAddr>,
    /// The adapter's own address, one of this machine's.
    #[arg(long, env = "QUIPU_ADDRESS", value_name = "ADDRESS",
          value_parser = variables::trimmed::<WantedAddress>)]
    device: Option<WantedAddress>,
    /// The name of the interface.
    #[arg(long, value_name = "NAME", default_value = "ib%d", value_parser = interface_name)]
    interface: String,
    /// How packets for one neighbour travel. In connected mode, neighbours that are in this mode, too, get
    /// them over reliable connections, and all others in datagrams.
    #[arg(long, value_enum, default_value_t = Mode::Datagram)]
    mode: Mode,
    /// The longest IP packet. Default: what a datagram of the adapter holds, such as 2044 or 4092; in
    /// connected mode 65520.
    #[arg(long, value_name = "BYTES")]
    mtu: Option<u32>,
    /// The service level of the packets, which chooses their lane (docs/qos.md). Default: that of the rules
    /// of --qos, such as `ipoib : 1`, or 0.
    #[arg(long, value_name = "LEVEL", value_parser = clap::value_parser!(u8).range(0..=15))]
    sl: Option<u8>,
    /// The Q_Key of the link. Interfaces with different keys do not hear each other. The default is that of
    /// subnet managers.
    #[arg(long, value_name = "KEY", default_value = "0xb1b", value_parser = key)]
    qkey: u32,
    /// Say at the end what passed and what was dropped, and which connections there are.
    #[arg(long, short)]
    verbose: bool,
    #[command(flatten)]
    qos: QosOptions,
    /// Capture the datagrams of the interface into this file, as pcapng. Wireshark shows them as IP over
    /// InfiniBand.
    #[arg(long, value_name = "FILE")]
    pcap: Option<PathBuf>,
    /// A command that runs in a network of its own with this interface. Without it the interface is in the
    /// network of this command, until Ctrl-C ends it.
    #[arg(last = true, value_name = "COMMAND")]
    command: Vec<OsString>,
}

/// The mode of the interface.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
enum Mode {
    /// Unreliable datagrams for all packets (RFC 4391).
    Datagram,
    /// Reliable connections, and a large MTU (RFC 4755).
    Connected,
}

const EXAMPLES: &str = "\
Examples:
  quipu ipoib --address 10.7.0.1/24 -- iperf3 -s         a host with one interface, ib0
  quipu ipoib --address 10.7.0.2/24 -- iperf3 -c 10.7.0.1      another one, here or elsewhere
  quipu ipoib --address 10.7.0.3/24 --address fd07::3/64 -- bash
  quipu ipoib --mode connected --address fd07::6/64 -- iperf3 -s         packets of 65520 bytes
  quipu ipoib --sl 1 --qos qos.toml --address 10.7.0.4/24 -- bash      in the lane of level 1
  sudo quipu ipoib --address 10.7.0.5/24                 the interface is the machine's own

The kernel's TCP, UDP and ICMP run over the interface. Its packets are datagrams of a UD queue pair,
as IPoIB has it (RFC 4391). A command runs in a user namespace and a network namespace, as root
there: no privilege is needed. docs/ipoib.md says more.";

fn address(text: &str) -> Result<(IpAddr, u8), String> {
    quipu_host::parse_address(text)
        .ok_or_else(|| "it is no address with a prefix length, such as 10.7.0.1/24".to_owned())
}

/// A name that Linux takes for an interface.
fn interface_name(text: &str) -> Result<String, String> {
    let is_legal = |c: char| !c.is_whitespace() && !c.is_control() && c != '/' && c != ':';
    let fits = (1..=15).contains(&text.len()) && text.chars().all(is_legal);
    let why = "the name of an interface has 1 to 15 bytes, none of them a space, / or :";
    if fits && !matches!(text, "." | "..") { Ok(text.to_owned()) } else { Err(why.to_owned()) }
}

fn key(text: &str) -> Result<u32, String> {
    let parsed = match text.strip_prefix("0x") {
        Some(hex) => u32::from_str_radix(hex, 16),
        None => text.parse(),
    };
    let key = parsed.ok().filter(|key| key >> 31 == 0);
    key.ok_or_else(|| "a Q_Key is a number below 2^31".to_owned())
}

/// Runs it.
pub(crate) fn run(options: &Options) -> Result<ExitCode, Failure> {
    // Before other threads begin, which would get the signals otherwise.
    let interrupts =
        Interrupts::block().map_err(|error| Failure::new("cannot wait for signals", error, ""))?;
    options.qos.check()?;
    check_gateways(options)?;
    let recorder = recorder(options)?;
    let link = link(options)?;
    let mtu = mtu(options, link.max_message())?;
    let (addresses, tun) = interface(options, &link, mtu)?;
    let settings = Settings { mtu, addresses, gateways: options.gateway.clone() };
    let carrier = Carrier::start(link, tun, settings, recorder).map_err(no_queue_pair)?;
    let outcome = match options.command.is_empty() {
        true => serve(&interrupts, &carrier, mtu),
        false => {
            let child = start(options, carrier.tun(), &interrupts)?;
            supervise(&interrupts, child)
        }
    };
    if options.verbose || options.command.is_empty() {
        if let Some(why) = carrier.failure() {
            eprintln!("ipoib: the interface carried no packets at the end: {why}");
        }
        let (counters, connections) = carrier.counters();
        eprintln!("{}", summary::of(&counters, &connections));
    }
    outcome
}

fn no_queue_pair(error: quipu::Error) -> Failure {
    let remedy = "`quipu doctor` checks what works on this machine";
    Failure::new("cannot create the queue pair of the interface", error, remedy)
}

fn open(options: &Options) -> Result<Device, Failure> {
    let remedy = "`quipu doctor` checks what works on this machine";
    let failed = |error: &dyn std::fmt::Display| {
        Failure::new("cannot open the adapter", error, remedy).with_code(125)
    };
    let mut config = Config::from_env().map_err(|error| failed(&error))?;
    config.address = options.device.clone().or(config.address);
    config.qos = options.qos.config().or(config.qos);
    Device::open(config).map_err(|error| failed(&error))
}

/// The queue pair of the interface, and in connected mode the port for requests.
fn link(options: &Options) -> Result<Link, Failure> {
    let of_rules = || options.qos.level_of(&Service { is_ipoib: true, ..Service::default() });
    let sl = options.sl.unwrap_or_else(of_rules);
    // Adapters that are not used stay open until another one is found: it gets another port then.
    let mut unused = Vec::new();
    loop {
        let mut link = Link::new(&open(options)?, options.qkey, sl).map_err(no_queue_pair)?;
        if options.mode == Mode::Datagram {
            return Ok(link);
        }
        match link.listen() {
            Ok(()) => return Ok(link),
            Err(_) if unused.len() + 1 < PORT_TRIES => unused.push(link),
            Err(error) => {
                let remedy = "give another --device, or use --mode datagram";
                return Err(Failure::new("cannot take connections", error, remedy));
            }
        }
    }
}

fn recorder(options: &Options) -> Result<Option<Recorder>, Failure> {
    let Some(path) = &options.pcap else { return Ok(None) };
    let file = prepared(path, "--pcap", "capture packets")?;
    Recorder::create(&file, &options.interface).map(Some).map_err(|error| {
        let what = format!("cannot capture packets in {}", path.display());
        Failure::new(what, error, "give --pcap a file that you can write")
    })
}

fn mtu(options: &Options, max_message: usize) -> Result<usize, Failure> {
    let most = match options.mode {
        Mode::Datagram => max_message - HEADER_LEN,
        Mode::Connected => CONNECTED_MTU,
    };
    let wanted = options.mtu.map_or(most, |mtu| mtu as usize);
    let has_ipv6 = options.address.iter().any(|(ip, _)| ip.is_ipv6());
    let least = if has_ipv6 { IPV6_MTU } else { 68 };
    if (least..=most).contains(&wanted) {
        return Ok(wanted);
    }
    let what = format!("cannot have an interface with an MTU of {wanted}");
    let why = match most < least {
        true => format!("IPv6 needs {IPV6_MTU}, and this network carries at most {most}"),
        false => format!("it has to be from {least} to {most}"),
    };
    let remedy = match most < least {
        true => "give --mode connected, IPv4 addresses only, or a larger MTU to the network below",
        false => "give another --mtu, or a larger MTU to the network below (docs/ipoib.md)",
    };
    Err(Failure::new(what, why, remedy).with_code(2))
}

/// Refuses a gateway that is in no network of the interface: packets could not reach it.
fn check_gateways(options: &Options) -> Result<(), Failure> {
    for gateway in &options.gateway {
        let is_near = |(ip, prefix): &(IpAddr, u8)| share_prefix(*ip, *gateway, *prefix);
        let is_link_local = matches!(gateway, IpAddr::V6(ip) if ip.is_unicast_link_local());
        let has_ipv6 = options.address.iter().any(|(ip, _)| ip.is_ipv6());
        if !(options.address.iter().any(is_near) || is_link_local && has_ipv6) {
            let what = format!("cannot use the gateway {gateway}");
            let why = "it is in none of the networks of --address";
            let remedy = "give the address of a neighbour, or an --address in its network";
            return Err(Failure::new(what, why, remedy).with_code(2));
        }
    }
    Ok(())
}

/// Whether the first `length` bits of two addresses of one family are equal.
fn share_prefix(one: IpAddr, other: IpAddr, length: u8) -> bool {
    let differ = match (one, other) {
        (IpAddr::V4(one), IpAddr::V4(other)) => u128::from(one.to_bits() ^ other.to_bits()) << 96,
        (IpAddr::V6(one), IpAddr::V6(other)) => one.to_bits() ^ other.to_bits(),
        _ => return false,
    };
    differ.leading_zeros() >= length.into()
}

/// Makes the interface; all its addresses.
fn interface(
    options: &Options,
    link: &Link,
    mtu: usize,
) -> Result<(Vec<(IpAddr, u8)>, Tun), Failure> {
    let mut addresses = options.address.clone();
    if addresses.iter().any(|(ip, _)| ip.is_ipv6()) {
        addresses.push((quipu_ipoib::link_local(link.address()).into(), 64));
    }
    let setup = Setup { mtu: Some(mtu as u32), addresses: addresses.clone() };
    let tun = match options.command.is_empty() {
        true => Tun::open(&options.interface, &setup),
        false => Tun::in_own_namespace(&options.interface, &setup),
    };
    Ok((addresses, tun.map_err(|error| no_interface(options, &error))?))
}

fn no_interface(options: &Options, error: &TunError) -> Failure {
    let denied = error.io().kind() == std::io::ErrorKind::PermissionDenied;
    let remedy = match (denied, options.command.is_empty()) {
        (true, true) => "run it as root, or give a COMMAND to run in a network of its own",
        (true, false) => "allow user namespaces and /dev/net/tun on this machine",
        (false, _) => "",
    };
    Failure::new("cannot make the interface", error, remedy).with_code(125)
}

/// Carries packets until a signal comes.
fn serve(interrupts: &Interrupts, carrier: &Carrier, mtu: usize) -> Result<ExitCode, Failure> {
    let link = carrier.address();
    let gid = std::net::Ipv6Addr::from(link.gid);
    println!("{}: MTU {mtu}, queue pair {:#x} at {gid}", carrier.tun().name(), link.qpn);
    println!("Ctrl-C ends it.");
    while !interrupts.wait_at_most(10 * LOOK) {
        if let Some(why) = carrier.failure() {
            return Err(Failure::new("the interface is gone", why, ""));
        }
    }
    Ok(ExitCode::SUCCESS)
}

fn start(options: &Options, tun: &Tun, interrupts: &Interrupts) -> Result<Child, Failure> {
    let mut command = Command::new(&options.command[0]);
    command.args(&options.command[1..]);
    tun.enter(&mut command);
    interrupts.spare(&mut command);
    command.spawn().map_err(|error| {
        let code = if error.kind() == std::io::ErrorKind::NotFound { 127 } else { 126 };
        let what = format!("cannot run {}", options.command[0].display());
        Failure::new(what, error, "give a program that exists after --").with_code(code)
    })
}

/// Waits for the end of the command. A signal ends it, too.
fn supervise(interrupts: &Interrupts, mut child: Child) -> Result<ExitCode, Failure> {
    loop {
        let ended = child.try_wait();
        let ended =
            ended.map_err(|error| Failure::new("cannot wait for the command", error, ""))?;
        if let Some(status) = ended {
            let signal = status.signal().map(|signal| 128 + signal);
            let code = status.code().or(signal).unwrap_or(1);
            return Ok(ExitCode::from(u8::try_from(code).unwrap_or(1)));
        }
        if interrupts.wait_at_most(LOOK) {
            // A terminal has told it already. The next signal ends this command at once.
            let pid = rustix::process::Pid::from_child(&child);
            let _ = rustix::process::kill_process(pid, rustix::process::Signal::TERM);
        }
    }
}
