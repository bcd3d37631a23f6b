//! The checkers. What holds for each service:
//!
//! | service | a request | a message |
//! |---|---|---|
//! | datagrams | always succeeds, but for memory that it may not use | arrives whole, at most as often as the network brings it, or never |
//! | unreliable connection | the same | arrives whole, once, in order, or never |
//! | extended reliable connection | succeeds once the peer has executed it | arrives whole, once, in order |
//! | plain iWARP | succeeds once it is handed to the stream | arrives whole, once, in order, up to the end of the stream |

use quipu_nic::{
    AsyncEvent, Completion, Event, QpAttrMask as M, QpState, QpType, StreamChange, WcExtra,
    WcOpcode, WcStatus,
};

use super::Services;
use super::model::{Contents, Sent, Stage};
use super::setup::ROUTE;
use crate::load::LONGEST_TICK_NS;
use crate::options::Service;
use crate::world::{LoadEvent, World, WorldEvent};

impl Services {
    pub(super) fn poll_later(&mut self, world: &mut World, cq: usize) {
        let queue = &self.queues[cq];
        let after = (1 + self.rng.below(queue.poll_ns)) << queue.idle.min(20);
        let after = after.min(LONGEST_TICK_NS);
        world.kernel.after(after, WorldEvent::Load(LoadEvent::Poll { cq }));
    }

    /// A program looks at a completion queue.
    pub(super) fn poll(&mut self, world: &mut World, cq: usize) {
        let host = self.queues[cq].host;
        if !world.hosts[host].alive || self.teardown {
            return;
        }
        world.wake(host);
        let first = world.look_at(host, self.queues[cq].id);
        if let Some(done) = &first {
            self.completion(world, host, cq, done);
        }
        let taken = usize::from(first.is_some()) + self.take_completions(world, cq);
        self.queues[cq].idle = if taken > 0 { 0 } else { self.queues[cq].idle + 1 };
        self.poll_later(world, cq);
        world.serve(host);
    }

    /// Takes what a completion queue has, up to a batch; how many.
    pub(super) fn take_completions(&mut self, world: &mut World, cq: usize) -> usize {
        let (host, id, batch) = (self.queues[cq].host, self.queues[cq].id, self.queues[cq].batch);
        let mut polled = std::mem::take(&mut self.polled);
        let count = world.poll_cq(host, id, &mut polled[..batch]);
        for done in &polled[..count] {
            self.completion(world, host, cq, done);
        }
        self.polled = polled;
        count
    }

    fn completion(&mut self, world: &mut World, host: usize, cq: usize, done: &Completion) {
        self.tally.completions += 1;
        self.tally.errors += u64::from(done.status != WcStatus::Success);
        let fields = [53, host as u64, done.wr_id, done.status as u64, u64::from(done.byte_len)];
        world.trace.note(&fields);
        let Some(&a) = self.by_num.get(&(host, done.qp_num)) else {
            return world.violate(|| format!("host {host}: a completion of nobody: {done:?}"));
        };
        world.trace.line(world.kernel.now(), || {
            let Completion { wr_id, opcode, status, byte_len, extra, .. } = done;
            format!("actor {a} got {wr_id} {opcode:?} {status:?} {byte_len} B {extra:?}")
        });
        // What came before an XRC responder was destroyed belongs to the shared queue.
        if !self.actors[a].exists && !matches!(self.actors[a].qp_type, QpType::XrcRecv(_)) {
            return world.violate(|| format!("actor {a} is gone and completes: {done:?}"));
        }
        let is_send = self.actors[a].sent.iter().any(|sent| sent.id == done.wr_id);
        let checked = if is_send {
            self.send_done(world, a, cq, done)
        } else {
            self.receive_done(world, a, cq, done)
        };
        if let Err(what) = checked {
            world.violate(|| format!("actor {a}: {what}: {done:?}"));
        }
    }

