//! How the processes that hold the two ends of a connection agree on shared memory.
//!
//! The kernel gives each socket a cookie, and tells every process the cookie of the socket at the
//! other end of a connection on the same host. The process with the smaller cookie listens at the
//! abstract UNIX address that both derive from the pair, the other connects to it. The listener
//! sends an [`Offer`] together with a memory file; the connecting process answers with an
//! [`Answer`]. Either closes the connection on anything that it does not expect.

/// Version of the layout of the memory and of the protocol in it.
pub const VERSION: u32 = 1;
/// Octets of an offer on the UNIX connection.
pub const OFFER_LEN: usize = 40;
/// Octets of an answer.
pub const ANSWER_LEN: usize = 16;
/// Largest and smallest ring, in octets.
pub const RING_SIZES: std::ops::RangeInclusive<u32> = 4096..=1 << 24;

const MAGIC: [u8; 8] = *b"quipu-sk";
const YES: [u8; 8] = *b"accepted";

/// The cookies of the two sockets of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pair {
    /// Of this process's socket.
    pub own: u64,
    /// Of the socket at the other end.
    pub peer: u64,
}

impl Pair {
    /// Whether this process listens. None for a socket that is connected to itself.
    pub fn listens(self) -> Option<bool> {
        (self.own != self.peer).then_some(self.own < self.peer)
    }

    /// Name of the abstract UNIX address, without the zero that begins it.
    pub fn name(self) -> String {
        let (low, high) = (self.own.min(self.peer), self.own.max(self.peer));
        format!("quipu-sk-{low:x}-{high:x}")
    }
}

/// What the listening process offers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Offer {
    /// The cookies, as the listener sees them.
    pub pair: Pair,
    /// Size of each ring.
    pub ring: u32,
}

impl Offer {
    /// The octets of the message. Numbers are big-endian.
    pub fn encode(&self) -> [u8; OFFER_LEN] {
        let mut octets = [0; OFFER_LEN];
        octets[..8].copy_from_slice(&MAGIC);
        octets[8..12].copy_from_slice(&VERSION.to_be_bytes());
        octets[12..16].copy_from_slice(&self.ring.to_be_bytes());
        octets[16..24].copy_from_slice(&self.pair.own.to_be_bytes());
        octets[24..32].copy_from_slice(&self.pair.peer.to_be_bytes());
        octets
    }

    /// Reads an offer for a connection of this process. None if it is not one, is of another
    /// version or for another connection.
    pub fn decode(octets: &[u8], pair: Pair) -> Option<Self> {
        let octets: &[u8; OFFER_LEN] = octets.try_into().ok()?;
        let word =
            |at: usize| u32::from_be_bytes(octets[at..at + 4].try_into().unwrap_or_default());
        let long =
            |at: usize| u64::from_be_bytes(octets[at..at + 8].try_into().unwrap_or_default());
        let ring = word(12);
        let theirs = Pair { own: long(16), peer: long(24) };
        let is_legal = octets[..8] == MAGIC
            && word(8) == VERSION
            && octets[32..] == [0; 8]
            && theirs == Pair { own: pair.peer, peer: pair.own }
            && RING_SIZES.contains(&ring)
            && ring.is_power_of_two();
        is_legal.then_some(Self { pair: theirs, ring })
    }
}

/// What the connecting process answers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Answer;

impl Answer {
    /// The octets of the message.
    pub fn encode() -> [u8; ANSWER_LEN] {
        let mut octets = [0; ANSWER_LEN];
        octets[..8].copy_from_slice(&YES);
        octets[8..12].copy_from_slice(&VERSION.to_be_bytes());
        octets
    }

    /// Whether the octets are an answer.
    pub fn decode(octets: &[u8]) -> Option<Self> {
        (octets == Self::encode()).then_some(Self)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PAIR: Pair = Pair { own: 7, peer: 0x1_0000_0003 };

    fn swapped(pair: Pair) -> Pair {
        Pair { own: pair.peer, peer: pair.own }
    }

    #[test]
    fn both_ends_find_the_same_name_and_one_listens() {
        assert_eq!(PAIR.name(), swapped(PAIR).name());
        assert_eq!((PAIR.listens(), swapped(PAIR).listens()), (Some(true), Some(false)));
        assert_eq!(Pair { own: 7, peer: 7 }.listens(), None);
    }

    #[test]
    fn an_offer_is_read_back_and_every_other_octet_is_refused() {
        let offer = Offer { pair: PAIR, ring: 65536 };
        let octets = offer.encode();
        assert_eq!(Offer::decode(&octets, swapped(PAIR)), Some(offer));
        assert_eq!(Offer::decode(&octets, PAIR), None, "of the other end");
        assert_eq!(Offer::decode(&octets[1..], swapped(PAIR)), None);
        for at in 0..octets.len() {
            let mut damaged = octets;
            damaged[at] ^= 1;
            assert_eq!(Offer::decode(&damaged, swapped(PAIR)), None, "octet {at}");
        }
    }

    #[test]
    fn an_answer_is_read_back_and_every_other_octet_is_refused() {
        let octets = Answer::encode();
        assert_eq!(Answer::decode(&octets), Some(Answer));
        assert!(Answer::decode(&octets[1..]).is_none());
        for at in 0..octets.len() {
            let mut damaged = octets;
            damaged[at] ^= 1;
            assert_eq!(Answer::decode(&damaged), None, "octet {at}");
        }
    }
}
