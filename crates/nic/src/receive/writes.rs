//! Writes that come through a channel.

use quipu_mem::ring::SlotHeader;

use super::asked;
use super::channel::{
    End, Front, begin, by_reference, checked_carried, copy_carried, end_stall, finish, path,
    references, release, stall,
};
use crate::adapter::Hub;
use crate::channel::{CHUNK, Carried, flag, request};
use crate::probe::{Probe, Stage};
use crate::qp::{Path, Qp};
use crate::responder::{self, Refusal};
use crate::types::{Access, WcExtra, WcOpcode};
use crate::unordered::{self, Place};
use crate::watch;

/// Whether what was written before a slot must be placed before it is executed. Of a write with immediate
/// data only the last one ends in a completion.
pub(super) fn are_ordered_by(header: &SlotHeader) -> bool {
    let more = header.flags & flag::MORE != 0;
    !(header.opcode == request::WRITE || (header.opcode == request::WRITE_IMM && more))
}

/// Puts the bytes of a slot where a write wants them; `true` when all are there.
fn place_write<P: Probe>(qp: &mut Qp, hub: &mut Hub<P>, header: &SlotHeader) -> Result<bool, End> {
    let carried = checked_carried(path(qp)?, header)?;
    hub.probe.stage(Stage::PutData, header.length as usize);
    let done = match hub.unordered.is_some() && place_unordered(qp, hub, header, carried)? {
        true => true,
        false => place_in_order(qp, hub, header, carried)?,
    };
    if !done {
        return Ok(false);
    }
    release(path(qp)?, carried, header.length)?;
    qp.responder.write_len = qp.responder.write_len.wrapping_add(header.length);
    qp.responder.counters.bytes_in += u64::from(header.length);
    qp.responder.counters.writes += u64::from(header.flags & flag::MORE == 0);
    Ok(true)
}

/// Places the bytes of a slot, a chunk at a time where they are referred to; `true` when all are there.
fn place_in_order<P: Probe>(
    qp: &mut Qp,
    hub: &mut Hub<P>,
    header: &SlotHeader,
    carried: Carried,
) -> Result<bool, End> {
    let span =
        responder::remote(qp, hub, header.rkey, header.raddr, header.length, Access::REMOTE_WRITE)?;
    if carried == Carried::Reference {
        let done = path(qp)?.front_done;
        let left = header.length.checked_sub(done).ok_or(End::Corrupt)?;
        let offset = qp.responder.write_len.wrapping_add(done);
        let asked = asked::take(qp, offset)?;
        let len = asked.as_ref().map_or(left.min(CHUNK), |bytes| bytes.len() as u32);
        if len > left {
            // What was asked for was more: the peer has changed the slot since.
            return Err(End::Corrupt);
        }
        let list = references(path(qp)?, header);
        let remote = list.part(u64::from(done), u64::from(len)).ok_or(End::Corrupt)?;
        let place = span.sub(done as usize, len as usize);
        if let Some(bytes) = asked {
            place.write_from(0, &bytes);
        } else {
            let local = [place.as_raw()];
            match by_reference(qp, hub, |memory| memory.read(remote.as_slice(), &local)) {
                Err(End::Absent) => {
                    // The peer is asked by its number, which is that of this one when none is held.
                    if qp.responder.holding {
                        unordered::settle(qp, hub);
                    }
                    return Err(asked::ask(qp, hub, offset, len));
                }
                moved => moved?,
            }
        }
        path(qp)?.front_done = done + len;
        return Ok(done + len == header.length);
    }
    let Path::Channel(path) = &qp.path else { return Err(End::Over) };
    match copy_carried(&path.channel, carried, 0, span) {
        true => Ok(true),
        false => Err(End::Corrupt),
    }
}

/// Places a part of the bytes of a slot now, and has the others held. `false` if the slot is not of that
/// kind; what is held of other writes to the same place is then done with.
#[cold]
fn place_unordered<P: Probe>(
    qp: &mut Qp,
    hub: &mut Hub<P>,
    header: &SlotHeader,
    carried: Carried,
) -> Result<bool, End> {
    let (rkey, addr, len) = (header.rkey, header.raddr, header.length);
    let at = responder::remote(qp, hub, rkey, addr, len, Access::REMOTE_WRITE)?.as_raw().0;
    // A capture reads what was written from where it was written to.
    let in_order = are_ordered_by(header) || hub.probe.watches();
    if in_order || carried == Carried::Reference {
        unordered::give_way(hub, at, len as usize);
        return Ok(false);
    }
    let mut bytes = vec![0; len as usize];
    let incoming = &path(qp)?.channel.incoming;
    if carried == Carried::Inline {
        incoming.requests.payload().read_into(0, &mut bytes);
    } else {
        let position = incoming.request_bytes.position();
        incoming.request_bytes.read_into(position, &mut bytes)?;
    }
    let last = header.flags & flag::MORE == 0 && header.opcode == request::WRITE;
    unordered::write(qp, hub, Place { rkey, addr, at }, &bytes, last);
    Ok(true)
}

pub(super) fn write<P: Probe>(
    qp: &mut Qp,
    hub: &mut Hub<P>,
    header: &SlotHeader,
) -> Result<Front, End> {
    if !place_write(qp, hub, header)? {
        return Ok(Front::Again);
    }
    if header.flags & flag::MORE == 0 {
        if hub.probe.watches() {
            watch::received(qp, hub, header, qp.responder.write_len);
        }
        qp.responder.write_len = 0;
        match qp.responder.holding {
            true => unordered::execute(qp, hub),
            false => responder::executed(qp),
        }
    }
    Ok(Front::Done)
}

pub(super) fn write_imm<P: Probe>(
    qp: &mut Qp,
    hub: &mut Hub<P>,
    header: &SlotHeader,
) -> Result<Front, End> {
    let last = header.flags & flag::MORE == 0;
    // Without a receive, nothing is written yet.
    responder::remote(qp, hub, header.rkey, header.raddr, header.length, Access::REMOTE_WRITE)?;
    if last && !finds_receive(qp, hub, header)? {
        return stall(qp, hub);
    }
    if !place_write(qp, hub, header)? {
        return Ok(Front::Again);
    }
    if !last {
        return Ok(Front::Done);
    }
    // A request that is refused consumes no receive. The right to write may be withdrawn until all bytes are
    // there, so the receive is taken after them.
    if !begin(qp, hub, header)? {
        return Err(Refusal::NoReceive.into());
    }
    let byte_len = std::mem::take(&mut qp.responder.write_len);
    let extra = WcExtra::Imm(header.imm);
    finish(qp, hub, WcOpcode::RecvRdmaWithImm, byte_len, extra, header)
}

/// Whether [`begin`] finds a receive.
fn finds_receive<P: Probe>(
    qp: &mut Qp,
    hub: &mut Hub<P>,
    header: &SlotHeader,
) -> Result<bool, End> {
    if qp.qp_type.names_srq() && !qp.responder.receiving {
        crate::xrc::choose(qp, hub, header.ack)?;
    }
    let found = responder::has_receive(qp, hub);
    if found {
        end_stall(path(qp)?);
    }
    Ok(found)
}
