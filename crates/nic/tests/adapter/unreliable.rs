//! Unreliable connected queue pairs (IBA 9.8): whatever cannot be executed is dropped, the requester is told
//! nothing, and connections come and go unnoticed.

#![allow(clippy::needless_range_loop)]

use crate::pair::{Pair, WAYS, Way, statuses};
use quipu_iwarp::wire::control::Control;
use quipu_iwarp::wire::rdmap::{AtomicResponse, ReadRequest, UntaggedOp};
use quipu_iwarp::wire::{self, Stag};
use quipu_iwarp::{Negotiated, Sender};
use quipu_nic::mem::{Access, Key, Sge};
use quipu_nic::*;

const SECOND: u64 = 1_000_000_000;

pub fn unreliable(way: Way) -> (Pair, [QpId; 2]) {
    let mut pair = Pair::new(way);
    let qps = [0, 1].map(|host: usize| pair.hosts[host].qp_with(|init| init.qp_type = QpType::Uc));
    pair.connect(qps);
    (pair, qps)
}

/// Nothing was noticed but what `connect` may raise.
pub fn assert_quiet(pair: &Pair, qps: [QpId; 2]) {
    for host in 0..2 {
        let loud = |event: &&Event| {
            !matches!(event, Event::Completion { .. } | Event::Async(AsyncEvent::CommEst(_)))
        };
        assert_eq!(pair.hosts[host].events.iter().find(loud), None);
        assert_eq!(pair.state(host, qps[host]), QpState::Rts);
    }
}

use WcStatus::{LocProtErr, RetryExcErr, Success, WrFlushErr};

const SIZES: [usize; 9] = [0, 1, 96, 97, 4096, 16_385, 65_536, 100_000, 1 << 20];

#[test]
fn sends_and_writes_of_all_sizes() {
    for way in WAYS {
        let (mut pair, qps) = unreliable(way);
        let (from, to) = (pair.buffer(0, 1 << 20), pair.buffer(1, 1 << 20));
        let (addr, rkey) = (to.addr(), to.key());
        for (n, &len) in SIZES.iter().enumerate() {
            let ops = [
                SendOp::Send,
                SendOp::SendImm(7),
                SendOp::Write { addr, rkey },
                SendOp::WriteImm { addr, rkey, imm: 8 },
            ];
            for (kind, op) in ops.into_iter().enumerate() {
                let bytes: Vec<u8> = (0..len).map(|i| (i * 31 + n + kind * 7) as u8).collect();
                from.fill(0, &bytes);
                if kind != 2 {
                    pair.recv(1, qps[1], 100, &[to.sge(0, 1 << 20)]);
                }
                pair.send(0, qps[0], 1, op, &[from.sge(0, len)]);
                pair.run();
                assert_eq!(pair.polled(0), [(1, Success)], "{way:?} {op:?} {len}");
                let got: Vec<_> =
                    pair.hosts[1].poll().iter().map(|wc| (wc.extra, wc.byte_len)).collect();
                let expected = match kind {
                    0 => vec![(WcExtra::None, len as u32)],
                    1 => vec![(WcExtra::Imm(7), len as u32)],
                    2 => vec![],
                    _ => vec![(WcExtra::Imm(8), len as u32)],
                };
                assert_eq!(got, expected, "{way:?} {op:?} {len}");
                assert_eq!(to.bytes(0, len), bytes, "{way:?} {op:?} {len}");
            }
        }
        assert_quiet(&pair, qps);
    }
}

#[test]
fn operations_that_need_an_answer_cannot_be_posted() {
    let (mut pair, qps) = unreliable(Way::Link);
    let here = pair.buffer(0, 64);
    let (addr, rkey) = (0, 0);
    for op in [
        SendOp::SendInv(1),
        SendOp::Read { addr, rkey },
        SendOp::FetchAdd { addr, rkey, add: 1 },
        SendOp::CompareSwap { addr, rkey, compare: 0, swap: 0 },
    ] {
        let sges = [here.sge(0, 8)];
        let (flags, payload) = (SendFlags::SIGNALED, Payload::Sges(&sges));
        let wr = SendWr { wr_id: 1, to: To::Peer, op, flags, payload };
        let posted = pair.hosts[0].adapter.post_send(qps[0], &wr);
        assert!(matches!(posted, Err(Fault::Invalid(_))), "{op:?}");
    }
}

