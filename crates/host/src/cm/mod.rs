//! Connection management on kernel sockets: it gives `quipu-cm`, which knows no network, listeners,
//! TCP streams, UDP sockets and descriptors for its event channels. Nothing here ever waits.
//!
//! Anyone who connects, connects from the socket that its identifier was bound to; so the port numbers of
//! `rdma_cm` are those of TCP and UDP, and the kernel keeps two from taking the same.

mod address;
mod bare;
mod over_link;
mod plain;
mod sight;
mod socket;
mod stream;
mod udp;

use std::io;
use std::net::SocketAddr;
use std::os::fd::RawFd;
use std::sync::Arc;

use quipu_cm::{Action, CallError, ChannelKey, Cm, Event, IdKey, Loss, StreamKey};

pub(crate) use self::bare::Order;
use self::bare::{Asked, Bare};
use self::over_link::LinkStreams;
pub(crate) use self::over_link::StreamOrder;
pub(crate) use self::plain::Given;
use self::plain::Plain;
use self::sight::Sights;
use self::socket::Socket;
use self::stream::Stream;
pub(crate) use self::stream::{KEEP_ALIVE_COUNT, KEEP_ALIVE_SECONDS};
use crate::error::EngineError;
use crate::net::listener::{Accepted, Acceptor, Resting};
use crate::net::token::{Slot, Token};
use crate::own::OwnAddresses;
use crate::sys::{self, Epoll, QueueFd};
use crate::tap::Tap;

/// Connections taken from a listener before other work gets its turn.
const ACCEPTS_PER_TURN: usize = 64;
/// Connections that the kernel keeps for us while nobody looks. How many requests may wait for the
/// program is another matter.
const BACKLOG: i32 = 4096;
/// Longer than most of what comes at once.
const RECEIVE_BYTES: usize = 1024;

/// The connection management of an engine, with its sockets.
pub(crate) struct Manager {
    pub(crate) cm: Cm,
    own: Arc<OwnAddresses>,
    epoll: Arc<Epoll>,
    acceptor: Acceptor,
    resting: Resting<IdKey>,
    /// By the index of the identifier.
    sockets: Vec<Option<Socket>>,
    /// By the index of the stream.
    streams: Vec<Option<Stream>>,
    /// By the index of the channel.
    signals: Vec<Option<QueueFd>>,
    /// Streams that the adapter has, or is to get.
    plain: Plain,
    /// Those that the adapter makes.
    bare: Bare,
    /// Streams that it carries.
    over_link: LinkStreams,
    /// What a capture is to show.
    sights: Sights,
    /// The channel for which a thread waits inside the engine: it needs no descriptor to wake it.
    attended: Option<ChannelKey>,
    /// The configuration of quality of service whose rules it knows.
    pub(crate) qos_changes: u32,
}

/// Puts a value at a place of a list that grows as needed.
fn put<T>(list: &mut Vec<Option<T>>, index: u32, value: T) {
    let index = index as usize;
    if index >= list.len() {
        list.resize_with(index + 1, || None);
    }
    list[index] = Some(value);
}

fn slot_of(index: u32, generation: u32) -> Slot {
    Slot { index, generation }
}

impl Manager {
    /// Without channels and sockets yet. `captured`: what passes is to be shown
    /// ([`show`](Self::show)).
    ///
    /// # Errors
    ///
    /// The kernel refuses a descriptor.
    pub(crate) fn new(
        config: quipu_cm::Config,
        own: Arc<OwnAddresses>,
        epoll: Arc<Epoll>,
        captured: bool,
    ) -> io::Result<Self> {
        let mut cm = Cm::new(config);
        cm.set_addresses(&own.sources(), own.is_restricted());
        Ok(Self {
            cm,
            own,
            epoll,
            acceptor: Acceptor::new()?,
            resting: Resting::default(),
            sockets: Vec::new(),
            streams: Vec::new(),
            signals: Vec::new(),
            plain: Plain::default(),
            bare: Bare::default(),
            over_link: LinkStreams::default(),
            sights: Sights::new(captured),
            attended: None,
            qos_changes: 0,
        })
    }

