//! The send queue: how much stream there is, what of it is on the way, and what became of it.
//!
//! No payload is kept: the user has it, in registered memory, and reads it again for a retransmission. What
//! is kept is a record for each segment on the way, so a retransmission has the boundaries of the original
//! (`specs/qpip.md`).

use std::collections::VecDeque;

use quipu_wire::tcp::SeqNumber;

use super::seq::{FIRST, SeqSpace};

/// The most segments on the way: bounds memory, and the work that a SACK can cause.
pub(crate) const MAX_FLIGHT: usize = 8192;

/// What became of a segment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fate {
    /// On the way, as far as one knows.
    Flying,
    /// Received out of order (RFC 2018).
    Sacked,
    /// To be sent again.
    Lost,
}

/// A segment that was sent and is not cumulatively acknowledged.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Sent {
    pub(crate) start: u64,
    /// When it was last sent.
    pub(crate) at: u64,
    /// Sequence numbers that it takes, SYN and FIN included.
    pub(crate) len: u32,
    pub(crate) fate: Fate,
    pub(crate) retransmitted: bool,
    pub(crate) push: bool,
    pub(crate) fin: bool,
}

impl Sent {
    #[inline]
    pub(crate) fn end(&self) -> u64 {
        self.start + u64::from(self.len)
    }
}

#[derive(Clone, Debug)]
pub(crate) struct SendQueue {
    pub(crate) space: SeqSpace,
    /// SND.UNA.
    pub(crate) una: u64,
    /// SND.NXT.
    pub(crate) nxt: u64,
    /// Behind the last octet that the user has given.
    pub(crate) written: u64,
    /// The user has closed: a FIN follows the last octet.
    pub(crate) closed: bool,
    /// Ends of messages not yet sent, in message mode.
    ends: VecDeque<u64>,
    /// From `una` to `nxt`, without gaps.
    sent: VecDeque<Sent>,
    /// Octets of each fate.
    flying: u64,
    sacked: u64,
    lost: u64,
    /// Nothing before it is [`Fate::Lost`].
    lost_from: u64,
    /// Nothing before it is [`Fate::Flying`].
    flying_from: u64,
}

impl SendQueue {
    pub(crate) fn new(initial: SeqNumber) -> Self {
        Self {
            space: SeqSpace { initial },
            una: 0,
            nxt: 0,
            written: FIRST,
            closed: false,
            ends: VecDeque::new(),
            sent: VecDeque::new(),
            flying: 0,
            sacked: 0,
            lost: 0,
            lost_from: 0,
            flying_from: 0,
        }
    }

    /// Everything has been sent and acknowledged that there is, a FIN aside.
    pub(crate) fn is_idle(&self) -> bool {
        self.sent.is_empty() && !self.has_unsent()
    }

    /// Whether data, or a FIN, was never sent.
    #[inline]
    pub(crate) fn has_unsent(&self) -> bool {
        self.nxt < self.end()
    }

    /// Behind the last number that can be sent: the FIN's, if the user has closed.
    #[inline]
    pub(crate) fn end(&self) -> u64 {
        self.written + u64::from(self.closed)
    }

    /// The FIN's position, once it was sent.
    pub(crate) fn fin_sent(&self) -> bool {
        self.closed && self.nxt == self.end()
    }

    pub(crate) fn sent(&self) -> &VecDeque<Sent> {
        &self.sent
    }

    /// Octets that are in the network: the pipe of RFC 6675.
    #[inline]
    pub(crate) fn flying(&self) -> u64 {
        self.flying
    }

    pub(crate) fn sacked(&self) -> u64 {
        self.sacked
    }

    #[cfg(test)]
    pub(crate) fn lost(&self) -> u64 {
        self.lost
    }

    /// SND.NXT - SND.UNA.
    #[inline]
    pub(crate) fn outstanding(&self) -> u64 {
        self.nxt - self.una
    }

    /// Adds `len` octets; `ends` with a boundary that must be kept.
    pub(crate) fn write(&mut self, len: u64, ends: bool) {
        self.written += len;
        if ends {
            self.ends.push_back(self.written);
        }
    }

