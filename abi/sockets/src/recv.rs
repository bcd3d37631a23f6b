//! Receiving: from the ring where something is there, from TCP otherwise.

use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use libc::c_int;
use quipu_sockets::direction::wish;
use quipu_sockets::report::Reason;
use quipu_sockets::{Look, Revoked};

use crate::conn::{Conn, Mode, count};
use crate::iov::Cursor;
use crate::map::Map;
use crate::send::{Plan, enter};
use crate::spin::Spin;
use crate::sys;

/// Flags that a ring can serve.
const KNOWN: c_int = libc::MSG_DONTWAIT
    | libc::MSG_PEEK
    | libc::MSG_WAITALL
    | libc::MSG_TRUNC
    | libc::MSG_NOSIGNAL
    | libc::MSG_CMSG_CLOEXEC;
/// How often a receiver looks again before it sleeps although the ring is not empty.
const ATTEMPTS: usize = 64;
/// For how long a call that must not block waits for octets that are on their way over TCP. They are in
/// the kernel within microseconds, unless the sender loses its processor just then.
const ARRIVAL_NS: u64 = 100_000_000;
/// The same where so many connections have let calls of this process wait for nothing.
const SHORT_ARRIVAL_NS: u64 = 1_000_000;
const FEW_ABSENT: u32 = 4;
/// How often octets of the ring are copied that are gone then, before only one is copied at a time, and
/// before the peer is not believed any more.
const COPIES: usize = 16;
const MOST_COPIES: usize = 1024;

/// Receives what is there, or prepares to sleep in the kernel.
#[inline]
pub(crate) fn plan(fd: c_int, into: &mut Cursor<'_>, flags: c_int) -> Plan {
    let Some(conn) = enter(fd) else { return Plan::Pass };
    conn.receiving.fetch_add(1, Ordering::SeqCst);
    conn.note_message(false);
    let Some(map) = conn.map() else { return Plan::Kernel(conn, 0) };
    let before = sys::errno();
    let plan = raised(conn, map, into, flags);
    if !matches!(plan, Plan::Kernel(..)) {
        stay_awake(conn, map);
        conn.receiving.fetch_sub(1, Ordering::SeqCst);
        conn.leave();
    }
    sys::set_errno(before);
    plan
}

/// The kernel has received octets of a [`Plan::Kernel`], or the stream has ended. `again` receives
/// from the ring: octets that were put there before the stream ended come before its end.
pub(crate) fn finish(
    conn: &'static Conn,
    before: usize,
    received: isize,
    into: &mut Cursor<'_>,
    flags: c_int,
) -> isize {
    let mut result = received;
    conn.end_wait();
    let special = flags & (libc::MSG_OOB | libc::MSG_ERRQUEUE) != 0;
    if let Some(map) = conn.map()
        && conn.receives.load(Ordering::SeqCst)
        && !special
    {
        let errno = sys::errno();
        if received > 0 && flags & libc::MSG_PEEK == 0 {
            map.receiver().account(received as usize);
            conn.fed_by_tcp(received as usize);
            stay_awake(conn, map);
            // A program that gets less than it asked for takes the socket for empty, and waits for an edge.
            into.skip(received as usize);
            result += from_ring(conn, map, into, flags).unwrap_or(0) as isize;
        } else if received == 0 && into.len().is_some_and(|len| len > 0) {
            map.receiver().tcp_has_ended();
            result = from_ring(conn, map, into, flags).unwrap_or(0) as isize;
        } else if received < 0 && errno != libc::EINTR {
            let is_empty = errno == libc::EAGAIN;
            let more = from_ring(conn, map, into, flags);
            let more =
                more.or_else(|| is_empty.then(|| arriving(conn, map, into, flags)).flatten());
            result = more.map_or(-1, |len| len as isize);
        }
        sys::set_errno(errno);
    }
    conn.note_length(usize::try_from(received).unwrap_or(0));
    conn.receiving.fetch_sub(1, Ordering::SeqCst);
    conn.leave();
    match (before, result) {
        (0, result) => result,
        (before, -1) => before as isize,
        (before, result) => before as isize + result,
    }
}

