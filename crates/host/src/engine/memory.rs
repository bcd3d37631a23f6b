//! Protection domains, memory regions and windows.

use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use quipu_fault::{Call, Occasion};
use quipu_mem::{Access, RegionInfo, Segment, Vouched};
use quipu_nic::{Key, MrId, MwId, PdId, Region, Time, WindowType};

use super::Engine;
use super::core::Core;
use super::faults::About;
use crate::error::EngineError;
use crate::lock::Guard;
use crate::pages::Shared;
use crate::{blank, mapped};

/// How long the end of a registration waits for a same-host peer that is in the middle of an access.
/// Anyone who takes longer loses its link, so that it holds up one call at most.
pub(crate) const QUIET_WAIT: Duration = Duration::from_millis(if cfg!(test) { 300 } else { 5000 });
/// Registrations of up to so many bytes have their pages made, and of all together so many bytes. What is
/// larger may be sparse: a program may register far more than it will ever use.
const PRESENT_MAX: u64 = 64 << 20;
const PRESENT_MAX_IN_ALL: u64 = 1 << 30;
/// How long it only yields, before it sleeps for moments.
const QUIET_YIELDS: Duration = Duration::from_millis(1);
const QUIET_NAP: Duration = Duration::from_micros(100);

impl Engine {
    /// Creates a protection domain.
    ///
    /// # Errors
    ///
    /// No room.
    pub fn alloc_pd(&self) -> Result<PdId, EngineError> {
        if let Some(elsewhere) = self.elsewhere()? {
            return elsewhere.alloc_pd();
        }
        Ok(self.enter_for(Call::AllocPd)?.adapter.alloc_pd()?)
    }

    /// Destroys a protection domain.
    ///
    /// # Errors
    ///
    /// It is in use, or there is none.
    pub fn dealloc_pd(&self, pd: PdId) -> Result<(), EngineError> {
        if let Some(elsewhere) = self.elsewhere()? {
            return elsewhere.dealloc_pd(pd);
        }
        Ok(self.enter_for(Call::DeallocPd)?.adapter.dealloc_pd(pd)?)
    }

    /// Registers memory for which the caller vouches. Nothing is pinned, but pages that are absent are made,
    /// unless it is on demand or of more than 64 MiB, up to a gigabyte of all registrations.
    ///
    /// # Errors
    ///
    /// [`EngineError::BadAddress`], illegal rights or range, or no room.
    pub fn reg_mr(&self, pd: PdId, memory: Vouched) -> Result<Region, EngineError> {
        if let Some(elsewhere) = self.elsewhere()? {
            let place = (memory.addr(), memory.len());
            return elsewhere.register(pd, place, memory.iova(), memory.access());
        }
        // Pages on demand may come later, or never, as those of the whole address space; and go.
        let memory = if memory.access().contains(Access::ON_DEMAND) {
            memory.on_demand()
        } else {
            self.check_memory(memory.addr(), memory.len(), memory.access())?;
            memory
        };
        let occasion = Occasion::of(Call::RegMr).with_bytes(memory.len());
        let shared = self.share_pages(&memory, memory.access());
        let wanted = Wanted::of(&memory, memory.access());
        let mut core = self.enter_at(occasion, About::Nothing)?;
        let region = core.adapter.reg_mr(pd, memory)?;
        core.watch_region(region.id);
        drop(core);
        self.make_pages(wanted);
        self.inner.shared.keep(region.id, shared);
        Ok(region)
    }

    /// Copies memory of a region: with the rights of own requests, or of a peer. For protocols that place
    /// bytes themselves.
    ///
    /// # Errors
    ///
    /// No such region of the domain, a range outside of it, no right, or the adapter is that of another
    /// process.
    pub fn read_region(
        &self,
        pd: PdId,
        place: (Key, u64),
        is_peer: bool,
        out: &mut [u8],
    ) -> Result<(), EngineError> {
        Ok(self.enter()?.adapter.read_region(pd, place, is_peer, out)?)
    }

    /// Writes to memory of a region: with the rights of own requests, or of a peer.
    ///
    /// # Errors
    ///
    /// As [`read_region`](Self::read_region).
    pub fn write_region(
        &self,
        pd: PdId,
        place: (Key, u64),
        is_peer: bool,
        bytes: &[u8],
    ) -> Result<(), EngineError> {
        Ok(self.enter()?.adapter.write_region(pd, place, is_peer, bytes)?)
    }

