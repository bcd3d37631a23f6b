//! Which process this is, and whether it is the program's alone.

use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

/// The process whose memory and whose sockets these are. A child of vfork(2) has another number and the same
/// memory.
static OWN: AtomicU32 = AtomicU32::new(0);
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

/// A child of fork(2) begins, or the program.
pub(crate) fn begin() {
    OWN.store(std::process::id(), Ordering::Relaxed);
    HAS_THREADS.store(false, Ordering::Relaxed);
}

/// The program starts a thread.
pub(crate) fn note_thread() {
    HAS_THREADS.store(true, Ordering::Relaxed);
}

/// Whether the program has started threads in this process.
pub(crate) fn has_threads() -> bool {
    HAS_THREADS.load(Ordering::Relaxed)
}
