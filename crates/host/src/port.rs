//! The port: the interface that has the device's address, and whether it is up.
//!
//! The kernel tells of changes by netlink (`rtnetlink(7)`). A notice only says when to look; what is
//! then seen counts.

use std::io;
use std::os::fd::{AsRawFd, OwnedFd};

use libc::socklen_t;
use quipu_nic::AsyncEvent;

use crate::address::{HostAddress, find_address, host_addresses};
use crate::sys;

/// Whether the interface of `address` is up and running, and has it still. `true` where the kernel
/// does not say.
pub(crate) fn is_up(address: &HostAddress) -> bool {
    interface(address).is_some()
}

/// The index of the interface that has `address` by now, if it is up and running.
fn interface(address: &HostAddress) -> Option<u32> {
    let Ok(all) = host_addresses() else { return Some(address.index) };
    let found = find_address(&all, address.ip).filter(|found| found.up && found.running);
    found.map(|found| found.index)
}

/// What notices said.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct PortNews {
    /// The event to raise if the port went down or up.
    pub(crate) event: Option<AsyncEvent>,
    /// Whether an address or an interface of the host has changed.
    pub(crate) any: bool,
}

/// Notices of changes.
#[derive(Debug)]
pub(crate) struct Port {
    fd: OwnedFd,
    address: HostAddress,
    /// That which has the address and is up; it may be another one the next time.
    interface: Option<u32>,
}

impl Port {
    /// Watches the interface of `address`.
    ///
    /// # Errors
    ///
    /// The kernel has no netlink, or a sandbox forbids it.
    pub(crate) fn watch(address: &HostAddress) -> io::Result<Self> {
        let kind = libc::SOCK_RAW | libc::SOCK_NONBLOCK | libc::SOCK_CLOEXEC;
        // SAFETY: takes integers.
        let fd = sys::adopt_socket(unsafe {
            libc::socket(libc::AF_NETLINK, kind, libc::NETLINK_ROUTE)
        })?;
        // SAFETY: sockaddr_nl is plain data, for which all zeroes is a valid value.
        let mut own: libc::sockaddr_nl = unsafe { std::mem::zeroed() };
        own.nl_family = libc::AF_NETLINK as libc::sa_family_t;
        let groups = libc::RTMGRP_LINK | libc::RTMGRP_IPV4_IFADDR | libc::RTMGRP_IPV6_IFADDR;
        own.nl_groups = groups as u32;
        let len = size_of_val(&own) as socklen_t;
        // SAFETY: the address is a live structure of `len` bytes.
        sys::check(unsafe { libc::bind(fd.as_raw_fd(), (&raw const own).cast(), len) })?;
        let interface = interface(address);
        Ok(Self { fd, address: address.clone(), interface })
    }

    /// The descriptor that is readable when something has changed.
    pub(crate) fn fd(&self) -> &OwnedFd {
        &self.fd
    }

    /// Reads the notices that have come.
    pub(crate) fn news(&mut self) -> PortNews {
        let mut buffer = [0; 8192];
        let (mut concerned, mut any) = (false, false);
        loop {
            match sys::receive(&self.fd, &mut buffer) {
                Ok(0) => break,
                Ok(len) => {
                    any = true;
                    concerned |= concerns(&buffer[..len], self.interface);
                }
                Err(error) if sys::would_block(&error) => break,
                // More notices than there was room for, perhaps one for us.
                Err(error) if error.raw_os_error() == Some(libc::ENOBUFS) => {
                    (concerned, any) = (true, true)
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(_) => break,
            }
        }
        if !concerned {
            return PortNews { event: None, any };
        }
        let before = std::mem::replace(&mut self.interface, interface(&self.address));
        let event = match (before, self.interface) {
            (Some(_), None) => Some(AsyncEvent::PortErr),
            (None, Some(_)) => Some(AsyncEvent::PortActive),
            _ => None,
        };
        PortNews { event, any }
    }
}

/// Whether a message among `bytes` is about the interface with this index, or one of its addresses; about
/// any, if none is given.
fn concerns(mut bytes: &[u8], index: Option<u32>) -> bool {
    /// Bytes of `struct nlmsghdr`, behind which `ifinfomsg` and `ifaddrmsg` both have the index of
    /// the interface in their second word.
    const HEADER: usize = 16;
    let word = |bytes: &[u8], at: usize| {
        let field = bytes.get(at..at + 4)?;
        Some(u32::from_ne_bytes(field.try_into().ok()?))
    };
    while let (Some(len), Some(kind)) = (word(bytes, 0), word(bytes, 4)) {
        let link_or_address = matches!(
            kind as u16,
            libc::RTM_NEWLINK | libc::RTM_DELLINK | libc::RTM_NEWADDR | libc::RTM_DELADDR
        );
        let about = word(bytes, HEADER + 4);
        if link_or_address && about.is_some_and(|about| index.is_none_or(|it| it == about)) {
            return true;
        }
        let next = (len as usize).next_multiple_of(4);
        if next < HEADER || next > bytes.len() {
            return false;
        }
        bytes = &bytes[next..];
    }
    false
}

#[cfg(test)]
mod tests {
    use super::*;

    fn message(kind: u16, index: u32) -> Vec<u8> {
        let len = 33_u32; // rounded up to 36 on the wire
        let mut out = len.to_ne_bytes().to_vec();
        out.extend(u32::from(kind).to_ne_bytes());
        out.resize(20, 0);
        out.extend(index.to_ne_bytes());
        out.resize(36, 0);
        out
    }

    #[test]
    fn notices_about_other_interfaces_do_not_concern_us() {
        let other = message(libc::RTM_NEWLINK, 3);
        let ours = message(libc::RTM_DELADDR, 7);
        assert!(!concerns(&other, Some(7)));
        assert!(concerns(&ours, Some(7)));
        assert!(concerns(&[other.clone(), ours].concat(), Some(7)));
        assert!(!concerns(&message(libc::RTM_NEWROUTE, 7), Some(7)));
        assert!(concerns(&other, None), "the address may be there now");
        assert!(!concerns(&message(libc::RTM_NEWROUTE, 7), None));
        for cut in 0..24 {
            assert!(!concerns(&message(libc::RTM_NEWLINK, 7)[..cut], Some(7)));
        }
        assert!(!concerns(&[0; 64], Some(7)), "a length of nothing ends it");
    }

    #[test]
    fn the_loopback_is_up_and_quiet() {
        let all = host_addresses().unwrap();
        let loopback = find_address(&all, "127.0.0.1".parse().unwrap()).unwrap();
        assert!(is_up(&loopback));
        let gone = HostAddress { ip: "192.0.2.77".parse().unwrap(), ..loopback.clone() };
        assert!(!is_up(&gone), "nobody has this address");
        if let Ok(mut port) = Port::watch(&loopback) {
            assert_eq!(port.news(), PortNews::default());
            port.interface = None;
            assert_eq!(port.news(), PortNews::default(), "without a notice nobody looks");
        }
    }
}
