//! Extended reliable connections (IBA annex A14): domains, the shared receive queues that peers name, and
//! what belongs together.

use quipu_mem::Key;

use crate::adapter::{Adapter, Hub, Srq, XrcSrq, Xrcd};
use crate::error::Fault;
use crate::probe::Probe;
use crate::qp::{Path, Qp, pd_number};
use crate::receive;
use crate::responder::Refusal;
use crate::transmit;
use crate::types::{CqId, PdId, QpCap, QpInit, QpType, SrqId, XrcdId};

/// Numbers of shared receive queues have 24 bits; 0 is given to none.
const LAST_NUMBER: u32 = 0x00ff_ffff;

impl<P: Probe> Adapter<P> {
    /// Creates an XRC domain.
    ///
    /// # Errors
    /// [`Fault::Exhausted`].
    pub fn alloc_xrcd(&mut self) -> Result<XrcdId, Fault> {
        let pd = self.alloc_pd()?;
        let made = self.hub.xrcds.insert(Xrcd { pd, users: 0, srq_pds: Vec::new() });
        made.ok_or_else(|| {
            self.hub.pds.remove(pd);
            Fault::Exhausted("XRC domains")
        })
    }

    /// Destroys an XRC domain.
    ///
    /// # Errors
    /// [`Fault::Busy`] while queue pairs or shared receive queues belong to it.
    pub fn dealloc_xrcd(&mut self, id: XrcdId) -> Result<(), Fault> {
        let xrcd = self.hub.xrcds.get(id).ok_or(Fault::NoSuchObject)?;
        let pd = xrcd.pd;
        if xrcd.users > 0 {
            return Err(Fault::Busy);
        }
        self.hub.xrcds.remove(id);
        self.dealloc_pd(pd)
    }

    /// Creates a shared receive queue whose receives peers name by its number, over the queue pairs of
    /// `domain`, and which complete in `cq`. What it has in common with others is as for
    /// [`create_srq`](Self::create_srq). Its handle and number (24 bits).
    ///
    /// # Errors
    /// A size above the limit, an object that does not exist, or no room.
    pub fn create_xrc_srq(
        &mut self,
        pd: PdId,
        domain: XrcdId,
        cq: CqId,
        max_wr: u32,
        max_sge: u32,
    ) -> Result<(SrqId, u32), Fault> {
        self.cq(cq)?;
        self.hub.xrcds.get(domain).ok_or(Fault::NoSuchObject)?;
        let number = self.free_srq_number().ok_or(Fault::Exhausted("numbers of shared queues"))?;
        let id = self.create_srq(pd, max_wr, max_sge, 0)?;
        let hub = &mut self.hub;
        if let Some(srq) = hub.srqs.get_mut(id) {
            srq.xrc = Some(XrcSrq { domain, cq, number });
        }
        if let Some(xrcd) = hub.xrcds.get_mut(domain) {
            xrcd.users += 1;
            xrcd.srq_pds.push(pd_number(pd));
        }
        hub.srq_numbers.insert(number, id);
        hub.last_srq_number = number;
        self.cq(cq)?.users += 1;
        Ok((id, number))
    }

    /// The number that was not used for longest.
    fn free_srq_number(&self) -> Option<u32> {
        let (last, used) = (self.hub.last_srq_number, &self.hub.srq_numbers);
        (last + 1..=LAST_NUMBER).chain(1..=last).find(|number| !used.contains_key(number))
    }