    /// The engine has other addresses from now on.
    pub(crate) fn set_addresses(&mut self, own: Arc<OwnAddresses>) {
        self.cm.set_addresses(&own.sources(), own.is_restricted());
        self.own = own;
    }

    pub(crate) fn create_channel(&mut self) -> Result<(ChannelKey, RawFd), EngineError> {
        let fd = QueueFd::new().map_err(|e| EngineError::system("a descriptor for events", e))?;
        let raw = fd.as_raw_fd();
        let key = self.cm.create_channel();
        put(&mut self.signals, key.index(), fd);
        Ok((key, raw))
    }

    pub(crate) fn destroy_channel(&mut self, key: ChannelKey) -> Result<(), EngineError> {
        self.cm.destroy_channel(key)?;
        self.signals[key.index() as usize] = None;
        Ok(())
    }

    /// The descriptor of a channel.
    pub(crate) fn channel_fd(&self, key: ChannelKey) -> Result<RawFd, EngineError> {
        // Only the machine knows whether the key is a stale one.
        let signal = self.signals.get(key.index() as usize).and_then(Option::as_ref);
        let signal = signal.filter(|_| self.cm.has_channel(key));
        Ok(signal.ok_or(CallError::NoSuchObject)?.as_raw_fd())
    }

    /// Whether no event of a channel is queued.
    pub(crate) fn has_none(&self, key: ChannelKey) -> Result<bool, EngineError> {
        let known = self.cm.has_channel(key);
        known.then(|| self.cm.waiting(key) == 0).ok_or(CallError::NoSuchObject.into())
    }

    /// See [`Cm::next_end`].
    pub(crate) fn next_end(&self, key: ChannelKey) -> Option<(IdKey, u32)> {
        self.cm.next_end(key)
    }

    /// See [`Cm::keep_end`]. A program that waits for edges of the channel's descriptor hears of it again.
    pub(crate) fn keep_end(&mut self, channel: ChannelKey, id: IdKey) {
        self.cm.keep_end(id);
        if let Some(Some(signal)) = self.signals.get(channel.index() as usize) {
            signal.show_again();
        }
    }

    pub(crate) fn take_event(&mut self, key: ChannelKey) -> Result<Option<Event>, EngineError> {
        let event = self.cm.take_event(key)?;
        // First without it, so that what takes its place is an edge.
        self.signal();
        self.ask_again();
        self.signal();
        Ok(event)
    }

    /// A thread begins to wait inside the engine for a channel; or, with `None`, it no longer does.
    pub(crate) fn attend(&mut self, channel: Option<ChannelKey>) {
        let before = std::mem::replace(&mut self.attended, channel);
        if let Some(before) = before {
            self.signal_channel(before);
        }
    }

    /// Whether events are queued in the channel for which a thread waits inside the engine.
    pub(crate) fn attended_waits(&self) -> bool {
        self.attended.is_some_and(|channel| self.cm.waiting(channel) > 0)
    }

    /// Makes descriptors say whether events are queued.
    fn signal(&mut self) {
        while let Some(key) = self.cm.poll_touched() {
            if self.attended != Some(key) {
                self.signal_channel(key);
            }
        }
    }

    fn signal_channel(&mut self, key: ChannelKey) {
        let waiting = self.cm.waiting(key);
        if let Some(Some(signal)) = self.signals.get_mut(key.index() as usize) {
            signal.show(waiting);
        }
    }

    pub(crate) fn destroy_id(&mut self, now: u64, key: IdKey) -> Result<u32, EngineError> {
        let reported = self.cm.destroy_id(key)?;
        // What is still to be sent goes through its socket.
        self.settle(now);
        self.drop_socket(key);
        self.leave_link(key);
        Ok(reported)
    }

