//! Makes the hosts, queues, queue pairs and memory of a plan.

use std::collections::VecDeque;

use quipu_nic::{
    Access, AddressVector, ChannelId, Config, Gid, QpAttr, QpAttrMask, QpCap, QpInit, QpNum,
    QpState, QpType, WindowType,
};

use crate::addresses::{ROW_V4, ROW_V6};
use crate::load::Load;
use crate::model::{
    Asked, CompletionQueue, Counter, End, Pair, SharedQueue, Stage, Window, WindowState,
};
use crate::network::Partition;
use crate::plan::{Kind, Mishap, Trap, UNFINISHED_NS, draw_order};
use crate::world::{LoadEvent, World, WorldEvent};

/// Rights of every region that a peer may use.
const REMOTE: Access = Access::LOCAL_WRITE.union(Access::REMOTE);

impl Load {
    /// Builds everything and schedules what happens first.
    pub fn set_up(&mut self, world: &mut World) {
        self.make_hosts(world);
        for index in 0..self.plan.pairs.len() {
            self.make_pair(world, index);
        }
        self.share_out(world);
        for e in 0..self.ends.len() {
            let at = self.rng.below(self.plan.tick_ns * 4 + 1);
            world.kernel.at(at, WorldEvent::Load(LoadEvent::Connect { end: e }));
            self.tick_later(world, e);
        }
        for cq in 0..self.cqs.len() {
            if self.cqs[cq].by_event {
                self.ask(world, cq, false);
            } else {
                self.poll_later(world, cq);
            }
        }
    }

    fn make_hosts(&mut self, world: &mut World) {
        for (index, &(machine, mut style)) in self.plan.hosts.clone().iter().enumerate() {
            let mut seed = [0; 32];
            for part in seed.chunks_exact_mut(8) {
                part.copy_from_slice(&self.rng.next().to_le_bytes());
            }
            // Each connection takes a block for as long as it lasts.
            style.link_blocks += self.plan.pairs.len();
            let order = draw_order(&mut self.rng, &mut style);
            let config = Config {
                seed,
                copy_limit: self.plan.copy_limit,
                // Nobody looks in between: all are taken back.
                offer_looks: 1,
                answer_looks: 2,
                max_ulpdu: self.plan.max_ulpdu,
                crc: self.plan.crc(seed[0]),
                setup_timeout_ns: self.plan.setup_timeout_ns,
                unfinished_ns: UNFINISHED_NS,
                max_half_open: 8,
                max_mr: 4096,
                ..Config::default()
            };
            let host = world.add_host(machine, 4000 + index as u16, config, style);
            if self.plan.other_address_percent > 0 {
                world.add_addresses(host);
            }
            if let Some((order, hold_ns)) = order {
                world.hosts[host].adapter.place_unordered(order, hold_ns);
            }
            if self.rng.percent(10) {
                world.hosts[host].listening = false;
                let at = self.rng.below(5_000_000);
                world.kernel.at(at, WorldEvent::Listen { host });
            }
            let adapter = &mut world.hosts[host].adapter;
            let pds = (0..2).filter_map(|_| adapter.alloc_pd().ok()).collect();
            self.pds.push(pds);
            for _ in 0..self.plan.cqs_per_host {
                let by_event = self.rng.percent(50);
                let channel = by_event.then_some(ChannelId(7));
                let context = self.cqs.len() as u64;
                match world.hosts[host].adapter.create_cq(8192, channel, context) {
                    Ok((id, _)) => self.cqs.push(CompletionQueue {
                        host,
                        id,
                        by_event,
                        scheduled: false,
                        poll_ns: self.rng.pick(&[1_000, 30_000, 500_000]),
                        idle: 0,
                        batch: self.rng.pick(&[1, 16, 64]),
                        asked: Asked::Nothing,
                        told: false,
                        found: Asked::Nothing,
                    }),
                    Err(fault) => world.violate(|| format!("no completion queue: {fault}")),
                }
            }
        }
    }

    /// A completion queue of a host.
    fn pick_cq(&mut self, host: usize) -> usize {
        host * self.plan.cqs_per_host + self.rng.index(self.plan.cqs_per_host)
    }

