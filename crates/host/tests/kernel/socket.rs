//! Sockets of the kernel, with what the standard library has no words for.

use std::io;
use std::mem::{size_of, size_of_val, zeroed};
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};

use libc::{c_int, c_void, socklen_t};

use super::adapter::PATIENCE;

/// The kernel's addresses, and the adapter's: IPv4 and IPv6.
pub const KERNEL: [&str; 2] = ["10.9.0.1", "fd09::1"];
pub const OURS: [&str; 2] = ["10.9.0.2", "fd09::2"];
/// Which of them.
pub const VERSIONS: [usize; 2] = [0, 1];

/// Sizes of a socket's buffers (SO_RCVBUF, SO_SNDBUF); 0: the system's choice.
#[derive(Clone, Copy, Debug, Default)]
pub struct Buffers {
    pub receive: u32,
    pub send: u32,
}

/// States of RFC 9293 as the kernel numbers them (tcp_states.h).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum State {
    Established = 1,

    SynReceived = 3,

    Closed = 7,
    CloseWait = 8,
    Closing = 11,
}

/// What the kernel says of a connection (TCP_INFO).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Info {
    pub state: u8,
    pub timestamps: bool,
    pub sack: bool,
    pub scaling: bool,
    pub ecn: bool,
}

impl Info {
    pub fn of(socket: &impl AsRawFd) -> Self {
        // SAFETY: plain data, for which all zeroes is a valid value.
        let mut info: libc::tcp_info = unsafe { zeroed() };
        let mut len = size_of_val(&info) as socklen_t;
        let to = (&raw mut info).cast::<c_void>();
        // SAFETY: the kernel writes at most `len` octets to a live variable of that size.
        let done = unsafe {
            libc::getsockopt(
                socket.as_raw_fd(),
                libc::IPPROTO_TCP,
                libc::TCP_INFO,
                to,
                &raw mut len,
            )
        };
        assert_eq!(done, 0, "{}", io::Error::last_os_error());
        let has = |option: u8| info.tcpi_options & option != 0;
        // TCPI_OPT_TIMESTAMPS and so on of linux/tcp.h.
        Self {
            state: info.tcpi_state,
            timestamps: has(1),
            sack: has(2),
            scaling: has(4),
            ecn: has(8),
        }
    }
}

fn set<T>(socket: &impl AsRawFd, level: c_int, option: c_int, value: &T) {
    let from = std::ptr::from_ref(value).cast::<c_void>();
    let len = size_of::<T>() as socklen_t;
    // SAFETY: the kernel reads `len` octets of a live variable.
    let done = unsafe { libc::setsockopt(socket.as_raw_fd(), level, option, from, len) };
    assert_eq!(done, 0, "{}", io::Error::last_os_error());
}

/// When it is closed the peer is reset (SO_LINGER of no time).
pub fn reset_at_close(socket: &impl AsRawFd) {
    set(socket, libc::SOL_SOCKET, libc::SO_LINGER, &libc::linger { l_onoff: 1, l_linger: 0 });
}

/// A socket of TCP without a connection.
fn new(version: usize, buffers: Buffers) -> OwnedFd {
    let family = [libc::AF_INET, libc::AF_INET6][version];
    // SAFETY: takes and gives integers; the descriptor is ours alone.
    let socket = unsafe {
        let socket = libc::socket(family, libc::SOCK_STREAM | libc::SOCK_CLOEXEC, 0);
        assert!(socket >= 0, "{}", io::Error::last_os_error());
        OwnedFd::from_raw_fd(socket)
    };
    for (option, size) in [(libc::SO_RCVBUF, buffers.receive), (libc::SO_SNDBUF, buffers.send)] {
        if size > 0 {
            set(&socket, libc::SOL_SOCKET, option, &(size as c_int));
        }
    }
    socket
}

/// `bind` or `connect`.
type WithAddress = unsafe extern "C" fn(c_int, *const libc::sockaddr, socklen_t) -> c_int;

fn call(what: WithAddress, socket: &OwnedFd, address: SocketAddr) -> io::Result<()> {
    let fd = socket.as_raw_fd();
    let done = match address.ip() {
        IpAddr::V4(ip) => {
            // SAFETY: plain data, for which all zeroes is a valid value.
            let mut to: libc::sockaddr_in = unsafe { zeroed() };
            to.sin_family = libc::AF_INET as libc::sa_family_t;
            to.sin_port = address.port().to_be();
            to.sin_addr.s_addr = u32::from_ne_bytes(ip.octets());
            // SAFETY: the kernel reads a live variable of that size.
            unsafe { what(fd, (&raw const to).cast(), size_of_val(&to) as socklen_t) }
        }
        IpAddr::V6(ip) => {
            // SAFETY: as above.
            let mut to: libc::sockaddr_in6 = unsafe { zeroed() };
            to.sin6_family = libc::AF_INET6 as libc::sa_family_t;
            to.sin6_port = address.port().to_be();
            to.sin6_addr.s6_addr = ip.octets();
            // SAFETY: as above.
            unsafe { what(fd, (&raw const to).cast(), size_of_val(&to) as socklen_t) }
        }
    };
    if done == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

fn patient(stream: TcpStream) -> io::Result<TcpStream> {
    stream.set_read_timeout(Some(PATIENCE))?;
    stream.set_write_timeout(Some(PATIENCE))?;
    Ok(stream)
}

/// A connection to the adapter.
pub fn connect(to: SocketAddr, buffers: Buffers) -> io::Result<TcpStream> {
    let socket = new(usize::from(to.is_ipv6()), buffers);
    call(libc::connect, &socket, to)?;
    patient(socket.into())
}

/// A SYN to the adapter, from the kernel's port of choice; the port, and the socket, of which nobody waits
/// for what becomes of it.
pub fn begin(to: SocketAddr) -> (SocketAddr, TcpStream) {
    let version = usize::from(to.is_ipv6());
    let socket = new(version, Buffers::default());
    call(libc::bind, &socket, SocketAddr::new(KERNEL[version].parse().unwrap(), 0)).unwrap();
    let stream = TcpStream::from(socket);
    stream.set_nonblocking(true).unwrap();
    let socket = OwnedFd::from(stream);
    let error = call(libc::connect, &socket, to).unwrap_err();
    assert_eq!(error.raw_os_error(), Some(libc::EINPROGRESS), "{error}");
    let stream = TcpStream::from(socket);
    (stream.local_addr().unwrap(), stream)
}

/// A listener on an address of the kernel.
pub fn listen(version: usize, buffers: Buffers) -> io::Result<(TcpListener, SocketAddr)> {
    let socket = new(version, buffers);
    call(libc::bind, &socket, SocketAddr::new(KERNEL[version].parse().unwrap(), 0))?;
    // SAFETY: takes integers.
    let done = unsafe { libc::listen(socket.as_raw_fd(), 16) };
    if done != 0 {
        return Err(io::Error::last_os_error());
    }
    let listener = TcpListener::from(socket);
    let at = listener.local_addr()?;
    Ok((listener, at))
}
