//! The workload: programs that use the adapters, drawn from a seed.

use std::collections::BTreeMap;
use std::sync::Arc;

use quipu_nic::mem::Segment;
use quipu_nic::{Access, Completion, MrId, PdId, QpNum, Sge};

use crate::limits::MOST_EVENTS;
use crate::model::{
    Arena, CompletionQueue, Counter, End, Expected, Pair, Piece, Recv, SharedQueue, Stage, Window,
};
use crate::options::Options;
use crate::plan::Plan;
use crate::rng::{Rng, mix};
use crate::world::{LoadEvent, World, WorldEvent};

/// Kinds of arenas that pieces are handed out from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Use {
    /// Payload to be sent: the adapter may only read it.
    Source,
    /// Receives and answers: the adapter may write it, peers may not.
    Sink,
}

/// Ticks in a row in which a program does nothing.
const PATIENCE: u32 = 16;
/// Longest pause between two looks of a program that waits.
pub const LONGEST_TICK_NS: u64 = 5_000_000;

/// All programs of a run, and what they know.
pub struct Load {
    pub plan: Plan,
    pub rng: Rng,
    pub ends: Vec<End>,
    pub pairs: Vec<Pair>,
    pub cqs: Vec<CompletionQueue>,
    pub srqs: Vec<SharedQueue>,
    pub arenas: Vec<Arena>,
    pub windows: Vec<Window>,
    pub counters: Vec<Counter>,
    pub pds: Vec<Vec<PdId>>,
    /// Queue pairs by host and number.
    pub by_num: BTreeMap<(usize, QpNum), usize>,
    current: BTreeMap<(usize, usize, Use), usize>,
    pub bytes_left: u64,
    pub next_id: u64,
    /// Operations that completed with success, by the identifier of their request; for the last check.
    pub succeeded: Vec<bool>,
    pub completions: u64,
    pub errors: u64,
    pub polled: Vec<Completion>,
    pub teardown: bool,
    pub faults_done: u32,
    pub mishaps: Vec<crate::plan::Mishap>,
    /// The end whose next receive names memory that it may not.
    pub bad_receive: Option<usize>,
    pub ops: u64,
    pub bytes: u64,
    /// Access to the memory of some engine is denied.
    pub denied: bool,
}

impl Load {
    /// The programs of a plan, which [`set_up`](Self::set_up) starts.
    pub fn new(plan: Plan, rng: Rng, options: &Options) -> Self {
        Self {
            plan,
            rng,
            ends: Vec::new(),
            pairs: Vec::new(),
            cqs: Vec::new(),
            srqs: Vec::new(),
            arenas: Vec::new(),
            windows: Vec::new(),
            counters: Vec::new(),
            pds: Vec::new(),
            by_num: BTreeMap::new(),
            current: BTreeMap::new(),
            bytes_left: options.max_bytes,
            next_id: 1,
            succeeded: vec![false],
            completions: 0,
            errors: 0,
            polled: vec![Completion::default(); 64],
            teardown: false,
            faults_done: 0,
            mishaps: Vec::new(),
            bad_receive: None,
            ops: 0,
            bytes: 0,
            denied: false,
        }
    }

    /// A new identifier for a work request.
    pub fn new_id(&mut self) -> u64 {
        let id = self.next_id;
        self.next_id += 1;
        self.succeeded.push(false);
        id
    }

