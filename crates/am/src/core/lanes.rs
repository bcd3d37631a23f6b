//! Lanes: short messages between processes of one host, through memory of the receiver that the sender has
//! mapped. They do not take the queue pair, but keep the order of the connection. Each message in a lane
//! says how many were sent over the queue pair before it, and waits for these. A message of the queue pair
//! waits for what lies in the lane when it comes.
//!
//! The payload of a bulk message is written into the segment while the message is being sent, where the
//! memory of the receiver can be reached. Then the message goes into the lane, too.
//!
//! A message in a lane uses a credit as any other. So a lane never has more than it has room for: the
//! initiator sends a request there only while at most [`LANE_SLOTS`] are under way, and the acceptor answers
//! there only to such requests.

use super::{Core, Delivery};
use crate::conn::{Conn, ConnId, Role};
use crate::endpoint::{BundleId, What};
use crate::fabric::{Fabric, LANE_SLOTS, LINE_WORDS, LaneAddress, Line, Local, Pushed, Remote};
use crate::message::{FIXED, Kind, MAX_HEAD, Message};
use crate::records::Purpose;
use crate::types::{Arg, Category, MAX_ARGS, Status};

/// Arguments of the longest message that goes into a lane.
pub(super) const MOST_ARGS: usize = 2 * (LINE_WORDS - 2);
/// The same of a bulk message, which has its offset and its length there, too.
const MOST_BULK_ARGS: usize = MOST_ARGS - 4;
/// Bytes of the longest payload of a message in a lane.
const MOST_BULK: u64 = 1 << 20;

/// What a look at lanes has found.
#[derive(Debug)]
pub enum FromLane<H> {
    /// Nothing.
    Nothing,
    /// A message that waits for others, which come over the queue pair.
    Waits,
    /// A message that runs no handler now.
    Taken,
    /// A message whose handler is to run.
    Run(Box<Delivery<H>>),
}

/// Writes a message.
#[inline(always)]
fn line_of(fixed: u64, args: &[Arg], sent: u32) -> Line {
    let mut line = [0; LINE_WORDS];
    line[0] = fixed;
    put_args(&mut line[1..LINE_WORDS - 1], args);
    line[LINE_WORDS - 1] = sent.into();
    line
}

#[inline(always)]
fn put_args(words: &mut [u64], args: &[Arg]) {
    let half = |arg: &Arg| u64::from(arg.cast_unsigned());
    let mut left = args;
    for word in words {
        match left {
            [low, high, rest @ ..] => (*word, left) = (half(low) | half(high) << 32, rest),
            [low] => {
                *word = half(low);
                return;
            }
            [] => return,
        }
    }
}

/// An argument of a short message.
#[inline(always)]
fn arg_of(line: &Line, n: usize) -> Arg {
    let word = line.get(1 + n / 2).copied().unwrap_or(0);
    (word >> (n % 2 * 32)) as Arg
}

/// Writes a bulk message.
fn bulk_line_of(message: &Message, args: &[Arg], sent: u32) -> Line {
    let mut line = [0; LINE_WORDS];
    line[..3].copy_from_slice(&[message.fixed(args.len()), message.offset, message.len]);
    put_args(&mut line[3..LINE_WORDS - 1], args);
    line[LINE_WORDS - 1] = sent.into();
    line
}

/// The bytes of a message, arguments last.
#[inline(always)]
fn bytes_of(line: &Line) -> [u8; FIXED + 4 * MOST_ARGS] {
    let mut bytes = [0; FIXED + 4 * MOST_ARGS];
    for (bytes, word) in bytes.chunks_exact_mut(8).zip(line) {
        bytes.copy_from_slice(&word.to_le_bytes());
    }
    bytes
}

impl<F: Fabric, H: Clone> Core<F, H> {
    /// Puts a short message into the lane of a connection, if there is one and the message fits; whether that
    /// was possible.
    #[inline(always)]
    pub(super) fn push(&mut self, id: ConnId, fixed: u64, args: &[Arg]) -> bool {
        let Some(conn) = self.conns.get(id) else { return false };
        if !conn.lanes.is_out || args.len() > MOST_ARGS {
            return false;
        }
        let line = line_of(fixed, args, conn.lanes.sent);
        self.push_line(id, &line)
    }

    #[inline(always)]
    fn push_line(&mut self, id: ConnId, line: &Line) -> bool {
        match self.fabric.push_line(id, line) {
            Pushed::Done => {}
            Pushed::Asleep => self.wake(id),
            Pushed::Closed => {
                self.lose_lane(id);
                return false;
            }
        }
        true
    }

    /// Writes the payload of a bulk message and puts the message into the lane of a connection, if that is
    /// possible; whether it is done. Otherwise the payload is to be written again.
    pub(super) fn push_bulk(
        &mut self,
        id: ConnId,
        (from, to): (Local, Remote),
        (message, args): (&Message, &[Arg]),
    ) -> bool {
        let Some(conn) = self.conns.get(id) else { return false };
        let fits = args.len() <= MOST_BULK_ARGS && from.len <= MOST_BULK && message.tag.is_none();
        if !conn.lanes.is_out || !fits {
            return false;
        }
        let line = bulk_line_of(message, args, conn.lanes.sent);
        self.fabric.write_now(id, from, to) && self.push_line(id, &line)
    }

