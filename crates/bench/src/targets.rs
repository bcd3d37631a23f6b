//! What Quipu is to reach, and whether it does. Ratios are of medians within one run.

use serde::Serialize;

use crate::model::{Footprint, Kind, Op, Overhead, Path, Series, Test};
use crate::results::{point, speed};

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
    /// Whether the target is reached; `None` if it was not measured.
    pub reached: Option<bool>,
}

const SEND_LATENCY: Test = Test { kind: Kind::Latency, op: Op::Send };
const WRITE_LATENCY: Test = Test { kind: Kind::Latency, op: Op::Write };
const SEND_STREAM: Test = Test { kind: Kind::Stream, op: Op::Send };
const WRITE_STREAM: Test = Test { kind: Kind::Stream, op: Op::Write };
const SEND_WAKE: Test = Test { kind: Kind::Wake, op: Op::Send };

/// Names of the contenders that targets speak of.
pub(crate) const QUIPU: &str = "Quipu";
pub(crate) const QUIPU_TCP: &str = "Quipu tcp";
pub(crate) const SOCKET: &str = "raw socket";
const MPI: &str = "Open MPI shm";
const UCX: &str = "UCX posix+cma";
const UCX_TCP: &str = "UCX tcp";

/// A target about speed: so many times faster than another.
struct Faster {
    metric: &'static str,
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
    Faster { metric, ours, theirs, size, at_least, as_time: false }
}

const fn no_slower(
    metric: &'static str,
    ours: (&'static str, Test),
    theirs: (&'static str, Test),
    size: u64,
    at_most: f64,
) -> Faster {
    Faster { metric, ours, theirs, size, at_least: 1.0 / at_most, as_time: true }
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
    faster("same host, 64 KB writes", (QUIPU, WRITE_STREAM), (UCX, SEND_STREAM), 65536, 1.0),
    faster("same host, 1 MB writes", (QUIPU, WRITE_STREAM), (UCX, SEND_STREAM), 1 << 20, 1.0),
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
    let write = point(series, QUIPU, WRITE_LATENCY, 8).map(|p| p.median_ns / 1e3);
    let metric = "same host, 8 B write, target only looks";
    all.insert(1, at_most(metric, write, 0.7, "us", "any memory"));
    let cost = overhead.iter().find(|o| o.path == Path::SameHost && o.size == 64);
    let cost = cost.map(|o| o.post_send.ns + o.poll_send.ns);
    all.push(at_most("same host, 64 B send: post + poll", cost, OVERHEAD_NS, "ns", "one message"));
    for path in [Path::SameHost, Path::Tcp] {
        let between = path.to_string();
        let bytes = memory.iter().find(|f| f.between == between).map(|f| f.bytes_per_qp / 1024.0);
        let metric = format!("memory of an idle QP, {between}");
        all.push(at_most(&metric, bytes, IDLE_BYTES / 1024.0, "KB", "beyond its queues"));
    }
    let working = memory.iter().filter(|f| f.between == "one process").map(|f| f.exchanged).max();
    all.push(Verdict {
        metric: "QPs in one process that work".into(),
        target: format!(">= {queue_pairs}"),
        value: working.map(|n| n as f64),
        shown: working.map_or("not measured".into(), |n| n.to_string()),
        reached: working.map(|n| n >= queue_pairs),
    });
    all
}

fn judge_speed(target: &Faster, series: &[Series]) -> Verdict {
    let found = speed(series, target.ours, target.theirs, target.size);
    let against = target.theirs.0;
    let wanted = if target.as_time {
        format!("<= {:.2} x {against}", 1.0 / target.at_least)
    } else {
        format!(">= {:.2} x {against}", target.at_least)
    };
    let value = found.map(|(speed, _)| if target.as_time { 1.0 / speed } else { speed });
    let shown = found.map_or("not measured".into(), |(_, spread)| {
        let [low, high] = spread;
        let (low, high) = if target.as_time { (1.0 / high, 1.0 / low) } else { (low, high) };
        format!("{:.2} x ({low:.2} to {high:.2})", value.unwrap_or(f64::NAN))
    });
    let reached = found.map(|(speed, _)| speed >= target.at_least);
    Verdict { metric: target.metric.into(), target: wanted, value, shown, reached }
}

fn at_most(metric: &str, value: Option<f64>, limit: f64, unit: &str, of: &str) -> Verdict {
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
    use crate::results::tests_support::series;

    #[test]
    fn a_target_is_reached_missed_or_not_measured() {
        let verdicts = judge(&series(&[100.0], &[110.0]), &[], &[], 10);
        assert_eq!(verdicts[0].reached, Some(true), "{:?}", verdicts[0]);
        assert!(verdicts[0].shown.starts_with("0.91 x"), "{}", verdicts[0].shown);
        assert!(verdicts[1..].iter().all(|verdict| verdict.reached.is_none()));
        let verdicts = judge(&series(&[120.0], &[110.0]), &[], &[], 10);
        assert_eq!(verdicts[0].reached, Some(false));
    }
}
