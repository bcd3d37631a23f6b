//! One TCP connection: its socket, and what is under way on it.

use std::io;
use std::net::SocketAddr;
use std::ops::Range;
use std::os::fd::OwnedFd;

use libc::c_int;
use quipu_nic::{ConnId, Gather, Loss, Probe, Time};

use super::buffers::{BEHIND_BYTES, BUFFER_BYTES, Pool, Received, TRANSMIT_BYTES};
use super::gathered::{Appetite, Gathered};
use super::hot::Delivered;
use super::placed;
use super::tuning::Tuning;
use crate::buffer::Buffer;
use crate::sys;
use crate::tap::{Adapter, Tap};

/// How long a connection may take to be made; then the adapter hears, and tries again.
const CONNECT_MS: c_int = 5_000;

/// What a full socket leaves is copied if it is no longer than this.
const SHORT_BYTES: usize = 16 * 1024;

/// Where a stream is in its life.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Phase {
    /// The connection is being made.
    Connecting,
    /// Bytes pass both ways.
    Open,
    /// The adapter wants no more bytes; what it transmits yet is sent.
    Flushing,
    /// Everything was sent; waiting for the peer to close, so that its kernel has seen it all.
    Draining,
}

/// A TCP connection.
pub(crate) struct Stream {
    pub(crate) fd: OwnedFd,
    pub(crate) peer: SocketAddr,
    /// The adapter's name for it; `None` once the adapter has let go of it.
    pub(crate) conn: Option<ConnId>,
    pub(crate) phase: Phase,
    /// What epoll reports for it; 0 while it is not in epoll's set.
    pub(crate) interest: c_int,
    pub(crate) received: Received,
    /// The part of a large buffer that the socket did not take.
    pub(crate) unsent: Option<(Buffer, Range<usize>)>,
    /// When it is closed, whatever the peer does; set when flushing begins.
    pub(crate) deadline: Option<Time>,
    /// After which silence of the peer's host it is lost, in nanoseconds.
    pub(super) silence_ns: Option<u64>,
    /// When something was sent first since everything was seen to be acknowledged.
    pub(super) owed_since: Option<Time>,
    /// Whether it is tried without asking epoll.
    pub(crate) hot: bool,
    /// When it last delivered bytes.
    pub(crate) delivered: Delivered,
    /// Whether it has bytes that wait for more to be sent with them.
    pub(crate) held: bool,
    /// How much payload the next send takes from where it lies.
    appetite: Appetite,
    /// Whether payload was received into its place lately: then little is received into a buffer, so that
    /// what comes of the next long FPDU is received into its place too.
    bulk: bool,
    /// Whether the last receive filled what it had, and none of it was a place of payload.
    brimmed: bool,
    /// Whether the last receive brought so much that a part of a long FPDU may be among it.
    expects: bool,
}

impl Stream {
    /// A stream around a socket.
    pub(crate) fn new(
        fd: OwnedFd,
        conn: ConnId,
        peer: SocketAddr,
        phase: Phase,
        interest: c_int,
    ) -> Self {
        Self {
            fd,
            peer,
            conn: Some(conn),
            phase,
            interest,
            received: Received::Nothing,
            unsent: None,
            deadline: None,
            silence_ns: None,
            owed_since: None,
            hot: false,
            delivered: Delivered::default(),
            held: false,
            appetite: Appetite::new(),
            bulk: false,
            brimmed: false,
            expects: false,
        }
    }

    /// Receives once and shows the adapter what came. 0 is the end of the stream, or of its use.
    #[inline]
    pub(crate) fn receive(
        &mut self,
        adapter: &mut Adapter,
        now: Time,
        conn: ConnId,
        pool: &mut Pool,
        places: &mut Vec<(usize, usize)>,
    ) -> io::Result<usize> {
        if self.expects || !matches!(self.received, Received::Nothing) {
            return self.receive_rest(adapter, now, conn, pool, places);
        }
        // Most often nothing has come, and the buffer stays where it is.
        self.bulk &= !self.brimmed;
        let most = if self.bulk { BEHIND_BYTES } else { BUFFER_BYTES };
        let front = pool.front();
        let received = sys::receive(&self.fd, &mut front[..most])?;
        self.note_received(received, received == most);
        if received == 0 {
            return Ok(0);
        }
        let bytes = &front[..received];
        adapter.probe_mut().stream_passed(Some(conn), false, bytes);
        let used = adapter.handle_stream(now, conn, bytes);
        if used == received {
            return Ok(received);
        }
        let buffer = pool.take();
        let fits = received - used < buffer.len();
        self.received.close(pool, buffer, used..received);
        Ok(if fits { received } else { 0 })
    }

