//! Inputs by chance, and by change of others.

/// Longest input.
pub(crate) const MAX_LEN: usize = 4096;
/// Values at which arithmetic goes wrong.
const EDGES: [u8; 10] = [0, 1, 2, 3, 4, 0x40, 0x7f, 0x80, 0xfe, 0xff];

/// SplitMix64.
pub(crate) struct Random(pub(crate) u64);

impl Random {
    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    pub(crate) fn below(&mut self, limit: usize) -> usize {
        (self.next() % limit.max(1) as u64) as usize
    }

    fn byte(&mut self) -> u8 {
        match self.below(3) {
            0 => EDGES[self.below(EDGES.len())],
            _ => self.next() as u8,
        }
    }

    /// An input out of nothing, or a changed one of `pool`.
    pub(crate) fn input(&mut self, pool: &[Vec<u8>]) -> Vec<u8> {
        let mut input = match self.below(4) {
            0 => Vec::new(),
            _ if pool.is_empty() => Vec::new(),
            _ => pool[self.below(pool.len())].clone(),
        };
        if input.is_empty() {
            let limit = [16, 64, 256, MAX_LEN][self.below(4)];
            let len = self.below(limit);
            input.extend((0..len).map(|_| self.byte()));
        }
        for _ in 0..self.below(6) {
            self.vary(&mut input, pool);
        }
        input.truncate(MAX_LEN);
        input
    }

    /// Changes an input a little.
    pub(crate) fn vary(&mut self, input: &mut Vec<u8>, pool: &[Vec<u8>]) {
        let at = self.below(input.len());
        match self.below(7) {
            0 => input.truncate(at),
            1 => input.insert(at, self.byte()),
            2 if !input.is_empty() => input[at] ^= 1 << self.below(8),
            3 if !input.is_empty() => input[at] = self.byte(),
            4 if !input.is_empty() => drop(input.remove(at)),
            5 if !pool.is_empty() => {
                let other = &pool[self.below(pool.len())];
                let from = self.below(other.len());
                input.truncate(at);
                input.extend_from_slice(&other[from..]);
            }
            6 if !input.is_empty() => {
                // A part of it, somewhere else once more.
                let len = 1 + self.below((input.len() - at).min(64));
                let part = input[at..(at + len).min(input.len())].to_vec();
                let to = self.below(input.len() + 1);
                input.splice(to..to, part);
            }
            _ => input.push(self.byte()),
        }
    }
}
