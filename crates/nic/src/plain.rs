//! Queue pairs of plain iWARP: RDMAP over DDP over MPA as the RFCs have them, and nothing else.
//!
//! Connection management opens or accepts the TCP connection, goes through the start-up of MPA with the
//! private data of its users, and hands the stream over ([`Adapter::adopt_stream`]). What differs from a
//! stream between two Quipus:
//!
//! - A request that asks for no data is complete once its bytes are handed to the stream: there is no
//!   acknowledgement.
//! - A Send that finds no receive ends the connection: there is no way to tell the peer to wait.
//! - A responder says nothing before the first FPDU of the initiator (RFC 5044 7.1.2). In peer-to-peer mode
//!   that is a ready-to-receive message, which no program sees (RFC 6581 9.2). Without it, the responder may
//!   speak after a silence ([`Config::speaks_first_after_ns`](crate::Config::speaks_first_after_ns)).
//! - An initiator repeats its ready-to-receive Write while the peer is silent ([`REPEATS_NS`]).
//! - The end of the stream is the end of the queue pair: everything is flushed.

use std::collections::VecDeque;

use quipu_inet::stack::TcpId;
use quipu_iwarp::setup::rtr_ird;
use quipu_iwarp::wire::rdmap::{ReadRequest, TaggedOp, UntaggedOp};
use quipu_iwarp::wire::terminate::{Code, Terminate};
use quipu_iwarp::wire::{Stag, ddp, rdmap};
use quipu_iwarp::{Extensions, Negotiated, Receiver, Rtr, Segment, Sender};

use crate::adapter::{Adapter, Hub};
use crate::connect::{Phase, established};
use crate::error::{Fault, Loss};
use crate::event::{Event, StreamChange};
use crate::probe::Probe;
use crate::qp::{Path, Qp};
use crate::receive::replies::{oldest_unanswered, status_of};
use crate::receive::stream::owe;
use crate::requester;
use crate::responder;
use crate::stream::{Answer, StreamPath, sink_of};
use crate::types::{Access, AsyncEvent, ConnId, QpId, QpState, Time};

/// The STag of both ends of a ready-to-receive read, which touches no memory. Not 0: some adapters refuse
/// that.
const OPENING_STAG: Stag = Stag(1);

/// How long after the hand-over an initiator repeats its ready-to-receive Write if the peer is still silent.
/// Linux siw sends the MPA reply before it sets the callback of its socket. It reads an FPDU that arrives in
/// between when the next segment arrives, and not before.
pub(crate) const REPEATS_NS: [u64; 3] = [20_000_000, 100_000_000, 500_000_000];

/// Which end of a stream this is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// It opened the TCP connection, and speaks first.
    Initiator,
    /// It accepted it.
    Responder,
}

/// A byte stream whose start-up is over, for a queue pair: the initiator has the reply, the responder's
/// reply is sent or will be before anything that [`Adapter::transmit`] gives.
#[derive(Clone, Debug)]
pub struct Adoption {
    /// This end.
    pub role: Role,
    /// What start-up agreed on.
    pub negotiated: Negotiated,
    /// Reads and atomics that this end answers at a time: the IRD that it asked start-up to state.
    pub ird: u16,
    /// Reads and atomics that this end wants to have outstanding. Where start-up states no depths, as in
    /// revision 1, the programs have agreed on it by other means.
    pub ord: u16,
    /// Whether the users of both ends have agreed on the operations of RFC 7306.
    pub rfc7306: bool,
}

/// Whether an end may speak.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Gate {
    /// It may.
    Open,
    /// A responder that has heard nothing yet may not.
    Held,
    /// A responder has heard nothing for so long that it may speak first. It has not done so yet.
    Silent,
    /// It has, and has still heard nothing.
    SpokeFirst,
    /// An initiator says this first, or again.
    Opening(Rtr),
}

impl Gate {
    /// Whether a responder waits for the first FPDU of the initiator.
    #[inline]
    pub(crate) const fn awaits_initiator(self) -> bool {
        matches!(self, Self::Held | Self::Silent | Self::SpokeFirst)
    }

    /// Whether a TERMINATE may be sent.
    pub(crate) const fn may_end(self) -> bool {
        matches!(self, Self::Open | Self::Silent | Self::SpokeFirst)
    }
}

/// What is known only of a stream of plain iWARP.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Plain {
    /// Responder: the ready-to-receive message that is to come first.
    awaited: Option<Rtr>,
    /// Initiator: the ready-to-receive read is not answered yet.
    answer_due: bool,
    /// Initiator: when the stream was handed over, and how many of [`REPEATS_NS`] have passed. `None`: it
    /// repeats nothing.
    opening: Option<(Time, usize)>,
    /// Whether atomics were agreed on.
    rfc7306: bool,
}

