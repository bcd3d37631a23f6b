//! System calls, each behind a safe function that owns its descriptors.
//!
//! Every descriptor made here is close-on-exec and, but for those that the program waits for, out of its way
//! ([`quipu_cabi::descriptors`]).

use std::fs::File;
use std::io;
use std::mem::MaybeUninit;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::path::Path;

use libc::{c_int, c_void, socklen_t};
pub use quipu_cabi::descriptors::with_more_descriptors;
pub(crate) use quipu_cabi::descriptors::{above_standard, move_file_up, move_up};

pub(crate) use self::address::{RawAddr, canonical};
pub(crate) use self::apart::spawn_apart;
pub(crate) use self::queue_fd::QueueFd;
#[cfg(test)]
pub(crate) use self::wait::is_readable;
pub(crate) use self::wait::{
    Epoll, EventFd, ReadyList, poll, poll_entry, wait_beside, wait_either, wait_readable,
    wait_readable_within, wait_writable,
};

use crate::fork;

mod address;
mod apart;
mod queue_fd;
mod wait;

/// Turns the -1 of a system call into the error it left in errno.
pub(crate) fn check(result: c_int) -> io::Result<c_int> {
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(result) }
}

/// As [`check`], for calls that return a length.
pub(crate) fn check_len(result: isize) -> io::Result<usize> {
    usize::try_from(result).map_err(|_| io::Error::last_os_error())
}

/// Takes ownership of a descriptor that a system call has just returned, and moves it out of the program's
/// way.
pub(crate) fn adopt(fd: c_int) -> io::Result<OwnedFd> {
    // SAFETY: the callers pass a descriptor that the kernel has just given them and nobody else
    // knows, as `from_raw_fd` asks.
    let owned = unsafe { OwnedFd::from_raw_fd(check(fd)?) };
    move_up(owned)
}

/// As [`adopt`], of a socket: children of fork do not get it.
pub(crate) fn adopt_socket(fd: c_int) -> io::Result<OwnedFd> {
    let socket = adopt(fd)?;
    fork::withhold(&socket);
    Ok(socket)
}

/// Opens a log to add to it; `%p` in its name is the process.
pub(crate) fn log(path: &Path) -> io::Result<File> {
    let name = quipu_cabi::per_process(path.as_os_str());
    move_file_up(File::options().create(true).append(true).open(name)?)
}

/// The text of a file, also where the program has as many descriptors as it may have.
pub(crate) fn read_text(path: &str) -> io::Result<String> {
    with_more_descriptors(|| std::fs::read_to_string(path))
}

/// The longest file that this process may make (`RLIMIT_FSIZE`), in bytes.
pub(crate) fn file_size_limit() -> u64 {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: the kernel fills in one struct.
    let asked = unsafe { libc::getrlimit(libc::RLIMIT_FSIZE, &raw mut limit) };
    if asked == 0 { limit.rlim_cur } else { 0 }
}

/// Makes a file `len` bytes long. Who asks for more than he may have ([`file_size_limit`]) gets a signal that
/// ends the process; here it is an error like a want of memory.
pub(crate) fn set_length(fd: &OwnedFd, len: u64) -> io::Result<()> {
    let len = libc::off_t::try_from(len).ok().filter(|_| len <= file_size_limit());
    let len = len.ok_or_else(|| io::Error::from_raw_os_error(libc::ENOMEM))?;
    // SAFETY: takes integers only.
    check(unsafe { libc::ftruncate(fd.as_raw_fd(), len) })?;
    Ok(())
}

/// A descriptor for a process (Linux 5.3).
pub(crate) fn process(pid: libc::pid_t) -> io::Result<OwnedFd> {
    // SAFETY: takes integers only.
    let open = || adopt(unsafe { libc::syscall(libc::SYS_pidfd_open, pid, 0) } as c_int);
    with_more_descriptors(open)
}

