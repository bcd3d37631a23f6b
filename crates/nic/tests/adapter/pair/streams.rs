//! The byte streams between the two adapters.

use std::collections::VecDeque;
use std::net::SocketAddr;

use quipu_nic::iwarp::setup::Outcome;
use quipu_nic::iwarp::{Initiator, Params, Responder};
use quipu_nic::*;

use super::{Pair, Way};

pub(super) struct Wire {
    /// Connection names at host 0 and host 1.
    pub(super) ends: [Option<ConnId>; 2],
    /// Bytes on their way to each host, and the rest of a partial FPDU there.
    pub(super) towards: [VecDeque<u8>; 2],
    held: [Vec<u8>; 2],
    /// What each host said, from the beginning.
    pub(super) said: [Vec<u8>; 2],
    pub(super) closed: bool,
}

impl Pair {
    pub(super) fn open_stream(&mut self, host: usize, conn: ConnId, sgid_index: u8) {
        let from = SocketAddr::new(self.hosts[host].row(sgid_index), 55555);
        let other = 1 - host;
        let accepted = self.hosts[other].adapter.handle_accepted(self.now, from).unwrap();
        let mut ends = [None; 2];
        ends[host] = Some(conn);
        ends[other] = Some(accepted);
        self.wires.push(Wire {
            ends,
            towards: Default::default(),
            held: Default::default(),
            said: Default::default(),
            closed: false,
        });
        self.hosts[host].adapter.handle_reached_stream(self.now, conn);
    }

    /// Joins two queue pairs of type `Iwarp` as connection management does: host 0 opens the stream.
    pub fn adopt(&mut self, qps: [QpId; 2], params: [Params; 2]) {
        let mut initiator = Initiator::new(params[0], b"to the responder").unwrap();
        let mut responder = Responder::new();
        let mut frame = [0; 600];
        let len = initiator.poll_transmit(&mut frame);
        let (_, request) = responder.handle(&frame[..len]).unwrap();
        assert_eq!(request.unwrap().private_data, b"to the responder");
        let there = responder.accept(params[1], b"to the initiator").unwrap();
        let len = responder.poll_transmit(&mut frame);
        let (_, outcome) = initiator.handle(&frame[..len]).unwrap();
        let Some(Outcome::Established(here)) = outcome else { panic!("{outcome:?}") };
        let mut wire = Wire {
            ends: [None; 2],
            towards: Default::default(),
            held: Default::default(),
            said: Default::default(),
            closed: false,
        };
        let roles = [Role::Initiator, Role::Responder];
        for (host, negotiated) in [here, there].into_iter().enumerate() {
            let (ird, ord) = params[host].enhanced.map_or((4, 4), |e| (e.ird, e.ord));
            let role = roles[host];
            let adoption = Adoption { role, negotiated, ird, ord, rfc7306: false };
            let adapter = &mut self.hosts[host].adapter;
            wire.ends[host] = Some(adapter.adopt_stream(self.now, qps[host], &adoption).unwrap());
        }
        self.wires.push(wire);
        self.run();
    }

    pub(super) fn deliver(&mut self) -> bool {
        let piece = match self.way {
            Way::Stream(piece) => piece,
            // Those for which the link has no room.
            _ => usize::MAX,
        };
        let mut busy = false;
        for index in 0..self.wires.len() {
            for host in 0..2 {
                let wire = &mut self.wires[index];
                if self.cut {
                    wire.towards[host].clear();
                }
                let count = wire.towards[host].len().min(piece);
                if count > 0 && self.stopped != Some(host) {
                    busy = true;
                    let bytes: Vec<u8> = wire.towards[host].drain(..count).collect();
                    wire.held[host].extend(bytes);
                    self.hand_over(index, host);
                }
            }
            let wire = &mut self.wires[index];
            if wire.closed && wire.towards.iter().all(VecDeque::is_empty) {
                let ends = std::mem::take(&mut wire.ends);
                for (host, conn) in ends.into_iter().enumerate() {
                    if let Some(conn) = conn {
                        busy = true;
                        self.hosts[host].adapter.handle_lost(self.now, conn, Loss::Closed);
                    }
                }
            }
        }
        busy
    }

    fn hand_over(&mut self, index: usize, host: usize) {
        let Some(conn) = self.wires[index].ends[host] else { return };
        let mut bytes = std::mem::take(&mut self.wires[index].held[host]);
        let adapter = &mut self.hosts[host].adapter;
        let mut places = Vec::new();
        let mut left = adapter.place_next(conn, &mut places).min(bytes.len());
        if self.places && left > 0 {
            adapter.handle_placed(self.now, conn, left);
            self.placed += left;
            for (addr, len) in places {
                let (segment, offset) = self.memory.find(addr, len).expect("places are memory");
                let some: Vec<u8> = bytes.drain(..len.min(left)).collect();
                segment.write(offset, &some).unwrap();
                left -= some.len();
            }
        }
        let used = adapter.handle_stream(self.now, conn, &bytes);
        self.wires[index].held[host] = bytes[used..].to_vec();
    }

    /// The names that both ends have for the last stream.
    pub fn stream_ends(&self) -> [ConnId; 2] {
        self.wires.last().expect("a stream").ends.map(|end| end.expect("an open stream"))
    }

    /// What a host has said on the last stream.
    pub fn said(&self, host: usize) -> &[u8] {
        &self.wires.last().expect("a stream").said[host]
    }

    /// How many streams there have been.
    pub fn streams(&self) -> usize {
        self.wires.len()
    }

    /// Puts bytes of an attacker on the stream towards `host`.
    pub fn inject(&mut self, host: usize, bytes: &[u8]) {
        let wire = self.wires.last_mut().expect("a stream");
        wire.towards[host].extend(bytes);
    }
}
