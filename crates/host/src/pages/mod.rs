//! Registered memory that peers on this host map, and so reach with plain loads and stores.
//!
//! The memory of a program is private to its process, and a peer reaches it by a system call that has the
//! kernel copy. Memory that the engine gives away itself ([`allocate`]) lies in memory files from the
//! start. Where [`SharedPages::Registered`](crate::SharedPages::Registered) asks for it, a registration
//! replaces whole pages of any memory, in place, by those of a memory file with the same contents. A list
//! of such ranges ([`quipu_mem::SharedPages`]) says to peers which files to map. What else could tell the
//! difference is for the user to know (`docs/shared-pages.md`): other threads that write while memory is
//! being registered, and allocators that take `MADV_DONTNEED` for a way to get zeros. A child of fork gets
//! a copy (`pages::child`).
//!
//! Both are of the process, not of an engine: memory may be registered with several.

mod child;
mod convert;
mod live;
mod still;

use std::collections::HashMap;
use std::ffi::{CStr, CString};
use std::fs::File;
use std::io::{self, BufRead, BufReader};
use std::mem::ManuallyDrop;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::ptr::{self, NonNull};
use std::sync::atomic::{AtomicBool, AtomicPtr, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use quipu_mem::{MAX_SHARED, Segment, SharedPages, SharedPagesWriter};
use quipu_nic::MrId;

use self::convert::Mapped;
use self::live::Live;
use self::still::Turn;
use crate::link::segment::{self, LIST_BYTES, Writers};
use crate::mapped::{self, Mapping};
use crate::sys;

pub(crate) use self::still::{Member, Still, turn};

/// What the names of the files begin with.
const NAME: &str = "quipu-pages";
/// The most mappings of our files that registrations leave in a process, which may have some 65,000 in all
/// (`vm.max_map_count`).
const MAX_MAPPINGS: usize = 4096;
/// The size of a file. Its pages are taken as they are touched, so it costs nothing; and a mapping that the
/// program makes longer, as `realloc` does, finds zeros there and not the end of the file.
const FILE_BYTES: u64 = 1 << 46;

/// The ranges of this process. Never freed: engines come and go.
static REGISTRY: AtomicPtr<Registry> = AtomicPtr::new(ptr::null_mut());

/// Whether any page was ever shared: if not, a fork needs no attention.
static ANY: AtomicBool = AtomicBool::new(false);

struct Registry {
    /// The list, for peers.
    list: OwnedFd,
    books: Mutex<Books>,
}

struct Books {
    writer: SharedPagesWriter,
    ranges: Vec<Range>,
    live: Live,
    /// Ranges that were made by registrations since their mappings were last counted, and those mappings.
    made: usize,
    last_id: u32,
    /// Of the files of this process; other copies of this library have others.
    name: CString,
}

/// Pages of one file.
struct Range {
    id: u32,
    start: usize,
    end: usize,
    /// Closed if it is still there.
    file: ManuallyDrop<OwnedFd>,
    inode: u64,
    /// Registrations.
    users: usize,
    /// Whether the pages are for nothing else: of memory that the engine gives away.
    own: bool,
}

/// A registration's share of the ranges that it uses, given back when dropped.
pub(crate) struct Shared {
    registry: &'static Registry,
    ids: Vec<u32>,
    /// The registration's number, if it is one of a program's memory.
    live: Option<u64>,
}

impl Drop for Shared {
    fn drop(&mut self) {
        // In a child of fork it is the parent's.
        if current().is_some_and(|registry| ptr::eq(registry, self.registry)) {
            let gone = self.registry.lock().release(&self.ids, self.live);
            for range in gone.iter().filter(|range| range.own && range.has_file()) {
                // Peers may have it mapped for as long as they have nothing to do with this process.
                let _ = sys::punch_hole(&range.file, (range.end - range.start) as u64);
            }
        }
    }
}

/// What is shared of each region of an engine.
pub(crate) struct SharedRegions {
    /// Whether memory that the engine gives away is.
    own: bool,
    /// `None` where nothing else is to be.
    by_region: Option<Mutex<HashMap<MrId, Shared>>>,
}

impl SharedRegions {
    /// Of no region yet.
    pub(crate) fn new(which: crate::SharedPages) -> Self {
        let all = which == crate::SharedPages::Registered;
        Self { own: which != crate::SharedPages::Never, by_region: all.then(Mutex::default) }
    }

    /// Zeros for a registration to come; `None` where they cannot be shared.
    pub(crate) fn allocate(&self, len: usize) -> Option<Segment> {
        if !self.own || len < mapped::page_size() {
            return None;
        }
        let unwilling = |error| tracing::debug!(%error, len, "memory is not shared");
        allocate(len).map_err(unwilling).ok()
    }

    /// Has peers map what is possible of memory that is about to be registered, or nothing of it.
    pub(crate) fn share(&self, addr: usize, len: u64, possible: bool) -> Option<Shared> {
        self.by_region.as_ref().and_then(|_| share(addr, len, possible))
    }

    /// Keeps a region's share, instead of the one that it had: `None` once it is not registered any more.
    pub(crate) fn keep(&self, region: MrId, shared: Option<Shared>) {
        let Some(by_region) = &self.by_region else { return };
        let _turn = turn();
        let mut by_region = by_region.lock().unwrap_or_else(PoisonError::into_inner);
        match shared {
            Some(shared) => by_region.insert(region, shared),
            None => by_region.remove(&region),
        };
    }
}

/// The list of this process's ranges, for a peer that may reach into its memory.
///
/// # Errors
///
/// The kernel refuses shared memory.
pub(crate) fn list() -> io::Result<OwnedFd> {
    registry()?.list.as_fd().try_clone_to_owned().and_then(sys::move_up)
}

/// Takes note of a registration of `len` bytes at `addr`, and, if it is `possible`, has peers map as many
/// as can be of the whole pages within. `None` where nothing can be shared at all.
fn share(addr: usize, len: u64, possible: bool) -> Option<Shared> {
    let page = mapped::page_size();
    let last = addr.saturating_add(usize::try_from(len).unwrap_or(usize::MAX));
    let unwilling = |error| tracing::debug!(%error, addr, len, "pages are not shared");
    let registry = registry().map_err(unwilling).ok()?;
    let turn = turn();
    let (start, end) = (addr.checked_next_multiple_of(page).unwrap_or(last), last / page * page);
    let ids = match possible && start < end {
        true => registry.share(start, end, &turn).map_err(unwilling).unwrap_or_default(),
        false => Vec::new(),
    };
    let (start, end) = whole_pages((addr, last));
    let live = registry.lock().live.add(start, end);
    Some(Shared { registry, ids, live: Some(live) })
}

/// The pages in which something lies.
fn whole_pages((start, end): (usize, usize)) -> (usize, usize) {
    let page = mapped::page_size();
    (start / page * page, end.checked_next_multiple_of(page).unwrap_or(end))
}

/// Zeros that peers may map as long as they live.
fn allocate(len: usize) -> io::Result<Segment> {
    let registry = registry()?;
    let whole =
        len.checked_next_multiple_of(mapped::page_size()).ok_or(io::ErrorKind::OutOfMemory)?;
    let (id, mapping) = registry.lock().allocate(whole)?;
    let base = NonNull::new(mapping.addr()).ok_or(io::ErrorKind::OutOfMemory)?;
    // Off the list before it is unmapped.
    let owner = Arc::new((Shared { registry, ids: vec![id], live: None }, mapping));
    // SAFETY: the mapping is new, of at least that length, and lives as long as its owner; its file cannot
    // shrink.
    Ok(unsafe { Segment::from_raw(base, len, owner) })
}

fn current() -> Option<&'static Registry> {
    // SAFETY: it is null or came from `Box::leak` in this process or a parent of it; nothing frees it.
    unsafe { REGISTRY.load(Ordering::Acquire).as_ref() }
}

