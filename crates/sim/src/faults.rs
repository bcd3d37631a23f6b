//! Faults of programs and processes: traps that one request falls into, and mishaps in mid-flight.

use std::net::SocketAddr;
use std::sync::Arc;

use quipu_nic::{Access, BindMw, Key, QpAttr, QpAttrMask, QpState, SendOp, WcOpcode, WcStatus};

use crate::drive::Draft;
use crate::load::{Load, Use};
use crate::model::{Stage, WindowState};
use crate::network;
use crate::placement::global;
use crate::plan::{Mishap, Trap};
use crate::rng::pattern;
use crate::world::World;

impl Load {
    /// A request that must fail in a known way, with a cause noted for what follows at the peer.
    pub(crate) fn draft_trap(&mut self, world: &mut World, e: usize) -> Option<Draft> {
        self.ends[e].trap_at = None;
        let trap = self.draw_trap();
        let (pair, peer) = (self.ends[e].pair, self.ends[e].peer);
        if trap == Trap::BadReceive {
            self.bad_receive = Some(peer);
            return None;
        }
        if trap == Trap::NoQpRight {
            return self.trap_qp_right(world, e);
        }
        let draft = self.trap_request(world, e, trap)?;
        world.trace.note(&[24, e as u64, trap as u64]);
        self.faults_done += 1;
        if self.pairs[pair].causes.is_empty() {
            self.pairs[pair].trap = Some(e);
        }
        self.cause(pair, format!("{trap:?} at end {e}"));
        match trap {
            Trap::TooLong => self.pairs[pair].recv_trap.push(WcStatus::LocLenErr),
            Trap::BadInvalidate => self.pairs[pair].recv_trap.push(WcStatus::LocAccessErr),
            _ => {}
        }
        Some(draft)
    }

    fn trap_request(&mut self, world: &mut World, e: usize, trap: Trap) -> Option<Draft> {
        use WcStatus as S;
        let peer = self.ends[e].peer;
        let target = &self.arenas[self.ends[peer].target];
        let (start, room, key) = (target.start, target.len, target.key);
        let addr = |at: usize| target.addr(at);
        let len = 1 + self.rng.index(300);
        let (first, behind) = (addr(start), addr(start + room));
        let mut draft = match trap {
            Trap::WrongKey => {
                let rkey = key ^ (1 << self.rng.below(32));
                self.remote_access(world, e, first, rkey, len.min(room))
            }
            Trap::OutOfBounds => {
                let (at, len) = match self.rng.below(3) {
                    0 => (behind, len),
                    1 => (first.wrapping_sub(1), len),
                    _ => (behind.wrapping_sub(1), len + 1),
                };
                self.remote_access(world, e, at, key, len)
            }
            Trap::NoRight => {
                let (host, pd_index) = (self.ends[peer].host, self.ends[peer].pd_index);
                let arena = self.new_arena(world, host, pd_index, 64, Access::LOCAL_WRITE);
                let (at, key) =
                    (self.arenas[arena].addr(self.arenas[arena].start), self.arenas[arena].key);
                self.remote_access(world, e, at, key, len.min(64))
            }
            Trap::Misaligned => {
                let op = SendOp::FetchAdd { addr: first + 4, rkey: key, add: 1 };
                let mut draft = Draft::new(op, WcOpcode::FetchAdd);
                self.load_sink(world, e, &mut draft);
                draft.trap = Some(vec![S::RemAccessErr, S::RemInvReqErr]);
                draft
            }
            Trap::TooLong => self.trap_too_long(world, e)?,
            Trap::BadLocalKey => {
                let mut draft = self.draft_send(world, e, 8, false);
                let piece = self.allocate_pieces(world, e, Use::Source, 8, 1);
                let mut sges = self.sges(&piece);
                sges.iter_mut().for_each(|sge| sge.lkey = Key(sge.lkey.0 ^ 0x100));
                if sges.is_empty() {
                    return None;
                }
                (draft.inline, draft.message, draft.sges) = (None, None, Some(sges));
                draft.trap = Some(vec![S::LocProtErr]);
                draft
            }
            Trap::ReadOnlySink => {
                let op = SendOp::Read { addr: first, rkey: key };
                let mut draft = Draft::new(op, WcOpcode::RdmaRead);
                draft.len = 8;
                draft.pieces = self.allocate_pieces(world, e, Use::Source, 8, 1);
                draft.trap = Some(vec![S::LocProtErr]);
                draft
            }
            Trap::BadInvalidate => {
                let mut draft = self.draft_send(world, e, 0, false);
                draft.op = SendOp::SendInv(key ^ 0x0100);
                draft.trap = Some(vec![S::RemAccessErr]);
                draft
            }
            Trap::BadLocalInvalidate => {
                let key = key ^ 0x0100;
                let mut draft = Draft::new(SendOp::LocalInv { key }, WcOpcode::LocalInv);
                draft.trap = Some(vec![S::MwBindErr]);
                draft
            }
            Trap::BadBind => self.trap_bind(e)?,
            Trap::BadReceive | Trap::NoQpRight => return None,
        };
        if draft.trap.is_none() {
            draft.trap = Some(vec![S::RemAccessErr]);
        }
        Some(draft)
    }

