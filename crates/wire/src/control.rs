//! Quipu's control message: acknowledgement, receiver not ready, resume (`specs/quipu-wire.md` 4).
//!
//! Counts are cumulative counts of request messages in stream order, from 0, modulo 2^32.

use crate::field::{exactly, put, u32_at};
use crate::{Payload, WireError};

const KIND_ACK: u8 = 1;
const KIND_RNR_NAK: u8 = 2;
const KIND_RESUME: u8 = 3;
const MAX_TIMER: u8 = 31;

/// Payload of a control message on untagged queue 4.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Control {
    /// The first `count` requests are executed.
    Ack {
        /// Number of requests executed since the connection began, modulo 2^32.
        count: u32,
    },
    /// Requests before number `count` are executed; number `count` found no receive, and all that
    /// follow it are dropped until [`Control::Resume`].
    RnrNak {
        /// Number of the refused request, counted from 0.
        count: u32,
        /// RNR NAK timer code, 0 to 31 (InfiniBand Architecture 1, 9.7.5.2.8): how long the
        /// requester waits.
        timer: u8,
    },
    /// The requester begins again with request number `count`.
    Resume {
        /// Number of the request that follows.
        count: u32,
    },
}

impl Control {
    /// Length on the wire.
    pub const LEN: usize = 16;

    /// Reads the payload, which must be of exactly [`Control::LEN`] bytes. Reserved bytes are
    /// ignored, and so is the code of kinds that have none.
    pub fn parse(bytes: &[u8]) -> Result<Self, WireError> {
        exactly(bytes, Self::LEN)?;
        let count = u32_at(bytes, 4);
        match bytes[0] {
            KIND_ACK => Ok(Control::Ack { count }),
            KIND_RNR_NAK if bytes[1] > MAX_TIMER => Err(WireError::OutOfRange("RNR timer code")),
            KIND_RNR_NAK => Ok(Control::RnrNak { count, timer: bytes[1] }),
            KIND_RESUME => Ok(Control::Resume { count }),
            unknown => Err(WireError::UnknownControl(unknown)),
        }
    }
}

impl Payload for Control {
    fn wire_len(&self) -> usize {
        Self::LEN
    }

    fn emit(&self, out: &mut [u8]) {
        let (kind, code, count) = match *self {
            Control::Ack { count } => (KIND_ACK, 0, count),
            Control::RnrNak { count, timer } => (KIND_RNR_NAK, timer & MAX_TIMER, count),
            Control::Resume { count } => (KIND_RESUME, 0, count),
        };
        out[..Self::LEN].fill(0);
        out[0] = kind;
        out[1] = code;
        put(out, 4, count.to_be_bytes());
    }
}
