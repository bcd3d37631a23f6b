//! Requests of a channel that the peer wants an answer to: reads and atomics; and flushes, of which the count
//! of executed requests says enough. One slot for answers always stays free, for a refusal.

use quipu_mem::ring::{INLINE_MAX, RingError, SlotHeader};

use super::channel::{End, Front, by_reference, path, references};
use crate::adapter::Hub;
use crate::channel::{
    CHUNK, ChannelPath, FLUSH_BYTES, PIECE, PendingRead, flag, flush_of, request, response,
};
use crate::link::Atomic;
use crate::probe::{Probe, Stage};
use crate::qp::{Path, Qp};
use crate::responder::{self, Refusal};
use crate::transmit::lanes::{self, Answer};
use crate::types::Access;
use crate::watch;

/// Answers a read: its bytes go through the response ring, or to where the peer says.
pub(super) fn read<P: Probe>(
    qp: &mut Qp,
    hub: &mut Hub<P>,
    header: &SlotHeader,
) -> Result<Front, End> {
    if header.flags & flag::REFERENCE != 0 && !path(qp)?.answers {
        match deliver_read(qp, hub, header) {
            // All of it goes through the ring then.
            Err(End::Absent) => {
                let path = path(qp)?;
                (path.answers, path.front_done) = (true, 0);
            }
            delivered => return delivered,
        }
    }
    let read = path(qp)?.pending_read.unwrap_or(PendingRead {
        rkey: header.rkey,
        addr: header.raddr,
        size: header.length,
        done: 0,
    });
    let left = read.size - read.done;
    let Some(len) = turn_for(qp, hub, &read, PIECE)? else { return Ok(Front::Wait) };
    let span = responder::remote(
        qp,
        hub,
        read.rkey,
        read.addr.wrapping_add(u64::from(read.done)),
        left,
        Access::REMOTE_READ,
    )?;
    let Path::Channel(path) = &mut qp.path else { return Err(End::Over) };
    let outgoing = &mut path.channel.outgoing;
    let slot = match outgoing.responses.reserve_but_last() {
        Ok(slot) => slot,
        Err(RingError::Full) => return wait_for_room(path),
        Err(error) => return Err(error.into()),
    };
    let mut answer =
        SlotHeader { opcode: response::READ_DATA, length: len, ..SlotHeader::default() };
    if len as usize <= INLINE_MAX {
        span.sub(0, len as usize).copy_to(&slot.payload());
        answer.inline_len = len as u16;
    } else {
        let at = match outgoing.response_bytes.reserve(len) {
            Ok(at) => at,
            Err(RingError::Full) => return wait_for_room(path),
            Err(error) => return Err(error.into()),
        };
        outgoing.response_bytes.write_span(at, &span.sub(0, len as usize));
        answer.flags |= flag::BYTES;
    }
    answer.flags |= if len < left { flag::MORE } else { 0 };
    slot.commit(&answer);
    hub.probe.stage(Stage::GetData, len as usize);
    if len < left {
        path.pending_read = Some(PendingRead { done: read.done + len, ..read });
        lanes::charge_answer(qp, hub, len, left - len);
        return Ok(Front::Again);
    }
    path.pending_read = None;
    lanes::charge_answer(qp, hub, len, 0);
    if hub.probe.watches() {
        watch::read_answered(qp, hub, (read.rkey, read.addr), read.size);
    }
    responder::count_read(qp, read.size);
    responder::executed(qp);
    Ok(Front::Done)
}

/// How much of a read may be answered now, `most` bytes at most. `None`: it waits for a turn. What the peer
/// may not read is refused at once.
#[inline]
fn turn_for<P>(
    qp: &mut Qp,
    hub: &mut Hub<P>,
    read: &PendingRead,
    most: u32,
) -> Result<Option<u32>, End> {
    let left = read.size - read.done;
    if hub.qos.is_none() {
        return Ok(Some(left.min(most)));
    }
    let addr = read.addr.wrapping_add(u64::from(read.done));
    responder::remote(qp, hub, read.rkey, addr, left, Access::REMOTE_READ)?;
    match lanes::may_answer(qp, hub, left) {
        Answer::Go(len) => Ok(Some(len.min(most))),
        Answer::Wait => Ok(None),
        Answer::Discarded => Err(Refusal::Failed.into()),
    }
}

