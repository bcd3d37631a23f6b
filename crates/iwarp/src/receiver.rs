//! The receive half: FPDUs become segments that obey the RFCs.

use quipu_wire::control::Control;
use quipu_wire::mpa::{CRC_LEN, LENGTH_LEN, crc32c, fpdu_len};
use quipu_wire::rdmap::{
    AtomicRequest, AtomicResponse, FlushRequest, Immediate, Opcode, OpcodeSet, ReadRequest,
    TaggedOp, UntaggedOp, queue,
};
use quipu_wire::terminate::Terminate;
use quipu_wire::{Stag, WireError, ddp};

use crate::pieces::Within;
use crate::{Extensions, Negotiated, ProtocolError};

/// What a Send carries in addition to its payload.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SendKind {
    /// Nothing.
    Plain,
    /// An STag to invalidate when the message is delivered.
    Invalidate(Stag),
    /// An immediate.
    Immediate(u32),
}

/// One checked segment. Payload borrows the bytes given to [`Receiver::next`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Segment<'a> {
    /// Part of an RDMA Write.
    Write {
        /// Names the region.
        stag: Stag,
        /// Tagged offset of the first payload byte.
        to: u64,
        /// It ends the message.
        last: bool,
        /// The bytes; may be empty.
        payload: &'a [u8],
    },
    /// Part of an RDMA Read Response. That it continues the response due is the caller's to check.
    ReadResponse {
        /// The sink's STag of the request.
        stag: Stag,
        /// Tagged offset of the first payload byte.
        to: u64,
        /// It ends the message.
        last: bool,
        /// The bytes; may be empty.
        payload: &'a [u8],
    },
    /// Part of a Send.
    Send {
        /// What it carries in addition to its payload.
        kind: SendKind,
        /// Raise a solicited event on delivery.
        solicited: bool,
        /// The shared receive queue that it is for, where connections name one.
        srq: Option<u32>,
        /// How many requests the peer says to have executed, if the message has a place for that.
        executed: Option<u32>,
        /// Message sequence number: which receive it consumes.
        msn: u32,
        /// Offset of the payload in the message; 0 in the first segment.
        mo: u32,
        /// It ends the message.
        last: bool,
        /// The bytes; may be empty.
        payload: &'a [u8],
    },
    /// Immediate data. Consumes a receive as a Send does.
    Immediate {
        /// The shared receive queue that it is for, where connections name one.
        srq: Option<u32>,
        /// Message sequence number in the queue of the Sends.
        msn: u32,
        /// Raise a solicited event on delivery.
        solicited: bool,
        /// The payload.
        immediate: Immediate,
    },
    /// A read request.
    ReadRequest {
        /// Message sequence number in the queue of requests.
        msn: u32,
        /// The payload.
        request: ReadRequest,
    },
    /// An atomic request.
    AtomicRequest {
        /// Message sequence number in the queue of requests.
        msn: u32,
        /// The payload.
        request: AtomicRequest,
    },
    /// A flush.
    Flush {
        /// Message sequence number in the queue of requests.
        msn: u32,
        /// The payload.
        request: FlushRequest,
    },
    /// An atomic response.
    AtomicResponse(AtomicResponse),
    /// A Quipu control message. A Resume has ended the discarding when it is seen here; its count
    /// is the caller's to check.
    Control(Control),
    /// The peer ends the connection.
    Terminate(Terminate),
    /// A request that was dropped, see [`Receiver::discard_requests`].
    Discarded {
        /// What is taken of it all the same: as in [`Segment::Send`].
        executed: Option<u32>,
    },
}

impl Segment<'_> {
    /// Whether the segment belongs to a request: what the acknowledgement counts, and discarding
    /// drops.
    pub fn is_request(&self) -> bool {
        matches!(
            self,
            Segment::Write { .. }
                | Segment::Send { .. }
                | Segment::Immediate { .. }
                | Segment::ReadRequest { .. }
                | Segment::AtomicRequest { .. }
                | Segment::Flush { .. }
        )
    }

    /// Whether a request ends here: the count of requests goes up by one when this segment has been
    /// executed (`specs/quipu-wire.md` 5).
    pub fn ends_request(&self) -> bool {
        match self {
            Segment::Write { last, .. } | Segment::Send { last, .. } => *last,
            other => other.is_request(),
        }
    }
}

