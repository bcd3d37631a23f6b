//! What is true of the whole process: whether it may raise connections, and which process it is.

use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

use crate::sys;

static ENABLED: AtomicBool = AtomicBool::new(false);
/// The process whose memory this is. A child of vfork(2) has another number and the same memory.
static OWN: AtomicU32 = AtomicU32::new(0);
/// Grows in each child of fork(2).
static GENERATION: AtomicU32 = AtomicU32::new(1);

/// Whether connections may be raised.
#[inline]
pub(crate) fn is_enabled() -> bool {
    ENABLED.load(Ordering::Relaxed)
}

/// Raises nothing any more. The program does what this library cannot see or must not disturb.
pub(crate) fn disable() {
    ENABLED.store(false, Ordering::Relaxed);
}

/// Number of this process among its ancestors by fork(2): what a thread remembers of itself is of one.
#[inline]
pub(crate) fn generation() -> u32 {
    GENERATION.load(Ordering::Relaxed)
}

/// Whether this is the process whose descriptors the tables describe, not a child of vfork(2).
pub(crate) fn is_own() -> bool {
    OWN.load(Ordering::Relaxed) == sys::process()
}

/// Whether this machine has more than one processor: on one, looking at memory only keeps the peer
/// from running.
pub(crate) fn has_processors() -> bool {
    static COUNT: AtomicU32 = AtomicU32::new(0);
    match COUNT.load(Ordering::Relaxed) {
        0 => {
            // SAFETY: asks for a number.
            let count = unsafe { libc::sysconf(libc::_SC_NPROCESSORS_ONLN) }.max(1) as u32;
            COUNT.store(count, Ordering::Relaxed);
            count > 1
        }
        count => count > 1,
    }
}

/// A child of fork(2) begins, or the program.
pub(crate) fn begin() {
    OWN.store(sys::process(), Ordering::Relaxed);
    GENERATION.fetch_add(1, Ordering::Relaxed);
}

#[used]
#[unsafe(link_section = ".init_array")]
static INITIALIZE: extern "C" fn() = initialize;

extern "C" fn initialize() {
    crate::real::look_up_all();
    begin();
    let off = std::env::var_os("QUIPU_SOCKETS").is_some_and(|value| value == "never");
    ENABLED.store(!off, Ordering::Relaxed);
    crate::fork::watch();
}
