//! The management of TCP queue pairs: watching ports, connecting, mating, closing and failing.
//!
//! A connection that comes to a port is mated with an idle queue pair when it stands, not when its SYN comes:
//! a SYN costs a stranger nothing, and must not take a queue pair from anybody. One that finds no idle queue
//! pair waits for one, with a closed window. While more queue pairs are idle than connections half open, the
//! window of a SYN-ACK is what the next of them has posted, so that the peer may send at once.

mod requests;

use std::collections::VecDeque;
use std::net::{IpAddr, Ipv6Addr, SocketAddr};
use std::sync::Arc;

use quipu_inet::stack::{ConnectError, ListenError, ListenerId, TcpId};
use quipu_inet::tcp::{self, Connection, Failure, Flow, State};

use super::path::{Closing, TcpPath};
use super::{Inet, Owner, TcpChange, TcpSettings, Watch};
use crate::adapter::{Adapter, Hub, MAX_MESSAGE};
use crate::error::Fault;
use crate::probe::Probe;
use crate::qp::{Path, Qp};
use crate::receive::frames as receiving;
use crate::requester;
use crate::transmit::frames as sending;
use crate::types::{Gid, QpId, QpState, Time, WcStatus};

impl<P: Probe> Adapter<P> {
    /// Watches a TCP port, 0 for one that is free: connections to it are mated with queue pairs that are
    /// offered ([`tcp_offer`](Self::tcp_offer)). Beyond `backlog` half-open ones, peers get SYN cookies
    /// (RFC 4987). Answers with the port.
    ///
    /// # Errors
    /// The port is in use, none is free, the adapter has no packet link, or the settings are not valid.
    pub fn tcp_listen(
        &mut self,
        port: u16,
        settings: &TcpSettings,
        backlog: u32,
    ) -> Result<(ListenerId, u16), Fault> {
        let marked = self.hub.marked(settings);
        let config = self.hub.attached()?.tcp_config(&marked)?;
        self.watch_port(port, settings, &config, backlog)
    }

    /// As [`tcp_listen`](Self::tcp_listen), for a program that decides about each connection.
    /// [`Event::TcpRequest`] tells of one when it stands, so that its peer is where it says; until
    /// [`tcp_accept`](Self::tcp_accept) or [`tcp_refuse`](Self::tcp_refuse) it has a closed window. The
    /// program hears of `backlog` at most that it has not decided about, and as many wait to be heard of.
    ///
    /// # Errors
    /// As there.
    ///
    /// [`Event::TcpRequest`]: crate::Event::TcpRequest
    pub fn tcp_listen_deferred(
        &mut self,
        port: u16,
        settings: &TcpSettings,
        backlog: u32,
    ) -> Result<(ListenerId, u16), Fault> {
        settings.check()?;
        let config =
            Arc::new(tcp::Config { deferred: true, ..self.hub.marked(settings).to_config() });
        self.watch_deferred(port, settings, &config, backlog)
    }

    pub(super) fn watch_deferred(
        &mut self,
        port: u16,
        settings: &TcpSettings,
        config: &Arc<tcp::Config>,
        backlog: u32,
    ) -> Result<(ListenerId, u16), Fault> {
        let (id, port) = self.watch_port(port, settings, config, backlog)?;
        self.hub.attached()?.say_idle(id);
        Ok((id, port))
    }

    fn watch_port(
        &mut self,
        port: u16,
        settings: &TcpSettings,
        config: &Arc<tcp::Config>,
        backlog: u32,
    ) -> Result<(ListenerId, u16), Fault> {
        let inet = self.hub.attached()?;
        let (id, port) = inet.stack.listen(port, config, backlog).map_err(|error| match error {
            ListenError::InUse => Fault::Taken("the port already has a listener"),
            ListenError::NoPort => Fault::Exhausted("TCP ports"),
        })?;
        let watch = Watch {
            settings: *settings,
            idle: VecDeque::new(),
            waiting: VecDeque::new(),
            backlog: backlog.max(1) as usize,
            deferred: config.deferred,
            requests: 0,
            closed: false,
        };
        inet.watches.insert(id, watch);
        Ok((id, port))
    }

