//! poll(2) and select(2): what rings have to report, and the kernel for everything else.

use std::sync::atomic::Ordering;

use libc::{c_int, c_short, pollfd};
use quipu_sockets::Revoked;
use quipu_sockets::direction::wish;
use quipu_sockets::report::Reason;

use crate::conn::Conn;
use crate::send::enter;
use crate::spin::Spin;
use crate::table::{self, Entry};
use crate::{life, recv, sys};

/// Most raised sockets in one call. Those beyond stay plain from then on.
const MAX: usize = 64;
/// What a ring reports.
const READABLE: c_short = libc::POLLIN | libc::POLLRDNORM;
/// How often to look again before sleeping although a ring is not empty.
const ATTEMPTS: usize = 64;

/// The raised sockets that one call waits for, each with its place in the caller's list.
pub(crate) struct Watched {
    sockets: [Option<(usize, &'static Conn)>; MAX],
    count: usize,
}

impl Watched {
    /// Those of the descriptors that are raised. Call [`end`](Self::end) afterwards.
    pub(crate) fn begin(descriptors: impl Iterator<Item = (usize, c_int)>) -> Self {
        let mut watched = Self { sockets: [None; MAX], count: 0 };
        for (place, fd) in descriptors {
            match table::get(fd) {
                Some(Entry::Set(set)) => set.leave_to_kernel(),
                Some(Entry::Conn(_)) => watched.add(place, fd),
                None => {}
            }
        }
        watched
    }

    fn add(&mut self, place: usize, fd: c_int) {
        let Some(conn) = enter(fd) else { return };
        if conn.map().is_none() {
            conn.leave();
        } else if self.count == MAX {
            life::plain(conn, Reason::Feature);
            conn.leave();
        } else {
            conn.receiving.fetch_add(1, Ordering::SeqCst);
            self.sockets[self.count] = Some((place, conn));
            self.count += 1;
        }
    }

    /// Whether there are none.
    pub(crate) fn is_empty(&self) -> bool {
        self.count == 0
    }

    /// The call is over.
    pub(crate) fn end(&self) {
        if let Some((_, first)) = self.iter().next() {
            first.end_wait();
        }
        for (_, conn) in self.iter() {
            conn.receiving.fetch_sub(1, Ordering::SeqCst);
            conn.leave();
        }
    }

    fn iter(&self) -> impl Iterator<Item = (usize, &'static Conn)> {
        self.sockets[..self.count].iter().flatten().copied()
    }

    /// The places of those whose ring has something.
    pub(crate) fn readable(&self) -> impl Iterator<Item = usize> {
        self.iter()
            .filter(|(_, conn)| conn.map().is_some_and(|map| map.receiver().has_unread()))
            .map(|(place, _)| place)
    }

    /// Looks for a while, and then revokes all consents. Whether there may be something to report.
    /// `is_ready` asks the kernel.
    pub(crate) fn prepare_to_sleep(&self, is_ready: impl Fn() -> bool) -> bool {
        if self.spin(is_ready) {
            return true;
        }
        for _ in 0..ATTEMPTS {
            if self.readable().next().is_some() {
                return true;
            }
            let revoked =
                |conn: &Conn| conn.map().is_none_or(|map| map.receiver().revoke() == Revoked::Yes);
            if self.iter().all(|(_, conn)| revoked(conn)) {
                if let Some((_, first)) = self.iter().next() {
                    first.begin_wait();
                }
                return false;
            }
            std::thread::yield_now();
        }
        for (_, conn) in self.iter() {
            if let Some(map) = conn.map() {
                map.receiver().wish(wish::WAKE);
            }
        }
        self.readable().next().is_some()
    }

    /// Whether something was found.
    fn spin(&self, is_ready: impl Fn() -> bool) -> bool {
        let consents = |conn: &Conn| {
            let is_free = conn.set.load(Ordering::Relaxed).is_null();
            conn.map().is_some_and(|map| is_free && recv::is_in_step(conn, map, 1))
                && conn.may_consent(1)
        };
        let Some((_, first)) = self.iter().find(|(_, conn)| consents(conn)) else { return false };
        let Ok(mut patience) = first.patience.try_lock() else { return false };
        patience.came_by_ring(first.ring_messages.swap(0, Ordering::Relaxed));
        let Some(mut spin) = Spin::begin(&mut patience) else { return false };
        let is_sender_here = |processor| {
            self.iter().any(|(_, conn)| conn.map().is_some_and(|map| map.peer().is_on(processor)))
        };
        for (_, conn) in self.iter().filter(|(_, conn)| consents(conn)) {
            conn.is_watched.store(true, Ordering::Relaxed);
            if let Some(map) = conn.map() {
                map.receiver().consent();
            }
        }
        loop {
            for _ in 0..16 {
                if self.readable().next().is_some() {
                    spin.found_in_ring();
                    return true;
                }
                std::hint::spin_loop();
            }
            match spin.goes_on(is_sender_here) {
                Some(true) if is_ready() => {
                    spin.found();
                    return true;
                }
                Some(_) => {}
                None => break,
            }
        }
        first.rests_until.store(patience.rests_until(), Ordering::Relaxed);
        false
    }
}

/// Polls without waiting, as the kernel sees it.
pub(crate) fn now(list: *mut pollfd, count: libc::nfds_t) -> c_int {
    let zero = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    sys::call!(SYS_ppoll, list, count, &raw const zero, 0, 8) as c_int
}

/// Adds what rings have to what the kernel has reported. How many entries report something.
///
/// # Safety
///
/// `list` has `count` entries.
pub(crate) unsafe fn add_rings(watched: &Watched, list: *mut pollfd, count: c_int) -> c_int {
    let mut count = count;
    for place in watched.readable() {
        // SAFETY: places are of this list.
        let entry = unsafe { &mut *list.add(place) };
        let events = entry.events & READABLE;
        if events != 0 {
            count += c_int::from(entry.revents == 0);
            entry.revents |= events;
        }
    }
    count
}

/// poll(2) with a list. A result, or none: then the thread is to sleep in the kernel, and to end with
/// [`Watched::end`].
///
/// # Safety
///
/// `list` has `count` entries.
pub(crate) unsafe fn plan(
    watched: &Watched,
    list: *mut pollfd,
    count: libc::nfds_t,
    waits: bool,
) -> Option<c_int> {
    loop {
        let some = watched.readable().next().is_some();
        if !some && waits && !watched.prepare_to_sleep(|| now(list, count) != 0) {
            return None;
        }
        let reported = now(list, count);
        if reported < 0 {
            return Some(reported);
        }
        // SAFETY: passed on from the caller.
        match unsafe { add_rings(watched, list, reported) } {
            // Another thread was faster.
            0 if waits => {}
            count => return Some(count),
        }
    }
}
