//! The shortest way of the most frequent messages: short requests and their replies, of which nothing is
//! unusual. Where anything is, nothing is done here, and the message goes the general way. What need not be
//! done before a message is on its way is done afterwards.

use std::hint::black_box;

use super::request::CHECKPOINT_EVERY;
use super::{Body, Core, Delivery, Outgoing};
use crate::conn::{Conn, ConnId, Role};
use crate::endpoint::{BundleId, EndpointId, Link, What};
use crate::fabric::Fabric;
use crate::message::{FIXED, Kind, Message};
use crate::types::{Arg, Category, MAX_ARGS, Mode, Status};

use super::receive::notify;

/// Bytes of the longest short message without a tag.
const LONGEST: usize = FIXED + 4 * MAX_ARGS;
/// Deliveries that are kept for the next messages.
const SPARE: usize = 16;

/// A short message without a tag, whose sender has not waited for a credit, and which refuses nothing.
#[derive(Clone, Copy, Debug)]
struct Short {
    kind: Kind,
    nargs: u8,
    handler: u16,
    id: u16,
    credits: i8,
}

impl Short {
    /// Reads the first 8 bytes of a message; none if it is another one.
    #[inline(always)]
    fn parse(fixed: u64) -> Option<Self> {
        const REQUEST: u8 = Kind::Request as u8;
        const REPLY: u8 = Kind::Reply as u8;
        let kind = match fixed as u8 {
            REQUEST => Kind::Request,
            REPLY => Kind::Reply,
            _ => return None,
        };
        let nargs = (fixed >> 8) as u8;
        let (handler, status) = ((fixed >> 16) as u16, (fixed >> 56) as u8);
        if status != 0 || handler == 0 {
            return None;
        }
        Some(Self { kind, nargs, handler, id: (fixed >> 32) as u16, credits: (fixed >> 48) as i8 })
    }

    #[inline(always)]
    fn to_message(self) -> Message {
        let Self { kind, nargs, handler, id, credits } = self;
        Message { nargs, handler, credits, ..Message::new(kind, id) }
    }
}

/// What became of a request that may be a short one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Shortly {
    /// It is sent.
    Sent,
    /// There is no credit, and asking for more does not help.
    NotNow,
    /// It goes the general way.
    Otherwise,
}

/// Writes a short message; its bytes, and how many of them are used.
#[inline(always)]
fn encode(fixed: u64, args: &[Arg]) -> ([u8; LONGEST], usize) {
    let mut bytes = [0; LONGEST];
    bytes[..FIXED].copy_from_slice(&fixed.to_le_bytes());
    for (place, arg) in bytes[FIXED..].chunks_exact_mut(4).zip(args) {
        place.copy_from_slice(&arg.to_le_bytes());
    }
    (bytes, FIXED + 4 * args.len().min(MAX_ARGS))
}

/// Writes and reads a short request and a reply with these arguments, as the engine does: to measure that.
#[inline]
#[must_use]
pub fn code_short(args: &[Arg]) -> u32 {
    let mut sum = 0;
    for kind in [Kind::Request, Kind::Reply] {
        let message = Message { nargs: args.len() as u8, handler: 1, ..Message::new(kind, 3) };
        let (bytes, len) = encode(message.fixed(args.len()), args);
        let fixed = bytes.first_chunk().map_or(0, |fixed| u64::from_le_bytes(*fixed));
        black_box(len);
        let short = Short::parse(black_box(fixed));
        sum += short.map_or(0, |short| u32::from(black_box(short.to_message()).nargs));
        black_box(bytes);
    }
    sum
}

impl Conn {
    /// Counts a send; what it has to ask for, if anything.
    #[inline(always)]
    fn count_send(&mut self) -> Option<u64> {
        self.lanes.sent = self.lanes.sent.wrapping_add(1);
        self.unsignaled += 1;
        if self.unsignaled < CHECKPOINT_EVERY {
            return None;
        }
        self.unsignaled = 0;
        Some(notify::CHECKPOINT)
    }
}

