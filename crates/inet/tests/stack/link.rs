//! Links with stations: neighbours are found, waited for, and missed.

use std::net::{IpAddr, SocketAddr};

use quipu_inet::stack::{Config, ConnectError, DatagramError, Event, Offload, Stack};
use quipu_inet::tcp::{self, Failure, MILLISECOND as MS, SECOND, Secret, State};

use quipu_wire::icmpv6;
use quipu_wire::ndp::{self, Advertisement};

use crate::net::{Faults, Net, V4, V6, station};
use crate::packets::Packet;
use crate::streams::{LIMIT, messages, stream};

#[test]
fn streams_over_ethernet() {
    for seed in 0..4 {
        for addresses in [V6, V4] {
            for config in [stream(), messages()] {
                let mut net = Net::ethernet(addresses, config, seed);
                net.faults =
                    Faults { lose: 30, repeat: 30, reorder: 100, corrupt: 20, jitter: 20 * MS };
                let [client, server] = net.pair();
                net.hosts[0].stack.send(client, 30_000, true).unwrap();
                net.hosts[1].stack.send(server, 20_000, true).unwrap();
                assert!(net.run_until(LIMIT, |net| net.hosts[0].user(client).acked == 30_000
                    && net.hosts[1].user(server).acked == 20_000));
                net.check(1, server, 30_000);
                net.check(0, client, 20_000);
            }
        }
    }
}

#[test]
fn joined_segments_over_ethernet() {
    let mut net = Net::with(1_500, stream(), 1, |host| {
        let config = Config::new(V6[host].parse().unwrap(), 64, Secret([1, host as u64]));
        let offload = Offload { checksum: true, segment: 65_000 };
        Config { hardware: Some(station(host)), offload, ..config }
    });
    let [client, server] = net.pair();
    net.hosts[0].stack.send(client, 200_000, true).unwrap();
    assert!(net.run_until(LIMIT, |net| net.hosts[0].user(client).acked == 200_000));
    net.check(1, server, 200_000);
    assert!(net.hosts[0].frames.iter().any(|(len, _)| *len > 14_000));
}

#[test]
fn a_handshake_takes_no_longer_than_finding_the_neighbour() {
    let mut net = Net::ethernet(V6, stream(), 1);
    // What they announce at first is over, and was not kept.
    net.run(10 * SECOND);
    let begun = net.now;
    net.pair();
    // A solicitation, its answer, and a handshake whose SYN and answer wait for nobody.
    assert_eq!(net.now - begun, 5 * net.delay, "no timeout was needed");
}

#[test]
fn link_local_addresses_are_there_without_being_given() {
    let mut net = Net::ethernet(V6, stream(), 1);
    let own: Vec<_> = net.hosts[1].stack.addresses().collect();
    assert_eq!(own[1], "fe80::ff:fe00:2".parse::<std::net::IpAddr>().unwrap());
    net.hosts[1].address = own[1];
    let [client, _] = net.pair();
    let flow = net.hosts[0].stack.flow(client).unwrap();
    assert_eq!(flow.local.ip(), "fe80::ff:fe00:1".parse::<std::net::IpAddr>().unwrap());
}

#[test]
fn a_peer_that_comes_back_at_another_station_is_reached_at_once() {
    for addresses in [V6, V4] {
        let mut net = Net::ethernet(addresses, stream(), 1);
        net.pair();
        net.run(SECOND);
        let address = net.hosts[1].address;
        let again = Config {
            hardware: Some([2, 0, 0, 0, 0, 9]),
            ..Config::new(address, 24, Secret([9, 9]))
        };
        net.hosts[1].stack = Stack::new(again);
        net.listen(1, 80, 1);
        net.run(100 * MS);
        let client = net.connect(0, 80);
        let connected = tcp::Event::Connected;
        assert!(net.run_until(100 * MS, |net| net.hosts[0].knows(client, connected)), "{address}");
    }
}

