//! Registered memory in places of one length: a work request has one of them, by its number.

use quipu::{Access, Error, MemoryRegion, ProtectionDomain, Sge};

/// Places, numbered from 0.
#[derive(Debug)]
pub(super) struct Places {
    memory: MemoryRegion,
    len: usize,
}

impl Places {
    /// Registers so many of `len` octets.
    pub(super) fn new(pd: &ProtectionDomain, count: usize, len: usize) -> Result<Self, Error> {
        Ok(Self { memory: pd.register(count * len, Access::LOCAL_WRITE)?, len })
    }

    /// All of a place, for a receive.
    pub(super) fn room(&self, place: u64) -> Result<[Sge; 1], Error> {
        self.filled(place, self.len)
    }

    /// The first octets of a place, for a send.
    pub(super) fn filled(&self, place: u64, len: usize) -> Result<[Sge; 1], Error> {
        Ok([self.memory.sge(place as usize * self.len, len)?])
    }

    /// Puts octets into a place; as many of them as it holds.
    pub(super) fn fill(&self, place: u64, bytes: &[u8]) -> Result<[Sge; 1], Error> {
        let bytes = &bytes[..bytes.len().min(self.len)];
        self.memory.write(place as usize * self.len, bytes)?;
        self.filled(place, bytes.len())
    }

    /// The first octets of a place, into a buffer.
    pub(super) fn read_into(&self, place: u64, out: &mut [u8]) -> Result<(), Error> {
        self.memory.read(place as usize * self.len, out)
    }

    /// The first octets of a place.
    pub(super) fn read(&self, place: u64, len: usize) -> Result<Vec<u8>, Error> {
        self.memory.to_vec(place as usize * self.len, len)
    }
}
