//! Programs of Active Messages: everybody sends requests to everybody, over reliable connections with a
//! shared receive queue. The engine (`quipu-am`) is the one that `quipu::am` uses.
//!
//! What is checked: each request ends once, with its reply or by coming back. Its handler runs at most once,
//! and once if the reply comes. Without disturbances only requests to a missing handler come back. Handlers
//! of a bundle or an endpoint do not overlap. Payloads are right. The receive slots are bounded. Requests
//! and replies end whatever has happened, also with one credit.

mod datagrams;
mod fabric;
mod network;
mod oracle;

use std::collections::{BTreeMap, VecDeque};

use quipu_am::memory_lanes::{MemoryLanes, SharedLanes};
use quipu_am::{
    BundleId, CallError, Config as AmConfig, Core, Delivery, EndpointId, Mode, Name, Outgoing,
    Remote, Sent, Tag,
};
use quipu_nic::mem::{Access, Segment};
use quipu_nic::{Config, CqId, Event, PdId, SrqId};

use crate::limits::{DAMAGE_PATIENCE_NS, MOST_EVENTS, PATIENCE_NS};
use crate::load::LONGEST_TICK_NS;
use crate::network::Partition;
use crate::plan::{Plan, UNFINISHED_NS};
use crate::rng::Rng;
use crate::services::Tally;
use crate::world::{LoadEvent, World, WorldEvent};
use datagrams::{DATAGRAM_MEMORY, Ud};
use fabric::{MAX_MEDIUM, MOST_SLOTS, Memory, SEGMENT, SEGMENT_LEN, SimFabric};
use network::{Asked, Letter, Link};
use oracle::Request;

const TAG: Tag = Tag(77);
/// How long a peer that does not answer is tried.
const GIVE_UP_NS: u64 = 2_000_000_000;
/// After so long the connection manager, whose streams ask for signs of life, gives a silent peer up.
const KEEP_ALIVE_NS: u64 = 75_000_000_000;
/// A handler holds on for so long at most.
const LONGEST_HANDLER_NS: u64 = 3_000_000;

/// A process.
struct Node {
    host: usize,
    core: Core<SimFabric, u16>,
    bundle: BundleId,
    endpoint: EndpointId,
    pd: PdId,
    cq: CqId,
    srq: SrqId,
    links: Vec<Link>,
    ud: Option<Ud>,
    /// Requests that are still to be sent, and the number of the next.
    left: u32,
    next: i32,
    /// Handlers that the engine has given out with an event, and that have not begun.
    given: VecDeque<Box<Delivery<u16>>>,
    /// Handlers that run, and until when.
    running: Vec<(u64, Box<Delivery<u16>>)>,
    /// The program computes, and does not poll, until then.
    busy_until: u64,
    /// Ticks without anything done.
    idle: u32,
}

/// Something that happens in the middle of a run.
#[derive(Clone, Copy, Debug)]
enum Mishap {
    /// An engine ends, with its machine or alone.
    Kill { node: usize, silent: bool },
    /// A queue pair of a process fails.
    Break { node: usize },
    /// The connection manager notices that a process, or all between two, is silent.
    Silence { node: usize, other: Option<usize> },
}

/// All programs of a run, and what they know.
pub struct Programs {
    plan: Plan,
    rng: Rng,
    mode: Mode,
    /// The engines give a message that may run out with its event.
    at_once: bool,
    /// Messages go over datagrams.
    over_datagrams: bool,
    nodes: Vec<Node>,
    letters: Vec<Letter>,
    asked: Vec<Asked>,
    requests: BTreeMap<(i32, i32), Request>,
    mishaps: Vec<Mishap>,
    /// The memory of lanes, and whether this run has any.
    lanes: SharedLanes,
    has_lanes: bool,
    /// Something happens that may break connections.
    disturbed: bool,
    pub tally: Tally,
}

