//! Memory that is mapped for programs: files that regions are made of (`ibv_reg_dmabuf_mr(3)`), which are
//! buffers of other devices that a processor can reach, and buffers of this one (`ibv_alloc_buf(3)`).

use std::mem::MaybeUninit;
use std::ptr;

use libc::{c_int, c_void};
use quipu_cabi::Errno;

/// Where an address is in its page. Files are mapped by pages of 4 KB everywhere that verbs exist.
pub(crate) const PAGE_OFFSET: u64 = 0xfff;

/// A part of a file, or memory of no file, mapped.
pub(crate) struct Mapping {
    base: *mut c_void,
    mapped: usize,
    /// Where in its first page the part begins.
    lead: u64,
}

// SAFETY: it stands for memory that only the kernel's calls and the adapter reach, by address.
unsafe impl Send for Mapping {}
// SAFETY: as above.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// Maps `length` bytes at `offset`.
    ///
    /// # Errors
    ///
    /// EINVAL if the file has not so many bytes, and what mmap(2) says: EBADF for no file, EACCES for
    /// one that was opened without the right, ENODEV and others for one that cannot be mapped.
    pub(crate) fn new(fd: c_int, offset: u64, length: usize, write: bool) -> Result<Self, Errno> {
        let lead = offset & PAGE_OFFSET;
        let end = offset.checked_add(length as u64).ok_or(Errno::EINVAL)?;
        if length == 0 || end > size(fd)? {
            return Err(Errno::EINVAL);
        }
        let start = libc::off_t::try_from(offset - lead).map_err(|_| Errno::EINVAL)?;
        let mapped = length.checked_add(lead as usize).ok_or(Errno::EINVAL)?;
        let protection = if write { libc::PROT_READ | libc::PROT_WRITE } else { libc::PROT_READ };
        let base = map(mapped, protection, libc::MAP_SHARED, (fd, start))?;
        Ok(Self { base, mapped, lead })
    }

    /// Maps `length` bytes of no file, all zero; as memory of malloc(3), a child of fork(2) has a copy.
    ///
    /// # Errors
    ///
    /// ENOMEM.
    pub(crate) fn anonymous(length: usize) -> Result<Self, Errno> {
        // An allocation of nothing is one nevertheless.
        let mapped = length.max(1);
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
        let base = map(mapped, libc::PROT_READ | libc::PROT_WRITE, flags, (-1, 0))?;
        Ok(Self { base, mapped, lead: 0 })
    }

    /// The address of the first byte.
    pub(crate) fn addr(&self) -> u64 {
        self.base as u64 + self.lead
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: mapped by this type; whoever used it is gone.
        unsafe { libc::munmap(self.base, self.mapped) };
    }
}

/// Maps `length` bytes of a file at an offset.
fn map(
    length: usize,
    protection: c_int,
    flags: c_int,
    (fd, offset): (c_int, libc::off_t),
) -> Result<*mut c_void, Errno> {
    // SAFETY: a new mapping at an address of the kernel's choice overlaps nothing.
    let base = unsafe { libc::mmap(ptr::null_mut(), length, protection, flags, fd, offset) };
    if base == libc::MAP_FAILED { Err(Errno::last()) } else { Ok(base) }
}

/// The bytes of a file.
fn size(fd: c_int) -> Result<u64, Errno> {
    let mut stat = MaybeUninit::<libc::stat>::uninit();
    // SAFETY: fstat(2) fills the structure in if it succeeds.
    let stat = unsafe {
        if libc::fstat(fd, stat.as_mut_ptr()) != 0 {
            return Err(Errno::last());
        }
        stat.assume_init()
    };
    u64::try_from(stat.st_size).map_err(|_| Errno::EINVAL)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_of_files_are_mapped_and_nothing_beyond() {
        // SAFETY: memfd_create(2) and ftruncate(2) on a file of this test.
        let fd = unsafe {
            let fd = libc::memfd_create(c"test".as_ptr(), libc::MFD_CLOEXEC);
            libc::ftruncate(fd, 10_000);
            fd
        };
        let mapping = Mapping::new(fd, 5000, 5000, true).unwrap();
        // SAFETY: the byte is inside the mapping, and only this test knows of it.
        unsafe { ptr::with_exposed_provenance_mut::<u8>(mapping.addr() as usize).write(77) };
        let mut byte = [0u8];
        // SAFETY: pread(2) into a buffer of this test.
        unsafe { libc::pread(fd, byte.as_mut_ptr().cast(), 1, 5000) };
        assert_eq!(byte, [77]);
        for (offset, length) in [(5000, 5001), (0, 0), (20_000, 1), (u64::MAX, 2)] {
            let refused = Mapping::new(fd, offset, length, true).err();
            assert_eq!(refused, Some(Errno::EINVAL), "{length} at {offset}");
        }
        assert_eq!(Mapping::new(-1, 0, 1, true).err(), Some(Errno(libc::EBADF)));
        // SAFETY: a descriptor of this test.
        unsafe { libc::close(fd) };
    }
}
