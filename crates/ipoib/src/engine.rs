//! The engine: packets of the interface and datagrams of the queue pair.

mod connected;
mod discovery;

use std::collections::VecDeque;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::ops::Range;

use quipu_wire::grh;
use quipu_wire::ipoib::{
    Discovery, Encapsulation, LEN as HEADER_LEN, LinkAddress, ends_of, group_gid,
};

use crate::connections::{ConnectionId, Connections, Limits};
use crate::counters::{Counters, Dropped};
use crate::groups::{GroupChange, Groups};
use crate::neighbours::{Ask, Due, Lookup, Neighbours};
use crate::{MAX_QUEUED, MAX_WAITING_IN_ALL, RETRANSMIT_NS};

/// How often own addresses are announced at the start, at intervals of [`RETRANSMIT_NS`].
const ANNOUNCEMENTS: u8 = 3;

/// What the engine is to be like.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Config {
    /// The own link-layer address: the queue pair that datagrams come to. Its flag says whether the mode is
    /// connected.
    pub link: LinkAddress,
    /// The longest IP packet in bytes, of any kind: the MTU of the interface.
    pub mtu: usize,
    /// The longest IP packet in bytes that a datagram holds: the longest message of the queue pair without
    /// the encapsulation header. More than `mtu` counts as that.
    pub datagram_mtu: usize,
    /// Messages that may be under way over all connections together.
    pub connection_slots: usize,
    /// The interface's addresses with the lengths of their prefixes, which are on the link.
    pub addresses: Vec<(IpAddr, u8)>,
    /// Where packets go that are for no prefix of these: one of each family.
    pub gateways: Vec<IpAddr>,
    /// The partition, as it stands in multicast GIDs.
    pub pkey: u16,
}

/// Where a datagram goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Destination {
    /// To one queue pair.
    Unicast(LinkAddress),
    /// To all that are attached to the group with this GID.
    Group([u8; 16]),
    /// Over a connection. [`Engine::handle_sent`] says later that the message is not under way any more.
    Connection(ConnectionId),
}

/// What becomes of a packet of the interface.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outgoing {
    /// It goes there, after this encapsulation header.
    Send(Destination, Encapsulation),
    /// It was copied, and comes by [`Engine::poll_transmit`] when the address of its next hop is known.
    Waits,
    /// It is not sent.
    Dropped(Dropped),
}

/// Where a datagram came from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Arrival {
    /// The queue pair and port that sent it, as the adapter says, not the datagram.
    pub source: LinkAddress,
    /// The multicast group that it came by, as the adapter shows it.
    pub group: Option<[u8; 16]>,
}

impl Arrival {
    /// What the route header that the adapter shows, and the completion, say. `None`: it is no route header.
    #[must_use]
    pub fn of(route_header: &[u8; grh::LEN], source_qpn: u32) -> Option<Self> {
        let route = grh::Route::from_grh(route_header)?;
        let gid = |ip: IpAddr| match ip {
            IpAddr::V4(ip) => ip.to_ipv6_mapped().octets(),
            IpAddr::V6(ip) => ip.octets(),
        };
        let source = LinkAddress { qpn: source_qpn, gid: gid(route.source), connects: false };
        let group = route.dest.to_canonical().is_multicast().then(|| gid(route.dest));
        Some(Self { source, group })
    }
}

/// What becomes of a datagram.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Incoming {
    /// These bytes of it are an IP packet for the interface.
    Deliver(Range<usize>),
    /// It was for the engine.
    Consumed,
    /// It is ignored.
    Dropped(Dropped),
}

/// A message of the engine's own, or a packet that has waited.
#[derive(Debug)]
struct Queued {
    to: Destination,
    kind: Encapsulation,
    bytes: Vec<u8>,
}

/// IP over InfiniBand for one interface and one queue pair.
#[derive(Debug)]
pub struct Engine {
    config: Config,
    neighbours: Neighbours,
    groups: Groups,
    /// None in datagram mode.
    connections: Option<Connections>,
    queue: VecDeque<Queued>,
    /// Packets for the interface.
    deliveries: VecDeque<Vec<u8>>,
    announcements: u8,
    announce_ns: Option<u64>,
    counters: Counters,
}

