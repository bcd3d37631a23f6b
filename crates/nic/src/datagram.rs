//! Unreliable datagrams (IBA 9.8.3, 10.2.5): address handles, and messages that are one datagram each.
//!
//! Sending, the adapter writes one datagram at a time into the caller's buffer and says where it goes; a send
//! completes when it is written. Receiving, a datagram either fills a posted receive or is dropped, and
//! nobody hears of that. `specs/quipu-datagram.md` has the format and the rules.

use std::net::{IpAddr, SocketAddr};
use std::ops::RangeInclusive;

use quipu_iwarp::wire::datagram::{self, Datagram};
use quipu_iwarp::wire::grh::{self, Route};

use crate::adapter::{Adapter, Hub};
use crate::error::Fault;
use crate::fate::{self, Met};
use crate::multicast::multicast_group;
use crate::port::{LinkLayer, check_source};
use crate::probe::{Probe, Stage};
use crate::qp::{Path, Qp};
use crate::raw;
use crate::requester;
use crate::responder::{self, Finish, Refusal};
use crate::transmit::{lanes, marking};
use crate::types::{
    AddressVector, AhId, PdId, QpId, QpNum, QpState, QpType, SendFlags, SendOp, Time, WcExtra,
    WcOpcode, WcStatus,
};

/// The longest message of a datagram queue pair: the largest MTU of InfiniBand.
pub const MAX_DATAGRAM_MTU: u32 = 4096;
/// Bytes that a buffer for one datagram needs.
pub const MAX_DATAGRAM: usize = datagram::LEN + MAX_DATAGRAM_MTU as usize;
/// A Q_Key with this bit stands for that of the queue pair itself (IBA 10.2.5).
const OWN_QKEY: u32 = 1 << 31;
/// What a completion says of the kind of route header: with UDP (8), and IPv6 (1) or IPv4 (2).
const IPV6_ROUTE: u8 = 8 | 1;
const IPV4_ROUTE: u8 = 8 | 2;

/// A datagram that stands in the caller's buffer, and where it goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Departure {
    /// The queue pair that sends it: from the UDP port of its number.
    pub from: QpNum,
    /// The row of the GID table with the address that it is sent from.
    pub sgid_index: u8,
    /// Where it goes.
    pub to: SocketAddr,
    /// Traffic class of the IP header.
    pub traffic_class: u8,
    /// Service level.
    pub service_level: u8,
    /// Hop limit that the program asked for; it counts for multicast groups only.
    pub hop_limit: u8,
    /// Bytes written.
    pub len: usize,
}

/// Where a datagram came from, as the IP and UDP headers had it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Arrival {
    /// Address and port of its sender.
    pub from: SocketAddr,
    /// The address it was sent to.
    pub to: IpAddr,
    /// Traffic class, or type of service.
    pub traffic_class: u8,
    /// Hop limit, or time to live, as it arrived.
    pub hop_limit: u8,
}

/// Datagrams that were dropped, by reason.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DatagramDrops {
    /// The header made no sense, or named another sender than there was.
    pub malformed: u64,
    /// No datagram queue pair of that number was ready to receive.
    pub no_queue_pair: u64,
    /// The Q_Key was wrong.
    pub qkey_violation: u64,
    /// No receive was posted, or it was too small.
    pub no_receive: u64,
}

/// An address handle.
pub(crate) struct Ah {
    pd: PdId,
    av: AddressVector,
}

/// Where a request goes, resolved when it is posted: the program may destroy its address handle at once.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Destination {
    pub(crate) av: AddressVector,
    qpn: u32,
    qkey: u32,
}

impl Destination {
    /// That of a UDP datagram: its number is a port.
    pub(crate) fn of_address(to: SocketAddr) -> Self {
        let av = AddressVector { dgid: to.ip().into(), ..AddressVector::default() };
        Self { av, qpn: u32::from(to.port()), qkey: 0 }
    }

    /// The address that it was made of.
    pub(crate) fn address(&self) -> SocketAddr {
        SocketAddr::new(self.av.dgid.into(), self.qpn as u16)
    }
}

/// The destination that a request of `qp` names.
///
/// # Errors
/// No such address handle, or one of another protection domain (IBA 10.2.2.2), or a number above 24 bits.
pub(crate) fn resolve<P>(
    qp: &Qp,
    hub: &Hub<P>,
    ah: AhId,
    qpn: u32,
    qkey: u32,
) -> Result<Destination, Fault> {
    let ah = hub.ahs.get(ah).ok_or(Fault::Invalid("there is no such address handle"))?;
    if ah.pd != qp.pd {
        return Err(Fault::Invalid("the address handle belongs to another protection domain"));
    }
    if qpn > datagram::MULTICAST_QPN {
        return Err(Fault::Invalid("queue pair numbers have 24 bits"));
    }
    let qkey = if qkey & OWN_QKEY == 0 { qkey } else { qp.attr.qkey };
    Ok(Destination { av: ah.av, qpn, qkey })
}

