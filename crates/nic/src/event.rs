//! What the adapter tells the world above (events) and asks of the world below (actions).

use std::net::SocketAddr;

use quipu_inet::stack::{ListenerId, TcpId};
use quipu_inet::tcp::Flow;

use crate::link::LinkMessage;
use crate::qpip::{TcpChange, TcpStreamChange};
use crate::types::{AsyncEvent, ChannelId, ConnId, CqId, LinkId, QpId};

/// Something that a program waits for on a descriptor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Event {
    /// About an object or the port.
    Async(AsyncEvent),
    /// A completion queue has something that was asked for.
    Completion {
        /// The channel of the queue.
        channel: ChannelId,
        /// The queue.
        cq: CqId,
        /// What the queue was created with.
        context: u64,
    },
    /// About the stream of a queue pair of type [`Iwarp`](crate::QpType::Iwarp): for connection management.
    Stream {
        /// The queue pair.
        qp: QpId,
        /// The connection.
        conn: ConnId,
        /// What happened to it.
        change: StreamChange,
    },
    /// About the connection of a queue pair of type [`Tcp`](crate::QpType::Tcp).
    Tcp {
        /// The queue pair; it may have been destroyed since.
        qp: QpId,
        /// What happened to it.
        change: TcpChange,
    },
    /// A peer has connected to a port that is watched by
    /// [`tcp_listen_deferred`](crate::Adapter::tcp_listen_deferred), and waits for a decision, or has given
    /// up.
    TcpRequest {
        /// Whom.
        listener: ListenerId,
        /// Its connection.
        connection: TcpId,
        /// Between whom; `None`: the peer has given up.
        flow: Option<Flow>,
    },
    /// About a byte stream over the adapter's own TCP that no queue pair has yet: for connection management.
    TcpStream {
        /// Its connection.
        connection: TcpId,
        /// What happened to it.
        change: TcpStreamChange,
    },
}

/// What happens to a stream that connection management handed over.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StreamChange {
    /// Both ends may send: the ready-to-receive message has come, or none was agreed on.
    Established,
    /// This end is a responder, its initiator has said nothing yet, and this end begins
    /// ([`Config::speaks_first_after_ns`](crate::Config::speaks_first_after_ns)).
    SpokeFirst,
    /// It is over, by whichever end: the queue pair is in error, and has lost it.
    Ended,
}

/// What the world below must do.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Action {
    /// Reach the engine at `peer`; answer with exactly one of `handle_reached_stream`,
    /// `handle_reached_link`, `handle_reached_self` and `handle_lost`. A link that has no room is no answer.
    Connect {
        /// The connection to answer for.
        conn: ConnId,
        /// Address and port.
        peer: SocketAddr,
        /// The row of the GID table with the address to reach it from.
        sgid_index: u8,
    },
    /// From now on count the peer of a stream as gone when it has not acknowledged bytes for this long
    /// (the user timeout of TCP, RFC 9293 3.8.3), and notice when it vanishes while nothing is under way.
    LimitSilence {
        /// The connection.
        conn: ConnId,
        /// Nanoseconds; `None`: for ever.
        user_timeout_ns: Option<u64>,
    },
    /// Transmit what `transmit` still gives, then close the stream and call `handle_lost`.
    Close {
        /// The connection.
        conn: ConnId,
    },
    /// Carry a message to the engine behind a link, in order and reliably.
    LinkSend {
        /// The link.
        link: LinkId,
        /// The message.
        message: LinkMessage,
    },
    /// End a link whose peer stays in the middle of an access to this side's memory.
    Cut {
        /// The link.
        link: LinkId,
    },
    /// Wake the engine behind a link, which has said that it sleeps.
    RingBell {
        /// The link.
        link: LinkId,
    },
}
