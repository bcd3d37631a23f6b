//! How bytes flow over a stream: from an adapter into segments, again if they are lost, and to the other
//! adapter in pieces.

use quipu_nic::{ConnId, Gather, Loss};

use super::Packet;
use crate::world::{World, WorldEvent};

impl World {
    /// Takes from an adapter what it has to transmit on a stream, as far as the socket has room.
    pub(crate) fn pump(&mut self, h: usize, conn: ConnId) {
        let Some((stream, side)) = self.net.find(h, conn) else { return };
        let now = self.time();
        let size = self.hosts[h].style.buffer;
        let mut buffer = std::mem::take(&mut self.scratch);
        let (mut head, mut gather) = (vec![0; size], Gather::new(size));
        self.net.streams[stream].ends[side].blocked = loop {
            if self.net.streams[stream].flows[side].room() == 0 {
                break true;
            }
            let Ok(all) = self.hosts[h].transmit(now, conn, (&mut head, &mut gather), &mut buffer)
            else {
                return self.violate(|| format!("host {h}: transmits what is no memory"));
            };
            if !buffer.is_empty() {
                self.trace.note(&[7, h as u64, conn.0]);
                self.trace.note_bytes(&buffer);
                self.trace.line(self.kernel.now(), || {
                    let (used, last) = (buffer.len(), &buffer[buffer.len().saturating_sub(96)..]);
                    format!("host {h} {conn:?} stream {stream}: {used} B, last {last:02x?}")
                });
                self.net.streams[stream].flows[side].write(&buffer);
            }
            if all {
                break false;
            }
        };
        self.scratch = buffer;
        self.push_segments(stream, side);
        self.finish_closing(stream, side);
    }

    /// Sends what the window allows.
    pub(crate) fn push_segments(&mut self, stream: usize, side: usize) {
        let now = self.kernel.now();
        while let Some(segment) = self.net.streams[stream].flows[side].next_segment() {
            self.send(stream, side, Packet::Data(segment));
        }
        let after = self.net.retransmit_ns(self.net.streams[stream].flows[side].backoff);
        let flow = &mut self.net.streams[stream].flows[side];
        if !flow.is_waiting() {
            flow.timer_armed = false;
            flow.timer += 1;
        } else if !flow.timer_armed {
            flow.timer_armed = true;
            flow.waiting_since.get_or_insert(now);
            let timer = flow.timer;
            self.kernel.after(after, WorldEvent::Retransmit { stream, side, timer });
        }
    }

    pub(crate) fn retransmit(&mut self, stream: usize, side: usize, timer: u64) {
        let now = self.kernel.now();
        let flow = &mut self.net.streams[stream].flows[side];
        if !flow.timer_armed || flow.timer != timer || self.net.streams[stream].ends[side].dead {
            return;
        }
        let flow = &mut self.net.streams[stream].flows[side];
        flow.timer_armed = false;
        // Progress was made since the timer was set: it starts anew.
        let age = now.saturating_sub(flow.waiting_since.unwrap_or(now));
        let patience = self.net.retransmit_ns(self.net.streams[stream].flows[side].backoff);
        let flow = &mut self.net.streams[stream].flows[side];
        if age >= patience / 2 {
            flow.backoff += 1;
            // Without an end this side keeps trying, as TCP does for a quarter of an hour.
            if flow.backoff > 400 {
                return self.lose(stream, side, Loss::TimedOut);
            }
            self.counters.retransmitted += 1;
            if let Some(segment) = flow.retransmit() {
                self.send(stream, side, Packet::Data(segment));
            }
        }
        self.push_segments(stream, side);
    }

    /// There is room in a socket again.
    pub(super) fn unblock(&mut self, stream: usize, side: usize) {
        let end = &self.net.streams[stream].ends[side];
        if end.blocked
            && let (Some(h), Some(conn)) = (end.host, end.conn)
            && self.net.streams[stream].flows[side].room() > 0
        {
            self.pump(h, conn);
            self.serve(h);
        }
    }

    pub(crate) fn schedule_read(&mut self, stream: usize, side: usize) {
        let delay = self.rng.below(self.net.profile.read_ns + 1);
        let end = &mut self.net.streams[stream].ends[side];
        if !std::mem::replace(&mut end.read_scheduled, true) {
            self.kernel.after(delay, WorldEvent::Read { stream, side });
        }
    }

    /// The host reads from a socket and shows its adapter what is there, in a piece of any length.
    pub(crate) fn read(&mut self, stream: usize, side: usize) {
        let end = &mut self.net.streams[stream].ends[side];
        end.read_scheduled = false;
        let Some(h) = end.host else { return };
        if end.dead || !self.hosts[h].alive {
            return;
        }
        if end.startup.is_some() {
            self.startup_read(stream, side, h);
            return self.after_read(stream, side);
        }
        let Some(conn) = end.conn else {
            // The adapter has let go; the host reads to the end so that the peer can finish.
            let flow = &mut self.net.streams[stream].flows[1 - side];
            let count = flow.received.len();
            flow.received.consume(count);
            flow.kept = 0;
            return self.after_read(stream, side);
        };
        let available = self.net.streams[stream].flows[1 - side].received.len();
        let fresh = available - self.net.streams[stream].flows[1 - side].kept;
        if fresh > 0 {
            let most = (self.net.profile.read_bytes as u64).min(fresh as u64);
            let show = available - fresh + 1 + self.rng.below(most) as usize;
            let now = self.time();
            let flow = &mut self.net.streams[stream].flows[1 - side];
            let bytes = &flow.received.as_slice()[..show];
            self.trace.note(&[8, h as u64, conn.0, show as u64]);
            let fresh = flow.kept == 0;
            let used = self.hosts[h].receive(now, conn, bytes, fresh);
            if used > show {
                self.violate(|| format!("host {h}: {used} of {show} bytes used"));
                return;
            }
            flow.received.consume(used);
            flow.kept = show - used;
            self.schedule_acks(h);
        }
        let flow = &self.net.streams[stream].flows[1 - side];
        let fresh = flow.received.len() > flow.kept;
        if fresh {
            self.schedule_read(stream, side);
        }
        self.after_read(stream, side);
        if !fresh && self.net.streams[stream].flows[1 - side].at_end() {
            self.lose(stream, side, Loss::Closed);
        }
        self.serve(h);
    }

    fn after_read(&mut self, stream: usize, side: usize) {
        if self.net.streams[stream].flows[1 - side].owes_window() {
            self.acknowledge(stream, side);
        }
    }
}
