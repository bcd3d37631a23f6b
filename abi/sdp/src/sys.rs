//! Addresses, errors and descriptors of the system.

use std::cell::Cell;
use std::marker::PhantomData;
use std::mem::size_of;
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr, SocketAddrV4, SocketAddrV6};
use std::os::fd::{FromRawFd, OwnedFd, RawFd};

use libc::{c_int, sockaddr, sockaddr_in, sockaddr_in6, socklen_t};
use quipu_cabi::Errno;
use quipu_cabi::descriptors::move_up;
use quipu_host::EngineError;
use quipu_host::connection::CallError;

use crate::real;

/// The address family of SDP on Linux.
pub(crate) const AF_INET_SDP: c_int = 27;

/// Sets `errno`.
pub(crate) fn set_errno(errno: c_int) {
    Errno(errno).set();
}

/// The result of a call of the C library that reports failure as -1.
pub(crate) fn system<N: PartialOrd + Default>(result: N) -> Result<N, Errno> {
    if result < N::default() { Err(Errno::last()) } else { Ok(result) }
}

/// What a program hears of an error of the engine.
pub(crate) fn errno_of(error: &EngineError) -> Errno {
    match error {
        EngineError::Interrupted => Errno::EINTR,
        EngineError::WouldBlock | EngineError::WaitOn => Errno::EAGAIN,
        EngineError::BadAddress => Errno::EFAULT,
        EngineError::EngineGone => Errno::ENODEV,
        EngineError::Connection(CallError::Invalid(_) | CallError::WrongState) => Errno::EINVAL,
        EngineError::System { source, .. } => Errno(source.raw_os_error().unwrap_or(libc::EIO)),
        _ => Errno::EIO,
    }
}

/// Reads an address of the program. The family of SDP stands for IPv4.
///
/// # Safety
///
/// `at` is null or has `len` bytes.
pub(crate) unsafe fn read_address(
    at: *const sockaddr,
    len: socklen_t,
) -> Result<SocketAddr, Errno> {
    let len = len as usize;
    if at.is_null() || len < size_of::<libc::sa_family_t>() {
        return Err(Errno::EINVAL);
    }
    // SAFETY: passed on from the caller; the length was checked for each family.
    unsafe {
        match c_int::from((*at).sa_family) {
            libc::AF_INET | AF_INET_SDP | libc::AF_UNSPEC if len >= size_of::<sockaddr_in>() => {
                let v4 = at.cast::<sockaddr_in>().read_unaligned();
                let ip = Ipv4Addr::from(u32::from_be(v4.sin_addr.s_addr));
                Ok(SocketAddrV4::new(ip, u16::from_be(v4.sin_port)).into())
            }
            libc::AF_INET6 if len >= size_of::<sockaddr_in6>() => {
                let v6 = at.cast::<sockaddr_in6>().read_unaligned();
                let (ip, port) = (Ipv6Addr::from(v6.sin6_addr.s6_addr), u16::from_be(v6.sin6_port));
                Ok(SocketAddrV6::new(ip, port, v6.sin6_flowinfo, v6.sin6_scope_id).into())
            }
            libc::AF_INET | AF_INET_SDP | libc::AF_INET6 => Err(Errno::EINVAL),
            _ => Err(Errno::EAFNOSUPPORT),
        }
    }
}

/// Writes an address to where the program wants it, cut to the room there.
///
/// # Safety
///
/// `at` has as many bytes as `len` says, or one of them is null.
pub(crate) unsafe fn write_address(from: SocketAddr, at: *mut sockaddr, len: *mut socklen_t) {
    // SAFETY: passed on from the caller; all zeroes is an address of these plain types.
    unsafe {
        let Some(room) = len.as_mut() else { return };
        if at.is_null() {
            return;
        }
        let mut storage: libc::sockaddr_storage = std::mem::zeroed();
        let needed = match from {
            SocketAddr::V4(v4) => {
                let to = (&raw mut storage).cast::<sockaddr_in>();
                (*to).sin_family = libc::AF_INET as libc::sa_family_t;
                (*to).sin_port = v4.port().to_be();
                (*to).sin_addr.s_addr = u32::from(*v4.ip()).to_be();
                size_of::<sockaddr_in>()
            }
            SocketAddr::V6(v6) => {
                let to = (&raw mut storage).cast::<sockaddr_in6>();
                (*to).sin6_family = libc::AF_INET6 as libc::sa_family_t;
                (*to).sin6_port = v6.port().to_be();
                (*to).sin6_addr.s6_addr = v6.ip().octets();
                (*to).sin6_scope_id = v6.scope_id();
                size_of::<sockaddr_in6>()
            }
        };
        let copied = needed.min(*room as usize);
        std::ptr::copy_nonoverlapping((&raw const storage).cast::<u8>(), at.cast(), copied);
        *room = needed as socklen_t;
    }
}

