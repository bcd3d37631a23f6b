//! The end of a stream's use, and of the process. What is in sockets the kernel sends; what is not is lost,
//! although its request may be complete: that of plain iWARP is, once its bytes are handed over. So these are
//! waited for. What has arrived is lost as well, although its sender waits for an answer.

use std::time::{Duration, Instant};

use quipu_cabi::Hold;
use quipu_nic::{ConnId, Loss, Time};

use super::stream::Phase;
use super::token::Slot;
use super::{Net, Taken};
use crate::sys;
use crate::tap::Adapter;

/// How long a closed stream whose last bytes its socket has taken may take to see the peer's end.
const CLOSING_NS: u64 = 1_000_000_000;
/// How long the socket may take to take them: the requests of plain iWARP among them are complete.
const UNSENT_NS: u64 = 30_000_000_000;
/// How many closed streams may do so at once; of more, one is cut.
const CLOSING_MAX: usize = 1024;

/// How long the peers together may take no bytes at all.
const PATIENCE: Duration = Duration::from_secs(1);
/// How long all of it may take.
const PATIENCE_IN_ALL: Duration = Duration::from_secs(10);

/// Receives that empty most sockets; a peer that goes on sending is not waited for.
const RECEIVES: usize = 64;

impl Net {
    /// Closes a stream for the adapter, after what it still transmits.
    pub(crate) fn close(&mut self, adapter: &mut Adapter, now: Time, conn: ConnId) {
        let Some(&slot) = self.by_conn.get(&conn) else {
            return;
        };
        let Some(stream) = self.streams.get_mut(slot) else {
            return;
        };
        if stream.phase == Phase::Connecting {
            return self.lose(adapter, now, slot, Loss::Closed);
        }
        if stream.deadline.is_some() {
            return;
        }
        stream.phase = Phase::Flushing;
        stream.deadline = Some(now.after(UNSENT_NS));
        self.ending += 1;
        stream.received.discard(&mut self.pool);
        if stream.hot {
            self.cool(adapter, now, slot);
        }
        self.closing.push_back((now.after(CLOSING_NS), slot));
        self.transmit_one(adapter, now, slot);
        if self.closing.len() > CLOSING_MAX {
            self.closing.retain(|&(_, slot)| self.streams.get(slot).is_some());
        }
        if self.closing.len() > CLOSING_MAX
            && let Some((_, oldest)) = self.closing.pop_front()
        {
            self.lose(adapter, now, oldest, Loss::Closed);
        }
    }

    /// The adapter has nothing more to send on a stream; if it is being closed, it ends here.
    pub(super) fn flushed(&mut self, adapter: &mut Adapter, now: Time, slot: Slot) {
        let Some(stream) = self.streams.get_mut(slot) else {
            return;
        };
        if stream.phase != Phase::Flushing || stream.unsent.is_some() {
            return;
        }
        stream.phase = Phase::Draining;
        stream.deadline = Some(now.after(CLOSING_NS));
        let ended = sys::shutdown_write(&stream.fd);
        if let Some(conn) = stream.conn.take() {
            self.by_conn.remove(&conn);
            adapter.probe_mut().stream_closed(conn, false);
            adapter.handle_lost(now, conn, Loss::Closed);
        }
        if ended.is_err() {
            return self.lose(adapter, now, slot, Loss::Closed);
        }
        // Often the peer has closed already.
        for _ in 0..8 {
            if self.discard(adapter, now, slot) == Taken::Gone {
                return;
            }
        }
    }

    /// When [`handle_timeout`](Self::handle_timeout) has something to do.
    pub(crate) fn poll_timeout(&self) -> Option<Time> {
        let closing = self.closing.front().map(|&(deadline, _)| deadline);
        [closing, self.resting.over().map(Time), self.silence.due()].into_iter().flatten().min()
    }

    /// Cuts the streams that took too long to close and those whose peers' hosts are silent, and looks at
    /// listeners again.
    pub(crate) fn handle_timeout(&mut self, adapter: &mut Adapter, now: Time) {
        if self.resting.over().is_some() {
            self.listen_again(now);
        }
        self.look_for_silence(adapter, now);
        while let Some(&(look, slot)) = self.closing.front() {
            let deadline = self.streams.get(slot).and_then(|stream| stream.deadline);
            if look > now && deadline.is_some() {
                break;
            }
            self.closing.pop_front();
            match deadline {
                Some(deadline) if deadline > now => {
                    self.closing.push_back((now.after(CLOSING_NS), slot));
                }
                Some(_) => self.lose(adapter, now, slot, Loss::Closed),
                None => {}
            }
        }
    }

    /// Shows the adapter what has arrived on a stream.
    pub(crate) fn take_arrived(&mut self, adapter: &mut Adapter, now: Time, conn: ConnId) {
        let _hold = Hold::new();
        for _ in 0..RECEIVES {
            let Some(&slot) = self.by_conn.get(&conn) else { break };
            if self.receive(adapter, now, slot) != Taken::Bytes {
                break;
            }
        }
    }

    /// Ends all streams after what the adapter has to transmit: the process is about to exit.
    pub(crate) fn shut_down(&mut self, adapter: &mut Adapter, now: Time) {
        let end = Instant::now() + PATIENCE_IN_ALL;
        loop {
            while self.transmit(adapter, now) && Instant::now() < end {}
            let full = self.full();
            let left = end.saturating_duration_since(Instant::now()).min(PATIENCE);
            if full.is_empty() || left.is_zero() || !self.await_room(&full, left) {
                break;
            }
            for slot in full {
                self.flush(adapter, now, slot);
            }
        }
        let slots: Vec<Slot> = self.streams.slots().collect();
        for slot in slots {
            if let Some(stream) = self.streams.get_mut(slot) {
                // The peer may be gone already; nothing more can be done for it.
                let _ = sys::shutdown_write(&stream.fd);
            }
        }
    }

    /// The streams whose sockets have not taken what is to be sent.
    fn full(&mut self) -> Vec<Slot> {
        let slots: Vec<Slot> = self.streams.slots().collect();
        let is_full = |slot: &Slot| self.streams.get(*slot).is_some_and(|s| s.unsent.is_some());
        slots.into_iter().filter(is_full).collect()
    }

    /// Waits until one of them takes bytes. `false` if none does for that long.
    fn await_room(&self, full: &[Slot], limit: Duration) -> bool {
        let streams = full.iter().filter_map(|&slot| self.streams.get(slot));
        sys::wait_writable(streams.map(|stream| &stream.fd), limit)
    }
}
