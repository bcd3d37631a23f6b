//! One of the two tables with its pointer: whose turn it is.
//!
//! The rule is a walk. The pointer goes from entry to entry, round after round. A ready entry gets its weight
//! when the pointer comes to it, and keeps the pointer while it has weight left. An entry that is not ready
//! forgets what it has.
//!
//! With small weights and large packets, such a walk takes many rounds for each packet. So nothing walks
//! here. Each entry has the round in which its weights have paid its debt, and a bit mask has the entries
//! that are paid in this round. A choice looks at one bit mask. A wheel has those of later rounds, so that
//! the next round costs no look at each entry. The tests compare this with the walk.

use super::wheel::Wheel;
use super::{Entry, LANES, MOST_DEBT, UNIT};

/// An entry and what it has.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Slot {
    lane: u8,
    /// Octets that it gets in each round.
    weight: i64,
    /// Octets that it may still send, as of round `seen`; below 0: what it has sent beyond its turns.
    left: i64,
    /// The last round whose weight is in `left`.
    seen: u64,
    /// The first round in which it may send again.
    due: u64,
}

/// A table with its pointer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Table {
    slots: Vec<Slot>,
    /// Whether entries pay for what they take beyond their weight.
    carry: bool,
    at: usize,
    /// Whether the entry at the pointer has been given its weight.
    entered: bool,
    /// Counts from 1, so that there is one before it.
    round: u64,
    /// Entries that have something left, or owe something.
    touched: u64,
    /// Entries that may send when the pointer comes to them in this round.
    paid: u64,
    /// The others.
    wheel: Wheel,
    /// Entries with a weight of each lane.
    of_lane: [u64; LANES],
    /// Lanes that some entry with a weight serves, as a bit mask.
    served: u16,
    /// Lanes that were ready in the last choice, and their entries.
    ready: (u16, u64),
}

/// Entries from the one at `index` on.
fn from(index: usize) -> u64 {
    u64::MAX.checked_shl(index as u32).unwrap_or(0)
}

/// The indices of the bits that are set.
pub(super) fn bits(mut mask: u64) -> impl Iterator<Item = usize> {
    std::iter::from_fn(move || {
        let index = mask.trailing_zeros() as usize;
        (mask != 0).then(|| {
            mask &= mask - 1;
            index
        })
    })
}

impl Table {
    /// A table of at most 64 entries.
    pub(super) fn new(entries: &[Entry], carry: bool) -> Self {
        let slot = |&Entry { lane, weight }: &Entry| {
            let weight = i64::from(weight) * i64::from(UNIT);
            Slot { lane, weight, ..Slot::default() }
        };
        let slots: Vec<Slot> = entries.iter().map(slot).collect();
        let (mut of_lane, mut served) = ([0; LANES], 0);
        for (index, slot) in slots.iter().enumerate().filter(|(_, slot)| slot.weight > 0) {
            of_lane[usize::from(slot.lane)] |= 1 << index;
            served |= 1 << slot.lane;
        }
        Self {
            slots,
            carry,
            at: 0,
            entered: false,
            round: 1,
            touched: 0,
            paid: u64::MAX,
            wheel: Wheel::new(),
            of_lane,
            served,
            ready: (0, 0),
        }
    }

    /// Lanes that some entry with a weight serves, as a bit mask.
    pub(super) fn served(&self) -> u16 {
        self.served
    }

    /// The entry at the pointer.
    pub(super) fn at(&self) -> u8 {
        self.at as u8
    }

    /// The lane whose turn it is among the `ready` ones; the pointer stands at its entry afterwards.
    #[inline]
    pub(super) fn pick(&mut self, ready: u16) -> Option<u8> {
        if self.slots.is_empty() {
            return None;
        }
        if self.ready.0 != ready {
            // Each entry is of one lane.
            let changed = bits((self.ready.0 ^ ready).into());
            let entries = changed.filter_map(|lane| self.of_lane.get(lane));
            self.ready = (ready, entries.fold(self.ready.1, |all, entries| all ^ entries));
        }
        let ready = self.ready.1;
        if ready == 0 {
            self.pass_all();
            return None;
        }
        let here = self.slots.get(self.at)?;
        if self.entered && here.left > 0 && ready & 1 << self.at != 0 {
            return Some(here.lane);
        }
        self.go_on(ready)
    }

    /// A round in which no entry is ready.
    fn pass_all(&mut self) {
        self.forget(self.touched);
        self.entered = false;
        self.at = if self.at + 1 < self.slots.len() { self.at + 1 } else { 0 };
    }

    /// Moves the pointer to the next entry that may send.
    fn go_on(&mut self, ready: u64) -> Option<u8> {
        if std::mem::take(&mut self.entered) {
            self.leave(ready);
        }
        let mut ahead = from(self.at);
        // Without `carry`, one that was charged later misses a round. So it may be the third.
        for _ in 0..3 {
            let index = (ready & self.paid & ahead).trailing_zeros() as usize;
            self.pass(ahead & !from(index), ready);
            if let Some(slot) = self.slots.get_mut(index) {
                let rounds = (self.round - slot.seen) as i64;
                let is_touched = self.touched & 1 << index != 0;
                slot.left = if is_touched { slot.left + rounds * slot.weight } else { slot.weight };
                slot.seen = self.round;
                self.touched |= 1 << index;
                (self.at, self.entered) = (index, true);
                return Some(slot.lane);
            }
            self.begin_round(ready);
            ahead = u64::MAX;
        }
        None
    }

