//! The messages that this end sends to its neighbours, and the frames that carry them.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use quipu_wire::ndp::{self, Station};
use quipu_wire::{arp, ethernet, icmpv6, ipv6};

use super::{
    ALL_ROUTERS, MAX_ROUTER_SOLICITATIONS, NEVER, Neighbours, ROUTER_SOLICITATION_INTERVAL,
};

/// Frames that wait to be taken.
const MAX_WAITING: usize = 256;

/// Octets of the longest frame that [`Neighbours::poll_transmit`] writes.
pub const MAX_FRAME: usize = ethernet::HEADER + ipv6::LEN + 32;

#[derive(Clone, Debug)]
pub(super) enum Message {
    Arp(arp::Repr),
    Discovery { source: Ipv6Addr, destination: Ipv6Addr, message: ndp::Repr },
}

impl Neighbours {
    /// Whether a frame waits.
    pub fn wants_transmit(&self) -> bool {
        !self.waiting.is_empty()
    }

    /// Writes the next frame to the front of `out`, of [`MAX_FRAME`] octets at least, and says how long
    /// it is.
    pub fn poll_transmit(&mut self, out: &mut [u8]) -> Option<usize> {
        let (destination, message) = self.waiting.pop_front()?;
        let kind = match message {
            Message::Arp(_) => ethernet::kind::ARP,
            Message::Discovery { .. } => ethernet::kind::IPV6,
        };
        let at = ethernet::Repr { destination, source: self.station, kind }.emit(out);
        let out = &mut out[at..];
        Some(
            at + match message {
                Message::Arp(message) => message.emit(out),
                Message::Discovery { source, destination, message } => {
                    let message = icmpv6::Repr::Discovery(message);
                    let header = ipv6::Repr {
                        source,
                        destination,
                        next_header: icmpv6::PROTOCOL,
                        traffic_class: 0,
                        flow_label: 0,
                        hop_limit: ndp::HOP_LIMIT,
                        payload_len: message.wire_len() as u16,
                    };
                    let at = header.emit(out);
                    at + message.emit(source, destination, &mut out[at..])
                }
            },
        )
    }

    /// Asks all, or the station that is thought to have it, for an address (RFC 4861 7.2.2, 7.3.3).
    pub(super) fn ask(&mut self, address: IpAddr, station: Option<Station>) {
        let message = match (self.routes.source_for(address), address) {
            (Some(IpAddr::V4(sender)), IpAddr::V4(target)) => Message::Arp(arp::Repr {
                operation: arp::Operation::Request,
                sender_station: self.station,
                sender,
                target_station: station.unwrap_or_default(),
                target,
            }),
            (Some(IpAddr::V6(source)), IpAddr::V6(target)) => {
                let group = ipv6::solicited_node(target);
                let destination = if station.is_some() { target } else { group };
                let message =
                    ndp::Repr::NeighbourSolicitation { target, station: Some(self.station) };
                Message::Discovery { source, destination, message }
            }
            // No address of that family: the question has no sender, and nothing will come of it.
            _ => return,
        };
        let to = station.unwrap_or(match address {
            IpAddr::V4(_) => ethernet::BROADCAST,
            IpAddr::V6(target) => ipv6::multicast_station(ipv6::solicited_node(target)),
        });
        self.answer(to, message);
    }

    pub(super) fn ask_for_routers(&mut self, now: u64) {
        let (at, asked) = self.routers;
        if at > now {
            return;
        }
        let source = self.routes.source_for(ALL_ROUTERS.into());
        let (Some(IpAddr::V6(source)), 0..MAX_ROUTER_SOLICITATIONS) = (source, asked) else {
            self.routers.0 = NEVER;
            return;
        };
        let message = ndp::Repr::RouterSolicitation { station: Some(self.station) };
        let to = ipv6::multicast_station(ALL_ROUTERS);
        self.answer(to, Message::Discovery { source, destination: ALL_ROUTERS, message });
        self.routers = (now + ROUTER_SOLICITATION_INTERVAL, asked + 1);
    }

    pub(super) fn answer(&mut self, to: Station, message: Message) {
        if self.waiting.len() < MAX_WAITING {
            self.waiting.push_back((to, message));
        } else {
            self.counters.unanswered += 1;
        }
    }
}

/// The station address of a group needs no question (RFC 2464 7, RFC 1112 6.4).
pub(super) fn group_station(address: IpAddr) -> Option<Station> {
    match address {
        IpAddr::V6(group) if group.is_multicast() => Some(ipv6::multicast_station(group)),
        IpAddr::V4(group) if group.is_multicast() => {
            let [_, b, c, d] = group.octets();
            Some([0x01, 0x00, 0x5e, b & 0x7f, c, d])
        }
        IpAddr::V4(Ipv4Addr::BROADCAST) => Some(ethernet::BROADCAST),
        _ => None,
    }
}
