//! One connection: the requests of one end, and the answers of the other.

use crate::endpoint::EndpointId;
use crate::fabric::Remote;
use crate::name::Name;
use crate::slab::Id;
use crate::types::Tag;

/// The number of a connection.
pub type ConnId = Id<Conn>;

/// What an end that connects knows of the peer's segment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum PeerSegment {
    /// Nothing yet.
    Unknown,
    /// The question is under way.
    Asked,
    /// The peer has none if the length is 0.
    Known(Remote),
}

/// The end that has connected, and sends requests.
#[derive(Debug)]
pub(crate) struct Initiator {
    /// The entry of the translation table; none after it was unmapped.
    pub(crate) index: Option<u32>,
    /// Whether requests may be sent.
    pub(crate) is_up: bool,
    /// When to connect again; none while the fabric is at it.
    pub(crate) retry_at: Option<u64>,
    /// Attempts so far.
    pub(crate) attempts: u32,
    /// When to give up.
    pub(crate) give_up_at: u64,
    /// Requests that may be under way.
    pub(crate) window: u16,
    /// Requests that are.
    pub(crate) in_flight: u16,
    /// Signals among those: their credits come back together.
    pub(crate) signals: u16,
    /// A request has waited for a credit since the last one was sent.
    pub(crate) is_starved: bool,
    /// The tag that the peer knows.
    pub(crate) told_tag: Tag,
    /// Bytes of a medium message that the peer takes.
    pub(crate) max_medium: u32,
    /// What is known of the peer's segment.
    pub(crate) segment: PeerSegment,
    /// The peer is to hear of the own segment before the next request.
    pub(crate) tell_segment: bool,
    /// The peer was asked for a sign of life, and has not given it.
    pub(crate) is_probed: bool,
}

/// The end that has accepted, and answers.
#[derive(Debug)]
pub(crate) struct Acceptor {
    /// The tag of the peer's messages.
    pub(crate) tag: Tag,
    /// Credits that the peer has.
    pub(crate) granted: u16,
    /// Requests that have come and are not answered.
    pub(crate) in_service: u16,
    /// Signals among those.
    pub(crate) taken_signals: u16,
    /// Those of them that came in a lane, at most.
    pub(crate) lane_signals: u16,
    /// Signals that the program has not taken.
    pub(crate) signals: u32,
    /// Send buffers that answers have and the peer has not taken.
    pub(crate) buffers: u16,
    /// The peer has not answered the last control message: there is one at a time.
    pub(crate) has_control: bool,
    /// The peer is to ask for the segment again.
    pub(crate) has_news: bool,
    /// Requests since the engine last looked for idle peers.
    pub(crate) recent: u32,
    /// The segment of the peer's endpoint.
    pub(crate) segment: Option<Remote>,
}

#[derive(Debug)]
pub(crate) enum Role {
    Initiator(Initiator),
    Acceptor(Acceptor),
}

/// Attempts to make a lane.
const MOST_FAILURES: u8 = 8;

/// What an end knows of the lanes of a connection, which carry short messages past the queue pair.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Lanes {
    /// This end may push.
    pub(crate) is_out: bool,
    /// The peer may push.
    pub(crate) is_in: bool,
    /// They were asked for, or are not any more. Nobody asks twice.
    pub(crate) is_asked: bool,
    /// How often none could be made.
    failures: u8,
    /// Short messages since then, up to those after which a lane is asked for.
    shorts: u16,
    /// Messages that were sent and received over the queue pair. A message in a lane says how many were sent
    /// before it, and waits for them.
    pub(crate) sent: u32,
    pub(crate) received: u32,
}

impl Lanes {
    /// Counts a short message over the queue pair; whether it is time to ask for lanes: after so many, and
    /// after twice as many with each time that none could be made.
    #[inline]
    pub(crate) fn count_short(&mut self, after: u16) -> bool {
        self.shorts = self.shorts.saturating_add(1);
        !self.is_asked && self.shorts >= after.saturating_mul(1 << self.failures)
    }

    /// No lane can be made now: the connection may be too young to know that its peer is on this host.
    pub(crate) fn put_off(&mut self) {
        (self.shorts, self.failures) = (0, self.failures + 1);
        self.is_asked = self.failures >= MOST_FAILURES;
    }
}

/// A connection.
#[derive(Debug)]
pub struct Conn {
    /// The own endpoint.
    pub(crate) endpoint: EndpointId,
    /// The peer's.
    pub(crate) peer: Name,
    pub(crate) role: Role,
    /// Sends since the last one that asked for a completion.
    pub(crate) unsignaled: u16,
    pub(crate) lanes: Lanes,
}

impl Conn {
    #[inline]
    pub(crate) fn initiator(&mut self) -> Option<&mut Initiator> {
        match &mut self.role {
            Role::Initiator(initiator) => Some(initiator),
            Role::Acceptor(_) => None,
        }
    }

    #[inline]
    pub(crate) fn acceptor(&mut self) -> Option<&mut Acceptor> {
        match &mut self.role {
            Role::Acceptor(acceptor) => Some(acceptor),
            Role::Initiator(_) => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A connection that is just up does not know yet that its peer is on this host. It stayed without lanes.
    #[test]
    fn lanes_that_cannot_be_made_are_asked_for_again_later_and_not_for_ever() {
        let mut lanes = Lanes::default();
        let mut asked_after = Vec::new();
        let mut count = 0_u32;
        for _ in 0..10_000 {
            count += 1;
            if lanes.count_short(16) {
                asked_after.push(std::mem::take(&mut count));
                lanes.put_off();
            }
        }
        assert_eq!(asked_after, [16, 32, 64, 128, 256, 512, 1024, 2048]);
        let mut lanes = Lanes::default();
        lanes.put_off();
        assert_eq!((0..40).find(|_| lanes.count_short(16)), Some(31));
        lanes.is_asked = true;
        assert!(!lanes.count_short(16), "it was answered");
    }
}
