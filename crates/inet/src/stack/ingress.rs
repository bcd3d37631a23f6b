//! A frame's way up to TCP, UDP and ICMP.

use std::borrow::Cow;
use std::net::{IpAddr, SocketAddr};

use quipu_wire::checksum::{Sum, sum};
use quipu_wire::ipv6_extension::{Fragment, Refusal, Walk, next_header, walk};
use quipu_wire::ndp::Station;
use quipu_wire::{ethernet, icmpv6, ipv4, ipv6};

use super::groups::QUERY;
use super::{Arrival, Frame, Stack};
use crate::icmp::{Cause, PROTOCOL_AT, PROTOCOL_V4};

/// Protocol numbers (IANA).
pub(super) const TCP: u8 = 6;
/// See [`TCP`].
pub(super) const UDP: u8 = 17;
/// The types of Neighbour Discovery (RFC 4861 4).
const DISCOVERY: std::ops::RangeInclusive<u8> = 133..=137;

/// What the link says of a packet.
#[derive(Clone, Copy, Debug)]
pub(super) struct Below {
    /// Where it begins in its frame.
    pub(super) at: usize,
    /// The station that sent it, on a link that has stations; none: this stack has.
    pub(super) station: Option<Station>,
    /// Whether it went to this station, and not to several.
    pub(super) to_station: bool,
}

/// An IP header.
#[derive(Clone, Copy, Debug)]
pub(super) enum Header {
    V4(ipv4::Repr),
    V6(ipv6::Repr),
}

/// A packet that has come.
#[derive(Clone, Copy, Debug)]
pub(super) struct Packet<'a> {
    pub(super) below: Below,
    pub(super) header: Header,
    /// From the IP header on; of one that came in parts, the last.
    pub(super) whole: &'a [u8],
    pub(super) source: IpAddr,
    pub(super) destination: IpAddr,
    /// Which of the own addresses that is; none: a group.
    pub(super) local: Option<u16>,
    /// Nobody can have sent it from there.
    pub(super) martian: bool,
    pub(super) traffic_class: u8,
    pub(super) hop_limit: u8,
    pub(super) protocol: u8,
    /// Where the number of the protocol stands, from the end of the IPv6 header on.
    pub(super) named_at: i32,
    pub(super) payload: &'a [u8],
    /// Where the payload begins in the frame; none: the packet came in parts.
    pub(super) at: Option<usize>,
}

impl Packet<'_> {
    /// Whether the checksum of so much of the payload is right.
    pub(super) fn is_intact(&self, payload: &[u8]) -> bool {
        let (from, to) = (self.source, self.destination);
        let pseudo = Sum::of_pseudo_header(from, to, self.protocol, payload.len());
        pseudo.and(sum(payload)).is_valid()
    }

    /// Whether the network has marked it: CE (RFC 3168 5).
    pub(super) fn is_marked(&self) -> bool {
        self.traffic_class & 3 == 3
    }

    /// As the whole whose last part it is, with this codepoint of ECN.
    fn of_parts(self, ecn: u8) -> Self {
        Self { traffic_class: self.traffic_class & !3 | ecn, ..self }
    }

    /// Itself from the IP header on, of one whose payload is known. Of one that came in parts only the
    /// beginning, with its upper layer right behind the header: what an error quotes, so that its sender
    /// knows which it was (RFC 4443 2.4 c).
    pub(super) fn quoted(&self) -> Cow<'_, [u8]> {
        if self.at.is_some() {
            return Cow::Borrowed(self.whole);
        }
        let mut bytes = vec![0; ipv6::LEN];
        let payload_len = self.payload.len() as u16;
        let len = match self.header {
            Header::V4(header) => {
                let (more_fragments, fragment_offset) = (false, 0);
                ipv4::Repr { more_fragments, fragment_offset, payload_len, ..header }
                    .emit(&mut bytes)
            }
            Header::V6(header) => {
                ipv6::Repr { next_header: self.protocol, payload_len, ..header }.emit(&mut bytes)
            }
        };
        bytes.truncate(len);
        bytes.extend(self.payload.iter().take(ipv6::MIN_MTU as usize));
        Cow::Owned(bytes)
    }

    /// Its sender, at `port`.
    pub(super) fn from(&self, port: u16) -> SocketAddr {
        SocketAddr::new(self.source, port)
    }
}

