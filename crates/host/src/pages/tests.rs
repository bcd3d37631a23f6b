use super::*;
use crate::testing::{is_alone, limit_descriptors};

/// Private memory of the test's own.
struct Memory {
    start: usize,
    len: usize,
}

impl Memory {
    fn of(pages: usize) -> Self {
        let len = pages * mapped::page_size();
        Self { start: map(0, len), len }
    }

    /// The first byte of a page, as a pointer.
    fn page(&self, page: usize) -> *mut u8 {
        let offset = page * mapped::page_size();
        assert!(offset < self.len);
        ptr::with_exposed_provenance_mut(self.start + offset)
    }

    fn put(&self, page: usize, byte: u8) {
        // SAFETY: a byte of a mapping of our own.
        unsafe { self.page(page).write_volatile(byte) };
    }

    fn get(&self, page: usize) -> u8 {
        // SAFETY: as above.
        unsafe { self.page(page).read_volatile() }
    }

    fn share(&self) -> Option<Shared> {
        share(self.start, self.len as u64, true)
    }

    /// The ranges that are listed of it, as first page, pages, and pages that hold something.
    fn listed(&self) -> Vec<(usize, usize, u64)> {
        let books = registry().unwrap().lock();
        let page = mapped::page_size();
        let mine = |range: &&Range| range.start < self.start + self.len && range.end > self.start;
        let shape = |range: &Range| {
            let file = File::from(range.file.try_clone().unwrap());
            let blocks = std::os::unix::fs::MetadataExt::blocks(&file.metadata().unwrap());
            let held = blocks * 512 / page as u64;
            ((range.start - self.start) / page, (range.end - range.start) / page, held)
        };
        books.ranges.iter().filter(mine).map(shape).collect()
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        // SAFETY: the mapping of our own, which nobody uses any more.
        unsafe { libc::munmap(self.page(0).cast(), self.len) };
    }
}

/// Maps private memory, at `start` unless that is 0.
fn map(start: usize, len: usize) -> usize {
    let protection = libc::PROT_READ | libc::PROT_WRITE;
    let fixed = if start > 0 { libc::MAP_FIXED } else { 0 };
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | fixed;
    let place = ptr::without_provenance_mut(start);
    // SAFETY: new memory, or in the place of memory of the test's own.
    let at = unsafe { libc::mmap(place, len, protection, flags, -1, 0) };
    assert_ne!(at, libc::MAP_FAILED);
    at.expose_provenance()
}

#[test]
fn pages_keep_their_bytes_and_those_never_touched_stay_absent() {
    let memory = Memory::of(2000);
    let touched = [0, 1, 7, 511, 512, 513, 1999];
    touched.iter().for_each(|&page| memory.put(page, page as u8 | 1));
    let shared = memory.share().unwrap();
    assert_eq!(memory.listed(), [(0, 2000, touched.len() as u64)]);
    for page in 0..2000 {
        let expected = if touched.contains(&page) { page as u8 | 1 } else { 0 };
        assert_eq!(memory.get(page), expected, "page {page}");
    }
    drop(shared);
    assert_eq!(memory.listed(), []);
    assert_eq!(memory.get(7), 7);
}

/// As `realloc` has it of large memory.
#[test]
fn what_was_shared_can_be_made_longer() {
    let memory = Memory::of(2);
    memory.put(1, 5);
    drop(memory.share().unwrap());
    // Beside other memory it has to move.
    let page = mapped::page_size();
    let (old, flags) = (memory.page(0).cast(), libc::MREMAP_MAYMOVE);
    // SAFETY: memory of our own; nobody else knows of the new place.
    let longer = unsafe { libc::mremap(old, 2 * page, 600 * page, flags) };
    assert_ne!(longer, libc::MAP_FAILED);
    let longer = Memory { start: longer.expose_provenance(), len: 600 * page };
    std::mem::forget(memory);
    longer.put(599, 6);
    assert_eq!([0, 1, 2, 598, 599].map(|page| longer.get(page)), [0, 5, 0, 0, 6]);
    let shared = longer.share().unwrap();
    assert_eq!(longer.listed(), [(0, 600, 5)], "and stays sparse");
    assert_eq!([1, 599].map(|page| longer.get(page)), [5, 6]);
    drop(shared);
}

