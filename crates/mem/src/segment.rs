//! Blocks of memory with several users.

use core::any::Any;
use core::ops::Deref;
use core::ptr::NonNull;
use core::sync::atomic::{AtomicU32, AtomicU64};
use std::alloc::{Layout, alloc_zeroed, dealloc, handle_alloc_error};
use std::sync::Arc;

use thiserror::Error;

use crate::copy;
use crate::span::Span;

/// Why a part of a segment cannot be used.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum SegmentError {
    /// The range leaves the segment.
    #[error("the range leaves the segment")]
    OutOfBounds,
    /// The address is not aligned as the use requires.
    #[error("the address is not aligned")]
    Misaligned,
    /// The segment is mapped for reading only.
    #[error("the segment is read-only")]
    ReadOnly,
}

/// A block of zeroed memory shared by two or more users: threads, or processes that map it.
///
/// Clones are cheap and share the bytes; the memory lives as long as the last clone. Everything
/// stored in a segment is position independent, as each process maps it elsewhere. Its bytes may
/// change at any moment, so they are copied out before they are looked at; two threads that write
/// the same bytes at once leave a mix there.
#[derive(Clone)]
pub struct Segment {
    base: NonNull<u8>,
    len: usize,
    writable: bool,
    owner: Owner,
}

/// Keeps memory alive.
type Owner = Arc<dyn Any + Send + Sync>;

// SAFETY: the memory is reached only by raw copies and atomics, which any thread may do; `owner`,
// which keeps it alive, is Send and Sync itself.
unsafe impl Send for Segment {}
// SAFETY: as for Send; no method gives out a reference to bytes that are not atomic.
unsafe impl Sync for Segment {}

/// A heap allocation, freed when the last segment that refers to it is gone.
struct HeapBlock {
    start: NonNull<u8>,
    layout: Layout,
}

// SAFETY: nothing but `drop` uses the pointer.
unsafe impl Send for HeapBlock {}
// SAFETY: as for Send.
unsafe impl Sync for HeapBlock {}

impl Drop for HeapBlock {
    fn drop(&mut self) {
        // SAFETY: `start` came from `alloc_zeroed` with the same layout, and this runs once.
        unsafe { dealloc(self.start.as_ptr(), self.layout) }
    }
}

const fn heap_align(len: usize) -> usize {
    if len >= 4096 { 4096 } else { 128 }
}

/// The allocator zeroes over-aligned blocks by hand, which would touch every page; so more is asked for, to
/// be aligned here.
fn heap_layout(len: usize) -> Option<Layout> {
    Layout::from_size_align(len.checked_add(heap_align(len))?, 16).ok()
}

impl Segment {
    /// A segment on the heap, zeroed. It is aligned to 4096 bytes from that size on, otherwise to
    /// 128; pages of a large one are not touched. Aborts if memory is exhausted, as `Vec` does.
    pub fn heap(len: usize) -> Segment {
        let layout = heap_layout(len).expect("a segment is at most isize::MAX bytes");
        Self::of_heap(len, layout).unwrap_or_else(|| handle_alloc_error(layout))
    }

    /// The same, or `None` if there is not so much memory.
    pub fn try_heap(len: usize) -> Option<Segment> {
        Self::of_heap(len, heap_layout(len)?)
    }

    fn of_heap(len: usize, layout: Layout) -> Option<Segment> {
        // SAFETY: the layout's size is not zero.
        let start = NonNull::new(unsafe { alloc_zeroed(layout) })?;
        let align = heap_align(len);
        let skip = start.addr().get().wrapping_neg() & (align - 1);
        // SAFETY: `skip < align`, so the `len` bytes from there lie within the allocation.
        let base = unsafe { start.add(skip) };
        Some(Segment { base, len, writable: true, owner: Arc::new(HeapBlock { start, layout }) })
    }

    /// A segment over memory that something else mapped. For memory that is to hold rings, `base`
    /// should be page aligned and zeroed.
    ///
    /// # Safety
    ///
    /// Until `owner` is dropped, `base` is valid for reads and writes of `len` bytes (at most
    /// `isize::MAX`) from every thread, and no Rust reference to them exists other than to atomics.
    /// Other processes may change the bytes at any time.
    pub unsafe fn from_raw(
        base: NonNull<u8>,
        len: usize,
        owner: Arc<dyn Any + Send + Sync>,
    ) -> Segment {
        Segment { base, len, writable: true, owner }
    }

    /// As [`from_raw`](Segment::from_raw), for memory that is mapped for reading only.
    ///
    /// # Safety
    ///
    /// As [`from_raw`](Segment::from_raw), without writes.
    pub unsafe fn from_raw_read_only(
        base: NonNull<u8>,
        len: usize,
        owner: Arc<dyn Any + Send + Sync>,
    ) -> Segment {
        Segment { base, len, writable: false, owner }
    }

