//! Several messages of a socket for one system call (`sendmmsg(2)`, `recvmmsg(2)`), and several datagrams for
//! one message (UDP_SEGMENT and UDP_GRO, udp(7)).

use std::io;
use std::net::SocketAddr;
use std::os::fd::OwnedFd;

use libc::{c_int, c_void};

use crate::sys::{RawAddr, receive_message, receive_messages, send, send_messages};

/// Messages, and pieces of messages, of one call.
pub(super) const BATCH: usize = 32;
/// Room for a control message with a number.
const CONTROL: usize = 64;

/// A control message, aligned as its header must be.
#[derive(Clone, Copy)]
#[repr(C, align(8))]
struct Control([u8; CONTROL]);

/// What is to be sent.
#[derive(Clone, Copy, Debug)]
pub(super) struct Piece<'a> {
    /// Its octets.
    pub(super) bytes: &'a [u8],
    /// Where to, on sockets that are not told beforehand.
    pub(super) to: Option<SocketAddr>,
    /// It goes into one message with the piece before it, as a datagram of its own. All of them are as long
    /// as the first, or the last of them is shorter.
    pub(super) joins: bool,
}

/// What has arrived.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Message {
    /// How long it is.
    pub(super) len: usize,
    /// From whom, if the socket says so.
    pub(super) from: Option<SocketAddr>,
    /// It is several datagrams with so many octets each but the last.
    pub(super) datagrams: Option<usize>,
}

/// What a call needs in addition to the bytes. Its pointers are set anew for each call.
pub(super) struct Messages {
    headers: [libc::mmsghdr; BATCH],
    vectors: [libc::iovec; BATCH],
    names: [libc::sockaddr_storage; BATCH],
    controls: [Control; BATCH],
    /// Nobody says to whom messages go, asks from whom they are, nor what else there is to say of them.
    bare: bool,
}

// SAFETY: the pointers in it are followed during a call only, which sets all of them first, to memory that
// belongs to it or that the caller lends for the call.
unsafe impl Send for Messages {}

impl Messages {
    /// Messages of which only the octets are of interest.
    pub(super) fn bare() -> Box<Self> {
        let mut this = Self::new();
        this.bare = true;
        this
    }

    pub(super) fn new() -> Box<Self> {
        // SAFETY: all members are plain data, for which all zeroes is a valid value.
        unsafe { Box::<Self>::new_zeroed().assume_init() }
    }

