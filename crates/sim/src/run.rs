//! A run: from a seed to a report.

use std::panic::{AssertUnwindSafe, catch_unwind};

use quipu_nic::QpState;

use crate::limits::{DAMAGE_PATIENCE_NS, FAREWELL_NS, MOST_EVENTS, PATIENCE_NS};
use crate::load::Load;
use crate::messages;
use crate::model::Stage;
use crate::options::{Failure, Options, Report, Service};
use crate::plan::Plan;
use crate::qpip::{self, Programs};
use crate::rng::Rng;
use crate::services::{self, Services, Tally};
use crate::trace::Trace;
use crate::world::{World, WorldEvent};

/// Runs a seed. The same seed and options always give the same report.
#[must_use]
pub fn run(seed: u64, options: &Options) -> Report {
    let plan = Plan::draw(&mut Rng::new(seed, 1), options);
    let mut world = World::new(Rng::new(seed, 2), plan.profile, Trace::new(options.log_lines));
    let rng = Rng::new(seed, 3);
    let service = options.service.unwrap_or_else(|| Service::of(seed));
    let tally = match service {
        Service::Rc => {
            let mut load = Load::new(plan, rng, options);
            guard(&mut world, |world| go(world, &mut load));
            let Load { ops, completions, errors, bytes, faults_done: faults, .. } = load;
            Tally { ops, completions, errors, bytes, faults }
        }
        Service::Qpip => {
            let mut load = Programs::new(plan, rng, options.max_bytes);
            guard(&mut world, |world| qpip::go(world, &mut load, options.network_faults));
            load.tally
        }
        Service::Am => {
            // A draw of its own, so that the others keep what they were.
            let over_datagrams = Rng::new(seed, 11).percent(40);
            let mut load = messages::Programs::new(plan, rng, over_datagrams);
            guard(&mut world, |world| messages::go(world, &mut load));
            load.tally
        }
        Service::Uc | Service::Ud | Service::Xrc | Service::Iwarp | Service::IwarpTcp => {
            let mut load = Services::new(plan, service, rng, options);
            guard(&mut world, |world| services::go(world, &mut load));
            load.tally
        }
    };
    let at_ns = world.kernel.now();
    let (trace_hash, violation) = (world.trace.hash(), world.violation.take());
    Report {
        seed,
        service,
        trace_hash,
        events: world.kernel.scheduled(),
        virtual_ns: at_ns,
        ops: tally.ops,
        completions: tally.completions,
        errors: tally.errors,
        bytes: tally.bytes,
        faults: tally.faults,
        counters: world.counters,
        failure: violation.map(|violation| Failure {
            seed,
            service: options.service,
            what: violation.0,
            at_ns,
            log: world.trace.into_lines(),
        }),
    }
}

/// Runs programs; a panic is a violation.
fn guard(world: &mut World, programs: impl FnOnce(&mut World)) {
    let outcome = catch_unwind(AssertUnwindSafe(|| programs(world)));
    if let Err(panic) = outcome {
        let text = panic
            .downcast_ref::<String>()
            .map(String::as_str)
            .or_else(|| panic.downcast_ref::<&str>().copied())
            .unwrap_or("no message");
        world.violate(|| format!("panic: {text}"));
    }
}

/// Runs all seeds of a range, one after the other, and hands each report to `progress`, which says whether
/// to go on. Nothing is shared between runs, so that ranges may be shared out among threads.
pub fn run_many(
    seeds: std::ops::Range<u64>,
    options: &Options,
    mut progress: impl FnMut(&Report) -> bool,
) {
    for seed in seeds {
        if !progress(&run(seed, options)) {
            return;
        }
    }
}

fn go(world: &mut World, load: &mut Load) {
    load.set_up(world);
    let calm_ns = load.plan.calm_ns;
    let deadline = calm_ns.saturating_add(PATIENCE_NS);
    let mut finished = step_until(world, load, deadline, |load| load.all_done());
    if !finished && world.counters.corrupted > 0 && load.stuck(world).is_some() {
        let deadline = calm_ns.saturating_add(DAMAGE_PATIENCE_NS);
        finished = step_until(world, load, deadline, |load| load.all_done());
    }
    if world.violation.is_some() {
        return;
    }
    if !finished && let Some(what) = load.stuck(world) {
        return world.violate(|| what);
    }
    tear_down(world, load);
}

/// Runs events until `done`, the deadline or a violation; whether it was `done`.
fn step_until(
    world: &mut World,
    load: &mut Load,
    deadline: u64,
    mut done: impl FnMut(&mut Load) -> bool,
) -> bool {
    while world.violation.is_none() {
        load.take_events(world);
        if done(load) {
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
            None => return false,
            Some(WorldEvent::Load(event)) => load.handle(world, event),
            Some(event) => world.handle(event),
        }
    }
    false
}

/// Ends everything, and checks what is left: nothing.
fn tear_down(world: &mut World, load: &mut Load) {
    load.teardown = true;
    world.net.heal();
    take_all(world, load);
    for e in 0..load.ends.len() {
        if world.hosts[load.ends[e].host].alive && load.ends[e].exists {
            let pair = load.ends[e].pair;
            let before = load.ends[e].collateral.clone();
            let explained = !load.pairs[pair].causes.is_empty() || load.is_damaged(world, pair);
            if let (Some(what), false) = (&before, explained) {
                return world.violate(|| format!("end {e} failed without a cause: {what}"));
            }
        }
    }
    for pair in 0..load.pairs.len() {
        load.cause(pair, "the end of the run");
    }
    for e in 0..load.ends.len() {
        if world.hosts[load.ends[e].host].alive && load.ends[e].exists {
            load.move_to(world, e, QpState::Err);
        }
    }
    take_all(world, load);
    check_flushed(world, load);
    load.take_events(world);
    if world.violation.is_some() {
        return;
    }
    destroy_all(world, load);
    let deadline = world.kernel.now() + FAREWELL_NS;
    step_until(world, load, deadline, |_| false);
    check_memory(world, load);
    check_gone(world, load);
}

