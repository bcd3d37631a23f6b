//! What Active Messages cost more than the queue pair below: two processes, which do the same by
//! both in turns.

use std::error::Error;
use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{self, Receiver};
use std::time::{Duration, Instant};

use quipu::am::{Bundle, CallError, Config, Endpoint, Mode, Name, Port, Tag, Transport};
use quipu::{Access, Completion, CompletionQueue, Device, MemoryRegion, QueuePair, Request};

pub(super) type Outcome<T = ()> = Result<T, Box<dyn Error>>;

const TAG: Tag = Tag(0x71_7569_7075);
/// Handlers of the peer, and of the one that measures.
const ECHO: u16 = 1;
const SINK: u16 = 2;
const BACK: u16 = 3;
/// Bytes of a short message: a head of 8 and two arguments.
const SHORT: usize = 16;
const RECEIVES: usize = 64;
/// Requests under way in a flood.
const FLOOD: u64 = 16;
const SEGMENT: usize = 4 << 20;
/// Receives for long sends, each of so many bytes.
const LONG_RECEIVES: usize = 2 * FLOOD as usize;
const LONG: usize = 1 << 20;

/// How much to measure.
#[derive(Clone, Copy, Debug)]
pub struct Extent {
    /// Turns of each.
    pub rounds: u32,
    /// Messages of a turn.
    pub messages: u32,
}

/// One value, of both.
#[derive(Clone, Debug)]
pub struct Line {
    /// What, and in which unit.
    pub what: &'static str,
    /// The queue pair's values, one for each turn; none where there is no such thing.
    pub raw: Vec<f64>,
    /// Those of Active Messages.
    pub am: Vec<f64>,
}

/// A quartile.
#[must_use]
pub fn quartile(values: &[f64], which: usize) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    sorted.get((sorted.len().max(1) - 1) * which / 4).copied().unwrap_or(f64::NAN)
}

/// Both kinds of ends of one process.
struct Side {
    qp: QueuePair,
    cq: CompletionQueue,
    /// For long sends.
    long_qp: QueuePair,
    long_cq: CompletionQueue,
    long_memory: MemoryRegion,
    memory: MemoryRegion,
    done: [Completion; 16],
    bundle: Bundle,
    endpoint: Endpoint,
    /// Messages that handlers have seen.
    seen: Arc<AtomicU64>,
}

impl Side {
    fn new() -> Outcome<Self> {
        let device = Device::from_env()?;
        let port = Port::open_over(&device, Config::default(), Transport::from_env()?)?;
        let bundle = port.bundle(Mode::Sequential);
        let endpoint = bundle.endpoint()?;
        endpoint.set_tag(TAG)?;
        let cq = device.completion_queue(1024)?;
        let qp = port.domain().queue_pair(&cq, &cq).inline_data(128).build()?;
        let long_cq = device.completion_queue(1024)?;
        let long_qp = port.domain().queue_pair(&long_cq, &long_cq).build()?;
        let long_memory = port.domain().register(LONG_RECEIVES * LONG, Access::LOCAL_WRITE)?;
        for slot in 0..LONG_RECEIVES {
            long_qp.post_recv(slot as u64, &[long_memory.sge(slot * LONG, LONG)?])?;
        }
        let access = Access::LOCAL_WRITE | Access::REMOTE_WRITE | Access::REMOTE_READ;
        let memory = port.domain().register(2 * SEGMENT, access)?;
        endpoint.set_segment(Some(memory.remote(0, SEGMENT)?))?;
        let seen = Arc::new(AtomicU64::new(0));
        for (index, replies) in [(ECHO, true), (SINK, false), (BACK, false)] {
            let seen = Arc::clone(&seen);
            endpoint.set_handler(index.into(), move |message| {
                seen.store(seen.load(Ordering::Relaxed) + 1, Ordering::Relaxed);
                if replies {
                    let args = [message.args()[0], message.args()[1]];
                    // The peer is gone if this fails, and the other process says so.
                    let _ = message.reply(BACK, &args);
                }
            })?;
        }
        endpoint.set_handler(0, |message| panic!("a message came back: {message:?}"))?;
        for slot in 0..RECEIVES {
            qp.post_recv(slot as u64, &[memory.sge(SEGMENT + slot * 64, 64)?])?;
        }
        let done = Default::default();
        Ok(Self { qp, cq, long_qp, long_cq, long_memory, memory, done, bundle, endpoint, seen })
    }

