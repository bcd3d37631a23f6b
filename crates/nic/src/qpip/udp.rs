//! UDP queue pairs: bound to a port, each message one datagram to whomever its request names.
//!
//! A send completes when its datagram is written. One to a neighbour that is not known yet waits with those
//! behind it in the same queue, and holds nobody else up; if the neighbour cannot be found it is lost, as
//! datagrams may be, and completes.

use std::net::{IpAddr, SocketAddr};

use quipu_inet::stack::{BindError, Datagram, DatagramError, Payload, UdpId};

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

/// Octets of a UDP header.
const HEADER: u32 = 8;

/// What a queue pair of type UDP has beside its queues.
#[derive(Debug, Default)]
pub(crate) struct UdpPath {
    socket: Option<UdpId>,
    /// Whether it stands among those with something to send.
    listed: bool,
    /// The next hop that its next datagram waits for.
    unresolved: Option<IpAddr>,
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

/// Whether a request of a UDP queue pair can be sent at all: as far as the path is known.
///
/// # Errors
/// What is wrong with it.
pub(crate) fn check<P>(hub: &Hub<P>, to: SocketAddr, len: u64) -> Result<(), Fault> {
    let Some(inet) = &hub.inet else {
        return Err(Fault::Unsupported("the adapter is not attached to a network of IP"));
    };
    let ip_header = if to.is_ipv4() { 20 } else { 40 };
    let fits = inet.stack.path_mtu(to.ip()).saturating_sub(ip_header + HEADER);
    if len > u64::from(fits) {
        return Err(Fault::Invalid("a datagram longer than the path takes"));
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
        inet.datagrams.push_back(qp.id);
    }
}

/// Writes the next datagram of a queue pair whose turn it is.
pub(crate) fn transmit<P: Probe>(qp: &mut Qp, hub: &mut Hub<P>, out: &mut [u8]) -> Turn {
    let Path::Udp(path) = &mut qp.path else { return Turn::Again };
    path.listed = false;
    let Some(socket) = path.socket else { return Turn::Again };
    if !requester::may_begin(qp) {
        return Turn::Again;
    }
    let flags = qp.sq.wqe(qp.sq.next).flags;
    match fate::meet(qp, hub, flags) {
        Met::Nothing => {}
        Met::Wait => return Turn::Again,
        Met::Failure(status) => {
            requester::send_queue_error(qp, hub, status);
            return Turn::Again;
        }
    }
    let turn = compose(qp, hub, socket, out);
    if qp.state == QpState::Rts && qp.sq.has_waiting() {
        kick(qp, hub);
    }
    turn
}

fn compose<P: Probe>(qp: &mut Qp, hub: &mut Hub<P>, socket: UdpId, out: &mut [u8]) -> Turn {
    let position = qp.sq.next;
    let (to, len) = (qp.sq.destination(position).address(), qp.sq.wqe(position).length as usize);
    let Some(inet) = &mut hub.inet else { return Turn::Nothing };
    let departure = match inet.stack.compose_datagram(hub.now.0, socket, to, 0, len, out) {
        Ok(departure) => departure,
        Err(DatagramError::Unresolved { next_hop }) => {
            wait(qp, inet, next_hop);
            return Turn::Again;
        }
        Err(DatagramError::TooLong { .. }) => {
            // It fitted when it was posted. Those behind it may still fit.
            requester::fail_one(qp, hub, WcStatus::LocLenErr);
            return Turn::Again;
        }
        Err(DatagramError::NoRoute | DatagramError::BadAddress) => {
            requester::fail_one(qp, hub, WcStatus::LocQpOpErr);
            return Turn::Again;
        }
        Err(DatagramError::Closed) => {
            requester::send_queue_error(qp, hub, WcStatus::LocQpOpErr);
            return Turn::Again;
        }
    };
    hub.probe.stage(Stage::Headers, departure.headers);
    hub.probe.stage(Stage::GetWr, 0);
    let Some(payload) = out.get_mut(departure.headers..departure.len()) else {
        return Turn::Again;
    };
    let gathered = match qp.sq.inline(position) {
        Some(bytes) => {
            payload.copy_from_slice(bytes);
            Ok(())
        }
        None => hub.regions.gather(qp.pd_number(), qp.sq.sges(position), 0, payload),
    };
    if gathered.is_err() {
        requester::send_queue_error(qp, hub, WcStatus::LocProtErr);
        return Turn::Again;
    }
    hub.probe.stage(Stage::GetData, len);
    let turn = hub.dispatch(&departure, out);
    requester::skip_local(qp, hub);
    turn
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
    if let Some(socket) = path.socket.take() {
        set(&mut inet.bound, socket.index(), None);
        inet.stack.unbind(socket);
    }
    if path.unresolved.take().is_some() {
        inet.unresolved.retain(|&id| id != qp.id);
    }
}
