//! What a station says of the groups that it listens to (RFC 3810).

use std::net::Ipv6Addr;

use quipu_inet::stack::Config;
use quipu_inet::tcp::{SECOND, Secret};
use quipu_wire::checksum::{Sum, sum};
use quipu_wire::{ethernet, ipv6};

use crate::net::{Net, STATION, V6, station};
use crate::packets::Packet;
use crate::streams::stream;

const REPORT: u8 = 143;
const ALL_NODES: &str = "ff02::1";

/// The reports that host 0 sends within a time, each as its groups.
fn reports(net: &mut Net, time: u64) -> Vec<Vec<Ipv6Addr>> {
    let end = net.now + time;
    let mut reports = Vec::new();
    let mut frame = vec![0; 1_514];
    loop {
        net.hosts[0].stack.handle_timeout(net.now);
        while let Some(departure) = net.hosts[0].stack.poll_transmit(net.now, &mut frame) {
            reports.extend(report(&frame[..departure.headers]));
        }
        match net.hosts[0].stack.poll_timeout() {
            Some(at) if at <= end => net.now = at,
            _ => break,
        }
    }
    net.now = end;
    reports
}

fn report(frame: &[u8]) -> Option<Vec<Ipv6Addr>> {
    let (ip, at) = ipv6::Repr::parse(&frame[ethernet::HEADER..]).ok()?;
    if ip.next_header != 0 {
        return None;
    }
    assert_eq!(frame[..6], [0x33, 0x33, 0, 0, 0, 0x16]);
    assert_eq!(ip.destination, "ff02::16".parse::<Ipv6Addr>().unwrap());
    assert_eq!((ip.source, ip.hop_limit), (ipv6::link_local(STATION), 1));
    let (alert, message) = frame[ethernet::HEADER + at..].split_at(8);
    assert_eq!(alert, [58, 0, 5, 2, 0, 0, 1, 0], "RFC 3810 5: a router alert");
    let pseudo = Sum::of_pseudo_header(ip.source.into(), ip.destination.into(), 58, message.len());
    assert!(pseudo.and(sum(message)).is_valid());
    assert_eq!((message[0], message[7] as usize * 20 + 8), (REPORT, message.len()));
    let records = message[8..].chunks(20);
    Some(
        records
            .map(|record| {
                assert_eq!(record[..4], [4, 0, 0, 0]);
                let octets: [u8; 16] = record[4..].try_into().unwrap();
                octets.into()
            })
            .collect(),
    )
}

/// A query, as an Ethernet frame.
fn query(from: &str, hop_limit: u8, milliseconds: u16) -> Vec<u8> {
    let mut message = vec![0; 28];
    message[0] = 130;
    message[4..6].copy_from_slice(&milliseconds.to_be_bytes());
    let packet = Packet::new(from.parse().unwrap(), ALL_NODES.parse().unwrap());
    let mut packet = packet.sealed(58, &message, 2);
    packet[7] = hop_limit;
    [&[0x33, 0x33, 0, 0, 0, 1][..], &station(1), &[0x86, 0xdd], &packet].concat()
}

#[test]
fn what_is_listened_to_is_said_twice_and_when_asked() {
    let mut net = Net::ethernet(V6, stream(), 1);
    // The address that was given and the link-local one end in the same octets.
    let groups: [Ipv6Addr; 1] = ["ff02::1:ff00:1".parse().unwrap()];
    assert_eq!(reports(&mut net, 100 * SECOND), [groups, groups]);
    net.arrive(0, &query("fe80::99", 1, 10_000), false);
    assert_eq!(reports(&mut net, 10 * SECOND), [groups], "within the time that it leaves");
    assert!(reports(&mut net, 100 * SECOND).is_empty());
}

#[test]
fn many_groups_take_several_reports() {
    let mut net = Net::with(1_500, stream(), 1, |host| {
        let address = |last: u16| (Ipv6Addr::new(0xfd00, 0, 0, 0, 0, 0, 0, last).into(), 64);
        let config = Config::new(V6[host].parse().unwrap(), 64, Secret([1, host as u64]));
        let addresses = (1..=150).map(|n| address(2 * n + host as u16)).collect();
        Config { hardware: Some(station(host)), addresses, ..config }
    });
    let reports = reports(&mut net, 100 * SECOND);
    // With that of the link-local address.
    let mut all: Vec<_> =
        (1..=150).map(|n| ipv6::solicited_node([0, 0, 0, 0, 0, 0, 0, 2 * n].into())).collect();
    all.push(ipv6::solicited_node(ipv6::link_local(STATION)));
    all.sort_unstable();
    let (first, second) = reports.split_at(3);
    assert_eq!((first.concat(), second.concat()), (all.clone(), all), "each twice");
}

#[test]
fn only_routers_of_the_link_may_ask_and_not_too_often() {
    let mut net = Net::ethernet(V6, stream(), 1);
    reports(&mut net, 100 * SECOND);
    for (from, hop_limit) in [("fd00::2", 1), ("fe80::99", 64)] {
        net.arrive(0, &query(from, hop_limit, 0), false);
    }
    assert_eq!(net.hosts[0].stack.counters().other, 2);
    let mut wrong = query("fe80::99", 1, 0);
    *wrong.last_mut().unwrap() ^= 1;
    net.arrive(0, &wrong, false);
    wrong.truncate(70);
    net.arrive(0, &wrong, false);
    assert!(reports(&mut net, SECOND).is_empty());
    let mut answers = 0;
    for _ in 0..1_000 {
        net.arrive(0, &query("fe80::99", 1, 0), false);
        answers += reports(&mut net, SECOND / 1_000).len();
    }
    assert!((5..=11).contains(&answers), "{answers} in a second");
}

#[test]
fn without_stations_nobody_is_told() {
    let mut net = Net::new(V6, 1_500, stream(), 1);
    net.arrive(0, &query("fe80::99", 1, 0)[ethernet::HEADER..], false);
    let stack = &mut net.hosts[0].stack;
    assert_eq!((stack.counters().other, stack.poll_timeout()), (1, None));
    stack.handle_timeout(net.now + SECOND);
    assert!(!stack.wants_transmit());
    assert_eq!(reports(&mut net, 100 * SECOND), [[]; 0] as [[Ipv6Addr; 0]; 0]);
}
