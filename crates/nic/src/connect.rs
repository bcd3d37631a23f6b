//! Connection management: how two queue pairs that know each other's GID and number find each other.
//!
//! Programs connect by `modify_qp` on both sides, in no agreed order. Of the two ends the one with the
//! smaller (GID, number) reaches out when it becomes ready to receive; the other waits. Whoever is asked
//! before its queue pair is ready keeps the request until it is. Until a connection stands, what is sent
//! waits, at most for the retry time of the queue pair.

use std::net::{IpAddr, SocketAddr};

use quipu_iwarp::setup::Outcome;
use quipu_iwarp::wire::hello::{Features, Hello, Kind, Reason};
use quipu_iwarp::{Extensions, Initiator, Negotiated, Params, Receiver, Responder, Sender};
use quipu_mem::Segment;
use quipu_mem::ring::{Channel, ChannelLayout};

use crate::adapter::{Adapter, Alarm, Hub};
use crate::channel::{ChannelPath, Other};
use crate::error::{Fault, Loss};
use crate::event::Action;
use crate::link::{Link, LinkEnd, LinkMessage, LinkState, access_of, channel_config};
use crate::probe::Probe;
use crate::qp::{Path, Qp, pd_number};
use crate::receive;
use crate::requester;
use crate::stream::StreamPath;
use crate::transmit;
use crate::types::{ConnId, Gid, LinkId, QpId, QpNum, QpState, Time, WcStatus};

/// First pause before the peer is tried again; it doubles each time.
const FIRST_PAUSE_NS: u64 = 500_000;
/// Longest pause.
const LONGEST_PAUSE_NS: u64 = 100_000_000;

/// A connection, in the making or made.
pub(crate) struct Conn {
    pub(crate) qp: Option<QpId>,
    pub(crate) phase: Phase,
    alarm: Option<Time>,
    /// Whether it counts among the half open ones.
    half_open: bool,
}

/// How far a connection is.
pub(crate) enum Phase {
    /// The world below was asked to reach the peer.
    Reaching,
    /// A request was sent over a stream.
    Initiating(Box<Initiator>),
    /// A stream was accepted; its request has not come yet.
    Listening { responder: Box<Responder>, peer: IpAddr },
    /// A request came for a queue pair that is not ready.
    Waiting(Box<Waiting>),
    /// A request was sent over a link.
    Asking { link: LinkId, channel: Box<Channel>, block: u32, bell: u32 },
    /// A stream's reply is being sent; the queue pair has the stream already.
    Greeting(Box<Responder>),
    /// The queue pair has it.
    Open,
    /// This side has let go of a channel; the peer has not, so its block stays.
    Abandoned { link: LinkId, block: u32 },
    /// It ends once this is said.
    Closing(Option<Box<Farewell>>),
}

/// A request that waits for its queue pair to become ready.
pub(crate) struct Waiting {
    hello: Hello,
    via: Via,
}

/// How a request came.
enum Via {
    Stream { responder: Box<Responder> },
    Link { link: LinkId, tag: u64, offset: u64, end: LinkEnd },
}

/// The last words of a stream.
pub(crate) enum Farewell {
    /// A refusal.
    Refusal(Responder),
    /// The last acknowledgement and the reason of the end.
    Stream { stream: StreamPath, executed: u32 },
}

impl Farewell {
    pub(crate) fn transmit(&mut self, out: &mut [u8]) -> usize {
        match self {
            Self::Refusal(responder) => responder.poll_transmit(out),
            Self::Stream { stream, executed } => {
                transmit::stream::run_closing(stream, *executed, out)
            }
        }
    }
}

/// What a request meets.
enum Match {
    Ready(QpId),
    NotReady,
    Refused(Reason),
}

/// The hello of a queue pair to its peer.
fn hello_of<P>(qp: &Qp, hub: &Hub<P>, kind: Kind) -> Hello {
    Hello {
        kind,
        path_mtu: qp.attr.path_mtu.min(5),
        features: Features::ALL,
        dest_qpn: qp.attr.dest_qp_num,
        source_qpn: qp.num.0,
        rq_psn: qp.attr.rq_psn,
        sq_psn: qp.attr.sq_psn,
        source_gid: hub.config.gid.0,
        dest_gid: qp.attr.av.dgid.0,
    }
}

/// The peer's address.
fn peer_of(qp: &Qp) -> SocketAddr {
    SocketAddr::new(IpAddr::from(qp.attr.av.dgid), QpNum(qp.attr.dest_qp_num).port())
}

