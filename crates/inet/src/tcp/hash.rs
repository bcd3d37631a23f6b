//! SipHash-2-4 (Aumasson and Bernstein, 2012): the keyed pseudo-random function behind initial sequence
//! numbers, cookies and the offset of timestamps.

use std::net::{IpAddr, SocketAddr};

/// A key that nobody else knows; drawn by the host when the stack starts.
#[derive(Clone, Copy)]
pub struct Secret(pub [u64; 2]);

impl std::fmt::Debug for Secret {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Secret(..)")
    }
}

/// The two ends of a connection, as this host sees them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Flow {
    /// This end.
    pub local: SocketAddr,
    /// The peer.
    pub remote: SocketAddr,
}

/// What the hash is for: the same input must not give related numbers for two purposes.
#[derive(Clone, Copy)]
#[repr(u64)]
pub(crate) enum Purpose {
    InitialNumber = 1,
    Timestamp = 2,
    Cookie = 3,
    Port = 4,
    PortStep = 5,
    FlowLabel = 6,
    Datagram = 7,
    Refusal = 8,
    Identification = 9,
}

/// The hash of a connection's four-tuple and two more words.
pub(crate) fn of_flow(secret: Secret, purpose: Purpose, flow: &Flow, more: [u64; 2]) -> u64 {
    let ports = u64::from(flow.local.port()) << 16 | u64::from(flow.remote.port());
    let [a, b] = words(flow.local.ip());
    let [c, d] = words(flow.remote.ip());
    siphash(secret, &[purpose as u64, a, b, c, d, ports, more[0], more[1]])
}

/// One of a row of numbers that nobody can foresee.
pub(crate) fn of_count(secret: Secret, purpose: Purpose, count: u64) -> u64 {
    siphash_1_3(secret, [purpose as u64, count, 0])
}

/// The same, of one row of many.
pub(crate) fn of_count_for(secret: Secret, purpose: Purpose, row: u64, count: u64) -> u64 {
    siphash_1_3(secret, [purpose as u64, count, row])
}

fn words(ip: IpAddr) -> [u64; 2] {
    let bits = match ip {
        IpAddr::V4(ip) => ip.to_ipv6_mapped().to_bits(),
        IpAddr::V6(ip) => ip.to_bits(),
    };
    [(bits >> 64) as u64, bits as u64]
}

fn round(v: &mut [u64; 4]) {
    v[0] = v[0].wrapping_add(v[1]);
    v[1] = v[1].rotate_left(13) ^ v[0];
    v[0] = v[0].rotate_left(32);
    v[2] = v[2].wrapping_add(v[3]);
    v[3] = v[3].rotate_left(16) ^ v[2];
    v[0] = v[0].wrapping_add(v[3]);
    v[3] = v[3].rotate_left(21) ^ v[0];
    v[2] = v[2].wrapping_add(v[1]);
    v[1] = v[1].rotate_left(17) ^ v[2];
    v[2] = v[2].rotate_left(32);
}

/// SipHash-1-3 of three words, for tables: short, since it is computed for every packet.
pub(crate) fn siphash_1_3(Secret([k0, k1]): Secret, message: [u64; 3]) -> u64 {
    let mut v = initial(k0, k1);
    for word in message.iter().chain([&(24 << 56)]) {
        v[3] ^= word;
        round(&mut v);
        v[0] ^= word;
    }
    v[2] ^= 0xff;
    for _ in 0..3 {
        round(&mut v);
    }
    v[0] ^ v[1] ^ v[2] ^ v[3]
}

fn initial(k0: u64, k1: u64) -> [u64; 4] {
    [
        k0 ^ 0x736f_6d65_7073_6575,
        k1 ^ 0x646f_7261_6e64_6f6d,
        k0 ^ 0x6c79_6765_6e65_7261,
        k1 ^ 0x7465_6462_7974_6573,
    ]
}

/// SipHash-2-4 of whole words: its last word has the length in octets and no message octets.
fn siphash(Secret([k0, k1]): Secret, message: &[u64]) -> u64 {
    let mut v = initial(k0, k1);
    let length = ((message.len() * 8) as u64) << 56;
    for word in message.iter().chain([&length]) {
        v[3] ^= word;
        round(&mut v);
        round(&mut v);
        v[0] ^= word;
    }
    v[2] ^= 0xff;
    for _ in 0..4 {
        round(&mut v);
    }
    v[0] ^ v[1] ^ v[2] ^ v[3]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_vectors_of_its_authors() {
        // Key 00 01 .. 0f; messages 00 01 .. of 0 and 8 octets, from the reference vectors.
        let key = Secret([0x0706_0504_0302_0100, 0x0f0e_0d0c_0b0a_0908]);
        assert_eq!(siphash(key, &[]), 0x726f_db47_dd0e_0e31);
        assert_eq!(siphash(key, &[0x0706_0504_0302_0100]), 0x93f5_f579_9a93_2462);
    }

    #[test]
    #[expect(deprecated, reason = "the standard library's SipHash-1-3 is the reference")]
    fn the_short_one_is_that_of_the_standard_library() {
        use std::hash::{Hasher, SipHasher};
        // With a key of zero the standard library's default hasher is SipHash-1-3.
        let message = [0x0123_4567_89ab_cdef_u64, 42, u64::MAX];
        let mut theirs = std::collections::hash_map::DefaultHasher::new();
        message.iter().for_each(|word| theirs.write(&word.to_le_bytes()));
        assert_eq!(siphash_1_3(Secret([0, 0]), message), theirs.finish());
        // SipHasher, deprecated, is SipHash-2-4.
        let mut theirs = SipHasher::new_with_keys(3, 4);
        message.iter().for_each(|word| theirs.write(&word.to_le_bytes()));
        assert_eq!(siphash(Secret([3, 4]), &message), theirs.finish());
    }

    #[test]
    fn a_secret_is_not_printed() {
        assert_eq!(format!("{:?}", Secret([1, 2])), "Secret(..)");
    }
}
