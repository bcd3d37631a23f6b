//! Goodput over loss, delay and room: a table, so that a change of it is seen. The link carries 100 Mbit/s
//! and queues one product of bandwidth and delay.

mod common;

use common::{Faults, Pair};
use quipu_inet::tcp::{Config, MILLISECOND as MS, Mode, SECOND};

/// Octets per second of the link: 100 Mbit/s.
const RATE: u64 = 12_500_000;
const LEN: u64 = 10_000_000;

/// What a transfer gets of the link's 12500 KB/s, in KB/s, and what was sent again, in percent.
fn share(config: Config, lose: u64, delay: u64, room: u64) -> (u64, u64) {
    let mut pair = Pair::new(config, 1 + lose + delay);
    (pair.rate, pair.delay) = (RATE, delay * MS / 2);
    // Room for one product of bandwidth and delay, and fifty packets at least.
    pair.queue = (RATE * delay / 1_000 / 1_500).max(50);
    pair.ends[1].room = Some(room);
    pair.connect();
    pair.faults = Faults { lose, ..Faults::default() };
    let message = 1_000;
    let begun = pair.now;
    for _ in 0..LEN / message {
        pair.send(0, message);
    }
    assert!(pair.run_until(4_000 * SECOND, |pair| pair.ends[0].acked == LEN), "{lose} {delay}");
    let took = pair.now - begun;
    pair.check(1, LEN);
    let counters = *pair.ends[0].connection().counters();
    let rate = LEN * MS / took;
    println!("{rate} {counters:?}");
    (rate, u64::from(counters.retransmitted) * 100 * 1_428 / LEN)
}

fn table(config: Config) -> String {
    let mut table = String::from("lost/1000  rtt ms  room KB      KB/s  again %");
    for lose in [0, 1, 10, 50] {
        for (delay, room) in [(1, 1_000), (10, 1_000), (100, 4_000), (100, 200)] {
            let (goodput, again) = share(config, lose, delay, room * 1_000);
            table += &format!("\n{lose:9}  {delay:6}  {room:7}  {goodput:9}  {again:7}");
        }
    }
    table
}

#[test]
fn streams() {
    insta::assert_snapshot!(table(Config::default()));
}

#[test]
fn messages() {
    let config =
        Config { mode: Mode::Message, max_messages: 20_000, ack_delay: 0, ..Config::default() };
    insta::assert_snapshot!(table(Config { max_reassembly: 4 << 20, ..config }));
}

#[test]
fn peers_without_sack() {
    insta::assert_snapshot!(table(Config { sack: false, ..Config::default() }));
}
