//! Registered memory: what peers write into without a copy, and what such writes are sent from.

use quipu::am::{Endpoint, Error, Port, Source};
use quipu::{Access, RemoteMemory, VouchedRegion};
use quipu_mem::Vouched;

use crate::segment::BASE;

/// Shorter writes are copied into messages, which costs less than a write of their own: of symmetric memory,
/// and of other memory, of which the kernel is asked whether it is there.
const SHORTEST: usize = 16 * 1024;
const SHORTEST_ELSEWHERE: usize = 64 * 1024;
/// The address space of a program.
const LOWEST: u64 = 4096;
const HIGHEST: u64 = (1 << 47) - 4096;

/// The symmetric memory, which is the segment of the endpoint, and all memory as a source.
#[derive(Debug)]
pub(crate) struct Registered {
    symmetric: VouchedRegion,
    symmetric_len: u64,
    all: VouchedRegion,
}

impl Registered {
    /// Registers the memory of this process, of which the symmetric memory has so many bytes.
    pub(crate) fn new(port: &Port, endpoint: &Endpoint, len: usize) -> Result<Self, Error> {
        let access = Access::LOCAL_WRITE | Access::REMOTE_WRITE;
        let symmetric_len = len as u64;
        // SAFETY: the symmetric memory stays mapped as long as the process lives, and the language lets
        // every process of the job write to it.
        let symmetric = unsafe { Vouched::new(BASE, symmetric_len, BASE as u64, access) };
        let symmetric = port.domain().register_vouched(symmetric)?;
        let shown = RemoteMemory { addr: BASE as u64, len: symmetric_len, rkey: symmetric.key() };
        endpoint.set_segment(Some(shown))?;
        let access = Access::LOCAL_WRITE | Access::ON_DEMAND;
        // SAFETY: the adapter looks whether pages are there before it touches them, and reads only what
        // the program names as the source of a put.
        let all = unsafe { Vouched::new(LOWEST as usize, HIGHEST - LOWEST, LOWEST, access) };
        let all = port.domain().register_vouched(all)?;
        Ok(Self { symmetric, symmetric_len, all })
    }

    /// The offset in symmetric memory, if `len` bytes at an address lie there. All processes have that
    /// memory at one address.
    fn symmetric(&self, at: u64, len: usize) -> Option<u64> {
        let offset = at.checked_sub(BASE as u64)?;
        let end = offset.checked_add(len as u64)?;
        (end <= self.symmetric_len).then_some(offset)
    }

    /// The offset in the peer's symmetric memory, if `len` bytes go there and are worth a write of their
    /// own.
    pub(crate) fn offset(&self, to: u64, from: *const u8, len: usize) -> Option<u64> {
        let is_symmetric = self.symmetric(from as u64, len).is_some();
        let shortest = if is_symmetric { SHORTEST } else { SHORTEST_ELSEWHERE };
        self.symmetric(to, len).filter(|_| len >= shortest)
    }

    /// Memory of this process as the source of a write.
    pub(crate) fn source(&self, from: *const u8, len: usize) -> Source {
        // Memory that is known to be there is not looked at again.
        let is_symmetric = self.symmetric(from as u64, len).is_some();
        let key = if is_symmetric { self.symmetric.key() } else { self.all.key() };
        Source::new(from as u64, len as u64, key)
    }
}
