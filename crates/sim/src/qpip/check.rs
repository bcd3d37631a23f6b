//! The checkers of completions: sends in order, each once, and successful only if the peer has said that it
//! has everything; receives in order, with the bytes of the peer's stream that come next.

use std::sync::Arc;

use quipu_nic::{Completion, TcpChange, WcOpcode, WcStatus};

use super::Programs;
use super::model::{Posted, Sent, stream};
use crate::load::LONGEST_TICK_NS;
use crate::services::model::Contents;
use crate::world::{LoadEvent, World, WorldEvent};

impl Programs {
    pub(super) fn poll_later(&mut self, world: &mut World, cq: usize) {
        let queue = &self.queues[cq];
        let after = (1 + self.rng.below(queue.poll_ns)) << queue.idle.min(20);
        let after = after.min(LONGEST_TICK_NS * 4);
        world.kernel.after(after, WorldEvent::Load(LoadEvent::Poll { cq }));
    }

    /// A program looks at a completion queue.
    pub(super) fn poll(&mut self, world: &mut World, cq: usize) {
        let host = self.queues[cq].host;
        if !world.hosts[host].alive {
            return;
        }
        world.wake(host);
        let now = world.time();
        world.hosts[host].adapter.progress(now);
        let taken = self.take_completions(world, cq);
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
        let fields = [64, host as u64, done.wr_id, done.status as u64, u64::from(done.byte_len)];
        world.trace.note(&fields);
        if let Some(p) = self.post_of(host, done.qp_num) {
            world.trace.line(world.kernel.now(), || format!("UDP queue pair {p} got {done:?}"));
            if let Err(what) = self.post_completion(p, cq, done, world) {
                world.violate(|| format!("UDP queue pair {p}: {what}: {done:?}"));
            }
            return;
        }
        let Some(&e) = self.by_num.get(&(host, done.qp_num)) else {
            return world.violate(|| format!("host {host}: a completion of nobody: {done:?}"));
        };
        world.trace.line(world.kernel.now(), || {
            let Completion { wr_id, opcode, status, byte_len, .. } = done;
            format!("end {e} got {wr_id} {opcode:?} {status:?} {byte_len} B")
        });
        if !self.ends[e].exists {
            return world.violate(|| format!("end {e} is gone and completes: {done:?}"));
        }
        let sends = self.ends[e].sent.iter().any(|sent| sent.id == done.wr_id);
        let right = self.ends[e].cqs[usize::from(!sends)] == cq;
        let checked = match (right, sends) {
            (false, _) => Err("it completes in the wrong queue".into()),
            (true, true) => self.send_done(world, e, done),
            (true, false) => self.receive_done(e, done),
        };
        if let Err(what) = checked {
            world.violate(|| format!("end {e}: {what}: {done:?}"));
        }
    }

    fn send_done(&mut self, world: &World, e: usize, done: &Completion) -> Result<(), String> {
        while let Some(sent) = self.ends[e].sent.pop_front() {
            if sent.id != done.wr_id {
                // What came before succeeded without a completion.
                if sent.signaled {
                    return Err(format!("request {} was passed over", sent.id));
                }
                if self.ends[e].flushes {
                    return Err(format!("request {} was not flushed", sent.id));
                }
                if done.status == WcStatus::Success {
                    self.send_succeeded(world, e, &sent)?;
                }
                continue;
            }
            if done.status != WcStatus::Success {
                return self.send_failed(e, &sent, done.status);
            }
            if !sent.signaled || done.opcode != WcOpcode::Send {
                return Err("nobody asked for it".into());
            }
            return self.send_succeeded(world, e, &sent);
        }
        Err("there is no such request".into())
    }

    fn send_succeeded(&mut self, world: &World, e: usize, sent: &Sent) -> Result<(), String> {
        if self.ends[e].flushes || sent.trap {
            return Err(format!("request {} must not succeed", sent.id));
        }
        self.ends[e].acked += sent.len as u64;
        let (acked, end) = (self.ends[e].acked, &self.ends[e]);
        // What a host sends to itself no network brings.
        let flow = world.hosts[end.host].adapter.tcp_flow(end.qp);
        let flow = flow.filter(|_| self.ends[end.peer].host != end.host);
        let known = flow.map_or(acked, |flow| world.frames.acknowledged.of(&flow));
        if known < acked {
            return Err(format!("{known} bytes of {acked} were acknowledged"));
        }
        Ok(())
    }

    fn send_failed(&mut self, e: usize, sent: &Sent, status: WcStatus) -> Result<(), String> {
        if self.ends[e].causes.is_empty() && !self.teardown {
            return Err("a request fails without a cause".into());
        }
        self.ends[e].flushes = true;
        let right = match status {
            WcStatus::WrFlushErr => true,
            WcStatus::LocProtErr => sent.trap,
            WcStatus::RemOpErr | WcStatus::RetryExcErr => {
                matches!(self.ends[e].over, Some(TcpChange::Failed(_)))
            }
            _ => false,
        };
        let own = status != WcStatus::WrFlushErr;
        if !right || (own && std::mem::replace(&mut self.ends[e].failed, own)) {
            return Err("it must not fail so".into());
        }
        Ok(())
    }

    fn receive_done(&mut self, e: usize, done: &Completion) -> Result<(), String> {
        let Some(posted) = self.ends[e].posted.pop_front() else {
            return Err("nothing was posted".into());
        };
        if posted.id != done.wr_id {
            return Err(format!("{} must come first", posted.id));
        }
        match done.status {
            WcStatus::Success => self.received(e, &posted, done),
            WcStatus::WrFlushErr => {
                self.slots[posted.slot].contents = Contents::Unknown;
                let ended =
                    self.teardown || self.ends[e].over.is_some() || !self.ends[e].causes.is_empty();
                ended.then_some(()).ok_or("it is flushed without a cause".into())
            }
            status => {
                self.slots[posted.slot].contents = Contents::Unknown;
                let trapped = posted.trap == Some(status);
                trapped.then_some(()).ok_or("it must not fail so".into())
            }
        }
    }

    /// A receive has these bytes of the peer's stream.
    fn received(&mut self, e: usize, posted: &Posted, done: &Completion) -> Result<(), String> {
        let (peer, from, len) = (self.ends[e].peer, self.ends[e].received, done.byte_len as usize);
        if done.opcode != WcOpcode::Recv || posted.trap == Some(WcStatus::LocProtErr) {
            return Err("it must not be so".into());
        }
        if len > posted.room || from + len as u64 > self.ends[peer].written {
            return Err(format!("{len} bytes from {from} on, of {}", self.ends[peer].written));
        }
        if self.ends[e].is_message() {
            let end = self.ends[peer].boundaries.pop_front();
            if end != Some(from + len as u64) {
                return Err(format!("the message from {from} on ends at {end:?}"));
            }
        } else if len == 0 {
            return Err("a receive of a stream completes with nothing".into());
        }
        self.ends[e].received += len as u64;
        let bytes: Arc<[u8]> = stream(peer, from, len).into();
        let slot = &mut self.slots[posted.slot];
        slot.contents = Contents::Holds(bytes);
        slot.check()
    }
}
