//! Descriptors: made, duplicated, closed; options and modes of sockets.

use std::sync::atomic::Ordering;

use libc::{c_int, c_long, c_uint, c_ulong, c_void, sockaddr, socklen_t};
use quipu_cabi::SOL_IWARP;
use quipu_sockets::Look;
use quipu_sockets::report::Reason;

use crate::conn::{Conn, Mode};
use crate::real::real;
use crate::table::{self, Entry};
use crate::{life, process, sys};

const CLOSE_RANGE_CLOEXEC: c_uint = 4;

#[unsafe(no_mangle)]
unsafe extern "C-unwind" fn socket(family: c_int, kind: c_int, protocol: c_int) -> c_int {
    let fd = real!(socket(family => c_int, kind => c_int, protocol => c_int) -> c_int);
    let is_stream = kind & 0xf == libc::SOCK_STREAM;
    if is_stream
        && [libc::AF_INET, libc::AF_INET6].contains(&family)
        && [0, libc::IPPROTO_TCP].contains(&protocol)
    {
        life::made(fd, kind & libc::SOCK_NONBLOCK != 0);
    }
    fd
}

/// Defines connect and its twin.
macro_rules! connect_like {
    ($($name:ident)*) => {$(
        #[unsafe(no_mangle)]
        unsafe extern "C-unwind" fn $name(fd: c_int, to: *const sockaddr, len: socklen_t) -> c_int {
            if let Some(conn) = table::conn(fd) {
                conn.initiator.store(true, Ordering::SeqCst);
            }
            real!(connect(fd => c_int, to => *const sockaddr, len => socklen_t) -> c_int)
        }
    )*};
}
connect_like! { connect __connect }

#[unsafe(no_mangle)]
unsafe extern "C-unwind" fn accept(fd: c_int, from: *mut sockaddr, len: *mut socklen_t) -> c_int {
    let accepted =
        real!(accept(fd => c_int, from => *mut sockaddr, len => *mut socklen_t) -> c_int);
    note_accepted(accepted, 0);
    accepted
}

#[unsafe(no_mangle)]
unsafe extern "C-unwind" fn accept4(
    fd: c_int,
    from: *mut sockaddr,
    len: *mut socklen_t,
    flags: c_int,
) -> c_int {
    let accepted = real!(accept4(fd => c_int, from => *mut sockaddr, len => *mut socklen_t,
        flags => c_int) -> c_int);
    note_accepted(accepted, flags);
    accepted
}

fn note_accepted(fd: c_int, flags: c_int) {
    if fd >= 0 && process::is_enabled() && sys::is_tcp(fd) {
        life::made(fd, flags & libc::SOCK_NONBLOCK != 0);
    }
}

#[unsafe(no_mangle)]
unsafe extern "C-unwind" fn shutdown(fd: c_int, how: c_int) -> c_int {
    life::shutting_down(fd, how);
    real!(shutdown(fd => c_int, how => c_int) -> c_int)
}

/// Defines functions of one descriptor that close it.
macro_rules! close_like {
    ($($name:ident)*) => {$(
        #[unsafe(no_mangle)]
        unsafe extern "C-unwind" fn $name(fd: c_int) -> c_int {
            life::closing(fd);
            real!(close(fd => c_int) -> c_int)
        }
    )*};
}
close_like! { close __close }

#[unsafe(no_mangle)]
unsafe extern "C-unwind" fn close_range(first: c_uint, last: c_uint, flags: c_int) -> c_int {
    if flags as c_uint & CLOSE_RANGE_CLOEXEC == 0 && first <= last {
        close_known(first, last);
    }
    real!(close_range(first => c_uint, last => c_uint, flags => c_int) -> c_int)
}

#[unsafe(no_mangle)]
unsafe extern "C-unwind" fn closefrom(first: c_int) {
    close_known(first.max(0) as c_uint, c_uint::MAX);
    real!(closefrom(first => c_int) -> c_int);
}

