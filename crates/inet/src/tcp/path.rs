//! How large a segment the path takes: what routers report (RFC 8201 5.4, RFC 5927), and what the connection
//! finds out itself (RFC 4821, RFC 8899).
//!
//! A connection begins with the largest segment that the link and the peer take. It uses smaller ones when
//! a router says so in words that quote what is on the way, or when the largest go unanswered again and
//! again. From then on there is a [`Search`]: now and then one segment is larger than the others, and what
//! becomes of it decides. Its loss says nothing of congestion (RFC 4821 7.5).
//!
//! Sizes here are those of [`super::Config::path_mss`]: payload and options.

use quipu_wire::tcp::SeqNumber;

use super::options::{self, MIN_MSS};
use super::send::Fate;
use super::{Connection, Failure, SECOND, State};

/// RFC 8201 4, RFC 8899 5.1.1 (PMTU_RAISE_TIMER): a path that was found narrow is not tried before.
const RAISE_AFTER: u64 = 600 * SECOND;
/// RFC 8899 5.1.2 (MAX_PROBES): so many probes of a size are lost before it counts as too large.
const MAX_PROBES: u8 = 3;
/// The search ends when it could gain no more than this.
const STEP: u16 = 16;
/// So many timeouts in a row of segments larger than the least mean a black hole (RFC 4821 7.7).
const BLACK_HOLE: u8 = 3;

/// What a router, or the peer's host, says about a segment of this end (RFC 9293 3.9.2.2).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Report {
    /// The path takes segments of this size, options included.
    TooBig {
        /// In octets.
        mss: u16,
    },
    /// It did not arrive; the next one may.
    Soft,
    /// The peer does not want it.
    Hard,
}

/// The search for a larger segment.
#[derive(Clone, Debug)]
pub(super) struct Search {
    /// Nothing larger is tried.
    high: u16,
    /// The size that is tried.
    size: u16,
    /// Probes of it that were lost.
    failures: u8,
    /// The position of the probe that is on the way.
    probe: Option<u64>,
    /// No probe goes out before.
    at: u64,
}

impl Search {
    fn new(at: u64, high: u16) -> Self {
        Self { high, size: high, failures: 0, probe: None, at }
    }

    /// Segments of `low` are known to arrive: tries the middle next, or rests until it may begin anew.
    fn go_on(&mut self, now: u64, low: u16, ceiling: u16) {
        self.failures = 0;
        if self.high.saturating_sub(low) < STEP {
            *self = Self::new(now + RAISE_AFTER, ceiling);
        } else {
            self.size = low + (self.high - low).div_ceil(2);
        }
    }
}

impl Connection {
    /// Takes a report about a segment that began with `seq`. Says whether it is believed: it must be about
    /// octets that are on the way, which somebody off the path cannot know (RFC 5927 4.1). A size must have
    /// been checked against the least that a path can have.
    pub fn handle_report(&mut self, now: u64, seq: SeqNumber, report: Report) -> bool {
        let una = self.queue.una;
        let position = self.queue.space.position(una, seq);
        let Some(position) = position.filter(|it| (una..self.queue.nxt).contains(it)) else {
            return false;
        };
        match report {
            Report::TooBig { mss } => return self.on_too_big(now, position, mss.max(MIN_MSS)),
            // RFC 9293 3.9.2.2 (SHLD-26). Once the connection stands somebody has answered, and a hard error
            // is more likely a mistake or a lie (RFC 5461 4.1, RFC 5927 6).
            Report::Hard if !self.state.is_synchronized() => {
                self.finish(Some(Failure::Refused));
            }
            // MUST-56, SHLD-25, MUST-47: it is no end, but the user may want to know.
            Report::Hard => self.events.suspect = true,
            Report::Soft => self.doubt(),
        }
        true
    }

