//! Keys: the 32-bit names under which memory is accessed.

use core::fmt;

/// An lkey or rkey (iWARP: STag).
///
/// The upper 24 bits name a slot of the table, the lower 8 are a tag: random for a region, the
/// consumer's own for a type 2 window. A region's lkey and rkey are the same number, as iWARP's
/// STags are; a window's key works only as an rkey. Zero is never a valid key.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Default)]
#[repr(transparent)]
pub struct Key(pub u32);

impl Key {
    /// The key that is never handed out.
    pub const NONE: Key = Key(0);

    /// The upper 24 bits, which identify the region or window.
    #[inline]
    pub const fn index(self) -> u32 {
        self.0 >> 8
    }

    /// The lower 8 bits.
    #[inline]
    pub const fn tag(self) -> u8 {
        self.0 as u8
    }

    /// The same index with another tag.
    #[inline]
    pub const fn with_tag(self, tag: u8) -> Key {
        Key((self.0 & !0xff) | tag as u32)
    }

    /// The same index with the next tag, wrapping around: what `ibv_inc_rkey` computes.
    #[inline]
    pub const fn next_tag(self) -> Key {
        self.with_tag(self.tag().wrapping_add(1))
    }
}

impl From<u32> for Key {
    fn from(raw: u32) -> Key {
        Key(raw)
    }
}

impl From<Key> for u32 {
    fn from(key: Key) -> u32 {
        key.0
    }
}

impl fmt::Debug for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Key({:#010x})", self.0)
    }
}

impl fmt::Display for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:#010x}", self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn next_tag_wraps_within_the_low_byte() {
        assert_eq!(Key(0x1234_56ff).next_tag(), Key(0x1234_5600));
        assert_eq!(Key(0x1234_5600).next_tag(), Key(0x1234_5601));
        assert_eq!(Key(0x1234_5678).index(), 0x12_3456);
    }
}
