//! What goes in and comes out.

use std::net::{IpAddr, SocketAddr};

use quipu_iwarp::Negotiated;
pub use quipu_wire::cm::Ece;
use thiserror::Error;

use crate::keys::{IdKey, StreamKey};

/// Sizes, times and the identity of an engine.
#[derive(Clone, Debug)]
pub struct Config {
    /// The first address of this engine: where its queue pairs are, unless the program chooses another
    /// address. Row 0 of its GID table.
    pub gid: [u8; 16],
    /// Path MTU code as in verbs, 1 (256 B) to 5 (4096 B).
    pub path_mtu: u8,
    /// For PSNs and the numbers of look-ups, which strangers must not guess.
    pub seed: [u8; 32],
    /// Streams of one listener that have not sent their whole request.
    pub half_open: usize,
    /// And those among them from one address (IPv6: from one network of 64 bits).
    pub half_open_per_address: usize,
    /// Whether requests of other Quipus are shown to listeners, and their look-ups.
    pub takes_quipu: bool,
    /// Whether requests of plain iWARP adapters are shown to listeners of `RDMA_PS_TCP`.
    pub takes_plain: bool,
    /// Whether connections of `RDMA_PS_TCP` are asked for as a plain iWARP adapter does.
    pub asks_plain: bool,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            gid: [0; 16],
            path_mtu: 5,
            seed: [0; 32],
            half_open: 2048,
            half_open_per_address: 512,
            takes_quipu: true,
            takes_plain: true,
            asks_plain: false,
        }
    }
}

/// What the connections of an identifier speak, and so which device it is of.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Protocol {
    /// InfiniBand's connection management, as between Quipus.
    #[default]
    Quipu,
    /// Plain iWARP.
    Iwarp,
    /// TCP of the adapter's own, and nothing else.
    Qpip,
}

impl Protocol {
    /// Whether the connection of the identifier is that of its queue pair, which the engine moves.
    pub(crate) const fn is_of_adapter(self) -> bool {
        !matches!(self, Self::Quipu)
    }
}

/// `enum rdma_port_space`, and the port space of SDP, which is not for programs of `rdma_cm`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PortSpace {
    /// `RDMA_PS_IPOIB`: datagrams.
    IpOib,
    /// `RDMA_PS_TCP`: connections.
    Tcp,
    /// `RDMA_PS_UDP`: datagrams.
    Udp,
    /// `RDMA_PS_IB`: either, as the type of the queue pair says.
    Ib,
    /// `RDMA_PS_SDP`: connections of the Sockets Direct Protocol. A request has 92 bytes of private data.
    Sdp,
}

impl PortSpace {
    /// From `RDMA_PS_*`, as far as programs of `rdma_cm` may name them.
    pub const fn from_code(code: u32) -> Option<Self> {
        Some(match code {
            0x0002 => Self::IpOib,
            0x0106 => Self::Tcp,
            0x0111 => Self::Udp,
            0x013f => Self::Ib,
            _ => return None,
        })
    }

    /// As `RDMA_PS_*`.
    pub const fn code(self) -> u16 {
        match self {
            Self::IpOib => 0x0002,
            Self::Tcp => 0x0106,
            Self::Udp => 0x0111,
            Self::Ib => 0x013f,
            Self::Sdp => quipu_wire::sdp::PORT_SPACE,
        }
    }
}

/// `IBV_QPT_*` as far as they matter here.
pub(crate) mod qp_type {
    pub(crate) const RC: u8 = 2;
    pub(crate) const UD: u8 = 4;
    const XRC_SEND: u8 = 9;
    const XRC_RECV: u8 = 10;

    /// The type at the other end of a connection: extended connections have two kinds of ends.
    pub(crate) fn of_peer(own: u8) -> u8 {
        match own {
            XRC_SEND => XRC_RECV,
            XRC_RECV => XRC_SEND,
            other => other,
        }
    }
}

/// `enum rdma_cm_event_type`, with its numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum EventKind {
    /// An address is resolved.
    AddrResolved = 0,
    /// It is not.
    AddrError = 1,
    /// A route is resolved.
    RouteResolved = 2,
    /// It is not.
    RouteError = 3,
    /// A peer wants to connect: the identifier of the event is new.
    ConnectRequest = 4,
    /// The peer has accepted.
    ConnectResponse = 5,
    /// Connecting failed for a reason of the connection.
    ConnectError = 6,
    /// The peer cannot be reached, or does not answer.
    Unreachable = 7,
    /// The peer, or nobody at its port, refuses.
    Rejected = 8,
    /// The connection stands.
    Established = 9,
    /// It has ended.
    Disconnected = 10,
    /// The device is gone.
    DeviceRemoval = 11,
    /// A group is joined.
    MulticastJoin = 12,
    /// It is not.
    MulticastError = 13,
    /// The address has moved to another interface.
    AddrChange = 14,
    /// Nothing of an ended connection is under way any more.
    TimewaitExit = 15,
    /// What a program has asked of names is there.
    AddrinfoResolved = 16,
    /// It is not.
    AddrinfoError = 17,
    /// A program has written it.
    User = 18,
}

