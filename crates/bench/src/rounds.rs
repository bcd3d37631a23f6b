//! The rounds, in which all contenders take turns.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use anyhow::Result;
use indicatif::ProgressBar;

use crate::contender::{Contender, Round};
use crate::model::{Sample, Test};
use crate::nearness::Nearness;
use crate::plan::{Plan, PlannedTest};
use crate::results::Collector;

/// A contender that fails so often in a test takes part in it no longer.
const FAILURES: u32 = 3;

/// A round that was begun within the budget may overdraw it so far; then it is cut short.
const OVERTIME: f64 = 1.2;

/// Contenders and what became of them.
pub(crate) struct Field {
    pub(crate) contenders: Vec<Box<dyn Contender>>,
    /// By contender and test: how often it failed, and why at last.
    pub(crate) failures: BTreeMap<(String, Test), (u32, String)>,
    /// What did not work, for people.
    pub(crate) notes: Vec<String>,
}

/// What holds for all rounds, and what came of them so far.
struct Rounds<'a> {
    plan: &'a Plan,
    settings: Round,
    budget: Duration,
    began: Instant,
    bar: &'a ProgressBar,
    collector: Collector,
    /// Found out only where it matters.
    nearness: Option<Nearness>,
    /// Turns of this round that were left out for want of time, and the first of them.
    left_out: (u32, String),
}

/// Runs the rounds; how many were run in which all took turns.
pub(crate) fn all_rounds(
    plan: &Plan,
    cpus: [usize; 2],
    field: &mut Field,
    bar: &ProgressBar,
    began: Instant,
) -> (Collector, u32) {
    let settings = Round { slice_ns: plan.slice_ms * 1e6, cpus, depth: plan.depth };
    let mut rounds = Rounds {
        plan,
        settings,
        budget: Duration::from_secs(plan.budget_s),
        began,
        bar,
        collector: Collector::default(),
        nearness: None,
        left_out: (0, String::new()),
    };
    let done = rounds.run(field);
    field.notes.extend(rounds.nearness.as_ref().and_then(|it| it.note("Short sends are")));
    (rounds.collector, done)
}

impl Rounds<'_> {
    fn run(&mut self, field: &mut Field) -> u32 {
        let (plan, mut longest) = (self.plan, Duration::ZERO);
        for round in 0..plan.rounds {
            let begun = Instant::now();
            // A round that would end too late does not begin; one is run in any case.
            if round > 0 && self.began.elapsed() + longest > self.budget {
                field.notes.push(format!(
                    "{round} of {} rounds were run: more would have taken longer than {} s.",
                    plan.rounds, plan.budget_s
                ));
                return round;
            }
            for planned in &plan.test {
                self.race(field, planned, round);
                self.bar.inc(1);
            }
            let (left_out, first) = &self.left_out;
            if *left_out > 0 {
                field.notes.push(format!(
                    "Round {} was cut short, as {OVERTIME} x {} s had passed: {left_out} turns were left out, \
                     from \"{first}\" on.",
                    round + 1,
                    plan.budget_s,
                ));
                return round;
            }
            longest = longest.max(begun.elapsed());
        }
        plan.rounds
    }

    /// A test of a round: all contenders, one after the other.
    fn race(&mut self, field: &mut Field, planned: &PlannedTest, round: u32) {
        let test = planned.test();
        if Nearness::matters(test, &planned.sizes) {
            let new = || Nearness::new(self.settings.cpus, self.budget);
            self.nearness.get_or_insert_with(new).begin();
        }
        // The one that comes first in one round comes later in the next.
        let count = field.contenders.len();
        for turn in 0..count {
            let index = (turn + round as usize) % count;
            let contender = field.contenders[index].as_mut();
            let name = contender.name().to_owned();
            let sizes = contender.sizes(test, &planned.sizes);
            let what = format!("{} {}, {name}", test.op, test.kind);
            let key = (name, test);
            let failed = field.failures.get(&key).map_or(0, |(count, _)| *count);
            if sizes.is_empty() || failed >= FAILURES {
                continue;
            }
            if self.began.elapsed() > self.budget.mul_f64(OVERTIME) {
                if self.left_out.0 == 0 {
                    self.left_out.1 = what;
                }
                self.left_out.0 += 1;
                continue;
            }
            self.bar.set_message(format!("round {}: {what}", round + 1));
            let (samples, line_ns) = self.turn(contender, test, &sizes);
            let samples = samples.unwrap_or_else(|error| {
                field.failures.insert(key, (failed + 1, format!("{error:#}")));
                Vec::new()
            });
            self.collector.add(contender, test, &sizes, &samples, (round, line_ns));
        }
    }

    /// A contender's turn, and how near the processors were to each other meanwhile, where that matters.
    fn turn(
        &mut self,
        contender: &mut dyn Contender,
        test: Test,
        sizes: &[u64],
    ) -> (Result<Vec<Sample>>, Option<f64>) {
        let mut run = || contender.run(&self.settings, test, sizes);
        match &mut self.nearness {
            Some(nearness) if Nearness::matters(test, sizes) => nearness.measure(run),
            _ => (run(), None),
        }
    }
}

