//! Messages between processes of a fork, with at most one descriptor each.

use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::sync::atomic::{AtomicI32, Ordering};

use libc::{c_int, iovec, msghdr};
use quipu_cabi::Errno;

use crate::real;
use crate::sys::{own_descriptor, system};

/// Room for the control message of one descriptor, aligned as the kernel wants it.
type Control = [u64; 4];

/// Where this process and its ancestors are asked, which a program does not close: a child closes all
/// descriptors but those that it hands on, and asks for these when it becomes another program.
static KEPT: [AtomicI32; 8] = [const { AtomicI32::new(-1) }; 8];

/// The program does not close a descriptor from now on, if there is room for one more.
pub(crate) fn keep(fd: RawFd) {
    let (none, order) = (-1, Ordering::Relaxed);
    KEPT.iter().find(|place| place.compare_exchange(none, fd, order, order).is_ok());
}

/// The lowest kept descriptor from `first` on.
pub(crate) fn kept_from(first: RawFd) -> Option<RawFd> {
    KEPT.iter().map(|place| place.load(Ordering::Relaxed)).filter(|&fd| fd >= first.max(0)).min()
}

/// A pair of sockets that keep the bounds of messages.
pub(crate) fn pair() -> Result<[OwnedFd; 2], Errno> {
    let mut pair = [-1; 2];
    let kind = libc::SOCK_SEQPACKET | libc::SOCK_CLOEXEC;
    // SAFETY: room for two descriptors.
    system(unsafe { libc::socketpair(libc::AF_UNIX, kind, 0, pair.as_mut_ptr()) })?;
    let [first, second] = pair.map(own_descriptor);
    Ok([first?, second?])
}

fn message(piece: &mut iovec, control: &mut Control, control_len: usize) -> msghdr {
    // SAFETY: all zeroes is a message of this plain type.
    let mut message: msghdr = unsafe { std::mem::zeroed() };
    (message.msg_iov, message.msg_iovlen) = (&raw mut *piece, 1);
    if control_len > 0 {
        message.msg_control = control.as_mut_ptr().cast();
        message.msg_controllen = control_len as _;
    }
    message
}

/// Sends bytes, and perhaps a descriptor.
pub(crate) fn send(
    to: RawFd,
    bytes: &[u8],
    pass: Option<&OwnedFd>,
    flags: c_int,
) -> Result<(), Errno> {
    let mut piece = iovec { iov_base: bytes.as_ptr().cast_mut().cast(), iov_len: bytes.len() };
    let mut control = Control::default();
    // SAFETY: only lengths are computed.
    let (space, len) = unsafe { (libc::CMSG_SPACE(4) as usize, libc::CMSG_LEN(4)) };
    let message = message(&mut piece, &mut control, if pass.is_some() { space } else { 0 });
    if let Some(pass) = pass {
        // SAFETY: the control message has room for one header and one descriptor.
        unsafe {
            let first = libc::CMSG_FIRSTHDR(&raw const message);
            (*first).cmsg_level = libc::SOL_SOCKET;
            (*first).cmsg_type = libc::SCM_RIGHTS;
            (*first).cmsg_len = len as _;
            libc::CMSG_DATA(first).cast::<c_int>().write_unaligned(pass.as_raw_fd());
        }
    }
    loop {
        // SAFETY: the message points to live memory, which is only read.
        match system(unsafe { real::sendmsg(to, &raw const message, flags | libc::MSG_NOSIGNAL) }) {
            Err(Errno::EINTR) => {}
            sent => return sent.map(drop),
        }
    }
}

/// Receives a message: its length, 0 at the end, and the descriptor that came with it.
pub(crate) fn receive(
    from: RawFd,
    room: &mut [u8],
    flags: c_int,
) -> Result<(usize, Option<OwnedFd>), Errno> {
    let mut piece = iovec { iov_base: room.as_mut_ptr().cast(), iov_len: room.len() };
    let mut control = Control::default();
    // SAFETY: only a length is computed.
    let space = unsafe { libc::CMSG_SPACE(4) } as usize;
    let mut message = message(&mut piece, &mut control, space);
    let flags = flags | libc::MSG_CMSG_CLOEXEC;
    let len = loop {
        // SAFETY: the message points to live memory with so much room.
        match system(unsafe { real::recvmsg(from, &raw mut message, flags) }) {
            Err(Errno::EINTR) => {}
            len => break len? as usize,
        }
    };
    // SAFETY: the kernel has filled the control message in; a descriptor in it is this process's alone.
    let passed = unsafe {
        let first = libc::CMSG_FIRSTHDR(&raw const message);
        let is_one = !first.is_null()
            && (*first).cmsg_type == libc::SCM_RIGHTS
            && (*first).cmsg_len as usize >= libc::CMSG_LEN(4) as usize;
        is_one
            .then(|| OwnedFd::from_raw_fd(libc::CMSG_DATA(first).cast::<c_int>().read_unaligned()))
    };
    Ok((len, passed))
}
