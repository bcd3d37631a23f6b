//! What the adapter, connection management and the links want done: connections, hand-overs, ends.

use quipu_cm::HandOver;
use quipu_nic::{Action, Adoption, Fault, QpAttr, QpAttrMask, QpId, QpNum, QpState, Role, Time};

use super::core::Core;
use crate::cm::Given;
use crate::link::{Reach, Waiting};

impl Core {
    pub(super) fn act(&mut self, now: Time) -> bool {
        let mut any = false;
        while let Some(action) = self.adapter.poll_action() {
            any = true;
            self.carry_out(now, action);
        }
        if self.cm.as_ref().is_some_and(|cm| cm.has_output()) {
            any = true;
            self.serve_management(now);
        }
        while let Some(waiting) = self.links.take_given_up() {
            any = true;
            self.connect_stream(now, waiting);
        }
        any
    }

    /// Gives streams of plain iWARP to the adapter, and ends others; has a capture show what connection
    /// management has said.
    #[cold]
    fn serve_management(&mut self, now: Time) {
        if let Some(cm) = &mut self.cm {
            cm.show(self.adapter.probe_mut());
        }
        while let Some(given) = self.cm.as_mut().and_then(|cm| cm.take_given()) {
            let id = given.what.id;
            let qp = self.hand_over(now, given);
            if let Some(cm) = &mut self.cm {
                cm.given(now.0, id, qp);
            }
        }
        while let Some(order) = self.cm.as_mut().and_then(|cm| cm.take_order()) {
            self.obey(now, order);
        }
        while let Some(qp) = self.cm.as_mut().and_then(|cm| cm.take_end()) {
            if self.end_tcp(now, qp) {
                continue;
            }
            let attr = QpAttr { state: QpState::Sqd, ..QpAttr::default() };
            // One that is in error already has no stream any more.
            let _ = self.adapter.modify_qp(now, qp, &attr, QpAttrMask::STATE);
        }
        while let Some(qp) = self.cm.as_mut().and_then(|cm| cm.take_abort()) {
            // One that is over meanwhile has no connection any more.
            let _ = self.adapter.tcp_abort(now, qp);
        }
    }

    /// Gives a stream to its queue pair, which has it then.
    fn hand_over(&mut self, now: Time, given: Given) -> Option<QpId> {
        let Given { fd, what } = given;
        let (stream, peer, qpn, rest) = (what.stream, what.peer, what.qpn, what.rest.clone());
        let taken = self
            .adoption(what)
            .and_then(|(qp, adoption)| Ok((qp, self.adapter.adopt_stream(now, qp, &adoption)?)));
        match taken {
            Ok((qp, conn)) => {
                self.adapter.probe_mut().managed_handed_over(stream, conn);
                self.net.adopt(&mut self.adapter, now, (conn, peer), fd, &rest);
                Some(qp)
            }
            Err(error) => {
                tracing::error!(qpn, %error, "the queue pair cannot be connected");
                None
            }
        }
    }

    /// What a queue pair is told of the stream that it gets.
    ///
    /// # Errors
    /// There is no such queue pair.
    pub(super) fn adoption(&self, what: HandOver) -> Result<(QpId, Adoption), Fault> {
        let role = if what.initiator { Role::Initiator } else { Role::Responder };
        let HandOver { negotiated, ird, ord, qpn, .. } = what;
        let qp = self.adapter.find_qp(QpNum(qpn)).ok_or(Fault::NoSuchObject)?;
        Ok((qp, Adoption { role, negotiated, ird, ord, rfc7306: false }))
    }

    fn carry_out(&mut self, now: Time, action: Action) {
        tracing::trace!(?action);
        match action {
            Action::Connect { conn, peer, sgid_index } => {
                let waiting = Waiting { conn, peer, sgid_index };
                if self.net.is_own(peer) {
                    return self.adapter.handle_reached_self(now, conn);
                }
                match self.links.reach(now, waiting) {
                    Reach::Linked(link) => {
                        if !self.adapter.handle_reached_link(now, conn, link) {
                            self.connect_stream(now, waiting);
                        }
                    }
                    Reach::Pending => self.adapter.handle_nearby(conn),
                    Reach::Elsewhere => self.connect_stream(now, waiting),
                }
            }
            Action::LimitSilence { conn, user_timeout_ns } => {
                self.net.limit_silence(now, conn, user_timeout_ns);
                if let Some(marking) = self.adapter.marking(conn)
                    && (marking.service_level > 0 || marking.traffic_class > 0)
                {
                    self.net.mark(conn, marking);
                }
            }
            Action::Close { conn } => self.net.close(&mut self.adapter, now, conn),
            Action::LinkSend { link, message } => {
                self.links.send(&mut self.adapter, now, link, &message);
            }
            Action::Cut { link } => self.links.cut(&mut self.adapter, now, link),
            Action::RingBell { link } => self.links.ring(link),
        }
    }

    fn connect_stream(&mut self, now: Time, waiting: Waiting) {
        let Waiting { conn, peer, sgid_index } = waiting;
        self.net.connect(&mut self.adapter, now, (conn, peer), sgid_index);
    }
}
