//! What the engine needs of queue pairs: posts, and the completions that come of them.

use crate::conn::ConnId;
use crate::name::Name;
use crate::types::{Status, Tag};

/// Memory of this process, as work requests name it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Local {
    /// Address of the first byte.
    pub addr: u64,
    /// Bytes.
    pub len: u64,
    /// The key of the region.
    pub key: u32,
}

/// Memory of a peer, or that a peer may use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Remote {
    /// Address of the first byte, as its owner counts.
    pub addr: u64,
    /// Bytes.
    pub len: u64,
    /// The key that the owner has given.
    pub key: u32,
}

/// What an end that connects says of itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Hello {
    /// Its endpoint.
    pub from: Name,
    /// The endpoint that it wants to reach.
    pub endpoint: u32,
    /// The incarnation that it expects; 0 if any will do.
    pub incarnation: u64,
    /// The tag of its messages.
    pub tag: Tag,
}

impl Hello {
    /// Bytes of [`to_bytes`](Self::to_bytes): all that an InfiniBand REQ has room for.
    pub const WIRE_LEN: usize = 56;
    const MAGIC: u16 = 0x4d41;
    const VERSION: u16 = 3;

    /// Magic number, version, own name, wanted endpoint and incarnation, tag; little-endian.
    #[must_use]
    pub fn to_bytes(&self) -> [u8; Self::WIRE_LEN] {
        let mut out = [0; Self::WIRE_LEN];
        out[..2].copy_from_slice(&Self::MAGIC.to_le_bytes());
        out[2..4].copy_from_slice(&Self::VERSION.to_le_bytes());
        out[4..36].copy_from_slice(&self.from.to_bytes());
        out[36..40].copy_from_slice(&self.endpoint.to_le_bytes());
        out[40..48].copy_from_slice(&self.incarnation.to_le_bytes());
        out[48..].copy_from_slice(&self.tag.0.to_le_bytes());
        out
    }

    /// Reads what [`to_bytes`](Self::to_bytes) wrote; more bytes may follow.
    #[must_use]
    pub fn parse(bytes: &[u8]) -> Option<Self> {
        let bytes: &[u8; Self::WIRE_LEN] = bytes.first_chunk()?;
        let half = |at: usize| u16::from_le_bytes([bytes[at], bytes[at + 1]]);
        let word = |at: usize| {
            let mut word = [0; 8];
            word.copy_from_slice(&bytes[at..at + 8]);
            u64::from_le_bytes(word)
        };
        if (half(0), half(2)) != (Self::MAGIC, Self::VERSION) {
            return None;
        }
        let mut name = [0; Name::WIRE_LEN];
        name.copy_from_slice(&bytes[4..36]);
        let endpoint = u32::from_le_bytes([bytes[36], bytes[37], bytes[38], bytes[39]]);
        let from = Name::from_bytes(&name)?;
        Some(Self { from, endpoint, incarnation: word(40), tag: Tag(word(48)) })
    }
}

/// What an end that accepts says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Welcome {
    /// Requests that the other end may have under way.
    pub window: u16,
    /// Bytes of a medium message that it takes.
    pub max_medium: u32,
}

impl Welcome {
    /// Bytes of [`to_bytes`](Self::to_bytes).
    pub const WIRE_LEN: usize = 8;
    const MAGIC: u16 = 0x6d61;

    /// Magic number, window and limit; little-endian.
    #[must_use]
    pub fn to_bytes(&self) -> [u8; Self::WIRE_LEN] {
        let mut out = [0; Self::WIRE_LEN];
        out[..2].copy_from_slice(&Self::MAGIC.to_le_bytes());
        out[2..4].copy_from_slice(&self.window.to_le_bytes());
        out[4..].copy_from_slice(&self.max_medium.to_le_bytes());
        out
    }

    /// Reads what [`to_bytes`](Self::to_bytes) wrote; more bytes may follow.
    #[must_use]
    pub fn parse(bytes: &[u8]) -> Option<Self> {
        let bytes: &[u8; Self::WIRE_LEN] = bytes.first_chunk()?;
        let half = |at: usize| u16::from_le_bytes([bytes[at], bytes[at + 1]]);
        let max_medium = u32::from_le_bytes([bytes[4], bytes[5], bytes[6], bytes[7]]);
        (half(0) == Self::MAGIC).then(|| Self { window: half(2), max_medium })
    }
}

/// Why a connection does not come about.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Refusal {
    /// Nobody is there, or nobody answers: to be tried again.
    Absent,
    /// The peer has said why.
    Said(Status),
}

/// What happened to connections and posts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Event {
    /// A message of `len` bytes lies in a receive slot.
    Received {
        /// Whose it is; none if the connection is gone.
        conn: Option<ConnId>,
        /// Where it is.
        slot: u32,
        /// Its bytes.
        len: usize,
    },
    /// A receive slot was not used, and is nobody's now.
    Unused {
        /// Which.
        slot: u32,
    },
    /// A post that asked for it is done.
    Done {
        /// On which connection.
        conn: ConnId,
        /// The number that the post gave.
        notify: u64,
    },
    /// The connection has failed, or the peer has closed it.
    Failed {
        /// Which.
        conn: ConnId,
    },
    /// A connection stands that this end has asked for.
    Connected {
        /// Which.
        conn: ConnId,
        /// What the peer says.
        welcome: Welcome,
    },
    /// A connection that this end has asked for does not come about.
    Refused {
        /// Which.
        conn: ConnId,
        /// Why.
        why: Refusal,
    },
    /// A peer asks for a connection.
    Incoming {
        /// The fabric's number of it.
        incoming: u64,
        /// What the peer says.
        hello: Hello,
    },
}

