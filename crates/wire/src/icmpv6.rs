//! ICMP for IPv6 (RFC 4443); its checksum covers the addresses (RFC 4443 2.3).

use std::net::Ipv6Addr;

use crate::WireError;
use crate::checksum::{Sum, sum};
use crate::field::{need, put, u16_at, u32_at};
use crate::ndp;

/// The protocol number.
pub const PROTOCOL: u8 = 58;
/// Length of what stands in front of the data, or of the packet quoted.
pub const LEN: usize = 8;

const CHECKSUM_AT: usize = 2;

mod kind {
    pub(super) const UNREACHABLE: u8 = 1;
    pub(super) const PACKET_TOO_BIG: u8 = 2;
    pub(super) const TIME_EXCEEDED: u8 = 3;
    pub(super) const PARAMETER_PROBLEM: u8 = 4;
    pub(super) const ECHO_REQUEST: u8 = 128;
    pub(super) const ECHO_REPLY: u8 = 129;
}

/// Codes of an unreachable destination (RFC 4443 3.1).
pub mod unreachable {
    /// No route to it.
    pub const NO_ROUTE: u8 = 0;
    /// Administratively prohibited.
    pub const PROHIBITED: u8 = 1;
    /// Beyond the scope of the source address.
    pub const SCOPE: u8 = 2;
    /// Its address does not resolve, or the like.
    pub const ADDRESS: u8 = 3;
    /// Nobody is at the port.
    pub const PORT: u8 = 4;
}

/// A message that this stack sends or understands; a packet quoted may be cut off anywhere.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Repr<'a> {
    /// A packet did not get there (RFC 4443 3.1).
    Unreachable {
        /// Why: [`mod@unreachable`] has the usual ones.
        code: u8,
        /// The packet.
        packet: &'a [u8],
    },
    /// A packet is too long for a link (RFC 4443 3.2).
    PacketTooBig {
        /// What the link takes.
        mtu: u32,
        /// The packet.
        packet: &'a [u8],
    },
    /// A packet has passed too many routers (0), or its fragments too much time (1) (RFC 4443 3.3).
    TimeExceeded {
        /// Which.
        code: u8,
        /// The packet.
        packet: &'a [u8],
    },
    /// A packet's headers make no sense (RFC 4443 3.4).
    ParameterProblem {
        /// One of [`crate::ipv6_extension::problem`].
        code: u8,
        /// The octet at fault.
        pointer: u32,
        /// The packet.
        packet: &'a [u8],
    },
    /// Wants its data back (RFC 4443 4.1).
    EchoRequest {
        /// Tells the programs of the asker apart.
        identifier: u16,
        /// Tells its requests apart.
        number: u16,
        /// Anything.
        data: &'a [u8],
    },
    /// The answer (RFC 4443 4.2).
    EchoReply {
        /// As in the request.
        identifier: u16,
        /// As in the request.
        number: u16,
        /// As in the request.
        data: &'a [u8],
    },
    /// Discovery of neighbours and routers.
    Discovery(ndp::Repr),
}

impl<'a> Repr<'a> {
    /// Reads a message that went from `source` to `destination`.
    ///
    /// # Errors
    /// Too short, a wrong checksum, a kind that is not listed, or what [`ndp::Repr`] refuses.
    pub fn parse(
        source: Ipv6Addr,
        destination: Ipv6Addr,
        bytes: &'a [u8],
    ) -> Result<Self, WireError> {
        need(bytes, LEN)?;
        if !pseudo_header(source, destination, bytes.len()).and(sum(bytes)).is_valid() {
            return Err(WireError::BadChecksum);
        }
        let (code, rest) = (bytes[1], &bytes[LEN..]);
        let (high, low) = (u16_at(bytes, 4), u16_at(bytes, 6));
        Ok(match bytes[0] {
            kind::UNREACHABLE => Self::Unreachable { code, packet: rest },
            // RFC 4443 3.2: its code is ignored.
            kind::PACKET_TOO_BIG => Self::PacketTooBig { mtu: u32_at(bytes, 4), packet: rest },
            kind::TIME_EXCEEDED => Self::TimeExceeded { code, packet: rest },
            kind::PARAMETER_PROBLEM => {
                Self::ParameterProblem { code, pointer: u32_at(bytes, 4), packet: rest }
            }
            // RFC 4443 4.1, 4.2: a code is sent as zero, and not looked at.
            kind::ECHO_REQUEST => Self::EchoRequest { identifier: high, number: low, data: rest },
            kind::ECHO_REPLY => Self::EchoReply { identifier: high, number: low, data: rest },
            _ => Self::Discovery(ndp::Repr::parse(bytes)?),
        })
    }

    /// Whether it is an error, to which no error answers (RFC 4443 2.4 e.1).
    pub fn is_error(&self) -> bool {
        !matches!(self, Self::EchoRequest { .. } | Self::EchoReply { .. } | Self::Discovery(_))
    }

    /// Length on the wire.
    pub fn wire_len(&self) -> usize {
        match self {
            Self::Discovery(discovery) => discovery.wire_len(),
            _ => LEN + self.rest().len(),
        }
    }