/// The open file that another process knows as `fd` (Linux 5.6). The kernel asks for the right to trace it.
pub(crate) fn descriptor_of(process: &OwnedFd, fd: u32) -> io::Result<OwnedFd> {
    let process = process.as_raw_fd();
    // SAFETY: takes integers only.
    let get = || adopt(unsafe { libc::syscall(libc::SYS_pidfd_getfd, process, fd, 0) } as c_int);
    with_more_descriptors(get)
}

/// The status flags (`O_NONBLOCK` and others) of a descriptor.
pub(crate) fn status_flags(fd: RawFd) -> io::Result<c_int> {
    // SAFETY: F_GETFL takes no pointer.
    check(unsafe { libc::fcntl(fd, libc::F_GETFL) })
}

/// A non-blocking UDP socket for the family of `ip`, and no other.
pub(crate) fn udp_socket(ip: IpAddr) -> io::Result<OwnedFd> {
    let family = if ip.is_ipv4() { libc::AF_INET } else { libc::AF_INET6 };
    let kind = libc::SOCK_DGRAM | libc::SOCK_NONBLOCK | libc::SOCK_CLOEXEC;
    // SAFETY: takes integers.
    let fd = adopt_socket(unsafe { libc::socket(family, kind, 0) })?;
    if ip.is_ipv6() {
        set_option(&fd, libc::IPPROTO_IPV6, libc::IPV6_V6ONLY, 1)?;
    }
    Ok(fd)
}

/// Has the kernel tell with each datagram of a socket for the family of `ip` the traffic class and hop limit
/// with which it came, by control messages.
pub(crate) fn tell_of_headers(fd: &OwnedFd, ip: IpAddr) -> io::Result<()> {
    let (level, options) = match ip {
        IpAddr::V4(_) => (libc::IPPROTO_IP, [libc::IP_RECVTOS, libc::IP_RECVTTL]),
        IpAddr::V6(_) => (libc::IPPROTO_IPV6, [libc::IPV6_RECVTCLASS, libc::IPV6_RECVHOPLIMIT]),
    };
    options.into_iter().try_for_each(|option| set_option(fd, level, option, 1))
}

/// What is to become of a membership.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Membership {
    /// It begins.
    Join,
    /// It ends.
    Leave,
}

/// Has a socket join or leave a multicast group on an interface.
pub(crate) fn change_membership(
    fd: &OwnedFd,
    group: IpAddr,
    interface: u32,
    change: Membership,
) -> io::Result<()> {
    let join = change == Membership::Join;
    match group {
        IpAddr::V4(group) => {
            // struct ip_mreqn: group, local address (any), interface.
            let mut request = [0; 12];
            request[..4].copy_from_slice(&group.octets());
            request[8..].copy_from_slice(&interface.to_ne_bytes());
            let name = if join { libc::IP_ADD_MEMBERSHIP } else { libc::IP_DROP_MEMBERSHIP };
            set_option_bytes(fd, libc::IPPROTO_IP, name, &request)
        }
        IpAddr::V6(group) => {
            // struct ipv6_mreq: group, interface.
            let mut request = [0; 20];
            request[..16].copy_from_slice(&group.octets());
            request[16..].copy_from_slice(&interface.to_ne_bytes());
            let name = if join { libc::IPV6_ADD_MEMBERSHIP } else { libc::IPV6_DROP_MEMBERSHIP };
            set_option_bytes(fd, libc::IPPROTO_IPV6, name, &request)
        }
    }
}

/// Has what a socket for the family of `ip` sends to multicast groups leave by an interface.
pub(crate) fn send_multicast_by(fd: &OwnedFd, ip: IpAddr, interface: u32) -> io::Result<()> {
    match ip {
        IpAddr::V4(_) => {
            // struct ip_mreqn, as above.
            let mut request = [0; 12];
            request[8..].copy_from_slice(&interface.to_ne_bytes());
            set_option_bytes(fd, libc::IPPROTO_IP, libc::IP_MULTICAST_IF, &request)
        }
        IpAddr::V6(_) => {
            let index = interface.to_ne_bytes();
            set_option_bytes(fd, libc::IPPROTO_IPV6, libc::IPV6_MULTICAST_IF, &index)
        }
    }
}

