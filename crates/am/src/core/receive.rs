//! What queue pairs report: messages, posts that are done, connections that fail.

use super::Core;
use crate::conn::{Conn, ConnId, PeerSegment};
use crate::endpoint::{Arrived, What};
use crate::fabric::{Event, Fabric, Refusal, Remote};
use crate::message::{Kind, MAX_HEAD, Message};
use crate::records::{Purpose, Record};
use crate::types::{Arg, Category, Operation, Status};

/// What the number of a post means, in its upper byte.
pub(super) mod notify {
    /// Nothing: it makes room in the send queue.
    pub const CHECKPOINT: u64 = 0;
    /// A send buffer is free.
    pub const BUFFER: u64 = 1 << 56;
    /// The source of a bulk request is free: serial number and place of its record.
    pub const SOURCE: u64 = 2 << 56;
    /// A get is done: serial number and place of its record.
    pub const GET: u64 = 3 << 56;
    /// The source of a bulk reply is free: its ticket.
    pub const REPLY: u64 = 4 << 56;
    /// The upper byte.
    pub const WHAT: u64 = 0xff << 56;

    /// Names a record.
    pub fn of_record(what: u64, id: u16, serial: u32) -> u64 {
        what | u64::from(serial) << 16 | u64::from(id)
    }
}

impl<F: Fabric, H: Clone> Core<F, H> {
    /// Takes in what happened.
    #[inline]
    pub fn handle_event(&mut self, event: Event) {
        match event {
            Event::Received { conn, slot, len } => self.received(conn, slot, len),
            Event::Unused { slot } => self.repost(slot),
            Event::Done { conn, notify } => self.done(conn, notify),
            Event::Failed { conn } => self.give_up(conn, Status::Unreachable),
            Event::Connected { conn, welcome } => self.connected(conn, welcome),
            Event::Refused { conn, why: Refusal::Absent } => self.try_again(conn),
            Event::Refused { conn, why: Refusal::Said(Status::Congestion) } => self.try_again(conn),
            Event::Refused { conn, why: Refusal::Said(status) } => self.give_up(conn, status),
            Event::Incoming { incoming, hello } => self.incoming(incoming, &hello),
        }
    }

    #[inline]
    fn received(&mut self, conn: Option<ConnId>, slot: u32, len: usize) {
        let Some(id) = conn.filter(|conn| self.conns.get(*conn).is_some()) else {
            return self.repost(slot);
        };
        let mut head = [0; MAX_HEAD];
        let head = &mut head[..len.min(MAX_HEAD)];
        self.fabric.load(slot, 0, head);
        let parsed = Message::parse(head, len);
        // A payload stays where it is until its handler has run; everything else is in the message
        // now.
        let payload = match &parsed {
            Some((message, at)) if message.category == Category::Medium => Some((slot, *at as u32)),
            _ => None,
        };
        if payload.is_none() {
            self.repost(slot);
        }
        let accepted = self.conns.get_mut(id).is_some_and(|conn| conn.acceptor().is_some());
        let taken = match &parsed {
            Some((message, _)) if accepted => self.for_acceptor(id, message, payload),
            Some((message, _)) => self.for_initiator(id, message, payload),
            None => false,
        };
        if !taken {
            // No engine sends that: the connection ends.
            if payload.is_some() {
                self.repost(slot);
            }
            self.give_up(id, Status::Unreachable);
        }
    }

    /// Whether an engine would send this message, and so now, to the end that has accepted.
    #[inline]
    fn for_acceptor(&mut self, id: ConnId, message: &Message, slot: Option<(u32, u32)>) -> bool {
        let Some(conn) = self.conns.get_mut(id) else { return false };
        let endpoint = conn.endpoint;
        let Some(acceptor) = conn.acceptor() else { return false };
        if message.kind == Kind::Revoked {
            return slot.is_none() && self.control_answered(id, message.credits);
        }
        if acceptor.in_service >= acceptor.granted {
            return false;
        }
        acceptor.in_service += 1;
        if let Some(tag) = message.tag {
            acceptor.tag = tag;
        }
        match message.kind {
            Kind::Request => {
                let what = What::Request { conn: id, tag: acceptor.tag };
                self.enqueue(Arrived { endpoint, what, message: *message, slot });
                true
            }
            Kind::Segment if message.category == Category::Bulk => {
                acceptor.segment = segment_of(message);
                let own = self.endpoints.get(endpoint).and_then(|endpoint| endpoint.segment);
                let mut answer = Message::new(Kind::SegmentInfo, message.id);
                put_segment(&mut answer, own);
                self.answer(id, answer, message.starved);
                true
            }
            Kind::ReplyRefused if slot.is_none() => {
                let operation = Operation::Reply(message.category);
                let to = self.conns.get(id).map(|conn| conn.peer);
                if let Some(to) = to {
                    let what = What::Returned { status: Status::ReplyRejected, operation, to };
                    self.enqueue(Arrived { endpoint, what, message: *message, slot });
                }
                self.answer(id, Message::new(Kind::Ack, message.id), message.starved);
                true
            }
            _ => false,
        }
    }

