//! A run of these programs from beginning to end, and what must be left then: nothing.

use quipu_nic::TcpChange;
use quipu_nic::inet::tcp::SECOND;

use super::Programs;
use super::model::{End, Farewell, Stage};
use crate::limits::MOST_EVENTS;
use crate::services::model::Contents;
use crate::world::{World, WorldEvent};

/// How long after the last disturbance everything must have come to an end: twice what it takes to give up
/// connecting, and then a peer that says nothing.
const PATIENCE_NS: u64 = 600 * SECOND;
/// How long what is closed may be kept: TIME-WAIT, and peers that never answer a FIN.
const FAREWELL_NS: u64 = 200 * SECOND;

/// Runs it.
pub fn go(world: &mut World, load: &mut Programs, faults: bool) {
    load.set_up(world, faults);
    let patience = |load: &Programs| load.calm_ns.max(load.reborn_ns).saturating_add(PATIENCE_NS);
    let finished = step_until(world, load, patience, Programs::all_done);
    if world.violation.is_some() {
        return;
    }
    if !finished {
        let what = load.describe(world);
        return world.violate(|| what);
    }
    load.take_all(world);
    load.check_ends(world);
    tear_down(world, load);
}

/// Runs events until `done`, the deadline or a violation; whether it was `done`.
fn step_until(
    world: &mut World,
    load: &mut Programs,
    deadline: impl Fn(&Programs) -> u64,
    done: impl Fn(&Programs) -> bool,
) -> bool {
    while world.violation.is_none() {
        load.take_events(world);
        if done(load) {
            return true;
        }
        if world.kernel.now() > deadline(load) {
            return false;
        }
        if world.kernel.scheduled() > MOST_EVENTS {
            world.violate(|| "events without end".into());
            return false;
        }
        match world.kernel.next() {
            None => return done(load),
            Some(WorldEvent::Load(event)) => load.handle(world, event),
            Some(event) => world.handle(event),
        }
    }
    false
}

impl Programs {
    fn all_done(&self) -> bool {
        let over = self.ends.iter().all(|end| end.rebirths == 0);
        over && (0..self.ends.len()).all(|e| self.is_done(e)) && self.letters_done()
    }

    /// Whether nothing more will become of an end.
    pub(super) fn is_done(&self, e: usize) -> bool {
        let end = &self.ends[e];
        let peer = &self.ends[end.peer];
        if !end.exists {
            return end.stage != Stage::Unborn;
        }
        let quiet = end.sent.iter().all(|sent| !sent.signaled);
        if end.over.is_some() {
            return quiet && end.posted.is_empty();
        }
        if !end.causes.is_empty() {
            // Its peer may have gone without a word, or never come.
            let waits = end.stage != Stage::Up || end.ops_left == 0 || end.failed;
            let unheard = end.stage == Stage::Up && !end.mated;
            return (quiet && waits) || unheard;
        }
        let sent = end.ops_left == 0 && quiet && peer.ops_left == 0;
        sent && end.received == peer.written && self.has_said_farewell(end)
    }

    /// Whether both have closed who wanted to, and know it.
    fn has_said_farewell(&self, end: &End) -> bool {
        let closes = |end: &End| end.farewell == Farewell::Closes;
        let peer_closes = closes(&self.ends[end.peer]);
        end.stage == Stage::Up
            && end.closed == closes(end)
            && end.peer_closed == peer_closes
            && !(closes(end) && peer_closes)
    }

    /// What must be true of ends that nothing has happened to.
    fn check_ends(&self, world: &mut World) {
        for (e, end) in self.ends.iter().enumerate() {
            let peer = &self.ends[end.peer];
            if !end.causes.is_empty() || world.violation.is_some() {
                continue;
            }
            let whole = end.received == peer.written;
            let closed = end.over.is_none_or(|over| over == TcpChange::Closed);
            if !whole || !closed {
                let (received, written, over) = (end.received, peer.written, end.over);
                world.violate(|| {
                    format!("end {e} has received {received} of {written} bytes: {over:?}")
                });
            }
        }
    }

    /// What a run that makes no progress waits for.
    fn describe(&self, world: &World) -> String {
        let mut text = String::from("no progress:");
        for e in (0..self.ends.len()).filter(|&e| !self.is_done(e)) {
            let end = &self.ends[e];
            let adapter = &world.hosts[end.host].adapter;
            let state = adapter.query_qp(end.qp).map(|info| info.attr.state);
            text += &format!(
                "\n  end {e} host {} {:?} {:?}/{state:?}: {} left, {} sent, {} of {} received, {} \
                 posted, closed {}/{}, over {:?}, causes {:?}",
                end.host,
                end.settings.mode,
                end.stage,
                end.ops_left,
                end.sent.len(),
                end.received,
                self.ends[end.peer].written,
                end.posted.len(),
                end.closed,
                end.peer_closed,
                end.over,
                end.causes,
            );
        }
        text + &self.describe_letters()
    }

