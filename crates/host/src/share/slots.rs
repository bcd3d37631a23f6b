//! What stands in the slots of the rings: requests one way, completions and events of connections
//! the other.

// A fuzz target has this file in another place.
#[path = "slots/news.rs"]
mod news;

use std::net::SocketAddr;

use quipu_mem::ring::{ByteConsumer, ByteProducer, INLINE_MAX, RingError};
use quipu_mem::ring::{SlotConsumer, SlotHeader, SlotProducer};
use quipu_nic::{Key, Payload, SendFlags, Sge};

use super::words::{Reader, address_words};
// For tests and a fuzz target.
#[allow(unused_imports)]
pub(super) use news::{MAX_RECEIVED, MAX_SENT, tell};
pub(super) use news::{News, Teller, hear, state};

/// The most pieces of memory of a request.
pub(super) const MAX_SGE: usize = 64;
/// The most bytes that a request carries itself.
pub(super) const MAX_INLINE: usize = 1024;
/// Bytes of a piece of memory, and of an address.
const SGE: usize = 16;
const ADDRESS: usize = 24;
/// Bytes of the longest request behind its header.
const MAX_BODY: usize = ADDRESS + MAX_INLINE;

const SEND: u8 = 1;
const RECV: u8 = 2;
const FAIL: u8 = 3;
/// The most requests in a slot: as many as there is room for, of one piece of memory each.
pub(super) const MAX_TOGETHER: usize = INLINE_MAX / SGE;
/// The greatest number of a queue pair: a tag has 31 bits for it.
pub(super) const MAX_SERIAL: u32 = 0x7fff_ffff;

/// The number by which a request is known in both processes: its queue pair, its queue, and how many were
/// posted there before it, wrapping.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Tag {
    /// Up to [`MAX_SERIAL`].
    pub(super) qp: u32,
    pub(super) receive: bool,
    pub(super) sequence: u32,
}

impl Tag {
    pub(super) fn bits(self) -> u64 {
        u64::from(self.receive) << 63 | u64::from(self.qp) << 32 | u64::from(self.sequence)
    }

    pub(super) fn from_bits(bits: u64) -> Self {
        let qp = (bits >> 32) as u32 & MAX_SERIAL;
        Self { qp, receive: bits >> 63 != 0, sequence: bits as u32 }
    }

    /// Of the request behind it in its queue.
    #[inline]
    pub(super) fn next(self) -> Self {
        Self { sequence: self.sequence.wrapping_add(1), ..self }
    }
}

/// The body of a request, as it was copied out of the ring.
pub(super) type Body = [u8; MAX_BODY];

/// Room for one.
pub(super) const BODY: Body = [0; MAX_BODY];

#[inline]
fn sge_words(sge: &Sge) -> [u64; 2] {
    let (len, key) = (sge.len.to_ne_bytes(), sge.lkey.0.to_ne_bytes());
    let mut halves = [0; 8];
    halves[..4].copy_from_slice(&len);
    halves[4..].copy_from_slice(&key);
    [sge.addr, u64::from_ne_bytes(halves)]
}

/// A request, with its pieces of memory in a list of its own.
pub(super) struct Request<'a> {
    pub(super) tag: Tag,
    pub(super) flags: SendFlags,
    pub(super) to: Option<SocketAddr>,
    pub(super) payload: Payload<'a>,
}

/// What a program wants of the adapter without an answer.
pub(super) enum Order<'a> {
    /// That a request be carried out.
    Post(Request<'a>),
    /// That a queue pair go into error: its completions are lost.
    Fail(u32),
}

/// The next slot of a ring, which is filled with requests that follow each other in their queue, of one piece
/// of memory each. It is the ring's when it is [closed](Self::close).
#[derive(Debug, Default)]
pub(super) struct Filling {
    /// How many are in it. None: there is no such slot.
    count: usize,
    /// Tags of the first, and of one that may be put behind the last; the flags of all.
    first: u64,
    next: u64,
    flags: u8,
}

