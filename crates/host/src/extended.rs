//! The option that switches a socket to iWARP, of the extended sockets interface (`quipu/sockets.h`).

use std::io;
use std::mem::size_of_val;
use std::net::TcpStream;
use std::os::fd::AsRawFd;

use libc::c_int;
use quipu_cabi::{IWARP_MODE, SOL_IWARP};

/// How a socket in the mode works: the numbers of `struct iwarp_mode`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct IwarpMode {
    /// How the parts of a message get to TCP: 0 copied, 1 by one send with a list, 2 by TCP_CORK.
    pub gather: u8,
    /// Progress by a thread, not by the caller.
    pub by_thread: bool,
    /// With CRCs.
    pub crc: bool,
    /// This end sends the MPA request.
    pub is_initiator: bool,
}

/// Switches a connected socket to iWARP, in a process that has loaded `libiwsock`.
///
/// # Errors
/// ENOPROTOOPT: the process has not. Otherwise as `setsockopt(IWARP_MODE)`.
pub fn switch_to_iwarp(stream: &TcpStream, mode: IwarpMode) -> io::Result<()> {
    let role = if mode.is_initiator { 1 } else { 2 };
    let value: [c_int; 5] =
        [mode.gather.into(), mode.by_thread.into(), (!mode.crc).into(), role, 0];
    let (fd, len) = (stream.as_raw_fd(), size_of_val(&value) as libc::socklen_t);
    // SAFETY: a value of this length.
    match unsafe { libc::setsockopt(fd, SOL_IWARP, IWARP_MODE, value.as_ptr().cast(), len) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn without_the_library_the_option_is_unknown() {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let stream = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let error = switch_to_iwarp(&stream, IwarpMode::default()).unwrap_err();
        assert_eq!(error.raw_os_error(), Some(libc::ENOPROTOOPT));
    }
}
