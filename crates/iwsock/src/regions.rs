//! Registered memory: what the peer may write and read.

use quipu_iwarp::RemoteFault;

use crate::MAX_REGIONS;
use crate::endpoint::Span;

/// The application's memory, by address. The endpoint passes only what the program has posted or
/// registered.
pub trait Memory {
    /// Copies memory at `address` to `into`.
    fn read(&self, address: u64, into: &mut [u8]);
    /// Copies `from` to memory at `address`.
    fn write(&mut self, address: u64, from: &[u8]);
}

/// What the peer may do with a region. Without either, the region is only a place for reads of this end.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Access {
    /// The peer may read it.
    pub read: bool,
    /// The peer may write it.
    pub write: bool,
}

#[derive(Clone, Copy, Debug)]
struct Region {
    stag: u32,
    span: Span,
    access: Access,
}

/// The regions of an endpoint.
#[derive(Debug)]
pub(crate) struct Regions {
    list: Vec<Region>,
    next: u32,
}

/// What a peer wants to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Wants {
    Read,
    Write,
}

impl Regions {
    /// None yet. STags grow from `first` on, so that an old one rarely names a new region.
    pub(crate) fn new(first: u32) -> Self {
        Self { list: Vec::new(), next: first }
    }

    /// Registers a span. None if there are too many.
    pub(crate) fn register(&mut self, span: Span, access: Access) -> Option<u32> {
        if self.list.len() >= MAX_REGIONS || span.address.checked_add(span.len as u64).is_none() {
            return None;
        }
        // 0 and 1 name no region: 1 is the STag of ready-to-receive messages.
        self.next = self.next.wrapping_add(0x101).max(2);
        while self.list.iter().any(|region| region.stag == self.next) {
            self.next = self.next.wrapping_add(1).max(2);
        }
        self.list.push(Region { stag: self.next, span, access });
        Some(self.next)
    }

    /// Forgets a region. Whether there was one.
    pub(crate) fn remove(&mut self, stag: u32) -> bool {
        let before = self.list.len();
        self.list.retain(|region| region.stag != stag);
        self.list.len() < before
    }

    /// Whether the peer may do so; an access of no bytes needs no region.
    pub(crate) fn check(
        &self,
        stag: u32,
        address: u64,
        len: u64,
        wants: Wants,
    ) -> Result<(), RemoteFault> {
        if len == 0 {
            return Ok(());
        }
        let end = address.checked_add(len).ok_or(RemoteFault::ToWrap)?;
        let region = self.list.iter().find(|region| region.stag == stag);
        let region = region.ok_or(RemoteFault::InvalidStag)?;
        let span = region.span;
        if address < span.address || end > span.address + span.len as u64 {
            return Err(RemoteFault::BaseBounds);
        }
        let may = match wants {
            Wants::Read => region.access.read,
            Wants::Write => region.access.write,
        };
        may.then_some(()).ok_or(RemoteFault::AccessRights)
    }

    /// The region that contains a span of this end's memory.
    pub(crate) fn containing(&self, span: Span) -> Option<u32> {
        let end = span.address.checked_add(span.len as u64)?;
        let contains = |region: &&Region| {
            span.address >= region.span.address
                && end <= region.span.address + region.span.len as u64
        };
        self.list.iter().find(contains).map(|region| region.stag)
    }
}