    /// Begins to listen, on a port of the system's choice if the identifier is not bound.
    pub(crate) fn listen(&mut self, key: IdKey, backlog: i32) -> Result<(), EngineError> {
        if self.cm.bound(key)?.is_none() {
            self.bind_addr(key, quipu_cm::ANY)?;
        }
        self.cm.listen(key, backlog)?;
        if self.cm.is_on_link(key) {
            // The adapter listens.
            return Ok(());
        }
        let listening = self.start_listening(key);
        if listening.is_err() {
            self.cm.cancel_listen(key);
        }
        listening.map_err(EngineError::Address)
    }

    fn start_listening(&mut self, key: IdKey) -> io::Result<()> {
        let socket = self.sockets.get_mut(key.index() as usize).and_then(Option::as_mut);
        let socket = socket.ok_or(io::ErrorKind::NotConnected)?;
        if !socket.datagram {
            stream::tune(&socket.fd, None)?;
            // What was accepted here and is not quite gone must not keep the next program, or the
            // next run of this one, from the port.
            sys::set_option(&socket.fd, libc::SOL_SOCKET, libc::SO_REUSEADDR, 1)?;
            sys::listen(&socket.fd, BACKLOG)?;
        }
        self.watch_socket(key)
    }

    /// Has epoll report on the socket of an identifier.
    fn watch_socket(&mut self, key: IdKey) -> io::Result<()> {
        let socket = self.sockets.get_mut(key.index() as usize).and_then(Option::as_mut);
        let socket = socket.ok_or(io::ErrorKind::NotConnected)?;
        let token = Token::CmSocket(slot_of(key.index(), key.generation()));
        self.epoll.add(&socket.fd, libc::EPOLLIN, token.bits())?;
        socket.watched = true;
        Ok(())
    }

    fn drop_socket(&mut self, key: IdKey) {
        let socket = self.sockets.get_mut(key.index() as usize).and_then(Option::take);
        if let Some(socket) = socket
            && socket.watched
        {
            self.epoll.remove(&socket.fd);
            if !socket.datagram {
                stream::disconnect(&socket.fd);
            }
        }
    }

    /// Carries out what the machine asks for, and makes descriptors readable.
    pub(crate) fn settle(&mut self, now: u64) {
        while let Some(action) = self.cm.poll_action() {
            self.carry_out(now, action);
        }
        self.signal();
    }

    fn carry_out(&mut self, now: u64, action: Action) {
        tracing::trace!(?action);
        match action {
            Action::Connect { stream, id, to, first } => {
                if self.opens_over_link(stream, id, to, &first) {
                    return;
                }
                if let Err(error) = self.connect(now, stream, id, to, first) {
                    tracing::debug!(%to, %error, "cannot connect");
                    self.cm.handle_lost(now, stream, stream::loss(&error));
                }
            }
            Action::Hold { id } => self.hold(id),
            Action::HandOver(given) => self.give(*given),
            Action::End { id } => {
                self.call_off(id);
                self.plain.end(id);
            }
            Action::Abort { id } => self.plain.abort(id),
            Action::Reach { id, qpn, to } => self.order(Asked::Reach { id, qpn, to }),
            Action::Answer { id, qpn } => self.order(Asked::Answer { id, qpn }),
            Action::Refuse { id } => self.order(Asked::Refuse { id }),
            Action::Send { stream, bytes } => self.send(stream, &bytes),
            Action::Close { stream, reset } => self.close(stream, reset),
            Action::Datagram { via, from, to, bytes } => {
                self.send_datagram(via, from, to, &bytes);
            }
        }
    }

    fn connect(
        &mut self,
        now: u64,
        key: StreamKey,
        id: IdKey,
        to: SocketAddr,
        first: Vec<u8>,
    ) -> io::Result<()> {
        let socket = match self.sockets.get_mut(id.index() as usize).and_then(Option::take) {
            Some(socket) => socket,
            // Its first one was used up.
            None => self.bind_again(id)?,
        };
        let tos = self.cm.options(id).ok().and_then(|options| options.tos);
        stream::tune(&socket.fd, tos.map(|tos| (to, tos)))?;
        let shown = if self.sights.watch() { first.clone() } else { Vec::new() };
        let mut stream = Stream::connect(key, socket.fd, to, first)?;
        let token = Token::CmStream(slot_of(key.index(), key.generation()));
        stream.interest = stream.wanted();
        self.epoll.add(&stream.fd, stream.interest, token.bits())?;
        let reached = !stream.connecting;
        if reached {
            self.sights.opened(key, &stream.fd, to, Some(&shown));
        }
        put(&mut self.streams, key.index(), stream);
        if reached {
            self.cm.handle_reached(now, key);
        }
        Ok(())
    }

