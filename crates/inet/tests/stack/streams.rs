//! Connections, from SYN to the last FIN, byte-exact.

use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use quipu_inet::stack::{self, Carriage, ConnectError, Offload};
use quipu_inet::tcp::{Config, Event, Failure, MILLISECOND as MS, Mode, SECOND, Secret, State};

use quipu_wire::ipv6;

use crate::net::{Faults, Net, V4, V6};

pub fn stream() -> Config {
    Config {
        receive_mss: u16::MAX,
        path_mss: u16::MAX,
        user_timeout: 3_000 * SECOND,
        ..Config::default()
    }
}

pub fn messages() -> Config {
    Config { mode: Mode::Message, ack_delay: 0, ..stream() }
}

pub const LIMIT: u64 = 3_000 * SECOND;

#[test]
fn there_and_back_and_both_closes() {
    for addresses in [V6, V4] {
        for config in [stream(), messages()] {
            let mut net = Net::new(addresses, 1_500, config, 1);
            let [client, server] = net.pair();
            net.hosts[0].stack.send(client, 100_000, true).unwrap();
            net.hosts[1].stack.send(server, 50_000, true).unwrap();
            assert!(net.run_until(LIMIT, |net| net.hosts[0].user(client).acked == 100_000
                && net.hosts[1].user(server).acked == 50_000));
            net.check(1, server, 100_000);
            net.check(0, client, 50_000);
            net.hosts[0].stack.close(client);
            assert!(
                net.run_until(LIMIT, |net| net.hosts[1].knows(server, Event::PeerClosed(100_000)))
            );
            net.hosts[1].stack.close(server);
            let state = |net: &Net, host: usize, id| {
                net.hosts[host].stack.connection(id).map(|it| it.state())
            };
            assert!(net.run_until(LIMIT, |net| net.hosts[1].knows(server, Event::Closed)));
            assert_eq!(state(&net, 0, client), Some(State::TimeWait));
            net.hosts[0].stack.release(client);
            assert_eq!(state(&net, 0, client), None, "the user has forgotten it");
            net.hosts[1].stack.release(server);
            net.run(LIMIT);
            assert_eq!(net.hosts[0].stack.poll_timeout(), None, "nothing is left");
        }
    }
}

#[test]
fn streams_and_messages_survive() {
    for seed in 0..8 {
        for (addresses, mtu) in [(V6, 1_280), (V4, 1_500), (V6, 9_000), (V4, 65_535)] {
            for config in [stream(), messages()] {
                let mut net = Net::new(addresses, mtu, config, seed);
                net.faults =
                    Faults { lose: 50, repeat: 30, reorder: 100, corrupt: 30, jitter: 20 * MS };
                let [client, server] = net.pair();
                net.hosts[0].stack.send(client, 40_000, true).unwrap();
                net.hosts[1].stack.send(server, 20_000, true).unwrap();
                let done = net.run_until(LIMIT, |net| {
                    net.hosts[0].user(client).acked == 40_000
                        && net.hosts[1].user(server).acked == 20_000
                });
                assert!(done, "{mtu}");
                net.check(1, server, 40_000);
                net.check(0, client, 20_000);
            }
        }
    }
}

/// A link that cuts what it is given, or carries it uncut to a peer that takes it so.
fn joined(config: Config, joins: bool, faults: Faults, seed: u64) -> Net {
    let mut net = Net::with(1_500, config, seed, |host| {
        let address = V6[host].parse().unwrap();
        let offload = Offload { checksum: true, segment: 65_000 };
        stack::Config { offload, ..stack::Config::new(address, 64, Secret([seed, 2])) }
    });
    (net.joins, net.faults) = (joins, faults);
    net
}

#[test]
fn segments_are_joined_for_a_link_that_cuts_them() {
    for joins in [false, true] {
        for config in [stream(), messages()] {
            let mut net = joined(config, joins, Faults::default(), 1);
            let [client, server] = net.pair();
            let lens = [100_000, 1, 1_428, 1_429, 200_000, 5];
            let mut ends = Vec::new();
            for len in lens {
                ends.push(net.hosts[0].stack.send(client, len, true).unwrap());
            }
            let len = lens.iter().sum();
            assert!(net.run_until(LIMIT, |net| net.hosts[0].user(client).acked == len));
            net.check(1, server, len);
            if config.mode == Mode::Message {
                assert_eq!(net.hosts[1].user(server).pushes, ends, "boundaries");
            }
            let largest = net.hosts[0].frames.iter().map(|(len, _)| *len).max();
            assert!(largest > Some(14_000), "{largest:?}");
            assert!(
                net.hosts[0].frames.iter().all(|(len, size)| *len <= 1_500 || *size == Some(1_428))
            );
        }
    }
}

