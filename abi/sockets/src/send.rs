//! Sending: into the ring where the receiver is awake, over TCP otherwise.

use std::sync::atomic::Ordering;
use std::time::Duration;

use libc::c_int;
use quipu_sockets::report::Reason;
use quipu_sockets::{Room, Withdrawal};

use crate::conn::{Conn, Mode, count};
use crate::iov::Cursor;
use crate::map::Map;
use crate::send_lock::{SendLock, WithdrawLock};
use crate::source::{File, Source};
use crate::{helper, sys, table};

/// Flags that change nothing for octets in a ring.
const HARMLESS: c_int = libc::MSG_DONTWAIT
    | libc::MSG_NOSIGNAL
    | libc::MSG_MORE
    | libc::MSG_EOR
    | libc::MSG_CONFIRM
    | libc::MSG_DONTROUTE
    | libc::MSG_WAITALL;
/// Sends in a row that find unread octets before the kernel is asked whether the peer is alive.
const UNASKED: u32 = 8;
/// For how long a sender waits for the receiver to make room, before it uses TCP: one that may
/// block, and one that may not.
const PATIENT_NS: u64 = 200_000;
const BRIEF_NS: u64 = 20_000;
/// The same for one that may block, while the receiver reads octets of TCP that come before those in the
/// ring: a single call may take megabytes.
const BACKLOG_NS: u64 = 1_000_000;
/// For how long a blocking sender waits for TCP before it looks again.
const LOOK_AGAIN: Duration = Duration::from_millis(100);

/// For how long a sender that may block waits at most for a receiver that reads.
const MOST_NS: u64 = 100_000_000;
/// How often a call that must not block finds the ring full before it gives up. Even where other threads fill
/// what room there is, once is enough.
const ROUNDS: usize = 64;
/// So many times its size is more than a ring ever has while it is taken back.
const MOST_RINGS: usize = 8;

/// Octets that are copied into the ring at a time, so that the receiver copies meanwhile.
const PART: usize = 64 * 1024;

/// Octets that a raised connection hands to the kernel at a time. Until it returns, the ring stays closed.
const PART_FOR_TCP: usize = 128 * 1024;

/// What the entry point is to do.
pub(crate) enum Plan {
    /// Hand the call to the kernel as it is; nothing is to be done afterwards.
    Pass,
    /// Return this value, with this error number if it is -1.
    Done(isize, c_int),
    /// Hand the rest of the octets to the kernel, then call [`finish`]. So many were sent before.
    Kernel(&'static Conn, usize),
}

/// Whether this library does nothing for calls of a descriptor.
#[inline]
pub(crate) fn is_plain(fd: c_int) -> bool {
    table::conn(fd).is_none_or(|conn| conn.mode() == Mode::Plain)
}

/// The socket of a descriptor, for one call. The caller must [`Conn::leave`].
#[inline]
pub(crate) fn enter(fd: c_int) -> Option<&'static Conn> {
    let conn = table::conn(fd)?;
    if conn.mode() == Mode::Plain || !conn.enter() {
        return None;
    }
    if !conn.has(fd) {
        conn.leave();
        return None;
    }
    Some(conn)
}

/// Sends as much as goes into the ring.
#[inline]
pub(crate) fn plan(fd: c_int, data: &mut Cursor<'_>, flags: c_int) -> Plan {
    let Some(conn) = enter(fd) else { return Plan::Pass };
    conn.sending.fetch_add(1, Ordering::SeqCst);
    conn.note_message(true);
    let is_special = flags & !HARMLESS != 0;
    if is_special {
        conn.make_plain(Reason::Feature);
    }
    let Some(map) = conn.map() else { return Plan::Kernel(conn, 0) };
    let before = sys::errno();
    let plan = match data.len() {
        _ if is_special => match empty_ring(conn, map, flags & libc::MSG_DONTWAIT == 0) {
            None => Plan::Kernel(conn, 0),
            Some(error) => Plan::Done(-1, error),
        },
        None | Some(0) => Plan::Kernel(conn, 0),
        _ if is_shut(conn) => Plan::Kernel(conn, 0),
        Some(total) => raised(conn, map, data, (0, total), flags),
    };
    leave_if_done(conn, &plan);
    sys::set_errno(before);
    plan
}

