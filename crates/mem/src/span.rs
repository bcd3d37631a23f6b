//! Checked ranges of shared memory.

use core::marker::PhantomData;
use core::sync::atomic::{AtomicU64, Ordering};

use crate::copy;

/// A range of registered or shared memory whose bounds and rights have been checked.
///
/// It borrows the table (or segment) that it came from, so the memory cannot be deregistered while
/// it lives. Its bytes are shared with the application: they can be copied, never borrowed. Copies
/// into it store the last aligned word last, and up to 64 bytes ascending with one store for each
/// aligned 8-byte word, so that a program which polls the last byte sees a whole message.
///
/// Offsets and lengths that a caller passes are checked by assertions: what a peer says is checked
/// when the span is made, by [`Regions::local`](crate::Regions::local),
/// [`Regions::remote`](crate::Regions::remote) or [`Span::get`].
#[derive(Clone, Copy)]
pub struct Span<'a> {
    ptr: *mut u8,
    len: usize,
    writable: bool,
    borrow: PhantomData<&'a ()>,
}

impl<'a> Span<'a> {
    /// The span of no bytes.
    pub const EMPTY: Span<'static> = Span {
        ptr: core::ptr::NonNull::<u64>::dangling().as_ptr().cast(),
        len: 0,
        writable: true,
        borrow: PhantomData,
    };

    /// Makes a span.
    ///
    /// # Safety
    ///
    /// For `'a`, `ptr` is valid for reads of `len` bytes, and for writes if `writable`, and no Rust
    /// reference to them is alive, other than to atomics or `UnsafeCell`s.
    #[inline]
    pub(crate) unsafe fn new(ptr: *mut u8, len: usize, writable: bool) -> Span<'a> {
        Span { ptr, len, writable, borrow: PhantomData }
    }

    /// Bytes in the span.
    #[inline]
    pub fn len(&self) -> usize {
        self.len
    }

    /// True for a span of no bytes.
    #[inline]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// True if the span was asked for writing, and so may be written.
    #[inline]
    pub fn is_writable(&self) -> bool {
        self.writable
    }

    /// The part of `len` bytes at `offset`, or none if it leaves the span.
    #[inline]
    pub fn get(&self, offset: usize, len: usize) -> Option<Span<'a>> {
        if offset > self.len || len > self.len - offset {
            return None;
        }
        // SAFETY: `offset <= self.len`, so the result points into or just past the span.
        let ptr = unsafe { self.ptr.add(offset) };
        Some(Span { ptr, len, ..*self })
    }

    /// The part of `len` bytes at `offset`. Panics if it leaves the span.
    #[inline(always)]
    #[track_caller]
    pub fn sub(&self, offset: usize, len: usize) -> Span<'a> {
        match self.get(offset, len) {
            Some(part) => part,
            None => leaves(self.len, offset, len),
        }
    }

    /// Copies out `out.len()` bytes from `offset`. Panics if they leave the span.
    #[inline]
    #[track_caller]
    pub fn read_into(&self, offset: usize, out: &mut [u8]) {
        let part = self.sub(offset, out.len());
        // SAFETY: `part` is valid for reads of its length by the promise made in `Span::new`; `out`
        // is borrowed exclusively.
        unsafe { copy::load(part.ptr, out.as_mut_ptr(), part.len) }
    }

    /// Copies `bytes` in at `offset`. Panics if they leave the span, or if it is not writable.
    #[inline]
    #[track_caller]
    pub fn write_from(&self, offset: usize, bytes: &[u8]) {
        let part = self.sub(offset, bytes.len()).assert_writable();
        // SAFETY: `part` is writable and valid for its length by the promise made in `Span::new`;
        // `bytes` is a live borrow, which that promise says cannot overlap the span.
        unsafe { copy::store(bytes.as_ptr(), part.ptr, part.len) }
    }

    /// Copies the whole span to the start of `to`; the two may overlap. Panics if `to` is shorter
    /// or not writable.
    #[inline(always)]
    #[track_caller]
    pub fn copy_to(&self, to: &Span<'_>) {
        let to = to.sub(0, self.len).assert_writable();
        // SAFETY: both are valid for `self.len` bytes, and `to` is writable, by the promise made in
        // `Span::new`.
        unsafe { copy::store_overlapping(self.ptr, to.ptr, self.len) }
    }

    /// As [`write_from`](Span::write_from), in any order: for bytes that nobody looks at before he is told of
    /// them, as those of a slot.
    #[inline(always)]
    #[track_caller]
    pub fn deliver_from(&self, offset: usize, bytes: &[u8]) {
        let part = self.sub(offset, bytes.len()).assert_writable();
        // SAFETY: as in `write_from`.
        unsafe { copy::store_unordered(bytes.as_ptr(), part.ptr, part.len) }
    }

    /// As [`copy_to`](Span::copy_to), in any order: for bytes that nobody looks at before he is told of them,
    /// as those of a receive.
    #[inline(always)]
    #[track_caller]
    pub fn deliver_to(&self, to: &Span<'_>) {
        let to = to.sub(0, self.len).assert_writable();
        // SAFETY: as in `copy_to`.
        unsafe { copy::store_unordered(self.ptr, to.ptr, self.len) }
    }

    /// Adds `add` to the word, wrapping, and returns what it was: the FetchAdd of InfiniBand and
    /// RFC 7306. It is atomic for all threads and processes. Panics unless the span is 8 aligned
    /// bytes and writable, as one checked for `REMOTE_ATOMIC` is.
    #[inline]
    #[track_caller]
    pub fn fetch_add(&self, add: u64) -> u64 {
        self.word().fetch_add(add, Ordering::AcqRel)
    }

    /// Stores `swap` if the word equals `compare`, and returns what it was. Panics as
    /// [`fetch_add`](Span::fetch_add) does.
    #[inline]
    #[track_caller]
    pub fn compare_swap(&self, compare: u64, swap: u64) -> u64 {
        match self.word().compare_exchange(compare, swap, Ordering::AcqRel, Ordering::Acquire) {
            Ok(was) | Err(was) => was,
        }
    }

    /// Address and length, for system calls (iovecs, process_vm_*).
    #[inline]
    pub fn as_raw(&self) -> (usize, usize) {
        (self.ptr.expose_provenance(), self.len)
    }

    #[inline]
    #[track_caller]
    fn assert_writable(self) -> Span<'a> {
        assert!(self.writable || self.len == 0, "the span was not asked for writing");
        self
    }

    #[inline]
    #[track_caller]
    fn word(&self) -> &'a AtomicU64 {
        assert!(self.len == 8 && self.ptr.addr() & 7 == 0, "not 8 aligned bytes");
        let word = self.assert_writable();
        // SAFETY: 8 writable bytes, aligned, valid for 'a. The application may access them without
        // atomics meanwhile, as it may on every adapter: then the outcome is one of the values.
        unsafe { AtomicU64::from_ptr(word.ptr.cast()) }
    }
}

/// The range is not inside the span.
#[cold]
#[track_caller]
fn leaves(span: usize, offset: usize, len: usize) -> ! {
    panic!("{len} bytes at {offset} leave a span of {span}")
}

impl core::fmt::Debug for Span<'_> {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.debug_struct("Span").field("len", &self.len).field("writable", &self.writable).finish()
    }
}
