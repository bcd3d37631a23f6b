//! Which groups this station listens to (MLDv2, RFC 3810): switches that look for that forward
//! solicitations only to those who have said so (RFC 4861 7.2.1, RFC 4541 3).
//!
//! The groups are those of the own addresses and never change, so what is said is always the same: all of
//! them, twice at first, and whenever somebody asks. Where they are many it takes several reports.

use std::collections::BTreeSet;
use std::net::{IpAddr, Ipv6Addr};

use quipu_wire::checksum::{Sum, sum};
use quipu_wire::ipv6_extension::next_header;
use quipu_wire::{ethernet, icmpv6, ipv6};

use super::ingress::{Header, Packet};
use super::{Departure, Stack};

/// RFC 3810 9.1: how often what is said unasked is said.
const ROBUSTNESS: u8 = 2;
/// RFC 3810 9.11 (Unsolicited Report Interval).
const INTERVAL: u64 = 1_000_000_000;
/// Between two reports, whoever asks.
const LEAST: u64 = 100_000_000;
/// The types of RFC 3810 5.
pub(super) const QUERY: u8 = 130;
const REPORT: u8 = 143;
/// RFC 3810 5.2.12: from now on everything to the group is wanted.
const CHANGE_TO_EXCLUDE: u8 = 4;
/// RFC 3810 5.2.14.
const ROUTERS: Ipv6Addr = Ipv6Addr::new(0xff02, 0, 0, 0, 0, 0, 0, 0x16);
/// Hop-by-Hop Options with a router alert (RFC 2711 2.1), and padding.
const ALERT: [u8; 8] = [icmpv6::PROTOCOL, 0, 5, 2, 0, 0, 1, 0];
const RECORD: usize = 20;
/// Groups of a report, so that it fits every link.
const MOST: usize = (ipv6::MIN_MTU as usize - ipv6::LEN - ALERT.len() - icmpv6::LEN) / RECORD;

/// When the next report is due, and how many follow.
#[derive(Clone, Debug, Default)]
pub(super) struct Groups {
    at: Option<u64>,
    left: u8,
    due: bool,
    /// Groups that were said, of a report that is due.
    said: usize,
    last: u64,
}

impl Groups {
    /// The station begins.
    pub(super) fn begin(&mut self, now: u64) {
        (self.at, self.left) = (Some(now), ROBUSTNESS);
    }

    /// Somebody asks, and wants to be answered within `patience` (RFC 3810 6.2): not by all at once.
    fn ask(&mut self, now: u64, patience: u64, random: u64) {
        let at = (now + random % patience.max(1)).max(self.last + LEAST);
        self.at = Some(self.at.map_or(at, |due| due.min(at)));
        self.left = self.left.max(1);
    }

    pub(super) fn handle_timeout(&mut self, now: u64) {
        if self.at.is_some_and(|at| at <= now) {
            (self.due, self.said, self.last) = (true, 0, now);
            self.left -= 1;
            self.at = (self.left > 0).then_some(now + INTERVAL);
        }
    }

    pub(super) fn poll_timeout(&self) -> Option<u64> {
        self.at
    }

    pub(super) fn wants_transmit(&self) -> bool {
        self.due
    }
}

impl Stack {
    /// A query of a router (RFC 3810 5.1.14, 6.2): it comes from the link itself.
    pub(super) fn arrive_query(&mut self, now: u64, packet: &Packet<'_>) {
        let Header::V6(header) = packet.header else { return };
        // A link without stations has nothing that forwards by groups, and nobody to ask.
        let local = self.hardware.is_some()
            && header.source.is_unicast_link_local()
            && header.hop_limit == 1;
        let code = packet.payload.get(4..6).filter(|_| packet.payload.len() >= 24);
        let (Some(code), true, true) = (code, local, packet.is_intact(packet.payload)) else {
            self.counters.other += 1;
            return;
        };
        // RFC 3810 5.1.3: milliseconds; what is beyond half of the range is answered in the time of that.
        let milliseconds = u64::from(u16::from_be_bytes([code[0], code[1]]).min(0x7fff));
        let random = (self.secret.0[0] ^ now).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 16;
        self.groups.ask(now, milliseconds * 1_000_000, random);
    }

    /// The next report, if one is due.
    pub(super) fn transmit_report(&mut self, out: &mut [u8]) -> Option<Departure> {
        if !self.groups.due {
            return None;
        }
        let Some(station) = self.hardware else {
            self.groups.due = false;
            return None;
        };
        let mut message = vec![REPORT, 0, 0, 0, 0, 0, 0, 0];
        let own = self.addresses.iter().filter_map(|own| match own {
            IpAddr::V6(own) => Some(ipv6::solicited_node(own)),
            IpAddr::V4(_) => None,
        });
        // Addresses that end in the same octets have one group.
        let groups: BTreeSet<Ipv6Addr> = own.collect();
        for group in groups.iter().skip(self.groups.said).take(MOST) {
            message.extend([CHANGE_TO_EXCLUDE, 0, 0, 0]);
            message.extend(group.octets());
        }
        // RFC 3810 5.2.15.
        self.groups.said += MOST;
        self.groups.due = self.groups.said < groups.len();
        let records = (message.len() - icmpv6::LEN) / RECORD;
        message[6..8].copy_from_slice(&(records as u16).to_be_bytes());
        // RFC 3810 5.2.13: from a link-local address.
        let source = ipv6::link_local(station);
        let len = message.len();
        let pseudo = Sum::of_pseudo_header(source.into(), ROUTERS.into(), icmpv6::PROTOCOL, len);
        let checksum = pseudo.and(sum(&message)).checksum();
        message[2..4].copy_from_slice(&checksum.to_be_bytes());
        let destination = ipv6::multicast_station(ROUTERS);
        let kind = ethernet::kind::IPV6;
        let mut at = ethernet::Repr { destination, source: station, kind }.emit(out);
        let header = ipv6::Repr {
            source,
            destination: ROUTERS,
            next_header: next_header::HOP_BY_HOP,
            traffic_class: 0,
            flow_label: 0,
            hop_limit: 1,
            payload_len: (ALERT.len() + len) as u16,
        };
        at += header.emit(&mut out[at..]);
        for part in [&ALERT[..], &message] {
            out[at..at + part.len()].copy_from_slice(part);
            at += part.len();
        }
        self.counters.sent += 1;
        Some(Departure::bare(at))
    }
}
