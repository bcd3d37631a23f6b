//! Replies over a byte stream to requests of this side: what was read, acknowledgements, refusals for lack
//! of a receive, and why the peer ended the connection.

use quipu_iwarp::wire::control::Control;
use quipu_iwarp::wire::rdmap::AtomicResponse;
use quipu_iwarp::wire::terminate::Code;
use quipu_iwarp::{RemoteFault, Verdict, terminate};

use super::early;
use super::stream::{End, say_end};
use crate::adapter::Hub;
use crate::plain;
use crate::probe::{Probe, Stage};
use crate::qp::{Path, Qp, rnr_timer_ns};
use crate::requester;
use crate::stream::sink_of;
use crate::types::{SendOp, WcStatus};

/// Takes the acknowledgement that travels with a message, whether or not there is a receive for that.
#[inline]
pub(super) fn take_acknowledgement<P: Probe>(
    qp: &mut Qp,
    hub: &mut Hub<P>,
    executed: Option<u32>,
) -> Result<(), End> {
    executed.map_or(Ok(()), |count| acknowledged(qp, hub, count))
}

/// The peer has executed `count` requests.
#[inline]
fn acknowledged<P: Probe>(qp: &mut Qp, hub: &mut Hub<P>, count: u32) -> Result<(), End> {
    if !requester::acknowledge(qp, hub, count) {
        return Err(UNASKED);
    }
    match qp.path {
        Path::Stream(_) => Ok(()),
        // The completions overran their queue, or a request has failed that waited for those before it: what
        // was outstanding is flushed, its memory the program's again.
        _ => Err(End::Over),
    }
}

/// The oldest request that waits for data.
pub(crate) fn oldest_unanswered(qp: &Qp) -> Option<u32> {
    qp.sq.in_progress().find(|&position| !qp.sq.wqe(position).answered)
}

/// An answer that nobody waits for.
pub(super) const UNASKED: End = End::Nonsense(RemoteFault::UnexpectedOpcode);

/// The oldest request that waits for data; what came before it is thereby acknowledged.
fn oldest_asked<P: Probe>(qp: &mut Qp, hub: &mut Hub<P>) -> Result<u32, End> {
    let position = oldest_unanswered(qp).ok_or(UNASKED)?;
    let before = qp.sq.wqe(position).first_request;
    acknowledged(qp, hub, before).map(|()| position)
}

/// The data of a request is complete.
fn answered<P: Probe>(qp: &mut Qp, hub: &mut Hub<P>, position: u32) {
    let wqe = qp.sq.wqe_mut(position);
    wqe.answered = true;
    let end = wqe.end_request;
    qp.requester.reads = qp.requester.reads.saturating_sub(1);
    if !requester::acknowledge(qp, hub, end) {
        return;
    }
    requester::complete_done(qp, hub);
    if qp.sq.has_waiting()
        && let Path::Stream(stream) = &mut qp.path
    {
        stream.make_ready(&mut hub.ready);
    }
}

/// Places bytes of an answer into the work request that asked for them.
fn place_answer<P: Probe>(
    qp: &mut Qp,
    hub: &mut Hub<P>,
    position: u32,
    offset: u32,
    payload: &[u8],
) -> Result<(), End> {
    if early::is_in_place(qp) {
        return Ok(());
    }
    if early::has_placed(qp) {
        let list = qp.sq.sges(position).to_vec();
        early::note_list(qp, hub, (qp.pd_number(), &list), u64::from(offset), payload.len());
    }
    let placed =
        hub.regions.scatter(qp.pd_number(), qp.sq.sges(position), u64::from(offset), payload);
    if placed.is_err() {
        say_end(qp, terminate::for_fault(RemoteFault::Catastrophic, &[]));
        requester::fail_at(qp, hub, position, WcStatus::LocProtErr);
        return Err(End::Over);
    }
    hub.probe.stage(Stage::PutData, payload.len());
    Ok(())
}

