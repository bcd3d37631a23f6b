//! HyStart++ (RFC 9406): leaves slow start when the round trip grows, before segments are lost.

/// The constants of RFC 9406 4.3, in nanoseconds where they are times.
const MIN_RTT_THRESH: u64 = 4_000_000;
const MAX_RTT_THRESH: u64 = 16_000_000;
const MIN_RTT_DIVISOR: u64 = 8;
const N_RTT_SAMPLE: u32 = 8;
const CSS_GROWTH_DIVISOR: u64 = 4;
const CSS_ROUNDS: u8 = 5;

/// What an acknowledgement tells.
pub(super) struct Sample {
    pub(super) rtt: Option<u64>,
    pub(super) una: u64,
    pub(super) nxt: u64,
}

/// How slow start goes on.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Verdict {
    /// Congestion avoidance begins.
    pub(super) done: bool,
    /// The window grows by this part of what was acknowledged.
    pub(super) divisor: u64,
}

#[derive(Clone, Debug)]
pub(super) struct HyStart {
    /// windowEnd: the round ends when this is acknowledged.
    round_end: u64,
    last_min: u64,
    current_min: u64,
    samples: u32,
    /// cssBaselineMinRtt, and the rounds of conservative slow start so far.
    conservative: Option<(u64, u8)>,
}

impl Default for HyStart {
    fn default() -> Self {
        Self {
            round_end: 0,
            last_min: u64::MAX,
            current_min: u64::MAX,
            samples: 0,
            conservative: None,
        }
    }
}

impl HyStart {
    pub(super) fn on_ack(&mut self, sample: &Sample) -> Verdict {
        if sample.una >= self.round_end {
            self.next_round(sample.nxt);
        }
        if let Some(rtt) = sample.rtt {
            self.current_min = self.current_min.min(rtt);
            self.samples += 1;
        }
        match &mut self.conservative {
            None => self.look_for_delay(),
            Some((baseline, _)) if self.samples >= N_RTT_SAMPLE && self.current_min < *baseline => {
                // The delay was no queue: slow start goes on.
                self.conservative = None;
            }
            Some((_, rounds)) if *rounds >= CSS_ROUNDS => {
                return Verdict { done: true, divisor: 1 };
            }
            Some(_) => {}
        }
        let divisor = if self.conservative.is_some() { CSS_GROWTH_DIVISOR } else { 1 };
        Verdict { done: false, divisor }
    }

    fn next_round(&mut self, nxt: u64) {
        self.round_end = nxt;
        self.last_min = self.current_min;
        self.current_min = u64::MAX;
        self.samples = 0;
        if let Some((_, rounds)) = &mut self.conservative {
            *rounds += 1;
        }
    }

    fn look_for_delay(&mut self) {
        if self.samples < N_RTT_SAMPLE || self.last_min == u64::MAX || self.current_min == u64::MAX
        {
            return;
        }
        let threshold = (self.last_min / MIN_RTT_DIVISOR).clamp(MIN_RTT_THRESH, MAX_RTT_THRESH);
        if self.current_min >= self.last_min + threshold {
            self.conservative = Some((self.current_min, 0));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: u64 = 1_000_000;

    /// A round of ten acknowledgements with a round trip of `rtt`; the last verdict.
    fn round(hystart: &mut HyStart, round: u64, rtt: u64) -> Verdict {
        let mut last = Verdict { done: false, divisor: 0 };
        for n in 0..10 {
            let una = round * 100 + n;
            last = hystart.on_ack(&Sample { rtt: Some(rtt), una, nxt: (round + 1) * 100 });
        }
        last
    }

    #[test]
    fn growing_delay_slows_down_and_five_rounds_later_ends_slow_start() {
        let mut hystart = HyStart::default();
        assert_eq!(round(&mut hystart, 1, 40 * MS).divisor, 1);
        assert_eq!(round(&mut hystart, 2, 44 * MS).divisor, 1, "below the threshold of 5 ms");
        assert_eq!(round(&mut hystart, 3, 50 * MS).divisor, CSS_GROWTH_DIVISOR);
        for n in 4..8 {
            assert_eq!(round(&mut hystart, n, 50 * MS).divisor, CSS_GROWTH_DIVISOR);
        }
        assert!(round(&mut hystart, 8, 50 * MS).done);
    }

    #[test]
    fn a_passing_delay_ends_nothing() {
        let mut hystart = HyStart::default();
        round(&mut hystart, 1, 40 * MS);
        assert_eq!(round(&mut hystart, 2, 60 * MS).divisor, CSS_GROWTH_DIVISOR);
        assert_eq!(round(&mut hystart, 3, 40 * MS), Verdict { done: false, divisor: 1 });
    }
}
