//! Links between adapters of one machine, and what travels over them.

use std::sync::Arc;

use quipu_nic::mem::Segment;
use quipu_nic::{ConnId, Link, LinkMessage, Loss};

use super::{World, WorldEvent};
use crate::memory::Reach;

/// Bytes of a channel in a link's segment, with room to spare.
const BLOCK: usize = 352 << 10;

impl World {
    pub(super) fn ensure_link(&mut self, a: usize, b: usize) {
        if self.hosts[a].links.contains_key(&b) {
            return;
        }
        self.counters.links += 1;
        let segments = [a, b].map(|h| {
            let blocks = self.hosts[h].style.link_blocks;
            Segment::heap(4096 + blocks * BLOCK)
        });
        let reachable = self.hosts[a].style.reachable && self.hosts[b].style.reachable;
        for (own, peer, [mine, theirs]) in [(a, b, [0, 1]), (b, a, [1, 0])] {
            let memory = reachable.then(|| -> Arc<dyn quipu_nic::PeerMemory> {
                let [mine, theirs] = [own, peer].map(|h| self.hosts[h].space.clone());
                Arc::new(Reach::new(mine, theirs, self.hosts[peer].style.is_mapped()))
            });
            let link = Link {
                own: segments[mine].clone(),
                peer: segments[theirs].clone(),
                peer_gid: self.hosts[peer].only_gid(),
                peer_memory: memory,
                peer_directory: self.hosts[peer].directory.clone(),
            };
            self.wake(own);
            match self.hosts[own].adapter.handle_link_up(link) {
                Ok(id) => {
                    self.hosts[own].links.insert(peer, id);
                    self.hosts[own].link_peers.insert(id, peer);
                }
                Err(fault) => self.violate(|| format!("link refused: {fault}")),
            }
        }
        // The other side is not in the middle of its loop: it goes on from here when it is due.
        let delay = self.rng.below(1_000);
        self.kernel.after(delay, WorldEvent::Look { host: b });
        self.hosts[b].look_scheduled = true;
    }

    pub(super) fn reached_link(&mut self, h: usize, conn: ConnId, peer: usize) {
        if !self.hosts[h].alive || !self.hosts[h].reaching.remove(&conn) {
            return;
        }
        let now = self.time();
        match self.hosts[h].links.get(&peer) {
            Some(&link) => {
                self.wake(h);
                if !self.hosts[h].adapter.handle_reached_link(now, conn, link) {
                    self.hosts[h].adapter.handle_lost(now, conn, Loss::Refused);
                }
            }
            None => self.hosts[h].adapter.handle_lost(now, conn, Loss::Refused),
        }
        self.serve(h);
    }

    pub(super) fn linked(&mut self, h: usize, from: usize, message: LinkMessage) {
        let Some(&link) = self.hosts[h].links.get(&from) else { return };
        if self.hosts[h].alive {
            let now = self.time();
            self.trace.line(self.kernel.now(), || format!("host {h} from {from}: {message:?}"));
            self.wake(h);
            self.hosts[h].adapter.handle_link_message(now, link, message);
            self.serve(h);
        }
    }

    pub(super) fn link_down(&mut self, h: usize, peer: usize) {
        let Some(link) = self.hosts[h].links.remove(&peer) else { return };
        self.hosts[h].link_peers.remove(&link);
        if self.hosts[h].alive {
            let now = self.time();
            self.wake(h);
            self.hosts[h].adapter.handle_link_down(now, link);
            self.serve(h);
        }
    }
}