/// Whether this end reaches out.
fn initiates<P>(qp: &Qp, hub: &Hub<P>) -> bool {
    (hub.config.gid, qp.num) <= (qp.attr.av.dgid, QpNum(qp.attr.dest_qp_num))
}

/// Starts the time after which waiting sends give up, unless it runs already.
pub(crate) fn start_deadline<P>(qp: &mut Qp, hub: &mut Hub<P>) {
    if qp.sq.is_empty() || qp.requester.deadline.is_some() {
        return;
    }
    if let Some(retry_time) = qp.retry_time_ns() {
        qp.requester.deadline = Some(hub.now.after(retry_time));
        requester::set_alarm(qp, hub);
    }
}

/// Tells the peer of a channel which rights the queue pair grants now.
pub(crate) fn tell_grants<P>(qp: &Qp, hub: &mut Hub<P>) {
    if let Path::Channel(path) = &qp.path
        && let Other::Linked { link, .. } = path.other
    {
        let message = LinkMessage::Grants { tag: path.peer_tag, access: qp.attr.access.bits() };
        hub.link_send(link, message);
    }
}

/// Ends the connection of a queue pair, whatever it is: last words are sent, the peer is told.
pub(crate) fn detach<P>(qp: &mut Qp, hub: &mut Hub<P>) {
    match std::mem::replace(&mut qp.path, Path::None) {
        Path::None => {}
        Path::Lost => qp.path = Path::Lost,
        Path::Pending(conn) => hub.abandon(conn),
        Path::Stream(stream) => {
            let (conn, executed) = (stream.conn, qp.responder.executed);
            hub.close_stream(conn, Some(Farewell::Stream { stream: *stream, executed }));
        }
        Path::Channel(path) => hub.close_channel(qp.id, *path),
    }
}

impl<P> Hub<P> {
    /// A new connection, if there is room.
    fn new_conn(&mut self, qp: Option<QpId>, phase: Phase) -> Option<ConnId> {
        self.conns.insert(Conn { qp, phase, alarm: None, half_open: false })
    }

    fn count_half_open(&mut self, id: ConnId) {
        let at = self.now.after(self.config.setup_timeout_ns);
        if let Some(conn) = self.conns.get_mut(id) {
            conn.half_open = true;
            self.half_open += 1;
        }
        self.set_conn_alarm(id, Some(at));
    }

    fn set_conn_alarm(&mut self, id: ConnId, at: Option<Time>) {
        let Some(conn) = self.conns.get(id) else { return };
        let mut alarm = conn.alarm;
        self.set_alarm(&mut alarm, Alarm::Conn(id), at);
        if let Some(conn) = self.conns.get_mut(id) {
            conn.alarm = alarm;
        }
    }

    /// No longer half open.
    fn settle(&mut self, id: ConnId) {
        self.set_conn_alarm(id, None);
        if let Some(conn) = self.conns.get_mut(id)
            && std::mem::take(&mut conn.half_open)
        {
            self.half_open -= 1;
        }
    }

    fn remove_conn(&mut self, id: ConnId) -> Option<Conn> {
        self.settle(id);
        self.conns.remove(id)
    }

    /// Gives a connection in the making up.
    fn abandon(&mut self, id: ConnId) {
        let Some(conn) = self.conns.get_mut(id) else { return };
        conn.qp = None;
        match std::mem::replace(&mut conn.phase, Phase::Closing(None)) {
            Phase::Asking { link, channel, block, bell } => {
                drop(channel);
                // The peer may have granted it already: the block is freed when its answer comes.
                conn.phase = Phase::Abandoned { link, block };
                if let Some(state) = self.links.get_mut(link) {
                    state.return_bell(bell);
                }
                self.settle(id);
            }
            _ => self.close_stream(id, None),
        }
    }

    /// Ends this side of a channel.
    fn close_channel(&mut self, qp: QpId, path: ChannelPath) {
        self.hot.retain(|&hot| hot != qp);
        let (link, conn) = match path.other {
            Other::Own(other) => {
                self.orphans.push(other);
                return;
            }
            Other::Linked { link, conn, .. } => (link, conn),
        };
        let message = LinkMessage::Close { tag: path.peer_tag };
        self.actions.push_back(Action::LinkSend { link, message });
        if let Some(state) = self.links.get_mut(link) {
            state.return_bell(path.bell);
        }
        match path.block {
            Some(block) => {
                if let Some(conn) = self.conns.get_mut(conn) {
                    conn.qp = None;
                    conn.phase = Phase::Abandoned { link, block };
                }
            }
            None => {
                self.remove_conn(conn);
            }
        }
    }

