//! The functions of the interface, and the option that begins it.

use std::sync::Arc;
use std::time::Duration;

use libc::{c_int, c_void, iovec, socklen_t};
use quipu_cabi::{Errno, IntMinusOne, entry};
use quipu_iwsock::{Access, Completion, Config, Operation, Role, Span, Status};

use crate::socket::{Gather, Socket};
use crate::{counters, sys, table, thread};

/// For start-up, if the program does not say.
const START_MS: u64 = 10_000;

/// `struct iwarp_mode`
#[derive(Clone, Copy, Default)]
#[repr(C)]
struct Mode {
    gather: c_int,
    progress: c_int,
    no_crc: c_int,
    role: c_int,
    timeout_ms: c_int,
}

/// `struct iwarp_completion`
#[derive(Clone, Copy)]
#[repr(C)]
pub struct Done {
    id: u64,
    length: u32,
    operation: u16,
    status: u16,
}

const _: () = assert!(size_of::<Done>() == 16 && size_of::<Mode>() == 20);

/// Switches a connected socket to iWARP: what `setsockopt(IWARP_MODE)` does.
///
/// # Errors
/// EINVAL: no such mode, or no TCP socket. ENOTCONN. EISCONN: it is in the mode. EPROTO: the peer does not
/// speak iWARP. ETIMEDOUT. After the last two, the connection is of no use.
pub(crate) fn set_mode(fd: c_int, value: *const c_void, len: socklen_t) -> Result<c_int, Errno> {
    let mode = match len as usize {
        _ if value.is_null() => return Err(Errno::EFAULT),
        4 => {
            // SAFETY: the program passes a number of this length.
            let on = unsafe { value.cast::<c_int>().read_unaligned() };
            if on != 1 {
                return Err(Errno::EINVAL);
            }
            Mode::default()
        }
        // SAFETY: the program passes a structure of this length, of plain numbers.
        20 => unsafe { value.cast::<Mode>().read_unaligned() },
        _ => return Err(Errno::EINVAL),
    };
    let gather = match mode.gather {
        0 => Gather::Copy,
        1 => Gather::Writev,
        2 => Gather::Cork,
        _ => return Err(Errno::EINVAL),
    };
    let role = match mode.role {
        0 if table::has_connected(fd) => Role::Initiator,
        1 => Role::Initiator,
        0 | 2 => Role::Responder,
        _ => return Err(Errno::EINVAL),
    };
    if table::get(fd).is_some() {
        return Err(Errno::EISCONN);
    }
    check(fd)?;
    sys::set_option(fd, libc::IPPROTO_TCP, libc::TCP_NODELAY, 1);
    let (crc, names_payload) = (mode.no_crc == 0, gather != Gather::Copy);
    let config = Config { role, crc, names_payload, first_stag: sys::random() };
    let timeout = match mode.timeout_ms {
        0 => Duration::from_millis(START_MS),
        ms => Duration::from_millis(u64::try_from(ms).map_err(|_| Errno::EINVAL)?),
    };
    // Start-up is by this thread in either way.
    let socket = match mode.progress {
        0 => by_caller(fd, config, gather, timeout)?,
        1 => by_thread(fd, config, gather, timeout)?,
        _ => return Err(Errno::EINVAL),
    };
    if table::put(fd, socket) {
        counters::note_switched();
    }
    Ok(0)
}

/// Whether a descriptor is a connected TCP socket that can be in the mode.
fn check(fd: c_int) -> Result<(), Errno> {
    match sys::option(fd, libc::SOL_SOCKET, libc::SO_PROTOCOL) {
        Some(libc::IPPROTO_TCP) if table::has_room_for(fd) => {}
        Some(_) => return Err(Errno::EINVAL),
        None => return Err(Errno::last()),
    }
    // SAFETY: all zeroes is an address without a family.
    let mut address: libc::sockaddr_storage = unsafe { std::mem::zeroed() };
    let mut len = size_of::<libc::sockaddr_storage>() as socklen_t;
    let (address, len) = (&raw mut address, &raw mut len);
    // SAFETY: places for an address and its length.
    match unsafe { libc::syscall(libc::SYS_getpeername, fd, address, len) } {
        0 => Ok(()),
        _ => Err(Errno::last()),
    }
}

