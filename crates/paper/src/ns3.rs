//! Step V4 of the ladder: the simulated hosts' TCP and that of ns-3, on the same path with the same losses.
//!
//! ns-3 is a network simulator that nobody of this project wrote. `ns3/bulk.cc` is our program for it. This
//! module says what to compile and to run, runs our own TCP, and compares; the caller runs the programs.

use std::fmt::Write as _;

use quipu_machine::{
    Bytes, Curve, Framing, LinkPlan, OsPlan, Plan, Rate, RunPlan, Span, WorkloadPlan, run_curve,
};

use crate::ladder::{Outcome, Rung};

/// The C++ program, which runs ns-3's TCP and prints what has arrived when.
pub const SOURCE: &str = include_str!("../ns3/bulk.cc");
/// ns-3's libraries that it needs.
pub const LIBRARIES: [&str; 6] = [
    "ns3-core",
    "ns3-network",
    "ns3-internet",
    "ns3-point-to-point",
    "ns3-applications",
    "ns3-traffic-control",
];
/// The Debian packages that it needs.
pub const PACKAGES: &str = "g++ libns3-dev";

/// Buffers of both ends, in bytes: the congestion window is the limit.
const BUFFER: u64 = 8 << 20;
const MTU: u32 = 1500;
/// Samples of a transfer.
const STEPS: u64 = 20;
/// How far the bytes that arrive in all may differ, as a part of ns-3's.
const TOTAL: f64 = 0.05;
/// How far the two curves may be apart at any sample, each as a part of its own end.
const SHAPE: f64 = 0.03;
/// Lines of its output that are read.
const MOST_SAMPLES: usize = 1000;

/// A path, and what it loses.
#[derive(Clone, Copy, Debug)]
pub struct Path {
    name: &'static str,
    mbit: u64,
    /// One way.
    delay_ms: u64,
    seconds: u64,
    /// Numbers of the frames of 1500 bytes, from 1.
    drops: &'static [u32],
}

/// The paths: long and thin without losses and with some, and short and fast with a burst of them.
pub const PATHS: [Path; 3] = [
    Path { name: "20 Mbit/s, 100 ms, no loss", mbit: 20, delay_ms: 50, seconds: 10, drops: &[] },
    Path {
        name: "20 Mbit/s, 100 ms, 3 losses",
        mbit: 20,
        delay_ms: 50,
        seconds: 10,
        drops: &[200, 1500, 4000],
    },
    Path {
        name: "100 Mbit/s, 10 ms, 4 losses in a row and 1",
        mbit: 100,
        delay_ms: 5,
        seconds: 5,
        drops: &[1000, 1001, 1002, 1003, 6000],
    },
];

impl Path {
    /// Arguments of the program for this path.
    #[must_use]
    pub fn arguments(&self) -> Vec<String> {
        let step = self.seconds * 1000 / STEPS;
        let (rate, delay) = (self.mbit * 1_000_000, self.delay_ms * 1000);
        let numbers = [rate, delay, MTU.into(), BUFFER, self.seconds, step];
        let drops = self.drops.iter().map(|&number| number.into());
        numbers.into_iter().chain(drops).map(|number: u64| number.to_string()).collect()
    }

    fn plan(&self) -> Plan {
        let link = LinkPlan {
            rate: Rate(self.mbit * 1_000_000),
            delay: Span(self.delay_ms * 1_000_000_000),
            drops: self.drops.to_vec(),
            framing: Framing::M5,
            mtu: MTU,
            ..LinkPlan::default()
        };
        let os = OsPlan {
            receive_buffer: Bytes(2 * BUFFER),
            send_buffer: Bytes(2 * BUFFER),
            queue: 100_000,
            timestamps: true,
            sack: true,
            ..OsPlan::default()
        };
        let workload =
            WorkloadPlan { message: Bytes(u64::from(MTU) - 52), ..WorkloadPlan::default() };
        let sample = Span(self.seconds * 1_000_000_000_000);
        let run = RunPlan { warmup: Span(0), sample, ..RunPlan::default() };
        Plan { link, os, workload, run, ..Plan::default() }
    }

    fn ours(&self) -> Result<Curve, String> {
        let step = Span(self.seconds * 1_000_000_000_000 / STEPS);
        run_curve(&self.plan(), step).map_err(|error| error.to_string())
    }
}

/// What came of ns-3.
#[derive(Clone, Debug)]
pub enum Ns3 {
    /// It is not installed: why.
    Missing(String),
    /// The program does not compile or run: why.
    Failed(String),
    /// What the program printed for each of [`PATHS`].
    Ran(Vec<String>),
}

/// What the program printed: the bytes that have arrived at each sample.
fn samples(text: &str) -> Result<Vec<u64>, String> {
    let mut bytes = Vec::new();
    for line in text.lines().take(MOST_SAMPLES) {
        let mut words = line.split_whitespace();
        match (words.next(), words.next().map(str::parse)) {
            (Some("lost"), _) => return Ok(bytes),
            (Some(_), Some(Ok(count))) => bytes.push(count),
            _ => return Err(format!("ns-3's program printed \"{line}\"")),
        }
    }
    Err(format!("ns-3's program ended after {} samples", bytes.len()))
}

