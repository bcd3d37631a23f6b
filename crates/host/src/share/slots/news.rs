//! What the adapter tells a program: completions, and what happens to connections.

use quipu_inet::tcp::Failure;
use quipu_mem::ring::{INLINE_MAX, RingError, SlotConsumer, SlotHeader, SlotProducer};
use quipu_nic::{Completion, QpState, TcpChange, WcExtra, WcOpcode, WcStatus};

use super::super::words::{Reader, address_words};
use super::{ADDRESS, Tag};

const COMPLETION: u8 = 1;
const CHANGE: u8 = 2;
const SENT: u8 = 3;
const RECEIVED: u8 = 4;

/// The most sends that one slot says are done.
pub(in super::super) const MAX_SENT: u32 = 64;

/// The most receives that one slot says are done: it has room for the octets of so many.
pub(in super::super) const MAX_RECEIVED: usize = INLINE_MAX / 4;

/// What comes back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in super::super) enum News {
    /// A request is done. Its `wr_id` is its tag; whose it is stands there.
    Completion(Completion),
    /// Sends that follow each other in their queue are done, up to this one: so many, from 1 to [`MAX_SENT`].
    Sent { last: Tag, count: u32 },
    /// The same of receives, from 1 to [`MAX_RECEIVED`], with the octets that each has brought.
    Received { last: Tag, count: u32, lengths: [u32; MAX_RECEIVED] },
    /// Something has happened to the connection of a queue pair, which is in this state now.
    Change { qp: u32, change: TcpChange, state: QpState },
}

impl News {
    /// How many completions and events it is, which is what those count who sleep until there are enough.
    #[inline]
    pub(in super::super) fn count(&self) -> u32 {
        match *self {
            Self::Sent { count, .. } | Self::Received { count, .. } => count,
            Self::Completion(_) | Self::Change { .. } => 1,
        }
    }
}

/// The number of a status or operation, and back.
const STATUSES: [WcStatus; 24] = {
    use WcStatus::{
        BadRespErr, FatalErr, GeneralErr, InvEecStateErr, InvEecnErr, LocAccessErr, LocEecOpErr,
        LocLenErr, LocProtErr, LocQpOpErr, LocRddViolErr, MwBindErr, RemAbortErr, RemAccessErr,
        RemInvRdReqErr, RemInvReqErr, RemOpErr, RespTimeoutErr, RetryExcErr, RnrRetryExcErr,
        Success, TmErr, TmRndvIncomplete, WrFlushErr,
    };
    [
        Success,
        LocLenErr,
        LocQpOpErr,
        LocEecOpErr,
        LocProtErr,
        WrFlushErr,
        MwBindErr,
        BadRespErr,
        LocAccessErr,
        RemInvReqErr,
        RemAccessErr,
        RemOpErr,
        RetryExcErr,
        RnrRetryExcErr,
        LocRddViolErr,
        RemInvRdReqErr,
        RemAbortErr,
        InvEecnErr,
        InvEecStateErr,
        FatalErr,
        RespTimeoutErr,
        GeneralErr,
        TmErr,
        TmRndvIncomplete,
    ]
};

const STATES: [QpState; 7] = {
    use QpState::{Err, Init, Reset, Rtr, Rts, Sqd, Sqe};
    [Reset, Init, Rtr, Rts, Sqd, Sqe, Err]
};

/// The state of a number.
pub(in super::super) fn state(number: u8) -> Option<QpState> {
    STATES.get(usize::from(number)).copied()
}

/// Tells a program something. If there is no room nothing is told.
///
/// # Errors
///
/// There is no room, or the program has corrupted the ring.
#[inline]
pub(in super::super) fn tell(slots: &mut SlotProducer, news: &News) -> Result<(), RingError> {
    match *news {
        News::Completion(done) => {
            let header = SlotHeader {
                opcode: COMPLETION,
                flags: done.status as u8,
                length: done.byte_len,
                raddr: done.wr_id,
                ..SlotHeader::default()
            };
            match done.extra {
                WcExtra::From(source) => {
                    let slot = slots.reserve()?;
                    let from = address_words(source.into());
                    from.into_iter().enumerate().for_each(|(at, word)| slot.put_word(at, word));
                    slot.commit(&SlotHeader { rkey: 1, inline_len: ADDRESS as u16, ..header });
                    Ok(())
                }
                _ => slots.push(&header, &[]),
            }
        }
        News::Sent { last, count } => {
            let header = SlotHeader {
                opcode: SENT,
                imm: count,
                raddr: last.bits(),
                ..SlotHeader::default()
            };
            slots.push(&header, &[])
        }
        News::Received { last, count, ref lengths } => {
            let slot = slots.reserve()?;
            let lengths = &lengths[..(count as usize).min(MAX_RECEIVED)];
            for (at, pair) in lengths.chunks(2).enumerate() {
                let behind = pair.get(1).copied().unwrap_or(0);
                slot.put_word(at, u64::from(pair[0]) | u64::from(behind) << 32);
            }
            slot.commit(&SlotHeader {
                opcode: RECEIVED,
                inline_len: size_of_val(lengths) as u16,
                imm: count,
                raddr: last.bits(),
                ..SlotHeader::default()
            });
            Ok(())
        }
        News::Change { qp, change, state } => {
            let (flags, imm) = match change {
                TcpChange::Connected => (1, 0),
                TcpChange::PeerClosed => (2, 0),
                TcpChange::Closed => (3, 0),
                TcpChange::Aborted => (4, 0),
                TcpChange::Failed(Failure::Refused) => (5, 0),
                TcpChange::Failed(Failure::Reset) => (5, 1),
                TcpChange::Failed(Failure::TimedOut) => (5, 2),
                TcpChange::Failed(Failure::Unreachable) => (5, 3),
                TcpChange::Failed(Failure::Declined) => (5, 4),
            };
            let header = SlotHeader {
                opcode: CHANGE,
                flags,
                imm,
                raddr: u64::from(qp),
                rkey: state as u32,
                ..SlotHeader::default()
            };
            slots.push(&header, &[])
        }
    }
}

