//! What neighbours are told unasked: whoever had these addresses before, at another station, is not there any
//! more.

use std::net::IpAddr;

use quipu_wire::{arp, ethernet, ipv6, ndp};

use super::{ALL_NODES, Message, NEVER, Neighbours, SECOND};

/// How often: as RFC 5227 2.3 has it, and at most what RFC 4861 7.2.6 allows.
const TIMES: u8 = 2;
/// RFC 5227 1.1 (ANNOUNCE_INTERVAL), and not less than RFC 4861 7.2.6 asks for.
const INTERVAL: u64 = 2 * SECOND;

/// When the addresses are announced, and how often they were.
#[derive(Clone, Copy, Debug)]
pub(super) struct Announcements {
    pub(super) at: u64,
    told: u8,
}

impl Announcements {
    pub(super) const NONE: Self = Self { at: NEVER, told: TIMES };

    pub(super) fn begin(now: u64) -> Self {
        Self { at: now, told: 0 }
    }
}

impl Neighbours {
    /// Tells all neighbours where the addresses of this end are, if it is time: they need not find out that
    /// nobody answers any more at a station that they know from before (RFC 5227 2.3, RFC 4861 7.2.6).
    pub(super) fn announce(&mut self, now: u64) {
        if self.announcements.at > now {
            return;
        }
        let own: Vec<IpAddr> = self.routes.own().collect();
        own.into_iter().for_each(|address| self.announce_one(address));
        let told = self.announcements.told + 1;
        let at = if told < TIMES { now + INTERVAL } else { NEVER };
        self.announcements = Announcements { at, told };
    }

    fn announce_one(&mut self, address: IpAddr) {
        let station = self.station;
        let (to, message) = match address {
            IpAddr::V4(own) => {
                let message = arp::Repr {
                    operation: arp::Operation::Request,
                    sender_station: station,
                    sender: own,
                    target_station: [0; 6],
                    target: own,
                };
                (ethernet::BROADCAST, Message::Arp(message))
            }
            IpAddr::V6(own) => {
                let message = ndp::Repr::NeighbourAdvertisement {
                    target: own,
                    router: false,
                    solicited: false,
                    overrides: true,
                    station: Some(station),
                };
                let to = ipv6::multicast_station(ALL_NODES);
                (to, Message::Discovery { source: own, destination: ALL_NODES, message })
            }
        };
        self.answer(to, message);
    }
}
