//! Messages that the producer takes back if nobody looks: it would rather do itself what it asks for than
//! wait.
//!
//! Of a slot that is offered the first word says so. The consumer clears that before it reads anything else,
//! the producer clears the whole word to take the slot back, and whoever comes first has it.

use core::sync::atomic::Ordering;

use super::{SlotConsumer, SlotHeader, SlotProducer, SlotWriter};

/// The bit of the first word that says that the slot is offered: the highest of the payload's length.
const OFFERED: u64 = 1 << 63;

/// A message that may still be taken back.
#[derive(Debug)]
#[must_use]
pub struct Offer {
    first: usize,
    word: u64,
    /// Where the ring ended behind it.
    tail: u32,
}

impl SlotWriter<'_> {
    /// Pushes the slot as an offer: see [`SlotProducer::withdraw`].
    #[inline]
    pub fn offer(self, header: &SlotHeader) -> Offer {
        let Self { ring, first } = self;
        let (row, word) = ring.fill(first, header);
        let word = word | OFFERED;
        // Release: a thread that sees the tag sees the header and the payload.
        row[0].store(word, Ordering::Release);
        ring.show();
        Offer { first, word, tail: ring.tail }
    }
}

impl SlotProducer {
    /// Takes an offer back; `false` if the consumer has it, so that it is a message like any other. Panics if
    /// anything was pushed since.
    #[inline]
    #[track_caller]
    pub fn withdraw(&mut self, offer: Offer) -> bool {
        assert_eq!(offer.tail, self.tail, "the last message is withdrawn, or none");
        let word = self.words.at(offer.first);
        // Acquire: what is written into the slot next is not seen by a consumer that took this offer. No slot
        // that is filled begins with 0.
        let back =
            word.compare_exchange(offer.word, 0, Ordering::AcqRel, Ordering::Relaxed).is_ok();
        if back {
            self.tail = self.tail.wrapping_sub(1);
        }
        back
    }
}

impl SlotConsumer {
    /// The first word of a slot, without the bit, once it is no offer any more. `None` if the producer was
    /// quicker, and may have put something else there.
    #[inline(always)]
    pub(super) fn claim(&self, first: usize, start: u64) -> Option<u64> {
        if start & OFFERED == 0 { Some(start) } else { self.claim_offer(first, start) }
    }

