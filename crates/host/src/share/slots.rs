//! What stands in the slots of the rings: requests one way, completions and news of connections the other.

use std::net::SocketAddr;

use quipu_inet::tcp::Failure;
use quipu_mem::ring::{ByteConsumer, ByteProducer, INLINE_MAX, ProducerControl, RingError};
use quipu_mem::ring::{SlotConsumer, SlotHeader, SlotProducer};
use quipu_nic::{
    Completion, Key, Payload, QpState, SendFlags, Sge, TcpChange, WcExtra, WcOpcode, WcStatus,
};

use super::words::{Reader, address_words};

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
const COMPLETION: u8 = 1;
const CHANGE: u8 = 2;
const SENT: u8 = 3;

/// The most sends that one slot says are done.
pub(super) const MAX_SENT: u32 = 64;

/// The number by which a request is known in both processes: its queue pair, its queue, and how many were
/// posted there before it, wrapping.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Tag {
    /// Of 31 bits.
    pub(super) qp: u32,
    pub(super) receive: bool,
    pub(super) sequence: u32,
}

impl Tag {
    pub(super) fn bits(self) -> u64 {
        u64::from(self.receive) << 63 | u64::from(self.qp) << 32 | u64::from(self.sequence)
    }

    pub(super) fn from_bits(bits: u64) -> Self {
        let qp = (bits >> 32) as u32 & 0x7fff_ffff;
        Self { qp, receive: bits >> 63 != 0, sequence: bits as u32 }
    }

    /// Of the request behind it in its queue.
    fn next(self) -> Self {
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

/// Puts an order into the ring.
///
/// # Errors
///
/// As [`post`].
#[inline]
pub(super) fn put(
    slots: &mut SlotProducer,
    bytes: &mut ByteProducer,
    order: &Order<'_>,
) -> Result<(), RingError> {
    match order {
        Order::Post(request) => post(slots, bytes, request),
        Order::Fail(qp) => fail(slots, *qp),
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

/// Takes the next order out of the ring, into `body` and `sges`. `Ok(None)`: there is none.
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
) -> Result<Option<Order<'a>>, RingError> {
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
        return Ok(Some(Order::Fail(Tag::from_bits(header.raddr).qp)));
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
        return Ok(Some(Order::Post(Request { tag, flags, to, payload: Payload::Inline(rest) })));
    }
    if inline || rest.len() != count * SGE {
        return Err(RingError::Corrupt);
    }
    for (sge, bytes) in sges.iter_mut().zip(rest.chunks_exact(SGE)) {
        let half = |at: usize| {
            u32::from_ne_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]])
        };
        let addr = u64::from_ne_bytes(std::array::from_fn(|at| bytes[at]));
        *sge = Sge { addr, len: half(8), lkey: Key(half(12)) };
    }
    Ok(Some(Order::Post(Request { tag, flags, to, payload: Payload::Sges(&sges[..count]) })))
}

/// What comes back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum News {
    /// A request is done. Its `wr_id` is its tag; whose it is stands there.
    Completion(Completion),
    /// Sends that follow each other in their queue are done, up to this one: so many, from 1 to [`MAX_SENT`].
    Sent { last: Tag, count: u32 },
    /// Something has happened to the connection of a queue pair, which is in this state now.
    Change { qp: u32, change: TcpChange, state: QpState },
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
pub(super) fn state(number: u8) -> Option<QpState> {
    STATES.get(usize::from(number)).copied()
}

/// Tells a program something. If there is no room nothing is told.
///
/// # Errors
///
/// There is no room, or the program has corrupted the ring.
#[inline]
pub(super) fn tell(slots: &mut SlotProducer, news: &News) -> Result<(), RingError> {
    match *news {
        News::Completion(done) => {
            let header = SlotHeader {
                opcode: COMPLETION,
                flags: done.status as u8,
                length: done.byte_len,
                imm: done.vendor_err,
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

/// Tells a program of completions one after the other, and of sends that follow each other in one slot.
pub(super) struct Teller<'a> {
    slots: &'a mut SlotProducer,
    control: &'a ProducerControl,
    /// Sends that are still to be told of: the last, and how many.
    sent: Option<(Tag, u32)>,
    failed: Option<RingError>,
}

impl<'a> Teller<'a> {
    pub(super) fn new(slots: &'a mut SlotProducer, control: &'a ProducerControl) -> Self {
        Self { slots, control, sent: None, failed: None }
    }

    #[inline]
    pub(super) fn tell(&mut self, done: &Completion) {
        let tag = Tag::from_bits(done.wr_id);
        if tag.receive || done.status != WcStatus::Success {
            self.tell_sent();
            return self.put(&News::Completion(*done));
        }
        match &mut self.sent {
            // Who sleeps until there is enough counts slots.
            Some((last, count))
                if tag == last.next() && *count < MAX_SENT && !self.control.is_counted() =>
            {
                (*last, *count) = (tag, *count + 1);
            }
            _ => {
                self.tell_sent();
                self.sent = Some((tag, 1));
            }
        }
    }

    fn tell_sent(&mut self) {
        if let Some((last, count)) = self.sent.take() {
            self.put(&News::Sent { last, count });
        }
    }

    fn put(&mut self, news: &News) {
        if let Err(error) = tell(self.slots, news) {
            self.failed = Some(error);
        }
    }

    /// Tells the rest.
    ///
    /// # Errors
    ///
    /// As [`tell`], of any of them.
    pub(super) fn finish(mut self) -> Result<(), RingError> {
        self.tell_sent();
        self.failed.map_or(Ok(()), Err)
    }
}

/// Takes the next news out of the ring. `Ok(None)`: there is none.
///
/// # Errors
///
/// It makes no sense.
#[inline]
pub(super) fn hear(slots: &mut SlotConsumer) -> Result<Option<News>, RingError> {
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
                vendor_err: header.imm,
                ..Completion::default()
            }))
        }
        SENT => {
            let (last, count) = (Tag::from_bits(header.raddr), header.imm);
            let fine = !last.receive && (1..=MAX_SENT).contains(&count);
            fine.then_some(News::Sent { last, count })
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
                _ => return None,
            };
            let state = state(u8::try_from(header.rkey).ok()?)?;
            Some(News::Change { qp: u32::try_from(header.raddr).ok()?, change, state })
        }
        _ => None,
    }
}
