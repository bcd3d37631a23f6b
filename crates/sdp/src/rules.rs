//! Rules that say which sockets go over SDP, in the grammar of `libsdp.conf`:
//!
//! ```text
//! use sdp|tcp|both server|client PROGRAM ADDRESS[/PREFIX]:PORT[-PORT]
//! log min-level 1-9 destination stderr|syslog|file NAME
//! ```
//!
//! `PROGRAM`, `ADDRESS` and `PORT` may be `*`; a program may contain `*` and `?`. An IPv6 address stands in
//! brackets. `listen` stands for `server`, `connect` for `client`. The first rule that fits decides; if
//! none does, TCP is used.

use std::net::{IpAddr, SocketAddr};
use std::ops::RangeInclusive;

use thiserror::Error;

/// What carries a socket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Transport {
    /// The kernel's TCP.
    Tcp,
    /// SDP.
    Sdp,
    /// SDP where the peer has it, the kernel's TCP otherwise.
    Both,
}

/// What a socket is used for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// It listens; the address is its own.
    Server,
    /// It connects; the address is the peer's.
    Client,
}

/// Why a file of rules is not understood.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error("line {line}: {reason}")]
pub struct RuleError {
    /// From 1.
    pub line: usize,
    /// What is wrong, and what was expected.
    pub reason: String,
}

#[derive(Clone, Debug)]
struct Rule {
    transport: Transport,
    role: Role,
    program: String,
    /// The network, by its address and the bits that count. `None`: any.
    network: Option<(IpAddr, u8)>,
    ports: RangeInclusive<u16>,
}

/// All rules of a file, in order.
#[derive(Clone, Debug, Default)]
pub struct Rules {
    rules: Vec<Rule>,
}

impl Rules {
    /// Every socket goes over SDP.
    pub fn everything() -> Self {
        let rule = |role| Rule {
            transport: Transport::Sdp,
            role,
            program: "*".into(),
            network: None,
            ports: 0..=u16::MAX,
        };
        Self { rules: vec![rule(Role::Server), rule(Role::Client)] }
    }

    /// Reads a file.
    ///
    /// # Errors
    ///
    /// The first line that is neither empty, a comment (`#`), a rule nor a `log` statement.
    pub fn parse(text: &str) -> Result<Self, RuleError> {
        let mut rules = Vec::new();
        for (index, line) in text.lines().enumerate() {
            let line = line.split('#').next().unwrap_or("");
            let words: Vec<&str> = line.split_whitespace().collect();
            let parsed = match words.split_first() {
                None => continue,
                Some((&"use", rest)) => rule(rest).map(|rule| rules.push(rule)),
                Some((&"log", rest)) => log(rest),
                Some((other, _)) => {
                    Err(format!("unknown statement {other:?}: expected use or log"))
                }
            };
            parsed.map_err(|reason| RuleError { line: index + 1, reason })?;
        }
        Ok(Self { rules })
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.rules.is_empty()
    }

    /// What carries a socket of a program (the name of its file) that listens at an address or connects
    /// to one.
    pub fn choose(&self, role: Role, program: &str, address: SocketAddr) -> Transport {
        let fits = |rule: &&Rule| {
            rule.role == role
                && rule.ports.contains(&address.port())
                && matches(rule.program.as_bytes(), program.as_bytes())
                && rule.network.is_none_or(|network| contains(network, address.ip()))
        };
        self.rules.iter().find(fits).map_or(Transport::Tcp, |rule| rule.transport)
    }
}

fn rule(words: &[&str]) -> Result<Rule, String> {
    let &[transport, role, program, place] = words else {
        return Err(format!(
            "{} words after use: expected sdp|tcp|both server|client PROGRAM ADDRESS:PORT",
            words.len()
        ));
    };
    let transport = match transport {
        "sdp" => Transport::Sdp,
        "tcp" => Transport::Tcp,
        "both" => Transport::Both,
        other => return Err(format!("unknown transport {other:?}: expected sdp, tcp or both")),
    };
    let role = match role {
        "server" | "listen" => Role::Server,
        "client" | "connect" => Role::Client,
        other => return Err(format!("unknown role {other:?}: expected server or client")),
    };
    let (address, ports) = place
        .rsplit_once(':')
        .ok_or_else(|| format!("{place:?} has no port: expected ADDRESS:PORT, such as *:*"))?;
    Ok(Rule {
        transport,
        role,
        program: program.into(),
        network: network(address)?,
        ports: self::ports(ports)?,
    })
}

fn network(text: &str) -> Result<Option<(IpAddr, u8)>, String> {
    if text == "*" {
        return Ok(None);
    }
    let (address, prefix) = match text.split_once('/') {
        Some((address, prefix)) => (address, Some(prefix)),
        None => (text, None),
    };
    let address = address.strip_prefix('[').and_then(|a| a.strip_suffix(']')).unwrap_or(address);
    let ip: IpAddr =
        address.parse().map_err(|_| format!("{address:?} is no IP address: expected one, or *"))?;
    let most = if ip.is_ipv4() { 32 } else { 128 };
    let bits = prefix.map_or(Ok(most), str::parse).ok().filter(|bits| *bits <= most);
    match bits {
        Some(bits) => Ok(Some((ip, bits))),
        None => Err(format!("the prefix of {text:?} is none: expected 0 to {most}")),
    }
}

fn ports(text: &str) -> Result<RangeInclusive<u16>, String> {
    if text == "*" {
        return Ok(0..=u16::MAX);
    }
    let (first, last) = text.split_once('-').unwrap_or((text, text));
    match (first.parse(), last.parse()) {
        (Ok(first), Ok(last)) if first <= last => Ok(first..=last),
        _ => Err(format!("{text:?} is no port: expected a number, a range or *")),
    }
}

