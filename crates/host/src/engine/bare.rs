//! Connections over the packet link that connection management orders of the adapter: those of QPIP, and
//! streams of plain iWARP.

use std::net::SocketAddr;
use std::time::Duration;

use quipu_cm::{HandOver, IdKey, Protocol, StreamKey};
use quipu_inet::stack::{ListenerId, TcpId};
use quipu_inet::tcp::{Failure, Flow, KeepAlive};
use quipu_nic::{Fault, QpId, QpNum, QpType, TcpSettings, TcpStreamChange, Time};

use super::Engine;
use super::core::Core;
use crate::cm::{KEEP_ALIVE_COUNT, KEEP_ALIVE_SECONDS, Order, StreamOrder};
use crate::config::{Config, Device};
use crate::error::EngineError;
use crate::net::Net;

/// Peers of one listener that may wait for the program, and half-open connections before cookies.
const BACKLOG: u32 = 1024;
/// Between signs of life.
const KEEP_ALIVE_NS: u64 = KEEP_ALIVE_SECONDS as u64 * 1_000_000_000;
/// How long a process that ends waits for acknowledgements of what plain iWARP has sent over the link, and
/// how long at a time. The kernel would see to it for a process that is gone; here nobody does.
const LINGER_NS: u64 = 300_000_000;
const LINGER_STEP: Duration = Duration::from_millis(2);
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

