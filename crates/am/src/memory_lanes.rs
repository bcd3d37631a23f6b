//! Lanes that are queues of this process: for simulators, whose engines are all in one.

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::conn::ConnId;
use crate::fabric::{LANE_SLOTS, LaneAddress, Line, Pushed};

/// A lane: memory of its receiver.
#[derive(Debug, Default)]
struct Lane {
    lines: VecDeque<Line>,
    is_open: bool,
    is_asleep: bool,
}

/// The memory of all engines: lanes by their serial numbers.
#[derive(Clone, Debug, Default)]
pub struct SharedLanes(Arc<Mutex<HashMap<u64, Lane>>>);

impl SharedLanes {
    fn all(&self) -> MutexGuard<'_, HashMap<u64, Lane>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Puts a message into some lane, as a peer may that breaks the rules. `which` is any number.
    pub fn forge(&self, which: u64, line: Line) {
        let mut all = self.all();
        let serial = which % (all.len() as u64).max(1) + 1;
        if let Some(lane) = all.get_mut(&serial).filter(|it| it.lines.len() < LANE_SLOTS.into()) {
            lane.lines.push_back(line);
        }
    }
}

/// The lanes of one engine, for its [`Fabric`](crate::Fabric), whose functions of the same names these are.
#[derive(Debug, Default)]
pub struct MemoryLanes {
    shared: SharedLanes,
    /// Those on which it receives: the connection, the serial number, and how often it may be woken.
    ins: Vec<(ConnId, u64, u32)>,
    outs: HashMap<ConnId, u64>,
    /// Where the next look begins.
    at: usize,
    /// Messages that were pushed, and those that had to wake their receiver.
    pub pushed: [u64; 2],
    /// A lane had no room: the engine has broken its rule.
    pub has_overflowed: bool,
    /// Writes and reads of connections that are posted and not done.
    posted: HashMap<ConnId, u32>,
    attempts: u64,
    /// Payloads that were written past the queue pair.
    pub written: u64,
}

impl MemoryLanes {
    /// The lanes of an engine that has none yet.
    #[must_use]
    pub fn new(shared: SharedLanes) -> Self {
        Self { shared, ..Self::default() }
    }

    fn serial(&self, conn: ConnId) -> Option<u64> {
        self.ins.iter().find(|(of, ..)| *of == conn).map(|(_, serial, _)| *serial)
    }

    fn front(&self, serial: u64) -> Option<Line> {
        self.shared.all().get(&serial)?.lines.front().copied()
    }

    /// Every fourth lane cannot be made.
    pub fn offer(&mut self, conn: ConnId) -> Option<LaneAddress> {
        let mut all = self.shared.all();
        let serial = all.len() as u64 + 1;
        all.insert(serial, Lane { is_open: true, ..Lane::default() });
        if serial.is_multiple_of(4) {
            return None;
        }
        self.ins.push((conn, serial, 0));
        Some(LaneAddress { addr: serial, key: 3, serial })
    }

    /// Opens the lane of a peer, if there is one.
    pub fn open(&mut self, conn: ConnId, to: LaneAddress) -> bool {
        let is_there = self.shared.all().contains_key(&to.serial);
        if is_there {
            self.outs.insert(conn, to.serial);
        }
        is_there
    }

    /// Closes the lane from the peer of a connection.
    pub fn withdraw(&mut self, conn: ConnId) {
        let Some(serial) = self.serial(conn) else { return };
        if let Some(lane) = self.shared.all().get_mut(&serial) {
            lane.is_open = false;
        }
        self.ins.retain(|(of, ..)| *of != conn);
    }

    /// Closes both lanes of a connection.
    pub fn close(&mut self, conn: ConnId) {
        self.withdraw(conn);
        self.outs.remove(&conn);
    }

    /// A write or a read is posted.
    pub fn count_posted(&mut self, conn: ConnId) {
        *self.posted.entry(conn).or_default() += 1;
    }

    /// A post is done, of any kind but a send.
    pub fn count_done(&mut self, conn: ConnId) {
        if let Some(posted) = self.posted.get_mut(&conn) {
            *posted = posted.saturating_sub(1);
        }
    }

    /// Whether memory of the peer of a connection may be written now; it is counted then. Every eighth write
    /// may not.
    pub fn may_write(&mut self, conn: ConnId) -> bool {
        self.attempts += 1;
        let is_free = self.posted.get(&conn).is_none_or(|posted| *posted == 0);
        let may = is_free && self.outs.contains_key(&conn) && !self.attempts.is_multiple_of(8);
        self.written += u64::from(may);
        may
    }

    /// Pushes a message.
    pub fn push(&mut self, conn: ConnId, line: &Line) -> Pushed {
        let Some(serial) = self.outs.get(&conn) else { return Pushed::Closed };
        let mut all = self.shared.all();
        let Some(lane) = all.get_mut(serial).filter(|lane| lane.is_open) else {
            return Pushed::Closed;
        };
        self.has_overflowed |= lane.lines.len() >= LANE_SLOTS.into();
        lane.lines.push_back(*line);
        let was_asleep = std::mem::take(&mut lane.is_asleep);
        self.pushed[usize::from(was_asleep)] += 1;
        if was_asleep { Pushed::Asleep } else { Pushed::Done }
    }

    /// A message of any lane.
    pub fn peek_any(&mut self) -> Option<(ConnId, Line)> {
        let count = self.ins.len();
        for place in (0..count).map(|n| (self.at + n) % count) {
            let (conn, serial, _) = self.ins[place];
            if let Some(line) = self.front(serial) {
                self.at = place;
                return Some((conn, line));
            }
        }
        None
    }

    /// Begins with another lane the next time.
    pub fn rotate(&mut self) {
        self.at += 1;
    }

    /// The next message from the peer of a connection.
    pub fn peek(&mut self, conn: ConnId) -> Option<Line> {
        self.front(self.serial(conn)?)
    }

    /// Takes it.
    pub fn pop(&mut self, conn: ConnId) {
        let Some(serial) = self.serial(conn) else { return };
        if let Some(lane) = self.shared.all().get_mut(&serial) {
            lane.lines.pop_front();
        }
    }

    /// Sleeps.
    pub fn arm(&mut self) -> Vec<ConnId> {
        self.set_asleep(true);
        self.ins.iter_mut().for_each(|(_, _, wakes)| *wakes += 1);
        self.ins.iter().map(|(conn, ..)| *conn).collect()
    }

    /// Does not sleep any more.
    pub fn disarm(&mut self) {
        self.set_asleep(false);
    }

    fn set_asleep(&mut self, is_asleep: bool) {
        let mut all = self.shared.all();
        for (_, serial, _) in &self.ins {
            if let Some(lane) = all.get_mut(serial) {
                lane.is_asleep = is_asleep;
            }
        }
    }

    /// Whether the peer may wake this engine.
    pub fn take_wake(&mut self, conn: ConnId) -> bool {
        let mut ins = self.ins.iter_mut();
        let Some((_, _, wakes)) = ins.find(|(of, _, wakes)| *of == conn && *wakes > 0) else {
            return false;
        };
        *wakes -= 1;
        true
    }
}
