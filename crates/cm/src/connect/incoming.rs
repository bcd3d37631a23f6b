//! What the streams of connections bring: the peer's messages, and the loss of a stream.

use std::net::SocketAddr;

use quipu_iwarp::setup::{Outcome, Request};
use quipu_wire::cm::{self as wire, Frame, Setup};

use super::{ANSWER_NS, SECOND, padded, reason, seen_by_peer};
use crate::admission::Origin;
use crate::id::{Id, State};
use crate::keys::{IdKey, StreamKey};
use crate::stream::{Incoming, Owner, Stream};
use crate::types::{EventKind, Loss, Peer, PortSpace, Protocol, qp_type};
use crate::{Clocked, Cm, errno};

/// How long a stranger may take to send its request.
const REQUEST_NS: u64 = 10 * SECOND;

impl Cm {
    /// A peer has opened a TCP connection to a listener. `None`: it is to be closed.
    pub fn handle_accepted(
        &mut self,
        now: u64,
        listener: IdKey,
        local: SocketAddr,
        peer: SocketAddr,
    ) -> Option<StreamKey> {
        if !self.is_listening(listener) || self.removed || !self.takes_family_of(listener, peer) {
            return None;
        }
        Some(self.admit_stream(now, listener, local, peer))
    }

    /// A stream begins whose request is to come.
    pub(crate) fn admit_stream(
        &mut self,
        now: u64,
        listener: IdKey,
        local: SocketAddr,
        peer: SocketAddr,
    ) -> StreamKey {
        let origin = Origin::from(peer.ip());
        let limits = (self.config.half_open, self.config.half_open_per_address);
        if let Some(oldest) = self.admission.oldest_above(listener, origin, limits) {
            self.close(oldest, true);
        }
        let (number, deadline) = (self.admission.number(), now + REQUEST_NS);
        let owner = Owner::Nobody { listener, number, deadline };
        let stream = self.streams.insert(Stream::responder(owner, local, peer));
        self.admission.add(listener, origin, number, stream);
        self.deadlines.insert((deadline, Clocked::Stream(stream)));
        stream
    }

    /// The connection of [`Action::Connect`](crate::Action::Connect) stands.
    pub fn handle_reached(&mut self, now: u64, stream: StreamKey) {
        let owner = self.streams.get(stream).map(|stream| stream.owner);
        let Some(Owner::Id(key)) = owner else { return };
        if self.ids.get(key).is_some_and(|id| matches!(id.state, State::Connecting)) {
            self.set_deadline(key, Some(now + ANSWER_NS));
        }
    }

    /// Bytes have come in a stream. All of them are taken.
    pub fn handle_bytes(&mut self, now: u64, key: StreamKey, mut bytes: &[u8]) {
        while !bytes.is_empty() {
            let Some(stream) = self.streams.get_mut(key) else { return };
            let owner = stream.owner;
            match (stream.next(&mut bytes), owner) {
                (Ok(Some(Incoming::Request(request))), _) => self.requested(key, &request),
                (Ok(Some(Incoming::Outcome(outcome))), Owner::Id(id)) if self.is_plain(id) => {
                    return self.answered_plain(now, id, outcome, bytes);
                }
                (Ok(Some(Incoming::Outcome(outcome))), Owner::Id(id)) => self.ended(id, &outcome),
                (Ok(Some(Incoming::Frame(frame))), Owner::Id(id)) => self.framed(now, id, frame),
                (Ok(None), _) => {}
                (_, Owner::Id(id)) if self.is_of_revision_1(key) && self.ask_anew(now, id) => {}
                (_, Owner::Id(id)) => {
                    self.say_last_words(key);
                    self.broken(now, id, -errno::PROTO);
                }
                (_, Owner::Nobody { .. }) => self.close(key, true),
            }
        }
    }

    /// A stream is lost: it has ended, or was never made.
    pub fn handle_lost(&mut self, now: u64, key: StreamKey, loss: Loss) {
        let Some(stream) = self.forget(key) else { return };
        let Owner::Id(id) = stream.owner else { return };
        if let Some(id) = self.ids.get_mut(id) {
            id.stream = None;
        }
        if loss == Loss::Closed && stream.is_unanswered() && self.ask_anew(now, id) {
            return;
        }
        let Some(state) = self.ids.get(id).map(|id| &id.state) else { return };
        match (state, loss) {
            (State::Connecting, Loss::Refused) => self.refused(now, id, stream),
            (State::Connecting, Loss::TimedOut) => {
                self.fail(id, EventKind::Unreachable, -errno::TIMEDOUT);
            }
            (State::Connecting, Loss::Failed(errno)) => {
                self.fail(id, EventKind::Unreachable, -errno);
            }
            _ => self.broken(now, id, -errno::CONNRESET),
        }
    }

    /// The stream of an identifier is of no use any more.
    fn broken(&mut self, now: u64, key: IdKey, status: i32) {
        let Some(id) = self.ids.get_mut(key) else { return };
        match id.state {
            State::Requested => self.lapse(key),
            State::Established => {
                self.drop_stream(key, true);
                self.peer_ends(key);
            }
            State::Disconnecting => self.finish_disconnect(now, key, 0),
            State::Responded if id.ended_early => self.drop_stream(key, true),
            // So iWARP adapters tell of a peer that closes in place of a reply.
            State::Connecting if id.protocol == Protocol::Iwarp && status == -errno::CONNRESET => {
                self.fail(key, EventKind::Rejected, status);
            }
            State::Connecting | State::Responded | State::Accepted => {
                self.fail(key, EventKind::ConnectError, status);
            }
            _ => self.drop_stream(key, true),
        }
    }