    /// Makes and registers an arena of `len` usable bytes.
    pub fn new_arena(
        &mut self,
        world: &mut World,
        host: usize,
        pd_index: usize,
        len: usize,
        access: Access,
    ) -> usize {
        let start = 64 + 8 * self.rng.index(9);
        let segment = Segment::heap(start + len + 64);
        let salt = self.rng.next();
        let mut shadow = Vec::with_capacity(segment.len() + 8);
        let mut word = 0;
        while shadow.len() < segment.len() {
            shadow.extend_from_slice(&mix(salt, word).to_le_bytes());
            word += 1;
        }
        shadow.truncate(segment.len());
        // Windows cannot be bound to a zero based region.
        let zero_based = self.rng.percent(10) && !access.contains(Access::MW_BIND);
        let iova = match self.rng.below(8) {
            0 => (u64::MAX - len as u64) & !7,
            1 => 4096,
            _ => 0x10_0000_0000 + (self.rng.below(1 << 40) & !7),
        };
        let access = if zero_based { access | Access::ZERO_BASED } else { access };
        let base = if zero_based { 0 } else { iova }.wrapping_sub(start as u64);
        let made = segment.write(0, &shadow).and_then(|()| segment.slice(start, len));
        let (mr, key) = match made {
            Ok(region) => {
                let pd = self.pds[host][pd_index];
                match world.hosts[host].adapter.reg_segment(pd, &region, Some(iova), access) {
                    Ok(region) => (region.id, region.key.0),
                    Err(fault) => {
                        world.violate(|| format!("a region is refused: {fault}"));
                        (MrId(0), 0)
                    }
                }
            }
            Err(error) => {
                world.violate(|| format!("no segment: {error}"));
                (MrId(0), 0)
            }
        };
        let host_state = &world.hosts[host];
        host_state.space.lock().unwrap_or_else(std::sync::PoisonError::into_inner).map(&segment);
        world.trace.note(&[20, host as u64, u64::from(key), len as u64]);
        self.arenas.push(Arena {
            host,
            segment,
            mr,
            key,
            base,
            start,
            len,
            next: start,
            shadow,
            maybe: Vec::new(),
            words: Vec::new(),
            wild: Vec::new(),
        });
        self.arenas.len() - 1
    }

    /// Hands out `len` bytes.
    pub fn allocate(
        &mut self,
        world: &mut World,
        host: usize,
        pd_index: usize,
        what: Use,
        len: usize,
        align: usize,
    ) -> Piece {
        let gap = self.rng.index(24);
        let fits = |arena: &Arena| {
            let at = (arena.next + gap).next_multiple_of(align);
            (at + len <= arena.start + arena.len).then_some(at)
        };
        let slot = (host, pd_index, what);
        let found = self
            .current
            .get(&slot)
            .and_then(|&arena| fits(&self.arenas[arena]).map(|at| (arena, at)));
        let (arena, at) = match found {
            Some(found) => found,
            None => {
                let size = (len + 64).next_multiple_of(64).max(16 << 10);
                let access = match what {
                    Use::Source => Access::empty(),
                    Use::Sink => Access::LOCAL_WRITE,
                };
                let arena = self.new_arena(world, host, pd_index, size, access);
                self.current.insert(slot, arena);
                let at = self.arenas[arena].start.next_multiple_of(align);
                (arena, at)
            }
        };
        self.arenas[arena].next = at + len;
        Piece { arena, at, len }
    }

    /// Hands out `len` bytes in up to `most` pieces, cut anywhere.
    pub fn allocate_pieces(
        &mut self,
        world: &mut World,
        end: usize,
        what: Use,
        len: usize,
        most: usize,
    ) -> Vec<Piece> {
        let (host, pd_index) = (self.ends[end].host, self.ends[end].pd_index);
        let count = match self.rng.below(4) {
            0 => self.rng.range(1, most.max(1) as u64) as usize,
            1 => most.clamp(1, 3),
            _ => 1,
        };
        if len == 0 && self.rng.percent(50) {
            return Vec::new();
        }
        let mut cuts: Vec<usize> = (1..count).map(|_| self.rng.index(len + 1)).collect();
        cuts.push(len);
        cuts.sort_unstable();
        let mut from = 0;
        cuts.into_iter()
            .map(|to| {
                let part = to - std::mem::replace(&mut from, to);
                self.allocate(world, host, pd_index, what, part, 1)
            })
            .collect()
    }

    /// The scatter/gather list of pieces. The key of an element without bytes is not looked at, so it
    /// may be anything.
    pub fn sges(&mut self, pieces: &[Piece]) -> Vec<Sge> {
        pieces
            .iter()
            .map(|piece| {
                let mut sge = self.arenas[piece.arena].sge(piece.at, piece.len);
                if piece.len == 0 && self.rng.percent(30) {
                    sge.lkey = quipu_nic::Key(self.rng.next() as u32);
                }
                sge
            })
            .collect()
    }

