//! For how long a receiver looks at rings before it sleeps in the kernel.
//!
//! And for how long a sender avoids a ring that was full.
//!
//! Looking pays while waits are short, and while another processor is free to end them. So a receiver
//! learns how long its waits are, whether it slept or not: it looks for about twice that time. It also keeps
//! an account: each look that ends in the ring saves about the time of a wake-up, each message in the ring
//! that of the system calls of TCP, and time that looking has lost is paid from what was saved. Lost are
//! looks that find nothing, and the time for which another thread had the processor: a thread that looks
//! uses up its share of a busy processor, one that sleeps does not.
//! When nothing is left, the receiver does not look for many times what was lost, and for longer each time:
//! looking costs a few percent at most.

/// Waits that are longer on average are left to the kernel.
const WORTH_NS: u64 = 500_000;
/// Where sleeping processors wake late, two ends that both sleep wait for each other's wake-ups only, and
/// would for ever. So of waits that may be such, one of so many is looked for, as long as a look can be: what
/// the other end gets sooner, it answers sooner.
const MAYBE_WAKING_NS: u64 = 1_500_000;
const TRIED: u32 = 32;
/// Shortest and longest look.
const SHORTEST_NS: u64 = 20_000;
const LONGEST_NS: u64 = 1_000_000;
/// A longer wait counts as one of this length.
const MOST_NS: u64 = 2_000_000;
/// What is expected of a receiver that has not waited yet.
const FIRST_NS: u64 = 100_000;
/// What a look that ends in the ring saves, and each message in the ring. How much of this is kept: more than
/// the time for which other threads have the processor at a time.
const SAVED_NS: u64 = 5_000;
const MAX_SAVED_NS: u64 = 40_000_000;
/// Time without a look for each nanosecond that was lost and not saved before, and its limits. It doubles
/// each time that this happens again; each look that ends in the ring takes a part from it. The longest is
/// many times as long as other threads have the processor at a time, also where a dozen of them want it.
const REST_FACTOR: u64 = 32;
const MIN_REST_NS: u64 = 500_000;
const MAX_REST_NS: u64 = 2_000_000_000;
const FORGIVEN: u64 = 32;
/// Looks in a row that TCP ended, after which rings are not looked at for a while: the sender avoids them.
/// The while doubles each time that this happens again.
const BY_TCP: u32 = 3;
const AVOIDED_NS: u64 = 4_000_000;
const MAX_AVOIDED_NS: u64 = 32_000_000;

/// What one receiver has learned. One for each thing that is waited for. All times are in nanoseconds.
#[derive(Clone, Copy, Debug)]
pub struct Patience {
    /// Length of a wait, on average.
    expected: u64,
    /// Waits so far.
    waits: u32,
    /// No look before this time.
    paused_until: u64,
    /// What looks have saved.
    saved_ns: u64,
    /// Until when looking would cost too much; 0 if it never has. The last pause for that reason, less what
    /// finds have taken from it since.
    rests_until: u64,
    rest_ns: u64,
    /// Looks in a row that TCP ended, and the last pause for that reason.
    by_tcp: u32,
    avoided_ns: u64,
}

impl Default for Patience {
    fn default() -> Self {
        Self {
            expected: FIRST_NS,
            waits: 0,
            paused_until: 0,
            saved_ns: 0,
            rests_until: 0,
            rest_ns: 0,
            by_tcp: 0,
            avoided_ns: 0,
        }
    }
}

impl Patience {
    /// For how long to look this time; 0 for not at all.
    pub fn budget_ns(&self, now: u64) -> u64 {
        if now < self.paused_until {
            return 0;
        }
        if self.expected > WORTH_NS {
            let is_tried = self.waits.is_multiple_of(TRIED) && self.expected <= MAYBE_WAKING_NS;
            return if is_tried { LONGEST_NS } else { 0 };
        }
        (self.expected * 2).clamp(SHORTEST_NS, LONGEST_NS)
    }

