//! Reception from a byte stream: RDMAP segments become placements, completions and answers.

use quipu_iwarp::wire::control::Control;
use quipu_iwarp::wire::rdmap::{
    AtomicOp, AtomicRequest, FlushRequest, Immediate, ReadRequest, TaggedOp,
};
use quipu_iwarp::{ProtocolError, RemoteFault, Segment, SendKind, terminate};
use quipu_mem::AccessError;

use super::{early, replies, unreliable};
use crate::adapter::Hub;
use crate::connect;
use crate::link::Atomic;
use crate::plain::{self, Gate};
use crate::probe::{Probe, Stage};
use crate::qp::{Path, Qp};
use crate::requester;
use crate::responder::{self, Finish, Refusal};
use crate::stream::Answer;
use crate::types::{Access, AsyncEvent, Flush, WcExtra, WcOpcode, WcStatus};
use crate::unordered::{self, Place};

/// Why reception ends.
pub(super) enum End {
    /// The peer asked for something it may not have.
    Refused(Refusal),
    /// The peer broke the protocol in a way that only the requester can see.
    Nonsense(RemoteFault),
    /// Said already, or not worth saying.
    Over,
}

impl From<Refusal> for End {
    fn from(refusal: Refusal) -> Self {
        Self::Refused(refusal)
    }
}

/// The fault to report for a refusal.
pub(crate) fn fault_of(refusal: Refusal) -> RemoteFault {
    match refusal {
        Refusal::Access(AccessError::UnknownKey) => RemoteFault::InvalidStag,
        Refusal::Access(AccessError::WrongPd | AccessError::WrongQp) => {
            RemoteFault::StagNotAssociated
        }
        Refusal::Access(AccessError::Denied) => RemoteFault::AccessRights,
        Refusal::Access(_) => RemoteFault::BaseBounds,
        Refusal::Invalid => RemoteFault::InvalidRequest,
        Refusal::TooLong | Refusal::Fated(WcStatus::LocLenErr) => RemoteFault::MessageTooLong,
        Refusal::Local | Refusal::Failed | Refusal::Fated(_) => RemoteFault::Catastrophic,
        Refusal::NoReceive => RemoteFault::NoBuffer,
        Refusal::TooManyReads => RemoteFault::TooManyReads,
        Refusal::CannotInvalidate => RemoteFault::CannotInvalidate,
        Refusal::ToWrap => RemoteFault::ToWrap,
    }
}

/// Takes whole FPDUs from the front of `bytes`; how many bytes they were. Once the stream is at its end,
/// everything is taken and ignored.
pub(crate) fn run<P: Probe>(qp: &mut Qp, hub: &mut Hub<P>, bytes: &[u8]) -> usize {
    let mut used = 0;
    while used < bytes.len() {
        let rest = &bytes[used..];
        let Path::Stream(stream) = &mut qp.path else { return bytes.len() };
        if stream.refusal.is_some() {
            return bytes.len();
        }
        let head = stream.rx.head();
        let fpdu = head.as_ref().map_or(rest, |head| &head[..]);
        let end = match stream.rx.next(rest) {
            Ok(None) => break,
            Ok(Some((len, segment))) => {
                used += len;
                if let Some(early) = &mut stream.early {
                    early.begin(len);
                }
                let first = !std::mem::replace(&mut stream.heard, true);
                if stream.gate.awaits_initiator() && plain::first_heard(qp, hub, &segment) {
                    continue;
                }
                if first {
                    connect::note_heard(qp, hub);
                }
                let executed = match qp.qp_type.is_reliable() {
                    true => execute(qp, hub, segment),
                    false => unreliable::segment(qp, hub, segment),
                };
                match executed {
                    Ok(()) => continue,
                    Err(End::Refused(refusal)) => {
                        say_end(qp, terminate::for_fault(fault_of(refusal), fpdu));
                        refuse_in_turn(qp, hub, refusal);
                        return bytes.len();
                    }
                    Err(End::Nonsense(fault)) => terminate::for_fault(fault, fpdu),
                    Err(End::Over) => return bytes.len(),
                }
            }
            Err(error) => {
                let end = terminate::for_error(&error, fpdu);
                // The initiator has spoken, however badly: it can be told.
                stream.gate = Gate::Open;
                if error == ProtocolError::ToWrap(TaggedOp::Write) && qp.qp_type.is_reliable() {
                    say_end(qp, end);
                    refuse_in_turn(qp, hub, Refusal::ToWrap);
                    return bytes.len();
                }
                end
            }
        };
        say_end(qp, end);
        broken(qp, hub, WcStatus::BadRespErr);
        return bytes.len();
    }
    note_partial(qp, hub, used, bytes.len() - used);
    note_executed(qp, hub);
    used
}

