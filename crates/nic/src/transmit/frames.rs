//! Transmission of QPIP: a frame for whoever's turn it is.
//!
//! Posting tells TCP that the stream goes on ([`hand_over`]). The stack decides what goes out when, and
//! writes the headers; what it names of a stream is gathered from the work requests that are there, each time
//! that it is sent.

use std::ops::Range;

use quipu_inet::stack::{Departure, Stack, TcpId};
use quipu_inet::tcp::SendError;

use crate::adapter::{Adapter, Hub};
use crate::fate::{self, Met};
use crate::probe::{Probe, Stage};
use crate::qp::{Path, Qp};
use crate::qpip::path::Closing;
use crate::qpip::{FrameOut, Owner, connections, udp};
use crate::requester;
use crate::types::{Time, WcStatus};

use super::lanes;

/// How many frames to its own addresses an adapter takes back before its caller has a turn.
const MOST_LOOPED: u32 = 32;

/// What came of a turn.
pub(crate) enum Turn {
    /// A frame for the link stands in the buffer.
    Frame(FrameOut),
    /// A frame of so many octets for this adapter stands there.
    Looped(usize),
    /// Something happened, and there is no frame of it.
    Again,
    /// There is nothing to send.
    Nothing,
}

impl<P: Probe> Adapter<P> {
    /// Writes the next frame of TCP and UDP queue pairs, and of the stack itself, into `out`, which has room
    /// for the link's MTU and 14 octets, or, where the link cuts segments itself, for 65 549 octets. `None`:
    /// there is none now. What is for the adapter's own addresses it takes itself, a bounded number in each
    /// call: when [`has_frames`](Self::has_frames) is true afterwards, there is more of it.
    pub fn transmit_frame(&mut self, now: Time, out: &mut [u8]) -> Option<FrameOut> {
        self.hub.now = now;
        if !self.hub.ready.is_empty() {
            self.fill_streams();
        }
        let mut looped = 0;
        let frame = loop {
            let inet = self.hub.inet.as_mut()?;
            self.hub.probe.stage(Stage::Schedule, 0);
            inet.datagrams_turn = !inet.datagrams_turn && !inet.datagrams.is_empty();
            let turn = match inet.datagrams_turn {
                true => self.transmit_datagrams(out),
                false => self.transmit_segment(out),
            };
            match turn {
                Turn::Frame(frame) => break Some(frame),
                Turn::Looped(len) => {
                    self.take_looped(now, &out[..len]);
                    looped += 1;
                    if looped == MOST_LOOPED {
                        break None;
                    }
                }
                Turn::Again => {}
                // Each turn of a datagram takes one from the list: this ends.
                Turn::Nothing if self.has_datagrams() => {}
                Turn::Nothing => break None,
            }
        };
        // A connection that was told something may be over with what it has said.
        self.take_inet_events();
        self.hub.probe.stage(Stage::Update, 0);
        frame
    }

    /// Whether [`transmit_frame`](Self::transmit_frame) may have something.
    #[inline]
    #[must_use]
    pub fn has_frames(&self) -> bool {
        self.hub
            .inet
            .as_ref()
            .is_some_and(|inet| inet.stack.wants_transmit() || !inet.datagrams.is_empty())
    }

    fn has_datagrams(&self) -> bool {
        self.hub.inet.as_ref().is_some_and(|inet| !inet.datagrams.is_empty())
    }

