//! The Terminate message (RFC 5040 4.8) and every code of the RFCs that use it.

use crate::field::{need, put, u16_at};
use crate::rdmap::ReadRequest;
use crate::{Payload, WireError, ddp};

/// RDMAP remote protection errors, layer 0 type 1 (RFC 5040 4.8).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Protection {
    /// 0x00: invalid STag.
    InvalidStag,
    /// 0x01: base or bounds violation.
    BaseBounds,
    /// 0x02: access rights violation.
    AccessRights,
    /// 0x03: STag not associated with the RDMAP stream.
    StagNotAssociated,
    /// 0x04: tagged offset wrap.
    ToWrap,
    /// 0x09: STag cannot be invalidated.
    CannotInvalidate,
    /// 0xff: unspecified.
    Unspecified,
}

/// RDMAP remote operation errors, layer 0 type 2 (RFC 5040 4.8).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Operation {
    /// 0x05: invalid RDMAP version.
    InvalidVersion,
    /// 0x06: unexpected opcode.
    UnexpectedOpcode,
    /// 0x07: catastrophic error, localized to the RDMAP stream.
    CatastrophicStream,
    /// 0x08: catastrophic error, global.
    CatastrophicGlobal,
    /// 0x09: STag cannot be invalidated.
    CannotInvalidate,
    /// 0xff: unspecified.
    Unspecified,
}

/// DDP tagged buffer errors, layer 1 type 1 (RFC 5041 7.2).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TaggedBuffer {
    /// 0x00: invalid STag.
    InvalidStag,
    /// 0x01: base or bounds violation.
    BaseBounds,
    /// 0x02: STag not associated with the DDP stream.
    StagNotAssociated,
    /// 0x03: tagged offset wrap.
    ToWrap,
    /// 0x04: invalid DDP version.
    InvalidVersion,
}

/// DDP untagged buffer errors, layer 1 type 2 (RFC 5041 7.2).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum UntaggedBuffer {
    /// 0x01: invalid queue number.
    InvalidQueue,
    /// 0x02: invalid MSN, no buffer available.
    NoBuffer,
    /// 0x03: invalid MSN, outside the valid range.
    MsnRange,
    /// 0x04: invalid message offset.
    InvalidMo,
    /// 0x05: message too long for the buffer.
    MessageTooLong,
    /// 0x06: invalid DDP version.
    InvalidVersion,
}

/// MPA errors, layer 2 type 0 (RFC 5044 8, RFC 6581 10).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mpa {
    /// 0x01: TCP connection closed, terminated or lost.
    ConnectionLost,
    /// 0x02: received CRC does not match.
    Crc,
    /// 0x03: marker and ULPDU length disagree.
    MarkerLength,
    /// 0x04: invalid request or reply frame.
    InvalidFrame,
    /// 0x05: local catastrophic error.
    Catastrophic,
    /// 0x06: insufficient IRD.
    InsufficientIrd,
    /// 0x07: no matching ready-to-receive option.
    NoMatchingRtr,
}

/// Layer, error type and error code of a Terminate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Code {
    /// Layer 0 type 0: local catastrophic error of RDMAP.
    RdmapCatastrophic,
    /// Layer 0 type 1.
    Protection(Protection),
    /// Layer 0 type 2.
    Operation(Operation),
    /// Layer 1 type 0: local catastrophic error of DDP.
    DdpCatastrophic,
    /// Layer 1 type 1.
    TaggedBuffer(TaggedBuffer),
    /// Layer 1 type 2.
    UntaggedBuffer(UntaggedBuffer),
    /// Layer 2 type 0.
    Mpa(Mpa),
    /// What no RFC known here defines. Never equals one of the above after `parse`.
    Other {
        /// Layer, 4 bits.
        layer: u8,
        /// Error type, 4 bits.
        etype: u8,
        /// Error code.
        code: u8,
    },
}

