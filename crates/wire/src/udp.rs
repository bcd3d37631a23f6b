//! The UDP header (RFC 768).
//!
//! As with TCP, the checksum is the network layer's part: [`Repr::emit`] leaves zero at [`CHECKSUM_AT`].

use crate::WireError;
use crate::checksum::Sum;
use crate::field::{need, put, u16_at};

/// Length of the header.
pub const LEN: usize = 8;
/// Where the checksum stands in it.
pub const CHECKSUM_AT: usize = 6;

/// A header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Repr {
    /// The sender's port; zero: it wants no answer.
    pub source: u16,
    /// The receiver's port.
    pub destination: u16,
    /// Octets behind the header, at most 65527.
    pub payload_len: u16,
}

impl Repr {
    /// Reads the header at the front of a datagram: behind its [`LEN`] octets are `payload_len` of payload.
    ///
    /// # Errors
    /// Too short, or a length outside of the datagram.
    pub fn parse(bytes: &[u8]) -> Result<(Self, usize), WireError> {
        let (repr, len) = Self::parse_quoted(bytes)?;
        need(bytes, len + usize::from(repr.payload_len))?;
        Ok((repr, len))
    }

    /// Reads the header of a datagram that an ICMP error quotes: its payload may be cut off.
    ///
    /// # Errors
    /// Too short, or an impossible length.
    pub fn parse_quoted(bytes: &[u8]) -> Result<(Self, usize), WireError> {
        need(bytes, LEN)?;
        let Some(payload_len) = u16_at(bytes, 4).checked_sub(LEN as u16) else {
            return Err(WireError::OutOfRange("UDP length"));
        };
        let (source, destination) = (u16_at(bytes, 0), u16_at(bytes, 2));
        Ok((Self { source, destination, payload_len }, LEN))
    }

    /// Writes the header to the front of `out`, with a checksum of zero, and says how long it is.
    ///
    /// # Panics
    /// If `out` is shorter than [`LEN`], or the payload too long for a datagram.
    pub fn emit(&self, out: &mut [u8]) -> usize {
        let len = self.payload_len.checked_add(LEN as u16);
        let len = len.expect("a datagram has at most 65527 octets");
        put(out, 0, self.source.to_be_bytes());
        put(out, 2, self.destination.to_be_bytes());
        put(out, 4, len.to_be_bytes());
        put(out, CHECKSUM_AT, [0; 2]);
        LEN
    }
}

/// Whether the sender of a datagram that was parsed has computed a checksum: over IPv4 it need not
/// (RFC 768), over IPv6 it must (RFC 8200 8.1).
#[inline]
pub fn has_checksum(datagram: &[u8]) -> bool {
    u16_at(datagram, CHECKSUM_AT) != 0
}

/// The checksum field for a sum: a zero would say that there is none (RFC 768).
#[inline]
pub const fn checksum(sum: Sum) -> u16 {
    match sum.checksum() {
        0 => 0xffff,
        checksum => checksum,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const DATAGRAM: [u8; 11] = [0x04, 0xd2, 0, 53, 0, 10, 0xbe, 0xef, 1, 2, 0xff];

    #[test]
    fn a_header_there_and_back() {
        let repr = Repr { source: 1234, destination: 53, payload_len: 2 };
        assert_eq!(Repr::parse(&DATAGRAM), Ok((repr, LEN)));
        assert!(has_checksum(&DATAGRAM));
        let mut out = [0xff; LEN];
        assert_eq!(repr.emit(&mut out), LEN);
        assert_eq!(out[..6], DATAGRAM[..6]);
        assert!(!has_checksum(&out));
    }

    #[test]
    fn lengths_outside_of_the_datagram_are_refused() {
        for len in 0..10 {
            let need = if len < LEN { LEN } else { 10 };
            assert_eq!(
                Repr::parse(&DATAGRAM[..len]),
                Err(WireError::Truncated { need, have: len })
            );
        }
        let mut bytes = DATAGRAM;
        bytes[5] = 7;
        assert_eq!(Repr::parse(&bytes), Err(WireError::OutOfRange("UDP length")));
    }

    #[test]
    fn no_checksum_is_sent_as_zero() {
        assert_eq!(checksum(Sum::of_word(0xffff)), 0xffff);
        assert_eq!(checksum(Sum::of_word(0x1234)), 0xedcb);
    }
}
