//! The C library's functions that look whether a socket is in the mode. All others go on to the next
//! definition, after one look at the table.

use std::ffi::CStr;
use std::ptr::null_mut;
use std::sync::Arc;
use std::sync::atomic::{AtomicPtr, Ordering};

use libc::{c_int, c_void, iovec, msghdr, size_t, sockaddr, socklen_t, ssize_t};
use quipu_cabi::{Errno, IWARP_MODE, SOL_IWARP};

use crate::entry::set_mode;
use crate::socket::Socket;
use crate::{sys, table};

/// Where the next definition of a function is.
struct Next {
    name: &'static CStr,
    address: AtomicPtr<c_void>,
}

impl Next {
    const fn new(name: &'static CStr) -> Self {
        Self { name, address: AtomicPtr::new(null_mut()) }
    }

    #[inline]
    fn address(&self) -> *mut c_void {
        let known = self.address.load(Ordering::Relaxed);
        if known.is_null() { self.look_up() } else { known }
    }

    #[cold]
    fn look_up(&self) -> *mut c_void {
        let found = sys::next(self.name);
        self.address.store(found, Ordering::Relaxed);
        found
    }
}

/// Calls the next definition of a function.
macro_rules! next {
    ($name:literal, ($($arg:expr => $ty:ty),*) -> $ret:ty) => {{
        static NEXT: Next = Next::new($name);
        let address = NEXT.address();
        if address.is_null() {
            Errno::ENOSYS.set();
            -1 as $ret
        } else {
            // SAFETY: the C library defines the function with this type; the caller's arguments are
            // handed on as they came.
            unsafe {
                std::mem::transmute::<*mut c_void, unsafe extern "C-unwind" fn($($ty),*) -> $ret>(
                    address,
                )($($arg),*)
            }
        }
    }};
}

/// Gives a result the form that C has for it.
fn result<T: TryInto<ssize_t>>(result: Result<T, Errno>) -> ssize_t {
    match result {
        Ok(value) => value.try_into().unwrap_or(ssize_t::MAX),
        Err(errno) => {
            errno.set();
            -1
        }
    }
}

/// Whether a call may wait: of the socket's mode, and of the call.
fn waits(fd: c_int, flags: c_int) -> bool {
    // SAFETY: takes numbers.
    let status = unsafe { libc::fcntl(fd, libc::F_GETFL) };
    flags & libc::MSG_DONTWAIT == 0 && status & libc::O_NONBLOCK == 0
}

/// Flags of receiving and sending that mean something here, or nothing.
const KNOWN: c_int = libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL | libc::MSG_MORE | libc::MSG_EOR;

/// A buffer of the program.
///
/// # Safety
///
/// The program's buffer has this length.
unsafe fn buffer<'a>(at: *mut c_void, len: usize) -> &'a mut [u8] {
    if at.is_null() || len == 0 {
        return &mut [];
    }
    // SAFETY: passed on from the caller. Longer ones are cut, as read(2) does.
    unsafe { std::slice::from_raw_parts_mut(at.cast(), len.min(0x7fff_f000)) }
}

fn read_into(socket: &Arc<Socket>, fd: c_int, into: &mut [u8], flags: c_int) -> ssize_t {
    if flags & !KNOWN != 0 {
        return result::<usize>(Err(Errno::EOPNOTSUPP));
    }
    result(walled(|| socket.read(fd, into, waits(fd, flags))))
}

fn write_from(socket: &Arc<Socket>, fd: c_int, bytes: &[u8], flags: c_int) -> ssize_t {
    if flags & !KNOWN != 0 {
        return result::<usize>(Err(Errno::EOPNOTSUPP));
    }
    result(walled(|| socket.write(bytes, waits(fd, flags))))
}

/// The panic wall of functions whose result is of another type than the entry points'.
fn walled<T>(body: impl FnOnce() -> Result<T, Errno>) -> Result<T, Errno> {
    std::panic::catch_unwind(std::panic::AssertUnwindSafe(body)).unwrap_or(Err(Errno::EIO))
}

/// All bytes of a list, for one message.
///
/// # Safety
///
/// The list has `count` entries, which name buffers of the program.
unsafe fn joined(list: *const iovec, count: usize) -> Vec<u8> {
    let mut bytes = Vec::new();
    for at in 0..count {
        // SAFETY: passed on from the caller.
        let part = unsafe { list.add(at).read_unaligned() };
        // SAFETY: as above.
        bytes.extend_from_slice(unsafe { buffer(part.iov_base, part.iov_len) });
    }
    bytes
}

/// Reads into the first buffer of a list that is not empty: fewer bytes than asked for are always legal.
///
/// # Safety
///
/// As of [`joined`].
unsafe fn first<'a>(list: *const iovec, count: usize) -> &'a mut [u8] {
    // SAFETY: passed on from the caller.
    let parts = (0..count).map(|at| unsafe { list.add(at).read_unaligned() });
    match parts.into_iter().find(|part| part.iov_len > 0) {
        // SAFETY: as above.
        Some(part) => unsafe { buffer(part.iov_base, part.iov_len) },
        None => &mut [],
    }
}

