//! A worker: the process that measures. Two of them, pinned to two processors, are the ends of a
//! connection; the command that started them tells them over their standard input what to do, line
//! by line, and reads the answers from their standard output.

mod crowd;
mod datagrams;
mod floors;
mod footprint;
mod overhead;
mod quipu;
mod quipu_slices;
mod socket;
mod udp;

use std::io::{BufRead, Write};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use serde::{Deserialize, Serialize};

pub(crate) use crowd::{FASTEST, MAX_SIZE as MAX_CROWD_SIZE, MESSAGES as CROWD_MESSAGES, SLOWEST};

use crate::model::{Also, Footprint, Overhead, Path, Test};
use crate::sys;

/// What a worker is to be; the first line it reads.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Setup {
    /// What it measures.
    pub(crate) what: What,
    /// Which end it is: the first measures, the second answers.
    pub(crate) first: bool,
    /// The processor to run on.
    pub(crate) cpu: usize,
    /// The processor of the other end.
    pub(crate) other_cpu: usize,
    /// The largest message.
    pub(crate) max_size: u64,
    /// Messages in flight in a stream.
    pub(crate) depth: u32,
    /// One send in so many is signalled in a stream.
    pub(crate) signal_every: u32,
    /// Connections of a crowd.
    pub(crate) crowd: u64,
}

/// What a worker measures.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum What {
    /// Quipu, between these ends.
    Quipu(Path),
    /// The same on one host, where both ends let the other map their memory.
    QuipuShared,
    /// The same by TCP, with the CRCs that streams have between hosts.
    QuipuCrc,
    /// Many queue pairs of Quipu, all with work.
    Crowd(Path),
    /// A plain TCP socket.
    Socket,
    /// A plain UDP socket.
    UdpSocket,
    /// Memory: copies, and a cache line that goes back and forth. Needs no second end.
    Memory,
    /// Copies by the kernel from process to process (`process_vm_writev`), one after the other.
    KernelCopy,
}

/// What a worker is told.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) enum Command {
    /// Connect to the other end, which is there.
    Connect(String),
    /// Run a slice.
    Run(Slice),
    /// Measure what messages cost the program.
    Overhead {
        /// Bytes of a message.
        size: u64,
        /// Messages in a burst.
        burst: u64,
        /// Bursts.
        rounds: u64,
    },
    /// Create idle queue pairs, within one process, and see that they work.
    SelfFootprint(u64),
    /// Create idle queue pairs; answers with their addresses.
    CreateIdle(u64),
    /// Connect them to those of the other end.
    ConnectIdle(String),
}

/// A slice of a test: both ends get the same.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub(crate) struct Slice {
    /// What is measured.
    pub(crate) test: Test,
    /// Bytes of a message.
    pub(crate) size: u64,
    /// Messages that are not timed, before.
    pub(crate) warmup: u64,
    /// Messages that are.
    pub(crate) count: u64,
}

/// What a worker answers.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) enum Reply {
    /// It is set up, and this is where.
    Ready(String),
    /// It is connected, or ready for a slice: the other end may start.
    Armed,
    /// The slice took so long.
    Done {
        /// Nanoseconds for all timed messages.
        ns: u64,
        /// Processor time of this end, in nanoseconds, from the start of the slice to its end.
        cpu_ns: u64,
        /// What else this end found out.
        also: Also,
    },
    /// The cost of messages, as far as this end sees it.
    Overhead(Box<Overhead>),
    /// Idle queue pairs.
    Footprint(Footprint),
    /// It failed.
    Failed(String),
}

/// One end of a connection that can be measured.
trait End {
    /// Where the other end finds it.
    fn address(&self) -> String;
    /// Connects to the other end.
    fn connect(&mut self, address: &str) -> Result<()>;
    /// Runs a slice. `armed` is to be called when the other end may start; only after that may
    /// this one wait for it.
    fn run(&mut self, slice: &Slice, armed: &mut dyn FnMut() -> Result<()>) -> Result<Duration>;
    /// What else the last slice showed.
    fn also(&self) -> Also {
        Vec::new()
    }
    /// Measures what a message costs.
    fn overhead(
        &mut self,
        _: (u64, u64, u64),
        _armed: &mut dyn FnMut() -> Result<()>,
    ) -> Result<Overhead> {
        bail!("only Quipu's overhead is measured")
    }
}

