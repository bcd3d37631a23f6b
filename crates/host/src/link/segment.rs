//! Memory shared with another process: a memfd, mapped by both, with no name in any file system.

use std::ffi::CStr;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::Arc;

use libc::{c_int, c_uint};
use quipu_mem::Segment;

use crate::mapped::page_size;
use crate::sys::{self, adopt, check, with_more_descriptors};

/// Neither side may change the size: an access behind the end of a file is a fatal signal.
const SIZE_SEALS: c_int = libc::F_SEAL_SHRINK | libc::F_SEAL_GROW;
/// The largest arena that a peer may give: that of `QUIPU_ARENA_MB=65536`.
pub(crate) const MAX_BYTES: usize = 64 << 30;
/// Size of the table in which peers of this host look up regions. Sparse.
pub(crate) const DIRECTORY_BYTES: usize = 8 << 20;
/// What the segment has behind it: a page for [`life`](super::life).
pub(crate) const LIFE_BYTES: usize = 4096;
/// Size of the list of what peers of this host may map. Sparse.
pub(crate) const LIST_BYTES: usize = MIN_BYTES;
/// The least size that is worth trying.
const MIN_BYTES: usize = 1 << 20;
const _: () = assert!(quipu_mem::SHARED_PAGES_BYTES <= LIST_BYTES);

/// A mapping, undone when dropped.
struct Mapping {
    base: NonNull<u8>,
    len: usize,
}

// SAFETY: nothing but `drop` uses the pointer, and any thread may unmap.
unsafe impl Send for Mapping {}
// SAFETY: as for Send.
unsafe impl Sync for Mapping {}

impl Drop for Mapping {
    fn drop(&mut self) {
        // Not by the C library: the helper comes here when a peer leaves, and a program may have a
        // function of its own in the place of `munmap`, and put it there or take it away just then.
        // SAFETY: the range was mapped by `map`, this is its only owner, and every Segment over it
        // holds a share of the owner, so none is left.
        unsafe { libc::syscall(libc::SYS_munmap, self.base.as_ptr(), self.len) };
    }
}

/// Maps `len` bytes of a file whose size is sealed. In a program that locks all of its memory
/// (`mlockall(MCL_FUTURE)`) a new mapping takes all of its pages at once: one page is mapped, unlocked, and
/// made longer.
fn map(fd: &OwnedFd, len: usize, writable: bool) -> io::Result<Segment> {
    let protection = if writable { libc::PROT_READ | libc::PROT_WRITE } else { libc::PROT_READ };
    let flags = libc::MAP_SHARED | libc::MAP_NORESERVE;
    let first = len.min(page_size());
    // SAFETY: a new mapping at an address of the kernel's choice overlaps nothing, and nobody else knows of
    // it while it moves.
    let base = unsafe {
        let page = libc::mmap(std::ptr::null_mut(), first, protection, flags, fd.as_raw_fd(), 0);
        if page == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        libc::munlock(page, first);
        let base = libc::mremap(page, first, len, libc::MREMAP_MAYMOVE);
        if base == libc::MAP_FAILED {
            let error = io::Error::last_os_error();
            libc::munmap(page, first);
            return Err(error);
        }
        base
    };
    let base = NonNull::new(base.cast::<u8>()).ok_or(io::ErrorKind::OutOfMemory)?;
    // A child of fork has no business with it: its engine is gone.
    // SAFETY: the range is the mapping just made; the advice changes nothing in this process.
    unsafe { libc::madvise(base.as_ptr().cast(), len, libc::MADV_DONTFORK) };
    let owner = Arc::new(Mapping { base, len });
    // SAFETY: the mapping lives as long as `owner`; it is new, so no reference into it exists; its
    // file is sealed against shrinking, so all of it stays accessible.
    Ok(unsafe {
        if writable {
            Segment::from_raw(base, len, owner)
        } else {
            Segment::from_raw_read_only(base, len, owner)
        }
    })
}

/// Maps `len` bytes of a file that nobody but this user can make shorter.
pub(crate) fn map_own_file(fd: &OwnedFd, len: usize) -> io::Result<Segment> {
    map(fd, len, true)
}