    /// Has the world below end a stream, after its last words.
    fn close_stream(&mut self, id: ConnId, farewell: Option<Farewell>) {
        self.settle(id);
        if let Some(conn) = self.conns.get_mut(id) {
            conn.qp = None;
            conn.phase = Phase::Closing(farewell.map(Box::new));
            self.actions.push_back(Action::Close { conn: id });
        }
    }

    fn free_block(&mut self, link: LinkId, block: u32) {
        if let Some(state) = self.links.get_mut(link) {
            let _ = state.arena.free(block);
        }
    }

    fn link_send(&mut self, link: LinkId, message: LinkMessage) {
        self.actions.push_back(Action::LinkSend { link, message });
    }
}

/// What this side asks for when a stream starts up.
fn params<P>(hub: &Hub<P>) -> Params {
    Params { crc: hub.config.crc, ..Params::default() }
}

/// The two halves of a stream that both ends have agreed on.
fn open_stream<P>(
    hub: &Hub<P>,
    conn: ConnId,
    negotiated: &Negotiated,
    features: Features,
) -> StreamPath {
    let max_ulpdu = hub.config.max_ulpdu.min(u32::from(u16::MAX) - 3) as u16;
    let receiver = Receiver::new(negotiated, Extensions::from(features));
    StreamPath::new(conn, Sender::new(negotiated, max_ulpdu), receiver)
}

impl<P: Probe> Adapter<P> {
    /// The stream of an open or closing connection.
    pub(crate) fn stream_of(&mut self, conn: ConnId) -> Option<&mut StreamPath> {
        let qp = self.hub.conns.get(conn)?.qp?;
        match &mut self.qps.get_mut(qp)?.path {
            Path::Stream(stream) => Some(stream),
            _ => None,
        }
    }

    /// A queue pair became ready to receive: reaches out, or looks whether the peer has already.
    pub(crate) fn begin_connection(&mut self, id: QpId) {
        let Some((qp, hub)) = self.qp_and_hub(id) else { return };
        if initiates(qp, hub) {
            reach_out(qp, hub);
            return;
        }
        let waiting: Vec<ConnId> = hub
            .conns
            .iter()
            .filter(|(_, conn)| {
                matches!(&conn.phase, Phase::Waiting(waiting)
                    if waiting.hello.dest_qpn == qp.num.0)
            })
            .map(|(conn, _)| conn)
            .collect();
        for conn in waiting {
            self.decide(conn);
        }
    }

    /// Which queue pair a request is for.
    fn find(&self, hello: &Hello) -> Match {
        if hello.dest_gid != self.hub.config.gid.0 {
            return Match::Refused(Reason::Mismatch);
        }
        let Some(qp) =
            self.hub.numbers.get(&QpNum(hello.dest_qpn)).and_then(|&id| self.qps.get(id))
        else {
            return Match::Refused(Reason::NoSuchQp);
        };
        match qp.state {
            QpState::Reset | QpState::Init => return Match::NotReady,
            QpState::Err | QpState::Sqe => return Match::Refused(Reason::NoSuchQp),
            _ => {}
        }
        let meant =
            qp.attr.dest_qp_num == hello.source_qpn && qp.attr.av.dgid == Gid(hello.source_gid);
        match qp.path {
            Path::None if meant => Match::Ready(qp.id),
            _ => Match::Refused(Reason::Mismatch),
        }
    }

    /// Grants, keeps or refuses a request.
    fn decide(&mut self, conn: ConnId) {
        let Some(state) = self.hub.conns.get_mut(conn) else { return };
        let Phase::Waiting(waiting) = &state.phase else { return };
        let hello = waiting.hello;
        match self.find(&hello) {
            Match::NotReady => {}
            Match::Ready(qp) => self.grant(conn, qp),
            Match::Refused(reason) => self.refuse(conn, reason),
        }
    }

    fn take_waiting(&mut self, conn: ConnId) -> Option<Box<Waiting>> {
        let state = self.hub.conns.get_mut(conn)?;
        match std::mem::replace(&mut state.phase, Phase::Closing(None)) {
            Phase::Waiting(waiting) => Some(waiting),
            other => {
                state.phase = other;
                None
            }
        }
    }

    fn refuse(&mut self, conn: ConnId, reason: Reason) {
        let Some(waiting) = self.take_waiting(conn) else { return };
        let Waiting { hello, via } = *waiting;
        let answer = hello.answer(Kind::Reject(reason), Features::ALL, 0, 0);
        self.hub.settle(conn);
        match via {
            Via::Stream { mut responder } => {
                let _ = responder.reject(&answer.to_bytes());
                self.hub.close_stream(conn, Some(Farewell::Refusal(*responder)));
            }
            Via::Link { link, tag, .. } => {
                self.hub.link_send(link, LinkMessage::Reject { tag, hello: answer });
                self.hub.remove_conn(conn);
            }
        }
    }

