//! RDMAP: control octet and opcodes (RFC 5040 4.1 and 4.2, RFC 7306 5), and the messages of fixed
//! layout.

use crate::field::{exactly, put, u32_at, u64_at};
use crate::{Payload, Stag, WireError};

const VERSION: u8 = 1;

/// Queue numbers of the untagged queues.
pub mod queue {
    /// Sends and immediate data (RFC 5040 4, RFC 7306 6).
    pub const SEND: u32 = 0;
    /// Read and atomic requests (RFC 5040 4, RFC 7306 5.2.1), and flushes.
    pub const REQUEST: u32 = 1;
    /// Terminate (RFC 5040 4).
    pub const TERMINATE: u32 = 2;
    /// Atomic responses (RFC 7306 5.2.2).
    pub const ATOMIC_RESPONSE: u32 = 3;
    /// Quipu control messages (`specs/quipu-wire.md` 4).
    pub const CONTROL: u32 = 4;
    /// How many queues there are.
    pub const COUNT: usize = 5;

    /// Tells the number of a shared receive queue from that of a queue of RDMAP.
    const SHARED: u32 = 1 << 31;
    const NUMBER: u32 = 0x00ff_ffff;

    /// The queue number by which a message of queue [`SEND`] names the shared receive queue `number`, of
    /// which 24 bits count (`specs/quipu-wire.md` 6).
    pub const fn shared(number: u32) -> u32 {
        SHARED | number & NUMBER
    }

    /// The number of the shared receive queue that a queue number names; `None` if it names none.
    pub const fn shared_number(qn: u32) -> Option<u32> {
        if qn & !NUMBER == SHARED { Some(qn & NUMBER) } else { None }
    }
}

/// Operations whose segments are tagged.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TaggedOp {
    /// RDMA Write, 0x0.
    Write,
    /// RDMA Read Response, 0x2.
    ReadResponse,
}

/// Operations whose segments are untagged.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum UntaggedOp {
    /// RDMA Read Request, 0x1; payload [`ReadRequest`].
    ReadRequest,
    /// Send, 0x3.
    Send,
    /// Send with Invalidate, 0x4: the ULP field is the STag.
    SendInvalidate,
    /// Send with Solicited Event, 0x5.
    SendSe,
    /// Send with Solicited Event and Invalidate, 0x6.
    SendSeInvalidate,
    /// Terminate, 0x7; payload [`crate::terminate::Terminate`].
    Terminate,
    /// Immediate Data, 0x8 (RFC 7306 6); payload [`Immediate`].
    Immediate,
    /// Immediate Data with Solicited Event, 0x9 (RFC 7306 6).
    ImmediateSe,
    /// Atomic Request, 0xA (RFC 7306 5.2.1); payload [`AtomicRequest`].
    AtomicRequest,
    /// Atomic Response, 0xB (RFC 7306 5.2.2); payload [`AtomicResponse`].
    AtomicResponse,
    /// Quipu's Send with immediate data, 0xC: the ULP field is the immediate (`specs/quipu-wire.md`
    /// 3).
    SendImm,
    /// Quipu's Send with immediate data and Solicited Event, 0xD.
    SendImmSe,
    /// Quipu's Flush, 0xE; payload [`FlushRequest`].
    Flush,
    /// Quipu's control message, 0xF; payload [`crate::control::Control`].
    Control,
}

/// Who defines an opcode, and so what must have been agreed on before it may be used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OpcodeSet {
    /// RFC 5040: always legal.
    Base,
    /// RFC 7306: legal once negotiated.
    Rfc7306,
    /// Quipu: legal once negotiated.
    Quipu,
    /// Quipu's Flush: legal once negotiated, by itself.
    Flush,
}

/// What the RDMAP control octet says (RFC 5040 4.1).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Opcode {
    /// An operation of tagged segments.
    Tagged(TaggedOp),
    /// An operation of untagged segments.
    Untagged(UntaggedOp),
}

impl TaggedOp {
    /// The control octet: version 1 and the opcode.
    #[inline]
    pub const fn octet(self) -> u8 {
        VERSION << 6
            | match self {
                TaggedOp::Write => 0x0,
                TaggedOp::ReadResponse => 0x2,
            }
    }
}

