//! Byte streams to engines on other hosts: kernel TCP sockets, none of which ever waits.
//!
//! [`Net`] moves bytes between sockets and the adapter. Receiving: into a large shared buffer, of
//! which the adapter consumes whole FPDUs, or straight to where the adapter says that the rest of a long one
//! belongs. Transmitting: the adapter fills a large buffer with the
//! FPDUs of many work requests, and one send passes them on, with large payloads from where they lie.

mod buffers;
mod exit;
mod gathered;
mod hot;
pub(crate) mod listener;
mod marking;
pub(crate) mod numbers;
mod placed;
mod silence;
mod stream;
pub(crate) mod table;
pub(crate) mod token;
mod transmit;
mod tuning;

use std::collections::VecDeque;
use std::io;
use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use libc::c_int;
use quipu_cabi::Hold;
use quipu_nic::{ConnId, Gather, Loss, QpNum, Time};

use self::buffers::Pool;
use self::hot::{Advice, Hot};
use self::listener::{Accepted, Acceptor, Listener, Resting};
use self::numbers::Numbers;
use self::stream::{Phase, Stream};
use self::table::Table;
use self::token::{Slot, Token};
use crate::handle_map::HandleMap;
use crate::own::OwnAddresses;
use crate::sys::{self, Epoll, with_more_descriptors};
use crate::tap::Adapter;

pub(crate) use self::tuning::{Tuning, default_congestion, try_congestion};

/// Connections taken from a listener before other work gets its turn.
const ACCEPTS_PER_TURN: usize = 16;
const READ: c_int = libc::EPOLLIN | libc::EPOLLRDHUP;
const WRITE: c_int = libc::EPOLLOUT;

/// The TCP side of an engine.
pub(crate) struct Net {
    own: Arc<OwnAddresses>,
    tuning: Tuning,
    epoll: Arc<Epoll>,
    listeners: Vec<Listener>,
    acceptor: Option<Acceptor>,
    /// By index.
    resting: Resting<u32>,
    numbers: Numbers,
    streams: Table<Stream>,
    by_conn: HandleMap<ConnId, Slot>,
    hot: Hot,
    pool: Pool,
    /// Payload that is sent from where it lies.
    gather: Gather,
    /// Where payload is received into.
    places: Vec<(usize, usize)>,
    /// Streams whose turn to send ended before the adapter had nothing more.
    again: VecDeque<Slot>,
    /// Streams with bytes that wait for more to be sent with them.
    held: Vec<Slot>,
    /// How many streams are being closed.
    ending: usize,
    /// Those, and when to look at their deadlines, in that order.
    closing: VecDeque<(Time, Slot)>,
    silence: silence::Watch,
    /// System calls that sent, and that received.
    calls: (u64, u64),
}

/// What looking at one stream brought.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Taken {
    Nothing,
    Bytes,
    Gone,
}

impl Net {
    /// Without sockets yet.
    pub(crate) fn new(own: Arc<OwnAddresses>, tuning: Tuning, epoll: Arc<Epoll>) -> Self {
        Self {
            own,
            tuning,
            epoll,
            listeners: Vec::new(),
            acceptor: None,
            resting: Resting::default(),
            numbers: Numbers::default(),
            streams: Table::new(),
            by_conn: HandleMap::default(),
            hot: Hot::default(),
            pool: Pool::default(),
            gather: Gather::default(),
            places: Vec::new(),
            again: VecDeque::new(),
            held: Vec::new(),
            ending: 0,
            closing: VecDeque::new(),
            silence: silence::Watch::default(),
            calls: (0, 0),
        }
    }

    /// The engine has other addresses from now on.
    pub(crate) fn set_addresses(&mut self, own: Arc<OwnAddresses>) {
        self.own = own;
    }

    /// True if `peer` is one of the engine's own listeners.
    pub(crate) fn is_own(&self, peer: SocketAddr) -> bool {
        self.own.is_own(peer.ip()) && self.listeners.iter().any(|l| l.port == peer.port())
    }