impl Engine {
    /// An engine that announces its addresses when [`Self::handle_timeout`] is called first, so that hosts
    /// that knew them with another link-layer address learn the new one.
    #[must_use]
    pub fn new(mut config: Config) -> Self {
        config.datagram_mtu = config.datagram_mtu.min(config.mtu);
        let Config { link, mtu, connection_slots: slots, .. } = config;
        let connections = link.connects.then(|| Connections::new(Limits { link, mtu, slots }));
        let groups = Groups::new(config.pkey, config.addresses.iter().map(|&(ip, _)| ip));
        Self {
            config,
            neighbours: Neighbours::default(),
            groups,
            connections,
            queue: VecDeque::new(),
            deliveries: VecDeque::new(),
            announcements: ANNOUNCEMENTS,
            announce_ns: Some(0),
            counters: Counters::default(),
        }
    }

    /// What passed, and what was dropped.
    #[must_use]
    pub fn counters(&self) -> &Counters {
        &self.counters
    }

    /// The longest datagram in bytes.
    #[must_use]
    pub fn max_datagram(&self) -> usize {
        self.config.datagram_mtu + HEADER_LEN
    }

    /// A packet from the interface: where it goes.
    pub fn handle_packet(&mut self, now_ns: u64, packet: &[u8]) -> Outgoing {
        match self.route(now_ns, packet) {
            Ok(Outgoing::Dropped(why)) | Err(why) => {
                self.counters.drop_many(why, 1);
                Outgoing::Dropped(why)
            }
            Ok(outgoing) => {
                self.counters.sent += u64::from(outgoing != Outgoing::Waits);
                outgoing
            }
        }
    }

    fn route(&mut self, now_ns: u64, packet: &[u8]) -> Result<Outgoing, Dropped> {
        let kind = match packet.first().map(|octet| octet >> 4) {
            Some(4) => Encapsulation::Ipv4,
            Some(6) => Encapsulation::Ipv6,
            _ => return Err(Dropped::Malformed),
        };
        let (_, to, _) = ends_of(kind, packet).map_err(|_| Dropped::Malformed)?;
        if packet.len() > self.config.mtu {
            return Err(Dropped::TooLong);
        }
        if kind == Encapsulation::Ipv6 && Discovery::is_discovery(packet) {
            return Err(Dropped::Discovery);
        }
        if let Some(group) = self.as_group(to) {
            if packet.len() > self.config.datagram_mtu {
                return Err(Dropped::TooLong);
            }
            if !self.groups.observe(kind, packet) {
                self.counters.drop_many(Dropped::Full, 1);
            }
            let gid = group_gid(group, self.config.pkey);
            return Ok(Outgoing::Send(Destination::Group(gid), kind));
        }
        let next = self.next_hop(to).ok_or(Dropped::NoRoute)?;
        match self.neighbours.lookup(now_ns, next, packet) {
            Lookup::Known(link, asks) => {
                if asks {
                    self.ask(next, Ask::One(link));
                }
                self.forward(now_ns, link, next, kind, packet)
            }
            Lookup::Waits(asks) => {
                if asks {
                    self.ask(next, Ask::All);
                }
                Ok(Outgoing::Waits)
            }
            Lookup::Full => Err(Dropped::Full),
        }
    }

    /// A datagram from the queue pair: what it is for.
    pub fn handle_datagram(&mut self, now_ns: u64, arrival: &Arrival, bytes: &[u8]) -> Incoming {
        match self.take(now_ns, arrival, bytes) {
            Ok(incoming) => {
                self.counters.received += u64::from(matches!(incoming, Incoming::Deliver(_)));
                incoming
            }
            Err(why) => {
                self.counters.drop_many(why, 1);
                Incoming::Dropped(why)
            }
        }
    }

