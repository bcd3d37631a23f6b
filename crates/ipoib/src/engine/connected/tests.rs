use std::net::{Ipv4Addr, Ipv6Addr};

use quipu_wire::arp::Operation;
use quipu_wire::ipoib::{Arp, Discovery};
use quipu_wire::{icmpv4, icmpv6, ipv4, ipv6};

use super::super::tests::*;
use super::super::{Arrival, Config};
use super::*;

const UNDER_WAY: usize = 64;

fn connected(n: u8) -> Engine {
    let own = LinkAddress { connects: true, ..link(n) };
    settle(Engine::new(Config {
        link: own,
        mtu: 65520,
        connection_slots: UNDER_WAY,
        ..host(n).config
    }))
}

/// Packet of `n` for `to`, in either family.
fn packet(n: u8, to: u8, is_ipv6: bool, payload: usize) -> Vec<u8> {
    match is_ipv6 {
        false => packet4(v4(n), v4(to), payload),
        true => packet6(v6(n.into()), v6(to.into()), payload),
    }
}

/// The connection that an engine wants to open.
fn opening(engine: &mut Engine) -> (ConnectionId, LinkAddress, Vec<u8>) {
    match engine.poll_connection() {
        Some(ConnectionChange::Open { id, to, private_data }) => (id, to, private_data.to_vec()),
        other => panic!("{other:?}"),
    }
}

/// Has `b` accept what `a` wants to open; the names of the connection at both ends.
fn establish(now_ns: u64, a: &mut Engine, b: &mut Engine) -> (ConnectionId, ConnectionId) {
    let (at_a, to, data) = opening(a);
    assert_eq!(to, b.config.link.without_flags());
    let padded = [&data[..], &[0; 48]].concat();
    let (at_b, reply) = b.handle_request(now_ns, a.config.link.gid, &padded).unwrap();
    assert!(b.handle_established(now_ns, at_b, &padded));
    assert!(a.handle_established(now_ns, at_a, &reply));
    (at_a, at_b)
}

/// Two hosts of which `a` has a connection to `b`.
fn pair() -> (Engine, Engine, ConnectionId, ConnectionId) {
    let (mut a, mut b) = (connected(1), connected(2));
    a.handle_packet(9 * S, &packet(1, 2, false, 0));
    exchange(9 * S, &mut a, &mut b);
    let (at_a, at_b) = establish(9 * S, &mut a, &mut b);
    let mut out = Vec::new();
    assert_eq!(a.poll_transmit(&mut out), Some(Destination::Connection(at_a)));
    a.handle_sent(9 * S, at_a, 1);
    (a, b, at_a, at_b)
}

#[test]
fn packets_of_65520_bytes_go_over_a_connection() {
    for is_ipv6 in [false, true] {
        let (mut a, mut b) = (connected(1), connected(2));
        let header = if is_ipv6 { ipv6::LEN } else { ipv4::LEN };
        let long = packet(1, 2, is_ipv6, 65520 - header);
        assert_eq!(a.handle_packet(9 * S, &long), Outgoing::Waits);
        // The address is resolved by datagrams, then the packet waits for the connection.
        assert_eq!(exchange(9 * S, &mut a, &mut b), Vec::<Vec<u8>>::new());
        assert_eq!(a.handle_packet(9 * S, &long), Outgoing::Waits);
        let (at_a, at_b) = establish(9 * S, &mut a, &mut b);
        let mut out = Vec::new();
        for _ in 0..2 {
            assert_eq!(a.poll_transmit(&mut out), Some(Destination::Connection(at_a)));
            assert_eq!(b.handle_message(9 * S, at_b, &out), Incoming::Deliver(4..65524));
            assert_eq!(out[4..], long);
        }
        assert_eq!(a.poll_transmit(&mut out), None);
        let Outgoing::Send(to, _) = a.handle_packet(9 * S, &long) else { panic!() };
        assert_eq!(to, Destination::Connection(at_a));
        assert_eq!((a.counters().opened, b.counters().accepted), (1, 1));
        assert_eq!((a.counters().sent, a.connections()[0].packets), (3, 3));
        // The way back has a connection of its own.
        let back = packet(2, 1, is_ipv6, 0);
        assert_eq!(b.handle_packet(9 * S, &back), Outgoing::Waits);
        establish(9 * S, &mut b, &mut a);
    }
}