    /// True if there are streams that are tried without asking epoll.
    #[inline]
    pub(crate) fn has_hot_streams(&self) -> bool {
        self.hot.len() > 0
    }

    /// True if there are streams that only epoll would notice: those that are not tried, and those that are
    /// tried for bytes while they wait for room in their sockets. Of those that are being closed nothing is
    /// expected that could not wait.
    #[inline]
    pub(crate) fn has_cold_streams(&self) -> bool {
        let hot = self.hot.len();
        self.streams.len() > hot + self.ending || (hot > 0 && self.has_full_streams())
    }

    /// True if some hot stream waits for room in its socket.
    fn has_full_streams(&self) -> bool {
        let mut hot = (0..self.hot.len()).filter_map(|at| self.streams.get(self.hot.get(at)?));
        hot.any(|stream| stream.unsent.is_some())
    }

    /// A number for a new queue pair, and the port if a listener was opened for it.
    pub(crate) fn take_number(&mut self) -> io::Result<(QpNum, Option<u16>)> {
        let mut opened = None;
        if self.numbers.wants_port() {
            match self.open_port() {
                Ok(port) => opened = Some(port),
                // Numbers that were used lately are better than none.
                Err(error) => tracing::warn!(%error, "cannot open another port"),
            }
        }
        match self.numbers.take() {
            Some(number) => Ok((number, opened)),
            None => {
                let port = self.open_port()?;
                let number = self.numbers.take().ok_or(io::ErrorKind::AddrInUse)?;
                Ok((number, Some(port)))
            }
        }
    }

    /// Gives back the number of a queue pair that is gone.
    pub(crate) fn give_back_number(&mut self, number: QpNum) {
        self.numbers.give_back(number);
    }

    /// Opens a port for numbers of connected queue pairs.
    fn open_port(&mut self) -> io::Result<u16> {
        let port = self.open_listener()?;
        self.numbers.add_port(port);
        Ok(port)
    }

    /// Listens on a port that the kernel chooses.
    pub(crate) fn open_listener(&mut self) -> io::Result<u16> {
        if self.acceptor.is_none() {
            self.acceptor = Some(Acceptor::new()?);
        }
        let listener = with_more_descriptors(|| Listener::open(&self.own, &self.tuning))?;
        let token = Token::Listener(self.listeners.len() as u32);
        self.epoll.add(&listener.fd, libc::EPOLLIN, token.bits())?;
        let port = listener.port;
        self.listeners.push(listener);
        Ok(port)
    }

    /// Closes the listener that was opened last: the port is of no use.
    pub(crate) fn close_last_listener(&mut self) {
        if let Some(listener) = self.listeners.pop() {
            self.epoll.remove(&listener.fd);
        }
    }

    /// Starts a connection for the adapter, which hears of its outcome; from the address in the row
    /// `sgid_index` of the GID table.
    pub(crate) fn connect(
        &mut self,
        adapter: &mut Adapter,
        now: Time,
        (conn, peer): (ConnId, SocketAddr),
        sgid_index: u8,
    ) {
        let (own, peer) = (self.own.source(sgid_index), self.own.with_scope(peer, sgid_index));
        let started = with_more_descriptors(|| stream::start(&self.tuning, own, peer));
        let added = started.and_then(|(fd, done)| {
            let (phase, interest) =
                if done { (Phase::Open, READ) } else { (Phase::Connecting, WRITE) };
            self.add(Stream::new(fd, conn, peer, phase, interest)).map(|slot| (slot, done))
        });
        match added {
            Ok((slot, true)) => {
                self.show(adapter, slot, true);
                adapter.handle_reached_stream(now, conn);
            }
            Ok((_, false)) => {}
            Err(error) => {
                tracing::debug!(%peer, %error, "cannot connect");
                adapter.handle_lost(now, conn, stream::loss(&error));
            }
        }
    }

