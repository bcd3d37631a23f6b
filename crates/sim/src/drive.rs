//! What programs do: connect, post sends of every kind, and ask for what they may not have.

use std::sync::Arc;

use quipu_nic::{
    Access, BindMw, Fault, Payload, QpAttr, QpAttrMask, QpState, SendFlags, SendOp, SendWr, Sge,
    To, WcExtra, WcOpcode, WcStatus,
};

use crate::load::{Load, Use};
use crate::model::{Expected, Piece, Sent, Stage, WindowState, WindowUse};
use crate::plan::{KINDS, Kind};
use crate::rng::pattern;
use crate::world::{LoadEvent, World, WorldEvent};

/// Lengths around which adapters change their ways.
const EDGES: [usize; 22] = [
    0, 1, 2, 3, 4, 7, 8, 63, 64, 95, 96, 97, 1000, 1024, 4096, 8192, 16_384, 64_000, 65_535,
    65_536, 262_144, 1_048_576,
];

/// A request that is ready to be posted.
pub(crate) struct Draft {
    pub op: SendOp,
    pub opcode: WcOpcode,
    /// Source or sink.
    pub pieces: Vec<Piece>,
    /// Payload to be carried inline.
    pub inline: Option<Arc<[u8]>>,
    pub flags: SendFlags,
    pub len: usize,
    pub effect: Option<(usize, usize, Arc<[u8]>)>,
    pub whole: bool,
    pub flushes: Option<(usize, usize, usize)>,
    pub sink: Option<Arc<[u8]>>,
    pub source: Option<(usize, usize)>,
    pub counter: Option<(usize, u64)>,
    pub window: Option<(usize, WindowUse)>,
    /// The receive that it consumes.
    pub message: Option<(WcOpcode, WcExtra, Arc<[u8]>)>,
    pub trap: Option<Vec<WcStatus>>,
    /// A scatter/gather list other than that of the pieces.
    pub sges: Option<Vec<Sge>>,
}

impl Draft {
    pub(crate) fn new(op: SendOp, opcode: WcOpcode) -> Self {
        Self {
            op,
            opcode,
            pieces: Vec::new(),
            inline: None,
            flags: SendFlags::empty(),
            len: 0,
            effect: None,
            whole: false,
            flushes: None,
            sink: None,
            source: None,
            counter: None,
            window: None,
            message: None,
            trap: None,
            sges: None,
        }
    }
}

impl Load {
    /// The next step of an end on its way to RTS, or back to it from SQD.
    pub fn connect_step(&mut self, world: &mut World, e: usize) {
        let end = &self.ends[e];
        let (host, qp, stage, attr) = (end.host, end.qp, end.stage, end.attr);
        if !world.hosts[host].alive || self.teardown || self.ends[e].broken {
            return;
        }
        use QpAttrMask as M;
        let (state, mask, next) = match stage {
            Stage::Init => (
                QpState::Rtr,
                M::AV
                    | M::PATH_MTU
                    | M::DEST_QPN
                    | M::RQ_PSN
                    | M::MAX_DEST_RD_ATOMIC
                    | M::MIN_RNR_TIMER,
                Stage::Rtr,
            ),
            Stage::Rtr => (
                QpState::Rts,
                M::TIMEOUT | M::RETRY_CNT | M::RNR_RETRY | M::SQ_PSN | M::MAX_QP_RD_ATOMIC,
                Stage::Rts,
            ),
            Stage::Sqd => (QpState::Rts, M::empty(), Stage::Rts),
            Stage::Rts | Stage::Gone => return,
        };
        let now = world.time();
        world.wake(host);
        let attr = QpAttr { state, ..attr };
        let done = world.hosts[host].adapter.modify_qp(now, qp, &attr, mask | M::STATE);
        world.trace.note(&[22, e as u64, state as u64]);
        world.trace.line(world.kernel.now(), || format!("end {e} to {state:?}: {done:?}"));
        // A queue pair in error gets no further.
        let goes_on = done.is_ok() && next == Stage::Rtr;
        match done {
            Ok(()) => {
                self.ends[e].stage = next;
                self.ends[e].sq.iter_mut().for_each(|sent| sent.while_drained = false);
            }
            // It may have failed meanwhile, which its completions will tell.
            Err(Fault::Transition(_)) if !self.pairs[self.ends[e].pair].causes.is_empty() => {}
            Err(Fault::Transition(_)) => {
                self.ends[e].collateral.get_or_insert(format!("cannot go to {state:?}"));
            }
            Err(fault) => world.violate(|| format!("end {e}: {state:?} is refused: {fault}")),
        }
        world.serve(host);
        if goes_on {
            let after = self.rng.below(self.plan.tick_ns * 2 + 1);
            world.kernel.after(after, WorldEvent::Load(LoadEvent::Connect { end: e }));
        }
    }

