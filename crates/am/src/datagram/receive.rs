//! Datagrams that come in. The peer is not trusted: bounds before bytes.

use std::hash::{DefaultHasher, Hash, Hasher};

use super::link::{Link, Phase};
use super::packet::{Fragment, Head, Kind, What};
use super::sender::{Message, Source, WINDOW};
use super::{DatagramFabric, LinkId, Memory, Place};
use crate::fabric::{Event, Hello, Refusal, Remote, Welcome};
use crate::types::Status;

/// Fragments after gaps that all links together keep.
const MOST_HELD: usize = 1024;
/// Hellos that may wait for the engine.
const MOST_ASKED: usize = 256;
/// A cookie is valid for so long at least, and for twice as long at most.
const COOKIE_NS: u64 = 10_000_000_000;

/// What became of a fragment in order.
enum Taken {
    Yes,
    /// There is no room now: it is sent again later.
    NoRoom,
    /// No peer sends that.
    Never,
}

impl<M: Memory> DatagramFabric<M> {
    /// Takes in a datagram.
    pub fn handle_datagram(&mut self, now: u64, from: Place, bytes: &[u8]) {
        self.now = self.now.max(now);
        self.counters.received += 1;
        let is_used = Head::parse(bytes).is_some_and(|(head, rest)| match head.kind {
            // Sockets that are no queue pairs answer questions, and say nothing else.
            Kind::Here => from.socket().is_some() && self.handle_here(from, &head, rest),
            _ if from.socket().is_some() => false,
            Kind::Where => false,
            Kind::Hello => self.handle_hello(from, &head, rest),
            _ => self.handle_known(from, &head, rest),
        });
        self.counters.dropped += u64::from(!is_used);
    }

    /// What a hello from a place must carry: only a peer that receives datagrams there knows it. A hash of
    /// the secret seed, so that nothing has to be kept of hellos without it.
    fn cookie(&self, from: Place, number: u64, period: u64) -> u64 {
        let mut hash = DefaultHasher::new();
        (self.limits.seed, "cookie", from, number, period).hash(&mut hash);
        hash.finish() | 1
    }

    fn is_cookie(&self, from: Place, head: &Head) -> bool {
        let period = self.now / COOKIE_NS;
        [period, period.saturating_sub(1)]
            .into_iter()
            .any(|period| head.to == self.cookie(from, head.from, period))
    }

    fn handle_hello(&mut self, from: Place, head: &Head, rest: &[u8]) -> bool {
        // A peer has the name of the place that it sends from: nobody takes the name of another. Of a name
        // that is an address, the IP address is the sender's.
        let is_own_name = |hello: &Hello| {
            let is_own_address = hello.from.is_of_address() && hello.from.port.ip() == from.ip;
            head.from != 0 && (is_own_address || Place::of(&hello.from) == from)
        };
        let Some(hello) = Hello::parse(rest).filter(is_own_name) else { return false };
        if let Some(id) = self.begun.get(&(from, head.from)).copied() {
            if let Some(Phase::Up { owes_welcome, .. }) =
                self.links.get_mut(id).map(|link| &mut link.phase)
            {
                *owes_welcome = true;
            }
            self.wake(id);
            return true;
        }
        if !self.is_cookie(from, head) {
            let cookie = self.cookie(from, head.from, self.now / COOKIE_NS);
            self.say(from, Kind::Challenge, (head.from, cookie), 0);
            return true;
        }
        let is_asked = self.asked.iter().any(|asked| (asked.1, asked.2) == (from, head.from));
        if is_asked || self.asked.len() >= MOST_ASKED {
            return false;
        }
        self.next_number = self.next_number.wrapping_add(1);
        self.asked.push_back((self.next_number, from, head.from));
        self.events.push_back(Event::Incoming { incoming: self.next_number, hello });
        true
    }

    /// The link that a datagram is for.
    fn link_for(&self, from: Place, head: &Head) -> Option<LinkId> {
        let (id, link) = self.links.at(head.to as u32 & 0x7fff_ffff)?;
        let is_known = link.theirs == head.from || link.theirs == 0;
        (link.own == head.to && link.peer == from && is_known).then_some(id)
    }

    /// An endpoint at an address of its own has been found.
    fn handle_here(&mut self, from: Place, head: &Head, rest: &[u8]) -> bool {
        let id = self.link_for(from, &Head { from: 0, ..*head });
        id.is_some_and(|id| self.handle_found(id, rest))
    }

