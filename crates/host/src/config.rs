//! How an engine is set up. One struct; the environment is read here and nowhere else.

use std::path::PathBuf;
use std::time::Duration;

use quipu_nic::{Crc, LinkLayer, WriteOrder};
use quipu_strict::Ignored;

use crate::address::WantedAddress;
use crate::qos::QosConfig;
use crate::qpip::QpipConfig;

mod environment;
mod iwarp;

/// Settings of an engine.
///
/// # Environment
///
/// [`Config::from_env`] reads these variables; an empty one counts as not set.
///
/// | variable | values | meaning |
/// |---|---|---|
/// | `QUIPU_ADDRESS` | an IPv4 or IPv6 address of this host, as `fe80::1%eth0` if it is link-local | the one address that the device has; by default it has all of this host, see [`Config::address`] |
/// | `QUIPU_DEVICES` | some of `quipu0`, `quipu_iw0` and, where there is a link for QPIP, `quipu_qp0`, with commas between them (default: all) | which devices programs see, in that order |
/// | `QUIPU_CM_DEVICE` | `quipu0`, `quipu_iw0`, `quipu_qp0`; by default `quipu0`, or the first one shown | the device from which `rdma_cm` connects, and so what it speaks: as Quipus do, plain iWARP, or TCP alone; peers with an address of the packet link's are always reached by the last |
/// | `QUIPU_LINK_LAYER` | `ethernet` (default), `infiniband` | the kind of port that `quipu0` shows: that of RoCE, or one with a LID, for programs that name their peers so |
/// | `QUIPU_SAME_HOST` | `auto` (default), `never` | whether peers on this host are reached through shared memory, or by TCP like all others |
/// | `QUIPU_PEER_MEMORY` | `auto` (default), `allow`, `never` | access to the memory of peers on this host: where the kernel allows it; the same, and let every process of this user access ours where Yama restricts that; not at all |
/// | `QUIPU_SHARED_PAGES` | `never`, `own` (default), `registered` | which memory peers on this host may map, to reach it by plain loads and stores instead of system calls: see [`SharedPages`] |
/// | `QUIPU_CRC` | `auto` (default), `always`, `never` | whether streams between Quipus carry CRCs: where a wire carries them; the same, and between processes of this host; only if the peer asks for them |
/// | `QUIPU_CONGESTION` | a name such as `cubic` | congestion control of TCP connections; by default `cubic` or `reno` instead of `bbr` |
/// | `QUIPU_ARENA_MB` | 1 to 65536, default 1024 | most shared memory (sparse, used as needed) for channels to peers on this host |
/// | `QUIPU_COUNTERS` | `auto` (default), `never` | whether others of this user can read what the engine does |
/// | `QUIPU_PCAP` | a file or folder; `%p` is the process | packets are captured there, as pcapng: see [`CaptureConfig`] |
/// | `QUIPU_PCAP_MB` | 1 to 1048576, default 1024 | longest such file |
/// | `QUIPU_PCAP_SNAPLEN` | 0 (default) to 65535 | most bytes of a packet that are kept; 0: all |
/// | `QUIPU_MULTICAST_PORT` | 1 to 65535, default 20804 | UDP port of datagrams to multicast groups; the same everywhere |
/// | `QUIPU_IWARP_SPEAK_FIRST_MS` | 1 to 10000, default 100; `never` | see [`Config::speak_first`] |
/// | `QUIPU_FAULTS` | a file | a plan of faults to inject (`docs/faults.md`) |
/// | `QUIPU_FAULT_LOG` | a file, `%p` in its name is the process | where injected faults are told, in JSON lines; by default on standard error |
/// | `QUIPU_FAULT_REPLAY` | a file | such a log, whose faults are injected again instead of what the plan draws |
/// | `QUIPU_STRICT` | `report` or `1`, `fail`, `abort`; `0` | the strict mode: see [`StrictMode`] |
/// | `QUIPU_STRICT_LOG` | a file, `%p` in its name is the process | its reports, in JSON lines; by default on standard error |
/// | `QUIPU_STRICT_IGNORE` | `KIND` or `KIND@PLACE`, with commas between them | what it does not report: reports of a kind, or those where a function, library or source file is named so |
/// | `QUIPU_STRICT_ORDER` | `reverse` (default), `shuffle`, `shuffle:SEED`, `off` | in the strict mode, the order in which bytes of writes of peers are placed: see [`StrictOrder`] |
/// | `QUIPU_STRICT_HOLD_US` | 1 to 60000000, default 1000 | for how many microseconds bytes are then held back |
/// | `QUIPU_QOS` | a file | tables and rules of quality of service: OpenSM's options, or TOML (`docs/qos.md`) |
/// | `QUIPU_RATE` | such as `10Gbps`, from 1 kbit/s to 1 Tbit/s | the rate at which the port sends, whatever that file says |
/// | `QUIPU_QPIP_LINK` | `tap:NAME`, `packet:INTERFACE`, `xdp:INTERFACE`, `ns:NAME`, `udp:ADDRESS:PORT`, `share:NAME[,user=USER]` | the link of queue pairs over the adapter's own TCP and UDP (`docs/qpip.md`) |
/// | `QUIPU_QPIP_ADDRESS` | addresses with the lengths of their prefixes, such as `10.9.0.2/24,fd09::2/64` | its addresses there, which must not be the kernel's |
/// | `QUIPU_QPIP_GATEWAY` | addresses, with commas between them | who forwards from there to everybody else |
/// | `QUIPU_LOG` | as `RUST_LOG`, such as `debug` | what is logged; read by whoever installs a `tracing` subscriber, see [`Config::log`] |
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Config {
    /// The one address of the device. `None`: all addresses of this host, the first of which is that of an
    /// interface that is up and not the loopback, IPv4 before global IPv6; without one, 127.0.0.1.
    pub address: Option<WantedAddress>,
    /// The devices that programs see, in the order in which they are listed. Not empty.
    pub devices: Vec<Device>,
    /// The one from which connection management connects; one of those.
    pub cm_device: Device,
    /// The kind of port that `quipu0` shows.
    pub link_layer: LinkLayer,
    /// How peers on this host are reached.
    pub same_host: SameHost,
    /// Whether the memory of peers on this host is accessed directly.
    pub peer_memory: PeerMemoryPolicy,
    /// Which memory peers on this host may map. Nothing where they may not access memory.
    pub shared_pages: SharedPages,
    /// Which streams between Quipus carry CRCs. Those that a capture shows do in any case.
    pub crc: Crc,
    /// Congestion control of TCP connections. `None`: the system's default, except that `bbr` is
    /// replaced by `cubic`, or by `reno` where that is not allowed.
    pub congestion: Option<String>,
    /// Size in bytes of the shared memory that channels to peers on this host are cut from.
    /// Sparse: only what is used is backed by memory.
    pub arena_bytes: usize,
    /// The UDP port of datagrams to multicast groups, the same at every host that is to be in one.
    pub multicast_port: u16,
    /// Plain iWARP: after which silence of a client that did not ask for peer-to-peer mode a server may send
    /// first. `None`: it never does, as RFC 5044 7.1.2 has it.
    pub speak_first: Option<Duration>,
    /// A plan of faults to inject. `None`: none are.
    pub faults: Option<PathBuf>,
    /// Where injected faults are told, in JSON lines; `%p` is the process. `None`: on standard error.
    pub fault_log: Option<PathBuf>,
    /// The log of an earlier run, whose faults are injected again.
    pub fault_replay: Option<PathBuf>,
    /// Whether what hardware would punish is reported, and with which consequence.
    pub strict: Option<StrictMode>,
    /// Where it is reported, in JSON lines; `%p` is the process. `None`: on standard error.
    pub strict_log: Option<PathBuf>,
    /// What is not reported.
    pub strict_ignore: Ignored,
    /// The order in which writes of peers are placed in the strict mode; `None`: as they come.
    pub strict_order: Option<StrictOrder>,
    /// Filter for logs, in the syntax of `RUST_LOG`. `None`: nothing but errors.
    pub log: Option<String>,
    /// Whether others of this user may read what the engine does (`quipu top`).
    pub counters: bool,
    /// Where packets are captured, if anywhere.
    pub capture: Option<CaptureConfig>,
    /// Quality of service. `None`: every queue pair sends as fast as it can.
    pub qos: Option<QosConfig>,
    /// The link and the addresses of QPIP. `None`: there are no such queue pairs.
    pub qpip: Option<QpipConfig>,
}

