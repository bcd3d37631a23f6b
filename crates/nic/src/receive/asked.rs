//! Bytes that a request refers to and that the kernel does not let be fetched. Access to the memory of a
//! process is found out once, when a link is made; a process that changes its user, or says that nobody may
//! trace it, takes it back later, and some memory it never shows (that of devices, `memfd_secret`). Its own
//! engine is asked then.

use super::channel::{End, path};
use crate::adapter::Hub;
use crate::channel::{ASKED_MOST, Asked, Other};
use crate::link::LinkMessage;
use crate::qp::{Path, Qp};
use crate::responder::Refusal;

/// What was asked for of the request at the front, from `offset` on, if it was and has come.
pub(super) fn take(qp: &mut Qp, offset: u32) -> Result<Option<Vec<u8>>, End> {
    let sequence = qp.responder.executed;
    let path = path(qp)?;
    let Some(asked) = path.asked.take_if(|asked| !asked.is_open()) else {
        return if path.asked.is_some() { Err(End::Absent) } else { Ok(None) };
    };
    if asked.denied || (asked.sequence, asked.offset) != (sequence, offset) {
        return Err(Refusal::Failed.into());
    }
    Ok(Some(asked.bytes))
}

/// Asks for `len` bytes, or some of them. The request has to wait.
#[cold]
pub(super) fn ask<P>(qp: &mut Qp, hub: &mut Hub<P>, offset: u32, len: u32) -> End {
    let (sequence, len) = (qp.responder.executed, len.min(ASKED_MOST));
    let Path::Channel(path) = &mut qp.path else { return End::Over };
    let Other::Linked { link, .. } = path.other else { return Refusal::Failed.into() };
    let (bytes, denied) = (Vec::new(), false);
    path.asked = Some(Box::new(Asked { sequence, offset, len, bytes, denied }));
    hub.link_send(link, LinkMessage::Fetch { tag: path.peer_tag, sequence, offset, len });
    End::Absent
}

/// The peer hands some of them over; whether the request need not wait any longer.
pub(crate) fn take_in(qp: &mut Qp, sequence: u32, offset: u32, bytes: &[u8]) -> bool {
    let Path::Channel(path) = &mut qp.path else { return false };
    let Some(asked) = path.asked.as_mut().filter(|asked| asked.is_open()) else { return false };
    let left = asked.len as usize - asked.bytes.len();
    let next = asked.offset.wrapping_add(asked.bytes.len() as u32);
    asked.denied =
        bytes.is_empty() || bytes.len() > left || (sequence, offset) != (asked.sequence, next);
    asked.bytes.extend_from_slice(bytes);
    !asked.is_open()
}
