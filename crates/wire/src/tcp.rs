//! The TCP header and its options (RFC 9293 3.1 and 3.2, RFC 7323 2 and 3, RFC 2018, RFC 3168 6.1).
//!
//! The checksum covers a pseudo-header of the network layer, which this module does not know: [`Repr::emit`]
//! leaves the field zero at [`CHECKSUM_AT`], and whoever has the addresses fills it in and verifies it.

use std::cmp::Ordering;
use std::fmt;
use std::ops::{Add, AddAssign, BitOr, BitOrAssign, Sub};

use crate::WireError;
use crate::field::{need, put, u16_at, u32_at};

/// Length of a header without options.
pub const MIN_LEN: usize = 20;
/// Length of the longest header: a data offset of 15 words.
pub const MAX_LEN: usize = 60;
/// Where the checksum stands in the header.
pub const CHECKSUM_AT: usize = 16;
/// The largest window scale (RFC 7323 2.3): a greater one is read as this.
pub const MAX_WINDOW_SCALE: u8 = 14;
/// At most four SACK blocks fit behind a header (RFC 2018 3), three beside timestamps.
pub const MAX_SACK_BLOCKS: usize = 4;

const MAX_OPTIONS: usize = MAX_LEN - MIN_LEN;

mod kind {
    pub(super) const END: u8 = 0;
    pub(super) const NOP: u8 = 1;
    pub(super) const MSS: u8 = 2;
    pub(super) const WINDOW_SCALE: u8 = 3;
    pub(super) const SACK_PERMITTED: u8 = 4;
    pub(super) const SACK: u8 = 5;
    pub(super) const TIMESTAMPS: u8 = 8;
}

/// A sequence number: 32 bits that wrap, compared within half their range (RFC 9293 3.4).
#[derive(Clone, Copy, Default, PartialEq, Eq, Hash)]
pub struct SeqNumber(pub u32);

impl SeqNumber {
    /// How far `self` is ahead of `other`, negative if behind.
    #[inline]
    pub fn distance(self, other: Self) -> i32 {
        self.0.wrapping_sub(other.0) as i32
    }
}

impl Add<u32> for SeqNumber {
    type Output = Self;
    #[inline]
    fn add(self, n: u32) -> Self {
        Self(self.0.wrapping_add(n))
    }
}

impl AddAssign<u32> for SeqNumber {
    #[inline]
    fn add_assign(&mut self, n: u32) {
        *self = *self + n;
    }
}

impl Sub<u32> for SeqNumber {
    type Output = Self;
    #[inline]
    fn sub(self, n: u32) -> Self {
        Self(self.0.wrapping_sub(n))
    }
}

impl PartialOrd for SeqNumber {
    /// The order of two numbers less than half the range apart; not transitive beyond that, so no `Ord`.
    #[inline]
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.distance(*other).cmp(&0))
    }
}

impl fmt::Debug for SeqNumber {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.0)
    }
}

/// The control bits (RFC 9293 3.1, RFC 3168 6.1).
#[derive(Clone, Copy, Default, PartialEq, Eq, Hash)]
pub struct Flags(u8);

impl Flags {
    /// No bit.
    pub const NONE: Self = Self(0);
    /// No more data from the sender.
    pub const FIN: Self = Self(0x01);
    /// Synchronises sequence numbers.
    pub const SYN: Self = Self(0x02);
    /// Ends the connection.
    pub const RST: Self = Self(0x04);
    /// The push function; the end of a message, between queue pairs.
    pub const PSH: Self = Self(0x08);
    /// The acknowledgement number counts.
    pub const ACK: Self = Self(0x10);
    /// The urgent pointer counts.
    pub const URG: Self = Self(0x20);
    /// Congestion was experienced.
    pub const ECE: Self = Self(0x40);
    /// The congestion window was reduced.
    pub const CWR: Self = Self(0x80);

    /// Whether all bits of `other` are set.
    #[inline]
    pub const fn has(self, other: Self) -> bool {
        self.0 & other.0 == other.0
    }

    /// With the bits of `other` as well, if `condition`.
    #[inline]
    #[must_use]
    pub const fn with(self, other: Self, condition: bool) -> Self {
        if condition { Self(self.0 | other.0) } else { self }
    }

    /// The bits as on the wire.
    #[inline]
    pub const fn bits(self) -> u8 {
        self.0
    }

    /// From the bits on the wire: every octet is legal.
    #[inline]
    pub const fn from_bits(bits: u8) -> Self {
        Self(bits)
    }
}

impl BitOr for Flags {
    type Output = Self;
    fn bitor(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }
}

