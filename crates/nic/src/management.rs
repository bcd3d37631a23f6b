//! The management state machine: creates, changes and destroys objects, and registers memory.

use quipu_mem::{
    Access, Bind, Key, RegionInfo, ReregisterError, Reregistration, Segment, Vouched, WindowType,
};

use crate::adapter::{Adapter, Hub, Mr, Mw, Pd, Srq};
use crate::connect;
use crate::cq::Cq;
use crate::error::Fault;
use crate::probe::Probe;
use crate::qp::{Ending, Path, Qp, Requester, Responder, pd_number};
use crate::qp_state;
use crate::queue::RecvQueue;
use crate::requester;
use crate::types::{
    BindMw, ChannelId, Completion, CqId, MrId, MwId, PdId, QpAttr, QpAttrMask, QpCap, QpId, QpInit,
    QpNum, QpState, SrqId, Time,
};

/// A region as its owner knows it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Region {
    /// Its handle.
    pub id: MrId,
    /// Its key, which is both lkey and rkey.
    pub key: Key,
}

/// A queue pair as `query_qp` shows it.
#[derive(Clone, Copy, Debug)]
pub struct QpInfo {
    /// Its attributes, with the current state.
    pub attr: QpAttr,
    /// Its queue sizes.
    pub cap: QpCap,
    /// Whether every send is signalled.
    pub sq_sig_all: bool,
    /// Its number.
    pub num: QpNum,
}

impl<P: Probe> Hub<P> {
    fn pd(&mut self, pd: PdId) -> Result<&mut Pd, Fault> {
        self.pds.get_mut(pd).ok_or(Fault::NoSuchObject)
    }

    /// Invalidates a type 2 window of this protection domain.
    pub(crate) fn invalidate(&mut self, pd: u32, qp: u32, key: u32) -> Result<(), Fault> {
        let withdrawn = self
            .regions
            .invalidate(pd, qp, Key(key))
            .map_err(|_| Fault::Invalid("the key names no window that may be invalidated"))?;
        self.begin_quiet_wait(withdrawn);
        Ok(())
    }

