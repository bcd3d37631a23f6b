//! The sending half of a connection: messages in fragments, each sent again until it is acknowledged.

use std::collections::VecDeque;

use super::packet::{Fragment, What};
use crate::fabric::{Local, Remote};

/// Fragments that may be under way: as many as an acknowledgement tells apart, and the oldest.
pub(super) const WINDOW: u64 = 64;
/// The window of a new connection, and the smallest.
const FIRST_WINDOW: u64 = 16;
const LEAST_WINDOW: u64 = 2;
/// The shortest and the longest time until a fragment is sent again. The shortest is longer than a receiver
/// delays acknowledgements.
const LEAST_RTO_NS: u64 = 10_000_000;
const MOST_RTO_NS: u64 = 1_000_000_000;
/// Before the round trip is known.
const FIRST_RTO_NS: u64 = 50_000_000;
/// A fragment counts as lost when one so many later has come (RFC 5681: three duplicates).
const REORDERED: u64 = 3;

/// Where the bytes of a message are until it is acknowledged.
#[derive(Debug)]
pub(super) enum Source {
    None,
    Copy(Box<[u8]>),
    Buffer(u32),
    /// Memory of this process.
    Local(Local),
    /// Memory of this process that a peer reads.
    Shown(Remote),
}

/// A message that is not acknowledged yet.
#[derive(Debug)]
pub(super) struct Message {
    pub(super) what: What,
    pub(super) source: Source,
    pub(super) len: u32,
    pub(super) addr: u64,
    pub(super) key: u32,
    pub(super) read: u32,
    /// What is reported when it is acknowledged.
    pub(super) notify: Option<u64>,
    /// The number of its first fragment.
    first: u64,
    fragments: u64,
}

impl Message {
    pub(super) fn new(what: What, source: Source, len: u32, notify: Option<u64>) -> Self {
        Self { what, source, len, addr: 0, key: 0, read: 0, notify, first: 0, fragments: 1 }
    }
}

/// A fragment that was sent and is not acknowledged.
#[derive(Clone, Copy, Debug)]
struct Sent {
    at: u64,
    /// It was sent more than once: its acknowledgement tells nothing of the round trip.
    is_again: bool,
    has_come: bool,
    is_lost: bool,
}

#[derive(Debug)]
pub(super) struct Sender {
    /// Messages that may wait, beyond which the connection counts as full.
    most: usize,
    /// Bytes of payload in a fragment.
    piece: u32,
    messages: VecDeque<Message>,
    /// Answers to reads among them.
    pub(super) answers: usize,
    /// The oldest fragment that is not acknowledged, the next new one, and the end of all messages.
    oldest: u64,
    next: u64,
    end: u64,
    sent: VecDeque<Sent>,
    window: u64,
    threshold: u64,
    /// Losses below this number have made the window smaller already.
    recover: u64,
    /// Acknowledged fragments since the window grew.
    grown: u64,
    round_trip: Option<(u64, u64)>,
    rto: u64,
    /// Fragments that were sent again.
    pub(super) resent: u64,
}

impl Sender {
    /// Fragments have `piece` bytes at most, and `most` messages may wait.
    pub(super) fn new(piece: usize, most: usize) -> Self {
        Self {
            most,
            piece: piece.max(1) as u32,
            messages: VecDeque::new(),
            answers: 0,
            oldest: 0,
            next: 0,
            end: 0,
            sent: VecDeque::new(),
            window: FIRST_WINDOW,
            threshold: WINDOW,
            recover: 0,
            grown: 0,
            round_trip: None,
            rto: FIRST_RTO_NS,
            resent: 0,
        }
    }

    /// Has a message wait its turn; whether there is room.
    pub(super) fn push(&mut self, mut message: Message) -> bool {
        if self.messages.len() >= self.most {
            return false;
        }
        let carried = if message.what == What::Read { 0 } else { message.len };
        message.first = self.end;
        message.fragments = u64::from(carried.div_ceil(self.piece).max(1));
        self.end += message.fragments;
        self.answers += usize::from(message.what == What::Answer);
        self.messages.push_back(message);
        true
    }