    /// Has a capture begin a stream that was just made.
    fn show(&self, adapter: &mut Adapter, slot: Slot, active: bool) {
        if let Some(stream) = self.streams.get(slot)
            && let Some(conn) = stream.conn
        {
            adapter.probe_mut().stream_opened(conn, &stream.fd, stream.peer, active);
        }
    }

    fn add(&mut self, stream: Stream) -> io::Result<Slot> {
        let conn = stream.conn;
        let epoll = &self.epoll;
        let slot = self.streams.insert_with(|slot| {
            epoll.add(&stream.fd, stream.interest, Token::Stream(slot).bits())?;
            Ok::<_, io::Error>(stream)
        })?;
        if let Some(conn) = conn {
            self.by_conn.insert(conn, slot);
        }
        Ok(slot)
    }

    /// Takes the connections that wait at a listener.
    pub(crate) fn accept(&mut self, adapter: &mut Adapter, now: Time, index: u32) -> bool {
        let mut any = false;
        for _ in 0..ACCEPTS_PER_TURN {
            let (Some(listener), Some(acceptor)) =
                (self.listeners.get(index as usize), self.acceptor.as_mut())
            else {
                break;
            };
            let (fd, peer) = match acceptor.accept(listener) {
                Accepted::Connection(fd, peer) => (fd, sys::canonical(peer)),
                Accepted::Refused => continue,
                Accepted::Nothing => break,
                Accepted::Stuck | Accepted::Failed => {
                    self.epoll.remove(&listener.fd);
                    self.resting.add(index, now.0);
                    break;
                }
            };
            any = true;
            // The adapter bounds how many connections may wait for their first bytes, and for how
            // long; beyond that they are closed here.
            let Ok(conn) = adapter.handle_accepted(now, peer) else {
                continue;
            };
            let tuned = sys::set_option(&fd, libc::IPPROTO_TCP, libc::TCP_NODELAY, 1);
            let added =
                tuned.and_then(|()| self.add(Stream::new(fd, conn, peer, Phase::Open, READ)));
            match added {
                Ok(slot) => self.show(adapter, slot, false),
                Err(_) => adapter.handle_lost(now, conn, Loss::Unavailable),
            }
        }
        any
    }

    /// Looks at listeners again that have rested.
    fn listen_again(&mut self, now: Time) {
        for index in self.resting.wake(now.0) {
            let Some(listener) = self.listeners.get(index as usize) else { continue };
            let token = Token::Listener(index);
            if self.epoll.add(&listener.fd, libc::EPOLLIN, token.bits()).is_err() {
                self.resting.add(index, now.0);
            }
        }
        if let Some(acceptor) = &mut self.acceptor {
            acceptor.refill();
        }
    }

    /// Takes over a stream to `peer` that stands, and on which `rest` has come already. A capture shows it
    /// since it was opened.
    pub(crate) fn adopt(
        &mut self,
        adapter: &mut Adapter,
        now: Time,
        (conn, peer): (ConnId, SocketAddr),
        fd: OwnedFd,
        rest: &[u8],
    ) {
        let slot = match self.add(Stream::new(fd, conn, peer, Phase::Open, READ)) {
            Ok(slot) => slot,
            Err(error) => {
                tracing::warn!(%error, "a connection is refused");
                return adapter.handle_lost(now, conn, Loss::Unavailable);
            }
        };
        let Some(stream) = self.streams.get_mut(slot) else { return };
        let (mut buffer, mut filled) = stream.received.open(&mut self.pool);
        buffer[..rest.len()].copy_from_slice(rest);
        filled.end = rest.len();
        filled.start = adapter.handle_stream(now, conn, rest);
        stream.received.close(&mut self.pool, buffer, filled);
    }

