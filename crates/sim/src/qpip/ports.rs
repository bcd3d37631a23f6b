//! Ports that are listened at, by one end or by several that share them: which of them gets which peer is the
//! adapter's choice.

use std::collections::VecDeque;

use quipu_nic::inet::stack::{ListenerId, TcpId};
use quipu_nic::{Fault, TcpSettings};

use super::Programs;
use super::model::{Opening, Stage};
use crate::world::World;

/// Connections that may wait at a port for a queue pair: more than there are, so that nobody is turned away.
const BACKLOG: u32 = 64;

/// A port that is listened at.
pub(super) struct Port {
    pub host: usize,
    pub number: u16,
    pub listener: ListenerId,
    pub settings: TcpSettings,
    /// Programs decide about each peer.
    deferred: bool,
    /// Peers that nobody has decided about.
    pub requests: VecDeque<TcpId>,
}

impl Programs {
    /// Listens; the index of the port.
    ///
    /// # Errors
    /// What the adapter says.
    pub(super) fn listen(
        &mut self,
        world: &mut World,
        host: usize,
        number: u16,
        settings: TcpSettings,
        opening: Opening,
    ) -> Result<usize, Fault> {
        let adapter = &mut world.hosts[host].adapter;
        let deferred = matches!(opening, Opening::Decides { .. });
        let (listener, _) = match deferred {
            true => adapter.tcp_listen_deferred(number, &settings, 4)?,
            false => adapter.tcp_listen(number, &settings, BACKLOG)?,
        };
        let requests = VecDeque::new();
        self.ports.push(Port { host, number, listener, settings, deferred, requests });
        Ok(self.ports.len() - 1)
    }

    /// A port of a host, for one more to share it.
    pub(super) fn port_at(&self, host: usize) -> Option<usize> {
        self.ports.iter().position(|port| port.host == host)
    }

    /// How one more end waits at a port.
    pub(super) fn opening_at(&mut self, port: usize) -> Opening {
        match self.ports[port].deferred {
            true => Opening::Decides { refusals: self.rng.below(2) as u32 },
            false => Opening::Offered,
        }
    }

    /// Has everybody who waits at a port look whether it has a peer.
    pub(super) fn decide_later(&mut self, world: &mut World, port: usize) {
        for e in 0..self.ends.len() {
            let end = &self.ends[e];
            if end.port == Some(port) && matches!(end.stage, Stage::Idle | Stage::Opening) {
                self.open_later(world, e);
            }
        }
    }

    /// The connection of an end stands. Only now those who wait at ports learn who their peers are.
    pub(super) fn mate(&mut self, world: &mut World, e: usize) {
        let (host, qp, own) = (self.ends[e].host, self.ends[e].qp, self.ends[e].peer);
        match self.ends[e].opening {
            Opening::Connects => return,
            Opening::Together { .. } => return self.ends[e].mated = true,
            Opening::Offered | Opening::Decides { .. } => {}
        }
        let caller = world.hosts[host].adapter.query_qp(qp).ok().and_then(|info| {
            let to = self.ports[self.ends[e].port?].number;
            let from = (info.attr.av.dgid, info.attr.dest_qp_num as u16);
            self.callers.get(&(from.0, from.1, host, to)).copied()
        });
        let Some(caller) = caller else {
            return world.violate(|| format!("end {e} is connected to nobody"));
        };
        world.trace.line(world.kernel.now(), || format!("end {e} has end {caller}"));
        let peer = &self.ends[caller];
        if peer.mated || !peer.exists || peer.stage == Stage::Over {
            // It is no more, and the peer that was meant will find nobody.
            self.cause(e, "a connection that was given up");
            self.ends[e].mated = true;
            self.ends[e].peer = caller;
            return;
        }
        let other = std::mem::replace(&mut self.ends[caller].peer, e);
        self.ends[e].peer = caller;
        if other != e {
            world.counters.swapped += 1;
            if self.ends[other].peer == caller {
                self.ends[other].peer = own;
            }
            if self.ends[own].peer == e {
                self.ends[own].peer = other;
            }
            self.share_causes(other, own);
            self.share_causes(e, caller);
        }
        self.ends[caller].mated = true;
        self.ends[e].mated = true;
    }

    /// What has happened to one of two who had other peers before explains failures of both.
    fn share_causes(&mut self, a: usize, b: usize) {
        let causes = [&self.ends[a].causes[..], &self.ends[b].causes[..]].concat();
        self.ends[a].causes.clone_from(&causes);
        self.ends[b].causes = causes;
    }

    /// Notes what explains failures of a connection, at both ends; and at all who share a port with an end
    /// that has no peer yet, since one of them will go without.
    pub(super) fn cause(&mut self, e: usize, what: &'static str) {
        let peer = self.ends[e].peer;
        for end in [e, peer] {
            self.ends[end].causes.push(what);
        }
        let port = self.ends[e].port.or(self.ends[peer].port);
        if self.ends[e].mated || port.is_none() {
            return;
        }
        for end in 0..self.ends.len() {
            let there = &self.ends[end];
            let shares = there.port.or(self.ends[there.peer].port) == port && !there.mated;
            if shares && end != e && end != peer {
                self.ends[end].causes.push(what);
            }
        }
    }
}