impl Stack {
    /// Takes a frame from the link. What it has brought must be taken out of it before it goes away.
    pub fn handle_frame(&mut self, now: u64, frame: &Frame<'_>) -> Arrival {
        self.now = now;
        let below = self.unframe(now, frame.bytes);
        let arrival = below.map_or(Arrival::Nothing, |below| self.arrive_ip(now, below, frame));
        self.counters.received += u64::from(arrival.is_last());
        arrival
    }

    /// Takes a frame of the stack's own, a [`Departure`](super::Departure) that loops, with its payload
    /// behind the headers. What it has brought must be taken out of it before it goes away.
    pub fn handle_looped(&mut self, now: u64, bytes: &[u8]) -> Arrival {
        self.now = now;
        let at = self.hardware.map_or(0, |_| ethernet::HEADER).min(bytes.len());
        // It was in nobody else's hands.
        let frame = Frame { bytes, checked: true };
        let arrival = self.arrive_ip(now, Below { at, station: None, to_station: true }, &frame);
        self.counters.looped += u64::from(arrival.is_last());
        arrival
    }

    fn arrive_ip(&mut self, now: u64, below: Below, frame: &Frame<'_>) -> Arrival {
        let ip = &frame.bytes[below.at..];
        match ip.first().map(|first| first >> 4) {
            Some(6) => self.arrive_v6(now, below, ip, frame.checked),
            Some(4) => self.arrive_v4(now, below, ip, frame.checked),
            _ => {
                self.counters.malformed += 1;
                Arrival::Nothing
            }
        }
    }

