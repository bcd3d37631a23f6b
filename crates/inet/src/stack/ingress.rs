//! A frame's way up to TCP and UDP.

use std::net::{IpAddr, SocketAddr};
use std::ops::Range;

use quipu_wire::checksum::{Sum, sum};
use quipu_wire::ipv6_extension::{Walk, walk};
use quipu_wire::{ipv4, ipv6};

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
    /// Which of the own addresses that is.
    pub(super) local: u16,
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
        let Some(packet) = self.packet(frame.bytes, 0) else { return Arrival::Nothing };
        match packet.protocol {
            TCP => self.arrive_tcp(now, &packet, frame),
            UDP => self.arrive_udp(&packet, frame),
            _ => {
                self.counters.unknown_protocol += 1;
                Arrival::Nothing
            }
        }
    }

    /// The packet that begins at `at`; none, and counted, if it is not one for this stack.
    fn packet(&mut self, bytes: &[u8], at: usize) -> Option<Packet> {
        let ip = bytes.get(at..)?;
        let packet = match ip.first().map(|first| first >> 4) {
            Some(6) => self.packet_v6(ip, at),
            Some(4) => self.packet_v4(ip, at),
            _ => {
                self.counters.malformed += 1;
                None
            }
        }?;
        if self.addresses.is_martian(packet.source) {
            self.counters.martians += 1;
            return None;
        }
        let Some(local) = self.addresses.find(packet.destination) else {
            self.counters.not_ours += 1;
            return None;
        };
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
            local: 0,
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
            local: 0,
            protocol,
            traffic_class: repr.traffic_class,
            hop_limit: repr.hop_limit,
            payload: at + header + behind..at + end,
        })
    }
}
