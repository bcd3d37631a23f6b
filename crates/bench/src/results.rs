//! What came out, gathered over the rounds, and what follows from it.

use std::collections::BTreeMap;

use serde::Serialize;

use crate::contender::Contender;
use crate::machine::Machine;
use crate::model::{Detail, Footprint, Overhead, Path, Point, Ratio, Role, Sample, Series, Test};
use crate::nearness::same_state;
use crate::plan::Plan;
use crate::qpip::{Goodput, IdleCost, Rows, StageCost};
use crate::stats;
use crate::targets::Verdict;

/// Everything that a run found out; the JSON file is this.
#[derive(Clone, Debug, Serialize)]
pub struct Results {
    /// The format of the file.
    pub schema: u32,
    /// Where.
    pub machine: Machine,
    /// What was asked for.
    pub plan: Plan,
    /// Rounds that were completed.
    pub rounds: u32,
    /// How long it took, in seconds.
    pub seconds: f64,
    /// Which targets were reached.
    pub targets: Vec<Verdict>,
    /// What a message costs the program.
    pub overhead: Vec<Overhead>,
    /// What idle connections cost.
    pub memory: Vec<Footprint>,
    /// Quipu against everybody else.
    pub ratios: Vec<Ratio>,
    /// All numbers.
    pub series: Vec<Series>,
    /// QPIP beside the kernel's sockets on packet links.
    pub qpip: Rows,
    /// How long QPIP's adapter is busy with a segment, stage by stage.
    pub occupancy: Vec<StageCost>,
    /// QPIP and the kernel over a lossy, long path.
    pub goodput: Vec<Goodput>,
    /// What idle connections of QPIP cost.
    pub idle: Option<IdleCost>,
    /// What did not work.
    pub notes: Vec<String>,
}

/// Samples as they come.
#[derive(Default)]
pub(crate) struct Collector {
    series: Vec<Series>,
}

impl Collector {
    /// Takes what a contender did in a round, and how near the processors were to each other, where that is
    /// known; sizes that are missing failed.
    pub(crate) fn add(
        &mut self,
        contender: &dyn Contender,
        test: Test,
        sizes: &[u64],
        samples: &[Sample],
        (round, line_ns): (u32, Option<f64>),
    ) {
        let name = contender.name();
        let found = self.series.iter().position(|s| s.contender == name && s.test == test);
        let index = found.unwrap_or_else(|| {
            self.series.push(Series {
                contender: name.to_owned(),
                role: contender.role(),
                path: contender.path(),
                test,
                points: BTreeMap::new(),
            });
            self.series.len() - 1
        });
        for &size in sizes {
            let point = self.series[index].points.entry(size).or_default();
            let sample = samples.iter().find(|sample| sample.size == size);
            point.rounds_ns.resize(round as usize, None);
            point.rounds_ns.push(sample.map(|sample| sample.ns));
            point.lines_ns.resize(round as usize, None);
            point.lines_ns.push(line_ns);
            for (name, value) in sample.iter().flat_map(|sample| &sample.also) {
                detail(&mut point.also, name).rounds.push(*value);
            }
        }
    }

    /// The series with medians.
    pub(crate) fn finish(mut self) -> Vec<Series> {
        for series in &mut self.series {
            series.points.retain(|_, point| point.rounds_ns.iter().any(Option::is_some));
            series.points.iter_mut().for_each(|(&size, point)| summarize(size, point));
        }
        self.series.retain(|series| !series.points.is_empty());
        self.series
    }
}

/// The detail of that name, which is added if there is none.
fn detail<'a>(also: &'a mut Vec<Detail>, name: &str) -> &'a mut Detail {
    let index = also.iter().position(|detail| detail.name == name).unwrap_or_else(|| {
        also.push(Detail { name: name.to_owned(), rounds: Vec::new(), median: f64::NAN });
        also.len() - 1
    });
    &mut also[index]
}

fn summarize(size: u64, point: &mut Point) {
    let samples: Vec<_> = point.rounds_ns.iter().flatten().copied().collect();
    point.median_ns = stats::median(&samples);
    point.quartiles_ns = stats::quartiles(&samples);
    point.messages_per_s = 1e9 / point.median_ns;
    point.bytes_per_s = point.messages_per_s * size as f64;
    point.also.iter_mut().for_each(|detail| detail.median = stats::median(&detail.rounds));
}

/// The point of a contender in a test.
pub(crate) fn point<'a>(
    series: &'a [Series],
    contender: &str,
    test: Test,
    size: u64,
) -> Option<&'a Point> {
    let series = series.iter().find(|s| s.contender == contender && s.test == test)?;
    series.points.get(&size)
}

/// Rounds without which a ratio would be one of chance.
const ENOUGH: usize = 3;

