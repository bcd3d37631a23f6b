//! Connections of peers that are not yet known or not yet answered: there is room for a bounded number of
//! them, and whoever fills it shuts nobody else out.

use std::net::{IpAddr, Ipv6Addr};

use quipu_iwarp::wire::hello::{Hello, Reason};

use super::{Conn, Phase};
use crate::adapter::Adapter;
use crate::probe::Probe;
use crate::types::{ConnId, Gid};

/// One address may have a quarter of them, and one network three.
const QUARTERS: usize = 4;
const OF_A_NETWORK: usize = 3;

/// Where the peer of a half open connection is.
fn address_of(conn: &Conn) -> Option<IpAddr> {
    match &conn.phase {
        Phase::Listening { peer, .. } => Some(*peer),
        Phase::Waiting(waiting) => Some(IpAddr::from(Gid(waiting.hello.source_gid))),
        _ => None,
    }
}

/// The network of an address: who has one IPv6 address may have all of them. Of IPv4 each is its own.
fn network(address: IpAddr) -> IpAddr {
    match address {
        IpAddr::V4(_) => address,
        IpAddr::V6(v6) => Ipv6Addr::from(u128::from(v6) >> 64 << 64).into(),
    }
}

impl<P: Probe> Adapter<P> {
    /// Makes room for one more half open connection, of a peer at `address`. If there is none the oldest one
    /// gives way, of that address or network if it has its share: one that has not said what it wants before
    /// one that waits for its queue pair, whose peer asks again.
    pub(super) fn make_room(&mut self, address: IpAddr) {
        let hub = &self.hub;
        let most = hub.config.max_half_open.max(1) as usize;
        let of_address = |at: IpAddr| at == address;
        let of_network = |at: IpAddr| network(at) == network(address);
        let among = |same: &dyn Fn(IpAddr) -> bool, id: &ConnId| {
            hub.conns.get(*id).and_then(address_of).is_some_and(same)
        };
        let count = |same| hub.half_open.iter().filter(|id| among(same, id)).count();
        let those: &dyn Fn(IpAddr) -> bool = if count(&of_address) >= most.div_ceil(QUARTERS) {
            &of_address
        } else if count(&of_network) >= (most * OF_A_NETWORK).div_ceil(QUARTERS) {
            &of_network
        } else if hub.half_open.len() >= most {
            &|_| true
        } else {
            return;
        };
        let candidates = || hub.half_open.iter().copied().filter(|id| among(those, id));
        let speechless = |id: &ConnId| {
            hub.conns.get(*id).is_some_and(|conn| matches!(conn.phase, Phase::Listening { .. }))
        };
        if let Some(id) = candidates().find(speechless).or_else(|| candidates().next()) {
            self.give_way(id);
        }
    }

    /// A request begins to wait for its queue pair: an older one of the same two queue pairs gives way.
    pub(super) fn supersede(&mut self, conn: ConnId, hello: &Hello) {
        let pair = |hello: &Hello| (hello.source_gid, hello.source_qpn, hello.dest_qpn);
        let waits_too = |id| match self.hub.conns.get(id).map(|other| &other.phase) {
            Some(Phase::Waiting(waiting)) => pair(&waiting.hello) == pair(hello),
            _ => false,
        };
        let older = self.hub.half_open.iter().copied().find(|&id| id != conn && waits_too(id));
        if let Some(older) = older {
            self.give_way(older);
        }
    }

    fn give_way(&mut self, id: ConnId) {
        match self.hub.conns.get(id).map(|conn| &conn.phase) {
            Some(Phase::Waiting(_)) => self.refuse(id, Reason::Busy),
            _ => self.hub.close_stream(id, None),
        }
    }
}
