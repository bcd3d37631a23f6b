//! Reception from a channel: slots become placements, completions and responses.

mod place;

use quipu_iwarp::wire::control::Control;
use quipu_mem::Span;
use quipu_mem::ring::{INLINE_MAX, RingError, SlotHeader, Stall};

use super::{answers, express, reads, unreliable, writes};
use crate::adapter::Hub;
use crate::channel::{
    BUDGET, CHUNK, Carried, ChannelPath, Other, References, carried, flag, request, response,
};
use crate::link::{PeerMemory, PeerMemoryFault, channel_config};
use crate::probe::{Probe, Stage};
use crate::qp::{Path, Qp, rnr_timer_ns};
use crate::requester;
use crate::responder::{self, Finish, Refusal};
use crate::transmit;
use crate::types::{WcExtra, WcOpcode, WcStatus};
use crate::unordered;
use crate::watch;
use place::{fetch_receive, place_carried};

/// What became of the slot at the front of a ring.
pub(super) enum Front {
    /// Done with: goes on to the next.
    Done,
    /// More of it is to be done, at once.
    Again,
    /// It must wait: for a receive, or for room.
    Wait,
}

/// Why reception ends.
pub(super) enum End {
    /// The peer asked for something it may not have.
    Refused(Refusal),
    /// What stands in the rings makes no sense.
    Corrupt,
    /// Over already.
    Over,
    /// The peer has let go of the channel, and of what its requests refer to; word of it is on its way.
    LetGo,
    /// Bytes that the request at the front refers to cannot be fetched, or are not there yet: it has to wait.
    Absent,
}

impl From<Refusal> for End {
    fn from(refusal: Refusal) -> Self {
        Self::Refused(refusal)
    }
}

impl From<RingError> for End {
    fn from(_: RingError) -> Self {
        Self::Corrupt
    }
}

pub(super) fn path(qp: &mut Qp) -> Result<&mut ChannelPath, End> {
    match &mut qp.path {
        Path::Channel(path) => Ok(path),
        _ => Err(End::Over),
    }
}

/// Whether [`run`] would find nothing, as most looks do: this is what a fruitless poll costs.
#[inline(always)]
pub(crate) fn is_quiet(qp: &mut Qp) -> bool {
    let Path::Channel(path) = &mut qp.path else { return true };
    let incoming = &mut path.channel.incoming;
    if incoming.requests.is_filled() || incoming.responses.is_filled() || qp.sq.has_waiting() {
        return false;
    }
    let acked = qp.requester.acked;
    if acked == qp.requester.started {
        return true;
    }
    // What came along with a request may be ahead of the count here.
    let control = &path.channel.outgoing.control;
    requester::reached(acked, control.executed()) && control.stall().is_none()
}

/// Serves what the peer has put into the rings; whether there was anything.
#[inline]
pub(crate) fn run<P: Probe>(qp: &mut Qp, hub: &mut Hub<P>) -> bool {
    serve(qp, hub).unwrap_or_else(|end| end_reception(qp, hub, end))
}

/// Does what the end of reception asks for; whether there was anything.
#[cold]
pub(super) fn end_reception<P: Probe>(qp: &mut Qp, hub: &mut Hub<P>, end: End) -> bool {
    match end {
        End::Refused(refusal) => refuse(qp, hub, refusal),
        End::Corrupt => requester::peer_corrupt(qp, hub),
        End::Over => {}
        End::LetGo | End::Absent => return false,
    }
    true
}

/// Takes notice of what the peer has executed and answered, of which nobody may have been told.
pub(crate) fn catch_up<P: Probe>(qp: &mut Qp, hub: &mut Hub<P>) {
    take_answers(qp, hub);
    let Path::Channel(path) = &qp.path else { return };
    let executed = path.channel.outgoing.control.executed();
    if let Err(end) = requester_ack(qp, hub, executed) {
        end_reception(qp, hub, end);
    }
}

