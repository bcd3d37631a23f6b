//! read, write, send, recv and their kin.

use libc::{c_int, c_void, iovec, msghdr, sockaddr, socklen_t, ssize_t};
use quipu_cabi::for_passed_descriptors;
use quipu_sockets::report::Reason;

use crate::conn::Conn;
use crate::iov::{self, Cursor};
use crate::real::real;
use crate::send::Plan;
use crate::{life, recv, send, sys};

/// No piece.
const NOTHING: iovec = iovec { iov_base: std::ptr::null_mut(), iov_len: 0 };
/// Pieces that fit on the stack when the kernel gets what is left of a list.
const FEW: usize = 16;

fn one(base: *const c_void, len: usize) -> [iovec; 1] {
    [iovec { iov_base: base.cast_mut(), iov_len: len }]
}

/// The program's list of buffers.
///
/// # Safety
///
/// The program passes a list of that length.
unsafe fn list<'a>(pieces: *const iovec, count: usize) -> &'a [iovec] {
    if pieces.is_null() || count > iov::MAX {
        return &[];
    }
    // SAFETY: passed on from the caller.
    unsafe { std::slice::from_raw_parts(pieces, count) }
}

fn done(value: isize, errno: c_int) -> ssize_t {
    if value < 0 {
        sys::set_errno(errno);
    }
    value
}

/// Sends what is left by the kernel. Where that is much, after each part of it there is a look whether the
/// receiver has consented to the ring meanwhile.
fn kernel_sends(
    fd: c_int,
    conn: &'static Conn,
    mut before: usize,
    data: &mut Cursor<'_>,
    flags: c_int,
) -> ssize_t {
    loop {
        let mut few = [NOTHING; FEW];
        let (rest, len) = data.rest(&mut few, send::part_for_tcp(conn, flags));
        let errno = sys::errno();
        // SAFETY: all zeroes is an empty message.
        let mut message: msghdr = unsafe { std::mem::zeroed() };
        message.msg_iov = rest.as_ptr().cast_mut();
        message.msg_iovlen = rest.len() as _;
        // A call that has sent something returns how much that is, and raises no SIGPIPE.
        let flags_now = if before > 0 { flags | libc::MSG_NOSIGNAL } else { flags };
        let sent = real!(sendmsg(fd => c_int, &raw const message => *const msghdr,
            flags_now => c_int) -> ssize_t);
        if before > 0 && sent < 0 {
            sys::set_errno(errno);
        }
        if usize::try_from(sent) != Ok(len) {
            return send::finish(conn, before, sent);
        }
        data.skip(len);
        match send::go_on(conn, before, len, data, flags) {
            Plan::Done(value, errno) => return done(value, errno),
            Plan::Kernel(_, so_far) => before = so_far,
            Plan::Pass => return (before + len) as ssize_t,
        }
    }
}

/// Receives what is left by the kernel.
fn kernel_receives(
    fd: c_int,
    conn: &'static Conn,
    before: usize,
    into: &mut Cursor<'_>,
    flags: c_int,
) -> ssize_t {
    let mut few = [NOTHING; FEW];
    let (rest, _) = into.rest(&mut few, usize::MAX);
    // SAFETY: all zeroes is an empty message.
    let mut message: msghdr = unsafe { std::mem::zeroed() };
    message.msg_iov = rest.as_ptr().cast_mut();
    message.msg_iovlen = rest.len() as _;
    let received =
        real!(recvmsg(fd => c_int, &raw mut message => *mut msghdr, flags => c_int) -> ssize_t);
    recv::finish(conn, before, received, into, flags)
}

/// Defines functions that send octets. `$kernel` is the real call with the caller's own arguments.
macro_rules! sends {
    ($($name:ident $real:ident($fd:ident $(, $arg:ident: $ty:ty)*; $flags:expr,
        $pieces:expr);)*) => {$(
        #[unsafe(no_mangle)]
        unsafe extern "C-unwind" fn $name($fd: c_int $(, $arg: $ty)*) -> ssize_t {
            if send::is_plain($fd) {
                return real!($real($fd => c_int $(, $arg => $ty)*) -> ssize_t);
            }
            let pieces = $pieces;
            let mut data = Cursor::new(&pieces[..]);
            match send::plan($fd, &mut data, $flags) {
                Plan::Pass => real!($real($fd => c_int $(, $arg => $ty)*) -> ssize_t),
                Plan::Done(value, errno) => done(value, errno),
                Plan::Kernel(conn, 0) if !send::is_divided(conn, &data, $flags) => {
                    let sent = real!($real($fd => c_int $(, $arg => $ty)*) -> ssize_t);
                    send::finish(conn, 0, sent)
                }
                Plan::Kernel(conn, before) => kernel_sends($fd, conn, before, &mut data, $flags),
            }
        }
    )*};
}

