//! Memory of the program that the peer writes to directly.

use libc::{c_int, c_void, off_t, size_t};
use quipu_abi_trace::entry;
use quipu_cabi::Errno;

use super::Wide;
use super::socket::Socket;
use super::table::stream;
use super::wire::Mapping;
use crate::verbs::verbs;

/// Writes an entry of the peer's table.
fn publish(socket: &Socket, index: usize, mapping: &Mapping) -> Result<(), Errno> {
    socket.wait(true, |state| {
        let connection = match state.connected() {
            Ok(connection) => connection,
            Err(errno) => return Some(Err(errno)),
        };
        match connection.write_mapping(index, mapping) {
            Ok(true) => Some(Ok(())),
            Ok(false) => connection.broken().map(Err),
            Err(errno) => Some(Err(errno)),
        }
    })
}

/// Deregisters what is mapped at a place of the peer's table.
fn forget(socket: &Socket, index: usize) -> Result<(), Errno> {
    let taken = socket.lock().connected()?.mapped[index].take();
    if let Some((mr, _)) = taken {
        // SAFETY: it came from `register`, and was taken from the list by this thread alone.
        unsafe { (verbs()?.dereg_mr)(mr) };
    }
    Ok(())
}

/// Waits until what was written has arrived.
fn flush(socket: &Socket) -> Result<(), Errno> {
    socket.wait(true, |state| match state.connected() {
        Ok(connection) => connection.is_flushed().then_some(Ok(())),
        Err(errno) => Some(Err(errno)),
    })
}

entry! {
    /// `riomap`: registers memory for `riowrite` of the peer at `offset`; -1: at its own address; without
    /// `PROT_WRITE`, for this end alone. The offset.
    fn riomap(
        fd: c_int,
        buf: *mut c_void,
        len: size_t,
        prot: c_int,
        flags: c_int,
        offset: off_t,
    ) -> Wide {
        let socket = stream(fd)?;
        let rights = libc::PROT_WRITE | libc::PROT_NONE;
        if buf.is_null() || len == 0 || flags != 0 || prot & !rights != 0 {
            return Err(Errno::EINVAL);
        }
        let offset = if offset == -1 { buf as u64 } else { offset as u64 };
        let (index, mapping) = {
            let mut state = socket.lock();
            let connection = state.connected()?;
            if prot & libc::PROT_WRITE == 0 {
                // SAFETY: as below.
                let mr = unsafe { connection.register(buf.cast(), len, false) }?;
                connection.private.push((mr, (buf as u64, len as u64)));
                return Ok(offset as isize);
            }
            let free = connection.mapped.iter().position(Option::is_none).ok_or(Errno::ENOMEM)?;
            // SAFETY: the program maps memory that is its own until it unmaps it.
            let mr = unsafe { connection.register(buf.cast(), len, true) }?;
            // SAFETY: the region was just made.
            let rkey = unsafe { (*mr).rkey };
            let mapping = Mapping { offset, addr: buf as u64, length: len as u64, rkey };
            connection.mapped[free] = Some((mr, mapping));
            (free, mapping)
        };
        publish(&socket, index, &mapping).inspect_err(|_| {
            let _ = forget(&socket, index);
        })?;
        Ok(offset as isize)
    }

    /// `riounmap`: the inverse of `riomap`.
    fn riounmap(fd: c_int, buf: *mut c_void, len: size_t) -> Wide {
        let socket = stream(fd)?;
        let range = (buf as u64, len as u64);
        let index = {
            let mut state = socket.lock();
            let connection = state.connected()?;
            if let Some(at) = connection.private.iter().position(|(_, other)| *other == range) {
                let (mr, _) = connection.private.swap_remove(at);
                // SAFETY: it came from `register`, and is in the list no more.
                unsafe { (verbs()?.dereg_mr)(mr) };
                return Ok(0);
            }
            let is = |mapping: &Mapping| (mapping.addr, mapping.length) == range;
            let mapped = &connection.mapped;
            let found = mapped.iter().position(|m| m.as_ref().is_some_and(|(_, m)| is(m)));
            found.ok_or(Errno::EINVAL)?
        };
        // The peer learns it before its writes are refused; if it is gone, nobody needs to.
        match publish(&socket, index, &Mapping::default()) {
            Err(Errno::EINTR) => return Err(Errno::EINTR),
            // It cannot be taken back.
            Ok(()) => while flush(&socket) == Err(Errno::EINTR) {},
            Err(_) => {}
        }
        forget(&socket, index)?;
        Ok(0)
    }

    /// `riowrite`: writes to memory that the peer has mapped. How much.
    fn riowrite(
        fd: c_int,
        buf: *const c_void,
        len: size_t,
        offset: off_t,
        flags: c_int,
    ) -> Wide {
        let socket = stream(fd)?;
        let patient = !socket.is_nonblocking(flags);
        let mut done = 0;
        let result = socket.wait(patient, |state| {
            let connection = match state.connected() {
                Ok(connection) => connection,
                Err(errno) => return Some(Err(errno)),
            };
            if connection.ending || connection.broken().is_some() {
                return Some(Err(Errno(libc::EPIPE)));
            }
            while done < len {
                let at = (offset as u64).wrapping_add(done as u64);
                let from = buf.cast::<u8>().wrapping_add(done);
                // SAFETY: the program passes memory of that length.
                match unsafe { connection.write_mapped(from, len - done, at) } {
                    Ok(0) => return None,
                    Ok(more) => done += more,
                    Err(errno) => return Some(Err(errno)),
                }
            }
            // A program that does nothing else hears of the end of the connection all the same.
            state.progress();
            Some(Ok(()))
        });
        match result {
            Err(errno) if done == 0 => Err(errno),
            _ => Ok(done as isize),
        }
    }
}
