//! Rings of 128-byte slots with the valid bit in the slot.
//!
//! A slot starts with a tag that names the lap of the ring in which it was filled; it is written
//! last. So the consumer sees from the slot alone whether it is full, and a header with up to 32
//! bytes of payload costs one cache line.

mod offer;

use core::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use super::RingError;
use crate::segment::{Shared, Words};
use crate::span::Span;

pub use self::offer::Offer;

/// The most payload bytes that fit in a slot.
pub const INLINE_MAX: usize = 96;

/// Bytes in a slot.
pub(crate) const SLOT_LEN: usize = 128;

/// 8-byte words in a slot and in its header.
const SLOT_WORDS: usize = SLOT_LEN / 8;
const HEADER_WORDS: usize = 4;

/// The header of a slot. The ring gives meaning to `inline_len` only; the rest is its users'.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct SlotHeader {
    /// What the message is.
    pub opcode: u8,
    /// Flags of the message.
    pub flags: u8,
    /// Payload bytes in the slot, at most [`INLINE_MAX`].
    pub inline_len: u16,
    /// Payload bytes of the whole message, wherever they are.
    pub length: u32,
    /// Immediate data.
    pub imm: u32,
    /// A remote address, or a position in the byte ring.
    pub raddr: u64,
    /// A key.
    pub rkey: u32,
    /// An acknowledgement that rides along.
    pub ack: u32,
}

impl SlotHeader {
    #[inline(always)]
    fn pack(&self, tag: u32) -> [u64; HEADER_WORDS] {
        let pair = |low: u32, high: u32| u64::from(low) | u64::from(high) << 32;
        let kind = u32::from_le_bytes([self.opcode, self.flags, 0, 0]);
        [
            pair(tag, kind | u32::from(self.inline_len) << 16),
            pair(self.length, self.imm),
            self.raddr,
            pair(self.rkey, self.ack),
        ]
    }

    /// Reads a header, with `inline_len` cut to what a slot holds.
    #[inline(always)]
    fn unpack(words: [u64; HEADER_WORDS]) -> SlotHeader {
        let [opcode, flags, ..] = ((words[0] >> 32) as u32).to_le_bytes();
        SlotHeader {
            opcode,
            flags,
            inline_len: ((words[0] >> 48) as u16).min(INLINE_MAX as u16),
            length: words[1] as u32,
            imm: (words[1] >> 32) as u32,
            raddr: words[2],
            rkey: words[3] as u32,
            ack: (words[3] >> 32) as u32,
        }
    }
}

/// How many slots ahead they are fetched.
const FETCH_AHEAD: u32 = 4;

/// Payload bytes that share a cache line with the header. Who has not more leaves the other line of a slot
/// alone, also when slots are fetched: the next message will most likely be like the last.
const FIRST_LINE: u16 = 32;

/// Which slot a position is in, and the tag of its lap there.
#[derive(Clone, Copy, Debug)]
struct Geometry {
    mask: u32,
    shift: u32,
}

impl Geometry {
    fn new(slots: u32) -> Geometry {
        assert!(slots.is_power_of_two() && slots >= 2, "slots are a power of two");
        Geometry { mask: slots - 1, shift: slots.trailing_zeros() }
    }

    #[inline]
    fn first_word(self, position: u32) -> usize {
        (position & self.mask) as usize * SLOT_WORDS
    }

    /// Never zero, which is the tag of a slot that was never filled; laps that follow each other
    /// differ, also where the position wraps around.
    #[inline]
    fn tag(self, position: u32) -> u32 {
        (position >> self.shift) + 1
    }
}

/// The filling end of a slot ring.
pub struct SlotProducer {
    words: Words,
    geometry: Geometry,
    tail: u32,
    /// The oldest slot that is held back: where it starts, and its first word, which is still to be written.
    held: Option<(usize, u64)>,
    /// What the consumer had consumed when last looked at.
    consumed: u32,
    consumed_word: Shared<AtomicU32>,
    started: bool,
    started_word: Shared<AtomicU32>,
}