/// A peer that has no more to do with this process keeps what it has mapped.
#[test]
fn memory_that_is_given_back_is_nobodys_though_a_peer_has_it_mapped() {
    let (len, pages) = (64 * mapped::page_size(), 64);
    let memory = allocate(len).unwrap();
    let at = memory.addr();
    let file = |books: &Books| {
        let range = books.ranges.iter().find(|range| range.start == at).unwrap();
        (range.file.try_clone().unwrap(), range.inode)
    };
    let (file, inode) = file(&registry().unwrap().lock());
    let window = segment::attach_pages(&file, len, inode).unwrap();
    (0..pages).for_each(|page| window.write(page * mapped::page_size(), &[7]).unwrap());
    let file = File::from(file);
    let held = || std::os::unix::fs::MetadataExt::blocks(&file.metadata().unwrap()) * 512;
    assert_eq!(held(), len as u64);
    // While it is registered, too, nothing happens to it.
    let registered = share(at, len as u64, true).unwrap();
    let again = share(at, len as u64, true).unwrap();
    drop(again);
    assert_eq!(held(), len as u64);
    drop(registered);
    drop(memory);
    assert_eq!(held(), 0);
    let mut byte = [1];
    window.read(0, &mut byte).unwrap();
    assert_eq!(byte, [0]);
}

#[test]
fn only_whole_pages_are_shared() {
    let memory = Memory::of(4);
    let page = mapped::page_size();
    let places = [(memory.start + 1, page as u64), (memory.start, page as u64 - 1)];
    for (addr, len) in places.into_iter().chain([(memory.start, 0), (usize::MAX - 5, 100)]) {
        assert!(share(addr, len, true).unwrap().ids.is_empty());
    }
    assert!(share(memory.start, 2 * page as u64, false).unwrap().ids.is_empty(), "not possible");
    let shared = share(memory.start + 1, 3 * page as u64, true).unwrap();
    assert_eq!(memory.listed(), [(1, 2, 0)]);
    drop(shared);
}

/// Bytes may be placed there while they are copied.
#[test]
fn what_is_registered_already_stays_as_it_is() {
    let memory = Memory::of(8);
    let page = mapped::page_size();
    // A part of page 3, and all of page 5 as memory on demand.
    let edge = share(memory.start + 3 * page + 8, 16, true);
    let whole = share(memory.start + 5 * page, page as u64, false);
    let shared = memory.share();
    assert_eq!(memory.listed(), [(0, 3, 0), (4, 1, 0), (6, 2, 0)]);
    drop((edge, whole, shared));
    let shared = memory.share();
    let pages: usize = memory.listed().iter().map(|range| range.1).sum();
    assert_eq!(pages, 8, "afterwards it is shared");
    drop(shared);
}

/// Other threads wait for them while pages are replaced.
#[test]
fn what_this_is_kept_in_stays_as_it_is() {
    let own = turn().places().last().unwrap();
    for (from, to) in [own, still::place_of(registry().unwrap())] {
        let (start, end) = whole_pages((from, to));
        let shared = share(start, (end - start) as u64, true).unwrap();
        let books = registry().unwrap().lock();
        let covers = |range: &Range| range.start < to && range.end > from;
        assert!(!books.ranges.iter().any(covers));
        drop(books);
        drop(shared);
    }
}

/// Something that gives memory back under its lock.
struct Giving(Mutex<Option<Segment>>);

impl Still for Giving {
    fn hold(&self, act: &mut dyn FnMut()) {
        drop(self.0.lock().unwrap().take());
        act();
    }
}

#[test]
fn memory_can_be_given_back_while_pages_are_to_be_replaced() {
    let given = allocate(mapped::page_size()).unwrap();
    let giving = Arc::new(Giving(Mutex::new(Some(given))));
    let held: Arc<dyn Still> = Arc::<Giving>::clone(&giving);
    let member = Member::new(&held, [(0, 0); 2]);
    let memory = Memory::of(2);
    let shared = memory.share();
    assert_eq!(memory.listed(), [(0, 2, 0)]);
    assert!(giving.0.lock().unwrap().is_none());
    drop((shared, member));
    assert!(turn().places().all(|place| place != (0, 0)), "it need not hold still any more");
}