    /// A TCP port at which nobody listens. It is not kept: who comes first has it.
    ///
    /// # Errors
    /// There is none, or the adapter has no packet link.
    pub fn tcp_free_port(&mut self) -> Result<u16, Fault> {
        self.hub.attached()?.stack.free_port().ok_or(Fault::Exhausted("TCP ports"))
    }

    /// Accepts the peer of an [`Event::TcpRequest`], for an idle queue pair, in RESET or INIT, which is in
    /// RTS then: its receives are the window.
    ///
    /// # Errors
    /// No such object, no such request any more, or a queue pair that is of another type or in another state.
    ///
    /// [`Event::TcpRequest`]: crate::Event::TcpRequest
    pub fn tcp_accept(&mut self, now: Time, connection: TcpId, id: QpId) -> Result<(), Fault> {
        self.hub.now = now;
        let (qp, hub) = self.qp_and_hub(id).ok_or(Fault::NoSuchObject)?;
        check_idle(qp)?;
        let inet = hub.attached()?;
        let listener = inet.request(connection).ok_or(Fault::NoSuchObject)?;
        let Some(watch) = inet.watches.get(&listener) else { return Err(Fault::NoSuchObject) };
        let settings = watch.settings;
        inet.set_owner(connection, Some(Owner::Qp(id)));
        hub.decided(listener);
        begin(qp, hub, connection, &settings);
        self.take_inet_events();
        Ok(())
    }

    /// Refuses the peer of an [`Event::TcpRequest`]: it gets a reset.
    ///
    /// # Errors
    /// No such request any more.
    ///
    /// [`Event::TcpRequest`]: crate::Event::TcpRequest
    pub fn tcp_refuse(&mut self, now: Time, connection: TcpId) -> Result<(), Fault> {
        self.hub.now = now;
        let inet = self.hub.attached()?;
        let listener = inet.request(connection).ok_or(Fault::NoSuchObject)?;
        inet.forget(connection);
        self.hub.decided(listener);
        self.take_inet_events();
        Ok(())
    }

    /// Watches a port no more. Queue pairs that were offered are free again, and connections that none was
    /// found for end. About those of which [`Event::TcpRequest`] has told, the program still decides.
    ///
    /// [`Event::TcpRequest`]: crate::Event::TcpRequest
    pub fn tcp_unlisten(&mut self, listener: ListenerId) {
        let Ok(inet) = self.hub.attached() else { return };
        inet.stack.unlisten(listener);
        let Some(watch) = inet.watches.get_mut(&listener) else { return };
        watch.closed = true;
        let waiting = std::mem::take(&mut watch.waiting);
        let idle = std::mem::take(&mut watch.idle);
        if watch.requests == 0 {
            inet.watches.remove(&listener);
        }
        for connection in waiting {
            inet.forget(connection);
        }
        for id in idle {
            if let Some(path) = self.qps.get_mut(id).and_then(tcp_path) {
                path.listener = None;
            }
        }
    }

    /// Offers an idle queue pair, in RESET or INIT: it becomes the end of the next connection to the port,
    /// which [`Event::Tcp`] tells. Receives should be posted before, since they are the window.
    ///
    /// # Errors
    /// No such object, or a queue pair that is of another type, offered already, connected, or in another
    /// state.
    ///
    /// [`Event::Tcp`]: crate::Event::Tcp
    pub fn tcp_offer(&mut self, now: Time, listener: ListenerId, id: QpId) -> Result<(), Fault> {
        self.hub.now = now;
        let (qp, hub) = self.qp_and_hub(id).ok_or(Fault::NoSuchObject)?;
        check_idle(qp)?;
        let inet = hub.attached()?;
        let watch = inet.watch(listener).ok_or(Fault::NoSuchObject)?;
        watch.idle.push_back(id);
        if let Some(path) = tcp_path(qp) {
            path.listener = Some(listener);
        }
        match watch.waiting.pop_front() {
            Some(connection) => self.mate(listener, connection),
            None => inet.say_idle(listener),
        }
        // Peers that have come too early, a moment ago, are answered now.
        self.take_inet_events();
        Ok(())
    }

