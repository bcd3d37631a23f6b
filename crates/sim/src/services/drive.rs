//! What programs do: connect, post receives and sends, and meet with mishaps.

use std::collections::BTreeMap;
use std::sync::Arc;

use quipu_nic::iwarp::Params;
use quipu_nic::mem::Access;
use quipu_nic::{
    AddressVector, Gid, Key, Payload, PdId, QpAttrMask as M, QpState, QpType, SendFlags, SendOp,
    SendWr, Sge, To, WcExtra, WcOpcode, WcStatus,
};

use super::Services;
use super::model::{Actor, Contents, Message, Sent, Stage};
use super::setup::{QKEY, ROUTE};
use crate::load::LONGEST_TICK_NS;
use crate::options::Service;
use crate::rng::pattern;
use crate::world::{LoadEvent, World, WorldEvent};

/// Rights of memory that a peer may use.
pub(super) const REMOTE: Access = Access::LOCAL_WRITE.union(Access::REMOTE);
/// The longest message of a datagram.
const MTU: usize = 4096;
/// Bytes that say which message it is.
const NAME: usize = 8;

/// A request that is ready to be posted.
pub(super) struct Draft {
    pub op: SendOp,
    pub opcode: WcOpcode,
    pub to: To,
    pub payload: Arc<[u8]>,
    /// Who may get it; nobody, if it consumes no receive.
    pub goals: Option<(Vec<usize>, usize)>,
    pub target: Option<usize>,
    pub flushes: Option<usize>,
    pub sink: Option<(usize, Arc<[u8]>)>,
    pub trap: Vec<WcStatus>,
}

impl Services {
    /// The next step of an actor on its way to RTS.
    pub(super) fn connect_step(&mut self, world: &mut World, a: usize) {
        let actor = &self.actors[a];
        let (stage, qp_type) = (actor.stage, actor.qp_type);
        if !actor.exists || actor.failed || self.teardown {
            return;
        }
        match (qp_type, stage) {
            (QpType::Ud, _) => {}
            (QpType::Iwarp, Stage::Init) => self.open_plain(world, a),
            (_, Stage::Init | Stage::Rtr) => {
                let xrc = !matches!(qp_type, QpType::Uc);
                let (state, next, all, reliable) = if stage == Stage::Init {
                    let reliable = M::MAX_DEST_RD_ATOMIC | M::MIN_RNR_TIMER;
                    let all = M::AV | M::PATH_MTU | M::DEST_QPN | M::RQ_PSN;
                    (QpState::Rtr, Stage::Rtr, all, reliable)
                } else {
                    let reliable = M::TIMEOUT | M::RETRY_CNT | M::RNR_RETRY | M::MAX_QP_RD_ATOMIC;
                    (QpState::Rts, Stage::Rts, M::SQ_PSN, reliable)
                };
                let mask = if xrc { all | reliable } else { all };
                if self.modify(world, a, state, mask) {
                    self.actors[a].stage = next;
                    let after = self.rng.below(self.plan.tick_ns * 2 + 1);
                    world.kernel.after(after, WorldEvent::Load(LoadEvent::Connect { end: a }));
                }
            }
            _ => {}
        }
    }

    /// Connection management opens a stream from the first end of a connection to the second.
    fn open_plain(&mut self, world: &mut World, a: usize) {
        let b = self.actors[a].peer;
        if b < a {
            return;
        }
        let depth = self.rng.pick(&[1, 4, 16]);
        let mut params = Params::peer_to_peer(depth, depth);
        match self.rng.below(3) {
            // It states no depths; the programs know them all the same.
            0 => params.revision = 1,
            1 => {
                if let Some(enhanced) = &mut params.enhanced {
                    enhanced.peer_to_peer = false;
                }
            }
            _ => {}
        }
        let mut both = [params; 2];
        // Ends that know one kind of ready-to-receive message in common.
        let only = self.rng.below(4);
        for enhanced in both.iter_mut().filter_map(|params| params.enhanced.as_mut()) {
            enhanced.rtr_send &= only == 0 || only == 3;
            enhanced.rtr_write &= only == 1 || only == 3;
            enhanced.rtr_read &= only == 2 || only == 3;
        }
        // What is damaged must be noticed.
        let crc = self.plan.profile.corrupt_ppm > 0 || self.rng.percent(50);
        both.iter_mut().for_each(|params| params.crc = crc);
        let ends = [a, b].map(|end| (self.actors[end].host, self.actors[end].qp));
        match self.over_link {
            true => world.connect_over_link(ends, both),
            false => world.connect_plain(ends, both),
        }
    }

