//! The IPv6 header and its extension headers (RFC 8200).

use std::net::Ipv6Addr;

use crate::WireError;
use crate::field::{array, need, put, u16_at, u32_at};

/// Length of the header.
pub const LEN: usize = 40;
/// What every link carries (RFC 8200 5).
pub const MIN_MTU: u32 = 1280;
/// The longest payload: there are no jumbograms here (RFC 2675).
pub const MAX_PAYLOAD: usize = 65_535;

/// Where the destination's Next Header field stands in the header.
const NEXT_HEADER_AT: usize = 6;

/// A header (RFC 8200 3).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Repr {
    /// The sender.
    pub source: Ipv6Addr,
    /// The receiver.
    pub destination: Ipv6Addr,
    /// What the payload begins with.
    pub next_header: u8,
    /// Differentiated Services, ECN in the low bits.
    pub traffic_class: u8,
    /// 20 bits (RFC 6437).
    pub flow_label: u32,
    /// Routers that it may still pass.
    pub hop_limit: u8,
    /// Octets behind the header.
    pub payload_len: u16,
}

impl Repr {
    /// Reads the header at the front of a packet: behind its [`LEN`] octets are `payload_len` of payload,
    /// and perhaps padding of the link.
    ///
    /// # Errors
    /// Too short, or another version.
    pub fn parse(bytes: &[u8]) -> Result<(Self, usize), WireError> {
        let (repr, len) = Self::parse_quoted(bytes)?;
        need(bytes, len + usize::from(repr.payload_len))?;
        Ok((repr, len))
    }

    /// Reads the header of a packet that an ICMP error quotes: its payload may be cut off.
    ///
    /// # Errors
    /// Too short, or another version.
    pub fn parse_quoted(bytes: &[u8]) -> Result<(Self, usize), WireError> {
        need(bytes, LEN)?;
        let word = u32_at(bytes, 0);
        if word >> 28 != 6 {
            return Err(WireError::IpVersion(bytes[0] >> 4));
        }
        let repr = Self {
            source: array(bytes, 8).into(),
            destination: array(bytes, 24).into(),
            next_header: bytes[NEXT_HEADER_AT],
            traffic_class: (word >> 20) as u8,
            flow_label: word & 0x000f_ffff,
            hop_limit: bytes[7],
            payload_len: u16_at(bytes, 4),
        };
        Ok((repr, LEN))
    }

    /// Writes the header to the front of `out`, and says how long it is. The flow label is cut to its bits.
    ///
    /// # Panics
    /// If `out` is shorter than [`LEN`].
    pub fn emit(&self, out: &mut [u8]) -> usize {
        let class = u32::from(self.traffic_class) << 20;
        put(out, 0, (6 << 28 | class | self.flow_label & 0x000f_ffff).to_be_bytes());
        put(out, 4, self.payload_len.to_be_bytes());
        put(out, NEXT_HEADER_AT, [self.next_header, self.hop_limit]);
        put(out, 8, self.source.octets());
        put(out, 24, self.destination.octets());
        LEN
    }
}

/// The multicast address to which a solicitation for `target` goes (RFC 4291 2.7.1).
pub const fn solicited_node(target: Ipv6Addr) -> Ipv6Addr {
    let low = target.to_bits() & 0x00ff_ffff;
    Ipv6Addr::from_bits(0xff02_0000_0000_0000_0000_0001_ff00_0000 | low)
}

/// The station address of an IPv6 multicast group (RFC 2464 7).
pub const fn multicast_station(group: Ipv6Addr) -> [u8; 6] {
    let [.., a, b, c, d] = group.octets();
    [0x33, 0x33, a, b, c, d]
}

/// The link-local address that belongs to a station (RFC 4291 appendix A).
pub const fn link_local(station: [u8; 6]) -> Ipv6Addr {
    let [a, b, c, d, e, f] = station;
    let high = u16::from_be_bytes([a ^ 2, b]);
    let (middle, low) = (u16::from_be_bytes([c, 0xff]), u16::from_be_bytes([0xfe, d]));
    Ipv6Addr::new(0xfe80, 0, 0, 0, high, middle, low, u16::from_be_bytes([e, f]))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn packet() -> Vec<u8> {
        let mut bytes = vec![0x6a, 0xb1, 0x23, 0x45, 0, 4, 58, 255];
        bytes.extend([[0xa; 16], [0xb; 16]].concat());
        bytes.extend([1, 2, 3, 4]);
        bytes
    }

    #[test]
    fn a_header_there_and_back() {
        let (repr, len) = Repr::parse(&packet()).unwrap();
        let expected = Repr {
            source: [0xa; 16].into(),
            destination: [0xb; 16].into(),
            next_header: 58,
            traffic_class: 0xab,
            flow_label: 0x12345,
            hop_limit: 255,
            payload_len: 4,
        };
        assert_eq!((repr, len), (expected, LEN));
        let mut out = [0xff; LEN];
        assert_eq!(repr.emit(&mut out), LEN);
        assert_eq!(out, packet()[..LEN]);
        let padded = [&packet()[..], &[9; 6]].concat();
        assert_eq!(Repr::parse(&padded), Ok((expected, LEN)));
    }

    #[test]
    fn what_is_short_or_of_another_version_is_refused() {
        for len in 0..LEN + 4 {
            let need = if len < LEN { LEN } else { LEN + 4 };
            assert_eq!(
                Repr::parse(&packet()[..len]),
                Err(WireError::Truncated { need, have: len })
            );
        }
        assert!(Repr::parse_quoted(&packet()[..LEN]).is_ok());
        let mut bytes = packet();
        bytes[0] = 0x45;
        assert_eq!(Repr::parse(&bytes), Err(WireError::IpVersion(4)));
    }

    #[test]
    fn addresses_made_of_others() {
        // The examples of RFC 4291 2.7.1 and of RFC 2464 7; appendix A of RFC 4291.
        let target: Ipv6Addr = "4037::01:800:200e:8c6c".parse().unwrap();
        let group = solicited_node(target);
        assert_eq!(group, "ff02::1:ff0e:8c6c".parse::<Ipv6Addr>().unwrap());
        assert_eq!(multicast_station(group), [0x33, 0x33, 0xff, 0x0e, 0x8c, 0x6c]);
        let own = link_local([0x34, 0x56, 0x78, 0x9a, 0xbc, 0xde]);
        assert_eq!(own, "fe80::3656:78ff:fe9a:bcde".parse::<Ipv6Addr>().unwrap());
    }
}