    /// Makes a region that reads as zeros and forgets what is written to it.
    ///
    /// # Errors
    ///
    /// No room, or no address space.
    pub fn reg_null_mr(&self, pd: PdId) -> Result<Region, EngineError> {
        let nothing = match self.inner.nothing.get() {
            Some(nothing) => *nothing,
            None => {
                let made = blank::nothing();
                let made = made.map_err(|e| EngineError::system("address space", e))?;
                *self.inner.nothing.get_or_init(|| made)
            }
        };
        Ok(self.enter_for(Call::RegMr)?.adapter.reg_null_mr(pd, nothing)?)
    }

    /// The protection domain of a region, and what it is.
    ///
    /// # Errors
    ///
    /// No such region.
    pub fn query_mr(&self, mr: MrId) -> Result<(PdId, RegionInfo), EngineError> {
        let core = self.enter()?;
        Ok((core.adapter.mr_domain(mr)?, core.adapter.query_mr(mr)?))
    }

    /// Makes pages present before they are needed (`ibv_advise_mr`).
    ///
    /// # Errors
    ///
    /// [`EngineError::BadAddress`]: not all of them may be read or, if `write` says so, written.
    pub fn prefetch(&self, addr: usize, len: u64, write: bool) -> Result<(), EngineError> {
        if !self.inner.mappings.allow(addr, len, write) {
            return Err(EngineError::BadAddress);
        }
        mapped::populate(addr, len, write);
        Ok(())
    }

    /// The time by the clock that stamps completions: nanoseconds of `CLOCK_MONOTONIC`.
    ///
    /// # Errors
    ///
    /// [`EngineError::EngineGone`].
    pub fn now(&self) -> Result<Time, EngineError> {
        Ok(self.enter()?.now())
    }

    /// Has peers map what is possible of memory that is about to be registered. Nothing of memory on demand,
    /// which may be all that the process has.
    fn share_pages(&self, memory: &Vouched, access: Access) -> Option<Shared> {
        let possible = !access.contains(Access::ON_DEMAND);
        self.inner.shared.share(memory.addr(), memory.len(), possible)
    }

    /// Makes the pages of memory that was registered, where that is to be done: outside of the lock. The
    /// kernel would make them one by one as messages come.
    fn make_pages(&self, memory: Wanted) {
        let Wanted { addr, len, access } = memory;
        if len > PRESENT_MAX || access.contains(Access::ON_DEMAND) {
            return;
        }
        let made = &self.inner.made_present;
        if made.load(Ordering::Relaxed) <= PRESENT_MAX_IN_ALL - PRESENT_MAX {
            let write = access.contains(Access::LOCAL_WRITE);
            made.fetch_add(mapped::populate_absent(addr, len, write), Ordering::Relaxed);
        }
    }

    /// Checks that memory is there, and writable if `access` says so. Outside of the lock, since it
    /// asks the kernel; what the program does to its memory afterwards is its own affair.
    fn check_memory(&self, addr: usize, len: u64, access: Access) -> Result<(), EngineError> {
        if !self.is_here() {
            return Err(EngineError::EngineGone);
        }
        let write = access.contains(Access::LOCAL_WRITE);
        if self.inner.mappings.allow(addr, len, write) {
            Ok(())
        } else {
            Err(EngineError::BadAddress)
        }
    }

    /// Registers a segment, which lives at least as long as the registration.
    ///
    /// # Errors
    ///
    /// Illegal rights, or no room.
    pub fn reg_segment(
        &self,
        pd: PdId,
        memory: &Segment,
        iova: Option<u64>,
        access: Access,
    ) -> Result<Region, EngineError> {
        if let Some(elsewhere) = self.elsewhere()? {
            return elsewhere.register_segment(pd, memory, iova, access);
        }
        let shared = self.inner.shared.share(memory.addr(), memory.len() as u64, true);
        let region = self.enter()?.adapter.reg_segment(pd, memory, iova, access)?;
        self.inner.shared.keep(region.id, shared);
        Ok(region)
    }