    /// What the other process has to know, as one line.
    fn introduction(&self) -> Outcome<String> {
        let name = self.endpoint.name()?.to_bytes();
        let hex = |bytes: &[u8]| bytes.iter().map(|byte| format!("{byte:02x}")).collect::<String>();
        let ends = [self.qp.endpoint(), self.long_qp.endpoint()].map(|end| end.to_string());
        Ok(format!("{} {}", hex(&name), ends.join(" ")))
    }

    fn meet(&self, line: &str) -> Outcome {
        let words: Vec<&str> = line.split_whitespace().collect();
        let [name, short, long] = words[..] else { return Err(line.to_owned().into()) };
        let name = Name::from_bytes(&bytes_of(name)?).ok_or("no name")?;
        self.endpoint.map(0, name, TAG)?;
        self.qp.connect(&short.parse()?)?;
        self.long_qp.connect(&long.parse()?)?;
        Ok(())
    }

    /// Takes so many long messages.
    fn receive_long(&mut self, count: u64) -> Outcome {
        let mut taken = 0;
        while taken < count {
            // What comes beyond is of the next task.
            let most = self.done.len().min((count - taken) as usize);
            let found = self.long_cq.poll(&mut self.done[..most])?;
            for done in &self.done[..found] {
                let sge = self.long_memory.sge(done.wr_id as usize * LONG, LONG)?;
                self.long_qp.post_recv(done.wr_id, &[sge])?;
            }
            taken += found as u64;
        }
        Ok(())
    }

    /// Takes the messages that have come over the queue pair, and makes room for others; how many.
    fn take(&mut self) -> Outcome<usize> {
        let found = self.cq.poll(&mut self.done)?;
        for done in &self.done[..found] {
            let slot = done.wr_id as usize;
            let sge = self.memory.sge(SEGMENT + slot * 64, 64)?;
            self.qp.post_recv(done.wr_id, &[sge])?;
        }
        Ok(found)
    }

    /// Waits for one message over the queue pair.
    fn receive(&mut self) -> Outcome {
        while self.take()? == 0 {}
        Ok(())
    }

    fn send(&self) -> Outcome {
        Ok(self.qp.post_send(&Request::send_inline(&[7; SHORT]).unsignaled())?)
    }

    /// Meets the other process so often: each tells the other, and waits to be told. When they have
    /// met once.
    fn barriers(&self, count: u64) -> Outcome<Instant> {
        let mut met = Instant::now();
        for round in 1..=count {
            self.endpoint.signal(0)?;
            self.endpoint.wait_signal(0)?;
            if round == 1 {
                met = Instant::now();
            }
        }
        Ok(met)
    }

    fn poll_until(&self, seen: u64) -> Outcome {
        while self.seen.load(Ordering::Relaxed) < seen {
            self.bundle.poll()?;
        }
        Ok(())
    }
}

fn bytes_of<const N: usize>(text: &str) -> Outcome<[u8; N]> {
    let digits = text.as_bytes().chunks(2).map(|pair| std::str::from_utf8(pair).ok());
    let read: Option<Vec<u8>> = digits.map(|pair| u8::from_str_radix(pair?, 16).ok()).collect();
    Ok(read.ok_or("no hexadecimal digits")?.try_into().map_err(|_| "another number of bytes")?)
}

/// The process that answers: does what lines of its input say.
///
/// # Errors
///
/// The adapter fails.
pub fn answer() -> Outcome {
    let mut side = Side::new()?;
    let lines = lines_of_the_meter();
    let next = || lines.recv().map_err(|_| "the other process is gone");
    println!("{}", side.introduction()?);
    side.meet(&next()?)?;
    loop {
        let line = next()?;
        let (task, count) = line.split_once(' ').unwrap_or((&line, "0"));
        let count: u64 = count.parse()?;
        match task {
            "raw" => {
                for _ in 0..count {
                    side.receive()?;
                    side.send()?;
                }
            }
            "long" => side.receive_long(count)?,
            "barrier" => {
                side.barriers(count)?;
            }
            "am" => {
                let until = side.seen.load(Ordering::Relaxed) + count;
                side.poll_until(until)?;
            }
            _ => return Ok(()),
        }
    }
}

