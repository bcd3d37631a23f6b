//! What goes over the wire: the greeting in private data, immediate data, entries of the table of
//! mappings. `specs/rsocket.md` is the specification.

/// `RSK1`.
const MAGIC: u32 = 0x5253_4b31;
const VERSION: u16 = 1;

/// Where the peer may write, which each end says when it connects.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Greeting {
    /// Address and key of the ring; behind the ring, at a multiple of 32 bytes, is the table of
    /// mappings.
    pub(crate) addr: u64,
    pub(crate) rkey: u32,
    /// Bytes of the ring: 1 to [`MAX_RING`].
    pub(crate) ring: u32,
    /// Messages that may be under way at once: [`LEAST_RECEIVES`] to [`MAX_RECEIVES`].
    pub(crate) receives: u32,
    /// Entries of the table.
    pub(crate) mappings: u32,
}

/// The largest ring: counts of bytes are told modulo four times as much.
pub(crate) const MAX_RING: u32 = 1 << 28;
/// Messages that are kept for what is not data.
pub(crate) const RESERVED: u32 = 16;
/// The fewest and the most messages that may be under way.
pub(crate) const LEAST_RECEIVES: u32 = 2 * RESERVED;
pub(crate) const MAX_RECEIVES: u32 = 1 << 16;
/// The most entries of a table.
pub(crate) const MAX_MAPPINGS: u32 = 1024;

impl Greeting {
    /// Its length in bytes.
    pub(crate) const LEN: usize = 32;

    /// As private data.
    pub(crate) fn encode(&self) -> [u8; Self::LEN] {
        let mut bytes = [0; Self::LEN];
        bytes[0..4].copy_from_slice(&MAGIC.to_be_bytes());
        bytes[4..6].copy_from_slice(&VERSION.to_be_bytes());
        bytes[8..16].copy_from_slice(&self.addr.to_be_bytes());
        bytes[16..20].copy_from_slice(&self.rkey.to_be_bytes());
        bytes[20..24].copy_from_slice(&self.ring.to_be_bytes());
        bytes[24..28].copy_from_slice(&self.receives.to_be_bytes());
        bytes[28..32].copy_from_slice(&self.mappings.to_be_bytes());
        bytes
    }

    /// Reads private data, which may have padding behind it; none if it is no greeting.
    pub(crate) fn decode(bytes: &[u8]) -> Option<Self> {
        let bytes: &[u8; Self::LEN] = bytes.first_chunk()?;
        let word = |at: usize| u32::from_be_bytes([0, 1, 2, 3].map(|byte| bytes[at + byte]));
        let version = u16::from_be_bytes([bytes[4], bytes[5]]);
        let greeting = Self {
            addr: u64::from(word(8)) << 32 | u64::from(word(12)),
            rkey: word(16),
            ring: word(20),
            receives: word(24),
            mappings: word(28),
        };
        let sound = word(0) == MAGIC
            && version == VERSION
            && (1..=MAX_RING).contains(&greeting.ring)
            && (LEAST_RECEIVES..=MAX_RECEIVES).contains(&greeting.receives)
            && greeting.mappings <= MAX_MAPPINGS
            && greeting
                .addr
                .checked_add(u64::from(greeting.table()) + greeting.table_len())
                .is_some();
        sound.then_some(greeting)
    }

    /// Where the table begins, from the beginning of the ring.
    pub(crate) fn table(&self) -> u32 {
        self.ring.next_multiple_of(Mapping::LEN as u32)
    }

    /// Bytes of the table.
    pub(crate) fn table_len(&self) -> u64 {
        u64::from(self.mappings) * Mapping::LEN as u64
    }
}

/// What a message says by its immediate data: two bits of kind, 30 of value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Message {
    /// So many bytes lie in the ring, behind those before.
    Data(u32),
    /// So many bytes were taken out of the ring in all, modulo 2^30.
    BytesTaken(u32),
    /// So many messages were received in all, modulo 2^30.
    MessagesTaken(u32),
    /// No data will follow.
    End,
}

const VALUE: u32 = (1 << 30) - 1;

impl Message {
    pub(crate) fn encode(self) -> u32 {
        match self {
            Self::Data(length) => length & VALUE,
            Self::BytesTaken(count) => 1 << 30 | count & VALUE,
            Self::MessagesTaken(count) => 2 << 30 | count & VALUE,
            Self::End => 3 << 30,
        }
    }

    pub(crate) fn decode(immediate: u32) -> Self {
        let value = immediate & VALUE;
        match immediate >> 30 {
            0 => Self::Data(value),
            1 => Self::BytesTaken(value),
            2 => Self::MessagesTaken(value),
            _ => Self::End,
        }
    }
}

