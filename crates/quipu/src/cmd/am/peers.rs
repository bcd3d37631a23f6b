//! What others need for the same: UCX's active messages and Open MPI, in turns with ours.

use std::fs;
use std::net::{Ipv4Addr, TcpListener};
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::time::Duration;

use super::bench::{Extent, Meter, Outcome};

/// The program for Open MPI.
const SOURCE: &str = include_str!("peers.c");
/// Attempts of the client of UCX to reach the server that was just started.
const ATTEMPTS: u32 = 50;
const PAUSE: Duration = Duration::from_millis(100);

/// One value of a peer, and the same of Active Messages, one for each round.
#[derive(Clone, Debug)]
pub struct Peer {
    /// Whose.
    pub name: &'static str,
    /// What, and in which unit.
    pub what: &'static str,
    /// The peer's values.
    pub theirs: Vec<f64>,
    /// Ours, in the same rounds.
    pub ours: Vec<f64>,
}

/// What was measured, and why the rest was not.
#[derive(Debug, Default)]
pub struct Comparison {
    /// Values.
    pub peers: Vec<Peer>,
    /// Peers that are not here, each with the reason.
    pub skipped: Vec<String>,
}

/// A folder that goes with its owner.
struct Folder(PathBuf);

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// The transports of UCX and the byte transfer layers of Open MPI for a path.
fn transports(is_tcp: bool) -> (&'static str, &'static str) {
    if is_tcp { ("tcp", "self,tcp") } else { ("posix,cma", "self,vader") }
}

/// The output of a command that ends within a minute.
fn run(command: &mut Command) -> Outcome<String> {
    let output = command.stdin(Stdio::null()).output()?;
    if output.status.success() {
        return Ok(String::from_utf8_lossy(&output.stdout).into_owned());
    }
    let said = String::from_utf8_lossy(&output.stderr);
    let last = said.lines().last().unwrap_or_default();
    Err(format!("{:?} failed: {last}", command.get_program()).into())
}

fn bounded(program: &str) -> Command {
    let mut command = Command::new("timeout");
    command.args(["60", program]);
    command
}

/// Half a round trip of 16 bytes by UCX's active messages, in nanoseconds.
fn ucx(is_tcp: bool, messages: u32) -> Outcome<f64> {
    let port = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?.local_addr()?.port().to_string();
    let command = || {
        let mut command = bounded("ucx_perftest");
        command.env("UCX_TLS", transports(is_tcp).0).env("UCX_LOG_LEVEL", "error");
        if is_tcp {
            command.env("UCX_NET_DEVICES", "lo");
        }
        command.args(["-p", &port]);
        command
    };
    let mut server = command().stdin(Stdio::null()).stdout(Stdio::null()).spawn()?;
    let (count, warm) = (messages.to_string(), (messages / 10 + 1).to_string());
    let mut outcome = Err("no attempt".into());
    for _ in 0..ATTEMPTS {
        let mut client = command();
        client.args(["127.0.0.1", "-t", "ucp_am_lat", "-s", "16", "-v", "-f"]);
        outcome = run(client.args(["-n", &count, "-w", &warm]));
        if outcome.is_ok() || server.try_wait()?.is_some() {
            break;
        }
        std::thread::sleep(PAUSE);
    }
    let _ = server.kill();
    server.wait()?;
    let output = outcome?;
    output.lines().find_map(latency_of).ok_or_else(|| format!("no latency in {output:?}").into())
}

/// The average latency of a line of CSV, in nanoseconds: iterations, percentile, average and overall
/// latency in microseconds, and more.
fn latency_of(line: &str) -> Option<f64> {
    let fields: Vec<&str> = line.split(',').map(str::trim).collect();
    let _: u64 = fields.first()?.parse().ok()?;
    let microseconds: f64 = fields.get(3)?.parse().ok()?;
    (microseconds > 0.0).then_some(microseconds * 1e3)
}

/// The program for Open MPI, built.
fn build() -> Outcome<Folder> {
    let folder = std::env::temp_dir().join(format!("quipu-am-{}", std::process::id()));
    fs::create_dir_all(&folder)?;
    let folder = Folder(folder);
    let (source, program) = (folder.0.join("peers.c"), folder.0.join("peers"));
    fs::write(&source, SOURCE)?;
    run(Command::new("mpicc").arg("-O2").arg("-o").arg(program).arg(source))?;
    Ok(folder)
}

/// Half a round trip and a barrier of two ranks, in nanoseconds.
fn mpi(folder: &Folder, is_tcp: bool, messages: u32) -> Outcome<[f64; 2]> {
    let mut command = bounded("mpirun");
    command.args(["--allow-run-as-root", "--oversubscribe", "--bind-to", "none", "-np", "2"]);
    command.args(["--mca", "pml", "ob1", "--mca", "btl", transports(is_tcp).1]);
    // Ranks that share no processor must not yield, as they would when oversubscribed.
    command.args(["--mca", "mpi_yield_when_idle", "0"]);
    command.arg(folder.0.join("peers")).arg(messages.to_string());
    let output = run(&mut command)?;
    let value = |word: &str| {
        let line = output.lines().find_map(|line| line.strip_prefix(word));
        line.and_then(|rest| rest.trim().parse().ok()).ok_or_else(|| format!("no {word}: {output}"))
    };
    Ok([value("half ")?, value("barrier ")?])
}

/// Measures ours and theirs in turns.
///
/// # Errors
///
/// The adapter or the other process of ours fails; a peer that has worked fails.
pub fn compare(answer: Command, extent: Extent, is_tcp: bool) -> Outcome<Comparison> {
    let mut meter = Meter::new(answer)?;
    let mut comparison = Comparison::default();
    let has_ucx = ucx(is_tcp, 100)
        .map_err(|error| comparison.skipped.push(format!("UCX is not measured: {error}")))
        .is_ok();
    let folder = build().and_then(|folder| mpi(&folder, is_tcp, 100).map(|_| folder));
    let folder = folder
        .map_err(|error| comparison.skipped.push(format!("Open MPI is not measured: {error}")))
        .ok();
    let peer = |name, what| Peer { name, what, theirs: Vec::new(), ours: Vec::new() };
    let half = "half round trip of 16 bytes, ns";
    let mut by_ucx = peer("UCX ucp_am", half);
    let mut by_mpi = peer("Open MPI", half);
    let mut barrier = peer("Open MPI", "barrier of 2 processes, ns");
    meter.am_half(extent.messages)?;
    meter.barrier(extent.messages)?;
    for _ in 0..extent.rounds {
        let ours = meter.am_half(extent.messages)?;
        if has_ucx {
            by_ucx.theirs.push(ucx(is_tcp, extent.messages)?);
            by_ucx.ours.push(ours);
        }
        if let Some(folder) = &folder {
            barrier.ours.push(meter.barrier(extent.messages)?);
            let [half, meeting] = mpi(folder, is_tcp, extent.messages)?;
            by_mpi.theirs.push(half);
            by_mpi.ours.push(ours);
            barrier.theirs.push(meeting);
        }
    }
    meter.quit()?;
    comparison.peers =
        [by_ucx, by_mpi, barrier].into_iter().filter(|peer| !peer.theirs.is_empty()).collect();
    Ok(comparison)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_latency_is_the_average_of_a_line() {
        assert_eq!(latency_of("1000,0.569,7.473,7.475,1.02,1.02,133815,133000"), Some(7475.0));
        assert_eq!(latency_of("tests,iterations,50.0_percentile_lat"), None);
    }
}
