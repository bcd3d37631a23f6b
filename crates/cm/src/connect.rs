//! Connections: the messages of InfiniBand's communication management over a TCP stream.

mod incoming;

use quipu_iwarp::setup::MAX_USER_DATA;
use quipu_wire::cm::{self as wire, Frame, Offer, Setup};

use crate::admission::Origin;
use crate::id::State;
use crate::keys::{IdKey, StreamKey};
use crate::stream::{MPA, Owner, Stream};
use crate::types::{Action, CallError, EventKind, Param, Peer, Protocol, Refusal};
use crate::{Clocked, Cm, errno};

pub(crate) const SECOND: u64 = 1_000_000_000;
/// How long a TCP connection may take to be made.
pub(crate) const REACH_NS: u64 = 10 * SECOND;
/// How long a program may take to answer a request, and to say that the connection stands: the
/// kernel's 4.3 s, repeated 15 times, come to this.
pub(crate) const ANSWER_NS: u64 = 60 * SECOND;
/// How long a peer may take to agree to the end of a connection.
pub(crate) const DISCONNECT_NS: u64 = 10 * SECOND;
/// How long after its end nothing is under way any more.
const TIMEWAIT_NS: u64 = SECOND;

/// Reasons of a REJ, as InfiniBand numbers them (IBA 12.6.7.2).
pub(crate) mod reason {
    use crate::types::Refusal;

    /// Nobody listens there.
    pub(crate) const INVALID_SERVICE_ID: u8 = 8;
    /// The program refuses.
    pub(crate) const CONSUMER: u8 = Refusal::Consumer as u8;
}

/// Private data as events report it.
pub(crate) fn padded(data: &[u8], size: usize) -> Box<[u8]> {
    let mut out = vec![0; size];
    let len = data.len().min(size);
    out[..len].copy_from_slice(&data[..len]);
    out.into()
}

/// What the other side makes of an offer: what one has outstanding, the other answers.
pub(crate) fn seen_by_peer(offer: &Offer) -> Peer {
    Peer {
        responder_resources: offer.initiator_depth,
        initiator_depth: offer.responder_resources,
        flow_control: offer.flow_control,
        retry_count: offer.retry_count,
        rnr_retry_count: offer.rnr_retry_count,
        srq: offer.srq,
        qpn: offer.qpn,
        ece: offer.ece,
        ..Peer::default()
    }
}

impl Cm {
    /// Asks the peer for a connection, or for the queue pair of a datagram service.
    ///
    /// # Errors
    ///
    /// The route is not resolved, or there is too much private data.
    pub fn connect(&mut self, now: u64, key: IdKey, param: &Param) -> Result<(), CallError> {
        let id = self.ids.get(key).ok_or(CallError::NoSuchObject)?;
        let State::RouteResolved = id.state else { return Err(CallError::WrongState) };
        let (Some(src), Some(dst)) = (id.src, id.dst) else { return Err(CallError::WrongState) };
        if id.is_datagram() {
            return self.look_up(now, key, param, dst);
        }
        match id.protocol {
            Protocol::Qpip => return self.connect_bare(now, key, param, dst),
            // Nobody listens there, and TCP would connect the socket to itself.
            protocol if src == dst => {
                let plain = protocol == Protocol::Iwarp;
                let none = i32::from(reason::INVALID_SERVICE_ID);
                self.fail(key, EventKind::Rejected, if plain { -errno::CONNREFUSED } else { none });
                return Ok(());
            }
            Protocol::Iwarp => return self.connect_plain(now, key, param, src, dst),
            Protocol::Quipu => {}
        }
        let offer = self.offer(key, param)?;
        if param.private_data.len() > wire::req_data(offer.port_space) {
            return Err(CallError::Invalid("the length of the private data"));
        }
        let request = Setup::Request(offer, &param.private_data).to_bytes();
        let (stream, first) = Stream::initiator(key, src, dst, MPA, &request)
            .map_err(|_| CallError::Invalid("the length of the private data"))?;
        self.begin_connect(now, key, offer, stream, first);
        Ok(())
    }

    pub(crate) fn begin_connect(
        &mut self,
        now: u64,
        key: IdKey,
        offer: Offer,
        stream: Stream,
        first: Vec<u8>,
    ) {
        let to = stream.peer;
        let stream = self.streams.insert(stream);
        if let Some(id) = self.ids.get_mut(key) {
            id.stream = Some(stream);
            id.own = Some(offer);
            id.again.first.clone_from(&first);
            id.state = State::Connecting;
        }
        self.set_deadline(key, Some(now + REACH_NS));
        self.actions.push_back(Action::Connect { stream, id: key, to, first });
    }

