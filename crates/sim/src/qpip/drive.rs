//! What programs do: open, post receives and sends, close, and meet with mishaps.

use std::sync::Arc;

use quipu_nic::inet::tcp::MILLISECOND as MS;
use quipu_nic::{
    Fault, Key, Payload, QpAttr, QpAttrMask as M, QpState, SendFlags, SendOp, SendWr, Sge, To,
    WcStatus,
};

use super::model::{Farewell, Opening, Posted, Sent, Stage, stream};
use super::{Mishap, Programs};
use crate::world::{LoadEvent, World, WorldEvent};

/// The longest time between two things that a program does.
const LONGEST_TICK_NS: u64 = 50 * MS;

impl Programs {
    /// An end takes the first step to its connection, or the one that is its turn.
    pub(super) fn open(&mut self, world: &mut World, e: usize) {
        let end = &mut self.ends[e];
        if !end.exists || !matches!(end.stage, Stage::Idle | Stage::Opening) {
            return;
        }
        let (host, qp, now) = (end.host, end.qp, world.time());
        world.wake(host);
        let adapter = &mut world.hosts[host].adapter;
        let done = match end.opening {
            Opening::Connects => adapter.tcp_connect(now, qp, end.remote, None, &end.settings),
            Opening::Together { port } => {
                adapter.tcp_connect(now, qp, end.remote, Some(port), &end.settings)
            }
            Opening::Offered => match end.port {
                Some(port) => adapter.tcp_offer(now, self.ports[port].listener, qp),
                None => return,
            },
            Opening::Decides { refusals } => {
                end.stage = Stage::Opening;
                let request = end.port.and_then(|port| self.ports[port].requests.pop_front());
                let Some(request) = request else { return };
                if refusals > 0 {
                    end.opening = Opening::Decides { refusals: refusals - 1 };
                    adapter.tcp_refuse(now, request)
                } else {
                    adapter.tcp_accept(now, request, qp)
                }
            }
        };
        self.ends[e].stage = Stage::Opening;
        if let Some(flow) = world.hosts[host].adapter.tcp_flow(qp) {
            let there = self.ends[self.ends[e].peer].host;
            let from = (flow.local.ip().into(), flow.local.port());
            self.callers.insert((from.0, from.1, there, flow.remote.port()), e);
        }
        world.trace.note(&[61, e as u64]);
        world.trace.line(world.kernel.now(), || format!("end {e} opens: {done:?}"));
        if let Err(fault) = done {
            world.violate(|| format!("end {e} cannot open: {fault}"));
        }
        world.serve(host);
    }

    /// Has an end open, or try again, a little later.
    pub(super) fn open_later(&mut self, world: &mut World, end: usize) {
        let after = 1 + self.rng.below(world.frames.weather.delay_ns * 4);
        world.kernel.after(after, WorldEvent::Load(LoadEvent::Connect { end }));
    }

    /// Schedules the next thing that an end does.
    pub(super) fn tick_later(&mut self, world: &mut World, e: usize) {
        let end = &mut self.ends[e];
        let after = ((1 + self.rng.below(self.plan.tick_ns)) << end.idle.min(20))
            .min(LONGEST_TICK_NS.max(self.plan.tick_ns));
        end.idle += 1;
        world.kernel.after(after, WorldEvent::Load(LoadEvent::Tick { end: e }));
    }

    pub(super) fn tick(&mut self, world: &mut World, e: usize) {
        if !self.ends[e].exists || self.ends[e].stage == Stage::Over {
            return;
        }
        if self.ends[e].may_send() {
            let (host, qp) = (self.ends[e].host, self.ends[e].qp);
            world.wake(host);
            if self.post_some(world, e) > 0 {
                let now = world.time();
                world.hosts[host].adapter.ring_doorbell(now, qp);
                self.ends[e].idle = 0;
            }
            if self.ends[e].ops_left == 0 && self.ends[e].farewell == Farewell::Closes {
                self.close(world, e);
            }
            world.serve(host);
        }
        let end = &self.ends[e];
        if !end.closed && (end.ops_left > 0 || end.farewell == Farewell::Closes) {
            self.tick_later(world, e);
        }
    }

    fn close(&mut self, world: &mut World, e: usize) {
        let (host, qp, now) = (self.ends[e].host, self.ends[e].qp, world.time());
        let done = world.hosts[host].adapter.tcp_close(now, qp);
        world.trace.line(world.kernel.now(), || format!("end {e} closes: {done:?}"));
        match done {
            Ok(()) => self.ends[e].closed = true,
            // It may have failed this very moment.
            Err(Fault::WrongState) if !self.ends[e].causes.is_empty() => {}
            Err(fault) => world.violate(|| format!("end {e} cannot close: {fault}")),
        }
    }

