//! How large sends go: through buffers, or by advertised memory. Which one is faster depends on the machine,
//! on how the peer waits and on what else runs, so both are tried and measured.
//!
//! On one host buffers may be mapped by both processes, so that they cost three fast copies by two
//! processors. Advertised memory costs one copy by the kernel, and a message in each direction during which
//! neither end does anything else.

/// How the payload of a send goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Way {
    /// The peer reads advertised memory.
    Advertised = 0,
    /// Through buffers.
    Buffered = 1,
}

impl Way {
    fn other(self) -> Self {
        match self {
            Self::Advertised => Self::Buffered,
            Self::Buffered => Self::Advertised,
        }
    }
}

/// Bytes of a round that are not measured: as many as the buffers of both ends hold. Otherwise a round would
/// be charged for what the round before has left there.
const UNMEASURED: u64 = 3 << 20;
/// Bytes of a round that are measured, and sends.
const MEASURED: u64 = 8 << 20;
const LEAST_SENDS: u32 = 4;
/// Between two sends, in ns: after a longer time the round begins anew, because the program did something
/// else meanwhile.
const LONGEST_PAUSE: u64 = 100_000_000;
/// Rounds of the faster way before the other one is tried again: at first, and after it has been slower many
/// times.
const FIRST_ROUNDS: u32 = 8;
const MOST_ROUNDS: u32 = 128;

/// What was measured of the large sends of a connection, and how the next one goes.
#[derive(Clone, Copy, Debug)]
pub struct Choice {
    way: Way,
    /// Nanoseconds for each MB by each way; 0: not known.
    pace: [u64; 2],
    /// Bytes of this round so far.
    sent: u64,
    /// When the measured part of the round began, its bytes, and its sends.
    since: Option<u64>,
    measured: u64,
    sends: u32,
    /// When the send before began.
    last: u64,
    /// Rounds before the other way is tried, now and after the next time.
    left: u32,
    rounds: u32,
}

impl Default for Choice {
    fn default() -> Self {
        Self {
            way: Way::Advertised,
            pace: [0; 2],
            sent: 0,
            since: None,
            measured: 0,
            sends: 0,
            last: 0,
            left: FIRST_ROUNDS,
            rounds: FIRST_ROUNDS,
        }
    }
}

impl Choice {
    /// A large send of `len` bytes begins at `now`, in ns: how it goes.
    pub fn next(&mut self, now: u64, len: u64) -> Way {
        if now.saturating_sub(self.last) > LONGEST_PAUSE {
            self.begin_round(self.way);
        }
        self.last = now;
        if let Some(since) = self.since
            && self.measured >= MEASURED
            && self.sends >= LEAST_SENDS
        {
            self.finish_round(now.saturating_sub(since));
        }
        if self.since.is_none() && self.sent >= UNMEASURED {
            self.since = Some(now);
        }
        if self.since.is_some() {
            self.measured = self.measured.saturating_add(len);
            self.sends = self.sends.saturating_add(1);
        }
        self.sent = self.sent.saturating_add(len);
        self.way
    }

    fn begin_round(&mut self, way: Way) {
        self.way = way;
        (self.sent, self.since, self.measured, self.sends) = (0, None, 0, 0);
    }

    fn finish_round(&mut self, elapsed: u64) {
        let before = self.faster();
        let pace = u128::from(elapsed) * (1 << 20) / u128::from(self.measured.max(1));
        let pace = u64::try_from(pace).unwrap_or(u64::MAX).max(1);
        let known = &mut self.pace[self.way as usize];
        // One round is often late, because a processor did something else.
        *known = if *known == 0 { pace } else { *known / 2 + pace / 2 };
        let faster = self.faster();
        if faster != before {
            self.rounds = FIRST_ROUNDS;
        } else if self.way != faster {
            self.rounds = (self.rounds * 2).min(MOST_ROUNDS);
        }
        if self.way != faster || faster != before {
            self.left = self.rounds;
        }
        let is_time = self.left == 0 || self.pace[faster.other() as usize] == 0;
        self.left = if is_time { self.rounds } else { self.left - 1 };
        self.begin_round(if is_time { faster.other() } else { faster });
    }

    /// The way that has been faster so far.
    fn faster(&self) -> Way {
        match self.pace {
            [0, 0] | [_, 0] => Way::Advertised,
            [0, _] => Way::Buffered,
            [advertised, buffered] if buffered < advertised => Way::Buffered,
            _ => Way::Advertised,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MESSAGE: u64 = 512 << 10;

    /// Sends so many messages, each of which takes a time that depends on its way. How many were advertised.
    fn send(choice: &mut Choice, now: &mut u64, count: u32, time: [u64; 2]) -> u32 {
        let mut advertised = 0;
        for _ in 0..count {
            let way = choice.next(*now, MESSAGE);
            advertised += u32::from(way == Way::Advertised);
            *now += time[way as usize];
        }
        advertised
    }

    #[test]
    fn the_faster_way_is_used_and_the_other_one_is_tried_now_and_then() {
        let mut now = 1;
        let mut choice = Choice::default();
        let advertised = send(&mut choice, &mut now, 20_000, [400_000, 130_000]);
        assert!((20..800).contains(&advertised), "{advertised}");
        let mut choice = Choice::default();
        let advertised = send(&mut choice, &mut now, 20_000, [60_000, 130_000]);
        assert!((19_200..19_980).contains(&advertised), "{advertised}");
    }

    #[test]
    fn it_follows_a_change() {
        let (mut choice, mut now) = (Choice::default(), 1);
        send(&mut choice, &mut now, 50_000, [400_000, 130_000]);
        send(&mut choice, &mut now, 10_000, [60_000, 130_000]);
        let advertised = send(&mut choice, &mut now, 10_000, [60_000, 130_000]);
        assert!(advertised > 9_000, "{advertised}");
        send(&mut choice, &mut now, 10_000, [400_000, 130_000]);
        let advertised = send(&mut choice, &mut now, 10_000, [400_000, 130_000]);
        assert!(advertised < 1_000, "{advertised}");
    }

    #[test]
    fn what_the_round_before_left_in_buffers_is_not_charged() {
        // Buffers take 2 MB at once, and both ways move 4 GB/s.
        let (mut choice, mut now, mut full) = (Choice::default(), 1, 0);
        let mut turns = 0;
        let mut last = Way::Advertised;
        for _ in 0..4000 {
            let way = choice.next(now, MESSAGE);
            turns += u32::from(way != last);
            last = way;
            if way == Way::Buffered && full < 4 {
                full += 1;
                now += 10_000;
            } else {
                now += if way == Way::Advertised { 130_000 * (1 + full) } else { 130_000 };
                full = if way == Way::Advertised { 0 } else { full };
            }
        }
        let [advertised, buffered] = choice.pace;
        assert!(advertised.abs_diff(buffered) <= advertised / 50, "{:?}", choice.pace);
        assert!(turns > 2, "{turns}");
    }

    #[test]
    fn pauses_and_odd_clocks_measure_nothing() {
        let mut choice = Choice::default();
        for now in (0..1000).map(|at| at * 200_000_000) {
            assert_eq!(choice.next(now, MESSAGE), Way::Advertised);
        }
        for now in [u64::MAX, 0, 5, u64::MAX, 1] {
            choice.next(now, u64::MAX);
        }
    }
}
