use super::*;
use crate::{MAX_NEIGHBOURS, REACHABLE_NS};
use quipu_wire::arp::Operation;
use quipu_wire::ipoib::Arp;
use quipu_wire::{ipv4, ipv6};

pub(super) const S: u64 = 1_000_000_000;

pub(super) fn link(n: u8) -> LinkAddress {
    LinkAddress { qpn: 0x100 + u32::from(n), gid: [n; 16], connects: false }
}

pub(super) fn v4(n: u8) -> Ipv4Addr {
    Ipv4Addr::new(10, 0, 0, n)
}

pub(super) fn v6(n: u16) -> Ipv6Addr {
    Ipv6Addr::new(0xfd00, 0, 0, 0, 0, 0, 0, n)
}

pub(super) fn host(n: u8) -> Engine {
    Engine::new(Config {
        link: link(n),
        mtu: 2044,
        datagram_mtu: 4092,
        connection_slots: 0,
        addresses: vec![(v4(n).into(), 24), (v6(n.into()).into(), 64)],
        gateways: vec![v4(254).into()],
        pkey: 0xffff,
    })
}

/// A host that has announced itself.
pub(super) fn quiet(n: u8) -> Engine {
    settle(host(n))
}

/// Has a host announce itself.
pub(super) fn settle(mut host: Engine) -> Engine {
    for second in 0..3 {
        host.handle_timeout(second * S);
    }
    while host.poll_transmit(&mut Vec::new()).is_some() {}
    while host.poll_group().is_some() {}
    host
}

pub(super) fn packet4(from: Ipv4Addr, to: Ipv4Addr, payload: usize) -> Vec<u8> {
    let header = ipv4::Repr {
        source: from,
        destination: to,
        protocol: 17,
        traffic_class: 0,
        hop_limit: 64,
        identification: 1,
        dont_fragment: true,
        more_fragments: false,
        fragment_offset: 0,
        payload_len: payload as u16,
    };
    let mut out = vec![7; ipv4::LEN + payload];
    header.emit(&mut out);
    out
}

pub(super) fn packet6(from: Ipv6Addr, to: Ipv6Addr, payload: usize) -> Vec<u8> {
    let header = ipv6::Repr {
        source: from,
        destination: to,
        next_header: 17,
        traffic_class: 0,
        flow_label: 0,
        hop_limit: 64,
        payload_len: payload as u16,
    };
    let mut out = vec![7; ipv6::LEN + payload];
    header.emit(&mut out);
    out
}

pub(super) fn datagram(kind: Encapsulation, packet: &[u8]) -> Vec<u8> {
    [&kind.to_bytes()[..], packet].concat()
}

/// Carries what both have queued, until there is no more; packets that came to the interface of `b`.
pub(super) fn exchange(now_ns: u64, a: &mut Engine, b: &mut Engine) -> Vec<Vec<u8>> {
    let (mut arrived, mut out) = (Vec::new(), Vec::new());
    loop {
        let from = |own: &Engine, to| Arrival {
            source: own.config.link,
            group: match to {
                Destination::Group(gid) => Some(gid),
                Destination::Unicast(_) | Destination::Connection(_) => None,
            },
        };
        let mut idle = true;
        while let Some(to) = a.poll_transmit(&mut out) {
            idle = false;
            let incoming = b.handle_datagram(now_ns, &from(a, to), &out);
            if let Incoming::Deliver(range) = incoming {
                arrived.push(out[range].to_vec());
            }
        }
        while let Some(to) = b.poll_transmit(&mut out) {
            idle = false;
            assert_eq!(a.handle_datagram(now_ns, &from(b, to), &out), Incoming::Consumed);
        }
        if idle {
            return arrived;
        }
    }
}

#[test]
fn the_route_header_says_where_a_datagram_came_from() {
    let route = |dest: [u8; 4]| grh::Route {
        source: [10, 1, 1, 1].into(),
        dest: dest.into(),
        traffic_class: 0,
        hop_limit: 64,
    };
    let arrival = Arrival::of(&route([10, 1, 1, 2]).to_grh(100), 7).unwrap();
    assert_eq!((arrival.source.qpn, arrival.group), (7, None));
    assert_eq!(arrival.source.gid[10..], [0xff, 0xff, 10, 1, 1, 1]);
    let arrival = Arrival::of(&route([239, 1, 1, 2]).to_grh(100), 7).unwrap();
    assert_eq!(arrival.group.unwrap()[12..], [239, 1, 1, 2]);
    assert_eq!(Arrival::of(&[0; 40], 7), None);
    assert_ne!(link_local(link(1)), link_local(link(2)));
    assert!(link_local(link(1)).is_unicast_link_local());
}

