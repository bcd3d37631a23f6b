//! Queue pairs over TCP.

use std::net::SocketAddr;

use quipu_host::inet::stack::{Carriage, ListenerId};
use quipu_host::nic::{QpAttr, QpAttrMask as Mask, QpCap, QpId, QpNum, QpState, QpType, Sge};
use quipu_host::nic::{TcpChange, TcpSettings};

use super::{Events, Flow, TcpCounters};
use crate::device::{Device, EngineHandle, Opened};
use crate::error::Error;
use crate::post;
use crate::qp::QueuePairBuilder;
use crate::request::Request;

impl QueuePairBuilder {
    /// Creates a queue pair whose transport is a TCP connection, of a [`qpip::Adapter`](super::Adapter). It
    /// is idle: receives can be posted to it, and it can be connected, or offered to a listener.
    ///
    /// # Errors
    ///
    /// As [`build`](Self::build); the device is not on a packet link.
    pub fn build_tcp(self) -> Result<TcpQueuePair, Error> {
        let (id, number, cap) = self.create(QpType::Tcp)?;
        let qp = TcpQueuePair { id, number, cap, built: self };
        // For a device that was not opened as an adapter nobody has yet.
        Events::open(qp.opened())?;
        qp.opened().tcp.add(id, number);
        let attr = QpAttr { state: QpState::Init, port_num: 1, ..QpAttr::default() };
        qp.engine().modify_qp(qp.id, &attr, Mask::STATE | Mask::PKEY_INDEX | Mask::PORT)?;
        Ok(qp)
    }
}

/// A queue pair over a TCP connection, of which the peer may be any TCP.
///
/// Memory of sends is read when a segment is made, and again when it is lost: it is the adapter's until the
/// send completes, which is when the peer's TCP has acknowledged it. What is posted to receive is the window
/// that the peer sees.
///
/// When it is dropped, a connection that is not closed in both directions is reset.
#[derive(Debug)]
pub struct TcpQueuePair {
    id: QpId,
    number: QpNum,
    cap: QpCap,
    /// Keeps its domain and queues.
    built: QueuePairBuilder,
}

impl TcpQueuePair {
    fn opened(&self) -> &Opened {
        &self.built.pd.device().opened
    }

    fn engine(&self) -> &EngineHandle {
        &self.opened().engine
    }

    /// Its number, which completions and events name it by.
    #[must_use]
    pub fn number(&self) -> QpNum {
        self.number
    }

    /// The sizes of its queues, at least those that were asked for.
    #[must_use]
    pub fn capacity(&self) -> QpCap {
        self.cap
    }

    /// Connects it, from a port that is free, and waits until the connection stands. Post the first receives
    /// before: until there are any, the window is closed.
    ///
    /// # Errors
    ///
    /// [`Error::Tcp`]: refused, reset, or nobody answers; there is no way to the peer, or the queue pair is
    /// not idle.
    pub fn connect(&self, to: SocketAddr, settings: &TcpSettings) -> Result<(), Error> {
        self.start_connect(to, None, settings)?;
        self.wait_connected()
    }

    /// As [`connect`](Self::connect), from a port of one's choice and without waiting: an event says what
    /// comes of it.
    ///
    /// # Errors
    ///
    /// There is no way to the peer, the port is taken, or the queue pair is not idle.
    pub fn start_connect(
        &self,
        to: SocketAddr,
        from: Option<u16>,
        settings: &TcpSettings,
    ) -> Result<(), Error> {
        self.opened().tcp.begin(self.opened(), self.id, || {
            Ok(self.engine().tcp_connect(self.id, to, from, settings)?)
        })
    }

    /// Waits until the connection stands: one of its own, or one that a listener has mated it with.
    ///
    /// # Errors
    ///
    /// [`Error::Tcp`]: it has failed.
    pub fn wait_connected(&self) -> Result<(), Error> {
        self.opened().tcp.wait_for(self.opened(), self.id, |status| {
            match (status.connected, status.end) {
                (true, _) => Some(Ok(())),
                (false, Some(TcpChange::Failed(failure))) => Some(Err(Error::Tcp(failure))),
                (false, Some(_)) => Some(Err(Error::Tcp(super::Failure::Reset))),
                (false, None) => None,
            }
        })?
    }

    /// Waits until the connection is over, in both directions or by a failure.
    ///
    /// # Errors
    ///
    /// [`Error::Tcp`]: by a failure.
    pub fn wait_closed(&self) -> Result<(), Error> {
        self.opened().tcp.wait_for(self.opened(), self.id, |status| match status.end? {
            TcpChange::Failed(failure) => Some(Err(Error::Tcp(failure))),
            _ => Some(Ok(())),
        })?
    }

    /// Waits until the peer has closed its direction, or the connection is over. What it sent before has been
    /// received then, as far as receives were posted.
    ///
    /// # Errors
    ///
    /// The engine belongs to the parent of this process.
    pub fn wait_peer_closed(&self) -> Result<(), Error> {
        self.opened().tcp.wait_for(self.opened(), self.id, |status| {
            (status.peer_closed || status.end.is_some()).then_some(())
        })
    }

