//! A socket: its state, and what it is ready for.

use std::collections::VecDeque;
use std::net::SocketAddr;
use std::ops::{Deref, DerefMut};
use std::os::fd::{OwnedFd, RawFd};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use libc::c_int;
use quipu_cabi::Errno;
use quipu_host::connection::IdKey;
use quipu_sdp::{Choice, Readable};

use crate::adapter::Adapter;
use crate::both::Shown;
use crate::helper;
use crate::link::Link;
use crate::options::Options;
use crate::queue::Queue;
use crate::ready::{Readiness, Ready};
use crate::sys::BlockedSignals;

/// Where a socket is in its life.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Phase {
    /// Neither connected nor listening.
    Idle,
    Listening,
    /// The request is out.
    Connecting,
    Connected,
    /// It could not be connected.
    Failed,
}

/// What the lock of a socket is around.
pub(crate) struct State {
    pub(crate) phase: Phase,
    /// The identifier of connection management.
    pub(crate) id: Option<IdKey>,
    pub(crate) local: Option<SocketAddr>,
    pub(crate) peer: Option<SocketAddr>,
    /// The queue pair of a connection that does not stand yet.
    pub(crate) queue: Option<Queue>,
    pub(crate) link: Option<Link>,
    /// The identifier that listens at the twin of the port, for clients of a rule `both`.
    pub(crate) twin: Option<IdKey>,
    /// The kernel's socket that shows connections of this listener.
    pub(crate) shown: Option<Shown>,
    /// Connections that wait for accept(2).
    pub(crate) backlog: VecDeque<Arc<Socket>>,
    /// The listener that a connection waits for until it stands.
    pub(crate) listener: Option<Arc<Socket>>,
    /// What SO_ERROR tells once.
    pub(crate) error: Option<Errno>,
    pub(crate) shut_read: bool,
    /// The program has no descriptor of it.
    pub(crate) closed: bool,
    /// The adapter hears of its end.
    pub(crate) destroyed: bool,
    pub(crate) options: Options,
    /// The descriptor of a connection that accept(2) has not returned yet.
    pub(crate) parked: Option<OwnedFd>,
    pub(crate) ready: Ready,
    /// A thread sleeps in the engine: it takes the completions.
    pub(crate) led: bool,
    /// Threads that wait for that one, or for an event.
    pub(crate) waiting: u32,
    /// The helper hears of what comes: no call of the program was here for a while.
    pub(crate) attended: bool,
    /// Sleeps in a row that polls did not spare.
    pub(crate) lost_polls: u32,
    /// How large sends go.
    pub(crate) choice: Choice,
    /// Something has come since readiness was shown.
    pub(crate) arrived: bool,
}

/// A socket of SDP.
pub(crate) struct Socket {
    /// Its name in events.
    pub(crate) number: u64,
    state: Mutex<State>,
    pub(crate) changed: Condvar,
    pub(crate) nonblocking: AtomicBool,
    /// Descriptors of the program.
    pub(crate) descriptors: AtomicU32,
    /// Calls of the program that move octets in each [`Direction`], now.
    calls: [AtomicU32; 2],
    /// SIGURG has had an owner.
    has_owner: AtomicBool,
    /// A child of fork(2) may have a descriptor.
    pub(crate) is_shared: AtomicBool,
    /// Kernel calls move octets from now on: those of the relay are the only ones here.
    pub(crate) is_relayed: AtomicBool,
}

/// A socket that is locked. Where SIGURG has an owner, no handler of the program runs meanwhile in this
/// thread: it may call this library for the same socket.
pub(crate) struct Locked<'a> {
    state: MutexGuard<'a, State>,
    /// Dropped after the lock: handlers run then.
    signals: Option<BlockedSignals>,
}

impl Deref for Locked<'_> {
    type Target = State;

    fn deref(&self) -> &State {
        &self.state
    }
}

impl DerefMut for Locked<'_> {
    fn deref_mut(&mut self) -> &mut State {
        &mut self.state
    }
}

/// Where octets go.
#[derive(Clone, Copy)]
pub(crate) enum Direction {
    In,
    Out,
}

/// Whether a call waits, and for how long; none: for ever.
pub(crate) type Patience = (bool, Option<Duration>);

/// What a call ends with that the kernel is to do, because the socket is relayed. It is no error of the
/// system.
pub(crate) const KERNELS: Errno = Errno(-1);

/// A call of the program that moves octets, while it lasts.
pub(crate) struct Call<'a>(&'a AtomicU32);

