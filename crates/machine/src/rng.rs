//! The one source of chance. A seed means the same run everywhere.

use rand_core::RngCore;
use rand_pcg::Pcg64;

/// A stream of chance. Each purpose has a stream of its own, so that one more draw of one purpose changes
/// nothing for the others.
#[derive(Clone, Debug)]
pub(crate) struct Rng(Pcg64);

impl Rng {
    /// Stream number `stream` of a seed.
    pub(crate) fn new(seed: u64, stream: u64) -> Self {
        let mut rng = Pcg64::new(u128::from(seed), u128::from(stream));
        // The first numbers of similar seeds are similar.
        for _ in 0..4 {
            rng.next_u64();
        }
        Self(rng)
    }

    /// A number below `bound`; 0 if `bound` is 0.
    pub(crate) fn below(&mut self, bound: u64) -> u64 {
        ((u128::from(self.0.next_u64()) * u128::from(bound)) >> 64) as u64
    }

    /// True `parts` times in a million.
    pub(crate) fn ppm(&mut self, parts: u32) -> bool {
        parts > 0 && self.below(1_000_000) < u64::from(parts)
    }

    /// A number from 0 to 1.
    pub(crate) fn unit(&mut self) -> f64 {
        (self.0.next_u64() >> 11) as f64 / (1u64 << 53) as f64
    }
}
