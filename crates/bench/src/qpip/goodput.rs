//! Goodput of QPIP beside the kernel's CUBIC, over a path that loses and delays packets in both directions.
//! The receiver is a socket of the kernel in every case; the senders take turns.

use std::time::Duration;

use indicatif::ProgressBar;
use serde::{Deserialize, Serialize};

use super::model::ratio_of;
use super::run::Stage;
use super::stage::Order;
use crate::model::{Role, Speed};
use crate::pair::Launcher;
use crate::stats;
use crate::targets::{Limit, Verdict, ratio as verdict};

/// Where QPIP is to carry at least as much as the kernel's CUBIC: percent of the packets lost each way, and
/// milliseconds of the round trip.
const TARGET: (f64, f64) = (1.0, 100.0);
const LEAST: f64 = 1.0;
/// A sender that fails so often on a path is tried there no longer.
const FAILURES: usize = 2;

/// The part of the plan about goodput. Every loss is measured with every round trip and window.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PlannedGoodput {
    /// How often both senders have their turn.
    pub rounds: u32,
    /// How long a turn counts; it begins 20 round trips before that.
    pub seconds: f64,
    /// Connections at once, of which the mean counts. They do not share a bottleneck.
    pub connections: u32,
    /// Of what is lost in the first round; each round has another.
    pub seed: u64,
    /// Percent of the packets that are lost, each way.
    pub loss_percent: Vec<f64>,
    /// Round trips, in milliseconds.
    pub rtt_ms: Vec<f64>,
    /// Octets of room that the receiver asks for (`SO_RCVBUF`); its window is about that.
    pub window: Vec<u32>,
}

impl PlannedGoodput {
    /// What makes no sense in it, if anything.
    pub(crate) fn fault(&self) -> Option<&'static str> {
        let all = |list: &[f64], least: f64, most: f64| {
            !list.is_empty() && list.iter().all(|value| (least..=most).contains(value))
        };
        let window = |window: &u32| (4096..=1 << 22).contains(window);
        match self {
            Self { rounds, .. } if !(1..=1000).contains(rounds) => {
                Some("rounds must be from 1 to 1000")
            }
            Self { seconds, .. } if !(0.1..=600.0).contains(seconds) => {
                Some("seconds must be from 0.1 to 600")
            }
            // As many may wait to be accepted.
            Self { connections, .. } if !(1..=128).contains(connections) => {
                Some("connections must be from 1 to 128")
            }
            Self { loss_percent, .. } if !all(loss_percent, 0.0, 20.0) => {
                Some("loss_percent must be from 0 to 20, one at least")
            }
            Self { rtt_ms, .. } if !all(rtt_ms, 0.1, 500.0) => {
                Some("rtt_ms must be from 0.1 to 500, one at least")
            }
            Self { window: all, .. } if all.is_empty() || !all.iter().all(window) => {
                Some("window must be from 4096 to 4194304, one at least")
            }
            _ => None,
        }
    }
}

/// Who sends.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Sender {
    /// Sockets of the kernel, with CUBIC.
    Kernel,
    /// Queue pairs of an adapter on a packet socket.
    Qpip,
}

impl Sender {
    /// Both.
    pub(crate) const ALL: [Self; 2] = [Self::Kernel, Self::Qpip];

    /// How it is called.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Kernel => "kernel CUBIC, lossy path",
            Self::Qpip => "QPIP, lossy path",
        }
    }

    /// What it is in the comparison.
    pub(crate) fn role(self) -> Role {
        if self == Self::Qpip { Role::Quipu } else { Role::Floor }
    }
}

/// A sender's turn on a path.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub(crate) struct Stretch {
    pub(crate) sender: Sender,
    pub(crate) loss_percent: f64,
    pub(crate) rtt_ms: f64,
    pub(crate) window: u32,
    pub(crate) connections: u32,
    pub(crate) seconds: f64,
    pub(crate) seed: u64,
}

/// What a sender carries over a path.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Path {
    /// Percent of the packets that are lost, each way.
    pub loss_percent: f64,
    /// Milliseconds.
    pub rtt_ms: f64,
    /// Octets of room that the receiver asks for.
    pub window: u32,
}

/// Both senders over a path.
#[derive(Clone, Debug, Serialize)]
pub struct Goodput {
    /// The path.
    #[serde(flatten)]
    pub path: Path,
    /// Of the kernel and of QPIP: octets a second of a connection, in the rounds; `None` where it failed.
    pub octets_per_s: [Vec<Option<f64>>; 2],
    /// Their medians.
    pub median: [f64; 2],
    /// Their quartiles.
    pub quartiles: [[f64; 2]; 2],
    /// QPIP's by the kernel's, from the ratios within rounds.
    pub ratio: Option<Speed>,
}

impl Goodput {
    fn new(path: Path, octets_per_s: [Vec<Option<f64>>; 2]) -> Self {
        let [kernel, qpip] = &octets_per_s;
        let within = |(kernel, qpip): (&Option<f64>, &Option<f64>)| Some((*qpip)? / (*kernel)?);
        let ratios: Vec<_> = kernel.iter().zip(qpip).filter_map(within).collect();
        let samples = [kernel, qpip].map(|of| of.iter().flatten().copied().collect::<Vec<_>>());
        Self {
            path,
            median: samples.each_ref().map(|of| stats::median(of)),
            quartiles: samples.each_ref().map(|of| stats::quartiles(of)),
            ratio: ratio_of(&ratios),
            octets_per_s,
        }
    }
}

