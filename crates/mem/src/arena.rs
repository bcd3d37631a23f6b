//! Blocks of one size out of a sparse segment.

use thiserror::Error;

use crate::segment::Segment;

/// Why an arena did not do what it was asked.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum ArenaError {
    /// All blocks are in use.
    #[error("the arena is full")]
    Full,
    /// The index names no block that is in use.
    #[error("the block is not in use")]
    NotAllocated,
}

/// A block of an arena.
#[derive(Clone, Debug)]
pub struct Block {
    /// Names the block when it is freed.
    pub index: u32,
    /// Where it starts in the arena's segment, in bytes: the same for every process.
    pub offset: usize,
    /// The block itself.
    pub segment: Segment,
    /// It was never used before, so it is as zero as the segment was. Otherwise it holds the bytes
    /// of its last user: zero it (or give its pages back) before another peer may see it.
    pub fresh: bool,
}

/// Hands out blocks of one size. Its books are in private memory, where peers that map the segment
/// cannot harm them; blocks that were never used are never touched.
#[derive(Debug)]
pub struct Arena {
    segment: Segment,
    block_len: usize,
    blocks: u32,
    /// Blocks below this index have been used.
    touched: u32,
    free: Vec<u32>,
    in_use: Vec<bool>,
}

impl Arena {
    /// Cuts a segment into blocks of `block_len` bytes (not zero). For rings it should be a multiple
    /// of the page size.
    pub fn new(segment: Segment, block_len: usize) -> Arena {
        assert!(block_len > 0, "a block has bytes");
        let blocks = u32::try_from(segment.len() / block_len).unwrap_or(u32::MAX);
        Arena { segment, block_len, blocks, touched: 0, free: Vec::new(), in_use: Vec::new() }
    }

    /// The blocks, in use or not.
    pub fn capacity(&self) -> usize {
        self.blocks as usize
    }

    /// The blocks in use.
    pub fn in_use(&self) -> usize {
        self.touched as usize - self.free.len()
    }

    /// Takes a block: the one freed last, else one that was never used.
    pub fn allocate(&mut self) -> Result<Block, ArenaError> {
        let (index, fresh) = match self.free.pop() {
            Some(index) => (index, false),
            None if self.touched < self.blocks => {
                self.touched += 1;
                self.in_use.push(false);
                (self.touched - 1, true)
            }
            None => return Err(ArenaError::Full),
        };
        self.in_use[index as usize] = true;
        let offset = index as usize * self.block_len;
        let segment =
            self.segment.slice(offset, self.block_len).expect("blocks lie within the segment");
        Ok(Block { index, offset, segment, fresh })
    }

    /// Gives a block back.
    pub fn free(&mut self, index: u32) -> Result<(), ArenaError> {
        match self.in_use.get_mut(index as usize) {
            Some(used) if *used => *used = false,
            _ => return Err(ArenaError::NotAllocated),
        }
        self.free.push(index);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_are_distinct_reused_and_never_freed_twice() {
        let mut arena = Arena::new(Segment::heap(3 * 4096 + 100), 4096);
        assert_eq!(arena.capacity(), 3);
        let blocks: Vec<_> = (0..3).map(|_| arena.allocate().unwrap()).collect();
        assert_eq!(blocks.iter().map(|b| b.offset).collect::<Vec<_>>(), [0, 4096, 8192]);
        assert!(blocks.iter().all(|b| b.fresh));
        assert_eq!(arena.allocate().err(), Some(ArenaError::Full));
        assert_eq!(arena.free(1), Ok(()));
        assert_eq!(arena.free(1), Err(ArenaError::NotAllocated));
        assert_eq!(arena.free(7), Err(ArenaError::NotAllocated));
        assert_eq!(arena.in_use(), 2);
        let again = arena.allocate().unwrap();
        assert!(again.index == 1 && !again.fresh);
    }
}
