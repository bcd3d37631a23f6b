//! The network block device protocol (NBD) as state machines without I/O: no sockets, no clock, no threads.
//!
//! Both ends are *pull parsers*. [`Server::wants`] and [`Client::wants`] say how many bytes come next, and
//! `input` takes exactly these. So a host reads each header with one call and never copies it, the payload of
//! a write goes straight from the transport into the buffer of the disk, and nothing is buffered here beyond
//! [`MAX_OPTION`] bytes. What is to be sent comes out of `output`, and what happened comes back as an event.
//!
//! | module | is |
//! |---|---|
//! | [`wire`] | numbers and headers of the protocol, as bytes and as values |
//! | [`Server`] | the server's end: negotiation, then requests for a back end |
//! | [`Client`] | the client's end: negotiation, then requests to a server |
//! | [`messages`] | both ends over queue pairs, whose data move by RDMA |
//! | [`schedule`] | a client's requests over connections that may be lost: their order, and what is repeated |
//! | [`uri`] | NBD URIs, with schemes for the queue-pair transports |
//!
//! Source: the protocol description of the NBD project (`doc/proto.md`): fixed newstyle negotiation,
//! structured replies, extended headers, metadata contexts with `base:allocation`.

#![forbid(unsafe_code)]

mod client;
mod export;
pub mod messages;
pub mod schedule;
mod server;
pub mod uri;
pub mod wire;

pub use client::{Client, ClientEvent, Handshake, Reply};
pub use export::{BlockSizes, Export, Extent};
pub use server::{Server, ServerEvent, ServerOptions, Want};
pub use wire::{Command, CommandFlags, Errno, ProtocolError, Request, TransmissionFlags};

/// Longest data of a negotiation option that either end takes, in bytes.
pub const MAX_OPTION: u32 = 64 * 1024;
/// Longest payload of one request that the server takes, in bytes: what every client may assume.
pub const MAX_PAYLOAD: u32 = 32 * 1024 * 1024;
/// Longest name of an export, in bytes.
pub const MAX_NAME: usize = 4096;