pub(super) fn read_response<P: Probe>(
    qp: &mut Qp,
    hub: &mut Hub<P>,
    stag: u32,
    to: u64,
    last: bool,
    payload: &[u8],
) -> Result<(), End> {
    if plain::opening_answered(qp, hub, stag, to, last, payload) {
        return Ok(());
    }
    let position = oldest_asked(qp, hub)?;
    let wqe = *qp.sq.wqe(position);
    if !matches!(wqe.op, SendOp::Read { .. }) {
        return Err(UNASKED);
    }
    if stag != sink_of(position).0 {
        return Err(End::Nonsense(RemoteFault::InvalidStag));
    }
    let placed = wqe.placed.wrapping_add(payload.len() as u32);
    if to != u64::from(wqe.placed)
        || payload.len() as u64 > u64::from(wqe.length - wqe.placed)
        || last != (placed == wqe.length)
    {
        return Err(End::Nonsense(RemoteFault::BaseBounds));
    }
    place_answer(qp, hub, position, wqe.placed, payload)?;
    qp.sq.wqe_mut(position).placed = placed;
    if last {
        answered(qp, hub, position);
    }
    Ok(())
}

pub(super) fn atomic_response<P: Probe>(
    qp: &mut Qp,
    hub: &mut Hub<P>,
    response: &AtomicResponse,
) -> Result<(), End> {
    let position = oldest_asked(qp, hub)?;
    let atomic =
        matches!(qp.sq.wqe(position).op, SendOp::CompareSwap { .. } | SendOp::FetchAdd { .. });
    if !atomic || response.id != position {
        return Err(UNASKED);
    }
    place_answer(qp, hub, position, 0, &response.original.to_ne_bytes())?;
    answered(qp, hub, position);
    Ok(())
}

pub(super) fn take_control<P: Probe>(
    qp: &mut Qp,
    hub: &mut Hub<P>,
    control: Control,
) -> Result<(), End> {
    match control {
        Control::Ack { count } => {
            acknowledged(qp, hub, count)?;
            if qp.sq.has_waiting()
                && let Path::Stream(stream) = &mut qp.path
            {
                stream.make_ready(&mut hub.ready);
            }
            Ok(())
        }
        Control::RnrNak { count, timer } => rnr_nak(qp, hub, count, timer),
        Control::Resume { count } => {
            if count == qp.responder.executed {
                Ok(())
            } else {
                Err(UNASKED)
            }
        }
    }
}

/// The peer had no receive for request `count`: goes back to it and waits (IBA 9.7.5.2.8).
fn rnr_nak<P: Probe>(qp: &mut Qp, hub: &mut Hub<P>, count: u32, timer: u8) -> Result<(), End> {
    if !requester::acknowledge(qp, hub, count) || !requester::rewind(qp, count) {
        return Err(UNASKED);
    }
    qp.requester.counters.rnr += 1;
    if qp.attr.rnr_retry != 7 && qp.requester.rnr_tries >= qp.attr.rnr_retry {
        // Answers to what came before may still be on their way.
        requester::fail_next(qp, hub, WcStatus::RnrRetryExcErr);
        return Ok(());
    }
    qp.requester.rnr_tries = qp.requester.rnr_tries.saturating_add(1);
    qp.requester.rnr_until = Some(hub.now.after(rnr_timer_ns(timer)));
    qp.requester.held = false;
    requester::set_alarm(qp, hub);
    Ok(())
}

/// The wait after an RNR refusal is over: says so and goes on from the refused request.
pub(crate) fn resume<P: Probe>(qp: &mut Qp, hub: &mut Hub<P>) {
    let count = qp.requester.started;
    if let Path::Stream(stream) = &mut qp.path {
        stream.resume = Some(Control::Resume { count });
        stream.make_ready(&mut hub.ready);
    }
}

/// The status of a request that the peer ended the connection over.
pub(crate) fn status_of(code: Code) -> WcStatus {
    match terminate::verdict(code) {
        Verdict::RemoteAccess => WcStatus::RemAccessErr,
        Verdict::InvalidRequest => WcStatus::RemInvReqErr,
        Verdict::NoBuffer => WcStatus::RnrRetryExcErr,
        Verdict::RemoteOperation => WcStatus::RemOpErr,
        Verdict::Transport => WcStatus::BadRespErr,
    }
}

/// The peer ended the connection: what is outstanding fails with what the peer said.
pub(super) fn terminated<P: Probe>(qp: &mut Qp, hub: &mut Hub<P>, status: WcStatus) {
    if !qp.qp_type.is_reliable() || !requester::has_begun(qp) {
        // Nobody waits for anything: the queue pair notices when it next sends, as on hardware.
        requester::peer_lost(qp, hub);
        return;
    }
    requester::fail_oldest(qp, hub, status);
}
