//! The control path of QPIP: connections of queue pairs over the engine's own TCP, ports of UDP, and what
//! programs hear of them.

use std::net::{IpAddr, SocketAddr};
use std::os::fd::RawFd;

use quipu_inet::stack::{Carriage, ListenerId};
use quipu_inet::tcp::{Counters, Flow};
use quipu_nic::{AsyncEvent, QpId, TcpChange, TcpSettings};

use super::core::Core;
use super::events::For;
use super::wait::{is_non_blocking, wait_readable};
use super::{ContextId, Engine};
use crate::config::Device;
use crate::error::EngineError;
use crate::net::Net;
use crate::packet::LinkSpec;

/// Something has happened to the connection of a queue pair.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TcpEvent {
    /// The queue pair.
    pub qp: QpId,
    /// What.
    pub change: TcpChange,
}

/// What the stack of QPIP stands on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct QpipInfo {
    /// The link.
    pub link: LinkSpec,
    /// Its station address; `None` where packets go without Ethernet.
    pub hardware: Option<[u8; 6]>,
    /// Own addresses.
    pub addresses: Vec<IpAddr>,
    /// Largest IP packet, in octets.
    pub mtu: u32,
    /// Whether the link fills in checksums.
    pub checksum: bool,
    /// Most octets of TCP payload that the link cuts into segments itself; 0: none.
    pub segment: u32,
    /// The words before a command whose sockets are to reach the adapter by the link's interface, if that is
    /// in a network namespace of its own.
    pub enter: Vec<String>,
}

impl Engine {
    /// Whether it has a link for QPIP.
    #[must_use]
    pub fn has_qpip(&self) -> bool {
        self.inner.config.qpip.is_some()
    }

    /// What the stack of QPIP stands on.
    ///
    /// # Errors
    ///
    /// [`EngineError::NoLink`].
    pub fn qpip_info(&self) -> Result<QpipInfo, EngineError> {
        if let Some(elsewhere) = self.elsewhere()? {
            return Ok(elsewhere.info());
        }
        let Some(config) = &self.inner.config.qpip else { return Err(EngineError::NoLink) };
        let core = self.enter()?;
        let (Some(qpip), Some(stack)) = (&core.qpip, core.adapter.inet()) else {
            return Err(EngineError::NoLink);
        };
        let features = qpip.link().features();
        Ok(QpipInfo {
            link: config.link.clone(),
            hardware: features.hardware,
            addresses: stack.addresses().collect(),
            mtu: features.mtu,
            checksum: features.checksum,
            segment: features.segment,
            enter: features.enter.clone(),
        })
    }

    /// Listens at a TCP port (0: one that is free) with room for `backlog` connections that wait for a queue
    /// pair; the listener and its port.
    ///
    /// # Errors
    ///
    /// The port is taken, or there is no room.
    pub fn tcp_listen(
        &self,
        port: u16,
        settings: &TcpSettings,
        backlog: u32,
    ) -> Result<(ListenerId, u16), EngineError> {
        if let Some(elsewhere) = self.elsewhere()? {
            return elsewhere.listen(port, settings, backlog);
        }
        Ok(self.enter_for_qpip()?.adapter.tcp_listen(port, settings, backlog)?)
    }

    /// Ends a listener. Connections that wait for a queue pair are reset; those that have one stay.
    ///
    /// # Errors
    ///
    /// [`EngineError::NoLink`].
    pub fn tcp_unlisten(&self, listener: ListenerId) -> Result<(), EngineError> {
        if let Some(elsewhere) = self.elsewhere()? {
            return elsewhere.unlisten(listener);
        }
        let mut core = self.enter()?;
        if core.qpip.is_none() {
            return Err(EngineError::NoLink);
        }
        core.adapter.tcp_unlisten(listener);
        settle(&mut core);
        Ok(())
    }

    /// Gives an idle queue pair to a listener: the next connection is mated with it.
    ///
    /// # Errors
    ///
    /// No such listener, or the queue pair is not idle.
    pub fn tcp_offer(&self, listener: ListenerId, qp: QpId) -> Result<(), EngineError> {
        if let Some(elsewhere) = self.elsewhere()? {
            return elsewhere.offer(listener, qp);
        }
        let mut core = self.enter_for_qpip()?;
        let now = core.now();
        core.adapter.tcp_offer(now, listener, qp)?;
        core.settle(now);
        Ok(())
    }

    /// Connects a queue pair. Returns at once; an event says what comes of it.
    ///
    /// # Errors
    ///
    /// It is not idle, there is no way to the peer, or the port is taken.
    pub fn tcp_connect(
        &self,
        qp: QpId,
        remote: SocketAddr,
        local_port: Option<u16>,
        settings: &TcpSettings,
    ) -> Result<(), EngineError> {
        if let Some(elsewhere) = self.elsewhere()? {
            return elsewhere.connect(qp, remote, local_port, settings);
        }
        let mut core = self.enter_for_qpip()?;
        let now = core.now();
        core.adapter.tcp_connect(now, qp, remote, local_port, settings)?;
        core.settle(now);
        Ok(())
    }

