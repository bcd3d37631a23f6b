//! Two endpoints, joined by byte streams that deliver pieces of every size.

use std::collections::VecDeque;

use quipu_iwsock::{
    Access, Completion, Config, Endpoint, Failure, MAX_UNCLAIMED, Memory, Operation, Piece,
    PostError, Role, Span, Status,
};

/// Memory of one program: addresses begin at `BASE`.
struct Ram(Vec<u8>);

const BASE: u64 = 0x10_0000;
const SIZE: usize = 1 << 20;

impl Ram {
    fn new() -> Self {
        Self(vec![0; SIZE])
    }
    fn at(&mut self, span: Span) -> &mut [u8] {
        let begin = (span.address - BASE) as usize;
        &mut self.0[begin..begin + span.len]
    }
}

impl Memory for Ram {
    fn read(&self, address: u64, into: &mut [u8]) {
        let begin = (address - BASE) as usize;
        into.copy_from_slice(&self.0[begin..begin + into.len()]);
    }
    fn write(&mut self, address: u64, from: &[u8]) {
        let begin = (address - BASE) as usize;
        self.0[begin..begin + from.len()].copy_from_slice(from);
    }
}

fn span(offset: usize, len: usize) -> Span {
    Span { address: BASE + offset as u64, len }
}

struct Pair {
    ends: [Endpoint; 2],
    rams: [Ram; 2],
    wires: [VecDeque<u8>; 2],
    piece: usize,
}

impl Pair {
    fn new(crc: bool, names_payload: bool, piece: usize) -> Self {
        let end = |role| Endpoint::new(Config { role, crc, names_payload, first_stag: 0x5000 });
        Self {
            ends: [end(Role::Initiator), end(Role::Responder)],
            rams: [Ram::new(), Ram::new()],
            wires: Default::default(),
            piece,
        }
    }

    /// Sends what one end has to send, in pieces.
    fn send(&mut self, from: usize) -> bool {
        self.ends[from].prepare(&self.rams[from]);
        let mut bytes = Vec::new();
        let (pieces, used) = self.ends[from].outgoing();
        for piece in pieces {
            match piece {
                Piece::Bytes(some) => bytes.extend_from_slice(some),
                Piece::Memory(span) => {
                    let begin = bytes.len();
                    bytes.resize(begin + span.len, 0);
                    self.rams[from].read(span.address, &mut bytes[begin..]);
                }
            }
        }
        let bytes = &bytes[used..];
        let len = bytes.len().min(self.piece);
        self.wires[1 - from].extend(&bytes[..len]);
        self.ends[from].sent(len);
        len > 0
    }

    fn receive(&mut self, to: usize) -> bool {
        let space = self.ends[to].space();
        let len = space.len().min(self.wires[to].len()).min(self.piece);
        for (place, byte) in space.iter_mut().zip(self.wires[to].drain(..len)) {
            *place = byte;
        }
        self.ends[to].received(&mut self.rams[to], len);
        len > 0
    }

    /// Until nothing moves any more.
    fn run(&mut self) {
        while (0..2).any(|end| self.send(end) | self.receive(1 - end)) {}
    }

    fn post(&mut self, end: usize, id: u64, operation: Operation, spans: &[Span]) {
        self.ends[end].post(id, operation, spans).unwrap();
    }

    fn post_receive(&mut self, end: usize, id: u64, spans: &[Span]) {
        self.ends[end].post_receive(&mut self.rams[end], id, spans).unwrap();
    }

    fn sent(&mut self, end: usize) -> Vec<(u64, usize, Status)> {
        let end = &mut self.ends[end];
        std::iter::from_fn(|| end.poll_send()).map(of).collect()
    }

    fn received(&mut self, end: usize) -> Vec<(u64, usize, Status)> {
        let end = &mut self.ends[end];
        std::iter::from_fn(|| end.poll_receive()).map(of).collect()
    }

    fn fill(&mut self, end: usize, place: Span, seed: u8) -> Vec<u8> {
        let bytes: Vec<u8> =
            (0..place.len).map(|at| (at.wrapping_mul(31) >> 2) as u8 ^ seed).collect();
        self.rams[end].at(place).copy_from_slice(&bytes);
        bytes
    }
}