    /// Binds a window to a range of a region, or unbinds it.
    pub(crate) fn bind_window(&mut self, pd: u32, qp: u32, bind: &BindMw) -> Result<(), Fault> {
        let mw = self.mws.get(bind.mw).ok_or(Fault::NoSuchObject)?;
        // To unbind, a program need not name a region.
        let region = match bind.len {
            0 => Key::NONE,
            _ => self.mrs.get(bind.mr).ok_or(Fault::NoSuchObject)?.key,
        };
        let rkey = Key(bind.rkey);
        if rkey.index() != mw.key.index() {
            return Err(Fault::Invalid("the key is not one of the window"));
        }
        // Programs name LOCAL_WRITE here out of habit; a window has no local side.
        let (addr, len, access) = (bind.addr, bind.len, bind.access - Access::LOCAL_WRITE);
        let request = Bind { pd, qp_num: qp, rkey, region, addr, len, access };
        let withdrawn = self
            .regions
            .bind(&request)
            .map_err(|_| Fault::Invalid("the window cannot be bound so"))?;
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
        id: MrId,
        pd: Option<PdId>,
        memory: Option<Vouched>,
        access: Option<Access>,
    ) -> Result<Region, Fault> {
        let &Mr { pd: old_pd, key } = self.hub.mrs.get(id).ok_or(Fault::NoSuchObject)?;
        if let Some(pd) = pd {
            self.hub.pd(pd)?;
        }
        let change = Reregistration { pd: pd.map(pd_number), memory: None, access };
        let (key, withdrawn) = self.hub.regions.reregister_vouched(key, change, memory).map_err(
            |error| match error {
                ReregisterError::Busy => Fault::Busy,
                ReregisterError::UnknownKey => Fault::NoSuchObject,
                ReregisterError::Register(error) => error.into(),
            },
        )?;
        if let Some(pd) = pd {
            self.hub.pd(old_pd)?.users -= 1;
            self.hub.pd(pd)?.users += 1;
        }
        if let Some(mr) = self.hub.mrs.get_mut(id) {
            *mr = Mr { pd: pd.unwrap_or(old_pd), key };
        }
        self.hub.begin_quiet_wait(withdrawn);
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

    /// Forgets a region. Same-host peers that reach its memory themselves may be in the middle of an
    /// access: [`memory_is_quiet`](Self::memory_is_quiet) tells when the memory may get another use.
    ///
    /// # Errors
    /// [`Fault::Busy`] while windows are bound to it.
    pub fn dereg_mr(&mut self, id: MrId) -> Result<(), Fault> {
        let &Mr { pd, key } = self.hub.mrs.get(id).ok_or(Fault::NoSuchObject)?;
        let withdrawn = self.hub.regions.deregister(key).map_err(|_| Fault::Busy)?;
        self.hub.begin_quiet_wait(withdrawn);
        self.hub.mrs.remove(id);
        self.hub.pd(pd)?.users -= 1;
        Ok(())
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
        let id = self.hub.mws.insert(Mw { pd, key }).ok_or(Fault::Exhausted("memory windows"))?;
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
        let mw = self.hub.mws.remove(id).ok_or(Fault::NoSuchObject)?;
        let withdrawn =
            self.hub.regions.deallocate_window(mw.key).map_err(|_| Fault::NoSuchObject)?;
        self.hub.begin_quiet_wait(withdrawn);
        self.hub.pd(mw.pd)?.users -= 1;
        Ok(())
    }

    /// Creates a completion queue of at least `cqe` entries; its handle and its size.
    ///
    /// # Errors
    /// A size of 0 or above the limit, or no room.
    pub fn create_cq(
        &mut self,
        cqe: u32,
        channel: Option<ChannelId>,
        context: u64,
    ) -> Result<(CqId, u32), Fault> {
        if cqe == 0 || cqe > self.hub.config.max_cqe {
            return Err(Fault::Invalid("number of entries is 0 or above max_cqe"));
        }
        let cq = Cq::new(cqe as usize, channel, context);
        let id = self.hub.cqs.insert(cq).ok_or(Fault::Exhausted("completion queues"))?;
        Ok((id, cqe))
    }

    fn cq(&mut self, id: CqId) -> Result<&mut Cq, Fault> {
        self.hub.cqs.get_mut(id).ok_or(Fault::NoSuchObject)
    }

    /// Changes the size of a completion queue.
    ///
    /// # Errors
    /// The size is out of range, or below the entries held.
    pub fn resize_cq(&mut self, id: CqId, cqe: u32) -> Result<u32, Fault> {
        if cqe == 0 || cqe > self.hub.config.max_cqe {
            return Err(Fault::Invalid("number of entries is 0 or above max_cqe"));
        }
        let cq = self.cq(id)?;
        if cq.resize(cqe as usize) {
            Ok(cq.capacity() as u32)
        } else {
            Err(Fault::Invalid("the queue holds more completions than that"))
        }
    }

    /// Destroys a completion queue.
    ///
    /// # Errors
    /// [`Fault::Busy`] while queue pairs complete there.
    pub fn destroy_cq(&mut self, id: CqId) -> Result<(), Fault> {
        if self.cq(id)?.users > 0 {
            return Err(Fault::Busy);
        }
        self.hub.cqs.remove(id);
        Ok(())
    }

    /// Asks for an event at the next completion (or the next solicited one).
    ///
    /// # Errors
    /// No such queue.
    pub fn req_notify_cq(&mut self, id: CqId, solicited_only: bool) -> Result<(), Fault> {
        self.cq(id)?.request_notify(solicited_only);
        Ok(())
    }

    /// Takes completions out of a queue, oldest first; how many. It does not look for new ones: call
    /// [`progress`](Self::progress) for that.
    ///
    /// # Errors
    /// No such queue; or it is empty and has overrun (IBA 11.6.3.1: it is in error from then on).
    #[inline]
    pub fn poll_cq(&mut self, id: CqId, out: &mut [Completion]) -> Result<usize, Fault> {
        let cq = self.hub.cqs.get_mut(id).ok_or(Fault::NoSuchObject)?;
        match cq.pop(out) {
            0 if cq.overran() && !out.is_empty() => Err(Fault::Overrun),
            count => Ok(count),
        }
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
            queue: RecvQueue::new(max_wr, max_sge.max(1)),
            limit,
            users: 0,
            awaited_by: Vec::new(),
        };
        let id = self.hub.srqs.insert(srq).ok_or(Fault::Exhausted("shared receive queues"))?;
        self.hub.pd(pd)?.users += 1;
        Ok(id)
    }

