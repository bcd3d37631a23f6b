//! A port that several processes share: who may send how many octets of which lane.
//!
//! Each process is a member. It tells the port what waits in its lanes ([`Demand`]) and gets grants; the
//! arbiter and the clock of the port see the demands of all members. A member's demand is granted once, so
//! that one that is gone, or asleep, takes no more than it last asked for.

use crate::arbiter::{Arbiter, LANES};
use crate::clock::TokenClock;
use crate::config::Config;

/// Processes that may share a port.
pub const MEMBERS: usize = 16;

/// Octets of the greatest packet, headers included.
const PACKET: u64 = 4096 + crate::PACKET_OVERHEAD as u64;

/// What is granted at once to those who come late, as time: they come again for the rest.
const TURN_NS: u64 = 4_000_000;

/// What a lane has sent.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LaneUse {
    /// Octets, headers included.
    pub octets: u64,
    /// Packets.
    pub packets: u64,
    /// Nanoseconds that queue pairs have waited for their turn, in all.
    pub wait_ns: u64,
    /// How many such waits there were.
    pub waits: u64,
}

impl LaneUse {
    /// Both together.
    #[must_use]
    pub fn plus(&self, other: &Self) -> Self {
        Self {
            octets: self.octets.wrapping_add(other.octets),
            packets: self.packets.wrapping_add(other.packets),
            wait_ns: self.wait_ns.wrapping_add(other.wait_ns),
            waits: self.waits.wrapping_add(other.waits),
        }
    }
}

/// What a member tells the port, for each lane.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Demand {
    /// Octets that wait, headers included.
    pub octets: [u32; LANES],
    /// The greatest packet, in octets, headers included.
    pub packet: [u32; LANES],
    /// Octets that were granted and not sent; below 0: that were sent and not granted.
    pub unused: [i64; LANES],
    /// What was sent since the last time.
    pub sent: [LaneUse; LANES],
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Member {
    waiting: [u32; LANES],
    packet: [u32; LANES],
    granted: [u32; LANES],
}

/// The port.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Port {
    arbiter: Arbiter,
    clock: TokenClock,
    members: Vec<Member>,
    /// The member whose turn it is next, for each lane.
    turn: [u8; LANES],
    /// The members that wait in each lane, as bit masks.
    waiting: [u16; LANES],
    /// Lanes in which some member waits, as a bit mask.
    ready: u16,
    /// What each lane has sent.
    used: [LaneUse; LANES],
}

impl Port {
    /// One for so many members, at most [`MEMBERS`].
    #[must_use]
    pub fn new(config: &Config, members: usize) -> Self {
        Self {
            arbiter: arbiter_of(config),
            clock: TokenClock::new(config.rate),
            members: vec![Member::default(); members.clamp(1, MEMBERS)],
            turn: [0; LANES],
            waiting: [0; LANES],
            ready: 0,
            used: [LaneUse::default(); LANES],
        }
    }

    /// Takes another configuration. Nothing that waits, or was granted, is lost.
    pub fn configure(&mut self, config: &Config) {
        self.arbiter = arbiter_of(config);
        self.clock = TokenClock::new(config.rate);
    }

    /// When the next packet may be sent, in nanoseconds.
    #[must_use]
    pub fn next_ns(&self) -> u64 {
        self.clock.next_ns()
    }

    /// What each lane has sent, of all members.
    #[must_use]
    pub fn used(&self) -> &[LaneUse; LANES] {
        &self.used
    }

    /// A member that was another process before: what that one asked for is forgotten.
    pub fn join(&mut self, member: usize) {
        if let Some(own) = self.members.get_mut(member) {
            *own = Member::default();
            self.note_waiting(member);
        }
    }

