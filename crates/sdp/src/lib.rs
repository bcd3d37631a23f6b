//! The Sockets Direct Protocol (IBA volume 1, annex A4) as a state machine: a byte stream over the
//! messages and RDMA reads of one reliable connection.
//!
//! This crate contains no networking code, no clock and no buffers. The caller owns the receive
//! buffers, posts sends, and performs RDMA reads; [`Connection`] says which, and keeps the books: sequence
//! numbers, credits, advertised buffers, modes and the end of the stream.
//!
//! The order of calls:
//!
//! 1. [`Connection::connect`] with [`Connection::hello`], or [`Connection::accept`] with
//!    [`Connection::hello_ack`]. The caller posts [`Config::buffers`] receives first.
//! 2. Each message that arrives goes to [`Connection::handle_message`], with the number of its receive
//!    buffer. An error means that the peer broke the protocol: end this connection.
//! 3. After any call: post what [`Connection::next_receive`] names, and send what
//!    [`Connection::poll_control`] writes, until both have nothing.
//! 4. To send data: [`Connection::data_room`] and [`Connection::send_data`]; without a copy,
//!    [`Connection::advertise`], then [`Connection::take_source_end`].
//! 5. To receive: [`Connection::readable`], then [`Connection::consume`], or
//!    [`Connection::begin_read`] and [`Connection::finish_read`].
//! 6. At [`Connection::poll_timeout`], call [`Connection::handle_timeout`].
//!
//! Times are in ns of any clock that does not go back. Sent as one SEND each, messages arrive in order,
//! because the connection is reliable.
#![forbid(unsafe_code)]

mod choice;
mod connection;
mod control;
mod credits;
mod incoming;
mod misbehaviour;
mod receive;
pub mod rules;
mod sink;
mod source;

pub use choice::{Choice, Way};
pub use connection::{Connection, Reset};
pub use incoming::Received;
pub use misbehaviour::PeerMisbehaved;
pub use quipu_wire::sdp::Mode;
pub use receive::{Readable, RemoteMemory, Segment};
pub use source::SourceEnd;

/// How long an advertised buffer may wait before the source takes it back, in ns.
pub const ADVERT_NS: u64 = 1_000_000_000;
/// How long the peer may take to answer a cancellation, in ns.
pub const CANCEL_NS: u64 = 5_000_000_000;
/// How long a closed end waits for the end of the peer's stream, in ns.
pub const FIN_WAIT_NS: u64 = 60_000_000_000;

/// Sizes of one end.
#[derive(Clone, Copy, Debug)]
pub struct Config {
    /// Receive buffers. At least 4: the last two credits are for control messages.
    pub buffers: u16,
    /// Bytes of each at first, with headers.
    pub buffer_size: u32,
    /// Bytes to which they grow if the peer wishes it.
    pub max_buffer_size: u32,
    /// Bytes that the peer's receive buffers should have.
    pub wanted_peer_size: u32,
    /// Whether the urgent byte stays in the stream (`SO_OOBINLINE`).
    pub urgent_inline: bool,
}

impl Default for Config {
    fn default() -> Self {
        let size = 32 << 10;
        Self {
            buffers: 64,
            buffer_size: size,
            max_buffer_size: 64 << 10,
            wanted_peer_size: size,
            urgent_inline: false,
        }
    }
}
