//! Every operation over every way, between two adapters.

use crate::pair::{Pair, TO_RTR, WAYS, Way, connected};
use quipu_nic::mem::{Access, Key, Sge};
use quipu_nic::*;

fn pattern(len: usize, seed: u8) -> Vec<u8> {
    (0..len).map(|i| (i as u8).wrapping_mul(31).wrapping_add(seed)).collect()
}

fn only(completions: Vec<Completion>) -> Completion {
    assert_eq!(completions.len(), 1, "{completions:?}");
    completions[0]
}

const SIZES: [usize; 15] =
    [0, 1, 8, 32, 33, 96, 97, 255, 4096, 8192, 16_384, 16_385, 65_536, 100_000, 1 << 20];

#[test]
fn sends_of_all_sizes() {
    for way in WAYS {
        let (mut pair, qps) = connected(way);
        let (from, to) = (pair.buffer(0, 1 << 20), pair.buffer(1, 1 << 20));
        for (n, &len) in SIZES.iter().enumerate() {
            let bytes = pattern(len, n as u8);
            from.fill(0, &bytes);
            pair.recv(1, qps[1], 100, &[to.sge(0, 1 << 20)]);
            pair.send(0, qps[0], 1, SendOp::Send, &[from.sge(0, len)]);
            pair.run();
            let received = only(pair.hosts[1].poll());
            assert_eq!(
                (received.wr_id, received.status, received.opcode, received.byte_len as usize),
                (100, WcStatus::Success, WcOpcode::Recv, len),
                "{way:?}"
            );
            assert_eq!(received.src_qp, pair.hosts[0].adapter.query_qp(qps[0]).unwrap().num);
            let sent = only(pair.hosts[0].poll());
            assert_eq!((sent.wr_id, sent.status), (1, WcStatus::Success), "{way:?} {len}");
            assert_eq!(to.bytes(0, len), bytes, "{way:?} {len}");
        }
    }
}

#[test]
fn sends_with_extras_and_inline() {
    for way in WAYS {
        let (mut pair, qps) = connected(way);
        let to = pair.buffer(1, 4096);
        for wr_id in 0..3 {
            pair.recv(1, qps[1], wr_id, &[to.sge(wr_id as usize * 300, 300)]);
        }
        let flags = SendFlags::SIGNALED | SendFlags::SOLICITED;
        let bytes = pattern(200, 3);
        let op = SendOp::SendImm(0xdead_beef);
        pair.send_with(0, qps[0], 1, op, flags, Payload::Inline(&bytes));
        let op = SendOp::Send;
        pair.send_with(0, qps[0], 2, op, SendFlags::empty(), Payload::Inline(&bytes[..5]));
        let op = SendOp::SendImm(7);
        pair.send_with(0, qps[0], 3, op, SendFlags::SIGNALED, Payload::Sges(&[]));
        pair.run();
        let received = pair.hosts[1].poll();
        let extras: Vec<_> = received.iter().map(|wc| (wc.extra, wc.byte_len)).collect();
        assert_eq!(
            extras,
            [(WcExtra::Imm(0xdead_beef), 200), (WcExtra::None, 5), (WcExtra::Imm(7), 0)]
        );
        assert_eq!(to.bytes(0, 200), bytes);
        assert_eq!(to.bytes(300, 5), &bytes[..5]);
        let sent: Vec<_> = pair.hosts[0].poll().iter().map(|wc| wc.wr_id).collect();
        assert_eq!(sent, [1, 3], "the unsignalled send completes silently");
    }
}

