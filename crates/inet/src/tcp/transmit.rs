//! What goes out next.

use quipu_wire::tcp::{Flags, Options, Repr};

use super::recovery::Frto;
use super::send::{MAX_FLIGHT, Sent};
use super::seq::FIRST;
use super::timers::Timer;
use super::{Connection, Owed, Segment, State, options};

/// A segment of new data.
struct Fresh {
    len: u64,
    push: bool,
    fin: bool,
}

impl Connection {
    /// The next segment to be sent. The user reads its payload, adds what is below TCP, and calls again,
    /// until there is none.
    pub fn poll_transmit(&mut self, now: u64) -> Option<Segment> {
        let quiet = self.is_quiet();
        self.paced = false;
        self.peak.answer();
        let segment = match self.reset.take() {
            Some(reset) => {
                self.reset = self.next_reset(&reset);
                Some(Segment { header: *reset, payload: 0..0, ect: false })
            }
            None => match self.state {
                State::Closed => None,
                State::SynSent | State::SynReceived => {
                    self.transmit_syn(now).or_else(|| self.answer_half_open(now))
                }
                _ if self.undecided => None,
                _ => self.transmit_synchronized(now),
            },
        }?;
        debug_assert!(!quiet, "a quiet connection says {:?}", segment.header);
        self.counters.sent += 1;
        Some(segment)
    }

    /// Whether it is known at a glance that [`poll_transmit`](Self::poll_transmit) has nothing, as most often
    /// after a segment: everything was sent once, nothing is lost, and nothing is owed at once.
    pub(crate) fn is_quiet(&self) -> bool {
        let Owed { ack, loss_probe, window_probe, keep_alive, .. } = self.owed;
        let owes = ack || loss_probe || window_probe || keep_alive || self.reset.is_some();
        let idle = !self.queue.has_unsent() && !self.queue.has_lost() && !self.paced;
        // What is looked for or repaired may change by being asked.
        let busy = self.search.is_some() || self.recovery.is_some();
        self.state.is_synchronized() && !owes && idle && !busy
    }

    /// As [`Connection::poll_transmit`], for a link that cuts a segment into several itself (GSO): new
    /// segments of the largest size that follow each other are joined, up to `max` octets. Says of what size
    /// the link is to cut them; the last may be shorter. PSH and FIN belong to the last; in message mode all
    /// are of one message. The books have them as they will be on the wire.
    pub fn poll_transmit_joined(&mut self, now: u64, max: u64) -> Option<(Segment, Option<u16>)> {
        let mut joined = self.poll_transmit(now)?;
        let mss = u64::from(self.mss());
        let mut last = joined.payload.end - joined.payload.start;
        // Only new data is followed by new data.
        let newest = joined.payload.end + FIRST == self.queue.nxt;
        if 2 * mss > max || last != mss || !newest || self.recovery.is_some() {
            return Some((joined, None));
        }
        const ENDS: Flags = Flags::from_bits(Flags::PSH.bits() | Flags::FIN.bits());
        let goes_on = |flags: Flags| flags.bits() & (ENDS | Flags::CWR).bits() == 0;
        while last == mss
            && goes_on(joined.header.flags)
            && joined.payload.end - joined.payload.start + mss <= max
        {
            let Some(fresh) = self.fresh(now, false).filter(|fresh| fresh.len > 0) else { break };
            if !self.may_send(now, fresh.len) {
                break;
            }
            let next = self.send_fresh(now, fresh);
            self.counters.sent += 1;
            last = next.payload.end - next.payload.start;
            joined.payload.end = next.payload.end;
            joined.header.flags |= next.header.flags;
        }
        let several = joined.payload.end - joined.payload.start > mss;
        Some((joined, several.then_some(mss as u16)))
    }

    fn transmit_syn(&mut self, now: u64) -> Option<Segment> {
        if self.queue.nxt == 0 {
            self.queue.push(now, 1, false, false);
        } else {
            let index = self.queue.next_lost()?;
            self.queue.resend(index, now, 1);
            self.counters.retransmitted += 1;
        }
        self.arm_after_send(now);
        Some(self.syn(now))
    }

    /// What SYN-RECEIVED owes to a segment that is not acceptable, or to be challenged (RFC 9293 3.10.7.4). A
    /// peer that waits for the user's decision would take it for the word.
    fn answer_half_open(&mut self, now: u64) -> Option<Segment> {
        let due = self.owed.ack && !self.undecided;
        due.then(|| self.acknowledgement(now, self.queue.nxt))
    }