    /// Sends nothing more: the peer hears the end of the stream behind what is posted.
    ///
    /// # Errors
    ///
    /// The queue pair has no connection.
    pub fn tcp_close(&self, qp: QpId) -> Result<(), EngineError> {
        if let Some(elsewhere) = self.elsewhere()? {
            return elsewhere.close(qp);
        }
        let mut core = self.enter_for_qpip()?;
        let now = core.now();
        core.adapter.tcp_close(now, qp)?;
        core.settle(now);
        Ok(())
    }

    /// Resets the connection of a queue pair.
    ///
    /// # Errors
    ///
    /// The queue pair has no connection.
    pub fn tcp_abort(&self, qp: QpId) -> Result<(), EngineError> {
        if let Some(elsewhere) = self.elsewhere()? {
            return elsewhere.abort(qp);
        }
        let mut core = self.enter_for_qpip()?;
        let now = core.now();
        core.adapter.tcp_abort(now, qp)?;
        core.settle(now);
        Ok(())
    }

    /// Both ends of the connection of a queue pair, if it has one.
    ///
    /// # Errors
    ///
    /// [`EngineError::NoLink`].
    pub fn tcp_flow(&self, qp: QpId) -> Result<Option<Flow>, EngineError> {
        if let Some(elsewhere) = self.elsewhere()? {
            return elsewhere.flow(qp);
        }
        Ok(self.enter_for_qpip()?.adapter.tcp_flow(qp))
    }

    /// What the connection of a queue pair has seen and done so far, if it has one.
    ///
    /// # Errors
    ///
    /// [`EngineError::NoLink`].
    pub fn tcp_counters(&self, qp: QpId) -> Result<Option<Counters>, EngineError> {
        if let Some(elsewhere) = self.elsewhere()? {
            return elsewhere.counters(qp);
        }
        Ok(self.enter_for_qpip()?.adapter.tcp_counters(qp).copied())
    }

    /// Binds a queue pair to a UDP port (0: one that is free), and makes it ready to send; the port.
    ///
    /// # Errors
    ///
    /// The port is taken, or the queue pair is bound already.
    pub fn udp_bind(&self, qp: QpId, port: u16) -> Result<u16, EngineError> {
        if let Some(elsewhere) = self.elsewhere()? {
            return elsewhere.bind(qp, port);
        }
        Ok(self.enter_for_qpip()?.adapter.udp_bind(qp, port)?)
    }

    /// How what a queue pair sends is carried from now on: its datagrams, or the segments of its connection.
    ///
    /// # Errors
    ///
    /// A TCP queue pair without a connection, or nothing can be carried like that.
    pub fn set_carriage(&self, qp: QpId, carriage: Carriage) -> Result<(), EngineError> {
        if let Some(elsewhere) = self.elsewhere()? {
            return elsewhere.set_carriage(qp, carriage);
        }
        Ok(self.enter_for_qpip()?.adapter.set_carriage(qp, carriage)?)
    }

    /// From now on keeps what happens to the connections of a context's queue pairs, for
    /// [`take_tcp_event`](Self::take_tcp_event); a descriptor that is readable while there is something.
    ///
    /// # Errors
    ///
    /// No such context, or no descriptor is left.
    pub fn tcp_events(&self, context: ContextId) -> Result<RawFd, EngineError> {
        self.enter()?.events.open_tcp(context, For::Program)
    }

    /// Takes the next event about a connection of a context's queue pairs.
    ///
    /// # Errors
    ///
    /// No such context, or one without [`tcp_events`](Self::tcp_events).
    pub fn take_tcp_event(&self, context: ContextId) -> Result<Option<TcpEvent>, EngineError> {
        self.enter()?.events.take_tcp(context, For::Program)
    }

    /// Drops the events about the connections of a queue pair that nobody has taken.
    ///
    /// # Errors
    ///
    /// As [`take_tcp_event`](Self::take_tcp_event).
    pub fn forget_tcp_events(&self, context: ContextId, qp: QpId) -> Result<(), EngineError> {
        self.enter()?.events.forget_tcp(context, qp)
    }

    /// As [`take_tcp_event`](Self::take_tcp_event), and waits for one, unless the program has made the
    /// descriptor non-blocking.
    ///
    /// # Errors
    ///
    /// As there; [`EngineError::WouldBlock`], [`EngineError::Interrupted`]; [`EngineError::AdapterLost`],
    /// [`EngineError::LinkGone`] if nothing more will come.
    pub fn wait_tcp_event(&self, context: ContextId) -> Result<TcpEvent, EngineError> {
        self.wait_tcp(context, For::Program)
    }

