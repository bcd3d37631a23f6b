//! Small sends that are transmitted while they are being posted.

use quipu_mem::ring::{INLINE_MAX, SlotHeader, SlotWriter};

use super::told_along;
use crate::adapter::Hub;
use crate::channel::{Other, flag, request};
use crate::doorbell::has_room;
use crate::probe::{Probe, Stage};
use crate::qp::{Path, Qp};
use crate::queue::SendQueue;
use crate::types::{Payload, QpState, QpType, SendFlags, SendOp, SendWr, To};
use crate::watch;

/// Puts `length` bytes, which are all of a small payload, into a slot; `false` if they may not be read.
#[inline(always)]
pub(in crate::transmit) fn put_payload<P>(
    slot: &SlotWriter<'_>,
    hub: &Hub<P>,
    pd: u32,
    payload: Payload<'_>,
    length: usize,
) -> bool {
    let place = || slot.payload().sub(0, length);
    match payload {
        Payload::Inline(bytes) => slot.put(bytes),
        Payload::Sges([sge]) => match hub.regions.local(pd, sge, false) {
            Ok(span) => span.copy_to(&place()),
            Err(_) => return false,
        },
        Payload::Sges(list) => return hub.regions.gather_to(pd, list, 0, &place()).is_ok(),
    }
    true
}

/// Bytes of a small payload; `None` if it is larger than a slot, or than the queue allows.
#[inline(always)]
pub(in crate::transmit) fn small_len(sq: &SendQueue, payload: Payload<'_>) -> Option<usize> {
    let (length, fits) = match payload {
        Payload::Sges([sge]) => (sge.len as usize, sq.max_sge() > 0),
        Payload::Sges(list) if list.len() > sq.max_sge() => return None,
        Payload::Sges(list) => (list.iter().map(|sge| sge.len as usize).sum(), true),
        Payload::Inline(bytes) => (bytes.len(), bytes.len() <= sq.max_inline()),
    };
    (fits && length <= INLINE_MAX).then_some(length)
}

/// Whether nothing stands before a request to the peer that is being posted: it may be transmitted at once.
#[inline(always)]
pub(in crate::transmit) fn has_right_of_way<P>(qp: &mut Qp, hub: &Hub<P>, wr: &SendWr<'_>) -> bool {
    let requester = &qp.requester;
    let fenced = wr.flags.contains(SendFlags::FENCE) && requester.reads > 0;
    matches!((qp.qp_type, wr.to), (QpType::Rc | QpType::Uc, To::Peer | To::Srq(_)))
        && qp.state == QpState::Rts
        && !qp.sq.has_waiting()
        && requester.rnr_until.is_none()
        && requester.failing.is_none()
        && !fenced
        && has_room(qp, hub)
}

/// Transmits a small send while it is being posted, where nothing stands before it: neither its list nor
/// its bytes go through the send queue. `false` if that is not possible, for this or any other reason: the
/// caller finds out which. The peer is told when the doorbell rings.
pub(crate) fn express<P: Probe>(qp: &mut Qp, hub: &mut Hub<P>, wr: &SendWr<'_>) -> bool {
    let sent = send_at_once(qp, hub, wr);
    if let Path::Channel(path) = &mut qp.path {
        path.unannounced |= sent;
    }
    sent
}

/// As [`express`], for a caller who tells the peer himself.
#[inline(always)]
pub(crate) fn send_at_once<P: Probe>(qp: &mut Qp, hub: &mut Hub<P>, wr: &SendWr<'_>) -> bool {
    let (opcode, imm) = match wr.op {
        SendOp::Send => (request::SEND, 0),
        SendOp::SendImm(imm) => (request::SEND_IMM, imm),
        _ => return false,
    };
    if hub.qos.is_some() || !has_right_of_way(qp, hub, wr) {
        return false;
    }
    let pd = qp.pd_number();
    let Qp { path: Path::Channel(path), sq, requester, responder, .. } = qp else { return false };
    // A peer that was asked for a channel may yet hear that it never stood, and transmits everything again.
    if requester.acked == 0 && path.block.is_none() && matches!(path.other, Other::Linked { .. }) {
        return false;
    }
    let Some(length) = small_len(sq, wr.payload) else { return false };
    if length > hub.config.max_message as usize {
        return false;
    }
    let Ok(slot) = path.channel.outgoing.requests.reserve() else { return false };
    if !put_payload(&slot, hub, pd, wr.payload, length) {
        return false;
    }
    let (bytes, length) = (length, length as u32);
    slot.commit(&SlotHeader {
        opcode,
        flags: if wr.flags.contains(SendFlags::SOLICITED) { flag::SOLICITED } else { 0 },
        inline_len: length as u16,
        length,
        imm,
        raddr: 0,
        rkey: 0,
        ack: responder.executed,
    });
    let next = requester.started.wrapping_add(1);
    sq.push_transmitted(wr, length, requester.started..next);
    requester.started = next;
    // What this answers was handed out, most often, and the rest of that is done now that it is on its way.
    let answered = hub.unsettled.take_if(|taken| taken.qp == qp.id);
    if let Some(taken) = answered {
        taken.acknowledge(qp, hub);
    }
    told_along(qp, hub);
    if let Some(taken) = answered {
        taken.answer(qp, hub);
    }
    if hub.probe.watches() {
        watch::posted_express(qp, hub, wr, length);
    }
    hub.probe.stage(Stage::GetData, bytes);
    true
}