#[test]
fn writes_and_reads_of_all_sizes() {
    for way in WAYS {
        let (mut pair, qps) = connected(way);
        let (here, there) = (pair.buffer(0, 1 << 20), pair.buffer(1, 1 << 20));
        let back = pair.buffer(0, 1 << 20);
        for (n, &len) in SIZES.iter().enumerate() {
            let bytes = pattern(len, 50 + n as u8);
            here.fill(0, &bytes);
            let (addr, rkey) = (there.addr(), there.key());
            pair.send(0, qps[0], 1, SendOp::Write { addr, rkey }, &[here.sge(0, len)]);
            pair.run();
            assert_eq!(only(pair.hosts[0].poll()).status, WcStatus::Success, "{way:?} {len}");
            assert_eq!(there.bytes(0, len), bytes, "{way:?} {len}");
            pair.send(0, qps[0], 2, SendOp::Read { addr, rkey }, &[back.sge(0, len)]);
            pair.run();
            let read = only(pair.hosts[0].poll());
            assert_eq!((read.status, read.opcode), (WcStatus::Success, WcOpcode::RdmaRead));
            assert_eq!(back.bytes(0, len), bytes, "{way:?} {len}");
            assert!(pair.hosts[1].poll().is_empty());
        }
    }
}

#[test]
fn writes_with_immediate_consume_a_receive() {
    for way in WAYS {
        let (mut pair, qps) = connected(way);
        let (here, there) = (pair.buffer(0, 1 << 20), pair.buffer(1, 1 << 20));
        for len in [0, 5, 500, 50_000, 1 << 20] {
            let bytes = pattern(len, 9);
            here.fill(0, &bytes);
            pair.recv(1, qps[1], 3, &[]);
            let op = SendOp::WriteImm { addr: there.addr(), rkey: there.key(), imm: 77 };
            pair.send(0, qps[0], 1, op, &[here.sge(0, len)]);
            pair.run();
            let received = only(pair.hosts[1].poll());
            assert_eq!(
                (received.opcode, received.extra, received.byte_len as usize),
                (WcOpcode::RecvRdmaWithImm, WcExtra::Imm(77), len),
                "{way:?}"
            );
            assert_eq!(there.bytes(0, len), bytes);
            assert_eq!(only(pair.hosts[0].poll()).opcode, WcOpcode::RdmaWrite);
        }
    }
}

#[test]
fn atomics_return_the_original() {
    for way in WAYS {
        let (mut pair, qps) = connected(way);
        let (here, there) = (pair.buffer(0, 64), pair.buffer(1, 64));
        there.fill(8, &40u64.to_ne_bytes());
        let (addr, rkey) = (there.addr() + 8, there.key());
        pair.send(0, qps[0], 1, SendOp::FetchAdd { addr, rkey, add: 2 }, &[here.sge(0, 8)]);
        let op = SendOp::CompareSwap { addr, rkey, compare: 42, swap: 7 };
        pair.send(0, qps[0], 2, op, &[here.sge(8, 8)]);
        let op = SendOp::CompareSwap { addr, rkey, compare: 42, swap: 8 };
        pair.send(0, qps[0], 3, op, &[here.sge(16, 8)]);
        pair.run();
        let done: Vec<_> = pair.hosts[0].poll().iter().map(|wc| (wc.wr_id, wc.status)).collect();
        assert_eq!(done, [1, 2, 3].map(|wr_id| (wr_id, WcStatus::Success)), "{way:?}");
        let words: Vec<u64> =
            (0..3).map(|n| u64::from_ne_bytes(here.bytes(n * 8, 8).try_into().unwrap())).collect();
        assert_eq!(words, [40, 42, 7]);
        assert_eq!(there.bytes(8, 8), 7u64.to_ne_bytes());
    }
}

