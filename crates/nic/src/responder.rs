//! The responder's bookkeeping, whatever the path: receives taken, filled and completed, and the rights of
//! remote operations.

use quipu_iwarp::wire::grh;
use quipu_mem::{AccessError, Key, Span};

use crate::adapter::Hub;
use crate::audit::{self, Denied};
use crate::fate::Fate;
use crate::probe::{Probe, Stage};
use crate::qp::Qp;
use crate::types::{
    Access, AsyncEvent, Completion, Flush, Placement, QpNum, QpState, QpType, WcExtra, WcOpcode,
    WcStatus,
};

/// Why a request of the peer is refused for good.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Refusal {
    /// The key, the range or the right was wrong: the peer gets a remote access error.
    Access(AccessError),
    /// The request makes no sense here: the peer gets a remote invalid request error.
    Invalid,
    /// The message does not fit the receive; the own receive fails with a length error, the peer gets a
    /// remote invalid request error.
    TooLong,
    /// The own receive names memory it may not; the peer gets a remote operation error.
    Local,
    /// The own completion queue overran or the adapter failed.
    Failed,
    /// Plain iWARP and unreliable connections: no receive is posted, and the peer cannot be told to wait.
    NoReceive,
    /// Plain iWARP: more reads and atomics at a time than were granted.
    TooManyReads,
    /// Plain iWARP: what the peer asks to invalidate cannot be.
    CannotInvalidate,
    /// The range wraps around the end of the address space.
    ToWrap,
    /// The own receive is to fail with this status, on purpose.
    Fated(WcStatus),
}

impl Refusal {
    /// The status that the peer's request gets.
    pub(crate) fn remote_status(self) -> WcStatus {
        match self {
            Self::Access(_) | Self::CannotInvalidate | Self::ToWrap => WcStatus::RemAccessErr,
            Self::Invalid | Self::TooLong | Self::Fated(WcStatus::LocLenErr) => {
                WcStatus::RemInvReqErr
            }
            Self::Local | Self::Failed | Self::TooManyReads | Self::Fated(_) => WcStatus::RemOpErr,
            Self::NoReceive => WcStatus::RnrRetryExcErr,
        }
    }

    /// The status that the own receive in progress gets.
    fn receive_status(self) -> WcStatus {
        match self {
            Self::TooLong => WcStatus::LocLenErr,
            Self::Local => WcStatus::LocProtErr,
            Self::Access(_) | Self::Invalid | Self::CannotInvalidate | Self::ToWrap => {
                WcStatus::LocAccessErr
            }
            Self::Failed | Self::NoReceive | Self::TooManyReads => WcStatus::LocQpOpErr,
            Self::Fated(status) => status,
        }
    }

    /// Whether an unreliable queue pair drops the message and goes on (IBA 9.9.3, class D): the fault is the
    /// peer's.
    pub(crate) fn is_dropped(self) -> bool {
        matches!(
            self,
            Self::Access(_) | Self::Invalid | Self::TooLong | Self::NoReceive | Self::ToWrap
        )
    }

    /// The event that the refusal raises at this side, if no completion reports it (IBA 11.6.3.2).
    fn event(self, qp: &Qp) -> AsyncEvent {
        match self {
            Self::Access(_) | Self::CannotInvalidate | Self::ToWrap => {
                AsyncEvent::QpAccessErr(qp.id)
            }
            Self::Invalid | Self::TooLong | Self::NoReceive | Self::TooManyReads => {
                AsyncEvent::QpReqErr(qp.id)
            }
            Self::Local | Self::Failed | Self::Fated(_) => AsyncEvent::QpFatal(qp.id),
        }
    }
}

/// Notes that a message arrives: in RTR the first one raises an event.
#[inline]
pub(crate) fn note_arrival<P: Probe>(qp: &mut Qp, hub: &mut Hub<P>) {
    if !qp.responder.established {
        qp.responder.established = true;
        if qp.state == QpState::Rtr {
            hub.raise(AsyncEvent::CommEst(qp.id));
        }
    }
}

/// Takes a receive request for a message that begins; `false` if there is none.
#[inline]
pub(crate) fn begin_receive<P: Probe>(qp: &mut Qp, hub: &mut Hub<P>) -> bool {
    hub.probe.stage(Stage::GetWr, 0);
    let taken = match qp.srq {
        None => qp.rq.take(&mut qp.responder.receive),
        Some(id) => match hub.srqs.get_mut(id) {
            Some(srq) => {
                let taken = srq.queue.take(&mut qp.responder.receive);
                if taken && srq.reaches_limit() {
                    hub.raise(AsyncEvent::SrqLimitReached(id));
                }
                taken
            }
            None => false,
        },
    };
    qp.responder.receiving = taken;
    if !taken && hub.starved.is_some() {
        note_starved(qp, hub);
    }
    taken
}

