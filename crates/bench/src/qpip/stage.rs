//! The stage: a process that has both ends of a link, and measures between them.

use std::io::{BufRead, Write};
use std::net::SocketAddr;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::ScopedJoinHandle;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, bail, ensure};
use serde::{Deserialize, Serialize};

use super::goodput::Stretch;
use super::model::{Figure, Link, Load, Measured, Slice};
use super::own_process::OwnProcess;
use super::path::Path;
use super::queue_pair::{Purpose, QueuePair};
#[cfg(feature = "smoltcp")]
use super::smoltcp::{self, SmoltcpEnd};
use super::socket::SocketEnd;
use super::space::{self, Space};
use crate::pair::Launcher;
use crate::sys::Worker;
use crate::{stats, sys};

/// The port of the second end.
pub(super) const PORT: u16 = 5001;
/// Nothing here takes that long unless it hangs.
const PATIENCE: Duration = Duration::from_secs(8);
/// Between two looks whether the ends have ended.
const LOOK: Duration = Duration::from_millis(5);
/// Looks that find nothing between two looks at the clock.
const LOOKS: u32 = 4096;
/// By then an answer is there.
const ANSWERED: Duration = Duration::from_micros(100);
/// Messages between two looks at the clock.
const MESSAGES: u32 = 16;
/// Parts of a slice, of which one goes before it.
const QUARTERS: u32 = 4;
/// Octets of bulk transfer that go before it, until the kernel uses the same memory again and again. What
/// one processor frees it keeps for itself at first (up to 1.5 GB on a machine of 24 GB); until then the
/// other allocates pages that were not used for long. In a virtual machine whose host takes back what is free
/// (free page reporting) each of them costs 10 us.
const FRESH: u64 = 256 << 20;
/// Slices, at most, that go before one.
pub(super) const LONGEST_WARM_UP: u32 = 4;

/// What the stage is told.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) enum Order {
    /// To measure a slice.
    Slice(Slice),
    /// To measure a sender over the lossy path.
    Stretch(Stretch),
}

/// What the stage answers.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) enum Reply {
    /// It is set up.
    Ready,
    /// A slice showed this.
    Measured(Measured),
    /// It failed.
    Failed(String),
}

/// One end of a link.
pub(super) trait End {
    /// Sends so many octets; waits only for room.
    fn send(&mut self, len: usize) -> Result<()>;
    /// Waits until octets have come, and takes them; how many. 0: nothing comes any more.
    fn receive(&mut self) -> Result<usize>;
    /// Sends an octet and takes the answer, once or in a row; the cycles within the calls of one, waiting
    /// apart.
    fn exchange(&mut self) -> Result<u64> {
        exchange_and_pause(self)
    }
    /// Who works for it: besides this thread for the program, and as its adapter.
    fn workers(&self) -> [Option<Worker>; 2] {
        [None; 2]
    }
}

/// As [`End::exchange`], with a pause in which the answer comes: nothing is waited for within calls then.
pub(super) fn exchange_and_pause<E: End + ?Sized>(end: &mut E) -> Result<u64> {
    let start = sys::cycles();
    end.send(1)?;
    let sent = sys::cycles();
    let pause = Instant::now();
    while pause.elapsed() < ANSWERED {
        std::hint::spin_loop();
    }
    let waited = sys::cycles();
    one(end.receive()?)?;
    Ok(sent.saturating_sub(start) + sys::cycles().saturating_sub(waited))
}

/// Octets that have come are the answer to one.
fn one(came: usize) -> Result<()> {
    ensure!(came == 1, "another answer than the one octet");
    Ok(())
}

/// What both threads of a slice know.
#[derive(Default)]
pub(super) struct Shared {
    /// Of both ends.
    cpus: [usize; 2],
    ready: AtomicBool,
    stop: AtomicBool,
    /// Octets that the second end has received.
    received: AtomicU64,
    /// Of each end: the program's thread, and who works for it.
    workers: [Mutex<[Option<Worker>; 3]>; 2],
    /// What wakes ends that sleep.
    wakers: Mutex<Vec<Box<dyn Fn() + Send>>>,
}

impl Shared {
    /// Says, if `so`, that the first end may connect.
    pub(super) fn second_is_ready(&self, so: bool) {
        self.ready.fetch_or(so, Ordering::Release);
    }

