//! What a stack answers, refuses and believes.

use std::net::{IpAddr, Ipv6Addr, SocketAddr};

use quipu_inet::stack::{Arrival, DatagramError, Event};
use quipu_inet::tcp::SECOND;
use quipu_wire::{ethernet, icmpv4, icmpv6, ipv4, ipv6, udp};

use crate::net::{Net, V4, V6, station};
use crate::packets::{self, Packet};
use crate::streams::stream;

/// The ICMP messages in what a host sends now.
fn said(net: &mut Net, host: usize) -> Vec<Vec<u8>> {
    let mut out = vec![0; 70_000];
    let mut messages = Vec::new();
    while let Some(departure) = net.hosts[host].stack.poll_transmit(net.now, &mut out) {
        assert!(departure.payload.is_empty() && departure.checksum.is_none());
        messages.push(out[..departure.headers].to_vec());
    }
    messages
}

fn to(host: usize, addresses: [&str; 2]) -> Packet {
    Packet::new(addresses[1 - host].parse().unwrap(), addresses[host].parse().unwrap())
}

#[test]
fn echoes_are_answered() {
    let mut net = Net::new(V6, 1_500, stream(), 1);
    let (from, here) = (V6[0].parse().unwrap(), V6[1].parse().unwrap());
    let request = icmpv6::Repr::EchoRequest { identifier: 1, number: 2, data: b"hello" };
    let mut bytes = vec![0; request.wire_len()];
    request.emit(from, here, &mut bytes);
    net.arrive(1, &to(1, V6).carry(icmpv6::PROTOCOL, &bytes), false);
    let said = said(&mut net, 1);
    let reply = icmpv6::Repr::parse(here, from, &said[0][ipv6::LEN..]).unwrap();
    assert_eq!(reply, icmpv6::Repr::EchoReply { identifier: 1, number: 2, data: b"hello" });

    let mut net = Net::new(V4, 1_500, stream(), 1);
    let request = icmpv4::Repr::EchoRequest { identifier: 1, number: 2, data: b"hello" };
    let mut bytes = vec![0; request.wire_len()];
    request.emit(&mut bytes);
    net.arrive(1, &to(1, V4).carry(1, &bytes), false);
    let said = self::said(&mut net, 1);
    let reply = icmpv4::Repr::parse(&said[0][ipv4::LEN..]).unwrap();
    assert_eq!(reply, icmpv4::Repr::EchoReply { identifier: 1, number: 2, data: b"hello" });
}

#[test]
fn a_datagram_to_nobody_is_refused_and_its_sender_hears_of_it() {
    for addresses in [V6, V4] {
        let mut net = Net::new(addresses, 1_500, stream(), 1);
        let (socket, _) = net.hosts[0].stack.bind(0).unwrap();
        let to = SocketAddr::new(net.hosts[1].address, 9);
        net.send_datagram(0, socket, to, b"anybody?").unwrap();
        net.run(SECOND);
        assert_eq!(net.hosts[1].stack.counters().udp_unknown, 1);
        assert_eq!(net.hosts[0].notices, [Event::Refused { socket, to }]);
    }
}

#[test]
fn refusals_are_limited() {
    let mut net = Net::new(V6, 1_500, stream(), 1);
    let datagram = to(1, V6).datagram(1, 9, b"x");
    for _ in 0..1_000 {
        net.arrive(1, &datagram, false);
    }
    let limit = quipu_inet::icmp::ERRORS as usize;
    // Fewer wait at a time; what is dropped is gone.
    assert!((1..=limit).contains(&said(&mut net, 1).len()));
    assert!(!net.hosts[1].stack.wants_transmit());
    // Each costs one token to three.
    let errors = net.hosts[1].stack.icmp_counters().errors as usize;
    assert!((limit / 3..=limit).contains(&errors), "{errors}");
}

#[test]
fn an_unknown_protocol_is_refused() {
    let mut net = Net::new(V6, 1_500, stream(), 1);
    net.arrive(1, &to(1, V6).carry(99, b"what"), false);
    let (from, here) = (V6[0].parse().unwrap(), V6[1].parse().unwrap());
    let said = said(&mut net, 1);
    let problem = icmpv6::Repr::parse(here, from, &said[0][ipv6::LEN..]).unwrap();
    let icmpv6::Repr::ParameterProblem { code: 1, pointer: 6, .. } = problem else {
        panic!("{problem:?}")
    };
    assert_eq!(net.hosts[1].stack.counters().unknown_protocol, 1);
}