/// Runs them from beginning to end.
pub fn go(world: &mut World, load: &mut Programs) {
    load.set_up(world);
    let may_be_silent = load.plan.mishaps > 0 || load.plan.partition_percent > 0;
    let silent = if may_be_silent { KEEP_ALIVE_NS } else { 0 };
    while world.violation.is_none() && !load.is_done(world) {
        let damaged = world.counters.corrupted > 0;
        let patience = silent + if damaged { DAMAGE_PATIENCE_NS } else { PATIENCE_NS };
        let deadline = load.plan.calm_ns.saturating_add(patience);
        if world.kernel.now() > deadline || world.kernel.scheduled() > MOST_EVENTS {
            let what = load.describe(world);
            return world.violate(|| what);
        }
        match world.kernel.next() {
            Some(WorldEvent::Load(event)) => load.handle(world, event),
            Some(event) => world.handle(event),
            None => return world.violate(|| "nothing happens any more".into()),
        }
        load.take_events(world);
    }
    if world.violation.is_none() {
        load.check_all(world);
    }
    if world.violation.is_none() {
        load.tear_down(world);
    }
}

impl Programs {
    /// The programs of a plan.
    pub fn new(plan: Plan, mut rng: Rng, over_datagrams: bool) -> Self {
        let profile = &plan.profile;
        let faults = profile.loss_ppm + profile.duplicate_ppm + profile.corrupt_ppm;
        // Datagrams that are lost are sent again, and damaged ones are lost.
        let breaks = faults > 0 && !over_datagrams;
        let disturbed = plan.mishaps > 0 || plan.partition_percent > 0 || breaks;
        let mode = rng.pick(&[Mode::Sequential, Mode::Parallel]);
        let (at_once, has_lanes) = (rng.percent(50), rng.percent(60));
        let (nodes, letters, asked) = (Vec::new(), Vec::new(), Vec::new());
        let (requests, mishaps, tally) = (BTreeMap::new(), Vec::new(), Tally::default());
        Self {
            plan,
            rng,
            mode,
            at_once,
            over_datagrams,
            nodes,
            letters,
            asked,
            requests,
            mishaps,
            lanes: SharedLanes::default(),
            has_lanes,
            disturbed,
            tally,
        }
    }

    /// Whether something happens in this run that breaks connections.
    fn is_disturbed(&self, world: &World) -> bool {
        self.disturbed || world.counters.timed_out > 0
    }

    fn set_up(&mut self, world: &mut World) {
        let one_credit = self.rng.percent(30);
        let window = if one_credit { 1 } else { self.rng.pick(&[2, 8, 32]) };
        let config = AmConfig {
            max_outstanding: self.rng.pick(&[1, 4, 64]),
            shared_credits: if one_credit { 0 } else { self.rng.pick(&[1, 8, 48]) },
            max_window: window,
            initial_window: window.min(8),
            max_connections: 32,
            max_medium: MAX_MEDIUM,
            send_buffers: fabric::BUFFERS,
            give_up_ns: GIVE_UP_NS,
            lane_after: self.rng.pick(&[1, 3, 16]),
        };
        for (index, (machine, style)) in self.plan.hosts.clone().into_iter().enumerate() {
            let mut seed = [0; 32];
            for part in seed.chunks_exact_mut(8) {
                part.copy_from_slice(&self.rng.next().to_le_bytes());
            }
            let host_config = Config {
                seed,
                copy_limit: self.plan.copy_limit,
                max_ulpdu: self.plan.max_ulpdu,
                crc: self.plan.crc(seed[0]),
                setup_timeout_ns: self.plan.setup_timeout_ns.max(5_000_000_000),
                unfinished_ns: UNFINISHED_NS,
                ..Config::default()
            };
            let mut style = style;
            style.link_blocks += 16;
            let host = world.add_host(machine, 4000 + index as u16, host_config, style);
            match self.make_node(world, host, &config) {
                Ok(node) => {
                    self.nodes.push(node);
                    if self.over_datagrams {
                        self.make_datagrams(world, index);
                    }
                }
                Err(what) => return world.violate(|| format!("host {host}: {what}")),
            }
        }
        self.map_all(world);
        self.draw_mishaps(world);
        for n in 0..self.nodes.len() {
            self.carry_out(world, n);
            self.tick_later(world, n);
        }
        world.net.calm_from = self.plan.calm_ns;
    }