/// Octets that the program may have been told of, and that the sender moves from the ring to TCP: they
/// are for a moment in neither. None if the call is one that has waited, or if nothing is on its way.
#[cold]
fn arriving(conn: &'static Conn, map: &Map, into: &mut Cursor<'_>, flags: c_int) -> Option<usize> {
    if is_blocking(conn, flags) {
        return None;
    }
    static ABSENT: AtomicU32 = AtomicU32::new(0);
    let is_trusted = ABSENT.load(Ordering::Relaxed) < FEW_ABSENT;
    let deadline = sys::now_ns() + if is_trusted { ARRIVAL_NS } else { SHORT_ARRIVAL_NS };
    // A program that has left the ring is told again by the kernel.
    while map.receiver().expects_tcp() && !conn.leaving.load(Ordering::Relaxed) {
        if sys::now_ns() > deadline {
            ABSENT.fetch_add(1, Ordering::Relaxed);
            conn.make_plain(Reason::Fault);
            break;
        }
        // A withdrawal may also end without any octet.
        if sys::wait_for(conn.fd(), libc::POLLIN, Duration::from_millis(1)) == Some(true) {
            return match from_tcp(conn, map, into, flags)? {
                Plan::Done(received, _) => Some(received as usize),
                _ => None,
            };
        }
    }
    from_ring(conn, map, into, flags)
}

fn is_blocking(conn: &Conn, flags: c_int) -> bool {
    flags & libc::MSG_DONTWAIT == 0 && !conn.nonblocking.load(Ordering::Relaxed)
}

/// This thread has just received something: the answer to what it sends now may come while it is still
/// awake. So it consents, if it waits by calls of this library.
#[inline]
fn stay_awake(conn: &'static Conn, map: &Map) {
    if !conn.set.load(Ordering::Relaxed).is_null() {
        crate::set::note(conn);
    } else if conn.is_watched.load(Ordering::Relaxed) && conn.may_consent(1) && !conn.is_resting() {
        map.receiver().consent();
    }
}

/// Whether the position up to which this end has read is known. Only while nobody else is reading.
pub(crate) fn is_in_step(conn: &Conn, map: &Map, own: u32) -> bool {
    if conn.receives.load(Ordering::SeqCst) {
        return true;
    }
    if conn.receiving.load(Ordering::SeqCst) != own {
        return false;
    }
    let Some(position) = sys::received(conn.fd()) else { return false };
    map.receiver().set_position(position);
    conn.receives.store(true, Ordering::SeqCst);
    true
}

/// Octets of the ring, if there are some.
#[inline]
fn from_ring(conn: &Conn, map: &Map, into: &mut Cursor<'_>, flags: c_int) -> Option<usize> {
    let receiver = map.receiver();
    for copies in 0.. {
        match receiver.look() {
            Look::Ring { ticket, pieces } if copies < MOST_COPIES => {
                let len = into.len().filter(|len| *len > 0)?;
                let pieces = pieces.first(if copies < COPIES { len } else { 1 });
                let before = into.clone();
                if flags & libc::MSG_TRUNC == 0 {
                    map.drain(pieces, into);
                } else {
                    into.skip(pieces.len);
                }
                if flags & libc::MSG_PEEK != 0 {
                    return Some(pieces.len);
                }
                if receiver.take(ticket, pieces.len) {
                    count(&conn.counters.received, pieces.len);
                    count(&conn.ring_messages, 1);
                    conn.is_fed_by_tcp.store(false, Ordering::Relaxed);
                    if !conn.has_nodelay.load(Ordering::Relaxed) {
                        conn.take_nodelay();
                    }
                    return Some(pieces.len);
                }
                *into = before;
            }
            Look::Fault | Look::Ring { .. } => {
                crate::conn::break_off(conn, map);
                return None;
            }
            Look::Tcp | Look::Empty | Look::Withdrawing => return None,
        }
    }
    None
}

