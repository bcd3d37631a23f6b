//! Atomic writes and flushes over extended reliable connections: a word is never seen in the middle of being
//! written, and when a flush completes, what was written before is there.

use quipu_nic::{SendOp, WcOpcode};

use super::Services;
use super::drive::{Draft, REMOTE};
use super::model::Contents;
use crate::placement::global;
use crate::world::World;

/// Bytes of an atomic write.
const WORD: usize = 8;

impl Services {
    pub(super) fn draft_atomic_write(
        &mut self,
        world: &mut World,
        a: usize,
        draft: Draft,
    ) -> Draft {
        let (host, pd) = self.domain_of_peer(a);
        if !world.hosts[host].alive {
            return draft;
        }
        let payload = self.payload(WORD);
        let slot = self.new_slot(world, host, pd, WORD, REMOTE);
        let (addr, rkey) = (self.slots[slot].addr(), self.slots[slot].key());
        self.slots[slot].contents = Contents::Whole(payload.clone());
        let (op, opcode) = (SendOp::AtomicWrite { addr, rkey }, WcOpcode::AtomicWrite);
        Draft { op, opcode, payload, goals: None, target: Some(slot), ..draft }
    }

    /// Of what was written last, or of memory that nothing was written to.
    pub(super) fn draft_flush(&mut self, world: &mut World, a: usize, draft: Draft) -> Draft {
        let (host, pd) = self.domain_of_peer(a);
        if !world.hosts[host].alive {
            return draft;
        }
        let written = self.actors[a].sent.iter().rev().find_map(|sent| sent.target);
        let slot =
            written.unwrap_or_else(|| self.new_slot(world, host, pd, draft.payload.len(), REMOTE));
        let place = &self.slots[slot];
        let mut flush = global(place.addr(), place.key(), place.len());
        if self.rng.percent(25) {
            // Of all that the key is for, whatever the range.
            (flush.whole, flush.addr, flush.len) = (true, self.rng.next(), self.rng.next());
        }
        let (op, opcode, payload) = (SendOp::Flush(flush), WcOpcode::Flush, [].into());
        Draft { op, opcode, payload, goals: None, flushes: Some(slot), ..draft }
    }

    /// Looks at all words that are being written.
    pub(super) fn check_words(&self) -> Result<(), String> {
        let sent = self.actors.iter().flat_map(|actor| &actor.sent);
        let targets = sent.filter_map(|sent| sent.target);
        let mut words = targets
            .map(|slot| &self.slots[slot])
            .filter(|slot| matches!(slot.contents, Contents::Whole(_)));
        words.try_for_each(|slot| slot.check())
    }
}
