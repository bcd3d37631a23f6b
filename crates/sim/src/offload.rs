//! What links do for hosts: they cut long segments on the way out (GSO) and join those that follow each other
//! on the way in (GRO, as the Linux kernel does it). And what hosts of other makes do: datagrams in parts.

use std::net::IpAddr;

use quipu_nic::inet::stack::{Checksum, Stack};
use quipu_nic::iwarp::wire::checksum::{Sum, sum};
use quipu_nic::iwarp::wire::ipv6_extension::{FRAGMENT_LEN, Walk, next_header, walk};
use quipu_nic::iwarp::wire::tcp::{CHECKSUM_AT, Flags, SeqNumber};
use quipu_nic::iwarp::wire::{ipv4, ipv6, tcp, udp};

/// Protocol numbers (IANA).
pub const TCP: u8 = 6;
/// See [`TCP`].
pub const UDP: u8 = 17;
/// Where the sequence number and the flags stand in a TCP header (RFC 9293 3.1).
const SEQ_AT: usize = 4;
const FLAGS_AT: usize = 13;

/// An IP header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ip {
    V4(ipv4::Repr),
    V6(ipv6::Repr),
}

impl Ip {
    /// Reads the header at the front of a packet, and says how long it is.
    pub fn parse(packet: &[u8]) -> Option<(Self, usize)> {
        match packet.first()? >> 4 {
            4 => ipv4::Repr::parse(packet).ok().map(|(ip, len)| (Self::V4(ip), len)),
            _ => ipv6::Repr::parse(packet).ok().map(|(ip, len)| (Self::V6(ip), len)),
        }
    }

    /// Sender and receiver.
    pub fn ends(&self) -> [IpAddr; 2] {
        match self {
            Self::V4(ip) => [ip.source.into(), ip.destination.into()],
            Self::V6(ip) => [ip.source.into(), ip.destination.into()],
        }
    }

    /// What its payload is; of a part of a packet none of those above.
    pub fn protocol(&self) -> u8 {
        match self {
            Self::V4(ip) if ip.is_fragment() => next_header::FRAGMENT,
            Self::V4(ip) => ip.protocol,
            Self::V6(ip) => ip.next_header,
        }
    }

    /// Octets behind it.
    pub fn payload_len(&self) -> usize {
        usize::from(match self {
            Self::V4(ip) => ip.payload_len,
            Self::V6(ip) => ip.payload_len,
        })
    }

    /// The same in front of so many octets.
    fn with_len(self, len: usize) -> Self {
        let payload_len = len as u16;
        match self {
            Self::V4(ip) => Self::V4(ipv4::Repr { payload_len, ..ip }),
            Self::V6(ip) => Self::V6(ipv6::Repr { payload_len, ..ip }),
        }
    }

    fn emit(&self, out: &mut [u8]) {
        match self {
            Self::V4(ip) => ip.emit(out),
            Self::V6(ip) => ip.emit(out),
        };
    }
}

/// A TCP segment in a frame.
#[derive(Clone, Debug)]
struct Segment {
    ip: Ip,
    tcp: tcp::Repr,
    /// Where the IP packet begins, its payload, and that of TCP.
    at: usize,
    start: usize,
    data: usize,
}

impl Segment {
    fn parse(frame: &[u8], at: usize) -> Option<Self> {
        let (ip, len) = Ip::parse(&frame[at..])?;
        let start = at + len;
        let whole = ip.protocol() == TCP && frame.len() == start + ip.payload_len();
        let (tcp, header) = tcp::Repr::parse(&frame[start..]).ok().filter(|_| whole)?;
        Some(Self { ip, tcp, at, start, data: start + header })
    }
}

/// Cuts the payload of a segment into pieces of `size` octets, each behind the headers that it needs, and
/// completes their checksums. PSH and FIN go with the last piece, CWR with the first (RFC 3168 6.1.2).
pub fn cut(frame: &[u8], at: usize, size: usize) -> Vec<Vec<u8>> {
    let Some(Segment { ip, tcp, start, data, .. }) = Segment::parse(frame, at) else {
        return vec![frame.to_vec()];
    };
    let payload = &frame[data..];
    let pieces = payload.chunks(size.max(1)).enumerate().map(|(index, piece)| {
        let from = index * size;
        let mut flags = tcp.flags.bits();
        if from + piece.len() < payload.len() {
            flags &= !(Flags::PSH.bits() | Flags::FIN.bits());
        }
        if index > 0 {
            flags &= !Flags::CWR.bits();
        }
        let mut out = [&frame[..data], piece].concat();
        let len = out.len() - start;
        ip.with_len(len).emit(&mut out[at..]);
        let seq = tcp.seq.0.wrapping_add(from as u32);
        out[start + SEQ_AT..start + SEQ_AT + 4].copy_from_slice(&seq.to_be_bytes());
        out[start + FLAGS_AT] = flags;
        let [source, destination] = ip.ends();
        let pseudo = Sum::of_pseudo_header(source, destination, TCP, len).partial();
        let place = start + CHECKSUM_AT;
        out[place..place + 2].copy_from_slice(&pseudo.to_be_bytes());
        Stack::seal(&mut out, Checksum { start: start as u16, at: place as u16 });
        out
    });
    pieces.collect()
}