    /// Bytes in the segment.
    pub fn len(&self) -> usize {
        self.len
    }

    /// True for a segment of no bytes.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// False if the memory is mapped for reading only.
    pub fn is_writable(&self) -> bool {
        self.writable
    }

    /// The address of the first byte in this process.
    pub fn addr(&self) -> usize {
        self.base.as_ptr().expose_provenance()
    }

    /// The part of `len` bytes at `offset`, as a segment that keeps the whole memory alive.
    pub fn slice(&self, offset: usize, len: usize) -> Result<Segment, SegmentError> {
        let base = self.part(offset, len)?;
        Ok(Segment { base, len, writable: self.writable, owner: Arc::clone(&self.owner) })
    }

    /// The part of `len` bytes at `offset` as a span.
    pub fn span(&self, offset: usize, len: usize) -> Result<Span<'_>, SegmentError> {
        let base = self.part(offset, len)?;
        // SAFETY: `part` checked the bounds; `owner` keeps the memory valid while `self` is
        // borrowed, by the promise made in `from_raw` or by `HeapBlock`.
        Ok(unsafe { Span::new(base.as_ptr(), len, self.writable) })
    }

    /// Copies out `out.len()` bytes from `offset`.
    pub fn read(&self, offset: usize, out: &mut [u8]) -> Result<(), SegmentError> {
        let base = self.part(offset, out.len())?;
        // SAFETY: `part` checked the bounds; `out` is borrowed exclusively.
        unsafe { copy::load(base.as_ptr(), out.as_mut_ptr(), out.len()) }
        Ok(())
    }

    /// Copies `bytes` in at `offset`, the last aligned word last, as spans do.
    pub fn write(&self, offset: usize, bytes: &[u8]) -> Result<(), SegmentError> {
        let base = self.part(offset, bytes.len())?;
        if !self.writable {
            return Err(SegmentError::ReadOnly);
        }
        // SAFETY: `part` checked the bounds and the memory is writable; `bytes` is a live borrow,
        // and no Rust reference to a segment's bytes exists.
        unsafe { copy::store(bytes.as_ptr(), base.as_ptr(), bytes.len()) }
        Ok(())
    }

    /// Copies `len` bytes in at `offset` from memory of this process, in the order of a [`Span`]'s copies.
    ///
    /// # Errors
    /// They leave the segment, or it is read-only.
    ///
    /// # Safety
    ///
    /// `from` is valid for reads of `len` bytes. Others may change them meanwhile.
    #[inline]
    pub unsafe fn store_from(
        &self,
        offset: usize,
        from: usize,
        len: usize,
    ) -> Result<(), SegmentError> {
        let base = self.part(offset, len)?;
        if !self.writable {
            return Err(SegmentError::ReadOnly);
        }
        let from = core::ptr::with_exposed_provenance(from);
        // SAFETY: `part` checked the bounds and the memory is writable; the caller vouches for `from`.
        unsafe { copy::store_overlapping(from, base.as_ptr(), len) }
        Ok(())
    }

    /// Copies `len` bytes out from `offset` to memory of this process, in the order of a [`Span`]'s copies.
    ///
    /// # Errors
    /// They leave the segment.
    ///
    /// # Safety
    ///
    /// `to` is valid for writes of `len` bytes, and no Rust reference to them is alive other than to atomics.
    #[inline]
    pub unsafe fn load_to(&self, offset: usize, to: usize, len: usize) -> Result<(), SegmentError> {
        let base = self.part(offset, len)?;
        let to = core::ptr::with_exposed_provenance_mut(to);
        // SAFETY: `part` checked the bounds; the caller vouches for `to`.
        unsafe { copy::store_overlapping(base.as_ptr(), to, len) }
        Ok(())
    }

    /// Zeroes the whole segment (touching every page), for a block that had another user before.
    pub fn zero(&self) -> Result<(), SegmentError> {
        if !self.writable {
            return Err(SegmentError::ReadOnly);
        }
        // SAFETY: the memory is writable and valid for `len` bytes.
        unsafe { self.base.as_ptr().write_bytes(0, self.len) }
        Ok(())
    }

    /// An atomic word of 4 bytes at `offset`, in native byte order. Refused in a read-only segment.
    pub fn u32_at(&self, offset: usize) -> Result<Shared<AtomicU32>, SegmentError> {
        self.shared(offset)
    }

    /// An atomic word of 8 bytes at `offset`, in native byte order. Refused in a read-only segment.
    pub fn u64_at(&self, offset: usize) -> Result<Shared<AtomicU64>, SegmentError> {
        self.shared(offset)
    }

    /// What the atomic word of 4 bytes at `offset` holds at this moment, also of a read-only segment.
    #[inline]
    pub fn load_u32(&self, offset: usize) -> Result<u32, SegmentError> {
        let base = self.part(offset, size_of::<u32>())?;
        if base.addr().get() & 3 != 0 {
            return Err(SegmentError::Misaligned);
        }
        // SAFETY: an aligned word of the segment's memory, which lives as long as this; others that know it
        // use atomic operations too, and a plain load of a word that may only be read is allowed.
        let word = unsafe { base.cast::<AtomicU32>().as_ref() };
        Ok(word.load(core::sync::atomic::Ordering::Relaxed))
    }

    /// `count` (not zero) atomic words of 8 bytes from `offset`. Those of a read-only segment must
    /// only be loaded.
    pub(crate) fn words(&self, offset: usize, count: usize) -> Result<Words, SegmentError> {
        let len = count.checked_mul(8).ok_or(SegmentError::OutOfBounds)?;
        let base = self.part(offset, len)?;
        if count == 0 {
            return Err(SegmentError::OutOfBounds);
        }
        if base.addr().get() & 7 != 0 {
            return Err(SegmentError::Misaligned);
        }
        Ok(Words { base: base.cast(), count, keep: self.clone() })
    }

    fn shared<A: Atomic>(&self, offset: usize) -> Result<Shared<A>, SegmentError> {
        let base = self.part(offset, size_of::<A>())?;
        if base.addr().get() & (size_of::<A>() - 1) != 0 {
            return Err(SegmentError::Misaligned);
        }
        if !self.writable {
            return Err(SegmentError::ReadOnly);
        }
        Ok(Shared { word: base.cast(), owner: Arc::clone(&self.owner) })
    }

    fn part(&self, offset: usize, len: usize) -> Result<NonNull<u8>, SegmentError> {
        if offset > self.len || len > self.len - offset {
            return Err(SegmentError::OutOfBounds);
        }
        // SAFETY: `offset <= self.len`, so the result points into or just past the memory.
        Ok(unsafe { self.base.add(offset) })
    }
}