impl Filling {
    /// Puts an order into the ring, where it is held back until the slot is closed and
    /// [shown](SlotProducer::show).
    ///
    /// # Errors
    ///
    /// As [`post`].
    #[inline]
    pub(super) fn put(
        &mut self,
        slots: &mut SlotProducer,
        bytes: &mut ByteProducer,
        order: &Order<'_>,
    ) -> Result<(), RingError> {
        match order {
            Order::Post(Request { tag, flags, to: None, payload: Payload::Sges([sge]) }) => {
                self.add(slots, *tag, flags.bits() as u8, sge)
            }
            Order::Post(request) => {
                self.close(slots);
                post(slots, bytes, request)
            }
            Order::Fail(qp) => {
                self.close(slots);
                fail(slots, *qp)
            }
        }
    }

    /// Puts a request behind those of its slot, or into another.
    #[inline(always)]
    pub(super) fn add(
        &mut self,
        slots: &mut SlotProducer,
        tag: Tag,
        flags: u8,
        sge: &Sge,
    ) -> Result<(), RingError> {
        if self.count == MAX_TOGETHER || (tag.bits(), flags) != (self.next, self.flags) {
            self.close(slots);
        }
        let slot = slots.reserve()?;
        if self.count == 0 {
            (self.first, self.flags) = (tag.bits(), flags);
        }
        let [addr, rest] = sge_words(sge);
        slot.put_word(2 * self.count, addr);
        slot.put_word(2 * self.count + 1, rest);
        self.count += 1;
        self.next = tag.next().bits();
        Ok(())
    }

    /// Gives the slot to the ring, which holds it back.
    #[inline]
    pub(super) fn close(&mut self, slots: &mut SlotProducer) {
        let count = std::mem::take(&mut self.count);
        // What was reserved once is there.
        if count > 0
            && let Ok(slot) = slots.reserve()
        {
            let receive = Tag::from_bits(self.first).receive;
            slot.hold(&SlotHeader {
                opcode: if receive { RECV } else { SEND },
                flags: self.flags,
                inline_len: (count * SGE) as u16,
                length: (count * SGE) as u32,
                imm: count as u32,
                raddr: self.first,
                ack: count as u32 - 1,
                ..SlotHeader::default()
            });
        }
    }
}

/// Orders that a queue pair go into error.
#[cold]
fn fail(slots: &mut SlotProducer, qp: u32) -> Result<(), RingError> {
    slots.push(
        &SlotHeader { opcode: FAIL, raddr: u64::from(qp) << 32, ..SlotHeader::default() },
        &[],
    )
}

/// Checks that a request is not longer than any may be.
///
/// # Errors
///
/// It is.
#[inline]
pub(super) fn check(request: &Request<'_>) -> Result<(), RingError> {
    if rest_len(&request.payload) > MAX_INLINE { Err(RingError::TooLong) } else { Ok(()) }
}

/// Bytes behind the address.
fn rest_len(payload: &Payload<'_>) -> usize {
    match payload {
        Payload::Sges(sges) => sges.len() * SGE,
        Payload::Inline(bytes) => bytes.len(),
    }
}

/// Posts a request, which is held back until [`SlotProducer::show`].
///
/// # Errors
///
/// There is no room; or the request is longer than any may be, or the other end has corrupted the ring.
#[inline]
pub(super) fn post(
    slots: &mut SlotProducer,
    bytes: &mut ByteProducer,
    request: &Request<'_>,
) -> Result<(), RingError> {
    check(request)?;
    let sges = match request.payload {
        Payload::Sges(sges) => sges.len(),
        Payload::Inline(_) => 0,
    };
    let start = if request.to.is_some() { ADDRESS } else { 0 };
    let len = start + rest_len(&request.payload);
    let inline_len = if len <= INLINE_MAX { len as u16 } else { 0 };
    let header = SlotHeader {
        opcode: if request.tag.receive { RECV } else { SEND },
        flags: request.flags.bits() as u8,
        inline_len,
        length: len as u32,
        imm: sges as u32,
        raddr: request.tag.bits(),
        rkey: u32::from(request.to.is_some()),
        ..SlotHeader::default()
    };
    let slot = slots.reserve()?;
    if len <= INLINE_MAX {
        let at = write_words(request, |index, word| slot.put_word(index, word));
        if let Payload::Inline(bytes) = request.payload {
            slot.payload().write_from(8 * at, bytes);
        }
    } else {
        let position = bytes.reserve(len as u32)?;
        let behind = |index: usize| position.wrapping_add(8 * index as u64);
        let at =
            write_words(request, |index, word| bytes.write(behind(index), &word.to_ne_bytes()));
        if let Payload::Inline(inline) = request.payload {
            bytes.write(behind(at), inline);
        }
    }
    slot.hold(&header);
    Ok(())
}

