//! Links: how their channels come to be, are refused, and are waited for.

use crate::pair::{Pair, Way};
use WcStatus::Success;
use quipu_nic::*;

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