/// What a program may take the engine for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Device {
    /// A channel adapter on Ethernet, as of RoCE v2.
    Quipu0,
    /// An RNIC: plain iWARP.
    QuipuIw0,
    /// QPIP: sends and receives over TCP, and nothing else, on a packet link.
    QuipuQp0,
}

impl Device {
    /// All, in the usual order: the first is the one that most programs take.
    pub const ALL: [Self; 3] = [Self::Quipu0, Self::QuipuIw0, Self::QuipuQp0];

    /// Its name.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Quipu0 => "quipu0",
            Self::QuipuIw0 => "quipu_iw0",
            Self::QuipuQp0 => "quipu_qp0",
        }
    }

    /// The device of that name.
    #[must_use]
    pub fn named(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|device| device.name() == name)
    }
}

/// Where packets are captured, and how many.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CaptureConfig {
    /// The file; `%p` in its name stands for the number of the process. A folder: a file in it. What
    /// is there stays in front; if another process writes to it, the number is put into the name.
    pub path: PathBuf,
    /// Longest file in bytes. Then the capture ends.
    pub file_bytes: u64,
    /// Most bytes of a packet that are kept; 0: all.
    pub snaplen: u32,
}

/// How peers on this host are reached.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum SameHost {
    /// Through shared memory where that works, else by TCP.
    #[default]
    Auto,
    /// By TCP, as any other peer.
    Never,
}

