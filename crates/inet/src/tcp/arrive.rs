//! A segment's way through the checks of RFC 9293 3.10.7.

use quipu_wire::tcp::{Flags, Repr};

use super::ack::Acknowledgement;
use super::congestion::Congestion;
use super::options::Negotiated;
use super::receive::Arrival;
use super::seq::{FIRST, SeqSpace};
use super::state::Input;
use super::timers::Timer;
use super::{Connection, Failure, Received, State};

/// RFC 7323 5.5: a timestamp older than 24 days says nothing.
const TS_VALID: u64 = 24 * 86_400 * super::SECOND;

impl Connection {
    /// Takes a segment of this connection, whose checksum was verified; `marked` says that the network has
    /// marked it CE (RFC 3168 5). What it has brought must be placed before `payload` goes away.
    pub fn handle_segment(
        &mut self,
        now: u64,
        segment: &Repr,
        payload: &[u8],
        marked: bool,
    ) -> Received {
        self.counters.received += 1;
        match self.state {
            State::Closed => {}
            State::SynSent => self.arrive_syn_sent(now, segment),
            _ => {
                if let Some(arrival) = self.check(now, segment, payload, marked) {
                    self.take(now, segment, arrival);
                    return self.take_payload(now, &arrival, payload);
                }
            }
        }
        self.nothing()
    }

    /// Whether nobody can have what a segment brings before the handshake is complete: until then it may be
    /// anybody's who has come to the port.
    pub(crate) fn waits_for_owner(&self) -> bool {
        self.passive && self.state == State::SynReceived
    }

    /// Takes the acknowledgement of a segment that may complete the handshake (RFC 9293 3.10.7.4, fifth
    /// check), and leaves what it brings. Whether it has: the segment is to be handled then.
    pub(crate) fn complete(&mut self, now: u64, segment: &Repr) -> bool {
        const LEFT: u8 = Flags::FIN.bits() | Flags::PSH.bits() | Flags::URG.bits();
        let flags = Flags::from_bits(segment.flags.bits() & !LEFT);
        let bare = Repr { flags, ..*segment };
        if let Some(arrival) = self.check(now, &bare, &[], false) {
            self.take(now, &bare, arrival);
        }
        let stands = self.state.is_synchronized();
        self.counters.received += u64::from(!stands);
        stands
    }

    /// A segment that brings no payload.
    fn nothing(&self) -> Received {
        Received { placement: None, contiguous: self.stream_end() - FIRST, push: false }
    }

    /// RFC 9293 3.10.7.3.
    fn arrive_syn_sent(&mut self, now: u64, segment: &Repr) {
        let flags = segment.flags;
        let acks = flags.has(Flags::ACK);
        if acks && (self.queue.nxt == 0 || segment.ack != self.queue.space.wire(FIRST)) {
            self.counters.bad_ack += 1;
            self.refuse(segment);
            return;
        }
        if flags.has(Flags::RST) {
            if acks {
                self.finish(Some(Failure::Refused));
            }
            return;
        }
        if !flags.has(Flags::SYN) {
            return;
        }
        self.take_syn(now, segment);
        if acks {
            self.agreed.ecn = self.config.ecn && flags.has(Flags::ECE) && !flags.has(Flags::CWR);
            self.unconfirmed = segment.window == 0;
            self.become_established(now, segment);
            self.owed.ack = true;
        } else {
            // Simultaneous open: the SYN goes out again, with an acknowledgement (figure 8, MUST-10).
            self.step(Input::Syn);
            if !self.queue.sent().is_empty() {
                self.queue.set_fate(0, super::send::Fate::Lost);
            }
        }
    }

    /// Takes the peer's SYN: its number and its options.
    pub(super) fn take_syn(&mut self, now: u64, segment: &Repr) {
        let asks_ecn = segment.flags.has(Flags::ECE | Flags::CWR);
        let mss = self.agreed.peer_mss;
        self.agreed = Negotiated::new(&self.config, &segment.options, mss, asks_ecn);
        let receive = &mut self.receive;
        receive.space = SeqSpace { initial: segment.seq };
        receive.nxt = FIRST;
        receive.push = FIRST;
        receive.window.scale = self.agreed.scales.map_or(0, |(_, ours)| ours);
        if let Some(timestamps) = segment.options.timestamps {
            receive.ts_recent = timestamps.value;
            receive.ts_recent_at = now;
        }
        (self.last_received, self.unreachable) = (now, false);
    }

