//! Bundles, endpoints and what they have: tables, tags, segments, and messages that wait.

use std::collections::VecDeque;

use crate::conn::ConnId;
use crate::fabric::Remote;
use crate::message::Message;
use crate::name::Name;
use crate::slab::Id;
use crate::types::{Arg, MAX_ARGS, Mode, Operation, Status, Tag};

/// The number of a bundle.
pub type BundleId = Id<Bundle>;
/// The number of an endpoint.
pub type EndpointId = Id<Endpoint>;

/// A message whose handler is to run.
#[derive(Clone, Debug)]
pub(crate) struct Arrived {
    pub(crate) endpoint: EndpointId,
    pub(crate) what: What,
    pub(crate) message: Message,
    pub(crate) args: [Arg; MAX_ARGS],
    /// The receive slot that holds the payload, and where it begins there.
    pub(crate) slot: Option<(u32, u32)>,
}

#[derive(Clone, Debug)]
pub(crate) enum What {
    /// From a connection that this end has accepted. The tag is that of the message. The answer may take the
    /// lane if the request did.
    Request { conn: ConnId, tag: Tag, by_lane: bool },
    /// From one that this end has made.
    Reply { conn: ConnId },
    /// A request of the endpoint to itself.
    OwnRequest { tag: Tag },
    /// A reply of the endpoint to itself.
    OwnReply,
    /// A message of this end has come back. It is rare, and kept apart so that the others are short.
    Returned(Box<Returned>),
    /// A get is done.
    Got,
}

/// Why a message has come back.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Returned {
    pub(crate) status: Status,
    pub(crate) operation: Operation,
    pub(crate) to: Name,
}

/// Endpoints that are polled together.
#[derive(Debug)]
pub struct Bundle {
    pub(crate) mode: Mode,
    /// Messages in the order of their arrival.
    pub(crate) queue: VecDeque<Arrived>,
    /// Handlers that run now.
    pub(crate) running: u32,
    /// Messages that have come so far.
    pub(crate) arrivals: u64,
}

/// How the peer of a translation is reached.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Link {
    /// Not yet.
    Idle,
    /// By a connection, which may not stand yet.
    Conn(ConnId),
    /// Not any more.
    Dead(Status),
}

/// An entry of a translation table.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Translation {
    pub(crate) name: Name,
    pub(crate) tag: Tag,
    pub(crate) link: Link,
    /// The connection that the peer has made, as far as it was looked for.
    pub(crate) heard: Option<ConnId>,
    /// Signals of connections of the peer that are gone.
    pub(crate) signals: u32,
}

/// An endpoint.
#[derive(Debug)]
pub struct Endpoint {
    pub(crate) bundle: BundleId,
    pub(crate) tag: Tag,
    pub(crate) translations: Vec<Option<Translation>>,
    pub(crate) segment: Option<Remote>,
    /// The name by which peers know it, if it is not that of its place in the port.
    pub(crate) public: Option<Name>,
    /// Two connections of one peer have come: signals may be on either.
    pub(crate) has_twins: bool,
    /// A handler of it runs.
    pub(crate) is_running: bool,
    /// The index of the handler that a delivery has, to be given back when that is finished.
    pub(crate) lent: Option<u16>,
}

/// What an endpoint has done so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    /// Requests sent.
    pub requests_sent: u64,
    /// Requests whose handler was run.
    pub requests_received: u64,
    /// Replies sent, those that the engine makes included.
    pub replies_sent: u64,
    /// Replies whose handler was run.
    pub replies_received: u64,
    /// Messages that came back.
    pub returned: u64,
}