#[cfg(test)]
mod tests {
    use anyhow::bail;

    use super::*;
    use crate::model::{Kind, Op, Path, Role, Series};

    /// Fails in reads, and takes a microsecond for the rest.
    struct NoReader;

    impl Contender for NoReader {
        fn name(&self) -> &str {
            "no reader"
        }
        fn path(&self) -> Path {
            Path::Tcp
        }
        fn role(&self) -> Role {
            Role::Peer
        }
        fn sizes(&self, _: Test, sizes: &[u64]) -> Vec<u64> {
            sizes.to_vec()
        }
        fn run(&mut self, _: &Round, test: Test, sizes: &[u64]) -> Result<Vec<Sample>> {
            match test.op {
                Op::Read => bail!("it does not come to an end"),
                _ => Ok(sizes.iter().map(|&size| Sample::new(size, 1e3)).collect()),
            }
        }
    }

    fn rounds(rounds: u32, budget_s: u64) -> (Vec<Series>, u32, Field) {
        let mut plan = Plan::load(None, true).unwrap();
        (plan.rounds, plan.budget_s) = (rounds, budget_s);
        plan.test = [Op::Read, Op::Write]
            .map(|op| PlannedTest { kind: Kind::Latency, op, sizes: vec![8] })
            .to_vec();
        let contenders: Vec<Box<dyn Contender>> = vec![Box::new(NoReader)];
        let mut field = Field { contenders, failures: BTreeMap::new(), notes: Vec::new() };
        let bar = ProgressBar::hidden();
        let (collector, done) = all_rounds(&plan, [0, 0], &mut field, &bar, Instant::now());
        (collector.finish(), done, field)
    }

    #[test]
    fn who_fails_in_a_test_takes_part_in_the_others() {
        let (series, done, field) = rounds(5, 3600);
        assert_eq!((done, field.notes), (5, Vec::new()));
        assert_eq!(series.len(), 1);
        assert_eq!((series[0].test.op, series[0].points[&8].counted), (Op::Write, 5));
        let failures: Vec<_> = field.failures.into_iter().collect();
        let ((name, test), (count, why)) = &failures[0];
        assert_eq!((failures.len(), name.as_str(), test.op, *count), (1, "no reader", Op::Read, 3));
        assert_eq!(why, "it does not come to an end");
    }

    #[test]
    fn what_is_left_out_for_want_of_time_is_said() {
        let (series, done, field) = rounds(2, 0);
        assert!(series.is_empty() && done == 0, "{series:?}");
        let note = "Round 1 was cut short, as 1.2 x 0 s had passed: 2 turns were left out, \
                    from \"read latency, no reader\" on.";
        assert_eq!(field.notes, [note]);
    }
}
