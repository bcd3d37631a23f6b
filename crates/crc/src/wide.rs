//! CRC32C with 256-bit carry-less multiplication (VPCLMULQDQ) and, in turns, the CRC32 instruction, which
//! other units of the processor execute. The turns are long: to switch between the two costs time. (On Zen 3:
//! 34 us a megabyte, either alone 41, in turns of single instructions 72.) The method is that of "Fast CRC
//! Computation for Generic Polynomials Using PCLMULQDQ Instruction" (Intel, 2009): what 16 bytes contribute to
//! the remainder is moved behind the bytes that follow, by two multiplications with constants.
//!
//! A polynomial is kept with its highest coefficient in the lowest bit, as the CRC32 instruction has it.

// Iterators over several slices are not always inlined (not without link-time optimization), and what is
// not inlined into code for these instructions makes it three times as slow.
#![allow(clippy::needless_range_loop)]

use core::arch::x86_64::{
    __m128i, __m256i, _mm_clmulepi64_si128, _mm_crc32_u8, _mm_crc32_u64, _mm_cvtsi32_si128,
    _mm_cvtsi64_si128, _mm_cvtsi128_si64, _mm_extract_epi64, _mm_set_epi64x, _mm_xor_si128,
    _mm256_broadcastsi128_si256, _mm256_clmulepi64_epi128, _mm256_extracti128_si256,
    _mm256_loadu_si256, _mm256_setzero_si256, _mm256_xor_si256, _mm256_zextsi128_si256,
};

/// Bytes that are multiplied in one step: eight registers full.
const FOLDED: usize = 256;
/// Bytes of each of three streams that the CRC32 instruction takes meanwhile.
const STREAMED: usize = 64;
/// Bytes of one step.
const STEP: usize = FOLDED + 3 * STREAMED;
/// Steps of a large block. What a block costs in addition to its steps is spread over them.
const MANY: usize = 8;

/// x^32 + ... + 1 without its highest coefficient (RFC 3385).
const POLYNOMIAL: u32 = 0x82f6_3b78;

/// x^`n` modulo the polynomial.
const fn power(n: usize) -> u32 {
    let (mut remainder, mut i) = (1 << 31, 0);
    while i < n {
        remainder = (remainder >> 1) ^ (POLYNOMIAL & 0u32.wrapping_sub(remainder & 1));
        i += 1;
    }
    remainder
}

/// What moves 16 bytes behind the next `distance` bytes, itself counted: factors for the first 8 bytes and
/// for the last. The product of two kept polynomials is one bit short, hence the shift.
const fn fold_by(distance: usize) -> [u64; 2] {
    [(power(distance * 8 + 32) as u64) << 1, (power(distance * 8 - 32) as u64) << 1]
}

/// What moves a remainder behind `distance` bytes, before the CRC32 instruction makes a remainder of the
/// product again, by which it moves it by 32 bits, and the product of two kept polynomials by one.
const fn shift_by(distance: usize) -> u64 {
    power(distance * 8 - 33) as u64
}

/// Whether another way is as fast on this processor: that of AVX-512.
#[inline]
pub(crate) fn is_needless() -> bool {
    is_x86_feature_detected!("avx512vl")
}

/// The CRC32C of `bytes`; `None` if the processor lacks what it takes.
#[inline]
pub(crate) fn crc32c(bytes: &[u8]) -> Option<u32> {
    let is_able = is_x86_feature_detected!("vpclmulqdq")
        && is_x86_feature_detected!("avx2")
        && is_x86_feature_detected!("pclmulqdq")
        && is_x86_feature_detected!("sse4.2");
    // SAFETY: the processor has all that the function is compiled for.
    is_able.then(|| unsafe { compute(bytes) })
}

/// The remainder of what came so far.
struct State {
    /// That of the bytes that were multiplied, each register behind those before it, up to the step before.
    folded: [__m256i; 8],
    /// Of the other bytes: to be added to the four bytes that follow.
    pending: u32,
    /// Factors to bring `folded` to the next step.
    jump: __m256i,
    /// The factor to bring it to the end of the block, once it is 32 bits.
    behind: u64,
}

#[target_feature(enable = "avx2,pclmulqdq,sse4.2,vpclmulqdq")]
fn compute(bytes: &[u8]) -> u32 {
    let zero = _mm256_setzero_si256();
    let mut state = State { folded: [zero; 8], pending: !0, jump: zero, behind: 0 };
    let rest = blocks::<MANY>(&mut state, bytes);
    let rest = blocks::<1>(&mut state, rest);
    let mut crc = u64::from(shift(reduce(&state.folded), state.behind) ^ state.pending);
    let (words, rest) = rest.as_chunks();
    for word in words {
        crc = _mm_crc32_u64(crc, u64::from_le_bytes(*word));
    }
    let mut crc = crc as u32;
    for byte in rest {
        crc = _mm_crc32_u8(crc, *byte);
    }
    !crc
}