/// A frame that has come, and waits a little for others that continue it.
#[derive(Clone, Debug)]
pub struct Held {
    pub bytes: Vec<u8>,
    /// The link vouches for the checksum of TCP.
    pub checked: bool,
    /// A segment that others may be joined to.
    grows: Option<Growing>,
}

#[derive(Clone, Debug)]
struct Growing {
    segment: Segment,
    /// Octets of its first part: no other is longer, and a shorter one is the last.
    size: usize,
    next: SeqNumber,
    full: bool,
}

impl Held {
    /// A frame as it has come.
    pub fn new(bytes: &[u8], at: usize) -> Self {
        let grows = Segment::parse(bytes, at).filter(|segment| segment.is_joinable(bytes));
        let checked = grows.is_some();
        let grows = grows.map(|segment| {
            let size = bytes.len() - segment.data;
            let full = segment.tcp.flags.has(Flags::PSH);
            Growing { next: segment.tcp.seq + size as u32, full, size, segment }
        });
        Self { bytes: bytes.to_vec(), checked, grows }
    }

    /// Whether the other one is of the same connection, in the same direction.
    pub fn is_of_flow(&self, other: &Self) -> bool {
        let (Some(this), Some(other)) = (&self.grows, &other.grows) else { return false };
        let ports = |it: &Growing| (it.segment.tcp.source, it.segment.tcp.destination);
        (this.segment.ip.ends(), ports(this)) == (other.segment.ip.ends(), ports(other))
    }

    /// Takes in the next one of its connection, if that continues it and differs in nothing else.
    pub fn join(&mut self, next: &Self) -> bool {
        let (Some(this), Some(that)) = (&mut self.grows, &next.grows) else { return false };
        let payload = &next.bytes[that.segment.data..];
        let headers = |bytes: &[u8], it: &Segment| {
            let options = bytes[it.start + tcp::MIN_LEN..it.data].to_vec();
            (it.ip.with_len(0), bytes[..it.at].to_vec(), it.tcp.ack, options)
        };
        let alike = headers(&self.bytes, &this.segment) == headers(&next.bytes, &that.segment);
        let len = self.bytes.len() - this.segment.start + payload.len();
        let fits = len <= ipv6::MAX_PAYLOAD - ipv6::LEN && payload.len() <= this.size;
        if this.full || !alike || !fits || this.next != that.segment.tcp.seq {
            return false;
        }
        self.bytes.extend_from_slice(payload);
        this.segment.ip.with_len(len).emit(&mut self.bytes[this.segment.at..]);
        self.bytes[this.segment.start + FLAGS_AT] |= that.segment.tcp.flags.bits();
        this.next += payload.len() as u32;
        this.full = that.full || payload.len() < this.size;
        true
    }
}

impl Segment {
    /// Whether it is nothing but intact data (ACK and PSH aside), as most are.
    fn is_joinable(&self, frame: &[u8]) -> bool {
        let [source, destination] = self.ip.ends();
        let octets = &frame[self.start..];
        let pseudo = Sum::of_pseudo_header(source, destination, TCP, octets.len());
        let plain = self.tcp.flags.bits() & !Flags::PSH.bits() == Flags::ACK.bits();
        plain && octets.len() > self.data - self.start && pseudo.and(sum(octets)).is_valid()
    }
}

/// The payload of a datagram in a packet, where it is one and not a part of one.
pub fn datagram(packet: &[u8]) -> Option<&[u8]> {
    let (ip, start) = Ip::parse(packet)?;
    let whole = packet.get(start..start + ip.payload_len()).filter(|_| ip.protocol() == UDP)?;
    let (header, len) = udp::Repr::parse(whole).ok()?;
    whole.get(len..len + usize::from(header.payload_len))
}

