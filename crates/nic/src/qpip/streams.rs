//! Byte streams over the adapter's own TCP: plain iWARP without a socket.
//!
//! Connection management opens a stream, or accepts one that has come to a port, goes through the start-up of
//! MPA on it, and gives it to a queue pair ([`Adapter::adopt_tcp_stream`]). From then on the stream of the
//! queue pair is filled and emptied here, in place of the world below: what
//! [`transmit`](Adapter::transmit) gives goes to TCP, and what TCP brings to
//! [`handle_stream`](Adapter::handle_stream).
//!
//! Plain iWARP completes a request when TCP has its bytes, and RFC 5044 wants a retransmission to be the
//! same bytes: so, unlike the messages of QPIP, they are kept here until they are acknowledged. What comes
//! behind a gap is kept until that is filled.
//!
//! FPDUs and segments: each segment begins with an FPDU and ends with one (RFC 5044 5). The queue pair fills
//! a buffer as long as a segment, with FPDUs of at most the MULPDU that this allows, and TCP keeps that end
//! ([`tcp::Config::aligned`]), also where it sends again.

use std::net::SocketAddr;
use std::sync::Arc;

use quipu_inet::stack::{ListenerId, TcpId};
use quipu_inet::tcp::{self, Failure, Flow, Mode, Received};
use quipu_iwarp::mulpdu;

use super::buffers::{Inbox, Outbox};
use super::{Inet, Owner, TcpSettings, connections, set};
use crate::adapter::{Adapter, Alarm, Hub};
use crate::connect::Phase;
use crate::error::{Fault, Loss};
use crate::event::Event;
use crate::plain::Adoption;
use crate::probe::Probe;
use crate::qp::Path;
use crate::receive::early::{self, Early};
use crate::types::{ConnId, QpId, Time};

/// Octets that a stream keeps for want of acknowledgements, before its queue pair has to wait.
const MOST_UNACKED: usize = 512 << 10;
/// The window that the stream of a queue pair offers: what it keeps behind gaps, and of an FPDU that is not
/// whole.
const WINDOW: usize = 512 << 10;
/// That of a stream that starts up: many strangers may have one. Start-up frames are much shorter.
const FIRST_WINDOW: usize = 4096;
/// How long the peer of a stream that has ended here may take to end it as well.
const CLOSING_NS: u64 = 10_000_000_000;

/// What happens to a stream that no queue pair has yet. `Lost` is the last; the stream is still to be
/// [closed](Adapter::stream_close).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TcpStreamChange {
    /// It stands.
    Connected,
    /// There are bytes for [`stream_receive`](Adapter::stream_receive).
    Readable,
    /// It is gone: the peer has closed it, or reset it, or it was never made. What had come before was
    /// [`Readable`](Self::Readable).
    Lost(Option<Failure>),
}

/// A stream.
pub(crate) struct TcpStream {
    /// The connection of the queue pair that has it.
    conn: Option<ConnId>,
    outbox: Outbox,
    inbox: Inbox,
    /// The stream has come without a gap up to this offset.
    contiguous: u64,
    /// Octets that are kept at most.
    window: usize,
    /// The queue pair has more to say, and too much is unacknowledged.
    is_full: bool,
    /// This end has ended it: what still comes is dropped.
    is_ending: bool,
    alarm: Option<Time>,
}

impl TcpStream {
    fn new() -> Self {
        Self {
            conn: None,
            outbox: Outbox::default(),
            inbox: Inbox::default(),
            contiguous: 0,
            window: FIRST_WINDOW,
            is_full: false,
            is_ending: false,
            alarm: None,
        }
    }
}

/// How the connections of streams are.
fn config_of(settings: &TcpSettings) -> Result<tcp::Config, Fault> {
    settings.check()?;
    let settings = TcpSettings { mode: Mode::Stream, ..*settings };
    Ok(tcp::Config {
        aligned: true,
        max_receive_space: WINDOW as u64,
        // What bounds them are their octets.
        max_messages: u32::MAX,
        ..settings.to_config()
    })
}