/// A non-blocking TCP socket for the family of `ip`.
pub(crate) fn tcp_socket(ip: IpAddr) -> io::Result<OwnedFd> {
    let family = if ip.is_ipv4() { libc::AF_INET } else { libc::AF_INET6 };
    let kind = libc::SOCK_STREAM | libc::SOCK_NONBLOCK | libc::SOCK_CLOEXEC;
    // SAFETY: takes integers only.
    adopt_socket(unsafe { libc::socket(family, kind, libc::IPPROTO_TCP) })
}

/// Has a socket that will be bound to the wildcard of IPv6 take IPv4 as well. Does nothing for others.
pub(crate) fn take_both_families(fd: &OwnedFd, ip: IpAddr) -> io::Result<()> {
    match ip {
        IpAddr::V6(v6) if v6.is_unspecified() => {
            set_option(fd, libc::IPPROTO_IPV6, libc::IPV6_V6ONLY, 0)
        }
        _ => Ok(()),
    }
}

/// What `open` gives for the first of these addresses whose family the host has.
pub(crate) fn at_first_that_works<T>(
    addresses: &[SocketAddr],
    open: impl Fn(SocketAddr) -> io::Result<T>,
) -> io::Result<T> {
    let lacks_family = |error: &io::Error| {
        matches!(error.raw_os_error(), Some(libc::EAFNOSUPPORT | libc::EADDRNOTAVAIL))
    };
    let mut outcome = Err(io::ErrorKind::AddrNotAvailable.into());
    for address in addresses {
        outcome = open(*address);
        if !outcome.as_ref().is_err_and(lacks_family) {
            break;
        }
    }
    outcome
}

/// Binds a socket to an address.
pub(crate) fn bind(fd: &OwnedFd, address: SocketAddr) -> io::Result<()> {
    let raw = RawAddr::new(address);
    let (at, len) = raw.as_parts();
    // SAFETY: the pointer and the length describe `raw`, which outlives the call.
    check(unsafe { libc::bind(fd.as_raw_fd(), at, len) })?;
    Ok(())
}

/// Starts a connection; `Ok(false)` while it is under way.
pub(crate) fn connect(fd: &OwnedFd, address: SocketAddr) -> io::Result<bool> {
    let raw = RawAddr::new(address);
    let (at, len) = raw.as_parts();
    // SAFETY: the pointer and the length describe `raw`, which outlives the call.
    let result = check(unsafe { libc::connect(fd.as_raw_fd(), at, len) });
    match result {
        Ok(_) => Ok(true),
        Err(e) if e.raw_os_error() == Some(libc::EINPROGRESS) => Ok(false),
        Err(e) => Err(e),
    }
}

/// Makes a bound socket listen.
pub(crate) fn listen(fd: &OwnedFd, backlog: c_int) -> io::Result<()> {
    // SAFETY: takes integers only.
    check(unsafe { libc::listen(fd.as_raw_fd(), backlog) })?;
    Ok(())
}

/// Takes a connection from a listening TCP socket, with the peer's address.
pub(crate) fn accept(listener: &OwnedFd) -> io::Result<(OwnedFd, SocketAddr)> {
    let mut storage = MaybeUninit::<libc::sockaddr_storage>::zeroed();
    let mut len = size_of::<libc::sockaddr_storage>() as socklen_t;
    // SAFETY: the kernel writes at most `len` bytes, the size of `storage`.
    let fd = unsafe {
        libc::accept4(
            listener.as_raw_fd(),
            storage.as_mut_ptr().cast(),
            &raw mut len,
            libc::SOCK_NONBLOCK | libc::SOCK_CLOEXEC,
        )
    };
    let fd = adopt_socket(fd)?;
    // SAFETY: the kernel filled in an address of its family, in zeroed storage.
    let peer = unsafe { RawAddr::decode(storage.as_ptr().cast()) };
    Ok((fd, peer.ok_or_else(|| io::Error::from(io::ErrorKind::Unsupported))?))
}

