//! Receive work queues and the tables that spread frames over them (`ibv_create_wq(3)`,
//! `ibv_create_rwq_ind_table(3)`).
//!
//! A work queue is a shared receive queue with a completion queue and a state of its own.

use quipu_iwarp::wire::ethernet::Layers;
use quipu_mem::Sge;

use super::RxHash;
use crate::adapter::{Adapter, Hub, Srq};
use crate::error::Fault;
use crate::probe::{Probe, Stage};
use crate::qp::{Qp, pd_number};
use crate::queue::Receive;
use crate::types::{
    Completion, CqId, PdId, QpCap, QpId, QpInit, QpNum, QpState, QpType, SrqId, TableId, Time,
    TimeSource, WcOpcode, WcStatus, WqState,
};

/// Entries that a table has at most.
pub const MAX_TABLE_SIZE: usize = 1 << 11;
/// Tables that an adapter has at most.
pub const MAX_TABLES: usize = 1 << 12;

/// What makes a shared receive queue a work queue.
#[derive(Clone, Copy, Debug)]
pub(crate) struct WorkQueue {
    /// Where its receives complete.
    pub(crate) cq: CqId,
    state: WqState,
}

impl QpInit {
    /// A raw packet queue pair that receives by an indirection table.
    #[must_use]
    pub fn hashed(pd: PdId, table: TableId) -> Self {
        Self {
            pd,
            send_cq: CqId::NONE,
            recv_cq: CqId::NONE,
            srq: None,
            cap: QpCap::default(),
            qp_type: QpType::Hashed(table),
            sq_sig_all: false,
        }
    }
}

impl WorkQueue {
    /// Drops its completions, as verbs providers do: what was posted is given up.
    pub(crate) fn forget_completions<P: Probe>(&self, hub: &mut Hub<P>, id: SrqId) {
        if let Some(cq) = hub.cqs.get_mut(self.cq) {
            cq.forget(number(id));
        }
    }
}

/// An indirection table.
pub(crate) struct Table {
    /// A power of two of them.
    queues: Box<[SrqId]>,
    /// Queue pairs that receive by it.
    users: u32,
}

impl<P: Probe> Adapter<P> {
    /// Creates a receive work queue in RESET, which completes in `cq`. It is changed and destroyed as a
    /// shared receive queue; its number is the one of its slot.
    ///
    /// # Errors
    /// As [`create_srq`](Self::create_srq).
    pub fn create_wq(
        &mut self,
        pd: PdId,
        cq: CqId,
        max_wr: u32,
        max_sge: u32,
    ) -> Result<SrqId, Fault> {
        self.cq(cq)?;
        let id = self.create_srq(pd, max_wr, max_sge, 0)?;
        if let Some(srq) = self.hub.srqs.get_mut(id) {
            srq.wq = Some(WorkQueue { cq, state: WqState::Reset });
        }
        self.cq(cq)?.users += 1;
        Ok(id)
    }

    /// Moves a work queue to a state: from RESET to RDY, and from any to RESET, where what is posted is
    /// forgotten, or ERR, where it is flushed. To stay where it is changes nothing.
    ///
    /// # Errors
    /// It is no work queue, or is in error and asked to be ready.
    pub fn modify_wq(&mut self, now: Time, id: SrqId, to: WqState) -> Result<(), Fault> {
        self.hub.now = now;
        let wq = self.wq(id)?;
        match (wq.state, to) {
            (from, to) if from == to => return Ok(()),
            (WqState::Err, WqState::Ready) => {
                return Err(Fault::Transition(
                    "a work queue in the error state must be reset \
                    before it can be ready",
                ));
            }
            _ => wq.state = to,
        }
        match to {
            WqState::Reset => {
                if let Some(srq) = self.hub.srqs.get_mut(id) {
                    srq.queue.clear();
                }
                let wq = *self.wq(id)?;
                wq.forget_completions(&mut self.hub, id);
            }
            WqState::Err => flush(&mut self.hub, id),
            WqState::Ready => {}
        }
        Ok(())
    }

    /// Takes every work queue that is ready to error: the device fails.
    pub(crate) fn fail_work_queues(&mut self) {
        let ready = |srq: &Srq| srq.wq.is_some_and(|wq| wq.state == WqState::Ready);
        let srqs = self.hub.srqs.iter();
        let ids: Vec<SrqId> = srqs.filter(|(_, srq)| ready(srq)).map(|(id, _)| id).collect();
        for id in ids {
            // It is one that may go there.
            let _ = self.modify_wq(self.hub.now, id, WqState::Err);
        }
    }

    /// The state of a work queue.
    ///
    /// # Errors
    /// It is no work queue.
    pub fn wq_state(&mut self, id: SrqId) -> Result<WqState, Fault> {
        self.wq(id).map(|wq| wq.state)
    }

    fn wq(&mut self, id: SrqId) -> Result<&mut WorkQueue, Fault> {
        let srq = self.hub.srqs.get_mut(id).ok_or(Fault::NoSuchObject)?;
        srq.wq.as_mut().ok_or(Fault::Invalid("this is a shared receive queue, not a work queue"))
    }

    /// Posts a receive to a work queue.
    ///
    /// # Errors
    /// It is in RESET, or as [`post_srq_recv`](Self::post_srq_recv).
    pub fn post_wq_recv(
        &mut self,
        now: impl TimeSource,
        id: SrqId,
        wr_id: u64,
        sges: &[Sge],
    ) -> Result<(), Fault> {
        let WorkQueue { state, cq } = *self.wq(id)?;
        if state == WqState::Reset {
            return Err(Fault::WrongState);
        }
        // Nobody waits for its receives.
        self.post_srq_recv(self.hub.now, id, wr_id, sges)?;
        if state == WqState::Err {
            self.hub.now = now.time(self.hub.is_timed(cq));
            flush(&mut self.hub, id);
        }
        Ok(())
    }