    /// The same where the rest of an FPDU is to come, or much has come lately.
    fn receive_rest(
        &mut self,
        adapter: &mut Adapter,
        now: Time,
        conn: ConnId,
        pool: &mut Pool,
        places: &mut Vec<(usize, usize)>,
    ) -> io::Result<usize> {
        let (mut buffer, filled) = self.received.open(pool);
        let fresh = filled.is_empty();
        let direct = if fresh && self.expects { adapter.place_next(conn, places) } else { 0 };
        self.bulk = direct > 0 || (self.bulk && !self.brimmed);
        let end = if self.bulk && fresh { filled.end + BEHIND_BYTES } else { buffer.len() };
        let room = &mut buffer[filled.end..end];
        let most = room.len();
        let placing = match direct {
            0 => None,
            // SAFETY: the adapter has just said that these may be written, and is not called before they are.
            _ => unsafe { placed::receive(&self.fd, places, room) },
        };
        // What the kernel may not touch a copy touches, for the program's handler to open it.
        let placing = placing.filter(|outcome| !outcome.as_ref().is_err_and(sys::is_fault));
        let direct = if placing.is_some() { direct } else { 0 };
        let received = match placing.unwrap_or_else(|| sys::receive(&self.fd, room)) {
            Ok(received) => received,
            Err(error) => {
                self.received.close(pool, buffer, filled);
                return Err(error);
            }
        };
        let in_place = received.min(direct);
        let behind = received - in_place;
        self.note_received(received, direct == 0 && behind == most);
        if in_place > 0 {
            adapter.handle_placed(now, conn, in_place);
        }
        let fits = self.show(adapter, now, conn, pool, (buffer, filled), behind);
        Ok(if fits { received } else { 0 })
    }

    /// Notes what a receive says about the next.
    #[inline]
    fn note_received(&mut self, received: usize, brimmed: bool) {
        self.brimmed = brimmed;
        self.expects = received >= BEHIND_BYTES / 2;
    }

    /// Shows the adapter what came, `fresh` bytes behind what is `filled` of a buffer. False if that is a
    /// whole buffer that the adapter cannot use, and never will.
    #[inline]
    fn show(
        &mut self,
        adapter: &mut Adapter,
        now: Time,
        conn: ConnId,
        pool: &mut Pool,
        (buffer, mut filled): (Buffer, Range<usize>),
        fresh: usize,
    ) -> bool {
        if fresh > 0 {
            let bytes = &buffer[filled.end..filled.end + fresh];
            adapter.probe_mut().stream_passed(Some(conn), false, bytes);
            filled.end += fresh;
            filled.start += adapter.handle_stream(now, conn, &buffer[filled.clone()]);
        }
        let fits = filled != (0..buffer.len());
        self.received.close(pool, buffer, filled);
        fits
    }

    /// Sends once what the adapter has to transmit for it.
    #[inline]
    pub(crate) fn send(
        &mut self,
        adapter: &mut Adapter,
        now: Time,
        pool: &mut Pool,
        gather: &mut Gather,
    ) -> io::Result<Sent> {
        let Some(conn) = self.conn else { return Ok(Sent::Nothing) };
        let buffer = &mut pool.front()[..TRANSMIT_BYTES];
        gather.limit(self.appetite.bytes());
        let filled = adapter.transmit_from_memory(now, conn, buffer, gather);
        // SAFETY: the adapter has just gathered, and is not called before this has been used.
        let gathered = unsafe { Gathered::new(&buffer[..filled], gather) };
        let all = gathered.len();
        if all == 0 {
            return Ok(Sent::Nothing);
        }
        let sent = match gathered.send(&self.fd) {
            Ok(sent) => sent,
            Err(ref error) if sys::would_block(error) => 0,
            // As in `receive`: the copy of what was not sent is made here.
            Err(ref error) if sys::is_fault(error) && gather.bytes() > 0 => 0,
            Err(error) => return Err(error),
        };
        if sent < all {
            self.appetite.spoil();
            self.keep_rest(adapter, pool, gather, filled, sent);
            return Ok(Sent::Part);
        }
        if !gather.has_room() {
            self.appetite.grow();
        }
        // A capture has everything in the buffer.
        self.show_sent(adapter, &buffer[..filled]);
        let was_all = gather.is_final(TRANSMIT_BYTES - filled);
        Ok(if was_all { Sent::Everything } else { Sent::All(all) })
    }

