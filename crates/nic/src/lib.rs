//! The adapter: an RDMA network interface made of software, as a state machine without I/O.
//!
//! It contains no networking code, no clock, no thread and no unsafe code. Calls, bytes and the time go in;
//! bytes, completions, events and the next deadline come out, so that the same code serves real programs
//! (`host`) and simulated networks (`sim`). What it is made of:
//!
//! | state machine (QPIP, section 3.1) | module | does |
//! |---|---|---|
//! | doorbell | `doorbell` | takes notice of posted work requests |
//! | management | `management`, `completion_queues`, `queue_pairs`, `connect` | objects, memory, connections |
//! | transmit | `transmit` | picks the next endpoint and builds what goes out |
//! | receive | `receive` | places what arrives, completes work requests, notes what to acknowledge |
//!
//! A queue pair's messages travel over a byte stream (RDMAP over TCP, `stream`) or through memory shared
//! with a peer on the same host (`channel`); both share the bookkeeping of `requester` and `responder`.
//! Queue pairs of type [`QpType::Iwarp`] have a stream that is handed to them, and speak plain iWARP
//! (`plain`). Those of unreliable datagrams need none (`datagram`), nor do those of raw packets (`raw`).
//! The messages of [`QpType::Tcp`] and [`QpType::Udp`] are the segments and datagrams themselves: the
//! adapter then has the inter-network stack inside, and exchanges frames (`qpip`).
#![forbid(unsafe_code)]

mod adapter;
mod audit;
mod channel;
mod completion_queues;
mod connect;
mod counters;
mod cq;
mod datagram;
mod doorbell;
mod error;
mod event;
mod fate;
mod gids;
mod linger;
mod link;
mod management;
mod multicast;
mod number_table;
mod plain;
mod port;
mod probe;
mod progress;
mod qp;
mod qp_state;
mod qpip;
mod queue;
mod queue_pairs;
mod raw;
mod receive;
mod requester;
mod responder;
mod service;
mod slab;
mod stream;
mod transmit;
mod types;
mod unordered;
mod watch;
mod xrc;

pub use adapter::{Adapter, Config, Crc, MAX_MESSAGE};
pub use audit::{Denied, Whose};
pub use completion_queues::into_list;
pub use counters::{
    AdapterCounters, PathKind, QpCounters, QpSummary, RequesterCounters, ResponderCounters,
};
pub use datagram::{Arrival, DatagramDrops, Departure, MAX_DATAGRAM, MAX_DATAGRAM_MTU};
pub use error::{Fault, Loss};
pub use event::{Action, Event, StreamChange};
pub use fate::Fate;
pub use gids::GID_ROWS;
pub use link::{
    Atomic, FETCHED_MAX, LINK_MESSAGE_MAX, Link, LinkEnd, LinkMessage, PeerMemory, PeerMemoryFault,
    Restless,
};
pub use management::Region;
pub use multicast::{GroupMember, multicast_group};
pub use plain::{Adoption, Role};
pub use port::LinkLayer;
pub use probe::{Ends, Header, NoProbe, Passage, Probe, Stage};
pub use progress::Glance;
pub use qpip::{FrameOut, TcpChange, TcpSettings, TcpStreamChange, check_datagram, check_message};
pub use queue_pairs::QpInfo;
pub use quipu_inet as inet;
pub use quipu_iwarp as iwarp;
pub use quipu_mem::{self as mem, Key, WindowType};
pub use quipu_qos as qos;
pub use raw::{
    CounterKind, FlowKind, FlowLayer, FlowRule, FlowSpec, MAX_COUNTERS, MAX_FLOWS, MAX_TABLE_SIZE,
    MAX_TABLES, RX_HASH_KEY, RxHash, RxHashFields, station_address,
};
pub use transmit::{Gather, Marking, Piece, PortShare};
pub use types::*;
pub use unordered::WriteOrder;
