//! A disk in registered memory: RDMA Reads and Writes place data where they stay.

use std::io;
use std::ops::Range;
use std::sync::{Arc, OnceLock};

use quipu::{Error, MemoryRegion, ProtectionDomain};
use quipu_nbd::Extent;

use super::super::disk::{Disk, Placed};
use super::super::memory::Pieces;

/// Bytes of a piece: what one registration covers.
const PIECE: usize = 1 << 20;
/// Bytes that are copied at a time.
const COPIED: usize = 4096;

/// The disk. Its memory has no rights for peers.
pub(in crate::cmd::nbd) struct Registered {
    pieces: Pieces<Arc<MemoryRegion>, PIECE>,
    pd: ProtectionDomain,
    /// What absent pieces read as.
    zeros: OnceLock<Arc<MemoryRegion>>,
}

impl Registered {
    /// A disk of zeros, for queue pairs of a protection domain.
    pub(in crate::cmd::nbd) fn new(size: u64, pd: ProtectionDomain) -> Self {
        Self { pieces: Pieces::new(size), pd, zeros: OnceLock::new() }
    }

    fn piece(&self) -> Result<Arc<MemoryRegion>, Error> {
        Ok(Arc::new(self.pd.register_unshared(PIECE)?))
    }

    /// The piece with a byte of the disk. It is made if it is absent.
    fn made(&self, offset: u64) -> Result<Arc<MemoryRegion>, Error> {
        if let Some(memory) = &*self.pieces.reading(offset) {
            return Ok(Arc::clone(memory));
        }
        let mut piece = self.pieces.writing(offset);
        if let Some(memory) = &*piece {
            return Ok(Arc::clone(memory));
        }
        Ok(Arc::clone(piece.insert(self.piece()?)))
    }

    /// The piece with a byte of the disk, or zeros if it is absent.
    fn found(&self, offset: u64) -> Option<Arc<MemoryRegion>> {
        let found = self.pieces.reading(offset).clone();
        found.or_else(|| self.zeros())
    }

    fn zeros(&self) -> Option<Arc<MemoryRegion>> {
        if self.zeros.get().is_none() {
            // Another thread may be quicker.
            let _ = self.zeros.set(self.piece().ok()?);
        }
        self.zeros.get().cloned()
    }
}

/// There is no memory for a piece.
fn no_room(error: Error) -> io::Error {
    match error {
        Error::OutOfBounds { .. } => io::Error::other(error),
        _ => io::Error::from_raw_os_error(libc::ENOSPC),
    }
}

impl Disk for Registered {
    fn size(&self) -> u64 {
        self.pieces.size
    }

    fn is_read_only(&self) -> bool {
        false
    }

    fn read(&self, offset: u64, data: &mut [u8]) -> io::Result<()> {
        self.pieces.walk(offset, data.len() as u64, |place, part, at| {
            let target = &mut data[at..at + part.len()];
            match &*self.pieces.reading(place) {
                Some(memory) => memory.read(part.start, target).map_err(io::Error::other)?,
                None => target.fill(0),
            }
            Ok(())
        })
    }

    fn write(&self, offset: u64, data: &[u8]) -> io::Result<()> {
        self.pieces.walk(offset, data.len() as u64, |place, part, at| {
            let memory = self.made(place).map_err(no_room)?;
            memory.write(part.start, &data[at..at + part.len()]).map_err(io::Error::other)
        })
    }

    fn read_to(&self, offset: u64, memory: &MemoryRegion, part: Range<usize>) -> io::Result<()> {
        self.pieces.walk(offset, part.len() as u64, |place, from, at| {
            let to = part.start + at;
            let piece =
                self.found(place).ok_or_else(|| io::Error::from_raw_os_error(libc::ENOMEM))?;
            piece.copy_to(from.start, memory, to, from.len()).map_err(io::Error::other)
        })
    }

    fn write_from(&self, offset: u64, memory: &MemoryRegion, part: Range<usize>) -> io::Result<()> {
        self.pieces.walk(offset, part.len() as u64, |place, to, at| {
            let piece = self.made(place).map_err(no_room)?;
            let copied = memory.copy_to(part.start + at, &piece, to.start, to.len());
            copied.map_err(io::Error::other)
        })
    }