impl<P: Probe> Adapter<P> {
    /// Gives a queue pair of type [`Iwarp`](crate::QpType::Iwarp) its stream, and takes it to RTS. The
    /// caller then shows what has arrived behind the start-up frame, and all that follows, to
    /// [`handle_stream`](Self::handle_stream); [`Event::Stream`] tells when both ends may send, and when
    /// the stream is over.
    ///
    /// # Errors
    /// [`Fault::WrongState`]: it has had a stream. [`Fault::Invalid`]: it is of another type. No such queue
    /// pair, or no room.
    pub fn adopt_stream(
        &mut self,
        now: Time,
        id: QpId,
        adoption: &Adoption,
    ) -> Result<ConnId, Fault> {
        self.adopt_over(now, id, adoption, None)
    }

    /// The same over the world below, or a connection of the adapter's own TCP.
    pub(crate) fn adopt_over(
        &mut self,
        now: Time,
        id: QpId,
        adoption: &Adoption,
        tcp: Option<TcpId>,
    ) -> Result<ConnId, Fault> {
        self.hub.now = now;
        let (qp, hub) = self.qp_and_hub(id).ok_or(Fault::NoSuchObject)?;
        if !qp.qp_type.is_plain() {
            return Err(Fault::Invalid("only an iWARP queue pair takes a stream"));
        }
        if !matches!(qp.state, QpState::Reset | QpState::Init) {
            return Err(Fault::WrongState);
        }
        let conn = hub.new_conn(Some(id), Phase::Open).ok_or(Fault::Exhausted("connections"))?;
        if let Some(state) = hub.conns.get_mut(conn) {
            state.tcp = tcp;
        }
        if qp.state == QpState::Reset {
            qp.attr.access = Access::REMOTE_WRITE | Access::REMOTE_READ;
        }
        let depth = |value: u16| value.min(u16::from(hub.config.max_rd_atomic)) as u8;
        let agreed = adoption.negotiated.ord.unwrap_or(adoption.ord);
        qp.attr.max_rd_atomic = depth(agreed.min(adoption.ord));
        qp.attr.max_dest_rd_atomic = depth(match adoption.role {
            Role::Initiator => adoption.ird,
            Role::Responder => rtr_ird(adoption.negotiated.rtr, adoption.ird),
        });
        qp.state = QpState::Rts;
        let stream = open(hub, conn, adoption);
        let plain = stream.plain;
        established(qp, hub, Path::Stream(Box::new(stream)));
        if let Path::Stream(stream) = &mut qp.path {
            stream.make_ready(&mut hub.ready);
        }
        if plain.is_some_and(|plain| plain.awaited.is_some()) {
            hub.limit_setup(conn);
            return Ok(conn);
        }
        let silence = match adoption.role {
            Role::Initiator => plain.and_then(|plain| plain.opening).map(|_| REPEATS_NS[0]),
            Role::Responder => hub.config.speaks_first_after_ns,
        };
        if let Some(silence) = silence {
            hub.set_conn_alarm(conn, Some(now.after(silence)));
        }
        hub.tell_stream(id, conn, StreamChange::Established);
        Ok(conn)
    }
}

impl<P> Hub<P> {
    /// Tells connection management about a stream.
    pub(crate) fn tell_stream(&mut self, qp: QpId, conn: ConnId, change: StreamChange) {
        self.events.push_back(Event::Stream { qp, conn, change });
    }
}

/// The two halves of a stream that was handed over.
fn open<P>(hub: &Hub<P>, conn: ConnId, adoption: &Adoption) -> StreamPath {
    let negotiated = &adoption.negotiated;
    let extensions = Extensions { rfc7306: adoption.rfc7306, ..Extensions::NONE };
    let max_ulpdu = hub.config.max_ulpdu.min(u32::from(u16::MAX) - 3) as u16;
    let sender = Sender::new(negotiated, max_ulpdu);
    let mut stream = StreamPath::new(conn, sender, Receiver::new(negotiated, extensions));
    let rfc7306 = adoption.rfc7306;
    let mut plain = Plain { awaited: None, answer_due: false, opening: None, rfc7306 };
    // The first alarms are for the silence of the peer, all others for FPDUs that are not whole.
    match (adoption.role, negotiated.rtr) {
        (Role::Initiator, Some(rtr)) => {
            stream.gate = Gate::Opening(rtr);
            if rtr == Rtr::Write {
                plain.opening = Some((hub.now, 0));
                stream.watched = true;
            }
        }
        (Role::Initiator, None) => {}
        (Role::Responder, rtr) => {
            plain.awaited = rtr;
            stream.watched = rtr.is_some() || hub.config.speaks_first_after_ns.is_some();
            stream.gate = Gate::Held;
        }
    }
    stream.plain = Some(plain);
    stream
}

