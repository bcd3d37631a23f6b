//! Measures contenders that are compared while the two processors are equally near to each other.
//!
//! A virtual machine's processors are at times on cores of one cache and at times not, and change that every
//! few seconds, or for good: a cache line then takes several times as long from one to the other, and so does
//! each short message by shared memory. Contenders that were measured in different states of that kind cannot
//! be compared.

use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use anyhow::Result;

use crate::model::{Kind, Op, Test};
use crate::{stats, sys};

/// Round trips of a line that are timed together, and how often.
const ROUND_TRIPS: u32 = 200;
const TIMES: usize = 5;
/// A line that takes so many times what is usual, or so little a part of it, comes another way: from another
/// cache, or from one that both processors have for themselves.
const OTHER: f64 = 1.5;
/// Two looks that agree tell the state; so many are taken at most, with a pause in between.
const LOOKS: u32 = 16;
const PAUSE: Duration = Duration::from_millis(20);
/// For how long another state than that of a race may last before a contender is measured all the same.
const PATIENCE: Duration = Duration::from_secs(1);
/// So often it is measured until the state is the same behind it, too.
const TRIES: u32 = 3;
/// The part of all the time there is that may be spent so: a short benchmark is to have its rounds.
const SHARE: u32 = 4;
/// Octets of a message that is little more than a line.
const SHORT: u64 = 64;

/// A line of its own, also for processors that fetch two at once.
#[derive(Default)]
#[repr(align(128))]
struct Line(AtomicU32);

/// How near the two processors are, and what was measured while they were.
///
/// All contenders of a test in a round are a race.
pub(crate) struct Nearness {
    cpus: [usize; 2],
    /// Nanoseconds of a line there and back: when the race began, and the extremes of all that was seen.
    at_start: f64,
    range: [f64; 2],
    runs: u32,
    kept: u32,
    /// How long it may still wait, and measure again.
    left: Duration,
}

/// Whether two times of a line, in nanoseconds there and back, are of the same state.
pub(crate) fn same_state(one: f64, other: f64) -> bool {
    one <= other * OTHER && other <= one * OTHER
}

/// The one of these in whose state most of them are.
pub(crate) fn commonest(lines: impl Iterator<Item = f64>) -> Option<f64> {
    let lines: Vec<_> = lines.collect();
    let like = |one: &f64| lines.iter().filter(|other| same_state(*one, **other)).count();
    lines.iter().copied().max_by_key(like)
}

/// Whether numbers of a test and a size depend on it, so that it is asked for.
pub(crate) fn asked(test: Test, size: u64) -> bool {
    size <= SHORT && test.op == Op::Send && matches!(test.kind, Kind::Latency | Kind::Stream)
}

impl Nearness {
    /// Nothing was measured yet. All is to take `budget`.
    pub(crate) fn new(cpus: [usize; 2], budget: Duration) -> Self {
        let range = [f64::INFINITY, 0.0];
        Self { cpus, at_start: 0.0, range, runs: 0, kept: 0, left: budget / SHARE }
    }

    /// A race begins: finds out the state, in which its contenders are to be measured.
    pub(crate) fn begin(&mut self) {
        self.at_start = self.look();
        for _ in 1..LOOKS {
            std::thread::sleep(PAUSE);
            let before = self.at_start;
            self.at_start = self.look();
            if same_state(before, self.at_start) {
                break;
            }
        }
    }

    /// Whether it matters to a test of these sizes.
    pub(crate) fn matters(test: Test, sizes: &[u64]) -> bool {
        sizes.iter().any(|&size| asked(test, size))
    }

    /// Measures something in the state in which the race began, or a few times in vain; what came of the
    /// last, and the nanoseconds of a line there and back, if that was one state from beginning to end.
    pub(crate) fn measure<T>(
        &mut self,
        mut act: impl FnMut() -> Result<T>,
    ) -> (Result<T>, Option<f64>) {
        self.runs += 1;
        let mut tries = 0;
        loop {
            let waits = Instant::now();
            let before = self.wait();
            self.left = self.left.saturating_sub(waits.elapsed());
            let begun = Instant::now();
            let done = act();
            let behind = self.look();
            tries += 1;
            let steady = same_state(before, behind);
            let kept = steady && same_state(behind, self.at_start);
            // What fails would fail again, perhaps after long.
            if kept || done.is_err() || tries == TRIES || self.left.is_zero() {
                self.kept += u32::from(kept);
                return (done, steady.then_some((before + behind) / 2.0));
            }
            self.left = self.left.saturating_sub(begun.elapsed());
        }
    }