    /// Octets of each lane that the `member` may send, of what it says that waits there.
    pub fn exchange(&mut self, member: usize, now_ns: u64, demand: &Demand) -> [u32; LANES] {
        // Time passes unused while nobody waits; otherwise somebody was late.
        let is_busy = self.ready & self.arbiter.served() != 0;
        let lag_ns = if is_busy { TokenClock::LATE_NS } else { TokenClock::IDLE_NS };
        self.clock.limit_lag(now_ns, lag_ns);
        self.correct(now_ns, demand);
        if let Some(own) = self.members.get_mut(member) {
            (own.waiting, own.packet) = (demand.octets, demand.packet);
            // What was granted meanwhile is of what waits.
            for lane in 0..LANES {
                own.waiting[lane] = own.waiting[lane].saturating_sub(own.granted[lane]);
            }
            self.note_waiting(member);
        }
        self.grant(now_ns);
        let own = self.members.get_mut(member);
        own.map(|own| std::mem::take(&mut own.granted)).unwrap_or_default()
    }

    fn correct(&mut self, now_ns: u64, demand: &Demand) {
        for lane in 0..LANES {
            let unused = demand.unused[lane];
            if unused != 0 {
                self.arbiter.correct(lane as u8, -unused);
            }
            match unused {
                1.. => self.clock.give_back(unused.unsigned_abs()),
                0 => {}
                _ => self.clock.take(now_ns, unused.unsigned_abs()),
            }
            self.used[lane] = self.used[lane].plus(&demand.sent[lane]);
        }
    }

    /// Grants what the clock allows, packet by packet.
    fn grant(&mut self, now_ns: u64) {
        let mut ready = self.ready;
        let left = match self.clock.rate() {
            0 => u64::MAX,
            _ => self.clock.octets_in(TURN_NS).max(4 * PACKET),
        };
        // A packet of the high priority table need not sleep until a packet has left: it goes at once, and
        // the next one waits for it.
        let early_ns = now_ns.saturating_add(self.clock.time_of(PACKET));
        let mut sent = 0;
        while ready != 0 && sent < left {
            let pick = match self.clock.is_due_after(sent, now_ns) {
                true => self.arbiter.next(ready),
                false if self.clock.is_due_after(sent, early_ns) => self.arbiter.next_high(ready),
                false => None,
            };
            let Some(pick) = pick else { break };
            let lane = usize::from(pick.lane);
            let index = self.next_member(lane);
            let Some(member) = self.members.get_mut(index) else {
                ready &= !(1 << lane);
                continue;
            };
            let octets = member.waiting[lane].min(member.packet[lane].max(1));
            member.waiting[lane] -= octets;
            member.granted[lane] = member.granted[lane].saturating_add(octets);
            self.arbiter.charge(pick, octets);
            sent = sent.saturating_add(octets.into());
            if member.waiting[lane] == 0 {
                self.waiting[lane] &= !(1 << index);
                if self.waiting[lane] == 0 {
                    ready &= !(1 << lane);
                    self.ready &= !(1 << lane);
                }
            }
        }
        if sent > 0 {
            self.clock.take(now_ns, sent);
        }
    }

    /// Notes in which lanes a member waits.
    fn note_waiting(&mut self, member: usize) {
        let (own, mut ready) = (1 << member, 0);
        for lane in 0..LANES {
            let waits = u16::from(self.members[member].waiting[lane] > 0);
            let waiting = self.waiting[lane] & !own | waits << member;
            self.waiting[lane] = waiting;
            ready |= u16::from(waiting != 0) << lane;
        }
        self.ready = ready;
    }

    /// The member whose turn it is in a lane, of those that wait there; [`MEMBERS`] if none does.
    #[inline]
    fn next_member(&mut self, lane: usize) -> usize {
        let waiting = self.waiting[lane];
        let ahead = waiting & u16::MAX.checked_shl(self.turn[lane].into()).unwrap_or(0);
        let index = if ahead != 0 { ahead } else { waiting }.trailing_zeros() as usize;
        self.turn[lane] = if index + 1 < self.members.len() { index as u8 + 1 } else { 0 };
        index
    }