/// Whether a receive is in progress, or [`begin_receive`] finds one.
pub(crate) fn has_receive<P>(qp: &Qp, hub: &mut Hub<P>) -> bool {
    let found = qp.responder.receiving || next_capacity(qp, hub).is_some();
    if !found && hub.starved.is_some() {
        note_starved(qp, hub);
    }
    found
}

/// Notes that a message finds no receive, unless one is there that is held back on purpose.
#[cold]
fn note_starved<P>(qp: &Qp, hub: &mut Hub<P>) {
    let posted = match qp.srq {
        None => qp.rq.len(),
        Some(id) => hub.srqs.get(id).map_or(0, |srq| srq.queue.len()),
    };
    if posted > 0 {
        return;
    }
    if let Some(starved) = hub.starved.as_mut().filter(|starved| !starved.contains(&qp.id)) {
        starved.push(qp.id);
    }
}

/// Bytes that the next receive has room for; `None` if there is none.
pub(crate) fn next_capacity<P>(qp: &Qp, hub: &Hub<P>) -> Option<u64> {
    let queue = match qp.srq {
        None => &qp.rq,
        Some(id) => &hub.srqs.get(id)?.queue,
    };
    queue.next().map(|(_, sges)| quipu_mem::list_len(sges))
}

/// Whether the receive that was taken is to fail.
///
/// # Errors
/// [`Refusal::Fated`].
#[inline]
pub(crate) fn spared(qp: &mut Qp) -> Result<(), Refusal> {
    match qp.responder.receive.fate {
        Some(Fate::Fail(status)) => {
            qp.responder.receive.fate = None;
            Err(Refusal::Fated(status))
        }
        _ => Ok(()),
    }
}

/// What a finished receive is told in addition to its bytes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Finish {
    pub(crate) opcode: WcOpcode,
    pub(crate) byte_len: u32,
    pub(crate) extra: WcExtra,
    pub(crate) solicited: bool,
}

/// Completes the receive in progress.
///
/// # Errors
/// [`Refusal::Failed`] if the completion queue overran.
#[inline]
pub(crate) fn finish_receive<P: Probe>(
    qp: &mut Qp,
    hub: &mut Hub<P>,
    finish: Finish,
) -> Result<(), Refusal> {
    let src_qp = QpNum(qp.attr.dest_qp_num);
    finish_from(qp, hub, finish, src_qp, None)
}

/// Completes the receive in progress, which a datagram of `src_qp` has filled: of its `route` the completion
/// shows the service level and the sender's LID.
///
/// # Errors
/// As [`finish_receive`].
pub(crate) fn finish_datagram<P: Probe>(
    qp: &mut Qp,
    hub: &mut Hub<P>,
    finish: Finish,
    src_qp: QpNum,
    route: (u8, u16),
) -> Result<(), Refusal> {
    finish_from(qp, hub, finish, src_qp, Some(route))
}

/// Counts the receive in progress as finished, with a message of `size` bytes.
#[inline(always)]
pub(crate) fn count_receive<P: Probe>(qp: &mut Qp, hub: &mut Hub<P>, opcode: WcOpcode, size: u32) {
    qp.responder.receiving = false;
    let counters = &mut qp.responder.counters;
    counters.receives += 1;
    // The bytes of a write are counted where they are written.
    if opcode == WcOpcode::Recv {
        counters.bytes_in += u64::from(size);
    }
    hub.probe.stage(Stage::Update, 0);
}

/// What the receive in progress completes with.
#[inline(always)]
pub(crate) fn describe(
    qp: &Qp,
    finish: Finish,
    src_qp: QpNum,
    route: Option<(u8, u16)>,
) -> Completion {
    let (sl, slid) = route.unwrap_or_default();
    Completion {
        wr_id: qp.responder.receive.wr_id,
        status: WcStatus::Success,
        opcode: finish.opcode,
        extra: finish.extra,
        byte_len: finish.byte_len,
        qp_num: qp.num,
        src_qp,
        grh: route.is_some(),
        sl,
        slid,
    }
}

#[inline(always)]
fn finish_from<P: Probe>(
    qp: &mut Qp,
    hub: &mut Hub<P>,
    finish: Finish,
    src_qp: QpNum,
    route: Option<(u8, u16)>,
) -> Result<(), Refusal> {
    // The route header before a datagram is none of its sender's bytes.
    let added = if route.is_some() { grh::LEN as u32 } else { 0 };
    count_receive(qp, hub, finish.opcode, finish.byte_len - added);
    let kept = match qp.responder.receive.fate {
        None => {
            let completion = || describe(qp, finish, src_qp, route);
            hub.complete_with(qp.recv_cq, WcStatus::Success, finish.solicited, completion)
        }
        Some(fate) => {
            let completion = describe(qp, finish, src_qp, route);
            qp.responder.receive.fate = None;
            let late_ns = if let Fate::Late(ns) = fate { ns } else { 0 };
            hub.complete_late(qp.recv_cq, completion, finish.solicited, late_ns)
        }
    };
    if kept { Ok(()) } else { Err(Refusal::Failed) }
}