    fn handle_known(&mut self, from: Place, head: &Head, rest: &[u8]) -> bool {
        let Some(id) = self.link_for(from, head) else {
            let is_last = matches!(head.kind, Kind::Reset | Kind::Refused | Kind::Challenge);
            if !is_last && head.from != 0 {
                self.say(from, Kind::Reset, (head.from, head.to), 0);
            }
            return false;
        };
        let Some(link) = self.links.get_mut(id) else { return false };
        (link.last_heard, link.asked_since) = (self.now, None);
        let conn = link.conn;
        if let Some(notify) = link.probe.take() {
            self.events.push_back(Event::Done { conn, notify });
        }
        match head.kind {
            Kind::Hello | Kind::Where | Kind::Here => false,
            Kind::Challenge => self.handle_challenge(id, head.from),
            Kind::Welcome => self.handle_welcome(id, head, rest),
            Kind::Refused if link.is_connecting() => {
                let status = rest.first().and_then(|byte| Status::from_wire(*byte).flatten());
                let why = status.map_or(Refusal::Absent, Refusal::Said);
                self.end(id, false);
                self.events.push_back(Event::Refused { conn, why });
                true
            }
            Kind::Reset => {
                self.end_by_peer(id);
                true
            }
            _ if link.is_connecting() => false,
            Kind::Refused => false,
            Kind::Data | Kind::Ack | Kind::Ping => self.handle_up(id, head, rest),
        }
    }

    /// The peer knows nothing of the connection, or has ended it.
    fn end_by_peer(&mut self, id: LinkId) {
        let Some(link) = self.links.get(id) else { return };
        let conn = link.conn;
        let event = match link.is_connecting() {
            true => Event::Refused { conn, why: Refusal::Absent },
            false => Event::Failed { conn },
        };
        self.end(id, false);
        self.events.push_back(event);
    }

    /// The peer wants to read a cookie before it keeps anything of this end.
    fn handle_challenge(&mut self, id: LinkId, theirs: u64) -> bool {
        let Some(link) = self.links.get_mut(id) else { return false };
        let Phase::Connecting { cookie, is_due, has_answered, .. } = &mut link.phase else {
            return false;
        };
        *cookie = theirs;
        *is_due |= !std::mem::replace(has_answered, true);
        self.wake(id);
        true
    }

    fn handle_welcome(&mut self, id: LinkId, head: &Head, rest: &[u8]) -> bool {
        let Some(link) = self.links.get_mut(id).filter(|link| link.is_connecting()) else {
            return false;
        };
        let Some(welcome) = Welcome::parse(rest).filter(|_| head.from != 0) else { return false };
        link.theirs = head.from;
        link.phase = Phase::Up { welcome: None, owes_welcome: false };
        let conn = link.conn;
        self.events.push_back(Event::Connected { conn, welcome });
        true
    }

    fn handle_up(&mut self, id: LinkId, head: &Head, rest: &[u8]) -> bool {
        let now = self.now;
        let Some(link) = self.links.get_mut(id) else { return false };
        let (conn, events) = (link.conn, &mut self.events);
        let mut done = |notify| events.push_back(Event::Done { conn, notify });
        if !link.sender.acknowledge(head.ack, head.later, now, &mut done) {
            self.fail(id);
            return false;
        }
        link.owes_ack |= head.kind == Kind::Ping;
        let is_used = head.kind != Kind::Data || self.handle_data(id, head.seq, rest);
        if let Some(link) = self.links.get(id) {
            let at = link.deadline(self.limits.give_up_ns);
            if link.has_due() {
                self.wake(id);
            }
            self.set_timer(at);
        }
        is_used
    }

    /// Takes a fragment in, and those that have waited for it.
    fn handle_data(&mut self, id: LinkId, seq: u32, rest: &[u8]) -> bool {
        let Some(link) = self.links.get_mut(id) else { return false };
        let expected = link.receiver.expected;
        let ahead = seq.wrapping_sub(expected as u32).cast_signed();
        let place = u64::from(ahead.unsigned_abs());
        if ahead < 0 || place >= WINDOW {
            // It has come before, or no sender sends it yet.
            link.owes_ack = true;
            return false;
        }
        if ahead > 0 {
            link.owes_ack = true;
            let seq = expected + place;
            if self.held >= MOST_HELD || link.receiver.held.contains_key(&seq) {
                return false;
            }
            link.receiver.held.insert(seq, rest.into());
            self.held += 1;
            return true;
        }
        if !self.take_in(id, rest) {
            return false;
        }
        while let Some(link) = self.links.get_mut(id) {
            let Some(next) = link.receiver.held.first_entry() else { break };
            if *next.key() != link.receiver.expected {
                break;
            }
            let bytes = next.remove();
            self.held -= 1;
            if !self.take_in(id, &bytes) {
                break;
            }
        }
        true
    }

