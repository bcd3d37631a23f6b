//! The lanes of a port: memory in which peers on this host put short messages, and that of theirs.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use quipu_am::{ConnId, LaneAddress, Line, Pushed};
use quipu_host::nic::mem::ring::{self, LANE_BYTES, LaneConsumer, LaneProducer};
use quipu_host::nic::{Access, Key};

use crate::device::ProtectionDomain;
use crate::memory::{MemoryRegion, RemoteMemory};
use crate::qp::QueuePair;

/// Lanes that are made at once, and at most.
const CHUNK: usize = 16;
const MOST: usize = 128;
/// The memory of a lane that was closed is not used again for so long: a peer that was interrupted may still
/// write there.
const REST: Duration = Duration::from_secs(5);
/// Lanes that one look takes in, next to the one that had a message last.
const LOOKED_AT: usize = 2;
/// Looks at the lane that had a message last, in a row: much cheaper than another poll.
const LOOKS: u32 = 6;
/// So many messages of one lane in a row say that others are there already.
const MANY: u32 = 4;
/// Messages of one lane in a row, before others have their turn.
const IN_A_ROW: u32 = 32;

/// A lane from a peer.
#[derive(Debug)]
struct In {
    conn: ConnId,
    place: usize,
    consumer: LaneConsumer,
    /// How often the peer may say that it has woken this end.
    wakes: u32,
}

#[derive(Debug, Default)]
pub(super) struct Lanes {
    chunks: Vec<MemoryRegion>,
    /// Places without a lane, and since when.
    free: VecDeque<(usize, Instant)>,
    ins: Vec<In>,
    /// Lanes to peers, by the places of their connections.
    outs: Vec<Option<(ConnId, LaneProducer)>>,
    serial: u64,
    /// The lane that had a message last, and how many in a row.
    hot: usize,
    hits: u32,
    /// The one that was looked at last.
    scanned: usize,
}

impl Lanes {
    /// A place for a lane.
    fn take_place(&mut self, domain: &ProtectionDomain) -> Option<usize> {
        let rested = self.free.front().is_some_and(|(_, since)| since.elapsed() >= REST);
        if rested || self.chunks.len() * CHUNK >= MOST {
            return if rested { self.free.pop_front().map(|(place, _)| place) } else { None };
        }
        let access = Access::LOCAL_WRITE | Access::REMOTE_WRITE;
        let chunk = domain.register(CHUNK * LANE_BYTES, access).ok()?;
        let first = self.chunks.len() * CHUNK;
        self.chunks.push(chunk);
        let since = Instant::now().checked_sub(REST).unwrap_or_else(Instant::now);
        for place in (first + 1..first + CHUNK).rev() {
            self.free.push_front((place, since));
        }
        Some(first)
    }

    pub(super) fn offer(&mut self, conn: ConnId, domain: &ProtectionDomain) -> Option<LaneAddress> {
        let place = self.take_place(domain)?;
        let offset = place % CHUNK * LANE_BYTES;
        let chunk = self.chunks.get(place / CHUNK)?;
        self.serial += 1;
        let consumer = LaneConsumer::new(&chunk.part(offset, LANE_BYTES)?, self.serial).ok()?;
        let remote = chunk.remote(offset, LANE_BYTES).ok()?;
        self.ins.push(In { conn, place, consumer, wakes: 0 });
        Some(LaneAddress { addr: remote.addr, key: remote.rkey.0, serial: self.serial })
    }

    pub(super) fn open(&mut self, conn: ConnId, qp: &QueuePair, to: LaneAddress) -> bool {
        let memory = RemoteMemory { addr: to.addr, len: LANE_BYTES as u64, rkey: Key(to.key) };
        let view = qp.view_peer(&memory).filter(|_| to.serial < 1 << 63);
        let Some(view) = view else { return false };
        let Ok(producer) = LaneProducer::new(&view, to.serial) else { return false };
        let at = conn.index() as usize;
        if at >= self.outs.len() {
            self.outs.resize_with(at + 1, || None);
        }
        self.outs[at] = Some((conn, producer));
        true
    }

