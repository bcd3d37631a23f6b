//! "Fragmentation needed" and "packet too big": what a sender learns of a neighbour that receives less than
//! the interface's MTU (RFC 4755 7.2, RFC 1191, RFC 8201).

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use quipu_wire::{icmpv4, icmpv6, ipv4, ipv6};

/// Bytes of an IPv4 message at most (RFC 1812 4.3.2.3).
const LONGEST_V4: usize = 576;
/// Bytes of an IPv6 message at most (RFC 4443 3.2).
const LONGEST_V6: usize = 1280;
const HOP_LIMIT: u8 = 64;
/// The protocol number of ICMP.
const ICMP: u8 = 1;

/// The message about a packet that the neighbour `from` cannot receive, because it receives `mtu` bytes at
/// most. `None`: nobody may be told, as the packet is an error itself, or has no sender.
///
/// It says that it comes from the neighbour, because the kernel refuses packets with an address of its own.
pub(crate) fn message(packet: &[u8], from: IpAddr, mtu: usize) -> Option<Vec<u8>> {
    match from {
        IpAddr::V4(from) => message_v4(packet, from, mtu),
        IpAddr::V6(from) => message_v6(packet, from, mtu),
    }
}

fn message_v4(packet: &[u8], source: Ipv4Addr, mtu: usize) -> Option<Vec<u8>> {
    let (header, at) = ipv4::Repr::parse(packet).ok()?;
    let kind = packet.get(at)?;
    let is_error = header.protocol == ICMP && !matches!(kind, 0 | 8);
    if is_error || header.fragment_offset != 0 || header.source.is_unspecified() {
        return None;
    }
    let quoted = &packet[..packet.len().min(LONGEST_V4 - ipv4::LEN - icmpv4::LEN)];
    let next_mtu = u16::try_from(mtu).unwrap_or(u16::MAX);
    let code = icmpv4::unreachable::FRAGMENTATION_NEEDED;
    let message = icmpv4::Repr::Unreachable { code, next_mtu, packet: quoted };
    let answer = ipv4::Repr {
        source,
        destination: header.source,
        protocol: ICMP,
        traffic_class: 0,
        hop_limit: HOP_LIMIT,
        identification: 0,
        dont_fragment: true,
        more_fragments: false,
        fragment_offset: 0,
        payload_len: message.wire_len() as u16,
    };
    let mut out = vec![0; ipv4::LEN + message.wire_len()];
    answer.emit(&mut out);
    message.emit(&mut out[ipv4::LEN..]);
    Some(out)
}

fn message_v6(packet: &[u8], source: Ipv6Addr, mtu: usize) -> Option<Vec<u8>> {
    let (header, at) = ipv6::Repr::parse(packet).ok()?;
    let kind = packet.get(at)?;
    let is_error = header.next_header == icmpv6::PROTOCOL && *kind < 128;
    if is_error || header.source.is_unspecified() {
        return None;
    }
    let quoted = &packet[..packet.len().min(LONGEST_V6 - ipv6::LEN - icmpv6::LEN)];
    let message = icmpv6::Repr::PacketTooBig { mtu: mtu as u32, packet: quoted };
    let answer = ipv6::Repr {
        source,
        destination: header.source,
        next_header: icmpv6::PROTOCOL,
        traffic_class: 0,
        flow_label: 0,
        hop_limit: HOP_LIMIT,
        payload_len: message.wire_len() as u16,
    };
    let mut out = vec![0; ipv6::LEN + message.wire_len()];
    answer.emit(&mut out);
    message.emit(source, header.source, &mut out[ipv6::LEN..]);
    Some(out)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn packet4(protocol: u8, fragment_offset: u16, source: Ipv4Addr) -> Vec<u8> {
        let header = ipv4::Repr {
            source,
            destination: Ipv4Addr::new(10, 0, 0, 2),
            protocol,
            traffic_class: 0,
            hop_limit: 64,
            identification: 1,
            dont_fragment: true,
            more_fragments: false,
            fragment_offset,
            payload_len: 3000,
        };
        let mut out = vec![3; ipv4::LEN + 3000];
        header.emit(&mut out);
        out
    }

    #[test]
    fn a_sender_of_ipv4_gets_the_mtu_and_the_head_of_its_packet() {
        let own = Ipv4Addr::new(10, 0, 0, 1);
        let neighbour = Ipv4Addr::new(10, 0, 0, 2);
        let packet = packet4(17, 0, own);
        let told = message(&packet, neighbour.into(), 2044).unwrap();
        assert_eq!(told.len(), LONGEST_V4);
        let (header, at) = ipv4::Repr::parse(&told).unwrap();
        assert_eq!((header.source, header.destination), (neighbour, own));
        let icmpv4::Repr::Unreachable { code, next_mtu, packet: quoted } =
            icmpv4::Repr::parse(&told[at..]).unwrap()
        else {
            panic!("{told:?}")
        };
        assert_eq!((code, next_mtu), (4, 2044));
        assert_eq!(quoted, &packet[..548]);
        // Errors, later fragments and packets of nobody.
        assert_eq!(message(&packet4(1, 0, own), neighbour.into(), 2044), None);
        assert_eq!(message(&packet4(17, 8, own), neighbour.into(), 2044), None);
        assert_eq!(message(&packet4(17, 0, [0; 4].into()), neighbour.into(), 2044), None);
    }

    #[test]
    fn a_sender_of_ipv6_gets_the_mtu_and_the_head_of_its_packet() {
        let address = |n: u16| Ipv6Addr::new(0xfd00, 0, 0, 0, 0, 0, 0, n);
        let packet = |next_header: u8| {
            let header = ipv6::Repr {
                source: address(1),
                destination: address(2),
                next_header,
                traffic_class: 0,
                flow_label: 0,
                hop_limit: 64,
                payload_len: 3000,
            };
            let mut out = vec![1; ipv6::LEN + 3000];
            header.emit(&mut out);
            out
        };
        let sent = packet(17);
        let told = message(&sent, address(2).into(), 2044).unwrap();
        assert_eq!(told.len(), LONGEST_V6);
        let (header, at) = ipv6::Repr::parse(&told).unwrap();
        assert_eq!((header.source, header.destination), (address(2), address(1)));
        let parsed = icmpv6::Repr::parse(header.source, header.destination, &told[at..]);
        let expected = icmpv6::Repr::PacketTooBig { mtu: 2044, packet: &sent[..1232] };
        assert_eq!(parsed, Ok(expected));
        assert_eq!(message(&packet(58), address(2).into(), 2044), None);
    }
}
