//! RACK: losses found by time (RFC 8985 6), and the tail loss probe's books (RFC 8985 7).

use std::collections::VecDeque;

use super::congestion::Before;
use super::rtt::Rtt;
use super::send::{Fate, SendQueue, Sent};

/// RFC 8985 6.2: a widened reordering window lasts for so many recoveries.
const PERSIST_RECOVERIES: u8 = 16;
/// Segments sent again of which it is remembered when they were sent first.
const MAX_RESENT: usize = 256;
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

/// A segment that was sent again, and may have been late only.
#[derive(Clone, Copy, Debug)]
struct Resent {
    start: u64,
    end: u64,
    /// When it was sent first, until it is known how late it was.
    at: Option<u64>,
    /// How often it was sent again, less the duplicates that the peer has reported.
    times: u32,
    /// In the current episode of recovery, or in the latest one.
    in_episode: bool,
}

/// How wide the reordering window is because segments were sent again for nothing.
#[derive(Clone, Debug)]
struct Late {
    /// RACK.reo_wnd_mult, and how many recoveries it lasts.
    multiplier: u16,
    persist: u8,
    /// RACK.dsack_round.
    hasty_round: u64,
    /// How much later than the latest one such a segment was delivered: what the window should be, even if
    /// that is more than SRTT.
    most: u64,
    /// The same of segments that were thought lost and came before they were sent again: there is no doubt
    /// which of two has come.
    proved: u64,
    /// What was sent again last.
    resent: VecDeque<Resent>,
    /// How many retransmissions of the episode are not known to be needless.
    unproved: u32,
    /// The latest acknowledgement has proved that all of them were.
    all_needless: bool,
    /// What is to be restored in that case, if the episode has ended.
    before: Option<Before>,
}

impl Default for Late {
    fn default() -> Self {
        Self {
            multiplier: 1,
            persist: 0,
            hasty_round: 0,
            most: 0,
            proved: 0,
            resent: VecDeque::new(),
            unproved: 0,
            all_needless: false,
            before: None,
        }
    }
}

