//! Receiving and sending.

use libc::{c_int, c_void, iovec, msghdr, size_t, sockaddr, socklen_t};
use quipu_abi_trace::entry;
use quipu_cabi::Errno;

use super::calls::tell_address;
use super::socket::{Socket, State};
use super::table::known;
use super::{Wide, system};

/// The pieces of memory of a call.
///
/// # Safety
///
/// `iov` has `count` elements.
unsafe fn pieces<'a>(iov: *const iovec, count: usize) -> Result<&'a [iovec], Errno> {
    if count > libc::UIO_MAXIOV as usize {
        return Err(Errno::EINVAL);
    }
    if count == 0 {
        return Ok(&[]);
    }
    if iov.is_null() {
        return Err(Errno::EFAULT);
    }
    // SAFETY: passed on from the caller.
    Ok(unsafe { std::slice::from_raw_parts(iov, count) })
}

fn total(pieces: &[iovec]) -> Result<usize, Errno> {
    let add = |sum: usize, piece: &iovec| sum.checked_add(piece.iov_len);
    let sum = pieces.iter().try_fold(0, add).filter(|sum| isize::try_from(*sum).is_ok());
    sum.ok_or(Errno::EINVAL)
}

/// Fills the pieces from `done` bytes on with what is there; how much.
///
/// # Safety
///
/// The pieces are memory of the program.
unsafe fn fill(
    state: &mut State,
    pieces: &[iovec],
    done: usize,
    peek: bool,
) -> Result<usize, Errno> {
    let connection = state.connected()?;
    let (mut skip, mut copied) = (done, 0);
    for piece in pieces {
        let before = skip.min(piece.iov_len);
        skip -= before;
        let room = piece.iov_len - before;
        let ahead = if peek { (done + copied) as u64 } else { 0 };
        // SAFETY: passed on from the caller.
        let got =
            unsafe { connection.copy_out(ahead, piece.iov_base.cast::<u8>().add(before), room) };
        if !peek {
            connection.take(got);
        }
        copied += got;
        if got < room {
            break;
        }
    }
    if copied > 0 && state.sleepers.any() && state.events() & libc::POLLHUP != 0 {
        // These were the last bytes before the end.
        state.ring();
    }
    Ok(copied)
}

/// # Safety
///
/// The pieces are memory of the program.
unsafe fn receive(socket: &Socket, pieces: &[iovec], flags: c_int) -> Result<isize, Errno> {
    // No byte is urgent, and no error is queued.
    if flags & (libc::MSG_OOB | libc::MSG_ERRQUEUE) != 0 {
        let urgent = flags & libc::MSG_OOB != 0;
        return Err(if urgent { Errno::EINVAL } else { Errno::EAGAIN });
    }
    let wanted = total(pieces)?;
    let (peek, all) = (flags & libc::MSG_PEEK != 0, flags & libc::MSG_WAITALL != 0);
    let least = if all { wanted } else { wanted.min(1) };
    let mut done = 0;
    if peek {
        // Who peeks for more than there is takes nothing, and would never come to look at what came.
        socket.lock().progress();
    }
    let result = socket.wait(!socket.is_nonblocking(flags), |state| {
        if peek {
            done = 0;
        }
        // SAFETY: passed on from the caller.
        match unsafe { fill(state, pieces, done, peek) } {
            Ok(more) => done += more,
            Err(Errno::EAGAIN) => return None,
            Err(errno) => return Some(Err(errno)),
        }
        if done >= least || state.shut_read {
            return Some(Ok(()));
        }
        let connection = state.connected().ok()?;
        match connection.broken() {
            _ if connection.has_end() => Some(Ok(())),
            Some(errno) => {
                // This tells of it.
                state.error = None;
                Some(Err(errno))
            }
            None => None,
        }
    });
    match result {
        Err(errno) if done == 0 => Err(errno),
        _ => Ok(done as isize),
    }
}