    /// The shared receive queue of a protection domain of a host, if the plan has such.
    fn shared_queue(
        &mut self,
        world: &mut World,
        host: usize,
        pd_index: usize,
        room: usize,
    ) -> Option<usize> {
        if !self.plan.use_srq || self.rng.percent(30) {
            return None;
        }
        let found = self.srqs.iter().position(|srq| (srq.host, srq.pd_index) == (host, pd_index));
        if let Some(srq) = found {
            self.srqs[srq].room = self.srqs[srq].room.max(room);
            return Some(srq);
        }
        let depth = self.rng.range(2, 12) as usize;
        let max_sge = self.rng.pick(&[1, 4, 30]);
        let pd = self.pds[host][pd_index];
        let limit = depth / 2;
        let made = world.hosts[host].adapter.create_srq(pd, 16, max_sge, limit as u32);
        match made {
            Ok(id) => {
                self.srqs.push(SharedQueue {
                    host,
                    id,
                    pd_index,
                    max_sge: max_sge as usize,
                    depth,
                    room,
                    posted: Default::default(),
                    lost: 0,
                    spare: None,
                    recvs_posted: 0,
                    messages_in: 0,
                    limit,
                    fell: false,
                    limit_told: false,
                });
                Some(self.srqs.len() - 1)
            }
            Err(fault) => {
                world.violate(|| format!("no shared receive queue: {fault}"));
                None
            }
        }
    }

    fn make_pair(&mut self, world: &mut World, index: usize) {
        let ([a, b], alone) = self.plan.pairs[index];
        let first = self.ends.len();
        let peer = if alone { first } else { first + 1 };
        let max_send = [self.draw_max_send(), self.draw_max_send()];
        self.make_end(world, a, index, peer, max_send[0], max_send[usize::from(!alone)]);
        if !alone {
            self.make_end(world, b, index, first, max_send[1], max_send[0]);
        }
        self.pairs.push(Pair {
            ends: [first, peer],
            causes: Vec::new(),
            explains: Vec::new(),
            recv_trap: Vec::new(),
            trap: None,
            done: false,
        });
        let psn = [self.rng.below(1 << 24) as u32, self.rng.below(1 << 24) as u32];
        let rows = self.draw_rows(alone);
        for (side, e) in [first, peer].into_iter().enumerate() {
            let other = &self.ends[if side == 0 { peer } else { first }];
            let (host, num) = (other.host, other.num);
            let attr = &mut self.ends[e].attr;
            attr.dest_qp_num = num.0;
            attr.av.dgid = Gid::from(world.hosts[host].address_of(rows[1 - side]));
            attr.av.sgid_index = rows[side];
            attr.sq_psn = psn[side];
            attr.rq_psn = if alone { psn[side] } else { psn[1 - side] };
        }
    }

    /// The rows of the GID tables that the two ends of a connection use, whose addresses are of one family.
    /// An end that is alone is both.
    fn draw_rows(&mut self, alone: bool) -> [u8; 2] {
        let most = self.plan.other_address_percent;
        if most == 0 {
            return [0; 2];
        }
        if self.rng.percent(most / 2) {
            return [ROW_V6; 2];
        }
        let mut draw = || if self.rng.percent(most) { ROW_V4 } else { 0 };
        let first = draw();
        [first, if alone { first } else { draw() }]
    }

    fn draw_max_send(&mut self) -> usize {
        let most = self.plan.max_len as u64;
        match self.rng.below(4) {
            0 => 0,
            1 => self.rng.below(200.min(most)) as usize,
            _ => self.rng.below(most.min(200_000)) as usize,
        }
    }

