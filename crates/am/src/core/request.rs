//! Requests, and how they are sent.

use super::express::Shortly;
use super::receive::{notify, put_segment};
use super::{Core, Delivery};
use crate::conn::{Conn, ConnId, PeerSegment};
use crate::endpoint::{EndpointId, Link, Returned, Translation};
use crate::fabric::{Fabric, Local, Remote};
use crate::message::{Kind, MAX_HEAD, Message};
use crate::name::Name;
use crate::records::Purpose;
use crate::types::{Arg, CallError, Category, MAX_ARGS, Operation, Status, Tag};

/// Sends between two that ask for a completion, so that the send queue has room again.
pub(super) const CHECKPOINT_EVERY: u16 = 16;
/// Messages that wait for their handlers while a request that comes back at once may join them.
const MOST_WAITING: usize = 1024;
/// Bytes of a medium message that may be copied into the send queue.
pub(super) const INLINE: usize = 1024;

/// What a request or a reply carries.
#[derive(Clone, Copy, Debug)]
pub enum Body<'a> {
    /// Nothing but arguments.
    Short,
    /// Bytes that the handler gets, and that are copied now.
    Medium(&'a [u8]),
    /// Memory that is written to an offset of the receiver's segment.
    Bulk {
        /// The memory, in one piece.
        from: Local,
        /// The offset.
        offset: u64,
    },
}

impl Body<'_> {
    fn category(&self) -> Category {
        match self {
            Self::Short => Category::Short,
            Self::Medium(_) => Category::Medium,
            Self::Bulk { .. } => Category::Bulk,
        }
    }
}

/// A request or a reply, as the program gives it.
#[derive(Clone, Copy, Debug)]
pub struct Outgoing<'a> {
    /// The handler that is to run at the receiver.
    pub handler: u16,
    /// Its arguments: at most [`MAX_ARGS`].
    pub args: &'a [Arg],
    /// The payload.
    pub body: Body<'a>,
}

impl Outgoing<'_> {
    /// The arguments, and 0 where there are no more.
    pub(super) fn all_args(&self) -> [Arg; MAX_ARGS] {
        let mut args = [0; MAX_ARGS];
        args.iter_mut().zip(self.args).for_each(|(place, arg)| *place = *arg);
        args
    }

    #[inline]
    pub(super) fn message(
        &self,
        kind: Kind,
        id: u16,
        max_medium: u32,
    ) -> Result<Message, CallError> {
        let mut message = Message::new(kind, id);
        message.handler = self.handler;
        let (value, most) = (self.args.len() as u64, MAX_ARGS as u64);
        if value > most {
            return Err(CallError::TooMuch { what: "the number of arguments", value, most });
        }
        message.nargs = self.args.len() as u8;
        message.category = self.body.category();
        match self.body {
            Body::Short => {}
            Body::Medium(bytes) => {
                message.len = bytes.len() as u64;
                let (value, most) = (message.len, max_medium.into());
                if value > most {
                    return Err(CallError::TooMuch { what: "the payload", value, most });
                }
            }
            Body::Bulk { from, offset } => (message.offset, message.len) = (offset, from.len),
        }
        Ok(message)
    }
}

/// Names a request whose source is in use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ticket {
    id: u16,
    serial: u32,
}

/// What became of a request.
#[derive(Debug)]
pub enum Sent<H> {
    /// It is under way, or will come back; its source may be used again.
    Done,
    /// It is under way; until [`Core::holds_source`] says no, its source must not change.
    Pending(Ticket),
    /// It is to the endpoint itself: the caller runs the handler now.
    Own(Box<Delivery<H>>),
}

impl<F: Fabric, H: Clone> Core<F, H> {
    #[inline]
    pub(super) fn target(&self, id: EndpointId, index: u32) -> Result<&Translation, CallError> {
        let entry = self.endpoint(id)?.translations.get(index as usize);
        entry.and_then(Option::as_ref).ok_or(CallError::NotMapped(index))
    }

