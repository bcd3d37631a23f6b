//! Other software that moves messages, if it is installed: found, started, and its output read.

mod cmtime;
mod libfabric;
mod mpi;
mod perftest;
mod ucx;

use std::collections::BTreeMap;
use std::io::Read;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};

use crate::contender::{Contender, Pace, Round};
use crate::model::{Path, Sample, Test};
use crate::plan::{Plan, PlannedTest};
use crate::sys;

/// A program that runs for so long is stuck, or much slower than was thought.
const PATIENCE: Duration = Duration::from_secs(20);
/// How long a server may take until it listens.
const START: Duration = Duration::from_secs(10);
/// Programs that are started for each slice are cold at its beginning, and Quipu's own workers are not: so
/// their slices are that many times as long.
const COLD_SLICES: f64 = 4.0;

/// All peers that are installed, and a word about those that are not.
pub(crate) fn installed(plan: &Plan) -> (Vec<Box<dyn Contender>>, Vec<String>) {
    let (mut found, mut missing) = (Vec::new(), Vec::new());
    let mut look = |name: &str, peers: Result<Vec<Box<dyn Contender>>>| match peers {
        Ok(peers) => found.extend(peers),
        Err(why) => missing.push(format!("{name} is not measured: {why:#}")),
    };
    look("UCX", ucx::find());
    look("libfabric", libfabric::find());
    look("Open MPI", mpi::find());
    look("perftest over Quipu", perftest::find(plan));
    look("UCX over Quipu", ucx::over_quipu(plan));
    look("Open MPI over Quipu", mpi::over_quipu(plan));
    look("rdma_cm over Quipu", cmtime::find());
    (found, missing)
}

/// What a peer learned about its own pace, by test, and how often in a row it was tried without result.
#[derive(Default)]
struct Paces(BTreeMap<Test, (Pace, i32)>);

/// After a failure a slice has so many times fewer messages, where the pace is not known: the guess may have
/// been of a program that takes two hundred times as long, such as UCX for a read over TCP, which would never
/// end in time.
const FEWER: f64 = 16.0;

impl Paces {
    fn pace(&mut self, test: Test) -> &mut (Pace, i32) {
        self.0.entry(test).or_insert_with(|| (Pace::new(test), 0))
    }

    /// Messages in a slice, for each size.
    fn counts(&mut self, round: &Round, test: Test, sizes: &[u64]) -> Vec<(u64, u64)> {
        let (pace, in_vain) = self.pace(test);
        let slice_ns = COLD_SLICES * round.slice_ns;
        let guessed_ns = slice_ns / FEWER.powi(*in_vain);
        // Until it is known better.
        *in_vain += 1;
        let slice = |size| if pace.knows(size) { slice_ns } else { guessed_ns };
        sizes.iter().map(|&size| (size, pace.count(size, slice(size)))).collect()
    }

    fn learn(&mut self, test: Test, samples: &[Sample]) {
        let (pace, in_vain) = self.pace(test);
        *in_vain = 0;
        samples.iter().for_each(|sample| pace.learn(sample.size, sample.ns));
    }
}

/// What carries a program over Quipu, and the points that are measured then; nothing if its own transports
/// do.
type OverQuipu = Option<(Through, Vec<PlannedTest>)>;

/// By its own transports.
const OWN: [(Path, OverQuipu); 2] = [(Path::SameHost, None), (Path::Tcp, None)];

/// Over Quipu, in all ways.
fn over_quipu(plan: &Plan) -> Result<[(Path, OverQuipu); 3]> {
    let through = Through::find()?;
    let shared = Through { shared: true, ..through.clone() };
    let over = |through| Some((through, plan.middleware.clone()));
    Ok([
        (Path::SameHost, over(through.clone())),
        (Path::SameHost, over(shared)),
        (Path::Tcp, over(through)),
    ])
}

/// Programs that run over Quipu, unmodified: `quipu run` in front of them.
#[derive(Clone)]
struct Through {
    quipu: PathBuf,
    /// Whether registered memory is mapped by the other end.
    shared: bool,
}

impl Through {
    /// The command that this process is.
    fn find() -> Result<Self> {
        let quipu = std::env::current_exe().context("this program's place")?;
        ensure!(
            quipu.file_stem().is_some_and(|name| name == "quipu"),
            "it needs the command quipu"
        );
        Ok(Self { quipu, shared: false })
    }

    /// `program` on the loopback address. Datagrams travel the same way on any path.
    fn command(&self, path: Path, program: impl AsRef<std::ffi::OsStr>) -> Command {
        let mut command = Command::new(&self.quipu);
        if path == Path::Tcp {
            command.env("QUIPU_SAME_HOST", "never");
        }
        command.args(["run", "--address", "127.0.0.1"]);
        if self.shared {
            command.arg("--shared-pages");
        }
        command.arg("--").arg(program);
        command
    }
}

/// A running program whose output is collected, and which is ended when it is dropped.
struct Running {
    child: Child,
    output: Receiver<String>,
    complaints: Receiver<String>,
}

