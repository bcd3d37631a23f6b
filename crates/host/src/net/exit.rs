//! The end of a stream's use, and of the process. What is in sockets the kernel sends; what is not is lost,
//! although its request may be complete: that of plain iWARP is, once its bytes are handed over. So these are
//! waited for. What has arrived is lost as well, although its sender waits for an answer.

use std::time::{Duration, Instant};

use quipu_cabi::Hold;
use quipu_nic::{ConnId, Time};

use super::token::Slot;
use super::{Net, Taken};
use crate::sys;
use crate::tap::Adapter;

/// How long the peers together may take no bytes at all.
const PATIENCE: Duration = Duration::from_secs(1);
/// How long all of it may take.
const PATIENCE_IN_ALL: Duration = Duration::from_secs(10);

/// Receives that empty most sockets; a peer that goes on sending is not waited for.
const RECEIVES: usize = 64;

impl Net {
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
