//! Interrupt causes, their mask, and how often the processor is interrupted.

use super::Io;

/// How the delay of an interrupt counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Delay {
    /// From the last interrupt: the first one comes at once.
    SinceLast(u64),
    /// From the cause.
    SinceCause(u64),
}

/// Causes that are pending, and the interrupt that tells of them.
#[derive(Clone, Debug)]
pub(crate) struct Moderation {
    delay: Delay,
    /// Causes for which the interrupt does not wait.
    urgent: u64,
    /// Number of the timer.
    timer: u32,
    causes: u64,
    mask: u64,
    last: Option<u64>,
    /// When the interrupt is due.
    due: Option<u64>,
    /// An interrupt clears its causes.
    auto_clear: bool,
}

impl Moderation {
    /// No cause, and all masked. `timer` is the number for [`Io::after`].
    pub(crate) fn new(delay: Delay, urgent: u64, timer: u32) -> Self {
        Self { delay, urgent, timer, causes: 0, mask: 0, last: None, due: None, auto_clear: false }
    }

    /// The causes that interrupt.
    pub(crate) fn mask(&self) -> u64 {
        self.mask
    }

    /// Clears causes and says which there were.
    pub(crate) fn clear(&mut self, causes: u64) -> u64 {
        let were = self.causes;
        self.causes &= !causes;
        were
    }

    /// Lets these causes interrupt, and no others.
    pub(crate) fn set_mask(&mut self, io: &mut Io<'_>, mask: u64) {
        self.mask = mask;
        self.schedule(io);
    }

    /// Whether an interrupt clears its causes.
    pub(crate) fn set_auto_clear(&mut self, auto_clear: bool) {
        self.auto_clear = auto_clear;
    }

    /// A cause is there.
    pub(crate) fn raise(&mut self, io: &mut Io<'_>, causes: u64) {
        self.causes |= causes;
        self.schedule(io);
    }

    fn schedule(&mut self, io: &mut Io<'_>) {
        let wanted = self.causes & self.mask;
        if wanted == 0 {
            return;
        }
        let now = io.now();
        let at = match self.delay {
            _ if wanted & self.urgent != 0 => now,
            Delay::SinceLast(delay) => self.last.map_or(now, |last| now.max(last + delay)),
            Delay::SinceCause(delay) => now + delay,
        };
        // A later cause is told with the interrupt that is due already.
        if self.due.is_none_or(|due| at < due) {
            self.due = Some(at);
            io.after(at - now, self.timer);
        }
    }

    /// The timer: interrupts if it is due and there is still a cause.
    pub(crate) fn expire(&mut self, io: &mut Io<'_>) {
        if self.due != Some(io.now()) {
            return;
        }
        self.due = None;
        if self.causes & self.mask != 0 {
            self.last = Some(io.now());
            if self.auto_clear {
                self.causes &= !self.mask;
            }
            io.interrupt();
        }
    }
}
