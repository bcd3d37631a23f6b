//! Quality of service as InfiniBand has it: service levels, virtual lanes, the arbiter of the lanes, and a
//! port with a rate.
//!
//! Nothing is sent here, and no clock is read: a caller tells a [`Port`] the time and how much waits in each
//! lane, and gets grants. It contains no I/O and no unsafe code.
//!
//! | module | is |
//! |---|---|
//! | `arbiter` | the high and low priority tables and their rules (IBA 7.6.9) |
//! | `clock` | the rate of a port as a token clock |
//! | `port` | one port that several processes share: who may send how many octets of which lane |
//! | `config` | the configuration, checked as a whole |
//! | `opensm`, `tables` | the two forms of its file: OpenSM's options, and TOML |
//! | `policy` | rules that give a service level to a service: `qos-ulps` |
//! | `rate` | rates as people write them |
//!
//! `docs/qos.md` explains the rules and the file.
#![forbid(unsafe_code)]

mod arbiter;
mod clock;
mod config;
mod opensm;
mod policy;
mod port;
mod rate;
mod tables;

pub use arbiter::{Arbiter, Entry, LANES, MAX_ENTRIES, Pick, Priority, UNIT};
pub use clock::TokenClock;
pub use config::{Config, ConfigError, Note};
pub use policy::{Rule, Service, Ulp};
pub use port::{Demand, LaneUse, MEMBERS, Port};
pub use rate::{parse_rate, show_rate};

/// Octets that a packet has in addition to its payload: LRH 8, BTH 12, ICRC 4, VCRC 2 (IBA 5.2, a middle
/// packet of a reliable connection).
pub const PACKET_OVERHEAD: u32 = 26;
