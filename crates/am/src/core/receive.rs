//! What queue pairs report: messages, posts that are done, connections that fail.

use super::{Core, Delivery, signals};
use crate::conn::{Acceptor, Conn, ConnId, Initiator, PeerSegment, Role};
use crate::endpoint::{Arrived, BundleId, EndpointId, Returned, What};
use crate::fabric::{Event, Fabric, Refusal, Remote};
use crate::message::{FIXED, Kind, MAX_HEAD, Message};
use crate::records::{Purpose, Record};
use crate::types::{Arg, Category, MAX_ARGS, Operation, Status, Tag};

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
    /// The peer has given a sign of life.
    pub const PROBE: u64 = 5 << 56;
    /// The upper byte.
    pub const WHAT: u64 = 0xff << 56;

    /// Names a record.
    pub fn of_record(what: u64, id: u16, serial: u32) -> u64 {
        what | u64::from(serial) << 16 | u64::from(id)
    }
}

/// So many bytes are read of a message that has no more, whatever it has.
pub(super) const SMALL: usize = 32;
/// Arguments of the longest of these.
const MOST_SMALL_ARGS: usize = (SMALL - FIXED) / 4;

impl<F: Fabric, H: Clone> Core<F, H> {
    /// Takes in what happened.
    #[inline]
    pub fn handle_event(&mut self, event: Event) {
        // Without a bundle nothing is delivered at once.
        let _ = self.take_in(None, event);
    }

    /// Takes in what happened. A message whose handler may run now, in a bundle in which no other
    /// waits, comes back at once, as if from [`next_delivery`](Self::next_delivery).
    #[inline]
    pub fn deliver_event(&mut self, bundle: BundleId, event: Event) -> Option<Box<Delivery<H>>> {
        self.take_in(Some(bundle), event)
    }

    #[inline]
    fn take_in(&mut self, bundle: Option<BundleId>, event: Event) -> Option<Box<Delivery<H>>> {
        match event {
            Event::Received { conn, slot, len } => return self.received(bundle, conn, slot, len),
            Event::Done { conn, notify } => self.done(conn, notify),
            other => self.happened(other),
        }
        None
    }

    /// What happens seldom.
    #[cold]
    fn happened(&mut self, event: Event) {
        match event {
            Event::Received { .. } | Event::Done { .. } => {}
            Event::Unused { slot } => self.repost(slot),
            Event::Failed { conn } => {
                // A process may end when it has sent its last message.
                self.drain_lane(conn);
                self.give_up(conn, Status::Unreachable);
            }
            Event::Connected { conn, welcome } => self.connected(conn, welcome),
            Event::Refused { conn, why: Refusal::Absent } => self.try_again(conn),
            Event::Refused { conn, why: Refusal::Said(Status::Congestion) } => self.try_again(conn),
            Event::Refused { conn, why: Refusal::Said(status) } => self.give_up(conn, status),
            Event::Incoming { incoming, hello } => self.incoming(incoming, &hello),
        }
    }

    #[inline]
    fn received(
        &mut self,
        bundle: Option<BundleId>,
        conn: Option<ConnId>,
        slot: u32,
        len: usize,
    ) -> Option<Box<Delivery<H>>> {
        if let Some(conn) = conn {
            self.count_received(conn);
        }
        if let (Some(polled), Some(conn), ..=SMALL) = (bundle, conn, len) {
            // Most are so short. A slot has room for the longest head, but bytes after a message that has
            // just come may not be read with it: the processor would wait for the cache.
            let mut head = [0; SMALL];
            if len <= SMALL / 2 {
                self.fabric.load(slot, 0, &mut head[..SMALL / 2]);
            } else {
                self.fabric.load(slot, 0, &mut head);
            }
            if signals::is_signal(&head, len) {
                self.repost(slot);
                if !self.received_signal(conn, &Message::new(Kind::Signal, 0), false) {
                    self.give_up(conn, Status::Unreachable);
                }
                return None;
            }
            let fixed = head.first_chunk().map_or(0, |fixed| u64::from_le_bytes(*fixed));
            let arg = |n: usize| {
                let bytes = head.get(FIXED + 4 * n..).and_then(<[u8]>::first_chunk);
                bytes.map_or(0, |bytes| Arg::from_le_bytes(*bytes))
            };
            let is_whole = len == FIXED + 4 * usize::from(head[1]);
            if is_whole
                && let Some(delivery) =
                    self.deliver_short(polled, conn, (fixed, false), (MOST_SMALL_ARGS, arg))
            {
                self.repost(slot);
                return Some(delivery);
            }
        }
        self.received_any(bundle, conn, slot, len)
    }

