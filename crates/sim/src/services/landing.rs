//! Writes, of which the peer's program is not told: where they must have come, and when.
//!
//! A message does not overtake the writes that were posted before it on the same stream (RFC 5040 5.5, IBA
//! 9.5). And where nothing disturbs, what was handed to a stream comes, if nobody says so.

use super::Services;
use super::model::Contents;
use crate::options::Service;
use crate::world::World;

/// A write that was posted, and was not seen at the peer yet.
pub(super) struct Write {
    from: usize,
    slot: usize,
    /// Its request, and whether that has succeeded.
    id: u64,
    done: bool,
    /// The first message that was posted behind it.
    next_message: usize,
}

impl Services {
    /// Notes a write that was posted.
    pub(super) fn expect_write(&mut self, from: usize, id: u64, slot: usize) {
        let next_message = self.messages.len();
        self.writes.push(Write { from, slot, id, done: false, next_message });
    }

    /// The request of a write has succeeded: the peer has executed it, or only the stream has it.
    pub(super) fn write_succeeded(&mut self, id: u64) -> Result<(), String> {
        let Some(place) = self.writes.iter().position(|write| write.id == id) else {
            return Ok(());
        };
        if self.service != Service::Xrc {
            self.writes[place].done = true;
            return Ok(());
        }
        let slot = self.writes.remove(place).slot;
        self.landed(slot)
    }

    /// A message has come: whatever its sender has written before it is there.
    pub(super) fn check_overtaken(&mut self, from: usize, message: usize) -> Result<(), String> {
        // Unreliable writes may be lost.
        if !matches!(self.service, Service::Iwarp | Service::Xrc) {
            return Ok(());
        }
        let before = |write: &mut Write| write.from == from && write.next_message <= message;
        let here: Vec<Write> = self.writes.extract_if(.., before).collect();
        here.iter().try_for_each(|write| {
            self.landed(write.slot)
                .map_err(|what| format!("it has overtaken write {}: {what}", write.id))
        })
    }

    /// Takes note of the writes that are there. One that must come and has not: its request.
    pub(super) fn missing_write(&mut self, world: &World) -> Option<u64> {
        let mut writes = std::mem::take(&mut self.writes);
        writes.retain(|write| {
            let awaited = write.done && self.is_certain(world, write.from);
            !(awaited && self.landed(write.slot).is_ok())
        });
        self.writes = writes;
        let awaited = |write: &&Write| write.done && self.is_certain(world, write.from);
        self.writes.iter().find(awaited).map(|write| write.id)
    }

    /// From now on a slot must hold what was written to it; whether it does.
    fn landed(&mut self, slot: usize) -> Result<(), String> {
        let slot = &mut self.slots[slot];
        let written = match &slot.contents {
            Contents::Maybe(bytes) | Contents::Whole(bytes) => bytes.clone(),
            _ => return Ok(()),
        };
        let before = std::mem::replace(&mut slot.contents, Contents::Holds(written));
        slot.check().inspect_err(|_| slot.contents = before)
    }
}
