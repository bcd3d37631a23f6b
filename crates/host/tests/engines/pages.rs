//! Whether a registration makes the pages of its memory.

use std::num::NonZeroUsize;

use quipu_host::SameHost;
use quipu_mem::{Access, Vouched};

use crate::common::engine;

const PAGE: usize = 4096;
const RW: Access = Access::LOCAL_WRITE.union(Access::REMOTE_WRITE);

/// Address space in which nothing is yet.
struct Blank {
    at: NonZeroUsize,
    len: usize,
}

impl Blank {
    fn new(len: usize) -> Self {
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
        let both = libc::PROT_READ | libc::PROT_WRITE;
        // SAFETY: a new mapping.
        let at = unsafe { libc::mmap(std::ptr::null_mut(), len, both, flags, -1, 0) };
        assert_ne!(at, libc::MAP_FAILED);
        // SAFETY: of that mapping. A touched page brings no others along.
        unsafe { libc::madvise(at, len, libc::MADV_NOHUGEPAGE) };
        Self { at: NonZeroUsize::new(at.expose_provenance()).unwrap(), len }
    }

    /// How many of the first 2000 pages are present.
    fn present(&self) -> usize {
        let mut pages = [0; 2000];
        let len = self.len.min(pages.len() * PAGE);
        let at = std::ptr::with_exposed_provenance_mut(self.at.get());
        // SAFETY: a byte for each page.
        assert_eq!(0, unsafe { libc::mincore(at, len, pages.as_mut_ptr()) });
        pages.iter().filter(|page| *page & 1 != 0).count()
    }

    fn vouched(&self, pages: std::ops::Range<usize>, access: Access) -> Vouched {
        let (start, len) = (self.at.get() + pages.start * PAGE, pages.len() * PAGE);
        // SAFETY: the mapping outlives the engines of these tests, which access nothing of it.
        unsafe { Vouched::new(start, len as u64, start as u64, access) }
    }
}

impl Drop for Blank {
    fn drop(&mut self) {
        // SAFETY: the mapping, which nobody uses any more.
        unsafe {
            libc::munmap(std::ptr::with_exposed_provenance_mut(self.at.get()), self.len);
        }
    }
}

#[test]
fn a_registration_makes_its_pages_and_no_others() {
    let engine = engine("127.0.0.1", SameHost::Never);
    let pd = engine.alloc_pd().unwrap();
    let blank = Blank::new(64 * PAGE);
    let first = engine.reg_mr(pd, blank.vouched(3..8, RW)).unwrap();
    assert_eq!(blank.present(), 5);
    let to_read = engine.reg_mr(pd, blank.vouched(8..10, Access::REMOTE_READ)).unwrap();
    assert_eq!(blank.present(), 7);
    engine.rereg_mr(first.id, None, Some(blank.vouched(20..24, RW)), None).unwrap();
    assert_eq!(blank.present(), 11, "new memory of an old registration");
    for region in [first, to_read] {
        engine.dereg_mr(region.id).unwrap();
    }
}

#[test]
fn pages_on_demand_and_very_large_registrations_stay_as_they_are() {
    let engine = engine("127.0.0.1", SameHost::Never);
    let pd = engine.alloc_pd().unwrap();
    // More than the machine has.
    let blank = Blank::new(1 << 40);
    let all = blank.len / PAGE;
    let ends = [(0..200, Access::ON_DEMAND.union(RW)), (0..all, RW), (0..all, Access::ON_DEMAND)];
    for (pages, access) in ends {
        let region = engine.reg_mr(pd, blank.vouched(pages, access)).unwrap();
        assert_eq!(blank.present(), 0);
        engine.dereg_mr(region.id).unwrap();
    }
}
