//! Why an engine cannot be opened, or refuses a call: what happened, why, and what to do.

use std::io;
use std::net::IpAddr;
use std::path::PathBuf;

use quipu_cm::CallError;
use quipu_nic::Fault;

use crate::address::WantedAddress;
use crate::config::ConfigError;
use crate::packet::Station;
use crate::qos::QosFileError;

/// Why an engine cannot be opened.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    /// A setting makes no sense.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// The address asked for is not one of this host's.
    #[error(
        "no interface of this host has the address {address}; set QUIPU_ADDRESS (or --address) to \
         one of: {available}"
    )]
    NoSuchAddress {
        /// What was asked for.
        address: WantedAddress,
        /// What there is, separated by commas.
        available: String,
    },
    /// The interface of the address is down.
    #[error(
        "the interface {interface} of {address} is down; bring it up (ip link set {interface} up) or \
         choose another address with QUIPU_ADDRESS"
    )]
    InterfaceDown {
        /// The address.
        address: IpAddr,
        /// Its interface.
        interface: String,
    },
    /// The interfaces cannot be listed.
    #[error("cannot list the addresses of this host: {0}; give one with QUIPU_ADDRESS")]
    Addresses(#[source] io::Error),
    /// The file that packets were to be captured in cannot be written.
    #[error(
        "cannot capture packets in {}: {source}; choose another file with QUIPU_PCAP, or unset it",
        path.display()
    )]
    Capture {
        /// The file.
        path: PathBuf,
        /// Why not.
        source: io::Error,
    },
    /// The kernel does not have a congestion control, or does not allow it.
    #[error(
        "QUIPU_CONGESTION={name} cannot be used: {source}; set it to one of: {available}, or unset it"
    )]
    Congestion {
        /// What was asked for.
        name: String,
        /// Why not.
        source: io::Error,
        /// What there is, separated by spaces.
        available: String,
    },
    /// The configuration of quality of service.
    #[error("{0}; correct the file of QUIPU_QOS (or --qos), or unset it (docs/qos.md)")]
    Qos(QosFileError),
    /// The link of QPIP.
    #[error(transparent)]
    Link(#[from] crate::packet::LinkError),
    /// No station can have an address.
    #[error(
        "the adapter cannot have the address {address}/{len}: {why}; give a host address with \
         its prefix length with --address (or QUIPU_QPIP_ADDRESS)"
    )]
    Unusable {
        /// The address.
        address: IpAddr,
        /// The length of its prefix.
        len: u8,
        /// Why not.
        why: &'static str,
    },
    /// A gateway is no router.
    #[error(
        "the gateway {gateway} is {why}, so it cannot route: give the router's address with \
         --gateway (or QUIPU_QPIP_GATEWAY), or give none"
    )]
    NoRouter {
        /// The gateway.
        gateway: IpAddr,
        /// What it is.
        why: &'static str,
    },
    /// Nobody can reach a gateway.
    #[error(
        "no address of the adapter is in the network of the gateway {gateway}: give the adapter \
         one with --address (or QUIPU_QPIP_ADDRESS), or give another gateway"
    )]
    Gateway {
        /// The gateway.
        gateway: IpAddr,
    },
    /// An address is that of the adapter and of the kernel, who are two stations on the link.
    #[error(
        "the link {link} gives {address} to the kernel's end, so the adapter cannot have it: give the \
         adapter another address of that network with --address (or QUIPU_QPIP_ADDRESS), or the \
         kernel's end another with address= in the link"
    )]
    KernelsAddress {
        /// The address.
        address: IpAddr,
        /// The link.
        link: String,
    },
    /// An address is the kernel's own on the interface of the link, where the adapter is another station.
    #[error(
        "{address} is the kernel's own address on {interface}, so the adapter cannot have it: \
         give the adapter another address of that network with --address (or \
         QUIPU_QPIP_ADDRESS), or remove it from the kernel (ip address show dev {interface})"
    )]
    InterfacesAddress {
        /// The address.
        address: IpAddr,
        /// The interface.
        interface: String,
    },
    /// Another station of the link has an address.
    #[error(
        "the address {address} is not free: the station {station} on the link {link} has it; \
         give the adapter another address of that network with --address (or \
         QUIPU_QPIP_ADDRESS), or remove it from that station"
    )]
    Occupied {
        /// The address.
        address: IpAddr,
        /// Who has it.
        station: Station,
        /// The link.
        link: String,
    },
    /// The log of the strict mode.
    #[error("cannot write the log of strict mode: {0}; choose another QUIPU_STRICT_LOG")]
    StrictLog(String),
    /// The log of faults.
    #[error("cannot write the log of faults: {0}; choose another QUIPU_FAULT_LOG")]
    FaultLog(String),
    /// The plan of faults, or a log that is to be repeated.
    #[error("{0}; correct it or unset QUIPU_FAULTS (see docs/faults.md)")]
    Faults(String),
    /// The kernel refuses a descriptor or memory.
    #[error("cannot create {what}: {source}; {remedy}")]
    System {
        /// What was to be created.
        what: &'static str,
        /// Why it failed.
        source: io::Error,
        /// What to do.
        remedy: &'static str,
    },
}