    /// Connects a queue pair that is in RESET or INIT to a peer, from a port of its own choice or any that
    /// is free. It is in RTR meanwhile; what becomes of it, [`Event::Tcp`] tells.
    ///
    /// # Errors
    /// No route, no port, an address that is nobody's or this very end's, settings that are not valid, or a
    /// queue pair that is of another type or in another state.
    ///
    /// [`Event::Tcp`]: crate::Event::Tcp
    pub fn tcp_connect(
        &mut self,
        now: Time,
        id: QpId,
        remote: SocketAddr,
        local_port: Option<u16>,
        settings: &TcpSettings,
    ) -> Result<(), Fault> {
        let any = IpAddr::from(Ipv6Addr::UNSPECIFIED);
        let local = SocketAddr::new(any, local_port.unwrap_or(0));
        self.tcp_connect_from(now, id, local, remote, settings)
    }

    /// As [`tcp_connect`](Self::tcp_connect), from an own address and a port, each of which may be
    /// unspecified.
    ///
    /// # Errors
    /// As there; no route also if it is not an own address, or of another family.
    pub fn tcp_connect_from(
        &mut self,
        now: Time,
        id: QpId,
        local: SocketAddr,
        remote: SocketAddr,
        settings: &TcpSettings,
    ) -> Result<(), Fault> {
        self.hub.now = now;
        let (qp, hub) = self.qp_and_hub(id).ok_or(Fault::NoSuchObject)?;
        check_idle(qp)?;
        let marked = hub.marked(settings);
        let inet = hub.attached()?;
        let config = inet.tcp_config(&marked)?;
        let connection =
            inet.stack.connect_from(now.0, local, remote, &config).map_err(no_connection)?;
        inet.set_owner(connection, Some(Owner::Qp(id)));
        take_on(qp, hub, connection, settings);
        qp.state = QpState::Rtr;
        Ok(())
    }

    /// Ends sending: what is posted still goes out, then the peer learns that this was all; nothing more can
    /// be posted to the send queue. The peer may go on. The queue pair goes to ERR when both ends have
    /// closed.
    ///
    /// # Errors
    /// No such queue pair, or one without a connection.
    pub fn tcp_close(&mut self, now: Time, id: QpId) -> Result<(), Fault> {
        self.hub.now = now;
        let (qp, hub) = self.qp_and_hub(id).ok_or(Fault::NoSuchObject)?;
        let end = qp.sq.tail;
        let path = tcp_path(qp).ok_or(NOT_TCP)?;
        if path.connection.is_none() {
            return Err(Fault::WrongState);
        }
        if path.closing == Closing::Not {
            (path.closing, path.end) = (Closing::Wanted, end);
        }
        sending::hand_over(qp, hub);
        self.take_inet_events();
        Ok(())
    }

    /// As [`tcp_close`](Self::tcp_close), for a program that may not know of it: what it posts to the send
    /// queue from now on is taken, and flushed when the connection is over.
    ///
    /// # Errors
    /// As there.
    pub fn tcp_finish(&mut self, now: Time, id: QpId) -> Result<(), Fault> {
        if let Some(path) = self.qps.get_mut(id).and_then(tcp_path) {
            path.takes_more = true;
        }
        self.tcp_close(now, id)
    }

    /// Ends the connection at once: the peer gets a reset, everything posted is flushed, and the queue pair
    /// is in ERR.
    ///
    /// # Errors
    /// No such queue pair, or one without a connection.
    pub fn tcp_abort(&mut self, now: Time, id: QpId) -> Result<(), Fault> {
        self.hub.now = now;
        let (qp, hub) = self.qp_and_hub(id).ok_or(Fault::NoSuchObject)?;
        if tcp_path(qp).ok_or(NOT_TCP)?.connection.is_none() {
            return Err(Fault::WrongState);
        }
        requester::to_error(qp, hub, None);
        Ok(())
    }