/// A new descriptor of this library's own, with a number that is out of the program's way.
pub(crate) fn own_descriptor(fd: c_int) -> Result<OwnedFd, Errno> {
    let fd = system(fd)?;
    // SAFETY: the call that made it has just succeeded, and nobody else has it.
    let fd = unsafe { OwnedFd::from_raw_fd(fd) };
    move_up(fd).map_err(|error| Errno(error.raw_os_error().unwrap_or(libc::EMFILE)))
}

/// Closes a descriptor without a look at the table.
pub(crate) fn close(fd: RawFd) {
    // SAFETY: close(2) of a descriptor that the caller gives up.
    unsafe { real::close(fd) };
}

/// Reads an address of the kernel's socket.
pub(crate) fn kernel_name(fd: c_int) -> Option<SocketAddr> {
    // SAFETY: all zeroes is a storage; the kernel writes at most as many bytes as it has.
    unsafe {
        let mut storage: libc::sockaddr_storage = std::mem::zeroed();
        let mut len = size_of::<libc::sockaddr_storage>() as socklen_t;
        let at = (&raw mut storage).cast();
        let named = real::getsockname(fd, at, &raw mut len);
        (named == 0).then(|| read_address(at, len).ok()).flatten()
    }
}

thread_local! {
    /// How many [`BlockedSignals`] this thread has, and the signals that were blocked before the first.
    static BLOCKED: Cell<(u32, Option<libc::sigset_t>)> = const { Cell::new((0, None)) };
}

/// All signals are blocked in this thread while it lives, or another of this thread. Those that come
/// meanwhile are handled when the last is dropped.
pub(crate) struct BlockedSignals {
    /// It is of one thread.
    _thread: PhantomData<*const ()>,
}

impl BlockedSignals {
    pub(crate) fn new() -> Self {
        // Handlers leave the count as they find it.
        match BLOCKED.get() {
            (0, _) => {
                // SAFETY: all zeroes is a set; it is filled in, and the old mask is written.
                let before = unsafe {
                    let (mut all, mut before) = (std::mem::zeroed(), std::mem::zeroed());
                    libc::sigfillset(&raw mut all);
                    libc::pthread_sigmask(libc::SIG_SETMASK, &raw const all, &raw mut before);
                    before
                };
                BLOCKED.set((1, Some(before)));
            }
            (count, before) => BLOCKED.set((count + 1, before)),
        }
        Self { _thread: PhantomData }
    }

    /// Whether a signal waits that the program has not blocked.
    pub(crate) fn any_pending(&self) -> bool {
        // SAFETY: all zeroes is a set, which the call fills in.
        let pending = unsafe {
            let mut pending: libc::sigset_t = std::mem::zeroed();
            libc::sigpending(&raw mut pending);
            pending
        };
        let is_in = |set: &libc::sigset_t, signal| {
            // SAFETY: a set that is filled in.
            unsafe { libc::sigismember(&raw const *set, signal) == 1 }
        };
        let Some(before) = BLOCKED.get().1 else { return false };
        (1..=libc::SIGRTMAX()).any(|signal| is_in(&pending, signal) && !is_in(&before, signal))
    }
}

impl Drop for BlockedSignals {
    fn drop(&mut self) {
        let (count, before) = BLOCKED.get();
        BLOCKED.set((count.saturating_sub(1), before));
        if count == 1
            && let Some(before) = before
        {
            // SAFETY: the mask that was there before.
            unsafe {
                libc::pthread_sigmask(libc::SIG_SETMASK, &raw const before, std::ptr::null_mut())
            };
        }
    }
}