    fn grant(&mut self, conn: ConnId, id: QpId) {
        let Some(waiting) = self.take_waiting(conn) else { return };
        let Waiting { hello, via } = *waiting;
        self.hub.settle(conn);
        match via {
            Via::Stream { responder } => self.grant_stream(conn, id, &hello, responder),
            Via::Link { link, tag, offset, end } => {
                self.grant_link(conn, id, link, tag, offset, end);
            }
        }
    }

    fn grant_stream(
        &mut self,
        conn: ConnId,
        id: QpId,
        hello: &Hello,
        mut responder: Box<Responder>,
    ) {
        let Some((qp, hub)) = self.qp_and_hub(id) else { return };
        let answer = hello.answer(Kind::Accept, Features::ALL, qp.attr.rq_psn, qp.attr.sq_psn);
        let accepted = responder.accept(params(hub), &answer.to_bytes());
        let Ok(negotiated) = accepted else {
            hub.close_stream(conn, None);
            return;
        };
        let stream = open_stream(hub, conn, &negotiated, answer.features);
        if let Some(state) = hub.conns.get_mut(conn) {
            state.qp = Some(id);
            state.phase = Phase::Greeting(responder);
        }
        established(qp, hub, Path::Stream(Box::new(stream)));
        if let Path::Stream(stream) = &mut qp.path {
            stream.make_ready(&mut hub.ready);
        }
    }

    fn grant_link(
        &mut self,
        conn: ConnId,
        id: QpId,
        link: LinkId,
        tag: u64,
        offset: u64,
        end: LinkEnd,
    ) {
        let Some((qp, hub)) = self.qp_and_hub(id) else { return };
        let Some(state) = hub.links.get_mut(link) else { return };
        let attached = usize::try_from(offset)
            .ok()
            .and_then(|offset| Channel::attach(&state.link.peer, offset, channel_config()).ok());
        let Some(channel) = attached else {
            // Only a peer that does not follow the rules gets here.
            hub.remove_conn(conn);
            return;
        };
        let bell = state.take_bell(id);
        let other = Other::Linked { link, bell: end.bell, conn };
        let mut path = ChannelPath::new(channel, other, bell);
        path.peer_tag = tag;
        path.peer_access = access_of(end.access);
        path.peer_pd = end.pd;
        path.peer_qp = qp.attr.dest_qp_num;
        path.channel.incoming.control.arm();
        if let Some(state) = hub.conns.get_mut(conn) {
            state.qp = Some(id);
            state.phase = Phase::Open;
        }
        let own = LinkEnd { bell, access: qp.attr.access.bits(), pd: pd_number(qp.pd) };
        hub.link_send(link, LinkMessage::Accept { tag, own_tag: conn.0, end: own });
        established(qp, hub, Path::Channel(Box::new(path)));
        self.serve_nudged();
    }

    /// Writes what is left of the reply that opened a stream.
    pub(crate) fn greet(&mut self, conn: ConnId, out: &mut [u8]) -> usize {
        let Some(state) = self.hub.conns.get_mut(conn) else { return 0 };
        let Phase::Greeting(responder) = &mut state.phase else { return 0 };
        let used = responder.poll_transmit(out);
        if used < out.len() {
            state.phase = Phase::Open;
        }
        used
    }

    /// The byte stream that `Connect` asked for stands.
    pub fn handle_reached_stream(&mut self, now: Time, conn: ConnId) {
        self.hub.now = now;
        let Some(qp) = self.hub.conns.get(conn).and_then(|state| state.qp) else {
            self.hub.close_stream(conn, None);
            return;
        };
        let Some((qp, hub)) = self.qp_and_hub(qp) else { return };
        let hello = hello_of(qp, hub, Kind::Request);
        let Ok(initiator) = Initiator::new(params(hub), &hello.to_bytes()) else { return };
        if let Some(state) = hub.conns.get_mut(conn) {
            state.phase = Phase::Initiating(Box::new(initiator));
        }
        hub.count_half_open(conn);
        hub.ready.push_back(conn);
    }

    /// A byte stream was accepted; its peer will say which queue pair it wants.
    ///
    /// # Errors
    /// [`Fault::Exhausted`]: too many such streams; close it.
    pub fn handle_accepted(&mut self, now: Time, peer: SocketAddr) -> Result<ConnId, Fault> {
        self.hub.now = now;
        if self.hub.half_open >= self.hub.config.max_half_open {
            return Err(Fault::Exhausted("half open connections"));
        }
        let phase = Phase::Listening { responder: Box::default(), peer: peer.ip().to_canonical() };
        let conn = self.hub.new_conn(None, phase).ok_or(Fault::Exhausted("connections"))?;
        self.hub.count_half_open(conn);
        Ok(conn)
    }