/// What is spoken over the packet link: by the device from which connections are made, if it can, or else
/// that of QPIP, if programs see it.
fn link_protocol(config: &Config) -> Option<Protocol> {
    match config.cm_device {
        Device::QuipuIw0 => Some(Protocol::Iwarp),
        _ => config.devices.contains(&Device::QuipuQp0).then_some(Protocol::Qpip),
    }
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
            Order::Stream(order) => self.obey_for_stream(now, order),
        }
    }

    /// Does what connection management has ordered for a stream of plain iWARP.
    fn obey_for_stream(&mut self, now: Time, order: StreamOrder) {
        match order {
            StreamOrder::Open { stream, id, from, to, first } => {
                let opened = self.open_stream(now, id, from, to, &first);
                let port = opened.as_ref().ok().and_then(|&it| self.adapter.stream_flow(it));
                let Some(cm) = &mut self.cm else { return };
                match opened {
                    Ok(connection) => {
                        cm.stream_begun(stream, connection);
                        if let Some(flow) = port {
                            cm.cm.set_port(id, flow.local.port());
                        }
                    }
                    Err(error) => {
                        tracing::debug!(%to, %error, "cannot connect");
                        cm.stream_lost(now.0, stream, Some(Failure::Unreachable));
                    }
                }
            }
            StreamOrder::Take { stream, connection } => {
                let taken = self.adapter.stream_accept(now, connection);
                let Some(cm) = &mut self.cm else { return };
                match taken {
                    Ok(()) => cm.stream_begun(stream, connection),
                    // The peer has given up.
                    Err(_) => cm.stream_lost(now.0, stream, None),
                }
            }
            StreamOrder::Send { stream, bytes } => {
                if let Some(connection) = self.connection_of(stream) {
                    // How it ended is on its way.
                    let _ = self.adapter.stream_send(now, connection, &bytes);
                }
            }
            StreamOrder::Close { stream, reset } => {
                let known = self.cm.as_mut().and_then(|cm| cm.forget_over_link(stream));
                if let Some(connection) = known {
                    self.adapter.stream_close(now, connection, reset);
                }
            }
            StreamOrder::HandOver(what) => self.give_stream(now, *what),
        }
    }

    fn connection_of(&self, stream: StreamKey) -> Option<TcpId> {
        self.cm.as_ref()?.connection_of(stream)
    }

    fn open_stream(
        &mut self,
        now: Time,
        id: IdKey,
        from: SocketAddr,
        to: SocketAddr,
        first: &[u8],
    ) -> Result<TcpId, Fault> {
        let tos = self.cm.as_mut().and_then(|cm| cm.cm.options(id).ok()?.tos);
        let connection = self.adapter.stream_connect(now, from, to, &settings(tos))?;
        self.adapter.stream_send(now, connection, first)?;
        Ok(connection)
    }

    /// Gives a stream over the link to its queue pair, which has it then.
    fn give_stream(&mut self, now: Time, what: HandOver) {
        let (stream, id, rest) = (what.stream, what.id, what.rest.clone());
        let taken = self
            .cm
            .as_mut()
            .and_then(|cm| cm.forget_over_link(stream))
            .ok_or(Fault::NoSuchObject)
            .and_then(|connection| {
                let (qp, adoption) = self.adoption(what)?;
                let adopted = self.adapter.adopt_tcp_stream(now, qp, &adoption, connection, &rest);
                if adopted.is_err() {
                    self.adapter.stream_close(now, connection, true);
                }
                adopted.map(|_| qp)
            });
        if let Err(error) = &taken {
            tracing::error!(%error, "the queue pair cannot be connected");
        }
        if let Some(cm) = &mut self.cm {
            cm.given(now.0, id, taken.ok());
        }
    }

    /// Something has happened to a stream over the link.
    pub(super) fn stream_changed_on_link(&mut self, connection: TcpId, change: TcpStreamChange) {
        let now = self.recent();
        let Some(stream) = self.cm.as_ref().and_then(|cm| cm.stream_over(connection)) else {
            return;
        };
        let bytes = match change {
            TcpStreamChange::Readable => self.adapter.stream_receive(now, connection),
            _ => Vec::new(),
        };
        let Some(cm) = &mut self.cm else { return };
        match change {
            TcpStreamChange::Connected => cm.stream_reached(now.0, stream),
            TcpStreamChange::Readable => cm.stream_heard(now.0, stream, &bytes),
            TcpStreamChange::Lost(failure) => cm.stream_lost(now.0, stream, failure),
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

    /// The process ends: streams over the link are ended, and have a moment for what is under way on them.
    pub(super) fn linger_on_link(&mut self) {
        if self.qpip.is_none() {
            return;
        }
        let mut now = self.clock.now();
        let end = now.after(LINGER_NS);
        self.adapter.end_streams(now);
        self.settle(now);
        while self.adapter.streams_owe() && now < end {
            let Some(qpip) = &mut self.qpip else { return };
            qpip.wait(LINGER_STEP);
            now = self.clock.now();
            qpip.ready(&mut self.adapter, now, libc::EPOLLIN as u32);
            self.adapter.handle_timeout(now);
            self.settle(now);
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
        let Some(protocol) = link_protocol(config) else { return };
        let Some(stack) = core.adapter.inet() else { return };
        // A link that is gone leads to nobody.
        let addresses = if core.is_lost() { Vec::new() } else { stack.prefixes().collect() };
        if let Some(cm) = &mut core.cm {
            let preferred = config.cm_device == Device::QuipuQp0;
            cm.learn_link(addresses, protocol, preferred);
        }
    }

    /// Gives an identifier that was bound to an address of the packet link, at any port, one that is free:
    /// programs tell others which it is before they listen.
    pub(super) fn choose_port_on_link(&self, id: IdKey) -> Result<(), EngineError> {
        let mut core = self.enter()?;
        let cm = &core.manager()?.cm;
        if cm.is_on_link(id) && cm.bound(id)?.is_some_and(|src| src.port() == 0) {
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
        let listening = match core.manager()?.link_is_plain() {
            true => core.adapter.stream_listen(port, &settings(tos), BACKLOG),
            false => core.adapter.tcp_listen_deferred(port, &settings(tos), BACKLOG),
        };
        let manager = core.manager()?;
        match listening {
            Ok((listener, port)) => manager.watched_on_link(id, listener, port),
            // Of a listener at every address, those of the link are taken by one that is there alone.
            Err(_) if !manager.cm.is_on_link(id) => {}
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
