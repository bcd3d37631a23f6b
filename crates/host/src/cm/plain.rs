//! Streams of plain iWARP: they begin here, and belong to the adapter once their start-up is over.

use std::collections::{HashMap, VecDeque};
use std::os::fd::OwnedFd;

use quipu_cm::{HandOver, IdKey};
use quipu_nic::{QpId, StreamChange};

use super::Manager;

/// A stream for the adapter.
pub(crate) struct Given {
    pub(crate) fd: OwnedFd,
    pub(crate) what: HandOver,
}

/// What is known of such streams.
#[derive(Default)]
pub(super) struct Plain {
    /// Those that the adapter is to get.
    given: VecDeque<Given>,
    /// Queue pairs whose streams are to end.
    ends: VecDeque<QpId>,
    /// Queue pairs whose connections are to end at once.
    aborts: VecDeque<QpId>,
    /// Who has a stream that the adapter has.
    by_qp: HashMap<QpId, IdKey>,
    by_id: HashMap<IdKey, QpId>,
}

impl Plain {
    /// A queue pair has the connection of an identifier.
    pub(super) fn keep(&mut self, id: IdKey, qp: QpId) {
        self.by_qp.insert(qp, id);
        self.by_id.insert(id, qp);
    }

    /// Whose connection a queue pair has.
    pub(super) fn owner(&self, qp: QpId) -> Option<IdKey> {
        self.by_qp.get(&qp).copied()
    }

    /// A queue pair has it no more.
    pub(super) fn forget(&mut self, qp: QpId) -> Option<IdKey> {
        let id = self.by_qp.remove(&qp)?;
        self.by_id.remove(&id);
        Some(id)
    }

    /// The stream of an identifier is to end, be it on its way to the adapter.
    pub(super) fn end(&mut self, id: IdKey) {
        self.given.retain(|given| given.what.id != id);
        self.ends.extend(self.by_id.get(&id));
    }

    /// The connection of an identifier is to end at once.
    pub(super) fn abort(&mut self, id: IdKey) {
        self.aborts.extend(self.by_id.get(&id));
    }
}

impl Manager {
    /// Puts a stream where [`take_given`](Self::take_given) finds it.
    pub(super) fn give(&mut self, what: HandOver) {
        if self.gives_over_link(&what) {
            return;
        }
        // A few hundred bytes are in a socket that was empty, so nothing is left unsent.
        match self.take_stream(what.stream).filter(|stream| stream.is_flushed()) {
            Some(stream) => self.plain.given.push_back(Given { fd: stream.fd, what }),
            None => self.cm.handle_not_taken(what.id),
        }
    }

    /// Whether there is something for the adapter or its probe.
    pub(crate) fn has_output(&self) -> bool {
        !self.plain.given.is_empty()
            || !self.plain.ends.is_empty()
            || !self.plain.aborts.is_empty()
            || !self.sights.is_empty()
            || self.has_orders()
    }

    /// The next stream for the adapter.
    pub(crate) fn take_given(&mut self) -> Option<Given> {
        self.plain.given.pop_front()
    }

    /// The next queue pair whose stream is to end.
    pub(crate) fn take_end(&mut self) -> Option<QpId> {
        self.plain.ends.pop_front()
    }

    /// The next queue pair whose connection is to end at once.
    pub(crate) fn take_abort(&mut self) -> Option<QpId> {
        self.plain.aborts.pop_front()
    }

    /// The adapter has taken the stream of an identifier, for a queue pair; or it has not.
    pub(crate) fn given(&mut self, now: u64, id: IdKey, qp: Option<QpId>) {
        match qp {
            Some(qp) => self.plain.keep(id, qp),
            None => self.cm.handle_not_taken(id),
        }
        self.settle(now);
    }

    /// Logs that a responder has not waited for the first FPDU of its initiator (`specs/deviations.md`).
    fn log_spoke_first(&self, qp: QpId) {
        let id = self.plain.owner(qp);
        let peer = id.and_then(|id| self.cm.route(id).ok()).and_then(|route| route.dst);
        tracing::warn!(
            peer = %peer.map_or_else(|| "?".into(), |peer| peer.to_string()),
            "the client did not request peer-to-peer mode and is silent, and the program wants \
             to send: sending first, against RFC 5044 7.1.2; set \
             QUIPU_IWARP_SPEAK_FIRST_MS=never to wait for the client"
        );
    }

    /// Something has happened to the stream of a queue pair.
    pub(crate) fn stream_changed(&mut self, now: u64, qp: QpId, change: StreamChange) {
        match change {
            StreamChange::Established => {
                if let Some(id) = self.plain.owner(qp) {
                    self.cm.handle_established(id);
                }
            }
            StreamChange::SpokeFirst => self.log_spoke_first(qp),
            StreamChange::Ended => {
                if let Some(id) = self.plain.forget(qp) {
                    self.cm.handle_ended(id);
                }
            }
        }
        self.settle(now);
    }
}
