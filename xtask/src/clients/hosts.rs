//! Two hosts without two machines: network namespaces joined by a pair of virtual Ethernet devices.
//!
//! Everything is made inside namespaces (network, mount, process numbers) that belong to one child
//! process. When that ends, however it ends, the kernel takes everything away with it.

use std::env;
use std::fs;
use std::path::PathBuf;
use std::process::{Command, Stdio};

use anyhow::{Context, Result, ensure};

use super::{AGAIN, Hosts, Options};
use crate::report::{self, Tally};

/// Address family of a row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Family {
    /// IPv4.
    V4,
    /// IPv6.
    V6,
}

impl Family {
    /// As in the rows' names.
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::V4 => "v4",
            Self::V6 => "v6",
        }
    }

    /// The loopback address, for the device.
    pub(crate) fn loopback(self) -> &'static str {
        match self {
            Self::V4 => "127.0.0.1",
            Self::V6 => "::1",
        }
    }

    /// The address of one of the two hosts.
    pub(super) fn of_host(self, host: usize) -> &'static str {
        match self {
            Self::V4 => ["10.77.0.1", "10.77.0.2"][host],
            Self::V6 => ["fd77::1", "fd77::2"][host],
        }
    }
}

/// The namespaces' names.
pub(super) const NAMES: [&str; 2] = ["host0", "host1"];
/// The last line of the child process, which its parent reads.
const TALLY: &str = "rows:";

/// What makes the namespaces: with `root`, as the administrator; else as a user who is one inside.
pub(crate) fn unshare(root: bool) -> Command {
    let mut command = Command::new("unshare");
    if !root {
        command.args(["--user", "--map-root-user"]);
    }
    command.args(["--net", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]);
    command
}

/// Runs the rows for two hosts in a child process. Skipped where namespaces are not permitted.
pub(super) fn enter(options: &Options) -> Result<Tally> {
    let permitted = |root: &bool| {
        let mut probe = unshare(*root);
        probe.args([
            "sh",
            "-c",
            "mount -t tmpfs tmpfs /run && ip link add name test0 type veth peer name test1",
        ]);
        probe.stdout(Stdio::null()).stderr(Stdio::null()).stdin(Stdio::null());
        probe.status().is_ok_and(|status| status.success())
    };
    let Some(root) = [true, false].into_iter().find(permitted) else {
        println!(
            "skipped: this machine permits no network namespaces, neither to this user nor in a \
             user namespace; run as root, or allow kernel.unprivileged_userns_clone"
        );
        return Ok(Tally::SKIPPED);
    };
    let mut command = unshare(root);
    command.arg(own_file()?).arg("clients-inside");
    command.args(["--filter", &options.filter]);
    command.args(options.list.then_some("--list"));
    command.args(options.full.then_some("--full"));
    command.env("CARGO_TARGET_DIR", crate::target_dir());
    let mut child = command.stdout(Stdio::piped()).spawn().context("unshare")?;
    let output = child.stdout.take().context("no standard output")?;
    let (mut tally, mut failure) = (None, Vec::new());
    for line in std::io::BufRead::lines(std::io::BufReader::new(output)) {
        let line = line?;
        if let Some(numbers) = line.strip_prefix(TALLY) {
            tally = parse_tally(numbers);
            continue;
        }
        println!("{line}");
        if line.starts_with("FAIL  ") || !failure.is_empty() {
            failure.push(line);
        }
        if failure.last().is_some_and(|line| line.starts_with(AGAIN)) {
            report::note_failure(&failure.join("\n"));
            failure.clear();
        }
    }
    child.wait()?;
    tally.with_context(|| format!("the rows for {} ended early", Hosts::Two.name()))
}

/// The file of this program. The tests build it again, with which the one that runs is removed; the new one
/// has its name, and is the same program.
fn own_file() -> Result<PathBuf> {
    let file = env::current_exe().context("own file")?;
    let now = file.to_str().and_then(|name| name.strip_suffix(" (deleted)"));
    Ok(now.map_or_else(|| file.clone(), PathBuf::from))
}

/// Tells the parent how it went.
pub(super) fn print_tally(tally: Tally) {
    println!("{TALLY} {} {} {}", tally.passed, tally.failed, tally.skipped);
}