#[unsafe(no_mangle)]
unsafe extern "C-unwind" fn connect(fd: c_int, to: *const sockaddr, len: socklen_t) -> c_int {
    table::note_connect(fd);
    next!(c"connect", (fd => c_int, to => *const sockaddr, len => socklen_t) -> c_int)
}

#[unsafe(no_mangle)]
unsafe extern "C-unwind" fn accept(fd: c_int, from: *mut sockaddr, len: *mut socklen_t) -> c_int {
    let new =
        next!(c"accept", (fd => c_int, from => *mut sockaddr, len => *mut socklen_t) -> c_int);
    forget(new);
    new
}

#[unsafe(no_mangle)]
unsafe extern "C-unwind" fn accept4(
    fd: c_int,
    from: *mut sockaddr,
    len: *mut socklen_t,
    flags: c_int,
) -> c_int {
    let new = next!(c"accept4", (fd => c_int, from => *mut sockaddr, len => *mut socklen_t,
        flags => c_int) -> c_int);
    forget(new);
    new
}

#[unsafe(no_mangle)]
unsafe extern "C-unwind" fn socket(family: c_int, kind: c_int, protocol: c_int) -> c_int {
    let new = next!(c"socket", (family => c_int, kind => c_int, protocol => c_int) -> c_int);
    forget(new);
    new
}

/// A new descriptor: what was known of its number is of another.
fn forget(fd: c_int) {
    if let Some(socket) = table::take(fd) {
        socket.close();
    }
}

#[unsafe(no_mangle)]
unsafe extern "C-unwind" fn close(fd: c_int) -> c_int {
    if let Some(socket) = table::take(fd) {
        socket.close();
    }
    next!(c"close", (fd => c_int) -> c_int)
}

#[unsafe(no_mangle)]
unsafe extern "C-unwind" fn setsockopt(
    fd: c_int,
    level: c_int,
    name: c_int,
    value: *const c_void,
    len: socklen_t,
) -> c_int {
    if (level, name) == (SOL_IWARP, IWARP_MODE) {
        // A library that carries the connection otherwise lets it go when it sees the option.
        next!(c"setsockopt", (fd => c_int, level => c_int, name => c_int,
            value => *const c_void, len => socklen_t) -> c_int);
        return result(walled(|| set_mode(fd, value, len).map(i64::from))) as c_int;
    }
    let fd = table::get(fd).map_or(fd, |socket| socket.tcp());
    next!(c"setsockopt", (fd => c_int, level => c_int, name => c_int, value => *const c_void,
        len => socklen_t) -> c_int)
}

#[unsafe(no_mangle)]
unsafe extern "C-unwind" fn getsockopt(
    fd: c_int,
    level: c_int,
    name: c_int,
    value: *mut c_void,
    len: *mut socklen_t,
) -> c_int {
    let socket = table::get(fd);
    if (level, name) == (SOL_IWARP, IWARP_MODE) && !value.is_null() && !len.is_null() {
        // SAFETY: the program passes a place for a number, and its length.
        unsafe {
            if len.read() < 4 {
                Errno::EINVAL.set();
                return -1;
            }
            value.cast::<c_int>().write_unaligned(c_int::from(socket.is_some()));
            len.write(4);
        }
        return 0;
    }
    let fd = socket.map_or(fd, |socket| socket.tcp());
    next!(c"getsockopt", (fd => c_int, level => c_int, name => c_int, value => *mut c_void,
        len => *mut socklen_t) -> c_int)
}

/// Defines the functions that ask for an address.
macro_rules! name_like {
    ($($name:ident, $c:literal;)*) => {$(
        #[unsafe(no_mangle)]
        unsafe extern "C-unwind" fn $name(
            fd: c_int, address: *mut sockaddr, len: *mut socklen_t,
        ) -> c_int {
            let fd = table::get(fd).map_or(fd, |socket| socket.tcp());
            next!($c, (fd => c_int, address => *mut sockaddr, len => *mut socklen_t) -> c_int)
        }
    )*};
}
name_like! { getsockname, c"getsockname"; getpeername, c"getpeername"; }

#[unsafe(no_mangle)]
unsafe extern "C-unwind" fn read(fd: c_int, into: *mut c_void, len: size_t) -> ssize_t {
    match table::get(fd) {
        // SAFETY: the program's buffer.
        Some(socket) => read_into(&socket, fd, unsafe { buffer(into, len) }, 0),
        None => next!(c"read", (fd => c_int, into => *mut c_void, len => size_t) -> ssize_t),
    }
}

