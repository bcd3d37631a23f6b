//! Sockets: found by their descriptor, moved by the events of their identifier, waited for.
//!
//! The descriptor of a socket is an epoll set of the identifier's channel and the completion channel, so
//! that it is readable when one of the two has something to say.

use std::collections::{BTreeMap, VecDeque};
use std::os::fd::{AsRawFd, FromRawFd, IntoRawFd, OwnedFd};
use std::ptr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use libc::c_int;
use quipu_abi_types::*;
use quipu_cabi::Errno;

use super::connection::{Connection, fitted};
use super::repoll::Set;
use super::setup::{greeting_of, turn_away};
use super::sleepers::Sleepers;
use super::turn::Turn;
use super::wire::Greeting;
use super::{Options, set_nonblocking, system};
use crate::address;
use crate::channel;
use crate::connect::rdma_connect;
use crate::event;
use crate::id;
use crate::verbs::text;

/// The device of QPIP.
const BARE: &str = "quipu_qp0";

/// How long addresses and routes may take to be resolved, in ms.
pub(super) const RESOLVE_MS: c_int = 10_000;

/// Requests that a listener takes from its backlog before they are accepted.
const MAX_REQUESTS: usize = 16;

/// How long `rclose` waits for what was sent to arrive: about as long as a queue pair waits for a peer that
/// is gone. A peer that is there and takes nothing could hold a program up for ever.
pub(crate) const LINGER: Duration = Duration::from_secs(30);

/// Streams have a greeting as private data, and bare TCP has no room for it. Which device an address leads to
/// is not for the program to say: the error is not that of a wrong argument.
///
/// # Safety
///
/// `id` is an identifier that is bound to a device.
unsafe fn check_device(id: *mut rdma_cm_id) -> Result<(), Errno> {
    // SAFETY: passed on from the caller; the names of devices do not change.
    let name = unsafe { (*(*(*id).verbs).device).name };
    let is_bare = text(&name).iter().map(|&byte| byte as u8).eq(BARE.bytes());
    if is_bare { Err(Errno::EOPNOTSUPP) } else { Ok(()) }
}

/// What a program sets, which sockets that a listener accepts begin with (socket(7)).
#[derive(Clone, Default)]
pub(crate) struct Settings {
    pub(crate) sizes: Options,
    /// How long `rclose` waits for the peer at most, where the program said so.
    pub(crate) linger: Option<Duration>,
    /// Told as they were set.
    pub(crate) remembered: BTreeMap<(c_int, c_int), c_int>,
}

/// How far a socket is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Phase {
    Idle,
    Listening,
    /// Resolving, or waiting for the peer's answer.
    Connecting,
    Connected,
    /// It could not be connected.
    Failed,
}

/// A stream socket.
pub(crate) struct Socket {
    pub(crate) fd: c_int,
    pub(crate) nonblocking: AtomicBool,
    state: Mutex<State>,
    /// Comes when a thread that slept at the descriptors is back.
    pub(super) turn: Turn,
}

/// What changes in a socket.
pub(crate) struct State {
    pub(crate) id: *mut rdma_cm_id,
    fd: c_int,
    pub(crate) phase: Phase,
    /// `rconnect` has not told what became of it.
    pub(crate) unanswered: bool,
    /// What `SO_ERROR` tells once.
    pub(crate) error: Option<Errno>,
    /// The loss of the connection was an error once.
    pub(super) mourned: bool,
    pub(crate) connection: Option<Connection>,
    pub(crate) settings: Settings,
    /// What the program has bound it to, with the port that came of it.
    pub(crate) bound: Option<libc::sockaddr_storage>,
    /// Requests that `raccept` has not taken, and how many have ever come.
    pub(crate) requests: VecDeque<*mut rdma_cm_event>,
    requested: u64,
    pub(crate) shut_read: bool,
    /// Those who sleep at its descriptors.
    pub(super) sleepers: Sleepers,
    /// One of them does so in a call that waits for this socket alone, and on behalf of all such calls.
    pub(super) led: bool,
    /// Threads that wait at `turn`.
    pub(super) waiting: u32,
    /// A thread has slept inside the engine.
    pub(super) slept_inside: bool,
    /// The sets that it is in.
    pub(crate) watchers: Vec<Weak<Set>>,
    /// How often it has become ready for something, or more has come; counted while sets watch.
    pub(crate) edge: u64,
    /// What it was last seen as.
    seen: Seen,
    /// Completion events were taken of which a set may have been about to hear, or those who slept are back,
    /// to whom a set has left what came.
    pub(super) disturbed: bool,
    /// A call has done without a look at what came since the last one.
    skipped: bool,
}

