//! What a probe that watches is told of channels: the messages that a stream would have carried, once each
//! is whole. Payload is read where it came from or went to.
//!
//! Nothing here is called unless the probe watches.

use quipu_iwarp::terminate::{self, RemoteFault};
use quipu_iwarp::wire::Stag;
use quipu_iwarp::wire::control::Control;
use quipu_iwarp::wire::hello::{Features, Hello, Kind};
use quipu_iwarp::wire::rdmap::{
    AtomicOp, AtomicRequest, AtomicResponse, Immediate, ReadRequest, TaggedOp, UntaggedOp,
};
use quipu_mem::ring::{INLINE_MAX, SlotHeader};
use quipu_mem::{Key, Regions};

use crate::adapter::Hub;
use crate::channel::{Other, flag, request};
use crate::probe::{Ends, Header, Passage, Probe};
use crate::qp::{Path, Qp};
use crate::responder;
use crate::stream::sink_of;
use crate::transmit::Marking;
use crate::transmit::channel::shape;
use crate::transmit::marking::marking_of;
use crate::transmit::stream::flush_request;
use crate::types::{Access, Flush, Payload, QpNum, SendFlags, SendOp, SendWr, WcStatus};

/// Whom the channel of a queue pair joins; `None` if it has none.
fn ends<P>(qp: &Qp, hub: &Hub<P>) -> Option<Ends> {
    let Path::Channel(path) = &qp.path else { return None };
    Some(Ends {
        own: (crate::connect::own_gid(qp, hub), qp.num),
        peer: (qp.attr.av.dgid, QpNum(qp.attr.dest_qp_num)),
        client: crate::connect::initiates(qp, hub),
        within: matches!(path.other, Other::Own(_)),
    })
}

/// Tells of messages that pass one way through one channel.
struct Teller<'a, P> {
    probe: &'a mut P,
    ends: Ends,
    outgoing: bool,
    wr_id: Option<u64>,
    /// How what this side sends is marked.
    marking: Marking,
}

impl<P: Probe> Teller<'_, P> {
    fn tell(&mut self, header: Header, length: u32, fill: &mut dyn FnMut(u32, &mut [u8])) {
        // Of two queue pairs of one adapter, the one that sends tells.
        if self.outgoing || !self.ends.within {
            let Self { ends, outgoing, wr_id, marking, .. } = *self;
            let marking = outgoing.then_some(marking);
            let passage = Passage { ends, outgoing, wr_id, marking, header, length };
            self.probe.passed(&passage, fill);
        }
    }

    fn untagged(
        &mut self,
        op: UntaggedOp,
        ulp: u32,
        length: u32,
        fill: &mut dyn FnMut(u32, &mut [u8]),
    ) {
        self.tell(Header::Untagged { op, ulp }, length, fill);
    }

    /// A message of fixed layout.
    fn whole(&mut self, op: UntaggedOp, payload: &impl quipu_iwarp::wire::Payload) {
        let mut bytes = vec![0; payload.wire_len()];
        payload.emit(&mut bytes);
        self.untagged(op, 0, bytes.len() as u32, &mut |offset, place| {
            let offset = offset as usize;
            place.copy_from_slice(&bytes[offset..offset + place.len()]);
        });
    }

    /// The messages of a request, as its slot says it.
    fn request(&mut self, said: &SlotHeader, fill: &mut dyn FnMut(u32, &mut [u8])) {
        use UntaggedOp as Op;
        let solicited = said.flags & flag::SOLICITED != 0;
        let either = |plain, with_event| if solicited { with_event } else { plain };
        let (length, stag, to) = (said.length, said.rkey, said.raddr);
        let write = Header::Tagged { op: TaggedOp::Write, stag, to };
        match said.opcode {
            request::SEND_IMM => {
                self.untagged(either(Op::SendImm, Op::SendImmSe), said.imm, length, fill);
            }
            request::SEND_INV => {
                let op = either(Op::SendInvalidate, Op::SendSeInvalidate);
                self.untagged(op, said.imm, length, fill);
            }
            request::WRITE => self.tell(write, length, fill),
            request::WRITE_IMM => {
                if length > 0 {
                    self.tell(write, length, fill);
                }
                let immediate = Immediate { imm: said.imm, write_len: length };
                self.whole(either(Op::Immediate, Op::ImmediateSe), &immediate);
            }
            _ => self.untagged(either(Op::Send, Op::SendSe), 0, length, fill),
        }
    }

    fn read_request(&mut self, number: u32, key: u32, addr: u64, size: u32) {
        let request = ReadRequest {
            sink_stag: sink_of(number),
            sink_to: 0,
            size,
            source_stag: Stag(key),
            source_to: addr,
        };
        self.whole(UntaggedOp::ReadRequest, &request);
    }

    fn atomic_request(&mut self, id: u32, key: u32, to: u64, op: AtomicOp) {
        let request = AtomicRequest { id, stag: Stag(key), to, op };
        self.whole(UntaggedOp::AtomicRequest, &request);
    }
}

