//! Sending: the bytes that the adapter has for streams go to their sockets, and wait where those are full.

use std::io;

use quipu_nic::Time;

use super::stream::{self, Sent};
use super::token::Slot;
use super::{Net, READ, Taken, WRITE};
use crate::tap::Adapter;

/// Sends to one stream, and bytes, before the others get their turn.
const SENDS_PER_TURN: usize = 4;
const BYTES_PER_TURN: usize = 1024 * 1024;

impl Net {
    /// Transmits for the streams whose bytes are better sent at once. The others wait for
    /// [`transmit`](Self::transmit), so that one send carries what is posted meanwhile. True if any
    /// stream transmitted.
    #[inline]
    pub(crate) fn transmit_urgent(&mut self, adapter: &mut Adapter, now: Time) -> bool {
        let mut any = false;
        while let Some((conn, urgent)) = adapter.next_urgency() {
            let Some(&slot) = self.by_conn.get(&conn) else {
                continue;
            };
            if urgent {
                any = true;
                self.transmit_one(adapter, now, slot);
            } else if let Some(stream) = self.streams.get_mut(slot)
                && !stream.held
            {
                stream.held = true;
                self.held.push(slot);
            }
        }
        any
    }

    /// Whether bytes wait for others of their kind, or for their turn.
    #[inline]
    pub(crate) fn holds_bytes(&self) -> bool {
        !self.held.is_empty() || !self.again.is_empty()
    }

    /// Transmits for all streams that have something to send, each in its turn. True if any had.
    #[inline]
    pub(crate) fn transmit(&mut self, adapter: &mut Adapter, now: Time) -> bool {
        let mut any = false;
        while let Some(conn) = adapter.next_transmit() {
            any = true;
            if let Some(&slot) = self.by_conn.get(&conn) {
                self.transmit_one(adapter, now, slot);
            }
        }
        while let Some(slot) = self.held.pop() {
            any = true;
            if let Some(stream) = self.streams.get_mut(slot) {
                stream.held = false;
                self.transmit_one(adapter, now, slot);
            }
        }
        for _ in 0..self.again.len() {
            let Some(slot) = self.again.pop_front() else {
                break;
            };
            any = true;
            self.transmit_one(adapter, now, slot);
        }
        any
    }

    /// Transmits for one stream, unless its socket is full: then `flush` goes on once it is not.
    pub(super) fn transmit_one(&mut self, adapter: &mut Adapter, now: Time, slot: Slot) {
        let mut bytes = 0;
        for _ in 0..SENDS_PER_TURN {
            let Some(stream) = self.streams.get_mut(slot) else {
                return;
            };
            if stream.unsent.is_some() {
                return;
            }
            let sent = stream.send(adapter, now, &mut self.pool, &mut self.gather);
            let sends = !matches!(sent, Ok(Sent::Nothing));
            self.calls.0 += u64::from(sends);
            if sends && stream.begins_to_owe() {
                self.note_owing(now, slot);
            }
            match sent {
                Ok(Sent::All(sent)) => {
                    bytes += sent;
                    if bytes >= BYTES_PER_TURN {
                        break;
                    }
                }
                Ok(Sent::Part) => return self.watch(adapter, now, slot, READ | WRITE),
                Ok(Sent::Nothing | Sent::Everything) => return self.flushed(adapter, now, slot),
                Err(error) => return self.sending_failed(adapter, now, slot, &error),
            }
        }
        self.again.push_back(slot);
    }

    /// A peer that closed may have sent bytes before, and they are what explains the failure: let
    /// the adapter see them first.
    fn sending_failed(&mut self, adapter: &mut Adapter, now: Time, slot: Slot, error: &io::Error) {
        for _ in 0..64 {
            if self.receive(adapter, now, slot) != Taken::Bytes {
                break;
            }
        }
        self.lose(adapter, now, slot, stream::loss(error));
    }

    /// Goes on with a stream whose socket takes bytes again. False if the stream is gone.
    pub(super) fn flush(&mut self, adapter: &mut Adapter, now: Time, slot: Slot) -> bool {
        let Some(stream) = self.streams.get_mut(slot) else {
            return false;
        };
        let sent = stream.send_rest(&mut self.pool, adapter.probe_mut());
        if stream.begins_to_owe() {
            self.note_owing(now, slot);
        }
        match sent {
            Ok(false) => true,
            Ok(true) => {
                self.watch(adapter, now, slot, READ);
                self.transmit_one(adapter, now, slot);
                self.streams.get(slot).is_some()
            }
            Err(error) => {
                self.sending_failed(adapter, now, slot, &error);
                false
            }
        }
    }
}
