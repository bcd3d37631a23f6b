//! Asking the kernel for the socket at the other end of a connection (sock_diag(7)).

use std::mem::{size_of, zeroed};
use std::net::{IpAddr, Ipv6Addr, SocketAddr};

use libc::c_int;

use crate::sys::{self, Argument};

/// The socket at the other end, on this host and in this network namespace.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Other {
    /// Its cookie.
    pub(crate) cookie: u64,
    /// The user who made it.
    pub(crate) user: u32,
}

const NETLINK_SOCK_DIAG: c_int = 4;
const SOCK_DIAG_BY_FAMILY: u16 = 20;
const NO_COOKIE: u32 = u32::MAX;

/// `struct inet_diag_sockid`
#[derive(Clone, Copy)]
#[repr(C)]
struct SocketId {
    source_port: [u8; 2],
    destination_port: [u8; 2],
    source: [u8; 16],
    destination: [u8; 16],
    interface: u32,
    cookie: [u32; 2],
}

/// `struct nlmsghdr` and `struct inet_diag_req_v2`
#[repr(C)]
struct Request {
    len: u32,
    kind: u16,
    flags: u16,
    sequence: u32,
    process: u32,
    family: u8,
    protocol: u8,
    extensions: u8,
    pad: u8,
    states: u32,
    id: SocketId,
}

/// `struct nlmsghdr` and `struct inet_diag_msg`
#[derive(Clone, Copy)]
#[repr(C)]
struct Reply {
    len: u32,
    kind: u16,
    flags: u16,
    sequence: u32,
    process: u32,
    family: u8,
    state: u8,
    timer: u8,
    retransmits: u8,
    id: SocketId,
    expires: u32,
    receive_queue: u32,
    send_queue: u32,
    user: u32,
    inode: u32,
}

/// The local and the remote address of a connected socket.
pub(crate) fn addresses(fd: c_int) -> Option<(SocketAddr, SocketAddr)> {
    let address = |call: libc::c_long| {
        // SAFETY: all zeroes is an address without a family.
        let mut storage: libc::sockaddr_storage = unsafe { zeroed() };
        let mut len = size_of::<libc::sockaddr_storage>() as libc::socklen_t;
        let args = [fd.word(), (&raw mut storage).word(), (&raw mut len).word(), 0, 0, 0];
        // SAFETY: the kernel fills in at most so many octets.
        let result = unsafe { sys::raw(call, args) };
        if result == 0 { from_storage(&storage) } else { None }
    };
    Some((address(libc::SYS_getsockname)?, address(libc::SYS_getpeername)?))
}

fn from_storage(storage: &libc::sockaddr_storage) -> Option<SocketAddr> {
    match c_int::from(storage.ss_family) {
        libc::AF_INET => {
            // SAFETY: an address of this family, which the storage has room for.
            let address = unsafe { &*(&raw const *storage).cast::<libc::sockaddr_in>() };
            let ip = IpAddr::from(address.sin_addr.s_addr.to_ne_bytes());
            Some(SocketAddr::new(ip, u16::from_be(address.sin_port)))
        }
        libc::AF_INET6 => {
            // SAFETY: as above.
            let address = unsafe { &*(&raw const *storage).cast::<libc::sockaddr_in6>() };
            let ip = Ipv6Addr::from(address.sin6_addr.s6_addr).to_canonical();
            Some(SocketAddr::new(ip, u16::from_be(address.sin6_port)))
        }
        _ => None,
    }
}

/// Path MTUs below this are those of networks: the kernel carries what stays on a host by `lo`, with 65536.
const LOCAL_MTU: c_int = 16_384;

/// Whether it is plain that the other end of a connection is on another host. This opens no descriptor.
pub(crate) fn is_on_another_host(fd: c_int) -> bool {
    sys::quietly(|| {
        let Some((local, remote)) = addresses(fd) else { return false };
        if remote.ip().is_loopback() || remote.ip() == local.ip() {
            return false;
        }
        let mtu = match sys::option(fd, libc::IPPROTO_IP, libc::IP_MTU) {
            Some(mtu) => Some(mtu),
            None => sys::option(fd, libc::IPPROTO_IPV6, libc::IPV6_MTU),
        };
        mtu.is_some_and(|mtu: c_int| (1..LOCAL_MTU).contains(&mtu))
    })
}

/// The socket whose local address is `remote` and whose remote address is `local`.
pub(crate) fn other_end(local: SocketAddr, remote: SocketAddr) -> Option<Other> {
    let flags = libc::SOCK_DGRAM | libc::SOCK_CLOEXEC;
    let socket = sys::call!(SYS_socket, libc::AF_NETLINK, flags, NETLINK_SOCK_DIAG) as c_int;
    if socket < 0 {
        return None;
    }
    let found = ask(socket, local, remote);
    sys::call!(SYS_close, socket);
    found
}

fn ask(socket: c_int, local: SocketAddr, remote: SocketAddr) -> Option<Other> {
    let octets = |ip: IpAddr| {
        let mut octets = [0; 16];
        match ip {
            IpAddr::V4(ip) => octets[..4].copy_from_slice(&ip.octets()),
            IpAddr::V6(ip) => octets = ip.octets(),
        }
        octets
    };
    let id = SocketId {
        source_port: remote.port().to_be_bytes(),
        destination_port: local.port().to_be_bytes(),
        source: octets(remote.ip()),
        destination: octets(local.ip()),
        interface: 0,
        cookie: [NO_COOKIE; 2],
    };
    let family = if local.is_ipv4() { libc::AF_INET } else { libc::AF_INET6 };
    let request = Request {
        len: size_of::<Request>() as u32,
        kind: SOCK_DIAG_BY_FAMILY,
        flags: libc::NLM_F_REQUEST as u16,
        sequence: 1,
        process: 0,
        family: family as u8,
        protocol: libc::IPPROTO_TCP as u8,
        extensions: 0,
        pad: 0,
        states: u32::MAX,
        id,
    };
    let len = size_of::<Request>();
    if sys::call!(SYS_sendto, socket, &raw const request, len, 0, 0, 0) != len as libc::c_long {
        return None;
    }
    // SAFETY: all zeroes is a message of no kind.
    let mut reply: Reply = unsafe { zeroed() };
    let size = size_of::<Reply>();
    let received = sys::call!(SYS_recvfrom, socket, &raw mut reply, size, libc::MSG_DONTWAIT, 0, 0);
    let is_reply = received == size as libc::c_long && reply.kind == SOCK_DIAG_BY_FAMILY;
    let is_same =
        reply.id.source_port == id.source_port && reply.id.destination_port == id.destination_port;
    let cookie = u64::from(reply.id.cookie[1]) << 32 | u64::from(reply.id.cookie[0]);
    (is_reply && is_same).then_some(Other { cookie, user: reply.user })
}