    /// A request of any kind that goes to a place where it must be refused.
    fn remote_access(
        &mut self,
        world: &mut World,
        e: usize,
        addr: u64,
        rkey: u32,
        len: usize,
    ) -> Draft {
        let bytes: Arc<[u8]> = pattern(self.next_id, 0, len).into();
        match self.rng.below(5) {
            0 => {
                let mut draft = Draft::new(SendOp::Read { addr, rkey }, WcOpcode::RdmaRead);
                draft.len = len;
                let most = self.ends[e].cap.max_send_sge as usize;
                while draft.pieces.is_empty() {
                    draft.pieces = self.allocate_pieces(world, e, Use::Sink, len, most);
                }
                draft
            }
            1 if len >= 8 && addr.is_multiple_of(8) => {
                let op = SendOp::FetchAdd { addr, rkey, add: 1 };
                let mut draft = Draft::new(op, WcOpcode::FetchAdd);
                self.load_sink(world, e, &mut draft);
                draft
            }
            2 if len >= 8 && addr.is_multiple_of(8) => {
                let op = SendOp::AtomicWrite { addr, rkey };
                let mut draft = Draft::new(op, WcOpcode::AtomicWrite);
                self.load_word(world, e, &mut draft, &bytes[..8].into());
                draft
            }
            3 => Draft::new(SendOp::Flush(global(addr, rkey, len)), WcOpcode::Flush),
            _ => {
                let mut draft = Draft::new(SendOp::Write { addr, rkey }, WcOpcode::RdmaWrite);
                self.load_payload(world, e, &mut draft, &bytes);
                draft
            }
        }
    }

    fn trap_too_long(&mut self, world: &mut World, e: usize) -> Option<Draft> {
        let peer = self.ends[e].peer;
        if self.ends[peer].srq.is_some() {
            return None;
        }
        // Receives have up to 40 bytes more than asked for, unless nothing was.
        let room = self.ends[peer].recv_room;
        let len = if room == 0 { 1 } else { room + 41 };
        let mut draft = self.draft_send(world, e, len, self.rng.clone().percent(50));
        draft.message = None;
        draft.trap = Some(vec![WcStatus::RemInvReqErr]);
        // It consumes a receive all the same, with an error.
        self.ends[peer].messages_in += 1;
        let end = &mut self.ends[peer];
        end.starved |= end.messages_in > end.recvs_posted;
        Some(draft)
    }

    fn trap_bind(&mut self, e: usize) -> Option<Draft> {
        let free = |index: &usize| {
            let window = &self.windows[*index];
            window.owner == e && window.state == WindowState::Free
        };
        let window = (0..self.windows.len()).find(free)?;
        let target = &self.arenas[self.ends[e].target];
        let bind = BindMw {
            mw: self.windows[window].mw,
            rkey: Key(self.windows[window].key).next_tag().0,
            mr: target.mr,
            addr: target.addr(target.start),
            len: target.len as u64 + 1,
            access: Access::REMOTE,
        };
        let mut draft = Draft::new(SendOp::BindMw(bind), WcOpcode::BindMw);
        draft.trap = Some(vec![WcStatus::MwBindErr]);
        Some(draft)
    }