#[test]
fn nobody_there() {
    for (addresses, nobody) in [(V6, "[fd00::99]:80"), (V4, "10.0.0.99:80")] {
        let mut net = Net::ethernet(addresses, stream(), 1);
        let to: SocketAddr = nobody.parse().unwrap();
        let config = net.config.clone();
        let id = net.hosts[0].stack.connect(net.now, None, to, &config).unwrap();
        net.hosts[0].adopt(id);
        let (socket, _) = net.hosts[0].stack.bind(0).unwrap();
        let next_hop = to.ip();
        let unresolved = Err(DatagramError::Unresolved { next_hop });
        assert_eq!(net.send_datagram(0, socket, to, b"hello"), unresolved);
        let lost = Event::Neighbour { next_hop, found: false };
        assert!(net.run_until(4 * SECOND, |net| net.hosts[0].notices.contains(&lost)));
        // Who connects hears of it at the same time, and nobody is asked for any more.
        let failed = tcp::Event::Failed(Failure::Unreachable);
        assert!(net.hosts[0].knows(id, failed));
        net.run(400 * SECOND);
        assert_eq!(net.hosts[0].user(id).events, [failed]);
        assert!(net.carried < 30, "{}", net.carried);
        // Anyone who comes later is found.
        let (socket, _) = net.hosts[1].stack.bind(7).unwrap();
        let to = SocketAddr::new(net.hosts[0].address, 9);
        let next_hop = to.ip();
        let unresolved = Err(DatagramError::Unresolved { next_hop });
        assert_eq!(net.send_datagram(1, socket, to, b"hello"), unresolved);
        let found = Event::Neighbour { next_hop, found: true };
        assert!(net.run_until(SECOND, |net| net.hosts[1].notices.contains(&found)));
        assert_eq!(net.send_datagram(1, socket, to, b"hello"), Ok(()));
    }
}

#[test]
fn a_router_leads_elsewhere_or_nothing_does() {
    let far: SocketAddr = "[fd01::1]:80".parse().unwrap();
    let mut net = Net::ethernet(V6, stream(), 1);
    let config = net.config.clone();
    let refused = net.hosts[0].stack.connect(net.now, None, far, &config);
    assert_eq!(refused, Err(ConnectError::NoRoute));
    let mut net = Net::with(1_500, stream(), 1, |host| {
        let config = Config::new(V6[host].parse().unwrap(), 64, Secret([1, host as u64]));
        let gateways = vec![V6[1 - host].parse().unwrap()];
        Config { hardware: Some(station(host)), gateways, ..config }
    });
    net.run(100 * MS);
    let before = net.hosts[1].stack.counters().not_ours;
    let id = net.hosts[0].stack.connect(net.now, None, far, &config).unwrap();
    net.hosts[0].adopt(id);
    net.run(100 * MS);
    // The other one is no router: the packet has reached it, and is not for it.
    assert_eq!(net.hosts[1].stack.counters().not_ours, before + 1);
    assert_eq!(net.hosts[0].stack.connection(id).unwrap().state(), State::SynSent);
}

/// A router says how long packets of the link may be.
fn advertise_mtu(net: &mut Net, host: usize, mtu: u32) {
    let router = "fe80::99".parse().unwrap();
    let to = "ff02::1".parse().unwrap();
    let advertisement = Advertisement { mtu: Some(mtu), ..Advertisement::default() };
    let message = icmpv6::Repr::Discovery(ndp::Repr::RouterAdvertisement(advertisement));
    let mut bytes = vec![0; message.wire_len()];
    message.emit(router, to, &mut bytes);
    let mut packet = Packet::new(router.into(), to.into()).carry(icmpv6::PROTOCOL, &bytes);
    packet[7] = ndp::HOP_LIMIT;
    let frame = [&[0x33, 0x33, 0, 0, 0, 1, 2, 0, 0, 0, 0, 9, 0x86, 0xdd][..], &packet].concat();
    net.arrive(host, &frame, false);
}