    /// Empties all completion queues.
    fn take_all(&mut self, world: &mut World) {
        for cq in 0..self.queues.len() {
            if world.hosts[self.queues[cq].host].alive {
                while world.violation.is_none() && self.take_completions(world, cq) > 0 {}
            }
        }
    }

    /// Everything that was posted has completed.
    fn check_flushed(&mut self, world: &mut World) {
        for (e, end) in self.ends.iter().enumerate().filter(|(_, end)| end.exists) {
            // The last ones may have succeeded without a completion before the failure.
            let sent = end.sent.iter().find(|sent| sent.signaled).map(|sent| sent.id);
            let left = sent.or(end.posted.front().map(|posted| posted.id));
            if let Some(id) = left {
                return world.violate(|| format!("end {e}: request {id} never completed"));
            }
        }
    }
}

/// Ends everything, and checks what is left.
fn tear_down(world: &mut World, load: &mut Programs) {
    load.teardown = true;
    world.net.heal();
    load.take_all(world);
    for e in 0..load.ends.len() {
        if load.ends[e].exists {
            if let Err(fault) = load.stop(world, e) {
                return world.violate(|| format!("end {e} cannot be stopped: {fault}"));
            }
            world.serve(load.ends[e].host);
        }
    }
    load.take_events(world);
    load.take_all(world);
    load.check_flushed(world);
    for port in &mut load.ports {
        let (now, adapter) = (world.time(), &mut world.hosts[port.host].adapter);
        // They outlive their listener, and somebody may wait whose end nobody hears of.
        for request in port.requests.drain(..) {
            let _ = adapter.tcp_refuse(now, request);
        }
        adapter.tcp_unlisten(port.listener);
    }
    for e in 0..load.ends.len() {
        let end = &mut load.ends[e];
        if !world.hosts[end.host].alive || world.violation.is_some() {
            continue;
        }
        let (now, adapter) = (world.time(), &mut world.hosts[end.host].adapter);
        if std::mem::take(&mut end.exists)
            && let Err(fault) = adapter.destroy_qp(now, end.qp)
        {
            return world.violate(|| format!("end {e} cannot be destroyed: {fault}"));
        }
        world.serve(end.host);
    }
    if let Err(what) = load.destroy_posts(world) {
        return world.violate(|| what);
    }
    let deadline = world.kernel.now() + FAREWELL_NS;
    step_until(world, load, |_| deadline, |_| false);
    // What was taken away in the middle may have something in it.
    for posted in load.ends.iter().flat_map(|end| &end.posted) {
        load.slots[posted.slot].contents = Contents::Unknown;
    }
    for slot in &load.slots {
        if let Err(what) = slot.check() {
            return world.violate(|| what);
        }
    }
    for host in 0..world.hosts.len() {
        if world.hosts[host].alive
            && world.violation.is_none()
            && let Err(what) = check_gone(world, load, host)
        {
            world.violate(|| format!("host {host}: {what}"));
        }
    }
}

/// Everything can be destroyed, and nothing is left of any connection.
fn check_gone(world: &mut World, load: &Programs, host: usize) -> Result<(), String> {
    let stations = world.frames.stations;
    let now = world.time();
    let adapter = &mut world.hosts[host].adapter;
    let connections = adapter.inet().map_or(0, |stack| stack.connections());
    // Neighbours are kept, and asked from time to time whether they are there.
    let timeout = adapter.poll_timeout().filter(|_| !stations);
    if connections > 0 || timeout.is_some() {
        return Err(format!("{connections} connections, deadline {timeout:?} left"));
    }
    let of = |what: &'static str| move |fault| format!("{what} cannot be destroyed: {fault}");
    for (_, mr) in load.regions.iter().filter(|(of, _)| *of == host) {
        adapter.dereg_mr(now, *mr).map_err(of("a region"))?;
    }
    for queue in load.queues.iter().filter(|queue| queue.host == host) {
        adapter.destroy_cq(queue.id).map_err(of("a completion queue"))?;
    }
    adapter.dealloc_pd(load.pds[host]).map_err(of("a protection domain"))?;
    if !adapter.memory_is_quiet() {
        return Err("its memory never becomes quiet".into());
    }
    Ok(())
}