    /// From now on keeps a copy of each such event for a library over the engine, which keeps account of
    /// connections while its program takes the events.
    ///
    /// # Errors
    ///
    /// As [`tcp_events`](Self::tcp_events).
    pub fn tcp_notes(&self, context: ContextId) -> Result<(), EngineError> {
        self.enter()?.events.open_tcp(context, For::Library).map(drop)
    }

    /// Takes the next of these copies.
    ///
    /// # Errors
    ///
    /// No such context, or one without [`tcp_notes`](Self::tcp_notes).
    pub fn take_tcp_note(&self, context: ContextId) -> Result<Option<TcpEvent>, EngineError> {
        self.enter()?.events.take_tcp(context, For::Library)
    }

    /// As [`take_tcp_note`](Self::take_tcp_note), and waits for one.
    ///
    /// # Errors
    ///
    /// As [`wait_tcp_event`](Self::wait_tcp_event).
    pub fn wait_tcp_note(&self, context: ContextId) -> Result<TcpEvent, EngineError> {
        self.wait_tcp(context, For::Library)
    }

    fn wait_tcp(&self, context: ContextId, whose: For) -> Result<TcpEvent, EngineError> {
        loop {
            let mut core = self.enter()?;
            core.run();
            if let Some(event) = core.events.take_tcp(context, whose)? {
                return Ok(event);
            }
            core.still_there()?;
            let fd = core.events.tcp_fd(context, whose)?;
            if is_non_blocking(fd) {
                return Err(EngineError::WouldBlock);
            }
            if core.driver {
                self.sleep_beside_driver(core, || wait_readable(fd, None))?;
                continue;
            }
            let attend = |core: &mut Core| core.events.attend_tcp(context, whose);
            let leave = |core: &mut Core| {
                core.events.leave_tcp();
                core.events.take_tcp(context, whose)
            };
            if let Some(event) = self.drive(core, None, attend, leave)? {
                return Ok(event);
            }
        }
    }

    /// That something may still happen to connections, of which nothing has been heard yet.
    ///
    /// # Errors
    ///
    /// [`EngineError::AdapterLost`], [`EngineError::LinkGone`].
    pub fn still_there(&self) -> Result<(), EngineError> {
        self.enter()?.still_there()
    }

    /// Shows what was counted up to now to others of this user (`quipu top`), who otherwise see it some time
    /// later.
    ///
    /// # Errors
    ///
    /// The engine belongs to the parent of this process.
    pub fn show_counters(&self) -> Result<(), EngineError> {
        self.enter()?.publish_now();
        Ok(())
    }

    /// Takes the lock for a call about QPIP.
    fn enter_for_qpip(&self) -> Result<crate::lock::Guard<'_, Core>, EngineError> {
        let core = self.enter()?;
        core.still_there()?;
        if core.qpip.is_some() { Ok(core) } else { Err(EngineError::NoLink) }
    }
}

fn settle(core: &mut Core) {
    let now = core.now();
    core.settle(now);
}

impl Core {
    /// Whether the adapter of QPIP has nothing to do with anybody any more: the process that shares it has
    /// ended, or its link is gone.
    #[inline]
    pub(super) fn is_lost(&self) -> bool {
        self.attached.as_ref().is_some_and(|attached| attached.is_lost())
            || self.qpip.as_ref().is_some_and(|qpip| qpip.is_gone())
    }

    /// Ends what queue pairs had to do over the link that is gone, and tells whoever waits. In an engine with
    /// other queue pairs as well, of a program for verbs, those go on; it hears that the port of their device
    /// is down, and identifiers that are bound to it, that it is gone.
    #[cold]
    pub(super) fn lose(&mut self) {
        if let Some(qpip) = &mut self.qpip
            && qpip.take_end()
        {
            let now = self.clock.recent();
            self.events.of_port(AsyncEvent::PortErr, |device| device == Device::QuipuQp0);
            self.adapter.lose_link(now);
            // Identifiers hear of the ends of their connections first.
            self.collect_events();
            if let Some(cm) = &mut self.cm {
                cm.lose_link(now.0);
            }
            if self.has_work() {
                self.work(now, Net::transmit);
            }
        }
        if self.attached.is_some() || self.events.has_tcp_users() {
            self.events.end();
        }
    }

    /// That something may still come.
    ///
    /// # Errors
    ///
    /// [`EngineError::AdapterLost`], [`EngineError::LinkGone`].
    #[inline]
    pub(crate) fn still_there(&self) -> Result<(), EngineError> {
        if self.events.are_over() { Err(self.loss()) } else { Ok(()) }
    }

    #[cold]
    fn loss(&self) -> EngineError {
        match &self.qpip {
            Some(qpip) => EngineError::LinkGone { link: qpip.name().to_owned() },
            None => EngineError::AdapterLost,
        }
    }
}
