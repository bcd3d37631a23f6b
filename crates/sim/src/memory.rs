//! The memory of the simulated hosts, and the access that engines of one host have to each other's.
//!
//! A real host copies between processes by address. Here every address belongs to a segment that the
//! simulator owns, so that the copy is made through spans and needs no unsafe code; an address that
//! belongs to none is refused, as a host refuses one that is not mapped.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};

use quipu_nic::mem::{Segment, Span};
use quipu_nic::{Atomic, ConnId, Gather, PeerMemory, PeerMemoryFault, Piece, Time};

use crate::world::Host;

/// The address space of one host process.
#[derive(Default)]
pub struct AddressSpace {
    segments: BTreeMap<usize, Segment>,
    gone: bool,
    denied: bool,
}

/// An address space with its several users.
pub type SharedSpace = Arc<Mutex<AddressSpace>>;

impl AddressSpace {
    /// Makes a segment part of the address space.
    pub fn map(&mut self, segment: &Segment) {
        self.segments.insert(segment.addr(), segment.clone());
    }

    /// The process is gone: nothing can be reached any more.
    pub fn end(&mut self) {
        self.gone = true;
        self.segments.clear();
    }

    /// The host forbids other processes the access from now on.
    pub fn deny(&mut self) {
        self.denied = true;
    }

    /// The bytes of a range of addresses, for another process.
    fn span(&self, addr: usize, len: usize) -> Result<Span<'_>, PeerMemoryFault> {
        if self.gone || self.denied {
            return Err(PeerMemoryFault::Unreachable);
        }
        self.own_span(addr, len)
    }

    /// The bytes of a range of addresses, for the process itself.
    ///
    /// # Errors
    /// There are none.
    pub fn own_span(&self, addr: usize, len: usize) -> Result<Span<'_>, PeerMemoryFault> {
        let (start, segment) =
            self.segments.range(..=addr).next_back().ok_or(PeerMemoryFault::BadAddress)?;
        segment.span(addr - start, len).map_err(|_| PeerMemoryFault::BadAddress)
    }
}

impl Host {
    /// Puts what an adapter transmits into `out`, with the payload that it leaves in memory. True if that was
    /// all that it had.
    ///
    /// # Errors
    /// Some payload lies where there is no memory.
    pub fn transmit(
        &mut self,
        now: Time,
        conn: ConnId,
        (buffer, gather): (&mut [u8], &mut Gather),
        out: &mut Vec<u8>,
    ) -> Result<bool, PeerMemoryFault> {
        let head = self.adapter.transmit_from_memory(now, conn, buffer, gather);
        let space = self.space.lock().unwrap_or_else(PoisonError::into_inner);
        let mut done = 0;
        out.clear();
        for &Piece { at, addr, len } in gather.pieces() {
            out.extend_from_slice(&buffer[done..at]);
            done = at;
            let start = out.len();
            out.resize(start + len, 0);
            space.own_span(addr, len)?.read_into(0, &mut out[start..]);
        }
        out.extend_from_slice(&buffer[done..head]);
        Ok(head == 0 || gather.is_final(buffer.len() - head))
    }

    /// Has the adapter take `bytes` of a stream: how many it does. If they are `fresh`, none of them was
    /// shown before.
    pub fn receive(&mut self, now: Time, conn: ConnId, bytes: &[u8], fresh: bool) -> usize {
        let placed = if fresh { self.place(now, conn, bytes) } else { 0 };
        placed + self.adapter.handle_stream(now, conn, &bytes[placed..])
    }

    /// Puts of the bytes that arrive next on a stream as many into their places as the adapter has places
    /// for.
    fn place(&mut self, now: Time, conn: ConnId, bytes: &[u8]) -> usize {
        let mut places = Vec::new();
        let count = self.adapter.place_next(conn, &mut places).min(bytes.len());
        let space = self.space.lock().unwrap_or_else(PoisonError::into_inner);
        let mut done = 0;
        for (addr, len) in places {
            let some = len.min(count - done);
            let Ok(span) = space.own_span(addr, some) else { break };
            span.write_from(0, &bytes[done..done + some]);
            done += some;
        }
        if done > 0 {
            self.adapter.handle_placed(now, conn, done);
        }
        done
    }
}