    /// Messages that are not yet sent as a whole.
    pub(crate) fn unsent_messages(&self) -> usize {
        self.ends.len()
    }

    /// The end of the message that `nxt` is in.
    pub(crate) fn message_end(&self) -> Option<u64> {
        self.ends.front().copied()
    }

    /// Notes that `len` numbers from `nxt` were sent.
    pub(crate) fn push(&mut self, now: u64, len: u64, push: bool, fin: bool) {
        let segment = Sent {
            start: self.nxt,
            at: now,
            len: len as u32,
            fate: Fate::Flying,
            retransmitted: false,
            push,
            fin,
        };
        self.sent.push_back(segment);
        self.nxt += len;
        self.flying += len;
        while self.ends.front().is_some_and(|end| *end <= self.nxt) {
            self.ends.pop_front();
        }
    }

    fn of(&mut self, fate: Fate) -> &mut u64 {
        match fate {
            Fate::Flying => &mut self.flying,
            Fate::Sacked => &mut self.sacked,
            Fate::Lost => &mut self.lost,
        }
    }

    /// Takes off the front what is acknowledged up to `una`, which lies between `self.una` and `nxt`; tells
    /// `see` of each segment, or part of one.
    pub(crate) fn acknowledge(&mut self, una: u64, mut see: impl FnMut(&Sent)) {
        while let Some(first) = self.sent.front_mut() {
            let end = first.end();
            if end <= una {
                let first = *first;
                self.sent.pop_front();
                *self.of(first.fate) -= u64::from(first.len);
                see(&first);
                continue;
            }
            if first.start < una {
                // A part of a segment: the rest keeps its record.
                let part = (una - first.start) as u32;
                first.start = una;
                first.len -= part;
                let acknowledged = Sent { start: una - u64::from(part), len: part, ..*first };
                *self.of(acknowledged.fate) -= u64::from(part);
                see(&acknowledged);
            }
            break;
        }
        self.una = una;
    }

    /// Octets of memory behind it.
    pub(crate) fn memory(&self) -> usize {
        self.sent.capacity() * size_of::<Sent>() + self.ends.capacity() * size_of::<u64>()
    }

    /// Gives memory back that is not in use.
    pub(crate) fn trim(&mut self) {
        if self.sent.is_empty() {
            self.sent.shrink_to_fit();
        }
        if self.ends.is_empty() {
            self.ends.shrink_to_fit();
        }
    }

    /// The part of `from..to` that whole segments make up; empty if there is none.
    pub(crate) fn whole(&self, from: u64, to: u64) -> (u64, u64) {
        let first = self.sent.partition_point(|sent| sent.start < from);
        let behind = self.sent.partition_point(|sent| sent.end() <= to);
        match (self.sent.get(first), behind.checked_sub(1).and_then(|last| self.sent.get(last))) {
            (Some(first), Some(last)) if first.start < last.end() => (first.start, last.end()),
            _ => (to, to),
        }
    }

    /// Marks the segments that lie within `from..to` as received out of order; tells `see` of each that was
    /// not before. A segment that is covered in part stays as it is.
    pub(crate) fn sack(&mut self, from: u64, to: u64, mut see: impl FnMut(&Sent)) {
        let first = self.sent.partition_point(|sent| sent.start < from);
        for index in first..self.sent.len() {
            let sent = self.sent[index];
            if sent.end() > to {
                break;
            }
            if sent.fate != Fate::Sacked {
                self.set_fate(index, Fate::Sacked);
                see(&sent);
            }
        }
    }

    pub(crate) fn set_fate(&mut self, index: usize, fate: Fate) {
        let sent = &mut self.sent[index];
        let (before, len, start) = (sent.fate, u64::from(sent.len), sent.start);
        sent.fate = fate;
        *self.of(before) -= len;
        *self.of(fate) += len;
        match fate {
            Fate::Lost => self.lost_from = self.lost_from.min(start),
            Fate::Flying => self.flying_from = self.flying_from.min(start),
            Fate::Sacked => {}
        }
    }