    /// Takes bytes that arrived on a stream; how many were used. What was not is the beginning of
    /// something longer: show it again with more behind it.
    pub fn handle_stream(&mut self, now: Time, conn: ConnId, bytes: &[u8]) -> usize {
        self.hub.now = now;
        let mut used = 0;
        while used < bytes.len() {
            let rest = &bytes[used..];
            let Some(state) = self.hub.conns.get_mut(conn) else { return bytes.len() };
            let taken = match &mut state.phase {
                Phase::Initiating(_) => self.hear_reply(conn, rest),
                Phase::Listening { .. } => self.hear_request(conn, rest),
                Phase::Open | Phase::Greeting(_) => {
                    let Some((qp, hub)) = state.qp.and_then(|qp| self.qp_and_hub(qp)) else {
                        return bytes.len();
                    };
                    return used + receive::stream::run(qp, hub, rest);
                }
                // A peer that speaks before it is answered is not heard before then.
                Phase::Waiting(_) => break,
                _ => return bytes.len(),
            };
            if taken == 0 {
                break;
            }
            used += taken;
        }
        used
    }

    /// How many bytes beyond `bytes`, which [`handle_stream`](Self::handle_stream) left, make a call of it
    /// worthwhile; at least 1.
    #[must_use]
    pub fn stream_needed(&self, bytes: &[u8]) -> usize {
        Receiver::needed(bytes).max(1)
    }

    fn hear_reply(&mut self, conn: ConnId, bytes: &[u8]) -> usize {
        let Some(state) = self.hub.conns.get_mut(conn) else { return bytes.len() };
        let (id, Phase::Initiating(initiator)) = (state.qp, &mut state.phase) else {
            return bytes.len();
        };
        let outcome = initiator.handle(bytes);
        let Some((qp, hub)) = id.and_then(|id| self.qp_and_hub(id)) else { return bytes.len() };
        match outcome {
            Ok((used, None)) => used,
            Ok((used, Some(Outcome::Established(negotiated)))) => {
                let hello = Hello::parse(&negotiated.private_data);
                match hello {
                    Ok(hello)
                        if hello.kind == Kind::Accept
                            && hello.source_qpn == qp.attr.dest_qp_num
                            && hello.dest_qpn == qp.num.0 =>
                    {
                        hub.settle(conn);
                        let stream = open_stream(hub, conn, &negotiated, hello.features);
                        if let Some(state) = hub.conns.get_mut(conn) {
                            state.phase = Phase::Open;
                        }
                        established(qp, hub, Path::Stream(Box::new(stream)));
                    }
                    _ => retry_later(qp, hub, conn),
                }
                used
            }
            Ok((_, Some(Outcome::Rejected { .. }))) | Err(_) => {
                retry_later(qp, hub, conn);
                bytes.len()
            }
        }
    }

    fn hear_request(&mut self, conn: ConnId, bytes: &[u8]) -> usize {
        let Some(state) = self.hub.conns.get_mut(conn) else { return bytes.len() };
        let Phase::Listening { responder, peer } = &mut state.phase else { return bytes.len() };
        let peer = *peer;
        match responder.handle(bytes) {
            Ok((used, None)) => used,
            Ok((used, Some(request))) => {
                let hello = Hello::parse(&request.private_data);
                // Nobody speaks for a queue pair from an address that is not its own.
                let genuine = hello.is_ok_and(|hello| {
                    hello.kind == Kind::Request && IpAddr::from(Gid(hello.source_gid)) == peer
                });
                let responder = std::mem::take(responder);
                match hello {
                    Ok(hello) if genuine => {
                        let via = Via::Stream { responder };
                        state.phase = Phase::Waiting(Box::new(Waiting { hello, via }));
                        self.decide(conn);
                    }
                    _ => {
                        self.hub.close_stream(conn, None);
                        return bytes.len();
                    }
                }
                used
            }
            Err(_) => {
                self.hub.close_stream(conn, None);
                bytes.len()
            }
        }
    }

    /// A stream ended, or could not be made. Ends what depended on it.
    pub fn handle_lost(&mut self, now: Time, conn: ConnId, loss: Loss) {
        self.hub.now = now;
        let Some(state) = self.hub.remove_conn(conn) else { return };
        let Some((qp, hub)) = state.qp.and_then(|qp| self.qp_and_hub(qp)) else { return };
        match &qp.path {
            Path::Pending(pending) if *pending == conn => pause(qp, hub),
            Path::Stream(stream) if stream.conn == conn => {
                qp.path = Path::Lost;
                requester::peer_lost(qp, hub);
            }
            _ => {}
        }
        let _ = loss;
    }

