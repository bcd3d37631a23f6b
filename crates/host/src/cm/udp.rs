//! UDP sockets that say to which address a datagram came, and choose from which one it goes.

use std::io;
use std::mem::MaybeUninit;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::os::fd::{AsRawFd, OwnedFd};

use libc::{c_int, c_void, socklen_t};

use crate::sys::{self, RawAddr, adopt_socket, check_len};

/// Room for the one control message that is used, aligned as control messages are.
#[repr(C, align(8))]
struct Control([u8; 64]);

/// A non-blocking UDP socket for the family of `ip`.
pub(super) fn socket(ip: IpAddr) -> io::Result<OwnedFd> {
    let family = if ip.is_ipv4() { libc::AF_INET } else { libc::AF_INET6 };
    let kind = libc::SOCK_DGRAM | libc::SOCK_NONBLOCK | libc::SOCK_CLOEXEC;
    // SAFETY: takes integers only.
    adopt_socket(unsafe { libc::socket(family, kind, libc::IPPROTO_UDP) })
}

/// Has datagrams come with the address that they were sent to.
pub(super) fn report_destination(fd: &OwnedFd, ip: IpAddr) -> io::Result<()> {
    if ip.is_ipv4() {
        sys::set_option(fd, libc::IPPROTO_IP, libc::IP_PKTINFO, 1)
    } else {
        sys::set_option(fd, libc::IPPROTO_IPV6, libc::IPV6_RECVPKTINFO, 1)
    }
}

fn message(iov: &mut libc::iovec, control: &mut Control, control_len: usize) -> libc::msghdr {
    // SAFETY: msghdr is plain data, for which all zeroes is a valid value.
    let mut header: libc::msghdr = unsafe { std::mem::zeroed() };
    header.msg_iov = iov;
    header.msg_iovlen = 1;
    if control_len > 0 {
        header.msg_control = control.0.as_mut_ptr().cast();
        header.msg_controllen = control_len as _;
    }
    header
}

/// Receives a datagram, without waiting: its length, from where, and to which address it came. What
/// does not fit is cut.
pub(super) fn receive(
    fd: &OwnedFd,
    into: &mut [u8],
) -> io::Result<(usize, SocketAddr, Option<IpAddr>)> {
    let mut from = MaybeUninit::<libc::sockaddr_storage>::zeroed();
    let mut iov = libc::iovec { iov_base: into.as_mut_ptr().cast(), iov_len: into.len() };
    let mut control = Control([0; 64]);
    let mut header = message(&mut iov, &mut control, size_of::<Control>());
    header.msg_name = from.as_mut_ptr().cast();
    header.msg_namelen = size_of::<libc::sockaddr_storage>() as socklen_t;
    // SAFETY: the header names live memory with its lengths: `into`, `from` and `control`.
    let len =
        check_len(unsafe { libc::recvmsg(fd.as_raw_fd(), &raw mut header, libc::MSG_DONTWAIT) })?;
    // SAFETY: the kernel filled in an address of its family, in zeroed storage.
    let from = unsafe { RawAddr::decode(from.as_ptr().cast()) };
    let from = from.ok_or_else(|| io::Error::from(io::ErrorKind::Unsupported))?;
    Ok((len, from, destination(&header)))
}

/// The address that a received datagram was sent to.
fn destination(header: &libc::msghdr) -> Option<IpAddr> {
    // SAFETY: the kernel has filled in the control buffer of `header`, and says how much of it.
    let first = unsafe { libc::CMSG_FIRSTHDR(header).as_ref() }?;
    // SAFETY: `first` is within the control buffer.
    let data: *const c_void = unsafe { libc::CMSG_DATA(first) }.cast();
    match (first.cmsg_level, first.cmsg_type) {
        (libc::IPPROTO_IP, libc::IP_PKTINFO) => {
            // SAFETY: a message of this type holds an in_pktinfo.
            let info = unsafe { data.cast::<libc::in_pktinfo>().read_unaligned() };
            Some(Ipv4Addr::from(info.ipi_addr.s_addr.to_ne_bytes()).into())
        }
        (libc::IPPROTO_IPV6, libc::IPV6_PKTINFO) => {
            // SAFETY: a message of this type holds an in6_pktinfo.
            let info = unsafe { data.cast::<libc::in6_pktinfo>().read_unaligned() };
            Some(Ipv6Addr::from(info.ipi6_addr.s6_addr).into())
        }
        _ => None,
    }
}

