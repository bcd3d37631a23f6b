//! Connected mode: which packets go over connections, and what comes over them.

use std::net::IpAddr;

use quipu_wire::ipoib::{
    ConnectionData, Discovery, Encapsulation, LEN as HEADER_LEN, LinkAddress, ends_of,
};

use super::{Destination, Engine, Incoming, Outgoing, Queued, kind_of};
use crate::connections::{ConnectionChange, ConnectionId, ConnectionInfo, Ended, Passage};
use crate::counters::Dropped;
use crate::{MAX_QUEUED, MAX_WAITING_IN_ALL, too_big};

impl Engine {
    /// Where a packet goes for a neighbour whose link-layer address is known: over a connection if both ends
    /// accept those, and in a datagram otherwise. The sender of one that is too long learns the MTU.
    pub(super) fn forward(
        &mut self,
        now_ns: u64,
        link: LinkAddress,
        next: IpAddr,
        kind: Encapsulation,
        packet: &[u8],
    ) -> Result<Outgoing, Dropped> {
        let passage = match &mut self.connections {
            Some(connections) if link.connects => connections.route(now_ns, link, packet),
            _ if packet.len() > self.config.datagram_mtu => {
                Passage::TooLong(self.config.datagram_mtu)
            }
            _ => {
                let to = Destination::Unicast(link.without_flags());
                return Ok(Outgoing::Send(to, kind));
            }
        };
        match passage {
            Passage::Send(id) => Ok(Outgoing::Send(Destination::Connection(id), kind)),
            Passage::Waits => Ok(Outgoing::Waits),
            Passage::TooLong(mtu) => {
                self.tell_mtu(packet, next, mtu);
                Err(Dropped::TooLong)
            }
            Passage::Dropped(why) => Err(why),
        }
    }

    /// Tells the sender of a packet the MTU of its next hop.
    fn tell_mtu(&mut self, packet: &[u8], next: IpAddr, mtu: usize) {
        if self.deliveries.len() < MAX_QUEUED
            && let Some(message) = too_big::message(packet, next, mtu)
        {
            self.counters.too_big += 1;
            self.deliveries.push_back(message);
        }
    }

    /// The next packet for the interface: a message of ICMP about one that was too long for its next hop.
    pub fn poll_deliver(&mut self) -> Option<Vec<u8>> {
        self.deliveries.pop_front()
    }

    /// The next connection to be opened or closed.
    pub fn poll_connection(&mut self) -> Option<ConnectionChange> {
        self.connections.as_mut()?.poll()
    }

    /// The connections that are established, and the last ones that have ended.
    #[must_use]
    pub fn connections(&self) -> Vec<ConnectionInfo> {
        self.connections.as_ref().map(|it| it.infos()).unwrap_or_default()
    }

    /// The neighbour at the other end of a connection, if that has not ended.
    #[must_use]
    pub fn peer_of(&self, id: ConnectionId) -> Option<LinkAddress> {
        self.connections.as_ref()?.peer(id)
    }

    /// A peer at this GID wants a connection, with this private data. The name of the connection, and the
    /// private data to accept it with. Then [`Self::handle_established`] or [`Self::handle_ended`] is due.
    ///
    /// # Errors
    /// The private data make no sense, there are too many connections, or the mode is that of datagrams.
    pub fn handle_request(
        &mut self,
        now_ns: u64,
        gid: [u8; 16],
        private_data: &[u8],
    ) -> Result<(ConnectionId, [u8; ConnectionData::LEN]), Dropped> {
        let connections = self.connections.as_mut().ok_or(Dropped::NotConnected)?;
        let asked = connections.request(now_ns, gid, private_data);
        self.counters.refused += u64::from(asked.is_err());
        asked
    }

