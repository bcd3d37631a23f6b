//! Places the writes of peers out of order, as adapters may: IBA 9.5 promises nothing of the bytes of a write
//! before a completion that orders them, and RFC 5040 5.5 nothing before delivery. For the strict mode.
//!
//! Some bytes of a write are placed at once, the others when they have been held for a while, or when
//! something comes over the same connection that orders them: a send, an immediate, a read, an atomic, a
//! flush, or its end. A write counts as executed when all its bytes, and those of the writes before it, are
//! placed; so a program that waits for completions, at either end, finds nothing unusual.

use std::collections::{BTreeMap, VecDeque};
use std::ops::Range;

use quipu_mem::{Key, Regions, Sge, Span};

use crate::adapter::{Adapter, Alarm, Hub};
use crate::probe::Probe;
use crate::qp::{Path, Qp};
use crate::receive;
use crate::responder;
use crate::types::{Access, QpId, Time};

/// Most bytes that are held, with what it costs to hold them; then they are placed.
const MOST_HELD: usize = 1 << 20;
/// What a step weighs in addition to its bytes.
const STEP: usize = 128;
/// What adapters write in one piece, where it is aligned.
const WORD: u64 = 8;
/// What is shuffled.
const LINE: u64 = 64;
/// Queue pairs that are remembered to have been disturbed.
const MOST_DISTURBED: usize = 64;

/// Which bytes of a write are placed first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WriteOrder {
    /// Its last aligned word of 8 bytes.
    Reverse,
    /// Of its aligned lines of 64 bytes those that the seed chooses.
    Shuffle {
        /// The same for the same choices, if the same writes come.
        seed: u64,
    },
}

/// A range of a region that a peer writes to, checked when the write came.
#[derive(Clone, Copy)]
struct Target {
    pd: u32,
    qp_num: u32,
    rkey: u32,
    addr: u64,
    /// Where it is in this process.
    at: usize,
    len: usize,
}

impl Target {
    /// The range, while it is still there.
    fn span<'a>(&self, regions: &'a Regions) -> Option<Span<'a>> {
        let (key, len) = (Key(self.rkey), self.len as u64);
        let right = Access::REMOTE_WRITE;
        regions.remote(self.pd, self.qp_num, key, self.addr, len, right).ok()
    }

    fn part(&self, part: &Range<usize>) -> Self {
        let (addr, at) = (self.addr + part.start as u64, self.at + part.start);
        Self { addr, at, len: part.len(), ..*self }
    }

    fn overlaps(&self, at: usize, len: usize) -> bool {
        len > 0 && self.at < at.saturating_add(len) && at < self.at + self.len
    }
}

/// What is to be done when its time has come.
enum Step {
    /// Places bytes, unless they are placed already. `there` is what stands in their place until then,
    /// unless the program changes it.
    Place { target: Target, bytes: Option<Vec<u8>>, there: Vec<u8> },
    /// Counts a write as executed.
    Execute,
}

impl Step {
    fn weight(&self) -> usize {
        match self {
            Self::Place { bytes, there, .. } => {
                STEP + there.len() + bytes.as_ref().map_or(0, Vec::len)
            }
            Self::Execute => STEP,
        }
    }

    fn target(&self) -> Option<&Target> {
        match self {
            Self::Place { target, .. } => Some(target),
            Self::Execute => None,
        }
    }
}

/// What is held of the writes to one queue pair, the oldest first, each with the time at which it is due.
#[derive(Default)]
struct Held {
    steps: VecDeque<(Time, Step)>,
    alarm: Option<Time>,
}

/// How writes are placed, and what is held of them.
pub(crate) struct Unordered {
    order: WriteOrder,
    hold_ns: u64,
    /// Lines that were shuffled.
    drawn: u64,
    held: BTreeMap<QpId, Held>,
    weight: usize,
    /// Queue pairs in the middle of whose writes the program changed something.
    disturbed: Vec<QpId>,
}

impl Unordered {
    /// The parts of a write of `len` bytes to `addr`, or of a segment of one, each with whether it is placed
    /// at once.
    fn parts(&mut self, addr: u64, len: usize, last: bool) -> Vec<(Range<usize>, bool)> {
        let behind = |boundary: u64| (boundary.saturating_sub(addr) as usize).min(len);
        match self.order {
            WriteOrder::Reverse => {
                let word = (addr + (len as u64 - 1)) / WORD * WORD;
                let word = if last { behind(word) } else { len };
                vec![(0..word, false), (word..len, true)]
            }
            WriteOrder::Shuffle { seed } => {
                let mut parts: Vec<(Range<usize>, bool)> = Vec::new();
                let mut start = 0;
                while start < len {
                    let end = behind(((addr + start as u64) / LINE + 1).saturating_mul(LINE));
                    self.drawn += 1;
                    let now = mixed(seed ^ mixed(self.drawn)) & 1 == 0;
                    match parts.last_mut() {
                        Some((before, same)) if *same == now => before.end = end,
                        _ => parts.push((start..end, now)),
                    }
                    start = end;
                }
                parts
            }
        }
    }

