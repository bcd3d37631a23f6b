//! The transmit half: messages become FPDUs in the caller's buffer.

use quipu_wire::mpa::{CRC_LEN, LENGTH_LEN, MARKER_INTERVAL, MARKER_LEN, Marker, crc32c, fpdu_len};
use quipu_wire::rdmap::{TaggedOp, UntaggedOp, queue};
use quipu_wire::{Payload, Stag, ddp};

use crate::Negotiated;

/// Largest ULPDU unless the user wants less: the length field has 16 bits, and this leaves the
/// payload of a tagged segment a multiple of 64 bytes.
pub const DEFAULT_MAX_ULPDU: u16 = (ddp::TAGGED_LEN + 65_472) as u16;

/// Least MULPDU, so that every message of fixed layout fits into one segment.
const MIN_MAX_ULPDU: u16 = 128;
/// A segment that is not its message's last has at least this much payload, so that a buffer that
/// is almost full does not make the stream crumble.
const MIN_PAYLOAD: usize = 1024;
/// Segments that are not the last carry a multiple of this many bytes: no padding, and copies stay
/// aligned. Where the MULPDU is very small, four bytes have to do.
const PAYLOAD_UNIT: usize = 64;

/// The longest ULPDU whose FPDU fits into a TCP segment of `segment` octets of payload, the EMSS (RFC 5044
/// 5.1, 4.1).
pub fn mulpdu(segment: usize, markers: bool) -> u16 {
    let markers = if markers { MARKER_LEN * segment.div_ceil(MARKER_INTERVAL) } else { 0 };
    let around = LENGTH_LEN + CRC_LEN + markers + segment % 4;
    u16::try_from(segment.saturating_sub(around)).unwrap_or(u16::MAX - 3)
}

/// How a message is addressed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Address {
    Tagged { op: TaggedOp, stag: Stag, to: u64 },
    Untagged { op: UntaggedOp, ulp: u32, qn: u32, msn: u32 },
}

/// A message on its way out: a cursor that [`Sender::segment`] advances. A copy kept from the
/// beginning, or [`Message::restart`], sends the same message again with the same MSN.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Message {
    address: Address,
    offset: u32,
}

impl Message {
    /// Goes back to the first byte; the MSN stays.
    pub fn restart(&mut self) {
        self.offset = 0;
    }

    /// Payload bytes framed so far.
    pub fn offset(&self) -> u32 {
        self.offset
    }

    /// The message sequence number; `None` if the message is tagged.
    pub fn msn(&self) -> Option<u32> {
        match self.address {
            Address::Tagged { .. } => None,
            Address::Untagged { msn, .. } => Some(msn),
        }
    }
}

/// One FPDU written into the caller's buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Staged {
    /// Length of the FPDU, markers included: how much of the buffer is used.
    pub bytes: usize,
    /// Payload bytes of the message in it.
    pub payload: u32,
    /// It ends the message.
    pub last: bool,
}

/// An FPDU written into the caller's buffer but for its payload.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Frame {
    /// How much of the buffer comes before the payload; the rest of what is used comes behind it.
    pub head: usize,
    /// As of other FPDUs; `bytes` are those in the buffer.
    pub staged: Staged,
}

/// Frames messages for one connection, in the order in which they go on the wire.
///
/// Every FPDU that [`Sender::segment`] writes must be sent, whole and in order, unless it is
/// [taken back](Sender::take_back): the sender keeps the position in the stream for the sake of
/// markers, and counts MSNs.
#[derive(Clone, Debug)]
pub struct Sender {
    crc: bool,
    /// Bytes of the stream so far, modulo the marker interval; `None` without markers.
    marker_phase: Option<usize>,
    max_ulpdu: usize,
    next_msn: [u32; queue::COUNT],
}

impl Sender {
    /// The transmit half of a connection just set up. `max_ulpdu` is the MULPDU in bytes, at least
    /// 128: the segment size of TCP towards adapters that want an FPDU per segment, else
    /// [`DEFAULT_MAX_ULPDU`].
    pub fn new(negotiated: &Negotiated, max_ulpdu: u16) -> Self {
        Sender {
            crc: negotiated.crc,
            marker_phase: negotiated.tx_markers.then_some(0),
            max_ulpdu: usize::from(max_ulpdu.max(MIN_MAX_ULPDU)),
            next_msn: [1; queue::COUNT],
        }
    }

    /// Limits the FPDUs that begin from now on: the MULPDU in bytes, at least 128, as TCP's segments have
    /// become longer or shorter.
    pub fn set_max_ulpdu(&mut self, max_ulpdu: u16) {
        self.max_ulpdu = usize::from(max_ulpdu.max(MIN_MAX_ULPDU));
    }

    /// Whether the peer wants markers.
    pub fn sends_markers(&self) -> bool {
        self.marker_phase.is_some()
    }

    /// The MSNs that the next messages of the send and the request queue get: where
    /// [`Sender::rewind`] can go back to.
    pub fn mark(&self) -> [u32; 2] {
        [self.next_msn[queue::SEND as usize], self.next_msn[queue::REQUEST as usize]]
    }

