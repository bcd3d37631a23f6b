//! A run of these programs from beginning to end, and what must be left then: nothing.

use quipu_nic::{QpAttrMask as M, QpState};

use super::Services;
use super::model::{Contents, Stage};
use crate::limits::{DAMAGE_PATIENCE_NS, FAREWELL_NS, MOST_EVENTS, PATIENCE_NS};
use crate::options::Service;
use crate::world::{World, WorldEvent};

/// How long what was sent and may be lost is waited for.
const LATE_NS: u64 = 2_000_000;

/// How long the adapters' own TCP takes at most to give up, and to forget.
const LINK_FAREWELL_NS: u64 = 300_000_000_000;

/// Runs it.
pub fn go(world: &mut World, load: &mut Services) {
    load.set_up(world);
    let deadline = load.plan.calm_ns.saturating_add(PATIENCE_NS);
    let mut finished = step_until(world, load, deadline, Services::all_done);
    if !finished && world.counters.corrupted > 0 {
        let deadline = load.plan.calm_ns.saturating_add(DAMAGE_PATIENCE_NS);
        finished = step_until(world, load, deadline, Services::all_done);
    }
    if !finished && world.violation.is_none() {
        let what = load.describe(world);
        return world.violate(|| what);
    }
    let deadline = world.kernel.now() + LATE_NS;
    step_until(world, load, deadline, |_, _| false);
    if world.violation.is_none() {
        tear_down(world, load);
    }
}

/// Runs events until `done`, the deadline or a violation; whether it was `done`.
fn step_until(
    world: &mut World,
    load: &mut Services,
    deadline: u64,
    done: impl Fn(&mut Services, &World) -> bool,
) -> bool {
    while world.violation.is_none() {
        load.take_events(world);
        if done(load, world) {
            return true;
        }
        if world.kernel.now() > deadline {
            return false;
        }
        if world.kernel.scheduled() > MOST_EVENTS {
            world.violate(|| "events without end".into());
            return false;
        }
        match world.kernel.next() {
            None => return done(load, world),
            Some(WorldEvent::Load(event)) => load.handle(world, event),
            Some(event) => world.handle(event),
        }
    }
    false
}

impl Services {
    /// Whether everything that was asked for has an end, and all has arrived that must.
    fn all_done(&mut self, world: &World) -> bool {
        (0..self.actors.len()).all(|a| self.is_done(world, a))
            && self.missing(world).is_none()
            && self.missing_write(world).is_none()
    }

    fn is_done(&self, world: &World, a: usize) -> bool {
        let actor = &self.actors[a];
        // What was not signalled and succeeded before the failure completes never.
        let silent = actor.stage == Stage::Over && actor.sent.iter().all(|sent| !sent.signaled);
        let idle = actor.ops_left == 0 && (actor.sent.is_empty() || silent);
        // Nothing limits the silence of a plain iWARP peer.
        let cut_off = |cause: &str| cause.contains("silent death") || cause.contains("ever");
        let excused = self.service == Service::Iwarp
            && actor
                .cause
                .as_deref()
                .is_some_and(|cause| cut_off(cause) || world.net.is_alone(actor.host, actor.qp));
        let unconnected =
            actor.stage != Stage::Rts && (actor.cause.is_some() || self.is_damaged(world, a));
        !actor.exists || idle || excused || unconnected
    }

    /// Whether all that an actor sends arrives.
    pub(super) fn is_certain(&self, world: &World, a: usize) -> bool {
        let reliable = matches!(self.service, Service::Xrc | Service::Iwarp);
        let undisturbed = self.actors[a].cause.is_none() && !self.is_damaged(world, a);
        undisturbed && (reliable || (self.calm && self.ample))
    }

    /// A message that must arrive and has not.
    fn missing(&self, world: &World) -> Option<usize> {
        let certain = |a: usize| self.is_certain(world, a);
        self.messages.iter().position(|message| {
            let late = |to: &usize| !message.arrived.contains_key(to) && certain(*to);
            certain(message.from) && message.done && message.to.iter().any(late)
        })
    }

    /// What a run that makes no progress waits for.
    fn describe(&mut self, world: &World) -> String {
        let mut text = String::from("no progress:");
        if let Some(write) = self.missing_write(world) {
            text += &format!(" write {write} is missing;");
        }
        if let Some(message) = self.missing(world) {
            let missing = &self.messages[message];
            let len = missing.payload.len();
            let (from, to) = (missing.from, &missing.to);
            text += &format!(" message {message} of {len} bytes from {from} to {to:?} is missing;");
        }
        for a in (0..self.actors.len()).filter(|&a| !self.is_done(world, a)) {
            let actor = &self.actors[a];
            let state = world.hosts[actor.host].adapter.query_qp(actor.qp);
            let oldest = actor.sent.front().map(|sent| (sent.id, sent.opcode));
            text += &format!(
                "\n  actor {a} host {} {:?} {:?}/{:?}: {} left, {} sent, oldest {oldest:?}, cause {:?}",
                actor.host,
                actor.qp_type,
                actor.stage,
                state.map(|info| info.attr.state),
                actor.ops_left,
                actor.sent.len(),
                actor.cause
            );
        }
        text + &world.describe_streams()
    }