    fn hold(&mut self, id: QpId, due: Time, step: Step) {
        self.weight += step.weight();
        self.held.entry(id).or_default().steps.push_back((due, step));
    }

    /// Whether something was done to what `step` stands for since it was put there.
    fn is_disturbed(regions: &Regions, target: &Target, there: &[u8]) -> bool {
        let mut now = vec![0; there.len()];
        target.span(regions).is_some_and(|span| {
            span.read_into(0, &mut now);
            now != there
        })
    }

    /// Places what is to be placed in a range, and forgets that anything was held of it: another write goes
    /// there.
    fn give_way(&mut self, regions: &Regions, at: usize, len: usize) {
        let meets = |step: &Step| step.target().is_some_and(|target| target.overlaps(at, len));
        let ids: Vec<QpId> = self.held.keys().copied().collect();
        for id in ids {
            let Some(held) = self.held.get_mut(&id) else { continue };
            if !held.steps.iter().any(|(_, step)| meets(step)) {
                continue;
            }
            // All of them, so that none that is older is placed over it later.
            let steps = std::mem::take(&mut held.steps);
            let (places, rest) =
                steps.into_iter().partition(|(_, step)| matches!(step, Step::Place { .. }));
            held.steps = rest;
            for (_, step) in places {
                self.weight -= step.weight();
                self.place(regions, id, &step);
            }
        }
    }

    /// Places the bytes of a step, and notes whether the program was there before.
    fn place(&mut self, regions: &Regions, id: QpId, step: &Step) {
        let Step::Place { target, bytes, there } = step else { return };
        if Self::is_disturbed(regions, target, there)
            && self.disturbed.len() < MOST_DISTURBED
            && !self.disturbed.contains(&id)
        {
            self.disturbed.push(id);
        }
        if let (Some(bytes), Some(span)) = (bytes, target.span(regions)) {
            span.write_from(0, bytes);
        }
    }

    /// The next step of a queue pair that is due at `now`; any, without one.
    fn next(&mut self, id: QpId, now: Option<Time>) -> Option<Step> {
        let held = self.held.get_mut(&id)?;
        let &(due, _) = held.steps.front()?;
        if now.is_some_and(|now| due > now) {
            return None;
        }
        let (_, step) = held.steps.pop_front()?;
        self.weight -= step.weight();
        Some(step)
    }
}