    fn post_some(&mut self, world: &mut World, e: usize) -> usize {
        let count = 1 + self.rng.index(8);
        for done in 0..count {
            let end = &self.ends[e];
            if end.ops_left == 0 || end.sent.len() >= end.send_depth || world.violation.is_some() {
                return done;
            }
            if !self.post_one(world, e) {
                return done;
            }
        }
        count
    }

    /// Posts the next message of an end; whether it could.
    fn post_one(&mut self, world: &mut World, e: usize) -> bool {
        let trap = self.ends[e].trap_at == Some(self.ends[e].ops_left);
        let empty = !self.ends[e].is_message() && self.rng.percent(3);
        let bits = self.rng.below(24);
        let most = self.rng.pick(&[self.max_len, 1 << bits]).clamp(1, self.max_len);
        let len = if empty && !trap { 0 } else { 1 + self.rng.index(most) };
        let bytes: Arc<[u8]> = stream(e, self.ends[e].written, len).into();
        let inline =
            !trap && len <= self.ends[e].inline && self.rng.percent(self.plan.inline_percent);
        let list = if inline { Vec::new() } else { self.source(world, e, &bytes, trap) };
        let payload = if inline { Payload::Inline(&bytes) } else { Payload::Sges(&list) };
        let last = self.ends[e].ops_left == 1;
        let fills = self.ends[e].sent.len() + 1 >= self.ends[e].send_depth;
        // Of the last one the program must hear, and of one at least in a queue that is full.
        let signaled = last || fills || self.rng.percent(self.plan.signaled_percent);
        let mut flags = SendFlags::empty();
        flags.set(SendFlags::SIGNALED, signaled);
        flags.set(SendFlags::INLINE, inline);
        let wr_id = self.new_id();
        let (host, qp) = (self.ends[e].host, self.ends[e].qp);
        let wr = SendWr { wr_id, to: To::Peer, op: SendOp::Send, flags, payload };
        let done = world.hosts[host].adapter.post_send(qp, &wr);
        world.trace.note(&[62, wr_id, len as u64]);
        world.trace.line(world.kernel.now(), || format!("end {e} sends {wr_id}: {len} B {done:?}"));
        match done {
            Ok(()) => {}
            // A queue is full until the completions that say otherwise were polled.
            Err(Fault::QueueFull) => return false,
            Err(fault) => {
                world.violate(|| format!("end {e} cannot post {len} bytes: {fault}"));
                return false;
            }
        }
        if trap {
            self.tally.faults += 1;
            self.cause(e, "a send of memory that is not there");
        }
        self.tally.ops += 1;
        self.tally.bytes += len as u64;
        let end = &mut self.ends[e];
        end.ops_left = if trap { 0 } else { end.ops_left - 1 };
        end.written += len as u64;
        end.boundaries.push_back(end.written);
        end.sent.push_back(Sent { id: wr_id, len, signaled: signaled || trap, trap });
        true
    }

    /// Memory with these bytes, as a list of pieces; of a trap, none of them is there.
    fn source(&mut self, world: &mut World, e: usize, bytes: &Arc<[u8]>, trap: bool) -> Vec<Sge> {
        let slot = self.new_memory(world, self.ends[e].host, bytes.len());
        let mut cuts = [0; 2].map(|_| self.rng.index(bytes.len() + 1));
        cuts.sort_unstable();
        let cuts = if self.rng.percent(50) { &cuts[..] } else { &[] };
        let Some(slot) = self.slots.get_mut(slot) else { return Vec::new() };
        slot.fill(bytes);
        let mut list = slot.list(bytes.len(), cuts);
        if trap {
            list.iter_mut().for_each(|sge| sge.lkey = Key(sge.lkey.0 ^ 0x5a00));
        }
        list
    }

    pub(super) fn refill_and_go_on(&mut self, world: &mut World, e: usize) {
        let end = &self.ends[e];
        if !end.exists || end.stage == Stage::Over {
            return;
        }
        let host = end.host;
        world.wake(host);
        let posted = self.refill(world, e);
        world.serve(host);
        let end = &mut self.ends[e];
        end.refill_idle = if posted > 0 { 0 } else { end.refill_idle + 1 };
        let tick = if self.plan.late_receives { self.plan.tick_ns * 20 } else { self.plan.tick_ns };
        let after = ((1 + self.rng.below(tick)) << end.refill_idle.min(20)).min(LONGEST_TICK_NS);
        world.kernel.after(after, WorldEvent::Load(LoadEvent::Refill { pool: e }));
    }

