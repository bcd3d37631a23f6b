//! What an engine of Active Messages posts, kept until its host carries it out, and the memory of a process.

use std::collections::VecDeque;

use quipu_am::datagram::DatagramFabric;
use quipu_am::memory_lanes::MemoryLanes;
use quipu_am::{
    ConnId, Fabric, Hello, LaneAddress, Line, Local, Name, Pushed, Remote, Status, Welcome,
};
use quipu_nic::mem::Segment;
use quipu_nic::{Key, Sge};

/// Bytes of a receive slot and of a send buffer.
pub(super) const SLOT: usize = 512;
/// The longest payload of a medium message.
pub(super) const MAX_MEDIUM: u32 = 256;
/// Receive slots that a process has at most: what one credit for each peer and the shared ones come to.
pub(super) const MOST_SLOTS: u32 = 256;
/// Send buffers.
pub(super) const BUFFERS: u32 = 8;
/// The segment of the endpoint, and what bulk messages are sent from.
pub(super) const SEGMENT: usize = (MOST_SLOTS as usize + BUFFERS as usize) * SLOT;
pub(super) const SEGMENT_LEN: usize = 4096;
pub(super) const SOURCES: usize = SEGMENT + SEGMENT_LEN;
pub(super) const MEMORY: usize = SOURCES + 1024;

/// Something that the engine has posted. `WriteNow` is to be carried out at once.
#[derive(Debug)]
pub(super) enum Post {
    Connect { conn: ConnId, to: Name, hello: Hello },
    Accept { incoming: u64, conn: ConnId, welcome: Welcome },
    Reject { incoming: u64, why: Status },
    Close { conn: ConnId },
    Send { conn: ConnId, bytes: Vec<u8>, notify: Option<u64> },
    SendBuffer { conn: ConnId, buffer: u32, len: usize, notify: u64 },
    Write { conn: ConnId, from: Local, to: Remote, notify: Option<u64> },
    Read { conn: ConnId, into: Local, from: Remote, notify: u64 },
    WriteNow { conn: ConnId, from: Local, to: Remote },
    Repost { slot: u32 },
}

/// Registered memory of a process: receive slots, send buffers, segment, sources.
#[derive(Debug)]
pub(super) struct Memory {
    pub segment: Segment,
    pub addr: u64,
    pub key: u32,
}

impl Memory {
    pub(super) fn read(&self, at: usize, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        // The callers keep to the layout above.
        let _ = self.segment.read(at, &mut bytes);
        bytes
    }

    pub(super) fn write(&self, at: usize, bytes: &[u8]) {
        let _ = self.segment.write(at, bytes);
    }

    pub(super) fn sge(&self, at: usize, len: usize) -> Sge {
        Sge { addr: self.addr + at as u64, len: len as u32, lkey: Key(self.key) }
    }

    /// A part, as the engine names it.
    pub(super) fn local(&self, at: usize, len: usize) -> Local {
        Local { addr: self.addr + at as u64, len: len as u64, key: self.key }
    }
}

/// What a process sends messages with: a queue pair for each connection, or datagrams.
#[derive(Debug)]
pub(super) enum SimFabric {
    Posts(Box<Posts>),
    Datagrams(Box<DatagramFabric<Memory>>),
}

impl SimFabric {
    pub(super) fn memory(&self) -> &Memory {
        match self {
            Self::Posts(posts) => &posts.memory,
            Self::Datagrams(reliable) => reliable.memory(),
        }
    }

    /// The lanes of a process that has a queue pair for each connection.
    pub(super) fn lanes(&mut self) -> Option<&mut MemoryLanes> {
        match self {
            Self::Posts(posts) => Some(&mut posts.lanes),
            Self::Datagrams(_) => None,
        }
    }

    /// The oldest post that is not carried out yet.
    pub(super) fn next_post(&mut self) -> Option<Post> {
        match self {
            Self::Posts(posts) => posts.list.pop_front(),
            Self::Datagrams(_) => None,
        }
    }

