//! What Quipu is to reach, and whether it does. Ratios are medians of those within rounds.

use std::borrow::Cow;

use serde::Serialize;

use crate::model::{Footprint, Kind, Op, Overhead, Path, Point, Role, Series, Speed, Test};
use crate::report::digits;
use crate::results::{ENOUGH, point, speed};
use crate::worker::{FASTEST, SLOWEST};

/// A target and what became of it.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Verdict {
    /// What is measured.
    pub metric: String,
    /// What is to be reached.
    pub target: String,
    /// What was measured; `None` if it was not.
    pub value: Option<f64>,
    /// The value for people.
    pub shown: String,
    /// Whether the target is reached; `None` if it was not measured, or in too few rounds.
    pub reached: Option<bool>,
}

const SEND_LATENCY: Test = Test { kind: Kind::Latency, op: Op::Send };
const WRITE_LATENCY: Test = Test { kind: Kind::Latency, op: Op::Write };
const SEND_STREAM: Test = Test { kind: Kind::Stream, op: Op::Send };
const WRITE_STREAM: Test = Test { kind: Kind::Stream, op: Op::Write };
const SEND_WAKE: Test = Test { kind: Kind::Wake, op: Op::Send };

/// Names of the contenders that targets speak of.
pub(crate) const QUIPU: &str = "Quipu";
pub(crate) const QUIPU_SHARED: &str = "Quipu shared";
pub(crate) const QUIPU_TCP: &str = "Quipu tcp";
pub(crate) const QUIPU_TCP_CRC: &str = "Quipu tcp, CRC";
pub(crate) const SOCKET: &str = "raw socket";
pub(crate) const QUIPU_UD: &str = "Quipu ud";
pub(crate) const UDP_SOCKET: &str = "UDP socket";
pub(crate) const CROWD: &str = "Quipu, crowd";
pub(crate) const CROWD_TCP: &str = "Quipu tcp, crowd";
const MPI: &str = "Open MPI shm";
const UCX: &str = "UCX posix+cma";
const UCX_TCP: &str = "UCX tcp";
const MPI_TCP: &str = "Open MPI tcp";

/// Programs over Quipu may be so many times slower than by their own shared memory.
const SLOWER: f64 = 1.3;
/// What runs over Quipu (between which ends, who, as which contender), beside the same by its own
/// transports, and how many times slower it may be.
const OVER_QUIPU: [(&str, &str, &str, &str, f64); 6] = [
    ("same host", "UCX", "Quipu, UCX", UCX, SLOWER),
    ("same host, shared pages", "UCX", "Quipu shared, UCX", UCX, SLOWER),
    ("TCP", "UCX", "Quipu tcp, UCX", UCX_TCP, 1.0),
    ("same host", "Open MPI", "Quipu, Open MPI", MPI, SLOWER),
    ("same host, shared pages", "Open MPI", "Quipu shared, Open MPI", MPI, SLOWER),
    ("TCP", "Open MPI", "Quipu tcp, Open MPI", MPI_TCP, 1.0),
];

/// Connections a second by rdma_cm.
const CONNECTIONS: f64 = 2000.0;
const CONNECT: Test = Test { kind: Kind::Connect, op: Op::Connection };

/// What the slowest of many queue pairs is to get of what the median does, and the median of what the fastest
/// does.
const SHARE: f64 = 0.5;
const CROWD_SENDS: Test = Test { kind: Kind::Crowd, op: Op::Send };