#[unsafe(no_mangle)]
unsafe extern "C-unwind" fn recv(
    fd: c_int,
    into: *mut c_void,
    len: size_t,
    flags: c_int,
) -> ssize_t {
    match table::get(fd) {
        // SAFETY: the program's buffer.
        Some(socket) => read_into(&socket, fd, unsafe { buffer(into, len) }, flags),
        None => next!(c"recv", (fd => c_int, into => *mut c_void, len => size_t,
            flags => c_int) -> ssize_t),
    }
}

#[unsafe(no_mangle)]
unsafe extern "C-unwind" fn recvfrom(
    fd: c_int,
    into: *mut c_void,
    len: size_t,
    flags: c_int,
    from: *mut sockaddr,
    from_len: *mut socklen_t,
) -> ssize_t {
    match table::get(fd) {
        // SAFETY: the program's buffer.
        Some(socket) => read_into(&socket, fd, unsafe { buffer(into, len) }, flags),
        None => next!(c"recvfrom", (fd => c_int, into => *mut c_void, len => size_t,
            flags => c_int, from => *mut sockaddr, from_len => *mut socklen_t) -> ssize_t),
    }
}

#[unsafe(no_mangle)]
unsafe extern "C-unwind" fn readv(fd: c_int, list: *const iovec, count: c_int) -> ssize_t {
    match table::get(fd) {
        // SAFETY: the program's list.
        Some(socket) => read_into(&socket, fd, unsafe { first(list, count.max(0) as usize) }, 0),
        None => next!(c"readv", (fd => c_int, list => *const iovec, count => c_int) -> ssize_t),
    }
}

#[unsafe(no_mangle)]
unsafe extern "C-unwind" fn recvmsg(fd: c_int, message: *mut msghdr, flags: c_int) -> ssize_t {
    match table::get(fd) {
        Some(socket) if !message.is_null() => {
            // SAFETY: the program's message, and its list.
            let into = unsafe {
                ((*message).msg_namelen, (*message).msg_controllen) = (0, 0);
                (*message).msg_flags = 0;
                first((*message).msg_iov, (*message).msg_iovlen)
            };
            read_into(&socket, fd, into, flags)
        }
        _ => next!(c"recvmsg", (fd => c_int, message => *mut msghdr, flags => c_int) -> ssize_t),
    }
}

#[unsafe(no_mangle)]
unsafe extern "C-unwind" fn write(fd: c_int, from: *const c_void, len: size_t) -> ssize_t {
    match table::get(fd) {
        // SAFETY: the program's buffer.
        Some(socket) => write_from(&socket, fd, unsafe { buffer(from.cast_mut(), len) }, 0),
        None => next!(c"write", (fd => c_int, from => *const c_void, len => size_t) -> ssize_t),
    }
}

#[unsafe(no_mangle)]
unsafe extern "C-unwind" fn send(
    fd: c_int,
    from: *const c_void,
    len: size_t,
    flags: c_int,
) -> ssize_t {
    match table::get(fd) {
        // SAFETY: the program's buffer.
        Some(socket) => write_from(&socket, fd, unsafe { buffer(from.cast_mut(), len) }, flags),
        None => next!(c"send", (fd => c_int, from => *const c_void, len => size_t,
            flags => c_int) -> ssize_t),
    }
}

#[unsafe(no_mangle)]
unsafe extern "C-unwind" fn sendto(
    fd: c_int,
    from: *const c_void,
    len: size_t,
    flags: c_int,
    to: *const sockaddr,
    to_len: socklen_t,
) -> ssize_t {
    match table::get(fd) {
        // SAFETY: the program's buffer.
        Some(socket) => write_from(&socket, fd, unsafe { buffer(from.cast_mut(), len) }, flags),
        None => next!(c"sendto", (fd => c_int, from => *const c_void, len => size_t,
            flags => c_int, to => *const sockaddr, to_len => socklen_t) -> ssize_t),
    }
}

#[unsafe(no_mangle)]
unsafe extern "C-unwind" fn writev(fd: c_int, list: *const iovec, count: c_int) -> ssize_t {
    match table::get(fd) {
        Some(socket) => {
            // SAFETY: the program's list.
            let bytes = unsafe { joined(list, count.max(0) as usize) };
            write_from(&socket, fd, &bytes, 0)
        }
        None => next!(c"writev", (fd => c_int, list => *const iovec, count => c_int) -> ssize_t),
    }
}

#[unsafe(no_mangle)]
unsafe extern "C-unwind" fn sendmsg(fd: c_int, message: *const msghdr, flags: c_int) -> ssize_t {
    match table::get(fd) {
        Some(socket) if !message.is_null() => {
            // SAFETY: the program's message, and its list.
            let bytes = unsafe { joined((*message).msg_iov, (*message).msg_iovlen) };
            write_from(&socket, fd, &bytes, flags)
        }
        _ => next!(c"sendmsg", (fd => c_int, message => *const msghdr, flags => c_int) -> ssize_t),
    }
}