/// A slice that takes longer has got stuck.
const PATIENCE: Duration = Duration::from_secs(20);

/// Gives up waiting after a while; looks at the clock seldom.
struct Patience {
    end: Instant,
    looks: u32,
}

impl Patience {
    fn new() -> Self {
        Self { end: Instant::now() + PATIENCE, looks: 0 }
    }

    /// To be called whenever there was nothing.
    #[inline]
    fn check(&mut self) -> Result<()> {
        self.looks = self.looks.wrapping_add(1);
        if self.looks.is_multiple_of(1 << 16) && Instant::now() > self.end {
            bail!("the other end does not answer");
        }
        Ok(())
    }
}

/// Runs a worker until its standard input ends.
///
/// # Errors
///
/// The command that started it is gone or talks nonsense. What fails in a measurement is answered.
pub(crate) fn main() -> Result<()> {
    let mut lines = std::io::stdin().lock().lines();
    let first = lines.next().context("a worker is started by `quipu bench`, not by hand")??;
    let setup: Setup = serde_json::from_str(&first).context("a worker's set-up")?;
    let mut end = match sys::pin(setup.cpu).context("pinning").and_then(|()| build(&setup)) {
        Ok(end) => end,
        Err(error) => return reply(&Reply::Failed(format!("{error:#}"))),
    };
    reply(&Reply::Ready(end.address()))?;
    let mut idle = footprint::Idle::default();
    for line in lines {
        let command: Command = serde_json::from_str(&line?).context("a worker's command")?;
        let answer = obey(&setup, end.as_mut(), &mut idle, command);
        let end = if setup.first { "first" } else { "second" };
        let failed = |error| Reply::Failed(format!("the {end} end: {error:#}"));
        reply(&answer.unwrap_or_else(failed))?;
    }
    Ok(())
}

fn build(setup: &Setup) -> Result<Box<dyn End>> {
    Ok(match setup.what {
        What::Quipu(path) => Box::new(quipu::Node::new(setup, path)?),
        What::QuipuShared => Box::new(quipu::Node::new(setup, Path::SameHost)?),
        What::QuipuCrc => Box::new(quipu::Node::new(setup, Path::Tcp)?),
        What::Crowd(path) => Box::new(crowd::Crowd::new(setup, path)?),
        What::Socket => Box::new(socket::SocketEnd::new(setup)?),
        What::UdpSocket => Box::new(udp::UdpEnd::new(setup)?),
        What::Memory => Box::new(floors::Memory::new(setup)),
        What::KernelCopy => Box::new(floors::KernelCopy::new(setup)),
    })
}

fn obey(
    setup: &Setup,
    end: &mut dyn End,
    idle: &mut footprint::Idle,
    command: Command,
) -> Result<Reply> {
    let mut armed = || reply(&Reply::Armed);
    Ok(match command {
        Command::Connect(address) => {
            end.connect(&address)?;
            Reply::Armed
        }
        Command::Run(slice) => {
            let before = sys::cpu_time()?;
            let took = end.run(&slice, &mut armed)?;
            let cpu = sys::cpu_time()?.saturating_sub(before);
            let (ns, cpu_ns) = (u64::try_from(took.as_nanos())?, u64::try_from(cpu.as_nanos())?);
            Reply::Done { ns, cpu_ns, also: end.also() }
        }
        Command::Overhead { size, burst, rounds } => {
            Reply::Overhead(Box::new(end.overhead((size, burst, rounds), &mut armed)?))
        }
        Command::SelfFootprint(count) => Reply::Footprint(footprint::within_process(count)),
        Command::CreateIdle(count) => Reply::Ready(idle.create(setup, count)?),
        Command::ConnectIdle(peers) => Reply::Footprint(idle.connect(setup, &peers)?),
    })
}

fn reply(reply: &Reply) -> Result<()> {
    let mut out = std::io::stdout().lock();
    serde_json::to_writer(&mut out, reply)?;
    out.write_all(b"\n")?;
    Ok(out.flush()?)
}