    /// Posts some requests, and rings the doorbell after all or after each.
    pub fn post_sends(&mut self, world: &mut World, e: usize) {
        let count = 1 + self.rng.index(8);
        let each = self.rng.percent(50);
        let (host, qp) = (self.ends[e].host, self.ends[e].qp);
        let mut posted = 0;
        for _ in 0..count {
            let end = &self.ends[e];
            if end.ops_left == 0 || end.sq.len() >= end.cap.max_send_wr as usize {
                break;
            }
            let trap_due = end.trap_at.is_some_and(|at| end.ops_left <= at);
            let draft = if trap_due { self.draft_trap(world, e) } else { self.draft(world, e) };
            self.ends[e].ops_left -= 1;
            let Some(draft) = draft else { continue };
            posted += 1;
            if !self.post(world, e, draft) {
                return;
            }
            if each {
                let now = world.time();
                world.hosts[host].adapter.ring_doorbell(now, qp);
            }
        }
        if posted > 0 && !each {
            let now = world.time();
            world.hosts[host].adapter.ring_doorbell(now, qp);
        }
        self.close_signal_gap(world, e);
    }

    /// If the last request is posted and not signalled, posts one that is, so that the end is seen.
    fn close_signal_gap(&mut self, world: &mut World, e: usize) {
        let end = &self.ends[e];
        let unseen = end.sq.back().is_some_and(|sent| !sent.signaled);
        if end.ops_left > 0 || !unseen || end.sq.len() >= end.cap.max_send_wr as usize {
            return;
        }
        let (host, qp) = (end.host, end.qp);
        let mut draft = self.draft_write(world, e, 0, None);
        draft.flags |= SendFlags::SIGNALED;
        if self.post(world, e, draft) {
            let now = world.time();
            world.hosts[host].adapter.ring_doorbell(now, qp);
        }
    }

    /// Posts a request and writes down what must come of it; `false` if the run is over.
    fn post(&mut self, world: &mut World, e: usize, mut draft: Draft) -> bool {
        let id = self.new_id();
        let end = &self.ends[e];
        let (host, qp, peer) = (end.host, end.qp, end.peer);
        let last = end.ops_left == 0 || end.sq.len() + 1 >= end.cap.max_send_wr as usize;
        if last || self.rng.percent(self.plan.signaled_percent) {
            draft.flags |= SendFlags::SIGNALED;
        }
        if self.rng.percent(self.plan.fence_percent) {
            draft.flags |= SendFlags::FENCE;
        }
        let solicited = self.rng.percent(self.plan.solicited_percent);
        if solicited && draft.message.is_some() {
            draft.flags |= SendFlags::SOLICITED;
        }
        let sges = match draft.sges.take() {
            Some(sges) => sges,
            None => self.sges(&draft.pieces),
        };
        let payload = match &draft.inline {
            Some(bytes) => Payload::Inline(bytes),
            None => Payload::Sges(&sges),
        };
        let wr = SendWr { wr_id: id, to: To::Peer, op: draft.op, flags: draft.flags, payload };
        world.trace.note(&[23, e as u64, id, draft.opcode as u64, draft.len as u64]);
        world.trace.line(world.kernel.now(), || {
            let (op, flags, sges) = (draft.op, draft.flags.bits(), sges.len());
            let trap = &draft.trap;
            format!(
                "end {e} posts {id}: {op:x?} {} B flags {flags} sges {sges} trap {trap:?}",
                draft.len
            )
        });
        let now = world.time();
        let adapter = &mut world.hosts[host].adapter;
        // As programs do that post one by one.
        let rung = id.is_multiple_of(2)
            && (adapter.post_at_once(now, qp, &wr) || adapter.post_to_stream(qp, &wr));
        if !rung && let Err(fault) = adapter.post_send(qp, &wr) {
            let len = self.ends[e].sq.len();
            world.violate(|| format!("end {e}: request {id} refused with {len} posted: {fault}"));
            return false;
        }
        world.counters.count(&draft.op);
        self.ops += 1;
        self.ends[e].idle = 0;
        self.bytes += draft.len as u64;
        self.bytes_left = self.bytes_left.saturating_sub(draft.len as u64);
        if let Some((window, what)) = draft.window {
            self.use_window(window, what);
        }
        if draft.trap.is_some() {
            self.ends[e].ops_left = self.ends[e].ops_left.min(5);
        }
        let end = &mut self.ends[e];
        let signaled = end.sig_all || draft.flags.contains(SendFlags::SIGNALED);
        let sink = draft.sink.map(|bytes| (draft.pieces.clone(), bytes));
        if draft.effect.is_some() {
            // It may overtake the read: what that brings is not known.
            end.last_read = None;
        }
        if let (SendOp::Read { .. }, Some(sink)) = (&draft.op, &sink) {
            end.last_read = Some(sink.clone());
        }
        end.sq.push_back(Sent {
            id,
            opcode: draft.opcode,
            len: draft.len,
            signaled,
            fenced: draft.flags.contains(SendFlags::FENCE),
            effect: draft.effect,
            whole: draft.whole,
            flushes: draft.flushes,
            source: draft.source,
            sink,
            counter: draft.counter,
            trap: draft.trap,
            window: draft.window,
            while_drained: end.stage == Stage::Sqd,
        });
        if let Some((opcode, extra, payload)) = draft.message {
            let byte_len = draft.len;
            let solicited = draft.flags.contains(SendFlags::SOLICITED);
            self.expect_message(peer, Expected { id, opcode, extra, byte_len, payload, solicited });
        }
        true
    }

