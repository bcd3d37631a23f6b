//! Transmission over a byte stream: work requests become RDMAP messages.

mod answers;

use quipu_iwarp::wire::control::Control;
use quipu_iwarp::wire::mpa::LENGTH_LEN;
use quipu_iwarp::wire::rdmap::{
    AtomicOp, AtomicRequest, FlushRequest, Immediate, ReadRequest, TaggedOp, UntaggedOp,
};
use quipu_iwarp::wire::{Payload, Stag, ddp};
use quipu_iwarp::{Sender, Staged};

use quipu_mem::{AccessError, Regions};

use crate::adapter::Hub;
use crate::fate::{self, Met};
use crate::plain::{self, Gate};
use crate::probe::{Probe, Stage};
use crate::qp::{Path, Qp};
use crate::queue::{SendQueue, SendWqe};
use crate::requester;
use crate::stream::{Answer, Body, Outgoing, StreamPath, Turn, sink_of};
use crate::types::{Flush, SendFlags, SendOp, WcStatus};

use super::{Gather, lanes};
use answers::answer;
pub(super) use answers::answer_piece;
pub(crate) use answers::refuse;

/// A message of no more payload, if that lies in one place, is written as soon as it has begun.
const SMALL_BYTES: u32 = 1024;

/// Length and headers of a Read Request.
const REQUEST_LEN: usize = LENGTH_LEN + ddp::UNTAGGED_LEN + ReadRequest::LEN;

/// What one step of transmission did.
pub(super) enum Step {
    /// Wrote so many bytes.
    Wrote(usize),
    /// Did something that needs no bytes: look again.
    Again,
    /// Has nothing to say now, or no room for it.
    Nothing,
    /// The request at `sq.next` cannot be transmitted.
    Failed(WcStatus),
}

/// Fills `out`, of which `used` bytes are used already, with whatever is to be said; how many are then.
pub(super) fn run<P: Probe>(
    qp: &mut Qp,
    hub: &mut Hub<P>,
    out: &mut [u8],
    mut used: usize,
    gather: &mut Gather,
) -> usize {
    let failed = loop {
        gather.begin_at(used);
        let end = match hub.qos {
            None => out.len(),
            Some(_) => (used + lanes::limit_stream(qp, gather)).min(out.len()),
        };
        match step(qp, hub, &mut out[used..end], gather) {
            Step::Wrote(bytes) => used += bytes,
            Step::Again => {}
            Step::Nothing => break None,
            Step::Failed(status) => break Some(status),
        }
    };
    if !qp.qp_type.is_reliable() {
        requester::complete_sent(qp, hub);
    }
    if let Some(status) = failed {
        plain::say_failed(qp);
        requester::fail_next(qp, hub, status);
        // While that waits for the requests before it, the peer is still answered.
        if let Path::Stream(stream) = &mut qp.path
            && (!stream.answers.is_empty() || stream.acked != qp.responder.executed)
        {
            stream.make_ready(&mut hub.ready);
        }
    }
    if hub.qos.is_some() {
        lanes::end_idle_turn(qp, hub);
    }
    hub.probe.stage(Stage::Headers, used);
    used
}

fn step<P: Probe>(qp: &mut Qp, hub: &mut Hub<P>, out: &mut [u8], gather: &mut Gather) -> Step {
    // If the message cannot begin now, what it would have carried is said without it.
    let may_send = lanes::has_turn(qp, hub);
    if may_send
        && carries_acknowledgement(qp)
        && let done @ (Step::Wrote(_) | Step::Failed(_)) = request(qp, hub, out, gather)
    {
        return done;
    }
    let executed = qp.responder.executed;
    let Path::Stream(stream) = &mut qp.path else { return Step::Nothing };
    if let Some(bytes) = say(stream, executed, out) {
        return bytes;
    }
    if stream.outgoing.is_none() && stream.answers.is_empty() && !qp.sq.has_waiting() {
        return Step::Nothing;
    }
    if !may_send {
        lanes::park(qp, hub);
        return Step::Nothing;
    }
    if stream.answers.is_empty() {
        return request(qp, hub, out, gather);
    }
    match stream.must_go_on() {
        // If it has failed in its middle it never does, and nothing has to wait for it.
        Some(Turn::Request) if qp.requester.failing.is_none() && answers_tagged(stream) => {
            return request(qp, hub, out, gather);
        }
        Some(Turn::Answer) if begins_tagged(&qp.sq, qp.requester.stage) => {
            return answer(qp, hub, out, gather);
        }
        _ => {}
    }
    let answers_turn = !stream.answers_turn;
    let mut take = |answers: bool| match answers {
        true => answer(qp, hub, out, gather),
        false => request(qp, hub, out, gather),
    };
    match take(answers_turn) {
        // Whoever had no room keeps its turn: it would miss each one where there is room for one piece at a
        // time.
        Step::Nothing => take(!answers_turn),
        done => {
            if let Path::Stream(stream) = &mut qp.path {
                stream.answers_turn = answers_turn;
            }
            done
        }
    }
}

