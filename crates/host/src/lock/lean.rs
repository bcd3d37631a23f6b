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
//!
//! Who was the favourite may be stopped between its look and its store for as long as the kernel likes, and
//! says that it is inside long after another has become the favourite. So each thread that ever was one has a
//! *seat*, which is a word of its own for that, for good.

use std::num::NonZeroUsize;
use std::sync::atomic::{AtomicU32, AtomicUsize, Ordering, compiler_fence};

use crate::barrier;

const NOBODY: usize = 0;
const OUTSIDE: u32 = 0;
const INSIDE: u32 = 1;

/// Seats, of which number 0 is nobody's. Their numbers fit into the low bits of a thread's number.
const SEATS: usize = 8;

/// How often a thread takes the lock in turn before it is favoured, at first and at most: the latter are
/// tens of milliseconds of polling.
const PATIENCE: u32 = 256;
const PATIENCE_MAX: u32 = 1 << 20;
/// Of who is never favoured.
const NEVER: u32 = u32::MAX;

/// The number of a seat that its thread is inside by.
pub(super) type Seat = NonZeroUsize;

/// Towards whom a lock leans.
pub(super) struct Lean {
    /// The number of the favourite and of its seat in one, or [`NOBODY`]. Becomes somebody by the holder of
    /// the usual lock, who is that thread.
    favourite: AtomicUsize,
    /// The one before, until it was seen outside. This and all below is written under the usual lock.
    leaving: AtomicUsize,
    /// Who had the usual lock last, and how often in turn.
    last: AtomicUsize,
    turns: AtomicU32,
    patience: AtomicU32,
    /// Whether the thread of each seat holds the lock: words to sleep on, written by that thread.
    seats: [AtomicU32; SEATS],
    /// Whose they are.
    owners: [AtomicUsize; SEATS],
}

impl Lean {
    /// Leans towards nobody yet, and never if the kernel has no barrier, or there is but one processor, where
    /// favours gain nothing.
    pub(super) fn new(possible: bool) -> Self {
        let patience = if possible && barrier::register() { PATIENCE } else { NEVER };
        Self {
            favourite: AtomicUsize::new(NOBODY),
            leaving: AtomicUsize::new(NOBODY),
            last: AtomicUsize::new(NOBODY),
            turns: AtomicU32::new(0),
            patience: AtomicU32::new(patience),
            seats: [const { AtomicU32::new(OUTSIDE) }; SEATS],
            owners: [const { AtomicUsize::new(NOBODY) }; SEATS],
        }
    }

    /// Takes the lock if this thread is its favourite, and does not hold it already.
    #[inline(always)]
    pub(super) fn enter(&self) -> Option<Seat> {
        let favourite = self.favourite.load(Ordering::Relaxed);
        // What is left of the favourite's number without this thread's is its seat, or too much.
        let seat = Seat::new(favourite ^ barrier::thread()).filter(|seat| seat.get() < SEATS)?;
        let word = self.seat(seat);
        if word.load(Ordering::Relaxed) != OUTSIDE {
            return None;
        }
        word.store(INSIDE, Ordering::Relaxed);
        // Here is where the barrier of others strikes: they see the store, or this thread sees theirs.
        compiler_fence(Ordering::SeqCst);
        if self.favourite.load(Ordering::Acquire) == favourite {
            return Some(seat);
        }
        self.step_back(seat);
        None
    }

    /// Leaves for whoever has the lock now, and may wait for that.
    #[cold]
    fn step_back(&self, seat: Seat) {
        self.leave(seat);
        super::futex_wake(self.seat(seat));
    }

    /// Gives back what [`enter`](Self::enter) took.
    #[inline(always)]
    pub(super) fn leave(&self, seat: Seat) {
        self.seat(seat).store(OUTSIDE, Ordering::Release);
    }

    #[inline(always)]
    pub(super) fn seat(&self, seat: Seat) -> &AtomicU32 {
        &self.seats[seat.get() % SEATS]
    }

    /// Whether the favourite holds the lock.
    #[inline(always)]
    pub(super) fn is_inside(&self) -> bool {
        let favourite = self.favourite.load(Ordering::Relaxed);
        self.seats[favourite % SEATS].load(Ordering::Relaxed) != OUTSIDE
    }

    /// Whether the holder of the usual lock holds all of it.
    #[inline(always)]
    pub(super) fn is_upright(&self) -> bool {
        self.favourite.load(Ordering::Relaxed) == NOBODY
            && self.leaving.load(Ordering::Relaxed) == NOBODY
    }

    /// Favours nobody any more, for the holder of the usual lock. Who was the favourite may still be inside
    /// ([`has_left`](Self::has_left)), and does not enter again.
    pub(super) fn take_back(&self) {
        let favourite = self.favourite.load(Ordering::Relaxed);
        if favourite == NOBODY {
            return;
        }
        self.leaving.store(favourite, Ordering::Relaxed);
        self.favourite.store(NOBODY, Ordering::Relaxed);
        let more = self.patience.load(Ordering::Relaxed).saturating_mul(2).min(PATIENCE_MAX);
        let patience = if barrier::everywhere() { more } else { NEVER };
        self.patience.store(patience, Ordering::Relaxed);
        self.turns.store(0, Ordering::Relaxed);
    }

    /// What to sleep on, behind [`take_back`](Self::take_back), while it has that value.
    pub(super) fn door(&self) -> (&AtomicU32, u32) {
        (&self.seats[self.leaving.load(Ordering::Relaxed) % SEATS], INSIDE)
    }

    /// Whether who was the favourite is outside, for the holder of the usual lock.
    pub(super) fn has_left(&self) -> bool {
        let left = self.door().0.load(Ordering::Acquire) == OUTSIDE;
        if left {
            self.leaving.store(NOBODY, Ordering::Relaxed);
        }
        left
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

    /// Favours this thread, if it has a seat or there is one left.
    #[cold]
    fn favour(&self, me: usize) {
        self.turns.store(0, Ordering::Relaxed);
        let of = |who| self.owners.iter().skip(1).position(|it| it.load(Ordering::Relaxed) == who);
        if let Some(seat) = of(me).or_else(|| of(NOBODY)).map(|place| place + 1) {
            self.owners[seat].store(me, Ordering::Relaxed);
            self.favourite.store(me | seat, Ordering::Relaxed);
        }
    }
}