    fn make_node(
        &mut self,
        world: &mut World,
        host: usize,
        config: &AmConfig,
    ) -> Result<Node, String> {
        let text = |fault: quipu_nic::Fault| fault.to_string();
        let address = world.hosts[host].address;
        let adapter = &mut world.hosts[host].adapter;
        let pd = adapter.alloc_pd().map_err(text)?;
        let (cq, _) = adapter.create_cq(4096, None, 0).map_err(text)?;
        let srq = adapter.create_srq(pd, MOST_SLOTS, 1, 0).map_err(text)?;
        let (segment, addr) = (Segment::heap(DATAGRAM_MEMORY), 0x1000_0000);
        let access = Access::REMOTE | Access::LOCAL_WRITE;
        let region = adapter.reg_segment(pd, &segment, Some(addr), access).map_err(text)?;
        let space = &world.hosts[host].space;
        space.lock().unwrap_or_else(std::sync::PoisonError::into_inner).map(&segment);
        let memory = Memory { segment, addr, key: region.key.0 };
        oracle::fill(&memory, host);
        let own = Remote { addr: addr + SEGMENT as u64, len: SEGMENT_LEN as u64, key: memory.key };
        let mut fabric = datagrams::fabric(memory, self.over_datagrams, 1 + host as u64);
        if let SimFabric::Posts(posts) = &mut fabric {
            posts.lanes = MemoryLanes::new(self.lanes.clone());
            posts.has_lanes = self.has_lanes;
        }
        // The lowest byte is the index of the UD queue pair.
        let incarnation = (1 + host as u64) << 8;
        let call = |error: CallError| error.to_string();
        let mut core = Core::new(fabric, config.clone(), address, incarnation).map_err(call)?;
        let bundle = core.create_bundle(self.mode);
        let endpoint = core.create_endpoint(bundle).map_err(call)?;
        core.set_tag(endpoint, TAG).map_err(call)?;
        core.set_segment(endpoint, Some(own)).map_err(call)?;
        for handler in [0, oracle::REQUEST, oracle::REPLY, oracle::GOT] {
            core.set_handler(endpoint, handler.into(), Some(handler)).map_err(call)?;
        }
        let (links, given, running) = (Vec::new(), VecDeque::new(), Vec::new());
        let left = self.plan.ops / 2 + self.rng.below(u64::from(self.plan.ops)) as u32;
        let (next, busy_until, idle) = (0, 0, 0);
        Ok(Node {
            host,
            core,
            bundle,
            endpoint,
            pd,
            cq,
            srq,
            links,
            ud: None,
            left,
            next,
            given,
            running,
            busy_until,
            idle,
        })
    }

    /// Everybody maps everybody, by place.
    fn map_all(&mut self, world: &mut World) {
        let name = |node: &Node| node.core.name(node.endpoint);
        let names: Result<Vec<Name>, CallError> = self.nodes.iter().map(name).collect();
        for (index, name) in (0..).zip(names.unwrap_or_default()) {
            for node in &mut self.nodes {
                if let Err(error) = node.core.map(node.endpoint, index, name, TAG) {
                    return world.violate(|| format!("a peer cannot be mapped: {error}"));
                }
            }
        }
    }

