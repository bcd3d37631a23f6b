//! Whether memory that a program registers is there, and writable if it must be.
//!
//! An adapter in hardware finds out when it pins the pages. Here nothing is pinned, and the first
//! access to what is not mapped would end the program: registration asks the kernel's list of
//! mappings instead. Then it has absent pages made, but for very large registrations, as pinning
//! does: the kernel would clear each when the first message is put there, in the middle of the
//! connection.
//!
//! Since Linux 6.11 `/proc/self/maps` answers a query for one address (`PROCMAP_QUERY`), in less
//! than a microsecond. Where it does not, `msync` says whether the range is mapped, since it looks
//! at every mapping and with `MS_ASYNC` does nothing else; and the text of the file says with which
//! rights, as far as it is not too long to be read for each registration.

use std::fs::File;
use std::io::{self, BufRead, BufReader, Read};
use std::os::fd::{AsRawFd, IntoRawFd, OwnedFd};
use std::sync::OnceLock;

use crate::sys;

/// Where the kernel lists the mappings of the process.
const LIST: &str = "/proc/self/maps";
/// The text of the list is read up to here: some 3000 mappings, of which it takes about a
/// millisecond.
const TEXT_BYTES: u64 = 256 << 10;

/// `struct procmap_query` of `linux/fs.h`.
#[repr(C)]
#[derive(Default)]
struct Query {
    size: u64,
    flags: u64,
    addr: u64,
    start: u64,
    end: u64,
    vma_flags: u64,
    page_size: u64,
    offset: u64,
    inode: u64,
    device: [u32; 2],
    name_size: u32,
    build_id_size: u32,
    name_addr: u64,
    build_id_addr: u64,
}

const QUERY_READABLE: u64 = 1;
const QUERY_WRITABLE: u64 = 2;
/// `PROCMAP_QUERY`: `_IOWR('f', 17, struct procmap_query)`.
const PROCMAP_QUERY: libc::c_ulong =
    3 << 30 | (size_of::<Query>() as libc::c_ulong) << 16 | (b'f' as libc::c_ulong) << 8 | 17;

/// Makes the pages of a range present as far as they can be had, for reading or for writing. Nothing where
/// the kernel cannot (before Linux 5.14).
pub(crate) fn populate(addr: usize, len: u64, write: bool) {
    if let Ok(len) = usize::try_from(len) {
        let start = addr - addr % page_size();
        populate_pages(start, addr - start + len, write);
    }
}

/// Makes those pages of a range present that are not, as [`populate`] does, which takes fifty times as long
/// for pages that are; how many bytes were looked after. What was only read, or is another process's too, is
/// present, though the kernel may have something to do when it is written.
pub(crate) fn populate_absent(addr: usize, len: u64, write: bool) -> u64 {
    let page = page_size();
    let start = addr - addr % page;
    let end = usize::try_from(len).ok().and_then(|len| addr.checked_add(len));
    let Some(end) = end.filter(|&end| end > addr) else { return 0 };
    let mut made = 0;
    let mut present = [0; 1024];
    for part in (start..end).step_by(present.len() * page) {
        let len = (end - part).min(present.len() * page);
        let at = std::ptr::without_provenance_mut(part);
        // SAFETY: the call touches no memory but the array, which has a byte for each page.
        let asked = unsafe { libc::mincore(at, len, present.as_mut_ptr()) };
        let pages = &present[..len.div_ceil(page)];
        if asked == 0 && pages.iter().all(|page| page & 1 != 0) {
            continue;
        }
        if !populate_pages(part, len, write) {
            break;
        }
        made += len as u64;
    }
    made
}

/// Whether all became present.
fn populate_pages(start: usize, len: usize, write: bool) -> bool {
    let advice = if write { libc::MADV_POPULATE_WRITE } else { libc::MADV_POPULATE_READ };
    let at = std::ptr::without_provenance_mut(start);
    // SAFETY: the advice changes no bytes: it does what an access to each page would.
    unsafe { libc::madvise(at, len, advice) == 0 }
}