/// The address that a socket is bound to.
pub(crate) fn local_address(fd: &OwnedFd) -> io::Result<SocketAddr> {
    let mut storage = MaybeUninit::<libc::sockaddr_storage>::zeroed();
    let mut len = size_of::<libc::sockaddr_storage>() as socklen_t;
    // SAFETY: the kernel writes at most `len` bytes, the size of `storage`.
    check(unsafe { libc::getsockname(fd.as_raw_fd(), storage.as_mut_ptr().cast(), &raw mut len) })?;
    // SAFETY: the kernel filled in an address of its family, in zeroed storage.
    let address = unsafe { RawAddr::decode(storage.as_ptr().cast()) };
    address.ok_or_else(|| io::Error::from(io::ErrorKind::Unsupported))
}

/// Sets an integer socket option.
pub(crate) fn set_option(fd: &OwnedFd, level: c_int, name: c_int, value: c_int) -> io::Result<()> {
    set_option_bytes(fd, level, name, &value.to_ne_bytes())
}

/// Sets a socket option that is not an integer.
pub(crate) fn set_option_bytes(
    fd: &OwnedFd,
    level: c_int,
    name: c_int,
    value: &[u8],
) -> io::Result<()> {
    let pointer = value.as_ptr().cast::<c_void>();
    // SAFETY: the kernel reads `value.len()` bytes from a live slice.
    check(unsafe {
        libc::setsockopt(fd.as_raw_fd(), level, name, pointer, value.len() as socklen_t)
    })?;
    Ok(())
}

/// An option of the socket layer that is an integer.
pub(crate) fn socket_option(fd: &OwnedFd, name: c_int) -> io::Result<c_int> {
    let mut value: c_int = 0;
    let mut len = size_of::<c_int>() as socklen_t;
    // SAFETY: the kernel writes at most `len` bytes to `value`.
    check(unsafe {
        libc::getsockopt(
            fd.as_raw_fd(),
            libc::SOL_SOCKET,
            name,
            (&raw mut value).cast(),
            &raw mut len,
        )
    })?;
    Ok(value)
}

/// An option that is not an integer; how many octets of `into` it is, which may be fewer on an older kernel.
pub(crate) fn read_option(
    fd: &OwnedFd,
    level: c_int,
    name: c_int,
    into: &mut [u8],
) -> io::Result<usize> {
    let mut len = into.len() as socklen_t;
    let pointer = into.as_mut_ptr().cast::<c_void>();
    // SAFETY: the kernel writes at most `len` bytes, to a live slice of that length.
    check(unsafe { libc::getsockopt(fd.as_raw_fd(), level, name, pointer, &raw mut len) })?;
    Ok(len as usize)
}

/// The pending error of a socket, which this clears.
pub(crate) fn socket_error(fd: &OwnedFd) -> io::Result<()> {
    match socket_option(fd, libc::SO_ERROR)? {
        0 => Ok(()),
        error => Err(io::Error::from_raw_os_error(error)),
    }
}

/// A system call that does not wait, made straight. The functions of the C library for these are
/// cancellation points, which nothing here is to be (see [`quipu_cabi::Hold`]), and in a program with
/// threads say so before and after with a locked instruction each, 40 ns in all.
macro_rules! straight {
    ($number:ident, $fd:expr $(, $argument:expr)* $(,)?) => {
        libc::syscall(libc::$number, $fd.as_raw_fd() $(, $argument)*) as isize
    };
}
pub(crate) use straight;