impl UntaggedOp {
    /// The control octet: version 1 and the opcode.
    #[inline]
    pub const fn octet(self) -> u8 {
        VERSION << 6
            | match self {
                UntaggedOp::ReadRequest => 0x1,
                UntaggedOp::Send => 0x3,
                UntaggedOp::SendInvalidate => 0x4,
                UntaggedOp::SendSe => 0x5,
                UntaggedOp::SendSeInvalidate => 0x6,
                UntaggedOp::Terminate => 0x7,
                UntaggedOp::Immediate => 0x8,
                UntaggedOp::ImmediateSe => 0x9,
                UntaggedOp::AtomicRequest => 0xa,
                UntaggedOp::AtomicResponse => 0xb,
                UntaggedOp::SendImm => 0xc,
                UntaggedOp::SendImmSe => 0xd,
                UntaggedOp::Flush => 0xe,
                UntaggedOp::Control => 0xf,
            }
    }

    /// The one queue that carries this operation.
    #[inline]
    pub const fn queue(self) -> u32 {
        match self {
            UntaggedOp::ReadRequest | UntaggedOp::AtomicRequest | UntaggedOp::Flush => {
                queue::REQUEST
            }
            UntaggedOp::Terminate => queue::TERMINATE,
            UntaggedOp::AtomicResponse => queue::ATOMIC_RESPONSE,
            UntaggedOp::Control => queue::CONTROL,
            _ => queue::SEND,
        }
    }

    /// Whether the receiver shall raise a solicited event.
    #[inline]
    pub const fn solicited(self) -> bool {
        matches!(
            self,
            UntaggedOp::SendSe
                | UntaggedOp::SendSeInvalidate
                | UntaggedOp::ImmediateSe
                | UntaggedOp::SendImmSe
        )
    }

    /// Whether the field of the header in which others have an STag or an immediate, and which RFC 5040
    /// reserves, has an acknowledgement between two Quipus (`specs/quipu-wire.md` 5).
    #[inline]
    pub const fn carries_executed(self) -> bool {
        matches!(self, UntaggedOp::Send | UntaggedOp::SendSe)
    }

    /// Who defines the opcode.
    #[inline]
    pub const fn set(self) -> OpcodeSet {
        match self {
            UntaggedOp::Immediate
            | UntaggedOp::ImmediateSe
            | UntaggedOp::AtomicRequest
            | UntaggedOp::AtomicResponse => OpcodeSet::Rfc7306,
            UntaggedOp::SendImm | UntaggedOp::SendImmSe | UntaggedOp::Control => OpcodeSet::Quipu,
            UntaggedOp::Flush => OpcodeSet::Flush,
            _ => OpcodeSet::Base,
        }
    }
}

impl Opcode {
    /// Reads a control octet: version 1; each opcode is defined. Reserved bits are ignored (RFC 5040 4.1).
    #[inline]
    pub const fn parse(octet: u8) -> Result<Self, WireError> {
        if octet >> 6 != VERSION {
            return Err(WireError::RdmapVersion(octet >> 6));
        }
        let op = match octet & 0x0f {
            0x0 => return Ok(Opcode::Tagged(TaggedOp::Write)),
            0x2 => return Ok(Opcode::Tagged(TaggedOp::ReadResponse)),
            0x1 => UntaggedOp::ReadRequest,
            0x3 => UntaggedOp::Send,
            0x4 => UntaggedOp::SendInvalidate,
            0x5 => UntaggedOp::SendSe,
            0x6 => UntaggedOp::SendSeInvalidate,
            0x7 => UntaggedOp::Terminate,
            0x8 => UntaggedOp::Immediate,
            0x9 => UntaggedOp::ImmediateSe,
            0xa => UntaggedOp::AtomicRequest,
            0xb => UntaggedOp::AtomicResponse,
            0xc => UntaggedOp::SendImm,
            0xd => UntaggedOp::SendImmSe,
            0xe => UntaggedOp::Flush,
            // 0xf: all sixteen are defined.
            _ => UntaggedOp::Control,
        };
        Ok(Opcode::Untagged(op))
    }

