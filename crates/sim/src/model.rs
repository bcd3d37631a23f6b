//! What must be: the oracle's picture of queue pairs, work requests and memory.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

use quipu_nic::mem::Segment;
use quipu_nic::{
    CqId, MrId, MwId, PdId, QpAttr, QpCap, QpId, QpNum, Sge, SrqId, WcExtra, WcOpcode, WcStatus,
};

/// A registered region inside a segment, with guard bytes around it, and what each byte must be.
pub struct Arena {
    pub host: usize,
    pub segment: Segment,
    pub mr: MrId,
    pub key: u32,
    /// The address of the segment's first byte, as the region counts.
    pub base: u64,
    /// First byte and length of the region in the segment.
    pub start: usize,
    pub len: usize,
    /// The next byte that was not handed out.
    pub next: usize,
    /// What each byte of the segment is.
    pub shadow: Vec<u8>,
    /// What some bytes may be instead, since a request failed that may have been executed.
    pub maybe: Vec<(usize, Arc<[u8]>)>,
    /// The same of words that are written as a whole or not at all.
    pub words: Vec<(usize, Arc<[u8]>)>,
    /// Ranges of which nothing is known: receives that failed.
    pub wild: Vec<(usize, usize)>,
}

/// A part of an arena.
#[derive(Clone, Copy, Debug)]
pub struct Piece {
    pub arena: usize,
    pub at: usize,
    pub len: usize,
}

impl Arena {
    /// The address that work requests use for byte `at` of the segment.
    pub fn addr(&self, at: usize) -> u64 {
        self.base.wrapping_add(at as u64)
    }

    /// A scatter/gather element for a part.
    pub fn sge(&self, at: usize, len: usize) -> Sge {
        Sge { addr: self.addr(at), len: len as u32, lkey: quipu_nic::Key(self.key) }
    }

    /// Whether there is a reason for which byte `at` of `bytes`, which are all of the segment, may be another
    /// than it must.
    pub fn excuses(&self, bytes: &[u8], at: usize) -> bool {
        let partly = |at: usize| {
            self.wild.iter().any(|&(start, len)| (start..start + len).contains(&at))
                || self.maybe.iter().any(|(start, maybe)| {
                    at.checked_sub(*start).and_then(|offset| maybe.get(offset)) == Some(&bytes[at])
                })
        };
        let whole = |(start, word): &(usize, Arc<[u8]>)| {
            let mut places = (*start..).zip(word.iter());
            (*start..start + word.len()).contains(&at)
                && places.all(|(at, &byte)| bytes[at] == byte || partly(at))
        };
        partly(at) || self.words.iter().any(whole)
    }

    /// Compares the segment with what must be; the first byte that is wrong.
    pub fn check(&self) -> Result<(), String> {
        let mut bytes = vec![0; self.segment.len()];
        self.segment.read(0, &mut bytes).map_err(|error| error.to_string())?;
        if bytes == self.shadow {
            return Ok(());
        }
        for (at, (&is, &must)) in bytes.iter().zip(&self.shadow).enumerate() {
            if is != must && !self.excuses(&bytes, at) {
                let place = if (self.start..self.start + self.len).contains(&at) {
                    "the region"
                } else {
                    "the guard zone"
                };
                return Err(format!(
                    "host {}: byte {at} of {place} {:#x} (region at {}, {} bytes) is {is:#04x}, \
                     must be {must:#04x}",
                    self.host, self.key, self.start, self.len
                ));
            }
        }
        Ok(())
    }
}

/// A send request that was posted and whose fate is not known yet.
pub struct Sent {
    pub id: u64,
    pub opcode: WcOpcode,
    pub len: usize,
    pub signaled: bool,
    pub fenced: bool,
    /// What it writes into the peer's memory: arena, place, bytes.
    pub effect: Option<(usize, usize, Arc<[u8]>)>,
    /// That is one word, which is written as a whole or not at all.
    pub whole: bool,
    /// What it flushes: arena, place and length.
    pub flushes: Option<(usize, usize, usize)>,
    /// What it reads: arena and place.
    pub source: Option<(usize, usize)>,
    /// Where the answer goes and what it must be.
    pub sink: Option<(Vec<Piece>, Arc<[u8]>)>,
    /// It adds this to a shared counter: which one, how much; its sink is the original.
    pub counter: Option<(usize, u64)>,
    /// It is made to fail, with one of these.
    pub trap: Option<Vec<WcStatus>>,
    /// A window that it binds, invalidates or uses.
    pub window: Option<(usize, WindowUse)>,
    /// Posted while the send queue was stopped.
    pub while_drained: bool,
}

