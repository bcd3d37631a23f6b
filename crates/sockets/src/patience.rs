//! For how long a receiver looks at rings before it sleeps in the kernel.
//!
//! Looking pays only while answers come sooner than the kernel could wake the receiver, and while
//! another processor is free to produce them. So a receiver that found an answer in time looks
//! again the next time; one that did not, tries again after a number of waits that doubles.

/// Time that is worth looking, in nanoseconds, when answers come in time.
const PATIENT_NS: u64 = 50_000;
/// Time of an attempt, when they have not come lately: the peer may have to be woken first.
const ATTEMPT_NS: u64 = 100_000;
/// Most waits between two attempts.
const MAX_PAUSE: u32 = 256;
/// Time without a look after the processor was taken away during one; it doubles each time that this
/// happens again before a look succeeds.
const CROWDED_NS: u64 = 500_000;
const MAX_CROWDED_NS: u64 = 16_000_000;

/// What one receiver has learned. One for each thing that is waited for.
#[derive(Clone, Copy, Debug, Default)]
pub struct Patience {
    /// Whether the last look found something in time.
    succeeded: bool,
    /// Waits until the next attempt.
    pause: u32,
    /// The pause before that attempt, which doubles when it fails.
    next_pause: u32,
    /// No look before this time.
    crowded_until: u64,
    /// The last pause for that reason.
    crowded_ns: u64,
}

/// How a look ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// Something came in time.
    Found,
    /// Nothing came.
    Nothing,
    /// Another thread had the processor meanwhile: all processors are busy.
    Crowded,
}

impl Patience {
    /// For how long to look this time, in nanoseconds; 0 for not at all. `now` is in nanoseconds too.
    pub fn budget_ns(&mut self, now: u64) -> u64 {
        if now < self.crowded_until {
            return 0;
        }
        if self.succeeded {
            return PATIENT_NS;
        }
        if self.pause > 0 {
            self.pause -= 1;
            return 0;
        }
        ATTEMPT_NS
    }

    /// Learns how a look ended for which [`budget_ns`](Self::budget_ns) gave time.
    pub fn learn(&mut self, outcome: Outcome, now: u64) {
        match outcome {
            Outcome::Found => *self = Self { succeeded: true, ..Self::default() },
            Outcome::Nothing => {
                self.next_pause = (self.next_pause * 2).clamp(1, MAX_PAUSE);
                self.pause = if self.succeeded { 0 } else { self.next_pause };
                self.succeeded = false;
            }
            Outcome::Crowded => {
                self.crowded_ns = (self.crowded_ns * 2).clamp(CROWDED_NS, MAX_CROWDED_NS);
                self.crowded_until = now + self.crowded_ns;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn failures_make_attempts_rare_and_one_success_makes_them_usual() {
        let mut patience = Patience::default();
        let mut looked = 0;
        for _ in 0..1000 {
            if patience.budget_ns(0) > 0 {
                looked += 1;
                patience.learn(Outcome::Nothing, 0);
            }
        }
        assert!((5..=20).contains(&looked), "{looked}");
        while patience.budget_ns(0) == 0 {}
        patience.learn(Outcome::Found, 0);
        assert!((0..100).all(|_| {
            let budget = patience.budget_ns(0);
            patience.learn(Outcome::Found, 0);
            budget == PATIENT_NS
        }));
    }

    #[test]
    fn a_crowded_machine_is_left_alone_for_longer_each_time() {
        let mut patience = Patience::default();
        let (mut now, mut pauses) = (0, Vec::new());
        for _ in 0..10 {
            assert!(patience.budget_ns(now) > 0);
            patience.learn(Outcome::Crowded, now);
            let begin = now;
            while patience.budget_ns(now) == 0 {
                now += 100_000;
            }
            pauses.push(now - begin);
        }
        assert!(pauses.is_sorted() && pauses[0] == CROWDED_NS, "{pauses:?}");
        assert_eq!(pauses[9], MAX_CROWDED_NS);
    }
}
