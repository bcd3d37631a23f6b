//! Small requests that the peer is offered before they are executed in its memory by the kernel: a peer that
//! looks has executed one in a tenth of the time that the system call takes.
//!
//! It may not look, though, as one-sided programs do, and the request may not wait for it. So what it has not
//! taken within a few looks at its count, or its answers, is taken back, and goes directly.

use quipu_mem::ring::{INLINE_MAX, SlotHeader, SlotWriter};

use super::channel::{count, has_right_of_way, put_payload, small_len, told_along};
use super::direct::open_link;
use crate::adapter::Hub;
use crate::channel::{Other, request};
use crate::probe::{Probe, Stage};
use crate::qp::{Path, Qp};
use crate::receive;
use crate::requester;
use crate::types::{Payload, SendOp, SendWr};

/// Whether requests are offered to a peer: seldom to one that leaves them alone.
#[derive(Debug, Default)]
pub(crate) struct Offers {
    /// Requests that were not offered behind the last one that was left alone: at most 255.
    skip: u8,
    /// How many of those are still to come.
    left: u8,
}

impl Offers {
    /// Whether the next one is to be offered.
    #[inline]
    fn is_due(&mut self) -> bool {
        let due = self.left == 0;
        self.left = self.left.saturating_sub(1);
        due
    }

    fn taken(&mut self) {
        self.skip /= 2;
    }

    fn left_alone(&mut self) {
        self.skip = self.skip.saturating_mul(2).saturating_add(1);
        self.left = self.skip;
    }
}

/// Has the peer execute a small write or read while it is being posted, where nothing stands before
/// it. `false` if it is none, or the peer did not take it: nothing was done then. A peer that took it, but is
/// not done, has it as a request like any other, which completes later.
#[inline]
pub(crate) fn offer_at_once<P: Probe>(qp: &mut Qp, hub: &mut Hub<P>, wr: &SendWr<'_>) -> bool {
    let asks = match wr.op {
        SendOp::Write { .. } => false,
        SendOp::Read { .. } => true,
        _ => return false,
    };
    if hub.config.offer_looks == 0 || hub.probe.watches() {
        return false;
    }
    let longest = INLINE_MAX.min(hub.config.max_message as usize);
    let length = small_len(&qp.sq, wr.payload).filter(|length| (1..=longest).contains(length));
    let Some(length) = length else { return false };
    has_right_of_way(qp, hub, wr)
        && (!asks || may_ask(qp, hub, wr, length))
        && is_wanted(qp, hub)
        && offer(qp, hub, wr, length)
}

/// Whether an offer may be taken, and would be a gain.
#[inline]
fn is_wanted<P>(qp: &mut Qp, hub: &Hub<P>) -> bool {
    // Behind what is not executed it would wait for that.
    let Some((_, state)) = open_link(qp, &hub.links) else { return false };
    // Where nothing goes directly it is a message like any other; where memory is mapped it takes less
    // than to be offered.
    let memory = state.link.peer_memory.as_ref();
    let gains = state.is_looked_at() && memory.is_some_and(|memory| !memory.is_mapped());
    let Path::Channel(path) = &mut qp.path else { return false };
    gains && path.offers.is_due()
}

/// Whether the answer to a request can be told from others, and has a place here.
fn may_ask<P>(qp: &Qp, hub: &Hub<P>, wr: &SendWr<'_>, length: usize) -> bool {
    let Payload::Sges(list) = wr.payload else { return false };
    let placed = hub.regions.check_list(qp.pd_number(), list, 0, length as u64, true);
    qp.requester.reads == 0 && placed.is_ok()
}

/// Opcode and place of a request; and what it carries is put into its slot: how many bytes.
fn fill<P>(
    slot: &SlotWriter<'_>,
    (hub, pd): (&Hub<P>, u32),
    wr: &SendWr<'_>,
    length: usize,
) -> Option<(u8, u64, u32, usize)> {
    match wr.op {
        SendOp::Write { addr, rkey } => put_payload(slot, hub, pd, wr.payload, length).then_some((
            request::WRITE,
            addr,
            rkey,
            length,
        )),
        SendOp::Read { addr, rkey } => Some((request::READ, addr, rkey, 0)),
        _ => None,
    }
}

fn offer<P: Probe>(qp: &mut Qp, hub: &mut Hub<P>, wr: &SendWr<'_>, length: usize) -> bool {
    let pd = qp.pd_number();
    let Qp { path: Path::Channel(path), sq, requester, responder, .. } = qp else { return false };
    let Other::Linked { link, bell, .. } = path.other else { return false };
    let (outgoing, incoming) = (&mut path.channel.outgoing, &mut path.channel.incoming);
    let Ok(slot) = outgoing.requests.reserve() else { return false };
    let Some((opcode, raddr, rkey, carried)) = fill(&slot, (hub, pd), wr, length) else {
        return false;
    };
    let asks = opcode == request::READ;
    let offer = slot.offer(&SlotHeader {
        opcode,
        inline_len: carried as u16,
        length: length as u32,
        raddr,
        rkey,
        ack: responder.executed,
        ..SlotHeader::default()
    });
    // It may not have looked at this channel for long.
    if outgoing.control.must_ring() {
        hub.ring(link, bell);
    }
    let next = requester.started.wrapping_add(1);
    let done = (0..hub.config.offer_looks).any(|_| {
        std::hint::spin_loop();
        if asks { incoming.responses.is_filled() } else { outgoing.control.executed() == next }
    });
    if !done && outgoing.requests.withdraw(offer) {
        path.offers.left_alone();
        return false;
    }
    if done {
        path.offers.taken();
    }
    if asks {
        sq.push(wr, length as u32);
        count(qp);
        requester::transmitted(qp);
    } else {
        sq.push_transmitted(wr, length as u32, requester.started..next);
        requester.started = next;
        hub.probe.stage(Stage::GetData, length);
    }
    told_along(qp, hub);
    match (done, asks) {
        (true, true) => receive::channel::take_answers(qp, hub),
        // It is the last one that was asked for.
        (true, false) => _ = requester::acknowledge(qp, hub, next),
        (false, _) => {}
    }
    true
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_leaves_offers_alone_is_seldom_made_one() {
        let mut offers = Offers::default();
        let mut made = 0;
        for _ in 0..10_000 {
            if offers.is_due() {
                made += 1;
                offers.left_alone();
            }
        }
        // At 0, 2, 6, 14 ... 126; then at 254, and each 256 behind that.
        assert_eq!(made, 7 + (9_999 - 254) / 256 + 1);
        for _ in 0..8 {
            offers.taken();
        }
        assert_eq!(offers.skip, 0);
        while !offers.is_due() {}
        assert!((0..100).all(|_| offers.is_due()), "all are made to who takes them");
    }
}