    fn make_end(
        &mut self,
        world: &mut World,
        host: usize,
        pair: usize,
        peer: usize,
        max_send: usize,
        recv_room: usize,
    ) {
        let e = self.ends.len();
        let pd_index = self.rng.index(2);
        let srq = self.shared_queue(world, host, pd_index, recv_room);
        let recv_depth = self.rng.range(1, 16) as usize;
        let asked = QpCap {
            max_send_wr: self.rng.pick(&[1, 2, 7, 16, 64]),
            max_recv_wr: if srq.is_some() { 0 } else { recv_depth as u32 },
            max_send_sge: self.rng.pick(&[1, 4, 30]),
            max_recv_sge: self.rng.pick(&[1, 4, 30]),
            max_inline_data: self.rng.pick(&[0, 64, 97, 1024]),
        };
        let (send_cq, recv_cq) = (self.pick_cq(host), self.pick_cq(host));
        let pd = self.pds[host][pd_index];
        let sig_all = self.rng.percent(20);
        let init = QpInit {
            pd,
            send_cq: self.cqs[send_cq].id,
            recv_cq: self.cqs[recv_cq].id,
            srq: srq.map(|srq| self.srqs[srq].id),
            cap: asked,
            qp_type: QpType::Rc,
            sq_sig_all: sig_all,
        };
        let num = QpNum::new(world.hosts[host].address.port(), (e & 0xff) as u8);
        let (qp, cap) = match world.hosts[host].adapter.create_qp(&init, num) {
            Ok(made) => made,
            Err(fault) => return world.violate(|| format!("no queue pair: {fault}")),
        };
        let target = self.new_target(world, host, pd_index);
        let attr = self.draw_attr();
        self.ends.push(End {
            host,
            pd,
            pd_index,
            qp,
            num,
            peer,
            pair,
            cap,
            attr,
            sig_all,
            send_cq,
            recv_cq,
            srq,
            stage: Stage::Init,
            exists: true,
            sq: VecDeque::new(),
            rq: VecDeque::new(),
            inbound: VecDeque::new(),
            target,
            ops_left: 0,
            max_send,
            recv_room,
            recv_depth,
            tick_ns: self.rng.range(1, self.plan.tick_ns),
            recv_percent: if self.plan.late_receives { self.rng.range(5, 60) } else { 100 },
            recvs_posted: 0,
            messages_in: 0,
            starved: false,
            failed: None,
            broken: false,
            collateral: None,
            drain_seen: false,
            drain_owed: false,
            drain_inherited: false,
            ticking: false,
            idle: 0,
            last_read: None,
            trap_at: None,
            before: None,
        });
        self.begin(world, e);
        self.make_windows(world, e);
    }

    /// Memory for the operations of a peer.
    fn new_target(&mut self, world: &mut World, host: usize, pd_index: usize) -> usize {
        let most = self.plan.max_len.max(64) * 2;
        let len = self.rng.pick(&[64, 4096, 40_000, 300_000]).min(most).next_multiple_of(8);
        let bind = if self.binds() { Access::MW_BIND } else { Access::empty() };
        self.new_arena(world, host, pd_index, len, REMOTE | bind)
    }

    /// Takes the queue pair of an end to INIT.
    fn begin(&mut self, world: &mut World, e: usize) {
        let (host, qp, num) = (self.ends[e].host, self.ends[e].qp, self.ends[e].num);
        let mask = QpAttrMask::STATE
            | QpAttrMask::PKEY_INDEX
            | QpAttrMask::PORT
            | QpAttrMask::ACCESS_FLAGS;
        let init = QpAttr { state: QpState::Init, ..self.ends[e].attr };
        let now = world.time();
        if let Err(fault) = world.hosts[host].adapter.modify_qp(now, qp, &init, mask) {
            world.violate(|| format!("INIT refused: {fault}"));
        }
        self.by_num.insert((host, num), e);
    }

