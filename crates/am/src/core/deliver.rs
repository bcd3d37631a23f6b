//! Messages on their way to handlers, and the replies that those send.

use super::request::within;
use super::{Core, Outgoing};
use crate::conn::{Conn, ConnId};
use crate::endpoint::{Arrived, BundleId, EndpointId, What};
use crate::fabric::{Fabric, Remote};
use crate::message::{Kind, Message};
use crate::name::Name;
use crate::records::Purpose;
use crate::types::{Arg, CallError, Category, Mode, Operation, Status, Tag};

use super::receive::notify;
use super::request::Body;

/// Why a handler runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DeliveryKind {
    /// A request with that tag: its handler may reply.
    Request(Tag),
    /// A reply.
    Reply,
    /// A get is done.
    Got,
    /// A message of this endpoint has come back.
    Returned {
        /// Why.
        status: Status,
        /// How it was sent.
        operation: Operation,
        /// The endpoint that it was sent to.
        to: Name,
    },
}

/// The payload of a message.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Payload {
    /// There is none.
    None,
    /// In a receive slot, until the delivery is finished.
    Slot {
        /// Which.
        slot: u32,
        /// Its first byte there.
        at: u32,
        /// Bytes.
        len: u32,
    },
    /// In the segment of the endpoint.
    Segment(Remote),
    /// A copy: of messages of an endpoint to itself.
    Copy(Box<[u8]>),
}

/// Whence a message comes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum From {
    Conn(ConnId),
    Own,
    Nowhere,
}

/// A handler that is to run. It goes to [`Core::finish`] afterwards.
#[derive(Debug)]
pub struct Delivery<H> {
    /// The handler; none for a message that came back where the program has set none. The caller
    /// may take it, and puts it back before [`Core::finish`]: otherwise the program has to set it
    /// anew.
    pub handler: Option<H>,
    /// Whose handler it is.
    pub endpoint: EndpointId,
    /// Why it runs.
    pub kind: DeliveryKind,
    /// The payload.
    pub payload: Payload,
    message: Message,
    from: From,
    has_replied: bool,
    /// The endpoint counts as running.
    is_marked: bool,
}

impl<H> Delivery<H> {
    /// The arguments.
    #[must_use]
    pub fn args(&self) -> &[Arg] {
        &self.message.args[..usize::from(self.message.nargs)]
    }

    /// Where the payload is.
    #[must_use]
    pub fn category(&self) -> Category {
        self.message.category
    }

    /// The index of the handler; of a message that came back, that of the handler it was for.
    #[must_use]
    pub fn handler_index(&self) -> u16 {
        self.message.handler
    }

    /// Of a bulk message, where in the segment its payload is.
    #[must_use]
    pub fn offset(&self) -> u64 {
        self.message.offset
    }

    /// Bytes of the payload; of a message that came back, those it had.
    #[must_use]
    pub fn payload_len(&self) -> u64 {
        self.message.len
    }

    /// Whether it was replied to.
    #[must_use]
    pub fn has_replied(&self) -> bool {
        self.has_replied
    }
}

/// Names a bulk reply whose source is in use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReplyTicket(u32);

/// What became of a reply.
#[derive(Debug)]
pub enum Replied<H> {
    /// Its source may be used again.
    Done,
    /// Until [`Core::holds_reply`] says no, its source must not change.
    Pending(ReplyTicket),
    /// It is to the endpoint itself: the caller runs the handler now.
    Own(Box<Delivery<H>>),
}

impl<F: Fabric, H: Clone> Core<F, H> {
    /// Why an endpoint does not take a message; none if it does.
    #[inline]
    pub(super) fn acceptance(&self, id: EndpointId, tag: Tag, message: &Message) -> Option<Status> {
        let Some(endpoint) = self.endpoints.get(id) else { return Some(Status::BadEndpoint) };
        if !endpoint.tag.accepts(tag) {
            return Some(Status::BadTag);
        }
        self.fitness(id, message)
    }

    /// The same, whatever its tag.
    #[inline]
    fn fitness(&self, id: EndpointId, message: &Message) -> Option<Status> {
        let handlers = &self.handlers[id.index() as usize];
        let is_set = handlers.get(usize::from(message.handler)).is_some_and(Option::is_some);
        let endpoint = self.endpoints.get(id);
        let is_lent = || endpoint.is_some_and(|it| it.lent == Some(message.handler));
        // 0 is not for peers to call.
        if message.handler == 0 || !(is_set || is_lent()) {
            return Some(Status::BadHandler);
        }
        if message.category == Category::Bulk {
            let segment = endpoint.and_then(|endpoint| endpoint.segment);
            let none = Remote { addr: 0, len: 0, key: 0 };
            return within(segment.unwrap_or(none), message.offset, message.len).err();
        }
        None
    }

