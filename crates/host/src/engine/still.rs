//! Engines hold still while pages of the process are replaced ([`pages::still`](crate::pages)).

use std::sync::Arc;

use super::Inner;
use crate::mapped::Mappings;
use crate::pages::{Member, Still};

impl Still for Inner {
    fn hold(&self, act: &mut dyn FnMut()) {
        let core = self.core.lock();
        act();
        // There may be more pieces.
        core.give_way();
    }
}

/// From now on an engine holds still. What lies behind pointers is written under its lock only.
pub(super) fn join(inner: &Arc<Inner>) -> Member {
    let counts = 2 * size_of::<usize>();
    let place = |at: usize, len| (at - counts, at + len);
    let engine = place(Arc::as_ptr(inner).addr(), size_of::<Inner>());
    let mappings = place(Arc::as_ptr(&inner.mappings).addr(), size_of::<Mappings>());
    let member: Arc<dyn Still> = Arc::<Inner>::clone(inner);
    Member::new(&member, [engine, mappings])
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, Ordering};

    use quipu_mem::{Access, Vouched};

    use super::*;
    use crate::mapped::{Mapping, page_size};
    use crate::{Config, Engine, SharedPages};

    const ROUNDS: usize = 200;

    fn sharing() -> Arc<Engine> {
        let (address, shared_pages) = (Some([127, 0, 0, 1].into()), SharedPages::Registered);
        Engine::open(Config { address, shared_pages, ..Config::default() }).unwrap()
    }

    /// Whether the page at an address is one of a file that peers may map.
    fn is_shared(at: usize) -> bool {
        let list = std::fs::read("/proc/self/maps").unwrap();
        let mut mappings = list.split(|&byte| byte == b'\n').filter_map(Mapping::parse);
        let found = mappings.find(|mapping| (mapping.start..mapping.end).contains(&at)).unwrap();
        found.name.starts_with(b"/memfd:quipu-pages")
    }

    /// Middleware registers all of the pages in which a buffer lies, and an engine may lie beside it.
    #[test]
    fn pages_in_which_an_engine_lies_stay_as_they_are() {
        const TEST: &str = "engine::still::tests::pages_in_which_an_engine_lies_stay_as_they_are";
        if !crate::testing::is_alone(TEST) {
            return;
        }
        let engine = sharing();
        let pd = engine.alloc_pd().unwrap();
        let at = Arc::as_ptr(&engine.inner).expose_provenance();
        let start = at / page_size() * page_size();
        let end = (at + size_of::<Inner>()).next_multiple_of(page_size());
        // SAFETY: nobody writes there for the adapter; the pages live as long as the engine.
        let memory = unsafe { Vouched::new(start, (end - start) as u64, 0, Access::REMOTE_READ) };
        engine.reg_mr(pd, memory).unwrap();
        assert!(!is_shared(at) && !is_shared(at + size_of::<Inner>() - 1));
    }

    /// As an engine's queues are, which may lie anywhere.
    #[test]
    fn what_is_written_under_the_lock_while_pages_are_replaced_is_kept() {
        let engine = sharing();
        let mut memory = vec![1u64; 64 * page_size() / 8];
        let (at, len) = (memory.as_mut_ptr(), memory.len() as u64 * 8);
        // A whole page, which is copied first.
        let counter = at.map_addr(|at| at.next_multiple_of(page_size())).expose_provenance();
        let (began, over) = (AtomicBool::new(false), AtomicBool::new(false));
        let count = || {
            let place = std::ptr::with_exposed_provenance_mut::<u64>(counter);
            let mut counted = 1;
            while !over.load(Ordering::Relaxed) {
                let _core = engine.inner.core.lock();
                // SAFETY: within the memory, which nobody else touches.
                unsafe { place.write_volatile(place.read_volatile() + 1) };
                counted += 1;
                began.store(true, Ordering::Relaxed);
            }
            counted
        };
        let counted: u64 = std::thread::scope(|scope| {
            let counts = scope.spawn(count);
            while !began.load(Ordering::Relaxed) {
                std::thread::yield_now();
            }
            for _ in 0..ROUNDS {
                drop(engine.inner.shared.share(at.addr(), len, true));
            }
            over.store(true, Ordering::Relaxed);
            counts.join().unwrap()
        });
        assert!(is_shared(counter));
        // SAFETY: within the memory, which only this thread has now.
        let found = unsafe { std::ptr::with_exposed_provenance::<u64>(counter).read_volatile() };
        assert_eq!(found, counted);
    }
}
