//! When a connection is idle, so that its ring needs no memory.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

/// Calls without a send between them after which a connection is idle.
const IDLE_LOOKS: u32 = 30;

/// Whether a connection is idle whose ring has memory. Only the helper looks.
#[derive(Default)]
pub(crate) struct Idleness {
    /// Octets sent through the ring when the helper last looked, and when the ring was last trimmed.
    seen: AtomicU64,
    trimmed: AtomicU64,
    looks: AtomicU32,
}

impl Idleness {
    /// A socket begins to use the object.
    pub(crate) fn begin(&self) {
        self.seen.store(0, Ordering::Relaxed);
        self.trimmed.store(0, Ordering::Relaxed);
    }

    /// The ring has memory although nothing was sent through it since it was trimmed.
    pub(crate) fn has_memory_again(&self) {
        self.trimmed.store(u64::MAX, Ordering::Relaxed);
    }

    /// Whether it begins to be idle: true once after each use of the ring.
    pub(crate) fn has_begun(&self, sent: u64) -> bool {
        if self.seen.swap(sent, Ordering::Relaxed) != sent {
            self.looks.store(0, Ordering::Relaxed);
            return false;
        }
        self.looks.fetch_add(1, Ordering::Relaxed) + 1 >= IDLE_LOOKS
            && self.trimmed.swap(sent, Ordering::Relaxed) != sent
    }
}
