use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use quipu_mem::{SHARED_PAGES_BYTES, Segment, SharedPages, SharedPagesReader, SharedPagesWriter};
use quipu_nic::{Atomic, PeerMemory, PeerMemoryFault};

use crate::link::peer_memory::ProcessMemory;
use crate::link::segment::{self, settled};

use super::{OwnedFd, pid_t};

const PAGE: usize = 4096;

/// This process as a peer of its own, whose list the test writes. That what is behind a window is another
/// file than the memory whose place it takes shows which way bytes went.
struct Peer {
    list: SharedPagesWriter,
    memory: ProcessMemory,
    /// Eight pages, each filled with its number.
    pages: Segment,
}

impl Peer {
    fn new() -> Self {
        let list = Segment::heap(SHARED_PAGES_BYTES);
        let reader = SharedPagesReader::new(&list).unwrap();
        let alive = Arc::new(AtomicBool::new(true));
        let pages = Segment::heap(8 * PAGE);
        (0..8).for_each(|page| pages.write(page * PAGE, &[page as u8; PAGE]).unwrap());
        Self {
            list: SharedPagesWriter::create(&list).unwrap(),
            memory: ProcessMemory::new(std::process::id() as pid_t, alive).with_windows(reader),
            pages,
        }
    }

    fn addr(&self, page: usize) -> u64 {
        (self.pages.addr() + page * PAGE) as u64
    }

    fn range(&self, file: &OwnedFd, id: u32, page: usize, pages: usize) -> SharedPages {
        let fd = std::os::fd::AsRawFd::as_raw_fd(file) as u32;
        let inode = settled(file).map_or(0, |settled| settled.inode);
        SharedPages { addr: self.addr(page), len: (pages * PAGE) as u64, fd, id, inode }
    }

    /// The first bytes of eight pages, as a peer reads them in one piece.
    fn seen(&self) -> [u8; 8] {
        let mut bytes = [0u8; 8 * PAGE];
        let at = bytes.as_mut_ptr().expose_provenance();
        // In pieces that are no pages.
        let local =
            [(at, 100), (at + 100, 0), (at + 100, 5 * PAGE), (at + 100 + 5 * PAGE, 3 * PAGE - 100)];
        self.memory.read(&[(self.addr(0), 8 * PAGE as u64)], &local).unwrap();
        std::array::from_fn(|page| bytes[page * PAGE])
    }
}

fn file(pages: usize, byte: u8) -> OwnedFd {
    let file = segment::file(c"test", pages * PAGE).unwrap();
    let inode = settled(&file).unwrap().inode;
    let view = segment::attach_pages(&file, pages * PAGE, inode).unwrap();
    view.write(0, &vec![byte; pages * PAGE]).unwrap();
    file
}

#[test]
fn what_is_listed_is_mapped_and_the_rest_is_copied_by_the_kernel() {
    let mut peer = Peer::new();
    assert_eq!(peer.seen(), [0, 1, 2, 3, 4, 5, 6, 7]);
    let (one, two) = (file(1, 100), file(3, 101));
    let ranges = [peer.range(&two, 2, 4, 3), peer.range(&one, 1, 1, 1)];
    peer.list.show(ranges.into_iter());
    assert_eq!(peer.seen(), [0, 100, 2, 3, 101, 101, 101, 7]);
    // A word behind the window, and one across its end.
    let word = 0x0102_0304_0506_0708_u64;
    let local = [((&raw const word).expose_provenance(), 8)];
    peer.memory.write(&local, &[(peer.addr(1) + 8, 8)]).unwrap();
    peer.memory.write(&local, &[(peer.addr(2) - 4, 8)]).unwrap();
    let view = segment::attach_pages(&one, PAGE, ranges[1].inode).unwrap();
    let (mut inside, mut outside) = ([0; 8], [0; 8]);
    view.read(8, &mut inside).unwrap();
    peer.pages.read(2 * PAGE, &mut outside).unwrap();
    assert_eq!(u64::from_ne_bytes(inside), word);
    assert_eq!(outside, [4, 3, 2, 1, 2, 2, 2, 2]);
    // A list of several ranges of the peer.
    let remote = [(peer.addr(1), 8), (peer.addr(0), 4), (peer.addr(5), 4)];
    let mut out = [0u8; 16];
    peer.memory.read(&remote, &[(out.as_mut_ptr().expose_provenance(), 16)]).unwrap();
    assert_eq!(out, [100, 100, 100, 100, 100, 100, 100, 100, 0, 0, 0, 0, 101, 101, 101, 101]);
}