    fn use_window(&mut self, window: usize, what: WindowUse) {
        let window = &mut self.windows[window];
        match what {
            WindowUse::Bind => window.state = WindowState::Binding,
            WindowUse::Invalidate => window.state = WindowState::Ending,
            WindowUse::Access => window.users += 1,
        }
    }

    /// A length up to `most`, often one at which something changes.
    pub(crate) fn draw_len(&mut self, most: usize) -> usize {
        let most = most.min(self.bytes_left as usize);
        match self.rng.below(4) {
            0 | 1 => {
                let edge = self.rng.pick(&EDGES) + self.rng.index(3);
                edge.saturating_sub(1).min(most)
            }
            2 => self.rng.index(most.min(300) + 1),
            _ => self.rng.index(most + 1),
        }
    }

    /// Draws a request of any kind; `None` if the kind is not possible now.
    fn draft(&mut self, world: &mut World, e: usize) -> Option<Draft> {
        let kind = KINDS[self.rng.weighted(&self.plan.weights)];
        match kind {
            Kind::Send | Kind::SendImm => {
                let len = self.draw_len(self.ends[e].max_send);
                Some(self.draft_send(world, e, len, kind == Kind::SendImm))
            }
            Kind::SendInv => self.draft_send_inv(world, e),
            Kind::Write | Kind::WriteImm => {
                let imm = (kind == Kind::WriteImm).then(|| self.rng.next() as u32);
                let len = self.draw_len(self.plan.max_len);
                Some(self.draft_write(world, e, len, imm))
            }
            Kind::Read => Some(self.draft_read(world, e)),
            Kind::CompareSwap | Kind::FetchAdd => {
                self.draft_atomic(world, e, kind == Kind::FetchAdd)
            }
            Kind::SharedAdd => self.draft_shared_add(world, e),
            Kind::LocalInv => self.draft_local_inv(e),
            Kind::Bind => self.draft_bind(e),
            Kind::FencedSend => self.draft_fenced_send(e),
            Kind::AtomicWrite => self.draft_atomic_write(world, e),
            Kind::Flush => Some(self.draft_flush(e)),
        }
    }

    /// Puts payload into a request: inline or in registered memory.
    pub(crate) fn load_payload(
        &mut self,
        world: &mut World,
        e: usize,
        draft: &mut Draft,
        bytes: &Arc<[u8]>,
    ) {
        draft.len = bytes.len();
        let end = &self.ends[e];
        let (inline, sges) = (end.cap.max_inline_data as usize, end.cap.max_send_sge as usize);
        if bytes.len() <= inline && self.rng.percent(self.plan.inline_percent) {
            draft.inline = Some(bytes.clone());
            return;
        }
        draft.pieces = self.allocate_pieces(world, e, Use::Source, bytes.len(), sges);
        let pieces = std::mem::take(&mut draft.pieces);
        self.fill(&pieces, bytes);
        draft.pieces = pieces;
    }

    pub(crate) fn draft_send(
        &mut self,
        world: &mut World,
        e: usize,
        len: usize,
        imm: bool,
    ) -> Draft {
        let bytes: Arc<[u8]> = pattern(self.next_id, 0, len).into();
        let imm = imm.then(|| self.rng.next() as u32);
        let op = imm.map_or(SendOp::Send, SendOp::SendImm);
        let mut draft = Draft::new(op, WcOpcode::Send);
        self.load_payload(world, e, &mut draft, &bytes);
        let extra = imm.map_or(WcExtra::None, WcExtra::Imm);
        draft.message = Some((WcOpcode::Recv, extra, bytes));
        draft
    }