/// The list of mappings of this process.
#[derive(Debug, Default)]
pub(crate) struct Mappings {
    /// Opened when it is first asked; nothing where that is not possible. In a forked child it
    /// would still speak of the parent: it belongs to an engine, which is inert there.
    list: OnceLock<Option<OwnedFd>>,
}

impl Mappings {
    /// Whether every page of `len` bytes at `addr` is mapped for reading or, if `write` says so,
    /// for writing. `true` also for a range that wraps around, which is refused elsewhere, and
    /// where the kernel does not say.
    pub(crate) fn allow(&self, addr: usize, len: u64, write: bool) -> bool {
        let Some(end) = usize::try_from(len).ok().and_then(|len| addr.checked_add(len)) else {
            return true;
        };
        if len == 0 {
            return true;
        }
        let list = self.list.get_or_init(|| {
            let file = sys::with_more_descriptors(|| File::open(LIST)).ok()?;
            sys::adopt(file.into_raw_fd()).ok()
        });
        let asked = list.as_ref().and_then(|list| ask(list, addr, end, write).ok());
        asked.unwrap_or_else(|| is_mapped(addr, end) && read(addr, end, write).unwrap_or(true))
    }
}

impl quipu_mem::Mappings for Mappings {
    fn allow(&self, addr: usize, len: u64, write: bool) -> bool {
        Mappings::allow(self, addr, len, write)
    }
}

/// Asks for one mapping after the other.
fn ask(list: &OwnedFd, addr: usize, end: usize, write: bool) -> io::Result<bool> {
    let flags = if write { QUERY_WRITABLE } else { QUERY_READABLE };
    let mut at = addr as u64;
    while at < end as u64 {
        let size = size_of::<Query>() as u64;
        let mut query = Query { size, flags, addr: at, ..Query::default() };
        // SAFETY: the request takes a pointer to this structure, whose size is in it, reads and
        // writes it, and, with both buffers of size 0, touches no other memory.
        let asked = unsafe { libc::ioctl(list.as_raw_fd(), PROCMAP_QUERY, &raw mut query) };
        match sys::check(asked) {
            // Whatever answers this request otherwise is not the kernel's list.
            Ok(_) if query.end <= at => return Err(io::ErrorKind::InvalidData.into()),
            Ok(_) => at = query.end,
            // No mapping there, or none with these rights.
            Err(error) if error.raw_os_error() == Some(libc::ENOENT) => return Ok(false),
            Err(error) => return Err(error),
        }
    }
    Ok(true)
}

/// Whether something is mapped at each page, whatever its rights.
fn is_mapped(addr: usize, end: usize) -> bool {
    let page = page_size();
    let start = addr - addr % page;
    let start_ptr = std::ptr::without_provenance_mut(start);
    // SAFETY: with MS_ASYNC the call looks at mappings and changes nothing.
    let synced = unsafe { libc::msync(start_ptr, end - start, libc::MS_ASYNC) };
    sys::check(synced).map_err(|error| error.raw_os_error()) != Err(Some(libc::ENOMEM))
}

pub(crate) fn page_size() -> usize {
    // SAFETY: sysconf takes an integer and touches no memory.
    let size = unsafe { libc::sysconf(libc::_SC_PAGESIZE) };
    usize::try_from(size).unwrap_or(4096)
}

/// Reads the text of the list; `None` if it cannot be read, or not far enough.
fn read(addr: usize, end: usize, write: bool) -> Option<bool> {
    let file = sys::with_more_descriptors(|| File::open(LIST)).ok()?;
    search(BufReader::with_capacity(64 << 10, file.take(TEXT_BYTES)), addr, end, write)
}

/// Looks for a range in the text of a list, which is ordered by address; `None` if it ends before.
fn search(mut text: impl BufRead, addr: usize, end: usize, write: bool) -> Option<bool> {
    let mut at = addr;
    let mut line = Vec::new();
    while at < end {
        line.clear();
        text.read_until(b'\n', &mut line).ok()?;
        let mapping = Mapping::parse(&line)?;
        if mapping.end <= at {
            continue;
        }
        if mapping.start > at || mapping.rights.get(usize::from(write)) == Some(&b'-') {
            return Some(false);
        }
        at = mapping.end;
    }
    Some(true)
}