/// What those who wait for a socket want to hear of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Seen {
    phase: Phase,
    events: i16,
    /// Bytes, and requests to connect, that have ever come.
    arrived: u64,
    requests: u64,
}

// SAFETY: the pointers are to an identifier and its events, which may be used from any thread.
unsafe impl Send for State {}

impl Socket {
    /// A socket without addresses; until it has one, an address of zeros of that family is told.
    pub(crate) fn new(family: c_int) -> Result<Arc<Self>, Errno> {
        let (channel, set) = ears()?;
        // SAFETY: the channel was just made.
        let made = unsafe { id::create(channel, ptr::null_mut(), RDMA_PS_TCP, Some(IBV_QPT_RC)) };
        let id = made.inspect_err(|_| {
            // SAFETY: nothing uses it.
            let _ = unsafe { channel::destroy(channel) };
        })?;
        // SAFETY: the identifier was just made, with a channel of its own.
        unsafe {
            (*id).route.addr.src_storage.ss_family = family as libc::sa_family_t;
            Ok(Self::around(id, set, Settings::default()))
        }
    }

    /// A socket around an identifier.
    ///
    /// # Safety
    ///
    /// `id` is an identifier with a channel of its own, of which `set` tells.
    pub(super) unsafe fn around(
        id: *mut rdma_cm_id,
        set: OwnedFd,
        settings: Settings,
    ) -> Arc<Self> {
        let fd = set.into_raw_fd();
        let state = State {
            id,
            fd,
            phase: Phase::Idle,
            unanswered: false,
            error: None,
            mourned: false,
            connection: None,
            settings,
            bound: None,
            requests: VecDeque::new(),
            shut_read: false,
            sleepers: Sleepers::default(),
            led: false,
            waiting: 0,
            watchers: Vec::new(),
            edge: 0,
            seen: Seen { phase: Phase::Idle, events: 0, arrived: 0, requests: 0 },
            disturbed: false,
            skipped: false,
            slept_inside: false,
            requested: 0,
        };
        let nonblocking = AtomicBool::new(false);
        Arc::new(Self { fd, nonblocking, state: Mutex::new(state), turn: Turn::new() })
    }

    pub(crate) fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn is_nonblocking(&self, flags: c_int) -> bool {
        flags & libc::MSG_DONTWAIT != 0 || self.nonblocking.load(Ordering::Relaxed)
    }
}

/// A time as poll(2) takes it, rounded up; -1 for ever.
pub(crate) fn millis(left: Option<Duration>) -> c_int {
    left.map_or(-1, |left| c_int::try_from(left.as_micros().div_ceil(1000)).unwrap_or(c_int::MAX))
}

impl Drop for Socket {
    fn drop(&mut self) {
        let state = self.state.get_mut().unwrap_or_else(PoisonError::into_inner);
        // SAFETY: nobody uses the socket any more; requests that were not accepted end with it.
        unsafe {
            state.requests.drain(..).for_each(|request| turn_away(request));
            state.connection = None;
            destroy(state.id);
            if state.fd >= 0 {
                libc::close(state.fd);
            }
        }
    }
}