    fn draft_send_inv(&mut self, world: &mut World, e: usize) -> Option<Draft> {
        let peer = self.ends[e].peer;
        let bound = |index: &usize| {
            let window = &self.windows[*index];
            window.owner == peer && window.state == WindowState::Bound
        };
        let window = (0..self.windows.len()).find(bound)?;
        let key = self.windows[window].key;
        let len = self.draw_len(self.ends[e].max_send);
        let mut draft = self.draft_send(world, e, len, false);
        draft.op = SendOp::SendInv(key);
        if self.windows[window].users > 0 {
            // A read through the window must be over before (IBA 10.8.3.3).
            draft.flags |= SendFlags::FENCE;
        }
        draft.window = Some((window, WindowUse::Invalidate));
        if let Some((_, extra, _)) = &mut draft.message {
            *extra = WcExtra::Invalidated(key);
        }
        Some(draft)
    }

    /// A place of `len` bytes, or less, in the peer's memory: arena, place in its segment, length, address,
    /// key and the window that it was reached through.
    pub(crate) fn draw_place(
        &mut self,
        e: usize,
        len: usize,
        align: usize,
    ) -> (usize, usize, usize, u64, u32, Option<usize>) {
        let peer = self.ends[e].peer;
        let arena = self.ends[peer].target;
        let usable = |index: &usize| {
            let window = &self.windows[*index];
            window.owner == peer && window.state == WindowState::Bound && window.len >= 16
        };
        let through = (0..self.windows.len()).find(usable).filter(|_| self.rng.percent(50));
        let (start, room) = match through {
            Some(window) => (self.windows[window].at, self.windows[window].len),
            None => (self.arenas[arena].start, self.arenas[arena].len),
        };
        let len = len.min(room);
        let at = (start + self.rng.index(room - len + 1)).next_multiple_of(align);
        // Alignment may have moved it out again.
        let at = if at + len > start + room { start.next_multiple_of(align) } else { at };
        let zero_based = through.is_some_and(|window| self.windows[window].zero_based);
        let addr = if zero_based { (at - start) as u64 } else { self.arenas[arena].addr(at) };
        let key = through.map_or(self.arenas[arena].key, |window| self.windows[window].key);
        (arena, at, len, addr, key, through)
    }

    pub(crate) fn draft_write(
        &mut self,
        world: &mut World,
        e: usize,
        len: usize,
        imm: Option<u32>,
    ) -> Draft {
        let (arena, at, len, addr, rkey, through) = self.draw_place(e, len, 1);
        let bytes: Arc<[u8]> = pattern(self.next_id, 0, len).into();
        let op = match imm {
            Some(imm) => SendOp::WriteImm { addr, rkey, imm },
            None => SendOp::Write { addr, rkey },
        };
        let mut draft = Draft::new(op, WcOpcode::RdmaWrite);
        self.load_payload(world, e, &mut draft, &bytes);
        draft.effect = Some((arena, at, bytes));
        draft.window = through.map(|window| (window, WindowUse::Access));
        draft.message =
            imm.map(|imm| (WcOpcode::RecvRdmaWithImm, WcExtra::Imm(imm), Self::nothing()));
        draft
    }

    fn draft_read(&mut self, world: &mut World, e: usize) -> Draft {
        let len = self.draw_len(self.plan.max_len);
        let (arena, at, len, addr, rkey, through) = self.draw_place(e, len, 1);
        let bytes = self.foresee(e, arena, at, len);
        let mut draft = Draft::new(SendOp::Read { addr, rkey }, WcOpcode::RdmaRead);
        draft.len = len;
        let most = self.ends[e].cap.max_send_sge as usize;
        draft.pieces = self.allocate_pieces(world, e, Use::Sink, len, most);
        draft.sink = Some(bytes.into());
        draft.source = Some((arena, at));
        draft.window = through.map(|window| (window, WindowUse::Access));
        draft
    }

    fn word(bytes: &[u8]) -> u64 {
        bytes.try_into().map(u64::from_ne_bytes).unwrap_or_default()
    }

