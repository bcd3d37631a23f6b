//! The requester's bookkeeping, whatever the path: completing, failing and flushing send requests.

use crate::adapter::{Alarm, Hub};
use crate::channel::Other;
use crate::fate::{self, Cut};
use crate::probe::Probe;
use crate::qp::{Path, Qp};
use crate::queue::SendWqe;
use crate::types::{
    AsyncEvent, Completion, QpState, SendFlags, SendOp, Time, WcExtra, WcOpcode, WcStatus,
};

/// The opcode that a completion of `op` carries.
fn wc_opcode(op: &SendOp) -> WcOpcode {
    match op {
        SendOp::Send | SendOp::SendImm(_) | SendOp::SendInv(_) => WcOpcode::Send,
        SendOp::Write { .. } | SendOp::WriteImm { .. } => WcOpcode::RdmaWrite,
        SendOp::AtomicWrite { .. } => WcOpcode::AtomicWrite,
        SendOp::Read { .. } => WcOpcode::RdmaRead,
        SendOp::CompareSwap { .. } => WcOpcode::CompSwap,
        SendOp::FetchAdd { .. } => WcOpcode::FetchAdd,
        SendOp::Flush(_) => WcOpcode::Flush,
        SendOp::LocalInv { .. } => WcOpcode::LocalInv,
        SendOp::BindMw(_) => WcOpcode::BindMw,
    }
}

/// Plain iWARP: a request is done, for the requester, once all of it is handed to the stream; but not one
/// that waits for data, nor those behind it.
#[inline]
pub(crate) fn handed_over<P: Probe>(qp: &mut Qp, hub: &mut Hub<P>) {
    qp.requester.acked = qp.requester.started;
    complete_done(qp, hub);
}

/// Whether `count` requests have been reached when `executed` are done; counts wrap.
#[inline]
pub(crate) fn reached(executed: u32, count: u32) -> bool {
    executed.wrapping_sub(count) as i32 >= 0
}

/// Notes that the peer has executed `executed` requests in all. `false` if that is more than were
/// asked of it, which no honest peer says; a smaller count than before is an old message and ignored.
#[inline]
pub(crate) fn acknowledge<P: Probe>(qp: &mut Qp, hub: &mut Hub<P>, executed: u32) -> bool {
    if !reached(qp.requester.started, executed) {
        return false;
    }
    if executed != qp.requester.acked && reached(executed, qp.requester.acked) {
        qp.requester.acked = executed;
        qp.requester.rnr_tries = 0;
        complete_done(qp, hub);
    }
    true
}

/// Completes the requests at the head of the send queue that are done, in order.
#[inline]
pub(crate) fn complete_done<P: Probe>(qp: &mut Qp, hub: &mut Hub<P>) {
    while qp.sq.head != qp.sq.next {
        let wqe = qp.sq.wqe(qp.sq.head);
        if !wqe.answered || !reached(qp.requester.acked, wqe.end_request) {
            break;
        }
        let (flags, position) = (wqe.flags, qp.sq.head);
        qp.requester.counters.count(&wqe.op, wqe.length);
        if qp.sq_sig_all || flags.contains(SendFlags::SIGNALED) {
            let completion = Completion {
                wr_id: wqe.wr_id,
                status: WcStatus::Success,
                opcode: wc_opcode(&wqe.op),
                byte_len: wqe.length,
                qp_num: qp.num,
                ..Completion::default()
            };
            let late_ns =
                if flags.contains(SendFlags::FATED) { fate::lateness(qp, position) } else { 0 };
            let kept = match late_ns {
                0 => hub.complete(qp.send_cq, completion, false),
                late_ns => hub.complete_late(qp.send_cq, completion, false, late_ns),
            };
            if !kept {
                to_error(qp, hub, Some(AsyncEvent::QpFatal(qp.id)));
                return;
            }
        }
        qp.sq.head = qp.sq.head.wrapping_add(1);
    }
    if qp.sq.head == qp.sq.next {
        if let Some(status) = qp.requester.failing.take() {
            fail_oldest(qp, hub, status);
        } else if qp.drain_owed && !is_draining(qp) {
            qp.drain_owed = false;
            hub.raise(AsyncEvent::SqDrained(qp.id));
        }
    }
}