    /// Whether a packet is one for this stack; counted if not. Its payload is not known yet.
    fn accept<'a>(&mut self, below: Below, header: Header, ip: &'a [u8]) -> Option<Packet<'a>> {
        let (source, destination, traffic_class, hop_limit, protocol) = match header {
            Header::V4(it) => (
                it.source.into(),
                it.destination.into(),
                it.traffic_class,
                it.hop_limit,
                it.protocol,
            ),
            Header::V6(it) => {
                let (source, destination) = (it.source.into(), it.destination.into());
                (source, destination, it.traffic_class, it.hop_limit, it.next_header)
            }
        };
        let local = self.addresses.find(destination);
        if local.is_none() && !self.addresses.is_group(destination) {
            self.counters.not_ours += 1;
            return None;
        }
        // RFC 1122 3.3.6: what went to several stations is not for one address.
        if !below.to_station && local.is_some() {
            self.counters.martians += 1;
            return None;
        }
        let martian = below.station.is_some() && self.addresses.is_martian(source);
        Some(Packet {
            below,
            header,
            whole: ip,
            source,
            destination,
            local,
            martian,
            traffic_class,
            hop_limit,
            protocol,
            named_at: PROTOCOL_AT,
            payload: &[],
            at: None,
        })
    }

    fn arrive_v4(&mut self, now: u64, below: Below, ip: &[u8], checked: bool) -> Arrival {
        let Ok((repr, start)) = ipv4::Repr::parse(ip) else {
            self.counters.malformed += 1;
            return Arrival::Nothing;
        };
        let end = start + usize::from(repr.payload_len);
        let Some(packet) = self.accept(below, Header::V4(repr), &ip[..end]) else {
            return Arrival::Nothing;
        };
        let payload = &ip[start..end];
        if !repr.is_fragment() {
            let packet = Packet { payload, at: Some(below.at + start), ..packet };
            return self.arrive(now, &packet, checked);
        }
        if packet.martian || !may_come_in_parts(repr.protocol) {
            self.counters.fragments += 1;
            return Arrival::Nothing;
        }
        let mut fragments = std::mem::take(&mut self.fragments);
        let arrival = if fragments.handle_ipv4(now, &repr, payload) {
            let packet = packet.of_parts(fragments.ecn());
            self.arrive(now, &Packet { payload: fragments.whole(), ..packet }, false)
        } else {
            Arrival::Nothing
        };
        self.fragments = fragments;
        arrival
    }

    fn arrive_v6(&mut self, now: u64, below: Below, ip: &[u8], checked: bool) -> Arrival {
        let Ok((repr, start)) = ipv6::Repr::parse(ip) else {
            self.counters.malformed += 1;
            return Arrival::Nothing;
        };
        let end = start + usize::from(repr.payload_len);
        let Some(packet) = self.accept(below, Header::V6(repr), &ip[..end]) else {
            return Arrival::Nothing;
        };
        let behind = &ip[start..end];
        match walk(repr.next_header, behind, false) {
            Ok(Walk::Upper { protocol, field: named_at, at }) => {
                let payload = &behind[at..];
                let at = Some(below.at + start + at);
                self.arrive(now, &Packet { protocol, named_at, payload, at, ..packet }, checked)
            }
            Ok(Walk::Fragment { fragment, at }) => {
                self.arrive_part(now, &packet, &repr, &fragment, &behind[at..])
            }
            Err(refusal) => {
                self.refuse_headers(now, &packet, refusal);
                Arrival::Nothing
            }
        }
    }

    fn arrive_part(
        &mut self,
        now: u64,
        packet: &Packet<'_>,
        repr: &ipv6::Repr,
        fragment: &Fragment,
        part: &[u8],
    ) -> Arrival {
        if packet.martian || !may_come_in_parts(fragment.next_header) {
            self.counters.fragments += 1;
            return Arrival::Nothing;
        }
        let mut fragments = std::mem::take(&mut self.fragments);
        let arrival = match fragments.handle_ipv6(now, repr, fragment, part) {
            Ok(None) => Arrival::Nothing,
            Ok(Some(first)) => match walk(first, fragments.whole(), true) {
                Ok(Walk::Upper { protocol, at, .. }) if may_come_in_parts(protocol) => {
                    let payload = &fragments.whole()[at..];
                    let packet = Packet { protocol, payload, ..packet.of_parts(fragments.ecn()) };
                    let arrival = self.arrive(now, &packet, false);
                    self.reassembled.start += at;
                    self.reassembled.end += at;
                    arrival
                }
                _ => {
                    self.counters.fragments += 1;
                    Arrival::Nothing
                }
            },
            Err(refusal) => {
                self.refuse_headers(now, packet, refusal);
                Arrival::Nothing
            }
        };
        self.fragments = fragments;
        arrival
    }

    /// A packet whose payload is known.
    fn arrive(&mut self, now: u64, packet: &Packet<'_>, checked: bool) -> Arrival {
        // Each version of IP has a number of its own for it, which means nothing in the other.
        let (icmp, kind) = match packet.header {
            Header::V4(_) => (PROTOCOL_V4, None),
            Header::V6(_) => (icmpv6::PROTOCOL, packet.payload.first()),
        };
        let is_icmp = packet.protocol == icmp;
        let discovery = is_icmp && kind.is_some_and(|kind| DISCOVERY.contains(kind));
        // Who looks whether an address is in use has none yet, or has ours (RFC 4862 5.4).
        if packet.martian && !discovery {
            self.counters.martians += 1;
            return Arrival::Nothing;
        }
        match (packet.protocol, packet.local) {
            (TCP, Some(local)) => return self.arrive_tcp(now, packet, local, checked),
            (UDP, Some(_)) => return self.arrive_udp(now, packet, checked),
            (TCP | UDP, None) => self.counters.not_ours += 1,
            _ if is_icmp && kind == Some(&QUERY) => self.arrive_query(now, packet),
            _ if is_icmp => self.arrive_icmp(now, packet),
            (next_header::NONE, _) => self.counters.other += 1,
            _ => {
                self.counters.unknown_protocol += 1;
                self.refuse(now, packet, Cause::Protocol { at: packet.named_at });
            }
        }
        Arrival::Nothing
    }

    fn refuse_headers(&mut self, now: u64, packet: &Packet<'_>, refusal: Refusal) {
        self.counters.malformed += 1;
        if let Refusal::Problem { code, at, even_to_group } = refusal
            && !packet.martian
        {
            self.refuse(now, packet, Cause::Problem { code, at, even_to_group });
        }
    }
}

/// What is put together of parts: datagrams, and segments of peers that do not find the size of a path
/// (RFC 1122 3.3.2). ICMP is short; discovery must be whole (RFC 6980 5).
fn may_come_in_parts(protocol: u8) -> bool {
    !matches!(protocol, PROTOCOL_V4 | icmpv6::PROTOCOL)
}
