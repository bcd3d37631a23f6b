//! Memory for frames, at a place from which the kernel copies fast.

use std::ops::{Deref, DerefMut};

/// Slots have a multiple of this, so that all of them begin alike.
pub(super) const STEP: usize = 512;
/// Where they begin in it.
///
/// The kernel copies frames by `rep movsb`. Processors of AMD with fast short ones (Zen 3 and 4) do that an
/// octet at a time, a hundred times slower, where the target lies up to 15 octets further in its page than
/// the source in its own. A target is the beginning of a page, for payload behind headers that the kernel was
/// told of, or some tens of octets behind the beginning of an object of 512 or more. From here the first is
/// far off with any headers (to 150 octets of them), and the second with any headroom up to 310.
const BEGIN: usize = 310;

/// Octets that begin there.
pub(super) struct Aligned {
    bytes: Box<[u8]>,
    start: usize,
}

impl Aligned {
    /// Zeroes. Their memory is the kernel's until it is used.
    pub(super) fn new(len: usize) -> Self {
        let bytes = vec![0; len + STEP].into_boxed_slice();
        let start = (bytes.as_ptr().align_offset(STEP) + BEGIN) % STEP;
        Self { bytes, start }
    }

    fn end(&self) -> usize {
        self.start + self.bytes.len() - STEP
    }
}

impl Deref for Aligned {
    type Target = [u8];

    #[inline]
    fn deref(&self) -> &[u8] {
        &self.bytes[self.start..self.end()]
    }
}

impl DerefMut for Aligned {
    #[inline]
    fn deref_mut(&mut self) -> &mut [u8] {
        let (start, end) = (self.start, self.end());
        &mut self.bytes[start..end]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_slots_begin_alike() {
        for len in [1, 66_048, 100_000] {
            let mut aligned = Aligned::new(3 * len);
            assert_eq!((aligned.len(), aligned.as_ptr().addr() % STEP), (3 * len, BEGIN));
            aligned.fill(1);
        }
    }
}
