//! Events: what programs are told of, and that they are told of nothing else.

use quipu_nic::{AsyncEvent, Completion, Event, WcStatus};

use crate::load::{LONGEST_TICK_NS, Load};
use crate::model::{Asked, Stage};
use crate::world::{LoadEvent, World, WorldEvent};

impl Load {
    /// Asks a completion queue for its next event, of solicited completions only now and then. Whoever does
    /// that looks after a while all the same.
    pub(crate) fn ask(&mut self, world: &mut World, cq: usize, solicited: bool) {
        let queue = &mut self.cqs[cq];
        queue.told = false;
        queue.asked = match (queue.asked, solicited) {
            (Asked::Any, _) | (_, false) => Asked::Any,
            _ => Asked::Solicited,
        };
        let (host, id) = (queue.host, queue.id);
        let now = world.time();
        if let Err(fault) = world.hosts[host].adapter.req_notify_cq(now, id, solicited) {
            world.violate(|| format!("host {host}: no event can be asked for: {fault}"));
        }
        if solicited && !std::mem::replace(&mut self.cqs[cq].scheduled, true) {
            world.kernel.after(LONGEST_TICK_NS, WorldEvent::Load(LoadEvent::Poll { cq }));
        }
    }

    /// A completion queue has raised an event.
    fn told(&mut self, world: &mut World, cq: usize) {
        let queue = &mut self.cqs[cq];
        if queue.asked == Asked::Nothing || std::mem::replace(&mut queue.told, true) {
            world.violate(|| format!("completion queue {cq}: an event that nobody asked for"));
        }
    }

    /// Notes a completion that a program finds, for the event that must tell of it, or may.
    pub(crate) fn note_found(&mut self, cq: usize, done: &Completion, solicited: bool) {
        let queue = &mut self.cqs[cq];
        queue.found = queue.found.max(match solicited || done.status != WcStatus::Success {
            true => Asked::Solicited,
            false => Asked::Any,
        });
    }

    /// A program that waits for events has emptied its queue: whether it was told as it has asked.
    pub(crate) fn check_told(&mut self, world: &mut World, cq: usize) {
        let host = self.cqs[cq].host;
        while let Some(event) = world.hosts[host].adapter.poll_event() {
            world.hosts[host].events.push_back(event);
        }
        self.take_events(world);
        let queue = &mut self.cqs[cq];
        let found = std::mem::replace(&mut queue.found, Asked::Nothing);
        let asked = queue.asked;
        let due = asked != Asked::Nothing && found >= asked;
        let told = queue.told;
        if told {
            queue.asked = Asked::Nothing;
        }
        // What it was told of went with a queue pair.
        let forgotten = || self.ends.iter().any(|end| end.host == host && end.stage == Stage::Gone);
        if due != told && !(told && forgotten()) {
            world.violate(|| {
                format!("queue {cq} was asked for {asked:?}, had {found:?}, and told: {told}")
            });
        }
    }

    /// What is left in a shared receive queue is below its limit: that has raised its event.
    pub(crate) fn check_limits(&mut self, world: &mut World, host: usize) {
        self.take_events(world);
        let silent =
            |srq: &crate::model::SharedQueue| srq.host == host && srq.fell && !srq.limit_told;
        if let Some(srq) = self.srqs.iter().position(silent) {
            world.violate(|| format!("shared queue {srq} fell below its limit without a word"));
        }
    }

    /// Takes events of a host to the programs that wait for them.
    pub fn take_events(&mut self, world: &mut World) {
        for host in 0..world.hosts.len() {
            while let Some(event) = world.hosts[host].events.pop_front() {
                world.trace.line(world.kernel.now(), || format!("host {host}: {event:?}"));
                match event {
                    Event::Completion { context, .. } => {
                        world.trace.note(&[26, host as u64, context]);
                        self.told(world, context as usize);
                        self.poll_later(world, context as usize);
                    }
                    Event::Async(event) => self.take_async(world, host, event),
                    Event::Stream { .. } => world.violate(|| "a stream nobody gave".into()),
                    Event::Tcp { .. } | Event::TcpRequest { .. } | Event::TcpStream { .. } => {
                        world.violate(|| "a connection nobody asked for".into())
                    }
                }
            }
        }
    }

    fn take_async(&mut self, world: &mut World, host: usize, event: AsyncEvent) {
        let text = format!("{event:?}");
        world.trace.note_bytes(text.as_bytes());
        match event {
            AsyncEvent::SqDrained(qp) => {
                let found = self
                    .ends
                    .iter()
                    .position(|end| (end.host, end.qp, end.exists) == (host, qp, true));
                let Some(e) = found else { return };
                if !std::mem::take(&mut self.ends[e].drain_owed) {
                    let late = std::mem::take(&mut self.ends[e].drain_inherited);
                    if !late && self.ends[e].stage != Stage::Gone {
                        world.violate(|| format!("end {e}: drained, which nobody asked for"));
                    }
                    return;
                }
                self.ends[e].drain_seen = true;
                let after = self.rng.below(self.plan.tick_ns * 4 + 1);
                world.kernel.after(after, WorldEvent::Load(LoadEvent::Connect { end: e }));
            }
            AsyncEvent::SrqLimitReached(id) => {
                let found = self.srqs.iter_mut().find(|srq| (srq.host, srq.id) == (host, id));
                if found.is_none_or(|srq| std::mem::replace(&mut srq.limit_told, true)) {
                    world.violate(|| format!("host {host}: {event:?} once too often"));
                }
            }
            AsyncEvent::QpFatal(qp) if world.counters.corrupted > 0 => {
                // The only news of a damaged stream, if nothing is posted. The peer may have no timeout, and
                // wait for an answer for ever.
                let found = self
                    .ends
                    .iter()
                    .position(|end| (end.host, end.qp, end.exists) == (host, qp, true));
                let Some(e) = found else { return };
                let pair = self.ends[e].pair;
                if !self.is_damaged(world, pair) {
                    return;
                }
                let end = &mut self.ends[e];
                end.broken = true;
                end.ops_left = 0;
                end.collateral.get_or_insert("a damaged stream".into());
                self.cause(pair, "a damaged stream");
            }
            AsyncEvent::CqErr(_) => world.violate(|| format!("host {host}: {event:?}")),
            _ => {}
        }
    }
}