    /// The same, to the end that has connected.
    #[inline]
    fn for_initiator(&mut self, id: ConnId, message: &Message, slot: Option<(u32, u32)>) -> bool {
        if slot.is_some() && message.kind != Kind::Reply {
            return false;
        }
        let Some(conn) = self.conns.get_mut(id) else { return false };
        let endpoint = conn.endpoint;
        let Some(initiator) = conn.initiator() else { return false };
        match message.kind {
            Kind::Revoke => {
                self.give_back(id, message.credits);
                return true;
            }
            Kind::SegmentChanged => {
                initiator.segment = PeerSegment::Unknown;
                self.give_back(id, 0);
                return true;
            }
            _ => {}
        }
        let Some(record) = self.records.of(message.id, id) else { return false };
        if record.is_answered {
            return false;
        }
        if let Kind::Reply = message.kind {
            record.is_answered = true;
            if !matches!(record.purpose, Purpose::Program(Operation::Request(_))) {
                return false;
            }
            let what = What::Reply { conn: id };
            // Its place, and the credit, are free when the handler is about to run.
            self.enqueue(Arrived { endpoint, what, message: *message, slot });
            return true;
        }
        let purpose = record.purpose;
        let expected = match message.kind {
            Kind::Ack => !matches!(purpose, Purpose::Segment | Purpose::Program(Operation::Get)),
            Kind::Return => matches!(purpose, Purpose::Program(Operation::Request(_))),
            Kind::SegmentInfo => purpose == Purpose::Segment && message.category == Category::Bulk,
            _ => false,
        };
        if !expected {
            return false;
        }
        if message.kind == Kind::SegmentInfo {
            let none = Remote { addr: 0, len: 0, key: 0 };
            initiator.segment = PeerSegment::Known(segment_of(message).unwrap_or(none));
        }
        let returned = (message.kind == Kind::Return).then_some(*record);
        self.retire(id, message.id, message.credits);
        if let Some(record) = returned {
            self.returned(id, &record, message.status.unwrap_or(Status::BadArgs));
        }
        self.close_if_idle(id);
        true
    }

    /// Ends a request: its place is free, and so is its credit.
    #[inline]
    pub(super) fn retire(&mut self, id: ConnId, record: u16, credits: i8) {
        if self.records.of(record, id).is_none() {
            // The connection has ended meanwhile, and another request may have the place.
            return;
        }
        self.records.remove(record);
        let most = self.config.max_window.max(1);
        let Some(initiator) = self.conns.get_mut(id).and_then(Conn::initiator) else { return };
        initiator.in_flight = initiator.in_flight.saturating_sub(1);
        if credits != 0 {
            let window = initiator.window.saturating_add_signed(credits.into());
            initiator.window = window.clamp(1, most);
        }
    }

    /// Has a request come back to the program.
    pub(super) fn returned(&mut self, id: ConnId, record: &Record, status: Status) {
        let Purpose::Program(operation) = record.purpose else { return };
        let Some(conn) = self.conns.get(id) else { return };
        let what = What::Returned { status, operation, to: conn.peer };
        let endpoint = conn.endpoint;
        self.enqueue(Arrived { endpoint, what, message: record.message, slot: None });
    }

    #[inline]
    fn done(&mut self, conn: ConnId, number: u64) {
        let (id, serial) = (number as u16, (number >> 16) as u32);
        match number & notify::WHAT {
            notify::BUFFER => {
                let Some(owner) = self.buffers.release(number as u32) else { return };
                if let Some(acceptor) = self.conns.get_mut(owner).and_then(Conn::acceptor) {
                    acceptor.buffers = acceptor.buffers.saturating_sub(1);
                }
            }
            notify::SOURCE => {
                let record = self.records.of(id, conn).filter(|record| record.serial == serial);
                if let Some(record) = record {
                    record.is_source_free = true;
                }
            }
            notify::GET => {
                let record = self.records.of(id, conn).filter(|record| record.serial == serial);
                let Some(record) = record.copied() else { return };
                self.records.remove(id);
                if let Some(known) = self.conns.get(conn) {
                    let (endpoint, what) = (known.endpoint, What::Got);
                    self.enqueue(Arrived { endpoint, what, message: record.message, slot: None });
                }
            }
            notify::REPLY => self.reply_writes.retain(|(ticket, _)| *ticket != number as u32),
            _ => {}
        }
    }

    /// The peer has answered a control message; whether it may.
    fn control_answered(&mut self, id: ConnId, credits: i8) -> bool {
        if !self.take_back(id, credits) {
            return false;
        }
        let news = self.conns.get_mut(id).and_then(Conn::acceptor);
        if news.is_some_and(|acceptor| std::mem::take(&mut acceptor.has_news)) {
            self.announce_segment(id);
        }
        true
    }

    /// Has a peer ask for the segment again.
    pub(super) fn announce_segment(&mut self, id: ConnId) {
        let Some(acceptor) = self.conns.get_mut(id).and_then(Conn::acceptor) else { return };
        if acceptor.has_control {
            acceptor.has_news = true;
            return;
        }
        acceptor.has_control = true;
        self.send_head(id, &Message::new(Kind::SegmentChanged, 0));
    }
}

/// The segment that a message tells of; none if it is empty.
fn segment_of(message: &Message) -> Option<Remote> {
    let key = message.args[0].cast_unsigned();
    (message.len > 0).then_some(Remote { addr: message.offset, len: message.len, key })
}

/// Has a message tell of a segment.
pub(super) fn put_segment(message: &mut Message, segment: Option<Remote>) {
    let Remote { addr, len, key } = segment.unwrap_or(Remote { addr: 0, len: 0, key: 0 });
    message.category = Category::Bulk;
    (message.offset, message.len, message.nargs) = (addr, len, 1);
    message.args[0] = Arg::from_ne_bytes(key.to_ne_bytes());
}
