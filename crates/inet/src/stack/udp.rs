//! UDP (RFC 768, RFC 8085).

use std::net::{IpAddr, SocketAddr};

use quipu_wire::ndp::Station;
use quipu_wire::{ipv4, udp};

use super::egress::{Envelope, ip_header};
use super::ingress::{Packet, UDP};
use super::link::Hop;
use super::ports::{Ephemeral, PortMap};
use super::{
    Arrival, BindError, Carriage, Datagram, DatagramError, Departure, MAX_MTU, Payload, Stack,
    UdpId,
};
use crate::icmp::Cause;
use crate::tcp::{Flow, Secret};

/// A bound port; none: free.
#[derive(Clone, Copy, Debug, Default)]
struct Socket {
    port: Option<u16>,
    generation: u32,
}

#[derive(Clone, Debug)]
pub(super) struct Sockets {
    sockets: Vec<Socket>,
    free: Vec<u32>,
    ports: PortMap,
    ephemeral: Ephemeral,
}

impl Sockets {
    pub(super) fn new(secret: Secret) -> Self {
        Self {
            sockets: Vec::new(),
            free: Vec::new(),
            ports: PortMap::default(),
            ephemeral: Ephemeral::new(secret),
        }
    }

    fn port(&self, socket: UdpId) -> Option<u16> {
        let found = self.sockets.get(socket.index as usize)?;
        (found.generation == socket.generation).then_some(found.port)?
    }

    pub(super) fn at(&self, port: u16) -> Option<UdpId> {
        let index = self.ports.get(port)?;
        Some(UdpId { index, generation: self.sockets[index as usize].generation })
    }
}

/// The port from which and the address to which a datagram goes, and which own address that is from.
pub(super) struct Ends {
    pub(super) source: u16,
    pub(super) local: u16,
    pub(super) to: SocketAddr,
}

impl Stack {
    /// Binds a UDP port of all own addresses, a free one if `port` is 0; says which.
    ///
    /// # Errors
    /// The port is in use, or all are.
    pub fn bind(&mut self, port: u16) -> Result<(UdpId, u16), BindError> {
        let sockets = &mut self.sockets;
        let port = if port == 0 {
            // No peer: what is to be unpredictable is only the port.
            let flow = Flow { local: ([0; 4], 0).into(), remote: ([0; 4], 0).into() };
            let Sockets { ports, ephemeral, .. } = sockets;
            ephemeral.choose(&flow, |port| ports.get(port).is_none()).ok_or(BindError::NoPort)?
        } else {
            port
        };
        if sockets.ports.get(port).is_some() {
            return Err(BindError::InUse);
        }
        let index = sockets.free.pop().unwrap_or_else(|| {
            sockets.sockets.push(Socket::default());
            (sockets.sockets.len() - 1) as u32
        });
        let socket = &mut sockets.sockets[index as usize];
        socket.port = Some(port);
        sockets.ports.insert(port, index);
        Ok((UdpId { index, generation: socket.generation }, port))
    }

    /// Gives a port back.
    pub fn unbind(&mut self, socket: UdpId) {
        let Some(port) = self.sockets.port(socket) else { return };
        let sockets = &mut self.sockets;
        sockets.ports.remove(port);
        let freed = &mut sockets.sockets[socket.index as usize];
        *freed = Socket { port: None, generation: freed.generation.wrapping_add(1) };
        sockets.free.push(socket.index);
    }

