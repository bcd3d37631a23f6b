//! CUBIC (RFC 9438), in integers, so that every machine computes the same.

use super::Progress;

/// Nanoseconds in the unit of CUBIC's time here.
const MILLISECOND: u64 = 1_000_000;
/// The greatest distance from K that is computed with; beyond it the bounds of the target hold anyway.
const MAX_DISTANCE_MS: i128 = 1 << 22;
/// Parts of an octet; with them the product of an acknowledgement, a segment's size and 9 has 60 bits.
const PARTS: u64 = 1 << 10;

#[derive(Clone, Debug, Default)]
pub(super) struct Cubic {
    /// W_max: the window before the last reduction, lowered by fast convergence.
    max: u64,
    /// cwnd_prior: the window before the last reduction.
    prior: u64,
    /// The stage of congestion avoidance; none before its first acknowledgement.
    epoch: Option<Epoch>,
}

#[derive(Clone, Debug)]
struct Epoch {
    start: u64,
    /// The last acknowledgement, to leave idle time out.
    last: u64,
    /// K.
    k_ms: u32,
    /// The plateau: W_max, or where the epoch began if that is above.
    origin: u64,
    /// W_est: what Reno would have, in parts of an octet: where the window is wide, an acknowledgement adds
    /// less than one.
    reno: u64,
}

impl Cubic {
    /// Notes a congestion event at a window of `window`; returns the new slow start threshold (RFC 9438
    /// 4.6, 4.7).
    pub(super) fn reduce(&mut self, window: u64, mss: u64) -> u64 {
        // Fast convergence: another flow has come, leave it more room.
        self.max = if window < self.max { window * 17 / 20 } else { window };
        self.prior = window;
        self.epoch = None;
        (window * 7 / 10).max(2 * mss)
    }

    pub(super) fn end_epoch(&mut self) {
        self.epoch = None;
    }

    /// Time in which the window was not used does not count (RFC 9438 5.8).
    pub(super) fn pause(&mut self, now: u64) {
        if let Some(epoch) = &mut self.epoch {
            epoch.start += now.saturating_sub(epoch.last);
            epoch.last = now;
        }
    }

    /// The window after an acknowledgement in congestion avoidance (RFC 9438 4.2 to 4.5).
    pub(super) fn grow(&mut self, cwnd: u64, progress: &Progress) -> u64 {
        let Progress { now, acked, mss, smoothed, .. } = *progress;
        let (max, prior) = (self.max, self.prior);
        let epoch = self.epoch.get_or_insert_with(|| Epoch::new(now, cwnd, max, mss));
        epoch.last = now;
        // RFC 9438 4.3: alpha is 3 (1 - beta) / (1 + beta) = 9/17 until the old window is reached, then one.
        let (up, down) = if epoch.reno / PARTS < prior { (9, 17) } else { (1, 1) };
        epoch.reno += (acked * mss * up * PARTS).div_ceil(cwnd * down);
        let reno = epoch.reno.div_ceil(PARTS);
        let elapsed = now.saturating_sub(epoch.start);
        if epoch.cubic(elapsed, mss) < reno {
            return cwnd.max(reno);
        }
        let target = epoch.cubic(elapsed + smoothed, mss).clamp(cwnd, cwnd + cwnd / 2);
        cwnd + (target - cwnd) * acked / cwnd
    }
}

impl Epoch {
    fn new(now: u64, cwnd: u64, max: u64, mss: u64) -> Self {
        // RFC 9438 4.2: K = cbrt((W_max - cwnd_epoch) / C), with C = 0.4 segments per second cubed.
        let below = u128::from(max.saturating_sub(cwnd));
        let cube = below * 1_000_000_000 * 10 / (4 * u128::from(mss));
        let (k_ms, origin) = (cube_root(cube), max.max(cwnd));
        Self { start: now, last: now, k_ms, origin, reno: cwnd * PARTS }
    }

    /// W_cubic(t) = C (t - K)^3 + W_max, in octets.
    fn cubic(&self, elapsed: u64, mss: u64) -> u64 {
        let distance = i128::from(elapsed / MILLISECOND) - i128::from(self.k_ms);
        let distance = distance.clamp(-MAX_DISTANCE_MS, MAX_DISTANCE_MS);
        let octets = distance.pow(3) * 4 * i128::from(mss) / 10 / 1_000_000_000;
        (i128::from(self.origin) + octets).max(0) as u64
    }
}

fn cube_root(n: u128) -> u32 {
    let mut root = 0u32;
    for bit in (0..32).rev() {
        let with = root | 1 << bit;
        if u128::from(with).pow(3) <= n {
            root = with;
        }
    }
    root
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cube_roots() {
        for root in [0u32, 1, 2, 9, 1_000, 4_217, u32::MAX] {
            let cube = u128::from(root).pow(3);
            assert_eq!(cube_root(cube), root);
            assert_eq!(cube_root(cube.saturating_sub(1)), root.saturating_sub(1));
        }
    }

    #[test]
    fn fast_convergence_leaves_room() {
        let mut cubic = Cubic::default();
        assert_eq!(cubic.reduce(100_000, 1_000), 70_000);
        assert_eq!(cubic.max, 100_000);
        cubic.reduce(80_000, 1_000);
        assert_eq!((cubic.max, cubic.prior), (68_000, 80_000), "RFC 9438 4.7");
    }

    #[test]
    fn reno_is_not_overestimated_where_windows_are_wide() {
        let mut cubic = Cubic::default();
        let cwnd = cubic.reduce(20_000_000, 1_000);
        let (now, acked, mss, smoothed) = (0, 1_000, 1_000, 100 * MILLISECOND);
        let (flight, una, nxt) = (cwnd, 1, 1 + cwnd);
        let progress = Progress { now, acked, flight, mss, rtt: None, smoothed, una, nxt };
        // A round trip, in which each of 14,000 acknowledgements adds 0.04 octets.
        for _ in 0..cwnd / acked {
            cubic.grow(cwnd, &progress);
        }
        let grown = cubic.epoch.unwrap().reno / PARTS - cwnd;
        assert!((529..550).contains(&grown), "9/17 of a segment: {grown}");
    }
}