    /// A wait is over, which took so long. Short ones are believed sooner than long ones.
    pub fn waited(&mut self, length: u64) {
        self.waits = self.waits.wrapping_add(1);
        let length = length.min(MOST_NS);
        if length > self.expected {
            self.expected += (length - self.expected) / 8;
        } else {
            self.expected -= (self.expected - length) / 2;
        }
    }

    /// What a look has found was in a ring.
    pub fn found_in_ring(&mut self) {
        self.saved_ns = (self.saved_ns + SAVED_NS).min(MAX_SAVED_NS);
        self.rest_ns -= self.rest_ns / FORGIVEN;
        self.by_tcp = 0;
        self.avoided_ns = 0;
    }

    /// So many messages came through rings.
    pub fn came_by_ring(&mut self, messages: u64) {
        self.saved_ns =
            messages.saturating_mul(SAVED_NS).saturating_add(self.saved_ns).min(MAX_SAVED_NS);
    }

    /// What a look has found had come over TCP, although the sender could have used the ring.
    pub fn found_in_tcp(&mut self, now: u64) {
        self.by_tcp += 1;
        if self.by_tcp >= BY_TCP {
            self.by_tcp = 0;
            self.avoided_ns = (self.avoided_ns * 2).clamp(AVOIDED_NS, MAX_AVOIDED_NS);
            self.paused_until = self.paused_until.max(now + self.avoided_ns);
        }
    }

    /// A look has lost time: it has found nothing, or another thread had the processor during it.
    pub fn lost(&mut self, now: u64, time: u64) {
        let unpaid = time.saturating_sub(self.saved_ns);
        self.saved_ns = self.saved_ns.saturating_sub(time);
        if unpaid > 0 {
            let rest = unpaid.saturating_mul(REST_FACTOR).max(self.rest_ns * 2);
            self.rest_ns = rest.clamp(MIN_REST_NS, MAX_REST_NS);
            self.rests_until = now + self.rest_ns;
            self.paused_until = self.paused_until.max(self.rests_until);
        }
    }

    /// Until when the receiver leaves everything to the kernel, since looking has lost too much; 0 if it
    /// never has.
    pub fn rests_until(&self) -> u64 {
        self.rests_until
    }
}

/// Octets through the ring after which an overflow has been worth it.
const WORTH_OCTETS: u64 = 2 << 20;
/// Shortest and longest time without a ring after it was full.
const MIN_PAUSE_NS: u64 = 5_000_000;
const MAX_PAUSE_NS: u64 = 80_000_000;

/// What a sender has learned from rings that were full while the receiver did not read: their octets had
/// to be copied once more, to TCP. All times are in nanoseconds.
#[derive(Clone, Copy, Debug, Default)]
pub struct Overflow {
    pause_ns: u64,
    carried: u64,
}

