//! What goes out: headers in front of segments and datagrams.

use std::net::{IpAddr, Ipv6Addr};
use std::ops::Range;

use quipu_wire::checksum::{Sum, sum};
use quipu_wire::ipv6_extension::{FRAGMENT_LEN, Fragment, next_header};
use quipu_wire::ndp::Station;
use quipu_wire::{ethernet, icmpv6, ipv4, ipv6, tcp as wire};

use super::ingress::TCP;
use super::{Carriage, Checksum, Departure, Stack};
use crate::icmp::{Message, PROTOCOL_V4};

/// What hosts give packets (RFC 1700, RFC 6540).
const HOP_LIMIT: u8 = 64;
/// Answers that wait at a time: beyond it they are dropped, as the link would do. All who have waited for a
/// port may get theirs at once.
const MAX_ANSWERS: usize = 256;

/// What the stack says itself, and the station from which the cause came: the answer goes back there; none:
/// to this stack.
#[derive(Clone, Debug)]
pub(super) enum Answer {
    /// A segment of no connection: a reset, or a cookie.
    Segment {
        station: Option<Station>,
        local: u16,
        to: IpAddr,
        carriage: Carriage,
        header: wire::Repr,
    },
    /// The next message of ICMP.
    Message { station: Option<Station> },
}

/// Which part of a packet is sent (RFC 8200 4.5, RFC 791 3.2).
#[derive(Clone, Copy, Debug)]
pub(super) struct Part {
    pub(super) identification: u32,
    /// Where it stands: octets of the upper layer, a multiple of eight.
    pub(super) offset: u16,
    pub(super) more: bool,
}

/// What is to stand in an IP header.
#[derive(Clone, Copy, Debug)]
pub(super) struct Envelope {
    pub(super) local: u16,
    pub(super) to: IpAddr,
    /// Where it goes next, on a link that has stations; none: it comes back.
    pub(super) station: Option<Station>,
    pub(super) protocol: u8,
    pub(super) traffic_class: u8,
    pub(super) flow_label: u32,
    /// None: the usual one.
    pub(super) hop_limit: Option<u8>,
    /// None: it is whole.
    pub(super) part: Option<Part>,
}

impl Envelope {
    /// Of what needs nothing special.
    pub(super) fn plain(local: u16, to: IpAddr, station: Option<Station>, protocol: u8) -> Self {
        let (traffic_class, flow_label, hop_limit) = (0, 0, None);
        let part = None;
        Self { local, to, station, protocol, traffic_class, flow_label, hop_limit, part }
    }

    /// Carried like this.
    pub(super) fn carried(self, carriage: Carriage) -> Self {
        let Carriage { traffic_class, hop_limit } = carriage;
        Self { traffic_class, hop_limit, ..self }
    }
}

impl Stack {
    /// The next frame: the stack's own answers first, then connections in turn. `out` has room for the MTU
    /// and 14 octets, or, where the link cuts segments itself, for 65 549 octets. The user copies the
    /// payload behind the headers.
    pub fn poll_transmit(&mut self, now: u64, out: &mut [u8]) -> Option<Departure> {
        let first = self.transmit_discovery(out).or_else(|| self.transmit_report(out));
        if first.is_some() {
            return first;
        }
        while let Some(answer) = self.answers.pop_front() {
            match answer {
                Answer::Segment { station, local, to, carriage, header } => {
                    let envelope = Envelope::plain(local, to, station, TCP).carried(carriage);
                    return Some(self.write_segment(&envelope, &header, 0..0, out));
                }
                Answer::Message { station } => {
                    let departure = self.transmit_message(station, out);
                    if departure.is_some() {
                        return departure;
                    }
                }
            }
        }
        // Anyone who is to be spoken to may have to be found first.
        self.transmit_tcp(now, out).or_else(|| self.transmit_discovery(out))
    }

    fn transmit_discovery(&mut self, out: &mut [u8]) -> Option<Departure> {
        let headers = self.neighbours.as_mut()?.poll_transmit(out)?;
        self.counters.sent += 1;
        Some(Departure::bare(headers))
    }

    /// The next message of ICMP; none, if it is longer than the link takes.
    fn transmit_message(&mut self, station: Option<Station>, out: &mut [u8]) -> Option<Departure> {
        let Message { source, destination: to, bytes } = self.icmp.poll_transmit()?;
        let local = self.addresses.find(source)?;
        if bytes.len() + ip_header(to) as usize > self.link_mtu() as usize {
            self.counters.answers_dropped += 1;
            return None;
        }
        let protocol = if to.is_ipv6() { icmpv6::PROTOCOL } else { PROTOCOL_V4 };
        let envelope = Envelope::plain(local, to, station, protocol);
        let start = self.write_ip(&envelope, bytes.len(), out);
        let headers = start + bytes.len();
        out[start..headers].copy_from_slice(&bytes);
        self.counters.sent += u64::from(station.is_some());
        Some(Departure { loops: station.is_none(), ..Departure::bare(headers) })
    }

    /// Whether [`Stack::poll_transmit`] may have something.
    #[inline]
    pub fn wants_transmit(&self) -> bool {
        !self.answers.is_empty()
            || self.connections.is_ready()
            || self.groups.wants_transmit()
            || self.neighbours.as_ref().is_some_and(|it| it.wants_transmit())
    }