/// Ends the queue pair over what the peer asked for. What it asked before is answered first, since behind the
/// end no memory is read any more; a card does not look at a request before it has answered those.
fn refuse_in_turn<P: Probe>(qp: &mut Qp, hub: &mut Hub<P>, refusal: Refusal) {
    match &mut qp.path {
        Path::Stream(stream) if !stream.answers.is_empty() => {
            stream.refusal = Some(refusal);
            stream.partial = None;
            stream.make_ready(&mut hub.ready);
        }
        _ => responder::refuse(qp, hub, refusal),
    }
}

/// Notes that `left` bytes of an FPDU are there, or none of one of which others were used already, behind
/// `used` bytes.
#[inline]
pub(super) fn note_partial<P: Probe>(qp: &mut Qp, hub: &mut Hub<P>, used: usize, left: usize) {
    let Path::Stream(stream) = &mut qp.path else { return };
    if left == 0 && stream.rx.head().is_none() {
        stream.partial = None;
        return;
    }
    if used > 0 || stream.partial.is_none_or(|(_, before)| before != left) {
        stream.partial = Some((hub.now, left));
    }
    if !std::mem::replace(&mut stream.watched, true) {
        let conn = stream.conn;
        let at = hub.now.after(qp.patience_ns(hub.config.unfinished_ns));
        hub.set_conn_alarm(conn, Some(at));
    }
}

/// An alarm of a stream has passed: looks whether the peer is silent (plain iWARP), and whether the rest of
/// an FPDU is still on its way. If nothing has come of it for too long, the peer's process is stopped, or its
/// length was damaged, and both ends would wait for each other for ever.
pub(crate) fn look_at_partial<P: Probe>(qp: &mut Qp, hub: &mut Hub<P>) {
    let patience = qp.patience_ns(hub.config.unfinished_ns);
    let Path::Stream(stream) = &mut qp.path else { return };
    stream.watched = false;
    if plain::is_late(stream) {
        return requester::to_error(qp, hub, None);
    }
    if let Some(at) = plain::silence_passed(stream, hub) {
        stream.watched = true;
        hub.set_conn_alarm(stream.conn, Some(at));
        return;
    }
    let Some((since, _)) = stream.partial else { return };
    let at = since.after(patience);
    if at > hub.now {
        stream.watched = true;
        hub.set_conn_alarm(stream.conn, Some(at));
        return;
    }
    say_end(qp, terminate::for_error(&ProtocolError::Unfinished, &[]));
    broken(qp, hub, WcStatus::RetryExcErr);
}

pub(super) fn say_end(qp: &mut Qp, terminate: Option<quipu_iwarp::wire::terminate::Terminate>) {
    if let Path::Stream(stream) = &mut qp.path {
        stream.terminate = terminate;
    }
}

/// The stream can no longer be understood: whatever is outstanding fails, and the queue pair with it.
fn broken<P: Probe>(qp: &mut Qp, hub: &mut Hub<P>, status: WcStatus) {
    if !qp.qp_type.is_reliable() {
        return requester::peer_lost(qp, hub);
    }
    let at_fault = match qp.qp_type.is_plain() {
        false => requester::has_begun(qp).then_some(qp.sq.head),
        // No answer was due but to reads: only one of them can be reported to have failed.
        true => replies::oldest_unanswered(qp),
    };
    match at_fault {
        Some(position) => requester::fail_at(qp, hub, position, status),
        None => requester::to_error(qp, hub, Some(AsyncEvent::QpFatal(qp.id))),
    }
}

