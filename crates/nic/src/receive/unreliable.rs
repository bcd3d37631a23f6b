//! Reception of unreliable connections (IBA 9.8.2): a message that cannot be executed is dropped from there
//! to its end, and nobody is told.

use quipu_iwarp::{Segment, SendKind};
use quipu_mem::ring::SlotHeader;

use super::{channel, replies, stream};
use crate::adapter::Hub;
use crate::channel::{flag, request};
use crate::probe::Probe;
use crate::qp::Qp;
use crate::responder;

/// Executes the slot at the front of a channel, or drops it.
pub(super) fn slot<P: Probe>(
    qp: &mut Qp,
    hub: &mut Hub<P>,
    header: &SlotHeader,
) -> Result<channel::Front, channel::End> {
    use channel::{End, Front};
    use request::{SEND, SEND_IMM, WRITE, WRITE_IMM};
    if !matches!(header.opcode, SEND | SEND_IMM | WRITE | WRITE_IMM) {
        return Err(End::Corrupt);
    }
    if !qp.responder.dropping {
        match channel::execute(qp, hub, header) {
            Err(End::Refused(refusal)) if refusal.is_dropped() => {}
            other => return other,
        }
    }
    let last = header.flags & flag::MORE == 0;
    let path = channel::path(qp)?;
    let carried = channel::checked_carried(path, header)?;
    channel::release(path, carried, header.length)?;
    qp.responder.dropping = !last;
    qp.responder.receive.placed = 0;
    qp.responder.write_len = 0;
    if last {
        responder::executed(qp);
    }
    Ok(Front::Done)
}

/// Executes a segment of a stream, or drops it. No write is known behind one that was dropped, so that the
/// immediate which tells of it is dropped as well.
pub(super) fn segment<P: Probe>(
    qp: &mut Qp,
    hub: &mut Hub<P>,
    segment: Segment<'_>,
) -> Result<(), stream::End> {
    use stream::End;
    if !segment.is_request() {
        return match segment {
            Segment::Terminate(_) => stream::execute(qp, hub, segment),
            // Nothing is acknowledged or answered here.
            _ => Err(replies::UNASKED),
        };
    }
    let dropping = match segment {
        Segment::Write { .. } => qp.responder.dropping_write,
        // An operation of reliable connections.
        Segment::Send { kind: SendKind::Invalidate(_), .. } => true,
        _ => qp.responder.dropping,
    };
    if !dropping {
        match stream::execute(qp, hub, segment) {
            Err(End::Refused(refusal)) if refusal.is_dropped() => {}
            other => return other,
        }
    }
    let (goes_on, responder) = (!segment.ends_request(), &mut qp.responder);
    match segment {
        Segment::Write { .. } => (responder.dropping_write, responder.write_len) = (goes_on, 0),
        Segment::Send { .. } => responder.dropping = goes_on,
        // Between its segments a Send may meet others, which do not end it.
        _ => {}
    }
    Ok(())
}
