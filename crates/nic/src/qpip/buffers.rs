//! The two buffers of a byte stream: what was sent until it is acknowledged, what has come until it is used.

use std::collections::VecDeque;
use std::ops::Range;

/// Octets of a stream that may have to be sent again.
#[derive(Debug, Default)]
pub(crate) struct Outbox {
    bytes: VecDeque<u8>,
    /// The offset of the first of them in the stream.
    start: u64,
}

impl Outbox {
    /// How many there are.
    pub(crate) fn len(&self) -> usize {
        self.bytes.len()
    }

    /// Adds octets after all others.
    pub(crate) fn push(&mut self, bytes: &[u8]) {
        self.bytes.extend(bytes);
    }

    /// Everything before `offset` is acknowledged.
    pub(crate) fn acknowledge(&mut self, offset: u64) {
        let count = usize::try_from(offset.saturating_sub(self.start)).unwrap_or(usize::MAX);
        let count = count.min(self.bytes.len());
        self.bytes.drain(..count);
        self.start += count as u64;
        if self.bytes.is_empty() {
            self.bytes.shrink_to(IDLE_BYTES);
        }
    }

    /// Copies a range of the stream to `out`, which is as long. `false`: it is not here.
    pub(crate) fn copy(&self, range: Range<u64>, out: &mut [u8]) -> bool {
        let Some(from) = range.start.checked_sub(self.start) else { return false };
        let from = from as usize;
        let Some(to) = from.checked_add(out.len()).filter(|&to| to <= self.bytes.len()) else {
            return false;
        };
        let (first, second) = self.bytes.as_slices();
        let split = first.len().clamp(from, to);
        let (before, behind) = out.split_at_mut(split - from);
        if !before.is_empty() {
            before.copy_from_slice(&first[from..split]);
        }
        if !behind.is_empty() {
            behind.copy_from_slice(&second[split - first.len()..to - first.len()]);
        }
        true
    }
}

/// What an idle stream keeps of its buffers.
const IDLE_BYTES: usize = 4096;

/// Octets of a stream that have come and were not used, some of them behind gaps.
#[derive(Debug, Default)]
pub(crate) struct Inbox {
    /// From `start` on; what lies in a gap is of no meaning.
    bytes: Vec<u8>,
    /// The offset of the first octet that was not used.
    start: u64,
}

impl Inbox {
    /// The offset of the first octet that was not used.
    pub(crate) fn start(&self) -> u64 {
        self.start
    }

    /// Whether nothing is kept.
    pub(crate) fn is_empty(&self) -> bool {
        self.bytes.is_empty()
    }

    /// Keeps octets at an offset that TCP has offered room for, `most` octets from `start` on. What lies
    /// outside is dropped.
    pub(crate) fn put(&mut self, offset: u64, bytes: &[u8], most: usize) {
        let skipped = usize::try_from(self.start.saturating_sub(offset)).unwrap_or(usize::MAX);
        let Some(bytes) = bytes.get(skipped..) else { return };
        let at = usize::try_from(offset.saturating_sub(self.start)).unwrap_or(usize::MAX);
        let Some(end) = at.checked_add(bytes.len()).filter(|&end| end <= most) else { return };
        if self.bytes.len() < end {
            self.bytes.resize(end, 0);
        }
        self.bytes[at..end].copy_from_slice(bytes);
    }

    /// What was taken out and not used comes back, before all that is kept.
    pub(crate) fn put_in_front(&mut self, bytes: &[u8]) {
        self.start -= (bytes.len() as u64).min(self.start);
        self.bytes.splice(..0, bytes.iter().copied());
    }

    /// Takes everything out that is kept before the offset `end`, and what is kept behind; to be given back
    /// by [`give_back`](Self::give_back).
    pub(crate) fn take(&mut self, end: u64) -> (Vec<u8>, usize) {
        let bytes = std::mem::take(&mut self.bytes);
        let whole = usize::try_from(end.saturating_sub(self.start)).unwrap_or(usize::MAX);
        let whole = whole.min(bytes.len());
        (bytes, whole)
    }

    /// Gives back what was taken, of which the first `used` octets were used.
    pub(crate) fn give_back(&mut self, mut bytes: Vec<u8>, used: usize) {
        let used = used.min(bytes.len());
        self.start += used as u64;
        bytes.drain(..used);
        if bytes.is_empty() {
            bytes.shrink_to(IDLE_BYTES);
        }
        self.bytes = bytes;
    }

    /// The next `count` octets were used without having been kept.
    pub(crate) fn skip(&mut self, count: usize) {
        self.start += count as u64;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_not_acknowledged_can_be_read_again() {
        let mut outbox = Outbox::default();
        let mut offset = 0u64;
        for round in 0..200u64 {
            let bytes: Vec<u8> = (0..97).map(|n| (round * 97 + n) as u8).collect();
            outbox.push(&bytes);
            offset += 97;
            let acked = offset.saturating_sub(150);
            outbox.acknowledge(acked);
            let mut out = vec![0; (offset - acked) as usize];
            assert!(outbox.copy(acked..offset, &mut out));
            assert!(out.iter().zip(acked..).all(|(byte, at)| *byte == at as u8));
            assert!(!outbox.copy(offset..offset + 1, &mut [0]), "it is not there yet");
            assert!(acked == 0 || !outbox.copy(acked - 1..acked, &mut [0]), "nor any more");
        }
        outbox.acknowledge(u64::MAX);
        assert_eq!(outbox.len(), 0);
    }

    #[test]
    fn what_comes_behind_a_gap_waits_for_it() {
        let mut inbox = Inbox::default();
        inbox.put(10, b"world", 64);
        let (bytes, whole) = inbox.take(0);
        assert_eq!(whole, 0);
        inbox.give_back(bytes, 0);
        inbox.put(4, b"hello ", 64);
        inbox.put(0, b"So, ", 64);
        let (bytes, whole) = inbox.take(15);
        assert_eq!(&bytes[..whole], b"So, hello world");
        inbox.give_back(bytes, 4);
        assert_eq!(inbox.start(), 4);
        inbox.put(0, b"old, but for hers", 64);
        let (bytes, whole) = inbox.take(17);
        assert_eq!(&bytes[..whole], b" but for hers", "what came last is what counts");
    }

    #[test]
    fn what_there_is_no_room_for_is_dropped() {
        let mut inbox = Inbox::default();
        inbox.put(60, b"12345", 64);
        inbox.put(u64::MAX - 2, b"12345", 64);
        assert!(inbox.is_empty());
        inbox.put(60, b"1234", 64);
        assert!(!inbox.is_empty());
    }
}
