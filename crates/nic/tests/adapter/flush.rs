//! Flushes: done in their order, judged by the peer, and refused by peers that do not know them.

use crate::pair::{Buffer, Pair, Way, connected, statuses};
use quipu_iwarp::wire::hello::{Features, Hello, Kind};
use quipu_iwarp::{Params, Responder};
use quipu_nic::*;

const WAYS: [Way; 5] =
    [Way::Stream(usize::MAX), Way::Stream(97), Way::Link, Way::LinkMapped, Way::LinkCopying];
const MS: u64 = 1_000_000;

/// A flush of the first `len` bytes of a buffer.
fn range(of: &Buffer, len: u64) -> Flush {
    let (addr, rkey, placement) = (of.addr(), of.key(), Placement::GLOBAL);
    Flush { addr, rkey, len, whole: false, placement }
}

fn flush(pair: &mut Pair, qp: QpId, wr_id: u64, flush: Flush) {
    pair.send(0, qp, wr_id, SendOp::Flush(flush), &[]);
}

#[test]
fn flushes_complete_behind_the_writes_before_them() {
    for way in WAYS {
        let (mut pair, qps) = connected(way);
        let (here, there) = (pair.buffer(0, 9000), pair.buffer(1, 9000));
        here.fill(0, &[7; 9000]);
        let write = SendOp::Write { addr: there.addr(), rkey: there.key() };
        let whole = Flush { whole: true, addr: 5, len: u64::MAX, ..range(&there, 0) };
        for first in [range(&there, 9000), range(&there, 0), range(&there, 1), whole] {
            pair.send(0, qps[0], 1, write, &[here.sge(0, 9000)]);
            flush(&mut pair, qps[0], 2, first);
            pair.send(0, qps[0], 3, write, &[here.sge(0, 8)]);
            flush(&mut pair, qps[0], 4, whole);
            pair.run();
            let done = pair.hosts[0].poll();
            let ok = WcStatus::Success;
            assert_eq!(statuses(&done), [(1, ok), (2, ok), (3, ok), (4, ok)], "{way:?}");
            assert_eq!([done[1].opcode, done[3].opcode], [WcOpcode::Flush; 2], "{way:?}");
            assert_eq!(done[1].byte_len, 0);
            assert_eq!(there.bytes(0, 9000), [7; 9000], "{way:?}");
            there.fill(0, &[0; 9000]);
        }
        assert!(pair.hosts[1].poll().is_empty());
    }
}

/// Where this side reaches the memory of the peer by itself, that need not wake up for a flush of a range.
#[test]
fn a_peer_whose_memory_is_reached_is_not_asked() {
    for (way, asked) in [(Way::Link, false), (Way::LinkMapped, false), (Way::LinkCopying, true)] {
        let (mut pair, qps) = connected(way);
        let there = pair.buffer(1, 64);
        flush(&mut pair, qps[0], 1, range(&there, 64));
        let done = pair.polled(0);
        let ok = (1, WcStatus::Success);
        assert_eq!(done, if asked { vec![] } else { vec![ok] }, "{way:?}");
        pair.run();
        flush(&mut pair, qps[0], 2, Flush { whole: true, ..range(&there, 64) });
        pair.run();
        let all = [done, pair.polled(0)].concat();
        assert_eq!(all, [ok, (2, WcStatus::Success)], "{way:?}");
    }
}

