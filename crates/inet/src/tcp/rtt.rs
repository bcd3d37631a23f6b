//! The round-trip time and the retransmission timeout (RFC 6298).

use super::config::Config;

/// RFC 6298 (2): G, the granularity of the caller's timers.
const GRANULARITY: u64 = 1_000_000;
/// The greatest exponent of back-off: the timeout is bounded by its maximum anyway.
const MAX_BACKOFF: u8 = 16;
/// How long a minimum counts (RFC 8985 6.2 step 1 leaves the filter to us).
const MIN_RTT_WINDOW: u64 = 300 * 1_000_000_000;

#[derive(Clone, Debug)]
pub(crate) struct Rtt {
    /// SRTT, zero before the first sample.
    smoothed: u64,
    variance: u64,
    /// Without back-off.
    base_rto: u64,
    backoff: u8,
    min: u64,
    min_at: u64,
}

impl Rtt {
    pub(crate) fn new(config: &Config) -> Self {
        // RFC 6298 (2.1).
        let base_rto = config.initial_rto;
        Self { smoothed: 0, variance: 0, base_rto, backoff: 0, min: u64::MAX, min_at: 0 }
    }

    /// Takes a measurement that is not ambiguous (Karn's rule is the caller's, RFC 6298 3).
    pub(crate) fn sample(&mut self, now: u64, rtt: u64, config: &Config) {
        let rtt = rtt.max(1);
        if rtt <= self.min || now.saturating_sub(self.min_at) > MIN_RTT_WINDOW {
            (self.min, self.min_at) = (rtt, now);
        }
        if self.smoothed == 0 {
            // RFC 6298 (2.2).
            (self.smoothed, self.variance) = (rtt, rtt / 2);
        } else {
            // RFC 6298 (2.3): beta is 1/4, alpha is 1/8, the variance goes first.
            self.variance = self.variance - self.variance / 4 + self.smoothed.abs_diff(rtt) / 4;
            self.smoothed = self.smoothed - self.smoothed / 8 + rtt / 8;
        }
        // The least value is one of the margin, not of the sum: a retransmission that takes a second round
        // trip must not meet a timeout of two.
        let margin = (4 * self.variance).max(GRANULARITY).max(config.min_rto);
        self.base_rto = (self.smoothed + margin).min(config.max_rto);
        // RFC 6298 5: a new measurement takes the back-off back.
        self.backoff = 0;
    }

    /// RFC 6298 (5.5).
    pub(crate) fn back_off(&mut self) {
        self.backoff = (self.backoff + 1).min(MAX_BACKOFF);
    }

    /// A timeout was spurious, or data is acknowledged: the back-off has done its work.
    pub(crate) fn clear_backoff(&mut self) {
        self.backoff = 0;
    }

    pub(crate) fn backoff(&self) -> u8 {
        self.backoff
    }

    pub(crate) fn rto(&self, config: &Config) -> u64 {
        self.base_rto.saturating_mul(1 << self.backoff).min(config.max_rto)
    }

    /// RFC 6298 (5.7): after a SYN that had to be sent again, data begins with three seconds.
    pub(crate) fn syn_was_lost(&mut self) {
        if self.smoothed == 0 {
            self.base_rto = self.base_rto.max(3 * 1_000_000_000);
            self.backoff = 0;
        }
    }

    /// The retransmission timeout without back-off.
    pub(crate) fn base_rto(&self) -> u64 {
        self.base_rto
    }

    /// SRTT; none before the first sample.
    #[inline]
    pub(crate) fn smoothed(&self) -> Option<u64> {
        (self.smoothed != 0).then_some(self.smoothed)
    }

    /// The least round trip of the last minutes; none before the first sample.
    #[inline]
    pub(crate) fn min(&self) -> Option<u64> {
        (self.min != u64::MAX).then_some(self.min)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tcp::config::{MILLISECOND as MS, SECOND};

    #[test]
    fn the_estimator_of_rfc_6298() {
        let config = Config::default();
        let mut rtt = Rtt::new(&config);
        assert_eq!(rtt.rto(&config), SECOND, "2.1");
        rtt.sample(0, 400 * MS, &config);
        assert_eq!(rtt.rto(&config), (400 + 4 * 200) * MS, "2.2");
        rtt.sample(0, 480 * MS, &config);
        // RTTVAR = 3/4 200 + 1/4 80, SRTT = 7/8 400 + 1/8 480 (2.3).
        assert_eq!(rtt.rto(&config), (410 + 4 * 170) * MS);
    }

    #[test]
    fn back_off_doubles_up_to_the_greatest_and_a_sample_ends_it() {
        let config = Config::default();
        let mut rtt = Rtt::new(&config);
        rtt.back_off();
        assert_eq!(rtt.rto(&config), 2 * SECOND);
        for _ in 0..100 {
            rtt.back_off();
        }
        assert_eq!(rtt.rto(&config), config.max_rto);
        rtt.sample(0, MS, &config);
        assert_eq!(rtt.rto(&config), MS + config.min_rto);
    }
}
