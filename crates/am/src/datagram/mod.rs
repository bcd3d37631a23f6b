//! Reliable connections over datagrams: a [`Fabric`] for networks that lose, duplicate and reorder.
//!
//! Each connection numbers its fragments, acknowledges what has come in every datagram that it sends, and
//! sends again what is not acknowledged. The caller carries datagrams and the time; nothing here does I/O:
//!
//! 1. datagrams that have come go in by [`handle_datagram`](DatagramFabric::handle_datagram), the time by
//!    [`handle_timeout`](DatagramFabric::handle_timeout);
//! 2. [`poll_transmit`](DatagramFabric::poll_transmit) gives datagrams out until there are none. Questions
//!    for endpoints at addresses of their own go to UDP sockets, from a UDP socket;
//! 3. [`poll_event`](DatagramFabric::poll_event) gives out what the engine is to be told.
//!
//! A peer that is silent for [`Limits::give_up_ns`] is lost: its connections fail, and the engine returns
//! their requests to the program. Memory is bounded: messages that wait by credits and a limit for each
//! connection, fragments after a gap by a limit for all.

mod link;
mod lookup;
mod packet;
mod receive;
mod sender;
mod transmit;

use std::collections::{BTreeMap, VecDeque};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::net::IpAddr;

pub use lookup::{LOOKUP_LEN, answer_lookup};
pub use packet::OVERHEAD;

use crate::conn::ConnId;
use crate::fabric::{Event, Fabric, Hello, Local, Refusal, Remote, Welcome};
use crate::name::Name;
use crate::slab::Slab;
use crate::types::Status;
use link::Link;
use packet::{Kind, What};
use sender::{Message, Sender, Source};

/// Datagrams that answer strangers wait in a queue of so many.
const MOST_CONTROL: usize = 256;
/// The longest message.
const LONGEST: u64 = 1 << 30;

/// Where a peer takes datagrams: its address, and the number of its queue pair there. Or a UDP socket
/// ([`Place::socket`]), which is asked for the queue pair of an endpoint at an address of its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Place {
    /// Its address.
    pub ip: IpAddr,
    /// The number of its queue pair: a port and an index.
    pub number: u32,
}

impl Place {
    /// The place that a name stands for: of a port over datagrams, the lowest byte of the incarnation is the
    /// index of the queue pair.
    #[must_use]
    pub fn of(name: &Name) -> Self {
        let number = u32::from(name.port.port()) << 8 | (name.incarnation & 0xff) as u32;
        Self { ip: name.port.ip(), number }
    }
}

/// Sizes of a fabric over datagrams.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Bytes of the longest datagram, more than [`OVERHEAD`].
    pub datagram: usize,
    /// Bytes of a receive slot and of a send buffer.
    pub slot: usize,
    /// Send buffers.
    pub send_buffers: u32,
    /// Messages of a connection that may wait until the peer has acknowledged them. It fails if there are
    /// more: an honest peer acknowledges the replies to its requests with the next requests.
    pub messages: usize,
    /// Reads of a peer that may wait to be answered.
    pub reads: usize,
    /// A peer that is silent for so long is lost, in nanoseconds.
    pub give_up_ns: u64,
    /// Makes numbers of connections hard to guess.
    pub seed: u64,
}

/// Registered memory of this process.
pub trait Memory {
    /// Copies own memory from `offset` on; whether it is there.
    fn read(&self, from: Local, offset: u64, out: &mut [u8]) -> bool;
    /// The same of memory that peers may read.
    fn read_shown(&self, from: Remote, offset: u64, out: &mut [u8]) -> bool;
    /// Writes to own memory.
    fn write(&mut self, to: Local, offset: u64, bytes: &[u8]) -> bool;
    /// The same to memory that peers may write.
    fn write_shown(&mut self, to: Remote, offset: u64, bytes: &[u8]) -> bool;
}

/// A datagram that belongs to no connection.
#[derive(Debug)]
struct Control {
    to: Place,
    kind: Kind,
    numbers: (u64, u64),
    status: u8,
}

/// What a fabric has done.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DatagramCounters {
    /// Datagrams that were sent.
    pub sent: u64,
    /// Fragments that were sent again.
    pub resent: u64,
    /// Datagrams that have come.
    pub received: u64,
    /// Those of them that had come before, or are of no use.
    pub dropped: u64,
}

/// Connections over datagrams, for an engine of Active Messages.
#[derive(Debug)]
pub struct DatagramFabric<M> {
    memory: M,
    limits: Limits,
    now: u64,
    links: Slab<Link>,
    by_conn: Vec<Option<(ConnId, crate::slab::Id<Link>)>>,
    /// Links that peers have begun, by the peer's number.
    begun: BTreeMap<(Place, u64), crate::slab::Id<Link>>,
    /// Hellos that the engine has not answered yet.
    asked: VecDeque<(u64, Place, u64)>,
    next_number: u64,
    /// Links that have something to send, each once.
    ready: VecDeque<crate::slab::Id<Link>>,
    control: VecDeque<Control>,
    events: VecDeque<Event>,
    slots: Vec<Vec<u8>>,
    free: Vec<u32>,
    buffers: Vec<Vec<u8>>,
    /// Fragments after gaps, of all links.
    held: usize,
    /// No timer is due before.
    next_timer: u64,
    /// When timers were looked at last.
    timed_at: u64,
    counters: DatagramCounters,
}