/// Who may write a segment that this process creates.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Writers {
    /// Both sides.
    Both,
    /// Both sides, each through the mapping that it has when the segment is [closed](close).
    Mapped,
    /// This process alone, through the mapping that it makes now.
    Creator,
}

/// Creates a zeroed segment of `len` bytes, of which only touched pages take memory, and the
/// descriptor by which a peer maps it. Tries smaller sizes where the address space is limited.
pub(crate) fn create(name: &CStr, len: usize, writers: Writers) -> io::Result<(OwnedFd, Segment)> {
    let mut len = len.next_multiple_of(4096).max(MIN_BYTES);
    loop {
        match create_exactly(name, len, writers) {
            Err(e) if e.raw_os_error() == Some(libc::ENOMEM) && len / 2 >= MIN_BYTES => len /= 2,
            outcome => return outcome,
        }
    }
}

fn create_exactly(name: &CStr, len: usize, writers: Writers) -> io::Result<(OwnedFd, Segment)> {
    let fd = file(name, len)?;
    let segment = map(&fd, len, true)?;
    match writers {
        Writers::Both => seal(&fd, libc::F_SEAL_SEAL)?,
        Writers::Creator => close(&fd)?,
        Writers::Mapped => {}
    }
    Ok((fd, segment))
}

/// Lets nobody write to a segment any more but through the mappings that there are. Nobody takes pages out
/// of it then, either, for which the kernel holds up whoever uses them.
pub(crate) fn close(fd: &OwnedFd) -> io::Result<()> {
    // Linux 5.1. Where it is missing the peer is trusted.
    if let Err(error) = seal(fd, libc::F_SEAL_FUTURE_WRITE) {
        tracing::debug!(%error, "cannot seal a shared segment, so a peer may write to it and \
            punch holes into it");
    }
    seal(fd, libc::F_SEAL_SEAL)
}

/// A memory file of `len` zeros, which keeps that size.
pub(crate) fn file(name: &CStr, len: usize) -> io::Result<OwnedFd> {
    let fd = with_more_descriptors(|| memfd(name))?;
    sys::set_length(&fd, len as u64)?;
    seal(&fd, SIZE_SEALS)?;
    Ok(fd)
}

fn memfd(name: &CStr) -> io::Result<OwnedFd> {
    let base: c_uint = libc::MFD_CLOEXEC | libc::MFD_ALLOW_SEALING;
    // SAFETY: the name is a zero-terminated string that outlives the call.
    let create = |flags| adopt(unsafe { libc::memfd_create(name.as_ptr(), flags) });
    // Linux 6.3 wants to be told that nothing in there is to be executed; older ones refuse to.
    create(base | libc::MFD_NOEXEC_SEAL).or_else(|_| create(base))
}

fn seal(fd: &OwnedFd, seals: c_int) -> io::Result<()> {
    // SAFETY: F_ADD_SEALS takes an integer.
    check(unsafe { libc::fcntl(fd.as_raw_fd(), libc::F_ADD_SEALS, seals) })?;
    Ok(())
}

/// Maps a segment of at most `most` bytes that a peer created, after checking that the peer cannot
/// change its size, and that a page that is touched can be had.
pub(crate) fn attach(fd: &OwnedFd, writers: Writers, most: usize) -> io::Result<Segment> {
    let len = settled(fd)?.len;
    if !(MIN_BYTES..=most).contains(&len) {
        return Err(io::Error::other("the peer's segment has an impossible size"));
    }
    map(fd, len, writers != Writers::Creator)
}

/// Maps the first `len` bytes of a file that a peer created, after the same checks, if its inode is the one
/// that the peer named.
pub(crate) fn attach_pages(fd: &OwnedFd, len: usize, inode: u64) -> io::Result<Segment> {
    let found = settled(fd)?;
    if len == 0 || found.len < len || found.inode != inode {
        return Err(io::Error::other("the peer's pages are not in that file"));
    }
    map(fd, len, true)
}

