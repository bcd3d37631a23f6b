//! Makes hosts, queues and queue pairs.

use std::collections::VecDeque;
use std::net::{IpAddr, Ipv4Addr};

use quipu_nic::{
    Access, AddressVector, Config, CqId, Gid, PdId, QpAttr, QpAttrMask as M, QpCap, QpId, QpInit,
    QpNum, QpState, QpType, SrqId, XrcdId,
};

use super::model::{Actor, Group, Objects, Pool, Queue, Slot, Stage};
use super::{Mishap, Services};
use crate::frames::{Helps, Weather};
use crate::network::Partition;
use crate::options::Service;
use crate::plan::{UNFINISHED_NS, draw_order};
use crate::world::{LoadEvent, World, WorldEvent};

/// The Q_Key of all datagram queue pairs.
pub(super) const QKEY: u32 = 0x0bad_cafe;
/// Bytes in front of a datagram's payload.
pub(super) const ROUTE: usize = 40;

impl Services {
    /// Builds everything and schedules what happens first.
    pub(super) fn set_up(&mut self, world: &mut World) {
        self.make_hosts(world);
        match self.service {
            Service::Ud => self.make_datagram_actors(world),
            Service::Xrc => self.make_xrc_pairs(world),
            Service::Uc | Service::Iwarp => self.make_pairs(world),
            // They have programs of their own.
            Service::Rc | Service::Qpip | Service::Am | Service::IwarpTcp => {}
        }
        if world.violation.is_some() {
            return;
        }
        self.share_out();
        self.draw_mishaps(world);
        for pool in 0..self.pools.len() {
            self.refill_and_go_on(world, pool);
        }
        for actor in 0..self.actors.len() {
            let at = self.rng.below(self.plan.tick_ns * 4 + 1);
            world.kernel.at(at, WorldEvent::Load(LoadEvent::Connect { end: actor }));
            self.tick_later(world, actor);
        }
        for cq in 0..self.queues.len() {
            self.poll_later(world, cq);
        }
        world.net.calm_from = self.plan.calm_ns;
    }

    fn make_hosts(&mut self, world: &mut World) {
        if self.service == Service::Ud && self.rng.percent(50) {
            world.udp.burst = Some(self.rng.range(1, 4) as u32);
        }
        let link = self.over_link.then(|| self.make_network(world));
        for (index, (machine, mut style)) in self.plan.hosts.clone().into_iter().enumerate() {
            let mut seed = [0; 32];
            for part in seed.chunks_exact_mut(8) {
                part.copy_from_slice(&self.rng.next().to_le_bytes());
            }
            style.link_blocks += 2 * self.plan.pairs.len();
            let xrc = self.service == Service::Xrc;
            let order = xrc.then(|| draw_order(&mut self.rng, &mut style)).flatten();
            let config = Config {
                seed,
                copy_limit: self.plan.copy_limit,
                offer_looks: 1,
                answer_looks: 2,
                max_ulpdu: self.plan.max_ulpdu,
                crc: self.plan.crc(seed[0]),
                // Start-up over a bad link may take longer than the plan's shortest.
                setup_timeout_ns: self.plan.setup_timeout_ns.max(5_000_000_000),
                unfinished_ns: UNFINISHED_NS,
                ..Config::default()
            };
            let host = world.add_host(machine, 4000 + index as u16, config, style);
            if let Some(mtu) = link {
                let secret = [self.rng.next(), self.rng.next()];
                let helps = Helps {
                    cuts: self.rng.pick(&[0, 0, 8_000, 60_000]),
                    joins_ns: self.rng.pick(&[0, 0, 1_000, 200_000]),
                };
                world.attach(host, secret, mtu, helps);
            }
            let adapter = &mut world.hosts[host].adapter;
            if let Some((order, hold_ns)) = order {
                adapter.place_unordered(order, hold_ns);
            }
            let pds = (0..2).filter_map(|_| adapter.alloc_pd().ok()).collect();
            self.objects.push(Objects { pds, ..Objects::default() });
            for _ in 0..self.plan.cqs_per_host {
                match world.hosts[host].adapter.create_cq(8192, None, 0) {
                    Ok((id, _)) => self.queues.push(Queue {
                        host,
                        id,
                        poll_ns: self.rng.pick(&[1_000, 30_000, 500_000]),
                        batch: self.rng.pick(&[1, 16, 64]),
                        idle: 0,
                    }),
                    Err(fault) => world.violate(|| format!("no completion queue: {fault}")),
                }
            }
        }
    }

