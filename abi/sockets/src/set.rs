//! Epoll sets: which raised sockets are in one, and what their rings have to report.
//!
//! The kernel's set has every socket, with the program's own mask and data. What is here lets
//! `epoll_wait` return without a system call what the rings have. Before a thread sleeps in the
//! kernel's set, it revokes the consents that were given for the set: then everything comes over
//! TCP, and the kernel reports it, by its own rules for levels, edges and nested sets.

mod locked;
mod member;

use std::collections::HashMap;
use std::ptr;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU32, AtomicUsize, Ordering};

use libc::{c_int, epoll_event};
use quipu_sockets::Revoked;
use quipu_sockets::direction::wish;
use quipu_sockets::patience::Patience;
use quipu_sockets::report::Reason;

use crate::conn::{Conn, Mode};
use crate::spin::Spin;
use crate::sys;
use crate::table::{self, Entry};

use locked::{Locked, is_interrupted, lock};
use member::{Active, Member};

/// Most sockets of a set that have consented at a time: each wait looks at all of them.
const MAX_ACTIVE: usize = 512;
/// Sockets whose senders' processors are looked at.
const MAX_SENDERS: usize = 16;
/// Sockets that handlers close during one call. Those beyond stay in the set, closed.
const MAX_STALE: usize = 64;
/// Waits in a row, and time, in which rings alone are looked at.
const RING_WAITS: u32 = 16;
const RING_NS: u64 = 50_000;
/// Sleeps in a row after which a socket that received nothing is not asked to consent any more.
const MAX_IDLE: u32 = 4;
/// No position: the next look reports.
const NOT_TOLD: u64 = u64::MAX;

/// An epoll set.
pub(crate) struct Set {
    inner: Mutex<Inner>,
    /// Sockets that have received something since they last consented.
    candidates: Mutex<Vec<&'static Conn>>,
    /// Threads that sleep in the kernel's set.
    sleepers: AtomicU32,
    /// Whether rings may be used for its sockets: it is not in another set, and this process made it.
    is_quick: AtomicBool,
    /// Whether one of its sockets was raised. If not, the set is left to the kernel.
    has_rings: AtomicBool,
    descriptors: AtomicU32,
    /// A handler of a signal has closed sockets of it while its thread had a lock.
    has_stale: AtomicBool,
    stale: [AtomicPtr<Conn>; MAX_STALE],
    /// Sockets whose rings were looked at last.
    watched: AtomicUsize,
}

#[derive(Default)]
struct Inner {
    members: HashMap<c_int, Member>,
    /// Sockets that have consented.
    active: Vec<Active>,
    /// Those that had before a thread began to sleep: they consent again when it wakes.
    dormant: Vec<Active>,
    ring_waits: u32,
    asked_kernel: u64,
    patience: Patience,
    /// When the last thread began to sleep; 0 if none does.
    sleeps_since: u64,
}

/// Sets that are not in use, and all that there are.
static FREE: Mutex<Vec<&'static Set>> = Mutex::new(Vec::new());
static ALL: Mutex<Vec<&'static Set>> = Mutex::new(Vec::new());

/// A socket has received something. It consents, if nobody sleeps at its set: the next wait looks at
/// its ring. The caller is receiving.
#[inline]
pub(crate) fn note(conn: &'static Conn) {
    let set = conn.set.load(Ordering::Acquire);
    if set.is_null() || !conn.is_quick_member.load(Ordering::Relaxed) {
        return;
    }
    // SAFETY: sets are never freed.
    let set = unsafe { &*set };
    if !set.is_quick.load(Ordering::SeqCst)
        || set.sleepers.load(Ordering::SeqCst) > 0
        || !conn.may_consent(1)
    {
        return;
    }
    conn.is_touched.store(true, Ordering::Relaxed);
    if !set.add_candidate(conn) {
        return;
    }
    let Some(map) = conn.map() else { return };
    map.receiver().consent();
    if set.sleepers.load(Ordering::SeqCst) > 0 || !set.is_quick.load(Ordering::SeqCst) {
        let _ = map.receiver().revoke();
    }
}

/// A socket was raised: from now on its set looks at rings.
pub(crate) fn raised(conn: &Conn) {
    let set = conn.set.load(Ordering::SeqCst);
    if !set.is_null() {
        // SAFETY: sets are never freed.
        unsafe { &*set }.has_rings.store(true, Ordering::SeqCst);
    }
}

