//! The sequences and the closed rules of the tables.

use proptest::prelude::*;

use super::*;

fn table(entries: &[(u8, u8)]) -> Vec<Entry> {
    entries.iter().map(|&(lane, weight)| Entry { lane, weight }).collect()
}

/// The lanes of the next packets of `octets` each, all `lanes` being backlogged, as letters.
fn sequence(arbiter: &mut Arbiter, ready: u16, octets: u32, count: usize) -> String {
    let mut next = || {
        let pick = arbiter.next(ready).unwrap();
        arbiter.charge(pick, octets);
        char::from(b'A' + pick.lane)
    };
    (0..count).map(|_| next()).collect()
}

/// How many packets each lane sends out of so many.
fn counts(arbiter: &mut Arbiter, ready: u16, octets: u32, packets: usize) -> [u64; LANES] {
    let mut counts = [0; LANES];
    for _ in 0..packets {
        let pick = arbiter.next(ready).unwrap();
        arbiter.charge(pick, octets);
        counts[usize::from(pick.lane)] += 1;
    }
    counts
}

/// The rule of a table as a walk, step by step.
struct Walk {
    entries: Vec<(u8, i64)>,
    left: Vec<i64>,
    at: usize,
    entered: bool,
    carry: bool,
}

impl Walk {
    fn new(entries: &[(u8, u8)], carry: bool) -> Self {
        let unit = i64::from(UNIT);
        let entries: Vec<_> =
            entries.iter().map(|&(lane, weight)| (lane, i64::from(weight) * unit)).collect();
        Self { left: vec![0; entries.len()], entries, at: 0, entered: false, carry }
    }

    fn serves(&self, index: usize, ready: u16) -> bool {
        let (lane, weight) = self.entries[index];
        weight > 0 && ready & 1 << lane != 0
    }

    fn advance(&mut self) {
        if !self.carry {
            self.left[self.at] = 0;
        }
        self.entered = false;
        self.at = (self.at + 1) % self.entries.len();
    }

    fn pick(&mut self, ready: u16) -> Option<usize> {
        if !(0..self.entries.len()).any(|index| self.serves(index, ready)) {
            self.left.fill(0);
            self.advance();
            return None;
        }
        loop {
            if !self.serves(self.at, ready) {
                self.left[self.at] = 0;
            } else {
                if !std::mem::replace(&mut self.entered, true) {
                    self.left[self.at] += self.entries[self.at].1;
                }
                if self.left[self.at] > 0 {
                    return Some(self.at);
                }
            }
            self.advance();
        }
    }
}

fn low_only(entries: &[(u8, u8)], carry: bool) -> Arbiter {
    Arbiter::new(&[], &table(entries), 0, carry)
}

#[test]
fn sequences_of_one_table() {
    let check = |entries: &[(u8, u8)], units: u32, strict: &str, carry: &str| {
        let ready = entries.iter().fold(0, |mask, &(lane, _)| mask | 1 << lane);
        for (mode, expected) in [(false, strict), (true, carry)] {
            let mut arbiter = low_only(entries, mode);
            let sent = sequence(&mut arbiter, ready, units * UNIT, expected.len());
            assert_eq!(sent, expected, "{entries:?} of {units} units, carry {mode}");
        }
    };
    check(&[(0, 66), (1, 33)], 33, "AABAABAAB", "AABAABAAB");
    check(&[(0, 128), (1, 1)], 33, "AAAABAAAAB", "AAAABAAAAA");
    check(&[(0, 4), (1, 1)], 33, "ABABAB", "ABAAAABAAAAB");
    check(&[(0, 100), (1, 50)], 33, "AAAABBAAAABB", "AAAABBAAABBAAABAAABB");
    check(&[(0, 3), (1, 2), (0, 3), (2, 1)], 5, "ABACABACABAC", "ABACAABAAABACAABAAABACAA");
}

#[test]
fn in_the_long_run_carried_weight_gives_its_ratio() {
    let mut arbiter = low_only(&[(0, 128), (1, 1)], true);
    // The first of the lane with weight 1 comes early.
    let first = counts(&mut arbiter, 3, 33 * UNIT, 5);
    assert_eq!(first[1], 1);
    let counts = counts(&mut arbiter, 3, 33 * UNIT, 129 * 1000);
    assert!((999..=1001).contains(&counts[1]), "{counts:?}");
}

#[test]
fn sequences_of_a_high_limit() {
    let check = |limit: u8, octets: u32, expected: &str| {
        for carry in [false, true] {
            let (high, low) = (table(&[(0, 255)]), table(&[(1, 255)]));
            let mut arbiter = Arbiter::new(&high, &low, limit, carry);
            let twice = expected.repeat(2);
            let sent = sequence(&mut arbiter, 3, octets, twice.len());
            assert_eq!(sent.replace('A', "H").replace('B', "L"), twice, "limit {limit}");
        }
    };
    for (limit, expected) in [(0, "HL"), (1, "HHL"), (2, "HHHHL"), (3, "HHHHHHL")] {
        check(limit, 2074, expected);
    }
    for (limit, expected) in [(0, "HL"), (1, "HL"), (2, "HHL"), (3, "HHHL")] {
        check(limit, 4122, expected);
    }
}