/// What the end of a connection means for a queue pair.
fn loss_of(failure: Failure) -> Loss {
    match failure {
        Failure::Refused | Failure::Declined => Loss::Refused,
        Failure::Reset => Loss::Closed,
        Failure::TimedOut => Loss::TimedOut,
        Failure::Unreachable => Loss::Unavailable,
    }
}

impl Inet {
    fn stream(&mut self, connection: TcpId) -> Option<&mut TcpStream> {
        (self.owner(connection)? == Owner::Stream).then_some(())?;
        self.streams.get_mut(connection.index())?.as_mut()
    }

    /// A stream begins on this connection: its window opens.
    fn begin_stream(&mut self, connection: TcpId) {
        self.set_owner(connection, Some(Owner::Stream));
        set(&mut self.streams, connection.index(), Some(TcpStream::new()));
        self.stack.set_receive_space(connection, FIRST_WINDOW as u64);
    }

    /// The connection of the queue pair that has the stream of a TCP connection.
    pub(crate) fn conn_of(&self, connection: TcpId) -> Option<ConnId> {
        (self.owner(connection)? == Owner::Stream).then_some(())?;
        self.streams.get(connection.index())?.as_ref()?.conn
    }

    /// The TCP connection whose stream the connection of a queue pair has.
    pub(crate) fn stream_of(&self, conn: ConnId) -> Option<TcpId> {
        self.streaming().find(|&connection| self.conn_of(connection) == Some(conn))
    }

    /// The connections of all streams.
    fn streaming(&self) -> impl Iterator<Item = TcpId> {
        let owned = self.owners.iter().flatten();
        owned.filter(|(_, owner)| *owner == Owner::Stream).map(|(id, _)| *id)
    }

    /// Copies what TCP sends again, or for the first time.
    pub(crate) fn copy_sent(
        &mut self,
        connection: TcpId,
        range: std::ops::Range<u64>,
        out: &mut [u8],
    ) -> bool {
        self.stream(connection).is_some_and(|stream| stream.outbox.copy(range, out))
    }
}

impl<P: Probe> Adapter<P> {
    /// Watches a TCP port, 0 for one that is free, for byte streams. [`Event::TcpRequest`] tells of one that
    /// has come; [`stream_accept`](Self::stream_accept) takes it, [`tcp_refuse`](Self::tcp_refuse) does not.
    /// All else is as with [`tcp_listen_deferred`](Self::tcp_listen_deferred).
    ///
    /// # Errors
    /// As there.
    pub fn stream_listen(
        &mut self,
        port: u16,
        settings: &TcpSettings,
        backlog: u32,
    ) -> Result<(ListenerId, u16), Fault> {
        let config =
            Arc::new(tcp::Config { deferred: true, ..config_of(&self.hub.marked(settings))? });
        self.watch_deferred(port, settings, &config, backlog)
    }

    /// Opens a byte stream, from an own address and a port, each of which may be unspecified.
    /// [`Event::TcpStream`] says what becomes of it.
    ///
    /// # Errors
    /// No route, no port, an address that is nobody's, settings that are not valid, or no packet link.
    pub fn stream_connect(
        &mut self,
        now: Time,
        local: SocketAddr,
        remote: SocketAddr,
        settings: &TcpSettings,
    ) -> Result<TcpId, Fault> {
        self.hub.now = now;
        let marked = self.hub.marked(settings);
        let inet = self.hub.attached()?;
        let config = Arc::new(config_of(&marked)?);
        let connected = inet.stack.connect_from(now.0, local, remote, &config);
        let connection = connected.map_err(connections::no_connection)?;
        inet.begin_stream(connection);
        Ok(connection)
    }