#[test]
fn a_packet_waits_for_arp_and_the_next_one_does_not() {
    let (mut a, mut b) = (quiet(1), quiet(2));
    let packet = packet4(v4(1), v4(2), 100);
    assert_eq!(a.handle_packet(9 * S, &packet), Outgoing::Waits);
    assert_eq!(exchange(9 * S, &mut a, &mut b), std::slice::from_ref(&packet));
    let there = Outgoing::Send(Destination::Unicast(link(2)), Encapsulation::Ipv4);
    assert_eq!(a.handle_packet(9 * S, &packet), there);
    assert_eq!((a.counters().asked, b.counters().answered, a.counters().sent), (1, 1, 2));
    // The one that was asked knows the asker, and confirms it at its first use.
    let back = Outgoing::Send(Destination::Unicast(link(1)), Encapsulation::Ipv4);
    assert_eq!(b.handle_packet(9 * S, &packet4(v4(2), v4(1), 0)), back);
    assert_eq!(b.counters().asked, 1);
}

#[test]
fn a_packet_waits_for_neighbour_discovery() {
    let (mut a, mut b) = (quiet(1), quiet(2));
    let packet = packet6(v6(1), v6(2), 100);
    assert_eq!(a.handle_packet(9 * S, &packet), Outgoing::Waits);
    assert_eq!(exchange(9 * S, &mut a, &mut b), std::slice::from_ref(&packet));
    let there = Outgoing::Send(Destination::Unicast(link(2)), Encapsulation::Ipv6);
    assert_eq!(a.handle_packet(9 * S, &packet), there);
}

#[test]
fn groups_and_broadcasts_need_no_address() {
    let mut a = quiet(1);
    let group = |ip: IpAddr, kind| Outgoing::Send(Destination::Group(group_gid(ip, 0xffff)), kind);
    for to in [Ipv4Addr::BROADCAST, v4(255)] {
        let expected = group(Ipv4Addr::BROADCAST.into(), Encapsulation::Ipv4);
        assert_eq!(a.handle_packet(0, &packet4(v4(1), to, 0)), expected, "{to}");
    }
    let to = Ipv4Addr::new(224, 0, 0, 251);
    let expected = group(to.into(), Encapsulation::Ipv4);
    assert_eq!(a.handle_packet(0, &packet4(v4(1), to, 0)), expected);
    let expected = group(ALL_NODES.into(), Encapsulation::Ipv6);
    assert_eq!(a.handle_packet(0, &packet6(v6(1), ALL_NODES, 0)), expected);
}

#[test]
fn packets_for_elsewhere_go_to_the_gateway_or_nowhere() {
    let (mut a, mut router) = (quiet(1), quiet(254));
    let packet = packet4(v4(1), Ipv4Addr::new(192, 0, 2, 1), 10);
    assert_eq!(a.handle_packet(0, &packet), Outgoing::Waits);
    assert_eq!(exchange(0, &mut a, &mut router), [packet]);
    let far = packet6(v6(1), Ipv6Addr::new(0x2001, 0xdb8, 0, 0, 0, 0, 0, 1), 10);
    assert_eq!(a.handle_packet(0, &far), Outgoing::Dropped(Dropped::NoRoute));
}

#[test]
fn hosts_announce_themselves_and_a_restart_is_noticed() {
    let (mut a, mut b) = (quiet(1), quiet(2));
    a.handle_packet(0, &packet4(v4(1), v4(2), 0));
    a.handle_packet(0, &packet6(v6(1), v6(2), 0));
    exchange(0, &mut a, &mut b);
    let mut again = host(2);
    again.config.link = link(77);
    again.handle_timeout(5 * S);
    exchange(5 * S, &mut a, &mut again);
    for packet in [packet4(v4(1), v4(2), 0), packet6(v6(1), v6(2), 0)] {
        let Outgoing::Send(to, _) = a.handle_packet(6 * S, &packet) else { panic!() };
        assert_eq!(to, Destination::Unicast(link(77)));
    }
    assert_eq!(again.poll_timeout(), Some(6 * S));
    again.handle_timeout(6 * S);
    again.handle_timeout(7 * S);
    assert_eq!(again.poll_timeout(), None, "three times is enough");
    // A host that is not known is not learnt from what it announces.
    let mut other = quiet(3);
    let mut newcomer = host(2);
    newcomer.handle_timeout(0);
    exchange(0, &mut other, &mut newcomer);
    assert_eq!(other.handle_packet(0, &packet4(v4(3), v4(2), 0)), Outgoing::Waits);
}