/// How far a count, told modulo 2^30, is ahead of the one that is known.
pub(crate) fn ahead(told: u32, known: u64) -> u64 {
    u64::from(told.wrapping_sub(known as u32) & VALUE)
}

/// An entry of the table of mappings: memory of the peer that `riowrite` reaches.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Mapping {
    pub(crate) offset: u64,
    pub(crate) addr: u64,
    /// 0: an empty entry.
    pub(crate) length: u64,
    pub(crate) rkey: u32,
}

impl Mapping {
    /// Its length in bytes.
    pub(crate) const LEN: usize = 32;

    pub(crate) fn encode(&self) -> [u8; Self::LEN] {
        let mut bytes = [0; Self::LEN];
        bytes[0..8].copy_from_slice(&self.offset.to_be_bytes());
        bytes[8..16].copy_from_slice(&self.addr.to_be_bytes());
        bytes[16..24].copy_from_slice(&self.length.to_be_bytes());
        bytes[24..28].copy_from_slice(&self.rkey.to_be_bytes());
        bytes
    }

    pub(crate) fn decode(bytes: &[u8; Self::LEN]) -> Self {
        let long = |at: usize| u64::from_be_bytes([0, 1, 2, 3, 4, 5, 6, 7].map(|i| bytes[at + i]));
        let rkey = u32::from_be_bytes([24, 25, 26, 27].map(|i| bytes[i]));
        Self { offset: long(0), addr: long(8), length: long(16), rkey }
    }

    /// Where a write of `length` bytes at `offset` goes, and how much of it the entry has room for.
    pub(crate) fn reach(&self, offset: u64, length: u64) -> Option<(u64, u64)> {
        let within = offset.checked_sub(self.offset).filter(|within| *within < self.length)?;
        Some((self.addr.wrapping_add(within), length.min(self.length - within)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GREETING: Greeting = Greeting {
        addr: 0x0102_0304_0506_0708,
        rkey: 0x1122_3344,
        ring: 1000,
        receives: 384,
        mappings: 2,
    };

    #[test]
    fn a_greeting_is_read_as_it_was_written() {
        let bytes = GREETING.encode();
        // As specs/rsocket.md shows it.
        assert_eq!(
            bytes.map(|byte| format!("{byte:02x}")).concat(),
            "52534b3100010000010203040506070811223344000003e80000018000000002"
        );
        let padded = [&bytes[..], &[0; 24]].concat();
        assert_eq!(Greeting::decode(&padded), Some(GREETING));
        assert_eq!((GREETING.table(), GREETING.table_len()), (1024, 64));
    }

    #[test]
    fn what_is_no_greeting_is_refused() {
        assert_eq!(Greeting::decode(&GREETING.encode()[..31]), None);
        for wrong in [
            Greeting { ring: 0, ..GREETING },
            Greeting { ring: MAX_RING + 1, ..GREETING },
            Greeting { receives: LEAST_RECEIVES - 1, ..GREETING },
            Greeting { receives: MAX_RECEIVES + 1, ..GREETING },
            Greeting { mappings: MAX_MAPPINGS + 1, ..GREETING },
            Greeting { addr: u64::MAX - 1000, ..GREETING },
        ] {
            assert_eq!(Greeting::decode(&wrong.encode()), None, "{wrong:?}");
        }
        for at in [0, 5] {
            let mut bytes = GREETING.encode();
            bytes[at] ^= 4;
            assert_eq!(Greeting::decode(&bytes), None);
        }
    }

    #[test]
    fn immediate_data_are_read_as_they_were_written() {
        for message in
            [Message::Data(5), Message::BytesTaken(VALUE), Message::MessagesTaken(0), Message::End]
        {
            assert_eq!(Message::decode(message.encode()), message);
        }
        assert_eq!(Message::decode(u32::MAX), Message::End);
    }

    #[test]
    fn counts_are_compared_across_their_wrap() {
        assert_eq!(ahead(3, (1 << 30) - 2), 5);
        assert_eq!(ahead(7, 7), 0);
        assert_eq!(ahead(6, 7), u64::from(VALUE));
    }

    #[test]
    fn a_mapping_is_written_into_within_its_bounds() {
        let mapping = Mapping { offset: 100, addr: 4096, length: 50, rkey: 9 };
        assert_eq!(Mapping::decode(&mapping.encode()), mapping);
        assert_eq!(mapping.reach(100, 50), Some((4096, 50)));
        assert_eq!(mapping.reach(149, 50), Some((4145, 1)));
        assert_eq!(mapping.reach(150, 1), None);
        assert_eq!(mapping.reach(99, 1), None);
        assert_eq!(Mapping::default().reach(0, 1), None);
    }
}
