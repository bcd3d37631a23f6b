//! What an acknowledgement means to the sending half.

use quipu_wire::tcp::SackBlocks;

use super::congestion::Progress;
use super::recovery::{Cause, Delivery, Frto, Recovery};
use super::send::{Fate, Sent};
use super::seq::FIRST;
use super::state::Input;
use super::timers::Timer;
use super::{Connection, State};

/// RFC 5681 3.2: duplicates that mean a loss, where there is no SACK.
const DUP_THRESH: u8 = 3;

/// An acknowledgement that can be.
pub(super) struct Acknowledgement {
    pub(super) now: u64,
    /// The position of the segment that brought it.
    pub(super) position: u64,
    /// At most SND.NXT; old ones are below SND.UNA.
    pub(super) ack: u64,
    /// The window, scaled.
    pub(super) window: u64,
    /// The segment had neither payload nor FIN.
    pub(super) bare: bool,
    pub(super) sack: SackBlocks,
    pub(super) echo: Option<u32>,
    /// ECE.
    pub(super) congested: bool,
}

/// What it delivers.
#[derive(Default)]
struct News {
    /// Octets, cumulatively acknowledged or reported, that were not before.
    delivered: u64,
    /// Octets that have moved SND.UNA.
    acked: u64,
    /// Octets newly reported out of order.
    sacked: u64,
    /// Something was delivered that was never retransmitted, after it was thought lost.
    original: bool,
    /// When the segment was sent that was sent last, among those sent once.
    latest: Option<u64>,
    /// Something was delivered that was sent again.
    resent: bool,
    /// Segments that were acknowledged while they were on the way again.
    repeats: u8,
    duplicate: bool,
}

impl News {
    fn take(&mut self, sent: &Sent) {
        if sent.fate == Fate::Sacked {
            return;
        }
        self.delivered += u64::from(sent.len);
        self.resent |= sent.retransmitted;
        let again = sent.retransmitted && sent.fate == Fate::Flying;
        self.repeats = self.repeats.saturating_add(again.into());
        if !sent.retransmitted {
            self.latest = Some(self.latest.map_or(sent.at, |at| at.max(sent.at)));
            self.original |= sent.fate == Fate::Lost;
        }
    }

    /// The round trip. None where a retransmission has filled a gap (RFC 6298 3): what is behind it may have
    /// arrived long before, and waited.
    fn round_trip(&self, now: u64) -> Option<u64> {
        self.latest.filter(|_| !self.resent).map(|at| now.saturating_sub(at))
    }
}

impl Connection {
    /// Octets in the network; where there is no SACK, each duplicate says that one segment has left it.
    pub(super) fn pipe(&self) -> u64 {
        let left = if self.agreed.sack { 0 } else { u64::from(self.duplicates) };
        self.queue.flying().saturating_sub(left * u64::from(self.mss()))
    }

    pub(super) fn handle_ack(&mut self, ack: &Acknowledgement) {
        let (una, flight) = (self.queue.una, self.queue.outstanding());
        self.peak.note(una, self.queue.nxt);
        let mut news = self.deliver(ack);
        let closed_before = self.window.usable(una) == 0;
        let changed = ack.ack >= una && self.window.update(ack.position, ack.ack, ack.window);
        if ack.ack >= una {
            // RFC 9293 3.8.6.1 (MUST-37): as long as it answers, the peer lives, however long its window is
            // closed. Not where nobody is there any more, or it could hold on for ever.
            if news.acked > 0 || closed_before && !self.orphaned {
                self.progress_at = ack.now;
            }
            if news.acked > 0 {
                self.unanswered = 0;
            }
            if closed_before && changed && self.window.usable(self.queue.una) > 0 {
                self.on_window_opened(ack.now, news.acked > 0);
            }
        }
        let is_duplicate = ack.ack == una && ack.bare && !changed && flight > 0 && una > 0;
        if news.acked > 0 {
            // One of them was missing, if any was. The peer has the others twice, and says so at once.
            self.repeats = news.repeats.saturating_sub(1);
        } else if is_duplicate && self.repeats > 0 {
            self.repeats -= 1;
        } else if is_duplicate && !self.agreed.sack && self.duplicates < u8::MAX {
            // What was sent before a timeout may arrive behind it, and says nothing of what was sent since.
            news.duplicate = !self.recovery.as_ref().is_some_and(|it| it.awaits_first());
            self.duplicates += u8::from(news.duplicate);
            // Something has arrived, one does not know what (RFC 9937 6.1).
            news.delivered += u64::from(self.mss()).min(self.queue.flying());
        }
        self.measure(ack, &news);
        self.judge_loss_probe(ack, is_duplicate);
        self.judge_timeout(ack, &news);
        let lost = self.find_losses(ack, &news);
        let lost = self.judge_probe(ack.now, lost);
        self.control(ack, &news, lost);
        self.arm_after_ack(ack.now, news.acked > 0, news.delivered > 0);
        self.finish_close(ack.now);
    }

