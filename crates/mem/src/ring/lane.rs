//! Lanes: rings of single cache lines in memory that the consumer owns and the producer has mapped.
//!
//! A lane is the shortest way between two processes. A message of 63 bytes or less is one store of one line,
//! and the consumer polls the line in which the next message will be. No counter says what was consumed: the
//! users of a lane have no more than [`SLOTS`] messages in it, which is what credits are for.
//!
//! The first line is the header: the serial number of the lane, and whether the consumer sleeps. The consumer
//! writes both; a producer clears the second when it wakes the consumer. A producer reads the serial number
//! before each message, so that it leaves a lane alone that the consumer has closed.
//!
//! Sleeping: the producer has no fence between its message and its read of the header: that would cost more
//! than all the rest. So the consumer looks at the lane for some microseconds after [`LaneConsumer::arm`],
//! in which stores of other processors become visible, and sleeps for a bounded time.

use core::sync::atomic::{AtomicU64, Ordering, compiler_fence, fence};

use super::LINE;
use crate::segment::{Segment, SegmentError, Words};

/// Messages in a lane.
pub const SLOTS: u32 = 64;
/// Words of a message. The upper byte of the first one is the lane's.
pub const LINE_WORDS: usize = 8;
/// Bytes of a lane, a multiple of 64.
pub const LANE_BYTES: usize = LINE + SLOTS as usize * LINE_WORDS * 8;

const HEADER_WORDS: usize = LINE / 8;
/// How many lines ahead they are fetched for writing.
const FETCH_AHEAD: u32 = 2;
/// How many lines ahead of a consumer are fetched for reading while one message follows another.
const READ_AHEAD: u32 = 3;
/// The bit of the header that says that the consumer sleeps.
const ASLEEP: u64 = 1;
const TAG_SHIFT: u32 = 56;

/// The words of a message.
pub type Line = [u64; LINE_WORDS];

/// Where a message is. Never more than the lane has.
#[inline(always)]
fn first_word(position: u32) -> usize {
    HEADER_WORDS + (position % SLOTS) as usize * LINE_WORDS
}

/// What the upper byte of a filled line is: never 0, and another in each lap.
#[inline(always)]
fn tag(position: u32) -> u64 {
    u64::from((position / SLOTS) % 255 + 1) << TAG_SHIFT
}

fn words_of(memory: &Segment) -> Result<Words, SegmentError> {
    if !memory.addr().is_multiple_of(64) {
        return Err(SegmentError::Misaligned);
    }
    if !memory.is_writable() {
        return Err(SegmentError::ReadOnly);
    }
    memory.words(0, LANE_BYTES / 8)
}

/// What became of a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pushed {
    /// The consumer polls, and will find it.
    Done,
    /// The consumer sleeps, and the caller is to wake it.
    Asleep,
    /// The consumer has closed the lane: nothing was pushed.
    Closed,
}

/// The filling end of a lane.
#[derive(Debug)]
pub struct LaneProducer {
    words: Words,
    serial: u64,
    tail: u32,
}

impl LaneProducer {
    /// The lane with that serial number in memory of the consumer.
    ///
    /// # Errors
    /// The memory is too short, not aligned to a cache line, or read-only.
    pub fn new(memory: &Segment, serial: u64) -> Result<Self, SegmentError> {
        Ok(Self { words: words_of(memory)?, serial: serial << 1, tail: 0 })
    }

    /// Pushes a message; the upper byte of its first word is ignored.
    #[inline(always)]
    pub fn push(&mut self, line: &Line) -> Pushed {
        let header = self.words.at(0);
        if header.load(Ordering::Relaxed) & !ASLEEP != self.serial {
            return Pushed::Closed;
        }
        let row = self.words.row::<LINE_WORDS>(first_word(self.tail));
        for (place, word) in row.iter().zip(line).skip(1) {
            place.store(*word, Ordering::Relaxed);
        }
        let first = line[0] & !(0xff << TAG_SHIFT) | tag(self.tail);
        // Release: a consumer that sees the tag sees the rest of the line.
        row[0].store(first, Ordering::Release);
        self.tail = self.tail.wrapping_add(1);
        self.words.prefetch(first_word(self.tail.wrapping_add(FETCH_AHEAD - 1)), true);
        if cfg!(target_arch = "x86_64") {
            compiler_fence(Ordering::SeqCst);
        } else {
            fence(Ordering::SeqCst);
        }
        if header.load(Ordering::Relaxed) & ASLEEP != 0 && self.wake() {
            return Pushed::Asleep;
        }
        Pushed::Done
    }

    /// Whether this end is the one that is to wake the consumer.
    #[cold]
    fn wake(&self) -> bool {
        let (asleep, awake) = (self.serial | ASLEEP, self.serial);
        let header = self.words.at(0);
        header.compare_exchange(asleep, awake, Ordering::AcqRel, Ordering::Relaxed).is_ok()
    }
}

/// The draining end of a lane.
#[derive(Debug)]
pub struct LaneConsumer {
    words: Words,
    serial: u64,
    head: u32,
}

