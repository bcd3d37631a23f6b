//! A drop-in `libibverbs.so.1`: the C interface of rdma-core over the engine of Quipu.
//!
//! This library owns what C programs see (contexts, queues, their tables of functions, `errno`)
//! and nothing else. Each object is a [`quipu_cabi::Handle`]: the structure of verbs.h, followed by
//! the engine's handle. Entry points check the pointer, call the engine
//! ([`quipu_abi_types::EngineApi`]) and translate its status; work requests and completions pass
//! through unchanged.
//!
//! | module | holds |
//! |---|---|
//! | `engine` | finding the engine, statuses to `errno` (crate `quipu-facade`) |
//! | `device`, `context`, `query` | the device list, opening, what is asked about a device |
//! | `pd`, `xrcd`, `mr`, `dm`, `cq`, `srq`, `qp`, `ah` | objects |
//! | `mapping`, `buf`, `import` | regions over files, buffers, objects found by their numbers |
//! | `cq_ex`, `wall`, `qp_ex` | polling field by field, stamps by the clock on the wall, posting call by call |
//! | `event`, `acks` | completion and asynchronous events, and waiting for their acknowledgement |
//! | `text`, `sysfs`, `fork` | names of constants, files, fork |
//! | `stub`, `private` | symbols that exist so that programs and providers load |
//!
//! What is exported, under which version, is in `symbols.txt`; crate
//! `quipu-abi-exports` says how.
#![allow(non_camel_case_types)]

mod acks;
pub mod ah;
pub mod buf;
pub mod context;
pub mod counters;
pub mod cq;
pub mod cq_ex;
pub mod device;
pub mod dm;
pub mod event;
pub mod flow;
pub mod fork;
pub mod import;
mod mapping;
pub mod mr;
mod object;
pub mod pd;
pub mod private;
pub mod qp;
pub mod qp_ex;
pub mod query;
pub mod srq;
pub mod stub;
pub mod sysfs;
pub mod text;
pub mod wall;
mod wq;
pub mod xrcd;

use quipu_facade as engine;

#[cfg(test)]
mod tests;

// The unit tests are a program, which has no versions to define.
#[cfg(not(test))]
include!(concat!(env!("OUT_DIR"), "/exports.rs"));
