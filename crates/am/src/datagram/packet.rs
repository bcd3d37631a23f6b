//! Datagrams as bytes: a head, and a fragment of a message or what a connection begins with.

/// Bytes of the head of every datagram.
pub(super) const HEAD: usize = 36;
/// Bytes between the head and the payload of a fragment.
const FRAGMENT: usize = 28;
/// Bytes of a datagram that are not payload.
pub const OVERHEAD: usize = HEAD + FRAGMENT;
const MAGIC: u16 = 0x7541;

/// What a datagram is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(super) enum Kind {
    /// Asks for a connection; a `Hello` follows.
    Hello = 1,
    /// Accepts one; a `Welcome` follows.
    Welcome = 2,
    /// Refuses one; a status follows.
    Refused = 3,
    /// A fragment of a message.
    Data = 4,
    /// Acknowledges, and nothing else.
    Ack = 5,
    /// Acknowledges, and asks for an acknowledgement.
    Ping = 6,
    /// The connection is gone.
    Reset = 7,
    /// Answers a `Hello` without a valid cookie; the sender's number is the cookie.
    Challenge = 8,
    /// Asks a UDP socket which queue pair the endpoint at its address has.
    Where = 9,
    /// Answers that; the endpoint's name follows.
    Here = 10,
}

impl Kind {
    fn from_byte(byte: u8) -> Option<Self> {
        let all = [
            Self::Hello,
            Self::Welcome,
            Self::Refused,
            Self::Data,
            Self::Ack,
            Self::Ping,
            Self::Reset,
            Self::Challenge,
            Self::Where,
            Self::Here,
        ];
        all.into_iter().find(|kind| *kind as u8 == byte)
    }
}

/// The head of a datagram.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Head {
    pub(super) kind: Kind,
    /// The number of a fragment.
    pub(super) seq: u32,
    /// The receiver's number of the connection; in a `Hello` the cookie of the receiver, 0 at first.
    pub(super) to: u64,
    /// The sender's.
    pub(super) from: u64,
    /// All fragments with lower numbers have come.
    pub(super) ack: u32,
    /// Bit i: the fragment with the number ack + 1 + i has come.
    pub(super) later: u64,
}

impl Head {
    pub(super) fn encode(&self, out: &mut [u8]) {
        out[..2].copy_from_slice(&MAGIC.to_le_bytes());
        (out[2], out[3]) = (self.kind as u8, 0);
        out[4..8].copy_from_slice(&self.seq.to_le_bytes());
        out[8..16].copy_from_slice(&self.to.to_le_bytes());
        out[16..24].copy_from_slice(&self.from.to_le_bytes());
        out[24..28].copy_from_slice(&self.ack.to_le_bytes());
        out[28..HEAD].copy_from_slice(&self.later.to_le_bytes());
    }

    /// Reads what [`encode`](Self::encode) wrote, and the rest of the datagram.
    pub(super) fn parse(bytes: &[u8]) -> Option<(Self, &[u8])> {
        let (head, rest) = bytes.split_first_chunk::<HEAD>()?;
        if (u16::from_le_bytes([head[0], head[1]]), head[3]) != (MAGIC, 0) {
            return None;
        }
        let kind = Kind::from_byte(head[2])?;
        let (seq, to, from) = (u32_at(head, 4)?, u64_at(head, 8)?, u64_at(head, 16)?);
        let (ack, later) = (u32_at(head, 24)?, u64_at(head, 28)?);
        Some((Self { kind, seq, to, from, ack, later }, rest))
    }
}

fn u32_at(bytes: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_le_bytes(*bytes.get(at..)?.first_chunk()?))
}

fn u64_at(bytes: &[u8], at: usize) -> Option<u64> {
    Some(u64::from_le_bytes(*bytes.get(at..)?.first_chunk()?))
}

/// What a message does at its receiver.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(super) enum What {
    /// Goes into a receive slot.
    Send = 1,
    /// Is written into registered memory.
    Write = 2,
    /// Asks for registered memory.
    Read = 3,
    /// Answers that.
    Answer = 4,
}

/// A piece of a message: its payload follows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Fragment {
    pub(super) what: What,
    /// Bytes of the whole message; of a read, those that are wanted.
    pub(super) len: u32,
    /// Where in the message the payload begins.
    pub(super) offset: u32,
    /// Writes and reads: the memory of the receiver.
    pub(super) addr: u64,
    pub(super) key: u32,
    /// Reads and answers: which read it is.
    pub(super) read: u32,
}

impl Fragment {
    pub(super) fn encode(&self, out: &mut [u8]) {
        out[..4].copy_from_slice(&u32::from(self.what as u8).to_le_bytes());
        out[4..8].copy_from_slice(&self.len.to_le_bytes());
        out[8..12].copy_from_slice(&self.offset.to_le_bytes());
        out[12..20].copy_from_slice(&self.addr.to_le_bytes());
        out[20..24].copy_from_slice(&self.key.to_le_bytes());
        out[24..FRAGMENT].copy_from_slice(&self.read.to_le_bytes());
    }

    /// Reads what [`encode`](Self::encode) wrote, and the payload.
    pub(super) fn parse(bytes: &[u8]) -> Option<(Self, &[u8])> {
        let (fixed, payload) = bytes.split_first_chunk::<FRAGMENT>()?;
        let all = [What::Send, What::Write, What::Read, What::Answer];
        let what = u32_at(fixed, 0)?;
        let what = all.into_iter().find(|known| u32::from(*known as u8) == what)?;
        let (len, offset, addr) = (u32_at(fixed, 4)?, u32_at(fixed, 8)?, u64_at(fixed, 12)?);
        let (key, read) = (u32_at(fixed, 20)?, u32_at(fixed, 24)?);
        Some((Self { what, len, offset, addr, key, read }, payload))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn heads_and_fragments_are_read_as_written(
            kind in 1u8..=10,
            what in 0usize..4,
            words in any::<[u32; 6]>(),
            longs in any::<[u64; 4]>(),
        ) {
            let [seq, ack, len, offset, key, read] = words;
            let [to, from, later, addr] = longs;
            let kind = Kind::from_byte(kind).unwrap();
            let head = Head { kind, seq, to, from, ack, later };
            let what = [What::Send, What::Write, What::Read, What::Answer][what];
            let fragment = Fragment { what, len, offset, addr, key, read };
            let mut bytes = [0xee; OVERHEAD + 3];
            head.encode(&mut bytes);
            fragment.encode(&mut bytes[HEAD..]);
            let (read_head, rest) = Head::parse(&bytes).unwrap();
            prop_assert_eq!((read_head, rest.len()), (head, bytes.len() - HEAD));
            prop_assert_eq!(Fragment::parse(rest), Some((fragment, &[0xee; 3][..])));
            prop_assert!(Head::parse(&bytes[..HEAD - 1]).is_none());
        }

        #[test]
        fn no_bytes_make_them_panic(bytes in prop::collection::vec(any::<u8>(), 0..100)) {
            if let Some((_, rest)) = Head::parse(&bytes) {
                prop_assert!(rest.len() < bytes.len());
            }
            let _ = Fragment::parse(&bytes);
        }
    }
}
