//! Values that the programs of Active Messages know.

use thiserror::Error;

/// An argument of a handler.
pub type Arg = i32;

/// Most arguments of a message.
pub const MAX_ARGS: usize = 16;

/// Most handlers of an endpoint.
pub const MAX_HANDLERS: usize = 1 << 16;

/// Most translations of an endpoint.
pub const MAX_TRANSLATIONS: usize = 1 << 20;

/// Protects an endpoint: it takes messages that bear its own tag only.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Tag(pub u64);

impl Tag {
    /// An endpoint with this tag takes no messages. The tag of a new endpoint.
    pub const NONE: Self = Self(0);
    /// An endpoint with this tag takes all messages.
    pub const ALL: Self = Self(1);

    /// Whether an endpoint with this tag takes a message with the other.
    #[must_use]
    #[inline]
    pub fn accepts(self, message: Self) -> bool {
        self != Self::NONE && (self == Self::ALL || self == message)
    }
}

/// Where the payload of a message is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Category {
    /// There is none.
    Short = 0,
    /// In the message.
    Medium = 1,
    /// It was written into the segment of the receiver before.
    Bulk = 2,
}

impl Category {
    #[inline]
    pub(crate) fn from_bits(bits: u8) -> Option<Self> {
        match bits {
            0 => Some(Self::Short),
            1 => Some(Self::Medium),
            2 => Some(Self::Bulk),
            _ => None,
        }
    }
}

/// Why a message came back, as AM-II numbers it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Error)]
#[repr(u8)]
pub enum Status {
    /// The arguments make no sense.
    #[error("the arguments of the message are not valid")]
    BadArgs = 1,
    /// The index is not mapped.
    #[error("the index of the translation table is not mapped")]
    BadEntry = 2,
    /// The receiver's tag is another.
    #[error("the receiver has another tag")]
    BadTag = 3,
    /// The receiver has no such handler.
    #[error("the receiver has no such handler")]
    BadHandler = 4,
    /// The receiver has no segment.
    #[error("the receiver has no segment, or the offset is outside of it")]
    BadSegmentOffset = 5,
    /// The payload does not fit.
    #[error("the payload is too long")]
    BadLength = 6,
    /// There is no such endpoint.
    #[error("there is no such endpoint")]
    BadEndpoint = 7,
    /// The receiver has no room.
    #[error("the receiver has no room")]
    Congestion = 8,
    /// The receiver does not answer.
    #[error("the receiver cannot be reached")]
    Unreachable = 9,
    /// The requester has refused the reply.
    #[error("the reply was refused")]
    ReplyRejected = 10,
}

impl Status {
    /// Reads a status of a message: none is 0; the outer none if it is no status.
    #[allow(clippy::option_option, reason = "a message without a status is valid")]
    #[inline]
    pub(crate) fn from_wire(byte: u8) -> Option<Option<Self>> {
        Some(Some(match byte {
            0 => return Some(None),
            1 => Self::BadArgs,
            2 => Self::BadEntry,
            3 => Self::BadTag,
            4 => Self::BadHandler,
            5 => Self::BadSegmentOffset,
            6 => Self::BadLength,
            7 => Self::BadEndpoint,
            8 => Self::Congestion,
            9 => Self::Unreachable,
            10 => Self::ReplyRejected,
            _ => return None,
        }))
    }
}

/// Which call a returned message was sent with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Operation {
    /// A request.
    Request(Category),
    /// A reply.
    Reply(Category),
    /// A get.
    Get,
}

/// Why a call does nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum CallError {
    /// There is no such bundle, endpoint or connection.
    #[error("there is no such object: it was freed, or is of another port")]
    NoSuchObject,
    /// The index is not in the translation table, or not mapped.
    #[error("index {0} of the translation table is not mapped; map it first")]
    NotMapped(u32),
    /// The index is mapped already.
    #[error("index {0} of the translation table is mapped already; unmap it first")]
    Mapped(u32),
    /// A value is outside of its limits.
    #[error("{what} is {value}, which is more than {most}")]
    TooMuch {
        /// What.
        what: &'static str,
        /// What was asked for.
        value: u64,
        /// The limit.
        most: u64,
    },
    /// The call would have to wait.
    #[error("there is no credit, no room or no connection yet; poll, then try again")]
    WouldBlock,
    /// The peer is gone.
    #[error("the peer cannot be reached; map it anew")]
    Unreachable,
    /// Only the handler of a request may reply, and once.
    #[error("a reply is possible once, and only in the handler of a request")]
    NoReply,
    /// Handlers may reply, and nothing else.
    #[error("a handler may not send requests")]
    InHandler,
    /// The table has no free index.
    #[error("the table is full")]
    TableFull,
    /// An entry is in the way.
    #[error("a table cannot be made smaller than its used part")]
    InUse,
}

/// How handlers of a bundle may run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// One at a time.
    Sequential,
    /// Those of different endpoints at the same time, as far as several threads poll.
    Parallel,
}

/// Sizes of a port, all of which bound memory.
#[derive(Clone, Debug)]
pub struct Config {
    /// Requests that the port has under way at once, over all peers.
    pub max_outstanding: u16,
    /// Requests that all peers together may have under way at once, beyond one for each connection.
    pub shared_credits: u32,
    /// Requests that one connection may have under way at once.
    pub max_window: u16,
    /// Requests that a connection may have under way at first.
    pub initial_window: u16,
    /// Connections, both ways together.
    pub max_connections: u32,
    /// Bytes of the payload of a medium message.
    pub max_medium: u32,
    /// Buffers for medium messages that are being sent.
    pub send_buffers: u32,
    /// For so long a peer that cannot be reached is tried, in nanoseconds.
    pub give_up_ns: u64,
    /// Short messages of a connection between processes of one host before it gets lanes, which need memory.
    pub lane_after: u16,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            max_outstanding: 256,
            shared_credits: 512,
            max_window: 64,
            initial_window: 8,
            max_connections: 4096,
            max_medium: 65_536,
            send_buffers: 64,
            give_up_ns: 10_000_000_000,
            lane_after: 16,
        }
    }
}
