//! The state of this process, its start and its end, and waiting.

use std::cell::{Cell, RefCell};
use std::env;
use std::ffi::c_int;
use std::sync::atomic::{AtomicPtr, Ordering};
use std::time::{Duration, Instant};

use quipu_launch::Job;

use crate::heap::Heap;
use crate::link::Link;
use crate::segment::{BASE, CONTROL, Control, Place, Segment};

/// Accesses to mapped memory between two polls.
const BUDGET: c_int = 1000;
/// Processors that a global pointer can name.
const MAX_PROCS: usize = 1 << 16;
/// Symmetric memory by default; pages are used when they are touched.
const HEAP_MB: usize = 1024;
/// Looks at a condition before the processor is given to others.
const SPINS: u32 = 2000;
/// Time without a message after which a process that waits sleeps.
const IDLE: Duration = Duration::from_millis(5);
/// The longest sleep: while flags in mapped memory may change, and otherwise.
const NEAR_NAP: Duration = Duration::from_micros(50);
const FAR_NAP: Duration = Duration::from_millis(10);

/// Why a function that `atomic` runs ends the job.
pub(crate) const IN_HANDLER: &str =
    "a function that atomic runs has accessed memory of another process, which it may not";

/// What the header sees: the structure `quipu_sc_state`.
#[repr(C)]
pub struct State {
    pub(crate) me: c_int,
    pub(crate) procs: c_int,
    procs_log: c_int,
    budget: Cell<c_int>,
    /// Gets or puts may be under way.
    pub(crate) under_way: Cell<c_int>,
    unused: c_int,
    heap: u64,
    heap_size: u64,
    window: *const *mut u8,
}

/// All of it.
pub(crate) struct Runtime {
    pub(crate) state: State,
    windows: Vec<*mut u8>,
    segment: Segment,
    pub(crate) heap: RefCell<Heap>,
    pub(crate) link: Option<Link>,
    job: Job,
    /// The memory of some process is not mapped.
    has_far: bool,
    /// The memory of another process is mapped.
    has_near: bool,
    /// Barriers so far, and collective calls that show something.
    pub(crate) epoch: Cell<u64>,
    pub(crate) shows: Cell<u64>,
    /// A poll is under way: what it runs may not communicate.
    polling: Cell<bool>,
    thread: std::thread::ThreadId,
    began: Instant,
}

static RUNTIME: AtomicPtr<Runtime> = AtomicPtr::new(std::ptr::null_mut());

/// The state of this process. Ends the program if it was not started, or if another thread asks.
pub(crate) fn runtime() -> &'static Runtime {
    let runtime = RUNTIME.load(Ordering::Acquire);
    if runtime.is_null() {
        fail("a function of Split-C was called before splitc_main");
    }
    // SAFETY: it was leaked by `start`, and lives as long as the process.
    let runtime = unsafe { &*runtime };
    if std::thread::current().id() != runtime.thread {
        fail("a function of Split-C was called by another thread than that of splitc_main");
    }
    runtime
}

/// Ends the whole job.
pub(crate) fn fail(why: &str) -> ! {
    let runtime = RUNTIME.load(Ordering::Acquire);
    if runtime.is_null() {
        eprintln!("split-c: {why}");
        std::process::exit(1);
    }
    // SAFETY: as in `runtime`; the job may be used by any thread.
    unsafe { &(*runtime).job }.abort(1, why)
}