    /// What this side says of itself.
    pub(crate) fn offer(&mut self, key: IdKey, param: &Param) -> Result<Offer, CallError> {
        let psn = self.draw_psn();
        let path_mtu = self.config.path_mtu;
        let id = self.ids.get_mut(key).ok_or(CallError::NoSuchObject)?;
        let gid = id.own_gid(&self.own);
        Ok(Offer {
            port_space: id.space.code(),
            qp_type: id.service(),
            srq: param.srq,
            flow_control: param.flow_control,
            qpn: param.qpn & 0x00ff_ffff,
            psn: *id.psn.get_or_insert(psn),
            responder_resources: param.responder_resources,
            initiator_depth: param.initiator_depth,
            retry_count: param.retry_count.min(7),
            rnr_retry_count: param.rnr_retry_count.min(7),
            path_mtu: id.peer.map_or(path_mtu, |peer| peer.path_mtu.min(path_mtu)),
            traffic_class: id.traffic_class(),
            ack_timeout: id.ack_timeout(),
            gid,
            ece: param.ece,
        })
    }

    /// Accepts a request; or, without `param`, says to the peer that has accepted that the connection
    /// stands.
    ///
    /// # Errors
    ///
    /// There is nothing to accept, or too much private data.
    pub fn accept(&mut self, now: u64, key: IdKey, param: Option<&Param>) -> Result<(), CallError> {
        let id = self.ids.get(key).ok_or(CallError::NoSuchObject)?;
        match (&id.state, param) {
            (State::Responded, _) => self.say_ready(key),
            (State::Requested, Some(param)) => match id.protocol {
                Protocol::Quipu => self.reply(now, key, param),
                Protocol::Iwarp => self.accept_plain(now, key, param),
                Protocol::Qpip => self.accept_bare(now, key, param),
            },
            (&State::Asked(question), Some(param)) => self.answer(key, question, param),
            _ => Err(CallError::WrongState),
        }
    }

    fn reply(&mut self, now: u64, key: IdKey, param: &Param) -> Result<(), CallError> {
        if param.private_data.len() > wire::REP_DATA {
            return Err(CallError::Invalid("the length of the private data"));
        }
        let offer = self.offer(key, param)?;
        let reply = Setup::Reply(offer, &param.private_data).to_bytes();
        let id = self.ids.get_mut(key).ok_or(CallError::NoSuchObject)?;
        let stream = id.stream.ok_or(CallError::WrongState)?;
        let accepted = self.streams.get_mut(stream).map(|stream| stream.accept(MPA, &reply));
        let Some(Ok((_, bytes))) = accepted else { return Err(CallError::WrongState) };
        id.own = Some(offer);
        id.state = State::Accepted;
        self.actions.push_back(Action::Send { stream, bytes });
        self.set_deadline(key, Some(now + ANSWER_NS));
        Ok(())
    }

    fn say_ready(&mut self, key: IdKey) -> Result<(), CallError> {
        let id = self.ids.get_mut(key).ok_or(CallError::NoSuchObject)?;
        id.state = State::Established;
        let ended = id.ended_early;
        self.send_frame(key, Frame::ReadyToUse);
        if ended {
            self.peer_ends(key);
        }
        Ok(())
    }

    /// Refuses a request, or a reply. Of QPIP the private data are left out.
    ///
    /// # Errors
    ///
    /// There is nothing to refuse, or too much private data.
    pub fn reject(&mut self, key: IdKey, why: Refusal, data: &[u8]) -> Result<(), CallError> {
        let id = self.ids.get_mut(key).ok_or(CallError::NoSuchObject)?;
        let most = match id.protocol {
            Protocol::Iwarp => MAX_USER_DATA,
            // It has no room for any: what counts is the refusal.
            Protocol::Qpip => usize::MAX,
            Protocol::Quipu if id.is_datagram() => wire::SIDR_REP_DATA,
            Protocol::Quipu => wire::REJ_DATA,
        };
        if data.len() > most {
            return Err(CallError::Invalid("the length of the private data"));
        }
        match id.state {
            State::Requested => {
                id.state = State::Over;
                self.refuse(key, why, data);
            }
            State::Responded => {
                id.state = State::Over;
                self.leave_by(key, Frame::Reject(why as u8), false);
            }
            State::Asked(question) => self.refuse_look_up(key, question, data),
            _ => return Err(CallError::WrongState),
        }
        Ok(())
    }