/// Receives what there is, without waiting. 0 is the end of the stream.
pub(crate) fn receive(fd: &OwnedFd, into: &mut [u8]) -> io::Result<usize> {
    receive_message(fd, into, 0)
}

/// As [`receive`], one message of a socket that keeps them apart, with more flags.
pub(crate) fn receive_message(fd: &OwnedFd, into: &mut [u8], flags: c_int) -> io::Result<usize> {
    let flags = libc::MSG_DONTWAIT | flags;
    let nobody = std::ptr::null::<c_void>();
    // SAFETY: the kernel writes at most `into.len()` bytes to a live slice, and no address.
    check_len(unsafe {
        straight!(SYS_recvfrom, fd, into.as_mut_ptr(), into.len(), flags, nobody, nobody)
    })
}

/// Sends what fits, without waiting and without SIGPIPE.
pub(crate) fn send(fd: &OwnedFd, bytes: &[u8]) -> io::Result<usize> {
    let flags = libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL;
    let nobody = std::ptr::null::<c_void>();
    // SAFETY: the kernel reads `bytes.len()` bytes from a live slice, and no address.
    check_len(unsafe {
        straight!(SYS_sendto, fd, bytes.as_ptr(), bytes.len(), flags, nobody, 0usize)
    })
}

/// Sends a datagram to an address, without waiting.
pub(crate) fn send_to(fd: &OwnedFd, bytes: &[u8], to: &RawAddr) -> io::Result<usize> {
    let flags = libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL;
    let (address, len) = to.as_parts();
    // SAFETY: the kernel reads `bytes.len()` bytes from a live slice, and an address of `len` from another.
    check_len(unsafe {
        straight!(SYS_sendto, fd, bytes.as_ptr(), bytes.len(), flags, address, len)
    })
}

/// As [`send`], for a list of ranges.
///
/// # Safety
///
/// Each range is valid for reads, or not mapped at all; others may write to it meanwhile.
pub(crate) unsafe fn send_list(fd: &OwnedFd, list: &[libc::iovec]) -> io::Result<usize> {
    let message = message_of(list);
    let flags = libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL;
    // SAFETY: the kernel reads the list, which is live, and the ranges, by the caller's promise.
    check_len(unsafe { straight!(SYS_sendmsg, fd, &raw const message, flags) })
}

/// As [`receive`], into a list of ranges, one after the other.
///
/// # Safety
///
/// Each range is valid for writes, or not mapped at all, and no reference to it is alive; others may read
/// and write it meanwhile.
pub(crate) unsafe fn receive_list(fd: &OwnedFd, list: &[libc::iovec]) -> io::Result<usize> {
    let mut message = message_of(list);
    let flags = libc::MSG_DONTWAIT;
    // SAFETY: the kernel reads the list, which is live, and writes to the ranges, by the caller's promise.
    check_len(unsafe { straight!(SYS_recvmsg, fd, &raw mut message, flags) })
}

/// Sends several messages without waiting and without SIGPIPE; how many were sent.
///
/// # Safety
///
/// `count` headers are live, and name memory that is valid for reads.
pub(crate) unsafe fn send_messages(
    fd: &OwnedFd,
    headers: *mut libc::mmsghdr,
    count: usize,
) -> io::Result<usize> {
    let flags = libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL;
    // SAFETY: the kernel reads what the headers name, by the caller's promise, and writes to them.
    check_len(unsafe { straight!(SYS_sendmmsg, fd, headers, count, flags) })
}

/// Receives several messages without waiting; how many.
///
/// # Safety
///
/// `count` headers are live, and name memory that is valid for writes and that nobody else uses meanwhile.
pub(crate) unsafe fn receive_messages(
    fd: &OwnedFd,
    headers: *mut libc::mmsghdr,
    count: usize,
) -> io::Result<usize> {
    let (flags, no_limit) = (libc::MSG_DONTWAIT, std::ptr::null::<c_void>());
    // SAFETY: the kernel writes to what the headers name, by the caller's promise, and to them.
    check_len(unsafe { straight!(SYS_recvmmsg, fd, headers, count, flags, no_limit) })
}