/// One row of the table of codes per value, used in both directions.
const CODES: &[(Code, u8, u8)] = &[
    (Code::RdmapCatastrophic, 0x00, 0x00),
    (Code::Protection(Protection::InvalidStag), 0x01, 0x00),
    (Code::Protection(Protection::BaseBounds), 0x01, 0x01),
    (Code::Protection(Protection::AccessRights), 0x01, 0x02),
    (Code::Protection(Protection::StagNotAssociated), 0x01, 0x03),
    (Code::Protection(Protection::ToWrap), 0x01, 0x04),
    (Code::Protection(Protection::CannotInvalidate), 0x01, 0x09),
    (Code::Protection(Protection::Unspecified), 0x01, 0xff),
    (Code::Operation(Operation::InvalidVersion), 0x02, 0x05),
    (Code::Operation(Operation::UnexpectedOpcode), 0x02, 0x06),
    (Code::Operation(Operation::CatastrophicStream), 0x02, 0x07),
    (Code::Operation(Operation::CatastrophicGlobal), 0x02, 0x08),
    (Code::Operation(Operation::CannotInvalidate), 0x02, 0x09),
    (Code::Operation(Operation::Unspecified), 0x02, 0xff),
    (Code::DdpCatastrophic, 0x10, 0x00),
    (Code::TaggedBuffer(TaggedBuffer::InvalidStag), 0x11, 0x00),
    (Code::TaggedBuffer(TaggedBuffer::BaseBounds), 0x11, 0x01),
    (Code::TaggedBuffer(TaggedBuffer::StagNotAssociated), 0x11, 0x02),
    (Code::TaggedBuffer(TaggedBuffer::ToWrap), 0x11, 0x03),
    (Code::TaggedBuffer(TaggedBuffer::InvalidVersion), 0x11, 0x04),
    (Code::UntaggedBuffer(UntaggedBuffer::InvalidQueue), 0x12, 0x01),
    (Code::UntaggedBuffer(UntaggedBuffer::NoBuffer), 0x12, 0x02),
    (Code::UntaggedBuffer(UntaggedBuffer::MsnRange), 0x12, 0x03),
    (Code::UntaggedBuffer(UntaggedBuffer::InvalidMo), 0x12, 0x04),
    (Code::UntaggedBuffer(UntaggedBuffer::MessageTooLong), 0x12, 0x05),
    (Code::UntaggedBuffer(UntaggedBuffer::InvalidVersion), 0x12, 0x06),
    (Code::Mpa(Mpa::ConnectionLost), 0x20, 0x01),
    (Code::Mpa(Mpa::Crc), 0x20, 0x02),
    (Code::Mpa(Mpa::MarkerLength), 0x20, 0x03),
    (Code::Mpa(Mpa::InvalidFrame), 0x20, 0x04),
    (Code::Mpa(Mpa::Catastrophic), 0x20, 0x05),
    (Code::Mpa(Mpa::InsufficientIrd), 0x20, 0x06),
    (Code::Mpa(Mpa::NoMatchingRtr), 0x20, 0x07),
];

impl Code {
    /// The octet of layer and type, and the octet of the code.
    pub fn octets(self) -> (u8, u8) {
        if let Code::Other { layer, etype, code } = self {
            return (layer << 4 | etype & 0x0f, code);
        }
        let row = CODES.iter().find(|row| row.0 == self);
        row.map_or((0x00, 0x00), |row| (row.1, row.2))
    }

    /// The meaning of the two octets. Every code of layer 0 type 0 is the local catastrophic error
    /// (RFC 6580 4).
    pub fn from_octets(layer_type: u8, code: u8) -> Self {
        if layer_type == 0 {
            return Code::RdmapCatastrophic;
        }
        let row = CODES.iter().find(|row| (row.1, row.2) == (layer_type, code));
        let other = Code::Other { layer: layer_type >> 4, etype: layer_type & 0x0f, code };
        row.map_or(other, |row| row.0)
    }

    /// All codes that the RFCs define.
    pub fn all() -> impl Iterator<Item = Code> {
        CODES.iter().map(|row| row.0)
    }
}

/// Copy of the DDP header that a Terminate complains about. Raw bytes, because the header may be
/// the very fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HeaderCopy {
    bytes: [u8; ddp::UNTAGGED_LEN],
    len: u8,
}

impl HeaderCopy {
    /// Copies the header at the front of a ULPDU; `None` if there are too few bytes.
    pub fn from_ulpdu(ulpdu: &[u8]) -> Option<Self> {
        let len = ddp::header_len(*ulpdu.first()?);
        let header = ulpdu.get(..len)?;
        let mut bytes = [0; ddp::UNTAGGED_LEN];
        bytes[..len].copy_from_slice(header);
        Some(HeaderCopy { bytes, len: len as u8 })
    }