/// What a request does with a window.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WindowUse {
    Bind,
    Invalidate,
    Access,
}

/// A receive that was posted.
pub struct Recv {
    pub id: u64,
    pub pieces: Vec<Piece>,
}

/// A message that will consume a receive.
pub struct Expected {
    /// The send request.
    pub id: u64,
    pub opcode: WcOpcode,
    pub extra: WcExtra,
    pub byte_len: usize,
    /// The bytes that the receive gets.
    pub payload: Arc<[u8]>,
    /// It asks for an event.
    pub solicited: bool,
}

/// How far an end is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stage {
    Init,
    Rtr,
    Rts,
    Sqd,
    /// Reset, destroyed, or its host is dead: nothing more is known of it.
    Gone,
}

/// One end of a connection: a queue pair.
pub struct End {
    pub host: usize,
    pub pd: PdId,
    pub pd_index: usize,
    pub qp: QpId,
    pub num: QpNum,
    /// The other end, which may be this one.
    pub peer: usize,
    pub pair: usize,
    pub cap: QpCap,
    pub attr: QpAttr,
    pub sig_all: bool,
    pub send_cq: usize,
    pub recv_cq: usize,
    pub srq: Option<usize>,
    pub stage: Stage,
    /// The queue pair still exists in its adapter.
    pub exists: bool,
    pub sq: VecDeque<Sent>,
    pub rq: VecDeque<Recv>,
    pub inbound: VecDeque<Expected>,
    /// The arena that the peer's remote operations go to.
    pub target: usize,
    pub ops_left: u32,
    /// The longest Send of this end, and the shortest room of a receive of this end.
    pub max_send: usize,
    pub recv_room: usize,
    pub recv_depth: usize,
    /// How long a program waits at most between two things that it does.
    pub tick_ns: u64,
    /// Percent of ticks at which it posts receives.
    pub recv_percent: u64,
    pub recvs_posted: u64,
    pub messages_in: u64,
    /// There were fewer receives than messages at some time.
    pub starved: bool,
    /// The status of the first send that failed.
    pub failed: Option<WcStatus>,
    /// Something failed, a send or a receive: nothing more is posted.
    pub broken: bool,
    /// It failed in a way that needs a cause elsewhere.
    pub collateral: Option<String>,
    pub drain_seen: bool,
    pub drain_owed: bool,
    /// The queue pair was draining when its last connection ended: it may have drained just before.
    pub drain_inherited: bool,
    pub ticking: bool,
    /// Ticks in a row at which there was nothing to do.
    pub idle: u32,
    /// The sink of the last read, for a fenced send of what was read.
    pub last_read: Option<(Vec<Piece>, Arc<[u8]>)>,
    /// At this many requests left the trap is posted.
    pub trap_at: Option<u32>,
    /// The end whose queue pair this one takes over.
    pub before: Option<usize>,
}

impl End {
    /// An end of the same shape with which nothing has happened.
    pub fn fresh(&self) -> Self {
        Self {
            host: self.host,
            pd: self.pd,
            pd_index: self.pd_index,
            qp: self.qp,
            num: self.num,
            peer: self.peer,
            pair: self.pair,
            cap: self.cap,
            attr: self.attr,
            sig_all: self.sig_all,
            send_cq: self.send_cq,
            recv_cq: self.recv_cq,
            srq: self.srq,
            stage: Stage::Init,
            exists: true,
            sq: VecDeque::new(),
            rq: VecDeque::new(),
            inbound: VecDeque::new(),
            target: self.target,
            ops_left: 0,
            max_send: self.max_send,
            recv_room: self.recv_room,
            recv_depth: self.recv_depth,
            tick_ns: self.tick_ns,
            recv_percent: self.recv_percent,
            recvs_posted: 0,
            messages_in: 0,
            starved: false,
            failed: None,
            broken: false,
            collateral: None,
            drain_seen: false,
            drain_owed: false,
            drain_inherited: false,
            ticking: false,
            idle: 0,
            last_read: None,
            trap_at: None,
            before: None,
        }
    }
}

