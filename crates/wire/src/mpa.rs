//! MPA: start-up frames (RFC 5044 7.1, RFC 6581 9), FPDU arithmetic, markers and CRC (RFC 5044 4).

use crate::WireError;
use crate::field::{need, put, u16_at};

/// Length of a start-up frame without its private data (RFC 5044 7.1.1).
pub const FRAME_HEADER_LEN: usize = 20;
/// Longest private data of a start-up frame, enhanced fields included (RFC 5044 7.1.1).
pub const MAX_PRIVATE_DATA: usize = 512;
/// Longest start-up frame.
pub const MAX_FRAME_LEN: usize = FRAME_HEADER_LEN + MAX_PRIVATE_DATA;
/// Length of the key that opens a start-up frame.
pub const KEY_LEN: usize = 16;
/// Length of the IRD and ORD fields that open the private data of an enhanced frame (RFC 6581 9).
pub const ENHANCED_LEN: usize = 4;
/// Largest value of IRD and ORD: 14 bits. It means "not negotiated here" (RFC 6581 9.1).
pub const MAX_IRD_ORD: u16 = 0x3fff;

const REQUEST_KEY: &[u8; KEY_LEN] = b"MPA ID Req Frame";
const REPLY_KEY: &[u8; KEY_LEN] = b"MPA ID Rep Frame";
const FLAG_MARKERS: u8 = 0x80;
const FLAG_CRC: u8 = 0x40;
const FLAG_REJECT: u8 = 0x20;
const FLAG_ENHANCED: u8 = 0x10;

/// Which of the two start-up frames it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FrameKind {
    /// From the initiator.
    Request,
    /// From the responder.
    Reply,
}

impl FrameKind {
    fn key(self) -> &'static [u8; KEY_LEN] {
        match self {
            FrameKind::Request => REQUEST_KEY,
            FrameKind::Reply => REPLY_KEY,
        }
    }
}

/// The fields that RFC 6581 puts in front of the private data: read depths, and what the
/// ready-to-receive message of peer-to-peer mode may be.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Enhanced {
    /// Reads and atomics that the sender of the frame answers at a time, at most [`MAX_IRD_ORD`].
    pub ird: u16,
    /// Reads and atomics that the sender of the frame wants to have outstanding, at most
    /// [`MAX_IRD_ORD`].
    pub ord: u16,
    /// Control flag A: peer-to-peer mode, the initiator opens with a ready-to-receive message.
    pub peer_to_peer: bool,
    /// Control flag B: that message may be a zero-length Send.
    pub rtr_send: bool,
    /// Control flag C: it may be a zero-length Write.
    pub rtr_write: bool,
    /// Control flag D: it may be a zero-length Read.
    pub rtr_read: bool,
}

impl Enhanced {
    fn parse(bytes: &[u8]) -> Self {
        let (ird, ord) = (u16_at(bytes, 0), u16_at(bytes, 2));
        Enhanced {
            ird: ird & MAX_IRD_ORD,
            ord: ord & MAX_IRD_ORD,
            peer_to_peer: ird & 0x8000 != 0,
            rtr_send: ird & 0x4000 != 0,
            rtr_write: ord & 0x8000 != 0,
            rtr_read: ord & 0x4000 != 0,
        }
    }

    fn emit(&self, out: &mut [u8]) {
        let flag = |set: bool, bit: u16| if set { bit } else { 0 };
        let ird = self.ird.min(MAX_IRD_ORD)
            | flag(self.peer_to_peer, 0x8000)
            | flag(self.rtr_send, 0x4000);
        let ord =
            self.ord.min(MAX_IRD_ORD) | flag(self.rtr_write, 0x8000) | flag(self.rtr_read, 0x4000);
        put(out, 0, ird.to_be_bytes());
        put(out, 2, ord.to_be_bytes());
    }
}

/// An MPA request or reply frame (RFC 5044 7.1.1, RFC 6581 9).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StartFrame<'a> {
    /// Request or reply.
    pub kind: FrameKind,
    /// M: the sender of this frame wants markers in what it receives.
    pub markers: bool,
    /// C: the sender of this frame wants CRCs.
    pub crc: bool,
    /// R: the connection is refused; only in a reply.
    pub reject: bool,
    /// Revision of MPA. The frame format is the same in all; only 1 and 2 are defined.
    pub revision: u8,
    /// S flag and its fields; only from revision 2 on.
    pub enhanced: Option<Enhanced>,
    /// Private data without the enhanced fields.
    pub private_data: &'a [u8],
}

impl<'a> StartFrame<'a> {
    /// Length of the frame that begins in `bytes`, or `None` if too few bytes are there to tell.
    /// Refuses a wrong beginning as early as it shows, so that garbage never makes a reader wait.
    pub fn frame_len(kind: FrameKind, bytes: &[u8]) -> Result<Option<usize>, WireError> {
        let known = bytes.len().min(KEY_LEN);
        if bytes[..known] != kind.key()[..known] {
            return Err(WireError::BadKey);
        }
        if bytes.len() < FRAME_HEADER_LEN {
            return Ok(None);
        }
        let private = u16_at(bytes, 18);
        if usize::from(private) > MAX_PRIVATE_DATA {
            return Err(WireError::PrivateDataTooLong(private));
        }
        Ok(Some(FRAME_HEADER_LEN + usize::from(private)))
    }

