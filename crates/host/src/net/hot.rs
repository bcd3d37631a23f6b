//! The few streams that are tried without asking epoll first.
//!
//! An empty receive costs less than asking epoll and then receiving, as long as only few streams
//! are tried. A stream gets here by delivering bytes and leaves after a while without any.
//!
//! One that goes on delivering is taken out of epoll's set until somebody waits for descriptors: to be in it
//! costs every segment that arrives a call of epoll's, a twenty-fifth of a short message's way.
//!
//! Where more streams deliver than can be tried, none is: those that are would get several turns for each
//! one of the others. Then every poll asks epoll, which names those that are ready in turn.

use super::token::Slot;

/// How many streams are tried directly.
const HOT_MAX: usize = 4;
/// Tries without bytes after which a stream is no longer tried.
const PATIENCE: u32 = 4096;
/// Deliveries after which a stream need not be in epoll's set while nobody waits for descriptors: to be taken
/// out and put back costs a microsecond each.
const STEADY: u32 = 256;
/// Questions to epoll over which it is counted how many streams deliver.
const WINDOW: u32 = 64;

/// The window in which a stream last delivered bytes; 0: none yet.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Delivered(u32);

/// What is to become of a stream that was tried.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Advice {
    /// It stays.
    Keep,
    /// It stays, and epoll need not report on it.
    Unwatch,
    /// It has been quiet for too long.
    Cool,
}

/// A stream that is tried.
#[derive(Clone, Copy)]
struct Tried {
    slot: Slot,
    /// Tries in a row that found nothing.
    misses: u32,
    /// Tries that found bytes, since it came or somebody last waited for descriptors.
    hits: u32,
}

impl Tried {
    fn new(slot: Slot) -> Self {
        Self { slot, misses: 0, hits: 0 }
    }
}

/// The hot streams.
pub(crate) struct Hot {
    slots: [Option<Tried>; HOT_MAX],
    len: usize,
    /// The number of the window, from 1.
    window: Delivered,
    looks: u32,
    /// Streams that delivered in this window.
    busy: usize,
    /// Whether too many do: in this window, or, until it ends, in the one before.
    crowded: bool,
}

impl Default for Hot {
    fn default() -> Self {
        let window = Delivered(1);
        Self { slots: [None; HOT_MAX], len: 0, window, looks: 0, busy: 0, crowded: false }
    }
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
        self.slots.get(position)?.as_ref().map(|tried| tried.slot)
    }

    /// Notes that a stream delivered, which last did so in `last`.
    #[inline]
    pub(crate) fn note_delivery(&mut self, last: &mut Delivered) {
        if *last != self.window {
            *last = self.window;
            self.busy += 1;
            self.crowded |= self.busy > HOT_MAX;
        }
    }

    /// Notes that epoll was asked.
    #[inline]
    pub(crate) fn note_look(&mut self) {
        self.looks += 1;
        if self.looks == WINDOW {
            self.crowded = self.busy > HOT_MAX;
            (self.looks, self.busy) = (0, 0);
            // A stream that was silent for 2^32 windows may count once too seldom.
            self.window.0 = self.window.0.wrapping_add(1);
        }
    }

    /// Whether more streams deliver than can be tried.
    #[inline]
    pub(crate) fn is_crowded(&self) -> bool {
        self.crowded
    }

    /// Adds a stream, in the place of the one that has been quiet for longest if there is no room.
    /// Returns the one that had to go, which may be the newcomer.
    pub(crate) fn add(&mut self, slot: Slot) -> Option<Slot> {
        if self.crowded {
            return Some(slot);
        }
        if self.len < HOT_MAX {
            self.slots[self.len] = Some(Tried::new(slot));
            self.len += 1;
            return None;
        }
        let quietest = self.slots.iter_mut().flatten().max_by_key(|tried| tried.misses)?;
        // All are busy: the newcomer goes through epoll.
        if quietest.misses < 16 {
            return Some(slot);
        }
        Some(std::mem::replace(quietest, Tried::new(slot)).slot)
    }

    /// Notes whether the stream at a position had bytes.
    #[inline]
    pub(crate) fn note(&mut self, position: usize, had_bytes: bool) -> Advice {
        let Some(Some(tried)) = self.slots.get_mut(position) else {
            return Advice::Keep;
        };
        if !had_bytes {
            tried.misses += 1;
            return if tried.misses > PATIENCE { Advice::Cool } else { Advice::Keep };
        }
        tried.misses = 0;
        tried.hits = tried.hits.wrapping_add(1);
        // Said again and again: what waits for room in its socket comes back into the set, too.
        if tried.hits.is_multiple_of(STEADY) { Advice::Unwatch } else { Advice::Keep }
    }

    /// Notes that somebody waits for descriptors: streams have to be steady anew.
    pub(crate) fn note_wait(&mut self) {
        self.slots.iter_mut().flatten().for_each(|tried| tried.hits = 0);
    }

    /// Removes a stream.
    pub(crate) fn remove(&mut self, slot: Slot) {
        let found =
            self.slots[..self.len].iter().position(|e| e.is_some_and(|tried| tried.slot == slot));
        if let Some(position) = found {
            self.len -= 1;
            self.slots.swap(position, self.len);
            self.slots[self.len] = None;
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
        assert_eq!(hot.get(hot.len()), None);
        let left: Vec<_> = (0..hot.len()).filter_map(|i| hot.get(i)).collect();
        assert_eq!(left, [slot(3), slot(1), slot(9)]);
        assert!((0..PATIENCE).all(|_| hot.note(0, false) == Advice::Keep));
        assert_eq!(hot.note(0, false), Advice::Cool);
    }

    #[test]
    fn a_steady_stream_need_not_be_watched_until_somebody_waits() {
        let mut hot = Hot::default();
        hot.add(slot(0));
        let deliveries = |hot: &mut Hot| (1..).find(|_| hot.note(0, true) == Advice::Unwatch);
        assert_eq!(deliveries(&mut hot), Some(STEADY));
        assert!((0..PATIENCE).all(|_| hot.note(0, false) == Advice::Keep), "quiet, not unsteady");
        (1..STEADY).for_each(|_| assert_eq!(hot.note(0, true), Advice::Keep));
        hot.note_wait();
        assert_eq!(deliveries(&mut hot), Some(STEADY));
    }

    #[test]
    fn a_crowd_is_one_while_more_deliver_than_can_be_tried() {
        let mut hot = Hot::default();
        let mut last = [Delivered::default(); HOT_MAX + 1];
        for _ in 0..3 * WINDOW {
            hot.note_look();
            last[..HOT_MAX].iter_mut().for_each(|last| hot.note_delivery(last));
            assert!(!hot.is_crowded(), "so many can be tried, however often they deliver");
        }
        hot.note_delivery(&mut last[HOT_MAX]);
        assert!(hot.is_crowded());
        assert_eq!(hot.add(slot(1)), Some(slot(1)));

        // The window in which it was noticed, and the one behind it, however that begins.
        let looks = (1..).take_while(|_| {
            hot.note_look();
            hot.is_crowded()
        });
        assert!((WINDOW as usize..2 * WINDOW as usize).contains(&looks.count()));
        assert_eq!(hot.add(slot(1)), None);
    }
}