#[test]
fn nobody_answers() {
    let mut a = quiet(1);
    assert_eq!(a.handle_packet(10 * S, &packet4(v4(1), v4(9), 0)), Outgoing::Waits);
    for second in 11..=13 {
        assert_eq!(a.poll_timeout(), Some(second * S));
        a.handle_timeout(second * S);
    }
    assert_eq!(a.poll_timeout(), None);
    assert_eq!((a.counters().asked, a.counters().dropped_for(Dropped::Unresolved)), (3, 1));
}

#[test]
fn a_neighbour_is_probed_when_it_is_used_late() {
    let (mut a, mut b) = (quiet(1), quiet(2));
    a.handle_packet(0, &packet4(v4(1), v4(2), 0));
    exchange(0, &mut a, &mut b);
    let late = 2 * REACHABLE_NS;
    a.handle_packet(late, &packet4(v4(1), v4(2), 0));
    let mut out = Vec::new();
    assert_eq!(a.poll_transmit(&mut out), Some(Destination::Unicast(link(2))));
    let arrival = Arrival { source: link(1), group: None };
    assert_eq!(b.handle_datagram(late, &arrival, &out), Incoming::Consumed);
    exchange(late, &mut a, &mut b);
    a.handle_timeout(late + S);
    assert_eq!(a.poll_timeout(), None, "it was confirmed");
}

#[track_caller]
fn dropped(host: &mut Engine, arrival: Arrival, bytes: &[u8], why: Dropped) {
    assert_eq!(host.handle_datagram(0, &arrival, bytes), Incoming::Dropped(why));
    assert!(host.counters().dropped_for(why) > 0);
}

#[test]
fn datagrams_that_make_no_sense_are_ignored() {
    let mut a = quiet(1);
    let peer = Arrival { source: link(2), group: None };
    let good = datagram(Encapsulation::Ipv4, &packet4(v4(2), v4(1), 10));
    assert_eq!(a.handle_datagram(0, &peer, &good), Incoming::Deliver(4..34));
    let padded = [&good[..], &[0; 9]].concat();
    assert_eq!(a.handle_datagram(0, &peer, &padded), Incoming::Deliver(4..34));
    for len in 0..good.len() {
        dropped(&mut a, peer, &good[..len], Dropped::Malformed);
    }
    let mut other = good.clone();
    other[1] = 1;
    dropped(&mut a, peer, &other, Dropped::UnknownType);
    let mut wrong = good.clone();
    wrong[..4].copy_from_slice(&Encapsulation::Ipv6.to_bytes());
    dropped(&mut a, peer, &wrong, Dropped::Malformed);
    dropped(&mut a, peer, &vec![8; 2049], Dropped::TooLong);
    dropped(&mut a, Arrival { source: link(1), group: Some([0xff; 16]) }, &good, Dropped::Own);
    dropped(
        &mut a,
        Arrival { source: link(2), group: Some([0xff; 16]) },
        &good,
        Dropped::Misdirected,
    );
    for from in [v4(1), Ipv4Addr::new(224, 0, 0, 5), Ipv4Addr::LOCALHOST, Ipv4Addr::BROADCAST] {
        let forged = datagram(Encapsulation::Ipv4, &packet4(from, v4(1), 10));
        dropped(&mut a, peer, &forged, Dropped::Forged);
    }
    let redirect = datagram(Encapsulation::Ipv6, &{
        let mut packet = packet6(v6(2), v6(1), 40);
        (packet[6], packet[40]) = (58, 137);
        packet
    });
    let incoming = a.handle_datagram(0, &peer, &redirect);
    assert!(matches!(incoming, Incoming::Dropped(_)), "{incoming:?}");
}