    /// Receive slots that exist, or hold a message.
    pub(super) fn slots(&self) -> u32 {
        match self {
            Self::Posts(posts) => posts.provided,
            Self::Datagrams(reliable) => reliable.in_use().0 as u32,
        }
    }
}

/// Calls either fabric.
macro_rules! either {
    ($self:ident, $call:ident $arguments:tt) => {
        match $self {
            Self::Posts(posts) => posts.$call $arguments,
            Self::Datagrams(reliable) => reliable.$call $arguments,
        }
    };
}

impl Fabric for SimFabric {
    fn connect(&mut self, conn: ConnId, to: &Name, hello: &Hello) {
        either!(self, connect(conn, to, hello));
    }

    fn accept(&mut self, incoming: u64, conn: ConnId, welcome: &Welcome) -> bool {
        either!(self, accept(incoming, conn, welcome))
    }

    fn reject(&mut self, incoming: u64, why: Status) {
        either!(self, reject(incoming, why));
    }

    fn close(&mut self, conn: ConnId) {
        either!(self, close(conn));
    }

    fn send(&mut self, conn: ConnId, bytes: &[u8], notify: Option<u64>) -> bool {
        either!(self, send(conn, bytes, notify))
    }

    fn send_buffer(&mut self, conn: ConnId, buffer: u32, len: usize, notify: u64) -> bool {
        either!(self, send_buffer(conn, buffer, len, notify))
    }

    fn write(&mut self, conn: ConnId, from: Local, to: Remote, notify: Option<u64>) -> bool {
        either!(self, write(conn, from, to, notify))
    }

    fn read(&mut self, conn: ConnId, into: Local, from: Remote, notify: u64) -> bool {
        either!(self, read(conn, into, from, notify))
    }

    fn probe(&mut self, conn: ConnId, notify: u64) -> bool {
        either!(self, probe(conn, notify))
    }

    fn offer_lane(&mut self, conn: ConnId) -> Option<LaneAddress> {
        either!(self, offer_lane(conn))
    }

    fn open_lane(&mut self, conn: ConnId, to: LaneAddress) -> bool {
        either!(self, open_lane(conn, to))
    }

    fn withdraw_lane(&mut self, conn: ConnId) {
        either!(self, withdraw_lane(conn));
    }

    fn push_line(&mut self, conn: ConnId, line: &Line) -> Pushed {
        either!(self, push_line(conn, line))
    }

    fn write_now(&mut self, conn: ConnId, from: Local, to: Remote) -> bool {
        either!(self, write_now(conn, from, to))
    }

    fn peek_lanes(&mut self) -> Option<(ConnId, Line)> {
        either!(self, peek_lanes())
    }

    fn rotate_lanes(&mut self) {
        either!(self, rotate_lanes());
    }

    fn peek_line(&mut self, conn: ConnId) -> Option<Line> {
        either!(self, peek_line(conn))
    }

    fn pop_line(&mut self, conn: ConnId) {
        either!(self, pop_line(conn));
    }

    fn arm_lanes(&mut self) -> Vec<ConnId> {
        either!(self, arm_lanes())
    }

    fn take_wake(&mut self, conn: ConnId) -> bool {
        either!(self, take_wake(conn))
    }

    fn inline_limit(&self) -> usize {
        either!(self, inline_limit())
    }

    fn store(&mut self, buffer: u32, at: usize, bytes: &[u8]) {
        either!(self, store(buffer, at, bytes));
    }

    fn load(&self, slot: u32, at: usize, out: &mut [u8]) {
        either!(self, load(slot, at, out));
    }

    fn repost(&mut self, slots: &[u32]) {
        either!(self, repost(slots));
    }

    fn provide(&mut self, slots: u32) -> bool {
        slots <= MOST_SLOTS && either!(self, provide(slots))
    }
}

/// Posts that are not carried out yet.
#[derive(Debug)]
pub(super) struct Posts {
    pub list: VecDeque<Post>,
    pub memory: Memory,
    /// Slots that exist.
    pub provided: u32,
    /// Lanes between the processes, as if these shared memory; or there are none.
    pub lanes: MemoryLanes,
    pub has_lanes: bool,
}