/// Whether the answer that comes next is a tagged message.
fn answers_tagged(stream: &StreamPath) -> bool {
    matches!(stream.answers.front(), Some(Answer::Read { .. }))
}

/// Whether the message that comes next in the send queue, number `stage` of its request, is a tagged one.
fn begins_tagged(sq: &SendQueue, stage: u32) -> bool {
    sq.has_waiting()
        && match sq.wqe(sq.next) {
            SendWqe { op: SendOp::Write { .. } | SendOp::AtomicWrite { .. }, .. } => true,
            SendWqe { op: SendOp::WriteImm { .. }, length, .. } => stage == 0 && *length > 0,
            _ => false,
        }
}

/// Whether an acknowledgement is due that travels with the message which comes next.
#[inline]
fn carries_acknowledgement(qp: &Qp) -> bool {
    let Path::Stream(stream) = &qp.path else { return false };
    stream.acknowledging_sends
        && stream.acked != qp.responder.executed
        && !stream.has_urgent()
        && stream.outgoing.is_none()
        && qp.sq.has_waiting()
        && matches!(qp.sq.wqe(qp.sq.next).op, SendOp::Send)
}

/// Says what must be said first: notices, then how many requests are executed. `None`: nothing.
#[inline]
pub(super) fn say(stream: &mut StreamPath, executed: u32, out: &mut [u8]) -> Option<Step> {
    if let Gate::Opening(rtr) = stream.gate {
        let opened = plain::open_gate(stream, rtr, out);
        return Some(opened.map_or(Step::Nothing, Step::Wrote));
    }
    let control = match stream.resume.or(stream.nak) {
        Some(notice) => notice,
        None if stream.acked != executed => Control::Ack { count: executed },
        None => return None,
    };
    let Some(bytes) = control_message(&mut stream.tx, control, out) else {
        return Some(Step::Nothing);
    };
    match control {
        Control::Resume { .. } => stream.resume = None,
        Control::RnrNak { .. } => stream.nak = None,
        Control::Ack { .. } => {}
    }
    if let Control::Ack { count } | Control::RnrNak { count, .. } = control {
        stream.note_told(count);
    }
    Some(Step::Wrote(bytes))
}

fn control_message(tx: &mut Sender, control: Control, out: &mut [u8]) -> Option<usize> {
    if out.len() < tx.fpdu_bound(Control::LEN) {
        return None;
    }
    let mut msg = tx.begin_untagged(UntaggedOp::Control, 0);
    tx.whole(&mut msg, out, &control)
}

