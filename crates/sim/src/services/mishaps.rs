//! What programs, processes and strangers do in the middle of a run.

use quipu_nic::{QpAttrMask as M, QpState};

use super::model::{Contents, Stage};
use super::{Mishap, Services};
use crate::world::World;

impl Services {
    /// A mishap of the plan happens.
    pub(super) fn mishap(&mut self, world: &mut World, index: usize) {
        if self.teardown {
            return;
        }
        let mishap = self.mishaps[index];
        world.trace.line(world.kernel.now(), || format!("{mishap:?}"));
        world.trace.note(&[52, index as u64]);
        self.tally.faults += 1;
        match mishap {
            Mishap::ToError { actor } if self.actors[actor].exists => {
                self.cause(actor, "taken to error");
                self.modify(world, actor, QpState::Err, M::empty());
                self.over(actor);
            }
            Mishap::Destroy { actor } if self.actors[actor].exists => {
                self.cause(actor, "destroyed");
                self.destroy(world, actor);
            }
            Mishap::Kill { host, silent } if world.hosts[host].alive && world.hosts.len() > 1 => {
                for actor in 0..self.actors.len() {
                    if self.actors[actor].host == host {
                        // No kernel speaks for an adapter with a TCP of its own.
                        let silent = silent || self.over_link;
                        self.cause(actor, if silent { "a silent death" } else { "a death" });
                        self.forget(actor);
                    }
                }
                world.udp.groups.retain(|&(member, _)| member != host);
                world.kill(host, silent);
            }
            Mishap::Nonsense { host } => self.nonsense(world, host),
            _ => {}
        }
    }

    /// An actor takes no more requests.
    pub(super) fn over(&mut self, a: usize) {
        self.actors[a].stage = Stage::Over;
        self.actors[a].ops_left = 0;
    }

    /// Nothing more is known of what an actor posted.
    pub(super) fn forget(&mut self, a: usize) {
        self.over(a);
        self.actors[a].exists = false;
        let sent = std::mem::take(&mut self.actors[a].sent);
        sent.iter().for_each(|sent| self.lost_request(sent));
        for pool in self.actors[a].pools.clone() {
            if self.pools[pool].owner == Some(a) {
                for (_, slot) in std::mem::take(&mut self.pools[pool].posted) {
                    self.slots[slot].contents = Contents::Unknown;
                }
            } else {
                self.pools[pool].robbed = true;
            }
        }
    }

    /// The program destroys its queue pair.
    pub(super) fn destroy(&mut self, world: &mut World, a: usize) {
        let (host, qp) = (self.actors[a].host, self.actors[a].qp);
        let now = world.time();
        world.wake(host);
        for mgid in world.hosts[host].adapter.groups_of(qp) {
            match world.hosts[host].adapter.detach_multicast(qp, mgid) {
                Ok(true) => {
                    world.udp.groups.remove(&(host, mgid.into()));
                }
                Ok(false) => {}
                Err(fault) => world.violate(|| format!("actor {a} cannot be detached: {fault}")),
            }
        }
        if let Err(fault) = world.hosts[host].adapter.destroy_qp(now, qp) {
            world.violate(|| format!("actor {a} cannot be destroyed: {fault}"));
        }
        self.forget(a);
        world.serve(host);
    }

    /// Strangers send what no adapter may take.
    fn nonsense(&mut self, world: &mut World, host: usize) {
        let Some((arrival, bytes)) = world.udp.last.clone() else { return };
        for _ in 0..20 {
            let (mut arrival, mut bytes) = (arrival, bytes.to_vec());
            match self.rng.below(4) {
                0 => bytes.truncate(self.rng.index(20)),
                1 => arrival.from.set_port(arrival.from.port() ^ 0x55),
                2 => bytes[self.rng.clone().index(4)] ^= 0x40,
                _ => bytes[12 + self.rng.clone().index(4)] ^= 0x10,
            }
            if world.hosts[host].alive {
                let now = world.time();
                world.hosts[host].adapter.handle_datagram(now, &arrival, &bytes);
            }
        }
        world.serve(host);
    }
}
