//! Payload and FIN: what is placed, what is kept, what is acknowledged (RFC 9293 3.10.7.4, seventh and
//! eighth check).

use super::reassembly::Held;
use super::seq::FIRST;
use super::state::Input;
use super::timers::Timer;
use super::{Connection, Mode, Placement, QUICK_ACKS, Received, State};

/// A segment with an acceptable number.
#[derive(Clone, Copy, Debug)]
pub(super) struct Arrival {
    /// The position of its first number.
    pub(super) start: u64,
    /// Where its payload began, before anything was cut off in front.
    pub(super) origin: u64,
    /// Octets of payload.
    pub(super) len: u64,
    pub(super) fin: bool,
    pub(super) push: bool,
    /// The network has marked it CE.
    pub(super) marked: bool,
}

impl Arrival {
    fn end(&self) -> u64 {
        self.start + self.len
    }

    fn placement(&self) -> Placement {
        let from = (self.start - self.origin) as usize;
        Placement { offset: self.start - FIRST, payload: from..from + self.len as usize }
    }
}

impl Connection {
    /// Places the payload, or finds that it cannot be.
    pub(super) fn take_payload(&mut self, now: u64, arrival: &Arrival, payload: &[u8]) -> Received {
        let mut received = Received::default();
        let before = self.receive.nxt;
        if self.state.receives() && (arrival.len > 0 || arrival.fin) {
            self.receive.echo_mark |= arrival.marked && self.agreed.ecn;
            if let Some(arrival) = self.trim(arrival) {
                if arrival.start > before {
                    self.take_behind_gap(&arrival, payload, &mut received);
                } else {
                    self.take_in_order(now, &arrival, &mut received);
                }
            }
        }
        let nxt = self.receive.nxt;
        received.push = before < self.receive.push && self.receive.push <= nxt && nxt > before;
        self.take_fin(now);
        received.contiguous = self.stream_end() - FIRST;
        received
    }

    /// Behind the last contiguous octet of the stream: RCV.NXT without the FIN.
    pub(super) fn stream_end(&self) -> u64 {
        self.receive.fin.map_or(self.receive.nxt, |fin| fin.min(self.receive.nxt)).max(FIRST)
    }

    /// Cuts off what is here already and what there is no room for. What is outside of the window loses its
    /// FIN and its PSH with its end. None if nothing is left.
    fn trim(&mut self, arrival: &Arrival) -> Option<Arrival> {
        let nxt = self.receive.nxt;
        let mut cut = *arrival;
        if cut.start < nxt {
            let known = arrival.end().min(nxt);
            if arrival.len > 0 {
                self.receive.duplicate = Some((arrival.start, known));
                self.owed.ack = true;
            }
            cut.len = arrival.end().saturating_sub(nxt);
            cut.start = nxt;
        }
        // By a FIN behind a gap the end of the stream is known: nothing is behind it, and it does not move.
        if let Some(fin) = self.receive.fin.filter(|fin| *fin != cut.end()) {
            cut.fin = false;
            if cut.end() > fin {
                cut.len = fin.saturating_sub(cut.start);
                cut.push = false;
                self.owed.ack = true;
            }
        }
        // What was offered, as far as the user still takes it.
        let due = self.receive.reassembly.as_ref().is_some_and(|kept| kept.is_due(nxt));
        let limit = self.receive.window.limit(cut.start == nxt);
        let room = self.receive.window.edge(nxt).min(limit).max(nxt);
        // What is held comes first: nothing may overtake it.
        let room = if due { nxt } else { room };
        if cut.end() > room {
            self.counters.no_room += 1;
            self.owed.ack = true;
            let begun = cut.start == nxt && room > cut.start;
            if self.config.mode == Mode::Message && !begun {
                // A message is not torn apart for want of room. But where there is some, and windows are of
                // whole units, it is longer than its receive: to be told so takes what there is room for.
                return None;
            }
            cut.len = room.saturating_sub(cut.start);
            (cut.fin, cut.push) = (false, false);
        }
        (cut.len > 0 || cut.fin).then_some(cut)
    }