    fn stream(&mut self, key: StreamKey) -> Option<&mut Stream> {
        let stream = self.streams.get_mut(key.index() as usize)?.as_mut();
        stream.filter(|stream| stream.key == key)
    }

    fn send(&mut self, key: StreamKey, bytes: &[u8]) {
        if self.sends_over_link(key, bytes) {
            return;
        }
        let Some(stream) = self.stream(key) else { return };
        // An error shows itself when the stream is read, behind what the peer sent before.
        let _ = stream.send(bytes);
        self.sights.passed(key, true, bytes);
        self.watch_stream(key);
    }

    fn watch_stream(&mut self, key: StreamKey) {
        let epoll = Arc::clone(&self.epoll);
        let Some(stream) = self.stream(key) else { return };
        let wanted = stream.wanted();
        if wanted != stream.interest {
            stream.interest = wanted;
            let token = Token::CmStream(slot_of(key.index(), key.generation()));
            // The descriptor is in the set as long as the stream lives.
            let _ = epoll.modify(&stream.fd, wanted, token.bits());
        }
    }

    fn close(&mut self, key: StreamKey, reset: bool) {
        if self.closes_over_link(key, reset) {
            return;
        }
        if let Some(stream) = self.take_stream(key) {
            stream.close(reset);
            self.sights.closed(key, false);
        }
    }

    /// Takes a stream away from here.
    fn take_stream(&mut self, key: StreamKey) -> Option<Stream> {
        self.stream(key)?;
        let stream = self.streams[key.index() as usize].take()?;
        self.epoll.remove(&stream.fd);
        Some(stream)
    }

    /// A socket of an identifier has something to read.
    pub(crate) fn socket_ready(&mut self, now: u64, slot: Slot) -> bool {
        let key = IdKey::new(slot.index, slot.generation);
        if !self.cm.has_id(key) {
            return false;
        }
        let any = match self.sockets.get(slot.index as usize).and_then(Option::as_ref) {
            Some(socket) if socket.datagram => self.receive_datagrams(key),
            Some(_) => self.accept(now, key),
            None => false,
        };
        self.settle(now);
        any
    }

    /// Takes connections that wait at a listener.
    fn accept(&mut self, now: u64, key: IdKey) -> bool {
        let mut any = false;
        for _ in 0..ACCEPTS_PER_TURN {
            let Some(listener) = self.sockets.get(key.index() as usize).and_then(Option::as_ref)
            else {
                break;
            };
            let (fd, peer) = match self.acceptor.accept_by(|| sys::accept(&listener.fd)) {
                Accepted::Connection(fd, peer) => (fd, peer),
                Accepted::Refused => continue,
                Accepted::Nothing => break,
                Accepted::Stuck | Accepted::Failed => {
                    self.epoll.remove(&listener.fd);
                    self.resting.add(key, now);
                    break;
                }
            };
            any = true;
            let local = if listener.local.ip().is_unspecified() {
                sys::local_address(&fd)
            } else {
                Ok(listener.local)
            };
            let Ok(local) = local else { continue };
            let (local, peer) = (address::canonical(local), address::canonical(peer));
            let Some(stream) = self.cm.handle_accepted(now, key, local, peer) else { continue };
            // Somebody may have had to give way, whose place this one takes.
            self.settle(now);
            // Most often the request has come already. It is read when epoll names the stream, behind
            // streams that had something before: a program expects its peer's next request after the
            // event that the connection before it stands.
            if let Err(error) = self.admit(stream, fd, peer) {
                tracing::warn!(%error, "a connection is refused");
                self.cm.handle_lost(now, stream, Loss::Closed);
            }
        }
        any
    }