    /// Whether the handler of a message could run now.
    #[inline]
    fn is_runnable(&self, mode: Mode, arrived: &Arrived) -> bool {
        if mode == Mode::Parallel
            && self.endpoints.get(arrived.endpoint).is_some_and(|endpoint| endpoint.is_running)
        {
            return false;
        }
        let What::Request { conn, .. } = arrived.what else { return true };
        let held = match self.conns.get(conn).map(|conn| &conn.role) {
            Some(crate::conn::Role::Acceptor(acceptor)) => acceptor.buffers,
            _ => 0,
        };
        self.buffers.may_serve(held)
    }

    /// The next message of a bundle whose handler may run. The caller runs it and calls
    /// [`finish`](Self::finish), in whichever thread.
    #[inline]
    pub fn next_delivery(&mut self, id: BundleId) -> Option<Delivery<H>> {
        loop {
            let arrived = self.take_runnable(id)?;
            let delivery = match arrived.what {
                What::Request { conn, tag } => self.deliver_request(&arrived, conn, tag),
                What::Reply { conn } => self.deliver_reply(&arrived, conn),
                What::Got => Some(self.delivery(&arrived, DeliveryKind::Got, From::Nowhere)),
                What::Returned { status, operation, to } => {
                    let kind = DeliveryKind::Returned { status, operation, to };
                    Some(self.delivery(&arrived, kind, From::Nowhere))
                }
            };
            if let Some(delivery) = delivery {
                if let Some(bundle) = self.bundles.get_mut(id) {
                    bundle.running += 1;
                }
                if let Some(endpoint) = self.endpoints.get_mut(delivery.endpoint) {
                    endpoint.is_running = true;
                }
                return Some(delivery);
            }
            if let Some((slot, _)) = arrived.slot {
                self.repost(slot);
            }
        }
    }

    /// Takes the first message of a bundle whose handler may run.
    #[inline]
    fn take_runnable(&mut self, id: BundleId) -> Option<Arrived> {
        let bundle = self.bundles.get(id)?;
        if bundle.mode == Mode::Sequential && bundle.running > 0 {
            return None;
        }
        if self.is_runnable(bundle.mode, bundle.queue.front()?) {
            return self.bundles.get_mut(id)?.queue.pop_front();
        }
        let runs = |arrived| self.is_runnable(bundle.mode, arrived);
        let index = bundle.queue.iter().position(runs)?;
        self.bundles.get_mut(id)?.queue.remove(index)
    }

    #[inline]
    fn deliver_request(
        &mut self,
        arrived: &Arrived,
        conn: ConnId,
        tag: Tag,
    ) -> Option<Delivery<H>> {
        let message = &arrived.message;
        if let Some(status) = self.acceptance(arrived.endpoint, tag, message) {
            let mut answer = Message::new(Kind::Return, message.id);
            answer.status = Some(status);
            self.answer(conn, answer, message.starved);
            return None;
        }
        self.buffers.promise();
        self.counters[arrived.endpoint.index() as usize].requests_received += 1;
        Some(self.delivery(arrived, DeliveryKind::Request(tag), From::Conn(conn)))
    }

    #[inline]
    fn deliver_reply(&mut self, arrived: &Arrived, conn: ConnId) -> Option<Delivery<H>> {
        let message = &arrived.message;
        let refusal = self.fitness(arrived.endpoint, message);
        if let Some(status) = refusal {
            self.refuse_reply(conn, message, status);
            return None;
        }
        self.retire(conn, message.id, message.credits);
        self.close_if_idle(conn);
        self.counters[arrived.endpoint.index() as usize].replies_received += 1;
        Some(self.delivery(arrived, DeliveryKind::Reply, From::Conn(conn)))
    }

    /// Tells the peer that its reply was refused. The request keeps its credit until the peer has
    /// heard of it.
    #[cold]
    fn refuse_reply(&mut self, conn: ConnId, reply: &Message, status: Status) {
        let Some(record) = self.records.of(reply.id, conn) else { return };
        (record.purpose, record.is_answered) = (Purpose::Refusal, false);
        let mut message = Message { kind: Kind::ReplyRefused, status: Some(status), ..*reply };
        if message.category == Category::Medium {
            // It would stand before a payload.
            message.category = Category::Short;
        }
        message.credits = 0;
        self.send_head(conn, &message);
    }

