//! What came out, gathered over the rounds, and what follows from it.

use std::collections::BTreeMap;

use serde::Serialize;

use crate::contender::Contender;
use crate::machine::Machine;
use crate::model::{
    Detail, Footprint, Overhead, Path, Point, Ratio, Role, Sample, Series, Speed, Test,
};
use crate::nearness::{asked, commonest, same_state};
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
    /// QPIP compared with the kernel's sockets on packet links.
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
                line_ns: None,
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
        }
        self.series.retain(|series| !series.points.is_empty());
        summarize_all(&mut self.series);
        self.series
    }
}

/// Draws the sums: of all contenders of a test from samples of the same state, or the numbers of a table
/// could not be compared.
fn summarize_all(all: &mut [Series]) {
    let commonest: BTreeMap<_, _> =
        tests(all).into_iter().map(|test| (test, commonest_line(all, test))).collect();
    for series in all {
        series.line_ns = commonest.get(&series.test).copied().flatten();
        for (&size, point) in &mut series.points {
            let state = asked(series.test, size).then_some(series.line_ns);
            summarize(size, point, state);
        }
    }
}

/// The line, in nanoseconds, in whose state most samples of a test were taken.
fn commonest_line(all: &[Series], test: Test) -> Option<f64> {
    let points = all.iter().filter(|s| s.test == test).flat_map(|s| s.points.values());
    commonest(points.flat_map(|point| known(point).map(|(_, line)| line)))
}

/// The samples whose state is known, with it.
fn known(point: &Point) -> impl Iterator<Item = (f64, f64)> {
    let rounds = point.rounds_ns.iter().zip(&point.lines_ns);
    rounds.filter_map(|(ns, line)| Some(((*ns)?, (*line)?)))
}

/// The detail of that name, which is added if there is none.
fn detail<'a>(also: &'a mut Vec<Detail>, name: &str) -> &'a mut Detail {
    let index = also.iter().position(|detail| detail.name == name).unwrap_or_else(|| {
        also.push(Detail { name: name.to_owned(), rounds: Vec::new(), median: f64::NAN });
        also.len() - 1
    });
    &mut also[index]
}

