//! One direction of a simulated TCP connection: segments, acknowledgements, retransmission, a window.
//!
//! It is far simpler than TCP (a fixed congestion window, go-back-N), but what it does to the bytes is
//! what TCP does: they arrive in order, exactly once, late, in pieces cut anywhere, and behind each
//! other when one is lost.

use std::collections::BTreeMap;

/// A queue of bytes whose front is taken away in large pieces.
#[derive(Default)]
pub struct ByteQueue {
    bytes: Vec<u8>,
    head: usize,
}

impl ByteQueue {
    /// Bytes in the queue.
    #[must_use]
    pub fn len(&self) -> usize {
        self.bytes.len() - self.head
    }

    /// Whether there are none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The bytes, oldest first.
    #[must_use]
    pub fn as_slice(&self) -> &[u8] {
        &self.bytes[self.head..]
    }

    /// Adds bytes at the end.
    pub fn push(&mut self, bytes: &[u8]) {
        self.bytes.extend_from_slice(bytes);
    }

    /// Takes `count` bytes away from the front.
    pub fn consume(&mut self, count: usize) {
        self.head += count;
        assert!(self.head <= self.bytes.len(), "no more is consumed than is there");
        if self.head == self.bytes.len() {
            self.bytes.clear();
            self.head = 0;
        } else if self.head > 64 << 10 {
            self.bytes.drain(..self.head);
            self.head = 0;
        }
    }
}

/// A segment on its way.
#[derive(Clone, Debug)]
pub struct Segment {
    /// Offset of its first byte in the stream.
    pub seq: u64,
    /// Its bytes.
    pub bytes: Vec<u8>,
    /// Whether the stream ends behind it.
    pub fin: bool,
}

/// The sizes of a flow.
#[derive(Clone, Copy, Debug)]
pub struct FlowConfig {
    /// Bytes of a segment.
    pub mss: usize,
    /// Bytes in flight.
    pub window: usize,
    /// Bytes that the sender's socket holds.
    pub send_buffer: usize,
    /// Bytes that the receiver's socket holds.
    pub receive_buffer: usize,
}

/// One direction of a connection, both ends of it.
pub struct Flow {
    config: FlowConfig,
    /// Sender: first byte not acknowledged, and what is from there on.
    una: u64,
    unacked: ByteQueue,
    /// Sender: next byte to send.
    nxt: u64,
    /// Sender: duplicate acknowledgements below mean nothing, since they may be those of segments that were
    /// sent again (RFC 6582): each round trip would otherwise bring more of both than the one before.
    recover: u64,
    /// Sender: first byte that the receiver has no room for.
    limit: u64,
    /// Sender: the stream ends behind what is queued.
    fin: bool,
    fin_acked: bool,
    dup_acks: u32,
    /// Sender: retransmission timeouts in a row.
    pub backoff: u32,
    /// Sender: number of the current timer; older ones are void.
    pub timer: u64,
    /// Sender: whether a timer runs.
    pub timer_armed: bool,
    /// Sender: since when the oldest byte in flight waits.
    pub waiting_since: Option<u64>,
    /// Receiver: next byte expected, and what came early.
    rcv_nxt: u64,
    early: BTreeMap<u64, Vec<u8>>,
    fin_seq: Option<u64>,
    /// Receiver: bytes that the program has not read.
    pub received: ByteQueue,
    /// Receiver: how many of those the program has read already and keeps until more comes: they do not
    /// fill the socket.
    pub kept: usize,
    /// Receiver: the last window it told was too small for a segment.
    pub closed_window: bool,
}

impl Flow {
    /// A flow in which nothing was sent.
    #[must_use]
    pub fn new(config: FlowConfig) -> Self {
        Self {
            una: 0,
            unacked: ByteQueue::default(),
            nxt: 0,
            recover: 0,
            limit: config.receive_buffer as u64,
            fin: false,
            fin_acked: false,
            dup_acks: 0,
            backoff: 0,
            timer: 0,
            timer_armed: false,
            waiting_since: None,
            rcv_nxt: 0,
            early: BTreeMap::new(),
            fin_seq: None,
            received: ByteQueue::default(),
            kept: 0,
            closed_window: false,
            config,
        }
    }

    /// Bytes that the sender's socket takes now.
    #[must_use]
    pub fn room(&self) -> usize {
        if self.fin { 0 } else { self.config.send_buffer.saturating_sub(self.unacked.len()) }
    }

