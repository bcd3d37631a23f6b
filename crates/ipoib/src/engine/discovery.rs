//! Who has which address: ARP and neighbour discovery, both ways.
//!
//! A peer speaks for the link-layer address that its datagram came from, and for no other: there are no
//! proxies.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use quipu_wire::arp::Operation;
use quipu_wire::ipoib::{Arp, Discovery, Encapsulation, LinkAddress, group_gid};
use quipu_wire::ipv6::solicited_node;

use super::{ALL_NODES, Arrival, Destination, Engine};
use crate::counters::Dropped;
use crate::neighbours::Ask;

const NOBODY: [u8; LinkAddress::LEN] = [0; LinkAddress::LEN];

impl Engine {
    fn broadcast(&self) -> Destination {
        Destination::Group(group_gid(Ipv4Addr::BROADCAST.into(), self.config.pkey))
    }

    fn group(&self, group: Ipv6Addr) -> Destination {
        Destination::Group(group_gid(group.into(), self.config.pkey))
    }

    fn queue_arp(&mut self, to: Destination, arp: &Arp) -> bool {
        self.queue(to, Encapsulation::Arp, arp.to_bytes().to_vec())
    }

    /// Asks who has an address, or whether the one that has it is still there.
    pub(super) fn ask(&mut self, ip: IpAddr, ask: Ask) {
        let own = self.config.link;
        let queued = match (ip, self.source_for(ip)) {
            (IpAddr::V4(target), Some(IpAddr::V4(sender))) => {
                let to = match ask {
                    Ask::All => self.broadcast(),
                    Ask::One(link) => Destination::Unicast(link.without_flags()),
                };
                let operation = Operation::Request;
                let (sender_link, target_link) = (own, NOBODY);
                self.queue_arp(to, &Arp { operation, sender_link, sender, target_link, target })
            }
            (IpAddr::V6(target), Some(IpAddr::V6(source))) => {
                let group = solicited_node(target);
                let (to, destination) = match ask {
                    Ask::All => (self.group(group), group),
                    Ask::One(link) => (Destination::Unicast(link.without_flags()), target),
                };
                let asked = Discovery::Solicitation { target, link: Some(own) };
                self.queue(to, Encapsulation::Ipv6, asked.to_packet(source, destination))
            }
            // There is no address of this family to ask from.
            _ => false,
        };
        self.counters.asked += u64::from(queued);
    }

    /// Announces the own addresses (RFC 5227 3; RFC 4861 7.2.6).
    pub(super) fn announce(&mut self) {
        let own = self.config.link;
        for (ip, _) in self.config.addresses.clone() {
            match ip {
                IpAddr::V4(ip) => {
                    let arp = Arp {
                        operation: Operation::Request,
                        sender_link: own,
                        sender: ip,
                        target_link: NOBODY,
                        target: ip,
                    };
                    self.queue_arp(self.broadcast(), &arp);
                }
                IpAddr::V6(ip) => {
                    let (solicited, overrides) = (false, true);
                    let link = Some(own);
                    let told = Discovery::Advertisement { target: ip, solicited, overrides, link };
                    let packet = told.to_packet(ip, ALL_NODES);
                    self.queue(self.group(ALL_NODES), Encapsulation::Ipv6, packet);
                }
            }
        }
    }