/// IBA 9.8.2: what arrives is executed in order. A write does not go directly while messages before it wait
/// to be executed.
#[test]
fn a_write_stays_behind_what_was_posted_before_it() {
    for way in WAYS {
        let (mut pair, qps) = unreliable(way);
        let (from, to) = (pair.buffer(0, 128), pair.buffer(1, 128));
        let (addr, rkey) = (to.addr(), to.key());
        for round in 0..3 {
            pair.recv(1, qps[1], 90, &[]);
            for (first, len) in [(true, 120), (false, 128)] {
                from.fill(0, &[2 * round + u8::from(!first); 128]);
                let imm = SendOp::WriteImm { addr, rkey, imm: 1 };
                let op = if first { imm } else { SendOp::Write { addr, rkey } };
                pair.send(0, qps[0], 1, op, &[from.sge(0, len)]);
            }
            pair.run();
            assert_eq!(to.bytes(0, 128), [2 * round + 1; 128], "{way:?}");
            pair.hosts[1].poll();
            pair.hosts[0].poll();
        }
    }
}

/// A message without a receive, one that does not fit, and one with a wrong key or without the right vanish.
/// The receive that was not filled is there for the next message.
#[test]
fn what_cannot_be_executed_is_dropped() {
    for way in WAYS {
        for len in [10, 200, 50_000] {
            let (mut pair, qps) = unreliable(way);
            let (from, to) = (pair.buffer(0, 50_000), pair.buffer(1, 50_000));
            let closed = pair.buffer_with(1, 64, Access::LOCAL_WRITE);
            from.fill(0, &[7; 50_000]);
            pair.send(0, qps[0], 1, SendOp::Send, &[from.sge(0, len)]);
            pair.run();
            pair.recv(1, qps[1], 90, &[to.sge(0, 5)]);
            pair.send(0, qps[0], 2, SendOp::SendImm(1), &[from.sge(0, len)]);
            let (addr, rkey) = (to.addr(), to.key() ^ 0x100);
            pair.send(0, qps[0], 3, SendOp::Write { addr, rkey }, &[from.sge(0, len)]);
            let op = SendOp::WriteImm { addr, rkey, imm: 1 };
            pair.send(0, qps[0], 4, op, &[from.sge(0, len)]);
            let (addr, rkey) = (closed.addr(), closed.key());
            pair.send(0, qps[0], 5, SendOp::Write { addr, rkey }, &[from.sge(0, len)]);
            let op = SendOp::WriteImm { addr, rkey, imm: 1 };
            pair.send(0, qps[0], 6, op, &[from.sge(0, len)]);
            pair.run();
            let sent = pair.polled(0);
            assert_eq!(sent, [1, 2, 3, 4, 5, 6].map(|wr_id| (wr_id, Success)), "{way:?} {len}");
            assert!(pair.hosts[1].poll().is_empty(), "{way:?} {len}");
            pair.send(0, qps[0], 7, SendOp::SendImm(2), &[from.sge(0, 5)]);
            pair.run();
            let got = pair.hosts[1].poll();
            assert_eq!(statuses(&got), [(90, Success)], "{way:?} {len}");
            assert_eq!((got[0].extra, got[0].byte_len), (WcExtra::Imm(2), 5));
            assert_eq!(to.bytes(0, 5), [7; 5]);
            assert_eq!(closed.bytes(0, 64), [0; 64]);
            assert_quiet(&pair, qps);
        }
    }
}

