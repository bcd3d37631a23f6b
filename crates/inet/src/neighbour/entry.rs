//! A neighbour whose station is known: the states of RFC 4861 7.3.2 behind INCOMPLETE.

use quipu_wire::ndp::Station;

use super::{DELAY, MAX_UNICAST_SOLICIT, NEVER, RETRANSMIT};

/// How sure one is that the neighbour is there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum State {
    /// It has shown so lately; STALE afterwards.
    Reachable { until: u64 },
    /// One will ask when something is sent to it.
    Stale,
    /// Something was sent: the upper layer may hear of it.
    Delay { until: u64 },
    /// It is being asked.
    Probe { at: u64, asked: u8 },
}

#[derive(Clone, Debug)]
pub(super) struct Entry {
    pub(super) station: Station,
    pub(super) state: State,
    /// When something was last sent to it.
    pub(super) used: u64,
}

/// What an advertisement, or an answer of ARP, says.
#[derive(Clone, Copy, Debug)]
pub(super) struct Claim {
    pub(super) station: Option<Station>,
    pub(super) solicited: bool,
    pub(super) overrides: bool,
}

/// What time has brought.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Due {
    Nothing,
    /// It is to be asked at its station.
    Ask,
    /// It does not answer.
    Gone,
}

impl Entry {
    /// One that was heard of, without having been asked (RFC 4861 7.2.3).
    pub(super) fn heard(station: Station, now: u64) -> Self {
        Self { station, state: State::Stale, used: now }
    }

    /// Something is sent to it: whoever is not known to be there gets five seconds to show it (RFC 4861
    /// 7.3.3).
    pub(super) fn put_to_use(&mut self, now: u64) {
        self.used = now;
        match self.state {
            State::Reachable { until } if until > now => {}
            State::Reachable { .. } | State::Stale => {
                self.state = State::Delay { until: now + DELAY };
            }
            State::Delay { .. } | State::Probe { .. } => {}
        }
    }

    /// It may not be there any more: it is asked, unless it is already.
    pub(super) fn doubt(&mut self, now: u64) -> Due {
        if let State::Probe { .. } = self.state {
            return Due::Nothing;
        }
        self.state = State::Probe { at: now + RETRANSMIT, asked: 1 };
        Due::Ask
    }

    pub(super) fn is_reachable(&self, at: u64) -> bool {
        matches!(self.state, State::Reachable { until } if until > at)
    }

    /// It has shown that it is there.
    pub(super) fn confirm(&mut self, until: u64) {
        self.state = State::Reachable { until };
    }

    /// Its station was named in passing (RFC 4861 7.2.3): another one than known is not trusted yet.
    pub(super) fn hear(&mut self, station: Station) {
        if self.station != station {
            self.station = station;
            self.state = State::Stale;
        }
    }

    /// An advertisement (RFC 4861 7.2.5); whether it is believed.
    pub(super) fn advertise(&mut self, now: u64, claim: &Claim, until: u64) -> bool {
        let other = claim.station.filter(|station| *station != self.station);
        if let Some(station) = other {
            if !claim.overrides {
                // Two stations say that they have the address: the one known is asked again, if it counted
                // as there.
                if self.is_reachable(now) {
                    self.state = State::Stale;
                }
                return false;
            }
            self.station = station;
        }
        if claim.solicited {
            self.confirm(until);
        } else if other.is_some() {
            self.state = State::Stale;
        }
        true
    }

    pub(super) fn deadline(&self) -> u64 {
        match self.state {
            State::Reachable { .. } | State::Stale => NEVER,
            State::Delay { until } => until,
            State::Probe { at, .. } => at,
        }
    }

    /// RFC 4861 7.3.3: three questions a second apart, then it is gone.
    pub(super) fn pass(&mut self, now: u64) -> Due {
        let asked = match self.state {
            State::Delay { until } if until <= now => 0,
            State::Probe { at, asked } if at <= now => asked,
            _ => return Due::Nothing,
        };
        if asked >= MAX_UNICAST_SOLICIT {
            return Due::Gone;
        }
        self.state = State::Probe { at: now + RETRANSMIT, asked: asked + 1 };
        Due::Ask
    }
}