    /// The sender's program gives bytes.
    pub fn write(&mut self, bytes: &[u8]) {
        self.unacked.push(bytes);
    }

    /// The sender's program has no more bytes.
    pub fn finish(&mut self) {
        self.fin = true;
    }

    fn end(&self) -> u64 {
        self.una + self.unacked.len() as u64
    }

    /// Whether the receiver has yet to acknowledge something, or something waits for room.
    #[must_use]
    pub fn is_waiting(&self) -> bool {
        !self.unacked.is_empty() || (self.fin && !self.fin_acked)
    }

    /// The next segment to send now; the fin goes with the last bytes or alone.
    pub fn next_segment(&mut self) -> Option<Segment> {
        let end = self.end();
        let fin_due = self.fin && !self.fin_acked && self.nxt == end;
        let may = (self.una + self.config.window as u64).min(self.limit).min(end);
        if self.nxt >= may && !fin_due {
            return None;
        }
        let from = (self.nxt - self.una) as usize;
        let count = (may.saturating_sub(self.nxt) as usize).min(self.config.mss);
        // A short segment that only the window cuts waits until what is in flight is acknowledged
        // (silly window avoidance, RFC 9293 3.8.6.2.1).
        if count < self.config.mss && self.nxt + (count as u64) < end && self.nxt > self.una {
            return None;
        }
        let bytes = self.unacked.as_slice()[from..from + count].to_vec();
        let seq = self.nxt;
        self.nxt += count as u64;
        let fin = self.fin && self.nxt == end;
        // One behind the end says that the fin was sent.
        self.nxt += u64::from(fin);
        Some(Segment { seq, bytes, fin })
    }

    /// Time is up: what is not acknowledged is sent again, and at least one byte, whatever the window,
    /// so that a lost window update is asked for again.
    pub fn retransmit(&mut self) -> Option<Segment> {
        self.go_back();
        if self.limit <= self.una && !self.unacked.is_empty() {
            let bytes = self.unacked.as_slice()[..1].to_vec();
            self.nxt += 1;
            return Some(Segment { seq: self.una, bytes, fin: false });
        }
        self.next_segment()
    }

    /// An acknowledgement of everything before `ack`, with room up to `limit`. Whether the oldest
    /// segment is to be sent again at once, because later ones arrived.
    pub fn acknowledge(&mut self, now: u64, ack: u64, limit: u64) -> bool {
        let end = self.end();
        self.limit = self.limit.max(limit);
        if ack > end {
            self.fin_acked = true;
        }
        let bytes = ack.min(end);
        if bytes > self.una {
            self.unacked.consume((bytes - self.una) as usize);
            self.una = bytes;
            self.nxt = self.nxt.max(bytes);
            self.dup_acks = 0;
            self.backoff = 0;
            self.waiting_since = self.is_waiting().then_some(now);
            return false;
        }
        if !self.is_waiting() {
            self.waiting_since = None;
            return false;
        }
        self.dup_acks += u32::from(bytes == self.una && self.nxt > self.una);
        if self.dup_acks >= 3 && self.una >= self.recover {
            self.go_back();
            return true;
        }
        false
    }

    /// All that is not acknowledged is sent again.
    fn go_back(&mut self) {
        self.recover = self.recover.max(self.nxt);
        self.nxt = self.una;
        self.dup_acks = 0;
    }

    /// A segment arrives; whether there is something new for the program.
    pub fn arrive(&mut self, segment: Segment) -> bool {
        let end = segment.seq + segment.bytes.len() as u64;
        if segment.fin {
            self.fin_seq = Some(end);
        }
        let before = self.received.len();
        if segment.seq <= self.rcv_nxt {
            if end > self.rcv_nxt {
                self.received.push(&segment.bytes[(self.rcv_nxt - segment.seq) as usize..]);
                self.rcv_nxt = end;
            }
        } else if segment.seq < self.rcv_nxt + 2 * self.config.receive_buffer as u64 {
            let place = self.early.entry(segment.seq).or_default();
            if place.len() < segment.bytes.len() {
                *place = segment.bytes;
            }
        }
        while let Some(entry) = self.early.first_entry() {
            let (seq, end) = (*entry.key(), *entry.key() + entry.get().len() as u64);
            if seq > self.rcv_nxt {
                break;
            }
            let bytes = entry.remove();
            if end > self.rcv_nxt {
                self.received.push(&bytes[(self.rcv_nxt - seq) as usize..]);
                self.rcv_nxt = end;
            }
        }
        self.received.len() > before || self.at_end()
    }

