//! A drop-in `librdmacm.so.1`: the connection manager of rdma-core over the engine of Quipu.
//!
//! The engine ([`quipu_abi_types::EngineCmApi`]) does what the kernel's `rdma_ucm` does:
//! identifiers, addresses, messages between peers, events. This library owns what C programs see: the
//! structures of rdma_cma.h, and the protection domain, queues and queue pair of an identifier,
//! which it makes and moves with calls of libibverbs, like any other program. Both libraries find
//! the same engine.
//!
//! | module | holds |
//! |---|---|
//! | `verbs` | the calls of libibverbs |
//! | `device` | opened devices and their default protection domains, shared by all identifiers |
//! | `channel`, `event` | event channels; what each event means for its identifier; acknowledging |
//! | `id`, `children`, `address` | identifiers: life, channel, addresses, options |
//! | `qp`, `srq`, `state` | an identifier's queues; moving its queue pair through its states |
//! | `connect` | connect, accept, reject, disconnect |
//! | `endpoint` | `rdma_create_ep` and `rdma_get_request` |
//! | `addrinfo`, `names` | `rdma_getaddrinfo`; `rdma_resolve_addrinfo`, whose answer an event announces |
//! | `multicast` | joining and leaving groups |
//! | `ece` | enhanced connection establishment: options of vendors |
//! | `rsocket` | the r* calls of rsocket.h |
//!
//! What is exported, under which version, is in `symbols.txt`; crate `quipu-abi-exports` says how.
//!
//! # Threads
//!
//! Any call from any thread. No lock is held while a call waits. Calls on one identifier must not
//! overlap with its destruction, as everywhere in rdma_cm; reading events may.
#![allow(non_camel_case_types)]

mod acks;
pub mod address;
pub mod addrinfo;
pub mod channel;
mod children;
pub mod connect;
pub mod device;
pub mod ece;
pub mod endpoint;
pub mod event;
pub mod id;
pub mod multicast;
pub mod names;
mod native;
pub mod qp;
pub mod rsocket;
pub mod srq;
mod state;
mod verbs;

// The unit tests are a program, which has no versions to define.
#[cfg(not(test))]
include!(concat!(env!("OUT_DIR"), "/exports.rs"));
