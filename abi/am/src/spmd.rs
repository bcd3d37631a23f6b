//! Starting a program as N processes that know each other, as AMUDP's SPMD layer does.
//!
//! The launcher, whichever it is, is `quipu-launch`'s business. A program that no launcher has
//! started, and whose first argument is a number, starts so many of itself and waits for them.
//!
//! Barriers and gathers are messages of an endpoint of their own, in a bundle of its own; while a
//! call waits for them it polls the program's endpoint, too, since others may need that to come
//! here.

use std::collections::HashMap;
use std::ffi::{CStr, CString, OsString};
use std::io::Write;
use std::os::unix::ffi::OsStringExt;
use std::sync::atomic::{AtomicI32, AtomicU32, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use libc::{c_char, c_int, c_void};
use quipu::am::{Bundle, Endpoint, Message, Mode, Name, Tag};
use quipu_cabi::{Null, Void, entry};
use quipu_launch::{Job, spmd};

use crate::bundle::{eb_t, give};
use crate::codes::{BAD_ARG, Code, NOT_INIT, OK, OrCode, Outcome, RESOURCE, code};
use crate::endpoint::{AM_AllocateEndpoint, AM_SetTag, en_t, endpoint, ep_t};
use crate::process::{AM_Init, port};

/// Variables that launchers set for the processes they start.
const LAUNCHED: [&str; 3] = ["PMI_FD", "PMI_PORT", "PMIX_NAMESPACE"];
/// Most processes that a program may start of itself.
const MOST: u32 = 4096;
/// The handler of the endpoint for barriers and gathers.
const PART: u16 = 1;
/// For so long a process that ends waits for its peers.
const LAST_WORDS: Duration = Duration::from_secs(1);
/// Bytes of a gather in one message.
const PIECE: usize = 32_768;

/// What has come of one gather.
#[derive(Default)]
struct Gather {
    bytes: Vec<u8>,
    arrived: usize,
}

/// What handlers fill in.
#[derive(Default)]
struct Arrived {
    gathers: HashMap<i32, Gather>,
}

/// The job, as this process knows it.
struct Known {
    rank: u32,
    size: u32,
    /// None after this process has left it.
    job: Mutex<Option<Job>>,
    /// The program's endpoint.
    program: usize,
    private: Endpoint,
    bundle: Bundle,
    arrived: Arc<Mutex<Arrived>>,
    gathers: AtomicI32,
}

static KNOWN: OnceLock<Known> = OnceLock::new();
/// What the program wants called before it ends.
static AT_EXIT: AtomicUsize = AtomicUsize::new(0);
/// A process number to ask before there is a job.
static PLACE: [AtomicU32; 2] = [AtomicU32::new(0), AtomicU32::new(1)];

fn known() -> Outcome<&'static Known> {
    KNOWN.get().ok_or(NOT_INIT)
}

fn lock(arrived: &Mutex<Arrived>) -> std::sync::MutexGuard<'_, Arrived> {
    arrived.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cold]
fn complain(what: &dyn std::fmt::Display) {
    // `eprintln!` would panic where standard error is closed.
    let _ = writeln!(std::io::stderr(), "quipu: {what}");
}

/// Whether a launcher has started this process.
fn is_launched() -> bool {
    LAUNCHED.iter().any(|name| std::env::var_os(name).is_some())
}

/// The arguments of the program.
///
/// # Safety
///
/// `argv` is `argc` texts.
unsafe fn words(argc: c_int, argv: *mut *mut c_char) -> Vec<OsString> {
    let word = |at: usize| {
        // SAFETY: passed on from the caller.
        let text = unsafe { CStr::from_ptr(*argv.add(at)) };
        OsString::from_vec(text.to_bytes().into())
    };
    (0..usize::try_from(argc).unwrap_or(0)).map(word).collect()
}

/// The number of processes that the arguments ask for, and how many words say so: a count, and by
/// which means.
fn wanted(words: &[OsString]) -> Option<(u32, usize)> {
    let count: u32 = words.get(1)?.to_str()?.parse().ok().filter(|n| (1..=MOST).contains(n))?;
    let spawner = words.get(2).and_then(|word| word.to_str());
    let is_spawner = matches!(spawner, Some("L" | "S" | "C" | "l" | "s" | "c"));
    Some((count, 1 + usize::from(is_spawner)))
}

