//! Looking at rings for a while before sleeping.

use quipu_sockets::patience::Patience;

use crate::sys;

/// Time between two questions to the kernel, and between two looks at the processors of senders.
const ASK_NS: u64 = 3_000;
/// More time between two looks means that another thread had the processor.
const GAP_NS: u64 = 40_000;
/// How often a look gives the processor to a sender that was last on the same one, without any news.
const MAX_YIELDS: u32 = 3;
/// What a sender that gets the processor may take for one batch of messages. More is another thread's time.
const BATCH_NS: u64 = 1_000_000;

/// One look that may take a while.
pub(crate) struct Spin<'a> {
    patience: &'a mut Patience,
    begun: u64,
    deadline: u64,
    last: u64,
    asked: u64,
    /// When the senders' processors were looked at; 0 before that.
    compared: u64,
    /// Time for which senders on this processor had it, and how often.
    given_ns: u64,
    yields: u32,
}

impl<'a> Spin<'a> {
    /// Begins, if it is worth trying.
    pub(crate) fn begin(patience: &'a mut Patience) -> Option<Self> {
        let now = sys::now_ns();
        let budget = patience.budget_ns(now);
        if budget == 0 || !crate::process::has_processors() {
            return None;
        }
        let (begun, deadline) = (now, now + budget);
        let (last, asked) = (now, now);
        Some(Self { patience, begun, deadline, last, asked, compared: 0, given_ns: 0, yields: 0 })
    }

    /// Something was found.
    pub(crate) fn found(&mut self) {
        self.patience.waited((self.last - self.begun).saturating_sub(self.given_ns));
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
    /// look has ended then. A sender that was last on this processor (`is_sender_here`) gets it: while this
    /// thread looks, it could not send.
    pub(crate) fn goes_on(&mut self, is_sender_here: impl Fn(i32) -> bool) -> Option<bool> {
        let now = sys::now_ns();
        let gap = now - self.last;
        self.last = now;
        if gap > GAP_NS {
            self.patience.lost(now, gap);
            return None;
        }
        if now > self.deadline {
            self.patience.lost(now, now - self.begun - self.given_ns);
            return None;
        }
        if self.yields < MAX_YIELDS && now - self.compared > ASK_NS {
            if is_sender_here(sys::processor()) {
                self.give_way(now);
                return Some(false);
            }
            self.compared = now;
        }
        let ask = now - self.asked > ASK_NS;
        if ask {
            self.asked = now;
        }
        Some(ask)
    }

    fn give_way(&mut self, now: u64) {
        std::thread::yield_now();
        self.last = sys::now_ns();
        let given = self.last - now;
        self.yields += 1;
        self.given_ns += given;
        self.deadline += given;
        if given > BATCH_NS {
            self.patience.lost(self.last, given - BATCH_NS);
        }
    }
}
