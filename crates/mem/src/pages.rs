//! The list of ranges of a process that its same-host peers may map, instead of asking the kernel to copy.
//!
//! A range is backed by a memory file that its owner holds open. The owner writes the list, peers read it
//! in a segment that they map read-only; like the [`Directory`](crate::Directory) it is shown only to those
//! who may reach into the owner's memory anyway, and says nothing about rights: those are in the directory.
//!
//! The first word of the segment is a sequence word, odd while the list is written, the second the number
//! of ranges. Entries of four words follow from the fifth: address, length, descriptor (low half) and
//! number of the range (high half), inode.

use core::sync::atomic::{Ordering, fence};

use crate::segment::{Segment, SegmentError, Words};

/// The most ranges of a list.
pub const MAX_SHARED: usize = 255;

const SEQUENCE: usize = 0;
const COUNT: usize = 1;
const ENTRIES: usize = 4;
const ENTRY_WORDS: usize = 4;
/// Bytes of the segment that are used.
pub const SHARED_PAGES_BYTES: usize = (ENTRIES + MAX_SHARED * ENTRY_WORDS) * 8;

/// A range of the owner's memory, and the file behind it, from whose start it is mapped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SharedPages {
    /// Where it begins, in the owner's address space.
    pub addr: u64,
    /// Bytes.
    pub len: u64,
    /// The file, as the owner's table of descriptors names it.
    pub fd: u32,
    /// Names the range; no two of one owner have the same while either is listed or mapped.
    pub id: u32,
    /// The file's inode, by which a descriptor that now names another file is found out.
    pub inode: u64,
}

/// The list as its owner writes it.
#[derive(Debug)]
pub struct SharedPagesWriter {
    words: Words,
}

/// The list as a peer reads it.
#[derive(Debug)]
pub struct SharedPagesReader {
    words: Words,
    /// The sequence word of what was read last; odd if nothing was.
    seen: u64,
}

fn words(segment: &Segment) -> Result<Words, SegmentError> {
    segment.words(0, ENTRIES + MAX_SHARED * ENTRY_WORDS)
}

impl SharedPagesWriter {
    /// An empty list in a zeroed, writable segment of [`SHARED_PAGES_BYTES`] or more.
    ///
    /// # Errors
    /// The segment is too short, or read-only.
    pub fn create(segment: &Segment) -> Result<Self, SegmentError> {
        if !segment.is_writable() {
            return Err(SegmentError::ReadOnly);
        }
        Ok(Self { words: words(segment)? })
    }

    /// Shows these ranges, at most [`MAX_SHARED`] of them, instead of those before. Peers that are in the
    /// middle of a copy may still be at those.
    pub fn show(&mut self, ranges: impl Iterator<Item = SharedPages>) {
        let sequence = self.words.at(SEQUENCE);
        let odd = sequence.load(Ordering::Relaxed) | 1;
        sequence.store(odd, Ordering::Relaxed);
        // A thread that sees a new word sees the odd sequence too.
        fence(Ordering::Release);
        let mut count = 0;
        for range in ranges.take(MAX_SHARED) {
            let names = u64::from(range.fd) | u64::from(range.id) << 32;
            for (i, word) in [range.addr, range.len, names, range.inode].into_iter().enumerate() {
                let at = ENTRIES + count * ENTRY_WORDS + i;
                self.words.at(at).store(word, Ordering::Relaxed);
            }
            count += 1;
        }
        self.words.at(COUNT).store(count as u64, Ordering::Relaxed);
        sequence.store(odd.wrapping_add(1), Ordering::Release);
    }
}

impl SharedPagesReader {
    /// Reads the list in a segment, which may be mapped read-only.
    ///
    /// # Errors
    /// The segment is too short.
    pub fn new(segment: &Segment) -> Result<Self, SegmentError> {
        Ok(Self { words: words(segment)?, seen: 1 })
    }

    /// Whether the list is not what [`read`](Self::read) gave last.
    #[inline]
    pub fn has_changed(&self) -> bool {
        self.words.at(SEQUENCE).load(Ordering::Acquire) != self.seen
    }

    /// Reads the list into `ranges`. `false`, and no ranges, while it is being written.
    pub fn read(&mut self, ranges: &mut Vec<SharedPages>) -> bool {
        ranges.clear();
        let sequence = self.words.at(SEQUENCE);
        let before = sequence.load(Ordering::Acquire);
        let count = self.words.at(COUNT).load(Ordering::Relaxed).min(MAX_SHARED as u64);
        ranges.extend((0..count as usize).map(|index| {
            let word =
                |i: usize| self.words.at(ENTRIES + index * ENTRY_WORDS + i).load(Ordering::Relaxed);
            let names = word(2);
            let (fd, id) = (names as u32, (names >> 32) as u32);
            SharedPages { addr: word(0), len: word(1), fd, id, inode: word(3) }
        }));
        fence(Ordering::Acquire);
        let settled = before & 1 == 0 && sequence.load(Ordering::Relaxed) == before;
        match settled {
            true => self.seen = before,
            false => ranges.clear(),
        }
        settled
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn range(id: u32) -> SharedPages {
        let addr = u64::from(id) << 20;
        SharedPages { addr, len: 4096, fd: id + 7, id, inode: u64::from(id) + 99 }
    }

    #[test]
    fn a_reader_sees_what_was_shown_last() {
        let segment = Segment::heap(SHARED_PAGES_BYTES);
        let mut writer = SharedPagesWriter::create(&segment).unwrap();
        let mut reader = SharedPagesReader::new(&segment).unwrap();
        let mut seen = Vec::new();
        assert!(reader.has_changed() && reader.read(&mut seen) && seen.is_empty());
        assert!(!reader.has_changed());
        for count in [1, 3, 0, 2] {
            writer.show((0..count).map(range));
            assert!(reader.has_changed() && reader.read(&mut seen) && !reader.has_changed());
            assert_eq!(seen, (0..count).map(range).collect::<Vec<_>>());
        }
        writer.show((0..1000).map(range));
        assert!(reader.read(&mut seen));
        assert_eq!(seen.len(), MAX_SHARED);
    }

    #[test]
    fn a_list_that_is_being_written_or_lies_about_its_length_has_bounds() {
        let segment = Segment::heap(SHARED_PAGES_BYTES);
        let mut reader = SharedPagesReader::new(&segment).unwrap();
        let mut seen = vec![range(1)];
        segment.write(0, &[3]).unwrap();
        assert!(!reader.read(&mut seen) && seen.is_empty() && reader.has_changed());
        segment.write(0, &[4, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, 0xff, 0xff]).unwrap();
        assert!(reader.read(&mut seen));
        assert_eq!(seen.len(), MAX_SHARED);
        assert!(SharedPagesReader::new(&Segment::heap(SHARED_PAGES_BYTES - 8)).is_err());
    }
}
