//! Sockets: made, bound, connected, asked.

use std::net::SocketAddr;
use std::os::fd::{OwnedFd, RawFd};
use std::sync::Arc;
use std::sync::atomic::Ordering;

use libc::{c_int, c_void, sockaddr, socklen_t};
use quipu_cabi::{Errno, IntMinusOne};
use quipu_sdp::rules::{Role, Transport};

use super::files::{claim, leave_to_stdio};
use super::process::{is_inside, serve};
use crate::both;
use crate::establish::unpark;
use crate::fork::{self, Lost};
use crate::real;
use crate::relay::Relayed;
use crate::rules;
use crate::socket::Socket;
use crate::sys::{AF_INET_SDP, kernel_name, read_address, system, write_address};
use crate::table::{self, Candidate, Entry};

const FLAGS: c_int = libc::SOCK_NONBLOCK | libc::SOCK_CLOEXEC;

#[unsafe(no_mangle)]
unsafe extern "C-unwind" fn socket(family: c_int, kind: c_int, protocol: c_int) -> c_int {
    let is_stream = kind & !FLAGS == libc::SOCK_STREAM;
    if family == AF_INET_SDP && is_stream {
        return serve::<IntMinusOne>("socket", || {
            let (socket, fd) = Socket::new(kind & FLAGS)?;
            if table::put(fd, Entry::Sdp(socket)) {
                return Ok(fd);
            }
            crate::sys::close(fd);
            Err(Errno::EMFILE)
        });
    }
    // SAFETY: as the program called this.
    let fd = unsafe { real::socket(family, kind, protocol) };
    let is_tcp = [libc::AF_INET, libc::AF_INET6].contains(&family)
        && [0, libc::IPPROTO_TCP].contains(&protocol);
    if fd >= 0 && is_stream && is_tcp && !is_inside() && rules::any() {
        table::put(fd, Entry::Candidate(Arc::default()));
    }
    fd
}

/// A socket of SDP with the options of one of the kernel, and its descriptor.
fn like(fd: RawFd) -> Result<(Arc<Socket>, RawFd), Errno> {
    // SAFETY: fcntl(2) with integers.
    let flags = unsafe { real::fcntl(fd, libc::F_GETFL, 0) };
    let nonblocking = if flags & libc::O_NONBLOCK != 0 { libc::SOCK_NONBLOCK } else { 0 };
    let (socket, fresh) = Socket::new(nonblocking | libc::SOCK_CLOEXEC)?;
    for (level, name) in [
        (libc::SOL_SOCKET, libc::SO_RCVTIMEO),
        (libc::SOL_SOCKET, libc::SO_SNDTIMEO),
        (libc::SOL_SOCKET, libc::SO_LINGER),
        (libc::IPPROTO_IP, libc::IP_TOS),
        (libc::IPPROTO_IPV6, libc::IPV6_TCLASS),
        (libc::IPPROTO_IPV6, libc::IPV6_V6ONLY),
        (libc::SOL_SOCKET, libc::SO_PRIORITY),
    ] {
        let mut value = [0_u8; 16];
        let mut len = value.len() as socklen_t;
        let at = value.as_mut_ptr().cast();
        // SAFETY: room for so many bytes.
        let known = unsafe { real::getsockopt(fd, level, name, at, &raw mut len) } == 0;
        let is_mark = level != libc::SOL_SOCKET || name == libc::SO_PRIORITY;
        // The kernel's priority follows IP_TOS: only without one is it the program's.
        let is_derived = name == libc::SO_PRIORITY && socket.lock().options.level() != (0, 0);
        let is_default = is_mark && value == [0; 16];
        if known && !is_derived && !is_default {
            let _ = socket.set_option(level, name, &value[..len as usize]);
        }
    }
    Ok((socket, fresh))
}