/// Words of a [`Line`].
pub const LINE_WORDS: usize = 8;
/// A message in a lane. The upper byte of the first word is the fabric's.
pub type Line = [u64; LINE_WORDS];
/// Messages that a lane has room for. The engine has no more in it.
pub const LANE_SLOTS: u16 = 64;

/// Where a lane is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LaneAddress {
    /// Address of the first byte, as its owner counts.
    pub addr: u64,
    /// The key that the owner has given.
    pub key: u32,
    /// Tells it from other lanes in the same memory.
    pub serial: u64,
}

/// What became of a message that was put into a lane.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pushed {
    /// The peer will find it.
    Done,
    /// The peer sleeps: a message over the queue pair must wake it.
    Asleep,
    /// There is no such lane any more.
    Closed,
}

/// Queue pairs, as the engine sees them. All queue pairs share the receive slots. Posts of one
/// connection are executed in order; what happens comes back as [`Event`]s.
///
/// A post returns `false` if the connection is broken or full. Neither is normal: the engine gives
/// such a connection up.
pub trait Fabric {
    /// Starts to connect.
    fn connect(&mut self, conn: ConnId, to: &Name, hello: &Hello);
    /// Accepts a connection that [`Event::Incoming`] has told of; whether that is still possible.
    fn accept(&mut self, incoming: u64, conn: ConnId, welcome: &Welcome) -> bool;
    /// Refuses one.
    fn reject(&mut self, incoming: u64, why: Status);
    /// Ends a connection, or an attempt to connect. Memory of its posts is free when this returns.
    fn close(&mut self, conn: ConnId);
    /// Sends bytes, which are copied: at most [`inline_limit`](Self::inline_limit).
    fn send(&mut self, conn: ConnId, bytes: &[u8], notify: Option<u64>) -> bool;
    /// Sends the first `len` bytes of a send buffer.
    fn send_buffer(&mut self, conn: ConnId, buffer: u32, len: usize, notify: u64) -> bool;
    /// Writes memory of this process into that of the peer.
    fn write(&mut self, conn: ConnId, from: Local, to: Remote, notify: Option<u64>) -> bool;
    /// Writes memory as [`write`](Self::write), then sends bytes as [`send`](Self::send), each with
    /// what is to be reported of it.
    fn write_and_send(
        &mut self,
        conn: ConnId,
        from: Local,
        to: Remote,
        notify: Option<u64>,
        (bytes, sent): (&[u8], Option<u64>),
    ) -> bool {
        self.write(conn, from, to, notify) && self.send(conn, bytes, sent)
    }
    /// Reads memory of the peer.
    fn read(&mut self, conn: ConnId, into: Local, from: Remote, notify: u64) -> bool;
    /// Asks the adapter of a peer for a sign of life, which takes nothing of its program. A connection
    /// whose peer does not answer fails. Where nothing can be asked, nothing happens.
    fn probe(&mut self, _conn: ConnId, _notify: u64) -> bool {
        true
    }
    /// Makes a lane on which the peer of a connection may send, if it could reach it. A lane carries short
    /// messages past the queue pair, through memory of this process that the peer has mapped.
    fn offer_lane(&mut self, _conn: ConnId) -> Option<LaneAddress> {
        None
    }
    /// Opens a lane that the peer of a connection has made; whether messages may be pushed from now on.
    fn open_lane(&mut self, _conn: ConnId, _to: LaneAddress) -> bool {
        false
    }
    /// Takes the lane back that was offered to the peer of a connection: it will not use it.
    fn withdraw_lane(&mut self, _conn: ConnId) {}
    /// Pushes a message into the lane to the peer of a connection.
    fn push_line(&mut self, _conn: ConnId, _line: &Line) -> Pushed {
        Pushed::Closed
    }
    /// Writes memory of this process into that of the peer of a connection before it returns; whether it is
    /// written. That is possible only if all writes and reads that were posted before are executed. The peer
    /// sees the bytes before a message that is pushed afterwards. After `false`, some bytes may be there.
    fn write_now(&mut self, _conn: ConnId, _from: Local, _to: Remote) -> bool {
        false
    }
    /// A message of any lane, if one of those that are looked at now has one. It stays.
    fn peek_lanes(&mut self) -> Option<(ConnId, Line)> {
        None
    }
    /// Looks at other lanes the next time: what was found cannot be taken yet.
    fn rotate_lanes(&mut self) {}
    /// The next message of the lane from the peer of a connection. It stays.
    fn peek_line(&mut self, _conn: ConnId) -> Option<Line> {
        None
    }
    /// Takes the message that was found.
    fn pop_line(&mut self, _conn: ConnId) {}
    /// Says to the peers of all lanes that this end is about to sleep; the connections of the lanes.
    fn arm_lanes(&mut self) -> Vec<ConnId> {
        Vec::new()
    }
    /// The peer of a connection wakes this end; whether it may, as this end has slept since the last time.
    fn take_wake(&mut self, _conn: ConnId) -> bool {
        false
    }
    /// Most bytes of [`send`](Self::send).
    fn inline_limit(&self) -> usize;
    /// Fills a send buffer from `at` on.
    fn store(&mut self, buffer: u32, at: usize, bytes: &[u8]);
    /// Reads a receive slot from `at` on. Bytes that are of no message may be anything.
    fn load(&self, slot: u32, at: usize, out: &mut [u8]);
    /// Posts receive slots that messages have used.
    fn repost(&mut self, slots: &[u32]);
    /// Sees to it that there are at least so many receive slots, all of them posted.
    fn provide(&mut self, slots: u32) -> bool;
}
