//! The programmable NIC of the QPIP paper: a LANai 9 that runs queue pairs, TCP and UDP in firmware.
//!
//! The firmware is [`quipu_nic::Adapter`]: its four state machines, whose probe tells which stages a frame
//! went through. Each stage occupies the one processor for the time of the paper's tables 2 and 3
//! (`costs/lanai.toml`). Transmit and receive take turns, stage by stage. While one of them waits for its DMA
//! engine or for the link, the other goes on. The host posts and polls.
//!
//! | module | is |
//! |---|---|
//! | `firmware` | the costs, and the order of stages |
//! | `end` | a host: an adapter with a queue pair |
//! | `pair` | two hosts on a link, as events |

mod end;
mod firmware;
mod pair;

use crate::error::RunError;
use crate::plan::{FaultPlan, Plan, Rate, Transport, WorkloadKind};

pub use firmware::{Firmware, Stage, StageTime};
use pair::Pair;

/// What runs on two such adapters.
#[derive(Clone, Debug, PartialEq)]
pub struct LanaiPlan {
    /// Bytes of a packet on the network.
    pub mtu: u32,
    /// Rate of the network.
    pub rate: Rate,
    /// Frames lost of a million.
    pub loss_ppm: u32,
    /// Decides which.
    pub seed: u64,
    /// Bytes of a message.
    pub message: u32,
    /// Messages under way; 1 bounces a message between the hosts.
    pub depth: u32,
    /// Whether the message comes back (a round trip) or goes one way (throughput).
    pub bounce: bool,
    /// Whether messages are datagrams (UDP), not segments (TCP).
    pub datagrams: bool,
    /// Whether the receiving firmware computes checksums, or the paper's emulation of hardware does.
    pub firmware_checksum: bool,
    /// Messages that are counted.
    pub messages: u32,
    /// Most events of the run.
    pub max_events: u64,
    /// Link loss, and stalls of the first adapter's processor. Interrupts cannot get lost: there are none.
    pub faults: Vec<FaultPlan>,
}

impl LanaiPlan {
    /// What a plan of a machine means for a LANai.
    pub(crate) fn of(plan: &Plan) -> Self {
        let bounce = plan.workload.kind == WorkloadKind::Rr;
        let message = if bounce { plan.workload.request.0 } else { plan.workload.message.0 };
        Self {
            mtu: plan.link.mtu,
            rate: plan.link.rate,
            loss_ppm: plan.link.loss_ppm,
            seed: plan.seed,
            message: message.clamp(1, 64 << 10) as u32,
            depth: if bounce { 1 } else { plan.workload.outstanding },
            bounce,
            datagrams: plan.workload.transport == Transport::Udp,
            firmware_checksum: plan.nic.firmware_checksum,
            messages: 1000,
            max_events: plan.run.max_events,
            faults: plan.faults.clone(),
        }
    }
}

/// What came of it.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct LanaiReport {
    /// Payload in MB/s (10^6 bytes).
    pub mb_per_s: f64,
    /// Time of a message, or of its round trip, in microseconds.
    pub us: f64,
    /// What the firmware spent in each stage: tables 2 and 3, as they came out.
    pub stages: Vec<StageTime>,
    /// Frames that were sent, both ends.
    pub frames: u64,
    /// Events, simulated time in picoseconds.
    pub events: u64,
    /// Simulated time in picoseconds.
    pub ps: u64,
    /// The same for each run of the same plan.
    pub hash: u64,
}

/// Runs two adapters.
///
/// # Errors
/// The messages do not arrive, or arrive with other bytes, or the adapter refuses a call.
pub fn run_lanai(plan: &LanaiPlan) -> Result<LanaiReport, RunError> {
    let firmware = Firmware::published()?;
    let mut pair =
        Pair::new(plan, firmware.clone()).map_err(|fault| RunError::Adapter(fault.to_string()))?;
    // The first messages open the window.
    let warmup = plan.messages / 4 + 1;
    pair.until(warmup)?;
    let begun = pair.kernel.now();
    let messages = plan.messages.max(1);
    pair.until(warmup + messages)?;
    let us = (pair.kernel.now() - begun) as f64 / 1e6 / f64::from(messages);
    // The receiver may be in the middle of a message, but that is the same each time.
    if pair.ends[0].bytes() != pair.ends[1].bytes() {
        return Err(RunError::Adapter(
            "the bytes that arrived are not those that were sent".into(),
        ));
    }
    Ok(LanaiReport {
        mb_per_s: f64::from(plan.message) / us,
        us,
        stages: pair.occupancy.averages(&firmware),
        frames: pair.frames,
        events: pair.kernel.scheduled(),
        ps: pair.kernel.now(),
        hash: pair.hash,
    })
}

#[cfg(test)]
mod tests;