/// The lines of this process's input, read by a thread. It ends this process at their end: the process that
/// measures is gone, and no message of it will come.
fn lines_of_the_meter() -> Receiver<String> {
    let (lines, taken) = mpsc::channel();
    std::thread::spawn(move || {
        for line in std::io::stdin().lines() {
            let Ok(line) = line else { break };
            let _ = lines.send(line);
        }
        std::process::exit(1);
    });
    taken
}

/// The process that measures.
pub(super) struct Meter {
    side: Side,
    child: Child,
    to_child: ChildStdin,
    _from_child: BufReader<ChildStdout>,
}

impl Drop for Meter {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Meter {
    pub(super) fn new(mut command: Command) -> Outcome<Self> {
        let side = Side::new()?;
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn()?;
        let mut to_child = child.stdin.take().ok_or("no pipe")?;
        let mut from_child = BufReader::new(child.stdout.take().ok_or("no pipe")?);
        let mut line = String::new();
        from_child.read_line(&mut line)?;
        side.meet(&line)?;
        writeln!(to_child, "{}", side.introduction()?)?;
        Ok(Self { side, child, to_child, _from_child: from_child })
    }

    fn order(&mut self, task: &str, count: u64) -> Outcome {
        writeln!(self.to_child, "{task} {count}")?;
        self.to_child.flush()?;
        Ok(())
    }

    /// Half a round trip over the queue pair, in nanoseconds.
    pub(super) fn raw_half(&mut self, messages: u32) -> Outcome<f64> {
        self.order("raw", messages.into())?;
        self.side.send()?;
        self.side.receive()?;
        let began = Instant::now();
        for _ in 1..messages {
            self.side.send()?;
            self.side.receive()?;
        }
        Ok(nanoseconds(began) / f64::from(messages - 1) / 2.0)
    }

    /// The same by Active Messages.
    pub(super) fn am_half(&mut self, messages: u32) -> Outcome<f64> {
        self.order("am", messages.into())?;
        let mut seen = self.side.seen.load(Ordering::Relaxed);
        let mut began = Instant::now();
        for round in 0..messages {
            if round == 1 {
                began = Instant::now();
            }
            seen += 1;
            self.side.endpoint.request(0, ECHO, &[round.cast_signed(), 1])?;
            self.side.poll_until(seen)?;
        }
        Ok(nanoseconds(began) / f64::from(messages - 1) / 2.0)
    }

    /// A barrier of both processes, in nanoseconds.
    pub(super) fn barrier(&mut self, count: u32) -> Outcome<f64> {
        let count = u64::from(count.max(1));
        self.order("barrier", count + 1)?;
        let began = self.side.barriers(count + 1)?;
        Ok(nanoseconds(began) / count as f64)
    }

    /// The time from one request to the next, with many under way, in nanoseconds.
    pub(super) fn gap(&mut self, messages: u32) -> Outcome<f64> {
        self.order("am", messages.into())?;
        let seen = self.side.seen.load(Ordering::Relaxed);
        self.side.endpoint.request(0, ECHO, &[1, 1])?;
        self.side.poll_until(seen + 1)?;
        let began = Instant::now();
        for round in 1..messages {
            self.side.endpoint.request(0, ECHO, &[round.cast_signed(), 1])?;
        }
        self.side.poll_until(seen + u64::from(messages))?;
        Ok(nanoseconds(began) / f64::from(messages - 1))
    }

    /// Bytes in a nanosecond by sends of the queue pair, so many under way.
    pub(super) fn raw_bulk(&mut self, len: usize, count: u64) -> Outcome<f64> {
        self.order("long", count)?;
        let source = [self.side.long_memory.sge(0, len)?];
        let (mut sent, mut done) = (0, 0);
        let began = Instant::now();
        while done < count {
            while sent < count && sent - done < FLOOD {
                self.side.long_qp.post_send(&Request::send(&source))?;
                sent += 1;
            }
            done += self.side.long_cq.poll(&mut self.side.done)? as u64;
        }
        Ok(count as f64 * len as f64 / nanoseconds(began))
    }

