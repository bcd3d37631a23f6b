//! Measures while the two processors are as near to each other as they mostly are.
//!
//! A virtual machine's processors are at times on cores of one cache and at times not, and change that every
//! few seconds: a cache line then takes several times as long from one to the other, and so does each short
//! message by shared memory. Contenders that were measured in different moments of that kind cannot be
//! compared.

use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use crate::model::{Kind, Op, Test};
use crate::{stats, sys};

/// Round trips of a line that are timed together, and how often.
const ROUND_TRIPS: u32 = 200;
const TIMES: usize = 5;
/// A line that takes so many times what is usual, or so little a part of it, comes another way: from another
/// cache, or from one that both processors have for themselves.
const OTHER: f64 = 1.5;
/// Looks for what is usual, which a quarter of them do not exceed, and the pause between two looks.
const LOOKS: u32 = 64;
const PAUSE: Duration = Duration::from_millis(20);
/// For how long the processors may stay apart before a contender is measured all the same.
const PATIENCE: Duration = Duration::from_secs(1);
/// So often it is measured until they are as near as usual behind it, too.
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
pub(crate) struct Nearness {
    cpus: [usize; 2],
    /// Nanoseconds of a line there and back: what is usual, and all that was seen.
    usual: f64,
    range: [f64; 2],
    runs: u32,
    near: u32,
    /// How long it may still wait, and measure again.
    left: Duration,
}

impl Nearness {
    /// Finds out how near they mostly are, which takes two seconds. All is to take `budget`.
    pub(crate) fn new(cpus: [usize; 2], budget: Duration) -> Self {
        let look = |_| {
            std::thread::sleep(PAUSE);
            there_and_back(cpus)
        };
        let looks: Vec<f64> = (0..LOOKS).map(look).collect();
        let usual = stats::quantile(&looks, 0.25);
        Self { cpus, usual, range: [usual; 2], runs: 0, near: 0, left: budget / SHARE }
    }

    /// Whether it matters to a test of these sizes.
    pub(crate) fn matters(test: Test, sizes: &[u64]) -> bool {
        let compared = test.op == Op::Send && matches!(test.kind, Kind::Latency | Kind::Stream);
        compared && sizes.iter().any(|&size| size <= SHORT)
    }

    /// Measures something while the processors are as near as usual, or a few times in vain; what came of the
    /// last.
    pub(crate) fn measure<T>(&mut self, mut act: impl FnMut() -> T) -> T {
        self.runs += 1;
        let mut tries = 0;
        loop {
            let waits = Instant::now();
            self.wait();
            self.left = self.left.saturating_sub(waits.elapsed());
            let begun = Instant::now();
            let done = act();
            tries += 1;
            let near = self.are_near();
            if near || tries == TRIES || self.left.is_zero() {
                self.near += u32::from(near);
                return done;
            }
            self.left = self.left.saturating_sub(begun.elapsed());
        }
    }

    /// What was measured, for people; `None` if the machine has one such state only.
    pub(crate) fn note(&self) -> Option<String> {
        let [least, most] = self.range;
        (most > OTHER * least).then(|| {
            format!(
                "A cache line took {least:.0} to {most:.0} ns from one processor to the other and back. Short \
                 sends were measured while that was about {:.0}: in {} of {} turns.",
                self.usual, self.near, self.runs,
            )
        })
    }

    fn wait(&mut self) {
        let end = Instant::now() + PATIENCE.min(self.left);
        while !self.are_near() && Instant::now() < end {
            std::thread::sleep(PAUSE);
        }
    }

    fn are_near(&mut self) -> bool {
        let ns = there_and_back(self.cpus);
        let [least, most] = &mut self.range;
        (*least, *most) = (least.min(ns), most.max(ns));
        (self.usual / OTHER..=self.usual * OTHER).contains(&ns)
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
        // Both ends on one processor are always as near as can be.
        let left = PATIENCE * (TRIES + 1);
        let mut near =
            Nearness { cpus: [0, 0], usual: 0.0, range: [0.0; 2], runs: 0, near: 0, left };
        let mut count = 0;
        near.measure(|| count += 1);
        assert_eq!((count, near.runs, near.near), (1, 1, 1));
        assert_eq!(near.note(), None);

        // Here they are nearer than usual, at every look.
        let mut apart = Nearness { usual: 130.0, range: [50.0, 300.0], ..near };
        let began = Instant::now();
        apart.measure(|| count += 1);
        assert_eq!((count, apart.runs, apart.near), (1 + TRIES, 2, 1));
        assert!(began.elapsed() >= PATIENCE * TRIES);
        assert!(apart.note().is_some_and(|note| note.contains("about 130: in 1 of 2 turns")));

        // Of what is left it spends no more than that, and nothing once it is gone.
        count = 0;
        (0..2).for_each(|_| apart.measure(|| count += 1));
        assert!(apart.left.is_zero() && began.elapsed() < PATIENCE * (TRIES + 2));
        assert_eq!(count, 2);
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
