//! What a process that exits still sends by the lanes of its port.

use std::thread;
use std::time::Duration;

use super::core::Core;

/// How long all of it may take, in nanoseconds.
const PATIENCE_IN_ALL_NS: u64 = 10_000_000_000;
/// How long nothing at all may be sent, in nanoseconds: other processes may have the port meanwhile.
const PATIENCE_NS: u64 = 1_000_000_000;
/// The longest between two looks at peers, in nanoseconds.
const STEP_NS: u64 = 1_000_000;

impl Core {
    /// Waits until what queue pairs were posted has left by its lanes, as far as these have a weight: without
    /// lanes it would be with the peers, or in sockets, already.
    pub(super) fn drain_lanes(&mut self) {
        let begun = self.clock.now();
        let (mut sent, mut sent_at) = (self.adapter.lane_octets(), begun);
        while self.adapter.lanes_hold_requests() {
            let now = self.clock.now();
            let total = self.adapter.lane_octets();
            if total != sent {
                (sent, sent_at) = (total, now);
            }
            if now.since(begun) >= PATIENCE_IN_ALL_NS || now.since(sent_at) >= PATIENCE_NS {
                tracing::warn!("the process ends before all requests have left by their lanes");
                return;
            }
            let next_ns = self.adapter.poll_timeout().map_or(STEP_NS, |at| at.since(now));
            thread::sleep(Duration::from_nanos(next_ns.min(STEP_NS)));
            let now = self.clock.now();
            self.adapter.progress(now);
            self.look(now);
            self.adapter.handle_timeout(now);
            self.settle(now);
        }
    }
}