impl Overflow {
    /// The ring was full, and is taken back. `carried` octets have ever gone through it. Until when the
    /// ring is not to be opened again.
    pub fn happened(&mut self, now: u64, carried: u64) -> u64 {
        let is_worth = carried.saturating_sub(self.carried) >= WORTH_OCTETS;
        let next = if is_worth { 0 } else { self.pause_ns * 2 };
        self.pause_ns = next.clamp(MIN_PAUSE_NS, MAX_PAUSE_NS);
        self.carried = carried;
        now + self.pause_ns
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_ring_that_overflows_again_and_again_is_avoided_for_longer() {
        let mut overflow = Overflow::default();
        let pauses: Vec<u64> =
            (1..8).map(|round| overflow.happened(1000, round * 262_144) - 1000).collect();
        assert!(pauses.is_sorted() && pauses[0] == MIN_PAUSE_NS, "{pauses:?}");
        assert_eq!(pauses[6], MAX_PAUSE_NS);
        assert_eq!(overflow.happened(0, 1 << 30), MIN_PAUSE_NS, "it has carried much");
    }

    #[test]
    fn short_waits_are_looked_for_and_long_ones_are_not() {
        let mut patience = Patience::default();
        (0..20).for_each(|_| patience.waited(MOST_NS * 10));
        assert_eq!(patience.budget_ns(0), 0);
        (0..4).for_each(|_| patience.waited(30_000));
        let budget = patience.budget_ns(0);
        assert!((60_000..=500_000).contains(&budget), "{budget}");
        patience.waited(MOST_NS);
        assert!(patience.budget_ns(0) > 0, "one long wait among short ones");
        (0..20).for_each(|_| patience.waited(1000));
        assert_eq!(patience.budget_ns(0), SHORTEST_NS);
    }

    /// Two ends that send one message to and fro for a second. What a sleeping end gets, it gets `waking`
    /// later. How many messages found the receiver looking.
    fn ping_pong(ends: &mut [Patience; 2], waking: u64) -> usize {
        let (mut now, mut found) = (1_000_000_000, 0);
        let mut since = [now - 2 * waking; 2];
        for round in 0.. {
            if now >= 2_000_000_000 {
                break;
            }
            let end = &mut ends[round % 2];
            let begun = since[round % 2];
            let budget = end.budget_ns(begun);
            if now <= begun + budget {
                end.waited(now - begun);
                end.found_in_ring();
                found += 1;
            } else {
                if budget > 0 {
                    end.lost(begun + budget, budget);
                }
                now += waking;
                end.waited(now - begun);
            }
            now += 1000;
            since[round % 2] = now;
        }
        found
    }

    #[test]
    fn ends_that_wait_for_each_others_late_wake_ups_find_to_the_ring() {
        for waking in [40_000, 200_000, 300_000, 450_000] {
            let mut ends = [Patience::default(); 2];
            (0..20).for_each(|_| ends.iter_mut().for_each(|end| end.waited(2 * waking)));
            ping_pong(&mut ends, waking);
            let found = ping_pong(&mut ends, waking);
            assert!(found > 900_000, "{found} messages where waking takes {waking} ns");
        }
    }

    #[test]
    fn a_ring_that_the_sender_avoids_is_not_looked_at() {
        let mut patience = Patience::default();
        let mut avoid = |now| (0..BY_TCP).for_each(|_| patience.found_in_tcp(now));
        avoid(0);
        avoid(AVOIDED_NS);
        assert_eq!(patience.budget_ns(AVOIDED_NS * 3 - 1), 0, "twice as long");
        assert!(patience.budget_ns(AVOIDED_NS * 3) > 0);
        patience.found_in_tcp(0);
        patience.found_in_tcp(0);
        patience.found_in_ring();
        patience.found_in_tcp(AVOIDED_NS * 3);
        assert!(patience.budget_ns(AVOIDED_NS * 3) > 0, "not in a row");
    }

    #[test]
    fn looks_that_lose_time_cost_a_few_percent_at_most() {
        // The processor goes to other threads for so long: to one, and to a dozen.
        for gap in [3_000_000, 25_000_000] {
            let mut patience = Patience::default();
            let (mut now, mut lost) = (0, 0);
            while now < 20_000_000_000 {
                if patience.budget_ns(now) == 0 {
                    now += 10_000;
                    continue;
                }
                (now, lost) = (now + gap, lost + gap);
                patience.lost(now, gap);
            }
            assert!(lost * 50 < now, "{lost} with gaps of {gap}");
        }
    }

    #[test]
    fn messages_that_need_no_look_pay_for_looks() {
        let mut patience = Patience::default();
        patience.came_by_ring(1000);
        patience.lost(0, 1000 * SAVED_NS);
        assert!(patience.budget_ns(0) > 0);
        patience.came_by_ring(u64::MAX);
        patience.lost(0, MAX_SAVED_NS + 1);
        assert_eq!(patience.budget_ns(MIN_REST_NS - 1), 0, "not more than is kept");
    }

    #[test]
    fn what_looks_have_saved_pays_for_what_they_lose() {
        let mut patience = Patience::default();
        (0..1000).for_each(|_| patience.found_in_ring());
        patience.lost(0, 1000 * SAVED_NS);
        assert!(patience.budget_ns(0) > 0);
        patience.lost(0, SAVED_NS);
        assert_eq!(patience.budget_ns(MIN_REST_NS - 1), 0);
        assert!(patience.budget_ns(MIN_REST_NS) > 0);
    }
}
