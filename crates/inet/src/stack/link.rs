//! Between packets and the link: stations, where it has any.

use std::net::IpAddr;

use quipu_wire::ndp::Station;
use quipu_wire::{arp, ethernet};

use super::ingress::Packet;
use super::{Event, Stack};
use crate::neighbour::{self, Lookup};

/// Events that wait at a time; beyond it they are dropped.
const MAX_NOTICES: usize = 256;

/// Where a packet goes next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Hop {
    /// To this station; on a link without, to whom it is for.
    Station(Station),
    /// The station of this address is being looked for.
    Resolving(IpAddr),
    /// Nothing leads there.
    Nowhere,
}

impl Stack {
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
        if let Some(neighbours) = &mut self.neighbours
            && let Some(next_hop) = neighbours.next_hop(now, to)
        {
            neighbours.confirm(now, next_hop);
        }
    }

    /// The packet in a frame, once everything below IP is seen to.
    pub(super) fn unframe(&mut self, now: u64, bytes: &[u8]) -> Option<Packet> {
        let Some(neighbours) = &mut self.neighbours else { return self.packet(bytes, 0) };
        let Ok((ethernet, header)) = ethernet::Repr::parse(bytes) else {
            self.counters.malformed += 1;
            return None;
        };
        let group = ethernet.destination[0] & 1 != 0;
        let ours = group || Some(ethernet.destination) == self.hardware;
        // A frame of this station's own comes back from hubs and from taps.
        if !ours || Some(ethernet.source) == self.hardware {
            self.counters.other += 1;
            return None;
        }
        match ethernet.kind {
            ethernet::kind::ARP => {
                match arp::Repr::parse(&bytes[header..]) {
                    Ok(message) => neighbours.handle_arp(now, &message),
                    Err(_) => self.counters.malformed += 1,
                }
                self.hear_neighbours();
                None
            }
            ethernet::kind::IPV4 | ethernet::kind::IPV6 => {
                let packet = self.packet(bytes, header)?;
                // RFC 1122 3.3.6: what went to all stations is not for one address.
                if group && packet.local.is_some() {
                    self.counters.martians += 1;
                    return None;
                }
                Some(Packet { station: ethernet.source, ..packet })
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
            let (next_hop, found) = match event {
                neighbour::Event::Found(next_hop) => (next_hop, true),
                neighbour::Event::Lost(next_hop) => (next_hop, false),
            };
            self.resume(next_hop, found);
            self.notice(Event::Neighbour { next_hop, found });
        }
    }

    /// Keeps an event that is of no connection.
    pub(super) fn notice(&mut self, event: Event) {
        if self.notices.len() < MAX_NOTICES {
            self.notices.push_back(event);
        } else {
            self.counters.notices_dropped += 1;
        }
    }
}