    /// Reads the frame at the front of `bytes`; bytes behind it are ignored.
    ///
    /// Reserved flags are ignored, and so is S in a revision below 2 (it is reserved there).
    pub fn parse(kind: FrameKind, bytes: &'a [u8]) -> Result<Self, WireError> {
        let len = match Self::frame_len(kind, bytes)? {
            Some(len) => len,
            None => {
                return Err(WireError::Truncated { need: FRAME_HEADER_LEN, have: bytes.len() });
            }
        };
        need(bytes, len)?;
        let (flags, revision) = (bytes[16], bytes[17]);
        let mut private_data = &bytes[FRAME_HEADER_LEN..len];
        let mut enhanced = None;
        if flags & FLAG_ENHANCED != 0 && revision >= 2 {
            if private_data.len() < ENHANCED_LEN {
                return Err(WireError::NoEnhancedData);
            }
            enhanced = Some(Enhanced::parse(private_data));
            private_data = &private_data[ENHANCED_LEN..];
        }
        Ok(StartFrame {
            kind,
            markers: flags & FLAG_MARKERS != 0,
            crc: flags & FLAG_CRC != 0,
            reject: kind == FrameKind::Reply && flags & FLAG_REJECT != 0,
            revision,
            enhanced,
            private_data,
        })
    }

    /// Length of the frame on the wire.
    pub fn wire_len(&self) -> usize {
        let enhanced = if self.enhanced.is_some() { ENHANCED_LEN } else { 0 };
        FRAME_HEADER_LEN + enhanced + self.private_data.len()
    }

    /// Writes the frame to the front of `out`.
    ///
    /// # Panics
    /// If `out` is shorter than [`StartFrame::wire_len`], or the private data exceed
    /// [`MAX_PRIVATE_DATA`].
    pub fn emit(&self, out: &mut [u8]) {
        let len = self.wire_len();
        assert!(len <= MAX_FRAME_LEN, "private data too long");
        out[..KEY_LEN].copy_from_slice(self.kind.key());
        let flag = |set: bool, bit: u8| if set { bit } else { 0 };
        out[16] = flag(self.markers, FLAG_MARKERS)
            | flag(self.crc, FLAG_CRC)
            | flag(self.reject, FLAG_REJECT)
            | flag(self.enhanced.is_some(), FLAG_ENHANCED);
        out[17] = self.revision;
        put(out, 18, ((len - FRAME_HEADER_LEN) as u16).to_be_bytes());
        let mut at = FRAME_HEADER_LEN;
        if let Some(enhanced) = self.enhanced {
            enhanced.emit(&mut out[at..at + ENHANCED_LEN]);
            at += ENHANCED_LEN;
        }
        out[at..len].copy_from_slice(self.private_data);
    }
}

/// Length of the ULPDU_Length field that opens an FPDU (RFC 5044 4.1).
pub const LENGTH_LEN: usize = 2;
/// Length of the CRC field that closes an FPDU; present also where CRCs are off (RFC 5044 4.4).
pub const CRC_LEN: usize = 4;
/// Length of a marker (RFC 5044 4.3).
pub const MARKER_LEN: usize = 4;
/// Distance in the stream from the start of a marker to the start of the next (RFC 5044 4.3).
pub const MARKER_INTERVAL: usize = 512;

/// Length of an FPDU without markers, for a ULPDU of `ulpdu` bytes: length field, ULPDU, padding to
/// four, CRC (RFC 5044 4.1).
#[inline]
pub const fn fpdu_len(ulpdu: usize) -> usize {
    (LENGTH_LEN + ulpdu).next_multiple_of(4) + CRC_LEN
}

/// CRC32C over length field, ULPDU, padding and the markers among them (RFC 5044 4.4).
///
/// MPA takes the CRC over from iSCSI, and with it the order of its bytes: it goes on the wire least
/// significant byte first ([`u32::to_le_bytes`]), alone among all fields (RFC 3720 B.4 shows the
/// bytes).
#[inline]
pub fn crc32c(bytes: &[u8]) -> u32 {
    quipu_crc::crc32c(bytes)
}

/// A marker: how far back in the stream, from the marker's first byte, the ULPDU_Length field of
/// the FPDU lies that the marker is in. Zero if the marker stands right before that field (RFC 5044
/// 4.3).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Marker {
    /// FPDUPTR: distance in bytes, a multiple of four.
    pub fpdu_ptr: u16,
}

impl Marker {
    /// Reads a marker; the reserved half is ignored.
    pub fn parse(bytes: &[u8]) -> Result<Self, WireError> {
        need(bytes, MARKER_LEN)?;
        let fpdu_ptr = u16_at(bytes, 2);
        if !fpdu_ptr.is_multiple_of(4) {
            return Err(WireError::OutOfRange("fpdu_ptr"));
        }
        Ok(Marker { fpdu_ptr })
    }

    /// Writes the marker to the front of `out`.
    ///
    /// # Panics
    /// If `out` is shorter than [`MARKER_LEN`].
    pub fn emit(&self, out: &mut [u8]) {
        put(out, 0, [0; 2]);
        put(out, 2, self.fpdu_ptr.to_be_bytes());
    }
}