/// A line of the list.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Mapping<'a> {
    pub(crate) start: usize,
    /// The first address behind it.
    pub(crate) end: usize,
    /// Such as `rw-p`.
    pub(crate) rights: &'a [u8],
    /// Where in the file it begins, in bytes.
    pub(crate) offset: u64,
    /// Of the file behind it; 0 where there is none.
    pub(crate) inode: u64,
    /// That file, or what else the kernel calls the mapping; mostly nothing.
    pub(crate) name: &'a [u8],
}

impl<'a> Mapping<'a> {
    /// Reads a line, with or without its end.
    pub(crate) fn parse(line: &'a [u8]) -> Option<Self> {
        let mut words = line.trim_ascii_end().splitn(6, |&byte| byte == b' ');
        let number = |text: &'a [u8], radix| {
            u64::from_str_radix(std::str::from_utf8(text).ok()?, radix).ok()
        };
        let mut range = words.next()?.split(|&byte| byte == b'-');
        let start = number(range.next()?, 16)? as usize;
        let end = number(range.next()?, 16)? as usize;
        let rights = words.next()?;
        let offset = words.next().and_then(|offset| number(offset, 16)).unwrap_or(0);
        let inode = words.nth(1).and_then(|inode| number(inode, 10)).unwrap_or(0);
        let name = words.next().unwrap_or(b"").trim_ascii_start();
        Some(Self { start, end, rights, offset, inode, name })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Six pages: two writable, one readable, one forbidden, one unmapped, one writable.
    struct Patchwork {
        addr: usize,
        page: usize,
    }

    impl Patchwork {
        fn new() -> Self {
            let page = page_size();
            let null = std::ptr::null_mut();
            let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
            let both = libc::PROT_READ | libc::PROT_WRITE;
            // SAFETY: a new mapping, of which only pages of its own are changed.
            let addr = unsafe {
                let addr = libc::mmap(null, 6 * page, both, flags, -1, 0);
                assert_ne!(addr, libc::MAP_FAILED);
                libc::mprotect(addr.byte_add(2 * page), page, libc::PROT_READ);
                libc::mprotect(addr.byte_add(3 * page), page, libc::PROT_NONE);
                libc::munmap(addr.byte_add(4 * page), page);
                addr as usize
            };
            Self { addr, page }
        }

        /// What `allow` must say of `len` bytes at `offset`, for reading and for writing.
        fn cases(&self) -> Vec<(usize, usize, [bool; 2])> {
            let p = self.page;
            vec![
                (0, 2 * p, [true, true]),
                (1, 1, [true, true]),
                (0, 2 * p + 1, [true, false]),
                (2 * p, p, [true, false]),
                (p, 2 * p, [true, false]),
                (p, 2 * p + 1, [false, false]),
                (3 * p, 1, [false, false]),
                (4 * p, 1, [false, false]),
                (4 * p + 5, 0, [true, true]),
                (5 * p, p, [true, true]),
                (0, 6 * p, [false, false]),
            ]
        }
    }

    #[test]
    fn what_is_not_mapped_or_not_writable_is_found() {
        let (patchwork, mappings) = (Patchwork::new(), Mappings::default());
        for (offset, len, expected) in patchwork.cases() {
            let addr = patchwork.addr + offset;
            let said = [false, true].map(|write| mappings.allow(addr, len as u64, write));
            assert_eq!(said, expected, "{len} at {offset}");
        }
        assert!(!mappings.allow(0, 4096, false), "nothing is at the null page");
        assert!(mappings.allow(4096, u64::MAX, true), "wraps: refused elsewhere");
    }

    /// As an older kernel has it.
    #[test]
    fn the_text_of_the_list_says_the_same() {
        let patchwork = Patchwork::new();
        for (offset, len, expected) in patchwork.cases() {
            let (addr, end) = (patchwork.addr + offset, patchwork.addr + offset + len);
            let said = [false, true].map(|write| read(addr, end, write));
            assert_eq!(said, expected.map(Some), "{len} at {offset}");
            let unmapped = offset <= 4 * patchwork.page && offset + len > 4 * patchwork.page;
            if len > 0 {
                assert_eq!(is_mapped(addr, end), !unmapped, "{len} at {offset}");
            }
        }
    }