/// Has the acknowledgement of what was executed sent, at once if much is, else when it is released. No
/// message of its own will ever carry that of a queue pair without a send queue; and the program's answer,
/// over another connection, is not to overtake it.
pub(crate) fn note_executed<P: Probe>(qp: &mut Qp, hub: &mut Hub<P>) {
    let executed = qp.responder.executed;
    let waiting = qp.sq.has_waiting();
    let alone = !qp.qp_type.requests();
    let Path::Stream(stream) = &mut qp.path else { return };
    let owed = stream.acked != executed;
    if stream.has_urgent() || stream.ack_is_urgent(executed) || waiting || (alone && owed) {
        stream.make_ready(&mut hub.ready);
    } else if owed && !stream.owes_ack {
        stream.owes_ack = true;
        hub.ack_due.push(qp.id);
    }
}

pub(super) fn execute<P: Probe>(
    qp: &mut Qp,
    hub: &mut Hub<P>,
    segment: Segment<'_>,
) -> Result<(), End> {
    hub.probe.stage(Stage::Headers, 0);
    if segment.is_request() {
        if !qp.may_receive() {
            return Err(End::Over);
        }
        if !qp.qp_type.responds() {
            return Err(Refusal::Invalid.into());
        }
        if qp.responder.holding && !matches!(segment, Segment::Write { .. }) {
            unordered::settle(qp, hub);
        }
    }
    match segment {
        Segment::Write { stag, to, last, payload } => {
            responder::note_arrival(qp, hub);
            write(qp, hub, stag.0, to, last, payload)?;
            forget_write(qp);
            qp.responder.write_over = last;
            count_written(qp, payload.len());
            let counters = &mut qp.responder.counters;
            counters.bytes_in += payload.len() as u64;
            counters.writes += u64::from(last);
            took(qp, payload.len());
            match last {
                true if qp.responder.holding => unordered::execute(qp, hub),
                true => executed(qp),
                false => {}
            }
            Ok(())
        }
        Segment::Send { kind, solicited, srq, executed, mo, last, payload, .. } => {
            replies::take_acknowledgement(qp, hub, executed)?;
            responder::note_arrival(qp, hub);
            forget_write(qp);
            choose(qp, hub, srq)?;
            send(qp, hub, kind, solicited, mo, last, payload)
        }
        Segment::Immediate { solicited, srq, immediate, .. } => {
            responder::note_arrival(qp, hub);
            choose(qp, hub, srq)?;
            receive_immediate(qp, hub, solicited, immediate)
        }
        Segment::ReadRequest { msn, request } => {
            forget_write(qp);
            Ok(read_request(qp, hub, msn, &request)?)
        }
        Segment::AtomicRequest { request, .. } => {
            forget_write(qp);
            Ok(atomic_request(qp, hub, &request)?)
        }
        Segment::ReadResponse { stag, to, last, payload } => {
            replies::read_response(qp, hub, stag.0, to, last, payload)
        }
        Segment::Flush { request, .. } => {
            responder::note_arrival(qp, hub);
            forget_write(qp);
            let FlushRequest { stag, to, len, placement, level } = request;
            let flush = Flush::of(to, stag.0, len, placement, level);
            responder::flush(qp, hub, flush)?;
            executed(qp);
            Ok(())
        }
        Segment::AtomicResponse(response) => replies::atomic_response(qp, hub, &response),
        Segment::Control(control) => replies::take_control(qp, hub, control),
        Segment::Terminate(terminate) => {
            match qp.qp_type.is_plain() {
                true => plain::terminated(qp, hub, &terminate),
                false => replies::terminated(qp, hub, replies::status_of(terminate.code)),
            }
            Err(End::Over)
        }
        Segment::Discarded { executed } => replies::take_acknowledgement(qp, hub, executed),
    }
}

/// A request comes behind a write: if that is over, no immediate can tell of it any more.
#[inline]
fn forget_write(qp: &mut Qp) {
    if std::mem::take(&mut qp.responder.write_over) {
        qp.responder.write_len = 0;
    }
}

/// Counts bytes of a write, for the immediate that may tell of it.
#[inline]
pub(super) fn count_written(qp: &mut Qp, bytes: usize) {
    qp.responder.write_len = qp.responder.write_len.wrapping_add(bytes as u32);
}

/// The length that an immediate gives its write. Only this end knows how much was written: there may be no
/// write, and another adapter puts what it likes where the length is.
fn told_len(qp: &Qp, immediate: Immediate) -> Result<u32, Refusal> {
    let written = qp.responder.write_len;
    match immediate.write_len {
        _ if qp.qp_type.is_plain() => Ok(written),
        len if len == 0 || len == written => Ok(len),
        _ => Err(Refusal::Invalid),
    }
}

