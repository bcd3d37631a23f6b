//! `libqpip.so.1`: queue pairs over TCP and UDP for C programs, in the words of the QPIP paper. The header is
//! `include/qpip.h`, the manual page `man/qpip.7`.
//!
//! Each adapter is an engine of its own ([`quipu_host::Engine`]); this library checks pointers, calls it, and
//! says what failed. Objects are [`quipu_cabi::Handle`]s: a program knows an address, behind which is what
//! the library needs. Each holds the adapter that it belongs to.
//!
//! | module | holds |
//! |---|---|
//! | `adapter`, `memory`, `cq`, `qp` | objects |
//! | `connection` | ports, connecting, ends of connections |
//! | `settings` | how connections are to be |
//! | `event` | what happens to connections |
//! | `work` | posting |
//! | `error` | what failed, as a number and in words |
//! | `exit` | the end of the process |
//! | `address` | addresses of the C library |
//!
//! What is exported is in `symbols.txt`; crate `quipu-abi-exports` says how.
#![allow(non_camel_case_types)]

pub mod adapter;
mod address;
pub mod connection;
pub mod cq;
pub mod error;
pub mod event;
mod exit;
pub mod memory;
pub mod qp;
pub mod settings;
pub mod work;

#[cfg(test)]
mod tests;

// The unit tests are a program, which has no versions to define.
#[cfg(not(test))]
include!(concat!(env!("OUT_DIR"), "/exports.rs"));