#[test]
fn a_link_that_takes_shorter_packets_is_known_to_connections_that_stand() {
    let mut net = Net::ethernet(V6, stream(), 1);
    let [client, server] = net.pair();
    net.hosts[0].stack.send(client, 100_000, true).unwrap();
    assert!(net.run_until(LIMIT, |net| net.hosts[0].user(client).acked == 100_000));
    let longest = |net: &mut Net| {
        let longest = net.hosts[0].frames.iter().map(|(len, _)| *len).max();
        net.hosts[0].frames.clear();
        longest
    };
    assert_eq!(longest(&mut net), Some(1_514));
    advertise_mtu(&mut net, 0, 1_300);
    net.hosts[0].stack.send(client, 100_000, true).unwrap();
    assert!(net.run_until(LIMIT, |net| net.hosts[0].user(client).acked == 200_000));
    assert_eq!(longest(&mut net), Some(1_314));
    // It does not look for more than the link takes.
    net.run(700 * SECOND);
    net.hosts[0].stack.send(client, 100_000, true).unwrap();
    assert!(net.run_until(LIMIT, |net| net.hosts[0].user(client).acked == 300_000));
    assert_eq!(longest(&mut net), Some(1_314));
    net.check(1, server, 300_000);
    // Nor does one that begins now.
    net.listen(1, 81, 1);
    let next = net.connect(0, 81);
    assert!(net.run_until(LIMIT, |net| net.hosts[0].knows(next, tcp::Event::Connected)));
    for sent in 1..3 {
        net.hosts[0].stack.send(next, 100_000, true).unwrap();
        let all = sent * 100_000;
        assert!(net.run_until(LIMIT, |net| net.hosts[0].user(next).acked == all));
        assert_eq!(longest(&mut net), Some(1_314));
        net.run(700 * SECOND);
    }
}

#[test]
fn a_link_that_takes_longer_packets_again_is_tried() {
    let mut net = Net::ethernet(V6, stream(), 1);
    let [client, _] = net.pair();
    let longest = |net: &mut Net, all| {
        net.hosts[0].frames.clear();
        net.hosts[0].stack.send(client, 100_000, true).unwrap();
        assert!(net.run_until(LIMIT, |net| net.hosts[0].user(client).acked == all));
        net.hosts[0].frames.iter().map(|(len, _)| *len).max()
    };
    advertise_mtu(&mut net, 0, 1_300);
    assert_eq!(longest(&mut net, 100_000), Some(1_314));
    advertise_mtu(&mut net, 0, 1_500);
    net.run(700 * SECOND);
    assert_eq!(longest(&mut net, 200_000), Some(1_514));
}

#[test]
fn a_link_that_takes_shorter_packets_is_known_to_who_is_connecting() {
    let mut net = Net::ethernet(V6, stream(), 1);
    net.listen(1, 81, 1);
    net.hosts[0].frames.clear();
    let client = net.connect(0, 81);
    assert!(net.run_until(LIMIT, |net| !net.hosts[0].frames.is_empty()));
    assert_eq!(net.hosts[0].stack.connection(client).unwrap().state(), State::SynSent);
    advertise_mtu(&mut net, 0, 1_300);
    assert!(net.run_until(LIMIT, |net| net.hosts[0].knows(client, tcp::Event::Connected)));
    for sent in 1..3 {
        net.hosts[0].frames.clear();
        net.hosts[0].stack.send(client, 100_000, true).unwrap();
        let all = sent * 100_000;
        assert!(net.run_until(LIMIT, |net| net.hosts[0].user(client).acked == all));
        assert_eq!(net.hosts[0].frames.iter().map(|(len, _)| *len).max(), Some(1_314));
        net.run(700 * SECOND);
    }
}

#[test]
fn an_end_whose_link_was_down_begins_anew() {
    let mut net = Net::ethernet(V6, stream(), 1);
    net.run(100 * SECOND);
    let said = |net: &mut Net| {
        let before = net.carried;
        net.run(100 * SECOND);
        net.carried - before
    };
    assert_eq!(said(&mut net), 0);
    net.hosts[0].stack.begin_anew();
    // Two announcements of each of two addresses, two reports of groups, three questions for routers.
    assert_eq!(said(&mut net), 9);
}

