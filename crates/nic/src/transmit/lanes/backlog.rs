//! What waits in a lane, as a running sum: an exchange with the port asks no queue pair.
//!
//! A queue pair is counted while it stands in the queue of its lane, and while it has a turn for a part of
//! what it has to transmit.

use quipu_qos::PACKET_OVERHEAD;

use crate::qp::{Path, Qp};
use crate::types::QpState;

/// Sizes of packets: 256 to 4096 octets of payload.
const SIZES: usize = 5;

/// What waits in a lane.
#[derive(Debug, Default)]
pub(super) struct Backlog {
    octets: u64,
    /// How many queue pairs wait with packets of each size.
    waiting: [u32; SIZES],
}

/// What a queue pair adds to the backlog of its lane.
#[derive(Debug, Default)]
pub(super) struct Share {
    octets: u64,
    /// Index of the size of its packets.
    size: u8,
}

impl Share {
    pub(super) fn is_empty(&self) -> bool {
        self.octets == 0
    }
}

impl Backlog {
    /// Sets what a queue pair adds, to so many octets in packets of this size.
    pub(super) fn set(&mut self, share: &mut Share, size: u8, octets: u64) {
        self.octets = self.octets.wrapping_sub(share.octets).wrapping_add(octets);
        if share.octets > 0 {
            self.waiting[usize::from(share.size) % SIZES] -= 1;
        }
        *share = Share { octets, size };
        if octets > 0 {
            self.waiting[usize::from(size) % SIZES] += 1;
        }
    }

    /// Removes what a queue pair adds.
    pub(super) fn remove(&mut self, share: &mut Share) {
        if share.octets > 0 {
            self.set(share, 0, 0);
        }
    }

    /// Octets that wait, headers included.
    pub(super) fn octets(&self) -> u64 {
        self.octets
    }

    /// The greatest packet of those that wait, in octets, headers included; 0 if none waits.
    pub(super) fn packet(&self) -> u32 {
        let greatest = self.waiting.iter().rposition(|&count| count > 0);
        greatest.map_or(0, |size| (256 << size) + PACKET_OVERHEAD)
    }
}

/// Index of the size of a queue pair's packets.
pub(super) fn size_of(qp: &Qp) -> u8 {
    match qp.attr.path_mtu {
        code @ 1..=5 => code - 1,
        _ => SIZES as u8 - 1,
    }
}

/// Octets of the greatest packet of a queue pair, headers included.
pub(super) fn packet_of(qp: &Qp) -> u32 {
    (256 << size_of(qp)) + PACKET_OVERHEAD
}

/// Packets that so much payload takes.
#[inline]
pub(super) fn packets(qp: &Qp, payload: u64) -> u64 {
    let shift = 8 + size_of(qp);
    ((payload + (1 << shift) - 1) >> shift).max(1)
}

/// Octets that so much payload takes, in packets.
#[inline]
pub(super) fn octets(qp: &Qp, payload: u64) -> u64 {
    payload + packets(qp, payload) * u64::from(PACKET_OVERHEAD)
}

/// The same of a queue pair of datagrams, each of which is a packet. It looks at no request: those of many
/// queue pairs are not in the processor's cache.
fn demand_of_datagrams(qp: &Qp) -> u64 {
    let requester = &qp.requester;
    let waits = requester.rnr_until.is_some() || requester.failing.is_some();
    if qp.state != QpState::Rts || waits {
        return 0;
    }
    let requests = u64::from(qp.sq.tail.wrapping_sub(qp.sq.next));
    requester.waiting_bytes + requests * u64::from(PACKET_OVERHEAD)
}

/// Octets that a queue pair could transmit now, in packets.
pub(super) fn demand(qp: &Qp) -> u64 {
    if let Path::Datagrams { .. } = qp.path {
        return demand_of_datagrams(qp);
    }
    use crate::stream::Answer;
    let owed: u64 = match &qp.path {
        Path::Stream(stream) => {
            let size = |answer: &Answer| match answer {
                Answer::Read { size, msg, .. } => size - msg.as_ref().map_or(0, |msg| msg.offset()),
                Answer::Atomic { .. } => 8,
            };
            stream.answers.iter().map(|answer| octets(qp, size(answer).into())).sum()
        }
        Path::Channel(path) if path.owed > 0 => octets(qp, path.owed.into()),
        Path::Tcp(path) if path.unhanded > 0 => octets(qp, path.unhanded.into()),
        _ => 0,
    };
    let begun = qp.requester.offset > 0 && qp.requester.failing.is_none();
    if !begun && !crate::requester::may_begin(qp) {
        return owed;
    }
    let direct = match &qp.path {
        Path::Channel(path) => path.direct_done,
        _ => 0,
    };
    let done = u64::from(direct.max(qp.requester.offset.saturating_sub(1)));
    let payload = qp.requester.waiting_bytes.saturating_sub(done);
    let requests = u64::from(qp.sq.tail.wrapping_sub(qp.sq.next));
    // Each begins a packet of its own.
    let packets = requests.max(1) * u64::from(PACKET_OVERHEAD);
    owed + octets(qp, payload) + packets - u64::from(PACKET_OVERHEAD)
}