/// Checks a statement about the log, which is accepted: this library says what it does on standard error.
fn log(words: &[&str]) -> Result<(), String> {
    let mut words = words.iter();
    while let Some(word) = words.next() {
        let value = words.next().copied().unwrap_or("");
        let is_good = match *word {
            "min-level" => matches!(value.parse(), Ok(1..=9)),
            "destination" => match value {
                "stderr" | "syslog" => true,
                "file" => words.next().is_some(),
                _ => false,
            },
            _ => false,
        };
        if !is_good {
            return Err(format!(
                "{word} {value:?}: expected min-level 1 to 9, destination stderr, syslog or file NAME"
            ));
        }
    }
    Ok(())
}

/// Whether an address lies in a network. IPv4 mapped into IPv6 counts as IPv4.
fn contains((network, bits): (IpAddr, u8), address: IpAddr) -> bool {
    let number = |ip: IpAddr| match ip.to_canonical() {
        IpAddr::V4(v4) => (u128::from(u32::from(v4)) << 96, true),
        IpAddr::V6(v6) => (u128::from(v6), false),
    };
    let ((network, is_v4), (address, other)) = (number(network), number(address));
    let mask = u128::MAX.checked_shl(128 - u32::from(bits)).unwrap_or(0);
    is_v4 == other && (network ^ address) & mask == 0
}

/// Whether a name fits a pattern with `*` and `?`.
fn matches(pattern: &[u8], name: &[u8]) -> bool {
    let (mut at, mut from) = (0, 0);
    let mut star: Option<(usize, usize)> = None;
    while from < name.len() {
        match pattern.get(at) {
            Some(b'*') => {
                star = Some((at, from));
                at += 1;
            }
            Some(letter) if *letter == b'?' || *letter == name[from] => {
                (at, from) = (at + 1, from + 1);
            }
            _ => {
                // The last star stands for one letter more.
                let Some((of, upto)) = star else { return false };
                star = Some((of, upto + 1));
                (at, from) = (of + 1, upto + 1);
            }
        }
    }
    pattern[at..].iter().all(|letter| *letter == b'*')
}

#[cfg(test)]
mod tests {
    use super::*;

    fn choose(rules: &Rules, role: Role, program: &str, address: &str) -> Transport {
        rules.choose(role, program, address.parse().unwrap())
    }

    #[test]
    fn the_first_rule_that_fits_decides() {
        let rules = Rules::parse(
            "# a comment\n\
             log min-level 7 destination file libsdp.log\n\n\
             use tcp client * 10.0.0.0/8:22   # not ssh\n\
             use sdp client iperf* 10.0.0.0/8:1-9999\n\
             use both server * *:80\n\
             use sdp listen ?c [fd00::]/8:*\n",
        )
        .unwrap();
        use Role::{Client, Server};
        assert_eq!(choose(&rules, Client, "iperf3", "10.1.2.3:5201"), Transport::Sdp);
        assert_eq!(choose(&rules, Client, "iperf3", "[::ffff:10.1.2.3]:5201"), Transport::Sdp);
        assert_eq!(choose(&rules, Client, "iperf3", "10.1.2.3:22"), Transport::Tcp);
        assert_eq!(choose(&rules, Client, "iperf3", "11.1.2.3:5201"), Transport::Tcp);
        assert_eq!(choose(&rules, Client, "perf3", "10.1.2.3:5201"), Transport::Tcp);
        assert_eq!(choose(&rules, Server, "httpd", "0.0.0.0:80"), Transport::Both);
        assert_eq!(choose(&rules, Server, "nc", "[fd12::1]:7"), Transport::Sdp);
        assert_eq!(choose(&rules, Server, "nc", "[fe80::1]:7"), Transport::Tcp);
        assert_eq!(choose(&rules, Server, "ncc", "[fd12::1]:7"), Transport::Tcp);
        assert!(Rules::parse("").unwrap().is_empty());
        assert_eq!(choose(&Rules::everything(), Server, "x", "1.2.3.4:5"), Transport::Sdp);
    }

    #[test]
    fn what_is_wrong_is_said_with_its_line() {
        let reason = |text: &str| Rules::parse(text).unwrap_err();
        let error = reason("use sdp client * *:*\nuse rdma client * *:*\n");
        assert_eq!(error.line, 2);
        assert!(error.reason.contains("\"rdma\""), "{error}");
        for (text, part) in [
            ("match", "unknown statement"),
            ("use sdp client *", "3 words"),
            ("use sdp peer * *:*", "unknown role"),
            ("use sdp client * host:1", "no IP address"),
            ("use sdp client * 10.0.0.1/33:1", "prefix"),
            ("use sdp client * *:9-1", "no port"),
            ("use sdp client * *:65536", "no port"),
            ("use sdp client * *", "has no port"),
            ("log min-level 10", "min-level"),
            ("log destination file", "destination"),
        ] {
            let error = reason(text);
            assert!(error.reason.contains(part), "{text}: {error}");
        }
    }

    #[test]
    fn patterns() {
        for (pattern, name, fits) in [
            ("*", "", true),
            ("a*b*c", "a-b-b-c", true),
            ("a*b*c", "a-b-b-d", false),
            ("??", "ab", true),
            ("??", "abc", false),
            ("", "", true),
            ("", "a", false),
        ] {
            assert_eq!(matches(pattern.as_bytes(), name.as_bytes()), fits, "{pattern} {name}");
        }
    }
}
