//! ICMP for IPv4 (RFC 792, RFC 1191).

use crate::WireError;
use crate::checksum::sum;
use crate::field::{need, put, u16_at};

/// Length of what stands in front of the data, or of the packet quoted.
pub const LEN: usize = 8;

const CHECKSUM_AT: usize = 2;

mod kind {
    pub(super) const ECHO_REPLY: u8 = 0;
    pub(super) const UNREACHABLE: u8 = 3;
    pub(super) const ECHO_REQUEST: u8 = 8;
    pub(super) const TIME_EXCEEDED: u8 = 11;
    pub(super) const PARAMETER_PROBLEM: u8 = 12;
}

/// Codes of an unreachable destination (RFC 792, RFC 1122 3.2.2.1).
pub mod unreachable {
    /// No way to its network.
    pub const NETWORK: u8 = 0;
    /// No way to the host itself.
    pub const HOST: u8 = 1;
    /// The host does not know the protocol.
    pub const PROTOCOL: u8 = 2;
    /// Nobody is at the port.
    pub const PORT: u8 = 3;
    /// The packet is too long for a link and must not be cut (RFC 1191 4).
    pub const FRAGMENTATION_NEEDED: u8 = 4;
    /// The source route has failed.
    pub const SOURCE_ROUTE: u8 = 5;
}

/// A message that this stack sends or understands; a packet quoted may be cut off anywhere.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Repr<'a> {
    /// Wants its data back.
    EchoRequest {
        /// Tells the programs of the asker apart.
        identifier: u16,
        /// Tells its requests apart.
        number: u16,
        /// Anything.
        data: &'a [u8],
    },
    /// The answer.
    EchoReply {
        /// As in the request.
        identifier: u16,
        /// As in the request.
        number: u16,
        /// As in the request.
        data: &'a [u8],
    },
    /// A packet did not get there.
    Unreachable {
        /// Why: [`mod@unreachable`] has the usual ones.
        code: u8,
        /// With [`unreachable::FRAGMENTATION_NEEDED`]: what the link takes; 0 if the router does not say.
        next_mtu: u16,
        /// The packet.
        packet: &'a [u8],
    },
    /// A packet has passed too many routers (0), or its fragments too much time (1).
    TimeExceeded {
        /// Which.
        code: u8,
        /// The packet.
        packet: &'a [u8],
    },
    /// A packet's header makes no sense.
    ParameterProblem {
        /// 0: the pointer says where.
        code: u8,
        /// The octet at fault.
        pointer: u8,
        /// The packet.
        packet: &'a [u8],
    },
}

impl<'a> Repr<'a> {
    /// Reads a message.
    ///
    /// # Errors
    /// Too short, a wrong checksum, or a kind that is not listed.
    pub fn parse(bytes: &'a [u8]) -> Result<Self, WireError> {
        need(bytes, LEN)?;
        if !sum(bytes).is_valid() {
            return Err(WireError::BadChecksum);
        }
        let (code, rest) = (bytes[1], &bytes[LEN..]);
        let (high, low) = (u16_at(bytes, 4), u16_at(bytes, 6));
        Ok(match (bytes[0], code) {
            (kind::ECHO_REQUEST, 0) => {
                Self::EchoRequest { identifier: high, number: low, data: rest }
            }
            (kind::ECHO_REPLY, 0) => Self::EchoReply { identifier: high, number: low, data: rest },
            (kind::UNREACHABLE, _) => {
                let mtu = if code == unreachable::FRAGMENTATION_NEEDED { low } else { 0 };
                Self::Unreachable { code, next_mtu: mtu, packet: rest }
            }
            (kind::TIME_EXCEEDED, _) => Self::TimeExceeded { code, packet: rest },
            (kind::PARAMETER_PROBLEM, _) => {
                Self::ParameterProblem { code, pointer: bytes[4], packet: rest }
            }
            (other, _) => return Err(WireError::UnknownIcmp(other)),
        })
    }

