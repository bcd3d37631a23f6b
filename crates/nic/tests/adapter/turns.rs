//! Who moves much gives others their turn: no look at the adapter, and no ring of a doorbell, copies more
//! than about a megabyte of one queue pair's messages.

use crate::pair::{ALL_ACCESS, Pair, Way};
use quipu_nic::*;

const MIB: usize = 1 << 20;
const LARGE: usize = 8 * MIB;

/// Two hosts with two queue pairs each, connected.
fn two_pairs() -> (Pair, [[QpId; 2]; 2]) {
    let mut pair = Pair::new(Way::Link);
    let qps = [0, 1].map(|_| [pair.hosts[0].qp(), pair.hosts[1].qp()]);
    qps.iter().for_each(|&ends| pair.connect(ends));
    pair.run();
    (pair, qps)
}

fn pattern(len: usize) -> Vec<u8> {
    (0..len).map(|i| (i * 7 + i / 251) as u8).collect()
}

/// Has host 1 make progress until its request `wr_id` is there: how often, and what came before it.
fn looks_until(pair: &mut Pair, wr_id: u64) -> (usize, Vec<u64>) {
    let mut before = Vec::new();
    for looks in 1..100 {
        pair.hosts[1].adapter.progress(pair.now);
        for (found, status) in pair.polled(1) {
            assert_eq!(status, WcStatus::Success);
            if found == wr_id {
                return (looks, before);
            }
            before.push(found);
        }
    }
    panic!("request {wr_id} never completes");
}

#[test]
fn a_large_send_lets_small_ones_of_others_pass() {
    let (mut pair, [large, small]) = two_pairs();
    let (from, to) = (pair.buffer(0, LARGE), pair.buffer(1, LARGE + 64));
    let bytes = pattern(LARGE);
    from.fill(0, &bytes);
    pair.recv(1, large[1], 1, &[to.sge(0, LARGE)]);
    pair.recv(1, small[1], 2, &[to.sge(LARGE, 64)]);
    pair.send(0, large[0], 3, SendOp::Send, &[from.sge(0, LARGE)]);
    pair.send(0, small[0], 4, SendOp::Send, &[from.sge(0, 64)]);

    assert_eq!(looks_until(&mut pair, 2), (1, vec![]));
    assert_eq!(looks_until(&mut pair, 1), (LARGE / MIB - 1, vec![]));
    assert!(to.bytes(0, LARGE) == bytes);
    pair.run();
    assert_eq!(pair.polled(0).len(), 2);
}

#[test]
fn many_sends_by_reference_are_received_a_megabyte_at_a_time() {
    let (mut pair, [large, small]) = two_pairs();
    let (from, to) = (pair.buffer(0, LARGE), pair.buffer(1, LARGE + 64));
    const PART: usize = MIB / 4;
    for part in 0..32 {
        let at = part * PART % LARGE;
        pair.recv(1, large[1], 100 + part as u64, &[to.sge(at, PART)]);
        pair.send(0, large[0], part as u64, SendOp::Send, &[from.sge(at, PART)]);
    }
    pair.recv(1, small[1], 1, &[to.sge(LARGE, 64)]);
    pair.send(0, small[0], 2, SendOp::Send, &[from.sge(0, 64)]);
    let (looks, before) = looks_until(&mut pair, 1);
    assert_eq!((looks, before), (1, vec![100, 101, 102, 103]));
    assert_eq!(looks_until(&mut pair, 131).0, 32 / 4 - 1);
}

/// Writes and reads, which are executed where they are posted.
#[test]
fn one_ring_moves_about_a_megabyte() {
    let (mut pair, [large, _]) = two_pairs();
    let (here, there) = (pair.buffer(0, 4 * MIB), pair.buffer_with(1, 4 * MIB, ALL_ACCESS));
    let bytes = pattern(4 * MIB);
    let (addr, rkey) = (there.addr(), there.key());
    for (op, from, to) in [
        (SendOp::Write { addr, rkey }, &here, &there),
        (SendOp::Read { addr, rkey }, &there, &here),
    ] {
        from.fill(0, &bytes);
        to.fill(0, &vec![0; 4 * MIB]);
        let adapter = &mut pair.hosts[0].adapter;
        for part in 0..8 {
            let offset = part * MIB / 2;
            let op = match op {
                SendOp::Write { .. } => SendOp::Write { addr: addr + offset as u64, rkey },
                _ => SendOp::Read { addr: addr + offset as u64, rkey },
            };
            let sges = [here.sge(offset, MIB / 2)];
            let (flags, payload) = (SendFlags::SIGNALED, Payload::Sges(&sges));
            let wr = SendWr { wr_id: part as u64, to: To::Peer, op, flags, payload };
            adapter.post_send(large[0], &wr).unwrap();
        }
        adapter.ring_doorbell(pair.now, large[0]);
        let done = pair.polled(0);
        assert_eq!(done, [(0, WcStatus::Success), (1, WcStatus::Success)], "{op:?}");
        // Nobody rings for the rest: the looks that follow go on with it.
        pair.run();
        assert_eq!(pair.polled(0).len(), 6);
        assert!(to.bytes(0, 4 * MIB) == bytes);
    }
}