/// Puts a socket of SDP, whose descriptor is `fresh`, in the place of one of the kernel.
fn adopt(
    fd: RawFd,
    candidate: &Candidate,
    (socket, fresh): (Arc<Socket>, RawFd),
) -> Result<Arc<Socket>, Errno> {
    // SAFETY: fcntl(2) with integers.
    let closes = unsafe { real::fcntl(fd, libc::F_GETFD, 0) };
    let exec = if closes & libc::FD_CLOEXEC != 0 { libc::O_CLOEXEC } else { 0 };
    // SAFETY: dup3(2): the program's number stands for the new socket from now on.
    let moved = system(unsafe { real::dup3(fresh, fd, exec) });
    crate::sys::close(fresh);
    moved?;
    table::put(fd, Entry::Sdp(Arc::clone(&socket)));
    let sets = candidate.sets.lock().unwrap_or_else(|error| error.into_inner());
    for (set, event) in sets.iter() {
        let mut event = *event;
        let wants = |bit: c_int| event.events & bit as u32 != 0;
        socket.watch(fd, wants(libc::EPOLLET), wants(libc::EPOLLPRI))?;
        // SAFETY: a live event. The kernel forgot the old socket when its last descriptor went.
        unsafe { real::epoll_ctl(*set, libc::EPOLL_CTL_ADD, fd, &raw mut event) };
    }
    Ok(socket)
}

/// The socket of a call that decides what a socket is for: one of SDP, or one that becomes so by rule.
fn socket_for(fd: RawFd, role: Role, to: Option<SocketAddr>) -> Option<Chosen> {
    match table::get(fd)? {
        Entry::Sdp(socket) => Some(Chosen::Sdp(socket)),
        Entry::Lost(_) => Some(Chosen::Failed(Errno::ENODEV)),
        Entry::Relayed(_) => Some(Chosen::Failed(Errno::EISCONN)),
        Entry::Candidate(candidate) => {
            let at = to.or_else(|| kernel_name(fd))?;
            let bound = *candidate.bound.lock().unwrap_or_else(|error| error.into_inner());
            let bound = bound.and_then(|_| kernel_name(fd));
            match (rules::choose(role, at), role) {
                (Transport::Tcp, _) => None,
                (Transport::Both, Role::Server) => Some(Chosen::Both(candidate)),
                (Transport::Both, Role::Client) => ask_for_sdp(fd, &candidate, bound, at),
                (Transport::Sdp, _) => {
                    let adopted = like(fd).and_then(|fresh| adopt(fd, &candidate, fresh));
                    let adopted = adopted.and_then(|socket| {
                        bound.map_or(Ok(()), |at| socket.bind(at)).map(|()| socket)
                    });
                    Some(adopted.map_or_else(Chosen::Failed, Chosen::Sdp))
                }
            }
        }
    }
}

/// Connects over SDP where the peer has it. None: the kernel is to connect by TCP.
fn ask_for_sdp(
    fd: RawFd,
    candidate: &Candidate,
    bound: Option<SocketAddr>,
    to: SocketAddr,
) -> Option<Chosen> {
    let (socket, fresh) = like(fd).ok()?;
    let nonblocking = socket.nonblocking.swap(false, Ordering::Relaxed);
    if !both::connect(&socket, bound, to) {
        socket.close();
        crate::sys::close(fresh);
        table::forget(fd);
        return None;
    }
    socket.nonblocking.store(nonblocking, Ordering::Relaxed);
    let adopted = adopt(fd, candidate, (socket, fresh));
    Some(adopted.map_or_else(Chosen::Failed, |_| Chosen::Connected))
}

enum Chosen {
    Sdp(Arc<Socket>),
    /// It is connected over SDP by now.
    Connected,
    /// It listens for both.
    Both(Arc<Candidate>),
    Failed(Errno),
}

impl Chosen {
    fn socket(self) -> Result<Arc<Socket>, Errno> {
        match self {
            Self::Sdp(socket) => Ok(socket),
            Self::Connected | Self::Both(_) => Err(Errno::EINVAL),
            Self::Failed(errno) => Err(errno),
        }
    }
}

#[unsafe(no_mangle)]
unsafe extern "C-unwind" fn bind(fd: c_int, to: *const sockaddr, len: socklen_t) -> c_int {
    match table::get(fd) {
        Some(Entry::Sdp(socket)) => serve::<IntMinusOne>("bind", || {
            // SAFETY: the program passes an address of that length.
            socket.bind(unsafe { read_address(to, len) }?).map(|()| 0)
        }),
        entry => {
            // SAFETY: as the program called this.
            let bound = unsafe { real::bind(fd, to, len) };
            if bound == 0
                && let Some(Entry::Candidate(candidate)) = entry
            {
                let mut at = candidate.bound.lock().unwrap_or_else(|error| error.into_inner());
                *at = kernel_name(fd);
            }
            bound
        }
    }
}