impl BitOrAssign for Flags {
    fn bitor_assign(&mut self, other: Self) {
        self.0 |= other.0;
    }
}

impl fmt::Debug for Flags {
    /// The letters of packet traces: `S` SYN, `F`, `R`, `P`, `U`, `E`, `W` CWR, and `.` for ACK.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const LETTERS: [(Flags, char); 8] = [
            (Flags::SYN, 'S'),
            (Flags::FIN, 'F'),
            (Flags::RST, 'R'),
            (Flags::PSH, 'P'),
            (Flags::URG, 'U'),
            (Flags::ECE, 'E'),
            (Flags::CWR, 'W'),
            (Flags::ACK, '.'),
        ];
        for (flag, letter) in LETTERS {
            if self.has(flag) {
                write!(f, "{letter}")?;
            }
        }
        if *self == Self::NONE { write!(f, "-") } else { Ok(()) }
    }
}

/// The timestamps option (RFC 7323 3.2).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Timestamps {
    /// TSval: the sender's clock.
    pub value: u32,
    /// TSecr: the last value received, valid with ACK.
    pub echo: u32,
}

/// A run of sequence numbers that a receiver holds: `left` is its first, `right` the one after its last.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SackBlock {
    /// The first number.
    pub left: SeqNumber,
    /// The number after the last.
    pub right: SeqNumber,
}

/// Up to four blocks of a SACK option.
#[derive(Clone, Copy, Default, PartialEq, Eq)]
pub struct SackBlocks {
    blocks: [SackBlock; MAX_SACK_BLOCKS],
    len: u8,
}

impl SackBlocks {
    /// No block.
    pub const EMPTY: Self = Self {
        blocks: [SackBlock { left: SeqNumber(0), right: SeqNumber(0) }; MAX_SACK_BLOCKS],
        len: 0,
    };

    /// Adds a block behind the others; says whether there was room.
    pub fn push(&mut self, block: SackBlock) -> bool {
        let free = self.blocks.get_mut(usize::from(self.len));
        let fits = free.is_some();
        if let Some(free) = free {
            *free = block;
            self.len += 1;
        }
        fits
    }

    /// The blocks in the order of the option.
    #[inline]
    pub fn as_slice(&self) -> &[SackBlock] {
        &self.blocks[..usize::from(self.len)]
    }
}

impl fmt::Debug for SackBlocks {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.as_slice()).finish()
    }
}

/// The options that this stack understands; others are skipped (RFC 9293 3.1, MUST-6).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Options {
    /// Maximum segment size that the sender can receive (RFC 9293 3.7.1).
    pub mss: Option<u16>,
    /// Window scale, at most [`MAX_WINDOW_SCALE`] (RFC 7323 2).
    pub window_scale: Option<u8>,
    /// SACK may be sent (RFC 2018 2).
    pub sack_permitted: bool,
    /// Timestamps (RFC 7323 3).
    pub timestamps: Option<Timestamps>,
    /// SACK blocks (RFC 2018 3).
    pub sack: SackBlocks,
}

impl Options {
    /// Length on the wire, a multiple of four.
    pub fn wire_len(&self) -> usize {
        let blocks = self.sack.as_slice().len();
        let mss = if self.mss.is_some() { 4 } else { 0 };
        let scale = if self.window_scale.is_some() { 4 } else { 0 };
        // SACK-permitted fills the two octets of padding in front of timestamps, if there are any.
        let timestamps = if self.timestamps.is_some() { 12 } else { 0 };
        let permitted = if self.sack_permitted && timestamps == 0 { 4 } else { 0 };
        let sack = if blocks > 0 { 4 + 8 * blocks } else { 0 };
        mss + scale + timestamps + permitted + sack
    }

    fn parse(mut bytes: &[u8]) -> Result<Self, WireError> {
        let mut options = Self::default();
        // Every turn takes at least one of at most 40 octets.
        while let [kind, rest @ ..] = bytes {
            match *kind {
                kind::END => break,
                kind::NOP => {
                    bytes = rest;
                    continue;
                }
                _ => {}
            }
            // A length below two or beyond the header is a malformed option (RFC 9293 3.1, MUST-7).
            let len = rest.first().map_or(0, |len| usize::from(*len));
            if len < 2 || len > bytes.len() {
                return Err(WireError::OutOfRange("TCP option length"));
            }
            let (option, behind) = bytes.split_at(len);
            options.take(option);
            bytes = behind;
        }
        // Options may come without padding: what would not fit when padded goes, so that each value is legal.
        while options.wire_len() > MAX_OPTIONS {
            options.sack.len -= 1;
        }
        Ok(options)
    }