    /// The pointer leaves its entry.
    fn leave(&mut self, ready: u64) {
        let here = 1 << self.at;
        if self.carry && ready & here != 0 {
            self.slots[self.at].seen = self.round;
            self.set_due(self.at);
        } else {
            self.forget(here);
        }
        self.at += 1;
    }

    /// The pointer passes these entries, none of which sends.
    fn pass(&mut self, entries: u64, ready: u64) {
        let keep = if self.carry { ready } else { 0 };
        self.forget(entries & !keep);
    }

    /// What these entries have left, or owe, is forgotten: idle lanes would save up otherwise.
    fn forget(&mut self, entries: u64) {
        for index in bits(entries & self.touched) {
            let slot = &mut self.slots[index];
            slot.left = 0;
            self.wheel.remove(index, slot.due);
        }
        self.touched &= !entries;
        self.paid |= entries;
    }

    /// Goes to the next round in which one of the ready entries may send. Those that the pointer passes in
    /// the rounds before it get their weights there.
    fn begin_round(&mut self, ready: u64) {
        let mut next = self.round + 1;
        if self.carry && ready & self.paid == 0 {
            let due = |index: usize| self.slots[index].due;
            next = self.wheel.first(self.round, ready, due).unwrap_or(next);
        }
        if next > self.round + 1 {
            self.pass(u64::MAX, ready);
        }
        let due = |index: usize| self.slots[index].due;
        self.paid |= self.wheel.advance(self.round, next, due);
        self.round = next;
    }

    /// Sets the round in which an entry may send again, which has changed what it has left.
    fn set_due(&mut self, index: usize) {
        let is_visited = self.is_visited(index);
        let slot = &mut self.slots[index];
        // Weights of rounds that are not in `left` yet are something, too.
        if slot.left == 0 && self.round <= slot.seen + u64::from(!is_visited) {
            return self.forget(1 << index);
        }
        self.wheel.remove(index, slot.due);
        let rounds = if slot.left + slot.weight > 0 { 1 } else { -slot.left / slot.weight + 1 };
        slot.due = slot.seen + rounds as u64;
        self.touched |= 1 << index;
        if slot.due <= self.round {
            self.paid |= 1 << index;
        } else {
            self.paid &= !(1 << index);
            self.wheel.add(index, self.round, slot.due);
        }
    }

    /// Whether the pointer has been at an entry in this round.
    fn is_visited(&self, index: usize) -> bool {
        index < self.at || index == self.at && self.entered
    }

    /// Takes octets from what the entry has left that was picked last.
    #[inline]
    pub(super) fn charge_picked(&mut self, octets: u32) {
        if let Some(slot) = self.slots.get_mut(self.at) {
            slot.left = slot.left.saturating_sub(octets.into()).max(-MOST_DEBT);
        }
    }

    /// Takes octets from what an entry has left.
    pub(super) fn charge(&mut self, index: usize, octets: i64) {
        let is_here = index == self.at && self.entered;
        let seen = self.round - u64::from(!self.is_visited(index));
        let Some(slot) = self.slots.get_mut(index).filter(|slot| slot.weight > 0) else { return };
        slot.left = slot.left.saturating_sub(octets).clamp(-MOST_DEBT, MOST_DEBT);
        if !is_here {
            if self.touched & 1 << index == 0 {
                slot.seen = seen;
            }
            self.set_due(index);
        }
    }

    /// Writes everything that changes, as words.
    pub(super) fn save(&self, write: &mut impl FnMut(u64)) {
        write((self.at as u64) << 1 | u64::from(self.entered));
        for (index, slot) in self.slots.iter().enumerate() {
            let waits = self.touched & 1 << index != 0 && !(index == self.at && self.entered);
            let seen = slot.seen + u64::from(!self.is_visited(index));
            let rounds = if waits { self.round.saturating_sub(seen) } else { 0 };
            write((slot.left + rounds as i64 * slot.weight) as u64);
        }
    }

    /// Reads what [`save`](Self::save) has written. Nothing that it reads makes it panic later.
    pub(super) fn load(&mut self, read: &mut impl FnMut() -> u64) {
        let word = read();
        self.at = ((word >> 1) as usize).min(self.slots.len().saturating_sub(1));
        self.entered = word & 1 != 0;
        (self.round, self.touched, self.paid) = (1, 0, u64::MAX);
        self.wheel.clear();
        for index in 0..self.slots.len() {
            let seen = u64::from(self.is_visited(index));
            let slot = &mut self.slots[index];
            (slot.left, slot.seen) = ((read() as i64).clamp(-MOST_DEBT, MOST_DEBT), seen);
            match slot.weight {
                0 => slot.left = 0,
                _ => self.set_due(index),
            }
        }
    }
}