fn of(completion: Completion) -> (u64, usize, Status) {
    (completion.id, completion.len, completion.status)
}

const BOTH: Access = Access { read: true, write: true };

#[test]
fn messages_writes_and_reads_arrive_whole_in_every_way() {
    for (crc, names, piece) in
        [(true, false, 7), (true, true, 1000), (false, true, 3), (false, false, 1 << 20)]
    {
        let len = if piece < 100 { 3000 } else { 300_000 };
        let mut pair = Pair::new(crc, names, piece);
        pair.run();
        assert_eq!(pair.ends.each_ref().map(Endpoint::is_open), [Ok(true); 2]);
        let there = span(400_000, len);
        let stag = pair.ends[1].register(there, BOTH).unwrap();
        let sink = pair.ends[0].register(span(700_000, len), Access::default()).unwrap();
        assert_ne!(sink, 0);

        let message = pair.fill(0, span(0, len), 1);
        let written = pair.fill(0, span(len, 2000), 2);
        pair.post_receive(1, 50, &[span(0, 1000), span(2000, len)]);
        let half = len / 2;
        pair.post(0, 1, Operation::Send, &[span(0, half), span(half, len - half)]);
        pair.post(0, 2, Operation::Write { stag, to: there.address + 5 }, &[span(len, 2000)]);
        let to = there.address + 5;
        pair.post(0, 3, Operation::Read { stag, to }, &[span(700_010, 2000)]);
        pair.post(0, 4, Operation::Send, &[]);
        pair.post_receive(1, 51, &[]);
        pair.run();

        let ok = Status::Success;
        assert_eq!(pair.sent(0), [(1, len, ok), (2, 2000, ok), (3, 2000, ok), (4, 0, ok)]);
        assert_eq!(pair.received(1), [(50, len, ok), (51, 0, ok)]);
        assert_eq!(pair.rams[1].at(span(0, 1000)), &message[..1000]);
        assert_eq!(pair.rams[1].at(span(2000, len - 1000)), &message[1000..]);
        assert_eq!(pair.rams[1].at(span(400_005, 2000)), written);
        assert_eq!(pair.rams[0].at(span(700_010, 2000)), written);
    }
}

#[test]
fn sends_without_a_receive_wait_and_can_be_read_as_a_stream() {
    let mut pair = Pair::new(true, false, 10_000);
    let bytes = pair.fill(0, span(0, 3 * MAX_UNCLAIMED), 9);
    for part in 0..30 {
        let len = 3 * MAX_UNCLAIMED / 30;
        pair.post(0, part, Operation::Send, &[span(part as usize * len, len)]);
    }
    pair.run();
    assert!(!pair.wires[1].is_empty(), "the peer is held up");
    let (mut stream, mut room) = (Vec::new(), vec![0; 4321]);
    loop {
        let (end, ram) = (&mut pair.ends[1], &mut pair.rams[1]);
        match end.read(ram, &mut room) {
            Some(len) => stream.extend_from_slice(&room[..len]),
            None if pair.wires[1].is_empty() && !pair.ends[0].has_outgoing() => break,
            None => pair.run(),
        }
    }
    assert_eq!(stream.len(), bytes.len() / 30 * 30);
    assert!(stream == bytes[..stream.len()]);

    pair.post(0, 99, Operation::Send, &[span(0, 10)]);
    pair.run();
    pair.post_receive(1, 7, &[span(0, 64)]);
    assert_eq!(pair.received(1), [(7, 10, Status::Success)], "a late receive takes it");
    pair.ends[1].ended();
    assert_eq!(pair.ends[1].read(&mut pair.rams[1], &mut room), Some(0));
}

