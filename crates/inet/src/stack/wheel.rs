//! Deadlines of many connections: a hierarchical timing wheel (Varghese and Lauck, 1987, scheme 7).
//!
//! Eight levels of 64 slots cover all 64 bits of time; a slot of the lowest level is a tick of 2^16 ns
//! (66 us). A deadline stands at the level of the highest bit in which its tick differs from the present
//! one, so everything on a level comes before everything on a higher one: the next deadline is found by two
//! bit scans. Setting and cancelling unlink and link an element of a list. When time enters a slot of a
//! higher level its elements move down, each at most once per level; those of the present tick are put in
//! order.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

const TICK_BITS: u32 = 16;
const SLOT_BITS: u32 = 6;
const SLOTS: usize = 1 << SLOT_BITS;
const LEVELS: usize = 8;

const NONE: u32 = u32::MAX;
/// Where an element is: nowhere; in the present tick; otherwise level and slot.
const IDLE: u16 = u16::MAX;
const PRESENT: u16 = u16::MAX - 1;

#[derive(Clone, Copy, Debug)]
struct Node {
    deadline: u64,
    previous: u32,
    next: u32,
    place: u16,
}

const FREE: Node = Node { deadline: 0, previous: NONE, next: NONE, place: IDLE };

#[derive(Clone, Copy, Debug)]
struct Slot {
    head: u32,
    /// No deadline in it is before this; not raised when one is taken out.
    bound: u64,
}

const EMPTY: Slot = Slot { head: NONE, bound: u64::MAX };

/// Deadlines by small numbers, one for each number.
#[derive(Clone, Debug)]
pub(super) struct Wheel {
    nodes: Vec<Node>,
    slots: Box<[[Slot; SLOTS]; LEVELS]>,
    /// Which slots of a level have elements.
    occupied: [u64; LEVELS],
    /// Which levels have.
    levels: u32,
    /// The present tick.
    tick: u64,
    /// Elements of the present tick or before. What was cancelled or set anew stays until it comes up.
    present: BinaryHeap<Reverse<(u64, u32)>>,
    /// How many of them count.
    live: usize,
}

impl Default for Wheel {
    fn default() -> Self {
        Self {
            nodes: Vec::new(),
            slots: Box::new([[EMPTY; SLOTS]; LEVELS]),
            occupied: [0; LEVELS],
            levels: 0,
            tick: 0,
            present: BinaryHeap::new(),
            live: 0,
        }
    }
}

impl Wheel {
    /// The deadline of `id`.
    #[inline]
    pub(super) fn get(&self, id: u32) -> Option<u64> {
        let node = self.nodes.get(id as usize)?;
        (node.place != IDLE).then_some(node.deadline)
    }

    /// Octets of memory behind it.
    pub(super) fn memory(&self) -> usize {
        size_of_val(&*self.slots)
            + self.nodes.capacity() * size_of::<Node>()
            + self.present.capacity() * size_of::<(u64, u32)>()
    }

    /// Sets the deadline of `id`, in place of the one it had.
    pub(super) fn set(&mut self, id: u32, deadline: u64) {
        if self.get(id) == Some(deadline) {
            return;
        }
        self.cancel(id);
        if self.nodes.len() <= id as usize {
            // Doubling would waste a third on average.
            if self.nodes.capacity() <= id as usize {
                self.nodes.reserve_exact(id as usize + 1 + id as usize / 8 - self.nodes.len());
            }
            self.nodes.resize(id as usize + 1, FREE);
        }
        self.insert(id, deadline);
    }

    /// Takes the deadline of `id` away.
    pub(super) fn cancel(&mut self, id: u32) {
        let Some(&node) = self.nodes.get(id as usize) else { return };
        match node.place {
            IDLE => return,
            PRESENT => {
                self.live -= 1;
                self.purge();
            }
            place => self.unlink(&node, place),
        }
        self.nodes[id as usize].place = IDLE;
    }