fn close_known(first: c_uint, last: c_uint) {
    table::for_range(first, last, |fd, _| life::closing(fd));
}

#[unsafe(no_mangle)]
unsafe extern "C-unwind" fn dup(fd: c_int) -> c_int {
    let copy = real!(dup(fd => c_int) -> c_int);
    life::duplicated(fd, copy);
    copy
}

/// Whether a descriptor is open.
fn is_open(fd: c_int) -> bool {
    sys::quietly(|| sys::call!(SYS_fcntl, fd, libc::F_GETFD) >= 0)
}

/// Defines dup2 and its twin.
macro_rules! dup2_like {
    ($($name:ident)*) => {$(
        #[unsafe(no_mangle)]
        unsafe extern "C-unwind" fn $name(fd: c_int, to: c_int) -> c_int {
            if fd != to && table::get(to).is_some() && is_open(fd) {
                life::closing(to);
            }
            let copy = real!(dup2(fd => c_int, to => c_int) -> c_int);
            life::duplicated(fd, copy);
            copy
        }
    )*};
}
dup2_like! { dup2 __dup2 }

#[unsafe(no_mangle)]
unsafe extern "C-unwind" fn dup3(fd: c_int, to: c_int, flags: c_int) -> c_int {
    if fd != to && flags & !libc::O_CLOEXEC == 0 && table::get(to).is_some() && is_open(fd) {
        life::closing(to);
    }
    let copy = real!(dup3(fd => c_int, to => c_int, flags => c_int) -> c_int);
    life::duplicated(fd, copy);
    copy
}

/// Defines fcntl and its twins. What the argument is depends on the command; it is handed on as it came.
macro_rules! fcntl_like {
    ($($name:ident)*) => {$(
        #[unsafe(no_mangle)]
        unsafe extern "C-unwind" fn $name(fd: c_int, command: c_int, argument: c_ulong) -> c_int {
            let result = real!($name(fd => c_int, command => c_int, argument => c_ulong) -> c_int);
            if result >= 0 {
                note_fcntl(fd, command, argument as c_int, result);
            }
            result
        }
    )*};
}
fcntl_like! { fcntl fcntl64 __fcntl }

fn note_fcntl(fd: c_int, command: c_int, argument: c_int, result: c_int) {
    match command {
        libc::F_DUPFD | libc::F_DUPFD_CLOEXEC => life::duplicated(fd, result),
        libc::F_SETFL => {
            if argument & libc::O_ASYNC != 0 {
                // The kernel sends signals for what it receives itself.
                life::plain_fd(fd, Reason::Feature);
            }
            note_nonblocking(fd, argument & libc::O_NONBLOCK != 0);
        }
        _ => {}
    }
}

fn note_nonblocking(fd: c_int, nonblocking: bool) {
    if let Some(conn) = table::conn(fd) {
        conn.nonblocking.store(nonblocking, Ordering::Relaxed);
    }
}

#[unsafe(no_mangle)]
unsafe extern "C-unwind" fn ioctl(fd: c_int, request: c_ulong, argument: c_ulong) -> c_int {
    // SAFETY: passed on from the caller.
    if request == libc::FIONREAD && unsafe { is_answered(fd, argument) } {
        return 0;
    }
    let result = real!(ioctl(fd => c_int, request => c_ulong, argument => c_ulong) -> c_int);
    if result == 0
        && let Some(conn) = table::conn(fd)
        && conn.mode() != Mode::Plain
    {
        // SAFETY: the kernel has just used the program's variable for these requests.
        unsafe { note_ioctl(conn, request, argument) };
    }
    result
}

