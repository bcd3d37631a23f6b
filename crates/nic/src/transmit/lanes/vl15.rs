//! Requests of a service level whose lane is VL15: InfiniBand discards such packets (IBA 7.6.6).

use super::{Lanes, park, service_level};
use crate::adapter::{Adapter, Hub};
use crate::doorbell;
use crate::probe::Probe;
use crate::qp::{Path, Qp};
use crate::requester;
use crate::types::WcStatus;

impl Lanes {
    /// Whether packets of a service level are discarded.
    pub(super) fn discards(&self, sl: u8) -> bool {
        self.config.lane_of(sl).is_none()
    }
}

impl<P: Probe> Adapter<P> {
    /// Has queue pairs whose packets are discarded meet what their service meets then.
    pub(super) fn discard_requests(&mut self) {
        while let Some(id) = self.hub.qos.as_mut().and_then(|qos| qos.discarding.pop()) {
            if let Some((qp, hub)) = self.qp_and_hub(id) {
                qp.turn.parked = false;
                discard(qp, hub);
            }
        }
    }
}

/// Requests of a reliable service fail, as after retries that nobody has answered; those of others complete,
/// and nothing is sent. A TCP of QPIP goes on waiting, until its own time-out.
fn discard<P: Probe>(qp: &mut Qp, hub: &mut Hub<P>) {
    let is_tcp = matches!(qp.path, Path::Tcp(_));
    while !is_tcp && (requester::may_begin(qp) || qp.requester.offset > 0) {
        let sl = service_level(qp, hub);
        if hub.qos.as_ref().is_none_or(|qos| !qos.discards(sl)) {
            park(qp, hub);
            return doorbell::kick(qp, hub);
        }
        if qp.qp_type.is_reliable() || qp.requester.offset > 0 {
            return requester::fail_at(qp, hub, qp.sq.next, WcStatus::RetryExcErr);
        }
        requester::skip_local(qp, hub);
    }
}
