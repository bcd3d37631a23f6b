//! Registered memory with octets that are sent or kept for it, counted as long as anybody holds it: clients
//! that read slowly are not to make a server hold more than it has decided to. What is merely kept gives way
//! to what is to be sent.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use quipu::{Access, Error, MemoryRegion, ProtectionDomain, Sge};

use super::stamp::Stamp;

/// How much is held before one is sparing with it; and what is had with ease whatever became of that.
const PLENTY: u64 = 256 << 20;
const LEAST_PLENTY: u64 = 4 << 20;
/// How many are kept at most: programs of a shared adapter have a limited number of regions.
const MOST_KEPT: usize = 4096;
/// What the shortest region takes: a page.
const LEAST: u64 = 4096;
/// How much is sent at once, and copied if it is not kept; and how much at first, and while memory is scarce.
pub(super) const PIECE: u64 = 256 << 10;
pub(super) const SMALL_PIECE: u64 = 16 << 10;

/// Gives out regions, keeps some, and knows how much of them there is.
#[derive(Debug)]
pub(super) struct Memory {
    pd: ProtectionDomain,
    held: Arc<AtomicU64>,
    plenty: u64,
    kept: HashMap<PathBuf, Kept>,
    /// Counts what was asked for, so that the oldest is known.
    clock: u64,
}

/// A region with octets, counted until it is dropped.
#[derive(Debug)]
pub(super) struct Held {
    region: MemoryRegion,
    cost: u64,
    held: Arc<AtomicU64>,
}

/// Octets of a place that somebody may ask for again.
#[derive(Debug)]
struct Kept {
    stamp: Stamp,
    region: Arc<Held>,
    /// When it was asked for last, by the memory's clock.
    used: u64,
}

fn cost(len: u64) -> u64 {
    len.max(1).next_multiple_of(LEAST)
}

impl Memory {
    pub(super) fn new(pd: &ProtectionDomain) -> Self {
        let (held, kept) = (Arc::default(), HashMap::new());
        Self { pd: pd.clone(), held, plenty: PLENTY, kept, clock: 0 }
    }

    /// The same with another idea of plenty.
    #[cfg(test)]
    pub(super) fn with_plenty(pd: &ProtectionDomain, plenty: u64) -> Self {
        Self { plenty, ..Self::new(pd) }
    }

    fn register(&self, bytes: &[u8]) -> Result<Held, Error> {
        let region = self.pd.register(bytes.len(), Access::LOCAL_WRITE)?;
        region.write(0, bytes)?;
        let cost = cost(bytes.len() as u64);
        self.held.fetch_add(cost, Ordering::Relaxed);
        Ok(Held { region, cost, held: Arc::clone(&self.held) })
    }

    /// Registers a copy of some octets. If that is refused, what is kept gives way to it, and from now on
    /// less counts as plenty: an adapter that another process shares may have less memory.
    pub(super) fn hold(&mut self, bytes: &[u8]) -> Result<Held, Error> {
        let had = self.held();
        loop {
            match self.register(bytes) {
                Ok(held) => return Ok(held),
                Err(error) => {
                    self.plenty = self.plenty.min((had / 4 * 3).max(LEAST_PLENTY));
                    if !self.let_go() {
                        return Err(error);
                    }
                }
            }
        }
    }

    /// Registers a copy of some octets, or at least of the first of them.
    pub(super) fn hold_piece(&mut self, bytes: &[u8]) -> Result<Held, Error> {
        let first = &bytes[..bytes.len().min(SMALL_PIECE as usize)];
        self.hold(bytes).or_else(|_| self.hold(first))
    }

    /// Registers a copy of some octets, if that is easy.
    pub(super) fn hold_with_ease(&mut self, bytes: &[u8]) -> Option<Arc<Held>> {
        if !self.make_room(bytes.len() as u64) {
            return None;
        }
        self.hold(bytes).ok().map(Arc::new)
    }

    /// Keeps a region for those who ask for the same again, unless it may be another already.
    pub(super) fn keep(&mut self, place: &Path, stamp: Stamp, region: &Arc<Held>) {
        if !stamp.is_settled() || (self.kept.len() >= MOST_KEPT && !self.let_go()) {
            return;
        }
        self.clock += 1;
        let kept = Kept { stamp, region: Arc::clone(region), used: self.clock };
        self.kept.insert(place.into(), kept);
    }

    /// What is kept of a place; what was there before is let go.
    pub(super) fn kept(&mut self, place: &Path, stamp: Stamp) -> Option<Arc<Held>> {
        if self.kept.get(place)?.stamp != stamp {
            self.kept.remove(place);
        }
        let kept = self.kept.get_mut(place)?;
        self.clock += 1;
        kept.used = self.clock;
        Some(Arc::clone(&kept.region))
    }

    /// Lets go of what nobody is sent and nobody has asked for for longest.
    fn let_go(&mut self) -> bool {
        let idle = self.kept.iter().filter(|(_, kept)| Arc::strong_count(&kept.region) == 1);
        let oldest = idle.min_by_key(|(_, kept)| kept.used).map(|(place, _)| place.clone());
        oldest.is_some_and(|oldest| self.kept.remove(&oldest).is_some())
    }

    /// Octets that are held.
    pub(super) fn held(&self) -> u64 {
        self.held.load(Ordering::Relaxed)
    }

    /// How much is kept.
    #[cfg(test)]
    pub(super) fn count_kept(&self) -> usize {
        self.kept.len()
    }

    /// Whether so many octets more can be held with ease, after some that are kept were let go.
    pub(super) fn make_room(&mut self, len: u64) -> bool {
        while self.held() + cost(len) > self.plenty {
            if cost(len) > self.plenty || !self.let_go() {
                return false;
            }
        }
        true
    }

    /// How many of `most` pieces may be under way at once to one client.
    pub(super) fn sends(&mut self, most: usize) -> usize {
        if self.make_room(PIECE) { most } else { 1 }
    }

    /// How much is to be copied at once.
    pub(super) fn piece(&mut self) -> u64 {
        if self.make_room(PIECE) { PIECE } else { SMALL_PIECE }
    }
}

impl Held {
    /// How many octets it has.
    pub(super) fn len(&self) -> usize {
        self.region.len()
    }

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