fn parse_tally(text: &str) -> Option<Tally> {
    let mut numbers = text.split_whitespace().map(|word| word.parse().ok());
    let mut next = || numbers.next().flatten();
    Some(Tally { passed: next()?, failed: next()?, skipped: next()? })
}

/// Makes the two hosts, inside the child process's namespaces.
pub(super) fn build() -> Result<()> {
    // `ip netns` keeps its names below /run, which is to be our own.
    sh("mount -t tmpfs tmpfs /run")?;
    let [first, second] = NAMES;
    sh(&format!("ip netns add {first} && ip netns add {second}"))?;
    sh(&format!("ip link add name eth0 netns {first} type veth peer name eth0 netns {second}"))?;
    for (host, name) in NAMES.iter().enumerate() {
        let (v4, v6) = (Family::V4.of_host(host), Family::V6.of_host(host));
        sh(&format!(
            "ip -n {name} addr add {v4}/24 dev eth0 && ip -n {name} addr add {v6}/64 dev eth0 nodad \
             && ip -n {name} link set lo up && ip -n {name} link set eth0 up"
        ))?;
    }
    // IPv6 is ready when the link is; there is nothing that announces it.
    let deadline = std::time::Instant::now() + std::time::Duration::from_secs(10);
    let ready = crate::process::wait_until(deadline, || {
        NAMES.iter().all(|name| {
            let shown = Command::new("ip").args(["-n", name, "-6", "route", "show"]).output();
            shown.is_ok_and(|shown| String::from_utf8_lossy(&shown.stdout).contains("fd77::"))
        })
    });
    ensure!(ready, "the hosts' IPv6 addresses are not ready after 10 s");
    Ok(())
}

/// The words that run a program on one of the hosts.
pub(super) fn on_host(host: usize) -> Vec<String> {
    vec!["nsenter".into(), format!("--net=/run/netns/{}", NAMES[host]), "--".into()]
}

/// Cuts the wire between the hosts, or joins it again.
pub(super) fn cut(host: usize, down: bool) -> Result<()> {
    let state = if down { "down" } else { "up" };
    sh(&format!("ip -n {} link set eth0 {state}", NAMES[host]))
}

fn sh(script: &str) -> Result<()> {
    let output = Command::new("sh").args(["-c", script]).output().context("sh")?;
    let why = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "`{script}` failed: {}", why.trim());
    Ok(())
}

/// Whether a process listens on a TCP port, as its own network namespace shows it.
pub(super) fn listens(process: u32, port: u16) -> bool {
    // State 0A is LISTEN.
    has_port(process, port, ["tcp", "tcp6"], "0A")
}

/// Whether a process has bound a UDP port and connected it to no peer.
pub(super) fn receives(process: u32, port: u16) -> bool {
    has_port(process, port, ["udp", "udp6"], "07")
}

fn has_port(process: u32, port: u16, tables: [&str; 2], state: &str) -> bool {
    let wanted = format!(":{port:04X}");
    tables.iter().any(|table| {
        let text = fs::read_to_string(format!("/proc/{process}/net/{table}")).unwrap_or_default();
        text.lines().skip(1).any(|line| {
            let mut words = line.split_whitespace().skip(1);
            let local = words.next().unwrap_or_default();
            local.ends_with(&wanted) && words.nth(1) == Some(state)
        })
    })
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, Instant};

    use super::*;

    #[test]
    fn a_listener_is_seen() {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        assert!(listens(std::process::id(), port));
        drop(listener);
        // A child that another test is starting holds a copy until it is the other program.
        let patience = Instant::now() + Duration::from_secs(10);
        while listens(std::process::id(), port) {
            assert!(Instant::now() < patience, "a closed listener is seen");
            std::thread::sleep(Duration::from_millis(5));
        }
        let socket = std::net::UdpSocket::bind("127.0.0.1:0").unwrap();
        assert!(receives(std::process::id(), socket.local_addr().unwrap().port()));
    }

    #[test]
    fn a_tally_is_read() {
        let tally = Tally { passed: 3, failed: 0, skipped: 1 };
        assert_eq!(parse_tally(" 3 0 1"), Some(tally));
        assert_eq!(parse_tally(" 3"), None);
    }
}