type LinkId = crate::slab::Id<Link>;

impl<M: Memory> DatagramFabric<M> {
    /// A fabric without connections.
    #[must_use]
    pub fn new(memory: M, limits: Limits) -> Self {
        Self {
            memory,
            now: 0,
            links: Slab::default(),
            by_conn: Vec::new(),
            begun: BTreeMap::new(),
            asked: VecDeque::new(),
            next_number: 0,
            ready: VecDeque::new(),
            control: VecDeque::new(),
            events: VecDeque::new(),
            slots: Vec::new(),
            free: Vec::new(),
            buffers: vec![vec![0; limits.slot]; limits.send_buffers as usize],
            held: 0,
            next_timer: u64::MAX,
            timed_at: 0,
            counters: DatagramCounters::default(),
            limits,
        }
    }

    /// The memory.
    pub fn memory(&self) -> &M {
        &self.memory
    }

    /// The memory, to be changed.
    pub fn memory_mut(&mut self) -> &mut M {
        &mut self.memory
    }

    /// What it has done so far.
    #[must_use]
    pub fn counters(&self) -> DatagramCounters {
        let living: u64 = self.links.iter().map(|(_, link)| link.sender.resent).sum();
        DatagramCounters { resent: self.counters.resent + living, ..self.counters }
    }

    /// A receive slot from `at` on.
    #[must_use]
    pub fn slot(&self, slot: u32, at: usize) -> &[u8] {
        self.slots.get(slot as usize).and_then(|slot| slot.get(at..)).unwrap_or_default()
    }

    /// Receive slots and fragments after gaps that are in use.
    #[must_use]
    pub fn in_use(&self) -> (usize, usize) {
        (self.slots.len() - self.free.len(), self.held)
    }

    /// The next thing that the engine is to be told.
    #[inline]
    pub fn poll_event(&mut self) -> Option<Event> {
        self.events.pop_front()
    }

    /// A number that stands for a connection, with the place of its link. A hash of the secret seed: peers
    /// that know some of them cannot guess the others.
    fn number(&mut self, id: LinkId) -> u64 {
        self.next_number = self.next_number.wrapping_add(1);
        let mut hash = DefaultHasher::new();
        (self.limits.seed, self.next_number).hash(&mut hash);
        hash.finish() << 32 | 1 << 31 | u64::from(id.index())
    }

    fn sender(&self) -> Sender {
        Sender::new(self.limits.datagram - OVERHEAD, self.limits.messages)
    }

    fn add_link(&mut self, conn: ConnId, mut link: Link) -> LinkId {
        link.last_heard = self.now;
        let id = self.links.insert(link);
        let number = self.number(id);
        if let Some(link) = self.links.get_mut(id) {
            link.own = number;
        }
        let at = conn.index() as usize;
        if at >= self.by_conn.len() {
            self.by_conn.resize(at + 1, None);
        }
        self.by_conn[at] = Some((conn, id));
        self.set_timer(self.now.saturating_add(self.limits.give_up_ns / 4));
        id
    }

    fn link_of(&self, conn: ConnId) -> Option<LinkId> {
        let (known, id) = (*self.by_conn.get(conn.index() as usize)?)?;
        (known == conn).then_some(id)
    }

    fn set_timer(&mut self, at: u64) {
        self.next_timer = self.next_timer.min(at);
    }

    /// Has a link send.
    fn wake(&mut self, id: LinkId) {
        if let Some(link) = self.links.get_mut(id)
            && !std::mem::replace(&mut link.is_ready, true)
        {
            self.ready.push_back(id);
        }
    }

    /// Forgets a link; the peer hears of it at once if `is_told`.
    fn end(&mut self, id: LinkId, is_told: bool) {
        let Some(link) = self.links.remove(id) else { return };
        self.counters.resent += link.sender.resent;
        self.held -= link.receiver.held.len();
        if let Some((slot, _)) = link.receiver.slot {
            self.free.push(slot);
        }
        self.begun.remove(&(link.peer, link.theirs));
        if let Some(known) = self.by_conn.get_mut(link.conn.index() as usize)
            && known.is_some_and(|(_, of)| of == id)
        {
            *known = None;
        }
        if is_told && link.theirs != 0 {
            self.say(link.peer, Kind::Reset, (link.theirs, link.own), 0);
        }
    }

    /// Ends a link that cannot go on.
    fn fail(&mut self, id: LinkId) {
        let Some(link) = self.links.get(id) else { return };
        let conn = link.conn;
        let event = match link.is_connecting() {
            true => Event::Refused { conn, why: Refusal::Absent },
            false => Event::Failed { conn },
        };
        self.end(id, true);
        self.events.push_back(event);
    }

