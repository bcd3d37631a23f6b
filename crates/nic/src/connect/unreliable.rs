//! Connections of unreliable queue pairs, which come and go without a word to the program: what is posted
//! while there is none waits for a moment, as for one that is being made, and is then dropped.

use super::{detach, initiates, pause};
use crate::adapter::Hub;
use crate::probe::Probe;
use crate::qp::{Path, Qp};
use crate::requester;
use crate::types::{SendFlags, SendOp, WcStatus};

/// After the loss of a connection the next one is not made before the longest pause: a peer that takes and
/// ends connections keeps nobody busy.
const AFTER_LOSS: u32 = 10;

/// The connection ends, and with it whatever was on its way. Another one is made, if the state allows it.
pub(crate) fn lose<P: Probe>(qp: &mut Qp, hub: &mut Hub<P>) {
    detach(qp, hub);
    qp.path = Path::None;
    if qp.requester.offset > 0 {
        // It is over with the messages of it that have begun.
        qp.sq.wqe_mut(qp.sq.next).end_request = qp.requester.started;
        requester::transmitted(qp);
    }
    requester::complete_sent(qp, hub);
    qp.requester.started = 0;
    qp.requester.acked = 0;
    qp.responder.executed = 0;
    qp.responder.write_len = 0;
    qp.responder.receive.placed = 0;
    qp.responder.dropping = false;
    qp.responder.dropping_write = false;
    qp.peer_rq_psn = None;
    if qp.may_receive() && initiates(qp, hub) {
        qp.requester.attempts = AFTER_LOSS;
        pause(qp, hub);
    }
    super::start_deadline(qp, hub);
}

/// The peer could not be reached, or took nothing, for too long: nothing waits for it until it is reached.
pub(super) fn give_up<P: Probe>(qp: &mut Qp, hub: &mut Hub<P>) {
    if matches!(qp.path, Path::Stream(_) | Path::Channel(_)) {
        lose(qp, hub);
        qp.requester.deadline = None;
    }
    qp.requester.away = true;
    drop_sends(qp, hub);
}

/// Completes what waits, as if it had been transmitted and had not arrived.
pub(crate) fn drop_sends<P: Probe>(qp: &mut Qp, hub: &mut Hub<P>) {
    while requester::may_begin(qp) {
        let position = qp.sq.next;
        let wqe = *qp.sq.wqe(position);
        let done = match wqe.op {
            SendOp::LocalInv { .. } | SendOp::BindMw(_) => requester::execute_local(qp, hub, &wqe),
            _ if wqe.flags.contains(SendFlags::INLINE) => Ok(()),
            _ => hub
                .regions
                .check_list(qp.pd_number(), qp.sq.sges(position), 0, u64::from(wqe.length), false)
                .map_err(|_| WcStatus::LocProtErr),
        };
        match done {
            Ok(()) => requester::skip_local(qp, hub),
            Err(status) => requester::fail_next(qp, hub, status),
        }
    }
}
