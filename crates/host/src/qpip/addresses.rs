//! Addresses that no single station can have.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

/// Why no station can have an address with a prefix of this length; `None` if one can.
pub(super) fn flaw(address: IpAddr, len: u8) -> Option<&'static str> {
    match address {
        _ if address.is_unspecified() => Some("it is the unspecified address"),
        _ if address.is_multicast() => Some("it is a multicast address"),
        _ if address.is_loopback() => Some("it is a loopback address"),
        IpAddr::V4(address) => flaw_v4(address, len),
        IpAddr::V6(address) => flaw_v6(address, len),
    }
}

/// RFC 1122; of the last sixteenth, RFC 1112. On a link of two both are stations (RFC 3021).
fn flaw_v4(address: Ipv4Addr, len: u8) -> Option<&'static str> {
    let hosts = u32::MAX.checked_shr(len.into()).unwrap_or(0);
    match address.octets()[0] {
        _ if address.is_broadcast() => Some("it is the broadcast address of every network"),
        0 => Some("addresses that begin with 0 are reserved"),
        240.. => Some("addresses from 240.0.0.0 on are reserved"),
        _ if len >= 31 => None,
        _ if address.to_bits() & hosts == hosts => {
            Some("it is the broadcast address of its network")
        }
        _ if address.to_bits() & hosts == 0 => Some("it is the address of its network itself"),
        _ => None,
    }
}

/// RFC 4291, of routers 2.6.1. On a link of two there is no anycast address (RFC 6164).
fn flaw_v6(address: Ipv6Addr, len: u8) -> Option<&'static str> {
    let stations = u128::MAX.checked_shr(len.into()).unwrap_or(0);
    if address.to_ipv4_mapped().is_some() {
        Some("it is an IPv4-mapped IPv6 address, which no wire carries")
    } else if len < 127 && address.to_bits() & stations == 0 {
        Some("it is the address of all routers of its network")
    } else {
        None
    }
}

/// The broadcast address of the network of an address, if it has one.
pub(super) fn broadcast(address: IpAddr, len: u8) -> Option<IpAddr> {
    match address {
        IpAddr::V4(address) if len < 31 => {
            let hosts = u32::MAX.checked_shr(len.into()).unwrap_or(0);
            Some(Ipv4Addr::from_bits(address.to_bits() | hosts).into())
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stations_have_addresses_of_their_own() {
        let flaw = |text: &str| {
            let (address, len) = text.split_once('/').unwrap();
            flaw(address.parse().unwrap(), len.parse().unwrap()).unwrap_or("")
        };
        for good in [
            "10.9.0.2/24",
            "10.9.0.0/31",
            "10.9.0.1/31",
            "10.9.0.255/32",
            "10.9.1.0/16",
            "10.9.0.255/16",
            "223.0.0.1/8",
            "169.254.0.7/16",
            "fd09::2/64",
            "fd00::/127",
            "fd00::1/127",
            "fd00::/128",
            "fe80::1/64",
            "fd00:0:0:1::/48",
        ] {
            assert_eq!(flaw(good), "", "{good}");
        }
        for (bad, word) in [
            ("255.255.255.255/32", "every network"),
            ("10.9.0.255/24", "broadcast"),
            ("10.9.0.3/30", "broadcast"),
            ("10.9.0.0/24", "network itself"),
            ("240.0.0.1/8", "reserved"),
            ("0.1.2.3/8", "begin with 0"),
            ("224.0.0.1/4", "multicast"),
            ("127.0.0.1/8", "loopback"),
            ("::ffff:1.2.3.4/96", "IPv4"),
            ("fd00::/64", "routers"),
            ("fd00:0:0:1::/64", "routers"),
            ("ff02::1/64", "multicast"),
            ("::/64", "unspecified"),
        ] {
            assert!(flaw(bad).contains(word), "{bad}: {}", flaw(bad));
        }
    }

    #[test]
    fn networks_of_more_than_two_stations_have_a_broadcast_address() {
        let of = |text: &str, len| broadcast(text.parse().unwrap(), len).map(|it| it.to_string());
        assert_eq!(of("10.9.0.2", 24).as_deref(), Some("10.9.0.255"));
        assert_eq!((of("10.9.0.2", 31), of("10.9.0.2", 32), of("fd09::2", 64)), (None, None, None));
    }
}
