//! What a connection tells its user, and what it counts.

use thiserror::Error;

/// Something that the user wants to know. Events of one kind are joined until they are read: nothing is
/// queued.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Event {
    /// The connection stands.
    Connected,
    /// The peer has acknowledged everything before this offset of the stream: requests up to it are complete.
    Acked(u64),
    /// The peer has closed its direction; this many octets were all.
    PeerClosed(u64),
    /// The peer points at urgent data that end before this offset. They are in line with the others (RFC
    /// 6093 6).
    Urgent(u64),
    /// Segments have gone unanswered several times: the route may be wrong (RFC 9293 3.8.3, R1).
    Suspect,
    /// The connection is gone: everything not acknowledged has failed.
    Failed(Failure),
    /// The connection is closed in both directions, and nothing is left of it.
    Closed,
}

/// Why a connection ended without having been closed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum Failure {
    /// The peer refused it: nobody listens there.
    #[error("connection refused")]
    Refused,
    /// The peer has answered the SYN, and refused then: whoever listens there does not want it.
    #[error("connection declined by the peer")]
    Declined,
    /// The peer has reset it.
    #[error("connection reset by the peer")]
    Reset,
    /// The peer does not answer.
    #[error("connection timed out")]
    TimedOut,
    /// Nothing leads to it: the next hop does not answer, or a router says so.
    #[error("no route to the peer")]
    Unreachable,
}

/// Why [`super::Connection::send`] refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum SendError {
    /// The user has closed, or the connection is gone.
    #[error("the connection is closed for sending")]
    Closed,
    /// More messages than [`super::Config::max_messages`] wait.
    #[error("too many messages wait to be sent")]
    TooMany,
    /// More than any connection can carry.
    #[error("longer than a stream can be")]
    TooLong,
    /// A message of nothing cannot be a segment: TCP carries no boundary without an octet.
    #[error("an empty message cannot be sent over TCP")]
    Empty,
}

/// Events to be read, without a queue.
#[derive(Clone, Debug, Default)]
pub(crate) struct Pending {
    pub(crate) connected: bool,
    pub(crate) suspect: bool,
    pub(crate) closed: bool,
    pub(crate) peer_closed: Option<u64>,
    pub(crate) urgent: Option<u64>,
    pub(crate) failed: Option<Failure>,
}

impl Pending {
    /// The next, in the order in which they make sense; `acked` is the news of acknowledgement.
    pub(crate) fn next(&mut self, acked: impl FnOnce() -> Option<u64>) -> Option<Event> {
        if std::mem::take(&mut self.connected) {
            return Some(Event::Connected);
        }
        if let Some(offset) = acked() {
            return Some(Event::Acked(offset));
        }
        if let Some(offset) = self.urgent.take() {
            return Some(Event::Urgent(offset));
        }
        if let Some(offset) = self.peer_closed.take() {
            return Some(Event::PeerClosed(offset));
        }
        if std::mem::take(&mut self.suspect) {
            return Some(Event::Suspect);
        }
        if let Some(failure) = self.failed.take() {
            return Some(Event::Failed(failure));
        }
        std::mem::take(&mut self.closed).then_some(Event::Closed)
    }
}

/// What a connection has seen and done.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    /// Segments that came.
    pub received: u64,
    /// Segments that went out.
    pub sent: u64,
    /// Segments that were sent again.
    pub retransmitted: u32,
    /// Retransmission timeouts.
    pub timeouts: u32,
    /// Recoveries without a timeout.
    pub recoveries: u32,
    /// Reductions that were taken back.
    pub undone: u32,
    /// Tail loss probes.
    pub probes: u32,
    /// Segments that came again, or outside of the window.
    pub out_of_window: u32,
    /// Segments older than the last timestamp (RFC 7323 5).
    pub paws: u32,
    /// Challenge acknowledgements sent (RFC 5961).
    pub challenges: u32,
    /// Segments with an acknowledgement that cannot be (RFC 5961 5), or without any.
    pub bad_ack: u32,
    /// Payload that was in the offered window, and for which there is no receive any more.
    pub no_room: u32,
    /// Payload behind a gap that could not be kept.
    pub not_kept: u32,
    /// Segments larger than the path was known to take, sent to find out (RFC 4821).
    pub path_probes: u32,
    /// Times that the path was found narrower.
    pub narrowed: u32,
    /// Congestion marks: seen, and echoed by the peer.
    pub marks: u32,
}

impl Counters {
    /// Those of segments that were dropped, or payload of them: outside of the window, old, with a bad
    /// acknowledgement, without a receive, not kept.
    pub(crate) fn drops(&self) -> [u32; 5] {
        [self.out_of_window, self.paws, self.bad_ack, self.no_room, self.not_kept]
    }
}
