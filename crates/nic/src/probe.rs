//! Where time goes: the adapter tells a probe which stage it is in and which bytes it touches.
//!
//! The stages are those of QPIP's tables 2 and 3 (doorbell, schedule, get WR, get data, build headers,
//! send, update; and for receive: media, parse, get WR, put data, update).
//! A probe that watches is told of messages as well.

use crate::types::ConnId;

/// A stage of the adapter's work.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Stage {
    /// A posted request was noticed.
    Doorbell,
    /// The next endpoint to serve was picked.
    Schedule,
    /// A work request was read.
    GetWr,
    /// Payload was fetched from registered memory.
    GetData,
    /// Headers were built or parsed.
    Headers,
    /// Payload was placed into registered memory.
    PutData,
    /// States and completions were updated.
    Update,
}

/// Is told what the adapter does. The default methods do nothing and compile to nothing.
pub trait Probe {
    /// `stage` touched `bytes` bytes.
    #[inline]
    fn stage(&mut self, stage: Stage, bytes: usize) {
        let _ = (stage, bytes);
    }

    /// Whether it wants to be told of messages; else the methods below are not called.
    #[inline]
    fn watches(&self) -> bool {
        false
    }

    /// The next segment of a request that is transmitted over `conn` belongs to the send request `wr_id`.
    #[inline]
    fn written(&mut self, conn: ConnId, wr_id: u64) {
        let _ = (conn, wr_id);
    }
}

/// The probe that sees nothing.
#[derive(Clone, Copy, Debug, Default)]
pub struct NoProbe;

impl Probe for NoProbe {}