    /// Refuses the request of an identifier in the name of the program, and closes its stream.
    pub(crate) fn refuse(&mut self, key: IdKey, why: Refusal, data: &[u8]) {
        let Some(id) = self.ids.get_mut(key) else { return };
        if id.protocol == Protocol::Qpip {
            return self.actions.push_back(Action::Refuse { id: key });
        }
        let Some(stream) = id.stream.take() else { return };
        if id.protocol == Protocol::Iwarp {
            return self.refuse_stream(stream, data);
        }
        let reject = Setup::Reject(why as u8, data);
        self.refuse_stream(stream, &reject.to_bytes());
    }

    pub(crate) fn refuse_stream(&mut self, stream: StreamKey, reject: &[u8]) {
        let refused = self.streams.get_mut(stream).map(|stream| stream.reject(reject));
        if let Some(Ok(bytes)) = refused {
            self.actions.push_back(Action::Send { stream, bytes });
            self.close(stream, false);
        } else {
            self.close(stream, true);
        }
    }

    /// Ends a connection, or agrees to its end. Where this side has said so before, or there is nothing to
    /// end any more or yet, nothing comes of it, as with the kernel's.
    ///
    /// # Errors
    ///
    /// The identifier has neither sent nor received a request.
    pub fn disconnect(&mut self, now: u64, key: IdKey) -> Result<(), CallError> {
        let id = self.ids.get_mut(key).ok_or(CallError::NoSuchObject)?;
        if id.protocol.is_of_adapter() {
            return self.disconnect_plain(now, key);
        }
        match id.state {
            State::Established => {
                id.state = State::Disconnecting;
                self.send_frame(key, Frame::Disconnect);
                self.set_deadline(key, Some(now + DISCONNECT_NS));
            }
            State::Disconnected => {
                self.leave_by(key, Frame::Disconnected, true);
                self.wait_out(now, key);
            }
            // Messages may have gone through the queue pair before the peer's program has said a word.
            State::Accepted => id.ended_early = true,
            State::Disconnecting | State::TimeWait => {}
            _ if id.has_asked_or_was_asked() => {}
            _ => return Err(CallError::WrongState),
        }
        Ok(())
    }

    /// The peer has ended a connection that stands.
    fn peer_ends(&mut self, key: IdKey) {
        if let Some(id) = self.ids.get_mut(key) {
            id.state = State::Disconnected;
        }
        self.tell(key, EventKind::Disconnected, 0);
    }

    /// Takes it that the connection stands: messages have come through the queue pair
    /// (`IBV_EVENT_COMM_EST`), or the program says so. An adapter's own connections are left to the adapter.
    ///
    /// # Errors
    ///
    /// There is nothing to establish, or it stands already.
    pub fn establish(&mut self, key: IdKey) -> Result<(), CallError> {
        let id = self.ids.get_mut(key).ok_or(CallError::NoSuchObject)?;
        match id.state {
            _ if id.protocol.is_of_adapter() && id.own.or(id.peer).is_some() => Ok(()),
            State::Accepted if !id.ended_early => {
                id.state = State::Established;
                self.set_deadline(key, None);
                self.tell(key, EventKind::Established, 0);
                Ok(())
            }
            State::Responded => self.say_ready(key),
            State::Established => Err(CallError::Connected),
            _ => Err(CallError::WrongState),
        }
    }

    fn send_frame(&mut self, key: IdKey, frame: Frame) {
        if let Some(stream) = self.ids.get(key).and_then(|id| id.stream) {
            let bytes = frame.to_bytes().to_vec();
            self.actions.push_back(Action::Send { stream, bytes });
        }
    }

    /// Sends a last frame and closes the stream of an identifier, if it has one.
    fn leave_by(&mut self, key: IdKey, frame: Frame, reset: bool) {
        self.send_frame(key, frame);
        self.drop_stream(key, reset);
    }

    pub(crate) fn drop_stream(&mut self, key: IdKey, reset: bool) {
        if let Some(stream) = self.ids.get_mut(key).and_then(|id| id.stream.take()) {
            self.close(stream, reset);
        }
    }

    /// Closes a stream, no matter who owns it.
    pub(crate) fn close(&mut self, stream: StreamKey, reset: bool) {
        if self.forget(stream).is_some() {
            self.actions.push_back(Action::Close { stream, reset });
        }
    }

    pub(crate) fn forget(&mut self, key: StreamKey) -> Option<Stream> {
        let stream = self.streams.remove(key)?;
        self.admit_no_more(key, &stream);
        Some(stream)
    }