impl Fabric for Posts {
    fn connect(&mut self, conn: ConnId, to: &Name, hello: &Hello) {
        self.list.push_back(Post::Connect { conn, to: *to, hello: *hello });
    }

    fn accept(&mut self, incoming: u64, conn: ConnId, welcome: &Welcome) -> bool {
        self.list.push_back(Post::Accept { incoming, conn, welcome: *welcome });
        true
    }

    fn reject(&mut self, incoming: u64, why: Status) {
        self.list.push_back(Post::Reject { incoming, why });
    }

    fn close(&mut self, conn: ConnId) {
        self.lanes.close(conn);
        self.list.push_back(Post::Close { conn });
    }

    fn send(&mut self, conn: ConnId, bytes: &[u8], notify: Option<u64>) -> bool {
        self.list.push_back(Post::Send { conn, bytes: bytes.into(), notify });
        true
    }

    fn send_buffer(&mut self, conn: ConnId, buffer: u32, len: usize, notify: u64) -> bool {
        self.list.push_back(Post::SendBuffer { conn, buffer, len, notify });
        true
    }

    fn write(&mut self, conn: ConnId, from: Local, to: Remote, notify: Option<u64>) -> bool {
        self.lanes.count_posted(conn);
        self.list.push_back(Post::Write { conn, from, to, notify });
        true
    }

    fn read(&mut self, conn: ConnId, into: Local, from: Remote, notify: u64) -> bool {
        self.lanes.count_posted(conn);
        self.list.push_back(Post::Read { conn, into, from, notify });
        true
    }

    fn offer_lane(&mut self, conn: ConnId) -> Option<LaneAddress> {
        if self.has_lanes { self.lanes.offer(conn) } else { None }
    }

    fn open_lane(&mut self, conn: ConnId, to: LaneAddress) -> bool {
        self.lanes.open(conn, to)
    }

    fn withdraw_lane(&mut self, conn: ConnId) {
        self.lanes.withdraw(conn);
    }

    fn push_line(&mut self, conn: ConnId, line: &Line) -> Pushed {
        self.lanes.push(conn, line)
    }

    fn write_now(&mut self, conn: ConnId, from: Local, to: Remote) -> bool {
        let may = self.lanes.may_write(conn);
        if may {
            self.list.push_back(Post::WriteNow { conn, from, to });
        }
        may
    }

    fn peek_lanes(&mut self) -> Option<(ConnId, Line)> {
        self.lanes.peek_any()
    }

    fn rotate_lanes(&mut self) {
        self.lanes.rotate();
    }

    fn peek_line(&mut self, conn: ConnId) -> Option<Line> {
        self.lanes.peek(conn)
    }

    fn pop_line(&mut self, conn: ConnId) {
        self.lanes.pop(conn);
    }

    fn arm_lanes(&mut self) -> Vec<ConnId> {
        self.lanes.arm()
    }

    fn take_wake(&mut self, conn: ConnId) -> bool {
        self.lanes.take_wake(conn)
    }

    fn inline_limit(&self) -> usize {
        128
    }

    fn store(&mut self, buffer: u32, at: usize, bytes: &[u8]) {
        self.memory.write((MOST_SLOTS + buffer) as usize * SLOT + at, bytes);
    }

    fn probe(&mut self, conn: ConnId, notify: u64) -> bool {
        let from = Local { addr: self.memory.addr, len: 0, key: 0 };
        self.write(conn, from, Remote { addr: 0, len: 0, key: 0 }, Some(notify))
    }

    fn load(&self, slot: u32, at: usize, out: &mut [u8]) {
        let _ = self.memory.segment.read(slot as usize * SLOT + at, out);
    }

    fn repost(&mut self, slots: &[u32]) {
        self.list.extend(slots.iter().map(|&slot| Post::Repost { slot }));
    }

    fn provide(&mut self, slots: u32) -> bool {
        if slots > MOST_SLOTS {
            return false;
        }
        while self.provided < slots {
            self.list.push_back(Post::Repost { slot: self.provided });
            self.provided += 1;
        }
        true
    }
}
