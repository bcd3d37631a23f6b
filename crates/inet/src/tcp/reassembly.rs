//! What has arrived behind a gap.
//!
//! In stream mode its payload is already in its place, and only the ranges are kept. In message mode nobody
//! knows how many messages are in the gap, so nobody knows which receive a segment behind it belongs to:
//! its payload is kept here, bounded, until the gap is closed. What is neither placed nor kept is dropped
//! and never reported, so that a SACK says nothing but what will not be asked for again (RFC 2018 8 allows
//! to renege, and senders suffer from it).

use std::collections::BTreeMap;

use quipu_wire::tcp::{SackBlock, SackBlocks};

use super::seq::SeqSpace;

/// The most gaps that are kept: memory is bounded by it (16 KB), and the work for a segment. A queue that
/// overflows in slow start drops every other packet of a round trip, so it must not be few.
const MAX_RANGES: usize = 1024;
/// What a segment without timestamps can report.
const RECENT: usize = 4;

#[derive(Clone, Copy, Debug)]
struct Range {
    start: u64,
    end: u64,
}

/// A segment that waited for a gap to close; message mode only.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Held {
    /// The stream offset of its first octet.
    pub offset: u64,
    /// The payload.
    pub payload: Box<[u8]>,
    /// The end of a message.
    pub end_of_message: bool,
}

/// Ranges behind the next octet expected, in order and apart.
#[derive(Clone, Debug, Default)]
pub(crate) struct Reassembly {
    ranges: Vec<Range>,
    /// Where the latest segments began: their ranges are reported first (RFC 2018 4).
    recent: [u64; RECENT],
    held: BTreeMap<u64, Held>,
    held_bytes: u64,
}

impl Reassembly {
    /// Octets of memory, itself included.
    pub(crate) fn memory(&self) -> usize {
        size_of::<Self>()
            + self.ranges.capacity() * size_of::<Range>()
            + self.held.len() * (size_of::<Held>() + size_of::<u64>())
            + self.held_bytes as usize
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.ranges.is_empty() && self.held.is_empty()
    }

    /// The first range that does not end before `position`.
    fn at(&self, position: u64) -> usize {
        self.ranges.partition_point(|range| range.end < position)
    }

    /// Whether all of `start..end` is here already.
    pub(crate) fn has(&self, start: u64, end: u64) -> bool {
        let range = self.ranges.get(self.at(start + 1));
        range.is_some_and(|range| range.start <= start && end <= range.end)
    }

    /// Whether any of `start..end` is here already.
    pub(crate) fn touches(&self, start: u64, end: u64) -> bool {
        self.ranges.get(self.at(start + 1)).is_some_and(|range| range.start < end)
    }

    /// Whether `start..end` could be noted: it may join others, but not be one range too many.
    pub(crate) fn has_room(&self, start: u64, end: u64) -> bool {
        let joins = self.ranges.get(self.at(start)).is_some_and(|range| range.start <= end);
        joins || self.ranges.len() < MAX_RANGES
    }

    /// Where the first range begins.
    pub(crate) fn first(&self) -> Option<u64> {
        self.ranges.first().map(|range| range.start)
    }

    /// Where the last range ends.
    pub(crate) fn end(&self) -> Option<u64> {
        self.ranges.last().map(|range| range.end)
    }

    /// The stream ends at `end`, up to where it has arrived: what has come besides is none of it.
    pub(crate) fn end_at(&mut self, end: u64) {
        self.ranges.clear();
        let behind = self.held.split_off(&end);
        self.held_bytes -= behind.values().map(cost).sum::<u64>();
    }

    /// Notes `start..end`, for which there is room.
    pub(crate) fn insert(&mut self, start: u64, end: u64) {
        let first = self.at(start);
        let behind = self.ranges.partition_point(|range| range.start <= end);
        let mut range = Range { start, end };
        for old in &self.ranges[first..behind] {
            range.start = range.start.min(old.start);
            range.end = range.end.max(old.end);
        }
        self.ranges.splice(first..behind, [range]);
        self.report_first(start);
    }

    /// A segment has come that is in a range, perhaps once more: that is reported first from now on.
    pub(crate) fn report_first(&mut self, start: u64) {
        let Some(range) = self.ranges.get(self.at(start + 1)) else { return };
        // One entry for each range: those that are in this one make room.
        let inside = |at: u64| range.start <= at && at < range.end;
        let last = self.recent.iter().position(|at| inside(*at)).unwrap_or(RECENT - 1);
        self.recent.copy_within(..last, 1);
        self.recent[0] = start;
    }