impl<P: Probe> Adapter<P> {
    /// Creates an address handle (IBA 11.2.2.1).
    ///
    /// # Errors
    /// A route that leads nowhere, or with another port or source GID than there is; or no room.
    pub fn create_ah(&mut self, pd: PdId, av: &AddressVector) -> Result<AhId, Fault> {
        self.hub.pd(pd)?;
        if av.port_num != 1 {
            return Err(Fault::Invalid("the adapter has one port, number 1"));
        }
        let gids = &self.hub.gids;
        let av = self.hub.config.link_layer.resolve(gids, av)?;
        if multicast_group(gids.row_of(&av), av.dgid).is_none() {
            check_source(gids, &av)?;
        }
        let made = self.hub.ahs.insert(Ah { pd, av });
        let id = made.ok_or(Fault::Exhausted("address handles"))?;
        self.hub.pd(pd)?.users += 1;
        Ok(id)
    }

    /// What an address handle was created with.
    ///
    /// # Errors
    /// No such handle.
    pub fn query_ah(&self, id: AhId) -> Result<AddressVector, Fault> {
        self.hub.ahs.get(id).map(|ah| ah.av).ok_or(Fault::NoSuchObject)
    }

    /// Destroys an address handle. Requests that were posted with it are not concerned.
    ///
    /// # Errors
    /// No such handle.
    pub fn destroy_ah(&mut self, id: AhId) -> Result<(), Fault> {
        let ah = self.hub.ahs.remove(id).ok_or(Fault::NoSuchObject)?;
        self.hub.pd(ah.pd)?.users -= 1;
        Ok(())
    }

    /// The next queue pair with datagrams to send, in round robin order, and its number. Call
    /// [`transmit_datagram`](Self::transmit_datagram) for it until that gives `None`, or say by
    /// [`resume_sender`](Self::resume_sender) or [`resume_datagrams`](Self::resume_datagrams) when to go on.
    #[inline]
    pub fn next_datagrams(&mut self) -> Option<(QpId, QpNum)> {
        while let Some(id) = self.hub.datagrams_ready.pop_front() {
            if let Some(qp) = self.qps.get_mut(id) {
                qp.path = Path::Datagrams { listed: false };
                let num = qp.num;
                self.fetch_ahead();
                return Some((id, num));
            }
        }
        None
    }

    /// Has the processor fetch the queue pairs that are next: there may be more of them than its caches hold.
    #[inline]
    fn fetch_ahead(&self) {
        // With lanes, that is done when they get their turns.
        if !self.qps.is_large() || self.hub.qos.is_some() {
            return;
        }
        let mut next = self.hub.datagrams_ready.iter();
        if let Some(qp) = next.next().and_then(|&id| self.qps.get(id)) {
            qp.sq.prefetch();
        }
        if let Some(&id) = next.next() {
            self.qps.prefetch(id);
        }
    }

    /// Writes the next datagram of a queue pair into `out`, which has room for [`MAX_DATAGRAM`] bytes, and
    /// completes its request. `None`: it has none to send.
    pub fn transmit_datagram(&mut self, now: Time, id: QpId, out: &mut [u8]) -> Option<Departure> {
        self.hub.now = now;
        let (qp, hub) = self.qp_and_hub(id)?;
        if !matches!(qp.path, Path::Datagrams { .. }) || lanes::is_parked(qp) {
            return None;
        }
        while requester::may_begin(qp) {
            if !lanes::has_turn(qp, hub) {
                lanes::park(qp, hub);
                return None;
            }
            let flags = qp.sq.wqe(qp.sq.next).flags;
            match fate::meet(qp, hub, flags) {
                Met::Nothing => {}
                Met::Wait => return None,
                Met::Failure(status) => {
                    requester::send_queue_error(qp, hub, status);
                    return None;
                }
            }
            match compose(qp, hub, out) {
                Ok(departure) => {
                    let length = qp.sq.wqe(qp.sq.next).length;
                    requester::skip_local(qp, hub);
                    lanes::charge(qp, hub, length);
                    if departure.is_some() {
                        if !lanes::has_turn(qp, hub) {
                            lanes::park(qp, hub);
                        }
                        return departure;
                    }
                }
                Err(status) => {
                    requester::send_queue_error(qp, hub, status);
                    return None;
                }
            }
        }
        if hub.qos.is_some() {
            lanes::end_turn(qp, hub);
        }
        None
    }