    fn draw_mishaps(&mut self, world: &mut World) {
        for _ in 0..self.plan.mishaps {
            let node = self.rng.index(self.nodes.len());
            let mishap = match self.rng.below(3) {
                0 => Mishap::Break { node },
                _ => Mishap::Kill { node, silent: self.rng.percent(30) },
            };
            self.mishaps.push(mishap);
            let (at, index) = (self.rng.below(self.plan.calm_ns), self.mishaps.len() - 1);
            world.kernel.at(at, WorldEvent::Load(LoadEvent::Fault { index }));
        }
        if self.nodes.len() > 1 && self.rng.percent(self.plan.partition_percent) {
            let a = self.rng.index(self.nodes.len());
            let b = (a + 1 + self.rng.index(self.nodes.len() - 1)) % self.nodes.len();
            let from = self.rng.below(self.plan.calm_ns);
            let ever = self.rng.percent(30);
            let to = if ever { u64::MAX } else { from + self.rng.below(self.plan.calm_ns) };
            if ever {
                self.notice_silence(world, from, a, Some(b));
            }
            world.net.partitions.push(Partition { hosts: Some([a, b]), from, to });
        }
    }

    fn handle(&mut self, world: &mut World, event: LoadEvent) {
        match event {
            LoadEvent::Tick { end } => self.tick(world, end),
            LoadEvent::Connect { end } => self.letter(world, end),
            LoadEvent::Fault { index } => self.mishap(world, index),
            _ => {}
        }
    }

    fn mishap(&mut self, world: &mut World, index: usize) {
        let mishap = self.mishaps[index];
        world.trace.line(world.kernel.now(), || format!("{mishap:?}"));
        world.trace.note(&[71, index as u64]);
        let alive = |node: usize| world.hosts[self.nodes[node].host].alive;
        match mishap {
            Mishap::Kill { node, silent } if alive(node) => {
                self.tally.faults += 1;
                world.kill(self.nodes[node].host, silent);
                if silent {
                    self.notice_silence(world, world.kernel.now(), node, None);
                } else {
                    self.end_connections(world, node, None);
                }
            }
            Mishap::Break { node } if alive(node) => {
                self.tally.faults += 1;
                self.break_one(world, node);
            }
            Mishap::Silence { node, other } => self.end_connections(world, node, other),
            Mishap::Kill { .. } | Mishap::Break { .. } => {}
        }
    }

    /// Has the connection manager notice, after a while, that nothing comes from a process any more.
    fn notice_silence(&mut self, world: &mut World, from: u64, node: usize, other: Option<usize>) {
        self.mishaps.push(Mishap::Silence { node, other });
        let index = self.mishaps.len() - 1;
        let at = from + KEEP_ALIVE_NS;
        world.kernel.at(at, WorldEvent::Load(LoadEvent::Fault { index }));
    }

    fn tick_later(&mut self, world: &mut World, n: usize) {
        let node = &mut self.nodes[n];
        let after = (1 + self.rng.below(self.plan.tick_ns)) << node.idle.min(20);
        node.idle += 1;
        let after = after.min(LONGEST_TICK_NS.max(self.plan.tick_ns));
        world.kernel.after(after, WorldEvent::Load(LoadEvent::Tick { end: n }));
    }

    /// A program polls, runs handlers, and sends.
    fn tick(&mut self, world: &mut World, n: usize) {
        if !world.hosts[self.nodes[n].host].alive {
            return;
        }
        let now = world.kernel.now();
        if now >= self.nodes[n].busy_until {
            self.nodes[n].core.handle_timeout(now);
            self.carry_out(world, n);
            self.poll(world, n);
            self.end_handlers(world, n);
            self.run_handlers(world, n);
            for _ in 0..self.rng.range(1, 4) {
                self.send(world, n);
            }
            self.carry_out(world, n);
            if self.rng.percent(1) {
                self.nodes[n].busy_until = now + self.rng.below(100_000_000);
            }
        }
        self.tick_later(world, n);
    }