    /// A stream has sent its request, or is gone.
    fn admit_no_more(&mut self, key: StreamKey, stream: &Stream) {
        if let Owner::Nobody { listener, number, deadline } = stream.owner {
            self.admission.remove(listener, Origin::from(stream.peer.ip()), number);
            self.deadlines.remove(&(deadline, Clocked::Stream(key)));
        }
    }

    /// The connection is over on both sides.
    fn wait_out(&mut self, now: u64, key: IdKey) {
        if let Some(id) = self.ids.get_mut(key) {
            id.state = State::TimeWait;
        }
        self.set_deadline(key, Some(now + TIMEWAIT_NS));
    }

    /// This side has asked for the end, and it has come.
    fn finish_disconnect(&mut self, now: u64, key: IdKey, status: i32) {
        self.drop_stream(key, true);
        self.tell(key, EventKind::Disconnected, status);
        self.wait_out(now, key);
    }

    /// Connecting has failed.
    pub(crate) fn fail(&mut self, key: IdKey, kind: EventKind, status: i32) {
        self.drop_stream(key, true);
        self.set_deadline(key, None);
        let Some(id) = self.ids.get_mut(key) else { return };
        id.state = State::Over;
        // The size of a REJ, which the other protocols have not.
        let has_data = kind == EventKind::Rejected && id.protocol == Protocol::Quipu;
        let data = padded(&[], if has_data { wire::REJ_DATA } else { 0 });
        self.tell_data(key, kind, status, data, Peer::default());
    }

    /// The peer is told that an identifier is destroyed.
    pub(crate) fn part(&mut self, key: IdKey) {
        let Some(id) = self.ids.get(key) else { return };
        match id.state {
            State::Requested => self.refuse(key, Refusal::Consumer, &[]),
            State::Accepted | State::Established | State::Disconnecting
                if id.protocol.is_of_adapter() =>
            {
                self.actions.push_back(Action::End { id: key });
            }
            State::Connecting if id.protocol == Protocol::Qpip => {
                self.actions.push_back(Action::End { id: key });
            }
            State::Accepted if id.ended_early => self.leave_by(key, Frame::Disconnect, false),
            State::Responded | State::Accepted => {
                self.leave_by(key, Frame::Reject(reason::CONSUMER), false);
            }
            State::Established => self.leave_by(key, Frame::Disconnect, true),
            State::Disconnected => self.leave_by(key, Frame::Disconnected, true),
            State::Asked(question) => self.refuse_look_up(key, question, &[]),
            _ => self.drop_stream(key, true),
        }
    }

    /// A deadline of an identifier has passed.
    pub(crate) fn time_out(&mut self, now: u64, key: IdKey) {
        if self.connect_again(now, key) {
            return;
        }
        let Some(id) = self.ids.get_mut(key) else { return };
        match id.state {
            State::Disconnecting | State::Disconnected if id.protocol == Protocol::Qpip => {
                self.actions.push_back(Action::Abort { id: key });
                self.handle_ended(key);
            }
            State::Disconnecting if id.protocol.is_of_adapter() => self.handle_ended(key),
            State::Connecting | State::Accepted => {
                if id.protocol.is_of_adapter() {
                    self.actions.push_back(Action::End { id: key });
                }
                self.fail(key, EventKind::Unreachable, -errno::TIMEDOUT);
            }
            State::Disconnecting => self.finish_disconnect(now, key, -errno::TIMEDOUT),
            State::TimeWait => {
                id.state = State::Over;
                self.tell(key, EventKind::TimewaitExit, 0);
            }
            State::LookingUp(_) => self.look_up_again(now, key),
            _ => {}
        }
    }

    /// Whoever asked is gone. As with the kernel's rdma_cm, the program learns of it when it answers: what
    /// its channel says is there stays there, and before it accepts it expects nothing of the identifier.
    pub(crate) fn lapse(&mut self, key: IdKey) {
        self.drop_stream(key, true);
        if let Some(id) = self.ids.get_mut(key) {
            id.state = State::Over;
        }
    }

    /// Takes back a request that was not taken. Its stream, if it has one, is gone already.
    pub(crate) fn retract(&mut self, key: IdKey) {
        let Some(child) = self.remove_id(key) else { return };
        if child.protocol == Protocol::Qpip {
            self.actions.push_back(Action::Refuse { id: key });
        }
        let listener = child.listener.and_then(|listener| self.ids.get_mut(listener));
        if let Some(State::Listening(listener)) = listener.map(|id| &mut id.state) {
            listener.untaken.remove(&key);
        }
    }
}