/// Writes the body of a request, word by word, but for the bytes that it carries itself; how many words.
#[inline]
fn write_words(request: &Request<'_>, mut put: impl FnMut(usize, u64)) -> usize {
    let mut at = 0;
    if let Some(to) = request.to {
        address_words(to).into_iter().enumerate().for_each(|(index, word)| put(index, word));
        at = ADDRESS / 8;
    }
    if let Payload::Sges(sges) = request.payload {
        for sge in sges {
            let [addr, rest] = sge_words(sge);
            put(at, addr);
            put(at + 1, rest);
            at += SGE / 8;
        }
    }
    at
}

/// Takes the next order out of the ring, into `body` and `sges`, and for how many requests it stands: of
/// several each has one of the pieces, and all but the tag of the first follow. `Ok(None)`: there is none.
///
/// # Errors
///
/// It makes no sense.
#[inline]
pub(super) fn take<'a>(
    slots: &mut SlotConsumer,
    bytes: &mut ByteConsumer,
    body: &'a mut Body,
    sges: &'a mut [Sge; MAX_SGE],
) -> Result<Option<(Order<'a>, usize)>, RingError> {
    let Some(header) = slots.peek() else { return Ok(None) };
    let (len, count) = (header.length as usize, header.imm as usize);
    if len > MAX_BODY || count > MAX_SGE || !matches!(header.opcode, SEND | RECV | FAIL) {
        return Err(RingError::Corrupt);
    }
    let out = &mut body[..len];
    if len <= INLINE_MAX {
        slots.payload().read_into(0, out);
    } else {
        // Requests use the ring of bytes one after the other.
        let position = bytes.position();
        bytes.read_into(position, out)?;
        bytes.release_to(position.wrapping_add(len as u64))?;
    }
    slots.pop();
    if header.opcode == FAIL {
        return Ok(Some((Order::Fail(Tag::from_bits(header.raddr).qp), 1)));
    }
    let mut rest = &body[..len];
    let mut to = None;
    if header.rkey != 0 {
        let (address, behind) = rest.split_at_checked(ADDRESS).ok_or(RingError::Corrupt)?;
        to = Some(Reader::new(address).address().ok_or(RingError::Corrupt)?);
        rest = behind;
    }
    let flags = SendFlags::from_bits_truncate(u32::from(header.flags));
    let tag = Tag { receive: header.opcode == RECV, ..Tag::from_bits(header.raddr) };
    let inline = flags.contains(SendFlags::INLINE) && !tag.receive;
    if inline && count == 0 {
        // A body is longer than that only by an address.
        if rest.len() > MAX_INLINE {
            return Err(RingError::Corrupt);
        }
        let payload = Payload::Inline(rest);
        return Ok(Some((Order::Post(Request { tag, flags, to, payload }), 1)));
    }
    let together = header.ack != 0;
    let several = (2..=MAX_TOGETHER).contains(&count) && header.ack as usize == count - 1;
    let fits = !together || (several && to.is_none());
    if inline || rest.len() != count * SGE || !fits {
        return Err(RingError::Corrupt);
    }
    for (sge, bytes) in sges.iter_mut().zip(rest.chunks_exact(SGE)) {
        let half = |at: usize| {
            u32::from_ne_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]])
        };
        let addr = u64::from_ne_bytes(std::array::from_fn(|at| bytes[at]));
        *sge = Sge { addr, len: half(8), lkey: Key(half(12)) };
    }
    let payload = Payload::Sges(&sges[..count]);
    Ok(Some((Order::Post(Request { tag, flags, to, payload }), if together { count } else { 1 })))
}
