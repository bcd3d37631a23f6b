//! What time brings.

use super::recovery::{Cause, Frto};
use super::send::Fate;
use super::state::Input;
use super::timers::Timer;
use super::{Config, Connection, Failure, State};

/// RFC 8985 7.2: TLP.max_ack_delay, the longest that a receiver should delay an acknowledgement.
const MAX_ACK_DELAY: u64 = 200_000_000;
/// R1 (RFC 9293 3.8.3, MUST-20): at least three retransmissions.
const SUSPECT_AFTER: u8 = 3;
/// How often the time from probe to probe of a peer that is to decide is doubled at most.
const MAX_DOUBLINGS: u8 = 8;

impl Connection {
    /// Takes note of the time. Afterwards [`Connection::poll_transmit`] is to be called.
    pub fn handle_timeout(&mut self, now: u64) {
        // Each timer is taken once; none is set to a time that is over.
        while let Some(timer) = self.timers.expired(now) {
            match timer {
                Timer::Retransmit => self.on_retransmission_timeout(now),
                Timer::LossProbe => self.on_probe_timeout(now),
                Timer::Reorder => self.detect_losses(now),
                Timer::Persist => self.on_persist_timeout(now),
                Timer::Ack => {
                    self.owed.ack = true;
                    self.owed.quick = 0;
                }
                Timer::KeepAlive => self.on_keep_alive(now),
                Timer::End => self.on_end(now),
            }
        }
    }

    /// RFC 6298 5.4 to 5.6.
    fn on_retransmission_timeout(&mut self, now: u64) {
        if self.queue.sent().is_empty() {
            return;
        }
        self.rtt.back_off();
        if self.rtt.backoff() == SUSPECT_AFTER {
            self.events.suspect = true;
        }
        self.timers.stop(Timer::LossProbe);
        self.timers.stop(Timer::Reorder);
        self.rack.probe_end = 0;
        self.timers.set(Timer::Retransmit, now + self.rtt.rto(&self.config));
        let head = self.queue.sent()[0];
        if self.state == State::SynSent || self.state == State::SynReceived {
            self.queue.set_fate(0, Fate::Lost);
            return;
        }
        if head.start >= self.window.edge {
            // The window is closed, or has shrunk: a probe, not a loss (RFC 9293 3.8.6.1). One whose edge
            // lies within the segment may only have been rounded (RFC 7323 2.4).
            self.queue.set_fate(0, Fate::Lost);
            self.owed.window_probe = true;
            self.recover_conventionally();
            self.timers.set(Timer::Retransmit, now + self.probe_pause());
            // A peer that has said anything since has said what its window is.
            let heard = self.last_received >= head.at;
            self.unanswered = if heard { 0 } else { self.unanswered.saturating_add(1) };
            self.suspect_black_hole(now, self.unanswered);
            return;
        }
        self.counters.timeouts += 1;
        self.unanswered = self.unanswered.saturating_add(1);
        self.suspect_black_hole(now, self.unanswered);
        self.enter_loss(now);
    }

    fn enter_loss(&mut self, _now: u64) {
        let mss = u64::from(self.mss());
        let repeated = self.recovery.as_ref().is_some_and(|old| old.cause == Cause::Timeout);
        if repeated {
            // RFC 5681 3.1: the threshold is computed from the first timeout only.
            if let Some(recovery) = &mut self.recovery {
                recovery.frto = Frto::Off;
                recovery.high = self.queue.nxt;
            }
        } else {
            // RFC 5682 leaves out what happens within a recovery: there an acknowledgement proves less.
            let frto = if self.recovery.is_none() { Frto::First } else { Frto::Off };
            self.begin_recovery(Cause::Timeout, self.queue.outstanding());
            if let Some(recovery) = &mut self.recovery {
                recovery.frto = frto;
            }
        }
        self.congestion.collapse(mss);
        self.queue.lose_all();
        self.reported = Default::default();
        (self.duplicates, self.repeats) = (0, 0);
        self.pacer.unlimited();
    }

    fn on_probe_timeout(&mut self, now: u64) {
        if !self.queue.sent().is_empty() && !self.repairs() {
            self.owed.loss_probe = true;
            self.timers.set(Timer::Retransmit, now + self.rtt.rto(&self.config));
        }
    }

    fn on_persist_timeout(&mut self, now: u64) {
        if self.unconfirmed {
            // The word that it waits for may be lost, or, of a peer that has given out a cookie, the
            // acknowledgement that makes the connection. It is no sign of congestion that nobody answers.
            self.keep_alives = self.keep_alives.saturating_add(1);
            self.owed.keep_alive = true;
            let pause = self.config.initial_rto << self.keep_alives.min(MAX_DOUBLINGS);
            self.timers.set(Timer::Persist, now + pause.min(self.config.max_rto));
            return;
        }
        // RFC 9293 3.8.6.1: from probe to probe the time doubles (SHLD-30).
        self.owed.window_probe = self.queue.has_unsent();
        self.rtt.back_off();
        self.timers.set(Timer::Persist, now + self.probe_pause());
    }