    /// Both ends of the connection of a queue pair; `None` if it has none.
    #[must_use]
    pub fn tcp_flow(&self, id: QpId) -> Option<Flow> {
        let Path::Tcp(path) = &self.qps.get(id)?.path else { return None };
        self.hub.inet.as_ref()?.stack.flow(path.connection?)
    }

    /// What the connection of a queue pair has seen and done; `None` if it has none.
    #[must_use]
    pub fn tcp_counters(&self, id: QpId) -> Option<&tcp::Counters> {
        let Path::Tcp(path) = &self.qps.get(id)?.path else { return None };
        Some(self.hub.inet.as_ref()?.stack.connection(path.connection?)?.counters())
    }

    /// Something happened to a connection.
    pub(super) fn tcp_event(&mut self, connection: TcpId, event: tcp::Event) {
        let Some(inet) = &mut self.hub.inet else { return };
        match inet.owner(connection) {
            Some(Owner::Listener(listener)) => match event {
                tcp::Event::Connected => self.mate(listener, connection),
                tcp::Event::Failed(_) | tcp::Event::Closed => inet.forget(connection),
                _ => {}
            },
            Some(Owner::Request(listener)) => {
                if let tcp::Event::Failed(_) | tcp::Event::Closed = event {
                    inet.forget(connection);
                    self.hub.tell_request(listener, connection, None);
                    self.hub.decided(listener);
                }
            }
            Some(Owner::Qp(id)) => {
                if let Some((qp, hub)) = self.qp_and_hub(id) {
                    happened(qp, hub, event);
                }
            }
            Some(Owner::Stream) => self.stream_event(connection, event),
            None => {}
        }
    }

    /// A connection stands that has no queue pair: it gets the next idle one, or waits for one.
    fn mate(&mut self, listener: ListenerId, connection: TcpId) {
        let Some(inet) = &mut self.hub.inet else { return };
        // Its SYN-ACK may have offered what the next queue pair has posted; another may have come first.
        inet.stack.set_receive_space(connection, 0);
        let Some(watch) = inet.watch(listener) else { return inet.forget(connection) };
        if watch.deferred && watch.requests < watch.backlog {
            watch.requests += 1;
            inet.set_owner(connection, Some(Owner::Request(listener)));
            inet.say_idle(listener);
            let flow = inet.stack.flow(connection);
            return self.hub.tell_request(listener, connection, flow);
        }
        let Some(id) = watch.idle.pop_front() else {
            if watch.waiting.len() < watch.backlog {
                watch.waiting.push_back(connection);
            } else {
                inet.forget(connection);
            }
            return;
        };
        let settings = watch.settings;
        inet.set_owner(connection, Some(Owner::Qp(id)));
        inet.say_idle(listener);
        let Some((qp, hub)) = self.qp_and_hub(id) else { return };
        begin(qp, hub, connection, &settings);
    }
}

const NOT_TCP: Fault = Fault::Invalid("the queue pair is not of type TCP");

pub(super) fn no_connection(error: ConnectError) -> Fault {
    match error {
        ConnectError::NoRoute => Fault::NoRoute(
            "no route to the peer: no own address of its family, prefix or gateway leads there",
        ),
        ConnectError::BadAddress => Fault::Invalid(
            "the peer's address is a multicast or unspecified address, or this end itself",
        ),
        ConnectError::InUse => Fault::Taken("there is already a connection between these ports"),
        ConnectError::NoPort => Fault::Exhausted("TCP ports to that peer"),
        ConnectError::TooMany => Fault::Exhausted("TCP connections"),
    }
}

pub(crate) fn tcp_path(qp: &mut Qp) -> Option<&mut TcpPath> {
    if let Path::Tcp(path) = &mut qp.path { Some(path) } else { None }
}

/// Whether a queue pair can be given a connection.
fn check_idle(qp: &Qp) -> Result<(), Fault> {
    let Path::Tcp(path) = &qp.path else { return Err(NOT_TCP) };
    if path.listener.is_some() {
        return Err(Fault::Busy);
    }
    let fresh = matches!(qp.state, QpState::Reset | QpState::Init);
    if fresh && path.connection.is_none() { Ok(()) } else { Err(Fault::WrongState) }
}