/// The state of the request queues between two messages: where the receiver can go back to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mark {
    send_msn: u32,
    request_msn: u32,
}

/// What is due on an untagged queue.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Due {
    msn: u32,
    pub(crate) mo: u32,
    /// Operation, ULP field and queue number of the message that has begun.
    open: Option<(UntaggedOp, u32, u32)>,
}

impl Due {
    const FIRST: Due = Due { msn: 1, mo: 0, open: None };

    fn at(msn: u32) -> Due {
        Due { msn, ..Due::FIRST }
    }
}

/// Checks and delivers what arrives on one connection, in order.
///
/// After an error the stream is of no use any more: the same bytes give the same error.
#[derive(Clone, Debug)]
pub struct Receiver {
    pub(crate) crc: bool,
    extensions: Extensions,
    pub(crate) due: [Due; queue::COUNT],
    /// State before the request message that was begun last.
    message_mark: Mark,
    /// A Write has begun and its last segment has not come.
    in_write: bool,
    pub(crate) discarding: bool,
    /// Whether long FPDUs are delivered as they come.
    pub(crate) piecewise: bool,
    /// Whether Writes that wrap are delivered.
    lets_wrap: bool,
    /// The FPDU of which a part was delivered.
    pub(crate) within: Option<Within>,
}

impl Receiver {
    /// The receive half of a connection just set up. `extensions` is what the private data agreed
    /// on.
    pub fn new(negotiated: &Negotiated, extensions: Extensions) -> Self {
        Receiver {
            crc: negotiated.crc,
            extensions,
            due: [Due::FIRST; queue::COUNT],
            message_mark: Mark { send_msn: 1, request_msn: 1 },
            in_write: false,
            discarding: false,
            piecewise: false,
            lets_wrap: false,
            within: None,
        }
    }

    /// From now on delivers Writes beyond the end of the address space as any others, to a responder who
    /// drops what it cannot execute.
    pub fn let_wrap(&mut self) {
        self.lets_wrap = true;
    }

    /// How many bytes beyond `bytes`, which begin with an FPDU, are needed to complete it: 0 if it
    /// is whole. While the length is unknown, the bytes that are missing for the shortest FPDU.
    pub fn needed(bytes: &[u8]) -> usize {
        let len = match bytes {
            [high, low, ..] => fpdu_len(usize::from(u16::from_be_bytes([*high, *low]))),
            _ => fpdu_len(ddp::TAGGED_LEN),
        };
        len.saturating_sub(bytes.len())
    }