    /// From one probe of a closed window to the next: a peer that answers all of them lives, however short
    /// the user's patience is (RFC 9293 3.8.6.1, MUST-37).
    fn probe_pause(&self) -> u64 {
        self.rtt.rto(&self.config).min(self.patience() / 2).max(super::MILLISECOND)
    }

    /// RFC 9293 3.8.4: only an idle connection is probed (MUST-26).
    fn on_keep_alive(&mut self, now: u64) {
        let Some(keep) = self.config.keep_alive else { return };
        let due = self.last_received + keep.idle;
        let deciding = self.undecided || self.unconfirmed;
        if !self.queue.is_idle() || deciding || (self.keep_alives == 0 && due > now) {
            let at = if due > now { due } else { now + keep.interval.max(1) };
            self.timers.set(Timer::KeepAlive, at);
            return;
        }
        if self.keep_alives >= keep.probes {
            self.give_up();
            return;
        }
        self.keep_alives += 1;
        self.owed.keep_alive = true;
        self.timers.set(Timer::KeepAlive, now + keep.interval.max(1));
    }

    /// 2 MSL, or the user's patience.
    fn on_end(&mut self, now: u64) {
        match self.state {
            State::TimeWait => {
                self.step(Input::Expire);
                self.finish(None);
            }
            State::SynSent | State::SynReceived => self.give_up(),
            _ if self.unconfirmed => self.give_up(),
            _ => {
                let due = self.progress_at + self.patience();
                // What was not sent has not gone unanswered: the time begins when it goes.
                if self.queue.sent().is_empty() {
                    return;
                }
                if due > now {
                    self.timers.set(Timer::End, due);
                } else {
                    self.give_up();
                }
            }
        }
    }

    /// How long the peer may make no progress.
    pub(super) fn patience(&self) -> u64 {
        let Config { user_timeout, orphan_timeout, .. } = *self.config;
        if self.orphaned { orphan_timeout.min(user_timeout) } else { user_timeout }
    }

    fn give_up(&mut self) {
        if self.state != State::SynSent {
            self.send_reset();
        }
        let why = if self.unreachable { Failure::Unreachable } else { Failure::TimedOut };
        self.finish(Some(why));
    }

    /// Whether what was sent has gone unanswered so often that the route may be wrong (RFC 9293 3.8.3, R1).
    pub(crate) fn suspects_route(&self) -> bool {
        self.rtt.backoff() >= SUSPECT_AFTER && !self.queue.sent().is_empty()
    }

    /// RFC 6298 5.1, RFC 8985 7.2: what is on the way needs an answer in time.
    pub(super) fn arm_after_send(&mut self, now: u64) {
        if !self.timers.is_running(Timer::Retransmit) {
            self.timers.set(Timer::Retransmit, now + self.rtt.rto(&self.config));
        }
        if !self.timers.is_running(Timer::End) {
            self.timers.set(Timer::End, now + self.patience());
        }
        self.arm_loss_probe(now);
    }

    /// RFC 6298 5.2 and 5.3: `progress` says that new data was acknowledged, `delivered` that, or that some
    /// was selectively. What comes besides puts no probe off, or a peer that sends much would do so for ever.
    pub(super) fn arm_after_ack(&mut self, now: u64, progress: bool, delivered: bool) {
        if self.queue.sent().is_empty() {
            self.timers.stop(Timer::Retransmit);
            self.timers.stop(Timer::LossProbe);
            self.timers.stop(Timer::Reorder);
            return;
        }
        if progress {
            self.timers.set(Timer::Retransmit, now + self.rtt.rto(&self.config));
        }
        if delivered {
            self.arm_loss_probe(now);
        } else if !self.suits_loss_probe() {
            self.timers.stop(Timer::LossProbe);
        }
    }

    fn suits_loss_probe(&self) -> bool {
        self.agreed.sack
            && !self.repairs()
            && self.queue.sacked() == 0
            && self.rack.probe_end == 0
            && self.queue.nxt <= self.window.edge
            && self.state.is_synchronized()
    }

    /// RFC 8985 7.2.
    fn arm_loss_probe(&mut self, now: u64) {
        let smoothed = self.rtt.smoothed().filter(|_| self.suits_loss_probe());
        let Some(smoothed) = smoothed else {
            self.timers.stop(Timer::LossProbe);
            return;
        };
        let single = self.queue.sent().len() == 1;
        let wait = 2 * smoothed + if single { MAX_ACK_DELAY } else { 0 };
        let rto = self.rtt.rto(&self.config);
        if wait >= rto {
            self.timers.stop(Timer::LossProbe);
        } else {
            self.timers.set(Timer::LossProbe, now + wait);
        }
    }
}