/// Starts the program as many times as its arguments say, waits for all, and ends as they do.
fn become_master(words: &[OsString], count: u32, taken: usize) -> ! {
    let program = [&words[..1], &words[1 + taken..]].concat();
    let options = spmd::Options {
        ranks: Some(count),
        hosts: Vec::new(),
        ssh: vec!["ssh".into()],
        quipu: "quipu".into(),
        label: false,
        variables: Vec::new(),
        program,
    };
    let exit = spmd::run(&options).unwrap_or_else(|error| {
        complain(&error);
        1
    });
    std::process::exit(exit.into())
}

/// Joins the job, and maps all processes, this one included, by their numbers.
fn join(ep: ep_t) -> Outcome {
    let job = Job::from_env().map_err(|error| {
        complain(&error);
        RESOURCE
    })?;
    let (port, _) = port()?;
    let bundle = port.bundle(Mode::Sequential);
    let private = bundle.endpoint().or_code()?;
    let arrived = Arc::default();
    take_messages(&private, &arrived).or_code()?;
    // SAFETY: the endpoint was just made.
    let program = unsafe { endpoint(ep) }?;
    let names = [program.endpoint.name().or_code()?, private.name().or_code()?];
    let all = job.all_gather("am", &names.map(|name| name.to_bytes()).concat());
    let all = all.map_err(|error| {
        complain(&error);
        RESOURCE
    })?;
    let base = name_tag(&all[0]);
    private.set_tag(Tag(base)).or_code()?;
    for (rank, said) in (0..).zip(&all) {
        let [theirs, control] = two_names(said).ok_or(RESOURCE)?;
        program.endpoint.map(rank, theirs, rank_tag(base, rank)).or_code()?;
        private.map(rank, control, Tag(base)).or_code()?;
    }
    // SAFETY: as above.
    unsafe { AM_SetTag(ep, rank_tag(base, job.rank()).0) };
    PLACE[0].store(job.rank(), Ordering::Relaxed);
    PLACE[1].store(job.size(), Ordering::Relaxed);
    let known = Known {
        rank: job.rank(),
        size: job.size(),
        job: Mutex::new(Some(job)),
        program: ep as usize,
        private,
        bundle,
        arrived,
        gathers: AtomicI32::new(0),
    };
    KNOWN.set(known).map_err(|_| RESOURCE)?;
    known_barrier()
}

fn two_names(bytes: &[u8]) -> Option<[Name; 2]> {
    let (first, rest) = bytes.split_first_chunk()?;
    Some([Name::from_bytes(first)?, Name::from_bytes(rest.first_chunk()?)?])
}

/// A number of the job that all ranks compute alike, and other jobs have not.
fn name_tag(first: &[u8]) -> u64 {
    let mut sum = 0xcbf2_9ce4_8422_2325u64;
    for byte in first {
        sum = (sum ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3);
    }
    sum & !0xffff_0000 | 2
}

fn rank_tag(base: u64, rank: u32) -> Tag {
    Tag(base | u64::from(rank & 0xffff) << 16)
}

/// Sets the handler of the endpoint for barriers and gathers.
fn take_messages(
    private: &Endpoint,
    arrived: &Arc<Mutex<Arrived>>,
) -> Result<(), quipu::am::Error> {
    let place = Arc::clone(arrived);
    private.set_handler(PART.into(), move |message| take_part(message, &mut lock(&place)))
}

fn take_part(message: &mut Message<'_>, arrived: &mut Arrived) {
    let &[number, rank, at, len] = message.args() else { return };
    let size = PLACE[1].load(Ordering::Relaxed) as usize;
    let unsigned = [rank, at, len].map(|value| usize::try_from(value).unwrap_or(usize::MAX));
    let [rank, at, len] = unsigned;
    let Ok(payload) = message.to_vec() else { return };
    let fits = at.checked_add(payload.len()).is_some_and(|end| end <= len);
    let Some(all) = len.checked_mul(size).filter(|_| fits && rank < size) else { return };
    let gather = arrived.gathers.entry(number).or_default();
    gather.bytes.resize(all, 0);
    let first = rank * len + at;
    gather.bytes[first..first + payload.len()].copy_from_slice(&payload);
    gather.arrived += payload.len();
}