    #[inline]
    fn delivery(&mut self, arrived: &Arrived, kind: DeliveryKind, from: From) -> Delivery<H> {
        let index = match kind {
            DeliveryKind::Returned { .. } => 0,
            _ => arrived.message.handler,
        };
        let message = &arrived.message;
        let payload = match (arrived.slot, message.category) {
            (Some((slot, at)), _) => Payload::Slot { slot, at, len: message.len as u32 },
            (None, Category::Bulk) if !matches!(kind, DeliveryKind::Returned { .. }) => {
                self.part_of_segment(arrived.endpoint, message)
            }
            _ => Payload::None,
        };
        let place = self.handlers[arrived.endpoint.index() as usize].get_mut(usize::from(index));
        // A handler of the endpoint itself may reply to itself, to the same handler.
        let handler = match from {
            From::Own => place.and_then(|place| place.clone()),
            From::Conn(_) | From::Nowhere => place.and_then(Option::take),
        };
        if handler.is_some()
            && from != From::Own
            && let Some(endpoint) = self.endpoints.get_mut(arrived.endpoint)
        {
            endpoint.lent = Some(index);
        }
        Delivery {
            handler,
            endpoint: arrived.endpoint,
            kind,
            payload,
            message: *message,
            from,
            has_replied: false,
            is_marked: true,
        }
    }

    fn part_of_segment(&self, id: EndpointId, message: &Message) -> Payload {
        let segment = self.endpoints.get(id).and_then(|endpoint| endpoint.segment);
        let part = segment.map(|segment| within(segment, message.offset, message.len));
        match part {
            Some(Ok(part)) => Payload::Segment(part),
            _ => Payload::None,
        }
    }

    /// A message of an endpoint to itself. Requests mark the endpoint as running; replies are sent
    /// while it is.
    pub(super) fn own_delivery(
        &mut self,
        id: EndpointId,
        message: &Message,
        out: &Outgoing<'_>,
        is_request: bool,
    ) -> Delivery<H> {
        let tag = self.endpoints.get(id).map_or(Tag::NONE, |endpoint| endpoint.tag);
        let kind = if is_request { DeliveryKind::Request(tag) } else { DeliveryKind::Reply };
        let arrived = Arrived {
            endpoint: id,
            what: What::Returned {
                status: Status::BadArgs,
                operation: Operation::Get,
                to: Name { port: self.port, endpoint: 0, incarnation: 0 },
            },
            message: *message,
            slot: None,
        };
        let mut delivery = self.delivery(&arrived, kind, From::Own);
        if let Body::Medium(bytes) = out.body {
            delivery.payload = Payload::Copy(bytes.into());
        }
        delivery.is_marked = is_request;
        let counters = &mut self.counters[id.index() as usize];
        if is_request {
            self.buffers.promise();
            counters.requests_received += 1;
            if let Some(endpoint) = self.endpoints.get_mut(id) {
                endpoint.is_running = true;
                if let Some(bundle) = self.bundles.get_mut(endpoint.bundle) {
                    bundle.running += 1;
                }
            }
        } else {
            counters.replies_received += 1;
        }
        delivery
    }

    /// Replies to a request whose handler runs. Never waits.
    ///
    /// # Errors
    ///
    /// [`CallError::NoReply`] if it is no request, or was replied to; arguments that are wrong.
    #[inline]
    pub fn reply(
        &mut self,
        delivery: &mut Delivery<H>,
        out: &Outgoing<'_>,
    ) -> Result<Replied<H>, CallError> {
        if !matches!(delivery.kind, DeliveryKind::Request(_)) || delivery.has_replied {
            return Err(CallError::NoReply);
        }
        let message = out.message(Kind::Reply, delivery.message.id, self.config.max_medium)?;
        let endpoint = delivery.endpoint;
        delivery.has_replied = true;
        self.buffers.redeem();
        self.counters[endpoint.index() as usize].replies_sent += 1;
        match delivery.from {
            From::Conn(conn) => Ok(self.reply_over(conn, out, message, delivery.message.starved)),
            From::Own | From::Nowhere => Ok(self.reply_to_own(endpoint, out, &message)),
        }
    }

    #[inline]
    fn reply_over(
        &mut self,
        conn: ConnId,
        out: &Outgoing<'_>,
        mut message: Message,
        starved: bool,
    ) -> Replied<H> {
        if self.conns.get(conn).is_none() {
            // The requester is gone, and hears of that itself.
            return Replied::Done;
        }
        match out.body {
            Body::Short => {
                self.answer(conn, message, starved);
                Replied::Done
            }
            Body::Medium(bytes) => {
                let buffer =
                    if self.fits_inline(&message) { None } else { self.buffers.take(conn) };
                if buffer.is_some()
                    && let Some(acceptor) = self.conns.get_mut(conn).and_then(Conn::acceptor)
                {
                    acceptor.buffers += 1;
                }
                message.credits = self.credit_for_answer(conn, starved);
                self.send_medium(conn, &message, bytes, buffer);
                Replied::Done
            }
            Body::Bulk { from, offset } => {
                let acceptor = self.conns.get_mut(conn).and_then(Conn::acceptor);
                let none = Remote { addr: 0, len: 0, key: 0 };
                let segment = acceptor.and_then(|acceptor| acceptor.segment).unwrap_or(none);
                match within(segment, offset, from.len) {
                    Ok(to) => self.write_reply(conn, from, to, message, starved),
                    Err(status) => {
                        self.reply_comes_back(conn, &message, status, starved);
                        Replied::Done
                    }
                }
            }
        }
    }