/// Without a receive for its immediate a write may have written, but completes nothing; an empty one is only
/// an immediate.
#[test]
fn immediates_without_a_receive_are_dropped() {
    for way in WAYS {
        let (mut pair, qps) = unreliable(way);
        let (from, to) = (pair.buffer(0, 4096), pair.buffer(1, 4096));
        let (addr, rkey) = (to.addr(), to.key());
        for len in [0, 50, 4096] {
            let op = SendOp::WriteImm { addr, rkey, imm: 1 };
            pair.send(0, qps[0], 1, op, &[from.sge(0, len)]);
            pair.run();
            pair.recv(1, qps[1], 9, &[]);
            pair.run();
            assert!(pair.hosts[1].poll().is_empty(), "{way:?} {len}");
            pair.send(0, qps[0], 2, op, &[from.sge(0, len)]);
            pair.run();
            let got: Vec<_> = pair.hosts[1].poll().iter().map(|wc| wc.byte_len).collect();
            assert_eq!(got, [len as u32], "{way:?} {len}");
            assert_eq!(pair.polled(0), [(1, Success), (2, Success)]);
        }
        assert_quiet(&pair, qps);
    }
}

/// A right that is missing at the queue pair drops as well.
#[test]
fn rights_of_the_queue_pair_count() {
    for way in WAYS {
        let (mut pair, qps) = unreliable(way);
        let (from, to) = (pair.buffer(0, 64), pair.buffer(1, 64));
        from.fill(0, &[9; 64]);
        let attr = QpAttr { access: Access::empty(), ..QpAttr::default() };
        let mask = QpAttrMask::ACCESS_FLAGS;
        pair.hosts[1].adapter.modify_qp(pair.now, qps[1], &attr, mask).unwrap();
        let (addr, rkey) = (to.addr(), to.key());
        pair.send(0, qps[0], 1, SendOp::Write { addr, rkey }, &[from.sge(0, 64)]);
        pair.run();
        assert_eq!(pair.polled(0), [(1, Success)], "{way:?}");
        assert_eq!(to.bytes(0, 64), [0; 64], "{way:?}");
        assert_quiet(&pair, qps);
    }
}

fn restart(pair: &mut Pair, qp: QpId) {
    let attr = QpAttr { state: QpState::Rts, cur_state: QpState::Sqe, ..QpAttr::default() };
    let mask = QpAttrMask::STATE | QpAttrMask::CUR_STATE;
    pair.hosts[0].adapter.modify_qp(pair.now, qp, &attr, mask).unwrap();
}

/// A request that fails on its own side stops the send queue only, until the program restarts it.
#[test]
fn a_local_error_leads_to_sqe_and_back() {
    for way in WAYS {
        let (mut pair, qps) = unreliable(way);
        let (from, to) = (pair.buffer(0, 64), pair.buffer(1, 64));
        for host in 0..2 {
            pair.recv(host, qps[host], 50, &[]);
            pair.recv(host, qps[host], 51, &[]);
        }
        let wrong = Sge { lkey: Key(0x7777), ..from.sge(0, 8) };
        pair.send(0, qps[0], 1, SendOp::Send, &[]);
        pair.send(0, qps[0], 2, SendOp::Send, &[wrong]);
        pair.send(0, qps[0], 3, SendOp::Send, &[]);
        pair.run();
        assert_eq!(pair.state(0, qps[0]), QpState::Sqe, "{way:?}");
        let done = pair.polled(0);
        assert_eq!(done, [(1, Success), (2, LocProtErr), (3, WrFlushErr)], "{way:?}");
        pair.send(0, qps[0], 4, SendOp::Send, &[]);
        assert_eq!(pair.polled(0), [(4, WrFlushErr)], "{way:?}");
        assert_eq!(pair.polled(1), [(50, Success)], "{way:?}");
        // What arrives is received all the same.
        pair.send(1, qps[1], 5, SendOp::Send, &[]);
        pair.run();
        assert_eq!(pair.polled(0), [(50, Success)], "{way:?}");
        restart(&mut pair, qps[0]);
        let (addr, rkey) = (to.addr(), to.key());
        from.fill(0, &[3; 8]);
        pair.send(0, qps[0], 6, SendOp::WriteImm { addr, rkey, imm: 1 }, &[from.sge(0, 8)]);
        pair.run();
        assert_eq!(pair.polled(0), [(6, Success)], "{way:?}");
        let got = pair.polled(1);
        assert_eq!(got, [(5, Success), (51, Success)], "{way:?}");
        assert_eq!(to.bytes(0, 8), [3; 8], "{way:?}");
        assert_quiet(&pair, qps);
    }
}