impl Known {
    /// Makes progress on everything.
    fn poll(&self) -> Outcome {
        self.bundle.poll().or_code()?;
        // SAFETY: the pointer was an endpoint's; if the program has freed it, its tag says so.
        if let Ok(program) = unsafe { endpoint(self.program as ep_t) } {
            program.endpoint.poll().or_code()?;
        }
        Ok(())
    }

    /// Polls until something is so; gives way to others where that takes long.
    fn until(&self, mut is_so: impl FnMut() -> Outcome<bool>) -> Outcome {
        let began = Instant::now();
        let mut polls = 0u32;
        while !is_so()? {
            self.poll()?;
            polls += 1;
            if polls.is_multiple_of(64) && began.elapsed() > Duration::from_millis(1) {
                std::thread::yield_now();
            }
        }
        Ok(())
    }

    fn send(&self, to: u32, handler: u16, args: &[i32], payload: &[u8]) -> Outcome {
        self.retry(|| self.private.try_request_medium(to, handler, args, payload))
    }

    /// Polls until a message can be sent.
    fn retry(&self, mut attempt: impl FnMut() -> Result<(), quipu::am::Error>) -> Outcome {
        loop {
            match attempt() {
                Err(quipu::am::Error::Call(quipu::am::CallError::WouldBlock)) => self.poll()?,
                sent => return sent.or_code(),
            }
        }
    }
}

/// A dissemination barrier: in round k each gives a signal to the one 2^k further on. The partners of the
/// rounds differ, so that a signal is of the round for which it is awaited.
fn known_barrier() -> Outcome {
    let known = known()?;
    let (rank, size) = (known.rank, known.size);
    let mut step = 1;
    while step < size {
        known.retry(|| known.private.try_signal((rank + step) % size))?;
        let from = (rank + size - step) % size;
        known.until(|| known.private.take_signal(from).or_code())?;
        step *= 2;
    }
    Ok(())
}

/// Waits until peers have taken the messages of this process, which would go with it.
fn wait_for_peers() {
    let Some(known) = KNOWN.get() else { return };
    let began = Instant::now();
    let is_over = || began.elapsed() > LAST_WORDS;
    // The process ends in any case.
    let _ = known.until(|| Ok(is_over() || !matches!(known.private.outstanding(), Ok(1..))));
}

/// Takes the job, unless another thread is at it: a signal handler may exit.
fn take(job: &Mutex<Option<Job>>) -> Option<Job> {
    job.try_lock().ok()?.take()
}

/// Leaves the job at the end of the process, so that its launcher does not take it for a failure.
pub(crate) fn leave() {
    if let Some(job) = KNOWN.get().and_then(|known| take(&known.job)) {
        // The process ends in any case.
        let _ = job.finalize();
    }
}

/// Gives all ranks the bytes of all.
fn gather(own: &[u8]) -> Outcome<Vec<u8>> {
    let known = known()?;
    let size = known.size;
    let number = known.gathers.fetch_add(1, Ordering::Relaxed);
    let len = i32::try_from(own.len()).map_err(|_| BAD_ARG)?;
    for (at, piece) in (0..).step_by(PIECE).zip(own.chunks(PIECE)) {
        for to in 0..size {
            let args = [number, known.rank.cast_signed(), at, len];
            known.send(to, PART, &args, piece)?;
        }
    }
    let all = own.len() * size as usize;
    let mut bytes = Vec::new();
    known.until(|| {
        let mut arrived = lock(&known.arrived);
        let is_over = arrived.gathers.get(&number).map_or(0, |gather| gather.arrived) >= all;
        if is_over {
            bytes = arrived.gathers.remove(&number).map(|gather| gather.bytes).unwrap_or_default();
        }
        Ok(is_over)
    })?;
    Ok(bytes)
}

