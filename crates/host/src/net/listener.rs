//! Where other engines reach this one: TCP ports that are opened as queue pairs need numbers.

use std::io;
use std::net::SocketAddr;
use std::os::fd::OwnedFd;

use super::stream::Tuning;
use crate::sys;

/// Connections that the kernel keeps for us while nobody looks.
const BACKLOG: i32 = 1024;

/// A listening socket.
pub(crate) struct Listener {
    pub(crate) fd: OwnedFd,
    pub(crate) port: u16,
}

impl Listener {
    /// Listens on a port that the kernel chooses. Accepted sockets inherit the tuning.
    pub(crate) fn open(own: SocketAddr, tuning: &Tuning) -> io::Result<Self> {
        let fd = sys::tcp_socket(own.ip())?;
        tuning.apply(&fd)?;
        sys::bind(&fd, own)?;
        sys::listen(&fd, BACKLOG)?;
        let port = sys::local_address(&fd)?.port();
        Ok(Self { fd, port })
    }
}

/// What an attempt to accept gave.
pub(crate) enum Accepted {
    /// A connection.
    Connection(OwnedFd, SocketAddr),
    /// No connection waits.
    Nothing,
    /// One that failed or was turned away; there may be more.
    Refused,
}

/// Accepts with a descriptor in reserve.
///
/// When the process is out of descriptors, connections that wait would keep the listener readable
/// for ever. The reserve is then given up for a moment, to take such a connection and close it.
pub(crate) struct Acceptor {
    reserve: Option<OwnedFd>,
}

impl Acceptor {
    /// With its reserve.
    pub(crate) fn new() -> io::Result<Self> {
        Ok(Self { reserve: Some(spare_descriptor()?) })
    }

    /// Takes the next connection of a listener.
    pub(crate) fn accept(&mut self, listener: &Listener) -> Accepted {
        match sys::accept(&listener.fd) {
            Ok((fd, peer)) => Accepted::Connection(fd, peer),
            Err(e) if sys::would_block(&e) => Accepted::Nothing,
            Err(e) => match e.raw_os_error() {
                Some(libc::EMFILE)
                    if sys::raise_descriptor_limit(u64::MAX)
                        .is_ok_and(|_| spare_descriptor().is_ok()) =>
                {
                    Accepted::Refused
                }
                Some(libc::EMFILE | libc::ENFILE) => self.turn_away(listener),
                // The connection was reset before it was taken (accept(2)); the next may be well.
                Some(libc::ECONNABORTED | libc::EPROTO) => Accepted::Refused,
                _ => {
                    tracing::warn!(error = %e, "cannot accept connections");
                    Accepted::Nothing
                }
            },
        }
    }

    fn turn_away(&mut self, listener: &Listener) -> Accepted {
        tracing::warn!(
            "out of descriptors: a connection is turned away; raise the limit (ulimit -n)"
        );
        self.reserve = None;
        let taken = sys::accept(&listener.fd);
        drop(taken);
        self.reserve = spare_descriptor().ok();
        Accepted::Refused
    }
}

fn spare_descriptor() -> io::Result<OwnedFd> {
    sys::EventFd::new().and_then(|fd| sys::duplicate(fd.fd()))
}