/// Has a message that begins take its receive from the shared queue that it names, if it names one.
#[inline]
fn choose<P>(qp: &mut Qp, hub: &Hub<P>, srq: Option<u32>) -> Result<(), Refusal> {
    match srq {
        Some(number) if !qp.responder.receiving => crate::xrc::choose(qp, hub, number),
        _ => Ok(()),
    }
}

/// Counts a request as executed, for the acknowledgement, which unreliable connections do not have.
pub(super) fn executed(qp: &mut Qp) {
    if !qp.qp_type.is_reliable() {
        return;
    }
    responder::executed(qp);
    // Plain iWARP acknowledges nothing.
    if let Path::Stream(stream) = &mut qp.path
        && stream.plain.is_some()
    {
        stream.acked = qp.responder.executed;
    }
}

/// Counts payload of a request, for the acknowledgement, whichever way it came.
#[inline]
pub(super) fn took(qp: &mut Qp, bytes: usize) {
    if let Path::Stream(stream) = &mut qp.path {
        stream.unacked_bytes += bytes as u64;
    }
}

fn write<P: Probe>(
    qp: &mut Qp,
    hub: &mut Hub<P>,
    stag: u32,
    to: u64,
    last: bool,
    payload: &[u8],
) -> Result<(), Refusal> {
    let len = payload.len() as u32;
    let span = responder::remote(qp, hub, stag, to, len, Access::REMOTE_WRITE)?;
    if early::is_in_place(qp) {
        return Ok(());
    }
    early::note_placed(qp, span.as_raw());
    if hub.unordered.is_some() {
        let place = Place { rkey: stag, addr: to, at: span.as_raw().0 };
        unordered::write(qp, hub, place, payload, last);
    } else {
        span.write_from(0, payload);
    }
    hub.probe.stage(Stage::PutData, payload.len());
    Ok(())
}

/// Refuses the request that arrives, for lack of a receive; everything that follows is dropped until the
/// peer resumes. A peer of plain iWARP cannot: that is the end. On an unreliable connection the message is.
fn not_ready<P: Probe>(qp: &mut Qp, hub: &mut Hub<P>) -> Result<(), End> {
    let nak = Control::RnrNak { count: qp.responder.executed, timer: qp.attr.min_rnr_timer & 31 };
    let reliable = qp.qp_type.is_reliable();
    qp.responder.counters.rnr += 1;
    let Path::Stream(stream) = &mut qp.path else { return Err(End::Over) };
    if stream.plain.is_some() || !reliable {
        return Err(Refusal::NoReceive.into());
    }
    let mark = stream.rx.message_mark();
    stream.rx.discard_requests(mark);
    stream.nak = Some(nak);
    stream.make_ready(&mut hub.ready);
    Ok(())
}

fn send<P: Probe>(
    qp: &mut Qp,
    hub: &mut Hub<P>,
    kind: SendKind,
    solicited: bool,
    mo: u32,
    last: bool,
    payload: &[u8],
) -> Result<(), End> {
    // Not by the offset: segments without bytes leave it at 0.
    if !qp.responder.receiving && !responder::begin_receive(qp, hub) {
        return not_ready(qp, hub);
    }
    responder::spared(qp)?;
    place_receive(qp, hub, mo, payload)?;
    took(qp, payload.len());
    if !last {
        return Ok(());
    }
    let extra = match kind {
        SendKind::Plain => WcExtra::None,
        SendKind::Immediate(imm) => WcExtra::Imm(imm),
        SendKind::Invalidate(stag) => {
            hub.invalidate(responder::remote_pd(qp, hub, stag.0), qp.num.0, stag.0).map_err(
                |_| match qp.qp_type.is_plain() {
                    true => Refusal::CannotInvalidate,
                    false => Refusal::Access(AccessError::UnknownKey),
                },
            )?;
            WcExtra::Invalidated(stag.0)
        }
    };
    let byte_len = mo.wrapping_add(payload.len() as u32);
    executed(qp);
    let finish = Finish { opcode: WcOpcode::Recv, byte_len, extra, solicited };
    Ok(responder::finish_receive(qp, hub, finish)?)
}