/// Draws the sum of a point: where their state is asked for, of samples of that line, if it is known.
fn summarize(size: u64, point: &mut Point, state: Option<Option<f64>>) {
    let mut samples: Vec<_> = point.rounds_ns.iter().flatten().copied().collect();
    point.mixed = false;
    if let Some(line_ns) = state {
        let like = |(ns, line)| line_ns.is_some_and(|of| same_state(of, line)).then_some(ns);
        let alike: Vec<_> = known(point).filter_map(like).collect();
        point.mixed = alike.len() < ENOUGH;
        if !point.mixed {
            samples = alike;
        }
    }
    point.counted = samples.len();
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

/// Rounds without which a number would be one of chance.
pub(crate) const ENOUGH: usize = 3;

/// How many times faster one is than the other: from ratios within rounds, since the machine drifts between
/// them. `None` if they never ran in one round. The tests may differ.
///
/// Where that matters, and it is known for [`ENOUGH`] of them that the processors were equally near to each
/// other for both, only such rounds count.
pub(crate) fn speed(
    series: &[Series],
    (contender, test): (&str, Test),
    (against, other): (&str, Test),
    size: u64,
) -> Option<Speed> {
    let (ours, theirs) =
        (point(series, contender, test, size)?, point(series, against, other, size)?);
    let rounds = ours.rounds_ns.iter().zip(&theirs.rounds_ns);
    let ratios = rounds.map(|(ours, theirs)| Some((*theirs)? / (*ours)?));
    let lines = ours.lines_ns.iter().zip(&theirs.lines_ns);
    let same = lines
        .map(|lines| matches!(lines, (Some(ours), Some(theirs)) if same_state(*ours, *theirs)));
    let all: Vec<_> = ratios.zip(same).filter_map(|(ratio, same)| Some((ratio?, same))).collect();
    let known = all.iter().filter(|(_, same)| *same).count();
    let asked = asked(test, size) && asked(other, size);
    let counts = all.into_iter().filter(|(_, same)| *same || !asked || known < ENOUGH);
    let ratios: Vec<_> = counts.map(|(ratio, _)| ratio).filter(|ratio| ratio.is_finite()).collect();
    let (speed, spread) = stats::median_and_quartiles(&ratios)?;
    let mixed = asked && known < ENOUGH;
    Some(Speed { speed, spread, rounds: ratios.len(), mixed })
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
                if let Some(speed) = speed(series, one, other, size) {
                    all.push(Ratio {
                        contender: ours.contender.clone(),
                        against: theirs.contender.clone(),
                        path: ours.path,
                        test: ours.test,
                        size,
                        speed,
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
            let points = BTreeMap::from([(8, Point { rounds_ns, lines_ns, ..Point::default() })]);
            let (contender, path) = (name.into(), Path::SameHost);
            Series { contender, role, path, test, line_ns: None, points }
        };
        let mut all =
            vec![make("Quipu", Role::Quipu, ours), make("Open MPI shm", Role::Peer, theirs)];
        summarize_all(&mut all);
        all
    }

    /// Whether both processors shared a cache in the rounds, of both.
    pub(crate) fn set_lines(series: &mut [Series], at: usize, lines: &[Option<f64>]) {
        series[at].points.get_mut(&8).unwrap().lines_ns = lines.to_vec();
        summarize_all(series);
    }

    #[test]
    fn a_table_is_of_the_state_in_which_most_was_measured() {
        let mut series = series(&[100.0, 110.0, 400.0, 420.0, 120.0], &[90.0, 500.0, 510.0, 95.0]);
        let (near, far) = (Some(50.0), Some(130.0));
        let point = |series: &[Series], at: usize| series[at].points[&8].clone();
        let drawn = |p: Point| (p.median_ns, p.counted, p.mixed);
        assert_eq!(drawn(point(&series, 0)), (120.0, 5, true), "no state is known");
        set_lines(&mut series, 0, &[near, near, far, None, near]);
        set_lines(&mut series, 1, &[near, far, far, near]);
        assert_eq!(series[1].line_ns, near);
        assert_eq!(drawn(point(&series, 0)), (110.0, 3, false));
        assert_eq!(point(&series, 0).quartiles_ns, [105.0, 115.0]);
        // Of the other's samples too few are of that state.
        assert_eq!(drawn(point(&series, 1)), (297.5, 4, true));
        series.iter_mut().for_each(|s| s.test.op = Op::Write);
        summarize_all(&mut series);
        assert_eq!(drawn(point(&series, 1)), (297.5, 4, false), "it does not matter");
    }

    #[test]
    fn long_messages_need_no_state() {
        let mut series = series(&[100.0, 110.0, 400.0], &[200.0, 220.0, 400.0]);
        for one in &mut series {
            let point = one.points.remove(&8).unwrap();
            one.points.insert(65536, point);
        }
        // One contender takes part with long messages only, and nobody asked which state that was in.
        let near = Some(50.0);
        series[1].points.get_mut(&65536).unwrap().lines_ns = vec![near, Some(130.0), near];
        summarize_all(&mut series);
        let drawn = |at: usize| {
            let point = &series[at].points[&65536];
            (point.median_ns, point.counted, point.mixed)
        };
        assert_eq!([drawn(0), drawn(1)], [(110.0, 3, false), (220.0, 3, false)]);
        let Speed { speed, rounds, mixed, .. } = ratios(&series)[0].speed;
        assert_eq!((speed, rounds, mixed), (2.0, 3, false));
    }

    #[test]
    fn ratios_are_those_within_rounds() {
        let found = ratios(&series(&[100.0, 200.0, 300.0], &[300.0, 200.0, 900.0]));
        assert_eq!(found.len(), 1);
        let Speed { speed, spread, rounds, mixed } = found[0].speed;
        assert_eq!((found[0].size, speed), (8, 3.0), "that of the medians is 1.5");
        assert_eq!((spread, rounds, mixed), ([2.0, 3.0], 3, true));
        assert_eq!(ratios(&series(&[f64::NAN], &[1.0])).len(), 0);
    }

    #[test]
    fn samples_of_different_states_are_not_compared() {
        let mut series =
            series(&[100.0, 100.0, 100.0, 100.0, 100.0], &[300.0, 300.0, 300.0, 100.0, 100.0]);
        let (near, far) = (Some(120.0), Some(450.0));
        let mut lines = |at: usize, lines: [Option<f64>; 5]| {
            set_lines(&mut series, at, &lines);
            let Speed { speed, rounds, mixed, .. } = ratios(&series)[0].speed;
            (speed, rounds, mixed)
        };
        let unknown = "the other's are not known";
        assert_eq!(lines(0, [near, near, near, near, far]), (3.0, 5, true), "{unknown}");
        assert_eq!(lines(1, [Some(110.0), far, near, near, far]), (2.0, 4, false));
        assert_eq!(lines(1, [far, far, Some(110.0), Some(140.0), far]), (1.0, 3, false));
        let few = "all, where too few suit";
        assert_eq!(lines(1, [far, far, far, near, far]), (3.0, 5, true), "{few}");
    }
}