    fn take(&mut self, now_ns: u64, arrival: &Arrival, bytes: &[u8]) -> Result<Incoming, Dropped> {
        if arrival.source.is_same_queue_pair(self.config.link) {
            return Err(Dropped::Own);
        }
        if bytes.len() > self.max_datagram() {
            return Err(Dropped::TooLong);
        }
        if bytes.len() < HEADER_LEN {
            return Err(Dropped::Malformed);
        }
        let kind = Encapsulation::parse(bytes).map_err(|_| Dropped::UnknownType)?;
        let packet = &bytes[HEADER_LEN..];
        if kind == Encapsulation::Arp {
            return self.take_arp(now_ns, arrival, packet).map(|()| Incoming::Consumed);
        }
        let (from, to, len) = ends_of(kind, packet).map_err(|_| Dropped::Malformed)?;
        if kind == Encapsulation::Ipv6 && Discovery::is_discovery(packet) {
            return self.take_discovery(now_ns, arrival, packet).map(|()| Incoming::Consumed);
        }
        if !self.may_come_from(from) {
            return Err(Dropped::Forged);
        }
        // RFC 1122 3.3.6: the interface cannot tell, so the engine must.
        if arrival.group.is_some() && self.as_group(to).is_none() {
            return Err(Dropped::Misdirected);
        }
        Ok(Incoming::Deliver(HEADER_LEN..HEADER_LEN + len))
    }

    /// The next datagram to be sent, written to `out` with its header, and where it goes.
    pub fn poll_transmit(&mut self, out: &mut Vec<u8>) -> Option<Destination> {
        let Queued { to, kind, bytes } = self.queue.pop_front()?;
        out.clear();
        out.extend_from_slice(&kind.to_bytes());
        out.extend_from_slice(&bytes);
        Some(to)
    }

    /// The next group to be joined or left.
    pub fn poll_group(&mut self) -> Option<GroupChange> {
        self.groups.poll()
    }

    /// When [`Self::handle_timeout`] is to be called.
    #[must_use]
    pub fn poll_timeout(&self) -> Option<u64> {
        let connections = self.connections.as_ref().and_then(Connections::next_ns);
        [self.announce_ns, self.neighbours.next_ns(), connections].into_iter().flatten().min()
    }

    /// Asks again, and gives up, what is due.
    pub fn handle_timeout(&mut self, now_ns: u64) {
        if self.announce_ns.is_some_and(|at| at <= now_ns) {
            self.announce();
            self.announcements -= 1;
            let again = self.announcements > 0;
            self.announce_ns = again.then(|| now_ns.saturating_add(RETRANSMIT_NS));
        }
        for due in self.neighbours.due(now_ns) {
            match due {
                Due::Ask(ip, ask) => self.ask(ip, ask),
                Due::Gone(waited) => self.counters.drop_many(Dropped::Unresolved, waited),
            }
        }
        self.close_connections(now_ns);
    }

    /// The group that an address means: itself, or that of all for broadcasts.
    fn as_group(&self, to: IpAddr) -> Option<IpAddr> {
        if to.is_multicast() {
            return Some(to);
        }
        let IpAddr::V4(to) = to else { return None };
        let is_broadcast = |&(ip, len): &(IpAddr, u8)| match ip {
            // RFC 3021: prefixes of 31 and 32 bits have no broadcast address.
            IpAddr::V4(own) if len < 31 => {
                let host = u32::MAX.checked_shr(len.into()).unwrap_or(0);
                to.to_bits() == own.to_bits() | host
            }
            _ => false,
        };
        let broadcast = to.is_broadcast() || self.config.addresses.iter().any(is_broadcast);
        broadcast.then_some(Ipv4Addr::BROADCAST.into())
    }

    /// The neighbour that a packet goes to.
    fn next_hop(&self, to: IpAddr) -> Option<IpAddr> {
        if self.is_on_link(to) {
            return Some(to);
        }
        let same = |gateway: &&IpAddr| gateway.is_ipv4() == to.is_ipv4();
        self.config.gateways.iter().find(same).copied()
    }

    fn is_on_link(&self, ip: IpAddr) -> bool {
        let link_local = matches!(ip, IpAddr::V6(ip) if ip.is_unicast_link_local());
        link_local || self.config.addresses.iter().any(|&prefix| contains(prefix, ip))
    }

