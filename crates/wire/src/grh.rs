//! The 40 bytes of global route header that stand in front of a received datagram's payload: what an
//! adapter of RoCE v2 shows of the IP header (IBA volume 1, annex A17).

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use crate::field::{array, put};

/// Length in bytes.
pub const LEN: usize = 40;
/// Length of an IPv4 header without options, which fills the second half.
const IPV4_LEN: usize = 20;
/// The next header, or protocol: UDP.
const UDP: u8 = 17;
const UDP_HEADER_LEN: usize = 8;

/// What is known of the IP header of a datagram.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Route {
    /// Who sent it.
    pub source: IpAddr,
    /// To which address, one of the receiver or of a group.
    pub dest: IpAddr,
    /// Traffic class, or type of service.
    pub traffic_class: u8,
    /// Hop limit, or time to live, as it arrived.
    pub hop_limit: u8,
}

impl Route {
    /// The header of a datagram with `udp_payload` bytes behind the UDP header. IPv6: its header. IPv4: 20
    /// bytes of zeroes, then its header. The flow label and the identification are not known, and 0.
    pub fn to_grh(&self, udp_payload: usize) -> [u8; LEN] {
        let udp_len = u16::try_from(udp_payload + UDP_HEADER_LEN).unwrap_or(u16::MAX);
        match (self.source, self.dest) {
            (IpAddr::V4(source), IpAddr::V4(dest)) => self.ipv4(source, dest, udp_len),
            (source, dest) => self.ipv6(as_ipv6(source), as_ipv6(dest), udp_len),
        }
    }

    /// Reads the header that [`Self::to_grh`] has written: that of IPv6, or that of IPv4 in the second half.
    /// `None`: it is neither.
    #[must_use]
    pub fn from_grh(grh: &[u8; LEN]) -> Option<Self> {
        if grh[0] >> 4 == 6 {
            let class = u16::from_be_bytes([grh[0], grh[1]]) >> 4;
            return Some(Self {
                source: Ipv6Addr::from(array::<16>(grh, 8)).into(),
                dest: Ipv6Addr::from(array::<16>(grh, 24)).into(),
                traffic_class: class as u8,
                hop_limit: grh[7],
            });
        }
        let header: [u8; IPV4_LEN] = array(grh, LEN - IPV4_LEN);
        (header[0] == 0x45 && checksum(&header) == 0).then(|| Self {
            source: Ipv4Addr::from(array::<4>(&header, 12)).into(),
            dest: Ipv4Addr::from(array::<4>(&header, 16)).into(),
            traffic_class: header[1],
            hop_limit: header[8],
        })
    }

    fn ipv4(&self, source: Ipv4Addr, dest: Ipv4Addr, udp_len: u16) -> [u8; LEN] {
        let mut header = [0; IPV4_LEN];
        header[0] = 0x45;
        header[1] = self.traffic_class;
        put(&mut header, 2, udp_len.saturating_add(IPV4_LEN as u16).to_be_bytes());
        header[8] = self.hop_limit;
        header[9] = UDP;
        put(&mut header, 12, source.octets());
        put(&mut header, 16, dest.octets());
        // Programs tell the two kinds apart by whether this is right.
        let sum = checksum(&header);
        put(&mut header, 10, sum.to_be_bytes());
        let mut grh = [0; LEN];
        put(&mut grh, LEN - IPV4_LEN, header);
        grh
    }

    fn ipv6(&self, source: Ipv6Addr, dest: Ipv6Addr, udp_len: u16) -> [u8; LEN] {
        let mut grh = [0; LEN];
        put(&mut grh, 0, (6 << 28 | u32::from(self.traffic_class) << 20).to_be_bytes());
        put(&mut grh, 4, udp_len.to_be_bytes());
        grh[6] = UDP;
        grh[7] = self.hop_limit;
        put(&mut grh, 8, source.octets());
        put(&mut grh, 24, dest.octets());
        grh
    }
}

fn as_ipv6(address: IpAddr) -> Ipv6Addr {
    match address {
        IpAddr::V4(v4) => v4.to_ipv6_mapped(),
        IpAddr::V6(v6) => v6,
    }
}

/// The checksum of an IPv4 header whose own field is 0 (RFC 1071).
fn checksum(header: &[u8; IPV4_LEN]) -> u16 {
    let words = header.chunks_exact(2).map(|pair| u32::from(pair[0]) << 8 | u32::from(pair[1]));
    let mut sum: u32 = words.sum();
    while sum > 0xffff {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    !(sum as u16)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ipv4_fills_the_second_half_with_a_right_checksum() {
        let route = Route {
            source: [10, 0, 0, 1].into(),
            dest: [10, 0, 0, 2].into(),
            traffic_class: 0x68,
            hop_limit: 64,
        };
        let grh = route.to_grh(120);
        assert_eq!(grh[..20], [0; 20]);
        assert_eq!(grh[20..24], [0x45, 0x68, 0, 148]);
        assert_eq!(grh[28..30], [64, 17]);
        assert_eq!(grh[32..40], [10, 0, 0, 1, 10, 0, 0, 2]);
        assert_eq!(Route::from_grh(&grh), Some(route));
        let mut wrong = grh;
        wrong[35] ^= 1;
        assert_eq!(Route::from_grh(&wrong), None);
        let header: [u8; 20] = grh[20..].try_into().unwrap();
        assert_eq!(checksum(&header), 0, "with its checksum a header sums up to nothing");
    }

    #[test]
    fn ipv6_is_the_header() {
        let (source, dest): (Ipv6Addr, Ipv6Addr) =
            ("fe80::1".parse().unwrap(), "ff02::2".parse().unwrap());
        let route =
            Route { source: source.into(), dest: dest.into(), traffic_class: 0xab, hop_limit: 1 };
        let grh = route.to_grh(20);
        assert_eq!(grh[..8], [0x6a, 0xb0, 0, 0, 0, 28, 17, 1]);
        assert_eq!(grh[8..24], source.octets());
        assert_eq!(grh[24..], dest.octets());
        assert_eq!(Route::from_grh(&grh), Some(route));
    }

    #[test]
    fn the_checksum_is_that_of_the_known_example() {
        // The header of RFC 1071's companion examples, as found in many textbooks: checksum 0xb861.
        let header = [
            0x45, 0, 0, 0x73, 0, 0, 0x40, 0, 0x40, 0x11, 0, 0, 0xc0, 0xa8, 0, 1, 0xc0, 0xa8, 0,
            0xc7,
        ];
        assert_eq!(checksum(&header), 0xb861);
    }
}
