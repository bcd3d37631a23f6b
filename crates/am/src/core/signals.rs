//! Signals: messages that say no more than that a peer has come somewhere, for barriers. They run no handler
//! and are not answered one by one.
//!
//! A signal uses a credit. The credits of several go back together: when they are half of all that the peer
//! has; at once when the peer says that it has no other left; and after a while in any case, because the peer
//! may use fewer than it has.

use super::Core;
use crate::conn::{Acceptor, Conn, ConnId, Role};
use crate::endpoint::{EndpointId, Link};
use crate::fabric::{Fabric, LANE_SLOTS};
use crate::message::{FIXED, Kind, Message};
use crate::name::Name;
use crate::types::CallError;

/// For so long the credits of signals stay away, in nanoseconds.
const RETURNED_WITHIN_NS: u64 = 10_000_000;

impl Acceptor {
    /// Whether the credits of signals are to go back: half of all that the peer has are used up.
    fn owes_signals(&self) -> bool {
        self.taken_signals >= (self.granted / 2).max(1)
    }
}

/// Whether a message of `len` bytes, of which `head` has the first, is a signal of which nothing is unusual.
#[inline(always)]
pub(super) fn is_signal(head: &[u8], len: usize) -> bool {
    const SIGNAL: [u8; FIXED] = (Kind::Signal as u64).to_le_bytes();
    len == FIXED && head.starts_with(&SIGNAL)
}

/// Whether the name by which a peer is mapped is that of the one that has connected.
fn is_name_of(mapped: &Name, from: &Name) -> bool {
    let any = mapped.incarnation == 0 || mapped.incarnation == from.incarnation;
    (from.port, from.endpoint) == (mapped.port, mapped.endpoint) && any
}

impl<F: Fabric, H: Clone> Core<F, H> {
    /// Adds one to the signals that the peer at an index has of this endpoint. Nothing comes back, whether
    /// the peer takes it or not.
    ///
    /// # Errors
    ///
    /// [`CallError::WouldBlock`] if there is no credit or no connection now; [`CallError::Unreachable`] if
    /// the peer is gone; the index is not mapped.
    #[inline]
    pub fn signal(&mut self, id: EndpointId, index: u32) -> Result<(), CallError> {
        let target = *self.target(id, index)?;
        let conn = match target.link {
            Link::Conn(conn) => conn,
            Link::Dead(_) => return Err(CallError::Unreachable),
            Link::Idle => {
                self.begin(id, index, target.name, target.tag)?;
                return Err(CallError::WouldBlock);
            }
        };
        let known = self.conns.get_mut(conn).ok_or(CallError::WouldBlock)?;
        let is_up = matches!(&known.role, Role::Initiator(initiator) if initiator.is_up);
        if is_up && !known.lanes.is_out && known.lanes.count_short(self.config.lane_after) {
            self.ask_for_lanes(conn);
        }
        let known = self.conns.get_mut(conn).ok_or(CallError::WouldBlock)?;
        let has_lane = known.lanes.is_out;
        let initiator = known.initiator().ok_or(CallError::WouldBlock)?;
        if !initiator.is_up || initiator.in_flight >= initiator.window {
            return Err(CallError::WouldBlock);
        }
        initiator.in_flight += 1;
        initiator.signals += 1;
        let in_flight = initiator.in_flight;
        let mut message = Message::new(Kind::Signal, 0);
        message.starved = initiator.in_flight >= initiator.window;
        if initiator.told_tag != target.tag {
            initiator.told_tag = target.tag;
            message.tag = Some(target.tag);
        }
        let is_short = message.tag.is_none() && in_flight <= LANE_SLOTS;
        if !(has_lane && is_short && self.push(conn, message.fixed(0), &[])) {
            self.send_head(conn, &message, &[]);
        }
        Ok(())
    }

    /// Takes one of the signals that the peer at an index has sent; whether there was one.
    ///
    /// # Errors
    ///
    /// [`CallError::Unreachable`] if there is none and the peer is gone; the index is not mapped.
    #[inline]
    pub fn take_signal(&mut self, id: EndpointId, index: u32) -> Result<bool, CallError> {
        let target = self.target(id, index)?;
        let (name, link, heard) = (target.name, target.link, target.heard);
        let known = heard.and_then(|conn| self.conns.get_mut(conn)).and_then(Conn::acceptor);
        let acceptor = match known {
            Some(acceptor) => Some(acceptor),
            None => {
                let heard = self.acceptor_of(id, &name);
                if let Some(target) = self.translation_mut(id, index) {
                    target.heard = heard;
                }
                heard.and_then(|conn| self.conns.get_mut(conn)).and_then(Conn::acceptor)
            }
        };
        match acceptor {
            Some(acceptor) if acceptor.signals > 0 => {
                acceptor.signals -= 1;
                Ok(true)
            }
            _ => match self.translation_mut(id, index) {
                Some(target) if target.signals > 0 => {
                    target.signals -= 1;
                    Ok(true)
                }
                _ => match self.take_signal_of_twin(id, &name) {
                    false if matches!(link, Link::Dead(_)) => Err(CallError::Unreachable),
                    is_taken => Ok(is_taken),
                },
            },
        }
    }

