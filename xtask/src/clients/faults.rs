//! Rows in which one side dies in the middle of a transfer: the other one has to end with an error
//! soon, and nothing may be left behind.

use std::collections::BTreeSet;
use std::fs;
use std::time::{Duration, Instant};

use crate::process::{Running, wait_until};
use crate::stage::Staged;

use super::hosts::{Family, cut};
use super::pair::{Pairing, Server, client_args, run_pair};
use super::{LIMIT, Row};

/// Long enough for the retries of a peer that is gone: eight times 67 ms, as perftest sets them, on
/// a machine that is busy.
const PATIENCE: Duration = Duration::from_secs(20);
/// Processor time that the client has used once it moves data. Set-up takes much less.
const MOVING: Duration = Duration::from_millis(500);

/// How the peer is lost.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Loss {
    /// The client is killed.
    ClientKilled,
    /// The server is killed.
    ServerKilled,
    /// The wire between the hosts is cut.
    WireCut,
}

/// Programs in which both sides have requests under way.
const PROGRAMS: [(&str, &[&str]); 3] = [
    ("ib_write_bw", &["-F", "-b", "-D", "60"]),
    ("ib_send_bw", &["-F", "-b", "-D", "60"]),
    // With events perftest wants a number, and -N so as not to keep a time for each.
    ("ib_read_bw", &["-F", "-b", "-N", "-n", "50000000", "-e"]),
];

/// How the two sides meet: the beginning of the rows' names, and a variable to be set.
type Way = (&'static str, Option<(&'static str, &'static str)>);

/// Through shared memory, with and without access to the peer's memory, and over TCP.
pub(super) fn one_host(staged: &Staged) -> Vec<Row<'_>> {
    let ways = [
        ("one-host/faults", None),
        ("one-host-copy/faults", Some(("QUIPU_PEER_MEMORY", "never"))),
        ("one-host-shared/faults", Some(("QUIPU_SHARED_PAGES", "registered"))),
        ("one-host-tcp/faults", Some(("QUIPU_SAME_HOST", "never"))),
    ];
    let losses = [("client-killed", Loss::ClientKilled), ("server-killed", Loss::ServerKilled)];
    rows(&ways, &losses, |own| Pairing::one_host_at(staged, own))
}

/// Between two hosts.
pub(super) fn two_hosts(staged: &Staged) -> Vec<Row<'_>> {
    let losses = [
        ("client-killed", Loss::ClientKilled),
        ("server-killed", Loss::ServerKilled),
        ("wire-cut", Loss::WireCut),
    ];
    rows(&[("two-hosts/faults", None)], &losses, |_| Pairing::two_hosts(staged, Family::V4))
}

/// Each row has an address of its own, so that what is left behind at it is its own.
fn rows<'a>(
    ways: &[Way],
    losses: &[(&str, Loss)],
    pairing: impl Fn(&str) -> Pairing,
) -> Vec<Row<'a>> {
    let mut rows = Vec::new();
    for (way, variable) in ways {
        for (program, args) in PROGRAMS {
            for (loss_name, loss) in losses {
                let own = own_loopback(rows.len());
                let (mut pairing, loss) = (pairing(&own), *loss);
                if let Some((name, value)) = variable {
                    pairing = pairing.with_env(name, value);
                }
                let short = program.trim_start_matches("ib_");
                rows.push(Row {
                    name: format!("{way}/{short}/{loss_name}"),
                    run: Box::new(move || lose(&pairing, &own, program, args, loss)),
                });
            }
        }
    }
    rows
}

