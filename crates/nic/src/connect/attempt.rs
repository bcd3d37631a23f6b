//! Attempts to connect: reaching out to the peer, waiting for its reply, trying again.

use super::{Phase, peer_of};
use crate::adapter::{Adapter, Hub};
use crate::event::Action;
use crate::fate::Cut;
use crate::probe::Probe;
use crate::qp::{Path, Qp};
use crate::requester;
use crate::types::{ConnId, WcStatus};

/// First pause before the peer is tried again; it doubles each time.
const FIRST_PAUSE_NS: u64 = 500_000;
/// Longest pause.
const LONGEST_PAUSE_NS: u64 = 100_000_000;

/// Asks the world below to reach the peer of `qp`.
pub(super) fn reach_out<P>(qp: &mut Qp, hub: &mut Hub<P>) {
    if !matches!(qp.path, Path::None) || !qp.may_receive() || qp.requester.cut != Cut::Not {
        return;
    }
    match hub.new_conn(Some(qp.id), Phase::Reaching) {
        Some(conn) => {
            qp.path = Path::Pending(conn);
            let sgid_index = hub.gids.index_of(&qp.attr.av);
            hub.actions.push_back(Action::Connect { conn, peer: peer_of(qp), sgid_index });
        }
        None => pause(qp, hub),
    }
}

impl<P: Probe> Adapter<P> {
    /// The peer that `Connect` asked for is on this host, and has not answered yet: its process may be
    /// stopped. An answer is still due.
    pub fn handle_nearby(&mut self, conn: ConnId) {
        if let Some(state) = self.hub.conns.get_mut(conn) {
            state.nearby = true;
        }
    }
}

/// Whether the peer's host has taken a request that the peer has not answered. If the peer's process is
/// stopped, it answers once it goes on. If it is not, it refuses after a second at the latest.
pub(super) fn is_reached<P>(qp: &Qp, hub: &Hub<P>) -> bool {
    let Path::Pending(conn) = qp.path else { return false };
    hub.conns.get(conn).is_some_and(|conn| match conn.phase {
        Phase::Reaching => conn.nearby,
        Phase::Initiating(_) | Phase::Asking { .. } => true,
        _ => false,
    })
}

/// An attempt to connect came to nothing. Requests fail if their time has passed meanwhile; otherwise the
/// peer is tried again after a pause.
pub(super) fn attempt_failed<P: Probe>(qp: &mut Qp, hub: &mut Hub<P>) {
    let overdue = std::mem::take(&mut qp.requester.overdue);
    if overdue && !qp.sq.is_empty() && qp.requester.cut == Cut::Not {
        qp.path = Path::None;
        return requester::fail_oldest(qp, hub, WcStatus::RetryExcErr);
    }
    pause(qp, hub);
}

/// Tries again after a pause.
pub(super) fn pause<P>(qp: &mut Qp, hub: &mut Hub<P>) {
    qp.path = Path::None;
    if !qp.may_receive() {
        return;
    }
    let pause = (FIRST_PAUSE_NS << qp.requester.attempts.min(10)).min(LONGEST_PAUSE_NS);
    qp.requester.attempts = qp.requester.attempts.saturating_add(1);
    qp.requester.reconnect_at = Some(hub.now.after(pause));
    requester::set_alarm(qp, hub);
}

/// Has the world below give up an attempt while the peer has not replied, if the peer's host is silent for as
/// long as starting up may take, or for the retry time if that is shorter.
pub(super) fn limit_startup<P>(qp: &Qp, hub: &mut Hub<P>, conn: ConnId) {
    let most = hub.config.setup_timeout_ns;
    let limit = qp.retry_time_ns().map_or(most, |retry_time| retry_time.min(most));
    hub.actions.push_back(Action::LimitSilence { conn, user_timeout_ns: Some(limit) });
}