/// What tells of the messages of `qp`, and the memory that they refer to.
fn teller<'a, P: Probe>(
    qp: &Qp,
    hub: &'a mut Hub<P>,
    outgoing: bool,
    wr_id: Option<u64>,
) -> Option<(Teller<'a, P>, &'a Regions)> {
    let (ends, marking) = (ends(qp, hub)?, marking_of(qp, hub));
    let Hub { probe, regions, .. } = hub;
    Some((Teller { probe, ends, outgoing, wr_id, marking }, regions))
}

/// The channel of `qp` stands.
#[cold]
pub(crate) fn joined<P: Probe>(qp: &Qp, hub: &mut Hub<P>) {
    let Some(ends) = ends(qp, hub) else { return };
    let own = crate::connect::hello_of(qp, hub, Kind::Request);
    // What the peer said, or would have.
    let peer = own.answer(Kind::Request, Features::ALL, qp.attr.sq_psn, qp.attr.rq_psn);
    let (request, answer) = if ends.client { (own, peer) } else { (peer, own) };
    hub.probe.joined(&ends, &request, &Hello { kind: Kind::Accept, ..answer });
}

/// The channel of `qp` is about to go.
#[cold]
pub(crate) fn parted<P: Probe>(qp: &Qp, hub: &mut Hub<P>) {
    if let Some(ends) = ends(qp, hub) {
        hub.probe.parted(&ends);
    }
}

/// The request at `sq.next` is transmitted, or executed directly.
#[cold]
pub(crate) fn posted<P: Probe>(qp: &Qp, hub: &mut Hub<P>) {
    let position = qp.sq.next;
    let wqe = *qp.sq.wqe(position);
    let Some((mut teller, regions)) = teller(qp, hub, true, Some(wqe.wr_id)) else { return };
    let all = u64::MAX;
    match wqe.op {
        SendOp::Read { addr, rkey } => teller.read_request(position, rkey, addr, wqe.length),
        SendOp::CompareSwap { addr, rkey, compare, swap } => {
            let op = AtomicOp::CmpSwap { swap, swap_mask: all, compare, compare_mask: all };
            teller.atomic_request(position, rkey, addr, op);
        }
        SendOp::FetchAdd { addr, rkey, add } => {
            teller.atomic_request(position, rkey, addr, AtomicOp::FetchAdd { add, mask: 0 });
        }
        SendOp::Flush(flush) => teller.whole(UntaggedOp::Flush, &flush_request(flush)),
        op => {
            let (pd, inline, list) = (qp.pd_number(), qp.sq.inline(position), qp.sq.sges(position));
            teller.request(&said(&op, wqe.flags, wqe.length), &mut |offset, place| match inline {
                Some(bytes) => {
                    place.copy_from_slice(&bytes[offset as usize..offset as usize + place.len()]);
                }
                None => read_list(regions, pd, list, offset, place),
            });
        }
    }
}