    /// Whether the slice is over.
    pub(super) fn has_stopped(&self) -> bool {
        self.stop.load(Ordering::Acquire)
    }

    /// Ends the slice.
    fn stop(&self) {
        self.stop.store(true, Ordering::Release);
        if let Ok(wakers) = self.wakers.lock() {
            wakers.iter().for_each(|wake| wake());
        }
    }

    /// Has an end that sleeps woken when the slice is over.
    ///
    /// # Errors
    ///
    /// The other end has panicked.
    pub(super) fn wake_by(&self, wake: impl Fn() + Send + 'static) -> Result<()> {
        let mut wakers = self.wakers.lock().map_err(|_| anyhow!("the other end has panicked"))?;
        wakers.push(Box::new(wake));
        Ok(())
    }

    /// Tries until something comes of it; spins.
    ///
    /// # Errors
    ///
    /// That of `attempt`; the slice is over, or it has taken too long.
    #[inline]
    pub(super) fn until<T>(
        &self,
        what: &str,
        mut attempt: impl FnMut() -> Result<Option<T>>,
    ) -> Result<T> {
        let (mut looks, mut end) = (0, None);
        loop {
            if let Some(out) = attempt()? {
                return Ok(out);
            }
            looks += 1;
            if looks == LOOKS {
                looks = 0;
                ensure!(!self.has_stopped(), Over);
                let end = *end.get_or_insert_with(|| Instant::now() + PATIENCE);
                ensure!(Instant::now() < end, "there is no {what}");
            }
        }
    }

    /// What is known at this moment.
    fn sample(&self) -> Result<Sample> {
        let (mut cpu_ns, mut sleeps) = ([[0; 2]; 2], [0; 2]);
        let programs = cpu_ns.iter_mut().zip(&mut sleeps);
        for (([program, adapter], sleeps), workers) in programs.zip(&self.workers) {
            let [thread, helper, other] =
                *workers.lock().map_err(|_| anyhow!("the other end has panicked"))?;
            let time = |of: Option<Worker>| of.map_or(Ok(0), sys::cpu_ns).context("its time");
            (*program, *adapter) = (time(thread)? + time(helper)?, time(other)?);
            *sleeps = [thread, helper].into_iter().flatten().map(sys::sleeps).sum();
        }
        let received = self.received.load(Ordering::Relaxed);
        Ok(Sample { at: Instant::now(), tsc: sys::cycles(), received, cpu_ns, sleeps })
    }
}

/// The slice is over, which is no fault.
#[derive(Debug, thiserror::Error)]
#[error("the other end has given up")]
struct Over;

/// A moment of a slice.
struct Sample {
    at: Instant,
    tsc: u64,
    received: u64,
    /// Of each end: of the program and the adapter.
    cpu_ns: [[u64; 2]; 2],
    /// How often the programs have gone to sleep.
    sleeps: [u64; 2],
}

impl Sample {
    /// What happened since `earlier`, when there were so many round trips.
    fn since(&self, earlier: &Self, figure: Figure, done: &Done) -> Measured {
        let ns = self.at.duration_since(earlier.at).as_nanos() as f64;
        let value = match figure {
            Figure::Bulk | Figure::Sizes => (self.received - earlier.received) as f64 / ns * 1e3,
            Figure::HostOverhead => {
                stats::median(&done.cycles) * ns / (self.tsc - earlier.tsc) as f64
            }
            _ => ns / 1e3 / done.count as f64,
        };
        let overhead = figure == Figure::HostOverhead;
        let cycles = if overhead { stats::median(&done.cycles) } else { 0.0 };
        let part = |side: usize, of: usize| {
            self.cpu_ns[side][of].saturating_sub(earlier.cpu_ns[side][of]) as f64 / ns
        };
        let load = [0, 1].map(|side| Load {
            program: part(side, 0),
            adapter: part(side, 1),
            sleeps: self.sleeps[side].saturating_sub(earlier.sleeps[side]) as f64 / ns * 1e9,
        });
        Measured { value, cycles, load }
    }
}