    /// The bytes as they were on the wire: 14 or 18.
    pub fn as_bytes(&self) -> &[u8] {
        &self.bytes[..usize::from(self.len)]
    }

    /// The header, if it was legal.
    pub fn header(&self) -> Option<ddp::Header> {
        ddp::Header::parse(self.as_bytes()).ok()
    }
}

/// Payload of a Terminate (RFC 5040 4.8).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Terminate {
    /// What went wrong.
    pub code: Code,
    /// DDP segment length and DDP header of the segment at fault (header control bits M and D).
    pub segment: Option<(u16, HeaderCopy)>,
    /// RDMAP header of the segment at fault, if it was a Read Request (header control bit R).
    pub read_request: Option<ReadRequest>,
}

const FLAG_M: u8 = 0x80;
const FLAG_D: u8 = 0x40;
const FLAG_R: u8 = 0x20;
const FIXED_LEN: usize = 4;
const SEGMENT_LENGTH_LEN: usize = 2;

impl Terminate {
    /// Longest payload.
    pub const MAX_LEN: usize =
        FIXED_LEN + SEGMENT_LENGTH_LEN + ddp::UNTAGGED_LEN + ReadRequest::LEN;

    /// A Terminate that copies no header.
    pub const fn bare(code: Code) -> Self {
        Terminate { code, segment: None, read_request: None }
    }

    /// Reads the payload.
    ///
    /// Only the first four bytes are required: a Terminate is best effort, and a cut copy of a
    /// header must not hide the code. A copy that does not fit is left out.
    pub fn parse(bytes: &[u8]) -> Result<Self, WireError> {
        need(bytes, FIXED_LEN)?;
        let (layer_type, flags) = in_order(bytes[0], bytes[2]);
        let mut terminate = Terminate::bare(Code::from_octets(layer_type, bytes[1]));
        let mut rest = &bytes[FIXED_LEN..];
        if flags & (FLAG_M | FLAG_D) != 0 {
            if rest.len() < SEGMENT_LENGTH_LEN {
                return Ok(terminate);
            }
            let length = u16_at(rest, 0);
            rest = &rest[SEGMENT_LENGTH_LEN..];
            if flags & FLAG_D != 0 {
                let Some(header) = HeaderCopy::from_ulpdu(rest) else {
                    return Ok(terminate);
                };
                rest = &rest[usize::from(header.len)..];
                terminate.segment = Some((length, header));
            }
        }
        if flags & FLAG_R != 0 && rest.len() >= ReadRequest::LEN {
            terminate.read_request = ReadRequest::parse(&rest[..ReadRequest::LEN]).ok();
        }
        Ok(terminate)
    }
}

/// The octets of layer and type and of the header control bits as RFC 5040 has them. Linux siw on a
/// little-endian machine puts layer and type the other way round, and M, D and R at the other end of their
/// octet, in bits that are reserved and zero: by those it is known.
fn in_order(layer_type: u8, flags: u8) -> (u8, u8) {
    let all = FLAG_M | FLAG_D | FLAG_R;
    let reversed = flags.reverse_bits();
    match flags & all == 0 && reversed & all != 0 {
        true => (layer_type.rotate_left(4), reversed),
        false => (layer_type, flags),
    }
}

impl Payload for Terminate {
    fn wire_len(&self) -> usize {
        let segment =
            self.segment.map_or(0, |(_, header)| SEGMENT_LENGTH_LEN + usize::from(header.len));
        FIXED_LEN + segment + self.read_request.map_or(0, |request| request.wire_len())
    }

    fn emit(&self, out: &mut [u8]) {
        let (layer_type, code) = self.code.octets();
        let mut flags = 0;
        let mut at = FIXED_LEN;
        if let Some((length, header)) = self.segment {
            flags |= FLAG_M | FLAG_D;
            put(out, at, length.to_be_bytes());
            at += SEGMENT_LENGTH_LEN;
            out[at..at + usize::from(header.len)].copy_from_slice(header.as_bytes());
            at += usize::from(header.len);
        }
        if let Some(request) = self.read_request {
            flags |= FLAG_R;
            request.emit(&mut out[at..]);
        }
        put(out, 0, [layer_type, code, flags, 0]);
    }
}
