//! The few streams that are tried without asking epoll first.
//!
//! An empty receive costs less than asking epoll and then receiving, as long as only few streams
//! are tried. A stream gets here by delivering bytes and leaves after a while without any.

use super::token::Slot;

/// How many streams are tried directly.
const HOT_MAX: usize = 4;
/// Tries without bytes after which a stream is no longer tried.
const PATIENCE: u32 = 4096;

/// The hot streams.
#[derive(Default)]
pub(crate) struct Hot {
    slots: [Option<(Slot, u32)>; HOT_MAX],
    len: usize,
}

impl Hot {
    /// How many there are.
    #[inline]
    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// The one at a position below [`len`](Self::len).
    #[inline]
    pub(crate) fn get(&self, position: usize) -> Option<Slot> {
        self.slots.get(position).copied().flatten().map(|(slot, _)| slot)
    }

    /// Adds a stream, in the place of the one that has been quiet for longest if there is no room.
    /// Returns the one that had to go.
    pub(crate) fn add(&mut self, slot: Slot) -> Option<Slot> {
        if self.len < HOT_MAX {
            self.slots[self.len] = Some((slot, 0));
            self.len += 1;
            return None;
        }
        let quietest = self.slots.iter_mut().flatten().max_by_key(|(_, misses)| *misses)?;
        // All are busy: the newcomer goes through epoll.
        if quietest.1 < 16 {
            return Some(slot);
        }
        let old = quietest.0;
        *quietest = (slot, 0);
        Some(old)
    }

    /// Notes whether the stream at a position had bytes. True if it has been quiet for too long.
    #[inline]
    pub(crate) fn note(&mut self, position: usize, had_bytes: bool) -> bool {
        let Some(Some((_, misses))) = self.slots.get_mut(position) else {
            return false;
        };
        *misses = if had_bytes { 0 } else { *misses + 1 };
        *misses > PATIENCE
    }

    /// Removes a stream.
    pub(crate) fn remove(&mut self, slot: Slot) {
        let found = self.slots[..self.len].iter().position(|e| e.is_some_and(|(s, _)| s == slot));
        if let Some(position) = found {
            self.len -= 1;
            self.slots[position] = self.slots[self.len].take();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn slot(index: u32) -> Slot {
        Slot { index, generation: 0 }
    }

    #[test]
    fn the_quietest_makes_room() {
        let mut hot = Hot::default();
        for i in 0..4 {
            assert_eq!(hot.add(slot(i)), None);
        }
        assert_eq!(hot.add(slot(9)), Some(slot(9)));
        for _ in 0..20 {
            hot.note(2, false);
        }
        assert_eq!(hot.add(slot(9)), Some(slot(2)));
        hot.remove(slot(0));
        assert_eq!(hot.len(), 3);
        let left: Vec<_> = (0..hot.len()).filter_map(|i| hot.get(i)).collect();
        assert_eq!(left, [slot(3), slot(1), slot(9)]);
        assert!((0..PATIENCE).all(|_| !hot.note(0, false)));
        assert!(hot.note(0, false));
    }
}