    /// Changes a registration (`ibv_rereg_mr`), and waits as [`dereg_mr`](Self::dereg_mr) does.
    ///
    /// # Errors
    ///
    /// Windows are bound to it, or the new shape is illegal ([`EngineError::BadAddress`] for one);
    /// then nothing has changed.
    pub fn rereg_mr(
        &self,
        mr: MrId,
        pd: Option<PdId>,
        memory: Option<Vouched>,
        access: Option<Access>,
    ) -> Result<Region, EngineError> {
        let old = {
            let mut core = self.enter()?;
            let old = core.adapter.query_mr(mr);
            if core.faults.is_some() {
                let len = old.as_ref().map_or(0, |old| old.len);
                let bytes = memory.as_ref().map_or(len, Vouched::len);
                core.consult(Occasion::of(Call::ReregMr).with_bytes(bytes), About::Nothing)?;
            }
            old?
        };
        let access_now = access.unwrap_or(old.access);
        // What need not be there need not be looked for.
        let absent = access_now.contains(Access::ON_DEMAND) || memory.is_none() && old.on_demand;
        if (memory.is_some() || access.is_some()) && !absent {
            let (addr, len) =
                memory.map_or((old.addr, old.len), |memory| (memory.addr(), memory.len()));
            self.check_memory(addr, len, access_now)?;
        }
        let shared = memory.as_ref().map(|memory| self.share_pages(memory, access_now));
        let wanted = memory.as_ref().map(|memory| Wanted::of(memory, access_now));
        let mut core = self.enter()?;
        let now = core.now();
        let region = core.adapter.rereg_mr(now, mr, pd, memory, access)?;
        core.watch_region(mr);
        // Requests that refer to what is no longer registered have failed.
        core.settle(now);
        self.wait_quiet(core)?;
        if let Some(shared) = shared {
            self.inner.shared.keep(mr, shared);
        }
        wanted.into_iter().for_each(|wanted| self.make_pages(wanted));
        Ok(region)
    }

    /// Ends a registration. Waits until no peer on this host is in the middle of an access to the
    /// memory any more.
    ///
    /// # Errors
    ///
    /// Windows are bound to it, or there is none.
    pub fn dereg_mr(&self, mr: MrId) -> Result<(), EngineError> {
        if let Some(elsewhere) = self.elsewhere()? {
            return elsewhere.deregister(mr);
        }
        let mut core = self.enter_for(Call::DeregMr)?;
        let receives = core.receives_into(mr);
        let now = core.now();
        core.adapter.dereg_mr(now, mr)?;
        core.watch_dereg(mr, &receives);
        core.settle(now);
        let quiet = self.wait_quiet(core);
        self.inner.shared.keep(mr, None);
        quiet
    }

    pub(super) fn wait_quiet<'a>(&'a self, mut core: Guard<'a, Core>) -> Result<(), EngineError> {
        let mut began = None;
        while !core.adapter.memory_is_quiet() {
            let (begin, seen) =
                began.get_or_insert_with(|| (Instant::now(), core.adapter.restless()));
            let waited = begin.elapsed();
            if waited > QUIET_WAIT {
                core.cut_restless(seen);
                // For others another call waits as well, but not for so long yet.
                began = None;
                continue;
            }
            drop(core);
            if waited < QUIET_YIELDS {
                std::thread::yield_now();
            } else {
                std::thread::sleep(QUIET_NAP);
            }
            core = self.enter()?;
            // A peer that died is noticed here, and no longer waited for.
            core.run();
        }
        Ok(())
    }

    /// Allocates a memory window; its handle and key.
    ///
    /// # Errors
    ///
    /// No room.
    pub fn alloc_mw(&self, pd: PdId, window: WindowType) -> Result<(MwId, Key), EngineError> {
        Ok(self.enter_for(Call::AllocMw)?.adapter.alloc_mw(pd, window)?)
    }

    /// The key that a memory window has now.
    ///
    /// # Errors
    ///
    /// No such window.
    pub fn window_key(&self, mw: MwId) -> Result<Key, EngineError> {
        Ok(self.enter()?.adapter.window_key(mw)?)
    }

    /// Frees a memory window.
    ///
    /// # Errors
    ///
    /// No such window.
    pub fn dealloc_mw(&self, mw: MwId) -> Result<(), EngineError> {
        let mut core = self.enter_for(Call::DeallocMw)?;
        core.adapter.dealloc_mw(mw)?;
        self.wait_quiet(core)
    }
}

/// Memory that was registered, as far as its pages are concerned.
struct Wanted {
    addr: usize,
    len: u64,
    access: Access,
}

impl Wanted {
    fn of(memory: &Vouched, access: Access) -> Self {
        Self { addr: memory.addr(), len: memory.len(), access }
    }
}
