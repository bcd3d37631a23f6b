//! Requests on channels that refer to memory by its address. The peer comes to them when it likes, and asks
//! nobody whether the memory still is what it was: so they end before it is taken back.

use quipu_mem::Key;

use crate::adapter::{Adapter, Hub};
use crate::probe::Probe;
use crate::qp::{Path, Qp};
use crate::queue::names;
use crate::receive;
use crate::requester;
use crate::types::{SendOp, WcStatus};

/// Notes that a slot was pushed which refers to memory of this side.
#[inline]
pub(super) fn note_reference<P>(qp: &mut Qp, hub: &mut Hub<P>) {
    if let Path::Channel(path) = &mut qp.path
        && !std::mem::replace(&mut path.refers, true)
    {
        hub.referring.push(qp.id);
    }
}

/// The oldest request under way that may refer to memory of the region that had this key, and no longer may.
fn misplaced<P>(qp: &Qp, hub: &Hub<P>, key: Key) -> Option<u32> {
    let current = (qp.requester.offset > 0).then_some(qp.sq.next);
    qp.sq.in_progress().chain(current).find(|&position| {
        let (wqe, list) = (qp.sq.wqe(position), qp.sq.sges(position));
        let (len, reads) = (wqe.length, matches!(wqe.op, SendOp::Read { .. }));
        len > hub.config.copy_limit
            && names(list, key)
            && hub.regions.check_list(qp.pd_number(), list, 0, u64::from(len), reads).is_err()
    })
}

impl<P: Probe> Adapter<P> {
    /// Fails requests that refer to a region which has just lost this key, or was changed; whether there were
    /// any. Memory is then quiet once their peers are.
    pub(crate) fn end_references(&mut self, key: Key) -> bool {
        self.settle_taken();
        let mut any = false;
        for id in std::mem::take(&mut self.hub.referring) {
            let Some((qp, hub)) = self.qp_and_hub(id) else { continue };
            if misplaced(qp, hub, key).is_some() {
                // What the peer has executed is not under way any more.
                receive::channel::catch_up(qp, hub);
            }
            if let Some(position) = misplaced(qp, hub, key) {
                requester::fail_at(qp, hub, position, WcStatus::LocProtErr);
                any = true;
            }
            let refers = requester::has_begun(qp);
            if let Path::Channel(path) = &mut qp.path {
                path.refers = refers;
                hub.referring.extend(refers.then_some(id));
            }
        }
        any
    }
}