impl EventKind {
    /// Whether it is about a group that an identifier joins.
    pub(crate) fn is_of_group(self) -> bool {
        matches!(self, Self::MulticastJoin | Self::MulticastError)
    }

    /// Whether it is written by the program's own side ([`Cm::write_event`](crate::Cm::write_event)).
    pub fn is_written(self) -> bool {
        matches!(self, Self::AddrinfoResolved | Self::AddrinfoError | Self::User)
    }
}

/// What a peer says of its side, or how to reach it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Peer {
    /// Reads and atomics that this side is to answer at a time.
    pub responder_resources: u8,
    /// Reads and atomics that this side may have outstanding.
    pub initiator_depth: u8,
    /// End-to-end flow control.
    pub flow_control: bool,
    /// In requests: how often this side repeats a request.
    pub retry_count: u8,
    /// How often this side repeats a request that met no receive.
    pub rnr_retry_count: u8,
    /// The peer uses a shared receive queue.
    pub srq: bool,
    /// The peer's queue pair; of a group: 0xffffff.
    pub qpn: u32,
    /// Datagrams and groups: the Q_Key to use.
    pub qkey: u32,
    /// Datagrams and groups: where to send.
    pub path: Option<Path>,
    /// Options of its vendor.
    pub ece: Ece,
}

/// A way to a peer, for an address handle.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Path {
    /// Where the peer is.
    pub dgid: [u8; 16],
    /// The row of the own GID table with the address that the peer is reached from.
    pub sgid_index: u8,
    /// Traffic class.
    pub traffic_class: u8,
    /// Service level: the upper three bits of the traffic class, or else that of the service ID
    /// ([`Cm::set_levels`](crate::Cm::set_levels)).
    pub service_level: u8,
}

/// An event, as `rdma_get_cm_event(3)` describes them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Event {
    /// What happened.
    pub kind: EventKind,
    /// 0, a negative errno, or the peer's reason.
    pub status: i32,
    /// To whom.
    pub id: IdKey,
    /// Its cookie.
    pub cookie: u64,
    /// Of a connect request: the cookie of the listener.
    pub listener: u64,
    /// Of a group: its cookie.
    pub multicast: u64,
    /// Of a written event: what the program wants to find in it.
    pub arg: u64,
    /// Padded with zeros to the full size, as InfiniBand has it.
    pub private_data: Box<[u8]>,
    /// About the peer, in requests, responses, established datagrams and groups.
    pub peer: Peer,
}

/// What a program gives to connect and to accept.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Param {
    /// For the peer's program.
    pub private_data: Vec<u8>,
    /// Reads and atomics that this side answers at a time.
    pub responder_resources: u8,
    /// Reads and atomics that this side has outstanding at most.
    pub initiator_depth: u8,
    /// End-to-end flow control.
    pub flow_control: bool,
    /// How often the peer shall repeat a request. Above 7 counts as 7.
    pub retry_count: u8,
    /// How often the peer shall repeat a request that met no receive. Above 7 counts as 7.
    pub rnr_retry_count: u8,
    /// The queue pair receives from a shared receive queue.
    pub srq: bool,
    /// The queue pair, 24 bits; programs may say any number.
    pub qpn: u32,
    /// Datagrams: the Q_Key of the queue pair; 0: the usual one.
    pub qkey: u32,
    /// Options of the own vendor, which only another Quipu is told of.
    pub ece: Ece,
}

/// Why a program refuses, as InfiniBand numbers it (IBA 12.6.7.2).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(u8)]
pub enum Refusal {
    /// Its own reasons.
    #[default]
    Consumer = 28,
    /// It cannot do with the options of the peer's vendor.
    VendorOption = 35,
}

/// Why a call is refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum CallError {
    /// There is no such identifier, channel or group.
    #[error("no such identifier, channel or group")]
    NoSuchObject,
    /// The state of the identifier does not allow it.
    #[error("not allowed in this state")]
    WrongState,
    /// A value is not valid.
    #[error("{0} is not valid")]
    Invalid(&'static str),
    /// Identifiers use the channel.
    #[error("in use")]
    Busy,
    /// It is already connected.
    #[error("already connected")]
    Connected,
}

