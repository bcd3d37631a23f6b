//! How long a glance waits for an answer before it says that nothing is there.
//!
//! A program that has asked for something polls until the answer comes, and what it does from one poll to the
//! next takes longer than the poll: what comes meanwhile lies there until it is back. So its polls look for
//! about as long as that takes, in the conversations where each message answers the one before, and a few
//! times only: what has not come by then is not about to come.

use crate::qp::{Path, Qp};
use crate::types::CqId;

/// Polls that may wait for an answer in one channel.
const POLLS: u8 = 4;

/// Whether polls wait for what a peer may answer.
#[derive(Debug, Default)]
pub(crate) struct Linger {
    /// How many more may.
    polls: u8,
}

impl Linger {
    /// Whether the next one may.
    fn take(&mut self) -> bool {
        let may = self.polls > 0;
        self.polls = self.polls.saturating_sub(1);
        may
    }
}

/// Whether one request is under way. A stream has many, and its polls are not to be held up.
#[inline(always)]
fn asks_once(qp: &Qp) -> bool {
    qp.requester.started.wrapping_sub(qp.requester.acked) == 1
}

/// Whether a poll of `cq` waits for the answer to what `qp` has asked; then it is one of those that may.
#[inline]
pub(crate) fn take_turn(qp: &mut Qp, cq: CqId) -> bool {
    let awaited = asks_once(qp) && (qp.recv_cq == cq || qp.send_cq == cq);
    let Path::Channel(path) = &mut qp.path else { return false };
    awaited && path.linger.take()
}

/// Takes note that an answer was handed out, while the request that it answers still counts as under way.
#[inline(always)]
pub(crate) fn note_answer(qp: &mut Qp) {
    let alone = asks_once(qp);
    if let Path::Channel(path) = &mut qp.path
        && alone
    {
        path.linger.polls = POLLS;
    }
}

/// The same of the message at the front of the ring, if there is one and it is an answer.
#[inline]
pub(crate) fn note_front(qp: &mut Qp) {
    if !asks_once(qp) {
        return;
    }
    let Path::Channel(path) = &mut qp.path else { return };
    let header = path.channel.incoming.requests.peek();
    if header.is_some_and(|header| header.ack == qp.requester.started) {
        path.linger.polls = POLLS;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_waits_in_vain_is_not_held_up_for_long() {
        let mut linger = Linger::default();
        assert!(!linger.take(), "nobody has answered yet");
        linger.polls = POLLS;
        assert!((0..POLLS).all(|_| linger.take()));
        assert!(!linger.take());
        assert!(!linger.take());
    }
}
