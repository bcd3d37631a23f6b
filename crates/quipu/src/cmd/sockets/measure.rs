//! `quipu sockets --measure`: what `libiwsock` costs a program that does not use it, iWARP on a socket next
//! to plain TCP, and iWARP inside of the adapter's own TCP next to that alone. Each turn is two new
//! processes; the ways take turns.

use std::io::{self, BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::process::{Child, Command, ExitCode, Stdio};
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

/// Measures all ways, and prints the best value of each as JSON: other programs only make it worse.
pub(super) fn run(quick: bool) -> Result<ExitCode, Failure> {
    let (rounds, slice) =
        if quick { (3, Duration::from_millis(15)) } else { (9, Duration::from_millis(100)) };
    let library = libraries::find_one(libraries::IWSOCK)?;
    let own = std::env::current_exe().map_err(failed)?;
    let mut samples: Vec<Vec<[Vec<f64>; 2]>> =
        WAYS.iter().map(|_| SIZES.iter().map(|_| Default::default()).collect()).collect();
    for _ in 0..rounds {
        for (way, samples) in WAYS.iter().zip(&mut samples) {
            let mut command = Command::new(&own);
            let end = format!("{}:{}", way.name, slice.as_millis());
            command.args(["sockets", "--measure-end", &end]).env_remove("LD_PRELOAD");
            if way.preloads {
                command.env("LD_PRELOAD", &library);
            }
            let output = command.stdin(Stdio::null()).stderr(Stdio::inherit()).output();
            let output = output.map_err(failed)?;
            let text = String::from_utf8_lossy(&output.stdout);
            let numbers: Vec<f64> = text.lines().filter_map(|line| line.parse().ok()).collect();
            if !output.status.success() || numbers.len() != 2 * SIZES.len() {
                return Err(failed(format_args!("{} failed ({})", way.name, output.status)));
            }
            for (sample, pair) in samples.iter_mut().zip(numbers.chunks_exact(2)) {
                sample.iter_mut().zip(pair).for_each(|(list, number)| list.push(*number));
            }
        }
    }
    let ways: Vec<Value> =
        WAYS.iter().zip(samples).map(|(way, samples)| row(way, samples)).collect();
    let result = json!({ "sizes": SIZES, "window": WINDOW, "rounds": rounds, "ways": ways });
    println!("{result:#}");
    Ok(ExitCode::SUCCESS)
}

fn row(way: &Way, samples: Vec<[Vec<f64>; 2]>) -> Value {
    let (mut latency, mut bandwidth) = (Vec::new(), Vec::new());
    for [times, speeds] in samples {
        latency.push(times.into_iter().fold(f64::INFINITY, f64::min));
        bandwidth.push(speeds.into_iter().fold(0.0, f64::max));
    }
    json!({ "name": way.name, "latency_us": latency, "bandwidth_mbps": bandwidth })
}

/// Kills the other process if this one fails.
struct Peer(Child);

impl Drop for Peer {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// One process of a turn. `WAY:MS` measures, so many milliseconds for each value, and starts the other one,
/// which is `WAY:0:ADDRESS`. Prints, for each size, the one-way latency in microseconds and the bandwidth in
/// Mbit/s.
pub(super) fn end(text: &str) -> Result<ExitCode, Failure> {
    let words: Vec<&str> = text.splitn(3, ':').collect();
    let way = |name| WAYS.iter().find(|way| way.name == name).ok_or_else(|| failed("no such way"));
    match words[..] {
        [name, slice] => {
            let slice = Duration::from_millis(slice.parse().map_err(failed)?);
            listen(way(name)?, slice).map_err(failed)?;
        }
        [name, _, to] => connect(way(name)?, to).map_err(failed)?,
        _ => return Err(failed("WAY:MS or WAY:0:ADDRESS")),
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
    let name = format!("{}:0:{address}", way.name);
    let mut command = Command::new(std::env::current_exe()?);
    command.args(["sockets", "--measure-end", &name]).stdin(Stdio::null()).stdout(Stdio::piped());
    command.spawn().map(Peer)
}

fn listen(way: &Way, slice: Duration) -> io::Result<()> {
    if let Some(device) = way.stack {
        let mut stack = Stack::new(device)?;
        let _peer = start(way, stack.listen()?)?;
        stack.accept()?;
        return ask(&mut stack, slice);
    }
    let listener = TcpListener::bind("127.0.0.1:0")?;
    let mut peer = start(way, listener.local_addr()?)?;
    let mut ready = String::new();
    let output = peer.0.stdout.take().ok_or(io::ErrorKind::BrokenPipe)?;
    BufReader::new(output).read_line(&mut ready)?;
    let (mut stream, _) = listener.accept()?;
    prepare(&stream, way, false)?;
    ask(&mut stream, slice)
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

fn ask(stream: &mut (impl Read + Write), slice: Duration) -> io::Result<()> {
    let mut buffer = vec![7; SIZES[SIZES.len() - 1]];
    for size in SIZES {
        let mut turn = |count: usize| -> io::Result<Duration> {
            order(stream, size, count, 1)?;
            let begin = Instant::now();
            for _ in 0..count {
                stream.write_all(&buffer[..size])?;
                stream.read_exact(&mut buffer[..size])?;
            }
            Ok(begin.elapsed())
        };
        let (count, time) = calibrated(slice, &mut turn)?;
        println!("{}", time.as_secs_f64() * 1e6 / count as f64 / 2.0);
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
        let (count, time) = calibrated(slice, &mut turn)?;
        println!("{}", (count * WINDOW * size * 8) as f64 / time.as_secs_f64() / 1e6);
    }
    order(stream, 0, 0, 0)
}

/// Repeats a turn with growing counts until it takes the time that it is to take.
fn calibrated(
    slice: Duration,
    turn: &mut dyn FnMut(usize) -> io::Result<Duration>,
) -> io::Result<(usize, Duration)> {
    let mut count = 2;
    loop {
        let time = turn(count)?;
        if time >= slice / 2 || count >= 1 << 20 {
            return Ok((count, time));
        }
        let factor = slice.as_secs_f64() / time.as_secs_f64().max(1e-6);
        count = ((count as f64 * factor.clamp(1.5, 16.0)) as usize).max(count + 1);
    }
}

/// Tells the other process what comes: so many turns of so many messages of a size. Sizes of 0 end it.
fn order(stream: &mut impl Write, size: usize, count: usize, window: usize) -> io::Result<()> {
    let numbers = [size, count, window].map(|number| (number as u64).to_be_bytes());
    stream.write_all(&numbers.concat())
}

fn answer(stream: &mut (impl Read + Write)) -> io::Result<()> {
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
        for _ in 0..count {
            for _ in 0..window {
                stream.read_exact(&mut buffer[..size])?;
            }
            let answered = if window == 1 { size } else { 1 };
            stream.write_all(&buffer[..answered])?;
        }
    }
}
