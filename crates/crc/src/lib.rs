//! CRC32C, the checksum of MPA (RFC 5044 4.4), which takes it over from iSCSI (RFC 3720 B.4).
//!
//! It is computed by the crate `crc-fast`, but for long inputs on x86-64 processors that multiply 256 bits
//! without carries and have no AVX-512: there `wide` is nearly twice as fast, which counts, as the checksum
//! is the dearest part of a large message.

#[cfg(target_arch = "x86_64")]
mod wide;

/// From this length on the wide way is the faster one.
#[cfg(target_arch = "x86_64")]
const LONG: usize = 1024;

/// The CRC32C of `bytes`.
#[inline]
#[must_use]
pub fn crc32c(bytes: &[u8]) -> u32 {
    #[cfg(target_arch = "x86_64")]
    if bytes.len() >= LONG
        && !wide::is_needless()
        && let Some(crc) = wide::crc32c(bytes)
    {
        return crc;
    }
    crc_fast::crc32_iscsi(bytes)
}

/// A CRC32C of bytes that come in pieces.
#[derive(Debug)]
pub struct Digest(crc_fast::Digest);

impl Digest {
    /// Of no bytes yet.
    #[must_use]
    pub fn new() -> Self {
        Self(crc_fast::Digest::new(crc_fast::CrcAlgorithm::Crc32Iscsi))
    }

    /// Takes the next bytes.
    pub fn update(&mut self, bytes: &[u8]) {
        self.0.update(bytes);
    }

    /// The CRC of all bytes taken.
    #[must_use]
    pub fn finish(&self) -> u32 {
        self.0.finalize() as u32
    }
}

impl Default for Digest {
    fn default() -> Self {
        Self::new()
    }
}

#[cfg(test)]
mod digest_tests {
    use super::{Digest, crc32c};

    #[test]
    fn pieces_give_the_same_as_the_whole() {
        let bytes: Vec<u8> = (0..5000_u32).map(|at| ((at * 7) >> 3) as u8).collect();
        for cut in [0, 1, 3, 64, 999, 1024, 4096, 5000] {
            let mut digest = Digest::new();
            digest.update(&bytes[..cut]);
            digest.update(&bytes[cut..]);
            assert_eq!(digest.finish(), crc32c(&bytes), "cut at {cut}");
        }
    }
}