/// Runs that part of the plan: what came out, and a word about what did not.
pub(crate) fn run(
    plan: &PlannedGoodput,
    launcher: &Launcher,
    cpus: [usize; 2],
    bar: &ProgressBar,
) -> (Vec<Goodput>, Vec<String>) {
    let mut stage = match Stage::start(launcher, cpus) {
        Ok(stage) => stage,
        Err(error) => return (Vec::new(), vec![format!("Goodput is not measured: {error:#}")]),
    };
    let paths = paths(plan);
    let mut samples = vec![[Vec::new(), Vec::new()]; paths.len()];
    let mut failures = vec![[0; 2]; paths.len()];
    let mut notes = Vec::new();
    for round in 0..plan.rounds {
        for (index, &Path { loss_percent, rtt_ms, window }) in paths.iter().enumerate() {
            for turn in 0..2 {
                // The one that comes first in one round comes later in the next.
                let which = (turn + round as usize) % 2;
                let sender = Sender::ALL[which];
                let name = sender.name();
                let so_far = &mut samples[index][which];
                so_far.push(None);
                if failures[index][which] >= FAILURES {
                    continue;
                }
                bar.set_message(format!(
                    "round {}: {name}, {loss_percent} %, {rtt_ms} ms, {window} B",
                    round + 1
                ));
                let PlannedGoodput { connections, seconds, seed, .. } = *plan;
                // Both lose by the same numbers.
                let seed = seed.wrapping_add(round.into());
                let stretch =
                    Stretch { sender, loss_percent, rtt_ms, window, connections, seconds, seed };
                let beyond = Duration::from_secs_f64(seconds + rtt_ms / 25.0);
                match stage.run(&Order::Stretch(stretch), beyond) {
                    Ok(measured) => *so_far.last_mut().unwrap_or(&mut None) = Some(measured.value),
                    Err(error) => {
                        failures[index][which] += 1;
                        notes.push(format!("{name}, {loss_percent} %, {rtt_ms} ms: {error:#}"));
                    }
                }
            }
        }
        bar.inc(1);
    }
    let any = |of: &[Vec<Option<f64>>; 2]| of.iter().flatten().any(Option::is_some);
    let measured = paths.into_iter().zip(samples).filter(|(_, of)| any(of));
    (measured.map(|(path, of)| Goodput::new(path, of)).collect(), notes)
}

/// Every loss with every round trip and window.
fn paths(plan: &PlannedGoodput) -> Vec<Path> {
    let mut all = Vec::new();
    for &window in &plan.window {
        for &rtt_ms in &plan.rtt_ms {
            let of = plan.loss_percent.iter();
            all.extend(of.map(|&loss_percent| Path { loss_percent, rtt_ms, window }));
        }
    }
    all
}

/// The target, for each window that was measured.
pub(crate) fn judge(all: &[Goodput]) -> Vec<Verdict> {
    let (loss, rtt) = TARGET;
    let of = |it: &&Goodput| (it.path.loss_percent, it.path.rtt_ms) == TARGET;
    let measured = all.iter().filter(of);
    let mut ratios: Vec<_> = measured.map(|it| (Some(it.path.window), it.ratio)).collect();
    if ratios.is_empty() {
        ratios.push((None, None));
    }
    let verdicts = ratios.into_iter().map(|(window, ratio)| {
        let window =
            window.map_or(String::new(), |it| format!(", {}", crate::report::size(it.into())));
        let metric = format!("QPIP, goodput at {loss} % loss, {rtt} ms{window}");
        verdict(metric, Limit::Least(LEAST), "kernel CUBIC", ratio)
    });
    verdicts.collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn goodput(loss_percent: f64, kernel: &[Option<f64>], qpip: &[Option<f64>]) -> Goodput {
        let path = Path { loss_percent, rtt_ms: 100.0, window: 1 << 18 };
        Goodput::new(path, [kernel.to_vec(), qpip.to_vec()])
    }

    #[test]
    fn the_target_is_of_rounds_in_which_both_ran_and_of_its_path_only() {
        let kernel = [Some(100.0), Some(1.0), Some(200.0), Some(100.0)];
        let qpip = [Some(110.0), None, Some(180.0), Some(110.0)];
        let all = [goodput(1.0, &kernel, &qpip), goodput(3.0, &kernel, &[])];
        assert_eq!(all[0].median, [100.0, 110.0]);
        let verdicts = judge(&all);
        assert_eq!(verdicts.len(), 1);
        assert_eq!(verdicts[0].metric, "QPIP, goodput at 1 % loss, 100 ms, 256 KB");
        assert_eq!(verdicts[0].target, ">= 1.00 x kernel CUBIC");
        assert_eq!(verdicts[0].reached, Some(true));
        let none = judge(&all[1..]);
        assert_eq!((none.len(), none[0].reached), (1, None));
    }

    #[test]
    fn every_loss_is_measured_with_every_round_trip_and_window() {
        let plan = PlannedGoodput {
            rounds: 1,
            seconds: 1.0,
            connections: 1,
            seed: 1,
            loss_percent: vec![1.0, 3.0],
            rtt_ms: vec![20.0, 100.0],
            window: vec![4096, 1 << 20],
        };
        assert_eq!((paths(&plan).len(), plan.fault()), (8, None));
        for (plan, word) in [
            (PlannedGoodput { rtt_ms: vec![f64::NAN], ..plan.clone() }, "rtt_ms"),
            (PlannedGoodput { loss_percent: Vec::new(), ..plan.clone() }, "loss_percent"),
            (PlannedGoodput { seconds: 1e9, ..plan.clone() }, "seconds"),
            (PlannedGoodput { connections: 0, ..plan }, "connections"),
        ] {
            assert!(plan.fault().unwrap().starts_with(word), "{plan:?}");
        }
    }
}