    /// The network of frames does what the plan's links do; the MTU.
    fn make_network(&mut self, world: &mut World) -> u32 {
        let profile = &self.plan.profile;
        world.frames.weather = Weather {
            byte_ps: profile.byte_ps,
            delay_ns: profile.delay_ns,
            jitter_ns: profile.jitter_ns,
            late_ns: profile.delay_ns + profile.jitter_ns,
            loss_ppm: profile.loss_ppm,
            duplicate_ppm: profile.duplicate_ppm,
            reorder_ppm: profile.reorder_ppm,
            corrupt_ppm: profile.corrupt_ppm,
            queue_ns: u64::MAX,
            ..Weather::default()
        };
        self.rng.pick(&[1_280, 1_500, 9_000, 65_535])
    }

    fn pick_cq(&mut self, host: usize) -> usize {
        host * self.plan.cqs_per_host + self.rng.index(self.plan.cqs_per_host)
    }

    fn pick_pd(&mut self, host: usize) -> PdId {
        self.rng.pick(&self.objects[host].pds)
    }

    /// Makes registered memory.
    pub(super) fn new_slot(
        &mut self,
        world: &mut World,
        host: usize,
        pd: PdId,
        len: usize,
        access: Access,
    ) -> usize {
        let addr = 0x1000_0000 + ((self.slots.len() as u64) << 24);
        match Slot::make(world, host, pd, addr, len, access) {
            Some(slot) => self.slots.push(slot),
            None => world.violate(|| "memory is refused".into()),
        }
        self.slots.len() - 1
    }

    /// A receive queue that is filled later.
    fn new_pool(&mut self, host: usize, owner: Option<usize>, pd: PdId, cq: usize) -> usize {
        let room = if self.service == Service::Ud { ROUTE + 4096 } else { self.max_len };
        self.pools.push(Pool {
            host,
            owner,
            srq: None,
            number: 0,
            pd,
            cq,
            depth: self.rng.range(1, 16) as usize,
            budget: usize::MAX,
            room,
            uneven: false,
            posted: VecDeque::new(),
            robbed: false,
            idle: 0,
        });
        self.pools.len() - 1
    }

    /// A shared receive queue; for an XRC domain, if one is given.
    fn new_shared_pool(&mut self, world: &mut World, host: usize, domain: Option<XrcdId>) -> usize {
        let (pd, cq) = (self.pick_pd(host), self.pick_cq(host));
        let pool = self.new_pool(host, None, pd, cq);
        let (adapter, cq) = (&mut world.hosts[host].adapter, self.queues[cq].id);
        let made = match domain {
            Some(domain) => adapter.create_xrc_srq(pd, domain, cq, 4096, 3),
            None => adapter.create_srq(pd, 4096, 3, 0).map(|id| (id, 0)),
        };
        match made {
            Ok((id, number)) => {
                self.pools[pool].srq = Some(id);
                self.pools[pool].number = number;
            }
            Err(fault) => world.violate(|| format!("no shared receive queue: {fault}")),
        }
        pool
    }

