//! Two connections, their receive buffers, memory and programs. The bench checks what a queue pair
//! would: every message finds a receive that is long enough.

use std::collections::VecDeque;

use quipu_sdp::{
    Config, Connection, PeerMisbehaved, Readable, Received, RemoteMemory, Segment, SourceEnd,
};
use quipu_wire::Stag;
use quipu_wire::sdp::{HEADER_LEN, MAX_HEADERS_LEN};

/// The byte of a stream at an offset. A lost or doubled byte moves all that follow.
pub fn byte_at(side: usize, offset: u64) -> u8 {
    let mixed = (offset + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ (side as u64) << 60;
    (mixed >> 56) as u8
}

fn bytes_of(side: usize, offset: u64, len: u32) -> Vec<u8> {
    (offset..offset + u64::from(len)).map(|at| byte_at(side, at)).collect()
}

/// Memory that was advertised.
struct Advertised {
    memory: RemoteMemory,
    bytes: Vec<u8>,
}

/// A read that is under way: where it goes on, and what it has so far.
pub struct Reading {
    pub memory: RemoteMemory,
    first_half: Vec<u8>,
}

pub struct End {
    pub connection: Connection,
    side: usize,
    slots: Vec<Vec<u8>>,
    posted: VecDeque<(u16, u32)>,
    pub inbox: VecDeque<Vec<u8>>,
    pub sent: u64,
    pub received: u64,
    advertised: Option<Advertised>,
    pub reading: Option<Reading>,
    next_addr: u64,
}

impl End {
    fn new(connection: Connection, side: usize, config: &Config) -> Self {
        let buffers = config.buffers;
        Self {
            connection,
            side,
            slots: vec![Vec::new(); buffers.into()],
            posted: (0..buffers).map(|slot| (slot, config.buffer_size)).collect(),
            inbox: VecDeque::new(),
            sent: 0,
            received: 0,
            advertised: None,
            reading: None,
            next_addr: 0x1000,
        }
    }

    /// Checks bytes that its program has read.
    fn took(&mut self, bytes: &[u8]) {
        for byte in bytes {
            assert_eq!(*byte, byte_at(1 - self.side, self.received), "byte {}", self.received);
            self.received += 1;
        }
    }

    fn bytes_in(&self, segment: Segment) -> Vec<u8> {
        let at = segment.at as usize;
        self.slots[usize::from(segment.slot)][at..at + segment.len as usize].to_vec()
    }
}

pub struct Pair {
    pub ends: [End; 2],
    pub now: u64,
}

impl Pair {
    pub fn new(configs: [Config; 2]) -> Self {
        let (own, peer) = ("10.0.0.1:5".parse().unwrap(), "10.0.0.2:6".parse().unwrap());
        let hello = Connection::hello(&configs[0], own, peer);
        let passive = Connection::accept(configs[1], &hello).unwrap();
        let active = Connection::connect(configs[0], &Connection::hello_ack(&configs[1])).unwrap();
        let ends = [End::new(active, 0, &configs[0]), End::new(passive, 1, &configs[1])];
        Self { ends, now: 0 }
    }

    /// Puts a message on its way to the other end.
    pub fn send(&mut self, from: usize, message: Vec<u8>) {
        self.ends[1 - from].inbox.push_back(message);
    }

    /// Sends at most so many bytes by a message. How many.
    pub fn send_data(&mut self, from: usize, most: u32, urgent: bool) -> u32 {
        let end = &mut self.ends[from];
        let len = end.connection.data_room().min(most);
        if len > 0 {
            let mut header = [0; HEADER_LEN];
            end.connection.send_data(len, urgent, &mut header);
            let payload = bytes_of(from, end.sent, len);
            end.sent += u64::from(len);
            self.send(from, [&header[..], &payload].concat());
        }
        len
    }

    /// Advertises memory, if that is possible. Whether it was.
    pub fn advertise(&mut self, from: usize, len: u32, inline: u32) -> bool {
        let end = &mut self.ends[from];
        if !end.connection.may_advertise() {
            return false;
        }
        assert!(end.advertised.is_none());
        let memory = RemoteMemory { addr: end.next_addr, len, rkey: Stag(7) };
        end.next_addr += u64::from(len) + 1;
        let bytes = bytes_of(from, end.sent, len);
        let mut headers = [0; MAX_HEADERS_LEN];
        let at = end.connection.advertise(self.now, memory, inline, &mut headers);
        let message = [&headers[..at], &bytes[..inline as usize]].concat();
        end.advertised = Some(Advertised { memory, bytes });
        self.send(from, message);
        true
    }

    /// Takes note of the end of an advertised buffer.
    pub fn source_end(&mut self, side: usize) -> Option<SourceEnd> {
        let end = &mut self.ends[side];
        let done = end.connection.take_source_end()?;
        assert!(end.advertised.take().is_some());
        end.sent += u64::from(done.taken);
        Some(done)
    }

    /// Reads at most so many bytes, as recv(2) would. How many; a read of memory only begins.
    pub fn receive(&mut self, side: usize, most: u32) -> u32 {
        let end = &mut self.ends[side];
        match end.connection.readable() {
            Readable::Buffered(segment) => {
                let len = segment.len.min(most);
                let bytes = end.bytes_in(Segment { len, ..segment });
                end.connection.consume(len);
                end.took(&bytes);
                len
            }
            Readable::Remote(_) => {
                let memory = end.connection.begin_read(most).unwrap();
                let first_half = self.fetch(side, memory, 0, memory.len / 2);
                self.ends[side].reading = Some(Reading { memory, first_half });
                0
            }
            _ => 0,
        }
    }

    /// Finishes the read that is under way.
    pub fn finish_read(&mut self, side: usize) {
        let Some(Reading { memory, first_half }) = self.ends[side].reading.take() else { return };
        let half = memory.len / 2;
        let rest = self.fetch(side, memory, half, memory.len - half);
        let end = &mut self.ends[side];
        end.took(&[first_half, rest].concat());
        end.connection.finish_read();
    }

    /// An RDMA read of the other end's memory, which must be there.
    fn fetch(&self, side: usize, memory: RemoteMemory, from: u32, len: u32) -> Vec<u8> {
        let there = self.ends[1 - side].advertised.as_ref().expect("memory that is advertised");
        assert_eq!(there.memory.rkey, memory.rkey);
        let at = (memory.addr - there.memory.addr + u64::from(from)) as usize;
        there.bytes[at..at + len as usize].to_vec()
    }

    /// Delivers the next message to an end.
    pub fn deliver(&mut self, side: usize) -> Result<bool, PeerMisbehaved> {
        let end = &mut self.ends[side];
        let Some(message) = end.inbox.pop_front() else { return Ok(false) };
        let (slot, size) = end.posted.pop_front().expect("credits promise a receive");
        assert!(message.len() <= size as usize, "{} bytes for {size}", message.len());
        let handled = end.connection.handle_message(slot, Received::whole(&message));
        end.slots[usize::from(slot)] = message;
        handled.map(|()| true)
    }

    /// Posts receives and sends control messages, as a host does after each call. Whether it sent any.
    pub fn pump(&mut self, side: usize) -> bool {
        while let Some(receive) = self.ends[side].connection.next_receive() {
            self.ends[side].posted.push_back(receive);
            assert!(self.ends[side].posted.len() <= self.ends[side].slots.len());
        }
        let mut any = false;
        let mut out = [0; MAX_HEADERS_LEN];
        while let Some(len) = self.ends[side].connection.poll_control(self.now, &mut out) {
            self.send(side, out[..len].to_vec());
            any = true;
        }
        any
    }

    /// Delivers everything, without reading.
    pub fn settle(&mut self) {
        loop {
            let mut any = false;
            for side in [0, 1] {
                any |= self.deliver(side).expect("a peer that keeps to the protocol");
                any |= self.pump(side);
            }
            if !any {
                return;
            }
        }
    }

    /// Reads everything that has come to an end.
    pub fn drain(&mut self, side: usize) {
        loop {
            let before = self.ends[side].received;
            self.receive(side, u32::MAX);
            self.finish_read(side);
            self.settle();
            if self.ends[side].received == before {
                return;
            }
        }
    }
}