impl<F: Fabric, H: Clone> Core<F, H> {
    /// Delivers a message whose handler may run at once, in a bundle in which no other waits. There may be up
    /// to `most` arguments, of which `arg` gives each by its number.
    #[inline(always)]
    pub(super) fn deliver_short(
        &mut self,
        polled: BundleId,
        conn: ConnId,
        (fixed, by_lane): (u64, bool),
        (most, arg): (usize, impl Fn(usize) -> Arg),
    ) -> Option<Box<Delivery<H>>> {
        let short = Short::parse(fixed)?;
        if usize::from(short.nargs) > most {
            return None;
        }
        let known = self.conns.get_mut(conn)?;
        let id = known.endpoint;
        let endpoint = self.endpoints.get_mut(id)?;
        let bundle = self.bundles.get_mut(polled)?;
        let is_busy = bundle.running > 0 && bundle.mode == Mode::Sequential;
        if endpoint.bundle != polled || endpoint.is_running || is_busy || !bundle.queue.is_empty() {
            return None;
        }
        let place = self.handlers.get_mut(id.index() as usize)?.get_mut(short.handler as usize)?;
        let counters = self.counters.get_mut(id.index() as usize)?;
        place.as_ref()?;
        let what = match (&mut known.role, short.kind) {
            (Role::Acceptor(acceptor), Kind::Request) => {
                let has_credit = acceptor.in_service < acceptor.granted;
                let is_taken = has_credit && endpoint.tag.accepts(acceptor.tag);
                if !is_taken || !self.buffers.may_serve(acceptor.buffers) {
                    return None;
                }
                acceptor.in_service += 1;
                self.buffers.promise();
                counters.requests_received += 1;
                What::Request { conn, tag: acceptor.tag, by_lane }
            }
            (Role::Initiator(initiator), Kind::Reply) if initiator.index.is_some() => {
                if !self.records.end_request(short.id, conn) {
                    return None;
                }
                initiator.end_request(short.credits, self.config.max_window);
                counters.replies_received += 1;
                What::Reply { conn }
            }
            _ => return None,
        };
        bundle.arrivals += 1;
        bundle.running += 1;
        endpoint.is_running = true;
        endpoint.lent = Some(short.handler);
        let handler = place.take();
        let mut delivery = self.spare.pop().unwrap_or_else(|| Box::new(Delivery::empty(id)));
        delivery.begin(handler, id, what, short.to_message());
        delivery.put_args(arg);
        Some(delivery)
    }

    /// Takes in the acknowledgement of a request, of which nothing is unusual; whether it is one.
    #[inline(always)]
    pub(super) fn take_ack(&mut self, conn: ConnId, fixed: u64) -> bool {
        const ACK: u64 = Kind::Ack as u64;
        /// What an acknowledgement may have: which request it is for, and credits.
        const VARIES: u64 = 0x00ff_ffff_0000_0000;
        if fixed & !VARIES != ACK {
            return false;
        }
        let Some(Role::Initiator(initiator)) = self.conns.get_mut(conn).map(|it| &mut it.role)
        else {
            return false;
        };
        // Of one that is not mapped any more, this may be the last message.
        if initiator.index.is_none() || !self.records.end_request((fixed >> 32) as u16, conn) {
            return false;
        }
        initiator.end_request((fixed >> 48) as i8, self.config.max_window);
        true
    }

    /// Keeps a delivery that is finished for another message.
    #[inline]
    pub fn recycle(&mut self, delivery: Box<Delivery<H>>) {
        let is_frequent = matches!(delivery.what, What::Request { .. } | What::Reply { .. });
        if is_frequent && self.spare.len() < SPARE {
            self.spare.push(delivery);
        }
    }

    /// Sends a short message over the queue pair of a connection; whether it is sent.
    #[inline(always)]
    fn send_encoded(&mut self, id: ConnId, fixed: u64, args: &[Arg]) -> bool {
        let Some(conn) = self.conns.get_mut(id) else { return true };
        let asks = conn.count_send();
        let (bytes, len) = encode(fixed, args);
        self.fabric.send(id, &bytes[..len], asks)
    }

    /// Sends a short request to a peer that is connected.
    #[inline(always)]
    pub(super) fn request_short(
        &mut self,
        id: EndpointId,
        index: u32,
        out: &Outgoing<'_>,
    ) -> Shortly {
        use Shortly::Otherwise;
        if !matches!(out.body, Body::Short) || out.args.len() > MAX_ARGS {
            return Otherwise;
        }
        let Some(endpoint) = self.endpoints.get(id) else { return Otherwise };
        let Some(Some(target)) = endpoint.translations.get(index as usize) else {
            return Otherwise;
        };
        let Link::Conn(conn) = target.link else { return Otherwise };
        let Some(known) = self.conns.get_mut(conn) else { return Otherwise };
        let Role::Initiator(initiator) = &mut known.role else { return Otherwise };
        if initiator.in_flight >= initiator.window && initiator.window >= self.config.max_window {
            // No more credits are to be had.
            return if initiator.is_up { Shortly::NotNow } else { Otherwise };
        }
        let is_ready = initiator.is_up && initiator.in_flight < initiator.window;
        let is_plain = !initiator.tell_segment && !initiator.is_starved;
        if !is_ready || !is_plain || initiator.told_tag != target.tag {
            return Otherwise;
        }
        if !known.lanes.is_out && known.lanes.count_short(self.config.lane_after) {
            // That uses a credit, which may be the last.
            self.ask_for_lanes(conn);
            return Otherwise;
        }
        let Some(number) = self.records.next() else { return Otherwise };
        initiator.in_flight += 1;
        let in_flight = initiator.in_flight;
        let nargs = out.args.len() as u8;
        let message =
            Message { nargs, handler: out.handler, ..Message::new(Kind::Request, number) };
        let fixed = message.fixed(out.args.len());
        let in_lane = known.has_room_in_lane(in_flight) && self.push(conn, fixed, out.args);
        let is_sent = in_lane || self.send_encoded(conn, fixed, out.args);
        self.records.begin_request(conn, &message, out.args);
        if let Some(counters) = self.counters.get_mut(id.index() as usize) {
            counters.requests_sent += 1;
        }
        if !is_sent {
            self.give_up(conn, Status::Unreachable);
        }
        Shortly::Sent
    }