    /// Goes back to a mark, so that messages that the peer refused for now are sent again with the
    /// MSNs they had (`specs/quipu-wire.md` 5).
    pub fn rewind(&mut self, mark: [u32; 2]) {
        [self.next_msn[queue::SEND as usize], self.next_msn[queue::REQUEST as usize]] = mark;
    }

    /// Begins an untagged message and takes the next MSN of its queue. `ulp` is the STag to
    /// invalidate, or the immediate or the acknowledgement of Quipu's Send, or 0.
    pub fn begin_untagged(&mut self, op: UntaggedOp, ulp: u32) -> Message {
        self.begin(op, ulp, op.queue())
    }

    /// The same for a message of the queue of Sends that names shared receive queue `srq` of the peer.
    /// All of them are numbered together, whichever they name.
    pub fn begin_shared(&mut self, op: UntaggedOp, ulp: u32, srq: u32) -> Message {
        debug_assert_eq!(op.queue(), queue::SEND);
        self.begin(op, ulp, queue::shared(srq))
    }

    fn begin(&mut self, op: UntaggedOp, ulp: u32, qn: u32) -> Message {
        let next = &mut self.next_msn[op.queue() as usize];
        let msn = *next;
        *next = msn.wrapping_add(1);
        Message { address: Address::Untagged { op, ulp, qn, msn }, offset: 0 }
    }

    /// Begins a tagged message to the bytes from `to` of `stag`.
    pub fn begin_tagged(&mut self, op: TaggedOp, stag: Stag, to: u64) -> Message {
        Message { address: Address::Tagged { op, stag, to }, offset: 0 }
    }

    /// Writes the next FPDU of `msg` to the front of `out`, and advances `msg`.
    ///
    /// `remaining` is what is left of the message's payload, in bytes; 0 is legal and makes an
    /// empty last segment. The segment takes as much of it as `out` and the MULPDU allow, and
    /// `fill` is called once with the place where that payload belongs, to write all of it. `None`,
    /// with nothing changed, if `out` is too short for a segment worth sending: one with all that
    /// remains, or at least 1024 bytes of it.
    #[inline]
    pub fn segment(
        &mut self,
        msg: &mut Message,
        out: &mut [u8],
        remaining: u32,
        fill: impl FnOnce(&mut [u8]),
    ) -> Option<Staged> {
        let header = msg.header_len();
        let room = match self.marker_phase {
            None => out.len(),
            // Any stretch of the stream holds at most this many markers.
            Some(_) => {
                let markers = out.len() / MARKER_INTERVAL + 1;
                out.len().checked_sub(markers * MARKER_LEN)?
            }
        };
        let payload = self.payload_len(header, room, remaining as usize)?;
        let last = payload == remaining as usize;
        let len = fpdu_len(header + payload);
        let shift = self.marker_count(len) * MARKER_LEN;

        let fpdu = &mut out[shift..shift + len];
        fpdu[..LENGTH_LEN].copy_from_slice(&((header + payload) as u16).to_be_bytes());
        let (head, body) = fpdu[LENGTH_LEN..].split_at_mut(header);
        msg.emit_header(head, last);
        fill(&mut body[..payload]);
        // Padding, and the CRC where CRCs are off, are sent as zero (RFC 5044 4.1, 4.4).
        body[payload..].fill(0);

        let total = shift + len;
        if let Some(phase) = self.marker_phase {
            insert_markers(&mut out[..total], shift, phase);
            self.marker_phase = Some((phase + total) % MARKER_INTERVAL);
        }
        if self.crc {
            let (covered, crc) = out[..total].split_at_mut(total - CRC_LEN);
            crc.copy_from_slice(&crc32c(covered).to_le_bytes());
        }
        msg.offset = msg.offset.wrapping_add(payload as u32);
        Some(Staged { bytes: total, payload: payload as u32, last })
    }

    /// Whether payload goes out as it is, so that [`Sender::frame`] may be used: there are neither CRCs,
    /// which would have to be computed, nor markers, which lie between it.
    #[inline]
    pub fn is_bare(&self) -> bool {
        !self.crc && self.marker_phase.is_none()
    }

    /// As [`Sender::segment`], for payload that is sent from where it lies: writes all else of the next
    /// FPDU of `msg` to the front of `out`. The FPDU is as long as the MULPDU allows. `None`, with nothing
    /// changed, if `out` is too short, or the stream is not [bare](Sender::is_bare).
    pub fn frame(&mut self, msg: &mut Message, out: &mut [u8], remaining: u32) -> Option<Frame> {
        if !self.is_bare() {
            return None;
        }
        self.frame_before_crc(msg, out, remaining)
    }