    /// Takes one option; one whose length is not that of its kind is skipped, as an unknown one is.
    fn take(&mut self, option: &[u8]) {
        match (option[0], option.len()) {
            (kind::MSS, 4) => self.mss = Some(u16_at(option, 2)),
            (kind::WINDOW_SCALE, 3) => {
                self.window_scale = Some(option[2].min(MAX_WINDOW_SCALE));
            }
            (kind::SACK_PERMITTED, 2) => self.sack_permitted = true,
            (kind::TIMESTAMPS, 10) => {
                let (value, echo) = (u32_at(option, 2), u32_at(option, 6));
                self.timestamps = Some(Timestamps { value, echo });
            }
            (kind::SACK, len) if (len - 2) % 8 == 0 => {
                for block in option[2..].chunks_exact(8) {
                    let (left, right) = (SeqNumber(u32_at(block, 0)), SeqNumber(u32_at(block, 4)));
                    self.sack.push(SackBlock { left, right });
                }
            }
            _ => {}
        }
    }

    /// Writes the options; `out` is exactly [`Options::wire_len`] long.
    fn emit(&self, out: &mut [u8]) {
        let mut at = 0;
        let mut next = |len: usize| {
            at += len;
            at - len
        };
        if let Some(mss) = self.mss {
            let at = next(4);
            put(out, at, [kind::MSS, 4]);
            put(out, at + 2, mss.to_be_bytes());
        }
        match self.timestamps {
            Some(Timestamps { value, echo }) => {
                let at = next(12);
                let pad =
                    if self.sack_permitted { [kind::SACK_PERMITTED, 2] } else { [kind::NOP; 2] };
                put(out, at, pad);
                put(out, at + 2, [kind::TIMESTAMPS, 10]);
                put(out, at + 4, value.to_be_bytes());
                put(out, at + 8, echo.to_be_bytes());
            }
            None if self.sack_permitted => {
                put(out, next(4), [kind::NOP, kind::NOP, kind::SACK_PERMITTED, 2]);
            }
            None => {}
        }
        if let Some(scale) = self.window_scale {
            put(out, next(4), [kind::NOP, kind::WINDOW_SCALE, 3, scale]);
        }
        let blocks = self.sack.as_slice();
        if !blocks.is_empty() {
            put(out, next(4), [kind::NOP, kind::NOP, kind::SACK, 2 + 8 * blocks.len() as u8]);
            for block in blocks {
                let at = next(8);
                put(out, at, block.left.0.to_be_bytes());
                put(out, at + 4, block.right.0.to_be_bytes());
            }
        }
    }
}

/// A TCP header (RFC 9293 3.1). The checksum is the network layer's part.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Repr {
    /// The sender's port.
    pub source: u16,
    /// The receiver's port.
    pub destination: u16,
    /// The number of the first octet of payload, or of the SYN.
    pub seq: SeqNumber,
    /// The next number that the sender expects, with [`Flags::ACK`].
    pub ack: SeqNumber,
    /// The control bits.
    pub flags: Flags,
    /// The window as on the wire: not scaled.
    pub window: u16,
    /// The urgent pointer, with [`Flags::URG`].
    pub urgent: u16,
    /// The options.
    pub options: Options,
}

impl Repr {
    /// Reads the header at the front of a segment, and says how long it is: behind it is the payload.
    /// Reserved bits are ignored (RFC 9293 3.1).
    ///
    /// # Errors
    /// Too short, a data offset outside of the segment, or options that leave the header.
    pub fn parse(bytes: &[u8]) -> Result<(Self, usize), WireError> {
        need(bytes, MIN_LEN)?;
        let len = usize::from(bytes[12] >> 4) * 4;
        if len < MIN_LEN {
            return Err(WireError::OutOfRange("TCP data offset"));
        }
        need(bytes, len)?;
        let repr = Self {
            source: u16_at(bytes, 0),
            destination: u16_at(bytes, 2),
            seq: SeqNumber(u32_at(bytes, 4)),
            ack: SeqNumber(u32_at(bytes, 8)),
            flags: Flags(bytes[13]),
            window: u16_at(bytes, 14),
            urgent: u16_at(bytes, 18),
            options: Options::parse(&bytes[MIN_LEN..len])?,
        };
        Ok((repr, len))
    }

    /// Length of the header on the wire.
    ///
    /// # Panics
    /// If the options exceed the 40 octets that a header has for them: no segment carries so many.
    pub fn header_len(&self) -> usize {
        let options = self.options.wire_len();
        assert!(options <= MAX_OPTIONS, "{options} octets of TCP options");
        MIN_LEN + options
    }

