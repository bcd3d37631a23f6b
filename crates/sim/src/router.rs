//! What a router says of packets to their senders, by ICMP: what is true, and lies.
//!
//! Nothing proves a report true, so anybody may send one. What quotes a packet that was really sent is to be
//! believed within bounds, whoever says it; what quotes another is not (RFC 5927).

use std::net::{Ipv4Addr, Ipv6Addr};

use quipu_nic::iwarp::wire::ethernet::{self, HEADER as ETHERNET};
use quipu_nic::iwarp::wire::{icmpv4, icmpv6, ipv4, ipv6};

use crate::frames::station;
use crate::offload::{Ip, TCP};
use crate::rng::Rng;

/// Its station address.
const ROUTER: [u8; 6] = [2, 0, 0, 0, 0, 0xff];
/// What it quotes of a packet.
const QUOTE: usize = 500;
const HOP_LIMIT: u8 = 64;
/// Code of a packet that has passed too many routers.
const TOO_MANY_ROUTERS: u8 = 0;

/// What it says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Said {
    /// Packets may have so many octets at most.
    TooBig(u32),
    /// The packet has passed too many routers; the next one may get there.
    Lost,
    /// There is no way to its host, at the moment.
    NoRoute,
    /// Nobody is at its port.
    NoPort,
}

/// A lie about a packet: what is said, and what is said to have been sent. Nothing where none comes to mind.
pub fn lie(rng: &mut Rng, packet: &[u8]) -> Option<(Said, Vec<u8>)> {
    let (ip, start) = Ip::parse(packet)?;
    let mut quoted = packet[..packet.len().min(QUOTE)].to_vec();
    let any = rng.range(1, packet.len() as u64) as u32;
    let mtu = rng.pick(&[0, 68, 576, 1_279, 1_280, any, 65_535]);
    if ip.protocol() == TCP && rng.percent(40) {
        // A stranger knows the addresses and guesses the rest: a number that is not on the way.
        quoted[start + 4] ^= 0x80;
        let said = [Said::TooBig(mtu), Said::Lost, Said::NoRoute, Said::NoPort];
        return Some((rng.pick(&said), quoted));
    }
    let said = [Said::TooBig(mtu), Said::TooBig(mtu), Said::Lost, Said::NoRoute];
    Some((rng.pick(&said), quoted))
}

/// A report to a host about a packet that it has sent: a frame (RFC 4443 3, RFC 792, RFC 1191 4).
pub fn report(h: usize, stations: bool, packet: &[u8], said: Said) -> Option<Vec<u8>> {
    let quote = &packet[..packet.len().min(QUOTE)];
    let mut out = vec![0; ETHERNET + ipv6::LEN + icmpv6::LEN + QUOTE];
    let mut at = 0;
    let kind = if packet.first()? >> 4 == 6 { ethernet::kind::IPV6 } else { ethernet::kind::IPV4 };
    if stations {
        at = ethernet::Repr { destination: station(h), source: ROUTER, kind }.emit(&mut out);
    }
    let len = if kind == ethernet::kind::IPV6 {
        over_v6(quote, said, &mut out[at..])
    } else {
        over_v4(quote, said, &mut out[at..])
    }?;
    out.truncate(at + len);
    Some(out)
}

fn over_v6(quote: &[u8], said: Said, out: &mut [u8]) -> Option<usize> {
    let (sent, _) = ipv6::Repr::parse_quoted(quote).ok()?;
    let source = Ipv6Addr::new(0xfd00, 0, 0, 0, 0, 0, 0, 0xff);
    let message = match said {
        Said::TooBig(mtu) => icmpv6::Repr::PacketTooBig { mtu, packet: quote },
        Said::Lost => icmpv6::Repr::TimeExceeded { code: TOO_MANY_ROUTERS, packet: quote },
        Said::NoRoute => {
            icmpv6::Repr::Unreachable { code: icmpv6::unreachable::NO_ROUTE, packet: quote }
        }
        Said::NoPort => {
            icmpv6::Repr::Unreachable { code: icmpv6::unreachable::PORT, packet: quote }
        }
    };
    let header = ipv6::Repr {
        source,
        destination: sent.source,
        next_header: icmpv6::PROTOCOL,
        traffic_class: 0,
        flow_label: 0,
        hop_limit: HOP_LIMIT,
        payload_len: message.wire_len() as u16,
    };
    let header = header.emit(out);
    Some(header + message.emit(source, sent.source, &mut out[header..]))
}