/// A file, as far as it cannot change.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Settled {
    /// Bytes.
    pub(crate) len: usize,
    pub(crate) inode: u64,
}

/// What is settled of a memory file: an error if its size is not, or if a page that is touched may not be
/// had.
pub(crate) fn settled(fd: &OwnedFd) -> io::Result<Settled> {
    // SAFETY: F_GET_SEALS takes no pointer. What is no memory file answers with an error.
    let seals = check(unsafe { libc::fcntl(fd.as_raw_fd(), libc::F_GET_SEALS) })?;
    if seals & SIZE_SEALS != SIZE_SEALS {
        return Err(io::Error::other("the size of the peer's segment is not sealed"));
    }
    // Of huge pages there may be none when one is touched, which is a fatal signal.
    if file_system(fd)? != libc::TMPFS_MAGIC {
        return Err(io::Error::other("the peer's segment does not have pages of the usual size"));
    }
    // SAFETY: all zeroes is a valid stat, and the kernel fills in one.
    let mut stat: libc::stat = unsafe { std::mem::zeroed() };
    // SAFETY: as above.
    check(unsafe { libc::fstat(fd.as_raw_fd(), &raw mut stat) })?;
    Ok(Settled { len: usize::try_from(stat.st_size).unwrap_or(0), inode: stat.st_ino })
}

/// The kind of file system that an open file belongs to (statfs(2)).
fn file_system(fd: &OwnedFd) -> io::Result<libc::__fsword_t> {
    // SAFETY: all zeroes is a valid statfs, and the kernel fills in one.
    let mut stat: libc::statfs = unsafe { std::mem::zeroed() };
    // SAFETY: as above.
    check(unsafe { libc::fstatfs(fd.as_raw_fd(), &raw mut stat) })?;
    Ok(stat.f_type)
}