/// Runs the stage until its standard input ends. The first line says which processors the ends have.
///
/// # Errors
///
/// The command that started it is gone or talks nonsense. What fails in a measurement is answered.
pub(crate) fn main() -> Result<()> {
    let mut lines = std::io::stdin().lock().lines();
    let first = lines.next().context("the stage is started by `quipu bench`, not by hand")??;
    let cpus: [usize; 2] = serde_json::from_str(&first).context("the processors")?;
    let adapter = Launcher {
        program: std::env::current_exe().context("cannot find this program")?,
        arguments: vec!["bench".into(), "--adapter".into()],
    };
    let mut space = match Space::new(adapter) {
        Ok(space) => space,
        Err(error) => return reply(&Reply::Failed(format!("{error:#}"))),
    };
    reply(&Reply::Ready)?;
    let mut path = None;
    for line in lines {
        let measured = match serde_json::from_str(&line?).context("an order")? {
            Order::Slice(slice) => {
                space.prepare(slice.link, slice.mtu).and_then(|()| run(&space, cpus, &slice))
            }
            Order::Stretch(stretch) => over_path(&mut path, &space, &stretch),
        };
        let failed = |error| Reply::Failed(format!("{error:#}"));
        reply(&measured.map_or_else(failed, Reply::Measured))?;
    }
    Ok(())
}

/// A sender over the lossy path, which is made at first.
fn over_path(path: &mut Option<Path>, space: &Space, stretch: &Stretch) -> Result<Measured> {
    if path.is_none() {
        *path = Some(Path::new(space)?);
    }
    path.as_ref().context("there is no path")?.measure(space, stretch)
}

fn reply(reply: &Reply) -> Result<()> {
    let mut out = std::io::stdout().lock();
    serde_json::to_writer(&mut out, reply)?;
    out.write_all(b"\n")?;
    Ok(out.flush()?)
}

/// A slice, each end in a thread of its own.
fn run(space: &Space, cpus: [usize; 2], slice: &Slice) -> Result<Measured> {
    let shared = Shared { cpus, ..Shared::default() };
    let end = |side: usize| {
        let at = if slice.ends[side].is_attached() { 1 - side } else { side };
        let outcome = sys::pin(cpus[at]).context("pinning").and_then(|()| {
            if side == 0 { first(space, slice, &shared) } else { second(space, slice, &shared) }
        });
        shared.stop();
        outcome
    };
    let limit = Instant::now() + 2 * PATIENCE + (LONGEST_WARM_UP + 2) * slice.time();
    let [first, second] = std::thread::scope(|scope| {
        let threads = [0, 1].map(|side| scope.spawn(move || end(side)));
        // Who sleeps does not look at the clock.
        while !threads.iter().all(ScopedJoinHandle::is_finished) {
            std::thread::sleep(LOOK);
            if Instant::now() > limit {
                shared.stop();
            }
        }
        threads
            .map(|thread| thread.join().unwrap_or_else(|_| Err(anyhow!("a thread has panicked"))))
    });
    match (first, second) {
        (Ok(measured), _) => measured.context("nothing was measured"),
        // Who failed because the other had says less.
        (Err(error), Ok(_)) => Err(error.context("the first end")),
        (Err(error), Err(other)) if error.is::<Over>() => Err(other.context("the second end")),
        (Err(error), Err(other)) if other.is::<Over>() => Err(error.context("the first end")),
        (Err(error), Err(other)) => bail!("the first end: {error:#}; the second end: {other:#}"),
    }
}

