//! How long a glance waits for an answer before it says that nothing is there.
//!
//! A program that has asked for something polls until the answer comes, and what it does from one poll to the
//! next takes longer than the poll: what comes meanwhile lies there until it is back. So its polls look for
//! about as long as that takes, in the conversations where each message answers the one before, and a few
//! times only: what has not come by then is not about to come.

use crate::qp::{Path, Qp};

/// Polls that may wait for an answer.
const POLLS: u8 = 4;

/// Whether the next glance waits.
#[derive(Debug, Default)]
pub(crate) struct Linger {
    /// How many more may.
    polls: u8,
}

impl Linger {
    /// How often the next one looks, where those that wait look `most` times.
    #[inline(always)]
    pub(crate) fn looks(&self, most: u32) -> u32 {
        if self.polls > 0 { most } else { 1 }
    }

    /// Something came: `answer` says whether that is the answer to the only request that was under way, so
    /// that the program may ask again.
    #[inline(always)]
    pub(crate) fn note(&mut self, answer: bool) {
        if answer {
            self.polls = POLLS;
        }
    }

    /// Nothing came.
    #[inline(always)]
    pub(crate) fn in_vain(&mut self) {
        self.polls = self.polls.saturating_sub(1);
    }
}

/// Whether one request is under way. A stream has many, and its polls are not to be held up.
#[inline(always)]
pub(crate) fn asks_once(qp: &Qp) -> bool {
    qp.requester.started.wrapping_sub(qp.requester.acked) == 1
}

/// Whether that is so, and the message at the front of the ring, if there is one, says that the peer has
/// executed it.
#[inline]
pub(crate) fn is_answered(qp: &mut Qp) -> bool {
    let asks = asks_once(qp);
    let Path::Channel(path) = &mut qp.path else { return false };
    let header = path.channel.incoming.requests.peek();
    asks && header.is_some_and(|header| header.ack == qp.requester.started)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_waits_in_vain_is_not_held_up_for_long() {
        let mut linger = Linger::default();
        assert_eq!(linger.looks(50), 1, "nobody has answered yet");
        linger.note(true);
        linger.note(false);
        for _ in 0..POLLS {
            assert_eq!(linger.looks(50), 50);
            linger.in_vain();
        }
        assert_eq!(linger.looks(50), 1);
        linger.in_vain();
        linger.note(false);
        assert_eq!(linger.looks(50), 1);
        linger.note(true);
        assert_eq!(linger.looks(50), 50);
    }
}
