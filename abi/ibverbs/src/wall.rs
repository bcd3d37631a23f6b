//! The clock on the wall by that of a device.

use std::cell::Cell;
use std::time::{SystemTime, UNIX_EPOCH};

/// How far the clock on the wall is ahead of the device's, and when that was found out. Stamps of one poll
/// are told by one such difference: they keep their order, and each is the same whenever it is read.
#[derive(Debug, Default)]
pub(crate) struct Wall {
    /// In nanoseconds; wraps.
    ahead: Cell<u64>,
    /// By the device's clock.
    fitted: Cell<u64>,
    /// Whether stamps may be told by another difference from now on.
    due: Cell<bool>,
}

/// How long a difference is used, in nanoseconds: clocks that are set are followed within that time.
const LIFE: u64 = 1_000_000_000;
/// How often the clocks are compared to find the difference, of which the quickest comparison counts.
const COMPARISONS: usize = 4;

impl Wall {
    /// A new poll begins.
    pub(crate) fn renew(&self) {
        self.due.set(true);
    }

    /// The time on the wall, in nanoseconds since 1970, at the time `made` of the clock that `clock` reads.
    ///
    /// # Errors
    ///
    /// Those of `clock`.
    pub(crate) fn at<E>(&self, made: u64, clock: impl Fn() -> Result<u64, E>) -> Result<u64, E> {
        let fitted = self.fitted.get();
        if fitted == 0 || self.due.take() && made.saturating_sub(fitted) >= LIFE {
            self.fit(clock)?;
        }
        Ok(made.wrapping_add(self.ahead.get()))
    }

    fn fit<E>(&self, clock: impl Fn() -> Result<u64, E>) -> Result<(), E> {
        let mut quickest = u64::MAX;
        for _ in 0..COMPARISONS {
            let before = clock()?;
            let wall = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
            let after = clock()?;
            let took = after.saturating_sub(before);
            if took < quickest {
                quickest = took;
                self.ahead.set((wall.as_nanos() as u64).wrapping_sub(before + took / 2));
                self.fitted.set(after.max(1));
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_difference_is_kept_for_a_poll_and_a_second() {
        let fits = Cell::new(0);
        let clock = |now: u64| {
            let fits = &fits;
            move || {
                fits.set(fits.get() + 1);
                Ok::<_, ()>(now)
            }
        };
        let wall = Wall::default();
        let first = wall.at(5_000, clock(7_000)).unwrap();
        assert_eq!(fits.take(), 2 * COMPARISONS);
        assert_eq!(wall.at(6_000, clock(0)), Ok(first + 1_000));
        // Long after, but in the same poll.
        assert_eq!(wall.at(5_000 + 3 * LIFE, clock(0)), Ok(first + 3 * LIFE));
        wall.renew();
        assert_eq!(wall.at(6_999 + LIFE, clock(0)), Ok(first + 1_999 + LIFE));
        assert_eq!(fits.take(), 0);
        // A poll that begins later finds that the device's clock has gone slower.
        wall.renew();
        let made = 7_000 + LIFE;
        assert!(wall.at(made, clock(made)).unwrap() < first + LIFE);
        assert_eq!(fits.take(), 2 * COMPARISONS);
        assert_eq!(wall.at(made, clock(0)), wall.at(made, clock(0)));
    }
}
