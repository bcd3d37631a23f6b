//! Which process this is, and whether it is the program's alone.

use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::Duration;
use std::{fs, thread};

/// How often threads are looked for, in steps of 1 ms.
const LOOKS: u32 = 10;

/// The process whose memory and whose sockets these are. A child of vfork(2) has another number and the same
/// memory.
static OWN: AtomicU32 = AtomicU32::new(0);
/// Threads of this library and of its engine.
static OWN_THREADS: AtomicU32 = AtomicU32::new(0);
/// The program has started a thread.
static HAS_THREADS: AtomicBool = AtomicBool::new(false);

/// The process whose descriptors the table describes.
pub(crate) fn own() -> u32 {
    OWN.load(Ordering::Relaxed)
}

/// Whether this is the process whose descriptors the table describes, not a child of vfork(2).
pub(crate) fn is_own() -> bool {
    own() == std::process::id()
}

/// The program begins. Its libraries may have started threads.
pub(crate) fn begin() {
    OWN.store(std::process::id(), Ordering::Relaxed);
}

/// A child of fork(2) begins.
pub(crate) fn begin_child() {
    begin();
    HAS_THREADS.store(false, Ordering::Relaxed);
    OWN_THREADS.store(0, Ordering::Relaxed);
}

/// The program starts a thread.
pub(crate) fn note_thread() {
    HAS_THREADS.store(true, Ordering::Relaxed);
}

/// This library or its engine starts a thread.
pub(crate) fn note_own_thread() {
    OWN_THREADS.fetch_add(1, Ordering::Relaxed);
}

/// Such a thread ends, or could not be started.
pub(crate) fn own_thread_ends() {
    OWN_THREADS.fetch_sub(1, Ordering::Relaxed);
}

/// Whether the program has other threads than this one. Some that have ended may be listed for a moment.
pub(crate) fn has_threads() -> bool {
    let is_alone = || {
        let listed = fs::read_dir("/proc/self/task").map_or(usize::MAX, Iterator::count);
        listed <= 1 + OWN_THREADS.load(Ordering::Relaxed) as usize
    };
    let is_alone_soon = || {
        (0..LOOKS).any(|_| {
            let is_alone = is_alone();
            if !is_alone {
                thread::sleep(Duration::from_millis(1));
            }
            is_alone
        })
    };
    HAS_THREADS.load(Ordering::Relaxed) && !is_alone_soon()
}
