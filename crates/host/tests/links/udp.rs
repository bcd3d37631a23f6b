//! Links over UDP.

use std::net::{Ipv6Addr, SocketAddr, SocketAddrV4, UdpSocket};

use quipu_host::packet::{self, Outgoing, PacketLink, address_of};

use super::peer::{next, wait};

fn open(spec: &str) -> Box<dyn PacketLink> {
    packet::open(&spec.parse().unwrap()).unwrap()
}

fn address(link: &dyn PacketLink) -> Ipv6Addr {
    match link.features().address {
        Some((std::net::IpAddr::V6(address), 48)) => address,
        other => panic!("{other:?}"),
    }
}

/// A packet with only as much of a header as the link looks at.
fn packet(from: Ipv6Addr, to: Ipv6Addr, len: usize, mark: u8) -> Vec<u8> {
    let mut packet = vec![mark; len];
    packet[0] = 0x60;
    packet[8..24].copy_from_slice(&from.octets());
    packet[24..40].copy_from_slice(&to.octets());
    packet
}

/// Hands a packet to the link; false if it is full.
fn send(link: &mut dyn PacketLink, packet: &[u8]) -> bool {
    let Some(slot) = link.slot() else { return false };
    slot[..packet.len()].copy_from_slice(packet);
    link.send(Outgoing { len: packet.len(), ..Outgoing::default() });
    true
}

#[test]
fn packets_find_the_places_that_they_are_for() {
    let (mut a, mut b) = (open("udp:127.0.0.1:0"), open("udp:127.0.0.2:0"));
    let (from, to) = (address(a.as_ref()), address(b.as_ref()));
    assert_eq!(a.features().mtu, 65_000);
    assert_eq!((a.features().hardware, a.features().segment), (None, 0));
    // Many short ones, which share messages, and between them the longest and others.
    let lens: Vec<usize> =
        (0..200).map(|i| if i % 40 == 7 { 65_000 } else { 100 + i / 50 }).collect();
    let mut got = Vec::new();
    let mut sent = 0;
    while got.len() < lens.len() {
        while sent < lens.len() && send(a.as_mut(), &packet(from, to, lens[sent], sent as u8)) {
            sent += 1;
        }
        a.flush().unwrap();
        got.extend(next(b.as_mut(), |bytes, checked| {
            assert!(!checked);
            Some(bytes.to_vec())
        }));
    }
    for (i, packet) in got.iter().enumerate() {
        assert_eq!((packet.len(), packet[lens[i] - 1]), (lens[i], i as u8));
    }
    assert!(!a.wants_writable());
}

#[test]
fn who_is_not_where_he_says_is_not_heard() {
    let mut link = open("udp:127.0.0.1:0");
    let own = address(link.as_ref());
    let place = packet::place_of(own).unwrap();
    let stranger = UdpSocket::bind("127.0.0.1:0").unwrap();
    let SocketAddr::V4(his) = stranger.local_addr().unwrap() else { panic!() };
    let elsewhere = SocketAddrV4::new(*his.ip(), his.port() ^ 1);
    for from in [own, address_of(elsewhere), "fd00::1".parse().unwrap(), Ipv6Addr::LOCALHOST] {
        stranger.send_to(&packet(from, own, 60, 1), place).unwrap();
    }
    stranger.send_to(&packet(address_of(his), own, 39 + 1, 2)[..39], place).unwrap();
    stranger.send_to(&[], place).unwrap();
    stranger.send_to(&packet(address_of(his), own, 60, 3), place).unwrap();
    let marks = next(link.as_mut(), |bytes, _| bytes.last().copied());
    assert_eq!(marks, [3]);
}

#[test]
fn a_full_link_takes_nothing_and_loses_nothing() {
    // Nobody reads at the other end, so its kernel drops; here the queue is what fills, as nobody flushes.
    let mut link = open("udp:127.0.0.1:0");
    let own = address(link.as_ref());
    let mut taken = 0;
    while send(link.as_mut(), &packet(own, own, 64, taken)) {
        taken += 1;
    }
    assert!(taken >= 32 && link.slot().is_none() && link.wants_writable());
    // A frame for which there was no slot changes nothing.
    link.send(Outgoing { len: 40, ..Outgoing::default() });
    link.flush().unwrap();
    assert!(!link.wants_writable());
    let mut marks = Vec::new();
    while marks.len() < usize::from(taken) {
        marks.extend(next(link.as_mut(), |bytes, _| bytes.last().copied()));
    }
    assert_eq!(marks, (0..taken).collect::<Vec<_>>());
}

#[test]
fn addresses_that_are_no_places_lead_nowhere() {
    let mut link = open("udp:127.0.0.1:0");
    let own = address(link.as_ref());
    for to in ["fd00::1", "ff02::1", "::"] {
        assert!(send(link.as_mut(), &packet(own, to.parse().unwrap(), 64, 0)));
    }
    assert!(send(link.as_mut(), &[0x60; 39]));
    assert!(!link.wants_writable(), "dropped");
    wait(link.as_ref(), libc::POLLIN);
    assert_eq!(link.receive(8, &mut |_| panic!("nobody sends")).unwrap(), 0);
}

#[test]
fn listed_peers_over_ipv6() {
    let Ok(probe) = UdpSocket::bind("[::1]:0") else {
        println!("SKIPPED: no IPv6 here");
        return;
    };
    let port = probe.local_addr().unwrap().port();
    let mut a = open(&format!("udp:[::1]:0,peer=fd00::2@[::1]:{port}"));
    assert_eq!(a.features().address, None);
    let (one, two) = ("fd00::1".parse().unwrap(), "fd00::2".parse().unwrap());
    assert!(send(a.as_mut(), &packet(one, two, 64, 5)));
    a.flush().unwrap();
    let mut buffer = [0; 100];
    let (len, from) = probe.recv_from(&mut buffer).unwrap();
    assert_eq!(&buffer[..len], packet(one, two, 64, 5));
    // It is heard by its listed address only.
    for (source, mark) in [(one, 6), (two, 7)] {
        probe.send_to(&packet(source, one, 64, mark), from).unwrap();
    }
    assert_eq!(next(a.as_mut(), |bytes, _| bytes.last().copied()), [7]);
    // An address that means a place of IPv4 is out of reach.
    let place = address_of("127.0.0.1:9".parse().unwrap());
    assert!(send(a.as_mut(), &packet(one, place, 64, 0)));
    assert!(!a.wants_writable());
}

#[test]
fn errors_say_what_to_do() {
    let error = |spec: &str| packet::open(&spec.parse().unwrap()).err().unwrap().to_string();
    let taken = UdpSocket::bind("127.0.0.1:0").unwrap();
    let spec = format!("udp:{}", taken.local_addr().unwrap());
    let said = error(&spec);
    assert!(said.contains(&spec) && said.contains("choose another port"), "{said}");
    let said = error("udp:192.0.2.1:4000");
    assert!(said.contains("give an address of this host"), "{said}");
}