    /// Takes note that the next hop has been looked for in vain. An attempt to connect ends of it: unlike a
    /// report of somebody's, it is no lie. For a connection that stands it is a soft error (MUST-56).
    pub fn handle_unreachable(&mut self) {
        match self.state {
            State::Closed => {}
            State::SynSent => self.finish(Some(Failure::Unreachable)),
            _ => self.doubt(),
        }
    }

    /// Nothing leads to the peer at the moment. If it never answers again, that was why (RFC 1122 4.2.3.9).
    fn doubt(&mut self) {
        self.events.suspect = true;
        self.unreachable = true;
    }

    /// RFC 8201 5.4, RFC 1191 6.4.
    fn on_too_big(&mut self, now: u64, position: u64, mss: u16) -> bool {
        let sent = self.queue.sent();
        let index = sent.partition_point(|sent| sent.end() <= position);
        let Some(quoted) = sent.get(index) else { return false };
        let (start, flies) = (quoted.start, quoted.fate == Fate::Flying);
        let size = quoted.len - u32::from(quoted.fin) + self.options_len();
        // RFC 5927 7.2: what is reported as too long must have been longer.
        if start != position || size <= u32::from(mss) {
            return false;
        }
        if let Some(search) = self.search.as_mut().filter(|search| search.probe == Some(start)) {
            // A probe was too large; that is what it was for (RFC 8899 4.6.2).
            search.high = search.high.min(mss.max(self.path_mss));
            search.failures = MAX_PROBES;
            self.fail_probe(now);
            if flies {
                self.queue.set_fate(index, Fate::Lost);
            }
        }
        // It may be about what was sent before an earlier report.
        mss >= self.path_mss || self.narrow(now, mss)
    }

    fn narrow(&mut self, now: u64, mss: u16) -> bool {
        self.set_path_mss(now, mss);
        self.counters.narrowed += 1;
        // RFC 8201 5.4: what is too long goes again at once, and congestion control has no part in it.
        let most = self.mss();
        for index in 0..self.queue.sent().len() {
            let sent = self.queue.sent()[index];
            if sent.fate == Fate::Flying && sent.len - u32::from(sent.fin) > most {
                self.queue.set_fate(index, Fate::Lost);
                self.owed.window_probe |= index == 0 && sent.start >= self.window.edge;
            }
        }
        true
    }

    /// The path takes segments of this size, options included, from now on. What is on the way is cut when
    /// it is sent again; messages not yet sent keep to the new size. After ten minutes the connection looks
    /// whether the path has become better, up to [`super::Config::path_mss`].
    pub fn set_path_mss(&mut self, now: u64, mss: u16) {
        self.path_mss = mss.min(self.config.path_mss).min(self.link_mss).max(MIN_MSS);
        self.search = None;
        let ceiling = self.ceiling();
        if self.path_mss < ceiling {
            self.search = Some(Box::new(Search::new(now + RAISE_AFTER, ceiling)));
        }
    }

    /// The link itself takes segments of this size at most from now on, options included: nothing larger is
    /// tried until it takes more again.
    pub fn limit_path_mss(&mut self, now: u64, mss: u16) {
        if mss != self.link_mss {
            self.link_mss = mss;
            self.set_path_mss(now, self.path_mss);
        }
    }

    /// The largest segment that the link and the peer take.
    fn ceiling(&self) -> u16 {
        self.config.path_mss.min(self.link_mss).min(self.agreed.peer_mss)
    }

    pub(super) fn options_len(&self) -> u32 {
        if self.agreed.timestamps { options::TIMESTAMPS_LEN } else { 0 }
    }