/// Empties all completion queues.
fn take_all(world: &mut World, load: &mut Load) {
    for cq in 0..load.cqs.len() {
        if world.hosts[load.cqs[cq].host].alive {
            while world.violation.is_none() && load.take_completions(world, cq) > 0 {}
        }
    }
}

/// In ERR everything that was posted has completed, successful sends were received, and no receive is
/// left.
fn check_flushed(world: &mut World, load: &mut Load) {
    for e in 0..load.ends.len() {
        // The last ones may have succeeded without a completion before the failure.
        while load.ends[e].sq.back().is_some_and(|sent| !sent.signaled) {
            if let Some(sent) = load.ends[e].sq.pop_back() {
                load.lost_request(e, &sent);
            }
        }
        let end = &load.ends[e];
        if !world.hosts[end.host].alive || !end.exists || end.stage == Stage::Gone {
            continue;
        }
        if let Some(sent) = end.sq.front() {
            let (id, count) = (sent.id, end.sq.len());
            return world
                .violate(|| format!("end {e}: {count} requests from {id} on never completed"));
        }
        if let Some(recv) = end.rq.front() {
            let (id, count) = (recv.id, end.rq.len());
            return world
                .violate(|| format!("end {e}: {count} receives from {id} on never flushed"));
        }
        let acknowledged = |id: u64| load.succeeded[id as usize];
        if let Some(message) = end.inbound.iter().find(|message| acknowledged(message.id)) {
            let id = message.id;
            return world
                .violate(|| format!("end {e}: message {id} was acknowledged and not received"));
        }
    }
}

fn destroy_all(world: &mut World, load: &mut Load) {
    let now = world.time();
    for e in 0..load.ends.len() {
        let end = &mut load.ends[e];
        if world.hosts[end.host].alive && end.exists {
            let host = end.host;
            end.exists = false;
            if let Err(fault) = world.hosts[host].adapter.destroy_qp(now, end.qp) {
                return world.violate(|| format!("end {e} cannot be destroyed: {fault}"));
            }
            world.wake(host);
            world.serve(host);
        }
    }
}

fn check_memory(world: &mut World, load: &mut Load) {
    load.excuse_shared_receives();
    for arena in &load.arenas {
        if let Err(what) = arena.check() {
            return world.violate(|| what);
        }
    }
    for counter in &load.counters {
        let arena = &load.arenas[counter.arena];
        let mut word = [0; 8];
        let _ = arena.segment.read(counter.at, &mut word);
        if world.hosts[arena.host].alive
            && let Err(what) = counter.check(u64::from_ne_bytes(word))
        {
            return world.violate(|| what);
        }
    }
}

/// Everything can be destroyed, and nothing is left of any connection.
fn check_gone(world: &mut World, load: &mut Load) {
    for host in 0..world.hosts.len() {
        if !world.hosts[host].alive {
            continue;
        }
        let (held, timeout) = (world.net.held(host), world.hosts[host].adapter.poll_timeout());
        let strangers = world.strangers.iter().filter(|(of, _)| *of == host).count();
        let connections = world.hosts[host].adapter.connections();
        if held > 0 || strangers > 0 || timeout.is_some() || connections > 0 {
            return world.violate(|| {
                format!(
                    "host {host}: {held} streams, {strangers} strangers, {connections} connections, \
                     deadline {timeout:?} left"
                )
            });
        }
        if let Err(what) = destroy_objects(world, load, host) {
            return world.violate(|| format!("host {host}: {what}"));
        }
    }
}

fn destroy_objects(world: &mut World, load: &mut Load, host: usize) -> Result<(), String> {
    let now = world.time();
    let adapter = &mut world.hosts[host].adapter;
    let of = |what: &'static str| move |fault| format!("{what} cannot be destroyed: {fault}");
    for window in load.windows.iter().filter(|window| load.ends[window.owner].host == host) {
        adapter.dealloc_mw(window.mw).map_err(of("a window"))?;
    }
    for arena in load.arenas.iter().filter(|arena| arena.host == host) {
        // Some were deregistered on purpose.
        match adapter.dereg_mr(now, arena.mr) {
            Ok(()) | Err(quipu_nic::Fault::NoSuchObject) => {}
            Err(fault) => return Err(of("a region")(fault)),
        }
    }
    for srq in load.srqs.iter().filter(|srq| srq.host == host) {
        adapter.destroy_srq(srq.id).map_err(of("a shared receive queue"))?;
    }
    for cq in load.cqs.iter().filter(|cq| cq.host == host) {
        adapter.destroy_cq(cq.id).map_err(of("a completion queue"))?;
    }
    for &pd in &load.pds[host] {
        adapter.dealloc_pd(pd).map_err(of("a protection domain"))?;
    }
    if !adapter.memory_is_quiet() {
        return Err("its memory never becomes quiet".into());
    }
    Ok(())
}