    /// Sends a request, if one is left and it can go out now.
    fn send(&mut self, world: &mut World, n: usize) {
        if self.nodes[n].left == 0 || world.violation.is_some() {
            return;
        }
        let mut to = self.rng.index(self.nodes.len());
        if to == n {
            // More often others than itself.
            to = self.rng.index(self.nodes.len());
        }
        let draft = self.draft(n, to);
        let node = &mut self.nodes[n];
        let sent = match &draft.body {
            oracle::Draft::Get { from, to: into, len } => {
                let handler = (oracle::GOT, &draft.args[..]);
                node.core
                    .get(node.endpoint, to as u32, *from, (*into, *len), handler)
                    .map(|()| Sent::Done)
            }
            oracle::Draft::Message { handler, payload } => {
                let out = Outgoing { handler: *handler, args: &draft.args, body: payload.body() };
                node.core.request(node.endpoint, to as u32, &out)
            }
        };
        match sent {
            Err(CallError::WouldBlock) => {}
            Err(error) => world.violate(|| format!("process {n}: a request is refused: {error}")),
            Ok(sent) => {
                (node.left, node.next, node.idle) = (node.left - 1, node.next + 1, 0);
                world.trace.note(&[72, n as u64, to as u64, draft.args[1] as u64]);
                world.trace.line(world.kernel.now(), || {
                    format!("process {n} sends {:?} to {to}: {:?}", draft.args, draft.request)
                });
                self.requests.insert((n as i32, draft.args[1]), draft.request);
                if let Sent::Own(delivery) = sent {
                    self.run_own(world, n, *delivery);
                }
            }
        }
    }

    /// Events of hosts. Nobody has asked for any.
    fn take_events(&mut self, world: &mut World) {
        for host in 0..world.hosts.len() {
            while let Some(event) = world.hosts[host].events.pop_front() {
                world.trace.line(world.kernel.now(), || format!("host {host}: {event:?}"));
                if let Event::Completion { .. } | Event::Tcp { .. } = event {
                    world.violate(|| format!("host {host}: {event:?}, which nobody asked for"));
                }
            }
        }
    }

    fn is_done(&self, world: &World) -> bool {
        self.nodes.iter().all(|node| {
            let outstanding = node.core.outstanding(node.endpoint).unwrap_or(0);
            let waits = node.core.has_messages(node.bundle).unwrap_or(false);
            let runs = !node.running.is_empty() || !node.given.is_empty();
            let idle = node.left == 0 && outstanding == 0 && !runs && !waits;
            idle || !world.hosts[node.host].alive
        })
    }

    /// What a run that makes no progress waits for.
    fn describe(&self, world: &World) -> String {
        let mut text = String::from("no progress:");
        for (n, node) in self.nodes.iter().enumerate() {
            let outstanding = node.core.outstanding(node.endpoint).unwrap_or(0);
            let (left, running, links) = (node.left, node.running.len(), node.links.len());
            text += &format!(
                "\n  process {n}, alive {}: {left} to be sent, {outstanding} under way, {running} handlers \
                 run, {links} connections",
                world.hosts[node.host].alive
            );
        }
        text
    }

    /// Frees everything; no connection is left.
    fn tear_down(&mut self, world: &mut World) {
        for n in 0..self.nodes.len() {
            let node = &mut self.nodes[n];
            if !world.hosts[node.host].alive {
                continue;
            }
            if let Err(error) = node.core.free_bundle(node.bundle) {
                return world
                    .violate(|| format!("process {n}: the bundle cannot be freed: {error}"));
            }
            self.carry_out(world, n);
            let (links, provided) =
                (self.nodes[n].links.len(), self.nodes[n].core.fabric().slots());
            let lanes = self.nodes[n].core.fabric_mut().lanes();
            if lanes.is_some_and(|lanes| lanes.has_overflowed) {
                world.violate(|| format!("process {n}: more than a lane has room for"));
            }
            if links > 0 || provided > MOST_SLOTS {
                world.violate(|| {
                    format!("process {n}: {links} connections and {provided} slots left")
                });
            }
        }
    }
}
