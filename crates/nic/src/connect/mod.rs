//! Connection management: how two queue pairs that know each other's GID and number find each other.
//!
//! Programs connect by `modify_qp` on both sides, in no agreed order. Of the two ends the one with the
//! smaller (GID, number) reaches out when it becomes ready to receive; the other waits. Anyone who is asked
//! before its queue pair is ready keeps the request for a second at most. Until a connection stands, what is
//! sent waits: for the retry time of the queue pair while the peer cannot be reached, and as long as the
//! peer's host answers for a peer that was reached, since its process may be stopped.

mod attempt;
mod half_open;
mod link;
mod own;
mod stream;
mod unreliable;

pub(crate) use stream::note_heard;
pub(crate) use unreliable::{drop_sends, lose};

use std::net::{IpAddr, SocketAddr};

use quipu_inet::stack::TcpId;
use quipu_iwarp::wire::hello::{Features, Hello, Kind, Reason};
use quipu_iwarp::{Initiator, Responder};
use quipu_mem::ring::Channel;

use self::attempt::{attempt_failed, is_reached, limit_startup, pause, reach_out};
use crate::adapter::{Adapter, Alarm, Hub};
use crate::channel::{ChannelPath, Other};
use crate::event::{Action, StreamChange};
use crate::fate::{self, Cut};
use crate::link::{LinkEnd, LinkMessage};
use crate::probe::Probe;
use crate::qp::{Path, Qp};
use crate::qpip::{connections, udp};
use crate::receive;
use crate::requester;
use crate::transmit::LastWords;
use crate::types::{ConnId, Gid, LinkId, QpId, QpNum, QpState, Time, WcStatus};
use crate::unordered;
use crate::watch;

/// Longest time for which a request waits for its queue pair to become ready. The initiator cannot tell a
/// peer whose queue pair is not ready from one whose process is stopped, until the former refuses.
const NOT_READY_NS: u64 = 1_000_000_000;
/// What the peer of a queue pair must know: without acknowledgements no request would complete, nor fail.
const NEEDED: Features = Features::QUIPU.with(Features::RFC7306);

/// A connection, in the making or made.
pub(crate) struct Conn {
    pub(crate) qp: Option<QpId>,
    pub(crate) phase: Phase,
    alarm: Option<Time>,
    /// Whether it counts among the half open ones.
    half_open: bool,
    /// Whether the peer is on this host, where its end is noticed.
    nearby: bool,
    /// The connection of the adapter's own TCP that it goes over, if not over one of the world below.
    pub(crate) tcp: Option<TcpId>,
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
    Closing(Option<Farewell>),
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
    Refusal(Box<Responder>),
    /// The last acknowledgement and the reason of the end.
    Stream(Box<LastWords>),
}

