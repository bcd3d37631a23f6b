//! TCP: the connections of the stack.

use std::net::{IpAddr, Ipv6Addr, SocketAddr};
use std::sync::Arc;

use quipu_wire::tcp::{Flags, Repr, SeqNumber};

use super::connections::Marks;
use super::demux::Key;
use super::egress::{Envelope, ip_header};
use super::ingress::{Packet, TCP};
use super::link::Hop;
use super::{Arrival, Carriage, ConnectError, Departure, Event, Stack, TcpId};
use crate::icmp::{Report, Trouble};
use crate::tcp::hash::{Purpose, of_flow};
use crate::tcp::{Config, Connection, Flow, Held, SendError, State};
use crate::{pmtu, tcp};

/// Octets of a TCP header without options.
pub(super) const HEADER: u32 = 20;
/// The most octets in front of payload: Ethernet, IPv6, TCP with options.
const HEADERS: u64 = 14 + 40 + 60;

impl Stack {
    /// Opens a connection to `remote`, from `local_port` or an ephemeral one. The segment sizes of `config`
    /// are upper bounds of what the link and the path allow.
    ///
    /// # Errors
    /// See [`ConnectError`].
    pub fn connect(
        &mut self,
        now: u64,
        local_port: Option<u16>,
        remote: SocketAddr,
        config: &Arc<Config>,
    ) -> Result<TcpId, ConnectError> {
        let any = IpAddr::from(Ipv6Addr::UNSPECIFIED);
        self.connect_from(now, SocketAddr::new(any, local_port.unwrap_or(0)), remote, config)
    }

    /// The same, from an own address and a port, each of which may be unspecified (RFC 9293 3.9.1.1,
    /// MUST-43).
    ///
    /// # Errors
    /// The same; [`ConnectError::NoRoute`] also if it is not an own address, or of another family.
    pub fn connect_from(
        &mut self,
        now: u64,
        local: SocketAddr,
        remote: SocketAddr,
        config: &Arc<Config>,
    ) -> Result<TcpId, ConnectError> {
        let ip = remote.ip().to_canonical();
        let remote = SocketAddr::new(ip, remote.port());
        if remote.port() == 0 || !self.addresses.is_peer(ip) {
            return Err(ConnectError::BadAddress);
        }
        let port = local.port();
        let source = if local.ip().is_unspecified() {
            self.addresses.source(ip)
        } else {
            self.addresses.find(local.ip()).filter(|_| local.is_ipv6() == ip.is_ipv6())
        };
        let loops = self.addresses.find(ip).is_some();
        let local =
            source.filter(|_| loops || self.leads_to(now, ip)).ok_or(ConnectError::NoRoute)?;
        if !self.connections.make_room() {
            return Err(ConnectError::TooMany);
        }
        let own = self.addresses.get(local);
        let port = match port {
            0 => self.ephemeral_port(local, remote).ok_or(ConnectError::NoPort)?,
            port => port,
        };
        if (own, port) == (ip, remote.port()) {
            return Err(ConnectError::BadAddress);
        }
        let key = Key::new(local, port, remote);
        if self.connections.find(&key).is_some() {
            return Err(ConnectError::InUse);
        }
        let config = self.fitted(config, ip);
        let flow = Flow { local: SocketAddr::new(own, port), remote };
        let connection = Connection::connect(now, config, self.secret, &flow);
        let index = self.keep(now, Box::new(connection), key, &flow);
        Ok(self.connections.id(index))
    }

    fn ephemeral_port(&mut self, local: u16, remote: SocketAddr) -> Option<u16> {
        let own = SocketAddr::new(self.addresses.get(local), 0);
        let flow = Flow { local: own, remote };
        let (connections, watched) = (&self.connections, &self.listeners.ports);
        self.ephemeral.choose(&flow, |port| {
            (own.ip(), port) != (remote.ip(), remote.port())
                && watched.get(port).is_none()
                && connections.find(&Key::new(local, port, remote)).is_none()
        })
    }

    /// The configuration with segments that fit the link, for peers of the family of `ip`.
    pub(super) fn fitted(&mut self, config: &Arc<Config>, ip: IpAddr) -> Arc<Config> {
        let link = (self.link_mtu() - ip_header(ip) - HEADER) as u16;
        let (receive_mss, path_mss) = (config.receive_mss.min(link), config.path_mss.min(link));
        if (receive_mss, path_mss) == (config.receive_mss, config.path_mss) {
            return Arc::clone(config);
        }
        // One for all connections that were given the same: it would otherwise be a quarter of each.
        let known = self.fitted.iter().find(|(given, fitted)| {
            Arc::ptr_eq(given, config)
                && (fitted.receive_mss, fitted.path_mss) == (receive_mss, path_mss)
        });
        if let Some((_, fitted)) = known {
            return Arc::clone(fitted);
        }
        let fitted = Arc::new(Config { receive_mss, path_mss, ..**config });
        if self.fitted.len() >= 16 {
            self.fitted.remove(0);
        }
        self.fitted.push((Arc::clone(config), Arc::clone(&fitted)));
        fitted
    }

