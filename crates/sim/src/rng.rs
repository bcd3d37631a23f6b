//! The one source of chance: PCG-64, whose algorithm and stream are fixed, so that a seed means the
//! same run on every machine and with every later version.

use rand_core::RngCore;
use rand_pcg::Pcg64;

/// A stream of chance. Different purposes of one run draw from different streams, so that a draw
/// more in one does not change the others.
#[derive(Clone, Debug)]
pub struct Rng(Pcg64);

impl Rng {
    /// Stream number `stream` of a seed.
    #[must_use]
    pub fn new(seed: u64, stream: u64) -> Self {
        let mut rng = Self(Pcg64::new(u128::from(seed), u128::from(stream)));
        // Neighbouring seeds begin alike: the first outputs are not used.
        for _ in 0..4 {
            rng.next();
        }
        rng
    }

    /// 64 random bits.
    pub fn next(&mut self) -> u64 {
        self.0.next_u64()
    }

    /// A number below `bound`; 0 if `bound` is 0.
    pub fn below(&mut self, bound: u64) -> u64 {
        ((u128::from(self.next()) * u128::from(bound)) >> 64) as u64
    }

    /// A number from `low` to `high`, both included.
    pub fn range(&mut self, low: u64, high: u64) -> u64 {
        low + self.below(high.saturating_sub(low).saturating_add(1))
    }

    /// An index below `bound`.
    pub fn index(&mut self, bound: usize) -> usize {
        self.below(bound as u64) as usize
    }

    /// True `percent` times in a hundred.
    pub fn percent(&mut self, percent: u64) -> bool {
        self.below(100) < percent
    }

    /// True `parts` times in a million.
    pub fn ppm(&mut self, parts: u32) -> bool {
        parts > 0 && self.below(1_000_000) < u64::from(parts)
    }

    /// One of `choices`, which is not empty.
    pub fn pick<T: Copy>(&mut self, choices: &[T]) -> T {
        choices[self.index(choices.len())]
    }

    /// An index, with a probability in proportion to its weight; the weights are not all 0.
    pub fn weighted(&mut self, weights: &[u32]) -> usize {
        let total: u64 = weights.iter().map(|&weight| u64::from(weight)).sum();
        let mut at = self.below(total);
        for (index, &weight) in weights.iter().enumerate() {
            if at < u64::from(weight) {
                return index;
            }
            at -= u64::from(weight);
        }
        weights.len() - 1
    }
}

/// Mixes two words into one that looks random (the finalizer of SplitMix64).
#[must_use]
pub fn mix(a: u64, b: u64) -> u64 {
    let mut z = a ^ b.wrapping_mul(0x9e37_79b9_7f4a_7c15);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// The bytes that belong to operation `id`, from byte `start` on.
#[must_use]
pub fn pattern(id: u64, start: usize, len: usize) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(len + 16);
    let mut word = start / 8;
    bytes.extend_from_slice(&mix(id, word as u64).to_le_bytes()[start % 8..]);
    while bytes.len() < len {
        word += 1;
        bytes.extend_from_slice(&mix(id, word as u64).to_le_bytes());
    }
    bytes.truncate(len);
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_stream_of_a_seed_never_changes() {
        let mut rng = Rng::new(7, 1);
        let drawn = [rng.next(), rng.below(100), rng.range(5, 9)];
        let mut again = Rng::new(7, 1);
        assert_eq!(drawn, [again.next(), again.below(100), again.range(5, 9)]);
        assert_ne!(Rng::new(7, 2).next(), drawn[0]);
        assert_ne!(Rng::new(8, 1).next(), drawn[0]);
    }

    #[test]
    fn patterns_are_the_same_from_wherever_they_are_begun() {
        let whole = pattern(3, 0, 100);
        for start in 0..20 {
            assert_eq!(pattern(3, start, 50), whole[start..start + 50]);
        }
        assert_eq!(pattern(3, 0, 0), []);
    }
}
