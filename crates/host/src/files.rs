//! Files that the kernel fills from registered memory, and reads into it, without a copy in between.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};

use quipu_nic::mem::Segment;

/// The address of a range, for the kernel.
fn range(memory: &Segment, offset: usize, len: usize) -> io::Result<*mut libc::c_void> {
    let span = memory.span(offset, len).map_err(|error| invalid(&error))?;
    Ok(std::ptr::with_exposed_provenance_mut(span.as_raw().0))
}

fn invalid(error: &quipu_nic::mem::SegmentError) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidInput, error.to_string())
}

fn check(outcome: libc::ssize_t) -> io::Result<usize> {
    usize::try_from(outcome).map_err(|_| io::Error::last_os_error())
}

/// Writes `head`, and then `len` bytes of memory from `offset` on, in one call: how many bytes were written.
///
/// # Errors
///
/// What the system reports, or the range leaves the memory.
pub fn write_from_segment(
    file: BorrowedFd<'_>,
    head: &[u8],
    memory: &Segment,
    offset: usize,
    len: usize,
) -> io::Result<usize> {
    let data = range(memory, offset, len)?;
    let list = [
        libc::iovec { iov_base: head.as_ptr().cast_mut().cast(), iov_len: head.len() },
        libc::iovec { iov_base: data, iov_len: len },
    ];
    // SAFETY: the kernel reads the list, `head`, and the range, all of which live.
    check(unsafe { libc::writev(file.as_raw_fd(), list.as_ptr(), list.len() as libc::c_int) })
}

/// Reads once, at most `len` bytes into memory from `offset` on: how many came.
///
/// # Errors
///
/// What the system reports, or the range leaves the memory, or that is read-only.
pub fn read_to_segment(
    file: BorrowedFd<'_>,
    memory: &Segment,
    offset: usize,
    len: usize,
) -> io::Result<usize> {
    let place = range(memory, offset, len)?;
    if !memory.is_writable() {
        return Err(invalid(&quipu_nic::mem::SegmentError::ReadOnly));
    }
    // SAFETY: the kernel writes to the range, which lives, may be written, and has no references to it.
    check(unsafe { libc::read(file.as_raw_fd(), place, len) })
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::os::fd::AsFd;
    use std::os::unix::net::UnixStream;

    use super::*;

    #[test]
    fn bytes_go_between_a_file_and_a_range_of_memory() {
        let (mut near, far) = UnixStream::pair().unwrap();
        let memory = Segment::heap(64);
        near.write_all(b"knots").unwrap();
        assert_eq!(read_to_segment(far.as_fd(), &memory, 60, 4).unwrap(), 4);
        assert_eq!(write_from_segment(far.as_fd(), b"k", &memory, 61, 3).unwrap(), 4);
        let mut bytes = [0; 4];
        near.read_exact(&mut bytes).unwrap();
        assert_eq!(&bytes, b"knot");
    }

    #[test]
    fn no_range_leaves_the_memory() {
        let (near, _far) = UnixStream::pair().unwrap();
        let memory = Segment::heap(64);
        for (offset, len) in [(61, 4), (65, 0), (usize::MAX, 2)] {
            let error = read_to_segment(near.as_fd(), &memory, offset, len).unwrap_err();
            assert_eq!(error.kind(), io::ErrorKind::InvalidInput);
            let error = write_from_segment(near.as_fd(), b"", &memory, offset, len).unwrap_err();
            assert_eq!(error.kind(), io::ErrorKind::InvalidInput);
        }
    }
}
