//! The life of descriptors: made, duplicated, closed.

use std::sync::atomic::Ordering;

use libc::c_int;
use quipu_sockets::report::Reason;

use crate::conn::{Conn, Mode};
use crate::set::Set;
use crate::table::{self, Entry};
use crate::{process, sys};

/// A TCP socket was made.
pub(crate) fn made(fd: c_int, nonblocking: bool) {
    if fd < 0 || !process::is_enabled() || !process::is_own() {
        return;
    }
    sys::quietly(|| {
        if let Some(conn) = Conn::create(fd, nonblocking)
            && !table::put(fd, Entry::Conn(conn))
        {
            conn.close();
        }
    });
}

/// An epoll set was made.
pub(crate) fn made_set(fd: c_int) {
    if fd >= 0 && process::is_enabled() && process::is_own() {
        sys::quietly(|| table::put(fd, Entry::Set(Set::create())));
    }
}

/// A descriptor was duplicated.
pub(crate) fn duplicated(from: c_int, to: c_int) {
    if to >= 0
        && to != from
        && let Some(entry) = table::get(from)
        && process::is_own()
    {
        sys::quietly(|| {
            table::put(to, entry);
            if to <= libc::STDERR_FILENO {
                leave_to_stdio(to);
            }
        });
    }
}

/// A descriptor is about to be closed.
pub(crate) fn closing(fd: c_int) {
    if table::get(fd).is_none() || !process::is_own() {
        return;
    }
    sys::quietly(|| match table::take(fd) {
        Some(Entry::Conn(conn)) => dropped(conn, fd, true),
        Some(Entry::Set(set)) => set.remove_descriptor(),
        None => {}
    });
}

/// A socket loses a descriptor, which is still open or not.
pub(crate) fn dropped(conn: &'static Conn, fd: c_int, is_open: bool) {
    if !conn.remove_descriptor(fd) {
        return;
    }
    crate::set::forget(conn);
    if conn.remove_owner() && conn.enter() {
        if let Some(map) = conn.map() {
            map.own().closed.store(1, Ordering::SeqCst);
            if is_open && map.receiver().unread() > 0 {
                reset_on_close(fd);
            }
        }
        conn.leave();
    }
    conn.close();
}

/// Octets are unread, so closing the socket is to reset the connection, as that of TCP does.
fn reset_on_close(fd: c_int) {
    let linger = libc::linger { l_onoff: 1, l_linger: 0 };
    let len = size_of::<libc::linger>();
    let (level, name) = (libc::SOL_SOCKET, libc::SO_LINGER);
    sys::call!(SYS_setsockopt, fd, level, name, &raw const linger, len);
}

/// Another process, which may not know Quipu, gets a descriptor: the socket is the kernel's for good.
pub(crate) fn given_away(fd: c_int, reason: Reason) {
    let Some(conn) = table::conn(fd) else { return };
    if conn.mode() == Mode::Plain {
        return;
    }
    sys::quietly(|| {
        conn.add_owner();
        plain(conn, reason);
    });
}

/// Has a socket stay with the kernel from now on.
pub(crate) fn plain(conn: &'static Conn, reason: Reason) {
    if conn.enter() {
        conn.make_plain(reason);
        conn.leave();
    }
}

/// TCP is about to be shut down: what is sent, what is received or both.
pub(crate) fn shutting_down(fd: c_int, how: c_int) {
    // The kernel says from now on what sending and receiving give.
    plain_fd(fd, Reason::Feature);
    if how != libc::SHUT_RD
        && let Some(conn) = table::conn(fd)
        && conn.mode() == Mode::Raised
    {
        conn.shut();
    }
}

/// Has a socket stay with the kernel, by descriptor.
pub(crate) fn plain_fd(fd: c_int, reason: Reason) {
    if let Some(conn) = table::conn(fd)
        && conn.mode() != Mode::Plain
    {
        sys::quietly(|| plain(conn, reason));
    }
}

/// stdio calls the system by itself, which no library sees. So the socket stays with the kernel, and what is
/// in its ring goes to the kernel first, as far as the kernel takes it.
pub(crate) fn leave_to_stdio(fd: c_int) {
    sys::quietly(|| crate::send::leaves_to_kernel(fd, 0, Reason::Feature));
}