impl core::fmt::Debug for Segment {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.debug_struct("Segment").field("len", &self.len).field("writable", &self.writable).finish()
    }
}

mod sealed {
    pub trait Sealed {}
    impl Sealed for core::sync::atomic::AtomicU32 {}
    impl Sealed for core::sync::atomic::AtomicU64 {}
}

/// The atomic words that a segment can hold.
pub trait Atomic: sealed::Sealed {}
impl Atomic for AtomicU32 {}
impl Atomic for AtomicU64 {}

/// An atomic word inside a segment, which it keeps alive.
pub struct Shared<A: Atomic> {
    word: NonNull<A>,
    /// Of the memory. Channels have dozens of words each, and there is one for each queue pair.
    owner: Owner,
}

impl<A: Atomic> Clone for Shared<A> {
    fn clone(&self) -> Shared<A> {
        Shared { word: self.word, owner: Arc::clone(&self.owner) }
    }
}

// SAFETY: it gives out nothing but `&A`, and `A` is Sync; `owner` is Send and Sync.
unsafe impl<A: Atomic + Sync> Send for Shared<A> {}
// SAFETY: as for Send.
unsafe impl<A: Atomic + Sync> Sync for Shared<A> {}

impl<A: Atomic> Deref for Shared<A> {
    type Target = A;

    #[inline]
    fn deref(&self) -> &A {
        // SAFETY: `shared` checked bounds and alignment; `owner` keeps the memory valid; references
        // to atomics may be shared with whoever else changes the word.
        unsafe { self.word.as_ref() }
    }
}

impl<A: Atomic> core::fmt::Debug for Shared<A> {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.write_str("Shared")
    }
}

/// An array of 8-byte atomic words inside a segment, which it keeps alive.
#[derive(Clone)]
pub(crate) struct Words {
    base: NonNull<AtomicU64>,
    count: usize,
    keep: Segment,
}

impl core::fmt::Debug for Words {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.debug_struct("Words").field("count", &self.count).finish()
    }
}

// SAFETY: it gives out nothing but `&AtomicU64` and spans; `keep` is Send and Sync.
unsafe impl Send for Words {}
// SAFETY: as for Send.
unsafe impl Sync for Words {}

impl Words {
    /// The word at `index`, or the last one where it is too large: rings mask their indexes, so
    /// that never happens, and a bug cannot become an access outside.
    #[inline]
    pub(crate) fn at(&self, index: usize) -> &AtomicU64 {
        let index = index.min(self.count - 1);
        // SAFETY: `index < count`, and `words` checked bounds and alignment of that many words;
        // `keep` keeps them valid.
        unsafe { self.base.add(index).as_ref() }
    }