#[test]
fn atomics_are_for_words_that_are_mapped() {
    let mut peer = Peer::new();
    let one = file(1, 0);
    let range = peer.range(&one, 1, 1, 1);
    peer.list.show(std::iter::once(range));
    let add = Atomic::FetchAdd(5);
    let word = peer.addr(1) + 8;
    assert_eq!([peer.memory.atomic(word, add), peer.memory.atomic(word, add)], [Some(0), Some(5)]);
    let swap = |compare| peer.memory.atomic(word, Atomic::CompareSwap { compare, swap: 1 });
    assert_eq!([swap(9), swap(10), swap(10)], [Some(10), Some(10), Some(1)]);
    let view = segment::attach_pages(&one, PAGE, range.inode).unwrap();
    let mut found = [0; 8];
    view.read(8, &mut found).unwrap();
    assert_eq!(u64::from_ne_bytes(found), 1);
    for elsewhere in [peer.addr(0) + 8, peer.addr(2), peer.addr(2) - 4, word + 1] {
        assert_eq!(peer.memory.atomic(elsewhere, add), None);
    }
}

#[test]
fn what_is_not_listed_any_more_is_not_looked_at() {
    let mut peer = Peer::new();
    let (one, two) = (file(1, 100), file(1, 101));
    let (first, second) = (peer.range(&one, 1, 1, 1), peer.range(&two, 2, 1, 1));
    for (shown, expected) in
        [(Some(first), 100), (Some(second), 101), (None, 1), (Some(first), 100)]
    {
        peer.list.show(shown.into_iter());
        assert_eq!(peer.seen()[1], expected);
    }
}

#[test]
fn lies_lead_to_the_kernels_way() {
    let mut peer = Peer::new();
    let good = file(1, 100);
    let range = peer.range(&good, 1, 1, 1);
    let unsealed = crate::sys::adopt(
        // SAFETY: the name is a zero-terminated string that outlives the call.
        unsafe { libc::memfd_create(c"unsealed".as_ptr(), libc::MFD_CLOEXEC) },
    );
    let unsealed = unsealed.unwrap();
    // SAFETY: takes integers only.
    assert_eq!(unsafe { libc::ftruncate(std::os::fd::AsRawFd::as_raw_fd(&unsealed), 1 << 20) }, 0);
    let lies = [
        SharedPages { len: 2 * PAGE as u64, ..range },
        SharedPages { inode: range.inode + 1, ..range },
        SharedPages { fd: u32::MAX, ..range },
        SharedPages { fd: 1_000_000, ..range },
        SharedPages { addr: u64::MAX - 5, ..range },
        SharedPages { len: u64::MAX - range.addr, ..range },
        SharedPages { len: 0, ..range },
        SharedPages { addr: range.addr + 8, ..range },
        SharedPages { len: 100, ..range },
        peer.range(&unsealed, 1, 1, 1),
    ];
    for (id, lie) in (1..).zip(lies) {
        peer.list.show(std::iter::once(SharedPages { id, ..lie }));
        assert_eq!(peer.seen(), [0, 1, 2, 3, 4, 5, 6, 7], "{lie:?}");
    }
    // One that overlaps another: the first counts.
    peer.list.show([range, SharedPages { id: 50, ..range }].into_iter());
    assert_eq!(peer.seen(), [0, 100, 2, 3, 4, 5, 6, 7]);
    let mut bytes = [0u8; 16];
    let local = [(bytes.as_mut_ptr().expose_provenance(), 16)];
    for nowhere in [8, u64::MAX - 7] {
        assert_eq!(peer.memory.read(&[(nowhere, 16)], &local), Err(PeerMemoryFault::BadAddress));
    }
    peer.list.show(std::iter::once(SharedPages { id: 60, addr: u64::MAX - 8191, ..range }));
    let across = [(u64::MAX - 7, 16)];
    assert_eq!(peer.memory.read(&across, &local), Err(PeerMemoryFault::BadAddress));
}