/// Answers FIONREAD where the next octets are in the ring. TCP has none then, so the kernel need not be
/// asked.
///
/// # Safety
///
/// The argument is the address of an integer.
unsafe fn is_answered(fd: c_int, argument: c_ulong) -> bool {
    let Some(conn) = table::conn(fd) else { return false };
    if conn.mode() != Mode::Raised || !conn.enter() {
        return false;
    }
    let look = conn.map().map(|map| map.receiver().look());
    let is_in_ring = conn.receives.load(Ordering::SeqCst);
    conn.leave();
    let Some(Look::Ring { pieces, .. }) = look.filter(|_| is_in_ring) else { return false };
    let at = std::ptr::with_exposed_provenance_mut::<c_int>(argument as usize);
    // SAFETY: passed on from the caller.
    unsafe { at.write(pieces.len as c_int) };
    true
}

/// # Safety
///
/// For the requests below, the argument is the address of an integer.
unsafe fn note_ioctl(conn: &'static Conn, request: c_ulong, argument: c_ulong) {
    let at = std::ptr::with_exposed_provenance_mut::<c_int>(argument as usize);
    match request {
        libc::FIONREAD if conn.enter() => {
            if let Some(map) = conn.map() {
                // SAFETY: passed on from the caller.
                unsafe { *at = at.read().saturating_add(map.receiver().unread() as c_int) };
            }
            conn.leave();
        }
        libc::FIONBIO => {
            // SAFETY: passed on from the caller.
            conn.nonblocking.store(unsafe { at.read() } != 0, Ordering::Relaxed);
        }
        libc::FIOASYNC => life::plain(conn, Reason::Feature),
        _ => {}
    }
}

/// Options after which only the kernel can serve a socket: stamps, filters, zero copy, encryption.
const KERNEL_ONLY: [(c_int, c_int); 17] = [
    (libc::SOL_SOCKET, libc::SO_ZEROCOPY),
    (libc::SOL_SOCKET, libc::SO_TIMESTAMP),
    (libc::SOL_SOCKET, libc::SO_TIMESTAMPNS),
    (libc::SOL_SOCKET, libc::SO_TIMESTAMPING),
    (libc::SOL_SOCKET, libc::SO_TXTIME),
    (libc::SOL_SOCKET, libc::SO_ATTACH_FILTER),
    (libc::SOL_SOCKET, libc::SO_ATTACH_BPF),
    (libc::SOL_SOCKET, libc::SO_PEEK_OFF),
    (libc::SOL_SOCKET, libc::SO_MARK),
    (libc::SOL_SOCKET, libc::SO_BINDTODEVICE),
    (libc::SOL_SOCKET, libc::SO_OOBINLINE),
    (libc::SOL_SOCKET, libc::SO_RCVLOWAT),
    (libc::IPPROTO_TCP, libc::TCP_ULP),
    (libc::IPPROTO_TCP, libc::TCP_REPAIR),
    (libc::IPPROTO_TCP, libc::TCP_MD5SIG),
    (libc::IPPROTO_TCP, libc::TCP_FASTOPEN_CONNECT),
    (libc::IPPROTO_IP, libc::IP_TRANSPARENT),
];

#[unsafe(no_mangle)]
unsafe extern "C-unwind" fn setsockopt(
    fd: c_int,
    level: c_int,
    name: c_int,
    value: *const c_void,
    len: socklen_t,
) -> c_int {
    // The extended sockets interface speaks on the kernel's connection itself.
    if level == SOL_IWARP || KERNEL_ONLY.contains(&(level, name)) {
        life::plain_fd(fd, Reason::Feature);
    }
    if (level, name) == (libc::IPPROTO_TCP, libc::TCP_NODELAY)
        && len as usize >= size_of::<c_int>()
        && !value.is_null()
        && let Some(conn) = taken_nodelay(fd)
    {
        // SAFETY: the program passes a number of that length.
        let value = unsafe { value.cast::<c_int>().read_unaligned() };
        conn.nodelay.store(value != 0, Ordering::SeqCst);
        return 0;
    }
    real!(setsockopt(fd => c_int, level => c_int, name => c_int, value => *const c_void,
        len => socklen_t) -> c_int)
}

