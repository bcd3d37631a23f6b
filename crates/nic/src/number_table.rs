//! Queue pairs by number: every datagram and every hello that arrives names one.
//!
//! A number has 24 bits: a port and an index. The table has a level for each 8 of them, so that a look takes
//! three loads, however many queue pairs there are. A process uses few ports, so there are few blocks: one of
//! 2 KB for each 256 numbers in a row.

use std::ops::RangeInclusive;

use crate::slab::Key;
use crate::types::{QpId, QpNum};

/// Numbers that a block has, and blocks that a level has.
const FAN: usize = 256;
/// The greatest number.
const GREATEST: u32 = (1 << 24) - 1;

/// The queue pairs of 256 numbers in a row.
struct Block {
    /// The bits of a handle; 0: none.
    ids: [u64; FAN],
    count: u32,
}

/// The blocks of 65,536 numbers in a row.
struct Level {
    blocks: [Option<Box<Block>>; FAN],
    count: u32,
}

/// Queue pairs by number.
pub(crate) struct NumberTable {
    levels: Box<[Option<Box<Level>>; FAN]>,
}

/// The three indices of a number.
#[inline]
fn places(num: QpNum) -> (usize, usize, usize) {
    let [_, high, middle, low] = num.0.to_be_bytes();
    (high.into(), middle.into(), low.into())
}

impl NumberTable {
    pub(crate) fn new() -> Self {
        Self { levels: Box::new([const { None }; FAN]) }
    }

    /// Whether a queue pair may have this number.
    pub(crate) fn is_valid(num: QpNum) -> bool {
        num.0 <= GREATEST
    }

    /// The queue pair of a number.
    #[inline]
    pub(crate) fn get(&self, num: QpNum) -> Option<QpId> {
        let (high, middle, low) = places(num);
        let block = self.levels[high].as_ref()?.blocks[middle].as_ref()?;
        let bits = block.ids[low];
        (bits != 0 && Self::is_valid(num)).then(|| QpId::from_bits(bits))
    }

    /// Gives a number to a queue pair; the caller has checked that the number is valid and free.
    pub(crate) fn insert(&mut self, num: QpNum, id: QpId) {
        debug_assert!(Self::is_valid(num) && self.get(num).is_none());
        let (high, middle, low) = places(num);
        let level = self.levels[high]
            .get_or_insert_with(|| Box::new(Level { blocks: [const { None }; FAN], count: 0 }));
        let block = level.blocks[middle].get_or_insert_with(|| {
            level.count += 1;
            Box::new(Block { ids: [0; FAN], count: 0 })
        });
        block.count += 1;
        block.ids[low] = id.bits();
    }

    /// Takes a number from its queue pair, if one has it.
    pub(crate) fn remove(&mut self, num: QpNum) {
        if self.get(num).is_none() {
            return;
        }
        let (high, middle, low) = places(num);
        let Some(level) = &mut self.levels[high] else { return };
        let Some(block) = &mut level.blocks[middle] else { return };
        block.ids[low] = 0;
        block.count -= 1;
        if block.count > 0 {
            return;
        }
        level.blocks[middle] = None;
        level.count -= 1;
        if level.count == 0 {
            self.levels[high] = None;
        }
    }

    /// The queue pairs of a range of numbers, in the order of their numbers.
    pub(crate) fn range(&self, numbers: RangeInclusive<QpNum>) -> impl Iterator<Item = QpId> {
        let (first, last) = (numbers.start().0, numbers.end().0.min(GREATEST));
        (first >> 8..=last >> 8).flat_map(move |row| {
            let (high, middle, _) = places(QpNum(row << 8));
            let level = self.levels[high].as_ref();
            let block = level.and_then(|level| level.blocks[middle].as_ref());
            let ids = block.map_or(&[][..], |block| &block.ids[..]);
            let numbered = ids.iter().zip(row << 8..);
            let meant =
                numbered.filter(move |&(&bits, num)| bits != 0 && first <= num && num <= last);
            meant.map(|(&bits, _)| QpId::from_bits(bits))
        })
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;

    #[test]
    fn it_is_as_a_map() {
        let (mut numbers, mut map) = (NumberTable::new(), BTreeMap::new());
        let mut state = 7u64;
        for step in 1..20_000u64 {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            // Few ports, so that numbers come again.
            let num = QpNum((state >> 40) as u32 & 0x00ff_03ff);
            assert_eq!(numbers.get(num), map.get(&num).copied());
            if map.remove(&num).is_some() {
                numbers.remove(num);
                numbers.remove(num);
            } else {
                map.insert(num, QpId(step));
                numbers.insert(num, QpId(step));
            }
            if step % 256 == 0 {
                let ends = (QpNum(num.0.saturating_sub(700)), QpNum(num.0 + 300));
                let found: Vec<_> = numbers.range(ends.0..=ends.1).collect();
                let expected: Vec<_> = map.range(ends.0..=ends.1).map(|(_, id)| *id).collect();
                assert_eq!(found, expected);
            }
        }
        map.keys().for_each(|&num| numbers.remove(num));
        assert!(numbers.levels.iter().all(Option::is_none), "blocks that are empty are freed");
    }

    #[test]
    fn a_number_has_24_bits() {
        let mut numbers = NumberTable::new();
        numbers.insert(QpNum(GREATEST), QpId(1));
        assert_eq!(numbers.get(QpNum(GREATEST)), Some(QpId(1)));
        assert_eq!(numbers.get(QpNum(u32::MAX)), None);
        assert_eq!(numbers.range(QpNum(GREATEST)..=QpNum(u32::MAX)).count(), 1);
        assert!(!NumberTable::is_valid(QpNum(1 << 24)));
    }
}