    /// Both programs of a connection take their queue pairs through RESET and connect them anew, each in
    /// its own time.
    pub fn reconnect(&mut self, world: &mut World, pair: usize) {
        let ends = self.pairs[pair].ends;
        let usable = |&e: &usize| {
            let end = &self.ends[e];
            let ready = matches!(end.stage, Stage::Rts | Stage::Sqd);
            world.hosts[end.host].alive && end.exists && ready
        };
        let succeeded = self.ends.iter().any(|end| end.before == Some(ends[0]));
        if succeeded || !ends.iter().all(usable) {
            return;
        }
        // What keeps the two apart keeps their next connection apart.
        let causes = self.pairs[pair].causes.clone();
        self.cause(pair, "connected anew");
        let alone = ends[0] == ends[1];
        let (first, fresh) = (self.ends.len(), self.pairs.len());
        let psn = [1 + self.rng.below(1 << 23) as u32, 1 + self.rng.below(1 << 23) as u32];
        for side in 0..2 - usize::from(alone) {
            let old = ends[side];
            let target = self.new_target(world, self.ends[old].host, self.ends[old].pd_index);
            let ops_left = self.rng.below(20) as u32;
            let was = &self.ends[old];
            let mut attr = was.attr;
            attr.sq_psn = psn[side];
            attr.rq_psn = if alone { psn[side] } else { psn[1 - side] };
            let end = End {
                pair: fresh,
                peer: if alone { first } else { first + 1 - side },
                attr,
                target,
                ops_left,
                before: Some(old),
                stage: Stage::Gone,
                exists: false,
                ..was.fresh()
            };
            self.ends.push(end);
            let at = self.rng.below(self.plan.tick_ns * 4 + 1);
            let end = self.ends.len() - 1;
            world.kernel.after(at, WorldEvent::Load(LoadEvent::Rebirth { end }));
        }
        self.pairs.push(Pair {
            ends: [first, first + 1 - usize::from(alone)],
            causes,
            explains: self.pairs[pair].explains.clone(),
            recv_trap: self.pairs[pair].recv_trap.clone(),
            trap: None,
            done: false,
        });
    }

    /// The queue pair of an end goes through RESET and belongs to its successor from now on.
    pub fn rebirth(&mut self, world: &mut World, e: usize) {
        let Some(old) = self.ends[e].before else { return };
        let host = self.ends[e].host;
        if self.teardown || !world.hosts[host].alive || !self.ends[old].exists {
            // Destroyed, or dead: the new connection is never made.
            let pair = self.ends[e].pair;
            self.cause(pair, "its queue pair is gone");
            self.ends[e].ops_left = 0;
            return;
        }
        self.move_to(world, old, QpState::Reset);
        self.ends[e].drain_inherited = self.ends[old].drain_owed;
        self.forget(old);
        self.ends[old].exists = false;
        self.ends[e].exists = true;
        self.ends[e].stage = Stage::Init;
        self.begin(world, e);
        let at = self.rng.below(self.plan.tick_ns * 4 + 1);
        world.kernel.after(at, WorldEvent::Load(LoadEvent::Connect { end: e }));
        self.tick_later(world, e);
    }

    fn draw_attr(&mut self) -> QpAttr {
        let rnr_retry =
            if self.plan.finite_rnr && self.rng.percent(60) { self.rng.below(7) as u8 } else { 7 };
        let forever = self.rng.percent(50);
        QpAttr {
            path_mtu: self.rng.range(1, 5) as u8,
            access: Access::REMOTE | Access::LOCAL_WRITE,
            av: AddressVector { is_global: true, port_num: 1, hop_limit: 64, ..Default::default() },
            port_num: 1,
            max_rd_atomic: self.rng.pick(&[1, 2, 16]),
            max_dest_rd_atomic: 16,
            min_rnr_timer: self.rng.pick(&[1, 6, 12, 14]),
            // With an end: 4.3 seconds and more, so that no fault that passes reaches it.
            timeout: if forever { 0 } else { self.rng.range(18, 20) as u8 },
            retry_cnt: self.rng.range(0, 7) as u8,
            rnr_retry,
            ..QpAttr::default()
        }
    }

    /// Whether the plan uses windows.
    fn binds(&self) -> bool {
        self.plan.weights[Kind::Bind as usize] > 0
    }

    fn make_windows(&mut self, world: &mut World, owner: usize) {
        if !self.binds() {
            return;
        }
        let (host, pd) = (self.ends[owner].host, self.ends[owner].pd);
        for _ in 0..self.rng.range(1, 3) {
            match world.hosts[host].adapter.alloc_mw(pd, WindowType::Two) {
                Ok((mw, key)) => self.windows.push(Window {
                    owner,
                    mw,
                    key: key.0,
                    state: WindowState::Free,
                    zero_based: false,
                    at: 0,
                    len: 0,
                    users: 0,
                }),
                Err(fault) => world.violate(|| format!("no window: {fault}")),
            }
        }
    }

