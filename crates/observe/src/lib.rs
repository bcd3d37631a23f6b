//! What an engine lets one see of it, as bytes for others to show.
//!
//! [`Capture`] turns the bytes of streams, and the messages of channels that no stream carries, into
//! packets in a pcapng file that Wireshark decodes as iWARP.
//!
//! This crate does no I/O and reads no clock: what happened goes in, with its time; bytes come out.
#![forbid(unsafe_code)]

mod capture;
mod flow;
mod frame;
mod packet;
mod pcapng;

pub use capture::{Capture, Limits, Message, Pair, StreamEnds, StreamId};
pub use packet::Direction;
pub use pcapng::Interface;
pub use quipu_iwarp::wire::hello::Hello;
