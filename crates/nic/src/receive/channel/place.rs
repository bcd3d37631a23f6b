//! Placing what a slot carries, or refers to, into the receive that is being filled.

use super::{End, by_reference, copy_carried, path, references};
use crate::adapter::Hub;
use crate::channel::{CHUNK, Carried, References};
use crate::probe::{Probe, Stage};
use crate::qp::{Path, Qp};
use crate::receive::asked;
use crate::responder::Refusal;
use quipu_mem::ring::SlotHeader;

/// Places bytes that are in the slot or the byte ring into the receive.
pub(super) fn place_carried<P: Probe>(
    qp: &mut Qp,
    hub: &mut Hub<P>,
    carried: Carried,
    offset: u64,
    len: u32,
) -> Result<(), End> {
    let pd = qp.recv_pd_number();
    hub.probe.stage(Stage::PutData, len as usize);
    let Qp { path: Path::Channel(path), responder, .. } = qp else { return Err(End::Over) };
    let end = offset + u64::from(len);
    if end > responder.receive.capacity() {
        return Err(Refusal::TooLong.into());
    }
    let mut at = 0;
    for piece in hub.regions.pieces(pd, &responder.receive.sges, offset, u64::from(len), true) {
        let piece = piece.map_err(|_| Refusal::Local)?;
        let piece_len = piece.len();
        if !copy_carried(&path.channel, carried, at, piece) {
            return Err(End::Corrupt);
        }
        at += piece_len;
    }
    responder.receive.placed = end;
    Ok(())
}

/// Reads bytes that the peer refers to into the receive, a chunk at a time; `true` when all are there.
pub(super) fn fetch_receive<P: Probe>(
    qp: &mut Qp,
    hub: &mut Hub<P>,
    header: &SlotHeader,
) -> Result<bool, End> {
    let done = path(qp)?.front_done;
    let left = header.length.checked_sub(done).ok_or(End::Corrupt)?;
    let offset = qp.responder.receive.placed;
    let asked = asked::take(qp, offset as u32)?;
    let len = asked.as_ref().map_or(left.min(CHUNK), |bytes| bytes.len() as u32);
    let list = references(path(qp)?, header);
    let remote = list.part(u64::from(done), u64::from(len)).ok_or(End::Corrupt)?;
    let end = offset + u64::from(len);
    if end > qp.responder.receive.capacity() {
        return Err(Refusal::TooLong.into());
    }
    if let Some(bytes) = asked {
        place_asked(qp, hub, offset, &bytes)?;
    } else {
        match read_receive(qp, hub, offset, &remote, len) {
            Err(End::Absent) => return Err(asked::ask(qp, hub, offset as u32, len)),
            moved => moved?,
        }
    }
    hub.probe.stage(Stage::PutData, len as usize);
    qp.responder.receive.placed = end;
    path(qp)?.front_done = done + len;
    Ok(done + len == header.length)
}

/// Puts bytes that were asked for into the receive.
#[cold]
fn place_asked<P>(qp: &Qp, hub: &Hub<P>, offset: u64, bytes: &[u8]) -> Result<(), End> {
    let (pd, list, len) = (qp.recv_pd_number(), &qp.responder.receive.sges, bytes.len() as u64);
    let mut at = 0;
    for piece in hub.regions.pieces(pd, list, offset, len, true) {
        let piece = piece.map_err(|_| Refusal::Local)?;
        piece.write_from(0, &bytes[at..at + piece.len()]);
        at += piece.len();
    }
    Ok(())
}

/// Reads `len` bytes from `remote` into the receive.
fn read_receive<P: Probe>(
    qp: &mut Qp,
    hub: &mut Hub<P>,
    offset: u64,
    remote: &References,
    len: u32,
) -> Result<(), End> {
    let mut local = std::mem::take(&mut hub.scratch);
    local.clear();
    let gathered = hub
        .regions
        .pieces(qp.recv_pd_number(), &qp.responder.receive.sges, offset, u64::from(len), true)
        .try_for_each(|piece| piece.map(|piece| local.push(piece.as_raw())));
    let moved = match gathered {
        Ok(()) => by_reference(qp, hub, |memory| memory.read(remote.as_slice(), &local)),
        Err(_) => Err(Refusal::Local.into()),
    };
    hub.scratch = local;
    moved
}