entry! {
    /// `AMX_SPMDStartup`
    fn AMX_SPMDStart(
        argc: *mut c_int, argv: *mut *mut *mut c_char, network: *mut u64, eb: *mut eb_t,
        ep: *mut ep_t,
    ) -> Code {
        let places = [argc.cast::<c_void>(), argv.cast(), eb.cast(), ep.cast()];
        if places.iter().any(|place| place.is_null()) {
            return code(Err(BAD_ARG));
        }
        // SAFETY: they are not null, so the program passes the arguments of its `main`.
        let said = unsafe { words(*argc, *argv) };
        if !is_launched() && let Some((count, taken)) = wanted(&said) {
            become_master(&said, count, taken);
        }
        let mut name = en_t([0; Name::WIRE_LEN]);
        // SAFETY: the program passes places for a bundle and an endpoint.
        let failed = unsafe {
            AM_Init();
            match crate::bundle::AM_AllocateBundle(0, eb) {
                OK => AM_AllocateEndpoint(*eb, ep, &mut name),
                failed => failed,
            }
        };
        if failed != OK {
            return Ok(failed);
        }
        if !network.is_null() {
            give(network, u64::from(std::process::id())).map_err(quipu_cabi::Errno)?;
        }
        // SAFETY: it was just made.
        code(join(unsafe { *ep }))
    }

    /// `AMX_SPMDIsWorker`
    fn AMX_SPMDIsWorker(_argv: *mut *mut c_char) -> Code {
        Ok(c_int::from(is_launched()))
    }

    /// `AMX_SPMDNumProcs`
    fn AMX_SPMDNumProcs() -> Code {
        Ok(PLACE[1].load(Ordering::Relaxed).cast_signed())
    }

    /// `AMX_SPMDMyProc`
    fn AMX_SPMDMyProc() -> Code {
        Ok(PLACE[0].load(Ordering::Relaxed).cast_signed())
    }

    /// `AMX_SPMDBarrier`
    fn AMX_SPMDBarrier() -> Code {
        code(known_barrier())
    }

    /// `AMX_SPMDAllGather`
    fn AMX_SPMDAllGather(from: *const c_void, to: *mut c_void, len: usize) -> Code {
        if (from.is_null() || to.is_null()) && len > 0 {
            return code(Err(BAD_ARG));
        }
        if len == 0 {
            return code(known_barrier());
        }
        // SAFETY: the program passes `len` bytes.
        let own = unsafe { std::slice::from_raw_parts(from.cast(), len) };
        code(gather(own).map(|bytes| {
            // SAFETY: the program passes room for the bytes of all ranks, which are as many.
            unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), to.cast(), bytes.len()) };
        }))
    }

    /// `AMX_SPMDSetExitCallback`
    fn AMX_SPMDSetExitCallback(function: *mut c_void) -> Code {
        AT_EXIT.store(function as usize, Ordering::Relaxed);
        code(Ok(()))
    }

    /// `AMX_SPMDExit`
    fn AMX_SPMDExit(exit: c_int) -> Code {
        let function = AT_EXIT.swap(0, Ordering::Relaxed);
        if function != 0 {
            // SAFETY: the program has given this function to be called with the code.
            unsafe {
                let function: unsafe extern "C" fn(c_int) = std::mem::transmute(function);
                function(exit);
            }
        }
        let job = KNOWN.get().filter(|_| exit != 0).and_then(|known| take(&known.job));
        if let Some(job) = job {
            job.abort(exit & 0xff, "AMX_SPMDExit was called with another code than 0");
        }
        if exit == 0 {
            wait_for_peers();
        }
        // Other threads may be in the library; `exit` runs what is to run.
        // SAFETY: this is what the program asks for.
        unsafe { libc::exit(exit) }
    }

    /// `AMX_SPMDkillmyprocess`
    fn AMX_SPMDkillmyprocess(exit: c_int) -> Void {
        // SAFETY: this is what the program asks for.
        unsafe { libc::_exit(exit) }
    }

    /// `AMX_SPMDgetenvMaster`
    fn AMX_SPMDgetenvMaster(name: *const c_char) -> Null<c_char> {
        if name.is_null() {
            return Err(quipu_cabi::Errno::EINVAL);
        }
        // SAFETY: it is not null, so the program passes a text.
        let text: CString = unsafe { CStr::from_ptr(name) }.into();
        // SAFETY: it is a text.
        let value = unsafe { libc::getenv(text.as_ptr()) };
        if value.is_null() { Err(quipu_cabi::Errno::ENOENT) } else { Ok(value) }
    }
}
