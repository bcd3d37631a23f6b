//! Simulated hosts: what a network interface costs its machine, by where it is attached and how it is driven.
//!
//! The crate contains no I/O, no clock and no threads. A [`Plan`] goes in; a [`Report`] comes out. The same
//! plan gives the same report each time, to the last event, which the trace hash shows. Time is in
//! picoseconds.
//!
//! ```
//! use quipu_machine::{Plan, run};
//!
//! let plan = Plan::parse(
//!     "[nic]\nkind = \"sinic\"\nattach = \"cache\"\n[run]\nwarmup = \"1ms\"\nsample = \"1ms\"\n",
//! )?;
//! let report = run(&plan)?;
//! assert!(report.gbps > 1.0);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! | module | is |
//! |---|---|
//! | `plan` | machines as TOML |
//! | `costs` | what software costs, from `costs/*.toml` |
//! | `world` | hosts and the events that connect them |
//! | `cpu`, `ledger` | what software may do, and where its time went |
//! | `memory` | caches, main memory, allocator |
//! | `bus` | the way between memory and device: PCI Express, PCI |
//! | `network`, `frames` | links, switch, and what is on them |
//! | `nic` | NICs register by register, each with its driver |
//! | `os` | sockets, softirq, timers around `quipu-inet`'s TCP |
//! | `hca` | the InfiniBand adapter of the QoS paper, and its host |
//! | `lanai` | the programmable NIC of the QPIP paper |
//! | `bench` | a NIC without software, for tests |
//! | `workload` | the programs |
//! | [`checks`] | the lower rungs of the validation ladder |
//! | `run`, `report`, `trace`, `sweep` | running a plan; what came of it; many values |
//!
//! Software (programs, kernel, drivers) is asynchronous functions, one for each core; hardware is values that
//! react to events. Software sees hardware through registers and memory only.
#![forbid(unsafe_code)]

mod bench;
mod bus;
pub mod checks;
mod costs;
mod cpu;
mod error;
mod examples;
mod frames;
mod hca;
mod lanai;
mod ledger;
mod memory;
mod network;
mod nic;
mod os;
mod plan;
mod report;
mod rng;
mod run;
mod sweep;
mod trace;
mod workload;
mod world;

pub use bench::Bench;
pub use costs::Cost;
pub use error::{DriverFault, RunError};
pub use examples::{Example, example, examples};
pub use hca::{HcaReport, StreamRate, run_hca};
pub use lanai::{Firmware, LanaiPlan, LanaiReport, Stage as FirmwareStage, StageTime, run_lanai};
pub use ledger::{CATEGORIES, Category, Ledger};
pub use plan::*;
pub use report::{Report, Share, breakdown, figure, table};
pub use run::{Curve, Options, run, run_curve, run_with};
pub use sweep::{Point, Results, Shard, SweepError, expand, label, merge};
pub use trace::{Stage, perfetto};
