//! Queue pairs at UDP ports.

use std::net::SocketAddr;

use quipu_host::inet::stack::Carriage;
use quipu_host::nic::{QpAttr, QpAttrMask as Mask, QpId, QpNum, QpState, QpType, Sge, To};

use crate::device::EngineHandle;
use crate::error::Error;
use crate::post;
use crate::qp::QueuePairBuilder;
use crate::request::Request;

impl QueuePairBuilder {
    /// Creates a queue pair at a UDP port (0: one that is free) of a [`qpip::Adapter`](super::Adapter).
    /// Receives and sends can be posted to it at once.
    ///
    /// # Errors
    ///
    /// As [`build`](Self::build); the port is taken, or the device is not on a packet link.
    pub fn build_udp(self, port: u16) -> Result<UdpQueuePair, Error> {
        let (id, number, _) = self.create(QpType::Udp)?;
        let mut qp = UdpQueuePair { id, number, port: 0, built: self };
        let attr = QpAttr { state: QpState::Init, port_num: 1, ..QpAttr::default() };
        qp.engine().modify_qp(qp.id, &attr, Mask::STATE | Mask::PKEY_INDEX | Mask::PORT)?;
        qp.port = qp.engine().udp_bind(qp.id, port)?;
        Ok(qp)
    }
}

/// A queue pair at a UDP port: a send is a datagram to the address that it names, and a datagram that comes
/// fills a receive, whose completion says from where ([`WcExtra::From`](crate::WcExtra)). Datagrams may be
/// lost, come twice and change places; one that finds no receive is lost.
#[derive(Debug)]
pub struct UdpQueuePair {
    id: QpId,
    number: QpNum,
    port: u16,
    built: QueuePairBuilder,
}

impl UdpQueuePair {
    fn engine(&self) -> &EngineHandle {
        &self.built.pd.device().opened.engine
    }

    /// Its number, which completions name it by.
    #[must_use]
    pub fn number(&self) -> QpNum {
        self.number
    }

    /// Its port.
    #[must_use]
    pub fn port(&self) -> u16 {
        self.port
    }

    /// How its datagrams are carried from now on: traffic class and hop limit.
    ///
    /// # Errors
    ///
    /// Bits of ECN, or a hop limit of 0.
    pub fn set_carriage(&self, carriage: Carriage) -> Result<(), Error> {
        Ok(self.engine().set_carriage(self.id, carriage)?)
    }

    /// Hands memory to the adapter, to be filled by one datagram.
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

    /// Sends a datagram. It completes when it is on its way, which may be when the neighbour has been found.
    ///
    /// # Errors
    ///
    /// The queue is full, the request is no send, or longer than a datagram can be.
    pub fn send_to(&self, request: &Request<'_>, to: SocketAddr) -> Result<(), Error> {
        let mut wr = request.wr;
        wr.to = To::Address(to);
        Ok(self.engine().post_send(self.id, &wr)?)
    }
}

impl Drop for UdpQueuePair {
    fn drop(&mut self) {
        let _ = self.engine().destroy_qp(self.id);
    }
}
