//! A port that nobody listens on may have a listener a moment later: programs close one and open the
//! next in the middle of what they do, as perftest does, and adapters of metal are slow enough for that
//! not to show. So a refusal by TCP counts only if it lasts. Of plain iWARP, hardware and Linux siw report a
//! refusal at once, and so does this side, unless the same port has accepted it a moment ago.
//!
//! A plain iWARP adapter may know MPA revision 1 only (RFC 5044), and refuse, close or misunderstand a
//! request of revision 2 (RFC 6581). It is asked once more, by revision 1.

use std::net::SocketAddr;

use crate::connect::{REACH_NS, SECOND, reason};
use crate::id::State;
use crate::keys::{IdKey, StreamKey};
use crate::stream::{MPA, Stream};
use crate::types::{Action, EventKind};
use crate::{Cm, errno};

/// The first pause; each further one is twice as long.
const FIRST_PAUSE_NS: u64 = 1_000_000;
/// How often a connection is tried: for half a second. The processor of a program that is about to listen may
/// be away for longer than an eighth.
const TRIES: u32 = 10;
/// For how long a plain iWARP port that has accepted a connection is expected to have its next listener soon.
const ACCEPTED_NS: u64 = 10 * SECOND;
/// How many of them are remembered.
const ACCEPTED_MAX: usize = 16;

/// A connection that was refused.
#[derive(Debug, Default)]
pub(crate) struct Again {
    /// What to send first.
    pub(crate) first: Vec<u8>,
    tries: u32,
    /// Plain iWARP: the private data, until they are sent in a request of revision 1.
    pub(crate) plain: Option<Box<[u8]>>,
    /// The stream, while it waits for its next try.
    stream: Option<Box<Stream>>,
    /// QPIP, which has none: it waits.
    waits: bool,
}

impl Cm {
    /// Nobody listens where an identifier wanted to connect to.
    pub(crate) fn refused(&mut self, now: u64, key: IdKey, stream: Stream) {
        let is_plain = self.is_plain(key);
        if is_plain && !self.has_accepted(now, stream.peer) || !self.pause(now, key) {
            // Only InfiniBand numbers the reasons.
            let none = i32::from(reason::INVALID_SERVICE_ID);
            let status = if is_plain { -errno::CONNREFUSED } else { none };
            return self.fail(key, EventKind::Rejected, status);
        }
        if let Some(id) = self.ids.get_mut(key) {
            id.again.stream = Some(Box::new(stream));
            self.actions.push_back(Action::Hold { id: key });
        }
    }

    /// Notes that a plain iWARP adapter has accepted a connection of this side at `peer`.
    pub(crate) fn note_accepted(&mut self, now: u64, peer: SocketAddr) {
        self.accepted_at.retain(|&(other, _)| other != peer);
        if self.accepted_at.len() >= ACCEPTED_MAX {
            self.accepted_at.pop_front();
        }
        self.accepted_at.push_back((peer, now));
    }

    /// Whether one has done so a moment ago.
    fn has_accepted(&self, now: u64, peer: SocketAddr) -> bool {
        let recent = |at: u64| now < at.saturating_add(ACCEPTED_NS);
        self.accepted_at.iter().any(|&(other, at)| other == peer && recent(at))
    }

    /// As [`refused`](Self::refused), of an identifier of QPIP.
    pub(crate) fn refused_bare(&mut self, now: u64, key: IdKey) {
        if !self.pause(now, key) {
            return self.fail(key, EventKind::Rejected, -errno::CONNREFUSED);
        }
        if let Some(id) = self.ids.get_mut(key) {
            id.again.waits = true;
        }
    }

    /// Begins the pause before the next try; whether there is to be one.
    fn pause(&mut self, now: u64, key: IdKey) -> bool {
        let Some(id) = self.ids.get_mut(key) else { return false };
        id.again.tries += 1;
        if id.again.tries >= TRIES {
            return false;
        }
        let pause = FIRST_PAUSE_NS << (id.again.tries - 1);
        self.set_deadline(key, Some(now + pause));
        true
    }

    /// Whether the peer has taken a request of revision 2 for one of revision 1.
    pub(crate) fn is_of_revision_1(&self, key: StreamKey) -> bool {
        self.streams.get(key).is_some_and(|stream| stream.is_older)
    }

    /// Asks a plain iWARP adapter that did not take revision 2 by revision 1; whether that was not done
    /// before.
    pub(crate) fn ask_anew(&mut self, now: u64, key: IdKey) -> bool {
        let Some(id) = self.ids.get_mut(key) else { return false };
        let (State::Connecting, Some(src), Some(to)) = (&id.state, id.src, id.dst) else {
            return false;
        };
        let Some(data) = id.again.plain.take() else { return false };
        let Ok((stream, first)) = Stream::initiator(key, src, to, MPA, &data) else { return false };
        self.drop_stream(key, true);
        let stream = self.streams.insert(stream);
        if let Some(id) = self.ids.get_mut(key) {
            id.stream = Some(stream);
            id.again.first.clone_from(&first);
        }
        self.set_deadline(key, Some(now + REACH_NS));
        self.actions.push_back(Action::Connect { stream, id: key, to, first });
        true
    }

    /// A deadline of an identifier that connects has passed: whether it was that of a pause.
    pub(crate) fn connect_again(&mut self, now: u64, key: IdKey) -> bool {
        let Some(id) = self.ids.get_mut(key) else { return false };
        if matches!(id.state, State::Connecting) && std::mem::take(&mut id.again.waits) {
            self.reach(now, key);
            return true;
        }
        let (State::Connecting, Some(stream)) = (&id.state, id.again.stream.take()) else {
            return false;
        };
        let (to, first) = (stream.peer, id.again.first.clone());
        let stream = self.streams.insert(*stream);
        id.stream = Some(stream);
        self.set_deadline(key, Some(now + REACH_NS));
        self.actions.push_back(Action::Connect { stream, id: key, to, first });
        true
    }
}
