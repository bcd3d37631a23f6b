//! One send of a buffer and of the payload that belongs between its bytes, from where the payload lies.

use std::io;
use std::os::fd::OwnedFd;

use libc::iovec;
use quipu_nic::Gather;

use super::buffers::{BUFFER_BYTES, Pool};
use crate::buffer::Buffer;
use crate::sys;

/// Ranges that one send takes; the adapter gathers fewer, unless work requests have many elements.
const MAX_RANGES: usize = 192;

/// How much payload one send of a stream takes from where it lies. To send a megabyte at once takes half as
/// long as to send it in eighths, since nobody touches the socket in between; but what a full socket leaves
/// has to be copied. So it begins with little, and takes more where the socket takes all of it.
#[derive(Clone, Copy, Debug)]
pub(super) struct Appetite(usize);

impl Appetite {
    const LEAST: usize = 256 * 1024;
    const MOST: usize = 1024 * 1024;

    pub(super) fn new() -> Self {
        Self(Self::LEAST)
    }

    /// Bytes.
    pub(super) fn bytes(self) -> usize {
        self.0
    }

    /// The socket took all, and there was more.
    pub(super) fn grow(&mut self) {
        self.0 = (2 * self.0).min(Self::MOST);
    }

    /// The socket did not take all.
    pub(super) fn spoil(&mut self) {
        self.0 = Self::LEAST;
    }
}

/// What one send is to pass on.
pub(super) struct Gathered<'a> {
    buffer: &'a [u8],
    gather: &'a Gather,
}

impl<'a> Gathered<'a> {
    /// The bytes of a buffer with the payload between them.
    ///
    /// # Safety
    ///
    /// The adapter has just gathered, and is not called while this lives, so that all of the payload is in
    /// memory that is registered.
    pub(super) unsafe fn new(buffer: &'a [u8], gather: &'a Gather) -> Self {
        Self { buffer, gather }
    }

    /// How many bytes that is.
    pub(super) fn len(&self) -> usize {
        self.buffer.len() + self.gather.bytes()
    }

    /// Address and length of one range after the other.
    fn ranges(&self) -> impl Iterator<Item = (*const u8, usize)> {
        let mut done = 0;
        let pieces = self.gather.pieces().iter().flat_map(move |piece| {
            let ahead = &self.buffer[done..piece.at];
            done = piece.at;
            let payload = std::ptr::with_exposed_provenance(piece.addr);
            [(ahead.as_ptr(), ahead.len()), (payload, piece.len)]
        });
        let last = self.gather.pieces().last().map_or(0, |piece| piece.at);
        let behind = &self.buffer[last..];
        let all = pieces.chain([(behind.as_ptr(), behind.len())]);
        all.filter(|&(_, len)| len > 0)
    }

    /// Sends what fits, without waiting.
    pub(super) fn send(&self, fd: &OwnedFd) -> io::Result<usize> {
        if self.gather.pieces().is_empty() {
            return sys::send(fd, self.buffer);
        }
        let mut list = [iovec { iov_base: std::ptr::null_mut(), iov_len: 0 }; MAX_RANGES];
        let mut count = 0;
        for (place, (at, len)) in list.iter_mut().zip(self.ranges()) {
            *place = iovec { iov_base: at.cast_mut().cast(), iov_len: len };
            count += 1;
        }
        // SAFETY: the ranges are of a live slice, or registered, by the promise made to `new`: so they may be
        // read, though others may write to them meanwhile. What is not mapped any more the kernel refuses.
        unsafe { sys::send_list(fd, &list[..count]) }
    }

    /// A copy of what comes behind the first `sent` bytes.
    pub(super) fn copy_behind(&self, sent: usize, pool: &mut Pool) -> Buffer {
        let rest = self.len() - sent;
        let pooled = (BUFFER_BYTES / 4..=BUFFER_BYTES).contains(&rest);
        let mut copy = if pooled { pool.take() } else { Buffer::new(rest) };
        let (mut skip, mut done) = (sent, 0);
        for (at, len) in self.ranges() {
            let over = skip.min(len);
            skip -= over;
            let place = &mut copy[done..done + (len - over)];
            // SAFETY: the range may be read, by the promise made to `new`, and `over` is not beyond it; no
            // reference to it is made. `place` is private, and as long as what is copied.
            unsafe { at.add(over).copy_to_nonoverlapping(place.as_mut_ptr(), place.len()) };
            done += len - over;
        }
        copy
    }
}

#[cfg(test)]
mod tests {
    use std::io::Read;
    use std::net::{TcpListener, TcpStream};

    use quipu_nic::Piece;

    use super::*;

    /// Payload of three places, two of them together, and what surrounds it.
    fn example(payload: &[u8]) -> (Vec<u8>, Gather, Vec<u8>) {
        let buffer: Vec<u8> = (100..120).collect();
        let addr = payload.as_ptr().expose_provenance();
        let pieces = [(3, 10, 50), (3, 100, 1), (20, 0, 20_000)];
        let mut gather = Gather::new(1);
        let (mut whole, mut done) = (Vec::new(), 0);
        for (at, offset, len) in pieces {
            gather.add(Piece { at, addr: addr + offset, len });
            whole.extend_from_slice(&buffer[done..at]);
            whole.extend_from_slice(&payload[offset..offset + len]);
            done = at;
        }
        whole.extend_from_slice(&buffer[done..]);
        (buffer, gather, whole)
    }

    #[test]
    fn sends_grow_while_sockets_take_them() {
        let mut appetite = Appetite::new();
        let sizes: Vec<_> = (0..4)
            .map(|_| {
                let before = appetite.bytes();
                appetite.grow();
                before >> 10
            })
            .collect();
        assert_eq!(sizes, [256, 512, 1024, 1024]);
        appetite.spoil();
        assert_eq!(appetite.bytes(), 256 << 10);
    }

    #[test]
    fn payload_goes_between_the_bytes_of_the_buffer() {
        let payload: Vec<u8> = (0..20_000u32).map(|i| (i * 7 + i / 251) as u8).collect();
        let (buffer, gather, whole) = example(&payload);
        // SAFETY: `payload` lives, and nobody writes to it.
        let gathered = unsafe { Gathered::new(&buffer, &gather) };
        assert_eq!(gathered.len(), whole.len());
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let sender = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let mut receiver = listener.accept().unwrap().0;
        assert_eq!(gathered.send(&sender.into()).unwrap(), whole.len());
        let mut got = Vec::new();
        receiver.read_to_end(&mut got).unwrap();
        assert!(got == whole);
    }

    #[test]
    fn what_is_not_sent_is_copied_from_any_byte_on() {
        let payload: Vec<u8> = (0..20_000u32).map(|i| (i * 7 + i / 251) as u8).collect();
        let (buffer, gather, whole) = example(&payload);
        // SAFETY: as above.
        let gathered = unsafe { Gathered::new(&buffer, &gather) };
        let mut pool = Pool::default();
        for sent in (0..100).chain([1000, whole.len() - 1]) {
            let rest = gathered.copy_behind(sent, &mut pool);
            assert!(rest[..whole.len() - sent] == whole[sent..], "{sent}");
        }
    }
}
