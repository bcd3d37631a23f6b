//! Addresses of UDP links that say where their owner is (specs/qpip-udp-link.md, 2).

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddrV4};

/// The prefix of the addresses that are places: a unique local one (RFC 4193).
pub const PREFIX: [u8; 6] = [0xfd, 0x51, 0x70, 0x69, 0x70, 0x75];
/// Its length in bits.
pub const PREFIX_LEN: u8 = 48;

/// The inner address of whoever is at `place`.
#[must_use]
pub fn address_of(place: SocketAddrV4) -> Ipv6Addr {
    let mut octets = [0; 16];
    octets[..6].copy_from_slice(&PREFIX);
    octets[8..12].copy_from_slice(&place.ip().octets());
    octets[12..14].copy_from_slice(&place.port().to_be_bytes());
    octets.into()
}

/// The place of an inner address, if it is the address of one.
#[must_use]
pub fn place_of(address: Ipv6Addr) -> Option<SocketAddrV4> {
    let octets = address.octets();
    let ip = Ipv4Addr::new(octets[8], octets[9], octets[10], octets[11]);
    let port = u16::from_be_bytes([octets[12], octets[13]]);
    let place = SocketAddrV4::new(ip, port);
    let reachable = port != 0 && !ip.is_multicast() && !ip.is_broadcast() && !ip.is_unspecified();
    (reachable && address_of(place) == address).then_some(place)
}

/// The address that the link gives the end at `place`, with the length of the prefix.
pub(super) fn own_address(place: SocketAddrV4) -> (IpAddr, u8) {
    (address_of(place).into(), PREFIX_LEN)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_place_and_its_address() {
        let place: SocketAddrV4 = "192.0.2.17:4000".parse().unwrap();
        let address = address_of(place);
        assert_eq!(address.to_string(), "fd51:7069:7075:0:c000:211:fa0:0");
        assert_eq!(place_of(address), Some(place));
        assert_eq!(own_address(place), (address.into(), 48));
    }

    #[test]
    fn addresses_that_are_no_places() {
        for address in [
            "fd51:7069:7075:1:c000:211:fa0:0",
            "fd51:7069:7075:0:c000:211:fa0:1",
            "fd51:7069:7076:0:c000:211:fa0:0",
            "fd51:7069:7075:0:c000:211:0:0",
            "fd51:7069:7075:0:e000:1:fa0:0",
            "fd51:7069:7075:0:ffff:ffff:fa0:0",
            "fd51:7069:7075:0:0:0:fa0:0",
            "::1",
        ] {
            assert_eq!(place_of(address.parse().unwrap()), None, "{address}");
        }
    }
}