    fn send_done(
        &mut self,
        world: &mut World,
        a: usize,
        cq: usize,
        done: &Completion,
    ) -> Result<(), String> {
        if self.actors[a].send_cq != cq {
            return Err("it completes in the wrong queue".into());
        }
        while let Some(sent) = self.actors[a].sent.pop_front() {
            if sent.id != done.wr_id {
                if sent.signaled {
                    return Err(format!("request {} was passed over", sent.id));
                }
                self.request_succeeded(a, &sent)?;
                continue;
            }
            if done.status == WcStatus::Success {
                if !sent.signaled || done.opcode != sent.opcode {
                    return Err(format!("must be {:?}, signalled {}", sent.opcode, sent.signaled));
                }
                if sent.sink.is_some() && done.byte_len as usize != sent.len {
                    return Err(format!("must be {} bytes", sent.len));
                }
                return self.request_succeeded(a, &sent);
            }
            self.request_failed(world, a, &sent, done.status)?;
            return self.resume(world, a);
        }
        Err("there is no such request".into())
    }

    fn request_succeeded(&mut self, a: usize, sent: &Sent) -> Result<(), String> {
        if self.actors[a].failed {
            return Err(format!("request {} succeeds after one that failed", sent.id));
        }
        if !sent.trap.is_empty() {
            return Err(format!("request {} was to fail", sent.id));
        }
        if let Some(message) = sent.message {
            self.messages[message].done = true;
        }
        if let Some((slot, bytes)) = &sent.sink {
            self.slots[*slot].contents = Contents::Holds(bytes.clone());
            return self.slots[*slot].check();
        }
        if let Some(slot) = sent.flushes {
            // What was written before has completed, and so is known.
            return self.slots[slot].check();
        }
        self.write_succeeded(sent.id)
    }

    /// Nothing is known of what a request has done.
    pub(super) fn lost_request(&mut self, sent: &Sent) {
        if let Some((slot, _)) = &sent.sink {
            self.slots[*slot].contents = Contents::Unknown;
        }
    }

    fn request_failed(
        &mut self,
        world: &World,
        a: usize,
        sent: &Sent,
        status: WcStatus,
    ) -> Result<(), String> {
        self.lost_request(sent);
        if std::mem::replace(&mut self.actors[a].failed, true) {
            let flushed = status == WcStatus::WrFlushErr;
            return flushed.then_some(()).ok_or("only the first has a status of its own".into());
        }
        let unreliable = matches!(self.service, Service::Ud | Service::Uc);
        let stopped = self.actors[a].stage == Stage::Over || self.teardown;
        if sent.trap.contains(&status) || (stopped && status == WcStatus::WrFlushErr) {
        } else if unreliable {
            return Err("an unreliable request must not fail so".into());
        } else if self.actors[a].cause.is_none() && !self.is_damaged(world, a) {
            return Err("a request fails without a cause".into());
        }
        if !unreliable {
            self.over(a);
        }
        Ok(())
    }

    /// An unreliable queue pair whose send queue has failed goes on once everything is flushed (SQE).
    fn resume(&mut self, world: &mut World, a: usize) -> Result<(), String> {
        let unreliable = matches!(self.service, Service::Ud | Service::Uc);
        let actor = &self.actors[a];
        if !unreliable || !actor.sent.is_empty() || actor.stage != Stage::Rts || self.teardown {
            return Ok(());
        }
        let info = world.hosts[actor.host].adapter.query_qp(actor.qp);
        let state = info.map_err(|fault| fault.to_string())?.attr.state;
        if state != QpState::Sqe {
            return Err(format!("its send queue failed, and it is in {state:?}"));
        }
        self.modify(world, a, QpState::Rts, M::empty());
        self.actors[a].failed = false;
        Ok(())
    }