    /// Our SYN is acknowledged by `segment`.
    fn become_established(&mut self, now: u64, segment: &Repr) {
        let mut resent = false;
        let mut rtt = None;
        self.queue.acknowledge(FIRST, |syn| {
            resent = syn.retransmitted;
            rtt = Some(now.saturating_sub(syn.at));
        });
        self.establish(now);
        if resent {
            self.congestion.syn_was_lost(u64::from(self.mss()));
            self.rtt.syn_was_lost();
        } else if let Some(rtt) = rtt {
            self.rtt.sample(now, rtt, &self.config);
        }
        let position = self.receive.space.position(FIRST, segment.seq).unwrap_or(0);
        self.window.update(position, FIRST, self.window_of(segment));
    }

    /// Both SYNs are exchanged.
    pub(super) fn establish(&mut self, now: u64) {
        self.step(Input::SynAcked);
        self.congestion = Congestion::new(u64::from(self.mss()));
        // How much wider than it is known to be the path may become depends on what the peer takes.
        self.set_path_mss(now, self.path_mss);
        self.timers.stop_all();
        self.progress_at = now;
        (self.last_received, self.unreachable) = (now, false);
        if self.unconfirmed {
            self.timers.set(Timer::End, now + self.config.connect_timeout);
            self.timers.set(Timer::Persist, now + self.config.initial_rto);
        } else {
            self.events.connected = true;
        }
        if let Some(keep) = self.config.keep_alive {
            self.timers.set(Timer::KeepAlive, now + keep.idle);
        }
        if self.queue.closed {
            self.step(Input::Close);
        }
    }

    /// The peer has said something behind its SYN-ACK: its user wants the connection.
    fn confirm(&mut self) {
        self.timers.stop(Timer::Persist);
        // The time for opening; what is sent from now on has the user's patience.
        self.timers.stop(Timer::End);
        self.events.connected = true;
    }

    /// The window that a segment offers; that of a SYN is not scaled (RFC 7323 2.2).
    fn window_of(&self, segment: &Repr) -> u64 {
        let scales = self.agreed.scales.filter(|_| !segment.flags.has(Flags::SYN));
        u64::from(segment.window) << scales.map_or(0, |(theirs, _)| theirs)
    }

    /// The first five checks of RFC 9293 3.10.7.4; what passes has an acceptable number and acknowledgement.
    fn check(&mut self, now: u64, segment: &Repr, payload: &[u8], marked: bool) -> Option<Arrival> {
        let mut position = self.receive.space.position(self.receive.nxt, segment.seq);
        let mut syn = segment.flags.has(Flags::SYN);
        if syn && self.state == State::SynReceived && position == Some(0) {
            if !segment.flags.has(Flags::ACK) {
                self.repeat_syn();
                return None;
            }
            // The peer's SYN again, with the acknowledgement of ours: it goes on as if it had none (figure
            // 8).
            (position, syn) = (Some(FIRST), false);
        }
        let octets = payload.len() as u64 + u64::from(segment.flags.has(Flags::FIN));
        if !self.passes_timestamps(now, segment, position.map(|start| (start, start + octets))) {
            return None;
        }
        let arrival = Arrival {
            start: position.unwrap_or(0),
            origin: position.unwrap_or(0),
            len: payload.len() as u64,
            fin: segment.flags.has(Flags::FIN),
            push: segment.flags.has(Flags::PSH),
            marked,
        };
        let numbers = arrival.len + u64::from(arrival.fin) + u64::from(syn);
        if position.is_none() || !self.is_acceptable(arrival.start, numbers) {
            self.reject(now, segment, position, numbers);
            let bare = position.is_some() && numbers == 0;
            return (bare && self.is_behind_a_probe(segment, arrival.start)).then_some(arrival);
        }
        if segment.flags.has(Flags::RST) {
            self.arrive_reset(now, arrival.start);
            return None;
        }
        if syn {
            // RFC 5961 4.2: whoever really has begun anew will answer the challenge with a reset.
            self.challenge(now);
            return None;
        }
        if !segment.flags.has(Flags::ACK) {
            self.counters.bad_ack += 1;
            return None;
        }
        (self.last_received, self.unreachable) = (now, false);
        self.keep_alives = 0;
        self.check_ack(now, segment).then_some(arrival)
    }

