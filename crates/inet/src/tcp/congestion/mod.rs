//! Congestion control: slow start with HyStart++ (RFC 9406), congestion avoidance by CUBIC (RFC 9438).
//!
//! What is lost, and what goes out during recovery, is decided elsewhere ([`super::rack`],
//! [`super::recovery`]): this module knows the congestion window and how it grows and shrinks.

mod cubic;
mod hystart;

use cubic::Cubic;
use hystart::{HyStart, Sample};

/// RFC 6928: ten segments, of no more than 14600 octets together unless two are larger.
fn initial_window(mss: u64) -> u64 {
    (10 * mss).min((2 * mss).max(14_600))
}

/// What an acknowledgement of new data tells.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Progress {
    pub(crate) now: u64,
    /// Octets acknowledged, cumulatively.
    pub(crate) acked: u64,
    /// Octets that were on the way before, or before the first of those that are read in one go with it.
    pub(crate) flight: u64,
    pub(crate) mss: u64,
    /// An unambiguous measurement, if this acknowledgement gave one.
    pub(crate) rtt: Option<u64>,
    /// SRTT.
    pub(crate) smoothed: u64,
    /// Positions: SND.UNA after it, SND.NXT.
    pub(crate) una: u64,
    pub(crate) nxt: u64,
}

/// How much was on the way at most, in this round trip and in the one before: what of the window is in use.
/// At any one time it may be much less, though the user has more to send: behind a burst of acknowledgements
/// pacing has not let anything follow yet (RFC 7661 looks at a whole round trip likewise).
#[derive(Clone, Debug, Default)]
pub(crate) struct Peak {
    /// Windows have 30 bits (RFC 7323 2.3).
    current: u32,
    last: u32,
    /// The round trip ends when this is acknowledged; the lower half of a position.
    end: u32,
    /// How much it was at most since something could be sent last: a host reads what has come, and sends
    /// then. What is on the way between two acknowledgements that are read at once says nothing.
    unanswered: u32,
}

impl Peak {
    /// An acknowledgement comes, before which `una..nxt` is on the way.
    #[inline]
    pub(crate) fn note(&mut self, una: u64, nxt: u64) {
        let flight = (nxt - una) as u32;
        if (una as u32).wrapping_sub(self.end) as i32 >= 0 {
            (self.current, self.last, self.end) = (flight, self.current, nxt as u32);
        } else {
            self.current = self.current.max(flight);
        }
        self.unanswered = self.unanswered.max(flight);
    }

    /// What has come may be answered.
    #[inline]
    pub(crate) fn answer(&mut self) {
        self.unanswered = 0;
    }

    #[inline]
    pub(crate) fn unanswered(&self) -> u64 {
        u64::from(self.unanswered)
    }

    #[inline]
    pub(crate) fn octets(&self) -> u64 {
        u64::from(self.current.max(self.last))
    }
}

/// What is restored when a reduction proves wrong.
#[derive(Clone, Debug)]
pub(crate) struct Before {
    cwnd: u64,
    ssthresh: u64,
    cubic: Cubic,
}

impl Before {
    /// The reduction that was under way has come to its end.
    pub(crate) fn at_threshold(self) -> Self {
        Self { cwnd: self.cwnd.min(self.ssthresh), ..self }
    }
}

#[derive(Clone, Debug)]
pub(crate) struct Congestion {
    /// The congestion window.
    pub(crate) cwnd: u64,
    pub(crate) ssthresh: u64,
    cubic: Cubic,
    hystart: HyStart,
}

impl Congestion {
    pub(crate) fn new(mss: u64) -> Self {
        Self {
            cwnd: initial_window(mss),
            // RFC 5681 3.1: arbitrarily high.
            ssthresh: u64::MAX,
            cubic: Cubic::default(),
            hystart: HyStart::default(),
        }
    }

    pub(crate) fn in_slow_start(&self) -> bool {
        self.cwnd < self.ssthresh
    }

    /// RFC 5681 3.1: a lost SYN or SYN-ACK makes the initial window one segment (RFC 6928 2).
    pub(crate) fn syn_was_lost(&mut self, mss: u64) {
        self.cwnd = mss;
    }

    /// RFC 5681 4.1: after an idle time of more than a timeout, the window of the past proves nothing.
    pub(crate) fn restart_after_idle(&mut self, mss: u64) {
        self.cwnd = self.cwnd.min(initial_window(mss));
        self.cubic.end_epoch();
    }

