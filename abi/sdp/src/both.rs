//! Sockets that a rule carries over both: SDP where the peer has it, the kernel's TCP otherwise.
//!
//! Connection management listens at TCP ports, so one port cannot serve both. A server of a rule `both`
//! listens for SDP at the *twin* of its port, which differs in one bit, and a server of a rule `sdp`
//! there, too. A client of a rule `both` asks the twin first, and connects by TCP where nobody listens
//! there.
//!
//! The program's listening socket stays the kernel's. For each connection of SDP this library connects
//! to it itself: so poll, epoll and accept(2) see the connection as one of TCP, and accept(2) exchanges
//! the two.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::sync::Arc;
use std::time::Duration;

use libc::{c_int, sockaddr, sockaddr_storage, socklen_t};
use quipu_cabi::Errno;

use crate::real;
use crate::socket::{Socket, State};
use crate::sys::{kernel_name, own_descriptor, read_address, system, write_address};
use crate::table::Candidate;

/// The bit in which the ports differ. Ports of services are smaller, so their twins need no privilege.
const TWIN: u16 = 0x4000;
/// How long a client waits for SDP before it uses TCP.
const PATIENCE: Duration = Duration::from_secs(2);

/// Where SDP is for a port that may serve TCP.
pub(crate) fn twin(at: SocketAddr) -> SocketAddr {
    SocketAddr::new(at.ip(), at.port() ^ TWIN)
}

/// A listening socket of TCP that shows connections of SDP, and the connections that were made to it for
/// them.
pub(crate) struct Shown {
    to: SocketAddr,
    knocks: Vec<(SocketAddr, OwnedFd)>,
}

/// Listens for SDP next to a kernel's socket that listens. Without success, there is only TCP.
pub(crate) fn listen(fd: RawFd, candidate: &Candidate, backlog: c_int) {
    let Some(at) = kernel_name(fd) else { return };
    let Ok(socket) = make_listener(at, backlog) else { return };
    let before = candidate.twin.lock().unwrap_or_else(|error| error.into_inner()).replace(socket);
    if let Some(before) = before {
        before.close();
    }
}

fn make_listener(at: SocketAddr, backlog: c_int) -> Result<Arc<Socket>, Errno> {
    let (socket, fresh) = Socket::new(libc::SOCK_CLOEXEC)?;
    // Its readiness is shown by the kernel's socket.
    crate::sys::close(fresh);
    let listening = socket.bind(twin(at)).and_then(|()| socket.listen(backlog));
    if let Err(errno) = listening {
        socket.close();
        return Err(errno);
    }
    let to = match at.ip() {
        ip if !ip.is_unspecified() => at,
        IpAddr::V4(_) => SocketAddr::new(Ipv4Addr::LOCALHOST.into(), at.port()),
        IpAddr::V6(_) => SocketAddr::new(Ipv6Addr::LOCALHOST.into(), at.port()),
    };
    let mut state = socket.lock();
    state.local = Some(at);
    state.shown = Some(Shown { to, knocks: Vec::new() });
    drop(state);
    Ok(socket)
}

impl State {
    /// A connection of SDP waits for accept(2): shows it at the kernel's socket, if that is where the
    /// program looks.
    pub(crate) fn knock(&mut self) -> Result<(), Errno> {
        let Some(shown) = &mut self.shown else { return Ok(()) };
        let family = if shown.to.is_ipv4() { libc::AF_INET } else { libc::AF_INET6 };
        // The kernel completes it by itself, or refuses it: its queue may be full.
        let kind = libc::SOCK_STREAM | libc::SOCK_CLOEXEC | libc::SOCK_NONBLOCK;
        // SAFETY: socket(2).
        let fd = own_descriptor(unsafe { real::socket(family, kind, 0) })?;
        // SAFETY: all zeroes is an address of this plain type.
        let mut address: sockaddr_storage = unsafe { std::mem::zeroed() };
        let mut len = size_of::<sockaddr_storage>() as socklen_t;
        let at = (&raw mut address).cast::<sockaddr>();
        // SAFETY: room for an address, which connect(2) reads then.
        let connected = unsafe {
            write_address(shown.to, at, &raw mut len);
            system(real::connect(fd.as_raw_fd(), at, len))
        };
        match connected {
            Ok(_) | Err(Errno(libc::EINPROGRESS)) => {}
            Err(errno) => return Err(errno),
        }
        let own = kernel_name(fd.as_raw_fd()).ok_or(Errno::EIO)?;
        shown.knocks.push((own, fd));
        Ok(())
    }
}

/// What accept(2) of the kernel has given.
pub(crate) enum Accepted {
    /// A connection of TCP.
    Kernel,
    /// It stood for this one.
    Sdp(Arc<Socket>),
    /// It stood for one that is gone.
    Gone,
}

/// Whether a connection that the kernel has accepted from an address stands for one of SDP.
pub(crate) fn accepted(listener: &Socket, from: SocketAddr) -> Accepted {
    let mut state = listener.lock();
    let Some(shown) = &mut state.shown else { return Accepted::Kernel };
    let Some(index) = shown.knocks.iter().position(|(knock, _)| *knock == from) else {
        return Accepted::Kernel;
    };
    shown.knocks.swap_remove(index);
    state.backlog.pop_front().map_or(Accepted::Gone, Accepted::Sdp)
}

/// The address that accept(2) of the kernel wrote.
pub(crate) fn address_in(storage: &sockaddr_storage, len: socklen_t) -> Option<SocketAddr> {
    // SAFETY: so many bytes are there.
    unsafe { read_address((&raw const *storage).cast(), len) }.ok()
}

/// Asks a peer for SDP, with a socket that stands for no descriptor yet. None: it has none.
pub(crate) fn connect(socket: &Arc<Socket>, bound: Option<SocketAddr>, to: SocketAddr) -> bool {
    let limit = socket.lock().options.send_timeout.replace(PATIENCE);
    let bound = bound.filter(|at| !at.ip().is_unspecified());
    // The program's own port is that of the kernel's socket.
    let binding = bound.map_or(Ok(()), |at| socket.bind(SocketAddr::new(at.ip(), 0)));
    if binding.and_then(|()| socket.connect(twin(to))).is_err() {
        return false;
    }
    let mut state = socket.lock();
    state.options.send_timeout = limit;
    state.peer = Some(to);
    true
}