    fn unlink(&mut self, node: &Node, place: u16) {
        if node.next != NONE {
            self.nodes[node.next as usize].previous = node.previous;
        }
        if node.previous != NONE {
            self.nodes[node.previous as usize].next = node.next;
            return;
        }
        let (level, slot) = split(place);
        self.slots[level][slot].head = node.next;
        if node.next == NONE {
            self.empty(level, slot);
        }
    }

    fn empty(&mut self, level: usize, slot: usize) {
        self.slots[level][slot] = EMPTY;
        self.occupied[level] &= !(1 << slot);
        if self.occupied[level] == 0 {
            self.levels &= !(1 << level);
        }
    }

    fn insert(&mut self, id: u32, deadline: u64) {
        let tick = deadline >> TICK_BITS;
        let node = &mut self.nodes[id as usize];
        node.deadline = deadline;
        if tick <= self.tick {
            node.place = PRESENT;
            self.live += 1;
            self.present.push(Reverse((deadline, id)));
            return;
        }
        let level = ((tick ^ self.tick).ilog2() / SLOT_BITS) as usize;
        let slot = (tick >> (level as u32 * SLOT_BITS)) as usize & (SLOTS - 1);
        let place = &mut self.slots[level][slot];
        let head = std::mem::replace(&mut place.head, id);
        place.bound = place.bound.min(deadline);
        (node.previous, node.next, node.place) = (NONE, head, join(level, slot));
        if head != NONE {
            self.nodes[head as usize].previous = id;
        }
        self.occupied[level] |= 1 << slot;
        self.levels |= 1 << level;
    }

    /// Cancelled elements at the front of the present tick go at once, so that its front is a deadline;
    /// others when they are more than those that count.
    fn purge(&mut self) {
        let nodes = &self.nodes;
        let counts = |(deadline, id): (u64, u32)| {
            let node = &nodes[id as usize];
            node.place == PRESENT && node.deadline == deadline
        };
        if self.present.len() > 2 * self.live + 16 {
            self.present.retain(|Reverse(entry)| counts(*entry));
        }
    }

    /// A time before which no deadline runs out, and not before the last one given to [`Wheel::expired`];
    /// none if there are none.
    #[inline]
    pub(super) fn next(&self) -> Option<u64> {
        if let Some(Reverse((deadline, _))) = self.present.peek() {
            return Some(*deadline);
        }
        let (level, slot) = self.first()?;
        Some(self.slots[level][slot].bound)
    }

    /// The slot with the earliest deadlines.
    #[inline]
    fn first(&self) -> Option<(usize, usize)> {
        (self.levels != 0).then(|| {
            let level = self.levels.trailing_zeros() as usize;
            (level, self.occupied[level].trailing_zeros() as usize)
        })
    }

    /// Takes the earliest deadline that is not after `now`, and says whose it was. To be called until there
    /// is none.
    pub(super) fn expired(&mut self, now: u64) -> Option<u32> {
        loop {
            while let Some(Reverse((deadline, id))) = self.present.peek().copied() {
                let node = &mut self.nodes[id as usize];
                let counts = node.place == PRESENT && node.deadline == deadline;
                if counts && deadline > now {
                    return None;
                }
                self.present.pop();
                if counts {
                    node.place = IDLE;
                    self.live -= 1;
                    return Some(id);
                }
            }
            let target = now >> TICK_BITS;
            let Some((level, slot)) = self.first() else {
                self.tick = self.tick.max(target);
                return None;
            };
            // The first tick of the slot.
            let shift = level as u32 * SLOT_BITS;
            let above = shift + SLOT_BITS;
            let base = if above >= u64::BITS { 0 } else { self.tick >> above << above };
            let begin = base | (slot as u64) << shift;
            if begin > target {
                self.tick = self.tick.max(target);
                return None;
            }
            self.tick = begin;
            self.spill(level, slot);
        }
    }