fn registry() -> io::Result<&'static Registry> {
    if let Some(registry) = current() {
        return Ok(registry);
    }
    child::watch();
    let made = ptr::from_mut(Box::leak(Box::new(Registry::new()?)));
    let order = Ordering::AcqRel;
    match REGISTRY.compare_exchange(ptr::null_mut(), made, order, Ordering::Acquire) {
        // SAFETY: leaked above, so it is never freed.
        Ok(_) => Ok(unsafe { &*made }),
        Err(_) => {
            // SAFETY: nobody has seen it.
            drop(unsafe { Box::from_raw(made) });
            registry()
        }
    }
}

impl Registry {
    fn new() -> io::Result<Self> {
        let (list, pages) = segment::create(c"quipu-page-list", LIST_BYTES, Writers::Creator)?;
        let writer = SharedPagesWriter::create(&pages).map_err(io::Error::other)?;
        let mut random = [0; 8];
        sys::random(&mut random)?;
        let name = format!("{NAME}-{:016x}", u64::from_ne_bytes(random));
        let name = CString::new(name).map_err(io::Error::other)?;
        let (ranges, live) = (Vec::new(), Live::default());
        let books = Mutex::new(Books { writer, ranges, live, made: 0, last_id: 0, name });
        Ok(Self { list, books })
    }