    /// Takes one FPDU from the front of `bytes`. Gives its length, to be dropped from the front,
    /// and its segment; `None` if it is not whole yet (see [`Receiver::needed`]).
    #[inline]
    // Not an iterator: it is given the bytes anew at each call.
    #[allow(clippy::should_implement_trait)]
    pub fn next<'a>(
        &mut self,
        bytes: &'a [u8],
    ) -> Result<Option<(usize, Segment<'a>)>, ProtocolError> {
        if let Some(within) = self.within {
            return self.next_piece(within, bytes);
        }
        let [high, low, ..] = *bytes else {
            return Ok(None);
        };
        let ulpdu_len = u16::from_be_bytes([high, low]);
        if usize::from(ulpdu_len) < ddp::TAGGED_LEN {
            return Err(ProtocolError::UlpduLength(ulpdu_len));
        }
        let len = fpdu_len(usize::from(ulpdu_len));
        if bytes.len() < len {
            return self.begin_pieces(bytes, len);
        }
        if self.crc {
            check_crc(&bytes[..len])?;
        }
        let ulpdu = &bytes[LENGTH_LEN..LENGTH_LEN + usize::from(ulpdu_len)];
        Ok(Some((len, self.deliver(ulpdu)?)))
    }

    /// What the FPDU at the front of `bytes` would bring were it its turn: its length, and its segment if
    /// that is a tagged one, which needs nothing of what comes before it (RFC 5041 5.1). For bytes behind a
    /// gap, of which only a CRC says that they are an FPDU: without CRCs there is none.
    pub fn ahead<'a>(&self, bytes: &'a [u8]) -> Option<(usize, Option<Segment<'a>>)> {
        let [high, low, ..] = *bytes else { return None };
        let ulpdu_len = usize::from(u16::from_be_bytes([high, low]));
        let orderly = self.crc && !self.discarding && self.within.is_none();
        let fpdu = bytes.get(..fpdu_len(ulpdu_len)).filter(|_| orderly)?;
        check_crc(fpdu).ok()?;
        let ulpdu = &fpdu[LENGTH_LEN..LENGTH_LEN + ulpdu_len];
        let ddp::Header::Tagged(header) = ddp::Header::parse(ulpdu).ok()? else {
            return Some((fpdu.len(), None));
        };
        let Opcode::Tagged(op) = opcode(header.rsvd_ulp).ok()? else { return None };
        let (payload, ddp::Tagged { last, stag, to, .. }) = (&ulpdu[ddp::TAGGED_LEN..], header);
        to.checked_add(payload.len() as u64)?;
        let segment = match op {
            TaggedOp::Write => Segment::Write { stag, to, last, payload },
            TaggedOp::ReadResponse => Segment::ReadResponse { stag, to, last, payload },
        };
        Some((fpdu.len(), Some(segment)))
    }

    /// The state before the request message to which the request segment delivered last belongs:
    /// where to go back to if that message is refused.
    pub fn message_mark(&self) -> Mark {
        self.message_mark
    }

    /// Drops requests from now on: they are not checked (but their CRC is) and come out as
    /// [`Segment::Discarded`], with the acknowledgement that travels with some, until a Resume arrives. Then
    /// the requests are expected to go on from `mark`. Responses and control messages are delivered as ever.
    pub fn discard_requests(&mut self, mark: Mark) {
        self.discarding = true;
        self.in_write = false;
        self.message_mark = mark;
        self.due[queue::SEND as usize] = Due::at(mark.send_msn);
        self.due[queue::REQUEST as usize] = Due::at(mark.request_msn);
    }

    /// Whether a Write or a Send has begun whose last segment has not come.
    pub fn is_in_message(&self) -> bool {
        self.in_write || self.due[queue::SEND as usize].open.is_some()
    }

    /// Whether requests are being dropped.
    pub fn is_discarding(&self) -> bool {
        self.discarding
    }

    #[inline]
    fn deliver<'a>(&mut self, ulpdu: &'a [u8]) -> Result<Segment<'a>, ProtocolError> {
        let header = ddp::Header::parse(ulpdu).map_err(|error| match error {
            WireError::DdpVersion { tagged, version } => {
                ProtocolError::DdpVersion { tagged, version }
            }
            _ => ProtocolError::UlpduLength(ulpdu.len() as u16),
        })?;
        match header {
            ddp::Header::Tagged(header) => self.tagged(header, &ulpdu[ddp::TAGGED_LEN..]),
            ddp::Header::Untagged(header) => self.untagged(header, &ulpdu[ddp::UNTAGGED_LEN..]),
        }
    }

    #[inline]
    pub(crate) fn tagged<'a>(
        &mut self,
        header: ddp::Tagged,
        payload: &'a [u8],
    ) -> Result<Segment<'a>, ProtocolError> {
        let Opcode::Tagged(op) = opcode(header.rsvd_ulp)? else {
            return Err(ProtocolError::UnexpectedOpcode(header.rsvd_ulp));
        };
        let ddp::Tagged { last, stag, to, .. } = header;
        if op == TaggedOp::Write && self.discarding {
            return Ok(Segment::Discarded { executed: None });
        }
        // The last byte may be the last of the address space, hence one less.
        let wraps = !payload.is_empty() && to.checked_add(payload.len() as u64 - 1).is_none();
        if wraps && !(self.lets_wrap && op == TaggedOp::Write) {
            return Err(ProtocolError::ToWrap(op));
        }
        match op {
            TaggedOp::ReadResponse => Ok(Segment::ReadResponse { stag, to, last, payload }),
            TaggedOp::Write => {
                if !self.in_write {
                    self.message_mark = self.current();
                }
                self.in_write = !last;
                Ok(Segment::Write { stag, to, last, payload })
            }
        }
    }

    #[inline]
    pub(crate) fn untagged<'a>(
        &mut self,
        header: ddp::Untagged,
        payload: &'a [u8],
    ) -> Result<Segment<'a>, ProtocolError> {
        let octet = header.rsvd_ulp;
        let Opcode::Untagged(op) = opcode(octet)? else {
            return Err(ProtocolError::UnexpectedOpcode(octet));
        };
        let negotiated = match op.set() {
            OpcodeSet::Base => true,
            OpcodeSet::Rfc7306 => self.extensions.rfc7306,
            OpcodeSet::Quipu => self.extensions.quipu,
            OpcodeSet::Flush => self.extensions.flush,
        };
        if !negotiated {
            return Err(ProtocolError::UnexpectedOpcode(octet));
        }
        let qn = op.queue();
        let named = match qn == queue::SEND && self.extensions.xrc {
            true => queue::shared_number(header.qn).is_some(),
            false => header.qn == qn,
        };
        if !named {
            return Err(ProtocolError::InvalidQueue { octet, qn: header.qn });
        }
        let request = qn == queue::SEND || qn == queue::REQUEST;
        if request && self.discarding {
            return Ok(Segment::Discarded { executed: self.executed(op, &header) });
        }
        self.in_order(op, &header, payload.len())?;
        if request && self.due[qn as usize].open.is_none() {
            self.message_mark = self.current();
        }
        let segment = self.content(op, &header, payload)?;
        self.advance(op, &header, payload.len());
        Ok(segment)
    }

    /// Checks that the segment is the one that is due on its queue (RFC 5041 5.3).
    #[inline]
    fn in_order(
        &self,
        op: UntaggedOp,
        header: &ddp::Untagged,
        len: usize,
    ) -> Result<(), ProtocolError> {
        let due = &self.due[op.queue() as usize];
        let queue = op.queue();
        if header.msn != due.msn {
            return Err(ProtocolError::MsnRange { queue, expected: due.msn, got: header.msn });
        }
        if header.mo != due.mo {
            return Err(ProtocolError::InvalidMo { queue, expected: due.mo, got: header.mo });
        }
        if due.open.is_some_and(|open| open != (op, ulp_field(op, header), header.qn)) {
            return Err(ProtocolError::OperationChanged(header.rsvd_ulp));
        }
        if u64::from(header.mo) + len as u64 > u64::from(u32::MAX) {
            return Err(ProtocolError::MessageTooLong);
        }
        Ok(())
    }

    #[inline]
    fn advance(&mut self, op: UntaggedOp, header: &ddp::Untagged, len: usize) {
        let due = &mut self.due[op.queue() as usize];
        if header.last {
            *due = Due::at(due.msn.wrapping_add(1));
        } else {
            due.mo += len as u32;
            due.open = Some((op, ulp_field(op, header), header.qn));
        }
    }

    #[inline]
    fn content<'a>(
        &mut self,
        op: UntaggedOp,
        header: &ddp::Untagged,
        payload: &'a [u8],
    ) -> Result<Segment<'a>, ProtocolError> {
        let &ddp::Untagged { msn, mo, last, ulp, .. } = header;
        let kind = match op {
            UntaggedOp::Send | UntaggedOp::SendSe => SendKind::Plain,
            UntaggedOp::SendInvalidate | UntaggedOp::SendSeInvalidate => {
                SendKind::Invalidate(Stag(ulp))
            }
            UntaggedOp::SendImm | UntaggedOp::SendImmSe => SendKind::Immediate(ulp),
            _ => return self.fixed(op, header, payload),
        };
        let (solicited, srq) = (op.solicited(), queue::shared_number(header.qn));
        let executed = self.executed(op, header);
        Ok(Segment::Send { kind, solicited, srq, executed, msn, mo, last, payload })
    }

    /// The acknowledgement that travels with a message, if that has a place for it
    /// (`specs/quipu-wire.md` 5).
    #[inline]
    fn executed(&self, op: UntaggedOp, header: &ddp::Untagged) -> Option<u32> {
        let carries = self.extensions.acknowledging_sends && op.carries_executed();
        carries.then_some(header.ulp)
    }

    /// A message of fixed layout: one segment, whole.
    fn fixed(
        &mut self,
        op: UntaggedOp,
        header: &ddp::Untagged,
        payload: &[u8],
    ) -> Result<Segment<'static>, ProtocolError> {
        let octet = header.rsvd_ulp;
        let wrong_length = ProtocolError::PayloadLength { octet, len: payload.len() };
        if !header.last {
            return Err(wrong_length);
        }
        let fault = |error| match error {
            WireError::UnknownAtomic(code) => ProtocolError::UnknownAtomic(code),
            WireError::UnknownControl(_) | WireError::OutOfRange(_) => {
                ProtocolError::MalformedControl
            }
            _ => wrong_length,
        };
        let msn = header.msn;
        Ok(match op {
            UntaggedOp::ReadRequest => {
                Segment::ReadRequest { msn, request: ReadRequest::parse(payload).map_err(fault)? }
            }
            UntaggedOp::AtomicRequest => Segment::AtomicRequest {
                msn,
                request: AtomicRequest::parse(payload).map_err(fault)?,
            },
            UntaggedOp::Flush => {
                Segment::Flush { msn, request: FlushRequest::parse(payload).map_err(fault)? }
            }
            UntaggedOp::AtomicResponse => {
                Segment::AtomicResponse(AtomicResponse::parse(payload).map_err(fault)?)
            }
            UntaggedOp::Immediate | UntaggedOp::ImmediateSe => Segment::Immediate {
                msn,
                srq: queue::shared_number(header.qn),
                solicited: op.solicited(),
                immediate: Immediate::parse(payload).map_err(fault)?,
            },
            UntaggedOp::Terminate => Segment::Terminate(Terminate::parse(payload).map_err(fault)?),
            UntaggedOp::Control => self.control(Control::parse(payload).map_err(fault)?)?,
            _ => return Err(ProtocolError::UnexpectedOpcode(octet)),
        })
    }

    fn control(&mut self, control: Control) -> Result<Segment<'static>, ProtocolError> {
        if let Control::Resume { .. } = control {
            if !self.discarding {
                return Err(ProtocolError::UnexpectedResume);
            }
            self.discarding = false;
        }
        Ok(Segment::Control(control))
    }

    fn current(&self) -> Mark {
        Mark {
            send_msn: self.due[queue::SEND as usize].msn,
            request_msn: self.due[queue::REQUEST as usize].msn,
        }
    }
}

