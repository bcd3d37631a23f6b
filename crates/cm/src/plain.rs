//! Connections with plain iWARP adapters: an MPA request and reply with the private data of the programs and
//! nothing else (RFC 5044, RFC 6581). Then the stream belongs to the queue pair, and its end is the end of
//! the connection.

use std::net::SocketAddr;

use quipu_iwarp::setup::{MAX_USER_DATA, Outcome, Request};
use quipu_iwarp::wire::mpa::MAX_IRD_ORD;
use quipu_iwarp::{Negotiated, Params};
use quipu_wire::cm::{Ece, Offer};

use crate::connect::{ANSWER_NS, DISCONNECT_NS, seen_by_peer};
use crate::id::{Id, State};
use crate::keys::{IdKey, StreamKey};
use crate::stream::{Owner, Stream};
use crate::types::{
    Action, CallError, EventKind, HandOver, Param, Peer, PortSpace, Protocol, Refusal, gid_of,
    qp_type,
};
use crate::{Cm, errno};

/// Too much private data for a start-up frame.
const TOO_LONG: CallError = CallError::Invalid("the length of the private data");
/// What a depth means that the peer did not say: as many as anybody asks for.
const DEPTH_UNKNOWN: u8 = 128;

/// The code of the greatest path MTU, 4096 B.
const MAX_PATH_MTU: u8 = 5;

/// What this side wants of the start-up.
fn params(param: &Param) -> Params {
    Params::peer_to_peer(param.responder_resources.into(), param.initiator_depth.into())
}

/// A depth of the peer, in the words of `rdma_cm`.
fn depth(value: u16) -> u8 {
    match value {
        MAX_IRD_ORD => DEPTH_UNKNOWN,
        value => value.min(u8::MAX.into()) as u8,
    }
}

/// What the peer says of itself in its start-up frame.
pub(crate) fn offer_of(peer: SocketAddr, ird: Option<u16>, ord: Option<u16>) -> Offer {
    Offer {
        port_space: PortSpace::Tcp.code(),
        qp_type: qp_type::RC,
        srq: false,
        flow_control: true,
        qpn: 0,
        psn: 0,
        responder_resources: ird.map_or(DEPTH_UNKNOWN, depth),
        initiator_depth: ord.map_or(DEPTH_UNKNOWN, depth),
        retry_count: 0,
        rnr_retry_count: 0,
        // It does not say, and what this side has holds.
        path_mtu: MAX_PATH_MTU,
        traffic_class: 0,
        ack_timeout: 0,
        gid: gid_of(peer.ip()),
        ece: Ece::default(),
    }
}

impl Cm {
    pub(crate) fn is_plain(&self, key: IdKey) -> bool {
        self.ids.get(key).is_some_and(|id| id.protocol == Protocol::Iwarp)
    }

    /// Asks a plain iWARP adapter for a connection.
    pub(crate) fn connect_plain(
        &mut self,
        now: u64,
        key: IdKey,
        param: &Param,
        src: SocketAddr,
        dst: SocketAddr,
    ) -> Result<(), CallError> {
        if param.private_data.len() > MAX_USER_DATA {
            return Err(TOO_LONG);
        }
        let offer = self.offer(key, param)?;
        let (stream, first) = Stream::initiator(key, src, dst, params(param), &param.private_data)
            .map_err(|_| TOO_LONG)?;
        self.begin_connect(now, key, offer, stream, first);
        if let Some(id) = self.ids.get_mut(key) {
            id.again.plain = Some(param.private_data.as_slice().into());
        }
        Ok(())
    }

    /// The request of a plain iWARP adapter has come in full.
    pub(crate) fn requested_plain(&mut self, key: StreamKey, request: &Request) {
        let Some(stream) = self.streams.get(key) else { return };
        let Owner::Nobody { listener: by, .. } = stream.owner else { return };
        let (local, peer, on_link) = (stream.local, stream.peer, stream.on_link);
        let Some(listener) = self.ids.get(by) else { return self.close(key, true) };
        let State::Listening(state) = &listener.state else { return self.close(key, true) };
        let served = self.config.takes_plain && listener.takes_untyped();
        if !served || state.untaken.len() >= state.backlog {
            return self.refuse_stream(key, &[]);
        }
        let (ird, ord) = request.enhanced.map_or((None, None), |e| (Some(e.ird), Some(e.ord)));
        let offer = offer_of(peer, ird, ord);
        let mut child = Id::new(listener.channel, listener.space, qp_type::RC, 0);
        child.src = Some(local);
        child.dst = Some(peer);
        child.state = State::Requested;
        child.stream = Some(key);
        child.asked = true;
        (child.on_link, child.protocol) = (on_link, Protocol::Iwarp);
        child.peer = Some(offer);
        child.options = listener.options;
        let child = self.add_child(by, child);
        self.give_stream(key, child);
        let data = request.private_data.as_slice().into();
        self.tell_data(child, EventKind::ConnectRequest, 0, data, seen_by_peer(&offer));
    }

    pub(crate) fn accept_plain(
        &mut self,
        now: u64,
        key: IdKey,
        param: &Param,
    ) -> Result<(), CallError> {
        if param.private_data.len() > MAX_USER_DATA {
            return Err(TOO_LONG);
        }
        let offer = self.offer(key, param)?;
        let id = self.ids.get_mut(key).ok_or(CallError::NoSuchObject)?;
        let stream = id.stream.ok_or(CallError::WrongState)?;
        let data = &param.private_data;
        let accepted = self.streams.get_mut(stream).map(|s| s.accept(params(param), data));
        let Some(Ok((negotiated, bytes))) = accepted else {
            // There is no ready-to-receive message that both ends know.
            id.state = State::Over;
            self.refuse(key, Refusal::Consumer, &[]);
            return Err(CallError::WrongState);
        };
        id.own = Some(offer);
        id.state = State::Accepted;
        self.actions.push_back(Action::Send { stream, bytes });
        self.set_deadline(key, Some(now + ANSWER_NS));
        self.hand_over(key, false, negotiated, &[]);
        Ok(())
    }

