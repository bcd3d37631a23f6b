//! Whole engines, and what happens between them. One program, since each would link everything anew; what
//! needs a process of its own starts it.

mod addresses;
mod bare;
mod capture;
mod capture_cm;
mod capture_qpip;
mod common;
mod connections;
mod counters;
mod crowd;
mod datagrams;
mod deaths;
mod fallbacks;
mod hooks;
mod iwarp_link;
mod lanes;
mod lost_link;
mod pages;
mod plain;
mod port;
mod protected;
mod raw;
mod siw;
#[path = "../links/space.rs"]
#[allow(dead_code, reason = "each test binary uses its part")]
mod space;
mod stopped;
mod users;
mod vlan;
mod ways;
