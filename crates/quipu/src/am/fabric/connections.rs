//! How connections begin and end.

use quipu_am::Fabric;
use quipu_am::{ConnId, Event, Hello, Name, Refusal, Status, Welcome};
use quipu_host::connection::{Event as CmEvent, EventKind, IdKey, QpParams};
use quipu_host::nic::{QpAttr, QpAttrMask, QpState};

use super::{HostFabric, Link, REFUSAL};
use crate::am::sizes::RETRIES;
use crate::connection::param;
use crate::error::Error;

impl HostFabric {
    /// Handles the next event of connection management; whether there was one.
    pub(in crate::am) fn pump(&mut self) -> bool {
        let Ok(event) = self.device.opened.engine.cm_take_event(self.channel) else { return false };
        if event.kind == EventKind::ConnectRequest {
            self.asked(&event);
            return true;
        }
        let conn = ConnId::from_u64(event.cookie);
        if self.link(conn).is_none_or(|link| link.id != event.id) {
            return true;
        }
        let went_on = match event.kind {
            EventKind::AddrResolved => self.device.opened.engine.cm_resolve_route(event.id).is_ok(),
            EventKind::RouteResolved => self.ask(conn, event.id).is_ok(),
            EventKind::ConnectResponse => self.answered(conn, &event),
            EventKind::Established | EventKind::TimewaitExit => true,
            EventKind::Disconnected => {
                self.later.push_back(Event::Failed { conn });
                return true;
            }
            _ => false,
        };
        if !went_on {
            let why = refusal_of(&event);
            self.abandon(conn);
            self.later.push_back(Event::Refused { conn, why });
        }
        true
    }

    /// Ends an attempt.
    pub(super) fn abandon(&mut self, conn: ConnId) {
        if self.link(conn).is_none() {
            return;
        }
        let Some(link) = self.links[conn.index() as usize].take() else { return };
        let engine = &self.device.opened.engine;
        if let Some(qp) = link.qp {
            let attr = QpAttr { state: QpState::Err, ..QpAttr::default() };
            let _ = qp.modify(&attr, QpAttrMask::STATE);
            self.dying.push(qp);
            let _ = engine.cm_disconnect(link.id);
        }
        let _ = engine.cm_destroy_id(link.id);
    }

    /// The route is known: the request goes out.
    fn ask(&mut self, conn: ConnId, id: IdKey) -> Result<(), Error> {
        let qp = self.build(conn)?;
        let Some(link) = self.link(conn) else { return Ok(()) };
        let param = param(&qp, &link.hello);
        link.qp = Some(qp);
        Ok(self.device.opened.engine.cm_connect(id, &param)?)
    }

    /// The attributes with which a host that vanishes is given up in time. What connection management
    /// proposes takes a minute.
    fn bounded(&self, params: QpParams) -> QpParams {
        QpParams { timeout: self.sizes.timeout, retry_count: RETRIES, ..params }
    }

    /// The peer has accepted; whether that can be used.
    fn answered(&mut self, conn: ConnId, event: &CmEvent) -> bool {
        let Some(welcome) = Welcome::parse(&event.private_data) else { return false };
        let engine = &self.device.opened.engine;
        let Ok(params) = engine.cm_connect_params(event.id) else { return false };
        let params = self.bounded(params);
        let Some(qp) = self.queue_pair(conn) else { return false };
        if qp.connect_as(&params).is_err() || engine.cm_accept(event.id, None).is_err() {
            return false;
        }
        self.later.push_back(Event::Connected { conn, welcome });
        true
    }

    fn asked(&mut self, event: &CmEvent) {
        match Hello::parse(&event.private_data) {
            Some(mut hello) => {
                if hello.endpoint == Name::OF_ADDRESS {
                    // The cookie of a listener that is for no endpoint is not a number of one.
                    hello.endpoint = event.listener as u32;
                }
                self.later.push_back(Event::Incoming { incoming: event.id.0, hello });
            }
            None => self.reject(event.id.0, Status::BadArgs),
        }
    }

    pub(super) fn bring_up(
        &mut self,
        id: IdKey,
        conn: ConnId,
        welcome: &Welcome,
    ) -> Result<(), Error> {
        let engine = &self.device.opened.engine;
        engine.cm_set_cookie(id, conn.to_u64())?;
        let params = self.bounded(engine.cm_connect_params(id)?);
        let qp = self.build(conn)?;
        let param = param(&qp, &welcome.to_bytes());
        let connected = qp.connect_as(&params);
        self.add_link(Link { conn, id, hello: [0; Hello::WIRE_LEN], qp: Some(qp) });
        connected?;
        Ok(self.device.opened.engine.cm_accept(id, Some(&param))?)
    }
}

/// Why a connection did not come about.
fn refusal_of(event: &CmEvent) -> Refusal {
    let said = match event.private_data.get(..3) {
        Some(&[a, m, status]) if [a, m] == REFUSAL && event.kind == EventKind::Rejected => {
            status_of(status)
        }
        _ => None,
    };
    said.map_or(Refusal::Absent, Refusal::Said)
}

fn status_of(byte: u8) -> Option<Status> {
    [Status::BadArgs, Status::BadEndpoint, Status::Congestion, Status::Unreachable]
        .into_iter()
        .find(|status| *status as u8 == byte)
}