/// A socket has no descriptor any more.
pub(crate) fn forget(conn: &'static Conn) {
    let set = conn.set.swap(ptr::null_mut(), Ordering::SeqCst);
    if set.is_null() {
        return;
    }
    // SAFETY: sets are never freed.
    let set = unsafe { &*set };
    if is_interrupted() {
        // The interrupted call may be looking at it. It leaves when the next one forgets it.
        if conn.enter() {
            let (none, new) = (ptr::null_mut(), ptr::from_ref(conn).cast_mut());
            let order = Ordering::SeqCst;
            set.stale.iter().any(|it| it.compare_exchange(none, new, order, order).is_ok());
            set.has_stale.store(true, order);
        }
        return;
    }
    let mut inner = lock(&set.inner);
    set.let_go(&mut inner, conn);
    // The helper may raise one meanwhile, without the lock.
    set.has_rings.store(false, Ordering::SeqCst);
    if inner.members.values().any(|member| member.conn.mode() == Mode::Raised) {
        set.has_rings.store(true, Ordering::SeqCst);
    }
}

/// In a child of fork(2): the sets are the parent's too.
pub(crate) fn forget_all() {
    for set in lock(&ALL).iter() {
        set.is_quick.store(false, Ordering::Relaxed);
        set.sleepers.store(0, Ordering::Relaxed);
    }
}

/// The locks of this module, for fork(2).
pub(crate) fn hold_all() -> Vec<Box<dyn Kept>> {
    let all = lock(&ALL);
    let mut held: Vec<Box<dyn Kept>> = Vec::new();
    for set in all.iter().copied() {
        held.push(Box::new(lock(&set.inner)));
        held.push(Box::new(lock(&set.candidates)));
    }
    held.push(Box::new(all));
    held.push(Box::new(lock(&FREE)));
    held
}

/// Anything that is only kept.
pub(crate) trait Kept {}
impl<T> Kept for T {}