    fn rest(&self) -> &'a [u8] {
        match *self {
            Self::EchoRequest { data, .. } | Self::EchoReply { data, .. } => data,
            Self::Unreachable { packet, .. }
            | Self::PacketTooBig { packet, .. }
            | Self::TimeExceeded { packet, .. }
            | Self::ParameterProblem { packet, .. } => packet,
            Self::Discovery(_) => &[],
        }
    }

    /// Writes the message, with its checksum, to the front of `out`, and says how long it is.
    ///
    /// # Panics
    /// If `out` is shorter than [`Repr::wire_len`].
    pub fn emit(&self, source: Ipv6Addr, destination: Ipv6Addr, out: &mut [u8]) -> usize {
        let len = self.wire_len();
        let echo = |identifier: u16, number: u16| u32::from(identifier) << 16 | u32::from(number);
        let (kind, code, word) = match *self {
            Self::Unreachable { code, .. } => (kind::UNREACHABLE, code, 0),
            Self::PacketTooBig { mtu, .. } => (kind::PACKET_TOO_BIG, 0, mtu),
            Self::TimeExceeded { code, .. } => (kind::TIME_EXCEEDED, code, 0),
            Self::ParameterProblem { code, pointer, .. } => {
                (kind::PARAMETER_PROBLEM, code, pointer)
            }
            Self::EchoRequest { identifier, number, .. } => {
                (kind::ECHO_REQUEST, 0, echo(identifier, number))
            }
            Self::EchoReply { identifier, number, .. } => {
                (kind::ECHO_REPLY, 0, echo(identifier, number))
            }
            Self::Discovery(ref discovery) => {
                discovery.emit(out);
                seal(source, destination, &mut out[..len]);
                return len;
            }
        };
        put(out, 0, [kind, code]);
        put(out, 4, word.to_be_bytes());
        out[LEN..len].copy_from_slice(self.rest());
        seal(source, destination, &mut out[..len]);
        len
    }
}

fn pseudo_header(source: Ipv6Addr, destination: Ipv6Addr, len: usize) -> Sum {
    Sum::of_pseudo_header(source.into(), destination.into(), PROTOCOL, len)
}

fn seal(source: Ipv6Addr, destination: Ipv6Addr, message: &mut [u8]) {
    put(message, CHECKSUM_AT, [0; 2]);
    let checksum = pseudo_header(source, destination, message.len()).and(sum(message)).checksum();
    put(message, CHECKSUM_AT, checksum.to_be_bytes());
}

#[cfg(test)]
mod tests {
    use super::*;

    const A: Ipv6Addr = Ipv6Addr::new(0xfe80, 0, 0, 0, 0, 0, 0, 1);
    const B: Ipv6Addr = Ipv6Addr::new(0xfe80, 0, 0, 0, 0, 0, 0, 2);

    fn there_and_back(repr: &Repr<'_>) -> Vec<u8> {
        let mut out = vec![0xff; repr.wire_len()];
        assert_eq!(repr.emit(A, B, &mut out), repr.wire_len());
        assert_eq!(Repr::parse(A, B, &out), Ok(*repr));
        out
    }

    #[test]
    fn an_echo() {
        let echo = Repr::EchoRequest { identifier: 0x0102, number: 3, data: b"abcd" };
        let bytes = there_and_back(&echo);
        // By hand: fe80 + 1 + fe80 + 2 + 12 + 58 + 8000 + 102 + 3 + 6162 + 6364 = 3 4314.
        assert_eq!(bytes[..8], [128, 0, 0xbc, 0xe8, 1, 2, 0, 3]);
        assert!(!echo.is_error());
        there_and_back(&Repr::EchoReply { identifier: 1, number: 2, data: &[] });
    }

    #[test]
    fn errors_quote_their_packet() {
        let packet = &[0x60; 48][..];
        for error in [
            Repr::Unreachable { code: unreachable::PORT, packet },
            Repr::PacketTooBig { mtu: 1 << 31 | 1280, packet },
            Repr::TimeExceeded { code: 0, packet },
            Repr::ParameterProblem { code: 2, pointer: 48, packet },
        ] {
            assert_eq!(there_and_back(&error).len(), 56);
            assert!(error.is_error());
        }
    }

    #[test]
    fn what_is_damaged_misdirected_or_unknown_is_refused() {
        let mut bytes = there_and_back(&Repr::TimeExceeded { code: 0, packet: &[1, 2, 3] });
        for len in 0..LEN {
            let short = WireError::Truncated { need: LEN, have: len };
            assert_eq!(Repr::parse(A, B, &bytes[..len]), Err(short));
        }
        let elsewhere = "fe80::3".parse().unwrap();
        assert_eq!(Repr::parse(A, elsewhere, &bytes), Err(WireError::BadChecksum));
        bytes[0] = 200;
        seal(A, B, &mut bytes);
        assert_eq!(Repr::parse(A, B, &bytes), Err(WireError::UnknownIcmp(200)));
    }
}