    /// Takes the stream of an [`Event::TcpRequest`].
    ///
    /// # Errors
    /// No such request any more.
    pub fn stream_accept(&mut self, now: Time, connection: TcpId) -> Result<(), Fault> {
        self.hub.now = now;
        let inet = self.hub.attached()?;
        let listener = inet.request(connection).ok_or(Fault::NoSuchObject)?;
        inet.begin_stream(connection);
        inet.stack.admit(connection);
        self.hub.decided(listener);
        self.take_inet_events();
        Ok(())
    }

    /// Sends bytes on a stream that no queue pair has: those of its start-up. One that is not connected yet
    /// sends them when it is.
    ///
    /// # Errors
    /// No such stream, or one that has ended; or far too many bytes.
    pub fn stream_send(&mut self, now: Time, connection: TcpId, bytes: &[u8]) -> Result<(), Fault> {
        self.hub.now = now;
        let inet = self.hub.attached()?;
        let stream = inet.stream(connection).filter(|stream| !stream.is_ending);
        let stream = stream.ok_or(Fault::NoSuchObject)?;
        if stream.outbox.len() + bytes.len() > MOST_UNACKED {
            return Err(Fault::Exhausted("room for what is sent"));
        }
        if inet.stack.send(connection, bytes.len() as u64, true).is_err() {
            return Err(Fault::WrongState);
        }
        if let Some(stream) = inet.stream(connection) {
            stream.outbox.push(bytes);
        }
        Ok(())
    }

    /// Takes the bytes that have come on a stream that no queue pair has.
    pub fn stream_receive(&mut self, now: Time, connection: TcpId) -> Vec<u8> {
        self.hub.now = now;
        let Ok(inet) = self.hub.attached() else { return Vec::new() };
        let Some(stream) = inet.stream(connection) else { return Vec::new() };
        let (bytes, whole) = stream.inbox.take(stream.contiguous);
        let taken = bytes[..whole].to_vec();
        stream.inbox.give_back(bytes, whole);
        inet.tell_room(connection);
        taken
    }

    /// Ends a stream that no queue pair has: what was given is still sent, unless it is to be reset.
    pub fn stream_close(&mut self, now: Time, connection: TcpId, reset: bool) {
        self.hub.now = now;
        if reset {
            self.hub.drop_stream(connection);
        } else {
            self.hub.end_stream(connection);
        }
        self.take_inet_events();
    }

    /// As [`adopt_stream`](Self::adopt_stream), for a stream of the adapter's own TCP. What has come behind
    /// the start-up frame, and was not [taken](Self::stream_receive), is the queue pair's; `rest` was taken
    /// before.
    ///
    /// # Errors
    /// As there, and: no such stream.
    pub fn adopt_tcp_stream(
        &mut self,
        now: Time,
        id: QpId,
        adoption: &Adoption,
        connection: TcpId,
        rest: &[u8],
    ) -> Result<ConnId, Fault> {
        let stream = self.hub.attached()?.stream(connection);
        if stream.is_none_or(|stream| stream.conn.is_some() || stream.is_ending) {
            return Err(Fault::NoSuchObject);
        }
        let conn = self.adopt_over(now, id, adoption, Some(connection))?;
        if let Some(stream) = self.hub.attached()?.stream(connection) {
            (stream.conn, stream.window) = (Some(conn), WINDOW);
            stream.inbox.put_in_front(rest);
            let begin = stream.inbox.start();
            if let Some(stream) = self.stream_of(conn).filter(|_| adoption.negotiated.crc) {
                stream.early = Some(Box::new(Early::at(begin)));
            }
        }
        self.mark_stream(connection);
        self.deliver(connection);
        let inet = self.hub.attached()?;
        let state = inet.stack.connection(connection).map(tcp::Connection::state);
        if state.is_none_or(|state| state == tcp::State::CloseWait) {
            // The peer has said all that it says, and more than connection management has read.
            self.stream_event(connection, tcp::Event::PeerClosed(0));
        }
        Ok(conn)
    }