impl LaneConsumer {
    /// Makes a lane in memory of this process. No two lanes of the same memory may have the same serial
    /// number, which is not 0 and less than 2^63.
    ///
    /// # Errors
    /// The memory is too short, not aligned to a cache line, or read-only.
    pub fn new(memory: &Segment, serial: u64) -> Result<Self, SegmentError> {
        let words = words_of(memory)?;
        for position in 0..SLOTS {
            words.at(first_word(position)).store(0, Ordering::Relaxed);
        }
        words.at(0).store(serial << 1, Ordering::Release);
        Ok(Self { words, serial: serial << 1, head: 0 })
    }

    /// The next message, if there is one; it stays. The producer may have written anything.
    #[inline(always)]
    #[must_use]
    pub fn peek(&self) -> Option<Line> {
        let row = self.words.row::<LINE_WORDS>(first_word(self.head));
        let first = row[0].load(Ordering::Acquire);
        if first & 0xff << TAG_SHIFT != tag(self.head) {
            return None;
        }
        let load = |word: &AtomicU64| word.load(Ordering::Relaxed);
        let [_, a, b, c, d, e, f, g] = row;
        let first = first & !(0xff << TAG_SHIFT);
        Some([first, load(a), load(b), load(c), load(d), load(e), load(f), load(g)])
    }

    /// Goes on to the message after the one that [`peek`](Self::peek) has shown.
    #[inline(always)]
    pub fn pop(&mut self) {
        self.head = self.head.wrapping_add(1);
    }

    /// The same, and has the processor fetch a later message: for when one follows another at once. A line
    /// that the producer is yet to write is better left to it.
    #[inline(always)]
    pub fn pop_and_fetch(&mut self) {
        self.pop();
        self.words.prefetch(first_word(self.head.wrapping_add(READ_AHEAD)), false);
    }

    /// Says that the consumer sleeps. The caller looks at the lane for a while before it does.
    pub fn arm(&self) {
        self.words.at(0).store(self.serial | ASLEEP, Ordering::SeqCst);
    }

    /// Says that the consumer is awake.
    pub fn disarm(&self) {
        self.words.at(0).store(self.serial, Ordering::Relaxed);
    }

    /// Closes the lane: the producer will leave it alone. One that was interrupted may still write one
    /// message, so the memory is not to be used for another lane before long.
    pub fn close(&self) {
        self.words.at(0).store(0, Ordering::SeqCst);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lane(serial: u64) -> (Segment, LaneProducer, LaneConsumer) {
        let memory = Segment::heap(LANE_BYTES);
        let consumer = LaneConsumer::new(&memory, serial).unwrap();
        let producer = LaneProducer::new(&memory, serial).unwrap();
        (memory, producer, consumer)
    }

    #[test]
    fn messages_arrive_in_order_over_many_laps() {
        let (_memory, mut producer, mut consumer) = lane(7);
        let line = |number: u64| [number, 1, 2, 3, 4, 5, 6, number * 3];
        let (mut sent, mut taken) = (0, 0);
        for burst in (1..=u64::from(SLOTS)).cycle().take(700) {
            for _ in 0..burst {
                assert_eq!(producer.push(&line(sent)), Pushed::Done);
                sent += 1;
            }
            while let Some(found) = consumer.peek() {
                assert_eq!((found, consumer.peek()), (line(taken), Some(line(taken))));
                consumer.pop();
                taken += 1;
            }
            assert_eq!(sent, taken);
        }
        assert!(sent > 300 * u64::from(SLOTS), "more laps than there are tags");
    }

    #[test]
    fn one_producer_wakes_a_sleeper_once() {
        let (_memory, mut producer, mut consumer) = lane(9);
        consumer.arm();
        assert_eq!([0; 3].map(|_| producer.push(&[5; 8])), {
            [Pushed::Asleep, Pushed::Done, Pushed::Done]
        });
        consumer.pop();
        consumer.arm();
        consumer.disarm();
        assert_eq!(producer.push(&[5; 8]), Pushed::Done);
    }

    #[test]
    fn a_lane_that_is_closed_or_anothers_is_left_alone() {
        let (memory, mut producer, consumer) = lane(9);
        consumer.close();
        assert_eq!(producer.push(&[5; 8]), Pushed::Closed);
        let another = LaneConsumer::new(&memory, 10).unwrap();
        assert_eq!(producer.push(&[5; 8]), Pushed::Closed);
        assert_eq!(another.peek(), None);
    }

    #[test]
    fn what_a_peer_writes_into_the_header_does_no_harm() {
        let (memory, _, consumer) = lane(9);
        memory.write(0, &[0xff; LINE]).unwrap();
        assert_eq!(consumer.peek(), None);
        memory.write(LINE, &[0xff; 64]).unwrap();
        assert_eq!(consumer.peek(), None, "the tag of another lap");
    }

    #[test]
    fn memory_that_cannot_hold_a_lane_is_refused() {
        let memory = Segment::heap(LANE_BYTES + 64);
        let unaligned = memory.slice(8, LANE_BYTES).unwrap();
        assert_eq!(LaneProducer::new(&unaligned, 1).err(), Some(SegmentError::Misaligned));
        let short = memory.slice(64, LANE_BYTES - 64).unwrap();
        assert_eq!(LaneConsumer::new(&short, 1).err(), Some(SegmentError::OutOfBounds));
    }
}