    fn syn(&mut self, now: u64) -> Segment {
        let first = self.queue.sent().front().is_none_or(|syn| !syn.retransmitted);
        let answer = self.state == State::SynReceived;
        let agreed = answer.then_some(&self.agreed);
        let flags = if answer {
            // RFC 3168 6.1.1: ECE alone in the answer.
            Flags::SYN.with(Flags::ACK, true).with(Flags::ECE, self.agreed.ecn)
        } else {
            // RFC 3168 6.1.1.1: a SYN that was lost may have been lost because of these bits.
            Flags::SYN.with(Flags::ECE | Flags::CWR, self.config.ecn && first)
        };
        let options = options::of_syn(&self.config, agreed, self.timestamps(now));
        let mss = u64::from(self.config.receive_mss);
        let window = self.receive.window.offer(FIRST, mss, true);
        self.receive.acked = self.receive.nxt;
        self.owed.ack = false;
        let header = Repr {
            source: self.source,
            destination: self.destination,
            seq: self.queue.space.wire(0),
            ack: self.receive.space.wire(self.receive.nxt),
            flags,
            window,
            urgent: 0,
            options,
        };
        let header = if answer { header } else { Repr { ack: Default::default(), ..header } };
        Segment { header, payload: 0..0, ect: false }
    }

    fn transmit_synchronized(&mut self, now: u64) -> Option<Segment> {
        // A report of gaps goes in a segment of its own: it must not take the room of a message.
        let report = self.receive.reassembly.is_some() || self.receive.duplicate.is_some();
        if self.owed.ack && report {
            return Some(self.acknowledgement(now, self.bare_position()));
        }
        if let Some(segment) = self.transmit_data(now) {
            return Some(segment);
        }
        if std::mem::take(&mut self.owed.keep_alive) {
            // RFC 9293 3.8.4: a number already acknowledged, without data (SHLD-12).
            return Some(self.acknowledgement(now, self.queue.nxt - 1));
        }
        self.owed.ack.then(|| self.acknowledgement(now, self.bare_position()))
    }

    fn transmit_data(&mut self, now: u64) -> Option<Segment> {
        if let Some(segment) = self.retransmit(now) {
            return Some(segment);
        }
        let probe = std::mem::take(&mut self.owed.loss_probe);
        if probe {
            return self.loss_probe(now);
        }
        if self.search.is_some()
            && let Some(segment) = self.probe_path(now)
        {
            return Some(segment);
        }
        let forced = std::mem::take(&mut self.owed.window_probe);
        let fresh = self.fresh(now, forced)?;
        let due = self.may_send(now, fresh.len) || forced;
        due.then(|| self.send_fresh(now, fresh))
    }

    /// A segment larger than the path is known to take (RFC 4821 7). It may exceed the congestion window by
    /// what it is larger: segments of the usual size would otherwise always take the room before it.
    fn probe_path(&mut self, now: u64) -> Option<Segment> {
        let (whole, pushes) = self.boundary()?;
        let len = self.probe_len(now, whole)?;
        if self.queue.sent().len() >= MAX_FLIGHT || !self.may_send(now, u64::from(self.mss())) {
            return None;
        }
        self.note_probe(self.queue.nxt);
        Some(self.send_fresh(now, Fresh { len, push: pushes && len == whole, fin: false }))
    }

    /// Octets to where the next segment must end at the latest, and whether that is a boundary.
    fn boundary(&self) -> Option<(u64, bool)> {
        let (nxt, written) = (self.queue.nxt, self.queue.written);
        let unsent = written.checked_sub(nxt)?;
        Some(match (self.config.keeps_ends(), self.queue.message_end()) {
            (false, _) => (unsent, true),
            (true, Some(end)) => (end - nxt, true),
            (true, None) => (unsent, false),
        })
    }

    /// Whether congestion control and pacing let `len` octets go.
    fn may_send(&mut self, now: u64, len: u64) -> bool {
        let pipe = self.pipe();
        // Something must always be able to be on the way, even if a segment is larger than the window.
        if pipe > 0 && pipe + len > self.congestion.cwnd {
            return false;
        }
        self.paced = self.pacer.departure() > now;
        !self.paced
    }

    fn retransmit(&mut self, now: u64) -> Option<Segment> {
        if self.waits_with_retransmissions(now) {
            return None;
        }
        let index = self.queue.next_lost()?;
        let lost = self.queue.sent()[index];
        // RFC 9293 3.8.6: beyond a window that has shrunk only the first goes out, as a probe. That is no
        // matter of congestion control: nothing else would ever be said (MUST-36).
        let beyond = lost.start >= self.window.edge;
        let probe = beyond && index == 0 && std::mem::take(&mut self.owed.window_probe);
        if beyond && !probe {
            return None;
        }
        if !probe && !self.may_send(now, u64::from(lost.len).min(u64::from(self.mss()))) {
            return None;
        }
        self.probe_resent(now, lost.start);
        let clock = self.clock(now);
        let mss = self.mss();
        let sent = self.queue.resend(index, now, mss);
        if let Some(recovery) = &mut self.recovery {
            recovery.resent.get_or_insert((clock, sent.end()));
        }
        self.rack.note_resent(&Sent { at: lost.at, ..sent }, self.recovery.is_some());
        self.counters.retransmitted += 1;
        Some(self.segment(now, &sent, false))
    }

