//! Connections of QPIP: the adapter's own TCP, and nothing else on the wire (`specs/qpip.md`). The handshake
//! is the request, the first word behind it its acceptance, an RST its refusal, and a FIN the end. There is
//! no room for what programs would like to tell each other meanwhile.

use std::net::{IpAddr, SocketAddr};

use crate::connect::{ANSWER_NS, DISCONNECT_NS, seen_by_peer};
use crate::id::{Id, State};
use crate::keys::{IdKey, StreamKey};
use crate::plain::offer_of;
use crate::types::{Action, CallError, EventKind, Loss, Param, PortSpace, Protocol, qp_type};
use crate::{Cm, errno};

/// TCP takes none.
const NO_ROOM: CallError = CallError::Invalid("private data over bare TCP");

/// Why a peer is turned away.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unwanted {
    /// Nobody listens: it is to be refused.
    Refused,
    /// Too many wait for the program: it is to wait until some are taken.
    Full,
}

/// Whether a listener that is bound to `at` is there for peers of the own address `local`. The adapter
/// watches a port of all of them. As in Linux, every address of one family is every address of the other,
/// too, unless the program wants one family only: many bind to 0.0.0.0 whatever addresses there are.
fn takes(at: Option<IpAddr>, local: IpAddr, one_family: Option<bool>) -> bool {
    match at {
        Some(at) if at.is_unspecified() => {
            at.is_ipv4() == local.is_ipv4() || one_family != Some(true)
        }
        Some(at) => at == local,
        None => false,
    }
}

impl Cm {
    /// An identifier is on a packet link from now on, where `protocol` is spoken: the world has found its
    /// address, or its peer's, there.
    ///
    /// # Errors
    ///
    /// It is connected, or for datagrams; there is none.
    pub fn use_link(&mut self, key: IdKey, protocol: Protocol) -> Result<(), CallError> {
        let id = self.ids.get_mut(key).ok_or(CallError::NoSuchObject)?;
        let early = matches!(id.state, State::Idle | State::AddressResolved);
        if !early || id.space != PortSpace::Tcp {
            return Err(CallError::WrongState);
        }
        (id.on_link, id.protocol) = (true, protocol);
        Ok(())
    }

    /// Whether an identifier is on a packet link.
    pub fn is_on_link(&self, key: IdKey) -> bool {
        self.ids.get(key).is_some_and(|id| id.on_link)
    }

    /// As [`handle_accepted`](Self::handle_accepted), of a stream that has come over a packet link. Plain
    /// iWARP alone is spoken there.
    pub fn handle_accepted_on_link(
        &mut self,
        now: u64,
        listener: IdKey,
        local: SocketAddr,
        peer: SocketAddr,
    ) -> Option<StreamKey> {
        if !self.is_listening(listener) || self.removed || !self.is_bound_to(listener, local.ip()) {
            return None;
        }
        let stream = self.admit_stream(now, listener, local, peer);
        if let Some(stream) = self.streams.get_mut(stream) {
            stream.on_link = true;
        }
        Some(stream)
    }

    /// Whether an identifier is bound to the own address `local` of a packet link, or to every one of its
    /// kind.
    pub fn is_bound_to(&self, key: IdKey, local: IpAddr) -> bool {
        self.ids
            .get(key)
            .is_some_and(|id| takes(id.src.map(|src| src.ip()), local, id.options.v6_only))
    }

    /// Whether an identifier connects, or is about to try once more.
    pub fn is_connecting(&self, key: IdKey) -> bool {
        self.ids.get(key).is_some_and(|id| matches!(id.state, State::Connecting))
    }

    /// The port of an identifier has become known.
    pub fn set_port(&mut self, key: IdKey, port: u16) {
        if let Some(src) = self.ids.get_mut(key).and_then(|id| id.src.as_mut()) {
            src.set_port(port);
        }
    }

    /// A port was chosen for an identifier that was bound to any.
    pub fn choose_port(&mut self, key: IdKey, port: u16) {
        self.set_port(key, port);
        if let Some(id) = self.ids.get_mut(key) {
            id.port_chosen = true;
        }
    }

    /// Whether the port of an identifier was chosen for it.
    pub fn is_port_chosen(&self, key: IdKey) -> bool {
        self.ids.get(key).is_some_and(|id| id.port_chosen)
    }

    /// The packet link is gone for good: connections over it have ended, and whatever else is bound to it
    /// hears [`DeviceRemoval`](EventKind::DeviceRemoval). Requests that no program has taken vanish.
    pub fn handle_link_lost(&mut self) {
        let on_link = |id: &Id| id.on_link;
        let keys: Vec<IdKey> = self.ids.keys().collect();
        for key in keys {
            let Some(id) = self.ids.get(key).filter(|id| on_link(id)) else { continue };
            match id.state {
                _ if id.listener.is_some() => self.retract(key),
                State::Disconnected | State::TimeWait | State::Over => {}
                State::Connecting | State::Accepted | State::Established | State::Disconnecting => {
                    self.handle_ended(key)
                }
                _ => self.lose_device(key),
            }
        }
    }