    /// Takes in a message of any kind.
    #[inline(never)]
    fn received_any(
        &mut self,
        bundle: Option<BundleId>,
        conn: Option<ConnId>,
        slot: u32,
        len: usize,
    ) -> Option<Box<Delivery<H>>> {
        let Some(id) = conn.filter(|conn| self.conns.get(*conn).is_some()) else {
            self.repost(slot);
            return None;
        };
        let mut head = [0; MAX_HEAD];
        self.fabric.load(slot, 0, &mut head[..len.min(MAX_HEAD)]);
        let mut args = [0; MAX_ARGS];
        let Some((message, at)) = Message::parse(&head, len, &mut args) else {
            self.repost(slot);
            self.give_up(id, Status::Unreachable);
            return None;
        };
        // A payload stays where it is until its handler has run; everything else is in the message
        // now.
        let payload = (message.category == Category::Medium).then_some((slot, at as u32));
        if payload.is_none() {
            self.repost(slot);
        }
        self.take_message(bundle, id, (message, args), payload, false)
    }

    /// Takes in a message that has come over the queue pair or in a lane.
    pub(super) fn take_message(
        &mut self,
        bundle: Option<BundleId>,
        id: ConnId,
        (message, args): (Message, [Arg; MAX_ARGS]),
        payload: Option<(u32, u32)>,
        by_lane: bool,
    ) -> Option<Box<Delivery<H>>> {
        let known = self.conns.get_mut(id)?;
        let endpoint = known.endpoint;
        let what = match (&mut known.role, message.kind) {
            (Role::Acceptor(acceptor), Kind::Request) => {
                let is_taken = acceptor.take_request(message.tag);
                is_taken.then_some(What::Request { conn: id, tag: acceptor.tag, by_lane })
            }
            (Role::Initiator(_), Kind::Reply) => {
                let record = self.records.of(message.id, id);
                record.and_then(Record::take_answer).map(|()| What::Reply { conn: id })
            }
            _ => None,
        };
        match what {
            Some(what) => {
                self.arrive(bundle, Arrived { endpoint, what, message, args, slot: payload })
            }
            None => {
                self.received_other(id, (&message, by_lane), &args, payload);
                None
            }
        }
    }

    /// A message that runs no handler of a request or of a reply.
    fn received_other(
        &mut self,
        id: ConnId,
        (message, by_lane): (&Message, bool),
        args: &[Arg; MAX_ARGS],
        payload: Option<(u32, u32)>,
    ) {
        let accepted = self.conns.get_mut(id).is_some_and(|conn| conn.acceptor().is_some());
        let taken = match (accepted, payload) {
            (_, Some(_)) => false,
            (_, None) if message.kind == Kind::Wake => self.woken(id, message),
            (true, None) => self.for_acceptor(id, (message, by_lane), args),
            (false, None) => self.for_initiator(id, message, args),
        };
        if !taken {
            // No engine sends that: the connection ends.
            if let Some((slot, _)) = payload {
                self.repost(slot);
            }
            self.give_up(id, Status::Unreachable);
        }
    }

    /// Whether an engine would send this message, which is no request and has no payload, and so
    /// now, to the end that has accepted.
    fn for_acceptor(
        &mut self,
        id: ConnId,
        (message, by_lane): (&Message, bool),
        args: &[Arg; MAX_ARGS],
    ) -> bool {
        match (message.kind, message.category) {
            (Kind::Revoked, _) => return self.control_answered(id, message.credits),
            (Kind::Signal, Category::Short) => return self.received_signal(id, message, by_lane),
            _ => {}
        }
        let Some(conn) = self.conns.get_mut(id) else { return false };
        let (endpoint, to) = (conn.endpoint, conn.peer);
        let Some(acceptor) = conn.acceptor() else { return false };
        if message.kind == Kind::Request || !acceptor.take_request(message.tag) {
            return false;
        }
        match message.kind {
            Kind::Segment if message.category == Category::Bulk => {
                acceptor.segment = segment_of(message, args);
                let own = self.endpoints.get(endpoint).and_then(|endpoint| endpoint.segment);
                let mut answer = Message::new(Kind::SegmentInfo, message.id);
                let key = put_segment(&mut answer, own);
                answer.credits = self.credit_for_answer(id, message.starved);
                self.send_head(id, &answer, &[key]);
                true
            }
            Kind::Lane if message.category == Category::Bulk => {
                self.lane_offered(id, message, args[0])
            }
            Kind::ReplyRefused => {
                let operation = Operation::Reply(message.category);
                let returned = Returned { status: Status::ReplyRejected, operation, to };
                self.come_back(endpoint, returned, message, *args);
                let answer = Message::new(Kind::Ack, message.id);
                self.answer(id, answer, (message.starved, false), &[]);
                true
            }
            _ => false,
        }
    }