#[test]
fn what_the_peer_does_not_grant_it_refuses() {
    let of_others = Access::LOCAL_WRITE | Access::REMOTE_WRITE | Access::REMOTE_READ;
    let changes: [fn(&mut Flush); 8] = [
        |flush| flush.rkey ^= 1,
        |flush| flush.rkey = 0,
        |flush| flush.addr -= 1,
        |flush| flush.len += 1,
        |flush| flush.len = u64::MAX,
        |flush| (flush.addr, flush.len) = (u64::MAX, 1),
        |flush| flush.placement = Placement::PERSISTENT,
        |flush| flush.placement = Placement::all(),
    ];
    for way in WAYS {
        for (index, change) in changes.into_iter().enumerate() {
            for whole in [false, true] {
                let (mut pair, qps) = connected(way);
                let there = pair.buffer(1, 64);
                let mut bad = Flush { whole, ..range(&there, 64) };
                change(&mut bad);
                flush(&mut pair, qps[0], 1, bad);
                flush(&mut pair, qps[0], 2, range(&there, 64));
                pair.run();
                // Of a whole region the range does not matter.
                let fails = !whole || !(2..6).contains(&index);
                let (first, second) = match fails {
                    true => (WcStatus::RemAccessErr, WcStatus::WrFlushErr),
                    false => (WcStatus::Success, WcStatus::Success),
                };
                let done = pair.polled(0);
                assert_eq!(done, [(1, first), (2, second)], "{way:?} {index} {whole}");
                let event = Event::Async(AsyncEvent::QpAccessErr(qps[1]));
                assert_eq!(pair.hosts[1].events.contains(&event), fails, "{way:?} {index}");
            }
        }
        for whole in [false, true] {
            let (mut pair, qps) = connected(way);
            let there = pair.buffer_with(1, 64, of_others);
            flush(&mut pair, qps[0], 1, Flush { whole, ..range(&there, 8) });
            pair.run();
            assert_eq!(pair.polled(0), [(1, WcStatus::RemAccessErr)], "{way:?}");
        }
    }
}

#[test]
fn a_queue_pair_that_grants_no_flushes_takes_none() {
    for way in WAYS {
        let (mut pair, qps) = connected(way);
        let there = pair.buffer(1, 64);
        let attr = QpAttr { access: Access::REMOTE_WRITE, ..QpAttr::default() };
        let now = pair.now;
        let adapter = &mut pair.hosts[1].adapter;
        adapter.modify_qp(now, qps[1], &attr, QpAttrMask::ACCESS_FLAGS).unwrap();
        flush(&mut pair, qps[0], 1, range(&there, 64));
        pair.run();
        assert_eq!(pair.polled(0), [(1, WcStatus::RemInvReqErr)], "{way:?}");
        let event = Event::Async(AsyncEvent::QpReqErr(qps[1]));
        assert!(pair.hosts[1].events.contains(&event), "{way:?}");
    }
}

#[test]
fn windows_are_flushed_within_their_range() {
    for way in WAYS {
        let (mut pair, qps) = connected(way);
        let there = pair.buffer(1, 64);
        let host = &mut pair.hosts[1];
        let (mw, key) = host.adapter.alloc_mw(host.pd, WindowType::Two).unwrap();
        let rkey = key.0;
        let access = Access::FLUSH_GLOBAL;
        let (mr, addr) = (there.region.id, there.addr() + 8);
        let bind = BindMw { mw, rkey, mr, addr, len: 16, access };
        pair.send(1, qps[1], 1, SendOp::BindMw(bind), &[]);
        pair.run();
        assert_eq!(pair.polled(1), [(1, WcStatus::Success)]);
        let inside = Flush { addr, rkey, ..range(&there, 16) };
        flush(&mut pair, qps[0], 2, inside);
        flush(&mut pair, qps[0], 3, Flush { whole: true, ..inside });
        flush(&mut pair, qps[0], 4, Flush { len: 17, ..inside });
        pair.run();
        let (ok, wrong) = (WcStatus::Success, WcStatus::RemAccessErr);
        assert_eq!(pair.polled(0), [(2, ok), (3, ok), (4, wrong)], "{way:?}");
    }
}

#[test]
fn flushes_place_what_was_held_of_writes() {
    for way in [Way::Stream(usize::MAX), Way::LinkCopying] {
        let (mut pair, qps) = connected(way);
        pair.hosts[1].adapter.place_unordered(WriteOrder::Reverse, 5 * MS);
        let (here, there) = (pair.buffer(0, 64), pair.buffer(1, 64));
        here.fill(0, &[7; 64]);
        let write = SendOp::Write { addr: there.addr(), rkey: there.key() };
        pair.send(0, qps[0], 1, write, &[here.sge(0, 64)]);
        pair.run();
        assert_eq!(there.bytes(0, 8), [0; 8], "{way:?}");
        flush(&mut pair, qps[0], 2, range(&there, 64));
        pair.run();
        assert_eq!(there.bytes(0, 64), [7; 64], "{way:?}");
        let ok = WcStatus::Success;
        assert_eq!(pair.polled(0), [(1, ok), (2, ok)], "{way:?}");
    }
}

