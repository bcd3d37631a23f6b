//! What a queue pair keeps about its channel, and the words of the channel's slots.
//!
//! A channel joins two queue pairs on one host (`quipu_mem::ring`). A message is one slot or several; each
//! carries some of its bytes: in the slot, in the byte ring beside it, or by reference, as a list of
//! addresses in the sender's memory that the receiver reads for itself.

use quipu_mem::ring::{Channel, SlotHeader};

use crate::linger::Linger;
use crate::transmit::offer::Offers;
use crate::types::{ConnId, Flush, LinkId, QpId};

/// Requests, the `opcode` of a request slot.
pub(crate) mod request {
    pub(crate) const SEND: u8 = 1;
    pub(crate) const SEND_IMM: u8 = 2;
    pub(crate) const SEND_INV: u8 = 3;
    pub(crate) const WRITE: u8 = 4;
    pub(crate) const WRITE_IMM: u8 = 5;
    pub(crate) const READ: u8 = 6;
    pub(crate) const COMPARE_SWAP: u8 = 7;
    pub(crate) const FETCH_ADD: u8 = 8;
    pub(crate) const FLUSH: u8 = 9;
}

/// Responses, the `opcode` of a response slot.
pub(crate) mod response {
    /// Bytes of a read, in order.
    pub(crate) const READ_DATA: u8 = 1;
    /// The word before an atomic.
    pub(crate) const ATOMIC: u8 = 2;
    /// The oldest unexecuted request is refused; `imm` is the status, and the channel ends.
    pub(crate) const REFUSED: u8 = 3;
}

/// Flags of a slot.
pub(crate) mod flag {
    /// The message asks for a solicited event.
    pub(crate) const SOLICITED: u8 = 1;
    /// The message goes on in the next slot.
    pub(crate) const MORE: u8 = 2;
    /// The bytes are in the byte ring.
    pub(crate) const BYTES: u8 = 4;
    /// The slot has a list of (address, length) pairs, 8 bytes each, where the bytes are; for a read,
    /// where they go.
    pub(crate) const REFERENCE: u8 = 8;
}

/// Pairs of a reference list that fit into a slot.
pub(crate) const REFERENCES: usize = quipu_mem::ring::INLINE_MAX / 16;
/// Bytes of a queue pair moved by reference or by direct access in one go, so that nobody waits long for the
/// adapter: no more than twice as many.
pub(crate) const CHUNK: u32 = 1 << 20;
/// Most bytes of a message that one slot has in the byte ring.
pub(crate) const PIECE: u32 = 16 << 10;
/// Slots served in one go.
pub(crate) const BUDGET: usize = 64;

/// Which end of which channel the other side is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Other {
    /// A queue pair of this very adapter.
    Own(QpId),
    /// The engine behind a link, which is rung with this number; and this side's name for the connection.
    Linked { link: LinkId, bell: u32, conn: ConnId },
}

/// A read whose bytes go through the response ring, in progress.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PendingRead {
    pub(crate) rkey: u32,
    pub(crate) addr: u64,
    pub(crate) size: u32,
    pub(crate) done: u32,
}

/// Bytes that are asked for at once, and handed over.
pub(crate) const ASKED_MOST: u32 = 32 << 10;

/// Bytes of the request at the front that the peer was asked for, since the kernel does not let them be
/// fetched.
#[derive(Debug)]
pub(crate) struct Asked {
    /// Of which request, and where in it they begin.
    pub(crate) sequence: u32,
    pub(crate) offset: u32,
    /// How many they are.
    pub(crate) len: u32,
    /// What has come of them.
    pub(crate) bytes: Vec<u8>,
    /// The peer does not have them.
    pub(crate) denied: bool,
}

impl Asked {
    /// Whether there is more to come.
    pub(crate) fn is_open(&self) -> bool {
        !self.denied && self.bytes.len() < self.len as usize
    }
}

