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

/// Nothing is lost, and of each twenty packets one comes late, by a quarter of the round trip; hosts are
/// woken late too, so that acknowledgements come in bursts. KB/s, the least and the most of some runs; how
/// often anything was thought lost, and undone; what was sent again.
fn late(delay: u64, grain: u64) -> String {
    let (mut rates, mut recoveries, mut undone, mut again) = (Vec::new(), 0, 0, 0);
    for seed in [2, 5, 37, 47] {
        let mut pair = Pair::new(Config::default(), seed);
        (pair.delay, pair.grain) = (delay * MS / 2, grain * MS);
        pair.ends[1].room = Some(4_000_000);
        pair.connect();
        pair.faults = Faults { reorder: 50, late: delay * MS / 4, ..Faults::default() };
        let begun = pair.now;
        pair.send(0, LEN);
        assert!(pair.run_until(100 * SECOND, |pair| pair.ends[0].acked == LEN), "{delay} {grain}");
        pair.check(1, LEN);
        let counters = *pair.ends[0].connection().counters();
        rates.push(LEN * MS / (pair.now - begun));
        recoveries += counters.recoveries;
        undone += counters.undone;
        again += counters.retransmitted;
    }
    let (least, most) = (rates.iter().min().unwrap(), rates.iter().max().unwrap());
    assert!(least * 2 > *most, "a window has collapsed: {rates:?}");
    format!("{least:6} to {most:6}  {recoveries:10}  {undone:6}  {again:5}")
}

#[test]
fn reordering() {
    let mut table =
        String::from("rtt ms  woken each ms              KB/s  recoveries  undone  again");
    for (delay, grain) in [(20, 1), (20, 2), (20, 4), (10, 2)] {
        table += &format!("\n{delay:6}  {grain:13}  {}", late(delay, grain));
    }
    insta::assert_snapshot!(table);
}

/// Without SACK what is lost once more behind a timeout is found by duplicates that nothing else explains:
/// not by a timeout for each, which would send all that is on the way again.
#[test]
fn no_peer_without_sack_gets_most_of_it_twice() {
    for seed in [2, 6, 9, 10, 12] {
        let mut pair = Pair::new(Config { sack: false, ..Config::default() }, seed);
        (pair.rate, pair.delay, pair.queue) = (RATE, MS / 2, 50);
        pair.ends[1].room = Some(1_000_000);
        pair.connect();
        pair.faults = Faults { lose: 50, ..Faults::default() };
        let begun = pair.now;
        (0..LEN / 1_000).for_each(|_| pair.send(0, 1_000));
        assert!(pair.run_until(60 * SECOND, |pair| pair.ends[0].acked == LEN), "{seed}");
        pair.check(1, LEN);
        let rate = LEN * MS / (pair.now - begun);
        let counters = *pair.ends[0].connection().counters();
        let again = u64::from(counters.retransmitted) * 100 * 1_428 / LEN;
        assert!(rate > 1_100 && again < 30, "seed {seed}: {rate} KB/s, {again} %, {counters:?}");
    }
}

/// Nothing is lost, and a fifth of the packets comes late, by half a round trip or by many: KB/s, the least
/// and the most of some runs, and how many of a thousand segments were sent again at most.
fn very_late(way: u64, late: u64) -> (u64, u64, u64) {
    let (mut rates, mut again) = (Vec::new(), 0);
    for seed in [2, 5, 37, 47] {
        let mut pair = Pair::new(Config::default(), seed);
        // Room for what is late.
        (pair.rate, pair.delay, pair.queue) = (RATE, way, 400);
        pair.ends[1].room = Some(4_000_000);
        pair.connect();
        pair.faults = Faults { reorder: 200, late, jitter: MS / 10, ..Faults::default() };
        let begun = pair.now;
        pair.send(0, LEN);
        assert!(pair.run_until(100 * SECOND, |pair| pair.ends[0].acked == LEN), "{way} {late}");
        pair.check(1, LEN);
        let counters = *pair.ends[0].connection().counters();
        rates.push(LEN * MS / (pair.now - begun));
        again = again.max(u64::from(counters.retransmitted) * 1_000 * 1_428 / LEN);
    }
    (*rates.iter().min().unwrap(), *rates.iter().max().unwrap(), again)
}

/// Packets that are late by more than a round trip are not all sent again: the reordering window becomes as
/// wide as they are late. With SRTT as its bound a fifth of everything went twice, at a tenth of the rate.
#[test]
fn reordering_beyond_the_round_trip() {
    let mut table = String::from("way us  late us              KB/s  again/1000");
    for (way, late) in [(10_000, 10_000), (5_000, 10_000), (2_000, 10_000), (50, 10_000)] {
        let (least, most, again) = very_late(way * 1_000, late * 1_000);
        assert!(least > 4_000 && again < 80, "{way} {late}: {least} KB/s, {again} of 1000 again");
        table += &format!("\n{way:6}  {late:7}  {least:6} to {most:6}  {again:10}");
    }
    insta::assert_snapshot!(table);
}

/// Of a hundred packets `late` come 10 ms late; the round trip takes a tenth of a millisecond. The mean rate
/// of ten runs in KB/s, the least one, and how many of a thousand segments were sent again.
fn nearly_no_round_trip(late: u64, rate: u64) -> (u64, u64, u64) {
    const SEEDS: u64 = 10;
    const LEN: u64 = 5_000_000;
    let (mut took, mut least, mut again) = (0, u64::MAX, 0);
    for seed in 0..SEEDS {
        let mut pair = Pair::new(Config::default(), seed);
        (pair.rate, pair.delay, pair.queue) = (rate, MS / 20, 1_000);
        pair.ends[1].room = Some(4_000_000);
        pair.connect();
        pair.faults = Faults { reorder: late * 10, late: 10 * MS, ..Faults::default() };
        let begun = pair.now;
        pair.send(0, LEN);
        assert!(pair.run_until(100 * SECOND, |pair| pair.ends[0].acked == LEN), "{late} {rate}");
        pair.check(1, LEN);
        took += pair.now - begun;
        least = least.min(LEN * MS / (pair.now - begun));
        again += u64::from(pair.ends[0].connection().counters().retransmitted);
    }
    (SEEDS * LEN * MS / took, least, again * 1_000 * 1_428 / (SEEDS * LEN))
}

/// Late packets are soon not taken for lost any more, and the congestion window is restored. By steps of a
/// quarter of the least round trip, the reordering window would need hundreds of mistakes to reach 10 ms: the
/// rate was 3500 to 4800 KB/s, and 30 to 90 of a thousand segments were sent again.
#[test]
fn reordering_where_the_round_trip_is_nearly_nothing() {
    let mut table = String::from("late %  link KB/s  KB/s  least  again/1000");
    for late in [20, 50, 80] {
        for rate in [RATE, 10 * RATE] {
            let (mean, least, again) = nearly_no_round_trip(late, rate);
            assert!(
                mean > 5_000 && again < 35,
                "{late} {rate}: {mean} KB/s, {again} of 1000 again"
            );
            let link = rate / 1_000;
            table += &format!("\n{late:6}  {link:9}  {mean:4}  {least:5}  {again:10}");
        }
    }
    insta::assert_snapshot!(table);
}
