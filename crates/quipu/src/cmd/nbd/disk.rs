//! What is served, copied and attached: a disk.

use std::io;
use std::path::Path;

use quipu_nbd::Extent;

use super::file::FileDisk;

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