    fn lock(&self) -> MutexGuard<'_, Books> {
        self.books.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Makes ranges of what is not in one yet; the numbers of all that the pages from `start` to `end` lie
    /// in.
    fn share(&self, start: usize, end: usize, turn: &Turn) -> io::Result<Vec<u32>> {
        let places = turn.places().chain([still::place_of(self)]).map(whole_pages);
        let Plan { mut ids, gaps } = self.lock().plan(start, end, &places.collect::<Vec<_>>())?;
        for gap in gaps {
            match self.convert(gap, turn) {
                Ok(id) => ids.push(id),
                Err(error) => tracing::debug!(%error, ?gap, "pages are not shared"),
            }
        }
        Ok(ids)
    }

    /// Makes a range of private pages, or of ones that a registration left shared, with one user. The books
    /// are open meanwhile: who has an engine's lock may want to see them.
    fn convert(&self, gap: Gap, turn: &Turn) -> io::Result<u32> {
        let file = self.lock().file_to_convert(gap.end - gap.start)?;
        let replaced = convert::replace(&file, gap, turn)?;
        self.lock().converted((gap.start, gap.start + replaced), file)
    }
}

/// What is to be done to share pages.
struct Plan {
    /// The ranges in which some lie, each with a user more.
    ids: Vec<u32>,
    gaps: Vec<Gap>,
}

/// Pages that are in no range, and can be.
#[derive(Clone, Copy, Debug)]
struct Gap {
    start: usize,
    end: usize,
    /// Whether they have no file: else they have one of ours.
    private: bool,
}

/// A part of a registration that can be shared.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Part {
    /// Private memory without a file.
    Private { start: usize, end: usize },
    /// Pages of one of our files, from this offset on.
    Ours { start: usize, end: usize, inode: u64, offset: u64 },
}

impl Books {
    /// What is to be done to share the pages from `start` to `end`, but for those of `places`.
    fn plan(&mut self, start: usize, end: usize, places: &[(usize, usize)]) -> io::Result<Plan> {
        let list = BufReader::with_capacity(64 << 10, File::open("/proc/self/maps")?);
        // To count them all takes time where there are many.
        let counts = self.made >= MAX_MAPPINGS;
        let Found { parts, ours } = parts(list, &self.name, start, end, counts)?;
        if counts {
            self.made = ours;
        }
        self.forget_replaced(&parts, start, end);
        let (mut ids, mut gaps) = (Vec::new(), Vec::new());
        for part in parts {
            let (start, end, private) = match part {
                Part::Private { start, end } => (start, end, true),
                Part::Ours { start, end, inode, .. } => {
                    match self.ranges.iter().find(|range| range.inode == inode) {
                        Some(range) => {
                            ids.extend(range.holds(part).then_some(range.id));
                            continue;
                        }
                        None => (start, end, false),
                    }
                }
            };
            let found = self.live.gaps(start, end, places).into_iter();
            gaps.extend(found.map(|(start, end)| Gap { start, end, private }));
        }
        ids.sort_unstable();
        ids.dedup();
        for range in self.ranges.iter_mut().filter(|range| ids.contains(&range.id)) {
            range.users += 1;
        }
        self.show();
        Ok(Plan { ids, gaps })
    }

    /// Forgets ranges where the program has mapped something else since, if only in part.
    fn forget_replaced(&mut self, parts: &[Part], start: usize, end: usize) {
        let is_there = |range: &Range| {
            let (from, to) = (range.start.max(start), range.end.min(end));
            let held = parts.iter().filter(|&&part| range.holds(part)).map(|part| part.len());
            from >= to || held.sum::<usize>() == to - from
        };
        self.ranges.retain(is_there);
    }

    /// A file for pages that are to be replaced.
    fn file_to_convert(&self, len: usize) -> io::Result<OwnedFd> {
        if self.made >= MAX_MAPPINGS {
            let many = "the limit of mappings of shared pages is reached";
            return Err(io::Error::other(many));
        }
        self.file(len)
    }

    /// Takes note of pages that were replaced, with one user.
    fn converted(&mut self, place: (usize, usize), file: OwnedFd) -> io::Result<u32> {
        self.made += 1;
        let id = self.add(place, file, 1, false)?;
        self.show();
        Ok(id)
    }

    /// Makes a range of new pages, with one user.
    fn allocate(&mut self, len: usize) -> io::Result<(u32, Mapped)> {
        let file = self.file(len)?;
        let mapping = Mapped::of(&file, len)?;
        let start = mapping.addr().expose_provenance();
        let id = self.add((start, start + len), file, 1, true)?;
        self.show();
        Ok((id, mapping))
    }