/// Places bytes at offset `mo` of the message in progress.
fn place_receive<P: Probe>(
    qp: &mut Qp,
    hub: &mut Hub<P>,
    mo: u32,
    payload: &[u8],
) -> Result<(), Refusal> {
    hub.probe.stage(Stage::PutData, payload.len());
    if u64::from(mo) + payload.len() as u64 > qp.responder.receive.capacity() {
        return Err(Refusal::TooLong);
    }
    let pd = qp.recv_pd_number();
    if early::has_placed(qp) {
        let list = qp.responder.receive.sges.to_vec();
        early::note_list(qp, hub, (pd, &list), u64::from(mo), payload.len());
    }
    let list = &qp.responder.receive.sges;
    hub.regions.scatter(pd, list, u64::from(mo), payload).map_err(|_| Refusal::Local)
}

fn receive_immediate<P: Probe>(
    qp: &mut Qp,
    hub: &mut Hub<P>,
    solicited: bool,
    immediate: Immediate,
) -> Result<(), End> {
    // It ends a write, whose right an empty one needs as well (IBA 9.7.4.1). One that is refused
    // consumes no receive.
    if !qp.allows(Access::REMOTE_WRITE) {
        return Err(Refusal::Invalid.into());
    }
    let byte_len = told_len(qp, immediate)?;
    if !qp.responder.receiving && !responder::begin_receive(qp, hub) {
        return not_ready(qp, hub);
    }
    responder::spared(qp)?;
    forget_write(qp);
    executed(qp);
    let finish = Finish {
        opcode: WcOpcode::RecvRdmaWithImm,
        byte_len,
        extra: WcExtra::Imm(immediate.imm),
        solicited,
    };
    Ok(responder::finish_receive(qp, hub, finish)?)
}

/// Whether one more answer may be owed: the peer was granted `max_dest_rd_atomic` of them.
fn may_owe(qp: &Qp) -> Result<(), Refusal> {
    match &qp.path {
        Path::Stream(stream) if stream.answers.len() < usize::from(qp.attr.max_dest_rd_atomic) => {
            Ok(())
        }
        _ if qp.qp_type.is_plain() => Err(Refusal::TooManyReads),
        _ => Err(Refusal::Invalid),
    }
}

pub(crate) fn owe<P: Probe>(qp: &mut Qp, hub: &mut Hub<P>, answer: Answer) {
    if let Path::Stream(stream) = &mut qp.path {
        stream.answers.push_back(answer);
        stream.make_ready(&mut hub.ready);
    }
    executed(qp);
}

fn read_request<P: Probe>(
    qp: &mut Qp,
    hub: &mut Hub<P>,
    msn: u32,
    request: &ReadRequest,
) -> Result<(), Refusal> {
    responder::note_arrival(qp, hub);
    may_owe(qp)?;
    let (rkey, addr, size) = (request.source_stag.0, request.source_to, request.size);
    responder::remote(qp, hub, rkey, addr, size, Access::REMOTE_READ)?;
    let pd = responder::remote_pd(qp, hub, rkey);
    let (sink_stag, sink_to) = (request.sink_stag.0, request.sink_to);
    responder::count_read(qp, size);
    owe(qp, hub, Answer::Read { msn, sink_stag, sink_to, size, pd, rkey, addr, msg: None });
    Ok(())
}

fn atomic_request<P: Probe>(
    qp: &mut Qp,
    hub: &mut Hub<P>,
    request: &AtomicRequest,
) -> Result<(), Refusal> {
    responder::note_arrival(qp, hub);
    may_owe(qp)?;
    let word = responder::remote(qp, hub, request.stag.0, request.to, 8, Access::REMOTE_ATOMIC)?;
    // InfiniBand's operations have no masks; another adapter's masked ones are refused as invalid.
    let atomic = match request.op {
        AtomicOp::FetchAdd { add, mask: 0 } => Atomic::FetchAdd(add),
        AtomicOp::CmpSwap { swap, swap_mask: u64::MAX, compare, compare_mask: u64::MAX } => {
            Atomic::CompareSwap { compare, swap }
        }
        _ => return Err(Refusal::Invalid),
    };
    let original = atomic.execute(word);
    qp.responder.counters.atomics += 1;
    owe(qp, hub, Answer::Atomic { id: request.id, original });
    Ok(())
}
