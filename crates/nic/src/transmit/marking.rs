//! The service level of what a queue pair sends, and how packets that leave the host say it.

use quipu_inet::stack::TcpId;

use crate::adapter::{Adapter, Hub};
use crate::error::Fault;
use crate::port::LinkLayer;
use crate::probe::Probe;
use crate::qp::Qp;
use crate::qpip::{FrameOut, Owner, Sender};
use crate::types::{AddressVector, ConnId, QpId, QpType};

/// How packets of a connection are marked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Marking {
    /// The traffic class of the IP header, DSCP and ECN bits.
    pub traffic_class: u8,
    /// The service level.
    pub service_level: u8,
    /// The virtual lane, with quality of service.
    pub lane: Option<u8>,
}

/// How what a queue pair sends next is marked.
pub(crate) fn marking_of<P>(qp: &Qp, hub: &Hub<P>) -> Marking {
    let service_level = service_level(qp, hub);
    let traffic_class = traffic_class(&qp.attr.av, hub);
    Marking { traffic_class, service_level, lane: lane_of(service_level, hub) }
}

/// The lane of a service level, with quality of service.
fn lane_of<P>(service_level: u8, hub: &Hub<P>) -> Option<u8> {
    hub.qos.as_ref().map(|qos| qos.lane_of_level(service_level))
}

/// The service level of what a queue pair has next.
pub(super) fn service_level<P>(qp: &Qp, hub: &Hub<P>) -> u8 {
    let is_named = qp.qp_type == QpType::Ud && qp.sq.has_waiting();
    let named = if is_named { qp.sq.destination(qp.sq.next) } else { None };
    level_of(named.map_or(&qp.attr.av, |to| &to.av), hub)
}

/// The service level that an address vector names; that of the rules if it names none.
pub(crate) fn level_of<P>(av: &AddressVector, hub: &Hub<P>) -> u8 {
    let default = || hub.qos.as_ref().map_or(0, |qos| qos.default_level());
    match (av.sl & 15, av.traffic_class, hub.config.link_layer) {
        (0, 0, _) => default(),
        // As RoCE does where a program names a traffic class only.
        (0, class, LinkLayer::Ethernet) => class >> 5,
        (sl, ..) => sl,
    }
}

/// How packets to an address are marked: as the program said by a traffic class, or else as its service
/// level.
pub(crate) fn traffic_class<P>(av: &AddressVector, hub: &Hub<P>) -> u8 {
    let sl = level_of(av, hub);
    match (av.traffic_class, sl) {
        (0, 0) => 0,
        (0, sl) => match &hub.qos {
            Some(qos) => qos.dscp_of(sl) << 2,
            // The class selector of the same number (RFC 2474 4.2.2.2).
            None if sl < 8 => sl << 5,
            None => 0,
        },
        (class, _) => class,
    }
}

/// A traffic class that a program named; 0: that of the service level of the rules.
pub(crate) fn class_or_default<P>(class: u8, hub: &Hub<P>) -> u8 {
    traffic_class(&AddressVector { traffic_class: class, ..AddressVector::default() }, hub)
}

/// The traffic class of an IP packet; 0 for anything else.
fn class_of_packet(packet: &[u8]) -> u8 {
    match *packet {
        [first, class, ..] if first >> 4 == 4 => class,
        [first, second, ..] if first >> 4 == 6 => first << 4 | second >> 4,
        _ => 0,
    }
}

impl<P: Probe> Adapter<P> {
    /// The service level of a frame that [`transmit_frame`](Self::transmit_frame) wrote, with its IP packet:
    /// that of its queue pair. Of what the stack sends itself, it is the one that the packet's traffic class
    /// stands for.
    #[must_use]
    pub fn level_of_frame(&self, frame: &FrameOut, packet: &[u8]) -> u8 {
        let level = match frame.of {
            Sender::Connection(connection) => {
                self.level_of_connection(connection).map(|(level, _)| level)
            }
            Sender::Datagrams(qp) => self.qps.get(qp).map(|qp| level_of(&qp.attr.av, &self.hub)),
            Sender::Stack => None,
        };
        level.unwrap_or(class_of_packet(packet) >> 5)
    }

    /// The service level and the traffic class of the queue pair that has a connection of the stack. None: it
    /// has no queue pair, or one of plain iWARP that names neither, so that those of its connection count.
    pub(crate) fn level_of_connection(&self, connection: TcpId) -> Option<(u8, u8)> {
        let inet = self.hub.inet.as_deref()?;
        let (qp, is_stream) = match inet.owner(connection)? {
            Owner::Qp(qp) => (qp, false),
            Owner::Stream => (self.hub.conns.get(inet.conn_of(connection)?)?.qp?, true),
            Owner::Listener(_) | Owner::Request(_) => return None,
        };
        let av = &self.qps.get(qp)?.attr.av;
        let names_none = av.sl == 0 && av.traffic_class == 0;
        (!is_stream || !names_none).then(|| (level_of(av, &self.hub), traffic_class(av, &self.hub)))
    }

    /// How what a connection sends is marked; `None` if it has no queue pair.
    #[must_use]
    pub fn marking(&self, conn: ConnId) -> Option<Marking> {
        let qp = self.hub.conns.get(conn)?.qp.and_then(|qp| self.qps.get(qp))?;
        Some(marking_of(qp, &self.hub))
    }

    /// How what goes to an address is marked.
    #[must_use]
    pub fn marking_of(&self, av: &AddressVector) -> Marking {
        let service_level = level_of(av, &self.hub);
        let (traffic_class, lane) = (traffic_class(av, &self.hub), self.lane_of(service_level));
        Marking { traffic_class, service_level, lane }
    }

    /// Gives a queue pair another service level and traffic class while it is connected. What it has begun to
    /// send may still be of the old ones. The connection whose packets are to be marked, if there is one.
    ///
    /// # Errors
    /// No such queue pair.
    pub fn set_service_level(
        &mut self,
        id: QpId,
        service_level: u8,
        traffic_class: u8,
    ) -> Result<Option<ConnId>, Fault> {
        let qp = self.qps.get_mut(id).ok_or(Fault::NoSuchObject)?;
        (qp.attr.av.sl, qp.attr.av.traffic_class) = (service_level & 15, traffic_class);
        let conns = self.hub.conns.iter();
        let conn = conns.filter(|(_, conn)| conn.qp == Some(id)).map(|(conn, _)| conn).next();
        if let Some(stream) = conn.and_then(|conn| self.hub.inet.as_deref()?.stream_of(conn)) {
            self.mark_stream(stream);
        }
        Ok(conn)
    }

    /// The virtual lane of a service level, 15 for one whose packets are discarded; `None` without quality of
    /// service.
    #[must_use]
    pub fn lane_of(&self, service_level: u8) -> Option<u8> {
        lane_of(service_level, &self.hub)
    }

    /// The service level of queue pairs that name none.
    pub fn set_default_level(&mut self, sl: u8) {
        if let Some(qos) = &mut self.hub.qos {
            qos.set_default_level(sl);
        }
    }
}
