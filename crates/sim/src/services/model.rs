//! What must be: queue pairs, receives and messages of the services beside reliable connections.

use std::collections::{BTreeMap, VecDeque};
use std::sync::{Arc, PoisonError};

use quipu_nic::mem::Segment;
use quipu_nic::{
    Access, AhId, CqId, Gid, Key, MrId, PdId, QpAttr, QpId, QpNum, QpType, Sge, SrqId, WcExtra,
    WcOpcode, WcStatus, XrcdId,
};

use crate::world::World;

/// Bytes on either side of a slot that nobody may touch.
const GUARD: usize = 32;
/// What a byte is that nothing was written to.
const FILL: u8 = 0xa5;

/// What a slot must hold.
#[derive(Clone)]
pub enum Contents {
    /// Nothing was written.
    Untouched,
    /// These bytes, and behind them nothing was written.
    Holds(Arc<[u8]>),
    /// Each byte is one of these, or was not written.
    Maybe(Arc<[u8]>),
    /// These bytes, or none of them was written.
    Whole(Arc<[u8]>),
    /// A message may have begun in it.
    Unknown,
}

/// Registered memory of its own for each receive, source and target, with guard bytes around it.
pub struct Slot {
    pub host: usize,
    pub mr: MrId,
    key: u32,
    addr: u64,
    segment: Segment,
    len: usize,
    pub contents: Contents,
}

impl Slot {
    /// Memory for `len` bytes, which is still to be registered: its region.
    fn new(host: usize, addr: u64, len: usize) -> (Self, Option<Segment>) {
        let segment = Segment::heap(len + 2 * GUARD);
        let filled = segment.write(0, &vec![FILL; segment.len()]);
        let region = filled.and_then(|()| segment.slice(GUARD, len)).ok();
        let (mr, contents) = (MrId(0), Contents::Untouched);
        (Self { host, mr, key: 0, addr, segment, len, contents }, region)
    }

    /// Makes memory and registers it; none if it is refused.
    pub fn make(
        world: &mut World,
        host: usize,
        pd: PdId,
        addr: u64,
        len: usize,
        access: Access,
    ) -> Option<Self> {
        let (mut slot, region) = Self::new(host, addr, len);
        let host = &mut world.hosts[host];
        let region = host.adapter.reg_segment(pd, &region?, Some(addr), access).ok()?;
        (slot.mr, slot.key) = (region.id, region.key.0);
        host.space.lock().unwrap_or_else(PoisonError::into_inner).map(&slot.segment);
        Some(slot)
    }

    pub fn key(&self) -> u32 {
        self.key
    }

    pub fn len(&self) -> usize {
        self.len
    }

    pub fn addr(&self) -> u64 {
        self.addr
    }

    /// A list of up to `count` elements of any lengths for the first `len` bytes.
    pub fn list(&self, len: usize, cuts: &[usize]) -> Vec<Sge> {
        let mut list = Vec::new();
        let mut at = 0;
        for &cut in cuts.iter().chain([&len]) {
            let end = cut.clamp(at, len);
            let addr = self.addr + at as u64;
            list.push(Sge { addr, len: (end - at) as u32, lkey: Key(self.key) });
            at = end;
        }
        list
    }

    /// The program writes.
    pub fn fill(&mut self, bytes: &Arc<[u8]>) {
        let _ = self.segment.write(GUARD, bytes);
        self.contents = Contents::Holds(bytes.clone());
    }

    /// The program is done with it, and gives it to another receive.
    pub fn clear(&mut self) {
        let _ = self.segment.write(GUARD, &vec![FILL; self.len]);
        self.contents = Contents::Untouched;
    }

    /// What is in it stays: nobody may write to it any more.
    pub fn freeze(&mut self) {
        self.contents = Contents::Holds(self.bytes(self.len).into());
    }

