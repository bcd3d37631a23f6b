//! Paths that become narrower and wider under a connection, with routers that say so and without.

mod common;

use common::Pair;
use quipu_inet::tcp::{Config, Event, Failure, Mode, SECOND, State};

fn pair(config: Config, seed: u64) -> Pair {
    let config = Config { receive_mss: 1_440, path_mss: 1_440, ..config };
    let mut pair = Pair::new(config, seed);
    // What leaves at once does not arrive at once: a report of gaps names only a few.
    pair.rate = 125_000_000;
    pair.connect();
    pair
}

/// Sends `len` octets in messages of `size`, and waits until they are acknowledged.
fn transfer(pair: &mut Pair, len: u64, size: u64, limit: u64) {
    let before = pair.ends[0].acked;
    for _ in 0..len / size {
        pair.send(0, size);
    }
    let done = pair.run_until(limit, |pair| pair.ends[0].acked == before + len);
    assert!(done, "{} of {len}: {:?}", pair.ends[0].acked - before, counters(pair));
    pair.check(1, before + len);
}

fn counters(pair: &mut Pair) -> quipu_inet::tcp::Counters {
    *pair.ends[0].connection().counters()
}

/// Nothing happens for so many seconds.
fn rest(pair: &mut Pair, seconds: u64) {
    let end = pair.now + seconds * SECOND;
    pair.run_until(seconds * SECOND, |pair| pair.now >= end);
    pair.now = pair.now.max(end);
}

/// The largest segment that it would send.
fn mss(pair: &mut Pair) -> u32 {
    pair.ends[0].connection().mss()
}

const MODES: [Mode; 2] = [Mode::Stream, Mode::Message];

#[test]
fn a_narrower_path_with_reports_costs_a_round_trip() {
    for mode in MODES {
        let mut pair = pair(Config { mode, ..Config::default() }, 1);
        transfer(&mut pair, 1_000_000, 10_000, 20 * SECOND);
        let before = counters(&mut pair);
        (pair.mtu, pair.reports) = (1_240, true);
        transfer(&mut pair, 1_000_000, 10_000, 20 * SECOND);
        let after = counters(&mut pair);
        assert_eq!((after.narrowed, after.timeouts), (1, before.timeouts), "{after:?}");
        assert_eq!(after.recoveries, before.recoveries, "no sign of congestion (RFC 8201 5.4)");
        assert_eq!(mss(&mut pair), 1_240 - 12);
    }
}

/// The window of a peer that takes no more is rounded to units of its scale, so that its edge comes to lie
/// within a segment that was sent before.
#[test]
fn a_black_hole_is_found_out_though_the_window_was_rounded() {
    let config = Config { receive_mss: 30_000, path_mss: 30_000, ..Config::default() };
    let mut pair = Pair::new(config, 7);
    pair.ends[1].room = None;
    pair.connect();
    pair.ends[1].connection().set_receive_space(22_546);
    pair.send(0, 24);
    pair.run_until(SECOND, |pair| pair.ends[0].acked == 24);
    pair.send(0, 10);
    pair.flush(0);
    // The acknowledgement of those ten moves the edge back.
    pair.mtu = 1_300;
    pair.send(0, 22_490);
    assert!(pair.run_until(60 * SECOND, |pair| pair.ends[0].acked == 22_524), "it is stuck");
    assert_eq!(counters(&mut pair).narrowed, 1);
    pair.check(1, 22_524);
}

#[test]
fn a_narrower_path_without_reports_is_found_out() {
    for mode in MODES {
        let mut pair = pair(Config { mode, ..Config::default() }, 2);
        transfer(&mut pair, 1_000_000, 10_000, 20 * SECOND);
        pair.mtu = 1_300;
        for _ in 0..20 {
            transfer(&mut pair, 200_000, 10_000, 60 * SECOND);
        }
        let after = counters(&mut pair);
        assert_eq!(after.narrowed, 1, "{after:?}");
        assert_eq!(pair.ends[0].connection().state(), State::Established);
        // It has found what the path takes, to within sixteen octets.
        let found = mss(&mut pair);
        assert!((1_300 - 12 - 16..=1_300 - 12).contains(&found), "{found} {after:?}");
        assert!(after.path_probes < 40, "{after:?}");
    }
}

#[test]
fn retransmissions_are_not_joined_with_what_comes_behind() {
    // What was too long is lost without a recovery: it is not followed by new data.
    for reports in [true, false] {
        let mut pair = pair(Config::default(), 8);
        pair.join = 60_000;
        transfer(&mut pair, 1_000_000, 50_000, 20 * SECOND);
        (pair.mtu, pair.reports) = (1_240, reports);
        transfer(&mut pair, 4_000_000, 4_000_000, 60 * SECOND);
        for _ in 0..20 {
            transfer(&mut pair, 500_000, 50_000, 60 * SECOND);
        }
        assert_eq!(counters(&mut pair).narrowed, 1);
    }
}

