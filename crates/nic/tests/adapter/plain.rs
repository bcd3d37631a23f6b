//! Two adapters that speak plain iWARP to each other, as either does with an adapter of another make. What
//! is on the wire is checked byte for byte by `exchanges`.

use crate::pair::{Pair, Way};
use quipu_nic::iwarp::{Extensions, Negotiated, Params, Receiver, Segment};
use quipu_nic::*;

const WAYS: [Way; 2] = [Way::Stream(usize::MAX), Way::Stream(97)];

fn plain_pair(way: Way) -> (Pair, [QpId; 2]) {
    let mut pair = Pair::new(way);
    let qps = [0, 1].map(|host| pair.hosts[host].qp_with(|init| init.qp_type = QpType::Iwarp));
    (pair, qps)
}

fn connected(way: Way) -> (Pair, [QpId; 2]) {
    let (mut pair, qps) = plain_pair(way);
    pair.adopt(qps, [Params::peer_to_peer(4, 4); 2]);
    (pair, qps)
}

fn changes(pair: &Pair, host: usize) -> Vec<StreamChange> {
    let change = |event: &Event| match event {
        Event::Stream { change, .. } => Some(*change),
        _ => None,
    };
    pair.hosts[host].events.iter().filter_map(change).collect()
}

fn pattern(len: usize) -> Vec<u8> {
    (0..len).map(|at| (at * 7 + at / 251) as u8).collect()
}

#[test]
fn messages_of_every_size_arrive_whole() {
    for way in WAYS {
        let (mut pair, qps) = connected(way);
        assert_eq!([0, 1].map(|host| changes(&pair, host)), [[StreamChange::Established]; 2]);
        assert_eq!([0, 1].map(|host| pair.state(host, qps[host])), [QpState::Rts; 2]);
        const MOST: usize = 300_000;
        let (here, there) = (pair.buffer(0, MOST), pair.buffer(1, MOST));
        for (n, len) in [0, 1, 5, 1000, 64_000, 65_536, MOST].into_iter().enumerate() {
            let bytes = pattern(len);
            here.fill(0, &bytes);
            pair.recv(1, qps[1], n as u64, &[there.sge(0, MOST)]);
            pair.send(0, qps[0], 7, SendOp::Send, &[here.sge(0, len)]);
            pair.run();
            assert_eq!(pair.polled(0), [(7, WcStatus::Success)]);
            let received = pair.hosts[1].poll();
            assert_eq!((received.len(), received[0].byte_len), (1, len as u32), "{way:?}");
            assert!(there.bytes(0, len) == bytes, "{way:?} {len}");

            let (addr, rkey) = (there.addr(), there.key());
            there.fill(0, &vec![0; len]);
            pair.send(0, qps[0], 8, SendOp::Write { addr, rkey }, &[here.sge(0, len)]);
            pair.run();
            assert_eq!(pair.polled(0), [(8, WcStatus::Success)]);
            assert!(there.bytes(0, len) == bytes, "{way:?} {len}");

            here.fill(0, &vec![0; len]);
            pair.send(0, qps[0], 9, SendOp::Read { addr, rkey }, &[here.sge(0, len)]);
            pair.run();
            assert_eq!(pair.polled(0), [(9, WcStatus::Success)]);
            assert!(here.bytes(0, len) == bytes, "{way:?} {len}");
        }
    }
}