sends! {
    write write(fd, data_at: *const c_void, len: usize; 0, one(data_at, len));
    __write write(fd, data_at: *const c_void, len: usize; 0, one(data_at, len));
    send send(fd, data_at: *const c_void, len: usize, flags: c_int; flags, one(data_at, len));
    __send send(fd, data_at: *const c_void, len: usize, flags: c_int; flags, one(data_at, len));
    sendto sendto(fd, data_at: *const c_void, len: usize, flags: c_int, to: *const sockaddr,
        to_len: socklen_t; flags, one(data_at, len));
    // SAFETY: the program passes a list of buffers.
    writev writev(fd, list_at: *const iovec, count: c_int; 0, unsafe { list(list_at,
        count as usize) });
}

/// Defines functions that receive octets.
macro_rules! receives {
    ($($name:ident $real:ident($fd:ident $(, $arg:ident: $ty:ty)*; $flags:expr,
        $pieces:expr);)*) => {$(
        #[unsafe(no_mangle)]
        unsafe extern "C-unwind" fn $name($fd: c_int $(, $arg: $ty)*) -> ssize_t {
            if send::is_plain($fd) {
                return real!($real($fd => c_int $(, $arg => $ty)*) -> ssize_t);
            }
            let pieces = $pieces;
            let mut into = Cursor::new(&pieces[..]);
            match recv::plan($fd, &mut into, $flags) {
                Plan::Pass => real!($real($fd => c_int $(, $arg => $ty)*) -> ssize_t),
                Plan::Done(value, errno) => done(value, errno),
                Plan::Kernel(conn, 0) => {
                    let received = real!($real($fd => c_int $(, $arg => $ty)*) -> ssize_t);
                    recv::finish(conn, 0, received, &mut into, $flags)
                }
                Plan::Kernel(conn, before) => kernel_receives($fd, conn, before, &mut into, $flags),
            }
        }
    )*};
}

receives! {
    read read(fd, at: *mut c_void, len: usize; 0, one(at, len));
    __read read(fd, at: *mut c_void, len: usize; 0, one(at, len));
    recv recv(fd, at: *mut c_void, len: usize, flags: c_int; flags, one(at, len));
    __recv recv(fd, at: *mut c_void, len: usize, flags: c_int; flags, one(at, len));
    // SAFETY: the program passes a list of buffers.
    readv readv(fd, list_at: *const iovec, count: c_int; 0, unsafe { list(list_at,
        count as usize) });
}

/// Defines functions that the compiler calls where it knows how much room the program has.
macro_rules! checked {
    ($($name:ident $real:ident $plain:ident($fd:ident, $at:ident, $len:ident, $room:ident
        $(, $arg:ident: $ty:ty)*);)*) => {$(
        #[unsafe(no_mangle)]
        unsafe extern "C-unwind" fn $name(
            $fd: c_int, $at: *mut c_void, $len: usize, $room: usize $(, $arg: $ty)*
        ) -> ssize_t {
            if $len > $room {
                // It ends the process, with a message.
                return real!($name($fd => c_int, $at => *mut c_void, $len => usize, $room => usize
                    $(, $arg => $ty)*) -> ssize_t);
            }
            // SAFETY: as the program called this.
            unsafe { $plain($fd, $at, $len $(, $arg)*) }
        }
    )*};
}

checked! {
    __read_chk read read(fd, at, len, room);
    __recv_chk recv recv(fd, at, len, room, flags: c_int);
    __recvfrom_chk recvfrom recvfrom(fd, at, len, room, flags: c_int, from: *mut sockaddr,
        from_len: *mut socklen_t);
}

#[unsafe(no_mangle)]
unsafe extern "C-unwind" fn recvfrom(
    fd: c_int,
    at: *mut c_void,
    len: usize,
    flags: c_int,
    from: *mut sockaddr,
    from_len: *mut socklen_t,
) -> ssize_t {
    let pieces = one(at, len);
    let mut into = Cursor::new(&pieces);
    let plan = recv::plan(fd, &mut into, flags);
    if let Plan::Done(1.., _) | Plan::Kernel(_, 1..) = plan
        && !from.is_null()
        && !from_len.is_null()
    {
        // TCP gives no address.
        // SAFETY: the program passes a variable.
        unsafe { *from_len = 0 };
    }
    match plan {
        Plan::Done(value, errno) => done(value, errno),
        Plan::Kernel(conn, before) if before > 0 => {
            kernel_receives(fd, conn, before, &mut into, flags)
        }
        plan => {
            let received = real!(recvfrom(fd => c_int, at => *mut c_void, len => usize,
                flags => c_int,
                from => *mut sockaddr, from_len => *mut socklen_t) -> ssize_t);
            match plan {
                Plan::Kernel(conn, _) => recv::finish(conn, 0, received, &mut into, flags),
                _ => received,
            }
        }
    }
}

