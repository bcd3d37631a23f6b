//! What is posted while other requests are in flight waits for more of its kind: one send carries them all.

use crate::pair::{Way, connected};
use quipu_nic::*;

const SIZE: usize = 64 * 1024;

#[test]
fn large_messages_behind_others_are_sent_three_at_a_time() {
    let (mut pair, [qp, _]) = connected(Way::Stream(usize::MAX));
    let from = pair.buffer(0, SIZE);
    let [conn, _] = pair.stream_ends();
    let mut wire = vec![0; 4 * SIZE];
    let mut post = |wr_id| {
        pair.send(0, qp, wr_id, SendOp::Send, &[from.sge(0, SIZE)]);
        let adapter = &mut pair.hosts[0].adapter;
        if !adapter.is_urgent(conn) {
            return 0;
        }
        let sends = std::iter::from_fn(|| Some(adapter.transmit(pair.now, conn, &mut wire)));
        sends.take_while(|&bytes| bytes > 0).sum::<usize>() / SIZE
    };
    // Nobody answers, so that the first stays in flight.
    assert_eq!([1, 2, 3, 4, 5].map(&mut post), [1, 0, 0, 3, 0]);
}

#[test]
fn small_messages_behind_others_are_sent_by_their_number() {
    let (mut pair, [qp, _]) = connected(Way::Stream(usize::MAX));
    let from = pair.buffer(0, 8);
    let [conn, _] = pair.stream_ends();
    let mut wire = vec![0; SIZE];
    let mut posts_until_urgent = || {
        for posts in 1.. {
            pair.send(0, qp, posts, SendOp::Send, &[from.sge(0, 8)]);
            let adapter = &mut pair.hosts[0].adapter;
            if adapter.is_urgent(conn) {
                while adapter.transmit(pair.now, conn, &mut wire) > 0 {}
                return posts;
            }
        }
        unreachable!()
    };
    assert_eq!([(); 2].map(|()| posts_until_urgent()), [1, 32]);
}
