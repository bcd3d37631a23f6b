//! Connections that kernel calls move: those that a child of fork(2) may use, and those that the C
//! library uses by itself (stdio, splice).
//!
//! The engine of a connection lives in one process and cannot be handed on. So two threads of this
//! process copy between the connection and the pair of UNIX sockets whose other end is the program's
//! descriptor. From then on that descriptor is an ordinary stream of the kernel, in this process, in its
//! children, and in programs that they become. When nobody has it any more, the connection ends.
//!
//! A relay begins only when it has to: when a child first uses the connection, and asks this process for
//! it, or when this process closes its last descriptor and a child may have one.

use std::net::SocketAddr;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use libc::{c_int, iovec, timeval};
use quipu_cabi::Errno;

use crate::establish::{add_descriptor, remove_descriptor};
use crate::real;
use crate::socket::{Direction, Patience, Phase, Socket};
use crate::sys::{BlockedSignals, system};
use crate::table::{self, Entry};

/// Bytes that are copied at a time.
const PART: usize = 64 << 10;
/// A thread waits for the peer; how long it does not look whether the program has gone.
const WAITS: Option<Patience> = Some((true, Some(Duration::from_secs(1))));
/// How long a peer may read nothing of what the program has sent, once that is gone.
const MOST_UNREAD: Duration = Duration::from_nanos(quipu_sdp::FIN_WAIT_NS);
/// Between two looks whether calls that began before the relay are over.
const LOOK: Duration = Duration::from_millis(5);

/// What is left of a connection in the process that has its descriptor.
#[derive(Clone, Copy, Default)]
pub(crate) struct Relayed {
    /// The process that relays it; 0: it is not this one.
    pub(crate) by: u32,
    pub(crate) local: Option<SocketAddr>,
    pub(crate) peer: Option<SocketAddr>,
}

/// This library's ends of pairs that are relayed: a child closes its copies, or it would never see an end.
static ENDS: Mutex<Vec<RawFd>> = Mutex::new(Vec::new());

/// The process ends: each relay sends what the program has written, and then ends its stream.
pub(crate) fn end_all() {
    let ends = ends();
    // What lies there is still read. The lock keeps the descriptors open.
    ends.iter().for_each(|&end| shut(end, libc::SHUT_RD));
}

fn shut(fd: RawFd, how: c_int) {
    // SAFETY: shutdown(2).
    unsafe { real::shutdown(fd, how) };
}

/// A connection and this library's end of its pair.
struct Relay {
    socket: Arc<Socket>,
    end: OwnedFd,
    /// The program has no descriptor of it any more.
    is_over: AtomicBool,
}

/// Held while a relay begins, and while a descriptor of a socket is forgotten: it is open meanwhile.
static RELAYING: Mutex<()> = Mutex::new(());

/// No relay begins while it lives. No handler of the program runs meanwhile in this thread: it may close a
/// descriptor.
pub(crate) struct Relaying {
    _lock: MutexGuard<'static, ()>,
    /// Dropped after the lock: handlers run then.
    _signals: BlockedSignals,
}

/// Keeps relays from beginning.
pub(crate) fn relaying() -> Relaying {
    let _signals = BlockedSignals::new();
    Relaying { _lock: RELAYING.lock().unwrap_or_else(PoisonError::into_inner), _signals }
}

/// This library's ends of pairs that are relayed.
pub(crate) fn ends() -> MutexGuard<'static, Vec<RawFd>> {
    ENDS.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Relays a connection. Whether it is relayed now.
pub(crate) fn relay_socket(socket: &Arc<Socket>) -> bool {
    if socket.is_relayed() {
        return true;
    }
    let _relaying = relaying();
    // A thread that closes the last descriptor may have begun meanwhile.
    if socket.is_relayed() {
        return true;
    }
    let is_same = |entry: &Entry| matches!(entry, Entry::Sdp(it) if it.number == socket.number);
    let all = table::all().into_iter().filter(|(_, entry)| is_same(entry));
    let fds: Vec<RawFd> = all.map(|(fd, _)| fd).collect();
    fds.first().is_some_and(|&first| begin(socket, first, &fds).is_ok())
}

/// The program is about to close its last descriptor of a connection that a child may have, too. The caller
/// holds [`relaying`].
pub(crate) fn leave_to_children(socket: &Arc<Socket>, fd: RawFd) {
    // Without a relay it ends now.
    let _ = begin(socket, fd, &[]);
}

/// Begins to relay a connection. The caller holds [`relaying`]. `first` is a descriptor of the program, and
/// `fds` are those that are relayed from now on.
pub(crate) fn begin(socket: &Arc<Socket>, first: RawFd, fds: &[RawFd]) -> Result<(), Errno> {
    let mut state = socket.lock();
    // What came before a peer was gone is still read.
    if state.phase != Phase::Connected || state.closed || state.link.is_none() {
        return Err(Errno::ENOTCONN);
    }
    let has_shut = state.link.as_ref().is_some_and(|link| link.connection.has_shut_write());
    let end = state.ready.hand_over(first).ok_or(Errno::ENOTCONN)?;
    for (limit, name) in [
        (state.options.receive_timeout, libc::SO_RCVTIMEO),
        (state.options.send_timeout, libc::SO_SNDTIMEO),
    ] {
        if let Some(limit) = limit {
            set_timeout(first, name, limit);
        }
    }
    let by = std::process::id();
    let relayed = Arc::new(Relayed { by, local: state.local, peer: state.peer });
    socket.is_relayed.store(true, Ordering::SeqCst);
    drop(state);
    if has_shut {
        shut(first, libc::SHUT_WR);
    }
    // Calls that wait go to the kernel.
    socket.changed.notify_all();
    // The relay holds the connection when the program's descriptors stand for something else.
    add_descriptor(socket);
    for &fd in fds {
        table::put(fd, Entry::Relayed(Arc::clone(&relayed)));
    }
    ends().push(end.as_raw_fd());
    let relay = Relay { socket: Arc::clone(socket), end, is_over: AtomicBool::new(false) };
    start(Arc::new(relay))
}