/// Writes the next piece of the request messages.
fn request<P: Probe>(qp: &mut Qp, hub: &mut Hub<P>, out: &mut [u8], gather: &mut Gather) -> Step {
    let started = matches!(&qp.path, Path::Stream(stream) if stream.outgoing.is_some());
    if !started {
        match begin(qp, hub, out) {
            Step::Again if matches!(&qp.path, Path::Stream(s) if s.outgoing.is_some()) => {}
            other => return other,
        }
    } else if qp.requester.failing.is_some() {
        // It ends when the requests before it have been answered, and until then nothing more of it goes.
        return Step::Nothing;
    }
    let pd = qp.pd_number();
    // What completes before it has arrived is copied before it completes.
    let may_stay = qp.qp_type.is_reliable() && !qp.qp_type.is_plain() && !hub.probe.watches();
    let Qp { path: Path::Stream(stream), sq, requester, .. } = qp else { return Step::Nothing };
    let Some(outgoing) = &mut stream.outgoing else { return Step::Nothing };
    let position = sq.next;
    let staged = match outgoing.body {
        Body::Data => {
            let gather = may_stay.then_some(&mut *gather);
            match data(&mut stream.tx, outgoing, (sq, position), (&hub.regions, pd), out, gather) {
                Ok(staged) => staged,
                Err(_) => return Step::Failed(WcStatus::LocProtErr),
            }
        }
        Body::Immediate(imm) => {
            let immediate = Immediate { imm, write_len: sq.wqe(position).length };
            whole(&mut stream.tx, outgoing, out, &immediate)
        }
        Body::Ask(op) => ask(&mut stream.tx, outgoing, out, op, position, sq.wqe(position).length),
    };
    let Some(staged) = staged else { return Step::Nothing };
    outgoing.remaining -= staged.payload.min(outgoing.remaining);
    let executed = outgoing.executed.take();
    requester.offset = requester.offset.wrapping_add(staged.payload).max(1);
    if staged.last {
        stream.outgoing = None;
    }
    stream.note_carried(executed);
    wrote(qp, hub, staged)
}

/// A piece of a message of the request at `sq.next` was written.
fn wrote<P: Probe>(qp: &mut Qp, hub: &mut Hub<P>, staged: Staged) -> Step {
    lanes::charge(qp, hub, staged.payload);
    let Path::Stream(stream) = &qp.path else { return Step::Nothing };
    if hub.probe.watches() {
        hub.probe.written(stream.conn, qp.sq.wqe(qp.sq.next).wr_id);
    }
    if staged.last {
        let is_plain = stream.plain.is_some();
        end_message(qp);
        if is_plain {
            requester::handed_over(qp, hub);
        }
    }
    Step::Wrote(staged.bytes)
}

/// Writes the next piece of the payload of the request at `position`, or notes where it lies if it is long
/// and there is a list for that. `None`: there is no room for it now.
fn data(
    tx: &mut Sender,
    outgoing: &mut Outgoing,
    (sq, position): (&SendQueue, u32),
    (regions, pd): (&Regions, u32),
    out: &mut [u8],
    gather: Option<&mut Gather>,
) -> Result<Option<Staged>, AccessError> {
    let (list, inline) = (sq.sges(position), sq.inline(position));
    let offset = sq.wqe(position).length - outgoing.remaining;
    let mut access = Ok(());
    let stays = tx.is_bare() && inline.is_none();
    let staged = match gather.filter(|gather| stays && gather.wants(outgoing.remaining)) {
        Some(gather) if !gather.has_room() => None,
        Some(gather) => tx.frame(&mut outgoing.msg, out, outgoing.remaining).map(|frame| {
            let len = u64::from(frame.staged.payload);
            for piece in regions.pieces(pd, list, u64::from(offset), len, false) {
                match piece {
                    Ok(span) => gather.push(frame.head, &span),
                    Err(error) => access = Err(error),
                }
            }
            if access.is_err() {
                gather.undo();
            }
            frame.staged
        }),
        None => tx.segment(&mut outgoing.msg, out, outgoing.remaining, |place| match inline {
            Some(bytes) => place.copy_from_slice(&bytes[offset as usize..][..place.len()]),
            None => access = regions.gather(pd, list, u64::from(offset), place),
        }),
    };
    if let (Err(_), Some(staged)) = (access, &staged) {
        tx.take_back(&mut outgoing.msg, staged);
    }
    access.map(|()| staged)
}

fn whole(
    tx: &mut Sender,
    outgoing: &mut Outgoing,
    out: &mut [u8],
    payload: &impl Payload,
) -> Option<Staged> {
    tx.segment(&mut outgoing.msg, out, payload.wire_len() as u32, |place| payload.emit(place))
}