#[inline]
fn leave_if_done(conn: &Conn, plan: &Plan) {
    if !matches!(plan, Plan::Kernel(..)) {
        conn.sending.fetch_sub(1, Ordering::SeqCst);
        conn.leave();
    }
}

/// Most octets that one sendfile(2) sends.
const FILE_MOST: usize = 0x7fff_f000;

/// Sends as much of a file as goes into the ring. Without an offset, the file's own position counts, and
/// the kernel sends all of it. What is left of a [`Plan::Kernel`] comes after what is in the ring.
pub(crate) fn plan_file(fd: c_int, file: c_int, offset: Option<i64>, len: usize) -> Plan {
    let Some(conn) = enter(fd) else { return Plan::Pass };
    conn.sending.fetch_add(1, Ordering::SeqCst);
    conn.note_message(true);
    let Some(map) = conn.map() else { return Plan::Kernel(conn, 0) };
    let before = sys::errno();
    let total = len.min(FILE_MOST);
    let mut plan = match offset.filter(|offset| *offset >= 0 && total > 0 && !is_shut(conn)) {
        Some(offset) => raised(conn, map, &mut File::new(file, offset), (0, total), 0),
        None => Plan::Kernel(conn, 0),
    };
    if matches!(plan, Plan::Kernel(_, 0))
        && let Some(error) = empty_ring(conn, map, true)
    {
        plan = Plan::Done(-1, error);
    }
    leave_if_done(conn, &plan);
    sys::set_errno(before);
    plan
}

/// Whether the program has shut down what it sends.
#[inline]
fn is_shut(conn: &Conn) -> bool {
    conn.leaving.load(Ordering::Relaxed) && conn.is_shut()
}

/// Takes all octets of the ring back. The error number of the call if TCP takes no more: it may not block, or
/// is interrupted.
fn empty_ring(conn: &'static Conn, map: &Map, may_block: bool) -> Option<c_int> {
    let mut limit = None;
    while !settle(conn, map) {
        if !may_block || conn.nonblocking.load(Ordering::Relaxed) {
            return Some(libc::EAGAIN);
        }
        match wait_for_tcp(conn, 0, &mut limit) {
            Some(Plan::Done(_, error)) => return Some(error),
            Some(_) => return None,
            None => {}
        }
    }
    None
}

/// The kernel is to send by a call that this library does not carry: what is in the ring comes first. Whether
/// it may; otherwise `errno` says why not.
pub(crate) fn leaves_to_kernel(fd: c_int, flags: c_int, reason: Reason) -> bool {
    let Some(conn) = enter(fd) else { return true };
    let before = sys::errno();
    conn.make_plain(reason);
    let may_block = flags & libc::MSG_DONTWAIT == 0;
    let error = conn.map().and_then(|map| empty_ring(conn, map, may_block));
    conn.leave();
    sys::set_errno(error.unwrap_or(before));
    error.is_none()
}

/// Octets of a [`Plan::Kernel`] that the kernel is to get at a time.
pub(crate) fn part_for_tcp(conn: &Conn, flags: c_int) -> usize {
    let knows_position = conn.mode() == Mode::Raised && conn.sends.load(Ordering::SeqCst);
    if knows_position && flags & !HARMLESS == 0 { PART_FOR_TCP } else { usize::MAX }
}

/// Whether the kernel gets what is left in parts.
pub(crate) fn is_divided(conn: &Conn, data: &Cursor<'_>, flags: c_int) -> bool {
    data.len().is_some_and(|len| len > part_for_tcp(conn, flags))
}

/// The kernel has sent a whole part of a [`Plan::Kernel`], `sent` octets after `before` others. What is to be
/// done with the octets that are left.
pub(crate) fn go_on(
    conn: &'static Conn,
    before: usize,
    sent: usize,
    data: &mut Cursor<'_>,
    flags: c_int,
) -> Plan {
    let done = before + sent;
    let left = data.len().unwrap_or(0);
    if left == 0 {
        return Plan::Done(finish(conn, before, sent as isize), 0);
    }
    let Some(map) = conn.map() else { return Plan::Kernel(conn, done) };
    let errno = sys::errno();
    note_sent_over_tcp(conn, map, sent);
    let plan = raised(conn, map, data, (done, done + left), flags);
    leave_if_done(conn, &plan);
    sys::set_errno(errno);
    plan
}