    /// The `N` words from `index`, or the last ones where it is too large, as for [`at`](Words::at). Panics
    /// if there are not so many at all.
    #[inline(always)]
    #[track_caller]
    pub(crate) fn row<const N: usize>(&self, index: usize) -> &[AtomicU64; N] {
        assert!(N <= self.count, "fewer words than a row");
        let index = index.min(self.count - N);
        // SAFETY: `index + N <= count`, and `words` checked bounds and alignment of that many words; `keep`
        // keeps them valid.
        unsafe { self.base.add(index).cast().as_ref() }
    }

    /// Has the processor fetch the cache line of a word before it is needed; with `write`, in order to write
    /// to it, which takes the line from whoever has it.
    #[inline]
    pub(crate) fn prefetch(&self, index: usize, write: bool) {
        let word: *const AtomicU64 = self.at(index);
        copy::prefetch(word.addr(), write);
    }

    /// The bytes of `count` words from `index` as a span.
    #[inline]
    #[track_caller]
    pub(crate) fn span(&self, index: usize, count: usize) -> Span<'_> {
        assert!(index <= self.count && count <= self.count - index, "words out of range");
        // SAFETY: the range was checked; `keep` keeps the memory valid while `self` is borrowed.
        unsafe {
            Span::new(self.base.add(index).cast::<u8>().as_ptr(), count * 8, self.keep.writable)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use core::sync::atomic::Ordering;

    #[test]
    fn more_than_there_is_is_refused() {
        assert!(
            [usize::MAX, isize::MAX as usize, 1 << 60]
                .map(Segment::try_heap)
                .iter()
                .all(Option::is_none)
        );
        assert_eq!(Segment::try_heap(4096).unwrap().addr() % 4096, 0);
    }

    #[test]
    fn clones_and_slices_share_bytes() {
        let segment = Segment::heap(8192);
        assert_eq!(segment.addr() % 4096, 0);
        let slice = segment.slice(4096, 100).unwrap();
        slice.write(98, &[7, 8]).unwrap();
        let mut out = [0; 4];
        segment.clone().read(4096 + 97, &mut out).unwrap();
        assert_eq!(out, [0, 7, 8, 0]);
        assert_eq!(slice.write(99, &[1, 2]), Err(SegmentError::OutOfBounds));
        assert_eq!(slice.slice(101, 0).err(), Some(SegmentError::OutOfBounds));
        assert!(slice.slice(100, 0).unwrap().is_empty());
    }

    #[test]
    fn a_row_never_leaves_its_words() {
        let segment = Segment::heap(64);
        let words = segment.words(8, 4).unwrap();
        segment.u64_at(8 + 16).unwrap().store(7, Ordering::Relaxed);
        for index in [2, 3, usize::MAX] {
            assert_eq!(words.row::<2>(index)[0].load(Ordering::Relaxed), 7);
        }
        assert_eq!(words.row::<4>(0)[2].load(Ordering::Relaxed), 7);
    }

    #[test]
    #[should_panic(expected = "fewer words than a row")]
    fn a_row_of_more_than_there_is_is_refused() {
        Segment::heap(64).words(0, 4).unwrap().row::<5>(0);
    }

    #[test]
    fn atomic_words_are_checked_and_outlive_the_segment() {
        let segment = Segment::heap(64);
        assert_eq!(segment.u64_at(60).err(), Some(SegmentError::OutOfBounds));
        assert_eq!(segment.u64_at(4).err(), Some(SegmentError::Misaligned));
        assert_eq!(segment.u64_at(usize::MAX).err(), Some(SegmentError::OutOfBounds));
        let word = segment.u32_at(60).unwrap();
        let again = segment.u32_at(60).unwrap();
        drop(segment);
        word.store(5, Ordering::Relaxed);
        assert_eq!(again.load(Ordering::Relaxed), 5);
    }

    #[test]
    fn read_only_segments_refuse_writes() {
        let memory = Segment::heap(64);
        let base = NonNull::new(core::ptr::with_exposed_provenance_mut(memory.addr())).unwrap();
        // SAFETY: `memory` is the owner, and keeps its 64 bytes alive.
        let view = unsafe { Segment::from_raw_read_only(base, 64, Arc::new(memory.clone())) };
        memory.write(3, &[9]).unwrap();
        let mut out = [0];
        view.read(3, &mut out).unwrap();
        assert_eq!(out, [9]);
        assert_eq!(view.write(0, &[1]), Err(SegmentError::ReadOnly));
        assert_eq!(view.zero(), Err(SegmentError::ReadOnly));
        assert_eq!(view.u32_at(0).err(), Some(SegmentError::ReadOnly));
        assert!(!view.span(0, 8).unwrap().is_writable());
    }
}