#[test]
fn messages_shorter_than_the_largest_segment_escape_a_black_hole_too() {
    let mut pair = pair(Config { mode: Mode::Message, ..Config::default() }, 3);
    transfer(&mut pair, 130_000, 1_300, 20 * SECOND);
    pair.mtu = 700;
    transfer(&mut pair, 130_000, 1_300, 60 * SECOND);
    assert_eq!(counters(&mut pair).narrowed, 1);
}

#[test]
fn a_wider_path_is_found_after_ten_minutes_and_not_before() {
    let mut pair = pair(Config::default(), 4);
    (pair.mtu, pair.reports) = (1_240, true);
    transfer(&mut pair, 200_000, 10_000, 20 * SECOND);
    pair.mtu = usize::MAX;
    rest(&mut pair, 500);
    transfer(&mut pair, 200_000, 10_000, 20 * SECOND);
    assert_eq!(counters(&mut pair).path_probes, 0);
    rest(&mut pair, 200);
    transfer(&mut pair, 200_000, 10_000, 20 * SECOND);
    assert_eq!(counters(&mut pair).path_probes, 1);
    assert_eq!(mss(&mut pair), 1_440 - 12);
}

#[test]
fn a_path_that_stays_narrow_is_asked_seldom_and_costs_no_window() {
    for reports in [false, true] {
        let mut pair = pair(Config::default(), 5);
        (pair.mtu, pair.reports) = (1_240, true);
        transfer(&mut pair, 500_000, 10_000, 20 * SECOND);
        pair.reports = reports;
        rest(&mut pair, 700);
        let before = counters(&mut pair);
        transfer(&mut pair, 2_000_000, 10_000, 60 * SECOND);
        let after = counters(&mut pair);
        // The whole search: each size up to three times, or once if a router answers.
        let most = if reports { 6 } else { 3 * 6 };
        assert!((1..=most).contains(&after.path_probes), "{after:?}");
        assert_eq!((after.recoveries, after.timeouts), (before.recoveries, before.timeouts));
        assert_eq!(mss(&mut pair), 1_240 - 12);
    }
}

#[test]
fn an_outage_is_no_black_hole_for_long() {
    let mut pair = pair(Config::default(), 6);
    transfer(&mut pair, 500_000, 10_000, 20 * SECOND);
    // Nothing at all gets through, so that even this is suspected.
    pair.mtu = 0;
    pair.send(0, 500_000);
    let back = pair.now + 4 * SECOND;
    pair.run_until(5 * SECOND, |pair| pair.now >= back);
    pair.mtu = usize::MAX;
    let done = pair.run_until(60 * SECOND, |pair| pair.ends[0].acked == 1_000_000);
    assert!(done && mss(&mut pair) < 1_000);
    transfer(&mut pair, 100_000, 10_000, 20 * SECOND);
    assert_eq!(mss(&mut pair), 1_440 - 12, "the first probe shows that nothing has changed");
}

#[test]
fn a_link_that_takes_nothing_for_a_while_does_not_end_the_search() {
    let mut pair = pair(Config::default(), 9);
    transfer(&mut pair, 500_000, 10_000, 20 * SECOND);
    // Nothing gets through, and then nothing is even asked for, so that what is too long is not cut.
    pair.mtu = 0;
    pair.send(0, 100_000);
    pair.flush(0);
    for _ in 0..50 {
        pair.now += SECOND / 10;
        let now = pair.now;
        pair.ends[0].connection().handle_timeout(now);
    }
    assert_eq!(counters(&mut pair).narrowed, 1);
    pair.mtu = usize::MAX;
    assert!(pair.run_until(60 * SECOND, |pair| pair.ends[0].acked == 600_000));
    transfer(&mut pair, 100_000, 10_000, 20 * SECOND);
    assert_eq!(mss(&mut pair), 1_440 - 12);
}

#[test]
fn a_probe_and_what_is_around_it_may_be_lost() {
    for seed in 0..20 {
        let mut pair = pair(Config { mode: MODES[seed as usize % 2], ..Config::default() }, seed);
        pair.faults.lose = 30;
        pair.faults.reorder = 30;
        pair.faults.jitter = 4_000_000;
        transfer(&mut pair, 300_000, 10_000, 300 * SECOND);
        (pair.mtu, pair.reports) = (1_100 + seed as usize, seed % 3 > 0);
        transfer(&mut pair, 1_000_000, 10_000, 600 * SECOND);
        pair.mtu = usize::MAX;
        rest(&mut pair, 700);
        transfer(&mut pair, 1_000_000, 10_000, 600 * SECOND);
        assert_eq!(pair.ends[0].connection().state(), State::Established);
    }
}

#[test]
fn without_sack_as_well() {
    let mut pair = pair(Config { sack: false, timestamps: false, ..Config::default() }, 7);
    transfer(&mut pair, 500_000, 10_000, 20 * SECOND);
    pair.mtu = 1_200;
    for _ in 0..20 {
        transfer(&mut pair, 200_000, 10_000, 60 * SECOND);
    }
    let found = mss(&mut pair);
    assert!((1_200 - 16..=1_200).contains(&found), "{found}");
    let refused = Event::Failed(Failure::Refused);
    assert!(!pair.ends[0].events.contains(&refused));
}