    /// Takes an ARP message (RFC 826, RFC 4391 9.2).
    pub(super) fn take_arp(
        &mut self,
        now_ns: u64,
        arrival: &Arrival,
        bytes: &[u8],
    ) -> Result<(), Dropped> {
        let arp = Arp::parse(bytes).map_err(|_| Dropped::Malformed)?;
        let sender = IpAddr::V4(arp.sender);
        let is_probe = arp.sender.is_unspecified() && arp.operation == Operation::Request;
        let link = arp.sender_link;
        if !link.is_same_queue_pair(arrival.source) || self.is_own(sender) {
            return Err(Dropped::Forged);
        }
        if !is_probe && (self.as_group(sender).is_some() || !self.is_on_link(sender)) {
            return Err(Dropped::Forged);
        }
        let is_for_us = self.is_own(arp.target.into());
        match arp.operation {
            Operation::Request if is_for_us => {
                if !is_probe {
                    self.learn(now_ns, sender, link);
                }
                let reply = Arp {
                    operation: Operation::Reply,
                    sender_link: self.config.link,
                    sender: arp.target,
                    target_link: arp.sender_link.to_bytes(),
                    target: arp.sender,
                };
                let queued = self.queue_arp(Destination::Unicast(arrival.source), &reply);
                self.counters.answered += u64::from(queued);
            }
            Operation::Reply if arrival.group.is_some() || !is_for_us => {
                return Err(Dropped::Misdirected);
            }
            // Those that are known are updated by what others ask, too (RFC 826); no one else is learnt.
            Operation::Request | Operation::Reply => self.confirm(now_ns, sender, link),
        }
        Ok(())
    }

    fn confirm(&mut self, now_ns: u64, ip: IpAddr, link: LinkAddress) {
        if let Some(waited) = self.neighbours.update(now_ns, ip, link) {
            self.release(now_ns, link, ip, waited);
        }
    }

    fn learn(&mut self, now_ns: u64, ip: IpAddr, link: LinkAddress) {
        let waited = self.neighbours.learn(now_ns, ip, link);
        self.release(now_ns, link, ip, waited);
    }

    /// Takes a message of neighbour discovery (RFC 4861 7.2).
    pub(super) fn take_discovery(
        &mut self,
        now_ns: u64,
        arrival: &Arrival,
        packet: &[u8],
    ) -> Result<(), Dropped> {
        let (message, header) = match Discovery::parse(packet) {
            Ok(parsed) => parsed,
            Err(quipu_wire::WireError::UnknownIcmp(_)) => return Err(Dropped::Discovery),
            Err(_) => return Err(Dropped::Malformed),
        };
        let source = IpAddr::V6(header.source);
        let is_other = |link: LinkAddress| !link.is_same_queue_pair(arrival.source);
        match message {
            Discovery::Solicitation { target, link } => {
                if link.is_some_and(is_other) || self.is_own(source) {
                    return Err(Dropped::Forged);
                }
                if !self.is_own(target.into()) {
                    // Groups of solicited nodes have members with other addresses.
                    return Ok(());
                }
                let known = self.neighbours.accepts(source, arrival.source);
                let link = link.or(known).unwrap_or(arrival.source);
                self.answer(now_ns, link, target, header.source)
            }
            Discovery::Advertisement { target, link, overrides, .. } => {
                if link.is_some_and(is_other) || self.is_own(target.into()) {
                    return Err(Dropped::Forged);
                }
                let known = self.neighbours.accepts(target.into(), arrival.source);
                let replaces = if overrides { link } else { None };
                if let Some(known) = replaces.or(known) {
                    self.confirm(now_ns, target.into(), link.unwrap_or(known));
                }
                Ok(())
            }
        }
    }

    /// Answers a solicitation for an own address, which came from the queue pair `from`.
    fn answer(
        &mut self,
        now_ns: u64,
        from: LinkAddress,
        target: Ipv6Addr,
        asker: Ipv6Addr,
    ) -> Result<(), Dropped> {
        // RFC 4861 7.2.4: one that has no address yet hears the answer as all do.
        let is_probe = asker.is_unspecified();
        if !is_probe && (asker.is_multicast() || !self.is_on_link(asker.into())) {
            return Err(Dropped::Forged);
        }
        let (to, destination) = match is_probe {
            true => (self.group(ALL_NODES), ALL_NODES),
            false => (Destination::Unicast(from.without_flags()), asker),
        };
        if !is_probe {
            self.learn(now_ns, asker.into(), from);
        }
        let link = Some(self.config.link);
        let solicited = !is_probe;
        let told = Discovery::Advertisement { target, solicited, overrides: true, link };
        let packet = told.to_packet(target, destination);
        let queued = self.queue(to, Encapsulation::Ipv6, packet);
        self.counters.answered += u64::from(queued);
        Ok(())
    }
}
