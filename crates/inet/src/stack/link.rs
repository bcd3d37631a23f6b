//! Between packets and the link: stations, where it has any.

use std::net::IpAddr;

use quipu_wire::ndp::Station;
use quipu_wire::{arp, ethernet};

use super::connections::{Fate, Marks};
use super::egress::ip_header;
use super::ingress::Below;
use super::tcp::HEADER;
use super::{Event, Stack};
use crate::neighbour::{self, Lookup};

/// Events that wait at a time; beyond it they are dropped.
const MAX_NOTICES: usize = 256;
/// How long a next hop needs no confirmation after one.
const CONFIRMED: u64 = 1_000_000_000;

/// Where a packet goes next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Hop {
    /// Nowhere: it is for this stack.
    Own,
    /// To this station; on a link without, to whom it is for.
    Station(Station),
    /// The station of this address is being looked for.
    Resolving(IpAddr),
    /// Nothing leads there.
    Nowhere,
}

impl Stack {
    /// The largest packet of the link, as far as routers have not said less.
    pub(super) fn link_mtu(&self) -> u32 {
        self.neighbours.as_ref().map_or(self.mtu, |it| it.mtu().min(self.mtu))
    }

    /// A router has said that the link takes other packets than it did (RFC 4861 6.3.4). Connections that
    /// stand have longer segments, or would try some, which would get nowhere.
    pub(super) fn change_link_mtu(&mut self) {
        let (now, mtu) = (self.now, self.link_mtu());
        self.paths.set_link(mtu);
        for index in 0..self.connections.places() {
            let slot = self.connections.slot(index);
            let mss = mtu - ip_header(slot.key.remote().ip()) - HEADER;
            if !slot.marks.has(Marks::LOOPS)
                && let Some(connection) = &mut slot.connection
            {
                connection.limit_path_mss(now, mss as u16);
            }
        }
    }

    /// Where a packet to `to` goes next. If that is not known it is looked for.
    pub(super) fn hop(&mut self, now: u64, to: IpAddr) -> Hop {
        let Some(neighbours) = &mut self.neighbours else {
            return Hop::Station(Station::default());
        };
        let Some(next_hop) = neighbours.next_hop(now, to) else { return Hop::Nowhere };
        match neighbours.lookup(now, next_hop) {
            Lookup::Station(station) => Hop::Station(station),
            Lookup::Resolving => {
                // Another one may have had to give way.
                self.hear_neighbours();
                Hop::Resolving(next_hop)
            }
        }
    }

    /// Whether anything leads to `to`.
    pub(super) fn leads_to(&self, now: u64, to: IpAddr) -> bool {
        self.neighbours.as_ref().is_none_or(|it| it.next_hop(now, to).is_some())
    }

    /// The peer at `to` has acknowledged something, so the next hop passes packets on (RFC 4861 7.3.1).
    pub(super) fn confirm(&mut self, now: u64, to: IpAddr) {
        // Acknowledgements are many, and most say what was said a moment ago.
        if self.confirmed.is_some_and(|(whose, at)| whose == to && now < at + CONFIRMED) {
            return;
        }
        self.confirmed = Some((to, now));
        if let Some(neighbours) = &mut self.neighbours
            && let Some(next_hop) = neighbours.next_hop(now, to)
        {
            neighbours.confirm(now, next_hop);
        }
    }

    /// The peer at `to` has not acknowledged anything for so long that the route may be wrong (RFC 9293 3.8,
    /// MUST-20): a next hop that is not there any more is found out, and another is taken if there is one.
    pub(super) fn doubt(&mut self, now: u64, to: IpAddr) {
        self.confirmed = None;
        if let Some(neighbours) = &mut self.neighbours
            && let Some(next_hop) = neighbours.next_hop(now, to)
        {
            neighbours.doubt(now, next_hop);
        }
    }

    /// Takes everything below IP off a frame; none, if that is all there is, or it is not for this station.
    pub(super) fn unframe(&mut self, now: u64, bytes: &[u8]) -> Option<Below> {
        let Some(neighbours) = &mut self.neighbours else {
            return Some(Below { at: 0, station: Some(Station::default()), to_station: true });
        };
        let Ok((ethernet, at)) = ethernet::Repr::parse(bytes) else {
            self.counters.malformed += 1;
            return None;
        };
        let (station, to_station) = (ethernet.source, ethernet.destination[0] & 1 == 0);
        let ours = !to_station || Some(ethernet.destination) == self.hardware;
        // A frame of this station's own comes back from hubs and from taps.
        if !ours || Some(station) == self.hardware {
            self.counters.other += 1;
            return None;
        }
        match ethernet.kind {
            ethernet::kind::IPV4 | ethernet::kind::IPV6 => {
                Some(Below { at, station: Some(station), to_station })
            }
            ethernet::kind::ARP => {
                match arp::Repr::parse(&bytes[at..]) {
                    Ok(message) => neighbours.handle_arp(now, &message),
                    Err(_) => self.counters.malformed += 1,
                }
                self.hear_neighbours();
                None
            }
            _ => {
                self.counters.other += 1;
                None
            }
        }
    }

    /// What has become of neighbours: whoever waited for one goes on.
    pub(super) fn hear_neighbours(&mut self) {
        while let Some(event) = self.neighbours.as_mut().and_then(|it| it.poll_event()) {
            let (next_hop, found, dead) = match event {
                neighbour::Event::Found(next_hop) => (next_hop, true, false),
                neighbour::Event::Lost(next_hop) => (next_hop, false, true),
                // Of who was pushed out nothing is known: it says nothing about connections.
                neighbour::Event::Displaced(next_hop) => (next_hop, false, false),
            };
            let (now, neighbours) = (self.now, &self.neighbours);
            let fate = |to| match neighbours {
                Some(it) if dead && it.is_cut_off(now, to, next_hop) => Fate::CutOff,
                // Another router is asked instead.
                Some(it) if dead && it.next_hop(now, to) != Some(next_hop) => Fate::GoesOn,
                _ if found => Fate::GoesOn,
                _ => Fate::Lost,
            };
            self.connections.resume(next_hop, fate);
            self.notices_missed |= !self.notice(Event::Neighbour { next_hop, found });
        }
    }

    /// Keeps an event that is of no connection, if there is room.
    pub(super) fn notice(&mut self, event: Event) -> bool {
        let room = self.notices.len() < MAX_NOTICES;
        if room {
            self.notices.push_back(event);
        } else {
            self.counters.notices_dropped += 1;
        }
        room
    }

    /// The next event that is of no connection.
    pub(super) fn next_notice(&mut self) -> Option<Event> {
        let missed = || std::mem::take(&mut self.notices_missed).then_some(Event::Neighbours);
        self.notices.pop_front().or_else(missed)
    }
}
