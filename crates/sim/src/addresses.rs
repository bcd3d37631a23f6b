//! Hosts with more than one address: rows of their GID tables, and from which row a connection is made.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use quipu_nic::{ConnId, GID_ROWS, Gid};

use crate::world::{Host, World};

/// The rows of the two other addresses that a host may have. The first address is of IPv4.
pub(crate) const ROW_V4: u8 = GID_ROWS;
pub(crate) const ROW_V6: u8 = GID_ROWS + 1;

impl Host {
    /// The address in a row of the GID table.
    pub(crate) fn address_of(&self, row: u8) -> IpAddr {
        let other = row.checked_sub(GID_ROWS).and_then(|at| self.others.get(usize::from(at)));
        other.copied().unwrap_or(self.address.ip())
    }

    /// What an engine says its only address is, if it has no other.
    pub(crate) fn only_gid(&self) -> Option<Gid> {
        self.others.is_empty().then(|| self.adapter.config().gid)
    }

    /// Notes from which address a connection is made.
    pub(crate) fn note_source(&mut self, conn: ConnId, row: u8) {
        if !self.others.is_empty() {
            self.sources.insert(conn, self.address_of(row));
        }
    }

    /// From which address a connection was made.
    pub(crate) fn source_of(&self, conn: Option<ConnId>) -> IpAddr {
        let source = conn.and_then(|conn| self.sources.get(&conn));
        source.copied().unwrap_or(self.address.ip())
    }

    fn is_at(&self, address: SocketAddr) -> bool {
        let is_own = self.address.ip() == address.ip() || self.others.contains(&address.ip());
        is_own && self.address.port() == address.port()
    }
}

impl World {
    /// Gives a host the other addresses of its machine.
    pub(crate) fn add_addresses(&mut self, h: usize) {
        let host = &mut self.hosts[h];
        let IpAddr::V4(first) = host.address.ip() else { return };
        let [.., last] = first.octets();
        let v6 = Ipv6Addr::new(0xfd00, 0, 0, 0, 0, 0, 0, last.into());
        host.others = vec![IpAddr::V4(Ipv4Addr::new(10, 0, 1, last)), IpAddr::V6(v6)];
        let others: Vec<Gid> = host.others.iter().copied().map(Gid::from).collect();
        host.adapter.set_gid_rows(&others);
        host.adapter.set_host_addresses(others.into_iter().chain([Gid::from(host.address.ip())]));
    }

    /// The host at an address.
    pub(crate) fn host_at(&self, address: SocketAddr) -> Option<usize> {
        self.hosts.iter().position(|host| host.is_at(address))
    }
}