    /// Writes everything that changes, as words: always as many for one configuration and number of members.
    pub fn save(&self, mut write: impl FnMut(u64)) {
        self.clock.save(&mut write);
        self.turn.iter().for_each(|&turn| write(turn.into()));
        for used in &self.used {
            for word in [used.octets, used.packets, used.wait_ns, used.waits] {
                write(word);
            }
        }
        for member in &self.members {
            for lane in 0..LANES {
                write(u64::from(member.waiting[lane]) << 32 | u64::from(member.granted[lane]));
            }
            member.packet.iter().for_each(|&packet| write(packet.into()));
        }
        self.arbiter.save(write);
    }

    /// Reads what [`save`](Self::save) has written. Nothing that it reads makes it panic later, or go on
    /// without end.
    pub fn load(&mut self, now_ns: u64, mut read: impl FnMut() -> u64) {
        self.clock.load(now_ns, &mut read);
        let count = self.members.len() as u64;
        for turn in &mut self.turn {
            *turn = (read() % count) as u8;
        }
        for used in &mut self.used {
            *used = LaneUse { octets: read(), packets: read(), wait_ns: read(), waits: read() };
        }
        (self.waiting, self.ready) = ([0; LANES], 0);
        for (index, member) in self.members.iter_mut().enumerate() {
            for lane in 0..LANES {
                let word = read();
                (member.waiting[lane], member.granted[lane]) = ((word >> 32) as u32, word as u32);
                if member.waiting[lane] > 0 {
                    self.waiting[lane] |= 1 << index;
                    self.ready |= 1 << lane;
                }
            }
            for packet in &mut member.packet {
                // Below this a grant of much would take too many steps.
                *packet = (read() as u32).max(64);
            }
        }
        self.arbiter.load(read);
    }
}

