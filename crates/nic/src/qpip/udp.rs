//! UDP queue pairs: bound to a port, each message one datagram to whomever its request names.
//!
//! A send completes when its datagram is written. One to a neighbour that is not known yet waits with those
//! behind it in the same queue, and holds nobody else up; if the neighbour cannot be found it is lost, as
//! datagrams may be, and completes.
//!
//! One that is longer than a packet of its path goes in parts, each made of the request's memory when the
//! link has room for it. No other datagram begins before it ends: a receiver keeps the parts of few.

use std::net::{IpAddr, SocketAddr};

use quipu_inet::stack::{
    BindError, Datagram, DatagramError, Departure, Parts, Payload, Stack, UdpId,
};
use quipu_wire::checksum::{Sum, sum};

use super::{Inet, Source, set};
use crate::adapter::{Adapter, Hub};
use crate::error::Fault;
use crate::fate::{self, Met};
use crate::probe::{Probe, Stage};
use crate::qp::{Path, Qp};
use crate::requester;
use crate::responder::{self, Finish, Refusal};
use crate::transmit::frames::Turn;
use crate::types::{QpId, QpState, WcExtra, WcOpcode, WcStatus};

/// Octets that are summed at a time: they are read again soon, and are to be in a cache then. Even.
const SUMMED: usize = 8 << 10;

/// What a queue pair of type UDP has beside its queues.
#[derive(Debug, Default)]
pub(crate) struct UdpPath {
    socket: Option<UdpId>,
    /// Whether it stands among those with something to send.
    listed: bool,
    /// The next hop that its next datagram waits for.
    unresolved: Option<IpAddr>,
    /// How far its next datagram has got, if that goes in parts.
    parts: Option<Parts>,
}

impl<P: Probe> Adapter<P> {
    /// Binds a queue pair to a UDP port of all addresses, 0 for one that is free, and takes it to RTS if it
    /// was in RESET or INIT. Answers with the port.
    ///
    /// # Errors
    /// The port is in use, none is free, the adapter has no packet link, or the queue pair is of another
    /// type, bound already, or in error.
    pub fn udp_bind(&mut self, id: QpId, port: u16) -> Result<u16, Fault> {
        let (qp, hub) = self.qp_and_hub(id).ok_or(Fault::NoSuchObject)?;
        let Path::Udp(path) = &mut qp.path else {
            return Err(Fault::Invalid("the queue pair is not of type UDP"));
        };
        if path.socket.is_some() || qp.state == QpState::Err {
            return Err(Fault::WrongState);
        }
        let inet = hub.attached()?;
        let (socket, port) = inet.stack.bind(port).map_err(|error| match error {
            BindError::InUse => Fault::Invalid("somebody is bound to that port already"),
            BindError::NoPort => Fault::Exhausted("UDP ports"),
        })?;
        set(&mut inet.bound, socket.index(), Some((socket, id)));
        path.socket = Some(socket);
        if matches!(qp.state, QpState::Reset | QpState::Init) {
            qp.state = QpState::Rts;
        }
        hub.counters.changes += 1;
        Ok(port)
    }

    /// A next hop has become known, or cannot be found.
    pub(super) fn neighbour(&mut self, next_hop: IpAddr, found: bool) {
        let Some(inet) = &mut self.hub.inet else { return };
        let waiting = std::mem::take(&mut inet.unresolved);
        for id in waiting {
            let Some((qp, hub)) = self.qp_and_hub(id) else { continue };
            let Path::Udp(path) = &mut qp.path else { continue };
            if path.unresolved != Some(next_hop) {
                if let (Some(_), Some(inet)) = (path.unresolved, &mut hub.inet) {
                    inet.unresolved.push(id);
                }
                continue;
            }
            path.unresolved = None;
            if !found {
                lose_next(qp, hub);
            }
            kick(qp, hub);
        }
    }
}

impl<P: Probe> Adapter<P> {
    /// Something has become of more next hops than could be told of: whoever waits for one asks anew.
    pub(super) fn neighbours(&mut self) {
        let Some(inet) = &mut self.hub.inet else { return };
        for id in std::mem::take(&mut inet.unresolved) {
            let Some((qp, hub)) = self.qp_and_hub(id) else { continue };
            if let Path::Udp(path) = &mut qp.path {
                path.unresolved = None;
            }
            kick(qp, hub);
        }
    }
}

/// Whether a request of a UDP queue pair can be sent at all.
///
/// # Errors
/// What is wrong with it.
pub(crate) fn check<P>(hub: &Hub<P>, to: SocketAddr, len: u64) -> Result<(), Fault> {
    if hub.inet.is_none() {
        return Err(Fault::Unsupported("the adapter is not attached to a network of IP"));
    }
    if len > Stack::max_datagram(to.ip()) as u64 {
        return Err(Fault::Invalid(
            "longer than a datagram can be (65507 octets; over IPv6, 65527)",
        ));
    }
    if to.port() == 0 {
        return Err(Fault::Invalid("a datagram to port 0"));
    }
    Ok(())
}

