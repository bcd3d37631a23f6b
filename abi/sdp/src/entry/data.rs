//! read, write, send, recv and their kin.

use libc::{c_int, c_void, iovec, msghdr, off_t, sockaddr, socklen_t, ssize_t};
use quipu_cabi::{Errno, MinusOne, for_passed_descriptors};

use super::files::hand_over;
use super::process::{is_inside, serve};
use crate::socket::{KERNELS, Socket};
use crate::table::{self, Entry};
use crate::transfer::pieces;
use crate::{fork, real};

type Wide = MinusOne<isize>;

/// Bytes that sendfile(2) copies at a time.
const FILE_PART: usize = 256 << 10;

fn one(at: *const c_void, len: usize) -> [iovec; 1] {
    [iovec { iov_base: at.cast_mut(), iov_len: len }]
}

/// Does a call for a socket of SDP; none for other descriptors.
#[inline]
fn of_sdp(
    fd: c_int,
    name: &'static str,
    call: impl FnOnce(&Socket) -> Result<usize, Errno>,
) -> Option<ssize_t> {
    match table::get(fd)? {
        Entry::Sdp(socket) => {
            let mut is_kernels = false;
            let result = serve::<Wide>(name, || match call(&socket) {
                Err(KERNELS) => {
                    is_kernels = true;
                    Ok(0)
                }
                done => done.map(|count| count as isize),
            });
            (!is_kernels).then_some(result)
        }
        Entry::Lost(lost) => match fork::claim(fd, &lost) {
            Ok(()) => None,
            Err(errno) => Some(serve::<Wide>(name, || Err(errno))),
        },
        Entry::Candidate(_) | Entry::Relayed(_) => None,
    }
}

/// Defines functions that send from, or receive into, one buffer or a list of them.
macro_rules! transfers {
    ($($name:ident $real:ident $way:ident($fd:ident $(, $arg:ident: $ty:ty)*; $flags:expr,
        $pieces:expr);)*) => {$(
        #[unsafe(no_mangle)]
        unsafe extern "C-unwind" fn $name($fd: c_int $(, $arg: $ty)*) -> ssize_t {
            // SAFETY: the program passes a list of that length.
            #[allow(unused_unsafe)]
            let call = |socket: &Socket| socket.$way(&unsafe { $pieces }[..], $flags);
            match of_sdp($fd, stringify!($name), call) {
                Some(result) => result,
                // SAFETY: as the program called this.
                None => unsafe { real::$real($fd $(, $arg)*) },
            }
        }
    )*};
}

transfers! {
    write write send(fd, at: *const c_void, len: usize; 0, one(at, len));
    __write write send(fd, at: *const c_void, len: usize; 0, one(at, len));
    send send send(fd, at: *const c_void, len: usize, flags: c_int; flags, one(at, len));
    __send send send(fd, at: *const c_void, len: usize, flags: c_int; flags, one(at, len));
    sendto sendto send(fd, at: *const c_void, len: usize, flags: c_int, to: *const sockaddr,
        to_len: socklen_t; flags, one(at, len));
    writev writev send(fd, list: *const iovec, count: c_int; 0, pieces(list, count as usize)?);
    read read receive(fd, at: *mut c_void, len: usize; 0, one(at, len));
    __read read receive(fd, at: *mut c_void, len: usize; 0, one(at, len));
    recv recv receive(fd, at: *mut c_void, len: usize, flags: c_int; flags, one(at, len));
    __recv recv receive(fd, at: *mut c_void, len: usize, flags: c_int; flags, one(at, len));
    readv readv receive(fd, list: *const iovec, count: c_int; 0, pieces(list, count as usize)?);
    __read_chk __read_chk receive(fd, at: *mut c_void, len: usize, room: usize; 0,
        one(at, len.min(room)));
    __recv_chk __recv_chk receive(fd, at: *mut c_void, len: usize, room: usize, flags: c_int; flags,
        one(at, len.min(room)));
}

/// Defines functions that receive and name the sender, which a stream does not.
macro_rules! named_receives {
    ($($name:ident $real:ident($($room:ident)?);)*) => {$(
        #[unsafe(no_mangle)]
        unsafe extern "C-unwind" fn $name(
            fd: c_int, at: *mut c_void, len: usize, $($room: usize,)? flags: c_int,
            from: *mut sockaddr, from_len: *mut socklen_t,
        ) -> ssize_t {
            let call = |socket: &Socket| {
                let count = socket.receive(&one(at, len$(.min($room))?), flags)?;
                // SAFETY: the program passes a variable, or null.
                if let Some(from_len) = unsafe { from_len.as_mut() } {
                    *from_len = 0;
                }
                Ok(count)
            };
            match of_sdp(fd, stringify!($name), call) {
                Some(result) => result,
                // SAFETY: as the program called this.
                None => unsafe { real::$real(fd, at, len, $($room,)? flags, from, from_len) },
            }
        }
    )*};
}
named_receives! { recvfrom recvfrom(); __recvfrom_chk __recvfrom_chk(room); }

