//! The connections of a stack: where each is kept, how it is found, which of them want something.

use std::collections::VecDeque;
use std::net::IpAddr;

use super::demux::{Demux, Key};
use super::wheel::Wheel;
use super::{Carriage, TcpId};
use crate::tcp::{Connection, Secret, State};

/// The place of no listener.
const NO_LISTENER: u32 = u32::MAX;

/// A set of small properties.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Marks(u16);

impl Marks {
    /// It stands in the list of those that may have something to send. A property of the place: it outlives
    /// the connection.
    const READY: u16 = 1;
    /// The same for those that may have events.
    const EVENTFUL: u16 = 2;
    /// The user does not know of it yet.
    pub(super) const INCOMING: u16 = 4;
    /// The user does not know of it any more.
    pub(super) const RELEASED: u16 = 8;
    /// Segments find it.
    const LISTED: u16 = 16;
    /// It counts as half open at its listener.
    pub(super) const HALF_OPEN: u16 = 32;
    /// It waits for a next hop to become known.
    const PARKED: u16 = 64;
    /// Its next hop could not be found: what it sends next is lost.
    const LOST: u16 = 128;
    /// Nobody misses it any more: it stands in the list of those that go first.
    const WAITING: u16 = 256;
    /// Its peer is in this stack.
    pub(super) const LOOPS: u16 = 512;

    #[inline]
    pub(super) fn has(self, mark: u16) -> bool {
        self.0 & mark != 0
    }

    #[inline]
    pub(super) fn set(&mut self, mark: u16) {
        self.0 |= mark;
    }

    /// Takes a mark away, and says whether it was there.
    #[inline]
    pub(super) fn take(&mut self, mark: u16) -> bool {
        let had = self.has(mark);
        self.0 &= !mark;
        had
    }
}

/// What has come of waiting for a next hop.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Fate {
    /// There is one.
    GoesOn,
    /// What is to be sent now is lost.
    Lost,
    /// And there is none that could be asked.
    CutOff,
}

/// A place for a connection.
#[derive(Clone, Debug)]
pub(super) struct Slot {
    pub(super) connection: Option<Box<Connection>>,
    pub(super) key: Key,
    pub(super) generation: u32,
    /// Of an incoming connection; [`NO_LISTENER`] once the port is not watched any more.
    pub(super) listener: u32,
    pub(super) flow_label: u32,
    /// Of what it sends, without ECN.
    pub(super) carriage: Carriage,
    pub(super) marks: Marks,
}

/// All places.
#[derive(Clone, Debug)]
pub(super) struct Connections {
    secret: Secret,
    slots: Vec<Slot>,
    free: Vec<u32>,
    table: Demux,
    ready: VecDeque<u32>,
    eventful: VecDeque<u32>,
    /// Those of which the user has forgotten, and that wait for no more than the end to be acknowledged, or
    /// for time to pass; the oldest first; some are gone already.
    waiting: VecDeque<TcpId>,
    /// How many of them are not.
    waits: u32,
    /// Who waits for which next hop; some are gone already.
    parked: Vec<(IpAddr, TcpId)>,
    pub(super) wheel: Wheel,
    max: u32,
}

impl Connections {
    pub(super) fn new(secret: Secret, max: u32) -> Self {
        Self {
            secret,
            slots: Vec::new(),
            free: Vec::new(),
            table: Demux::default(),
            ready: VecDeque::new(),
            eventful: VecDeque::new(),
            waiting: VecDeque::new(),
            waits: 0,
            parked: Vec::new(),
            wheel: Wheel::default(),
            max,
        }
    }

    /// Octets of memory: what each allocation asks for, and 16 that the allocator takes for each connection.
    pub(super) fn memory(&self) -> usize {
        const ALLOCATOR: usize = 16;
        let connections = self.slots.iter().filter_map(|slot| slot.connection.as_ref());
        let lists = self.free.capacity()
            + 2 * self.waiting.capacity()
            + self.ready.capacity()
            + self.eventful.capacity();
        connections.map(|it| it.memory() + ALLOCATOR).sum::<usize>()
            + self.slots.capacity() * size_of::<Slot>()
            + lists * size_of::<u32>()
            + self.table.memory()
            + self.wheel.memory()
    }

    /// How many there are.
    pub(super) fn count(&self) -> usize {
        self.slots.len() - self.free.len()
    }

    pub(super) fn has_room(&self) -> bool {
        !self.free.is_empty() || self.slots.len() < self.max as usize || self.waits > 0
    }

    /// Whether there is room for one more: where there is none, the oldest that nobody misses goes (RFC 9293
    /// 3.4.3 lets TIME-WAIT be cut short where numbers are chosen as here, and timestamps are in use). One
    /// whose end was not acknowledged is among them: a peer that keeps silent must not keep others out.
    pub(super) fn make_room(&mut self) -> bool {
        while self.free.is_empty() && self.slots.len() >= self.max as usize {
            let Some(oldest) = self.waiting.pop_front() else { return false };
            if self.is_waiting(oldest) {
                self.remove(oldest.index);
            }
        }
        true
    }