/// Tells a program of news one after the other, and of requests that follow each other in their queue, and
/// have succeeded, in one slot.
pub(in super::super) struct Teller<'a> {
    slots: &'a mut SlotProducer,
    /// How many completions and events the program was told of since the beginning, wrapping.
    told: &'a mut u32,
    /// Requests that are still to be told of: the last, how many, and the octets of receives.
    last: Tag,
    count: u32,
    lengths: [u32; MAX_RECEIVED],
    failed: Option<RingError>,
}

impl<'a> Teller<'a> {
    pub(in super::super) fn new(slots: &'a mut SlotProducer, told: &'a mut u32) -> Self {
        let last = Tag { qp: 0, receive: false, sequence: 0 };
        Self { slots, told, last, count: 0, lengths: [0; MAX_RECEIVED], failed: None }
    }

    #[inline]
    pub(in super::super) fn tell(&mut self, done: &Completion) {
        let tag = Tag::from_bits(done.wr_id);
        let source = matches!(done.extra, WcExtra::From(_));
        if done.status != WcStatus::Success || source {
            return self.put(&News::Completion(*done));
        }
        let most = if tag.receive { MAX_RECEIVED as u32 } else { MAX_SENT };
        if tag != self.last.next() || self.count >= most {
            self.tell_together();
        }
        if tag.receive {
            self.lengths[self.count as usize] = done.byte_len;
        }
        (self.last, self.count) = (tag, self.count + 1);
    }

    fn tell_together(&mut self) {
        let (last, lengths) = (self.last, self.lengths);
        let news = match std::mem::take(&mut self.count) {
            0 => return,
            count if !last.receive => News::Sent { last, count },
            1 => {
                let (wr_id, byte_len) = (last.bits(), lengths[0]);
                News::Completion(Completion { wr_id, byte_len, ..Completion::default() })
            }
            count => News::Received { last, count, lengths },
        };
        self.put(&news);
    }

    /// Tells of something after what it was given before.
    pub(in super::super) fn put(&mut self, news: &News) {
        self.tell_together();
        match tell(self.slots, news) {
            Ok(()) => *self.told = self.told.wrapping_add(news.count()),
            Err(error) => self.failed = Some(error),
        }
    }

    /// Tells the rest.
    ///
    /// # Errors
    ///
    /// As [`tell`], of any of them.
    pub(in super::super) fn finish(mut self) -> Result<(), RingError> {
        self.tell_together();
        self.failed.map_or(Ok(()), Err)
    }
}

/// Takes the next news out of the ring. `Ok(None)`: there is none.
///
/// # Errors
///
/// It makes no sense.
#[inline]
pub(in super::super) fn hear(slots: &mut SlotConsumer) -> Result<Option<News>, RingError> {
    let Some(header) = slots.peek() else { return Ok(None) };
    let news = read(slots, &header).ok_or(RingError::Corrupt)?;
    slots.pop();
    Ok(Some(news))
}

#[inline]
fn read(slots: &SlotConsumer, header: &SlotHeader) -> Option<News> {
    match header.opcode {
        COMPLETION => {
            let mut extra = WcExtra::None;
            if header.rkey != 0 {
                let mut bytes = [0; ADDRESS];
                slots.payload().read_into(0, &mut bytes);
                extra = WcExtra::From(Reader::new(&bytes).address()?.into());
            }
            let receive = Tag::from_bits(header.raddr).receive;
            Some(News::Completion(Completion {
                wr_id: header.raddr,
                status: *STATUSES.get(usize::from(header.flags))?,
                opcode: if receive { WcOpcode::Recv } else { WcOpcode::Send },
                extra,
                byte_len: header.length,
                ..Completion::default()
            }))
        }
        SENT => {
            let (last, count) = (Tag::from_bits(header.raddr), header.imm);
            let fine = !last.receive && (1..=MAX_SENT).contains(&count);
            fine.then_some(News::Sent { last, count })
        }
        RECEIVED => {
            let (last, count) = (Tag::from_bits(header.raddr), header.imm);
            if !last.receive || !(1..=MAX_RECEIVED as u32).contains(&count) {
                return None;
            }
            let mut bytes = [0; INLINE_MAX];
            slots.payload().read_into(0, &mut bytes[..4 * count as usize]);
            let mut lengths = [0; MAX_RECEIVED];
            for (length, bytes) in lengths.iter_mut().zip(bytes.as_chunks().0) {
                *length = u32::from_ne_bytes(*bytes);
            }
            Some(News::Received { last, count, lengths })
        }
        CHANGE => {
            let change = match (header.flags, header.imm) {
                (1, _) => TcpChange::Connected,
                (2, _) => TcpChange::PeerClosed,
                (3, _) => TcpChange::Closed,
                (4, _) => TcpChange::Aborted,
                (5, 0) => TcpChange::Failed(Failure::Refused),
                (5, 1) => TcpChange::Failed(Failure::Reset),
                (5, 2) => TcpChange::Failed(Failure::TimedOut),
                (5, 3) => TcpChange::Failed(Failure::Unreachable),
                (5, 4) => TcpChange::Failed(Failure::Declined),
                _ => return None,
            };
            let state = state(u8::try_from(header.rkey).ok()?)?;
            Some(News::Change { qp: u32::try_from(header.raddr).ok()?, change, state })
        }
        _ => None,
    }
}
