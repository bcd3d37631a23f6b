//! Disks in memory, which take only what was written.

use std::io;
use std::ops::{Deref, DerefMut, Range};
use std::sync::{PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

use quipu_nbd::Extent;

use super::disk::{Disk, Give, Take};

/// A disk of pieces of `LEN` bytes. Each has a lock of its own and is absent until it is written.
pub(super) struct Pieces<T, const LEN: usize> {
    pub(super) size: u64,
    pieces: Vec<RwLock<Option<T>>>,
}

impl<T, const LEN: usize> Pieces<T, LEN> {
    /// A disk of zeros.
    pub(super) fn new(size: u64) -> Self {
        let pieces = size.div_ceil(LEN as u64);
        Self { size, pieces: (0..pieces).map(|_| RwLock::default()).collect() }
    }

    /// The piece with a byte of the disk, for reading.
    pub(super) fn reading(&self, offset: u64) -> RwLockReadGuard<'_, Option<T>> {
        // Bytes are bytes, also if a thread panicked while it copied some.
        self.at(offset).read().unwrap_or_else(PoisonError::into_inner)
    }

    /// The piece with a byte of the disk, for writing.
    pub(super) fn writing(&self, offset: u64) -> RwLockWriteGuard<'_, Option<T>> {
        self.at(offset).write().unwrap_or_else(PoisonError::into_inner)
    }

    fn at(&self, offset: u64) -> &RwLock<Option<T>> {
        &self.pieces[(offset / LEN as u64) as usize]
    }

    /// Calls `each` with the parts of a range, each within a piece: where it begins on the disk, the part of
    /// the piece, and where it begins in the range. Ends with the first error.
    pub(super) fn walk(
        &self,
        offset: u64,
        length: u64,
        mut each: impl FnMut(u64, Range<usize>, usize) -> io::Result<()>,
    ) -> io::Result<()> {
        let (mut at, end) = (offset, offset + length);
        while at < end {
            let from = (at % LEN as u64) as usize;
            let count = (LEN - from).min((end - at) as usize);
            each(at, from..from + count, (at - offset) as usize)?;
            at += count as u64;
        }
        Ok(())
    }

    /// Makes a range read as zeros: `fill` does so with a part of a piece. With `hole`, whole pieces are
    /// given back.
    pub(super) fn zero(
        &self,
        offset: u64,
        length: u64,
        hole: bool,
        fill: impl Fn(&mut T, Range<usize>) -> io::Result<()>,
    ) -> io::Result<()> {
        self.walk(offset, length, |at, part, _| {
            let mut piece = self.writing(at);
            if hole && part.len() == LEN {
                *piece = None;
            } else if let Some(bytes) = piece.as_mut() {
                fill(bytes, part)?;
            }
            Ok(())
        })
    }

    /// What is allocated.
    pub(super) fn extents(&self, offset: u64, length: u64) -> io::Result<Vec<Extent>> {
        let mut extents: Vec<Extent> = Vec::new();
        self.walk(offset, length, |at, part, _| {
            let absent = self.reading(at).is_none();
            match extents.last_mut() {
                Some(last) if last.hole == absent => last.length += part.len() as u64,
                _ => {
                    let length = part.len() as u64;
                    extents.push(Extent { length, hole: absent, zero: absent });
                }
            }
            Ok(())
        })?;
        Ok(extents)
    }
}

/// Bytes of a piece.
const PIECE: usize = 256 << 10;

/// Where a piece begins in a page. Copies are slow on AMD processors where the target is 1 to 31 bytes
/// further into its page than the source (`crates/mem`, `copy`). Registered memory begins with a page, and
/// the heap puts long blocks 16 bytes after the beginning of one: from here both are far, in both directions.
const START: usize = 2048;
const PAGE: usize = 4096;

/// The bytes of a piece.
struct Bytes {
    memory: Box<[u8]>,
    /// Where they begin.
    start: usize,
}