/// The channel of a connected queue pair.
pub(crate) struct ChannelPath {
    pub(crate) channel: Channel,
    pub(crate) other: Other,
    /// The number by which the peer rings for this queue pair.
    pub(crate) bell: u32,
    /// The block of the link's arena that the channel lies in, if this side allocated it.
    pub(crate) block: Option<u32>,
    /// The name of the connection at the peer.
    pub(crate) peer_tag: u64,
    /// Number of the peer's protection domain and queue pair, for the peer's directory.
    pub(crate) peer_pd: u32,
    pub(crate) peer_qp: u32,
    /// The read that is being answered.
    pub(crate) pending_read: Option<PendingRead>,
    /// Bytes of the read at the front that wait for a turn of the queue pair's lane.
    pub(crate) owed: u32,
    /// Whether the own requests went first in the last turn.
    pub(crate) answers_last: bool,
    /// The peer could not fetch what a request referred to: the bytes of those to come go through the rings.
    pub(crate) carries: bool,
    /// Nor could this side put the bytes of a read to where the peer said.
    pub(crate) answers: bool,
    pub(crate) asked: Option<Box<Asked>>,
    /// The request of which bytes were handed over last, and up to where in it.
    pub(crate) handed: Option<(u32, u32)>,
    /// Bytes done of the reference or read at the front of the request ring.
    pub(crate) front_done: u32,
    /// Bytes of the request at `sq.next` that were moved directly.
    pub(crate) direct_done: u32,
    /// The kernel has refused to move bytes that the peer grants: it is asked for those.
    pub(crate) barred: bool,
    /// Whether the peer is offered requests.
    pub(crate) offers: Offers,
    pub(crate) linger: Linger,
    /// Executed requests that the peer was told of.
    pub(crate) told: u32,
    /// It is listed among those that owe the peer word of what they executed.
    pub(crate) owes_ack: bool,
    /// Something was pushed of which the peer was not told.
    pub(crate) unannounced: bool,
    /// It is listed among those whose requests may refer to memory by address.
    pub(crate) refers: bool,
    /// A stall was set and not cleared.
    pub(crate) stalled: bool,
    /// It is listed at the shared receive queue that must get a receive.
    pub(crate) awaiting: bool,
    /// Times that nothing was found here in a row.
    pub(crate) idle: u32,
    /// Whether it stands in the list of channels that every `progress` looks at.
    pub(crate) hot: bool,
}

impl ChannelPath {
    pub(crate) fn new(channel: Channel, other: Other, bell: u32) -> Self {
        Self {
            channel,
            other,
            bell,
            block: None,
            peer_tag: 0,
            peer_pd: 0,
            peer_qp: 0,
            pending_read: None,
            owed: 0,
            answers_last: false,
            carries: false,
            answers: false,
            asked: None,
            handed: None,
            front_done: 0,
            direct_done: 0,
            barred: false,
            offers: Offers::default(),
            linger: Linger::default(),
            told: 0,
            owes_ack: false,
            unannounced: false,
            refers: false,
            stalled: false,
            awaiting: false,
            idle: 0,
            hot: false,
        }
    }

    /// Whether something waits for this side.
    pub(crate) fn has_incoming(&mut self) -> bool {
        let incoming = &mut self.channel.incoming;
        let waits = self.stalled || self.asked.as_ref().is_some_and(|asked| asked.is_open());
        incoming.responses.peek().is_some() || (incoming.requests.peek().is_some() && !waits)
    }
}

/// What a flush has in its slot, beside the place that the header names: the length of the range, placement
/// and level.
pub(crate) const FLUSH_BYTES: usize = 16;

/// The slot of a flush.
pub(crate) fn flush_slot(flush: Flush, ack: u32) -> (SlotHeader, [u8; FLUSH_BYTES]) {
    let mut bytes = [0; FLUSH_BYTES];
    bytes[..8].copy_from_slice(&flush.len.to_ne_bytes());
    (bytes[8], bytes[9]) = (flush.placement.bits(), flush.level());
    let (length, raddr, rkey) = (FLUSH_BYTES as u32, flush.addr, flush.rkey);
    (
        SlotHeader { opcode: request::FLUSH, length, raddr, rkey, ack, ..SlotHeader::default() },
        bytes,
    )
}