/// The same in the middle of a message: the peer drops what it has of it, and the next connection carries
/// what follows.
#[test]
fn a_message_that_is_cut_off_is_dropped() {
    let mut pair = Pair::new(Way::Stream(usize::MAX));
    pair.socket_bytes = 5000;
    let qps = [0, 1].map(|host: usize| pair.hosts[host].qp_with(|init| init.qp_type = QpType::Uc));
    pair.connect(qps);
    let (from, to) = (pair.buffer(0, 100_000), pair.buffer(1, 100_000));
    pair.recv(1, qps[1], 9, &[to.sge(0, 100_000)]);
    pair.send(0, qps[0], 1, SendOp::Send, &[from.sge(0, 100_000)]);
    let conn = pair.stream_ends()[0];
    let mut some = [0; 5000];
    assert!(pair.hosts[0].adapter.transmit(pair.now, conn, &mut some) > 0);
    pair.hosts[0].adapter.dereg_mr(pair.now, from.region.id).unwrap();
    pair.hosts[0].adapter.transmit(pair.now, conn, &mut some);
    pair.run();
    assert_eq!(pair.polled(0), [(1, LocProtErr)]);
    assert_eq!(pair.state(0, qps[0]), QpState::Sqe);
    pair.later(SECOND);
    restart(&mut pair, qps[0]);
    pair.send(0, qps[0], 2, SendOp::Send, &[]);
    pair.run();
    let got = pair.hosts[1].poll();
    assert_eq!((statuses(&got), got[0].byte_len), (vec![(9, Success)], 0));
    assert_quiet(&pair, qps);
}

/// A connection that is lost in the middle of a write with immediate data, which is two messages: it succeeds
/// all the same, wherever the cut is. (Found by `quipu sim --seed 588 --service uc`.)
#[test]
fn a_write_with_immediate_that_is_cut_off_succeeds() {
    for cut in 1..8 {
        let mut pair = Pair::new(Way::Stream(usize::MAX));
        pair.socket_bytes = 1;
        let qps =
            [0, 1].map(|host: usize| pair.hosts[host].qp_with(|init| init.qp_type = QpType::Uc));
        pair.connect(qps);
        let (from, to) = (pair.buffer(0, 5000), pair.buffer(1, 5000));
        let (addr, rkey) = (to.addr(), to.key());
        pair.send(0, qps[0], 1, SendOp::WriteImm { addr, rkey, imm: 1 }, &[from.sge(0, 5000)]);
        pair.send(0, qps[0], 2, SendOp::Send, &[]);
        let ends = pair.stream_ends();
        let mut some = [0; 1500];
        for _ in 0..cut {
            pair.hosts[0].adapter.transmit(pair.now, ends[0], &mut some);
        }
        for (host, end) in ends.into_iter().enumerate() {
            pair.hosts[host].adapter.handle_lost(pair.now, end, Loss::Closed);
        }
        pair.socket_bytes = usize::MAX;
        pair.recv(1, qps[1], 9, &[to.sge(0, 8)]);
        pair.later(3 * SECOND);
        assert_eq!(pair.polled(0), [(1, Success), (2, Success)], "{cut}");
        assert!(pair.hosts[1].poll().iter().all(|wc| wc.opcode == WcOpcode::Recv));
        assert_quiet(&pair, qps);
    }
}