    pub(super) fn keep(
        &mut self,
        now: u64,
        mut connection: Box<Connection>,
        key: Key,
        flow: &Flow,
    ) -> u32 {
        let to = flow.remote.ip();
        let mss = |mtu: u32| (mtu - ip_header(to) - HEADER) as u16;
        // Its configuration may be of a time when the link took more.
        if self.link_mtu() < self.mtu && self.addresses.find(to).is_none() {
            connection.limit_path_mss(now, mss(self.link_mtu()));
        }
        let path = self.paths.get(now, to).min(self.link_mtu());
        if path < self.mtu {
            connection.set_path_mss(now, mss(path));
        }
        // RFC 6437 3: constant for a flow, and not to be guessed.
        let label = of_flow(self.secret, Purpose::FlowLabel, flow, [0; 2]) as u32;
        let index = self.connections.insert(connection, key, label);
        if self.addresses.find(to).is_some() {
            self.connections.slot(index).marks.set(Marks::LOOPS);
        }
        self.connections.touch(index);
        index
    }

    /// See [`Connection::send`].
    ///
    /// # Errors
    /// The same; a connection that is gone is closed.
    pub fn send(&mut self, id: TcpId, len: u64, end_of_message: bool) -> Result<u64, SendError> {
        let connection = self.open(id).ok_or(SendError::Closed)?;
        let end = connection.send(len, end_of_message)?;
        self.connections.touch(id.index);
        Ok(end)
    }

    /// See [`Connection::set_receive_space`].
    pub fn set_receive_space(&mut self, id: TcpId, bytes: u64) {
        let Some(connection) = self.open(id) else { return };
        connection.set_receive_space(bytes);
        self.connections.touch(id.index);
    }

    /// See [`Connection::set_spare`].
    pub fn set_spare(&mut self, id: TcpId, bytes: u32) {
        if let Some(connection) = self.open(id) {
            connection.set_spare(bytes);
        }
    }

    /// How much of what connections have to spare ([`Stack::set_spare`]) the user can keep in all from now
    /// on. What a connection has beyond `rest` octets it may use up in any case, so that others, which keep
    /// all that may be kept, do not have it wait for retransmissions. No limit at first.
    pub fn limit_spare(&mut self, bytes: u32, rest: u32) {
        (self.spare, self.spare_rest) = (bytes, rest);
    }

    /// How what is sent from now on is carried (RFC 9293 3.9.2, SHLD-21); the bits of ECN are not looked at.
    pub fn set_carriage(&mut self, id: TcpId, carriage: Carriage) {
        if let Some(slot) = self.connections.get_mut(id) {
            slot.carriage = carriage.without_ecn();
        }
    }

    /// Changes the traffic class of what a connection sends from now on. The lower two bits, those of ECN,
    /// stay TCP's own.
    pub fn set_traffic_class(&mut self, id: TcpId, traffic_class: u8) {
        if let Some(slot) = self.connections.get_mut(id) {
            slot.carriage = Carriage { traffic_class, ..slot.carriage }.without_ecn();
        }
    }

    /// See [`Connection::admit`].
    pub fn admit(&mut self, id: TcpId) {
        let Some(connection) = self.open(id) else { return };
        connection.admit();
        self.connections.touch(id.index);
    }

    /// See [`Connection::close`].
    pub fn close(&mut self, id: TcpId) {
        let Some(connection) = self.open(id) else { return };
        connection.close();
        self.connections.touch(id.index);
    }

    /// See [`Connection::abort`].
    pub fn abort(&mut self, id: TcpId) {
        let Some(connection) = self.open(id) else { return };
        connection.abort();
        self.after(id.index);
    }

    /// The user goes away with its memory: connections that need it are aborted, and their peers are to be
    /// told by what [`Stack::poll_transmit`] still gives.
    pub fn abort_all(&mut self) {
        for index in 0..self.connections.places() {
            let connection = self.connections.slot(index).connection.as_mut();
            if let Some(connection) = connection.filter(|it| !it.needs_no_user()) {
                connection.abort();
                self.after(index);
            }
        }
    }

