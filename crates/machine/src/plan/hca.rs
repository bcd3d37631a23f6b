//! The part of a plan that describes an HCA, its host and its traffic.

use serde::{Deserialize, Serialize};

use super::check::{Wrong, need, within};
use super::{Bytes, Rate, Span};
use crate::hca;

/// A host channel adapter, the memory of its host, and the streams that use it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct HcaPlan {
    /// Transfers that the DMA controller has under way.
    pub dma_slots: u32,
    /// Bytes of such a transfer.
    pub dma_unit: Bytes,
    /// Time of a transfer without the bus.
    pub dma_latency: Span,
    /// Front-side bus and memory: what cores copy and what devices transfer passes it in turn.
    pub bus: Rate,
    /// Packets that are fetched ahead of the link.
    pub fifo: u32,
    /// Packets of each lane that the receiver has room for: the lane's credits.
    pub buffers: u32,
    /// Virtual lanes of the port.
    pub max_vls: u8,
    /// The lane of each service level, as numbers with commas or spaces between them.
    pub sl2vl: String,
    /// The high priority table: `VL:WEIGHT`, with commas or spaces between entries.
    pub vlarb_high: String,
    /// The low priority table.
    pub vlarb_low: String,
    /// Units of 4096 bytes that the high table may send before the low one sends a packet.
    pub high_limit: u8,
    /// Whether an entry forgets what its packet took beyond the weight, as InfiniBand's rule says.
    pub strict: bool,
    /// Traffic.
    pub streams: Vec<StreamPlan>,
}

/// A protocol of the paper.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum StreamKind {
    /// MPI, rendezvous: no copies.
    Mpi,
    /// MPI, eager: copied at both ends.
    Eager,
    /// Sockets Direct Protocol, buffered copy.
    Sdp,
    /// TCP over IPoIB.
    Ipoib,
}

/// Streams of a kind.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct StreamPlan {
    /// The protocol.
    pub kind: StreamKind,
    /// How many.
    #[serde(default = "one")]
    pub count: u32,
    /// Service level, 0 to 15.
    #[serde(default)]
    pub sl: u8,
    /// Whether there is one in each direction, served by the same cores.
    #[serde(default)]
    pub both_ways: bool,
}

fn one() -> u32 {
    1
}

impl Default for HcaPlan {
    fn default() -> Self {
        Self {
            dma_slots: 4,
            dma_unit: Bytes(512),
            dma_latency: Span(590_000),
            bus: Rate(36_000_000_000),
            fifo: 4,
            buffers: 64,
            max_vls: 8,
            sl2vl: "0,1,2,3,4,5,6,7,0,1,2,3,4,5,6,7".into(),
            vlarb_high: String::new(),
            vlarb_low: "0:1,1:1".into(),
            high_limit: 0,
            strict: false,
            streams: Vec::new(),
        }
    }
}

/// Most streams of a plan, each direction counted.
const MOST_STREAMS: u64 = 64;

impl HcaPlan {
    /// Checks what the types cannot.
    pub(super) fn check(&self) -> Result<(), Wrong> {
        within("hca.dma_slots", self.dma_slots.into(), 1, 1024)?;
        within("hca.dma_unit", self.dma_unit.0, 64, 4096)?;
        within("hca.dma_latency", self.dma_latency.0, 1000, 1_000_000_000)?;
        within("hca.bus", self.bus.0, 100_000_000, 100_000_000_000_000)?;
        within("hca.fifo", self.fifo.into(), 1, 1024)?;
        within("hca.buffers", self.buffers.into(), 1, 1024)?;
        let config = hca::tables(self);
        need(config.is_ok(), "hca", || config.as_ref().err().cloned().unwrap_or_default())?;
        let ways = |stream: &StreamPlan| u64::from(stream.count) << u32::from(stream.both_ways);
        let streams = self.streams.iter().fold(0u64, |sum, it| sum.saturating_add(ways(it)));
        within("hca.streams", streams, 1, MOST_STREAMS)?;
        for stream in &self.streams {
            within("hca.streams", stream.sl.into(), 0, 15)?;
            let lane = config.as_ref().ok().and_then(|config| config.lane_of(stream.sl));
            need(lane.is_some(), "hca.streams", || {
                format!("sl2vl drops service level {}, which has a stream", stream.sl)
            })?;
        }
        Ok(())
    }
}
