//! Who sleeps at the descriptors of a socket.
//!
//! A descriptor wakes all who sleep at it, but each looks again before it returns: of what one has taken by
//! then another never hears. So what makes the descriptors of a socket readable, the completion event and the
//! events of its identifier, is taken only while nobody sleeps at them: by the last to come back, or whoever
//! comes later. Whoever comes back before others who are called as well does not sleep again until they are
//! there. Each of them is sure to come, as the descriptors stay readable, and waits for nobody on the way.

/// The threads that sleep at a socket's descriptors, those on the way there and back among them.
#[derive(Default)]
pub(crate) struct Sleepers {
    count: u32,
    /// A descriptor was readable to one that is back. The others are called, too.
    called: bool,
    /// Somebody who does not sleep here has left an event to those who do.
    left: bool,
}

impl Sleepers {
    pub(crate) fn lies_down(&mut self) {
        self.count += 1;
    }

    /// One is back, to whom a descriptor was readable or not; whether it is to take what is there.
    pub(crate) fn gets_up(&mut self, readable: bool) -> bool {
        self.count -= 1;
        self.called |= readable;
        if self.any() {
            return false;
        }
        std::mem::take(&mut self.called) | std::mem::take(&mut self.left)
    }

    /// Whether there are any, to whom what makes the descriptors readable is left.
    pub(crate) fn any(&self) -> bool {
        self.count > 0
    }

    /// Whether some were called and are not back, for whom those wait who want to sleep.
    pub(crate) fn are_called(&self) -> bool {
        self.called
    }

    /// Leaves an event to those who sleep, if there are any.
    pub(crate) fn leave(&mut self) -> bool {
        self.left = self.any();
        self.left
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_to_come_back_takes_what_has_woken_any() {
        let mut sleepers = Sleepers::default();
        for readable in [[true, false, false], [false, true, true], [false, false, true]] {
            (0..3).for_each(|_| sleepers.lies_down());
            assert!(!sleepers.gets_up(readable[0]));
            assert_eq!(sleepers.are_called(), readable[0]);
            assert!(!sleepers.gets_up(readable[1]) && sleepers.any());
            assert_eq!(sleepers.are_called(), readable[0] || readable[1]);
            assert!(sleepers.gets_up(readable[2]));
            assert!(!sleepers.are_called() && !sleepers.any());
        }
    }

    #[test]
    fn nothing_is_taken_when_nothing_has_come() {
        let mut sleepers = Sleepers::default();
        sleepers.lies_down();
        sleepers.lies_down();
        assert!(!sleepers.gets_up(false) && !sleepers.gets_up(false));
    }

    #[test]
    fn what_was_left_is_taken_and_calls_nobody() {
        let mut sleepers = Sleepers::default();
        assert!(!sleepers.leave());
        sleepers.lies_down();
        assert!(sleepers.leave() && !sleepers.are_called());
        assert!(sleepers.gets_up(false));
        sleepers.lies_down();
        assert!(!sleepers.gets_up(false));
    }
}
