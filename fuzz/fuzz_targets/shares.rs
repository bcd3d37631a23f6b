//! What became of a target's inputs. A target that no input gets far into finds nothing and looks healthy: so
//! each counts the inputs that came to the places that matter. The inputs of earlier campaigns (`fuzz/seeds`)
//! must come to each place. They are always the same, so this does not depend on chance.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// Says how many inputs of earlier campaigns come first; without it nothing is looked at.
const CORPUS_INPUTS: &str = "FUZZ_CORPUS_INPUTS";

/// The places, and how many inputs came there.
pub struct Shares<const N: usize> {
    places: [&'static str; N],
    inputs: AtomicU64,
    /// How many of them are of earlier campaigns.
    known: AtomicU64,
    /// The places that the current input came to, a bit for each.
    current: AtomicU64,
    counts: [AtomicU64; N],
}

impl<const N: usize> Shares<N> {
    pub const fn new(places: [&'static str; N]) -> Self {
        let counts = [const { AtomicU64::new(0) }; N];
        Self {
            places,
            inputs: AtomicU64::new(0),
            known: AtomicU64::new(0),
            current: AtomicU64::new(0),
            counts,
        }
    }

    /// Another input.
    ///
    /// # Panics
    /// If none of the inputs of earlier campaigns, which were all before this one, came to a place.
    pub fn begin(&self) {
        self.current.store(0, Relaxed);
        let inputs = self.inputs.fetch_add(1, Relaxed);
        if inputs == 0 {
            let known = std::env::var(CORPUS_INPUTS).ok().and_then(|known| known.parse().ok());
            self.known.store(known.unwrap_or(u64::MAX), Relaxed);
        }
        if inputs != self.known.load(Relaxed) {
            return;
        }
        let counts = self.counts.iter().map(|count| count.load(Relaxed));
        let none: Vec<_> =
            self.places.iter().zip(counts).filter(|(_, count)| *count == 0).collect();
        assert!(
            none.is_empty(),
            "no input of fuzz/seeds comes there: {none:?}; find some by `cargo xtask fuzz --guided --save`"
        );
    }

    /// The current input has come to a place.
    ///
    /// # Panics
    /// If the target has no such place.
    pub fn reach(&self, place: &str) {
        let index = self.places.iter().position(|known| *known == place);
        let index = index.unwrap_or_else(|| panic!("\"{place}\" is not in the target's list"));
        if self.current.fetch_or(1 << index, Relaxed) >> index & 1 == 0 {
            self.counts[index].fetch_add(1, Relaxed);
        }
    }
}
