//! Connections over byte streams: MPA start-up with Quipu's hello in its private data.

use std::net::{IpAddr, SocketAddr};

use quipu_iwarp::setup::Outcome;
use quipu_iwarp::wire::hello::{Features, Hello, Kind};
use quipu_iwarp::{Extensions, Initiator, Negotiated, Params, Receiver, Responder, Sender};

use super::{
    Phase, Via, Waiting, attempt_failed, established, hello_of, initiates, is_peer, limit_startup,
    lose, own_gid, start_deadline,
};
use crate::adapter::{Adapter, Crc, Hub};
use crate::error::{Fault, Loss};
use crate::fate::Cut;
use crate::plain;
use crate::probe::Probe;
use crate::qp::{Path, Qp};
use crate::receive;
use crate::requester;
use crate::responder;
use crate::stream::StreamPath;
use crate::types::{ConnId, Gid, QpId, QpType, Time, WcStatus};

/// What this side asks for when a stream to the peer of `qp` starts up.
fn params<P>(qp: &Qp, hub: &Hub<P>) -> Params {
    let peer = qp.attr.av.dgid;
    let crc = match hub.config.crc {
        Crc::Always => true,
        Crc::BetweenHosts => !hub.gids.has(peer) && !IpAddr::from(peer).is_loopback(),
        Crc::Never => false,
    };
    Params { crc, ..Params::default() }
}

/// The two halves of a stream that both ends have agreed on.
fn open_stream<P>(
    hub: &Hub<P>,
    conn: ConnId,
    negotiated: &Negotiated,
    features: Features,
    qp_type: QpType,
) -> StreamPath {
    let max_ulpdu = hub.config.max_ulpdu.min(u32::from(u16::MAX) - 3) as u16;
    let agreed = Extensions::from(features);
    let (xrc, reliable) = (qp_type.names_srq(), qp_type.is_reliable());
    let acknowledging_sends = agreed.acknowledging_sends && reliable && !xrc;
    let extensions = Extensions { acknowledging_sends, xrc, ..agreed };
    let mut receiver = Receiver::new(negotiated, extensions);
    // An unreliable message is executed whole or dropped.
    match reliable {
        true => receiver.set_piecewise(),
        false => receiver.let_wrap(),
    }
    let sender = Sender::new(negotiated, max_ulpdu);
    let flushes = extensions.flush;
    StreamPath { acknowledging_sends, flushes, ..StreamPath::new(conn, sender, receiver) }
}

/// Ends an attempt over a stream, and tries again after a pause.
pub(super) fn retry_later<P: Probe>(qp: &mut Qp, hub: &mut Hub<P>, conn: ConnId) {
    hub.close_stream(conn, None);
    attempt_failed(qp, hub);
}

/// A stream ended over which the peer, which had asked for it, has said nothing: it gave up before the reply
/// reached it, and asks again, since to it nothing stood. Requests fail if the peer was silent for the whole
/// retry time, or if theirs has passed over this and earlier streams.
fn unheard_lost<P: Probe>(qp: &mut Qp, hub: &mut Hub<P>, loss: Loss) {
    requester::start_over(qp);
    qp.path = Path::None;
    let overdue = std::mem::take(&mut qp.requester.overdue) || loss == Loss::TimedOut;
    if overdue && !qp.sq.is_empty() && qp.requester.cut == Cut::Not {
        return requester::fail_oldest(qp, hub, WcStatus::RetryExcErr);
    }
    start_deadline(qp, hub);
}

/// The peer of a stream has said something for the first time: nothing waits for it any more.
pub(crate) fn note_heard<P>(qp: &mut Qp, hub: &mut Hub<P>) {
    if qp.requester.cut == Cut::Not {
        qp.requester.deadline = None;
        requester::set_alarm(qp, hub);
    }
    qp.requester.overdue = false;
}

/// Whether the peer of a reliable queue pair may not know yet that the stream stands which it asked for.
pub(super) fn is_unheard<P>(qp: &Qp, hub: &Hub<P>) -> bool {
    match &qp.path {
        Path::Stream(stream) => {
            let quipu = stream.plain.is_none() && qp.qp_type.is_reliable();
            quipu && !stream.heard && !initiates(qp, hub)
        }
        _ => false,
    }
}

impl<P: Probe> Adapter<P> {
    /// The queue pair that a connection is of. If it was accepted, that is known once its peer has said so.
    #[must_use]
    pub fn user_of(&self, conn: ConnId) -> Option<QpId> {
        self.hub.conns.get(conn)?.qp
    }