    /// Lists those of the queue pairs with these numbers that have datagrams to send: their turn ended, or
    /// their socket was full and is no more.
    pub fn resume_datagrams(&mut self, numbers: RangeInclusive<QpNum>) {
        let Self { qps, hub } = self;
        for id in hub.numbers.range(numbers) {
            if let Some(qp) = qps.get_mut(id)
                && requester::may_begin(qp)
            {
                list(qp, &mut hub.datagrams_ready);
            }
        }
    }

    /// As [`resume_datagrams`](Self::resume_datagrams), for one queue pair.
    #[inline]
    pub fn resume_sender(&mut self, id: QpId) {
        if let Some(qp) = self.qps.get_mut(id)
            && requester::may_begin(qp)
        {
            list(qp, &mut self.hub.datagrams_ready);
        }
    }

    /// Takes a datagram: it fills a receive, or is dropped.
    pub fn handle_datagram(&mut self, now: Time, arrival: &Arrival, bytes: &[u8]) {
        self.hub.now = now;
        self.hub.probe.stage(Stage::Headers, datagram::LEN);
        let header = Datagram::parse(bytes).ok().filter(|header| is_genuine(header, arrival));
        let Some(header) = header else {
            self.hub.datagram_drops.malformed += 1;
            return;
        };
        let message = &bytes[datagram::LEN..];
        if header.dest_qpn == datagram::MULTICAST_QPN {
            return self.deliver_to_group(&header, arrival, message);
        }
        // One to a group and yet to one queue pair came by a port that is not that one's.
        if header.frame || arrival.to.is_multicast() {
            self.hub.datagram_drops.malformed += 1;
            return;
        }
        let id = self.hub.numbers.get(QpNum(header.dest_qpn));
        match id.and_then(|id| self.qp_and_hub(id)) {
            Some((qp, hub)) => deliver(qp, hub, &header, arrival, message),
            None => self.hub.datagram_drops.no_queue_pair += 1,
        }
    }

    /// Datagrams that were dropped so far.
    #[must_use]
    pub fn datagram_drops(&self) -> DatagramDrops {
        self.hub.datagram_drops
    }
}

/// Puts a queue pair among those with something to send.
#[inline]
pub(crate) fn list(qp: &mut Qp, ready: &mut std::collections::VecDeque<crate::types::QpId>) {
    if let Path::Datagrams { listed } = &mut qp.path
        && !std::mem::replace(listed, true)
    {
        ready.push_back(qp.id);
    }
}

/// Whether a datagram came from the port that its header names as its sender's.
fn is_genuine(header: &Datagram, arrival: &Arrival) -> bool {
    QpNum(header.source_qpn).port() == arrival.from.port()
}

/// Writes the datagram of the request at `sq.next`; `None` if it is one that is not sent.
///
/// # Errors
/// The status that the request fails with.
fn compose<P: Probe>(
    qp: &Qp,
    hub: &mut Hub<P>,
    out: &mut [u8],
) -> Result<Option<Departure>, WcStatus> {
    let position = qp.sq.next;
    let wqe = qp.sq.wqe(position);
    hub.probe.stage(Stage::GetWr, 0);
    let av = qp.sq.destination(position).map_or_else(AddressVector::default, |to| to.av);
    let (traffic_class, hop_limit) = (marking::traffic_class(&av, hub), av.hop_limit);
    let service_level = marking::level_of(&av, hub);
    let (header, to) = match qp.qp_type {
        QpType::RawPacket => raw::address(qp, hub, wqe.length)?,
        // C10-93.1.1: such a message is not sent, and that is no error.
        _ if wqe.length > hub.config.datagram_mtu => return Ok(None),
        _ => address(qp, hub, position),
    };
    let len = datagram::LEN + wqe.length as usize;
    let Some((head, rest)) =
        out.get_mut(..len).and_then(|out| out.split_at_mut_checked(datagram::LEN))
    else {
        return Err(WcStatus::LocQpOpErr);
    };
    head.copy_from_slice(&header.to_bytes());
    match qp.sq.inline(position) {
        Some(bytes) => rest.copy_from_slice(bytes),
        None => hub
            .regions
            .gather(qp.pd_number(), qp.sq.sges(position), 0, rest)
            .map_err(|_| WcStatus::LocProtErr)?,
    }
    hub.probe.stage(Stage::GetData, rest.len());
    let sgid_index = hub.gids.index_of(&av);
    let from = qp.num;
    Ok(Some(Departure { from, sgid_index, to, traffic_class, service_level, hop_limit, len }))
}