    #[test]
    fn pages_are_made_present_where_they_may_be() {
        let patchwork = Patchwork::new();
        let (at, page) = (patchwork.addr, patchwork.page as u64);
        for (offset, len, write) in [(1, 2 * page - 1, true), (0, 6 * page, false)] {
            populate(at + offset, len, write);
        }
        // SAFETY: the first byte of the patchwork is writable.
        unsafe { std::ptr::with_exposed_provenance_mut::<u8>(at).write(1) };
    }

    /// Whether each page of `count` from `at` on is present.
    fn present(at: usize, count: usize) -> Vec<bool> {
        let mut pages = vec![0; count];
        let place = std::ptr::without_provenance_mut(at);
        // SAFETY: a byte for each page.
        assert_eq!(0, unsafe { libc::mincore(place, count * page_size(), pages.as_mut_ptr()) });
        pages.iter().map(|page| page & 1 != 0).collect()
    }

    #[test]
    fn absent_pages_are_made_present_and_no_others() {
        const PAGES: usize = 3000;
        let page = page_size();
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
        let both = libc::PROT_READ | libc::PROT_WRITE;
        // SAFETY: a new mapping, whose bytes are its own.
        let at = unsafe {
            let at = libc::mmap(std::ptr::null_mut(), PAGES * page, both, flags, -1, 0);
            assert_ne!(at, libc::MAP_FAILED);
            libc::madvise(at, PAGES * page, libc::MADV_NOHUGEPAGE);
            at.byte_add(2500 * page).cast::<u8>().write(7);
            at
        };
        let start = at.expose_provenance();
        // From the middle of the second page to the first byte of the last but one.
        let len = ((PAGES - 4) * page + page / 2 + 1) as u64;
        assert!(populate_absent(start + page + page / 2, len, true) >= len);
        let there = present(start, PAGES);
        assert_eq!((there[0], there[PAGES - 1]), (false, false), "beyond the range");
        assert!(there[1..PAGES - 1].iter().all(|there| *there));
        // SAFETY: within the mapping.
        assert_eq!(7, unsafe { at.byte_add(2500 * page).cast::<u8>().read() });
        assert_eq!(populate_absent(start, u64::MAX, true) + populate_absent(start + 9, 0, true), 0);
        assert!(!present(start, PAGES)[0], "a range that wraps is refused elsewhere");
    }

    #[test]
    fn a_line_of_the_list_has_its_parts() {
        let line = b"7f00-7f10 rw-s 00001000 00:01 1034     /memfd:some name (deleted)\n";
        let file = Mapping::parse(line).unwrap();
        assert_eq!((file.start, file.end, file.rights), (0x7f00, 0x7f10, &b"rw-s"[..]));
        assert_eq!(file.offset, 0x1000);
        assert_eq!((file.inode, file.name), (1034, &b"/memfd:some name (deleted)"[..]));
        let plain = Mapping::parse(b"7f00-7f10 rw-p 00000000 00:00 0 \n").unwrap();
        assert_eq!((plain.inode, plain.name), (0, &b""[..]));
        assert_eq!(Mapping::parse(b"7f00-7f10"), None);
    }

    #[test]
    fn a_list_that_is_cut_short_says_nothing() {
        let text = b"1000-3000 rw-p 0 0 0\n3000-4000 r--p 0 0 0 file name\n5000-60";
        let said = |addr, end, write| search(&text[..], addr, end, write);
        assert_eq!(said(0x1000, 0x4000, false), Some(true));
        assert_eq!(said(0x1000, 0x4000, true), Some(false));
        assert_eq!(said(0x800, 0x1001, false), Some(false));
        assert_eq!(said(0x5000, 0x5001, false), None);
        assert_eq!(search(&b"nonsense\n"[..], 1, 2, false), None);
    }
}