    /// A request has come in full.
    fn requested(&mut self, key: StreamKey, request: &Request) {
        let Some(stream) = self.streams.get(key) else { return };
        let Owner::Nobody { listener: by, .. } = stream.owner else { return };
        if self.removed {
            return self.close(key, true);
        }
        let (local, peer) = (stream.local, stream.peer);
        if !wire::is_cm(&request.private_data) {
            return self.requested_plain(key, request);
        }
        let no_such_service = Setup::Reject(reason::INVALID_SERVICE_ID, &[]).to_bytes();
        let Some(listener) = self.ids.get(by) else { return self.close(key, true) };
        let State::Listening(state) = &listener.state else { return self.close(key, true) };
        let Ok(Setup::Request(offer, data)) = Setup::parse(&request.private_data) else {
            return self.refuse_stream(key, &no_such_service);
        };
        if stream.on_link || !self.serves(local, peer) || offer.port_space != listener.space.code()
        {
            return self.refuse_stream(key, &no_such_service);
        }
        // Those of RDMA_PS_TCP may get queue pairs of any type, whatever they were made for.
        let asked = qp_type::of_peer(offer.qp_type);
        let kind = if listener.qp_type == 0 { asked } else { listener.qp_type };
        let is_other = listener.space == PortSpace::Ib && kind != asked;
        if is_other || state.untaken.len() >= state.backlog {
            let refused = Setup::Reject(reason::CONSUMER, &[]).to_bytes();
            return self.refuse_stream(key, &refused);
        }
        let (channel, space) = (listener.channel, listener.space);
        let mut child = Id::new(channel, space, kind, 0);
        child.src = Some(local);
        child.dst = Some(peer);
        child.state = State::Requested;
        child.stream = Some(key);
        child.asked = true;
        child.peer = Some(offer);
        child.options.tos = listener.options.tos;
        child.options.ack_timeout = listener.options.ack_timeout;
        let child = self.add_child(by, child);
        self.give_stream(key, child);
        let data = padded(data, wire::req_data(offer.port_space));
        self.tell_data(child, EventKind::ConnectRequest, 0, data, seen_by_peer(&offer));
    }

    /// A stream has sent its request, and belongs to its identifier from now on.
    pub(crate) fn give_stream(&mut self, key: StreamKey, child: IdKey) {
        let Some(stream) = self.streams.get_mut(key) else { return };
        let (owner, peer) = (std::mem::replace(&mut stream.owner, Owner::Id(child)), stream.peer);
        let Owner::Nobody { listener, number, deadline } = owner else { return };
        self.admission.remove(listener, Origin::from(peer.ip()), number);
        self.deadlines.remove(&(deadline, Clocked::Stream(key)));
    }

    /// Adds the identifier of a request to its listener and channel.
    pub(crate) fn add_child(&mut self, listener: IdKey, mut child: Id) -> IdKey {
        child.listener = Some(listener);
        if let Some(channel) = self.channels.get_mut(child.channel) {
            channel.users += 1;
        }
        let child = self.ids.insert(child);
        if let Some(State::Listening(state)) = self.ids.get_mut(listener).map(|id| &mut id.state) {
            state.untaken.insert(child);
        }
        child
    }

    /// MPA start-up of this side's request has ended.
    fn ended(&mut self, key: IdKey, outcome: &Outcome) {
        let Some(id) = self.ids.get_mut(key) else { return };
        let (accepted, data) = match outcome {
            Outcome::Established(negotiated) => (true, &negotiated.private_data),
            Outcome::Rejected { private_data, .. } => (false, private_data),
        };
        match (accepted, Setup::parse(data)) {
            (true, Ok(Setup::Reply(offer, data))) => {
                id.peer = Some(offer);
                id.state = State::Responded;
                let data = padded(data, wire::REP_DATA);
                self.set_deadline(key, None);
                let peer = seen_by_peer(&offer);
                self.tell_data(key, EventKind::ConnectResponse, 0, data, peer);
            }
            (false, Ok(Setup::Reject(reason, data))) => {
                id.state = State::Over;
                let data = padded(data, wire::REJ_DATA);
                self.drop_stream(key, true);
                self.set_deadline(key, None);
                self.tell_data(key, EventKind::Rejected, reason.into(), data, Peer::default());
            }
            // A plain iWARP adapter refuses with data of its own.
            (false, _) => self.fail(key, EventKind::Rejected, reason::CONSUMER.into()),
            (true, _) => self.fail(key, EventKind::ConnectError, -errno::PROTO),
        }
    }

    /// A frame has come.
    fn framed(&mut self, now: u64, key: IdKey, frame: Frame) {
        let Some(id) = self.ids.get_mut(key) else { return };
        match (&id.state, frame) {
            (State::Accepted, Frame::ReadyToUse) => {
                id.state = State::Established;
                let ended = id.ended_early;
                self.set_deadline(key, None);
                self.tell(key, EventKind::Established, 0);
                if ended {
                    let _ = self.disconnect(now, key);
                }
            }
            // The program knew before (`establish`).
            (State::Established | State::Disconnecting, Frame::ReadyToUse) if id.asked => {}
            (State::Accepted | State::Responded, Frame::Reject(reason)) => {
                self.fail(key, EventKind::Rejected, reason.into());
            }
            (State::Established, Frame::Disconnect) => self.peer_ends(key),
            // What the peer has sent before is in this queue pair, or about to be.
            (State::Responded, Frame::Disconnect) => id.ended_early = true,
            (State::Disconnecting, Frame::Disconnect) => {
                self.send_frame(key, Frame::Disconnected);
                self.finish_disconnect(now, key, 0);
            }
            (State::Disconnecting, Frame::Disconnected | Frame::Reject(_)) => {
                self.finish_disconnect(now, key, 0);
            }
            _ => self.broken(now, key, -errno::PROTO),
        }
    }
}