    /// Takes a signal from any connection of a peer that has made several: it has mapped this endpoint more
    /// than once, or the end of an earlier connection has not been noticed here.
    fn take_signal_of_twin(&mut self, id: EndpointId, peer: &Name) -> bool {
        if !self.endpoints.get(id).is_some_and(|endpoint| endpoint.has_twins) {
            return false;
        }
        let has_signal = |conn: &Conn| match &conn.role {
            Role::Acceptor(acceptor) => acceptor.signals > 0,
            Role::Initiator(_) => false,
        };
        let of_peer = |conn: &Conn| conn.endpoint == id && is_name_of(peer, &conn.peer);
        let found = self.conns.iter().find(|(_, conn)| has_signal(conn) && of_peer(conn));
        let Some(conn) = found.map(|(conn, _)| conn) else { return false };
        let acceptor = self.conns.get_mut(conn).and_then(Conn::acceptor);
        acceptor.is_some_and(|acceptor| {
            acceptor.signals -= 1;
            true
        })
    }

    /// Keeps the signals of a connection that ends: a process may exit when it has sent its last.
    pub(super) fn keep_signals(&mut self, id: EndpointId, peer: &Name, count: u32) {
        if count == 0 {
            return;
        }
        let Some(endpoint) = self.endpoints.get_mut(id) else { return };
        let mut entries = endpoint.translations.iter_mut().flatten();
        if let Some(target) = entries.find(|target| is_name_of(&target.name, peer)) {
            target.signals = target.signals.saturating_add(count);
        }
    }

    /// The connection over which an endpoint hears from a peer.
    pub(super) fn acceptor_of(&self, id: EndpointId, peer: &Name) -> Option<ConnId> {
        let is_it = |conn: &Conn| {
            let is_peer = is_name_of(peer, &conn.peer);
            is_peer && conn.endpoint == id && matches!(conn.role, Role::Acceptor(_))
        };
        self.conns.iter().find(|(_, conn)| is_it(conn)).map(|(conn, _)| conn)
    }

    /// A signal has come; whether the peer had a credit for it.
    #[inline]
    pub(super) fn received_signal(
        &mut self,
        conn: ConnId,
        message: &Message,
        by_lane: bool,
    ) -> bool {
        let Some(known) = self.conns.get_mut(conn) else { return false };
        let id = known.endpoint;
        let Some(acceptor) = known.acceptor() else { return false };
        if !acceptor.take_request(message.tag) {
            return false;
        }
        acceptor.taken_signals += 1;
        acceptor.lane_signals += u16::from(by_lane);
        acceptor.recent = acceptor.recent.saturating_add(1);
        let owes = message.starved || acceptor.owes_signals();
        if let Some(endpoint) = self.endpoints.get(id)
            && endpoint.tag.accepts(acceptor.tag)
        {
            acceptor.signals = acceptor.signals.saturating_add(1);
            if let Some(bundle) = self.bundles.get_mut(endpoint.bundle) {
                bundle.arrivals += 1;
            }
        }
        if owes {
            self.return_signals(conn);
        } else if self.signals_due.is_none() {
            self.signals_due = Some(self.now.saturating_add(RETURNED_WITHIN_NS));
        }
        true
    }

    /// Gives the credits of all signals back, if it is time.
    pub(super) fn return_late_signals(&mut self) {
        if self.signals_due.is_some_and(|due| due <= self.now) {
            self.signals_due = None;
            for conn in self.conns.ids() {
                self.return_signals(conn);
            }
        }
    }

    /// Gives the credits of signals back.
    pub(super) fn return_signals(&mut self, conn: ConnId) {
        while let Some(acceptor) = self.conns.get_mut(conn).and_then(Conn::acceptor)
            && acceptor.taken_signals > 0
        {
            let count = acceptor.taken_signals.min(i8::MAX as u16);
            acceptor.taken_signals -= count;
            acceptor.in_service = acceptor.in_service.saturating_sub(count);
            let by_lane = acceptor.lane_signals > 0;
            acceptor.lane_signals = acceptor.lane_signals.saturating_sub(count);
            let mut message = Message::new(Kind::SignalsTaken, 0);
            message.credits = count as i8;
            if !(by_lane && self.push(conn, message.fixed(0), &[])) {
                self.send_head(conn, &message, &[]);
            }
        }
    }

    /// The credits of signals come back; whether there are so many.
    pub(super) fn signals_taken(&mut self, conn: ConnId, count: i8) -> bool {
        let Some(initiator) = self.conns.get_mut(conn).and_then(Conn::initiator) else {
            return false;
        };
        let count = u16::from(count.max(0).unsigned_abs());
        if count > initiator.signals {
            return false;
        }
        initiator.signals -= count;
        initiator.in_flight = initiator.in_flight.saturating_sub(count);
        self.close_if_idle(conn);
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::message::MAX_HEAD;

    #[test]
    fn a_signal_is_known_by_its_first_bytes() {
        let written = |message: Message| {
            let mut bytes = [0; MAX_HEAD];
            let len = message.encode(&[], &mut bytes);
            (bytes, len)
        };
        let signal = Message::new(Kind::Signal, 0);
        let (bytes, len) = written(signal);
        assert!(is_signal(&bytes, len) && !is_signal(&bytes, len + 4));
        for other in [Message { starved: true, ..signal }, Message::new(Kind::Revoked, 0)] {
            let (bytes, len) = written(other);
            assert!(!is_signal(&bytes, len), "{other:?}");
        }
    }
}