    fn receive_done(
        &mut self,
        world: &World,
        a: usize,
        cq: usize,
        done: &Completion,
    ) -> Result<(), String> {
        let found = self.actors[a].pools.iter().find_map(|&pool| {
            let posted = &self.pools[pool].posted;
            posted.iter().position(|&(id, _)| id == done.wr_id).map(|place| (pool, place))
        });
        let (pool, place) = found.ok_or("there is no such request")?;
        if self.pools[pool].cq != cq {
            return Err("it completes in the wrong queue".into());
        }
        if self.pools[pool].srq.is_none() && place != 0 {
            return Err("receives complete out of order".into());
        }
        let slot = self.pools[pool].posted.remove(place).map_or(0, |(_, slot)| slot);
        if done.status == WcStatus::Success {
            let checked = self.message_arrived(world, a, pool, slot, done);
            self.slots[slot].clear();
            return checked;
        }
        self.slots[slot].contents = Contents::Unknown;
        let explained =
            self.actors[a].cause.is_some() || self.teardown || self.is_damaged(world, a);
        if !explained {
            return Err("a receive fails without a cause".into());
        }
        if self.service == Service::Uc && done.status != WcStatus::WrFlushErr {
            return Err("an unreliable receive must not fail so".into());
        }
        self.over(a);
        Ok(())
    }

    /// A message has come: one that was sent, whole, in order, and not before.
    fn message_arrived(
        &mut self,
        world: &World,
        a: usize,
        pool: usize,
        slot: usize,
        done: &Completion,
    ) -> Result<(), String> {
        let datagram = self.service == Service::Ud;
        let route = if datagram { ROUTE } else { 0 };
        let carried = if done.opcode == WcOpcode::Recv { done.byte_len as usize } else { 0 };
        let bytes = self.slots[slot].bytes(carried);
        let from = self.sender(world, a, &bytes, done)?;
        let named = self.name_of(done, bytes.get(route..).unwrap_or_default());
        let message = match named {
            _ if datagram => named.ok_or("it says not which one it is")?,
            _ => self.next_in_order(from, pool, named)?,
        };
        let expected = &mut self.messages[message];
        let len = expected.payload.len() + route;
        let right = expected.from == from
            && expected.to.contains(&a)
            && done.opcode == expected.opcode
            && done.extra == expected.extra
            && done.byte_len as usize == len
            && done.grh == datagram;
        if !right {
            let (opcode, extra) = (expected.opcode, expected.extra);
            return Err(format!("must be message {message}: {opcode:?} {extra:?} of {len} bytes"));
        }
        let times = expected.arrived.entry(a).or_default();
        *times += 1;
        let brought = self.brought(world, a, message, done);
        self.check_overtaken(from, message)?;
        let expected = &self.messages[message];
        if expected.arrived[&a] > brought {
            return Err(format!("message {message} arrives once too often"));
        }
        if done.opcode == WcOpcode::Recv && bytes[route..] != expected.payload[..] {
            return Err(format!("message {message} is damaged"));
        }
        if let (WcOpcode::RecvRdmaWithImm, Some(target)) = (done.opcode, expected.target) {
            self.slots[target].contents = Contents::Holds(expected.payload.clone());
            self.slots[target].check()?;
        }
        // Nothing else of the receive was touched, unless a message was dropped before.
        let dirty = self.service == Service::Uc;
        self.slots[slot].contents =
            if dirty { Contents::Unknown } else { Contents::Holds(bytes.into()) };
        self.slots[slot].check()
    }

    /// The actor that a message comes from, as the completion and the route header say.
    fn sender(
        &self,
        world: &World,
        a: usize,
        bytes: &[u8],
        done: &Completion,
    ) -> Result<usize, String> {
        if self.service != Service::Ud {
            let peer = self.actors[a].peer;
            if self.service != Service::Iwarp && done.src_qp != self.actors[peer].num {
                return Err(format!("it comes from {:?}", self.actors[peer].num));
            }
            return Ok(peer);
        }
        // IPv4 addresses stand at the end of the 40 bytes.
        let source = bytes.get(ROUTE - 8..ROUTE - 4).ok_or("it has no route header")?;
        let source: [u8; 4] = source.try_into().map_err(|_| "it has no route header")?;
        let is_at = |host: usize| world.hosts[host].address.ip() == std::net::IpAddr::from(source);
        let found =
            self.actors.iter().position(|actor| actor.num == done.src_qp && is_at(actor.host));
        found.ok_or_else(|| "it comes from nobody".into())
    }