    /// Time has entered a slot: its elements move down.
    fn spill(&mut self, level: usize, slot: usize) {
        let mut id = self.slots[level][slot].head;
        self.empty(level, slot);
        while id != NONE {
            let Node { next, deadline, .. } = self.nodes[id as usize];
            self.insert(id, deadline);
            id = next;
        }
    }
}

fn join(level: usize, slot: usize) -> u16 {
    (level << SLOT_BITS | slot) as u16
}

fn split(place: u16) -> (usize, usize) {
    (usize::from(place) >> SLOT_BITS, usize::from(place) & (SLOTS - 1))
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;

    #[test]
    fn deadlines_come_in_order() {
        let mut wheel = Wheel::default();
        for (id, deadline) in [(0, 70_000), (1, 5), (2, 69_999), (3, u64::MAX - 1), (4, 5)] {
            wheel.set(id, deadline);
        }
        assert_eq!(wheel.next(), Some(5));
        let taken: Vec<_> = std::iter::from_fn(|| wheel.expired(70_000)).collect();
        assert_eq!(taken, [1, 4, 2, 0]);
        assert_eq!(wheel.next(), Some(u64::MAX - 1));
        assert_eq!(wheel.expired(u64::MAX), Some(3));
        assert_eq!((wheel.next(), wheel.expired(u64::MAX)), (None, None));
    }

    #[test]
    fn set_anew_and_cancelled() {
        let mut wheel = Wheel::default();
        wheel.set(0, 10);
        wheel.set(0, 1 << 40);
        wheel.set(1, 1 << 40);
        wheel.set(1, 20);
        assert_eq!(wheel.get(0), Some(1 << 40));
        assert_eq!(wheel.expired(15), None);
        wheel.cancel(1);
        wheel.cancel(7);
        assert_eq!(wheel.expired(1 << 39), None);
        assert_eq!(wheel.expired(1 << 40), Some(0));
        assert_eq!(wheel.get(0), None);
    }

    #[test]
    fn what_is_cancelled_within_a_tick_does_not_pile_up() {
        let mut wheel = Wheel::default();
        for n in 0..10_000 {
            wheel.set(0, n % 1_000);
        }
        assert!(wheel.present.len() <= 20, "{}", wheel.present.len());
    }

    #[derive(Clone, Debug)]
    enum Op {
        Set(u32, u64),
        Cancel(u32),
        Pass(u64),
    }

    fn op() -> impl Strategy<Value = Op> {
        // Times of every scale: a shift, and bits below it.
        let span = (0u32..50, any::<u64>()).prop_map(|(shift, bits)| bits & ((1 << shift) - 1));
        prop_oneof![
            4 => (0u32..12, span.clone()).prop_map(|(id, after)| Op::Set(id, after)),
            1 => (0u32..12).prop_map(Op::Cancel),
            2 => span.prop_map(Op::Pass),
        ]
    }

    proptest! {
        #[test]
        fn it_agrees_with_a_sorted_set(ops in prop::collection::vec(op(), 1..200)) {
            let mut wheel = Wheel::default();
            let mut model = BTreeSet::new();
            let mut now = 0u64;
            for op in ops {
                match op {
                    Op::Set(id, after) => {
                        wheel.set(id, now + after);
                        model.retain(|(_, other)| *other != id);
                        model.insert((now + after, id));
                    }
                    Op::Cancel(id) => {
                        wheel.cancel(id);
                        model.retain(|(_, other)| *other != id);
                    }
                    Op::Pass(time) => {
                        now += time;
                        while let Some(id) = wheel.expired(now) {
                            let first = model.pop_first();
                            prop_assert!(first.is_some_and(|(at, other)| other == id && at <= now));
                        }
                        prop_assert!(model.first().is_none_or(|(at, _)| *at > now));
                        prop_assert!(wheel.next().is_none_or(|at| at > now), "behind now");
                    }
                }
                let bound = wheel.next().unwrap_or(u64::MAX);
                prop_assert!(model.first().is_none_or(|(at, _)| bound <= *at), "never too late");
            }
        }
    }
}
