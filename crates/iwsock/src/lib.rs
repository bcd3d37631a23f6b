//! A TCP connection of a sockets program that both ends have switched to iWARP: posted sends, receives,
//! RDMA writes and reads, and their completions, over plain MPA, DDP and RDMAP (`quipu_iwarp`). This crate
//! contains no I/O: no socket, no thread, no clock. `abi/iwsock` supplies those.
//!
//! An [`Endpoint`] is driven so:
//!
//! 1. Bytes that arrive go into [`Endpoint::space`], then [`Endpoint::received`] tells their number, or
//!    [`Endpoint::ended`] that there are no more.
//! 2. [`Endpoint::prepare`] frames what is posted; [`Endpoint::outgoing`] is to be sent, and
//!    [`Endpoint::sent`] tells how much of it was.
//! 3. [`Endpoint::poll_send`] and [`Endpoint::poll_receive`] give completions.
//!
//! The application's memory is reached by addresses only, through [`Memory`]. A Write or a Read of the
//! peer touches registered regions only, and never more than their bytes.
//!
//! A Send for which no receive is posted is kept, up to [`MAX_UNCLAIMED`]; then nothing more is taken from
//! the stream until the program posts a receive, or reads. So the peer is held up by TCP, and the
//! connection survives, other than on a queue pair.
#![forbid(unsafe_code)]

pub mod counters;
mod endpoint;
mod incoming;
mod outgoing;
mod regions;

pub use endpoint::{
    Completion, Config, Endpoint, Failure, Operation, PostError, Role, Span, Status,
};
pub use outgoing::Piece;
pub use regions::{Access, Memory};

/// Bytes of Sends without a receive that an endpoint keeps.
pub const MAX_UNCLAIMED: usize = 256 * 1024;
/// Works of each kind that may be posted and not complete.
pub const MAX_POSTED: usize = 1024;
/// Spans of one work.
pub const MAX_SPANS: usize = 64;
/// Regions of one endpoint.
pub const MAX_REGIONS: usize = 1024;
/// RDMA reads that an endpoint answers at a time, and that it wants to have outstanding.
pub const READ_DEPTH: u16 = 16;