    /// The number of the fragment that is to be sent now, if one is.
    fn due(&self) -> Option<u64> {
        if let Some(lost) = self.sent.iter().position(|sent| sent.is_lost) {
            return Some(self.oldest + lost as u64);
        }
        let most = self.window.min(WINDOW);
        (self.next < self.end && self.next - self.oldest < most).then_some(self.next)
    }

    /// Whether a fragment is to be sent now.
    pub(super) fn has_due(&self) -> bool {
        self.due().is_some()
    }

    /// Takes the fragment that is to be sent now: its number, its head, where its message is, and how many
    /// bytes of that it carries.
    pub(super) fn take_due(&mut self, now: u64) -> Option<(u32, Fragment, &Source, u32)> {
        let seq = self.due()?;
        if seq == self.next {
            self.next += 1;
            self.sent.push_back(Sent { at: now, is_again: false, has_come: false, is_lost: false });
        } else {
            let sent = &mut self.sent[(seq - self.oldest) as usize];
            *sent = Sent { at: now, is_again: true, is_lost: false, ..*sent };
            self.resent += 1;
        }
        let after = self.messages.partition_point(|message| message.first <= seq);
        let message = self.messages.get(after.checked_sub(1)?)?;
        let offset = (seq - message.first) as u32 * self.piece;
        let carried = if message.what == What::Read { 0 } else { message.len };
        let &Message { what, len, addr, key, read, .. } = message;
        let fragment = Fragment { what, len, offset, addr, key, read };
        Some((seq as u32, fragment, &message.source, (carried - offset).min(self.piece)))
    }

    /// Takes in an acknowledgement. The numbers to be reported of messages that are acknowledged go to
    /// `done`. Whether it is one that a receiver sends.
    pub(super) fn acknowledge(
        &mut self,
        ack: u32,
        later: u64,
        now: u64,
        mut done: impl FnMut(u64),
    ) -> bool {
        let ahead = i64::from(ack.wrapping_sub(self.oldest as u32).cast_signed());
        if ahead < 0 {
            // An old one, which was overtaken.
            return true;
        }
        let ack = self.oldest + ahead.unsigned_abs();
        if ack > self.next {
            return false;
        }
        let mut newest = None;
        let advanced = ack > self.oldest;
        while self.oldest < ack {
            let Some(sent) = self.sent.pop_front() else { break };
            self.oldest += 1;
            newest = (!sent.is_again && !sent.has_come).then_some(sent.at).or(newest);
            self.grow();
        }
        while let Some(message) = self.messages.front()
            && message.first + message.fragments <= self.oldest
        {
            message.notify.into_iter().for_each(&mut done);
            self.answers -= usize::from(message.what == What::Answer);
            self.messages.pop_front();
        }
        self.note_later(later);
        if let Some(at) = newest {
            self.measure(now.saturating_sub(at));
        } else if advanced {
            self.rto = self.rto_of_round_trip();
        }
        true
    }

    /// Notes fragments that have come after a gap, and counts those before them as lost.
    fn note_later(&mut self, later: u64) {
        let mut highest = None;
        for bit in (0..WINDOW).filter(|bit| later >> bit & 1 == 1) {
            if let Some(sent) = self.sent.get_mut(bit as usize + 1) {
                (sent.has_come, sent.is_lost) = (true, false);
                highest = Some(bit + 1);
            }
        }
        let Some(highest) = highest else { return };
        let mut is_lossy = false;
        for (place, sent) in (0..highest).zip(&mut self.sent) {
            // One that was sent again waits for its time.
            if place + REORDERED <= highest && !sent.has_come && !sent.is_again && !sent.is_lost {
                (sent.is_lost, is_lossy) = (true, true);
            }
        }
        if is_lossy {
            self.shrink(self.window / 2);
        }
    }

    fn grow(&mut self) {
        self.grown += 1;
        if self.window < self.threshold || self.grown >= self.window {
            self.grown = 0;
            self.window = (self.window + 1).min(WINDOW);
        }
    }

    /// Makes the window smaller, once for all losses of a window.
    fn shrink(&mut self, to: u64) {
        if self.oldest >= self.recover {
            self.recover = self.next;
            self.window = to.max(LEAST_WINDOW);
            self.threshold = self.window;
        }
    }