#[test]
fn frames_with_a_priority_are_looked_at() {
    let mut net = Net::ethernet(V6, stream(), 1);
    let (socket, _) = net.hosts[1].stack.bind(9).unwrap();
    let [from, to] = V6.map(|address| address.parse().unwrap());
    let datagram = Packet::new(from, to).datagram(7, 9, b"urgent");
    for (vlan, seen) in [(0, 1), (1, 1), (0, 2)] {
        let tag = [0x81, 0, 0xa0, vlan, 0x86, 0xdd];
        let frame = [&station(1)[..], &station(0), &tag, &datagram].concat();
        net.arrive(1, &frame, false);
        assert_eq!(net.hosts[1].datagrams.len(), seen);
    }
    let (datagram, payload) = &net.hosts[1].datagrams[1];
    assert_eq!((datagram.socket, &payload[..]), (socket, &b"urgent"[..]));
}

#[test]
fn frames_for_others_are_not_looked_at() {
    let mut net = Net::ethernet(V6, stream(), 1);
    let [client, _] = net.pair();
    net.hosts[0].stack.send(client, 10, true).unwrap();
    let mut frame = vec![0; 1_600];
    let departure = net.hosts[0].stack.poll_transmit(net.now, &mut frame).unwrap();
    frame.truncate(departure.len());
    let mut changed = |octets: &[(usize, u8)]| {
        let mut frame = frame.clone();
        octets.iter().for_each(|(at, value)| frame[*at] = *value);
        net.arrive(1, &frame, true);
        let counters = net.hosts[1].stack.counters();
        (counters.other, counters.martians, counters.malformed)
    };
    assert_eq!(changed(&[(5, 9)]), (1, 0, 0), "another station");
    assert_eq!(changed(&[(0, 0xff)]), (1, 1, 0), "to a group, with an address of one");
    assert_eq!(changed(&[(13, 0)]), (2, 1, 0), "another protocol");
    assert_eq!(changed(&[(11, 2)]), (3, 1, 0), "from ourselves");
    assert_eq!(changed(&[(12, 8), (13, 6)]), (3, 1, 1), "not ARP");
    assert_eq!(changed(&[]), (3, 1, 1));
}

#[test]
fn a_connection_does_not_inherit_what_another_waited_for() {
    let mut net = Net::ethernet(V6, stream(), 1);
    let config = net.config.clone();
    net.listen(1, 80, 1);
    let nobody: SocketAddr = "[fd00::99]:80".parse().unwrap();
    let old = net.hosts[0].stack.connect(net.now, None, nobody, &config).unwrap();
    net.hosts[0].adopt(old);
    net.run(100 * MS);
    net.hosts[0].stack.abort(old);
    net.hosts[0].stack.release(old);
    net.run(100 * MS);
    let new = net.connect(0, 80);
    assert_eq!(new.index(), old.index(), "the same place");
    let begun = net.now;
    assert!(net.run_until(5 * SECOND, |net| net.hosts[0].knows(new, tcp::Event::Connected)));
    assert_eq!(net.now - begun, 4 * net.delay, "no timeout was needed");
}

#[test]
fn who_waits_for_a_neighbour_hears_that_not_all_was_told() {
    let mut net = Net::ethernet(V6, stream(), 1);
    let (socket, _) = net.hosts[0].stack.bind(0).unwrap();
    let mut ask = |from: u16, count: u16| {
        for last in from..from + count {
            let next_hop = IpAddr::from([0xfd00, 0, 0, 0, 0, 0, 1, last]);
            let unresolved = Err(DatagramError::Unresolved { next_hop });
            assert_eq!(net.send_datagram(0, socket, (next_hop, 9).into(), b"hello"), unresolved);
        }
        let told = std::iter::from_fn(|| net.hosts[0].stack.poll_event()).collect::<Vec<_>>();
        (told, net.hosts[0].stack.counters().notices_dropped)
    };
    // 128 are looked for at a time: each further one takes the place of another, which is lost.
    let (told, dropped) = ask(0, 128 + 256);
    let is_loss = |event: &Event| matches!(event, Event::Neighbour { found: false, .. });
    assert_eq!((told.len(), told.iter().all(is_loss), dropped), (256, true, 0));
    let (told, dropped) = ask(1_000, 256 + 2);
    assert_eq!((told.len(), told.last(), dropped), (257, Some(&Event::Neighbours), 2));
    assert_eq!(ask(0, 0), (vec![], 2), "that is said once");
}