    /// Empties all completion queues.
    fn take_all(&mut self, world: &mut World) {
        for cq in 0..self.queues.len() {
            if world.hosts[self.queues[cq].host].alive {
                while world.violation.is_none() && self.take_completions(world, cq) > 0 {}
            }
        }
    }
}

/// Ends everything, and checks what is left.
fn tear_down(world: &mut World, load: &mut Services) {
    load.teardown = true;
    world.net.heal();
    world.abort_startups();
    world.abort_link_startups();
    load.take_all(world);
    check_arrivals(world, load);
    for a in 0..load.actors.len() {
        if load.actors[a].exists {
            load.cause(a, "the end of the run");
            load.modify(world, a, QpState::Err, M::empty());
            load.over(a);
        }
    }
    load.take_events(world);
    load.take_all(world);
    check_flushed(world, load);
    for a in 0..load.actors.len() {
        if load.actors[a].exists && world.violation.is_none() {
            load.destroy(world, a);
        }
    }
    // TCP of its own sends again what a dead peer never acknowledges, and remembers what has ended.
    let farewell_ns = if load.over_link { LINK_FAREWELL_NS } else { FAREWELL_NS };
    let deadline = world.kernel.now() + farewell_ns;
    step_until(world, load, deadline, |_, _| false);
    check_memory(world, load);
    for host in 0..world.hosts.len() {
        if world.hosts[host].alive
            && world.violation.is_none()
            && let Err(what) = check_gone(world, load, host)
        {
            world.violate(|| format!("host {host}: {what}"));
        }
    }
}

/// What an extended reliable connection has acknowledged was received.
fn check_arrivals(world: &mut World, load: &Services) {
    if load.service != Service::Xrc || world.violation.is_some() {
        return;
    }
    for (index, message) in load.messages.iter().enumerate() {
        let here = |to: &usize| load.actors[*to].exists && !message.arrived.contains_key(to);
        if message.done && message.to.iter().any(here) {
            return world.violate(|| format!("message {index} was acknowledged and not received"));
        }
    }
}

/// In ERR everything that was posted has completed.
fn check_flushed(world: &mut World, load: &mut Services) {
    for a in 0..load.actors.len() {
        // The last ones may have succeeded without a completion before the failure.
        while load.actors[a].sent.back().is_some_and(|sent| !sent.signaled) {
            if let Some(sent) = load.actors[a].sent.pop_back() {
                load.lost_request(&sent);
            }
        }
        let actor = &load.actors[a];
        if !actor.exists || world.violation.is_some() {
            continue;
        }
        if let Some(sent) = actor.sent.front() {
            let id = sent.id;
            return world.violate(|| format!("actor {a}: request {id} never completed"));
        }
        let own = |&&pool: &&usize| load.pools[pool].owner == Some(a);
        let left = actor.pools.iter().filter(own).find_map(|&pool| load.pools[pool].posted.front());
        if let Some(&(id, _)) = left {
            return world.violate(|| format!("actor {a}: receive {id} was never flushed"));
        }
    }
}

fn check_memory(world: &mut World, load: &mut Services) {
    // What is left in shared queues was not touched, unless a message had begun there.
    let whole = load.service == Service::Ud;
    for pool in load.pools.iter().filter(|pool| !whole || pool.robbed) {
        for &(_, slot) in &pool.posted {
            load.slots[slot].contents = Contents::Unknown;
        }
    }
    for slot in load.slots.iter() {
        if let Err(what) = slot.check() {
            return world.violate(|| what);
        }
    }
}

/// Everything can be destroyed, and nothing is left of any connection.
fn check_gone(world: &mut World, load: &Services, host: usize) -> Result<(), String> {
    let (held, timeout) = (world.net.held(host), world.hosts[host].adapter.poll_timeout());
    let connections = world.hosts[host].adapter.connections();
    if held > 0 || timeout.is_some() || connections > 0 {
        return Err(format!(
            "{held} streams, {connections} connections, deadline {timeout:?} left"
        ));
    }
    let now = world.time();
    let adapter = &mut world.hosts[host].adapter;
    let of = |what: &'static str| move |fault| format!("{what} cannot be destroyed: {fault}");
    for slot in load.slots.iter().filter(|slot| slot.host == host) {
        adapter.dereg_mr(now, slot.mr).map_err(of("a region"))?;
    }
    for srq in load.shared_of(host) {
        adapter.destroy_srq(srq).map_err(of("a shared receive queue"))?;
    }
    for &domain in &load.objects[host].domains {
        adapter.dealloc_xrcd(domain).map_err(of("an XRC domain"))?;
    }
    for &ah in load.objects[host].ahs.values() {
        adapter.destroy_ah(ah).map_err(of("an address handle"))?;
    }
    for queue in load.queues.iter().filter(|queue| queue.host == host) {
        adapter.destroy_cq(queue.id).map_err(of("a completion queue"))?;
    }
    for &pd in &load.objects[host].pds {
        adapter.dealloc_pd(pd).map_err(of("a protection domain"))?;
    }
    if !adapter.memory_is_quiet() {
        return Err("its memory never becomes quiet".into());
    }
    Ok(())
}
