//! Answers to reads that a peer on this host asks for: they wait for a turn of their queue pair, as its own
//! requests do.
//!
//! A channel has at most one such read at its front ([`ChannelPath::owed`](crate::channel::ChannelPath)). It
//! counts as something that the queue pair has to transmit. What is before it and after it in the channel
//! keeps its order.

use super::{charge_turn, end_turn, park, room, service_level};
use crate::adapter::Hub;
use crate::doorbell;
use crate::probe::Probe;
use crate::qp::{Path, Qp};
use crate::receive;

/// Bytes that are asked for in addition where more requests may wait in the channel. What they do not use is
/// given back at once.
const READ_AHEAD: u32 = 64 << 10;

/// What a read may do that is at the front of a channel.
pub(crate) enum Answer {
    /// So many bytes may go.
    Go(u32),
    /// It waits for a turn.
    Wait,
    /// Packets of this service level are discarded.
    Discarded,
}

/// How much of the `left` bytes of the read at the front may go now.
#[inline]
pub(crate) fn may_answer<P>(qp: &mut Qp, hub: &mut Hub<P>, left: u32) -> Answer {
    if hub.qos.is_none() || left == 0 { Answer::Go(left) } else { ask_turn(qp, hub, left) }
}

#[cold]
fn ask_turn<P>(qp: &mut Qp, hub: &mut Hub<P>, left: u32) -> Answer {
    let sl = service_level(qp, hub);
    if hub.qos.as_ref().is_some_and(|qos| qos.discards(sl)) {
        owe(qp, 0);
        return Answer::Discarded;
    }
    if qp.turn.left > 0 {
        owe(qp, left);
        return Answer::Go(left.min(room(qp, hub)));
    }
    let Path::Channel(path) = &mut qp.path else { return Answer::Wait };
    let more = if path.channel.incoming.requests.has_backlog() { READ_AHEAD } else { 0 };
    path.owed = left.saturating_add(more);
    park(qp, hub);
    Answer::Wait
}

fn owe(qp: &mut Qp, bytes: u32) {
    if let Path::Channel(path) = &mut qp.path {
        path.owed = bytes;
    }
}

/// The read at the front has been answered by so many bytes, and has `left` ones more.
#[inline]
pub(crate) fn charge_answer<P>(qp: &mut Qp, hub: &mut Hub<P>, bytes: u32, left: u32) {
    if hub.qos.is_some() && bytes > 0 {
        owe(qp, left);
        charge_turn(qp, hub, bytes);
    }
}

/// Has a queue pair use its turn: for the read that its peer waits for, and for its own requests. Which of
/// them goes first changes from turn to turn.
pub(super) fn use_turn<P: Probe>(qp: &mut Qp, hub: &mut Hub<P>) {
    let has_own = qp.sq.has_waiting();
    let Path::Channel(path) = &mut qp.path else { return doorbell::kick(qp, hub) };
    if path.owed == 0 {
        return doorbell::kick(qp, hub);
    }
    path.answers_last = !path.answers_last && has_own;
    if path.answers_last {
        doorbell::kick(qp, hub);
        receive::channel::run(qp, hub);
    } else {
        receive::channel::run(qp, hub);
        doorbell::kick(qp, hub);
    }
    if !matches!(qp.path, Path::Channel(_)) {
        return;
    }
    if qp.turn.left > 0 {
        end_turn(qp, hub);
    }
    // A look at the channel ends after a number of bytes.
    if matches!(&qp.path, Path::Channel(path) if path.owed > 0) {
        park(qp, hub);
    }
}
