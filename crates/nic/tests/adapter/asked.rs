//! Bytes that requests refer to and that the kernel does not let be fetched (any more): the peer hands them
//! over.

use std::sync::atomic::Ordering;

use crate::hostile::LinkPeer;
use crate::pair::{ALL_ACCESS, Buffer, Pair, Way, connected, connected_with};
use WcStatus::{LocProtErr, RemAccessErr, RemInvReqErr, RetryExcErr, Success, WrFlushErr};
use quipu_nic::mem::ring::{Channel, SlotHeader};
use quipu_nic::mem::{Access, Segment};
use quipu_nic::*;

const LEN: usize = 300_000;

fn pattern(seed: usize) -> Vec<u8> {
    (0..LEN).map(|at| ((at + seed) % 251) as u8).collect()
}

/// As behind `setuid`: what the link was promised does not hold.
fn forbid(pair: &Pair) {
    pair.memory.0.lock().unwrap().clear();
}

#[test]
fn what_cannot_be_fetched_is_handed_over() {
    for way in [Way::Link, Way::LinkMapped] {
        let (mut pair, qps) = connected(way);
        let (here, there) = (pair.buffer(0, 2 * LEN), pair.buffer(1, 2 * LEN));
        forbid(&pair);
        for round in 0..2 {
            // Of several pieces, in several slots.
            let (sent, written) = (pattern(round), pattern(round + 7));
            here.fill(0, &sent);
            here.fill(LEN, &written);
            let pieces: Vec<_> = (0..10).map(|at| here.sge(at * LEN / 10, LEN / 10)).collect();
            pair.recv(1, qps[1], 1, &[there.sge(0, 1000), there.sge(1000, LEN - 1000)]);
            pair.recv(1, qps[1], 2, &[]);
            pair.send(0, qps[0], 3, SendOp::Send, &pieces);
            let (addr, rkey) = (there.addr() + LEN as u64, there.key());
            let write = SendOp::WriteImm { addr, rkey, imm: 5 };
            pair.send(0, qps[0], 4, write, &[here.sge(LEN, LEN)]);
            pair.run();
            assert_eq!(pair.polled(1), [(1, Success), (2, Success)]);
            assert_eq!(pair.polled(0), [(3, Success), (4, Success)]);
            assert!(there.bytes(0, LEN) == sent && there.bytes(LEN, LEN) == written);

            // Both ways without the peer's program.
            let (addr, rkey) = (there.addr(), there.key());
            pair.send(0, qps[0], 5, SendOp::Write { addr, rkey }, &[here.sge(LEN, LEN)]);
            pair.run();
            pair.send(0, qps[0], 6, SendOp::Read { addr, rkey }, &[here.sge(0, LEN)]);
            pair.run();
            assert_eq!(pair.polled(0), [(5, Success), (6, Success)]);
            assert!(there.bytes(0, LEN) == written && here.bytes(0, LEN) == written);
        }
    }
}

/// Host 0 has sent what host 1 has to ask for, and is stopped before it is asked; with the buffers of both.
fn asked_of_a_stopped_peer() -> (Pair, [QpId; 2], [Buffer; 2]) {
    let (mut pair, qps) = connected_with(Way::Link, |attr| attr.timeout = 8);
    let (here, there) = (pair.buffer(0, LEN), pair.buffer(1, LEN));
    forbid(&pair);
    pair.recv(1, qps[1], 1, &[there.sge(0, LEN)]);
    pair.stopped = Some(0);
    pair.send(0, qps[0], 2, SendOp::Send, &[here.sge(0, LEN)]);
    pair.later(1_000_000);
    (pair, qps, [here, there])
}

/// It waits meanwhile, and so does what follows.
#[test]
fn a_queue_pair_whose_peer_leaves_in_the_middle_ends() {
    let (mut pair, qps, _) = asked_of_a_stopped_peer();
    pair.hosts[0].adapter.destroy_qp(pair.now, qps[0]).unwrap();
    pair.stopped = None;
    pair.later(1_000_000_000);
    pair.send(1, qps[1], 3, SendOp::Send, &[]);
    pair.later(10_000_000_000);
    assert_eq!(pair.polled(1), [(3, RetryExcErr), (1, WrFlushErr)]);
}