/// A stack with routers, in this order.
fn routed(routers: &[&str]) -> Net {
    Net::with(1_500, stream(), 1, |host| {
        let config = Config::new(V6[host].parse().unwrap(), 64, Secret([1, host as u64]));
        let gateways = routers.iter().map(|it| it.parse().unwrap()).collect();
        Config { hardware: Some(station(host)), gateways, ..config }
    })
}

#[test]
fn an_attempt_to_connect_outlives_a_router_as_long_as_there_is_another() {
    let mut net = routed(&["fd00::99", V6[1]]);
    // The other one is known.
    net.pair();
    let far: SocketAddr = "[fd01::1]:80".parse().unwrap();
    let config = net.config.clone();
    let before = net.hosts[1].stack.counters().not_ours;
    let id = net.hosts[0].stack.connect(net.now, None, far, &config).unwrap();
    net.hosts[0].adopt(id);
    net.run(10 * SECOND);
    assert!(net.hosts[1].stack.counters().not_ours > before);
    assert_eq!(net.hosts[0].stack.connection(id).unwrap().state(), State::SynSent);
}

#[test]
fn of_routers_that_do_not_answer_the_next_one_is_asked() {
    // RFC 4861 6.3.6: in turn, until one is there.
    let mut net = routed(&["fd00::98", "fd00::99", V6[1]]);
    let far: SocketAddr = "[fd01::1]:80".parse().unwrap();
    let config = net.config.clone();
    let id = net.hosts[0].stack.connect(net.now, None, far, &config).unwrap();
    net.hosts[0].adopt(id);
    let found = Event::Neighbour { next_hop: V6[1].parse().unwrap(), found: true };
    // Three questions to each of those before.
    let limit = 6 * SECOND + 20 * MS;
    assert!(net.run_until(limit, |net| net.hosts[0].notices.contains(&found)));
    let before = net.hosts[1].stack.counters().not_ours;
    net.run(20 * MS);
    assert_eq!(net.hosts[1].stack.counters().not_ours, before + 1, "what waited has gone there");
    assert_eq!(net.hosts[0].stack.connection(id).unwrap().state(), State::SynSent);
}

#[test]
fn without_any_router_an_attempt_to_connect_ends_when_all_were_asked() {
    let mut net = routed(&["fd00::98", "fd00::99"]);
    let far: SocketAddr = "[fd01::1]:80".parse().unwrap();
    let config = net.config.clone();
    let failed = tcp::Event::Failed(Failure::Unreachable);
    // Each time anew: they may be there again.
    for _ in 0..3 {
        let begun = net.now;
        let id = net.hosts[0].stack.connect(net.now, None, far, &config).unwrap();
        net.hosts[0].adopt(id);
        assert!(net.run_until(7 * SECOND, |net| net.hosts[0].knows(id, failed)));
        assert!(net.now - begun > 5 * SECOND, "{} ms", (net.now - begun) / MS);
    }
}