/// Takes the answers that are there already to what was just asked.
pub(crate) fn take_answers<P: Probe>(qp: &mut Qp, hub: &mut Hub<P>) {
    if let Err(end) = answers::responses(qp, hub) {
        end_reception(qp, hub, end);
    }
}

/// Serves what a peer that let go of the channel has left in the rings: no more than fits into them, since it
/// may still fill them.
pub(crate) fn run_out<P: Probe>(qp: &mut Qp, hub: &mut Hub<P>) {
    let config = channel_config();
    // The first look may end behind one slot.
    let looks = config.request_slots.max(config.response_slots) as usize / BUDGET + 2;
    for _ in 0..looks {
        if !matches!(qp.path, Path::Channel(_)) || !run(qp, hub) {
            break;
        }
    }
}

fn serve<P: Probe>(qp: &mut Qp, hub: &mut Hub<P>) -> Result<bool, End> {
    let mut busy = answers::responses(qp, hub)?;
    let mut tell_now = busy;
    let mut referred = 0;
    for _ in 0..BUDGET {
        let Some(header) = path(qp)?.channel.incoming.requests.peek() else { break };
        // Slots say nothing of how long it takes to copy what they refer to.
        if referred >= CHUNK || !qp.may_receive() {
            break;
        }
        // Also while the request itself has to wait: the program may wait for this before it posts a receive.
        let acked = qp.requester.acked;
        if header.ack != acked && qp.qp_type.requests() {
            requester_ack(qp, hub, header.ack)?;
        }
        if express::place(qp, hub, &header, responder::finish_receive)? {
            let answers = acked != qp.requester.acked;
            let requests = &mut path(qp)?.channel.incoming.requests;
            // Of a small answer that was waited for, the program is told at once. Seldom does another
            // message stand behind it, and the next look finds out: that slot is in the peer's cache, and
            // has to come from there.
            let alone = answers && !requests.has_backlog();
            requests.pop();
            busy = true;
            if alone {
                break;
            }
            continue;
        }
        tell_now = true;
        if header.flags & flag::REFERENCE != 0 {
            referred += header.length.min(CHUNK);
        }
        match front(qp, hub, &header) {
            Ok(Front::Done) => {
                path(qp)?.channel.incoming.requests.pop();
                busy = true;
            }
            Ok(Front::Again) => busy = true,
            Ok(Front::Wait) | Err(End::Absent) => break,
            Err(end) => return Err(end),
        }
    }
    if busy && (tell_now || !may_wait(qp, hub)) {
        tell(qp, hub)?;
    }
    Ok(busy | settle(qp, hub)?)
}

/// Does with the slot at the front whatever it asks for.
#[inline(never)]
fn front<P: Probe>(qp: &mut Qp, hub: &mut Hub<P>, header: &SlotHeader) -> Result<Front, End> {
    if qp.qp_type.is_reliable() {
        execute(qp, hub, header)
    } else {
        unreliable::slot(qp, hub, header)
    }
}

/// Whether the peer need not be told yet: of a single small send, until acknowledgements are released. Most
/// programs answer at once, and their answer says the same; meanwhile no line of the cache that the peer
/// looks at is fetched away from it, nor waited for.
#[inline]
pub(super) fn may_wait<P: Probe>(qp: &mut Qp, hub: &mut Hub<P>) -> bool {
    let executed = qp.responder.executed;
    let answers = qp.qp_type.requests();
    let Path::Channel(path) = &mut qp.path else { return false };
    let linked = matches!(path.other, Other::Linked { .. });
    if !linked || !answers || executed.wrapping_sub(path.told) > 1 {
        return false;
    }
    if !std::mem::replace(&mut path.owes_ack, true) {
        hub.ack_due.push(qp.id);
    }
    true
}

/// Tells the peer what was left for later.
pub(crate) fn release_ack<P: Probe>(qp: &mut Qp, hub: &mut Hub<P>) {
    let executed = qp.responder.executed;
    let Path::Channel(path) = &mut qp.path else { return };
    path.owes_ack = false;
    if path.told != executed {
        tell_executed(qp, hub);
    }
}

