//! The Virtual Interface Architecture (VI Architecture Specification 1.0; Intel's VI Provider Library
//! guide) as state machines: states of a VI, descriptors, work queues, completion queues, the matching of
//! connection requests, and the messages that set a connection up.
//!
//! It contains no I/O, no clock and no unsafe code. `abi/vipl` gives it the bytes of descriptors, hands
//! its requests to an adapter, and tells it what completed.
//!
//! | module | holds |
//! |---|---|
//! | `codes` | what calls return; bits of a descriptor's status; asynchronous errors |
//! | `attributes` | attributes of a VI, their checks and their comparison |
//! | `descriptor` | a descriptor's bytes as a request |
//! | `queue` | a work queue: what waits, what the adapter has, what is done |
//! | `vi` | the state of a VI and its two work queues |
//! | `cq` | completion queues |
//! | `address` | addresses with discriminators, and the TCP ports they lead to |
//! | `message` | the messages of connection set-up |
//! | `meeting` | which request meets which wait |
#![forbid(unsafe_code)]

pub mod address;
pub mod attributes;
pub mod codes;
pub mod cq;
pub mod descriptor;
pub mod meeting;
pub mod message;
pub mod queue;
pub mod vi;
