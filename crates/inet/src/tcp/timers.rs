//! The timers of a connection: a small table, of which the stack sees the earliest.

/// No deadline.
pub(crate) const NEVER: u64 = u64::MAX;

/// What runs out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Timer {
    /// The retransmission timeout (RFC 6298).
    Retransmit,
    /// The probe timeout of TLP (RFC 8985 7).
    LossProbe,
    /// The reordering window of RACK (RFC 8985 6.3).
    Reorder,
    /// The window probe (RFC 9293 3.8.6.1), and the override of silly-window avoidance (3.8.6.2.1).
    Persist,
    /// The delayed acknowledgement (RFC 9293 3.8.6.3).
    Ack,
    /// The next probe of an idle peer (RFC 9293 3.8.4).
    KeepAlive,
    /// 2 MSL, or the user timeout: a connection waits for one or the other.
    End,
}

const ALL: [Timer; 7] = [
    Timer::Retransmit,
    Timer::LossProbe,
    Timer::Reorder,
    Timer::Persist,
    Timer::Ack,
    Timer::KeepAlive,
    Timer::End,
];

#[derive(Clone, Debug)]
pub(crate) struct Timers {
    deadlines: [u64; ALL.len()],
}

impl Default for Timers {
    fn default() -> Self {
        Self { deadlines: [NEVER; ALL.len()] }
    }
}

impl Timers {
    #[inline]
    pub(crate) fn set(&mut self, timer: Timer, at: u64) {
        self.deadlines[timer as usize] = at;
    }

    #[inline]
    pub(crate) fn stop(&mut self, timer: Timer) {
        self.set(timer, NEVER);
    }

    #[inline]
    pub(crate) fn is_running(&self, timer: Timer) -> bool {
        self.deadlines[timer as usize] != NEVER
    }

    pub(crate) fn stop_all(&mut self) {
        *self = Self::default();
    }

    /// The earliest deadline.
    #[inline]
    pub(crate) fn next(&self) -> u64 {
        self.deadlines.iter().copied().fold(NEVER, u64::min)
    }

    /// Takes one timer that has run out, in the order of the table.
    pub(crate) fn expired(&mut self, now: u64) -> Option<Timer> {
        let timer = ALL.into_iter().find(|timer| self.deadlines[*timer as usize] <= now)?;
        self.stop(timer);
        Some(timer)
    }
}