    /// Cumulative and selective acknowledgement.
    fn deliver(&mut self, ack: &Acknowledgement) -> News {
        let mut news = News::default();
        let min_rtt = self.rtt.min().unwrap_or(0);
        let clock = self.clock(ack.now);
        let echoes_older = |sent: &Sent| {
            // RFC 8985 6.2 step 2: the echo is of before the retransmission.
            let age = (ack.now - sent.at.min(ack.now)) / super::MILLISECOND;
            sent.retransmitted
                && ack.echo.is_some_and(|echo| u64::from(clock.wrapping_sub(echo)) > age + 1)
        };
        let rack = &mut self.rack;
        let mut see = |sent: &Sent| {
            if sent.fate != Fate::Sacked {
                rack.deliver(ack.now, sent, min_rtt, echoes_older(sent));
            }
            news.take(sent);
        };
        if ack.ack > self.queue.una {
            let acked = ack.ack - self.queue.una;
            self.queue.acknowledge(ack.ack, &mut see);
            news.acked = acked;
        }
        if self.agreed.sack && !ack.sack.as_slice().is_empty() {
            news.sacked = self.take_sack(ack, &mut news);
        }
        news
    }

    /// RFC 2018 5, RFC 2883 4; blocks that cannot be are skipped.
    fn take_sack(&mut self, ack: &Acknowledgement, news: &mut News) -> u64 {
        let (una, nxt) = (self.queue.una, self.queue.nxt);
        let before = self.queue.sacked();
        let min_rtt = self.rtt.min().unwrap_or(0);
        let mut blocks = [(0, 0); 4];
        for (n, block) in ack.sack.as_slice().iter().enumerate() {
            let position = |number| self.queue.space.position(una, number);
            if let (Some(left), Some(right)) = (position(block.left), position(block.right)) {
                blocks[n] = (left, right);
            }
        }
        // RFC 2883 4: the first block is a duplicate if it lies below the acknowledgement or within the
        // second.
        let (left, right) = blocks[0];
        let within = blocks[1].0 <= left && right <= blocks[1].1 && blocks[1].1 > 0;
        if left < right && right <= nxt && left >= FIRST && (right <= ack.ack || within) {
            news.duplicate = true;
            self.rack.was_hasty(una, nxt);
            self.rack.note_duplicate(ack.now, left, right);
            if self.rack.probe_repeats && self.rack.probe_end == right {
                // RFC 8985 7.4.2: the probe was not needed.
                self.rack.probe_end = 0;
            }
        }
        for block in &mut blocks {
            let (left, right) = *block;
            if left >= right || right > nxt || right <= una {
                *block = (0, 0);
                continue;
            }
            *block = self.queue.whole(left.max(una), right);
            for (left, right) in self.unreported(block.0, block.1) {
                let rack = &mut self.rack;
                self.queue.sack(left, right, |sent| {
                    rack.deliver(ack.now, sent, min_rtt, false);
                    news.take(sent);
                });
            }
        }
        self.remember_reports(&blocks);
        self.queue.sacked() - before
    }

    /// The parts of a block that the last SACK did not have: so that a long run is not walked again and
    /// again.
    fn unreported(&self, left: u64, right: u64) -> [(u64, u64); 2] {
        let known = self.reported.iter().find(|known| left <= known.0 && known.1 <= right);
        match known {
            Some(&(from, to)) if from < to => [(left, from), (to, right)],
            _ => [(left, right), (right, right)],
        }
    }

    fn remember_reports(&mut self, blocks: &[(u64, u64); 4]) {
        let una = self.queue.una;
        for (n, known) in self.reported.iter_mut().enumerate() {
            *known = if blocks[n].0 >= una.max(FIRST) { blocks[n] } else { (0, 0) };
        }
    }

    /// RFC 6298 3, RFC 7323 4.1: a sample of what was sent once; by timestamps also of what was not.
    fn measure(&mut self, ack: &Acknowledgement, news: &News) {
        if let Some(rtt) = news.round_trip(ack.now) {
            self.rtt.sample(ack.now, rtt, &self.config);
        } else if let Some(echo) = ack.echo.filter(|_| news.acked > 0 && self.agreed.timestamps) {
            let ticks = self.clock(ack.now).wrapping_sub(echo);
            // Longer than any timeout: not an echo of ours.
            if u64::from(ticks) * super::MILLISECOND <= 2 * self.config.max_rto {
                let rtt = (u64::from(ticks) * super::MILLISECOND).max(super::MILLISECOND);
                self.rtt.sample(ack.now, rtt, &self.config);
            }
        }
    }