/// Access of one process to the memory of another, or to its own.
pub struct Reach {
    own: SharedSpace,
    peer: SharedSpace,
    /// Whether the peer's memory is mapped, so that atomics can be executed there.
    maps: bool,
}

impl Reach {
    /// Access from the process with the address space `own` to the one with `peer`, which it maps or not.
    #[must_use]
    pub fn new(own: SharedSpace, peer: SharedSpace, maps: bool) -> Self {
        Self { own, peer, maps }
    }

    /// Copies between two lists of ranges of the same total length.
    fn copy(
        from: (&SharedSpace, &[(usize, usize)]),
        to: (&SharedSpace, &[(usize, usize)]),
    ) -> Result<(), PeerMemoryFault> {
        let mut bytes = Vec::new();
        {
            let space = from.0.lock().unwrap_or_else(PoisonError::into_inner);
            for &(addr, len) in from.1 {
                let span = space.span(addr, len)?;
                let start = bytes.len();
                bytes.resize(start + len, 0);
                span.read_into(0, &mut bytes[start..]);
            }
        }
        let space = to.0.lock().unwrap_or_else(PoisonError::into_inner);
        let mut rest = bytes.as_slice();
        for &(addr, len) in to.1 {
            let (now, later) = rest.split_at_checked(len).ok_or(PeerMemoryFault::BadAddress)?;
            space.span(addr, len)?.write_from(0, now);
            rest = later;
        }
        if rest.is_empty() { Ok(()) } else { Err(PeerMemoryFault::BadAddress) }
    }
}

/// Addresses of another process as this one's, which they are in a simulator.
fn here(ranges: &[(u64, u64)]) -> Vec<(usize, usize)> {
    ranges.iter().map(|&(addr, len)| (addr as usize, len as usize)).collect()
}

impl PeerMemory for Reach {
    fn read(&self, remote: &[(u64, u64)], local: &[(usize, usize)]) -> Result<(), PeerMemoryFault> {
        Self::copy((&self.peer, &here(remote)), (&self.own, local))
    }

    fn write(
        &self,
        local: &[(usize, usize)],
        remote: &[(u64, u64)],
    ) -> Result<(), PeerMemoryFault> {
        Self::copy((&self.own, local), (&self.peer, &here(remote)))
    }

    fn atomic(&self, addr: u64, op: Atomic) -> Option<u64> {
        if !self.maps {
            return None;
        }
        let space = self.peer.lock().unwrap_or_else(PoisonError::into_inner);
        Some(op.execute(space.span(addr as usize, 8).ok()?))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_is_mapped_can_be_reached() {
        let (own, peer) = (SharedSpace::default(), SharedSpace::default());
        let (a, b) = (Segment::heap(64), Segment::heap(64));
        own.lock().unwrap().map(&a);
        peer.lock().unwrap().map(&b);
        let reach = Reach::new(own.clone(), peer.clone(), false);
        a.write(0, b"quipu").unwrap();
        let (at_a, at_b) = (a.addr(), b.addr() as u64);
        reach.write(&[(at_a, 2), (at_a + 2, 3)], &[(at_b + 10, 4), (at_b + 20, 1)]).unwrap();
        let mut out = [0; 11];
        b.read(10, &mut out).unwrap();
        assert_eq!(&out, b"quip\0\0\0\0\0\0u");
        reach.read(&[(at_b + 10, 4)], &[(at_a + 32, 4)]).unwrap();
        let bad = reach.read(&[(at_b + 61, 4)], &[(at_a, 4)]);
        assert_eq!(bad, Err(PeerMemoryFault::BadAddress));
        let swapped = reach.read(&[(at_a as u64, 4)], &[(at_a, 4)]);
        assert_eq!(swapped, Err(PeerMemoryFault::BadAddress));
        peer.lock().unwrap().end();
        let dead = reach.read(&[(at_b, 4)], &[(at_a, 4)]);
        assert_eq!(dead, Err(PeerMemoryFault::Unreachable));
    }
}
