//! What stands behind null regions: zeros to read, and a place to write to that nobody reads.
//!
//! Both are as long as one access can be, 4 GiB of address space, and take next to no memory: reads of
//! pages that nobody wrote find the kernel's one page of zeros, and the place for writes is a small file
//! mapped over and over.

use std::io;
use std::os::fd::AsRawFd;
use std::ptr;

use libc::{c_int, c_void};
use quipu_mem::{NULL_LEN, Nothing};

use crate::sys;

/// Bytes of the file that is written to. The mappings of it are limited in number, so not too few.
const SINK_BYTES: usize = 16 << 20;
const LEN: usize = NULL_LEN as usize;

/// Address space that is given back if it is not needed after all.
struct Reserved(*mut c_void);

impl Drop for Reserved {
    fn drop(&mut self) {
        // SAFETY: the range was mapped by `reserve`, and nobody else knows of it.
        unsafe { libc::munmap(self.0, LEN) };
    }
}

fn reserve(protection: c_int) -> io::Result<Reserved> {
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
    // SAFETY: a new mapping at an address of the kernel's choice overlaps nothing.
    let base = unsafe { libc::mmap(ptr::null_mut(), LEN, protection, flags, -1, 0) };
    if base == libc::MAP_FAILED { Err(io::Error::last_os_error()) } else { Ok(Reserved(base)) }
}

/// Makes both, for the life of the process.
///
/// # Errors
///
/// The kernel refuses address space or a descriptor.
pub(crate) fn nothing() -> io::Result<Nothing> {
    let zeros = reserve(libc::PROT_READ)?;
    let sink = reserve(libc::PROT_NONE)?;
    // SAFETY: the name is a zero-terminated string that outlives the call.
    let file = unsafe { libc::memfd_create(c"quipu-null".as_ptr(), libc::MFD_CLOEXEC) };
    let file = sys::adopt(file)?;
    sys::set_length(&file, SINK_BYTES as u64)?;
    let flags = libc::MAP_SHARED | libc::MAP_FIXED | libc::MAP_NORESERVE;
    let protection = libc::PROT_READ | libc::PROT_WRITE;
    for offset in (0..LEN).step_by(SINK_BYTES) {
        let at = sink.0.wrapping_byte_add(offset);
        // SAFETY: replaces a part of the range that was reserved for this, and nothing else.
        let mapped = unsafe { libc::mmap(at, SINK_BYTES, protection, flags, file.as_raw_fd(), 0) };
        if mapped == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
    }
    let addresses = (zeros.0 as usize, sink.0 as usize);
    std::mem::forget((zeros, sink));
    // SAFETY: both ranges are mapped with the rights that are asked for, are never unmapped, and no
    // reference into them is ever made. Nobody else knows of the file, so it keeps its size.
    Ok(unsafe { Nothing::new(addresses.0, addresses.1) })
}

#[cfg(test)]
mod tests {
    use super::*;
    use quipu_mem::{Regions, RegionsConfig, Sge};

    #[test]
    fn the_whole_length_of_an_access_is_there() {
        let mut regions = Regions::new(RegionsConfig::new([1; 32]));
        let key = regions.register_null(1, nothing().unwrap()).unwrap();
        let whole = [Sge { addr: 0, len: u32::MAX, lkey: key }];
        for offset in [0, (SINK_BYTES - 8) as u64, u64::from(u32::MAX) - 64] {
            regions.scatter(1, &whole, offset, &[7; 64]).unwrap();
            let mut out = [1; 64];
            regions.gather(1, &whole, offset, &mut out).unwrap();
            assert_eq!(out, [0; 64]);
        }
    }
}