/// Gives slots back and says how many requests are executed. The peer may sleep while it waits for either,
/// or for a response.
#[inline]
pub(super) fn tell<P: Probe>(qp: &mut Qp, hub: &mut Hub<P>) -> Result<(), End> {
    let executed = qp.responder.executed;
    let path = path(qp)?;
    path.channel.incoming.publish();
    if path.told != executed {
        path.told = executed;
        path.channel.incoming.control.set_executed(executed);
        if hub.probe.watches() {
            watch::control(qp, hub, true, Control::Ack { count: executed });
        }
    }
    transmit::channel::notify(qp, hub);
    Ok(())
}

/// Says how many requests are executed, if the queue pair has a channel.
pub(crate) fn tell_executed<P: Probe>(qp: &mut Qp, hub: &mut Hub<P>) {
    let _ = tell(qp, hub);
}

/// Takes notice of what the peer has executed, and transmits what that allows.
#[inline]
fn settle<P: Probe>(qp: &mut Qp, hub: &mut Hub<P>) -> Result<bool, End> {
    if qp.requester.started == qp.requester.acked && !qp.sq.has_waiting() {
        return Ok(false);
    }
    let before = transmit::channel::reached(qp);
    let control = &path(qp)?.channel.outgoing.control;
    let (executed, stall) = (control.executed(), control.stall());
    requester_ack(qp, hub, executed)?;
    if let Some(stall) = stall {
        stalled(qp, hub, stall)?;
    }
    if qp.sq.has_waiting() && matches!(qp.path, Path::Channel(_)) {
        transmit::channel::run(qp, hub);
    }
    Ok(transmit::channel::reached(qp) != before)
}

#[inline]
pub(super) fn requester_ack<P: Probe>(
    qp: &mut Qp,
    hub: &mut Hub<P>,
    executed: u32,
) -> Result<(), End> {
    let before = qp.requester.acked;
    if !requester::acknowledge(qp, hub, executed) {
        return Err(End::Corrupt);
    }
    if hub.probe.watches() && qp.requester.acked != before {
        watch::control(qp, hub, false, Control::Ack { count: executed });
    }
    path(qp).map(drop)
}

/// The peer has no receive for its oldest request: counts it as an RNR refusal, once per wait.
fn stalled<P: Probe>(qp: &mut Qp, hub: &mut Hub<P>, stall: Stall) -> Result<(), End> {
    if stall.sequence != qp.requester.acked || qp.requester.rnr_until.is_some() {
        return Ok(());
    }
    qp.requester.counters.rnr += 1;
    if qp.attr.rnr_retry != 7 && qp.requester.rnr_tries >= qp.attr.rnr_retry {
        // The answers to what was executed before may have come since the last look.
        answers::responses(qp, hub)?;
        requester::fail_oldest(qp, hub, WcStatus::RnrRetryExcErr);
        return Ok(());
    }
    if hub.probe.watches() {
        let nak = Control::RnrNak { count: stall.sequence, timer: stall.timer };
        watch::control(qp, hub, false, nak);
    }
    qp.requester.rnr_tries = qp.requester.rnr_tries.saturating_add(1);
    qp.requester.rnr_until = Some(hub.now.after(rnr_timer_ns(stall.timer)));
    requester::set_alarm(qp, hub);
    Ok(())
}

pub(super) fn execute<P: Probe>(
    qp: &mut Qp,
    hub: &mut Hub<P>,
    header: &SlotHeader,
) -> Result<Front, End> {
    hub.probe.stage(Stage::Headers, 0);
    if !qp.qp_type.responds() {
        return Err(Refusal::Invalid.into());
    }
    responder::note_arrival(qp, hub);
    if qp.responder.holding && writes::are_ordered_by(header) {
        unordered::settle(qp, hub);
    }
    match header.opcode {
        request::SEND | request::SEND_IMM | request::SEND_INV => send(qp, hub, header),
        request::WRITE => writes::write(qp, hub, header),
        request::WRITE_IMM => writes::write_imm(qp, hub, header),
        request::READ => reads::read(qp, hub, header),
        request::COMPARE_SWAP | request::FETCH_ADD => reads::atomic(qp, hub, header),
        request::FLUSH => reads::flush(qp, hub, header),
        _ => Err(Refusal::Invalid.into()),
    }
}