    /// Resizes a shared receive queue and sets the limit below which it raises an event.
    ///
    /// # Errors
    /// A size out of range or below the requests held, or a limit above the size.
    pub fn modify_srq(
        &mut self,
        id: SrqId,
        max_wr: Option<u32>,
        limit: Option<u32>,
    ) -> Result<(), Fault> {
        let max_srq_wr = self.hub.config.max_srq_wr;
        let srq = self.hub.srqs.get_mut(id).ok_or(Fault::NoSuchObject)?;
        let capacity = max_wr.unwrap_or(srq.queue.capacity());
        if capacity == 0 || capacity > max_srq_wr || limit.is_some_and(|limit| limit > capacity) {
            return Err(Fault::Invalid("size or limit out of range"));
        }
        if max_wr.is_some() {
            srq.queue = srq
                .queue
                .resized(capacity)
                .ok_or(Fault::Invalid("the queue holds more requests than that"))?;
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
    /// [`Fault::Busy`] while queue pairs use it.
    pub fn destroy_srq(&mut self, id: SrqId) -> Result<(), Fault> {
        let srq = self.hub.srqs.get(id).ok_or(Fault::NoSuchObject)?;
        if srq.users > 0 {
            return Err(Fault::Busy);
        }
        let pd = srq.pd;
        self.hub.srqs.remove(id);
        self.hub.pd(pd)?.users -= 1;
        Ok(())
    }

    /// Creates a queue pair with the given number, which must be unique on the host; its handle and its
    /// sizes.
    ///
    /// # Errors
    /// Sizes above the limits, objects that do not exist, a number in use, or no room.
    pub fn create_qp(&mut self, init: &QpInit, num: QpNum) -> Result<(QpId, QpCap), Fault> {
        let cap = self.granted(init)?;
        if self.hub.numbers.contains_key(&num) {
            return Err(Fault::Invalid("the queue pair number is in use"));
        }
        self.hub.pd(init.pd)?;
        self.cq(init.send_cq)?;
        self.cq(init.recv_cq)?;
        let mut recv_pd = init.pd;
        if let Some(srq) = init.srq {
            let srq = self.hub.srqs.get_mut(srq).ok_or(Fault::NoSuchObject)?;
            srq.users += 1;
            recv_pd = srq.pd;
        }
        let made = self.qps.insert_with(|id| Qp::new(id, num, init, recv_pd, cap));
        let Some(id) = made else {
            if let Some(srq) = init.srq.and_then(|srq| self.hub.srqs.get_mut(srq)) {
                srq.users -= 1;
            }
            return Err(Fault::Exhausted("queue pairs"));
        };
        self.hub.pd(init.pd)?.users += 1;
        self.cq(init.send_cq)?.users += 1;
        self.cq(init.recv_cq)?.users += 1;
        self.hub.numbers.insert(num, id);
        Ok((id, cap))
    }

    /// The sizes that a queue pair gets.
    fn granted(&self, init: &QpInit) -> Result<QpCap, Fault> {
        let (cap, config) = (init.cap, &self.hub.config);
        if cap.max_send_wr > config.max_qp_wr || cap.max_recv_wr > config.max_qp_wr {
            return Err(Fault::Invalid("more work requests than max_qp_wr"));
        }
        if cap.max_send_sge > config.max_sge || cap.max_recv_sge > config.max_sge {
            return Err(Fault::Invalid("more scatter/gather elements than max_sge"));
        }
        if cap.max_inline_data > config.max_inline {
            return Err(Fault::Invalid("more inline data than the adapter has room for"));
        }
        Ok(QpCap {
            max_send_sge: cap.max_send_sge.max(1),
            max_recv_sge: if init.srq.is_some() { 0 } else { cap.max_recv_sge.max(1) },
            max_recv_wr: if init.srq.is_some() { 0 } else { cap.max_recv_wr },
            ..cap
        })
    }

    /// Changes attributes and the state of a queue pair.
    ///
    /// # Errors
    /// [`Fault::Transition`] or [`Fault::Invalid`]; the queue pair is then unchanged.
    pub fn modify_qp(
        &mut self,
        now: Time,
        id: QpId,
        attr: &QpAttr,
        mask: QpAttrMask,
    ) -> Result<(), Fault> {
        self.hub.now = now;
        let (qp, hub) = self.qp_and_hub(id).ok_or(Fault::NoSuchObject)?;
        let from = qp.state;
        let to = if mask.contains(QpAttrMask::STATE) { attr.state } else { from };
        if mask.contains(QpAttrMask::CUR_STATE) && attr.cur_state != from {
            return Err(Fault::Transition("the queue pair is not in cur_qp_state"));
        }
        qp_state::check(qp.qp_type, from, to, mask)?;
        check_values(attr, mask, &hub.config)?;
        apply(&mut qp.attr, attr, mask);
        match to {
            QpState::Reset => reset(qp, hub),
            QpState::Err => requester::to_error(qp, hub, None),
            _ => qp.state = to,
        }
        // What is owed to a stay in SQD ends with it.
        qp.drain_owed &= to == QpState::Sqd;
        if mask.contains(QpAttrMask::ACCESS_FLAGS) {
            connect::show_grants(qp, hub);
        }
        if mask.intersects(QpAttrMask::TIMEOUT | QpAttrMask::RETRY_CNT) {
            connect::limit_silence(qp, hub);
        }
        match (from, to) {
            (QpState::Init, QpState::Rtr) => self.begin_connection(id),
            (QpState::Rtr, QpState::Rts) => {
                connect::compare_psn(qp, hub);
                self.ring_doorbell(now, id);
            }
            (QpState::Sqd, QpState::Rts) => self.ring_doorbell(now, id),
            (QpState::Rts, QpState::Sqd) => {
                qp.drain_owed =
                    mask.contains(QpAttrMask::EN_SQD_ASYNC_NOTIFY) && attr.en_sqd_async_notify;
                requester::complete_done(qp, hub);
            }
            _ => {}
        }
        Ok(())
    }

    /// What a queue pair is.
    ///
    /// # Errors
    /// No such queue pair.
    pub fn query_qp(&self, id: QpId) -> Result<QpInfo, Fault> {
        let qp = self.qps.get(id).ok_or(Fault::NoSuchObject)?;
        let draining = qp.state == QpState::Sqd && requester::is_draining(qp);
        let attr = QpAttr {
            state: qp.state,
            cur_state: qp.state,
            sq_draining: draining,
            port_num: 1,
            ..qp.attr
        };
        Ok(QpInfo { attr, cap: qp.cap, sq_sig_all: qp.sq_sig_all, num: qp.num })
    }

    /// Destroys a queue pair; what is posted to it is forgotten without completions, and its completions
    /// that were not polled are dropped.
    ///
    /// # Errors
    /// No such queue pair.
    pub fn destroy_qp(&mut self, now: Time, id: QpId) -> Result<(), Fault> {
        self.hub.now = now;
        let (qp, hub) = self.qp_and_hub(id).ok_or(Fault::NoSuchObject)?;
        qp.state = QpState::Err;
        connect::detach(qp, hub);
        let (num, pd, send_cq, recv_cq, srq) = (qp.num, qp.pd, qp.send_cq, qp.recv_cq, qp.srq);
        let mut timer = qp.timer;
        hub.set_alarm(&mut timer, crate::adapter::Alarm::Qp(id), None);
        hub.numbers.remove(&num);
        if !hub.mws.is_empty() {
            let withdrawn = hub.regions.unbind_qp(num.0);
            hub.begin_quiet_wait(withdrawn);
        }
        self.qps.remove(id);
        for cq in [send_cq, recv_cq] {
            let cq = self.cq(cq)?;
            cq.users -= 1;
            cq.forget(num);
        }
        if let Some(srq) = srq.and_then(|srq| self.hub.srqs.get_mut(srq)) {
            srq.users -= 1;
        }
        self.hub.pd(pd)?.users -= 1;
        Ok(())
    }
}

/// Returns a queue pair to RESET: nothing is posted, nothing completes.
fn reset<P: Probe>(qp: &mut Qp, hub: &mut Hub<P>) {
    connect::detach(qp, hub);
    // The end of the connection that it had does not concern the next one.
    hub.orphans.retain(|&orphan| orphan != qp.id);
    let mut timer = qp.timer;
    hub.set_alarm(&mut timer, crate::adapter::Alarm::Qp(qp.id), None);
    qp.timer = None;
    qp.sq.clear();
    qp.rq.clear();
    qp.requester = Requester::default();
    qp.responder = Responder::default();
    qp.attr = QpAttr::default();
    qp.path = Path::None;
    qp.ending = Ending::default();
    qp.peer_rq_psn = None;
    qp.drain_owed = false;
    qp.state = QpState::Reset;
    for cq in [qp.send_cq, qp.recv_cq] {
        if let Some(cq) = hub.cqs.get_mut(cq) {
            cq.forget(qp.num);
        }
    }
}

/// Checks the values of the attributes that the mask names.
fn check_values(
    attr: &QpAttr,
    mask: QpAttrMask,
    config: &crate::adapter::Config,
) -> Result<(), Fault> {
    type M = QpAttrMask;
    let wrong = |set: M, bad: bool| mask.contains(set) && bad;
    if wrong(M::PORT, attr.port_num != 1) {
        return Err(Fault::Invalid("the adapter has one port, number 1"));
    }
    if wrong(M::PKEY_INDEX, attr.pkey_index != 0) {
        return Err(Fault::Invalid("the P_Key table has one entry, index 0"));
    }
    if wrong(M::PATH_MTU, !(1..=5).contains(&attr.path_mtu)) {
        return Err(Fault::Invalid("path_mtu is not one of the MTU codes 1 to 5"));
    }
    if wrong(M::AV, !attr.av.is_global) {
        return Err(Fault::Invalid("an Ethernet port needs a global route (is_global, a GID)"));
    }
    if wrong(M::AV, attr.av.sgid_index != 0) {
        return Err(Fault::Invalid("the GID table has one entry, index 0"));
    }
    if wrong(M::DEST_QPN, attr.dest_qp_num > 0x00ff_ffff)
        || wrong(M::RQ_PSN, attr.rq_psn > 0x00ff_ffff)
        || wrong(M::SQ_PSN, attr.sq_psn > 0x00ff_ffff)
    {
        return Err(Fault::Invalid("queue pair numbers and PSNs have 24 bits"));
    }
    if wrong(M::MAX_QP_RD_ATOMIC, attr.max_rd_atomic > config.max_rd_atomic)
        || wrong(M::MAX_DEST_RD_ATOMIC, attr.max_dest_rd_atomic > config.max_rd_atomic)
    {
        return Err(Fault::Invalid("more reads and atomics in flight than max_qp_rd_atom"));
    }
    if wrong(M::TIMEOUT, attr.timeout > 31)
        || wrong(M::MIN_RNR_TIMER, attr.min_rnr_timer > 31)
        || wrong(M::RETRY_CNT, attr.retry_cnt > 7)
        || wrong(M::RNR_RETRY, attr.rnr_retry > 7)
    {
        return Err(Fault::Invalid("timer code above 31 or retry count above 7"));
    }
    Ok(())
}

/// Copies the attributes that the mask names.
fn apply(to: &mut QpAttr, from: &QpAttr, mask: QpAttrMask) {
    macro_rules! copy {
        ($($flag:ident: $($field:ident),+;)*) => {$(
            if mask.contains(QpAttrMask::$flag) { $(to.$field = from.$field;)+ }
        )*};
    }
    copy! {
        EN_SQD_ASYNC_NOTIFY: en_sqd_async_notify;
        ACCESS_FLAGS: access;
        PKEY_INDEX: pkey_index;
        PORT: port_num;
        QKEY: qkey;
        AV: av;
        PATH_MTU: path_mtu;
        TIMEOUT: timeout;
        RETRY_CNT: retry_cnt;
        RNR_RETRY: rnr_retry;
        RQ_PSN: rq_psn;
        MAX_QP_RD_ATOMIC: max_rd_atomic;
        ALT_PATH: alt_av, alt_pkey_index, alt_port_num, alt_timeout;
        MIN_RNR_TIMER: min_rnr_timer;
        SQ_PSN: sq_psn;
        MAX_DEST_RD_ATOMIC: max_dest_rd_atomic;
        PATH_MIG_STATE: path_mig_state;
        DEST_QPN: dest_qp_num;
        RATE_LIMIT: rate_limit;
    }
}
