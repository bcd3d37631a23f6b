//! Messages as bytes and as values. `docs/active-messages.md` has the layout.

use crate::types::{Arg, Category, MAX_ARGS, Status, Tag};

/// Bytes that every message begins with.
pub const FIXED: usize = 8;
/// Most bytes that stand before the payload.
pub const MAX_HEAD: usize = FIXED + 8 + 16 + 4 * MAX_ARGS;

const TAGGED: u8 = 0x40;
const STARVED: u8 = 0x80;

/// What a message is. Requests, queries, signals and refusals of replies use a credit; everything up to
/// [`SegmentInfo`](Self::SegmentInfo) answers one of those and returns the credit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Kind {
    /// Runs a handler, and expects one answer.
    Request = 1,
    /// Says where the own segment is, and asks for the peer's.
    Segment = 2,
    /// A reply was refused; the status says why.
    ReplyRefused = 3,
    /// Answers a control message: gives unused credits back.
    Revoked = 4,
    /// The sender has come somewhere. It is not answered by itself.
    Signal = 5,
    /// Says where the lane is that the acceptor may send on, and asks for one the other way.
    Lane = 6,
    /// There is a message in a lane, whose receiver was asleep.
    Wake = 7,
    /// Runs a handler at the requester.
    Reply = 8,
    /// The handler did not reply.
    Ack = 9,
    /// The request was refused; the status says why.
    Return = 10,
    /// The segment: its address, key and length.
    SegmentInfo = 11,
    /// A control message: the acceptor wants unused credits back.
    Revoke = 12,
    /// A control message: the acceptor has another segment.
    SegmentChanged = 13,
    /// So many signals were taken: gives their credits back.
    SignalsTaken = 14,
    /// Answers [`Lane`](Self::Lane): where the lane is that the initiator may send on, if there is one.
    LaneInfo = 15,
}

impl Kind {
    #[inline]
    fn from_bits(bits: u8) -> Option<Self> {
        Some(match bits {
            1 => Self::Request,
            2 => Self::Segment,
            3 => Self::ReplyRefused,
            4 => Self::Revoked,
            5 => Self::Signal,
            6 => Self::Lane,
            7 => Self::Wake,
            8 => Self::Reply,
            9 => Self::Ack,
            10 => Self::Return,
            11 => Self::SegmentInfo,
            12 => Self::Revoke,
            13 => Self::SegmentChanged,
            14 => Self::SignalsTaken,
            15 => Self::LaneInfo,
            _ => return None,
        })
    }
}

/// A message but for its arguments and its payload.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Message {
    /// What it is.
    pub kind: Kind,
    /// Short, medium or bulk.
    pub category: Category,
    /// The requester had to wait for a credit.
    pub starved: bool,
    /// How many arguments there are.
    pub nargs: u8,
    /// Which handler is to run.
    pub handler: u16,
    /// Which request this is, or answers.
    pub id: u16,
    /// Answers: credits that come in addition to the one that returns, or -1 if that stays away.
    /// Revocations: how many.
    pub credits: i8,
    /// Why something was refused.
    pub status: Option<Status>,
    /// The tag, where it differs from that of the message before.
    pub tag: Option<Tag>,
    /// Bulk: where in the segment the payload lies. Segment information: the address.
    pub offset: u64,
    /// Bulk: bytes of the payload. Segment information: bytes of the segment. Medium: filled in by
    /// the parser.
    pub len: u64,
}

impl Message {
    /// A short message without arguments.
    #[must_use]
    #[inline]
    pub const fn new(kind: Kind, id: u16) -> Self {
        Self {
            kind,
            category: Category::Short,
            starved: false,
            nargs: 0,
            handler: 0,
            id,
            credits: 0,
            status: None,
            tag: None,
            offset: 0,
            len: 0,
        }
    }

    /// The first bytes, as one number: of a message with so many arguments.
    #[inline]
    pub(crate) fn fixed(&self, nargs: usize) -> u64 {
        let tagged = if self.tag.is_some() { TAGGED } else { 0 };
        let starved = if self.starved { STARVED } else { 0 };
        let first = self.kind as u8 | (self.category as u8) << 4 | tagged | starved;
        let status = self.status.map_or(0, |status| status as u8);
        u64::from(first)
            | (nargs as u64) << 8
            | u64::from(self.handler) << 16
            | u64::from(self.id) << 32
            | u64::from(self.credits.cast_unsigned()) << 48
            | u64::from(status) << 56
    }

    /// Writes everything but the payload, with the first [`MAX_ARGS`] of `args`; how many bytes that
    /// is. The payload of a medium message follows at once, at a multiple of 8 bytes.
    #[inline]
    pub fn encode(&self, args: &[Arg], out: &mut [u8; MAX_HEAD]) -> usize {
        let args = &args[..args.len().min(MAX_ARGS)];
        out[..FIXED].copy_from_slice(&self.fixed(args.len()).to_le_bytes());
        let mut at = FIXED;
        if let Some(Tag(tag)) = self.tag {
            out[at..at + 8].copy_from_slice(&tag.to_le_bytes());
            at += 8;
        }
        if self.category == Category::Bulk {
            out[at..at + 8].copy_from_slice(&self.offset.to_le_bytes());
            out[at + 8..at + 16].copy_from_slice(&self.len.to_le_bytes());
            at += 16;
        }
        let end = at + 4 * args.len();
        for (bytes, arg) in out[at..end].chunks_exact_mut(4).zip(args) {
            bytes.copy_from_slice(&arg.to_le_bytes());
        }
        at = end;
        if self.category == Category::Medium && !at.is_multiple_of(8) {
            out[at..at + 4].fill(0);
            at += 4;
        }
        at
    }