    /// The same, to the end that has connected.
    fn for_initiator(&mut self, id: ConnId, message: &Message, args: &[Arg; MAX_ARGS]) -> bool {
        let Some(initiator) = self.conns.get_mut(id).and_then(Conn::initiator) else {
            return false;
        };
        match message.kind {
            Kind::Revoke => {
                self.give_back(id, message.credits);
                return true;
            }
            Kind::SignalsTaken => return self.signals_taken(id, message.credits),
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
        let purpose = record.purpose;
        let expected = match message.kind {
            Kind::Ack => {
                matches!(purpose, Purpose::Program(Operation::Request(_)) | Purpose::Refusal)
            }
            Kind::Return => matches!(purpose, Purpose::Program(Operation::Request(_))),
            Kind::SegmentInfo => purpose == Purpose::Segment && message.category == Category::Bulk,
            Kind::LaneInfo => purpose == Purpose::Lane && message.category == Category::Bulk,
            _ => false,
        };
        if !expected {
            return false;
        }
        if message.kind == Kind::SegmentInfo {
            let none = Remote { addr: 0, len: 0, key: 0 };
            initiator.segment = PeerSegment::Known(segment_of(message, args).unwrap_or(none));
        }
        let returned = (message.kind == Kind::Return).then_some(*record);
        if message.kind == Kind::LaneInfo {
            self.lane_answered(id, message, args[0]);
        }
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
        if !self.records.remove(record, id) {
            // The connection has ended meanwhile, and another request may have the place.
            return;
        }
        let most = self.config.max_window;
        if let Some(initiator) = self.conns.get_mut(id).and_then(Conn::initiator) {
            initiator.end_request(credits, most);
        }
    }

    /// Has a request come back to the program.
    pub(super) fn returned(&mut self, id: ConnId, record: &Record, status: Status) {
        let Purpose::Program(operation) = record.purpose else { return };
        let Some(conn) = self.conns.get(id) else { return };
        let (endpoint, to) = (conn.endpoint, conn.peer);
        self.come_back(
            endpoint,
            Returned { status, operation, to },
            &record.message,
            record.args(),
        );
    }

    /// Has the handler of messages that come back run for one.
    #[cold]
    pub(super) fn come_back(
        &mut self,
        endpoint: EndpointId,
        returned: Returned,
        message: &Message,
        args: [Arg; MAX_ARGS],
    ) {
        let what = What::Returned(Box::new(returned));
        self.enqueue(Arrived { endpoint, what, message: *message, args, slot: None });
    }

    #[inline]
    fn done(&mut self, conn: ConnId, number: u64) {
        let (id, serial) = (number as u16, (number >> 16) as u32);
        match number & notify::WHAT {
            notify::BUFFER => {
                if !self.buffers.release(number as u32, conn) {
                    return;
                }
                if let Some(acceptor) = self.conns.get_mut(conn).and_then(Conn::acceptor) {
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
                self.records.remove(id, conn);
                if let Some(known) = self.conns.get(conn) {
                    let (endpoint, message, args) = (known.endpoint, record.message, record.args());
                    let what = What::Got;
                    self.enqueue(Arrived { endpoint, what, message, args, slot: None });
                }
            }
            notify::PROBE => {
                if let Some(initiator) = self.conns.get_mut(conn).and_then(Conn::initiator) {
                    initiator.is_probed = false;
                }
            }
            notify::REPLY => self.reply_writes.retain(|(ticket, _)| *ticket != number as u32),
            _ => {}
        }
    }

    /// The peer has put a message into a lane while this end slept; whether it may say so. The next look at
    /// the lane finds it.
    fn woken(&mut self, id: ConnId, message: &Message) -> bool {
        message.category == Category::Short && self.fabric.take_wake(id)
    }

    /// The peer has answered a control message; whether it may.
    fn control_answered(&mut self, id: ConnId, credits: i8) -> bool {
        if !self.take_back(id, credits) {
            return false;
        }
        // The peer has fewer credits now.
        self.return_signals(id);
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
        self.send_head(id, &Message::new(Kind::SegmentChanged, 0), &[]);
    }
}

impl Initiator {
    /// A request has ended, and its credit is back, with so many others, or without itself.
    #[inline]
    pub(super) fn end_request(&mut self, credits: i8, most: u16) {
        self.in_flight = self.in_flight.saturating_sub(1);
        if credits != 0 {
            let window = self.window.saturating_add_signed(credits.into());
            self.window = window.clamp(1, most.max(1));
        }
    }
}

impl Acceptor {
    /// Counts a request that has come, if it has a credit; whether it has.
    #[inline]
    pub(super) fn take_request(&mut self, tag: Option<Tag>) -> bool {
        if self.in_service >= self.granted {
            return false;
        }
        self.in_service += 1;
        if let Some(tag) = tag {
            self.tag = tag;
        }
        true
    }
}

impl Record {
    /// Marks a request as answered by a reply, if it may be.
    #[inline]
    fn take_answer(&mut self) -> Option<()> {
        let waits = matches!(self.purpose, Purpose::Program(Operation::Request(_)));
        let is_expected = waits && !self.is_answered;
        self.is_answered |= is_expected;
        is_expected.then_some(())
    }
}

/// The segment that a message tells of; none if it is empty.
fn segment_of(message: &Message, args: &[Arg; MAX_ARGS]) -> Option<Remote> {
    let key = args[0].cast_unsigned();
    (message.len > 0).then_some(Remote { addr: message.offset, len: message.len, key })
}

/// Has a message tell of a segment; its argument.
pub(super) fn put_segment(message: &mut Message, segment: Option<Remote>) -> Arg {
    let Remote { addr, len, key } = segment.unwrap_or(Remote { addr: 0, len: 0, key: 0 });
    message.category = Category::Bulk;
    (message.offset, message.len, message.nargs) = (addr, len, 1);
    key.cast_signed()
}
