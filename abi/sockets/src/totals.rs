//! What this process counts of all its connections, those that are closed too.

use std::sync::atomic::{AtomicU64, Ordering};

use quipu_sockets::report::Totals;

use crate::conn::{self, Counters, Mode};

/// A number that grows.
pub(crate) struct Count(AtomicU64);

impl Count {
    const fn new() -> Self {
        Self(AtomicU64::new(0))
    }

    /// Adds to it.
    #[inline]
    pub(crate) fn add(&self, more: u64) {
        if more != 0 {
            self.0.fetch_add(more, Ordering::Relaxed);
        }
    }

    fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

/// Connections that were raised, and that went back to the kernel for good; sleeps that ended.
pub(crate) static RAISES: Count = Count::new();
pub(crate) static LOWERS: Count = Count::new();
pub(crate) static WAKE_UPS: Count = Count::new();
/// The counters of closed connections.
static CLOSED: [Count; 5] = [const { Count::new() }; 5];

/// A connection is gone: its counters go to those of closed ones.
pub(crate) fn keep(counters: &Counters) {
    for (kept, counter) in CLOSED.iter().zip(counters.all()) {
        kept.add(counter.swap(0, Ordering::Relaxed));
    }
}

/// In a child of fork(2): what was counted is the parent's.
pub(crate) fn forget() {
    for count in [&RAISES, &LOWERS, &WAKE_UPS].into_iter().chain(&CLOSED) {
        count.0.store(0, Ordering::Relaxed);
    }
    conn::for_all(|conn| {
        conn.counters.all().iter().for_each(|counter| counter.store(0, Ordering::Relaxed));
    });
}

/// All of it now.
pub(crate) fn now() -> Totals {
    let mut sums = CLOSED.each_ref().map(Count::get);
    let mut raised = 0;
    conn::for_all(|conn| {
        raised += u64::from(conn.mode() == Mode::Raised);
        for (sum, counter) in sums.iter_mut().zip(conn.counters.all()) {
            *sum += counter.load(Ordering::Relaxed);
        }
    });
    let [sent, received, tcp_sent, tcp_received, withdrawals] = sums;
    Totals {
        raised,
        raises: RAISES.get(),
        lowers: LOWERS.get(),
        wake_ups: WAKE_UPS.get(),
        sent: (sent, tcp_sent),
        received: (received, tcp_received),
        withdrawals,
    }
}
