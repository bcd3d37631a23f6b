//! A disk in memory, which takes only what was written.

use std::io;
use std::ops::{Deref, DerefMut};
use std::sync::{PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

use quipu_nbd::Extent;

use super::disk::{Disk, Give, Take};

/// Bytes of a piece, which has a lock of its own and is absent until it is written.
const PIECE: usize = 256 << 10;

/// Where a piece begins in a page. Copies are slow on AMD processors where the target is 1 to 31 bytes
/// further into its page than the source (`crates/mem`, `copy`). Registered memory begins with a page, and
/// the heap puts long blocks 16 bytes after the beginning of one: from here both are far, in both directions.
const START: usize = 2048;
const PAGE: usize = 4096;

type Piece = RwLock<Option<Bytes>>;

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

/// The disk.
pub(super) struct Memory {
    size: u64,
    pieces: Vec<Piece>,
}

fn reading(piece: &Piece) -> RwLockReadGuard<'_, Option<Bytes>> {
    // Bytes are bytes, also if a thread panicked while it copied some.
    piece.read().unwrap_or_else(PoisonError::into_inner)
}

fn writing(piece: &Piece) -> RwLockWriteGuard<'_, Option<Bytes>> {
    piece.write().unwrap_or_else(PoisonError::into_inner)
}

impl Memory {
    /// A disk of zeros.
    pub(super) fn new(size: u64) -> Self {
        let pieces = size.div_ceil(PIECE as u64);
        Self { size, pieces: (0..pieces).map(|_| Piece::default()).collect() }
    }

    /// Calls `each` with the pieces of a range: the piece, its part, and where that lies in the range.
    fn walk(
        &self,
        offset: u64,
        length: u64,
        mut each: impl FnMut(&Piece, std::ops::Range<usize>, usize),
    ) {
        let (mut at, end) = (offset, offset + length);
        while at < end {
            let (index, from) = ((at / PIECE as u64) as usize, (at % PIECE as u64) as usize);
            let count = (PIECE - from).min((end - at) as usize);
            each(&self.pieces[index], from..from + count, (at - offset) as usize);
            at += count as u64;
        }
    }
}

impl Disk for Memory {
    fn size(&self) -> u64 {
        self.size
    }

    fn is_read_only(&self) -> bool {
        false
    }

    fn read(&self, offset: u64, data: &mut [u8]) -> io::Result<()> {
        self.walk(offset, data.len() as u64, |piece, part, at| {
            let target = &mut data[at..at + part.len()];
            match &*reading(piece) {
                Some(bytes) => target.copy_from_slice(&bytes[part]),
                None => target.fill(0),
            }
        });
        Ok(())
    }

    fn write(&self, offset: u64, data: &[u8]) -> io::Result<()> {
        self.walk(offset, data.len() as u64, |piece, part, at| {
            let mut piece = writing(piece);
            let bytes = piece.get_or_insert_with(Bytes::new);
            let source = &data[at..at + part.len()];
            bytes[part].copy_from_slice(source);
        });
        Ok(())
    }

    fn read_pieces(&self, offset: u64, length: usize, take: &mut Take<'_>) -> io::Result<()> {
        static ZEROS: [u8; PIECE] = [0; PIECE];
        let mut outcome = Ok(());
        self.walk(offset, length as u64, |piece, part, at| {
            if outcome.is_ok() {
                outcome = match &*reading(piece) {
                    Some(bytes) => take(at, &bytes[part]),
                    None => take(at, &ZEROS[..part.len()]),
                };
            }
        });
        outcome
    }

    fn write_pieces(&self, offset: u64, length: usize, give: &mut Give<'_>) -> io::Result<()> {
        let mut outcome = Ok(());
        self.walk(offset, length as u64, |piece, part, at| {
            if outcome.is_ok() {
                let mut piece = writing(piece);
                let bytes = piece.get_or_insert_with(Bytes::new);
                outcome = give(at, &mut bytes[part]);
            }
        });
        outcome
    }

    fn flush(&self) -> io::Result<()> {
        Ok(())
    }

    fn zero(&self, offset: u64, length: u64, hole: bool) -> io::Result<()> {
        self.walk(offset, length, |piece, part, _| {
            let mut piece = writing(piece);
            if hole && part.len() == PIECE {
                *piece = None;
            } else if let Some(bytes) = piece.as_mut() {
                bytes[part].fill(0);
            }
        });
        Ok(())
    }

    fn extents(&self, offset: u64, length: u64) -> io::Result<Vec<Extent>> {
        let mut extents: Vec<Extent> = Vec::new();
        self.walk(offset, length, |piece, part, _| {
            let absent = reading(piece).is_none();
            match extents.last_mut() {
                Some(last) if last.hole == absent => last.length += part.len() as u64,
                _ => {
                    let length = part.len() as u64;
                    extents.push(Extent { length, hole: absent, zero: absent });
                }
            }
        });
        Ok(extents)
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
