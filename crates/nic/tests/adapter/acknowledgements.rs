//! When a peer hears that its small sends are executed: by the answer, if the program gives one at once, and
//! else when acknowledgements are released. Over a stream the header of a Send has a place for that
//! (`specs/quipu-wire.md` 5).

use crate::pair::{Buffer, Pair, Way, connected, statuses};
use quipu_iwarp::wire::mpa::fpdu_len;
use quipu_iwarp::wire::rdmap::UntaggedOp;
use quipu_nic::*;

const STREAM: Way = Way::Stream(usize::MAX);

/// Two connected sides that have met, each with eight receives.
fn acquainted() -> (Pair, [QpId; 2], Buffer) {
    let (mut pair, qps) = connected(Way::Link);
    let buffers = [pair.buffer(0, 64), pair.buffer(1, 64)];
    for host in 0..2 {
        pair.recv(host, qps[host], 0, &[buffers[host].sge(0, 64)]);
    }
    for host in 0..2 {
        pair.send(host, qps[host], 0, SendOp::Send, &[buffers[host].sge(0, 8)]);
        pair.run();
    }
    for host in 0..2 {
        assert_eq!(pair.polled(host).len(), 2);
        for wr_id in 10..18 {
            pair.recv(host, qps[host], wr_id, &[buffers[host].sge(0, 64)]);
        }
    }
    let [buffer, _] = buffers;
    (pair, qps, buffer)
}

/// Has `host` take what was sent, without releasing acknowledgements; the identifiers of what completes.
fn look(pair: &mut Pair, host: usize) -> Vec<u64> {
    let now = pair.now;
    pair.hosts[host].adapter.progress(now);
    let done = pair.hosts[host].poll();
    assert!(done.iter().all(|wc| wc.status == WcStatus::Success));
    done.iter().map(|wc| wc.wr_id).collect()
}

/// The same, but host 0 has used all its receives.
fn without_receives() -> (Pair, [QpId; 2], Buffer) {
    let (mut pair, qps, buffer) = acquainted();
    for wr_id in 10..18 {
        pair.send(1, qps[1], 2, SendOp::Send, &[]);
        pair.run();
        assert_eq!(look(&mut pair, 0), [wr_id]);
    }
    assert_eq!(look(&mut pair, 1), [2; 8]);
    (pair, qps, buffer)
}

#[test]
fn the_answer_acknowledges() {
    let (mut pair, qps, buffer) = acquainted();
    pair.send(0, qps[0], 1, SendOp::Send, &[buffer.sge(0, 8)]);
    assert_eq!(look(&mut pair, 1), [10]);
    assert_eq!(look(&mut pair, 0), [], "nobody is told of a single send at once");
    pair.send(1, qps[1], 2, SendOp::Send, &[]);
    assert_eq!(look(&mut pair, 0), [1, 10]);
}

#[test]
fn a_look_ends_behind_an_answer_that_was_waited_for() {
    let (mut pair, qps, buffer) = acquainted();
    pair.send(0, qps[0], 1, SendOp::Send, &[buffer.sge(0, 8)]);
    assert_eq!(look(&mut pair, 1), [10]);
    for wr_id in [2, 3, 4] {
        pair.send(1, qps[1], wr_id, SendOp::Send, &[]);
    }
    assert_eq!(look(&mut pair, 0), [1, 10]);
    assert_eq!(look(&mut pair, 0), [11, 12], "the next one finds what stands behind it");
}

#[test]
fn an_answer_that_has_to_wait_for_a_receive_acknowledges_at_once() {
    let (mut pair, qps, buffer) = without_receives();
    pair.send(0, qps[0], 1, SendOp::Send, &[buffer.sge(0, 8)]);
    assert_eq!(look(&mut pair, 1), [10]);
    pair.send(1, qps[1], 3, SendOp::Send, &[]);
    pair.hosts[1].adapter.release_acks();
    // The program posts a receive only when its send is done.
    assert_eq!(look(&mut pair, 0), [1]);
    pair.recv(0, qps[0], 18, &[]);
    pair.run();
    assert_eq!(pair.polled(0), [(18, WcStatus::Success)]);
    assert_eq!(pair.polled(1), [(3, WcStatus::Success)]);
}

/// Only the oldest request is looked at, and it is from before.
#[test]
fn an_answer_behind_a_request_that_waits_for_a_receive_is_no_acknowledgement() {
    let (mut pair, qps, buffer) = without_receives();
    pair.send(1, qps[1], 3, SendOp::Send, &[]);
    pair.send(0, qps[0], 1, SendOp::Send, &[buffer.sge(0, 8)]);
    assert_eq!(look(&mut pair, 1), [10]);
    pair.send(1, qps[1], 4, SendOp::Send, &[]);
    pair.hosts[1].adapter.release_acks();
    assert_eq!(look(&mut pair, 0), [1]);
    for wr_id in [18, 19] {
        pair.recv(0, qps[0], wr_id, &[]);
    }
    pair.run();
    assert_eq!(pair.polled(0), [18, 19].map(|wr_id| (wr_id, WcStatus::Success)));
    assert_eq!(pair.polled(1), [3, 4].map(|wr_id| (wr_id, WcStatus::Success)));
}