    fn transmit_segment(&mut self, out: &mut [u8]) -> Turn {
        let hub = &mut self.hub;
        let Some(inet) = &mut hub.inet else { return Turn::Nothing };
        let Some(departure) = inet.stack.poll_transmit(hub.now.0, out) else {
            return Turn::Nothing;
        };
        hub.probe.stage(Stage::Headers, departure.headers);
        let owner = departure.of.and_then(|connection| inet.owner(connection));
        let range = departure.payload.clone();
        if range.is_empty() {
            return hub.dispatch(&departure, out);
        }
        let payload = out.get_mut(departure.headers..departure.len());
        let (Some(owner), Some(payload)) = (owner, payload) else { return Turn::Again };
        let id = match (owner, departure.of) {
            (Owner::Qp(id), _) => id,
            (Owner::Stream, Some(connection)) if inet.copy_sent(connection, range, payload) => {
                return hub.dispatch(&departure, out);
            }
            _ => return Turn::Again,
        };
        let Some((qp, hub)) = self.qp_and_hub(id) else { return Turn::Again };
        match gather(qp, hub, range, payload) {
            Ok(()) => hub.dispatch(&departure, out),
            Err(position) => {
                // Its memory is not there any more. What the peer has of it cannot be taken back.
                requester::fail_at(qp, hub, position, WcStatus::LocProtErr);
                Turn::Again
            }
        }
    }

    fn transmit_datagrams(&mut self, out: &mut [u8]) -> Turn {
        let Some(inet) = &mut self.hub.inet else { return Turn::Nothing };
        let Some(id) = inet.datagrams.pop_front() else { return Turn::Nothing };
        match self.qp_and_hub(id) {
            Some((qp, hub)) => udp::transmit(qp, hub, out),
            None => Turn::Again,
        }
    }
}

impl<P: Probe> Hub<P> {
    /// A frame is whole: it gets its checksum here, unless the link does that, or no link sees it.
    pub(crate) fn dispatch(&mut self, departure: &Departure, out: &mut [u8]) -> Turn {
        if departure.loops {
            self.probe.stage(Stage::Send, departure.len());
            return Turn::Looped(departure.len());
        }
        let mut frame = FrameOut::from(departure);
        let seals = self.inet.as_ref().is_some_and(|inet| inet.seals);
        if let Some(checksum) = frame.checksum.take_if(|_| seals) {
            Stack::seal(&mut out[..frame.len], checksum);
        }
        self.probe.stage(Stage::Send, frame.len);
        Turn::Frame(frame)
    }
}

/// Copies a range of the stream out of the work requests that it is of.
///
/// # Errors
/// The place of the request whose memory is not accessible.
fn gather<P: Probe>(
    qp: &mut Qp,
    hub: &mut Hub<P>,
    range: Range<u64>,
    mut out: &mut [u8],
) -> Result<(), u32> {
    let pd = qp.pd_number();
    let Qp { path: Path::Tcp(path), sq, .. } = qp else { return Err(qp.sq.head) };
    let mut at = range.start;
    while !out.is_empty() {
        let position = path.sends.find(sq.head, sq.next, at).ok_or(sq.head)?;
        let end = path.sends.end(position);
        let offset = at + u64::from(sq.wqe(position).length) - end;
        hub.probe.stage(Stage::GetWr, 0);
        let (piece, rest) = out.split_at_mut(((end - at) as usize).min(out.len()));
        match sq.inline(position) {
            Some(bytes) => {
                let offset = offset as usize;
                piece.copy_from_slice(&bytes[offset..offset + piece.len()]);
            }
            None => {
                hub.regions.gather(pd, sq.sges(position), offset, piece).map_err(|_| position)?
            }
        }
        hub.probe.stage(Stage::GetData, piece.len());
        at += piece.len() as u64;
        out = rest;
    }
    Ok(())
}

/// The doorbell of a TCP queue pair: TCP learns of the requests that wait, as many as it takes. When there
/// are none from before the program has closed, it learns that too.
pub(crate) fn hand_over<P: Probe>(qp: &mut Qp, hub: &mut Hub<P>) {
    hand_over_requests(qp, hub);
    if hub.qos.is_some() {
        lanes::end_turn(qp, hub);
    }
    let next = qp.sq.next;
    let (Path::Tcp(path), Some(inet)) = (&mut qp.path, &mut hub.inet) else { return };
    if let Some(connection) = path.connection
        && path.closing == Closing::Wanted
        && path.end == next
        && path.unhanded == 0
    {
        path.closing = Closing::Told;
        inet.stack.close(connection);
    }
}