    pub(crate) fn connect_bare(
        &mut self,
        now: u64,
        key: IdKey,
        param: &Param,
        dst: SocketAddr,
    ) -> Result<(), CallError> {
        if !param.private_data.is_empty() {
            return Err(NO_ROOM);
        }
        let offer = self.offer(key, param)?;
        let id = self.ids.get_mut(key).ok_or(CallError::NoSuchObject)?;
        id.own = Some(offer);
        id.peer = Some(offer_of(dst, Some(0), Some(0)));
        id.state = State::Connecting;
        self.reach(now, key);
        Ok(())
    }

    /// Has the adapter connect.
    pub(crate) fn reach(&mut self, now: u64, key: IdKey) {
        let Some(id) = self.ids.get(key) else { return };
        let (Some(own), Some(to)) = (id.own, id.dst) else { return };
        self.actions.push_back(Action::Reach { id: key, qpn: own.qpn, to });
        // As long as the peer's program may take: until it answers, TCP knows of no peer.
        self.set_deadline(key, Some(now + ANSWER_NS));
    }

    /// A peer asks for a connection with a listener, from `peer`, at `local`: the identifier that stands for
    /// it.
    ///
    /// # Errors
    ///
    /// It is to be turned away.
    pub fn handle_incoming(
        &mut self,
        listener: IdKey,
        local: SocketAddr,
        peer: SocketAddr,
    ) -> Result<IdKey, Unwanted> {
        let by = listener;
        let listener = self.ids.get(by).filter(|_| !self.removed).ok_or(Unwanted::Refused)?;
        let State::Listening(state) = &listener.state else { return Err(Unwanted::Refused) };
        let at = listener.src.map(|src| src.ip());
        if !listener.takes_untyped() || !takes(at, local.ip(), listener.options.v6_only) {
            return Err(Unwanted::Refused);
        }
        if state.untaken.len() >= state.backlog {
            return Err(Unwanted::Full);
        }
        let offer = offer_of(peer, Some(0), Some(0));
        let mut child = Id::new(listener.channel, listener.space, qp_type::RC, 0);
        child.src = Some(local);
        child.dst = Some(peer);
        child.state = State::Requested;
        child.asked = true;
        (child.on_link, child.protocol) = (true, Protocol::Qpip);
        child.peer = Some(offer);
        child.options = listener.options;
        let child = self.add_child(by, child);
        let data = Box::default();
        self.tell_data(child, EventKind::ConnectRequest, 0, data, seen_by_peer(&offer));
        Ok(child)
    }

    pub(crate) fn accept_bare(
        &mut self,
        now: u64,
        key: IdKey,
        param: &Param,
    ) -> Result<(), CallError> {
        if !param.private_data.is_empty() {
            return Err(NO_ROOM);
        }
        let offer = self.offer(key, param)?;
        let id = self.ids.get_mut(key).ok_or(CallError::NoSuchObject)?;
        id.own = Some(offer);
        id.state = State::Accepted;
        self.actions.push_back(Action::Answer { id: key, qpn: offer.qpn });
        self.set_deadline(key, Some(now + ANSWER_NS));
        Ok(())
    }

    /// The connection of [`Action::Reach`] was never made. A port that refuses is tried again for a moment
    /// (`again`).
    pub fn handle_unreached(&mut self, now: u64, key: IdKey, loss: Loss) {
        let Some(id) = self.ids.get(key) else { return };
        if !matches!(id.state, State::Connecting) || id.protocol != Protocol::Qpip {
            return;
        }
        match loss {
            Loss::Refused => self.refused_bare(now, key),
            Loss::Declined => self.fail(key, EventKind::Rejected, -errno::CONNREFUSED),
            Loss::TimedOut => self.fail(key, EventKind::Unreachable, -errno::TIMEDOUT),
            Loss::Failed(errno) => self.fail(key, EventKind::Unreachable, -errno),
            Loss::Closed => self.handle_ended(key),
        }
    }

    /// The adapter cannot connect the queue pair that the program has named: it is none, or not idle.
    pub fn handle_unusable(&mut self, key: IdKey, errno: i32) {
        let state = self.ids.get(key).map(|id| &id.state);
        if let Some(State::Connecting | State::Accepted) = state {
            self.fail(key, EventKind::ConnectError, -errno);
        }
    }

    /// The peer has closed its direction, and this end follows, for which there is a bound: the program waits
    /// for what it has posted to be flushed.
    pub fn handle_peer_closed(&mut self, now: u64, key: IdKey) {
        self.handle_ended(key);
        if self.ids.get(key).is_some_and(|id| matches!(id.state, State::Disconnected)) {
            self.set_deadline(key, Some(now + DISCONNECT_NS));
        }
    }

    /// A peer about whom the program was to decide has given up.
    pub fn handle_withdrawn(&mut self, key: IdKey) {
        let Some(id) = self.ids.get(key) else { return };
        match id.state {
            State::Requested => self.lapse(key),
            _ => self.handle_ended(key),
        }
    }
}