    /// The user keeps nothing of it any more, neither what it sends nor what it receives, and forgets `id`.
    /// It is aborted, unless both directions are closed already and only time is still to pass.
    pub fn release(&mut self, id: TcpId) {
        let now = self.now;
        let Some(connection) = self.open(id) else { return };
        match connection.needs_no_user() {
            true => connection.orphan(now),
            false => connection.abort(),
        }
        self.forget(id.index);
    }

    pub(super) fn forget(&mut self, index: u32) {
        let slot = self.connections.slot(index);
        slot.marks.set(Marks::RELEASED);
        if slot.marks.take(Marks::INCOMING)
            && let Some(watched) = self.watched(index)
        {
            watched.unheard = watched.unheard.saturating_sub(1);
        }
        self.after(index);
    }

    /// A connection that exists.
    pub fn connection(&self, id: TcpId) -> Option<&Connection> {
        self.connections.get(id)?.connection.as_deref()
    }

    /// Between whom it is.
    pub fn flow(&self, id: TcpId) -> Option<Flow> {
        Some(self.flow_of(&self.connections.get(id)?.key))
    }

    /// See [`Connection::poll_held`].
    pub fn poll_held(&mut self, id: TcpId) -> Option<Held> {
        self.open(id)?.poll_held()
    }

    pub(super) fn open(&mut self, id: TcpId) -> Option<&mut Connection> {
        self.connections.get_mut(id)?.connection.as_deref_mut()
    }

    pub(super) fn flow_of(&self, key: &Key) -> Flow {
        let local = SocketAddr::new(self.addresses.get(key.local), key.local_port);
        Flow { local, remote: key.remote() }
    }

    /// A segment to the own address `local`.
    pub(super) fn arrive_tcp(
        &mut self,
        now: u64,
        packet: &Packet<'_>,
        local: u16,
        checked: bool,
    ) -> Arrival {
        let (bytes, station) = (packet.payload, packet.below.station);
        if !checked && !packet.is_intact(bytes) {
            self.counters.checksum += 1;
            return Arrival::Nothing;
        }
        let parsed =
            Repr::parse(bytes).ok().filter(|(it, _)| it.source != 0 && it.destination != 0);
        let Some((segment, header)) = parsed else {
            self.counters.tcp_malformed += 1;
            return Arrival::Nothing;
        };
        let key = Key::new(local, segment.destination, packet.from(segment.source));
        let Some(index) = self.connections.find(&key) else {
            self.arrive_new(now, &key, &segment, bytes.len() - header, station);
            return Arrival::Nothing;
        };
        if segment.flags.has(Flags::SYN)
            && let Some(end) = self.gives_way(now, index, &key, &segment)
        {
            self.arrive_new(now, &key, &segment, bytes.len() - header, station);
            self.begin_above(&key, end);
            return Arrival::Nothing;
        }
        let Some(connection) = self.connections.slot(index).connection.as_mut() else {
            return Arrival::Nothing;
        };
        let brings = bytes.len() > header || segment.flags.has(Flags::FIN);
        if brings && connection.waits_for_owner() {
            return self.complete(now, index, packet, &segment);
        }
        let (before, drops) = (connection.acknowledged(), connection.counters().drops());
        let spare = connection.spare();
        connection.set_spare(spare.min(self.spare.max(spare.saturating_sub(self.spare_rest))));
        let mut received =
            connection.handle_segment(now, &segment, &bytes[header..], packet.is_marked());
        connection.set_spare(spare);
        let (progress, more) = (connection.acknowledged() > before, connection.counters().drops());
        if more != drops {
            self.counters.note_drops(drops, more);
        }
        if progress && station.is_some() {
            self.confirm(now, packet.source);
        }
        self.after(index);
        if self.connections.slot(index).marks.has(Marks::RELEASED) {
            return Arrival::Nothing;
        }
        if let Some(placement) = &mut received.placement {
            let start = packet.at.unwrap_or(0) + header;
            placement.payload.start += start;
            placement.payload.end += start;
        }
        if packet.at.is_none() {
            self.reassembled = 0..bytes.len();
        }
        let connection = self.connections.id(index);
        Arrival::Segment { connection, received, reassembled: packet.at.is_none() }
    }

    /// Something has happened to a connection.
    pub(super) fn after(&mut self, index: u32) {
        let slot = self.connections.slot(index);
        let settled = slot.connection.as_ref().is_none_or(|it| it.state() != State::SynReceived);
        if settled && slot.marks.take(Marks::HALF_OPEN) {
            let v6 = slot.key.remote().is_ipv6();
            if let Some(watched) = self.watched(index) {
                watched.families[usize::from(v6)].settled();
            }
        }
        self.connections.touch(index);
    }