/// Reads that host 1 was asked for.
fn reads_served(pair: &Pair) -> u64 {
    pair.hosts[1].adapter.queue_pairs().map(|qp| qp.counters.responder.reads).sum()
}

/// A read that cannot go directly, just once, is asked for. Those behind it wait for the answer and go
/// directly then: asked for too, they would have the next ones asked for, and so on.
#[test]
fn a_peer_that_was_asked_for_a_read_is_not_asked_for_all_that_follow() {
    let (mut pair, [[here_qp, there_qp], _]) = two_pairs();
    let (here, there) = (pair.buffer(0, 4 * MIB), pair.buffer_with(1, 4 * MIB, ALL_ACCESS));
    let bytes = pattern(4 * MIB);
    there.fill(0, &bytes);
    let read = |pair: &mut Pair, part: usize| {
        let op = SendOp::Read { addr: there.addr() + (part * MIB) as u64, rkey: there.key() };
        pair.send(0, here_qp, part as u64, op, &[here.sge(part * MIB, MIB)]);
    };
    // As where the peer has not begun to receive yet.
    let grant = |pair: &mut Pair, access| {
        let attr = QpAttr { access, ..QpAttr::default() };
        let adapter = &mut pair.hosts[1].adapter;
        adapter.modify_qp(pair.now, there_qp, &attr, QpAttrMask::ACCESS_FLAGS).unwrap();
    };
    grant(&mut pair, mem::Access::empty());
    read(&mut pair, 0);
    grant(&mut pair, ALL_ACCESS);
    (1..4).for_each(|part| read(&mut pair, part));
    pair.run();
    assert_eq!(pair.polled(0), [0, 1, 2, 3].map(|wr_id| (wr_id, WcStatus::Success)));
    assert!(here.bytes(0, 4 * MIB) == bytes);
    assert_eq!(reads_served(&pair), 1);
}

/// Where the kernel lets nobody in there is nothing to wait for.
#[test]
fn reads_of_what_the_kernel_shows_nobody_are_asked_for_together() {
    let (mut pair, [[here_qp, _], _]) = two_pairs();
    const LEN: usize = 20_000;
    let (here, there) = (pair.buffer(0, LEN), pair.buffer_with(1, LEN, ALL_ACCESS));
    pair.memory.0.lock().unwrap().clear();
    for wr_id in 0..3 {
        let op = SendOp::Read { addr: there.addr(), rkey: there.key() };
        pair.send(0, here_qp, wr_id, op, &[here.sge(0, LEN)]);
    }
    // The one that asks sees no answer meanwhile.
    (0..100).for_each(|_| _ = pair.hosts[1].adapter.progress(pair.now));
    assert_eq!(reads_served(&pair), 3);
    pair.run();
    assert_eq!(pair.polled(0), [0, 1, 2].map(|wr_id| (wr_id, WcStatus::Success)));
}

/// What completes while it is being posted is found by polls that look at nothing else.
#[test]
fn who_moves_a_megabyte_while_posting_owes_peers_a_look() {
    let (mut pair, [[qp, _], _]) = two_pairs();
    let (here, there) = (pair.buffer(0, MIB), pair.buffer_with(1, MIB, ALL_ACCESS));
    let op = SendOp::Read { addr: there.addr(), rkey: there.key() };
    let list = [here.sge(0, MIB / 4)];
    let (now, flags, payload) = (pair.now, SendFlags::SIGNALED, Payload::Sges(&list));
    let adapter = &mut pair.hosts[0].adapter;
    for wr_id in 0..4 {
        assert!(!adapter.owes_progress());
        assert!(adapter.post_at_once(now, qp, &SendWr { wr_id, to: To::Peer, op, flags, payload }));
    }
    assert!(adapter.owes_progress());
    adapter.progress(now);
    assert!(!adapter.owes_progress());
}

