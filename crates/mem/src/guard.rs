//! How a region is taken back from peers that reach it by themselves.
//!
//! A same-host initiator may look a key up in the owner's [`Directory`](crate::Directory) and copy
//! with process_vm_* without asking. Before the owner gives memory back to the application it must
//! know that no such copy is under way:
//!
//! 1. the initiator makes its link's guard word odd ([`Guard::enter`]), then looks the key up, copies,
//!    and makes the word even again ([`Guard::leave`]);
//! 2. the owner withdraws the entry, then samples the guard word of every link ([`Guard::sample`]),
//!    and gives the memory back once each was even or has changed ([`GuardWait::poll`]).
//!
//! Each step 1 and 2 has a sequentially consistent fence between its write and its read, so either
//! the owner sees the odd word, or the initiator finds the entry withdrawn.

use core::sync::atomic::{AtomicU32, Ordering, fence};

use crate::segment::Shared;

/// The guard word of one link, in memory that both sides map. It starts at zero, and only the
/// initiator writes it.
#[derive(Clone, Debug)]
pub struct Guard {
    word: Shared<AtomicU32>,
}

/// What a wait for a guard has come to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GuardState {
    /// No access that began before the withdrawal is under way.
    Clear,
    /// The peer is still in it: ask again later.
    NotYet,
    /// The peer is dead, so nothing of it is under way.
    PeerDead,
}

/// A sample of a guard word that is waited for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use = "the memory may be in use until the wait is over"]
pub struct GuardWait {
    seen: u32,
}

impl Guard {
    /// The guard in this word.
    pub fn new(word: Shared<AtomicU32>) -> Guard {
        Guard { word }
    }

    /// Initiator: call before the look-up.
    #[inline]
    pub fn enter(&self) {
        let odd = self.word.load(Ordering::Relaxed) | 1;
        // Release: an owner that waits for the access before may see this word and not the even one.
        self.word.store(odd, Ordering::Release);
        fence(Ordering::SeqCst);
    }

    /// Initiator: call after the copy, also when the look-up or the copy failed.
    #[inline]
    pub fn leave(&self) {
        let even = (self.word.load(Ordering::Relaxed) | 1).wrapping_add(1);
        self.word.store(even, Ordering::Release);
    }

    /// Owner: call after the withdrawal, once for each link; then poll the result.
    pub fn sample(&self) -> GuardWait {
        fence(Ordering::SeqCst);
        GuardWait { seen: self.word.load(Ordering::Acquire) }
    }
}

impl GuardWait {
    /// Owner: looks once whether the access that the sample saw is over; never spins. A peer that
    /// hangs or lies can hold this at [`GuardState::NotYet`] for ever, so `peer_is_dead` (asked only
    /// when it matters) and a deadline of the caller's, after which it cuts the link and forbids
    /// the peer its access, end the wait.
    #[inline]
    pub fn poll(self, guard: &Guard, peer_is_dead: impl FnOnce() -> bool) -> GuardState {
        if self.seen & 1 == 0 || guard.word.load(Ordering::Acquire) != self.seen {
            GuardState::Clear
        } else if peer_is_dead() {
            GuardState::PeerDead
        } else {
            GuardState::NotYet
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::segment::Segment;

    #[test]
    fn the_owner_waits_for_the_access_under_way_and_for_no_later_one() {
        let segment = Segment::heap(128);
        let initiator = Guard::new(segment.u32_at(0).unwrap());
        let owner = Guard::new(segment.u32_at(0).unwrap());
        assert_eq!(owner.sample().poll(&owner, || unreachable!()), GuardState::Clear);
        initiator.enter();
        let wait = owner.sample();
        assert_eq!(wait.poll(&owner, || false), GuardState::NotYet);
        assert_eq!(wait.poll(&owner, || true), GuardState::PeerDead);
        initiator.leave();
        assert_eq!(wait.poll(&owner, || false), GuardState::Clear);
        initiator.enter();
        assert_eq!(wait.poll(&owner, || false), GuardState::Clear);
    }

    /// The access that is waited for is over for good where the owner sees nothing but the next one.
    #[test]
    fn what_was_done_before_the_next_access_is_seen_with_it() {
        let segment = Segment::heap(128);
        let memory = Segment::heap(8);
        let guards = [0, 1].map(|_| Guard::new(segment.u32_at(0).unwrap()));
        let steps = [0, 1].map(|_| segment.u32_at(64).unwrap());
        let until = |step: &AtomicU32, number: u32| {
            while step.load(Ordering::Relaxed) != number {
                std::thread::yield_now();
            }
        };
        let ([owner, initiator], [step, initiators_step]) = (guards, steps);
        let peers_memory = memory.clone();
        std::thread::scope(|scope| {
            scope.spawn(move || {
                initiator.enter();
                initiators_step.store(1, Ordering::Relaxed);
                until(&initiators_step, 2);
                let mut seen = [1; 8];
                peers_memory.read(0, &mut seen).unwrap();
                assert_eq!(seen, [0; 8]);
                initiator.leave();
                initiator.enter();
                initiators_step.store(3, Ordering::Relaxed);
            });
            until(&step, 1);
            let wait = owner.sample();
            step.store(2, Ordering::Relaxed);
            until(&step, 3);
            while wait.poll(&owner, || false) != GuardState::Clear {
                std::thread::yield_now();
            }
            memory.write(0, &[7; 8]).unwrap();
        });
    }

    #[test]
    fn the_counter_wraps_without_losing_its_parity() {
        let segment = Segment::heap(128);
        let word = segment.u32_at(0).unwrap();
        word.store(u32::MAX - 1, Ordering::Relaxed);
        let guard = Guard::new(word);
        guard.enter();
        let wait = guard.sample();
        guard.leave();
        assert_eq!(wait.poll(&guard, || false), GuardState::Clear);
        assert_eq!(guard.sample().poll(&guard, || false), GuardState::Clear);
    }
}