/// Completes what an unreliable queue pair has transmitted, for which it expects no answer.
pub(crate) fn complete_sent<P: Probe>(qp: &mut Qp, hub: &mut Hub<P>) {
    qp.requester.acked = qp.requester.started;
    complete_done(qp, hub);
}

/// Whether the request at `sq.next` may begin now: the state allows it, no wait is on, its fence is down
/// and reads are granted.
#[inline]
pub(crate) fn may_begin(qp: &Qp) -> bool {
    let requester = &qp.requester;
    let open = match qp.state {
        QpState::Rts => true,
        // What had begun before is finished.
        QpState::Sqd => requester.redo > 0 || requester.stage > 0,
        _ => false,
    };
    if !qp.sq.has_waiting() || !open || requester.rnr_until.is_some() || requester.failing.is_some()
    {
        return false;
    }
    let wqe = qp.sq.wqe(qp.sq.next);
    let fenced = wqe.flags.contains(SendFlags::FENCE) && requester.reads > 0;
    let granted = !wqe.wants_answer() || requester.reads < u32::from(qp.attr.max_rd_atomic.max(1));
    !fenced && granted
}

/// The request at `sq.next` is transmitted: goes on to the next one.
#[inline]
pub(crate) fn transmitted(qp: &mut Qp) {
    let length = qp.sq.wqe(qp.sq.next).length;
    qp.requester.waiting_bytes = qp.requester.waiting_bytes.saturating_sub(u64::from(length));
    qp.requester.offset = 0;
    qp.requester.stage = 0;
    qp.requester.redo = qp.requester.redo.saturating_sub(1);
    qp.sq.next = qp.sq.next.wrapping_add(1);
}

/// The request at `sq.next` concerned only this side and is executed: it completes in its turn.
pub(crate) fn skip_local<P: Probe>(qp: &mut Qp, hub: &mut Hub<P>) {
    let state = qp.sq.wqe_mut(qp.sq.next);
    state.first_request = qp.requester.started;
    state.end_request = qp.requester.started;
    state.answered = true;
    transmitted(qp);
    complete_done(qp, hub);
}

/// The request at `sq.next` fails with `status`, once those before it have completed.
pub(crate) fn fail_next<P: Probe>(qp: &mut Qp, hub: &mut Hub<P>, status: WcStatus) {
    qp.requester.failing = Some(status);
    complete_done(qp, hub);
}

/// Goes back to request number `count`, which the peer has refused for now, so that it is transmitted
/// again with its old sequence numbers. `false` if no request in progress has that number.
pub(crate) fn rewind(qp: &mut Qp, count: u32) -> bool {
    let holds = |first: u32, end: u32| count.wrapping_sub(first) < end.wrapping_sub(first);
    let current = (qp.requester.offset > 0).then_some(qp.sq.next);
    let found = qp.sq.in_progress().chain(current).find(|&position| {
        let wqe = qp.sq.wqe(position);
        holds(wqe.first_request, wqe.end_request)
    });
    let Some(position) = found else { return false };
    let mut reads = 0;
    let mut bytes = 0;
    for at in qp.sq.in_progress().chain(current) {
        let wqe = qp.sq.wqe(at);
        let before = at.wrapping_sub(qp.sq.head) < position.wrapping_sub(qp.sq.head);
        reads += u32::from(before && wqe.wants_answer() && !wqe.answered);
        bytes += if before || Some(at) == current { 0 } else { u64::from(wqe.length) };
    }
    let wqe = qp.sq.wqe(position);
    let behind = qp.sq.next.wrapping_sub(position) + u32::from(current.is_some());
    qp.requester.redo = qp.requester.redo.max(behind);
    qp.requester.counters.retransmitted += u64::from(behind);
    qp.requester.stage = count.wrapping_sub(wqe.first_request);
    qp.requester.started = count;
    // What stands behind fails in its turn, when it is reached again.
    qp.requester.failing = None;
    qp.requester.reads = reads;
    qp.requester.offset = 0;
    qp.requester.waiting_bytes += bytes;
    if let Path::Stream(stream) = &mut qp.path {
        stream.outgoing = None;
        stream.tx.rewind(wqe.msn);
    }
    qp.sq.next = position;
    true
}