/// Says that the request at the front finds no receive; on an unreliable connection it is dropped.
pub(super) fn stall<P: Probe>(qp: &mut Qp, hub: &mut Hub<P>) -> Result<Front, End> {
    if !qp.qp_type.is_reliable() {
        return Err(Refusal::NoReceive.into());
    }
    let stall = Stall { sequence: qp.responder.executed, timer: qp.attr.min_rnr_timer, attempt: 0 };
    let counters = &mut qp.responder.counters;
    let Path::Channel(path) = &mut qp.path else { return Err(End::Over) };
    if !path.stalled {
        path.stalled = true;
        counters.rnr += 1;
        path.channel.incoming.control.set_stall(Some(stall));
        transmit::channel::notify(qp, hub);
        if hub.probe.watches() {
            let nak = Control::RnrNak { count: stall.sequence, timer: stall.timer };
            watch::control(qp, hub, true, nak);
        }
    }
    await_shared(qp, hub);
    Ok(Front::Wait)
}

/// Has a shared receive queue call when a receive is posted to it.
fn await_shared<P: Probe>(qp: &mut Qp, hub: &mut Hub<P>) {
    let Path::Channel(path) = &mut qp.path else { return };
    if !path.awaiting
        && let Some(srq) = qp.srq.and_then(|srq| hub.srqs.get_mut(srq))
    {
        path.awaiting = true;
        srq.awaited_by.push_back(qp.id);
    }
}

/// Takes a receive for the message that begins; `false` if there is none.
pub(super) fn begin<P: Probe>(
    qp: &mut Qp,
    hub: &mut Hub<P>,
    header: &SlotHeader,
) -> Result<bool, End> {
    if qp.responder.receiving {
        return Ok(true);
    }
    if qp.qp_type.names_srq() {
        crate::xrc::choose(qp, hub, header.ack)?;
    }
    if !responder::begin_receive(qp, hub) {
        return Ok(false);
    }
    responder::spared(qp)?;
    end_stall(path(qp)?);
    Ok(true)
}

/// Says that the request at the front finds a receive, if it found none before.
pub(super) fn end_stall(path: &mut ChannelPath) {
    if std::mem::take(&mut path.stalled) {
        path.channel.incoming.control.set_stall(None);
    }
}

/// Copies a part of what the slot at the front carries to `to`. `at` is the offset of the part.
pub(super) fn copy_carried(
    channel: &quipu_mem::ring::Channel,
    carried: Carried,
    at: usize,
    to: Span<'_>,
) -> bool {
    let incoming = &channel.incoming;
    match carried {
        Carried::Inline => {
            incoming.requests.payload().sub(at, to.len()).copy_to(&to);
            true
        }
        Carried::Bytes => {
            let position = incoming.request_bytes.position().wrapping_add(at as u64);
            incoming.request_bytes.copy_to(position, &to).is_ok()
        }
        Carried::Reference => false,
    }
}

/// The reference list of the slot at the front.
pub(super) fn references(path: &ChannelPath, header: &SlotHeader) -> References {
    let mut bytes = [0; INLINE_MAX];
    let len = usize::from(header.inline_len);
    path.channel.incoming.requests.payload().read_into(0, &mut bytes);
    References::from_bytes(&bytes[..len])
}

/// Touches memory that the peer's requests refer to, unless the peer has taken it back.
pub(super) fn by_reference<P: Probe>(
    qp: &Qp,
    hub: &Hub<P>,
    touch: impl FnOnce(&dyn PeerMemory) -> Result<(), PeerMemoryFault>,
) -> Result<(), End> {
    let memory = transmit::channel::peer_memory(qp, hub).ok_or(Refusal::Failed)?;
    let Path::Channel(path) = &qp.path else { return Err(End::Over) };
    let touch = || match path.channel.incoming.control.producer_closed() {
        true => Err(End::LetGo),
        false => touch(&*memory).map_err(|_| End::Absent),
    };
    match path.other {
        Other::Own(_) => touch(),
        Other::Linked { link, .. } => hub.links.get(link).ok_or(End::Over)?.guarded(touch),
    }
}

