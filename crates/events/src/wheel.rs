//! A wheel of wheels for events that are not due soon.
//!
//! Times are numbers with digits of six bits. An event is kept by the highest digit in which its time
//! differs from the wheel's: the number of that digit is the level, its value the slot. So all events of a
//! level come before those of the next level, and those of a slot before those of the next slot. When the
//! wheel comes to a slot with many events, it moves them to the levels below. An event moves at most once
//! for each digit.
//!
//! Events of one time are always in one slot, and in the order in which they were scheduled.

use std::collections::VecDeque;

/// Bits of a digit.
const BITS: u32 = 6;
const SLOTS: usize = 1 << BITS;
const LEVELS: usize = 64_usize.div_ceil(BITS as usize);
/// A slot with so many events or fewer is sorted instead of spread.
const FEW: usize = 32;
/// A slot that had room for more events gives its memory back.
const KEPT: usize = 1024;

/// Something that happens at a time.
pub(crate) struct Entry<E> {
    pub(crate) at: u64,
    pub(crate) event: E,
}

struct Slot<E> {
    /// The earliest time of its events.
    least: u64,
    entries: Vec<Entry<E>>,
}

/// Events by time, all at or after the wheel's own time.
pub(crate) struct Wheel<E> {
    base: u64,
    len: usize,
    /// Slots with events, of each level.
    used: [u64; LEVELS],
    /// Made when the first event comes.
    slots: Vec<Slot<E>>,
}

impl<E> Default for Wheel<E> {
    fn default() -> Self {
        Self { base: 0, len: 0, used: [0; LEVELS], slots: Vec::new() }
    }
}

impl<E> Wheel<E> {
    /// Number of events.
    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// The first slot with events: level and slot.
    fn first(&self) -> Option<(usize, usize)> {
        let level = self.used.iter().position(|slots| *slots != 0)?;
        Some((level, self.used[level].trailing_zeros() as usize))
    }

    /// The time of the next event.
    pub(crate) fn next_at(&self) -> Option<u64> {
        self.first().map(|(level, slot)| self.slots[level * SLOTS + slot].least)
    }

    /// Sets the wheel's time. It must lie in the slot that was taken last, or the wheel must be empty.
    pub(crate) fn turn(&mut self, base: u64) {
        self.base = base;
    }

    /// Adds an event that is not before the wheel's time.
    pub(crate) fn insert(&mut self, entry: Entry<E>) {
        if self.slots.is_empty() {
            let empty = || Slot { least: u64::MAX, entries: Vec::new() };
            self.slots.resize_with(LEVELS * SLOTS, empty);
        }
        let level = ((entry.at ^ self.base) | 1).ilog2() / BITS;
        let slot = (entry.at >> (level * BITS)) as usize % SLOTS;
        self.used[level as usize] |= 1 << slot;
        self.len += 1;
        let slot = &mut self.slots[level as usize * SLOTS + slot];
        slot.least = slot.least.min(entry.at);
        slot.entries.push(entry);
    }

    /// Moves the next events to `near`, in order, and the wheel's time to the first of them. Returns the end
    /// of their slot: no event that is left is earlier. None if there is nothing.
    pub(crate) fn take(&mut self, near: &mut VecDeque<Entry<E>>) -> Option<u64> {
        loop {
            let (level, slot) = self.first()?;
            self.used[level] &= !(1 << slot);
            let slot = &mut self.slots[level * SLOTS + slot];
            self.base = std::mem::replace(&mut slot.least, u64::MAX);
            self.len -= slot.entries.len();
            // The lowest level has one time in a slot: nothing to sort.
            if level == 0 || slot.entries.len() <= FEW {
                if level > 0 {
                    slot.entries.sort_by_key(|entry| entry.at);
                }
                near.extend(slot.entries.drain(..));
                if slot.entries.capacity() > KEPT {
                    slot.entries = Vec::new();
                }
                let span = (1 << (level as u32 * BITS)) - 1;
                return Some(self.base | span);
            }
            let entries = std::mem::take(&mut slot.entries);
            entries.into_iter().for_each(|entry| self.insert(entry));
        }
    }
}