    /// The round trip and its deviation (RFC 6298).
    fn measure(&mut self, sample: u64) {
        self.round_trip = Some(match self.round_trip {
            None => (sample, sample / 2),
            Some((mean, deviation)) => {
                let differs = mean.abs_diff(sample);
                ((7 * mean + sample) / 8, (3 * deviation + differs) / 4)
            }
        });
        self.rto = self.rto_of_round_trip();
    }

    fn rto_of_round_trip(&self) -> u64 {
        let time = self.round_trip.map_or(FIRST_RTO_NS, |(mean, deviation)| mean + 4 * deviation);
        time.clamp(LEAST_RTO_NS, MOST_RTO_NS)
    }

    /// When the oldest fragment counts as lost.
    pub(super) fn deadline(&self) -> Option<u64> {
        self.sent.front().filter(|sent| !sent.is_lost).map(|sent| sent.at.saturating_add(self.rto))
    }

    /// The oldest fragment was not acknowledged in time.
    pub(super) fn expire(&mut self, now: u64) {
        if self.deadline().is_none_or(|at| at > now) {
            return;
        }
        if let Some(sent) = self.sent.front_mut() {
            sent.is_lost = true;
        }
        self.rto = (2 * self.rto).min(MOST_RTO_NS);
        self.shrink(self.window / 2);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: u64 = 1_000_000;

    fn sender(messages: u64) -> Sender {
        let mut sender = Sender::new(100, 1000);
        for number in 0..messages {
            let source = Source::Copy(vec![number as u8; 10].into());
            assert!(sender.push(Message::new(What::Send, source, 10, Some(number))));
        }
        sender
    }

    fn send_all(sender: &mut Sender, now: u64) -> Vec<u32> {
        std::iter::from_fn(|| sender.take_due(now).map(|due| due.0)).collect()
    }

    #[test]
    fn a_message_is_done_when_all_its_fragments_are_acknowledged() {
        let mut sender = sender(0);
        let local = Local { addr: 0, len: 250, key: 1 };
        sender.push(Message::new(What::Write, Source::Local(local), 250, Some(7)));
        sender.push(Message::new(What::Read, Source::None, 250, Some(8)));
        let mut seen = Vec::new();
        while let Some((seq, fragment, _, len)) = sender.take_due(0) {
            seen.push((seq, fragment.offset, len));
        }
        assert_eq!(seen, [(0, 0, 100), (1, 100, 100), (2, 200, 50), (3, 0, 0)]);
        let mut done = Vec::new();
        assert!(sender.acknowledge(2, 0, MS, |number| done.push(number)));
        assert!(sender.acknowledge(4, 0, MS, |number| done.push(number)));
        assert_eq!((done, sender.oldest), (vec![7, 8], sender.end));
        assert!(!sender.acknowledge(5, 0, MS, |_| ()), "nobody has sent so much");
        assert!(sender.acknowledge(3, 0, MS, |_| ()), "an old one is harmless");
    }

    #[test]
    fn a_gap_is_filled_at_once_and_silence_after_a_time_that_doubles() {
        let mut sender = sender(16);
        assert_eq!(send_all(&mut sender, 0).len(), 16);
        sender.acknowledge(0, 0b111, 2 * MS, |_| ());
        assert_eq!(send_all(&mut sender, 2 * MS), [0]);
        sender.acknowledge(0, 0b1111, 3 * MS, |_| ());
        assert_eq!(send_all(&mut sender, 3 * MS), [0; 0], "it is under way again");
        sender.acknowledge(5, 0, 4 * MS, |_| ());
        let mut waits = Vec::new();
        for _ in 0..3 {
            let at = sender.deadline().unwrap();
            sender.expire(at - 1);
            assert!(!sender.has_due());
            sender.expire(at);
            assert_eq!(send_all(&mut sender, at), [5]);
            waits.push(sender.deadline().unwrap() - at);
        }
        assert_eq!((waits[1], waits[2]), (2 * waits[0], 4 * waits[0]));
        assert_eq!(sender.window, 8);
    }

    #[test]
    fn no_more_is_under_way_than_the_window() {
        let mut sender = sender(300);
        let mut acknowledged = 0;
        let mut most = 0;
        while sender.oldest < sender.end {
            most = most.max(send_all(&mut sender, 0).len());
            acknowledged = sender.next as u32;
            sender.acknowledge(acknowledged, 0, 0, |_| ());
        }
        assert_eq!((acknowledged, most), (300, WINDOW as usize));
    }
}