/// While the peer is away what is posted succeeds, after a while at first and then at once. Once it is back,
/// messages arrive again.
#[test]
fn nothing_waits_for_a_peer_that_is_away() {
    for way in WAYS {
        for sender in 0..2 {
            let (mut pair, qps) = unreliable(way);
            let peer = 1 - sender;
            let now = pair.now;
            let attr = QpAttr { state: QpState::Reset, ..QpAttr::default() };
            pair.hosts[peer].adapter.modify_qp(now, qps[peer], &attr, QpAttrMask::STATE).unwrap();
            pair.run();
            pair.send(sender, qps[sender], 1, SendOp::Send, &[]);
            pair.later(3 * SECOND);
            assert_eq!(pair.polled(sender), [(1, Success)], "{way:?}");
            pair.send(sender, qps[sender], 2, SendOp::Send, &[]);
            assert_eq!(pair.polled(sender), [(2, Success)], "{way:?}");
            pair.to_rtr(peer, qps, &|_| {});
            pair.to_rts(peer, qps[peer], &|_| {});
            pair.recv(peer, qps[peer], 9, &[]);
            pair.later(SECOND);
            pair.send(sender, qps[sender], 3, SendOp::Send, &[]);
            pair.run();
            assert_eq!(pair.polled(sender), [(3, Success)], "{way:?}");
            assert_eq!(pair.polled(peer), [(9, Success)], "{way:?}");
            assert_quiet(&pair, qps);
        }
    }
}

/// A request that fails on its own side is found out also while the peer is away.
#[test]
fn local_errors_do_not_need_a_peer() {
    for way in WAYS {
        let mut pair = Pair::new(way);
        let uc = |init: &mut QpInit| init.qp_type = QpType::Uc;
        let qps = [pair.hosts[0].qp_with(uc), pair.hosts[1].qp_with(uc)];
        pair.to_rtr(0, qps, &|_| {});
        pair.to_rts(0, qps[0], &|_| {});
        let here = pair.buffer(0, 8);
        let wrong = Sge { lkey: Key(0x7777), ..here.sge(0, 8) };
        pair.send(0, qps[0], 1, SendOp::Send, &[here.sge(0, 8)]);
        let inline = Payload::Inline(&[1, 2]);
        pair.send_with(0, qps[0], 2, SendOp::Send, SendFlags::SIGNALED, inline);
        pair.send(0, qps[0], 3, SendOp::Send, &[wrong]);
        pair.send(0, qps[0], 4, SendOp::Send, &[]);
        pair.later(3 * SECOND);
        let done = pair.polled(0);
        let expected = [(1, Success), (2, Success), (3, LocProtErr), (4, WrFlushErr)];
        assert_eq!(done, expected, "{way:?}");
        assert_eq!(pair.state(0, qps[0]), QpState::Sqe);
    }
}

/// A peer on this host that takes nothing out of its ring makes nobody wait for ever.
#[test]
fn a_full_ring_is_given_up() {
    let (mut pair, qps) = unreliable(Way::LinkCopying);
    let from = pair.buffer(0, 64 << 10);
    let mut done = 0;
    for wr_id in 0..60 {
        pair.send(0, qps[0], wr_id, SendOp::Send, &[from.sge(0, 64 << 10)]);
        done += pair.hosts[0].poll().len();
    }
    assert!(done < 60, "the ring cannot hold them all");
    // Only this end gets to run.
    for _ in 0..3 {
        pair.now = pair.now.after(SECOND);
        pair.hosts[0].adapter.handle_timeout(pair.now);
        done += pair.hosts[0].poll().len();
    }
    assert_eq!(done, 60);
    assert_quiet(&pair, qps);
}

