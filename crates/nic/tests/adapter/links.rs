//! Links: how their channels come to be, are refused, and are waited for.

use crate::hostile::LinkPeer;
use crate::pair::{ALL_ACCESS, Host, Pair, Way, connected_with};
use WcStatus::{RemAccessErr, RemInvReqErr, RnrRetryExcErr, Success, WrFlushErr};
use quipu_nic::mem::ring::{SlotHeader, Stall};
use quipu_nic::mem::{Access, Segment};
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

/// Who accepts a channel may write at once, though who asked for it does not look: writes that the peer is
/// asked for have those behind them wait for it, too. What the asker grants while it waits counts.
#[test]
fn whoever_asks_for_a_channel_lets_its_peer_in_before_the_answer() {
    let mut pair = Pair::new(Way::Link);
    let qps = [pair.hosts[0].qp(), pair.hosts[1].qp()];
    let (there, here) = (pair.buffer_with(0, 64, ALL_ACCESS), pair.buffer(1, 64));
    here.fill(0, b"written by itself");
    pair.to_rtr(0, qps, &|_| {});
    pair.run();
    pair.stopped = Some(0);
    pair.to_rtr(1, qps, &|_| {});
    pair.to_rts(1, qps[1], &|_| {});
    let op = SendOp::Write { addr: there.addr(), rkey: there.key() };
    pair.send(1, qps[1], 1, op, &[here.sge(0, 17)]);
    assert_eq!(pair.polled(1), [(1, Success)]);
    assert_eq!(there.bytes(0, 17), b"written by itself");

    pair.to_rts(0, qps[0], &|_| {});
    let attr = QpAttr { access: Access::empty(), ..QpAttr::default() };
    let adapter = &mut pair.hosts[0].adapter;
    adapter.modify_qp(pair.now, qps[0], &attr, QpAttrMask::ACCESS_FLAGS).unwrap();
    pair.send(1, qps[1], 2, op, &[here.sge(0, 17)]);
    assert_eq!(pair.polled(1), []);
    pair.stopped = None;
    pair.run();
    assert_eq!(pair.polled(1), [(2, RemInvReqErr)]);
}

/// The queue pair of host 0 starts anew, so that what it has asked for is given up.
fn start_anew(pair: &mut Pair, qps: [QpId; 2]) {
    pair.run();
    pair.reset(0, qps[0]);
    pair.to_rtr(0, qps, &|_| {});
    pair.to_rts(0, qps[0], &|attr| attr.timeout = 0);
}

/// A process that was stopped, as by a debugger, finds requests that its peer has given up meanwhile.
#[test]
fn a_request_that_is_granted_too_late_is_made_again() {
    for way in [Way::Link, Way::LinkCopying] {
        for busy in [false, true] {
            let mut pair = Pair::new(way);
            let qps = [pair.hosts[0].qp(), pair.hosts[1].qp()];
            let memory = pair.buffer(1, 64);
            let Host { adapter, pd, .. } = &mut pair.hosts[1];
            let (mw, key) = adapter.alloc_mw(*pd, WindowType::Two).unwrap();
            let (mr, addr, key) = (memory.region.id, memory.addr(), key.next_tag().0);
            let access = Access::REMOTE_WRITE;
            let bind = BindMw { mw, rkey: key, mr, addr, len: 64, access };
            pair.stopped = Some(1);
            for host in 0..2 {
                pair.to_rtr(host, qps, &|_| {});
                pair.to_rts(host, qps[host], &|attr| attr.timeout = 0);
            }
            start_anew(&mut pair, qps);
            if busy {
                pair.recv(0, qps[0], 3, &[]);
                // What concerns this side alone is done once, though all of it is transmitted again.
                pair.send(1, qps[1], 4, SendOp::BindMw(bind), &[]);
                pair.send(1, qps[1], 5, SendOp::Send, &[]);
                pair.send(1, qps[1], 6, SendOp::LocalInv { key }, &[]);
            }
            pair.stopped = None;
            pair.later(SECOND);
            let told = if busy { vec![(3, Success)] } else { vec![] };
            let sent = [4, 5, 6].map(|wr_id| (wr_id, Success));
            let sent = if busy { sent.to_vec() } else { vec![] };
            assert_eq!((pair.polled(0), pair.polled(1)), (told, sent), "{way:?}");
            exchange(&mut pair, qps);
        }
    }
}

/// A small message goes into its slot while it is being posted. It is sent again from somewhere else.
#[test]
fn what_was_sent_by_a_channel_that_never_stood_is_sent_again() {
    for inline in [false, true] {
        let mut pair = Pair::new(Way::Link);
        let qps = [pair.hosts[0].qp(), pair.hosts[1].qp()];
        let (here, there) = (pair.buffer(1, 64), pair.buffer(0, 64));
        here.fill(0, b"the same bytes");
        pair.stopped = Some(1);
        for host in 0..2 {
            pair.to_rtr(host, qps, &|_| {});
            pair.to_rts(host, qps[host], &|attr| attr.timeout = 0);
        }
        start_anew(&mut pair, qps);
        // It grants what was given up, and does not hear of that yet.
        pair.stopped = Some(0);
        pair.run();
        for wr_id in 1..=3 {
            let list = [here.sge(0, 14)];
            let payload = match inline {
                true => Payload::Inline(b"the same bytes"),
                false => Payload::Sges(&list),
            };
            let flags = SendFlags::SIGNALED;
            let flags = if inline { flags | SendFlags::INLINE } else { flags };
            pair.send_with(1, qps[1], wr_id, SendOp::Send, flags, payload);
            pair.recv(0, qps[0], 10 + wr_id, &[there.sge(16 * (wr_id as usize - 1), 14)]);
        }
        pair.stopped = None;
        pair.later(SECOND);
        assert_eq!(pair.polled(1), [1, 2, 3].map(|wr_id| (wr_id, Success)), "{inline}");
        assert_eq!(pair.polled(0), [11, 12, 13].map(|wr_id| (wr_id, Success)), "{inline}");
        for at in [0, 16, 32] {
            assert_eq!(there.bytes(at, 14), b"the same bytes", "{inline}");
        }
        exchange(&mut pair, qps);
    }
}

