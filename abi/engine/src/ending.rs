//! The end of the process by a signal that it does not handle, where it owes a summary: of the strict mode,
//! or of a plan of faults. Ctrl-C of a server, above all.
//!
//! The handler only wakes a thread, which says what is to be said, and then has the process end by the
//! signal, as it would have without. It is there for signals alone whose action was the default when the
//! engine was opened; a program that sets one of its own later has that.

use std::cell::UnsafeCell;
use std::mem::{MaybeUninit, zeroed};
use std::ptr::{null, null_mut};
use std::sync::atomic::{AtomicBool, AtomicI32, Ordering};

use libc::c_int;
use quipu_host::Config;

/// What ends a server at a terminal, by its owner, and with its terminal.
const SIGNALS: [c_int; 3] = [libc::SIGINT, libc::SIGTERM, libc::SIGHUP];
/// For so long the interrupted thread rests. A call that sleeps would fail otherwise before the process has
/// ended; but the thread may have been interrupted where it keeps others waiting, so that it has to go on.
const REST_NS: libc::c_long = 100_000_000;

struct Bell(UnsafeCell<MaybeUninit<libc::sem_t>>);

// SAFETY: after `sem_init` it is only used by functions that any thread may call.
unsafe impl Sync for Bell {}

impl Bell {
    fn get(&self) -> *mut libc::sem_t {
        self.0.get().cast()
    }
}

/// Rung by the handler.
static BELL: Bell = Bell(UnsafeCell::new(MaybeUninit::uninit()));
/// The process whose thread waits for it; 0: none does.
static OWNER: AtomicI32 = AtomicI32::new(0);
/// The signal that ends it; 0: none has come.
static SIGNAL: AtomicI32 = AtomicI32::new(0);
/// Whether the summary was given.
static SUMMED_UP: AtomicBool = AtomicBool::new(false);

/// The turn to sum up, which one gets: the end of the process by `exit`, or by a signal.
pub(crate) fn may_sum_up() -> bool {
    !SUMMED_UP.swap(true, Ordering::AcqRel)
}

/// Has a signal that ends the process wait until `sum_up` is done, if an engine with this configuration owes
/// a summary.
pub(crate) fn watch(config: &Config, sum_up: fn()) {
    let owes = config.strict.is_some() || config.faults.is_some() || config.fault_replay.is_some();
    // SAFETY: asks for the number of this process.
    let here = unsafe { libc::getpid() };
    // The first process of a container is not ended by a signal that it does not handle (kill(2)).
    if !owes || here == 1 || OWNER.load(Ordering::Acquire) == here {
        return;
    }
    // SAFETY: in this process nobody uses it yet: threads of the parent are not here, and the handler rings
    // only for the owner.
    unsafe { libc::sem_init(BELL.get(), 0, 0) };
    SIGNAL.store(0, Ordering::Relaxed);
    SUMMED_UP.store(false, Ordering::Relaxed);
    // A program that cannot have one more thread ends without a summary.
    let wait = move || {
        // SAFETY: the semaphore is initialised, and stays.
        while unsafe { libc::sem_wait(BELL.get()) } != 0 {}
        sum_up();
        end_by(SIGNAL.load(Ordering::Acquire));
    };
    let thread = std::thread::Builder::new().name("quipu-ending".into());
    if with_signals_blocked(|| thread.spawn(wait)).is_ok() {
        OWNER.store(here, Ordering::Release);
        SIGNALS.into_iter().for_each(handle);
    }
}

/// Handles a signal whose action is the default.
fn handle(signal: c_int) {
    // SAFETY: sigaction is plain data, for which all zeroes is a valid value; the pointers are to live
    // variables, and the handler makes only calls that a handler may make.
    unsafe {
        let mut before: libc::sigaction = zeroed();
        if libc::sigaction(signal, null(), &raw mut before) != 0
            || before.sa_sigaction != libc::SIG_DFL
        {
            return;
        }
        let mut action: libc::sigaction = zeroed();
        action.sa_sigaction = on_signal as *const () as usize;
        action.sa_flags = libc::SA_RESTART;
        libc::sigaction(signal, &raw const action, null_mut());
    }
}

extern "C" fn on_signal(signal: c_int) {
    // SAFETY: all of these may be called by a handler (signal-safety(7)); errno is put back.
    unsafe {
        let errno = *libc::__errno_location();
        let own = libc::getpid() == OWNER.load(Ordering::Acquire);
        if own && SIGNAL.swap(signal, Ordering::AcqRel) == 0 {
            libc::sem_post(BELL.get());
            let rest = libc::timespec { tv_sec: 0, tv_nsec: REST_NS };
            libc::nanosleep(&raw const rest, null_mut());
        } else {
            // A child of fork, where nobody waits for the bell; or the user does not want to wait either.
            default_action(signal);
            libc::raise(signal);
        }
        *libc::__errno_location() = errno;
    }
}

/// Gives a signal its default action.
///
/// # Safety
///
/// The program is about to end by it.
unsafe fn default_action(signal: c_int) {
    // SAFETY: as in `handle`.
    unsafe {
        let mut action: libc::sigaction = zeroed();
        action.sa_sigaction = libc::SIG_DFL;
        libc::sigaction(signal, &raw const action, null_mut());
    }
}

/// Ends the process by a signal.
fn end_by(signal: c_int) {
    // SAFETY: sigset_t is plain data, which sigemptyset fills in; this thread has the signal blocked until
    // the last call, which delivers it.
    unsafe {
        default_action(signal);
        let mut set: libc::sigset_t = zeroed();
        libc::sigemptyset(&raw mut set);
        libc::sigaddset(&raw mut set, signal);
        libc::raise(signal);
        libc::pthread_sigmask(libc::SIG_UNBLOCK, &raw const set, null_mut());
    }
}

/// Runs `start` with all signals blocked, which threads that it creates inherit.
fn with_signals_blocked<T>(start: impl FnOnce() -> T) -> T {
    // SAFETY: sigset_t is plain data, which sigfillset fills in; the old mask is put back.
    unsafe {
        let (mut all, mut old): (libc::sigset_t, libc::sigset_t) = (zeroed(), zeroed());
        libc::sigfillset(&raw mut all);
        libc::pthread_sigmask(libc::SIG_SETMASK, &raw const all, &raw mut old);
        let result = start();
        libc::pthread_sigmask(libc::SIG_SETMASK, &raw const old, null_mut());
        result
    }
}