impl SlotProducer {
    /// `words` are the slots, zeroed; `consumed` is the consumer's counter, `started` the producer's
    /// word that says that the slots have been used.
    pub(crate) fn new(
        words: Words,
        slots: u32,
        consumed: Shared<AtomicU32>,
        started: Shared<AtomicU32>,
    ) -> SlotProducer {
        SlotProducer {
            words,
            geometry: Geometry::new(slots),
            tail: 0,
            held: None,
            consumed: 0,
            consumed_word: consumed,
            started: false,
            started_word: started,
        }
    }

    /// The slots of the ring.
    pub fn capacity(&self) -> u32 {
        self.geometry.mask + 1
    }

    /// Messages pushed since the beginning, wrapping: the position of the next.
    pub fn position(&self) -> u32 {
        self.tail
    }

    /// Slots that are free; looks at the consumer's counter.
    pub fn free(&mut self) -> Result<u32, RingError> {
        self.refresh()?;
        Ok(self.capacity() - self.tail.wrapping_sub(self.consumed))
    }

    /// Takes the next slot for writing; nothing is pushed until [`SlotWriter::commit`].
    #[inline(always)]
    pub fn reserve(&mut self) -> Result<SlotWriter<'_>, RingError> {
        if self.is_full() {
            self.look_for_room()?;
        }
        Ok(SlotWriter { first: self.geometry.first_word(self.tail), ring: self })
    }

    /// The same, but for the last free slot, which is kept for what has to be said in any case.
    ///
    /// # Errors
    /// [`RingError::Full`] also if just one slot is free; `Corrupt` as for [`reserve`](Self::reserve).
    pub fn reserve_but_last(&mut self) -> Result<SlotWriter<'_>, RingError> {
        if self.is_almost_full() {
            self.refresh()?;
            if self.is_almost_full() {
                return Err(RingError::Full);
            }
        }
        Ok(SlotWriter { first: self.geometry.first_word(self.tail), ring: self })
    }

    fn is_almost_full(&self) -> bool {
        self.tail.wrapping_sub(self.consumed) >= self.geometry.mask
    }

    /// Whether no slot is free, as far as is known.
    #[inline(always)]
    fn is_full(&self) -> bool {
        self.tail.wrapping_sub(self.consumed) > self.geometry.mask
    }

    #[cold]
    fn look_for_room(&mut self) -> Result<(), RingError> {
        self.refresh()?;
        if self.is_full() { Err(RingError::Full) } else { Ok(()) }
    }

    /// Pushes a message with this payload inline; `inline_len` is taken from the payload.
    #[inline]
    pub fn push(&mut self, header: &SlotHeader, payload: &[u8]) -> Result<(), RingError> {
        if payload.len() > INLINE_MAX {
            return Err(RingError::TooLong);
        }
        let slot = self.reserve()?;
        slot.payload().write_from(0, payload);
        slot.commit(&SlotHeader { inline_len: payload.len() as u16, ..*header });
        Ok(())
    }

    /// Lets the consumer see what is held back, if anything is: see [`SlotWriter::hold`].
    #[inline]
    pub fn show(&mut self) {
        if let Some((first, word)) = self.held.take() {
            // Release: a thread that sees the tag sees this slot and all that were filled after it.
            self.words.at(first).store(word, Ordering::Release);
        }
    }

    /// Says that there is something in a ring that was never used.
    #[cold]
    fn start(&mut self) {
        self.started = true;
        self.started_word.store(1, Ordering::Release);
    }

    /// Has a slot that is due soon fetched: the consumer's processor has it, and to wait for that when the
    /// slot is filled would cost more than all the rest.
    #[inline(always)]
    fn fetch_ahead(&self, inline_len: u16) {
        let first = self.geometry.first_word(self.tail.wrapping_add(FETCH_AHEAD));
        self.words.prefetch(first, true);
        if inline_len > FIRST_LINE {
            self.words.prefetch(first + SLOT_WORDS / 2, true);
        }
    }

    /// Reads the consumer's counter; it must lie between what it was and what was pushed.
    fn refresh(&mut self) -> Result<(), RingError> {
        let now = self.consumed_word.load(Ordering::Acquire);
        if self.tail.wrapping_sub(now) > self.tail.wrapping_sub(self.consumed) {
            return Err(RingError::Corrupt);
        }
        self.consumed = now;
        Ok(())
    }
}

