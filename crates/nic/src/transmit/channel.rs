//! Transmission over a channel: work requests become slots, or, where nothing stands before them and the
//! host allows it, direct accesses to the peer's memory that cost the peer nothing.

mod express;
mod hand_over;

use std::sync::Arc;

use quipu_iwarp::wire::control::Control;
use quipu_mem::ring::{INLINE_MAX, RingError, SlotHeader};

use super::references::note_reference;
use super::{direct, lanes};
use crate::adapter::Hub;
use crate::channel::{CHUNK, Other, PIECE, References, flag, flush_slot, request};
use crate::fate::{self, Met};
use crate::link::PeerMemory;
use crate::probe::{Probe, Stage};
use crate::qp::{Path, Qp};
use crate::queue::SendWqe;
use crate::requester;
use crate::types::{SendFlags, SendOp, WcStatus};
use crate::watch;

pub(crate) use self::express::{express, send_at_once};
pub(super) use self::express::{has_right_of_way, put_payload, small_len};
pub(crate) use self::hand_over::hand_over;

/// What one step of transmission did.
pub(super) enum Step {
    /// Something: look again.
    Again,
    /// So many bytes, in the peer's memory. After a chunk others get their turn: the next look goes on.
    Moved(u32),
    /// Nothing can be done now.
    Nothing,
    /// The request at `sq.next` cannot be transmitted.
    Failed(WcStatus),
    /// The peer's side of the channel makes no sense.
    Corrupt,
}

impl From<RingError> for Step {
    fn from(error: RingError) -> Self {
        match error {
            RingError::Full => Self::Nothing,
            RingError::TooLong | RingError::Corrupt => Self::Corrupt,
        }
    }
}

/// Transmits as much as there is room for, then tells the peer.
#[inline]
pub(crate) fn run<P: Probe>(qp: &mut Qp, hub: &mut Hub<P>) {
    let before = pushed(qp);
    let mut moved = 0;
    let failed = loop {
        match step(qp, hub) {
            Step::Again => {}
            Step::Moved(bytes) => {
                moved += bytes;
                if moved >= CHUNK {
                    if hub.qos.is_some() {
                        lanes::wait_again(qp, hub);
                    } else {
                        look_again(qp, hub);
                    }
                    break None;
                }
            }
            Step::Nothing => break None,
            Step::Failed(status) => break Some(status),
            Step::Corrupt => return requester::peer_corrupt(qp, hub),
        }
    };
    let progress = pushed(qp) != before;
    if progress {
        notify(qp, hub);
    }
    if !qp.qp_type.is_reliable() {
        sent_unreliably(qp, hub, progress);
    }
    if let Some(status) = failed {
        requester::fail_next(qp, hub, status);
    }
    if hub.qos.is_some() {
        lanes::end_turn(qp, hub);
    }
}

/// What is in the ring is done. What waits for room does so for a limited time.
#[cold]
fn sent_unreliably<P: Probe>(qp: &mut Qp, hub: &mut Hub<P>, progress: bool) {
    if progress && qp.requester.deadline.take().is_some() {
        requester::set_alarm(qp, hub);
    }
    requester::complete_sent(qp, hub);
    if qp.sq.has_waiting() {
        crate::connect::start_deadline(qp, hub);
    }
}

/// The slot that was just filled says how many requests are executed: that need not be said otherwise, in a
/// line of the cache that the peer looks at while it waits. The peer reads it for certain only if nothing is
/// before it: what is may wait for a receive.
#[inline(always)]
pub(super) fn told_along<P: Probe>(qp: &mut Qp, hub: &mut Hub<P>) {
    let (count, requester) = (qp.responder.executed, &qp.requester);
    let front = requester.started.wrapping_sub(requester.acked) == 1 && requester.offset == 0;
    let Path::Channel(path) = &mut qp.path else { return };
    if !front || path.told == count {
        return;
    }
    if is_far(path.told, count) {
        path.channel.incoming.control.set_executed(count);
    }
    path.told = count;
    // Nothing is due any more; the last of what is due is that of this queue pair, most often.
    if path.owes_ack && hub.ack_due.last() == Some(&qp.id) {
        hub.ack_due.pop();
        path.owes_ack = false;
    }
    if hub.probe.watches() {
        watch::control(qp, hub, true, Control::Ack { count });
    }
}

/// Whether the shared count is to be written all the same: it must not stay behind by half of its range.
#[inline]
fn is_far(before: u32, count: u32) -> bool {
    (before ^ count) >> 16 != 0
}