#[test]
fn one_in_datagram_mode_and_one_in_connected_mode_use_datagrams() {
    for is_ipv6 in [false, true] {
        let (mut a, mut b) = (connected(1), quiet(2));
        b.config.datagram_mtu = 2044;
        a.config.datagram_mtu = 2044;
        let fits = packet(1, 2, is_ipv6, 1000);
        assert_eq!(a.handle_packet(9 * S, &fits), Outgoing::Waits);
        assert_eq!(exchange(9 * S, &mut a, &mut b), std::slice::from_ref(&fits));
        let Outgoing::Send(to, _) = a.handle_packet(9 * S, &fits) else { panic!() };
        assert_eq!(to, Destination::Unicast(link(2)));
        let Outgoing::Send(to, _) = b.handle_packet(9 * S, &packet(2, 1, is_ipv6, 1000)) else {
            panic!()
        };
        assert_eq!(to, Destination::Unicast(link(1)));
        assert_eq!((a.poll_connection(), a.poll_deliver()), (None, None));
        // A sender of more learns how much there may be.
        let long = packet(1, 2, is_ipv6, 3000);
        assert_eq!(a.handle_packet(9 * S, &long), Outgoing::Dropped(Dropped::TooLong));
        let told = a.poll_deliver().unwrap();
        let mtu = if is_ipv6 { mtu_v6(&told) } else { mtu_v4(&told) };
        assert_eq!((mtu, a.counters().too_big), (2044, 1));
    }
}

fn mtu_v4(told: &[u8]) -> usize {
    let (header, at) = ipv4::Repr::parse(told).unwrap();
    assert_eq!((header.source, header.destination), (v4(2), v4(1)));
    match icmpv4::Repr::parse(&told[at..]).unwrap() {
        icmpv4::Repr::Unreachable { code: 4, next_mtu, .. } => next_mtu.into(),
        other => panic!("{other:?}"),
    }
}

