//! Programs of QPIP: queue pairs whose messages are segments and datagrams, on a network of IP packets.
//!
//! What an end of a connection sends is a stream of bytes that belongs to it: each byte is known by its
//! offset, and so a receiver knows what must be in a receive, wherever the stream was cut. In message mode it
//! knows besides where it must have been cut.
//!
//! A queue pair that is used again is another end: what it sends is another stream.

mod check;
mod datagrams;
mod drive;
mod end;
mod events;
mod model;
mod ports;
mod rebirth;
mod setup;

use std::collections::BTreeMap;

use quipu_nic::{Completion, Gid, MrId, PdId, QpNum};

use crate::plan::Plan;
use crate::rng::Rng;
use crate::services::Tally;
use crate::services::model::{Queue, Slot};
use crate::world::{LoadEvent, World};
use datagrams::Datagrams;
use model::End;
use ports::Port;

pub use end::go;
pub use model::stream;

/// Something that happens in the middle of a run.
#[derive(Clone, Copy, Debug)]
enum Mishap {
    /// A program ends its connection at once.
    Abort { end: usize },
    /// A program takes its queue pair to ERR.
    ToError { end: usize },
    /// A program destroys its queue pair.
    Destroy { end: usize },
    /// An engine ends, with its machine or alone.
    Kill { host: usize, silent: bool },
    /// Something happens to a UDP queue pair.
    Post { post: usize, how: u8 },
}

/// All programs of a run, and what they know.
pub struct Programs {
    plan: Plan,
    rng: Rng,
    /// From when on nothing disturbs, in nanoseconds.
    calm_ns: u64,
    ends: Vec<End>,
    slots: Vec<Slot>,
    /// Memory that was registered.
    regions: Vec<(usize, MrId)>,
    pds: Vec<PdId>,
    queues: Vec<Queue>,
    by_num: BTreeMap<(usize, QpNum), usize>,
    /// What is listened at.
    ports: Vec<Port>,
    /// Who has last connected from an address and a port to a port of a host.
    callers: BTreeMap<(Gid, u16, usize, u16), usize>,
    /// When the latest queue pair was used again, in nanoseconds.
    reborn_ns: u64,
    datagrams: Datagrams,
    mishaps: Vec<Mishap>,
    max_len: usize,
    next_id: u64,
    teardown: bool,
    polled: Vec<Completion>,
    pub tally: Tally,
}

impl Programs {
    /// The programs of a plan.
    pub fn new(plan: Plan, mut rng: Rng, max_bytes: u64) -> Self {
        let most = plan.max_len.min(max_bytes as usize / 8).max(1);
        Self {
            calm_ns: rng.pick(&[20_000_000, 500_000_000, 5_000_000_000, 30_000_000_000]),
            max_len: most.min(rng.pick(&[64, 1_400, 9_000, 70_000, 300_000])),
            plan,
            rng,
            ends: Vec::new(),
            slots: Vec::new(),
            regions: Vec::new(),
            pds: Vec::new(),
            queues: Vec::new(),
            by_num: BTreeMap::new(),
            ports: Vec::new(),
            callers: BTreeMap::new(),
            reborn_ns: 0,
            datagrams: Datagrams::default(),
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

    /// Handles an event of the workload.
    fn handle(&mut self, world: &mut World, event: LoadEvent) {
        if self.teardown {
            return;
        }
        match event {
            LoadEvent::Tick { end } => self.tick(world, end),
            LoadEvent::Poll { cq } => self.poll(world, cq),
            LoadEvent::Connect { end } => self.open(world, end),
            LoadEvent::Refill { pool } => self.refill_and_go_on(world, pool),
            LoadEvent::Fault { index } => self.mishap(world, index),
            LoadEvent::Post { post } => self.post_tick(world, post),
            LoadEvent::Rebirth { end } => self.rebirth(world, end),
        }
    }
}