/// Whether the peer has at least the beginning of a request that is not acknowledged.
pub(crate) fn has_begun(qp: &Qp) -> bool {
    qp.sq.head != qp.sq.next || qp.requester.offset > 0
}

/// Whether a request that began before SQD is still to be finished: transmitted, transmitted again after
/// an RNR refusal, or acknowledged.
pub(crate) fn is_draining(qp: &Qp) -> bool {
    has_begun(qp) || qp.requester.redo > 0 || qp.requester.stage > 0
}

/// Goes back to the oldest request, since the connection over which requests were begun came to nothing.
pub(crate) fn start_over(qp: &mut Qp) {
    let begun = qp.sq.next.wrapping_sub(qp.sq.head) + u32::from(qp.requester.offset > 0);
    let bytes = qp.sq.in_progress().map(|at| u64::from(qp.sq.wqe(at).length)).sum::<u64>();
    qp.requester.waiting_bytes += bytes;
    qp.requester.redo = qp.requester.redo.max(begun);
    qp.requester.started = 0;
    qp.requester.acked = 0;
    qp.requester.reads = 0;
    qp.requester.offset = 0;
    qp.requester.stage = 0;
    qp.requester.failing = None;
    qp.sq.next = qp.sq.head;
}

/// Sets the alarm of a queue pair for the first of the moments that it waits for.
pub(crate) fn set_alarm<P>(qp: &mut Qp, hub: &mut Hub<P>) {
    let requester = &qp.requester;
    let held = qp.rq.opens_at();
    let first = [requester.rnr_until, requester.deadline, requester.reconnect_at, held]
        .into_iter()
        .flatten()
        .filter(|&at| at != Time::NEVER)
        .min();
    let mut timer = qp.timer;
    hub.set_alarm(&mut timer, Alarm::Qp(qp.id), first);
    qp.timer = timer;
}

/// The peer's side of a channel makes no sense: the connection ends and whatever is outstanding fails. The
/// event is for want of a completion that says so (IBA 11.6.3.2).
pub(crate) fn peer_corrupt<P: Probe>(qp: &mut Qp, hub: &mut Hub<P>) {
    if !qp.qp_type.is_reliable() {
        crate::connect::lose(qp, hub);
    } else if qp.sq.is_empty() {
        to_error(qp, hub, Some(AsyncEvent::QpFatal(qp.id)));
    } else {
        fail_oldest(qp, hub, WcStatus::BadRespErr);
    }
}

/// Fails the oldest request in the send queue with `status` and takes the queue pair to error.
pub(crate) fn fail_oldest<P: Probe>(qp: &mut Qp, hub: &mut Hub<P>, status: WcStatus) {
    fail_at(qp, hub, qp.sq.head, status);
}

/// Fails the request at `position` with `status`, as if all before it had been flushed, and takes the
/// queue pair to error (IBA 10.10.2.2: one completion in error, all later ones flushed).
pub(crate) fn fail_at<P: Probe>(qp: &mut Qp, hub: &mut Hub<P>, position: u32, status: WcStatus) {
    if !qp.qp_type.is_reliable() {
        return stop_sending(qp, hub, position, status);
    }
    qp.ending.verdict.get_or_insert((position, status));
    to_error(qp, hub, None);
}

/// Fails the request at `sq.next`, behind which everything is flushed, and stops the send queue of an
/// unreliable queue pair.
pub(crate) fn send_queue_error<P: Probe>(qp: &mut Qp, hub: &mut Hub<P>, status: WcStatus) {
    stop_sending(qp, hub, qp.sq.next, status);
}