    /// The peer that `Connect` asked for is this very engine.
    pub fn handle_reached_self(&mut self, now: Time, conn: ConnId) {
        self.hub.now = now;
        let Some(state) = self.hub.remove_conn(conn) else { return };
        let Some((qp, hub)) = state.qp.and_then(|qp| self.qp_and_hub(qp)) else { return };
        let id = qp.id;
        let hello = hello_of(qp, hub, Kind::Request);
        let other = match self.find_own(&hello, id) {
            Some(other) => other,
            None => {
                if let Some((qp, hub)) = self.qp_and_hub(id) {
                    pause(qp, hub);
                }
                return;
            }
        };
        let len = ChannelLayout::new(channel_config()).map_or(0, |layout| layout.total_len());
        let segment = Segment::heap(len);
        if other == id {
            self.join_own(id, id, Channel::loopback(&segment, 0, channel_config()).ok());
            return;
        }
        let channel = Channel::create(&segment, 0, channel_config()).ok();
        self.join_own(id, other, channel);
        let channel = Channel::attach(&segment, 0, channel_config()).ok();
        self.join_own(other, id, channel);
        self.serve_nudged();
    }

    /// The queue pair of this adapter that a request of `id`, itself in this adapter, is for.
    fn find_own(&self, hello: &Hello, id: QpId) -> Option<QpId> {
        if hello.dest_qpn == hello.source_qpn {
            return Some(id);
        }
        match self.find(hello) {
            Match::Ready(other) => Some(other),
            _ => None,
        }
    }

    fn join_own(&mut self, id: QpId, other: QpId, channel: Option<Channel>) {
        let Some((qp, hub)) = self.qp_and_hub(id) else { return };
        match channel {
            Some(channel) => {
                let path = ChannelPath::new(channel, Other::Own(other), 0);
                established(qp, hub, Path::Channel(Box::new(path)));
            }
            None => pause(qp, hub),
        }
    }

    /// The peer that `Connect` asked for is on this host, behind `link`.
    pub fn handle_reached_link(&mut self, now: Time, conn: ConnId, link: LinkId) {
        self.hub.now = now;
        let Some(id) = self.hub.conns.get(conn).and_then(|state| state.qp) else {
            self.hub.remove_conn(conn);
            return;
        };
        let Some((qp, hub)) = self.qp_and_hub(id) else { return };
        if ask(qp, hub, conn, link).is_none() {
            hub.remove_conn(conn);
            pause(qp, hub);
        }
    }

    /// Takes a link into use.
    ///
    /// # Errors
    /// Its segments are too small, or there are too many links.
    pub fn handle_link_up(&mut self, link: Link) -> Result<LinkId, Fault> {
        let state = LinkState::new(link).map_err(|_| Fault::Invalid("link segment too small"))?;
        self.hub.links.insert(state).ok_or(Fault::Exhausted("links"))
    }

    /// Takes a control message of the engine behind `link`.
    pub fn handle_link_message(&mut self, now: Time, link: LinkId, message: LinkMessage) {
        self.hub.now = now;
        match message {
            LinkMessage::Request { tag, hello, offset, end } => {
                let room = self.hub.half_open < self.hub.config.max_half_open;
                let via = Via::Link { link, tag, offset, end };
                let phase = Phase::Waiting(Box::new(Waiting { hello, via }));
                let conn = room.then(|| self.hub.new_conn(None, phase)).flatten();
                let Some(conn) = conn else {
                    let hello = hello.answer(Kind::Reject(Reason::Busy), Features::ALL, 0, 0);
                    self.hub.link_send(link, LinkMessage::Reject { tag, hello });
                    return;
                };
                self.hub.count_half_open(conn);
                self.decide(conn);
            }
            LinkMessage::Accept { tag, own_tag, end } => {
                self.link_accepted(link, tag, own_tag, end)
            }
            LinkMessage::Reject { tag, .. } => {
                let conn = ConnId(tag);
                let Some(state) = self.take_link_conn(link, conn) else { return };
                if let Some((qp, hub)) = state.qp.and_then(|qp| self.qp_and_hub(qp)) {
                    pause(qp, hub);
                }
            }
            LinkMessage::Close { tag } => self.link_closed(link, ConnId(tag)),
            LinkMessage::Grants { tag, access } => {
                let conn = self.hub.conns.get(ConnId(tag));
                let qp = conn.and_then(|conn| conn.qp).and_then(|qp| self.qps.get_mut(qp));
                if let Some(Path::Channel(path)) = qp.map(|qp| &mut qp.path)
                    && matches!(path.other, Other::Linked { link: of, .. } if of == link)
                {
                    path.peer_access = access_of(access);
                }
            }
        }
    }

