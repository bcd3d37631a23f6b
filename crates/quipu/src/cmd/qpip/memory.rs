//! Registered memory with octets that are sent or kept for it, counted as long as anybody holds it: clients
//! that read slowly are not to make a server hold more than it has decided to.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use quipu::{Access, Error, MemoryRegion, ProtectionDomain, Sge};

/// How much is held before one is sparing with it.
const PLENTY: u64 = 256 << 20;
/// What the shortest region takes: a page.
const LEAST: u64 = 4096;
/// How much is sent, and of what is not kept copied, at once; and how much when memory or places are scarce.
pub(super) const PIECE: u64 = 256 << 10;
pub(super) const SMALL_PIECE: u64 = 16 << 10;

/// Gives out regions, and knows how much of them there is.
#[derive(Clone, Debug)]
pub(super) struct Memory {
    pd: ProtectionDomain,
    held: Arc<AtomicU64>,
    plenty: u64,
}

/// A region with octets, counted until it is dropped.
#[derive(Debug)]
pub(super) struct Held {
    region: MemoryRegion,
    cost: u64,
    held: Arc<AtomicU64>,
}

fn cost(len: u64) -> u64 {
    len.max(1).next_multiple_of(LEAST)
}

impl Memory {
    pub(super) fn new(pd: &ProtectionDomain) -> Self {
        Self { pd: pd.clone(), held: Arc::default(), plenty: PLENTY }
    }

    /// The same with another idea of plenty.
    #[cfg(test)]
    pub(super) fn with_plenty(pd: &ProtectionDomain, plenty: u64) -> Self {
        Self { plenty, ..Self::new(pd) }
    }

    /// Registers a copy of some octets.
    pub(super) fn hold(&self, bytes: &[u8]) -> Result<Held, Error> {
        let region = self.pd.register(bytes.len(), Access::LOCAL_WRITE)?;
        region.write(0, bytes)?;
        let cost = cost(bytes.len() as u64);
        self.held.fetch_add(cost, Ordering::Relaxed);
        Ok(Held { region, cost, held: Arc::clone(&self.held) })
    }

    /// Octets that are held.
    pub(super) fn held(&self) -> u64 {
        self.held.load(Ordering::Relaxed)
    }

    /// Whether so many octets more can be held with ease.
    pub(super) fn has_room(&self, len: u64) -> bool {
        self.held() + cost(len) <= self.plenty
    }

    /// How many of `most` pieces may be under way at once to one client.
    pub(super) fn sends(&self, most: usize) -> usize {
        if self.has_room(PIECE) { most } else { 1 }
    }

    /// How much is to be copied at once.
    pub(super) fn piece(&self) -> u64 {
        if self.has_room(PIECE) { PIECE } else { SMALL_PIECE }
    }
}

impl Held {
    /// Some of its octets, for a work request.
    pub(super) fn sge(&self, at: usize, len: usize) -> Result<Sge, Error> {
        self.region.sge(at, len)
    }

    /// Some of its octets.
    #[cfg(test)]
    pub(super) fn to_vec(&self, at: usize, len: usize) -> Result<Vec<u8>, Error> {
        self.region.to_vec(at, len)
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        self.held.fetch_sub(self.cost, Ordering::Relaxed);
    }
}