    /// The SYN of a peer that has not seen our answer.
    fn repeat_syn(&mut self) {
        if !self.queue.sent().is_empty() {
            self.queue.set_fate(0, super::send::Fate::Lost);
        }
    }

    /// PAWS (RFC 7323 5.3), before anything else. A segment that its own retransmission has overtaken is old.
    /// Its octets, `range`, are reported as a duplicate: otherwise the peer would take it for lost.
    fn passes_timestamps(&mut self, now: u64, segment: &Repr, range: Option<(u64, u64)>) -> bool {
        if !self.agreed.timestamps || segment.flags.has(Flags::RST) {
            return true;
        }
        let Some(timestamps) = segment.options.timestamps else {
            // RFC 7323 3.2: all segments have them, or it is not the peer's.
            self.counters.paws += 1;
            return false;
        };
        let old = (timestamps.value.wrapping_sub(self.receive.ts_recent) as i32) < 0;
        if old && now.saturating_sub(self.receive.ts_recent_at) < TS_VALID {
            self.counters.paws += 1;
            let payload = range.filter(|(start, end)| start < end);
            let payload = payload.filter(|_| !segment.flags.has(Flags::SYN));
            let reported = payload.is_some_and(|range| self.report_known(range));
            let free = reported && self.state != State::SynReceived;
            self.owed.ack |= free || self.limiter.allows(now);
            return false;
        }
        true
    }

    /// The four cases of RFC 9293 3.4. Data at the edge of a closed window is let through for its
    /// acknowledgement (3.10.7.4); the octets themselves are cut off later.
    fn is_acceptable(&self, start: u64, numbers: u64) -> bool {
        let nxt = self.receive.nxt;
        let edge = self.receive.window.edge(nxt);
        if numbers == 0 {
            // At the edge itself too: that is where the next number of a peer stands that has used its
            // window.
            return nxt <= start && start <= edge;
        }
        start < edge.max(nxt + 1) && start + numbers > nxt
    }

    /// Whether a segment without octets, below the window, acknowledges something all the same. The peer may
    /// have probed a window that was open again here: it knows of no window where its next number is, and
    /// acknowledges from before until it hears of ours. If we had done so as well, and neither heard the
    /// other, both would go on for ever. A probe is a segment at most: no stranger has to guess less well.
    fn is_behind_a_probe(&self, segment: &Repr, start: u64) -> bool {
        let flags = segment.flags;
        let bare = flags.has(Flags::ACK) && !flags.has(Flags::RST) && !flags.has(Flags::URG);
        let near = start < self.receive.nxt
            && self.receive.nxt - start <= u64::from(self.config.receive_mss);
        let ack = self.queue.space.position(self.queue.una, segment.ack);
        let news = ack.is_some_and(|ack| self.queue.una < ack && ack <= self.queue.nxt);
        bare && near && news && self.state != State::SynReceived
    }

    /// A segment outside of the window: the peer learns where we are (RFC 9293 3.10.7.4, first check).
    fn reject(&mut self, now: u64, segment: &Repr, position: Option<u64>, numbers: u64) {
        self.counters.out_of_window += 1;
        if segment.flags.has(Flags::RST) {
            return;
        }
        // No octet of a SYN in the middle of a connection is the peer's: there is nothing to report of it.
        let payload = numbers > 0 && !segment.flags.has(Flags::SYN);
        let ends = position.map(|start| start + numbers) == Some(self.receive.nxt);
        if self.state == State::TimeWait && segment.flags.has(Flags::FIN) && ends {
            // RFC 9293 3.10.7.4: the FIN again restarts the timer; another number is not its.
            self.timers.set(Timer::End, now + self.config.time_wait);
        }
        if let Some(start) = position.filter(|_| payload) {
            self.report_known((start, start + numbers));
        }
        // Without payload it may be the answer to an answer: those are limited, so that no loop goes on for
        // ever. So is all that goes to an address that nobody has shown to be his.
        let free = payload && self.state != State::SynReceived;
        self.owed.ack |= free || self.limiter.allows(now);
    }