#[test]
fn a_peer_speaks_for_its_own_address_only() {
    let mut a = quiet(1);
    let arp = |sender_link, sender, operation| {
        let target = v4(1);
        let arp = Arp { operation, sender_link, sender, target_link: [0; 20], target };
        datagram(Encapsulation::Arp, &arp.to_bytes())
    };
    let peer = Arrival { source: link(2), group: None };
    let request = Operation::Request;
    dropped(&mut a, peer, &arp(link(3), v4(3), request), Dropped::Forged);
    dropped(&mut a, peer, &arp(link(2), v4(1), request), Dropped::Forged);
    dropped(&mut a, peer, &arp(link(2), v4(255), request), Dropped::Forged);
    dropped(&mut a, peer, &arp(link(2), Ipv4Addr::new(192, 0, 2, 1), request), Dropped::Forged);
    let group = Arrival { source: link(2), group: Some([0xff; 16]) };
    dropped(&mut a, group, &arp(link(2), v4(2), Operation::Reply), Dropped::Misdirected);
    let solicit = |link, target: u16, source| {
        let asked = Discovery::Solicitation { target: v6(target), link: Some(link) };
        datagram(Encapsulation::Ipv6, &asked.to_packet(source, v6(1)))
    };
    dropped(&mut a, peer, &solicit(link(3), 1, v6(3)), Dropped::Forged);
    dropped(&mut a, peer, &solicit(link(2), 1, v6(1)), Dropped::Forged);
    let told = |link, target: u16| {
        let (solicited, overrides) = (true, true);
        let target = v6(target);
        let told = Discovery::Advertisement { target, solicited, overrides, link: Some(link) };
        datagram(Encapsulation::Ipv6, &told.to_packet(v6(2), v6(1)))
    };
    dropped(&mut a, peer, &told(link(3), 3), Dropped::Forged);
    dropped(&mut a, peer, &told(link(2), 1), Dropped::Forged);
    assert_eq!(a.poll_transmit(&mut Vec::new()), None, "nobody is answered");
}

#[test]
fn probes_for_an_address_are_answered_and_not_learnt() {
    let mut a = quiet(1);
    let peer = Arrival { source: link(2), group: Some([0xff; 16]) };
    let arp = Arp {
        operation: Operation::Request,
        sender_link: link(2),
        sender: Ipv4Addr::UNSPECIFIED,
        target_link: [0; 20],
        target: v4(1),
    };
    let probe = datagram(Encapsulation::Arp, &arp.to_bytes());
    assert_eq!(a.handle_datagram(0, &peer, &probe), Incoming::Consumed);
    let asked = Discovery::Solicitation { target: v6(1), link: None };
    let packet = asked.to_packet(Ipv6Addr::UNSPECIFIED, "ff02::1:ff00:1".parse().unwrap());
    let probe = datagram(Encapsulation::Ipv6, &packet);
    assert_eq!(a.handle_datagram(0, &peer, &probe), Incoming::Consumed);
    let mut out = Vec::new();
    assert_eq!(a.poll_transmit(&mut out), Some(Destination::Unicast(link(2))));
    let all = Destination::Group(group_gid(ALL_NODES.into(), 0xffff));
    assert_eq!(a.poll_transmit(&mut out), Some(all));
    assert_eq!(a.neighbours.len(), 0);
}

#[test]
fn a_flood_of_requests_is_bounded() {
    let mut a = quiet(1);
    a.config.addresses[0].1 = 8;
    for n in 0..5000u32 {
        let own = LinkAddress { qpn: n, gid: [2; 16], connects: false };
        let arp = Arp {
            operation: Operation::Request,
            sender_link: own,
            sender: Ipv4Addr::from_bits(0x0a01_0000 + n),
            target_link: [0; 20],
            target: v4(1),
        };
        let bytes = datagram(Encapsulation::Arp, &arp.to_bytes());
        a.handle_datagram(0, &Arrival { source: own, group: Some([0xff; 16]) }, &bytes);
    }
    assert_eq!(a.neighbours.len(), MAX_NEIGHBOURS);
    let queued = std::iter::from_fn(|| a.poll_transmit(&mut Vec::new())).count();
    assert_eq!(queued, MAX_QUEUED);
}

#[test]
fn packets_of_the_kernel_that_make_no_sense_are_dropped() {
    let mut a = quiet(1);
    assert_eq!(a.handle_packet(0, &[]), Outgoing::Dropped(Dropped::Malformed));
    assert_eq!(a.handle_packet(0, &[0x45; 19]), Outgoing::Dropped(Dropped::Malformed));
    let long = packet4(v4(1), v4(2), 2044 - 19);
    assert_eq!(a.handle_packet(0, &long), Outgoing::Dropped(Dropped::TooLong));
    let asked = Discovery::Solicitation { target: v6(2), link: None };
    let own = asked.to_packet(v6(1), ALL_NODES);
    assert_eq!(a.handle_packet(0, &own), Outgoing::Dropped(Dropped::Discovery));
}