impl Drop for Call<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::SeqCst);
    }
}

static NEXT: AtomicU64 = AtomicU64::new(1);

impl Socket {
    /// A new one; also the program's descriptor. `flags` are those of socket(2).
    pub(crate) fn new(flags: c_int) -> Result<(Arc<Self>, RawFd), Errno> {
        let (ready, fd) = Ready::new(flags)?;
        let state = State {
            phase: Phase::Idle,
            id: None,
            local: None,
            peer: None,
            queue: None,
            link: None,
            twin: None,
            shown: None,
            backlog: VecDeque::new(),
            listener: None,
            error: None,
            shut_read: false,
            closed: false,
            destroyed: false,
            options: Options::default(),
            parked: None,
            ready,
            led: false,
            waiting: 0,
            attended: false,
            lost_polls: 0,
            choice: Choice::default(),
            arrived: false,
        };
        let socket = Self {
            number: NEXT.fetch_add(1, Ordering::Relaxed),
            state: Mutex::new(state),
            changed: Condvar::new(),
            nonblocking: AtomicBool::new(flags & libc::SOCK_NONBLOCK != 0),
            descriptors: AtomicU32::new(0),
            calls: [const { AtomicU32::new(0) }; 2],
            has_owner: AtomicBool::new(false),
            is_shared: AtomicBool::new(false),
            is_relayed: AtomicBool::new(false),
        };
        Ok((Arc::new(socket), fd))
    }

    /// A call of the program begins.
    ///
    /// # Errors
    ///
    /// [`KERNELS`].
    pub(crate) fn call(&self, direction: Direction) -> Result<Call<'_>, Errno> {
        let calls = &self.calls[direction as usize];
        calls.fetch_add(1, Ordering::SeqCst);
        let call = Call(calls);
        if self.is_relayed() { Err(KERNELS) } else { Ok(call) }
    }

    /// Whether calls of the program move octets, which began before the relay.
    pub(crate) fn has_calls(&self, direction: Direction) -> bool {
        self.calls[direction as usize].load(Ordering::SeqCst) > 0
    }

    /// Whether kernel calls move octets: those of the relay are the only ones here.
    pub(crate) fn is_relayed(&self) -> bool {
        self.is_relayed.load(Ordering::SeqCst)
    }

    pub(crate) fn lock(&self) -> Locked<'_> {
        let signals = self.has_owner.load(Ordering::Relaxed).then(BlockedSignals::new);
        // A panic in a call leaves a socket whose calls still fail in order.
        Locked { state: self.state.lock().unwrap_or_else(PoisonError::into_inner), signals }
    }

    /// Whether a call waits.
    pub(crate) fn is_patient(&self, flags: c_int) -> bool {
        flags & libc::MSG_DONTWAIT == 0 && !self.nonblocking.load(Ordering::Relaxed)
    }

    /// Waits on the socket's condition for at most `most`.
    pub(crate) fn wait_change<'a>(&self, locked: Locked<'a>, most: Option<Duration>) -> Locked<'a> {
        let Locked { mut state, signals } = locked;
        state.waiting += 1;
        let mut state = match most {
            Some(most) => match self.changed.wait_timeout(state, most) {
                Ok((state, _)) => state,
                Err(poisoned) => poisoned.into_inner().0,
            },
            None => self.changed.wait(state).unwrap_or_else(PoisonError::into_inner),
        };
        state.waiting -= 1;
        Locked { state, signals }
    }

    /// From now on readiness is shown at the descriptor `fd` of the program: for epoll, or other processes.
    /// `edges`: every arrival anew. `urgent`: urgent bytes, too.
    pub(crate) fn watch(
        self: &Arc<Self>,
        fd: RawFd,
        edges: bool,
        urgent: bool,
    ) -> Result<(), Errno> {
        self.begin_watch(fd, |ready| {
            ready.always = true;
            ready.edges |= edges;
            ready.wants_urgent |= urgent;
        })
    }

    /// The program has said at the descriptor `fd` who gets SIGURG. The kernel keeps who that is. From now on
    /// the helper hears of what comes, as no call of the program may be at the socket.
    pub(crate) fn set_owner(self: &Arc<Self>, fd: RawFd) -> Result<(), Errno> {
        self.has_owner.store(true, Ordering::Relaxed);
        self.begin_watch(fd, |ready| ready.has_owner = true)
    }

    /// A thread is about to wait at the descriptor `fd` by poll or select. Only until
    /// [`end_poll`](Self::end_poll) readiness is shown: other calls do without the system calls for that, and
    /// no completion wakes the helper.
    pub(crate) fn begin_poll(self: &Arc<Self>, fd: RawFd, urgent: bool) -> Result<(), Errno> {
        self.begin_watch(fd, |ready| {
            ready.pollers += 1;
            ready.wants_urgent |= urgent;
        })
    }

    /// Whether an urgent byte is all that there is to read.
    pub(crate) fn has_urgent_only(&self) -> bool {
        let now = self.lock().readiness();
        now.urgent && !now.readable
    }

    /// That thread waits no more.
    pub(crate) fn end_poll(&self) {
        let ready = &mut self.lock().ready;
        ready.pollers = ready.pollers.saturating_sub(1);
    }

    fn begin_watch(
        self: &Arc<Self>,
        fd: RawFd,
        note: impl FnOnce(&mut Ready),
    ) -> Result<(), Errno> {
        let mut state = self.lock();
        if self.is_relayed() {
            // The kernel knows what it is ready for.
            return Ok(());
        }
        let is_new = !state.ready.was_watched();
        state.ready.watch(fd)?;
        note(&mut state.ready);
        if is_new && let Some(link) = &state.link {
            helper::serve(link.queue.fd, self.number)?;
        }
        self.settle(&mut state);
        Ok(())
    }

    /// Makes progress unless another thread does, shows readiness, and wakes who waits.
    pub(crate) fn settle(&self, state: &mut State) {
        if !state.led {
            state.progress();
            if state.ready.is_attended() || state.closed || state.attended {
                // What comes after the look is told by an event.
                if let Some(link) = &state.link {
                    link.arm();
                }
                state.progress();
            }
        }
        state.show();
        if state.waiting > 0 {
            self.changed.notify_all();
        }
    }
}

