//! What became of a target's inputs. A target that no input gets far into finds nothing and looks healthy: so
//! each counts the inputs that came to the places that matter, and is at fault if too few did.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// Inputs after which the counts are looked at.
const EVERY: u64 = 10_000;
/// One input of so many, at least, must have come to each place.
const LEAST: u64 = 200;

/// The places, and how many inputs came there.
pub struct Shares<const N: usize> {
    places: [&'static str; N],
    inputs: AtomicU64,
    /// The places that the current input came to, a bit for each.
    current: AtomicU64,
    counts: [AtomicU64; N],
}

impl<const N: usize> Shares<N> {
    pub const fn new(places: [&'static str; N]) -> Self {
        let counts = [const { AtomicU64::new(0) }; N];
        Self { places, inputs: AtomicU64::new(0), current: AtomicU64::new(0), counts }
    }

    /// Another input.
    ///
    /// # Panics
    /// If too few of those before came to a place. Inputs of cargo-fuzz are not counted: it chooses them by
    /// what is new, and keeps few of those that get far.
    pub fn begin(&self) {
        self.current.store(0, Relaxed);
        let inputs = self.inputs.fetch_add(1, Relaxed);
        if cfg!(fuzzing) || inputs == 0 || !inputs.is_multiple_of(EVERY) {
            return;
        }
        let counts = self.counts.iter().map(|count| count.load(Relaxed));
        let few: Vec<_> =
            self.places.iter().zip(counts).filter(|(_, count)| count * LEAST < inputs).collect();
        assert!(few.is_empty(), "too few of {inputs} inputs have come there: {few:?}");
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