/// The memory of a request that is under way is not the peer's any more: there the request has failed, and
/// what it is asked for does not come.
#[test]
fn what_the_peer_has_taken_back_does_not_come() {
    let (mut pair, qps, [here, there]) = asked_of_a_stopped_peer();
    pair.hosts[0].adapter.dereg_mr(pair.now, here.region.id).unwrap();
    pair.stopped = None;
    pair.later(1_000_000_000);
    assert_eq!(pair.polled(0), [(2, LocProtErr)]);
    assert_eq!(pair.polled(1), []);
    assert!(there.bytes(0, LEN) == [0; LEN]);
    pair.send(1, qps[1], 3, SendOp::Send, &[]);
    pair.later(10_000_000_000);
    assert_eq!(pair.polled(1), [(3, RetryExcErr), (1, WrFlushErr)]);
}

/// Two queue pairs of host 0, each with a peer at host 1 that takes its receives from the shared queue.
fn with_shared_receives(pair: &mut Pair) -> (SrqId, [[QpId; 2]; 2]) {
    let pd = pair.hosts[1].pd;
    let srq = pair.hosts[1].adapter.create_srq(pd, 8, 1, 0).unwrap();
    let qps = [0, 1].map(|_| {
        let qps = [pair.hosts[0].qp(), pair.hosts[1].qp_with(|init| init.srq = Some(srq))];
        pair.connect(qps);
        qps
    });
    pair.run();
    (srq, qps)
}

/// Host 1 has asked for the bytes of a write with immediate data, which host 0 has not handed over.
fn write_in_the_middle(pair: &mut Pair, qp: QpId) -> [Buffer; 2] {
    let (here, there) = (pair.buffer(0, LEN), pair.buffer(1, LEN));
    here.fill(0, &pattern(3));
    forbid(pair);
    pair.stopped = Some(0);
    let write = SendOp::WriteImm { addr: there.addr(), rkey: there.key(), imm: 5 };
    pair.send(0, qp, 1, write, &[here.sge(0, LEN)]);
    pair.later(1_000_000);
    [here, there]
}

/// The right to write, or the region, is withdrawn in the middle of the write.
#[test]
fn a_write_with_immediate_data_that_is_refused_in_its_middle_takes_no_receive() {
    for withdrawn in [RemInvReqErr, RemAccessErr] {
        for way in [Way::Link, Way::LinkMapped] {
            let mut pair = Pair::new(way);
            let (srq, [[qp, peer], others]) = with_shared_receives(&mut pair);
            pair.hosts[1].adapter.post_srq_recv(pair.now, srq, 50, &[]).unwrap();
            let [_, there] = write_in_the_middle(&mut pair, qp);
            let (now, adapter) = (pair.now, &mut pair.hosts[1].adapter);
            if withdrawn == RemInvReqErr {
                let attr = QpAttr { access: Access::LOCAL_WRITE, ..QpAttr::default() };
                adapter.modify_qp(now, peer, &attr, QpAttrMask::ACCESS_FLAGS).unwrap();
            } else {
                adapter.dereg_mr(now, there.region.id).unwrap();
            }
            pair.stopped = None;
            pair.later(1_000_000);
            assert_eq!(pair.polled(0), [(1, withdrawn)], "{way:?}");
            assert_eq!(pair.polled(1), [], "{way:?} {withdrawn:?}");
            // It is still there for a message to another queue pair.
            pair.send(0, others[0], 2, SendOp::Send, &[]);
            pair.later(1_000_000);
            assert_eq!(pair.polled(1), [(50, Success)], "{way:?} {withdrawn:?}");
        }
    }
}