    /// Shares requests, traps, mishaps and counters out among the connections.
    fn share_out(&mut self, world: &mut World) {
        let ends = self.ends.len();
        for _ in 0..self.plan.ops {
            let e = self.rng.index(ends);
            self.ends[e].ops_left += 1;
        }
        for pair in 0..self.pairs.len() {
            if self.rng.percent(self.plan.trap_percent) {
                let e = self.pairs[pair].ends[self.rng.index(2)];
                if self.ends[e].ops_left > 0 {
                    let at = self.rng.range(1, u64::from(self.ends[e].ops_left)) as u32;
                    self.ends[e].trap_at = Some(at);
                }
            }
        }
        self.draw_mishaps(world);
        self.draw_partition(world);
        if self.plan.weights[Kind::SharedAdd as usize] > 0 {
            for host in 0..world.hosts.len() {
                let arena = self.new_arena(world, host, 0, 64, REMOTE);
                let at = self.arenas[arena].start + 8 * self.rng.index(8);
                let bytes = self.arenas[arena].shadow[at..at + 8].try_into().unwrap_or_default();
                let first = u64::from_ne_bytes(bytes);
                // Its value is checked by the counter.
                self.arenas[arena].wild.push((at, 8));
                self.counters.push(Counter {
                    arena,
                    at,
                    first,
                    done: Vec::new(),
                    unknown: Vec::new(),
                });
            }
        }
        world.net.calm_from = self.plan.calm_ns;
    }

    fn draw_mishaps(&mut self, world: &mut World) {
        let hosts = world.hosts.len();
        for _ in 0..self.plan.mishaps {
            let end = self.rng.index(self.ends.len());
            let host = self.rng.index(hosts);
            let pair = self.rng.index(self.pairs.len());
            let mishap = match self.rng.below(11) {
                0 => Mishap::ToError { end },
                1 => Mishap::Reset { end },
                2 => Mishap::Destroy { end },
                3 | 4 => Mishap::Drain { end },
                5 => Mishap::Deregister { end },
                6 => Mishap::Deny { host },
                7 | 8 => Mishap::Reconnect { pair },
                9 => Mishap::Kill { host, silent: self.rng.percent(30) },
                _ => Mishap::Flood { host, count: self.rng.range(1, 20) as u32 },
            };
            self.mishaps.push(mishap);
            let at = self.rng.below(self.plan.calm_ns);
            let index = self.mishaps.len() - 1;
            world.kernel.at(at, WorldEvent::Load(LoadEvent::Fault { index }));
        }
    }

    fn draw_partition(&mut self, world: &mut World) {
        if !self.rng.percent(self.plan.partition_percent) || world.hosts.len() < 2 {
            return;
        }
        let a = self.rng.index(world.hosts.len());
        let b = (a + 1 + self.rng.index(world.hosts.len() - 1)) % world.hosts.len();
        let from = self.rng.below(self.plan.calm_ns);
        let forever = self.rng.percent(30);
        let to = if forever { u64::MAX } else { from + self.rng.below(self.plan.calm_ns) };
        let all = self.rng.percent(20);
        let hosts = (!all).then_some([a, b]);
        world.net.partitions.push(Partition { hosts, from, to });
        if forever {
            for pair in 0..self.pairs.len() {
                let ends = self.pairs[pair].ends.map(|e| self.ends[e].host);
                let concerned = all || ends == [a, b] || ends == [b, a];
                if concerned && ends[0] != ends[1] {
                    self.cause(pair, "partition for ever");
                }
            }
        }
    }

    /// Whether this very receive is the trap.
    pub fn take_bad_receive(&mut self, e: usize) -> bool {
        let (peer, pair) = (self.ends[e].peer, self.ends[e].pair);
        let ready = self.bad_receive == Some(e) && self.ends[e].srq.is_none();
        if !ready || self.ends[e].recv_room == 0 || self.ends[peer].max_send == 0 {
            return false;
        }
        self.bad_receive = None;
        self.cause(pair, "a receive in memory that is not registered");
        self.pairs[pair].explains.push(quipu_nic::WcStatus::RemOpErr);
        self.pairs[pair].recv_trap.push(quipu_nic::WcStatus::LocProtErr);
        true
    }

    /// A trap for a connection.
    pub fn draw_trap(&mut self) -> Trap {
        self.rng.pick(&crate::plan::TRAPS)
    }
}