fn over_v4(quote: &[u8], said: Said, out: &mut [u8]) -> Option<usize> {
    let (sent, _) = ipv4::Repr::parse_quoted(quote).ok()?;
    let unreachable = |code, next_mtu| icmpv4::Repr::Unreachable { code, next_mtu, packet: quote };
    let message = match said {
        Said::TooBig(mtu) => unreachable(icmpv4::unreachable::FRAGMENTATION_NEEDED, mtu as u16),
        Said::Lost => icmpv4::Repr::TimeExceeded { code: TOO_MANY_ROUTERS, packet: quote },
        Said::NoRoute => unreachable(icmpv4::unreachable::HOST, 0),
        Said::NoPort => unreachable(icmpv4::unreachable::PORT, 0),
    };
    let header = ipv4::Repr {
        // Not 255, from which nobody takes anything: that is the address of all.
        source: Ipv4Addr::new(10, 9, 0, 0xfe),
        destination: sent.source,
        protocol: 1,
        traffic_class: 0,
        hop_limit: HOP_LIMIT,
        identification: 0,
        dont_fragment: false,
        more_fragments: false,
        fragment_offset: 0,
        payload_len: message.wire_len() as u16,
    };
    let header = header.emit(out);
    Some(header + message.emit(&mut out[header..]))
}

#[cfg(test)]
mod tests {
    use std::net::IpAddr;

    use super::*;
    use crate::frames::{addresses, packet};

    #[test]
    fn a_report_says_to_the_sender_what_is_taken() {
        let sent = packet(3, 0);
        let bytes = report(3, true, &sent, Said::TooBig(1_300)).unwrap();
        let (ethernet, at) = ethernet::Repr::parse(&bytes).unwrap();
        assert_eq!(ethernet.destination, station(3));
        let (header, len) = ipv6::Repr::parse(&bytes[at..]).unwrap();
        assert_eq!(IpAddr::from(header.destination), addresses(3)[0]);
        let message =
            icmpv6::Repr::parse(header.source, header.destination, &bytes[at + len..]).unwrap();
        assert_eq!(message, icmpv6::Repr::PacketTooBig { mtu: 1_300, packet: &sent });
    }

    #[test]
    fn a_report_over_ipv4_is_from_somebody() {
        let [_, IpAddr::V4(source)] = addresses(3) else { unreachable!() };
        let sent = ipv4::Repr {
            source,
            destination: Ipv4Addr::new(10, 9, 0, 1),
            protocol: TCP,
            traffic_class: 0,
            hop_limit: 64,
            identification: 0,
            dont_fragment: true,
            more_fragments: false,
            fragment_offset: 0,
            payload_len: 100,
        };
        let mut packet = vec![0; ipv4::LEN + 100];
        sent.emit(&mut packet);
        let bytes = report(3, false, &packet, Said::TooBig(1_300)).unwrap();
        let (header, _) = ipv4::Repr::parse(&bytes).unwrap();
        assert_eq!(header.destination, source);
        // The prefix of all hosts has 24 bits: 0 and 255 are nobody's (RFC 1122 3.2.1.3).
        assert!((1..=254).contains(&header.source.octets()[3]), "{}", header.source);
        assert!((0..4).all(|host| addresses(host)[1] != IpAddr::from(header.source)));
    }
}