impl Bytes {
    /// Zeros.
    fn new() -> Self {
        let memory = vec![0; PIECE + PAGE + START].into_boxed_slice();
        let start = memory.as_ptr().align_offset(PAGE).min(PAGE) + START;
        Self { memory, start }
    }
}

impl Deref for Bytes {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.memory[self.start..self.start + PIECE]
    }
}

impl DerefMut for Bytes {
    fn deref_mut(&mut self) -> &mut [u8] {
        &mut self.memory[self.start..self.start + PIECE]
    }
}

/// A disk in the memory of this process.
pub(super) struct Memory(Pieces<Bytes, PIECE>);

impl Memory {
    /// A disk of zeros.
    pub(super) fn new(size: u64) -> Self {
        Self(Pieces::new(size))
    }
}

impl Disk for Memory {
    fn size(&self) -> u64 {
        self.0.size
    }

    fn is_read_only(&self) -> bool {
        false
    }

    fn read(&self, offset: u64, data: &mut [u8]) -> io::Result<()> {
        self.read_pieces(offset, data.len(), &mut |at, bytes| {
            data[at..at + bytes.len()].copy_from_slice(bytes);
            Ok(())
        })
    }

    fn write(&self, offset: u64, data: &[u8]) -> io::Result<()> {
        self.write_pieces(offset, data.len(), &mut |at, bytes| {
            bytes.copy_from_slice(&data[at..at + bytes.len()]);
            Ok(())
        })
    }

    fn read_pieces(&self, offset: u64, length: usize, take: &mut Take<'_>) -> io::Result<()> {
        static ZEROS: [u8; PIECE] = [0; PIECE];
        self.0.walk(offset, length as u64, |place, part, at| match &*self.0.reading(place) {
            Some(bytes) => take(at, &bytes[part]),
            None => take(at, &ZEROS[..part.len()]),
        })
    }

    fn write_pieces(&self, offset: u64, length: usize, give: &mut Give<'_>) -> io::Result<()> {
        self.0.walk(offset, length as u64, |place, part, at| {
            let mut piece = self.0.writing(place);
            let bytes = piece.get_or_insert_with(Bytes::new);
            give(at, &mut bytes[part])
        })
    }

    fn flush(&self) -> io::Result<()> {
        Ok(())
    }

    fn zero(&self, offset: u64, length: u64, hole: bool) -> io::Result<()> {
        self.0.zero(offset, length, hole, |bytes, part| {
            bytes[part].fill(0);
            Ok(())
        })
    }

    fn extents(&self, offset: u64, length: u64) -> io::Result<Vec<Extent>> {
        self.0.extents(offset, length)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_begin_where_copies_are_fast() {
        let bytes = [Bytes::new(), Bytes::new()];
        for bytes in &bytes {
            assert_eq!((bytes.as_ptr().addr() % PAGE, bytes.len()), (START, PIECE));
            assert!(bytes.iter().all(|&byte| byte == 0));
        }
    }

    #[test]
    fn only_what_was_written_is_there() {
        let disk = Memory::new(3 * PIECE as u64 + 5);
        disk.write(PIECE as u64 - 1, &[1, 2]).unwrap();
        let mut data = [9; 4];
        disk.read(PIECE as u64 - 2, &mut data).unwrap();
        assert_eq!(data, [0, 1, 2, 0]);
        let lengths = |disk: &Memory| {
            let extents = disk.extents(0, disk.size()).unwrap();
            extents.iter().map(|extent| (extent.length, extent.hole)).collect::<Vec<_>>()
        };
        let piece = PIECE as u64;
        assert_eq!(lengths(&disk), [(2 * piece, false), (piece + 5, true)]);
        disk.zero(0, piece, true).unwrap();
        assert_eq!(lengths(&disk)[0], (piece, true));
        disk.read(piece - 2, &mut data).unwrap();
        assert_eq!(data, [0, 0, 2, 0]);
    }
}
