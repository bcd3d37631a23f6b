//! What is served, copied and attached: a disk.

use std::io;
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

use quipu::MemoryRegion;
use quipu_nbd::Extent;

use super::file::FileDisk;

/// Bytes that go through a buffer at a time: it stays in the processor's cache.
const PIECE: usize = 64 << 10;

/// Takes the bytes at a place of a range.
pub(super) type Take<'a> = dyn FnMut(usize, &[u8]) -> io::Result<()> + 'a;
/// Fills the bytes at a place of a range.
pub(super) type Give<'a> = dyn FnMut(usize, &mut [u8]) -> io::Result<()> + 'a;

/// Registered memory that is a part of a disk. Work requests may use it as long as this exists.
pub(super) struct Placed {
    pub(super) memory: Arc<MemoryRegion>,
    pub(super) at: usize,
    pub(super) len: usize,
}

/// A disk of a fixed size. Several threads use it at a time; ranges lie within the size.
pub(super) trait Disk: Send + Sync {
    /// Its size in bytes.
    fn size(&self) -> u64;
    /// Whether writes fail.
    fn is_read_only(&self) -> bool;
    /// How many requests at a time it carries out faster than one after the other.
    fn parallel(&self) -> usize {
        1
    }
    /// Reads.
    fn read(&self, offset: u64, data: &mut [u8]) -> io::Result<()>;
    /// Writes.
    fn write(&self, offset: u64, data: &[u8]) -> io::Result<()>;
    /// Reads a range in pieces: `take` gets where each begins in the range, and its bytes. So they go
    /// from the disk to where they belong without a copy between, where the disk has them in memory.
    fn read_pieces(&self, offset: u64, length: usize, take: &mut Take<'_>) -> io::Result<()> {
        let mut buffer = vec![0; length.min(PIECE)];
        for at in (0..length).step_by(PIECE) {
            let piece = &mut buffer[..PIECE.min(length - at)];
            self.read(offset + at as u64, piece)?;
            take(at, piece)?;
        }
        Ok(())
    }
    /// Writes a range in pieces: `give` fills each with what belongs there, from its place in the range on.
    fn write_pieces(&self, offset: u64, length: usize, give: &mut Give<'_>) -> io::Result<()> {
        let mut buffer = vec![0; length.min(PIECE)];
        for at in (0..length).step_by(PIECE) {
            let piece = &mut buffer[..PIECE.min(length - at)];
            give(at, piece)?;
            self.write(offset + at as u64, piece)?;
        }
        Ok(())
    }
    /// Reads to registered memory.
    fn read_to(&self, offset: u64, memory: &MemoryRegion, part: Range<usize>) -> io::Result<()> {
        self.read_pieces(offset, part.len(), &mut |at, bytes| {
            memory.write(part.start + at, bytes).map_err(io::Error::other)
        })
    }
    /// Writes what lies in registered memory.
    fn write_from(&self, offset: u64, memory: &MemoryRegion, part: Range<usize>) -> io::Result<()> {
        self.write_pieces(offset, part.len(), &mut |at, bytes| {
            memory.read(part.start + at, bytes).map_err(io::Error::other)
        })
    }
    /// The registered memory in which a range lies, if it does; for a write, such memory is made.
    fn placed(&self, _offset: u64, _length: usize, _for_write: bool) -> Option<Placed> {
        None
    }
    /// Returns when everything that was written is on stable storage.
    fn flush(&self) -> io::Result<()>;
    /// Makes a range read as zeros; with `hole` it may give the storage back.
    fn zero(&self, offset: u64, length: u64, hole: bool) -> io::Result<()>;
    /// What is allocated, from the beginning of a range on: at least one extent, none of them empty.
    fn extents(&self, offset: u64, length: u64) -> io::Result<Vec<Extent>>;
}

/// Opens a file or block device.
pub(super) fn open(path: &Path, read_only: bool) -> io::Result<Box<dyn Disk>> {
    Ok(Box::new(FileDisk::open(path, read_only)?))
}