/// Why a call on an engine failed.
#[derive(Debug, thiserror::Error)]
pub enum EngineError {
    /// The adapter refuses the call.
    #[error(transparent)]
    Fault(#[from] Fault),
    /// The process forked since the engine was opened, and this is the child.
    #[error(
        "the engine belongs to the parent of this process, or the program closed the engine's \
         descriptors; open the device again after fork, or call exec"
    )]
    EngineGone,
    /// The kernel refuses a descriptor, thread or port.
    #[error("cannot create {what}: {source}; {remedy}")]
    System {
        /// What was to be created.
        what: &'static str,
        /// Why it failed.
        source: io::Error,
        /// What to do.
        remedy: &'static str,
    },
    /// Memory to be registered is not mapped.
    #[error(
        "cannot register memory that is not mapped, or that is read-only if the access flags \
         allow writing: allocate it first, or register it without write access"
    )]
    BadAddress,
    /// The plan of faults has it so.
    #[error("the plan of faults refuses {} with {}", call.name(), errno.name)]
    Injected {
        /// The call.
        call: quipu_fault::Call,
        /// What it is refused with.
        errno: quipu_fault::Errno,
    },
    /// No event is queued, and the descriptor is non-blocking.
    #[error("no event is queued")]
    WouldBlock,
    /// A signal handler ran while waiting, and the wait does not go on by itself.
    #[error("interrupted by a signal")]
    Interrupted,
    /// Nothing has come in the time that the call was to wait.
    #[error("nothing has arrived yet")]
    WaitOn,
    /// Connection management refuses the call.
    #[error("connection management: {0}")]
    Connection(#[from] CallError),
    /// An address or port cannot be had.
    #[error("the address or port cannot be used: {0}")]
    Address(#[source] io::Error),
    /// There is no link for QPIP.
    #[error(
        "this engine has no packet link for QPIP: set QUIPU_QPIP_LINK, such as tap:qp0 (see \
         docs/qpip.md)"
    )]
    NoLink,
    /// The process that has the adapter refuses the call.
    #[error("{words}")]
    RefusedElsewhere {
        /// As a number of the system.
        errno: i32,
        /// In words.
        words: String,
    },
    /// The process that had the adapter has ended.
    #[error(
        "the process that shared the adapter has ended: start `quipu nic --share` again, then \
         open the adapter again"
    )]
    AdapterLost,
    /// The network interface of the link was deleted, or the link fails for good.
    #[error(
        "link {link}: the device is gone: create it again if it was deleted (`ip link` lists the \
         devices), then open the adapter again"
    )]
    LinkGone {
        /// The link.
        link: String,
    },
    /// The process that has the adapter did not answer in time, or not to the question. It is asked nothing
    /// more, and may still use memory that is registered.
    #[error(
        "the process that shares the adapter does not answer, and may still use this program's \
         memory: end that process, start `quipu nic --share` again, then open the adapter again"
    )]
    AdapterSilent,
    /// Memory to be registered is not the shared adapter's.
    #[error(
        "memory for a shared adapter must be allocated from the adapter, because its process \
         cannot reach other memory"
    )]
    NotInArena,
    /// There is no room in the memory that is shared with the adapter.
    #[error(
        "the memory shared with the adapter has no room for {len} bytes: free some, or raise \
         QUIPU_ARENA_MB before opening the adapter"
    )]
    ArenaFull {
        /// Bytes asked for.
        len: usize,
    },
    /// The channel or context was destroyed, or never existed.
    #[error("no such channel or context: it was destroyed, or never created")]
    NoSuchQueue,
}

/// What to do about an error of the kernel when a `what` was to be created.
pub(crate) fn remedy(error: &io::Error) -> &'static str {
    match error.raw_os_error() {
        Some(libc::EMFILE) => "raise the limit of open file descriptors (ulimit -n)",
        Some(libc::ENFILE) => "the system is out of file descriptors; raise fs.file-max",
        Some(libc::ENOMEM | libc::ENOBUFS) => "the system is out of memory; free some",
        Some(libc::EAGAIN) => "the limit of threads is reached; raise it (ulimit -u, pids cgroup)",
        Some(libc::EADDRNOTAVAIL) => "the address has gone or no port is free; see `quipu doctor`",
        Some(libc::EACCES | libc::EPERM) => {
            "the sandbox or security policy forbids it; see `quipu doctor`"
        }
        _ => "see `quipu doctor`",
    }
}

impl EngineError {
    /// An error of the kernel.
    pub(crate) fn system(what: &'static str, source: io::Error) -> Self {
        let remedy = remedy(&source);
        Self::System { what, source, remedy }
    }

    /// The same, where the engine cannot be opened therefore.
    pub(crate) fn at_opening(self) -> OpenError {
        match self {
            Self::System { what, source, remedy } => OpenError::System { what, source, remedy },
            other => OpenError::system("an engine", io::Error::other(other)),
        }
    }
}

impl OpenError {
    /// An error of the kernel.
    pub(crate) fn system(what: &'static str, source: io::Error) -> Self {
        let remedy = remedy(&source);
        Self::System { what, source, remedy }
    }
}