    /// What is behind a closed window the peer has not taken, be it a probe or what was on the way when it
    /// took its window back: it goes again, the first at once if nothing was `taken`. But not what may be on
    /// the way still: a peer that closes and opens its window all the time would have more sent than the
    /// congestion window allows.
    fn on_window_opened(&mut self, now: u64, taken: bool) {
        self.timers.stop(Timer::Persist);
        self.rtt.clear_backoff();
        self.unanswered = 0;
        if self.queue.sent().front().is_some_and(|head| head.fate != Fate::Sacked) {
            // Where some was taken, more may be: a quarter for what comes late, as in RFC 8985 6.2.
            let rtt = self.rtt.smoothed().unwrap_or(0);
            if !taken {
                self.queue.set_fate(0, Fate::Lost);
            }
            let age = if taken { rtt + rtt / 4 } else { rtt };
            if self.queue.lose_until(now.saturating_sub(age)) {
                // RFC 5681 4.1: no acknowledgement spreads what goes now.
                self.congestion.restart_after_idle(u64::from(self.mss()));
                self.rack.take_before();
            }
            self.recover_conventionally();
            // It runs for as long as the probes' pauses have become.
            self.timers.set(Timer::Retransmit, now + self.rtt.rto(&self.config));
        }
    }

    /// RFC 8985 7.4.2.
    fn judge_loss_probe(&mut self, ack: &Acknowledgement, is_duplicate: bool) {
        let end = self.rack.probe_end;
        if end == 0 || ack.ack < end {
            return;
        }
        let repaired = self.rack.probe_repeats && ack.ack > end;
        let resolved = !self.rack.probe_repeats || repaired || is_duplicate;
        if repaired && self.recovery.is_none() {
            // A loss that the probe has repaired is a loss.
            self.owed.cwr = self.agreed.ecn;
            self.reduce_again(self.congestion.cwnd);
        }
        if resolved {
            self.rack.probe_end = 0;
        }
    }

    /// Whether a timeout or a recovery was a mistake: F-RTO with SACK (RFC 5682 3.1), Eifel (RFC 3522 3.2),
    /// or duplicates of all that was sent again (RFC 3708).
    fn judge_timeout(&mut self, ack: &Acknowledgement, news: &News) {
        if self.rack.take_needless() {
            return self.undo();
        }
        let Some(recovery) = &mut self.recovery else { return };
        // The first acknowledgement of what was sent again first: does it answer the original?
        let resent = recovery.resent.filter(|(_, end)| recovery.undecided && ack.ack >= *end);
        recovery.undecided &= resent.is_none();
        let mut spurious = match (resent, ack.echo) {
            (Some((clock, _)), Some(echo)) if self.agreed.timestamps => {
                (echo.wrapping_sub(clock) as i32) < 0
            }
            _ => false,
        };
        match recovery.frto {
            Frto::First if news.acked > 0 && ack.ack < recovery.high => {
                recovery.frto = Frto::Second;
            }
            Frto::Second if news.acked > 0 || news.sacked > 0 => {
                // Step 3b: it acknowledges what was not sent again.
                spurious |= news.original;
                recovery.frto = Frto::Off;
            }
            Frto::First | Frto::Second if news.acked > 0 || news.duplicate => {
                recovery.frto = Frto::Off;
            }
            _ => {}
        }
        if spurious {
            self.undo();
        }
    }

    fn undo(&mut self) {
        let Some(recovery) = self.recovery.take() else { return self.undo_last() };
        self.rack.begin_episode();
        match recovery.before {
            Some(before) => self.congestion.undo(before),
            None => self.congestion.cwnd = self.congestion.ssthresh,
        }
        if recovery.cause == Cause::Loss {
            self.rack.was_hasty(self.queue.una, self.queue.nxt);
        }
        self.queue.unlose();
        self.rtt.clear_backoff();
        self.counters.undone += 1;
    }

    /// The last recovery was a mistake, as is found out after its end.
    fn undo_last(&mut self) {
        if let Some(before) = self.rack.take_before() {
            self.congestion.undo(before);
            self.counters.undone += 1;
        }
    }