/// Tells the peer of what was transmitted while it was being posted.
#[inline]
pub(crate) fn announce<P: Probe>(qp: &mut Qp, hub: &mut Hub<P>) {
    if let Path::Channel(path) = &mut qp.path
        && std::mem::take(&mut path.unannounced)
    {
        notify(qp, hub);
    }
}

/// Has the next `progress` look at the channel, if there is more to transmit.
fn look_again<P: Probe>(qp: &mut Qp, hub: &mut Hub<P>) {
    if !qp.sq.has_waiting() {
        return;
    }
    let Path::Channel(path) = &mut qp.path else { return };
    path.channel.incoming.control.disarm();
    if !std::mem::replace(&mut path.hot, true) {
        hub.hot.push(qp.id);
    }
}

/// How far transmission is; it differs after every step.
pub(crate) fn reached(qp: &Qp) -> (u32, u32, u32, u32) {
    let direct = match &qp.path {
        Path::Channel(path) => path.direct_done,
        _ => 0,
    };
    (qp.sq.head, qp.sq.next, qp.requester.offset, direct)
}

fn pushed(qp: &Qp) -> u32 {
    match &qp.path {
        Path::Channel(path) => path.channel.outgoing.requests.position(),
        _ => 0,
    }
}

/// Tells the peer that something was pushed, if it does not look by itself.
#[inline(always)]
pub(crate) fn notify<P: Probe>(qp: &mut Qp, hub: &mut Hub<P>) {
    let Path::Channel(path) = &qp.path else { return };
    match path.other {
        Other::Own(other) => hub.nudged.push_back(other),
        Other::Linked { link, bell, .. } => {
            if path.channel.outgoing.control.must_ring() {
                hub.ring(link, bell);
            }
        }
    }
}

