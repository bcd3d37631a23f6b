//! The memory that a socket shares with the kernel: frames, and rings of frames (AF_XDP, Linux Documentation,
//! networking/af_xdp).
//!
//! A ring has one producer and one consumer; each writes its own number, which counts up for ever.

use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::atomic::{AtomicU32, Ordering};

use super::super::mapping::Mapping;

/// Frames of one size, which go to and fro between us and the kernel by their offsets.
pub(super) struct Frames {
    mapping: Mapping,
    size: usize,
}

impl Frames {
    pub(super) fn new(count: usize, size: usize) -> io::Result<Self> {
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
        Ok(Self { mapping: Mapping::new(count * size, flags, -1, 0)?, size })
    }

    /// Where they begin, and how long they are.
    pub(super) fn area(&self) -> (u64, u64) {
        (self.mapping.start() as u64, self.mapping.len() as u64)
    }

    /// The first octet of the frame that an offset is in.
    pub(super) fn base(&self, offset: u64) -> u64 {
        offset - offset % self.size as u64
    }

    /// The octets of a frame from `offset` on. `None` if they are not inside of one frame.
    ///
    /// # Safety
    ///
    /// The frame is ours now: the kernel has given it back, and has not been given it again.
    pub(super) unsafe fn bytes(&mut self, offset: u64, len: usize) -> Option<&mut [u8]> {
        let start = usize::try_from(offset).ok().filter(|start| *start < self.mapping.len())?;
        if start % self.size + len > self.size {
            return None;
        }
        // SAFETY: the range lies in the mapping; by the promise of the caller the kernel leaves it alone, and
        // the result borrows the only owner.
        Some(unsafe { std::slice::from_raw_parts_mut(self.mapping.start().add(start), len) })
    }
}

/// Where the parts of a ring are in its mapping.
pub(super) type Offsets = libc::xdp_ring_offset;

/// A ring of entries of the type `T`, of which we are the producer or the consumer.
pub(super) struct Ring<T> {
    mapping: Mapping,
    offsets: Offsets,
    mask: u32,
    entries: std::marker::PhantomData<T>,
}

impl<T: Copy> Ring<T> {
    /// Maps a ring of `count` entries, a power of two, that was made for the socket `fd`.
    pub(super) fn map(
        fd: &OwnedFd,
        offsets: Offsets,
        count: u32,
        page_offset: u64,
    ) -> io::Result<Self> {
        let len = offsets.desc as usize + count as usize * size_of::<T>();
        let flags = libc::MAP_SHARED | libc::MAP_POPULATE;
        let mapping = Mapping::new(len, flags, fd.as_raw_fd(), page_offset as libc::off_t)?;
        let words = [offsets.producer, offsets.consumer, offsets.flags];
        // As the kernel laid it out; everything below relies on it.
        let fits = |at: u64| at.is_multiple_of(4) && at + 4 <= offsets.desc;
        if !words.into_iter().all(fits) || !offsets.desc.is_multiple_of(8) {
            return Err(io::ErrorKind::InvalidData.into());
        }
        Ok(Self { mapping, offsets, mask: count - 1, entries: std::marker::PhantomData })
    }

    fn word(&self, at: u64) -> &AtomicU32 {
        // SAFETY: the word lies in the mapping and is aligned, as `map` has seen; both sides use it
        // atomically.
        unsafe { AtomicU32::from_ptr(self.mapping.start().add(at as usize).cast()) }
    }

    fn producer(&self) -> &AtomicU32 {
        self.word(self.offsets.producer)
    }

    fn consumer(&self) -> &AtomicU32 {
        self.word(self.offsets.consumer)
    }

    fn entry(&self, number: u32) -> *mut T {
        let index = (number & self.mask) as usize;
        // SAFETY: the mask keeps the index below the number of entries, all of which lie in the mapping.
        unsafe { self.mapping.start().add(self.offsets.desc as usize).cast::<T>().add(index) }
    }

    /// Whether the kernel wants to be told of what is new.
    pub(super) fn needs_wakeup(&self) -> bool {
        self.word(self.offsets.flags).load(Ordering::Relaxed) & libc::XDP_RING_NEED_WAKEUP != 0
    }

    /// How many entries the consumer has taken so far.
    pub(super) fn taken(&self) -> u32 {
        self.consumer().load(Ordering::Acquire)
    }

    /// As producer: adds an entry; false if the ring is full.
    pub(super) fn push(&mut self, entry: T) -> bool {
        let produced = self.producer().load(Ordering::Relaxed);
        if produced.wrapping_sub(self.taken()) > self.mask {
            return false;
        }
        // SAFETY: the consumer has taken what was here, and looks again only after the store below.
        unsafe { self.entry(produced).write(entry) };
        self.producer().store(produced.wrapping_add(1), Ordering::Release);
        true
    }

    /// As consumer: takes the first entry, if there is one.
    pub(super) fn pop(&mut self) -> Option<T> {
        let consumed = self.consumer().load(Ordering::Relaxed);
        if self.producer().load(Ordering::Acquire) == consumed {
            return None;
        }
        // SAFETY: the producer wrote this entry before it counted it, and writes it again only after the
        // store below. Any bytes are a valid entry.
        let entry = unsafe { self.entry(consumed).read() };
        self.consumer().store(consumed.wrapping_add(1), Ordering::Release);
        Some(entry)
    }
}