/// Makes an end in this thread.
fn build<'a>(
    space: &Space,
    side: usize,
    slice: &Slice,
    shared: &'a Shared,
) -> Result<Box<dyn End + 'a>> {
    let [own, other] = [side, 1 - side].map(|side| space.place(slice.link, side, slice.ends[side]));
    sys::enter_network_namespace(own.namespace).context("entering a namespace")?;
    let address = SocketAddr::from((own.address, PORT));
    let peer = (side == 0).then(|| SocketAddr::from((other.address, PORT)));
    let kind = slice.ends[side];
    if side == 0 && kind.is_socket() && slice.link != Link::Veth {
        space::wait_until_up(slice.link)?;
    }
    if kind.is_socket() {
        let sleeps = kind.sleeps() && slice.figure.is_stream();
        let how = (slice.figure, sleeps);
        return Ok(Box::new(SocketEnd::new(how, address, peer, shared)?));
    }
    #[cfg(feature = "smoltcp")]
    if kind == super::model::EndKind::Smoltcp {
        let udp = slice.figure == Figure::RoundTripUdp;
        if slice.link == Link::Veth {
            let device = smoltcp::packet_socket(space::veth(side))?;
            return Ok(Box::new(SmoltcpEnd::new(device, udp, address, peer, shared)?));
        }
        let device = smoltcp::tap(space::tap(slice.link))?;
        return Ok(Box::new(SmoltcpEnd::new(device, udp, address, peer, shared)?));
    }
    let purpose = Purpose {
        figure: slice.figure,
        among_queue_pairs: slice.ends[1 - side].is_queue_pair(),
        message: slice.message,
        sleeps: kind.sleeps(),
    };
    if !kind.is_attached() {
        return Ok(Box::new(QueuePair::new(&purpose, &own.spec, address, peer, shared)?));
    }
    // Program and adapter work at the same time, as do the ends: each processor has one of both. Who sends
    // frames is where all others do that: memory would begin anew to go the other way (`FRESH`).
    let cpu = shared.cpus[side];
    let process = OwnProcess::start(&space.adapter, cpu, &own.spec, own.address.into())?;
    let end = QueuePair::new(&purpose, &process.link(), address, peer, shared)?;
    Ok(Box::new(end.of_process(process)))
}

/// Makes an end and notes whose threads are whose.
fn enter<'a>(
    space: &Space,
    side: usize,
    slice: &Slice,
    shared: &'a Shared,
) -> Result<Box<dyn End + 'a>> {
    let end = build(space, side, slice, shared)?;
    let mut workers = shared.workers[side].lock().map_err(|_| anyhow!("a thread has panicked"))?;
    let [helper, adapter] = end.workers();
    *workers = [Some(Worker::Thread(sys::thread_id())), helper, adapter];
    drop(workers);
    Ok(end)
}

/// The end that sends or asks, and measures.
fn first(space: &Space, slice: &Slice, shared: &Shared) -> Result<Option<Measured>> {
    shared.until("second end", || {
        std::thread::yield_now();
        Ok(shared.ready.load(Ordering::Acquire).then_some(()))
    })?;
    let mut end = enter(space, 0, slice, shared)?;
    warm_up(end.as_mut(), slice, shared)?;
    let before = shared.sample()?;
    let done = exchange(end.as_mut(), slice, slice.time())?;
    Ok(Some(shared.sample()?.since(&before, slice.figure, &done)))
}

/// What comes before that is measured.
fn warm_up(end: &mut dyn End, slice: &Slice, shared: &Shared) -> Result<()> {
    for _ in 0..=LONGEST_WARM_UP * QUARTERS {
        exchange(end, slice, slice.time() / QUARTERS)?;
        if !slice.figure.is_stream() || shared.received.load(Ordering::Relaxed) >= FRESH {
            break;
        }
    }
    Ok(())
}

/// What was done for some time.
#[derive(Default)]
struct Done {
    /// Round trips or messages.
    count: u64,
    /// Cycles of the calls of each round trip, where they are of interest.
    cycles: Vec<f64>,
}

/// Round trips or messages for so long.
fn exchange(end: &mut dyn End, slice: &Slice, time: Duration) -> Result<Done> {
    let (begun, mut done) = (Instant::now(), Done::default());
    while begun.elapsed() < time {
        for _ in 0..MESSAGES {
            match slice.figure {
                Figure::Bulk | Figure::Sizes => end.send(slice.message as usize)?,
                Figure::HostOverhead => done.cycles.push(end.exchange()? as f64),
                Figure::RoundTripUdp | Figure::RoundTripTcp => {
                    end.send(1)?;
                    one(end.receive()?)?;
                }
            }
        }
        done.count += u64::from(MESSAGES);
    }
    Ok(done)
}