fn by_caller(
    fd: c_int,
    config: Config,
    gather: Gather,
    timeout: Duration,
) -> Result<Arc<Socket>, Errno> {
    let socket = Socket::new(fd, config, gather, None);
    socket.start(timeout)?;
    Ok(Arc::new(socket))
}

/// The TCP connection gets another descriptor; the program's becomes one end of a pair, which is readable
/// while there is something to report.
fn by_thread(
    fd: c_int,
    config: Config,
    gather: Gather,
    timeout: Duration,
) -> Result<Arc<Socket>, Errno> {
    let mut pair = [0; 2];
    let kind = libc::SOCK_STREAM | libc::SOCK_CLOEXEC | libc::SOCK_NONBLOCK;
    // SAFETY: room for two descriptors; the rest are numbers.
    let (tcp, made) = unsafe {
        let made = libc::socketpair(libc::AF_UNIX, kind, 0, pair.as_mut_ptr());
        (libc::fcntl(fd, libc::F_DUPFD_CLOEXEC, 3), made)
    };
    // SAFETY: a descriptor of this function's, or -1.
    let close = |fd: c_int| unsafe { libc::syscall(libc::SYS_close, fd) };
    if tcp < 0 || made != 0 {
        let errno = Errno::last();
        close(tcp);
        if made == 0 {
            pair.iter().for_each(|fd| {
                close(*fd);
            });
        }
        return Err(errno);
    }
    let socket = Arc::new(Socket::new(tcp, config, gather, Some(pair[1])));
    let started = thread::add(Arc::clone(&socket)).and_then(|()| socket.start(timeout));
    if let Err(errno) = started {
        thread::remove(tcp);
        close(pair[0]);
        socket.close();
        return Err(errno);
    }
    // SAFETY: takes two numbers. What fcntl(2) says of the program's descriptor stays.
    unsafe {
        let flags = libc::fcntl(fd, libc::F_GETFD);
        let status = libc::fcntl(fd, libc::F_GETFL);
        let cloexec = if flags & libc::FD_CLOEXEC != 0 { libc::O_CLOEXEC } else { 0 };
        libc::syscall(libc::SYS_dup3, pair[0], fd, cloexec);
        libc::fcntl(fd, libc::F_SETFL, status & libc::O_NONBLOCK);
    }
    close(pair[0]);
    Ok(socket)
}

/// The spans of a list of parts.
///
/// # Safety
///
/// `parts` has `count` entries.
unsafe fn spans(parts: *const iovec, count: c_int) -> Result<Vec<Span>, Errno> {
    let count = usize::try_from(count).map_err(|_| Errno::EINVAL)?;
    if count > quipu_iwsock::MAX_SPANS {
        return Err(Errno(libc::EMSGSIZE));
    }
    if parts.is_null() && count > 0 {
        return Err(Errno::EFAULT);
    }
    // SAFETY: passed on from the caller.
    let part = |at| unsafe { parts.add(at).read_unaligned() };
    Ok((0..count).map(part).map(|part| span(part.iov_base, part.iov_len)).collect())
}

fn span(address: *mut c_void, len: usize) -> Span {
    Span { address: address.expose_provenance() as u64, len }
}

fn socket(fd: c_int) -> Result<Arc<Socket>, Errno> {
    table::get(fd).ok_or(Errno::ENOTCONN)
}

/// Takes completions and writes them to the program's array.
fn take(fd: c_int, done: *mut Done, count: c_int, time: c_int, recv: bool) -> Result<c_int, Errno> {
    let room = usize::try_from(count).map_err(|_| Errno::EINVAL)?;
    if done.is_null() && room > 0 {
        return Err(Errno::EFAULT);
    }
    let taken = socket(fd)?.take(fd, recv, room, time)?;
    for (at, completion) in taken.iter().enumerate() {
        // SAFETY: the program's array has room for `count`, of which no more are taken.
        unsafe { done.add(at).write_unaligned(of(*completion)) };
    }
    Ok(taken.len() as c_int)
}