#[derive(Clone, Debug, Default)]
pub(crate) struct Rack {
    /// RACK.xmit_ts and RACK.end_seq: the segment sent last of those delivered.
    latest: (u64, u64),
    /// RACK.rtt.
    rtt: u64,
    /// RACK.fack: the highest position delivered.
    highest: u64,
    /// RACK.reordering_seen.
    reordered: bool,
    /// Only a connection in trouble has it.
    late: Option<Box<Late>>,
    /// TLP.end_seq: the probe's end, 0 while none is out.
    pub(crate) probe_end: u64,
    /// TLP.is_retrans.
    pub(crate) probe_repeats: bool,
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
            if sent.fate == Fate::Lost && (sent.at, sent.end()) < self.latest {
                let late = self.late.get_or_insert_default();
                let lateness = now.saturating_sub(sent.at + self.rtt);
                // And a quarter for those that come after it.
                late.proved = late.proved.max(lateness + lateness / 4);
                late.persist = PERSIST_RECOVERIES;
            }
        }
        let rtt = now.saturating_sub(sent.at);
        if sent.retransmitted && (echoes_older || rtt < min_rtt) {
            // Step 2: rather the original was delivered; that says nothing of the last transmission.
            return self.note_late(now, sent.start, sent.end());
        }
        if (sent.at, sent.end()) > self.latest {
            self.latest = (sent.at, sent.end());
            self.rtt = rtt;
        }
    }

    /// The window was too narrow: a duplicate was reported (step 4), or a recovery was for nothing, which may
    /// be found out before the duplicate arrives, or without one. Counts once a round trip.
    pub(crate) fn was_hasty(&mut self, una: u64, nxt: u64) {
        let late = self.late.get_or_insert_default();
        if una >= late.hasty_round {
            late.hasty_round = nxt;
            // Steps of a quarter of the least round trip are small where that is much less than the window.
            let step = 1 + late.multiplier / 8;
            late.multiplier = late.multiplier.saturating_add(step);
            late.persist = PERSIST_RECOVERIES;
        }
    }

    /// `sent`, as it was until now, goes out again, within an episode of recovery or not.
    pub(crate) fn note_resent(&mut self, sent: &Sent, in_episode: bool) {
        let late = self.late.get_or_insert_default();
        late.unproved += u32::from(in_episode);
        let (start, end) = (sent.start, sent.end());
        let known = late.resent.iter_mut().rev();
        let mut known = known.filter(|it| (it.start, it.end) == (start, end));
        if let Some(again) = known.next().filter(|it| it.in_episode == in_episode) {
            again.times += 1;
            return;
        }
        if late.resent.len() == MAX_RESENT {
            late.resent.pop_front();
        }
        late.resent.push_back(Resent { start, end, at: Some(sent.at), times: 1, in_episode });
    }

    /// The receiver had `left..right` before it came again. What of it was sent again was late and not lost.
    fn note_late(&mut self, now: u64, left: u64, right: u64) {
        let (rtt, Some(late)) = (self.rtt, &mut self.late) else { return };
        for resent in late.resent.iter_mut().filter(|it| left <= it.start && it.end <= right) {
            let first = resent.at.take().map_or(0, |at| now.saturating_sub(at + rtt));
            late.most = late.most.max(first);
        }
    }

    /// The receiver has `left..right` twice, and says so.
    pub(crate) fn note_duplicate(&mut self, now: u64, left: u64, right: u64) {
        self.note_late(now, left, right);
        let Some(late) = &mut self.late else { return };
        let Late { resent, unproved, all_needless, .. } = &mut **late;
        resent.retain_mut(|resent| {
            if resent.start < left || right < resent.end {
                return true;
            }
            if resent.in_episode {
                *unproved = unproved.saturating_sub(1);
                *all_needless |= *unproved == 0;
            }
            resent.times -= 1;
            resent.times > 0
        });
    }

    /// An episode of recovery begins. What was sent again before has no say in whether it was a mistake.
    pub(crate) fn begin_episode(&mut self) {
        let Some(late) = &mut self.late else { return };
        (late.unproved, late.all_needless, late.before) = (0, false, None);
        late.resent.iter_mut().for_each(|resent| resent.in_episode = false);
    }

    /// It has ended. If all of its retransmissions prove needless, `before` is to be restored.
    pub(crate) fn end_episode(&mut self, before: Option<Before>) {
        if let Some(late) = self.late.as_mut().filter(|late| late.unproved > 0) {
            late.before = before;
        }
    }

    /// Whether this acknowledgement has proved that all retransmissions of the episode were needless (RFC
    /// 3708 5).
    pub(crate) fn take_needless(&mut self) -> bool {
        self.late.as_mut().is_some_and(|late| std::mem::take(&mut late.all_needless))
    }

    /// What an episode that has ended would restore; nothing does so later.
    pub(crate) fn take_before(&mut self) -> Option<Before> {
        self.late.as_mut().and_then(|late| late.before.take())
    }

    /// Gives memory back.
    pub(crate) fn trim(&mut self) {
        match &mut self.late {
            Some(late) if late.persist > 0 => late.resent = VecDeque::new(),
            late => *late = None,
        }
    }

    /// Octets of memory behind it.
    pub(crate) fn memory(&self) -> usize {
        let of = |late: &Late| size_of::<Late>() + late.resent.capacity() * size_of::<Resent>();
        self.late.as_deref().map_or(0, of)
    }

    /// A recovery has ended.
    pub(crate) fn recovered(&mut self) {
        let Some(late) = &mut self.late else { return };
        late.persist = late.persist.saturating_sub(1);
        if late.persist == 0 {
            (late.multiplier, late.most, late.proved) = (1, 0, 0);
        }
    }

    /// Step 4. RFC 8985 recommends SRTT as the bound. Where packets are overtaken for longer, each of them
    /// would then be sent again for ever. If that is not wide enough, it becomes as wide as duplicates were
    /// late; and as wide at once as it is proved that segments were late (`specs/deviations.md`).
    fn window(&self, rtt: &Rtt, recovering: bool, sacked: u64, mss: u64) -> u64 {
        if !self.reordered && (recovering || sacked >= DUP_THRESH * mss) {
            return 0;
        }
        let quarter = rtt.min().unwrap_or(0) / 4;
        let late = self.late.as_ref();
        let (multiplier, most, proved) =
            late.map_or((1, 0, 0), |late| (late.multiplier, late.most, late.proved));
        let widened = quarter * u64::from(multiplier);
        let smoothed = rtt.smoothed().unwrap_or(0);
        let bound = rtt.base_rto() / 2;
        let window = if widened < smoothed { widened } else { smoothed.max(most.min(bound)) };
        window.max(proved.min(bound))
    }

    /// The window may have become wider: what it holds now is not lost yet. Returns whether nothing is lost,
    /// and nothing was sent again that may have been.
    pub(crate) fn reconsider(&self, now: u64, queue: &mut SendQueue, rtt: &Rtt) -> bool {
        let window = self.window(rtt, true, 0, 1);
        queue.unlose_if(|sent| sent.at + self.rtt + window > now);
        queue.next_lost().is_none() && self.late.as_ref().is_none_or(|late| late.unproved == 0)
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
