//! DDP headers (RFC 5041 4).

use crate::field::{array, need, put, u32_at, u64_at};
use crate::{Stag, WireError};

/// Length of a tagged header (RFC 5041 4.2).
pub const TAGGED_LEN: usize = 14;
/// Length of an untagged header (RFC 5041 4.3).
pub const UNTAGGED_LEN: usize = 18;

const FLAG_TAGGED: u8 = 0x80;
const FLAG_LAST: u8 = 0x40;
const VERSION_MASK: u8 = 0x03;
const VERSION: u8 = 1;

/// Header of a segment that names its place in memory (RFC 5041 4.2).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tagged {
    /// L: the last segment of its message.
    pub last: bool,
    /// RsvdULP: the RDMAP control octet.
    pub rsvd_ulp: u8,
    /// The steering tag.
    pub stag: Stag,
    /// Tagged offset of the first payload byte.
    pub to: u64,
}

/// Header of a segment that names a queue of buffers at the receiver (RFC 5041 4.3).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Untagged {
    /// L: the last segment of its message.
    pub last: bool,
    /// First octet of RsvdULP: the RDMAP control octet.
    pub rsvd_ulp: u8,
    /// The four octets of RsvdULP behind it: the STag to invalidate, immediate data, or an
    /// acknowledgement.
    pub ulp: u32,
    /// Queue number.
    pub qn: u32,
    /// Message sequence number within the queue, from 1.
    pub msn: u32,
    /// Message offset of the first payload byte.
    pub mo: u32,
}

/// Either header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Header {
    /// T is set.
    Tagged(Tagged),
    /// T is clear.
    Untagged(Untagged),
}

impl Header {
    /// Reads the header at the front of a ULPDU; what is behind it is payload. Reserved bits are
    /// ignored (RFC 5041 4.1).
    #[inline]
    pub fn parse(bytes: &[u8]) -> Result<Self, WireError> {
        need(bytes, TAGGED_LEN)?;
        let ctrl = bytes[0];
        let tagged = ctrl & FLAG_TAGGED != 0;
        let last = ctrl & FLAG_LAST != 0;
        if ctrl & VERSION_MASK != VERSION {
            return Err(WireError::DdpVersion { tagged, version: ctrl & VERSION_MASK });
        }
        if tagged {
            return Ok(Header::Tagged(Tagged {
                last,
                rsvd_ulp: bytes[1],
                stag: Stag(u32_at(bytes, 2)),
                to: u64_at(bytes, 6),
            }));
        }
        need(bytes, UNTAGGED_LEN)?;
        let fields: [u8; UNTAGGED_LEN] = array(bytes, 0);
        Ok(Header::Untagged(Untagged {
            last,
            rsvd_ulp: fields[1],
            ulp: u32_at(&fields, 2),
            qn: u32_at(&fields, 6),
            msn: u32_at(&fields, 10),
            mo: u32_at(&fields, 14),
        }))
    }

    /// Length of the header on the wire.
    pub fn wire_len(&self) -> usize {
        match self {
            Header::Tagged(_) => TAGGED_LEN,
            Header::Untagged(_) => UNTAGGED_LEN,
        }
    }

    /// Writes the header to the front of `out`.
    ///
    /// # Panics
    /// If `out` is shorter than [`Header::wire_len`].
    pub fn emit(&self, out: &mut [u8]) {
        match self {
            Header::Tagged(header) => header.emit(out),
            Header::Untagged(header) => header.emit(out),
        }
    }
}

/// Length of the header that opens with the octet `ctrl`, whatever its version: 14 or 18.
#[inline]
pub const fn header_len(ctrl: u8) -> usize {
    if ctrl & FLAG_TAGGED != 0 { TAGGED_LEN } else { UNTAGGED_LEN }
}

fn ctrl(tagged: u8, last: bool) -> u8 {
    tagged | if last { FLAG_LAST } else { 0 } | VERSION
}

impl Tagged {
    /// Writes the header to the front of `out`.
    ///
    /// # Panics
    /// If `out` is shorter than [`TAGGED_LEN`].
    #[inline]
    pub fn emit(&self, out: &mut [u8]) {
        let out = &mut out[..TAGGED_LEN];
        out[0] = ctrl(FLAG_TAGGED, self.last);
        out[1] = self.rsvd_ulp;
        put(out, 2, self.stag.0.to_be_bytes());
        put(out, 6, self.to.to_be_bytes());
    }
}

impl Untagged {
    /// Writes the header to the front of `out`.
    ///
    /// # Panics
    /// If `out` is shorter than [`UNTAGGED_LEN`].
    #[inline]
    pub fn emit(&self, out: &mut [u8]) {
        let out = &mut out[..UNTAGGED_LEN];
        out[0] = ctrl(0, self.last);
        out[1] = self.rsvd_ulp;
        put(out, 2, self.ulp.to_be_bytes());
        put(out, 6, self.qn.to_be_bytes());
        put(out, 10, self.msn.to_be_bytes());
        put(out, 14, self.mo.to_be_bytes());
    }
}