    fn take_in_order(&mut self, now: u64, arrival: &Arrival, received: &mut Received) {
        let arrival = &self.cut_at_held(arrival);
        if arrival.len > 0 {
            received.placement = Some(arrival.placement());
        }
        if arrival.push {
            self.receive.push = self.receive.push.max(arrival.end());
        }
        if arrival.fin {
            self.receive.fin = Some(arrival.end());
            if let Some(reassembly) = &mut self.receive.reassembly {
                reassembly.end_at(arrival.end());
            }
        }
        self.receive.nxt = arrival.end();
        match &mut self.receive.reassembly {
            None => self.owe_ack(now, arrival.len),
            Some(reassembly) => {
                // RFC 5681 4.2: what fills a gap is acknowledged at once.
                self.receive.nxt = reassembly.advance(self.receive.nxt);
                self.owed.ack = true;
                if reassembly.is_empty() {
                    self.receive.reassembly = None;
                }
            }
        }
    }

    /// In message mode, what is held is handed out later, with the ends of its messages: a segment that
    /// reaches into it, since the peer has cut its stream anew, ends where it begins.
    fn cut_at_held(&self, arrival: &Arrival) -> Arrival {
        let first = self.receive.reassembly.as_ref().and_then(|reassembly| reassembly.first());
        match first.filter(|first| *first < arrival.end() && self.config.mode == Mode::Message) {
            Some(first) => {
                let len = first.saturating_sub(arrival.start);
                Arrival { len, push: false, fin: false, ..*arrival }
            }
            None => *arrival,
        }
    }

    /// Behind a gap: RFC 9293 3.10.7.4 wants it kept (SHLD-31), RFC 5681 4.2 acknowledged at once.
    fn take_behind_gap(&mut self, arrival: &Arrival, payload: &[u8], received: &mut Received) {
        self.owed.ack = true;
        self.owed.quick = QUICK_ACKS;
        let (start, end) = (arrival.start, arrival.end());
        if arrival.len == 0 {
            // A FIN alone is not kept: it comes again.
            return;
        }
        let message = self.config.mode == Mode::Message;
        let placement = arrival.placement();
        let reassembly = self.receive.reassembly.get_or_insert_default();
        if reassembly.has(start, end) {
            self.receive.duplicate = Some((start, end));
            // RFC 2883 4: its block stands behind it.
            reassembly.report_first(start);
            return;
        }
        let mut kept = reassembly.has_room(start, end);
        if message {
            let held = Held {
                offset: start - FIRST,
                payload: payload[placement.payload.clone()].into(),
                end_of_message: arrival.push,
            };
            kept = kept
                && !reassembly.touches(start, end)
                && reassembly.hold(start, held, u64::from(self.config.max_reassembly));
        }
        if !kept {
            self.counters.not_kept += 1;
            if reassembly.is_empty() {
                self.receive.reassembly = None;
            }
            return;
        }
        reassembly.insert(start, end);
        if arrival.fin && reassembly.end() == Some(end) {
            self.receive.fin = Some(end);
        }
        if !message {
            if arrival.push {
                self.receive.push = self.receive.push.max(end);
            }
            received.placement = Some(placement);
        }
    }

    /// The eighth check: the FIN counts when everything before it is here.
    fn take_fin(&mut self, now: u64) {
        if self.receive.fin != Some(self.receive.nxt) || !self.state.receives() {
            return;
        }
        self.receive.nxt += 1;
        self.owed.ack = true;
        self.events.peer_closed = Some(self.stream_end() - FIRST);
        self.step(Input::Fin);
        if self.state == State::TimeWait {
            self.enter_time_wait(now);
        }
    }

    pub(super) fn enter_time_wait(&mut self, now: u64) {
        self.timers.stop_all();
        self.timers.set(Timer::End, now + self.config.time_wait);
    }

    /// An acknowledgement, at the latest with every second segment (RFC 9293 3.8.6.3, MUST-40 and SHLD-19).
    /// What is larger than a segment, the link has joined of several.
    fn owe_ack(&mut self, now: u64, len: u64) {
        let segments = if len > u64::from(self.mss()) { 2 } else { 1 };
        self.owed.segments = self.owed.segments.saturating_add(segments);
        let quick = self.owed.quick > 0;
        self.owed.quick = self.owed.quick.saturating_sub(1);
        if quick || self.owed.segments >= 2 || self.config.ack_delay == 0 {
            self.owed.ack = true;
        } else if !self.timers.is_running(Timer::Ack) {
            self.timers.set(Timer::Ack, now + self.config.ack_delay);
        }
    }
}