/// In both directions at once, with more reads posted than may be outstanding.
#[test]
fn many_requests_complete_in_order() {
    for way in WAYS {
        let (mut pair, qps) = connected(way);
        let buffers = [pair.buffer(0, 4096), pair.buffer(1, 4096)];
        for host in 0..2 {
            for n in 0..20 {
                pair.recv(host, qps[host], 100 + n, &[buffers[host].sge(0, 64)]);
            }
            let (addr, rkey) = (buffers[1 - host].addr(), buffers[1 - host].key());
            for n in 0..20 {
                let op = if n % 2 == 0 { SendOp::Read { addr, rkey } } else { SendOp::Send };
                pair.send(host, qps[host], n, op, &[buffers[host].sge(64, 8)]);
            }
        }
        pair.run();
        for host in 0..2 {
            let all = pair.hosts[host].poll();
            assert!(all.iter().all(|wc| wc.status == WcStatus::Success));
            let sent = all.iter().map(|wc| wc.wr_id).filter(|&id| id < 100);
            assert_eq!(sent.collect::<Vec<_>>(), (0..20).collect::<Vec<_>>(), "{way:?}");
            assert_eq!(all.len(), 30, "{way:?}: and ten receives");
        }
    }
}

#[test]
fn what_plain_iwarp_does_not_know_is_not_taken() {
    let (mut pair, qps) = connected(Way::Stream(usize::MAX));
    let here = pair.buffer(0, 64);
    let refused = [
        SendOp::SendImm(1),
        SendOp::WriteImm { addr: 0, rkey: 0, imm: 1 },
        SendOp::FetchAdd { addr: 0, rkey: 0, add: 1 },
        SendOp::CompareSwap { addr: 0, rkey: 0, compare: 1, swap: 2 },
    ];
    for op in refused {
        let sges = [here.sge(0, 8)];
        let (flags, payload) = (SendFlags::SIGNALED, Payload::Sges(&sges));
        let wr = SendWr { wr_id: 1, to: To::Peer, op, flags, payload };
        let taken = pair.hosts[0].adapter.post_send(qps[0], &wr);
        assert!(matches!(taken, Err(Fault::Invalid(_))), "{op:?}");
    }
    assert_eq!(pair.state(0, qps[0]), QpState::Rts);
}

#[test]
fn only_connection_management_connects() {
    let (mut pair, qps) = plain_pair(Way::Stream(usize::MAX));
    pair.to_init(0, qps[0]);
    let attr = QpAttr { state: QpState::Rtr, ..QpAttr::default() };
    let refused = pair.hosts[0].adapter.modify_qp(pair.now, qps[0], &attr, QpAttrMask::STATE);
    assert_eq!(refused, Err(Fault::ConnectedElsewhere));
    assert_eq!(pair.state(0, qps[0]), QpState::Init);

    let reliable = pair.hosts[0].qp();
    let negotiated = quipu_nic::iwarp::Negotiated::plain();
    let adoption = Adoption { role: Role::Initiator, negotiated, ird: 1, ord: 1, rfc7306: false };
    let adapter = &mut pair.hosts[0].adapter;
    let given = adapter.adopt_stream(pair.now, reliable, &adoption);
    assert!(matches!(given, Err(Fault::Invalid(_))), "{given:?}");
    adapter.adopt_stream(pair.now, qps[0], &adoption).unwrap();
    assert_eq!(adapter.adopt_stream(pair.now, qps[0], &adoption), Err(Fault::WrongState));
    assert_eq!(adapter.connections(), 1);
    // Who made the stream looks after a peer that is silent; a program that sets no time-out leaves it that.
    let mut actions = std::iter::from_fn(|| adapter.poll_action());
    assert!(!actions.any(|action| matches!(action, Action::LimitSilence { .. })));
}

