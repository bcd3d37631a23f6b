//! The plan: what is measured, how often and for how long. A TOML file; `bench/plan.toml` is the
//! default and built in.

use std::path::Path;

use anyhow::{Context, Result, ensure};
use serde::{Deserialize, Serialize};

use crate::model::{Kind, Op, Test};
use crate::qpip::{PlannedGoodput, PlannedQpip};

/// The plan used when none is named.
const DEFAULT: &str = include_str!("../../../bench/plan.toml");

/// The largest message a plan may ask for: both ends keep a few buffers of that size.
const MAX_SIZE: u64 = 64 << 20;

/// The most connections that a plan may make at once: each needs descriptors in one process.
const MAX_CONNECTIONS: u64 = 10_000;

/// The most queue pairs that a plan may have idle at once.
const MAX_IDLE: u64 = 100_000;

/// The most queue pairs that a plan may have busy at once.
const MAX_CROWD: u64 = 10_000;

/// A whole plan: the thorough one and the quick one.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    full: Plan,
    quick: Plan,
}

/// What is measured, how often and for how long.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Plan {
    /// How often every contender runs every test.
    pub rounds: u32,
    /// How long it runs for each size, in milliseconds. An aim: the next round corrects.
    pub slice_ms: f64,
    /// No new round begins after that many seconds.
    pub budget_s: u64,
    /// Messages in flight in a stream.
    pub depth: u32,
    /// One send in so many is signalled in a stream.
    pub signal_every: u32,
    /// Queue pairs that are connected within one process to see that it works.
    pub queue_pairs: u64,
    /// Queue pairs connected to measure what an idle one costs.
    pub idle_queue_pairs: u64,
    /// The tests.
    pub test: Vec<PlannedTest>,
    /// Queue pairs between two processes that all have work at the same time.
    pub crowd_queue_pairs: u64,
    /// The few of these points measured with perftest, through `quipu run`.
    #[serde(default)]
    pub perftest: Vec<PlannedTest>,
    /// The few of these points measured with UCX and Open MPI over Quipu.
    #[serde(default)]
    pub middleware: Vec<PlannedTest>,
    /// QPIP on packet links; none: it is not measured.
    pub qpip: Option<PlannedQpip>,
    /// QPIP and the kernel over a lossy, long path; none: it is not measured.
    pub goodput: Option<PlannedGoodput>,
}

/// A test with its sizes: bytes of a message, or connections at once.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PlannedTest {
    /// How.
    pub kind: Kind,
    /// Of what.
    pub op: Op,
    /// Bytes of a message, or connections.
    pub sizes: Vec<u64>,
}

impl PlannedTest {
    /// The test without its sizes.
    #[must_use]
    pub fn test(&self) -> Test {
        Test { kind: self.kind, op: self.op }
    }
}

/// Those of the sizes that the list has for the test.
pub(crate) fn listed(list: &[PlannedTest], test: Test, sizes: &[u64]) -> Vec<u64> {
    let planned = list.iter().find(|planned| planned.test() == test);
    let wanted = planned.map_or(&[][..], |planned| &planned.sizes);
    sizes.iter().filter(|size| wanted.contains(size)).copied().collect()
}

impl Plan {
    /// The plan in `file`, or the one built in; the thorough or the quick part of it.
    ///
    /// # Errors
    ///
    /// The file cannot be read, or says something that makes no sense.
    pub fn load(file: Option<&Path>, quick: bool) -> Result<Self> {
        let text = match file {
            None => DEFAULT.to_owned(),
            Some(file) => std::fs::read_to_string(file)
                .with_context(|| format!("cannot read the plan {}", file.display()))?,
        };
        let name = file.map_or("built in".into(), |file| file.display().to_string());
        Self::parse(&text, quick).with_context(|| format!("the plan ({name}) is not usable"))
    }

