//! Links: how their channels come to be, are refused, and are waited for.

use crate::pair::{Pair, Way};
use WcStatus::Success;
use quipu_nic::*;

const SECOND: u64 = 1_000_000_000;

/// The queue pairs of both hosts exchange a message.
fn exchange(pair: &mut Pair, qps: [QpId; 2]) {
    pair.recv(1, qps[1], 8, &[]);
    pair.send(0, qps[0], 9, SendOp::Send, &[]);
    pair.run();
    assert_eq!((pair.polled(0), pair.polled(1)), (vec![(9, Success)], vec![(8, Success)]));
}

/// The segments of these links have room for twelve channels.
#[test]
fn who_finds_no_room_in_a_link_is_connected_by_a_stream() {
    let mut pair = Pair::new(Way::LinkCopying);
    let mut made = Vec::new();
    for _ in 0..14 {
        let qps = [pair.hosts[0].qp(), pair.hosts[1].qp()];
        pair.connect(qps);
        made.push(qps);
        exchange(&mut pair, qps);
    }
    assert_eq!(pair.streams(), 2);
    for qps in made {
        exchange(&mut pair, qps);
    }
}

/// A process that was stopped, as by a debugger, finds requests that its peer has given up meanwhile.
#[test]
fn a_request_that_is_granted_too_late_is_made_again() {
    for way in [Way::Link, Way::LinkCopying] {
        for busy in [false, true] {
            let mut pair = Pair::new(way);
            let qps = [pair.hosts[0].qp(), pair.hosts[1].qp()];
            pair.stopped = Some(1);
            for host in 0..2 {
                pair.to_rtr(host, qps, &|_| {});
                pair.to_rts(host, qps[host], &|attr| attr.timeout = 0);
            }
            pair.later(11 * SECOND);
            if busy {
                pair.recv(0, qps[0], 3, &[]);
                pair.send(1, qps[1], 4, SendOp::Send, &[]);
            }
            pair.stopped = None;
            pair.later(SECOND);
            let told = if busy { vec![(3, Success)] } else { vec![] };
            let sent = if busy { vec![(4, Success)] } else { vec![] };
            assert_eq!((pair.polled(0), pair.polled(1)), (told, sent), "{way:?}");
            exchange(&mut pair, qps);
        }
    }
}