fn raised(conn: &'static Conn, map: &Map, into: &mut Cursor<'_>, flags: c_int) -> Plan {
    let Some(total) = into.len().filter(|len| *len > 0) else { return Plan::Kernel(conn, 0) };
    if flags & (libc::MSG_OOB | libc::MSG_ERRQUEUE) != 0 {
        return Plan::Kernel(conn, 0);
    }
    if flags & !KNOWN != 0 {
        conn.make_plain(Reason::Feature);
    }
    if !is_in_step(conn, map, 1) {
        return Plan::Kernel(conn, 0);
    }
    let blocking = is_blocking(conn, flags);
    let wants_all = blocking && flags & (libc::MSG_WAITALL | libc::MSG_PEEK) == libc::MSG_WAITALL;
    let mut done = 0;
    for attempt in 0.. {
        while let Some(len) = from_ring(conn, map, into, flags) {
            done += len;
            if !wants_all || done == total {
                return Plan::Done(done as isize, 0);
            }
        }
        if !blocking {
            return Plan::Kernel(conn, 0);
        }
        if conn.mode() == Mode::Plain {
            // The peer has broken the protocol.
            break;
        }
        let is_free = conn.set.load(Ordering::Relaxed).is_null();
        if attempt == 0 && is_free && conn.may_consent(1) {
            conn.is_watched.store(true, Ordering::Relaxed);
            if !wants_all && conn.is_fed_by_tcp.load(Ordering::Relaxed) {
                // A stream that TCP carries: while more of it is there, this thread does not sleep.
                map.receiver().consent();
                if let Some(plan) = from_tcp(conn, map, into, flags) {
                    return plan;
                }
            }
            match spin(conn, map) {
                Found::Ring if matches!(map.receiver().look(), Look::Ring { .. }) => continue,
                Found::Ring | Found::Tcp if !wants_all => {
                    if let Some(plan) = from_tcp(conn, map, into, flags) {
                        return plan;
                    }
                }
                _ => {}
            }
        }
        if map.receiver().revoke() == Revoked::Yes {
            break;
        }
        if attempt >= ATTEMPTS {
            // The sender is slow to take octets back: what it sends now wakes this thread.
            map.receiver().wish(wish::WAKE);
            if !matches!(map.receiver().look(), Look::Ring { .. }) {
                break;
            }
        }
        std::thread::yield_now();
    }
    conn.begin_wait();
    Plan::Kernel(conn, done)
}

/// What a receiver found while it looked.
enum Found {
    /// Octets in the ring.
    Ring,
    /// Octets in TCP, or the end of the stream.
    Tcp,
    Nothing,
}

/// Consents, and looks for a while.
fn spin(conn: &Conn, map: &Map) -> Found {
    let Ok(mut patience) = conn.patience.try_lock() else { return Found::Nothing };
    patience.came_by_ring(conn.ring_messages.swap(0, Ordering::Relaxed));
    let Some(mut spin) = Spin::begin(&mut patience) else { return Found::Nothing };
    let receiver = map.receiver();
    receiver.consent();
    loop {
        for _ in 0..32 {
            if receiver.has_unread() {
                spin.found_in_ring();
                return Found::Ring;
            }
            std::hint::spin_loop();
        }
        match spin.goes_on(|processor| map.peer().is_on(processor)) {
            Some(true) if sys::is_readable(conn.fd()) => {
                spin.found_in_tcp();
                return Found::Tcp;
            }
            Some(_) => {}
            None => break,
        }
    }
    conn.rests_until.store(patience.rests_until(), Ordering::Relaxed);
    Found::Nothing
}

/// Receives from TCP without waiting, so that the consent can stay. None if nothing was there after all.
fn from_tcp(conn: &'static Conn, map: &Map, into: &mut Cursor<'_>, flags: c_int) -> Option<Plan> {
    let mut few = [libc::iovec { iov_base: std::ptr::null_mut(), iov_len: 0 }; 16];
    let (rest, _) = into.rest(&mut few, usize::MAX);
    let flags = flags | libc::MSG_DONTWAIT;
    // Another thread may have closed it: the octets of a new file of that number are not for this call.
    let fd = Some(conn.fd()).filter(|fd| conn.has(*fd))?;
    let received = sys::receive_now(fd, rest, flags)?;
    if received == 0 {
        return None;
    }
    if flags & libc::MSG_PEEK == 0 {
        map.receiver().account(received);
        conn.fed_by_tcp(received);
        into.skip(received);
        let more = from_ring(conn, map, into, flags).unwrap_or(0);
        return Some(Plan::Done((received + more) as isize, 0));
    }
    Some(Plan::Done(received as isize, 0))
}