    /// Schedules the next thing that an actor does.
    pub(super) fn tick_later(&mut self, world: &mut World, a: usize) {
        let actor = &mut self.actors[a];
        let after = (1 + self.rng.below(self.plan.tick_ns)) << actor.idle.min(20);
        actor.idle += 1;
        let after = after.min(LONGEST_TICK_NS.max(self.plan.tick_ns));
        world.kernel.after(after, WorldEvent::Load(LoadEvent::Tick { end: a }));
    }

    pub(super) fn tick(&mut self, world: &mut World, a: usize) {
        if self.teardown || !self.actors[a].exists {
            return;
        }
        if self.actors[a].stage == Stage::Rts && !self.actors[a].failed {
            let host = self.actors[a].host;
            world.wake(host);
            let posted = self.post_some(world, a);
            if posted > 0 {
                let (now, qp) = (world.time(), self.actors[a].qp);
                world.hosts[host].adapter.ring_doorbell(now, qp);
                self.actors[a].idle = 0;
                world.serve(host);
            }
        }
        if self.actors[a].ops_left > 0 {
            self.tick_later(world, a);
        }
    }

    fn post_some(&mut self, world: &mut World, a: usize) -> usize {
        let count = 1 + self.rng.index(8);
        for done in 0..count {
            let actor = &self.actors[a];
            if actor.ops_left == 0 || actor.sent.len() >= actor.depth || world.violation.is_some() {
                return done;
            }
            let due = actor.trap_at.is_some_and(|at| actor.ops_left <= at);
            let mut draft = self.draft(world, a);
            if due {
                self.spoil(a, &mut draft);
            }
            self.post(world, a, draft);
        }
        count
    }

    fn draw_len(&mut self) -> usize {
        if self.service == Service::Ud {
            // Now and then more than can be sent.
            return match self.rng.below(8) {
                0 => MTU + 1 + self.rng.index(100),
                1 => MTU - self.rng.index(3),
                2 | 3 => self.rng.index(NAME + 2),
                _ => self.rng.index(self.max_len.min(MTU)),
            };
        }
        match self.rng.below(4) {
            0 => self.rng.index(NAME + 2).min(self.max_len),
            1 => self.rng.index(self.max_len.min(200) + 1),
            2 => self.max_len - self.rng.index(2),
            _ => self.rng.index(self.max_len + 1),
        }
    }

    /// The bytes of a message: its name, and what belongs to it.
    pub(super) fn payload(&self, len: usize) -> Arc<[u8]> {
        let mut bytes = pattern(self.next_id, 0, len);
        if len >= NAME {
            bytes[..NAME].copy_from_slice(&self.next_id.to_le_bytes());
        }
        bytes.into()
    }

    fn draft(&mut self, world: &mut World, a: usize) -> Draft {
        let len = self.draw_len();
        let payload = self.payload(len);
        let imm = self.next_id as u32;
        let kind = match self.service {
            Service::Ud => self.rng.index(2),
            _ => self.rng.weighted(&self.weights),
        };
        // An unreliable message that is too short for its name has it as immediate data.
        let unreliable = matches!(self.service, Service::Ud | Service::Uc);
        let kind = match (self.service, kind) {
            (Service::Iwarp, 1) => 0,
            (Service::Iwarp, 3) | (Service::Uc, 4) => 2,
            (_, 0) if unreliable && len < NAME => 1,
            (_, kind) => kind,
        };
        let (to, goals) = self.draw_goal(world, a);
        let draft = Draft {
            op: SendOp::Send,
            opcode: WcOpcode::Send,
            to,
            payload,
            goals: Some(goals),
            target: None,
            flushes: None,
            sink: None,
            trap: Vec::new(),
        };
        match kind {
            0 => draft,
            1 => Draft { op: SendOp::SendImm(imm), ..draft },
            2 | 3 => self.draft_write(world, a, draft, (kind == 3).then_some(imm)),
            5 => self.draft_atomic_write(world, a, draft),
            6 => self.draft_flush(world, a, draft),
            _ => self.draft_read(world, a, draft),
        }
    }

    /// Whom a message goes to: the actors that may get it, and the pool that has receives for it.
    fn draw_goal(&mut self, world: &mut World, a: usize) -> (To, (Vec<usize>, usize)) {
        match self.service {
            Service::Ud => {
                let (to, actors) = self.draw_datagram_goal(world, a);
                (to, (actors, 0))
            }
            Service::Xrc => {
                let peer = self.actors[a].peer;
                let pool = self.rng.pick(&self.actors[peer].pools);
                (To::Srq(self.pools[pool].number), (vec![peer], pool))
            }
            _ => {
                let peer = self.actors[a].peer;
                let pool = self.actors[peer].pools[0];
                (To::Peer, (vec![peer], pool))
            }
        }
    }

