//! The memory of a connection: the ring that the peer writes to, its table of mappings behind it, and
//! the bytes that this end has under way; one mapping, registered as one region.

use std::ptr;

use quipu_abi_types::*;
use quipu_cabi::Errno;

use super::wire::Mapping;
use crate::verbs::{pointer, verbs};

/// Registered memory, all zero at first.
pub(crate) struct Memory {
    base: *mut u8,
    len: usize,
    mr: *mut ibv_mr,
}

// SAFETY: the memory is reached by copying alone, and whoever holds the `Memory` orders that.
unsafe impl Send for Memory {}

impl Memory {
    /// Memory of `len` bytes, at least one, that the peer may write to.
    ///
    /// # Safety
    ///
    /// `pd` is a protection domain that outlives it.
    pub(crate) unsafe fn new(pd: *mut ibv_pd, len: usize) -> Result<Self, Errno> {
        let (rights, kind) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE);
        let kind = kind | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
        // SAFETY: mmap(2) of fresh memory.
        let base = unsafe { libc::mmap(ptr::null_mut(), len, rights, kind, -1, 0) };
        if base == libc::MAP_FAILED {
            return Err(Errno::last());
        }
        let mut memory = Self { base: base.cast(), len, mr: ptr::null_mut() };
        let access = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE;
        // SAFETY: passed on from the caller; the memory is mapped until `drop`.
        memory.mr = pointer(unsafe { (verbs()?.reg_mr)(pd, base, len, access as i32) })?;
        Ok(memory)
    }

    pub(crate) fn addr(&self) -> u64 {
        self.base as u64
    }

    pub(crate) fn keys(&self) -> (u32, u32) {
        // SAFETY: the region is this one's, until `drop`.
        unsafe { ((*self.mr).lkey, (*self.mr).rkey) }
    }

    /// Copies from the memory to the program's.
    ///
    /// # Safety
    ///
    /// `to` has room for `len` bytes.
    pub(crate) unsafe fn read(&self, at: usize, to: *mut u8, len: usize) {
        assert!(at <= self.len && len <= self.len - at, "bounds of the connection's memory");
        // SAFETY: the bytes are within the mapping (asserted); the peer may change them meanwhile,
        // which harms nobody but the peer's own data. Passed on from the caller.
        unsafe { ptr::copy_nonoverlapping(self.base.add(at), to, len) }
    }

    /// Copies from the program's memory to this one.
    ///
    /// # Safety
    ///
    /// `from` has `len` bytes.
    pub(crate) unsafe fn write(&self, at: usize, from: *const u8, len: usize) {
        assert!(at <= self.len && len <= self.len - at, "bounds of the connection's memory");
        // SAFETY: as in `read`.
        unsafe { ptr::copy_nonoverlapping(from, self.base.add(at), len) }
    }

    /// An entry of the table that begins at `table`, as the peer has written it.
    pub(crate) fn mapping(&self, table: usize, index: usize) -> Mapping {
        let mut bytes = [0; Mapping::LEN];
        // SAFETY: the array has room.
        unsafe { self.read(table + index * Mapping::LEN, bytes.as_mut_ptr(), Mapping::LEN) };
        Mapping::decode(&bytes)
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        if !self.mr.is_null()
            && let Ok(verbs) = verbs()
        {
            // SAFETY: it came from reg_mr. Nothing accesses the memory once this returns.
            unsafe { (verbs.dereg_mr)(self.mr) };
        }
        // SAFETY: it came from mmap(2) with this length.
        unsafe { libc::munmap(self.base.cast(), self.len) };
    }
}
