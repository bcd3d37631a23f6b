//! Queue pairs of one node: posts wait in `posts` for the network.

use std::collections::VecDeque;

use quipu_am::memory_lanes::MemoryLanes;
use quipu_am::{
    ConnId, Fabric, Hello, LaneAddress, Line, Local, Name, Pushed, Remote, Status, Welcome,
};

/// What the engine has asked for. `WriteNow` is to be carried out at once.
#[derive(Debug)]
pub enum Post {
    Connect { conn: ConnId, to: Name, hello: Hello },
    Accept { incoming: u64, conn: ConnId, welcome: Welcome },
    Reject { incoming: u64, why: Status },
    Close { conn: ConnId },
    Send { conn: ConnId, bytes: Vec<u8>, notify: Option<u64> },
    SendBuffer { conn: ConnId, buffer: u32, len: usize, notify: u64 },
    Write { conn: ConnId, from: Local, to: Remote, notify: Option<u64> },
    Read { conn: ConnId, into: Local, from: Remote, notify: u64 },
    WriteNow { conn: ConnId, from: Local, to: Remote },
}

/// The memory of a node: receive slots, send buffers, and what programs have.
pub struct SimFabric {
    pub posts: Vec<Post>,
    pub slots: Vec<Vec<u8>>,
    pub posted: VecDeque<u32>,
    pub buffers: Vec<Vec<u8>>,
    pub memory: Vec<u8>,
    pub lanes: MemoryLanes,
}

impl SimFabric {
    pub fn new(buffers: u32, memory: usize) -> Self {
        Self {
            posts: Vec::new(),
            slots: Vec::new(),
            posted: VecDeque::new(),
            buffers: vec![Vec::new(); buffers as usize],
            memory: vec![0; memory],
            lanes: MemoryLanes::default(),
        }
    }

    pub fn part(&mut self, addr: u64, len: u64) -> &mut [u8] {
        &mut self.memory[addr as usize..(addr + len) as usize]
    }
}

impl Fabric for SimFabric {
    fn connect(&mut self, conn: ConnId, to: &Name, hello: &Hello) {
        self.posts.push(Post::Connect { conn, to: *to, hello: *hello });
    }

    fn accept(&mut self, incoming: u64, conn: ConnId, welcome: &Welcome) -> bool {
        self.posts.push(Post::Accept { incoming, conn, welcome: *welcome });
        true
    }

    fn reject(&mut self, incoming: u64, why: Status) {
        self.posts.push(Post::Reject { incoming, why });
    }

    fn close(&mut self, conn: ConnId) {
        self.lanes.close(conn);
        self.posts.push(Post::Close { conn });
    }

    fn send(&mut self, conn: ConnId, bytes: &[u8], notify: Option<u64>) -> bool {
        self.posts.push(Post::Send { conn, bytes: bytes.into(), notify });
        true
    }

    fn send_buffer(&mut self, conn: ConnId, buffer: u32, len: usize, notify: u64) -> bool {
        self.posts.push(Post::SendBuffer { conn, buffer, len, notify });
        true
    }

    fn write(&mut self, conn: ConnId, from: Local, to: Remote, notify: Option<u64>) -> bool {
        self.lanes.count_posted(conn);
        self.posts.push(Post::Write { conn, from, to, notify });
        true
    }

    fn read(&mut self, conn: ConnId, into: Local, from: Remote, notify: u64) -> bool {
        self.lanes.count_posted(conn);
        self.posts.push(Post::Read { conn, into, from, notify });
        true
    }

    fn offer_lane(&mut self, conn: ConnId) -> Option<LaneAddress> {
        self.lanes.offer(conn)
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
            self.posts.push(Post::WriteNow { conn, from, to });
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
        200
    }

    fn store(&mut self, buffer: u32, at: usize, bytes: &[u8]) {
        let place = &mut self.buffers[buffer as usize];
        place.resize(place.len().max(at + bytes.len()), 0);
        place[at..at + bytes.len()].copy_from_slice(bytes);
    }

    fn probe(&mut self, conn: ConnId, notify: u64) -> bool {
        let none = Remote { addr: 0, len: 0, key: 0 };
        self.write(conn, Local { addr: 0, len: 0, key: 0 }, none, Some(notify))
    }

    fn load(&self, slot: u32, at: usize, out: &mut [u8]) {
        // What no message has written may be anything.
        out.fill(0xa5);
        let bytes = &self.slots[slot as usize][at..];
        let len = bytes.len().min(out.len());
        out[..len].copy_from_slice(&bytes[..len]);
    }

    fn repost(&mut self, slots: &[u32]) {
        for slot in slots {
            assert!(!self.posted.contains(slot), "slot {slot} is posted twice");
            self.posted.push_back(*slot);
        }
    }

    fn provide(&mut self, slots: u32) -> bool {
        while (self.slots.len() as u32) < slots {
            self.posted.push_back(self.slots.len() as u32);
            self.slots.push(Vec::new());
        }
        true
    }
}
