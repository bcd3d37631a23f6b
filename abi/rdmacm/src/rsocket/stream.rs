//! The protocol of a stream: who may write where and how much, as numbers alone. Both directions are
//! alike; each end has an [`Outgoing`] and an [`Incoming`] half. Nothing here touches memory or a
//! queue pair.

use super::wire::{Greeting, Message, RESERVED, ahead};

/// The peer has broken a rule; the connection ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Violation;

/// A place in a ring that does not wrap.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Span {
    pub(crate) at: usize,
    pub(crate) len: usize,
}

/// The part of `len` bytes from the count `from` on that lies before the ring's end.
fn span(ring: u64, from: u64, len: u64) -> Span {
    let at = from % ring;
    Span { at: at as usize, len: len.min(ring - at) as usize }
}

/// What this end sends.
#[derive(Clone, Debug)]
pub(crate) struct Outgoing {
    /// Bytes of the peer's ring.
    ring: u64,
    /// Messages that may be under way.
    receives: u64,
    bytes: u64,
    bytes_taken: u64,
    messages: u64,
    messages_taken: u64,
}

impl Outgoing {
    pub(crate) fn new(peer: &Greeting) -> Self {
        let (ring, receives) = (u64::from(peer.ring), u64::from(peer.receives));
        Self { ring, receives, bytes: 0, bytes_taken: 0, messages: 0, messages_taken: 0 }
    }

    /// Where in the peer's ring data may be written now. Empty: not now.
    pub(crate) fn room(&self) -> Span {
        let free = self.ring - (self.bytes - self.bytes_taken);
        let under_way = self.messages - self.messages_taken;
        let free = if under_way < self.receives - u64::from(RESERVED) { free } else { 0 };
        span(self.ring, self.bytes, free)
    }

    /// Whether what is not data may be sent now.
    pub(crate) fn may_tell(&self) -> bool {
        self.messages - self.messages_taken < self.receives
    }

    /// A message was sent.
    pub(crate) fn sent(&mut self, message: Message) {
        self.messages += 1;
        if let Message::Data(len) = message {
            self.bytes += u64::from(len);
        }
    }

    /// The peer has said what it has taken.
    fn taken(&mut self, bytes: bool, count: u32) -> Result<(), Violation> {
        let (sent, known) = if bytes {
            (self.bytes, &mut self.bytes_taken)
        } else {
            (self.messages, &mut self.messages_taken)
        };
        let fresh = ahead(count, *known);
        if fresh > sent - *known {
            return Err(Violation);
        }
        *known += fresh;
        Ok(())
    }
}

/// What this end receives.
#[derive(Clone, Debug)]
pub(crate) struct Incoming {
    ring: u64,
    receives: u64,
    bytes: u64,
    bytes_taken: u64,
    messages: u64,
    /// What the peer was told of both.
    bytes_told: u64,
    messages_told: u64,
    ended: bool,
}

impl Incoming {
    pub(crate) fn new(own: &Greeting) -> Self {
        Self {
            ring: u64::from(own.ring),
            receives: u64::from(own.receives),
            bytes: 0,
            bytes_taken: 0,
            messages: 0,
            bytes_told: 0,
            messages_told: 0,
            ended: false,
        }
    }

    /// A message has come; those about the other direction are passed on to it.
    pub(crate) fn message(
        &mut self,
        message: Message,
        out: &mut Outgoing,
    ) -> Result<(), Violation> {
        self.messages += 1;
        match message {
            Message::Data(len) => {
                let len = u64::from(len);
                if self.ended || len > self.ring - self.unread() {
                    return Err(Violation);
                }
                self.bytes += len;
            }
            Message::BytesTaken(count) => out.taken(true, count)?,
            Message::MessagesTaken(count) => out.taken(false, count)?,
            Message::End => self.ended = true,
        }
        Ok(())
    }

    /// Bytes that have ever come.
    pub(crate) fn arrived(&self) -> u64 {
        self.bytes
    }

    /// Bytes that lie in the ring.
    pub(crate) fn unread(&self) -> u64 {
        self.bytes - self.bytes_taken
    }

    /// Those of them before the ring's end, `skip` bytes on.
    pub(crate) fn readable(&self, skip: u64) -> Span {
        span(self.ring, self.bytes_taken + skip, self.unread() - skip)
    }

    /// The program has got so many of them.
    pub(crate) fn take(&mut self, len: usize) {
        debug_assert!(len as u64 <= self.unread());
        self.bytes_taken += len as u64;
    }

    /// Whether the peer sends no more.
    pub(crate) fn ended(&self) -> bool {
        self.ended
    }

    /// What the peer is to be told now: when it has used half of what it knows to be free. (As eight
    /// messages at least are half, telling each other ends.)
    pub(crate) fn due(&self) -> Option<Message> {
        let of_data = self.receives - u64::from(RESERVED);
        if self.bytes_taken - self.bytes_told >= self.ring.div_ceil(2) {
            Some(Message::BytesTaken(self.bytes_taken as u32))
        } else if self.messages - self.messages_told >= of_data.div_ceil(2) {
            Some(Message::MessagesTaken(self.messages as u32))
        } else {
            None
        }
    }

    /// What [`Incoming::due`] said was sent.
    pub(crate) fn told(&mut self, message: Message) {
        match message {
            Message::BytesTaken(_) => self.bytes_told = self.bytes_taken,
            _ => self.messages_told = self.messages,
        }
    }
}

#[cfg(test)]
#[path = "stream_tests.rs"]
mod tests;
