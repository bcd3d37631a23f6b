//! How many processes have a socket. The numbers are in memory that children of fork(2) share.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, Ordering};

use crate::sys;

/// Most sockets that the processes of one family have at a time. Those beyond stay plain.
const SLOTS: usize = 1 << 17;
const NO_SLOT: u32 = u32::MAX;

struct Memory(*const AtomicU32);

// SAFETY: the mapping stays for ever, and is only accessed by atomic words.
unsafe impl Send for Memory {}
// SAFETY: as above.
unsafe impl Sync for Memory {}

static MEMORY: OnceLock<Option<Memory>> = OnceLock::new();
/// Where the search for a free slot begins.
static NEXT: AtomicU32 = AtomicU32::new(0);

fn slot(number: u32) -> Option<&'static AtomicU32> {
    let map = || sys::map_shared(SLOTS * 4, None).map(|at| Memory(at.cast_const().cast()));
    let memory = MEMORY.get_or_init(map).as_ref()?;
    // SAFETY: the mapping has so many zeroed words.
    (number < SLOTS as u32).then(|| unsafe { &*memory.0.add(number as usize) })
}

/// Makes the memory, so that the children of this process share it.
pub(crate) fn prepare() {
    slot(0);
}

/// The number of processes that have one socket.
pub(crate) struct Owners(AtomicU32);

impl Owners {
    /// Of no socket.
    pub(crate) fn none() -> Self {
        Self(AtomicU32::new(NO_SLOT))
    }

    /// Of a new socket, which one process has. None if there are too many.
    pub(crate) fn take() -> Option<u32> {
        (0..SLOTS).find_map(|_| {
            let number = NEXT.fetch_add(1, Ordering::Relaxed) % SLOTS as u32;
            let slot = slot(number)?;
            let free = slot.load(Ordering::Relaxed) == 0;
            let taken = || slot.compare_exchange(0, 1, Ordering::SeqCst, Ordering::SeqCst).is_ok();
            (free && taken()).then_some(number)
        })
    }

    /// Uses another slot.
    pub(crate) fn replace(&self, number: u32) {
        self.0.store(number, Ordering::Relaxed);
    }

    fn slot(&self) -> Option<&'static AtomicU32> {
        slot(self.0.load(Ordering::Relaxed))
    }

    /// Whether it is one.
    #[inline]
    pub(crate) fn is_one(&self) -> bool {
        self.slot().is_some_and(|slot| slot.load(Ordering::SeqCst) == 1)
    }

    /// One more.
    pub(crate) fn add(&self) {
        if let Some(slot) = self.slot() {
            slot.fetch_add(1, Ordering::SeqCst);
        }
    }

    /// One less. Whether there is none now.
    pub(crate) fn remove(&self) -> bool {
        self.slot().is_some_and(|slot| slot.fetch_sub(1, Ordering::SeqCst) == 1)
    }
}
