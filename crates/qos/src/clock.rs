//! The rate of a port: a clock that says when the next packet may be sent.

/// A rate as a token clock: each packet moves the time at which the next one may be sent. Times are
/// nanoseconds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TokenClock {
    /// Bits per second; 0: no limit.
    rate: u64,
    next_ns: u64,
    /// Parts of a nanosecond that `next_ns` lacks, in units of 1/rate.
    rest: u64,
}

impl TokenClock {
    /// What a sender that was idle may send at once, as time: 1 % of 100 ms.
    pub const IDLE_NS: u64 = 1_000_000;
    /// How long a sender that is busy, and comes late, may catch up for: its processor may be busy, too.
    pub const LATE_NS: u64 = 50_000_000;

    /// A clock of so many bits per second; 0: without a limit.
    #[must_use]
    pub fn new(rate: u64) -> Self {
        Self { rate, next_ns: 0, rest: 0 }
    }

    /// Forgets time that nobody used, but for the last `lag_ns`.
    pub fn limit_lag(&mut self, now_ns: u64, lag_ns: u64) {
        let earliest = now_ns.saturating_sub(lag_ns);
        if self.next_ns < earliest {
            (self.next_ns, self.rest) = (earliest, 0);
        }
    }

    /// Bits per second; 0: no limit.
    #[must_use]
    pub fn rate(&self) -> u64 {
        self.rate
    }

    /// When the next packet may be sent.
    #[must_use]
    pub fn next_ns(&self) -> u64 {
        self.next_ns
    }

    /// Whether a packet may be sent now.
    #[must_use]
    pub fn is_due(&self, now_ns: u64) -> bool {
        self.rate == 0 || self.next_ns <= now_ns
    }

    /// Whether a packet may be sent now, after so many octets more than were taken.
    #[must_use]
    #[inline]
    pub fn is_due_after(&self, octets: u64, now_ns: u64) -> bool {
        let Some(passed_ns) = now_ns.checked_sub(self.next_ns) else { return self.rate == 0 };
        let used = u128::from(octets) * 8_000_000_000 + u128::from(self.rest);
        self.rate == 0 || used < (u128::from(passed_ns) + 1) * u128::from(self.rate)
    }

    /// Octets that pass in so many nanoseconds.
    #[must_use]
    pub fn octets_in(&self, ns: u64) -> u64 {
        if let Some(bits) = self.rate.checked_mul(ns) {
            return bits / 8_000_000_000;
        }
        let octets = u128::from(self.rate) * u128::from(ns) / 8_000_000_000;
        octets.try_into().unwrap_or(u64::MAX)
    }

    /// How long so many octets take, in nanoseconds; 0 without a rate.
    #[must_use]
    pub fn time_of(&self, octets: u64) -> u64 {
        if self.rate == 0 { 0 } else { self.split(octets).0 }
    }

    /// Takes the time of so many octets, sent now.
    pub fn take(&mut self, now_ns: u64, octets: u64) {
        if self.rate == 0 {
            return;
        }
        self.limit_lag(now_ns, Self::LATE_NS);
        let (ns, rest) = self.split(octets);
        self.next_ns = self.next_ns.saturating_add(ns);
        self.rest = rest;
    }

    /// Gives back the time of octets that were not sent.
    pub fn give_back(&mut self, octets: u64) {
        if self.rate == 0 {
            return;
        }
        let (ns, _) = Self { rest: 0, ..*self }.split(octets);
        self.next_ns = self.next_ns.saturating_sub(ns);
    }

    /// The time of so many octets, in nanoseconds, and what is left of a nanosecond.
    fn split(&self, octets: u64) -> (u64, u64) {
        let product = octets.checked_mul(8_000_000_000);
        if let Some(all) = product.and_then(|product| product.checked_add(self.rest)) {
            return (all / self.rate, all % self.rate);
        }
        let all = u128::from(octets) * 8_000_000_000 + u128::from(self.rest);
        let (ns, rest) = (all / u128::from(self.rate), all % u128::from(self.rate));
        (ns.try_into().unwrap_or(u64::MAX), rest as u64)
    }