    /// Marks the packets of a stream as its queue pair says, if it says anything.
    pub(crate) fn mark_stream(&mut self, connection: TcpId) {
        let class = self.level_of_connection(connection).map(|(_, class)| class);
        if let Some((class, inet)) = class.zip(self.hub.inet.as_mut()) {
            inet.stack.set_traffic_class(connection, class);
        }
    }

    /// The program goes away: ends all streams, whose bytes this adapter has, not the program's memory.
    pub fn end_streams(&mut self, now: Time) {
        self.hub.now = now;
        self.fill_streams();
        for connection in self.hub.inet.iter().flat_map(|inet| inet.streaming()).collect::<Vec<_>>()
        {
            self.hub.end_stream(connection);
        }
        self.take_inet_events();
    }

    /// Whether something that was sent on a stream is not acknowledged yet.
    #[must_use]
    pub fn streams_owe(&self) -> bool {
        let streams = self.hub.inet.iter().flat_map(|inet| inet.streams.iter().flatten());
        streams.map(|stream| stream.outbox.len()).any(|len| len > 0)
    }

    /// Both ends of a stream.
    #[must_use]
    pub fn stream_flow(&self, connection: TcpId) -> Option<Flow> {
        self.hub.inet.as_ref()?.stack.flow(connection)
    }

    /// The TCP connection under a stream, if it is one of the adapter's own.
    #[must_use]
    pub fn tcp_under(&self, conn: ConnId) -> Option<TcpId> {
        self.hub.conns.get(conn)?.tcp
    }

    /// Has streams over the adapter's own TCP take what their queue pairs have to transmit.
    pub(crate) fn fill_streams(&mut self) {
        for _ in 0..self.hub.ready.len() {
            let Some(conn) = self.hub.ready.pop_front() else { break };
            match self.tcp_under(conn) {
                Some(connection) => self.fill(conn, connection),
                None => self.hub.ready.push_back(conn),
            }
        }
    }

    /// Has a stream take what its queue pair has to transmit: a segment's worth of FPDUs at a time.
    pub(crate) fn fill(&mut self, conn: ConnId, connection: TcpId) {
        if let Some(stream) = self.stream_of(conn) {
            stream.is_ready = false;
        }
        let now = self.hub.now;
        let mut out = std::mem::take(&mut self.hub.segment);
        loop {
            let ends =
                self.hub.conns.get(conn).is_none_or(|it| matches!(it.phase, Phase::Closing(_)));
            let Some(inet) = &mut self.hub.inet else { break };
            let mss = inet.stack.connection(connection).map_or(0, |it| it.mss() as usize);
            let Some(stream) = inet.stream(connection).filter(|_| mss > 0) else { break };
            // The last words are few, and their queue pair has gone.
            if stream.outbox.len() >= MOST_UNACKED && !ends {
                stream.is_full = true;
                break;
            }
            if let Some(path) = self.stream_of(conn) {
                path.tx.set_max_ulpdu(mulpdu(mss, path.tx.sends_markers()));
            }
            out.resize(mss, 0);
            let len = self.transmit(now, conn, &mut out);
            if len == 0 {
                if ends {
                    self.hub.end_stream(connection);
                    self.handle_lost(now, conn, Loss::Closed);
                }
                break;
            }
            let Some(inet) = &mut self.hub.inet else { break };
            match inet.stack.send(connection, len as u64, true) {
                Ok(_) => inet.stream(connection).map(|it| it.outbox.push(&out[..len])),
                // What has happened to it is on its way.
                Err(_) => break,
            };
        }
        self.hub.segment = out;
    }