    /// Makes a queue pair, in INIT. `pools`: the shared receive queues that its messages may come to; if
    /// there are none it has its own.
    fn new_actor(
        &mut self,
        world: &mut World,
        host: usize,
        qp_type: QpType,
        peer: usize,
        pools: Vec<usize>,
    ) -> usize {
        let (pd, actor) = (self.pick_pd(host), self.actors.len());
        let (send_cq, recv_cq) = (self.pick_cq(host), self.pick_cq(host));
        let sends = !matches!(qp_type, QpType::XrcRecv(_));
        let xrc = !sends || qp_type == QpType::XrcSend;
        let shared = pools.first().map(|&pool| (self.pools[pool].srq, self.pools[pool].cq));
        let srq = shared.and_then(|(srq, _)| srq).filter(|_| !xrc);
        let recv_cq = shared.map_or(recv_cq, |(_, cq)| cq);
        let depth = self.rng.pick(&[1, 2, 7, 16, 64]);
        let cap = QpCap {
            max_send_wr: depth as u32,
            max_recv_wr: 4096,
            max_send_sge: 3,
            max_recv_sge: 3,
            max_inline_data: self.rng.pick(&[0, 64, 97]),
        };
        let own = |cq: usize, has: bool| if has { self.queues[cq].id } else { CqId::NONE };
        let init = QpInit {
            pd,
            send_cq: own(send_cq, sends),
            recv_cq: own(recv_cq, !xrc),
            srq,
            cap,
            qp_type,
            sq_sig_all: false,
        };
        let num = QpNum::new(world.hosts[host].address.port(), actor as u8);
        let qp = match world.hosts[host].adapter.create_qp(&init, num) {
            Ok((qp, _)) => qp,
            Err(fault) => {
                world.violate(|| format!("no queue pair: {fault}"));
                QpId::NONE
            }
        };
        let pools = if pools.is_empty() && !xrc {
            vec![self.new_pool(host, Some(actor), pd, recv_cq)]
        } else {
            pools
        };
        let attr = self.draw_attr();
        self.actors.push(Actor {
            host,
            qp_type,
            qp,
            num,
            pd,
            send_cq,
            peer,
            pools,
            attr,
            stage: Stage::Init,
            exists: true,
            sent: VecDeque::new(),
            ops_left: 0,
            depth,
            failed: false,
            cause: None,
            trap_at: None,
            idle: 0,
        });
        self.by_num.insert((host, num), actor);
        let basics = M::PKEY_INDEX | M::PORT;
        let mask = if qp_type == QpType::Ud { M::QKEY } else { M::ACCESS_FLAGS };
        self.modify(world, actor, QpState::Init, basics | mask);
        actor
    }

    fn draw_attr(&mut self) -> QpAttr {
        QpAttr {
            path_mtu: self.rng.range(1, 5) as u8,
            access: Access::REMOTE | Access::LOCAL_WRITE,
            av: AddressVector { is_global: true, port_num: 1, hop_limit: 64, ..Default::default() },
            qkey: QKEY,
            port_num: 1,
            max_rd_atomic: self.rng.pick(&[1, 2, 16]),
            max_dest_rd_atomic: 16,
            min_rnr_timer: self.rng.pick(&[1, 6, 12, 14]),
            // Half a second to three: no disturbance that passes reaches it, and a run outlasts it.
            timeout: 15,
            retry_cnt: self.rng.range(0, 5) as u8,
            rnr_retry: 7,
            ..QpAttr::default()
        }
    }

    /// Changes the state of a queue pair; whether it could.
    pub(super) fn modify(
        &mut self,
        world: &mut World,
        actor: usize,
        state: QpState,
        mask: M,
    ) -> bool {
        let (host, qp) = (self.actors[actor].host, self.actors[actor].qp);
        let attr = QpAttr { state, ..self.actors[actor].attr };
        let now = world.time();
        world.wake(host);
        let done = world.hosts[host].adapter.modify_qp(now, qp, &attr, mask | M::STATE);
        world.trace.note(&[50, actor as u64, state as u64]);
        world.trace.line(world.kernel.now(), || format!("actor {actor} to {state:?}: {done:?}"));
        world.serve(host);
        match done {
            Ok(()) => true,
            // It may have failed meanwhile.
            Err(quipu_nic::Fault::Transition(_)) if self.actors[actor].cause.is_some() => false,
            Err(_) if self.is_damaged(world, actor) => false,
            Err(fault) => {
                world.violate(|| format!("actor {actor}: {state:?} is refused: {fault}"));
                false
            }
        }
    }