    /// Ends what a shared receive queue that is gone had to do with extended reliable connections. A message
    /// that is on its way into one of its receives cannot be placed any more: its queue pair fails.
    pub(crate) fn forget_srq(&mut self, id: SrqId, srq: &Srq) {
        let Some(xrc) = srq.xrc else { return };
        self.hub.srq_numbers.remove(&xrc.number);
        if let Some(xrcd) = self.hub.xrcds.get_mut(xrc.domain) {
            xrcd.users -= 1;
            let pd = pd_number(srq.pd);
            if let Some(at) = xrcd.srq_pds.iter().position(|&of| of == pd) {
                xrcd.srq_pds.swap_remove(at);
            }
        }
        if let Some(cq) = self.hub.cqs.get_mut(xrc.cq) {
            cq.users -= 1;
        }
        for qp in self.qps.keys() {
            let Some((qp, hub)) = self.qp_and_hub(qp) else { continue };
            if qp.srq != Some(id) {
                continue;
            }
            forget_choice(qp);
            if std::mem::take(&mut qp.responder.receiving) {
                match qp.path {
                    Path::Stream(_) => transmit::stream::refuse(qp, hub, Refusal::Failed),
                    _ => receive::channel::refuse(qp, hub, Refusal::Failed),
                }
            } else if let Path::Channel(path) = &mut qp.path
                && std::mem::take(&mut path.awaiting)
            {
                // The request that waits for a receive finds no queue now.
                hub.nudged.push_back(qp.id);
            }
        }
        self.serve_nudged();
    }

    /// What an XRC responder is created with: it has no protection domain, completion queue or shared queue
    /// of its own, but those of its XRC domain.
    pub(crate) fn with_domain(&self, init: &QpInit) -> Result<QpInit, Fault> {
        if init.srq.is_some() && !init.qp_type.has_receives() {
            return Err(Fault::Invalid("a queue pair of this service has no shared receive queue"));
        }
        let QpType::XrcRecv(domain) = init.qp_type else { return Ok(*init) };
        let pd = self.hub.xrcds.get(domain).ok_or(Fault::NoSuchObject)?.pd;
        let (send_cq, recv_cq) = (CqId::NONE, CqId::NONE);
        Ok(QpInit { pd, send_cq, recv_cq, cap: QpCap::default(), ..*init })
    }

    /// Counts a queue pair among the users of its XRC domain.
    pub(crate) fn use_domain(&mut self, qp_type: QpType) {
        if let QpType::XrcRecv(domain) = qp_type
            && let Some(xrcd) = self.hub.xrcds.get_mut(domain)
        {
            xrcd.users += 1;
        }
    }

    /// Counts it no more.
    pub(crate) fn leave_domain(&mut self, qp_type: QpType) {
        if let QpType::XrcRecv(domain) = qp_type
            && let Some(xrcd) = self.hub.xrcds.get_mut(domain)
        {
            xrcd.users -= 1;
        }
    }
}

/// Has the next receive of an XRC responder come from the shared receive queue that the peer names.
///
/// # Errors
/// [`Refusal::Invalid`] if there is none of that number, or it is of another XRC domain (IBA A14, invalid
/// XRCETH).
pub(crate) fn choose<P>(qp: &mut Qp, hub: &Hub<P>, number: u32) -> Result<(), Refusal> {
    let QpType::XrcRecv(domain) = qp.qp_type else { return Err(Refusal::Invalid) };
    let id = *hub.srq_numbers.get(&number).ok_or(Refusal::Invalid)?;
    let srq = hub.srqs.get(id).ok_or(Refusal::Invalid)?;
    let xrc = srq.xrc.filter(|xrc| xrc.domain == domain).ok_or(Refusal::Invalid)?;
    qp.srq = Some(id);
    qp.recv_pd = srq.pd;
    qp.recv_cq = xrc.cq;
    Ok(())
}

/// An XRC responder has chosen no shared receive queue.
pub(crate) fn forget_choice(qp: &mut Qp) {
    if let QpType::XrcRecv(_) = qp.qp_type {
        qp.srq = None;
        qp.recv_pd = qp.pd;
        qp.recv_cq = CqId::NONE;
    }
}

/// The number of the protection domain that memory must be in which the peer of an XRC responder names by
/// its key: that of any shared receive queue of the XRC domain, since the peer may name each of them.
pub(crate) fn pd_of<P>(hub: &Hub<P>, domain: XrcdId, key: Key) -> u32 {
    let Some(xrcd) = hub.xrcds.get(domain) else { return pd_number(PdId::NONE) };
    let pd = hub.regions.info(key).map(|info| info.pd);
    pd.filter(|pd| xrcd.srq_pds.contains(pd)).unwrap_or(pd_number(xrcd.pd))
}