#[test]
fn joined_segments_survive_losses() {
    for seed in 0..8 {
        for config in [stream(), messages()] {
            let faults = Faults { lose: 30, repeat: 30, reorder: 100, jitter: 20 * MS, corrupt: 0 };
            let mut net = joined(config, seed % 2 == 0, faults, seed);
            let [client, server] = net.pair();
            for _ in 0..10 {
                net.hosts[0].stack.send(client, 30_000, true).unwrap();
            }
            net.hosts[0].stack.close(client);
            assert!(net.run_until(LIMIT, |net| net.hosts[0].user(client).acked == 300_000));
            net.check(1, server, 300_000);
            assert!(
                net.run_until(LIMIT, |net| net.hosts[1].knows(server, Event::PeerClosed(300_000)))
            );
        }
    }
}

#[test]
fn who_goes_away_tells_everybody() {
    let mut net = Net::new(V6, 1_500, stream(), 4);
    let [client, server] = net.pair();
    net.hosts[0].stack.send(client, 5_000, true).unwrap();
    net.hosts[0].stack.abort_all();
    assert!(
        net.run_until(LIMIT, |net| net.hosts[1].knows(server, Event::Failed(Failure::Reset))),
        "the peer of a connection that stands is reset"
    );
}

#[test]
fn both_open_at_once() {
    for addresses in [V6, V4] {
        let mut net = Net::new(addresses, 1_500, stream(), 1);
        let config = net.config.clone();
        let ids = [0, 1].map(|host: usize| {
            let to = (net.hosts[1 - host].address, 80).into();
            let id = net.hosts[host].stack.connect(net.now, Some(80), to, &config).unwrap();
            net.hosts[host].adopt(id);
            // A port may be watched that a connection has (RFC 9293 3.9.1.1, MUST-42).
            assert!(net.hosts[host].stack.listen(80, &config, 1).is_ok());
            id
        });
        let both =
            |net: &mut Net| (0..2).all(|host| net.hosts[host].knows(ids[host], Event::Connected));
        assert!(net.run_until(SECOND, both));
        assert!(net.hosts[0].accepted.is_empty() && net.hosts[1].accepted.is_empty());
        for (host, id) in ids.into_iter().enumerate() {
            net.hosts[host].stack.send(id, 10_000, true).unwrap();
        }
        let acked =
            |net: &mut Net| (0..2).all(|host| net.hosts[host].user(ids[host]).acked == 10_000);
        assert!(net.run_until(LIMIT, acked));
        (0..2).for_each(|host| net.check(host, ids[host], 10_000));
        // Both close at once, and both wait.
        (0..2).for_each(|host| net.hosts[host].stack.close(ids[host]));
        net.run(SECOND);
        for (host, id) in ids.into_iter().enumerate() {
            let state = net.hosts[host].stack.connection(id).unwrap().state();
            assert_eq!(state, State::TimeWait);
        }
    }
}

#[test]
fn a_connection_has_the_address_class_and_hop_limit_that_it_was_given() {
    let others: [IpAddr; 2] = ["fd00::11".parse().unwrap(), "fd00::22".parse().unwrap()];
    let config = Config { hop_limit: Some(9), traffic_class: 0xb8 | 3, ..stream() };
    let mut net = Net::with(1_500, config, 1, |host| {
        let mut config = stack::Config::new(V6[host].parse().unwrap(), 64, Secret([1, 2]));
        config.addresses.push((others[host], 64));
        config
    });
    net.listen(1, 80, 2);
    let (config, to) = (net.config.clone(), SocketAddr::new(others[1], 80));
    let from = SocketAddr::new(others[0], 0);
    let id = net.hosts[0].stack.connect_from(net.now, from, to, &config).unwrap();
    let flow = net.hosts[0].stack.flow(id).unwrap();
    assert_eq!((flow.local.ip(), flow.remote), (others[0], to));
    let mut frame = vec![0; 1_514];
    let mut header = |net: &mut Net| {
        let departure = net.hosts[0].stack.poll_transmit(net.now, &mut frame).unwrap();
        let (header, _) = ipv6::Repr::parse(&frame[..departure.headers]).unwrap();
        net.arrive(1, &frame[..departure.headers], false);
        (IpAddr::V6(header.source), header.traffic_class, header.hop_limit)
    };
    // A SYN is not ECN-capable, but what asks for ECN is in its flags.
    assert_eq!(header(&mut net), (others[0], 0xb8, 9));
    net.hosts[0].adopt(id);
    assert!(net.run_until(SECOND, |net| net.hosts[0].knows(id, Event::Connected)));
    net.flush(0);
    net.hosts[0].stack.set_carriage(id, Carriage { traffic_class: 0x20 | 1, hop_limit: None });
    net.hosts[0].stack.close(id);
    assert_eq!(header(&mut net), (others[0], 0x20, 64));
    for wrong in ["fd00::99", "10.0.0.1"] {
        let from = SocketAddr::new(wrong.parse().unwrap(), 0);
        let refused = net.hosts[0].stack.connect_from(net.now, from, to, &config);
        assert_eq!(refused, Err(ConnectError::NoRoute));
    }
}

