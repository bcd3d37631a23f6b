//! The checksum against its definition, bit by bit.

use proptest::prelude::*;
use quipu_crc::crc32c;

/// By definition (RFC 3720 B.4 has the examples): the remainder of the bits, lowest first, modulo the
/// polynomial.
fn by_definition(bytes: &[u8]) -> u32 {
    let mut remainder = !0u32;
    for byte in bytes {
        remainder ^= u32::from(*byte);
        for _ in 0..8 {
            let carry = remainder & 1 != 0;
            remainder = (remainder >> 1) ^ if carry { 0x82f6_3b78 } else { 0 };
        }
    }
    !remainder
}

fn pattern(len: usize) -> Vec<u8> {
    (0..len as u32).map(|i| (i.wrapping_mul(2_654_435_761) >> 23) as u8).collect()
}

#[test]
fn the_examples_of_the_rfc() {
    let ascending: Vec<u8> = (0..32).collect();
    let descending: Vec<u8> = (0..32).rev().collect();
    assert_eq!(crc32c(&[0; 32]), 0x8a91_36aa);
    assert_eq!(crc32c(&[0xff; 32]), 0x62a8_ab43);
    assert_eq!(crc32c(&ascending), 0x46dd_794e);
    assert_eq!(crc32c(&descending), 0x113f_db5c);
}

/// Every way through blocks of both sizes and what is left of them: none, some, and many.
#[test]
fn every_length_around_the_sizes_of_blocks() {
    let bytes = pattern(70_000);
    let (step, block) = (448, 8 * 448);
    let edges = [1024, 3 * step, 7 * step, block, block + step, 2 * block, 16 * block];
    for edge in edges {
        for len in edge - 10..edge + 10 {
            assert_eq!(crc32c(&bytes[..len]), by_definition(&bytes[..len]), "{len}");
        }
    }
    for len in 0..600 {
        assert_eq!(crc32c(&bytes[len..2 * len]), by_definition(&bytes[len..2 * len]), "{len}");
    }
}

/// Every bit counts, wherever it stands.
#[test]
fn a_bit_that_flips_changes_it_as_it_should() {
    let mut bytes = pattern(4 * 448 + 8 * 448 + 13);
    for at in (0..bytes.len()).step_by(7) {
        bytes[at] ^= 1 << (at % 8);
        assert_eq!(crc32c(&bytes), by_definition(&bytes), "{at}");
    }
}

proptest! {
    #[test]
    fn any_bytes_at_any_alignment(
        bytes in proptest::collection::vec(any::<u8>(), 0..12_000),
        start in 0usize..64,
    ) {
        let bytes = &bytes[start.min(bytes.len())..];
        prop_assert_eq!(crc32c(bytes), by_definition(bytes));
    }
}
