//! The simulated world: adapters on seeded links with faults, and the checkers that watch them.
//!
//! The adapter here is the very one that real programs use ([`quipu_nic::Adapter`]). Below it, instead
//! of kernel sockets and shared memory, is a world in virtual time; above it, instead of programs, a
//! workload that knows what must come of everything it does. A seed decides all: topology, links, queue
//! sizes, operations, faults, and the order of everything. The same seed gives the same run, to the last
//! byte, which the trace hash shows.
//!
//! ```
//! use quipu_sim::{Options, run};
//!
//! let report = run(1, &Options::default());
//! assert_eq!(report.failure, None);
//! assert_eq!(report, run(1, &Options::default()));
//! ```
//!
//! | module | is |
//! |---|---|
//! | `flow`, `network` | simulated TCP on links that lose, delay, double, reorder and damage |
//! | `memory` | the address spaces of hosts, and access between those on one machine |
//! | `world`, `look` | hosts: what serves an adapter; how programs poll |
//! | `plan` | what a seed draws: features, weights, faults |
//! | `datagrams` | simulated UDP |
//! | `startup` | the start-up of plain iWARP, in the place of connection management |
//! | `startup_link` | the same on streams of the adapters' own TCP |
//! | `setup`, `load`, `drive`, `faults` | programs on reliable connections |
//! | `placement` | what they do and check of atomic writes and flushes |
//! | `model`, `check`, `events` | their oracle |
//! | `acknowledged` | what the network has brought of acknowledgements of TCP |
//! | `frames`, `router` | a simulated network of IP packets, and what is said about them |
//! | `offload` | links that cut and join segments; datagrams in parts |
//! | `qpip` | programs of QPIP, and their oracle |
//! | `goodput` | what a connection of QPIP carries over loss, delay and window |
//! | `services` | programs on all other services, and their oracle |
//! | `messages` | programs of Active Messages on reliable connections, and their oracle |
//!
//! What is checked: every work request completes exactly once, in order and with the right status, or is
//! flushed after an error that has a cause; unsignalled ones without a completion; every byte of
//! registered memory and of the guard zones around it is what the operations that were executed made of
//! it; atomics take place one after another; a word is written as a whole or not at all; what was written
//! before a flush is there when it completes; messages meet receives in order; refusals for lack of a
//! receive happen only where there was none; after faults stop, everything comes to an end; deadlines
//! lie in the future; nothing is left when everything is destroyed. Who waits with a limit comes to an end
//! whatever has happened to the peer; a message does not overtake the writes before it; events come as they
//! were asked for, and no others; a send of QPIP succeeds once its acknowledgement has come.
#![forbid(unsafe_code)]

mod acknowledged;
mod addresses;
mod check;
mod datagrams;
mod drive;
mod events;
mod faults;
mod flow;
mod frames;
mod goodput;
mod limits;
mod load;
mod look;
mod memory;
mod messages;
mod model;
mod network;
mod offload;
mod options;
mod placement;
mod plan;
mod qpip;
mod rng;
mod router;
mod run;
mod services;
mod setup;
mod startup;
mod startup_link;
mod trace;
mod world;

pub use goodput::{Goodput, Path, goodput};
pub use options::{Failure, Options, Report, Service};
pub use run::{run, run_many};
pub use world::Counters;