#[test]
fn many_elements_gather_and_scatter() {
    for way in WAYS {
        let (mut pair, qps) = connected(way);
        let (here, there) = (pair.buffer(0, 1 << 20), pair.buffer(1, 1 << 20));
        let bytes = pattern(1 << 20, 1);
        here.fill(0, &bytes);
        for unit in [1, 7, 1000, 30_000] {
            let cut = |buffer: &crate::pair::Buffer, unit: usize| -> Vec<Sge> {
                (0..30).map(|n| buffer.sge(n * unit + n, unit)).collect()
            };
            let list = cut(&here, unit);
            let expected: Vec<u8> =
                (0..30).flat_map(|n| bytes[n * unit + n..][..unit].to_vec()).collect();
            pair.recv(1, qps[1], 3, &cut(&there, unit));
            pair.send(0, qps[0], 1, SendOp::Send, &list);
            pair.run();
            assert_eq!(only(pair.hosts[1].poll()).byte_len as usize, 30 * unit, "{way:?} {unit}");
            only(pair.hosts[0].poll());
            let got: Vec<u8> = (0..30).flat_map(|n| there.bytes(n * unit + n, unit)).collect();
            assert!(got == expected, "{way:?} {unit}");
            let op = SendOp::Read { addr: there.addr(), rkey: there.key() };
            pair.send(0, qps[0], 2, op, &list);
            pair.run();
            assert_eq!(only(pair.hosts[0].poll()).status, WcStatus::Success);
            let got: Vec<u8> = (0..30).flat_map(|n| here.bytes(n * unit + n, unit)).collect();
            assert!(got == there.bytes(0, 30 * unit), "{way:?} {unit}");
            here.fill(0, &bytes);
        }
    }
}

#[test]
fn a_full_queue_of_requests_completes_in_order() {
    for way in WAYS {
        let (mut pair, qps) = connected(way);
        let (here, there) = (pair.buffer(0, 1 << 16), pair.buffer(1, 1 << 16));
        for round in 0..20 {
            for wr_id in 0..16 {
                pair.recv(1, qps[1], wr_id, &[there.sge(0, 4096)]);
            }
            let (addr, rkey) = (there.addr(), there.key());
            for n in 0..64u64 {
                let op = match n % 4 {
                    0 => SendOp::Send,
                    1 => SendOp::Write { addr, rkey },
                    2 => SendOp::Read { addr, rkey },
                    _ => SendOp::FetchAdd { addr, rkey, add: 1 },
                };
                let len = if n % 4 == 3 { 8 } else { (n as usize * 37 + round) % 4096 };
                pair.send(0, qps[0], n, op, &[here.sge(0, len)]);
            }
            pair.run();
            let done = pair.hosts[0].poll();
            let ids: Vec<u64> = done.iter().map(|wc| wc.wr_id).collect();
            assert_eq!(ids, (0..64).collect::<Vec<_>>(), "{way:?}");
            assert!(done.iter().all(|wc| wc.status == WcStatus::Success));
            assert_eq!(pair.hosts[1].poll().len(), 16);
        }
    }
}

#[test]
fn windows_bind_invalidate_and_are_checked() {
    for way in WAYS {
        let (mut pair, qps) = connected(way);
        let (here, there) = (pair.buffer(0, 4096), pair.buffer(1, 4096));
        let pd = pair.hosts[1].pd;
        let (mw, key) = pair.hosts[1].adapter.alloc_mw(pd, WindowType::Two).unwrap();
        let rkey = key.next_tag().0;
        let bind = BindMw {
            mw,
            rkey,
            mr: there.region.id,
            addr: there.addr() + 1024,
            len: 512,
            access: Access::REMOTE_WRITE,
        };
        pair.send(1, qps[1], 1, SendOp::BindMw(bind), &[]);
        pair.run();
        let bound = only(pair.hosts[1].poll());
        assert_eq!((bound.status, bound.opcode), (WcStatus::Success, WcOpcode::BindMw));
        here.fill(0, b"through the window");
        let op = SendOp::Write { addr: there.addr() + 1024, rkey };
        pair.send(0, qps[0], 2, op, &[here.sge(0, 18)]);
        pair.run();
        assert_eq!(only(pair.hosts[0].poll()).status, WcStatus::Success, "{way:?}");
        assert_eq!(there.bytes(1024, 18), b"through the window");
        pair.recv(1, qps[1], 5, &[]);
        pair.send(0, qps[0], 3, SendOp::SendInv(rkey), &[]);
        pair.run();
        assert_eq!(only(pair.hosts[1].poll()).extra, WcExtra::Invalidated(rkey));
        only(pair.hosts[0].poll());
        pair.send(0, qps[0], 4, op, &[here.sge(0, 18)]);
        pair.run();
        assert_eq!(only(pair.hosts[0].poll()).status, WcStatus::RemAccessErr, "{way:?}");
    }
}