#[unsafe(no_mangle)]
unsafe extern "C-unwind" fn recvmsg(fd: c_int, message: *mut msghdr, flags: c_int) -> ssize_t {
    // SAFETY: the program passes a message, or null, for which the kernel has an error.
    let pieces = unsafe { message.as_ref().map_or(&[][..], |m| list(m.msg_iov, m.msg_iovlen)) };
    let mut into = Cursor::new(pieces);
    match recv::plan(fd, &mut into, flags) {
        Plan::Pass => {
            real!(recvmsg(fd => c_int, message => *mut msghdr, flags => c_int) -> ssize_t)
        }
        Plan::Kernel(conn, 0) => {
            let received =
                real!(recvmsg(fd => c_int, message => *mut msghdr, flags => c_int) -> ssize_t);
            recv::finish(conn, 0, received, &mut into, flags)
        }
        plan => {
            // SAFETY: something was received, so there is a message.
            unsafe {
                (*message).msg_namelen = 0;
                (*message).msg_controllen = 0;
                (*message).msg_flags = 0;
            }
            match plan {
                Plan::Kernel(conn, before) => kernel_receives(fd, conn, before, &mut into, flags),
                Plan::Done(value, errno) => done(value, errno),
                Plan::Pass => -1,
            }
        }
    }
}

#[unsafe(no_mangle)]
unsafe extern "C-unwind" fn sendmsg(fd: c_int, message: *const msghdr, flags: c_int) -> ssize_t {
    // SAFETY: the program passes a message, or null, for which the kernel has an error.
    let pieces = unsafe { message.as_ref().map_or(&[][..], |m| list(m.msg_iov, m.msg_iovlen)) };
    // SAFETY: as above.
    unsafe { gives_descriptors(message) };
    let mut data = Cursor::new(pieces);
    match send::plan(fd, &mut data, flags) {
        Plan::Pass => {
            real!(sendmsg(fd => c_int, message => *const msghdr, flags => c_int) -> ssize_t)
        }
        Plan::Done(value, errno) => done(value, errno),
        Plan::Kernel(conn, 0) if has_control(message) || !send::is_divided(conn, &data, flags) => {
            let sent =
                real!(sendmsg(fd => c_int, message => *const msghdr, flags => c_int) -> ssize_t);
            send::finish(conn, 0, sent)
        }
        Plan::Kernel(conn, before) => kernel_sends(fd, conn, before, &mut data, flags),
    }
}

/// Whether a message has control data, which goes with its first octet.
fn has_control(message: *const msghdr) -> bool {
    // SAFETY: the program passes a message, or null.
    unsafe { message.as_ref() }.is_some_and(|message| message.msg_controllen > 0)
}

/// Has sockets stay with the kernel that are sent to another process (SCM_RIGHTS).
///
/// # Safety
///
/// The program passes a message, or null.
unsafe fn gives_descriptors(message: *const msghdr) {
    // SAFETY: passed on from the caller.
    unsafe { for_passed_descriptors(message, |fd| life::given_away(fd, Reason::Shared)) };
}

#[unsafe(no_mangle)]
unsafe extern "C-unwind" fn recvmmsg(
    fd: c_int,
    list: *mut libc::mmsghdr,
    count: libc::c_uint,
    flags: c_int,
    timeout: *mut libc::timespec,
) -> c_int {
    life::plain_fd(fd, Reason::Feature);
    real!(recvmmsg(fd => c_int, list => *mut libc::mmsghdr, count => libc::c_uint, flags => c_int,
        timeout => *mut libc::timespec) -> c_int)
}

#[unsafe(no_mangle)]
unsafe extern "C-unwind" fn sendmmsg(
    fd: c_int,
    list: *mut libc::mmsghdr,
    count: libc::c_uint,
    flags: c_int,
) -> c_int {
    for index in 0..count.min(iov::MAX as u32) as usize {
        // SAFETY: the program passes a list of messages.
        unsafe { gives_descriptors(&raw const (*list.add(index)).msg_hdr) };
    }
    if !send::leaves_to_kernel(fd, flags, Reason::Feature) {
        return -1;
    }
    real!(sendmmsg(fd => c_int, list => *mut libc::mmsghdr, count => libc::c_uint,
        flags => c_int) -> c_int)
}

/// Defines functions that only the kernel has for sockets: vectors with flags.
macro_rules! vectors {
    ($($name:ident $offset:ty, $sends:literal;)*) => {$(
        #[unsafe(no_mangle)]
        unsafe extern "C-unwind" fn $name(
            fd: c_int, list: *const iovec, count: c_int, offset: $offset, flags: c_int,
        ) -> ssize_t {
            if !$sends {
                life::plain_fd(fd, Reason::Feature);
            } else if !send::leaves_to_kernel(fd, 0, Reason::Feature) {
                return -1;
            }
            real!($name(fd => c_int, list => *const iovec, count => c_int, offset => $offset,
                flags => c_int) -> ssize_t)
        }
    )*};
}

vectors! {
    preadv2 libc::off_t, false;
    preadv64v2 libc::off64_t, false;
    pwritev2 libc::off_t, true;
    pwritev64v2 libc::off64_t, true;
}
