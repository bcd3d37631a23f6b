//! The management state machine: creates, changes and destroys objects, and registers memory. Queue pairs
//! and completion queues have files of their own.

use std::collections::VecDeque;
use std::sync::Arc;

use quipu_mem::{
    Access, Bind, Key, Mappings, Nothing, RegionInfo, ReregisterError, Reregistration, Segment,
    Sge, Span, Vouched, WindowType, Withdrawn,
};

use crate::adapter::{Adapter, Alarm, Hub, Mr, Mw, Pd, Srq};
use crate::error::Fault;
use crate::probe::Probe;
use crate::qp::pd_number;
use crate::queue::RecvQueue;
use crate::types::{BindMw, MrId, MwId, PdId, SrqId, Time};
use crate::unordered;

/// A region as its owner knows it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Region {
    /// Its handle.
    pub id: MrId,
    /// Its key, which is both lkey and rkey.
    pub key: Key,
}

impl<P: Probe> Hub<P> {
    pub(crate) fn pd(&mut self, pd: PdId) -> Result<&mut Pd, Fault> {
        self.pds.get_mut(pd).ok_or(Fault::NoSuchObject)
    }

    /// Invalidates a type 2 window of this protection domain.
    pub(crate) fn invalidate(&mut self, pd: u32, qp: u32, key: u32) -> Result<(), Fault> {
        unordered::place_all(self);
        let withdrawn = self
            .regions
            .invalidate(pd, qp, Key(key))
            .map_err(|_| Fault::Invalid("the key names no window that can be invalidated"))?;
        self.begin_quiet_wait(withdrawn);
        Ok(())
    }

    /// Binds a window to a range of a region, or unbinds it.
    pub(crate) fn bind_window(&mut self, pd: u32, qp: u32, bind: &BindMw) -> Result<(), Fault> {
        unordered::place_all(self);
        let mw = self.mws.get(bind.mw).ok_or(Fault::NoSuchObject)?;
        // To unbind, a program need not name a region.
        let region = match bind.len {
            0 => Key::NONE,
            _ => self.mrs.get(bind.mr).ok_or(Fault::NoSuchObject)?.key,
        };
        let rkey = Key(bind.rkey);
        if rkey.index() != mw.key.index() {
            return Err(Fault::Invalid("the key does not belong to the window"));
        }
        // Programs name LOCAL_WRITE here out of habit; a window has no local side.
        let (addr, len, access) = (bind.addr, bind.len, bind.access - Access::LOCAL_WRITE);
        let request = Bind { pd, qp_num: qp, rkey, region, addr, len, access };
        let withdrawn = self.regions.bind(&request).map_err(|_| {
            Fault::Invalid(
                "the window cannot be bound to this range with this \
                access",
            )
        })?;
        if let Some(mw) = self.mws.get_mut(bind.mw) {
            mw.key = rkey;
        }
        self.begin_quiet_wait(withdrawn);
        Ok(())
    }
}

impl<P: Probe> Adapter<P> {
    /// Creates a protection domain.
    ///
    /// # Errors
    /// [`Fault::Exhausted`].
    pub fn alloc_pd(&mut self) -> Result<PdId, Fault> {
        self.hub.pds.insert(Pd::default()).ok_or(Fault::Exhausted("protection domains"))
    }

    /// Destroys a protection domain.
    ///
    /// # Errors
    /// [`Fault::Busy`] while regions, windows or queues belong to it.
    pub fn dealloc_pd(&mut self, id: PdId) -> Result<(), Fault> {
        if self.hub.pd(id)?.users > 0 {
            return Err(Fault::Busy);
        }
        self.hub.pds.remove(id);
        Ok(())
    }

    fn adopt_region(&mut self, pd: PdId, key: Key) -> Result<Region, Fault> {
        let Some(id) = self.hub.mrs.insert(Mr { pd, key }) else {
            let _ = self.hub.regions.deregister(key);
            return Err(Fault::Exhausted("memory regions"));
        };
        self.hub.pd(pd)?.users += 1;
        Ok(Region { id, key })
    }

