//! Big-endian fields at fixed offsets. Callers have checked the length first.

use crate::WireError;

pub(crate) fn need(bytes: &[u8], need: usize) -> Result<(), WireError> {
    if bytes.len() < need {
        return Err(WireError::Truncated { need, have: bytes.len() });
    }
    Ok(())
}

pub(crate) fn exactly(bytes: &[u8], need: usize) -> Result<(), WireError> {
    if bytes.len() != need {
        return Err(WireError::BadLength { need, have: bytes.len() });
    }
    Ok(())
}

#[inline]
pub(crate) fn array<const N: usize>(bytes: &[u8], at: usize) -> [u8; N] {
    // Not `copy_from_slice`: that is a call of `memcpy` for two octets, where it is not inlined.
    *bytes[at..].first_chunk().expect("the length was checked")
}

#[inline]
pub(crate) fn u16_at(bytes: &[u8], at: usize) -> u16 {
    u16::from_be_bytes(array(bytes, at))
}

#[inline]
pub(crate) fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from_be_bytes(array(bytes, at))
}

#[inline]
pub(crate) fn u64_at(bytes: &[u8], at: usize) -> u64 {
    u64::from_be_bytes(array(bytes, at))
}

#[inline]
pub(crate) fn put<const N: usize>(out: &mut [u8], at: usize, field: [u8; N]) {
    *out[at..].first_chunk_mut().expect("the length was checked") = field;
}
