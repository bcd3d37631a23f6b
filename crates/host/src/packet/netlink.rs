//! An address for an interface, by the kernel's routing messages (rtnetlink(7)).

use std::io;
use std::net::IpAddr;
use std::os::fd::OwnedFd;

use crate::sys::{adopt_socket, receive, send};

/// nlmsghdr and ifaddrmsg, and two attributes with an IPv6 address each and one with a number.
const MAX_REQUEST: usize = 16 + 8 + 2 * (4 + 16) + 8;

/// A message that grows; allocates nothing.
struct Request {
    bytes: [u8; MAX_REQUEST],
    len: usize,
}

impl Request {
    fn put(&mut self, bytes: &[u8]) {
        self.bytes[self.len..self.len + bytes.len()].copy_from_slice(bytes);
        self.len += bytes.len();
    }

    /// An attribute, whose length is a multiple of four.
    fn attribute(&mut self, kind: u16, value: &[u8]) {
        self.put(&(4 + value.len() as u16).to_ne_bytes());
        self.put(&kind.to_ne_bytes());
        self.put(value);
    }
}

/// Gives an interface an address, which may be used at once: nobody is asked whether he has it already, as
/// nobody but us is on the link. One that it has already is no error.
pub(super) fn add_address(index: u32, ip: IpAddr, prefix: u8) -> io::Result<()> {
    let family = if ip.is_ipv4() { libc::AF_INET } else { libc::AF_INET6 };
    let flags = libc::NLM_F_REQUEST | libc::NLM_F_ACK | libc::NLM_F_CREATE | libc::NLM_F_REPLACE;
    let mut request = Request { bytes: [0; MAX_REQUEST], len: 0 };
    // struct nlmsghdr: length (at the end), type, flags, number, sender.
    request.put(&[0; 4]);
    request.put(&libc::RTM_NEWADDR.to_ne_bytes());
    request.put(&(flags as u16).to_ne_bytes());
    request.put(&[0; 8]);
    // struct ifaddrmsg: family, prefix, flags, scope, interface.
    request.put(&[family as u8, prefix, 0, 0]);
    request.put(&index.to_ne_bytes());
    match ip {
        IpAddr::V4(ip) => {
            request.attribute(libc::IFA_LOCAL, &ip.octets());
            request.attribute(libc::IFA_ADDRESS, &ip.octets());
        }
        IpAddr::V6(ip) => {
            request.attribute(libc::IFA_LOCAL, &ip.octets());
            request.attribute(libc::IFA_ADDRESS, &ip.octets());
            request.attribute(libc::IFA_FLAGS, &libc::IFA_F_NODAD.to_ne_bytes());
        }
    }
    let len = (request.len as u32).to_ne_bytes();
    request.bytes[..4].copy_from_slice(&len);
    exchange(&request.bytes[..request.len])
}

/// Sends a request, and reads the answer: an nlmsghdr and an error number.
fn exchange(request: &[u8]) -> io::Result<()> {
    let kind = libc::SOCK_RAW | libc::SOCK_CLOEXEC;
    // SAFETY: takes integers only.
    let fd: OwnedFd =
        adopt_socket(unsafe { libc::socket(libc::AF_NETLINK, kind, libc::NETLINK_ROUTE) })?;
    send(&fd, request)?;
    let mut answer = [0; 256];
    // The kernel answers while the request is sent.
    let len = receive(&fd, &mut answer)?;
    let code = answer[..len].get(16..20).and_then(|code| code.first_chunk());
    match code.map(|code| i32::from_ne_bytes(*code)) {
        Some(0) => Ok(()),
        Some(code) => Err(io::Error::from_raw_os_error(-code)),
        None => Err(io::ErrorKind::InvalidData.into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_kernel_says_why_not() {
        let error = add_address(u32::MAX >> 1, "192.0.2.1".parse().unwrap(), 24).unwrap_err();
        // Without the right to set addresses it does not even look for the interface.
        assert!(matches!(error.raw_os_error(), Some(libc::ENODEV | libc::EPERM)), "{error}");
    }
}