/// Hands over what is left of the last request that TCP knows a part of; whether nothing is.
fn hand_over_rest<P>(qp: &mut Qp, hub: &mut Hub<P>) -> bool {
    loop {
        let room = lanes::room(qp, hub);
        let has_turn = lanes::has_turn(qp, hub);
        let (Path::Tcp(path), Some(inet)) = (&mut qp.path, &mut hub.inet) else { return false };
        let Some(connection) = path.connection.filter(|_| path.unhanded > 0) else { return true };
        if !has_turn {
            lanes::park(qp, hub);
            return false;
        }
        let piece = path.unhanded.min(room);
        let is_last = piece == path.unhanded;
        // They go on when some are acknowledged; what has happened to a connection is on its way.
        if inet.stack.send(connection, piece.into(), is_last).is_err() {
            return false;
        }
        path.unhanded -= piece;
        lanes::charge(qp, hub, piece);
    }
}

fn hand_over_requests<P: Probe>(qp: &mut Qp, hub: &mut Hub<P>) {
    while hand_over_rest(qp, hub)
        && let Some(connection) = standing(qp)
        && requester::may_begin(qp)
    {
        if !lanes::has_turn(qp, hub) {
            return lanes::park(qp, hub);
        }
        let position = qp.sq.next;
        let &crate::queue::SendWqe { flags, length, .. } = qp.sq.wqe(position);
        match fate::meet(qp, hub, flags) {
            Met::Nothing => {}
            Met::Wait => break,
            Met::Failure(status) => return requester::fail_next(qp, hub, status),
        }
        let piece = length.min(lanes::room(qp, hub));
        let Some(inet) = &mut hub.inet else { return };
        // An empty one has nothing that TCP could acknowledge: it is done when those before it are.
        let sent = match length {
            0 => Ok(0),
            _ => inet.stack.send(connection, u64::from(piece), piece == length),
        };
        match sent {
            Ok(_) => {
                begin(qp, position, length);
                if let Path::Tcp(path) = &mut qp.path {
                    path.unhanded = length - piece;
                }
                lanes::charge(qp, hub, piece);
            }
            // They go on when some are acknowledged.
            Err(SendError::TooMany) => break,
            Err(SendError::TooLong | SendError::Empty) => {
                return requester::fail_next(qp, hub, WcStatus::LocLenErr);
            }
            // What has happened to it is on its way.
            Err(SendError::Closed) => return,
        }
        if length == 0 {
            complete(qp, hub);
        }
    }
}

/// The connection that the next request is for: none behind the end.
fn standing(qp: &Qp) -> Option<TcpId> {
    let Path::Tcp(path) = &qp.path else { return None };
    let over = path.closing != Closing::Not && path.end == qp.sq.next;
    path.connection.filter(|_| !over)
}

/// The request at `sq.next` is TCP's from now on.
fn begin(qp: &mut Qp, position: u32, length: u32) {
    if let Path::Tcp(path) = &mut qp.path {
        path.sends.push(position, length);
    }
    let started = qp.requester.started;
    let wqe = qp.sq.wqe_mut(position);
    wqe.first_request = started;
    wqe.end_request = started.wrapping_add(1);
    wqe.answered = true;
    qp.requester.started = started.wrapping_add(1);
    requester::transmitted(qp);
}

/// The peer has acknowledged everything before `offset`: requests up to it are done.
pub(crate) fn acknowledged<P: Probe>(qp: &mut Qp, hub: &mut Hub<P>, offset: u64) {
    let Path::Tcp(path) = &mut qp.path else { return };
    path.sends.acked = offset;
    complete(qp, hub);
    hand_over(qp, hub);
    connections::look_whether_closed(qp, hub);
}

/// Completes the requests all of whose octets are acknowledged.
fn complete<P: Probe>(qp: &mut Qp, hub: &mut Hub<P>) {
    let Path::Tcp(path) = &mut qp.path else { return };
    let done = qp.sq.in_progress().take_while(|&at| path.sends.end(at) <= path.sends.acked);
    if let Some(last) = done.last() {
        qp.requester.acked = qp.sq.wqe(last).end_request;
        requester::complete_done(qp, hub);
    }
}
