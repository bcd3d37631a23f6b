//! The arbiter of virtual lanes (IBA 7.6.9): which lane sends the next packet.
//!
//! Two tables of up to 64 entries {lane, weight x 64 octets}. The high priority table goes first, for up to
//! `high_limit` x 4096 octets; then the low priority table may send one packet. A lane that has nothing to
//! send, or may not send, is skipped.
//!
//! A packet is sent whole as long as its entry has weight left. What it takes beyond that is forgotten by
//! InfiniBand ("rounded up"), so that two lanes with weights below a packet's size always get equal shares.
//! By default this arbiter carries it over to the entry's next turn (deficit round robin), so that shares are
//! those of the weights at any packet size.

mod table;
mod wheel;

use self::table::Table;

/// Data lanes, VL0 to VL14.
pub const LANES: usize = 15;
/// Entries of a table.
pub const MAX_ENTRIES: usize = 64;
/// Octets that one unit of weight stands for.
pub const UNIT: u32 = 64;
/// Octets that one unit of `high_limit` stands for.
const LIMIT_UNIT: i64 = 4096;
/// Octets of debt beyond which an entry's debt does not grow: a message of the greatest length, 2 GB, and
/// some.
const MOST_DEBT: i64 = 1 << 40;
/// The `high_limit` without a limit.
pub const NO_LIMIT: u8 = 255;

/// An entry of a table.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Entry {
    /// The lane, 0 to 14.
    pub lane: u8,
    /// Its weight in units of 64 octets; 0: the entry is skipped.
    pub weight: u8,
}

/// One of the two tables.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Priority {
    /// The one that goes first.
    High,
    /// The other one.
    Low,
}

/// The choice of the next lane.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pick {
    /// The lane that sends the next packet.
    pub lane: u8,
    /// The table that said so.
    pub priority: Priority,
}

/// The arbiter: call [`next`](Self::next) for a lane, then [`charge`](Self::charge) it for the packet that it
/// sent.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Arbiter {
    high: Table,
    low: Table,
    high_limit: u8,
    /// Octets that the high table may still send before the low one has its chance.
    high_left: i64,
    /// Whether that chance is due.
    low_due: bool,
    /// The table and entry that each lane was served by last.
    last: [Option<(Priority, u8)>; LANES],
}

impl Arbiter {
    /// One with these tables, of which no more than 64 entries each are used. `high_limit` is in units of
    /// 4096 octets: 0: one packet; 255: no limit. With `carry`, an entry pays for what it took beyond its
    /// weight in its next turn.
    #[must_use]
    pub fn new(high: &[Entry], low: &[Entry], high_limit: u8, carry: bool) -> Self {
        let table = |entries: &[Entry]| {
            let used = entries.iter().filter(|entry| usize::from(entry.lane) < LANES);
            Table::new(&used.take(MAX_ENTRIES).copied().collect::<Vec<_>>(), carry)
        };
        Self {
            high: table(high),
            low: table(low),
            high_limit,
            high_left: i64::from(high_limit) * LIMIT_UNIT,
            low_due: false,
            last: [None; LANES],
        }
    }

    /// The lane that sends the next packet, of those in the bit mask `ready`, which have one and may send it.
    /// `None` if no table serves any of them.
    #[inline]
    pub fn next(&mut self, ready: u16) -> Option<Pick> {
        if std::mem::take(&mut self.low_due) {
            self.reload();
            if let Some(pick) = self.next_low(ready) {
                return Some(pick);
            }
        }
        match self.high.pick(ready) {
            Some(lane) => Some(self.note(lane, Priority::High)),
            None => self.next_low(ready),
        }
    }

    /// As [`next`](Self::next), if the high priority table has the choice and serves one of them.
    pub fn next_high(&mut self, ready: u16) -> Option<Pick> {
        if self.low_due || self.high.served() & ready == 0 {
            return None;
        }
        let lane = self.high.pick(ready)?;
        Some(self.note(lane, Priority::High))
    }

    fn next_low(&mut self, ready: u16) -> Option<Pick> {
        let lane = self.low.pick(ready)?;
        self.reload();
        Some(self.note(lane, Priority::Low))
    }

    fn reload(&mut self) {
        self.high_left = i64::from(self.high_limit) * LIMIT_UNIT;
    }

    fn note(&mut self, lane: u8, priority: Priority) -> Pick {
        let at = match priority {
            Priority::High => self.high.at(),
            Priority::Low => self.low.at(),
        };
        self.last[usize::from(lane)] = Some((priority, at));
        Pick { lane, priority }
    }

    /// Charges the lane of the last pick for a packet of so many octets.
    #[inline]
    pub fn charge(&mut self, pick: Pick, octets: u32) {
        let whole = octets.div_ceil(UNIT).saturating_mul(UNIT);
        match pick.priority {
            Priority::High => self.high.charge_picked(whole),
            Priority::Low => self.low.charge_picked(whole),
        }
        if pick.priority == Priority::High && self.high_limit != NO_LIMIT {
            self.high_left -= i64::from(octets);
            self.low_due = self.high_left <= 0;
        }
    }

    /// Charges a lane that has sent more than it was charged for, or gives back what it has not sent (below
    /// 0).
    pub fn correct(&mut self, lane: u8, octets: i64) {
        let Some(Some((priority, index))) = self.last.get(usize::from(lane)) else { return };
        let table = match priority {
            Priority::High => &mut self.high,
            Priority::Low => &mut self.low,
        };
        table.charge(usize::from(*index), octets);
    }

    /// Lanes that some entry with a weight serves, as a bit mask.
    #[must_use]
    pub fn served(&self) -> u16 {
        self.high.served() | self.low.served()
    }

    /// Writes everything that changes, as words: always as many for one configuration.
    pub fn save(&self, mut write: impl FnMut(u64)) {
        for table in [&self.high, &self.low] {
            table.save(&mut write);
        }
        write(self.high_left as u64);
        write(self.low_due.into());
        for last in self.last {
            write(match last {
                None => 0,
                Some((Priority::High, index)) => 1 | u64::from(index) << 2,
                Some((Priority::Low, index)) => 2 | u64::from(index) << 2,
            });
        }
    }

    /// Reads what [`save`](Self::save) has written. Nothing that it reads makes it panic later.
    pub fn load(&mut self, mut read: impl FnMut() -> u64) {
        for table in [&mut self.high, &mut self.low] {
            table.load(&mut read);
        }
        self.high_left = (read() as i64).clamp(-MOST_DEBT, MOST_DEBT);
        self.low_due = read() & 1 != 0;
        for last in &mut self.last {
            let word = read();
            let index = (word >> 2) as u8;
            *last = match word & 3 {
                1 => Some((Priority::High, index)),
                2 => Some((Priority::Low, index)),
                _ => None,
            };
        }
    }
}

#[cfg(test)]
mod tests;