    fn draw_datagram_goal(&mut self, world: &mut World, a: usize) -> (To, Vec<usize>) {
        let pd = self.actors[a].pd;
        if !self.groups.is_empty() && self.rng.percent(30) {
            let group = self.rng.index(self.groups.len());
            let (gid, members) = (self.groups[group].gid, self.groups[group].members.clone());
            let ah = self.address(world, a, pd, gid);
            return (To::Datagram { ah, qpn: 0x00ff_ffff, qkey: QKEY }, members);
        }
        let peer = self.rng.index(self.actors.len());
        let gid = Gid::from(world.hosts[self.actors[peer].host].address.ip());
        let ah = self.address(world, a, pd, gid);
        let qpn = self.actors[peer].num.0;
        match self.rng.below(12) {
            0 => (To::Datagram { ah, qpn, qkey: QKEY ^ 1 }, Vec::new()),
            1 => (To::Datagram { ah, qpn: qpn ^ 0x80, qkey: QKEY }, Vec::new()),
            // The upper bit stands for the own Q_Key.
            2 => (To::Datagram { ah, qpn, qkey: 1 << 31 }, vec![peer]),
            _ => (To::Datagram { ah, qpn, qkey: QKEY }, vec![peer]),
        }
    }

    /// An address handle for a GID.
    fn address(&mut self, world: &mut World, a: usize, pd: PdId, gid: Gid) -> quipu_nic::AhId {
        let host = self.actors[a].host;
        if let Some(&ah) = self.objects[host].ahs.get(&(pd, gid)) {
            return ah;
        }
        let av = AddressVector {
            dgid: gid,
            is_global: true,
            port_num: 1,
            hop_limit: 3,
            ..AddressVector::default()
        };
        match world.hosts[host].adapter.create_ah(pd, &av) {
            Ok(ah) => {
                self.objects[host].ahs.insert((pd, gid), ah);
                ah
            }
            Err(fault) => {
                world.violate(|| format!("no address handle: {fault}"));
                quipu_nic::AhId::default()
            }
        }
    }

    /// The protection domain in which the peer of an actor finds memory that the actor names.
    pub(super) fn domain_of_peer(&self, a: usize) -> (usize, PdId) {
        let peer = &self.actors[self.actors[a].peer];
        let pd = match peer.qp_type {
            QpType::XrcRecv(_) => self.pools[peer.pools[0]].pd,
            _ => peer.pd,
        };
        (peer.host, pd)
    }

    fn draft_write(
        &mut self,
        world: &mut World,
        a: usize,
        draft: Draft,
        imm: Option<u32>,
    ) -> Draft {
        let (host, pd) = self.domain_of_peer(a);
        if !world.hosts[host].alive {
            return draft;
        }
        let slot = self.new_slot(world, host, pd, draft.payload.len(), REMOTE);
        let (addr, rkey) = (self.slots[slot].addr(), self.slots[slot].key());
        self.slots[slot].contents = Contents::Maybe(draft.payload.clone());
        let op = match imm {
            Some(imm) => SendOp::WriteImm { addr, rkey, imm },
            None => SendOp::Write { addr, rkey },
        };
        let goals = draft.goals.filter(|_| imm.is_some());
        Draft { op, opcode: WcOpcode::RdmaWrite, goals, target: Some(slot), ..draft }
    }

    fn draft_read(&mut self, world: &mut World, a: usize, draft: Draft) -> Draft {
        let (host, pd) = self.domain_of_peer(a);
        if !world.hosts[host].alive {
            return draft;
        }
        let len = draft.payload.len();
        let source = self.new_slot(world, host, pd, len, REMOTE);
        self.slots[source].fill(&draft.payload);
        let (addr, rkey) = (self.slots[source].addr(), self.slots[source].key());
        let (own, pd) = (self.actors[a].host, self.actors[a].pd);
        let sink = self.new_slot(world, own, pd, len, Access::LOCAL_WRITE);
        self.slots[sink].contents = Contents::Maybe(draft.payload.clone());
        let (op, opcode) = (SendOp::Read { addr, rkey }, WcOpcode::RdmaRead);
        Draft { op, opcode, goals: None, sink: Some((sink, draft.payload.clone())), ..draft }
    }