/// What follows when the strict mode finds something.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StrictMode {
    /// It is reported.
    Report,
    /// And the program's exit code is 86.
    Fail,
    /// And the program aborts at once.
    Abort,
}

/// How the strict mode places writes of peers, so that programs which take memory for a completion see it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StrictOrder {
    /// Which bytes are placed first.
    pub order: WriteOrder,
    /// How long the others are held back, unless something orders them before.
    pub hold: Duration,
}

impl Default for StrictOrder {
    fn default() -> Self {
        Self { order: WriteOrder::Reverse, hold: Duration::from_millis(1) }
    }
}

/// Whether the memory of peers on this host is accessed directly.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum PeerMemoryPolicy {
    /// Where the kernel allows it.
    #[default]
    Auto,
    /// Where the kernel allows it; and declare this process accessible to others of the same user
    /// (`PR_SET_PTRACER_ANY`), which Yama's `ptrace_scope` 1 would otherwise refuse.
    Allow,
    /// Never: bytes are copied through shared memory.
    Never,
}

/// Which memory peers on this host may map.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum SharedPages {
    /// None: it is reached by system calls (`process_vm_writev`).
    Never,
    /// What the engine gives away itself, as to programs of the Rust interface.
    #[default]
    Own,
    /// That, and whole pages of registered memory that has no file behind it. A registration copies them
    /// once, to memory that can be shared, in place. That is for programs of which no thread writes to
    /// memory while it is being registered, and whose allocator does not take `MADV_DONTNEED` for a way to
    /// get zeros once memory has been registered (that of the C library does not). A child of `fork` gets a
    /// copy.
    Registered,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            address: None,
            devices: vec![Device::Quipu0, Device::QuipuIw0],
            cm_device: Device::Quipu0,
            link_layer: LinkLayer::Ethernet,
            same_host: SameHost::Auto,
            crc: Crc::BetweenHosts,
            peer_memory: PeerMemoryPolicy::Auto,
            shared_pages: SharedPages::Own,
            congestion: None,
            arena_bytes: 1 << 30,
            multicast_port: 20_804,
            speak_first: Some(iwarp::SPEAK_FIRST),
            faults: None,
            fault_log: None,
            fault_replay: None,
            strict: None,
            strict_log: None,
            strict_ignore: Ignored::default(),
            strict_order: Some(StrictOrder::default()),
            log: None,
            counters: true,
            capture: None,
            qos: None,
            qpip: None,
        }
    }
}

/// A variable of the environment that makes no sense.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{name}={value} is not valid: it must be {expected}; correct it or unset it")]
pub struct ConfigError {
    /// The variable.
    pub name: &'static str,
    /// What it was set to.
    pub value: String,
    /// What is allowed.
    pub expected: &'static str,
}

/// Looks a variable up: its text, unless it is blank. One that is no text is an error.
pub(crate) trait Lookup: Fn(&'static str) -> Result<Option<String>, ConfigError> {}
impl<F: Fn(&'static str) -> Result<Option<String>, ConfigError>> Lookup for F {}

/// A number in a range, or what it is by default.
fn number(
    lookup: &impl Lookup,
    name: &'static str,
    default: u32,
    range: std::ops::RangeInclusive<u32>,
    expected: &'static str,
) -> Result<u32, ConfigError> {
    let Some(value) = lookup(name)? else { return Ok(default) };
    let number = value.trim().parse().ok().filter(|number| range.contains(number));
    number.ok_or_else(|| bad(name, value, expected))
}

fn bad(name: &'static str, value: String, expected: &'static str) -> ConfigError {
    ConfigError { name, value, expected }
}
