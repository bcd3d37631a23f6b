//! Entries by the round in which they may send again.

/// Rounds that the wheel has a place for.
const ROUNDS: u64 = 64;

/// Entries that wait for a later round, as bit masks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Wheel {
    /// The entries of each of the next rounds, by the last bits of its number.
    places: [u64; ROUNDS as usize],
    /// The places that are not empty.
    occupied: u64,
    /// Entries of rounds that are further away.
    far: u64,
}

/// The place of a round.
fn place(round: u64) -> usize {
    (round % ROUNDS) as usize
}

impl Wheel {
    pub(super) fn new() -> Self {
        Self { places: [0; ROUNDS as usize], occupied: 0, far: 0 }
    }

    /// Has an entry wait in round `round` until a later one.
    pub(super) fn add(&mut self, index: usize, round: u64, due: u64) {
        if due - round < ROUNDS {
            self.places[place(due)] |= 1 << index;
            self.occupied |= 1 << place(due);
        } else {
            self.far |= 1 << index;
        }
    }

    /// Removes an entry that waits until round `due`, if it does.
    pub(super) fn remove(&mut self, index: usize, due: u64) {
        self.far &= !(1 << index);
        let entries = &mut self.places[place(due)];
        *entries &= !(1 << index);
        if *entries == 0 {
            self.occupied &= !(1 << place(due));
        }
    }

    /// The first round after `round` until which one of these entries waits, all of which wait.
    pub(super) fn first(&self, round: u64, ready: u64, due: impl Fn(usize) -> u64) -> Option<u64> {
        let mut ahead = self.occupied.rotate_right(place(round + 1) as u32);
        while ahead != 0 {
            let next = round + 1 + u64::from(ahead.trailing_zeros());
            if self.places[place(next)] & ready != 0 {
                return Some(next);
            }
            ahead &= ahead - 1;
        }
        super::table::bits(self.far & ready).map(due).min()
    }

    /// Goes from one round to a later one. The entries that have waited for it, or for one between them.
    pub(super) fn advance(&mut self, round: u64, next: u64, due: impl Fn(usize) -> u64) -> u64 {
        let mut paid = 0;
        let mut ahead = self.occupied.rotate_right(place(round + 1) as u32);
        while ahead != 0 {
            let at = round + 1 + u64::from(ahead.trailing_zeros());
            if at > next {
                break;
            }
            paid |= std::mem::take(&mut self.places[place(at)]);
            self.occupied &= !(1 << place(at));
            ahead &= ahead - 1;
        }
        for index in super::table::bits(std::mem::take(&mut self.far)) {
            match due(index) {
                due if due <= next => paid |= 1 << index,
                due => self.add(index, next, due),
            }
        }
        paid
    }

    /// Removes all entries.
    pub(super) fn clear(&mut self) {
        for index in super::table::bits(self.occupied) {
            self.places[index] = 0;
        }
        (self.occupied, self.far) = (0, 0);
    }
}