    /// The segment at the front, or the probe of a closed window, has gone unanswered for the `timeouts`th
    /// time. If the largest do so again and again, it may be that the path takes smaller ones only, and
    /// nobody says so (RFC 4821 7.7, RFC 2923 2.1).
    pub(super) fn suspect_black_hole(&mut self, now: u64, timeouts: u8) {
        if self.search.as_ref().is_some_and(|search| search.probe.is_some()) {
            self.fail_probe(now);
        }
        let head = self.queue.sent()[0];
        let size = head.len - u32::from(head.fin) + self.options_len();
        // With a long time from one to the next, the user would have given up before there are so many.
        let late = now.saturating_sub(self.progress_at) >= self.patience() / 2;
        // It may not have gone again since it was found too long.
        let known = self.path_mss <= self.least_mss;
        if size > u32::from(self.least_mss) && !known && (timeouts >= BLACK_HOLE || late) {
            let before = self.path_mss.min(self.agreed.peer_mss);
            self.path_mss = self.least_mss;
            self.counters.narrowed += 1;
            // If something else was wrong, the former size will pass at once.
            self.search = Some(Box::new(Search::new(now, before)));
        }
    }

    /// The payload of a probe, if one is to go out instead of the next segment of `whole` octets to its end
    /// (RFC 4821 7.3, 7.4).
    pub(super) fn probe_len(&self, now: u64, whole: u64) -> Option<u64> {
        let search = self.search.as_ref()?;
        if search.at > now || search.probe.is_some() || self.recovery.is_some() {
            return None;
        }
        let len = u64::from(search.size).saturating_sub(u64::from(self.options_len()));
        let mss = u64::from(self.mss());
        let behind = len + 2 * mss;
        // What comes behind it shows early whether it is missing. A window of fewer segments than twice its
        // size should rather grow first.
        let suits = len > mss
            && len <= whole
            && behind <= self.queue.written.saturating_sub(self.queue.nxt)
            && behind <= self.window.usable(self.queue.nxt)
            && 2 * len <= self.congestion.cwnd;
        suits.then_some(len)
    }

    /// The segment that begins at `position` is a probe.
    pub(super) fn note_probe(&mut self, position: u64) {
        self.counters.path_probes += 1;
        if let Some(search) = &mut self.search {
            search.probe = Some(position);
        }
    }

    /// What begins at `position` is sent again, and no longer a probe: whatever is acknowledged now says
    /// nothing of its size.
    pub(super) fn probe_resent(&mut self, now: u64, position: u64) {
        if self.search.as_ref().is_some_and(|search| search.probe == Some(position)) {
            self.fail_probe(now);
        }
    }

    /// What has become of the probe, after an acknowledgement has been read and losses were looked for, of
    /// `lost` octets; says how many of them mean congestion.
    pub(super) fn judge_probe(&mut self, now: u64, lost: u64) -> u64 {
        let Some(start) = self.search.as_ref().and_then(|search| search.probe) else { return lost };
        let una = self.queue.una;
        let sent = self.queue.sent();
        let found = sent.get(sent.partition_point(|sent| sent.start < start)).copied();
        let found = found.filter(|sent| sent.start == start);
        match found.map(|sent| (sent.fate, u64::from(sent.len))) {
            Some((Fate::Flying, _)) => lost,
            Some((Fate::Lost, len)) => {
                self.fail_probe(now);
                // RFC 4821 7.5: its loss is no sign of congestion, but that of others is.
                lost.saturating_sub(len)
            }
            Some((Fate::Sacked, _)) => {
                self.pass_probe(now);
                lost
            }
            // Acknowledged, as a whole or in part.
            None if una > start => {
                self.pass_probe(now);
                lost
            }
            None => lost,
        }
    }

    fn pass_probe(&mut self, now: u64) {
        let ceiling = self.ceiling();
        let Some(search) = &mut self.search else { return };
        search.probe = None;
        self.path_mss = search.size;
        search.go_on(now, self.path_mss, ceiling);
        if self.path_mss >= ceiling {
            self.search = None;
        }
    }

    fn fail_probe(&mut self, now: u64) {
        let (low, ceiling) = (self.path_mss, self.ceiling());
        let Some(search) = &mut self.search else { return };
        search.probe = None;
        search.failures = search.failures.saturating_add(1);
        if search.failures >= MAX_PROBES {
            search.high = search.high.min(search.size - 1).max(low);
            search.go_on(now, low, ceiling);
        }
    }
}
