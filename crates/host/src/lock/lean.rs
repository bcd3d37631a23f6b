//! A lock that leans towards one thread: that thread takes it without a locked instruction.
//!
//! Most programs post and poll from one thread, millions of times for each time that the helper or
//! another thread has something to do. A locked instruction waits until all that was written before has
//! left the processor, such as the message just put into a ring whose memory the peer's processor has. So
//! the thread that takes the lock many times in turn becomes its *favourite*: it says that it is inside by a
//! plain store, and then looks whether it is still the favourite. Whoever else wants the lock first takes
//! the usual one, takes the favour back, has the kernel put a barrier between that store and that look on
//! every processor that runs a thread of this process ([`barrier`]), and then sees whether the favourite is
//! inside.
//!
//! That costs microseconds, and so each time doubles how often a thread has to come in turn.

use std::sync::atomic::{AtomicU32, AtomicUsize, Ordering, compiler_fence};

use crate::barrier;

const NOBODY: usize = 0;
const OUTSIDE: u32 = 0;
const INSIDE: u32 = 1;

/// How often a thread takes the lock in turn before it is favoured, at first and at most: the latter are
/// tens of milliseconds of polling.
const PATIENCE: u32 = 256;
const PATIENCE_MAX: u32 = 1 << 20;

/// Towards whom a lock leans.
pub(super) struct Lean {
    /// The favourite, or [`NOBODY`]. Becomes somebody by the holder of the usual lock, who is that thread.
    favourite: AtomicUsize,
    /// Whether the favourite holds the lock. A word to sleep on.
    inside: AtomicU32,
    /// Who had the usual lock last, and how often in turn. These three are written under it.
    last: AtomicUsize,
    turns: AtomicU32,
    patience: AtomicU32,
}

impl Lean {
    /// Leans towards nobody yet, and never if the kernel has no barrier, or there is but one processor, where
    /// favours gain nothing.
    pub(super) fn new(possible: bool) -> Self {
        let patience = if possible && barrier::register() { PATIENCE } else { u32::MAX };
        Self {
            favourite: AtomicUsize::new(NOBODY),
            inside: AtomicU32::new(OUTSIDE),
            last: AtomicUsize::new(NOBODY),
            turns: AtomicU32::new(0),
            patience: AtomicU32::new(patience),
        }
    }

    /// Takes the lock if this thread is its favourite, and does not hold it already.
    #[inline(always)]
    pub(super) fn enter(&self) -> bool {
        let me = barrier::thread();
        if self.favourite.load(Ordering::Relaxed) != me || self.is_inside() {
            return false;
        }
        self.inside.store(INSIDE, Ordering::Relaxed);
        // Here is where the barrier of others strikes: they see the store, or this thread sees theirs.
        compiler_fence(Ordering::SeqCst);
        if self.favourite.load(Ordering::Acquire) == me {
            return true;
        }
        self.leave();
        false
    }

    /// Gives back what [`enter`](Self::enter) took.
    #[inline(always)]
    pub(super) fn leave(&self) {
        self.inside.store(OUTSIDE, Ordering::Release);
    }

    /// Whether the favourite, or who was it, holds the lock.
    #[inline(always)]
    pub(super) fn is_inside(&self) -> bool {
        self.inside.load(Ordering::Acquire) != OUTSIDE
    }

    /// What to sleep on until the favourite leaves, while it is inside.
    pub(super) fn door(&self) -> (&AtomicU32, u32) {
        (&self.inside, INSIDE)
    }

    /// Whether the holder of the usual lock holds all of it.
    #[inline(always)]
    pub(super) fn is_upright(&self) -> bool {
        self.favourite.load(Ordering::Relaxed) == NOBODY && !self.is_inside()
    }

    /// Favours nobody any more, for the holder of the usual lock. The favourite may still be inside, and will
    /// not enter again.
    #[cold]
    pub(super) fn take_back(&self) {
        if self.favourite.load(Ordering::Relaxed) == NOBODY {
            return;
        }
        self.favourite.store(NOBODY, Ordering::Relaxed);
        barrier::everywhere();
        let patience = self.patience.load(Ordering::Relaxed);
        self.patience.store(patience.saturating_mul(2).min(PATIENCE_MAX), Ordering::Relaxed);
        self.turns.store(0, Ordering::Relaxed);
    }

    /// Counts a turn of this thread, which is about to give back the usual lock, and may be favoured from
    /// then on.
    #[inline(always)]
    pub(super) fn count_turn(&self) {
        let me = barrier::thread();
        let before = self.turns.load(Ordering::Relaxed);
        let turns =
            if self.last.load(Ordering::Relaxed) == me { before.saturating_add(1) } else { 0 };
        self.last.store(me, Ordering::Relaxed);
        self.turns.store(turns, Ordering::Relaxed);
        if turns > self.patience.load(Ordering::Relaxed) {
            self.favour(me);
        }
    }

    #[cold]
    fn favour(&self, me: usize) {
        self.turns.store(0, Ordering::Relaxed);
        self.favourite.store(me, Ordering::Relaxed);
    }
}
