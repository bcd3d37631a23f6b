//! Streams of plain iWARP over the packet link: the adapter's own TCP carries them. Here is which of them
//! belongs to which stream of the machine, and what the adapter is to do; `engine/bare.rs` does it.

use std::collections::HashMap;
use std::net::SocketAddr;

use quipu_cm::{HandOver, IdKey, Loss, StreamKey};
use quipu_inet::stack::{ListenerId, TcpId};
use quipu_inet::tcp::{Failure, Flow};

use super::Manager;
use super::bare::Order;

/// What the adapter is to do for a stream.
#[derive(Clone, Debug)]
pub(crate) enum StreamOrder {
    /// Open it, from an address and a port of which each may be unspecified, and send `first`.
    Open { stream: StreamKey, id: IdKey, from: SocketAddr, to: SocketAddr, first: Vec<u8> },
    /// Take one that has come.
    Take { stream: StreamKey, connection: TcpId },
    /// Send bytes after all others.
    Send { stream: StreamKey, bytes: Vec<u8> },
    /// End it, or reset it.
    Close { stream: StreamKey, reset: bool },
    /// Give it to a queue pair.
    HandOver(Box<HandOver>),
}

/// The streams.
#[derive(Default)]
pub(super) struct LinkStreams {
    connections: HashMap<StreamKey, Option<TcpId>>,
    streams: HashMap<TcpId, StreamKey>,
}

impl LinkStreams {
    fn has(&self, stream: StreamKey) -> bool {
        self.connections.contains_key(&stream)
    }
}

/// What the end of a connection means for connection management.
fn loss_of(failure: Option<Failure>) -> Loss {
    match failure {
        None | Some(Failure::Reset | Failure::Declined) => Loss::Closed,
        Some(Failure::Refused) => Loss::Refused,
        Some(Failure::TimedOut) => Loss::TimedOut,
        Some(Failure::Unreachable) => Loss::Failed(libc::EHOSTUNREACH),
    }
}

impl Manager {
    /// Opens a stream over the link, if its identifier is there.
    pub(super) fn opens_over_link(
        &mut self,
        stream: StreamKey,
        id: IdKey,
        to: SocketAddr,
        first: &[u8],
    ) -> bool {
        let is_there = self.cm.is_on_link(id);
        if is_there {
            let from = self.cm.bound(id).ok().flatten().unwrap_or(quipu_cm::ANY);
            self.over_link.connections.insert(stream, None);
            self.order_for(StreamOrder::Open { stream, id, from, to, first: first.to_vec() });
        }
        is_there
    }

    fn order_for(&mut self, order: StreamOrder) {
        self.bare.orders.push_back(Order::Stream(order));
    }

    /// Sends on a stream over the link, if it is one.
    pub(super) fn sends_over_link(&mut self, stream: StreamKey, bytes: &[u8]) -> bool {
        let is_there = self.over_link.has(stream);
        if is_there {
            self.order_for(StreamOrder::Send { stream, bytes: bytes.to_vec() });
        }
        is_there
    }

    /// Ends a stream over the link, if it is one.
    pub(super) fn closes_over_link(&mut self, stream: StreamKey, reset: bool) -> bool {
        let is_there = self.over_link.has(stream);
        if is_there {
            self.order_for(StreamOrder::Close { stream, reset });
        }
        is_there
    }

    /// Gives a stream over the link to its queue pair, if it is one.
    pub(super) fn gives_over_link(&mut self, what: &HandOver) -> bool {
        let is_there = self.over_link.has(what.stream);
        if is_there {
            self.order_for(StreamOrder::HandOver(Box::new(what.clone())));
        }
        is_there
    }

    /// A peer has come to a port that is watched for streams.
    pub(super) fn admit_over_link(
        &mut self,
        now: u64,
        listener: ListenerId,
        connection: TcpId,
        flow: &Flow,
    ) {
        let by = self.bare.watched.get(&listener).copied();
        let admitted =
            by.and_then(|by| self.cm.handle_accepted_on_link(now, by, flow.local, flow.remote));
        match admitted {
            Some(stream) => {
                self.over_link.connections.insert(stream, None);
                self.order_for(StreamOrder::Take { stream, connection });
            }
            None => self.bare.orders.push_back(Order::Refuse(connection)),
        }
    }

    /// The connection of a stream, as far as it is known.
    pub(crate) fn connection_of(&self, stream: StreamKey) -> Option<TcpId> {
        self.over_link.connections.get(&stream).copied().flatten()
    }

    /// The stream of a connection.
    pub(crate) fn stream_over(&self, connection: TcpId) -> Option<StreamKey> {
        self.over_link.streams.get(&connection).copied()
    }

    /// The adapter has opened or taken a stream.
    pub(crate) fn stream_begun(&mut self, stream: StreamKey, connection: TcpId) {
        self.over_link.connections.insert(stream, Some(connection));
        self.over_link.streams.insert(connection, stream);
    }

    /// A stream is this machine's no more: it has ended, or a queue pair has it.
    pub(crate) fn forget_over_link(&mut self, stream: StreamKey) -> Option<TcpId> {
        let connection = self.over_link.connections.remove(&stream).flatten()?;
        self.over_link.streams.remove(&connection);
        Some(connection)
    }

    /// A stream over the link stands.
    pub(crate) fn stream_reached(&mut self, now: u64, stream: StreamKey) {
        self.cm.handle_reached(now, stream);
        self.settle(now);
    }

    /// Bytes have come on a stream over the link.
    pub(crate) fn stream_heard(&mut self, now: u64, stream: StreamKey, bytes: &[u8]) {
        self.cm.handle_bytes(now, stream, bytes);
        self.settle(now);
    }

    /// A stream over the link is gone, or was never made. What the machine says about it now is not sent.
    pub(crate) fn stream_lost(&mut self, now: u64, stream: StreamKey, failure: Option<Failure>) {
        self.order_for(StreamOrder::Close { stream, reset: true });
        self.cm.handle_lost(now, stream, loss_of(failure));
        self.settle(now);
    }

    /// What was ordered for an identifier whose connection is not to be any more: a stream that its queue
    /// pair has not got ends.
    pub(super) fn call_off_stream(order: &mut StreamOrder, id: IdKey) {
        if let StreamOrder::HandOver(what) = order
            && what.id == id
        {
            *order = StreamOrder::Close { stream: what.stream, reset: false };
        }
    }
}
