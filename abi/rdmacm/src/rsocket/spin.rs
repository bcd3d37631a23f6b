//! How long a call polls before it sleeps.

use std::time::{Duration, Instant};

/// About what a sleep costs beyond the time slept: to ask to be woken, to have a thread woken, and that to
/// wake this one. rsocket(7) has such a time too, `polling_time`.
const TIME: Duration = Duration::from_micros(30);

/// The polls before one sleep.
#[derive(Default)]
pub(crate) struct Spin {
    until: Option<Instant>,
}

impl Spin {
    /// Whether to poll once more. The time runs from the first question on.
    pub(crate) fn goes_on(&mut self) -> bool {
        let now = Instant::now();
        now < *self.until.get_or_insert(now + TIME)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn polls_are_over_after_a_moment() {
        let (mut spin, begun) = (Spin::default(), Instant::now());
        assert!(spin.goes_on());
        while spin.goes_on() {}
        assert!(begun.elapsed() >= TIME);
        assert!(!spin.goes_on());
    }
}