/// Sends a datagram, without waiting; from `source`, if the socket is bound to a wildcard.
pub(super) fn send(
    fd: &OwnedFd,
    source: Option<IpAddr>,
    to: SocketAddr,
    bytes: &[u8],
) -> io::Result<()> {
    let raw = RawAddr::new(to);
    let (name, name_len) = raw.as_parts();
    // sendmsg only reads, whatever the types of its structures say.
    let mut iov = libc::iovec { iov_base: bytes.as_ptr().cast_mut().cast(), iov_len: bytes.len() };
    let mut control = Control([0; 64]);
    let used = source.map_or(0, |source| put_source(&mut control, source, to));
    let mut header = message(&mut iov, &mut control, used);
    header.msg_name = name.cast_mut().cast();
    header.msg_namelen = name_len;
    let flags = libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL;
    // SAFETY: the header names live memory with its lengths: `bytes`, `raw` and `control`.
    check_len(unsafe { libc::sendmsg(fd.as_raw_fd(), &raw const header, flags) }).map(drop)
}

/// Writes the control message that chooses the source; its length.
fn put_source(control: &mut Control, source: IpAddr, to: SocketAddr) -> usize {
    let (level, kind, info) = match (source, to) {
        (IpAddr::V4(v4), SocketAddr::V4(_)) => {
            // ipi_ifindex, ipi_spec_dst, ipi_addr
            let info = [[0; 4], v4.octets(), [0; 4]].concat();
            (libc::IPPROTO_IP, libc::IP_PKTINFO, info)
        }
        (source, _) => {
            let v6 = match source {
                IpAddr::V4(v4) => v4.to_ipv6_mapped(),
                IpAddr::V6(v6) => v6,
            };
            // ipi6_addr, ipi6_ifindex
            let info = [&v6.octets()[..], &[0; 4]].concat();
            (libc::IPPROTO_IPV6, libc::IPV6_PKTINFO, info)
        }
    };
    let head = libc::cmsghdr {
        // SAFETY: computes lengths.
        cmsg_len: unsafe { libc::CMSG_LEN(info.len() as u32) } as _,
        cmsg_level: level,
        cmsg_type: kind as c_int,
    };
    // SAFETY: the buffer is aligned for a cmsghdr, which it has room for.
    unsafe { control.0.as_mut_ptr().cast::<libc::cmsghdr>().write(head) };
    // SAFETY: computes lengths.
    let (at, space) = unsafe { (libc::CMSG_LEN(0) as usize, libc::CMSG_SPACE(info.len() as u32)) };
    control.0[at..at + info.len()].copy_from_slice(&info);
    space as usize
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn datagrams_come_from_where_they_were_sent_to() {
        let cases = [("0.0.0.0:0", "127.0.0.7"), ("[::]:0", "127.0.0.7"), ("[::]:0", "::1")];
        for (wildcard, ip) in cases {
            let wildcard: SocketAddr = wildcard.parse().unwrap();
            let ip: IpAddr = ip.parse().unwrap();
            let listener = socket(wildcard.ip()).unwrap();
            report_destination(&listener, wildcard.ip()).unwrap();
            sys::bind(&listener, wildcard).unwrap();
            let local = sys::local_address(&listener).unwrap();
            let asker = socket(ip).unwrap();
            // Only what comes from the very address that was asked is heard.
            sys::connect(&asker, SocketAddr::new(ip, local.port())).unwrap();
            sys::send(&asker, b"who?").unwrap();
            let mut buffer = [0; 16];
            let (len, from, to) = receive(&listener, &mut buffer).unwrap();
            let to = to.unwrap();
            assert_eq!(&buffer[..len], b"who?");
            assert_eq!(to.to_canonical(), ip);
            send(&listener, Some(to), from, b"me").unwrap();
            let len = sys::receive(&asker, &mut buffer).unwrap();
            assert_eq!(&buffer[..len], b"me");
        }
    }
}