    /// Takes in the next fragment in order; whether it was taken.
    fn take_in(&mut self, id: LinkId, bytes: &[u8]) -> bool {
        let taken = match Fragment::parse(bytes) {
            Some((fragment, payload)) => self.take_fragment(id, &fragment, payload),
            None => Taken::Never,
        };
        let Some(link) = self.links.get_mut(id) else { return false };
        match taken {
            Taken::Yes => {
                link.owes_ack |= link.receiver.note_in_order(self.now);
                true
            }
            Taken::NoRoom => false,
            Taken::Never => {
                self.fail(id);
                false
            }
        }
    }

    fn take_fragment(&mut self, id: LinkId, fragment: &Fragment, payload: &[u8]) -> Taken {
        let Some(link) = self.links.get_mut(id) else { return Taken::Never };
        let &Fragment { what, len, offset, addr, key, read } = fragment;
        if what == What::Read {
            let from = Remote { addr, len: len.into(), key };
            return if payload.is_empty() && link.receiver.filled == 0 {
                answer(link, self.limits.reads, from, read)
            } else {
                Taken::Never
            };
        }
        let filled = link.receiver.filled;
        let fits = payload.len() as u64 <= u64::from(len.saturating_sub(offset));
        if offset != filled || !fits || (payload.is_empty() && len > 0) {
            return Taken::Never;
        }
        let after = filled + payload.len() as u32;
        let is_whole = after == len;
        let at = u64::from(offset);
        match what {
            What::Send => match self.take_send(id, fragment, payload, is_whole) {
                Taken::Yes => {}
                other => return other,
            },
            What::Write => {
                let to = Remote { addr, len: len.into(), key };
                if link.receiver.slot.is_some()
                    || (len > 0 && !self.memory.write_shown(to, at, payload))
                {
                    return Taken::Never;
                }
            }
            What::Answer => {
                let known = link.reads.front().copied();
                let Some((number, into, notify)) = known else { return Taken::Never };
                if number != read || into.len != u64::from(len) || link.receiver.slot.is_some() {
                    return Taken::Never;
                }
                if !self.memory.write(into, at, payload) {
                    return Taken::Never;
                }
                if is_whole {
                    link.reads.pop_front();
                    self.events.push_back(Event::Done { conn: link.conn, notify });
                }
            }
            What::Read => return Taken::Never,
        }
        if let Some(link) = self.links.get_mut(id) {
            link.receiver.filled = if is_whole { 0 } else { after };
        }
        Taken::Yes
    }

    /// Puts a fragment of a send into the slot of its message.
    fn take_send(
        &mut self,
        id: LinkId,
        fragment: &Fragment,
        payload: &[u8],
        is_whole: bool,
    ) -> Taken {
        let Some(link) = self.links.get_mut(id) else { return Taken::Never };
        let (len, offset) = (fragment.len, fragment.offset as usize);
        let slot = match link.receiver.slot {
            Some((slot, of)) if of == len && offset > 0 => slot,
            None if offset == 0 && len as usize <= self.limits.slot => {
                let Some(slot) = self.free.pop() else { return Taken::NoRoom };
                slot
            }
            _ => return Taken::Never,
        };
        let place = self.slots.get_mut(slot as usize);
        if let Some(place) = place.and_then(|slot| slot.get_mut(offset..offset + payload.len())) {
            place.copy_from_slice(payload);
        }
        link.receiver.slot = (!is_whole).then_some((slot, len));
        if is_whole {
            let (conn, len) = (Some(link.conn), len as usize);
            self.events.push_back(Event::Received { conn, slot, len });
        }
        Taken::Yes
    }
}

/// Has a read of the peer answered.
fn answer(link: &mut Link, most: usize, from: Remote, read: u32) -> Taken {
    if link.sender.answers >= most {
        return Taken::NoRoom;
    }
    let mut message = Message::new(What::Answer, Source::Shown(from), from.len as u32, None);
    message.read = read;
    if link.sender.push(message) { Taken::Yes } else { Taken::NoRoom }
}
