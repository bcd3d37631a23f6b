//! Maps from the adapter's handles: numbers that it made itself, so no peer can choose them to
//! collide, and a multiplication is hash enough.

use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};

/// A map whose keys are handles.
pub(crate) type HandleMap<K, V> = HashMap<K, V, BuildHasherDefault<HandleHasher>>;

/// Spreads the bits of the numbers that it is given.
#[derive(Clone, Copy, Default)]
pub(crate) struct HandleHasher(u64);

impl Hasher for HandleHasher {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        bytes.iter().for_each(|&byte| self.write_u64(byte.into()));
    }

    #[inline]
    fn write_u64(&mut self, value: u64) {
        // 2^64 divided by the golden ratio: neighbouring handles end up far apart.
        self.0 = (self.0.rotate_left(5) ^ value).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        self.0 ^= self.0 >> 32;
    }

    #[inline]
    fn write_isize(&mut self, value: isize) {
        self.write_u64(value as u64);
    }
}