    /// The stream of an open or closing connection.
    pub(crate) fn stream_of(&mut self, conn: ConnId) -> Option<&mut StreamPath> {
        let qp = self.hub.conns.get(conn)?.qp?;
        match &mut self.qps.get_mut(qp)?.path {
            Path::Stream(stream) => Some(stream),
            _ => None,
        }
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
        let Ok(initiator) = Initiator::new(params(qp, hub), &hello.to_bytes()) else { return };
        if let Some(state) = hub.conns.get_mut(conn) {
            state.phase = Phase::Initiating(Box::new(initiator));
        }
        limit_startup(qp, hub, conn);
        hub.ready.push_back(conn);
    }

    /// A byte stream was accepted; its peer will say which queue pair it wants. If there are too many such
    /// streams the oldest is closed.
    ///
    /// # Errors
    /// [`Fault::Exhausted`]: too many connections; close it.
    pub fn handle_accepted(&mut self, now: Time, peer: SocketAddr) -> Result<ConnId, Fault> {
        self.hub.now = now;
        let peer = peer.ip().to_canonical();
        self.make_room(peer);
        let phase = Phase::Listening { responder: Box::default(), peer };
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
                // An initiator says nothing before it is answered (RFC 5044 7.1.2).
                Phase::Waiting(_) => {
                    self.hub.close_stream(conn, None);
                    return bytes.len();
                }
                _ => return bytes.len(),
            };
            if taken == 0 {
                break;
            }
            used += taken;
        }
        used
    }

    pub(super) fn hear_reply(&mut self, conn: ConnId, bytes: &[u8]) -> usize {
        let Some(state) = self.hub.conns.get_mut(conn) else { return bytes.len() };
        let (id, watched) = (state.qp, state.alarm.is_some());
        let Phase::Initiating(initiator) = &mut state.phase else { return bytes.len() };
        let outcome = initiator.handle(bytes);
        let Some((qp, hub)) = id.and_then(|id| self.qp_and_hub(id)) else { return bytes.len() };
        match outcome {
            Ok((used, None)) => {
                if !watched {
                    // The peer's process is stopped, or the length of its reply was damaged on the way.
                    let at = hub.now.after(qp.patience_ns(hub.config.unfinished_ns));
                    hub.set_conn_alarm(conn, Some(at));
                }
                used
            }
            Ok((used, Some(Outcome::Established(negotiated)))) => {
                let hello = Hello::parse(&negotiated.private_data);
                match hello {
                    Ok(hello)
                        if hello.kind == Kind::Accept
                            && hello.dest_qpn == qp.num.0
                            && hello.dest_gid == own_gid(qp, hub).0
                            && is_peer(qp, &hello) =>
                    {
                        hub.settle(conn);
                        qp.peer_rq_psn = Some(hello.rq_psn);
                        let stream =
                            open_stream(hub, conn, &negotiated, hello.features, qp.qp_type);
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

    pub(super) fn hear_request(&mut self, conn: ConnId, bytes: &[u8]) -> usize {
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
                let early = used < bytes.len();
                match hello {
                    Ok(hello) if genuine && !early => {
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
            Path::Pending(pending) if *pending == conn => attempt_failed(qp, hub),
            Path::Stream(stream) if stream.conn == conn && stream.plain.is_some() => {
                plain::lost(qp, hub, loss);
            }
            Path::Stream(stream) if stream.conn == conn && !qp.qp_type.is_reliable() => {
                lose(qp, hub);
            }
            Path::Stream(stream) if stream.conn == conn => {
                let heard = stream.heard;
                if heard || initiates(qp, hub) {
                    let path = std::mem::replace(&mut qp.path, Path::Lost);
                    // What the peer was to be refused once it had the answers to what it asked before.
                    let refusal =
                        if let Path::Stream(stream) = path { stream.refusal } else { None };
                    match (refusal, loss) {
                        (Some(refusal), _) => responder::refuse(qp, hub, refusal),
                        (None, Loss::Closed) => requester::peer_lost(qp, hub),
                        _ => requester::peer_silent(qp, hub),
                    }
                } else {
                    unheard_lost(qp, hub, loss);
                }
            }
            _ => {}
        }
    }

    pub(super) fn grant_stream(
        &mut self,
        conn: ConnId,
        id: QpId,
        hello: &Hello,
        mut responder: Box<Responder>,
    ) {
        let Some((qp, hub)) = self.qp_and_hub(id) else { return };
        let answer = hello.answer(Kind::Accept, Features::ALL, qp.attr.rq_psn, qp.attr.sq_psn);
        let accepted = responder.accept(params(qp, hub), &answer.to_bytes());
        let Ok(negotiated) = accepted else {
            hub.close_stream(conn, None);
            return;
        };
        let stream = open_stream(hub, conn, &negotiated, answer.features, qp.qp_type);
        if let Some(state) = hub.conns.get_mut(conn) {
            state.qp = Some(id);
            state.phase = Phase::Greeting(responder);
        }
        established(qp, hub, Path::Stream(Box::new(stream)));
        if let Path::Stream(stream) = &mut qp.path {
            stream.make_ready(&mut hub.ready);
        }
    }
}