#[unsafe(no_mangle)]
unsafe extern "C-unwind" fn listen(fd: c_int, backlog: c_int) -> c_int {
    let mut is_kernels = table::get(fd).is_none();
    if !is_kernels {
        let result = serve::<IntMinusOne>("listen", || match socket_for(fd, Role::Server, None) {
            Some(Chosen::Both(candidate)) => {
                // SAFETY: as the program called this.
                system(unsafe { real::listen(fd, backlog) })?;
                both::listen(fd, &candidate, backlog);
                Ok(0)
            }
            Some(chosen) => chosen.socket()?.listen(backlog).map(|()| 0),
            None => {
                is_kernels = true;
                Ok(0)
            }
        });
        if !is_kernels {
            return result;
        }
    }
    // SAFETY: as the program called this.
    unsafe { real::listen(fd, backlog) }
}

#[unsafe(no_mangle)]
unsafe extern "C-unwind" fn connect(fd: c_int, to: *const sockaddr, len: socklen_t) -> c_int {
    // SAFETY: the program passes an address of that length.
    let address = unsafe { read_address(to, len) };
    let mut is_kernels = match table::get(fd) {
        None => true,
        // The kernel says what is wrong with it.
        Some(Entry::Candidate(_)) => address.is_err(),
        Some(_) => false,
    };
    if !is_kernels {
        let result = serve::<IntMinusOne>("connect", || {
            let Some(chosen) = socket_for(fd, Role::Client, address.ok()) else {
                is_kernels = true;
                return Ok(0);
            };
            match chosen {
                Chosen::Connected => Ok(0),
                chosen => chosen.socket()?.connect(address?).map(|()| 0),
            }
        });
        if !is_kernels {
            leave_to_stdio(fd);
            return result;
        }
    }
    // SAFETY: as the program called this.
    unsafe { real::connect(fd, to, len) }
}

/// Gives a connection to the program.
///
/// # Safety
///
/// As accept(2).
unsafe fn give(
    socket: Arc<Socket>,
    from: *mut sockaddr,
    len: *mut socklen_t,
    flags: c_int,
) -> Result<c_int, Errno> {
    let fd = match unpark(&socket, flags) {
        Ok(fd) => fd,
        Err(errno) => {
            socket.close();
            return Err(errno);
        }
    };
    let peer = socket.lock().peer;
    if let Some(peer) = peer {
        // SAFETY: passed on from the caller.
        unsafe { write_address(peer, from, len) };
    }
    if !table::put(fd, Entry::Sdp(Arc::clone(&socket))) {
        socket.close();
        crate::sys::close(fd);
        return Err(Errno::EMFILE);
    }
    leave_to_stdio(fd);
    Ok(fd)
}

/// Accepts by the kernel's socket of a rule `both`, where some connections stand for those of SDP.
///
/// # Safety
///
/// As accept(2).
unsafe fn accept_both(
    (fd, twin): (RawFd, &Twin),
    from: *mut sockaddr,
    len: *mut socklen_t,
    flags: c_int,
) -> Result<c_int, Errno> {
    loop {
        // SAFETY: all zeroes is an address of this plain type.
        let mut storage: libc::sockaddr_storage = unsafe { std::mem::zeroed() };
        let mut room = size_of::<libc::sockaddr_storage>() as socklen_t;
        let at = (&raw mut storage).cast();
        // SAFETY: room for an address.
        let accepted = system(unsafe { real::accept4(fd, at, &raw mut room, flags) })?;
        let peer = both::address_in(&storage, room);
        let stands_for = peer.map_or(Ok(StandsFor::Kernel), |at| twin.what_stands(accepted, at));
        match stands_for {
            Ok(StandsFor::Kernel) | Err(_) => {
                if let Some(peer) = peer {
                    // SAFETY: passed on from the caller.
                    unsafe { write_address(peer, from, len) };
                }
                return Ok(accepted);
            }
            Ok(StandsFor::Gone) => crate::sys::close(accepted),
            Ok(StandsFor::Sdp(socket)) => {
                crate::sys::close(accepted);
                // SAFETY: passed on from the caller.
                return unsafe { give(socket, from, len, flags) };
            }
            Ok(StandsFor::Parents(given, names)) => {
                crate::sys::close(accepted);
                // SAFETY: passed on from the caller.
                return unsafe { give_relayed(given, names, (from, len), flags) };
            }
        }
    }
}

/// What listens for SDP next to a kernel's socket.
enum Twin {
    Own(Arc<Socket>),
    /// It is the parent's.
    Parents(Arc<Lost>),
}

/// What a connection stands for that the kernel has accepted.
enum StandsFor {
    /// Itself.
    Kernel,
    /// One of SDP that is gone.
    Gone,
    Sdp(Arc<Socket>),
    /// One that the parent relays.
    Parents(OwnedFd, Relayed),
}

