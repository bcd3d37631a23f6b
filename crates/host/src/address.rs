//! Which addresses of this host the device has.

use std::ffi::CStr;
use std::fmt;
use std::io;
use std::net::{AddrParseError, IpAddr, Ipv4Addr, Ipv6Addr};
use std::str::FromStr;

use crate::error::OpenError;
use crate::sys::{RawAddr, check, with_more_descriptors};

/// The address that a user wants the device to have: `10.0.0.1`, `fd00::1`, or with the interface that has
/// it, `fe80::1%eth0`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WantedAddress {
    /// The address.
    pub ip: IpAddr,
    /// The name or the number of its interface. Only link-local addresses of IPv6 need one, and they only
    /// where several interfaces have the same.
    pub interface: Option<String>,
}

impl<A: Into<IpAddr>> From<A> for WantedAddress {
    fn from(ip: A) -> Self {
        Self { ip: ip.into(), interface: None }
    }
}

impl FromStr for WantedAddress {
    type Err = AddrParseError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let (ip, interface) = match text.split_once('%') {
            Some((ip, interface)) if !interface.is_empty() => (ip, Some(interface.to_owned())),
            _ => (text, None),
        };
        Ok(Self { ip: ip.parse()?, interface })
    }
}

impl fmt::Display for WantedAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.interface {
            Some(interface) => write!(f, "{}%{interface}", self.ip),
            None => write!(f, "{}", self.ip),
        }
    }
}

/// An address of an interface of this host.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HostAddress {
    /// The address.
    pub ip: IpAddr,
    /// The interface's name.
    pub interface: String,
    /// The interface's index; the scope of a link-local IPv6 address.
    pub index: u32,
    /// Whether the interface is up.
    pub up: bool,
    /// Whether it has a carrier.
    pub running: bool,
    /// Whether the interface is the loopback.
    pub loopback: bool,
}

impl HostAddress {
    /// True for an address that other hosts may reach: not loopback, not link-local.
    fn is_reachable(&self) -> bool {
        let scope = match self.ip {
            IpAddr::V4(v4) => !v4.is_loopback() && !v4.is_link_local() && !v4.is_unspecified(),
            IpAddr::V6(v6) => {
                !v6.is_loopback() && !v6.is_unicast_link_local() && !v6.is_unspecified()
            }
        };
        self.up && !self.loopback && scope
    }

    /// True for an address that peers on other hosts may know, if only those on the same link.
    fn is_usable(&self) -> bool {
        self.up && !self.ip.is_loopback() && !self.ip.is_unspecified()
    }

    /// The address as a user would name it: with the interface, if it is link-local.
    fn name(&self) -> WantedAddress {
        let interface = (self.scope_id() != 0).then(|| self.interface.clone());
        WantedAddress { ip: self.ip, interface }
    }

    /// Whether this is the address that a user wants.
    fn is(&self, wanted: &WantedAddress) -> bool {
        let named = |name: &String| *name == self.interface || *name == self.index.to_string();
        self.ip == wanted.ip && wanted.interface.as_ref().is_none_or(named)
    }

    /// The MTU code of verbs, 1 (256 B) to 5 (4096 B), that a port with this address shows as active: the
    /// largest whose packets RoCE v2 fits into those of the interface.
    #[must_use]
    pub fn active_mtu(&self) -> u8 {
        if self.loopback {
            return mtu_code(u32::MAX);
        }
        // Not by a file: `/sys` may be that of another network namespace.
        mtu_code(crate::packet::interface::mtu_by_index(self.index).unwrap_or(1500))
    }

    /// The same in bytes: the longest message of a datagram queue pair.
    #[must_use]
    pub fn datagram_mtu(&self) -> u32 {
        128 << self.active_mtu()
    }

    /// The scope identifier that a socket address with this address needs, 0 for most.
    #[must_use]
    pub fn scope_id(&self) -> u32 {
        match self.ip {
            IpAddr::V6(v6) if v6.is_unicast_link_local() => self.index,
            _ => 0,
        }
    }
}

/// Headers of a RoCE v2 packet around its payload, in bytes: IPv6 40, UDP 8, BTH 12, the largest
/// extended header 28, ICRC 4.
const ROCE_HEADERS: u32 = 92;