const MTUS: [u32; 5] = [256, 512, 1024, 2048, 4096];
const WEIGHTS: [u8; 9] = [1, 2, 4, 8, 16, 32, 64, 128, 255];

#[test]
fn ratios_without_carry_are_those_of_the_closed_rule() {
    let rows = [
        [1, 1, 1, 2, 4, 7, 13, 26, 51],
        [1, 1, 1, 1, 2, 4, 8, 15, 29],
        [1, 1, 1, 1, 1, 2, 4, 8, 15],
        [1, 1, 1, 1, 1, 1, 2, 4, 8],
        [1, 1, 1, 1, 1, 1, 1, 2, 4],
    ];
    for (mtu, row) in MTUS.into_iter().zip(rows) {
        for (weight, ratio) in WEIGHTS.into_iter().zip(row) {
            let mut arbiter = low_only(&[(0, weight), (1, 1)], false);
            let counts = counts(&mut arbiter, 3, mtu + crate::PACKET_OVERHEAD, (ratio + 1) * 40);
            assert_eq!(counts[0], ratio as u64 * counts[1], "MTU {mtu}, weight {weight}");
        }
    }
}

#[test]
fn ratios_with_carry_are_those_of_the_weights() {
    for mtu in MTUS {
        for weight in WEIGHTS {
            let mut arbiter = low_only(&[(0, weight), (1, 1)], true);
            // Every lane's turn comes once in as many packets as there are units in one.
            let counts = counts(&mut arbiter, 3, mtu + crate::PACKET_OVERHEAD, 60_000);
            let ratio = counts[0] as f64 / counts[1] as f64;
            let error = (ratio / f64::from(weight) - 1.0).abs();
            assert!(error < 0.01, "MTU {mtu}, weight {weight}: {ratio}");
        }
    }
}

#[test]
fn high_limits_give_the_closed_rule() {
    let limits = [0, 1, 2, 4, 8, 16, 64, 254];
    let rows = [
        [1, 15, 30, 59, 117, 233, 930, 3690],
        [1, 8, 16, 31, 61, 122, 488, 1934],
        [1, 4, 8, 16, 32, 63, 250, 991],
        [1, 2, 4, 8, 16, 32, 127, 502],
        [1, 1, 2, 4, 8, 16, 64, 253],
    ];
    for (mtu, row) in MTUS.into_iter().zip(rows) {
        for (limit, expected) in limits.into_iter().zip(row) {
            // Two lanes share the high table, 2:1.
            let (high, low) = (table(&[(0, 128), (2, 64)]), table(&[(1, 1)]));
            let mut arbiter = Arbiter::new(&high, &low, limit, true);
            let packet = mtu + crate::PACKET_OVERHEAD;
            let counts = counts(&mut arbiter, 7, packet, (expected + 1) * 60);
            assert_eq!(counts[0] + counts[2], expected as u64 * counts[1], "{mtu}, {limit}");
            if expected * 60 > 1000 {
                let ratio = counts[0] as f64 / counts[2] as f64;
                assert!((ratio - 2.0).abs() < 0.12, "MTU {mtu}, limit {limit}: {ratio}");
            }
        }
        let (high, low) = (table(&[(0, 4)]), table(&[(1, 255)]));
        let mut arbiter = Arbiter::new(&high, &low, NO_LIMIT, true);
        assert_eq!(counts(&mut arbiter, 3, mtu, 10_000)[1], 0, "no limit");
    }
}

#[test]
fn low_goes_at_once_when_high_has_nothing() {
    let mut arbiter = Arbiter::new(&table(&[(0, 255)]), &table(&[(1, 1)]), 255, true);
    assert_eq!(arbiter.next(0b10), Some(Pick { lane: 1, priority: Priority::Low }));
    assert_eq!(arbiter.next(0b11), Some(Pick { lane: 0, priority: Priority::High }));
    assert_eq!(arbiter.next(0), None);
    assert_eq!(arbiter.next(1 << 14), None, "no entry serves it");
}

#[test]
fn an_idle_lane_saves_nothing() {
    let mut arbiter = low_only(&[(0, 255), (1, 255)], true);
    for _ in 0..1000 {
        let pick = arbiter.next(1).unwrap();
        arbiter.charge(pick, 4122);
    }
    let sent = sequence(&mut arbiter, 3, 4122, 40);
    let ones = sent.chars().filter(|&lane| lane == 'B').count();
    assert!((16..=24).contains(&ones), "{sent}");
}

