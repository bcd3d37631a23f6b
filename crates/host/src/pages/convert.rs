//! Puts the pages of a memory file in the place of others with the same bytes.

use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::ptr;

use super::Gap;
use super::still::Turn;
use crate::mapped::page_size;

/// `/proc/self/pagemap` says of a page that it is in memory, or swapped out.
const PRESENT: u64 = 1 << 63;
const SWAPPED: u64 = 1 << 62;
/// Bytes that are replaced at once.
const PIECE: usize = 16 << 20;
/// Pages that are looked at in one call.
const BATCH: usize = 512;

/// A mapping of a file of ours, undone when dropped. A child of fork finds it too.
#[derive(Debug)]
pub(super) struct Mapped {
    at: *mut libc::c_void,
    len: usize,
}

// SAFETY: nothing but `drop` uses the pointer, and any thread may unmap.
unsafe impl Send for Mapped {}
// SAFETY: as for Send.
unsafe impl Sync for Mapped {}

impl Mapped {
    /// The first bytes of a file.
    pub(super) fn of(file: &OwnedFd, len: usize) -> io::Result<Self> {
        Self::part_of(file, 0, len)
    }

    fn part_of(file: &OwnedFd, offset: usize, len: usize) -> io::Result<Self> {
        let protection = libc::PROT_READ | libc::PROT_WRITE;
        let flags = libc::MAP_SHARED | libc::MAP_NORESERVE;
        // SAFETY: a new mapping at an address of the kernel's choice overlaps nothing.
        let at = unsafe {
            let (fd, offset) = (file.as_raw_fd(), offset as libc::off_t);
            libc::mmap(ptr::null_mut(), len, protection, flags, fd, offset)
        };
        if at == libc::MAP_FAILED { Err(io::Error::last_os_error()) } else { Ok(Self { at, len }) }
    }

    /// Its first byte.
    pub(super) fn addr(&self) -> *mut u8 {
        self.at.cast()
    }

    /// Moves it to `start`, in the place of what is there, after a copy; nobody writes there meanwhile.
    /// `pagemap` says which pages hold something, unless they have a file.
    fn replace(&self, start: usize, pagemap: Option<&File>) -> io::Result<()> {
        let copy = |from: usize, bytes: usize| {
            let source = ptr::with_exposed_provenance::<u8>(start + from);
            // SAFETY: the list of mappings says that the program may read all of these pages, which it
            // vouches for as registered memory; the target is a mapping of the same length that nobody else
            // knows.
            unsafe { ptr::copy_nonoverlapping(source, self.addr().add(from), bytes) };
        };
        match pagemap {
            Some(pagemap) => touched(pagemap, start, self.len, copy)?,
            None => each_present(start, self.len, |at| copy(at - start, page_size())),
        }
        // SAFETY: the source is a mapping of our own. The target has the same bytes, and the program's
        // registration says that it may be replaced; engines hold still.
        match unsafe { move_mapping(self.at, self.len, start) } {
            true => Ok(()),
            false => Err(io::Error::last_os_error()),
        }
    }
}

/// Moves a mapping to `start`, in the place of what is there; whether it is there now. It asks the kernel
/// itself, since libraries that watch memory put functions of their own before `mremap`, and UCX's forgets
/// the place.
///
/// # Safety
///
/// As of `mremap` with `MREMAP_FIXED`.
pub(super) unsafe fn move_mapping(from: *mut libc::c_void, len: usize, start: usize) -> bool {
    let flags = libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED;
    // SAFETY: the caller's promise.
    let moved = unsafe { libc::syscall(libc::SYS_mremap, from, len, len, flags, start) };
    moved == start as libc::c_long
}

impl Drop for Mapped {
    fn drop(&mut self) {
        // SAFETY: mapped by `of`, and nobody else knows of it.
        unsafe { libc::munmap(self.at, self.len) };
    }
}

/// Replaces whole pages, which the program has registered, by those of a file of zeros, after a copy. Pages
/// that were never touched stay so. How many bytes were replaced: piece by piece, so that no more than one is
/// there twice, and that engines do not hold still for long.
pub(super) fn replace(file: &OwnedFd, gap: Gap, turn: &Turn) -> io::Result<usize> {
    let Gap { start, end, private } = gap;
    let pagemap = private.then(|| File::open("/proc/self/pagemap")).transpose()?;
    let len = end - start;
    for done in (0..len).step_by(PIECE) {
        let replace = || {
            // A program may have functions of its own in the place of those that map memory and undo it,
            // and these may enter engines: so that is done before and behind.
            let staged = Mapped::part_of(file, done, PIECE.min(len - done))?;
            let mut outcome = Ok(());
            turn.hold_all(&mut || outcome = staged.replace(start + done, pagemap.as_ref()));
            outcome.map(|()| std::mem::forget(staged))
        };
        match replace() {
            Err(error) if done == 0 => return Err(error),
            Err(_) => return Ok(done),
            Ok(()) => {}
        }
    }
    Ok(len)
}

/// Calls `visit` with offset and length of each run of pages that hold something.
fn touched(
    pagemap: &File,
    start: usize,
    len: usize,
    mut visit: impl FnMut(usize, usize),
) -> io::Result<()> {
    let page = page_size();
    let mut entries = [0; BATCH * 8];
    let mut run: Option<usize> = None;
    for first in (0..len).step_by(BATCH * page) {
        let count = BATCH.min((len - first) / page);
        let bytes = &mut entries[..count * 8];
        pagemap.read_exact_at(bytes, ((start + first) / page * 8) as u64)?;
        for (i, entry) in bytes.chunks_exact(8).enumerate() {
            let word = entry.try_into().map_or(0, u64::from_ne_bytes);
            let at = first + i * page;
            match (word & (PRESENT | SWAPPED) != 0, run) {
                (true, None) => run = Some(at),
                (false, Some(from)) => {
                    visit(from, at - from);
                    run = None;
                }
                _ => {}
            }
        }
    }
    if let Some(from) = run {
        visit(from, len - from);
    }
    Ok(())
}

/// Calls `visit` with the address of each page of a file of ours that holds something. Allocates nothing.
/// Which do the kernel tells of what is in memory; where there is swap, every page is looked at.
pub(super) fn each_present(start: usize, len: usize, mut visit: impl FnMut(usize)) {
    let page = page_size();
    let mut resident = [0u8; BATCH];
    let all = has_swap();
    for first in (0..len).step_by(BATCH * page) {
        let count = BATCH.min((len - first) / page);
        let at = start + first;
        let place = ptr::without_provenance_mut::<libc::c_void>(at);
        // SAFETY: the kernel writes a byte for each page of the range, for which there is room.
        let told = unsafe { libc::mincore(place, count * page, resident.as_mut_ptr()) } == 0;
        for (i, state) in resident[..count].iter().enumerate() {
            if !told || all || state & 1 != 0 {
                visit(at + i * page);
            }
        }
    }
}

/// Whether pages may be elsewhere than in memory.
fn has_swap() -> bool {
    // SAFETY: all zeroes is a valid sysinfo, and the kernel fills in one.
    let mut info: libc::sysinfo = unsafe { std::mem::zeroed() };
    // SAFETY: as above.
    let asked = unsafe { libc::sysinfo(&raw mut info) };
    asked != 0 || info.totalswap > 0
}