/// The largest InfiniBand MTU whose packets fit into a network MTU of `bytes`.
fn mtu_code(bytes: u32) -> u8 {
    match bytes.saturating_sub(ROCE_HEADERS) {
        0..512 => 1,
        512..1024 => 2,
        1024..2048 => 3,
        2048..4096 => 4,
        _ => 5,
    }
}

/// All IPv4 and IPv6 addresses of this host, in the kernel's order.
///
/// # Errors
///
/// What `getifaddrs` reports.
pub fn host_addresses() -> io::Result<Vec<HostAddress>> {
    // It takes a descriptor for a moment.
    with_more_descriptors(list_addresses)
}

fn list_addresses() -> io::Result<Vec<HostAddress>> {
    let mut list: *mut libc::ifaddrs = std::ptr::null_mut();
    // SAFETY: getifaddrs fills in one pointer, a live variable.
    check(unsafe { libc::getifaddrs(&raw mut list) })?;
    let mut addresses = Vec::new();
    let mut next = list;
    while !next.is_null() {
        // SAFETY: getifaddrs made a list of entries, ended by null, that lives until freeifaddrs.
        let entry = unsafe { &*next };
        next = entry.ifa_next;
        // SAFETY: the address is null or complete for its family.
        let Some(address) = (unsafe { RawAddr::decode(entry.ifa_addr) }) else {
            continue;
        };
        // SAFETY: the name is a zero-terminated string that lives as long as the list.
        let name = unsafe { CStr::from_ptr(entry.ifa_name) };
        // SAFETY: as above.
        let index = unsafe { libc::if_nametoindex(entry.ifa_name) };
        // An address may have a label, which the kernel takes for the name as well.
        let name = name.to_string_lossy();
        let interface = name.split(':').next().unwrap_or_default().to_owned();
        addresses.push(HostAddress {
            ip: address.ip(),
            interface,
            index,
            up: entry.ifa_flags & libc::IFF_UP as u32 != 0,
            running: entry.ifa_flags & libc::IFF_RUNNING as u32 != 0,
            loopback: entry.ifa_flags & libc::IFF_LOOPBACK as u32 != 0,
        });
    }
    // SAFETY: the list came from getifaddrs and is freed once.
    unsafe { libc::freeifaddrs(list) };
    Ok(addresses)
}

/// The address that a device gets when none is asked for: the first reachable IPv4 address, else
/// the first reachable IPv6 address, else the loopback.
#[must_use]
pub fn default_address(addresses: &[HostAddress]) -> HostAddress {
    let reachable = |v4: bool| addresses.iter().find(|a| a.ip.is_ipv4() == v4 && a.is_reachable());
    let loopback = |ip: IpAddr| addresses.iter().find(|a| a.up && a.ip == ip);
    reachable(true)
        .or_else(|| reachable(false))
        .or_else(|| loopback(Ipv4Addr::LOCALHOST.into()))
        .or_else(|| loopback(Ipv6Addr::LOCALHOST.into()))
        .cloned()
        .unwrap_or_else(|| HostAddress {
            ip: Ipv4Addr::LOCALHOST.into(),
            interface: "lo".into(),
            index: 1,
            up: false,
            running: false,
            loopback: true,
        })
}

/// The addresses of a device: `wanted` alone, or by default all that peers may know of this host, in the
/// kernel's order but for the first, which is the [`default_address`].
///
/// # Errors
///
/// Nobody has the address that is wanted, or its interface is down; or the addresses cannot be listed.
pub fn device_addresses(wanted: Option<&WantedAddress>) -> Result<Vec<HostAddress>, OpenError> {
    let all = host_addresses().map_err(OpenError::Addresses)?;
    let Some(wanted) = wanted else { return Ok(usable_addresses(&all)) };
    let exact = all.iter().find(|address| address.is(wanted)).cloned();
    let unnamed = wanted.interface.is_none();
    let found = exact.or_else(|| unnamed.then(|| find_address(&all, wanted.ip)).flatten());
    let Some(found) = found else {
        let available: Vec<_> = all.iter().map(|address| address.name().to_string()).collect();
        let available = available.join(", ");
        return Err(OpenError::NoSuchAddress { address: wanted.clone(), available });
    };
    if found.up {
        Ok(vec![found])
    } else {
        Err(OpenError::InterfaceDown { address: wanted.ip, interface: found.interface })
    }
}