/// Takes blocks of `STEPS` steps from the front of `bytes`; what is left. The bytes to be multiplied come
/// first in a block, then those of the three streams.
#[target_feature(enable = "avx2,pclmulqdq,sse4.2,vpclmulqdq")]
fn blocks<'a, const STEPS: usize>(state: &mut State, bytes: &'a [u8]) -> &'a [u8] {
    let near = both(const { fold_by(FOLDED) });
    let mut folded = state.folded;
    let mut blocks = bytes.chunks_exact(STEPS * STEP);
    for block in &mut blocks {
        let (pieces, streams) = block.split_at(STEPS * FOLDED);
        let (first, streams) = streams.split_at(STEPS * STREAMED);
        let (second, third) = streams.split_at(STEPS * STREAMED);
        let pieces = pieces.as_chunks::<FOLDED>().0;
        let streams = [first.as_chunks().0, second.as_chunks().0, third.as_chunks().0];
        let (mut crcs, mut factors) = ([0; 3], state.jump);
        let mut pending = _mm256_zextsi128_si256(_mm_cvtsi32_si128(state.pending as i32));
        for i in 0..STEPS {
            step(&mut folded, &pieces[i], factors);
            folded[0] = _mm256_xor_si256(folded[0], pending);
            stream(&mut crcs, &streams[0][i], &streams[1][i], &streams[2][i]);
            (pending, factors) = (_mm256_setzero_si256(), near);
        }
        let [first, second, third] = [crcs[0] as u32, crcs[1] as u32, crcs[2] as u32];
        state.pending = shift(first, const { shift_by(2 * STEPS * STREAMED) })
            ^ shift(second, const { shift_by(STEPS * STREAMED) })
            ^ third;
        state.jump = both(const { fold_by(FOLDED + 3 * STEPS * STREAMED) });
        state.behind = const { shift_by(3 * STEPS * STREAMED) };
    }
    state.folded = folded;
    blocks.remainder()
}

/// Moves what was multiplied behind the bytes before `piece`, and adds those.
#[inline]
#[target_feature(enable = "avx2,vpclmulqdq")]
fn step(folded: &mut [__m256i; 8], piece: &[u8; FOLDED], factors: __m256i) {
    let pieces = piece.as_chunks::<32>().0;
    for i in 0..folded.len() {
        // SAFETY: reads the 32 bytes of the array.
        let bytes = unsafe { _mm256_loadu_si256(pieces[i].as_ptr().cast()) };
        folded[i] = _mm256_xor_si256(fold(folded[i], factors), bytes);
    }
}

/// Continues the three streams.
#[inline]
#[target_feature(enable = "sse4.2")]
fn stream(
    crcs: &mut [u64; 3],
    first: &[u8; STREAMED],
    second: &[u8; STREAMED],
    third: &[u8; STREAMED],
) {
    let (first, second) = (first.as_chunks::<8>().0, second.as_chunks::<8>().0);
    let third = third.as_chunks::<8>().0;
    for i in 0..STREAMED / 8 {
        crcs[0] = _mm_crc32_u64(crcs[0], u64::from_le_bytes(first[i]));
        crcs[1] = _mm_crc32_u64(crcs[1], u64::from_le_bytes(second[i]));
        crcs[2] = _mm_crc32_u64(crcs[2], u64::from_le_bytes(third[i]));
    }
}

/// The same factors for both halves.
#[inline]
#[target_feature(enable = "avx2")]
fn both([first, last]: [u64; 2]) -> __m256i {
    _mm256_broadcastsi128_si256(_mm_set_epi64x(last as i64, first as i64))
}

#[inline]
#[target_feature(enable = "avx2,vpclmulqdq")]
fn fold(folded: __m256i, factors: __m256i) -> __m256i {
    let first = _mm256_clmulepi64_epi128::<0x00>(folded, factors);
    _mm256_xor_si256(first, _mm256_clmulepi64_epi128::<0x11>(folded, factors))
}

/// The remainder of eight registers, the first of which stands before the others.
#[target_feature(enable = "avx2,pclmulqdq,sse4.2,vpclmulqdq")]
fn reduce(folded: &[__m256i; 8]) -> u32 {
    let [a, b, c, d, e, f, g, h] = *folded;
    let add = |one, other| _mm256_xor_si256(one, other);
    let by = both(const { fold_by(128) });
    let (a, b) = (add(fold(a, by), e), add(fold(b, by), f));
    let (c, d) = (add(fold(c, by), g), add(fold(d, by), h));
    let by = both(const { fold_by(64) });
    let (a, b) = (add(fold(a, by), c), add(fold(b, by), d));
    let a = add(fold(a, both(const { fold_by(32) })), b);
    let (low, high) = (_mm256_extracti128_si256::<0>(a), _mm256_extracti128_si256::<1>(a));
    let [first, last] = const { fold_by(16) };
    let by = _mm_set_epi64x(last as i64, first as i64);
    let low =
        _mm_xor_si128(_mm_clmulepi64_si128::<0x00>(low, by), _mm_clmulepi64_si128::<0x11>(low, by));
    let [first, last] = words(_mm_xor_si128(low, high));
    _mm_crc32_u64(_mm_crc32_u64(0, first), last) as u32
}

#[inline]
#[target_feature(enable = "sse4.2")]
fn words(value: __m128i) -> [u64; 2] {
    [_mm_cvtsi128_si64(value) as u64, _mm_extract_epi64::<1>(value) as u64]
}

/// Moves a remainder behind as many bytes as `factor` was made for.
#[inline]
#[target_feature(enable = "pclmulqdq,sse4.2")]
fn shift(remainder: u32, factor: u64) -> u32 {
    let remainder = _mm_cvtsi32_si128(remainder as i32);
    let product = _mm_clmulepi64_si128::<0x00>(remainder, _mm_cvtsi64_si128(factor as i64));
    _mm_crc32_u64(0, _mm_cvtsi128_si64(product) as u64) as u32
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Here also where AVX-512 makes this way needless, and below the length from which it is taken.
    #[test]
    fn it_is_the_checksum_of_any_length() {
        let bytes: Vec<u8> = (0..20_000u32).map(|i| (i.wrapping_mul(40_503) >> 7) as u8).collect();
        for len in (0..3 * MANY * STEP).step_by(5).chain([bytes.len()]) {
            let Some(crc) = crc32c(&bytes[..len]) else { return };
            assert_eq!(crc, crc_fast::crc32_iscsi(&bytes[..len]), "{len}");
        }
    }
}