    /// Writes bytes into pieces, as the program that owns them.
    pub fn fill(&mut self, pieces: &[Piece], bytes: &[u8]) {
        let mut rest = bytes;
        for piece in pieces {
            let (now, later) = rest.split_at(piece.len.min(rest.len()));
            let arena = &mut self.arenas[piece.arena];
            arena.shadow[piece.at..piece.at + now.len()].copy_from_slice(now);
            let _ = arena.segment.write(piece.at, now);
            rest = later;
        }
    }

    /// Notes that the adapter must have written bytes into pieces, and compares.
    pub fn expect_bytes(&mut self, pieces: &[Piece], bytes: &[u8]) -> Result<(), String> {
        let mut rest = bytes;
        for piece in pieces {
            let (now, later) = rest.split_at(piece.len.min(rest.len()));
            let arena = &mut self.arenas[piece.arena];
            arena.shadow[piece.at..piece.at + now.len()].copy_from_slice(now);
            let mut is = vec![0; now.len()];
            let _ = arena.segment.read(piece.at, &mut is);
            if let Some(at) = is.iter().zip(now).position(|(is, must)| is != must) {
                let offset = bytes.len() - rest.len() + at;
                return Err(format!(
                    "byte {offset} of {} is {:#04x}, must be {:#04x}",
                    bytes.len(),
                    is[at],
                    now[at]
                ));
            }
            rest = later;
        }
        if rest.is_empty() { Ok(()) } else { Err("more bytes than room".into()) }
    }

    /// Handles an event of the workload.
    pub fn handle(&mut self, world: &mut World, event: LoadEvent) {
        if let Err(what) = self.check_words(world) {
            return world.violate(|| what);
        }
        match event {
            LoadEvent::Tick { end } => self.tick(world, end),
            LoadEvent::Poll { cq } => self.poll(world, cq),
            LoadEvent::Connect { end } => self.connect_step(world, end),
            LoadEvent::Rebirth { end } => self.rebirth(world, end),
            LoadEvent::Fault { index } => self.fault(world, index),
            LoadEvent::Refill { .. } | LoadEvent::Post { .. } => {}
        }
    }

    /// Schedules the next tick of an end.
    pub fn tick_later(&mut self, world: &mut World, end: usize) {
        // Programs that wait look less and less often, so that long waits cost few events.
        let end_state = &mut self.ends[end];
        let after = (1 + self.rng.below(end_state.tick_ns)) << end_state.idle.min(24);
        let after = after.min(LONGEST_TICK_NS.max(end_state.tick_ns));
        end_state.idle += 1;
        end_state.ticking = true;
        world.kernel.after(after, WorldEvent::Load(LoadEvent::Tick { end }));
    }

    /// A program does something: posts receives, posts sends.
    fn tick(&mut self, world: &mut World, e: usize) {
        self.ends[e].ticking = false;
        let host = self.ends[e].host;
        if !world.hosts[host].alive || self.ends[e].stage == Stage::Gone || self.teardown {
            return;
        }
        world.wake(host);
        // However slow the program, it posts receives before its peer's attempts fill the run.
        let posts = self.rng.percent(self.ends[e].recv_percent)
            || self.ends[e].idle > PATIENCE
            || world.kernel.scheduled() > MOST_EVENTS / 5;
        if posts {
            self.post_receives(world, e);
        }
        if matches!(self.ends[e].stage, Stage::Rts | Stage::Sqd) && !self.ends[e].broken {
            self.post_sends(world, e);
        }
        world.serve(host);
        if self.wants_tick(e) {
            self.tick_later(world, e);
        }
    }

    /// Whether an end has more to do.
    fn wants_tick(&self, e: usize) -> bool {
        let end = &self.ends[e];
        !self.pairs[end.pair].done && end.stage != Stage::Gone
    }

    /// How many receives an end or its shared queue lacks.
    fn lacking(&self, e: usize) -> usize {
        let end = &self.ends[e];
        match end.srq {
            Some(srq) => {
                let srq = &self.srqs[srq];
                (srq.depth + srq.lost).saturating_sub(srq.posted.len())
            }
            None => end.recv_depth.saturating_sub(end.rq.len()),
        }
    }

