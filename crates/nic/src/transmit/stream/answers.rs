//! Answers to what the peer has asked for, and refusals, as RDMAP messages.

use quipu_iwarp::Staged;
use quipu_iwarp::wire::mpa::LENGTH_LEN;
use quipu_iwarp::wire::rdmap::{AtomicResponse, ReadRequest, TaggedOp, UntaggedOp};
use quipu_iwarp::wire::{Payload, Stag, ddp};
use quipu_mem::{Key, Regions};

use super::{REQUEST_LEN, Step};
use crate::adapter::Hub;
use crate::probe::{Probe, Stage};
use crate::qp::{Path, Qp};
use crate::responder::{self, Refusal};
use crate::stream::{Answer, StreamPath};
use crate::transmit::{Gather, lanes};
use crate::types::Access;

/// Writes the next piece of the oldest answer owed.
pub(super) fn answer<P: Probe>(
    qp: &mut Qp,
    hub: &mut Hub<P>,
    out: &mut [u8],
    gather: &mut Gather,
) -> Step {
    let num = qp.num.0;
    let may_stay = !hub.probe.watches();
    let Path::Stream(stream) = &mut qp.path else { return Step::Nothing };
    match answer_piece(stream, &hub.regions, num, out, may_stay.then_some(gather)) {
        Ok(Some(staged)) => {
            hub.probe.stage(Stage::GetData, staged.payload as usize);
            let (payload, bytes) = (staged.payload, staged.bytes);
            lanes::charge(qp, hub, payload);
            let Path::Stream(stream) = &mut qp.path else { return Step::Wrote(bytes) };
            if stream.answers.is_empty()
                && let Some(refusal) = stream.refusal.take()
            {
                responder::refuse(qp, hub, refusal);
            }
            Step::Wrote(staged.bytes)
        }
        Ok(None) => Step::Nothing,
        Err(refusal) => {
            refuse(qp, hub, refusal);
            Step::Nothing
        }
    }
}

/// Writes the next piece of the oldest answer that queue pair `num` owes; `None` if it owes none,
/// or if there is no room. Key and rights are checked again for each piece, since the region may have been
/// deregistered meanwhile. Large ones stay in memory if there is a list to note them in.
pub(in crate::transmit) fn answer_piece(
    stream: &mut StreamPath,
    regions: &Regions,
    num: u32,
    out: &mut [u8],
    gather: Option<&mut Gather>,
) -> Result<Option<Staged>, Refusal> {
    let (sink_stag, sink_to, size, pd, rkey, addr, msg) = match stream.answers.front() {
        None => return Ok(None),
        Some(&Answer::Atomic { id, original }) => {
            if out.len() < stream.tx.fpdu_bound(AtomicResponse::LEN) {
                return Ok(None);
            }
            let mut msg = stream.tx.begin_untagged(UntaggedOp::AtomicResponse, 0);
            let response = AtomicResponse { id, original };
            let written = stream.tx.whole(&mut msg, out, &response);
            return Ok(written.map(|bytes| {
                stream.answers.pop_front();
                Staged { bytes, payload: 0, last: true }
            }));
        }
        Some(&Answer::Read { sink_stag, sink_to, size, pd, rkey, addr, msg, .. }) => {
            (sink_stag, sink_to, size, pd, rkey, addr, msg)
        }
    };
    let begin = || stream.tx.begin_tagged(TaggedOp::ReadResponse, Stag(sink_stag), sink_to);
    let mut msg = msg.unwrap_or_else(begin);
    let done = msg.offset();
    let (from, left) = (addr.wrapping_add(u64::from(done)), size - done);
    let source = regions
        .remote(pd, num, Key(rkey), from, u64::from(left), Access::REMOTE_READ)
        .map_err(Refusal::Access)?;
    let staged = match gather.filter(|gather| stream.tx.is_bare() && gather.wants(left)) {
        Some(gather) if !gather.has_room() => None,
        Some(gather) => stream.tx.frame(&mut msg, out, left).map(|frame| {
            gather.push(frame.head, &source.sub(0, frame.staged.payload as usize));
            frame.staged
        }),
        None => stream.tx.segment(&mut msg, out, left, |place| source.read_into(0, place)),
    };
    let Some(staged) = staged else { return Ok(None) };
    if staged.last {
        stream.answers.pop_front();
    } else if let Some(Answer::Read { msg: kept, .. }) = stream.answers.front_mut() {
        *kept = Some(msg);
    }
    Ok(Some(staged))
}

/// Ends the connection over an answer that can no longer be given, or another fault of this end's.
pub(crate) fn refuse<P: Probe>(qp: &mut Qp, hub: &mut Hub<P>, refusal: Refusal) {
    if let Path::Stream(stream) = &mut qp.path {
        let fault = crate::receive::stream::fault_of(refusal);
        let request = stream.answers.front().and_then(request_of);
        let fpdu = request.as_ref().map_or(&[][..], |fpdu| &fpdu[..]);
        stream.terminate = quipu_iwarp::terminate::for_fault(fault, fpdu);
    }
    responder::refuse(qp, hub, refusal);
}

/// How the FPDU began that asked for `answer`, which the peer is told if that cannot be given.
fn request_of(answer: &Answer) -> Option<[u8; REQUEST_LEN]> {
    let &Answer::Read { msn, sink_stag, sink_to, size, rkey, addr, .. } = answer else {
        return None;
    };
    let mut fpdu = [0; REQUEST_LEN];
    let (length, ulpdu) = fpdu.split_at_mut(LENGTH_LEN);
    length.copy_from_slice(&(ulpdu.len() as u16).to_be_bytes());
    let (header, payload) = ulpdu.split_at_mut(ddp::UNTAGGED_LEN);
    let op = UntaggedOp::ReadRequest;
    ddp::Untagged { last: true, rsvd_ulp: op.octet(), ulp: 0, qn: op.queue(), msn, mo: 0 }
        .emit(header);
    let (sink_stag, source_stag) = (Stag(sink_stag), Stag(rkey));
    ReadRequest { sink_stag, sink_to, size, source_stag, source_to: addr }.emit(payload);
    Some(fpdu)
}
