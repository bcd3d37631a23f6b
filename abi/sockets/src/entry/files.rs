//! Between files, pipes and sockets; stdio on a socket.

use libc::{FILE, c_char, c_int, c_uint, off_t, ssize_t};
use quipu_sockets::report::Reason;

use crate::real::{real, real_address};
use crate::send::Plan;
use crate::{life, send, sys};

/// Defines sendfile and its twin.
macro_rules! sendfile_like {
    ($($name:ident $offset:ty;)*) => {$(
        #[unsafe(no_mangle)]
        unsafe extern "C-unwind" fn $name(
            to: c_int, from: c_int, offset: *mut $offset, count: usize,
        ) -> ssize_t {
            // SAFETY: the program passes a variable, or null for the file's own position.
            let at = unsafe { offset.as_ref() }.copied();
            let plan = send::plan_file(to, from, at, count);
            if let Plan::Done(done @ 1.., _) = plan {
                // SAFETY: only a plan with an offset has sent something.
                unsafe { *offset += done as $offset };
            }
            let before = match plan {
                Plan::Done(result, errno) => {
                    if result < 0 {
                        sys::set_errno(errno);
                    }
                    return result;
                }
                Plan::Kernel(_, before) => before,
                Plan::Pass => 0,
            };
            if before > 0 {
                // SAFETY: as above.
                unsafe { *offset += before as $offset };
            }
            let (count, errno) = (count - before, sys::errno());
            let sent = real!($name(to => c_int, from => c_int, offset => *mut $offset,
                count => usize) -> ssize_t);
            if before > 0 && sent < 0 {
                sys::set_errno(errno);
            }
            match plan {
                Plan::Kernel(conn, before) => send::finish(conn, before, sent),
                _ => sent,
            }
        }
    )*};
}

sendfile_like! {
    sendfile off_t;
    sendfile64 libc::off64_t;
}

#[unsafe(no_mangle)]
unsafe extern "C-unwind" fn splice(
    from: c_int,
    from_offset: *mut libc::loff_t,
    to: c_int,
    to_offset: *mut libc::loff_t,
    len: usize,
    flags: c_uint,
) -> ssize_t {
    life::plain_fd(from, Reason::Feature);
    if !send::leaves_to_kernel(to, 0, Reason::Feature) {
        return -1;
    }
    real!(splice(from => c_int, from_offset => *mut libc::loff_t, to => c_int,
        to_offset => *mut libc::loff_t, len => usize, flags => c_uint) -> ssize_t)
}

#[unsafe(no_mangle)]
unsafe extern "C-unwind" fn fdopen(fd: c_int, mode: *const c_char) -> *mut FILE {
    life::leave_to_stdio(fd);
    real!(fdopen(fd => c_int, mode => *const c_char) -> isize) as *mut FILE
}

quipu_cabi::dprintf_after! { life::leave_to_stdio, real_address }