/// Where the bytes of a slot are, checked against what a slot or the byte ring can hold.
pub(super) fn checked_carried(path: &ChannelPath, header: &SlotHeader) -> Result<Carried, End> {
    let carried = carried(header).ok_or(End::Corrupt)?;
    let too_long = carried == Carried::Bytes
        && u64::from(header.length) > path.channel.incoming.request_bytes.capacity();
    if too_long { Err(End::Corrupt) } else { Ok(carried) }
}

/// Is done with the bytes of the slot at the front.
pub(super) fn release(path: &mut ChannelPath, carried: Carried, len: u32) -> Result<(), End> {
    path.front_done = 0;
    if carried == Carried::Bytes {
        let bytes = &mut path.channel.incoming.request_bytes;
        bytes.release_to(bytes.position().wrapping_add(u64::from(len)))?;
    }
    Ok(())
}

fn send<P: Probe>(qp: &mut Qp, hub: &mut Hub<P>, header: &SlotHeader) -> Result<Front, End> {
    if !begin(qp, hub, header)? {
        return stall(qp, hub);
    }
    let carried = checked_carried(path(qp)?, header)?;
    let offset = qp.responder.receive.placed;
    if carried == Carried::Reference {
        if !fetch_receive(qp, hub, header)? {
            return Ok(Front::Again);
        }
    } else {
        place_carried(qp, hub, carried, offset, header.length)?;
    }
    release(path(qp)?, carried, header.length)?;
    if header.flags & flag::MORE != 0 {
        return Ok(Front::Done);
    }
    let extra = match header.opcode {
        request::SEND_IMM => WcExtra::Imm(header.imm),
        request::SEND_INV => {
            hub.invalidate(responder::remote_pd(qp, hub, header.imm), qp.num.0, header.imm)
                .map_err(|_| Refusal::Access(quipu_mem::AccessError::UnknownKey))?;
            WcExtra::Invalidated(header.imm)
        }
        _ => WcExtra::None,
    };
    let byte_len = qp.responder.receive.placed as u32;
    finish(qp, hub, WcOpcode::Recv, byte_len, extra, header)
}

pub(super) fn finish<P: Probe>(
    qp: &mut Qp,
    hub: &mut Hub<P>,
    opcode: WcOpcode,
    byte_len: u32,
    extra: WcExtra,
    header: &SlotHeader,
) -> Result<Front, End> {
    if hub.probe.watches() {
        watch::received(qp, hub, header, byte_len);
    }
    responder::executed(qp);
    let solicited = header.flags & flag::SOLICITED != 0;
    responder::finish_receive(qp, hub, Finish { opcode, byte_len, extra, solicited })?;
    Ok(Front::Done)
}

/// Tells the peer that its oldest request is refused, and ends the queue pair.
pub(crate) fn refuse<P: Probe>(qp: &mut Qp, hub: &mut Hub<P>, refusal: Refusal) {
    if qp.responder.holding {
        unordered::settle(qp, hub);
    }
    if hub.probe.watches() {
        watch::refused(qp, hub, true, refusal.remote_status());
    }
    let ack = qp.responder.executed;
    if let Path::Channel(path) = &mut qp.path {
        let answer = SlotHeader {
            opcode: response::REFUSED,
            imm: refusal.remote_status() as u32,
            ack,
            ..SlotHeader::default()
        };
        path.channel.incoming.control.set_executed(ack);
        // There is room for it: other answers leave one slot.
        let _ = path.channel.outgoing.responses.push(&answer, &[]);
        transmit::channel::notify(qp, hub);
    }
    responder::refuse(qp, hub, refusal);
}
