//! Connections of peers that are not yet known or not yet answered: there is room for a bounded number of
//! them, and whoever fills it shuts nobody else out.

use std::net::IpAddr;

use quipu_iwarp::wire::hello::{Hello, Reason};

use super::{Conn, Phase};
use crate::adapter::Adapter;
use crate::probe::Probe;
use crate::types::{ConnId, Gid};

/// One address may have this part of them.
const SHARE: usize = 4;

/// Where the peer of a half open connection is.
fn address_of(conn: &Conn) -> Option<IpAddr> {
    match &conn.phase {
        Phase::Listening { peer, .. } => Some(*peer),
        Phase::Waiting(waiting) => Some(IpAddr::from(Gid(waiting.hello.source_gid))),
        _ => None,
    }
}

impl<P: Probe> Adapter<P> {
    /// Makes room for one more half open connection, of a peer at `address`. If there is none the oldest one
    /// gives way, of that address if it has its share: one that has not said what it wants before one that
    /// waits for its queue pair, whose peer asks again.
    pub(super) fn make_room(&mut self, address: IpAddr) {
        let hub = &self.hub;
        let most = hub.config.max_half_open.max(1) as usize;
        let same = |conn: &&Conn| address_of(conn) == Some(address);
        let listed = || hub.half_open.iter().filter_map(|&id| hub.conns.get(id));
        let over_share = listed().filter(same).count() >= most.div_ceil(SHARE);
        if !over_share && hub.half_open.len() < most {
            return;
        }
        let candidates = || {
            hub.half_open
                .iter()
                .copied()
                .filter(|&id| hub.conns.get(id).is_some_and(|conn| !over_share || same(&conn)))
        };
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
