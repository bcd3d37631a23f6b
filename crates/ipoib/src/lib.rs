//! IP over InfiniBand (RFC 4391, RFC 4392) as a state machine: IP packets of a network interface in and out
//! on one side, datagrams of a UD queue pair on the other. In connected mode (RFC 4755) also messages of
//! reliable connections.
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
//! 4. After either, and after [`Engine::handle_timeout`]: send what [`Engine::poll_transmit`] writes, give
//!    the interface what [`Engine::poll_deliver`] has, join or leave what [`Engine::poll_group`] names, and
//!    open or close what [`Engine::poll_connection`] names, until all have nothing.
//! 5. At [`Engine::poll_timeout`], call [`Engine::handle_timeout`].
//!
//! In connected mode, the outcome of each connection goes to [`Engine::handle_established`] and
//! [`Engine::handle_ended`], a peer's request to [`Engine::handle_request`], a message of a connection to
//! [`Engine::handle_message`], and completed sends to [`Engine::handle_sent`].
//!
//! Times are in ns of any clock that does not go back. Peers are not trusted: lengths are checked before
//! bytes, tables and queues are bounded, and a link-layer address counts only if its datagram came from it.
#![forbid(unsafe_code)]

mod connections;
mod counters;
mod engine;
mod groups;
mod neighbours;
mod too_big;

pub use connections::{ConnectionChange, ConnectionId, ConnectionInfo};
pub use counters::{Counters, Dropped};
pub use engine::{Arrival, Config, Destination, Engine, Incoming, Outgoing, link_local};
pub use groups::GroupChange;
pub use quipu_wire as wire;
pub use quipu_wire::ipoib::{
    ConnectionData, DEFAULT_PKEY, Encapsulation, LEN as HEADER_LEN, LinkAddress,
};

/// Neighbours that are known at most.
pub const MAX_NEIGHBOURS: usize = 1024;
/// Packets that wait for the link-layer address of one neighbour.
pub const MAX_WAITING: usize = 16;
/// Packets that wait in all.
pub const MAX_WAITING_IN_ALL: usize = 256;
/// Messages of the engine's own that wait to be sent, and those that wait for the interface.
pub const MAX_QUEUED: usize = 64;
/// Groups that are joined for the kernel.
pub const MAX_GROUPS: usize = 64;
/// Between two requests for one address, in ns (RFC 4861 10, RETRANS_TIMER).
pub const RETRANSMIT_NS: u64 = 1_000_000_000;
/// Requests that are made for one address, and unicast probes of a neighbour (MAX_MULTICAST_SOLICIT).
pub const TRIES: u8 = 3;
/// How long an address counts as confirmed, in ns (REACHABLE_TIME).
pub const REACHABLE_NS: u64 = 30_000_000_000;
/// The largest MTU of an interface in connected mode, that of Linux.
pub const CONNECTED_MTU: usize = 65520;
/// The longest IP packet.
pub(crate) const LONGEST_PACKET: usize = 65535;
/// The smallest MTU that a peer may have (RFC 791).
pub const SHORTEST_MTU: usize = 68;
/// Connections that this end opens, and those that peers open.
pub const MAX_CONNECTIONS: usize = 128;
/// Of them those with the interfaces at one port, which is one GID.
pub const MAX_CONNECTIONS_OF_PORT: usize = 32;
/// Connections that have ended, and whose counters are kept.
pub(crate) const MAX_PAST: usize = 32;
/// After how many ns without a packet a connection is closed.
pub const IDLE_NS: u64 = 300_000_000_000;
/// For how many ns a connection is not used before it may make room for another one.
pub const EVICT_NS: u64 = 5_000_000_000;
/// After how many ns a connection is closed over which messages are under way, and none has arrived.
pub const STALL_NS: u64 = 10_000_000_000;
/// Before a connection that could not be made, or ended at once, is tried again, in ns.
pub const RETRY_NS: u64 = 1_000_000_000;

/// The TCP port at which an interface takes requests for connections. It stands for the service ID of RFC
/// 4755 3.5, which is made of the queue pair's number: connection management names services by TCP port here.
/// The upper 16 bits of a number are a port of the adapter's already, so this is another one.
#[must_use]
pub const fn service_port(qpn: u32) -> u16 {
    ((qpn >> 8) as u16) ^ 0x4000
}