/// Where a packet's octets stand in the whole of which it is a part, which number that has, and those octets.
pub fn part(packet: &[u8]) -> Option<(u16, u32, &[u8])> {
    let (ip, start) = Ip::parse(packet)?;
    let octets = packet.get(start..start + ip.payload_len())?;
    match ip {
        Ip::V4(ip) if ip.is_fragment() => {
            Some((ip.fragment_offset, ip.identification.into(), octets))
        }
        Ip::V4(_) => None,
        Ip::V6(ip) => match walk(ip.next_header, octets, false) {
            Ok(Walk::Fragment { fragment, at }) => {
                Some((fragment.offset, fragment.identification, &octets[at..]))
            }
            _ => None,
        },
    }
}

/// A packet of IPv4 that may be cut in packets of `size` octets at most, as a router sends it on (RFC 791
/// 3.2). It may be a part already.
pub fn cut_on_the_way(frame: &[u8], at: usize, size: usize) -> Option<Vec<Vec<u8>>> {
    let (Ip::V4(ip), len) = Ip::parse(&frame[at..])? else { return None };
    if ip.dont_fragment {
        return None;
    }
    let start = at + len;
    let payload = &frame[start..start + usize::from(ip.payload_len)];
    let room = size.checked_sub(len)? & !7;
    let of = |(index, piece): (usize, &[u8])| {
        let offset = index * room;
        let mut out = frame[..start].to_vec();
        ipv4::Repr {
            more_fragments: ip.more_fragments || offset + piece.len() < payload.len(),
            fragment_offset: ip.fragment_offset + offset as u16,
            payload_len: piece.len() as u16,
            ..ip
        }
        .emit(&mut out[at..]);
        out.extend_from_slice(piece);
        out
    };
    Some(payload.chunks(room).enumerate().map(of).collect())
}

/// A datagram longer than `size` octets in parts of that length at most, as hosts send it that do not refuse
/// to (RFC 8200 4.5, RFC 791 3.2).
pub fn parts(frame: &[u8], at: usize, size: usize, identification: u32) -> Option<Vec<Vec<u8>>> {
    let (ip, len) = Ip::parse(&frame[at..]).filter(|(ip, _)| ip.protocol() == UDP)?;
    let start = at + len;
    if frame.len() - at <= size {
        return None;
    }
    let extra = if let Ip::V6(_) = ip { FRAGMENT_LEN } else { 0 };
    let room = (size - len - extra) & !7;
    let payload = &frame[start..];
    let of = |(index, piece): (usize, &[u8])| {
        let offset = (index * room) as u16;
        let more = usize::from(offset) + piece.len() < payload.len();
        let mut out = frame[..start].to_vec();
        let ip = ip.with_len(extra + piece.len());
        match ip {
            Ip::V4(ip) => Ip::V4(ipv4::Repr {
                identification: identification as u16,
                dont_fragment: false,
                more_fragments: more,
                fragment_offset: offset,
                ..ip
            }),
            Ip::V6(ip) => Ip::V6(ipv6::Repr { next_header: next_header::FRAGMENT, ..ip }),
        }
        .emit(&mut out[at..]);
        if extra > 0 {
            out.extend([UDP, 0]);
            out.extend((offset | u16::from(more)).to_be_bytes());
            out.extend(identification.to_be_bytes());
        }
        out.extend_from_slice(piece);
        out
    };
    Some(payload.chunks(room).enumerate().map(of).collect())
}

#[cfg(test)]
mod tests {
    use std::net::{Ipv4Addr, Ipv6Addr};

    use quipu_nic::inet::fragments::Fragments;

    use super::*;

    /// A frame with a segment of such a payload, and a checksum that is right.
    fn segment(v6: bool, seq: u32, flags: Flags, payload: &[u8]) -> Vec<u8> {
        let tcp = tcp::Repr {
            source: 1,
            destination: 2,
            seq: SeqNumber(seq),
            ack: SeqNumber(7),
            flags,
            window: 100,
            ..tcp::Repr::default()
        };
        let len = tcp.header_len() + payload.len();
        let ip = ip(v6, TCP, len);
        let start = if v6 { ipv6::LEN } else { ipv4::LEN };
        let mut out = vec![0; start + tcp.header_len()];
        ip.emit(&mut out);
        tcp.emit(&mut out[start..]);
        out.extend_from_slice(payload);
        // Cut into one piece it is the same with a checksum.
        cut(&out, 0, payload.len().max(1)).pop().unwrap_or(out)
    }

