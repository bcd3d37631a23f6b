//! Frames that nobody of the two has sent: a third party on the link makes them up, from any address it
//! likes, with checksums that are right.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use quipu_wire::checksum::{Sum, sum};
use quipu_wire::ipv6_extension::{FRAGMENT_LEN, Fragment, next_header};
use quipu_wire::ndp::{self, Advertisement, Prefix};
use quipu_wire::tcp::{Flags, MAX_LEN, Options, SackBlock, SeqNumber, Timestamps};
use quipu_wire::{arp, ethernet, icmpv4, icmpv6, ipv4, ipv6, tcp, udp};

use crate::input::Input;

/// To whom a frame goes.
pub struct Place<'a> {
    /// The receiver, and the other one.
    pub own: IpAddr,
    pub other: IpAddr,
    /// The receiver's station, where there are stations.
    pub station: Option<[u8; 6]>,
    /// A frame that the receiver has sent, which errors quote and segments answer.
    pub sent: &'a [u8],
}

/// What is behind the IP header.
struct Packet {
    protocol: u8,
    payload: Vec<u8>,
    hop_limit: u8,
}

impl Place<'_> {
    fn link(&self) -> usize {
        if self.station.is_some() { ethernet::HEADER } else { 0 }
    }

    /// The packet of the frame that was sent, if there was one.
    fn packet(&self) -> &[u8] {
        self.sent.get(self.link()..).unwrap_or(&[])
    }

    /// From whom it says it is.
    fn source(&self, which: u8) -> IpAddr {
        match (which % 8, self.own) {
            (0..=2, _) => self.other,
            (3, own) => own,
            (4, IpAddr::V4(_)) => Ipv4Addr::new(224, 0, 0, which).into(),
            (5, IpAddr::V4(_)) => Ipv4Addr::UNSPECIFIED.into(),
            (_, IpAddr::V4(_)) => Ipv4Addr::new(10, 0, which >> 6, 77).into(),
            (4, _) => Ipv6Addr::new(0xff02, 0, 0, 0, 0, 0, 0, which.into()).into(),
            (5, _) => Ipv6Addr::UNSPECIFIED.into(),
            (6, _) => Ipv6Addr::new(0xfe80, 0, 0, 0, 0, 0, 0, which.into()).into(),
            _ => Ipv6Addr::new(0xfd00, 0, 0, 0, 0, 0, which.into(), 77).into(),
        }
    }

    /// Makes a frame up.
    pub fn frame(&self, input: &mut Input<'_>) -> Vec<u8> {
        let (how, who) = (input.byte(), input.byte());
        let source = self.source(who);
        let destination = match (who >> 5, self.own) {
            (7, IpAddr::V6(_)) => Ipv6Addr::new(0xff02, 0, 0, 0, 0, 0, 0, 1).into(),
            (7, IpAddr::V4(_)) => Ipv4Addr::BROADCAST.into(),
            _ => self.own,
        };
        let kind = how % 8;
        if let (1, IpAddr::V4(source), IpAddr::V4(own), Some(_)) =
            (kind, source, self.own, self.station)
        {
            return self.arp(source, own, input);
        }
        let made = match (kind, source, destination) {
            (0 | 1, IpAddr::V6(source), IpAddr::V6(destination)) if kind == 0 || how & 8 != 0 => {
                self.error_v6(source, destination, input)
            }
            (0 | 1, IpAddr::V4(_), _) => self.error_v4(input),
            (1, IpAddr::V6(source), IpAddr::V6(destination)) => {
                self.discovery(source, destination, input)
            }
            (2, ..) => self.segment(source, destination, None, input),
            (3, ..) => return self.answer(how, source, input),
            (4, ..) => datagram(source, destination, input),
            _ => {
                let protocols = [0, 1, 2, 6, 17, 43, 44, 58, 59, 60];
                let protocol = input.pick(&protocols);
                Packet { protocol, payload: input.bytes().to_vec(), hop_limit: 64 }
            }
        };
        self.wrap(how, source, destination, made, input)
    }

    /// Puts headers in front, in parts of which it may be one.
    fn wrap(
        &self,
        how: u8,
        source: IpAddr,
        destination: IpAddr,
        made: Packet,
        input: &mut Input<'_>,
    ) -> Vec<u8> {
        let Packet { mut protocol, mut payload, hop_limit } = made;
        let in_part = how & 0x30 == 0x30;
        // Few places and names, so that parts meet, and overlap.
        let (at, more) = (input_if(in_part, input), how & 0x40 != 0);
        let offset = u16::from(at % 8) * 8 * (1 + u16::from(at >> 6) * 80);
        let identification = u16::from(at >> 4 & 1);
        if in_part && more {
            payload.resize(payload.len().next_multiple_of(8), at);
        }
        let mut frame = vec![0; self.link()];
        let kind = match (source, destination) {
            (IpAddr::V6(source), IpAddr::V6(destination)) => {
                if in_part {
                    let part = Fragment {
                        next_header: protocol,
                        offset,
                        more,
                        identification: identification.into(),
                    };
                    let mut head = vec![0; FRAGMENT_LEN];
                    part.emit(&mut head);
                    payload.splice(..0, head);
                    protocol = next_header::FRAGMENT;
                }
                let payload_len = payload.len() as u16;
                let repr = ipv6::Repr {
                    source,
                    destination,
                    next_header: protocol,
                    traffic_class: how & 3,
                    flow_label: 0,
                    hop_limit,
                    payload_len,
                };
                frame.resize(self.link() + ipv6::LEN, 0);
                repr.emit(&mut frame[self.link()..]);
                ethernet::kind::IPV6
            }
            (IpAddr::V4(source), IpAddr::V4(destination)) => {
                let repr = ipv4::Repr {
                    source,
                    destination,
                    protocol,
                    traffic_class: how & 3,
                    hop_limit,
                    identification,
                    dont_fragment: false,
                    more_fragments: in_part && more,
                    fragment_offset: if in_part { offset } else { 0 },
                    payload_len: payload.len() as u16,
                };
                frame.resize(self.link() + ipv4::LEN, 0);
                repr.emit(&mut frame[self.link()..]);
                ethernet::kind::IPV4
            }
            _ => unreachable!("addresses of one family"),
        };
        frame.extend(payload);
        self.envelop(kind, &mut frame);
        frame
    }

    fn envelop(&self, kind: u16, frame: &mut [u8]) {
        if let Some(station) = self.station {
            frame[..6].copy_from_slice(&station);
            frame[6..12].copy_from_slice(&[2, 0, 0, 0, 0, 0x77]);
            frame[12..14].copy_from_slice(&kind.to_be_bytes());
        }
    }

    fn arp(&self, sender: Ipv4Addr, own: Ipv4Addr, input: &mut Input<'_>) -> Vec<u8> {
        let how = input.byte();
        let repr = arp::Repr {
            operation: if how & 1 == 0 { arp::Operation::Request } else { arp::Operation::Reply },
            sender_station: [2, 0, 0, 0, 0, how],
            sender,
            target_station: self.station.unwrap_or_default(),
            target: if how & 2 == 0 { own } else { sender },
        };
        let mut frame = vec![0; self.link() + arp::LEN];
        repr.emit(&mut frame[self.link()..]);
        self.envelop(ethernet::kind::ARP, &mut frame);
        frame
    }

    /// An error about what the receiver has sent, or about anything.
    fn error_v6(&self, from: Ipv6Addr, to: Ipv6Addr, input: &mut Input<'_>) -> Packet {
        let (how, quoted) = (input.byte(), self.quoted(input));
        let packet = &quoted[..];
        let repr = match how % 8 {
            0..=2 => icmpv6::Repr::PacketTooBig { mtu: u32::from(how >> 3) * 100, packet },
            3 | 4 => icmpv6::Repr::Unreachable { code: how >> 4, packet },
            5 => icmpv6::Repr::TimeExceeded { code: how >> 3 & 1, packet },
            6 => icmpv6::Repr::ParameterProblem { code: how >> 3 & 3, pointer: 6, packet },
            _ => icmpv6::Repr::EchoRequest { identifier: 1, number: 2, data: packet },
        };
        let mut payload = vec![0; repr.wire_len()];
        repr.emit(from, to, &mut payload);
        Packet { protocol: icmpv6::PROTOCOL, payload, hop_limit: 64 }
    }

    fn error_v4(&self, input: &mut Input<'_>) -> Packet {
        let (how, quoted) = (input.byte(), self.quoted(input));
        let packet = &quoted[..];
        let repr = match how % 8 {
            0..=2 => icmpv4::Repr::Unreachable {
                code: icmpv4::unreachable::FRAGMENTATION_NEEDED,
                next_mtu: u16::from(how >> 3) * 60,
                packet,
            },
            3 | 4 => icmpv4::Repr::Unreachable { code: how >> 4, next_mtu: 0, packet },
            5 => icmpv4::Repr::TimeExceeded { code: how >> 3 & 1, packet },
            6 => icmpv4::Repr::ParameterProblem { code: how >> 3 & 3, pointer: 6, packet },
            _ => icmpv4::Repr::EchoRequest { identifier: 1, number: 2, data: packet },
        };
        let mut payload = vec![0; repr.wire_len()];
        repr.emit(&mut payload);
        Packet { protocol: 1, payload, hop_limit: 64 }
    }

    /// The beginning of a packet that the receiver has sent, perhaps with an octet changed.
    fn quoted(&self, input: &mut Input<'_>) -> Vec<u8> {
        let len = match input.byte() {
            long @ 128.. => usize::from(long) * 5,
            short => usize::from(short),
        };
        let mut quoted = self.packet().iter().copied().take(len).collect::<Vec<_>>();
        let at = usize::from(input.byte());
        if at < quoted.len() && at > 20 {
            quoted[at] = input.byte();
        }
        quoted
    }

    /// Of routers and neighbours who are none.
    fn discovery(&self, from: Ipv6Addr, to: Ipv6Addr, input: &mut Input<'_>) -> Packet {
        let (how, about) = (input.byte(), input.byte());
        let IpAddr::V6(target) = self.source(about) else { unreachable!("of one family") };
        let target = if target.is_multicast() { from } else { target };
        let station = (how & 8 != 0).then_some([2, 0, 0, 0, 0, about]);
        let repr = match how % 4 {
            0 => ndp::Repr::NeighbourSolicitation { target, station },
            1 | 2 => ndp::Repr::NeighbourAdvertisement {
                target,
                router: how & 16 != 0,
                solicited: how & 32 != 0,
                overrides: how & 64 != 0,
                station,
            },
            _ => {
                let mut said = Advertisement {
                    hop_limit: input.byte(),
                    flags: how,
                    lifetime: input.count() as u16,
                    reachable: input.count(),
                    retransmit: input.count(),
                    station,
                    mtu: (how & 16 != 0).then(|| input.count()),
                    ..Advertisement::default()
                };
                for _ in 0..how >> 5 & 3 {
                    said.prefixes.push(Prefix {
                        prefix: Ipv6Addr::new(0xfd00, input.byte().into(), 0, 0, 0, 0, 0, 0),
                        len: input.byte() % 129,
                        on_link: how & 1 != 0,
                        autonomous: how & 64 != 0,
                        valid: input.count(),
                        preferred: input.count(),
                    });
                }
                ndp::Repr::RouterAdvertisement(said)
            }
        };
        let repr = icmpv6::Repr::Discovery(repr);
        let mut payload = vec![0; repr.wire_len()];
        repr.emit(from, to, &mut payload);
        let hop_limit = if how & 0x84 == 0x84 { 64 } else { ndp::HOP_LIMIT };
        Packet { protocol: icmpv6::PROTOCOL, payload, hop_limit }
    }

    /// A segment that answers one that the receiver has sent, if it was one, from where that went.
    fn answer(&self, how: u8, source: IpAddr, input: &mut Input<'_>) -> Vec<u8> {
        let packet = self.packet();
        let (to, ip) = match self.own {
            IpAddr::V6(_) => {
                (ipv6::Repr::parse(packet).map(|(it, _)| it.destination.into()), ipv6::LEN)
            }
            IpAddr::V4(_) => {
                (ipv4::Repr::parse(packet).map(|(it, _)| it.destination.into()), ipv4::LEN)
            }
        };
        let known = tcp::Repr::parse(packet.get(ip..).unwrap_or(&[])).ok();
        let source = to.unwrap_or(source);
        let made = self.segment(source, self.own, known.map(|(sent, _)| sent), input);
        self.wrap(how, source, self.own, made, input)
    }

    /// A segment: a stranger's SYN, or one that answers another, or nearly.
    fn segment(
        &self,
        source: IpAddr,
        destination: IpAddr,
        known: Option<tcp::Repr>,
        input: &mut Input<'_>,
    ) -> Packet {
        let (how, flags) = (input.byte(), input.byte());
        let off = if how & 0xc0 == 0 { u32::from(how >> 2) } else { 8 };
        let near = |number: SeqNumber| number + off - 8;
        let mut repr = tcp::Repr {
            source: 1024 + u16::from(how),
            destination: 80 + u16::from(how & 3),
            seq: SeqNumber(input.count()),
            ack: SeqNumber(input.count()),
            flags: Flags::from_bits(if how & 0x40 == 0 { 2 } else { flags }),
            window: input.count() as u16,
            ..tcp::Repr::default()
        };
        if let Some(sent) = known {
            (repr.source, repr.destination) = (sent.destination, sent.source);
            let syn = u32::from(sent.flags.has(Flags::SYN));
            (repr.seq, repr.ack) = (near(sent.ack), near(sent.seq + syn));
            repr.flags = Flags::from_bits(if how & 0x20 == 0 { 0x10 } else { flags });
        }
        repr.options = Options {
            mss: (how & 1 != 0).then(|| input.count() as u16),
            window_scale: (how & 2 != 0).then(|| input.byte() % 15),
            sack_permitted: how & 4 != 0,
            timestamps: (how & 8 != 0)
                .then(|| Timestamps { value: input.count(), echo: input.count() }),
            ..Options::default()
        };
        if how & 0x11 == 0x10 {
            let left = repr.ack + u32::from(input.byte()) - 20;
            repr.options.sack.push(SackBlock { left, right: left + u32::from(input.byte()) });
        }
        let mut payload = vec![0; MAX_LEN];
        let len = repr.emit(&mut payload);
        payload.truncate(len);
        payload.extend(input.bytes());
        let whole = Sum::of_pseudo_header(source, destination, 6, payload.len());
        let value = whole.and(sum(&payload)).checksum();
        payload[tcp::CHECKSUM_AT..tcp::CHECKSUM_AT + 2].copy_from_slice(&value.to_be_bytes());
        Packet { protocol: 6, payload, hop_limit: 64 }
    }
}

fn datagram(source: IpAddr, destination: IpAddr, input: &mut Input<'_>) -> Packet {
    let (how, data) = (input.byte(), input.bytes());
    let repr = udp::Repr {
        source: u16::from(how >> 2) * 9,
        destination: 80 + u16::from(how & 3),
        payload_len: data.len() as u16,
    };
    let mut payload = vec![0; udp::LEN];
    repr.emit(&mut payload);
    payload.extend(data);
    let whole = Sum::of_pseudo_header(source, destination, 17, payload.len());
    let value = udp::checksum(whole.and(sum(&payload)));
    payload[udp::CHECKSUM_AT..udp::LEN].copy_from_slice(&value.to_be_bytes());
    Packet { protocol: 17, payload, hop_limit: 64 }
}

fn input_if(wanted: bool, input: &mut Input<'_>) -> u8 {
    if wanted { input.byte() } else { 0 }
}