/// A connection.
pub struct Pair {
    pub ends: [usize; 2],
    /// What has happened that explains errors on both ends.
    pub causes: Vec<String>,
    /// Statuses that the cause explains, beside those of a broken connection.
    pub explains: Vec<WcStatus>,
    /// The status that a receive may fail with, because of a trap.
    pub recv_trap: Vec<WcStatus>,
    /// The end whose trap is the only thing that can go wrong.
    pub trap: Option<usize>,
    pub done: bool,
}

/// A completion queue.
pub struct CompletionQueue {
    pub host: usize,
    pub id: CqId,
    /// Programs wait for its events; otherwise it is polled.
    pub by_event: bool,
    pub scheduled: bool,
    pub poll_ns: u64,
    /// Looks in vain in a row.
    pub idle: u32,
    pub batch: usize,
    /// What its next event is to tell of, and whether it came.
    pub asked: Asked,
    pub told: bool,
    /// What the program has found since it asked.
    pub found: Asked,
}

/// The completions that an event is to tell of: none, any, those that answer a solicitation or failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Asked {
    Nothing,
    Any,
    Solicited,
}

/// A shared receive queue.
pub struct SharedQueue {
    pub host: usize,
    pub id: SrqId,
    pub pd_index: usize,
    pub max_sge: usize,
    pub depth: usize,
    pub room: usize,
    pub posted: BTreeMap<u64, Recv>,
    /// Receives at most that went with a queue pair that was reset or destroyed, unknown which.
    pub lost: usize,
    /// Where the next receive goes, if one was made for which there was no room.
    pub spare: Option<Vec<Piece>>,
    pub recvs_posted: u64,
    pub messages_in: u64,
    /// It raises an event when fewer are left; whether they were, and whether it did.
    pub limit: usize,
    pub fell: bool,
    pub limit_told: bool,
}

/// What a window is good for now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WindowState {
    Free,
    Binding,
    Bound,
    Ending,
}

/// A type 2 memory window on the target of its owner.
pub struct Window {
    pub owner: usize,
    pub mw: MwId,
    pub key: u32,
    pub state: WindowState,
    pub zero_based: bool,
    /// Place in the target's segment.
    pub at: usize,
    pub len: usize,
    /// Requests in progress that use it.
    pub users: u32,
}

/// A word that several queue pairs add to.
pub struct Counter {
    pub arena: usize,
    pub at: usize,
    pub first: u64,
    /// Original value and addend of every addition that succeeded.
    pub done: Vec<(u64, u64)>,
    /// Additions of unknown fate.
    pub unknown: Vec<u64>,
}

impl Counter {
    /// Checks that the additions took place one after another.
    pub fn check(&self, last: u64) -> Result<(), String> {
        let sum = self.done.iter().fold(self.first, |sum, &(_, add)| sum.wrapping_add(add));
        // What is added is random: no value comes twice, whatever else was added.
        let mut steps: BTreeMap<u64, u64> = BTreeMap::new();
        for &(original, add) in &self.done {
            if steps.insert(original, add).is_some() {
                return Err(format!("two additions saw {original:#x}"));
            }
        }
        if self.unknown.is_empty() {
            let mut value = self.first;
            while let Some(add) = steps.remove(&value) {
                value = value.wrapping_add(add);
            }
            if !steps.is_empty() || value != last {
                return Err(format!(
                    "additions do not form a chain: {} left over, {value:#x} is {last:#x}",
                    steps.len()
                ));
            }
            return Ok(());
        }
        // Some of those of unknown fate took place; which, cannot be told for many.
        if self.unknown.len() > 12 {
            return Ok(());
        }
        let explained = (0u32..1 << self.unknown.len()).any(|subset| {
            let more = self.unknown.iter().enumerate().filter(|(bit, _)| subset >> bit & 1 == 1);
            more.fold(sum, |sum, (_, add)| sum.wrapping_add(*add)) == last
        });
        if explained { Ok(()) } else { Err(format!("the counter is {last:#x}")) }
    }
}
