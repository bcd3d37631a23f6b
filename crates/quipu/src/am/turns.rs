//! Which polls of a port look at lanes only.
//!
//! A look at lanes takes a fifth of the time of a poll of the completion queue, which also comes between a
//! message in a lane and its receiver. So while messages come in lanes, most polls are looks.

/// Looks that find nothing, in a row, before the completion queue is polled: together they take as long as a
/// cache line from the other processor. More of them would keep messages of the queue pair waiting.
const LOOKS: u32 = 16;
/// Messages of lanes between two polls of the completion queue.
const MESSAGES: u32 = 64;

/// What the last polls have found.
#[derive(Debug, Default)]
pub(super) struct Turns {
    /// The last message has come in a lane.
    is_hot: bool,
    /// Looks that are left before the completion queue is polled.
    looks: u32,
    /// Messages of lanes since it was.
    messages: u32,
    /// Looks in a row that have found nothing.
    empty: u32,
    /// The last poll was a look that has found nothing.
    is_look: bool,
}

impl Turns {
    /// Whether lanes have their turn before the completion queue.
    #[inline(always)]
    pub(super) fn is_of_lanes(&self) -> bool {
        self.messages < MESSAGES
    }

    /// A lane had a message.
    #[inline(always)]
    pub(super) fn found_in_lane(&mut self) {
        self.messages += 1;
        (self.is_hot, self.is_look) = (true, false);
        (self.looks, self.empty) = (LOOKS, 0);
    }

    /// A look has found nothing; whether that will do for this poll.
    #[inline(always)]
    pub(super) fn found_no_line(&mut self) -> bool {
        if self.looks == 0 {
            return false;
        }
        self.looks -= 1;
        self.empty = self.empty.wrapping_add(1);
        self.is_look = true;
        true
    }

    /// The completion queue was polled, and had something or not.
    #[inline(always)]
    pub(super) fn polled(&mut self, found: bool) {
        (self.messages, self.is_look) = (0, false);
        self.is_hot &= !found;
        self.looks = if self.is_hot { LOOKS } else { 0 };
    }

    /// How many looks in a row have found nothing, if the last poll was one; else 0.
    #[inline(always)]
    pub(super) fn empty_looks(&self) -> u32 {
        if self.is_look { self.empty } else { 0 }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Empty polls before the next one that polls the completion queue.
    fn looks_before_poll(turns: &mut Turns) -> u32 {
        let mut looks = 0;
        while turns.found_no_line() {
            looks += 1;
            assert_eq!(turns.empty_looks() % LOOKS, looks % LOOKS);
        }
        turns.polled(false);
        assert_eq!(turns.empty_looks(), 0);
        looks
    }

    #[test]
    fn the_completion_queue_is_polled_each_time_until_a_lane_has_a_message() {
        let mut turns = Turns::default();
        assert_eq!([0; 3].map(|_| looks_before_poll(&mut turns)), [0; 3]);
        turns.found_in_lane();
        assert_eq!([0; 3].map(|_| looks_before_poll(&mut turns)), [LOOKS; 3]);
        turns.polled(true);
        assert_eq!(looks_before_poll(&mut turns), 0, "the last message came over the queue pair");
    }

    #[test]
    fn a_lane_that_always_has_a_message_leaves_turns_to_the_completion_queue() {
        let mut turns = Turns::default();
        for _ in 0..MESSAGES {
            assert!(turns.is_of_lanes());
            turns.found_in_lane();
        }
        assert!(!turns.is_of_lanes());
        turns.polled(false);
        assert!(turns.is_of_lanes());
    }
}