/// A channel that does not block, and the descriptor that tells of its events.
pub(super) fn ears() -> Result<(*mut rdma_event_channel, OwnedFd), Errno> {
    let (set, channel) = (epoll_set()?, channel::create(false)?);
    // SAFETY: the channel was just made.
    let fd = unsafe { (*channel).fd };
    set_nonblocking(fd);
    watch(set.as_raw_fd(), fd).inspect_err(|_| {
        // SAFETY: nothing uses it.
        let _ = unsafe { channel::destroy(channel) };
    })?;
    Ok((channel, set))
}

/// Destroys an identifier and the channel that is its own.
///
/// # Safety
///
/// `id` is an identifier that is used no more.
unsafe fn destroy(id: *mut rdma_cm_id) {
    // SAFETY: passed on from the caller.
    unsafe {
        let channel = (*id).channel;
        let _ = id::destroy(id);
        let _ = channel::destroy(channel);
    }
}

/// An epoll set. The kernel is called by number, here and below: the C library's functions may be hidden by
/// those of librspreload, which makes sets of r* sockets.
pub(crate) fn epoll_set() -> Result<OwnedFd, Errno> {
    // SAFETY: epoll_create1(2) takes an integer.
    let made = unsafe { libc::syscall(libc::SYS_epoll_create1, libc::EPOLL_CLOEXEC) };
    // SAFETY: the kernel just made it, for this caller.
    system(made as c_int).map(|fd| unsafe { OwnedFd::from_raw_fd(fd) })
}

/// Has an epoll set watch a descriptor.
pub(super) fn watch(set: c_int, fd: c_int) -> Result<(), Errno> {
    let mut event = libc::epoll_event { events: libc::EPOLLIN as u32, u64: 0 };
    // SAFETY: epoll_ctl(2); `event` is valid for the call.
    let done =
        unsafe { libc::syscall(libc::SYS_epoll_ctl, set, libc::EPOLL_CTL_ADD, fd, &raw mut event) };
    system(done as c_int).map(|_| ())
}

impl State {
    /// Does what came. True if there may be more, so that nobody should sleep.
    pub(crate) fn progress(&mut self) -> bool {
        self.progress_for(std::ptr::null())
    }

    /// As [`progress`](Self::progress), for a set that looks by itself and need not be told.
    pub(crate) fn progress_for(&mut self, set: *const Set) -> bool {
        // What calls have changed since: that there is no room any more, for instance.
        self.note(set);
        let more = self.work();
        self.note(set);
        more
    }

    /// Whether progress is a poll of the completion queue, which costs little.
    pub(crate) fn is_polled(&self) -> bool {
        self.connection.as_ref().is_some_and(Connection::is_polled)
    }

    /// Has the sets, but for one, look at the socket if there is a reason to.
    fn note(&mut self, by: *const Set) {
        if self.watchers.is_empty() {
            return;
        }
        let now = Seen {
            phase: self.phase,
            events: self.events(),
            arrived: self.connection.as_ref().map_or(0, Connection::arrived),
            requests: self.requested,
        };
        let before = std::mem::replace(&mut self.seen, now);
        // That an event is over is nothing new.
        let fresh =
            now.events & !before.events != 0 || now != Seen { events: now.events, ..before };
        self.edge += u64::from(fresh);
        if std::mem::take(&mut self.disturbed) | fresh {
            let fd = self.fd;
            self.watchers.retain(|set| match set.upgrade() {
                Some(set) if !std::ptr::eq(&raw const *set, by) => {
                    set.touch(fd);
                    true
                }
                alive => alive.is_some(),
            });
        }
    }

    /// Whether a call may do without [`progress`](Self::progress): one in a row.
    pub(crate) fn may_skip(&mut self) -> bool {
        !std::mem::replace(&mut self.skipped, true)
    }