    /// The start-up of this side's request has ended; `rest` is what came behind the reply.
    pub(crate) fn answered_plain(&mut self, now: u64, key: IdKey, outcome: Outcome, rest: &[u8]) {
        match outcome {
            Outcome::Established(negotiated) => {
                if let Some(peer) = self.ids.get(key).and_then(|id| id.dst) {
                    self.note_accepted(now, peer);
                }
                self.hand_over(key, true, negotiated, rest);
            }
            Outcome::Rejected { revision: 0 | 1, .. } if self.ask_anew(now, key) => {}
            Outcome::Rejected { private_data, .. } => {
                if let Some(id) = self.ids.get_mut(key) {
                    id.state = State::Over;
                }
                self.drop_stream(key, true);
                self.set_deadline(key, None);
                let (status, data) = (-errno::CONNREFUSED, private_data.into());
                self.tell_data(key, EventKind::Rejected, status, data, Peer::default());
            }
        }
    }

    /// Gives the stream of an identifier to its queue pair.
    fn hand_over(&mut self, key: IdKey, initiator: bool, negotiated: Negotiated, rest: &[u8]) {
        let Some(id) = self.ids.get_mut(key) else { return };
        let (Some(own), Some(stream), Some(dst)) = (id.own, id.stream.take(), id.dst) else {
            return;
        };
        if initiator {
            id.peer = Some(offer_of(dst, negotiated.peer_ird, negotiated.peer_ord));
            id.reply.clone_from(&negotiated.private_data);
        }
        self.forget(stream);
        self.actions.push_back(Action::HandOver(Box::new(HandOver {
            stream,
            id: key,
            qpn: own.qpn,
            peer: dst,
            initiator,
            negotiated,
            ird: own.responder_resources.into(),
            ord: own.initiator_depth.into(),
            rest: rest.to_vec(),
        })));
    }

    /// The connection that the adapter has for an identifier stands: both ends may send.
    pub fn handle_established(&mut self, key: IdKey) {
        let Some(id) = self.ids.get_mut(key).filter(|id| id.protocol.is_of_adapter()) else {
            return;
        };
        if !matches!(id.state, State::Connecting | State::Accepted) {
            return;
        }
        id.state = State::Established;
        let data = std::mem::take(&mut id.reply).into();
        let peer =
            id.peer.filter(|_| !id.asked).map_or(Peer::default(), |peer| seen_by_peer(&peer));
        self.set_deadline(key, None);
        self.tell_data(key, EventKind::Established, 0, data, peer);
    }

    /// The adapter could not take the stream of [`Action::HandOver`].
    pub fn handle_not_taken(&mut self, key: IdKey) {
        let state = self.ids.get(key).map(|id| &id.state);
        if matches!(state, Some(State::Connecting | State::Accepted)) {
            self.fail(key, EventKind::ConnectError, -errno::CONNRESET);
        }
    }

    /// The connection that the adapter has, or was to make, is over. A client of plain iWARP that leaves
    /// after this side's reply was connected: hardware reports the connection when it sends the reply, and
    /// servers that go on after a client has left end at a connect error.
    pub fn handle_ended(&mut self, key: IdKey) {
        let Some(id) = self.ids.get_mut(key).filter(|id| id.protocol.is_of_adapter()) else {
            return;
        };
        match id.state {
            State::Accepted if id.protocol == Protocol::Iwarp => {
                self.handle_established(key);
                self.handle_ended(key);
            }
            State::Connecting | State::Accepted => {
                self.fail(key, EventKind::ConnectError, -errno::CONNRESET);
            }
            State::Established | State::Disconnecting => {
                id.state = State::Disconnected;
                self.set_deadline(key, None);
                self.tell(key, EventKind::Disconnected, 0);
            }
            State::Disconnected => self.set_deadline(key, None),
            _ => {}
        }
    }

    /// The program ends a connection, also one that is not established yet. What the peer has ended is over.
    pub(crate) fn disconnect_plain(&mut self, now: u64, key: IdKey) -> Result<(), CallError> {
        let id = self.ids.get_mut(key).ok_or(CallError::NoSuchObject)?;
        match id.state {
            State::Established | State::Accepted => {
                id.state = State::Disconnecting;
                self.actions.push_back(Action::End { id: key });
                self.set_deadline(key, Some(now + DISCONNECT_NS));
                Ok(())
            }
            State::Disconnecting | State::Disconnected | State::TimeWait => Ok(()),
            _ if id.has_asked_or_was_asked() => Ok(()),
            _ => Err(CallError::WrongState),
        }
    }

    /// Says why a reply cannot be accepted, and closes the stream.
    pub(crate) fn say_last_words(&mut self, key: StreamKey) {
        let Some(stream) = self.streams.get_mut(key) else { return };
        let bytes = std::mem::take(&mut stream.last_words);
        if bytes.is_empty() {
            return;
        }
        let Owner::Id(id) = stream.owner else { return };
        self.actions.push_back(Action::Send { stream: key, bytes });
        self.drop_stream(id, false);
    }
}
