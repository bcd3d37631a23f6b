//! What on this machine works and what does not, each with its remedy.

use std::net::{IpAddr, Ipv6Addr, SocketAddr};

use crate::accounts;
use crate::address::{HostAddress, device_addresses};
use crate::clock;
use crate::config::{Config, PeerMemoryPolicy, SameHost};
use crate::error::OpenError;
use crate::link::probe;
use crate::link::segment::{self, MAX_BYTES, Writers};
use crate::link::socket;
use crate::net::{default_congestion, try_congestion};
use crate::packet;
use crate::sys;

/// How something is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Verdict {
    /// It works.
    Ok,
    /// It works less well than it could.
    Warn,
    /// It does not work.
    Fail,
}

/// The outcome of one check.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Check {
    /// What was looked at.
    pub name: &'static str,
    /// How it is.
    pub verdict: Verdict,
    /// What was found.
    pub detail: String,
    /// What to do about it; empty if nothing need be done.
    pub remedy: String,
}

impl Check {
    fn new(name: &'static str, verdict: Verdict, detail: impl Into<String>) -> Self {
        Self { name, verdict, detail: detail.into(), remedy: String::new() }
    }

    fn remedy(mut self, remedy: impl Into<String>) -> Self {
        if self.verdict != Verdict::Ok {
            self.remedy = remedy.into();
        }
        self
    }
}

/// Looks at everything that an engine with this configuration depends on. Leaves nothing behind.
#[must_use]
pub fn examine(config: &Config) -> Vec<Check> {
    vec![
        address(config),
        ipv6(),
        descriptors(),
        same_host(config),
        shared_memory(),
        abstract_sockets(),
        peer_memory(config),
        congestion(config),
        processors(),
        clock_source(),
        packet_links(),
    ]
}

fn address(config: &Config) -> Check {
    const NAME: &str = "address";
    let wanted = config.address.as_ref();
    let found = match device_addresses(wanted) {
        Ok(found) => found,
        Err(OpenError::InterfaceDown { address, interface }) => {
            return Check::new(NAME, Verdict::Fail, format!("{interface} of {address} is down"))
                .remedy(format!("ip link set {interface} up"));
        }
        Err(OpenError::NoSuchAddress { address, available }) => {
            return Check::new(NAME, Verdict::Fail, format!("no interface has {address}"))
                .remedy(format!("set QUIPU_ADDRESS to one of: {available}"));
        }
        Err(error) => {
            return Check::new(NAME, Verdict::Fail, error.to_string())
                .remedy("give the address of the device with QUIPU_ADDRESS");
        }
    };
    let first = &found[0];
    let (place, others) = (format!("{} on {}", first.ip, first.interface), &found[1..]);
    if wanted.is_some() {
        let detail = format!("{place} (configured); programs use no other address");
        return Check::new(NAME, Verdict::Ok, detail);
    }
    let named = |other: &HostAddress| format!("{} on {}", other.ip, other.interface);
    let detail = match others {
        [] => format!("{place} (chosen)"),
        _ => {
            let others: Vec<_> = others.iter().map(named).collect();
            format!("{place} (chosen), GID indexes 0 to 3; then {}", others.join(", "))
        }
    };
    if !first.loopback {
        return Check::new(NAME, Verdict::Ok, detail);
    }
    let check = Check::new(NAME, Verdict::Warn, detail);
    if others.iter().any(|other| !other.ip.is_loopback()) {
        return check.remedy(
            "peers on other hosts are reached by rdma_cm, and by GID indexes from 4 on; give an interface \
             an address that is not link-local, or choose one with QUIPU_ADDRESS (fe80::1%eth0)",
        );
    }
    check.remedy(
        "only programs on this host can connect; bring an interface up, or set QUIPU_ADDRESS",
    )
}