    /// How `what` was measured, for people; `None` if the machine has one such state only.
    pub(crate) fn note(&self, what: &str) -> Option<String> {
        let [least, most] = self.range;
        (!same_state(least, most)).then(|| {
            format!(
                "A cache line took {least:.0} to {most:.0} ns from one processor to the other and back. {what} \
                 compared where that was the same: in {} of {} turns as when their round began.",
                self.kept, self.runs,
            )
        })
    }

    /// Waits for the state of the race, and says which it is then.
    fn wait(&mut self) -> f64 {
        let end = Instant::now() + PATIENCE.min(self.left);
        loop {
            let now = self.look();
            if same_state(now, self.at_start) || Instant::now() >= end {
                return now;
            }
            std::thread::sleep(PAUSE);
        }
    }

    fn look(&mut self) -> f64 {
        let ns = there_and_back(self.cpus);
        let [least, most] = &mut self.range;
        (*least, *most) = (least.min(ns), most.max(ns));
        ns
    }
}

/// Nanoseconds that a cache line takes from one processor to the other and back; 0 if it is one processor.
fn there_and_back(cpus: [usize; 2]) -> f64 {
    if cpus[0] == cpus[1] {
        return 0.0;
    }
    let (there, back) = (Line::default(), Line::default());
    let rounds = 1..=ROUND_TRIPS * TIMES as u32;
    let awaits = |line: &Line, round| {
        while line.0.load(Ordering::Acquire) != round {
            std::hint::spin_loop();
        }
    };
    std::thread::scope(|scope| {
        scope.spawn(|| {
            // Where it cannot be had the processors are as near as may be.
            let _ = sys::pin(cpus[1]);
            for round in rounds.clone() {
                awaits(&there, round);
                back.0.store(round, Ordering::Release);
            }
        });
        let timed = scope.spawn(|| {
            let _ = sys::pin(cpus[0]);
            let mut times = [0.0; TIMES];
            for (at, time) in (0..).zip(&mut times) {
                let began = Instant::now();
                for round in at * ROUND_TRIPS + 1..=(at + 1) * ROUND_TRIPS {
                    there.0.store(round, Ordering::Release);
                    awaits(&back, round);
                }
                *time = began.elapsed().as_nanos() as f64 / f64::from(ROUND_TRIPS);
            }
            stats::median(&times)
        });
        timed.join().unwrap_or(0.0)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_measured_apart_is_measured_again_but_not_for_ever() {
        // Both ends on one processor are always in the same state.
        let mut near = Nearness::new([0, 0], PATIENCE * (TRIES + 1) * SHARE);
        let mut count = 0;
        near.begin();
        let (_, line) = near.measure(|| {
            count += 1;
            Ok(())
        });
        assert_eq!((count, line, near.runs, near.kept), (1, Some(0.0), 1, 1));
        assert_eq!(near.note("All is"), None);

        // Here it is another than when the race began, at every look, though it stays the same.
        let mut apart = Nearness { at_start: 130.0, range: [0.0, 300.0], ..near };
        let began = Instant::now();
        let (_, line) = apart.measure(|| {
            count += 1;
            Ok(())
        });
        assert_eq!((count, line, apart.runs, apart.kept), (1 + TRIES, Some(0.0), 2, 1));
        assert!(began.elapsed() >= PATIENCE * TRIES);
        assert!(apart.note("All is").is_some_and(|note| note.contains("in 1 of 2 turns")));

        // Of what is left it spends no more than that, and nothing once it is gone.
        count = 0;
        (0..2).for_each(|_| {
            _ = apart.measure(|| {
                count += 1;
                Ok(())
            })
        });
        assert!(apart.left.is_zero() && began.elapsed() < PATIENCE * (TRIES + 2));
        assert_eq!(count, 2);

        // A failure is not repeated.
        apart.left = PAUSE;
        let (failed, _) = apart.measure(|| -> Result<()> {
            count += 1;
            anyhow::bail!("it fails")
        });
        assert!(failed.is_err() && count == 3);
    }

    #[test]
    fn a_line_takes_its_time_between_two_processors() {
        let [first, second, ..] = *sys::processors().unwrap() else { return };
        let ns = there_and_back([first, second]);
        assert!(ns > 1.0 && ns.is_finite(), "{ns}");
    }

    #[test]
    fn it_matters_to_short_sends() {
        let test = |kind, op| Test { kind, op };
        assert!(Nearness::matters(test(Kind::Latency, Op::Send), &[8, 4096]));
        assert!(Nearness::matters(test(Kind::Stream, Op::Send), &[64]));
        assert!(!Nearness::matters(test(Kind::Stream, Op::Send), &[4096]));
        assert!(!Nearness::matters(test(Kind::Latency, Op::Write), &[8]));
    }
}