    /// Keeps a payload, within `max` octets for all; says whether it did.
    pub(crate) fn hold(&mut self, start: u64, segment: Held, max: u64) -> bool {
        // A record costs something too: many small messages must not cost without bound.
        let bytes = self.held_bytes + cost(&segment);
        if bytes > max {
            return false;
        }
        self.held_bytes = bytes;
        self.held.insert(start, segment);
        true
    }

    /// Whether a kept segment is next in order.
    pub(crate) fn is_due(&self, nxt: u64) -> bool {
        self.held.first_key_value().is_some_and(|(start, _)| *start <= nxt)
    }

    /// Takes the segment that begins at or before `nxt`.
    pub(crate) fn take_held(&mut self, nxt: u64) -> Option<Held> {
        let first = self.held.first_entry()?;
        if *first.key() > nxt {
            return None;
        }
        let segment = first.remove();
        self.held_bytes -= cost(&segment);
        Some(segment)
    }

    /// The gap before `nxt` is closed: where the stream is contiguous up to now.
    pub(crate) fn advance(&mut self, mut nxt: u64) -> u64 {
        let taken = self.ranges.partition_point(|range| range.start <= nxt);
        for range in self.ranges.drain(..taken) {
            nxt = nxt.max(range.end);
        }
        // What now touches it, touches nothing else: ranges are apart.
        nxt
    }

    /// The blocks to report, the latest first, at most `room` of them (RFC 2018 4); `first` is a duplicate
    /// and goes before them (RFC 2883 4).
    pub(crate) fn blocks(
        &self,
        space: SeqSpace,
        first: Option<(u64, u64)>,
        room: usize,
    ) -> SackBlocks {
        let mut blocks = SackBlocks::EMPTY;
        let block = |start, end| SackBlock { left: space.wire(start), right: space.wire(end) };
        if let Some((start, end)) = first {
            blocks.push(block(start, end));
        }
        let mut reported = [None; RECENT];
        for (n, at) in self.recent.iter().enumerate() {
            let index = self.at(at + 1);
            let Some(range) = self.ranges.get(index).filter(|range| range.start <= *at) else {
                continue;
            };
            if blocks.as_slice().len() < room && !reported.contains(&Some(index)) {
                reported[n] = Some(index);
                blocks.push(block(range.start, range.end));
            }
        }
        blocks
    }
}

fn cost(segment: &Held) -> u64 {
    const RECORD: u64 = 64;
    segment.payload.len() as u64 + RECORD
}

#[cfg(test)]
mod tests {
    use quipu_wire::tcp::SeqNumber;

    use super::*;

    fn reported(reassembly: &Reassembly, room: usize) -> Vec<(u32, u32)> {
        let space = SeqSpace { initial: SeqNumber(0) };
        let blocks = reassembly.blocks(space, None, room);
        blocks.as_slice().iter().map(|block| (block.left.0, block.right.0)).collect()
    }

    #[test]
    fn the_latest_range_is_reported_first() {
        let mut reassembly = Reassembly::default();
        for start in [100, 300, 500, 200] {
            reassembly.insert(start, start + 50);
        }
        assert_eq!(reported(&reassembly, 3), [(200, 250), (500, 550), (300, 350)]);
        reassembly.insert(350, 400);
        assert_eq!(reported(&reassembly, 2), [(300, 400), (200, 250)], "joined");
        assert_eq!(reassembly.advance(60), 60);
        assert_eq!(reassembly.advance(120), 150);
        assert_eq!(reassembly.advance(250), 250);
        assert_eq!(reported(&reassembly, 4), [(300, 400), (500, 550)]);
    }

    #[test]
    fn gaps_are_bounded() {
        let mut reassembly = Reassembly::default();
        for n in 1..=MAX_RANGES as u64 {
            assert!(reassembly.has_room(n * 10, n * 10 + 1));
            reassembly.insert(n * 10, n * 10 + 1);
        }
        assert!(!reassembly.has_room(15, 16));
        assert!(reassembly.has_room(11, 12), "it joins another");
    }

    #[test]
    fn kept_payload_is_bounded_by_octets_and_by_number() {
        let mut reassembly = Reassembly::default();
        let segment =
            |offset, len| Held { offset, payload: vec![0; len].into(), end_of_message: true };
        assert!(!reassembly.hold(1, segment(0, 1_000), 1_000));
        assert!(reassembly.hold(1, segment(0, 900), 1_000));
        assert!(!reassembly.hold(1_000, segment(999, 1), 1_000));
        assert_eq!(reassembly.take_held(0), None);
        assert_eq!(reassembly.take_held(1), Some(segment(0, 900)));
        assert!(reassembly.hold(1_000, segment(999, 1), 1_000));
    }
}
