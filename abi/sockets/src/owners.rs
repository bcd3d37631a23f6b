//! How many processes have a socket, and the locks that they share. Both are in memory that children of
//! fork(2) have too, and the process at the other end of the connection has not.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, Ordering};

use crate::sys;

/// Most sockets that the processes of one family have at a time. Those beyond stay plain.
const SLOTS: usize = 1 << 17;
const NO_SLOT: u32 = u32::MAX;

/// What the processes of one family know of a socket. Threads with different sockets write different cache
/// lines.
#[repr(C, align(64))]
pub(crate) struct Slot {
    /// How many have it.
    count: AtomicU32,
    /// Thread that is sending into the ring; 0 if none is.
    pub(crate) sending: AtomicU32,
    /// Thread that takes octets of the ring back; 0 if none does.
    pub(crate) withdrawing: AtomicU32,
    /// Not 0 after shutdown(2) for what is sent.
    pub(crate) shut: AtomicU32,
}

struct Memory(*const Slot);

// SAFETY: the mapping stays for ever, and is only accessed by atomic words.
unsafe impl Send for Memory {}
// SAFETY: as above.
unsafe impl Sync for Memory {}

static MEMORY: OnceLock<Option<Memory>> = OnceLock::new();
/// Where the search for a free slot begins.
static NEXT: AtomicU32 = AtomicU32::new(0);

fn slot(number: u32) -> Option<&'static Slot> {
    let len = SLOTS * size_of::<Slot>();
    let map = || sys::map_shared(len, None).map(|at| Memory(at.cast_const().cast()));
    let memory = MEMORY.get_or_init(map).as_ref()?;
    // SAFETY: the mapping has so many slots of zeroed words.
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
            let (count, order) = (&slot.count, Ordering::SeqCst);
            let free = count.load(Ordering::Relaxed) == 0;
            let taken = free && count.compare_exchange(0, 1, order, order).is_ok();
            if taken {
                slot.sending.store(0, order);
                slot.withdrawing.store(0, order);
                slot.shut.store(0, order);
            }
            taken.then_some(number)
        })
    }

    /// Uses another slot.
    pub(crate) fn replace(&self, number: u32) {
        self.0.store(number, Ordering::Relaxed);
    }

    pub(crate) fn slot(&self) -> Option<&'static Slot> {
        slot(self.0.load(Ordering::Relaxed))
    }

    /// Whether it is one.
    #[inline]
    pub(crate) fn is_one(&self) -> bool {
        self.slot().is_some_and(|slot| slot.count.load(Ordering::SeqCst) == 1)
    }

    /// One more.
    pub(crate) fn add(&self) {
        if let Some(slot) = self.slot() {
            slot.count.fetch_add(1, Ordering::SeqCst);
        }
    }

    /// One less. Whether there is none now.
    pub(crate) fn remove(&self) -> bool {
        self.slot().is_some_and(|slot| slot.count.fetch_sub(1, Ordering::SeqCst) == 1)
    }
}