    /// Whether a name is that of an own endpoint.
    fn is_own(&self, id: EndpointId, name: &Name) -> bool {
        let Ok(own) = self.name(id) else { return false };
        let any = name.incarnation == 0 || name.incarnation == own.incarnation;
        (name.port, name.endpoint) == (own.port, own.endpoint) && any
    }

    /// Sends a request to the peer at an index of the translation table.
    ///
    /// A request that cannot be delivered comes back: [`next_delivery`](Self::next_delivery) gives
    /// it out as [`Returned`](super::DeliveryKind::Returned).
    ///
    /// # Errors
    ///
    /// [`CallError::WouldBlock`] if there is no credit, no room or no connection now: the caller
    /// polls, and tries again. Otherwise the arguments are wrong.
    #[inline]
    pub fn request(
        &mut self,
        id: EndpointId,
        index: u32,
        out: &Outgoing<'_>,
    ) -> Result<Sent<H>, CallError> {
        match self.request_short(id, index, out) {
            Shortly::Sent => Ok(Sent::Done),
            Shortly::NotNow => Err(CallError::WouldBlock),
            Shortly::Otherwise => self.request_any(id, index, out),
        }
    }

    /// Sends a request of any kind.
    #[inline(never)]
    fn request_any(
        &mut self,
        id: EndpointId,
        index: u32,
        out: &Outgoing<'_>,
    ) -> Result<Sent<H>, CallError> {
        let mut message = out.message(Kind::Request, 0, self.config.max_medium)?;
        let target = self.target(id, index)?;
        let Link::Conn(conn) = target.link else {
            return self.request_elsewhere(id, index, out, &message);
        };
        let tag = target.tag;
        if matches!(out.body, Body::Bulk { .. }) {
            self.want_lanes(conn);
        }
        let segment = match self.ready(conn, tag, &message)? {
            Ready::Go(segment) => segment,
            Ready::Refuse(status) => {
                let operation = Operation::Request(message.category);
                return self.refuse(id, index, (&message, out), operation, status);
            }
        };
        let purpose = Purpose::Program(Operation::Request(message.category));
        let buffer = self.buffer_for(conn, out, &message)?;
        if self.records.insert(conn, purpose, &mut message, out.args).is_none() {
            // There was one when it was ready.
            return Err(CallError::WouldBlock);
        }
        if let Some(initiator) = self.conns.get_mut(conn).and_then(Conn::initiator) {
            initiator.in_flight += 1;
            message.starved = std::mem::take(&mut initiator.is_starved);
            if initiator.told_tag != tag {
                initiator.told_tag = tag;
                message.tag = Some(tag);
            }
        }
        self.counters[id.index() as usize].requests_sent += 1;
        self.launch(conn, out, &message, buffer, segment)
    }

    /// A request to the endpoint itself, to a peer that is not connected, or to one that is dead.
    #[cold]
    fn request_elsewhere(
        &mut self,
        id: EndpointId,
        index: u32,
        out: &Outgoing<'_>,
        message: &Message,
    ) -> Result<Sent<H>, CallError> {
        let operation = Operation::Request(message.category);
        let Translation { name, tag, link, .. } = *self.target(id, index)?;
        if let Link::Dead(status) = link {
            return self.refuse(id, index, (message, out), operation, status);
        }
        if message.category != Category::Bulk && self.is_own(id, &name) {
            if self.endpoint(id)?.is_running {
                // In another thread: handlers of an endpoint run one at a time.
                return Err(CallError::WouldBlock);
            }
            if let Some(status) = self.acceptance(id, tag, message) {
                return self.refuse(id, index, (message, out), operation, status);
            }
            self.counters[id.index() as usize].requests_sent += 1;
            return Ok(Sent::Own(self.own_delivery(id, message, out, true)));
        }
        self.begin(id, index, name, tag)?;
        Err(CallError::WouldBlock)
    }