/// The flush that a slot asks for; `None` if it makes no sense.
pub(crate) fn flush_of(header: &SlotHeader, bytes: &[u8; FLUSH_BYTES]) -> Option<Flush> {
    let [len @ .., _, _, _, _, _, _, _, _] = *bytes;
    Flush::of(header.raddr, header.rkey, u64::from_ne_bytes(len), bytes[8], bytes[9])
}

/// A list of addresses as a slot carries it.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct References {
    pairs: [(u64, u64); REFERENCES],
    count: usize,
}

impl References {
    /// Adds a pair; `false` if the slot is full.
    pub(crate) fn push(&mut self, addr: u64, len: u64) -> bool {
        if self.count == REFERENCES {
            return false;
        }
        self.pairs[self.count] = (addr, len);
        self.count += 1;
        true
    }

    pub(crate) fn as_slice(&self) -> &[(u64, u64)] {
        &self.pairs[..self.count]
    }

    /// The bytes of the list.
    pub(crate) fn to_bytes(self) -> ([u8; quipu_mem::ring::INLINE_MAX], usize) {
        let mut bytes = [0; quipu_mem::ring::INLINE_MAX];
        for (place, (addr, len)) in bytes.chunks_exact_mut(16).zip(self.as_slice()) {
            place[..8].copy_from_slice(&addr.to_ne_bytes());
            place[8..].copy_from_slice(&len.to_ne_bytes());
        }
        (bytes, self.count * 16)
    }

    /// Reads a list of `inline_len` bytes.
    pub(crate) fn from_bytes(bytes: &[u8]) -> Self {
        let mut list = Self::default();
        for pair in bytes.chunks_exact(16) {
            let half =
                |at: usize| pair[at..at + 8].try_into().map(u64::from_ne_bytes).unwrap_or_default();
            list.push(half(0), half(8));
        }
        list
    }

    /// The pairs that `len` bytes at `offset` of the list touch; `None` if the list is shorter.
    pub(crate) fn part(&self, offset: u64, len: u64) -> Option<Self> {
        let mut part = Self::default();
        let (mut skip, mut left) = (offset, len);
        for &(addr, pair_len) in self.as_slice() {
            if skip >= pair_len {
                skip -= pair_len;
                continue;
            }
            let take = (pair_len - skip).min(left);
            if take > 0 {
                part.push(addr.wrapping_add(skip), take);
            }
            left -= take;
            skip = 0;
        }
        (left == 0).then_some(part)
    }
}

/// Where the bytes of a slot are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Carried {
    Inline,
    Bytes,
    Reference,
}

/// Reads where the bytes of a slot are; `None` if the header contradicts itself.
pub(crate) fn carried(header: &SlotHeader) -> Option<Carried> {
    match header.flags & (flag::BYTES | flag::REFERENCE) {
        0 => (header.length == u32::from(header.inline_len)).then_some(Carried::Inline),
        flag::BYTES => Some(Carried::Bytes),
        flag::REFERENCE => Some(Carried::Reference),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_of_a_reference_list() {
        let mut list = References::default();
        list.push(100, 10);
        list.push(200, 5);
        list.push(300, 1);
        let (bytes, len) = list.to_bytes();
        let list = References::from_bytes(&bytes[..len]);
        assert_eq!(list.part(8, 4).unwrap().as_slice(), &[(108, 2), (200, 2)]);
        assert_eq!(list.part(15, 1).unwrap().as_slice(), &[(300, 1)]);
        assert_eq!(list.part(0, 16).unwrap().as_slice(), list.as_slice());
        assert!(list.part(1, 16).is_none());
    }
}