    /// Sends a datagram that belongs to no connection, unless there are too many.
    fn say(&mut self, to: Place, kind: Kind, numbers: (u64, u64), status: u8) {
        if self.control.len() < MOST_CONTROL {
            self.control.push_back(Control { to, kind, numbers, status });
        }
    }

    fn post(&mut self, conn: ConnId, message: Message) -> bool {
        let Some(id) = self.link_of(conn) else { return false };
        let Some(link) = self.links.get_mut(id) else { return false };
        let is_taken = link.sender.push(message);
        self.wake(id);
        is_taken
    }
}

impl<M: Memory> Fabric for DatagramFabric<M> {
    fn connect(&mut self, conn: ConnId, to: &Name, hello: &Hello) {
        self.close(conn);
        // A name that is an address has no index of a queue pair.
        let peer = if to.incarnation == 0 { Place::of_socket(to.port) } else { Place::of(to) };
        let sender = self.sender();
        let link = Link::initiator(conn, peer, *hello, sender, self.now);
        let id = self.add_link(conn, link);
        self.wake(id);
    }

    fn accept(&mut self, incoming: u64, conn: ConnId, welcome: &Welcome) -> bool {
        let Some(at) = self.asked.iter().position(|asked| asked.0 == incoming) else {
            return false;
        };
        let Some((_, peer, theirs)) = self.asked.remove(at) else { return false };
        let sender = self.sender();
        let id = self.add_link(conn, Link::acceptor(conn, peer, theirs, *welcome, sender));
        self.begun.insert((peer, theirs), id);
        self.wake(id);
        true
    }

    fn reject(&mut self, incoming: u64, why: Status) {
        let Some(at) = self.asked.iter().position(|asked| asked.0 == incoming) else { return };
        if let Some((_, peer, theirs)) = self.asked.remove(at) {
            self.say(peer, Kind::Refused, (theirs, 0), why as u8);
        }
    }

    fn close(&mut self, conn: ConnId) {
        if let Some(id) = self.link_of(conn) {
            self.end(id, true);
        }
    }

    fn send(&mut self, conn: ConnId, bytes: &[u8], notify: Option<u64>) -> bool {
        let len = bytes.len() as u32;
        self.post(conn, Message::new(What::Send, Source::Copy(bytes.into()), len, notify))
    }

    fn send_buffer(&mut self, conn: ConnId, buffer: u32, len: usize, notify: u64) -> bool {
        let source = Source::Buffer(buffer);
        self.post(conn, Message::new(What::Send, source, len as u32, Some(notify)))
    }

    fn write(&mut self, conn: ConnId, from: Local, to: Remote, notify: Option<u64>) -> bool {
        if from.len > LONGEST {
            return false;
        }
        let mut message = Message::new(What::Write, Source::Local(from), from.len as u32, notify);
        (message.addr, message.key) = (to.addr, to.key);
        self.post(conn, message)
    }

    fn read(&mut self, conn: ConnId, into: Local, from: Remote, notify: u64) -> bool {
        if into.len > LONGEST {
            return false;
        }
        let Some(link) = self.link_of(conn).and_then(|id| self.links.get_mut(id)) else {
            return false;
        };
        let mut message = Message::new(What::Read, Source::None, into.len as u32, None);
        (message.addr, message.key, message.read) = (from.addr, from.key, link.next_read);
        link.reads.push_back((link.next_read, into, notify));
        link.next_read = link.next_read.wrapping_add(1);
        self.post(conn, message)
    }

    fn probe(&mut self, conn: ConnId, notify: u64) -> bool {
        let Some(id) = self.link_of(conn) else { return false };
        let Some(link) = self.links.get_mut(id) else { return false };
        (link.probe, link.owes_ping) = (Some(notify), true);
        self.wake(id);
        true
    }

    fn inline_limit(&self) -> usize {
        self.limits.datagram - OVERHEAD
    }

    fn store(&mut self, buffer: u32, at: usize, bytes: &[u8]) {
        let place = self.buffers.get_mut(buffer as usize);
        if let Some(place) = place.and_then(|buffer| buffer.get_mut(at..at + bytes.len())) {
            place.copy_from_slice(bytes);
        }
    }

    #[inline]
    fn load(&self, slot: u32, at: usize, out: &mut [u8]) {
        let bytes = self.slot(slot, at);
        let len = bytes.len().min(out.len());
        out[..len].copy_from_slice(&bytes[..len]);
    }

    fn repost(&mut self, slots: &[u32]) {
        self.free.extend_from_slice(slots);
    }

    fn provide(&mut self, slots: u32) -> bool {
        while self.slots.len() < slots as usize {
            self.free.push(self.slots.len() as u32);
            // Pages are used when messages touch them.
            self.slots.push(vec![0; self.limits.slot]);
        }
        true
    }
}