/// A small send was transmitted while it was being posted.
#[cold]
pub(crate) fn posted_express<P: Probe>(qp: &Qp, hub: &mut Hub<P>, wr: &SendWr<'_>, length: u32) {
    let pd = qp.pd_number();
    let Some((mut teller, regions)) = teller(qp, hub, true, Some(wr.wr_id)) else { return };
    teller.request(&said(&wr.op, wr.flags, length), &mut |offset, place| match wr.payload {
        Payload::Inline(bytes) => {
            place.copy_from_slice(&bytes[offset as usize..offset as usize + place.len()]);
        }
        Payload::Sges(list) => read_list(regions, pd, list, offset, place),
    });
}

/// The read or atomic at `position` is answered.
#[cold]
pub(crate) fn answered<P: Probe>(qp: &Qp, hub: &mut Hub<P>, position: u32) {
    let wqe = *qp.sq.wqe(position);
    let (pd, list) = (qp.pd_number(), qp.sq.sges(position));
    let Some((mut teller, regions)) = teller(qp, hub, false, Some(wqe.wr_id)) else { return };
    if let SendOp::Read { .. } = wqe.op {
        let header =
            Header::Tagged { op: TaggedOp::ReadResponse, stag: sink_of(position).0, to: 0 };
        return teller.tell(header, wqe.length, &mut |offset, place| {
            read_list(regions, pd, list, offset, place);
        });
    }
    let mut original = [0; 8];
    read_list(regions, pd, list, 0, &mut original);
    let original = u64::from_ne_bytes(original);
    teller.whole(UntaggedOp::AtomicResponse, &AtomicResponse { id: position, original });
}

/// A small send is at the front of the ring, of which the receive `wr_id` has the bytes.
#[cold]
pub(crate) fn received_express<P: Probe>(
    qp: &Qp,
    hub: &mut Hub<P>,
    header: &SlotHeader,
    wr_id: u64,
) {
    let mut bytes = [0; INLINE_MAX];
    if let Path::Channel(path) = &qp.path {
        path.channel.incoming.requests.payload().read_into(0, &mut bytes);
    }
    let Some((mut teller, _)) = teller(qp, hub, false, Some(wr_id)) else { return };
    teller.request(header, &mut |offset, place| {
        place.copy_from_slice(&bytes[offset as usize..offset as usize + place.len()]);
    });
}

/// The request whose last slot is at the front of the ring is executed; `length` bytes in all.
#[cold]
pub(crate) fn received<P: Probe>(qp: &Qp, hub: &mut Hub<P>, header: &SlotHeader, length: u32) {
    let write = matches!(header.opcode, request::WRITE | request::WRITE_IMM);
    let receive = &qp.responder.receive;
    let wr_id = (header.opcode != request::WRITE).then_some(receive.wr_id);
    let (pd, receive_pd) = (responder::remote_pd(qp, hub, header.rkey), qp.recv_pd_number());
    let Some((mut teller, regions)) = teller(qp, hub, false, wr_id) else { return };
    // The slots of a write name the places of their own bytes.
    let before = u64::from(length.wrapping_sub(header.length));
    let said = SlotHeader { length, raddr: header.raddr.wrapping_sub(before), ..*header };
    teller.request(&said, &mut |offset, place| {
        if write {
            let to = said.raddr.wrapping_add(u64::from(offset));
            read_remote(regions, (pd, qp.num), (said.rkey, to), Access::REMOTE_WRITE, place);
        } else {
            read_list(regions, receive_pd, &receive.sges, offset, place);
        }
    });
}

/// A read of the peer is answered.
#[cold]
pub(crate) fn read_answered<P: Probe>(
    qp: &Qp,
    hub: &mut Hub<P>,
    (key, addr): (u32, u64),
    size: u32,
) {
    let (number, pd) = (qp.responder.executed, responder::remote_pd(qp, hub, key));
    let Some((mut teller, regions)) = teller(qp, hub, false, None) else { return };
    teller.read_request(number, key, addr, size);
    teller.outgoing = true;
    let header = Header::Tagged { op: TaggedOp::ReadResponse, stag: sink_of(number).0, to: 0 };
    teller.tell(header, size, &mut |offset, place| {
        let from = addr.wrapping_add(u64::from(offset));
        read_remote(regions, (pd, qp.num), (key, from), Access::REMOTE_READ, place);
    });
}

