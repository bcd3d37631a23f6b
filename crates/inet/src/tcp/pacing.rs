//! Pacing: when the next segment may leave (RFC 9438 leaves it open, RFC 9406 and RFC 6928 want it).

/// What may leave at once at least: a millisecond's worth, the granularity of timers. Round trips below it
/// are not paced.
const BURST: u64 = 1_000_000;
/// The same in segments (RFC 9002 7.7 allows an initial window): who is woken late makes up for it, or the
/// window would never be full on a busy machine.
const SEGMENTS: u64 = 10;

#[derive(Clone, Debug, Default)]
pub(crate) struct Pacer {
    /// The next departure.
    next: u64,
    /// Octets per second; zero is unlimited.
    rate: u64,
}

impl Pacer {
    /// Sets the rate from a window and a round-trip time: twice what fills the path in slow start, so as
    /// not to hold its growth up, and a fifth above it otherwise.
    pub(crate) fn set(&mut self, cwnd: u64, rtt: u64, slow_start: bool) {
        let fills = u128::from(cwnd) * 1_000_000_000 / u128::from(rtt.max(1));
        let rate = if slow_start { fills * 2 } else { fills * 6 / 5 };
        self.rate = u64::try_from(rate).unwrap_or(u64::MAX).max(1);
    }

    pub(crate) fn unlimited(&mut self) {
        self.rate = 0;
    }

    /// When the next segment may leave; in the past if it may at once.
    #[inline]
    pub(crate) fn departure(&self) -> u64 {
        if self.rate == 0 { 0 } else { self.next }
    }

    #[inline]
    pub(crate) fn sent(&mut self, now: u64, octets: u64) {
        if self.rate == 0 {
            return;
        }
        let takes = u128::from(octets) * 1_000_000_000 / u128::from(self.rate);
        let takes = u64::try_from(takes).unwrap_or(u64::MAX);
        let burst = takes.saturating_mul(SEGMENTS).max(BURST);
        self.next = self.next.max(now.saturating_sub(burst)).saturating_add(takes);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: u64 = 1_000_000;

    #[test]
    fn ten_segments_at_once_and_then_the_rate() {
        let mut pacer = Pacer::default();
        pacer.sent(0, 1_000_000);
        assert_eq!(pacer.departure(), 0, "unlimited");
        // 100 000 octets in 100 ms: 1200 a millisecond.
        pacer.set(100_000, 100 * MS, false);
        let now = 50 * MS;
        for _ in 0..10 {
            pacer.sent(now, 1_200);
            assert!(pacer.departure() <= now);
        }
        pacer.sent(now, 1_200);
        assert_eq!(pacer.departure(), now + MS);
        // Woken seven milliseconds late, it makes up for all of them.
        pacer.sent(now + 8 * MS, 1_200);
        assert_eq!(pacer.departure(), now + 2 * MS);
        // Of a fast path a millisecond's worth is more.
        pacer.set(1_000_000, 10 * MS, false);
        for _ in 0..100 {
            pacer.sent(500 * MS, 1_200);
        }
        assert_eq!(pacer.departure(), 500 * MS);
    }
}