/// The read at the front waits for room in the ring, and not for a turn.
fn wait_for_room(path: &mut ChannelPath) -> Result<Front, End> {
    path.owed = 0;
    Ok(Front::Wait)
}

/// Puts the bytes of a read where the peer wants them; the count of executed requests then says so.
fn deliver_read<P: Probe>(
    qp: &mut Qp,
    hub: &mut Hub<P>,
    header: &SlotHeader,
) -> Result<Front, End> {
    let done = path(qp)?.front_done;
    let left = header.length.checked_sub(done).ok_or(End::Corrupt)?;
    let read = PendingRead { rkey: header.rkey, addr: header.raddr, size: header.length, done };
    let Some(len) = turn_for(qp, hub, &read, CHUNK)? else { return Ok(Front::Wait) };
    let list = references(path(qp)?, header);
    let remote = list.part(u64::from(done), u64::from(len)).ok_or(End::Corrupt)?;
    let span =
        responder::remote(qp, hub, header.rkey, header.raddr, header.length, Access::REMOTE_READ)?;
    let local = [span.sub(done as usize, len as usize).as_raw()];
    by_reference(qp, hub, |memory| memory.write(&local, remote.as_slice()))?;
    hub.probe.stage(Stage::GetData, len as usize);
    lanes::charge_answer(qp, hub, len, left - len);
    let path = path(qp)?;
    path.front_done = done + len;
    if done + len < header.length {
        return Ok(Front::Again);
    }
    let slot = match path.channel.outgoing.responses.reserve_but_last() {
        Ok(slot) => slot,
        Err(RingError::Full) => return Ok(Front::Wait),
        Err(error) => return Err(error.into()),
    };
    slot.commit(&SlotHeader {
        opcode: response::READ_DATA,
        flags: flag::REFERENCE,
        length: header.length,
        ..SlotHeader::default()
    });
    path.front_done = 0;
    if hub.probe.watches() {
        watch::read_answered(qp, hub, (header.rkey, header.raddr), header.length);
    }
    responder::count_read(qp, header.length);
    responder::executed(qp);
    Ok(Front::Done)
}

/// Executes an atomic, and answers with the word before it.
pub(super) fn atomic<P: Probe>(
    qp: &mut Qp,
    hub: &mut Hub<P>,
    header: &SlotHeader,
) -> Result<Front, End> {
    let mut operands = [0; 16];
    path(qp)?.channel.incoming.requests.payload().read_into(0, &mut operands);
    let half =
        |at: usize| operands[at..at + 8].try_into().map(u64::from_ne_bytes).unwrap_or_default();
    if path(qp)?.channel.outgoing.responses.free()? <= 1 {
        return Ok(Front::Wait);
    }
    let word = responder::remote(qp, hub, header.rkey, header.raddr, 8, Access::REMOTE_ATOMIC)?;
    let original = match header.opcode {
        request::FETCH_ADD => Atomic::FetchAdd(half(0)),
        _ => Atomic::CompareSwap { compare: half(0), swap: half(8) },
    }
    .execute(word);
    let answer = SlotHeader { opcode: response::ATOMIC, length: 8, ..SlotHeader::default() };
    path(qp)?.channel.outgoing.responses.push(&answer, &original.to_ne_bytes())?;
    if hub.probe.watches() {
        watch::atomic_answered(qp, hub, header, [half(0), half(8)], original);
    }
    qp.responder.counters.atomics += 1;
    responder::executed(qp);
    Ok(Front::Done)
}

/// Executes a flush.
pub(super) fn flush<P: Probe>(
    qp: &mut Qp,
    hub: &mut Hub<P>,
    header: &SlotHeader,
) -> Result<Front, End> {
    let mut bytes = [0; FLUSH_BYTES];
    path(qp)?.channel.incoming.requests.payload().read_into(0, &mut bytes);
    let flush = flush_of(header, &bytes);
    responder::flush(qp, hub, flush)?;
    if hub.probe.watches() {
        watch::flushed(qp, hub, flush);
    }
    responder::executed(qp);
    Ok(Front::Done)
}
