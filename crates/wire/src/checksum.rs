//! The checksum of the internet protocols (RFC 1071): the one's complement of a one's complement sum of
//! 16-bit words.

use std::net::IpAddr;

/// A one's complement sum of big-endian words. Sums may be taken of parts, in any order.
///
/// Only a sum of nothing but zeros is zero; a sum that cancels out is `0xffff`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Sum(u16);

impl Sum {
    /// Of one word.
    #[inline]
    pub const fn of_word(word: u16) -> Self {
        Self(word)
    }

    /// Of two words.
    #[inline]
    pub const fn of_u32(words: u32) -> Self {
        Self((words >> 16) as u16).and(Self(words as u16))
    }

    /// Of this part and another one that stands at an even offset.
    #[inline]
    pub const fn and(self, other: Self) -> Self {
        let (sum, carry) = self.0.overflowing_add(other.0);
        Self(sum + carry as u16)
    }

    /// Of the same octets at an odd offset instead of an even one (RFC 1071 2 B).
    #[inline]
    pub const fn at_odd(self) -> Self {
        Self(self.0.swap_bytes())
    }

    /// The sum itself: what a checksum field holds whose packet the link will finish.
    #[inline]
    pub const fn partial(self) -> u16 {
        self.0
    }

    /// What goes into the checksum field, if the sum is of everything else.
    #[inline]
    pub const fn checksum(self) -> u16 {
        !self.0
    }

    /// Whether a packet is intact, if the sum is of all of it, checksum included.
    #[inline]
    pub const fn is_valid(self) -> bool {
        self.0 == 0xffff
    }

    /// The pseudo-header of TCP, UDP and ICMPv6 (RFC 9293 3.1, RFC 8200 8.1) for an upper-layer packet of
    /// `len` octets. Over IPv4 and IPv6 its words have the same sum: what they order differently does not
    /// matter to it.
    pub fn of_pseudo_header(source: IpAddr, destination: IpAddr, protocol: u8, len: usize) -> Self {
        of_address(source)
            .and(of_address(destination))
            .and(Self(u16::from(protocol)))
            .and(Self::of_u32(len as u32))
    }
}

fn of_address(address: IpAddr) -> Sum {
    match address {
        IpAddr::V4(address) => Sum::of_u32(address.to_bits()),
        IpAddr::V6(address) => sum(&address.octets()),
    }
}

/// The sum of octets; behind an odd one, a zero is thought (RFC 1071 1).
///
/// It goes over every octet of payload where the link does not, so it takes words of 32 bits into lanes of
/// 64, which the compiler makes vectors of. No carry is lost below 16 GB.
#[inline]
pub fn sum(octets: &[u8]) -> Sum {
    const LANES: usize = 8;
    let (blocks, rest) = octets.as_chunks::<{ 4 * LANES }>();
    let mut lanes = [0; LANES];
    for block in blocks {
        for (lane, word) in lanes.iter_mut().zip(block.as_chunks::<4>().0) {
            *lane += u64::from(u32::from_ne_bytes(*word));
        }
    }
    let (words, last) = rest.as_chunks::<2>();
    let rest: u64 = words.iter().map(|word| u64::from(u16::from_ne_bytes(*word))).sum();
    let last = last.first().map_or(0, |last| u64::from(u16::from_ne_bytes([*last, 0])));
    // RFC 1071 2 B: the sum does not depend on the order of the octets, but for its own.
    Sum(u16::from_be(fold(lanes.iter().sum::<u64>() + rest + last)))
}

/// The carries come round until none is left (RFC 1071 2 C).
const fn fold(mut sum: u64) -> u16 {
    while sum > 0xffff {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    sum as u16
}

#[cfg(test)]
mod tests {
    use super::*;

    fn naive(octets: &[u8]) -> u16 {
        let mut sum = 0u32;
        for pair in octets.chunks(2) {
            sum += u32::from(pair[0]) << 8 | pair.get(1).map_or(0, |low| u32::from(*low));
            sum = (sum & 0xffff) + (sum >> 16);
        }
        sum as u16
    }

    #[test]
    fn the_example_of_rfc_1071() {
        // Section 3: the sum is ddf2.
        let octets = [0x00, 0x01, 0xf2, 0x03, 0xf4, 0xf5, 0xf6, 0xf7];
        assert_eq!(sum(&octets).partial(), 0xddf2);
        assert_eq!(sum(&octets).checksum(), 0x220d);
        let sealed = [&octets[..], &[0x22, 0x0d]].concat();
        assert!(sum(&sealed).is_valid());
    }

    #[test]
    fn as_a_naive_one_at_every_length_and_in_parts() {
        let octets: Vec<u8> = (0..200u32).map(|n| ((n * n * 31) >> 3) as u8 | 0x80).collect();
        for len in 0..octets.len() {
            let whole = &octets[..len];
            assert_eq!(sum(whole).partial(), naive(whole), "{len}");
            for cut in 0..=len {
                let (front, behind) = (sum(&whole[..cut]), sum(&whole[cut..]));
                let behind = if cut % 2 == 1 { behind.at_odd() } else { behind };
                assert_eq!(front.and(behind), sum(whole), "{cut} of {len}");
            }
        }
    }

    #[test]
    fn carries_are_not_lost() {
        let ones = vec![0xff; 1 << 20];
        assert_eq!(sum(&ones).partial(), 0xffff);
        assert_eq!(sum(&ones[1..]).partial(), naive(&ones[1..]));
        assert_eq!(sum(&[0; 64]).partial(), 0);
    }

    #[test]
    fn the_pseudo_header() {
        let v4 = Sum::of_pseudo_header([10, 0, 0, 1].into(), [10, 0, 0, 2].into(), 17, 9);
        assert_eq!(v4, sum(&[10, 0, 0, 1, 10, 0, 0, 2, 0, 17, 0, 9]));
        let (a, b) = ([0x20; 16], [0xfe; 16]);
        let v6 = Sum::of_pseudo_header(a.into(), b.into(), 58, 0x0001_0203);
        let tail = [0, 1, 2, 3, 0, 0, 0, 58];
        assert_eq!(v6, sum(&[&a[..], &b, &tail].concat()));
    }
}