/// A message of these ranges, without an address or control data.
fn message_of(list: &[libc::iovec]) -> libc::msghdr {
    // SAFETY: msghdr is plain data, for which all zeroes is a valid value.
    let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
    message.msg_iov = list.as_ptr().cast_mut();
    message.msg_iovlen = list.len();
    message
}

/// Gives back the memory of the first `len` bytes of a memory file, whoever has them mapped: zeros are there
/// from now on.
pub(crate) fn punch_hole(fd: &OwnedFd, len: u64) -> io::Result<()> {
    let mode = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
    // SAFETY: takes integers only. What others see of the file is their own concern, as with every write.
    check(unsafe { libc::fallocate(fd.as_raw_fd(), mode, 0, len as libc::off_t) })?;
    Ok(())
}

/// Tells the peer that no more bytes follow.
pub(crate) fn shutdown_write(fd: &OwnedFd) -> io::Result<()> {
    // SAFETY: takes integers only.
    check(unsafe { libc::shutdown(fd.as_raw_fd(), libc::SHUT_WR) })?;
    Ok(())
}

/// True for the errors that mean "try again later".
pub(crate) fn would_block(error: &io::Error) -> bool {
    // Not by the kind, which is looked up in a table: most polls come this way.
    matches!(error.raw_os_error(), Some(libc::EAGAIN | libc::EINTR))
}

/// True if the kernel may not read or write memory that it was given.
pub(crate) fn is_fault(error: &io::Error) -> bool {
    error.raw_os_error() == Some(libc::EFAULT)
}

/// Fills `bytes` with randomness from the kernel.
pub(crate) fn random(bytes: &mut [u8]) -> io::Result<()> {
    let mut filled = 0;
    while filled < bytes.len() {
        let rest = &mut bytes[filled..];
        // SAFETY: the kernel writes at most `rest.len()` bytes to a live slice.
        match check_len(unsafe { libc::getrandom(rest.as_mut_ptr().cast(), rest.len(), 0) }) {
            Ok(n) => filled += n,
            Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
            Err(e) => return Err(e),
        }
    }
    Ok(())
}

/// How many processors this thread may run on, at least 1.
pub(crate) fn processors() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}

/// The processor on which this thread runs at this moment.
#[inline]
pub(crate) fn processor() -> u32 {
    // SAFETY: a question without pointers.
    unsafe { libc::sched_getcpu() as u32 }
}

/// How many processors the machine has, at least 1, whichever of them this thread may run on.
pub(crate) fn processors_online() -> usize {
    // SAFETY: a question without pointers.
    let count = unsafe { libc::sysconf(libc::_SC_NPROCESSORS_ONLN) };
    usize::try_from(count).unwrap_or(1).max(1)
}

/// Soft and hard limit of open descriptors.
pub(crate) fn descriptor_limit() -> io::Result<(u64, u64)> {
    quipu_cabi::descriptors::limit().map(|limit| (limit.rlim_cur, limit.rlim_max))
}

/// Raises the soft limit of open descriptors to `wanted` or the hard limit, whichever is less, for good: only
/// in a process that is Quipu's own. Returns what it is afterwards.
pub(crate) fn raise_descriptor_limit(wanted: u64) -> io::Result<u64> {
    let (soft, hard) = descriptor_limit()?;
    let target = wanted.min(hard);
    if soft >= target {
        return Ok(soft);
    }
    let limit = libc::rlimit { rlim_cur: target, rlim_max: hard };
    // SAFETY: the kernel reads one rlimit from a live variable.
    check(unsafe { libc::setrlimit(libc::RLIMIT_NOFILE, &raw const limit) })?;
    Ok(target)
}
