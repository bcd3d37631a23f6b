//! Addresses of VI programs: a host and a discriminator, which stands for a port.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

/// Most bytes of a discriminator.
pub const MAX_DISCRIMINATOR: usize = 64;

/// Where a program waits, or whom it asks (`VIP_NET_ADDRESS`).
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct NetAddress {
    /// The host.
    pub host: IpAddr,
    /// The program's name for what it waits for.
    pub discriminator: Vec<u8>,
}

/// The IP address of the bytes of a host address, which are 4 or 16.
pub fn host(bytes: &[u8]) -> Option<IpAddr> {
    if let Ok(bytes) = <[u8; 4]>::try_from(bytes) {
        return Some(Ipv4Addr::from(bytes).into());
    }
    let bytes = <[u8; 16]>::try_from(bytes).ok()?;
    Some(Ipv6Addr::from(bytes).to_canonical())
}

/// The bytes of an IP address.
pub fn bytes_of(host: IpAddr) -> Vec<u8> {
    match host {
        IpAddr::V4(host) => host.octets().to_vec(),
        IpAddr::V6(host) => host.octets().to_vec(),
    }
}

const FIRST_PORT: u16 = 20_480;
const PORTS: u32 = 8_192;

/// The TCP ports at which a process may listen for a discriminator, in the order in which it tries them:
/// the first that is free. No daemon knows who waits where, so both ends compute them (double hashing).
pub fn ports(discriminator: &[u8]) -> [u16; 4] {
    // FNV-1a, with its last bits mixed into the first ones.
    let hash = discriminator.iter().fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| {
        (hash ^ u64::from(*byte)).wrapping_mul(0x0000_0100_0000_01b3)
    });
    let (start, step) = ((hash >> 32) as u32 ^ hash as u32, (hash >> 17) as u32 | 1);
    [0, 1, 2, 3].map(|probe: u32| {
        let offset = start.wrapping_add(probe.wrapping_mul(step)) % PORTS;
        FIRST_PORT + offset as u16
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hosts_have_4_or_16_bytes() {
        assert_eq!(host(&[127, 0, 0, 1]), Some("127.0.0.1".parse().unwrap()));
        let six: IpAddr = "fd00::7".parse().unwrap();
        assert_eq!(host(&bytes_of(six)), Some(six));
        for wrong in [0, 3, 5, 15, 17] {
            assert_eq!(host(&vec![0; wrong]), None);
        }
    }

    #[test]
    fn discriminators_spread_over_their_range_of_ports() {
        let mut first = std::collections::HashSet::new();
        for number in 0..1000_u32 {
            let probes = ports(&number.to_le_bytes());
            assert!(probes.iter().all(|port| (20_480..28_672).contains(port)));
            let distinct: std::collections::HashSet<_> = probes.into_iter().collect();
            assert_eq!(distinct.len(), 4);
            first.insert(probes[0]);
        }
        // 1000 balls in 8192 bins meet in some 60 cases.
        assert!(first.len() > 880, "{}", first.len());
    }

    #[test]
    fn the_ports_of_a_discriminator_never_change() {
        // Processes of different versions have to find each other.
        assert_eq!(ports(b"quipu"), [27_297, 25_708, 24_119, 22_530]);
    }
}