    /// Posts some of the receives that an end lacks.
    pub fn post_receives(&mut self, world: &mut World, e: usize) {
        let lacking = self.lacking(e);
        if lacking == 0 || self.ends[e].broken {
            return;
        }
        let count = 1 + self.rng.index(lacking);
        for _ in 0..count {
            let (room, most) = match self.ends[e].srq {
                Some(srq) => (self.srqs[srq].room, self.srqs[srq].max_sge),
                None => (self.ends[e].recv_room, self.ends[e].cap.max_recv_sge as usize),
            };
            let room = if room == 0 { 0 } else { room + self.rng.index(40) };
            let spare = self.ends[e].srq.and_then(|srq| self.srqs[srq].spare.take());
            let pieces = match spare {
                Some(spare) => spare,
                None => self.allocate_pieces(world, e, Use::Sink, room, most),
            };
            let mut sges = self.sges(&pieces);
            if self.take_bad_receive(e) {
                // The trap of a receive that names memory it may not.
                for sge in &mut sges {
                    sge.lkey = quipu_nic::Key(sge.lkey.0 ^ 0x5a00);
                }
            }
            let id = self.new_id();
            let (host, qp) = (self.ends[e].host, self.ends[e].qp);
            let now = world.time();
            let adapter = &mut world.hosts[host].adapter;
            let posted = match self.ends[e].srq {
                Some(srq) => adapter.post_srq_recv(now, self.srqs[srq].id, id, &sges),
                None => adapter.post_recv(now, qp, id, &sges),
            };
            if posted == Err(quipu_nic::Fault::QueueFull)
                && let Some(srq) = self.ends[e].srq.filter(|&srq| self.srqs[srq].lost > 0)
            {
                // Not all that may be lost were.
                self.srqs[srq].spare = Some(pieces);
                return;
            }
            if let Err(fault) = posted {
                return world.violate(|| format!("end {e}: receive refused: {fault}"));
            }
            self.ends[e].idle = 0;
            world.trace.note(&[21, e as u64, id]);
            let recv = Recv { id, pieces };
            match self.ends[e].srq {
                Some(srq) => {
                    self.srqs[srq].posted.insert(id, recv);
                    self.srqs[srq].recvs_posted += 1;
                }
                None => {
                    self.ends[e].rq.push_back(recv);
                    self.ends[e].recvs_posted += 1;
                }
            }
        }
    }

    /// Notes that a message for `e` was posted, which will consume a receive.
    pub fn expect_message(&mut self, e: usize, expected: Expected) {
        let end = &mut self.ends[e];
        end.inbound.push_back(expected);
        end.messages_in += 1;
        match end.srq {
            Some(index) => {
                let srq = &mut self.srqs[index];
                srq.messages_in += 1;
                if srq.messages_in > srq.recvs_posted {
                    for end in self.ends.iter_mut().filter(|end| end.srq == Some(index)) {
                        end.starved = true;
                    }
                }
            }
            None => end.starved |= end.messages_in > end.recvs_posted,
        }
    }

    /// What `len` bytes at `at` of the target of `e` will be once everything posted to it is executed.
    pub fn foresee(&self, requester: usize, arena: usize, at: usize, len: usize) -> Vec<u8> {
        let mut bytes = self.arenas[arena].shadow[at..at + len].to_vec();
        for sent in &self.ends[requester].sq {
            if let Some((of, start, effect)) = &sent.effect
                && *of == arena
            {
                overlay(&mut bytes, at, *start, effect);
            }
        }
        bytes
    }

    /// Marks a cause that explains errors of a pair.
    pub fn cause(&mut self, pair: usize, what: impl Into<String>) {
        self.pairs[pair].causes.push(what.into());
    }

    /// Whether a stream of a pair was damaged.
    pub fn is_damaged(&self, world: &World, pair: usize) -> bool {
        let ends = self.pairs[pair].ends;
        ends.iter().any(|&e| world.net.damaged.contains(&(self.ends[e].host, self.ends[e].qp)))
    }

    /// An empty payload.
    pub fn nothing() -> Arc<[u8]> {
        Arc::from([])
    }
}

/// Copies the part of `from`, which begins at `start`, that falls into `bytes`, which begins at `at`.
pub fn overlay(bytes: &mut [u8], at: usize, start: usize, from: &[u8]) {
    let (low, high) = (at.max(start), (at + bytes.len()).min(start + from.len()));
    if low < high {
        bytes[low - at..high - at].copy_from_slice(&from[low - start..high - start]);
    }
}
