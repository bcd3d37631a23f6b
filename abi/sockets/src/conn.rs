//! What this process knows of each TCP socket of its own, and the table of descriptors.
//!
//! Objects live in a pool whose memory is never given back, so that a thread that is late may still
//! look at one: it then finds that the object is closed, or that the table has another.

mod pool;

use std::ptr;
use std::sync::Mutex;
use std::sync::atomic::{
    AtomicBool, AtomicI32, AtomicPtr, AtomicU8, AtomicU32, AtomicU64, Ordering,
};

use libc::c_int;
use quipu_sockets::direction::wish;
use quipu_sockets::patience::{Overflow, Patience};
use quipu_sockets::report::Reason;

use crate::idleness::Idleness;
use crate::map::Map;
use crate::owners::{Owners, Slot};
use crate::send_lock::SendLock;
use crate::set::Set;
use crate::{helper, sys, totals};

use pool::pool_take;
pub(crate) use pool::{for_all, for_all_at_end, hold_pool};

/// Messages in each direction after which a connection is worth raising.
const MESSAGES: u32 = 8;
/// Long messages in one direction after which it is, too: a stream that nobody answers. Short ones are as
/// fast over TCP, which joins them.
const ONE_WAY: u32 = 32;
const LONG: usize = 8 * 1024;
/// Octets that one call receives over TCP if they are of a stream: the next are probably there.
const STREAMED: usize = 4096;
/// The same after the other end was not found: the ends of such a stream make different numbers of calls, and
/// so ask at different times.
const ONCE_MORE: u32 = 512;
/// In `users`: the program has closed its last descriptor.
const CLOSED: u32 = 1 << 31;

/// How far a connection has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum Mode {
    /// The kernel's, for good.
    Plain,
    /// The kernel's; messages are counted.
    Young,
    /// The helper asks the other end.
    Asking,
    /// Both ends share memory.
    Raised,
}

/// A TCP socket.
pub(crate) struct Conn {
    mode: AtomicU8,
    reason: AtomicU8,
    /// It becomes plain as soon as its rings are empty.
    pub(crate) leaving: AtomicBool,
    /// Calls under way, and [`CLOSED`].
    users: AtomicU32,
    map: AtomicPtr<Map>,
    /// Threads that are receiving, or wait for something to receive; that are sending.
    pub(crate) receiving: AtomicU32,
    pub(crate) sending: AtomicU32,
    /// Whether the positions in the shared memory are right.
    pub(crate) receives: AtomicBool,
    pub(crate) sends: AtomicBool,
    /// `O_NONBLOCK`, as far as this process knows.
    pub(crate) nonblocking: AtomicBool,
    /// `TCP_NODELAY`, as the program has set it: see [`Conn::take_nodelay`].
    pub(crate) nodelay: AtomicBool,
    /// The option is the library's now.
    pub(crate) has_nodelay: AtomicBool,
    /// It has called connect(2).
    pub(crate) initiator: AtomicBool,
    messages_sent: AtomicU32,
    messages_received: AtomicU32,
    /// Those of both directions that were long.
    long_messages: AtomicU32,
    /// The other end was asked, and not found.
    was_asked: AtomicBool,
    /// Cookie of the socket, once it is raised.
    pub(crate) cookie: AtomicU64,
    /// Where the receiver was, and one, when the helper last found octets unread; 0 if there were none.
    pub(crate) stuck_at: AtomicU64,
    /// For the helper: see [`Idleness`].
    pub(crate) idleness: Idleness,
    /// Sends since the kernel was asked whether the peer is alive.
    pub(crate) unasked: AtomicU32,
    /// The error number with which TCP refused octets of the ring: the program's next send has it. 0: none.
    pub(crate) failed: AtomicU32,
    /// One of its descriptors, and their number.
    fd: AtomicI32,
    descriptors: AtomicU32,
    owners: Owners,
    /// The epoll set that has it, if there is one.
    pub(crate) set: AtomicPtr<Set>,
    /// The program waits for it by calls of this library: receives, poll, select.
    pub(crate) is_watched: AtomicBool,
    /// The set that has it may look at its ring: see `set`.
    pub(crate) is_quick_member: AtomicBool,
    /// It has received something since its set last slept.
    pub(crate) is_touched: AtomicBool,
    /// Looking at its ring costs too much before this time: all octets are to come over TCP.
    pub(crate) rests_until: AtomicU64,
    /// What it received last came over TCP, and was long.
    pub(crate) is_fed_by_tcp: AtomicBool,
    /// It is in the list of those that the set asks for their consent.
    pub(crate) is_candidate: AtomicBool,
    pub(crate) patience: Mutex<Patience>,
    /// Messages received from the ring since a receiver last looked.
    pub(crate) ring_messages: AtomicU64,
    overflow: Mutex<Overflow>,
    /// The ring is not to be opened before this time; 0 if it may.
    closed_until: AtomicU64,
    /// When a thread began to wait for something to receive; 0 if none does.
    waits_since: AtomicU64,
    pub(crate) counters: Counters,
    /// Grows with each socket that uses this object.
    pub(crate) life: AtomicU32,
    is_used: AtomicBool,
}