impl State {
    /// Takes in what has come; whether anything has.
    pub(crate) fn progress(&mut self) -> bool {
        let Some(link) = &mut self.link else { return false };
        let any = link.progress();
        self.arrived |= any;
        if any && link.connection.take_urgent_notice() {
            self.ready.signal_owner();
        }
        any
    }

    /// Shows readiness at the program's descriptor, if it waits there.
    pub(crate) fn show(&mut self) {
        let arrived = std::mem::take(&mut self.arrived);
        if self.ready.is_watched() {
            let now = self.readiness();
            self.ready.show(now, arrived);
        }
    }

    pub(crate) fn readiness(&self) -> Readiness {
        match self.phase {
            Phase::Idle => Readiness { writable: true, ..Readiness::default() },
            Phase::Listening => {
                Readiness { readable: !self.backlog.is_empty(), ..Readiness::default() }
            }
            Phase::Connecting => Readiness::default(),
            Phase::Failed => {
                let all = Readiness { readable: true, writable: true, ..Readiness::default() };
                Readiness { ended: true, hung_up: true, ..all }
            }
            Phase::Connected => self.link.as_ref().map_or_else(Readiness::default, |link| {
                let found = link.connection.readable();
                let failed = link.failure().is_some();
                let ended = found == Readable::End || self.shut_read || failed;
                let hung_up = failed || ended && link.connection.has_shut_write();
                Readiness {
                    readable: found != Readable::Nothing || ended,
                    urgent: link.connection.has_urgent(),
                    writable: link.is_writable() || failed || link.connection.has_shut_write(),
                    ended,
                    hung_up,
                }
            }),
        }
    }

    /// The connection.
    ///
    /// # Errors
    ///
    /// ENOTCONN; EAGAIN while it is being made; why it could not be.
    pub(crate) fn connected(&mut self) -> Result<&mut Link, Errno> {
        match self.phase {
            Phase::Connected => self.link.as_mut().ok_or(Errno::ENOTCONN),
            Phase::Connecting => Err(Errno::EAGAIN),
            Phase::Failed => Err(self.error.take().unwrap_or(Errno::ENOTCONN)),
            Phase::Idle | Phase::Listening => Err(Errno::ENOTCONN),
        }
    }

    /// It cannot be connected.
    pub(crate) fn fail(&mut self, why: Errno) {
        self.phase = Phase::Failed;
        self.error = Some(why);
        self.queue = None;
    }

    /// Gives everything back to the adapter.
    pub(crate) fn destroy(&mut self, adapter: &Adapter) {
        self.destroyed = true;
        (self.link, self.queue, self.listener, self.shown) = (None, None, None, None);
        for id in [self.id.take(), self.twin.take()].into_iter().flatten() {
            let _ = adapter.engine.cm_destroy_id(id);
        }
    }
}