    pub(super) fn keep_answer(&mut self, answer: Answer) {
        if self.answers.len() < MAX_ANSWERS {
            self.answers.push_back(answer);
            return;
        }
        self.counters.answers_dropped += 1;
        if let Answer::Message { .. } = answer {
            self.icmp.withdraw();
        }
    }

    /// Computes the checksum that a [`Departure`] asks for, over the whole frame: for links that do not.
    ///
    /// # Panics
    /// If `checksum` lies outside of the frame.
    pub fn seal(frame: &mut [u8], checksum: Checksum) {
        let (start, at) = (usize::from(checksum.start), usize::from(checksum.at));
        let value = sum(&frame[start..]).checksum();
        // RFC 768: zero means that there is none. The other zero means the same to a sum.
        let value = if value == 0 { u16::MAX } else { value };
        frame[at..at + 2].copy_from_slice(&value.to_be_bytes());
    }

    /// Writes the headers of a segment.
    pub(super) fn write_segment(
        &mut self,
        envelope: &Envelope,
        header: &wire::Repr,
        payload: Range<u64>,
        out: &mut [u8],
    ) -> Departure {
        let len = (payload.end - payload.start) as usize;
        let start = self.write_ip(envelope, header.header_len() + len, out);
        header.emit(&mut out[start..]);
        let headers = start + header.header_len();
        let at = start + wire::CHECKSUM_AT;
        let checksum = self.prepare(envelope, start, at, headers, len, out);
        Departure {
            payload,
            checksum,
            loops: envelope.station.is_none(),
            ..Departure::bare(headers)
        }
    }

    /// Fills the checksum field at `at`: with all of it if there is no payload, otherwise with the sum of
    /// the pseudo-header.
    pub(super) fn prepare(
        &mut self,
        envelope: &Envelope,
        start: usize,
        at: usize,
        headers: usize,
        payload: usize,
        out: &mut [u8],
    ) -> Option<Checksum> {
        self.counters.sent += u64::from(envelope.station.is_some());
        let own = self.addresses.get(envelope.local);
        let len = headers - start + payload;
        let pseudo = Sum::of_pseudo_header(own, envelope.to, envelope.protocol, len);
        out[at..at + 2].copy_from_slice(&pseudo.partial().to_be_bytes());
        let checksum = Checksum { start: start as u16, at: at as u16 };
        if payload == 0 {
            Self::seal(&mut out[..headers], checksum);
            return None;
        }
        Some(checksum)
    }

    /// Writes what stands in front of `len` octets of the upper layer, and says where they begin.
    pub(super) fn write_ip(&self, envelope: &Envelope, len: usize, out: &mut [u8]) -> usize {
        let at = match (self.hardware, envelope.to) {
            (Some(source), to) => {
                let kind = if to.is_ipv6() { ethernet::kind::IPV6 } else { ethernet::kind::IPV4 };
                let destination = envelope.station.unwrap_or(source);
                ethernet::Repr { destination, source, kind }.emit(out)
            }
            (None, _) => 0,
        };
        let out = &mut out[at..];
        at + match (self.addresses.get(envelope.local), envelope.to) {
            (IpAddr::V6(source), IpAddr::V6(destination)) => {
                self.write_v6(envelope, source, destination, len, out)
            }
            (IpAddr::V4(source), IpAddr::V4(destination)) => {
                let part = envelope.part;
                ipv4::Repr {
                    source,
                    destination,
                    protocol: envelope.protocol,
                    traffic_class: envelope.traffic_class,
                    hop_limit: envelope.hop_limit.unwrap_or_else(|| self.hop_limit()),
                    // RFC 6864 4.1: a packet that nobody may cut needs none.
                    identification: part.map_or(0, |part| part.identification as u16),
                    // What was cut may be cut again, as where nobody says how narrow a path is.
                    dont_fragment: part.is_none(),
                    more_fragments: part.is_some_and(|part| part.more),
                    fragment_offset: part.map_or(0, |part| part.offset),
                    payload_len: len as u16,
                }
                .emit(out)
            }
            _ => unreachable!("both ends of a packet are of one family"),
        }
    }

    fn write_v6(
        &self,
        envelope: &Envelope,
        source: Ipv6Addr,
        destination: Ipv6Addr,
        len: usize,
        out: &mut [u8],
    ) -> usize {
        let extra = if envelope.part.is_some() { FRAGMENT_LEN } else { 0 };
        let next_header = match envelope.part {
            Some(_) => next_header::FRAGMENT,
            None => envelope.protocol,
        };
        let header = ipv6::Repr {
            source,
            destination,
            next_header,
            traffic_class: envelope.traffic_class,
            flow_label: envelope.flow_label,
            hop_limit: envelope.hop_limit.unwrap_or_else(|| self.hop_limit()),
            payload_len: (extra + len) as u16,
        }
        .emit(out);
        let Some(Part { identification, offset, more }) = envelope.part else { return header };
        let next_header = envelope.protocol;
        header + Fragment { next_header, offset, more, identification }.emit(&mut out[header..])
    }

    fn hop_limit(&self) -> u8 {
        self.neighbours.as_ref().and_then(|it| it.hop_limit()).unwrap_or(HOP_LIMIT)
    }
}

/// Octets of the IP header to `to`.
pub(super) fn ip_header(to: IpAddr) -> u32 {
    if to.is_ipv6() { ipv6::LEN as u32 } else { ipv4::LEN as u32 }
}