fn of(completion: Completion) -> Done {
    let operation = match completion.operation {
        Operation::Send => 0,
        Operation::Write { .. } => 1,
        Operation::Read { .. } => 2,
        Operation::Receive => 3,
    };
    let status = match completion.status {
        Status::Success => 0,
        Status::Flushed => 1,
        Status::RemoteAccess => 2,
        Status::RemoteInvalid => 3,
        Status::RemoteOperation => 4,
    };
    Done { id: completion.id, length: completion.len as u32, operation, status }
}

entry! {
    /// `iwarp_register`
    #[unsafe(no_mangle)]
    fn iwarp_register(fd: c_int, address: *mut c_void, length: usize, access: c_int, stag: *mut u32)
        -> IntMinusOne
    {
        let socket = socket(fd)?;
        // SAFETY: the program passes a place for a number, or null.
        let stag = unsafe { stag.as_mut() }.ok_or(Errno::EFAULT)?;
        if access & !3 != 0 {
            return Err(Errno::EINVAL);
        }
        let access = Access { read: access & 1 != 0, write: access & 2 != 0 };
        let place = span(address, length);
        *stag = socket.with(|end| end.register(place, access)).ok_or(Errno::ENOMEM)?;
        Ok(0)
    }

    /// `iwarp_deregister`
    #[unsafe(no_mangle)]
    fn iwarp_deregister(fd: c_int, stag: u32) -> IntMinusOne {
        let found = socket(fd)?.with(|end| end.deregister(stag));
        if found { Ok(0) } else { Err(Errno::EINVAL) }
    }

    /// `iwarp_post_send`
    #[unsafe(no_mangle)]
    fn iwarp_post_send(fd: c_int, parts: *const iovec, count: c_int, id: u64) -> IntMinusOne {
        // SAFETY: the program passes `count` parts.
        let spans = unsafe { spans(parts, count) }?;
        socket(fd)?.post(id, Operation::Send, &spans).map(|()| 0)
    }

    /// `iwarp_post_recv`
    #[unsafe(no_mangle)]
    fn iwarp_post_recv(fd: c_int, parts: *const iovec, count: c_int, id: u64) -> IntMinusOne {
        // SAFETY: the program passes `count` parts.
        let spans = unsafe { spans(parts, count) }?;
        socket(fd)?.post_receive(id, &spans).map(|()| 0)
    }

    /// `iwarp_post_write`
    #[unsafe(no_mangle)]
    fn iwarp_post_write(fd: c_int, parts: *const iovec, count: c_int, stag: u32, to: u64, id: u64)
        -> IntMinusOne
    {
        // SAFETY: the program passes `count` parts.
        let spans = unsafe { spans(parts, count) }?;
        socket(fd)?.post(id, Operation::Write { stag, to }, &spans).map(|()| 0)
    }

    /// `iwarp_post_read`
    #[unsafe(no_mangle)]
    fn iwarp_post_read(fd: c_int, address: *mut c_void, length: usize, stag: u32, to: u64, id: u64)
        -> IntMinusOne
    {
        let place = [span(address, length)];
        socket(fd)?.post(id, Operation::Read { stag, to }, &place).map(|()| 0)
    }

    /// `iwarp_send_done`
    #[unsafe(no_mangle)]
    fn iwarp_send_done(fd: c_int, done: *mut Done, count: c_int, timeout_ms: c_int) -> IntMinusOne {
        take(fd, done, count, timeout_ms, false)
    }

    /// `iwarp_recv_done`
    #[unsafe(no_mangle)]
    fn iwarp_recv_done(fd: c_int, done: *mut Done, count: c_int, timeout_ms: c_int) -> IntMinusOne {
        take(fd, done, count, timeout_ms, true)
    }
}