    /// Room in the receiver's socket.
    fn receive_room(&self) -> usize {
        let unread = self.received.len() - self.kept.min(self.received.len());
        self.config.receive_buffer.saturating_sub(unread)
    }

    /// What the receiver acknowledges, and up to where it has room.
    pub fn ack(&mut self) -> (u64, u64) {
        let room = self.receive_room();
        self.closed_window = room < self.config.mss;
        let ack = self.rcv_nxt + u64::from(self.fin_seq == Some(self.rcv_nxt));
        (ack, self.rcv_nxt + room as u64)
    }

    /// Whether the receiver should tell that there is room again.
    #[must_use]
    pub fn owes_window(&self) -> bool {
        let room = self.receive_room();
        self.closed_window && room >= self.config.mss.min(self.config.receive_buffer / 2)
    }

    /// Whether everything before the end of the stream has arrived.
    #[must_use]
    pub fn at_end(&self) -> bool {
        self.fin_seq == Some(self.rcv_nxt)
    }
}

impl std::fmt::Debug for Flow {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(
            f,
            "sent {}..{} of {}, limit {}, timer {}, got {}, {} unread ({} kept), {} early",
            self.una,
            self.nxt,
            self.end(),
            self.limit,
            self.timer_armed,
            self.rcv_nxt,
            self.received.len(),
            self.kept,
            self.early.len()
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rng::{Rng, pattern};

    const CONFIG: FlowConfig =
        FlowConfig { mss: 100, window: 1000, send_buffer: 4000, receive_buffer: 500 };

    /// Acknowledgements of segments that were sent twice do not have everything sent twice again.
    #[test]
    fn a_window_is_sent_again_once() {
        let mut flow = Flow::new(CONFIG);
        flow.write(&[7; 3000]);
        let flight = |flow: &mut Flow| std::iter::from_fn(|| flow.next_segment()).count();
        assert_eq!(flight(&mut flow), 5, "what the receiver has room for");
        let again = |flow: &mut Flow, ack| (0..9).filter(|_| flow.acknowledge(0, ack, 500)).count();
        assert_eq!((again(&mut flow, 0), flight(&mut flow)), (1, 5));
        flow.acknowledge(0, 100, 500);
        assert_eq!((again(&mut flow, 100), flight(&mut flow)), (0, 0));
        assert!(flow.retransmit().is_some(), "there is a timer for what is lost again");
        assert_eq!((flight(&mut flow), again(&mut flow, 100)), (3, 0));
        flow.acknowledge(0, 500, 1000);
        assert_eq!((flight(&mut flow), again(&mut flow, 500), flight(&mut flow)), (5, 1, 5));
    }

    /// Whatever is lost, doubled or late, the bytes arrive as they were sent.
    #[test]
    fn bytes_arrive_once_and_in_order() {
        for seed in 0..200 {
            let mut rng = Rng::new(seed, 0);
            let sent = pattern(seed, 0, 3000);
            let mut flow = Flow::new(CONFIG);
            flow.write(&sent);
            flow.finish();
            let (mut wire, mut got) = (Vec::new(), Vec::new());
            let mut steps = 0;
            while !(flow.at_end() && flow.received.is_empty()) {
                steps += 1;
                assert!(steps < 10_000, "seed {seed} never ends");
                while let Some(segment) = flow.next_segment() {
                    wire.push(segment);
                }
                if wire.is_empty() && flow.received.is_empty() {
                    wire.extend(flow.retransmit());
                }
                if !wire.is_empty() {
                    let at = rng.index(wire.len());
                    let segment = wire.swap_remove(at);
                    if rng.percent(10) {
                        wire.push(segment.clone());
                    }
                    if rng.percent(70) {
                        flow.arrive(segment);
                        let (ack, limit) = flow.ack();
                        if rng.percent(80) {
                            flow.acknowledge(0, ack, limit);
                        }
                    }
                }
                if rng.percent(50) {
                    let take = rng.index(flow.received.len() + 1);
                    got.extend_from_slice(&flow.received.as_slice()[..take]);
                    flow.received.consume(take);
                }
            }
            assert_eq!(got, sent, "seed {seed}");
        }
    }
}