/// Mixes the bits of a word (the finaliser of splitmix64).
fn mixed(word: u64) -> u64 {
    let word = word.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let word = (word ^ (word >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let word = (word ^ (word >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    word ^ (word >> 31)
}

/// Where a write goes.
#[derive(Clone, Copy)]
pub(crate) struct Place {
    pub(crate) rkey: u32,
    pub(crate) addr: u64,
    /// Its place in this process.
    pub(crate) at: usize,
}

/// Places a part of a write that has been checked; `last`, if it is the last one.
#[cold]
pub(crate) fn write<P: Probe>(
    qp: &mut Qp,
    hub: &mut Hub<P>,
    place: Place,
    payload: &[u8],
    last: bool,
) {
    let pd = responder::remote_pd(qp, hub, place.rkey);
    let due = hub.unordered.as_ref().map_or(hub.now, |unordered| hub.now.after(unordered.hold_ns));
    let Hub { unordered: Some(unordered), regions, .. } = hub else { return };
    let Place { rkey, addr, at } = place;
    unordered.give_way(regions, at, payload.len());
    let whole = Target { pd, qp_num: qp.num.0, rkey, addr, at, len: payload.len() };
    let parts = match payload.is_empty() {
        true => Vec::new(),
        false => unordered.parts(addr, payload.len(), last),
    };
    for (part, at_once) in parts.into_iter().filter(|(part, _)| !part.is_empty()) {
        let target = whole.part(&part);
        let bytes = payload[part].to_vec();
        let Some(span) = target.span(regions) else { continue };
        let step = if at_once {
            span.write_from(0, &bytes);
            Step::Place { target, bytes: None, there: bytes }
        } else {
            let mut there = vec![0; bytes.len()];
            span.read_into(0, &mut there);
            Step::Place { target, bytes: Some(bytes), there }
        };
        // What comes after nothing that is held is in order.
        if !at_once || qp.responder.holding {
            unordered.hold(qp.id, due, step);
            qp.responder.holding = true;
        }
    }
    let full = unordered.weight > MOST_HELD;
    if full {
        settle(qp, hub);
    } else {
        set_alarm(qp.id, hub);
    }
}

/// Has nothing held any more of a range that is written to in another way.
pub(crate) fn give_way<P>(hub: &mut Hub<P>, at: usize, len: usize) {
    let Hub { unordered: Some(unordered), regions, .. } = hub else { return };
    unordered.give_way(regions, at, len);
}

/// Places all bytes that are held: memory, or the right to write to it, is about to change.
pub(crate) fn place_all<P>(hub: &mut Hub<P>) {
    give_way(hub, 0, usize::MAX);
}

/// Counts a write as executed once what is held of it, and before it, is placed.
pub(crate) fn execute<P: Probe>(qp: &mut Qp, hub: &mut Hub<P>) {
    let due = hub.now;
    match &mut hub.unordered {
        // Due with what is before it.
        Some(unordered) => unordered.hold(qp.id, due, Step::Execute),
        None => receive::executed(qp),
    }
}

/// Places all that is held of the writes to a queue pair, because something comes that orders them.
#[cold]
pub(crate) fn settle<P: Probe>(qp: &mut Qp, hub: &mut Hub<P>) {
    settle_until(qp, hub, None);
}

/// The same, when nothing comes: the peer is told.
#[cold]
pub(crate) fn settle_unasked<P: Probe>(qp: &mut Qp, hub: &mut Hub<P>) {
    settle(qp, hub);
    tell_executed(qp, hub);
}

fn tell_executed<P: Probe>(qp: &mut Qp, hub: &mut Hub<P>) {
    match qp.path {
        Path::Stream(_) => receive::stream::note_executed(qp, hub),
        Path::Channel(_) => receive::channel::tell_executed(qp, hub),
        _ => {}
    }
}

fn settle_until<P: Probe>(qp: &mut Qp, hub: &mut Hub<P>, now: Option<Time>) {
    let Hub { unordered: Some(unordered), regions, .. } = hub else { return };
    while let Some(step) = unordered.next(qp.id, now) {
        match step {
            Step::Execute => receive::executed(qp),
            Step::Place { .. } => unordered.place(regions, qp.id, &step),
        }
    }
    set_alarm(qp.id, hub);
    let Some(unordered) = &mut hub.unordered else { return };
    qp.responder.holding = unordered.held.get(&qp.id).is_some_and(|held| !held.steps.is_empty());
    if !qp.responder.holding {
        unordered.held.remove(&qp.id);
    }
}

/// Sets the alarm for what is held longest. If another write to the same place had the bytes placed early,
/// the next alarm counts the first one as executed. It lies after now, as every deadline does.
fn set_alarm<P>(id: QpId, hub: &mut Hub<P>) {
    let held = hub.unordered.as_ref().and_then(|unordered| unordered.held.get(&id));
    let Some(held) = held else { return };
    let (mut alarm, at) = (held.alarm, held.steps.front().map(|&(due, _)| due));
    let at = at.map(|due| due.max(hub.now.after(1)));
    hub.set_alarm(&mut alarm, Alarm::Held(id), at);
    if let Some(held) = hub.unordered.as_mut().and_then(|unordered| unordered.held.get_mut(&id)) {
        held.alarm = alarm;
    }
}

impl<P: Probe> Adapter<P> {
    /// Places the writes of peers out of order from now on, and holds bytes back for so many nanoseconds.
    /// What peers write that have access to this process's memory is not held up: let there be none.
    pub fn place_unordered(&mut self, order: WriteOrder, hold_ns: u64) {
        self.hub.unordered = Some(Box::new(Unordered {
            order,
            hold_ns: hold_ns.max(1),
            drawn: 0,
            held: BTreeMap::new(),
            weight: 0,
            disturbed: Vec::new(),
        }));
    }

    /// Queue pairs that peers were writing to when the program changed bytes of such a write, each once
    /// since this was asked last.
    pub fn take_disturbed(&mut self) -> Vec<QpId> {
        let unordered = self.hub.unordered.as_mut();
        unordered.map(|unordered| std::mem::take(&mut unordered.disturbed)).unwrap_or_default()
    }

    /// Whether a list that a queue pair is to send from names memory that a peer is in the middle of a
    /// write to.
    #[must_use]
    pub fn is_in_progress(&self, id: QpId, sges: &[Sge]) -> bool {
        let (Some(unordered), Some(qp)) = (&self.hub.unordered, self.qps.get(id)) else {
            return false;
        };
        let held = || unordered.held.values().flat_map(|held| held.steps.iter());
        let meets = |(at, len): (usize, usize)| {
            let mut targets = held().filter_map(|(_, step)| step.target());
            targets.any(|target| target.overlaps(at, len))
        };
        let total = sges.iter().map(|sge| u64::from(sge.len)).sum();
        let mut pieces = self.hub.regions.pieces(qp.pd_number(), sges, 0, total, false);
        pieces.any(|piece| piece.is_ok_and(|span| meets(span.as_raw())))
    }

    /// Places all that is held of any write, and acknowledges it: the process is about to end.
    pub fn place_held(&mut self) {
        let ids = self.hub.unordered.iter().flat_map(|unordered| unordered.held.keys());
        for id in ids.copied().collect::<Vec<_>>() {
            if let Some((qp, hub)) = self.qp_and_hub(id) {
                settle_unasked(qp, hub);
            }
        }
        self.serve_nudged();
    }

    /// Places what was held long enough of the writes to a queue pair.
    pub(crate) fn held_alarm(&mut self, id: QpId) {
        if let Some(held) = self.hub.unordered.as_mut().and_then(|all| all.held.get_mut(&id)) {
            held.alarm = None;
        }
        let Some((qp, hub)) = self.qp_and_hub(id) else { return };
        settle_until(qp, hub, Some(hub.now));
        tell_executed(qp, hub);
        self.serve_nudged();
    }
}