/// Writes a read or atomic request. The sink offset is that in the message.
fn ask(
    tx: &mut Sender,
    outgoing: &mut Outgoing,
    out: &mut [u8],
    op: SendOp,
    position: u32,
    size: u32,
) -> Option<Staged> {
    let all = u64::MAX;
    match op {
        SendOp::Read { addr, rkey } => {
            let request = ReadRequest {
                sink_stag: sink_of(position),
                sink_to: 0,
                size,
                source_stag: Stag(rkey),
                source_to: addr,
            };
            whole(tx, outgoing, out, &request)
        }
        SendOp::CompareSwap { addr, rkey, compare, swap } => {
            let op = AtomicOp::CmpSwap { swap, swap_mask: all, compare, compare_mask: all };
            let request = AtomicRequest { id: position, stag: Stag(rkey), to: addr, op };
            whole(tx, outgoing, out, &request)
        }
        SendOp::FetchAdd { addr, rkey, add } => {
            let op = AtomicOp::FetchAdd { add, mask: 0 };
            let request = AtomicRequest { id: position, stag: Stag(rkey), to: addr, op };
            whole(tx, outgoing, out, &request)
        }
        SendOp::Flush(flush) => whole(tx, outgoing, out, &flush_request(flush)),
        _ => None,
    }
}

/// Whether the peer knows flushes. For one that does not this side says what it would: that the request is
/// none.
fn takes_flushes(qp: &Qp) -> bool {
    matches!(&qp.path, Path::Stream(stream) if stream.flushes)
}

/// The message that asks for a flush.
pub(crate) fn flush_request(flush: Flush) -> FlushRequest {
    let Flush { addr, rkey, len, placement, .. } = flush;
    let (placement, level) = (placement.bits(), flush.level());
    FlushRequest { stag: Stag(rkey), to: addr, len, placement, level }
}

/// Begins the message that comes next in the send queue, and writes it if it is a small one, or executes a
/// request that concerns only this side.
fn begin<P: Probe>(qp: &mut Qp, hub: &mut Hub<P>, out: &mut [u8]) -> Step {
    if !requester::may_begin(qp) {
        return Step::Nothing;
    }
    let position = qp.sq.next;
    let wqe = *qp.sq.wqe(position);
    hub.probe.stage(Stage::GetWr, 0);
    match fate::meet(qp, hub, wqe.flags) {
        Met::Nothing => {}
        Met::Wait => return Step::Nothing,
        Met::Failure(status) => return Step::Failed(status),
    }
    if let SendOp::LocalInv { .. } | SendOp::BindMw(_) = wqe.op {
        return match requester::execute_local(qp, hub, &wqe) {
            Ok(()) => {
                requester::skip_local(qp, hub);
                Step::Again
            }
            Err(status) => Step::Failed(status),
        };
    }
    if matches!(wqe.op, SendOp::Flush(_)) && !takes_flushes(qp) {
        return Step::Failed(WcStatus::RemInvReqErr);
    }
    let reads = wqe.wants_answer();
    if reads && plain::grants_no_reads(qp) {
        return Step::Failed(WcStatus::LocQpOpErr);
    }
    if reads && plain::reads_wait(qp) {
        return Step::Nothing;
    }
    let mut small = None;
    if qp.requester.stage == 0 && !wqe.flags.contains(SendFlags::INLINE) {
        let (pd, list, len) = (qp.pd_number(), qp.sq.sges(position), wqe.length);
        let checked = match hub.regions.in_first(pd, list, 0, len as usize, reads) {
            Some(span) => span.map(|span| small = (len <= SMALL_BYTES).then_some(span)),
            None => hub.regions.check_list(pd, list, 0, u64::from(len), reads),
        };
        if checked.is_err() {
            return Step::Failed(WcStatus::LocProtErr);
        }
    }
    let Qp { id, path: Path::Stream(stream), sq, requester, responder, qp_type, .. } = qp else {
        return Step::Nothing;
    };
    if out.len() < stream.tx.fpdu_bound(AtomicRequest::LEN)
        || (stream.gate != Gate::Open && !plain::may_speak_unheard(stream, &mut hub.events, *id))
    {
        return Step::Nothing;
    }
    let stage = requester.stage;
    let messages = match wqe.op {
        SendOp::WriteImm { .. } if wqe.length > 0 => 2,
        _ => 1,
    };
    let state = sq.wqe_mut(position);
    state.first_request = requester.started.wrapping_sub(stage);
    state.end_request = state.first_request.wrapping_add(messages);
    state.answered = !reads;
    state.placed = 0;
    if stage == 0 {
        state.msn = stream.tx.mark();
    }
    let srq = qp_type.names_srq().then_some(wqe.srq);
    let executed = stream.acknowledging_sends.then_some(responder.executed);
    let mut outgoing = compose(&mut stream.tx, &wqe, stage, srq, executed);
    requester.started = requester.started.wrapping_add(1);
    requester.offset = 1;
    if reads {
        requester.reads += 1;
    }
    // What was found when it was checked need not be found again.
    if let (Body::Data, Some(span)) = (outgoing.body, small) {
        let fill = |place: &mut [u8]| span.read_into(0, place);
        let staged = stream.tx.segment(&mut outgoing.msg, out, outgoing.remaining, fill);
        if let Some(staged) = staged {
            outgoing.remaining -= staged.payload;
            stream.note_carried(outgoing.executed.take());
            stream.outgoing = (!staged.last).then_some(outgoing);
            return wrote(qp, hub, staged);
        }
    }
    stream.outgoing = Some(outgoing);
    Step::Again
}

