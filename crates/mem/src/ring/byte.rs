//! Circular byte buffers for payloads too large for a slot.
//!
//! Positions count bytes since the beginning and never wrap in practice (64 bits); the place in the
//! buffer is the position modulo its size. A message's bytes start at a position that its slot names
//! and may wrap around the end of the buffer: a range has two pieces, of which the second may be
//! empty.

use core::sync::atomic::{AtomicU64, Ordering};

use super::RingError;
use crate::segment::{Segment, SegmentError, Shared};
use crate::span::Span;

/// The memory of a byte ring.
#[derive(Clone, Debug)]
pub(crate) struct ByteBuffer {
    segment: Segment,
    mask: u64,
}

impl ByteBuffer {
    pub(crate) fn new(segment: Segment) -> ByteBuffer {
        assert!(segment.len().is_power_of_two(), "a byte ring's size is a power of two");
        let mask = segment.len() as u64 - 1;
        ByteBuffer { segment, mask }
    }

    fn capacity(&self) -> u64 {
        self.mask + 1
    }

    /// The two pieces of a range of at most the capacity, at any position.
    #[inline]
    fn pieces(&self, position: u64, len: usize) -> Result<(Span<'_>, Span<'_>), SegmentError> {
        let start = (position & self.mask) as usize;
        let first = len.min(self.segment.len() - start);
        Ok((self.segment.span(start, first)?, self.segment.span(0, len - first)?))
    }
}

/// The filling end of a byte ring.
#[derive(Debug)]
pub struct ByteProducer {
    buffer: ByteBuffer,
    tail: u64,
    consumed: u64,
    consumed_word: Shared<AtomicU64>,
}

impl ByteProducer {
    pub(crate) fn new(buffer: ByteBuffer, consumed: Shared<AtomicU64>) -> ByteProducer {
        ByteProducer { buffer, tail: 0, consumed: 0, consumed_word: consumed }
    }

    /// The bytes of the ring.
    pub fn capacity(&self) -> u64 {
        self.buffer.capacity()
    }

    /// The position of the next reservation.
    pub fn position(&self) -> u64 {
        self.tail
    }

    /// Bytes that are free; looks at the consumer's counter.
    pub fn free(&mut self) -> Result<u64, RingError> {
        let now = self.consumed_word.load(Ordering::Acquire);
        if self.tail.wrapping_sub(now) > self.tail.wrapping_sub(self.consumed) {
            return Err(RingError::Corrupt);
        }
        self.consumed = now;
        Ok(self.capacity() - self.tail.wrapping_sub(self.consumed))
    }

    /// Takes the next `len` bytes for writing and gives their position. The consumer learns of them
    /// through a slot.
    #[inline]
    pub fn reserve(&mut self, len: u32) -> Result<u64, RingError> {
        let len = u64::from(len);
        if len > self.capacity() {
            return Err(RingError::TooLong);
        }
        if len > self.capacity() - self.tail.wrapping_sub(self.consumed) && len > self.free()? {
            return Err(RingError::Full);
        }
        let position = self.tail;
        self.tail = position.wrapping_add(len);
        Ok(position)
    }

    /// Gives back everything reserved from `position` on, of which no slot has told the consumer.
    /// Panics if that was never reserved.
    #[track_caller]
    pub fn cancel(&mut self, position: u64) {
        let held = self.tail.wrapping_sub(self.consumed);
        assert!(self.tail.wrapping_sub(position) <= held, "cancelled bytes were never reserved");
        self.tail = position;
    }

    /// The two pieces of a reserved range, for writing. Panics if it is longer than the ring.
    #[inline]
    #[track_caller]
    pub fn pieces(&self, position: u64, len: u32) -> (Span<'_>, Span<'_>) {
        self.buffer.pieces(position, len as usize).expect("a range is no longer than the ring")
    }

    /// Copies `bytes` to `position` of a reserved range. Panics if they are longer than the ring.
    #[inline]
    #[track_caller]
    pub fn write(&self, position: u64, bytes: &[u8]) {
        let (first, second) =
            self.buffer.pieces(position, bytes.len()).expect("a range is no longer than the ring");
        let (head, rest) = bytes.split_at(first.len());
        first.write_from(0, head);
        second.write_from(0, rest);
    }

    /// Copies a span to `position` of a reserved range. Panics if it is longer than the ring.
    #[inline]
    #[track_caller]
    pub fn write_span(&self, position: u64, from: &Span<'_>) {
        let (first, second) =
            self.buffer.pieces(position, from.len()).expect("a range is no longer than the ring");
        from.sub(0, first.len()).copy_to(&first);
        from.sub(first.len(), second.len()).copy_to(&second);
    }
}

/// The draining end of a byte ring.
#[derive(Debug)]
pub struct ByteConsumer {
    buffer: ByteBuffer,
    head: u64,
    published: u64,
    consumed_word: Shared<AtomicU64>,
}

impl ByteConsumer {
    pub(crate) fn new(buffer: ByteBuffer, consumed: Shared<AtomicU64>) -> ByteConsumer {
        ByteConsumer { buffer, head: 0, published: 0, consumed_word: consumed }
    }