/// SQD is how librdmacm says goodbye; both ends hear of it, and what was posted is flushed.
#[test]
fn a_disconnect_reaches_both_ends() {
    for way in WAYS {
        let (mut pair, qps) = connected(way);
        let buffers = [pair.buffer(0, 4096), pair.buffer(1, 4096)];
        for host in 0..2 {
            pair.recv(host, qps[host], 5, &[buffers[host].sge(0, 64)]);
            pair.recv(host, qps[host], 6, &[buffers[host].sge(0, 64)]);
        }
        buffers[0].fill(0, b"goodbye");
        pair.send(0, qps[0], 1, SendOp::Send, &[buffers[0].sge(0, 7)]);
        pair.run();
        let attr = QpAttr { state: QpState::Sqd, ..QpAttr::default() };
        pair.hosts[0].adapter.modify_qp(pair.now, qps[0], &attr, QpAttrMask::STATE).unwrap();
        pair.run();
        let flushed = |id| (id, WcStatus::WrFlushErr);
        let success = |id| (id, WcStatus::Success);
        assert_eq!(pair.polled(0), [success(1), flushed(5), flushed(6)]);
        assert_eq!(pair.polled(1), [success(5), flushed(6)]);
        assert_eq!(buffers[1].bytes(0, 7), b"goodbye");
        for (host, &qp) in qps.iter().enumerate() {
            let life = [StreamChange::Established, StreamChange::Ended];
            assert_eq!((pair.state(host, qp), changes(&pair, host)), (QpState::Err, life.into()));
            assert!(!pair.hosts[host].events.iter().any(|e| matches!(e, Event::Async(_))));
            assert_eq!(pair.hosts[host].adapter.connections(), 0);
        }
    }
}

/// After RESET it may be connected again.
#[test]
fn a_queue_pair_has_a_second_life() {
    let (mut pair, qps) = connected(Way::Stream(usize::MAX));
    for state in [QpState::Err, QpState::Reset, QpState::Init] {
        for (host, &qp) in qps.iter().enumerate() {
            let attr = QpAttr { state, ..QpAttr::default() };
            let adapter = &mut pair.hosts[host].adapter;
            adapter.modify_qp(pair.now, qp, &attr, QpAttrMask::STATE).unwrap();
        }
        pair.run();
    }
    pair.adopt(qps, [Params::default(); 2]);
    let (here, there) = (pair.buffer(0, 64), pair.buffer(1, 64));
    pair.recv(1, qps[1], 5, &[there.sge(0, 64)]);
    pair.send(0, qps[0], 1, SendOp::Send, &[here.sge(0, 8)]);
    pair.run();
    assert_eq!(pair.polled(0), [(1, WcStatus::Success)]);
    assert_eq!(pair.polled(1), [(5, WcStatus::Success)]);
}

#[test]
fn receives_of_a_shared_queue_are_taken_and_its_last_is_told() {
    let (mut pair, _) = plain_pair(Way::Stream(usize::MAX));
    let pd = pair.hosts[1].pd;
    let srq = pair.hosts[1].adapter.create_srq(pd, 16, 2, 0).unwrap();
    let there = pair.buffer(1, 64);
    let qps = [
        pair.hosts[0].qp_with(|init| init.qp_type = QpType::Iwarp),
        pair.hosts[1].qp_with(|init| (init.qp_type, init.srq) = (QpType::Iwarp, Some(srq))),
    ];
    pair.hosts[1].adapter.post_srq_recv(pair.now, srq, 5, &[there.sge(0, 64)]).unwrap();
    pair.adopt(qps, [Params::peer_to_peer(1, 1); 2]);
    let here = pair.buffer(0, 64);
    pair.send(0, qps[0], 1, SendOp::Send, &[here.sge(0, 8)]);
    pair.run();
    assert_eq!(pair.polled(1), [(5, WcStatus::Success)]);
    // The next finds the queue empty, and iWARP cannot wait.
    pair.send(0, qps[0], 2, SendOp::Send, &[here.sge(0, 8)]);
    pair.run();
    assert_eq!([0, 1].map(|host| pair.state(host, qps[host])), [QpState::Err; 2]);
    let events = &pair.hosts[1].events;
    assert!(events.contains(&Event::Async(AsyncEvent::QpReqErr(qps[1]))));
    assert!(events.contains(&Event::Async(AsyncEvent::QpLastWqeReached(qps[1]))));
}