/// A socket whose `TCP_NODELAY` is the library's, not the program's.
fn taken_nodelay(fd: c_int) -> Option<&'static Conn> {
    let conn = table::conn(fd)?;
    let is_taken = conn.mode() == Mode::Raised
        && conn.has_nodelay.load(Ordering::SeqCst)
        && !conn.leaving.load(Ordering::SeqCst);
    is_taken.then_some(conn)
}

#[unsafe(no_mangle)]
unsafe extern "C-unwind" fn getsockopt(
    fd: c_int,
    level: c_int,
    name: c_int,
    value: *mut c_void,
    len: *mut socklen_t,
) -> c_int {
    let result = real!(getsockopt(fd => c_int, level => c_int, name => c_int,
        value => *mut c_void, len => *mut socklen_t) -> c_int);
    if result == 0
        && (level, name) == (libc::IPPROTO_TCP, libc::TCP_NODELAY)
        && let Some(conn) = taken_nodelay(fd)
    {
        let number = c_int::from(conn.nodelay.load(Ordering::SeqCst)).to_ne_bytes();
        // SAFETY: the kernel has just written so many octets there.
        unsafe {
            let len = (*len as usize).min(number.len());
            std::ptr::copy_nonoverlapping(number.as_ptr(), value.cast(), len);
        }
    }
    result
}

/// What programs do by number passes the functions above. Some of it is handed to them; what would
/// escape them keeps the process with the kernel.
#[unsafe(no_mangle)]
unsafe extern "C-unwind" fn syscall(
    number: c_long,
    a: c_ulong,
    b: c_ulong,
    c: c_ulong,
    d: c_ulong,
    e: c_ulong,
    f: c_ulong,
) -> c_long {
    match number {
        libc::SYS_io_uring_setup | libc::SYS_io_setup | libc::SYS_seccomp => all_plain(),
        libc::SYS_close => life::closing(a as c_int),
        libc::SYS_close_range if c as c_uint & CLOSE_RANGE_CLOEXEC == 0 => {
            close_known(a as c_uint, b as c_uint);
        }
        libc::SYS_read
        | libc::SYS_readv
        | libc::SYS_recvfrom
        | libc::SYS_recvmsg
        | libc::SYS_recvmmsg => life::plain_fd(a as c_int, Reason::Unseen),
        libc::SYS_write
        | libc::SYS_writev
        | libc::SYS_sendto
        | libc::SYS_sendmsg
        | libc::SYS_sendmmsg
        | libc::SYS_sendfile
            if !crate::send::leaves_to_kernel(a as c_int, 0, Reason::Unseen) =>
        {
            return -1;
        }
        libc::SYS_shutdown => life::shutting_down(a as c_int, b as c_int),
        libc::SYS_epoll_ctl | libc::SYS_epoll_pwait | libc::SYS_epoll_pwait2 => {
            if let Some(Entry::Set(set)) = table::get(a as c_int) {
                set.leave_to_kernel();
            }
        }
        _ => {}
    }
    real!(syscall(number => c_long, a => c_ulong, b => c_ulong, c => c_ulong, d => c_ulong,
        e => c_ulong, f => c_ulong) -> c_long)
}

#[unsafe(no_mangle)]
unsafe extern "C-unwind" fn prctl(
    option: c_int,
    a: c_ulong,
    b: c_ulong,
    c: c_ulong,
    d: c_ulong,
) -> c_int {
    if option == libc::PR_SET_SECCOMP {
        // What this library calls may be forbidden.
        all_plain();
    }
    real!(prctl(option => c_int, a => c_ulong, b => c_ulong, c => c_ulong, d => c_ulong) -> c_int)
}

/// The whole process uses the kernel's sockets from now on.
fn all_plain() {
    process::disable();
    sys::quietly(|| crate::conn::for_all(|conn| life::plain(conn, Reason::Unseen)));
}