    /// Ends the lanes of a connection.
    pub(super) fn close(&mut self, conn: ConnId) {
        if let Some(out) = self.outs.get_mut(conn.index() as usize) {
            out.take_if(|(of, _)| *of == conn);
        }
        self.withdraw(conn);
    }

    /// Ends the lane from the peer of a connection.
    pub(super) fn withdraw(&mut self, conn: ConnId) {
        if let Some(at) = self.ins.iter().position(|lane| lane.conn == conn) {
            let lane = self.ins.swap_remove(at);
            lane.consumer.close();
            self.free.push_back((lane.place, Instant::now()));
            (self.hot, self.scanned) = (0, 0);
        }
    }

    #[inline(always)]
    pub(super) fn push(&mut self, conn: ConnId, line: &Line) -> Pushed {
        match self.outs.get_mut(conn.index() as usize) {
            Some(Some((of, producer))) if *of == conn => match producer.push(line) {
                ring::Pushed::Done => Pushed::Done,
                ring::Pushed::Asleep => Pushed::Asleep,
                ring::Pushed::Closed => Pushed::Closed,
            },
            _ => Pushed::Closed,
        }
    }

    /// A message of a lane, if one of those that are looked at now has one.
    #[inline(always)]
    pub(super) fn peek_any(&mut self) -> Option<(ConnId, Line)> {
        if self.hits < IN_A_ROW {
            let lane = self.ins.get(self.hot)?;
            for _ in 0..LOOKS {
                if let Some(line) = lane.consumer.peek() {
                    self.hits += 1;
                    return Some((lane.conn, line));
                }
            }
        }
        if self.ins.len() > 1 || self.hits > 0 { self.scan() } else { None }
    }

    #[inline(never)]
    fn scan(&mut self) -> Option<(ConnId, Line)> {
        self.hits = 0;
        for _ in 0..self.ins.len().min(LOOKED_AT) {
            self.scanned = if self.scanned + 1 < self.ins.len() { self.scanned + 1 } else { 0 };
            let lane = &self.ins[self.scanned];
            if let Some(line) = lane.consumer.peek() {
                self.hot = self.scanned;
                return Some((lane.conn, line));
            }
        }
        None
    }

    /// What was found cannot be taken yet: others have their turn.
    pub(super) fn rotate(&mut self) {
        self.hits = IN_A_ROW;
    }

    #[inline]
    fn of(&mut self, conn: ConnId) -> Option<&mut In> {
        let is_hot = self.ins.get(self.hot).is_some_and(|lane| lane.conn == conn);
        let at = if is_hot { self.hot } else { self.ins.iter().position(|it| it.conn == conn)? };
        self.ins.get_mut(at)
    }

    #[inline]
    pub(super) fn peek(&mut self, conn: ConnId) -> Option<Line> {
        self.of(conn)?.consumer.peek()
    }

    #[inline(always)]
    pub(super) fn pop(&mut self, conn: ConnId) {
        let is_deep = self.hits >= MANY;
        if let Some(lane) = self.of(conn) {
            if is_deep { lane.consumer.pop_and_fetch() } else { lane.consumer.pop() }
        }
    }

    /// Says that this end sleeps; to which connections.
    pub(super) fn arm(&mut self) -> Vec<ConnId> {
        for lane in &mut self.ins {
            lane.consumer.arm();
            lane.wakes = lane.wakes.saturating_add(1);
        }
        std::sync::atomic::fence(std::sync::atomic::Ordering::SeqCst);
        self.ins.iter().map(|lane| lane.conn).collect()
    }

    /// Says that this end is awake.
    pub(super) fn disarm(&self) {
        self.ins.iter().for_each(|lane| lane.consumer.disarm());
    }

    pub(super) fn is_any(&self) -> bool {
        !self.ins.is_empty()
    }

    /// The peer has woken this end; whether it may.
    pub(super) fn take_wake(&mut self, conn: ConnId) -> bool {
        let Some(lane) = self.of(conn).filter(|lane| lane.wakes > 0) else { return false };
        lane.wakes -= 1;
        true
    }
}