impl Farewell {
    pub(crate) fn transmit(&mut self, out: &mut [u8]) -> usize {
        match self {
            Self::Refusal(responder) => responder.poll_transmit(out),
            Self::Stream(words) => words.transmit(out),
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
pub(crate) fn hello_of<P>(qp: &Qp, hub: &Hub<P>, kind: Kind) -> Hello {
    Hello {
        kind,
        path_mtu: qp.attr.path_mtu.min(5),
        features: Features::ALL,
        dest_qpn: qp.attr.dest_qp_num,
        source_qpn: qp.num.0,
        rq_psn: qp.attr.rq_psn,
        sq_psn: qp.attr.sq_psn,
        service: qp.qp_type.wire(),
        source_gid: own_gid(qp, hub).0,
        dest_gid: qp.attr.av.dgid.0,
    }
}

/// The address of a queue pair: the row of the GID table that its route names.
pub(crate) fn own_gid<P>(qp: &Qp, hub: &Hub<P>) -> Gid {
    hub.gids.row_of(&qp.attr.av)
}

/// The peer's address.
fn peer_of(qp: &Qp) -> SocketAddr {
    SocketAddr::new(IpAddr::from(qp.attr.av.dgid), QpNum(qp.attr.dest_qp_num).port())
}

/// Whether this end reaches out.
pub(crate) fn initiates<P>(qp: &Qp, hub: &Hub<P>) -> bool {
    (own_gid(qp, hub), qp.num) <= (qp.attr.av.dgid, QpNum(qp.attr.dest_qp_num))
}

/// Whether a hello comes from the peer of a queue pair, and speaks of this connection. A first PSN to send is
/// known from RTS on; a hello has 0 before. One that is known must be what the other end expects.
fn is_peer(qp: &Qp, hello: &Hello) -> bool {
    let psn_sent = qp.state != QpState::Rtr;
    hello.service == qp.qp_type.wire().counterpart()
        && hello.features.contains(NEEDED)
        && qp.attr.dest_qp_num == hello.source_qpn
        && qp.attr.av.dgid == Gid(hello.source_gid)
        && (hello.sq_psn == 0 || hello.sq_psn == qp.attr.rq_psn)
        && (!psn_sent || hello.rq_psn == qp.attr.sq_psn)
}

/// The first PSN to send has become known. A peer that expects another one is not the one that the program
/// means: it loses the connection, and if it has used it, so does the program.
pub(crate) fn compare_psn<P: Probe>(qp: &mut Qp, hub: &mut Hub<P>) {
    let stands = matches!(qp.path, Path::Stream(_) | Path::Channel(_));
    if !stands || qp.peer_rq_psn.is_none_or(|psn| psn == qp.attr.sq_psn) {
        return;
    }
    if !qp.qp_type.is_reliable() {
        return lose(qp, hub);
    }
    detach(qp, hub);
    if qp.responder.executed != 0 || qp.responder.receiving {
        qp.path = Path::Lost;
    } else if initiates(qp, hub) {
        pause(qp, hub);
    }
}

/// Starts the time after which waiting sends give up, unless it runs already.
pub(crate) fn start_deadline<P>(qp: &mut Qp, hub: &mut Hub<P>) {
    if qp.sq.is_empty() || qp.requester.deadline.is_some() || qp.requester.overdue {
        return;
    }
    let time = match qp.path {
        Path::Lost => qp.repeat_time_ns(),
        _ => qp.retry_time_ns(),
    };
    if let Some(retry_time) = time {
        qp.requester.deadline = Some(hub.now.after(retry_time));
        requester::set_alarm(qp, hub);
    }
}

/// Has the world below give a silent peer up after the time that the queue pair's timeout and retries take.
/// iWARP has no such attributes: where the program says nothing, whoever made the stream has settled that.
pub(crate) fn limit_silence<P>(qp: &Qp, hub: &mut Hub<P>) {
    if let Path::Stream(stream) = &qp.path {
        let (conn, user_timeout_ns) = (stream.conn, qp.retry_time_ns());
        let is_own_tcp = hub.conns.get(conn).is_some_and(|state| state.tcp.is_some());
        if is_own_tcp || stream.plain.is_some() && user_timeout_ns.is_none() {
            return;
        }
        hub.actions.push_back(Action::LimitSilence { conn, user_timeout_ns });
    }
}

/// Has a same-host peer see which rights the queue pair grants now, also one that has yet to answer. Those
/// taken back are not in use any more once memory is quiet.
pub(crate) fn show_grants<P>(qp: &Qp, hub: &mut Hub<P>) {
    let (channel, link) = match &qp.path {
        Path::Channel(path) => match path.other {
            Other::Linked { link, .. } => (&path.channel, link),
            Other::Own(_) => return,
        },
        Path::Pending(conn) => match hub.conns.get(*conn).map(|conn| &conn.phase) {
            Some(Phase::Asking { link, channel, .. }) => (&**channel, *link),
            _ => return,
        },
        _ => return,
    };
    channel.incoming.control.set_grants(qp.grants().bits());
    hub.begin_link_wait(link);
}

/// Ends the connection of a queue pair, whatever it is: last words are sent, the peer is told.
pub(crate) fn detach<P: Probe>(qp: &mut Qp, hub: &mut Hub<P>) {
    if qp.responder.holding {
        unordered::settle(qp, hub);
    }
    if hub.probe.watches() {
        watch::parted(qp, hub);
    }
    match std::mem::replace(&mut qp.path, Path::None) {
        Path::None => {}
        path @ (Path::Lost | Path::Datagrams { .. }) => qp.path = path,
        Path::Pending(conn) => hub.abandon(conn),
        Path::Stream(mut stream) => {
            let (conn, executed) = (stream.conn, qp.responder.executed);
            let words = LastWords::of(&mut stream, &hub.regions, executed, qp.num.0);
            if stream.plain.is_some() {
                hub.tell_stream(qp.id, conn, StreamChange::Ended);
            }
            hub.close_stream(conn, Some(Farewell::Stream(words)));
        }
        Path::Channel(path) => {
            path.channel.incoming.control.set_executed(qp.responder.executed);
            hub.close_channel(qp.id, *path);
        }
        path @ Path::Tcp(_) => {
            qp.path = path;
            connections::detach(qp, hub);
        }
        path @ Path::Udp(_) => {
            qp.path = path;
            udp::detach(qp, hub);
        }
    }
}

impl<P> Hub<P> {
    /// A new connection, if there is room.
    pub(crate) fn new_conn(&mut self, qp: Option<QpId>, phase: Phase) -> Option<ConnId> {
        self.conns.insert(Conn {
            qp,
            phase,
            alarm: None,
            half_open: false,
            nearby: false,
            tcp: None,
        })
    }

    /// Sets the alarm for a connection that takes too long to be made.
    pub(crate) fn limit_setup(&mut self, id: ConnId) {
        let at = self.now.after(self.config.setup_timeout_ns);
        self.set_conn_alarm(id, Some(at));
    }

    /// Sets the alarm for a request whose queue pair is not ready.
    fn limit_waiting(&mut self, id: ConnId) {
        let at = self.now.after(self.config.setup_timeout_ns.min(NOT_READY_NS));
        self.set_conn_alarm(id, Some(at));
    }

    fn count_half_open(&mut self, id: ConnId) {
        if let Some(conn) = self.conns.get_mut(id) {
            conn.half_open = true;
            self.half_open.push_back(id);
        }
        self.limit_setup(id);
    }

    pub(crate) fn set_conn_alarm(&mut self, id: ConnId, at: Option<Time>) {
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
            self.half_open.retain(|&other| other != id);
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
                // The peer may have granted it already: the block is freed when its answer comes.
                channel.incoming.control.set_grants(0);
                drop(channel);
                self.begin_link_wait(link);
                let Some(conn) = self.conns.get_mut(id) else { return };
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
        if path.refers {
            self.referring.retain(|&other| other != qp);
        }
        // Nothing of this side is for the peer any more, whatever stands in the rings.
        path.channel.outgoing.control.close();
        path.channel.incoming.control.set_grants(0);
        let (link, conn) = match path.other {
            Other::Own(other) => {
                self.orphans.push(other);
                return;
            }
            Other::Linked { link, conn, .. } => (link, conn),
        };
        self.begin_link_wait(link);
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
            conn.phase = Phase::Closing(farewell);
            match conn.tcp {
                Some(_) => self.ready.push_back(id),
                None => self.actions.push_back(Action::Close { conn: id }),
            }
        }
    }

    fn free_block(&mut self, link: LinkId, block: u32) {
        if let Some(state) = self.links.get_mut(link) {
            let _ = state.arena.free(block);
        }
    }

    pub(crate) fn link_send(&mut self, link: LinkId, message: LinkMessage) {
        self.actions.push_back(Action::LinkSend { link, message });
    }
}

impl<P: Probe> Adapter<P> {
    /// A queue pair became ready to receive: reaches out, or looks whether the peer has already.
    pub(crate) fn begin_connection(&mut self, id: QpId) {
        let Some((qp, hub)) = self.qp_and_hub(id) else { return };
        if initiates(qp, hub) {
            reach_out(qp, hub);
            return;
        }
        // Those that wait are half open, and so few.
        let waits = |&conn: &ConnId| {
            hub.conns.get(conn).is_some_and(|conn| {
                matches!(&conn.phase, Phase::Waiting(waiting)
                    if waiting.hello.dest_qpn == qp.num.0)
            })
        };
        let waiting: Vec<ConnId> = hub.half_open.iter().copied().filter(waits).collect();
        for conn in waiting {
            self.decide(conn);
        }
    }

    /// Which queue pair a request is for.
    fn find(&self, hello: &Hello) -> Match {
        if !self.hub.gids.has(Gid(hello.dest_gid)) {
            return Match::Refused(Reason::Mismatch);
        }
        let Some(qp) = self.hub.numbers.get(QpNum(hello.dest_qpn)).and_then(|id| self.qps.get(id))
        else {
            return Match::Refused(Reason::NoSuchQp);
        };
        match qp.state {
            _ if qp.qp_type.is_plain() => return Match::Refused(Reason::NoSuchQp),
            QpState::Reset | QpState::Init => return Match::NotReady,
            QpState::Err => return Match::Refused(Reason::NoSuchQp),
            _ => {}
        }
        match qp.path {
            _ if own_gid(qp, &self.hub).0 != hello.dest_gid => Match::Refused(Reason::Mismatch),
            _ if qp.requester.cut == Cut::Dead => Match::Refused(Reason::NoSuchQp),
            _ if qp.requester.cut == Cut::Off => Match::NotReady,
            Path::None if is_peer(qp, hello) && !initiates(qp, &self.hub) => Match::Ready(qp.id),
            _ => Match::Refused(Reason::Mismatch),
        }
    }

    /// Grants, keeps or refuses a request.
    fn decide(&mut self, conn: ConnId) {
        let Some(state) = self.hub.conns.get_mut(conn) else { return };
        let Phase::Waiting(waiting) = &state.phase else { return };
        let hello = waiting.hello;
        match self.find(&hello) {
            Match::NotReady => {
                self.supersede(conn, &hello);
                self.hub.limit_waiting(conn);
            }
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
                self.hub.close_stream(conn, Some(Farewell::Refusal(responder)));
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
        if let Some(qp) = self.qps.get_mut(id) {
            qp.peer_rq_psn = Some(hello.rq_psn);
        }
        match via {
            Via::Stream { responder } => self.grant_stream(conn, id, &hello, responder),
            Via::Link { link, tag, offset, end } => {
                self.grant_link(conn, id, link, tag, offset, end);
            }
        }
    }

    /// A moment that a queue pair waits for has come.
    pub(crate) fn qp_alarm(&mut self, id: QpId) {
        let Some((qp, hub)) = self.qp_and_hub(id) else { return };
        qp.timer = None;
        let now = hub.now;
        let due = |at: Option<Time>| at.is_some_and(|at| at <= now);
        let (rnr, reconnect, deadline) = (
            due(qp.requester.rnr_until),
            due(qp.requester.reconnect_at),
            due(qp.requester.deadline),
        );
        if rnr {
            fate::resume(qp, hub);
        }
        if due(qp.rq.opens_at()) {
            qp.rq.open(now);
            hub.nudged.push_back(id);
        }
        if reconnect {
            qp.requester.reconnect_at = None;
            reach_out(qp, hub);
        }
        if deadline {
            qp.requester.deadline = None;
            let unreached = matches!(qp.path, Path::None | Path::Pending(_) | Path::Lost);
            if !qp.qp_type.is_reliable() {
                unreliable::give_up(qp, hub);
            } else if (stream::is_unheard(qp, hub) || is_reached(qp, hub))
                && qp.requester.cut == Cut::Not
            {
                // The peer may be about to speak, or its process is stopped.
                qp.requester.overdue = true;
            } else if (unreached || qp.requester.cut != Cut::Not) && !qp.sq.is_empty() {
                requester::fail_oldest(qp, hub, WcStatus::RetryExcErr);
            }
        }
        requester::set_alarm(qp, hub);
        self.serve_nudged();
    }

    /// A connection took too long to be made, or its peer to finish what it said.
    pub(crate) fn conn_alarm(&mut self, conn: ConnId) {
        let Some(state) = self.hub.conns.get_mut(conn) else { return };
        state.alarm = None;
        let id = state.qp;
        let stands = match state.phase {
            Phase::Waiting(_) => return self.refuse(conn, Reason::NotReady),
            Phase::Open | Phase::Greeting(_) => true,
            _ => false,
        };
        match id.and_then(|qp| self.qp_and_hub(qp)) {
            Some((qp, hub)) if stands => receive::stream::look_at_partial(qp, hub),
            Some((qp, hub)) => stream::retry_later(qp, hub, conn),
            None => self.hub.close_stream(conn, None),
        }
    }
}

/// A connection stands: nothing waits any more.
pub(crate) fn established<P: Probe>(qp: &mut Qp, hub: &mut Hub<P>, path: Path) {
    qp.path = path;
    qp.requester.away = false;
    // Otherwise requests would wait for ever for a peer that asks again and again and never gets the reply.
    if qp.requester.cut == Cut::Not && !stream::is_unheard(qp, hub) {
        qp.requester.deadline = None;
        qp.requester.overdue = false;
    }
    qp.requester.reconnect_at = None;
    qp.requester.attempts = 0;
    requester::set_alarm(qp, hub);
    limit_silence(qp, hub);
    if hub.probe.watches() {
        watch::joined(qp, hub);
    }
    if qp.sq.has_waiting() {
        crate::doorbell::kick(qp, hub);
    }
}
