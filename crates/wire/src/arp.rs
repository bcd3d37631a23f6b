//! The Address Resolution Protocol for IPv4 on Ethernet (RFC 826).

use std::net::Ipv4Addr;

use crate::WireError;
use crate::field::{array, need, put, u16_at};

/// Length of a message.
pub const LEN: usize = 28;

/// Ethernet, IPv4, and the lengths of their addresses.
const PREFIX: [u8; 6] = [0, 1, 0x08, 0, 6, 4];

/// What a message wants.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Operation {
    /// Who has the target's IP address?
    Request,
    /// The sender has.
    Reply,
}

impl Operation {
    /// Reads the operation of a message, whose length was checked.
    pub(crate) fn parse(message: &[u8]) -> Result<Self, WireError> {
        match u16_at(message, 6) {
            1 => Ok(Self::Request),
            2 => Ok(Self::Reply),
            _ => Err(WireError::OutOfRange("ARP operation")),
        }
    }

    /// Its number.
    pub(crate) fn code(self) -> u8 {
        match self {
            Self::Request => 1,
            Self::Reply => 2,
        }
    }
}

/// A message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Repr {
    /// What it wants.
    pub operation: Operation,
    /// The sender's station address.
    pub sender_station: [u8; 6],
    /// The sender's IP address; unspecified in a probe (RFC 5227 2.1.1).
    pub sender: Ipv4Addr,
    /// The station address of the one meant: not known in a request.
    pub target_station: [u8; 6],
    /// The IP address of the one meant.
    pub target: Ipv4Addr,
}

impl Repr {
    /// Reads a message; what is behind it is padding.
    ///
    /// # Errors
    /// Too short, of other kinds of addresses, or another operation.
    pub fn parse(bytes: &[u8]) -> Result<Self, WireError> {
        need(bytes, LEN)?;
        if !bytes.starts_with(&PREFIX) {
            return Err(WireError::OutOfRange("ARP address space"));
        }
        Ok(Self {
            operation: Operation::parse(bytes)?,
            sender_station: array(bytes, 8),
            sender: array(bytes, 14).into(),
            target_station: array(bytes, 18),
            target: array(bytes, 24).into(),
        })
    }

    /// Writes the message to the front of `out`, and says how long it is.
    ///
    /// # Panics
    /// If `out` is shorter than [`LEN`].
    pub fn emit(&self, out: &mut [u8]) -> usize {
        put(out, 0, PREFIX);
        put(out, 6, [0, self.operation.code()]);
        put(out, 8, self.sender_station);
        put(out, 14, self.sender.octets());
        put(out, 18, self.target_station);
        put(out, 24, self.target.octets());
        LEN
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const REPLY: [u8; LEN] =
        [0, 1, 8, 0, 6, 4, 0, 2, 2, 0, 0, 0, 0, 1, 10, 0, 0, 1, 2, 0, 0, 0, 0, 2, 10, 0, 0, 2];

    #[test]
    fn a_message_there_and_back() {
        let repr = Repr::parse(&[&REPLY[..], &[0; 18]].concat()).unwrap();
        assert_eq!((repr.operation, repr.sender_station[5]), (Operation::Reply, 1));
        assert_eq!(repr.target, Ipv4Addr::new(10, 0, 0, 2));
        let mut out = [0xff; LEN];
        assert_eq!(repr.emit(&mut out), LEN);
        assert_eq!(out, REPLY);
    }

    #[test]
    fn other_messages_are_refused() {
        for len in 0..LEN {
            let short = WireError::Truncated { need: LEN, have: len };
            assert_eq!(Repr::parse(&REPLY[..len]), Err(short));
        }
        for (at, what) in [(1, "ARP address space"), (5, "ARP address space"), (7, "ARP operation")]
        {
            let mut bytes = REPLY;
            bytes[at] = 9;
            assert_eq!(Repr::parse(&bytes), Err(WireError::OutOfRange(what)));
        }
    }
}
