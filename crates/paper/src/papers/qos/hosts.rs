//! Runs of the paper's hosts.

use std::collections::BTreeMap;

use anyhow::{Context, Result};
use quipu_machine::{Clock, HcaReport, Plan, Rate, Span, StreamKind, StreamPlan, example, run_hca};

use crate::papers::pool::map_all;

/// Streams, their tables, the link and the host of a run.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Run {
    /// How many of which kind, with their service level. MPI goes both ways.
    pub(super) streams: Vec<(Kind, u32, u8)>,
    pub(super) tables: Tables,
    /// Single data rate: half of the paper's usual link.
    pub(super) slow_link: bool,
    /// A host of some years later.
    pub(super) fast_host: bool,
}

/// A protocol.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Kind {
    Mpi,
    Eager,
    Sdp,
    Ipoib,
}

/// The paper's two mechanisms, for service level 1 over 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Tables {
    /// Weights of so much to 1.
    Weights(u8),
    /// Service level 1 in the high table only, with a `high_limit`.
    Blocking(u8),
}

impl Kind {
    fn kind(self) -> StreamKind {
        match self {
            Self::Mpi => StreamKind::Mpi,
            Self::Eager => StreamKind::Eager,
            Self::Sdp => StreamKind::Sdp,
            Self::Ipoib => StreamKind::Ipoib,
        }
    }
}

impl Run {
    /// On the paper's hosts and its DDR link.
    pub(super) fn new(streams: &[(Kind, u32, u8)], tables: Tables) -> Self {
        Self { streams: streams.to_vec(), tables, slow_link: false, fast_host: false }
    }

    fn plan(&self, quick: bool) -> Result<Plan> {
        let mut plan = Plan::parse(example("qos").context("there is no plan qos")?.text)?;
        let hca = plan.hca.as_mut().context("the plan has no HCA")?;
        let stream = |&(kind, count, sl): &(Kind, u32, u8)| StreamPlan {
            kind: kind.kind(),
            count,
            sl,
            both_ways: matches!(kind, Kind::Mpi | Kind::Eager),
        };
        hca.streams = self.streams.iter().map(stream).collect();
        // The stream of a lane that hardly sends needs more time.
        let factor = match self.tables {
            Tables::Weights(weight) => {
                hca.vlarb_low = format!("0:1 1:{weight}");
                weight
            }
            Tables::Blocking(limit) => {
                hca.vlarb_low = "0:1".into();
                hca.vlarb_high = "1:255".into();
                hca.high_limit = limit;
                limit
            }
        };
        let lasting = self.streams.iter().all(|it| it.0 == Kind::Mpi);
        let ms = match (quick, lasting && factor > 16) {
            (true, false) => 40,
            (true, true) => 200,
            (false, false) => 100,
            (false, true) => 400,
        };
        plan.run.sample = Span(ms * 1_000_000_000);
        if self.slow_link {
            plan.link.rate = Rate(plan.link.rate.0 / 2);
        }
        if self.fast_host {
            hca.dma_slots = 32;
            hca.bus = Rate(400_000_000_000);
            plan.cpu.clock = Clock(2 * plan.cpu.clock.0);
        }
        Ok(plan)
    }
}

/// The hosts, and what is known of them.
#[derive(Default)]
pub(super) struct Hosts {
    pub(super) quick: bool,
    known: BTreeMap<Run, HcaReport>,
}

impl Hosts {
    /// What came of some runs.
    pub(super) fn run(&mut self, runs: &[Run]) -> Result<Vec<HcaReport>> {
        let mut new: Vec<&Run> = runs.iter().filter(|run| !self.known.contains_key(*run)).collect();
        new.sort();
        new.dedup();
        let quick = self.quick;
        let reports = map_all(&new, |run| {
            run_hca(&run.plan(quick)?).with_context(|| format!("the run of {run:?}"))
        })?;
        self.known.extend(new.into_iter().cloned().zip(reports));
        Ok(runs.iter().map(|run| self.known[run].clone()).collect())
    }
}

/// Gbit/s of all streams of a service level.
pub(super) fn of_level(report: &HcaReport, sl: u8) -> f64 {
    report.streams.iter().filter(|it| it.sl == sl).map(|it| it.gbps).sum()
}
