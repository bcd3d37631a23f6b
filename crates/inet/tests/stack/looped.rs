//! What is for an address of the stack itself.

use std::net::{IpAddr, SocketAddr};

use quipu_inet::stack::{Carriage, Config, ConnectError, Event, Offload};
use quipu_inet::tcp::{self, Failure, MILLISECOND as MS, Secret, State};

use crate::net::{Net, V4, V6, station};
use crate::streams::{LIMIT, messages, stream};

fn own(net: &Net, port: u16) -> SocketAddr {
    SocketAddr::new(net.hosts[0].address, port)
}

/// A connection of host 0 to a listener of its own; both ends.
fn pair(net: &mut Net) -> [quipu_inet::stack::TcpId; 2] {
    let listener = net.listen(0, 80, 1);
    let (now, to, config) = (net.now, own(net, 80), net.config.clone());
    let client = net.hosts[0].stack.connect(now, None, to, &config).expect("it can be tried");
    net.hosts[0].adopt(client);
    let stands = net.run_until(LIMIT, |net| {
        net.hosts[0]
            .accepted
            .last()
            .is_some_and(|id| net.hosts[0].knows(*id, tcp::Event::Connected))
    });
    assert!(stands && net.hosts[0].knows(client, tcp::Event::Connected));
    net.hosts[0].stack.unlisten(listener);
    [client, net.hosts[0].accepted[0]]
}

/// Stacks on links of all kinds.
fn nets() -> Vec<Net> {
    let mut nets = Vec::new();
    for addresses in [V6, V4] {
        for config in [stream(), messages()] {
            for ethernet in [false, true] {
                for segment in [0, 60_000] {
                    let offload = Offload { checksum: segment > 0, segment };
                    nets.push(Net::with(1_500, config, 1, |host| {
                        let address: IpAddr = addresses[host].parse().unwrap();
                        let config = Config::new(address, 24, Secret([1, host as u64]));
                        Config { hardware: ethernet.then(|| station(host)), offload, ..config }
                    }));
                }
            }
        }
    }
    nets
}

#[test]
fn a_connection_of_a_stack_to_itself_is_byte_exact_and_no_link_sees_it() {
    for mut net in nets() {
        let [client, server] = pair(&mut net);
        net.hosts[0].stack.send(client, 100_000, true).unwrap();
        net.hosts[0].stack.send(server, 50_000, true).unwrap();
        assert!(net.run_until(LIMIT, |net| net.hosts[0].user(client).acked == 100_000
            && net.hosts[0].user(server).acked == 50_000));
        net.check(0, server, 100_000);
        net.check(0, client, 50_000);
        assert_eq!(net.hosts[0].stack.connection(client).unwrap().counters().retransmitted, 0);
        for end in [client, server] {
            net.hosts[0].stack.close(end);
        }
        assert!(net.run_until(LIMIT, |net| {
            [client, server].iter().all(|end| net.hosts[0].knows(*end, tcp::Event::Closed))
        }));
        for end in [client, server] {
            net.hosts[0].stack.release(end);
        }
        let counters = *net.hosts[0].stack.counters();
        assert!(counters.looped > 10, "{counters:?}");
        // On Ethernet stacks ask for routers, and tell them of groups; nothing else is to be seen.
        let (there, bare) =
            (net.hosts[1].stack.counters(), net.hosts[0].stack.neighbour_counters().is_none());
        assert_eq!(if bare { there.received } else { there.other }, 0);
        assert_eq!((counters.martians, counters.malformed, counters.checksum), (0, 0, 0));
        net.run(LIMIT);
        assert_eq!(net.hosts[0].stack.connections(), 0, "nothing is left");
    }
}

#[test]
fn both_may_open_and_nobody_may_be_both_ends() {
    let mut net = Net::new(V6, 1_500, stream(), 1);
    let config = net.config.clone();
    let connect = |net: &mut Net, from: u16, to: u16| {
        let (now, to) = (net.now, own(net, to));
        net.hosts[0].stack.connect(now, Some(from), to, &config)
    };
    assert_eq!(connect(&mut net, 7, 7), Err(ConnectError::BadAddress));
    let ends = [(7, 8), (8, 7)].map(|(from, to)| {
        let id = connect(&mut net, from, to).unwrap();
        net.hosts[0].adopt(id);
        id
    });
    net.run(100 * MS);
    for end in ends {
        let connection = net.hosts[0].stack.connection(end).unwrap();
        assert_eq!(connection.state(), State::Established, "RFC 9293 3.5: both have opened");
    }
}

#[test]
fn a_port_that_nobody_watches_refuses() {
    let mut net = Net::new(V4, 1_500, stream(), 1);
    let (now, to, config) = (net.now, own(&net, 80), net.config.clone());
    let client = net.hosts[0].stack.connect(now, None, to, &config).unwrap();
    net.hosts[0].adopt(client);
    net.run(MS);
    assert!(net.hosts[0].knows(client, tcp::Event::Failed(Failure::Refused)));
    let (socket, port) = net.hosts[0].stack.bind(0).unwrap();
    let to = own(&net, port ^ 1);
    net.send_datagram(0, socket, to, b"anybody?").unwrap();
    net.run(MS);
    assert_eq!(net.hosts[0].notices, [Event::Refused { socket, to }]);
    assert_eq!(net.carried, 0);
}

#[test]
fn datagrams_come_back() {
    for mut net in nets() {
        let [from, to] = [0; 2].map(|port| net.hosts[0].stack.bind(port).unwrap());
        let place = own(&net, to.1);
        net.send_datagram(0, from.0, place, b"to myself").unwrap();
        let (datagram, payload) = net.hosts[0].datagrams.pop().expect("it is here at once");
        assert_eq!((datagram.socket, datagram.from), (to.0, own(&net, from.1)));
        assert_eq!(payload, b"to myself");
        assert_eq!(net.carried, 0);
    }
}

#[test]
fn what_is_cut_anywhere_is_dropped() {
    let mut net = Net::ethernet(V6, stream(), 1);
    let frame = {
        let (socket, port) = net.hosts[0].stack.bind(0).unwrap();
        let mut frame = vec![0; 1_514];
        let (now, to) = (net.now, own(&net, port));
        let departure = net.hosts[0]
            .stack
            .compose_datagram(now, socket, to, Carriage::default(), 9, &mut frame)
            .unwrap();
        assert!(departure.loops);
        frame.truncate(departure.len());
        frame
    };
    for len in 0..frame.len() {
        let arrival = net.hosts[0].stack.handle_looped(net.now, &frame[..len]);
        assert_eq!(arrival, quipu_inet::stack::Arrival::Nothing, "{len}");
    }
    let whole = net.hosts[0].stack.handle_looped(net.now, &frame);
    assert!(matches!(whole, quipu_inet::stack::Arrival::Datagram(_)));
}