    fn is_waiting(&self, id: TcpId) -> bool {
        let slot = &self.slots[id.index as usize];
        slot.generation == id.generation && slot.marks.has(Marks::WAITING)
    }

    /// Notes that nobody misses a connection.
    fn wait(&mut self, index: u32) {
        if self.slots[index as usize].marks.has(Marks::WAITING) {
            return;
        }
        self.slots[index as usize].marks.set(Marks::WAITING);
        let mut waiting = std::mem::take(&mut self.waiting);
        while waiting.front().is_some_and(|oldest| !self.is_waiting(*oldest)) {
            waiting.pop_front();
        }
        // The oldest may stay for as long as its peer likes, and keep all that are gone behind it.
        if waiting.len() > 2 * self.waits as usize + 16 {
            waiting.retain(|id| self.is_waiting(*id));
        }
        waiting.push_back(self.id(index));
        self.waiting = waiting;
        self.waits += 1;
    }

    /// A listener is gone: those that came to it count nowhere, least of all at the next in its place.
    pub(super) fn forget_listener(&mut self, listener: u32) {
        for slot in self.slots.iter_mut().filter(|slot| slot.listener == listener) {
            slot.listener = NO_LISTENER;
        }
    }

    /// The place that a segment is for.
    #[inline]
    pub(super) fn find(&self, key: &Key) -> Option<u32> {
        self.table.get(key.hash(self.secret), |index| self.slots[index as usize].key == *key)
    }

    /// How many places there are, used or not.
    pub(super) fn places(&self) -> u32 {
        self.slots.len() as u32
    }

    /// A place of which one knows that it exists.
    #[inline]
    pub(super) fn slot(&mut self, index: u32) -> &mut Slot {
        &mut self.slots[index as usize]
    }

    /// The place of `id`, unless its connection is gone.
    #[inline]
    pub(super) fn get(&self, id: TcpId) -> Option<&Slot> {
        let slot = self.slots.get(id.index as usize)?;
        let known = slot.generation == id.generation && !slot.marks.has(Marks::RELEASED);
        (known && slot.connection.is_some()).then_some(slot)
    }

    /// The same, to be changed.
    #[inline]
    pub(super) fn get_mut(&mut self, id: TcpId) -> Option<&mut Slot> {
        self.get(id)?;
        self.slots.get_mut(id.index as usize)
    }

    pub(super) fn id(&self, index: u32) -> TcpId {
        TcpId { index, generation: self.slots[index as usize].generation }
    }

    /// Gives a connection a place; its key is not in use.
    pub(super) fn insert(&mut self, connection: Box<Connection>, key: Key, flow_label: u32) -> u32 {
        let index = self.free.pop().unwrap_or_else(|| {
            let slot = Slot {
                connection: None,
                key,
                generation: 0,
                listener: NO_LISTENER,
                flow_label: 0,
                carriage: Carriage::default(),
                marks: Marks::default(),
            };
            // Doubling would waste a third on average; what is copied is small.
            if self.slots.len() == self.slots.capacity() {
                self.slots.reserve_exact((self.slots.len() / 8).max(16));
            }
            self.slots.push(slot);
            (self.slots.len() - 1) as u32
        });
        let slot = &mut self.slots[index as usize];
        slot.carriage = Carriage::from(connection.config());
        (slot.connection, slot.key, slot.flow_label) = (Some(connection), key, flow_label);
        slot.marks.set(Marks::LISTED);
        self.table.insert(key.hash(self.secret), index);
        index
    }

    /// Segments do not find it any more.
    pub(super) fn unlist(&mut self, index: u32) {
        let slot = &mut self.slots[index as usize];
        if slot.marks.take(Marks::LISTED) {
            self.table.remove(slot.key.hash(self.secret), index);
        }
    }

    /// Takes the connection away; its place will be another's.
    pub(super) fn remove(&mut self, index: u32) {
        self.unlist(index);
        self.wheel.cancel(index);
        let slot = &mut self.slots[index as usize];
        slot.connection = None;
        slot.generation = slot.generation.wrapping_add(1);
        slot.marks.take(Marks::RELEASED);
        slot.marks.take(Marks::INCOMING);
        // The next in this place waits for a next hop of its own.
        slot.marks.take(Marks::PARKED);
        slot.marks.take(Marks::LOST);
        slot.marks.take(Marks::LOOPS);
        self.waits -= u32::from(slot.marks.take(Marks::WAITING));
        self.free.push(index);
    }