    /// Keeps what the socket did not take behind `sent` bytes of what has just been transmitted, of which
    /// `filled` are in the buffer.
    #[cold]
    fn keep_rest(
        &mut self,
        adapter: &mut Adapter,
        pool: &mut Pool,
        gather: &Gather,
        filled: usize,
        sent: usize,
    ) {
        let buffer = pool.take();
        // SAFETY: as in `send`, which has not called the adapter since.
        let gathered = unsafe { Gathered::new(&buffer[..filled], gather) };
        let left = gathered.len() - sent;
        // A short rest does not keep a large buffer, and memory of the program is not kept at all.
        let copied = gather.bytes() > 0 || left <= SHORT_BYTES;
        let rest = copied.then(|| gathered.copy_behind(sent, pool));
        self.show_sent(adapter, &buffer[..sent.min(filled)]);
        self.unsent = Some(match rest {
            None => (buffer, sent..filled),
            Some(rest) => {
                pool.give_back(buffer);
                (rest, 0..left)
            }
        });
    }

    /// Shows a capture what was sent, and how it is marked.
    #[inline]
    fn show_sent(&self, adapter: &mut Adapter, bytes: &[u8]) {
        if adapter.probe_mut().watches()
            && let Some(conn) = self.conn
            && let Some(marking) = adapter.marking(conn)
        {
            adapter.probe_mut().stream_marked(conn, marking);
        }
        adapter.probe_mut().stream_passed(self.conn, true, bytes);
    }

    /// Sends what the socket did not take before. True if nothing is left.
    pub(crate) fn send_rest(&mut self, pool: &mut Pool, tap: &mut Tap) -> io::Result<bool> {
        while let Some((bytes, rest)) = &mut self.unsent {
            match sys::send(&self.fd, &bytes[rest.clone()]) {
                Ok(sent) => {
                    tap.stream_passed(self.conn, true, &bytes[rest.start..rest.start + sent]);
                    rest.start += sent;
                }
                Err(e) if sys::would_block(&e) => return Ok(false),
                Err(e) => return Err(e),
            }
            if rest.start == rest.end
                && let Some((bytes, _)) = self.unsent.take()
            {
                pool.give_back(bytes);
            }
        }
        Ok(true)
    }
}

/// What a send came to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Sent {
    /// There was nothing to send.
    Nothing,
    /// The socket took it, and the adapter had no more.
    Everything,
    /// The socket took it, so many bytes; there may be more.
    All(usize),
    /// The socket is full; the rest waits.
    Part,
}

/// 0: the system's default.
pub(super) fn set_user_timeout(fd: &OwnedFd, milliseconds: c_int) -> io::Result<()> {
    sys::set_option(fd, libc::IPPROTO_TCP, libc::TCP_USER_TIMEOUT, milliseconds)
}

/// Starts a connection from `own` to `peer`; true if it stands already.
pub(crate) fn start(
    tuning: &Tuning,
    own: SocketAddr,
    peer: SocketAddr,
) -> io::Result<(OwnedFd, bool)> {
    let fd = sys::tcp_socket(peer.ip())?;
    tuning.apply(&fd)?;
    set_user_timeout(&fd, CONNECT_MS)?;
    // The port is chosen by connect, per destination: more connections than ports are possible. A wish, too:
    // where it is not known (sandboxes, emulators), bind chooses.
    let set = sys::set_option(&fd, libc::IPPROTO_IP, libc::IP_BIND_ADDRESS_NO_PORT, 1);
    if let Err(error) = set {
        tracing::debug!(%error, "ports of connections are not shared");
    }
    sys::bind(&fd, own)?;
    let done = sys::connect(&fd, peer)?;
    Ok((fd, done))
}

/// What an error of a socket means for the connection.
pub(crate) fn loss(error: &io::Error) -> Loss {
    match error.raw_os_error() {
        Some(libc::ECONNREFUSED) => Loss::Refused,
        Some(libc::ETIMEDOUT) => Loss::TimedOut,
        Some(libc::ECONNRESET | libc::EPIPE | libc::ECONNABORTED) => Loss::Closed,
        _ => Loss::Unavailable,
    }
}