    /// After a timeout everything counts as lost that was not reported; and that too if the receiver has
    /// taken back what it reported, as RFC 2018 8 lets it: its first missing octet is then one that it once
    /// had.
    pub(crate) fn lose_all(&mut self) {
        let reneged = self.sent.front().is_some_and(|head| head.fate == Fate::Sacked);
        for index in 0..self.sent.len() {
            if reneged || self.sent[index].fate == Fate::Flying {
                self.set_fate(index, Fate::Lost);
            }
        }
        self.lost_from = self.una;
    }

    /// What flies and was sent by `at` is lost, and the rest is not; says whether anything is.
    pub(crate) fn lose_until(&mut self, at: u64) -> bool {
        let mut any = false;
        for index in 0..self.sent.len() {
            let sent = &self.sent[index];
            if sent.fate == Fate::Flying && sent.at <= at {
                self.set_fate(index, Fate::Lost);
                any = true;
            }
        }
        self.lost_from = self.una;
        any
    }

    /// A timeout was spurious: what waits to be sent again is still on the way.
    pub(crate) fn unlose(&mut self) {
        self.unlose_if(|_| true);
    }

    /// Segments of that kind are on the way, and not lost.
    pub(crate) fn unlose_if(&mut self, flies: impl Fn(&Sent) -> bool) {
        for index in 0..self.sent.len() {
            if self.sent[index].fate == Fate::Lost && flies(&self.sent[index]) {
                self.set_fate(index, Fate::Flying);
            }
        }
    }

    /// The first segment that is on the way, or the end.
    pub(crate) fn first_flying(&mut self) -> usize {
        if self.flying == 0 {
            self.flying_from = self.nxt;
            return self.sent.len();
        }
        let index = self.first_of(Fate::Flying, self.flying_from);
        self.flying_from = self.sent.get(index).map_or(self.nxt, |sent| sent.start);
        index
    }

    /// The first segment behind `from` with that fate, or the end.
    fn first_of(&self, fate: Fate, from: u64) -> usize {
        let first = self.sent.partition_point(|sent| sent.end() <= from);
        let behind = self.sent.range(first..).position(|sent| sent.fate == fate);
        behind.map_or(self.sent.len(), |behind| first + behind)
    }

    /// Whether any segment is lost.
    #[inline]
    pub(crate) fn has_lost(&self) -> bool {
        self.lost > 0
    }

    /// The first segment that is lost.
    pub(crate) fn next_lost(&mut self) -> Option<usize> {
        if self.lost == 0 {
            self.lost_from = self.nxt;
            return None;
        }
        let index = self.first_of(Fate::Lost, self.lost_from);
        self.lost_from = self.sent.get(index)?.start;
        Some(index)
    }

    /// Notes that a segment goes out again, at most `max` octets of it: the path may have become narrower,
    /// and the rest then is a segment of its own.
    pub(crate) fn resend(&mut self, index: usize, now: u64, max: u32) -> Sent {
        self.set_fate(index, Fate::Flying);
        let sent = self.sent[index];
        let payload = sent.len - u32::from(sent.fin);
        if payload > max && sent.start >= FIRST {
            self.split(index, max);
        }
        let sent = &mut self.sent[index];
        sent.at = now;
        sent.retransmitted = true;
        *sent
    }