    fn make_datagram_actors(&mut self, world: &mut World) {
        for host in 0..world.hosts.len() {
            let shared = self.plan.use_srq.then(|| self.new_shared_pool(world, host, None));
            for _ in 0..self.rng.range(1, 3) {
                let pools = shared.filter(|_| self.rng.percent(70)).into_iter().collect();
                // It is its own peer: nobody else suffers with it.
                let actor = self.actors.len();
                self.new_actor(world, host, QpType::Ud, actor, pools);
                self.modify(world, actor, QpState::Rtr, M::empty());
                self.modify(world, actor, QpState::Rts, M::SQ_PSN);
                self.actors[actor].stage = Stage::Rts;
            }
        }
        for index in 0..self.rng.below(3) {
            self.make_group(world, index as u8);
        }
    }

    fn make_group(&mut self, world: &mut World, index: u8) {
        let ip = IpAddr::V4(Ipv4Addr::new(239, 1, 2, index));
        let gid = Gid::from(ip);
        let mut members = Vec::new();
        for actor in 0..self.actors.len() {
            if self.rng.percent(40) {
                continue;
            }
            let (host, qp) = (self.actors[actor].host, self.actors[actor].qp);
            let adapter = &mut world.hosts[host].adapter;
            match adapter.attach_multicast(qp, gid) {
                Ok(()) => {
                    world.udp.groups.insert((host, ip));
                    members.push(actor);
                }
                Err(fault) => world.violate(|| format!("no group: {fault}")),
            }
        }
        self.groups.push(Group { gid, members });
    }

    fn make_pairs(&mut self, world: &mut World) {
        let qp_type = if self.service == Service::Uc { QpType::Uc } else { QpType::Iwarp };
        for ([a, b], alone) in self.plan.pairs.clone() {
            let first = self.actors.len();
            let alone = alone && qp_type == QpType::Uc;
            let peer = if alone { first } else { first + 1 };
            for (host, peer) in [(a, peer), (b, first)].into_iter().take(2 - usize::from(alone)) {
                let shares = self.plan.use_srq && self.rng.percent(50);
                let pools = if shares && qp_type == QpType::Uc {
                    vec![self.new_shared_pool(world, host, None)]
                } else {
                    Vec::new()
                };
                self.new_actor(world, host, qp_type, peer, pools);
            }
            self.introduce(world, first, peer);
        }
    }

    /// Tells two queue pairs of each other.
    fn introduce(&mut self, world: &World, first: usize, second: usize) {
        let psn = [self.rng.below(1 << 24) as u32, self.rng.below(1 << 24) as u32];
        for (side, [own, other]) in [[first, second], [second, first]].into_iter().enumerate() {
            let (host, num) = (self.actors[other].host, self.actors[other].num);
            let attr = &mut self.actors[own].attr;
            attr.dest_qp_num = num.0;
            attr.av.dgid = Gid::from(world.hosts[host].address.ip());
            attr.sq_psn = psn[side];
            attr.rq_psn = if own == other { psn[side] } else { psn[1 - side] };
        }
    }

    fn make_xrc_pairs(&mut self, world: &mut World) {
        let mut served = Vec::new();
        for host in 0..world.hosts.len() {
            let mut domains = Vec::new();
            for _ in 0..self.rng.range(1, 2) {
                match world.hosts[host].adapter.alloc_xrcd() {
                    Ok(domain) => {
                        self.objects[host].domains.push(domain);
                        let count = self.rng.range(1, 3);
                        let pools =
                            (0..count).map(|_| self.new_shared_pool(world, host, Some(domain)));
                        domains.push((domain, pools.collect::<Vec<_>>()));
                    }
                    Err(fault) => world.violate(|| format!("no XRC domain: {fault}")),
                }
            }
            served.push(domains);
        }
        for ([a, b], _) in self.plan.pairs.clone() {
            let place = self.rng.index(served[b].len());
            let Some((domain, pools)) = served[b].get(place).cloned() else { return };
            let first = self.actors.len();
            self.new_actor(world, a, QpType::XrcSend, first + 1, Vec::new());
            self.new_actor(world, b, QpType::XrcRecv(domain), first, pools);
            self.introduce(world, first, first + 1);
        }
    }

