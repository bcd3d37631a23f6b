//! IP over InfiniBand (RFC 4391, RFC 4392) as a state machine: IP packets of a network interface in and out
//! on one side, datagrams of a UD queue pair on the other.
//!
//! This crate contains no networking code and no clock. The interface is one of layer 3 (TUN): it carries
//! bare IP packets, and the kernel asks nobody for link-layer addresses. So the engine does what the kernel
//! does on an InfiniBand interface: it resolves addresses by ARP and neighbour discovery, answers for its own
//! addresses, and joins the multicast groups that the kernel's IGMP and MLD reports name.
//!
//! The order of calls:
//!
//! 1. [`Engine::new`].
//! 2. A packet from the interface goes to [`Engine::handle_packet`], which says where to send it.
//! 3. A datagram from the queue pair goes to [`Engine::handle_datagram`], which says which bytes of it are a
//!    packet for the interface.
//! 4. After either, and after [`Engine::handle_timeout`]: send what [`Engine::poll_transmit`] writes, and
//!    join or leave what [`Engine::poll_group`] names, until both have nothing.
//! 5. At [`Engine::poll_timeout`], call [`Engine::handle_timeout`].
//!
//! Times are in ns of any clock that does not go back. Peers are not trusted: lengths are checked before
//! bytes, tables and queues are bounded, and a link-layer address counts only if its datagram came from it.
#![forbid(unsafe_code)]

mod counters;
mod engine;
mod groups;
mod neighbours;

pub use counters::{Counters, Dropped};
pub use engine::{Arrival, Config, Destination, Engine, Incoming, Outgoing, link_local};
pub use groups::GroupChange;
pub use quipu_wire as wire;
pub use quipu_wire::ipoib::{DEFAULT_PKEY, Encapsulation, LEN as HEADER_LEN, LinkAddress};

/// Neighbours that are known at most.
pub const MAX_NEIGHBOURS: usize = 1024;
/// Packets that wait for the link-layer address of one neighbour.
pub const MAX_WAITING: usize = 16;
/// Packets that wait in all.
pub const MAX_WAITING_IN_ALL: usize = 256;
/// Messages of the engine's own that wait to be sent.
pub const MAX_QUEUED: usize = 64;
/// Groups that are joined for the kernel.
pub const MAX_GROUPS: usize = 64;
/// Between two requests for one address, in ns (RFC 4861 10, RETRANS_TIMER).
pub const RETRANSMIT_NS: u64 = 1_000_000_000;
/// Requests that are made for one address, and unicast probes of a neighbour (MAX_MULTICAST_SOLICIT).
pub const TRIES: u8 = 3;
/// How long an address counts as confirmed, in ns (REACHABLE_TIME).
pub const REACHABLE_NS: u64 = 30_000_000_000;