    /// Sends the first [`BATCH`] pieces, without waiting; how many of them were sent.
    ///
    /// # Errors
    ///
    /// Why the first message was not; how many pieces it has is said too.
    pub(super) fn send<'a>(
        &mut self,
        fd: &OwnedFd,
        pieces: impl Iterator<Item = Piece<'a>>,
    ) -> Result<usize, (io::Error, usize)> {
        let count = self.aim(pieces);
        if self.bare && count == 1 {
            return self.send_one(fd);
        }
        // SAFETY: `count` headers point at live memory of the lengths that they name, of which the pieces
        // are borrowed until the end of this function.
        match unsafe { send_messages(fd, self.headers.as_mut_ptr(), count) } {
            Ok(sent) => Ok(self.headers[..sent].iter().map(pieces_of).sum()),
            Err(error) => Err((error, pieces_of(&self.headers[0]))),
        }
    }

    /// Sends the first message, whose octets are all there is to say: faster than a list of one.
    fn send_one(&self, fd: &OwnedFd) -> Result<usize, (io::Error, usize)> {
        let libc::iovec { iov_base, iov_len } = self.vectors[0];
        // SAFETY: `aim` has made this vector of the octets of a piece, which is borrowed by our caller.
        let bytes = unsafe { std::slice::from_raw_parts(iov_base.cast::<u8>(), iov_len) };
        match send(fd, bytes) {
            Ok(_) => Ok(1),
            Err(error) => Err((error, 1)),
        }
    }

    /// Receives one message of which only the octets are of interest: faster than a list of one.
    fn receive_one(&mut self, fd: &OwnedFd, slot: &mut [u8]) -> io::Result<usize> {
        // Of a message that is longer than the slot it says how long it is.
        let len = receive_message(fd, slot, libc::MSG_TRUNC)?;
        let header = &mut self.headers[0];
        header.msg_len = len as u32;
        header.msg_hdr.msg_flags = if len > slot.len() { libc::MSG_TRUNC } else { 0 };
        Ok(1)
    }

    /// Points the headers at messages made of the first pieces; how many messages.
    fn aim<'a>(&mut self, pieces: impl Iterator<Item = Piece<'a>>) -> usize {
        let mut count = 0;
        for (index, piece) in pieces.take(BATCH).enumerate() {
            let base = piece.bytes.as_ptr().cast_mut().cast::<c_void>();
            self.vectors[index] = libc::iovec { iov_base: base, iov_len: piece.bytes.len() };
            if piece.joins && count > 0 {
                self.join(count - 1);
                continue;
            }
            let header = &mut self.headers[count].msg_hdr;
            header.msg_iov = &raw mut self.vectors[index];
            header.msg_iovlen = 1;
            header.msg_control = std::ptr::null_mut();
            header.msg_controllen = 0;
            header.msg_name = std::ptr::null_mut();
            header.msg_namelen = 0;
            if let Some(to) = piece.to {
                let name = RawAddr::new(to);
                self.names[count] = *name.storage();
                header.msg_name = (&raw mut self.names[count]).cast();
                header.msg_namelen = name.len() as libc::socklen_t;
            }
            count += 1;
        }
        count
    }

    /// Adds the next vector to a message, which so becomes several datagrams.
    fn join(&mut self, index: usize) {
        let header = &mut self.headers[index].msg_hdr;
        header.msg_iovlen += 1;
        if !header.msg_control.is_null() {
            return;
        }
        // SAFETY: the message has at least the one vector that `aim` gave it, in this structure.
        let size = unsafe { (*header.msg_iov).iov_len } as u16;
        let control = &mut self.controls[index].0;
        header.msg_control = control.as_mut_ptr().cast();
        // SAFETY: computes from an integer.
        header.msg_controllen = unsafe { libc::CMSG_SPACE(size_of::<u16>() as u32) } as _;
        // SAFETY: the control buffer is live, aligned and large enough for a header and a number.
        unsafe {
            let message = libc::CMSG_FIRSTHDR(header);
            (*message).cmsg_level = libc::SOL_UDP;
            (*message).cmsg_type = libc::UDP_SEGMENT;
            (*message).cmsg_len = libc::CMSG_LEN(size_of::<u16>() as u32) as _;
            libc::CMSG_DATA(message).cast::<u16>().write_unaligned(size);
        }
    }

    /// Receives up to `limit` messages without waiting, each into a slot of `size` octets of `inbox`; how
    /// many.
    pub(super) fn receive(
        &mut self,
        fd: &OwnedFd,
        inbox: &mut [u8],
        size: usize,
        limit: usize,
    ) -> io::Result<usize> {
        if self.bare
            && limit == 1
            && let Some(slot) = inbox.get_mut(..size)
        {
            return self.receive_one(fd, slot);
        }
        let mut count = 0;
        for (index, slot) in inbox.chunks_exact_mut(size).take(limit.min(BATCH)).enumerate() {
            let base = slot.as_mut_ptr().cast::<c_void>();
            self.vectors[index] = libc::iovec { iov_base: base, iov_len: size };
            let header = &mut self.headers[index].msg_hdr;
            header.msg_iov = &raw mut self.vectors[index];
            header.msg_iovlen = 1;
            header.msg_flags = 0;
            if !self.bare {
                header.msg_name = (&raw mut self.names[index]).cast();
                header.msg_namelen = size_of::<libc::sockaddr_storage>() as libc::socklen_t;
                header.msg_control = (&raw mut self.controls[index]).cast();
                header.msg_controllen = CONTROL as _;
            }
            count += 1;
        }
        // SAFETY: `count` headers point at live memory of the lengths that they name, which nobody else uses
        // during the call.
        unsafe { receive_messages(fd, self.headers.as_mut_ptr(), count) }
    }

    /// A message of those received last; `None` if it was longer than its slot.
    pub(super) fn received(&self, index: usize) -> Option<Message> {
        let header = &self.headers[index];
        if header.msg_hdr.msg_flags & libc::MSG_TRUNC != 0 {
            return None;
        }
        // SAFETY: the kernel has filled in the name as its family has it, in a structure that is large enough
        // for every one and was all zeroes if it never has.
        let from = unsafe { RawAddr::decode((&raw const self.names[index]).cast()) };
        Some(Message { len: header.msg_len as usize, from, datagrams: datagrams(&header.msg_hdr) })
    }
}

fn pieces_of(header: &libc::mmsghdr) -> usize {
    header.msg_hdr.msg_iovlen
}

/// How long the datagrams of a message are, if it is several.
fn datagrams(header: &libc::msghdr) -> Option<usize> {
    // SAFETY: the header is one that the kernel has filled in, its control buffer is alive. Only messages
    // that callers switched on come, which are shorter than the buffer: there is at most one.
    let message = unsafe { libc::CMSG_FIRSTHDR(header).as_ref() }?;
    if (message.cmsg_level, message.cmsg_type) != (libc::SOL_UDP, libc::UDP_GRO) {
        return None;
    }
    // SAFETY: the data of this message are an integer (udp(7)).
    let size = unsafe { libc::CMSG_DATA(message).cast::<c_int>().read_unaligned() };
    usize::try_from(size).ok().filter(|size| *size > 0)
}