fn arbiter_of(config: &Config) -> Arbiter {
    Arbiter::new(&config.high, &config.low, config.high_limit, !config.strict)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Entry;

    fn config(low: &[(u8, u8)], rate: u64) -> Config {
        let low = low.iter().map(|&(lane, weight)| Entry { lane, weight }).collect();
        Config { rate, high: Vec::new(), low, ..Config::default() }
    }

    fn demand(lane: usize, octets: u32) -> Demand {
        let mut demand = Demand { packet: [4122; LANES], ..Demand::default() };
        demand.octets[lane] = octets;
        demand
    }

    #[test]
    fn two_members_share_by_weight() {
        for weight in [1u8, 4, 16, 64, 255] {
            let mut port = Port::new(&config(&[(0, weight), (1, 1)], 1_000_000_000), 2);
            let mut sent = [0u64; 2];
            for now in (0..4_000_000_000u64).step_by(20_000) {
                for (member, sent) in sent.iter_mut().enumerate() {
                    let granted = port.exchange(member, now, &demand(member, 300_000));
                    *sent += u64::from(granted[member]);
                }
            }
            let ratio = sent[0] as f64 / sent[1] as f64 / f64::from(weight);
            assert!((ratio - 1.0).abs() < 0.01, "{weight}: {sent:?}");
            let all = (sent[0] + sent[1]) as f64 / 500e6;
            assert!((all - 1.0).abs() < 0.01, "{all}");
        }
    }

    #[test]
    fn one_that_is_busy_catches_up_and_one_that_was_idle_does_not() {
        let mut port = Port::new(&config(&[(0, 1)], 1_000_000_000), 1);
        let start = 1 << 40;
        let mut sent = 0;
        let mut now = start;
        while now < start + 1_000_000_000 {
            // Late by 10 ms, then often enough.
            for _ in 0..5 {
                sent += u64::from(port.exchange(0, now, &demand(0, 8_000_000))[0]);
                now += 20_000;
            }
            now += 9_900_000;
        }
        assert!((123_700_000..=126_500_000).contains(&sent), "{sent}");
        port.exchange(0, now, &demand(0, 0));
        let again = port.exchange(0, now + 90_000_000, &demand(0, 8_000_000))[0];
        assert!(again <= 125_000 + 2 * 4122, "{again}");
    }

    #[test]
    fn a_member_that_is_gone_takes_no_more_than_it_asked_for() {
        let mut port = Port::new(&config(&[(0, 1), (1, 255)], 1_000_000_000), 2);
        port.exchange(1, 0, &demand(1, 100_000));
        let mut sent = 0;
        for now in (0..100_000_000u64).step_by(20_000) {
            sent += u64::from(port.exchange(0, now, &demand(0, 300_000))[0]);
        }
        // 12.5 MB in 100 ms.
        assert!(sent >= 12_500_000 - 101_000 - 4122, "{sent}");
    }

    #[test]
    fn what_was_not_sent_may_be_sent_by_others() {
        let mut port = Port::new(&config(&[(0, 1), (1, 1)], 8_000_000_000), 2);
        // 1 octet takes a nanosecond.
        let start = 1 << 40;
        let granted = port.exchange(0, start, &demand(0, 8244));
        assert_eq!(granted[0], 8244, "a port that was idle may catch up");
        let before = port.next_ns();
        let mut back = demand(0, 0);
        back.unused[0] = 4122;
        port.exchange(0, start, &back);
        assert_eq!(port.next_ns(), before - 4122);
        let mut more = demand(0, 0);
        more.unused[0] = -1000;
        port.exchange(0, start, &more);
        assert_eq!(port.next_ns(), before - 3122);
    }

    #[test]
    fn a_packet_of_the_high_table_goes_at_once_and_the_rate_stays() {
        let high = vec![Entry { lane: 1, weight: 255 }];
        let mut port = Port::new(&Config { high, ..config(&[(0, 1)], 1_000_000_000) }, 2);
        let (mut now, start) = (1 << 40, 1 << 40);
        let (mut bulk, mut pings) = (0, 0);
        while now < start + 1_000_000_000 {
            bulk += u64::from(port.exchange(0, now, &demand(0, 300_000))[0]);
            if now % 7 == 0 {
                assert!(port.next_ns() > now, "the bulk data take all there is");
                assert_eq!(port.exchange(1, now, &demand(1, 34))[1], 34, "at {now}");
                pings += 34;
            }
            now += 20_001;
        }
        // 1 ms more, as the port was idle before.
        let all = (bulk + pings) as f64 / 125.125e6;
        assert!((all - 1.0).abs() < 0.001, "{bulk} and {pings}");
        // Of many packets, one goes early.
        let early = port.exchange(1, now, &demand(1, 300_000))[1];
        assert!(early <= 125_000, "{early}");
        assert!(port.next_ns() <= now + 2 * 32_976, "{} after {now}", port.next_ns());
    }

    #[test]
    fn a_starved_lane_gets_nothing_and_blocks_nobody() {
        let mut port = Port::new(&config(&[(0, 0), (1, 1)], 0), 1);
        let mut both = demand(0, 5000);
        both.octets[1] = 10_000;
        let granted = port.exchange(0, 0, &both);
        assert_eq!((granted[0], granted[1]), (0, 10_000));
    }

    #[test]
    fn a_saved_port_goes_on() {
        let config = config(&[(0, 3), (1, 2)], 1_000_000_000);
        let mut port = Port::new(&config, 3);
        let mut now = 7;
        for step in 0..200u32 {
            now += 17_000;
            let mut words = Vec::new();
            port.save(|word| words.push(word));
            let mut other = Port::new(&config, 3);
            let mut read = words.into_iter();
            other.load(now, || read.next().unwrap());
            assert!(read.next().is_none(), "all is read");
            let member = (step % 3) as usize;
            let demand = demand(member % 2, 9000 + step * 100);
            assert_eq!(port.exchange(member, now, &demand), other.exchange(member, now, &demand));
        }
    }
}