    /// The same by bulk requests, whose handlers do not reply.
    pub(super) fn am_bulk(&mut self, len: usize, count: u64) -> Outcome<f64> {
        self.order("am", count + 1)?;
        let source = self.side.long_memory.sge(0, len)?;
        let endpoint = &self.side.endpoint;
        let seen = self.side.seen.load(Ordering::Relaxed);
        let began = Instant::now();
        let mut sent = 0;
        while sent < count {
            match endpoint.try_request_bulk(0, SINK, &[0], source, 0) {
                Ok(()) => sent += 1,
                Err(quipu::am::Error::Call(CallError::WouldBlock)) => {
                    self.side.bundle.poll()?;
                }
                Err(error) => return Err(error.into()),
            }
        }
        endpoint.request(0, ECHO, &[0, 0])?;
        self.side.poll_until(seen + 1)?;
        Ok(count as f64 * len as f64 / nanoseconds(began))
    }

    /// The same by medium requests.
    pub(super) fn am_medium(&mut self, len: usize, count: u64) -> Outcome<f64> {
        self.order("am", count + 1)?;
        let payload = vec![7; len];
        let endpoint = &self.side.endpoint;
        let seen = self.side.seen.load(Ordering::Relaxed);
        let began = Instant::now();
        for _ in 0..count {
            endpoint.request_medium(0, SINK, &[0], &payload)?;
        }
        endpoint.request(0, ECHO, &[0, 0])?;
        self.side.poll_until(seen + 1)?;
        Ok(count as f64 * len as f64 / nanoseconds(began))
    }

    /// The time that a request takes when nothing else is under way, in nanoseconds, from `bursts` of
    /// `messages` requests each.
    pub(super) fn isolated(&mut self, bursts: u32, messages: u32) -> Outcome<f64> {
        let bursts = bursts.max(1);
        self.order("am", u64::from(bursts * messages))?;
        let mut seen = self.side.seen.load(Ordering::Relaxed);
        let mut times = Vec::with_capacity(bursts as usize);
        for _ in 0..bursts {
            let began = Instant::now();
            for round in 0..messages {
                self.side.endpoint.request(0, ECHO, &[round.cast_signed(), 1])?;
            }
            times.push(nanoseconds(began) / f64::from(messages));
            seen += u64::from(messages);
            self.side.poll_until(seen)?;
        }
        Ok(quartile(&times, 2))
    }

    /// The time from one request to the next with a computation between them, in nanoseconds.
    pub(super) fn spaced(&mut self, messages: u32, compute: impl Fn()) -> Outcome<f64> {
        let messages = messages.max(2);
        self.order("am", messages.into())?;
        let seen = self.side.seen.load(Ordering::Relaxed);
        let began = Instant::now();
        for round in 0..messages {
            self.side.endpoint.request(0, ECHO, &[round.cast_signed(), 1])?;
            compute();
            self.side.bundle.poll()?;
        }
        let time = nanoseconds(began) / f64::from(messages);
        self.side.poll_until(seen + u64::from(messages))?;
        Ok(time)
    }

    /// Ends the other process. It ends by itself, and is not waited for for long.
    pub(super) fn quit(&mut self) -> Outcome {
        self.order("quit", 0)?;
        let until = Instant::now() + Duration::from_secs(2);
        while self.child.try_wait()?.is_none() && Instant::now() < until {
            self.side.bundle.poll()?;
        }
        Ok(())
    }
}

/// Times of a burst of sends, in nanoseconds.
pub(super) struct Burst {
    /// Posting them.
    pub(super) post: f64,
    /// The poll that takes the first completion, and the others that take the rest.
    pub(super) first: f64,
    pub(super) rest: f64,
    /// Posting as many receives, with one doorbell.
    pub(super) receives: f64,
}

/// Half a round trip between two ends that one thread polls in turns, in nanoseconds: what both
/// spend on it.
pub(super) struct OneThread([Side; 2]);

impl OneThread {
    pub(super) fn new() -> Outcome<Self> {
        let ends = [Side::new()?, Side::new()?];
        ends[0].meet(&ends[1].introduction()?)?;
        ends[1].meet(&ends[0].introduction()?)?;
        Ok(Self(ends))
    }

    pub(super) fn raw(&mut self, messages: u32) -> Outcome<f64> {
        let [here, there] = &mut self.0;
        let began = Instant::now();
        for _ in 0..messages {
            here.send()?;
            while there.take()? == 0 {}
            there.send()?;
            while here.take()? == 0 {}
        }
        Ok(nanoseconds(began) / f64::from(messages) / 2.0)
    }