    fn rest(&self) -> &'a [u8] {
        match *self {
            Self::EchoRequest { data, .. } | Self::EchoReply { data, .. } => data,
            Self::Unreachable { packet, .. }
            | Self::TimeExceeded { packet, .. }
            | Self::ParameterProblem { packet, .. } => packet,
        }
    }

    /// Length on the wire.
    pub fn wire_len(&self) -> usize {
        LEN + self.rest().len()
    }

    /// Writes the message, with its checksum, to the front of `out`, and says how long it is.
    ///
    /// # Panics
    /// If `out` is shorter than [`Repr::wire_len`].
    pub fn emit(&self, out: &mut [u8]) -> usize {
        let echo = |identifier: u16, number: u16| u32::from(identifier) << 16 | u32::from(number);
        let (kind, code, word) = match *self {
            Self::EchoRequest { identifier, number, .. } => {
                (kind::ECHO_REQUEST, 0, echo(identifier, number))
            }
            Self::EchoReply { identifier, number, .. } => {
                (kind::ECHO_REPLY, 0, echo(identifier, number))
            }
            Self::Unreachable { code, next_mtu, .. } => {
                (kind::UNREACHABLE, code, u32::from(next_mtu))
            }
            Self::TimeExceeded { code, .. } => (kind::TIME_EXCEEDED, code, 0),
            Self::ParameterProblem { code, pointer, .. } => {
                (kind::PARAMETER_PROBLEM, code, u32::from(pointer) << 24)
            }
        };
        put(out, 0, [kind, code, 0, 0]);
        put(out, 4, word.to_be_bytes());
        let len = self.wire_len();
        out[LEN..len].copy_from_slice(self.rest());
        put(out, CHECKSUM_AT, sum(&out[..len]).checksum().to_be_bytes());
        len
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn there_and_back(repr: &Repr<'_>) -> Vec<u8> {
        let mut out = vec![0xff; repr.wire_len()];
        assert_eq!(repr.emit(&mut out), repr.wire_len());
        assert_eq!(Repr::parse(&out), Ok(*repr));
        out
    }

    #[test]
    fn an_echo() {
        let echo = Repr::EchoRequest { identifier: 0x0102, number: 3, data: b"abc" };
        let bytes = there_and_back(&echo);
        assert_eq!(bytes[..2], [8, 0]);
        assert_eq!(bytes[4..], [1, 2, 0, 3, b'a', b'b', b'c']);
        there_and_back(&Repr::EchoReply { identifier: 1, number: 2, data: &[] });
    }

    #[test]
    fn errors_quote_their_packet() {
        let packet = &[0x45; 28][..];
        let needed = Repr::Unreachable { code: 4, next_mtu: 1400, packet };
        // By hand: 304 + 578 + 14 * 4545 = 3 d242.
        assert_eq!(there_and_back(&needed)[..8], [3, 4, 0x2d, 0xba, 0, 0, 0x05, 0x78]);
        there_and_back(&Repr::TimeExceeded { code: 1, packet });
        let problem = Repr::ParameterProblem { code: 0, pointer: 20, packet };
        assert_eq!(there_and_back(&problem)[4..8], [20, 0, 0, 0]);
    }

    #[test]
    fn what_is_damaged_or_unknown_is_refused() {
        let mut bytes = there_and_back(&Repr::TimeExceeded { code: 0, packet: &[1, 2, 3] });
        for len in 0..LEN {
            let short = WireError::Truncated { need: LEN, have: len };
            assert_eq!(Repr::parse(&bytes[..len]), Err(short));
        }
        bytes[9] ^= 1;
        assert_eq!(Repr::parse(&bytes), Err(WireError::BadChecksum));
        // Source Quench, RFC 6633 3; and a code that an echo does not have.
        assert_eq!(Repr::parse(&[4, 0, 0xfb, 0xff, 0, 0, 0, 0]), Err(WireError::UnknownIcmp(4)));
        assert_eq!(Repr::parse(&[8, 1, 0xf7, 0xfe, 0, 0, 0, 0]), Err(WireError::UnknownIcmp(8)));
    }
}
