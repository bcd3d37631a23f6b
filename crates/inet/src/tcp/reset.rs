//! Resets (RFC 9293 3.5.2).

use quipu_wire::tcp::{Flags, Repr, SeqNumber};

use super::seq::FIRST;
use super::{Connection, State};

/// The answer to a segment that belongs to no connection (RFC 9293 3.10.7.1, group 1 of 3.5.2); none to a
/// reset.
pub fn reset_for(segment: &Repr, payload: usize) -> Option<Repr> {
    if segment.flags.has(Flags::RST) {
        return None;
    }
    let numbers = payload as u32
        + u32::from(segment.flags.has(Flags::SYN))
        + u32::from(segment.flags.has(Flags::FIN));
    let reset = if segment.flags.has(Flags::ACK) {
        Repr { seq: segment.ack, flags: Flags::RST, ..Repr::default() }
    } else {
        let ack = segment.seq + numbers;
        Repr { seq: SeqNumber(0), ack, flags: Flags::RST | Flags::ACK, ..Repr::default() }
    };
    Some(Repr { source: segment.destination, destination: segment.source, ..reset })
}

impl Connection {
    /// Whether it goes on without the user's memory: both directions are closed and everything is
    /// acknowledged, save perhaps the FIN.
    pub fn needs_no_user(&self) -> bool {
        match self.state {
            State::Closed | State::TimeWait => true,
            State::Closing | State::LastAck => self.queue.una >= self.queue.written,
            _ => false,
        }
    }

    /// The peer is to be told that the connection is gone. Only the number that it expects resets it: one
    /// that is within its window is challenged, and one beyond it dropped (RFC 9293 3.10.7.4, RFC 5961 3.2).
    /// What it expects is not known while anything is on the way: it may have taken all of it, or, behind a
    /// loss or a closed window, nothing, or what its window had room for. Each of them gets a reset, the last
    /// first. Who has gone by one of them knows nothing of the others; and a challenge, if the truth lies
    /// between, might come when the program, and with it this stack, is gone.
    pub(super) fn send_reset(&mut self) {
        self.reset = Some(self.reset_at(self.queue.nxt));
    }

    /// What is to follow a reset that goes out.
    pub(super) fn next_reset(&self, reset: &Repr) -> Option<Box<Repr>> {
        let una = self.queue.una;
        // The answer to a segment has its number from there; before the SYN is acknowledged one is enough.
        if !reset.flags.has(Flags::ACK) || una < FIRST {
            return None;
        }
        let last = self.queue.space.position(una, reset.seq)?;
        let next = if self.window.edge < last { self.window.edge.max(una) } else { una };
        (next < last).then(|| self.reset_at(next))
    }

    fn reset_at(&self, position: u64) -> Box<Repr> {
        Box::new(Repr {
            source: self.source,
            destination: self.destination,
            seq: self.queue.space.wire(position),
            ack: self.receive.space.wire(self.receive.nxt),
            flags: Flags::RST | Flags::ACK,
            ..Repr::default()
        })
    }

    /// An acknowledgement of something never sent, before the connection stands (group 2 of RFC 9293 3.5.2).
    pub(super) fn refuse(&mut self, segment: &Repr) {
        self.reset = reset_for(segment, 0).map(Box::new);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_segment_to_nobody() {
        let segment = |flags| Repr {
            source: 1,
            destination: 2,
            seq: SeqNumber(100),
            ack: SeqNumber(500),
            flags,
            ..Repr::default()
        };
        let reset = reset_for(&segment(Flags::ACK), 10).unwrap();
        assert_eq!((reset.seq, reset.flags), (SeqNumber(500), Flags::RST));
        let reset = reset_for(&segment(Flags::SYN | Flags::FIN), 10).unwrap();
        assert_eq!((reset.seq, reset.ack), (SeqNumber(0), SeqNumber(112)));
        assert_eq!((reset.source, reset.destination), (2, 1));
        assert_eq!(reset.flags, Flags::RST | Flags::ACK);
        assert_eq!(reset_for(&segment(Flags::RST | Flags::ACK), 0), None);
    }
}