    pub(super) fn am(&mut self, messages: u32) -> Outcome<f64> {
        let [here, there] = &self.0;
        let mut seen = here.seen.load(Ordering::Relaxed);
        let began = Instant::now();
        for round in 0..messages {
            let sent = || here.endpoint.try_request(0, ECHO, &[round.cast_signed(), 1]);
            while let Err(error) = sent() {
                if !matches!(error, quipu::am::Error::Call(CallError::WouldBlock)) {
                    return Err(error.into());
                }
                here.bundle.poll()?;
                there.bundle.poll()?;
            }
            seen += 1;
            while here.seen.load(Ordering::Relaxed) < seen {
                there.bundle.poll()?;
                here.bundle.poll()?;
            }
        }
        Ok(nanoseconds(began) / f64::from(messages) / 2.0)
    }
}

impl OneThread {
    /// Sends so many messages in one direction, and takes them one at a time.
    pub(super) fn burst(&mut self, count: usize) -> Outcome<Burst> {
        let [here, there] = &mut self.0;
        let began = Instant::now();
        for _ in 0..count {
            here.send()?;
        }
        let post = nanoseconds(began);
        // Over TCP the posts after the first may wait for the sender's next poll: no cost of the receiver's.
        here.cq.poll(&mut here.done)?;
        let mut took = Vec::with_capacity(count);
        let (mut first, mut began) = (0.0, Instant::now());
        while took.len() < count {
            let found = there.cq.poll(&mut there.done[..1])?;
            if found == 0 {
                began = if took.is_empty() { Instant::now() } else { began };
                continue;
            }
            if took.is_empty() {
                first = nanoseconds(began);
                began = Instant::now();
            }
            took.push(there.done[0].wr_id);
        }
        let rest = nanoseconds(began);
        let mut sges = Vec::with_capacity(count);
        for slot in &took {
            sges.push([there.memory.sge(SEGMENT + *slot as usize * 64, 64)?]);
        }
        let list: Vec<(u64, &[quipu::Sge])> =
            took.iter().zip(&sges).map(|(slot, sge)| (*slot, &sge[..])).collect();
        let began = Instant::now();
        there.qp.post_recvs(&list).map_err(|(_, error)| error)?;
        let receives = nanoseconds(began);
        // Sends that were taken complete at the sender.
        here.cq.poll(&mut here.done)?;
        Ok(Burst { post, first, rest, receives })
    }
}

/// Measures what one thread spends that is both ends.
///
/// # Errors
///
/// The adapter fails.
pub fn cost(extent: Extent) -> Outcome<Line> {
    let mut ends = OneThread::new()?;
    let what = "both ends in one thread, ns";
    let mut line = Line { what, raw: Vec::new(), am: Vec::new() };
    let messages = (extent.messages / 10).max(2);
    for _ in 0..2 {
        ends.raw(messages)?;
        ends.am(messages)?;
    }
    for _ in 0..10 * extent.rounds {
        line.raw.push(ends.raw(messages)?);
        line.am.push(ends.am(messages)?);
    }
    Ok(line)
}

fn nanoseconds(began: Instant) -> f64 {
    began.elapsed().as_nanos() as f64
}

/// Measures; `peer` is the command that answers. What was measured first is thrown away.
///
/// # Errors
///
/// The adapter or the other process fails.
pub fn measure(peer: Command, extent: Extent) -> Outcome<Vec<Line>> {
    let mut meter = Meter::new(peer)?;
    let line = |what| Line { what, raw: Vec::new(), am: Vec::new() };
    let mut half = line("half round trip of 16 bytes, ns");
    let mut gap = line("gap between short requests, ns");
    let sizes = [(4096, 2000), (65_536, 400), (1 << 20, 40)];
    let mut bulk = ["bulk of 4 KB, GB/s", "bulk of 64 KB, GB/s", "bulk of 1 MB, GB/s"].map(line);
    meter.raw_half(extent.messages)?;
    meter.am_half(extent.messages)?;
    for _ in 0..extent.rounds {
        half.raw.push(meter.raw_half(extent.messages)?);
        half.am.push(meter.am_half(extent.messages)?);
        gap.am.push(meter.gap(extent.messages)?);
        for (line, (len, count)) in bulk.iter_mut().zip(sizes) {
            line.raw.push(meter.raw_bulk(len, count)?);
            line.am.push(meter.am_bulk(len, count)?);
        }
    }
    meter.quit()?;
    Ok([vec![half, gap], bulk.to_vec()].concat())
}