    /// Grows the window, outside of recovery.
    pub(crate) fn on_progress(&mut self, progress: &Progress) {
        if self.in_slow_start() {
            self.slow_start(progress);
            return;
        }
        // RFC 9438 5.8: a window that is not used does not grow, nor does its time run.
        if progress.flight + 3 * progress.mss < self.cwnd {
            self.cubic.pause(progress.now);
            return;
        }
        self.cwnd = self.cubic.grow(self.cwnd, progress);
    }

    fn slow_start(&mut self, progress: &Progress) {
        // RFC 7661 would allow more; a window twice of what is used cannot be called validated.
        if 2 * progress.flight < self.cwnd {
            return;
        }
        let sample = Sample { rtt: progress.rtt, una: progress.una, nxt: progress.nxt };
        let verdict = self.hystart.on_ack(&sample);
        if verdict.done {
            self.ssthresh = self.cwnd;
            return;
        }
        // RFC 9406 4.2: L is infinite where segments are paced; RFC 3465 2.1 bounds by what was acknowledged.
        self.cwnd += progress.acked / verdict.divisor;
    }

    /// A reduction for loss or for ECN: says what slow start's threshold becomes, and what was before.
    /// `flight` is what was on the way, see [`Peak`] (RFC 9438 4.6).
    pub(crate) fn reduce(&mut self, flight: u64, mss: u64) -> Before {
        let before = Before { cwnd: self.cwnd, ssthresh: self.ssthresh, cubic: self.cubic.clone() };
        self.ssthresh = self.cubic.reduce(self.cwnd.min(flight.max(mss)), mss);
        self.hystart = HyStart::default();
        before
    }

    /// After a timeout: one segment (RFC 5681 3.1).
    pub(crate) fn collapse(&mut self, mss: u64) {
        self.cwnd = mss;
        self.cubic.end_epoch();
    }

    /// The reduction was wrong (RFC 9438 4.9, RFC 4015 3.2): never below what has been reached since.
    pub(crate) fn undo(&mut self, before: Before) {
        self.cwnd = self.cwnd.max(before.cwnd);
        self.ssthresh = self.ssthresh.max(before.ssthresh);
        self.cubic = before.cubic;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MSS: u64 = 1_000;
    const MS: u64 = 1_000_000;

    fn progress(now: u64, flight: u64) -> Progress {
        Progress {
            now,
            acked: MSS,
            flight,
            mss: MSS,
            rtt: Some(100 * MS),
            smoothed: 100 * MS,
            una: 1,
            nxt: 1 + flight,
        }
    }

    #[test]
    fn the_initial_window_of_rfc_6928() {
        for (mss, window) in [(536, 5_360), (1_460, 14_600), (9_000, 18_000), (65_000, 130_000)] {
            assert_eq!(Congestion::new(mss).cwnd, window);
        }
    }

    #[test]
    fn slow_start_doubles_only_what_is_used() {
        let mut congestion = Congestion::new(MSS);
        congestion.on_progress(&progress(0, 10 * MSS));
        assert_eq!(congestion.cwnd, 11 * MSS);
        congestion.on_progress(&progress(0, MSS));
        assert_eq!(congestion.cwnd, 11 * MSS);
    }

    #[test]
    fn a_reduction_and_its_undoing() {
        let mut congestion = Congestion::new(MSS);
        let before = congestion.reduce(10 * MSS, MSS);
        assert_eq!(congestion.ssthresh, 7 * MSS, "RFC 9438 4.6");
        congestion.collapse(MSS);
        assert_eq!(congestion.cwnd, MSS);
        congestion.undo(before);
        assert_eq!((congestion.cwnd, congestion.ssthresh), (10 * MSS, u64::MAX));
        congestion.reduce(1, MSS);
        assert_eq!(congestion.ssthresh, 2 * MSS, "never below two segments");
    }

    #[test]
    fn avoidance_returns_to_the_old_window_at_k_and_then_probes() {
        let mut congestion = Congestion::new(MSS);
        congestion.cwnd = 100 * MSS;
        congestion.reduce(100 * MSS, MSS);
        congestion.cwnd = congestion.ssthresh;
        // K = cbrt(30 / 0.4) = 4.2 s (RFC 9438 4.2): below before it, a plateau there, above after it.
        let at = |from: u64, to: u64, congestion: &mut Congestion| {
            for ms in (from..to).step_by(1) {
                congestion.on_progress(&progress(ms * MS, congestion.cwnd));
            }
            congestion.cwnd / MSS
        };
        let early = at(0, 2_000, &mut congestion);
        assert!((85..98).contains(&early), "{early}");
        let plateau = at(2_000, 4_200, &mut congestion);
        assert!((99..=101).contains(&plateau), "{plateau}");
        let probing = at(4_200, 8_000, &mut congestion);
        assert!((115..140).contains(&probing), "{probing}");
    }
}