/// The write waits for another one.
#[test]
fn another_message_may_take_the_receive_in_the_middle_of_a_write_with_immediate_data() {
    let mut pair = Pair::new(Way::Link);
    let (srq, [[qp, _], others]) = with_shared_receives(&mut pair);
    pair.hosts[1].adapter.post_srq_recv(pair.now, srq, 50, &[]).unwrap();
    let [_, there] = write_in_the_middle(&mut pair, qp);
    pair.send(0, others[0], 2, SendOp::Send, &[]);
    // The message comes first.
    pair.later(1_000_000);
    assert_eq!(pair.polled(1), [(50, Success)]);
    pair.stopped = None;
    pair.later(1_000_000);
    assert_eq!(pair.polled(0), [(2, Success)]);
    pair.hosts[1].adapter.post_srq_recv(pair.now, srq, 51, &[]).unwrap();
    pair.later(1_000_000_000);
    assert_eq!(pair.polled(0), [(1, Success)]);
    assert_eq!(pair.polled(1), [(51, Success)]);
    assert!(there.bytes(0, LEN) == pattern(3));
}

/// What a peer asks of `qps[0]`, a queue pair that hands bytes over: how many of them it gets.
fn handed(pair: &mut Pair, (tag, sequence): (u64, u32), offset: u32, len: u32) -> usize {
    let (link, now) = (pair.link()[0], pair.now);
    let adapter = &mut pair.hosts[0].adapter;
    adapter.handle_link_message(now, link, LinkMessage::Fetch { tag, sequence, offset, len });
    let mut sum = 0;
    while let Some(action) = adapter.poll_action() {
        if let Action::LinkSend { message: LinkMessage::Fetched { bytes, .. }, .. } = action {
            sum += bytes.len();
        }
    }
    sum
}

/// A peer gets neither more at once than an engine asks for, nor anything again: it would have copies made
/// that nothing bounds.
#[test]
fn bytes_are_handed_over_once() {
    let (mut pair, qps) = connected(Way::Link);
    let (here, there) = (pair.buffer(0, LEN), pair.buffer(1, LEN));
    forbid(&pair);
    pair.recv(1, qps[1], 1, &[there.sge(0, LEN)]);
    for wr_id in [2, 3] {
        pair.send(0, qps[0], wr_id, SendOp::Send, &[here.sge(0, LEN)]);
    }
    while pair.hosts[1].adapter.progress(pair.now) {}
    let actions = std::iter::from_fn(|| pair.hosts[1].adapter.poll_action());
    let asked = actions.filter_map(|action| match action {
        Action::LinkSend { message: LinkMessage::Fetch { tag, sequence, offset, len }, .. } => {
            Some((tag, sequence, offset, len))
        }
        _ => None,
    });
    let asked: Vec<_> = asked.collect();
    let [(tag, first, 0, len)] = asked[..] else { panic!("{asked:?}") };
    let second = first.wrapping_add(1);

    assert_eq!(handed(&mut pair, (tag, first), 0, LEN as u32), 0);
    assert_eq!(handed(&mut pair, (tag, first), 0, len), len as usize);
    assert_eq!(handed(&mut pair, (tag, first), 0, len), 0);
    assert_eq!(handed(&mut pair, (tag, first), len - 1, len), 0);
    assert_eq!(handed(&mut pair, (tag, first), len, len), len as usize);
    assert_eq!(handed(&mut pair, (tag, second), 0, 1000), 1000);
    assert_eq!(handed(&mut pair, (tag, second), 0, 1000), 0);
    assert_eq!(handed(&mut pair, (tag, first), 2 * len, len), 0);
}

/// Also while writes before it are held.
#[test]
fn bytes_of_another_write_are_not_taken_for_those_asked_for() {
    let (mut pair, qps) = connected(Way::Link);
    pair.hosts[1].adapter.place_unordered(WriteOrder::Reverse, 5_000_000);
    let (here, there) = (pair.buffer(0, 2 * LEN), pair.buffer_with(1, 2 * LEN, ALL_ACCESS));
    forbid(&pair);
    let (small, large) = (pattern(1), pattern(9));
    here.fill(0, &small);
    here.fill(LEN, &large);
    for (wr_id, at, len) in [(1, 0, 4000), (2, LEN, LEN)] {
        let op = SendOp::Write { addr: there.addr() + at as u64, rkey: there.key() };
        pair.send(0, qps[0], wr_id, op, &[here.sge(at, len)]);
    }
    pair.later(100_000_000);
    assert_eq!(pair.polled(0), [(1, Success), (2, Success)]);
    assert!(there.bytes(0, 4000) == small[..4000] && there.bytes(LEN, LEN) == large);
}

