//! Buffers for what passes through sockets.
//!
//! All streams share a few large buffers. A stream keeps one only while it holds part of an FPDU,
//! and only while few others do; otherwise the part is moved to a block of its own size. So an
//! idle stream holds none, and peers that stop in the middle of an FPDU cannot make thousands of
//! streams hold large buffers.

use std::ops::Range;

use crate::buffer::Buffer;

/// Size of a shared buffer.
pub(crate) const BUFFER_BYTES: usize = 256 * 1024;
/// Bytes that the adapter is asked for at once: large enough to spread the cost of a system call, and of
/// what both ends do to a socket between two of them; small enough to stay in the cache until the kernel has
/// copied them. And just what four of the kernel's packets take, which are at most 64 KB with their headers,
/// over Ethernet (45 segments of 1448 bytes) and over loopback (one segment of [`LOOPBACK_MSS`]). What is
/// more goes out as a fifth, of a few bytes, that costs as much as the others, for every buffer: nothing
/// waits for more on a socket with `TCP_NODELAY`.
pub(crate) const TRANSMIT_BYTES: usize = 4 * 45 * ETHERNET_MSS;
/// What is received behind payload that is received into its place: the end of an FPDU, the header of the
/// next one, and little of its payload, or a few short messages.
pub(crate) const BEHIND_BYTES: usize = 1024;
/// Payload of a TCP segment at an MTU of 1500 over IPv4, with timestamps.
const ETHERNET_MSS: usize = 1448;
/// Payload of a TCP segment over the loopback interface, at its MTU of 65536.
const LOOPBACK_MSS: usize = 65_483;
const _: () = assert!(TRANSMIT_BYTES <= 4 * LOOPBACK_MSS, "it is four packets there too");
/// Room for the longest FPDU (64 KiB and a little) and what may come right behind it.
const ROOM_BYTES: usize = 128 * 1024;
/// How many large buffers streams may hold at once.
const HELD_MAX: usize = 16;
/// How many free ones are kept.
const SPARE_MAX: usize = 4;

/// The shared buffers that nobody uses now.
#[derive(Default)]
pub(crate) struct Pool {
    spare: Vec<Buffer>,
    held: usize,
}

impl Pool {
    /// A buffer of [`BUFFER_BYTES`], the one used last if there is one: its lines are still cached.
    #[inline]
    pub(crate) fn take(&mut self) -> Buffer {
        self.spare.pop().unwrap_or_else(|| Buffer::new(BUFFER_BYTES))
    }

    /// The buffer that would be taken next, which stays here.
    #[inline]
    pub(crate) fn front(&mut self) -> &mut [u8] {
        if self.spare.is_empty() {
            self.spare.push(Buffer::new(BUFFER_BYTES));
        }
        let last = self.spare.len() - 1;
        &mut self.spare[last]
    }

    /// Gives a buffer back.
    #[inline]
    pub(crate) fn give_back(&mut self, buffer: Buffer) {
        if buffer.len() == BUFFER_BYTES && self.spare.len() < SPARE_MAX {
            self.spare.push(buffer);
        }
    }
}

/// Bytes that a stream has received and the adapter has not consumed.
#[derive(Default)]
pub(crate) enum Received {
    /// None.
    #[default]
    Nothing,
    /// In a large buffer, where the bytes that follow can be received behind them.
    Buffer(Buffer, Range<usize>),
    /// In a block of their own size.
    Block(Box<[u8]>),
}

impl Received {
    /// Takes the bytes out into a large buffer with room behind them for the rest of the FPDU that
    /// they begin, and more.
    pub(crate) fn open(&mut self, pool: &mut Pool) -> (Buffer, Range<usize>) {
        match std::mem::take(self) {
            Self::Nothing => (pool.take(), 0..0),
            Self::Block(block) => {
                let mut buffer = pool.take();
                buffer[..block.len()].copy_from_slice(&block);
                (buffer, 0..block.len())
            }
            Self::Buffer(mut buffer, range) => {
                pool.held -= 1;
                if buffer.len() - range.start < ROOM_BYTES {
                    buffer.copy_within(range.clone(), 0);
                    (buffer, 0..range.len())
                } else {
                    (buffer, range)
                }
            }
        }
    }

    /// Puts back what was not consumed.
    #[inline]
    pub(crate) fn close(&mut self, pool: &mut Pool, buffer: Buffer, rest: Range<usize>) {
        if rest.is_empty() {
            pool.give_back(buffer);
        } else if pool.held < HELD_MAX {
            pool.held += 1;
            *self = Self::Buffer(buffer, rest);
        } else {
            *self = Self::Block(buffer[rest].into());
            pool.give_back(buffer);
        }
    }

    /// Forgets the bytes.
    pub(crate) fn discard(&mut self, pool: &mut Pool) {
        if let Self::Buffer(buffer, _) = std::mem::take(self) {
            pool.held -= 1;
            pool.give_back(buffer);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn partial_data_stays_in_order_and_large_buffers_are_bounded() {
        let mut pool = Pool::default();
        let mut many: Vec<_> = (0..HELD_MAX + 2).map(|_| Received::default()).collect();
        for (i, received) in many.iter_mut().enumerate() {
            let (mut buffer, range) = received.open(&mut pool);
            assert_eq!(range, 0..0);
            buffer[..3].fill(i as u8);
            received.close(&mut pool, buffer, 1..3);
        }
        assert_eq!(pool.held, HELD_MAX);
        assert!(matches!(many[HELD_MAX], Received::Block(ref block) if block.len() == 2));
        for (i, received) in many.iter_mut().enumerate() {
            let (buffer, range) = received.open(&mut pool);
            assert_eq!(buffer[range], [i as u8; 2]);
            received.close(&mut pool, buffer, 0..0);
        }
        assert_eq!((pool.held, pool.spare.len()), (0, SPARE_MAX));
    }

    #[test]
    fn what_is_written_to_the_front_is_in_the_buffer_that_is_taken_next() {
        let mut pool = Pool::default();
        for mark in [7, 8] {
            pool.front()[..3].fill(mark);
            assert_eq!((pool.spare.len(), pool.front().len()), (1, BUFFER_BYTES));
            let buffer = pool.take();
            assert_eq!((buffer[..3].to_vec(), pool.spare.len()), (vec![mark; 3], 0));
            pool.give_back(buffer);
        }
    }
}
