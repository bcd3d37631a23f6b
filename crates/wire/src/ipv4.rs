//! The IPv4 header (RFC 791 3.1).
//!
//! Options are passed over: no option asks anything of the host that a packet has come to, and source
//! routes are not honoured (RFC 7126 4.3).

use std::net::Ipv4Addr;

use crate::WireError;
use crate::checksum::sum;
use crate::field::{array, need, put, u16_at};

/// Length of a header without options: what is sent.
pub const LEN: usize = 20;
/// What every link carries whole (RFC 791 3.2); less is no path (RFC 1191 3).
pub const MIN_MTU: u32 = 68;
/// The longest packet.
pub const MAX_PACKET: usize = 65_535;

const CHECKSUM_AT: usize = 10;
const DONT_FRAGMENT: u16 = 0x4000;
const MORE_FRAGMENTS: u16 = 0x2000;
const OFFSET: u16 = 0x1fff;

/// A header; without options when it is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Repr {
    /// The sender.
    pub source: Ipv4Addr,
    /// The receiver.
    pub destination: Ipv4Addr,
    /// The protocol of the payload.
    pub protocol: u8,
    /// The Differentiated Services field, ECN in its low bits (RFC 2474 3, RFC 3168 5).
    pub traffic_class: u8,
    /// Time to live.
    pub hop_limit: u8,
    /// Tells the fragments of one packet from those of others.
    pub identification: u16,
    /// No router may cut it.
    pub dont_fragment: bool,
    /// It is not the last fragment.
    pub more_fragments: bool,
    /// Where its payload stands in that of the whole packet: octets, a multiple of eight, at most 65528.
    pub fragment_offset: u16,
    /// Octets behind the header.
    pub payload_len: u16,
}

impl Repr {
    /// Reads the header at the front of a packet and says how long it is: behind it are `payload_len`
    /// octets of payload, and perhaps padding of the link.
    ///
    /// # Errors
    /// Too short, another version, impossible lengths, or a wrong checksum.
    pub fn parse(bytes: &[u8]) -> Result<(Self, usize), WireError> {
        let (repr, len) = Self::parse_quoted(bytes)?;
        need(bytes, len + usize::from(repr.payload_len))?;
        if !sum(&bytes[..len]).is_valid() {
            return Err(WireError::BadChecksum);
        }
        Ok((repr, len))
    }

    /// Reads the header of a packet that an ICMP error quotes: its payload may be cut off, and routers may
    /// have changed what the checksum is of.
    ///
    /// # Errors
    /// Too short, another version, or impossible lengths.
    pub fn parse_quoted(bytes: &[u8]) -> Result<(Self, usize), WireError> {
        need(bytes, LEN)?;
        if bytes[0] >> 4 != 4 {
            return Err(WireError::IpVersion(bytes[0] >> 4));
        }
        let len = usize::from(bytes[0] & 0x0f) * 4;
        if len < LEN {
            return Err(WireError::OutOfRange("IPv4 header length"));
        }
        need(bytes, len)?;
        let total = usize::from(u16_at(bytes, 2));
        let Some(payload_len) = total.checked_sub(len) else {
            return Err(WireError::OutOfRange("IPv4 total length"));
        };
        let fragment = u16_at(bytes, 6);
        let repr = Self {
            source: array(bytes, 12).into(),
            destination: array(bytes, 16).into(),
            protocol: bytes[9],
            traffic_class: bytes[1],
            hop_limit: bytes[8],
            identification: u16_at(bytes, 4),
            dont_fragment: fragment & DONT_FRAGMENT != 0,
            more_fragments: fragment & MORE_FRAGMENTS != 0,
            fragment_offset: (fragment & OFFSET) << 3,
            payload_len: payload_len as u16,
        };
        Ok((repr, len))
    }

    /// Whether it is a part of a packet.
    #[inline]
    pub fn is_fragment(&self) -> bool {
        self.more_fragments || self.fragment_offset > 0
    }

