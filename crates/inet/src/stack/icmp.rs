//! ICMP: what is answered and refused, and what reports of others mean to connections and datagrams.

use std::net::SocketAddr;

use super::demux::Key;
use super::egress::Answer;
use super::ingress::{Header, Packet};
use super::{Event, Stack};
use crate::icmp::{Arrived, Cause, Quoted, Report, Trouble};

impl Stack {
    pub(super) fn arrive_icmp(&mut self, now: u64, packet: &Packet<'_>) {
        let before = self.icmp_answers();
        match packet.header {
            Header::V4(header) => {
                if let Some(report) = self.icmp.handle_v4(now, &header, packet.payload) {
                    self.arrive_report(now, &report);
                }
            }
            Header::V6(header) => match self.icmp.handle_v6(now, &header, packet.payload) {
                Arrived::Nothing => {}
                Arrived::Report(report) => self.arrive_report(now, &report),
                Arrived::Discovery(message) => {
                    let before = self.link_mtu();
                    if let Some(neighbours) = &mut self.neighbours {
                        neighbours.handle_discovery(now, &header, &message);
                        self.hear_neighbours();
                    }
                    if self.link_mtu() != before {
                        self.change_link_mtu();
                    }
                }
            },
        }
        self.answer_to_station(packet, before);
    }

    /// The sender of a packet is told that it is not taken.
    pub(super) fn refuse(&mut self, now: u64, packet: &Packet<'_>, cause: Cause) {
        let before = self.icmp_answers();
        let own = self.addresses.source(packet.source).map(|local| self.addresses.get(local));
        let quoted = match cause {
            Cause::Problem { .. } => packet.whole.into(),
            Cause::Port | Cause::Protocol { .. } => packet.quoted(),
        };
        self.icmp.refuse(now, &quoted, packet.below.to_station, own, cause);
        self.answer_to_station(packet, before);
    }

    fn icmp_answers(&self) -> u64 {
        self.icmp.counters().echoes + self.icmp.counters().errors
    }

    /// An answer goes back to where its cause came from, without looking for a neighbour.
    fn answer_to_station(&mut self, packet: &Packet<'_>, before: u64) {
        if self.icmp_answers() > before {
            self.keep_answer(Answer::Message { station: packet.below.station });
        }
    }

    /// Somebody says something about a packet of this stack. It is believed if it quotes one that can be on
    /// the way (RFC 5927 4.1).
    fn arrive_report(&mut self, now: u64, report: &Report) {
        let Some(local) = self.addresses.find(report.source) else { return };
        match report.quoted {
            Quoted::Tcp { source, destination, seq } => {
                let remote = SocketAddr::new(report.destination, destination);
                self.report_tcp(now, &Key::new(local, source, remote), seq, report);
            }
            Quoted::Udp { source, destination } => {
                let from = SocketAddr::new(report.source, source);
                let to = SocketAddr::new(report.destination, destination);
                if !self.outstanding.contains(from, to) {
                    return;
                }
                match report.trouble {
                    Trouble::TooBig { mtu } => {
                        // As much as will be taken of it: more than that was sent.
                        let narrower = self.paths.narrower(now, report.destination, mtu);
                        if narrower.is_some_and(|mtu| self.outstanding.exceeds(now, from, to, mtu))
                        {
                            self.paths.reduce(now, report.destination, mtu);
                        }
                    }
                    Trouble::Hard => {
                        if let Some(socket) = self.sockets.at(source) {
                            self.notice(Event::Refused { socket, to });
                        }
                    }
                    Trouble::Soft => {}
                }
            }
        }
    }
}