    /// The control octet.
    pub const fn octet(self) -> u8 {
        match self {
            Opcode::Tagged(op) => op.octet(),
            Opcode::Untagged(op) => op.octet(),
        }
    }
}

/// Payload of an RDMA Read Request (RFC 5040 4.4).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReadRequest {
    /// STag of the data sink: where the response goes, at the requester.
    pub sink_stag: Stag,
    /// Tagged offset of the data sink.
    pub sink_to: u64,
    /// RDMA Read Message Size in bytes; zero is legal.
    pub size: u32,
    /// STag of the data source, at the responder.
    pub source_stag: Stag,
    /// Tagged offset of the data source.
    pub source_to: u64,
}

impl ReadRequest {
    /// Length on the wire.
    pub const LEN: usize = 28;

    /// Reads the payload, which must be of exactly [`ReadRequest::LEN`] bytes.
    pub fn parse(bytes: &[u8]) -> Result<Self, WireError> {
        exactly(bytes, Self::LEN)?;
        Ok(ReadRequest {
            sink_stag: Stag(u32_at(bytes, 0)),
            sink_to: u64_at(bytes, 4),
            size: u32_at(bytes, 12),
            source_stag: Stag(u32_at(bytes, 16)),
            source_to: u64_at(bytes, 20),
        })
    }
}

impl Payload for ReadRequest {
    fn wire_len(&self) -> usize {
        Self::LEN
    }

    fn emit(&self, out: &mut [u8]) {
        put(out, 0, self.sink_stag.0.to_be_bytes());
        put(out, 4, self.sink_to.to_be_bytes());
        put(out, 12, self.size.to_be_bytes());
        put(out, 16, self.source_stag.0.to_be_bytes());
        put(out, 20, self.source_to.to_be_bytes());
    }
}

/// What an atomic request does to the 64-bit word it names (RFC 7306 5.1).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AtomicOp {
    /// Adds `add`. The set bits of `mask` end fields that do not carry into each other; zero means
    /// one 64-bit sum.
    FetchAdd {
        /// The addend.
        add: u64,
        /// Field boundaries.
        mask: u64,
    },
    /// If the word agrees with `compare` where `compare_mask` has ones, stores `swap` where
    /// `swap_mask` has ones.
    CmpSwap {
        /// The new value.
        swap: u64,
        /// Which bits are replaced; all ones for the plain operation.
        swap_mask: u64,
        /// The value compared with.
        compare: u64,
        /// Which bits are compared; all ones for the plain operation.
        compare_mask: u64,
    },
}

/// Payload of an Atomic Request (RFC 7306 5.2.1).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AtomicRequest {
    /// The requester's name for this request; the response repeats it.
    pub id: u32,
    /// STag of the word.
    pub stag: Stag,
    /// Tagged offset of the word; its alignment is the receiver's to check.
    pub to: u64,
    /// The operation.
    pub op: AtomicOp,
}

impl AtomicRequest {
    /// Length on the wire.
    pub const LEN: usize = 52;

    const FETCH_ADD: u8 = 0x0;
    const CMP_SWAP: u8 = 0x2;

    /// Reads the payload, which must be of exactly [`AtomicRequest::LEN`] bytes. The 28 reserved
    /// bits are ignored.
    pub fn parse(bytes: &[u8]) -> Result<Self, WireError> {
        exactly(bytes, Self::LEN)?;
        let (data, mask) = (u64_at(bytes, 20), u64_at(bytes, 28));
        let op = match bytes[3] & 0x0f {
            Self::FETCH_ADD => AtomicOp::FetchAdd { add: data, mask },
            Self::CMP_SWAP => AtomicOp::CmpSwap {
                swap: data,
                swap_mask: mask,
                compare: u64_at(bytes, 36),
                compare_mask: u64_at(bytes, 44),
            },
            unknown => return Err(WireError::UnknownAtomic(unknown)),
        };
        Ok(AtomicRequest {
            id: u32_at(bytes, 4),
            stag: Stag(u32_at(bytes, 8)),
            to: u64_at(bytes, 12),
            op,
        })
    }
}

impl Payload for AtomicRequest {
    fn wire_len(&self) -> usize {
        Self::LEN
    }

