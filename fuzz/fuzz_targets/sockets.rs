//! The words of a raised connection, which a hostile peer writes, and the messages of a meeting. Nothing
//! may name octets outside of a ring, run for ever or panic.
#![no_main]

use std::cell::{Cell, RefCell};

use libfuzzer_sys::fuzz_target;
use quipu_sockets::greeting::{Answer, Offer, Pair};
use quipu_sockets::report::Row;
use quipu_sockets::{Look, Pieces, Receiver, Room, Sender, Shared, Withdrawal, Word};

const RING: usize = 64;

/// Words that change whenever they are read, as the input says.
struct Hostile<'a> {
    words: [Cell<u64>; 5],
    input: RefCell<&'a [u8]>,
}

impl Hostile<'_> {
    fn byte(&self) -> Option<u8> {
        let mut input = self.input.borrow_mut();
        let (first, rest) = input.split_first()?;
        *input = rest;
        Some(*first)
    }

    /// The peer may write a word now.
    fn disturb(&self) {
        let Some(what) = self.byte().filter(|what| *what >= 128) else { return };
        let value = match what & 3 {
            0 => u64::from(self.byte().unwrap_or(0)),
            1 => u64::from(self.byte().unwrap_or(0)) << 2 | 2,
            2 => u64::from(self.byte().unwrap_or(0)) << 10,
            _ => u64::MAX - u64::from(self.byte().unwrap_or(0)),
        };
        self.words[usize::from(what >> 2) % 5].set(value);
    }
}

impl Shared for Hostile<'_> {
    fn load(&self, word: Word) -> u64 {
        self.disturb();
        self.words[word as usize].get()
    }
    fn store(&self, word: Word, value: u64) {
        self.words[word as usize].set(value);
    }
    fn swap(&self, word: Word, old: u64, new: u64) -> bool {
        self.disturb();
        let is_old = self.words[word as usize].get() == old;
        if is_old {
            self.words[word as usize].set(new);
        }
        is_old
    }
    fn add(&self, word: Word, value: u64) {
        let word = &self.words[word as usize];
        word.set(word.get().wrapping_add(value));
    }
    fn mask(&self, word: Word, mask: u64) {
        let word = &self.words[word as usize];
        word.set(word.get() & mask);
    }
}

fn is_inside(pieces: Pieces) {
    let mut len = 0;
    for (offset, part) in pieces.iter() {
        assert!(offset + part <= RING, "{offset} and {part} octets");
        len += part;
    }
    assert_eq!(len, pieces.len);
}

fuzz_target!(|data: &[u8]| {
    let pair = Pair { own: 1, peer: 2 };
    let _ = (Offer::decode(data, pair), Answer::decode(data));
    if let Ok(text) = std::str::from_utf8(data) {
        let _ = Row::decode(text);
    }
    let memory = Hostile { words: Default::default(), input: RefCell::new(data) };
    let (sender, receiver) = (Sender::new(&memory, RING), Receiver::new(&memory, RING));
    let mut sent = 0;
    while let Some(what) = memory.byte() {
        match what % 8 {
            0 => match sender.room(sent, what & 8 == 0) {
                Room::Ring { head, pieces } => {
                    is_inside(pieces);
                    if sender.publish(head, pieces.len) {
                        sent += pieces.len as u64;
                    }
                }
                Room::Tcp => sent += u64::from(what),
                Room::Full | Room::Fault => {}
            },
            1 => {
                if let Withdrawal::Octets { from, pieces } = sender.withdraw() {
                    is_inside(pieces);
                    sender.finish_withdrawal(from, pieces.len.min(usize::from(what)));
                }
            }
            2 | 3 => {
                if let Look::Ring { ticket, pieces } = receiver.look() {
                    is_inside(pieces);
                    let _ = receiver.take(ticket, pieces.len);
                }
            }
            4 => receiver.consent(),
            5 => {
                let _ = receiver.revoke();
            }
            6 => receiver.account(usize::from(what)),
            _ => {
                receiver.wish(u64::from(what) % 3);
                receiver.tcp_has_ended();
                assert!(receiver.unread() <= RING as u64);
            }
        }
    }
});