    /// Posts receives until there are as many as the program wants; how many.
    fn refill(&mut self, world: &mut World, e: usize) -> usize {
        let mut count = 0;
        while self.ends[e].posted.len() < self.ends[e].depth && world.violation.is_none() {
            let trap = (self.plan.trap_percent > 0 && self.rng.percent(1))
                .then(|| self.rng.pick(&[WcStatus::LocLenErr, WcStatus::LocProtErr]));
            let trap =
                trap.filter(|&trap| self.ends[e].is_message() || trap == WcStatus::LocProtErr);
            let room = match (self.ends[e].is_message(), trap) {
                (true, Some(WcStatus::LocLenErr)) => self.rng.index(self.max_len),
                (true, _) => self.max_len + self.rng.pick(&[0, 1, 100]),
                // Not so many that they take more time than everything else.
                (false, _) => (1 + self.rng.index(self.max_len)).max(1_000),
            };
            if !self.post_receive(world, e, room, trap) {
                break;
            }
            count += 1;
        }
        count
    }

    fn post_receive(
        &mut self,
        world: &mut World,
        e: usize,
        room: usize,
        trap: Option<WcStatus>,
    ) -> bool {
        let slot = self.new_memory(world, self.ends[e].host, room);
        let mut cuts = [0; 2].map(|_| self.rng.index(room + 1));
        cuts.sort_unstable();
        let Some(memory) = self.slots.get(slot) else { return false };
        let mut list = memory.list(room, if self.rng.percent(30) { &cuts } else { &[] });
        if trap == Some(WcStatus::LocProtErr) {
            list.iter_mut().for_each(|sge| sge.lkey = Key(sge.lkey.0 ^ 0x5a00));
        }
        let (id, now) = (self.new_id(), world.time());
        let (host, qp) = (self.ends[e].host, self.ends[e].qp);
        let done = world.hosts[host].adapter.post_recv(now, qp, id, &list);
        world
            .trace
            .line(world.kernel.now(), || format!("end {e} receives {id}: {room} B {done:?}"));
        match done {
            Ok(()) => {
                self.ends[e].posted.push_back(Posted { id, slot, room, trap });
                if trap.is_some() {
                    self.tally.faults += 1;
                    self.cause(e, "a receive that cannot take what comes");
                }
                true
            }
            Err(Fault::QueueFull) => false,
            Err(fault) => {
                world.violate(|| format!("end {e} cannot post a receive: {fault}"));
                false
            }
        }
    }

    pub(super) fn mishap(&mut self, world: &mut World, index: usize) {
        let mishap = self.mishaps[index].of(|end| self.latest(end));
        let now = world.time();
        match mishap {
            Mishap::Abort { end: e } | Mishap::ToError { end: e } | Mishap::Destroy { end: e } => {
                let (host, qp) = (self.ends[e].host, self.ends[e].qp);
                let stands = matches!(self.ends[e].stage, Stage::Up | Stage::Opening);
                if !self.ends[e].exists || (matches!(mishap, Mishap::Abort { .. }) && !stands) {
                    return;
                }
                self.note_fault(world, mishap);
                self.cause(e, "a mishap");
                world.wake(host);
                let adapter = &mut world.hosts[host].adapter;
                let done = match mishap {
                    Mishap::Abort { .. } => adapter.tcp_abort(now, qp),
                    Mishap::ToError { .. } => {
                        self.ends[e].stage = Stage::Over;
                        self.stop(world, e)
                    }
                    _ => {
                        self.ends[e].exists = false;
                        adapter.destroy_qp(now, qp)
                    }
                };
                match done {
                    Ok(()) | Err(Fault::WrongState) => {}
                    Err(fault) => world.violate(|| format!("{mishap:?}: {fault}")),
                }
                world.serve(host);
            }
            Mishap::Post { post, how } => self.post_mishap(world, post, how),
            Mishap::Kill { host, silent } => {
                if !world.hosts[host].alive {
                    return;
                }
                self.note_fault(world, mishap);
                self.bury_posts(host);
                for e in 0..self.ends.len() {
                    // Of a connection that is over here the peer may not have heard so: nobody says it again.
                    let end = &self.ends[e];
                    if end.host == host && (end.exists || end.mated) {
                        self.cause(e, "death");
                        self.ends[e].exists = false;
                    }
                }
                if !silent {
                    world.hosts[host].adapter.abort_connections(now);
                    world.transmit_frames(host);
                }
                world.kill(host, silent);
            }
        }
    }

    fn note_fault(&mut self, world: &mut World, mishap: Mishap) {
        self.tally.faults += 1;
        world.trace.line(world.kernel.now(), || format!("{mishap:?}"));
    }

    /// Takes a queue pair to ERR.
    ///
    /// # Errors
    /// What the adapter says.
    pub(super) fn stop(&mut self, world: &mut World, e: usize) -> Result<(), Fault> {
        let (host, qp, now) = (self.ends[e].host, self.ends[e].qp, world.time());
        let attr = QpAttr { state: QpState::Err, port_num: 1, ..QpAttr::default() };
        world.hosts[host].adapter.modify_qp(now, qp, &attr, M::STATE)
    }
}