    /// Registers memory for which somebody vouches. Nothing is pinned or touched.
    ///
    /// # Errors
    /// Illegal rights or range, or no room.
    pub fn reg_mr(&mut self, pd: PdId, memory: Vouched) -> Result<Region, Fault> {
        self.hub.pd(pd)?;
        let key = self.hub.regions.register_vouched(pd_number(pd), memory)?;
        self.adopt_region(pd, key)
    }

    /// Copies memory of a region: with the rights of own requests, or of a peer.
    ///
    /// # Errors
    /// No such region of the domain, a range outside of it, or no right.
    pub fn read_region(
        &self,
        pd: PdId,
        (key, addr): (Key, u64),
        is_peer: bool,
        out: &mut [u8],
    ) -> Result<(), Fault> {
        self.span(pd, (key, addr, out.len()), is_peer, false)?.read_into(0, out);
        Ok(())
    }

    /// Writes to memory of a region: with the rights of own requests, or of a peer.
    ///
    /// # Errors
    /// As [`read_region`](Self::read_region).
    pub fn write_region(
        &self,
        pd: PdId,
        (key, addr): (Key, u64),
        is_peer: bool,
        bytes: &[u8],
    ) -> Result<(), Fault> {
        self.span(pd, (key, addr, bytes.len()), is_peer, true)?.write_from(0, bytes);
        Ok(())
    }