/// The request of an unreliable queue pair at `position` failed on this side: its send queue stops until
/// the program restarts it; what arrives is still received (IBA 10.3.1.6, SQE).
fn stop_sending<P: Probe>(qp: &mut Qp, hub: &mut Hub<P>, position: u32, status: WcStatus) {
    let cut = qp.requester.offset > 0;
    qp.state = QpState::Sqe;
    conclude(qp, hub, position, status);
    flush_sends(qp, hub);
    set_alarm(qp, hub);
    if cut {
        // The peer has the beginning of a message that will not end.
        crate::connect::lose(qp, hub);
    }
}

/// Takes the queue pair to error: its connection ends and everything posted is flushed.
pub(crate) fn to_error<P: Probe>(qp: &mut Qp, hub: &mut Hub<P>, event: Option<AsyncEvent>) {
    let first = qp.state != QpState::Err;
    hub.counters.changes += u64::from(first);
    qp.state = QpState::Err;
    if let Some(event) = event.filter(|_| first) {
        hub.raise(event);
    }
    qp.ending.last_wqe |= first && qp.srq.is_some() && qp.qp_type.has_receives();
    let shared = matches!(&qp.path, Path::Channel(path) if !matches!(path.other, Other::Own(_)));
    crate::connect::detach(qp, hub);
    if shared && !hub.quiet_wait_over() {
        postpone_end(qp, hub);
    } else if !qp.ending.postponed {
        end(qp, hub);
    }
}

/// The peer may be in the middle of an access to what a request refers to. A completion gives that memory
/// back to the program, so none is shown before the peer is done.
fn postpone_end<P>(qp: &mut Qp, hub: &mut Hub<P>) {
    silence(qp);
    set_alarm(qp, hub);
    if !std::mem::replace(&mut qp.ending.postponed, true) {
        hub.postpone_ending(qp.id);
    }
}

/// Completes what a queue pair in error has left: the request that failed, then all others.
pub(crate) fn end<P: Probe>(qp: &mut Qp, hub: &mut Hub<P>) {
    let ending = std::mem::take(&mut qp.ending);
    if let Some((position, status)) = ending.verdict {
        conclude(qp, hub, position, status);
    }
    flush(qp, hub);
    if ending.last_wqe {
        hub.raise(AsyncEvent::QpLastWqeReached(qp.id));
    }
}

/// Completes the requests up to the one at `position`, which failed with `status`.
pub(crate) fn conclude<P: Probe>(qp: &mut Qp, hub: &mut Hub<P>, position: u32, status: WcStatus) {
    while qp.sq.head != qp.sq.tail {
        let at_position = qp.sq.head == position;
        let wqe = qp.sq.wqe(qp.sq.head);
        let completion = Completion {
            wr_id: wqe.wr_id,
            status: if at_position { status } else { WcStatus::WrFlushErr },
            opcode: wc_opcode(&wqe.op),
            extra: WcExtra::Place(qp.sq.head),
            qp_num: qp.num,
            ..Completion::default()
        };
        // A queue too full for it is reported by its own event; nothing more can be done here.
        hub.complete(qp.send_cq, completion, true);
        qp.sq.head = qp.sq.head.wrapping_add(1);
        if at_position {
            qp.requester.counters.failed += 1;
            break;
        }
    }
}

/// No timer of the requester runs any more.
fn silence(qp: &mut Qp) {
    qp.requester.failing = None;
    qp.requester.rnr_until = None;
    qp.requester.held = false;
    qp.requester.cut = Cut::Not;
    qp.requester.deadline = None;
    qp.requester.overdue = false;
    qp.requester.reconnect_at = None;
    qp.fates.clear();
    qp.rq.spare();
}

/// The completion of a request that was flushed.
fn flushed(qp: &Qp, wr_id: u64, opcode: WcOpcode) -> Completion {
    let status = WcStatus::WrFlushErr;
    Completion { wr_id, status, opcode, qp_num: qp.num, ..Completion::default() }
}