#[test]
fn behind_a_send_that_an_answer_acknowledged_a_write_needs_nobody() {
    let (mut pair, qps, buffer) = acquainted();
    let there = pair.buffer(1, 64);
    pair.send(0, qps[0], 1, SendOp::Send, &[buffer.sge(0, 8)]);
    assert_eq!(look(&mut pair, 1), [10]);
    pair.send(1, qps[1], 2, SendOp::Send, &[]);
    assert_eq!(look(&mut pair, 0), [1, 10]);
    buffer.fill(0, b"directly");
    let op = SendOp::Write { addr: there.addr(), rkey: there.key() };
    pair.send(0, qps[0], 3, op, &[buffer.sge(0, 8)]);
    assert_eq!(there.bytes(0, 8), b"directly");
    assert_eq!(look(&mut pair, 0), [3]);
}

#[test]
fn without_an_answer_the_release_does() {
    let (mut pair, qps, buffer) = acquainted();
    pair.send(0, qps[0], 1, SendOp::Send, &[buffer.sge(0, 8)]);
    assert_eq!(look(&mut pair, 1), [10]);
    assert!(pair.hosts[1].adapter.owes_acks());
    pair.hosts[1].adapter.release_acks();
    assert!(!pair.hosts[1].adapter.owes_acks());
    assert_eq!(look(&mut pair, 0), [1]);
}

#[test]
fn several_are_acknowledged_at_once() {
    let (mut pair, qps, buffer) = acquainted();
    for wr_id in [1, 2] {
        pair.send(0, qps[0], wr_id, SendOp::Send, &[buffer.sge(0, 8)]);
    }
    assert_eq!(look(&mut pair, 1), [10, 11]);
    assert_eq!(look(&mut pair, 0), [1, 2]);
    // One after the other they are several, too.
    for (wr_id, told) in [(3, &[][..]), (4, &[3, 4][..])] {
        pair.send(0, qps[0], wr_id, SendOp::Send, &[buffer.sge(0, 8)]);
        assert_eq!(look(&mut pair, 1), [9 + wr_id]);
        assert_eq!(look(&mut pair, 0), told);
    }
}

#[test]
fn a_write_does_not_overtake_a_send_that_is_not_acknowledged() {
    let (mut pair, qps, buffer) = acquainted();
    let there = pair.buffer(1, 64);
    pair.send(0, qps[0], 1, SendOp::Send, &[buffer.sge(0, 8)]);
    assert_eq!(look(&mut pair, 1), [10]);
    buffer.fill(0, b"behind the send");
    let op = SendOp::Write { addr: there.addr(), rkey: there.key() };
    pair.send(0, qps[0], 2, op, &[buffer.sge(0, 15)]);
    assert_eq!(look(&mut pair, 0), []);
    assert_eq!(there.bytes(0, 15), [0; 15]);
    pair.run();
    assert_eq!(statuses(&pair.hosts[0].poll()).len(), 2);
    assert_eq!(there.bytes(0, 15), b"behind the send");
}

#[test]
fn a_queue_pair_that_ends_leaves_no_executed_send_in_doubt() {
    let (mut pair, qps, buffer) = acquainted();
    pair.send(0, qps[0], 1, SendOp::Send, &[buffer.sge(0, 8)]);
    assert_eq!(look(&mut pair, 1), [10]);
    let now = pair.now;
    pair.hosts[1].adapter.destroy_qp(now, qps[1]).unwrap();
    pair.run();
    assert_eq!(pair.polled(0), [(1, WcStatus::Success)]);
}

/// Runs until something completes at `host`, without time for what else was to be said.
fn until_completion(pair: &mut Pair, host: usize) -> Vec<(u64, WcStatus)> {
    for _ in 0..100 {
        let done = pair.polled(host);
        if !done.is_empty() {
            return done;
        }
        pair.step();
    }
    panic!("nothing completes")
}

/// Operation and ULP field of every untagged FPDU.
fn messages(mut bytes: &[u8]) -> Vec<(UntaggedOp, u32)> {
    use UntaggedOp::{Control, Send, SendImm, SendSe};
    let mut all = Vec::new();
    while let [high, low, _, octet, a, b, c, d, ..] = *bytes {
        let op = [Control, Send, SendImm, SendSe].into_iter().find(|op| op.octet() == octet);
        all.push((op.expect("one of these"), u32::from_be_bytes([a, b, c, d])));
        bytes = &bytes[fpdu_len(usize::from(u16::from_be_bytes([high, low])))..];
    }
    all
}

/// Two sides connected by a stream, each with as many receives, and how much each has said.
fn over_a_stream(receives: [u64; 2]) -> (Pair, [QpId; 2], [usize; 2]) {
    let (mut pair, qps) = connected(STREAM);
    for host in 0..2 {
        for wr_id in 10..10 + receives[host] {
            pair.recv(host, qps[host], wr_id, &[]);
        }
    }
    pair.run();
    let said = [0, 1].map(|host| pair.said(host).len());
    (pair, qps, said)
}

