//! A port that nobody listens on may have a listener a moment later: programs close one and open the
//! next in the middle of what they do, as perftest does, and adapters of metal are slow enough for that
//! not to show. So a refusal by TCP counts only if it lasts.

use crate::Cm;
use crate::connect::{REACH_NS, reason};
use crate::id::State;
use crate::keys::IdKey;
use crate::stream::Stream;
use crate::types::{Action, EventKind};

/// The first pause; each further one is twice as long.
const FIRST_PAUSE_NS: u64 = 1_000_000;
/// How often a connection is tried: for an eighth of a second.
const TRIES: u32 = 8;

/// A connection that was refused.
#[derive(Debug, Default)]
pub(crate) struct Again {
    /// What to send first.
    pub(crate) first: Vec<u8>,
    tries: u32,
    /// The stream, while it waits for its next try.
    stream: Option<Box<Stream>>,
}

impl Cm {
    /// Nobody listens where an identifier wanted to connect to.
    pub(crate) fn refused(&mut self, now: u64, key: IdKey, stream: Stream) {
        let Some(id) = self.ids.get_mut(key) else { return };
        id.again.tries += 1;
        if id.again.tries >= TRIES {
            return self.fail(key, EventKind::Rejected, reason::INVALID_SERVICE_ID.into());
        }
        let pause = FIRST_PAUSE_NS << (id.again.tries - 1);
        id.again.stream = Some(Box::new(stream));
        self.set_deadline(key, Some(now + pause));
    }

    /// A deadline of an identifier that connects has passed: whether it was that of a pause.
    pub(crate) fn connect_again(&mut self, now: u64, key: IdKey) -> bool {
        let Some(id) = self.ids.get_mut(key) else { return false };
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