    fn emit(&self, out: &mut [u8]) {
        let (code, words) = match self.op {
            AtomicOp::FetchAdd { add, mask } => (Self::FETCH_ADD, [add, mask, 0, 0]),
            AtomicOp::CmpSwap { swap, swap_mask, compare, compare_mask } => {
                (Self::CMP_SWAP, [swap, swap_mask, compare, compare_mask])
            }
        };
        put(out, 0, u32::from(code).to_be_bytes());
        put(out, 4, self.id.to_be_bytes());
        put(out, 8, self.stag.0.to_be_bytes());
        put(out, 12, self.to.to_be_bytes());
        for (i, word) in words.into_iter().enumerate() {
            put(out, 20 + 8 * i, word.to_be_bytes());
        }
    }
}

/// Payload of an Atomic Response (RFC 7306 5.2.2).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AtomicResponse {
    /// Identifier of the request that is answered.
    pub id: u32,
    /// The word before the operation.
    pub original: u64,
}

impl AtomicResponse {
    /// Length on the wire.
    pub const LEN: usize = 12;

    /// Reads the payload, which must be of exactly [`AtomicResponse::LEN`] bytes.
    pub fn parse(bytes: &[u8]) -> Result<Self, WireError> {
        exactly(bytes, Self::LEN)?;
        Ok(AtomicResponse { id: u32_at(bytes, 0), original: u64_at(bytes, 4) })
    }
}

impl Payload for AtomicResponse {
    fn wire_len(&self) -> usize {
        Self::LEN
    }

    fn emit(&self, out: &mut [u8]) {
        put(out, 0, self.id.to_be_bytes());
        put(out, 4, self.original.to_be_bytes());
    }
}

/// Payload of a Flush (`specs/quipu-wire.md` 3.3): what was written before is to be where others find it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FlushRequest {
    /// STag of the region.
    pub stag: Stag,
    /// Tagged offset of the range.
    pub to: u64,
    /// Length of the range in bytes.
    pub len: u64,
    /// Where what was written is to be, a set of bits; what they mean is the receiver's to judge.
    pub placement: u8,
    /// Whether the range is meant, or all of the region; likewise.
    pub level: u8,
}

impl FlushRequest {
    /// Length on the wire.
    pub const LEN: usize = 24;

    /// Reads the payload, which must be of exactly [`FlushRequest::LEN`] bytes. The last two are reserved and
    /// ignored.
    pub fn parse(bytes: &[u8]) -> Result<Self, WireError> {
        exactly(bytes, Self::LEN)?;
        Ok(FlushRequest {
            stag: Stag(u32_at(bytes, 0)),
            to: u64_at(bytes, 4),
            len: u64_at(bytes, 12),
            placement: bytes[20],
            level: bytes[21],
        })
    }
}

impl Payload for FlushRequest {
    fn wire_len(&self) -> usize {
        Self::LEN
    }

    fn emit(&self, out: &mut [u8]) {
        put(out, 0, self.stag.0.to_be_bytes());
        put(out, 4, self.to.to_be_bytes());
        put(out, 12, self.len.to_be_bytes());
        put(out, 20, [self.placement, self.level, 0, 0]);
    }
}

/// Payload of Immediate Data: eight bytes that RFC 7306 6 leaves to the ULP. Quipu divides them as
/// `specs/quipu-wire.md` 3.2 says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Immediate {
    /// The immediate, in the order of the program's bytes (`imm_data` of the work request is
    /// already big-endian).
    pub imm: u32,
    /// Length of the Write that it completes, in bytes: the receive completion reports it.
    pub write_len: u32,
}

impl Immediate {
    /// Length on the wire.
    pub const LEN: usize = 8;

    /// Reads the payload, which must be of exactly [`Immediate::LEN`] bytes.
    pub fn parse(bytes: &[u8]) -> Result<Self, WireError> {
        exactly(bytes, Self::LEN)?;
        Ok(Immediate { imm: u32_at(bytes, 0), write_len: u32_at(bytes, 4) })
    }
}

impl Payload for Immediate {
    fn wire_len(&self) -> usize {
        Self::LEN
    }

    fn emit(&self, out: &mut [u8]) {
        put(out, 0, self.imm.to_be_bytes());
        put(out, 4, self.write_len.to_be_bytes());
    }
}