    /// A connection is established; in one that this end opened, the acceptance had this private data.
    /// Whether it is wanted: if not, end it, and call [`Self::handle_ended`].
    pub fn handle_established(
        &mut self,
        now_ns: u64,
        id: ConnectionId,
        private_data: &[u8],
    ) -> bool {
        let Some(connections) = &mut self.connections else { return false };
        let is_outgoing = connections.is_outgoing(id);
        let Some((link, waited)) = connections.established(now_ns, id, private_data) else {
            return false;
        };
        match is_outgoing {
            true => self.counters.opened += 1,
            false => self.counters.accepted += 1,
        }
        for bytes in waited {
            let passage = match &mut self.connections {
                Some(connections) => connections.route(now_ns, link, &bytes),
                None => Passage::Dropped(Dropped::NotConnected),
            };
            let is_full = self.queue.len() >= MAX_QUEUED + MAX_WAITING_IN_ALL;
            match passage {
                Passage::Send(id) if !is_full => {
                    self.counters.sent += 1;
                    let (to, kind) = (Destination::Connection(id), kind_of(&bytes));
                    self.queue.push_back(Queued { to, kind, bytes });
                }
                Passage::Send(id) => {
                    self.handle_sent(now_ns, id, 1);
                    self.counters.drop_many(Dropped::Full, 1);
                }
                Passage::TooLong(mtu) => {
                    // Its destination is its next hop, or it comes again.
                    if let Ok((_, to, _)) = ends_of(kind_of(&bytes), &bytes) {
                        self.tell_mtu(&bytes, self.next_hop(to).unwrap_or(to), mtu);
                    }
                    self.counters.drop_many(Dropped::TooLong, 1);
                }
                Passage::Waits => {}
                Passage::Dropped(why) => self.counters.drop_many(why, 1),
            }
        }
        true
    }

    /// A connection could not be made, was refused, or has ended.
    pub fn handle_ended(&mut self, now_ns: u64, id: ConnectionId) {
        let ended = self.connections.as_mut().and_then(|it| it.ended(now_ns, id));
        self.note_ended(now_ns, ended);
    }

    /// A message over a connection could not be sent or received, so the connection is of no use any more.
    pub fn handle_broken(&mut self, now_ns: u64, id: ConnectionId) {
        let ended = self.connections.as_mut().and_then(|it| it.broken(now_ns, id));
        self.note_ended(now_ns, ended);
    }

    fn note_ended(&mut self, now_ns: u64, ended: impl IntoIterator<Item = Ended>) {
        for Ended { link, dropped } in ended {
            self.counters.failed += u64::from(dropped > 0);
            self.counters.drop_many(Dropped::NotConnected, dropped);
            // Its host may be gone, or have another queue pair now.
            self.neighbours.suspect(now_ns, link);
        }
    }

    pub(super) fn close_connections(&mut self, now_ns: u64) {
        let ended = self.connections.as_mut().map(|it| it.due(now_ns)).unwrap_or_default();
        self.note_ended(now_ns, ended);
    }

    /// So many messages over a connection were sent, or are not sent any more.
    pub fn handle_sent(&mut self, now_ns: u64, id: ConnectionId, count: usize) {
        if let Some(connections) = &mut self.connections {
            connections.sent(now_ns, id, count);
        }
    }

    /// A message came over a connection: what it is for.
    pub fn handle_message(&mut self, now_ns: u64, id: ConnectionId, bytes: &[u8]) -> Incoming {
        match self.take_message(now_ns, id, bytes) {
            Ok(incoming) => {
                self.counters.received += 1;
                incoming
            }
            Err(why) => {
                self.counters.drop_many(why, 1);
                Incoming::Dropped(why)
            }
        }
    }

    fn take_message(
        &mut self,
        now_ns: u64,
        id: ConnectionId,
        bytes: &[u8],
    ) -> Result<Incoming, Dropped> {
        let connections = self.connections.as_mut().ok_or(Dropped::NotConnected)?;
        if !connections.received(now_ns, id, bytes.len().saturating_sub(HEADER_LEN)) {
            return Err(Dropped::NotConnected);
        }
        if bytes.len() > self.config.mtu + HEADER_LEN {
            return Err(Dropped::TooLong);
        }
        if bytes.len() < HEADER_LEN {
            return Err(Dropped::Malformed);
        }
        let kind = Encapsulation::parse(bytes).map_err(|_| Dropped::UnknownType)?;
        let packet = &bytes[HEADER_LEN..];
        // Addresses are resolved by datagrams only: there the adapter says who sent them.
        if kind == Encapsulation::Arp
            || kind == Encapsulation::Ipv6 && Discovery::is_discovery(packet)
        {
            return Err(Dropped::Misdirected);
        }
        let (from, to, len) = ends_of(kind, packet).map_err(|_| Dropped::Malformed)?;
        if !self.may_come_from(from) {
            return Err(Dropped::Forged);
        }
        // Groups have datagrams (RFC 4755 2.1).
        if self.as_group(to).is_some() {
            return Err(Dropped::Misdirected);
        }
        Ok(Incoming::Deliver(HEADER_LEN..HEADER_LEN + len))
    }
}

#[cfg(test)]
mod tests;