    /// Octets newly found lost.
    fn find_losses(&mut self, ack: &Acknowledgement, news: &News) -> u64 {
        if self.queue.sent().is_empty() {
            self.duplicates = 0;
            return 0;
        }
        if self.agreed.sack {
            let episode = self.recovery.as_ref().map(|recovery| recovery.cause);
            if news.original
                && episode == Some(Cause::Loss)
                && self.rack.reconsider(ack.now, &mut self.queue, &self.rtt)
            {
                self.undo();
            }
            // Where nothing has arrived only time can tell, which has a timer of its own.
            return if news.delivered > 0 { self.detect(ack.now) } else { 0 };
        }
        let recovering = self.recovery.as_ref().is_some_and(|it| it.cause == Cause::Loss);
        if news.acked > 0 {
            let segments = news.acked.div_ceil(u64::from(self.mss()));
            self.duplicates = self.duplicates.saturating_sub(segments.min(255) as u8);
            if !recovering {
                self.duplicates = 0;
            }
        }
        // RFC 5681 3.2: the third duplicate; RFC 6582 3.2: a partial acknowledgement names the next loss.
        let partial = recovering
            && news.acked > 0
            && self.recovery.as_ref().is_some_and(|it| ack.ack < it.high);
        // After a timeout, duplicates of what was sent again for nothing must not begin another recovery (RFC
        // 6582 4): they are not counted. What is counted says that the segment in front is lost once more.
        let again = self.repairs() && !recovering && self.duplicates == DUP_THRESH;
        let third = !self.repairs() && self.duplicates >= DUP_THRESH;
        let head = self.queue.sent()[0];
        if (partial || news.duplicate && (third || again)) && head.fate == Fate::Flying {
            if again {
                // In slow start the window is no measure of the path.
                self.reduce_again(self.congestion.cwnd.max(self.congestion.ssthresh));
            }
            self.queue.set_fate(0, Fate::Lost);
            return u64::from(head.len);
        }
        0
    }

    /// A loss besides those of an episode is another sign of congestion (RFC 5681 4.3).
    fn reduce_again(&mut self, window: u64) {
        let mss = u64::from(self.mss());
        self.congestion.reduce(window, mss);
        self.rack.take_before();
        self.congestion.cwnd = self.congestion.cwnd.min(self.congestion.ssthresh);
    }

    /// Whether something was lost; a reduction for ECN repairs nothing.
    pub(super) fn repairs(&self) -> bool {
        self.recovery.as_ref().is_some_and(|recovery| recovery.cause != Cause::Ecn)
    }

    /// Something is lost within an episode. If that was for ECN it becomes one that repairs: the window is
    /// reduced once for both.
    fn repair_too(&mut self) {
        let Some(recovery) = self.recovery.as_mut().filter(|it| it.cause == Cause::Ecn) else {
            return;
        };
        (recovery.cause, recovery.high) = (Cause::Loss, self.queue.nxt);
        self.rack.probe_end = 0;
        self.counters.recoveries += 1;
    }

    /// A round of RACK.
    fn detect(&mut self, now: u64) -> u64 {
        let recovering = self.repairs();
        let mss = u64::from(self.mss());
        let found = self.rack.detect(now, &mut self.queue, &self.rtt, recovering, mss);
        match found.again_at {
            Some(at) => self.timers.set(Timer::Reorder, at),
            None => self.timers.stop(Timer::Reorder),
        }
        found.lost
    }

    /// The reordering window is over (RFC 8985 6.3).
    pub(super) fn detect_losses(&mut self, now: u64) {
        let before = self.queue.sacked();
        let lost = self.detect(now);
        if self.judge_probe(now, lost) == 0 {
            return;
        }
        if self.recovery.is_none() {
            self.begin_recovery(Cause::Loss, self.queue.outstanding() - before);
            self.congestion.cwnd = self.pipe() + u64::from(self.mss());
        } else {
            self.repair_too();
        }
    }

    /// Begins an episode: the congestion window is reduced once for each.
    pub(super) fn begin_recovery(&mut self, cause: Cause, flight: u64) {
        let mss = u64::from(self.mss());
        // FlightSize of RFC 5681 (4): a timeout finds it as it was, an acknowledgement may be one of a burst.
        let used = match cause {
            Cause::Timeout => self.queue.outstanding(),
            Cause::Loss | Cause::Ecn => self.peak.octets().max(self.queue.outstanding()),
        };
        let before = self.congestion.reduce(used, mss);
        let before = match self.recovery.take().map(|earlier| earlier.before) {
            None => {
                self.rack.begin_episode();
                before
            }
            // A timeout within a recovery: what was before both is restored, if anything is.
            Some(Some(earlier)) => earlier,
            // But not what the network has had reduced.
            Some(None) => before.at_threshold(),
        };
        let recovery = Recovery::new(cause, self.queue.nxt, flight, before);
        self.recovery = Some(Box::new(recovery));
        // RFC 3168 6.1.2: CWR says that the window was reduced, whatever for.
        self.owed.cwr = self.agreed.ecn;
        self.rack.probe_end = 0;
        if cause == Cause::Loss {
            self.counters.recoveries += 1;
        }
    }