    #[inline(never)]
    fn claim_offer(&self, first: usize, start: u64) -> Option<u64> {
        let (word, claimed) = (self.words.at(first), start & !OFFERED);
        // Acquire: the rest of the slot is read after this, since it may have been filled anew.
        let taken = word.compare_exchange(start, claimed, Ordering::AcqRel, Ordering::Relaxed);
        taken.ok().map(|_| claimed)
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::ring;
    use super::*;

    fn header(imm: u32) -> SlotHeader {
        SlotHeader { imm, inline_len: 8, ..Default::default() }
    }

    fn offer(producer: &mut SlotProducer, imm: u32) -> Offer {
        let slot = producer.reserve().unwrap();
        slot.put_word(0, u64::from(imm) * 10);
        slot.offer(&header(imm))
    }

    fn payload(consumer: &SlotConsumer) -> u64 {
        let mut bytes = [0; 8];
        consumer.payload().read_into(0, &mut bytes);
        u64::from_ne_bytes(bytes)
    }

    #[test]
    fn what_was_taken_cannot_be_withdrawn_and_is_a_message_like_any_other() {
        let (mut producer, mut consumer, _segment) = ring(4, u32::MAX - 3);
        for imm in 0..20 {
            let offer = offer(&mut producer, imm);
            assert!(consumer.is_filled(), "which takes nothing");
            (0..2).for_each(|_| assert_eq!(consumer.peek(), Some(header(imm))));
            assert!(!producer.withdraw(offer));
            assert_eq!(payload(&consumer), u64::from(imm) * 10);
            consumer.pop();
            consumer.publish();
            assert_eq!((consumer.peek(), producer.free()), (None, Ok(4)));
        }
    }

    #[test]
    fn what_was_withdrawn_never_was() {
        let (mut producer, mut consumer, _segment) = ring(4, u32::MAX - 3);
        for imm in 0..20 {
            let offered = offer(&mut producer, imm);
            let before = producer.position();
            assert!(consumer.is_filled());
            assert!(producer.withdraw(offered));
            assert_eq!((consumer.is_filled(), consumer.peek()), (false, None));
            assert_eq!(producer.position(), before.wrapping_sub(1));
            producer.push(&header(100 + imm), &[7; 8]).unwrap();
            assert_eq!(consumer.peek().map(|header| header.imm), Some(100 + imm));
            consumer.pop();
            consumer.publish();
        }
    }

    #[test]
    fn a_slot_that_was_offered_anew_is_read_as_it_is_now() {
        let (mut producer, mut consumer, _segment) = ring(4, 0);
        let start = |consumer: &mut SlotConsumer| consumer.start().unwrap();
        let first = offer(&mut producer, 1);
        let seen = start(&mut consumer);
        assert!(producer.withdraw(first));
        let second = offer(&mut producer, 2);
        // The first words are the same: to take the one is to take the other.
        assert!(consumer.claim(0, seen).is_some() && !producer.withdraw(second));
        assert_eq!((consumer.peek(), payload(&consumer)), (Some(header(2)), 20));
        consumer.pop();
        let third = offer(&mut producer, 3);
        let seen = start(&mut consumer);
        assert!(producer.withdraw(third));
        producer.push(&header(4), &[0; 8]).unwrap();
        assert_eq!(consumer.claim(16, seen), None, "it is not what was seen");
        assert_eq!(consumer.peek().map(|header| header.imm), Some(4));
    }

    #[test]
    #[should_panic(expected = "the last message is withdrawn")]
    fn nothing_is_withdrawn_from_between_others() {
        let (mut producer, _consumer, _segment) = ring(4, 0);
        let offered = offer(&mut producer, 1);
        producer.push(&header(2), &[]).unwrap();
        producer.withdraw(offered);
    }

    /// Every message arrives once: by the ring, or with who withdrew it.
    #[test]
    fn each_of_two_threads_has_what_the_other_has_not() {
        const MESSAGES: u32 = if cfg!(miri) { 200 } else { 200_000 };
        let (mut producer, mut consumer, _segment) = ring(8, 0);
        let mut back = Vec::new();
        let taken = std::thread::scope(|scope| {
            let taking = scope.spawn(move || {
                let mut taken = Vec::new();
                loop {
                    let Some(header) = consumer.peek() else {
                        std::hint::spin_loop();
                        continue;
                    };
                    assert_eq!(payload(&consumer), u64::from(header.imm) * 10);
                    consumer.pop();
                    consumer.publish();
                    if header.imm == MESSAGES {
                        return taken;
                    }
                    taken.push(header.imm);
                }
            });
            for imm in 0..MESSAGES {
                let offered = loop {
                    match producer.free().unwrap() {
                        0 => std::hint::spin_loop(),
                        _ => break offer(&mut producer, imm),
                    }
                };
                (0..imm % 64).for_each(|_| std::hint::spin_loop());
                if producer.withdraw(offered) {
                    back.push(imm);
                }
            }
            while producer.free().unwrap() == 0 {
                std::hint::spin_loop();
            }
            let slot = producer.reserve().unwrap();
            slot.put_word(0, u64::from(MESSAGES) * 10);
            slot.commit(&header(MESSAGES));
            taking.join().unwrap()
        });
        let mut all = [&back[..], &taken[..]].concat();
        all.sort_unstable();
        assert!(all.iter().copied().eq(0..MESSAGES), "{} and {}", back.len(), taken.len());
        assert!(taken.is_sorted());
    }
}