    /// Takes what a segment has brought for a stream.
    pub(crate) fn take_for_stream(&mut self, connection: TcpId, received: &Received, frame: &[u8]) {
        let Some(inet) = &mut self.hub.inet else { return };
        let Some(stream) = inet.stream(connection) else { return };
        stream.contiguous = received.contiguous;
        if let Some(placement) = &received.placement
            && let Some(bytes) = frame.get(placement.payload.clone())
        {
            let next = stream.inbox.is_empty() && placement.offset == stream.inbox.start();
            let in_order = placement.offset + bytes.len() as u64 <= stream.contiguous;
            let conn = stream.conn.filter(|_| next && in_order);
            match conn {
                // Most often whole FPDUs, which are used from where they are.
                Some(conn) => {
                    let used = self.handle_stream(self.hub.now, conn, bytes).min(bytes.len());
                    let Some(inet) = &mut self.hub.inet else { return };
                    let Some(stream) = inet.stream(connection) else { return };
                    stream.inbox.skip(used);
                    stream.inbox.put(placement.offset, bytes, stream.window);
                    if let Some(early) = self.early_of(conn) {
                        early.note_segment(used == bytes.len());
                    }
                }
                None => {
                    stream.inbox.put(placement.offset, bytes, stream.window);
                    let conn = stream.conn;
                    self.look_ahead(conn, in_order, placement.offset, bytes);
                }
            }
        }
        self.deliver(connection);
    }

    /// What was placed out of order of a stream.
    fn early_of(&mut self, conn: ConnId) -> Option<&mut Early> {
        self.stream_of(conn)?.early.as_deref_mut()
    }

    /// A segment has come that is kept: behind a gap its payload may be placed at once.
    fn look_ahead(&mut self, conn: Option<ConnId>, in_order: bool, offset: u64, bytes: &[u8]) {
        let Some(conn) = conn else { return };
        if in_order {
            if let Some(early) = self.early_of(conn) {
                early.note_bytes(offset, offset + bytes.len() as u64);
            }
        } else if let Some(id) = self.user_of(conn)
            && let Some((qp, hub)) = self.qp_and_hub(id)
        {
            early::place(qp, hub, offset, bytes);
        }
    }

    /// How many FPDUs of a queue pair over the adapter's own TCP were placed before those before them had
    /// come (RFC 5041 5.1).
    #[must_use]
    pub fn placed_early(&self, id: QpId) -> u64 {
        let Some(Path::Stream(stream)) = self.qps.get(id).map(|qp| &qp.path) else { return 0 };
        stream.early.as_ref().map_or(0, |early| early.count())
    }

    /// Hands out what has come in order, and opens the window for more.
    fn deliver(&mut self, connection: TcpId) {
        let now = self.hub.now;
        let Some(inet) = &mut self.hub.inet else { return };
        let Some(stream) = inet.stream(connection) else { return };
        let (bytes, whole) = stream.inbox.take(stream.contiguous);
        let used = match stream.conn {
            Some(conn) if whole > 0 => self.handle_stream(now, conn, &bytes[..whole]),
            None if stream.is_ending => whole,
            _ => 0,
        };
        let Some(inet) = &mut self.hub.inet else { return };
        let Some(stream) = inet.stream(connection) else { return };
        stream.inbox.give_back(bytes, used);
        if stream.conn.is_none() && !stream.is_ending && whole > 0 {
            let change = TcpStreamChange::Readable;
            self.hub.events.push_back(Event::TcpStream { connection, change });
        }
        if let Some(inet) = &mut self.hub.inet {
            inet.tell_room(connection);
        }
    }

    /// Something happened to the connection of a stream.
    pub(super) fn stream_event(&mut self, connection: TcpId, event: tcp::Event) {
        let Some(inet) = &mut self.hub.inet else { return };
        let Some(stream) = inet.stream(connection) else { return };
        match event {
            tcp::Event::Connected if stream.conn.is_none() => {
                self.hub.tell_tcp_stream(connection, TcpStreamChange::Connected);
            }
            tcp::Event::Acked(offset) => {
                stream.outbox.acknowledge(offset);
                if let Some(conn) = stream.conn
                    && std::mem::take(&mut stream.is_full)
                {
                    match self.stream_of(conn).is_some() {
                        true => self.make_ready(conn),
                        false => self.hub.ready.push_back(conn),
                    }
                }
            }
            tcp::Event::PeerClosed(_) => {
                // Connection management ends its streams itself: it may not have taken what came before.
                let adopted = stream.conn.is_some();
                self.end_for_user(connection, None);
                if adopted {
                    self.hub.end_stream(connection);
                }
            }
            tcp::Event::Failed(failure) => {
                self.end_for_user(connection, Some(failure));
                self.hub.drop_stream(connection);
            }
            tcp::Event::Closed => {
                self.end_for_user(connection, None);
                self.hub.drop_stream(connection);
            }
            tcp::Event::Connected | tcp::Event::Urgent(_) | tcp::Event::Suspect => {}
        }
    }

