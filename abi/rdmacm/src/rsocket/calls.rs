//! From `rsocket` to `rclose`.

use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use libc::{c_int, sockaddr, socklen_t};
use quipu_abi_trace::entry;
use quipu_abi_types::{AF_IB, rdma_cm_event};
use quipu_cabi::{Errno, IntMinusOne};

use super::socket::{LINGER, Phase, Socket};
use super::system;
use super::table::{Entry, insert, known, remove, stream};
use crate::address::{bind_addr, length};
use crate::connect::rdma_disconnect;

/// Copies an address to where the program wants it, cut to the room there.
///
/// # Safety
///
/// `addr` has room for as many bytes as `len` says, or one of them is null.
pub(crate) unsafe fn tell_address(
    from: &libc::sockaddr_storage,
    addr: *mut sockaddr,
    len: *mut socklen_t,
) -> Result<(), Errno> {
    let from: *const sockaddr = (&raw const *from).cast();
    // SAFETY: passed on from the caller; the source has as many bytes as its family needs.
    unsafe {
        let Some(room) = len.as_mut() else { return Ok(()) };
        if addr.is_null() {
            return Ok(());
        }
        let needed = length(from)?;
        let copied = needed.min(*room as usize);
        std::ptr::copy_nonoverlapping(from.cast::<u8>(), addr.cast(), copied);
        *room = needed as socklen_t;
    }
    Ok(())
}

/// Sends the end of the stream and waits until everything has arrived, at most for `linger`.
fn finish(socket: &Socket, linger: Duration) {
    let deadline = Instant::now().checked_add(linger);
    let wait = || {
        socket.wait_until(true, deadline, |state| {
            let Ok(connection) = state.connected() else { return Some(Ok(())) };
            (connection.end() && connection.is_flushed()).then_some(Ok(()))
        })
    };
    while wait() == Err(Errno::EINTR) {}
}

