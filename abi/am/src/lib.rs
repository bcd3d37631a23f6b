//! `libam.so.1`: Active Messages (AM-II) for C programs, in the words of AMUDP and of UDPAM. The
//! headers are `include/amudp.h` and `include/udpam.h`, the manual page `man/am.7`.
//!
//! All of it is `quipu::am` on an adapter that the library opens for the process; this library
//! checks pointers, and calls the functions of the program with as many arguments as a message has.
//!
//! | module | holds |
//! |---|---|
//! | `process` | the port of the process, from the first bundle to the last `AM_Terminate` |
//! | `bundle`, `endpoint` | objects and their tables |
//! | `message` | requests, replies, tokens |
//! | `spmd` | starting N processes that know each other |
//! | `udpam` | what the older dialect has besides |
//! | `call` | calling functions of the program |
//! | `codes` | error codes, statuses and opcodes |
//!
//! What is exported is in `symbols.txt`; crate `quipu-abi-exports` says how.
#![allow(non_camel_case_types, non_snake_case)]

pub mod bundle;
mod call;
mod codes;
pub mod endpoint;
pub mod message;
pub mod process;
pub mod spmd;
pub mod statistics;
pub mod udpam;

// The unit tests are a program, which has no versions to define.
#[cfg(not(test))]
include!(concat!(env!("OUT_DIR"), "/exports.rs"));