/// Counts a read that is answered.
pub(crate) fn count_read(qp: &mut Qp, size: u32) {
    qp.responder.counters.reads += 1;
    qp.responder.counters.bytes_out += u64::from(size);
}

/// Counts a request as executed.
#[inline]
pub(crate) fn executed(qp: &mut Qp) {
    qp.responder.executed = qp.responder.executed.wrapping_add(1);
}

/// The number of the protection domain that memory must be in which the peer names by `rkey`.
#[inline]
pub(crate) fn remote_pd<P>(qp: &Qp, hub: &Hub<P>, rkey: u32) -> u32 {
    match qp.qp_type {
        QpType::XrcRecv(domain) => crate::xrc::pd_of(hub, domain, Key(rkey)),
        _ => qp.pd_number(),
    }
}

/// Checks a remote operation against the queue pair and the region table.
#[inline]
pub(crate) fn remote<'a, P>(
    qp: &Qp,
    hub: &'a Hub<P>,
    rkey: u32,
    addr: u64,
    len: u32,
    right: Access,
) -> Result<Span<'a>, Refusal> {
    let pd = remote_pd(qp, hub, rkey);
    if !qp.allows(right) {
        return match (qp.qp_type.is_plain(), len) {
            (false, _) => Err(Refusal::Invalid),
            // No payload, no access: an empty message needs no right (RFC 5040 5.2, 5.3).
            (true, 0) => Ok(Span::EMPTY),
            (true, _) => Err(Refusal::Access(AccessError::Denied)),
        };
    }
    hub.regions.remote(pd, qp.num.0, Key(rkey), addr, u64::from(len), right).map_err(|error| {
        note_denied(qp, hub, rkey, (addr, u64::from(len)), error);
        match error {
            // An atomic that is not aligned is an invalid request (IBA 9.7.4.1.1), whatever its key.
            AccessError::Misaligned => Refusal::Invalid,
            AccessError::OutOfBounds if addr.checked_add(u64::from(len) - 1).is_none() => {
                Refusal::ToWrap
            }
            error => Refusal::Access(error),
        }
    })
}

/// As [`remote`], for who does not act on it: nobody hears of what is refused.
pub(crate) fn remote_quietly<'a, P>(
    qp: &Qp,
    hub: &'a Hub<P>,
    rkey: u32,
    addr: u64,
    len: u32,
    right: Access,
) -> Option<Span<'a>> {
    let pd = remote_pd(qp, hub, rkey);
    let found = hub.regions.remote(pd, qp.num.0, Key(rkey), addr, u64::from(len), right);
    found.ok().filter(|_| qp.allows(right))
}

#[inline]
fn note_denied<P>(qp: &Qp, hub: &Hub<P>, rkey: u32, range: (u64, u64), error: AccessError) {
    if let Some(denied) = &hub.denied {
        audit::note_denied(denied, Denied { qp: qp.id, rkey: Key(rkey), range, error });
    }
}

/// Executes a flush of the peer: what it wrote before is in memory, where all of this host sees it, so that
/// only the right to ask is left to be checked. `flush` is none if it made no sense.
///
/// # Errors
/// It made none, or the queue pair has or grants no flushes ([`Refusal::Invalid`]); the key, the range or the
/// right is wrong. Nothing here is persistent, so no region grants that.
pub(crate) fn flush<P>(qp: &mut Qp, hub: &Hub<P>, flush: Option<Flush>) -> Result<(), Refusal> {
    let flush = flush.ok_or(Refusal::Invalid)?;
    if !qp.qp_type.is_reliable() || !qp.allows(Access::FLUSH_GLOBAL) {
        return Err(Refusal::Invalid);
    }
    let (rkey, pd) = (flush.rkey, remote_pd(qp, hub, flush.rkey));
    let granted = match flush.placement {
        Placement::GLOBAL => hub.regions.flush(pd, qp.num.0, Key(rkey), flush.range()),
        _ => Err(AccessError::Denied),
    };
    granted.map_err(|error| {
        note_denied(qp, hub, rkey, (flush.addr, flush.len), error);
        Refusal::Access(error)
    })
}

/// Ends the queue pair because of what the peer asked: the receive in progress fails with the matching
/// status and everything else is flushed. Only where no completion reports the error, an event does (IBA
/// 9.9.3 class C, 11.6.3.2). The caller has told the peer.
pub(crate) fn refuse<P: Probe>(qp: &mut Qp, hub: &mut Hub<P>, refusal: Refusal) {
    qp.responder.counters.refused += 1;
    let mut reported = false;
    if std::mem::take(&mut qp.responder.receiving) {
        let completion = Completion {
            wr_id: qp.responder.receive.wr_id,
            status: refusal.receive_status(),
            opcode: WcOpcode::Recv,
            qp_num: qp.num,
            src_qp: QpNum(qp.attr.dest_qp_num),
            ..Completion::default()
        };
        reported = hub.complete(qp.recv_cq, completion, true);
    }
    let event = (!reported).then(|| refusal.event(qp));
    crate::requester::to_error(qp, hub, event);
}