/// The addresses of a device for which no address is wanted.
pub(crate) fn usable_addresses(all: &[HostAddress]) -> Vec<HostAddress> {
    let first = default_address(all);
    // A host without any other network has the loopback in both families.
    let alone = first.ip.is_loopback();
    let others = all.iter().filter(|other| {
        let loopback = alone && other.up && other.ip.is_loopback();
        (other.is_usable() || loopback) && (other.ip, other.index) != (first.ip, first.index)
    });
    std::iter::once(&first).chain(others).cloned().collect()
}

/// The interface that has `ip`. Every address of 127.0.0.0/8 belongs to the loopback.
#[must_use]
pub fn find_address(addresses: &[HostAddress], ip: IpAddr) -> Option<HostAddress> {
    let exact = addresses.iter().find(|a| a.ip == ip).cloned();
    exact.or_else(|| {
        let loopback = addresses.iter().find(|a| a.loopback && a.ip.is_ipv4())?;
        let local = matches!(ip, IpAddr::V4(v4) if v4.is_loopback());
        local.then(|| HostAddress { ip, ..loopback.clone() })
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mtus_are_those_of_roce() {
        assert_eq!([576, 1500, 4200, 9000].map(mtu_code), [1, 3, 5, 5]);
    }

    fn address(ip: &str, interface: &str) -> HostAddress {
        HostAddress {
            ip: ip.parse().unwrap(),
            interface: interface.into(),
            index: 7,
            up: true,
            running: true,
            loopback: interface == "lo",
        }
    }

    #[test]
    fn prefers_reachable_ipv4_then_ipv6_then_loopback() {
        let lo = address("127.0.0.1", "lo");
        let local = address("fe80::1", "eth0");
        let v6 = address("2001:db8::1", "eth0");
        let v4 = address("10.0.0.1", "eth1");
        let all = [lo.clone(), local.clone(), v6.clone(), v4.clone()];
        assert_eq!(default_address(&all), v4);
        assert_eq!(default_address(&all[..3]), v6);
        assert_eq!(default_address(&all[..2]), lo);
        let down = HostAddress { up: false, ..v4 };
        assert_eq!(default_address(&[lo.clone(), down]), lo);
        assert_eq!(local.scope_id(), 7);
        assert_eq!(v6.scope_id(), 0);
        assert_eq!(find_address(&all, "127.0.0.9".parse().unwrap()).unwrap().interface, "lo");
        assert_eq!(find_address(&all, "10.9.9.9".parse().unwrap()), None);
    }

    #[test]
    fn a_device_has_every_usable_address_with_the_default_first() {
        let ips = |all: &[HostAddress]| -> Vec<String> {
            usable_addresses(all).iter().map(|it| it.name().to_string()).collect()
        };
        let lo = [address("127.0.0.1", "lo"), address("::1", "lo")];
        let down = HostAddress { up: false, ..address("10.0.2.1", "eth2") };
        let all = [
            address("2001:db8::1", "eth0"),
            lo[0].clone(),
            address("10.0.0.1", "eth0"),
            address("10.0.1.1", "eth1"),
            down,
            address("10.255.0.1", "lo"),
            lo[1].clone(),
            address("fe80::1", "eth0"),
        ];
        let expected = ["10.0.0.1", "2001:db8::1", "10.0.1.1", "10.255.0.1", "fe80::1%eth0"];
        assert_eq!(ips(&all), expected);
        assert_eq!(
            ips(&[lo[0].clone(), lo[1].clone(), all[7].clone()]),
            ["127.0.0.1", "::1", "fe80::1%eth0"]
        );
        assert_eq!(ips(&lo), ["127.0.0.1", "::1"]);
    }

    #[test]
    fn an_address_may_be_named_with_its_interface() {
        let wanted: WantedAddress = "fe80::1%eth0".parse().unwrap();
        assert_eq!(wanted.to_string(), "fe80::1%eth0");
        let index: WantedAddress = "fe80::1%7".parse().unwrap();
        let [here, there] = ["eth0", "eth1"].map(|interface| address("fe80::1", interface));
        assert!(here.is(&wanted) && !there.is(&wanted));
        assert!(here.is(&index) && here.is(&here.ip.into()));
        assert!("eth0".parse::<WantedAddress>().is_err());
        assert!("%eth0".parse::<WantedAddress>().is_err());
    }

    #[test]
    fn lists_the_loopback() {
        let all = host_addresses().unwrap();
        assert!(all.iter().any(|a| a.loopback && a.ip.is_loopback()));
    }
}
