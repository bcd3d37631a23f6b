//! The own addresses, and those of others as far as one sees what they are.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use quipu_wire::ipv6;

const ALL_NODES: Ipv6Addr = Ipv6Addr::new(0xff02, 0, 0, 0, 0, 0, 0, 1);

/// An own address.
#[derive(Clone, Copy, Debug)]
struct Address {
    ip: IpAddr,
    prefix: u8,
}

/// Own addresses, by small numbers that stay the same.
#[derive(Clone, Debug)]
pub(super) struct Addresses {
    own: Vec<Address>,
}

impl Addresses {
    pub(super) fn new(own: &[(IpAddr, u8)]) -> Self {
        let own = own.iter().take(usize::from(u16::MAX));
        Self { own: own.map(|&(ip, prefix)| Address { ip, prefix }).collect() }
    }

    #[inline]
    pub(super) fn get(&self, local: u16) -> IpAddr {
        self.own[usize::from(local)].ip
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = IpAddr> {
        self.own.iter().map(|own| own.ip)
    }

    pub(super) fn prefixes(&self) -> impl Iterator<Item = (IpAddr, u8)> {
        self.own.iter().map(|own| (own.ip, own.prefix))
    }

    /// Which of the own addresses it is.
    #[inline]
    pub(super) fn find(&self, ip: IpAddr) -> Option<u16> {
        self.own.iter().position(|own| own.ip == ip).map(|at| at as u16)
    }

    /// The address from which a packet to `to` leaves: of a prefix that both are in, or else of the same
    /// scope, and with the longest prefix in common (RFC 6724 5, rules 2 and 8).
    pub(super) fn source(&self, to: IpAddr) -> Option<u16> {
        let family = (0u16..).zip(&self.own).filter(|(_, own)| own.ip.is_ipv6() == to.is_ipv6());
        let best = family.max_by_key(|(_, own)| {
            let common = common(own.ip, to);
            let near = common >= u32::from(own.prefix);
            (near, is_link_local(own.ip) == is_link_local(to), common)
        });
        best.map(|(local, _)| local)
    }

    /// Whether it is a group that this stack listens to: all nodes (RFC 4291 2.7.1), and that of
    /// solicitations for an own address.
    pub(super) fn is_group(&self, to: IpAddr) -> bool {
        let IpAddr::V6(to) = to else { return false };
        to == ALL_NODES
            || self.own.iter().any(|own| match own.ip {
                IpAddr::V6(own) => ipv6::solicited_node(own) == to,
                IpAddr::V4(_) => false,
            })
    }

    /// Whether it is the broadcast address of one of the own networks (RFC 1122 3.2.1.3), or of all.
    pub(super) fn is_broadcast(&self, ip: IpAddr) -> bool {
        let IpAddr::V4(ip) = ip else { return false };
        ip.is_broadcast()
            || self.own.iter().any(|own| match own.ip {
                IpAddr::V4(own_ip) if own.prefix < 31 => {
                    let hosts = u32::MAX.checked_shr(u32::from(own.prefix)).unwrap_or(0);
                    ip.to_bits() == own_ip.to_bits() | hosts
                }
                _ => false,
            })
    }

    /// Whether nobody can have sent a packet from there over the link: nobody at all, or this stack itself.
    pub(super) fn is_martian(&self, source: IpAddr) -> bool {
        self.is_reserved(source) || self.find(source).is_some()
    }

    /// Whether no packet can be from there (RFC 1122 3.2.1.3, RFC 6890 2.2, RFC 4291 2.7): unspecified,
    /// loopback, a group, reserved; a mapped address, which never is on a wire (RFC 4038 4.2).
    fn is_reserved(&self, ip: IpAddr) -> bool {
        match ip {
            IpAddr::V4(v4) => {
                let octets = v4.octets();
                octets[0] == 0 || octets[0] == 127 || octets[0] >= 224 || self.is_broadcast(ip)
            }
            IpAddr::V6(ip) => {
                ip.is_unspecified()
                    || ip.is_loopback()
                    || ip.is_multicast()
                    || ip.to_ipv4_mapped().is_some()
            }
        }
    }

    /// Whether a packet can be sent there, to one host, be it this one.
    pub(super) fn is_peer(&self, ip: IpAddr) -> bool {
        ip != IpAddr::V4(Ipv4Addr::BROADCAST) && !self.is_reserved(ip)
    }
}

fn is_link_local(ip: IpAddr) -> bool {
    match ip {
        IpAddr::V4(ip) => ip.is_link_local(),
        IpAddr::V6(ip) => ip.is_unicast_link_local(),
    }
}

/// The length of the prefix that two addresses have in common, of one family.
fn common(a: IpAddr, b: IpAddr) -> u32 {
    match (a, b) {
        (IpAddr::V4(a), IpAddr::V4(b)) => (a.to_bits() ^ b.to_bits()).leading_zeros(),
        (IpAddr::V6(a), IpAddr::V6(b)) => (a.to_bits() ^ b.to_bits()).leading_zeros(),
        _ => 0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ip(text: &str) -> IpAddr {
        text.parse().unwrap()
    }

    fn addresses() -> Addresses {
        Addresses::new(&[
            (ip("fe80::1"), 64),
            (ip("2001:db8::1"), 64),
            (ip("fd00::1"), 48),
            (ip("10.1.0.1"), 16),
            (ip("192.0.2.1"), 31),
        ])
    }

    #[test]
    fn sources() {
        let cases = [
            ("fe80::9", 0),
            ("2001:db8::9", 1),
            ("fd00:0:0:5::9", 2),
            ("2001:db9::9", 1),
            ("10.1.2.3", 3),
            ("10.2.2.3", 3),
            ("192.0.2.0", 4),
        ];
        for (to, local) in cases {
            assert_eq!(addresses().source(ip(to)), Some(local), "{to}");
        }
        assert_eq!(Addresses::new(&[(ip("fd00::1"), 64)]).source(ip("10.0.0.1")), None);
    }

    #[test]
    fn groups() {
        for (group, ours) in [
            ("ff02::1", true),
            ("ff02::1:ff00:1", true),
            ("ff02::1:ff00:2", false),
            ("ff02::2", false),
            ("224.0.0.1", false),
        ] {
            assert_eq!(addresses().is_group(ip(group)), ours, "{group}");
        }
    }

    #[test]
    fn martians() {
        let addresses = addresses();
        for martian in [
            "0.0.0.0",
            "0.1.2.3",
            "127.0.0.1",
            "224.0.0.1",
            "240.0.0.1",
            "255.255.255.255",
            "10.1.255.255",
            "10.1.0.1",
            "::",
            "::1",
            "ff02::1",
            "::ffff:10.0.0.9",
            "fe80::1",
        ] {
            assert!(addresses.is_martian(ip(martian)), "{martian}");
            let own = addresses.find(ip(martian)).is_some();
            assert_eq!(addresses.is_peer(ip(martian)), own, "{martian}");
        }
        for peer in ["10.1.0.2", "10.2.255.255", "192.0.2.0", "fe80::2", "2001:db8::2"] {
            assert!(!addresses.is_martian(ip(peer)), "{peer}");
        }
    }
}