    /// The bytes of the ring.
    pub fn capacity(&self) -> u64 {
        self.buffer.capacity()
    }

    /// The position up to which bytes have been released.
    pub fn position(&self) -> u64 {
        self.head
    }

    /// The two pieces of a range that the producer named. A range longer than the ring is corrupt; a
    /// wrong position gives wrong bytes.
    #[inline]
    pub fn pieces(&self, position: u64, len: u32) -> Result<(Span<'_>, Span<'_>), RingError> {
        if u64::from(len) > self.capacity() {
            return Err(RingError::Corrupt);
        }
        self.buffer.pieces(position, len as usize).map_err(|_| RingError::Corrupt)
    }

    /// Copies out `out.len()` bytes from `position`.
    #[inline]
    pub fn read_into(&self, position: u64, out: &mut [u8]) -> Result<(), RingError> {
        let len = u32::try_from(out.len()).map_err(|_| RingError::Corrupt)?;
        let (first, second) = self.pieces(position, len)?;
        let (head, rest) = out.split_at_mut(first.len());
        first.read_into(0, head);
        second.read_into(0, rest);
        Ok(())
    }

    /// Fills a span with the bytes from `position`.
    #[inline]
    pub fn copy_to(&self, position: u64, to: &Span<'_>) -> Result<(), RingError> {
        let len = u32::try_from(to.len()).map_err(|_| RingError::Corrupt)?;
        let (first, second) = self.pieces(position, len)?;
        first.copy_to(to);
        second.copy_to(&to.sub(first.len(), second.len()));
        Ok(())
    }

    /// Is done with all bytes before `position`. A position that goes back, or forward by more than
    /// the ring holds, is corrupt and changes nothing.
    #[inline]
    pub fn release_to(&mut self, position: u64) -> Result<(), RingError> {
        if position.wrapping_sub(self.head) > self.capacity() {
            return Err(RingError::Corrupt);
        }
        self.head = position;
        Ok(())
    }

    /// Gives the released bytes back to the producer; call it at the end of a batch.
    #[inline]
    pub fn publish(&mut self) {
        if self.published != self.head {
            self.published = self.head;
            self.consumed_word.store(self.head, Ordering::Release);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ring(capacity: usize) -> (ByteProducer, ByteConsumer, Segment) {
        let segment = Segment::heap(128 + capacity);
        let buffer = ByteBuffer::new(segment.slice(128, capacity).unwrap());
        let producer = ByteProducer::new(buffer.clone(), segment.u64_at(0).unwrap());
        let consumer = ByteConsumer::new(buffer, segment.u64_at(0).unwrap());
        (producer, consumer, segment)
    }

    #[test]
    fn bytes_wrap_around_the_end() {
        let (mut producer, mut consumer, _segment) = ring(64);
        for round in 0..50u8 {
            let len = 1 + usize::from(round) % 60;
            let sent: Vec<u8> = (0..len as u8).map(|i| i ^ round).collect();
            let position = producer.reserve(len as u32).unwrap();
            if round % 2 == 0 {
                producer.write(position, &sent);
            } else {
                let other = Segment::heap(len);
                other.write(0, &sent).unwrap();
                producer.write_span(position, &other.span(0, len).unwrap());
            }
            let mut got = vec![0; len];
            if round % 3 == 0 {
                consumer.read_into(position, &mut got).unwrap();
            } else {
                let other = Segment::heap(len);
                consumer.copy_to(position, &other.span(0, len).unwrap()).unwrap();
                other.read(0, &mut got).unwrap();
            }
            assert_eq!(got, sent);
            consumer.release_to(position + len as u64).unwrap();
            consumer.publish();
        }
    }

    #[test]
    fn room_is_given_back_by_publish_and_by_cancel() {
        let (mut producer, mut consumer, _segment) = ring(64);
        assert_eq!(producer.reserve(65), Err(RingError::TooLong));
        assert_eq!(producer.reserve(40), Ok(0));
        assert_eq!(producer.reserve(25), Err(RingError::Full));
        assert_eq!(producer.reserve(24), Ok(40));
        producer.cancel(40);
        assert_eq!(producer.free(), Ok(24));
        consumer.release_to(40).unwrap();
        assert_eq!(producer.free(), Ok(24));
        consumer.publish();
        assert_eq!(producer.reserve(64), Ok(40));
    }

    #[test]
    fn lies_are_found_out() {
        let (mut producer, mut consumer, segment) = ring(64);
        assert_eq!(consumer.release_to(65), Err(RingError::Corrupt));
        assert_eq!(consumer.release_to(u64::MAX), Err(RingError::Corrupt));
        assert_eq!(consumer.pieces(0, 65).err(), Some(RingError::Corrupt));
        assert!(consumer.pieces(u64::MAX, 64).is_ok());
        producer.reserve(10).unwrap();
        segment.u64_at(0).unwrap().store(11, Ordering::Relaxed);
        assert_eq!(producer.free(), Err(RingError::Corrupt));
    }
}