/// How many times faster one is than the other: the median of the ratios within the rounds, since the machine
/// drifts between them, and their quartiles. `None` if they never ran in one round. The tests may differ.
///
/// Where it is known for [`ENOUGH`] of them that the processors were equally near to each other for both,
/// only such rounds count.
pub(crate) fn speed(
    series: &[Series],
    (contender, test): (&str, Test),
    (against, other): (&str, Test),
    size: u64,
) -> Option<(f64, [f64; 2])> {
    let (ours, theirs) =
        (point(series, contender, test, size)?, point(series, against, other, size)?);
    let rounds = ours.rounds_ns.iter().zip(&theirs.rounds_ns);
    let ratios = rounds.map(|(ours, theirs)| Some((*theirs)? / (*ours)?));
    let lines = ours.lines_ns.iter().zip(&theirs.lines_ns);
    let same = lines
        .map(|lines| matches!(lines, (Some(ours), Some(theirs)) if same_state(*ours, *theirs)));
    let all: Vec<_> = ratios.zip(same).filter_map(|(ratio, same)| Some((ratio?, same))).collect();
    let known = all.iter().filter(|(_, same)| *same).count();
    let counts = all.into_iter().filter(|(_, same)| *same || known < ENOUGH);
    let ratios: Vec<_> = counts.map(|(ratio, _)| ratio).collect();
    stats::median_and_quartiles(&ratios)
}

/// Quipu against everybody who did the same.
pub(crate) fn ratios(series: &[Series]) -> Vec<Ratio> {
    let mut all = Vec::new();
    let quipu = series.iter().filter(|s| s.role == Role::Quipu);
    for ours in quipu {
        let same =
            |s: &&Series| s.role != Role::Quipu && s.path == ours.path && s.test == ours.test;
        for theirs in series.iter().filter(same) {
            for &size in ours.points.keys() {
                let (one, other) = ((&*ours.contender, ours.test), (&*theirs.contender, ours.test));
                if let Some((speed, spread)) = speed(series, one, other, size) {
                    all.push(Ratio {
                        contender: ours.contender.clone(),
                        against: theirs.contender.clone(),
                        path: ours.path,
                        test: ours.test,
                        size,
                        speed,
                        spread,
                    });
                }
            }
        }
    }
    all
}

/// The paths that were measured in a test.
pub(crate) fn paths(series: &[Series], test: Test) -> Vec<Path> {
    let measured = |path: &Path| series.iter().any(|s| s.path == *path && s.test == test);
    [Path::SameHost, Path::Tcp, Path::Udp].into_iter().filter(measured).collect()
}

/// The tests that were measured, latencies first.
pub(crate) fn tests(series: &[Series]) -> Vec<Test> {
    let mut tests: Vec<_> = series.iter().map(|s| s.test).collect();
    tests.sort();
    tests.dedup();
    tests
}

#[cfg(test)]
pub(crate) mod tests_support {
    use super::*;
    use crate::model::{Kind, Op};

    /// Series of two contenders with the given samples at 8 bytes.
    pub(crate) fn series(ours: &[f64], theirs: &[f64]) -> Vec<Series> {
        let test = Test { kind: Kind::Latency, op: Op::Send };
        let make = |name: &str, role, samples: &[f64]| {
            let rounds_ns = samples.iter().map(|&ns| Some(ns)).collect();
            let lines_ns = vec![None; samples.len()];
            let mut point = Point { rounds_ns, lines_ns, ..Point::default() };
            summarize(8, &mut point);
            let points = BTreeMap::from([(8, point)]);
            Series { contender: name.into(), role, path: Path::SameHost, test, points }
        };
        vec![make("Quipu", Role::Quipu, ours), make("Open MPI shm", Role::Peer, theirs)]
    }

    #[test]
    fn ratios_are_those_within_rounds() {
        let found = ratios(&series(&[100.0, 200.0, 300.0], &[300.0, 200.0, 900.0]));
        assert_eq!(found.len(), 1);
        assert_eq!((found[0].size, found[0].speed), (8, 3.0), "that of the medians is 1.5");
        assert_eq!(found[0].spread, [2.0, 3.0]);
        assert_eq!(ratios(&series(&[f64::NAN], &[1.0])).len(), 0);
    }

    #[test]
    fn samples_of_different_states_are_not_compared() {
        let mut series =
            series(&[100.0, 100.0, 100.0, 100.0, 100.0], &[300.0, 300.0, 300.0, 100.0, 100.0]);
        let (near, far) = (Some(120.0), Some(450.0));
        let mut lines = |at: usize, lines: [Option<f64>; 5]| {
            series[at].points.get_mut(&8).unwrap().lines_ns = lines.into();
            ratios(&series)[0].speed
        };
        assert_eq!(lines(0, [near, near, near, near, far]), 3.0, "the other's are not known");
        assert_eq!(lines(1, [Some(110.0), far, near, near, far]), 2.0);
        assert_eq!(lines(1, [far, far, Some(110.0), Some(140.0), far]), 1.0);
        assert_eq!(lines(1, [far, far, far, near, far]), 3.0, "all, where too few suit");
    }
}