    /// How its segments are carried from now on: traffic class and hop limit.
    ///
    /// # Errors
    ///
    /// It has no connection; bits of ECN, or a hop limit of 0.
    pub fn set_carriage(&self, carriage: Carriage) -> Result<(), Error> {
        Ok(self.engine().set_carriage(self.id, carriage)?)
    }

    /// Sends nothing more: behind what is posted the peer finds the end of the stream. It may still send.
    ///
    /// # Errors
    ///
    /// It has no connection.
    pub fn close(&self) -> Result<(), Error> {
        Ok(self.engine().tcp_close(self.id)?)
    }

    /// Ends the connection at once, by a reset. What is posted is flushed.
    ///
    /// # Errors
    ///
    /// It has no connection.
    pub fn abort(&self) -> Result<(), Error> {
        Ok(self.engine().tcp_abort(self.id)?)
    }

    /// Ends whatever it has begun: a connection is reset, and what is posted completes, flushed.
    ///
    /// # Errors
    ///
    /// The engine belongs to the parent of this process.
    pub fn flush(&self) -> Result<(), Error> {
        let attr = QpAttr { state: QpState::Err, ..QpAttr::default() };
        Ok(self.engine().modify_qp(self.id, &attr, Mask::STATE)?)
    }

    /// Both ends of its connection, while it has one.
    ///
    /// # Errors
    ///
    /// The engine belongs to the parent of this process.
    pub fn flow(&self) -> Result<Option<Flow>, Error> {
        Ok(self.engine().tcp_flow(self.id)?)
    }

    /// What its connection has seen and done so far, while it has one.
    ///
    /// # Errors
    ///
    /// The engine belongs to the parent of this process.
    pub fn counters(&self) -> Result<Option<TcpCounters>, Error> {
        Ok(self.engine().tcp_counters(self.id)?)
    }

    /// Hands memory to the adapter, to be filled by a message or by the stream. `wr_id` comes back in the
    /// completion.
    ///
    /// # Errors
    ///
    /// The queue is full, or there are more pieces than it takes.
    pub fn post_recv(&self, wr_id: u64, memory: &[Sge]) -> Result<(), Error> {
        Ok(self.engine().post_recv(self.id, wr_id, memory)?)
    }

    /// Hands several receives to the adapter, each with its number and its memory, with one doorbell: cheaper
    /// than one by one.
    ///
    /// # Errors
    ///
    /// As [`post_recv`](Self::post_recv), with the number of receives that were taken before.
    pub fn post_recvs(&self, receives: &[(u64, &[Sge])]) -> Result<(), (usize, Error)> {
        post::receives(self.engine(), self.id, receives)
    }

    /// Hands a send to the adapter, which begins at once.
    ///
    /// # Errors
    ///
    /// The queue is full, the queue pair is not connected, or the request is not a send; in
    /// [`Mode::Message`](super::Mode::Message) one of no bytes is none.
    pub fn post_send(&self, request: &Request<'_>) -> Result<(), Error> {
        Ok(self.engine().post_send(self.id, &request.wr)?)
    }

    /// Hands several sends to the adapter, which gathers them: much cheaper than one by one.
    ///
    /// # Errors
    ///
    /// As [`post_send`](Self::post_send), with the number of requests that were taken before.
    pub fn post_sends(&self, requests: &[Request<'_>]) -> Result<(), (usize, Error)> {
        post::sends(self.engine(), self.id, requests)
    }
}

impl Drop for TcpQueuePair {
    fn drop(&mut self) {
        let _ = self.engine().destroy_qp(self.id);
        self.opened().tcp.remove(self.id);
    }
}

/// A TCP port at which connections are taken.
#[derive(Debug)]
pub struct TcpListener {
    device: Device,
    id: ListenerId,
    port: u16,
}

impl TcpListener {
    pub(super) fn new(
        device: &Device,
        port: u16,
        settings: &TcpSettings,
        backlog: u32,
    ) -> Result<Self, Error> {
        let (id, port) = device.opened.engine.tcp_listen(port, settings, backlog)?;
        Ok(Self { device: device.clone(), id, port })
    }

    /// The port.
    #[must_use]
    pub fn port(&self) -> u16 {
        self.port
    }

    /// Gives an idle queue pair away: the next connection that nobody has is mated with it, and an event
    /// tells so. Post receives to it before.
    ///
    /// # Errors
    ///
    /// It is connected, or of another adapter.
    pub fn offer(&self, qp: &TcpQueuePair) -> Result<(), Error> {
        self.device.owns(qp.built.pd.device())?;
        let opened = &self.device.opened;
        opened.tcp.begin(opened, qp.id, || Ok(opened.engine.tcp_offer(self.id, qp.id)?))
    }
}

impl Drop for TcpListener {
    fn drop(&mut self) {
        let _ = self.device.opened.engine.tcp_unlisten(self.id);
    }
}