    fn make_ready(&mut self, conn: ConnId) {
        let Some(id) = self.hub.conns.get(conn).and_then(|state| state.qp) else { return };
        if let Some((qp, hub)) = self.qp_and_hub(id)
            && let Path::Stream(stream) = &mut qp.path
        {
            stream.make_ready(&mut hub.ready);
        }
    }

    /// Anyone who has the stream learns that the peer has ended it.
    fn end_for_user(&mut self, connection: TcpId, failure: Option<Failure>) {
        let now = self.hub.now;
        let Some(inet) = &mut self.hub.inet else { return };
        let Some(stream) = inet.stream(connection).filter(|stream| !stream.is_ending) else {
            return;
        };
        match stream.conn.take() {
            Some(conn) => self.handle_lost(now, conn, failure.map_or(Loss::Closed, loss_of)),
            None => self.hub.tell_tcp_stream(connection, TcpStreamChange::Lost(failure)),
        }
    }

    /// The peer of a stream that has ended here takes too long.
    pub(crate) fn stream_alarm(&mut self, connection: TcpId) {
        if let Ok(inet) = self.hub.attached()
            && let Some(stream) = inet.stream(connection)
        {
            stream.alarm = None;
            self.hub.drop_stream(connection);
        }
    }

    /// The link is gone, and all streams over it.
    pub(super) fn lose_streams(&mut self) {
        for connection in self.hub.inet.iter().flat_map(|inet| inet.streaming()).collect::<Vec<_>>()
        {
            self.end_for_user(connection, Some(Failure::Unreachable));
            self.hub.drop_stream(connection);
        }
    }
}

impl Inet {
    /// Tells TCP how much room a stream has behind what is contiguous.
    fn tell_room(&mut self, connection: TcpId) {
        let Some(stream) = self.stream(connection) else { return };
        let kept = stream.contiguous.saturating_sub(stream.inbox.start());
        let room = (stream.window as u64).saturating_sub(kept);
        self.stack.set_receive_space(connection, room);
    }
}

impl<P> Hub<P> {
    fn tell_tcp_stream(&mut self, connection: TcpId, change: TcpStreamChange) {
        self.events.push_back(Event::TcpStream { connection, change });
    }

    /// This end says nothing more. What it has said is kept until it is acknowledged.
    fn end_stream(&mut self, connection: TcpId) {
        let at = self.now.after(CLOSING_NS);
        let Some(inet) = &mut self.inet else { return };
        let Some(stream) = inet.stream(connection).filter(|stream| !stream.is_ending) else {
            return;
        };
        (stream.is_ending, stream.conn) = (true, None);
        let mut alarm = stream.alarm;
        inet.stack.close(connection);
        self.set_alarm(&mut alarm, Alarm::Stream(connection), Some(at));
        if let Some(stream) = self.inet.as_mut().and_then(|inet| inet.stream(connection)) {
            stream.alarm = alarm;
        }
    }

    /// Nothing is kept of a stream any more; a connection that is not over is reset.
    fn drop_stream(&mut self, connection: TcpId) {
        let Some(inet) = &mut self.inet else { return };
        let Some(stream) = inet.stream(connection) else { return };
        let mut alarm = stream.alarm;
        set(&mut inet.streams, connection.index(), None);
        inet.forget(connection);
        self.set_alarm(&mut alarm, Alarm::Stream(connection), None);
    }
}
