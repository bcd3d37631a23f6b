//! Both ends of a slot ring in one thread.

use super::*;
use crate::segment::Segment;

pub(super) fn ring(slots: u32, start: u32) -> (SlotProducer, SlotConsumer, Segment) {
    let segment = Segment::heap(256 + slots as usize * SLOT_LEN);
    let words = segment.words(256, slots as usize * SLOT_WORDS).unwrap();
    let word = |offset| segment.u32_at(offset).unwrap();
    word(0).store(start, Ordering::Relaxed);
    let mut producer = SlotProducer::new(words.clone(), slots, word(0), word(128));
    let mut consumer = SlotConsumer::new(words, slots, word(0), word(128));
    (producer.tail, producer.consumed) = (start, start);
    (consumer.head, consumer.published) = (start, start);
    (producer, consumer, segment)
}

#[test]
fn a_backlog_lasts_from_a_pop_to_a_look_in_vain() {
    let (mut producer, mut consumer, _segment) = ring(4, 0);
    let push = |producer: &mut SlotProducer| producer.push(&SlotHeader::default(), &[]);
    push(&mut producer).unwrap();
    assert!(consumer.is_filled() && !consumer.has_backlog(), "it was waited for");
    push(&mut producer).unwrap();
    for _ in 0..2 {
        assert!(consumer.peek().is_some());
        consumer.pop();
        assert!(consumer.has_backlog());
    }
    assert!(!consumer.is_filled() && !consumer.has_backlog());
}

#[test]
fn header_and_payload_arrive_as_they_were_sent() {
    let (mut producer, mut consumer, segment) = ring(4, 0);
    assert_eq!(consumer.peek(), None);
    let header = SlotHeader {
        opcode: 1,
        flags: 2,
        inline_len: 5,
        length: 4,
        imm: 0xdead_beef,
        raddr: u64::MAX - 1,
        rkey: 7,
        ack: 8,
    };
    producer.push(&header, b"quipu").unwrap();
    assert_eq!(consumer.peek(), Some(header));
    let mut out = [0; 5];
    consumer.payload().read_into(0, &mut out);
    assert_eq!(&out, b"quipu");
    // The layout that the module promises, byte by byte.
    let mut raw = [0; 37];
    segment.read(256, &mut raw).unwrap();
    assert_eq!(raw[..4], 1u32.to_ne_bytes());
    assert_eq!(raw[4..8], [1, 2, 5, 0]);
    assert_eq!(raw[12..16], 0xdead_beef_u32.to_ne_bytes());
    assert_eq!(&raw[32..], b"quipu");
    consumer.pop();
    assert_eq!(consumer.peek(), None);
    assert_eq!(producer.push(&header, &[0; 97]), Err(RingError::TooLong));
}

#[test]
fn payloads_of_every_length_are_put_whole() {
    let (mut producer, mut consumer, _segment) = ring(4, 0);
    let bytes: Vec<u8> = (1..=INLINE_MAX as u8).collect();
    for len in 0..=INLINE_MAX {
        let slot = producer.reserve().unwrap();
        slot.put(&bytes[..len]);
        slot.commit(&SlotHeader { inline_len: len as u16, ..Default::default() });
        assert_eq!(consumer.peek().map(|header| usize::from(header.inline_len)), Some(len));
        let mut payload = vec![0; len];
        consumer.payload().read_into(0, &mut payload);
        assert_eq!(payload, bytes[..len]);
        consumer.pop();
    }
}

#[test]
fn what_is_held_back_is_seen_at_once_and_in_order() {
    let (mut producer, mut consumer, _segment) = ring(4, 0);
    let header = |imm| SlotHeader { imm, inline_len: 16, ..Default::default() };
    let hold = |producer: &mut SlotProducer, imm: u32| {
        let slot = producer.reserve().unwrap();
        (0..2).for_each(|index| slot.put_word(index, u64::from(10 * imm) + index as u64));
        slot.hold(&header(imm));
    };
    for imm in 0..3 {
        hold(&mut producer, imm);
        assert_eq!((consumer.peek(), producer.position()), (None, imm + 1));
    }
    assert_eq!(producer.free(), Ok(1), "they take their room");
    producer.show();
    let mut take = |imm: u32| {
        assert_eq!(consumer.peek(), Some(header(imm)));
        let mut payload = [0; 16];
        consumer.payload().read_into(0, &mut payload);
        let words = [0, 1].map(|index| 10 * u64::from(imm) + index);
        assert_eq!(payload.as_chunks().0, &words.map(u64::to_ne_bytes)[..]);
        consumer.pop();
    };
    (0..3).for_each(&mut take);
    // What is pushed as usual lets go what was held back.
    hold(&mut producer, 3);
    producer.show();
    producer.show();
    take(3);
    consumer.publish();
    hold(&mut producer, 4);
    producer.push(&header(5), &[]).unwrap();
    assert_eq!(consumer.peek(), Some(header(4)));
    consumer.pop();
    assert_eq!(consumer.peek().map(|header| header.imm), Some(5));
}

#[test]
fn a_full_ring_takes_more_only_after_publish() {
    let (mut producer, mut consumer, _segment) = ring(8, 0);
    for i in 0..8 {
        producer.push(&SlotHeader { imm: i, ..Default::default() }, &[]).unwrap();
    }
    assert_eq!(producer.push(&SlotHeader::default(), &[]), Err(RingError::Full));
    assert_eq!(consumer.peek().unwrap().imm, 0);
    consumer.pop();
    assert_eq!(producer.free(), Ok(0));
    consumer.publish();
    assert_eq!(producer.free(), Ok(1));
    for _ in 0..4 {
        consumer.peek().unwrap();
        consumer.pop();
    }
    assert_eq!(producer.free(), Ok(5), "half a ring is published without being asked");
}

#[test]
fn positions_and_tags_survive_the_wrap_of_the_counter() {
    let (mut producer, mut consumer, _segment) = ring(2, u32::MAX - 4);
    for i in 0..20 {
        assert_eq!(consumer.peek(), None);
        producer.push(&SlotHeader { imm: i, ..Default::default() }, &[]).unwrap();
        assert_eq!(consumer.peek().unwrap().imm, i);
        consumer.pop();
        consumer.publish();
    }
    assert_eq!(producer.position(), 15);
}

#[test]
fn a_consumer_that_lies_is_found_out() {
    let (mut producer, _consumer, segment) = ring(4, 10);
    let word = segment.u32_at(0).unwrap();
    for lie in [11, 9, u32::MAX, 10u32.wrapping_sub(1 << 31)] {
        word.store(lie, Ordering::Relaxed);
        assert_eq!(producer.free(), Err(RingError::Corrupt));
    }
    word.store(10, Ordering::Relaxed);
    assert_eq!(producer.free(), Ok(4));
}

#[test]
fn an_inline_length_beyond_the_slot_is_cut() {
    let (mut producer, mut consumer, _segment) = ring(4, 0);
    let header = SlotHeader { inline_len: 60_000, ..Default::default() };
    producer.reserve().unwrap().commit(&header);
    assert_eq!(consumer.peek().unwrap().inline_len, 96);
}