    fn split(&mut self, index: usize, at: u32) {
        let whole = self.sent[index];
        let rest = Sent { start: whole.start + u64::from(at), len: whole.len - at, ..whole };
        self.sent.insert(index + 1, rest);
        self.set_fate(index + 1, Fate::Lost);
        let first = &mut self.sent[index];
        (first.len, first.push, first.fin) = (at, false, false);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Five segments of 100 octets behind an acknowledged SYN.
    fn five() -> SendQueue {
        let mut queue = SendQueue::new(SeqNumber(7));
        queue.push(0, 1, false, false);
        queue.acknowledge(1, |_| {});
        queue.write(500, false);
        for n in 0..5 {
            queue.push(n, 100, false, false);
        }
        queue
    }

    fn check(queue: &SendQueue) {
        let (mut flying, mut sacked, mut lost, mut at) = (0, 0, 0, queue.una);
        for sent in queue.sent() {
            assert_eq!(sent.start, at, "no gaps");
            at = sent.end();
            *match sent.fate {
                Fate::Flying => &mut flying,
                Fate::Sacked => &mut sacked,
                Fate::Lost => &mut lost,
            } += u64::from(sent.len);
        }
        assert_eq!(at, queue.nxt);
        assert_eq!((flying, sacked, lost), (queue.flying(), queue.sacked(), queue.lost()));
    }

    #[test]
    fn acknowledged_in_part() {
        let mut queue = five();
        let mut seen = Vec::new();
        queue.acknowledge(151, |sent| seen.push((sent.start, sent.len)));
        assert_eq!(seen, [(1, 100), (101, 50)]);
        check(&queue);
        assert_eq!((queue.flying(), queue.sent()[0].start), (350, 151));
    }

    #[test]
    fn reported_once_and_only_whole() {
        let mut queue = five();
        let mut seen = 0;
        queue.sack(150, 401, |_| seen += 1);
        queue.sack(201, 450, |_| seen += 1);
        assert_eq!((seen, queue.sacked()), (2, 200));
        check(&queue);
    }

    #[test]
    fn lost_and_sent_again_in_smaller_pieces() {
        let mut queue = five();
        queue.lose_all();
        check(&queue);
        let index = queue.next_lost().unwrap();
        let sent = queue.resend(index, 9, 60);
        assert_eq!((sent.start, sent.len, sent.at, sent.retransmitted), (1, 60, 9, true));
        check(&queue);
        let index = queue.next_lost().unwrap();
        assert_eq!(queue.resend(index, 9, 60).start, 61, "the rest is next");
        assert_eq!(queue.sent().len(), 6);
        queue.unlose();
        assert_eq!(queue.next_lost(), None);
        check(&queue);
    }

    #[test]
    fn the_first_on_the_way_is_found_whatever_became_of_those_before() {
        let mut queue = five();
        let naive = |queue: &SendQueue| {
            let first = queue.sent().iter().position(|sent| sent.fate == Fate::Flying);
            first.unwrap_or(queue.sent().len())
        };
        assert_eq!(queue.first_flying(), 0);
        let steps: [fn(&mut SendQueue); 9] = [
            |queue| queue.set_fate(0, Fate::Lost),
            |queue| queue.sack(101, 301, |_| {}),
            |queue| assert!(queue.resend(0, 1, 60).retransmitted),
            |queue| queue.set_fate(0, Fate::Sacked),
            |queue| queue.acknowledge(150, |_| {}),
            |queue| queue.lose_all(),
            |queue| queue.push(2, 10, false, false),
            |queue| queue.unlose(),
            |queue| queue.acknowledge(queue.nxt, |_| {}),
        ];
        for step in steps {
            step(&mut queue);
            assert_eq!(queue.first_flying(), naive(&queue));
        }
    }

    #[test]
    fn reports_outlive_a_timeout_unless_they_are_taken_back() {
        let mut queue = five();
        queue.sack(201, 401, |_| {});
        queue.lose_all();
        check(&queue);
        assert_eq!((queue.sacked(), queue.lost()), (200, 300));
        queue.acknowledge(201, |_| {});
        queue.lose_all();
        check(&queue);
        assert_eq!((queue.sacked(), queue.lost()), (0, 300));
    }

    #[test]
    fn memory_goes_back_when_nothing_is_on_the_way() {
        let mut queue = five();
        queue.write(100 * 1000, false);
        (0..1000).for_each(|_| queue.push(0, 100, false, false));
        queue.trim();
        assert!(queue.sent.capacity() >= 1_000);
        queue.acknowledge(queue.nxt, |_| {});
        queue.trim();
        assert!(queue.sent.capacity() == 0 && queue.is_idle());
    }
}