    fn draft_atomic(&mut self, world: &mut World, e: usize, add: bool) -> Option<Draft> {
        let (arena, at, len, addr, rkey, through) = self.draw_place(e, 8, 8);
        // A window that is not aligned cannot be used for atomics everywhere.
        if len < 8 || !addr.is_multiple_of(8) || !at.is_multiple_of(8) {
            return None;
        }
        if let Some(window) = through
            && at + 8 > self.windows[window].at + self.windows[window].len
        {
            return None;
        }
        let before = self.foresee(e, arena, at, 8);
        let was = Self::word(&before);
        let (value, compare) = (self.rng.next(), if self.rng.percent(60) { was } else { 1 });
        let (op, after) = if add {
            (SendOp::FetchAdd { addr, rkey, add: value }, was.wrapping_add(value))
        } else {
            let op = SendOp::CompareSwap { addr, rkey, compare, swap: value };
            (op, if compare == was { value } else { was })
        };
        let opcode = if add { WcOpcode::FetchAdd } else { WcOpcode::CompSwap };
        let mut draft = Draft::new(op, opcode);
        self.load_sink(world, e, &mut draft);
        draft.sink = Some(before.into());
        draft.effect = Some((arena, at, after.to_ne_bytes().as_slice().into()));
        draft.whole = true;
        draft.window = through.map(|window| (window, WindowUse::Access));
        Some(draft)
    }

    /// Gives an atomic the 8 bytes that it puts the original into.
    pub(crate) fn load_sink(&mut self, world: &mut World, e: usize, draft: &mut Draft) {
        draft.len = 8;
        let (host, pd_index) = (self.ends[e].host, self.ends[e].pd_index);
        let align = self.rng.pick(&[1, 8]);
        draft.pieces = vec![self.allocate(world, host, pd_index, Use::Sink, 8, align)];
    }

    fn draft_shared_add(&mut self, world: &mut World, e: usize) -> Option<Draft> {
        let peer = self.ends[e].peer;
        let (host, pd_index) = (self.ends[peer].host, self.ends[peer].pd_index);
        let counter = host;
        if pd_index != 0 || counter >= self.counters.len() {
            return None;
        }
        let (arena, at) = (self.counters[counter].arena, self.counters[counter].at);
        let (addr, rkey) = (self.arenas[arena].addr(at), self.arenas[arena].key);
        let add = self.rng.next();
        let mut draft = Draft::new(SendOp::FetchAdd { addr, rkey, add }, WcOpcode::FetchAdd);
        self.load_sink(world, e, &mut draft);
        draft.counter = Some((counter, add));
        draft.sink = Some(Self::nothing());
        Some(draft)
    }

    fn draft_local_inv(&mut self, e: usize) -> Option<Draft> {
        let idle = |index: &usize| {
            let window = &self.windows[*index];
            window.owner == e && window.state == WindowState::Bound && window.users == 0
        };
        let window = (0..self.windows.len()).find(idle)?;
        let key = self.windows[window].key;
        let mut draft = Draft::new(SendOp::LocalInv { key }, WcOpcode::LocalInv);
        draft.window = Some((window, WindowUse::Invalidate));
        Some(draft)
    }

    fn draft_bind(&mut self, e: usize) -> Option<Draft> {
        let free = |index: &usize| {
            let window = &self.windows[*index];
            window.owner == e && window.state == WindowState::Free
        };
        let window = (0..self.windows.len()).find(free)?;
        let target = &self.arenas[self.ends[e].target];
        let (start, room, mr) = (target.start, target.len, target.mr);
        let len = 1 + self.rng.index(room);
        let at = start + self.rng.index(room - len + 1);
        let zero_based = self.rng.percent(30);
        let access = Access::REMOTE | if zero_based { Access::ZERO_BASED } else { Access::empty() };
        let addr = self.arenas[self.ends[e].target].addr(at);
        let state = &mut self.windows[window];
        state.key = quipu_nic::Key(state.key).next_tag().0;
        (state.at, state.len, state.zero_based) = (at, len, zero_based);
        let bind = BindMw { mw: state.mw, rkey: state.key, mr, addr, len: len as u64, access };
        let mut draft = Draft::new(SendOp::BindMw(bind), WcOpcode::BindMw);
        draft.window = Some((window, WindowUse::Bind));
        Some(draft)
    }

    /// Sends on what the last read brings, without waiting for it: the fence makes that right.
    fn draft_fenced_send(&mut self, e: usize) -> Option<Draft> {
        let (pieces, bytes) = self.ends[e].last_read.take()?;
        if bytes.len() > self.ends[e].max_send {
            return None;
        }
        let mut draft = Draft::new(SendOp::Send, WcOpcode::Send);
        draft.len = bytes.len();
        draft.pieces = pieces;
        draft.flags = SendFlags::FENCE;
        draft.message = Some((WcOpcode::Recv, WcExtra::None, bytes));
        Some(draft)
    }
}