/// Operations and a flag of slots.
const WRITE: u8 = 4;
const WRITE_IMM: u8 = 5;
const REFERENCE: u8 = 8;

/// The most that is asked for at once.
const ASKED: usize = 32 << 10;

/// A peer whose memory a queue pair of host 0 cannot reach, and its end of their channel.
fn hidden_peer() -> (Pair, QpId, LinkPeer, Channel) {
    let mut pair = Pair::new(Way::Link);
    let qp = pair.hosts[0].qp();
    let directory = Some(Segment::heap(64 << 10));
    let peer = LinkPeer::asked_with(&mut pair, qp, directory, |_| {});
    peer.memory.is_hidden.store(true, Ordering::Relaxed);
    let channel = peer.accept(&mut pair);
    (pair, qp, peer, channel)
}

/// The peer writes `length` bytes by reference.
fn push_write(channel: &mut Channel, opcode: u8, length: u32, there: &Buffer) {
    // The list says more, so that the length stands there once.
    let list = [1u64, 2 * u64::from(length)].map(u64::to_ne_bytes).concat();
    let (rkey, raddr, flags) = (there.key(), there.addr(), REFERENCE);
    let write = SlotHeader { opcode, flags, length, rkey, raddr, ..Default::default() };
    channel.outgoing.requests.push(&write, &list).unwrap();
}

/// How often the queue pair asks for the first bytes of a long write when it looks at its channel.
fn times_asked(pair: &mut Pair, qp: QpId) -> usize {
    pair.hosts[0].adapter.serve(pair.now, qp);
    let actions = std::iter::from_fn(|| pair.hosts[0].adapter.poll_action());
    let fetch = |action: &Action| {
        matches!(action, Action::LinkSend { message, .. }
        if matches!(message, LinkMessage::Fetch { offset: 0, len, .. } if *len == ASKED as u32))
    };
    actions.filter(fetch).count()
}

/// What a slot says is looked at each time anew: a peer may change it while it hands bytes over.
#[test]
fn a_write_that_becomes_shorter_while_it_is_asked_for_ends_the_channel() {
    const LONG: u32 = 40_000;
    let (mut pair, qp, peer, mut channel) = hidden_peer();
    let there = pair.buffer_with(0, LEN, ALL_ACCESS);
    push_write(&mut channel, WRITE, LONG, &there);
    assert_eq!(times_asked(&mut pair, qp), 1);

    peer.change_length(LONG, 100);
    for offset in (0..ASKED).step_by(FETCHED_MAX) {
        let bytes = vec![5; FETCHED_MAX.min(ASKED - offset)];
        let (sequence, offset) = (0, offset as u32);
        peer.say(&mut pair, |tag| LinkMessage::Fetched { tag, sequence, offset, bytes });
    }
    assert_eq!(pair.state(0, qp), QpState::Err);
    assert!(there.bytes(0, LEN) == [0; LEN]);
}

/// The peer need not count its tries while bytes of its write come: a receive is there.
#[test]
fn a_write_with_immediate_data_waits_for_no_receive_once_one_is_there() {
    let (mut pair, qp, _peer, mut channel) = hidden_peer();
    let there = pair.buffer_with(0, LEN, ALL_ACCESS);
    push_write(&mut channel, WRITE_IMM, LEN as u32, &there);
    assert_eq!(times_asked(&mut pair, qp), 0);
    assert!(channel.outgoing.control.stall().is_some());
    pair.recv(0, qp, 50, &[]);
    assert_eq!(times_asked(&mut pair, qp), 1);
    assert_eq!(channel.outgoing.control.stall(), None);
}
