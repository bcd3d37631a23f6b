//! Streams, as the world below the adapter has them: what comes is shown to the adapter, or put where it says
//! that it belongs, and large payloads are read from where they lie.

use quipu_iwarp::{Negotiated, Sender};
use quipu_nic::*;

use crate::world::World;

/// The longest ULPDU of a peer.
const MAX_ULPDU: u16 = 20_000;

/// A connection as the world below the adapter has it.
pub struct Wire {
    pub conn: ConnId,
    /// What the peer says next is numbered by this.
    pub sender: Sender,
    /// Bytes that the adapter has not taken.
    held: Vec<u8>,
    /// Bytes that have not come yet.
    coming: Vec<u8>,
}

impl World {
    pub fn add_wire(&mut self, conn: ConnId) -> usize {
        let negotiated = Negotiated { crc: self.crc, ..Negotiated::plain() };
        let sender = Sender::new(&negotiated, MAX_ULPDU);
        self.wires.push(Wire { conn, sender, held: Vec::new(), coming: Vec::new() });
        self.wires.len() - 1
    }

    /// The peer says something, all of which comes.
    pub fn say(&mut self, wire: usize, bytes: &[u8]) {
        self.send(wire, bytes);
        self.arrive(wire, usize::MAX);
    }

    /// The peer says something, which comes in parts.
    pub fn send(&mut self, wire: usize, bytes: &[u8]) {
        if let Some(wire) = self.wires.get_mut(wire) {
            wire.coming.extend_from_slice(bytes);
        }
    }

    /// So many of the bytes come that are on the way.
    pub fn arrive(&mut self, wire: usize, most: usize) {
        let Some(wire) = self.wires.get_mut(wire) else { return };
        let (conn, fresh) = (wire.conn, wire.held.is_empty());
        let mut part: Vec<u8> = wire.coming.drain(..most.min(wire.coming.len())).collect();
        if fresh {
            let placed = self.place_part(conn, &part);
            part.drain(..placed);
        }
        // What was placed may have ended the connection, and others have moved up.
        let Some(wire) = self.wires.iter_mut().find(|wire| wire.conn == conn) else { return };
        if part.is_empty() {
            return;
        }
        wire.held.append(&mut part);
        let used = self.adapter.handle_stream(self.now, conn, &wire.held);
        assert!(used <= wire.held.len());
        wire.held.drain(..used);
        if wire.held.len() > 1 << 17 {
            wire.held.clear();
        }
    }

    /// Puts what comes where it belongs; how much of it.
    fn place_part(&mut self, conn: ConnId, part: &[u8]) -> usize {
        let mut places = Vec::new();
        let count = self.adapter.place_next(conn, &mut places);
        assert_eq!(places.iter().map(|&(_, len)| len).sum::<usize>(), count);
        let count = count.min(part.len());
        let mut done = 0;
        for (addr, len) in places {
            let (memory, at) = self.place(addr, len);
            let len = len.min(count - done);
            memory.write(at, &part[done..done + len]).unwrap();
            done += len;
        }
        if count > 0 {
            self.adapter.handle_placed(self.now, conn, count);
        }
        count
    }

    /// Takes what the adapter has to transmit.
    pub fn transmit(&mut self, conn: ConnId) {
        let (mut out, mut gather) = ([0; 3000], Gather::new(if self.crc { 0 } else { 1 << 16 }));
        for calls in 0.. {
            assert!(calls < 100_000, "it never stops talking");
            let used = self.adapter.transmit_from_memory(self.now, conn, &mut out, &mut gather);
            let mut before = 0;
            for piece in gather.pieces() {
                assert!(before <= piece.at && piece.at <= used, "pieces stand in order");
                before = piece.at;
                self.place(piece.addr, piece.len);
            }
            if used == 0 {
                assert!(gather.pieces().is_empty(), "payload without a header");
                return;
            }
        }
    }
}