#[test]
fn what_is_not_allowed_ends_the_connection_and_says_so() {
    let region = span(1000, 1000);
    let read_only = Access { read: true, write: false };
    let write_only = Access { read: false, write: true };
    let cases: [(Access, i64, i64, bool); 6] = [
        (read_only, 0, 0, true),
        (write_only, 0, 0, false),
        (BOTH, 1, 0, true),
        (BOTH, 0, 1, true),
        (BOTH, 0, -1, false),
        (BOTH, 0, i64::MAX, true),
    ];
    for (access, other_stag, shift, writes) in cases {
        let mut pair = Pair::new(true, false, 4096);
        let stag = pair.ends[1].register(region, access).unwrap();
        pair.ends[0].register(region, Access::default()).unwrap();
        let stag = stag.wrapping_add(other_stag as u32);
        let to = region.address.wrapping_add(shift as u64);
        let operation =
            if writes { Operation::Write { stag, to } } else { Operation::Read { stag, to } };
        let before = pair.rams[1].0.clone();
        pair.fill(0, region, 3);
        pair.post(0, 1, operation, &[region]);
        pair.post(0, 2, Operation::Read { stag: 77, to: 0 }, &[span(1000, 8)]);
        pair.post_receive(0, 8, &[span(0, 8)]);
        pair.run();
        assert_eq!(pair.ends[1].is_open(), Err(Failure::Protocol));
        assert!(matches!(pair.ends[0].is_open(), Err(Failure::Terminated(_))));
        assert!(pair.rams[1].0 == before, "nothing was written");
        let sent = pair.sent(0);
        assert_eq!(sent.last().unwrap().2 == Status::RemoteAccess, writes, "{sent:?}");
        assert!(writes || sent[0].2 == Status::RemoteAccess);
        assert_eq!(pair.received(0), [(8, 0, Status::Flushed)]);
        assert_eq!(pair.ends[0].post(5, Operation::Send, &[]), Err(PostError::Over));
    }
}

/// Found by the fuzz target: the address of such a write went to the memory, which may have none of it.
#[test]
fn a_write_without_data_touches_no_memory() {
    let mut pair = Pair::new(true, false, 4096);
    for (id, to) in [(1, 0), (2, u64::MAX)] {
        pair.post(0, id, Operation::Write { stag: 77, to }, &[span(0, 0)]);
    }
    pair.run();
    assert_eq!(pair.ends[1].is_open(), Ok(true));
    assert_eq!(pair.sent(0), [(1, 0, Status::Success), (2, 0, Status::Success)]);
}

#[test]
fn a_message_that_is_longer_than_its_receive_ends_the_connection() {
    for late in [false, true] {
        let mut pair = Pair::new(true, false, 4096);
        if !late {
            pair.post_receive(1, 1, &[span(0, 9)]);
        }
        pair.post(0, 1, Operation::Send, &[span(0, 10)]);
        pair.run();
        if late {
            pair.post_receive(1, 1, &[span(0, 9)]);
        }
        assert_eq!(pair.received(1), [(1, 0, Status::Flushed)]);
        assert_eq!(pair.ends[1].is_open(), Err(Failure::Protocol));
    }
}

#[test]
fn a_peer_that_does_not_speak_iwarp_is_refused() {
    for role in [Role::Initiator, Role::Responder] {
        let mut pair = Pair::new(true, false, 4096);
        let end = usize::from(role == Role::Responder);
        pair.wires[end].extend(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n");
        pair.receive(end);
        assert_eq!(pair.ends[end].is_open(), Err(Failure::Refused));
    }
}

#[test]
fn damaged_streams_never_panic_and_never_write_elsewhere() {
    let mut seed = 1_u64;
    let mut draw = |below: usize| {
        seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (seed >> 33) as usize % below
    };
    for _ in 0..60 {
        let mut pair = Pair::new(false, false, 1 << 16);
        pair.run();
        let stag = pair.ends[1].register(span(500_000, 5000), BOTH).unwrap();
        pair.ends[0].register(span(0, 5000), Access::default()).unwrap();
        pair.post_receive(1, 1, &[span(500_000, 3000)]);
        pair.post(0, 1, Operation::Send, &[span(0, 2000)]);
        pair.post(0, 2, Operation::Write { stag, to: BASE + 500_100 }, &[span(0, 1000)]);
        pair.post(0, 3, Operation::Read { stag, to: BASE + 500_000 }, &[span(0, 100)]);
        pair.send(0);
        for _ in 0..=draw(3) {
            let near = 64 + draw(3000);
            let at = draw(pair.wires[1].len().min(near));
            pair.wires[1][at] ^= 1 << draw(8);
        }
        pair.run();
        pair.ends[1].ended();
        let outside = &pair.rams[1].0;
        assert!(outside[..500_000].iter().chain(&outside[505_000..]).all(|byte| *byte == 0));
    }
}
