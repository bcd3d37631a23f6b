//! The transmit state machine: picks the next endpoint to serve and builds what goes out.
//!
//! Streams are served round robin, each for one buffer of the caller's; channels at once, since a ring
//! write needs nobody's permission.

pub(crate) mod channel;
pub(crate) mod direct;
pub(crate) mod frames;
mod gather;
pub(crate) mod lanes;
mod last_words;
pub(crate) mod marking;
pub(crate) mod offer;
mod references;
pub(crate) mod stream;

pub use gather::{Gather, Piece};
pub use lanes::PortShare;
pub(crate) use last_words::LastWords;
pub use marking::Marking;

use crate::adapter::Adapter;
use crate::connect::Phase;
use crate::probe::{Probe, Stage};
use crate::qp::{Path, Qp};
use crate::receive;
use crate::stream::{GATHER_BYTES, GATHER_REQUESTS};
use crate::types::{ConnId, Time};

/// Bytes into which something always fits, whatever there is to transmit.
const ROOM_BYTES: usize = 1500;

/// Whether what a queue pair's stream has to transmit is better sent now.
#[inline]
fn is_urgent(qp: &Qp) -> bool {
    let Path::Stream(stream) = &qp.path else { return true };
    let waiting = qp.sq.tail.wrapping_sub(qp.sq.next);
    let idle = qp.requester.started == qp.requester.acked;
    (waiting > 0 && idle)
        || waiting >= GATHER_REQUESTS
        || qp.requester.waiting_bytes >= GATHER_BYTES
        || stream.has_urgent()
        || stream.ack_is_urgent(qp.responder.executed)
}

impl<P: Probe> Adapter<P> {
    /// The next stream with something to transmit, in round robin order. Call
    /// [`transmit`](Self::transmit) for it until that gives 0, or until its socket is full.
    #[inline]
    pub fn next_transmit(&mut self) -> Option<ConnId> {
        let conn = self.next_ready()?;
        self.hub.probe.stage(Stage::Schedule, 0);
        if let Some(stream) = self.stream_of(conn) {
            stream.is_ready = false;
        }
        Some(conn)
    }

    /// The next stream of the world below; those over the adapter's own TCP take what they have meanwhile.
    #[inline]
    fn next_ready(&mut self) -> Option<ConnId> {
        loop {
            let conn = self.hub.ready.pop_front()?;
            if self.hub.inet.is_none() {
                return Some(conn);
            }
            match self.tcp_under(conn) {
                Some(connection) => self.fill(conn, connection),
                None => return Some(conn),
            }
        }
    }

    /// Whether some stream has something to transmit.
    #[inline]
    #[must_use]
    pub fn wants_transmit(&self) -> bool {
        !self.hub.ready.is_empty()
    }

    /// Whether what `conn` has to transmit is better sent now than gathered with what will follow: nothing
    /// is in flight, an answer is owed, or enough has gathered.
    #[must_use]
    pub fn is_urgent(&self, conn: ConnId) -> bool {
        let Some(state) = self.hub.conns.get(conn) else { return false };
        state.qp.and_then(|qp| self.qps.get(qp)).is_none_or(is_urgent)
    }

    /// As [`next_transmit`](Self::next_transmit), and whether that [is urgent](Self::is_urgent).
    #[inline]
    pub fn next_urgency(&mut self) -> Option<(ConnId, bool)> {
        let conn = self.next_ready()?;
        self.hub.probe.stage(Stage::Schedule, 0);
        let Some(state) = self.hub.conns.get(conn) else { return Some((conn, false)) };
        let Some(qp) = state.qp.and_then(|qp| self.qps.get_mut(qp)) else {
            return Some((conn, true));
        };
        if let Path::Stream(stream) = &mut qp.path {
            stream.is_ready = false;
        }
        Some((conn, is_urgent(qp)))
    }

    /// Fills `out` with what `conn` has to transmit; how many bytes. 0 means that there is nothing more, or
    /// that `out` is too short for what comes next: 1500 bytes always suffice for something.
    pub fn transmit(&mut self, now: Time, conn: ConnId, out: &mut [u8]) -> usize {
        self.transmit_from_memory(now, conn, out, &mut Gather::default())
    }

    /// As [`transmit`](Self::transmit), but large payloads stay where they are: `gather`, which is cleared
    /// first, says where that is, and what comes before each in `out`, and whether that
    /// [was all](Gather::is_final). What may end the connection asks for its [`Close`](crate::Action::Close),
    /// before which there is more to transmit.
    pub fn transmit_from_memory(
        &mut self,
        now: Time,
        conn: ConnId,
        out: &mut [u8],
        gather: &mut Gather,
    ) -> usize {
        self.hub.now = now;
        gather.clear();
        let Some(state) = self.hub.conns.get_mut(conn) else { return 0 };
        match &mut state.phase {
            Phase::Open => self.transmit_open(conn, out, 0, gather),
            Phase::Initiating(initiator) => initiator.poll_transmit(out),
            Phase::Closing(Some(farewell)) => farewell.transmit(out),
            Phase::Greeting(_) => {
                let greeted = self.greet(conn, out);
                self.transmit_open(conn, out, greeted, gather)
            }
            _ => 0,
        }
    }

    /// Fills `out`, of which `used` bytes are used already, if the stream is open.
    #[inline]
    fn transmit_open(
        &mut self,
        conn: ConnId,
        out: &mut [u8],
        used: usize,
        gather: &mut Gather,
    ) -> usize {
        let Some(state) = self.hub.conns.get(conn) else { return used };
        let (Phase::Open, Some(id)) = (&state.phase, state.qp) else { return used };
        match self.qp_and_hub(id) {
            Some((qp, hub)) => stream::run(qp, hub, out, used, gather),
            None => used,
        }
    }

    /// Whether there is anything for [`settle_taken`](Self::settle_taken) to do.
    #[inline]
    #[must_use]
    pub fn has_taken(&self) -> bool {
        self.hub.unsettled.is_some()
    }

    /// Whether there is anything for [`release_acks`](Self::release_acks) to do.
    #[must_use]
    pub fn owes_acks(&self) -> bool {
        !self.hub.ack_due.is_empty() || self.hub.unsettled.is_some()
    }

    /// Lists every stream that owes its peer an acknowledgement among those with something to transmit, and
    /// acknowledges what channels owe. To be called when nothing else is to be expected soon that the
    /// acknowledgement could travel with.
    #[inline]
    pub fn release_acks(&mut self) {
        self.settle_taken();
        while let Some(id) = self.hub.ack_due.pop() {
            let Some((qp, hub)) = self.qp_and_hub(id) else { continue };
            match &mut qp.path {
                Path::Stream(stream) => {
                    stream.owes_ack = false;
                    if stream.acked != qp.responder.executed {
                        stream.make_ready(&mut hub.ready);
                    }
                }
                Path::Channel(_) => receive::channel::release_ack(qp, hub),
                _ => {}
            }
        }
    }
}