/// What is counted of a connection. Octets through rings; octets over TCP since it was raised.
#[derive(Default)]
pub(crate) struct Counters {
    pub(crate) sent: AtomicU64,
    pub(crate) received: AtomicU64,
    pub(crate) tcp_sent: AtomicU64,
    pub(crate) tcp_received: AtomicU64,
    pub(crate) withdrawals: AtomicU64,
}

impl Counters {
    pub(crate) fn all(&self) -> [&AtomicU64; 5] {
        [&self.sent, &self.received, &self.tcp_sent, &self.tcp_received, &self.withdrawals]
    }
}

/// Adds to a counter.
#[inline]
pub(crate) fn count(counter: &AtomicU64, len: usize) {
    counter.store(counter.load(Ordering::Relaxed) + len as u64, Ordering::Relaxed);
}

impl Conn {
    fn new() -> Self {
        Self {
            mode: AtomicU8::new(0),
            reason: AtomicU8::new(0),
            leaving: AtomicBool::new(false),
            users: AtomicU32::new(CLOSED),
            map: AtomicPtr::new(ptr::null_mut()),
            receiving: AtomicU32::new(0),
            sending: AtomicU32::new(0),
            receives: AtomicBool::new(false),
            sends: AtomicBool::new(false),
            nonblocking: AtomicBool::new(false),
            nodelay: AtomicBool::new(false),
            has_nodelay: AtomicBool::new(false),
            initiator: AtomicBool::new(false),
            messages_sent: AtomicU32::new(0),
            messages_received: AtomicU32::new(0),
            long_messages: AtomicU32::new(0),
            was_asked: AtomicBool::new(false),
            cookie: AtomicU64::new(0),
            stuck_at: AtomicU64::new(0),
            idleness: Idleness::default(),
            unasked: AtomicU32::new(0),
            failed: AtomicU32::new(0),
            fd: AtomicI32::new(-1),
            descriptors: AtomicU32::new(0),
            owners: Owners::none(),
            set: AtomicPtr::new(ptr::null_mut()),
            is_watched: AtomicBool::new(false),
            is_quick_member: AtomicBool::new(false),
            is_touched: AtomicBool::new(false),
            rests_until: AtomicU64::new(0),
            is_fed_by_tcp: AtomicBool::new(false),
            is_candidate: AtomicBool::new(false),
            patience: Mutex::new(Patience::default()),
            ring_messages: AtomicU64::new(0),
            overflow: Mutex::new(Overflow::default()),
            closed_until: AtomicU64::new(0),
            waits_since: AtomicU64::new(0),
            counters: Counters::default(),
            life: AtomicU32::new(0),
            is_used: AtomicBool::new(false),
        }
    }

