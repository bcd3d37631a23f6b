//! The addresses of the engine, as rows of its GID table: the address that a program binds or dials decides
//! in which row its queue pairs are.

use std::net::SocketAddr;

use crate::Cm;
use crate::levels::Levels;
use crate::types::gid_of;

/// The most rows: an index has eight bits.
const MAX_ROWS: usize = 1 << 8;

/// The addresses of the engine.
#[derive(Debug)]
pub(crate) struct Addresses {
    /// The first one.
    first: [u8; 16],
    /// Rows of the GID table, each with the scope of a link-local address; ports are not looked at.
    rows: Vec<SocketAddr>,
    /// Whether the engine is to have no other addresses.
    restricted: bool,
    /// The service levels of paths.
    pub(crate) levels: Levels,
}

impl Addresses {
    /// Those of an engine with one address.
    pub(crate) fn of(first: [u8; 16]) -> Self {
        Self { first, rows: Vec::new(), restricted: false, levels: Levels::default() }
    }

    /// The row of an address of the engine.
    fn find(&self, src: SocketAddr) -> Option<u8> {
        self.rows.iter().position(|row| is_same(*row, src)).map(|index| index as u8)
    }

    /// The row for an identifier at `src`: 0 where that is none of the engine's addresses, such as one of the
    /// loopback, from which only peers of this host are reached.
    pub(crate) fn row_of(&self, src: SocketAddr) -> u8 {
        self.find(src).unwrap_or(0)
    }

    /// Whether a queue pair can serve a peer that has come to `local`. On this host it can always: there the
    /// first address will do, too.
    fn serves(&self, local: SocketAddr, peer: SocketAddr) -> bool {
        let same_host = local.ip() == peer.ip() || local.ip().is_loopback();
        !self.restricted || same_host || self.find(local).is_some()
    }

    /// The GID in a row.
    pub(crate) fn gid(&self, row: u8) -> [u8; 16] {
        self.rows.get(usize::from(row)).map_or(self.first, |address| gid_of(address.ip()))
    }
}

/// Whether two addresses are one. The scope counts where both have one.
fn is_same(one: SocketAddr, other: SocketAddr) -> bool {
    let scopes = match (one, other) {
        (SocketAddr::V6(one), SocketAddr::V6(other)) => [one.scope_id(), other.scope_id()],
        _ => [0; 2],
    };
    one.ip() == other.ip() && (scopes.contains(&0) || scopes[0] == scopes[1])
}

impl Cm {
    /// Says which addresses the engine has: the rows of its GID table, of which 0 is the first address. A row
    /// keeps its index for as long as the engine lives. If they are `restricted` the user wants no others
    /// used: requests of other hosts that come to another address are refused, as if nobody listened there.
    pub fn set_addresses(&mut self, rows: &[SocketAddr], restricted: bool) {
        self.own.rows = rows.iter().take(MAX_ROWS).copied().collect();
        self.own.restricted = restricted;
    }

    /// Whether the engine may use `local`, one of its host's addresses, with peers on other hosts.
    pub fn may_use(&self, local: SocketAddr) -> bool {
        !self.own.restricted || self.own.find(local).is_some()
    }

    /// Whether connections are asked for as a plain iWARP adapter does.
    pub fn asks_plain(&self) -> bool {
        self.config.asks_plain
    }

    /// Whether requests of Quipus that come from `peer` to `local` are taken.
    pub(crate) fn serves(&self, local: SocketAddr, peer: SocketAddr) -> bool {
        self.config.takes_quipu && self.own.serves(local, peer)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_address_decides_about_the_row() {
        let rows = ["10.0.0.1:0", "10.0.1.1:0", "[fe80::1%2]:0", "[fe80::1%3]:0"];
        let mut own = Addresses::of(gid_of("10.0.0.1".parse().unwrap()));
        assert_eq!(own.gid(0), own.first);
        own.rows = rows.map(|row| row.parse().unwrap()).into();
        let row_of = |address: &str| own.row_of(address.parse().unwrap());
        assert_eq!(row_of("10.0.1.1:7"), 1);
        assert_eq!((row_of("[fe80::1%3]:7"), row_of("[fe80::1]:7")), (3, 2));
        assert_eq!((row_of("127.0.0.1:7"), row_of("[fe80::1%4]:7")), (0, 0));
        assert_eq!(own.gid(1), gid_of("10.0.1.1".parse().unwrap()));

        let serves = |own: &Addresses, local: &str, peer: &str| {
            own.serves(local.parse().unwrap(), peer.parse().unwrap())
        };
        assert!(serves(&own, "10.0.2.1:7", "10.0.2.2:9"));
        own.restricted = true;
        assert!(!serves(&own, "10.0.2.1:7", "10.0.2.2:9"));
        assert!(serves(&own, "10.0.1.1:7", "10.0.1.2:9"));
        assert!(serves(&own, "10.0.2.1:7", "10.0.2.1:9"), "on one host");
    }
}
