//! SYNs that meet nobody wait for a moment in the line of their port, and are answered when somebody comes.
//!
//! Their senders would repeat them after a second (RFC 6298 (2.1)). What waits is what a SYN says, a hundred
//! octets, and it is promised nothing: in its turn it is answered as if it came then, by a connection or,
//! beyond the backlog, by a cookie. So a flood gets no more than by coming later, and takes nothing from who
//! brings a cookie back; if that comes too early, it waits in the same line, since its sender would wait for
//! a timer. While any waits nobody is there, or there is no room, so nobody is overtaken by a SYN. Where
//! a line is full the newest is dropped, as all were if there were no lines: if the oldest gave way, those
//! that had waited for longest would have waited without result, and a flood would push everybody out.

use std::collections::VecDeque;

use quipu_wire::ndp::Station;
use quipu_wire::tcp::{Flags, Repr, SeqNumber};

use super::Stack;
use super::demux::{Demux, Key};
use super::listeners::Listeners;
use crate::tcp::{MILLISECOND, Secret};

/// How long one waits. The answer is to be there before the SYN is repeated; and the peer takes the wait for
/// a part of the round trip, three of which are its first timeout (RFC 6298 (2.2)): that is to remain below
/// the second that it begins with.
const PATIENCE: u64 = 250 * MILLISECOND;
/// The most that wait for one port, if its backlog is not less.
const MOST_OF_PORT: usize = 128;
/// The most that wait in all.
const MOST_IN_ALL: usize = 1_024;

/// A SYN that waits, or an acknowledgement that has brought a cookie back.
#[derive(Clone, Debug)]
pub(super) struct Syn {
    key: Key,
    /// Where it came from: see [`super::egress::Answer`].
    station: Option<Station>,
    header: Repr,
    until: u64,
    /// It was reset: its place is all that is left.
    withdrawn: bool,
}

impl Syn {
    /// Whether it has brought a cookie back.
    fn has_cookie(&self) -> bool {
        !self.withdrawn && !self.header.flags.has(Flags::SYN)
    }

    /// Whether a reset of this number is its sender's, who may have asked by a probe, of the number before.
    fn is_reset_by(&self, seq: SeqNumber) -> bool {
        let next = self.header.seq + 1;
        seq == next || (seq == self.header.seq && self.has_cookie())
    }
}

/// Those that wait for one port, in the order in which they came; one of each peer.
#[derive(Clone, Debug)]
pub(super) struct Line {
    syns: VecDeque<Syn>,
    /// The number of the first.
    first: u32,
    /// From ends to numbers.
    numbers: Demux,
    most: usize,
}

/// Numbers go round; the highest are not for a [`Demux`].
const NUMBERS: u32 = u32::MAX >> 1;

impl Line {
    pub(super) fn new(backlog: u32) -> Self {
        let most = MOST_OF_PORT.min(backlog as usize);
        Self { syns: VecDeque::new(), first: 0, numbers: Demux::default(), most }
    }

    fn find(&mut self, secret: Secret, key: &Key) -> Option<&mut Syn> {
        if self.syns.is_empty() {
            return None;
        }
        let at = |number: u32| (number.wrapping_sub(self.first) & NUMBERS) as usize;
        let is = |number| self.syns.get(at(number)).is_some_and(|syn| syn.key == *key);
        let place = at(self.numbers.get(key.hash(secret), is)?);
        self.syns.get_mut(place)
    }

    fn push(&mut self, secret: Secret, syn: Syn) {
        let number = self.first.wrapping_add(self.syns.len() as u32) & NUMBERS;
        self.numbers.insert(syn.key.hash(secret), number);
        self.syns.push_back(syn);
    }

    fn pop(&mut self, secret: Secret) -> Option<Syn> {
        let syn = self.syns.pop_front()?;
        self.numbers.remove(syn.key.hash(secret), self.first);
        self.first = self.first.wrapping_add(1) & NUMBERS;
        Some(syn)
    }
}