    fn parse(text: &str, quick: bool) -> Result<Self> {
        let file: File = toml::from_str(text)?;
        let plan = if quick { file.quick } else { file.full };
        ensure!((1..=1000).contains(&plan.rounds), "rounds must be from 1 to 1000");
        ensure!((0.1..=10_000.0).contains(&plan.slice_ms), "slice_ms must be from 0.1 to 10000");
        ensure!((1..=128).contains(&plan.depth), "depth must be from 1 to 128");
        ensure!(
            (1..=plan.depth).contains(&plan.signal_every),
            "signal_every must be from 1 to depth"
        );
        ensure!(!plan.test.is_empty(), "there is no [[test]]");
        for (name, count) in
            [("queue_pairs", plan.queue_pairs), ("idle_queue_pairs", plan.idle_queue_pairs)]
        {
            ensure!((1..=MAX_IDLE).contains(&count), "{name} must be from 1 to {MAX_IDLE}");
        }
        let crowd = 1..=MAX_CROWD;
        ensure!(
            crowd.contains(&plan.crowd_queue_pairs),
            "crowd_queue_pairs must be from 1 to {MAX_CROWD}"
        );
        for test in plan.test.iter().chain(&plan.perftest).chain(&plan.middleware) {
            ensure!(!test.sizes.is_empty(), "{} {} has no sizes", test.kind, test.op);
            let legal = test.sizes.iter().all(|size| (1..=MAX_SIZE).contains(size));
            ensure!(legal, "{} {}: sizes must be from 1 to {MAX_SIZE}", test.kind, test.op);
            let atomic = matches!(test.op, Op::FetchAdd | Op::CompareSwap);
            ensure!(!atomic || test.sizes == [8], "{} {}: the size is 8", test.kind, test.op);
            let connects = test.kind == Kind::Connect;
            let most = test.sizes.iter().max().is_some_and(|most| *most > MAX_CONNECTIONS);
            ensure!(
                connects == (test.op == Op::Connection) && !(connects && most),
                "connections, at most {MAX_CONNECTIONS}, are measured by the kind \"connect\", \
                 and nothing else is"
            );
        }
        if let Some(fault) = plan.qpip.as_ref().and_then(PlannedQpip::fault) {
            anyhow::bail!("qpip: {fault}");
        }
        if let Some(fault) = plan.goodput.as_ref().and_then(PlannedGoodput::fault) {
            anyhow::bail!("goodput: {fault}");
        }
        Ok(plan)
    }

    /// The largest message.
    #[must_use]
    pub fn max_size(&self) -> u64 {
        let messages = self.test.iter().filter(|test| test.kind != Kind::Connect);
        messages.flat_map(|test| test.sizes.iter().copied()).max().unwrap_or(8).max(4096)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_plans_here_are_usable() {
        for quick in [false, true] {
            let plan = Plan::load(None, quick).unwrap();
            assert!(plan.max_size() >= 1 << 20);
            for table in [
                include_str!("../../../bench/goodput.toml"),
                include_str!("../../../bench/goodput-clean.toml"),
            ] {
                assert!(Plan::parse(table, quick).unwrap().goodput.is_some());
            }
        }
    }

    #[test]
    fn what_makes_no_sense_is_named() {
        let text = DEFAULT.replace("rounds = ", "rounds = 0 #");
        let error = Plan::parse(&text, true).unwrap_err();
        assert!(error.to_string().contains("rounds"), "{error}");
        let text = DEFAULT.replace("op = \"connection\"", "op = \"send\"");
        let error = Plan::parse(&text, true).unwrap_err();
        assert!(error.to_string().contains("connections"), "{error}");
        for name in ["\nqueue_pairs", "\nidle_queue_pairs"] {
            let text = DEFAULT.replace(&format!("{name} = 1000"), &format!("{name} = 0 #"));
            let error = Plan::parse(&text, true).unwrap_err();
            assert!(error.to_string().starts_with(name.trim()), "{error}");
        }
        let text = DEFAULT.replace("crowd_queue_pairs = 1000", "crowd_queue_pairs = 0");
        let error = Plan::parse(&text, true).unwrap_err();
        assert!(error.to_string().contains("crowd_queue_pairs"), "{error}");
    }

    #[test]
    fn a_list_picks_of_the_sizes_of_its_test() {
        let plan = Plan::load(None, false).unwrap();
        let test = |kind, op| Test { kind, op };
        let picked = listed(&plan.middleware, test(Kind::Latency, Op::Send), &[8, 9, 1 << 20]);
        assert_eq!(picked, [8, 1 << 20]);
        assert!(listed(&plan.middleware, test(Kind::Connect, Op::Connection), &[8]).is_empty());
    }
}