    /// Makes a request fail.
    fn spoil(&mut self, a: usize, draft: &mut Draft) {
        self.actors[a].trap_at = None;
        let plain_send = matches!(draft.op, SendOp::Send | SendOp::SendImm(_));
        let status = match (self.service, &mut draft.op) {
            // It would be silently not sent.
            (Service::Ud, _) if draft.payload.len() > MTU => return,
            (Service::Ud | Service::Uc, _) if draft.payload.is_empty() => return,
            (Service::Ud | Service::Uc, _) => WcStatus::LocProtErr,
            (Service::Xrc, _) if plain_send => {
                draft.to = To::Srq(0x00ff_fffe);
                WcStatus::RemInvReqErr
            }
            // Plain iWARP says of a write only that the connection is over.
            (Service::Xrc, SendOp::Read { rkey, .. }) if !draft.payload.is_empty() => {
                *rkey ^= 0x5555_5500;
                WcStatus::RemAccessErr
            }
            (Service::Xrc, SendOp::AtomicWrite { rkey, .. }) => {
                *rkey ^= 0x5555_5500;
                WcStatus::RemAccessErr
            }
            (Service::Xrc, SendOp::Flush(flush)) => {
                flush.rkey ^= 0x5555_5500;
                WcStatus::RemAccessErr
            }
            _ => return,
        };
        draft.goals = None;
        draft.trap = vec![status];
        self.tally.faults += 1;
        if self.service == Service::Xrc {
            self.cause(a, "a request that the peer refuses");
            self.actors[a].ops_left = self.actors[a].ops_left.min(4);
        }
    }

    fn post(&mut self, world: &mut World, a: usize, draft: Draft) {
        let id = self.new_id();
        let (host, qp) = (self.actors[a].host, self.actors[a].qp);
        self.actors[a].ops_left -= 1;
        let actor = &self.actors[a];
        let last = actor.ops_left == 0 || actor.sent.len() + 1 >= actor.depth;
        let mut flags = SendFlags::empty();
        if last || !draft.trap.is_empty() || self.rng.percent(self.plan.signaled_percent) {
            flags |= SendFlags::SIGNALED;
        }
        if self.rng.percent(self.plan.solicited_percent) {
            flags |= SendFlags::SOLICITED;
        }
        let len = draft.payload.len();
        let sges = self.source(world, a, &draft);
        let inline = draft.sink.is_none()
            && draft.flushes.is_none()
            && draft.trap.is_empty()
            && len <= 64
            && self.rng.percent(self.plan.inline_percent)
            && self.actors[a].depth > 0
            && (draft.opcode == WcOpcode::AtomicWrite || self.inline_room(world, a) >= len);
        let payload = if inline { Payload::Inline(&draft.payload) } else { Payload::Sges(&sges) };
        let wr = SendWr { wr_id: id, to: draft.to, op: draft.op, flags, payload };
        world.trace.note(&[51, a as u64, id, len as u64]);
        world.trace.line(world.kernel.now(), || {
            format!("actor {a} posts {id}: {:x?} {len} B {:?} trap {:?}", wr.op, wr.to, draft.trap)
        });
        if let Err(fault) = world.hosts[host].adapter.post_send(qp, &wr) {
            return world.violate(|| format!("actor {a}: request {id} is refused: {fault}"));
        }
        world.counters.count(&draft.op);
        self.tally.ops += 1;
        self.tally.bytes += len as u64;
        let message = draft.goals.map(|(goals, pool)| {
            let never = self.service == Service::Ud && len > MTU;
            self.expect(a, pool, if never { Vec::new() } else { goals }, draft.op, &draft.payload)
        });
        if let Some(message) = message {
            self.messages[message].target = draft.target;
            self.message_of.insert(id, message);
        }
        if let Some(slot) = draft.target.filter(|_| message.is_none()) {
            self.expect_write(a, id, slot);
        }
        let signaled = flags.contains(SendFlags::SIGNALED);
        let Draft { opcode, target, flushes, sink, trap, .. } = draft;
        let sent = Sent { id, opcode, signaled, len, message, target, flushes, sink, trap };
        self.actors[a].sent.push_back(sent);
    }

    fn inline_room(&self, world: &World, a: usize) -> usize {
        let actor = &self.actors[a];
        let info = world.hosts[actor.host].adapter.query_qp(actor.qp);
        info.map_or(0, |info| info.cap.max_inline_data as usize)
    }

