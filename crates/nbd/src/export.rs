//! What a server exports.

use crate::MAX_PAYLOAD;
use crate::wire::TransmissionFlags;

/// The lengths of requests that an export takes, in bytes (`NBD_INFO_BLOCK_SIZE`).
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct BlockSizes {
    /// Offsets and lengths are multiples of this; a power of two.
    pub minimum: u32,
    /// Multiples of this are fast.
    pub preferred: u32,
    /// Longest payload of one request.
    pub maximum: u32,
}

impl Default for BlockSizes {
    fn default() -> Self {
        Self { minimum: 1, preferred: 4096, maximum: MAX_PAYLOAD }
    }
}

/// An export: a disk with a name.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Export {
    /// Its name; the default export has an empty one.
    pub name: String,
    /// A sentence for people.
    pub description: String,
    /// Its size in bytes.
    pub size: u64,
    /// What it can do.
    pub flags: TransmissionFlags,
    /// The lengths of its requests.
    pub blocks: BlockSizes,
}

impl Export {
    /// An export that can be read and written.
    #[must_use]
    pub fn new(name: &str, size: u64) -> Self {
        let flags = TransmissionFlags::HAS_FLAGS
            | TransmissionFlags::FLUSH
            | TransmissionFlags::FUA
            | TransmissionFlags::TRIM
            | TransmissionFlags::WRITE_ZEROES
            | TransmissionFlags::DF
            | TransmissionFlags::MULTI_CONN
            | TransmissionFlags::CACHE;
        let blocks = BlockSizes::default();
        Self { name: name.into(), description: String::new(), size, flags, blocks }
    }

    /// The same export for readers only.
    #[must_use]
    pub fn read_only(mut self) -> Self {
        self.flags |= TransmissionFlags::READ_ONLY;
        self.flags -= TransmissionFlags::TRIM | TransmissionFlags::WRITE_ZEROES;
        self
    }

    /// Whether `length` bytes from `offset` lie within the export.
    #[must_use]
    pub fn holds(&self, offset: u64, length: u64) -> bool {
        offset.checked_add(length).is_some_and(|end| end <= self.size)
    }
}

/// A run of bytes with the same status in the context `base:allocation`.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Extent {
    /// Its length in bytes.
    pub length: u64,
    /// It is not allocated.
    pub hole: bool,
    /// It reads as zeros.
    pub zero: bool,
}

impl Extent {
    /// `NBD_STATE_HOLE` and `NBD_STATE_ZERO`.
    #[must_use]
    pub fn flags(self) -> u32 {
        u32::from(self.hole) | u32::from(self.zero) << 1
    }
}
