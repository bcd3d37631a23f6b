//! A frame's way up to TCP and UDP.

use std::net::{IpAddr, SocketAddr};
use std::ops::Range;

use quipu_wire::checksum::{Sum, sum};
use quipu_wire::ipv6_extension::{Walk, walk};
use quipu_wire::ndp::Station;
use quipu_wire::{icmpv6, ipv4, ipv6};

use super::{Arrival, Frame, Stack};

/// Protocol numbers (IANA).
pub(super) const TCP: u8 = 6;
/// See [`TCP`].
pub(super) const UDP: u8 = 17;

/// The IP header of a packet that has come, and where in the frame its payload is.
#[derive(Clone, Debug)]
pub(super) struct Packet {
    pub(super) source: IpAddr,
    pub(super) destination: IpAddr,
    /// Which of the own addresses that is; none: a group.
    pub(super) local: Option<u16>,
    /// The station that sent it, on a link that has stations.
    pub(super) station: Station,
    pub(super) protocol: u8,
    pub(super) traffic_class: u8,
    pub(super) hop_limit: u8,
    pub(super) payload: Range<usize>,
}

impl Packet {
    /// Whether the checksum of its upper layer is right.
    pub(super) fn is_intact(&self, payload: &[u8]) -> bool {
        let (from, to) = (self.source, self.destination);
        let pseudo = Sum::of_pseudo_header(from, to, self.protocol, payload.len());
        pseudo.and(sum(payload)).is_valid()
    }

    /// Whether the network has marked it: CE (RFC 3168 5).
    pub(super) fn is_marked(&self) -> bool {
        self.traffic_class & 3 == 3
    }

    /// Its sender, at `port`.
    pub(super) fn from(&self, port: u16) -> SocketAddr {
        SocketAddr::new(self.source, port)
    }
}

impl Stack {
    /// Takes a frame from the link. What it has brought must be taken out of it before it goes away.
    pub fn handle_frame(&mut self, now: u64, frame: &Frame<'_>) -> Arrival {
        self.counters.received += 1;
        let Some(packet) = self.unframe(now, frame.bytes) else { return Arrival::Nothing };
        let payload = &frame.bytes[packet.payload.clone()];
        if packet.protocol == icmpv6::PROTOCOL && self.arrive_discovery(now, &packet, payload) {
            return Arrival::Nothing;
        }
        if self.addresses.is_martian(packet.source) {
            self.counters.martians += 1;
            return Arrival::Nothing;
        }
        match (packet.protocol, packet.local) {
            (TCP, Some(local)) => self.arrive_tcp(now, &packet, local, frame),
            (UDP, Some(_)) => self.arrive_udp(&packet, frame),
            (TCP | UDP, None) => {
                self.counters.not_ours += 1;
                Arrival::Nothing
            }
            _ => {
                self.counters.unknown_protocol += 1;
                Arrival::Nothing
            }
        }
    }

    /// Neighbour Discovery: says whether it was that.
    fn arrive_discovery(&mut self, now: u64, packet: &Packet, payload: &[u8]) -> bool {
        let (IpAddr::V6(source), IpAddr::V6(destination)) = (packet.source, packet.destination)
        else {
            return false;
        };
        let Ok(icmpv6::Repr::Discovery(message)) =
            icmpv6::Repr::parse(source, destination, payload)
        else {
            return false;
        };
        if let Some(neighbours) = &mut self.neighbours {
            let header = ipv6::Repr {
                source,
                destination,
                next_header: packet.protocol,
                traffic_class: packet.traffic_class,
                flow_label: 0,
                hop_limit: packet.hop_limit,
                payload_len: payload.len() as u16,
            };
            neighbours.handle_discovery(now, &header, &message);
            self.hear_neighbours();
        }
        true
    }

    /// The packet that begins at `at`; none, and counted, if it is not one for this stack.
    pub(super) fn packet(&mut self, bytes: &[u8], at: usize) -> Option<Packet> {
        let ip = bytes.get(at..)?;
        let packet = match ip.first().map(|first| first >> 4) {
            Some(6) => self.packet_v6(ip, at),
            Some(4) => self.packet_v4(ip, at),
            _ => {
                self.counters.malformed += 1;
                None
            }
        }?;
        let local = self.addresses.find(packet.destination);
        if local.is_none() && !self.addresses.is_group(packet.destination) {
            self.counters.not_ours += 1;
            return None;
        }
        Some(Packet { local, ..packet })
    }

    fn packet_v4(&mut self, ip: &[u8], at: usize) -> Option<Packet> {
        let Ok((repr, header)) = ipv4::Repr::parse(ip) else {
            self.counters.malformed += 1;
            return None;
        };
        if repr.is_fragment() {
            self.counters.fragments += 1;
            return None;
        }
        let start = at + header;
        Some(Packet {
            source: repr.source.into(),
            destination: repr.destination.into(),
            local: None,
            station: Station::default(),
            protocol: repr.protocol,
            traffic_class: repr.traffic_class,
            hop_limit: repr.hop_limit,
            payload: start..start + usize::from(repr.payload_len),
        })
    }

    fn packet_v6(&mut self, ip: &[u8], at: usize) -> Option<Packet> {
        let Ok((repr, header)) = ipv6::Repr::parse(ip) else {
            self.counters.malformed += 1;
            return None;
        };
        let end = header + usize::from(repr.payload_len);
        let (protocol, behind) = match walk(repr.next_header, &ip[header..end], false) {
            Ok(Walk::Upper { protocol, at }) => (protocol, at),
            Ok(Walk::Fragment { .. }) => {
                self.counters.fragments += 1;
                return None;
            }
            Err(_) => {
                self.counters.malformed += 1;
                return None;
            }
        };
        Some(Packet {
            source: repr.source.into(),
            destination: repr.destination.into(),
            local: None,
            station: Station::default(),
            protocol,
            traffic_class: repr.traffic_class,
            hop_limit: repr.hop_limit,
            payload: at + header + behind..at + end,
        })
    }
}