/// A sealed file of `len` bytes, with such pages as `flags` says.
#[cfg(test)]
pub(crate) fn sealed(flags: c_uint, len: libc::off_t) -> io::Result<OwnedFd> {
    let flags = libc::MFD_CLOEXEC | libc::MFD_ALLOW_SEALING | flags;
    // SAFETY: the name is a zero-terminated string that outlives the call.
    let fd = adopt(unsafe { libc::memfd_create(c"test".as_ptr(), flags) })?;
    // SAFETY: takes integers only.
    check(unsafe { libc::ftruncate(fd.as_raw_fd(), len) })?;
    seal(&fd, SIZE_SEALS)?;
    Ok(fd)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_sides_see_the_bytes_and_nobody_can_shrink() {
        let (fd, mine) = create(c"test", 1 << 20, Writers::Both).unwrap();
        let theirs = attach(&fd, Writers::Both, MAX_BYTES).unwrap();
        mine.write(4097, b"hello").unwrap();
        let mut out = [0; 5];
        theirs.read(4097, &mut out).unwrap();
        assert_eq!(&out, b"hello");
        // SAFETY: takes integers only.
        assert_eq!(unsafe { libc::ftruncate(fd.as_raw_fd(), 0) }, -1);
        assert!(attach(&memfd(c"open").unwrap(), Writers::Both, MAX_BYTES).is_err());
    }

    #[test]
    fn nobody_takes_pages_out_of_a_closed_segment() {
        let (fd, mine) = create(c"test", 1 << 20, Writers::Mapped).unwrap();
        let theirs = attach(&fd, Writers::Mapped, MAX_BYTES).unwrap();
        // SAFETY: the range is all of a mapping, in which nobody has references.
        let take_out = || unsafe {
            let base = std::ptr::with_exposed_provenance_mut(theirs.addr());
            libc::madvise(base, theirs.len(), libc::MADV_REMOVE)
        };
        assert_eq!(take_out(), 0, "so this is how to do it");
        close(&fd).unwrap();
        mine.write(0, b"x").unwrap();
        theirs.write(1, b"y").unwrap();
        assert_eq!(take_out(), -1);
        assert!(crate::sys::punch_hole(&fd, 4096).is_err());
        let mut out = [0; 2];
        mine.read(0, &mut out).unwrap();
        assert_eq!(&out, b"xy");
        // Nor is there another way in.
        assert!(attach(&fd, Writers::Mapped, MAX_BYTES).is_err());
    }

    /// The kernel ends a process that asks for more.
    #[test]
    fn a_limit_of_file_sizes_makes_segments_smaller() {
        const TEST: &str = "link::segment::tests::a_limit_of_file_sizes_makes_segments_smaller";
        if !crate::testing::is_alone(TEST) {
            return;
        }
        let limit = libc::rlimit { rlim_cur: 3 << 20, rlim_max: libc::RLIM_INFINITY };
        // SAFETY: the kernel reads one struct. Only this process is concerned, which runs this test alone.
        assert_eq!(unsafe { libc::setrlimit(libc::RLIMIT_FSIZE, &raw const limit) }, 0);
        let (_, segment) = create(c"test", 8 << 20, Writers::Both).unwrap();
        assert_eq!(segment.len(), 2 << 20);
        let error = crate::sys::set_length(&memfd(c"test").unwrap(), 4 << 20).unwrap_err();
        assert_eq!(error.raw_os_error(), Some(libc::ENOMEM));
    }

    #[test]
    fn a_program_that_locks_all_memory_has_no_more_of_it_than_is_used() {
        const TEST: &str = "link::segment::tests::\
            a_program_that_locks_all_memory_has_no_more_of_it_than_is_used";
        if !crate::testing::is_alone(TEST) {
            return;
        }
        // SAFETY: takes an integer. Only this process is concerned, which runs this test alone.
        if unsafe { libc::mlockall(libc::MCL_FUTURE) } != 0 {
            println!("SKIPPED: memory may not be locked here");
            return;
        }
        let (fd, mine) = create(c"test", 64 << 20, Writers::Both).unwrap();
        let theirs = attach(&fd, Writers::Both, MAX_BYTES).unwrap();
        mine.write(mine.len() - 1, b"x").unwrap();
        let mut out = [0];
        theirs.read(theirs.len() - 1, &mut out).unwrap();
        assert_eq!(&out, b"x");
        let file = std::fs::File::from(fd);
        let held = std::os::unix::fs::MetadataExt::blocks(&file.metadata().unwrap()) * 512;
        assert!(held <= 16 * page_size() as u64, "{held}");
    }

    #[test]
    fn a_directory_is_read_only_for_the_peer() {
        let (fd, mine) = create(c"test", 1 << 20, Writers::Creator).unwrap();
        mine.write(0, b"x").unwrap();
        assert!(attach(&fd, Writers::Both, MAX_BYTES).is_err());
        let theirs = attach(&fd, Writers::Creator, MAX_BYTES).unwrap();
        assert!(!theirs.is_writable());
        mine.write(1, b"y").unwrap();
        let mut out = [0; 2];
        theirs.read(0, &mut out).unwrap();
        assert_eq!(&out, b"xy");
    }

    #[test]
    fn huge_pages_that_may_not_be_there_are_refused() {
        assert!(attach(&sealed(0, 1 << 30).unwrap(), Writers::Both, MAX_BYTES).is_ok());
        match sealed(libc::MFD_HUGETLB, 1 << 30) {
            // Only the size of the file is set: no page is reserved, so this needs none.
            Ok(fd) => {
                let refused = attach(&fd, Writers::Both, MAX_BYTES).unwrap_err();
                assert!(refused.to_string().contains("usual size"), "{refused}");
            }
            Err(error) => println!("no huge pages here: {error}"),
        }
    }

    #[test]
    fn sizes_have_bounds() {
        let huge = sealed(0, 1 << 40).unwrap();
        assert!(attach(&huge, Writers::Both, MAX_BYTES).is_err());
        let (fd, _) = create(c"test", 2 << 20, Writers::Both).unwrap();
        assert!(attach(&fd, Writers::Both, 1 << 20).is_err());
        assert!(attach(&fd, Writers::Both, 2 << 20).is_ok());
    }
}