/// Whether a request of `len` octets can be posted to a TCP queue pair.
///
/// # Errors
/// It has closed, or the message is one that TCP cannot carry.
pub(crate) fn check_send(qp: &Qp, len: u64) -> Result<(), Fault> {
    let Path::Tcp(path) = &qp.path else { return Ok(()) };
    // In ERR it is flushed, however that has come.
    if path.closing != Closing::Not && !path.takes_more && qp.state != QpState::Err {
        return Err(Fault::WrongState);
    }
    check_message(path.mode, len)
}

/// Whether a request of `len` octets is one that TCP can carry.
///
/// # Errors
/// It is an empty message, or one that is too long.
pub fn check_message(mode: tcp::Mode, len: u64) -> Result<(), Fault> {
    if len > u64::from(MAX_MESSAGE) {
        return Err(Fault::Invalid("longer than a request can be (2147483648 bytes)"));
    }
    if len == 0 && mode == tcp::Mode::Message {
        return Err(Fault::Invalid("an empty message: TCP cannot carry it"));
    }
    Ok(())
}

/// A queue pair takes a connection on: its receives are the window.
fn take_on<P>(qp: &mut Qp, hub: &mut Hub<P>, connection: TcpId, settings: &TcpSettings) {
    hub.counters.changes += 1;
    let Path::Tcp(path) = &mut qp.path else { return };
    let Some(inet) = &mut hub.inet else { return };
    path.begin(connection, settings.mode);
    let room = path.receives.first_news(receiving::MOST_ROOM);
    inet.stack.set_receive_space(connection, room);
    inet.stack.set_spare(connection, path.spare());
    if let Some(flow) = inet.stack.flow(connection) {
        qp.attr.av.dgid = Gid::from(flow.remote.ip());
        qp.attr.av.traffic_class = settings.traffic_class;
        qp.attr.dest_qp_num = u32::from(flow.remote.port());
    }
}

/// A queue pair takes on a connection that has come, and stands.
fn begin<P: Probe>(qp: &mut Qp, hub: &mut Hub<P>, connection: TcpId, settings: &TcpSettings) {
    take_on(qp, hub, connection, settings);
    if let Some(inet) = &mut hub.inet {
        inet.stack.admit(connection);
    }
    connected(qp, hub);
    let state = |inet: &Inet| inet.stack.connection(connection).map(Connection::state);
    if hub.inet.as_deref().and_then(state) == Some(State::CloseWait) {
        // Its end was told while nobody was there to hear of it.
        happened(qp, hub, tcp::Event::PeerClosed(0));
    }
}

/// The connection of a queue pair stands.
fn connected<P: Probe>(qp: &mut Qp, hub: &mut Hub<P>) {
    qp.state = QpState::Rts;
    hub.tell_tcp(qp.id, TcpChange::Connected);
    sending::hand_over(qp, hub);
}

/// Something happened to the connection of a queue pair.
fn happened<P: Probe>(qp: &mut Qp, hub: &mut Hub<P>, event: tcp::Event) {
    if let Some(path) = tcp_path(qp).filter(|path| path.receives.is_owed()) {
        // The peer knows that all of its stream is here: they are neither flushed nor overtaken by its end.
        match event {
            tcp::Event::PeerClosed(_) => return path.late.peer_closed = true,
            tcp::Event::Closed => return path.late.closed = true,
            _ => {}
        }
    }
    match event {
        tcp::Event::Connected => connected(qp, hub),
        tcp::Event::Acked(offset) => sending::acknowledged(qp, hub, offset),
        tcp::Event::PeerClosed(_) => {
            receiving::finish_stream(qp, hub);
            // Its completion may have been one too many; and whoever began with a connection that the
            // peer had closed knows of it.
            let news = |path: &&mut TcpPath| path.connection.is_some() && !path.peer_closed;
            if let Some(path) = tcp_path(qp).filter(news) {
                path.peer_closed = true;
                hub.tell_tcp(qp.id, TcpChange::PeerClosed);
                look_whether_closed(qp, hub);
            }
        }
        tcp::Event::Failed(failure) => failed(qp, hub, failure),
        tcp::Event::Closed => closed(qp, hub),
        // Urgent data are in line with the others (RFC 6093 6). Queue pairs have no word for soft errors: the
        // stack asks the next hop, and how the connection ends, if it does, says what was the matter.
        tcp::Event::Urgent(_) | tcp::Event::Suspect => {}
    }
}

