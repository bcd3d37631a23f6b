//! Buffers that the kernel copies to and from at full speed.

use std::ops::{Deref, DerefMut, Range};

const PAGE: usize = 4096;
/// Where a buffer begins in its page. The kernel copies with the processor's string instruction, which on AMD
/// processors (measured on Zen 3) takes fifteen times as long where the target is 1 to 31 bytes further into
/// its page than the source. The kernel's own buffers mostly begin with their pages, or behind headers or a
/// few short messages: half a page is far from all of these, in both directions.
const PHASE: usize = PAGE / 2;

/// Bytes for system calls. It does not grow.
pub(crate) struct Buffer {
    memory: Box<[u8]>,
    /// The part of it that is used.
    range: Range<usize>,
}

impl Buffer {
    /// `len` zeros.
    pub(crate) fn new(len: usize) -> Self {
        let memory = vec![0; len + PAGE].into_boxed_slice();
        let start = PHASE.wrapping_sub(memory.as_ptr().addr()) % PAGE;
        Self { memory, range: start..start + len }
    }
}

/// A copy of a few bytes, wherever there is room for them.
impl From<&[u8]> for Buffer {
    fn from(bytes: &[u8]) -> Self {
        Self { memory: bytes.into(), range: 0..bytes.len() }
    }
}

impl Deref for Buffer {
    type Target = [u8];

    #[inline]
    fn deref(&self) -> &[u8] {
        &self.memory[self.range.clone()]
    }
}

impl DerefMut for Buffer {
    #[inline]
    fn deref_mut(&mut self) -> &mut [u8] {
        &mut self.memory[self.range.clone()]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buffers_begin_in_the_middle_of_a_page() {
        for len in [1, PAGE, 100_000] {
            let mut buffer = Buffer::new(len);
            assert_eq!((buffer.len(), buffer.as_ptr().addr() % PAGE), (len, PHASE));
            assert!(buffer.iter().all(|byte| *byte == 0));
            buffer.fill(7);
            assert!(buffer.iter().all(|byte| *byte == 7));
        }
        assert_eq!(*Buffer::from(&[1, 2, 3][..]), [1, 2, 3]);
    }
}