/// The list must not name pages for which the program has put others in place.
#[test]
fn a_range_that_was_replaced_in_part_is_not_listed() {
    let memory = Memory::of(8);
    let page = mapped::page_size();
    let stale = memory.share();
    map(memory.start, 4 * page);
    memory.put(0, 2);
    let shared = memory.share();
    assert_eq!(memory.listed(), []);
    drop((stale, shared));
    let shared = memory.share();
    let pages: usize = memory.listed().iter().map(|range| range.1).sum();
    assert_eq!((pages, memory.get(0)), (8, 2));
    drop(shared);
}

#[test]
fn the_stack_of_the_thread_stays_as_it_is() {
    std::thread::spawn(|| {
        let buffer = [7u8; 1 << 16];
        let shared = share(buffer.as_ptr().expose_provenance(), buffer.len() as u64, true).unwrap();
        assert!(shared.ids.is_empty());
        assert!(buffer.iter().all(|byte| *byte == 7));
    })
    .join()
    .unwrap();
}

#[test]
fn registrations_of_the_same_pages_share_them() {
    let memory = Memory::of(8);
    let page = mapped::page_size();
    memory.put(3, 9);
    let middle = share(memory.start + 2 * page, 3 * page as u64, true).unwrap();
    let all = memory.share().unwrap();
    let shapes = [(2, 3, 1), (0, 2, 0), (5, 3, 0)];
    assert_eq!(memory.listed(), shapes);
    drop(middle);
    assert_eq!(memory.listed(), shapes, "the other registration still uses it");
    drop(all);
    assert_eq!((memory.listed(), memory.get(3)), (vec![], 9));
}

#[test]
fn what_was_shared_before_is_shared_again_with_its_bytes() {
    let memory = Memory::of(3);
    for round in 1..4 {
        memory.put(1, round);
        let shared = memory.share().unwrap();
        assert_eq!((memory.listed().len(), memory.get(1)), (1, round));
        drop(shared);
    }
}

#[test]
fn memory_that_was_replaced_meanwhile_is_not_taken_for_the_old() {
    let memory = Memory::of(3);
    memory.put(0, 1);
    let stale = memory.share().unwrap();
    map(memory.start, memory.len);
    assert_eq!(memory.get(0), 0);
    memory.put(0, 2);
    let too_soon = memory.share();
    assert_eq!(memory.listed(), [], "while the old registration lives");
    drop((stale, too_soon));
    let shared = memory.share().unwrap();
    assert_eq!((memory.listed(), memory.get(0)), (vec![(0, 3, 1)], 2));
    drop(shared);
}

#[test]
fn memory_that_may_not_be_written_stays_as_it_is() {
    let memory = Memory::of(3);
    memory.put(0, 1);
    // SAFETY: changes the rights of a page of our own.
    unsafe { libc::mprotect(memory.page(1).cast(), mapped::page_size(), libc::PROT_READ) };
    let shared = memory.share().unwrap();
    assert_eq!(memory.listed(), [(0, 1, 1), (2, 1, 0)]);
    drop(shared);
}

#[test]
fn the_list_of_mappings_says_what_can_be_shared() {
    let text = "\
1000-3000 rw-p 00000000 00:00 0\n\
3000-4000 r--p 00000000 00:00 0\n\
4000-6000 rw-p 00000000 00:00 0                          [heap]\n\
6000-7000 rw-p 00000000 fd:00 77                         /a file\n\
7000-8000 rw-s 00003000 00:01 12                         /memfd:quipu-pages-1 (deleted)\n\
8000-9000 rw-s 00000000 00:01 13                         /memfd:quipu-pages-2 (deleted)\n\
9000-a000 rw-s 00000000 00:01 14                         /dev/zero (deleted)\n\
a000-b000 rw-p 00000000 00:00 0                          [stack]\n\
b000-c000 rw-p 00000000 00:00 0\n\
c000-d000 rwxp 00000000 00:00 0\n";
    let found = |start, end| parts(text.as_bytes(), c"quipu-pages-1", start, end, true).unwrap();
    let of = |start, end| found(start, end).parts;
    let private = |start, end| Part::Private { start, end };
    let ours = Part::Ours { start: 0x7000, end: 0x8000, inode: 12, offset: 0x3000 };
    assert_eq!(of(0x2000, 0xc000), [private(0x2000, 0x3000), ours, private(0xb000, 0xc000)]);
    assert_eq!(of(0x4000, 0x5000), [private(0x4000, 0x5000)], "a part of the heap");
    assert_eq!(of(0x4000, 0x6000), [], "the whole heap");
    assert_eq!(of(0xc000, 0xe000), [], "code, and nothing");
    assert_eq!([found(0, 1).ours, found(0, usize::MAX).ours], [1, 1]);
}

