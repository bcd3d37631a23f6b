//! Resets (RFC 9293 3.5.2).

use quipu_wire::tcp::{Flags, Repr, SeqNumber};

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

    /// The peer is to be told that the connection is gone.
    pub(super) fn send_reset(&mut self) {
        let reset = Repr {
            source: self.source,
            destination: self.destination,
            seq: self.queue.space.wire(self.queue.nxt),
            ack: self.receive.space.wire(self.receive.nxt),
            flags: Flags::RST | Flags::ACK,
            ..Repr::default()
        };
        self.reset = Some(Box::new(reset));
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
