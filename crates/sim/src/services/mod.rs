//! Programs of the services beside reliable connections: datagrams, unreliable connections, extended reliable
//! connections, plain iWARP.
//!
//! Each message says which one it is, in its first bytes or its immediate data, or is known by its place in
//! the order, so that a receiver knows what must be in it and that it did not come before. What may be lost
//! differs: see `check`.

mod check;
mod drive;
mod end;
mod landing;
mod mishaps;
pub(crate) mod model;
mod placement;
mod setup;

use std::collections::{BTreeMap, VecDeque};

use quipu_nic::{Completion, QpNum};

use crate::options::{Options, Service};
use crate::plan::Plan;
use crate::rng::Rng;
use crate::world::{LoadEvent, World};
use landing::Write;
use model::{Actor, Group, Message, Objects, Pool, Queue, Slot};

pub use end::go;

/// Something that happens in the middle of a run.
#[derive(Clone, Copy, Debug)]
enum Mishap {
    /// A program takes its queue pair to ERR.
    ToError { actor: usize },
    /// A program destroys its queue pair.
    Destroy { actor: usize },
    /// An engine ends, with its machine or alone.
    Kill { host: usize, silent: bool },
    /// Strangers send datagrams.
    Nonsense { host: usize },
}

/// All programs of a run, and what they know.
pub struct Services {
    pub plan: Plan,
    service: Service,
    /// Plain iWARP goes over the adapters' own TCP.
    over_link: bool,
    rng: Rng,
    actors: Vec<Actor>,
    pools: Vec<Pool>,
    slots: Vec<Slot>,
    messages: Vec<Message>,
    /// Messages by the identifier of their request.
    message_of: BTreeMap<u64, usize>,
    groups: Vec<Group>,
    objects: Vec<Objects>,
    queues: Vec<Queue>,
    by_num: BTreeMap<(usize, QpNum), usize>,
    /// Messages under way from an actor to a pool, in order.
    expected: BTreeMap<(usize, usize), VecDeque<usize>>,
    /// Writes that were not seen at their peer yet, in the order in which they were posted.
    writes: Vec<Write>,
    mishaps: Vec<Mishap>,
    /// Weights of Send, Send with immediate, Write, Write with immediate, Read, atomic write, flush.
    weights: [u32; 7],
    max_len: usize,
    /// Every message finds a receive.
    ample: bool,
    /// Nothing disturbs: whatever is sent arrives.
    calm: bool,
    next_id: u64,
    teardown: bool,
    polled: Vec<Completion>,
    pub tally: Tally,
}

/// What a run counts.
#[derive(Clone, Copy, Debug, Default)]
pub struct Tally {
    pub ops: u64,
    pub completions: u64,
    pub errors: u64,
    pub bytes: u64,
    pub faults: u32,
}

impl Services {
    /// The programs of a plan.
    pub fn new(plan: Plan, service: Service, mut rng: Rng, options: &Options) -> Self {
        let profile = &plan.profile;
        let calm = plan.mishaps == 0
            && plan.partition_percent == 0
            && profile.loss_ppm + profile.duplicate_ppm + profile.corrupt_ppm == 0;
        let over_link = service == Service::IwarpTcp;
        let service = if over_link { Service::Iwarp } else { service };
        let mut weights = [0; 7];
        let kinds = if service == Service::Xrc { 7 } else { 5 };
        weights[..kinds].fill_with(|| rng.below(4) as u32);
        weights[0] += 1;
        let most = plan.max_len.min(options.max_bytes as usize / 8);
        Self {
            service,
            over_link,
            max_len: most.min(rng.pick(&[64, 1_500, 20_000, 70_000])),
            ample: rng.percent(50),
            calm,
            weights,
            plan,
            rng,
            actors: Vec::new(),
            pools: Vec::new(),
            slots: Vec::new(),
            messages: Vec::new(),
            message_of: BTreeMap::new(),
            groups: Vec::new(),
            objects: Vec::new(),
            queues: Vec::new(),
            by_num: BTreeMap::new(),
            expected: BTreeMap::new(),
            writes: Vec::new(),
            mishaps: Vec::new(),
            next_id: 1,
            teardown: false,
            polled: vec![Completion::default(); 64],
            tally: Tally::default(),
        }
    }

    fn new_id(&mut self) -> u64 {
        self.next_id += 1;
        self.next_id - 1
    }

    /// Notes what explains failures of a connection, at both ends.
    fn cause(&mut self, actor: usize, what: &str) {
        for end in [actor, self.actors[actor].peer] {
            let cause = &mut self.actors[end].cause;
            *cause = Some(cause.take().map_or(String::new(), |cause| cause + "; ") + what);
        }
    }

    /// Whether a stream of a connection was damaged.
    fn is_damaged(&self, world: &World, actor: usize) -> bool {
        let ends = [actor, self.actors[actor].peer].map(|end| &self.actors[end]);
        ends.iter().any(|end| world.net.damaged.contains(&(end.host, end.qp)))
    }

    /// Handles an event of the workload.
    fn handle(&mut self, world: &mut World, event: LoadEvent) {
        if let Err(what) = self.check_words() {
            return world.violate(|| what);
        }
        match event {
            LoadEvent::Tick { end } => self.tick(world, end),
            LoadEvent::Poll { cq } => self.poll(world, cq),
            LoadEvent::Connect { end } => self.connect_step(world, end),
            LoadEvent::Fault { index } => self.mishap(world, index),
            LoadEvent::Refill { pool } => self.refill_and_go_on(world, pool),
            LoadEvent::Rebirth { .. } | LoadEvent::Post { .. } => {}
        }
    }
}