/// A slot being filled. Dropped without a commit, it stays free.
pub struct SlotWriter<'r> {
    ring: &'r mut SlotProducer,
    /// Where it starts.
    first: usize,
}

impl SlotWriter<'_> {
    /// The [`INLINE_MAX`] payload bytes of the slot.
    #[inline]
    pub fn payload(&self) -> Span<'_> {
        self.ring.words.span(self.first + HEADER_WORDS, SLOT_WORDS - HEADER_WORDS)
    }

    /// Writes 8 bytes of the payload, the `index`th of [`INLINE_MAX`] / 8. Panics if there are not so many.
    #[inline]
    #[track_caller]
    pub fn put_word(&self, index: usize, word: u64) {
        assert!(index < SLOT_WORDS - HEADER_WORDS, "a word behind the slot");
        self.ring.words.at(self.first + HEADER_WORDS + index).store(word, Ordering::Relaxed);
    }

    /// Writes the payload's first bytes. Panics if they are more than [`INLINE_MAX`].
    #[inline(always)]
    #[track_caller]
    pub fn put(&self, bytes: &[u8]) {
        self.payload().deliver_from(0, bytes);
    }

    /// Pushes the slot: the consumer may see it from now on, and what was held back before it.
    #[inline(always)]
    pub fn commit(self, header: &SlotHeader) {
        let Self { ring, first } = self;
        let (row, word) = ring.fill(first, header);
        // Release: a thread that sees the tag sees the header and the payload.
        row[0].store(word, Ordering::Release);
        ring.show();
    }

    /// Pushes the slot, but holds it back, and with it all that follow, until [`SlotProducer::show`]. A
    /// consumer that spins would take the line of each slot away as soon as it is filled, and those of the
    /// next ones before they are, while the producer still fills them: of a list that is held back it sees
    /// one line only. Never leave slots held back while waiting for room.
    #[inline(always)]
    pub fn hold(self, header: &SlotHeader) {
        let Self { ring, first } = self;
        let is_first = ring.held.is_none();
        let (row, word) = ring.fill(first, header);
        if is_first {
            ring.held = Some((first, word));
        } else {
            // The consumer does not get here before the slot that is held back.
            row[0].store(word, Ordering::Release);
        }
    }
}

impl SlotProducer {
    /// Writes the header of the next slot, which starts at `first`, but for its first word, and goes on to
    /// the one behind. Gives the words of the header, and the first that is to be written.
    #[inline(always)]
    fn fill(&mut self, first: usize, header: &SlotHeader) -> (&[AtomicU64; HEADER_WORDS], u64) {
        let packed = header.pack(self.geometry.tag(self.tail));
        self.tail = self.tail.wrapping_add(1);
        self.fetch_ahead(header.inline_len);
        if !self.started {
            self.start();
        }
        let row = self.words.row(first);
        for i in 1..HEADER_WORDS {
            row[i].store(packed[i], Ordering::Relaxed);
        }
        (row, packed[0])
    }
}

/// The draining end of a slot ring.
pub struct SlotConsumer {
    words: Words,
    geometry: Geometry,
    head: u32,
    /// What the producer knows to be consumed.
    published: u32,
    consumed_word: Shared<AtomicU32>,
    /// The slot at `head` was seen full.
    seen: bool,
    /// What was seen last has a payload that goes on in the other line of its slot.
    wide: bool,
    /// The slot before `head` was popped, and nothing has been waited for since.
    backlog: bool,
    started: bool,
    started_word: Shared<AtomicU32>,
}

