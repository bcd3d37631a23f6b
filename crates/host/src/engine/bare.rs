//! Connections of QPIP that connection management orders of the adapter.

use std::net::SocketAddr;

use quipu_cm::IdKey;
use quipu_inet::stack::{ListenerId, TcpId};
use quipu_inet::tcp::{Flow, KeepAlive};
use quipu_nic::TcpSettings;
use quipu_nic::{Fault, QpId, QpNum, QpType, Time};

use super::Engine;
use super::core::Core;
use crate::cm::{KEEP_ALIVE_COUNT, KEEP_ALIVE_SECONDS, Order};
use crate::config::Device;
use crate::error::EngineError;
use crate::net::Net;

/// Peers of one listener that may wait for the program, and half-open connections before cookies.
const BACKLOG: u32 = 1024;
/// Between signs of life.
const KEEP_ALIVE_NS: u64 = KEEP_ALIVE_SECONDS as u64 * 1_000_000_000;
/// Rounds of events and what they order before others get their turn.
const ROUNDS: usize = 16;

/// How connections are: programs of verbs hear of a peer that vanishes, which they cannot ask for, as soon as
/// over the other devices. The traffic class is that of `rdma_set_option`, less the bits of ECN.
fn settings(tos: Option<u8>) -> TcpSettings {
    let keep_alive = Some(KeepAlive {
        idle: KEEP_ALIVE_NS,
        interval: KEEP_ALIVE_NS,
        probes: KEEP_ALIVE_COUNT as u8,
    });
    TcpSettings { keep_alive, traffic_class: tos.unwrap_or(0) & !3, ..TcpSettings::default() }
}

impl Core {
    /// A peer has connected to a listener of connection management, or has given up waiting for it.
    pub(super) fn handle_request(
        &mut self,
        listener: ListenerId,
        connection: TcpId,
        flow: Option<Flow>,
    ) {
        let now = self.recent().0;
        let Some(cm) = &mut self.cm else { return };
        match flow {
            Some(flow) => cm.incoming(now, listener, connection, &flow),
            None => cm.withdrawn(now, connection),
        }
    }

    /// Carries out at once what events have ordered: nobody may look again before a descriptor says so.
    pub(super) fn carry_out_orders(&mut self) {
        for _ in 0..ROUNDS {
            if !self.cm.as_ref().is_some_and(|cm| cm.has_output()) {
                return;
            }
            let now = self.recent();
            self.work(now, Net::transmit);
            if self.adapter.has_events() {
                self.hand_out_events();
            }
        }
    }

    /// Does what connection management has ordered.
    pub(super) fn obey(&mut self, now: Time, order: Order) {
        match order {
            Order::Connect { id, qpn, from, to } => {
                let begun =
                    self.adapter.find_qp(QpNum(qpn)).ok_or(Fault::NoSuchObject).and_then(|qp| {
                        self.connect_bare(now, id, qp, from, to)?;
                        Ok(qp)
                    });
                self.note_begun(now, id, begun);
            }
            Order::Accept { id, connection, qpn } => {
                let begun =
                    self.adapter.find_qp(QpNum(qpn)).ok_or(Fault::NoSuchObject).and_then(|qp| {
                        self.adapter.tcp_accept(now, connection, qp)?;
                        Ok(qp)
                    });
                if begun.is_err() {
                    let _ = self.adapter.tcp_refuse(now, connection);
                }
                self.note_begun(now, id, begun);
            }
            Order::Refuse(connection) => {
                // A peer that has given up is refused already.
                let _ = self.adapter.tcp_refuse(now, connection);
            }
            Order::Unlisten(listener) => self.adapter.tcp_unlisten(listener),
        }
    }

