//! Posting.

use libc::{c_void, sockaddr, socklen_t};
use quipu_cabi::{Errno, IntMinusOne, entry};
use quipu_host::nic::{MAX_MESSAGE, Payload, SendFlags, SendOp, SendWr, Sge, To};
use quipu_mem::Key;

use crate::address::read;
use crate::error::{Outcome, fail, refused};
use crate::qp::{INLINE, Private, qp, qpip_qp};

/// Most pieces of memory of a request.
const PIECES: usize = 64;
/// `enum qpip_send_flags`
const SILENT: u32 = 1;
const COPIED: u32 = 2;

/// `struct qpip_segment`
#[repr(C)]
#[derive(Clone, Copy)]
pub struct qpip_segment {
    pub(crate) start: *mut c_void,
    pub(crate) length: u32,
    pub(crate) key: u32,
}

/// `struct qpip_send`
#[repr(C)]
#[derive(Clone, Copy)]
pub struct qpip_send {
    pub(crate) id: u64,
    pub(crate) segments: *const qpip_segment,
    pub(crate) count: u32,
    pub(crate) flags: u32,
    pub(crate) to: *const sockaddr,
    pub(crate) to_length: socklen_t,
}

/// `struct qpip_receive`
#[repr(C)]
#[derive(Clone, Copy)]
pub struct qpip_receive {
    pub(crate) id: u64,
    pub(crate) segments: *const qpip_segment,
    pub(crate) count: u32,
    pub(crate) reserved: u32,
}

/// Pieces of memory, as the engine has them.
struct Pieces {
    list: [Sge; PIECES],
    count: usize,
}

impl Pieces {
    /// # Safety
    ///
    /// `segments` is null, or `count` segments.
    unsafe fn read(qp: &Private, segments: *const qpip_segment, count: u32) -> Outcome<Self> {
        if count > qp.max_segments {
            let words = format_args!(
                "{count} segments, but requests of this queue pair have at most {} (max_segments \
                 of qpip_create)",
                qp.max_segments
            );
            return Err(fail(Errno::EINVAL, words));
        }
        let count = count as usize;
        if count > PIECES || (count > 0 && segments.is_null()) {
            let words = format_args!(
                "{count} segments are to be posted, but the pointer to them \
                is NULL"
            );
            return Err(fail(Errno::EINVAL, words));
        }
        let mut list = [Sge { addr: 0, len: 0, lkey: Key(0) }; PIECES];
        for (place, sge) in list[..count].iter_mut().enumerate() {
            // SAFETY: the caller promises `count` of them; programs pass bytes of any alignment.
            let piece = unsafe { segments.wrapping_add(place).read_unaligned() };
            *sge = Sge { addr: piece.start as u64, len: piece.length, lkey: Key(piece.key) };
        }
        Ok(Self { list, count })
    }

    /// Whether a request may be as long.
    fn check_length(&self) -> Outcome {
        let len: u64 = self.as_slice().iter().map(|sge| u64::from(sge.len)).sum();
        if len <= u64::from(MAX_MESSAGE) {
            return Ok(());
        }
        let words =
            format_args!("{len} bytes are more than a send can have; the limit is {MAX_MESSAGE}");
        Err(fail(Errno::EINVAL, words))
    }

    fn as_slice(&self) -> &[Sge] {
        &self.list[..self.count]
    }

    /// Copies what they name.
    ///
    /// # Safety
    ///
    /// They name memory that can be read.
    unsafe fn copy(&self, buffer: &mut [u8; INLINE as usize]) -> Outcome<usize> {
        let mut used = 0;
        for piece in self.as_slice() {
            let len = piece.len as usize;
            let Some(place) = buffer.get_mut(used..).and_then(|rest| rest.get_mut(..len)) else {
                let words =
                    format_args!("at most {INLINE} bytes can be copied; register the memory");
                return Err(fail(Errno::EINVAL, words));
            };
            if len > 0 {
                let from = piece.addr as usize as *const u8;
                if from.is_null() {
                    return Err(fail(Errno::EFAULT, "a segment to be copied is NULL"));
                }
                // SAFETY: the caller promises that it can be read; the place is this function's.
                unsafe { std::ptr::copy_nonoverlapping(from, place.as_mut_ptr(), len) };
            }
            used += len;
        }
        Ok(used)
    }
}

/// Whom a send addresses.
///
/// # Safety
///
/// As [`read`].
unsafe fn to(qp: &Private, send: &qpip_send) -> Outcome<To> {
    match (qp.datagrams, send.to.is_null()) {
        (false, true) => Ok(To::Peer),
        // SAFETY: passed on from the caller.
        (true, false) => Ok(To::Address(unsafe { read(send.to, send.to_length) }?)),
        (false, false) => {
            Err(fail(Errno::EISCONN, "a TCP queue pair sends to its peer; leave the address NULL"))
        }
        (true, true) => {
            Err(fail(Errno(libc::EDESTADDRREQ), "a UDP queue pair needs an address to send to"))
        }
    }
}

entry! {
    /// `qpip_post_send`
    fn qpip_post_send(raw: *mut qpip_qp, send: *const qpip_send) -> IntMinusOne {
        // SAFETY: the program passes what qpip_create gave, and null or a valid pointer.
        let (qp, send) = unsafe { (qp(raw)?, send.as_ref()) };
        let Some(send) = send else {
            return Err(fail(Errno::EINVAL, "the pointer to the request is NULL"));
        };
        if send.flags & !(SILENT | COPIED) != 0 {
            return Err(fail(Errno::EINVAL, format_args!("unknown flags {:#x}", send.flags)));
        }
        // SAFETY: the program passes as many segments as it says, and an address of the length it says.
        let (pieces, to) = unsafe { (Pieces::read(qp, send.segments, send.count)?, to(qp, send)?) };
        pieces.check_length()?;
        let mut buffer = [0; INLINE as usize];
        let copied = send.flags & COPIED != 0;
        let payload = if copied {
            // SAFETY: the program asks for a copy of what its segments name.
            let used = unsafe { pieces.copy(&mut buffer) }?;
            Payload::Inline(&buffer[..used])
        } else {
            Payload::Sges(pieces.as_slice())
        };
        let mut flags = SendFlags::SIGNALED;
        flags.set(SendFlags::SIGNALED, send.flags & SILENT == 0);
        flags.set(SendFlags::INLINE, copied);
        let wr = SendWr { wr_id: send.id, to, op: SendOp::Send, flags, payload };
        qp.adapter.engine.post_send(qp.id, &wr).map_err(refused("the send cannot be posted"))?;
        Ok(0)
    }

    /// `qpip_post_receive`
    fn qpip_post_receive(raw: *mut qpip_qp, receive: *const qpip_receive) -> IntMinusOne {
        // SAFETY: as above.
        let (qp, receive) = unsafe { (qp(raw)?, receive.as_ref()) };
        let Some(receive) = receive else {
            return Err(fail(Errno::EINVAL, "the pointer to the request is NULL"));
        };
        // SAFETY: the program passes as many segments as it says.
        let pieces = unsafe { Pieces::read(qp, receive.segments, receive.count) }?;
        let posted = qp.adapter.engine.post_recv(qp.id, receive.id, pieces.as_slice());
        posted.map_err(refused("the receive cannot be posted"))?;
        Ok(0)
    }
}