fn lose(
    pairing: &Pairing,
    own: &str,
    program: &str,
    args: &[&str],
    loss: Loss,
) -> Result<(), String> {
    let before = traces(own);
    let words: Vec<String> = args.iter().map(|word| (*word).to_owned()).collect();
    let fault = |error: anyhow::Error| format!("{error:#}");
    let deadline = Instant::now() + LIMIT;
    let mut server = Server::start(pairing, program, &words, deadline).map_err(fault)?;
    let args = client_args(&words, server.port, pairing.address);
    let command = pairing.command(&pairing.client, program, &args);
    let mut client = Running::start(command).map_err(fault)?;
    let id = client.id();
    let moving = wait_until(Instant::now() + LIMIT, || {
        client.has_ended() || processor_time(id).is_some_and(|time| time >= MOVING)
    });
    if !moving || client.has_ended() {
        client.kill();
        let ended = client.finish(Instant::now());
        server.running.kill();
        let other = server.running.finish(Instant::now());
        return Err(format!(
            "  nothing to interrupt\n{}{}",
            ended.text("client"),
            other.text("server")
        ));
    }
    let survivors = match loss {
        Loss::ClientKilled => {
            client.kill();
            drop(client);
            vec![("server", server.running)]
        }
        Loss::ServerKilled => {
            server.running.kill();
            drop(server);
            vec![("client", client)]
        }
        Loss::WireCut => {
            cut(1, true).map_err(fault)?;
            vec![("server", server.running), ("client", client)]
        }
    };
    let outcome = survivors_end(survivors);
    if loss == Loss::WireCut {
        cut(1, false).map_err(fault)?;
    }
    outcome?;
    let left: Vec<String> = traces(own).difference(&before).cloned().collect();
    if !left.is_empty() {
        return Err(format!("  left behind: {}", left.join(", ")));
    }
    if loss == Loss::WireCut {
        return Ok(());
    }
    // And the next pair is none the worse for it. (`ib_write_bw` sleeps for a second.)
    let args = ["-F", "-n", "20"].map(str::to_owned);
    let next = run_pair(pairing, "ib_read_bw", &args, LIMIT).map_err(fault)?;
    if next.both_succeeded() { Ok(()) } else { Err(next.text()) }
}

/// Each has to end with an error, and to say that a completion told it.
fn survivors_end(survivors: Vec<(&str, Running)>) -> Result<(), String> {
    let deadline = Instant::now() + PATIENCE;
    for (who, running) in survivors {
        let ended = running.finish(deadline);
        let text = ended.text(who);
        let by_itself = ended.status.and_then(|status| status.code()).is_some_and(|code| code > 0);
        let told = text.contains("with error") || text.contains("status");
        if !by_itself || !told {
            return Err(format!("  {who} was to end with an error within {PATIENCE:?}\n{text}"));
        }
    }
    Ok(())
}

/// Processor time that a process has used.
fn processor_time(process: u32) -> Option<Duration> {
    let text = fs::read_to_string(format!("/proc/{process}/stat")).ok()?;
    // Fields are counted behind the name, which may contain anything.
    let mut fields = text.rsplit_once(')')?.1.split_whitespace().skip(11);
    let ticks = fields.next()?.parse::<u64>().ok()? + fields.next()?.parse::<u64>().ok()?;
    // USER_HZ is 100 on every Linux.
    Some(Duration::from_millis(ticks * 10))
}

/// Addresses of the loopback that nobody else uses. None of them is the beginning of another one.
fn own_loopback(number: usize) -> String {
    let [.., high, low] = std::process::id().to_be_bytes();
    format!("127.{high}.{low}.{}", 100 + number)
}

/// What could be left of a process that was killed: shared memory by name, sockets by name. The folder of
/// counters, which the first process of a user makes, is there to stay.
fn traces(own: &str) -> BTreeSet<String> {
    let mut traces = BTreeSet::new();
    for folder in ["/dev/shm", "/run"] {
        let entries = fs::read_dir(folder).into_iter().flatten().flatten();
        let files = entries.map(|entry| entry.path()).filter(|path| !path.is_dir());
        let names = files.map(|path| path.display().to_string());
        traces.extend(names.filter(|name| name.contains("quipu")));
    }
    let sockets = fs::read_to_string("/proc/net/unix").unwrap_or_default();
    let names = sockets.lines().filter_map(|line| line.split_whitespace().nth(7));
    traces.extend(names.filter(|name| name.contains(own)).map(str::to_owned));
    traces
}
