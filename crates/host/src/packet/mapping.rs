//! Memory that is shared with the kernel.

use std::io;
use std::ptr::NonNull;

use libc::c_int;

/// A mapping, until it is dropped.
pub(super) struct Mapping {
    start: NonNull<u8>,
    len: usize,
}

// SAFETY: the memory belongs to this value alone, and to the kernel.
unsafe impl Send for Mapping {}

impl Mapping {
    pub(super) fn new(
        len: usize,
        flags: c_int,
        fd: c_int,
        offset: libc::off_t,
    ) -> io::Result<Self> {
        let protection = libc::PROT_READ | libc::PROT_WRITE;
        // SAFETY: a new mapping at an address of the kernel's choice.
        let start = unsafe { libc::mmap(std::ptr::null_mut(), len, protection, flags, fd, offset) };
        match NonNull::new(start.cast::<u8>()) {
            Some(start) if start.as_ptr() != libc::MAP_FAILED.cast() => Ok(Self { start, len }),
            _ => Err(io::Error::last_os_error()),
        }
    }

    /// Its first octet.
    pub(super) fn start(&self) -> *mut u8 {
        self.start.as_ptr()
    }

    /// How many octets it has.
    pub(super) fn len(&self) -> usize {
        self.len
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: the mapping is ours, and whoever has pointers into it has its owner.
        unsafe { libc::munmap(self.start.as_ptr().cast(), self.len) };
    }
}
