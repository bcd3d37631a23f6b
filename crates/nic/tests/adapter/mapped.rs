//! Requests to a peer on this host of whose memory a part is mapped here.

use quipu_nic::*;

use crate::pair::{Pair, Way, connected, statuses};

/// Posts a request: at once, or through the queue.
fn post(pair: &mut Pair, qp: QpId, wr: &SendWr<'_>, at_once: bool) {
    let (now, adapter) = (pair.now, &mut pair.hosts[0].adapter);
    if at_once {
        assert!(adapter.post_at_once(now, qp, wr), "{:?}", wr.op);
    } else {
        adapter.post_send(qp, wr).unwrap();
        adapter.ring_doorbell(now, qp);
    }
}

fn request<'a>(wr_id: u64, op: SendOp, list: &'a [mem::Sge]) -> SendWr<'a> {
    let flags = SendFlags::SIGNALED;
    SendWr { wr_id, to: To::Peer, op, flags, payload: Payload::Sges(list) }
}

/// The peer does nothing: it is not even asked to.
#[test]
fn atomics_are_executed_by_whoever_posts_them() {
    for at_once in [true, false] {
        let (mut pair, qps) = connected(Way::LinkMapped);
        let (here, there) = (pair.buffer(0, 64), pair.buffer(1, 64));
        let (addr, rkey) = (there.addr() + 8, there.key());
        there.fill(8, &40u64.to_ne_bytes());
        let ops = [
            SendOp::FetchAdd { addr, rkey, add: 2 },
            SendOp::CompareSwap { addr, rkey, compare: 41, swap: 7 },
            SendOp::CompareSwap { addr, rkey, compare: 42, swap: u64::MAX },
            SendOp::FetchAdd { addr, rkey, add: 3 },
        ];
        for (i, op) in ops.into_iter().enumerate() {
            post(&mut pair, qps[0], &request(i as u64, op, &[here.sge(i * 8, 8)]), at_once);
        }
        let word = |i: usize| u64::from_ne_bytes(here.bytes(i * 8, 8).try_into().unwrap());
        assert_eq!([word(0), word(1), word(2), word(3)], [40, 42, 42, u64::MAX]);
        assert_eq!(there.bytes(8, 8), 2u64.to_ne_bytes());
        let done = pair.hosts[0].poll();
        assert_eq!(statuses(&done), [0, 1, 2, 3].map(|id| (id, WcStatus::Success)));
        let opcodes =
            [WcOpcode::FetchAdd, WcOpcode::CompSwap, WcOpcode::CompSwap, WcOpcode::FetchAdd];
        assert!(done.iter().map(|wc| (wc.opcode, wc.byte_len)).eq(opcodes.map(|op| (op, 8))));
        let requester = pair.hosts[0].adapter.queue_pairs().next().unwrap().counters.requester;
        assert_eq!((requester.atomics, requester.bytes), (4, 32));
    }
}

/// What is refused, the peer refuses; and what the answer has no place for is not executed.
#[test]
fn atomics_that_are_wrong_change_nothing() {
    // What the key and the address are off by, the place of the answer, and what comes of it.
    let cases = [
        (0x100, 0, 0, WcStatus::RemAccessErr),
        (0, 4, 0, WcStatus::RemInvReqErr),
        (0, 0, 60, WcStatus::LocProtErr),
    ];
    for (key, distance, place, status) in cases {
        let (mut pair, qps) = connected(Way::LinkMapped);
        let (here, there) = (pair.buffer(0, 64), pair.buffer(1, 64));
        let (addr, rkey) = (there.addr() + distance, there.key() ^ key);
        let op = SendOp::FetchAdd { addr, rkey, add: 1 };
        let list = [here.sge(place, 8)];
        let wr = request(1, op, &list);
        let now = pair.now;
        assert!(!pair.hosts[0].adapter.post_at_once(now, qps[0], &wr), "{op:?}");
        post(&mut pair, qps[0], &wr, false);
        pair.run();
        assert_eq!(pair.polled(0), [(1, status)], "{op:?}");
        assert_eq!(there.bytes(0, 16), [0; 16], "{op:?}");
    }
}

/// A fenced or later request finds what those before it have done; an atomic does not overtake a send.
#[test]
fn atomics_wait_for_what_the_peer_is_to_execute() {
    let (mut pair, qps) = connected(Way::LinkMapped);
    let (here, there) = (pair.buffer(0, 64), pair.buffer(1, 64));
    pair.recv(1, qps[1], 9, &[there.sge(0, 8)]);
    here.fill(0, &5u64.to_ne_bytes());
    let op = SendOp::FetchAdd { addr: there.addr(), rkey: there.key(), add: 1 };
    post(&mut pair, qps[0], &request(1, SendOp::Send, &[here.sge(0, 8)]), false);
    let (now, list) = (pair.now, [here.sge(8, 8)]);
    let wr = request(2, op, &list);
    assert!(!pair.hosts[0].adapter.post_at_once(now, qps[0], &wr));
    post(&mut pair, qps[0], &wr, false);
    pair.run();
    assert_eq!(pair.polled(0), [(1, WcStatus::Success), (2, WcStatus::Success)]);
    assert_eq!(
        (here.bytes(8, 8), there.bytes(0, 8)),
        (5u64.to_ne_bytes().into(), 6u64.to_ne_bytes().into())
    );
}
