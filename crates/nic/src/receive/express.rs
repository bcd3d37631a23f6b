//! Small sends of a peer on this host, the most frequent message: from their slots into receives, without a
//! look at anything that others need, and where a program waits for one, into its hands, past the completion
//! queue.

use quipu_mem::ring::SlotHeader;

use super::channel::{End, end_reception, may_wait, requester_ack, tell_executed};
use crate::adapter::Hub;
use crate::channel::{flag, request};
use crate::cq::Cq;
use crate::probe::{Probe, Stage};
use crate::qp::{Path, Qp};
use crate::responder::{self, Finish, Refusal};
use crate::types::{
    AsyncEvent, Completion, CqId, QpId, QpNum, QpState, QpType, WcExtra, WcOpcode, WcStatus,
};
use crate::watch;

/// Executes a small send into a receive of one element or none, without copying the receive out of its
/// queue, and has `finish` complete it. `false` if it is not of that kind.
#[inline(always)]
pub(super) fn place<P: Probe>(
    qp: &mut Qp,
    hub: &mut Hub<P>,
    header: &SlotHeader,
    finish: impl FnOnce(&mut Qp, &mut Hub<P>, Finish) -> Result<(), Refusal>,
) -> Result<bool, End> {
    let extra = match header.opcode {
        request::SEND => WcExtra::None,
        request::SEND_IMM => WcExtra::Imm(header.imm),
        _ => return Ok(false),
    };
    let len = header.length;
    let pd = qp.recv_pd_number();
    let Qp { path: Path::Channel(path), rq, responder, srq, qp_type, .. } = qp else {
        return Err(End::Over);
    };
    let inline = header.flags & !flag::SOLICITED == 0 && len == u32::from(header.inline_len);
    let begun = responder.receiving || responder.dropping || responder.holding;
    if !inline || qp_type.names_srq() || begun || !responder.established || path.stalled {
        return Ok(false);
    }
    let mut shared = srq.and_then(|id| Some((id, hub.srqs.get_mut(id)?)));
    let queue = shared.as_mut().map_or(rq, |(_, srq)| &mut srq.queue);
    let wr_id = match queue.front() {
        Some((wr_id, [sge])) if sge.len >= len => {
            let part = quipu_mem::Sge { len, ..*sge };
            let Ok(span) = hub.regions.local(pd, &part, true) else { return Ok(false) };
            path.channel.incoming.requests.payload().sub(0, len as usize).deliver_to(&span);
            wr_id
        }
        Some((wr_id, [])) if len == 0 => wr_id,
        _ => return Ok(false),
    };
    queue.advance();
    queue.prefetch();
    responder.receive.wr_id = wr_id;
    responder.executed = responder.executed.wrapping_add(1);
    if let Some((id, srq)) = shared
        && srq.reaches_limit()
    {
        hub.raise(AsyncEvent::SrqLimitReached(id));
    }
    hub.probe.stage(Stage::PutData, len as usize);
    if hub.probe.watches() {
        watch::received_express(qp, hub, header, wr_id);
    }
    let solicited = header.flags & flag::SOLICITED != 0;
    finish(qp, hub, Finish { opcode: WcOpcode::Recv, byte_len: len, extra, solicited })?;
    Ok(true)
}

/// Hands what the small send at the front of the ring completes straight to whoever polls `cq`, if it is an
/// answer that was waited for: one that tells of the last requests, and has no others before it. `false` if
/// it is not of that kind; then nothing was done.
///
/// The queue must be empty, and may not be that of the sends, whose completions come first. What the answer
/// says of them, and that the peer is told of it, is left to [`Unsettled`]; so it is not handed out where
/// somebody waits for that.
#[inline(always)]
pub(crate) fn take<P: Probe>(
    qp: &mut Qp,
    hub: &mut Hub<P>,
    cq: CqId,
    taker: impl FnOnce(&Completion),
) -> bool {
    if qp.recv_cq != cq || qp.send_cq == cq || !matches!(qp.qp_type, QpType::Rc) {
        return false;
    }
    let Path::Channel(path) = &mut qp.path else { return false };
    let incoming = &mut path.channel.incoming;
    if incoming.requests.has_backlog() || incoming.responses.is_filled() {
        return false;
    }
    let Some(header) = incoming.requests.peek() else { return false };
    // A count that is beyond what was asked, or behind, is for others to judge.
    let since = |count: u32| count.wrapping_sub(qp.requester.acked);
    let answers = (1..=since(qp.requester.started)).contains(&since(header.ack));
    let open = qp.state == QpState::Rts && !qp.sq.has_waiting();
    let plain = |cq| hub.cqs.get(cq).is_some_and(Cq::is_plain);
    if !answers || !open || hub.probe.watches() || !plain(cq) || !plain(qp.send_cq) {
        return false;
    }
    debug_assert!(hub.unsettled.is_none(), "a look settles what the one before has left");
    let mut handed_out = false;
    let placed = place(qp, hub, &header, |qp, hub, finish| {
        hub.counters.count_completion(WcStatus::Success);
        let src_qp = QpNum(qp.attr.dest_qp_num);
        responder::count_receive(qp, hub, finish.opcode, finish.byte_len);
        taker(&responder::describe(qp, finish, src_qp, None));
        handed_out = true;
        Ok(())
    });
    match placed {
        Ok(true) => {
            if let Path::Channel(path) = &mut qp.path {
                path.channel.incoming.requests.pop();
            }
            hub.unsettled = Some(Unsettled { qp: qp.id, ack: header.ack });
        }
        Ok(false) => {}
        Err(end) => drop(end_reception(qp, hub, end)),
    }
    handed_out
}

/// What is left to be done for a send that was handed out. The program shall not wait for it: most often it
/// has an answer to post, for which the peer waits, too.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Unsettled {
    pub(crate) qp: QpId,
    /// What its slot says that the peer has executed.
    ack: u32,
}

impl Unsettled {
    /// Does both of what follows.
    #[inline]
    pub(crate) fn settle<P: Probe>(self, qp: &mut Qp, hub: &mut Hub<P>) {
        self.acknowledge(qp, hub);
        self.answer(qp, hub);
    }

    /// Completes what the peer has executed.
    #[inline]
    pub(crate) fn acknowledge<P: Probe>(self, qp: &mut Qp, hub: &mut Hub<P>) {
        if let Err(end) = requester_ack(qp, hub, self.ack) {
            end_reception(qp, hub, end);
        }
    }

    /// Tells the peer that the send is executed, if no message does, or has that wait for one.
    #[inline]
    pub(crate) fn answer<P: Probe>(self, qp: &mut Qp, hub: &mut Hub<P>) {
        let executed = qp.responder.executed;
        let Path::Channel(path) = &mut qp.path else { return };
        path.idle = 0;
        if path.told != executed && !may_wait(qp, hub) {
            tell_executed(qp, hub);
        }
    }
}
