//! What a descriptor in the epoll set stands for.

/// Something that epoll reports on. Slots carry a generation, so that an event that was already
/// under way when its descriptor was closed finds nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Token {
    /// The engine's own bell.
    Bell,
    /// A TCP listener, by index.
    Listener(u32),
    /// A TCP stream.
    Stream(Slot),
    /// A listener for links, by index.
    LinkListener(u32),
    /// The socket of a link.
    Link(Slot),
    /// The process at the other end of a link.
    LinkProcess(Slot),
    /// Notices about the port.
    Port,
    /// The socket of an identifier of connection management.
    CmSocket(Slot),
    /// A TCP stream of connection management.
    CmStream(Slot),
    /// A UDP socket, by index.
    Datagrams(u32),
    /// The packet link of QPIP.
    Packets,
    /// The bell of a shared adapter.
    Attached,
}

/// A place in a [`Table`](super::table::Table).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Slot {
    /// Position.
    pub(crate) index: u32,
    /// Which of those that were ever there; 24 bits.
    pub(crate) generation: u32,
}

const KIND_SHIFT: u32 = 56;
const GENERATION_SHIFT: u32 = 32;

impl Token {
    /// As the number that epoll carries.
    pub(crate) fn bits(self) -> u64 {
        let pack = |kind: u64, slot: Slot| {
            kind << KIND_SHIFT
                | u64::from(slot.generation & 0x00ff_ffff) << GENERATION_SHIFT
                | u64::from(slot.index)
        };
        let plain = |kind, index| pack(kind, Slot { index, generation: 0 });
        match self {
            Self::Bell => plain(0, 0),
            Self::Listener(index) => plain(1, index),
            Self::Stream(slot) => pack(2, slot),
            Self::LinkListener(index) => plain(3, index),
            Self::Link(slot) => pack(4, slot),
            Self::LinkProcess(slot) => pack(7, slot),
            Self::Port => plain(5, 0),
            Self::CmSocket(slot) => pack(10, slot),
            Self::CmStream(slot) => pack(11, slot),
            Self::Datagrams(index) => plain(8, index),
            Self::Packets => plain(9, 0),
            Self::Attached => plain(6, 0),
        }
    }

    /// From the number that epoll carries.
    pub(crate) fn from_bits(bits: u64) -> Option<Self> {
        let index = bits as u32;
        let slot = Slot { index, generation: (bits >> GENERATION_SHIFT) as u32 & 0x00ff_ffff };
        Some(match bits >> KIND_SHIFT {
            0 => Self::Bell,
            1 => Self::Listener(index),
            2 => Self::Stream(slot),
            3 => Self::LinkListener(index),
            4 => Self::Link(slot),
            7 => Self::LinkProcess(slot),
            5 => Self::Port,
            10 => Self::CmSocket(slot),
            11 => Self::CmStream(slot),
            8 => Self::Datagrams(index),
            9 => Self::Packets,
            6 => Self::Attached,
            _ => return None,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn survives_the_way_through_epoll() {
        let slot = Slot { index: u32::MAX, generation: 0x00ab_cdef };
        for token in [
            Token::Bell,
            Token::Listener(7),
            Token::Stream(slot),
            Token::LinkListener(39),
            Token::Link(slot),
            Token::LinkProcess(slot),
            Token::Port,
            Token::CmSocket(slot),
            Token::CmStream(slot),
            Token::Datagrams(3),
            Token::Packets,
            Token::Attached,
        ] {
            assert_eq!(Token::from_bits(token.bits()), Some(token));
        }
        assert_eq!(Token::from_bits(u64::MAX), None);
    }
}
