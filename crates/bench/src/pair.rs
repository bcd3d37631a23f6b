//! The command's side of its workers: two processes, one conversation with each.

use std::collections::HashMap;
use std::io::{BufRead, BufReader, Read, Write};
use std::path::PathBuf;
use std::process::{Child, ChildStdin, Command as Program, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::Duration;

use anyhow::{Context, Result, anyhow, bail};

use crate::contender::{Contender, Pace, Round};
use crate::model::{Also, Footprint, Kind, Op, Overhead, Path, Role, Sample, Test};
use crate::sys;
use crate::worker::{CROWD_MESSAGES, Command, MAX_CROWD_SIZE, Reply, Setup, Slice, What};

/// A worker that says nothing for so long is given up. Workers give up on each other before.
const PATIENCE: Duration = Duration::from_secs(30);

/// How workers are started: this program, with arguments that make it one.
#[derive(Clone, Debug)]
pub(crate) struct Launcher {
    pub(crate) program: PathBuf,
    pub(crate) arguments: Vec<String>,
}

/// A worker process.
struct Worker {
    child: Child,
    /// Closed to tell it that it is no longer needed.
    input: Option<ChildStdin>,
    replies: Receiver<String>,
    complaints: Receiver<String>,
}

impl Worker {
    fn start(launcher: &Launcher, setup: &Setup) -> Result<Self> {
        let mut program = Program::new(&launcher.program);
        program.args(&launcher.arguments);
        program.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = sys::spawn(&mut program, None).context("cannot start a worker")?;
        let input = child.stdin.take();
        let replies = lines_of(child.stdout.take());
        let complaints = lines_of(child.stderr.take());
        let mut worker = Self { child, input, replies, complaints };
        worker.write(&serde_json::to_string(setup)?)?;
        Ok(worker)
    }

    fn write(&mut self, line: &str) -> Result<()> {
        let input = self.input.as_mut().context("the worker was dismissed")?;
        let written = input.write_all(format!("{line}\n").as_bytes()).and_then(|()| input.flush());
        written.map_err(|_| self.obituary())
    }

    fn tell(&mut self, command: &Command) -> Result<()> {
        self.write(&serde_json::to_string(command)?)
    }

    fn hear(&mut self) -> Result<Reply> {
        match self.replies.recv_timeout(PATIENCE) {
            Ok(line) => match serde_json::from_str(&line).context("a worker's answer")? {
                Reply::Failed(why) => Err(anyhow!(why)),
                reply => Ok(reply),
            },
            Err(RecvTimeoutError::Timeout) => bail!("a worker does not answer"),
            Err(RecvTimeoutError::Disconnected) => Err(self.obituary()),
        }
    }

    /// Why a worker is gone.
    fn obituary(&mut self) -> anyhow::Error {
        sys::end(&mut self.child, 200);
        let status = self.child.try_wait().ok().flatten();
        let how = status.map_or("without a status".into(), |status| status.to_string());
        let said: Vec<_> = self.complaints.try_iter().take(4).collect();
        anyhow!("a worker ended ({how}): {}", said.join("; "))
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        // The end of its input lets it end in order; it gets a moment for that.
        self.input = None;
        for _ in 0..100 {
            if !matches!(self.child.try_wait(), Ok(None)) {
                return;
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        sys::end(&mut self.child, 100);
    }
}

/// Passes on the lines of a child's output, so that they can be waited for with a limit.
pub(crate) fn lines_of(pipe: Option<impl Read + Send + 'static>) -> Receiver<String> {
    let (sender, receiver) = channel();
    if let Some(pipe) = pipe {
        std::thread::spawn(move || {
            for line in BufReader::new(pipe).lines().map_while(Result::ok) {
                if sender.send(line).is_err() {
                    break;
                }
            }
        });
    }
    receiver
}

/// Two connected workers, or one that needs no other, as a contender.
pub(crate) struct Pair {
    name: String,
    what: What,
    path: Path,
    role: Role,
    launcher: Launcher,
    /// Set-up of the first; the second's follows from it.
    setup: Setup,
    workers: Option<(Worker, Option<Worker>)>,
    paces: HashMap<Test, Pace>,
}

impl Pair {
    pub(crate) fn new(
        name: &str,
        role: Role,
        path: Path,
        launcher: &Launcher,
        setup: Setup,
    ) -> Self {
        Self {
            name: name.into(),
            what: setup.what,
            path,
            role,
            launcher: launcher.clone(),
            setup,
            workers: None,
            paces: HashMap::new(),
        }
    }

    /// The workers, which are started and connected when they are needed first.
    fn workers(&mut self) -> Result<&mut (Worker, Option<Worker>)> {
        if self.workers.is_none() {
            self.workers = Some(self.start()?);
        }
        self.workers.as_mut().context("there are no workers")
    }

    fn start(&self) -> Result<(Worker, Option<Worker>)> {
        let mut first = Worker::start(&self.launcher, &self.setup)?;
        let Reply::Ready(first_address) = first.hear()? else { bail!("not ready") };
        if self.what == What::Memory {
            return Ok((first, None));
        }
        let setup = Setup {
            first: false,
            cpu: self.setup.other_cpu,
            other_cpu: self.setup.cpu,
            ..self.setup.clone()
        };
        let mut second = Worker::start(&self.launcher, &setup)?;
        let Reply::Ready(second_address) = second.hear()? else { bail!("not ready") };
        second.tell(&Command::Connect(first_address))?;
        first.tell(&Command::Connect(second_address))?;
        first.hear()?;
        second.hear()?;
        Ok((first, Some(second)))
    }

    fn slice(&mut self, slice: Slice) -> Result<Sample> {
        let (first, second) = self.workers()?;
        let command = Command::Run(slice);
        if let Some(second) = second {
            second.tell(&command)?;
            second.hear()?;
        }
        first.tell(&command)?;
        first.hear()?;
        let (ns, mut cpu_ns, mut also) = done(first.hear()?)?;
        if let Some(second) = second {
            cpu_ns += done(second.hear()?)?.1;
        }
        let legs = legs(self.what, slice.test);
        if matches!((slice.test.kind, slice.test.op), (Kind::Latency | Kind::Wake, Op::Send)) {
            let us = cpu_ns as f64 / 1e3 / ((slice.warmup + slice.count) * legs) as f64;
            also.push((CPU.to_owned(), us));
        }
        Ok(Sample { size: slice.size, ns: ns as f64 / (slice.count * legs) as f64, also })
    }

    /// Drops workers that failed: the next slice starts new ones.
    fn guarded<T>(&mut self, work: impl FnOnce(&mut Self) -> Result<T>) -> Result<T> {
        let outcome = work(self);
        if outcome.is_err() {
            self.workers = None;
        }
        outcome
    }

    /// What a message costs the two programs.
    pub(crate) fn overhead(&mut self, size: u64, burst: u64, rounds: u64) -> Result<Overhead> {
        self.guarded(|pair| {
            let (first, second) = pair.workers()?;
            let second = second.as_mut().context("there is no second end")?;
            let command = Command::Overhead { size, burst, rounds };
            second.tell(&command)?;
            second.hear()?;
            first.tell(&command)?;
            first.hear()?;
            let Reply::Overhead(sent) = first.hear()? else { bail!("no overhead") };
            let Reply::Overhead(got) = second.hear()? else { bail!("no overhead") };
            Ok(Overhead { post_recv: got.post_recv, poll_recv: got.poll_recv, ..*sent })
        })
    }

    /// What idle queue pairs of one process cost.
    pub(crate) fn self_footprint(&mut self, count: u64) -> Result<Footprint> {
        self.guarded(|pair| {
            let (first, _) = pair.workers()?;
            first.tell(&Command::SelfFootprint(count))?;
            let Reply::Footprint(footprint) = first.hear()? else { bail!("no footprint") };
            Ok(footprint)
        })
    }

    /// What idle queue pairs between two processes cost each of them.
    pub(crate) fn idle_footprint(&mut self, count: u64) -> Result<Footprint> {
        self.guarded(|pair| {
            let (first, second) = pair.workers()?;
            let second = second.as_mut().context("there is no second end")?;
            first.tell(&Command::CreateIdle(count))?;
            second.tell(&Command::CreateIdle(count))?;
            let Reply::Ready(first_list) = first.hear()? else { bail!("no queue pairs") };
            let Reply::Ready(second_list) = second.hear()? else { bail!("no queue pairs") };
            first.tell(&Command::ConnectIdle(second_list))?;
            second.tell(&Command::ConnectIdle(first_list))?;
            let Reply::Footprint(footprint) = first.hear()? else { bail!("no footprint") };
            second.hear()?;
            Ok(footprint)
        })
    }
}

/// What a sample of messages one at a time says of both ends' processors.
pub(crate) const CPU: &str = "CPU us a message";

/// The time of a slice, the processor time of the end that answers, and what else it found out.
fn done(reply: Reply) -> Result<(u64, u64, Also)> {
    match reply {
        Reply::Done { ns, cpu_ns, also } => Ok((ns, cpu_ns, also)),
        _ => bail!("an answer to another question"),
    }
}

/// How many messages one of a slice stands for: in a ping-pong each is answered by another one.
fn legs(what: What, test: Test) -> u64 {
    let answered =
        matches!((test.kind, test.op), (Kind::Wake, _) | (Kind::Latency, Op::Send | Op::Write));
    if answered && what != What::KernelCopy { 2 } else { 1 }
}

impl Contender for Pair {
    fn name(&self) -> &str {
        &self.name
    }

    fn path(&self) -> Path {
        self.path
    }

    fn role(&self) -> Role {
        self.role
    }

    fn sizes(&self, test: Test, sizes: &[u64]) -> Vec<u64> {
        let single = matches!(test.kind, Kind::Latency | Kind::Stream | Kind::Wake);
        let takes_part = match self.what {
            What::Crowd(_) => test.kind == Kind::Crowd,
            What::Socket => test.kind == Kind::Connect || (test.op == Op::Send && single),
            What::Quipu(Path::Udp) | What::UdpSocket => test.op == Op::Send && single,
            What::QuipuShared => test.kind != Kind::Wake && test.op != Op::Copy && single,
            What::Quipu(_) => test.op != Op::Copy && single,
            What::QuipuCrc => test.kind == Kind::Stream && matches!(test.op, Op::Send | Op::Write),
            What::Memory => matches!(
                (test.kind, test.op),
                (Kind::Latency, Op::Write) | (Kind::Stream, Op::Copy)
            ),
            What::KernelCopy => {
                test.kind != Kind::Wake && single && matches!(test.op, Op::Write | Op::Read)
            }
        };
        let most = match (self.what, test.kind) {
            // A cache line goes back and forth.
            (What::Memory, Kind::Latency) => 64,
            (What::Crowd(_), _) => MAX_CROWD_SIZE,
            _ if self.path == Path::Udp => 4096,
            _ => u64::MAX,
        };
        // CRCs cost by the byte; a few points show how much.
        let least = if self.what == What::QuipuCrc { 65536 } else { 0 };
        let most = if self.what == What::QuipuCrc { 1 << 20 } else { most };
        let legal = |size: &&u64| takes_part && (least..=most).contains(*size);
        sizes.iter().filter(legal).copied().collect()
    }

    fn run(&mut self, round: &Round, test: Test, sizes: &[u64]) -> Result<Vec<Sample>> {
        self.guarded(|pair| {
            let mut samples = Vec::new();
            // Each of many needs some messages, or nothing could be said of their shares.
            let least =
                if test.kind == Kind::Crowd { pair.setup.crowd * CROWD_MESSAGES } else { 1 };
            for &size in sizes {
                if test.kind == Kind::Connect {
                    samples.push(pair.slice(Slice { test, size, warmup: 0, count: size })?);
                    continue;
                }
                let pace = pair.paces.entry(test).or_insert_with(|| Pace::new(test));
                if !pace.knows(size) {
                    // A first look, to know how many messages make a slice.
                    let count = (pace.count(size, round.slice_ns) / 8).max(2);
                    let ns = pair.slice(Slice { test, size, warmup: count / 2, count })?.ns;
                    pair.paces.entry(test).or_insert_with(|| Pace::new(test)).learn(size, ns);
                }
                let pace = pair.paces.entry(test).or_insert_with(|| Pace::new(test));
                let count = pace.count(size, round.slice_ns).max(least);
                let warmup = (count / 10).max(1);
                let sample = pair.slice(Slice { test, size, warmup, count })?;
                pair.paces.entry(test).or_insert_with(|| Pace::new(test)).learn(size, sample.ns);
                samples.push(sample);
            }
            Ok(samples)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn half_a_round_trip_is_one_of_two_messages() {
        let ping_pong = Test { kind: Kind::Latency, op: Op::Write };
        assert_eq!(legs(What::Quipu(Path::Tcp), ping_pong), 2);
        assert_eq!(legs(What::Socket, Test { kind: Kind::Wake, op: Op::Send }), 2);
        assert_eq!(legs(What::KernelCopy, ping_pong), 1);
        assert_eq!(legs(What::Quipu(Path::Tcp), Test { kind: Kind::Latency, op: Op::Read }), 1);
        assert_eq!(legs(What::Socket, Test { kind: Kind::Stream, op: Op::Send }), 1);
    }
}