    /// Removes a connection in the making over `link`, and frees its block.
    fn take_link_conn(&mut self, link: LinkId, conn: ConnId) -> Option<Conn> {
        match self.hub.conns.get(conn)?.phase {
            Phase::Asking { link: of, block, bell, .. } if of == link => {
                let state = self.hub.remove_conn(conn);
                if let Some(link) = self.hub.links.get_mut(link) {
                    link.return_bell(bell);
                }
                self.hub.free_block(link, block);
                state
            }
            Phase::Abandoned { link: of, block } if of == link => {
                self.hub.free_block(link, block);
                self.hub.remove_conn(conn)
            }
            _ => None,
        }
    }

    fn link_accepted(&mut self, link: LinkId, tag: u64, own_tag: u64, end: LinkEnd) {
        let conn = ConnId(tag);
        let Some(state) = self.hub.conns.get_mut(conn) else { return };
        let asked = matches!(state.phase, Phase::Asking { link: of, .. } if of == link);
        if !asked {
            // Given up meanwhile: the peer closes its end, and then the block is free.
            self.hub.link_send(link, LinkMessage::Close { tag: own_tag });
            return;
        }
        let Phase::Asking { channel, block, bell, .. } =
            std::mem::replace(&mut state.phase, Phase::Open)
        else {
            return;
        };
        self.hub.settle(conn);
        let id = self.hub.conns.get(conn).and_then(|state| state.qp);
        let Some((qp, hub)) = id.and_then(|id| self.qp_and_hub(id)) else { return };
        let mut path =
            ChannelPath::new(*channel, Other::Linked { link, bell: end.bell, conn }, bell);
        path.block = Some(block);
        path.peer_tag = own_tag;
        path.peer_access = access_of(end.access);
        path.peer_pd = end.pd;
        path.peer_qp = qp.attr.dest_qp_num;
        path.channel.incoming.control.arm();
        established(qp, hub, Path::Channel(Box::new(path)));
        if let Path::Channel(path) = &mut qp.path
            && path.has_incoming()
        {
            hub.nudged.push_back(qp.id);
        }
        self.serve_nudged();
    }

    /// The peer has let go of a channel.
    fn link_closed(&mut self, link: LinkId, conn: ConnId) {
        if self.take_link_conn(link, conn).is_some() {
            return;
        }
        let Some(id) = self.hub.conns.get(conn).and_then(|state| state.qp) else { return };
        let Some((qp, hub)) = self.qp_and_hub(id) else { return };
        let Path::Channel(path) = &qp.path else { return };
        if !matches!(path.other, Other::Linked { link: of, conn: own, .. } if (of, own) == (link, conn))
        {
            return;
        }
        // What it executed and answered before counts.
        receive::channel::run(qp, hub);
        requester::peer_lost(qp, hub);
        let _ = self.take_link_conn(link, conn);
    }

    /// The engine behind `link` is gone.
    pub fn handle_link_down(&mut self, now: Time, link: LinkId) {
        self.hub.now = now;
        for conn in self.hub.conns.keys() {
            let Some(state) = self.hub.conns.get(conn) else { continue };
            let concerned = match &state.phase {
                Phase::Asking { link: of, .. } | Phase::Abandoned { link: of, .. } => *of == link,
                Phase::Waiting(waiting) => {
                    matches!(waiting.via, Via::Link { link: of, .. } if of == link)
                }
                _ => false,
            };
            if concerned
                && let Some(state) = self.hub.remove_conn(conn)
                && let Some((qp, hub)) = state.qp.and_then(|qp| self.qp_and_hub(qp))
            {
                pause(qp, hub);
            }
        }
        for id in self.qps.keys() {
            let Some((qp, hub)) = self.qp_and_hub(id) else { continue };
            let Path::Channel(path) = &qp.path else { continue };
            let Other::Linked { link: of, conn, .. } = path.other else { continue };
            if of != link {
                continue;
            }
            // What the peer pushed before it died arrives, as what was on the wire would.
            while receive::channel::run(qp, hub) && matches!(qp.path, Path::Channel(_)) {}
            requester::peer_lost(qp, hub);
            hub.remove_conn(conn);
        }
        self.hub.links.remove(link);
        self.hub.actions.retain(|action| {
            !matches!(action,
            Action::LinkSend { link: of, .. } | Action::RingBell { link: of } if *of == link)
        });
    }