    /// Writes the header to the front of `out`, with a checksum of zero, and says how long it is.
    ///
    /// # Panics
    /// If `out` is shorter than [`Repr::header_len`].
    pub fn emit(&self, out: &mut [u8]) -> usize {
        let len = self.header_len();
        put(out, 0, self.source.to_be_bytes());
        put(out, 2, self.destination.to_be_bytes());
        put(out, 4, self.seq.0.to_be_bytes());
        put(out, 8, self.ack.0.to_be_bytes());
        put(out, 12, [(len as u8 / 4) << 4, self.flags.0]);
        put(out, 14, self.window.to_be_bytes());
        put(out, CHECKSUM_AT, [0; 2]);
        put(out, 18, self.urgent.to_be_bytes());
        self.options.emit(&mut out[MIN_LEN..len]);
        len
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A SYN as Linux sends it: MSS 1460, SACK permitted, timestamps, window scale 7.
    const SYN: [u8; 40] = [
        0x9c, 0x40, 0x00, 0x50, 0x01, 0x02, 0x03, 0x04, 0, 0, 0, 0, 0xa0, 0x02, 0xfa, 0xf0, 0, 0,
        0, 0, 2, 4, 0x05, 0xb4, 4, 2, 8, 10, 0, 0, 0x10, 0, 0, 0, 0, 0, 1, 3, 3, 7,
    ];

    fn syn() -> Repr {
        Repr {
            source: 40000,
            destination: 80,
            seq: SeqNumber(0x0102_0304),
            flags: Flags::SYN,
            window: 64240,
            options: Options {
                mss: Some(1460),
                window_scale: Some(7),
                sack_permitted: true,
                timestamps: Some(Timestamps { value: 0x1000, echo: 0 }),
                sack: SackBlocks::EMPTY,
            },
            ..Repr::default()
        }
    }

    #[test]
    fn a_syn_with_all_its_options() {
        assert_eq!(Repr::parse(&SYN), Ok((syn(), 40)));
        let mut out = [0xff; 40];
        assert_eq!(syn().emit(&mut out), 40);
        assert_eq!(out, SYN);
    }

    #[test]
    fn sequence_numbers_wrap() {
        let high = SeqNumber(u32::MAX);
        assert!(high < high + 1);
        assert_eq!(high + 1, SeqNumber(0));
        assert_eq!((high + 5).distance(high), 5);
        assert_eq!((SeqNumber(2) - 5).distance(SeqNumber(2)), -5);
    }

    #[test]
    fn a_header_that_leaves_its_segment_is_refused() {
        for len in 0..MIN_LEN {
            let short = WireError::Truncated { need: MIN_LEN, have: len };
            assert_eq!(Repr::parse(&SYN[..len]), Err(short));
        }
        assert_eq!(Repr::parse(&SYN[..39]), Err(WireError::Truncated { need: 40, have: 39 }));
        let mut bytes = SYN;
        bytes[12] = 0x40;
        assert_eq!(Repr::parse(&bytes), Err(WireError::OutOfRange("TCP data offset")));
    }

    #[test]
    fn options_of_impossible_length_are_refused() {
        for (at, len) in [(21, 0), (21, 1), (21, 21), (39, 1)] {
            let mut bytes = SYN;
            bytes[at] = len;
            if at == 39 {
                // The last octet: a kind with no room for a length.
                bytes[36..40].copy_from_slice(&[1, 1, 1, 3]);
            }
            assert_eq!(Repr::parse(&bytes), Err(WireError::OutOfRange("TCP option length")));
        }
    }

    #[test]
    fn options_that_nobody_knows_are_skipped() {
        let mut bytes = SYN;
        bytes[20] = 77; // instead of the MSS
        bytes[38] = 4; // the window scale with a wrong length runs out of the header
        assert_eq!(Repr::parse(&bytes), Err(WireError::OutOfRange("TCP option length")));
        bytes[38] = 3;
        bytes[39] = 200;
        let (repr, _) = Repr::parse(&bytes).unwrap();
        assert_eq!(repr.options.mss, None);
        assert_eq!(repr.options.window_scale, Some(MAX_WINDOW_SCALE), "RFC 7323 2.3");
        assert!(repr.options.sack_permitted);
    }

    #[test]
    fn what_is_behind_the_end_of_options_is_ignored() {
        let mut bytes = SYN;
        bytes[20] = 0;
        bytes[21] = 0xff;
        let (repr, len) = Repr::parse(&bytes).unwrap();
        assert_eq!((repr.options, len), (Options::default(), 40));
    }
}
