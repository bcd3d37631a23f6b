//! RACK: losses found by time (RFC 8985 6), and the tail loss probe's books (RFC 8985 7).

use super::rtt::Rtt;
use super::send::{Fate, SendQueue, Sent};

/// RFC 8985 6.2: a widened reordering window lasts for so many recoveries.
const PERSIST_RECOVERIES: u8 = 16;
/// DupThresh (RFC 8985 6.2 step 4).
const DUP_THRESH: u64 = 3;

/// What a round of loss detection found.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Found {
    /// Octets newly marked as lost.
    pub(crate) lost: u64,
    /// When to look again, if segments are still within the reordering window.
    pub(crate) again_at: Option<u64>,
}

#[derive(Clone, Debug)]
pub(crate) struct Rack {
    /// RACK.xmit_ts and RACK.end_seq: the segment sent last of those delivered.
    latest: (u64, u64),
    /// RACK.rtt.
    rtt: u64,
    /// RACK.fack: the highest position delivered.
    highest: u64,
    /// RACK.reordering_seen.
    reordered: bool,
    /// RACK.reo_wnd_mult, and how many recoveries it lasts.
    multiplier: u8,
    persist: u8,
    /// RACK.dsack_round.
    hasty_round: u64,
    /// TLP.end_seq: the probe's end, 0 while none is out.
    pub(crate) probe_end: u64,
    /// TLP.is_retrans.
    pub(crate) probe_repeats: bool,
}

impl Default for Rack {
    fn default() -> Self {
        Self {
            latest: (0, 0),
            rtt: 0,
            highest: 0,
            reordered: false,
            multiplier: 1,
            persist: 0,
            hasty_round: 0,
            probe_end: 0,
            probe_repeats: false,
        }
    }
}

impl Rack {
    /// A segment was delivered, steps 2 and 3. `echoes_older` says that the acknowledgement answers a
    /// transmission before its last one.
    pub(crate) fn deliver(&mut self, now: u64, sent: &Sent, min_rtt: u64, echoes_older: bool) {
        if sent.end() > self.highest {
            self.highest = sent.end();
        } else if !sent.retransmitted {
            // Step 3: it was sent before one that has already arrived, and only once.
            self.reordered = true;
        }
        let rtt = now.saturating_sub(sent.at);
        if sent.retransmitted && (echoes_older || rtt < min_rtt) {
            // Step 2: rather the original was delivered; that says nothing of the last transmission.
            return;
        }
        if (sent.at, sent.end()) > self.latest {
            self.latest = (sent.at, sent.end());
            self.rtt = rtt;
        }
    }

    /// The window was too narrow: a duplicate was reported (step 4), or a recovery was for nothing, which may
    /// be found out before the duplicate arrives, or without one. Counts once a round trip.
    pub(crate) fn was_hasty(&mut self, una: u64, nxt: u64) {
        if una >= self.hasty_round {
            self.hasty_round = nxt;
            self.multiplier = self.multiplier.saturating_add(1);
            self.persist = PERSIST_RECOVERIES;
        }
    }

    /// A recovery has ended.
    pub(crate) fn recovered(&mut self) {
        self.persist = self.persist.saturating_sub(1);
        if self.persist == 0 {
            self.multiplier = 1;
        }
    }

    /// Step 4.
    fn window(&self, rtt: &Rtt, recovering: bool, sacked: u64, mss: u64) -> u64 {
        if !self.reordered && (recovering || sacked >= DUP_THRESH * mss) {
            return 0;
        }
        let quarter = rtt.min().unwrap_or(0) / 4;
        (quarter * u64::from(self.multiplier)).min(rtt.smoothed().unwrap_or(0))
    }

    /// Step 5: marks what was sent before the latest delivered segment, and long enough before.
    pub(crate) fn detect(
        &self,
        now: u64,
        queue: &mut SendQueue,
        rtt: &Rtt,
        recovering: bool,
        mss: u64,
    ) -> Found {
        let mut found = Found::default();
        let window = self.window(rtt, recovering, queue.sacked(), mss);
        let mut left = queue.flying();
        for index in queue.first_flying()..queue.sent().len() {
            if left == 0 {
                break;
            }
            let sent = queue.sent()[index];
            left -= if sent.fate == Fate::Flying { u64::from(sent.len) } else { 0 };
            if (sent.at, sent.end()) >= self.latest {
                if sent.retransmitted {
                    continue;
                }
                // Whatever is behind it was sent later still, or is a retransmission, which is later too.
                break;
            }
            if sent.fate != Fate::Flying {
                continue;
            }
            let deadline = sent.at + self.rtt + window;
            if deadline <= now {
                queue.set_fate(index, Fate::Lost);
                found.lost += u64::from(sent.len);
            } else {
                let again = found.again_at.map_or(deadline, |at: u64| at.max(deadline));
                found.again_at = Some(again);
            }
        }
        found
    }
}