    /// A checked range of a region.
    fn span(
        &self,
        pd: PdId,
        (key, addr, len): (Key, u64, usize),
        is_peer: bool,
        is_write: bool,
    ) -> Result<Span<'_>, Fault> {
        const REFUSED: Fault =
            Fault::Invalid("the range is in no region of the domain that allows the access");
        let len = u32::try_from(len).map_err(|_| REFUSED)?;
        let span = if is_peer {
            let need = if is_write { Access::REMOTE_WRITE } else { Access::REMOTE_READ };
            self.hub.regions.remote(pd_number(pd), 0, key, addr, len.into(), need)
        } else {
            self.hub.regions.local(pd_number(pd), &Sge { addr, len, lkey: key }, is_write)
        };
        span.map_err(|_| REFUSED)
    }

    /// Makes a region that reads as zeros and forgets what is written to it (`ibv_alloc_null_mr`).
    ///
    /// # Errors
    /// No room.
    pub fn reg_null_mr(&mut self, pd: PdId, nothing: Nothing) -> Result<Region, Fault> {
        self.hub.pd(pd)?;
        let key = self.hub.regions.register_null(pd_number(pd), nothing)?;
        self.adopt_region(pd, key)
    }

    /// Has `mappings` asked before accesses to regions of which pages may be absent.
    pub fn set_mappings(&mut self, mappings: Arc<dyn Mappings>) {
        self.hub.regions.ask(mappings);
    }

    /// Registers a segment, of which the adapter then holds a share. `iova` is the address that work
    /// requests use for its first byte, by default its address here.
    ///
    /// # Errors
    /// Illegal rights, or no room.
    pub fn reg_segment(
        &mut self,
        pd: PdId,
        memory: &Segment,
        iova: Option<u64>,
        access: Access,
    ) -> Result<Region, Fault> {
        self.hub.pd(pd)?;
        let key = self.hub.regions.register_owned(pd_number(pd), memory, iova, access)?;
        self.adopt_region(pd, key)
    }

    /// Changes protection domain, memory or rights of a region (`ibv_rereg_mr`); its key, which changes
    /// with the memory.
    ///
    /// # Errors
    /// Windows are bound to it, or the new shape is illegal: then nothing has changed.
    pub fn rereg_mr(
        &mut self,
        now: Time,
        id: MrId,
        pd: Option<PdId>,
        memory: Option<Vouched>,
        access: Option<Access>,
    ) -> Result<Region, Fault> {
        self.hub.now = now;
        unordered::place_all(&mut self.hub);
        let &Mr { pd: old_pd, key: old_key } = self.hub.mrs.get(id).ok_or(Fault::NoSuchObject)?;
        if let Some(pd) = pd {
            self.hub.pd(pd)?;
        }
        let change = Reregistration { pd: pd.map(pd_number), memory: None, access };
        let (key, withdrawn) =
            self.hub.regions.reregister_vouched(old_key, change, memory).map_err(|error| {
                match error {
                    ReregisterError::Busy => Fault::Busy,
                    ReregisterError::UnknownKey => Fault::NoSuchObject,
                    ReregisterError::Register(error) => error.into(),
                }
            })?;
        if let Some(pd) = pd {
            self.hub.pd(old_pd)?.users -= 1;
            self.hub.pd(pd)?.users += 1;
        }
        if let Some(mr) = self.hub.mrs.get_mut(id) {
            *mr = Mr { pd: pd.unwrap_or(old_pd), key };
        }
        self.begin_quiet(old_key, withdrawn);
        Ok(Region { id, key })
    }

    /// What a region is now.
    ///
    /// # Errors
    /// No such region.
    pub fn query_mr(&self, id: MrId) -> Result<RegionInfo, Fault> {
        let mr = self.hub.mrs.get(id).ok_or(Fault::NoSuchObject)?;
        self.hub.regions.info(mr.key).ok_or(Fault::NoSuchObject)
    }

    /// The protection domain of a region.
    ///
    /// # Errors
    /// No such region.
    pub fn mr_domain(&self, id: MrId) -> Result<PdId, Fault> {
        self.hub.mrs.get(id).map(|mr| mr.pd).ok_or(Fault::NoSuchObject)
    }

    /// Forgets a region. Same-host peers that reach its memory themselves may be in the middle of an
    /// access: [`memory_is_quiet`](Self::memory_is_quiet) tells when the memory may get another use.
    ///
    /// # Errors
    /// [`Fault::Busy`] while windows are bound to it.
    pub fn dereg_mr(&mut self, now: Time, id: MrId) -> Result<(), Fault> {
        self.hub.now = now;
        unordered::place_all(&mut self.hub);
        let &Mr { pd, key } = self.hub.mrs.get(id).ok_or(Fault::NoSuchObject)?;
        let withdrawn = self.hub.regions.deregister(key).map_err(|_| Fault::Busy)?;
        self.begin_quiet(key, withdrawn);
        self.hub.mrs.remove(id);
        self.hub.pd(pd)?.users -= 1;
        Ok(())
    }

    /// A region has lost its key, or is not what it was: ends what refers to it, and notes whom to wait for.
    fn begin_quiet(&mut self, key: Key, mut withdrawn: Withdrawn) {
        withdrawn.published |= self.end_references(key);
        self.hub.begin_quiet_wait(withdrawn);
    }

    /// Whether no same-host peer is still in the middle of an access that it began before the last
    /// deregistration.
    pub fn memory_is_quiet(&mut self) -> bool {
        self.hub.quiet_wait_over()
    }

    /// Allocates a memory window; its key (for type 2, the key to derive the first one to bind from).
    ///
    /// # Errors
    /// No room.
    pub fn alloc_mw(&mut self, pd: PdId, window: WindowType) -> Result<(MwId, Key), Fault> {
        self.hub.pd(pd)?;
        let key = self.hub.regions.allocate_window(pd_number(pd), window)?;
        let Some(id) = self.hub.mws.insert(Mw { pd, key }) else {
            let _ = self.hub.regions.deallocate_window(key);
            return Err(Fault::Exhausted("memory windows"));
        };
        self.hub.pd(pd)?.users += 1;
        Ok((id, key))
    }

    /// The key that a window has now.
    ///
    /// # Errors
    /// No such window.
    pub fn window_key(&self, id: MwId) -> Result<Key, Fault> {
        self.hub.mws.get(id).map(|mw| mw.key).ok_or(Fault::NoSuchObject)
    }

    /// Frees a memory window, unbinding it.
    ///
    /// # Errors
    /// No such window.
    pub fn dealloc_mw(&mut self, id: MwId) -> Result<(), Fault> {
        unordered::place_all(&mut self.hub);
        let mw = self.hub.mws.remove(id).ok_or(Fault::NoSuchObject)?;
        let withdrawn =
            self.hub.regions.deallocate_window(mw.key).map_err(|_| Fault::NoSuchObject)?;
        self.hub.begin_quiet_wait(withdrawn);
        self.hub.pd(mw.pd)?.users -= 1;
        Ok(())
    }

    /// Creates a shared receive queue.
    ///
    /// # Errors
    /// A size above the limit, or no room.
    pub fn create_srq(
        &mut self,
        pd: PdId,
        max_wr: u32,
        max_sge: u32,
        limit: u32,
    ) -> Result<SrqId, Fault> {
        if max_wr == 0 || max_wr > self.hub.config.max_srq_wr || max_sge > self.hub.config.max_sge {
            return Err(Fault::Invalid("size above max_srq_wr or max_srq_sge"));
        }
        self.hub.pd(pd)?;
        let srq = Srq {
            pd,
            xrc: None,
            wq: None,
            queue: RecvQueue::new(max_wr, max_sge.max(1))?,
            limit,
            users: 0,
            awaited_by: VecDeque::new(),
            alarm: None,
        };
        let id = self.hub.srqs.insert(srq).ok_or(Fault::Exhausted("shared receive queues"))?;
        self.hub.pd(pd)?.users += 1;
        Ok(id)
    }

    /// Resizes a shared receive queue and sets the limit below which it raises an event.
    ///
    /// # Errors
    /// A size out of range or below the requests held, or a limit above the size, also one that is armed.
    pub fn modify_srq(
        &mut self,
        id: SrqId,
        max_wr: Option<u32>,
        limit: Option<u32>,
    ) -> Result<(), Fault> {
        let max_srq_wr = self.hub.config.max_srq_wr;
        let srq = self.hub.srqs.get_mut(id).ok_or(Fault::NoSuchObject)?;
        let capacity = max_wr.unwrap_or(srq.queue.capacity());
        // A limit that is armed counts as one that is set: a queue of that size were below it for ever.
        if capacity == 0 || capacity > max_srq_wr || limit.unwrap_or(srq.limit) > capacity {
            return Err(Fault::Invalid("size or limit out of range"));
        }
        if max_wr.is_some() {
            srq.queue = srq.queue.resized(capacity)?;
        }
        if let Some(limit) = limit {
            srq.limit = limit;
        }
        Ok(())
    }

    /// Size, elements per request and limit of a shared receive queue.
    ///
    /// # Errors
    /// No such queue.
    pub fn query_srq(&self, id: SrqId) -> Result<(u32, u32, u32), Fault> {
        let srq = self.hub.srqs.get(id).ok_or(Fault::NoSuchObject)?;
        Ok((srq.queue.capacity(), srq.queue.max_sge() as u32, srq.limit))
    }

    /// Destroys a shared receive queue.
    ///
    /// # Errors
    /// [`Fault::Busy`] while queue pairs or indirection tables use it.
    pub fn destroy_srq(&mut self, id: SrqId) -> Result<(), Fault> {
        let srq = self.hub.srqs.get(id).ok_or(Fault::NoSuchObject)?;
        if srq.users > 0 {
            return Err(Fault::Busy);
        }
        let (pd, mut alarm) = (srq.pd, srq.alarm);
        self.hub.set_alarm(&mut alarm, Alarm::Srq(id), None);
        if let Some(removed) = self.hub.srqs.remove(id) {
            self.forget_srq(id, &removed);
            if let Some(wq) = removed.wq {
                wq.forget_completions(&mut self.hub, id);
                self.cq(wq.cq)?.users -= 1;
            }
        }
        self.hub.pd(pd)?.users -= 1;
        Ok(())
    }
}