fn ipv6() -> Check {
    let loopback = SocketAddr::new(IpAddr::V6(Ipv6Addr::LOCALHOST), 0);
    match sys::tcp_socket(loopback.ip()).and_then(|fd| sys::bind(&fd, loopback)) {
        Ok(()) => Check::new("IPv6", Verdict::Ok, "available"),
        Err(error) => Check::new("IPv6", Verdict::Warn, format!("not available: {error}")).remedy(
            "IPv4 works without it; enable it with sysctl net.ipv6.conf.all.disable_ipv6=0",
        ),
    }
}

fn descriptors() -> Check {
    const NAME: &str = "open descriptors";
    /// A connection to another host takes one.
    const COMFORTABLE: u64 = 16_384;
    match sys::descriptor_limit() {
        Ok((soft, hard)) => {
            let verdict = if hard < COMFORTABLE { Verdict::Warn } else { Verdict::Ok };
            let detail = format!("limit {soft}; the adapter takes numbers up to {hard}");
            Check::new(NAME, verdict, detail).remedy(
                "each connection to another host needs a file descriptor; raise the hard limit \
                 (ulimit -Hn)",
            )
        }
        Err(error) => Check::new(NAME, Verdict::Warn, error.to_string()),
    }
}

fn same_host(config: &Config) -> Check {
    if config.same_host == SameHost::Auto && !accounts::is_own_user(accounts::own_user()) {
        let detail = "by TCP: this user has no number of its own in this user namespace";
        return Check::new("same host", Verdict::Warn, detail)
            .remedy("run as a user that is mapped in this user namespace");
    }
    let (verdict, detail) = match config.same_host {
        SameHost::Auto => (Verdict::Ok, "peers on this host are reached through shared memory"),
        SameHost::Never => (Verdict::Warn, "peers on this host are reached by TCP, as configured"),
    };
    Check::new("same host", verdict, detail).remedy("unset QUIPU_SAME_HOST")
}

fn shared_memory() -> Check {
    const NAME: &str = "shared memory";
    let tried = segment::create(c"quipu-doctor", 1 << 20, Writers::Both)
        .and_then(|(fd, _)| segment::attach(&fd, Writers::Both, MAX_BYTES));
    match tried {
        Ok(_) => Check::new(NAME, Verdict::Ok, "memfd with seals (no /dev/shm needed)"),
        Err(error) => Check::new(NAME, Verdict::Warn, format!("memfd does not work: {error}"))
            .remedy("allow memfd_create and file seals in the sandbox; TCP is used until then"),
    }
}

fn abstract_sockets() -> Check {
    const NAME: &str = "abstract sockets";
    // No engine has port 0.
    let name = socket::Name::Everywhere(0);
    match socket::listen(name).and_then(|_listener| socket::connect(name)) {
        Ok(_) => Check::new(NAME, Verdict::Ok, "available"),
        Err(error) if error.kind() == std::io::ErrorKind::AddrInUse => {
            Check::new(NAME, Verdict::Ok, "available (another `quipu doctor` is running)")
        }
        Err(error) => Check::new(NAME, Verdict::Warn, format!("not available: {error}"))
            .remedy("allow UNIX sockets in the sandbox; TCP is used until then"),
    }
}

fn peer_memory(config: &Config) -> Check {
    const NAME: &str = "cross-process memory access";
    if config.peer_memory == PeerMemoryPolicy::Never {
        return Check::new(NAME, Verdict::Warn, "switched off").remedy("unset QUIPU_PEER_MEMORY");
    }
    if let Err(reason) = probe::on_oneself() {
        return Check::new(NAME, Verdict::Warn, reason.to_string()).remedy(
            "allow process_vm_readv and process_vm_writev in the container (docker: --cap-add \
             SYS_PTRACE); until then, bytes are copied through shared memory",
        );
    }
    let scope = probe::yama_scope();
    let detail = format!("works; Yama ptrace_scope is {scope}");
    match scope.as_str() {
        "absent" | "0" => Check::new(NAME, Verdict::Ok, detail),
        "1" if config.peer_memory == PeerMemoryPolicy::Allow => {
            Check::new(NAME, Verdict::Ok, detail)
        }
        "1" => Check::new(
            NAME,
            Verdict::Warn,
            format!(
                "{detail}: only between parent and child \
            processes"
            ),
        )
        .remedy("set QUIPU_PEER_MEMORY=allow, or sysctl kernel.yama.ptrace_scope=0"),
        _ => Check::new(NAME, Verdict::Warn, format!("{detail}: only for administrators"))
            .remedy("sysctl kernel.yama.ptrace_scope=0; until then, bytes are copied"),
    }
}