#[test]
fn the_number_of_icmp_in_the_other_version_of_ip_is_unknown() {
    let mut net = Net::new(V6, 1_500, stream(), 1);
    let (from, here) = (V6[0].parse().unwrap(), V6[1].parse().unwrap());
    let request = icmpv6::Repr::EchoRequest { identifier: 1, number: 2, data: b"hello" };
    let mut bytes = vec![0; request.wire_len()];
    request.emit(from, here, &mut bytes);
    net.arrive(1, &to(1, V6).carry(1, &bytes), false);
    let answer = said(&mut net, 1).remove(0);
    let problem = icmpv6::Repr::parse(here, from, &answer[ipv6::LEN..]).unwrap();
    assert!(matches!(problem, icmpv6::Repr::ParameterProblem { code: 1, pointer: 6, .. }));
    assert_eq!(net.hosts[1].stack.counters().unknown_protocol, 1);

    let mut net = Net::new(V4, 1_500, stream(), 1);
    let request = icmpv4::Repr::EchoRequest { identifier: 1, number: 2, data: b"hello" };
    let mut bytes = vec![0; request.wire_len()];
    request.emit(&mut bytes);
    net.arrive(1, &to(1, V4).carry(icmpv6::PROTOCOL, &bytes), false);
    let answer = said(&mut net, 1).remove(0);
    let refusal = icmpv4::Repr::parse(&answer[ipv4::LEN..]).unwrap();
    let code = icmpv4::unreachable::PROTOCOL;
    assert!(matches!(refusal, icmpv4::Repr::Unreachable { code: said, .. } if said == code));
    assert_eq!(net.hosts[1].stack.counters().unknown_protocol, 1);
}

#[test]
fn an_unknown_protocol_is_pointed_at_behind_other_headers_too() {
    let mut net = Net::new(V6, 1_500, stream(), 1);
    let options = [99, 0, 1, 4, 0, 0, 0, 0, 1, 2, 3, 4, 5, 6, 7, 8];
    net.arrive(1, &to(1, V6).carry(60, &options), false);
    let answer = said(&mut net, 1).remove(0);
    let (from, here) = (V6[0].parse().unwrap(), V6[1].parse().unwrap());
    let problem = icmpv6::Repr::parse(here, from, &answer[ipv6::LEN..]).unwrap();
    let icmpv6::Repr::ParameterProblem { code: 1, pointer: 40, .. } = problem else {
        panic!("{problem:?}")
    };
}

#[test]
fn who_is_told_of_a_datagram_in_parts_can_tell_which_it_was() {
    let payload = [7; 3_000];
    let upper = packets::sealed_datagram(V6, 7, 9, &payload);
    let mut net = Net::new(V6, 1_500, stream(), 1);
    // With an extension header, which nobody needs to see again.
    let options = [&[17, 0, 1, 4, 0, 0, 0, 0][..], &upper].concat();
    for (first, whole) in [(17, &upper), (60, &options)] {
        to(1, V6).parts(whole, first, 1_200).iter().for_each(|part| {
            net.arrive(1, part, false);
        });
        let answer = said(&mut net, 1).remove(0);
        let (from, here) = (V6[0].parse().unwrap(), V6[1].parse().unwrap());
        let refusal = icmpv6::Repr::parse(here, from, &answer[ipv6::LEN..]).unwrap();
        let icmpv6::Repr::Unreachable { code: 4, packet } = refusal else { panic!("{refusal:?}") };
        assert_eq!(packet.len(), 1_280 - ipv6::LEN - icmpv6::LEN);
        let whole = to(1, V6).carry(17, &upper);
        assert_eq!(packet, &whole[..packet.len()]);
    }

    let mut net = Net::new(V4, 1_500, stream(), 1);
    let upper = packets::sealed_datagram(V4, 7, 9, &payload);
    let whole = to(1, V4).carry(17, &upper);
    for (n, piece) in upper.chunks(1_200).enumerate() {
        let (mut header, _) = ipv4::Repr::parse(&whole).unwrap();
        header.payload_len = piece.len() as u16;
        header.fragment_offset = n as u16 * 1_200;
        header.more_fragments = n < 2;
        let mut part = vec![0; ipv4::LEN];
        header.emit(&mut part);
        net.arrive(1, &[&part[..], piece].concat(), false);
    }
    let answer = said(&mut net, 1).remove(0);
    let refusal = icmpv4::Repr::parse(&answer[ipv4::LEN..]).unwrap();
    let icmpv4::Repr::Unreachable { code: 3, packet, .. } = refusal else { panic!("{refusal:?}") };
    assert_eq!(packet, &whole[..packet.len()]);
}

/// A router says that a datagram is too long.
fn too_big(net: &mut Net, from: SocketAddr, there: SocketAddr, mtu: u32) {
    let (IpAddr::V6(own), IpAddr::V6(peer)) = (from.ip(), there.ip()) else { panic!("IPv6") };
    let quoted = Packet::new(own.into(), peer.into()).datagram(from.port(), there.port(), b"x");
    let message = icmpv6::Repr::PacketTooBig { mtu, packet: &quoted };
    let mut bytes = vec![0; message.wire_len()];
    let router = "fd00::fe".parse().unwrap();
    message.emit(router, own, &mut bytes);
    let frame = Packet::new(router.into(), own.into()).carry(icmpv6::PROTOCOL, &bytes);
    assert_eq!(net.arrive(0, &frame, false), Arrival::Nothing);
}

