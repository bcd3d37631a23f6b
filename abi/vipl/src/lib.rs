//! `libvipl.so.1`: the VI Provider Library (VIPL) for C programs. The header is `include/vipl.h`, the
//! manual page `man/vipl.7`; `docs/vipl.md` has each call with each code that it returns.
//!
//! The state machines are those of `quipu-via`, the adapter is that of `quipu`. This library checks
//! handles and pointers, sets connections up over TCP, and has the threads that wait.
//!
//! | module | holds |
//! |---|---|
//! | `nic` | NICs, their one lock, and waiting |
//! | `handle` | handles of all objects |
//! | `memory` | tags and registered memory |
//! | `vi`, `work`, `cq` | VIs, descriptors, completion queues |
//! | `ring` | requests to the adapter, completions from it |
//! | `accept`, `request`, `peer` | connections |
//! | `control`, `doorstep` | the thread that listens and watches |
//! | `callback` | functions of the program, asynchronous errors |
//! | `names` | the name service |
//! | `touch` | the program's memory |
//!
//! Locks are taken in this order: the state of a NIC, then what `control` or `callback` guards. No lock is
//! held while a function of the program runs.
//!
//! What is exported is in `symbols.txt`; crate `quipu-abi-exports` says how.
#![allow(non_camel_case_types, non_snake_case)]

pub mod accept;
mod bell;
pub mod callback;
mod control;
pub mod cq;
mod doorstep;
mod handle;
pub mod memory;
pub mod names;
pub mod nic;
pub mod peer;
pub mod request;
mod ring;
mod touch;
pub mod types;
pub mod vi;
pub mod work;

// The unit tests are a program, which has no versions to define.
#[cfg(not(test))]
include!(concat!(env!("OUT_DIR"), "/exports.rs"));
