//! What the strict mode asks of the adapter: memory as it is now, and messages that found no receive.

use quipu_mem::{Key, RegionInfo, Sge};

use crate::adapter::Adapter;
use crate::probe::Probe;
use crate::types::QpId;

impl<P: Probe> Adapter<P> {
    /// What the memory of a list looks like, as a queue pair would read it: equal for equal bytes. `None`
    /// for an empty list, and where it may not be read.
    #[must_use]
    pub fn fingerprint(&self, id: QpId, sges: &[Sge]) -> Option<u64> {
        let qp = self.qps.get(id)?;
        let total: u64 = sges.iter().map(|sge| u64::from(sge.len)).sum();
        let (mut hash, mut offset, mut piece) = (total, 0, [0; 4096]);
        while offset < total {
            let piece = &mut piece[..(total - offset).min(4096) as usize];
            self.hub.regions.gather(qp.pd_number(), sges, offset, piece).ok()?;
            // FNV-1a over words: not secure, and quick enough.
            for word in piece.chunks(8) {
                let mut bytes = [0; 8];
                bytes[..word.len()].copy_from_slice(word);
                hash = (hash ^ u64::from_le_bytes(bytes)).wrapping_mul(0x0100_0000_01b3);
                hash ^= hash >> 32;
            }
            offset += piece.len() as u64;
        }
        (total > 0).then_some(hash)
    }

    /// The region that a key is of now.
    #[must_use]
    pub fn region_of(&self, key: Key) -> Option<RegionInfo> {
        self.hub.regions.info(key)
    }

    /// Notes from now on for which queue pairs messages come that find no receive.
    pub fn watch_starved(&mut self) {
        self.hub.starved.get_or_insert_default();
    }

    /// Those queue pairs, each once, since this was asked last.
    pub fn take_starved(&mut self) -> Vec<QpId> {
        self.hub.starved.as_mut().map(std::mem::take).unwrap_or_default()
    }
}
