//! One connection over datagrams.

use std::collections::{BTreeMap, VecDeque};

use super::Place;
use super::sender::Sender;
use crate::conn::ConnId;
use crate::fabric::{Hello, Local, Welcome};

/// In-order fragments that may wait for their acknowledgement, and for how long.
const ACK_EVERY: u32 = 8;
const ACK_DELAY_NS: u64 = 1_000_000;
/// The first pause between two hellos; it doubles.
pub(super) const FIRST_PAUSE_NS: u64 = 20_000_000;
/// An attempt to connect ends after so long without an answer; the engine begins another.
const ATTEMPT_NS: u64 = 1_000_000_000;

/// The receiving half of a connection.
#[derive(Debug, Default)]
pub(super) struct Receiver {
    /// The number of the next fragment in order.
    pub(super) expected: u64,
    /// Fragments after a gap.
    pub(super) held: BTreeMap<u64, Box<[u8]>>,
    /// Bytes of the message under way that have come.
    pub(super) filled: u32,
    /// The slot of the send under way, and its length.
    pub(super) slot: Option<(u32, u32)>,
    unacknowledged: u32,
    pub(super) ack_at: Option<u64>,
}

impl Receiver {
    /// Notes a fragment in order; whether it is to be acknowledged at once.
    pub(super) fn note_in_order(&mut self, now: u64) -> bool {
        self.expected += 1;
        self.unacknowledged += 1;
        self.ack_at.get_or_insert(now.saturating_add(ACK_DELAY_NS));
        self.unacknowledged >= ACK_EVERY
    }

    /// Notes that an acknowledgement is on its way.
    pub(super) fn note_acknowledged(&mut self) {
        (self.unacknowledged, self.ack_at) = (0, None);
    }

    /// What an acknowledgement says.
    pub(super) fn acknowledgement(&self) -> (u32, u64) {
        let bits = self.held.keys().map(|seq| 1_u64 << (seq - self.expected - 1).min(63));
        (self.expected as u32, bits.fold(0, |all, bit| all | bit))
    }
}

/// How far a connection is.
#[derive(Debug)]
pub(super) enum Phase {
    /// The peer has not accepted.
    Connecting {
        hello: Hello,
        since: u64,
        again_at: u64,
        pause: u64,
        is_due: bool,
        /// What the peer wants to read in a hello: 0 until it has said so.
        cookie: u64,
        /// A challenge was answered in this pause: a peer that sends more of them waits.
        has_answered: bool,
    },
    /// It stands. The end that has accepted says so again whenever it is asked again.
    Up { welcome: Option<Welcome>, owes_welcome: bool },
}

/// A connection.
#[derive(Debug)]
pub(super) struct Link {
    pub(super) conn: ConnId,
    pub(super) peer: Place,
    /// The own number, and the peer's, which is 0 until it is known.
    pub(super) own: u64,
    pub(super) theirs: u64,
    pub(super) phase: Phase,
    pub(super) sender: Sender,
    pub(super) receiver: Receiver,
    /// When a datagram has come last, since when a sign of life is asked for, and when it was last.
    pub(super) last_heard: u64,
    pub(super) asked_since: Option<u64>,
    pinged_at: u64,
    pub(super) owes_ack: bool,
    pub(super) owes_ping: bool,
    /// What the engine is told when the peer gives a sign of life.
    pub(super) probe: Option<u64>,
    /// Own reads that are not answered: number, place, and what is reported.
    pub(super) reads: VecDeque<(u32, Local, u64)>,
    pub(super) next_read: u32,
    pub(super) is_ready: bool,
}

impl Link {
    fn new(conn: ConnId, peer: Place, theirs: u64, phase: Phase, sender: Sender) -> Self {
        Self {
            conn,
            peer,
            own: 0,
            theirs,
            phase,
            sender,
            receiver: Receiver::default(),
            last_heard: 0,
            asked_since: None,
            pinged_at: 0,
            owes_ack: false,
            owes_ping: false,
            probe: None,
            reads: VecDeque::new(),
            next_read: 0,
            is_ready: false,
        }
    }

    pub(super) fn initiator(
        conn: ConnId,
        peer: Place,
        hello: Hello,
        sender: Sender,
        now: u64,
    ) -> Self {
        let phase = Phase::Connecting {
            hello,
            since: now,
            again_at: now,
            pause: FIRST_PAUSE_NS,
            is_due: true,
            cookie: 0,
            has_answered: false,
        };
        Self::new(conn, peer, 0, phase, sender)
    }

    pub(super) fn acceptor(
        conn: ConnId,
        peer: Place,
        theirs: u64,
        welcome: Welcome,
        sender: Sender,
    ) -> Self {
        let phase = Phase::Up { welcome: Some(welcome), owes_welcome: true };
        Self::new(conn, peer, theirs, phase, sender)
    }

    pub(super) fn is_connecting(&self) -> bool {
        matches!(self.phase, Phase::Connecting { .. })
    }

    /// Whether there is something to send.
    pub(super) fn has_due(&self) -> bool {
        match &self.phase {
            Phase::Connecting { is_due, .. } => *is_due,
            Phase::Up { owes_welcome, .. } => {
                *owes_welcome || self.owes_ack || self.owes_ping || self.sender.has_due()
            }
        }
    }

    /// The next time at which something is to be done, if nothing happens before.
    pub(super) fn deadline(&self, give_up_ns: u64) -> u64 {
        match &self.phase {
            Phase::Connecting { since, again_at, .. } => {
                (*again_at).min(since.saturating_add(ATTEMPT_NS.min(give_up_ns)))
            }
            Phase::Up { .. } => {
                let ping = self.last_heard.max(self.pinged_at).saturating_add(give_up_ns / 4);
                let lost = self.asked_since.map(|since| since.saturating_add(give_up_ns / 4 * 3));
                let timers = [self.sender.deadline(), self.receiver.ack_at, lost];
                timers.into_iter().flatten().min().map_or(ping, |at| at.min(ping))
            }
        }
    }

    /// Does what is due; whether the peer is lost.
    pub(super) fn handle_timeout(&mut self, now: u64, give_up_ns: u64) -> bool {
        if let Phase::Connecting { since, again_at, pause, is_due, has_answered, .. } =
            &mut self.phase
        {
            if now >= since.saturating_add(ATTEMPT_NS.min(give_up_ns)) {
                return true;
            }
            if now >= *again_at {
                (*is_due, *again_at) = (true, now.saturating_add(*pause));
                *has_answered = false;
                *pause = pause.saturating_mul(2);
            }
            return false;
        }
        if self.asked_since.is_some_and(|since| now >= since.saturating_add(give_up_ns / 4 * 3)) {
            return true;
        }
        if now >= self.last_heard.max(self.pinged_at).saturating_add(give_up_ns / 4) {
            (self.pinged_at, self.owes_ping) = (now, true);
            self.asked_since.get_or_insert(now);
        }
        if self.receiver.ack_at.is_some_and(|at| now >= at) {
            self.owes_ack = true;
        }
        self.sender.expire(now);
        false
    }
}
