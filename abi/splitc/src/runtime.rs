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
        link = Some(Link::open(&job)?);
    }
    let has_far = windows[..procs].iter().any(|window| window.is_null());
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

    /// Runs what other processes have sent.
    pub(crate) fn poll(&self) {
        self.state.budget.set(BUDGET);
        let Some(link) = &self.link else { return };
        if self.polling.replace(true) {
            return;
        }
        let polled = link.poll();
        self.polling.set(false);
        if let Err(why) = polled {
            fail(&why);
        }
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
            fail(
                "a function that atomic runs has accessed memory of another process, which it may not",
            );
        }
        match &self.link {
            Some(link) if proc < self.procs() => link,
            _ => fail(&format!(
                "a global pointer names processor {proc}, and there are {}",
                self.procs()
            )),
        }
    }

    /// Polls until a condition holds.
    pub(crate) fn wait_until(&self, mut holds: impl FnMut() -> bool) {
        let mut spins = 0u32;
        let mut since = None;
        while !holds() {
            spins += 1;
            // Far messages need a poll each time; flags in memory come by themselves, and polls that are rare
            // cost the more.
            if self.has_far {
                self.poll();
            }
            if spins < SPINS {
                std::hint::spin_loop();
                continue;
            }
            if !self.has_far {
                self.poll();
            }
            let began = *since.get_or_insert_with(Instant::now);
            if began.elapsed() > Duration::from_millis(5) {
                std::thread::sleep(Duration::from_micros(50));
            } else {
                std::thread::yield_now();
            }
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
