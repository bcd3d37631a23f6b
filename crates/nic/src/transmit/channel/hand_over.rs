//! Handing over the bytes of a request that the peer cannot fetch by reference.

use crate::adapter::Hub;
use crate::channel::{ASKED_MOST, Other};
use crate::link::{FETCHED_MAX, LinkMessage};
use crate::probe::Probe;
use crate::qp::{Path, Qp};
use crate::queue::SendWqe;

/// Hands over what the peer could not fetch of a request, and refers to nothing from now on.
#[cold]
pub(crate) fn hand_over<P: Probe>(
    qp: &mut Qp,
    hub: &mut Hub<P>,
    sequence: u32,
    offset: u32,
    len: u32,
) {
    let bytes = requested(qp, hub, sequence, offset, len).unwrap_or_default();
    let Path::Channel(path) = &mut qp.path else { return };
    let Other::Linked { link, .. } = path.other else { return };
    path.carries = true;
    if !bytes.is_empty() {
        path.handed = Some((sequence, offset + len));
    }
    let mut hand = |offset: usize, bytes: &[u8]| {
        let (tag, offset, bytes) = (path.peer_tag, offset as u32, bytes.to_vec());
        hub.link_send(link, LinkMessage::Fetched { tag, sequence, offset, bytes });
    };
    if bytes.is_empty() {
        hand(offset as usize, &[]);
    }
    for (at, piece) in bytes.chunks(FETCHED_MAX).enumerate() {
        hand(offset as usize + at * FETCHED_MAX, piece);
    }
}

/// The bytes of a request that is not executed yet, or is being transmitted. None are handed over twice, nor
/// many at once: a peer does not choose how much is copied for it.
fn requested<P>(qp: &Qp, hub: &Hub<P>, sequence: u32, offset: u32, len: u32) -> Option<Vec<u8>> {
    let Path::Channel(path) = &qp.path else { return None };
    let again = path.handed.is_some_and(|(last, end)| {
        let ahead = sequence.wrapping_sub(last) as i32;
        ahead < 0 || (ahead == 0 && offset < end)
    });
    if again || len > ASKED_MOST {
        return None;
    }
    let begun = (qp.requester.offset > 0).then_some(qp.sq.next);
    // What was moved directly has no number of its own.
    let is_it = |wqe: &SendWqe| wqe.first_request == sequence && wqe.end_request != sequence;
    let mut all = qp.sq.in_progress().chain(begun);
    let position = all.find(|&position| is_it(qp.sq.wqe(position)))?;
    let wqe = qp.sq.wqe(position);
    let fits = offset.checked_add(len).is_some_and(|end| end <= wqe.length);
    if !fits || wqe.wants_answer() || qp.sq.inline(position).is_some() {
        return None;
    }
    let mut bytes = vec![0; len as usize];
    let mut at = 0;
    let list = qp.sq.sges(position);
    for piece in hub.regions.pieces(qp.pd_number(), list, offset.into(), len.into(), false) {
        let piece = piece.ok()?;
        piece.read_into(0, &mut bytes[at..at + piece.len()]);
        at += piece.len();
    }
    Some(bytes)
}