impl Twin {
    /// What a connection from an address stands for.
    ///
    /// # Errors
    ///
    /// The parent is gone, or has closed the socket.
    fn what_stands(&self, accepted: RawFd, from: SocketAddr) -> Result<StandsFor, Errno> {
        let lost = match self {
            Self::Own(listener) => {
                return Ok(match both::accepted(listener, from) {
                    both::Accepted::Kernel => StandsFor::Kernel,
                    both::Accepted::Gone => StandsFor::Gone,
                    both::Accepted::Sdp(socket) => StandsFor::Sdp(socket),
                });
            }
            Self::Parents(lost) => lost,
        };
        // Those that stand for others come from the address that they go to.
        if kernel_name(accepted).is_none_or(|own| own.ip() != from.ip()) {
            return Ok(StandsFor::Kernel);
        }
        Ok(match fork::accept(lost, Some(from))? {
            fork::Accepted::Kernel => StandsFor::Kernel,
            fork::Accepted::Nothing => StandsFor::Gone,
            fork::Accepted::Relayed(given, names) => StandsFor::Parents(given, names),
        })
    }
}

/// Gives a connection to the program that the parent relays.
///
/// # Safety
///
/// As accept(2).
unsafe fn give_relayed(
    given: OwnedFd,
    names: Relayed,
    (from, len): (*mut sockaddr, *mut socklen_t),
    flags: c_int,
) -> Result<c_int, Errno> {
    let fd = fork::adopt(given, names, flags)?;
    if let Some(peer) = names.peer {
        // SAFETY: passed on from the caller.
        unsafe { write_address(peer, from, len) };
    }
    Ok(fd)
}

/// Accepts at a listening socket of the parent.
///
/// # Safety
///
/// As accept(2).
unsafe fn accept_of_parent(
    (fd, lost): (RawFd, &Lost),
    from: *mut sockaddr,
    len: *mut socklen_t,
    flags: c_int,
) -> Result<c_int, Errno> {
    loop {
        match fork::accept(lost, None)? {
            fork::Accepted::Relayed(given, names) => {
                // SAFETY: passed on from the caller.
                return unsafe { give_relayed(given, names, (from, len), flags) };
            }
            fork::Accepted::Nothing | fork::Accepted::Kernel => fork::wait_at(fd)?,
        }
    }
}

/// Accepts at a descriptor of this library; none if the kernel is to do it.
///
/// # Safety
///
/// As accept(2).
unsafe fn accept_at(
    name: &'static str,
    fd: c_int,
    from: *mut sockaddr,
    len: *mut socklen_t,
    flags: c_int,
) -> Option<c_int> {
    let twin = match table::get(fd)? {
        Entry::Sdp(socket) => {
            return Some(serve::<IntMinusOne>(name, || {
                // SAFETY: passed on from the caller.
                unsafe { give(socket.accept()?, from, len, flags) }
            }));
        }
        Entry::Lost(lost) if lost.listens => {
            return Some(serve::<IntMinusOne>(name, || {
                // SAFETY: passed on from the caller.
                unsafe { accept_of_parent((fd, &lost), from, len, flags) }
            }));
        }
        Entry::Candidate(candidate) => match candidate.own_twin() {
            Some(own) => Twin::Own(own),
            None => Twin::Parents(Arc::clone(candidate.parents_twin.get()?)),
        },
        _ => return None,
    };
    // SAFETY: passed on from the caller.
    Some(serve::<IntMinusOne>(name, || unsafe { accept_both((fd, &twin), from, len, flags) }))
}

#[unsafe(no_mangle)]
unsafe extern "C-unwind" fn accept(fd: c_int, from: *mut sockaddr, len: *mut socklen_t) -> c_int {
    // SAFETY: as the program called this.
    unsafe { accept_at("accept", fd, from, len, 0).unwrap_or_else(|| real::accept(fd, from, len)) }
}

#[unsafe(no_mangle)]
unsafe extern "C-unwind" fn accept4(
    fd: c_int,
    from: *mut sockaddr,
    len: *mut socklen_t,
    flags: c_int,
) -> c_int {
    // SAFETY: as the program called this.
    unsafe {
        accept_at("accept4", fd, from, len, flags)
            .unwrap_or_else(|| real::accept4(fd, from, len, flags))
    }
}