#[test]
fn a_cookie_is_carried_as_the_connections_of_its_listener_are() {
    let config = Arc::new(Config { hop_limit: Some(9), traffic_class: 0xb8, ..stream() });
    let mut net = Net::new(V6, 1_500, stream(), 1);
    // A backlog of nobody is always full.
    let (listener, _) = net.hosts[1].stack.listen(80, &config, 0).unwrap();
    net.hosts[1].stack.set_idle(listener, 1);
    net.connect(0, 80);
    let mut frame = vec![0; 1_514];
    let departure = net.hosts[0].stack.poll_transmit(net.now, &mut frame).unwrap();
    net.arrive(1, &frame[..departure.headers], false);
    let departure = net.hosts[1].stack.poll_transmit(net.now, &mut frame).unwrap();
    assert_eq!(net.hosts[1].stack.counters().tcp_cookies, 1);
    let (header, _) = ipv6::Repr::parse(&frame[..departure.headers]).unwrap();
    assert_eq!((header.traffic_class, header.hop_limit), (0xb8, 9));
}

#[test]
fn marks_of_the_network_slow_the_sender_down() {
    let mut net = Net::new(V6, 1_500, stream(), 1);
    let [client, server] = net.pair();
    net.mark = true;
    net.hosts[0].stack.send(client, 500_000, true).unwrap();
    assert!(net.run_until(LIMIT, |net| net.hosts[0].user(client).acked == 500_000));
    net.check(1, server, 500_000);
    let counters = *net.hosts[0].stack.connection(client).unwrap().counters();
    assert!(counters.marks > 0, "{counters:?}");
    assert_eq!(counters.retransmitted, 0);
    let window = net.hosts[0].stack.connection(client).unwrap().congestion_window();
    assert!(window < 10 * 1_440, "{window}");
}

#[test]
fn connections_take_turns() {
    const COUNT: usize = 20;
    let mut net = Net::new(V6, 1_500, Config { pacing: false, ..stream() }, 1);
    net.listen(1, 80, COUNT as u32);
    let ids: Vec<_> = (0..COUNT).map(|_| net.connect(0, 80)).collect();
    let all = |net: &mut Net| ids.iter().all(|id| net.hosts[0].knows(*id, Event::Connected));
    assert!(net.run_until(LIMIT, all));
    net.flush(0);
    for id in &ids {
        net.hosts[0].stack.send(*id, 100_000, true).unwrap();
    }
    // As many frames as a link takes at a time: everybody has some of them.
    let mut frame = vec![0; 1_514];
    let mut sent = vec![0u64; COUNT];
    for _ in 0..3 * COUNT {
        let departure = net.hosts[0].stack.poll_transmit(net.now, &mut frame).unwrap();
        let of = departure.of.unwrap();
        sent[ids.iter().position(|id| *id == of).unwrap()] += 1;
    }
    assert_eq!(sent, [3; COUNT]);
    // Those frames are lost, and everything arrives nevertheless.
    let acked = |net: &mut Net| ids.iter().all(|id| net.hosts[0].user(*id).acked == 100_000);
    assert!(net.run_until(LIMIT, acked));
    let accepted = net.hosts[1].accepted.clone();
    accepted.into_iter().for_each(|id| net.check(1, id, 100_000));
}

/// RFC 9293 3.9.1.1 (MUST-41): neither connections nor listeners that were there before, nor what has come to
/// them; also if another has gone, whose place the new one takes.
#[test]
fn a_passive_open_disturbs_nobody() {
    let mut net = Net::new(V6, 1_500, stream(), 1);
    let gone = net.listen(1, 79, 1);
    let [client, server] = net.pair();
    net.hosts[1].stack.unlisten(gone);
    let port = net.hosts[0].stack.flow(client).unwrap().local.port();
    net.hosts[0].stack.send(client, 100_000, true).unwrap();
    assert!(net.run_until(LIMIT, |net| net.hosts[0].user(client).acked > 0));
    let events = net.hosts[1].user(server).events.clone();
    // One that has come before, and that nobody has heard of yet.
    let waiting = net.listen(1, 81, 1);
    let early = net.connect(0, 81);
    net.listen(1, 82, 1);
    // At the port of the connection's own end, and at the same one as the peer's.
    net.listen(0, port, 1);
    net.listen(1, port, 1);
    assert!(net.run_until(LIMIT, |net| net.hosts[0].user(client).acked == 100_000));
    net.check(1, server, 100_000);
    assert_eq!(net.hosts[1].user(server).events, events);
    for to in [81, 82, port] {
        let id = if to == 81 { early } else { net.connect(0, to) };
        let connected = |net: &mut Net| net.hosts[0].knows(id, Event::Connected);
        assert!(net.run_until(LIMIT, connected), "{to}");
        net.run(SECOND / 10);
        let accepted = *net.hosts[1].accepted.last().unwrap();
        assert_eq!(net.hosts[1].stack.flow(accepted).unwrap().local.port(), to);
    }
    assert_eq!(net.hosts[1].accepted.len(), 4);
    net.hosts[1].stack.set_idle(waiting, 1);
    let again = net.connect(0, 81);
    assert!(net.run_until(LIMIT, |net| net.hosts[0].knows(again, Event::Connected)));
}