    /// The peer takes a right away from its queue pair; what is in progress may be refused then.
    fn trap_qp_right(&mut self, world: &mut World, e: usize) -> Option<Draft> {
        let (peer, pair) = (self.ends[e].peer, self.ends[e].pair);
        let (host, qp) = (self.ends[peer].host, self.ends[peer].qp);
        if self.ends[peer].stage != Stage::Rts || !world.hosts[host].alive {
            return None;
        }
        let now = world.time();
        let attr = QpAttr { access: Access::LOCAL_WRITE, ..self.ends[peer].attr };
        world.wake(host);
        let done = world.hosts[host].adapter.modify_qp(now, qp, &attr, QpAttrMask::ACCESS_FLAGS);
        if done.is_ok() {
            self.faults_done += 1;
            self.cause(pair, format!("end {peer} grants nothing any more"));
            self.pairs[pair].explains.extend([WcStatus::RemInvReqErr, WcStatus::RemAccessErr]);
        }
        world.serve(host);
        None
    }

    /// A mishap of the plan.
    pub fn fault(&mut self, world: &mut World, index: usize) {
        if self.teardown {
            return;
        }
        let mishap = self.mishaps[index];
        world.trace.note(&[25, index as u64]);
        world.trace.line(world.kernel.now(), || format!("mishap {mishap:?}"));
        self.faults_done += 1;
        match mishap {
            Mishap::ToError { end } => self.leave(world, end, QpState::Err),
            Mishap::Reset { end } => self.leave(world, end, QpState::Reset),
            Mishap::Destroy { end } => self.destroy(world, end),
            Mishap::Drain { end } => self.drain(world, end),
            Mishap::Deregister { end } => self.deregister(world, end),
            Mishap::Reconnect { pair } => self.reconnect(world, pair),
            Mishap::Deny { host } => self.deny(world, host),
            Mishap::Kill { host, silent } => self.kill(world, host, silent),
            Mishap::Flood { host, count } => self.flood(world, host, count),
        }
    }

    fn usable(&self, world: &World, e: usize) -> bool {
        world.hosts[self.ends[e].host].alive && self.ends[e].exists
    }

    /// A program takes its queue pair to ERR or RESET in the middle of everything.
    fn leave(&mut self, world: &mut World, e: usize, state: QpState) {
        if !self.usable(world, e) {
            return;
        }
        self.cause(self.ends[e].pair, format!("end {e} went to {state:?}"));
        self.move_to(world, e, state);
        if state == QpState::Reset {
            self.forget(e);
        }
    }

    /// Takes a queue pair to ERR or RESET.
    pub fn move_to(&mut self, world: &mut World, e: usize, state: QpState) {
        let (host, qp) = (self.ends[e].host, self.ends[e].qp);
        let now = world.time();
        world.wake(host);
        let attr = QpAttr { state, ..QpAttr::default() };
        if let Err(fault) = world.hosts[host].adapter.modify_qp(now, qp, &attr, QpAttrMask::STATE) {
            world.violate(|| format!("end {e}: {state:?} is refused: {fault}"));
        }
        world.serve(host);
    }

    fn destroy(&mut self, world: &mut World, e: usize) {
        if !self.usable(world, e) {
            return;
        }
        self.cause(self.ends[e].pair, format!("end {e} was destroyed"));
        let (host, qp) = (self.ends[e].host, self.ends[e].qp);
        let now = world.time();
        world.wake(host);
        if let Err(fault) = world.hosts[host].adapter.destroy_qp(now, qp) {
            world.violate(|| format!("end {e} cannot be destroyed: {fault}"));
        }
        self.ends[e].exists = false;
        self.forget(e);
        world.serve(host);
    }

    /// Nothing more will be known of an end: what it had posted may have been executed or not.
    pub fn forget(&mut self, e: usize) {
        while let Some(sent) = self.ends[e].sq.pop_front() {
            self.lost_request(e, &sent);
        }
        while let Some(recv) = self.ends[e].rq.pop_front() {
            self.lost_receive(&recv);
        }
        if let Some(index) = self.ends[e].srq {
            self.srqs[index].lost += self.ends[e].inbound.len();
            for end in self.ends.iter_mut().filter(|end| end.srq == Some(index)) {
                end.starved = true;
            }
        }
        let end = &mut self.ends[e];
        end.stage = Stage::Gone;
        end.ops_left = 0;
        end.drain_owed = false;
        end.inbound.clear();
    }

