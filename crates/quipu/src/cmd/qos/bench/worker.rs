//! A process that sends by the port: bulk data, or pings. It does what its standard input says, line by line.

use std::io::{self, BufRead, Write};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, mpsc};
use std::thread;
use std::time::{Duration, Instant};

use quipu::{
    Access, Completion, CompletionQueue, Device, Endpoint, MemoryRegion, QueuePair, RemoteMemory,
    Request, WcStatus,
};

use super::super::process::Trouble;

/// Bytes of a bulk message, and messages under way.
pub(super) const BULK: usize = 256 << 10;
const DEPTH: u64 = 16;
/// Octets of a ping.
pub(super) const PING: usize = 8;
/// Pings before those that count.
const WARM_UP: u32 = 20;

/// What a worker can be told.
enum Order {
    Connect(Endpoint, RemoteMemory),
    Go,
    Stop,
    Ping(u32),
}

impl Order {
    fn parse(line: &str) -> Option<Self> {
        let mut words = line.split_whitespace();
        match words.next()? {
            "connect" => {
                let endpoint = words.next()?.parse().ok()?;
                let bytes: Vec<u8> = words.map(|word| word.parse().ok()).collect::<Option<_>>()?;
                Some(Self::Connect(endpoint, RemoteMemory::from_bytes(&bytes.try_into().ok()?)))
            }
            "go" => Some(Self::Go),
            "stop" => Some(Self::Stop),
            "ping" => Some(Self::Ping(words.next()?.parse().ok()?)),
            _ => None,
        }
    }
}

/// The line that has a worker connect.
pub(super) fn connect_line(endpoint: Endpoint, remote: RemoteMemory) -> String {
    let bytes: Vec<_> = remote.to_bytes().iter().map(u8::to_string).collect();
    format!("connect {endpoint} {}\n", bytes.join(" "))
}

struct Worker {
    qp: QueuePair,
    cq: CompletionQueue,
    memory: MemoryRegion,
    remote: Option<RemoteMemory>,
    /// Messages that have not completed.
    posted: u64,
}

fn say(line: &str) -> io::Result<()> {
    let mut out = io::stdout().lock();
    writeln!(out, "{line}")?;
    out.flush()
}

/// Runs a worker of a service level until its input ends.
pub(super) fn run(level: u8) -> Result<(), Trouble> {
    let device = Device::from_env()?;
    let (pd, cq) = (device.protection_domain()?, device.completion_queue(256)?);
    let qp = pd.queue_pair(&cq, &cq).service_level(level).build()?;
    let memory = pd.register(BULK, Access::LOCAL_WRITE)?;
    qp.post_recv(u64::MAX, &[memory.sge(0, PING)?])?;
    say(&qp.endpoint().to_string())?;
    let (orders, going) = listen();
    let mut worker = Worker { qp, cq, memory, remote: None, posted: 0 };
    while let Ok(order) = orders.recv() {
        match order {
            Order::Connect(endpoint, remote) => {
                worker.qp.connect(&endpoint)?;
                worker.remote = Some(remote);
            }
            Order::Go => {
                worker.send_while(&going)?;
                say("stopped")?;
            }
            Order::Stop => {}
            Order::Ping(count) => {
                let times = worker.ping(count)?;
                let times: Vec<_> = times.iter().map(u64::to_string).collect();
                say(&times.join(" "))?;
            }
        }
    }
    Ok(())
}

/// Reads orders. Whether bulk data are wanted is known at once, the rest in its turn.
fn listen() -> (mpsc::Receiver<Order>, Arc<AtomicBool>) {
    let (sender, orders) = mpsc::channel();
    let going = Arc::new(AtomicBool::new(false));
    let shown = Arc::clone(&going);
    thread::spawn(move || {
        for line in io::stdin().lock().lines() {
            let Some(order) = line.ok().as_deref().and_then(Order::parse) else { break };
            match order {
                Order::Go => shown.store(true, Ordering::Release),
                Order::Stop => shown.store(false, Ordering::Release),
                _ => {}
            }
            if sender.send(order).is_err() {
                break;
            }
        }
        // The end of the input ends bulk data, too.
        shown.store(false, Ordering::Release);
    });
    (orders, going)
}

impl Worker {
    /// Takes completions, asleep for a while at most; how many sends have completed.
    fn take(&mut self, most: Duration) -> Result<u64, Trouble> {
        let mut done = [Completion::default(); 32];
        let count = self.cq.wait_timeout(&mut done, most)?;
        if let Some(failed) = done[..count].iter().find(|it| it.status != WcStatus::Success) {
            return Err(quipu::Error::Work(*failed).into());
        }
        Ok(done[..count].iter().filter(|it| it.wr_id != u64::MAX).count() as u64)
    }

    /// Keeps bulk messages under way while they are wanted.
    fn send_while(&mut self, going: &AtomicBool) -> Result<(), Trouble> {
        let remote = self.remote.ok_or("there is no connection")?;
        let list = [self.memory.sge(0, BULK)?];
        while going.load(Ordering::Acquire) || self.posted > 0 {
            while going.load(Ordering::Acquire) && self.posted < DEPTH {
                self.qp.post_send(&Request::write(&list, remote).id(1))?;
                self.posted += 1;
            }
            self.posted -= self.take(Duration::from_millis(20))?;
        }
        Ok(())
    }

    /// Nanoseconds that so many pings took there and back.
    fn ping(&mut self, count: u32) -> Result<Vec<u64>, Trouble> {
        let mut times = Vec::new();
        for round in 0..count + WARM_UP {
            let begun = Instant::now();
            self.qp.post_send(&Request::send_inline(&[7; PING]).id(1))?;
            let (mut sent, mut answered) = (false, false);
            while !(sent && answered) {
                let mut done = [Completion::default(); 2];
                let found = self.cq.wait(&mut done)?;
                for completion in &done[..found] {
                    if completion.status != WcStatus::Success {
                        return Err(quipu::Error::Work(*completion).into());
                    }
                    answered |= completion.wr_id == u64::MAX;
                    sent |= completion.wr_id != u64::MAX;
                }
            }
            if round >= WARM_UP {
                times.push(begun.elapsed().as_nanos() as u64);
            }
            self.qp.post_recv(u64::MAX, &[self.memory.sge(0, PING)?])?;
            // A program that has something to do in between, as most have.
            thread::sleep(Duration::from_micros(200));
        }
        Ok(times)
    }
}
