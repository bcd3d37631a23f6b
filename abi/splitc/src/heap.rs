//! Which pieces of the symmetric memory are in use. All processes do the same calls in the same order, so
//! they
//! come to the same addresses without talking.

use std::collections::BTreeMap;

/// Pieces begin at multiples of a line of the cache.
const ALIGN: u64 = 64;

/// An allocator of offsets: first fit, free pieces joined. From the other end grows a stack.
#[derive(Debug)]
pub(crate) struct Heap {
    /// Free pieces: offset and length.
    free: BTreeMap<u64, u64>,
    used: BTreeMap<u64, u64>,
    /// Lengths of what is on the stack.
    stack: Vec<u64>,
    /// Where the stack ends.
    top: u64,
}

impl Heap {
    /// Memory from one offset to another.
    pub(crate) fn new(from: u64, to: u64) -> Self {
        Self {
            free: BTreeMap::from([(from, to - from)]),
            used: BTreeMap::new(),
            stack: Vec::new(),
            top: to,
        }
    }

    /// The offset of a new piece, if there is room.
    pub(crate) fn allocate(&mut self, len: u64) -> Option<u64> {
        let len = len.max(1).checked_next_multiple_of(ALIGN)?;
        let (at, free) =
            self.free.iter().find(|(_, free)| **free >= len).map(|(at, free)| (*at, *free))?;
        self.free.remove(&at);
        if free > len {
            self.free.insert(at + len, free - len);
        }
        self.used.insert(at, len);
        Some(at)
    }

    /// Frees a piece; whether it was one.
    pub(crate) fn free(&mut self, at: u64) -> bool {
        let Some(mut len) = self.used.remove(&at) else { return false };
        let mut at = at;
        if let Some((before, free)) = self.free.range(..at).next_back().map(|(at, len)| (*at, *len))
            && before + free == at
        {
            self.free.remove(&before);
            (at, len) = (before, len + free);
        }
        if let Some(free) = self.free.remove(&(at + len)) {
            len += free;
        }
        self.free.insert(at, len);
        true
    }

    /// Puts a piece on the stack, if there is room; its offset.
    pub(crate) fn push(&mut self, len: u64) -> Option<u64> {
        let len = len.max(1).checked_next_multiple_of(ALIGN)?;
        let top = self.top.checked_sub(len)?;
        let (at, free) = self.free.last_key_value().map(|(at, free)| (*at, *free))?;
        if at + free != self.top || free < len {
            return None;
        }
        self.free.remove(&at);
        if free > len {
            self.free.insert(at, free - len);
        }
        self.top = top;
        self.stack.push(len);
        Some(top)
    }

    /// Takes the last piece off the stack.
    pub(crate) fn pop(&mut self) {
        let Some(len) = self.stack.pop() else { return };
        let (at, top) = (self.top, self.top + len);
        self.top = top;
        let last = self.free.last_key_value().map(|(at, free)| (*at, *free));
        let joins = last.filter(|(before, free)| before + free == at);
        match joins {
            Some((before, free)) => self.free.insert(before, free + len),
            None => self.free.insert(at, len),
        };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_are_found_again_when_they_are_free() {
        let mut heap = Heap::new(64, 64 + 640);
        let pieces: Vec<u64> = (0..10).map(|_| heap.allocate(1).unwrap()).collect();
        assert_eq!(pieces[9], 640);
        assert_eq!(heap.allocate(1), None);
        for at in [pieces[1], pieces[3], pieces[2]] {
            assert!(heap.free(at));
        }
        assert!(!heap.free(pieces[1]));
        assert_eq!(heap.allocate(192), Some(pieces[1]));
        assert_eq!(heap.allocate(u64::MAX), None);
    }

    #[test]
    fn the_stack_and_the_heap_share_the_memory() {
        let mut heap = Heap::new(0, 640);
        assert_eq!(heap.push(100), Some(512));
        assert_eq!(heap.push(64), Some(448));
        assert_eq!(heap.allocate(448), Some(0));
        assert_eq!(heap.push(1), None);
        heap.pop();
        assert_eq!(heap.push(64), Some(448));
        heap.pop();
        heap.pop();
        assert!(heap.free(0));
        assert_eq!(heap.allocate(640), Some(0));
    }
}