/// A bell that may begin a wait is told the time exactly: the last reading of an idle program is an hour old.
#[test]
fn the_wait_for_room_begins_now() {
    let (mut pair, qps) = unreliable(Way::LinkCopying);
    let from = pair.buffer(0, 64 << 10);
    let post = |pair: &mut Pair, len| {
        let sges = [from.sge(0, len)];
        let (flags, payload) = (SendFlags::empty(), Payload::Sges(&sges));
        let wr = SendWr { wr_id: 1, to: To::Peer, op: SendOp::Send, flags, payload };
        let adapter = &mut pair.hosts[0].adapter;
        adapter.post_send(qps[0], &wr).unwrap();
        adapter.doorbell_wants_time(qps[0])
    };
    assert!(!post(&mut pair, 8), "a small one is in the ring already");
    assert!(post(&mut pair, 64 << 10));
}

/// Queue pairs of different services do not find each other.
#[test]
fn services_do_not_mix() {
    for way in WAYS {
        for unreliable in 0..2 {
            let mut pair = Pair::new(way);
            let kind = |host| if host == unreliable { QpType::Uc } else { QpType::Rc };
            let qps = [0, 1].map(|host| pair.hosts[host].qp_with(|init| init.qp_type = kind(host)));
            pair.connect_with(qps, |attr| attr.timeout = 18);
            pair.recv(0, qps[0], 9, &[]);
            pair.recv(1, qps[1], 9, &[]);
            pair.send(0, qps[0], 1, SendOp::Send, &[]);
            pair.send(1, qps[1], 1, SendOp::Send, &[]);
            pair.later(100 * SECOND);
            let reliable = 1 - unreliable;
            assert_eq!(pair.polled(unreliable), [(1, Success)], "{way:?}");
            let failed = [(1, RetryExcErr), (9, WrFlushErr)];
            assert_eq!(pair.polled(reliable), failed, "{way:?}");
        }
    }
}

/// Two queue pairs of one adapter, and one that is its own peer.
#[test]
fn within_one_adapter() {
    let mut pair = Pair::new(Way::Link);
    let uc = |init: &mut QpInit| init.qp_type = QpType::Uc;
    let host = &mut pair.hosts[0];
    let (a, b, own) = (host.qp_with(uc), host.qp_with(uc), host.qp_with(uc));
    let elsewhere = pair.hosts[1].qp();
    let buffer = pair.buffer(0, 40_000);
    for (from, to) in [(a, b), (b, a), (own, own)] {
        let dest_qp_num = pair.hosts[0].adapter.query_qp(to).unwrap().num.0;
        let dgid = pair.hosts[0].adapter.config().gid;
        let peer = |attr: &mut QpAttr| {
            attr.dest_qp_num = dest_qp_num;
            attr.av.dgid = dgid;
        };
        pair.to_rtr(0, [from, elsewhere], &peer);
        pair.to_rts(0, from, &peer);
    }
    pair.run();
    for (from, to) in [(a, b), (b, a), (own, own)] {
        pair.send(0, from, 1, SendOp::Send, &[buffer.sge(0, 20_000)]);
        pair.run();
        assert_eq!(pair.polled(0), [(1, Success)]);
        pair.recv(0, to, 9, &[buffer.sge(20_000, 20_000)]);
        pair.send(0, from, 2, SendOp::Send, &[buffer.sge(0, 20_000)]);
        pair.run();
        let mut done = pair.polled(0);
        done.sort_by_key(|&(wr_id, _)| wr_id);
        assert_eq!(done, [(2, Success), (9, Success)]);
    }
    // One of them leaves; the other notices nothing.
    let now = pair.now;
    pair.hosts[0].adapter.destroy_qp(now, b).unwrap();
    pair.send(0, a, 3, SendOp::Send, &[]);
    pair.later(3 * SECOND);
    assert_eq!(pair.polled(0), [(3, Success)]);
    assert_eq!(pair.state(0, a), QpState::Rts);
}

