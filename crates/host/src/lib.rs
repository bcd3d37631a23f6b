//! The host world: puts the adapter, which knows neither clock nor network, on Linux.
//!
//! It speaks no protocol of its own but the handshake between engines of one host (`link`): what
//! goes over sockets and through shared memory is the adapter's business (`quipu-nic`).
//!
//! | module | is |
//! |---|---|
//! | [`Engine`] | an adapter that lives: one method per verb, for any thread |
//! | `engine::core` | what is behind the engine's one lock; the order in which progress is made |
//! | `engine::helper`, `engine::wait` | who makes progress when nobody polls |
//! | `net` | TCP to engines elsewhere |
//! | `datagram` | UDP, for datagram queue pairs |
//! | `link` | shared memory with engines on this host |
//! | [`packet`] | frames of the adapter's own TCP, UDP and IP |
//! | `qpip` | those of the engine's link, to and from the adapter |
//! | `share` | an adapter that programs use from other processes |
//! | `cm` | connection management over TCP and UDP |
//! | `mapped` | whether memory that is registered is there |
//! | `pages` | registered memory that peers on this host map |
//! | `files` | files that are read into registered memory, and written from it |
//! | [`counters`] | what engines did, for others to read |
//! | `tap` | packets for who wants to see them |
//! | `port` | whether the interface of the device is up |
//! | [`Config`] | all settings, and the one place that reads the environment |
//! | [`doctor`] | what on this machine works and what does not |
//! | `clock`, `lock`, `fork`, `sys` | time, the lock, children of fork, system calls |
//!
//! # Locks
//!
//! Each engine has one lock (`lock::Lock`). While the engine holds it, it takes no other and waits
//! for nothing; system calls under it do not block. A [`Doorbell`] holds it for its owner, who may
//! take others. The lock around the helper's thread handle is taken outside of it only.

mod accounts;
mod address;
mod blank;
mod buffer;
mod clock;
mod cm;
mod config;
pub mod counters;
mod datagram;
pub mod doctor;
mod engine;
mod error;
mod exec;
mod extended;
mod fault_log;
mod files;
mod fork;
mod handle_map;
mod interrupts;
mod link;
mod lock;
mod mapped;
mod net;
mod own;
pub mod packet;
mod pages;
mod port;
pub mod qos;
mod qpip;
mod share;
mod sys;
mod tap;
#[cfg(test)]
mod testing;

pub use quipu_cabi::is_per_process;
pub use quipu_cm as connection;
pub use quipu_fault as fault;
pub use quipu_inet as inet;
pub use quipu_nic as nic;
pub use quipu_strict as strict;

pub use accounts::{Account, AccountError};
pub use address::{
    HostAddress, WantedAddress, default_address, device_addresses, find_address, host_addresses,
};
pub use config::{
    CaptureConfig, Config, ConfigError, Device, PeerMemoryPolicy, SameHost, SharedPages,
    StrictMode, StrictOrder,
};
pub use engine::{
    CompletionEvent, ContextId, Doorbell, Engine, EventsReported, QpipInfo, TcpEvent,
    poll_descriptors,
};
pub use error::{EngineError, OpenError};
pub use exec::{
    become_program, effective_user_and_group, gives_no_rights, has_capabilities, may_execute,
    may_gain_no_privileges, own_file,
};
pub use extended::{IwarpMode, switch_to_iwarp};
pub use files::{fill_segment_at, read_to_segment, write_from_segment, write_segment_at};
pub use interrupts::Interrupts;
pub use lock::{Guard, Lock};
pub use qos::QosConfig;
pub use qpip::{QpipConfig, parse_address};
pub use share::{Guests, ShareError, Sharer};
pub use sys::with_more_descriptors;

/// A descriptor to be watched, as [`Engine::poll_within`] takes it.
pub type PollEntry = libc::pollfd;