    fn work(&mut self) -> bool {
        self.skipped = false;
        let more = self.connection.as_mut().is_some_and(Connection::progress);
        if self.sleepers.any() {
            // They are about to take these.
            return more;
        }
        // A poll of the completion queue makes progress for all. To ask the engine for more costs system
        // calls, and has its helper get up, who then takes every message for the program, and late.
        let take = if self.is_polled() { event::take_queued } else { event::take };
        // Those that `raccept` has no time for are left to the listener's backlog.
        while self.requests.len() < MAX_REQUESTS {
            // SAFETY: the channel is the identifier's own and does not block.
            let Ok(taken) = (unsafe { take((*self.id).channel) }) else { break };
            // SAFETY: it was just taken.
            unsafe { self.act(taken) };
        }
        if !more
            && !self.mourned
            && let Some(errno) = self.connection.as_ref().and_then(Connection::lost)
        {
            self.mourned = true;
            self.error = Some(errno);
        }
        more
    }

    /// # Safety
    ///
    /// `taken` is an event of this socket's identifier.
    unsafe fn act(&mut self, taken: *mut rdma_cm_event) {
        // SAFETY: passed on from the caller.
        let event = unsafe { &*taken };
        let stepped = match event.event {
            // SAFETY: passed on from the caller.
            RDMA_CM_EVENT_CONNECT_REQUEST if self.phase != Phase::Listening => unsafe {
                return turn_away(taken);
            },
            RDMA_CM_EVENT_CONNECT_REQUEST => {
                self.requests.push_back(taken);
                self.requested += 1;
                return;
            }
            // Of a request that its sender has given up. Accepting it will fail.
            _ if event.id != self.id => Ok(()),
            // SAFETY: the identifier is this socket's.
            RDMA_CM_EVENT_ADDR_RESOLVED => unsafe {
                check_device(self.id)
                    .and_then(|()| address::resolve_route(self.id, RESOLVE_MS).map(|_| ()))
            },
            RDMA_CM_EVENT_ROUTE_RESOLVED => self.open().and_then(|()| self.say_hello(rdma_connect)),
            RDMA_CM_EVENT_ESTABLISHED => self.established(greeting_of(event)),
            RDMA_CM_EVENT_DISCONNECTED | RDMA_CM_EVENT_DEVICE_REMOVAL
                if self.phase == Phase::Connecting =>
            {
                Err(Errno(libc::ECONNRESET))
            }
            RDMA_CM_EVENT_DISCONNECTED | RDMA_CM_EVENT_DEVICE_REMOVAL => {
                self.disconnected();
                Ok(())
            }
            RDMA_CM_EVENT_REJECTED => Err(Errno::ECONNREFUSED),
            RDMA_CM_EVENT_ADDR_ERROR
            | RDMA_CM_EVENT_ROUTE_ERROR
            | RDMA_CM_EVENT_UNREACHABLE
            | RDMA_CM_EVENT_CONNECT_ERROR => Err(match event.status {
                0 => Errno::EHOSTUNREACH,
                status => Errno(status.saturating_abs()),
            }),
            _ => Ok(()),
        };
        if let Err(errno) = stepped {
            self.fail(errno);
        }
        // SAFETY: passed on from the caller; it is used no more.
        let _ = unsafe { event::acknowledge(taken) };
    }

    fn fail(&mut self, errno: Errno) {
        self.error = Some(errno);
        match (&mut self.connection, self.phase) {
            (Some(connection), Phase::Connected) => connection.break_with(errno),
            _ => self.phase = Phase::Failed,
        }
    }

    fn established(&mut self, greeting: Option<Greeting>) -> Result<(), Errno> {
        if self.phase != Phase::Connecting {
            return Ok(());
        }
        let (Some(connection), Some(greeting)) = (&mut self.connection, greeting) else {
            return Err(Errno(libc::EPROTO));
        };
        connection.greeted(greeting);
        connection.progress();
        self.phase = Phase::Connected;
        Ok(())
    }