impl Running {
    fn start(command: &mut Command, cpu: Option<usize>) -> Result<Self> {
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let name = command.get_program().to_string_lossy().into_owned();
        let mut child = sys::spawn(command, cpu).with_context(|| format!("starting {name}"))?;
        let output = all_of(child.stdout.take());
        let complaints = all_of(child.stderr.take());
        Ok(Self { child, output, complaints })
    }

    /// What it printed, once it has ended well.
    fn finish(mut self) -> Result<String> {
        let end = Instant::now() + PATIENCE;
        let status = loop {
            if let Some(status) = self.child.try_wait()? {
                break status;
            }
            if Instant::now() > end {
                bail!("it does not come to an end");
            }
            std::thread::sleep(Duration::from_millis(2));
        };
        // A program may have left others behind that hold its output open.
        let output = self.output.recv_timeout(Duration::from_secs(2)).unwrap_or_default();
        if status.success() { Ok(output) } else { bail!("{status}: {}", self.complaint()) }
    }

    /// The end of what it said about what went wrong.
    fn complaint(&self) -> String {
        let text = self.complaints.recv_timeout(Duration::from_millis(500)).unwrap_or_default();
        let lines: Vec<_> = text.lines().filter(|line| !line.trim().is_empty()).collect();
        let last = lines.iter().rev().take(3).rev().map(|line| line.trim());
        last.collect::<Vec<_>>().join("; ")
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        sys::end(&mut self.child, 1000);
    }
}

/// Everything that a child prints until it closes its output.
fn all_of(pipe: Option<impl Read + Send + 'static>) -> Receiver<String> {
    let (sender, receiver) = channel();
    if let Some(mut pipe) = pipe {
        std::thread::spawn(move || {
            let mut bytes = Vec::new();
            let _ = pipe.read_to_end(&mut bytes);
            let _ = sender.send(String::from_utf8_lossy(&bytes).into_owned());
        });
    }
    receiver
}

/// Runs a server that listens at `port`, and its client on the other processor; what the client
/// printed.
fn server_and_client(
    server: &mut Command,
    client: &mut Command,
    port: u16,
    cpus: [usize; 2],
) -> Result<String> {
    let mut server = Running::start(server, Some(cpus[1]))?;
    let end = Instant::now() + START;
    while !is_listening(port) {
        if let Some(status) = server.child.try_wait()? {
            bail!("the server ended with {status}: {}", server.complaint());
        }
        if Instant::now() > end {
            bail!("the server does not listen");
        }
        std::thread::sleep(Duration::from_millis(2));
    }
    let output = Running::start(client, Some(cpus[0]))?.finish().context("the client failed")?;
    // Servers end with their clients; those that do not are ended.
    let patience = Instant::now() + Duration::from_millis(500);
    while Instant::now() < patience && matches!(server.child.try_wait(), Ok(None)) {
        std::thread::sleep(Duration::from_millis(2));
    }
    Ok(output)
}

/// Whether somebody listens at a TCP port: asks the kernel, as a connection would be taken for the
/// client's.
fn is_listening(port: u16) -> bool {
    let tables = ["/proc/net/tcp", "/proc/net/tcp6"];
    tables.iter().any(|table| {
        std::fs::read_to_string(table)
            .is_ok_and(|text| text.lines().any(|line| listens(line, port)))
    })
}

/// A line of the table: number, local address:port, remote address:port, state.
fn listens(line: &str, port: u16) -> bool {
    const LISTEN: &str = "0A";
    let mut words = line.split_whitespace();
    let local = words.nth(1).and_then(|address| address.rsplit_once(':'));
    let state = words.nth(1);
    state == Some(LISTEN)
        && local.is_some_and(|(_, text)| u16::from_str_radix(text, 16) == Ok(port))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::{Kind, Op};

    #[test]
    fn finds_who_listens() {
        let line = "   0: 0100007F:1F90 00000000:0000 0A 00000000:00000000 00:00000000 0 0 0 5";
        assert!(listens(line, 8080) && !listens(line, 8081));
        let connected = line.replace(" 0A ", " 01 ");
        assert!(!listens(&connected, 8080));
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        assert!(is_listening(listener.local_addr().unwrap().port()));
    }

    #[test]
    fn who_failed_is_asked_for_less() {
        let (mut paces, cpus) = (Paces::default(), [0, 1]);
        let round = Round { slice_ns: 12e6, cpus, depth: 128 };
        let test = Test { kind: Kind::Latency, op: Op::Read };
        let count = |paces: &mut Paces| paces.counts(&round, test, &[8])[0].1;
        let first = count(&mut paces);
        assert!(count(&mut paces) <= first / 15);
        paces.learn(test, &[Sample::new(8, 1.1e6)]);
        // What fails then was not for want of time.
        assert_eq!([count(&mut paces), count(&mut paces)], [43, 43]);
    }

    #[test]
    fn a_program_that_fails_is_quoted() {
        let mut command = Command::new("sh");
        command.args(["-c", "echo out; echo it broke >&2; exit 3"]);
        let error = Running::start(&mut command, None).unwrap().finish().unwrap_err().to_string();
        assert!(error.contains("it broke") && error.contains('3'), "{error}");
        let mut command = Command::new("sh");
        command.args(["-c", "echo out"]);
        assert_eq!(Running::start(&mut command, None).unwrap().finish().unwrap(), "out\n");
    }
}