/// What was executed before a message that finds no receive has its answer in the ring, if only since the
/// last look there.
#[test]
fn a_read_before_a_message_without_a_receive_succeeds() {
    const SEND: u8 = 1;
    const READ_DATA: u8 = 1;
    const REFERENCE: u8 = 8;
    let mut pair = Pair::new(Way::LinkCopying);
    let qp = pair.hosts[0].qp();
    // The peer lets nobody read directly, for its directory is empty.
    let directory = Some(Segment::heap(64 << 10));
    let peer = LinkPeer::asked_with(&mut pair, qp, directory, |attr| attr.rnr_retry = 0);
    let mut channel = peer.accept(&mut pair);
    let here = pair.buffer(0, 64);
    pair.recv(0, qp, 5, &[here.sge(32, 8)]);
    let read = SendOp::Read { addr: 0, rkey: 0x305 };
    pair.send(0, qp, 1, read, &[here.sge(0, 8)]);
    pair.send(0, qp, 2, SendOp::Send, &[]);
    // While host 0 fetches a message of the peer's, the peer serves both.
    let list = [&1000u64.to_ne_bytes()[..], &8u64.to_ne_bytes()].concat();
    let message = SlotHeader { opcode: SEND, flags: REFERENCE, length: 8, ..SlotHeader::default() };
    channel.outgoing.requests.push(&message, &list).unwrap();
    *peer.memory.meanwhile.lock().unwrap() = Some(Box::new(move || {
        let answer = SlotHeader { opcode: READ_DATA, length: 8, ..SlotHeader::default() };
        channel.outgoing.responses.push(&answer, b"the word").unwrap();
        channel.incoming.control.set_executed(1);
        let stall = Stall { sequence: 1, timer: 12, attempt: 0 };
        channel.incoming.control.set_stall(Some(stall));
    }));
    assert!(pair.hosts[0].adapter.serve(pair.now, qp));
    pair.run();
    assert_eq!(pair.polled(0), [(5, Success), (1, Success), (2, RnrRetryExcErr)]);
    assert_eq!(here.bytes(0, 8), b"the word");
}

/// As many answers as the ring has room for do not keep a refusal from its requester.
#[test]
fn a_refusal_behind_many_reads_is_told() {
    for (wrong, len) in [(31, 64), (32, 64), (33, 64), (32, 1000)] {
        let (mut pair, qps) = connected_with(Way::LinkCopying, |attr| {
            (attr.max_rd_atomic, attr.max_dest_rd_atomic) = (64, 64);
        });
        let (here, there) = (pair.buffer(0, 4096), pair.buffer(1, 4096));
        // The peer serves them before this side looks.
        pair.stopped = Some(1);
        for wr_id in 0..40 {
            let rkey = if wr_id == wrong { 0x7777_7700 } else { there.key() };
            let read = SendOp::Read { addr: there.addr(), rkey };
            pair.send(0, qps[0], wr_id, read, &[here.sge(0, len)]);
        }
        pair.stopped = Some(0);
        pair.run();
        pair.stopped = None;
        pair.run();
        let mut expected: Vec<_> = (0..wrong).map(|wr_id| (wr_id, Success)).collect();
        expected.push((wrong, RemAccessErr));
        expected.extend((wrong + 1..40).map(|wr_id| (wr_id, WrFlushErr)));
        assert_eq!(pair.polled(0), expected, "{wrong} {len}");
    }
}

/// A receive that is posted to a shared queue is for one of those that wait, and in turn.
#[test]
fn each_receive_of_a_shared_queue_calls_one_that_waits() {
    for way in [Way::Link, Way::LinkCopying] {
        let mut pair = Pair::new(way);
        let pd = pair.hosts[1].pd;
        let srq = pair.hosts[1].adapter.create_srq(pd, 16, 1, 0).unwrap();
        let mut all = Vec::new();
        for wr_id in 0..8 {
            let qps = [pair.hosts[0].qp(), pair.hosts[1].qp_with(|init| init.srq = Some(srq))];
            pair.connect(qps);
            pair.send(0, qps[0], wr_id, SendOp::Send, &[]);
            all.push(qps[1]);
        }
        pair.run();
        // One leaves while it waits, and takes nobody's turn.
        pair.hosts[1].adapter.destroy_qp(pair.now, all.remove(2)).unwrap();
        pair.hosts[1].adapter.watch_peers();
        for wr_id in 0..7 {
            pair.hosts[1].adapter.post_srq_recv(pair.now, srq, 100 + wr_id, &[]).unwrap();
            assert_eq!(pair.hosts[1].adapter.take_starved(), [], "{way:?}");
            assert_eq!(pair.polled(1), [(100 + wr_id, Success)], "{way:?}");
        }
        pair.run();
        let sent: Vec<u64> = pair.polled(0).into_iter().map(|(wr_id, _)| wr_id).collect();
        assert_eq!(sent, [0, 1, 3, 4, 5, 6, 7], "{way:?}");
    }
}