#[test]
fn shared_receive_queue_serves_several_queue_pairs() {
    for way in WAYS {
        let mut pair = Pair::new(way);
        let pd = pair.hosts[1].pd;
        let srq = pair.hosts[1].adapter.create_srq(pd, 16, 2, 0).unwrap();
        let mine = [pair.hosts[0].qp(), pair.hosts[0].qp()];
        let theirs = [0, 1].map(|_| pair.hosts[1].qp_with(|init| init.srq = Some(srq)));
        for n in 0..2 {
            pair.connect([mine[n], theirs[n]]);
        }
        let (here, there) = (pair.buffer(0, 4096), pair.buffer(1, 4096));
        pair.hosts[1].adapter.modify_srq(srq, None, Some(2)).unwrap();
        for wr_id in 0..3 {
            let sge = there.sge(wr_id as usize * 100, 100);
            pair.hosts[1].adapter.post_srq_recv(pair.now, srq, wr_id, &[sge]).unwrap();
        }
        here.fill(0, b"from this onefrom that one");
        for (at, qp) in [(0, mine[0]), (13, mine[1]), (13, mine[1])] {
            pair.send(0, qp, 1, SendOp::Send, &[here.sge(at, 13)]);
            pair.run();
        }
        let received = pair.hosts[1].poll();
        let senders = [mine[0], mine[1], mine[1]].map(|qp| pair.number(0, qp));
        for (n, wc) in received.iter().enumerate() {
            assert_eq!((wc.wr_id, wc.byte_len, wc.src_qp), (n as u64, 13, senders[n]), "{way:?}");
        }
        assert_eq!(received.len(), 3);
        assert_eq!(there.bytes(0, 13), b"from this one");
        assert_eq!(there.bytes(200, 13), b"from that one");
        let limit = Event::Async(AsyncEvent::SrqLimitReached(srq));
        assert_eq!(pair.hosts[1].events.iter().filter(|&&e| e == limit).count(), 1);
    }
}

#[test]
fn a_shared_receive_queue_does_not_shrink_below_a_limit_that_is_armed() {
    let mut pair = Pair::new(Way::Link);
    let host = &mut pair.hosts[0];
    let srq = host.adapter.create_srq(host.pd, 8, 1, 0).unwrap();
    host.adapter.modify_srq(srq, None, Some(3)).unwrap();
    assert!(matches!(host.adapter.modify_srq(srq, Some(2), None), Err(Fault::Invalid(_))));
    let (size, _, limit) = host.adapter.query_srq(srq).unwrap();
    assert!(size >= 8 && limit == 3, "nothing has changed: {size}, {limit}");
    // Both at once may: the limit that counts is the new one.
    host.adapter.modify_srq(srq, Some(2), Some(1)).unwrap();
    host.adapter.modify_srq(srq, Some(1), None).unwrap();
}

