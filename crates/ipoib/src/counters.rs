//! What the engine did, and why it dropped what it dropped.

/// Why a packet or a datagram was dropped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Dropped {
    /// The lengths, the version or the checksum in its headers make no sense.
    Malformed,
    /// Its encapsulation header names a type that IPoIB does not have.
    UnknownType,
    /// It is longer than the MTU.
    TooLong,
    /// It claims a source that it cannot have: an address of this host or of a group, or a link-layer address
    /// that is not the datagram's.
    Forged,
    /// A packet for one host came by a group (RFC 1122 3.3.6).
    Misdirected,
    /// It is one that this queue pair has sent to a group.
    Own,
    /// No prefix and no gateway leads to its destination.
    NoRoute,
    /// Nobody has answered for its next hop.
    Unresolved,
    /// A table or a queue is full.
    Full,
    /// It is a message of neighbour discovery that the engine does not take: redirects, routers'.
    Discovery,
    /// The connection to its next hop could not be made, or the one that it came over has ended.
    NotConnected,
    /// The connection to its next hop has too many messages under way.
    Congested,
}

impl Dropped {
    /// All of them, in the order of [`Counters::dropped`].
    pub const ALL: [Self; 12] = [
        Self::Malformed,
        Self::UnknownType,
        Self::TooLong,
        Self::Forged,
        Self::Misdirected,
        Self::Own,
        Self::NoRoute,
        Self::Unresolved,
        Self::Full,
        Self::Discovery,
        Self::NotConnected,
        Self::Congested,
    ];

    /// A word for it.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Malformed => "malformed",
            Self::UnknownType => "unknown_type",
            Self::TooLong => "too_long",
            Self::Forged => "forged",
            Self::Misdirected => "misdirected",
            Self::Own => "own",
            Self::NoRoute => "no_route",
            Self::Unresolved => "unresolved",
            Self::Full => "full",
            Self::Discovery => "discovery",
            Self::NotConnected => "not_connected",
            Self::Congested => "congested",
        }
    }
}

/// What passed, and what did not.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    /// Packets of the interface that were given a destination.
    pub sent: u64,
    /// Packets that the interface was given.
    pub received: u64,
    /// ARP requests and neighbour solicitations that were queued.
    pub asked: u64,
    /// Replies and advertisements that were queued.
    pub answered: u64,
    /// Connections that this end opened, and were established.
    pub opened: u64,
    /// Connections that peers opened, and were established.
    pub accepted: u64,
    /// Requests of peers that were refused.
    pub refused: u64,
    /// Connections that could not be made.
    pub failed: u64,
    /// ICMP messages that said which MTU a neighbour has.
    pub too_big: u64,
    /// What was dropped, by reason.
    pub dropped: [u64; Dropped::ALL.len()],
}

impl Counters {
    /// Counts a drop, of so many packets.
    pub(crate) fn drop_many(&mut self, why: Dropped, count: usize) {
        self.dropped[why as usize] += count as u64;
    }

    /// How many were dropped for a reason.
    #[must_use]
    pub fn dropped_for(&self, why: Dropped) -> u64 {
        self.dropped[why as usize]
    }
}