    /// The memory of a request: its payload, or where the answer goes.
    fn source(&mut self, world: &mut World, a: usize, draft: &Draft) -> Vec<Sge> {
        let (host, pd, len) = (self.actors[a].host, self.actors[a].pd, draft.payload.len());
        let cuts = [self.rng.index(len + 1), len];
        if !draft.trap.is_empty() && matches!(self.service, Service::Ud | Service::Uc) {
            return vec![Sge { addr: 64, len: len as u32, lkey: Key(0xdead_be00) }];
        }
        if draft.flushes.is_some() {
            return Vec::new();
        }
        if let Some((sink, _)) = draft.sink {
            return self.slots[sink].list(len, &cuts[..1]);
        }
        let slot = self.new_slot(world, host, pd, len, Access::empty());
        self.slots[slot].fill(&draft.payload);
        self.slots[slot].list(len, &cuts[..self.rng.clone().index(3)])
    }

    /// Notes a message that was posted.
    fn expect(
        &mut self,
        a: usize,
        pool: usize,
        to: Vec<usize>,
        op: SendOp,
        payload: &Arc<[u8]>,
    ) -> usize {
        let (opcode, extra) = match op {
            SendOp::WriteImm { imm, .. } => (WcOpcode::RecvRdmaWithImm, WcExtra::Imm(imm)),
            SendOp::SendImm(imm) => (WcOpcode::Recv, WcExtra::Imm(imm)),
            _ => (WcOpcode::Recv, WcExtra::None),
        };
        self.messages.push(Message {
            from: a,
            to,
            opcode,
            extra,
            payload: payload.clone(),
            target: None,
            done: false,
            arrived: BTreeMap::new(),
        });
        let message = self.messages.len() - 1;
        if self.service != Service::Ud {
            self.expected.entry((a, pool)).or_default().push_back(message);
        }
        message
    }

    /// Posts receives, and again a little later.
    pub(super) fn refill_and_go_on(&mut self, world: &mut World, pool: usize) {
        let host = self.pools[pool].host;
        if self.teardown || !world.hosts[host].alive {
            return;
        }
        world.wake(host);
        let posted = self.refill(world, pool);
        world.serve(host);
        let pool_state = &mut self.pools[pool];
        pool_state.idle = if posted > 0 { 0 } else { pool_state.idle + 1 };
        let gone = pool_state.owner.is_some_and(|owner| {
            !self.actors[owner].exists || self.actors[owner].stage == Stage::Over
        });
        if !gone && self.pools[pool].budget > 0 {
            let after = (1 + self.rng.below(self.plan.tick_ns)) << self.pools[pool].idle.min(20);
            let after = after.min(LONGEST_TICK_NS.max(self.plan.tick_ns));
            world.kernel.after(after, WorldEvent::Load(LoadEvent::Refill { pool }));
        }
    }

    /// Receives of a shared queue that may be held for ever: a queue pair keeps the one that a message has
    /// begun to fill, also when its peer has gone in the middle of it.
    fn held_back(&self, p: usize) -> usize {
        let gone = |a: usize| !self.actors[a].exists || self.actors[a].stage == Stage::Over;
        let holds = |actor: &&Actor| actor.exists && actor.pools.contains(&p) && gone(actor.peer);
        if self.service == Service::Xrc { self.actors.iter().filter(holds).count() } else { 0 }
    }

    fn refill(&mut self, world: &mut World, p: usize) -> usize {
        let mut posted = 0;
        let depth = self.pools[p].depth + self.held_back(p);
        while self.pools[p].posted.len() < depth && self.pools[p].budget > 0 {
            let pool = &self.pools[p];
            let (host, pd, srq, owner) = (pool.host, pool.pd, pool.srq, pool.owner);
            let (uneven, most) = (pool.uneven, pool.room);
            if owner.is_some_and(|a| !self.actors[a].exists || self.actors[a].failed) {
                break;
            }
            let id = self.new_id();
            let room = if uneven { self.rng.index(most + 1) } else { most };
            let slot = self.new_slot(world, host, pd, room, Access::LOCAL_WRITE);
            let cut = [ROUTE.min(room), self.rng.index(room + 1)];
            let count = self.rng.index(3);
            let list = self.slots[slot].list(room, &cut[..count]);
            let now = world.time();
            let adapter = &mut world.hosts[host].adapter;
            let done = match (srq, owner) {
                (Some(srq), _) => adapter.post_srq_recv(now, srq, id, &list),
                (None, Some(a)) => adapter.post_recv(now, self.actors[a].qp, id, &list),
                (None, None) => return posted,
            };
            if let Err(fault) = done {
                world.violate(|| format!("pool {p}: a receive is refused: {fault}"));
                return posted;
            }
            self.pools[p].posted.push_back((id, slot));
            self.pools[p].budget -= 1;
            posted += 1;
            // Late ones, where they may be missed.
            if !self.ample && self.plan.late_receives && self.service != Service::Iwarp {
                break;
            }
        }
        posted
    }
}
