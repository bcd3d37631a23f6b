//! Registered memory in places of one length for messages.

use std::ops::Range;

use quipu::{Access, Error, MemoryRegion, ProtectionDomain, Sge};

/// Places, numbered from 0.
#[derive(Debug)]
pub(super) struct Places {
    memory: MemoryRegion,
    len: usize,
    free: Vec<u32>,
}

impl Places {
    /// Registers `count` places of `len` bytes for local use; all are free.
    pub(super) fn new(pd: &ProtectionDomain, count: u32, len: usize) -> Result<Self, Error> {
        let memory = pd.register(count as usize * len, Access::LOCAL_WRITE)?;
        Ok(Self { memory, len, free: (0..count).rev().collect() })
    }

    /// Whether a place is free.
    pub(super) fn has_free(&self) -> bool {
        !self.free.is_empty()
    }

    /// Takes a free place.
    pub(super) fn take(&mut self) -> Option<u32> {
        self.free.pop()
    }

    /// Makes a place free.
    pub(super) fn give_back(&mut self, place: u32) {
        self.free.push(place);
    }

    /// The first `len` bytes of a place, for a work request.
    pub(super) fn sge(&self, place: u32, len: usize) -> Result<[Sge; 1], Error> {
        Ok([self.memory.sge(place as usize * self.len, len)?])
    }

    /// All of a place, for a receive.
    pub(super) fn whole(&self, place: u32) -> Result<[Sge; 1], Error> {
        self.sge(place, self.len)
    }

    /// Copies bytes into a place, from `at` on.
    pub(super) fn write(&self, place: u32, at: usize, bytes: &[u8]) -> Result<(), Error> {
        self.memory.write(place as usize * self.len + at, bytes)
    }

    /// The memory, and where the first `len` bytes of a place from `at` on lie in it.
    pub(super) fn part(&self, place: u32, at: usize, len: usize) -> (&MemoryRegion, Range<usize>) {
        let from = place as usize * self.len + at;
        (&self.memory, from..from + len)
    }

    /// Copies the first `len` bytes of a place out.
    pub(super) fn read(&self, place: u32, len: usize, out: &mut Vec<u8>) -> Result<(), Error> {
        out.resize(len, 0);
        self.memory.read(place as usize * self.len, out)
    }
}

/// What a completion is of: a number of its kind, and of its place.
pub(super) fn id(kind: u32, place: u32) -> u64 {
    u64::from(kind) << 32 | u64::from(place)
}

/// The kind and the place of a completion.
pub(super) fn of_id(id: u64) -> (u32, u32) {
    ((id >> 32) as u32, id as u32)
}