#[test]
fn a_child_has_memory_of_its_own() {
    if is_alone("pages::tests::a_child_has_memory_of_its_own") {
        a_child_does_as_it_likes(|| ());
    }
}

#[test]
fn a_child_has_memory_of_its_own_where_there_is_no_proc() {
    if is_alone("pages::tests::a_child_has_memory_of_its_own_where_there_is_no_proc") {
        // It needs the right to.
        a_child_does_as_it_likes(|| println!("{:?}", std::os::unix::fs::chroot("/dev")));
    }
}

#[test]
fn a_child_has_memory_of_its_own_where_there_are_no_descriptors() {
    if is_alone("pages::tests::a_child_has_memory_of_its_own_where_there_are_no_descriptors") {
        limit_descriptors(256);
        let mut fill = Vec::new();
        // More than once: what was given up is there again.
        for _ in 0..2 {
            fill.truncate(fill.len().saturating_sub(4));
            a_child_does_as_it_likes(|| {
                fill.extend(std::iter::from_fn(|| File::open("/dev/null").ok()));
            });
        }
    }
}

/// What `prepare` does comes before the fork.
fn a_child_does_as_it_likes(prepare: impl FnOnce()) {
    let memory = Memory::of(40);
    // Ranges that are shared now, and one that was.
    let shares: Vec<_> = (0..39)
        .map(|page| {
            memory.put(page, 1);
            share(memory.page(page).expose_provenance(), mapped::page_size() as u64, true)
        })
        .skip(1)
        .collect();
    let (from_child, to_parent) = std::io::pipe().unwrap();
    let (from_parent, to_child) = std::io::pipe().unwrap();
    let mut byte = 0u8;
    let at: *mut libc::c_void = (&raw mut byte).cast();
    prepare();
    // SAFETY: the child does nothing but reads, writes and `_exit`, which are async-signal-safe.
    let child = unsafe { libc::fork() };
    if child == 0 {
        // SAFETY: as above.
        unsafe {
            libc::read(from_parent.as_raw_fd(), at, 1);
            let all = (0..39).all(|page| memory.get(page) == 1);
            (0..39).for_each(|page| memory.put(page, 3));
            at.cast::<u8>().write(u8::from(all && current().is_none()));
            libc::write(to_parent.as_raw_fd(), at, 1);
            libc::_exit(0);
        }
    }
    assert!(child > 0);
    (0..39).for_each(|page| memory.put(page, 2));
    drop(to_parent);
    let mut said = [0];
    io::Write::write_all(&mut &to_child, &[1]).unwrap();
    io::Read::read_exact(&mut &from_child, &mut said).unwrap();
    // SAFETY: waits for a child of our own.
    assert_eq!(unsafe { libc::waitpid(child, ptr::null_mut(), 0) }, child);
    assert_eq!(said, [1], "it sees what was there when it began, and nothing is registered");
    assert!((0..39).all(|page| memory.get(page) == 2), "nor is what it writes seen");
    drop(shares);
}

/// As programs do that close all that they do not know.
#[test]
fn a_file_of_the_program_that_has_the_number_of_shared_pages_keeps_its_contents() {
    const TEST: &str = "pages::tests::\
        a_file_of_the_program_that_has_the_number_of_shared_pages_keeps_its_contents";
    if !is_alone(TEST) {
        return;
    }
    let memory = allocate(mapped::page_size()).unwrap();
    let number = registry().unwrap().lock().ranges[0].file.as_raw_fd();
    let path = std::env::temp_dir().join(format!("quipu-pages-{}", std::process::id()));
    std::fs::write(&path, [7; 10_000]).unwrap();
    let file = File::options().write(true).open(&path).unwrap();
    // SAFETY: takes integers; what had the number is closed, as a program may do that knows no better.
    assert_eq!(unsafe { libc::dup2(file.as_raw_fd(), number) }, number);
    drop(memory);
    let found = std::fs::read(&path).unwrap();
    std::fs::remove_file(&path).unwrap();
    assert!(found == [7; 10_000]);
}