    /// A program stops its send queue; it goes on some time after the queue says that it has drained.
    fn drain(&mut self, world: &mut World, e: usize) {
        if !self.usable(world, e) || self.ends[e].stage != Stage::Rts {
            return;
        }
        let (host, qp) = (self.ends[e].host, self.ends[e].qp);
        let now = world.time();
        world.wake(host);
        let attr = QpAttr { state: QpState::Sqd, en_sqd_async_notify: true, ..self.ends[e].attr };
        let mask = QpAttrMask::STATE | QpAttrMask::EN_SQD_ASYNC_NOTIFY;
        let done = world.hosts[host].adapter.modify_qp(now, qp, &attr, mask);
        if done.is_ok() {
            let end = &mut self.ends[e];
            (end.stage, end.drain_owed, end.drain_seen) = (Stage::Sqd, true, false);
        }
        world.serve(host);
    }

    fn deregister(&mut self, world: &mut World, e: usize) {
        if !self.usable(world, e) {
            return;
        }
        let (host, target, pair) = (self.ends[e].host, self.ends[e].target, self.ends[e].pair);
        world.wake(host);
        // Refused while windows are bound to it.
        let now = world.time();
        if world.hosts[host].adapter.dereg_mr(now, self.arenas[target].mr).is_ok() {
            self.cause(pair, format!("the target of end {e} was deregistered"));
            self.pairs[pair].explains.extend([
                WcStatus::RemAccessErr,
                WcStatus::RemOpErr,
                WcStatus::MwBindErr,
            ]);
        }
        world.serve(host);
    }

    /// Access to the memory of an engine fails from now on; what is in the middle of using it fails too.
    fn deny(&mut self, world: &mut World, host: usize) {
        let machine = world.hosts[host].address.ip();
        for e in 0..self.ends.len() {
            let (pair, peer) = (self.ends[e].pair, self.ends[e].peer);
            let together = world.hosts[self.ends[e].host].address.ip() == machine
                && world.hosts[self.ends[peer].host].address.ip() == machine;
            if together {
                self.cause(pair, format!("access to host {host} is denied"));
                self.pairs[pair].explains.push(WcStatus::RemOpErr);
                self.pairs[pair].recv_trap.push(WcStatus::LocQpOpErr);
            }
        }
        self.denied = true;
        let space = &world.hosts[host].space;
        space.lock().unwrap_or_else(std::sync::PoisonError::into_inner).deny();
    }

    fn kill(&mut self, world: &mut World, host: usize, silent: bool) {
        if !world.hosts[host].alive || world.hosts.len() < 2 {
            return;
        }
        for e in 0..self.ends.len() {
            let (pair, peer) = (self.ends[e].pair, self.ends[e].peer);
            if self.ends[e].host == host || self.ends[peer].host == host {
                self.cause(pair, format!("host {host} died"));
                // Same-host peers may find its memory out of reach before they learn why.
                self.pairs[pair].explains.push(WcStatus::RemOpErr);
                self.pairs[pair].recv_trap.push(WcStatus::LocQpOpErr);
            }
            if self.ends[e].host == host {
                self.forget(e);
                self.ends[e].exists = false;
            }
        }
        world.kill(host, silent);
    }

    /// Strangers connect; some say nothing, some say nonsense.
    fn flood(&mut self, world: &mut World, h: usize, count: u32) {
        if !world.hosts[h].alive {
            return;
        }
        world.wake(h);
        for _ in 0..count {
            let now = world.time();
            let peer: SocketAddr = network::nowhere();
            let Ok(conn) = world.hosts[h].adapter.handle_accepted(now, peer) else { continue };
            world.strangers.insert((h, conn));
            let mut bytes = pattern(self.rng.next(), 0, self.rng.clone().index(200));
            if self.rng.percent(50) {
                let hello = b"MPA ID Req Frame\x40\x01\x00\x44";
                let len = hello.len().min(bytes.len());
                bytes[..len].copy_from_slice(&hello[..len]);
            }
            let used = world.hosts[h].adapter.handle_stream(now, conn, &bytes);
            if used > bytes.len() {
                world.violate(|| format!("{used} of {} bytes used", bytes.len()));
            }
        }
        world.serve(h);
    }
}
