//! Messages on their way to handlers, and the replies that those send.

use super::delivery::{Delivery, Payload};
use super::request::within;
use super::{Core, Outgoing};
use crate::conn::{Conn, ConnId};
use crate::endpoint::{Arrived, BundleId, EndpointId, Returned, What};
use crate::fabric::{Fabric, Local, Remote};
use crate::message::{Kind, Message};
use crate::name::Name;
use crate::records::Purpose;
use crate::types::{Arg, CallError, Category, Mode, Operation, Status, Tag};

use super::receive::notify;
use super::request::Body;

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

    /// Whether the handler of a message that has just come for a bundle, in which no other waits,
    /// could run now.
    #[inline]
    fn is_next(&self, id: BundleId, arrived: &Arrived) -> bool {
        let Some(bundle) = self.bundles.get(id) else { return false };
        let is_busy = bundle.mode == Mode::Sequential && bundle.running > 0;
        bundle.queue.is_empty() && !is_busy && self.is_runnable(bundle.mode, arrived)
    }

    /// Delivers a message that has come, if it is for that bundle and may run at once, or has it
    /// wait.
    #[inline(always)]
    pub(super) fn arrive(
        &mut self,
        polled: Option<BundleId>,
        arrived: Arrived,
    ) -> Option<Box<Delivery<H>>> {
        let home = self.endpoints.get(arrived.endpoint).map(|endpoint| endpoint.bundle);
        match polled.filter(|polled| home == Some(*polled)) {
            Some(polled) if self.is_next(polled, &arrived) => {
                if let Some(bundle) = self.bundles.get_mut(polled) {
                    bundle.arrivals += 1;
                }
                self.deliver(polled, arrived)
            }
            _ => {
                self.enqueue(arrived);
                None
            }
        }
    }

    /// The next message of a bundle whose handler may run. The caller runs it and calls
    /// [`finish`](Self::finish), in whichever thread.
    #[inline]
    pub fn next_delivery(&mut self, id: BundleId) -> Option<Box<Delivery<H>>> {
        if self.bundles.get(id)?.queue.is_empty() {
            return None;
        }
        self.deliver_waiting(id)
    }

    fn deliver_waiting(&mut self, id: BundleId) -> Option<Box<Delivery<H>>> {
        loop {
            let arrived = self.take_runnable(id)?;
            if let Some(delivery) = self.deliver(id, arrived) {
                return Some(delivery);
            }
        }
    }

    /// The delivery of a message, unless it is refused; it counts as running.
    #[inline(always)]
    fn deliver(&mut self, id: BundleId, arrived: Arrived) -> Option<Box<Delivery<H>>> {
        let is_taken = match arrived.what {
            What::Request { conn, tag, .. } => self.takes_request(&arrived, conn, tag),
            What::Reply { conn } => self.takes_reply(&arrived, conn),
            _ => true,
        };
        if !is_taken {
            if let Some((slot, _)) = arrived.slot {
                self.repost(slot);
            }
            return None;
        }
        if let Some(bundle) = self.bundles.get_mut(id) {
            bundle.running += 1;
        }
        Some(self.delivery(arrived))
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

    /// Whether the endpoint takes a request. The buffer of its reply is promised then.
    #[inline]
    fn takes_request(&mut self, arrived: &Arrived, conn: ConnId, tag: Tag) -> bool {
        let message = &arrived.message;
        if let Some(status) = self.acceptance(arrived.endpoint, tag, message) {
            let mut answer = Message::new(Kind::Return, message.id);
            answer.status = Some(status);
            self.answer(conn, answer, (message.starved, false), &[]);
            return false;
        }
        self.buffers.promise();
        self.counters[arrived.endpoint.index() as usize].requests_received += 1;
        true
    }

    /// Whether the endpoint takes a reply. The request has ended then.
    #[inline]
    fn takes_reply(&mut self, arrived: &Arrived, conn: ConnId) -> bool {
        let message = &arrived.message;
        if let Some(status) = self.fitness(arrived.endpoint, message) {
            self.refuse_reply(conn, arrived, status);
            return false;
        }
        self.retire(conn, message.id, message.credits);
        self.close_if_idle(conn);
        self.counters[arrived.endpoint.index() as usize].replies_received += 1;
        true
    }

    /// Tells the peer that its reply was refused. The request keeps its credit until the peer has
    /// heard of it.
    #[cold]
    fn refuse_reply(&mut self, conn: ConnId, reply: &Arrived, status: Status) {
        let Some(record) = self.records.of(reply.message.id, conn) else { return };
        (record.purpose, record.is_answered) = (Purpose::Refusal, false);
        let mut message =
            Message { kind: Kind::ReplyRefused, status: Some(status), ..reply.message };
        if message.category == Category::Medium {
            // It would stand before a payload.
            message.category = Category::Short;
        }
        message.credits = 0;
        let args = reply.args;
        self.send_head(conn, &message, args.get(..message.nargs.into()).unwrap_or_default());
    }

    #[inline(always)]
    fn delivery(&mut self, arrived: Arrived) -> Box<Delivery<H>> {
        let Arrived { endpoint, what, message, args, slot } = arrived;
        let is_returned = matches!(what, What::Returned(_));
        let index = if is_returned { 0 } else { message.handler };
        let payload = match (slot, message.category) {
            (Some((slot, at)), _) => Payload::Slot { slot, at, len: message.len as u32 },
            (None, Category::Bulk) if !is_returned => self.part_of_segment(endpoint, &message),
            _ => Payload::None,
        };
        let place = self.handlers[endpoint.index() as usize].get_mut(usize::from(index));
        // A handler of the endpoint itself may reply to itself, to the same handler.
        let is_own = matches!(what, What::OwnRequest { .. } | What::OwnReply);
        let handler = match is_own {
            true => place.and_then(|place| place.clone()),
            false => place.and_then(Option::take),
        };
        let mut is_marked = false;
        if !is_own && let Some(endpoint) = self.endpoints.get_mut(endpoint) {
            (endpoint.is_running, is_marked) = (true, true);
            if handler.is_some() {
                endpoint.lent = Some(index);
            }
        }
        let has_replied = false;
        let delivery =
            Delivery { handler, endpoint, payload, what, message, args, has_replied, is_marked };
        match self.spare.pop() {
            Some(mut place) => {
                *place = delivery;
                place
            }
            None => Box::new(delivery),
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
    ) -> Box<Delivery<H>> {
        let tag = self.endpoints.get(id).map_or(Tag::NONE, |endpoint| endpoint.tag);
        let what = if is_request { What::OwnRequest { tag } } else { What::OwnReply };
        let (message, args) = (*message, out.all_args());
        let arrived = Arrived { endpoint: id, what, message, args, slot: None };
        let mut delivery = self.delivery(arrived);
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
        if !delivery.is_request() || delivery.has_replied {
            return Err(CallError::NoReply);
        }
        if self.reply_short(delivery, out) {
            return Ok(Replied::Done);
        }
        self.reply_any(delivery, out)
    }

    /// Sends a reply of any kind.
    #[inline(never)]
    fn reply_any(
        &mut self,
        delivery: &mut Delivery<H>,
        out: &Outgoing<'_>,
    ) -> Result<Replied<H>, CallError> {
        let message = out.message(Kind::Reply, delivery.message.id, self.config.max_medium)?;
        let endpoint = delivery.endpoint;
        delivery.has_replied = true;
        self.buffers.redeem();
        self.counters[endpoint.index() as usize].replies_sent += 1;
        match delivery.what {
            What::Request { conn, by_lane, .. } => {
                let how = (delivery.message.starved, by_lane);
                Ok(self.reply_over(conn, out, message, how))
            }
            _ => Ok(self.reply_to_own(endpoint, out, &message)),
        }
    }

    #[inline]
    fn reply_over(
        &mut self,
        conn: ConnId,
        out: &Outgoing<'_>,
        mut message: Message,
        (starved, by_lane): (bool, bool),
    ) -> Replied<H> {
        if self.conns.get(conn).is_none() {
            // The requester is gone, and hears of that itself.
            return Replied::Done;
        }
        match out.body {
            Body::Short => {
                self.answer(conn, message, (starved, by_lane), out.args);
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
                self.send_medium(conn, (&message, out.args), bytes, buffer);
                Replied::Done
            }
            Body::Bulk { from, offset } => {
                let acceptor = self.conns.get_mut(conn).and_then(Conn::acceptor);
                let none = Remote { addr: 0, len: 0, key: 0 };
                let segment = acceptor.and_then(|acceptor| acceptor.segment).unwrap_or(none);
                match within(segment, offset, from.len) {
                    Ok(to) => {
                        self.write_reply(conn, (from, to), (message, out.args), (starved, by_lane))
                    }
                    Err(status) => {
                        self.reply_comes_back(conn, (&message, out), status, starved);
                        Replied::Done
                    }
                }
            }
        }
    }

    fn write_reply(
        &mut self,
        conn: ConnId,
        (from, to): (Local, Remote),
        (message, args): (Message, &[Arg]),
        (starved, by_lane): (bool, bool),
    ) -> Replied<H> {
        if from.len == 0 {
            self.answer(conn, message, (starved, false), args);
            return Replied::Done;
        }
        let mut message = message;
        message.credits = self.credit_for_answer(conn, starved);
        if by_lane && self.push_bulk(conn, (from, to), (&message, args)) {
            return Replied::Done;
        }
        self.next_ticket = self.next_ticket.wrapping_add(1);
        let ticket = self.next_ticket;
        self.reply_writes.push((ticket, conn));
        let number = notify::REPLY | u64::from(ticket);
        self.write_and_send(conn, (from, to), Some(number), (&message, args));
        Replied::Pending(ReplyTicket(ticket))
    }

    /// The requester's segment has no room for a reply: it comes back, and the requester gets none.
    fn reply_comes_back(
        &mut self,
        conn: ConnId,
        (message, out): (&Message, &Outgoing<'_>),
        status: Status,
        starved: bool,
    ) {
        if let Some(known) = self.conns.get(conn) {
            let operation = Operation::Reply(message.category);
            let returned = Returned { status, operation, to: known.peer };
            self.come_back(known.endpoint, returned, message, out.all_args());
        }
        self.answer(conn, Message::new(Kind::Ack, message.id), (starved, false), &[]);
    }

    fn reply_to_own(
        &mut self,
        endpoint: EndpointId,
        out: &Outgoing<'_>,
        message: &Message,
    ) -> Replied<H> {
        match self.fitness(endpoint, message) {
            None => Replied::Own(self.own_delivery(endpoint, message, out, false)),
            Some(status) => {
                if let Ok(to) = self.name(endpoint) {
                    let operation = Operation::Reply(message.category);
                    let returned = Returned { status, operation, to };
                    self.come_back(endpoint, returned, message, out.all_args());
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

    /// Sends an answer without a payload: whether the requester has waited for a credit, and whether the
    /// request has come in a lane.
    #[inline]
    pub(super) fn answer(
        &mut self,
        conn: ConnId,
        mut message: Message,
        (starved, by_lane): (bool, bool),
        args: &[Arg],
    ) {
        message.credits = self.credit_for_answer(conn, starved);
        let is_short = message.category == Category::Short && message.status.is_none();
        if by_lane && is_short && self.push(conn, message.fixed(args.len()), args) {
            return;
        }
        self.send_head(conn, &message, args);
    }

    /// Ends a delivery whose handler has run. A request that was not replied to is acknowledged.
    #[inline]
    pub fn finish(&mut self, delivery: &mut Delivery<H>) {
        if delivery.is_request() && !delivery.has_replied {
            self.buffers.redeem();
            if let What::Request { conn, .. } = delivery.what
                && !self.acknowledge_short(delivery)
            {
                let message = Message::new(Kind::Ack, delivery.message.id);
                let how = (delivery.message.starved, delivery.what.is_by_lane());
                self.answer(conn, message, how, &[]);
            }
        }
        if matches!(delivery.what, What::Returned(_)) {
            self.counters[delivery.endpoint.index() as usize].returned += 1;
        }
        if let Payload::Slot { slot, .. } = delivery.payload {
            self.repost(slot);
        }
        let Some(endpoint) = self.endpoints.get_mut(delivery.endpoint) else { return };
        // The handler goes back into its place, if no other was set there meanwhile.
        if !delivery.is_own()
            && let Some(lent) = endpoint.lent.take()
            && let Some(table) = self.handlers.get_mut(delivery.endpoint.index() as usize)
            && let Some(place) = table.get_mut(usize::from(lent))
        {
            *place = delivery.handler.take();
        }
        if delivery.is_marked {
            endpoint.is_running = false;
            if let Some(bundle) = self.bundles.get_mut(endpoint.bundle) {
                bundle.running -= 1;
            }
        }
    }

    /// The endpoint that has sent a message; none if it is gone.
    #[must_use]
    pub fn source(&self, delivery: &Delivery<H>) -> Option<Name> {
        match &delivery.what {
            What::Request { conn, .. } | What::Reply { conn } => {
                self.conns.get(*conn).map(|conn| conn.peer)
            }
            What::OwnRequest { .. } | What::OwnReply => self.name(delivery.endpoint).ok(),
            What::Returned(why) => Some(why.to),
            What::Got => None,
        }
    }
}
