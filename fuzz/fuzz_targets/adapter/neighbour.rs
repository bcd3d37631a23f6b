//! Another engine of this host: its link and its memory.

use quipu_nic::mem::Segment;
use quipu_nic::{LinkId, PeerMemory, PeerMemoryFault};

/// Memory of a peer: some addresses are there, others are not. What the adapter names as its own must be
/// memory that it may use.
pub struct PeerSpace {
    pub usable: (usize, usize),
}

impl PeerSpace {
    fn there(&self, remote: &[(u64, u64)]) -> Result<(), PeerMemoryFault> {
        let missing = remote.iter().any(|&(addr, _)| addr & 0x8000 != 0);
        if missing { Err(PeerMemoryFault::BadAddress) } else { Ok(()) }
    }
}

fn total<N: Copy + TryInto<u64>>(list: impl Iterator<Item = N>) -> u64 {
    list.map(|len| len.try_into().unwrap_or(0)).sum()
}

impl PeerMemory for PeerSpace {
    fn read(&self, remote: &[(u64, u64)], local: &[(usize, usize)]) -> Result<(), PeerMemoryFault> {
        self.there(remote)?;
        assert_eq!(total(remote.iter().map(|r| r.1)), total(local.iter().map(|l| l.1)));
        for &(addr, len) in local {
            let (start, end) = self.usable;
            assert!(len == 0 || (addr >= start && addr + len <= end), "reads into foreign memory");
        }
        Ok(())
    }

    fn write(
        &self,
        local: &[(usize, usize)],
        remote: &[(u64, u64)],
    ) -> Result<(), PeerMemoryFault> {
        self.there(remote)?;
        assert_eq!(total(remote.iter().map(|r| r.1)), total(local.iter().map(|l| l.1)));
        Ok(())
    }
}

const SEGMENT: usize = 400 << 10;

/// Another engine of this host, with the two segments of the link to it.
pub struct Neighbour {
    pub link: Option<LinkId>,
    pub own: Segment,
    pub peer: Segment,
    pub last: u8,
}

impl Neighbour {
    pub fn new(last: u8) -> Self {
        Self { link: None, own: Segment::heap(SEGMENT), peer: Segment::heap(SEGMENT), last }
    }
}