fn mtu_v6(told: &[u8]) -> usize {
    let (header, at) = ipv6::Repr::parse(told).unwrap();
    assert_eq!((header.source, header.destination), (v6(2), v6(1)));
    match icmpv6::Repr::parse(header.source, header.destination, &told[at..]).unwrap() {
        icmpv6::Repr::PacketTooBig { mtu, .. } => mtu as usize,
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_packet_that_waited_and_is_too_long_tells_its_sender_too() {
    let (mut a, mut b) = (connected(1), quiet(2));
    assert_eq!(a.handle_packet(9 * S, &packet(1, 2, false, 3000)), Outgoing::Waits);
    exchange(9 * S, &mut a, &mut b);
    assert_eq!(mtu_v4(&a.poll_deliver().unwrap()), 2044);
    // And so for a connection to one that receives less.
    let (mut a, mut b) = (connected(1), connected(2));
    a.handle_packet(9 * S, &packet(1, 2, false, 3000));
    exchange(9 * S, &mut a, &mut b);
    let (id, ..) = opening(&mut a);
    let reply = ConnectionData { qpn: link(2).qpn, receive_mtu: 1504 }.to_bytes();
    assert!(a.handle_established(9 * S, id, &reply));
    assert_eq!(mtu_v4(&a.poll_deliver().unwrap()), 1500);
    assert_eq!(a.poll_transmit(&mut Vec::new()), None);
    assert_eq!(a.counters().dropped_for(Dropped::TooLong), 1);
}

#[test]
fn broadcasts_and_groups_go_in_datagrams_and_are_short() {
    let (mut a, ..) = pair();
    for to in [Ipv4Addr::BROADCAST, Ipv4Addr::new(224, 0, 0, 251)] {
        let Outgoing::Send(to_all, _) = a.handle_packet(9 * S, &packet4(v4(1), to, 2000)) else {
            panic!()
        };
        assert!(matches!(to_all, Destination::Group(_)));
        let long = packet4(v4(1), to, 5000);
        assert_eq!(a.handle_packet(9 * S, &long), Outgoing::Dropped(Dropped::TooLong));
    }
    assert_eq!(a.poll_deliver(), None);
}

#[test]
fn a_lost_connection_is_opened_again_and_the_neighbour_is_probed() {
    let (mut a, mut b, at_a, at_b) = pair();
    a.handle_ended(20 * S, at_a);
    b.handle_ended(20 * S, at_b);
    for ended in [a.connections(), b.connections()] {
        assert!(ended.len() == 1 && ended[0].has_ended);
    }
    assert_eq!(a.handle_packet(20 * S, &packet(1, 2, false, 0)), Outgoing::Waits);
    let mut out = Vec::new();
    assert_eq!(a.poll_transmit(&mut out), Some(Destination::Unicast(link(2))), "a probe");
    establish(20 * S, &mut a, &mut b);
    assert_eq!(a.counters().opened, 2);
}

#[test]
fn a_neighbour_that_was_started_again_gets_a_new_connection() {
    let (mut a, _, at_a, _) = pair();
    // It has another queue pair now, and says so.
    let own = LinkAddress { qpn: 0x7777, gid: [2; 16], connects: true };
    let mut again = Engine::new(Config { link: own, ..connected(2).config });
    again.handle_timeout(12 * S);
    exchange(12 * S, &mut a, &mut again);
    assert_eq!(a.handle_packet(12 * S, &packet(1, 2, false, 0)), Outgoing::Waits);
    establish(12 * S, &mut a, &mut again);
    a.handle_ended(13 * S, at_a);
    let has_ended: Vec<_> = a.connections().iter().map(|it| it.has_ended).collect();
    assert_eq!(has_ended, [true, false]);
}

#[test]
fn a_connection_that_cannot_be_made_drops_what_waits() {
    let (mut a, mut b) = (connected(1), connected(2));
    a.handle_packet(9 * S, &packet(1, 2, false, 0));
    exchange(9 * S, &mut a, &mut b);
    let (id, ..) = opening(&mut a);
    a.handle_ended(9 * S, id);
    assert_eq!((a.counters().failed, a.counters().dropped_for(Dropped::NotConnected)), (1, 1));
    let dropped = Outgoing::Dropped(Dropped::NotConnected);
    assert_eq!(a.handle_packet(9 * S, &packet(1, 2, false, 0)), dropped);
    assert_eq!(a.handle_packet(11 * S, &packet(1, 2, false, 0)), Outgoing::Waits);
    let (id, ..) = opening(&mut a);
    assert!(!a.handle_established(11 * S, id, b"garbage!"));
    a.handle_ended(11 * S, id);
    assert_eq!(b.handle_request(0, [1; 16], &[0xff; 56]), Err(Dropped::Malformed));
    assert_eq!(b.counters().refused, 1);
    let mut other = quiet(3);
    assert_eq!(other.handle_request(0, [1; 16], &[0; 56]), Err(Dropped::NotConnected));
}

#[test]
fn messages_that_make_no_sense_are_ignored() {
    let (_, mut b, _, at_b) = pair();
    let good = datagram(Encapsulation::Ipv4, &packet4(v4(1), v4(2), 10));
    assert_eq!(b.handle_message(9 * S, at_b, &good), Incoming::Deliver(4..34));
    let mut drops = |bytes: &[u8], why: Dropped| {
        assert_eq!(b.handle_message(9 * S, at_b, bytes), Incoming::Dropped(why));
    };
    for len in 0..good.len() {
        drops(&good[..len], Dropped::Malformed);
    }
    drops(&[1; 50], Dropped::UnknownType);
    drops(&[8; 65525], Dropped::TooLong);
    let own = datagram(Encapsulation::Ipv4, &packet4(v4(2), v4(2), 10));
    drops(&own, Dropped::Forged);
    let to_all = datagram(Encapsulation::Ipv4, &packet4(v4(1), v4(255), 10));
    drops(&to_all, Dropped::Misdirected);
    // Addresses are resolved by datagrams only.
    let arp = Arp {
        operation: Operation::Request,
        sender_link: link(1),
        sender: v4(1),
        target_link: [0; 20],
        target: v4(2),
    };
    drops(&datagram(Encapsulation::Arp, &arp.to_bytes()), Dropped::Misdirected);
    let asked = Discovery::Solicitation { target: v6(2), link: Some(link(1)) };
    let asked = asked.to_packet(v6(1), v6(2));
    drops(&datagram(Encapsulation::Ipv6, &asked), Dropped::Misdirected);
    b.handle_ended(9 * S, at_b);
    let ended = Incoming::Dropped(Dropped::NotConnected);
    assert_eq!(b.handle_message(9 * S, at_b, &good), ended);
    assert_eq!(b.poll_transmit(&mut Vec::new()), None, "nobody is answered");
}

#[test]
fn a_connection_with_too_much_under_way_loses_packets_and_is_given_up() {
    let (mut a, _, at_a, _) = pair();
    a.handle_timeout(10 * S);
    let packet = packet(1, 2, false, 0);
    let to = Outgoing::Send(Destination::Connection(at_a), Encapsulation::Ipv4);
    for _ in 0..UNDER_WAY / 2 {
        assert_eq!(a.handle_packet(10 * S, &packet), to);
    }
    let full = Outgoing::Dropped(Dropped::Congested);
    assert_eq!(a.handle_packet(10 * S, &packet), full);
    a.handle_sent(11 * S, at_a, 1);
    assert_eq!(a.handle_packet(11 * S, &packet), to);
    assert_eq!(a.poll_timeout(), Some(19 * S), "of the one packet before");
    a.handle_timeout(19 * S);
    assert_eq!(a.poll_timeout(), Some(21 * S));
    a.handle_timeout(21 * S);
    assert_eq!(a.poll_connection(), Some(ConnectionChange::Close(at_a)));
    assert!(a.connections()[0].has_ended);
}

#[test]
fn the_flag_stays_known_when_an_advertisement_has_no_address() {
    let (mut a, mut b) = (connected(1), connected(2));
    a.handle_packet(9 * S, &packet(1, 2, true, 0));
    exchange(9 * S, &mut a, &mut b);
    opening(&mut a);
    let told =
        Discovery::Advertisement { target: v6(2), solicited: true, overrides: false, link: None };
    let bytes = datagram(Encapsulation::Ipv6, &told.to_packet(v6(2), v6(1)));
    let arrival = Arrival { source: link(2), group: None };
    assert_eq!(a.handle_datagram(9 * S, &arrival, &bytes), Incoming::Consumed);
    assert_eq!(a.handle_packet(9 * S, &packet(1, 2, true, 0)), Outgoing::Waits);
    let local = crate::link_local(a.config.link);
    assert_eq!(local, crate::link_local(link(1)), "the flag changes no address");
    assert!(Ipv6Addr::is_unicast_link_local(&local));
}
