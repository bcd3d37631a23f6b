//! Two ends over a simulated connection that keeps order and delays, with bytes in rings, and rules
//! that a hostile peer breaks.

use std::collections::VecDeque;

use super::*;
use crate::rsocket::wire::LEAST_RECEIVES;
use proptest::prelude::*;

/// One end: its halves, its ring, and what is under way to it.
struct End {
    outgoing: Outgoing,
    incoming: Incoming,
    ring: Vec<u8>,
    /// Messages under way: what is said, and the data to be placed, with their place.
    arriving: VecDeque<(Message, usize, Vec<u8>)>,
    most_under_way: usize,
}

fn greeting(ring: u32, receives: u32) -> Greeting {
    Greeting { addr: 0, rkey: 0, ring, receives, mappings: 0 }
}

fn pair(a: Greeting, b: Greeting) -> [End; 2] {
    let end = |own: &Greeting, peer: &Greeting| End {
        outgoing: Outgoing::new(peer),
        incoming: Incoming::new(own),
        ring: vec![0; own.ring as usize],
        arriving: VecDeque::new(),
        most_under_way: 0,
    };
    [end(&a, &b), end(&b, &a)]
}

fn put(ends: &mut [End; 2], from: usize, message: Message, at: usize, data: Vec<u8>) {
    ends[from].outgoing.sent(message);
    let to = &mut ends[1 - from];
    to.arriving.push_back((message, at, data));
    to.most_under_way = to.most_under_way.max(to.arriving.len());
}

/// Sends what fits of `data`; how much.
fn send(ends: &mut [End; 2], from: usize, data: &[u8]) -> usize {
    let span = ends[from].outgoing.room();
    let len = span.len.min(data.len());
    if len > 0 {
        put(ends, from, Message::Data(len as u32), span.at, data[..len].to_vec());
    }
    len
}

/// Lets one message arrive.
fn deliver(ends: &mut [End; 2], to: usize) {
    let end = &mut ends[to];
    let Some((message, at, data)) = end.arriving.pop_front() else { return };
    end.ring[at..at + data.len()].copy_from_slice(&data);
    end.incoming.message(message, &mut end.outgoing).expect("an honest peer");
    tell(ends, to);
}

fn tell(ends: &mut [End; 2], from: usize) {
    while let Some(message) = ends[from].incoming.due()
        && ends[from].outgoing.may_tell()
    {
        ends[from].incoming.told(message);
        put(ends, from, message, 0, Vec::new());
    }
}

/// Reads at most `most` bytes.
fn receive(ends: &mut [End; 2], at: usize, most: usize) -> Vec<u8> {
    let end = &mut ends[at];
    let span = end.incoming.readable(0);
    let len = span.len.min(most);
    let data = end.ring[span.at..span.at + len].to_vec();
    end.incoming.take(len);
    tell(ends, at);
    data
}

proptest! {
    #[test]
    fn bytes_arrive_once_and_in_order_whatever_the_timing(
        rings in (1u32..200, 1u32..200),
        receives in (LEAST_RECEIVES..80, LEAST_RECEIVES..80),
        steps in prop::collection::vec((0usize..2, 0u8..4, 1usize..300), 1..400),
    ) {
        let mut ends = pair(greeting(rings.0, receives.0), greeting(rings.1, receives.1));
        let (mut sent, mut got) = ([0usize; 2], [0usize; 2]);
        let byte = |end: usize, count: usize| (count * 7 + end * 13 + count / 251) as u8;
        let mut check = |ends: &mut [End; 2], at: usize, most| {
            for value in receive(ends, at, most) {
                assert_eq!(value, byte(1 - at, got[at]));
                got[at] += 1;
            }
        };
        for (end, step, size) in steps {
            match step {
                0 | 1 => {
                    let fresh = sent[end]..sent[end] + size;
                    let data: Vec<u8> = fresh.map(|n| byte(end, n)).collect();
                    sent[end] += send(&mut ends, end, &data);
                }
                2 => deliver(&mut ends, end),
                _ => check(&mut ends, end, size),
            }
        }
        // In the end everything comes, and both may send again: nothing is stuck.
        for _ in 0..2000 {
            for end in [0, 1] {
                deliver(&mut ends, end);
                check(&mut ends, end, usize::MAX);
            }
        }
        for end in [0, 1] {
            prop_assert_eq!(sent[end], got[1 - end]);
            prop_assert!(ends[end].outgoing.room().len > 0, "stuck: {:?}", ends[end].outgoing);
        }
        // No message ever meets no receive.
        prop_assert!(ends[0].most_under_way <= receives.0 as usize);
        prop_assert!(ends[1].most_under_way <= receives.1 as usize);
    }
}

#[test]
fn the_end_comes_behind_the_data() {
    let mut ends = pair(greeting(10, 32), greeting(10, 32));
    assert_eq!(send(&mut ends, 0, b"abc"), 3);
    put(&mut ends, 0, Message::End, 0, Vec::new());
    deliver(&mut ends, 1);
    assert!(!ends[1].incoming.ended());
    deliver(&mut ends, 1);
    assert!(ends[1].incoming.ended());
    assert_eq!(receive(&mut ends, 1, 10), b"abc");
    // The other direction goes on.
    assert_eq!(send(&mut ends, 1, b"de"), 2);
}

#[test]
fn peers_that_break_the_rules_are_found_out() {
    let broken = |messages: &[Message]| {
        let [mut end, _] = pair(greeting(10, 32), greeting(10, 32));
        end.outgoing.sent(Message::Data(4));
        let mut last = Ok(());
        for message in messages {
            last = end.incoming.message(*message, &mut end.outgoing);
        }
        last
    };
    assert_eq!(broken(&[Message::Data(10)]), Ok(()));
    assert_eq!(broken(&[Message::Data(11)]), Err(Violation));
    assert_eq!(broken(&[Message::Data(6), Message::Data(5)]), Err(Violation));
    assert_eq!(broken(&[Message::End, Message::Data(1)]), Err(Violation));
    assert_eq!(broken(&[Message::BytesTaken(4), Message::MessagesTaken(1)]), Ok(()));
    assert_eq!(broken(&[Message::BytesTaken(5)]), Err(Violation));
    assert_eq!(broken(&[Message::BytesTaken(u32::MAX)]), Err(Violation));
    assert_eq!(broken(&[Message::BytesTaken(4), Message::BytesTaken(3)]), Err(Violation));
    assert_eq!(broken(&[Message::MessagesTaken(2)]), Err(Violation));
}

#[test]
fn reading_ahead_wraps_as_reading_does() {
    let mut ends = pair(greeting(10, 64), greeting(10, 64));
    send(&mut ends, 0, b"01234567");
    deliver(&mut ends, 1);
    receive(&mut ends, 1, 8);
    deliver(&mut ends, 0);
    assert_eq!(send(&mut ends, 0, b"abcd"), 2);
    assert_eq!(send(&mut ends, 0, b"cd"), 2);
    deliver(&mut ends, 1);
    deliver(&mut ends, 1);
    assert_eq!(ends[1].incoming.readable(0), Span { at: 8, len: 2 });
    assert_eq!(ends[1].incoming.readable(2), Span { at: 0, len: 2 });
    assert_eq!(ends[1].incoming.readable(3), Span { at: 1, len: 1 });
}
