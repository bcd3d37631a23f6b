//! What came of a run: numbers, tables, JSON and figures.

mod svg;
mod table;

use serde::{Deserialize, Serialize};

use crate::hca::HcaReport;
use crate::lanai::{LanaiReport, StageTime};
use crate::ledger::{Category, Ledger};
use crate::plan::Plan;
use crate::run::Snapshot;
use crate::world::{MACHINE, World};

pub use svg::figure;
pub use table::{breakdown, table};

/// The results of a run. Rates are of the sample, without the warm-up.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Report {
    /// The plan's name.
    pub name: String,
    /// Frames received and sent at the NIC, in Gbit/s: M5's measure of bandwidth.
    pub gbps: f64,
    /// The received part.
    pub rx_gbps: f64,
    /// The sent part.
    pub tx_gbps: f64,
    /// Bytes that programs received and sent, in Gbit/s.
    pub goodput_gbps: f64,
    /// Requests of programs in each second.
    pub requests_per_second: f64,
    /// Cache misses of the cores for each KB of frames.
    pub misses_per_kb: f64,
    /// Accesses of the cores to the last-level cache for each KB of frames.
    pub l2_accesses_per_kb: f64,
    /// Interrupts for each KB of frames.
    pub interrupts_per_kb: f64,
    /// Bits carried in each cycle of all cores.
    pub bits_per_cycle: f64,
    /// Main memory's traffic, in Gbit/s.
    pub dram_gbps: f64,
    /// Percent of the cores' time in each category.
    pub cpu: Vec<Share>,
    /// What the firmware of a LANai spends in each stage.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub stages: Vec<StageTime>,
    /// The streams of an HCA.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub hca: Option<HcaReport>,
    /// Frames that the NIC had no room for.
    pub dropped: u64,
    /// Frames that were lost on links and in the switch, warm-up included.
    pub lost: u64,
    /// Segments that the machine's TCP sent again, warm-up included.
    pub retransmitted: u64,
    /// Events of the run.
    pub events: u64,
    /// Simulated time in milliseconds, warm-up included.
    pub simulated_ms: f64,
    /// The same for each run of the same plan.
    pub trace_hash: String,
}

/// A category's part of the cores' time.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Share {
    /// The category.
    pub category: Category,
    /// Percent.
    pub percent: f64,
}

impl Report {
    /// What happened between two snapshots.
    pub(crate) fn new(plan: &Plan, world: &World, before: &Snapshot, after: &Snapshot) -> Self {
        let ps = (after.at - before.at).max(1) as f64;
        let gbps = |bytes: u64| bytes as f64 * 8000.0 / ps;
        let rx = after.traffic.rx_bytes - before.traffic.rx_bytes;
        let tx = after.traffic.tx_bytes - before.traffic.tx_bytes;
        let per_kb = |count: u64| count as f64 / ((rx + tx).max(1) as f64 / 1024.0);
        let mut ledger = Ledger::default();
        for (before, after) in before.ledgers.iter().zip(&after.ledgers) {
            ledger.merge(&after.since(before));
        }
        let total = ledger.total().max(1) as f64;
        let cpu = Category::ALL.map(|category| Share {
            category,
            percent: ledger.of(category) as f64 * 100.0 / total,
        });
        let memory = (&after.memory, &before.memory);
        let goodput: u64 = (0..2).map(|way| after.goodput[way] - before.goodput[way]).sum();
        let cycles = plan.cpu.clock.0 as f64 * ps / 1e6 * f64::from(plan.cpu.cores);
        let host = &world.hosts[MACHINE];
        Self {
            name: plan.name.clone(),
            gbps: gbps(rx + tx),
            rx_gbps: gbps(rx),
            tx_gbps: gbps(tx),
            goodput_gbps: gbps(goodput),
            requests_per_second: (after.requests - before.requests) as f64 * 1e12 / ps,
            misses_per_kb: per_kb(memory.0.l2_misses - memory.1.l2_misses),
            l2_accesses_per_kb: per_kb(memory.0.l2_accesses - memory.1.l2_accesses),
            interrupts_per_kb: per_kb(after.traffic.interrupts - before.traffic.interrupts),
            bits_per_cycle: (rx + tx) as f64 * 8.0 / cycles.max(1.0),
            dram_gbps: gbps(memory.0.dram_bytes - memory.1.dram_bytes),
            cpu: cpu.to_vec(),
            stages: Vec::new(),
            hca: None,
            dropped: after.traffic.rx_dropped - before.traffic.rx_dropped,
            lost: world.network.lost,
            retransmitted: host.os.retransmitted(),
            events: world.kernel.scheduled(),
            simulated_ms: after.at as f64 / 1e9,
            trace_hash: format!("{:016x}", world.hash),
        }
    }

    /// What two LANai adapters have done. Their hosts only post and poll.
    pub(crate) fn of_lanai(plan: &Plan, lanai: &LanaiReport) -> Self {
        let gbps = lanai.mb_per_s * 8.0 / 1000.0;
        Self {
            requests_per_second: 1e6 / lanai.us,
            stages: lanai.stages.clone(),
            events: lanai.events,
            simulated_ms: lanai.ps as f64 / 1e9,
            trace_hash: format!("{:016x}", lanai.hash),
            ..Self::of_rates(plan, 0.0, gbps)
        }
    }

    /// What the streams of two HCAs have got: payload only.
    pub(crate) fn of_hca(plan: &Plan, hca: HcaReport) -> Self {
        let rate = |from| hca.streams.iter().filter(|it| it.from == from).map(|it| it.gbps).sum();
        Self {
            events: hca.events,
            simulated_ms: hca.simulated_ms,
            trace_hash: format!("{:016x}", hca.hash),
            hca: Some(hca.clone()),
            ..Self::of_rates(plan, rate(1), rate(0))
        }
    }

    /// A report of a machine whose software and caches are not simulated.
    fn of_rates(plan: &Plan, rx_gbps: f64, tx_gbps: f64) -> Self {
        let gbps = rx_gbps + tx_gbps;
        Self {
            name: plan.name.clone(),
            gbps,
            rx_gbps,
            tx_gbps,
            goodput_gbps: gbps,
            requests_per_second: 0.0,
            misses_per_kb: 0.0,
            l2_accesses_per_kb: 0.0,
            interrupts_per_kb: 0.0,
            bits_per_cycle: 0.0,
            dram_gbps: 0.0,
            cpu: Vec::new(),
            stages: Vec::new(),
            hca: None,
            dropped: 0,
            lost: 0,
            retransmitted: 0,
            events: 0,
            simulated_ms: 0.0,
            trace_hash: String::new(),
        }
    }

    /// Percent of the cores' time in a category.
    #[must_use]
    pub fn percent(&self, category: Category) -> f64 {
        self.cpu.iter().find(|share| share.category == category).map_or(0.0, |it| it.percent)
    }
}
