//! Measurements that this command makes itself: two processes with a connection, of which one asks and the
//! other answers.

use std::fs::File;
use std::io::{BufRead, BufReader, Lines, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::time::{Duration, Instant};

use quipu::{Access, Completion, CompletionQueue, Device, MemoryRegion, QueuePair, Request};

use super::super::measure::{answer, calibrated, order};
use super::Outcome;
use super::programs::Ground;

/// Octets of a stream that are sent before the receiver answers.
const WINDOW: usize = 4 << 20;
/// Calls between two readings of the clock, and how often.
const CALLS: u32 = 500;
const BATCHES: u32 = 100;
/// Receives that are posted.
const RECEIVES: u64 = 16;

/// What is carried, as one word on the command line.
pub(super) const SOCKET: &str = "socket";
pub(super) const QUEUE_PAIR: &str = "queue-pair";

/// A process that ends with its owner.
struct Process(Child);

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Two processes with a connection.
pub(super) struct Pair {
    orders: ChildStdin,
    answers: Lines<BufReader<ChildStdout>>,
    _ends: [Process; 2],
}

impl Pair {
    /// Starts both, on the hosts and processors of `ground`.
    ///
    /// # Errors
    ///
    /// A process does not begin.
    pub(super) fn start(ground: &Ground<'_>, with: bool, carrier: &str) -> Outcome<Self> {
        let own = ground.own;
        let begin = |end: usize, word: &str| -> Outcome<Process> {
            let line = [own, "sockets", "--bench-end", word];
            let mut command: Command = ground.command(end, with, &line);
            command.stdin(Stdio::piped()).stdout(Stdio::piped());
            Ok(Process(command.spawn()?))
        };
        let mut server = begin(0, &format!("{carrier}={}:0", ground.address))?;
        let output = server.0.stdout.take().ok_or("there is no pipe")?;
        let mut address = String::new();
        BufReader::new(output).read_line(&mut address)?;
        let mut client = begin(1, &format!("{carrier}:{}", address.trim()))?;
        let pipes = client.0.stdin.take().zip(client.0.stdout.take());
        let (orders, answers) = pipes.ok_or("there is no pipe")?;
        Ok(Self { orders, answers: BufReader::new(answers).lines(), _ends: [server, client] })
    }

    /// Has a measurement made: see [`serve`].
    ///
    /// # Errors
    ///
    /// A process has ended.
    pub(super) fn measure(&mut self, what: &str) -> Outcome<f64> {
        writeln!(self.orders, "{what}")?;
        let line = self.answers.next().ok_or("a process of the measurement has ended")??;
        Ok(line.parse()?)
    }
}

/// One process of a measurement. `CARRIER=ADDRESS` listens there, prints the address, and answers;
/// `CARRIER:ADDRESS` connects, and measures what lines of its input name.
///
/// # Errors
///
/// The connection fails.
pub(in super::super) fn serve(word: &str) -> Outcome {
    if let Some((carrier, address)) = word.split_once('=') {
        let listener = TcpListener::bind(address)?;
        println!("{}", listener.local_addr()?);
        let (mut stream, _) = listener.accept()?;
        stream.set_nodelay(true)?;
        if carrier == QUEUE_PAIR {
            return QueuePairEnd::meet(&mut stream)?.answer();
        }
        return Ok(answer(&mut stream)?);
    }
    let (carrier, address) = word.split_once(':').ok_or("no address")?;
    let mut stream = TcpStream::connect(address.parse::<SocketAddr>()?)?;
    stream.set_nodelay(true)?;
    let mut asker = Asker {
        queue_pair: match carrier == QUEUE_PAIR {
            true => Some(QueuePairEnd::meet(&mut stream)?),
            false => None,
        },
        stream,
        count: 2,
    };
    for line in std::io::stdin().lines() {
        println!("{}", asker.measure(&line?)?);
    }
    Ok(())
}

/// The end that measures.
struct Asker {
    stream: TcpStream,
    queue_pair: Option<QueuePairEnd>,
    /// How often the last measurement did what it measured.
    count: usize,
}

impl Asker {
    /// `trip N`: microseconds of a round trip of N octets. `stream N`: megabytes a second by writes of N.
    /// `call`: nanoseconds of a call that is not carried.
    fn measure(&mut self, what: &str) -> Outcome<f64> {
        let (name, size) = what.split_once(' ').unwrap_or((what, "1"));
        let size: usize = size.parse()?;
        match (name, &mut self.queue_pair) {
            ("call", _) => shortest_call(),
            ("trip", Some(queue_pair)) => queue_pair.round_trip(),
            ("trip", None) => self.round_trip(size),
            ("stream", None) => self.stream(size),
            _ => Err(format!("there is no measurement {what}").into()),
        }
    }

    fn round_trip(&mut self, size: usize) -> Outcome<f64> {
        let mut buffer = vec![7; size];
        let stream = &mut self.stream;
        let mut turn = |count: usize| -> std::io::Result<Duration> {
            order(stream, size, count, 1)?;
            let begun = Instant::now();
            for _ in 0..count {
                stream.write_all(&buffer)?;
                stream.read_exact(&mut buffer)?;
            }
            Ok(begun.elapsed())
        };
        Ok(calibrated(&mut self.count, &mut turn)? * 1e6)
    }

    fn stream(&mut self, size: usize) -> Outcome<f64> {
        let buffer = vec![7; size];
        let window = (WINDOW / size.max(1)).max(1);
        let stream = &mut self.stream;
        let mut turn = |count: usize| -> std::io::Result<Duration> {
            order(stream, size, count, window)?;
            let begun = Instant::now();
            for _ in 0..count {
                for _ in 0..window {
                    stream.write_all(&buffer)?;
                }
                stream.read_exact(&mut [0])?;
            }
            Ok(begun.elapsed())
        };
        let each = calibrated(&mut self.count, &mut turn)?;
        Ok((window * size) as f64 / each / 1e6)
    }
}

/// Nanoseconds of `read` of a file that has nothing: the library looks the descriptor up, and passes it on.
/// The shortest time counts, since other programs only lengthen it.
fn shortest_call() -> Outcome<f64> {
    let mut file = File::open("/dev/null")?;
    let mut shortest = Duration::MAX;
    for _ in 0..BATCHES {
        let begun = Instant::now();
        for _ in 0..CALLS {
            let _ = file.read(&mut [0])?;
        }
        shortest = shortest.min(begun.elapsed());
    }
    Ok(shortest.as_secs_f64() * 1e9 / f64::from(CALLS))
}

/// One end of a queue pair between two processes.
struct QueuePairEnd {
    qp: QueuePair,
    cq: CompletionQueue,
    memory: MemoryRegion,
    done: [Completion; 16],
}

/// Messages of one turn, the same at both ends.
const MESSAGES: u32 = 2000;

impl QueuePairEnd {
    fn meet(stream: &mut TcpStream) -> Outcome<Self> {
        let device = Device::from_env()?;
        let domain = device.protection_domain()?;
        let cq = device.completion_queue(64)?;
        let qp = domain.queue_pair(&cq, &cq).inline_data(16).build()?;
        let memory = domain.register(RECEIVES as usize * 64, Access::LOCAL_WRITE)?;
        for slot in 0..RECEIVES {
            qp.post_recv(slot, &[memory.sge(slot as usize * 64, 64)?])?;
        }
        let theirs = qp.endpoint().exchange(stream)?;
        qp.connect(&theirs)?;
        // Both are connected before either sends.
        stream.write_all(&[1])?;
        stream.read_exact(&mut [0])?;
        Ok(Self { qp, cq, memory, done: Default::default() })
    }

    fn send(&self) -> Outcome {
        Ok(self.qp.post_send(&Request::send_inline(&[7]).unsignaled())?)
    }

    /// Waits for one message, without sleep.
    fn receive(&mut self) -> Outcome {
        loop {
            let found = self.cq.poll(&mut self.done[..1])?;
            if found > 0 {
                let slot = self.done[0].wr_id;
                let sge = self.memory.sge(slot as usize * 64, 64)?;
                return Ok(self.qp.post_recv(slot, &[sge])?);
            }
        }
    }

    /// Microseconds of a round trip of one octet.
    fn round_trip(&mut self) -> Outcome<f64> {
        let begun = Instant::now();
        for _ in 0..MESSAGES {
            self.send()?;
            self.receive()?;
        }
        Ok(begun.elapsed().as_secs_f64() * 1e6 / f64::from(MESSAGES))
    }

    /// Answers until the other process is gone; this one is killed then, at the latest.
    fn answer(mut self) -> Outcome {
        loop {
            self.receive()?;
            self.send()?;
        }
    }
}