    /// Something has happened to it: it may have something to send, and to say.
    #[inline]
    pub(super) fn touch(&mut self, index: u32) {
        let marks = &mut self.slots[index as usize].marks;
        if !marks.has(Marks::READY) {
            marks.set(Marks::READY);
            self.ready.push_back(index);
        }
        if !marks.has(Marks::EVENTFUL) {
            marks.set(Marks::EVENTFUL);
            self.eventful.push_back(index);
        }
    }

    #[inline]
    pub(super) fn is_ready(&self) -> bool {
        !self.ready.is_empty()
    }

    /// The next that may have something to send. Whoever has sent something of it puts it back, behind the
    /// others.
    pub(super) fn next_ready(&mut self) -> Option<u32> {
        self.ready.pop_front()
    }

    pub(super) fn put_back(&mut self, index: u32) {
        self.ready.push_back(index);
    }

    /// A connection that was taken from the list has nothing more to send: its deadline counts, and if
    /// nothing is left of it, it goes.
    pub(super) fn settle(&mut self, now: u64, index: u32) {
        let slot = &mut self.slots[index as usize];
        slot.marks.take(Marks::READY);
        let Some(connection) = &slot.connection else { return };
        if connection.state() == State::Closed {
            // Its reset may have to wait for a next hop.
            if slot.marks.has(Marks::RELEASED) && connection.is_over() {
                self.remove(index);
            } else {
                self.unlist(index);
                self.wheel.cancel(index);
            }
            return;
        }
        let waits = connection.needs_no_user() && slot.marks.has(Marks::RELEASED);
        // A deadline that moves away is not moved in the wheel: it is looked at when it comes up. Most are
        // never reached, and every acknowledgement moves them.
        // That of pacing may be over, of a connection that waits for something else. Others are over if the
        // link had no room for so long.
        let deadline = connection.poll_timeout().filter(|at| *at > now || connection.is_due(now));
        if let Some(deadline) = deadline
            && self.wheel.get(index).is_none_or(|set| deadline < set)
        {
            self.wheel.set(index, deadline);
        }
        if waits {
            self.wait(index);
        }
    }

    /// A connection that was taken from the list waits until `next_hop` is known.
    pub(super) fn park(&mut self, now: u64, index: u32, next_hop: IpAddr) {
        self.settle(now, index);
        let slot = &mut self.slots[index as usize];
        if slot.connection.is_some() && !slot.marks.has(Marks::PARKED) {
            slot.marks.set(Marks::PARKED);
            self.parked.push((next_hop, self.id(index)));
        }
    }

    /// A next hop was found, or could not be; `fate` says what that means for which peers.
    pub(super) fn resume(&mut self, next_hop: IpAddr, fate: impl Fn(IpAddr) -> Fate) {
        let mut parked = std::mem::take(&mut self.parked);
        parked.retain(|(hop, id)| {
            let slot = &mut self.slots[id.index as usize];
            if slot.generation != id.generation {
                return false;
            }
            if *hop != next_hop {
                return true;
            }
            slot.marks.take(Marks::PARKED);
            let fate = fate(slot.key.remote().ip());
            if fate != Fate::GoesOn {
                slot.marks.set(Marks::LOST);
            }
            if fate == Fate::CutOff
                && let Some(connection) = &mut slot.connection
            {
                connection.handle_unreachable();
            }
            self.touch(id.index);
            false
        });
        self.parked = parked;
    }

    /// Whether its next hop has just been looked for without result.
    pub(super) fn is_lost(&mut self, index: u32) -> bool {
        self.slots[index as usize].marks.take(Marks::LOST)
    }

    /// What a connection that was taken from the list sends is lost, as on a link; time will make it try
    /// again, or give it up. Says how many segments that were.
    pub(super) fn lose(&mut self, now: u64, index: u32) -> u64 {
        let connection = &mut self.slots[index as usize].connection;
        let next = || connection.as_mut()?.poll_transmit(now);
        let lost = std::iter::from_fn(next).count() as u64;
        self.settle(now, index);
        lost
    }

    /// The next whose deadline has passed. A deadline that has moved away since it was set says that a while
    /// has gone by: a connection that has fallen idle then gives memory back.
    pub(super) fn expired(&mut self, now: u64) -> Option<u32> {
        loop {
            let index = self.wheel.expired(now)?;
            let Some(connection) = &mut self.slots[index as usize].connection else { continue };
            match connection.poll_timeout() {
                Some(deadline) if deadline <= now => return Some(index),
                later => {
                    connection.release_memory();
                    if let Some(deadline) = later {
                        self.wheel.set(index, deadline);
                    }
                }
            }
        }
    }

    /// The first of those that may have events.
    pub(super) fn eventful(&self) -> Option<u32> {
        self.eventful.front().copied()
    }

    /// The first has none any more.
    pub(super) fn pop_eventful(&mut self) {
        if let Some(index) = self.eventful.pop_front() {
            self.slots[index as usize].marks.take(Marks::EVENTFUL);
        }
    }
}