impl SlotConsumer {
    /// The counterpart of [`SlotProducer::new`].
    pub(crate) fn new(
        words: Words,
        slots: u32,
        consumed: Shared<AtomicU32>,
        started: Shared<AtomicU32>,
    ) -> SlotConsumer {
        SlotConsumer {
            words,
            geometry: Geometry::new(slots),
            head: 0,
            published: 0,
            consumed_word: consumed,
            seen: false,
            wide: false,
            backlog: false,
            started: false,
            started_word: started,
        }
    }

    /// Messages popped since the beginning, wrapping: the position of the next.
    pub fn position(&self) -> u32 {
        self.head
    }

    /// The first word of the next message's slot, if there is one. The slots of a ring that was never used
    /// are not touched.
    #[inline(always)]
    fn start(&mut self) -> Option<u64> {
        if !self.started {
            if self.started_word.load(Ordering::Acquire) == 0 {
                return None;
            }
            self.started = true;
        }
        let first = self.geometry.first_word(self.head);
        let start = self.words.at(first).load(Ordering::Acquire);
        if start as u32 == self.geometry.tag(self.head) {
            return Some(start);
        }
        self.backlog = false;
        None
    }

    /// Whether the message before the next one was popped and none has been waited for since, so that more
    /// may well be there.
    #[inline]
    pub fn has_backlog(&self) -> bool {
        self.backlog
    }

    /// Whether there is a message.
    #[inline(always)]
    pub fn is_filled(&mut self) -> bool {
        self.start().is_some()
    }

    /// A copy of the next message's header, if there is one. One that was offered is the producer's no more.
    #[inline(always)]
    pub fn peek(&mut self) -> Option<SlotHeader> {
        let first = self.geometry.first_word(self.head);
        let start = self.start().and_then(|start| self.claim(first, start))?;
        self.seen = true;
        let row = self.words.row::<HEADER_WORDS>(first);
        let rest = |i: usize| row[i].load(Ordering::Relaxed);
        let header = SlotHeader::unpack([start, rest(1), rest(2), rest(3)]);
        self.wide = header.inline_len > FIRST_LINE;
        Some(header)
    }

    /// The [`INLINE_MAX`] payload bytes of the slot that [`peek`](SlotConsumer::peek) saw. They stay
    /// until the pop after the next [`publish`](SlotConsumer::publish), and a hostile producer may
    /// change them meanwhile.
    #[inline]
    pub fn payload(&self) -> Span<'_> {
        let first = self.geometry.first_word(self.head);
        self.words.span(first + HEADER_WORDS, SLOT_WORDS - HEADER_WORDS)
    }

    /// Goes on to the next message. The producer learns of it with [`publish`](SlotConsumer::publish),
    /// or of itself after half a ring. Panics unless [`peek`](SlotConsumer::peek) saw the message.
    #[inline(always)]
    #[track_caller]
    pub fn pop(&mut self) {
        assert!(core::mem::take(&mut self.seen), "pop comes after a peek that found a message");
        self.head = self.head.wrapping_add(1);
        // Where one message follows the other, later slots are filled already. Fetched before they are, they
        // would only have to be given back to the producer.
        if core::mem::replace(&mut self.backlog, true) {
            let first = self.geometry.first_word(self.head.wrapping_add(FETCH_AHEAD - 1));
            self.words.prefetch(first, false);
            if self.wide {
                self.words.prefetch(first + SLOT_WORDS / 2, false);
            }
        }
        if self.head.wrapping_sub(self.published) > self.geometry.mask / 2 {
            self.publish();
        }
    }

    /// Gives the popped slots back to the producer; call it at the end of a batch. Costs nothing if
    /// nothing was popped.
    #[inline]
    pub fn publish(&mut self) {
        if self.published != self.head {
            self.published = self.head;
            self.consumed_word.store(self.head, Ordering::Release);
        }
    }
}

impl core::fmt::Debug for SlotProducer {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.debug_struct("SlotProducer").field("tail", &self.tail).finish_non_exhaustive()
    }
}

impl core::fmt::Debug for SlotWriter<'_> {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.debug_struct("SlotWriter").field("position", &self.ring.tail).finish()
    }
}

impl core::fmt::Debug for SlotConsumer {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.debug_struct("SlotConsumer").field("head", &self.head).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests;