    /// F-RTO: after the first acknowledgement new data goes out instead (RFC 5682 3.1, step 2b).
    fn waits_with_retransmissions(&mut self, now: u64) -> bool {
        let second = self.recovery.as_ref().filter(|recovery| recovery.frto == Frto::Second);
        let Some(high) = second.map(|recovery| recovery.high) else { return false };
        if self.queue.nxt > high || self.fresh(now, false).is_some() {
            return true;
        }
        // There is none that may go.
        self.recover_conventionally();
        false
    }

    /// Whether a timeout was spurious is not looked for any more.
    pub(super) fn recover_conventionally(&mut self) {
        if let Some(recovery) = &mut self.recovery {
            recovery.frto = Frto::Off;
        }
    }

    /// RFC 8985 7.3: new data if there is some, otherwise the last segment again.
    fn loss_probe(&mut self, now: u64) -> Option<Segment> {
        self.counters.probes += 1;
        if let Some(fresh) = self.fresh(now, false) {
            self.rack.probe_repeats = false;
            // Known before it goes, or another would be due.
            self.rack.probe_end = self.queue.nxt + fresh.len + u64::from(fresh.fin);
            return Some(self.send_fresh(now, fresh));
        }
        let last = self.queue.sent().len().checked_sub(1)?;
        self.probe_resent(now, self.queue.sent()[last].start);
        let mss = self.mss();
        let sent = self.queue.resend(last, now, mss);
        self.rack.probe_repeats = true;
        self.rack.probe_end = self.queue.nxt;
        self.counters.retransmitted += 1;
        Some(self.segment(now, &sent, false))
    }

    /// What of the new data would make a segment now, as far as the peer's window goes. `forced`: whatever
    /// the window is (RFC 9293 3.8.6.1 and the override of 3.8.6.2.1).
    fn fresh(&mut self, now: u64, forced: bool) -> Option<Fresh> {
        if !self.queue.has_unsent() || self.queue.sent().len() >= MAX_FLIGHT {
            return None;
        }
        let (nxt, unsent) = (self.queue.nxt, self.queue.written.saturating_sub(self.queue.nxt));
        let (whole, pushes) = self.boundary().unwrap_or((0, !self.config.keeps_ends()));
        let mss = u64::from(self.mss());
        // RFC 5682 3.1, step 2b: no more than two new segments decide whether a timeout was spurious.
        if self
            .recovery
            .as_ref()
            .is_some_and(|it| it.frto == Frto::Second && nxt >= it.high + 2 * mss)
        {
            return None;
        }
        let wanted = whole.min(mss);
        let usable = self.window.usable(nxt);
        let bare_fin = wanted == 0 && self.fin_needs_no_window();
        let len = if bare_fin || wanted <= usable && (wanted > 0 || usable > 0) {
            wanted
        } else if forced {
            self.squeezed(wanted, usable)
        } else if usable > 0 && self.fills_half(wanted, usable) {
            usable
        } else {
            self.wait_for_window(now);
            return None;
        };
        let push = pushes && len == whole && len > 0;
        let room = forced || bare_fin || usable > len;
        let fin = self.queue.closed && len == unsent && room;
        if self.delays_small(len, fin) {
            return None;
        }
        Some(Fresh { len, push, fin })
    }

    /// Whether a FIN with no data before it goes out though the window is closed: it is the probe of RFC 9293
    /// 3.8.6.1, sent at once. A queue pair whose peer posts no more receives would otherwise close only after
    /// a timeout, and its program may be gone by then. Who takes no octet takes this one: it needs no room.
    fn fin_needs_no_window(&self) -> bool {
        self.queue.closed && self.queue.sent().is_empty()
    }

    /// A probe of a closed window: an octet, or, since boundaries matter, the whole segment of a message.
    fn squeezed(&self, wanted: u64, usable: u64) -> u64 {
        match (usable, self.config.keeps_ends()) {
            (0, false) => wanted.min(1),
            (0, true) => wanted,
            _ => wanted.min(usable),
        }
    }