fn set_timeout(fd: RawFd, name: c_int, limit: Duration) {
    let micros = libc::suseconds_t::from(limit.subsec_micros());
    let time = timeval { tv_sec: limit.as_secs() as libc::time_t, tv_usec: micros };
    let len = size_of::<timeval>() as libc::socklen_t;
    // SAFETY: a value of that length.
    unsafe { real::setsockopt(fd, libc::SOL_SOCKET, name, (&raw const time).cast(), len) };
}

/// Starts the threads. They get none of the program's signals.
fn start(relay: Arc<Relay>) -> Result<(), Errno> {
    let signals = BlockedSignals::new();
    let other = Arc::clone(&relay);
    let begun = thread::Builder::new().name("quipu-sdp-in".into()).spawn(move || other.receive());
    let both = begun.and_then(|_| {
        let other = Arc::clone(&relay);
        thread::Builder::new().name("quipu-sdp-out".into()).spawn(move || other.send())
    });
    drop(signals);
    both.map(drop).map_err(|_| {
        relay.finish();
        Errno::EAGAIN
    })
}

fn piece(memory: &mut [u8]) -> [iovec; 1] {
    [iovec { iov_base: memory.as_mut_ptr().cast(), iov_len: memory.len() }]
}

impl Relay {
    /// Waits until calls are over that began before: what they move comes before what is relayed.
    fn wait_for_calls(&self, direction: Direction) {
        while self.socket.has_calls(direction) && !self.is_over.load(Ordering::Acquire) {
            thread::sleep(LOOK);
        }
    }

    fn shut(&self, how: c_int) {
        shut(self.end.as_raw_fd(), how);
    }

    /// Copies what the peer sends.
    fn receive(&self) {
        self.wait_for_calls(Direction::In);
        let mut memory = vec![0; PART];
        while !self.is_over.load(Ordering::Acquire) {
            match self.socket.receive_while(&piece(&mut memory), 0, WAITS, || true) {
                Ok(0) => return self.shut(libc::SHUT_WR),
                Ok(count) if !self.pass_on(&memory[..count]) => return,
                Ok(_) | Err(Errno::EAGAIN | Errno::EINTR) => {}
                Err(_) => return self.shut(libc::SHUT_RDWR),
            }
        }
    }

    /// Writes to the pair. False when nobody reads there any more.
    fn pass_on(&self, mut bytes: &[u8]) -> bool {
        while !bytes.is_empty() {
            let (fd, at) = (self.end.as_raw_fd(), bytes.as_ptr().cast());
            // SAFETY: as many bytes as there are.
            let sent = unsafe { real::send(fd, at, bytes.len(), libc::MSG_NOSIGNAL) };
            match system(sent) {
                Ok(sent) => bytes = &bytes[sent as usize..],
                Err(Errno::EINTR) => {}
                Err(_) => return false,
            }
        }
        true
    }

    /// Copies what the program and its children send, and ends the connection when they have closed it.
    fn send(&self) {
        self.wait_for_calls(Direction::Out);
        let mut memory = vec![0; PART];
        loop {
            let (fd, at) = (self.end.as_raw_fd(), memory.as_mut_ptr().cast());
            // SAFETY: room for so many bytes.
            match system(unsafe { real::read(fd, at, PART) }) {
                Ok(0) => break,
                Ok(count) if !self.send_all(&mut memory[..count as usize]) => {
                    self.shut(libc::SHUT_RD);
                    break;
                }
                Ok(_) | Err(Errno::EINTR) => {}
                Err(_) => break,
            }
        }
        let _ = self.socket.shut_down(libc::SHUT_WR);
        self.hangs_up_within(-1);
        self.finish();
    }

    /// Sends to the peer. False when that is gone, or reads nothing although the program is gone.
    fn send_all(&self, mut bytes: &mut [u8]) -> bool {
        let mut waits_since = None;
        while !bytes.is_empty() {
            match self.socket.send_now(&piece(bytes), libc::MSG_NOSIGNAL, WAITS) {
                Ok(count) => (bytes, waits_since) = (&mut bytes[count..], None),
                Err(Errno::EINTR) => {}
                Err(Errno::EAGAIN) if !self.hangs_up_within(0) => {}
                Err(Errno::EAGAIN) => {
                    let since = *waits_since.get_or_insert_with(Instant::now);
                    if since.elapsed() > MOST_UNREAD {
                        return false;
                    }
                }
                Err(_) => return false,
            }
        }
        true
    }

    /// Whether no process has a descriptor of the program's end, after at most so many ms; -1: it waits.
    fn hangs_up_within(&self, ms: c_int) -> bool {
        let mut entry = libc::pollfd { fd: self.end.as_raw_fd(), events: 0, revents: 0 };
        loop {
            // SAFETY: one live entry.
            match system(unsafe { real::poll(&raw mut entry, 1, ms) }) {
                Err(Errno::EINTR) => {}
                found => return found != Ok(0),
            }
        }
    }

    fn finish(&self) {
        if !self.is_over.swap(true, Ordering::AcqRel) {
            let end = self.end.as_raw_fd();
            ends().retain(|&fd| fd != end);
            remove_descriptor(&self.socket);
        }
    }
}
