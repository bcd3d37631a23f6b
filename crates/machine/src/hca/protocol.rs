//! What a stream of each protocol costs.

use std::collections::BTreeMap;

use serde::Deserialize;

use crate::error::RunError;
use crate::plan::StreamKind;

const TABLE: &str = include_str!("../../costs/hca.toml");

/// A protocol that copies at both ends.
#[derive(Clone, Copy, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Copied {
    /// Cycles of a core for each KB.
    pub(super) cycles_per_kb: u64,
    /// Cycles of a core for each buffer.
    pub(super) cycles_per_buffer: u64,
    /// Bytes on the bus for a hundred bytes that a core copies.
    pub(super) bus_percent: u64,
    /// Bytes that a core copies before others get the bus.
    pub(super) copy_unit: u64,
    /// Bytes of a buffer.
    pub(super) buffer: u64,
    /// Buffers of a stream that are under way, from the sender's copy to the receiver's.
    pub(super) buffers: u64,
    /// Nanoseconds until the sender learns that a buffer is free.
    pub(super) credit_ns: u64,
}

/// A protocol that does not copy.
#[derive(Clone, Copy, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct ZeroCopy {
    /// Bytes that are under way before both ends synchronise.
    pub(super) window: u64,
    /// Nanoseconds that this takes.
    pub(super) gap_ns: u64,
}

/// All protocols.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Protocols {
    #[allow(dead_code)]
    about: String,
    pub(super) mpi: ZeroCopy,
    eager: Copied,
    sdp: Copied,
    ipoib: Copied,
}

impl Protocols {
    /// Those of the paper's hosts, with other values from a plan: `sdp_buffers` is `buffers` of `sdp`.
    pub(super) fn new(other: &BTreeMap<String, u64>) -> Result<Self, RunError> {
        let wrong = |error: String| RunError::Costs(error);
        let mut table: toml::Table = toml::from_str(TABLE).map_err(|it| wrong(it.to_string()))?;
        for (name, value) in other {
            let place = name
                .split_once('_')
                .and_then(|(protocol, key)| table.get_mut(protocol)?.as_table_mut()?.get_mut(key));
            let Some(place) = place else {
                let known = "PROTOCOL_KEY, such as sdp_buffers, as in costs/hca.toml";
                return Err(wrong(format!("there is no `{name}`: give {known}")));
            };
            *place = toml::Value::Integer((*value).try_into().unwrap_or(i64::MAX));
        }
        let protocols: Self =
            table.try_into().map_err(|it: toml::de::Error| wrong(it.to_string()))?;
        protocols.check().map_err(wrong)?;
        Ok(protocols)
    }

    /// Refuses what a run would not end with.
    fn check(&self) -> Result<(), String> {
        let within = |name: &str, value: u64, low: u64, high: u64| {
            let holds = (low..=high).contains(&value);
            holds.then_some(()).ok_or_else(|| format!("{name}: {value} is not in {low} to {high}"))
        };
        within("mpi_window", self.mpi.window, 1 << 10, 1 << 30)?;
        within("mpi_gap_ns", self.mpi.gap_ns, 1, 1_000_000_000)?;
        for (name, it) in [("eager", &self.eager), ("sdp", &self.sdp), ("ipoib", &self.ipoib)] {
            within(&format!("{name}_cycles_per_kb"), it.cycles_per_kb, 1, 1 << 20)?;
            within(&format!("{name}_cycles_per_buffer"), it.cycles_per_buffer, 0, 1 << 30)?;
            within(&format!("{name}_bus_percent"), it.bus_percent, 0, 10_000)?;
            within(&format!("{name}_copy_unit"), it.copy_unit, 64, 1 << 20)?;
            within(&format!("{name}_buffer"), it.buffer, 1 << 10, 1 << 20)?;
            within(&format!("{name}_buffers"), it.buffers, 1, 1024)?;
            within(&format!("{name}_credit_ns"), it.credit_ns, 1, 1_000_000_000)?;
        }
        Ok(())
    }

    /// The costs of a protocol; none if it does not copy.
    pub(super) fn copied(&self, kind: StreamKind) -> Option<Copied> {
        match kind {
            StreamKind::Mpi => None,
            StreamKind::Eager => Some(self.eager),
            StreamKind::Sdp => Some(self.sdp),
            StreamKind::Ipoib => Some(self.ipoib),
        }
    }
}
