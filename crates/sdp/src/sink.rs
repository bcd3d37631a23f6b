//! A buffer that the peer has advertised, which this end reads.

use quipu_wire::sdp::Memory;

use crate::receive::RemoteMemory;

/// What the peer is to hear of a buffer.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Answer {
    /// Bytes that were read and not reported yet.
    pub(crate) read: u32,
    /// The rest is refused.
    pub(crate) send_sm: bool,
}

#[derive(Clone, Copy, Debug)]
struct Advert {
    memory: Memory,
    /// Bytes that this end has, from the beginning.
    taken: u32,
    /// Bytes of the read that is under way.
    reading: u32,
    /// The peer wants it back.
    is_cancelled: bool,
}

/// The buffer of the peer in a direction.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Sink {
    advert: Option<Advert>,
    answer: Answer,
}

impl Sink {
    pub(crate) fn is_open(&self) -> bool {
        self.advert.is_some()
    }

    pub(crate) fn open(&mut self, memory: Memory, inline: u32) {
        self.advert = Some(Advert { memory, taken: inline, reading: 0, is_cancelled: false });
    }

    /// What may be read now.
    pub(crate) fn rest(&self) -> Option<RemoteMemory> {
        let advert = self.advert.filter(|advert| advert.reading == 0 && !advert.is_cancelled)?;
        Some(RemoteMemory {
            addr: advert.memory.addr.wrapping_add(advert.taken.into()),
            len: advert.memory.len - advert.taken,
            rkey: advert.memory.rkey,
        })
    }

    /// Begins to read at most so many bytes.
    pub(crate) fn begin(&mut self, most: u32) -> Option<RemoteMemory> {
        let rest = self.rest()?;
        let len = rest.len.min(most);
        if let Some(advert) = &mut self.advert {
            advert.reading = len;
        }
        (len > 0).then_some(RemoteMemory { len, ..rest })
    }

    /// The read is done; whether a cancellation has waited for it.
    pub(crate) fn finish(&mut self) -> bool {
        let Some(advert) = &mut self.advert else { return false };
        let len = std::mem::take(&mut advert.reading);
        advert.taken += len;
        self.answer.read = self.answer.read.saturating_add(len);
        let (is_whole, is_cancelled) = (advert.taken == advert.memory.len, advert.is_cancelled);
        if is_whole {
            self.advert = None;
        } else if is_cancelled {
            self.refuse();
        }
        is_cancelled
    }

    /// Whether a read is under way.
    pub(crate) fn is_reading(&self) -> bool {
        self.advert.is_some_and(|advert| advert.reading > 0)
    }

    /// Reads no more of it.
    pub(crate) fn refuse(&mut self) {
        if self.advert.take().is_some() {
            self.answer.send_sm = true;
        }
    }

    /// The peer takes it back; whether the acknowledgement waits for a read that is under way.
    pub(crate) fn cancel(&mut self) -> bool {
        match &mut self.advert {
            Some(advert) if advert.reading > 0 => {
                advert.is_cancelled = true;
                true
            }
            _ => {
                self.refuse();
                false
            }
        }
    }

    pub(crate) fn answer(&mut self) -> &mut Answer {
        &mut self.answer
    }
}
