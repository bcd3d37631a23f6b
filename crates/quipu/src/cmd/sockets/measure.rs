//! `quipu sockets --measure`: what `libiwsock` costs a program that does not use it, iWARP on a socket next
//! to plain TCP, and iWARP inside of the adapter's own TCP next to that alone. Each way is two processes; the
//! ways take turns.

use std::io::{self, BufRead, BufReader, Lines, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::path::Path;
use std::process::{Child, ChildStdin, ChildStdout, Command, ExitCode, Stdio};
use std::time::{Duration, Instant};

use quipu_host::{Device, IwarpMode, switch_to_iwarp};
use serde_json::{Value, json};

use super::super::failure::Failure;
use super::super::libraries;
use super::stack::Stack;

/// Message sizes in bytes.
const SIZES: [usize; 6] = [1, 64, 1024, 4096, 16_384, 65_536];
/// Messages that are sent before the receiver answers.
const WINDOW: usize = 64;

/// Octets of a message that one end may ask the other for.
const MAX_SIZE: usize = 16 << 20;

/// A way to carry messages.
struct Way {
    name: &'static str,
    preloads: bool,
    mode: Option<IwarpMode>,
    /// By the adapter's own TCP, and no socket.
    stack: Option<Device>,
}

impl Way {
    const fn new(name: &'static str, preloads: bool, mode: Option<IwarpMode>) -> Self {
        Self { name, preloads, mode, stack: None }
    }

    const fn of_stack(name: &'static str, device: Device) -> Self {
        Self { name, preloads: false, mode: None, stack: Some(device) }
    }
}

const fn mode(gather: u8, by_thread: bool, crc: bool) -> Option<IwarpMode> {
    Some(IwarpMode { gather, by_thread, crc, is_initiator: false })
}

const WAYS: [Way; 9] = [
    Way::new("tcp", false, None),
    Way::new("library", true, None),
    Way::new("copy", true, mode(0, false, true)),
    Way::new("writev", true, mode(1, false, true)),
    Way::new("cork", true, mode(2, false, true)),
    Way::new("copy-no-crc", true, mode(0, false, false)),
    Way::new("copy-thread", true, mode(0, true, true)),
    Way::of_stack("stack-tcp", Device::QuipuQp0),
    Way::of_stack("stack-iwarp", Device::QuipuIw0),
];

fn failed(error: impl std::fmt::Display) -> Failure {
    Failure::new("cannot measure sockets", error, "Is libiwsock.so near the command?")
}

/// For how long all ways together are measured, and how long each value of a turn takes. Turns are short, so
/// that each way meets the same load of the machine, and has moments without any.
const BUDGET: [Duration; 2] = [Duration::from_secs(5), Duration::from_secs(45)];
const SLICE: Duration = Duration::from_millis(10);
/// Turns of each way at least, on a busy machine.
const MIN_ROUNDS: usize = 3;
/// Messages or windows of a turn at most.
const MAX_COUNT: usize = 1 << 20;
/// Lines of progress.
const STEPS: u32 = 10;

/// A way that is being measured.
struct Contender {
    way: &'static Way,
    process: Peer,
    orders: ChildStdin,
    answers: Lines<BufReader<ChildStdout>>,
    latency: [f64; SIZES.len()],
    bandwidth: [f64; SIZES.len()],
}

impl Contender {
    fn start(own: &Path, library: &Path, way: &'static Way) -> Result<Self, Failure> {
        let mut command = Command::new(own);
        command.args(["sockets", "--measure-end", way.name]).env_remove("LD_PRELOAD");
        if way.preloads {
            command.env("LD_PRELOAD", library);
        }
        command.stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut process = Peer(command.spawn().map_err(failed)?);
        let pipes = process.0.stdin.take().zip(process.0.stdout.take());
        let (orders, answers) = pipes.ok_or_else(|| failed("there is no pipe"))?;
        let answers = BufReader::new(answers).lines();
        let (latency, bandwidth) = ([f64::INFINITY; SIZES.len()], [0.0; SIZES.len()]);
        Ok(Self { way, process, orders, answers, latency, bandwidth })
    }

    /// Takes one turn, and keeps the best values: other programs only make them worse.
    fn turn(&mut self) -> Result<(), Failure> {
        let ended = |_| failed(format_args!("{} has ended", self.way.name));
        self.orders.write_all(b"turn\n").map_err(ended)?;
        let mut number = || -> Result<f64, Failure> {
            let line = self.answers.next().unwrap_or_else(|| Err(io::ErrorKind::BrokenPipe.into()));
            line.map_err(ended)?.parse().map_err(failed)
        };
        for (latency, bandwidth) in self.latency.iter_mut().zip(&mut self.bandwidth) {
            *latency = latency.min(number()?);
            *bandwidth = bandwidth.max(number()?);
        }
        Ok(())
    }

    /// Ends it.
    fn end(self) -> Result<Value, Failure> {
        let Self { way, mut process, orders, latency, bandwidth, .. } = self;
        drop(orders);
        let status = process.0.wait().map_err(failed)?;
        if !status.success() {
            return Err(failed(format_args!("{} failed ({status})", way.name)));
        }
        Ok(json!({ "name": way.name, "latency_us": latency, "bandwidth_mbps": bandwidth }))
    }
}

/// Measures all ways, which take turns, and prints the best value of each as JSON.
pub(super) fn run(quick: bool) -> Result<ExitCode, Failure> {
    let library = libraries::find_one(libraries::IWSOCK)?;
    let own = std::env::current_exe().map_err(failed)?;
    let start = |way| Contender::start(&own, &library, way);
    let mut contenders = WAYS.iter().map(start).collect::<Result<Vec<_>, _>>()?;
    let (begin, budget) = (Instant::now(), BUDGET[usize::from(!quick)]);
    let (mut rounds, mut steps) = (0, 0);
    while rounds < MIN_ROUNDS || begin.elapsed() < budget {
        contenders.iter_mut().try_for_each(Contender::turn)?;
        rounds += 1;
        let done = begin.elapsed().as_secs_f64() / budget.as_secs_f64();
        if done * f64::from(STEPS) >= f64::from(steps + 1) {
            steps = (done * f64::from(STEPS)) as u32;
            let percent = (done * 100.0).min(100.0);
            eprintln!("{percent:.0} % of {} s, {rounds} rounds", budget.as_secs());
        }
    }
    let ways = contenders.into_iter().map(Contender::end).collect::<Result<Vec<_>, _>>()?;
    let result = json!({ "sizes": SIZES, "window": WINDOW, "rounds": rounds, "ways": ways });
    println!("{result:#}");
    Ok(ExitCode::SUCCESS)
}

/// Kills the other process if this one fails.
struct Peer(Child);

impl Drop for Peer {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// One process of a way. `WAY` measures once for each line of its input, and starts the other process, which
/// is `WAY:ADDRESS`. Prints, for each size, the one-way latency in microseconds and the bandwidth in Mbit/s.
pub(super) fn end(text: &str) -> Result<ExitCode, Failure> {
    let (name, to) = text.split_once(':').map_or((text, None), |(name, to)| (name, Some(to)));
    let way = WAYS.iter().find(|way| way.name == name).ok_or_else(|| failed("no such way"))?;
    match to {
        None => listen(way).map_err(failed)?,
        Some(to) => connect(way, to).map_err(failed)?,
    }
    Ok(ExitCode::SUCCESS)
}

fn prepare(stream: &TcpStream, way: &Way, is_initiator: bool) -> io::Result<()> {
    stream.set_nodelay(true)?;
    match way.mode {
        Some(mode) => switch_to_iwarp(stream, IwarpMode { is_initiator, ..mode }),
        None => Ok(()),
    }
}

/// Starts the other process, which connects to this address and says so.
fn start(way: &Way, address: SocketAddr) -> io::Result<Peer> {
    let name = format!("{}:{address}", way.name);
    let mut command = Command::new(std::env::current_exe()?);
    command.args(["sockets", "--measure-end", &name]).stdin(Stdio::null()).stdout(Stdio::piped());
    command.spawn().map(Peer)
}

fn listen(way: &Way) -> io::Result<()> {
    if let Some(device) = way.stack {
        let mut stack = Stack::new(device)?;
        let _peer = start(way, stack.listen()?)?;
        stack.accept()?;
        return take_turns(&mut stack);
    }
    let listener = TcpListener::bind("127.0.0.1:0")?;
    let mut peer = start(way, listener.local_addr()?)?;
    let mut ready = String::new();
    let output = peer.0.stdout.take().ok_or(io::ErrorKind::BrokenPipe)?;
    BufReader::new(output).read_line(&mut ready)?;
    let (mut stream, _) = listener.accept()?;
    prepare(&stream, way, false)?;
    take_turns(&mut stream)
}

fn connect(way: &Way, to: &str) -> io::Result<()> {
    let to: SocketAddr = to.parse().map_err(|_| io::ErrorKind::InvalidInput)?;
    if let Some(device) = way.stack {
        let mut stack = Stack::new(device)?;
        stack.connect(to)?;
        return answer(&mut stack);
    }
    let mut stream = TcpStream::connect(to)?;
    println!("connected");
    prepare(&stream, way, true)?;
    answer(&mut stream)
}

/// Takes a turn for each line of the input.
fn take_turns(stream: &mut (impl Read + Write)) -> io::Result<()> {
    let mut counts = [[2; 2]; SIZES.len()];
    for line in io::stdin().lines() {
        line?;
        ask(stream, &mut counts)?;
    }
    order(stream, 0, 0, 0)
}

/// Measures all sizes. `counts` are those of the turn before, and of the next one.
fn ask(stream: &mut (impl Read + Write), counts: &mut [[usize; 2]; SIZES.len()]) -> io::Result<()> {
    let mut buffer = vec![7; SIZES[SIZES.len() - 1]];
    for (size, [trips, windows]) in SIZES.into_iter().zip(counts) {
        let mut turn = |count: usize| -> io::Result<Duration> {
            order(stream, size, count, 1)?;
            let begin = Instant::now();
            for _ in 0..count {
                stream.write_all(&buffer[..size])?;
                stream.read_exact(&mut buffer[..size])?;
            }
            Ok(begin.elapsed())
        };
        let each = calibrated(trips, &mut turn)?;
        println!("{}", each * 1e6 / 2.0);
        let mut turn = |count: usize| -> io::Result<Duration> {
            order(stream, size, count, WINDOW)?;
            let begin = Instant::now();
            for _ in 0..count {
                for _ in 0..WINDOW {
                    stream.write_all(&buffer[..size])?;
                }
                stream.read_exact(&mut buffer[..1])?;
            }
            Ok(begin.elapsed())
        };
        let each = calibrated(windows, &mut turn)?;
        println!("{}", (WINDOW * size * 8) as f64 / each / 1e6);
    }
    Ok(())
}

/// Repeats a turn with growing counts until it takes the time that it is to take. The time of one of the
/// count, in seconds; and the count for the next time.
pub(super) fn calibrated(
    count: &mut usize,
    turn: &mut dyn FnMut(usize) -> io::Result<Duration>,
) -> io::Result<f64> {
    loop {
        let used = *count;
        let time = turn(used)?;
        let factor = SLICE.as_secs_f64() / time.as_secs_f64().max(1e-6);
        *count = ((used as f64 * factor.clamp(0.5, 16.0)) as usize).clamp(2, MAX_COUNT);
        if time >= SLICE / 2 || used >= MAX_COUNT {
            return Ok(time.as_secs_f64() / used as f64);
        }
        *count = (*count).max(used + 1);
    }
}

/// Tells the other process what comes: so many turns of so many messages of a size. Sizes of 0 end it.
pub(super) fn order(
    stream: &mut impl Write,
    size: usize,
    count: usize,
    window: usize,
) -> io::Result<()> {
    let numbers = [size, count, window].map(|number| (number as u64).to_be_bytes());
    stream.write_all(&numbers.concat())
}

/// Does what the other process's orders say, until its end.
pub(super) fn answer(stream: &mut (impl Read + Write)) -> io::Result<()> {
    let mut buffer = vec![0; SIZES[SIZES.len() - 1]];
    loop {
        let mut numbers = [0; 24];
        stream.read_exact(&mut numbers)?;
        let number = |at: usize| -> usize {
            u64::from_be_bytes(numbers[at..at + 8].try_into().unwrap_or_default()) as usize
        };
        let (size, count, window) = (number(0), number(8), number(16));
        if size == 0 {
            return Ok(());
        }
        if size > MAX_SIZE {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        buffer.resize(buffer.len().max(size), 0);
        for _ in 0..count {
            for _ in 0..window {
                stream.read_exact(&mut buffer[..size])?;
            }
            let answered = if window == 1 { size } else { 1 };
            stream.write_all(&buffer[..answered])?;
        }
    }
}
