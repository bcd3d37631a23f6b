//! What happens to an engine when the program forks.
//!
//! The child inherits descriptors and memory but neither the helper thread nor the right to speak
//! for the parent. So an engine belongs to the process that opened it: in a child every call on
//! it fails, and dropping it there touches no socket.

use std::sync::Once;
use std::sync::atomic::{AtomicU32, Ordering};

/// How many forks lie between the first process and this one.
static GENERATION: AtomicU32 = AtomicU32::new(0);
static INSTALLED: Once = Once::new();

extern "C" fn in_child() {
    GENERATION.fetch_add(1, Ordering::Relaxed);
}

/// The process that something was made in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Birthplace(u32);

impl Birthplace {
    /// This process.
    pub(crate) fn here() -> Self {
        INSTALLED.call_once(|| {
            // SAFETY: the handler is a function of the required type that does nothing but an
            // atomic addition, which is safe in a child of a process with threads.
            let result = unsafe { libc::pthread_atfork(None, None, Some(in_child)) };
            if result != 0 {
                tracing::warn!("cannot watch for fork; do not use inherited objects in a child");
            }
        });
        Self(GENERATION.load(Ordering::Relaxed))
    }

    /// False in a child of that process.
    #[inline]
    pub(crate) fn is_here(self) -> bool {
        self.0 == GENERATION.load(Ordering::Relaxed)
    }
}