    /// Creates an indirection table of work queues, which may come several times.
    ///
    /// # Errors
    /// Their number is no power of two or above [`MAX_TABLE_SIZE`], one of them is none, or no room.
    pub fn create_ind_table(&mut self, queues: &[SrqId]) -> Result<TableId, Fault> {
        if !queues.len().is_power_of_two() || queues.len() > MAX_TABLE_SIZE {
            return Err(Fault::Invalid("the size of an indirection table must be a power of two"));
        }
        for &id in queues {
            self.wq(id)?;
        }
        let made = self.hub.tables.insert(Table { queues: queues.into(), users: 0 });
        let table = made.ok_or(Fault::Exhausted("indirection tables"))?;
        self.change_users(queues, 1);
        Ok(table)
    }

    /// Destroys an indirection table.
    ///
    /// # Errors
    /// [`Fault::Busy`] while queue pairs use it.
    pub fn destroy_ind_table(&mut self, id: TableId) -> Result<(), Fault> {
        let table = self.hub.tables.get(id).ok_or(Fault::NoSuchObject)?;
        if table.users > 0 {
            return Err(Fault::Busy);
        }
        if let Some(table) = self.hub.tables.remove(id) {
            self.change_users(&table.queues, -1);
        }
        Ok(())
    }

    fn change_users(&mut self, queues: &[SrqId], by: i32) {
        for &id in queues {
            if let Some(srq) = self.hub.srqs.get_mut(id) {
                srq.users = srq.users.wrapping_add_signed(by);
            }
        }
    }

    /// Creates a raw packet queue pair that receives by an indirection table, and sends nothing. It is
    /// ready to receive and has no other state, but error.
    ///
    /// # Errors
    /// As [`create_qp`](Self::create_qp).
    pub fn create_hashed_qp(
        &mut self,
        pd: PdId,
        table: TableId,
        hash: RxHash,
        num: QpNum,
    ) -> Result<QpId, Fault> {
        self.hub.tables.get(table).ok_or(Fault::NoSuchObject)?;
        let (id, _) = self.create_qp(&QpInit::hashed(pd, table), num)?;
        if let Some(table) = self.hub.tables.get_mut(table) {
            table.users += 1;
        }
        if let Some(qp) = self.qps.get_mut(id) {
            qp.state = QpState::Rtr;
        }
        self.hub.hashes.insert(id, hash);
        Ok(id)
    }

    /// A queue pair that receives by a table is gone.
    pub(crate) fn leave_table(&mut self, id: QpId, qp_type: QpType) {
        if let QpType::Hashed(table) = qp_type {
            self.hub.hashes.remove(&id);
            if let Some(table) = self.hub.tables.get_mut(table) {
                table.users -= 1;
            }
        }
    }
}

/// Completes all that is posted to a work queue with a flush error.
fn flush<P: Probe>(hub: &mut Hub<P>, id: SrqId) {
    let mut receive = Receive::default();
    while let Some(srq) = hub.srqs.get_mut(id)
        && let Some(wq) = srq.wq
        && srq.queue.take(&mut receive)
    {
        let completion = completion(id, receive.wr_id, WcStatus::WrFlushErr);
        hub.complete(wq.cq, completion, true);
    }
}

/// What names a work queue in its completions.
fn number(id: SrqId) -> QpNum {
    QpNum(id.0 as u32)
}

/// A completion of a work queue, which is named by its own number.
fn completion(id: SrqId, wr_id: u64, status: WcStatus) -> Completion {
    let qp_num = number(id);
    Completion { wr_id, status, opcode: WcOpcode::Recv, qp_num, ..Completion::default() }
}

/// Puts a frame into the work queue that its hash chooses. If the receive there names memory that it may
/// not, the work queue is in error from then on.
pub(super) fn deliver<P: Probe>(
    qp: &mut Qp,
    hub: &mut Hub<P>,
    frame: &[u8],
    outer: &Layers<'_>,
    inner: Option<&Layers<'_>>,
) {
    let QpType::Hashed(table) = qp.qp_type else { return };
    let hash = hub.hashes.get(&qp.id).map_or(0, |hash| hash.of(outer, inner));
    let Some(table) = hub.tables.get(table) else { return };
    let id = table.queues[hash as usize & (table.queues.len() - 1)];
    let Some(srq) = hub.srqs.get_mut(id) else { return };
    let Some(wq) = srq.wq.filter(|wq| wq.state == WqState::Ready) else {
        hub.datagram_drops.no_queue_pair += 1;
        return;
    };
    let len = frame.len() as u64;
    let fits = srq.queue.next().is_some_and(|(_, sges)| quipu_mem::list_len(sges) >= len);
    let receive = &mut qp.responder.receive;
    if !fits || !srq.queue.take(receive) {
        hub.datagram_drops.no_receive += 1;
        return;
    }
    hub.probe.stage(Stage::GetWr, 0);
    let pd = pd_number(srq.pd);
    let status = match super::place(hub, pd, &receive.sges, frame) {
        Ok(()) => WcStatus::Success,
        Err(_) => WcStatus::LocProtErr,
    };
    qp.responder.counters.receives += 1;
    qp.responder.counters.bytes_in += len;
    let completion =
        Completion { byte_len: frame.len() as u32, ..completion(id, receive.wr_id, status) };
    let kept = hub.complete(wq.cq, completion, status != WcStatus::Success);
    if !kept || status != WcStatus::Success {
        if let Some(srq) = hub.srqs.get_mut(id) {
            srq.wq = Some(WorkQueue { state: WqState::Err, ..wq });
        }
        flush(hub, id);
    }
}