/// The opcodes of the FPDUs in `bytes`.
fn opcodes(mut bytes: &[u8]) -> Vec<u8> {
    let mut found = Vec::new();
    while let [high, low, _, rdmap, ..] = *bytes {
        found.push(rdmap & 0xf);
        let ulpdu = usize::from(u16::from_be_bytes([high, low]));
        bytes = &bytes[(2 + ulpdu).next_multiple_of(4) + 4..];
    }
    found
}

/// Between two Quipus: plain iWARP adapters could not take it.
#[test]
fn a_read_is_answered_within_a_long_write() {
    const WRITE: u8 = 0;
    const READ_RESPONSE: u8 = 2;
    let mut pair = Pair::new(Way::Stream(usize::MAX));
    let qps = [pair.hosts[0].qp(), pair.hosts[1].qp()];
    pair.connect(qps);
    pair.run();
    let (from, to) = (pair.buffer_with(0, MIB, ALL_ACCESS), pair.buffer_with(1, MIB, ALL_ACCESS));
    let ([conn, other], now) = (pair.stream_ends(), pair.now);
    let write = SendOp::Write { addr: to.addr(), rkey: to.key() };
    pair.send(0, qps[0], 1, write, &[from.sge(0, MIB)]);
    let mut bytes = [0; 4096];
    let len = pair.hosts[0].adapter.transmit(now, conn, &mut bytes);
    assert_eq!(opcodes(&bytes[..len])[0], WRITE);

    let read = SendOp::Read { addr: from.addr(), rkey: from.key() };
    pair.send(1, qps[1], 2, read, &[to.sge(0, 8)]);
    let len = pair.hosts[1].adapter.transmit(now, other, &mut bytes);
    pair.hosts[0].adapter.handle_stream(now, conn, &bytes[..len]);
    let len = pair.hosts[0].adapter.transmit(now, conn, &mut bytes);
    assert!(opcodes(&bytes[..len]).contains(&READ_RESPONSE));
}

/// A request that fails in its middle waits for those before it, and answers do not wait for it.
#[test]
fn a_read_is_answered_beside_a_write_that_has_failed() {
    const READ_RESPONSE: u8 = 2;
    const READ: usize = 64 << 10;
    for pieces in 1..4 {
        let mut pair = Pair::new(Way::Stream(usize::MAX));
        let qps = [pair.hosts[0].qp(), pair.hosts[1].qp()];
        pair.connect(qps);
        pair.run();
        let from = pair.buffer_with(0, MIB, ALL_ACCESS);
        let (own, to) =
            (pair.buffer_with(0, MIB, ALL_ACCESS), pair.buffer_with(1, MIB, ALL_ACCESS));
        let ([conn, other], now) = (pair.stream_ends(), pair.now);
        // It is never answered here.
        let read = SendOp::Read { addr: to.addr(), rkey: to.key() };
        pair.send(0, qps[0], 1, read, &[own.sge(0, 8)]);
        let write = SendOp::Write { addr: to.addr(), rkey: to.key() };
        pair.send(0, qps[0], 2, write, &[from.sge(0, MIB)]);
        let mut bytes = [0; 4096];
        pair.hosts[0].adapter.transmit(now, conn, &mut bytes);

        let read = SendOp::Read { addr: own.addr(), rkey: own.key() };
        pair.send(1, qps[1], 3, read, &[to.sge(0, READ)]);
        let len = pair.hosts[1].adapter.transmit(now, other, &mut bytes);
        pair.hosts[0].adapter.handle_stream(now, conn, &bytes[..len]);
        let mut answered = 0;
        for round in 0..100 {
            if round == pieces {
                pair.hosts[0].adapter.dereg_mr(now, from.region.id).unwrap();
            }
            let len = pair.hosts[0].adapter.transmit(now, conn, &mut bytes);
            let found = opcodes(&bytes[..len]);
            answered += found.iter().filter(|&&opcode| opcode == READ_RESPONSE).count();
        }
        assert!(answered >= READ / 4096, "{pieces}: {answered}");
        // Nothing is left, and nobody is told that there is.
        let adapter = &mut pair.hosts[0].adapter;
        let calls = std::iter::from_fn(|| adapter.next_transmit());
        let left: Vec<_> = calls.take(9).collect();
        assert_eq!(adapter.transmit(now, conn, &mut bytes), 0);
        assert!(left.len() < 9 && adapter.next_transmit().is_none(), "{left:?}");
    }
}