    /// Reports a range as received twice (RFC 2883), if all of it was received; returns whether it was. A
    /// block of anything else would claim that it was received (RFC 2018 3).
    fn report_known(&mut self, (start, end): (u64, u64)) -> bool {
        let known = start >= FIRST && end <= self.receive.nxt;
        if known {
            self.receive.duplicate = Some((start, end));
        }
        known
    }

    /// RFC 5961 3.2: only the very next number resets.
    fn arrive_reset(&mut self, now: u64, start: u64) {
        if start != self.receive.nxt {
            self.challenge(now);
            return;
        }
        match self.state {
            // A listener's connection simply goes (RFC 9293 3.10.7.4, second check).
            State::SynReceived if self.passive => self.finish(None),
            State::SynReceived => self.finish(Some(Failure::Refused)),
            _ if self.unconfirmed => self.finish(Some(Failure::Declined)),
            // Both have closed, so nothing is lost, unless data is without an acknowledgement.
            State::Closing | State::LastAck | State::TimeWait
                if self.queue.una >= self.queue.written =>
            {
                self.finish(None);
            }
            _ => self.finish(Some(Failure::Reset)),
        }
    }

    fn challenge(&mut self, now: u64) {
        if self.limiter.allows(now) {
            self.counters.challenges += 1;
            self.owed.ack = true;
        }
    }

    /// RFC 9293 3.10.7.4, fifth check, with RFC 5961 5.2.
    fn check_ack(&mut self, now: u64, segment: &Repr) -> bool {
        let una = self.queue.una;
        let ack = self.queue.space.position(una, segment.ack);
        if self.state == State::SynReceived {
            if ack != Some(FIRST) || self.queue.nxt == 0 {
                self.counters.bad_ack += 1;
                self.refuse(segment);
                return false;
            }
            self.become_established(now, segment);
            return true;
        }
        let oldest = una.saturating_sub(self.window.max);
        if ack.is_none_or(|ack| ack > self.queue.nxt || ack < oldest) {
            self.counters.bad_ack += 1;
            self.challenge(now);
            return false;
        }
        true
    }

    /// A segment that has passed: its acknowledgement, timestamp, urgent pointer.
    fn take(&mut self, now: u64, segment: &Repr, arrival: Arrival) {
        if let Some(timestamps) = segment.options.timestamps.filter(|_| self.agreed.timestamps) {
            // RFC 7323 4.3 (2): of the segment at the left edge of what is acknowledged next.
            let newer = timestamps.value.wrapping_sub(self.receive.ts_recent) as i32 >= 0;
            let aged = now.saturating_sub(self.receive.ts_recent_at) >= TS_VALID;
            let below = arrival.start < self.receive.nxt && arrival.len == 0 && !arrival.fin;
            if !below && arrival.start <= self.receive.acked && (newer || aged) {
                self.receive.ts_recent = timestamps.value;
                self.receive.ts_recent_at = now;
            }
        }
        if std::mem::take(&mut self.unconfirmed) {
            self.confirm();
        }
        let una = self.queue.una;
        let acknowledgement = Acknowledgement {
            now,
            position: arrival.start,
            ack: self.queue.space.position(una, segment.ack).unwrap_or(una),
            window: self.window_of(segment),
            bare: arrival.len == 0 && !arrival.fin,
            sack: segment.options.sack,
            echo: segment.options.timestamps.map(|timestamps| timestamps.echo),
            congested: segment.flags.has(Flags::ECE),
        };
        self.handle_ack(&acknowledgement);
        if segment.flags.has(Flags::URG) {
            self.arrive_urgent(arrival.start, segment.urgent);
        }
        if segment.flags.has(Flags::CWR) {
            self.receive.echo_mark = false;
        }
    }

    /// RFC 6093 4 and 6: the pointer is to the octet behind the urgent data, which stay in line. The user
    /// learns of it.
    fn arrive_urgent(&mut self, start: u64, pointer: u16) {
        let end = start + u64::from(pointer);
        if self.state.receives() && end > self.receive.urgent.max(self.receive.nxt) {
            self.receive.urgent = end;
            self.events.urgent = Some(end - FIRST);
        }
    }
}