    /// Which message it is, as it says itself.
    fn name_of(&self, done: &Completion, payload: &[u8]) -> Option<usize> {
        let id = match done.extra {
            WcExtra::Imm(imm) => u64::from(imm),
            _ => u64::from_le_bytes(payload.get(..8)?.try_into().ok()?),
        };
        self.message_of.get(&id).copied()
    }

    /// The next message from an actor: the oldest, or where some may be lost, the one that it says it is.
    fn next_in_order(
        &mut self,
        from: usize,
        pool: usize,
        named: Option<usize>,
    ) -> Result<usize, String> {
        let expected = self.expected.entry((from, pool)).or_default();
        if self.service != Service::Uc {
            return expected.pop_front().ok_or("nothing was sent".into());
        }
        let named = named.ok_or("it says not which one it is")?;
        while let Some(next) = expected.pop_front() {
            if next == named {
                return Ok(next);
            }
        }
        Err(format!("message {named} comes twice, or out of order"))
    }

    /// How often the network has brought a message to an actor.
    fn brought(&self, world: &World, a: usize, message: usize, done: &Completion) -> u32 {
        if self.service != Service::Ud {
            return 1;
        }
        let tag = match done.extra {
            WcExtra::Imm(imm) => u64::from(imm),
            _ => {
                self.messages[message].payload.first_chunk().map_or(0, |id| u64::from_le_bytes(*id))
            }
        };
        world.udp.copies.get(&(self.actors[a].host, tag)).copied().unwrap_or(0)
    }

    /// Takes events of hosts to the programs that wait for them.
    pub(super) fn take_events(&mut self, world: &mut World) {
        for (host, qp) in std::mem::take(&mut world.failed_startups) {
            let found = self.actors.iter().position(|actor| (actor.host, actor.qp) == (host, qp));
            if let Some(a) = found {
                self.ended(world, a, "its start-up failed");
            }
        }
        for host in 0..world.hosts.len() {
            while let Some(event) = world.hosts[host].events.pop_front() {
                world.trace.line(world.kernel.now(), || format!("host {host}: {event:?}"));
                world.trace.note_bytes(format!("{event:?}").as_bytes());
                if self.over_link && world.link_event(host, &event) {
                    continue;
                }
                match event {
                    Event::Completion { .. } => {
                        world.violate(|| format!("host {host}: {event:?}, which nobody asked for"));
                    }
                    Event::Async(AsyncEvent::CqErr(_)) => {
                        world.violate(|| format!("host {host}: {event:?}"));
                    }
                    Event::Async(_) => {}
                    Event::Tcp { .. } | Event::TcpRequest { .. } | Event::TcpStream { .. } => {
                        world.violate(|| "a connection of nobody".into())
                    }
                    Event::Stream { qp, change, .. } => {
                        let is_it =
                            |a: &usize| (self.actors[*a].host, self.actors[*a].qp) == (host, qp);
                        match ((0..self.actors.len()).find(is_it), change) {
                            (Some(a), StreamChange::Established) => {
                                if self.actors[a].stage == Stage::Init {
                                    self.actors[a].stage = Stage::Rts;
                                }
                            }
                            (Some(a), StreamChange::Ended) => {
                                self.ended(world, a, "its stream ended");
                            }
                            (Some(_), StreamChange::SpokeFirst) => {
                                world.violate(|| format!("host {host}: spoke first"));
                            }
                            (None, _) => world.violate(|| "a stream of nobody".into()),
                        }
                    }
                }
            }
        }
    }

    /// The stream of an actor is over.
    fn ended(&mut self, world: &mut World, a: usize, what: &str) {
        let damaged = self.is_damaged(world, a);
        if self.actors[a].cause.is_none() && !damaged && !self.teardown {
            return world.violate(|| format!("actor {a}: {what} without a cause"));
        }
        self.cause(a, what);
        self.over(a);
    }
}