    /// The next event of a connection.
    pub(super) fn poll_tcp_event(&mut self) -> Option<Event> {
        while let Some(index) = self.connections.eventful() {
            let connection = self.connections.id(index);
            let slot = self.connections.slot(index);
            if slot.marks.take(Marks::INCOMING) {
                let at = slot.listener;
                let Some(watched) = self.watched(index) else {
                    // Nobody watches any more, and nobody has heard of it.
                    self.release(connection);
                    continue;
                };
                watched.unheard = watched.unheard.saturating_sub(1);
                watched.idle = watched.idle.saturating_sub(1);
                let listener = self.listeners.id(at);
                return Some(Event::Incoming { listener, connection });
            }
            if !slot.marks.has(Marks::RELEASED)
                && let Some(event) = slot.connection.as_mut().and_then(|it| it.poll_event())
            {
                return Some(Event::Tcp { connection, event });
            }
            self.connections.pop_eventful();
        }
        None
    }

    /// The next segment of a connection, the connections in turn.
    pub(super) fn transmit_tcp(&mut self, now: u64, out: &mut [u8]) -> Option<Departure> {
        let max = u64::from(self.offload.segment).min((out.len() as u64).saturating_sub(HEADERS));
        while let Some(index) = self.connections.next_ready() {
            let slot = self.connections.slot(index);
            let to = slot.key.remote().ip();
            if slot.connection.as_ref().is_none_or(|it| it.is_over() || it.is_quiet()) {
                // Nobody is to be looked for.
                self.connections.settle(now, index);
                continue;
            }
            let lost = self.connections.is_lost(index);
            let loops = self.connections.slot(index).marks.has(Marks::LOOPS);
            let hop = if loops { Hop::Own } else { self.hop(now, to) };
            let station = match hop {
                Hop::Own => None,
                Hop::Station(station) => Some(station),
                Hop::Resolving(next_hop) if !lost => {
                    self.connections.park(now, index, next_hop);
                    continue;
                }
                Hop::Resolving(_) | Hop::Nowhere => {
                    self.counters.tcp_unreachable += self.connections.lose(now, index);
                    continue;
                }
            };
            let slot = self.connections.slot(index);
            let next = slot.connection.as_mut().and_then(|it| it.poll_transmit_joined(now, max));
            let Some((segment, cut)) = next else {
                self.connections.settle(now, index);
                continue;
            };
            let envelope = Envelope {
                local: slot.key.local,
                to,
                station,
                protocol: TCP,
                // ECT(0) (RFC 3168 5).
                traffic_class: slot.carriage.traffic_class | if segment.ect { 2 } else { 0 },
                flow_label: slot.flow_label,
                hop_limit: slot.carriage.hop_limit,
                part: None,
            };
            match slot.connection.as_ref().is_some_and(|it| it.is_quiet()) {
                true => self.connections.settle(now, index),
                false => self.connections.put_back(index),
            }
            let of = Some(self.connections.id(index));
            let departure = self.write_segment(&envelope, &segment.header, segment.payload, out);
            return Some(Departure { of, segment: cut, ..departure });
        }
        None
    }

    /// Somebody says something about a segment that began with `seq`.
    pub(super) fn report_tcp(&mut self, now: u64, key: &Key, seq: SeqNumber, report: &Report) {
        let Some(index) = self.connections.find(key) else { return };
        let to = report.destination;
        let said = match report.trouble {
            Trouble::Soft => tcp::Report::Soft,
            Trouble::Hard => tcp::Report::Hard,
            Trouble::TooBig { mtu } => {
                // The path may be known from others, and this connection not have heard of it.
                let Some(mtu) = pmtu::believable(to, mtu) else { return };
                let mss = mtu - ip_header(to) - HEADER;
                tcp::Report::TooBig { mss: u16::try_from(mss).unwrap_or(u16::MAX) }
            }
        };
        let Some(connection) = &mut self.connections.slot(index).connection else { return };
        if !connection.handle_report(now, seq, said) {
            return;
        }
        if let Trouble::TooBig { mtu } = report.trouble {
            self.paths.reduce(now, to, mtu);
        }
        self.after(index);
    }

    /// Deadlines of connections that have passed.
    pub(super) fn expire_tcp(&mut self, now: u64) {
        while let Some(index) = self.connections.expired(now) {
            let slot = self.connections.slot(index);
            let to = slot.key.remote().ip();
            if let Some(connection) = &mut slot.connection {
                let suspected = connection.suspects_route();
                connection.handle_timeout(now);
                if !suspected && connection.suspects_route() {
                    self.doubt(now, to);
                }
            }
            self.after(index);
        }
    }
}
