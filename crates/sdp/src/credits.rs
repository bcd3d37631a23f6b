//! Message numbers and credits of both directions.

use crate::PeerMisbehaved;

/// Credits that only control messages may use (CA4-82).
const RESERVED: u32 = 2;

/// What this end may send.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Outgoing {
    /// Number of the next message.
    next: u32,
    /// The last message that the peer has acknowledged.
    acked: u32,
    /// Receive buffers that the peer had when it said so.
    peer_bufs: u16,
}

impl Outgoing {
    pub(crate) fn new(peer_bufs: u16) -> Self {
        Self { next: 1, acked: 0, peer_bufs }
    }

    /// Messages that may be sent now.
    pub(crate) fn credits(&self) -> u32 {
        let under_way = self.next.wrapping_sub(1).wrapping_sub(self.acked);
        u32::from(self.peer_bufs).saturating_sub(under_way)
    }

    pub(crate) fn may_send_payload(&self) -> bool {
        self.credits() > RESERVED
    }

    pub(crate) fn may_send_control(&self) -> bool {
        self.credits() > 1
    }

    /// Takes the number of the next message.
    pub(crate) fn take_number(&mut self) -> u32 {
        let number = self.next;
        self.next = number.wrapping_add(1);
        number
    }

    /// The last number that was taken.
    pub(crate) fn last_number(&self) -> u32 {
        self.next.wrapping_sub(1)
    }

    /// The peer has sent a message with these fields.
    pub(crate) fn acknowledge(&mut self, mseq_ack: u32, bufs: u16) -> Result<(), PeerMisbehaved> {
        let fresh = mseq_ack.wrapping_sub(self.acked);
        if fresh > self.last_number().wrapping_sub(self.acked) {
            return Err(PeerMisbehaved::Acknowledgement(mseq_ack));
        }
        (self.acked, self.peer_bufs) = (mseq_ack, bufs);
        Ok(())
    }

    /// Whether the peer has acknowledged a message.
    pub(crate) fn has_acked(&self, number: u32) -> bool {
        self.last_number().wrapping_sub(number) >= self.last_number().wrapping_sub(self.acked)
    }
}

/// What the peer may send.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Incoming {
    /// The last message that came.
    last: u32,
    /// Receives that are posted.
    posted: u16,
    /// What the peer may send of what it knows: the number of the last such message.
    granted: u32,
    /// Messages from this number on are not acknowledged yet: a cancellation is being worked on.
    held: Option<u32>,
}

impl Incoming {
    pub(crate) fn new(posted: u16) -> Self {
        Self { last: 0, posted, granted: posted.into(), held: None }
    }

    /// A message has come.
    pub(crate) fn receive(&mut self, mseq: u32) -> Result<(), PeerMisbehaved> {
        let expected = self.last.wrapping_add(1);
        if mseq != expected {
            return Err(PeerMisbehaved::Sequence { expected, got: mseq });
        }
        self.last = mseq;
        self.posted = self.posted.saturating_sub(1);
        Ok(())
    }

    pub(crate) fn post(&mut self) {
        self.posted += 1;
    }

    pub(crate) fn posted(&self) -> u16 {
        self.posted
    }

    /// Whether the peer should hear of buffers that were posted since it last heard of any.
    pub(crate) fn owes_credits(&self) -> bool {
        // A peer that sends more than it may has less than none.
        let left = self.granted.wrapping_sub(self.last).cast_signed().max(0).cast_unsigned();
        let counted = if left > RESERVED { left + left / 2 } else { left };
        // While an acknowledgement is held back, a message may have nothing new to tell.
        self.next_granted() != self.granted && counted < u32::from(self.posted)
    }

    /// The fields of a message that is about to be sent: receives posted, and the acknowledgement.
    pub(crate) fn grant(&mut self) -> (u16, u32) {
        self.granted = self.next_granted();
        (self.posted, self.acknowledgement())
    }

    fn acknowledgement(&self) -> u32 {
        self.held.map_or(self.last, |held| held.wrapping_sub(1))
    }

    fn next_granted(&self) -> u32 {
        self.acknowledgement().wrapping_add(self.posted.into())
    }

    pub(crate) fn hold(&mut self) {
        self.held.get_or_insert(self.last);
    }

    pub(crate) fn release(&mut self) {
        self.held = None;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn credits_are_what_the_peer_has_posted_less_what_is_under_way() {
        let mut out = Outgoing::new(64);
        (1..8).for_each(|number| assert_eq!(out.take_number(), number));
        out.acknowledge(5, 64).unwrap();
        assert_eq!(out.credits(), 62);
        out.acknowledge(7, 2).unwrap();
        assert!(out.may_send_control() && !out.may_send_payload());
        out.acknowledge(7, 1).unwrap();
        assert!(!out.may_send_control());
        assert_eq!(out.acknowledge(8, 9), Err(PeerMisbehaved::Acknowledgement(8)));
        assert_eq!(out.acknowledge(6, 9), Err(PeerMisbehaved::Acknowledgement(6)));
    }

    #[test]
    fn numbers_wrap() {
        let mut out = Outgoing { next: u32::MAX, acked: u32::MAX - 1, peer_bufs: 4 };
        assert_eq!((out.take_number(), out.take_number()), (u32::MAX, 0));
        assert_eq!(out.credits(), 2);
        assert!(!out.has_acked(u32::MAX));
        out.acknowledge(u32::MAX, 4).unwrap();
        assert!(out.has_acked(u32::MAX) && !out.has_acked(0));
        out.acknowledge(0, 4).unwrap();
        assert!(out.has_acked(0));
    }

    #[test]
    fn an_update_is_due_when_a_third_of_the_buffers_came_back() {
        let mut incoming = Incoming::new(64);
        assert!(!incoming.owes_credits());
        for number in 1..=21 {
            incoming.receive(number).unwrap();
            incoming.post();
            assert!(!incoming.owes_credits(), "{number}");
        }
        incoming.receive(22).unwrap();
        incoming.post();
        assert!(incoming.owes_credits());
        assert_eq!(incoming.grant(), (64, 22));
        assert!(!incoming.owes_credits());
    }

    /// Found by the fuzz target.
    #[test]
    fn a_peer_that_sends_more_than_it_may_is_owed_credits() {
        let mut incoming = Incoming::new(2);
        incoming.grant();
        (1..=5).for_each(|number| incoming.receive(number).unwrap());
        assert!(!incoming.owes_credits(), "no buffer is posted");
        incoming.post();
        assert!(incoming.owes_credits());
    }

    #[test]
    fn the_acknowledgement_of_a_cancellation_is_held_back() {
        let mut incoming = Incoming::new(8);
        incoming.receive(1).unwrap();
        incoming.receive(2).unwrap();
        incoming.hold();
        incoming.receive(3).unwrap();
        assert_eq!(incoming.grant().1, 1);
        incoming.release();
        assert_eq!(incoming.grant().1, 3);
    }

    #[test]
    fn nothing_is_told_twice_while_an_acknowledgement_is_held_back() {
        let mut incoming = Incoming::new(8);
        incoming.receive(1).unwrap();
        incoming.hold();
        for mseq in 2..8 {
            incoming.receive(mseq).unwrap();
            incoming.post();
        }
        assert!(incoming.owes_credits());
        incoming.grant();
        assert!(!incoming.owes_credits(), "the peer knows all that it may");
        incoming.post();
        assert!(incoming.owes_credits());
        incoming.grant();
        incoming.release();
        assert!(incoming.owes_credits());
        incoming.grant();
        assert!(!incoming.owes_credits());
    }
}