/// Puts a queue pair among those with something to send, unless it waits for a neighbour.
#[inline]
pub(crate) fn kick<P>(qp: &mut Qp, hub: &mut Hub<P>) {
    if let (Path::Udp(path), Some(inet)) = (&mut qp.path, &mut hub.inet)
        && path.unresolved.is_none()
        && !std::mem::replace(&mut path.listed, true)
    {
        match path.parts {
            Some(_) => inet.datagrams.push_front(qp.id),
            None => inet.datagrams.push_back(qp.id),
        }
    }
}

/// Writes the next datagram of a queue pair whose turn it is, or a part of it.
pub(crate) fn transmit<P: Probe>(qp: &mut Qp, hub: &mut Hub<P>, out: &mut [u8]) -> Turn {
    let Path::Udp(path) = &mut qp.path else { return Turn::Again };
    path.listed = false;
    let Some(socket) = path.socket else { return Turn::Again };
    let begun = path.parts.take();
    if !requester::may_begin(qp) {
        return Turn::Again;
    }
    if begun.is_none() {
        let flags = qp.sq.wqe(qp.sq.next).flags;
        match fate::meet(qp, hub, flags) {
            Met::Nothing => {}
            Met::Wait => return Turn::Again,
            Met::Failure(status) => {
                requester::send_queue_error(qp, hub, status);
                return Turn::Again;
            }
        }
    }
    let turn = compose(qp, hub, (socket, begun), out).unwrap_or_else(|error| {
        refuse(qp, hub, error);
        Turn::Again
    });
    if requester::may_begin(qp) {
        kick(qp, hub);
    }
    turn
}

/// Why nothing is written.
enum Stop {
    Refused(DatagramError),
    /// The memory of the request is not accessible.
    Memory,
}

impl From<DatagramError> for Stop {
    fn from(error: DatagramError) -> Self {
        Self::Refused(error)
    }
}

/// Writes the datagram of the request at `sq.next`, or the next part of it.
fn compose<P: Probe>(
    qp: &mut Qp,
    hub: &mut Hub<P>,
    (socket, begun): (UdpId, Option<Parts>),
    out: &mut [u8],
) -> Result<Turn, Stop> {
    let position = qp.sq.next;
    let (to, len) = (qp.sq.destination(position).address(), qp.sq.wqe(position).length as usize);
    let now = hub.now.0;
    let Some(inet) = &mut hub.inet else { return Ok(Turn::Nothing) };
    let (departure, parts) = match begun {
        Some(parts) => compose_part(qp, inet, now, parts, out)?,
        None => match inet.stack.compose_datagram(now, socket, to, 0, len, out) {
            Ok(departure) => (departure, None),
            Err(DatagramError::Long { .. }) => {
                let sum = sum_of(qp, hub, len, out)?;
                let Some(inet) = &mut hub.inet else { return Ok(Turn::Nothing) };
                let parts = inet.stack.cut_datagram(now, socket, to, 0, len, sum)?;
                compose_part(qp, inet, now, parts, out)?
            }
            Err(error) => return Err(error.into()),
        },
    };
    hub.probe.stage(Stage::Headers, departure.headers);
    hub.probe.stage(Stage::GetWr, 0);
    let from = departure.payload.start as usize;
    let payload = out.get_mut(departure.headers..departure.len()).ok_or(Stop::Memory)?;
    gather(qp, hub, from, payload)?;
    hub.probe.stage(Stage::GetData, departure.len() - departure.headers);
    let turn = hub.dispatch(&departure, out);
    match (&mut qp.path, parts) {
        (Path::Udp(path), Some(parts)) => path.parts = Some(parts),
        _ => requester::skip_local(qp, hub),
    }
    Ok(turn)
}

/// Writes the headers of the next part of a datagram; what is left of it then, if anything is.
fn compose_part(
    qp: &mut Qp,
    inet: &mut Inet,
    now: u64,
    mut parts: Parts,
    out: &mut [u8],
) -> Result<(Departure, Option<Parts>), DatagramError> {
    let composed = inet.stack.compose_part(now, &mut parts, out);
    // It has begun, and is finished even where nothing new may begin.
    qp.requester.stage = 1;
    match (composed, &mut qp.path) {
        (Ok(departure), _) => Ok((departure, (!parts.is_done()).then_some(parts))),
        (Err(error), Path::Udp(path)) => {
            path.parts = matches!(error, DatagramError::Unresolved { .. }).then_some(parts);
            Err(error)
        }
        (Err(error), _) => Err(error),
    }
}

/// Copies octets of the request at `sq.next`, from the one at `from` on.
fn gather<P>(qp: &Qp, hub: &mut Hub<P>, from: usize, out: &mut [u8]) -> Result<(), Stop> {
    let position = qp.sq.next;
    let Some(bytes) = qp.sq.inline(position) else {
        let list = qp.sq.sges(position);
        let gathered = hub.regions.gather(qp.pd_number(), list, from as u64, out);
        return gathered.map_err(|_| Stop::Memory);
    };
    out.copy_from_slice(&bytes[from..from + out.len()]);
    Ok(())
}