    /// What the congestion window becomes.
    fn control(&mut self, ack: &Acknowledgement, news: &News, lost: u64) {
        let marked = ack.congested && self.agreed.ecn && news.acked > 0;
        if let Some(recovery) = &mut self.recovery {
            recovery.repaired |= news.resent;
            recovery.note_mark(marked);
        }
        // CWR stands behind what was on the way when the episode began: a mark on the acknowledgement of just
        // that is of before the reduction. One of more has seen CWR, and what is marked then was so after.
        let before = self.recovery.as_ref().is_some_and(|it| self.queue.una == it.high);
        let ended = self.end_recovery();
        let marked = marked && !(ended && before);
        if self.recovery.is_none() && (lost > 0 || marked) {
            self.counters.marks += u32::from(marked);
            let cause = if lost > 0 { Cause::Loss } else { Cause::Ecn };
            // RFC 9937 6.1: RecoverFS has what is on the way, and what this acknowledgement brought.
            let sacked = self.queue.sacked() - news.sacked;
            self.begin_recovery(cause, self.queue.outstanding() - sacked + news.acked);
            if let Some(recovery) = &mut self.recovery {
                recovery.note_mark(marked);
            }
        } else if lost > 0 {
            self.repair_too();
        }
        let (pipe, mss) = (self.pipe(), u64::from(self.mss()));
        let ssthresh = self.congestion.ssthresh;
        match self.recovery.as_mut() {
            Some(recovery) if recovery.cause != Cause::Timeout => {
                let safe = news.acked > 0 && lost == 0;
                let delivery = Delivery { delivered: news.delivered, pipe, safe };
                if let Some(window) = recovery.window(&delivery, ssthresh, mss) {
                    self.congestion.cwnd = window;
                }
            }
            // What ends a recovery acknowledges what was delivered within it, and has had its effect.
            _ if ended => self.grow(ack, news, news.acked.min(news.delivered)),
            _ if news.acked > 0 => self.grow(ack, news, news.acked),
            _ => {}
        }
        self.pace();
    }

    fn grow(&mut self, ack: &Acknowledgement, news: &News, acked: u64) {
        self.congestion.on_progress(&Progress {
            now: ack.now,
            acked,
            flight: self.peak.unanswered(),
            mss: u64::from(self.mss()),
            rtt: news.round_trip(ack.now),
            smoothed: self.rtt.smoothed().unwrap_or(0),
            una: self.queue.una,
            nxt: self.queue.nxt,
        });
    }

    /// Everything that was on the way when the episode began may be acknowledged: says whether that ends it
    /// now.
    fn end_recovery(&mut self) -> bool {
        let Some(recovery) = &self.recovery else { return false };
        if self.queue.una < recovery.high {
            return false;
        }
        self.duplicates = 0;
        match recovery.cause {
            // Everything has arrived as it was sent first: nothing was lost.
            Cause::Loss if !recovery.repaired => {
                self.undo();
                return true;
            }
            Cause::Timeout => {}
            // RFC 9937 6.1: the window ends at the threshold.
            Cause::Loss | Cause::Ecn => self.congestion.cwnd = self.congestion.ssthresh,
        }
        let before = self.recovery.take().and_then(|recovery| recovery.before);
        self.rack.end_episode(before);
        self.rack.recovered();
        true
    }

    fn pace(&mut self) {
        let Some(rtt) = self.rtt.smoothed().filter(|_| self.config.pacing) else { return };
        // PRR may leave a window of a few octets. A segment goes in a round trip nevertheless (`may_send`),
        // and at such a rate the next would wait for hours.
        let window = self.congestion.cwnd.max(self.mss().into());
        self.pacer.set(window, rtt, self.congestion.in_slow_start());
    }

    /// Our FIN may be acknowledged (RFC 9293 3.10.7.4, fifth check).
    fn finish_close(&mut self, now: u64) {
        if !self.queue.fin_sent() || self.queue.una != self.queue.end() {
            return;
        }
        let before = self.state;
        self.step(Input::FinAcked);
        match (before, self.state) {
            (State::LastAck, _) => self.finish(None),
            (State::Closing, _) => self.enter_time_wait(now),
            _ => {}
        }
    }
}