/// The header and the destination of the message of the request at `position`.
fn address<P>(qp: &Qp, hub: &Hub<P>, position: u32) -> (Datagram, SocketAddr) {
    let to = qp.sq.destination(position).copied().unwrap_or_default();
    let wqe = qp.sq.wqe(position);
    let header = Datagram {
        dest_qpn: to.qpn,
        source_qpn: qp.num.0,
        qkey: to.qkey,
        imm: match wqe.op {
            SendOp::SendImm(imm) => Some(imm),
            _ => None,
        },
        solicited: wqe.flags.contains(SendFlags::SOLICITED),
        frame: false,
    };
    let to = match multicast_group(hub.gids.row_of(&to.av), to.av.dgid) {
        Some(group) => SocketAddr::new(group, hub.config.multicast_port),
        None => SocketAddr::new(IpAddr::from(to.av.dgid), QpNum(to.qpn).port()),
    };
    (header, to)
}

/// Gives a datagram to a queue pair, if that may have it and has a receive for it.
pub(crate) fn deliver<P: Probe>(
    qp: &mut Qp,
    hub: &mut Hub<P>,
    header: &Datagram,
    arrival: &Arrival,
    message: &[u8],
) {
    if qp.qp_type != QpType::Ud || !qp.may_receive() {
        hub.datagram_drops.no_queue_pair += 1;
        return;
    }
    if header.qkey != qp.attr.qkey {
        hub.datagram_drops.qkey_violation += 1;
        return;
    }
    let len = (grh::LEN + message.len()) as u64;
    let is_short = responder::next_capacity(qp, hub).is_some_and(|capacity| capacity < len);
    if is_short || !responder::begin_receive(qp, hub) {
        hub.datagram_drops.no_receive += 1;
        return;
    }
    let spared = responder::spared(qp);
    let placed = spared.and_then(|()| place(qp, hub, arrival, message)).and_then(|()| {
        let extra = header.imm.map_or(WcExtra::None, WcExtra::Imm);
        let finish = Finish {
            opcode: WcOpcode::Recv,
            byte_len: len as u32,
            extra,
            solicited: header.solicited,
        };
        let (layer, from) = (hub.config.link_layer, arrival.from.ip());
        let sl = match (layer, from) {
            (LinkLayer::InfiniBand, _) => arrival.traffic_class >> 5,
            (LinkLayer::Ethernet, IpAddr::V4(_)) => IPV4_ROUTE,
            (LinkLayer::Ethernet, IpAddr::V6(_)) => IPV6_ROUTE,
        };
        let route = (sl, layer.lid(from.into()));
        responder::finish_datagram(qp, hub, finish, QpNum(header.source_qpn), route)
    });
    if let Err(refusal) = placed {
        responder::refuse(qp, hub, refusal);
    }
}

/// Copies the route header and a message into the receive in progress.
fn place<P: Probe>(
    qp: &Qp,
    hub: &mut Hub<P>,
    arrival: &Arrival,
    message: &[u8],
) -> Result<(), Refusal> {
    // The header of InfiniBand is that of IPv6.
    let shown = |ip: IpAddr| match (hub.config.link_layer, ip) {
        (LinkLayer::InfiniBand, IpAddr::V4(ip)) => ip.to_ipv6_mapped().into(),
        (_, ip) => ip,
    };
    let route = Route {
        source: shown(arrival.from.ip()),
        dest: shown(arrival.to),
        traffic_class: arrival.traffic_class,
        hop_limit: arrival.hop_limit,
    };
    let header = route.to_grh(datagram::LEN + message.len());
    let (pd, list) = (qp.recv_pd_number(), qp.responder.receive.sges.as_slice());
    // Nothing is placed unless everything can be.
    let len = (grh::LEN + message.len()) as u64;
    let whole = hub.regions.check_list(pd, list, 0, len, true);
    whole
        .and_then(|()| hub.regions.scatter(pd, list, 0, &header))
        .and_then(|()| hub.regions.scatter(pd, list, grh::LEN as u64, message))
        .map_err(|_| Refusal::Local)?;
    hub.probe.stage(Stage::PutData, len as usize);
    Ok(())
}

/// Sets the send queue of a datagram queue pair going, or flushes it.
#[inline]
pub(crate) fn kick<P: Probe>(qp: &mut Qp, hub: &mut Hub<P>) {
    match qp.state {
        QpState::Sqe => requester::flush_sends(qp, hub),
        _ if lanes::is_parked(qp) => lanes::count_again(qp, hub),
        _ => list(qp, &mut hub.datagrams_ready),
    }
}
