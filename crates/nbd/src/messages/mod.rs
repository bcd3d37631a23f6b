//! NBD in the messages of a reliable connection whose data move by RDMA (`specs/nbd-queue-pairs.md`).
//!
//! | what | goes as |
//! |---|---|
//! | [`Terms`] of each end | private data of the connection request and of its acceptance |
//! | negotiation | the bytes of the protocol, cut into Sends anywhere |
//! | a request | one Send: the 28-byte header, key and address of the client's memory, short data of a write |
//! | long data | RDMA Writes (of a read) and RDMA Reads (of a write) that the server posts |
//! | a reply | one Send: the 16-byte header, short data of a read, or extents |
//!
//! The two ends keep no queue: the host posts what [`MessageServer`] and [`MessageClient`] say,
//! and gives them every message that arrives.

mod client;
mod server;
#[cfg(test)]
mod tests;

pub use client::{Completed, MessageClient, MessageEvent, Ticket};
pub use server::{Job, MessageServer, ServerStep, simple_reply};

use crate::wire::{ProtocolError, REQUEST_LEN, SIMPLE_REPLY_LEN, u16_at, u32_at, u64_at};
use crate::{MAX_OPTION, Want};

/// The first bytes of the private data.
const MAGIC: u32 = 0x4e42_4471;
const VERSION: u16 = 1;
/// Bytes of a message before short data: the header of a request, a key and an address.
pub const MESSAGE_HEADER: usize = REQUEST_LEN + REMOTE_LEN;
/// Bytes of a reply before its data.
pub const REPLY_HEADER: usize = SIMPLE_REPLY_LEN;
/// Bytes of a key and an address.
const REMOTE_LEN: usize = 12;
/// The most requests that either end keeps receives for.
pub const MOST_CREDITS: u16 = 256;
/// The least and the most that [`Terms::inline`] may be.
const INLINE: std::ops::RangeInclusive<u32> = 512..=64 * 1024;
/// Longest payload of a request over queue pairs, in bytes.
pub const MAX_MOVED: u32 = 1 << 20;

/// What an end says of itself before anything else.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Terms {
    /// Receives that it keeps posted: so many messages may be on their way to it.
    pub credits: u16,
    /// Longest data that it takes in a message, in bytes. Longer data move by RDMA.
    pub inline: u32,
}

impl Terms {
    /// Bytes of [`to_bytes`](Self::to_bytes).
    pub const LEN: usize = 12;

    /// As private data.
    #[must_use]
    pub fn to_bytes(self) -> [u8; Self::LEN] {
        let mut bytes = [0; Self::LEN];
        bytes[..4].copy_from_slice(&MAGIC.to_be_bytes());
        bytes[4..6].copy_from_slice(&VERSION.to_be_bytes());
        bytes[6..8].copy_from_slice(&self.credits.to_be_bytes());
        bytes[8..].copy_from_slice(&self.inline.to_be_bytes());
        bytes
    }

    /// Reads private data, which may be padded.
    ///
    /// # Errors
    ///
    /// They are not those of NBD, of another version, or name a number that is not allowed.
    pub fn from_bytes(bytes: &[u8]) -> Result<Self, ProtocolError> {
        let wrong = |why| ProtocolError::Message { why };
        let bytes = bytes.get(..Self::LEN).ok_or(wrong("the private data are too short"))?;
        if u32_at(bytes, 0) != MAGIC {
            let what = "the private data";
            return Err(ProtocolError::Magic { what, found: u32_at(bytes, 0).into() });
        }
        if u16_at(bytes, 4) != VERSION {
            return Err(wrong("the private data are of another version"));
        }
        let terms = Self { credits: u16_at(bytes, 6), inline: u32_at(bytes, 8) };
        if terms.credits == 0 || terms.credits > MOST_CREDITS {
            return Err(wrong("the private data name 0 or more than 256 credits"));
        }
        if !INLINE.contains(&terms.inline) {
            return Err(wrong(
                "the private data name inline data of less than 512 or more than 65536 bytes",
            ));
        }
        Ok(terms)
    }

    /// The longest message that this end takes, in bytes.
    #[must_use]
    pub fn longest_message(self) -> usize {
        MESSAGE_HEADER + self.inline as usize
    }
}

/// Memory of the client, as the server's RDMA requests name it.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub struct ClientMemory {
    /// The key.
    pub key: u32,
    /// The address of the first byte.
    pub address: u64,
}

impl ClientMemory {
    fn encode(self, out: &mut [u8]) {
        out[..4].copy_from_slice(&self.key.to_be_bytes());
        out[4..REMOTE_LEN].copy_from_slice(&self.address.to_be_bytes());
    }

    fn decode(bytes: &[u8]) -> Self {
        Self { key: u32_at(bytes, 0), address: u64_at(bytes, 4) }
    }
}

/// Bytes of the negotiation that have come and were not used yet.
#[derive(Debug, Default)]
struct Incoming(Vec<u8>);

impl Incoming {
    /// Adds a message.
    fn add(&mut self, message: &[u8]) -> Result<(), ProtocolError> {
        let limit = 2 * MAX_OPTION as usize;
        if self.0.len() + message.len() > limit {
            let (what, length) = ("the negotiation", (self.0.len() + message.len()) as u64);
            return Err(ProtocolError::TooLong { what, length, limit: limit as u64 });
        }
        self.0.extend_from_slice(message);
        Ok(())
    }

    /// The next bytes, if all of them have come.
    fn take(&mut self, want: Want) -> Option<Vec<u8>> {
        let Want::Bytes(count) = want else { return None };
        (self.0.len() >= count).then(|| self.0.drain(..count).collect())
    }
}
