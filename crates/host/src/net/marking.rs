//! What streams carry of their service level: the traffic class in the IP header, and the kernel's own
//! priority, by which its queueing disciplines go.

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::OwnedFd;

use quipu_nic::{ConnId, Marking};

use super::Net;
use crate::sys;

/// The greatest priority that a program without privileges may give a socket.
const GREATEST: u8 = 6;

impl Net {
    /// Marks what a stream sends, so that switches and queueing disciplines know its service level.
    pub(crate) fn mark(&self, conn: ConnId, marking: Marking) {
        let Some(stream) = self.by_conn.get(&conn).and_then(|&slot| self.streams.get(slot)) else {
            return;
        };
        if let Err(error) = mark(&stream.fd, stream.peer, marking) {
            tracing::debug!(%error, "packets carry no service level");
        }
    }
}

fn mark(fd: &OwnedFd, peer: SocketAddr, marking: Marking) -> io::Result<()> {
    let (level, option) = match peer.ip() {
        IpAddr::V4(_) => (libc::IPPROTO_IP, libc::IP_TOS),
        IpAddr::V6(_) => (libc::IPPROTO_IPV6, libc::IPV6_TCLASS),
    };
    sys::set_option(fd, level, option, marking.traffic_class.into())?;
    // Last: the traffic class of IPv4 sets it, too.
    let priority = marking.service_level.min(GREATEST);
    sys::set_option(fd, libc::SOL_SOCKET, libc::SO_PRIORITY, priority.into())
}

#[cfg(test)]
mod tests {
    use std::net::{TcpListener, TcpStream};
    use std::os::fd::AsRawFd;

    use libc::c_int;

    use super::*;

    #[test]
    fn a_marked_socket_has_a_traffic_class_and_a_priority() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let peer = listener.local_addr().unwrap();
        let socket = OwnedFd::from(TcpStream::connect(peer).unwrap());
        let option = |level, name| {
            let (mut value, mut len) = (0, size_of::<c_int>() as libc::socklen_t);
            let place = (&raw mut value).cast();
            // SAFETY: both places live for the call, and the length is that of the value.
            unsafe { libc::getsockopt(socket.as_raw_fd(), level, name, place, &raw mut len) };
            value
        };
        mark(&socket, peer, Marking { traffic_class: 0xa0, service_level: 5, lane: None }).unwrap();
        assert_eq!(option(libc::IPPROTO_IP, libc::IP_TOS), 0xa0);
        assert_eq!(option(libc::SOL_SOCKET, libc::SO_PRIORITY), 5);
        mark(&socket, peer, Marking { traffic_class: 0, service_level: 15, lane: None }).unwrap();
        assert_eq!(option(libc::SOL_SOCKET, libc::SO_PRIORITY), 6, "7 needs a privilege");
    }
}