#[test]
fn a_path_is_narrower_if_a_router_says_so_of_a_datagram_that_was_sent() {
    let mut net = Net::new(V6, 9_000, stream(), 1);
    let (socket, port) = net.hosts[0].stack.bind(0).unwrap();
    let from = SocketAddr::new(net.hosts[0].address, port);
    let there = SocketAddr::new(net.hosts[1].address, 9);
    let path = |net: &Net| net.hosts[0].stack.path_mtu(there.ip());
    too_big(&mut net, from, there, 1_400);
    assert_eq!(path(&net), 9_000, "nothing was sent");
    net.send_datagram(0, socket, there, b"x").unwrap();
    too_big(&mut net, from, there, 1_400);
    assert_eq!(path(&net), 9_000, "what was sent fits");
    net.send_datagram(0, socket, there, &[0; 2_000]).unwrap();
    net.run(11 * SECOND);
    too_big(&mut net, from, there, 1_400);
    assert_eq!(path(&net), 9_000, "that was long ago");
    net.send_datagram(0, socket, there, &[0; 2_000]).unwrap();
    too_big(&mut net, SocketAddr::new(from.ip(), port ^ 1), there, 1_400);
    too_big(&mut net, from, there, 1_279);
    assert_eq!(path(&net), 9_000, "not ours, or less than a path can have");
    too_big(&mut net, from, there, 1_400);
    assert_eq!(path(&net), 1_400);
    let fits = 1_400 - ipv6::LEN - udp::LEN;
    let long = net.send_datagram(0, socket, there, &vec![0; fits + 1]);
    assert_eq!(long, Err(DatagramError::Long { fits }));
    assert_eq!(
        net.hosts[0].stack.path_mtu("fd00::77".parse().unwrap()),
        9_000,
        "of that path only"
    );
    net.run(601 * SECOND);
    net.hosts[0].stack.handle_timeout(net.now);
    assert_eq!(path(&net), 9_000, "RFC 8201 4: it may have become better");
}

#[test]
fn datagrams_come_in_parts() {
    let mut net = Net::new(V6, 1_500, stream(), 1);
    let (socket, _) = net.hosts[1].stack.bind(9).unwrap();
    let payload: Vec<u8> = (0..5_000u32).map(|n| n as u8).collect();
    let parts = to(1, V6).parts(&packets::sealed_datagram(V6, 7, 9, &payload), 17, 1_200);
    assert_eq!(parts.len(), 5);
    for part in parts.iter().rev() {
        net.arrive(1, part, false);
    }
    let (datagram, got) = &net.hosts[1].datagrams[0];
    assert_eq!((datagram.socket, datagram.from.port()), (socket, 7));
    assert!(*got == payload);
    // Half a datagram is forgotten after a minute (RFC 8200 4.5).
    net.arrive(1, &parts[0], false);
    assert!(net.hosts[1].stack.poll_timeout().is_some());
    net.run(61 * SECOND);
    assert_eq!(net.hosts[1].stack.poll_timeout(), None);
    assert_eq!(net.hosts[1].stack.fragment_counters().expired, 1);
}

#[test]
fn messages_of_icmp_do_not_come_in_parts() {
    let mut net = Net::new(V6, 1_500, stream(), 1);
    let parts = to(1, V6).parts(&[0; 2_000], 58, 1_200);
    parts.iter().for_each(|part| {
        net.arrive(1, part, false);
    });
    assert_eq!(net.hosts[1].stack.counters().fragments, 2);
    assert_eq!(net.hosts[1].stack.poll_timeout(), None, "nothing is kept");
}

#[test]
fn an_answer_that_is_dropped_takes_no_other_with_it() {
    let mut net = Net::ethernet(V6, stream(), 1);
    let here: Ipv6Addr = V6[1].parse().unwrap();
    // From a station and an address each, more than can wait.
    for n in 0..300_u16 {
        let from = Ipv6Addr::new(0xfd00, 0, 0, 0, 0, 0, 1, n);
        let request = icmpv6::Repr::EchoRequest { identifier: n, number: 0, data: b"" };
        let mut bytes = vec![0; request.wire_len()];
        request.emit(from, here, &mut bytes);
        let packet = Packet::new(from.into(), here.into()).carry(icmpv6::PROTOCOL, &bytes);
        let ours = station(1);
        let [high, low] = n.to_be_bytes();
        let theirs = [2, 0, 0, 0, high + 1, low];
        net.arrive(1, &[&ours[..], &theirs, &[0x86, 0xdd], &packet].concat(), false);
    }
    let mut answered = 0;
    for frame in said(&mut net, 1) {
        let (ip, _) = ipv6::Repr::parse(&frame[ethernet::HEADER..]).unwrap();
        let [high, low] = [frame[4] - 1, frame[5]];
        assert_eq!(ip.destination.octets()[14..], [high, low], "to the station that asked");
        answered += 1;
    }
    assert_eq!((answered, net.hosts[1].stack.counters().answers_dropped), (256, 44));
}