    /// Writes the headers of a datagram of `len` octets into `out`, which has room for the MTU and 14
    /// octets. The user copies the payload behind them.
    ///
    /// # Errors
    /// See [`DatagramError`].
    pub fn compose_datagram(
        &mut self,
        now: u64,
        socket: UdpId,
        to: SocketAddr,
        carriage: Carriage,
        len: usize,
        out: &mut [u8],
    ) -> Result<Departure, DatagramError> {
        self.now = now;
        let Ends { source, local, to } = self.ends(socket, to, len)?;
        let overhead = ip_header(to.ip()) as usize + udp::LEN;
        let fits = self.path_mtu(to.ip()) as usize - overhead;
        if len > fits {
            return Err(DatagramError::Long { fits });
        }
        let station = self.station(now, to.ip())?;
        let envelope = Envelope::plain(local, to.ip(), station, UDP).carried(carriage);
        let start = self.write_ip(&envelope, udp::LEN + len, out);
        let own = SocketAddr::new(self.addresses.get(local), source);
        self.outstanding.sent(now, own, to, (overhead + len) as u32);
        let repr = udp::Repr { source, destination: to.port(), payload_len: len as u16 };
        let headers = start + repr.emit(&mut out[start..]);
        let at = start + udp::CHECKSUM_AT;
        let checksum = self.prepare(&envelope, start, at, headers, len, out);
        let loops = station.is_none();
        Ok(Departure { payload: 0..len as u64, checksum, loops, ..Departure::bare(headers) })
    }

    /// The longest datagram to an address: what the length field of UDP can say over IPv6, and that of IPv4
    /// over IPv4.
    pub fn max_datagram(to: IpAddr) -> usize {
        let header = if to.to_canonical().is_ipv4() { ipv4::LEN } else { 0 };
        MAX_MTU as usize - header - udp::LEN
    }

    /// Between which ends a datagram of `len` octets goes.
    pub(super) fn ends(
        &self,
        socket: UdpId,
        to: SocketAddr,
        len: usize,
    ) -> Result<Ends, DatagramError> {
        let to = SocketAddr::new(to.ip().to_canonical(), to.port());
        let source = self.sockets.port(socket).ok_or(DatagramError::Closed)?;
        if to.port() == 0 || !self.addresses.is_peer(to.ip()) {
            return Err(DatagramError::BadAddress);
        }
        let local = self.addresses.source(to.ip()).ok_or(DatagramError::NoRoute)?;
        let most = Self::max_datagram(to.ip());
        if len > most {
            return Err(DatagramError::TooLong { most });
        }
        Ok(Ends { source, local, to })
    }

    /// The station to which a datagram goes; none: it is for this stack.
    pub(super) fn station(
        &mut self,
        now: u64,
        to: IpAddr,
    ) -> Result<Option<Station>, DatagramError> {
        if self.addresses.find(to).is_some() {
            return Ok(None);
        }
        match self.hop(now, to) {
            Hop::Own => Ok(None),
            Hop::Station(station) => Ok(Some(station)),
            Hop::Resolving(next_hop) => Err(DatagramError::Unresolved { next_hop }),
            Hop::Nowhere => Err(DatagramError::NoRoute),
        }
    }

    /// A datagram to an own address.
    pub(super) fn arrive_udp(&mut self, now: u64, packet: &Packet<'_>, checked: bool) -> Arrival {
        let bytes = packet.payload;
        let Ok((repr, header)) = udp::Repr::parse(bytes) else {
            self.counters.udp_malformed += 1;
            return Arrival::Nothing;
        };
        let bytes = &bytes[..header + usize::from(repr.payload_len)];
        let unsealed = bytes[udp::CHECKSUM_AT..udp::CHECKSUM_AT + 2] == [0; 2];
        // RFC 768: over IPv4 a datagram may have no checksum; over IPv6 it must (RFC 8200 8.1).
        let valid =
            if unsealed { packet.source.is_ipv4() } else { checked || packet.is_intact(bytes) };
        if !valid {
            self.counters.checksum += 1;
            return Arrival::Nothing;
        }
        let Some(socket) = self.sockets.at(repr.destination) else {
            self.counters.udp_unknown += 1;
            // RFC 1122 4.1.3.1, RFC 4443 3.1.
            self.refuse(now, packet, Cause::Port);
            return Arrival::Nothing;
        };
        let range = header..header + usize::from(repr.payload_len);
        let payload = match packet.at {
            Some(at) => Payload::Frame(at + range.start..at + range.end),
            None => {
                self.reassembled = range;
                Payload::Reassembled
            }
        };
        Arrival::Datagram(Datagram {
            socket,
            from: packet.from(repr.source),
            to: packet.destination,
            traffic_class: packet.traffic_class,
            hop_limit: packet.hop_limit,
            payload,
        })
    }
}