    /// Has a request come back that was not sent.
    #[cold]
    fn refuse(
        &mut self,
        id: EndpointId,
        index: u32,
        (message, out): (&Message, &Outgoing<'_>),
        operation: Operation,
        status: Status,
    ) -> Result<Sent<H>, CallError> {
        let to = self.target(id, index)?.name;
        let bundle = self.bundle_of(id)?;
        if self.bundle(bundle)?.queue.len() >= MOST_WAITING {
            // The program sends to one that is dead, and does not poll.
            return Err(CallError::WouldBlock);
        }
        self.come_back(id, Returned { status, operation, to }, message, out.all_args());
        Ok(Sent::Done)
    }

    /// Whether a request may go out now.
    #[inline]
    fn ready(&mut self, id: ConnId, tag: Tag, message: &Message) -> Result<Ready, CallError> {
        let (places, most) = (self.records.free(), self.config.max_window);
        let conn = self.conns.get_mut(id).ok_or(CallError::WouldBlock)?;
        let initiator = conn.initiator().ok_or(CallError::WouldBlock)?;
        if !initiator.is_up {
            return Err(CallError::WouldBlock);
        }
        if message.category == Category::Medium && message.len > initiator.max_medium.into() {
            return Ok(Ready::Refuse(Status::BadLength));
        }
        if initiator.in_flight >= initiator.window || places == 0 {
            // The peer may give as many as this end takes; after that nothing is to be asked for.
            initiator.is_starved |= places > 0 && initiator.window < most;
            return Err(CallError::WouldBlock);
        }
        if message.category != Category::Bulk && !initiator.tell_segment {
            return Ok(Ready::Go(None));
        }
        self.ready_for_bulk(id, tag, message)
    }

    /// The same, where the segments of both ends matter.
    #[inline(never)]
    fn ready_for_bulk(
        &mut self,
        id: ConnId,
        tag: Tag,
        message: &Message,
    ) -> Result<Ready, CallError> {
        let conn = self.conns.get_mut(id).ok_or(CallError::WouldBlock)?;
        let endpoint = conn.endpoint;
        let initiator = conn.initiator().ok_or(CallError::WouldBlock)?;
        let asks = initiator.tell_segment || initiator.segment == PeerSegment::Unknown;
        if asks {
            self.exchange_segments(id, endpoint, tag);
            return Err(CallError::WouldBlock);
        }
        let PeerSegment::Known(segment) = initiator.segment else {
            return Err(CallError::WouldBlock);
        };
        Ok(match within(segment, message.offset, message.len) {
            Ok(part) => Ready::Go(Some(part)),
            Err(status) => Ready::Refuse(status),
        })
    }

    /// Tells the peer of the own segment, and asks for its own.
    fn exchange_segments(&mut self, id: ConnId, endpoint: EndpointId, tag: Tag) {
        let own = self.endpoints.get(endpoint).and_then(|endpoint| endpoint.segment);
        let mut message = Message::new(Kind::Segment, 0);
        let args = [put_segment(&mut message, own)];
        if self.records.insert(id, Purpose::Segment, &mut message, &args).is_none() {
            return;
        }
        if let Some(initiator) = self.conns.get_mut(id).and_then(Conn::initiator) {
            initiator.in_flight += 1;
            initiator.tell_segment = false;
            initiator.segment = PeerSegment::Asked;
            if initiator.told_tag != tag {
                initiator.told_tag = tag;
                message.tag = Some(tag);
            }
        }
        self.send_head(id, &message, &args);
    }

    /// A send buffer, if the message needs one.
    #[inline]
    fn buffer_for(
        &mut self,
        conn: ConnId,
        out: &Outgoing<'_>,
        message: &Message,
    ) -> Result<Option<u32>, CallError> {
        match out.body {
            Body::Medium(_) if !self.fits_inline(message) => {
                self.buffers.take_for_request(conn).map(Some).ok_or(CallError::WouldBlock)
            }
            _ => Ok(None),
        }
    }

    #[inline]
    pub(super) fn fits_inline(&self, message: &Message) -> bool {
        message.len as usize + MAX_HEAD <= self.fabric.inline_limit().min(INLINE)
    }

    /// Posts a request.
    #[inline]
    fn launch(
        &mut self,
        conn: ConnId,
        out: &Outgoing<'_>,
        message: &Message,
        buffer: Option<u32>,
        segment: Option<Remote>,
    ) -> Result<Sent<H>, CallError> {
        match (out.body, segment) {
            (Body::Bulk { from, .. }, Some(to)) if from.len > 0 => {
                if self.push_bulk_request(conn, (from, to), (message, out.args)) {
                    return Ok(Sent::Done);
                }
                let serial = self.records.of(message.id, conn).map_or(0, |record| record.serial);
                let number = notify::of_record(notify::SOURCE, message.id, serial);
                self.write_and_send(conn, (from, to), Some(number), (message, out.args));
                Ok(Sent::Pending(Ticket { id: message.id, serial }))
            }
            (Body::Medium(bytes), _) => {
                self.send_medium(conn, (message, out.args), bytes, buffer);
                Ok(Sent::Done)
            }
            _ => {
                if !self.push_request(conn, message, out.args) {
                    self.send_head(conn, message, out.args);
                }
                Ok(Sent::Done)
            }
        }
    }

    /// Puts a short request into the lane, if that is possible; whether it is.
    fn push_request(&mut self, conn: ConnId, message: &Message, args: &[Arg]) -> bool {
        let Some(known) = self.conns.get_mut(conn) else { return false };
        let in_flight = known.initiator().map_or(u16::MAX, |initiator| initiator.in_flight);
        let is_short = message.category == Category::Short && message.tag.is_none();
        is_short
            && known.has_room_in_lane(in_flight)
            && self.push(conn, message.fixed(args.len()), args)
    }

    /// Sends a bulk request by the lane, if that is possible; whether it is. Its source is free then.
    fn push_bulk_request(
        &mut self,
        conn: ConnId,
        parts: (Local, Remote),
        (message, args): (&Message, &[Arg]),
    ) -> bool {
        let has_room = self.conns.get_mut(conn).is_some_and(|known| {
            let in_flight = known.initiator().map_or(u16::MAX, |initiator| initiator.in_flight);
            known.has_room_in_lane(in_flight)
        });
        if !has_room || !self.push_bulk(conn, parts, (message, args)) {
            return false;
        }
        if let Some(record) = self.records.of(message.id, conn) {
            record.is_source_free = true;
        }
        true
    }

    /// Writes memory, and sends a message after it.
    #[inline]
    pub(super) fn write_and_send(
        &mut self,
        conn: ConnId,
        (from, to): (Local, Remote),
        number: Option<u64>,
        (message, args): (&Message, &[Arg]),
    ) {
        let mut bytes = [0; MAX_HEAD];
        let len = message.encode(args, &mut bytes);
        let Some(notify) = self.checkpoint(conn) else { return };
        if !self.fabric.write_and_send(conn, from, to, number, (&bytes[..len], notify)) {
            self.give_up(conn, Status::Unreachable);
        }
    }

    /// Whether the source of a request is still being read.
    #[must_use]
    pub fn holds_source(&self, ticket: Ticket) -> bool {
        self.records.holds_source(ticket.id, ticket.serial)
    }

    /// Reads `len` bytes at an offset of the peer's segment into the own one, then runs a handler
    /// here.
    ///
    /// # Errors
    ///
    /// As [`request`](Self::request).
    pub fn get(
        &mut self,
        id: EndpointId,
        index: u32,
        from: u64,
        (offset, len): (u64, u64),
        (handler, args): (u16, &[Arg]),
    ) -> Result<(), CallError> {
        let Translation { name, tag, link, .. } = *self.target(id, index)?;
        let here = self.endpoint(id)?.segment.unwrap_or(Remote { addr: 0, len: 0, key: 0 });
        let body = Body::Bulk { from: Local { addr: 0, len, key: 0 }, offset };
        let out = Outgoing { handler, args, body };
        let mut message = out.message(Kind::Request, 0, 0)?;
        let conn = match link {
            Link::Dead(status) => {
                return self.refuse(id, index, (&message, &out), Operation::Get, status).map(drop);
            }
            Link::Idle => {
                self.begin(id, index, name, tag)?;
                return Err(CallError::WouldBlock);
            }
            Link::Conn(conn) => conn,
        };
        let mut asked = message;
        asked.offset = from;
        let there = self.ready(conn, tag, &asked)?;
        let parts = (there, within(here, offset, len));
        let (there, into) = match parts {
            (Ready::Go(Some(there)), Ok(into)) => (there, into),
            (Ready::Refuse(status), _) | (_, Err(status)) => {
                return self.refuse(id, index, (&message, &out), Operation::Get, status).map(drop);
            }
            (Ready::Go(None), _) => return Err(CallError::WouldBlock),
        };
        let purpose = Purpose::Program(Operation::Get);
        let record = self.records.insert(conn, purpose, &mut message, args);
        let record = record.ok_or(CallError::WouldBlock)?;
        let serial = self.records.of(record, conn).map_or(0, |record| record.serial);
        let number = notify::of_record(notify::GET, record, serial);
        let into = Local { addr: into.addr, len, key: into.key };
        if !self.fabric.read(conn, into, there, number) {
            self.give_up(conn, Status::Unreachable);
        }
        Ok(())
    }

    /// Sends a message that has no payload.
    #[inline]
    pub(super) fn send_head(&mut self, conn: ConnId, message: &Message, args: &[Arg]) {
        let mut bytes = [0; MAX_HEAD];
        let len = message.encode(args, &mut bytes);
        self.send_bytes(conn, &bytes[..len]);
    }

    /// Counts a send; what it has to ask for, if anything. None if the connection is gone.
    #[inline]
    fn checkpoint(&mut self, conn: ConnId) -> Option<Option<u64>> {
        let known = self.conns.get_mut(conn)?;
        known.lanes.sent = known.lanes.sent.wrapping_add(1);
        known.unsignaled += 1;
        Some((known.unsignaled >= CHECKPOINT_EVERY).then(|| {
            known.unsignaled = 0;
            notify::CHECKPOINT
        }))
    }

    #[inline]
    fn send_bytes(&mut self, conn: ConnId, bytes: &[u8]) {
        let Some(notify) = self.checkpoint(conn) else { return };
        if !self.fabric.send(conn, bytes, notify) {
            self.give_up(conn, Status::Unreachable);
        }
    }

    /// Sends a message with a payload: by itself if it is small, or in a buffer.
    #[inline]
    pub(super) fn send_medium(
        &mut self,
        conn: ConnId,
        (message, args): (&Message, &[Arg]),
        payload: &[u8],
        buffer: Option<u32>,
    ) {
        let mut head = [0; MAX_HEAD];
        let at = message.encode(args, &mut head);
        match buffer {
            None => {
                let mut bytes = [0; INLINE];
                bytes[..at].copy_from_slice(&head[..at]);
                bytes[at..at + payload.len()].copy_from_slice(payload);
                self.send_bytes(conn, &bytes[..at + payload.len()]);
            }
            Some(buffer) => {
                self.fabric.store(buffer, 0, &head[..at]);
                self.fabric.store(buffer, at, payload);
                let number = notify::BUFFER | u64::from(buffer);
                if let Some(known) = self.conns.get_mut(conn) {
                    known.unsignaled = 0;
                    known.lanes.sent = known.lanes.sent.wrapping_add(1);
                }
                if !self.fabric.send_buffer(conn, buffer, at + payload.len(), number) {
                    self.give_up(conn, Status::Unreachable);
                }
            }
        }
    }
}

/// Whether a request may go out, and where its payload goes.
enum Ready {
    Go(Option<Remote>),
    Refuse(Status),
}

/// A part of a segment; or why there is none.
pub(super) fn within(segment: Remote, offset: u64, len: u64) -> Result<Remote, Status> {
    if segment.len == 0 || offset > segment.len {
        return Err(Status::BadSegmentOffset);
    }
    if len > segment.len - offset {
        return Err(Status::BadLength);
    }
    Ok(Remote { addr: segment.addr.wrapping_add(offset), len, key: segment.key })
}