/// # Safety
///
/// The pieces are memory of the program.
unsafe fn send(socket: &Socket, pieces: &[iovec], flags: c_int) -> Result<isize, Errno> {
    if flags & libc::MSG_OOB != 0 {
        return Err(Errno::EOPNOTSUPP);
    }
    let wanted = total(pieces)?;
    let patient = !socket.is_nonblocking(flags);
    let mut done = 0;
    let result = socket.wait(patient, |state| {
        let connection = match state.connected() {
            Ok(connection) => connection,
            Err(Errno::EAGAIN) => return None,
            Err(errno) => return Some(Err(errno)),
        };
        if connection.ending || connection.broken().is_some() {
            return Some(Err(Errno(libc::EPIPE)));
        }
        let mut skip = done;
        for piece in pieces {
            let before = skip.min(piece.iov_len);
            skip -= before;
            let rest = piece.iov_len - before;
            // SAFETY: passed on from the caller.
            let sent = unsafe { connection.send(piece.iov_base.cast::<u8>().add(before), rest) };
            match sent {
                Ok(sent) => done += sent,
                Err(errno) => return Some(Err(errno)),
            }
            if sent != Ok(rest) {
                break;
            }
        }
        if done < wanted {
            return None;
        }
        // A program that only sends hears of the end of the connection all the same.
        state.progress();
        Some(Ok(()))
    });
    match result {
        Err(errno) if done == 0 => Err(errno),
        _ => Ok(done as isize),
    }
}

fn piece(buf: *const c_void, len: size_t) -> [iovec; 1] {
    [iovec { iov_base: buf.cast_mut(), iov_len: len }]
}

