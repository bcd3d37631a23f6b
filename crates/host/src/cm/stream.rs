//! One TCP stream of connection management: a few hundred bytes in its whole life.

use std::io;
use std::net::SocketAddr;
use std::os::fd::{AsRawFd, OwnedFd};

use libc::c_int;
use quipu_cm::{Loss, StreamKey};

use crate::sys;

const READ: c_int = libc::EPOLLIN | libc::EPOLLRDHUP;
const WRITE: c_int = libc::EPOLLOUT;

/// Silence after which a peer is asked for a sign of life, and between askings; and how many without result
/// mean that it is gone.
pub(crate) const KEEP_ALIVE_SECONDS: c_int = 15;
pub(crate) const KEEP_ALIVE_COUNT: c_int = 4;

/// A stream.
pub(super) struct Stream {
    pub(super) key: StreamKey,
    pub(super) fd: OwnedFd,
    pub(super) peer: SocketAddr,
    /// The connection is being made.
    pub(super) connecting: bool,
    /// What epoll reports for it.
    pub(super) interest: c_int,
    /// What the socket did not take.
    unsent: Vec<u8>,
}

/// Sets a socket up before it connects or listens; what is accepted inherits it.
pub(super) fn tune(fd: &OwnedFd, tos: Option<(SocketAddr, u8)>) -> io::Result<()> {
    sys::set_option(fd, libc::IPPROTO_TCP, libc::TCP_NODELAY, 1)?;
    sys::set_option(fd, libc::IPPROTO_TCP, libc::TCP_KEEPIDLE, KEEP_ALIVE_SECONDS)?;
    sys::set_option(fd, libc::IPPROTO_TCP, libc::TCP_KEEPINTVL, KEEP_ALIVE_SECONDS)?;
    sys::set_option(fd, libc::IPPROTO_TCP, libc::TCP_KEEPCNT, KEEP_ALIVE_COUNT)?;
    sys::set_option(fd, libc::SOL_SOCKET, libc::SO_KEEPALIVE, 1)?;
    match tos {
        Some((SocketAddr::V4(_), tos)) => {
            sys::set_option(fd, libc::IPPROTO_IP, libc::IP_TOS, tos.into())
        }
        Some((SocketAddr::V6(_), tos)) => {
            sys::set_option(fd, libc::IPPROTO_IPV6, libc::IPV6_TCLASS, tos.into())
        }
        None => Ok(()),
    }
}

/// What an error of a connection means.
pub(super) fn loss(error: &io::Error) -> Loss {
    match error.raw_os_error() {
        Some(libc::ECONNREFUSED) => Loss::Refused,
        Some(libc::ETIMEDOUT) => Loss::TimedOut,
        Some(libc::ECONNRESET | libc::EPIPE | libc::ECONNABORTED) | None => Loss::Closed,
        Some(errno) => Loss::Failed(errno),
    }
}

impl Stream {
    /// Starts a connection, and sends `first` at once if it stands.
    pub(super) fn connect(
        key: StreamKey,
        fd: OwnedFd,
        to: SocketAddr,
        first: Vec<u8>,
    ) -> io::Result<Self> {
        let connecting = !sys::connect(&fd, to)?;
        let mut stream = Self { key, fd, peer: to, connecting, interest: 0, unsent: first };
        // On one host it stands by now, whatever `connect` says.
        match sys::send(&stream.fd, &stream.unsent) {
            Ok(sent) => {
                stream.connecting = false;
                stream.unsent.drain(..sent);
            }
            Err(error) if sys::would_block(&error) => {}
            // A refusal, for one.
            Err(error) => return Err(error),
        }
        Ok(stream)
    }

    /// A stream that a peer has opened.
    pub(super) fn accepted(key: StreamKey, fd: OwnedFd, peer: SocketAddr) -> Self {
        Self { key, fd, peer, connecting: false, interest: READ, unsent: Vec::new() }
    }

    /// What the socket did not take yet.
    pub(super) fn unsent(&self) -> &[u8] {
        &self.unsent
    }

    /// The connection stands, or not.
    pub(super) fn finish_connect(&mut self) -> io::Result<()> {
        sys::socket_error(&self.fd)?;
        self.connecting = false;
        self.flush()
    }