/// A target about speed: so many times faster than another.
struct Faster {
    metric: Cow<'static, str>,
    ours: (&'static str, Test),
    theirs: (&'static str, Test),
    size: u64,
    at_least: f64,
    /// The target is stated as a ratio of times: at most so many times theirs.
    as_time: bool,
}

const fn faster(
    metric: &'static str,
    ours: (&'static str, Test),
    theirs: (&'static str, Test),
    size: u64,
    at_least: f64,
) -> Faster {
    Faster { metric: Cow::Borrowed(metric), ours, theirs, size, at_least, as_time: false }
}

const fn no_slower(
    metric: &'static str,
    ours: (&'static str, Test),
    theirs: (&'static str, Test),
    size: u64,
    at_most: f64,
) -> Faster {
    Faster {
        metric: Cow::Borrowed(metric),
        ours,
        theirs,
        size,
        at_least: 1.0 / at_most,
        as_time: true,
    }
}

const SPEEDS: &[Faster] = &[
    no_slower(
        "same host, 8 B send, half round trip",
        (QUIPU, SEND_LATENCY),
        (MPI, SEND_LATENCY),
        8,
        1.0,
    ),
    faster(
        "same host, 64 B sends a second, one QP",
        (QUIPU, SEND_STREAM),
        (MPI, SEND_STREAM),
        64,
        1.5,
    ),
    faster("same host, 64 KB sends", (QUIPU, SEND_STREAM), (UCX, SEND_STREAM), 65536, 1.0),
    faster("same host, 1 MB sends", (QUIPU, SEND_STREAM), (UCX, SEND_STREAM), 1 << 20, 1.0),
    faster("same host, 64 KB writes", (QUIPU, WRITE_STREAM), (UCX, WRITE_STREAM), 65536, 1.0),
    faster("same host, 1 MB writes", (QUIPU, WRITE_STREAM), (UCX, WRITE_STREAM), 1 << 20, 1.0),
    // UCX's memory is mapped by both ends as well.
    faster(
        "same host, shared pages, 64 KB writes",
        (QUIPU_SHARED, WRITE_STREAM),
        (UCX, WRITE_STREAM),
        65536,
        1.0,
    ),
    faster(
        "same host, shared pages, 1 MB writes",
        (QUIPU_SHARED, WRITE_STREAM),
        (UCX, WRITE_STREAM),
        1 << 20,
        1.0,
    ),
    no_slower(
        "TCP, 8 B send, half round trip",
        (QUIPU_TCP, SEND_LATENCY),
        (UCX_TCP, SEND_LATENCY),
        8,
        1.0,
    ),
    no_slower(
        "TCP, 8 B send, half round trip",
        (QUIPU_TCP, SEND_LATENCY),
        (SOCKET, SEND_LATENCY),
        8,
        1.1,
    ),
    faster(
        "TCP, 8 B sends a second, one QP",
        (QUIPU_TCP, SEND_STREAM),
        (UCX_TCP, SEND_STREAM),
        8,
        8.0,
    ),
    faster("TCP, 64 KB sends", (QUIPU_TCP, SEND_STREAM), (UCX_TCP, SEND_STREAM), 65536, 1.4),
    faster("TCP, 64 KB sends", (QUIPU_TCP, SEND_STREAM), (SOCKET, SEND_STREAM), 65536, 0.9),
    faster("TCP, 1 MB sends", (QUIPU_TCP, SEND_STREAM), (SOCKET, SEND_STREAM), 1 << 20, 0.9),
    faster("TCP, 64 KB writes", (QUIPU_TCP, WRITE_STREAM), (SOCKET, SEND_STREAM), 65536, 0.9),
    faster("TCP, 1 MB writes", (QUIPU_TCP, WRITE_STREAM), (SOCKET, SEND_STREAM), 1 << 20, 0.9),
    no_slower("TCP, 8 B, both ends asleep", (QUIPU_TCP, SEND_WAKE), (SOCKET, SEND_WAKE), 8, 1.05),
];

/// Nanoseconds that a 64-byte send may cost the program on the same host.
const OVERHEAD_NS: f64 = 200.0;
/// Bytes that an idle connected queue pair may cost.
const IDLE_BYTES: f64 = 16384.0;

/// All targets.
pub(crate) fn judge(
    series: &[Series],
    overhead: &[Overhead],
    memory: &[Footprint],
    queue_pairs: u64,
) -> Vec<Verdict> {
    let mut all: Vec<_> = SPEEDS.iter().map(|target| judge_speed(target, series)).collect();
    for (at, who, limit, memory) in
        [(1, QUIPU, 0.7, "any memory"), (2, QUIPU_SHARED, 0.2, "shared pages")]
    {
        let write = point(series, who, WRITE_LATENCY, 8);
        let us = write.map(|point| point.median_ns / 1e3);
        let metric = "same host, 8 B write, target only looks";
        all.insert(at, of_rounds(at_most(metric, us, limit, "us", memory), counted(write)));
    }
    all.extend(over_quipu().iter().map(|target| judge_speed(target, series)));
    all.extend([Path::SameHost, Path::Tcp].map(|path| judge_connections(series, path)));
    all.extend([CROWD, CROWD_TCP].into_iter().flat_map(|name| judge_crowd(series, name)));
    let cost = overhead.iter().find(|o| o.path == Path::SameHost && o.size == 64);
    let cost = cost.map(|o| o.post_send.ns + o.poll_send.ns);
    all.push(at_most("same host, 64 B send: post + poll", cost, OVERHEAD_NS, "ns", "one message"));
    for path in [Path::SameHost, Path::Tcp] {
        let between = path.to_string();
        let bytes = memory.iter().find(|f| f.between == between).map(|f| f.bytes_per_qp / 1024.0);
        let metric = format!("memory of an idle QP, {between}");
        all.push(at_most(&metric, bytes, IDLE_BYTES / 1024.0, "KB", "beyond its queues"));
    }
    all.push(judge_many(memory, queue_pairs));
    all
}

fn judge_many(memory: &[Footprint], queue_pairs: u64) -> Verdict {
    let working = memory.iter().filter(|f| f.between == "one process").map(|f| f.exchanged).max();
    Verdict {
        metric: "QPs in one process that work".into(),
        target: format!(">= {queue_pairs}"),
        value: working.map(|n| n as f64),
        shown: working.map_or("not measured".into(), |n| n.to_string()),
        reached: working.map(|n| n >= queue_pairs),
    }
}

/// How many samples the median of a point is of.
fn counted(point: Option<&Point>) -> usize {
    point.map_or(0, |point| point.counted)
}

/// A verdict from so many rounds: one of too few is none.
pub(crate) fn of_rounds(mut verdict: Verdict, rounds: usize) -> Verdict {
    if rounds < ENOUGH && verdict.value.is_some() {
        verdict.reached = None;
        verdict.shown += &match rounds {
            1 => ", of 1 round only".to_owned(),
            rounds => format!(", of {rounds} rounds only"),
        };
    }
    verdict
}

/// Of what runs over Quipu and has shared memory and TCP of its own.
fn over_quipu() -> Vec<Faster> {
    let tests = [("send", SEND_LATENCY), ("write", WRITE_LATENCY), ("sends", SEND_STREAM)];
    let mut all = Vec::new();
    for (path, who, ours, theirs, slower) in OVER_QUIPU {
        // Open MPI is measured with messages only.
        for (what, test) in tests.iter().filter(|(_, test)| who == "UCX" || test.op == Op::Send) {
            let how = if test.kind == Kind::Stream { "" } else { ", half round trip" };
            for (size, bytes) in [(8, "8 B"), (1 << 20, "1 MB")] {
                let metric = format!("{path}, {who} over Quipu, {bytes} {what}{how}");
                let target = no_slower("", (ours, *test), (theirs, *test), size, slower);
                all.push(Faster { metric: Cow::Owned(metric), ..target });
            }
        }
    }
    all
}

/// The largest number of connections at once that was measured counts.
fn judge_connections(series: &[Series], path: Path) -> Verdict {
    let quipu = |s: &&Series| s.role == Role::Quipu && s.path == path && s.test == CONNECT;
    let last = series.iter().find(quipu).and_then(|series| series.points.last_key_value());
    let rate = last.map(|(_, point)| point.messages_per_s);
    let metric = format!("connections by rdma_cm, {path}");
    let verdict = at_least(&metric, rate, CONNECTIONS, "a second", "made and broken");
    of_rounds(verdict, counted(last.map(|(_, point)| point)))
}

/// Sizes are judged together: the least share counts, and the greatest.
fn judge_crowd(series: &[Series], name: &str) -> [Verdict; 2] {
    let series = series.iter().find(|s| s.contender == name && s.test == CROWD_SENDS);
    let details = series.iter().flat_map(|series| series.points.values().flat_map(|p| &p.also));
    let shares = |name| details.clone().filter(move |d| d.name == name).map(|d| d.median);
    let (least, most) = (shares(SLOWEST).reduce(f64::min), shares(FASTEST).reduce(f64::max));
    let rounds = details.clone().map(|detail| detail.rounds.len()).min().unwrap_or(0);
    let (slowest, fastest) =
        (format!("{name}: slowest of many QPs"), format!("{name}: fastest of many QPs"));
    let unit = "of the median";
    [
        at_least(&slowest, least, SHARE, unit, "messages"),
        at_most(&fastest, most, 1.0 / SHARE, unit, "messages"),
    ]
    .map(|verdict| of_rounds(verdict, rounds))
}

fn judge_speed(target: &Faster, series: &[Series]) -> Verdict {
    let found = speed(series, target.ours, target.theirs, target.size);
    let (ours, (against, theirs)) = (target.ours.1, target.theirs);
    // Who has no such operation is measured by another, which is to be said.
    let against = if ours.op == theirs.op {
        against.to_owned()
    } else {
        format!("{against}, {}s", theirs.op)
    };
    let metric = target.metric.to_string();
    if !target.as_time {
        return ratio(metric, Limit::Least(target.at_least), &against, found);
    }
    let times = found.map(|it| {
        let [low, high] = it.spread;
        Speed { speed: 1.0 / it.speed, spread: [1.0 / high, 1.0 / low], ..it }
    });
    ratio(metric, Limit::Most(1.0 / target.at_least), &against, times)
}

/// Which ratio is good enough.
#[derive(Clone, Copy)]
pub(crate) enum Limit {
    Most(f64),
    Least(f64),
}

/// A target for a ratio; `None` if it was not measured.
pub(crate) fn ratio(metric: String, limit: Limit, of: &str, found: Option<Speed>) -> Verdict {
    let value = found.map(|it| it.speed);
    let (target, reached) = match limit {
        Limit::Most(most) => (format!("<= {most:.2} x {of}"), value.map(|v| v <= most)),
        Limit::Least(least) => (format!(">= {least:.2} x {of}"), value.map(|v| v >= least)),
    };
    let shown = found.map_or("not measured".into(), |it| {
        let [value, low, high] = [it.speed, it.spread[0], it.spread[1]].map(digits);
        let mixed = if it.mixed { ", any state" } else { "" };
        format!("{value} x ({low} to {high}){mixed}")
    });
    let verdict = Verdict { metric, target, value, shown, reached };
    of_rounds(verdict, found.map_or(0, |it| it.rounds))
}

fn at_least(metric: &str, value: Option<f64>, limit: f64, unit: &str, of: &str) -> Verdict {
    Verdict {
        metric: metric.into(),
        target: format!(">= {limit} {unit}, {of}"),
        value,
        shown: value.map_or("not measured".into(), |value| format!("{value:.2} {unit}")),
        reached: value.map(|value| value >= limit),
    }
}

pub(crate) fn at_most(
    metric: &str,
    value: Option<f64>,
    limit: f64,
    unit: &str,
    of: &str,
) -> Verdict {
    Verdict {
        metric: metric.into(),
        target: format!("<= {limit} {unit}, {of}"),
        value,
        shown: value.map_or("not measured".into(), |value| format!("{value:.2} {unit}")),
        reached: value.map(|value| value <= limit),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::{Detail, Point};
    use crate::results::tests_support::series;

    #[test]
    fn a_target_is_reached_missed_or_not_measured() {
        let verdicts = judge(&series(&[100.0; 3], &[110.0; 3]), &[], &[], 10);
        assert_eq!(verdicts[0].reached, Some(true), "{:?}", verdicts[0]);
        assert_eq!(verdicts[0].shown, "0.91 x (0.91 to 0.91), any state");
        assert!(verdicts[1..].iter().all(|verdict| verdict.reached.is_none()));
        let verdicts = judge(&series(&[120.0; 3], &[110.0; 3]), &[], &[], 10);
        assert_eq!(verdicts[0].reached, Some(false));
    }

    #[test]
    fn a_sample_or_two_are_no_verdict() {
        let verdicts = judge(&series(&[100.0; 3], &[110.0]), &[], &[], 10);
        assert_eq!(verdicts[0].reached, None);
        let shown = "0.91 x (0.91 to 0.91), any state, of 1 round only";
        assert_eq!(verdicts[0].shown, shown);
        let mut writes = series(&[100.0; 2], &[]);
        writes[0].test = WRITE_LATENCY;
        let found = verdict(&writes, "same host, 8 B write, target only looks");
        assert_eq!((found.shown.as_str(), found.reached), ("0.10 us, of 2 rounds only", None));
    }

    #[test]
    fn small_ratios_are_shown_with_what_decides_them() {
        let speed = |speed| Speed { speed, spread: [0.0151, 0.0304], rounds: 7, mixed: false };
        let missed = ratio("".into(), Limit::Most(0.02), "kernel", Some(speed(0.0213)));
        assert_eq!((&*missed.shown, missed.reached), ("0.021 x (0.015 to 0.030)", Some(false)));
    }

    #[test]
    fn writes_are_compared_with_writes_or_it_is_said() {
        for target in SPEEDS.iter().filter(|target| target.ours.1.op != target.theirs.1.op) {
            assert_eq!(target.theirs.0, SOCKET, "a socket has no writes: {}", target.metric);
            let target = judge_speed(target, &[]).target;
            assert!(target.ends_with("x raw socket, sends"), "{target}");
        }
    }

    #[test]
    fn queue_pairs_that_do_not_work_miss_the_target() {
        let footprint = |exchanged| Footprint {
            between: "one process".into(),
            queue_pairs: 10_000,
            bytes_per_qp: 0.0,
            exchanged,
            fault: None,
            setup_s: 1.0,
        };
        assert_eq!(judge_many(&[footprint(10_000)], 10_000).reached, Some(true));
        assert_eq!(judge_many(&[footprint(9_999)], 10_000).reached, Some(false));
        assert_eq!(judge_many(&[], 10_000).reached, None);
    }

    fn verdict(series: &[Series], metric: &str) -> Verdict {
        let verdicts = judge(series, &[], &[], 10);
        verdicts.into_iter().find(|verdict| verdict.metric == metric).unwrap()
    }

    #[test]
    fn what_runs_over_quipu_may_be_a_little_slower() {
        let mut series = series(&[120.0; 3], &[100.0; 3]);
        series[0].contender = "Quipu, Open MPI".into();
        let metric = "same host, Open MPI over Quipu, 8 B send, half round trip";
        assert_eq!(verdict(&series, metric).reached, Some(true));
        series[0].points.iter_mut().for_each(|(_, point)| point.rounds_ns = vec![Some(131.0); 3]);
        assert_eq!(verdict(&series, metric).reached, Some(false));
    }

    #[test]
    fn the_most_connections_at_once_are_judged() {
        let mut series = series(&[100.0; 3], &[100.0; 3]);
        series[0].test = CONNECT;
        let few = series[0].points[&8].clone();
        series[0].points.insert(1000, Point { messages_per_s: 1999.0, ..few });
        let metric = "connections by rdma_cm, same host";
        assert_eq!(verdict(&series, metric).reached, Some(false));
        assert_eq!(verdict(&series, metric).value, Some(1999.0));
        series.clear();
        assert_eq!(verdict(&series, metric).reached, None);
    }

    #[test]
    fn the_extreme_shares_of_a_crowd_are_judged() {
        let mut series = series(&[100.0; 3], &[100.0; 3]);
        (series[0].contender, series[0].test) = (CROWD.into(), CROWD_SENDS);
        let detail =
            |name: &str, median| Detail { name: name.into(), rounds: vec![median; 3], median };
        let shares = |least, most| vec![detail(SLOWEST, least), detail(FASTEST, most)];
        let point = series[0].points[&8].clone();
        series[0].points.insert(8, Point { also: shares(0.9, 2.5), ..point.clone() });
        series[0].points.insert(4096, Point { also: shares(0.4, 1.5), ..point });
        let found = verdict(&series, "Quipu, crowd: slowest of many QPs");
        assert_eq!((found.value, found.reached), (Some(0.4), Some(false)));
        let found = verdict(&series, "Quipu, crowd: fastest of many QPs");
        assert_eq!((found.value, found.reached), (Some(2.5), Some(false)));
    }
}