entry! {
    /// `rsocket`: as socket(2), `SOCK_STREAM` and `SOCK_DGRAM` of IPv4 and IPv6; streams of InfiniBand, too.
    fn rsocket(domain: c_int, kind: c_int, protocol: c_int) -> IntMinusOne {
        if ![libc::AF_INET, libc::AF_INET6, AF_IB].contains(&domain) {
            return Err(Errno(libc::EAFNOSUPPORT));
        }
        let (flags, kind) = (kind & libc::SOCK_NONBLOCK, kind & 0xf);
        match (kind, protocol) {
            (libc::SOCK_STREAM, 0 | libc::IPPROTO_TCP) => {
                let socket = Socket::new(domain)?;
                socket.nonblocking.store(flags != 0, Ordering::Relaxed);
                let fd = socket.fd;
                insert(fd, Entry::Stream(socket));
                Ok(fd)
            }
            (libc::SOCK_DGRAM, 0 | libc::IPPROTO_UDP) => {
                let kind = kind | flags | libc::SOCK_CLOEXEC;
                // SAFETY: socket(2).
                let fd = system(unsafe { libc::socket(domain, kind, 0) })?;
                insert(fd, Entry::Datagram);
                Ok(fd)
            }
            _ => Err(Errno(libc::EPROTONOSUPPORT)),
        }
    }

    /// `rbind`: as bind(2).
    fn rbind(fd: c_int, addr: *const sockaddr, len: socklen_t) -> IntMinusOne {
        // SAFETY: the program passes an address of that length.
        unsafe {
            match known(fd)?.stream() {
                None => system(libc::bind(fd, addr, len)),
                Some(socket) => {
                    if length(addr)? > len as usize {
                        return Err(Errno::EINVAL);
                    }
                    let mut state = socket.lock();
                    bind_addr(state.id, addr)?;
                    state.bound = Some((*state.id).route.addr.src_storage);
                    Ok(0)
                }
            }
        }
    }

    /// `rlisten`: as listen(2).
    fn rlisten(fd: c_int, backlog: c_int) -> IntMinusOne {
        let socket = stream(fd)?;
        let mut state = socket.lock();
        match state.phase {
            Phase::Listening => return Ok(0),
            Phase::Idle => {}
            _ => return Err(Errno::EINVAL),
        }
        // SAFETY: the identifier is the socket's.
        unsafe { crate::id::id(state.id) }?.book().keeps_requests = true;
        // SAFETY: as above.
        system(unsafe { crate::address::rdma_listen(state.id, backlog) })?;
        state.phase = Phase::Listening;
        Ok(0)
    }

    /// `raccept`: as accept(2).
    fn raccept(fd: c_int, addr: *mut sockaddr, len: *mut socklen_t) -> IntMinusOne {
        let listener = stream(fd)?;
        loop {
            let patient = !listener.is_nonblocking(0);
            let (request, settings) = listener.wait(patient, |state| {
                if state.phase != Phase::Listening {
                    return Some(Err(Errno::EINVAL));
                }
                let request = state.requests.pop_front()?;
                Some(Ok((request as usize, state.settings.clone())))
            })?;
            let mut request = request as *mut rdma_cm_event;
            // SAFETY: it was taken from the list of requests.
            let accepted = unsafe { Socket::accepted(&mut request, &settings) };
            if !request.is_null() {
                // SAFETY: as above; nothing has become of it.
                unsafe { listener.put_back(request) };
            }
            let Some(socket) = accepted? else { continue };
            // SAFETY: the identifier is the socket's; the program passes room for an address, or null.
            unsafe { tell_address(&(*socket.lock().id).route.addr.dst_storage, addr, len) }?;
            let fd = socket.fd;
            insert(fd, Entry::Stream(socket));
            return Ok(fd);
        }
    }

    /// `rconnect`: as connect(2).
    fn rconnect(fd: c_int, addr: *const sockaddr, len: socklen_t) -> IntMinusOne {
        // SAFETY: the program passes an address of that length.
        unsafe {
            let socket = match known(fd)?.stream() {
                None => return system(libc::connect(fd, addr, len)),
                Some(socket) => socket,
            };
            if length(addr)? > len as usize {
                return Err(Errno::EINVAL);
            }
            let patient = !socket.is_nonblocking(0);
            socket.connect(addr, patient)?;
            let connected = socket.wait(patient, |state| match state.phase {
                Phase::Connected => {
                    state.unanswered = false;
                    Some(Ok(0))
                }
                Phase::Failed => Some(Err(state.error.take().unwrap_or(Errno::ECONNREFUSED))),
                _ => None,
            });
            match connected {
                Err(Errno::EAGAIN) => Err(Errno(libc::EINPROGRESS)),
                other => other,
            }
        }
    }

    /// `rshutdown`: as shutdown(2). Where the socket blocks, what was sent has arrived when it returns, or
    /// the peer takes nothing for as long as `rclose` would wait for it.
    fn rshutdown(fd: c_int, how: c_int) -> IntMinusOne {
        let socket = match known(fd)?.stream() {
            // SAFETY: shutdown(2).
            None => return system(unsafe { libc::shutdown(fd, how) }),
            Some(socket) => socket,
        };
        if !(libc::SHUT_RD..=libc::SHUT_RDWR).contains(&how) {
            return Err(Errno::EINVAL);
        }
        let linger = {
            let mut state = socket.lock();
            if state.phase == Phase::Listening {
                drop(state);
                if how != libc::SHUT_WR {
                    socket.renew(Phase::Listening)?;
                }
                return Ok(0);
            }
            let connection = state.connected().map_err(|_| Errno::ENOTCONN)?;
            if how != libc::SHUT_RD {
                connection.end();
            }
            state.shut_read |= how != libc::SHUT_WR;
            // Who sleeps hears of it, and sets do.
            state.ring();
            state.progress();
            state.settings.linger.unwrap_or(LINGER)
        };
        if how != libc::SHUT_RD && !socket.is_nonblocking(0) {
            finish(&socket, linger);
        }
        Ok(0)
    }

    /// `rclose`: as close(2). What was sent arrives, or the connection is over, before it returns; a peer
    /// that takes nothing for as long as `SO_LINGER` says, or half a minute, loses the connection; at once
    /// where that is no time, so that it does not take what it has for the whole.
    fn rclose(fd: c_int) -> IntMinusOne {
        match remove(fd).ok_or(Errno(libc::EBADF))? {
            Entry::Set(_) => Ok(0),
            // SAFETY: close(2) of a descriptor that is this library's.
            Entry::Datagram => system(unsafe { libc::close(fd) }),
            Entry::Stream(socket) => {
                let mut state = socket.lock();
                // A closed descriptor is in no set.
                state.watchers.clear();
                let linger = state.settings.linger.unwrap_or(LINGER);
                drop(state);
                if !linger.is_zero() {
                    finish(&socket, linger);
                }
                let state = socket.lock();
                if state.phase == Phase::Connected {
                    // SAFETY: the identifier is the socket's.
                    unsafe { rdma_disconnect(state.id) };
                }
                Ok(0)
            }
        }
    }

    /// `rgetpeername`: as getpeername(2).
    fn rgetpeername(fd: c_int, addr: *mut sockaddr, len: *mut socklen_t) -> IntMinusOne {
        // SAFETY: the program passes room for an address.
        unsafe {
            match known(fd)?.stream() {
                None => system(libc::getpeername(fd, addr, len)),
                Some(socket) => {
                    let mut state = socket.lock();
                    state.connected().map_err(|_| Errno::ENOTCONN)?;
                    tell_address(&(*state.id).route.addr.dst_storage, addr, len)?;
                    Ok(0)
                }
            }
        }
    }

    /// `rgetsockname`: as getsockname(2).
    fn rgetsockname(fd: c_int, addr: *mut sockaddr, len: *mut socklen_t) -> IntMinusOne {
        // SAFETY: the program passes room for an address.
        unsafe {
            match known(fd)?.stream() {
                None => system(libc::getsockname(fd, addr, len)),
                Some(socket) => {
                    let state = socket.lock();
                    tell_address(&(*state.id).route.addr.src_storage, addr, len)?;
                    Ok(0)
                }
            }
        }
    }

    /// `rfcntl`: as fcntl(2), `F_GETFL` and `F_SETFL`, `F_GETFD` and `F_SETFD`.
    fn rfcntl(fd: c_int, command: c_int, argument: libc::c_long) -> IntMinusOne {
        match (known(fd)?.stream(), command) {
            (None, _) | (_, libc::F_GETFD | libc::F_SETFD) => {
                // SAFETY: fcntl(2), with the argument as the program gave it.
                system(unsafe { libc::fcntl(fd, command, argument) })
            }
            (Some(socket), libc::F_GETFL) => {
                let nonblocking = socket.nonblocking.load(Ordering::Relaxed);
                Ok(libc::O_RDWR | if nonblocking { libc::O_NONBLOCK } else { 0 })
            }
            (Some(socket), libc::F_SETFL) => {
                let nonblocking = argument as c_int & libc::O_NONBLOCK != 0;
                socket.nonblocking.store(nonblocking, Ordering::Relaxed);
                Ok(0)
            }
            _ => Err(Errno::EOPNOTSUPP),
        }
    }
}