/// An atomic of the peer is executed.
#[cold]
pub(crate) fn atomic_answered<P: Probe>(
    qp: &Qp,
    hub: &mut Hub<P>,
    header: &SlotHeader,
    operands: [u64; 2],
    original: u64,
) {
    let id = qp.responder.executed;
    let Some((mut teller, _)) = teller(qp, hub, false, None) else { return };
    let ([first, second], all) = (operands, u64::MAX);
    let op = match header.opcode {
        request::FETCH_ADD => AtomicOp::FetchAdd { add: first, mask: 0 },
        _ => AtomicOp::CmpSwap { compare: first, compare_mask: all, swap: second, swap_mask: all },
    };
    teller.atomic_request(id, header.rkey, header.raddr, op);
    teller.outgoing = true;
    teller.whole(UntaggedOp::AtomicResponse, &AtomicResponse { id, original });
}

/// A flush of the peer is executed.
#[cold]
pub(crate) fn flushed<P: Probe>(qp: &Qp, hub: &mut Hub<P>, flush: Option<Flush>) {
    if let (Some(flush), Some((mut teller, _))) = (flush, teller(qp, hub, false, None)) {
        teller.whole(UntaggedOp::Flush, &flush_request(flush));
    }
}

/// A count of executed requests, or the lack of a receive, was said.
#[cold]
pub(crate) fn control<P: Probe>(qp: &Qp, hub: &mut Hub<P>, outgoing: bool, control: Control) {
    // On a stream nobody would say so.
    if !qp.qp_type.is_reliable() {
        return;
    }
    if let Some((mut teller, _)) = teller(qp, hub, outgoing, None) {
        teller.whole(UntaggedOp::Control, &control);
    }
}

/// A request is refused; `status` is what its work request ends with.
#[cold]
pub(crate) fn refused<P: Probe>(qp: &Qp, hub: &mut Hub<P>, outgoing: bool, status: WcStatus) {
    let fault = match status {
        WcStatus::RemAccessErr => RemoteFault::AccessRights,
        WcStatus::RemInvReqErr => RemoteFault::InvalidRequest,
        _ => RemoteFault::Catastrophic,
    };
    let Some(terminate) = terminate::for_fault(fault, &[]) else { return };
    if let Some((mut teller, _)) = teller(qp, hub, outgoing, None) {
        teller.whole(UntaggedOp::Terminate, &terminate);
    }
}

/// The slot that says a request with bytes.
fn said(op: &SendOp, flags: SendFlags, length: u32) -> SlotHeader {
    let (opcode, imm, raddr, rkey) = shape(op);
    let solicited = flags.contains(SendFlags::SOLICITED);
    let flags = if solicited { flag::SOLICITED } else { 0 };
    SlotHeader { opcode, flags, imm, raddr, rkey, length, ..SlotHeader::default() }
}

/// Reads from a list of a work request. What may not be read any more is shown as zeros.
fn read_list(regions: &Regions, pd: u32, list: &[quipu_mem::Sge], offset: u32, place: &mut [u8]) {
    if regions.gather(pd, list, u64::from(offset), place).is_err() {
        place.fill(0);
    }
}

/// Reads from where the peer wrote to or reads from, likewise.
fn read_remote(
    regions: &Regions,
    (pd, num): (u32, QpNum),
    (key, addr): (u32, u64),
    right: Access,
    place: &mut [u8],
) {
    match regions.remote(pd, num.0, Key(key), addr, place.len() as u64, right) {
        Ok(span) => span.read_into(0, place),
        Err(_) => place.fill(0),
    }
}