impl Set {
    /// A set for a new descriptor.
    pub(crate) fn create() -> &'static Self {
        if let Some(set) = lock(&FREE).pop() {
            set.is_quick.store(true, Ordering::SeqCst);
            return set;
        }
        let set: &'static Self = Box::leak(Box::new(Self {
            inner: Mutex::default(),
            candidates: Mutex::default(),
            sleepers: AtomicU32::new(0),
            is_quick: AtomicBool::new(true),
            has_rings: AtomicBool::new(false),
            descriptors: AtomicU32::new(0),
            has_stale: AtomicBool::new(false),
            stale: [const { AtomicPtr::new(ptr::null_mut()) }; MAX_STALE],
            watched: AtomicUsize::new(0),
        }));
        lock(&ALL).push(set);
        set
    }

    pub(crate) fn add_descriptor(&self) {
        self.descriptors.fetch_add(1, Ordering::SeqCst);
    }

    /// It has one descriptor less.
    pub(crate) fn remove_descriptor(&'static self) {
        if self.descriptors.fetch_sub(1, Ordering::SeqCst) != 1 {
            return;
        }
        if is_interrupted() {
            // It is not used again.
            return self.is_quick.store(false, Ordering::SeqCst);
        }
        let mut inner = lock(&self.inner);
        self.forget_stale(&mut inner);
        for (_, member) in inner.members.drain() {
            member.conn.set.store(ptr::null_mut(), Ordering::SeqCst);
            member.conn.is_candidate.store(false, Ordering::SeqCst);
        }
        *inner = Inner::default();
        self.has_rings.store(false, Ordering::SeqCst);
        lock(&self.candidates).clear();
        drop(inner);
        self.is_quick.store(false, Ordering::SeqCst);
        lock(&FREE).push(self);
    }

    /// Has the next wait look at a socket's ring. False if there are too many.
    fn add_candidate(&self, conn: &'static Conn) -> bool {
        if conn.is_candidate.load(Ordering::SeqCst) {
            return true;
        }
        if conn.mode() != Mode::Raised || self.watched.load(Ordering::Relaxed) >= MAX_ACTIVE {
            return false;
        }
        if !conn.is_candidate.swap(true, Ordering::SeqCst) {
            let mut candidates = lock(&self.candidates);
            candidates.push(conn);
        }
        true
    }

    /// The set is waited for by other means than `epoll_wait`: it is in another set, or is polled.
    pub(crate) fn leave_to_kernel(&self) {
        if self.is_quick.swap(false, Ordering::SeqCst) {
            self.quiesce(&mut lock(&self.inner));
        }
    }

    /// Has everything come over TCP from now on, until consents are given again.
    fn quiesce(&self, inner: &mut Inner) {
        self.gather(inner);
        for Active { conn, .. } in std::mem::take(&mut inner.dormant) {
            conn.is_candidate.store(false, Ordering::SeqCst);
        }
        for Active { conn, .. } in std::mem::take(&mut inner.active) {
            conn.is_candidate.store(false, Ordering::SeqCst);
            if let Some(map) = conn.map()
                && map.receiver().revoke() == Revoked::Unread
            {
                map.receiver().wish(wish::WAKE);
            }
        }
    }

    /// Calls epoll_ctl(2), and notes what it changes.
    pub(crate) fn control(
        &'static self,
        epfd: c_int,
        op: c_int,
        fd: c_int,
        event: *mut epoll_event,
    ) -> c_int {
        let mut inner = lock(&self.inner);
        let result = sys::call!(SYS_epoll_ctl, epfd, op, fd, event) as c_int;
        if result != 0 {
            return result;
        }
        match table::get(fd) {
            Some(Entry::Set(inside)) if !ptr::eq(inside, self) && op == libc::EPOLL_CTL_ADD => {
                // fork(2) takes the locks of all sets, in another order.
                drop(inner);
                inside.leave_to_kernel();
            }
            Some(Entry::Conn(conn)) if conn.mode() != Mode::Plain => {
                // SAFETY: the kernel has just read it, where the operation has one.
                let event = unsafe { event.as_ref() }.copied();
                self.note_control(&mut inner, op, fd, conn, event);
            }
            _ => {}
        }
        0
    }

    fn note_control(
        &'static self,
        inner: &mut Inner,
        op: c_int,
        fd: c_int,
        conn: &'static Conn,
        event: Option<epoll_event>,
    ) {
        match (op, event) {
            (libc::EPOLL_CTL_ADD, Some(event)) => {
                if !conn.set.load(Ordering::SeqCst).is_null() {
                    // Two sets would have to be told of each arrival.
                    if conn.enter() {
                        conn.make_plain(Reason::Feature);
                        conn.leave();
                    }
                    return;
                }
                let member = Member { conn, events: event.events, data: event.u64, told: NOT_TOLD };
                inner.members.insert(fd, member);
                conn.is_quick_member.store(member.is_quick(), Ordering::SeqCst);
                conn.set.store(ptr::from_ref(self).cast_mut(), Ordering::SeqCst);
                if conn.mode() == Mode::Raised {
                    self.has_rings.store(true, Ordering::SeqCst);
                }
                // It may have consented before.
                self.add_candidate(conn);
            }
            (libc::EPOLL_CTL_MOD, Some(event)) => {
                if let Some(member) = inner.members.get_mut(&fd) {
                    (member.events, member.data) = (event.events, event.u64);
                    member.told = NOT_TOLD;
                    conn.is_quick_member.store(member.is_quick(), Ordering::SeqCst);
                    self.add_candidate(conn);
                }
            }
            (libc::EPOLL_CTL_DEL, _) if inner.members.remove(&fd).is_some() => {
                self.stop_looking(inner, conn);
                conn.is_candidate.store(false, Ordering::SeqCst);
                conn.is_quick_member.store(false, Ordering::SeqCst);
                conn.set.store(ptr::null_mut(), Ordering::SeqCst);
            }
            _ => {}
        }
    }

    /// Forgets sockets that were closed where that was not possible.
    fn forget_stale(&self, inner: &mut Inner) {
        if !self.has_stale.load(Ordering::Relaxed) || !self.has_stale.swap(false, Ordering::SeqCst)
        {
            return;
        }
        for place in &self.stale {
            let conn = place.swap(ptr::null_mut(), Ordering::SeqCst);
            // SAFETY: sockets are never freed.
            let Some(conn) = (unsafe { conn.as_ref() }) else { continue };
            self.let_go(inner, conn);
            conn.leave();
        }
    }

    /// A socket is not in the set any more.
    fn let_go(&self, inner: &mut Inner, conn: &Conn) {
        inner.members.retain(|_, member| !ptr::eq(member.conn, conn));
        self.stop_looking(inner, conn);
    }

    /// Looks at a socket's ring no more.
    fn stop_looking(&self, inner: &mut Inner, conn: &Conn) {
        inner.active.retain(|active| !ptr::eq(active.conn, conn));
        inner.dormant.retain(|active| !ptr::eq(active.conn, conn));
        lock(&self.candidates).retain(|candidate| !ptr::eq(*candidate, conn));
    }

    /// Takes the candidates to those whose rings are looked at.
    fn gather(&self, inner: &mut Inner) {
        self.forget_stale(inner);
        let mut candidates = lock(&self.candidates);
        for conn in candidates.drain(..) {
            let is_there =
                |(fd, member): (&c_int, &Member)| ptr::eq(member.conn, conn).then_some(*fd);
            let own = inner.members.get_key_value(&conn.fd()).and_then(is_there);
            match own.or_else(|| inner.members.iter().find_map(is_there)) {
                Some(fd) => inner.active.push(Active { fd, conn, idle: 0 }),
                None => conn.is_candidate.store(false, Ordering::SeqCst),
            }
        }
        self.watched.store(inner.active.len() + inner.dormant.len(), Ordering::Relaxed);
    }

    /// Writes what the rings have to report. How many events that is.
    fn collect(&self, inner: &mut Inner, events: *mut epoll_event, max: usize) -> usize {
        let mut count = 0;
        let mut reported = 0;
        for index in 0..inner.active.len() {
            if count == max {
                break;
            }
            let fd = inner.active[index].fd;
            let Some(member) = inner.members.get_mut(&fd) else { continue };
            if let Some((event, head)) = member.report() {
                member.told = head;
                // SAFETY: the program's array has room for `max` events.
                unsafe { events.add(count).write_unaligned(event) };
                count += 1;
                reported = index + 1;
            }
        }
        if count == max {
            // The others come first the next time.
            inner.active.rotate_left(reported);
        }
        count
    }

    fn has_news(inner: &Inner) -> bool {
        inner
            .active
            .iter()
            .any(|Active { conn, .. }| conn.map().is_some_and(|map| map.receiver().has_unread()))
    }

    /// Whether all its sockets are with the kernel. This thread then counts as one that sleeps at it.
    #[inline]
    fn sleeps_plainly(&self) -> bool {
        if self.has_rings.load(Ordering::Relaxed) {
            return false;
        }
        self.sleepers.fetch_add(1, Ordering::SeqCst);
        // A socket that is raised or added from now on finds this thread asleep, and does not consent.
        if !self.has_rings.load(Ordering::SeqCst) {
            return true;
        }
        self.sleepers.fetch_sub(1, Ordering::SeqCst);
        false
    }

    /// Waits as epoll_wait(2) does, as far as no sleep is needed. None if the thread is to sleep in
    /// the kernel, and to call [`end_sleep`](Self::end_sleep) afterwards.
    pub(crate) fn wait(
        &self,
        epfd: c_int,
        events: *mut epoll_event,
        max: c_int,
        timeout_ms: i64,
    ) -> Option<c_int> {
        if self.sleeps_plainly() {
            return None;
        }
        let room = usize::try_from(max).ok().filter(|max| *max > 0 && !events.is_null());
        let Some(room) = room.filter(|_| self.is_quick.load(Ordering::SeqCst)) else {
            return self.begin_sleep(None, events, 0);
        };
        let ask_kernel = || {
            let zero = 0_usize;
            sys::call!(SYS_epoll_pwait, epfd, events, max, 0, zero, 8_usize) as c_int
        };
        let mut inner = lock(&self.inner);
        self.gather(&mut inner);
        if inner.active.is_empty() {
            return self.begin_sleep(Some(inner), events, room);
        }
        if Self::has_news(&inner) {
            let now = sys::now_ns();
            inner.ring_waits += 1;
            if inner.ring_waits >= RING_WAITS || now - inner.asked_kernel > RING_NS {
                (inner.ring_waits, inner.asked_kernel) = (0, now);
                match ask_kernel() {
                    0 => {}
                    result => return Some(result),
                }
            }
            let count = self.collect(&mut inner, events, room);
            if count > 0 {
                inner.patience.came_by_ring(count as u64);
                return Some(count as c_int);
            }
        }
        if timeout_ms == 0 {
            return Some(ask_kernel());
        }
        drop(inner);
        if let Some(result) = self.spin(events, room, &ask_kernel) {
            return Some(result);
        }
        self.begin_sleep(Some(lock(&self.inner)), events, room)
    }

    /// Looks at the rings, and asks the kernel now and then, for a while.
    fn spin(
        &self,
        events: *mut epoll_event,
        room: usize,
        ask_kernel: &dyn Fn() -> c_int,
    ) -> Option<c_int> {
        let mut patience = lock(&self.inner).patience;
        let mut spin = Spin::begin(&mut patience)?;
        let mut more = 0;
        let result = loop {
            let mut inner = lock(&self.inner);
            if Self::has_news(&inner) {
                let count = self.collect(&mut inner, events, room);
                if count > 0 {
                    spin.found_in_ring();
                    more = count as u64 - 1;
                    break Some(count as c_int);
                }
            }
            drop(inner);
            std::hint::spin_loop();
            match spin.goes_on(|processor| self.has_sender_on(processor)) {
                None => break None,
                Some(false) => {}
                Some(true) => match ask_kernel() {
                    0 => {}
                    result => {
                        spin.found();
                        break Some(result);
                    }
                },
            }
        };
        patience.came_by_ring(more);
        lock(&self.inner).patience = patience;
        result
    }

    /// Whether one of the sockets whose rings are looked at has its other end on a processor.
    fn has_sender_on(&self, processor: i32) -> bool {
        let inner = lock(&self.inner);
        let mut active = inner.active.iter().take(MAX_SENDERS);
        active.any(|Active { conn, .. }| conn.map().is_some_and(|map| map.peer().is_on(processor)))
    }

    /// Has sockets consent that did before the sleep: what follows the octets that have woken the thread
    /// may come through their rings.
    fn consent_again(&self, inner: &mut Inner) {
        if self.sleepers.load(Ordering::SeqCst) > 0 {
            return;
        }
        for active in std::mem::take(&mut inner.dormant) {
            let conn = active.conn;
            match conn.map() {
                Some(map)
                    if conn.is_quick_member.load(Ordering::Relaxed) && conn.may_consent(0) =>
                {
                    map.receiver().consent();
                    inner.active.push(active);
                }
                _ => conn.is_candidate.store(false, Ordering::SeqCst),
            }
        }
    }

    /// Revokes all consents. A result if a ring has something to report after all.
    fn begin_sleep(
        &self,
        inner: Option<Locked<'_, Inner>>,
        events: *mut epoll_event,
        room: usize,
    ) -> Option<c_int> {
        self.sleepers.fetch_add(1, Ordering::SeqCst);
        let mut inner = inner?;
        self.gather(&mut inner);
        let (mut kept, mut dormant) = (Vec::new(), std::mem::take(&mut inner.dormant));
        for Active { fd, conn, idle } in std::mem::take(&mut inner.active) {
            let Some(map) = conn.map() else {
                conn.is_candidate.store(false, Ordering::SeqCst);
                continue;
            };
            let is_idle = !conn.is_touched.swap(false, Ordering::Relaxed);
            let idle = if is_idle { idle + 1 } else { 0 };
            if map.receiver().revoke() == Revoked::Yes {
                if idle < MAX_IDLE {
                    dormant.push(Active { fd, conn, idle });
                } else {
                    conn.is_candidate.store(false, Ordering::SeqCst);
                }
                continue;
            }
            // The program has been told, and sleeps all the same: what arrives next is to wake it.
            let has_news = inner.members.get(&fd).is_some_and(|member| member.report().is_some());
            if !has_news {
                map.receiver().wish(wish::WAKE);
            }
            kept.push(Active { fd, conn, idle });
        }
        (inner.active, inner.dormant) = (kept, dormant);
        self.watched.store(inner.active.len() + inner.dormant.len(), Ordering::Relaxed);
        let count =
            if inner.active.is_empty() { 0 } else { self.collect(&mut inner, events, room) };
        if count == 0 {
            inner.sleeps_since = sys::now_ns();
            return None;
        }
        drop(inner);
        self.end_sleep();
        Some(count as c_int)
    }

    /// The thread is awake again.
    pub(crate) fn end_sleep(&self) {
        self.sleepers.fetch_sub(1, Ordering::SeqCst);
        if self.is_quick.load(Ordering::SeqCst) && self.has_rings.load(Ordering::SeqCst) {
            let mut inner = lock(&self.inner);
            let since = std::mem::take(&mut inner.sleeps_since);
            crate::totals::WAKE_UPS.add(u64::from(since != 0));
            if since != 0 {
                inner.patience.waited(sys::now_ns() - since);
            }
            self.consent_again(&mut inner);
        }
    }
}