/// An FPDU for which there is no payload any more is not sent, nor counted for where the next marker is due.
#[test]
fn a_message_that_is_cut_leaves_the_markers_in_their_places() {
    const INTERVAL: usize = 512;
    for room in (2000..2100).step_by(4) {
        let mut pair = Pair::new(WAYS[0]);
        let qp = pair.hosts[0].qp_with(|init| init.qp_type = QpType::Iwarp);
        // Without CRCs, which cover the markers.
        let bare = Negotiated { crc: false, ..Negotiated::plain() };
        let negotiated = Negotiated { tx_markers: true, ..bare.clone() };
        let adoption =
            Adoption { role: Role::Initiator, negotiated, ird: 1, ord: 1, rfc7306: false };
        let now = pair.now;
        let conn = pair.hosts[0].adapter.adopt_stream(now, qp, &adoption).unwrap();
        let here = pair.buffer(0, 100_000);
        pair.send(0, qp, 1, SendOp::Send, &[here.sge(0, 100_000)]);
        let adapter = &mut pair.hosts[0].adapter;
        let (mut stream, mut out) = (Vec::new(), vec![0; room]);
        for turn in 0..4 {
            let used = adapter.transmit(now, conn, &mut out);
            stream.extend(&out[..used]);
            if turn == 0 {
                adapter.dereg_mr(pair.now, here.region.id).unwrap();
            }
        }
        let (mut at, mut ended) = (0, false);
        let unmarked: Vec<u8> = stream
            .chunks(INTERVAL)
            .flat_map(|piece| &piece[piece.len().min(4)..])
            .copied()
            .collect();
        let mut receiver = Receiver::new(&bare, Extensions::NONE);
        while let Ok(Some((len, segment))) = receiver.next(&unmarked[at..]) {
            at += len;
            ended |= matches!(segment, Segment::Terminate(_));
        }
        assert!(ended && at == unmarked.len(), "{room}");
    }
}

/// Posts a write to the peer, and says what becomes of it.
fn fated_write(pair: &mut Pair, qp: QpId, op: SendOp, fate: Fate) {
    let here = pair.buffer(0, 64);
    let sges = [here.sge(0, 8)];
    let (flags, payload) = (SendFlags::SIGNALED, Payload::Sges(&sges));
    let wr = SendWr { wr_id: 1, op, flags, payload, to: To::Peer };
    let adapter = &mut pair.hosts[0].adapter;
    adapter.post_send_fated(pair.now, qp, &wr, fate).unwrap();
    adapter.ring_doorbell(pair.now, qp);
}

#[test]
fn a_request_without_an_answer_fails_at_this_end() {
    for way in WAYS {
        for reads in [false, true] {
            let (mut pair, qps) = connected(way);
            let there = pair.buffer(1, 64);
            let (addr, rkey) = (there.addr(), there.key());
            let op = if reads { SendOp::Read { addr, rkey } } else { SendOp::Write { addr, rkey } };
            fated_write(&mut pair, qps[0], op, Fate::Fail(WcStatus::RemAccessErr));
            pair.run();
            assert_eq!(pair.polled(0), [(1, WcStatus::RemAccessErr)], "{way:?} {op:?}");
            assert_eq!(pair.state(0, qps[0]), QpState::Err);
        }
    }
}

/// It has no time of its own to wait for.
#[test]
fn a_dead_peer_ends_the_queue_pair() {
    for way in WAYS {
        let (mut pair, qps) = connected(way);
        let there = pair.buffer(1, 64);
        pair.recv(0, qps[0], 50, &[]);
        pair.hosts[0].adapter.lose_peer(pair.now, qps[0]);
        let read = SendOp::Read { addr: there.addr(), rkey: there.key() };
        pair.send(0, qps[0], 2, read, &[]);
        pair.run();
        let expected = [(50, WcStatus::WrFlushErr), (2, WcStatus::WrFlushErr)];
        assert_eq!(pair.polled(0), expected, "{way:?}");
        assert_eq!(pair.state(0, qps[0]), QpState::Err);
        assert_eq!(changes(&pair, 0).last(), Some(&StreamChange::Ended), "{way:?}");
    }
}