    /// A port that was chosen for an identifier when it was bound was not kept for it: if there is a
    /// connection with these ends by now, it gets another.
    fn connect_bare(
        &mut self,
        now: Time,
        id: IdKey,
        qp: QpId,
        from: SocketAddr,
        to: SocketAddr,
    ) -> Result<(), Fault> {
        let chosen = self.cm.as_ref().is_some_and(|cm| cm.cm.is_port_chosen(id));
        let tos = self.cm.as_mut().and_then(|cm| cm.cm.options(id).ok()?.tos);
        let settings = settings(tos);
        match self.adapter.tcp_connect_from(now, qp, from, to, &settings) {
            Err(Fault::Taken(_)) if chosen => {
                let any = SocketAddr::new(from.ip(), 0);
                self.adapter.tcp_connect_from(now, qp, any, to, &settings)
            }
            done => done,
        }
    }

    fn note_begun(&mut self, now: Time, id: IdKey, begun: Result<QpId, Fault>) {
        let port = begun.as_ref().ok().and_then(|&qp| self.adapter.tcp_flow(qp));
        let port = port.map(|flow| flow.local.port());
        let Some(cm) = &mut self.cm else { return };
        match begun {
            Ok(qp) => cm.begun(id, qp, port),
            Err(error) => {
                tracing::error!(%error, "the queue pair cannot be connected");
                cm.not_begun(now.0, id, &error);
            }
        }
    }

    /// Ends the connection of a queue pair if it is one of QPIP: what is posted is sent first.
    pub(super) fn end_tcp(&mut self, now: Time, qp: QpId) -> bool {
        let is_tcp = self.adapter.service_of(qp) == Some(QpType::Tcp);
        if is_tcp {
            // One that is over already has no connection any more.
            let _ = self.adapter.tcp_finish(now, qp);
        }
        is_tcp
    }
}

impl Engine {
    /// Tells connection management the addresses of the packet link, if programs see its device.
    pub(super) fn learn_link(&self, core: &mut Core) {
        let config = &self.inner.config;
        if !config.devices.contains(&Device::QuipuQp0) {
            return;
        }
        let Some(stack) = core.adapter.inet() else { return };
        // A link that is gone leads to nobody.
        let addresses = if core.is_lost() { Vec::new() } else { stack.prefixes().collect() };
        if let Some(cm) = &mut core.cm {
            cm.learn_link(addresses, config.cm_device == Device::QuipuQp0);
        }
    }

    /// Gives an identifier that was bound to an address of the packet link, at any port, one that is free:
    /// programs tell others which it is before they listen.
    pub(super) fn choose_port_on_link(&self, id: IdKey) -> Result<(), EngineError> {
        let mut core = self.enter()?;
        let cm = &core.manager()?.cm;
        if cm.is_qpip(id) && cm.bound(id)?.is_some_and(|src| src.port() == 0) {
            let port = core.adapter.tcp_free_port()?;
            core.manager()?.cm.choose_port(id, port);
        }
        Ok(())
    }

    /// Has the adapter watch the port of a listener, if that is bound to an address of the packet link or to
    /// all.
    ///
    /// # Errors
    ///
    /// Somebody watches it already; then nobody listens.
    pub(super) fn listen_on_link(&self, id: IdKey) -> Result<(), EngineError> {
        let mut core = self.enter()?;
        let Some(port) = core.manager()?.port_on_link(id)? else { return Ok(()) };
        let tos = core.manager()?.cm.options(id)?.tos;
        let listening = core.adapter.tcp_listen_deferred(port, &settings(tos), BACKLOG);
        let manager = core.manager()?;
        match listening {
            Ok((listener, port)) => manager.watched_on_link(id, listener, port),
            // Of a listener at every address, those of the link are taken by one that is there alone.
            Err(_) if !manager.cm.is_qpip(id) => {}
            Err(error) => {
                manager.cm.cancel_listen(id);
                tracing::debug!(%error, "the port cannot be watched");
                let in_use = std::io::Error::from_raw_os_error(libc::EADDRINUSE);
                return Err(EngineError::Address(in_use));
            }
        }
        Ok(())
    }
}
