//! Positions: sequence numbers that do not wrap.
//!
//! Inside of a connection all arithmetic is on 64-bit positions, counted from its SYN: the SYN is 0, octet
//! `n` of the stream is `n + 1`. Only the edge knows numbers of 32 bits. A connection would need centuries
//! to exhaust them.

use quipu_wire::tcp::SeqNumber;

/// The position of the first octet of the stream: behind the SYN.
pub(crate) const FIRST: u64 = 1;

/// One direction's numbering.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SeqSpace {
    /// The number of the SYN: ISS or IRS (RFC 9293 3.3.1).
    pub(crate) initial: SeqNumber,
}

impl SeqSpace {
    /// The number on the wire.
    #[inline]
    pub(crate) fn wire(self, position: u64) -> SeqNumber {
        self.initial + position as u32
    }

    /// The position of a number from the wire, next to `near` (within half of the 32 bits, RFC 9293 3.4);
    /// none if it lies before the SYN.
    #[inline]
    pub(crate) fn position(self, near: u64, number: SeqNumber) -> Option<u64> {
        near.checked_add_signed(i64::from(number.distance(self.wire(near))))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_wrap_and_positions_do_not() {
        let space = SeqSpace { initial: SeqNumber(u32::MAX - 1) };
        assert_eq!(space.wire(3), SeqNumber(1));
        assert_eq!(space.position(0, SeqNumber(1)), Some(3));
        let far = 5 << 32;
        assert_eq!(space.position(far, space.wire(far - 70_000)), Some(far - 70_000));
        assert_eq!(space.position(far, space.wire(far + 70_000)), Some(far + 70_000));
        assert_eq!(space.position(1, SeqNumber(u32::MAX - 2)), None, "before the SYN");
    }
}