fn note_sent_over_tcp(conn: &Conn, map: &Map, sent: usize) {
    if conn.sends.load(Ordering::SeqCst) {
        map.own().sent.fetch_add(sent as u64, Ordering::SeqCst);
        map.own().note_processor();
        count(&conn.counters.tcp_sent, sent);
    }
}

/// The kernel has sent octets of a [`Plan::Kernel`]. The value to return for the call.
pub(crate) fn finish(conn: &'static Conn, before: usize, sent: isize) -> isize {
    if let Ok(sent) = usize::try_from(sent)
        && sent > 0
        && let Some(map) = conn.map()
    {
        note_sent_over_tcp(conn, map, sent);
    }
    conn.note_length(usize::try_from(sent).unwrap_or(0));
    conn.sending.fetch_sub(1, Ordering::SeqCst);
    conn.leave();
    match (before, sent) {
        (0, sent) => sent,
        (before, -1) => before as isize,
        (before, sent) => before as isize + sent,
    }
}

/// Whether the position at which this end sends is known. Only while nobody else is sending.
fn is_in_step(conn: &Conn, map: &Map) -> bool {
    if conn.sends.load(Ordering::SeqCst) {
        return true;
    }
    if conn.sending.load(Ordering::SeqCst) != 1 {
        return false;
    }
    let Some(sent) = sys::sent(conn.fd(), conn.initiator.load(Ordering::Relaxed)) else {
        return false;
    };
    map.own().sent.store(sent, Ordering::SeqCst);
    if conn.is_mutual() {
        conn.take_nodelay();
    }
    conn.sends.store(true, Ordering::SeqCst);
    true
}

#[inline]
fn raised<S: Source>(
    conn: &'static Conn,
    map: &Map,
    data: &mut S,
    (mut done, total): (usize, usize),
    flags: c_int,
) -> Plan {
    if !is_in_step(conn, map) {
        return Plan::Kernel(conn, done);
    }
    let blocking = flags & libc::MSG_DONTWAIT == 0 && !conn.nonblocking.load(Ordering::Relaxed);
    let mut limit = None;
    for round in 0.. {
        let Some(lock) = SendLock::take(conn) else {
            return without_lock(conn, map, done, blocking);
        };
        match fill(conn, map, data, total, &mut done) {
            Filled::All => return Plan::Done(total as isize, 0),
            Filled::UseTcp => return use_tcp(conn, done),
            Filled::NoMore if done > 0 => return Plan::Done(done as isize, 0),
            Filled::NoMore => return Plan::Kernel(conn, 0),
            Filled::Full => {}
        }
        drop(lock);
        if wait_for_reader(map, if blocking { PATIENT_NS } else { BRIEF_NS }) {
            continue;
        }
        conn.pause();
        let emptied = match SendLock::take(conn) {
            Some(_lock) => take_back(conn, map),
            None => return without_lock(conn, map, done, blocking),
        };
        match (emptied, blocking) {
            // The peer has broken the protocol.
            (true, _) if conn.mode() == Mode::Plain => return use_tcp(conn, done),
            (true, true) => {}
            (true, false) if round < ROUNDS => {}
            (_, false) => return gives_up(done, libc::EAGAIN),
            (false, true) => {
                if let Some(plan) = wait_for_tcp(conn, done, &mut limit) {
                    return plan;
                }
            }
        }
    }
    Plan::Kernel(conn, done)
}

/// What a call returns that has sent so much, and cannot go on.
fn gives_up(done: usize, error: c_int) -> Plan {
    if done > 0 { Plan::Done(done as isize, 0) } else { Plan::Done(-1, error) }
}