    /// A moment that a queue pair waits for has come.
    pub(crate) fn qp_alarm(&mut self, id: QpId) {
        let Some((qp, hub)) = self.qp_and_hub(id) else { return };
        qp.timer = None;
        let due = |at: Option<Time>| at.is_some_and(|at| at <= hub.now);
        let (rnr, reconnect, deadline) = (
            due(qp.requester.rnr_until),
            due(qp.requester.reconnect_at),
            due(qp.requester.deadline),
        );
        if rnr {
            qp.requester.rnr_until = None;
            match qp.path {
                Path::Stream(_) => receive::stream::resume(qp, hub),
                Path::Channel(_) => {
                    receive::channel::run(qp, hub);
                }
                _ => {}
            }
        }
        if reconnect {
            qp.requester.reconnect_at = None;
            reach_out(qp, hub);
        }
        if deadline {
            qp.requester.deadline = None;
            if matches!(qp.path, Path::None | Path::Pending(_)) && !qp.sq.is_empty() {
                requester::fail_oldest(qp, hub, WcStatus::RetryExcErr);
            }
        }
        requester::set_alarm(qp, hub);
    }

    /// A connection took too long to be made.
    pub(crate) fn conn_alarm(&mut self, conn: ConnId) {
        let Some(state) = self.hub.conns.get_mut(conn) else { return };
        state.alarm = None;
        if matches!(state.phase, Phase::Waiting(_)) {
            self.refuse(conn, Reason::NotReady);
            return;
        }
        match state.qp.and_then(|qp| self.qp_and_hub(qp)) {
            Some((qp, hub)) => retry_later(qp, hub, conn),
            None => self.hub.close_stream(conn, None),
        }
    }
}

/// Asks the world below to reach the peer of `qp`.
fn reach_out<P>(qp: &mut Qp, hub: &mut Hub<P>) {
    if !matches!(qp.path, Path::None) || !qp.may_receive() {
        return;
    }
    let user_timeout_ns = qp.retry_time_ns();
    match hub.new_conn(Some(qp.id), Phase::Reaching) {
        Some(conn) => {
            qp.path = Path::Pending(conn);
            hub.actions.push_back(Action::Connect { conn, peer: peer_of(qp), user_timeout_ns });
        }
        None => pause(qp, hub),
    }
}

/// Ends an attempt over a stream, and tries again after a pause.
fn retry_later<P>(qp: &mut Qp, hub: &mut Hub<P>, conn: ConnId) {
    hub.close_stream(conn, None);
    pause(qp, hub);
}

/// Tries again after a pause.
fn pause<P>(qp: &mut Qp, hub: &mut Hub<P>) {
    qp.path = Path::None;
    if !qp.may_receive() {
        return;
    }
    let pause = (FIRST_PAUSE_NS << qp.requester.attempts.min(10)).min(LONGEST_PAUSE_NS);
    qp.requester.attempts = qp.requester.attempts.saturating_add(1);
    qp.requester.reconnect_at = Some(hub.now.after(pause));
    requester::set_alarm(qp, hub);
}

/// A connection stands: nothing waits any more.
fn established<P: Probe>(qp: &mut Qp, hub: &mut Hub<P>, path: Path) {
    qp.path = path;
    qp.requester.deadline = None;
    qp.requester.reconnect_at = None;
    qp.requester.attempts = 0;
    requester::set_alarm(qp, hub);
    if qp.sq.has_waiting() {
        crate::doorbell::kick(qp, hub);
    }
}

/// Begins a channel in the own segment of a link and asks the peer to join it.
fn ask<P>(qp: &mut Qp, hub: &mut Hub<P>, conn: ConnId, link: LinkId) -> Option<()> {
    let hello = hello_of(qp, hub, Kind::Request);
    let state = hub.links.get_mut(link)?;
    let block = state.arena.allocate().ok()?;
    if !block.fresh {
        block.segment.zero().ok()?;
    }
    let offset = LinkState::block_offset(block.offset);
    let channel = match Channel::create(&block.segment, 0, channel_config()) {
        Ok(channel) => Box::new(channel),
        Err(_) => {
            let _ = state.arena.free(block.index);
            return None;
        }
    };
    let bell = state.take_bell(qp.id);
    let end = LinkEnd { bell, access: qp.attr.access.bits(), pd: pd_number(qp.pd) };
    hub.link_send(link, LinkMessage::Request { tag: conn.0, hello, offset, end });
    if let Some(state) = hub.conns.get_mut(conn) {
        state.phase = Phase::Asking { link, channel, block: block.index, bell };
    }
    Some(())
}
