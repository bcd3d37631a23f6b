//! Atomic writes and flushes (IBA A19): what programs do with them, and what must come of it. A word is never
//! seen in the middle of being written, by whoever looks whenever; and when a flush completes, all that was
//! written to its range before is there.

use std::sync::Arc;

use quipu_nic::{Flush, Placement, SendOp, WcOpcode};

use crate::drive::Draft;
use crate::load::Load;
use crate::model::{Sent, WindowUse};
use crate::rng::pattern;
use crate::world::World;

/// Bytes of an atomic write.
const WORD: usize = 8;

/// A flush of a range.
pub(crate) fn global(addr: u64, rkey: u32, len: usize) -> Flush {
    Flush { addr, rkey, len: len as u64, whole: false, placement: Placement::GLOBAL }
}

/// Whether a request writes to any of the bytes of a word.
fn touches(sent: &Sent, arena: usize, at: usize) -> bool {
    sent.effect.as_ref().is_some_and(|(of, start, bytes)| {
        *of == arena && *start < at + WORD && at < start + bytes.len()
    })
}

impl Load {
    pub(crate) fn draft_atomic_write(&mut self, world: &mut World, e: usize) -> Option<Draft> {
        let (arena, at, len, addr, rkey, through) = self.draw_place(e, WORD, 8);
        let (start, room) = match through {
            Some(window) => (self.windows[window].at, self.windows[window].len),
            None => (self.arenas[arena].start, self.arenas[arena].len),
        };
        // The address has to be a multiple of 8, which it need not be where a window begins at 0.
        if len < WORD || !addr.is_multiple_of(8) || at + WORD > start + room {
            return None;
        }
        let bytes: Arc<[u8]> = pattern(self.next_id, 0, WORD).into();
        let op = SendOp::AtomicWrite { addr, rkey };
        let mut draft = Draft::new(op, WcOpcode::AtomicWrite);
        self.load_word(world, e, &mut draft, &bytes);
        (draft.effect, draft.whole) = (Some((arena, at, bytes)), true);
        draft.window = through.map(|window| (window, WindowUse::Access));
        Some(draft)
    }

    /// Puts a word into a request, which takes it inline whatever its queue was made for.
    pub(crate) fn load_word(
        &mut self,
        world: &mut World,
        e: usize,
        draft: &mut Draft,
        bytes: &Arc<[u8]>,
    ) {
        if self.rng.percent(50) {
            (draft.len, draft.inline) = (WORD, Some(bytes.clone()));
        } else {
            self.load_payload(world, e, draft, bytes);
        }
    }

    pub(crate) fn draft_flush(&mut self, e: usize) -> Draft {
        let len = self.draw_len(self.plan.max_len);
        let (arena, at, len, addr, rkey, through) = self.draw_place(e, len, 1);
        let mut flush = global(addr, rkey, len);
        let mut range = (arena, at, len);
        if self.rng.percent(25) {
            // Of all that the key is for, whatever the range.
            (flush.whole, flush.addr, flush.len) = (true, self.rng.next(), self.rng.next());
            range = match through {
                Some(window) => (arena, self.windows[window].at, self.windows[window].len),
                None => (arena, self.arenas[arena].start, self.arenas[arena].len),
            };
        }
        let mut draft = Draft::new(SendOp::Flush(flush), WcOpcode::Flush);
        draft.flushes = Some(range);
        draft.window = through.map(|window| (window, WindowUse::Access));
        draft
    }

    /// Notes that a request has written `bytes`.
    pub(crate) fn overwritten(&mut self, arena: usize, at: usize, bytes: &[u8]) {
        let place = &mut self.arenas[arena];
        place.shadow[at..at + bytes.len()].copy_from_slice(bytes);
        // Of words that may have been written before, parts may be left now.
        let parts = |(start, word): &mut (usize, Arc<[u8]>)| {
            *start < at + bytes.len() && at < *start + word.len()
        };
        place.maybe.extend(place.words.extract_if(.., parts));
    }

    /// Compares what a flush was about with all that was written before it, by requests that have completed;
    /// later ones may have come already.
    pub(crate) fn check_flushed(
        &self,
        world: &World,
        e: usize,
        (arena, at, len): (usize, usize, usize),
    ) -> Result<(), String> {
        let place = &self.arenas[arena];
        if !world.hosts[place.host].alive {
            return Ok(());
        }
        let mut bytes = vec![0; place.segment.len()];
        let _ = place.segment.read(0, &mut bytes);
        let later = |at: usize| {
            let effects = self.ends[e].sq.iter().filter_map(|sent| sent.effect.as_ref());
            effects.into_iter().any(|(of, start, effect)| {
                let offset = at.checked_sub(*start);
                *of == arena && offset.and_then(|offset| effect.get(offset)) == Some(&bytes[at])
            })
        };
        let wrong =
            |&at: &usize| bytes[at] != place.shadow[at] && !place.excuses(&bytes, at) && !later(at);
        match (at..at + len).find(wrong) {
            None => Ok(()),
            Some(wrong) => Err(format!(
                "byte {} of {len} at the peer is {:#04x}, must be {:#04x}",
                wrong - at,
                bytes[wrong],
                place.shadow[wrong]
            )),
        }
    }

    /// Looks at all words that are being written: each is as it was, or as one of the requests leaves it.
    pub(crate) fn check_words(&self, world: &World) -> Result<(), String> {
        for end in self.ends.iter().filter(|end| end.exists) {
            for sent in end.sq.iter().filter(|sent| sent.whole) {
                let Some((arena, at, _)) = sent.effect else { continue };
                let place = &self.arenas[arena];
                let others = || end.sq.iter().filter(|other| touches(other, arena, at));
                let same = |other: &Sent| {
                    other.whole && other.effect.as_ref().is_some_and(|&(_, start, _)| start == at)
                };
                let unclear = place.words.len() + place.maybe.len() + place.wild.len() > 0;
                if unclear || !world.hosts[place.host].alive || !others().all(same) {
                    continue;
                }
                let mut is = [0; WORD];
                let _ = place.segment.read(at, &mut is);
                let by =
                    |other: &Sent| other.effect.as_ref().is_some_and(|(.., bytes)| bytes[..] == is);
                if is != place.shadow[at..at + WORD] && !others().any(by) {
                    let id = sent.id;
                    return Err(format!("request {id} has written {is:02x?}, a part of its word"));
                }
            }
        }
        Ok(())
    }
}