#[test]
fn queue_pairs_of_one_adapter_and_one_connected_to_itself() {
    let mut pair = Pair::new(Way::Stream(usize::MAX));
    for alone in [false, true] {
        let a = pair.hosts[0].qp();
        let b = if alone { a } else { pair.hosts[0].qp() };
        let gid = pair.hosts[0].adapter.config().gid;
        for (own, other) in [(a, b), (b, a)].into_iter().take(if alone { 1 } else { 2 }) {
            let dest = pair.hosts[0].adapter.query_qp(other).unwrap().num;
            pair.to_init(0, own);
            let attr = QpAttr {
                state: QpState::Rtr,
                path_mtu: 5,
                dest_qp_num: dest.0,
                rq_psn: 7,
                max_dest_rd_atomic: 4,
                min_rnr_timer: 1,
                av: AddressVector { dgid: gid, is_global: true, ..AddressVector::default() },
                ..QpAttr::default()
            };
            pair.hosts[0].adapter.modify_qp(pair.now, own, &attr, TO_RTR).unwrap();
            pair.to_rts(0, own, &|_: &mut QpAttr| {});
        }
        let later = pair.now.after(10_000_000);
        pair.run_until(later);
        let buffer = pair.buffer(0, 1 << 20);
        for len in [10, 1000, 300_000] {
            let bytes = pattern(len, 5);
            buffer.fill(0, &bytes);
            pair.recv(0, b, 8, &[buffer.sge(500_000, 400_000)]);
            pair.send(0, a, 9, SendOp::Send, &[buffer.sge(0, len)]);
            let op = SendOp::Read { addr: buffer.addr(), rkey: buffer.key() };
            pair.send(0, a, 10, op, &[buffer.sge(900_000, 8)]);
            pair.run();
            let mut done: Vec<_> =
                pair.hosts[0].poll().iter().map(|wc| (wc.wr_id, wc.status)).collect();
            done.sort_by_key(|done| done.0);
            assert_eq!(done, [8, 9, 10].map(|id| (id, WcStatus::Success)), "alone: {alone}");
            assert!(buffer.bytes(500_000, len) == bytes);
        }
    }
}