/// An alarm of a stream has passed. If it was for the silence of the peer, does what is due then: an
/// initiator repeats its ready-to-receive message, a responder may speak. When the next one is due.
#[cold]
pub(crate) fn silence_passed<P>(stream: &mut StreamPath, hub: &mut Hub<P>) -> Option<Time> {
    if stream.heard || stream.partial.is_some() {
        return None;
    }
    if stream.gate == Gate::Held {
        stream.gate = Gate::Silent;
        stream.make_ready(&mut hub.ready);
        return None;
    }
    let (since, passed) = stream.plain.as_mut()?.opening.as_mut()?;
    let mut due = false;
    while REPEATS_NS.get(*passed).is_some_and(|&after| since.after(after) <= hub.now) {
        *passed += 1;
        due = true;
    }
    let next = REPEATS_NS.get(*passed).map(|&after| since.after(after));
    // No other message may cut a Write, whose next segment does as well.
    let within_write = stream.outgoing.is_some_and(|outgoing| outgoing.msg.msn().is_none());
    if due && stream.gate == Gate::Open && !within_write {
        stream.gate = Gate::Opening(Rtr::Write);
        stream.make_ready(&mut hub.ready);
    }
    next
}

/// Whether a message may begin now. A responder that speaks before the initiator says so.
#[cold]
pub(crate) fn may_speak_unheard(
    stream: &mut StreamPath,
    events: &mut VecDeque<Event>,
    qp: QpId,
) -> bool {
    if stream.gate == Gate::Silent {
        stream.gate = Gate::SpokeFirst;
        events.push_back(Event::Stream { qp, conn: stream.conn, change: StreamChange::SpokeFirst });
    }
    stream.gate == Gate::SpokeFirst
}

/// Writes the ready-to-receive message of an initiator; `None` if there is no room.
#[cold]
pub(crate) fn open_gate(stream: &mut StreamPath, rtr: Rtr, out: &mut [u8]) -> Option<usize> {
    if out.len() < stream.tx.fpdu_bound(ReadRequest::LEN) {
        return None;
    }
    stream.gate = Gate::Open;
    let tx = &mut stream.tx;
    let mut message = match rtr {
        Rtr::Send => tx.begin_untagged(UntaggedOp::Send, 0),
        Rtr::Write => tx.begin_tagged(TaggedOp::Write, OPENING_STAG, 0),
        Rtr::Read => {
            if let Some(plain) = &mut stream.plain {
                plain.answer_due = true;
            }
            let mut message = tx.begin_untagged(UntaggedOp::ReadRequest, 0);
            let request = ReadRequest {
                sink_stag: OPENING_STAG,
                sink_to: 0,
                size: 0,
                source_stag: OPENING_STAG,
                source_to: 0,
            };
            return tx.whole(&mut message, out, &request);
        }
    };
    tx.segment(&mut message, out, 0, |_| {}).map(|staged| staged.bytes)
}

/// The first FPDU of the initiator has come: this end may speak. True if that was all that it says.
#[cold]
pub(crate) fn first_heard<P: Probe>(qp: &mut Qp, hub: &mut Hub<P>, segment: &Segment<'_>) -> bool {
    let Path::Stream(stream) = &mut qp.path else { return false };
    stream.gate = Gate::Open;
    stream.make_ready(&mut hub.ready);
    if let Segment::Terminate(_) = segment {
        // The initiator cannot take the reply: this is no connection that ends, there has been none.
        return false;
    }
    let awaited = stream.plain.as_mut().and_then(|plain| plain.awaited.take());
    if awaited.is_some() {
        hub.tell_stream(qp.id, stream.conn, StreamChange::Established);
    }
    match (awaited, segment) {
        (Some(Rtr::Send), Segment::Send { last: true, payload: [], .. })
        | (Some(Rtr::Write), Segment::Write { last: true, payload: [], .. }) => true,
        (Some(Rtr::Read) | None, &Segment::ReadRequest { msn, request }) if request.size == 0 => {
            // Whatever was agreed on for reads of programs, and whatever the rights. In revision 1 some
            // adapters begin so without a word.
            let (sink_stag, sink_to) = (request.sink_stag.0, request.sink_to);
            owe(
                qp,
                hub,
                Answer::Read {
                    msn,
                    sink_stag,
                    sink_to,
                    size: 0,
                    pd: 0,
                    rkey: 0,
                    addr: 0,
                    msg: None,
                },
            );
            true
        }
        // Any other FPDU does as well: it says that the initiator has the reply.
        _ => false,
    }
}