    /// Looks at listeners again that have rested.
    fn listen_again(&mut self, now: u64) {
        for key in self.resting.wake(now) {
            // It may be gone, or not listen any more.
            if self.cm.has_id(key) && self.watch_socket(key).is_err() {
                self.resting.add(key, now);
            }
            self.acceptor.refill();
        }
    }

    fn admit(
        &mut self,
        key: StreamKey,
        fd: std::os::fd::OwnedFd,
        peer: SocketAddr,
    ) -> io::Result<()> {
        let stream = Stream::accepted(key, fd, peer);
        let token = Token::CmStream(slot_of(key.index(), key.generation()));
        self.epoll.add(&stream.fd, stream.interest, token.bits())?;
        self.sights.opened(key, &stream.fd, peer, None);
        put(&mut self.streams, key.index(), stream);
        Ok(())
    }

    /// Looks at a stream that epoll named.
    pub(crate) fn stream_ready(&mut self, now: u64, slot: Slot) -> bool {
        let key = StreamKey::new(slot.index, slot.generation);
        let Some(stream) = self.stream(key) else { return false };
        if stream.connecting {
            let first = stream.unsent().to_vec();
            match stream.finish_connect() {
                Ok(()) => {
                    self.show_reached(key, &first);
                    self.cm.handle_reached(now, key);
                }
                Err(error) => self.lose(now, key, stream::loss(&error)),
            }
        } else {
            let _ = stream.flush();
        }
        self.watch_stream(key);
        self.receive(now, key);
        self.settle(now);
        true
    }

    /// Shows the machine what has come in a stream.
    fn receive(&mut self, now: u64, key: StreamKey) {
        let mut buffer = [0; RECEIVE_BYTES];
        let Some(stream) = self.stream(key) else { return };
        if stream.connecting {
            return;
        }
        match sys::receive(&stream.fd, &mut buffer) {
            Ok(0) => self.lose(now, key, Loss::Closed),
            Ok(len) => {
                self.sights.passed(key, false, &buffer[..len]);
                self.cm.handle_bytes(now, key, &buffer[..len]);
            }
            Err(error) if sys::would_block(&error) => {}
            Err(_) => self.lose(now, key, Loss::Closed),
        }
    }

    fn lose(&mut self, now: u64, key: StreamKey, loss: Loss) {
        self.sights.closed(key, true);
        self.close(key, true);
        self.cm.handle_lost(now, key, loss);
    }

    /// Has a capture show a connection that was made, and what was said first.
    fn show_reached(&mut self, key: StreamKey, first: &[u8]) {
        let stream = self.streams.get(key.index() as usize).and_then(Option::as_ref);
        if let Some(stream) = stream {
            self.sights.opened(key, &stream.fd, stream.peer, Some(first));
        }
    }

    /// Shows a capture what has passed.
    pub(crate) fn show(&mut self, tap: &mut Tap) {
        self.sights.show(tap);
    }

    /// The device is gone.
    pub(crate) fn remove_device(&mut self, now: u64) {
        self.cm.handle_device_removed();
        self.settle(now);
    }

    /// When [`handle_timeout`](Self::handle_timeout) has something to do.
    pub(crate) fn poll_timeout(&self) -> Option<u64> {
        [self.cm.poll_timeout(), self.resting.over()].into_iter().flatten().min()
    }

    pub(crate) fn handle_timeout(&mut self, now: u64) {
        self.listen_again(now);
        self.cm.handle_timeout(now);
        self.settle(now);
    }

    /// Ends all streams and stops listening: the process is about to exit, and children of fork that
    /// have the descriptors are not to keep them alive.
    pub(crate) fn shut_down(&mut self) {
        for socket in self.sockets.drain(..).flatten() {
            if !socket.datagram {
                stream::disconnect(&socket.fd);
            }
        }
        for stream in self.streams.drain(..).flatten() {
            stream.close(false);
        }
    }
}