    /// A file for one more range.
    fn file(&self, len: usize) -> io::Result<OwnedFd> {
        if self.ranges.len() >= MAX_SHARED {
            return Err(io::Error::other("the limit of shared ranges is reached"));
        }
        ANY.store(true, Ordering::Release);
        // Who asks for more than this gets a signal.
        let most = sys::file_size_limit().min(FILE_BYTES);
        if len as u64 > most {
            return Err(io::Error::other("the limit of file sizes (RLIMIT_FSIZE) is too low"));
        }
        segment::file(&self.name, most as usize)
    }

    fn add(
        &mut self,
        (start, end): (usize, usize),
        file: OwnedFd,
        users: usize,
        own: bool,
    ) -> io::Result<u32> {
        let inode = segment::settled(&file)?.inode;
        self.last_id = self.last_id.wrapping_add(1);
        let (id, file) = (self.last_id, ManuallyDrop::new(file));
        self.ranges.push(Range { id, start, end, file, inode, users, own });
        Ok(id)
    }

    /// Gives a registration's share back; the ranges that nobody uses any more.
    fn release(&mut self, ids: &[u32], live: Option<u64>) -> Vec<Range> {
        live.into_iter().for_each(|number| self.live.remove(number));
        for range in self.ranges.iter_mut().filter(|range| ids.contains(&range.id)) {
            range.users -= 1;
        }
        let gone = self.ranges.extract_if(.., |range| range.users == 0).collect();
        self.show();
        gone
    }

    fn show(&mut self) {
        let shown = self.ranges.iter().map(|range| SharedPages {
            addr: range.start as u64,
            len: (range.end - range.start) as u64,
            fd: range.file.as_raw_fd().unsigned_abs(),
            id: range.id,
            inode: range.inode,
        });
        self.writer.show(shown);
    }
}

impl Drop for Range {
    fn drop(&mut self) {
        if self.has_file() {
            // SAFETY: nobody uses it any more.
            unsafe { ManuallyDrop::drop(&mut self.file) };
        }
    }
}

impl Range {
    /// Whether the file is still there. A program that has closed what it does not know may have one of its
    /// own by its number.
    fn has_file(&self) -> bool {
        segment::settled(&self.file).is_ok_and(|found| found.inode == self.inode)
    }

    /// Whether a part shows those pages of the file that belong there.
    fn holds(&self, part: Part) -> bool {
        let Part::Ours { start, end, inode, offset } = part else { return false };
        let within = self.start <= start && end <= self.end;
        within && inode == self.inode && offset == (start - self.start) as u64
    }
}

impl Part {
    fn len(self) -> usize {
        match self {
            Self::Private { start, end } | Self::Ours { start, end, .. } => end - start,
        }
    }
}

/// What a look at the list of mappings found.
#[derive(Debug)]
struct Found {
    parts: Vec<Part>,
    /// Mappings of our files: all of them, or those before the end.
    ours: usize,
}

/// What can be shared of the pages from `start` to `end`, by the list of mappings. The whole of the heap is
/// not, since other threads allocate there meanwhile; nor is what holds code, nor the stack of this thread.
fn parts(
    mut list: impl BufRead,
    name: &CStr,
    start: usize,
    end: usize,
    counts: bool,
) -> io::Result<Found> {
    let (mut parts, mut ours, mut line) = (Vec::new(), 0, Vec::new());
    let here = (&raw const ours).addr();
    while list.read_until(b'\n', &mut line)? > 0 {
        let mapping = Mapping::parse(&line).ok_or(io::ErrorKind::InvalidData)?;
        if mapping.start >= end && !counts {
            break;
        }
        ours += usize::from(child::is_file(mapping.name, name.to_bytes()));
        let is_stack = (mapping.start..mapping.end).contains(&here);
        let meets = mapping.end > start && mapping.start < end;
        if meets && mapping.rights.starts_with(b"rw-") && !is_stack {
            let (from, to) = (mapping.start.max(start), mapping.end.min(end));
            let whole = from == mapping.start && to == mapping.end;
            match (mapping.rights.get(3), mapping.inode, mapping.name) {
                (Some(b'p'), 0, b"") => parts.push(Part::Private { start: from, end: to }),
                (Some(b'p'), 0, b"[heap]") if !whole => {
                    parts.push(Part::Private { start: from, end: to });
                }
                (Some(b's'), inode, file) if child::is_file(file, name.to_bytes()) => {
                    let offset = mapping.offset + (from - mapping.start) as u64;
                    parts.push(Part::Ours { start: from, end: to, inode, offset });
                }
                _ => {}
            }
        }
        line.clear();
    }
    Ok(Found { parts, ours })
}

#[cfg(test)]
mod tests;