    /// RFC 9293 3.8.6.2.1 (3), with Fs = 1/2: less than a segment goes out if it fills half of the largest
    /// window. A message that the window could take as a whole is not split.
    fn fills_half(&self, wanted: u64, usable: u64) -> bool {
        let never_fits = wanted > self.window.max;
        usable >= self.window.max / 2 && (!self.config.keeps_ends() || never_fits)
    }

    /// Nagle (RFC 9293 3.7.4), for streams whose user wants it.
    fn delays_small(&self, len: u64, fin: bool) -> bool {
        self.config.nagle
            && !self.config.keeps_ends()
            && len < u64::from(self.mss())
            && !fin
            && self.queue.outstanding() > 0
    }

    /// Nothing is on the way that would bring an answer: time has to (RFC 9293 3.8.6.1, MUST-36).
    fn wait_for_window(&mut self, now: u64) {
        if self.queue.sent().is_empty() && !self.timers.is_running(Timer::Persist) {
            self.timers.set(Timer::Persist, now + self.rtt.rto(&self.config));
        }
    }

    fn send_fresh(&mut self, now: u64, fresh: Fresh) -> Segment {
        if self.queue.sent().is_empty() {
            // RFC 5681 4.1: what counts is data, and not what the peer's was answered with.
            let idle = now.saturating_sub(self.last_data);
            if idle > self.rtt.rto(&self.config) {
                self.congestion.restart_after_idle(u64::from(self.mss()));
                self.rack.take_before();
            }
            self.progress_at = now;
        }
        let len = fresh.len + u64::from(fresh.fin);
        let sent = Sent {
            start: self.queue.nxt,
            at: now,
            len: len as u32,
            fate: super::send::Fate::Flying,
            retransmitted: false,
            push: fresh.push,
            fin: fresh.fin,
        };
        self.queue.push(now, len, fresh.push, fresh.fin);
        self.timers.stop(Timer::Persist);
        self.segment(now, &sent, true)
    }

    /// The segment of a record, and everything that sending it entails.
    fn segment(&mut self, now: u64, sent: &Sent, new: bool) -> Segment {
        let payload = u64::from(sent.len) - u64::from(sent.fin);
        self.last_data = now;
        // RFC 3168 6.1.6: a probe beyond the window neither is ECN-capable nor has CWR, and 6.1.5: nor is a
        // retransmission.
        let capable = self.agreed.ecn && new && payload > 0 && sent.end() <= self.window.edge;
        let cwr = capable && std::mem::take(&mut self.owed.cwr);
        let flags = Flags::NONE
            .with(Flags::PSH, sent.push)
            .with(Flags::FIN, sent.fin)
            .with(Flags::CWR, cwr);
        let header = self.header(now, sent.start, flags);
        self.pacer.sent(now, u64::from(sent.len));
        if let Some(recovery) = &mut self.recovery {
            recovery.sent(u64::from(sent.len));
        }
        self.arm_after_send(now);
        let start = sent.start.max(FIRST) - FIRST;
        Segment { header, payload: start..start + payload, ect: capable }
    }

    /// The number of a segment without payload. A probe may have gone beyond the window, where the peer takes
    /// nothing, acknowledgements neither: two ends that both probe would answer each other's for ever.
    fn bare_position(&self) -> u64 {
        self.queue.nxt.min(self.window.edge.max(self.queue.una))
    }

    fn acknowledgement(&mut self, now: u64, position: u64) -> Segment {
        let mut header = self.header(now, position, Flags::NONE);
        if self.agreed.sack {
            let room = if self.agreed.timestamps { 3 } else { 4 };
            let duplicate = self.receive.duplicate.take();
            let space = self.receive.space;
            header.options.sack = match &self.receive.reassembly {
                Some(reassembly) => reassembly.blocks(space, duplicate, room),
                None => super::reassembly::Reassembly::default().blocks(space, duplicate, room),
            };
        }
        self.receive.duplicate = None;
        Segment { header, payload: 0..0, ect: false }
    }

    /// A header with the current acknowledgement and window, which settles what was owed.
    fn header(&mut self, now: u64, position: u64, flags: Flags) -> Repr {
        let nxt = self.receive.nxt;
        let mss = u64::from(self.config.receive_mss);
        let window = self.receive.window.offer(nxt, mss, false);
        self.receive.acked = nxt;
        self.owed.ack = false;
        self.owed.segments = 0;
        self.timers.stop(Timer::Ack);
        Repr {
            source: self.source,
            destination: self.destination,
            seq: self.queue.space.wire(position),
            ack: self.receive.space.wire(nxt),
            flags: flags.with(Flags::ACK, true).with(Flags::ECE, self.receive.echo_mark),
            window,
            urgent: 0,
            options: Options {
                timestamps: self.agreed.timestamps.then(|| self.timestamps(now)),
                ..Options::default()
            },
        }
    }
}
