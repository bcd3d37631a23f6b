//! Pieces of the memory that a program shares with the adapter's process.

use std::collections::BTreeMap;
use std::ptr::NonNull;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use quipu_mem::Segment;

/// Pieces begin at multiples of this, so that none shares a line with another; long ones at pages.
const ALIGN: usize = 128;
const PAGE: usize = 4096;

/// The memory, and what of it is free: offsets and lengths, of which no two touch.
#[derive(Debug)]
struct Books {
    free: BTreeMap<usize, usize>,
    /// What is from here on has never been given out: it is zero, and its pages are not there yet.
    fresh: usize,
}

/// Memory of which pieces are given out. Clones are the same.
#[derive(Clone, Debug)]
pub(super) struct Arena {
    memory: Segment,
    books: Arc<Mutex<Books>>,
}

/// Keeps a piece from being given out again.
struct Lease {
    books: Arc<Mutex<Books>>,
    _memory: Segment,
    at: usize,
    len: usize,
}

fn lock(books: &Mutex<Books>) -> MutexGuard<'_, Books> {
    // Nothing in there is left half done by a panic.
    books.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Drop for Lease {
    fn drop(&mut self) {
        lock(&self.books).give_back(self.at, self.len);
    }
}

impl Books {
    /// The first place that is long enough, and how many bytes of it had another user before.
    fn take(&mut self, len: usize) -> Option<(usize, usize)> {
        let align = if len >= PAGE { PAGE } else { ALIGN };
        let (at, start, room) = self.free.iter().find_map(|(&at, &room)| {
            let start = at.next_multiple_of(align);
            (start - at + len <= room).then_some((at, start, room))
        })?;
        self.free.remove(&at);
        if start > at {
            self.free.insert(at, start - at);
        }
        if at + room > start + len {
            self.free.insert(start + len, at + room - start - len);
        }
        let used = self.fresh.saturating_sub(start).min(len);
        self.fresh = self.fresh.max(start + len);
        Some((start, used))
    }

    fn give_back(&mut self, mut at: usize, mut len: usize) {
        if let Some((&before, &room)) = self.free.range(..at).next_back()
            && before + room == at
        {
            (at, len) = (before, room + len);
        }
        if let Some(room) = self.free.remove(&(at + len)) {
            len += room;
        }
        self.free.insert(at, len);
    }
}

impl Arena {
    /// All of `memory` is free.
    pub(super) fn new(memory: Segment) -> Self {
        let free = BTreeMap::from([(0, memory.len())]);
        Self { memory, books: Arc::new(Mutex::new(Books { free, fresh: 0 })) }
    }

    /// A piece of `len` bytes, all zero, which is free again when the last share of it is gone. `None`:
    /// there is no room.
    pub(super) fn take(&self, len: usize) -> Option<Segment> {
        let whole = len.max(1).checked_next_multiple_of(ALIGN)?;
        let (at, used) = lock(&self.books).take(whole)?;
        let (books, memory) = (Arc::clone(&self.books), self.memory.clone());
        let lease = Arc::new(Lease { books, _memory: memory, at, len: whole });
        let base = NonNull::new(std::ptr::with_exposed_provenance_mut(self.memory.addr() + at))?;
        // SAFETY: the piece lies in the memory, of which the lease holds a share; nobody makes references to
        // what is in there, and no other piece has a byte of it until the lease ends.
        let piece = unsafe { Segment::from_raw(base, len, lease) };
        piece.slice(0, used.min(len)).and_then(|used| used.zero()).ok()?;
        Some(piece)
    }

    /// Where a piece of memory begins, counted from the arena's first byte, if all of it is in the arena.
    pub(super) fn offset_of(&self, addr: usize, len: u64) -> Option<u64> {
        let offset = (addr as u64).checked_sub(self.memory.addr() as u64)?;
        let end = offset.checked_add(len)?;
        (end <= self.memory.len() as u64).then_some(offset)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_do_not_overlap_and_come_back_whole() {
        let arena = Arena::new(Segment::heap(1 << 16));
        let lens = [1, 128, 129, 4096, 5000, 1];
        let pieces: Vec<_> = lens.iter().map(|&len| arena.take(len).unwrap()).collect();
        let mut places: Vec<_> = pieces.iter().map(|p| (p.addr(), p.addr() + p.len())).collect();
        places.sort_unstable();
        assert!(places.windows(2).all(|pair| pair[0].1 <= pair[1].0));
        assert!(pieces.iter().all(|piece| piece.addr() % ALIGN == 0));
        assert_eq!(pieces[4].addr() % PAGE, 0);
        assert!(arena.take(1 << 16).is_none());
        drop(pieces);
        let all = arena.take(1 << 16).unwrap();
        assert_eq!(all.len(), 1 << 16);
        assert!(arena.take(1).is_none());
    }

    #[test]
    fn a_piece_is_zero_again_for_its_next_user() {
        let arena = Arena::new(Segment::heap(4096));
        arena.take(64).unwrap().write(0, b"mine").unwrap();
        let mut out = [1; 4];
        arena.take(64).unwrap().read(0, &mut out).unwrap();
        assert_eq!(out, [0; 4]);
    }

    #[test]
    fn what_is_elsewhere_has_no_offset() {
        let arena = Arena::new(Segment::heap(4096));
        let base = arena.memory.addr();
        assert_eq!(arena.offset_of(base + 4096, 0), Some(4096));
        assert_eq!(arena.offset_of(base + 1, 4095), Some(1));
        assert_eq!(arena.offset_of(base + 1, 4096), None);
        assert_eq!(arena.offset_of(base - 1, 1), None);
        assert_eq!(arena.offset_of(base, u64::MAX), None);
    }
}