#[test]
fn a_file_of_the_program_that_has_the_number_of_a_spare_descriptor_stays_open() {
    const TEST: &str = "pages::tests::\
        a_file_of_the_program_that_has_the_number_of_a_spare_descriptor_stays_open";
    if !is_alone(TEST) {
        return;
    }
    let memory = Memory::of(1);
    let shared = memory.share();
    let theirs = File::open("/proc/self/stat").unwrap();
    for number in child::spares() {
        // SAFETY: as above.
        assert_eq!(unsafe { libc::dup2(theirs.as_raw_fd(), number) }, number);
    }
    let numbers = child::spares();
    // SAFETY: the child makes system calls only, and ends.
    let child = unsafe { libc::fork() };
    if child == 0 {
        let is_open = |&number: &i32| crate::fork::identity(number).is_some();
        // SAFETY: as above.
        unsafe { libc::_exit(i32::from(!numbers.iter().all(is_open))) };
    }
    let mut status = 0;
    // SAFETY: waits for a child of our own.
    assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
    assert_eq!(status, 0, "the child has lost its files");
    drop(shared);
}

#[test]
fn memory_that_is_given_away_is_listed_while_it_lives() {
    let shares = |which| SharedRegions::new(which).allocate(10_000);
    assert!(shares(crate::SharedPages::Never).is_none());
    let page = mapped::page_size();
    assert!(SharedRegions::new(crate::SharedPages::Own).allocate(page - 1).is_none());
    let memory = shares(crate::SharedPages::Own).unwrap();
    let listed = |addr: usize| {
        let books = registry().unwrap().lock();
        books.ranges.iter().filter(|range| range.start == addr).map(|r| r.end - r.start).sum()
    };
    let (addr, whole) = (memory.addr(), 10_000_usize.next_multiple_of(page));
    assert_eq!((memory.len(), addr % page, listed(addr)), (10_000, 0, whole));
    let mut bytes = [1; 10_000];
    memory.read(0, &mut bytes).unwrap();
    assert_eq!(bytes, [0; 10_000]);
    memory.write(9_999, &[7]).unwrap();
    // A registration shares it, whether it has to be converted or not.
    let shared = share(addr, 10_000, true).unwrap();
    assert_eq!(listed(addr), whole);
    memory.read(0, &mut bytes).unwrap();
    assert_eq!(bytes[9_999], 7);
    drop(shared);
    assert_eq!(listed(addr), whole);
    drop(memory);
    assert_eq!(listed(addr), 0);
}

/// A child keeps what it inherits open; the forks of other threads do not wait for its end.
#[test]
fn threads_that_fork_at_once_do_not_wait_for_each_others_children() {
    if !is_alone("pages::tests::threads_that_fork_at_once_do_not_wait_for_each_others_children") {
        return;
    }
    let memory = Memory::of(4);
    let shared = memory.share().unwrap();
    let fork = || {
        // SAFETY: the child does nothing but sleep and `_exit`, which are async-signal-safe.
        let child = unsafe { libc::fork() };
        if child == 0 {
            // SAFETY: as above.
            unsafe {
                libc::sleep(20);
                libc::_exit(0);
            }
        }
        assert!(child > 0);
        child
    };
    let begin = std::time::Instant::now();
    let children: Vec<_> = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..3).map(|_| scope.spawn(|| [(); 20].map(|()| fork()))).collect();
        threads.into_iter().flat_map(|thread| thread.join().unwrap()).collect()
    });
    let took = begin.elapsed();
    for child in children {
        // SAFETY: ends and waits for a child of our own.
        unsafe {
            libc::kill(child, libc::SIGKILL);
            assert_eq!(libc::waitpid(child, ptr::null_mut(), 0), child);
        }
    }
    assert!(took < std::time::Duration::from_secs(9), "{took:?}");
    drop(shared);
}
