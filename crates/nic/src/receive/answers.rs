//! Answers on a channel: what the peer says to reads, atomics, and requests that it refuses.

use quipu_mem::ring::SlotHeader;

use super::channel::{End, path, requester_ack};
use crate::adapter::Hub;
use crate::channel::{BUDGET, flag, response};
use crate::probe::{Probe, Stage};
use crate::qp::{Path, Qp};
use crate::requester;
use crate::types::{SendOp, WcStatus};
use crate::watch;

/// Takes the peer's responses; whether there were any.
#[inline]
pub(super) fn responses<P: Probe>(qp: &mut Qp, hub: &mut Hub<P>) -> Result<bool, End> {
    let mut busy = false;
    for _ in 0..BUDGET {
        let Some(header) = path(qp)?.channel.incoming.responses.peek() else { break };
        busy = true;
        if header.opcode == response::REFUSED {
            refused(qp, hub, &header);
            return Err(End::Over);
        }
        take_answer(qp, hub, &header)?;
        path(qp)?.channel.incoming.responses.pop();
    }
    Ok(busy)
}

/// The peer refused the oldest request that it has not executed.
fn refused<P: Probe>(qp: &mut Qp, hub: &mut Hub<P>, header: &SlotHeader) {
    let status = match header.imm {
        9 => WcStatus::RemInvReqErr,
        10 => WcStatus::RemAccessErr,
        _ => WcStatus::RemOpErr,
    };
    if !requester::acknowledge(qp, hub, header.ack) || !requester::has_begun(qp) {
        requester::peer_lost(qp, hub);
        return;
    }
    if hub.probe.watches() {
        watch::refused(qp, hub, false, status);
    }
    requester::fail_oldest(qp, hub, status);
}

fn take_answer<P: Probe>(qp: &mut Qp, hub: &mut Hub<P>, header: &SlotHeader) -> Result<(), End> {
    let position =
        qp.sq.in_progress().find(|&position| !qp.sq.wqe(position).answered).ok_or(End::Corrupt)?;
    let wqe = *qp.sq.wqe(position);
    // If the completions overran their queue, the request is flushed, its memory the program's again.
    requester_ack(qp, hub, wqe.first_request)?;
    let read = matches!(wqe.op, SendOp::Read { .. });
    if read != (header.opcode == response::READ_DATA) {
        return Err(End::Corrupt);
    }
    let left = wqe.length - wqe.placed;
    let last = header.flags & flag::MORE == 0;
    let len = header.length;
    if len > left || last != (len == left) || (len == 0 && !last) {
        return Err(End::Corrupt);
    }
    if header.flags & flag::REFERENCE == 0 && !place_answer(qp, hub, position, header)? {
        requester::fail_at(qp, hub, position, WcStatus::LocProtErr);
        return Err(End::Over);
    }
    let state = qp.sq.wqe_mut(position);
    state.placed += len;
    if last {
        state.answered = true;
        if hub.probe.watches() {
            watch::answered(qp, hub, position);
        }
        qp.requester.reads = qp.requester.reads.saturating_sub(1);
        requester_ack(qp, hub, wqe.end_request)?;
        requester::complete_done(qp, hub);
    }
    Ok(())
}

/// Copies the bytes of a response into the request that waits for them; `false` if it names memory that it
/// may not.
fn place_answer<P: Probe>(
    qp: &mut Qp,
    hub: &mut Hub<P>,
    position: u32,
    header: &SlotHeader,
) -> Result<bool, End> {
    let (pd, length, placed) = (qp.pd_number(), header.length, qp.sq.wqe(position).placed);
    let Qp { path: Path::Channel(path), sq, .. } = qp else { return Err(End::Over) };
    let incoming = &mut path.channel.incoming;
    let from_bytes = header.flags & flag::BYTES != 0;
    if !from_bytes && length != u32::from(header.inline_len) {
        return Err(End::Corrupt);
    }
    let list = sq.sges(position);
    let start = incoming.response_bytes.position();
    let mut at = 0;
    for piece in hub.regions.pieces(pd, list, u64::from(placed), u64::from(length), true) {
        let Ok(piece) = piece else { return Ok(false) };
        if from_bytes {
            incoming.response_bytes.copy_to(start.wrapping_add(at as u64), &piece)?;
        } else {
            incoming.responses.payload().sub(at, piece.len()).copy_to(&piece);
        }
        at += piece.len();
    }
    if from_bytes {
        incoming.response_bytes.release_to(start.wrapping_add(u64::from(length)))?;
    }
    hub.probe.stage(Stage::PutData, length as usize);
    Ok(true)
}