#[test]
fn a_plan_has_the_peer_refuse_a_flush() {
    for way in WAYS {
        let (mut pair, qps) = connected(way);
        let there = pair.buffer(1, 64);
        let (op, flags) = (SendOp::Flush(range(&there, 64)), SendFlags::SIGNALED);
        let wr = SendWr { wr_id: 1, to: To::Peer, op, flags, payload: Payload::Sges(&[]) };
        let (now, adapter) = (pair.now, &mut pair.hosts[0].adapter);
        let fate = Fate::Fail(WcStatus::RemAccessErr);
        adapter.post_send_fated(now, qps[0], &wr, fate).unwrap();
        adapter.ring_doorbell(now, qps[0]);
        pair.run();
        assert_eq!(pair.polled(0), [(1, WcStatus::RemAccessErr)], "{way:?}");
        let event = Event::Async(AsyncEvent::QpAccessErr(qps[1]));
        assert!(pair.hosts[1].events.contains(&event), "{way:?}");
    }
}

#[test]
fn flushes_that_mean_nothing_are_not_posted() {
    let (mut pair, qps) = connected(Way::Link);
    let there = pair.buffer(1, 64);
    let empty = Flush { placement: Placement::empty(), ..range(&there, 64) };
    let uc = pair.hosts[0].qp_with(|init| init.qp_type = QpType::Uc);
    let mut post = |qp, flush| {
        let (op, flags) = (SendOp::Flush(flush), SendFlags::SIGNALED);
        let wr = SendWr { wr_id: 1, to: To::Peer, op, flags, payload: Payload::Sges(&[]) };
        pair.hosts[0].adapter.post_send(qp, &wr)
    };
    assert!(matches!(post(qps[0], empty), Err(Fault::Invalid(_))));
    assert_eq!(post(uc, range(&there, 64)), Err(Fault::WrongState));
    for (placement, level) in [(0, 0), (4, 0), (1, 2), (255, 255)] {
        assert_eq!(Flush::of(0, 1, 2, placement, level), None);
    }
    assert_eq!(Flush::of(there.addr(), there.key(), 64, 1, 0), Some(range(&there, 64)));
}

/// Towards an older Quipu, which has not offered to take flushes, the request fails as one that makes no
/// sense to the peer, and nothing of it is said.
#[test]
fn a_peer_that_knows_no_flushes_is_asked_for_none() {
    for features in [Features::ALL, Features::QUIPU.with(Features::RFC7306)] {
        let mut pair = Pair::new(Way::Stream(usize::MAX));
        let qps = [pair.hosts[0].qp(), pair.hosts[1].qp()];
        pair.to_rtr(0, qps, &|_| {});
        pair.to_rts(0, qps[0], &|_| {});
        let Some(Action::Connect { conn, .. }) = pair.hosts[0].adapter.poll_action() else {
            panic!("it does not ask");
        };
        let now = pair.now;
        let adapter = &mut pair.hosts[0].adapter;
        adapter.handle_reached_stream(now, conn);
        let mut out = [0; 2000];
        let used = adapter.transmit(now, conn, &mut out);
        let mut responder = Responder::new();
        let (_, request) = responder.handle(&out[..used]).unwrap();
        let request = Hello::parse(&request.unwrap().private_data).unwrap();
        assert!(request.features.contains(Features::FLUSH));
        let answer = request.answer(Kind::Accept, features, 7, 7);
        responder.accept(Params::default(), &answer.to_bytes()).unwrap();
        let mut reply = [0; 500];
        let len = responder.poll_transmit(&mut reply);
        adapter.handle_stream(now, conn, &reply[..len]);
        let whole = Flush { addr: 0, rkey: 9, len: 0, whole: true, placement: Placement::GLOBAL };
        let (op, flags) = (SendOp::Flush(whole), SendFlags::SIGNALED);
        let wr = SendWr { wr_id: 1, to: To::Peer, op, flags, payload: Payload::Sges(&[]) };
        adapter.post_send(qps[0], &wr).unwrap();
        adapter.ring_doorbell(now, qps[0]);
        let used = adapter.transmit(now, conn, &mut out);
        let known = features.contains(Features::FLUSH);
        let asked = out[..used].get(3) == Some(&0x4e);
        assert_eq!(asked, known, "{:x?}", &out[..used]);
        let failed = [(1, WcStatus::RemInvReqErr)];
        assert_eq!(pair.polled(0), failed[usize::from(known)..]);
    }
}