fn signaled(op: SendOp, payload: Payload<'_>) -> SendWr<'_> {
    SendWr { wr_id: 1, to: To::Peer, op, flags: SendFlags::SIGNALED, payload }
}

#[test]
fn small_sends_are_posted_and_rung_in_one() {
    for way in WAYS {
        let (mut pair, qps) = connected(way);
        let (from, to) = (pair.buffer(0, 4096), pair.buffer(1, 4096));
        let linked = !matches!(way, Way::Stream(_));
        from.fill(0, b"registered");
        for (op, payload, bytes) in [
            (SendOp::Send, Payload::Sges(&[from.sge(0, 10)]), &b"registered"[..]),
            (SendOp::SendImm(7), Payload::Inline(b"inline"), &b"inline"[..]),
            (SendOp::Send, Payload::Sges(&[]), &b""[..]),
        ] {
            pair.recv(1, qps[1], 10, &[to.sge(0, 64)]);
            let before = pair.hosts[0].adapter.counters().doorbells;
            let posted =
                pair.hosts[0].adapter.post_at_once(pair.now, qps[0], &signaled(op, payload));
            assert_eq!(posted, linked, "{way:?} {op:?}");
            if !posted {
                pair.send_with(0, qps[0], 1, op, SendFlags::SIGNALED, payload);
            }
            assert_eq!(pair.hosts[0].adapter.counters().doorbells, before + 1);
            pair.run();
            assert_eq!(pair.polled(0), [(1, WcStatus::Success)]);
            assert_eq!(pair.polled(1), [(10, WcStatus::Success)]);
            assert_eq!(to.bytes(0, bytes.len()), bytes);
        }
    }
}

/// A queue that is filled by each request has room again once the completion was taken, and only then.
#[test]
fn a_send_queue_of_one_entry_posts_at_once() {
    for way in WAYS {
        let mut pair = Pair::new(way);
        let qps = [0, 1].map(|host| pair.hosts[host].qp_with(|init| init.cap.max_send_wr = 1));
        pair.connect(qps);
        let to = pair.buffer(1, 64);
        let send = signaled(SendOp::Send, Payload::Inline(b"x"));
        let post = |pair: &mut Pair| {
            let (now, adapter) = (pair.now, &mut pair.hosts[0].adapter);
            match way {
                Way::Stream(_) => adapter.post_to_stream(qps[0], &send),
                _ => adapter.post_at_once(now, qps[0], &send),
            }
        };
        for round in 0..4 {
            pair.recv(1, qps[1], round, &[to.sge(0, 64)]);
            assert!(post(&mut pair), "{way:?} round {round}");
            pair.run();
            assert!(!post(&mut pair), "{way:?}: not taken");
            let more = pair.hosts[0].adapter.post_send(qps[0], &send);
            assert_eq!(more, Err(Fault::QueueFull), "{way:?}");
            assert_eq!(pair.polled(0), [(1, WcStatus::Success)], "{way:?}");
            assert_eq!(pair.polled(1), [(round, WcStatus::Success)], "{way:?}");
        }
    }
}

#[test]
fn writes_and_reads_of_one_piece_are_executed_while_they_are_posted() {
    for way in WAYS {
        let (mut pair, qps) = connected(way);
        let (own, other) = (pair.buffer(0, 4096), pair.buffer(1, 4096));
        let (addr, rkey) = (other.addr(), other.key());
        own.fill(0, b"written");
        other.fill(1000, b"read");
        let (write, read) = ([own.sge(0, 7)], [own.sge(2000, 4)]);
        for (op, list, signaled) in [
            (SendOp::Write { addr, rkey }, &write, true),
            (SendOp::Write { addr: addr + 100, rkey }, &write, false),
            (SendOp::Read { addr: addr + 1000, rkey }, &read, true),
        ] {
            let flags = if signaled { SendFlags::SIGNALED } else { SendFlags::empty() };
            let wr = SendWr { wr_id: 1, to: To::Peer, op, flags, payload: Payload::Sges(list) };
            let before = pair.hosts[0].adapter.counters().doorbells;
            let posted = pair.hosts[0].adapter.post_at_once(pair.now, qps[0], &wr);
            assert_eq!(posted, matches!(way, Way::Link), "{way:?} {op:?}");
            if !posted {
                pair.send_with(0, qps[0], 1, op, flags, wr.payload);
                pair.run();
            }
            assert_eq!(pair.hosts[0].adapter.counters().doorbells, before + 1);
            let done = if signaled { &[(1, WcStatus::Success)][..] } else { &[] };
            assert_eq!(pair.polled(0), done, "{way:?} {op:?}: at once, where it is posted at once");
        }
        assert_eq!(
            (other.bytes(0, 7), other.bytes(100, 7)),
            (b"written".into(), b"written".into())
        );
        assert_eq!(own.bytes(2000, 4), b"read");
        let counters = pair.hosts[0].adapter.queue_pairs().next().unwrap().counters.requester;
        assert_eq!((counters.writes, counters.reads, counters.bytes), (2, 1, 18), "{way:?}");
    }
}

#[test]
fn writes_and_reads_do_not_overtake_what_the_peer_is_to_execute() {
    let (mut pair, qps) = connected(Way::Link);
    let (own, other) = (pair.buffer(0, 4096), pair.buffer(1, 4096));
    let (addr, rkey) = (other.addr(), other.key());
    let list = [own.sge(0, 8)];
    let payload = Payload::Sges(&list);
    let send = signaled(SendOp::Send, payload);
    let write = SendWr { wr_id: 2, ..signaled(SendOp::Write { addr, rkey }, payload) };
    pair.recv(1, qps[1], 10, &[other.sge(1000, 8)]);
    assert!(pair.hosts[0].adapter.post_at_once(pair.now, qps[0], &send));
    assert!(
        !pair.hosts[0].adapter.post_at_once(pair.now, qps[0], &write),
        "the send is not executed"
    );
    pair.run();
    // What was asked of the peer is executed, and acknowledged or not: the next one is not held up.
    assert!(pair.hosts[0].adapter.post_at_once(pair.now, qps[0], &write));
    pair.run();
    assert_eq!(pair.polled(0), [(1, WcStatus::Success), (2, WcStatus::Success)]);
    // A queue that is full of completions nobody has polled ends the queue pair, as behind any request.
    let cq = pair.hosts[0].cq;
    pair.hosts[0].adapter.resize_cq(cq, 8).unwrap();
    let state = |pair: &Pair| pair.hosts[0].adapter.query_qp(qps[0]).unwrap().attr.state;
    while pair.hosts[0].adapter.post_at_once(pair.now, qps[0], &write)
        && state(&pair) == QpState::Rts
    {}
    assert_eq!(state(&pair), QpState::Err);
}

#[test]
fn all_else_is_not_posted_at_once() {
    for way in WAYS {
        let (mut pair, qps) = connected(way);
        let (from, to) = (pair.buffer(0, 4096), pair.buffer(1, 4096));
        let (addr, rkey) = (to.addr(), to.key());
        let (short, long, whole) = ([from.sge(0, 8)], [from.sge(0, 97)], [from.sge(0, 4096)]);
        let unknown = [Sge { lkey: Key(0x7777_0000), ..short[0] }];
        let small = signaled(SendOp::Send, Payload::Sges(&short));
        let fresh = pair.hosts[0].qp();
        let to_another = To::Datagram { ah: AhId(1), qpn: 1, qkey: 1 };
        for (qp, wr) in [
            (qps[0], SendWr { payload: Payload::Sges(&long), ..small }),
            (qps[0], SendWr { payload: Payload::Sges(&unknown), ..small }),
            (qps[0], SendWr { op: SendOp::Write { addr, rkey: 0x7777_0000 }, ..small }),
            (qps[0], SendWr { op: SendOp::FetchAdd { addr, rkey, add: 1 }, ..small }),
            (qps[0], SendWr { to: to_another, ..small }),
            (fresh, small),
            (QpId(0), small),
        ] {
            assert!(!pair.hosts[0].adapter.post_at_once(pair.now, qp, &wr), "{way:?} {wr:?}");
        }
        pair.run();
        assert!(pair.polled(0).is_empty() && pair.polled(1).is_empty());
        assert_eq!(pair.hosts[0].adapter.counters().doorbells, 0);
        // Nor what would overtake others.
        for wr_id in [11, 12] {
            pair.recv(1, qps[1], wr_id, &[to.sge(0, 4096)]);
        }
        let large = SendWr { wr_id: 2, payload: Payload::Sges(&whole), ..small };
        pair.hosts[0].adapter.post_send(qps[0], &large).unwrap();
        assert!(!pair.hosts[0].adapter.post_at_once(pair.now, qps[0], &small));
        pair.send(0, qps[0], 1, SendOp::Send, &short);
        pair.run();
        assert_eq!(pair.polled(0), [(2, WcStatus::Success), (1, WcStatus::Success)]);
        let lengths: Vec<_> = pair.hosts[1].poll().iter().map(|wc| wc.byte_len).collect();
        assert_eq!(lengths, [4096, 8]);
    }
}

#[test]
fn requests_over_streams_are_posted_and_rung_in_one() {
    for way in WAYS {
        let (mut pair, qps) = connected(way);
        let (from, to) = (pair.buffer(0, 4096), pair.buffer(1, 4096));
        let over_stream = matches!(way, Way::Stream(_));
        from.fill(0, b"registered");
        let (short, whole) = ([from.sge(0, 10)], [from.sge(0, 4096)]);
        let write = SendOp::Write { addr: to.addr(), rkey: to.key() };
        for (op, payload, received) in [
            (SendOp::Send, Payload::Sges(&short), Some(10)),
            (SendOp::SendImm(7), Payload::Inline(b"inline"), Some(6)),
            (SendOp::Send, Payload::Sges(&[from.sge(0, 4), from.sge(4, 6)]), Some(10)),
            (SendOp::Send, Payload::Sges(&[]), Some(0)),
            (SendOp::Send, Payload::Sges(&whole), Some(4096)),
            (write, Payload::Sges(&short), None),
        ] {
            pair.recv(1, qps[1], 10, &[to.sge(0, 4096)]);
            let before = pair.hosts[0].adapter.counters().doorbells;
            let posted = pair.hosts[0].adapter.post_to_stream(qps[0], &signaled(op, payload));
            assert_eq!(posted, over_stream, "{way:?} {op:?}");
            if !posted {
                pair.send_with(0, qps[0], 1, op, SendFlags::SIGNALED, payload);
            }
            assert_eq!(pair.hosts[0].adapter.counters().doorbells, before + 1);
            pair.run();
            assert_eq!(pair.polled(0), [(1, WcStatus::Success)], "{way:?} {op:?}");
            let lengths: Vec<_> = pair.hosts[1].poll().iter().map(|wc| wc.byte_len).collect();
            assert_eq!(lengths, Vec::from_iter(received), "{way:?} {op:?}");
        }
    }
}

#[test]
fn what_may_not_be_posted_is_not_posted_to_a_stream() {
    let (mut pair, qps) = connected(Way::Stream(usize::MAX));
    let from = pair.buffer(0, 4096);
    let short = [from.sge(0, 8)];
    let small = signaled(SendOp::Send, Payload::Sges(&short));
    let fresh = pair.hosts[0].qp();
    let (many, long) = ([short[0]; 64], [0; 4096]);
    let to_another = To::Datagram { ah: AhId(1), qpn: 1, qkey: 1 };
    for (qp, wr) in [
        (qps[0], SendWr { payload: Payload::Sges(&many), ..small }),
        (qps[0], SendWr { payload: Payload::Inline(&long), ..small }),
        (qps[0], SendWr { to: to_another, ..small }),
        (fresh, small),
        (QpId(0), small),
    ] {
        assert!(!pair.hosts[0].adapter.post_to_stream(qp, &wr), "{wr:?}");
    }
    assert_eq!(pair.hosts[0].adapter.counters().doorbells, 0);
    // Nor more than there is room for.
    let adapter = &mut pair.hosts[0].adapter;
    let posted = (0..).take_while(|_| adapter.post_to_stream(qps[0], &small)).count();
    assert_eq!(adapter.post_send(qps[0], &small), Err(Fault::QueueFull));
    pair.run();
    assert_eq!(pair.hosts[0].adapter.counters().doorbells, posted as u64);
}

/// A program that posts what is not registered sends nothing of it, by whichever way it was posted, and what
/// was posted before completes first.
#[test]
fn a_small_request_with_a_wrong_key_fails_before_it_begins() {
    for way in WAYS {
        let (mut pair, qps) = connected(way);
        let (from, to) = (pair.buffer(0, 4096), pair.buffer(1, 4096));
        let right = [from.sge(0, 8)];
        for wr_id in [11, 12] {
            pair.recv(1, qps[1], wr_id, &[to.sge(0, 8)]);
        }
        for (wr_id, list) in [(1, right), (2, [Sge { lkey: Key(0x7777_0000), ..right[0] }])] {
            let wr = SendWr { wr_id, ..signaled(SendOp::Send, Payload::Sges(&list)) };
            let adapter = &mut pair.hosts[0].adapter;
            if !adapter.post_to_stream(qps[0], &wr) {
                pair.send(0, qps[0], wr_id, SendOp::Send, &list);
            }
        }
        pair.run();
        let failed = [(1, WcStatus::Success), (2, WcStatus::LocProtErr)];
        assert_eq!(pair.polled(0), failed, "{way:?}");
        assert_eq!(pair.polled(1).first(), Some(&(11, WcStatus::Success)), "{way:?}");
    }
}