    /// What epoll should report.
    pub(super) fn wanted(&self) -> c_int {
        match (self.connecting, self.unsent.is_empty()) {
            (true, _) => WRITE,
            (false, true) => READ,
            (false, false) => READ | WRITE,
        }
    }

    /// Sends bytes behind those that were not sent yet.
    pub(super) fn send(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.unsent.extend_from_slice(bytes);
        if self.connecting { Ok(()) } else { self.flush() }
    }

    /// Whether the socket has taken everything.
    pub(super) fn is_flushed(&self) -> bool {
        self.unsent.is_empty()
    }

    /// Sends what was not sent yet, as far as the socket takes it.
    pub(super) fn flush(&mut self) -> io::Result<()> {
        while !self.unsent.is_empty() {
            match sys::send(&self.fd, &self.unsent) {
                Ok(sent) => drop(self.unsent.drain(..sent)),
                Err(error) if sys::would_block(&error) => break,
                Err(error) => {
                    self.unsent.clear();
                    return Err(error);
                }
            }
        }
        Ok(())
    }

    /// Closes it: by a reset, or in the usual way. Of either the peer hears at once, also where a child
    /// of fork still has the descriptor, and closing it alone would do nothing.
    pub(super) fn close(self, reset: bool) {
        if reset {
            disconnect(&self.fd);
        } else {
            // The one possible error is that the connection is over.
            let _ = sys::shutdown_write(&self.fd);
        }
    }
}

/// Takes a TCP socket out of its connection, which is reset, or makes it listen no more.
pub(super) fn disconnect(fd: &OwnedFd) {
    // SAFETY: sockaddr is plain data, for which all zeroes is a valid value: the family AF_UNSPEC.
    let nowhere: libc::sockaddr = unsafe { std::mem::zeroed() };
    let len = size_of_val(&nowhere) as libc::socklen_t;
    // SAFETY: the address is a live structure of `len` bytes. A socket without a connection stays as
    // it is.
    unsafe { libc::connect(fd.as_raw_fd(), &raw const nowhere, len) };
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;

    use super::*;

    /// Both ends of a connection, and what listened for it.
    fn pair() -> (OwnedFd, Stream, Stream) {
        let own = SocketAddr::from((Ipv4Addr::LOCALHOST, 0));
        let listener = sys::tcp_socket(own.ip()).unwrap();
        sys::bind(&listener, own).unwrap();
        sys::listen(&listener, 1).unwrap();
        let to = sys::local_address(&listener).unwrap();
        let fd = sys::tcp_socket(own.ip()).unwrap();
        let key = StreamKey::new(0, 0);
        let near = Stream::connect(key, fd, to, b"first".to_vec()).unwrap();
        assert!(!near.connecting, "on one host a connection stands at once");
        let (accepted, peer) = sys::accept(&listener).unwrap();
        let far = Stream::accepted(key, accepted, peer);
        (listener, near, far)
    }

    #[test]
    fn a_peer_hears_of_the_end_though_a_child_of_fork_has_the_descriptor() {
        for reset in [false, true] {
            let (_listener, mut near, far) = pair();
            let child = near.fd.try_clone().unwrap();
            near.send(b" last").unwrap();
            near.close(reset);
            let mut buffer = [0; 64];
            let len = sys::receive(&far.fd, &mut buffer).unwrap();
            assert_eq!(&buffer[..len], b"first last", "what was sent before is not lost");
            let end = sys::receive(&far.fd, &mut buffer).map_err(|e| e.raw_os_error().unwrap());
            assert_eq!(end, if reset { Err(libc::ECONNRESET) } else { Ok(0) });
            drop(child);
        }
    }

    #[test]
    fn a_listener_that_a_child_of_fork_has_listens_no_more() {
        let (listener, ..) = pair();
        let to = sys::local_address(&listener).unwrap();
        let child = listener.try_clone().unwrap();
        disconnect(&listener);
        drop(listener);
        let fd = sys::tcp_socket(to.ip()).unwrap();
        let refused = Stream::connect(StreamKey::new(0, 0), fd, to, b"?".to_vec());
        let error = refused.err().and_then(|error| error.raw_os_error());
        assert_eq!(error, Some(libc::ECONNREFUSED));
        drop(child);
    }
}