    fn is_own(&self, ip: IpAddr) -> bool {
        self.config.addresses.iter().any(|&(own, _)| own == ip)
    }

    /// The own address from which `ip` is asked for: of its prefix, or else the first of its family.
    fn source_for(&self, ip: IpAddr) -> Option<IpAddr> {
        let family = || self.config.addresses.iter().filter(|it| it.0.is_ipv4() == ip.is_ipv4());
        let near = family().find(|&&prefix| contains(prefix, ip));
        near.or_else(|| family().next()).map(|&(own, _)| own)
    }

    /// Queues a message of the engine's own. A peer that has many sent may lose some.
    fn queue(&mut self, to: Destination, kind: Encapsulation, bytes: Vec<u8>) -> bool {
        let fits = self.queue.len() < MAX_QUEUED;
        match fits {
            true => self.queue.push_back(Queued { to, kind, bytes }),
            false => self.counters.drop_many(Dropped::Full, 1),
        }
        fits
    }

    /// Queues packets that have waited for a neighbour.
    fn release(
        &mut self,
        now_ns: u64,
        link: LinkAddress,
        next: IpAddr,
        packets: VecDeque<Vec<u8>>,
    ) {
        for bytes in packets {
            if self.queue.len() >= MAX_QUEUED + MAX_WAITING_IN_ALL {
                self.counters.drop_many(Dropped::Full, 1);
                continue;
            }
            match self.forward(now_ns, link, next, kind_of(&bytes), &bytes) {
                Ok(Outgoing::Send(to, kind)) => {
                    self.counters.sent += 1;
                    self.queue.push_back(Queued { to, kind, bytes });
                }
                Ok(_) => {}
                Err(why) => self.counters.drop_many(why, 1),
            }
        }
    }

    /// Whether a packet of a peer can come from this address.
    fn may_come_from(&self, from: IpAddr) -> bool {
        !self.is_own(from) && may_send(from)
    }
}

/// The kind of a packet that was found to be one of IP.
fn kind_of(packet: &[u8]) -> Encapsulation {
    match packet.first().map(|octet| octet >> 4) {
        Some(4) => Encapsulation::Ipv4,
        _ => Encapsulation::Ipv6,
    }
}

/// Whether a packet can come from this address (RFC 1122 3.2.1.3, RFC 4291 2.5, 2.7).
fn may_send(from: IpAddr) -> bool {
    let is_broadcast = matches!(from, IpAddr::V4(from) if from.is_broadcast());
    !(from.is_multicast() || from.is_loopback() || is_broadcast)
}

/// The link-local address of IPv6 that an interface with this link-layer address has (RFC 4391 8): its
/// interface identifier is made of all of it, as queue pairs of one port may be several interfaces.
#[must_use]
pub fn link_local(link: LinkAddress) -> Ipv6Addr {
    // FNV-1a, 64 bits.
    let hash =
        link.without_flags().to_bytes().iter().fold(0xcbf2_9ce4_8422_2325_u64, |hash, &octet| {
            (hash ^ u64::from(octet)).wrapping_mul(0x0100_0000_01b3)
        });
    Ipv6Addr::from_bits(0xfe80 << 112 | u128::from(hash))
}

fn contains((own, len): (IpAddr, u8), ip: IpAddr) -> bool {
    match (own, ip) {
        (IpAddr::V4(own), IpAddr::V4(ip)) => {
            let host = u32::MAX.checked_shr(len.into()).unwrap_or(0);
            own.to_bits() | host == ip.to_bits() | host
        }
        (IpAddr::V6(own), IpAddr::V6(ip)) => {
            let host = u128::MAX.checked_shr(len.into()).unwrap_or(0);
            own.to_bits() | host == ip.to_bits() | host
        }
        _ => false,
    }
}

/// All nodes of the link.
const ALL_NODES: Ipv6Addr = Ipv6Addr::new(0xff02, 0, 0, 0, 0, 0, 0, 1);

#[cfg(test)]
mod tests;
