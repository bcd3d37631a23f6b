//! A cache with real tags: sets, ways and least-recently-used replacement.

/// No line.
const EMPTY: u64 = u64::MAX;
const DIRTY: u64 = 1;
/// The line was put there by a device.
const IO: u64 = 2;
const FLAGS: u32 = 2;

/// A line that had to leave.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Victim {
    /// Its number: the address divided by the size of a line.
    pub(crate) line: u64,
    /// It has to be written back.
    pub(crate) dirty: bool,
}

/// Tags of a cache. It holds no data.
#[derive(Clone, Debug)]
pub(crate) struct Cache {
    /// The entries of each set, the most recently used first.
    entries: Vec<u64>,
    sets: u64,
    ways: usize,
    /// Most entries of a set that devices may fill.
    io_ways: usize,
}

impl Cache {
    /// An empty cache of `lines` lines; `io_ways` 0 lets devices fill all ways.
    pub(crate) fn new(lines: u64, ways: u32, io_ways: u32) -> Self {
        let ways = ways.max(1);
        let sets = (lines / u64::from(ways)).max(1);
        let io_ways = if io_ways == 0 { ways } else { io_ways } as usize;
        let ways = ways as usize;
        Self { entries: vec![EMPTY; sets as usize * ways], sets, ways, io_ways }
    }

    fn set(&mut self, line: u64) -> &mut [u64] {
        let set =
            if self.sets.is_power_of_two() { line & (self.sets - 1) } else { line % self.sets }
                as usize;
        &mut self.entries[set * self.ways..][..self.ways]
    }

    fn position(set: &[u64], line: u64) -> Option<usize> {
        set.iter().position(|entry| *entry != EMPTY && *entry >> FLAGS == line)
    }

    /// Whether `line` is here; if so, it becomes the most recently used, and dirty by a `write`.
    pub(crate) fn access(&mut self, line: u64, write: bool) -> bool {
        let set = self.set(line);
        let Some(at) = Self::position(set, line) else { return false };
        set[..=at].rotate_right(1);
        set[0] |= u64::from(write) * DIRTY;
        true
    }

    /// Whether `line` is here; changes nothing.
    pub(crate) fn has(&mut self, line: u64) -> bool {
        Self::position(self.set(line), line).is_some()
    }

    /// Puts a line that is not here in the place of another.
    pub(crate) fn insert(&mut self, line: u64, dirty: bool, io: bool) -> Option<Victim> {
        let (ways, io_ways) = (self.ways, self.io_ways);
        let set = self.set(line);
        let is_io = |entry: &u64| *entry != EMPTY && *entry & IO != 0;
        let full = io && set.iter().filter(|entry| is_io(entry)).count() >= io_ways;
        let free = set.iter().position(|entry| *entry == EMPTY);
        let at = match free {
            Some(at) if !full => at,
            _ if full => set.iter().rposition(is_io).unwrap_or(ways - 1),
            _ => ways - 1,
        };
        let out = set[at];
        set[..=at].rotate_right(1);
        set[0] = (line << FLAGS) | if dirty { DIRTY } else { 0 } | if io { IO } else { 0 };
        (out != EMPTY).then_some(Victim { line: out >> FLAGS, dirty: out & DIRTY != 0 })
    }

    /// Removes a line; whether it was dirty, if it was here.
    pub(crate) fn remove(&mut self, line: u64) -> Option<bool> {
        let set = self.set(line);
        let at = Self::position(set, line)?;
        let dirty = set[at] & DIRTY != 0;
        set[at] = EMPTY;
        set[at..].rotate_left(1);
        Some(dirty)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_least_recently_used_line_leaves() {
        let mut cache = Cache::new(4, 4, 0);
        for line in 0..4 {
            assert_eq!(cache.insert(line, line == 1, false), None);
        }
        assert!(cache.access(0, false));
        assert_eq!(cache.insert(9, false, false), Some(Victim { line: 1, dirty: true }));
        assert!(cache.has(0) && !cache.has(1));
        assert!(cache.access(2, true));
        assert_eq!(cache.remove(2), Some(true));
        assert_eq!(cache.remove(2), None);
        assert_eq!(cache.insert(10, false, false), None, "there is room again");
    }

    #[test]
    fn lines_meet_only_in_their_set() {
        let mut cache = Cache::new(6, 2, 0);
        for line in 0..6 {
            assert_eq!(cache.insert(line, false, false), None, "three sets of two ways");
        }
        assert_eq!(cache.insert(6, false, false), Some(Victim { line: 0, dirty: false }));
    }

    #[test]
    fn devices_keep_to_their_ways() {
        let mut cache = Cache::new(8, 8, 2);
        for line in 0..6 {
            cache.insert(line, false, false);
        }
        assert_eq!(cache.insert(100, true, true), None);
        assert_eq!(cache.insert(101, true, true), None);
        assert_eq!(cache.insert(102, true, true), Some(Victim { line: 100, dirty: true }));
        assert!((0..6).all(|line| cache.has(line)));
    }
}