    /// Wakes the peer: there is a message in its lane.
    #[cold]
    fn wake(&mut self, id: ConnId) {
        self.send_head(id, &Message::new(Kind::Wake, 0), &[]);
    }

    /// The peer has closed its lane, and so the connection: the queue pair finds that out.
    #[cold]
    fn lose_lane(&mut self, id: ConnId) {
        if let Some(conn) = self.conns.get_mut(id) {
            conn.lanes.is_out = false;
        }
    }

    /// Asks for lanes if a connection has none, and it is time for it.
    pub(super) fn want_lanes(&mut self, id: ConnId) {
        let Some(conn) = self.conns.get_mut(id) else { return };
        if !conn.lanes.is_out && conn.lanes.count_short(self.config.lane_after) {
            self.ask_for_lanes(id);
        }
    }

    /// Asks for lanes. Uses a credit; without one that happens with a later message.
    #[cold]
    pub(super) fn ask_for_lanes(&mut self, id: ConnId) {
        let is_free = self.records.next().is_some();
        let Some(conn) = self.conns.get_mut(id) else { return };
        let Role::Initiator(initiator) = &mut conn.role else { return };
        if !is_free || !initiator.is_up || initiator.in_flight >= initiator.window {
            return;
        }
        let Some(lane) = self.fabric.offer_lane(id) else { return conn.lanes.put_off() };
        conn.lanes.is_asked = true;
        let mut message = Message::new(Kind::Lane, 0);
        let args = [put_address(&mut message, lane)];
        if self.records.insert(id, Purpose::Lane, &mut message, &args).is_none() {
            return;
        }
        if let Some(conn) = self.conns.get_mut(id) {
            conn.lanes.is_in = true;
            if let Some(initiator) = conn.initiator() {
                initiator.in_flight += 1;
            }
        }
        self.send_head(id, &message, &args);
    }

    /// The initiator has offered a lane; whether it may.
    pub(super) fn lane_offered(&mut self, id: ConnId, message: &Message, key: Arg) -> bool {
        let Some(conn) = self.conns.get_mut(id) else { return false };
        if std::mem::replace(&mut conn.lanes.is_asked, true) {
            return false;
        }
        let is_out = self.fabric.open_lane(id, address_of(message, key));
        // There are both or none.
        let offer = if is_out { self.fabric.offer_lane(id) } else { None };
        if let Some(conn) = self.conns.get_mut(id) {
            (conn.lanes.is_out, conn.lanes.is_in) = (offer.is_some(), offer.is_some());
        }
        let mut answer = Message::new(Kind::LaneInfo, message.id);
        let key = put_address(&mut answer, offer.unwrap_or(NO_LANE));
        answer.credits = self.credit_for_answer(id, message.starved);
        self.send_head(id, &answer, &[key]);
        true
    }

    /// The acceptor has offered a lane in its turn, if it has one.
    pub(super) fn lane_answered(&mut self, id: ConnId, message: &Message, key: Arg) {
        let lane = address_of(message, key);
        let is_out = lane != NO_LANE && self.fabric.open_lane(id, lane);
        if let Some(conn) = self.conns.get_mut(id) {
            conn.lanes.is_out = is_out;
            conn.lanes.is_in &= lane != NO_LANE;
        }
        if lane == NO_LANE {
            self.fabric.withdraw_lane(id);
        }
    }

    /// Takes a message out of a lane, if one is there, and all that were sent before it have come. One whose
    /// handler may run now, in the bundle that is polled, comes back at once.
    #[inline]
    pub fn take_from_lane(&mut self, polled: BundleId) -> FromLane<H> {
        let Some((id, line)) = self.fabric.peek_lanes() else { return FromLane::Nothing };
        if !self.is_due(id, &line) {
            self.fabric.rotate_lanes();
            return FromLane::Waits;
        }
        self.fabric.pop_line(id);
        match self.take_line(Some(polled), id, &line) {
            Some(delivery) => FromLane::Run(delivery),
            None => FromLane::Taken,
        }
    }

    /// Takes in all messages of lanes, without running handlers; whether there were any.
    pub fn drain_lanes(&mut self) -> bool {
        let mut found = false;
        // A peer that sends for ever is not waited for.
        for _ in 0..u32::from(LANE_SLOTS) {
            let Some((id, line)) = self.fabric.peek_lanes() else { break };
            if self.is_due(id, &line) {
                self.fabric.pop_line(id);
                let _ = self.take_line(None, id, &line);
                found = true;
            }
            self.fabric.rotate_lanes();
        }
        found
    }

