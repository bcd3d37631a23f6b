//! The hardware of the QoS paper: two hosts with a host channel adapter each, on an InfiniBand link.
//!
//! The adapter serves virtual lanes by the arbiter of `quipu-qos`. The arbiter chooses the queue pair whose
//! packet is fetched next. The host's DMA controller has few slots for transfers, those of packets that are
//! sent and of packets that came. Each transfer crosses the front-side bus, where it waits for the copies of
//! the cores, and the copies for it.
//!
//! | module | is |
//! |---|---|
//! | `protocol` | what a stream of each protocol costs its cores and the bus, from `costs/hca.toml` |
//! | `stream` | a stream: messages or buffers under way |
//! | `host` | DMA controller, bus, cores |
//! | `fabric` | two hosts and the events that connect them |
//!
//! Not modelled: acknowledgements, the switch's time (packets of one pair of hosts do not meet others there),
//! loss (InfiniBand has none), and caches: what a byte costs the bus is part of `costs/hca.toml`.

mod fabric;
mod host;
mod protocol;
mod stream;

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::error::RunError;
use crate::plan::{Plan, StreamKind};
pub(crate) use fabric::tables;

use fabric::Fabric;
use protocol::Protocols;

/// What a stream got.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct StreamRate {
    /// Its protocol.
    pub kind: StreamKind,
    /// Its service level.
    pub sl: u8,
    /// Its lane.
    pub lane: u8,
    /// The host that sends, 0 or 1.
    pub from: u8,
    /// Payload that the receiving program got, in Gbit/s.
    pub gbps: f64,
    /// Percent of a core that the sender's side used.
    pub send_cpu: f64,
    /// Percent of a core that the receiver's side used.
    pub receive_cpu: f64,
}

/// What came of a run.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct HcaReport {
    /// Each stream, in the order of the plan; of both ways, the way back follows.
    pub streams: Vec<StreamRate>,
    /// Percent of the picks of host 0's arbiter at which more than one lane had a packet.
    pub contested: f64,
    /// Percent of the time that the bus of host 0 was in use.
    pub bus: f64,
    /// Simulated time in milliseconds, warm-up included.
    pub simulated_ms: f64,
    /// Events of the run.
    pub events: u64,
    /// The same for each run of the same plan.
    pub hash: u64,
}

impl HcaReport {
    /// Payload of all streams of a kind, or of all, in Gbit/s.
    #[must_use]
    pub fn gbps(&self, kind: Option<StreamKind>) -> f64 {
        let chosen = self.streams.iter().filter(|it| kind.is_none_or(|kind| it.kind == kind));
        chosen.map(|it| it.gbps).sum()
    }
}

/// Whether the costs that a plan gives are known and in range.
pub(crate) fn check_costs(costs: &BTreeMap<String, u64>) -> Result<(), String> {
    Protocols::new(costs).map(|_| ()).map_err(|error| error.to_string())
}

/// Runs the streams of a plan.
///
/// # Errors
/// The plan has no HCA or tables that make no sense, or the run would not end.
pub fn run_hca(plan: &Plan) -> Result<HcaReport, RunError> {
    let mut fabric = Fabric::new(plan)?;
    let (begin, limit) = (plan.run.warmup.0, plan.run.max_events);
    fabric.run_until(begin, limit)?;
    fabric.begin_sample(begin);
    fabric.run_until(begin + plan.run.sample.0, limit)?;
    Ok(fabric.report(plan.run.sample.0))
}

#[cfg(test)]
mod tests;