/// Waits until TCP takes more, for a while. How the call ends, if it does: its thread may be cancelled here.
fn wait_for_tcp(conn: &'static Conn, done: usize, limit: &mut Option<Option<u64>>) -> Option<Plan> {
    if !conn.is_open() {
        return Some(gives_up(done, libc::EBADF));
    }
    if is_shut(conn) {
        return Some(Plan::Kernel(conn, done));
    }
    let limit = *limit.get_or_insert_with(|| sys::send_limit(conn.fd()));
    if limit.is_some_and(|limit| sys::now_ns() > limit) {
        return Some(gives_up(done, libc::EAGAIN));
    }
    let waited = sys::wait_in_call(conn.fd(), libc::POLLOUT, LOOK_AGAIN);
    let is_interrupted = waited.is_none() && sys::errno() == libc::EINTR;
    let ends = is_interrupted && (done > 0 || !quipu_cabi::interrupted_call_goes_on());
    ends.then(|| gives_up(done, libc::EINTR))
}

enum Filled {
    /// All octets are in the ring.
    All,
    /// What is left is the kernel's.
    UseTcp,
    /// The source has no more octets, or cannot be read.
    NoMore,
    /// The ring is full.
    Full,
}

/// Copies octets into the ring. The caller has the lock.
#[inline]
fn fill<S: Source>(conn: &Conn, map: &Map, data: &mut S, total: usize, done: &mut usize) -> Filled {
    let sender = map.sender();
    loop {
        let sent = map.own().sent.load(Ordering::Relaxed);
        match sender.room(sent, conn.may_open()) {
            Room::Tcp => return Filled::UseTcp,
            Room::Fault => {
                crate::conn::break_off(conn, map);
                return Filled::UseTcp;
            }
            Room::Full => return Filled::Full,
            Room::Ring { head, pieces } => {
                // One that only says nothing any more may still read.
                if is_gone(conn, map) && (take_back(conn, map) || has_failed(conn)) {
                    return Filled::UseTcp;
                }
                let before = data.clone();
                let pieces = pieces.first((total - *done).min(PART));
                let pieces = pieces.first(data.put(map, pieces));
                if pieces.len == 0 {
                    return Filled::NoMore;
                }
                if !sender.publish(head, pieces.len) {
                    conn.idleness.has_memory_again();
                    helper::note_activity();
                    *data = before;
                    return Filled::UseTcp;
                }
                map.own().sent.store(sent + pieces.len as u64, Ordering::SeqCst);
                map.own().note_processor();
                count(&conn.counters.sent, pieces.len);
                *done += pieces.len;
                helper::note_activity();
                if sender.must_withdraw() && take_back(conn, map) && *done < total {
                    return Filled::UseTcp;
                }
                if *done == total {
                    return Filled::All;
                }
            }
        }
    }
}

/// Whether the peer has closed, or died: asked now and then while it does not read.
#[inline]
fn is_gone(conn: &Conn, map: &Map) -> bool {
    if map.peer().closed.load(Ordering::Relaxed) != 0 {
        return true;
    }
    if map.sender().unread().is_none_or(|(unread, _)| unread == 0) {
        conn.unasked.store(0, Ordering::Relaxed);
        return false;
    }
    if conn.unasked.fetch_add(1, Ordering::Relaxed) < UNASKED {
        return false;
    }
    conn.unasked.store(0, Ordering::Relaxed);
    sys::is_ending(conn.fd())
}

/// Waits a little for the receiver to make room, while it reads.
fn wait_for_reader(map: &Map, time_ns: u64) -> bool {
    let sender = map.sender();
    let Some((unread, mut read)) = sender.unread() else { return true };
    let time =
        || if time_ns == PATIENT_NS && sender.is_tcp_unread() { BACKLOG_NS } else { time_ns };
    let begun = sys::now_ns();
    let mut deadline = begun + time();
    loop {
        for _ in 0..64 {
            match sender.unread() {
                Some((now, _)) if now > unread / 2 => std::hint::spin_loop(),
                _ => return true,
            }
        }
        let now = sys::now_ns();
        if now > deadline {
            // It has made some room, if not much.
            return sender.unread().is_none_or(|(now, _)| now < unread);
        }
        match sender.unread() {
            Some((_, position)) if position != read && time_ns == PATIENT_NS => {
                (read, deadline) = (position, (now + time()).min(begun + MOST_NS));
            }
            _ => {}
        }
        std::thread::yield_now();
    }
}