#[test]
fn a_debt_that_is_given_back_costs_no_weight() {
    let mut table = Table::new(&table(&[(0, 1), (1, 1)]), true);
    for (lane, units) in [(0, 1), (1, 10), (0, 1), (0, 1), (0, 1)] {
        assert_eq!(table.pick(3), Some(lane));
        table.charge(usize::from(lane), units * i64::from(UNIT));
    }
    table.charge(1, -9 * i64::from(UNIT));
    let mut words = Vec::new();
    table.save(&mut |word| words.push(word));
    // The pointer has passed the second entry twice since it sent.
    assert_eq!(words[2], 2 * u64::from(UNIT));
}

#[test]
fn a_large_debt_is_paid_at_once() {
    let mut arbiter = low_only(&[(0, 1), (1, 1)], true);
    for ready in [1, 2] {
        let pick = arbiter.next(ready).unwrap();
        arbiter.charge(pick, 1 << 30);
    }
    assert!(arbiter.next(3).is_some());
}

proptest! {
    /// Whatever the tables, the sizes and the lanes that come and go: only ready lanes are picked, one is
    /// picked if a table serves any, and a saved state goes on in the same way.
    #[test]
    fn picks_are_ready_and_states_can_be_saved(
        high in prop::collection::vec((0u8..15, any::<u8>()), 0..8),
        low in prop::collection::vec((0u8..15, any::<u8>()), 0..8),
        limit: u8,
        carry: bool,
        steps in prop::collection::vec((0u16..1 << 15, 1u32..70_000), 1..200),
    ) {
        let mut arbiter = Arbiter::new(&table(&high), &table(&low), limit, carry);
        let served = arbiter.served();
        for (ready, octets) in steps {
            let mut words = Vec::new();
            arbiter.save(|word| words.push(word));
            let mut other = Arbiter::new(&table(&high), &table(&low), limit, carry);
            let mut read = words.into_iter();
            other.load(|| read.next().unwrap());
            let pick = arbiter.next(ready);
            prop_assert_eq!(pick, other.next(ready));
            prop_assert_eq!(pick.is_some(), ready & served != 0);
            if let Some(pick) = pick {
                prop_assert!(ready & 1 << pick.lane != 0);
                arbiter.charge(pick, octets);
            }
        }
    }

    /// A table picks the entries that the walk picks, also where lanes come and go, packets are charged
    /// later, and the state is saved.
    #[test]
    fn a_table_picks_as_the_walk_does(
        entries in prop::collection::vec((0u8..5, 0u8..20), 1..9),
        carry: bool,
        steps in prop::collection::vec(
            (0u16..32, 1i64..5000, 0u8..9, -9000i64..9000, 0u8..12),
            1..300,
        ),
    ) {
        let mut walk = Walk::new(&entries, carry);
        let mut table = Table::new(&table(&entries), carry);
        for (lanes, octets, corrected, by, what) in steps {
            // Mostly backlogged.
            let ready = if what < 9 { 31 } else { lanes };
            let pick = walk.pick(ready);
            let lane = pick.map(|index| entries[index].0);
            prop_assert_eq!(table.pick(ready), lane);
            if let Some(index) = pick {
                prop_assert_eq!(usize::from(table.at()), index);
                walk.left[index] -= octets;
                table.charge(index, octets);
            }
            let index = usize::from(corrected);
            if what % 3 == 0 && index < entries.len() && entries[index].1 > 0 {
                walk.left[index] -= by;
                table.charge(index, by);
            }
            if what % 4 == 0 {
                let mut words = Vec::new();
                table.save(&mut |word| words.push(word));
                let left = words[1..].iter().map(|&word| word as i64);
                prop_assert_eq!(left.collect::<Vec<_>>(), walk.left.clone());
                let mut words = words.into_iter();
                table.load(&mut || words.next().unwrap());
            }
        }
    }

    /// With carry, backlogged lanes of one table share octets as their weights say, whatever the sizes of
    /// packets.
    #[test]
    fn shares_follow_weights(
        weights in prop::collection::vec(1u8..=255, 2..6),
        sizes in prop::collection::vec(1u32..5000, 2..6),
    ) {
        let entries: Vec<_> = (0u8..).zip(weights.iter().copied()).collect();
        let mut arbiter = low_only(&entries, true);
        let ready = (1 << weights.len()) - 1;
        let mut octets = vec![0u64; weights.len()];
        for _ in 0..40_000 {
            let pick = arbiter.next(ready).unwrap();
            let size = sizes[usize::from(pick.lane) % sizes.len()].div_ceil(UNIT) * UNIT;
            arbiter.charge(pick, size);
            octets[usize::from(pick.lane)] += u64::from(size);
        }
        let all: u64 = weights.iter().map(|&weight| u64::from(weight)).sum();
        let total: u64 = octets.iter().sum();
        for (&weight, &octets) in weights.iter().zip(&octets) {
            let due = total as f64 * f64::from(weight) / all as f64;
            // A packet and a turn may be under way.
            prop_assert!((octets as f64 - due).abs() < 22_000.0 + 0.01 * due, "{octets} of {due}");
        }
    }
}