    /// Looks at a stream that epoll named.
    pub(crate) fn stream_ready(
        &mut self,
        adapter: &mut Adapter,
        now: Time,
        slot: Slot,
        events: u32,
    ) -> bool {
        let Some(stream) = self.streams.get_mut(slot) else {
            return false;
        };
        if stream.phase == Phase::Connecting {
            return self.finish_connect(adapter, now, slot);
        }
        if events & WRITE as u32 != 0 && !self.flush(adapter, now, slot) {
            return true;
        }
        let readable = (READ | libc::EPOLLHUP | libc::EPOLLERR) as u32;
        if events & readable == 0 {
            return true;
        }
        let taken = self.receive(adapter, now, slot);
        if taken == Taken::Bytes
            && let Some(stream) = self.streams.get_mut(slot)
            && !stream.hot
            && stream.phase == Phase::Open
        {
            stream.hot = true;
            if let Some(cooled) = self.hot.add(slot) {
                self.cool(adapter, now, cooled);
            }
        }
        if self.hot.is_crowded() {
            while let Some(slot) = self.hot.get(0) {
                self.cool(adapter, now, slot);
            }
        }
        taken != Taken::Nothing
    }

    /// Notes that epoll was asked which streams are ready.
    #[inline]
    pub(crate) fn note_look(&mut self) {
        self.hot.note_look();
    }

    fn finish_connect(&mut self, adapter: &mut Adapter, now: Time, slot: Slot) -> bool {
        let Some(stream) = self.streams.get_mut(slot) else {
            return false;
        };
        match sys::socket_error(&stream.fd) {
            Ok(()) => {
                stream.phase = Phase::Open;
                self.watch(adapter, now, slot, READ);
                self.show(adapter, slot, true);
                if let Some(conn) = self.streams.get_mut(slot).and_then(|s| s.conn) {
                    adapter.handle_reached_stream(now, conn);
                }
            }
            Err(error) => self.lose(adapter, now, slot, stream::loss(&error)),
        }
        true
    }

    /// Changes what epoll reports for a stream. One that cannot be put back into the set, for lack of kernel
    /// memory, is lost: nobody would notice any more what comes on it.
    fn watch(&mut self, adapter: &mut Adapter, now: Time, slot: Slot, interest: c_int) {
        let Some(stream) = self.streams.get_mut(slot) else { return };
        let (fd, token) = (&stream.fd, Token::Stream(slot).bits());
        let changed = match (std::mem::replace(&mut stream.interest, interest), interest) {
            (before, after) if before == after => return,
            (_, 0) => return self.epoll.remove(fd),
            (0, _) => self.epoll.add(fd, interest, token),
            _ => self.epoll.modify(fd, interest, token),
        };
        if let Err(error) = changed {
            tracing::warn!(%error, "a connection is closed");
            stream.interest = 0;
            self.lose(adapter, now, slot, Loss::Unavailable);
        }
    }

    /// Has epoll report on every stream: somebody is about to wait for descriptors. False if that lost one,
    /// so that there is something to do first.
    pub(crate) fn watch_all(&mut self, adapter: &mut Adapter, now: Time) -> bool {
        self.hot.note_wait();
        let before = self.streams.len();
        for position in (0..self.hot.len()).rev() {
            if let Some(slot) = self.hot.get(position)
                && self.streams.get(slot).is_some_and(|stream| stream.interest == 0)
            {
                self.watch(adapter, now, slot, READ);
            }
        }
        self.streams.len() == before
    }

    /// How many streams are not in epoll's set.
    #[cfg(test)]
    pub(crate) fn unwatched(&self) -> usize {
        let hot = (0..self.hot.len()).filter_map(|at| self.streams.get(self.hot.get(at)?));
        hot.filter(|stream| stream.interest == 0).count()
    }