fn congestion(config: &Config) -> Check {
    const NAME: &str = "congestion control";
    let system = default_congestion().unwrap_or_else(|| "unknown".to_owned());
    if let Some(name) = &config.congestion {
        let detail = format!("{name} (configured; system: {system})");
        return match try_congestion(name) {
            Ok(()) => Check::new(NAME, Verdict::Ok, detail),
            Err(error) => Check::new(NAME, Verdict::Fail, format!("{detail}: {error}"))
                .remedy("set QUIPU_CONGESTION to what the kernel allows, or unset it"),
        };
    }
    if !system.starts_with("bbr") {
        return Check::new(NAME, Verdict::Ok, system);
    }
    let allowed = ["cubic", "reno"].into_iter().find(|name| try_congestion(name).is_ok());
    match allowed {
        Some(name) => Check::new(NAME, Verdict::Ok, format!("{name} instead of {system}")),
        None => Check::new(NAME, Verdict::Warn, format!("{system}, slow on short paths"))
            .remedy("sysctl net.ipv4.tcp_congestion_control=cubic"),
    }
}

fn processors() -> Check {
    let count = sys::processors();
    let verdict = if count < 2 { Verdict::Warn } else { Verdict::Ok };
    Check::new("processors", verdict, count.to_string()).remedy(
        "communicating programs share one processor, so the scheduler determines the \
            latency",
    )
}

fn clock_source() -> Check {
    let steady = clock::counter_is_steady();
    let (verdict, detail) = if steady {
        (Verdict::Ok, "time stamp counter")
    } else if !cfg!(target_arch = "x86_64") {
        // Which reads a counter itself, without a system call.
        (Verdict::Ok, "the kernel's clock")
    } else {
        (Verdict::Warn, "the kernel's clock (the time stamp counter is not steady here)")
    };
    Check::new("clock", verdict, detail).remedy("nothing to do; reading the time is slower")
}

fn packet_links() -> Check {
    let (mut can, mut cannot) = (Vec::new(), Vec::new());
    for (kind, outcome) in packet::kinds() {
        match outcome {
            Ok(()) => can.push(kind.to_owned()),
            Err(error) => cannot.push(format!("{kind} {error}")),
        }
    }
    // The one that always works leads to no kernel's sockets.
    let verdict = if can.len() > 1 { Verdict::Ok } else { Verdict::Warn };
    let mut detail = can.join(" ");
    if !cannot.is_empty() {
        detail = format!("{detail}; not {}", cannot.join(", "));
    }
    Check::new("packet links", verdict, detail).remedy(
        "QPIP reaches other Quipus only; grant a privilege listed in docs/qpip-links.md, or \
         allow users to create user namespaces",
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_trouble_has_a_remedy() {
        let config = Config {
            address: Some("192.0.2.77".parse().unwrap()),
            same_host: SameHost::Never,
            peer_memory: PeerMemoryPolicy::Never,
            ..Config::default()
        };
        let checks = examine(&config);
        let troubled: Vec<_> = checks.iter().filter(|c| c.verdict != Verdict::Ok).collect();
        assert!(troubled.iter().all(|check| !check.remedy.is_empty()), "{troubled:?}");
        for name in ["address", "same host", "cross-process memory access"] {
            assert!(troubled.iter().any(|check| check.name == name), "{name}");
        }
        assert_eq!(checks[0].verdict, Verdict::Fail);
        let links = checks.iter().find(|check| check.name == "packet links").unwrap();
        assert!(links.detail.contains("udp:"), "{}", links.detail);
    }
}