/// The sum of the `len` octets of the request at `sq.next`; `out` is where they are read to.
fn sum_of<P>(qp: &Qp, hub: &mut Hub<P>, len: usize, out: &mut [u8]) -> Result<Sum, Stop> {
    let room = out.len().min(SUMMED) & !1;
    let mut whole = Sum::default();
    for from in (0..len).step_by(room.max(2)) {
        let piece = &mut out[..room.min(len - from)];
        gather(qp, hub, from, piece)?;
        whole = whole.and(sum(piece));
    }
    Ok(whole)
}

/// The datagram of the request at `sq.next` cannot be written, or not now.
fn refuse<P: Probe>(qp: &mut Qp, hub: &mut Hub<P>, stop: Stop) {
    let status = match stop {
        Stop::Refused(DatagramError::Unresolved { next_hop }) => {
            if let Some(inet) = &mut hub.inet {
                wait(qp, inet, next_hop);
            }
            return;
        }
        // Those behind it may be shorter, or go elsewhere.
        Stop::Refused(DatagramError::TooLong { .. } | DatagramError::Long { .. }) => {
            return requester::fail_one(qp, hub, WcStatus::LocLenErr);
        }
        Stop::Refused(DatagramError::NoRoute | DatagramError::BadAddress) => {
            return requester::fail_one(qp, hub, WcStatus::LocQpOpErr);
        }
        Stop::Refused(DatagramError::Closed) => WcStatus::LocQpOpErr,
        Stop::Memory => WcStatus::LocProtErr,
    };
    requester::send_queue_error(qp, hub, status);
}

/// The next datagram waits for its next hop.
fn wait(qp: &mut Qp, inet: &mut Inet, next_hop: IpAddr) {
    if let Path::Udp(path) = &mut qp.path {
        path.unresolved = Some(next_hop);
        inet.unresolved.push(qp.id);
    }
}

/// The next datagram cannot be delivered, and is lost with those behind it to the same place.
fn lose_next<P: Probe>(qp: &mut Qp, hub: &mut Hub<P>) {
    if let Path::Udp(path) = &mut qp.path {
        path.parts = None;
    }
    let place = |qp: &Qp| qp.sq.destination(qp.sq.next).address();
    let lost = place(qp);
    while requester::may_begin(qp) && place(qp) == lost {
        requester::skip_local(qp, hub);
    }
}

/// Gives a datagram to the queue pair that is bound to its port, if that has a receive for it.
pub(crate) fn deliver<P: Probe>(qp: &mut Qp, hub: &mut Hub<P>, datagram: &Datagram, frame: &[u8]) {
    if !qp.may_receive() {
        hub.datagram_drops.no_queue_pair += 1;
        return;
    }
    let reassembled;
    let message = match &datagram.payload {
        Payload::Frame(range) => frame.get(range.clone()).unwrap_or_default(),
        Payload::Reassembled => {
            let Some(inet) = &hub.inet else { return };
            // Rare, and the stack's buffer cannot be lent while memory is written.
            reassembled = inet.stack.reassembled().to_vec();
            &reassembled
        }
    };
    let len = message.len() as u64;
    let is_short = responder::next_capacity(qp, hub).is_some_and(|room| room < len);
    if is_short || !responder::begin_receive(qp, hub) {
        hub.datagram_drops.no_receive += 1;
        return;
    }
    let placed = responder::spared(qp).and_then(|()| {
        let (pd, list) = (qp.recv_pd_number(), qp.responder.receive.sges.as_slice());
        hub.regions
            .check_list(pd, list, 0, len, true)
            .and_then(|()| hub.regions.scatter(pd, list, 0, message))
            .map_err(|_| Refusal::Local)
    });
    hub.probe.stage(Stage::PutData, message.len());
    let done = placed.and_then(|()| {
        let finish = Finish {
            opcode: WcOpcode::Recv,
            byte_len: message.len() as u32,
            extra: WcExtra::From(Source::from(datagram.from)),
            solicited: true,
        };
        responder::finish_receive(qp, hub, finish)
    });
    if let Err(refusal) = done {
        responder::refuse(qp, hub, refusal);
    }
}

/// Gives the port of a queue pair back.
pub(crate) fn detach<P>(qp: &mut Qp, hub: &mut Hub<P>) {
    let (Path::Udp(path), Some(inet)) = (&mut qp.path, &mut hub.inet) else { return };
    path.parts = None;
    if let Some(socket) = path.socket.take() {
        set(&mut inet.bound, socket.index(), None);
        inet.stack.unbind(socket);
    }
    if path.unresolved.take().is_some() {
        inet.unresolved.retain(|&id| id != qp.id);
    }
}