#[test]
fn a_router_that_was_silent_is_asked_when_another_one_falls_silent() {
    let mut net = routed(&["fd00::99", V6[1]]);
    let far: SocketAddr = "[fd01::1]:80".parse().unwrap();
    let [first, second] = ["fd00::99", V6[1]].map(|it| it.parse().unwrap());
    let config = net.config.clone();
    let heard = |net: &Net, next_hop, found| {
        net.hosts[0].notices.contains(&Event::Neighbour { next_hop, found })
    };
    let id = net.hosts[0].stack.connect(net.now, None, far, &config).unwrap();
    net.hosts[0].adopt(id);
    assert!(net.run_until(4 * SECOND, |net| heard(net, second, true)));
    net.faults.lose = 1_000;
    net.hosts[0].notices.clear();
    assert!(net.run_until(60 * SECOND, |net| heard(net, second, false)));
    assert!(!heard(&net, first, false), "there was another one");
    // The attempt goes on as long as there is somebody to be asked.
    let failed = tcp::Event::Failed(Failure::Unreachable);
    assert!(!net.hosts[0].knows(id, failed));
    assert!(net.run_until(60 * SECOND, |net| heard(net, first, false)));
    assert!(net.hosts[0].knows(id, failed));
}

#[test]
fn one_that_gives_way_to_others_is_not_thought_dead() {
    let mut net = Net::ethernet(V6, stream(), 1);
    let config = net.config.clone();
    let to: SocketAddr = "[fd00::98]:80".parse().unwrap();
    let id = net.hosts[0].stack.connect(net.now, None, to, &config).unwrap();
    net.hosts[0].adopt(id);
    net.run(MS);
    let (socket, _) = net.hosts[0].stack.bind(0).unwrap();
    for last in 0..200 {
        let next_hop = IpAddr::from([0xfd00, 0, 0, 0, 0, 0, 1, last]);
        let unresolved = Err(DatagramError::Unresolved { next_hop });
        assert_eq!(net.send_datagram(0, socket, (next_hop, 9).into(), b"hello"), unresolved);
    }
    net.hosts[0].poll_events();
    let lost = Event::Neighbour { next_hop: to.ip(), found: false };
    assert!(net.hosts[0].notices.contains(&lost));
    assert_eq!(net.hosts[0].user(id).events, [], "nobody knows yet");
}

#[test]
fn a_connection_that_stands_waits_for_a_neighbour_that_is_gone_and_back() {
    for addresses in [V6, V4] {
        let mut net = Net::ethernet(addresses, stream(), 1);
        let [client, server] = net.pair();
        net.run(SECOND);
        net.faults.lose = 1_000;
        net.hosts[0].stack.send(client, 1_000, true).unwrap();
        net.run(60 * SECOND);
        let next_hop = net.hosts[1].address;
        let lost = Event::Neighbour { next_hop, found: false };
        assert!(net.hosts[0].notices.contains(&lost));
        assert_eq!(net.hosts[0].stack.connection(client).unwrap().state(), State::Established);
        net.faults.lose = 0;
        assert!(net.run_until(60 * SECOND, |net| net.hosts[0].user(client).acked == 1_000));
        net.check(1, server, 1_000);
    }
}

#[test]
fn what_ends_a_connection_is_that_the_neighbour_was_gone() {
    let config = tcp::Config { user_timeout: 100 * SECOND, ..stream() };
    let mut net = Net::ethernet(V6, config, 1);
    let [client, _] = net.pair();
    net.faults.lose = 1_000;
    net.hosts[0].stack.send(client, 1_000, true).unwrap();
    let failed = tcp::Event::Failed(Failure::Unreachable);
    assert!(net.run_until(200 * SECOND, |net| net.hosts[0].knows(client, failed)));
}

#[test]
fn a_next_hop_is_asked_when_retransmissions_go_unanswered() {
    // RFC 9293 3.8.3 (MUST-20): TCP tells IP. A neighbour that was reachable a moment ago is asked, not only
    // when that runs out after half a minute; one that is not there is given up after three questions.
    let mut net = Net::ethernet(V6, stream(), 1);
    let [client, _] = net.pair();
    net.faults.lose = 1_000;
    net.hosts[0].stack.send(client, 1_000, true).unwrap();
    let begun = net.now;
    let lost = Event::Neighbour { next_hop: net.hosts[1].address, found: false };
    assert!(net.run_until(60 * SECOND, |net| net.hosts[0].notices.contains(&lost)));
    assert!(net.now - begun < 13 * SECOND, "{} ms", (net.now - begun) / MS);
}