/// How a stream was lost.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Loss {
    /// Nobody listens there.
    Refused,
    /// QPIP: the peer's program does not want it.
    Declined,
    /// The peer closed it, or its process ended.
    Closed,
    /// The peer does not answer.
    TimedOut,
    /// An error of the system, as errno.
    Failed(i32),
}

/// A stream of plain iWARP whose start-up is over: the queue pair speaks on it from now on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HandOver {
    /// The stream, whose name means nothing afterwards.
    pub stream: StreamKey,
    /// Whose connection it is.
    pub id: IdKey,
    /// The number of its queue pair, as the program has said.
    pub qpn: u32,
    /// Where the peer is.
    pub peer: SocketAddr,
    /// Whether this side opened it.
    pub initiator: bool,
    /// What start-up agreed on.
    pub negotiated: Negotiated,
    /// Reads that this side answers at a time.
    pub ird: u16,
    /// Reads that this side wants to have outstanding: no more than that, whatever start-up has stated.
    pub ord: u16,
    /// What has come behind the start-up frame.
    pub rest: Vec<u8>,
}

/// What the world is to do.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Action {
    /// Send what was given, and give the stream to the adapter; then tell what becomes of it:
    /// [`Cm::handle_established`](crate::Cm::handle_established) and
    /// [`Cm::handle_ended`](crate::Cm::handle_ended), once at most each.
    HandOver(Box<HandOver>),
    /// End the connection that the adapter has, or is to make, for this identifier; the event of its end
    /// follows.
    End {
        /// This one.
        id: IdKey,
    },
    /// QPIP: end it at once, whatever is under way: the peer takes too long to agree to its end.
    Abort {
        /// This one.
        id: IdKey,
    },
    /// QPIP: have the adapter connect a queue pair to `to`, from the address and port of the identifier; then
    /// tell what becomes of it: [`Cm::handle_established`](crate::Cm::handle_established),
    /// [`Cm::handle_unreached`](crate::Cm::handle_unreached), [`Cm::handle_ended`](crate::Cm::handle_ended).
    Reach {
        /// Who connects.
        id: IdKey,
        /// The number of its queue pair, as the program has said.
        qpn: u32,
        /// To where.
        to: SocketAddr,
    },
    /// QPIP: have the adapter answer the peer that has asked for this identifier, for a queue pair; then tell
    /// as after [`Action::Reach`].
    Answer {
        /// Whose peer.
        id: IdKey,
        /// The number of its queue pair, as the program has said.
        qpn: u32,
    },
    /// QPIP: have the adapter refuse the peer that has asked for this identifier.
    Refuse {
        /// Whose peer.
        id: IdKey,
    },
    /// Bind a socket of `id` as before, so that nobody else gets its port: its connection was refused, and is
    /// tried once more after a pause.
    Hold {
        /// Who connects.
        id: IdKey,
    },
    /// Open a TCP connection from the socket of `id` and send `first` once it stands.
    Connect {
        /// Its name from now on.
        stream: StreamKey,
        /// Who connects.
        id: IdKey,
        /// To where.
        to: SocketAddr,
        /// What to send first.
        first: Vec<u8>,
    },
    /// Send bytes behind all that were given before.
    Send {
        /// On this stream.
        stream: StreamKey,
        /// At most a few hundred.
        bytes: Vec<u8>,
    },
    /// Send what was given, and close.
    Close {
        /// This stream, whose name means nothing afterwards.
        stream: StreamKey,
        /// By a reset, which leaves nothing behind in the system: the peer has, or needs, nothing.
        reset: bool,
    },
    /// Send a datagram from the socket of an identifier.
    Datagram {
        /// This one; if it is gone, from any socket bound to `from`.
        via: IdKey,
        /// The source address, if the socket is bound to a wildcard.
        from: Option<SocketAddr>,
        /// To where.
        to: SocketAddr,
        /// One datagram.
        bytes: Vec<u8>,
    },
}

/// The GID of an address: IPv4 is mapped into IPv6.
pub fn gid_of(ip: IpAddr) -> [u8; 16] {
    match ip {
        IpAddr::V4(v4) => v4.to_ipv6_mapped().octets(),
        IpAddr::V6(v6) => v6.octets(),
    }
}

#[cfg(test)]
mod tests {
    use super::qp_type::{UD, of_peer};

    #[test]
    fn extended_connections_have_two_kinds_of_ends() {
        const RC: u8 = 2;
        assert_eq!([9, 10, RC, UD].map(of_peer), [10, 9, RC, UD]);
    }
}