    /// Writes what changes, as two words.
    pub fn save(&self, mut write: impl FnMut(u64)) {
        write(self.next_ns);
        write(self.rest);
    }

    /// Reads what [`save`](Self::save) has written. A time far after `now_ns` is none that an honest writer
    /// left.
    pub fn load(&mut self, now_ns: u64, mut read: impl FnMut() -> u64) {
        const FAR_NS: u64 = 60_000_000_000;
        let next_ns = read();
        self.next_ns = if next_ns > now_ns.saturating_add(FAR_NS) { now_ns } else { next_ns };
        self.rest = read().min(self.rate.saturating_sub(1));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Octets that go in 100 ms at this rate, in packets of 4122, where the clock is looked at every
    /// `step_ns`.
    fn sent(rate: u64, step_ns: u64) -> u64 {
        let mut clock = TokenClock::new(rate);
        let mut octets = 0;
        let start = 5_000_000_000;
        clock.limit_lag(start, TokenClock::IDLE_NS);
        for now in (start..start + 100_000_000).step_by(step_ns as usize) {
            while clock.is_due(now) {
                clock.take(now, 4122);
                octets += 4122;
            }
        }
        octets
    }

    #[test]
    fn a_rate_is_kept_within_one_percent_over_100_ms() {
        for rate in [100_000_000, 1_000_000_000, 3_333_333_333, 20_000_000_000] {
            for step_ns in [200, 7_000, 400_000] {
                let expected = rate as f64 / 8.0 * 0.1;
                // The first packet is sent at once, and so is what an idle clock may catch up for.
                let sent = sent(rate, step_ns) as f64 - 0.001 * rate as f64 / 8.0;
                let slack = 4122.0 + 0.01 * expected;
                assert!(
                    (sent - expected).abs() <= slack,
                    "{rate}, {step_ns}: {sent} of {expected}"
                );
            }
        }
    }

    #[test]
    fn octets_may_be_taken_later() {
        for rate in [0, 1, 999_999_999, 3_333_333_333, 400_000_000_000] {
            let (mut each, mut once) = (TokenClock::new(rate), TokenClock::new(rate));
            let (mut now, mut octets) = (1 << 40, 0);
            for step in 0..3000u64 {
                now += step * step % 977;
                each.limit_lag(now, 2000);
                once.limit_lag(now, 2000);
                let mut later = 0;
                for _ in 0..9 {
                    assert_eq!(once.is_due_after(later, now), each.is_due(now), "{rate}, {step}");
                    if each.is_due(now) {
                        octets = octets * 7 % 4099 + 1;
                        each.take(now, octets);
                        later += octets;
                    }
                }
                once.take(now, later);
                assert_eq!(each, once);
            }
        }
    }

    #[test]
    fn nothing_is_lost_to_rounding() {
        let mut clock = TokenClock::new(3_000_000_001);
        for _ in 0..3_000_000 {
            clock.take(0, 1);
        }
        // 24 Mbit at this rate.
        assert_eq!(clock.next_ns(), 24_000_000 * 1_000_000_000 / 3_000_000_001);
    }

    #[test]
    fn what_was_not_sent_is_given_back() {
        let mut clock = TokenClock::new(1_000_000_000);
        clock.limit_lag(1000, 0);
        clock.take(1000, 1000);
        assert_eq!(clock.next_ns(), 9000);
        clock.give_back(500);
        assert_eq!(clock.next_ns(), 5000);
        assert!(!clock.is_due(4999) && clock.is_due(5000));
    }

    #[test]
    fn without_a_rate_it_is_always_due() {
        let mut clock = TokenClock::new(0);
        clock.take(0, u64::MAX);
        assert!(clock.is_due(0));
    }
}
