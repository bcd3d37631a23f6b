//! Connections, from SYN to the last FIN, byte-exact.

use quipu_inet::stack::{self, Offload};
use quipu_inet::tcp::{Config, Event, MILLISECOND as MS, Mode, SECOND, Secret, State};

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