entry! {
    /// `rrecv`: as recv(2), with `MSG_PEEK`, `MSG_WAITALL` and `MSG_DONTWAIT`.
    fn rrecv(fd: c_int, buf: *mut c_void, len: size_t, flags: c_int) -> Wide {
        // SAFETY: the program passes memory of that length.
        unsafe {
            match known(fd)?.stream() {
                None => system(libc::recv(fd, buf, len, flags)),
                Some(socket) => receive(&socket, &piece(buf, len), flags),
            }
        }
    }

    /// `rrecvfrom`: as recvfrom(2).
    fn rrecvfrom(
        fd: c_int,
        buf: *mut c_void,
        len: size_t,
        flags: c_int,
        addr: *mut sockaddr,
        addr_len: *mut socklen_t,
    ) -> Wide {
        // SAFETY: the program passes memory of that length, and room for an address or null.
        unsafe {
            match known(fd)?.stream() {
                None => {
                    system(libc::recvfrom(fd, buf, len, flags, addr, addr_len))
                }
                Some(socket) => {
                    let got = receive(&socket, &piece(buf, len), flags)?;
                    let state = socket.lock();
                    tell_address(&(*state.id).route.addr.dst_storage, addr, addr_len)?;
                    Ok(got)
                }
            }
        }
    }

    /// `rrecvmsg`: as recvmsg(2); without control data.
    fn rrecvmsg(fd: c_int, msg: *mut msghdr, flags: c_int) -> Wide {
        // SAFETY: the program passes null or a valid message.
        unsafe {
            let msg = msg.as_mut().ok_or(Errno::EFAULT)?;
            match known(fd)?.stream() {
                None => system(libc::recvmsg(fd, msg, flags)),
                Some(socket) => {
                    (msg.msg_controllen, msg.msg_flags) = (0, 0);
                    let got = receive(&socket, pieces(msg.msg_iov, msg.msg_iovlen)?, flags)?;
                    let peer = &(*socket.lock().id).route.addr.dst_storage;
                    tell_address(peer, msg.msg_name.cast(), &mut msg.msg_namelen)?;
                    Ok(got)
                }
            }
        }
    }

    /// `rsend`: as send(2).
    fn rsend(fd: c_int, buf: *const c_void, len: size_t, flags: c_int) -> Wide {
        // SAFETY: the program passes memory of that length.
        unsafe {
            match known(fd)?.stream() {
                None => system(libc::send(fd, buf, len, flags)),
                Some(socket) => send(&socket, &piece(buf, len), flags),
            }
        }
    }

    /// `rsendto`: as sendto(2). A stream sends to its peer, so it takes no address.
    fn rsendto(
        fd: c_int,
        buf: *const c_void,
        len: size_t,
        flags: c_int,
        addr: *const sockaddr,
        addr_len: socklen_t,
    ) -> Wide {
        // SAFETY: the program passes memory of that length, and an address or null.
        unsafe {
            match known(fd)?.stream() {
                None => {
                    system(libc::sendto(fd, buf, len, flags, addr, addr_len))
                }
                Some(_) if !addr.is_null() || addr_len != 0 => Err(Errno::EISCONN),
                Some(socket) => send(&socket, &piece(buf, len), flags),
            }
        }
    }

    /// `rsendmsg`: as sendmsg(2); without control data.
    fn rsendmsg(fd: c_int, msg: *const msghdr, flags: c_int) -> Wide {
        // SAFETY: the program passes null or a valid message.
        unsafe {
            let msg = msg.as_ref().ok_or(Errno::EFAULT)?;
            match known(fd)?.stream() {
                None => system(libc::sendmsg(fd, msg, flags)),
                Some(_) if !msg.msg_control.is_null() && msg.msg_controllen > 0 => {
                    Err(Errno::EOPNOTSUPP)
                }
                Some(socket) => {
                    send(&socket, pieces(msg.msg_iov, msg.msg_iovlen)?, flags)
                }
            }
        }
    }

    /// `rread`: as read(2).
    fn rread(fd: c_int, buf: *mut c_void, len: size_t) -> Wide {
        // SAFETY: passed on from the program.
        system(unsafe { rrecv(fd, buf, len, 0) })
    }

    /// `rreadv`: as readv(2).
    fn rreadv(fd: c_int, iov: *const iovec, count: c_int) -> Wide {
        // SAFETY: the program passes so many pieces.
        unsafe {
            match known(fd)?.stream() {
                None => system(libc::readv(fd, iov, count)),
                Some(socket) => receive(&socket, pieces(iov, checked(count)?)?, 0),
            }
        }
    }

    /// `rwrite`: as write(2).
    fn rwrite(fd: c_int, buf: *const c_void, len: size_t) -> Wide {
        // SAFETY: passed on from the program.
        system(unsafe { rsend(fd, buf, len, 0) })
    }

    /// `rwritev`: as writev(2).
    fn rwritev(fd: c_int, iov: *const iovec, count: c_int) -> Wide {
        // SAFETY: the program passes so many pieces.
        unsafe {
            match known(fd)?.stream() {
                None => system(libc::writev(fd, iov, count)),
                Some(socket) => send(&socket, pieces(iov, checked(count)?)?, 0),
            }
        }
    }
}

fn checked(count: c_int) -> Result<usize, Errno> {
    usize::try_from(count).map_err(|_| Errno::EINVAL)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lengths_that_no_result_could_tell_are_refused() {
        let half = piece(std::ptr::null(), isize::MAX as usize / 2 + 1)[0];
        assert_eq!(total(&[half]), Ok(isize::MAX as usize / 2 + 1));
        assert_eq!(total(&[half, half]), Err(Errno::EINVAL));
        assert_eq!(total(&[half, half, half, half]), Err(Errno::EINVAL));
        assert_eq!(total(&[]), Ok(0));
        // SAFETY: the counts are refused before the pointer is looked at.
        unsafe {
            assert_eq!(pieces(std::ptr::null(), 2000).err(), Some(Errno::EINVAL));
            assert_eq!(pieces(std::ptr::null(), 1).err(), Some(Errno::EFAULT));
        }
    }

    #[test]
    fn a_descriptor_of_somebody_else_is_none() {
        // SAFETY: no descriptor is touched.
        unsafe {
            assert_eq!(rsend(0, std::ptr::null(), 0, 0), -1);
            assert_eq!(Errno::last(), Errno(libc::EBADF));
            assert_eq!(rrecv(-1, std::ptr::null_mut(), 0, 0), -1);
        }
    }
}
