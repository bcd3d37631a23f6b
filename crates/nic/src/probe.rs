//! Where time goes: the adapter tells a probe which stage it is in and which bytes it touches.
//!
//! The stages are those of QPIP's tables 2 and 3 (doorbell, schedule, get WR, get data, build headers,
//! send, update; and for receive: media, parse, get WR, put data, update). Of frames (QPIP itself) all are
//! told; of other ways those that there are.
//! A probe that watches is told of messages as well.

use quipu_iwarp::wire::hello::Hello;
use quipu_iwarp::wire::rdmap::{TaggedOp, UntaggedOp};

use crate::transmit::Marking;
use crate::types::{ConnId, Gid, QpNum};

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
    /// A frame came from the link.
    Media,
    /// Its headers were parsed, and what they mean to its connection was found out.
    Parse,
    /// A frame is ready for the link.
    Send,
    /// Payload was placed into registered memory.
    PutData,
    /// States and completions were updated.
    Update,
}

/// Whom a channel joins.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ends {
    /// The queue pair of this adapter.
    pub own: (Gid, QpNum),
    /// That at the other end.
    pub peer: (Gid, QpNum),
    /// Whether `own` is the one that reaches out.
    pub client: bool,
    /// Whether `peer` is in this adapter too. It tells of what it sends itself.
    pub within: bool,
}

/// How a stream would have addressed a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Header {
    /// Into memory.
    Tagged {
        /// What it is.
        op: TaggedOp,
        /// Key of the memory.
        stag: u32,
        /// Where in it.
        to: u64,
    },
    /// Into a queue.
    Untagged {
        /// What it is.
        op: UntaggedOp,
        /// Key to invalidate, or immediate.
        ulp: u32,
    },
}

/// A message that passed through a channel.
#[derive(Clone, Copy, Debug)]
pub struct Passage {
    /// Which channel.
    pub ends: Ends,
    /// Whether this side said it.
    pub outgoing: bool,
    /// The work request of this side that it belongs to.
    pub wr_id: Option<u64>,
    /// How it is marked; `None` if the peer sent it.
    pub marking: Option<Marking>,
    /// How it is addressed.
    pub header: Header,
    /// Bytes of payload.
    pub length: u32,
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

    /// A frame went from this adapter to this adapter: no link has carried it, and its checksum may be open.
    #[inline]
    fn looped(&mut self, frame: &[u8]) {
        let _ = frame;
    }

    /// The next segment of a request that is transmitted over `conn` belongs to the send request `wr_id`.
    #[inline]
    fn written(&mut self, conn: ConnId, wr_id: u64) {
        let _ = (conn, wr_id);
    }

    /// A channel stands; what a stream would have started up with.
    fn joined(&mut self, ends: &Ends, request: &Hello, answer: &Hello) {
        let _ = (ends, request, answer);
    }

    /// A message passed through a channel. `fill` copies its payload from an offset on.
    fn passed(&mut self, passage: &Passage, fill: &mut dyn FnMut(u32, &mut [u8])) {
        let _ = (passage, fill);
    }

    /// A channel is gone.
    fn parted(&mut self, ends: &Ends) {
        let _ = ends;
    }
}

/// The probe that sees nothing.
#[derive(Clone, Copy, Debug, Default)]
pub struct NoProbe;

impl Probe for NoProbe {}