    /// Acknowledges a request that has come in a lane, where that changes no credits; whether it is done.
    #[inline(always)]
    pub(super) fn acknowledge_short(&mut self, delivery: &Delivery<H>) -> bool {
        let What::Request { conn, by_lane: true, .. } = delivery.what else { return false };
        if delivery.message.starved || self.pool.is_short {
            return false;
        }
        let Some(known) = self.conns.get_mut(conn) else { return false };
        let Role::Acceptor(acceptor) = &mut known.role else { return false };
        acceptor.in_service = acceptor.in_service.saturating_sub(1);
        acceptor.recent = acceptor.recent.saturating_add(1);
        let fixed = Message::new(Kind::Ack, delivery.message.id).fixed(0);
        if !self.push(conn, fixed, &[]) && !self.send_encoded(conn, fixed, &[]) {
            self.give_up(conn, Status::Unreachable);
        }
        true
    }

    /// Sends a short reply to a request, where it changes no credits; whether it is sent.
    #[inline(always)]
    pub(super) fn reply_short(&mut self, delivery: &mut Delivery<H>, out: &Outgoing<'_>) -> bool {
        let What::Request { conn, by_lane, .. } = delivery.what else { return false };
        let is_short = matches!(out.body, Body::Short) && out.args.len() <= MAX_ARGS;
        if !is_short || delivery.message.starved || self.pool.is_short {
            return false;
        }
        let Some(known) = self.conns.get_mut(conn) else { return false };
        let Role::Acceptor(acceptor) = &mut known.role else { return false };
        acceptor.in_service = acceptor.in_service.saturating_sub(1);
        acceptor.recent = acceptor.recent.saturating_add(1);
        let reply =
            Message { handler: out.handler, ..Message::new(Kind::Reply, delivery.message.id) };
        debug_assert_eq!(reply.category, Category::Short);
        let fixed = reply.fixed(out.args.len());
        let in_lane = by_lane && self.push(conn, fixed, out.args);
        let is_sent = in_lane || self.send_encoded(conn, fixed, out.args);
        delivery.has_replied = true;
        self.buffers.redeem();
        if let Some(counters) = self.counters.get_mut(delivery.endpoint.index() as usize) {
            counters.replies_sent += 1;
        }
        if !is_sent {
            self.give_up(conn, Status::Unreachable);
        }
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::message::MAX_HEAD;

    fn encoded(message: &Message, args: &[Arg]) -> ([u8; MAX_HEAD], usize) {
        let mut bytes = [0; MAX_HEAD];
        let len = message.encode(args, &mut bytes);
        (bytes, len)
    }

    #[test]
    fn short_messages_have_the_same_bytes_either_way() {
        let all: Vec<Arg> = (1..=16).map(|arg| arg * -0x0123_4567).collect();
        for kind in [Kind::Request, Kind::Reply] {
            for nargs in 0..=MAX_ARGS {
                let args = &all[..nargs];
                let message = Message {
                    nargs: nargs as u8,
                    handler: 513,
                    credits: -3,
                    ..Message::new(kind, 7)
                };
                let (bytes, len) = encoded(&message, args);
                let (short, short_len) = encode(message.fixed(nargs), args);
                assert_eq!((&bytes[..len], len), (&short[..short_len], short_len));
                let fixed = u64::from_le_bytes(*bytes.first_chunk().unwrap());
                assert_eq!(Short::parse(fixed).map(Short::to_message), Some(message));
            }
        }
    }

    #[test]
    fn nothing_unusual_counts_as_short() {
        let usual = Message { handler: 1, ..Message::new(Kind::Request, 7) };
        let parse = |message: &Message| {
            let (bytes, len) = encoded(message, &[]);
            assert!(len >= FIXED);
            Short::parse(u64::from_le_bytes(*bytes.first_chunk().unwrap()))
        };
        assert!(parse(&usual).is_some());
        for unusual in [
            Message { starved: true, ..usual },
            Message { tag: Some(crate::types::Tag(3)), ..usual },
            Message { status: Some(Status::BadTag), ..usual },
            Message { category: Category::Medium, ..usual },
            Message { category: Category::Bulk, ..usual },
            Message { handler: 0, ..usual },
            Message { kind: Kind::Ack, ..usual },
            Message { kind: Kind::Segment, ..usual },
        ] {
            assert!(parse(&unusual).is_none(), "{unusual:?}");
        }
    }
}