    fn write_reply(
        &mut self,
        conn: ConnId,
        from: crate::fabric::Local,
        to: Remote,
        message: Message,
        starved: bool,
    ) -> Replied<H> {
        if from.len == 0 {
            self.answer(conn, message, starved);
            return Replied::Done;
        }
        self.next_ticket = self.next_ticket.wrapping_add(1);
        let ticket = self.next_ticket;
        self.reply_writes.push((ticket, conn));
        let mut message = message;
        message.credits = self.credit_for_answer(conn, starved);
        let number = notify::REPLY | u64::from(ticket);
        self.write_and_send(conn, (from, to), Some(number), &message);
        Replied::Pending(ReplyTicket(ticket))
    }

    /// The requester's segment has no room for a reply: it comes back, and the requester gets none.
    fn reply_comes_back(&mut self, conn: ConnId, message: &Message, status: Status, starved: bool) {
        if let Some(known) = self.conns.get(conn) {
            let operation = Operation::Reply(message.category);
            let what = What::Returned { status, operation, to: known.peer };
            let endpoint = known.endpoint;
            self.enqueue(Arrived { endpoint, what, message: *message, slot: None });
        }
        self.answer(conn, Message::new(Kind::Ack, message.id), starved);
    }

    fn reply_to_own(
        &mut self,
        endpoint: EndpointId,
        out: &Outgoing<'_>,
        message: &Message,
    ) -> Replied<H> {
        match self.fitness(endpoint, message) {
            None => Replied::Own(Box::new(self.own_delivery(endpoint, message, out, false))),
            Some(status) => {
                if let Ok(to) = self.name(endpoint) {
                    let operation = Operation::Reply(message.category);
                    let what = What::Returned { status, operation, to };
                    self.enqueue(Arrived { endpoint, what, message: *message, slot: None });
                }
                Replied::Done
            }
        }
    }

    /// Whether the source of a bulk reply is still being read.
    #[must_use]
    pub fn holds_reply(&self, ticket: ReplyTicket) -> bool {
        self.reply_writes.iter().any(|(write, _)| *write == ticket.0)
    }

    /// Sends an answer that has no payload.
    #[inline]
    pub(super) fn answer(&mut self, conn: ConnId, mut message: Message, starved: bool) {
        message.credits = self.credit_for_answer(conn, starved);
        self.send_head(conn, &message);
    }

    /// Ends a delivery whose handler has run. A request that was not replied to is acknowledged.
    #[inline]
    pub fn finish(&mut self, delivery: &mut Delivery<H>) {
        self.take_back_handler(delivery);
        if matches!(delivery.kind, DeliveryKind::Request(_)) && !delivery.has_replied {
            self.buffers.redeem();
            if let From::Conn(conn) = delivery.from {
                let message = Message::new(Kind::Ack, delivery.message.id);
                self.answer(conn, message, delivery.message.starved);
            }
        }
        if matches!(delivery.kind, DeliveryKind::Returned { .. }) {
            self.counters[delivery.endpoint.index() as usize].returned += 1;
        }
        if let Payload::Slot { slot, .. } = delivery.payload {
            self.repost(slot);
        }
        if delivery.is_marked
            && let Some(endpoint) = self.endpoints.get_mut(delivery.endpoint)
        {
            endpoint.is_running = false;
            if let Some(bundle) = self.bundles.get_mut(endpoint.bundle) {
                bundle.running -= 1;
            }
        }
    }

    /// Puts the handler of a delivery back into its place, if no other was set there meanwhile.
    #[inline]
    fn take_back_handler(&mut self, delivery: &mut Delivery<H>) {
        if delivery.from == From::Own {
            return;
        }
        let Some(endpoint) = self.endpoints.get_mut(delivery.endpoint) else { return };
        let Some(lent) = endpoint.lent.take() else { return };
        let table = &mut self.handlers[delivery.endpoint.index() as usize];
        if let Some(place) = table.get_mut(usize::from(lent)) {
            *place = delivery.handler.take();
        }
    }

    /// The endpoint that has sent a message; none if it is gone.
    #[must_use]
    pub fn source(&self, delivery: &Delivery<H>) -> Option<Name> {
        match (delivery.from, delivery.kind) {
            (From::Conn(conn), _) => self.conns.get(conn).map(|conn| conn.peer),
            (From::Own, _) => self.name(delivery.endpoint).ok(),
            (From::Nowhere, DeliveryKind::Returned { to, .. }) => Some(to),
            (From::Nowhere, _) => None,
        }
    }
}
