//! The kernel's allocator, and the words that software and devices exchange through memory.
//!
//! Addresses matter: a freed object is the next one to be allocated, so its lines may still be in the cache.

/// Bytes of the simulated memory: more is refused.
pub(crate) const LIMIT: u64 = 1 << 30;
const PAGE: u64 = 4096;
const WORDS: usize = (PAGE / 8) as usize;

/// What is allocated: objects of one size that reuse each other's places, last freed first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Slab {
    /// A socket buffer's structure.
    Buffer,
    /// Room for the payload of a packet.
    Data,
    /// Room for headers.
    Header,
}

impl Slab {
    const fn size(self, data: u64) -> u64 {
        match self {
            Self::Buffer => 256,
            Self::Data => data,
            Self::Header => 256,
        }
    }
}

/// Allocator and contents of memory.
#[derive(Debug)]
pub(crate) struct Heap {
    next: u64,
    data_size: u64,
    free: [Vec<u64>; 3],
    pages: Vec<Option<Box<[u64; WORDS]>>>,
    /// Objects that are allocated now.
    pub(crate) live: u64,
}

impl Heap {
    /// An empty memory whose packets have room for `data_size` bytes.
    pub(crate) fn new(data_size: u64) -> Self {
        // Address 0 is never given out, and 1 means "discard" to SINIC.
        Self { next: PAGE, data_size, free: Default::default(), pages: Vec::new(), live: 0 }
    }

    /// Reserves `bytes` for good, page aligned: rings, user buffers, control blocks.
    pub(crate) fn reserve(&mut self, bytes: u64) -> u64 {
        let at = self.next.next_multiple_of(PAGE);
        self.next = at + bytes;
        at
    }

    /// Allocates an object; 0 if the memory is full.
    pub(crate) fn alloc(&mut self, slab: Slab) -> u64 {
        let size = slab.size(self.data_size);
        let at = self.free[slab as usize].pop().unwrap_or_else(|| {
            let at = self.next.next_multiple_of(64);
            self.next = at + size;
            at
        });
        if at + size > LIMIT {
            return 0;
        }
        self.live += 1;
        at
    }

    /// Frees an object of [`Heap::alloc`].
    pub(crate) fn free(&mut self, slab: Slab, at: u64) {
        if at != 0 {
            self.live = self.live.saturating_sub(1);
            self.free[slab as usize].push(at);
        }
    }

    /// The word at an address; 0 where nothing was written.
    pub(crate) fn word(&self, at: u64) -> u64 {
        let page = self.pages.get((at / PAGE) as usize);
        page.and_then(Option::as_ref).map_or(0, |page| page[(at % PAGE / 8) as usize])
    }

    /// Writes the word at an address; false if there is no memory.
    pub(crate) fn set_word(&mut self, at: u64, word: u64) -> bool {
        if at >= LIMIT {
            return false;
        }
        let index = (at / PAGE) as usize;
        if self.pages.len() <= index {
            self.pages.resize(index + 1, None);
        }
        let page = self.pages[index].get_or_insert_with(|| Box::new([0; WORDS]));
        page[(at % PAGE / 8) as usize] = word;
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_freed_is_the_next_allocated() {
        let mut heap = Heap::new(2048);
        let (a, b) = (heap.alloc(Slab::Data), heap.alloc(Slab::Data));
        assert_eq!(b - a, 2048);
        heap.free(Slab::Data, a);
        heap.free(Slab::Data, b);
        assert_eq!((heap.alloc(Slab::Data), heap.alloc(Slab::Data)), (b, a));
        assert_ne!(heap.alloc(Slab::Header), a);
        assert_eq!(heap.live, 3);
    }

    #[test]
    fn words_are_kept_and_the_end_is_an_end() {
        let mut heap = Heap::new(2048);
        assert_eq!(heap.word(4096), 0);
        assert!(heap.set_word(8192 + 8, 5));
        assert_eq!((heap.word(8192 + 8), heap.word(8192)), (5, 0));
        assert!(!heap.set_word(LIMIT, 5));
        assert_eq!(heap.word(u64::MAX), 0);
    }
}