    fn ip(v6: bool, protocol: u8, len: usize) -> Ip {
        let payload_len = len as u16;
        let (traffic_class, hop_limit) = (2, 64);
        if v6 {
            let (source, destination) = (Ipv6Addr::LOCALHOST, Ipv6Addr::LOCALHOST);
            let flow_label = 5;
            return Ip::V6(ipv6::Repr {
                source,
                destination,
                next_header: protocol,
                traffic_class,
                flow_label,
                hop_limit,
                payload_len,
            });
        }
        Ip::V4(ipv4::Repr {
            source: Ipv4Addr::new(10, 0, 0, 1),
            destination: Ipv4Addr::new(10, 0, 0, 2),
            protocol,
            traffic_class,
            hop_limit,
            identification: 0,
            dont_fragment: true,
            more_fragments: false,
            fragment_offset: 0,
            payload_len,
        })
    }

    #[test]
    fn what_is_cut_and_joined_again_is_the_same() {
        let payload: Vec<u8> = (0..10_000u32).map(|at| at as u8 ^ (at >> 8) as u8).collect();
        for v6 in [false, true] {
            let whole = segment(v6, 0xffff_ff00, Flags::ACK | Flags::PSH, &payload);
            let pieces = cut(&whole, 0, 1_200);
            assert_eq!(pieces.len(), 9);
            let mut held = Held::new(&pieces[0], 0);
            assert!(
                held.checked && pieces[1..].iter().all(|piece| held.join(&Held::new(piece, 0)))
            );
            let place = Segment::parse(&whole, 0).unwrap().start + CHECKSUM_AT;
            let without = |bytes: &[u8]| [&bytes[..place], &bytes[place + 2..]].concat();
            assert!(without(&held.bytes) == without(&whole));
        }
    }

    #[test]
    fn only_what_continues_it_is_joined() {
        let first = Held::new(&segment(true, 10, Flags::ACK, &[1; 100]), 0);
        let joins = |seq, flags, len: usize| {
            let next = Held::new(&segment(true, seq, flags, &vec![2; len]), 0);
            first.clone().join(&next)
        };
        assert!(joins(110, Flags::ACK, 100) && joins(110, Flags::ACK | Flags::PSH, 7));
        assert!(!joins(111, Flags::ACK, 100), "a gap");
        assert!(!joins(110, Flags::ACK, 101), "it is longer");
        assert!(!joins(110, Flags::ACK | Flags::FIN, 100), "it is the last");
        let mut damaged = segment(true, 110, Flags::ACK, &[2; 100]);
        damaged[90] ^= 1;
        assert!(!Held::new(&damaged, 0).checked && !first.clone().join(&Held::new(&damaged, 0)));
        let mut pushed = Held::new(&segment(true, 10, Flags::ACK | Flags::PSH, &[1; 100]), 0);
        let next = Held::new(&segment(true, 110, Flags::ACK, &[2; 100]), 0);
        assert!(pushed.is_of_flow(&next) && !pushed.join(&next), "PSH ends it");
    }

    #[test]
    fn parts_make_the_datagram_again() {
        for v6 in [false, true] {
            let mut frame = vec![0; if v6 { ipv6::LEN } else { ipv4::LEN }];
            let payload: Vec<u8> = (0..5_000u32).map(|at| (at >> 3) as u8).collect();
            ip(v6, UDP, payload.len()).emit(&mut frame);
            frame.extend_from_slice(&payload);
            assert_eq!(parts(&frame, 0, 6_000, 9), None);
            let parts = parts(&frame, 0, 1_280, 9).unwrap();
            let mut fragments = Fragments::default();
            let last = parts.len() - 1;
            for (index, part) in parts.iter().enumerate() {
                assert!(part.len() <= 1_280);
                let whole = match Ip::parse(part).unwrap() {
                    (Ip::V4(ip), at) => fragments.handle_ipv4(1, &ip, &part[at..]),
                    (Ip::V6(ip), at) => {
                        let walked = walk(ip.next_header, &part[at..], false).unwrap();
                        let Walk::Fragment { fragment, at: header } = walked else { panic!() };
                        let payload = &part[at + header..];
                        fragments.handle_ipv6(1, &ip, &fragment, payload).unwrap() == Some(UDP)
                    }
                };
                assert_eq!(whole, index == last);
            }
            assert!(fragments.whole() == payload);
        }
    }
}
