//! The memory of both hosts, as each reaches that of the other.

use std::sync::Arc;

use quipu_nic::mem::Segment;
use quipu_nic::*;

/// Access to the memory of segments that the test knows, by address.
#[derive(Default)]
pub struct Memory(pub std::sync::Mutex<Vec<Segment>>);

impl Memory {
    fn copy(&self, from: &[(usize, usize)], to: &[(usize, usize)]) -> Result<(), PeerMemoryFault> {
        let mut bytes = Vec::new();
        for &(addr, len) in from {
            let (segment, offset) = self.find(addr, len)?;
            let start = bytes.len();
            bytes.resize(start + len, 0);
            segment.read(offset, &mut bytes[start..]).unwrap();
        }
        let mut at = 0;
        for &(addr, len) in to {
            let (segment, offset) = self.find(addr, len)?;
            segment.write(offset, &bytes[at..at + len]).unwrap();
            at += len;
        }
        assert_eq!(at, bytes.len(), "both lists of a call have the same total");
        Ok(())
    }

    /// The bytes of a buffer, with the payload that belongs between them.
    pub fn between(&self, buffer: &[u8], gather: &Gather) -> Vec<u8> {
        let (mut bytes, mut done) = (Vec::new(), 0);
        for &Piece { at, addr, len } in gather.pieces() {
            bytes.extend_from_slice(&buffer[done..at]);
            done = at;
            let (segment, offset) = self.find(addr, len).expect("payload lies in memory");
            let start = bytes.len();
            bytes.resize(start + len, 0);
            segment.read(offset, &mut bytes[start..]).unwrap();
        }
        bytes.extend_from_slice(&buffer[done..]);
        bytes
    }

    pub fn find(&self, addr: usize, len: usize) -> Result<(Segment, usize), PeerMemoryFault> {
        let known = self.0.lock().unwrap();
        known
            .iter()
            .find(|s| addr >= s.addr() && addr + len <= s.addr() + s.len())
            .map(|s| (s.clone(), addr - s.addr()))
            .ok_or(PeerMemoryFault::BadAddress)
    }
}

impl PeerMemory for Memory {
    fn read(&self, remote: &[(u64, u64)], local: &[(usize, usize)]) -> Result<(), PeerMemoryFault> {
        self.copy(&as_local(remote), local)
    }

    fn write(
        &self,
        local: &[(usize, usize)],
        remote: &[(u64, u64)],
    ) -> Result<(), PeerMemoryFault> {
        self.copy(local, &as_local(remote))
    }
}

/// The same memory, where it is mapped in this process.
pub struct Mapped(pub Arc<Memory>);

impl PeerMemory for Mapped {
    fn read(&self, remote: &[(u64, u64)], local: &[(usize, usize)]) -> Result<(), PeerMemoryFault> {
        self.0.read(remote, local)
    }

    fn write(
        &self,
        local: &[(usize, usize)],
        remote: &[(u64, u64)],
    ) -> Result<(), PeerMemoryFault> {
        self.0.write(local, remote)
    }

    fn is_mapped(&self) -> bool {
        true
    }

    fn atomic(&self, addr: u64, op: Atomic) -> Option<u64> {
        let (segment, offset) = self.0.find(addr as usize, 8).ok()?;
        Some(op.execute(segment.span(offset, 8).unwrap()))
    }
}

fn as_local(remote: &[(u64, u64)]) -> Vec<(usize, usize)> {
    remote.iter().map(|&(addr, len)| (addr as usize, len as usize)).collect()
}