    /// Its first bytes.
    pub fn bytes(&self, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len.min(self.len)];
        let _ = self.segment.read(GUARD, &mut bytes);
        bytes
    }

    /// Compares it with what must be.
    pub fn check(&self) -> Result<(), String> {
        let mut all = vec![0; self.segment.len()];
        let _ = self.segment.read(0, &mut all);
        let (before, rest) = all.split_at(GUARD);
        let (body, behind) = rest.split_at(self.len);
        if before.iter().chain(behind).any(|&byte| byte != FILL) {
            return Err(format!(
                "host {}: bytes around key {:#x} were written",
                self.host, self.key
            ));
        }
        let (must, or_fill): (&[u8], bool) = match &self.contents {
            Contents::Untouched => (&[], false),
            Contents::Holds(bytes) => (bytes, false),
            Contents::Maybe(bytes) => (bytes, true),
            Contents::Whole(_) if body.iter().all(|&byte| byte == FILL) => return Ok(()),
            Contents::Whole(bytes) => (bytes, false),
            Contents::Unknown => return Ok(()),
        };
        for (at, &byte) in body.iter().enumerate() {
            let right = byte == must.get(at).copied().unwrap_or(FILL);
            if !(right || or_fill && byte == FILL) {
                let (host, key) = (self.host, self.key);
                return Err(format!("host {host}: byte {at} of key {key:#x} is {byte:#04x}"));
            }
        }
        Ok(())
    }
}

/// How far an actor is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stage {
    Init,
    Rtr,
    Rts,
    /// In error, or gone, or its host is dead: it takes no more requests.
    Over,
}

/// A queue pair, and the program that uses it.
pub struct Actor {
    pub host: usize,
    pub qp_type: QpType,
    pub qp: QpId,
    pub num: QpNum,
    pub pd: PdId,
    pub send_cq: usize,
    /// The other end of its connection.
    pub peer: usize,
    /// Where messages for it find receives: its own, a shared one, or those that peers may name.
    pub pools: Vec<usize>,
    pub attr: QpAttr,
    pub stage: Stage,
    /// It exists in its adapter, which lives.
    pub exists: bool,
    pub sent: VecDeque<Sent>,
    pub ops_left: u32,
    pub depth: usize,
    /// A request has failed: all others are flushed.
    pub failed: bool,
    /// What explains failures of its connection.
    pub cause: Option<String>,
    /// At this many requests left one is posted that fails.
    pub trap_at: Option<u32>,
    pub idle: u32,
}

/// A send request that was posted and whose fate is not known.
pub struct Sent {
    pub id: u64,
    pub opcode: WcOpcode,
    pub signaled: bool,
    pub len: usize,
    /// The message, if it consumes a receive.
    pub message: Option<usize>,
    /// The slot that it writes at the peer.
    pub target: Option<usize>,
    /// The slot that it flushes there.
    pub flushes: Option<usize>,
    /// The slot that it reads into, and what must be there then.
    pub sink: Option<(usize, Arc<[u8]>)>,
    /// Statuses that it is made to fail with.
    pub trap: Vec<WcStatus>,
}

/// A receive queue: of a queue pair, or a shared one.
pub struct Pool {
    pub host: usize,
    /// The queue pair that owns it.
    pub owner: Option<usize>,
    pub srq: Option<SrqId>,
    /// The number by which peers name it (XRC).
    pub number: u32,
    pub pd: PdId,
    pub cq: usize,
    /// How many receives it holds, and how many more are posted to it at most.
    pub depth: usize,
    pub budget: usize,
    pub room: usize,
    /// Some receives are shorter.
    pub uneven: bool,
    /// Identifiers and slots of what is posted, oldest first.
    pub posted: VecDeque<(u64, usize)>,
    /// A queue pair that took receives is gone, and what it took completes never.
    pub robbed: bool,
    pub idle: u32,
}

/// A message that consumes a receive.
pub struct Message {
    pub from: usize,
    /// The actors that may get it, each once for each copy that the network made.
    pub to: Vec<usize>,
    pub opcode: WcOpcode,
    pub extra: WcExtra,
    pub payload: Arc<[u8]>,
    /// A write with immediate data: the slot that it fills.
    pub target: Option<usize>,
    /// Its request completed with success.
    pub done: bool,
    /// Who got it how often.
    pub arrived: BTreeMap<usize, u32>,
}

/// A multicast group and the actors that are attached to it.
pub struct Group {
    pub gid: Gid,
    pub members: Vec<usize>,
}

/// The objects of a host.
#[derive(Default)]
pub struct Objects {
    pub pds: Vec<PdId>,
    pub domains: Vec<XrcdId>,
    pub ahs: BTreeMap<(PdId, Gid), AhId>,
}

/// A completion queue, which is polled.
pub struct Queue {
    pub host: usize,
    pub id: CqId,
    pub poll_ns: u64,
    pub batch: usize,
    pub idle: u32,
}
