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
