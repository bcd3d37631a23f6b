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

/// Fills `len` bytes of memory from `offset` on with those of a file from `place` on.
///
/// # Errors
///
/// As [`read_to_segment`]; and the file ends before (`UnexpectedEof`).
pub fn fill_segment_at(
    file: BorrowedFd<'_>,
    place: u64,
    memory: &Segment,
    offset: usize,
    len: usize,
) -> io::Result<()> {
    let data = range(memory, offset, len)?;
    if !memory.is_writable() {
        return Err(invalid(&quipu_nic::mem::SegmentError::ReadOnly));
    }
    whole(place, len, io::ErrorKind::UnexpectedEof, |done, at| {
        // SAFETY: the kernel writes to the rest of the range, which lives, may be written, and has no
        // references to it.
        unsafe { libc::pread(file.as_raw_fd(), data.byte_add(done), len - done, at) }
    })
}

/// Writes `len` bytes of memory from `offset` on to a file, from `place` on.
///
/// # Errors
///
/// As [`write_from_segment`]; and the file takes no more (`WriteZero`).
pub fn write_segment_at(
    file: BorrowedFd<'_>,
    place: u64,
    memory: &Segment,
    offset: usize,
    len: usize,
) -> io::Result<()> {
    let data = range(memory, offset, len)?;
    whole(place, len, io::ErrorKind::WriteZero, |done, at| {
        // SAFETY: the kernel reads the rest of the range, which lives.
        unsafe { libc::pwrite(file.as_raw_fd(), data.byte_add(done), len - done, at) }
    })
}

/// Repeats a call, which gets what is done and where the rest begins in the file, until `len` bytes are done.
fn whole(
    place: u64,
    len: usize,
    end: io::ErrorKind,
    mut call: impl FnMut(usize, libc::off_t) -> libc::ssize_t,
) -> io::Result<()> {
    let mut done = 0;
    while done < len {
        let at = place.checked_add(done as u64).and_then(|at| at.try_into().ok());
        let at = at.ok_or(io::ErrorKind::InvalidInput)?;
        match check(call(done, at)) {
            Ok(0) => return Err(end.into()),
            Ok(count) => done += count,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
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
    fn bytes_go_between_places_of_a_file_and_memory() {
        // SAFETY: the name is a string with an end.
        let file = unsafe { libc::memfd_create(c"disk".as_ptr(), libc::MFD_CLOEXEC) };
        // SAFETY: the descriptor is new and nobody else's.
        let file = unsafe { <std::os::fd::OwnedFd as std::os::fd::FromRawFd>::from_raw_fd(file) };
        let memory = Segment::heap(64);
        memory.write(2, b"a string").unwrap();
        write_segment_at(file.as_fd(), 100, &memory, 4, 6).unwrap();
        fill_segment_at(file.as_fd(), 101, &memory, 40, 5).unwrap();
        let mut bytes = [0; 5];
        memory.read(40, &mut bytes).unwrap();
        assert_eq!(&bytes, b"tring");
        let error = fill_segment_at(file.as_fd(), 101, &memory, 40, 6).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::UnexpectedEof);
        let error = write_segment_at(file.as_fd(), u64::MAX, &memory, 0, 1).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::InvalidInput);
        for (offset, len) in [(61, 4), (usize::MAX, 2)] {
            let error = fill_segment_at(file.as_fd(), 0, &memory, offset, len).unwrap_err();
            assert_eq!(error.kind(), io::ErrorKind::InvalidInput);
            let error = write_segment_at(file.as_fd(), 0, &memory, offset, len).unwrap_err();
            assert_eq!(error.kind(), io::ErrorKind::InvalidInput);
        }
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