    /// The peer has closed, or is gone. Whatever it sent before is there by now.
    fn disconnected(&mut self) {
        if let Some(connection) = &mut self.connection {
            // Broken, it posts no receives any more, so that this ends.
            connection.break_with(Errno(libc::ECONNRESET));
            while connection.progress() {}
        }
    }

    /// Makes the connection's queues.
    fn open(&mut self) -> Result<(), Errno> {
        // SAFETY: the identifier is this socket's and bound to a device; the connection is dropped
        // before it.
        let connection = unsafe {
            self.settings.sizes = fitted(self.id, &self.settings.sizes)?;
            Connection::new(self.id, &self.settings.sizes)
        }?;
        // SAFETY: the identifier has its completion channel now.
        watch(self.fd, unsafe { (*(*self.id).recv_cq_channel).fd })?;
        self.connection = Some(connection);
        Ok(())
    }

    /// Connects or accepts, with the greeting as private data.
    pub(super) fn say_hello(
        &mut self,
        call: unsafe extern "C" fn(*mut rdma_cm_id, *mut rdma_conn_param) -> c_int,
    ) -> Result<(), Errno> {
        let connection = self.connection.as_ref().ok_or(Errno::ENOTCONN)?;
        let bytes = connection.greeting().encode();
        let mut param = rdma_conn_param {
            private_data: bytes.as_ptr().cast(),
            private_data_len: bytes.len() as u8,
            responder_resources: 1,
            initiator_depth: 1,
            flow_control: 1,
            retry_count: 7,
            rnr_retry_count: 7,
            srq: 0,
            qp_num: 0,
        };
        // SAFETY: the identifier is this socket's; `param` and what it names are valid for the call.
        system(unsafe { call(self.id, &mut param) }).map(|_| ())
    }

    /// The descriptor is somebody else's by now.
    pub(super) fn disown(&mut self) {
        self.fd = -1;
    }

    /// The connection, if it stands.
    pub(crate) fn connected(&mut self) -> Result<&mut Connection, Errno> {
        match (self.phase, &mut self.connection) {
            (Phase::Connected, Some(connection)) => Ok(connection),
            (Phase::Connecting, _) => Err(Errno::EAGAIN),
            _ => Err(Errno::ENOTCONN),
        }
    }

    /// What poll(2) would say of it.
    pub(crate) fn events(&self) -> i16 {
        let mut events = self.readiness();
        // All bytes are of the same rank.
        for (event, alias) in [(libc::POLLIN, libc::POLLRDNORM), (libc::POLLOUT, libc::POLLWRNORM)]
        {
            events |= if events & event != 0 { alias } else { 0 };
        }
        events
    }

    fn readiness(&self) -> i16 {
        let all = libc::POLLOUT | libc::POLLHUP;
        match (self.phase, &self.connection) {
            (Phase::Idle, _) => all,
            (Phase::Listening, _) if self.requests.is_empty() => 0,
            (Phase::Listening, _) => libc::POLLIN,
            (Phase::Connecting, _) => 0,
            (Phase::Failed, _) => all | libc::POLLIN | libc::POLLERR,
            (Phase::Connected, None) => 0,
            (Phase::Connected, Some(connection)) => {
                let readable = connection.unread() > 0 || connection.ended() || self.shut_read;
                let over = connection.broken().is_some();
                let mut events = if readable { libc::POLLIN } else { 0 };
                if connection.is_writable() || over {
                    events |= libc::POLLOUT;
                }
                if connection.ended() {
                    events |= libc::POLLRDHUP;
                }
                // Programs take this for the end even where there is something to read.
                if (over || (connection.ended() && connection.end_told)) && connection.unread() == 0
                {
                    events |= libc::POLLHUP;
                }
                if self.error.is_some() {
                    events |= libc::POLLERR;
                }
                events
            }
        }
    }
}