/// Completes every send posted with a flush error.
pub(crate) fn flush_sends<P: Probe>(qp: &mut Qp, hub: &mut Hub<P>) {
    while !qp.sq.is_empty() {
        let wqe = qp.sq.wqe(qp.sq.head);
        let flushed = flushed(qp, wqe.wr_id, wc_opcode(&wqe.op));
        let completion = Completion { extra: WcExtra::Place(qp.sq.head), ..flushed };
        hub.complete(qp.send_cq, completion, true);
        qp.sq.head = qp.sq.head.wrapping_add(1);
    }
    qp.sq.next = qp.sq.head;
    let requester = &mut qp.requester;
    requester.offset = 0;
    requester.stage = 0;
    requester.reads = 0;
    requester.redo = 0;
    requester.waiting_bytes = 0;
    requester.failing = None;
    requester.deadline = None;
    qp.fates.clear();
}

/// Completes everything posted with a flush error: in SQE, only sends are.
/// Not before the end of a queue pair that is postponed.
pub(crate) fn flush<P: Probe>(qp: &mut Qp, hub: &mut Hub<P>) {
    if qp.ending.postponed {
        return;
    }
    flush_sends(qp, hub);
    if qp.state != QpState::Sqe {
        silence(qp);
        if std::mem::take(&mut qp.responder.receiving) {
            let wr_id = qp.responder.receive.wr_id;
            hub.complete(qp.recv_cq, flushed(qp, wr_id, WcOpcode::Recv), true);
        }
        while qp.rq.take(&mut qp.responder.receive) {
            let wr_id = qp.responder.receive.wr_id;
            hub.complete(qp.recv_cq, flushed(qp, wr_id, WcOpcode::Recv), true);
        }
        qp.responder.receive.fate = None;
    }
    set_alarm(qp, hub);
}

/// The peer has left: an idle queue pair notices nothing, as on hardware, until something is posted. An
/// unreliable one never does.
pub(crate) fn peer_lost<P: Probe>(qp: &mut Qp, hub: &mut Hub<P>) {
    if !qp.qp_type.is_reliable() {
        return crate::connect::lose(qp, hub);
    }
    crate::connect::detach(qp, hub);
    qp.path = Path::Lost;
    if qp.state != QpState::Err {
        repeat_in_vain(qp, hub);
    }
}

/// The peer has been silent for as long as requests are repeated: what is outstanding fails at once.
pub(crate) fn peer_silent<P: Probe>(qp: &mut Qp, hub: &mut Hub<P>) {
    peer_lost(qp, hub);
    if matches!(qp.path, Path::Lost) && !qp.sq.is_empty() {
        fail_oldest(qp, hub, WcStatus::RetryExcErr);
    }
}

/// The requests to a peer that has left are sent again and again, as far as anybody can tell, and fail after
/// the time that this takes (IBA 9.7.6.1.3): who is gone does not say so, and what it sent before may still
/// be on its way through the program. Those that concern this side alone are executed in their turn. In SQD
/// none is sent.
pub(crate) fn repeat_in_vain<P: Probe>(qp: &mut Qp, hub: &mut Hub<P>) {
    while may_begin(qp) {
        let wqe = *qp.sq.wqe(qp.sq.next);
        if !matches!(wqe.op, SendOp::LocalInv { .. } | SendOp::BindMw(_)) {
            break;
        }
        match execute_local(qp, hub, &wqe) {
            Ok(()) => skip_local(qp, hub),
            Err(status) => fail_next(qp, hub, status),
        }
    }
    if qp.state != QpState::Sqd || is_draining(qp) {
        crate::connect::start_deadline(qp, hub);
    }
}

/// Executes the requests that concern only this side, each once: to go back to what stands before one, for
/// want of a receive or of a connection, does not undo it. `Err` carries the status they fail with.
pub(crate) fn execute_local<P: Probe>(
    qp: &Qp,
    hub: &mut Hub<P>,
    wqe: &SendWqe,
) -> Result<(), WcStatus> {
    match &wqe.op {
        _ if wqe.answered => Ok(()),
        SendOp::LocalInv { key } => {
            // The status of memory management operations that fail (IBA 11.6.2).
            hub.invalidate(qp.pd_number(), qp.num.0, *key).map_err(|_| WcStatus::MwBindErr)
        }
        SendOp::BindMw(bind) => {
            hub.bind_window(qp.pd_number(), qp.num.0, bind).map_err(|_| WcStatus::MwBindErr)
        }
        _ => Ok(()),
    }
}