/// Whether the CRC at the end of an FPDU is that of what is before it.
#[inline]
fn check_crc(fpdu: &[u8]) -> Result<(), ProtocolError> {
    let (covered, crc) = fpdu.split_at(fpdu.len() - CRC_LEN);
    let got = u32::from_le_bytes([crc[0], crc[1], crc[2], crc[3]]);
    let computed = crc32c(covered);
    if got == computed { Ok(()) } else { Err(ProtocolError::Crc { got, computed }) }
}

/// The ULP field, where all segments of a message must agree on it. Elsewhere it is reserved and not looked
/// at (RFC 5040 4.1), or has an acknowledgement, for which any segment will do.
#[inline]
fn ulp_field(op: UntaggedOp, header: &ddp::Untagged) -> u32 {
    match op {
        UntaggedOp::SendInvalidate
        | UntaggedOp::SendSeInvalidate
        | UntaggedOp::SendImm
        | UntaggedOp::SendImmSe => header.ulp,
        _ => 0,
    }
}

#[inline]
pub(crate) fn opcode(octet: u8) -> Result<Opcode, ProtocolError> {
    Opcode::parse(octet).map_err(|error| match error {
        WireError::RdmapVersion(version) => ProtocolError::RdmapVersion(version),
        _ => ProtocolError::UnexpectedOpcode(octet),
    })
}