    /// Tries the hot streams. True if any had bytes. Where `nobody_waits` for descriptors, epoll need not
    /// report on streams that deliver steadily.
    #[inline]
    pub(crate) fn poll_hot(
        &mut self,
        adapter: &mut Adapter,
        now: Time,
        nobody_waits: bool,
    ) -> bool {
        let mut any = false;
        let mut position = 0;
        while let Some(slot) = self.hot.get(position) {
            if position >= self.hot.len() {
                break;
            }
            let taken = self.receive(adapter, now, slot);
            any |= taken != Taken::Nothing;
            if taken == Taken::Gone {
                continue;
            }
            match self.hot.note(position, taken == Taken::Bytes) {
                Advice::Keep => {}
                Advice::Unwatch => self.unwatch(adapter, now, slot, nobody_waits),
                Advice::Cool => {
                    self.cool(adapter, now, slot);
                    continue;
                }
            }
            position += 1;
        }
        any
    }

    /// Has epoll report no more on a stream that is tried, unless somebody waits for that, or for room in
    /// its socket.
    #[cold]
    fn unwatch(&mut self, adapter: &mut Adapter, now: Time, slot: Slot, nobody_waits: bool) {
        if nobody_waits && self.streams.get(slot).is_some_and(|stream| stream.unsent.is_none()) {
            self.watch(adapter, now, slot, 0);
        }
    }

    /// Tries a stream no more, on which epoll reports then.
    fn cool(&mut self, adapter: &mut Adapter, now: Time, slot: Slot) {
        self.hot.remove(slot);
        if let Some(stream) = self.streams.get_mut(slot) {
            stream.hot = false;
            if stream.interest == 0 {
                self.watch(adapter, now, slot, READ);
            }
        }
    }

    /// Receives once and shows the adapter what came.
    fn receive(&mut self, adapter: &mut Adapter, now: Time, slot: Slot) -> Taken {
        let Some(stream) = self.streams.get_mut(slot) else {
            return Taken::Gone;
        };
        let conn = match (stream.phase, stream.conn) {
            (Phase::Open, Some(conn)) => conn,
            _ => return self.discard(adapter, now, slot),
        };
        self.calls.1 += 1;
        match stream.receive(adapter, now, conn, &mut self.pool, &mut self.places) {
            Ok(0) => self.lose(adapter, now, slot, Loss::Closed),
            Ok(_) => {
                self.hot.note_delivery(&mut stream.delivered);
                return Taken::Bytes;
            }
            Err(error) if sys::would_block(&error) => return Taken::Nothing,
            Err(error) => self.lose(adapter, now, slot, stream::loss(&error)),
        }
        Taken::Gone
    }

    /// Reads and forgets what the peer still sends on a stream that is being closed.
    fn discard(&mut self, adapter: &mut Adapter, now: Time, slot: Slot) -> Taken {
        let Some(stream) = self.streams.get_mut(slot) else {
            return Taken::Gone;
        };
        let mut buffer = self.pool.take();
        let outcome = sys::receive(&stream.fd, &mut buffer);
        self.pool.give_back(buffer);
        match outcome {
            Ok(n) if n > 0 => Taken::Nothing,
            Err(error) if sys::would_block(&error) => Taken::Nothing,
            _ => {
                self.lose(adapter, now, slot, Loss::Closed);
                Taken::Gone
            }
        }
    }

    /// Removes a stream at once, and tells the adapter unless it knows.
    #[cold]
    fn lose(&mut self, adapter: &mut Adapter, now: Time, slot: Slot, loss: Loss) {
        let _hold = Hold::new();
        let Some(mut stream) = self.streams.remove(slot) else {
            return;
        };
        stream.received.discard(&mut self.pool);
        self.ending -= usize::from(stream.deadline.is_some());
        if stream.hot {
            self.hot.remove(slot);
        }
        if stream.interest != 0 {
            self.epoll.remove(&stream.fd);
        }
        if let Some(conn) = stream.conn {
            self.by_conn.remove(&conn);
            adapter.probe_mut().stream_closed(conn, true);
            adapter.handle_lost(now, conn, loss);
        }
    }

    /// How many system calls sent, and how many received.
    pub(crate) fn calls(&self) -> (u64, u64) {
        self.calls
    }

    /// True if some streams' turn ended before they had sent everything.
    pub(crate) fn wants_turn(&self) -> bool {
        !self.again.is_empty()
    }
}