    /// A new object for a descriptor.
    pub(crate) fn create(fd: c_int, nonblocking: bool) -> Option<&'static Self> {
        let owners = Owners::take()?;
        let conn = pool_take();
        conn.life.fetch_add(1, Ordering::Relaxed);
        let flags = [&conn.leaving, &conn.receives, &conn.sends, &conn.initiator, &conn.is_watched];
        let more = [&conn.is_quick_member, &conn.is_candidate, &conn.is_fed_by_tcp];
        let taken = [&conn.was_asked, &conn.has_nodelay];
        for flag in flags.into_iter().chain(more).chain(taken) {
            flag.store(false, Ordering::Relaxed);
        }
        let numbers =
            [&conn.receiving, &conn.sending, &conn.messages_sent, &conn.messages_received];
        for number in numbers.into_iter().chain([&conn.unasked, &conn.long_messages, &conn.failed])
        {
            number.store(0, Ordering::Relaxed);
        }
        conn.idleness.begin();
        conn.nonblocking.store(nonblocking, Ordering::Relaxed);
        conn.set.store(ptr::null_mut(), Ordering::Relaxed);
        conn.map.store(ptr::null_mut(), Ordering::Relaxed);
        conn.fd.store(fd, Ordering::Relaxed);
        conn.descriptors.store(0, Ordering::Relaxed);
        conn.owners.replace(owners);
        // Nobody uses the object. A thread that was looking when its process forked this one has them
        // for good.
        let _ = conn.patience.try_lock().map(|mut patience| *patience = Patience::default());
        let _ = conn.overflow.try_lock().map(|mut overflow| *overflow = Overflow::default());
        for number in [&conn.stuck_at, &conn.ring_messages, &conn.closed_until, &conn.rests_until] {
            number.store(0, Ordering::Relaxed);
        }
        conn.reason.store(Reason::Young as u8, Ordering::Relaxed);
        conn.mode.store(Mode::Young as u8, Ordering::Relaxed);
        conn.users.fetch_and(!CLOSED, Ordering::SeqCst);
        Some(conn)
    }

    /// How far it has come.
    #[inline]
    pub(crate) fn mode(&self) -> Mode {
        match self.mode.load(Ordering::Acquire) {
            1 => Mode::Young,
            2 => Mode::Asking,
            3 => Mode::Raised,
            _ => Mode::Plain,
        }
    }

    /// Why it is not raised.
    pub(crate) fn reason(&self) -> Reason {
        Reason::from_number(self.reason.load(Ordering::Relaxed))
    }

    /// Begins to use it. False if it was closed.
    #[inline]
    pub(crate) fn enter(&self) -> bool {
        if self.users.fetch_add(1, Ordering::SeqCst) & CLOSED == 0 {
            return true;
        }
        self.leave();
        false
    }

    /// Ends to use it.
    #[inline]
    pub(crate) fn leave(&self) {
        if self.users.fetch_sub(1, Ordering::SeqCst) == CLOSED + 1 {
            self.reclaim();
        }
    }

    /// The last use of a closed object.
    #[cold]
    fn reclaim(&self) {
        let map = self.map.swap(ptr::null_mut(), Ordering::SeqCst);
        if !map.is_null() {
            // SAFETY: it came from a box, and nobody else uses it.
            drop(unsafe { Box::from_raw(map) });
        }
        self.mode.store(Mode::Plain as u8, Ordering::SeqCst);
        totals::keep(&self.counters);
        self.is_used.store(false, Ordering::Release);
    }

    /// The shared memory, while it is raised. The caller is between [`enter`](Self::enter) and
    /// [`leave`](Self::leave).
    #[inline]
    pub(crate) fn map(&self) -> Option<&Map> {
        if self.mode() != Mode::Raised {
            return None;
        }
        // SAFETY: it is freed by the last to leave.
        unsafe { self.map.load(Ordering::Acquire).as_ref() }
    }

    /// One of its descriptors.
    pub(crate) fn fd(&self) -> c_int {
        self.fd.load(Ordering::Relaxed)
    }

    /// Whether no other process has the socket.
    #[inline]
    pub(crate) fn is_sole_owner(&self) -> bool {
        self.owners.is_one()
    }

    /// What it shares with the other processes that have the socket.
    #[inline]
    pub(crate) fn shared(&self) -> Option<&'static Slot> {
        self.owners.slot()
    }

    /// Whether TCP takes nothing any more, since the program has shut it down. What is in the ring then stays
    /// there: the receiver reads it before the end of the stream.
    pub(crate) fn is_shut(&self) -> bool {
        self.shared().is_some_and(|slot| slot.shut.load(Ordering::SeqCst) != 0)
    }

    /// The program is about to shut TCP down.
    pub(crate) fn shut(&self) {
        if let Some(slot) = self.shared() {
            slot.shut.store(1, Ordering::SeqCst);
        }
    }

    /// Another process has the socket too from now on.
    pub(crate) fn add_owner(&self) {
        self.owners.add();
    }

    /// A process has the socket no more. Whether it was the last.
    pub(crate) fn remove_owner(&self) -> bool {
        self.owners.remove()
    }

    /// Gives the memory of the ring in which this end sends back to the system, if it is idle. The caller,
    /// the helper, is between [`enter`](Self::enter) and [`leave`](Self::leave).
    pub(crate) fn trim_idle_ring(&self, map: &Map) {
        if self.idleness.has_begun(self.counters.sent.load(Ordering::Relaxed)) {
            match SendLock::take(self) {
                Some(_lock) if map.sender().unread().is_none_or(|it| it.0 == 0) => {
                    map.forget_sent()
                }
                _ => self.idleness.has_memory_again(),
            }
        }
    }

    /// Counts a message, and has the other end asked when there were enough.
    #[inline]
    pub(crate) fn note_message(&'static self, sent: bool) {
        if self.mode() == Mode::Young {
            self.grow_up(sent);
        }
    }

    #[cold]
    fn grow_up(&'static self, sent: bool) {
        let own = if sent { &self.messages_sent } else { &self.messages_received };
        let count = own.fetch_add(1, Ordering::Relaxed) + 1;
        let other = if sent { &self.messages_received } else { &self.messages_sent };
        let both = count.min(other.load(Ordering::Relaxed));
        if both >= MESSAGES && !self.was_asked.load(Ordering::Relaxed) {
            self.ask();
        }
    }

    /// Counts what a call has moved, and has the other end asked when there were enough long messages.
    #[inline]
    pub(crate) fn note_length(&'static self, len: usize) {
        if len >= LONG && self.mode() == Mode::Young {
            self.grow_long();
        }
    }

    #[cold]
    fn grow_long(&'static self) {
        let count = self.long_messages.fetch_add(1, Ordering::Relaxed) + 1;
        let needed = if self.was_asked.load(Ordering::Relaxed) { ONCE_MORE } else { ONE_WAY };
        if count >= needed {
            self.ask();
        }
    }

    fn ask(&'static self) {
        if !crate::process::is_enabled() {
            self.give_up(Mode::Young, Reason::Disabled);
        } else if !self.is_sole_owner() {
            // It may be the only one later.
            self.reason.store(Reason::Shared as u8, Ordering::Relaxed);
            for number in [&self.messages_sent, &self.messages_received, &self.long_messages] {
                number.store(0, Ordering::Relaxed);
            }
        } else if self.change(Mode::Young, Mode::Asking) {
            self.reason.store(Reason::Asking as u8, Ordering::Relaxed);
            helper::ask(self);
        }
    }

    fn change(&self, from: Mode, to: Mode) -> bool {
        let (from, to) = (from as u8, to as u8);
        self.mode.compare_exchange(from, to, Ordering::SeqCst, Ordering::SeqCst).is_ok()
    }

    /// Stays plain for good, if it is still in that mode.
    pub(crate) fn give_up(&self, from: Mode, reason: Reason) {
        if self.change(from, Mode::Plain) {
            self.reason.store(reason as u8, Ordering::Relaxed);
        }
    }

    /// The other end was not found. It is asked once more, later, if the connection is still used then.
    pub(crate) fn not_found(&self) {
        if self.was_asked.swap(true, Ordering::Relaxed) {
            self.give_up(Mode::Asking, Reason::NoPeer);
        } else {
            self.reason.store(Reason::NoPeer as u8, Ordering::Relaxed);
            self.change(Mode::Asking, Mode::Young);
        }
    }

    /// The helper and the other end have agreed. The memory is dropped where it is too late.
    pub(crate) fn raise(&self, map: Map, cookie: u64) {
        self.cookie.store(cookie, Ordering::Relaxed);
        if !self.is_sole_owner() {
            return self.give_up(Mode::Asking, Reason::Shared);
        }
        let map = Box::into_raw(Box::new(map));
        self.map.store(map, Ordering::SeqCst);
        if self.change(Mode::Asking, Mode::Raised) {
            self.reason.store(Reason::None as u8, Ordering::Relaxed);
            totals::RAISES.add(1);
            crate::set::raised(self);
        }
    }

    /// Has it stay with the kernel from now on: at once, or as soon as its rings are empty. The
    /// caller is between [`enter`](Self::enter) and [`leave`](Self::leave).
    pub(crate) fn make_plain(&self, reason: Reason) {
        self.give_up(Mode::Young, reason);
        self.give_up(Mode::Asking, reason);
        let Some(map) = self.map() else { return };
        self.leave_ring(reason);
        map.receiver().wish(wish::PLAIN);
        let _ = map.receiver().revoke();
        crate::send::settle(self, map);
        self.give_nodelay_back();
    }

    /// From now on no ring is opened.
    pub(crate) fn leave_ring(&self, reason: Reason) {
        self.reason.store(reason as u8, Ordering::Relaxed);
        if !self.leaving.swap(true, Ordering::SeqCst) {
            totals::LOWERS.add(1);
        }
    }

    /// Whether a send, the only one under way, may open the ring.
    #[inline]
    pub(crate) fn may_open(&self) -> bool {
        self.sending.load(Ordering::SeqCst) == 1
            && !self.leaving.load(Ordering::Relaxed)
            && self.is_sole_owner()
            && (self.closed_until.load(Ordering::Relaxed) == 0 || self.has_paused())
    }

    #[cold]
    fn has_paused(&self) -> bool {
        let is_over = sys::now_ns() >= self.closed_until.load(Ordering::Relaxed);
        if is_over {
            self.closed_until.store(0, Ordering::Relaxed);
        }
        is_over
    }

    /// Whether the receiver leaves everything to the kernel for now.
    #[inline]
    pub(crate) fn is_resting(&self) -> bool {
        let until = self.rests_until.load(Ordering::Relaxed);
        until != 0 && sys::now_ns() < until
    }

    /// Octets have come over TCP.
    pub(crate) fn fed_by_tcp(&self, len: usize) {
        count(&self.counters.tcp_received, len);
        self.is_fed_by_tcp.store(len >= STREAMED, Ordering::Relaxed);
    }

    /// The ring was full, and is taken back: it stays closed for a while.
    #[cold]
    pub(crate) fn pause(&self) {
        if let Ok(mut overflow) = self.overflow.try_lock() {
            let until =
                overflow.happened(sys::now_ns(), self.counters.sent.load(Ordering::Relaxed));
            self.closed_until.store(until, Ordering::Relaxed);
        }
    }

    /// This thread is about to sleep until there is something to receive.
    pub(crate) fn begin_wait(&self) {
        self.waits_since.store(sys::now_ns(), Ordering::Relaxed);
    }

    /// It is awake again.
    pub(crate) fn end_wait(&self) {
        let since = self.waits_since.swap(0, Ordering::Relaxed);
        totals::WAKE_UPS.add(u64::from(since != 0));
        if since != 0
            && let Ok(mut patience) = self.patience.try_lock()
        {
            patience.waited(sys::now_ns() - since);
        }
    }

    /// Has the kernel send small segments at once. Its acknowledgements go with what the other end sends over
    /// TCP; where that goes through memory, Nagle's algorithm would wait for 40 ms.
    #[cold]
    pub(crate) fn take_nodelay(&self) {
        if self.leaving.load(Ordering::SeqCst) || self.has_nodelay.swap(true, Ordering::SeqCst) {
            return;
        }
        let (fd, level, name) = (self.fd(), libc::IPPROTO_TCP, libc::TCP_NODELAY);
        let now: Option<c_int> = sys::option(fd, level, name);
        self.nodelay.store(now == Some(1), Ordering::SeqCst);
        sys::set_option(fd, level, name, 1);
        if self.leaving.load(Ordering::SeqCst) {
            self.give_nodelay_back();
        }
    }

    /// Gives the option back to the program: the connection is leaving.
    pub(crate) fn give_nodelay_back(&self) {
        if self.has_nodelay.swap(false, Ordering::SeqCst) && !self.nodelay.load(Ordering::SeqCst) {
            sys::set_option(self.fd(), libc::IPPROTO_TCP, libc::TCP_NODELAY, 0);
        }
    }

    /// Whether the other end answers. A stream in one direction is faster over TCP with Nagle's algorithm.
    pub(crate) fn is_mutual(&self) -> bool {
        let count = |messages: &AtomicU32| messages.load(Ordering::Relaxed);
        count(&self.messages_sent).min(count(&self.messages_received)) >= MESSAGES
    }

    /// Whether it may promise to look at the ring: nobody of this end sleeps in the kernel.
    #[inline]
    pub(crate) fn may_consent(&self, own: u32) -> bool {
        self.receives.load(Ordering::Relaxed)
            && self.receiving.load(Ordering::SeqCst) == own
            && !self.leaving.load(Ordering::Relaxed)
            && self.is_sole_owner()
    }

    /// Whether a descriptor is still its own: another thread may have closed it, and the number may be
    /// that of another file now.
    #[inline]
    pub(crate) fn has(&self, fd: c_int) -> bool {
        crate::table::conn(fd).is_some_and(|now| ptr::eq(now, self))
    }

    /// It has one more descriptor.
    pub(crate) fn add_descriptor(&self) {
        self.descriptors.fetch_add(1, Ordering::Relaxed);
    }

    /// It has one descriptor less. Whether that was the last; the caller then closes the object.
    pub(crate) fn remove_descriptor(&self, fd: c_int) -> bool {
        let last = self.descriptors.fetch_sub(1, Ordering::Relaxed) == 1;
        if !last && self.fd() == fd {
            self.fd.store(crate::table::another_of(self, fd), Ordering::Relaxed);
        }
        last
    }

    /// The program has no descriptor of it any more.
    pub(crate) fn close(&self) {
        if self.users.fetch_or(CLOSED, Ordering::SeqCst) == 0 {
            self.reclaim();
        }
    }

    /// In a child of fork(2): threads that were in a call are not there.
    pub(crate) fn forget_threads(&self) {
        self.receiving.store(0, Ordering::Relaxed);
        self.sending.store(0, Ordering::Relaxed);
        let closed = self.users.load(Ordering::Relaxed) & CLOSED;
        self.users.store(closed, Ordering::Relaxed);
        self.change(Mode::Asking, Mode::Young);
    }

    /// Whether a socket uses it.
    pub(crate) fn is_open(&self) -> bool {
        self.is_used.load(Ordering::Acquire) && self.users.load(Ordering::SeqCst) & CLOSED == 0
    }
}

/// The peer broke the protocol: what it says is not believed any more.
#[cold]
pub(crate) fn break_off(conn: &Conn, map: &Map) {
    conn.leave_ring(Reason::Fault);
    map.receiver().wish(wish::PLAIN);
    conn.give_nodelay_back();
    conn.change(Mode::Raised, Mode::Plain);
}
