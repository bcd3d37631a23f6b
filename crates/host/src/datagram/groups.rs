//! The multicast groups that the engine is in.
//!
//! Datagrams to groups come to one well-known port, which every engine of this host shares, so that each
//! gets a copy. A socket of the kernel is in a limited number of groups; there are as many as needed.

use std::collections::HashMap;
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::os::fd::OwnedFd;

use crate::sys::{self, Membership};

/// Which socket is in which group.
#[derive(Default)]
pub(super) struct Groups {
    /// By group and interface: the position of the socket, and for how many addresses it was joined.
    joined: HashMap<(IpAddr, u32), (usize, usize)>,
    /// Positions of the sockets among all, with whether they are of IPv4.
    sockets: Vec<(usize, bool)>,
}

impl Groups {
    /// Joins a group by one of the sockets that there are; `false` if none has room.
    ///
    /// # Errors
    ///
    /// The kernel refuses the group.
    pub(super) fn join<'a>(
        &mut self,
        group: IpAddr,
        interface: u32,
        socket: impl Fn(usize) -> &'a OwnedFd,
    ) -> io::Result<bool> {
        if let Some((_, count)) = self.joined.get_mut(&(group, interface)) {
            *count += 1;
            return Ok(true);
        }
        for &(index, _) in self.sockets.iter().filter(|(_, v4)| *v4 == group.is_ipv4()) {
            match sys::change_membership(socket(index), group, interface, Membership::Join) {
                Ok(()) => {
                    self.joined.insert((group, interface), (index, 1));
                    return Ok(true);
                }
                Err(error) if has_no_room(&error) => {}
                Err(error) => return Err(error),
            }
        }
        Ok(false)
    }

    /// Notes that a socket, which is new here, has joined a group.
    pub(super) fn add(&mut self, group: IpAddr, interface: u32, index: usize) {
        self.sockets.insert(0, (index, group.is_ipv4()));
        self.joined.insert((group, interface), (index, 1));
    }

    /// Leaves a group, as often as it was joined.
    pub(super) fn leave<'a>(
        &mut self,
        group: IpAddr,
        interface: u32,
        socket: impl Fn(usize) -> &'a OwnedFd,
    ) {
        let Some((index, count)) = self.joined.get_mut(&(group, interface)) else { return };
        *count -= 1;
        if *count == 0 {
            let index = *index;
            self.joined.remove(&(group, interface));
            // It was joined, so this fails only if the interface is gone, and the membership with it.
            let _ = sys::change_membership(socket(index), group, interface, Membership::Leave);
        }
    }
}

/// Whether a socket is in as many groups as it may be: by number with IPv4, by memory with IPv6.
fn has_no_room(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::ENOBUFS | libc::ENOMEM))
}

/// Looks whether what is sent to a group finds a way: Linux has none for IPv6 groups over the loopback.
pub(super) fn check_route(own: SocketAddr, interface: u32, group: SocketAddr) -> io::Result<()> {
    let fd = sys::udp_socket(own.ip())?;
    sys::send_multicast_by(&fd, own.ip(), interface)?;
    sys::bind(&fd, own)?;
    sys::connect(&fd, group)?;
    Ok(())
}

/// A socket for what is sent to groups at `port`, in none of them yet.
pub(super) fn open(own: SocketAddr, port: u16) -> io::Result<OwnedFd> {
    let fd = sys::udp_socket(own.ip())?;
    sys::set_option(&fd, libc::SOL_SOCKET, libc::SO_REUSEADDR, 1)?;
    name_destinations(&fd, own.ip())?;
    let any: IpAddr = match own.ip() {
        IpAddr::V4(_) => Ipv4Addr::UNSPECIFIED.into(),
        IpAddr::V6(_) => Ipv6Addr::UNSPECIFIED.into(),
    };
    sys::bind(&fd, SocketAddr::new(any, port))?;
    Ok(fd)
}

/// Has datagrams of a socket for the family of `ip` come with the address that they were sent to: an own one,
/// or that of a group. Groups that others on this host joined are not for this socket.
pub(super) fn name_destinations(fd: &OwnedFd, ip: IpAddr) -> io::Result<()> {
    let (level, all, info) = match ip {
        IpAddr::V4(_) => (libc::IPPROTO_IP, libc::IP_MULTICAST_ALL, libc::IP_PKTINFO),
        IpAddr::V6(_) => (libc::IPPROTO_IPV6, IPV6_MULTICAST_ALL, libc::IPV6_RECVPKTINFO),
    };
    sys::set_option(fd, level, all, 0)?;
    sys::set_option(fd, level, info, 1)
}

/// `ipv6(7)`, since Linux 4.20.
const IPV6_MULTICAST_ALL: libc::c_int = 29;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_full_socket_is_told_from_a_group_that_is_refused() {
        let is_full = |code| has_no_room(&io::Error::from_raw_os_error(code));
        assert!(is_full(libc::ENOBUFS) && is_full(libc::ENOMEM));
        assert!(!is_full(libc::EINVAL));
    }
}