/// The connection is gone: the oldest send fails with what happened, everything else is flushed. One that
/// was refused never was: the queue pair keeps what is posted, and may try again.
pub(crate) fn failed<P: Probe>(qp: &mut Qp, hub: &mut Hub<P>, failure: Failure) {
    let_go(qp, hub);
    hub.tell_tcp(qp.id, TcpChange::Failed(failure));
    if matches!(failure, Failure::Refused | Failure::Declined) && qp.state == QpState::Rtr {
        qp.state = QpState::Init;
        return;
    }
    if qp.sq.is_empty() {
        return requester::to_error(qp, hub, None);
    }
    let status = match failure {
        Failure::TimedOut | Failure::Unreachable => WcStatus::RetryExcErr,
        Failure::Refused | Failure::Declined | Failure::Reset => WcStatus::RemOpErr,
    };
    requester::fail_oldest(qp, hub, status);
}

/// Both ends have closed, and everything is acknowledged: what is left are receives.
fn closed<P: Probe>(qp: &mut Qp, hub: &mut Hub<P>) {
    let_go(qp, hub);
    hub.tell_tcp(qp.id, TcpChange::Closed);
    requester::to_error(qp, hub, None);
}

/// Receives have taken what TCP had for them: the program may hear of the end, if that is all.
pub(crate) fn settled<P: Probe>(qp: &mut Qp, hub: &mut Hub<P>) {
    let late = tcp_path(qp).filter(|path| !path.receives.is_owed()).map(|path| &mut path.late);
    let late = late.map(std::mem::take).unwrap_or_default();
    if late.peer_closed {
        happened(qp, hub, tcp::Event::PeerClosed(0));
    }
    if late.closed && tcp_path(qp).is_some_and(|path| path.connection.is_some()) {
        closed(qp, hub);
    }
    look_whether_closed(qp, hub);
}

/// A connection in TIME-WAIT is the stack's alone; but the acknowledgement that has ended it may be news of
/// sends, too, of which the event comes first.
pub(crate) fn look_whether_closed<P: Probe>(qp: &mut Qp, hub: &mut Hub<P>) {
    let Path::Tcp(path) = &qp.path else { return };
    let over = path.peer_closed && path.closing == Closing::Told && path.sends.are_acked();
    let state = |id| Some(hub.inet.as_ref()?.stack.connection(id)?.state());
    if over && path.connection.and_then(state) == Some(State::TimeWait) {
        closed(qp, hub);
    }
}

/// The queue pair has no connection any more; `true` if it had one.
fn let_go<P>(qp: &mut Qp, hub: &mut Hub<P>) -> bool {
    let kept = tcp_path(qp).map_or(0, |path| path.kept());
    let connection = tcp_path(qp).and_then(TcpPath::let_go);
    if let (Some(connection), Some(inet)) = (connection, &mut hub.inet) {
        inet.note_kept(kept, 0);
        inet.forget(connection);
    }
    connection.is_some()
}

/// Ends what a TCP queue pair has to do with others: its connection is reset, no listener counts on it.
pub(crate) fn detach<P>(qp: &mut Qp, hub: &mut Hub<P>) {
    if let_go(qp, hub) {
        hub.tell_tcp(qp.id, TcpChange::Aborted);
    }
    let listener = tcp_path(qp).and_then(|path| path.listener.take());
    if let (Some(listener), Some(inet)) = (listener, &mut hub.inet) {
        if let Some(watch) = inet.watches.get_mut(&listener) {
            watch.idle.retain(|&idle| idle != qp.id);
        }
        inet.say_idle(listener);
    }
}