/// Joins the job and makes the memory. The pointer that the program's `quipu_sc` gets.
pub(crate) fn start() -> Result<*const State, String> {
    let text = |error: quipu_launch::LaunchError| error.to_string();
    let job = Job::from_env().map_err(text)?;
    let procs = job.size() as usize;
    if procs >= MAX_PROCS {
        return Err(format!("{procs} processes are more than 65535"));
    }
    let len = heap_len()?;
    let segment = Segment::new(len).map_err(|error| {
        format!(
            "{} MB of symmetric memory cannot be had: {error}; QUIPU_SPLITC_HEAP sets how many",
            len >> 20
        )
    })?;
    let place = segment.place().map_err(|error| error.to_string())?;
    // Every processor number that a pointer may hold has an entry.
    let mut windows = vec![std::ptr::null_mut(); MAX_PROCS];
    windows[job.rank() as usize] = BASE as *mut u8;
    let mut link = None;
    if procs > 1 {
        let never = env::var("QUIPU_SAME_HOST").is_ok_and(|value| value == "never");
        let places = job.all_gather("splitc.memory", &place.to_bytes()).map_err(text)?;
        for (rank, bytes) in places.iter().enumerate() {
            let theirs = Place::parse(bytes).filter(|_| !never && rank != job.rank() as usize);
            if let Some(window) = theirs.and_then(|theirs| theirs.map(&place, len)) {
                windows[rank] = window;
            }
        }
        link = Some(Link::open(&job, len)?);
    }
    let has_far = windows[..procs].iter().any(|window| window.is_null());
    let has_near = windows[..procs].iter().filter(|window| !window.is_null()).count() > 1;
    let log = procs.is_power_of_two().then(|| procs.ilog2() as c_int);
    let state = State {
        me: job.rank() as c_int,
        procs: procs as c_int,
        procs_log: log.unwrap_or(-1),
        budget: Cell::new(BUDGET),
        under_way: Cell::new(0),
        unused: 0,
        heap: BASE as u64,
        heap_size: len as u64,
        window: windows.as_ptr(),
    };
    let runtime = Box::leak(Box::new(Runtime {
        state,
        windows,
        segment,
        heap: RefCell::new(Heap::new(CONTROL as u64, len as u64)),
        link,
        job,
        has_far,
        has_near,
        epoch: Cell::new(0),
        shows: Cell::new(0),
        polling: Cell::new(false),
        thread: std::thread::current().id(),
        began: Instant::now(),
    }));
    RUNTIME.store(runtime, Ordering::Release);
    Ok(&raw const runtime.state)
}

fn heap_len() -> Result<usize, String> {
    let Ok(value) = env::var("QUIPU_SPLITC_HEAP") else { return Ok(HEAP_MB << 20) };
    let megabytes = value.trim().parse().ok().filter(|mb| (1..=1 << 20).contains(mb));
    let megabytes: usize = megabytes.ok_or_else(|| {
        format!("QUIPU_SPLITC_HEAP is {value:?}, which is no number of megabytes from 1 to 1048576")
    })?;
    Ok(megabytes << 20)
}

/// What a process that waits does next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Step {
    Spin,
    Yield,
    Sleep,
}

/// How long a process has waited without a message.
#[derive(Debug, Default)]
struct Idle {
    spins: u32,
    since: Option<Duration>,
}

impl Idle {
    /// Whether it has waited for longer than a barrier takes.
    fn is_long(&self) -> bool {
        self.spins >= SPINS
    }

    /// The next step, at a time of any clock. Where no flag in mapped memory may change, a message ends the
    /// sleep at once, and on a busy machine sooner than the processor comes back to one that yields.
    fn next_step(&mut self, now: Duration, has_near: bool) -> Step {
        if self.spins < SPINS {
            self.spins += 1;
            return Step::Spin;
        }
        if !has_near {
            return Step::Sleep;
        }
        let since = *self.since.get_or_insert(now);
        if now.saturating_sub(since) > IDLE { Step::Sleep } else { Step::Yield }
    }
}

impl Runtime {
    pub(crate) fn me(&self) -> usize {
        self.state.me as usize
    }

    pub(crate) fn procs(&self) -> usize {
        self.state.procs as usize
    }

    /// The control words of a process whose memory is mapped here.
    pub(crate) fn control(&self, proc: usize) -> Option<&Control> {
        let window = self.windows[proc];
        // SAFETY: a window stays mapped as long as this process lives; all fields are atomic.
        (!window.is_null()).then(|| unsafe { &*window.cast::<Control>() })
    }

    /// Bytes of symmetric memory of each process.
    pub(crate) fn memory_len(&self) -> usize {
        self.segment.len
    }