/// The message number `stage` of a work request; `srq` is the shared receive queue that it names, `executed`
/// what it says of the peer's requests if it has a place for that.
fn compose(
    tx: &mut Sender,
    wqe: &SendWqe,
    stage: u32,
    srq: Option<u32>,
    executed: Option<u32>,
) -> Outgoing {
    let solicited = wqe.flags.contains(SendFlags::SOLICITED);
    let either = |plain, with_event| if solicited { with_event } else { plain };
    let untagged = |tx: &mut Sender, op, ulp, body| {
        let msg = match srq {
            Some(srq) => tx.begin_shared(op, ulp, srq),
            None => tx.begin_untagged(op, ulp),
        };
        Outgoing { msg, remaining: wqe.length, body, executed: None }
    };
    let ask = |tx: &mut Sender, op| Outgoing {
        msg: tx.begin_untagged(op, 0),
        remaining: wqe.length,
        body: Body::Ask(wqe.op),
        executed: None,
    };
    use UntaggedOp as Op;
    match wqe.op {
        SendOp::Send => {
            let op = either(Op::Send, Op::SendSe);
            Outgoing { executed, ..untagged(tx, op, executed.unwrap_or(0), Body::Data) }
        }
        SendOp::SendImm(imm) => untagged(tx, either(Op::SendImm, Op::SendImmSe), imm, Body::Data),
        SendOp::SendInv(key) => {
            untagged(tx, either(Op::SendInvalidate, Op::SendSeInvalidate), key, Body::Data)
        }
        SendOp::WriteImm { imm, .. } if stage == 1 || wqe.length == 0 => {
            untagged(tx, either(Op::Immediate, Op::ImmediateSe), 0, Body::Immediate(imm))
        }
        SendOp::Write { addr, rkey }
        | SendOp::AtomicWrite { addr, rkey }
        | SendOp::WriteImm { addr, rkey, .. } => Outgoing {
            msg: tx.begin_tagged(TaggedOp::Write, Stag(rkey), addr),
            remaining: wqe.length,
            body: Body::Data,
            executed: None,
        },
        SendOp::CompareSwap { .. } | SendOp::FetchAdd { .. } => ask(tx, Op::AtomicRequest),
        SendOp::Flush(_) => ask(tx, Op::Flush),
        SendOp::Read { .. } | SendOp::LocalInv { .. } | SendOp::BindMw(_) => {
            ask(tx, Op::ReadRequest)
        }
    }
}

/// A request message is transmitted: goes on to the next message or work request.
fn end_message(qp: &mut Qp) {
    let wqe = qp.sq.wqe(qp.sq.next);
    if qp.requester.started != wqe.end_request {
        qp.requester.stage += 1;
        return;
    }
    requester::transmitted(qp);
}
