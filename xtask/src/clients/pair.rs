//! A server and a client of one program.

use std::net::{Ipv4Addr, Ipv6Addr, TcpListener, UdpSocket};
use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};

use super::hosts::{Family, listens, on_host};
use crate::process::{Ended, Running, wait_until};
use crate::stage::Staged;

/// Where server and client run, and by which address the client finds the server.
#[derive(Clone, Debug)]
pub(crate) struct Pairing {
    /// What comes in front of the server's command.
    pub(super) server: Vec<String>,
    /// What comes in front of the client's command.
    pub(super) client: Vec<String>,
    /// The server's address for what the programs tell each other before they use their devices.
    /// They do so by IPv4 alone: `ibv_rc_pingpong` and perftest listen at such addresses only.
    pub(super) address: &'static str,
    /// Set for both: NAME, VALUE.
    pub(super) env: Vec<(&'static str, &'static str)>,
}

impl Pairing {
    /// Both on this host.
    pub(crate) fn one_host(staged: &Staged, family: Family) -> Self {
        Self::one_host_at(staged, family.loopback())
    }

    /// The same with another address of the loopback for the device.
    pub(super) fn one_host_at(staged: &Staged, device: &str) -> Self {
        let both = staged.run(device);
        let address = Family::V4.loopback();
        Self { server: both.clone(), client: both, address, env: Vec::new() }
    }

    /// The server on host 0, the client on host 1.
    pub(super) fn two_hosts(staged: &Staged, family: Family) -> Self {
        let on = |host| [on_host(host), staged.run(family.of_host(host))].concat();
        Self { server: on(0), client: on(1), address: Family::V4.of_host(0), env: Vec::new() }
    }

    /// Both on host 0, at an address that is not of the loopback.
    pub(super) fn same_of_two(staged: &Staged) -> Self {
        let both = [on_host(0), staged.run(Family::V4.of_host(0))].concat();
        let address = Family::V4.of_host(0);
        Self { server: both.clone(), client: both, address, env: Vec::new() }
    }

    /// The same with a variable set for both.
    pub(super) fn with_env(mut self, name: &'static str, value: &'static str) -> Self {
        self.env.push((name, value));
        self
    }

    /// A command with everything in front of it.
    pub(super) fn command(&self, front: &[String], program: &str, args: &[String]) -> Command {
        let mut words = front.iter().map(String::as_str).chain([program]);
        let mut command = Command::new(words.next().unwrap_or(program));
        command.args(words).args(args).envs(self.env.iter().copied());
        command
    }
}

/// What a server and its client left behind.
#[derive(Debug)]
pub(crate) struct Pair {
    pub(crate) server: Ended,
    pub(crate) client: Ended,
}

impl Pair {
    /// Whether both ended with status 0.
    pub(crate) fn both_succeeded(&self) -> bool {
        self.server.success() && self.client.success()
    }

    /// Both outputs.
    pub(crate) fn text(&self) -> String {
        self.server.text("server") + &self.client.text("client")
    }
}

/// Ports for servers: below those that Linux gives to sockets without a name, which a row may have open
/// in a namespace that is not this one.
const SERVERS: std::ops::Range<u16> = 16_384..32_768;

/// The port of multicast datagrams, which a row may want at any time.
const MULTICAST: u16 = 20_804;

/// A port that nothing of this namespace uses, and that this process gives to nobody else until all have
/// had their turn.
pub(super) fn free_port() -> Result<u16> {
    static TURN: AtomicU32 = AtomicU32::new(0);
    // Runs that go on at the same time begin in different places.
    let start = std::process::id().wrapping_mul(1031);
    let count = u32::from(SERVERS.end - SERVERS.start);
    (0..count)
        .map(|_| start.wrapping_add(TURN.fetch_add(1, Ordering::Relaxed)) % count)
        .filter_map(|offset| Some(SERVERS.start + u16::try_from(offset).ok()?))
        .find(|&port| port != MULTICAST && is_free(port))
        .with_context(|| format!("no port from {} to {} is free", SERVERS.start, SERVERS.end - 1))
}

fn is_free(port: u16) -> bool {
    let any = (Ipv6Addr::UNSPECIFIED, port);
    let bound =
        TcpListener::bind(any).or_else(|_| TcpListener::bind((Ipv4Addr::UNSPECIFIED, port)));
    bound.is_ok() && UdpSocket::bind((Ipv4Addr::UNSPECIFIED, port)).is_ok()
}

/// Starts a server and waits until `is_there` says so of its process.
///
/// # Errors
///
/// It cannot be started, or it ends before it is there; with what it said.
pub(super) fn start(
    command: Command,
    is_there: impl Fn(u32) -> bool,
    deadline: Instant,
) -> Result<Running> {
    let mut running = Running::start(command)?;
    let id = running.id();
    // Seen once is enough: tables of the kernel that change while they are read may lack a line.
    let mut seen = false;
    wait_until(deadline, || {
        seen = is_there(id);
        seen || running.has_ended()
    });
    if running.has_ended() || !seen {
        let ended = running.finish(Instant::now());
        bail!("the server never listened\n{}", ended.text("server"));
    }
    Ok(running)
}

/// Runs a server and, once `is_there` says so of its process, its client.
///
/// # Errors
///
/// Those of [`start`]; the client cannot be started.
pub(super) fn run_both(
    server: Command,
    client: Command,
    is_there: impl Fn(u32) -> bool,
    limit: Duration,
) -> Result<Pair> {
    let deadline = Instant::now() + limit;
    let server = start(server, is_there, deadline)?;
    let client = Running::start(client)?.finish(deadline);
    // A server whose client failed may wait for ever for what will not come.
    let patience =
        if client.success() { deadline } else { Instant::now() + Duration::from_secs(2) };
    Ok(Pair { server: server.finish(patience.min(deadline)), client })
}

/// A server that listens.
pub(super) struct Server {
    pub(super) running: Running,
    pub(super) port: u16,
}

impl Server {
    /// Starts a server and waits until it listens; errors as of [`start`].
    pub(super) fn start(
        pairing: &Pairing,
        program: &str,
        args: &[String],
        deadline: Instant,
    ) -> Result<Self> {
        let port = free_port()?;
        let command = pairing.command(&pairing.server, program, &with_port(args, port));
        let running = start(command, |id| listens(id, port), deadline)?;
        Ok(Self { running, port })
    }
}

/// The arguments with `-p PORT` in front.
pub(super) fn with_port(args: &[String], port: u16) -> Vec<String> {
    [&["-p".into(), port.to_string()], args].concat()
}

/// The client's arguments: the server's behind them.
pub(super) fn client_args(args: &[String], port: u16, address: &str) -> Vec<String> {
    let mut args = with_port(args, port);
    args.push(address.to_owned());
    args
}

/// Runs a server and, once it listens, its client.
///
/// # Errors
///
/// The programs cannot be started, or the server ends before it listens.
pub(crate) fn run_pair(
    pairing: &Pairing,
    program: &str,
    args: &[String],
    limit: Duration,
) -> Result<Pair> {
    let port = free_port()?;
    let server = pairing.command(&pairing.server, program, &with_port(args, port));
    let args = client_args(args, port, pairing.address);
    let client = pairing.command(&pairing.client, program, &args);
    run_both(server, client, |id| listens(id, port), limit)
}