    /// Writes the header, with its checksum, to the front of `out`, and says how long it is.
    ///
    /// # Panics
    /// If `out` is shorter than [`LEN`], or the payload too long for an IPv4 packet.
    pub fn emit(&self, out: &mut [u8]) -> usize {
        let total = LEN + usize::from(self.payload_len);
        assert!(total <= MAX_PACKET, "an IPv4 packet of {total} octets");
        let flag = |set: bool, flag: u16| if set { flag } else { 0 };
        let fragment = self.fragment_offset >> 3
            | flag(self.dont_fragment, DONT_FRAGMENT)
            | flag(self.more_fragments, MORE_FRAGMENTS);
        put(out, 0, [0x45, self.traffic_class]);
        put(out, 2, (total as u16).to_be_bytes());
        put(out, 4, self.identification.to_be_bytes());
        put(out, 6, fragment.to_be_bytes());
        put(out, 8, [self.hop_limit, self.protocol]);
        put(out, CHECKSUM_AT, [0; 2]);
        put(out, 12, self.source.octets());
        put(out, 16, self.destination.octets());
        put(out, CHECKSUM_AT, sum(&out[..LEN]).checksum().to_be_bytes());
        LEN
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A UDP datagram's header as found in many textbooks: its checksum is b861.
    const HEADER: [u8; LEN] = [
        0x45, 0, 0, 0x73, 0, 0, 0x40, 0, 0x40, 0x11, 0xb8, 0x61, 0xc0, 0xa8, 0, 1, 0xc0, 0xa8, 0,
        0xc7,
    ];

    fn packet() -> Vec<u8> {
        [&HEADER[..], &[0; 95]].concat()
    }

    fn sealed(mut bytes: Vec<u8>) -> Vec<u8> {
        let len = usize::from(bytes[0] & 0x0f) * 4;
        put(&mut bytes, CHECKSUM_AT, [0; 2]);
        let checksum = sum(&bytes[..len.min(115)]).checksum();
        put(&mut bytes, CHECKSUM_AT, checksum.to_be_bytes());
        bytes
    }

    #[test]
    fn a_header_there_and_back() {
        let (repr, len) = Repr::parse(&packet()).unwrap();
        assert_eq!((len, repr.payload_len, repr.protocol), (20, 95, 17));
        assert_eq!(repr.destination, Ipv4Addr::new(192, 168, 0, 199));
        assert!(repr.dont_fragment && !repr.is_fragment());
        let mut out = [0xff; LEN];
        assert_eq!(repr.emit(&mut out), LEN);
        assert_eq!(out, HEADER);
    }

    #[test]
    fn what_makes_no_sense_is_refused() {
        for len in 0..115 {
            let need = if len < LEN { LEN } else { 115 };
            assert_eq!(
                Repr::parse(&packet()[..len]),
                Err(WireError::Truncated { need, have: len })
            );
        }
        let changed = |at: usize, value: u8| {
            let mut bytes = packet();
            bytes[at] = value;
            Repr::parse(&sealed(bytes))
        };
        assert_eq!(changed(0, 0x65), Err(WireError::IpVersion(6)));
        assert_eq!(changed(0, 0x44), Err(WireError::OutOfRange("IPv4 header length")));
        assert_eq!(changed(3, 19), Err(WireError::OutOfRange("IPv4 total length")));
        let mut corrupt = packet();
        corrupt[8] = 1;
        assert_eq!(Repr::parse(&corrupt), Err(WireError::BadChecksum));
        assert!(Repr::parse_quoted(&corrupt[..LEN]).is_ok(), "a router has counted the hop");
    }

    #[test]
    fn options_are_passed_over() {
        let mut bytes = packet();
        bytes[0] = 0x4f;
        let (repr, len) = Repr::parse(&sealed(bytes)).unwrap();
        assert_eq!((len, repr.payload_len), (60, 55));
    }

    #[test]
    fn padding_of_the_link_does_not_count() {
        let padded = [&packet()[..], &[0xee; 7]].concat();
        assert_eq!(Repr::parse(&padded).unwrap().0.payload_len, 95);
    }

    #[test]
    fn fragments() {
        let (repr, _) = Repr::parse(&packet()).unwrap();
        let last = Repr { fragment_offset: 65_528, dont_fragment: false, ..repr };
        let mut out = packet();
        last.emit(&mut out);
        assert_eq!(out[6..8], [0x1f, 0xff]);
        assert_eq!(Repr::parse(&out), Ok((last, LEN)));
        let first = Repr { more_fragments: true, ..repr };
        first.emit(&mut out);
        let parsed = Repr::parse(&out).unwrap().0;
        assert!(parsed == first && parsed.is_fragment());
    }
}