    /// As [`Sender::frame`], also with CRCs: the last four bytes, where the CRC belongs, are zero. The
    /// caller who sends with CRCs writes it there: little-endian, of all bytes of the FPDU before it.
    /// `None` as there, or if the peer wants markers.
    pub fn frame_before_crc(
        &mut self,
        msg: &mut Message,
        out: &mut [u8],
        remaining: u32,
    ) -> Option<Frame> {
        if self.marker_phase.is_some() {
            return None;
        }
        let header = msg.header_len();
        let payload = self.payload_len(header, usize::from(u16::MAX), remaining as usize)?;
        let last = payload == remaining as usize;
        let bytes = fpdu_len(header + payload) - payload;
        let around = out.get_mut(..bytes)?;
        let (length, rest) = around.split_at_mut(LENGTH_LEN);
        length.copy_from_slice(&((header + payload) as u16).to_be_bytes());
        let (head, behind) = rest.split_at_mut(header);
        msg.emit_header(head, last);
        // As in `segment`: padding, and where the CRC would be.
        behind.fill(0);
        msg.offset = msg.offset.wrapping_add(payload as u32);
        let staged = Staged { bytes, payload: payload as u32, last };
        Some(Frame { head: LENGTH_LEN + header, staged })
    }

    /// Takes back the FPDU of `msg` that was written last, which is not sent: there is no payload for it.
    #[cold]
    pub fn take_back(&mut self, msg: &mut Message, staged: &Staged) {
        msg.offset = msg.offset.wrapping_sub(staged.payload);
        if let Some(phase) = &mut self.marker_phase {
            let back = staged.bytes % MARKER_INTERVAL;
            *phase = (*phase + MARKER_INTERVAL - back) % MARKER_INTERVAL;
        }
    }

    /// Writes a message of fixed layout, which is always one FPDU, to the front of `out` and gives
    /// its length. `None`, with nothing changed, if `out` is too short.
    pub fn whole(
        &mut self,
        msg: &mut Message,
        out: &mut [u8],
        payload: &impl Payload,
    ) -> Option<usize> {
        let len = payload.wire_len() as u32;
        self.segment(msg, out, len, |place| payload.emit(place)).map(|staged| staged.bytes)
    }

    /// Upper bound of the bytes that one FPDU with `payload` bytes takes, markers included.
    pub fn fpdu_bound(&self, payload: usize) -> usize {
        let len = fpdu_len(ddp::UNTAGGED_LEN + payload);
        match self.marker_phase {
            None => len,
            Some(_) => len + (len / (MARKER_INTERVAL - MARKER_LEN) + 2) * MARKER_LEN,
        }
    }

    #[inline]
    fn payload_len(&self, header: usize, room: usize, remaining: usize) -> Option<usize> {
        let ulpdu = (room.checked_sub(CRC_LEN)? & !3).checked_sub(LENGTH_LEN)?;
        let most = ulpdu.min(self.max_ulpdu).checked_sub(header)?;
        if remaining <= most {
            return Some(remaining);
        }
        let least = MIN_PAYLOAD.min(self.max_ulpdu - header);
        let unit = if most >= MIN_PAYLOAD { PAYLOAD_UNIT } else { 4 };
        (most >= least).then_some(most / unit * unit)
    }

    /// How many markers fall into or right before an FPDU of `len` bytes that begins here.
    #[inline]
    fn marker_count(&self, len: usize) -> usize {
        match self.marker_phase {
            None => 0,
            Some(phase) => {
                let to_next = (MARKER_INTERVAL - phase) % MARKER_INTERVAL;
                match len.checked_sub(to_next + 1) {
                    None => 0,
                    Some(behind) => 1 + behind / (MARKER_INTERVAL - MARKER_LEN),
                }
            }
        }
    }
}

impl Message {
    #[inline]
    fn header_len(&self) -> usize {
        match self.address {
            Address::Tagged { .. } => ddp::TAGGED_LEN,
            Address::Untagged { .. } => ddp::UNTAGGED_LEN,
        }
    }

    #[inline]
    fn emit_header(&self, out: &mut [u8], last: bool) {
        match self.address {
            Address::Tagged { op, stag, to } => ddp::Tagged {
                last,
                rsvd_ulp: op.octet(),
                stag,
                to: to.wrapping_add(u64::from(self.offset)),
            }
            .emit(out),
            Address::Untagged { op, ulp, qn, msn } => {
                ddp::Untagged { last, rsvd_ulp: op.octet(), ulp, qn, msn, mo: self.offset }
                    .emit(out)
            }
        }
    }
}

/// Spreads the FPDU at `bytes[shift..]` over all of `bytes`, putting a marker wherever the position
/// in the stream is a multiple of 512 (RFC 5044 4.3). `phase` is the position of `bytes[0]`, modulo
/// 512.
#[cold]
fn insert_markers(bytes: &mut [u8], shift: usize, phase: usize) {
    let (mut write, mut read) = (0, shift);
    let mut header_at = None;
    while read < bytes.len() {
        let mut run = MARKER_INTERVAL - (phase + write) % MARKER_INTERVAL;
        if run == MARKER_INTERVAL {
            // FPDUPTR counts from the length field, which a marker in front of the FPDU precedes.
            let fpdu_ptr = header_at.map_or(0, |at| write - at) as u16;
            Marker { fpdu_ptr }.emit(&mut bytes[write..]);
            write += MARKER_LEN;
            run -= MARKER_LEN;
        }
        header_at.get_or_insert(write);
        run = run.min(bytes.len() - read);
        bytes.copy_within(read..read + run, write);
        write += run;
        read += run;
    }
}