    /// Shares requests and traps out, and says how many receives are needed.
    fn share_out(&mut self) {
        let senders: Vec<usize> = (0..self.actors.len())
            .filter(|&actor| !matches!(self.actors[actor].qp_type, QpType::XrcRecv(_)))
            .collect();
        for _ in 0..self.plan.ops {
            let actor = self.rng.pick(&senders);
            self.actors[actor].ops_left += 1;
        }
        for &actor in &senders {
            // A responder of plain iWARP is silent until the initiator has spoken.
            let initiates = actor < self.actors[actor].peer;
            if self.service == Service::Iwarp && initiates {
                self.actors[actor].ops_left += 1;
            }
            let left = self.actors[actor].ops_left;
            if left > 0 && self.rng.percent(self.plan.trap_percent / 2) {
                self.actors[actor].trap_at = Some(self.rng.range(1, u64::from(left)) as u32);
            }
        }
        let all = self.actors.iter().map(|actor| actor.ops_left as usize).sum::<usize>();
        for pool in 0..self.pools.len() {
            let uneven = !self.ample && self.rng.percent(30);
            let unreliable = matches!(self.service, Service::Ud | Service::Uc);
            let pool = &mut self.pools[pool];
            if self.service == Service::Iwarp || (self.ample && unreliable) {
                // Whatever comes, with those that the network doubles.
                let peer = pool.owner.map(|owner| self.actors[owner].peer);
                let due = match peer.filter(|_| !matches!(self.service, Service::Ud)) {
                    Some(peer) => self.actors[peer].ops_left as usize,
                    None => 2 * all,
                };
                pool.depth = due + 1;
            }
            pool.uneven = uneven && unreliable;
        }
        if self.service == Service::Iwarp {
            self.starve_some();
        }
    }

    /// A Send that finds no receive ends a connection of plain iWARP.
    fn starve_some(&mut self) {
        for pool in 0..self.pools.len() {
            if self.rng.percent(self.plan.trap_percent / 4) {
                let depth = self.pools[pool].depth;
                self.pools[pool].budget = self.rng.index(depth);
                if let Some(owner) = self.pools[pool].owner {
                    self.tally.faults += 1;
                    self.cause(owner, "too few receives");
                }
            }
        }
    }

    fn draw_mishaps(&mut self, world: &mut World) {
        for _ in 0..self.plan.mishaps {
            let actor = self.rng.index(self.actors.len());
            let host = self.rng.index(world.hosts.len());
            let mishap = match self.rng.below(6) {
                0 | 1 => Mishap::ToError { actor },
                2 => Mishap::Destroy { actor },
                3 | 4 => Mishap::Kill { host, silent: self.rng.percent(30) },
                _ => Mishap::Nonsense { host },
            };
            self.mishaps.push(mishap);
            let at = self.rng.below(self.plan.calm_ns);
            let index = self.mishaps.len() - 1;
            world.kernel.at(at, WorldEvent::Load(LoadEvent::Fault { index }));
        }
        if world.hosts.len() < 2 || !self.rng.percent(self.plan.partition_percent) {
            return;
        }
        let a = self.rng.index(world.hosts.len());
        let b = (a + 1 + self.rng.index(world.hosts.len() - 1)) % world.hosts.len();
        let from = self.rng.below(self.plan.calm_ns);
        let forever = self.rng.percent(30);
        let to = if forever { u64::MAX } else { from + self.rng.below(self.plan.calm_ns) };
        world.net.partitions.push(Partition { hosts: Some([a, b]), from, to });
        for actor in 0..self.actors.len() {
            let hosts = [self.actors[actor].host, self.actors[self.actors[actor].peer].host];
            if forever && (hosts == [a, b] || hosts == [b, a]) {
                self.cause(actor, "partition for ever");
            }
        }
    }

    /// The shared receive queues of a host.
    pub(super) fn shared_of(&self, host: usize) -> Vec<SrqId> {
        let pools = self.pools.iter().filter(|pool| pool.host == host);
        pools.filter_map(|pool| pool.srq).collect()
    }
}
