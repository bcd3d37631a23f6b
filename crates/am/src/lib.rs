//! Active Messages (AM-II) on queue pairs: an engine that has no I/O of its own.
//!
//! This crate contains no networking code, no clock, no thread and no unsafe code. It decides what
//! is posted to queue pairs (trait [`Fabric`]), and takes in what comes of that ([`Event`]).
//! `quipu::am` puts it on the adapter of a process, and runs the handlers.
//!
//! | module | is |
//! |---|---|
//! | `core` | the engine: requests, deliveries, replies, connections, credits |
//! | [`fabric`] | what it needs of queue pairs |
//! | [`datagram`] | reliable connections over datagrams, as such queue pairs |
//! | [`memory_lanes`] | lanes of simulated processes |
//! | [`message`] | messages as bytes |
//! | `conn`, `endpoint`, `records` | state: of connections, of endpoints, of requests under way |
//! | [`name`] | names of endpoints |
//! | [`pair`] | two engines that are connected through memory, for measurements |
//! | [`types`] | tags, statuses, limits |
//!
//! # How processes find each other
//!
//! An endpoint has a [`Name`] of [`Name::WIRE_LEN`] opaque bytes. N processes that are to talk
//! exchange these by any key-value space that can `put`, `get` and `fence`, such as that of a
//! launcher:
//!
//! ```text
//! put("am.RANK", endpoint.name().to_bytes());
//! fence();
//! for rank in 0..size {
//!     endpoint.map(rank, Name::from_bytes(get("am.RANK")), tag of that rank);
//! }
//! ```
//!
//! Mapping sends nothing: a connection is made at the first request, and tried for
//! [`Config::give_up_ns`], so that a peer may start late. It is fine to map all peers.
//!
//! # Connections, credits and memory
//!
//! A translation that is used has one connection of a reliable queue pair: the end that has the
//! translation sends requests over it, the other end sends answers. Each request gets exactly one
//! answer: the program's reply, an acknowledgement, or the reason of a refusal. An answer returns
//! the credit that the request used.
//!
//! All queue pairs of a port take receives from one shared queue. Every message that may come has a
//! receive there: one for each credit that a peer holds, one for the answer to each own request. A
//! peer that is silent costs two receives and some hundred bytes, whatever the number of endpoints.
//!
//! A request goes to its handler only when a buffer for the reply is free, so replies never wait.
#![forbid(unsafe_code)]

mod conn;
mod core;
pub mod datagram;
mod endpoint;
pub mod fabric;
pub mod memory_lanes;
pub mod message;
pub mod name;
pub mod pair;
mod records;
pub mod slab;
pub mod types;

pub use crate::conn::{Conn, ConnId};
pub use crate::core::{
    Body, Core, Delivery, DeliveryKind, FromLane, Outgoing, Payload, Replied, ReplyTicket, Sent,
    Ticket,
};
pub use crate::endpoint::{Bundle, BundleId, Counters, Endpoint, EndpointId};
pub use crate::fabric::{
    Event, Fabric, Hello, LaneAddress, Line, Local, Pushed, Refusal, Remote, Welcome,
};
pub use crate::name::Name;
pub use crate::types::{
    Arg, CallError, Category, Config, MAX_ARGS, MAX_HANDLERS, MAX_TRANSLATIONS, Mode, Operation,
    Status, Tag,
};