/// Takes the octets of the ring back and sends them over TCP. Whether the ring is empty and closed.
/// The caller has the lock.
pub(crate) fn take_back(conn: &Conn, map: &Map) -> bool {
    let _signals = sys::NoSignals::new();
    let fd = conn.fd();
    // Another thread may have closed it: these octets are not for a new file of that number.
    conn.has(fd) && take_back_by(conn, map, fd)
}

/// The same, by a descriptor of the caller's. All signals are blocked.
pub(crate) fn take_back_by(conn: &Conn, map: &Map, fd: c_int) -> bool {
    let sender = map.sender();
    let _lock = WithdrawLock::take(conn);
    if conn.is_shut() {
        return sender.unread().is_none_or(|(unread, _)| unread == 0);
    }
    let mut most = MOST_RINGS * map.size();
    loop {
        match sender.withdraw() {
            Withdrawal::Nothing => return true,
            Withdrawal::Fault => {
                crate::conn::break_off(conn, map);
                return true;
            }
            Withdrawal::Octets { from, pieces } => {
                let (vectors, len) = map.vectors(pieces);
                if len > most {
                    crate::conn::break_off(conn, map);
                    return true;
                }
                most -= len;
                let sent = sys::send_now(fd, &vectors).or_else(|error| refused(conn, error, len));
                let is_empty = sender.finish_withdrawal(from, sent.unwrap_or(0).min(len));
                count(&conn.counters.withdrawals, 1);
                if is_empty || sent.is_err() {
                    return is_empty;
                }
            }
        }
    }
}

/// TCP has not taken octets of the ring. Where it never will, they are lost, as those that it has taken and
/// not delivered: all `len` of them are done with. The kernel says why only once, and EPIPE from then on.
fn refused(conn: &Conn, error: c_int, len: usize) -> Result<usize, c_int> {
    match error {
        libc::EAGAIN | libc::EINTR | libc::ENOBUFS | libc::ENOMEM => return Err(error),
        libc::EPIPE if conn.is_shut() => return Err(error),
        libc::EPIPE => {}
        _ => conn.failed.store(error.cast_unsigned(), Ordering::Relaxed),
    }
    conn.leave_ring(Reason::Ended);
    if error == libc::EPIPE { Ok(len) } else { Err(error) }
}

fn has_failed(conn: &Conn) -> bool {
    conn.failed.load(Ordering::Relaxed) != 0
}

/// What goes to the kernel after `done` octets: nothing, if TCP has refused octets of the ring.
fn use_tcp(conn: &'static Conn, done: usize) -> Plan {
    match (has_failed(conn), done) {
        (false, _) => Plan::Kernel(conn, done),
        (true, 0) => match conn.failed.swap(0, Ordering::Relaxed) {
            0 => Plan::Kernel(conn, 0),
            error => Plan::Done(-1, error.cast_signed()),
        },
        // The next call has the error.
        (true, _) => Plan::Done(done as isize, 0),
    }
}

/// This thread cannot have the lock. What is in the ring goes over TCP, and so does all that follows:
/// the holder of the lock, if it ever goes on, finds the ring closed.
#[cold]
fn without_lock(conn: &'static Conn, map: &Map, done: usize, blocking: bool) -> Plan {
    conn.leave_ring(Reason::Resources);
    let mut limit = None;
    while !take_back(conn, map) {
        if done > 0 || !blocking {
            return gives_up(done, libc::EAGAIN);
        }
        if let Some(plan) = wait_for_tcp(conn, done, &mut limit) {
            return plan;
        }
    }
    conn.give_nodelay_back();
    Plan::Kernel(conn, done)
}

/// Sends nothing into the ring any more, if the octets that are there can go over TCP now. Whether
/// they could.
pub(crate) fn settle(conn: &Conn, map: &Map) -> bool {
    let Some(_lock) = SendLock::take(conn) else { return true };
    take_back(conn, map)
}
