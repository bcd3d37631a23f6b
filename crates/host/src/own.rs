//! The addresses of the engine as its sockets need them: where it listens, and from where it connects and
//! sends, by the rows of the GID table.

use std::collections::HashSet;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, SocketAddrV4, SocketAddrV6};

use quipu_nic::{GID_ROWS, Gid};

use crate::address::{HostAddress, usable_addresses};

/// The most rows of a GID table.
const MAX_ROWS: usize = 1 << 8;

/// The addresses of an engine. What a row holds never changes; rows are added.
#[derive(Clone, Debug)]
pub(crate) struct OwnAddresses {
    /// The rows of the GID table: the first [`GID_ROWS`] hold the first address.
    rows: Vec<HostAddress>,
    /// Whether the user has chosen the address, so that no other is to be used.
    restricted: bool,
    /// All addresses of the host.
    host: HashSet<IpAddr>,
}

impl OwnAddresses {
    /// Of an engine with these addresses, the first of which is the device's, on a host with `all` of them.
    pub(crate) fn new(device: &[HostAddress], restricted: bool, all: &[HostAddress]) -> Self {
        let first = device.iter().take(1).cycle().take(GID_ROWS.into());
        let rows = first.chain(device.iter().skip(1)).take(MAX_ROWS).cloned().collect();
        Self { rows, restricted, host: all.iter().map(|address| address.ip).collect() }
    }

    /// With what is new on a host that has `all` addresses by now; `None` if nothing is.
    pub(crate) fn learn(&self, all: &[HostAddress]) -> Option<Self> {
        let host: HashSet<IpAddr> = all.iter().map(|address| address.ip).collect();
        let usable = if self.restricted { Vec::new() } else { usable_addresses(all) };
        let has = |new: &HostAddress| {
            self.rows.iter().any(|row| (row.ip, row.index) == (new.ip, new.index))
        };
        let loopback = |new: &HostAddress| new.ip.is_loopback();
        let mut rows = self.rows.clone();
        rows.extend(usable.into_iter().filter(|new| !has(new) && !loopback(new)));
        rows.truncate(MAX_ROWS);
        let news = rows.len() > self.rows.len() || host != self.host;
        news.then(|| Self { rows, host, ..*self })
    }

    /// The device's address.
    fn first(&self) -> &HostAddress {
        &self.rows[0]
    }

    /// The rows of the GID table.
    pub(crate) fn rows(&self) -> &[HostAddress] {
        &self.rows
    }

    /// A row of the GID table; the first where there is none of that index.
    pub(crate) fn row(&self, index: u8) -> &HostAddress {
        self.rows.get(usize::from(index)).unwrap_or_else(|| self.first())
    }

    /// The GIDs of the rows after those of the first address.
    pub(crate) fn other_gids(&self) -> Vec<Gid> {
        self.rows[GID_ROWS.into()..].iter().map(|row| Gid::from(row.ip)).collect()
    }

    /// The GIDs of all addresses of the host.
    pub(crate) fn host_gids(&self) -> impl Iterator<Item = Gid> + '_ {
        self.host.iter().map(|ip| Gid::from(*ip))
    }

    /// The address in a row, to bind sockets to: with port 0, and the scope of a link-local address.
    pub(crate) fn source(&self, index: u8) -> SocketAddr {
        let row = self.row(index);
        match row.ip {
            IpAddr::V4(ip) => SocketAddrV4::new(ip, 0).into(),
            IpAddr::V6(ip) => SocketAddrV6::new(ip, 0, 0, row.scope_id()).into(),
        }
    }

    /// All rows in that form.
    pub(crate) fn sources(&self) -> Vec<SocketAddr> {
        (0..self.rows.len()).map(|index| self.source(index as u8)).collect()
    }

    /// The same address with the scope that it has from the network of a row, if it is link-local.
    pub(crate) fn with_scope(&self, mut to: SocketAddr, index: u8) -> SocketAddr {
        if let SocketAddr::V6(to) = &mut to
            && to.ip().is_unicast_link_local()
        {
            to.set_scope_id(self.row(index).index);
        }
        to
    }

    /// Whether the user has chosen the address, so that no other is to be used.
    pub(crate) fn is_restricted(&self) -> bool {
        self.restricted
    }

    /// Where the engine listens, with one socket for each port: at the address that the user has chosen, or
    /// at all addresses of the host; first of both families, then, where there is no IPv6, of IPv4.
    pub(crate) fn listening(&self, port: u16) -> Vec<SocketAddr> {
        if self.restricted {
            let mut at = self.source(0);
            at.set_port(port);
            return vec![at];
        }
        let wildcards: [IpAddr; 2] = [Ipv6Addr::UNSPECIFIED.into(), Ipv4Addr::UNSPECIFIED.into()];
        wildcards.map(|ip| SocketAddr::new(ip, port)).into()
    }

    /// Whether an address is one of this host.
    pub(crate) fn is_of_host(&self, ip: IpAddr) -> bool {
        ip.is_loopback() || self.host.contains(&ip)
    }

    /// Whether the engine is reached at an address, at ports at which it listens.
    pub(crate) fn is_own(&self, ip: IpAddr) -> bool {
        if self.restricted { ip == self.first().ip } else { self.is_of_host(ip) }
    }
}

#[cfg(test)]
impl OwnAddresses {
    /// An engine at one address of the loopback.
    pub(crate) fn at(ip: IpAddr) -> std::sync::Arc<Self> {
        let at = HostAddress {
            ip,
            interface: "lo".into(),
            index: 1,
            up: true,
            running: true,
            loopback: true,
        };
        std::sync::Arc::new(Self::new(std::slice::from_ref(&at), true, std::slice::from_ref(&at)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn address(ip: &str, index: u32) -> HostAddress {
        HostAddress {
            ip: ip.parse().unwrap(),
            interface: format!("eth{index}"),
            index,
            up: true,
            running: true,
            loopback: false,
        }
    }

    #[test]
    fn addresses_that_come_later_are_added_at_the_end() {
        let [one, two] = [address("10.0.0.1", 2), address("fe80::1", 3)];
        let both = [one.clone(), two.clone()];
        let own = OwnAddresses::new(&both[..1], false, &both[..1]);
        assert_eq!((own.rows().len(), own.other_gids().len()), (4, 0));
        assert!(own.learn(&both[..1]).is_none());
        let more = own.learn(&[two.clone(), one]).unwrap();
        assert_eq!((more.rows().len(), more.row(4)), (5, &two));
        assert_eq!(more.source(4), "[fe80::1%3]:0".parse().unwrap());
        let peer = "[fe80::2]:7".parse().unwrap();
        assert_eq!(more.with_scope(peer, 4), "[fe80::2%3]:7".parse().unwrap());
        let gone = more.learn(&both[1..]).unwrap();
        assert_eq!(gone.rows(), more.rows(), "a row stays where it is");
        assert!(!gone.is_own(both[0].ip) && gone.is_own(two.ip));
        let alone = OwnAddresses::new(&both[..1], true, &both[..1]);
        assert_eq!(alone.learn(&both).unwrap().rows().len(), 4);
        assert!(!alone.is_own(two.ip) && alone.listening(5).len() == 1);
    }
}
