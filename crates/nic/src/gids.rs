//! The GID table of an adapter: its addresses, in a fixed order.
//!
//! Rows 0 to 3 hold the first address, because programs and their scripts name the row that cards have for
//! RoCE v2 over IPv4: 1 of Linux's soft RoCE, 3 of many others. Each further address has one row from 4 on.

use std::collections::BTreeSet;
use std::net::IpAddr;

use crate::adapter::Adapter;
use crate::types::{AddressVector, Gid};

/// Rows that hold the first address of the adapter.
pub const GID_ROWS: u8 = 4;
/// The most rows of a GID table: an index has eight bits.
const MAX_ROWS: usize = 1 << 8;

/// The addresses of an adapter and of its host.
#[derive(Debug)]
pub(crate) struct Gids {
    /// Never empty.
    rows: Vec<Gid>,
    /// Other addresses of the same host.
    host: BTreeSet<Gid>,
}

impl Gids {
    /// The table of an adapter with one address.
    pub(crate) fn of(gid: Gid) -> Self {
        Self { rows: vec![gid; GID_ROWS.into()], host: BTreeSet::new() }
    }

    /// How many rows there are.
    pub(crate) fn len(&self) -> usize {
        self.rows.len()
    }

    /// A row, if there is one of that index.
    pub(crate) fn row(&self, index: u8) -> Option<Gid> {
        self.rows.get(usize::from(index)).copied()
    }

    /// The row from which a route leads: the one that it names, or the first where it is named by LID alone.
    pub(crate) fn row_of(&self, av: &AddressVector) -> Gid {
        let named = if av.is_global { self.row(av.sgid_index) } else { None };
        named.unwrap_or(self.rows[0])
    }

    /// The index of the row from which a route leads.
    pub(crate) fn index_of(&self, av: &AddressVector) -> u8 {
        if av.is_global && self.row(av.sgid_index).is_some() { av.sgid_index } else { 0 }
    }

    /// Whether the adapter has this address.
    pub(crate) fn has(&self, gid: Gid) -> bool {
        self.rows.contains(&gid)
    }

    /// Whether an engine of this host may have this address.
    pub(crate) fn is_of_host(&self, gid: Gid) -> bool {
        self.has(gid) || self.host.contains(&gid) || IpAddr::from(gid).is_loopback()
    }
}

impl<P> Adapter<P> {
    /// Replaces what follows the first address in the GID table, from row 4 on. Rows beyond the 256th are
    /// left out. Queue pairs and address handles keep the index of their row, so a row must keep its index
    /// for as long as the adapter lives.
    pub fn set_gid_rows(&mut self, others: &[Gid]) {
        let gids = &mut self.hub.gids;
        gids.rows.truncate(GID_ROWS.into());
        gids.rows.extend(others.iter().take(MAX_ROWS - usize::from(GID_ROWS)));
    }

    /// Says which addresses this host has, those of the adapter or not.
    pub fn set_host_addresses(&mut self, addresses: impl IntoIterator<Item = Gid>) {
        self.hub.gids.host = addresses.into_iter().collect();
    }

    /// A row of the GID table, if there is one of that index.
    #[must_use]
    pub fn gid_row(&self, index: u8) -> Option<Gid> {
        self.hub.gids.row(index)
    }

    /// How many rows the GID table has: at least [`GID_ROWS`].
    #[must_use]
    pub fn gid_rows(&self) -> usize {
        self.hub.gids.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn gid(address: &str) -> Gid {
        address.parse::<IpAddr>().unwrap().into()
    }

    #[test]
    fn the_first_address_has_four_rows_and_each_other_one() {
        let mut adapter = Adapter::new(crate::Config::default());
        let (first, other) = (gid("127.0.0.1"), gid("10.0.1.1"));
        adapter.set_gid_rows(&[other; 300]);
        assert_eq!([0, 3].map(|index| adapter.gid_row(index)), [Some(first); 2]);
        assert_eq!([4, 255].map(|index| adapter.gid_row(index)), [Some(other); 2]);
        assert_eq!(adapter.gid_rows(), 256);
        adapter.set_gid_rows(&[]);
        assert_eq!((adapter.gid_rows(), adapter.gid_row(4)), (4, None));
    }

    #[test]
    fn a_route_by_lid_leads_from_the_first_row() {
        let mut gids = Gids::of(gid("10.0.0.1"));
        gids.rows.push(gid("10.0.1.1"));
        let by_gid = AddressVector { sgid_index: 4, is_global: true, ..AddressVector::default() };
        let by_lid = AddressVector { is_global: false, ..by_gid };
        assert_eq!((gids.index_of(&by_gid), gids.index_of(&by_lid)), (4, 0));
        assert_eq!(gids.row_of(&by_gid), gid("10.0.1.1"));
        assert_eq!(gids.row_of(&by_lid), gid("10.0.0.1"));
        assert!(gids.has(gid("10.0.1.1")) && !gids.has(gid("10.0.2.1")));
        assert!(gids.is_of_host(gid("127.0.0.9")) && !gids.is_of_host(gid("10.0.2.1")));
    }
}
