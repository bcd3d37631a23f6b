//! Numbers of packets that are sent in parts.
//!
//! Whoever could foresee them could put parts of his own into packets of others (RFC 7739 3). One that comes
//! again while parts of the former packet are on the way puts wrong parts together (RFC 4963, RFC 6864). So
//! packets to an address are counted, and the count goes through a permutation that is the address's own and
//! that nobody knows: a number comes again only when all others have been used, and none tells the next.

use std::net::{IpAddr, SocketAddr};

use crate::tcp::hash::{Purpose, of_count_for, of_flow};
use crate::tcp::{Flow, Secret};

/// Counts; addresses share them, each with a permutation of its own.
const COUNTERS: usize = 64;
/// Rounds of the permutation. Three make it one that cannot be told from a random one, and four one whose
/// inverse cannot (Luby and Rackoff, 1988), if halves are long; those of IPv4 are short.
const ROUNDS: u64 = 6;

/// The counts.
#[derive(Clone, Debug)]
pub(super) struct Identifications {
    secret: Secret,
    counts: [u32; COUNTERS],
}

impl Identifications {
    pub(super) fn new(secret: Secret) -> Self {
        Self { secret, counts: [0; COUNTERS] }
    }

    /// The number of the next packet: of 32 bits over IPv6, of 16 over IPv4.
    pub(super) fn next(&mut self, from: IpAddr, to: IpAddr) -> u32 {
        let ends = Flow { local: SocketAddr::new(from, 0), remote: SocketAddr::new(to, 0) };
        let ends = of_flow(self.secret, Purpose::Identification, &ends, [0; 2]);
        let count = &mut self.counts[ends as usize % COUNTERS];
        *count = count.wrapping_add(1);
        let half = if to.is_ipv6() { 16 } else { 8 };
        permute(*count, half, |round, right| {
            of_count_for(self.secret, Purpose::Identification, ends, round << 32 | u64::from(right))
        })
    }
}

/// A permutation of numbers of twice `half` bits: Feistel's.
fn permute(number: u32, half: u32, of: impl Fn(u64, u32) -> u64) -> u32 {
    let mask = (1 << half) - 1;
    let (mut left, mut right) = (number >> half & mask, number & mask);
    for round in 0..ROUNDS {
        (left, right) = (right, left ^ of(round, right) as u32 & mask);
    }
    left << half | right
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(secret: Secret, to: &str, count: usize) -> Vec<u32> {
        let to: IpAddr = to.parse().unwrap();
        let from = if to.is_ipv6() { "fd00::1" } else { "10.0.0.1" }.parse().unwrap();
        let mut numbers = Identifications::new(secret);
        (0..count).map(|_| numbers.next(from, to)).collect()
    }

    #[test]
    fn each_comes_once_before_any_comes_again() {
        // RFC 6864 4.3.
        let mut seen = row(Secret([1, 2]), "10.0.0.2", 1 << 16);
        seen.sort_unstable();
        assert!(seen.iter().enumerate().all(|(n, number)| *number == n as u32));
        let mut seen = row(Secret([1, 2]), "fd00::2", 100_000);
        seen.sort_unstable();
        assert!(seen.windows(2).all(|pair| pair[0] != pair[1]));
        assert!(*seen.last().unwrap() > u32::MAX / 4 * 3, "of 32 bits");
    }

    #[test]
    fn rows_say_nothing_about_each_other() {
        // RFC 7739 3: neither the next of a row, nor what others get.
        let base = row(Secret([1, 2]), "fd00::2", 1_000);
        for other in [row(Secret([1, 2]), "fd00::3", 1_000), row(Secret([1, 3]), "fd00::2", 1_000)]
        {
            assert!(base.iter().zip(&other).all(|(a, b)| a != b));
        }
        let mut steps: Vec<u32> = base.windows(2).map(|it| it[1].wrapping_sub(it[0])).collect();
        steps.sort_unstable();
        assert!(steps.windows(2).all(|pair| pair[0] != pair[1]));
    }
}