fn step<P: Probe>(qp: &mut Qp, hub: &mut Hub<P>) -> Step {
    if qp.requester.offset == 0 {
        if !requester::may_begin(qp) {
            return Step::Nothing;
        }
        if !lanes::has_turn(qp, hub) {
            return waits_for_turn(qp, hub);
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
        if let Some(done) = direct::step(qp, hub, &wqe) {
            return done;
        }
        if direct::waits_for_answers(qp, hub, &wqe) {
            return Step::Nothing;
        }
        // The peer is asked for the whole of what was moved in part.
        if let Path::Channel(path) = &mut qp.path {
            path.direct_done = 0;
        }
    } else if !lanes::has_turn(qp, hub) {
        return waits_for_turn(qp, hub);
    }
    let position = qp.sq.next;
    let wqe = *qp.sq.wqe(position);
    match wqe.op {
        SendOp::Read { addr, rkey } => ask_read(qp, hub, &wqe, addr, rkey),
        SendOp::CompareSwap { addr, rkey, compare, swap } => {
            let mut operands = [0; 16];
            operands[..8].copy_from_slice(&compare.to_ne_bytes());
            operands[8..].copy_from_slice(&swap.to_ne_bytes());
            ask_atomic(qp, hub, request::COMPARE_SWAP, addr, rkey, &operands)
        }
        SendOp::FetchAdd { addr, rkey, add } => {
            ask_atomic(qp, hub, request::FETCH_ADD, addr, rkey, &add.to_ne_bytes())
        }
        SendOp::Flush(flush) => {
            let (header, bytes) = flush_slot(flush, qp.responder.executed);
            push_whole(qp, hub, &header, &bytes)
        }
        _ => data(qp, hub, &wqe),
    }
}

#[cold]
fn waits_for_turn<P>(qp: &mut Qp, hub: &mut Hub<P>) -> Step {
    lanes::park(qp, hub);
    Step::Nothing
}

/// Counts the request at `sq.next` as begun.
pub(super) fn count(qp: &mut Qp) {
    let state = qp.sq.wqe_mut(qp.sq.next);
    let reads = state.wants_answer();
    state.first_request = qp.requester.started;
    state.end_request = qp.requester.started.wrapping_add(1);
    state.answered = !reads;
    state.placed = 0;
    qp.requester.started = qp.requester.started.wrapping_add(1);
    qp.requester.reads += u32::from(reads);
}

/// Opcode, immediate (or key) and remote place of a request that carries bytes.
pub(crate) fn shape(op: &SendOp) -> (u8, u32, u64, u32) {
    match *op {
        SendOp::SendImm(imm) => (request::SEND_IMM, imm, 0, 0),
        SendOp::SendInv(key) => (request::SEND_INV, key, 0, 0),
        // Never direct: the peer stores a slot's 8 bytes in one piece, and the kernel need not.
        SendOp::Write { addr, rkey } | SendOp::AtomicWrite { addr, rkey } => {
            (request::WRITE, 0, addr, rkey)
        }
        SendOp::WriteImm { addr, rkey, imm } => (request::WRITE_IMM, imm, addr, rkey),
        _ => (request::SEND, 0, 0, 0),
    }
}

/// Pushes one slot of a request with bytes.
fn data<P: Probe>(qp: &mut Qp, hub: &mut Hub<P>, wqe: &SendWqe) -> Step {
    let by_reference = wqe.length > hub.config.copy_limit && can_refer(qp, hub);
    let (pd, position) = (qp.pd_number(), qp.sq.next);
    let offset = qp.requester.offset.saturating_sub(1);
    let left = wqe.length - offset;
    let room = lanes::room(qp, hub);
    let (opcode, imm, raddr, rkey) = shape(&wqe.op);
    let mut header = SlotHeader {
        opcode,
        flags: if wqe.flags.contains(SendFlags::SOLICITED) { flag::SOLICITED } else { 0 },
        imm,
        raddr: raddr.wrapping_add(u64::from(offset)),
        rkey,
        // An XRC requester executes nothing: the field has the shared receive queue.
        ack: if qp.qp_type.names_srq() { wqe.srq } else { qp.responder.executed },
        length: left,
        inline_len: 0,
    };
    let Qp { path: Path::Channel(path), sq, .. } = qp else { return Step::Nothing };
    let outgoing = &mut path.channel.outgoing;
    let inline = sq.inline(position);
    if left as usize <= INLINE_MAX {
        let slot = match outgoing.requests.reserve() {
            Ok(slot) => slot,
            Err(error) => return error.into(),
        };
        let place = slot.payload().sub(0, left as usize);
        match inline {
            Some(bytes) => place.write_from(0, &bytes[offset as usize..]),
            None => {
                let list = sq.sges(position);
                if hub.regions.gather_to(pd, list, u64::from(offset), &place).is_err() {
                    return Step::Failed(WcStatus::LocProtErr);
                }
            }
        }
        header.inline_len = left as u16;
        slot.commit(&header);
    } else if by_reference && inline.is_none() {
        let mut list = References::default();
        let mut referred = 0u32;
        let most = u64::from(left.min(room));
        for piece in hub.regions.pieces(pd, sq.sges(position), u64::from(offset), most, false) {
            let Ok(piece) = piece else { return Step::Failed(WcStatus::LocProtErr) };
            let (addr, len) = piece.as_raw();
            if !list.push(addr as u64, len as u64) {
                break;
            }
            referred += len as u32;
        }
        let (bytes, len) = list.to_bytes();
        header.flags |= flag::REFERENCE | if referred < left { flag::MORE } else { 0 };
        header.length = referred;
        if let Err(error) = outgoing.requests.push(&header, &bytes[..len]) {
            return error.into();
        }
        note_reference(qp, hub);
    } else {
        let slot = match outgoing.requests.reserve() {
            Ok(slot) => slot,
            Err(error) => return error.into(),
        };
        let len = left.min(PIECE).min(room);
        let at = match outgoing.request_bytes.reserve(len) {
            Ok(at) => at,
            Err(error) => return error.into(),
        };
        match inline {
            Some(bytes) => {
                outgoing.request_bytes.write(at, &bytes[offset as usize..(offset + len) as usize]);
            }
            None => {
                let (first, second) = outgoing.request_bytes.pieces(at, len);
                let list = sq.sges(position);
                let offset = u64::from(offset);
                let behind = offset + first.len() as u64;
                if hub.regions.gather_to(pd, list, offset, &first).is_err()
                    || hub.regions.gather_to(pd, list, behind, &second).is_err()
                {
                    outgoing.request_bytes.cancel(at);
                    return Step::Failed(WcStatus::LocProtErr);
                }
            }
        }
        header.flags |= flag::BYTES | if len < left { flag::MORE } else { 0 };
        header.length = len;
        slot.commit(&header);
    }
    hub.probe.stage(Stage::GetData, header.length as usize);
    end_slot(qp, hub, wqe, offset, header.length)
}

/// Counts what a slot carried, and ends the request if that was all.
fn end_slot<P: Probe>(
    qp: &mut Qp,
    hub: &mut Hub<P>,
    wqe: &SendWqe,
    offset: u32,
    carried: u32,
) -> Step {
    if qp.requester.offset == 0 {
        count(qp);
    }
    lanes::charge(qp, hub, carried);
    told_along(qp, hub);
    let done = offset + carried;
    if done == wqe.length {
        if hub.probe.watches() {
            watch::posted(qp, hub);
        }
        requester::transmitted(qp);
    } else {
        qp.requester.offset = done + 1;
    }
    Step::Again
}

fn ask_atomic<P: Probe>(
    qp: &mut Qp,
    hub: &mut Hub<P>,
    opcode: u8,
    addr: u64,
    rkey: u32,
    operands: &[u8],
) -> Step {
    if hub.regions.check_list(qp.pd_number(), qp.sq.sges(qp.sq.next), 0, 8, true).is_err() {
        return Step::Failed(WcStatus::LocProtErr);
    }
    let header = SlotHeader {
        opcode,
        length: operands.len() as u32,
        raddr: addr,
        rkey,
        ack: qp.responder.executed,
        ..SlotHeader::default()
    };
    push_whole(qp, hub, &header, operands)
}

fn push_whole<P: Probe>(
    qp: &mut Qp,
    hub: &mut Hub<P>,
    header: &SlotHeader,
    payload: &[u8],
) -> Step {
    let Path::Channel(path) = &mut qp.path else { return Step::Nothing };
    if let Err(error) = path.channel.outgoing.requests.push(header, payload) {
        return error.into();
    }
    count(qp);
    lanes::charge(qp, hub, payload.len() as u32);
    told_along(qp, hub);
    if hub.probe.watches() {
        watch::posted(qp, hub);
    }
    requester::transmitted(qp);
    Step::Again
}

/// Asks for a read. Where the peer can reach this side's memory it is told where the bytes go, so that it
/// puts them there itself.
fn ask_read<P: Probe>(qp: &mut Qp, hub: &mut Hub<P>, wqe: &SendWqe, addr: u64, rkey: u32) -> Step {
    let pd = qp.pd_number();
    let list = qp.sq.sges(qp.sq.next);
    let (mut sink, mut whole) = (References::default(), true);
    for piece in hub.regions.pieces(pd, list, 0, u64::from(wqe.length), true) {
        let Ok(piece) = piece else { return Step::Failed(WcStatus::LocProtErr) };
        let (addr, len) = piece.as_raw();
        whole &= sink.push(addr as u64, len as u64);
    }
    let refer = whole && wqe.length > hub.config.copy_limit && can_refer(qp, hub);
    let (bytes, len) = sink.to_bytes();
    let header = SlotHeader {
        opcode: request::READ,
        flags: if refer { flag::REFERENCE } else { 0 },
        length: wqe.length,
        raddr: addr,
        rkey,
        ack: qp.responder.executed,
        ..SlotHeader::default()
    };
    if refer {
        note_reference(qp, hub);
    }
    push_whole(qp, hub, &header, if refer { &bytes[..len] } else { &[] })
}

/// Whether the peer can reach this process's memory. Access is probed in both directions and agreed on, so
/// that what this side may do the peer may too. Nothing is known of when an unreliable peer would.
fn can_refer<P>(qp: &Qp, hub: &Hub<P>) -> bool {
    let carries = matches!(&qp.path, Path::Channel(path) if path.carries);
    qp.qp_type.is_reliable() && !carries && peer_memory(qp, hub).is_some()
}

/// Access to the peer's memory, if there is any.
pub(crate) fn peer_memory<P>(qp: &Qp, hub: &Hub<P>) -> Option<Arc<dyn PeerMemory>> {
    let Path::Channel(path) = &qp.path else { return None };
    match path.other {
        Other::Own(_) => hub.own_memory.clone(),
        Other::Linked { link, .. } => hub.links.get(link)?.link.peer_memory.clone(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_shared_count_stays_near() {
        let (mut shared, mut told, mut writes) = (0xfffe_8000_u32, 0xfffe_8000_u32, 0);
        for _ in 0..0x4_0000 {
            let count = told.wrapping_add(1);
            if is_far(told, count) {
                (shared, writes) = (count, writes + 1);
            }
            told = count;
            assert!(told.wrapping_sub(shared) <= 1 << 16);
        }
        assert_eq!(writes, 4, "seldom");
    }
}