/// How two curves differ: the ratio of their ends, and how far they are apart at most, each as a part of its
/// own end.
fn compare(ours: &[u64], theirs: &[u64]) -> Result<(f64, f64), String> {
    let (Some(&our_end), Some(&their_end)) = (ours.last(), theirs.last()) else {
        return Err("a curve has no samples".into());
    };
    if ours.len() != theirs.len() || our_end == 0 || their_end == 0 {
        return Err(format!("{} samples of ours, {} of ns-3", ours.len(), theirs.len()));
    }
    let apart = ours.iter().zip(theirs).map(|(&ours, &theirs)| {
        (ours as f64 / our_end as f64 - theirs as f64 / their_end as f64).abs()
    });
    Ok((our_end as f64 / their_end as f64, apart.fold(0.0, f64::max)))
}

/// Compares one path: a sentence, and whether it holds.
fn judge(path: &Path, theirs: &str) -> Result<(String, bool), String> {
    let (ours, theirs) = (path.ours()?, samples(theirs)?);
    let (ratio, apart) = compare(&ours.received, &theirs)?;
    let lost = path.drops.len() as u64;
    let once = ours.lost == lost && ours.retransmitted == lost;
    let holds = (ratio - 1.0).abs() <= TOTAL && apart <= SHAPE && once;
    let Curve { retransmitted, lost, .. } = ours;
    let sentence = format!(
        "{}: {:.1} % of ns-3's bytes, curves {:.1} % apart, {lost} lost and {retransmitted} sent again",
        path.name,
        ratio * 100.0,
        apart * 100.0
    );
    Ok((sentence, holds))
}

/// The rung of the ladder.
pub(crate) fn rung(ns3: &Ns3) -> Rung {
    let (id, title) = ("V4", "bulk transfers of ns-3's TCP");
    let outputs = match ns3 {
        Ns3::Missing(detail) => {
            return Rung { id, title, outcome: Outcome::Skipped, detail: detail.clone() };
        }
        Ns3::Failed(detail) => {
            return Rung { id, title, outcome: Outcome::Failed, detail: detail.clone() };
        }
        Ns3::Ran(outputs) => outputs,
    };
    let mut detail = String::new();
    let mut outcome = Outcome::Passed;
    for (path, output) in PATHS.iter().zip(outputs) {
        let (sentence, holds) = judge(path, output).unwrap_or_else(|why| (why, false));
        if !holds {
            outcome = Outcome::Failed;
        }
        let separator = if detail.is_empty() { "" } else { "; " };
        let _ = write!(detail, "{separator}{sentence}");
    }
    if outputs.len() != PATHS.len() {
        outcome = Outcome::Failed;
    }
    Rung { id, title, outcome, detail }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What the program prints for a curve.
    fn printed(bytes: &[u64]) -> String {
        let mut text = String::new();
        for (at, count) in bytes.iter().enumerate() {
            let _ = writeln!(text, "{at} {count} 14480");
        }
        text + "lost 0\n"
    }

    #[test]
    fn what_the_program_prints_is_read() {
        assert_eq!(
            samples("500 196928 105704\n1000 1155504 224440\nlost 3\n"),
            Ok(vec![196_928, 1_155_504])
        );
        assert!(samples("500 196928 105704\n").unwrap_err().contains("1 samples"));
        assert!(samples("what is this\n").unwrap_err().contains("what is this"));
        assert_eq!(
            PATHS[1].arguments().join(" "),
            "20000000 50000 1500 8388608 10 500 200 1500 4000"
        );
    }

    #[test]
    fn curves_differ_by_their_ends_and_their_shapes() {
        assert_eq!(compare(&[10, 50, 100], &[20, 100, 200]), Ok((0.5, 0.0)));
        let (ratio, apart) = compare(&[10, 60, 100], &[10, 40, 100]).unwrap();
        assert!(ratio == 1.0 && (apart - 0.2).abs() < 1e-9, "{ratio} {apart}");
        assert!(compare(&[1], &[1, 2]).is_err() && compare(&[], &[]).is_err());
    }

    #[test]
    fn the_rung_passes_for_a_curve_like_ours_and_fails_for_another() {
        let ours: Vec<Vec<u64>> = PATHS.iter().map(|path| path.ours().unwrap().received).collect();
        let outputs = |factor: u64| {
            Ns3::Ran(
                ours.iter()
                    .map(|it| printed(&it.iter().map(|n| n * factor / 100).collect::<Vec<_>>()))
                    .collect(),
            )
        };
        assert_eq!(rung(&outputs(103)).outcome, Outcome::Passed, "{}", rung(&outputs(103)).detail);
        assert_eq!(rung(&outputs(107)).outcome, Outcome::Failed);
        assert_eq!(rung(&Ns3::Ran(Vec::new())).outcome, Outcome::Failed);
        assert_eq!(rung(&Ns3::Failed("it".into())).outcome, Outcome::Failed);
        assert_eq!(rung(&Ns3::Missing("it".into())).outcome, Outcome::Skipped);
    }
}
