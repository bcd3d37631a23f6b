//! Frames on their way to the kernel.

use super::aligned::{Aligned, STEP};

/// A ring of slots of one size, first in, first out, with a note for each frame. It begins anew with the
/// first slot whenever it is empty, so that a link that keeps up uses the same few cache lines.
pub(super) struct Queue<N> {
    bytes: Aligned,
    notes: Box<[N]>,
    size: usize,
    /// From the beginning of one to that of the next.
    stride: usize,
    first: usize,
    count: usize,
}

impl<N: Copy + Default> Queue<N> {
    /// A queue of `slots` frames with up to `size` octets. Its memory is the kernel's until it is used.
    pub(super) fn new(slots: usize, size: usize) -> Self {
        let stride = size.next_multiple_of(STEP);
        Self {
            bytes: Aligned::new(slots * stride),
            notes: vec![N::default(); slots].into_boxed_slice(),
            size,
            stride,
            first: 0,
            count: 0,
        }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.count == 0
    }

    pub(super) fn is_full(&self) -> bool {
        self.count == self.notes.len()
    }

    pub(super) fn len(&self) -> usize {
        self.count
    }

    fn position(&self, index: usize) -> usize {
        (self.first + index) % self.notes.len()
    }

    /// The slot for the next frame, if one is free.
    pub(super) fn free(&mut self) -> Option<&mut [u8]> {
        if self.is_full() {
            return None;
        }
        let position = self.position(self.count);
        Some(&mut self.bytes[position * self.stride..][..self.size])
    }

    /// Adds the frame that was written to the free slot.
    ///
    /// # Panics
    ///
    /// If there is no free slot.
    pub(super) fn push(&mut self, note: N) {
        assert!(!self.is_full(), "a frame without a slot");
        self.notes[self.position(self.count)] = note;
        self.count += 1;
    }

    /// The frame with `index` others before it: its slot and its note.
    pub(super) fn get(&self, index: usize) -> Option<(&[u8], N)> {
        (index < self.count).then(|| {
            let position = self.position(index);
            (&self.bytes[position * self.stride..][..self.size], self.notes[position])
        })
    }

    /// Removes the first `count` frames, or as many as there are.
    pub(super) fn remove(&mut self, count: usize) {
        let count = count.min(self.count);
        self.first = self.position(count);
        self.count -= count;
        if self.count == 0 {
            self.first = 0;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn first_in_first_out_round_the_ring() {
        let mut queue = Queue::<usize>::new(3, 4);
        let mut next = 0;
        let mut expected = 0;
        for take in [2, 1, 3, 1, 2, 3] {
            while let Some(slot) = queue.free() {
                slot[0] = next as u8;
                queue.push(next);
                next += 1;
            }
            assert!(queue.is_full());
            for index in 0..take {
                let (slot, note) = queue.get(index).unwrap();
                assert_eq!((usize::from(slot[0]), note), (expected + index, expected + index));
            }
            queue.remove(take);
            expected += take;
            assert_eq!(queue.len(), 3 - take);
            assert!(queue.get(3 - take).is_none());
        }
        assert!(queue.is_empty());
        assert_eq!(queue.first, 0, "it begins anew");
    }
}
