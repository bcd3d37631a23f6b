//! Looking at rings for a while before sleeping.

use quipu_sockets::patience::Patience;

use crate::sys;

/// Time between two questions to the kernel.
const ASK_NS: u64 = 3_000;
/// More time between two looks means that another thread had the processor.
const GAP_NS: u64 = 40_000;

/// One look that may take a while.
pub(crate) struct Spin<'a> {
    patience: &'a mut Patience,
    begun: u64,
    deadline: u64,
    last: u64,
    asked: u64,
}

impl<'a> Spin<'a> {
    /// Begins, if it is worth trying.
    pub(crate) fn begin(patience: &'a mut Patience) -> Option<Self> {
        let now = sys::now_ns();
        let budget = patience.budget_ns(now);
        if budget == 0 || !crate::process::has_processors() {
            return None;
        }
        Some(Self { patience, begun: now, deadline: now + budget, last: now, asked: now })
    }

    /// Something was found.
    pub(crate) fn found(&mut self) {
        self.patience.waited(self.last - self.begun);
    }

    /// It was in the ring that was looked at.
    pub(crate) fn found_in_ring(&mut self) {
        self.found();
        self.patience.found_in_ring();
    }

    /// It had come over TCP, although the sender could have used the ring.
    pub(crate) fn found_in_tcp(&mut self) {
        self.found();
        self.patience.found_in_tcp(self.last);
    }

    /// Whether to look again, and to ask the kernel before that. None once the time is over; the
    /// look has ended then.
    pub(crate) fn goes_on(&mut self) -> Option<bool> {
        let now = sys::now_ns();
        let gap = now - self.last;
        self.last = now;
        if gap > GAP_NS {
            self.patience.lost(now, gap);
            return None;
        }
        if now > self.deadline {
            self.patience.lost(now, now - self.begun);
            return None;
        }
        let ask = now - self.asked > ASK_NS;
        if ask {
            self.asked = now;
        }
        Some(ask)
    }
}