/// The end that receives or answers.
fn second(space: &Space, slice: &Slice, shared: &Shared) -> Result<Option<Measured>> {
    let mut end = enter(space, 1, slice, shared)?;
    loop {
        let len = match end.receive() {
            Ok(0) => break,
            Ok(len) => len,
            // However the connection ends then.
            Err(_) if shared.has_stopped() => break,
            Err(error) => return Err(error),
        };
        if slice.figure.is_stream() {
            shared.received.fetch_add(len as u64, Ordering::Relaxed);
        } else if let Err(error) = end.send(len) {
            if shared.has_stopped() { break } else { return Err(error) }
        }
    }
    if shared.has_stopped() { Ok(None) } else { bail!("the connection has ended") }
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::super::goodput::Sender;
    use super::super::model::{CONTENDERS, EndKind};
    use super::*;

    /// Set for the run in a namespace.
    const INSIDE: &str = "INSIDE_A_NAMESPACE";

    /// The test that is an adapter's process.
    const ADAPTER: &str = "qpip::stage::tests::an_adapter_has_a_process_of_its_own";

    /// Is that process where the other test starts it; by itself there is nothing to share.
    #[test]
    fn an_adapter_has_a_process_of_its_own() {
        if std::env::var_os(INSIDE).is_none() {
            return;
        }
        println!();
        super::super::adapter().unwrap();
    }

    /// Every contender that can be had here measures something.
    #[test]
    fn every_figure_is_measured_in_a_namespace() {
        if std::env::var_os(INSIDE).is_some() {
            return measure();
        }
        let mut program = Command::new("unshare");
        let possible = program.args(["-rn", "ip", "link", "set", "lo", "up"]).output();
        if !possible.is_ok_and(|output| output.status.success()) {
            return println!("SKIPPED: no network namespaces here");
        }
        let name = "qpip::stage::tests::every_figure_is_measured_in_a_namespace";
        let mut program = Command::new("unshare");
        program.arg("-rn").arg(std::env::current_exe().unwrap()).args(["--exact", name]);
        let output = program.arg("--nocapture").env(INSIDE, "1").output().unwrap();
        let said = String::from_utf8_lossy(&output.stdout);
        assert!(output.status.success(), "{said}{}", String::from_utf8_lossy(&output.stderr));
    }

    fn measure() {
        let arguments = ["--exact", ADAPTER, "--nocapture"].map(str::to_owned).to_vec();
        let program = std::env::current_exe().unwrap();
        let mut space = Space::new(Launcher { program, arguments }).unwrap();
        let all = sys::processors().unwrap();
        let cpus = [all[0], all[all.len() - 1]];
        let tap = std::fs::File::open("/dev/net/tun").is_ok();
        let needs_tap = |link| link != Link::Veth;
        for contender in CONTENDERS.iter().filter(|contender| tap || !needs_tap(contender.link)) {
            // Whether BPF may be had is another matter.
            if contender.ends.contains(&EndKind::XdpQueuePair) {
                continue;
            }
            for figure in Figure::ALL {
                let (link, ends) = (contender.link, contender.ends);
                // Long enough for both ends to get a processor on a busy machine.
                let slice = Slice { link, ends, figure, mtu: 1500, message: 4096, slice_ms: 100 };
                space.prepare(link, slice.mtu).unwrap();
                let measured = run(&space, cpus, &slice);
                let measured =
                    measured.unwrap_or_else(|error| panic!("{contender:?} {figure:?}: {error:#}"));
                let Measured { value, load, .. } = measured;
                assert!(value > 0.0 && load[0].program > 0.0, "{contender:?}: {measured:?}");
            }
        }
        goodput();
    }

    /// Both senders bring about a window in a round trip over a path without loss.
    fn goodput() {
        if std::fs::File::open("/dev/net/tun").is_err() {
            return println!("SKIPPED: no /dev/net/tun here");
        }
        let space = Space::new(Launcher { program: "none".into(), arguments: Vec::new() }).unwrap();
        let mut path = None;
        for sender in Sender::ALL {
            let (loss_percent, rtt_ms, window) = (0.0, 20.0, 1 << 16);
            let (connections, seconds, seed) = (2, 0.5, 1);
            let stretch =
                Stretch { sender, loss_percent, rtt_ms, window, connections, seconds, seed };
            let Measured { value, .. } = over_path(&mut path, &space, &stretch).unwrap();
            let about = f64::from(window) * 1e3 / rtt_ms;
            assert!((0.2 * about..2.0 * about).contains(&value), "{sender:?}: {value}");
        }
    }
}