/// Whether this response is that of the ready-to-receive read.
pub(crate) fn opening_answered<P: Probe>(
    qp: &mut Qp,
    hub: &mut Hub<P>,
    stag: u32,
    to: u64,
    last: bool,
    payload: &[u8],
) -> bool {
    let Path::Stream(stream) = &mut qp.path else { return false };
    let Some(plain) = stream.plain.as_mut().filter(|plain| plain.answer_due) else { return false };
    if stag != OPENING_STAG.0 || to != 0 || !last || !payload.is_empty() {
        return false;
    }
    plain.answer_due = false;
    stream.make_ready(&mut hub.ready);
    true
}

/// Whether the ready-to-receive message has not come in time.
#[cold]
pub(crate) fn is_late(stream: &StreamPath) -> bool {
    stream.plain.is_some_and(|plain| plain.awaited.is_some())
}

/// Whether a queue pair can ask for atomics.
pub(crate) fn does_atomics(qp: &Qp) -> bool {
    match &qp.path {
        _ if !qp.qp_type.is_plain() => true,
        Path::Stream(stream) => stream.plain.is_some_and(|plain| plain.rfc7306),
        _ => false,
    }
}

/// Whether the peer answers no reads at all (an IRD of 0, RFC 6581 9.1).
pub(crate) fn grants_no_reads(qp: &Qp) -> bool {
    qp.qp_type.is_plain() && qp.attr.max_rd_atomic == 0
}

/// Whether reads wait for the answer to the ready-to-receive read, which may be all that the peer grants.
pub(crate) fn reads_wait(qp: &Qp) -> bool {
    matches!(&qp.path, Path::Stream(stream) if stream.plain.is_some_and(|plain| plain.answer_due))
}

/// A request cannot be transmitted: the peer is told that this end fails (RFC 5040 4.8, 7.2).
#[cold]
pub(crate) fn say_failed(qp: &mut Qp) {
    if let Path::Stream(stream) = &mut qp.path
        && stream.plain.is_some()
    {
        stream.terminate = Some(Terminate::bare(Code::RdmapCatastrophic));
    }
}

/// The peer ended the stream by a TERMINATE. If it says which read is at fault, that one fails; all else is
/// flushed.
#[cold]
pub(crate) fn terminated<P: Probe>(qp: &mut Qp, hub: &mut Hub<P>, terminate: &Terminate) {
    match read_at_fault(qp, terminate) {
        Some(position) => requester::fail_at(qp, hub, position, status_of(terminate.code)),
        None => requester::to_error(qp, hub, Some(AsyncEvent::QpFatal(qp.id))),
    }
}

/// The unanswered request that a TERMINATE is about.
fn read_at_fault(qp: &Qp, terminate: &Terminate) -> Option<u32> {
    let (_, copy) = terminate.segment?;
    let Some(ddp::Header::Untagged(header)) = copy.header() else { return None };
    if header.qn != rdmap::queue::REQUEST {
        return None;
    }
    let named = terminate.read_request.map(|request| request.sink_stag);
    let mut unanswered = qp.sq.in_progress().filter(|&at| !qp.sq.wqe(at).answered);
    match named {
        Some(named) => unanswered.find(|&at| sink_of(at) == named),
        None => oldest_unanswered(qp),
    }
}

/// The stream is gone. What the peer has closed, or reset, is over; that is an error if the peer went silent,
/// or left anything half done.
#[cold]
pub(crate) fn lost<P: Probe>(qp: &mut Qp, hub: &mut Hub<P>, loss: Loss) {
    let Path::Stream(stream) = &mut qp.path else { return };
    // What the peer was to be refused once it had the answers to what it asked before.
    if let Some(refusal) = stream.refusal.take() {
        return responder::refuse(qp, hub, refusal);
    }
    let half_done = stream.partial.is_some() || stream.rx.is_in_message() || !qp.sq.is_empty();
    let event = (half_done || loss != Loss::Closed).then_some(AsyncEvent::QpFatal(qp.id));
    requester::to_error(qp, hub, event);
}