    /// Reads the head of a message of `len` bytes, of which `head` has the first, and its arguments:
    /// the first `nargs` of `args`, after which there may be anything. Also where the payload begins.
    /// None if it is not a message that [`encode`](Self::encode) writes.
    #[inline]
    #[must_use]
    pub fn parse(
        head: &[u8; MAX_HEAD],
        len: usize,
        args: &mut [Arg; MAX_ARGS],
    ) -> Option<(Self, usize)> {
        let fixed = head[..FIXED].first_chunk().map(|fixed| u64::from_le_bytes(*fixed))?;
        let first = fixed as u8;
        let mut message = Self::new(Kind::from_bits(first & 0xf)?, (fixed >> 32) as u16);
        message.category = Category::from_bits(first >> 4 & 3)?;
        message.starved = first & STARVED != 0;
        message.nargs = (fixed >> 8) as u8;
        message.handler = (fixed >> 16) as u16;
        message.credits = (fixed >> 48) as i8;
        message.status = Status::from_wire((fixed >> 56) as u8)?;
        let mut at = FIXED;
        let mut word = || {
            let bytes: &[u8; 8] = head.get(at..)?.first_chunk()?;
            at += 8;
            Some(u64::from_le_bytes(*bytes))
        };
        if first & TAGGED != 0 {
            message.tag = Some(Tag(word()?));
        }
        if message.category == Category::Bulk {
            (message.offset, message.len) = (word()?, word()?);
        }
        // In pairs, because the head was just written: wider reads would wait for the cache.
        let pairs = usize::from(message.nargs).div_ceil(2);
        let bytes: &[u8; 4 * MAX_ARGS] = head.get(at..)?.first_chunk()?;
        for (pair, bytes) in args.chunks_exact_mut(2).zip(bytes.chunks_exact(8)).take(pairs) {
            pair[0] = Arg::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]);
            pair[1] = Arg::from_le_bytes([bytes[4], bytes[5], bytes[6], bytes[7]]);
        }
        at += 4 * usize::from(message.nargs);
        if message.category == Category::Medium {
            at = at.next_multiple_of(8);
            message.len = len.checked_sub(at)? as u64;
        } else if at != len {
            return None;
        }
        (usize::from(message.nargs) <= MAX_ARGS).then_some((message, at))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn any_message() -> impl Strategy<Value = (Message, [Arg; MAX_ARGS])> {
        let kinds = prop::sample::select((1u8..=15).collect::<Vec<_>>());
        let head =
            (kinds, 0u8..3, any::<bool>(), 0u8..=16, any::<u16>(), any::<u16>(), any::<i8>());
        let rest = (0u8..=10, any::<Option<u64>>(), any::<u64>(), any::<u64>(), any::<[i32; 16]>());
        (head, rest).prop_map(|((kind, category, starved, nargs, handler, id, credits), rest)| {
            let (status, tag, offset, len, mut args) = rest;
            args[usize::from(nargs)..].fill(0);
            let category = Category::from_bits(category).unwrap();
            let bulk = category == Category::Bulk;
            let message = Message {
                kind: Kind::from_bits(kind).unwrap(),
                category,
                starved,
                nargs,
                handler,
                id,
                credits,
                status: Status::from_wire(status).unwrap(),
                tag: tag.map(Tag),
                offset: if bulk { offset } else { 0 },
                len: if bulk { len } else { 0 },
            };
            (message, args)
        })
    }

    proptest! {
        #[test]
        fn what_is_written_is_read((mut message, args) in any_message(), payload in 0usize..100) {
            let mut head = [0xa5; MAX_HEAD];
            let at = message.encode(&args[..message.nargs.into()], &mut head);
            let medium = message.category == Category::Medium;
            let len = at + if medium { payload } else { 0 };
            if medium {
                message.len = payload as u64;
                prop_assert!(at.is_multiple_of(8));
            }
            let mut read = [0; MAX_ARGS];
            prop_assert_eq!(Message::parse(&head, len, &mut read), Some((message, at)));
            let nargs = usize::from(message.nargs);
            prop_assert_eq!(&read[..nargs], &args[..nargs]);
        }

        #[test]
        fn no_bytes_make_it_panic(
            head in prop::array::uniform(any::<u8>()),
            len in 0..2 * MAX_HEAD,
        ) {
            let mut args = [0; MAX_ARGS];
            if let Some((message, at)) = Message::parse(&head, len, &mut args) {
                prop_assert!(at <= len && usize::from(message.nargs) <= MAX_ARGS);
            }
        }
    }
}
