//! Listeners of the stack: ports that are watched, and who comes to them.

use std::net::IpAddr;
use std::sync::Arc;

use quipu_wire::ndp::Station;
use quipu_wire::tcp::{Flags, Repr, SeqNumber};

use super::connections::Marks;
use super::demux::Key;
use super::egress::Answer;
use super::ingress::Packet;
use super::ports::PortMap;
use super::syns::Line;
use super::wheel::Wheel;
use super::{Arrival, Carriage, ListenError, ListenerId, Stack};
use crate::tcp::{Config, Flow, Listener, Opening, initial_number, reset_for};

/// A watched port.
#[derive(Clone, Debug)]
pub(super) struct Watched {
    port: u16,
    /// For IPv4 and for IPv6, whose segments are of different size.
    pub(super) families: [Listener; 2],
    /// How many more connections somebody is there for.
    pub(super) idle: u32,
    /// Connections that the user has not heard of yet.
    pub(super) unheard: u32,
    /// Who waits until somebody is there.
    pub(super) line: Line,
}

#[derive(Clone, Debug, Default)]
pub(super) struct Listeners {
    places: Vec<(u32, Option<Watched>)>,
    free: Vec<u32>,
    pub(super) ports: PortMap,
    /// How many wait in all lines,
    pub(super) waiting: usize,
    /// and until when the first of each does.
    pub(super) patience: Wheel,
}

impl Listeners {
    pub(super) fn at(&mut self, index: u32) -> Option<&mut Watched> {
        self.places.get_mut(index as usize)?.1.as_mut()
    }

    fn get(&mut self, listener: ListenerId) -> Option<&mut Watched> {
        let (generation, watched) = self.places.get_mut(listener.index as usize)?;
        (*generation == listener.generation).then_some(watched.as_mut())?
    }

    pub(super) fn id(&self, index: u32) -> ListenerId {
        ListenerId { index, generation: self.places[index as usize].0 }
    }
}

impl Stack {
    /// A port that is not watched, another each time.
    pub fn free_port(&mut self) -> Option<u16> {
        let flow = Flow { local: ([0; 4], 0).into(), remote: ([0; 4], 0).into() };
        let watched = &self.listeners.ports;
        self.ephemeral.choose(&flow, |port| watched.get(port).is_none())
    }

    /// Watches a port, a free one if `port` is 0, on all own addresses; says which. At most `backlog`
    /// connections are half open at a time; beyond it peers get cookies (RFC 4987). Until
    /// [`Stack::set_idle`] says that somebody is there, peers are kept waiting.
    ///
    /// # Errors
    /// The port is in use, or all are.
    pub fn listen(
        &mut self,
        port: u16,
        config: &Arc<Config>,
        backlog: u32,
    ) -> Result<(ListenerId, u16), ListenError> {
        let port = if port == 0 { self.free_port().ok_or(ListenError::NoPort)? } else { port };
        if self.listeners.ports.get(port).is_some() {
            return Err(ListenError::InUse);
        }
        let families = [IpAddr::from([0; 4]), IpAddr::from([0; 16])]
            .map(|any| Listener::new(self.fitted(config, any), self.secret, backlog));
        let listeners = &mut self.listeners;
        let index = listeners.free.pop().unwrap_or_else(|| {
            listeners.places.push((0, None));
            (listeners.places.len() - 1) as u32
        });
        let line = Line::new(backlog);
        let watched = Watched { port, families, idle: 0, unheard: 0, line };
        listeners.places[index as usize].1 = Some(watched);
        listeners.ports.insert(port, index);
        Ok((listeners.id(index), port))
    }

    /// How many more connections somebody is there for, not counting those of which
    /// [`Event::Incoming`](super::Event::Incoming) was read. 0: peers are kept waiting, their SYNs are not
    /// answered. Those that have come a moment ago are answered now, so events are to be polled afterwards.
    pub fn set_idle(&mut self, listener: ListenerId, idle: u32) {
        if let Some(watched) = self.listeners.get(listener) {
            watched.idle = idle;
            self.answer_held(self.now, listener.index);
        }
    }

    /// How many connections to a port are half open of which [`Event::Incoming`](super::Event::Incoming) was
    /// read.
    pub fn half_open(&self, listener: ListenerId) -> u32 {
        let place = self.listeners.places.get(listener.index as usize);
        let place = place.filter(|(generation, _)| *generation == listener.generation);
        let watched = place.and_then(|(_, watched)| watched.as_ref());
        watched.map_or(0, |it| {
            let half_open: u32 = it.families.iter().map(Listener::half_open).sum();
            half_open.saturating_sub(it.unheard)
        })
    }

    /// Does not watch any more. Connections that exist go on. SYNs that wait are forgotten: whoever watches
    /// the port next, or nobody, answers them when they come again.
    pub fn unlisten(&mut self, listener: ListenerId) {
        let Some(port) = self.listeners.get(listener).map(|watched| watched.port) else { return };
        let listeners = &mut self.listeners;
        self.counters.tcp_given_up += listeners.dismiss(listener.index) as u64;
        listeners.ports.remove(port);
        let (generation, watched) = &mut listeners.places[listener.index as usize];
        (*generation, *watched) = (generation.wrapping_add(1), None);
        listeners.free.push(listener.index);
        self.connections.forget_listener(listener.index);
    }