impl Listeners {
    /// Takes the first of a line.
    fn pop_syn(&mut self, secret: Secret, at: u32) -> Option<Syn> {
        let line = &mut self.at(at)?.line;
        let syn = line.pop(secret)?;
        if line.syns.is_empty() {
            self.patience.cancel(at);
        }
        self.waiting -= 1;
        Some(syn)
    }

    /// Nobody will answer those of a line; says how many that were.
    pub(super) fn dismiss(&mut self, at: u32) -> usize {
        let dismissed =
            self.at(at).map_or(0, |watched| std::mem::take(&mut watched.line.syns).len());
        self.patience.cancel(at);
        self.waiting -= dismissed;
        dismissed
    }
}

impl Stack {
    /// Whether a SYN of this peer, or its acknowledgement, waits for a port.
    pub(super) fn waits(&mut self, at: u32, key: &Key) -> bool {
        let (secret, watched) = (self.secret, self.listeners.at(at));
        watched.is_some_and(|watched| watched.line.find(secret, key).is_some())
    }

    /// A SYN waits, if there is room. One that its sender repeats, or has replaced, keeps its place; but one
    /// that comes behind the acknowledgement of a cookie is late, or somebody else's.
    pub(super) fn hold(
        &mut self,
        now: u64,
        at: u32,
        key: &Key,
        header: &Repr,
        station: Option<Station>,
    ) {
        let (secret, listeners) = (self.secret, &mut self.listeners);
        let full = listeners.waiting == MOST_IN_ALL;
        let Some(watched) = listeners.at(at) else { return };
        let until = now + PATIENCE;
        let syn = Syn { key: *key, station, header: *header, until, withdrawn: false };
        if let Some(older) = watched.line.find(secret, key) {
            if header.flags.has(Flags::SYN) && older.has_cookie() {
                self.counters.tcp_waiting += 1;
                return;
            }
            *older = Syn { until: older.until, ..syn };
            self.counters.tcp_given_up += 1;
        } else if full || watched.line.syns.len() >= watched.line.most {
            self.counters.tcp_waiting += 1;
            return;
        } else {
            watched.line.push(secret, syn);
            if watched.line.syns.len() == 1 {
                listeners.patience.set(at, until);
            }
            listeners.waiting += 1;
        }
        self.counters.tcp_held += 1;
    }

    /// The sender of a SYN that may wait does not want an answer any more. It must know the number, as for a
    /// connection that is half open (RFC 5961).
    pub(super) fn withdraw(&mut self, at: u32, key: &Key, seq: SeqNumber) {
        let (secret, watched) = (self.secret, self.listeners.at(at));
        if let Some(syn) = watched.and_then(|watched| watched.line.find(secret, key)) {
            syn.withdrawn |= syn.is_reset_by(seq);
        }
    }

    /// Answers those that wait for a port, as long as somebody is there for them.
    pub(super) fn answer_held(&mut self, now: u64, at: u32) {
        while self.may_open(at)
            && let Some(syn) = self.listeners.pop_syn(self.secret, at)
        {
            // Or this end has asked for the same connection meanwhile.
            if syn.withdrawn || self.connections.find(&syn.key).is_some() {
                self.counters.tcp_given_up += 1;
                continue;
            }
            self.counters.tcp_late += 1;
            self.meet(now, at, &syn.key, &syn.header, 0, syn.station);
        }
    }

    /// Those that have waited for too long wait no more: their senders will repeat them.
    pub(super) fn expire_held(&mut self, now: u64) {
        while let Some(at) = self.listeners.patience.expired(now) {
            while let Some(until) =
                self.listeners.at(at).and_then(|it| it.line.syns.front()).map(|it| it.until)
            {
                if until > now {
                    self.listeners.patience.set(at, until);
                    break;
                }
                self.listeners.pop_syn(self.secret, at);
                self.counters.tcp_given_up += 1;
            }
        }
    }
}
