//! A file or block device as a disk.

use std::fs::{File, OpenOptions};
use std::io::{self, Seek, SeekFrom};
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::Path;

use quipu::MemoryRegion;
use quipu_nbd::Extent;
use rustix::fs::FallocateFlags;

use super::disk::Disk;

/// Zeros that are written at a time where the file system cannot do it by itself.
const ZEROS: &[u8] = &[0; 64 << 10];
/// More extents than this are not worth a reply.
const MOST_EXTENTS: usize = 1024;

/// The disk.
pub(super) struct FileDisk {
    file: File,
    size: u64,
    read_only: bool,
}

impl FileDisk {
    /// Opens a file or block device.
    pub(super) fn open(path: &Path, read_only: bool) -> io::Result<Self> {
        let mut file = OpenOptions::new().read(true).write(!read_only).open(path)?;
        // The end of a block device is its size, which its metadata do not have.
        let size = file.seek(SeekFrom::End(0))?;
        Ok(Self { file, size, read_only })
    }

    /// Makes a file of a size, of zeros.
    pub(super) fn create(path: &Path, size: u64) -> io::Result<Self> {
        let file =
            OpenOptions::new().read(true).write(true).create(true).truncate(true).open(path)?;
        file.set_len(size)?;
        Ok(Self { file, size, read_only: false })
    }
}

impl Disk for FileDisk {
    fn size(&self) -> u64 {
        self.size
    }

    fn is_read_only(&self) -> bool {
        self.read_only
    }

    fn parallel(&self) -> usize {
        4
    }

    fn read(&self, offset: u64, data: &mut [u8]) -> io::Result<()> {
        self.file.read_exact_at(data, offset)
    }

    fn write(&self, offset: u64, data: &[u8]) -> io::Result<()> {
        self.file.write_all_at(data, offset)
    }

    fn read_to(&self, offset: u64, memory: &MemoryRegion, part: Range<usize>) -> io::Result<()> {
        memory.fill_at(&self.file, offset, part.start, part.len())
    }

    fn write_from(&self, offset: u64, memory: &MemoryRegion, part: Range<usize>) -> io::Result<()> {
        memory.write_at(&self.file, offset, part.start, part.len())
    }

    fn flush(&self) -> io::Result<()> {
        self.file.sync_data()
    }

    fn zero(&self, offset: u64, length: u64, hole: bool) -> io::Result<()> {
        let punch = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        let keep = FallocateFlags::ZERO_RANGE | FallocateFlags::KEEP_SIZE;
        let flags = if hole { punch } else { keep };
        if length == 0 || rustix::fs::fallocate(&self.file, flags, offset, length).is_ok() {
            return Ok(());
        }
        let (mut at, end) = (offset, offset + length);
        while at < end {
            let count = ZEROS.len().min((end - at) as usize);
            self.file.write_all_at(&ZEROS[..count], at)?;
            at += count as u64;
        }
        Ok(())
    }

    fn extents(&self, offset: u64, length: u64) -> io::Result<Vec<Extent>> {
        let (mut at, end) = (offset, offset + length);
        let mut extents = Vec::new();
        while at < end && extents.len() < MOST_EXTENTS {
            // The file's position belongs to nobody: reads and writes name theirs.
            let data = match rustix::fs::seek(&self.file, rustix::fs::SeekFrom::Data(at)) {
                Ok(data) => data.min(end),
                Err(rustix::io::Errno::NXIO) => end,
                // Without support for holes everything is data.
                Err(_) => at,
            };
            if data > at {
                extents.push(Extent { length: data - at, hole: true, zero: true });
                at = data;
                continue;
            }
            let hole = rustix::fs::seek(&self.file, rustix::fs::SeekFrom::Hole(at));
            let hole = hole.map_or(end, |hole| hole.min(end));
            let hole = if hole > at { hole } else { end };
            extents.push(Extent { length: hole - at, hole: false, zero: false });
            at = hole;
        }
        Ok(extents)
    }
}