#[test]
fn over_a_stream_the_answer_carries_the_acknowledgement() {
    use UntaggedOp::{Control, Send, SendImm, SendSe};
    let (mut pair, qps, [_, before]) = over_a_stream([3, 3]);
    let asked = |pair: &mut Pair, wr_id| {
        pair.send(0, qps[0], wr_id, SendOp::Send, &[]);
        // The answer before it is acknowledged meanwhile.
        let received = (9 + wr_id, WcStatus::Success);
        while !until_completion(pair, 1).contains(&received) {}
    };
    asked(&mut pair, 1);
    pair.send(1, qps[1], 5, SendOp::Send, &[]);
    assert_eq!(until_completion(&mut pair, 0), [1, 10].map(|wr_id| (wr_id, WcStatus::Success)));
    asked(&mut pair, 2);
    pair.send_with(1, qps[1], 6, SendOp::Send, SendFlags::SOLICITED, Payload::Sges(&[]));
    assert_eq!(until_completion(&mut pair, 0), [2, 11].map(|wr_id| (wr_id, WcStatus::Success)));
    // One that has no place for it goes behind it.
    asked(&mut pair, 3);
    pair.send(1, qps[1], 7, SendOp::SendImm(9), &[]);
    assert_eq!(until_completion(&mut pair, 0), [3, 12].map(|wr_id| (wr_id, WcStatus::Success)));
    pair.run();
    let said = messages(&pair.said(1)[before..]);
    assert_eq!(said, [(Send, 1), (SendSe, 2), (Control, 0), (SendImm, 9)]);
}

#[test]
fn an_answer_without_a_receive_acknowledges_all_the_same() {
    let (mut pair, qps, [_, before]) = over_a_stream([0, 2]);
    pair.send(0, qps[0], 1, SendOp::Send, &[]);
    assert_eq!(until_completion(&mut pair, 1), [(10, WcStatus::Success)]);
    // Its answer is refused; that to the next one is dropped, since the refusal has not arrived.
    pair.send(1, qps[1], 3, SendOp::Send, &[]);
    pair.send(0, qps[0], 2, SendOp::Send, &[]);
    assert_eq!(until_completion(&mut pair, 1), [(11, WcStatus::Success)]);
    pair.send(1, qps[1], 4, SendOp::Send, &[]);
    pair.run();
    use UntaggedOp::Send;
    assert_eq!(messages(&pair.said(1)[before..]), [(Send, 1), (Send, 2)]);
    assert_eq!(pair.polled(0), [1, 2].map(|wr_id| (wr_id, WcStatus::Success)));
    for wr_id in [18, 19] {
        pair.recv(0, qps[0], wr_id, &[]);
    }
    pair.run_until(pair.now.after(1_000_000_000));
    assert_eq!(pair.polled(0), [18, 19].map(|wr_id| (wr_id, WcStatus::Success)));
    assert_eq!(pair.polled(1), [3, 4].map(|wr_id| (wr_id, WcStatus::Success)));
}

/// What has begun and does not fit any more has not acknowledged anything, and may never be sent.
#[test]
fn without_room_for_the_answer_the_acknowledgement_goes_alone() {
    let (mut pair, qps, _) = over_a_stream([0, 1]);
    let buffer = pair.buffer(1, 4096);
    pair.send(0, qps[0], 1, SendOp::Send, &[]);
    assert_eq!(until_completion(&mut pair, 1), [(10, WcStatus::Success)]);
    let (payload, flags) = ([buffer.sge(0, 4096)], SendFlags::SIGNALED);
    let (op, payload) = (SendOp::Send, Payload::Sges(&payload));
    let wr = SendWr { wr_id: 2, to: To::Peer, op, flags, payload };
    let ([_, conn], now) = (pair.stream_ends(), pair.now);
    let adapter = &mut pair.hosts[1].adapter;
    adapter.post_send(qps[1], &wr).unwrap();
    adapter.ring_doorbell(now, qps[1]);
    let mut out = [0; 200];
    let said = adapter.transmit(now, conn, &mut out);
    assert_eq!(messages(&out[..said]), [(UntaggedOp::Control, 0)]);
}

#[test]
fn an_acknowledgement_of_what_was_not_asked_ends_the_connection() {
    let (mut pair, qps, _) = over_a_stream([1, 0]);
    pair.send(0, qps[0], 1, SendOp::Send, &[]);
    let mut sender = quipu_iwarp::Sender::new(&quipu_iwarp::Negotiated::plain(), 1000);
    let mut out = [0; 100];
    let mut msg = sender.begin_untagged(UntaggedOp::Send, 2);
    let staged = sender.segment(&mut msg, &mut out, 0, |_| {}).unwrap();
    pair.inject(0, &out[..staged.bytes]);
    pair.run();
    assert_eq!(pair.state(0, qps[0]), QpState::Err);
    assert_eq!(
        pair.polled(0),
        [(1, WcStatus::BadRespErr), (10, WcStatus::WrFlushErr)],
        "the receive is not taken"
    );
}