    /// RFC 9293 3.6.1 (MAY-2): a connection in TIME-WAIT ends before its time if a new one begins; also if
    /// that one has to wait until somebody is there for it. Its peer would have to reset the old one
    /// otherwise, and wait once more. Says above which number the new one has to begin; where nobody would
    /// see to that, and no timestamps tell old segments from new ones, the clock must have passed it.
    pub(super) fn gives_way(
        &mut self,
        now: u64,
        index: u32,
        key: &Key,
        syn: &Repr,
    ) -> Option<SeqNumber> {
        let at = self.listeners.ports.get(syn.destination)?;
        let (secret, flow) = (self.secret, self.flow_of(key));
        let waits = !self.may_open(at) || self.waits(at, key);
        let watched = self.listeners.at(at)?;
        let waits = waits || watched.families[usize::from(flow.remote.is_ipv6())].is_full();
        let old = self.connections.slot(index).connection.as_mut();
        let old = old.filter(|old| old.gives_way_to(syn))?;
        let end = old.end_number();
        if waits && !old.is_told_from(syn) && initial_number(now, secret, &flow).distance(end) < 0 {
            return None;
        }
        old.give_way();
        self.counters.tcp_reused += 1;
        self.after(index);
        self.connections.unlist(index);
        Some(end)
    }

    /// Has a connection that was just opened begin at `end`, which the one before it has come to, or above.
    pub(super) fn begin_above(&mut self, key: &Key, end: SeqNumber) {
        if let Some(index) = self.connections.find(key)
            && let Some(connection) = self.connections.slot(index).connection.as_mut()
        {
            connection.begin_above(end);
        }
    }

    /// Whether one more connection to a port may be opened by a peer.
    pub(super) fn may_open(&self, at: u32) -> bool {
        let watched = self.listeners.places[at as usize].1.as_ref();
        watched.is_some_and(|it| it.idle > it.unheard) && self.connections.has_room()
    }

    /// A segment of no connection.
    pub(super) fn arrive_new(
        &mut self,
        now: u64,
        key: &Key,
        segment: &Repr,
        payload: usize,
        station: Option<Station>,
    ) {
        let Some(at) = self.listeners.ports.get(segment.destination) else {
            self.counters.tcp_unknown += 1;
            if let Some(header) = reset_for(segment, payload) {
                self.reply(key, station, Carriage::default(), header);
            }
            return;
        };
        let flags = segment.flags;
        if flags.has(Flags::RST) {
            self.withdraw(at, key, segment.seq);
        } else if flags.has(Flags::SYN) && !flags.has(Flags::ACK) && !flags.has(Flags::FIN) {
            // Who waits is told what it says now, in its turn, which may have come.
            if self.waits(at, key) {
                self.hold(now, at, key, segment, station);
                return self.answer_held(now, at);
            }
            self.answer_held(now, at);
            if !self.may_open(at) {
                return self.hold(now, at, key, segment, station);
            }
        }
        self.meet(now, at, key, segment, payload, station);
    }

    /// The listener takes a segment.
    pub(super) fn meet(
        &mut self,
        now: u64,
        at: u32,
        key: &Key,
        segment: &Repr,
        payload: usize,
        station: Option<Station>,
    ) {
        let (flow, may_open) = (self.flow_of(key), self.may_open(at));
        let Some(watched) = self.listeners.at(at) else { return };
        let listener = &mut watched.families[usize::from(flow.remote.is_ipv6())];
        let (connection, half_open) =
            match listener.handle_segment(now, &flow, segment, payload, may_open) {
                Opening::HalfOpen(connection) => (connection, true),
                Opening::Open(connection) => (connection, false),
                Opening::Reply(header) => {
                    let carriage = Carriage::from(listener.config());
                    self.reply(key, station, carriage, header);
                    return;
                }
                Opening::Early => return self.hold(now, at, key, segment, station),
                Opening::Ignored => {
                    self.counters.tcp_unknown += 1;
                    return;
                }
            };
        if !self.connections.make_room() {
            self.counters.tcp_full += 1;
            return;
        }
        watched.unheard += 1;
        self.counters.tcp_accepted += 1;
        let index = self.keep(now, connection, *key, &flow);
        let slot = self.connections.slot(index);
        slot.listener = at;
        slot.marks.set(Marks::INCOMING);
        if half_open {
            slot.marks.set(Marks::HALF_OPEN);
        }
        // The segment that brought a cookie back may have data, but nobody has posted a receive yet: it
        // comes again.
    }

    /// A segment that brings something has come to a connection that is half open. If it completes the
    /// handshake it is to come again: whoever is to have the rest is found by events. Of one that came in
    /// parts there is nothing then; its sender repeats it.
    pub(super) fn complete(
        &mut self,
        now: u64,
        index: u32,
        packet: &Packet<'_>,
        segment: &Repr,
    ) -> Arrival {
        let Some(connection) = self.connections.slot(index).connection.as_mut() else {
            return Arrival::Nothing;
        };
        let drops = connection.counters().drops();
        let stands = connection.complete(now, segment);
        self.counters.note_drops(drops, connection.counters().drops());
        if stands && packet.below.station.is_some() {
            self.confirm(now, packet.source);
        }
        self.after(index);
        if stands && packet.at.is_some() { Arrival::Again } else { Arrival::Nothing }
    }

    fn reply(&mut self, key: &Key, station: Option<Station>, carriage: Carriage, header: Repr) {
        if header.flags.has(Flags::RST) {
            self.counters.tcp_resets += 1;
        } else {
            self.counters.tcp_cookies += 1;
        }
        self.keep_answer(Answer::Segment {
            local: key.local,
            to: key.remote().ip(),
            station,
            carriage,
            header,
        });
    }

    /// The listener that a connection came to, if it still watches the port.
    pub(super) fn watched(&mut self, index: u32) -> Option<&mut Watched> {
        self.listeners.at(self.connections.slot(index).listener)
    }
}