#[unsafe(no_mangle)]
pub(super) unsafe extern "C-unwind" fn recvmsg(
    fd: c_int,
    message: *mut msghdr,
    flags: c_int,
) -> ssize_t {
    let call = |socket: &Socket| {
        // SAFETY: the program passes a message, or null.
        let message = unsafe { message.as_mut() }.ok_or(Errno::EFAULT)?;
        // SAFETY: as above.
        let list = unsafe { pieces(message.msg_iov, message.msg_iovlen) }?;
        let count = socket.receive(list, flags)?;
        (message.msg_namelen, message.msg_controllen, message.msg_flags) = (0, 0, 0);
        Ok(count)
    };
    match of_sdp(fd, "recvmsg", call) {
        Some(result) => result,
        // SAFETY: as the program called this.
        None => unsafe { real::recvmsg(fd, message, flags) },
    }
}

#[unsafe(no_mangle)]
pub(super) unsafe extern "C-unwind" fn sendmsg(
    fd: c_int,
    message: *const msghdr,
    flags: c_int,
) -> ssize_t {
    let call = |socket: &Socket| {
        // SAFETY: the program passes a message, or null.
        let message = unsafe { message.as_ref() }.ok_or(Errno::EFAULT)?;
        // SAFETY: as above.
        socket.send(unsafe { pieces(message.msg_iov, message.msg_iovlen) }?, flags)
    };
    match of_sdp(fd, "sendmsg", call) {
        Some(result) => result,
        // SAFETY: as the program called this. A process that gets a connection does not know what it is.
        None => unsafe {
            if !is_inside() {
                for_passed_descriptors(message, hand_over);
            }
            real::sendmsg(fd, message, flags)
        },
    }
}

/// Sends part of a file.
///
/// # Safety
///
/// `offset` is null or a variable.
unsafe fn send_file(
    socket: &Socket,
    from: c_int,
    offset: *mut off_t,
    count: usize,
) -> Result<usize, Errno> {
    // SAFETY: passed on from the caller.
    let place = unsafe { offset.as_mut() };
    let start = match &place {
        Some(place) => **place,
        // SAFETY: lseek(2).
        None => crate::sys::system(unsafe { libc::lseek(from, 0, libc::SEEK_CUR) })?,
    };
    let mut part = vec![0_u8; count.min(FILE_PART)];
    let mut sent = 0;
    while sent < count {
        let wanted = part.len().min(count - sent);
        // SAFETY: room for so many bytes.
        let got =
            unsafe { libc::pread(from, part.as_mut_ptr().cast(), wanted, start + sent as off_t) };
        let got = match (crate::sys::system(got), sent) {
            (Ok(0), _) => break,
            (Ok(got), _) => got as usize,
            (Err(errno), 0) => return Err(errno),
            (Err(_), _) => break,
        };
        match (socket.send(&one(part.as_ptr().cast(), got), 0), sent) {
            (Ok(done), _) => {
                sent += done;
                if done < got {
                    break;
                }
            }
            (Err(errno), 0) => return Err(errno),
            (Err(_), _) => break,
        }
    }
    match place {
        Some(place) => *place += sent as off_t,
        // SAFETY: lseek(2).
        None => drop(unsafe { libc::lseek(from, start + sent as off_t, libc::SEEK_SET) }),
    }
    Ok(sent)
}

/// Defines sendfile and its twin.
macro_rules! sendfile_like {
    ($($name:ident)*) => {$(
        #[unsafe(no_mangle)]
        unsafe extern "C-unwind" fn $name(
            to: c_int, from: c_int, offset: *mut off_t, count: usize,
        ) -> ssize_t {
            // SAFETY: the program passes a variable, or null.
            let call = |socket: &Socket| unsafe { send_file(socket, from, offset, count) };
            match of_sdp(to, stringify!($name), call) {
                Some(result) => result,
                // SAFETY: as the program called this.
                None => unsafe { real::$name(to, from, offset, count) },
            }
        }
    )*};
}
sendfile_like! { sendfile sendfile64 }
