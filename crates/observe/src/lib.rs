//! What an engine lets one see of it, as bytes for others to show.
//!
//! [`Capture`] turns the bytes of streams, and the messages of channels that no stream carries, into
//! packets in a pcapng file that Wireshark decodes as iWARP. A [`Sample`] is what an engine did so far;
//! [`prometheus()`] shows several.
//!
//! This crate does no I/O and reads no clock: what happened goes in, with its time; bytes come out.
#![forbid(unsafe_code)]

mod capture;
mod flow;
mod frame;
mod ipoib;
mod packet;
mod pcapng;
mod prometheus;
mod roce;
mod sample;

pub use capture::{Capture, Limits, Message, Pair, Passed, StreamEnds, StreamId};
pub use ipoib::{IpoibCapture, IpoibEnds};
pub use packet::{Direction, Mark};
pub use pcapng::Interface;
pub use prometheus::{CONTENT_TYPE, prometheus};
pub use quipu_iwarp::wire::hello::Hello;
pub use roce::{SdpCapture, SdpEnds};
pub use sample::{
    DROP_REASONS, ENGINE, ENGINE_METRICS, LANE, LANE_METRICS, LANES, MAX_BYTES, MAX_QUEUE_PAIRS,
    Metric, NoSample, PATHS, QueuePair, REASONS, STATES, STATUSES, Sample, WORK, WORK_METRICS,
};