    /// Has peers send wake-ups from now on; whether there is nothing in any lane, so that this end may sleep.
    /// It looks at them so often: what a peer has just stored becomes visible in that time.
    pub fn arm_lanes(&mut self, looks: u32) -> bool {
        let lanes = self.fabric.arm_lanes();
        let looks = if lanes.is_empty() { 0 } else { looks };
        for _ in 0..looks {
            for &id in &lanes {
                let line = self.fabric.peek_line(id);
                if line.is_some_and(|line| self.is_due(id, &line)) {
                    return false;
                }
            }
            std::hint::spin_loop();
        }
        true
    }

    /// Whether all messages that were sent over the queue pair before one in a lane have come.
    #[inline(always)]
    fn is_due(&self, id: ConnId, line: &Line) -> bool {
        let conn = self.conns.get(id);
        conn.is_some_and(|conn| conn.lanes.received == line[LINE_WORDS - 1] as u32)
    }

    /// A message of a connection has come over its queue pair. Those in its lane were sent before it, if they
    /// waited for no more than have come so far.
    #[inline]
    pub(super) fn count_received(&mut self, id: ConnId) {
        let Some(conn) = self.conns.get(id) else { return };
        if conn.lanes.is_in {
            self.drain_lane(id);
        }
        if let Some(conn) = self.conns.get_mut(id) {
            conn.lanes.received = conn.lanes.received.wrapping_add(1);
        }
    }

    /// Takes in what lies in the lane of a connection.
    #[inline(never)]
    pub(super) fn drain_lane(&mut self, id: ConnId) {
        // A peer that sends for ever is not waited for.
        for _ in 0..LANE_SLOTS {
            let Some(line) = self.fabric.peek_line(id) else { return };
            if !self.is_due(id, &line) {
                return;
            }
            self.fabric.pop_line(id);
            let _ = self.take_line(None, id, &line);
        }
    }

    #[inline(always)]
    fn take_line(
        &mut self,
        polled: Option<BundleId>,
        id: ConnId,
        line: &Line,
    ) -> Option<Box<Delivery<H>>> {
        const SIGNAL: u64 = Kind::Signal as u64;
        if line[0] == SIGNAL {
            if !self.received_signal(id, &Message::new(Kind::Signal, 0), true) {
                self.give_up(id, Status::Unreachable);
            }
            return None;
        }
        if self.take_ack(id, line[0]) {
            return None;
        }
        if let Some(polled) = polled
            && let Some(delivery) =
                self.deliver_short(polled, id, (line[0], true), (MOST_ARGS, |n| arg_of(line, n)))
        {
            return Some(delivery);
        }
        self.take_any_line(polled, id, &bytes_of(line))
    }

    #[inline(never)]
    fn take_any_line(
        &mut self,
        polled: Option<BundleId>,
        id: ConnId,
        bytes: &[u8],
    ) -> Option<Box<Delivery<H>>> {
        let mut head = [0; MAX_HEAD];
        head[..bytes.len()].copy_from_slice(bytes);
        const BULK: u8 = Category::Bulk as u8;
        let (before, most) = match bytes[0] >> 4 & 3 {
            BULK => (FIXED + 16, MOST_BULK_ARGS),
            _ => (FIXED, MOST_ARGS),
        };
        let len = before + 4 * usize::from(bytes[1]).min(most);
        let mut args = [0; MAX_ARGS];
        let message = Message::parse(&head, len, &mut args).map(|(message, _)| message);
        let is_for_lanes = |message: &Message| {
            let is_possible = match message.category {
                Category::Short => matches!(
                    message.kind,
                    Kind::Request | Kind::Reply | Kind::Ack | Kind::Signal | Kind::SignalsTaken
                ),
                Category::Bulk => matches!(message.kind, Kind::Request | Kind::Reply),
                Category::Medium => false,
            };
            is_possible && message.tag.is_none()
        };
        match message.filter(is_for_lanes) {
            Some(message) => self.take_message(polled, id, (message, args), None, true),
            None => {
                self.give_up(id, Status::Unreachable);
                None
            }
        }
    }
}

/// What stands for none.
const NO_LANE: LaneAddress = LaneAddress { addr: 0, key: 0, serial: 0 };

fn put_address(message: &mut Message, lane: LaneAddress) -> Arg {
    let LaneAddress { addr, key, serial } = lane;
    super::receive::put_segment(message, Some(Remote { addr, len: serial, key }))
}

fn address_of(message: &Message, key: Arg) -> LaneAddress {
    LaneAddress { addr: message.offset, key: key.cast_unsigned(), serial: message.len }
}

impl Conn {
    /// Whether a request may go into the lane, of which `in_flight` are under way with it.
    #[inline(always)]
    pub(crate) fn has_room_in_lane(&self, in_flight: u16) -> bool {
        self.lanes.is_out && in_flight <= LANE_SLOTS
    }
}

impl What {
    /// Whether the answer may go into the lane.
    #[inline]
    pub(super) fn is_by_lane(&self) -> bool {
        matches!(self, Self::Request { by_lane: true, .. })
    }
}