    pub(crate) fn seconds(&self) -> f64 {
        self.began.elapsed().as_secs_f64()
    }

    /// Runs what other processes have sent; how many handlers that were.
    pub(crate) fn poll(&self) -> usize {
        self.state.budget.set(BUDGET);
        let Some(link) = &self.link else { return 0 };
        if self.polling.replace(true) {
            return 0;
        }
        let polled = link.poll();
        self.polling.set(false);
        polled.unwrap_or_else(|why| fail(&why))
    }

    /// Polls now and then: what a barrier costs must not be what a poll costs.
    pub(crate) fn tick(&self) {
        let left = self.state.budget.get() - BUDGET / 16;
        self.state.budget.set(left);
        if left < 0 || self.has_far {
            self.poll();
        }
    }

    /// The link, for a message to another process.
    pub(crate) fn link_to(&self, proc: usize) -> &Link {
        if self.polling.get() {
            fail(IN_HANDLER);
        }
        match &self.link {
            Some(link) if proc < self.procs() => link,
            _ => fail(&format!(
                "a global pointer names processor {proc}, and there are {}",
                self.procs()
            )),
        }
    }

    /// Polls until a condition holds. A process that answers others meanwhile stays awake; one that gets no
    /// message sleeps until the next one comes.
    pub(crate) fn wait_until(&self, mut holds: impl FnMut() -> bool) {
        let mut idle = Idle::default();
        while !holds() {
            // Messages need a poll each time. Flags in memory come by themselves, and rare polls make a
            // barrier cheap.
            if (self.has_far || idle.is_long()) && self.poll() > 0 {
                idle = Idle::default();
                continue;
            }
            match idle.next_step(self.began.elapsed(), self.has_near) {
                Step::Spin => std::hint::spin_loop(),
                Step::Yield => std::thread::yield_now(),
                Step::Sleep => self.sleep(),
            }
        }
    }

    /// Sleeps until a message may have come. Flags in mapped memory wake nobody.
    fn sleep(&self) {
        let most = if self.has_near { NEAR_NAP } else { FAR_NAP };
        match &self.link {
            Some(link) => link.sleep(most).unwrap_or_else(|why| fail(&why)),
            None => std::thread::sleep(most),
        }
    }

    /// Whether all gets and puts are done.
    pub(crate) fn is_quiet(&self) -> bool {
        self.link.as_ref().is_none_or(|link| link.books.accesses.load(Ordering::Relaxed) == 0)
    }

    /// Waits until they are.
    pub(crate) fn finish(&self) {
        if !self.is_quiet() {
            self.wait_until(|| self.is_quiet());
        }
        self.state.under_way.set(0);
    }

    /// Waits until all stores of this process are in their places.
    pub(crate) fn finish_stores(&self) {
        let Some(link) = &self.link else { return };
        self.wait_until(|| link.books.stores.load(Ordering::Relaxed) == 0);
    }

    /// Ends the job, because the program wants it.
    pub(crate) fn abort(&self, code: c_int) -> ! {
        self.job.abort(code, "the program has called splitc_abort")
    }

    /// Leaves the job: others may end before.
    pub(crate) fn leave(&self) {
        let left = self.job.barrier().and_then(|()| self.job.leave());
        left.unwrap_or_else(|error| eprintln!("split-c: the job is over, but {error}"));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_sleeps_only_after_a_while_without_messages() {
        let mut idle = Idle::default();
        let at = |ms| Duration::from_millis(ms);
        for _ in 0..SPINS {
            assert!(!idle.is_long());
            assert_eq!(idle.next_step(at(0), true), Step::Spin);
        }
        assert!(idle.is_long());
        assert_eq!(idle.next_step(at(7), true), Step::Yield);
        assert_eq!(idle.next_step(at(12), true), Step::Yield);
        assert_eq!(idle.next_step(at(13), true), Step::Sleep);
        assert_eq!(idle.next_step(at(13), false), Step::Sleep);
    }
}
