//! The memory that the two ends of a raised connection share.
//!
//! One page of words, then the ring of each direction. Direction 0 is that of the process that made
//! the memory. The peer may write anything here at any time: words are loaded once and checked by
//! `quipu_sockets`, octets are copied out by raw pointers and never referred to.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use libc::c_int;
use quipu_sockets::{Pieces, Receiver, Sender, Shared, Word};

use crate::iov::Cursor;
use crate::sys;

const PAGE: usize = 4096;
/// What both processes agree on: `greeting::RING_SIZES`.
pub(crate) const RING: u32 = 256 * 1024;

/// The words of one direction: those of the sender share a cache line, those of the receiver another.
#[repr(C, align(64))]
pub(crate) struct Direction {
    written: AtomicU64,
    from: AtomicU64,
    base: AtomicU64,
    unused: [u64; 5],
    read: AtomicU64,
    wish: AtomicU64,
    unused_too: [u64; 6],
}

impl Direction {
    #[inline]
    fn word(&self, word: Word) -> &AtomicU64 {
        match word {
            Word::Written => &self.written,
            Word::From => &self.from,
            Word::Base => &self.base,
            Word::Read => &self.read,
            Word::Wish => &self.wish,
        }
    }
}

impl Shared for Direction {
    #[inline]
    fn load(&self, word: Word) -> u64 {
        self.word(word).load(Ordering::SeqCst)
    }
    #[inline]
    fn store(&self, word: Word, value: u64) {
        match word {
            // Published by the swap of `Written` that follows.
            Word::From | Word::Base => self.word(word).store(value, Ordering::Release),
            _ => self.word(word).store(value, Ordering::SeqCst),
        }
    }
    #[inline]
    fn swap(&self, word: Word, old: u64, new: u64) -> bool {
        let word = self.word(word);
        word.compare_exchange(old, new, Ordering::SeqCst, Ordering::SeqCst).is_ok()
    }
    #[inline]
    fn add(&self, word: Word, value: u64) {
        self.word(word).fetch_add(value, Ordering::SeqCst);
    }
    #[inline]
    fn mask(&self, word: Word, mask: u64) {
        self.word(word).fetch_and(mask, Ordering::SeqCst);
    }
}

/// What the processes that have one end share among themselves, and show the other end.
#[repr(C, align(64))]
pub(crate) struct End {
    unused: AtomicU32,
    /// Not 0 after the last process of this end has closed the socket.
    pub(crate) closed: AtomicU32,
    /// Octets that this end has sent.
    pub(crate) sent: AtomicU64,
    /// Processor on which this end was when it last sent, and one; 0 if that is not known.
    processor: AtomicU32,
}

impl End {
    /// This thread is sending.
    #[inline]
    pub(crate) fn note_processor(&self) {
        let processor = sys::processor().wrapping_add(1).cast_unsigned();
        if self.processor.load(Ordering::Relaxed) != processor {
            self.processor.store(processor, Ordering::Relaxed);
        }
    }

    /// Whether it was last on this processor.
    #[inline]
    pub(crate) fn is_on(&self, processor: i32) -> bool {
        let own = processor.wrapping_add(1).cast_unsigned();
        own != 0 && self.processor.load(Ordering::Relaxed) == own
    }
}

#[repr(C)]
struct Header {
    directions: [Direction; 2],
    ends: [End; 2],
}

const _: () = assert!(size_of::<Header>() <= PAGE);

/// The shared memory of one connection, as one end sees it.
pub(crate) struct Map {
    at: *mut u8,
    ring: usize,
    /// Direction in which this end sends.
    own: usize,
}

// SAFETY: the memory is mapped until the map is dropped, and is only accessed by atomic words and raw
// copies.
unsafe impl Send for Map {}
// SAFETY: as above.
unsafe impl Sync for Map {}

impl Map {
    /// Octets of the memory for rings of this size.
    pub(crate) fn len(ring: u32) -> usize {
        PAGE + 2 * ring as usize
    }

    /// Maps the memory of a file, of which both ends know that it can neither shrink nor grow.
    pub(crate) fn new(file: c_int, ring: u32, made_here: bool) -> Option<Self> {
        let at = sys::map_shared(Self::len(ring), Some(file))?;
        Some(Self { at, ring: ring as usize, own: usize::from(!made_here) })
    }

    fn header(&self) -> &Header {
        // SAFETY: the mapping begins with a page, which has room for it and is aligned for it; all of it is
        // atomic, for which any value is legal, or never read.
        unsafe { &*self.at.cast::<Header>() }
    }

    /// What this end shows.
    #[inline]
    pub(crate) fn own(&self) -> &End {
        &self.header().ends[self.own]
    }

    /// What the other end shows.
    #[inline]
    pub(crate) fn peer(&self) -> &End {
        &self.header().ends[1 - self.own]
    }

    /// The direction in which this end sends.
    #[inline]
    pub(crate) fn sender(&self) -> Sender<'_, Direction> {
        Sender::new(&self.header().directions[self.own], self.ring)
    }

    /// The direction in which this end receives.
    #[inline]
    pub(crate) fn receiver(&self) -> Receiver<'_, Direction> {
        Receiver::new(&self.header().directions[1 - self.own], self.ring)
    }

    fn ring(&self, direction: usize) -> *mut u8 {
        // SAFETY: the mapping has a page and two rings.
        unsafe { self.at.add(PAGE + direction * self.ring) }
    }

    /// Copies octets of the program into the ring.
    #[inline]
    pub(crate) fn fill(&self, pieces: Pieces, from: &mut Cursor<'_>) {
        for (offset, len) in pieces.iter() {
            // SAFETY: pieces lie within the ring.
            unsafe { from.copy_out(self.ring(self.own).add(offset), len) };
        }
    }

    /// Copies octets of the ring to the program.
    #[inline]
    pub(crate) fn drain(&self, pieces: Pieces, into: &mut Cursor<'_>) {
        for (offset, len) in pieces.iter() {
            // SAFETY: pieces lie within the ring.
            unsafe { into.copy_in(self.ring(1 - self.own).add(offset), len) };
        }
    }

    /// Octets of each ring.
    pub(crate) fn size(&self) -> usize {
        self.ring
    }

    /// Gives the memory of the ring in which this end sends back to the system. Nothing is in it, and nobody
    /// fills it meanwhile.
    pub(crate) fn forget_sent(&self) {
        sys::forget(self.ring(self.own), self.ring);
    }

    /// Octets of the ring in which this end sends, for the kernel to read or write. The second number is
    /// the length of all.
    pub(crate) fn vectors(&self, pieces: Pieces) -> ([libc::iovec; 2], usize) {
        let mut vectors = [libc::iovec { iov_base: std::ptr::null_mut(), iov_len: 0 }; 2];
        for (vector, (offset, len)) in vectors.iter_mut().zip(pieces.iter()) {
            vector.iov_base = self.ring(self.own).wrapping_add(offset).cast();
            vector.iov_len = len;
        }
        (vectors, pieces.len)
    }
}

impl Drop for Map {
    fn drop(&mut self) {
        sys::unmap(self.at, PAGE + 2 * self.ring);
    }
}