/// A write beyond the end of the address space is a message that cannot be executed, like any other.
#[test]
fn writes_that_wrap_are_dropped() {
    for way in WAYS {
        for imm in [false, true] {
            let (mut pair, qps) = unreliable(way);
            let (from, to) = (pair.buffer(0, 512), pair.buffer(1, 512));
            let streams = pair.streams();
            pair.recv(1, qps[1], 7, &[]);
            let (addr, rkey) = (u64::MAX - 255, to.key());
            let op = match imm {
                true => SendOp::WriteImm { addr, rkey, imm: 1 },
                false => SendOp::Write { addr, rkey },
            };
            pair.send(0, qps[0], 1, op, &[from.sge(0, 512)]);
            pair.run();
            pair.send(0, qps[0], 2, SendOp::SendImm(2), &[]);
            pair.run();
            assert_eq!(pair.polled(0), [(1, Success), (2, Success)], "{way:?}");
            let got = pair.hosts[1].poll();
            assert_eq!(statuses(&got), [(7, Success)], "{way:?}");
            assert_eq!(got[0].extra, WcExtra::Imm(2), "{way:?}");
            assert_eq!(pair.streams(), streams, "{way:?}");
            assert_quiet(&pair, qps);
        }
    }
}

/// One FPDU of a message of fixed layout.
fn fpdu(op: UntaggedOp, payload: &impl wire::Payload) -> Vec<u8> {
    let mut sender = Sender::new(&Negotiated::plain(), 1000);
    let mut out = vec![0; 1500];
    let mut msg = sender.begin_untagged(op, 0);
    let len = sender.whole(&mut msg, &mut out, payload).expect("room");
    out.truncate(len);
    out
}

/// Unreliable connections acknowledge nothing: the field in which a Send would is reserved.
#[test]
fn the_field_of_an_acknowledgement_is_not_looked_at() {
    let (mut pair, qps) = unreliable(Way::Stream(usize::MAX));
    pair.recv(1, qps[1], 5, &[]);
    let (streams, mut out) = (pair.streams(), [0; 100]);
    let mut sender = Sender::new(&Negotiated::plain(), 1000);
    let mut msg = sender.begin_untagged(UntaggedOp::Send, 7);
    let staged = sender.segment(&mut msg, &mut out, 0, |_| {}).unwrap();
    pair.inject(1, &out[..staged.bytes]);
    pair.run();
    assert_eq!(pair.polled(1), [(5, Success)]);
    assert_eq!(pair.streams(), streams);
    let said = pair.said(1).len();
    pair.send(1, qps[1], 6, SendOp::Send, &[]);
    pair.run();
    assert_eq!(pair.said(1)[said + 4..said + 8], [0; 4]);
}

/// What an unreliable peer may not say ends the connection and nothing else; it is made again, at a pace that
/// keeps nobody busy.
#[test]
fn nonsense_costs_a_connection_only() {
    let ack = fpdu(UntaggedOp::Control, &Control::Ack { count: 0 });
    let read =
        ReadRequest { sink_stag: Stag(1), sink_to: 0, size: 8, source_stag: Stag(2), source_to: 0 };
    let word = fpdu(UntaggedOp::AtomicResponse, &AtomicResponse { id: 0, original: 0 });
    let read = fpdu(UntaggedOp::ReadRequest, &read);
    let garbage = vec![0; 64];
    for (bytes, survives) in [(ack, false), (word, false), (garbage, false), (read, true)] {
        let (mut pair, qps) = unreliable(Way::Stream(usize::MAX));
        let first = pair.stream_ends();
        for n in 0..5 {
            for host in 0..2 {
                pair.inject(host, &bytes);
            }
            pair.run();
            if survives {
                assert_eq!(pair.stream_ends(), first);
                break;
            }
            pair.later(99_000_000);
            assert_eq!(pair.streams(), n + 1, "not before its time");
            pair.later(2_000_000);
            assert_eq!(pair.streams(), n + 2);
        }
        pair.recv(1, qps[1], 9, &[]);
        pair.send(0, qps[0], 1, SendOp::Send, &[]);
        pair.run();
        assert_eq!(pair.polled(0), [(1, Success)]);
        assert_eq!(pair.polled(1), [(9, Success)]);
        assert_quiet(&pair, qps);
    }
}