#[unsafe(no_mangle)]
unsafe extern "C-unwind" fn shutdown(fd: c_int, how: c_int) -> c_int {
    match table::socket(fd) {
        None => {
            claim(fd);
            // SAFETY: as the program called this.
            unsafe { real::shutdown(fd, how) }
        }
        Some(socket) => serve::<IntMinusOne>("shutdown", || socket.shut_down(how).map(|()| 0)),
    }
}

#[unsafe(no_mangle)]
unsafe extern "C-unwind" fn getsockname(
    fd: c_int,
    to: *mut sockaddr,
    len: *mut socklen_t,
) -> c_int {
    match table::socket(fd) {
        Some(socket) => serve::<IntMinusOne>("getsockname", || {
            let any = SocketAddr::from(([0; 4], 0));
            let local = socket.lock().local.unwrap_or(any);
            // SAFETY: the program passes room for an address.
            unsafe { write_address(local, to, len) };
            Ok(0)
        }),
        // SAFETY: as the program called this.
        None => unsafe {
            match table::relayed(fd).and_then(|relayed| relayed.local) {
                Some(local) => {
                    write_address(local, to, len);
                    0
                }
                None => real::getsockname(fd, to, len),
            }
        },
    }
}

#[unsafe(no_mangle)]
unsafe extern "C-unwind" fn getpeername(
    fd: c_int,
    to: *mut sockaddr,
    len: *mut socklen_t,
) -> c_int {
    match table::socket(fd) {
        Some(socket) => serve::<IntMinusOne>("getpeername", || {
            let mut state = socket.lock();
            state.connected().map_err(|_| Errno::ENOTCONN)?;
            let peer = state.peer.ok_or(Errno::ENOTCONN)?;
            // SAFETY: the program passes room for an address.
            unsafe { write_address(peer, to, len) };
            Ok(0)
        }),
        // SAFETY: as the program called this.
        None => unsafe {
            match table::relayed(fd).and_then(|relayed| relayed.peer) {
                Some(peer) => {
                    write_address(peer, to, len);
                    0
                }
                None => real::getpeername(fd, to, len),
            }
        },
    }
}

#[unsafe(no_mangle)]
unsafe extern "C-unwind" fn setsockopt(
    fd: c_int,
    level: c_int,
    name: c_int,
    value: *const c_void,
    len: socklen_t,
) -> c_int {
    match table::socket(fd) {
        Some(socket) => serve::<IntMinusOne>("setsockopt", || {
            if value.is_null() && len > 0 {
                return Err(Errno::EFAULT);
            }
            let value = match len {
                0 => &[][..],
                // SAFETY: the program passes a value of that length.
                len => unsafe { std::slice::from_raw_parts(value.cast(), len.min(256) as usize) },
            };
            socket.set_option(level, name, value).map(|()| 0)
        }),
        // Options of TCP and IP mean nothing to the stream that a relay has; they are no error of the
        // program's.
        None if level != libc::SOL_SOCKET && table::relayed(fd).is_some() => 0,
        // SAFETY: as the program called this.
        None => unsafe { real::setsockopt(fd, level, name, value, len) },
    }
}

#[unsafe(no_mangle)]
unsafe extern "C-unwind" fn getsockopt(
    fd: c_int,
    level: c_int,
    name: c_int,
    value: *mut c_void,
    len: *mut socklen_t,
) -> c_int {
    match table::socket(fd) {
        Some(socket) => serve::<IntMinusOne>("getsockopt", || {
            // SAFETY: the program passes a variable for the length, and so much room.
            unsafe {
                let room = len.as_mut().ok_or(Errno::EFAULT)?;
                if value.is_null() {
                    return Err(Errno::EFAULT);
                }
                // What was never set reads as zeros.
                let given = socket.option(level, name);
                let copied = given.len().min(*room as usize);
                let filled = if given.is_empty() { *room as usize } else { copied };
                std::ptr::write_bytes(value.cast::<u8>(), 0, filled);
                std::ptr::copy_nonoverlapping(given.as_ptr(), value.cast(), copied);
                *room = filled as socklen_t;
            }
            Ok(0)
        }),
        // SAFETY: as the program called this.
        None => unsafe { real::getsockopt(fd, level, name, value, len) },
    }
}

/// The program has made a socket blocking or non-blocking.
pub(super) fn note_nonblocking(fd: RawFd, nonblocking: bool) {
    if let Some(socket) = table::socket(fd) {
        socket.nonblocking.store(nonblocking, Ordering::Relaxed);
    }
}