    fn placed(&self, offset: u64, length: usize, for_write: bool) -> Option<Placed> {
        let at = (offset % PIECE as u64) as usize;
        if length > PIECE - at {
            return None;
        }
        let memory = if for_write { self.made(offset).ok()? } else { self.found(offset)? };
        Some(Placed { memory, at, len: length })
    }

    fn flush(&self) -> io::Result<()> {
        Ok(())
    }

    fn zero(&self, offset: u64, length: u64, hole: bool) -> io::Result<()> {
        self.pieces.zero(offset, length, hole, |memory, part| {
            for at in part.clone().step_by(COPIED) {
                let zeros = &[0; COPIED][..COPIED.min(part.end - at)];
                memory.write(at, zeros).map_err(io::Error::other)?;
            }
            Ok(())
        })
    }

    fn extents(&self, offset: u64, length: u64) -> io::Result<Vec<Extent>> {
        self.pieces.extents(offset, length)
    }
}

#[cfg(test)]
mod tests {
    use quipu::{Config, Device};

    use super::*;

    fn disk(size: u64) -> Registered {
        let address = Some("127.0.0.1".parse().unwrap());
        let device = Device::open(Config { address, ..Config::default() }).unwrap();
        Registered::new(size, device.protection_domain().unwrap())
    }

    #[test]
    fn only_what_was_written_is_there() {
        let piece = PIECE as u64;
        let disk = disk(3 * piece + 5);
        disk.write(piece - 1, &[1, 2]).unwrap();
        let mut data = [9; 4];
        disk.read(piece - 2, &mut data).unwrap();
        assert_eq!(data, [0, 1, 2, 0]);
        let memory = disk.pd.register_unshared(64).unwrap();
        disk.read_to(piece - 2, &memory, 10..14).unwrap();
        assert_eq!(memory.to_vec(9, 6).unwrap(), [0, 0, 1, 2, 0, 0]);
        disk.write_from(piece - 2, &memory, 11..13).unwrap();
        disk.read(piece - 2, &mut data).unwrap();
        assert_eq!(data, [1, 2, 2, 0]);
        let lengths = || {
            let extents = disk.extents(0, disk.size()).unwrap();
            extents.iter().map(|extent| (extent.length, extent.hole)).collect::<Vec<_>>()
        };
        assert_eq!(lengths(), [(2 * piece, false), (piece + 5, true)]);
        disk.zero(piece, 1, true).unwrap();
        disk.zero(0, piece, true).unwrap();
        assert_eq!(lengths(), [(piece, true), (piece, false), (piece + 5, true)]);
        disk.read(piece - 2, &mut data).unwrap();
        assert_eq!(data, [0; 4]);
    }

    #[test]
    fn memory_that_a_request_uses_stays_when_its_piece_is_given_back() {
        let piece = PIECE as u64;
        let disk = disk(2 * piece);
        let held = disk.placed(piece + 8, 4, true).unwrap();
        held.memory.write(held.at, &[7; 4]).unwrap();
        let mut data = [0; 4];
        disk.read(piece + 8, &mut data).unwrap();
        assert_eq!(data, [7; 4]);
        disk.zero(piece, piece, true).unwrap();
        held.memory.write(held.at, &[8; 4]).unwrap();
        disk.read(piece + 8, &mut data).unwrap();
        assert_eq!(data, [0; 4]);
        assert_eq!(held.memory.to_vec(held.at, held.len).unwrap(), [8; 4]);
    }

    #[test]
    fn absent_pieces_are_zeros_and_a_range_lies_in_one_piece_or_is_not_placed() {
        let disk = disk(2 * PIECE as u64);
        let zeros = disk.placed(5, PIECE - 5, false).unwrap();
        assert!(zeros.memory.to_vec(zeros.at, zeros.len).unwrap().iter().all(|&byte| byte == 0));
        assert!(disk.placed(5, PIECE - 4, true).is_none());
        assert!(disk.extents(0, disk.size()).unwrap()[0].hole);
    }
}
