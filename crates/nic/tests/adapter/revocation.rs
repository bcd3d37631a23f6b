//! What is taken back is not touched any more: memory that completions have returned, queue pairs that are
//! gone, rights that are withdrawn. All of it is between peers on one host, which reach each other's memory.

use std::sync::atomic::Ordering;

use crate::pair::{ALL_ACCESS, Pair, WAYS, Way, connected, connected_with};
use quipu_nic::*;

/// Where the guard word of a segment's owner is (`specs/quipu-channel.md`).
const GUARD_AT: usize = 128;
const LARGE: usize = 200_000;

fn set_state(pair: &mut Pair, host: usize, qp: QpId, state: QpState) {
    let attr = QpAttr { state, ..QpAttr::default() };
    pair.hosts[host].adapter.modify_qp(pair.now, qp, &attr, QpAttrMask::STATE).unwrap();
}

/// Host `host` is, or is no longer, in the middle of an access to the other's memory.
fn set_guard(pair: &Pair, host: usize, odd: bool) {
    pair.segments[host].u32_at(GUARD_AT).unwrap().store(u32::from(odd), Ordering::SeqCst);
}

/// A send and a read by reference wait at the peer. Their requester ends, sees the flush, and uses the memory
/// for something else; then the peer gets a receive.
#[test]
fn flushed_requests_refer_to_nothing() {
    let (mut pair, qps) = connected(Way::Link);
    let (source, sink) = (pair.buffer(0, LARGE), pair.buffer(0, LARGE));
    let there = pair.buffer(1, LARGE);
    there.fill(0, &[7; LARGE]);
    let read = SendOp::Read { addr: there.addr(), rkey: there.key() };
    pair.send(0, qps[0], 1, SendOp::Send, &[source.sge(0, LARGE)]);
    pair.send(0, qps[0], 2, read, &[sink.sge(0, LARGE)]);
    pair.run();
    set_state(&mut pair, 0, qps[0], QpState::Err);
    let flushed = [(1, WcStatus::WrFlushErr), (2, WcStatus::WrFlushErr)];
    assert_eq!(pair.polled(0), flushed);
    source.fill(0, &[9; LARGE]);
    // The peer has not heard of it yet.
    pair.recv(1, qps[1], 3, &[there.sge(0, LARGE)]);
    pair.hosts[1].adapter.progress(pair.now);
    assert_eq!(
        there.bytes(0, LARGE),
        vec![7; LARGE],
        "nothing is read from memory that was returned"
    );
    assert_eq!(sink.bytes(0, LARGE), vec![0; LARGE], "nothing is written into it");
    pair.run();
    assert_eq!(pair.polled(1), []);
    assert_eq!(sink.bytes(0, LARGE), vec![0; LARGE]);
}

/// Neither a queue pair that is gone nor one without the right is written or read directly.
#[test]
fn rights_end_when_they_are_withdrawn() {
    type Change = fn(&mut Pair, QpId);
    let no_rights: Change = |pair, qp| {
        let attr = QpAttr { access: quipu_nic::mem::Access::empty(), ..QpAttr::default() };
        pair.hosts[1].adapter.modify_qp(pair.now, qp, &attr, QpAttrMask::ACCESS_FLAGS).unwrap();
    };
    let error: Change = |pair, qp| set_state(pair, 1, qp, QpState::Err);
    let reset: Change = |pair, qp| set_state(pair, 1, qp, QpState::Reset);
    let destroy: Change = |pair, qp| pair.hosts[1].adapter.destroy_qp(pair.now, qp).unwrap();
    for (change, expected) in [
        (no_rights, WcStatus::RemInvReqErr),
        (error, WcStatus::RetryExcErr),
        (reset, WcStatus::RetryExcErr),
        (destroy, WcStatus::RetryExcErr),
    ] {
        let (mut pair, qps) = connected(Way::Link);
        let (here, there) = (pair.buffer(0, LARGE), pair.buffer_with(1, LARGE, ALL_ACCESS));
        here.fill(0, &[5; LARGE]);
        let write = SendOp::Write { addr: there.addr(), rkey: there.key() };
        pair.send(0, qps[0], 1, write, &[here.sge(0, 100)]);
        assert_eq!(pair.polled(0), [(1, WcStatus::Success)]);
        change(&mut pair, qps[1]);
        // The writer has not heard of it yet.
        pair.send(0, qps[0], 2, write, &[here.sge(0, LARGE)]);
        assert_eq!(there.bytes(100, LARGE - 100), vec![0; LARGE - 100]);
        pair.later(1_000_000_000);
        assert_eq!(pair.polled(0), [(2, expected)]);
        assert_eq!(there.bytes(100, LARGE - 100), vec![0; LARGE - 100]);
    }
}

/// However far the connection is, which one of them asks for and the other one grants.
#[test]
fn rights_end_when_they_are_withdrawn_before_the_connection_is_made() {
    for (owner, other) in [(0, 1), (1, 0)] {
        for steps in 0.. {
            let mut pair = Pair::new(Way::Link);
            let qps = [0, 1].map(|host| pair.hosts[host].qp());
            let same = |_: &mut QpAttr| {};
            (0..2).for_each(|host| pair.to_rtr(host, qps, &same));
            (0..2).for_each(|host| pair.to_rts(host, qps[host], &same));
            let there = pair.buffer_with(owner, LARGE, ALL_ACCESS);
            let here = pair.buffer(other, LARGE);
            here.fill(0, &[5; LARGE]);
            let over = (0..steps).any(|_| !pair.step());
            let attr = QpAttr { access: quipu_nic::mem::Access::empty(), ..QpAttr::default() };
            let mask = QpAttrMask::ACCESS_FLAGS;
            pair.hosts[owner].adapter.modify_qp(pair.now, qps[owner], &attr, mask).unwrap();
            let write = SendOp::Write { addr: there.addr(), rkey: there.key() };
            pair.send(other, qps[other], 1, write, &[here.sge(0, LARGE)]);
            pair.later(10_000_000_000);
            let refused = [(1, WcStatus::RemInvReqErr)];
            assert_eq!(pair.polled(other), refused, "of host {owner}, after {steps} steps");
            assert_eq!(there.bytes(0, LARGE), vec![0; LARGE]);
            if over {
                break;
            }
        }
    }
}

/// The peer may grant a request that it finds when its link is cut already.
#[test]
fn rights_end_with_the_link_by_which_a_channel_was_asked_for() {
    let mut pair = Pair::new(Way::Link);
    let qps = [0, 1].map(|host| pair.hosts[host].qp());
    let there = pair.buffer_with(0, LARGE, ALL_ACCESS);
    let here = pair.buffer(1, LARGE);
    here.fill(0, &[5; LARGE]);
    pair.stopped = Some(1);
    pair.to_rtr(0, qps, &|_| {});
    pair.run();
    let link = pair.link()[0];
    pair.hosts[0].adapter.handle_link_down(pair.now, link);
    pair.stopped = Some(0);
    pair.to_rtr(1, qps, &|_| {});
    pair.to_rts(1, qps[1], &|_| {});
    pair.run();
    let write = SendOp::Write { addr: there.addr(), rkey: there.key() };
    pair.send(1, qps[1], 1, write, &[here.sge(0, LARGE)]);
    pair.run();
    assert_eq!(pair.polled(1), []);
    assert_eq!(there.bytes(0, LARGE), vec![0; LARGE]);
}

/// Where neither enters the memory of the other there is nothing to wait for, whatever the peer's word says.
#[test]
fn nobody_waits_for_a_peer_that_has_no_access() {
    let (mut pair, qps) = connected(Way::LinkCopying);
    let source = pair.buffer(0, LARGE);
    pair.recv(0, qps[0], 2, &[]);
    set_guard(&pair, 1, true);
    pair.hosts[0].adapter.dereg_mr(pair.now, source.region.id).unwrap();
    assert!(pair.hosts[0].adapter.memory_is_quiet());
    set_state(&mut pair, 0, qps[0], QpState::Err);
    assert!(pair.hosts[0].adapter.memory_is_quiet());
    assert_eq!(pair.polled(0), [(2, WcStatus::WrFlushErr)]);
}

/// A responder that was given no resources has no answers, nor may it be read without being asked.
#[test]
fn who_owes_no_answers_is_asked_for_none() {
    for way in [WAYS.as_slice(), &[Way::LinkMapped]].concat() {
        for read in [true, false] {
            let (mut pair, qps) = connected_with(way, |attr| attr.max_dest_rd_atomic = 0);
            let (here, there) = (pair.buffer(0, 64), pair.buffer_with(1, 64, ALL_ACCESS));
            there.fill(0, &[7; 64]);
            let (addr, rkey) = (there.addr(), there.key());
            let write = SendOp::Write { addr: addr + 8, rkey };
            pair.send(0, qps[0], 1, write, &[here.sge(8, 8)]);
            let op = match read {
                true => SendOp::Read { addr, rkey },
                false => SendOp::FetchAdd { addr, rkey, add: 1 },
            };
            pair.send(0, qps[0], 2, op, &[here.sge(0, 8)]);
            pair.later(1_000_000_000);
            let expected = [(1, WcStatus::Success), (2, WcStatus::RemInvReqErr)];
            assert_eq!(pair.polled(0), expected, "{way:?}");
            assert_eq!((here.bytes(0, 8), there.bytes(0, 8)), (vec![0; 8], vec![7; 8]));
        }
    }
}

/// While the peer is in the middle of an access, nothing is flushed; then everything is.
#[test]
fn completions_wait_for_the_access_under_way() {
    let (mut pair, qps) = connected(Way::Link);
    let source = pair.buffer(0, LARGE);
    pair.send(0, qps[0], 1, SendOp::Send, &[source.sge(0, LARGE)]);
    pair.recv(0, qps[0], 2, &[]);
    pair.run();
    set_guard(&pair, 1, true);
    set_state(&mut pair, 0, qps[0], QpState::Err);
    assert!(!pair.hosts[0].adapter.memory_is_quiet());
    pair.recv(0, qps[0], 3, &[]);
    pair.run_until(Time(pair.now.0 + 1_000_000));
    assert_eq!(pair.polled(0), []);
    set_guard(&pair, 1, false);
    pair.run_until(Time(pair.now.0 + 1_000_000));
    let flushed = [1, 2, 3].map(|id| (id, WcStatus::WrFlushErr));
    assert_eq!(pair.polled(0), flushed);
    assert!(pair.hosts[0].adapter.memory_is_quiet());
}

/// A peer that stays in the middle of an access for ever is cut off.
#[test]
fn a_peer_that_never_lets_go_is_cut_off() {
    let (mut pair, qps) = connected(Way::Link);
    let source = pair.buffer(0, LARGE);
    pair.send(0, qps[0], 1, SendOp::Send, &[source.sge(0, LARGE)]);
    pair.run();
    set_guard(&pair, 1, true);
    set_state(&mut pair, 0, qps[0], QpState::Err);
    pair.run_until(Time(pair.now.0 + 4_000_000_000));
    assert_eq!(pair.polled(0), []);
    pair.run_until(Time(pair.now.0 + 2_000_000_000));
    assert_eq!(pair.polled(0), [(1, WcStatus::WrFlushErr)]);
}

/// A message of many megabytes is moved in pieces, between which the adapter does other things.
#[test]
fn large_writes_take_turns() {
    const HUGE: usize = 5 << 20;
    let (mut pair, qps) = connected(Way::Link);
    let (here, there) = (pair.buffer(0, HUGE), pair.buffer_with(1, HUGE, ALL_ACCESS));
    here.fill(0, &[5; HUGE]);
    let write = SendOp::Write { addr: there.addr(), rkey: there.key() };
    pair.send(0, qps[0], 1, write, &[here.sge(0, HUGE)]);
    let written = || there.bytes(0, HUGE).iter().filter(|&&byte| byte == 5).count();
    for megabytes in 1..5 {
        assert_eq!(written(), megabytes << 20);
        assert_eq!(pair.polled(0), []);
        assert!(pair.hosts[0].adapter.progress(pair.now));
    }
    assert_eq!((written(), pair.polled(0)), (HUGE, vec![(1, WcStatus::Success)]));
}

/// How a region is taken back from requests that refer to it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum TakeBack {
    Deregistered,
    /// It is another domain's.
    Moved,
    /// It keeps what the requests need.
    NotAtAll,
}

/// A request by reference waits at the peer behind one for which there is no receive. When its region is
/// taken back it fails, as over TCP where its turn would come: nobody touches the memory.
#[test]
fn regions_are_taken_back_from_requests_under_way() {
    use TakeBack::{Deregistered, Moved, NotAtAll};
    for (how, read) in
        [Deregistered, Moved, NotAtAll].map(|how| [(how, true), (how, false)]).as_flattened()
    {
        let (mut pair, qps) = connected(Way::Link);
        let (other, here) = (pair.buffer(0, LARGE), pair.buffer(0, LARGE));
        let there = pair.buffer_with(1, LARGE, ALL_ACCESS);
        there.fill(0, &[7; LARGE]);
        let read_op = SendOp::Read { addr: there.addr(), rkey: there.key() };
        let op = if *read { read_op } else { SendOp::Send };
        pair.send(0, qps[0], 1, SendOp::Send, &[]);
        pair.send(0, qps[0], 2, op, &[here.sge(0, LARGE)]);
        pair.run();
        let adapter = &mut pair.hosts[0].adapter;
        // Another one is none of theirs.
        adapter.dereg_mr(pair.now, other.region.id).unwrap();
        match how {
            Deregistered => adapter.dereg_mr(pair.now, here.region.id).unwrap(),
            Moved => {
                let pd = adapter.alloc_pd().unwrap();
                adapter.rereg_mr(pair.now, here.region.id, Some(pd), None, None).unwrap();
            }
            NotAtAll => {
                let access = quipu_nic::mem::Access::LOCAL_WRITE;
                adapter.rereg_mr(pair.now, here.region.id, None, None, Some(access)).unwrap();
            }
        }
        assert!(adapter.memory_is_quiet());
        here.fill(0, &[9; LARGE]);
        pair.recv(1, qps[1], 50, &[]);
        pair.recv(1, qps[1], 51, &[there.sge(0, LARGE)]);
        pair.hosts[1].adapter.progress(pair.now);
        pair.later(1_000_000_000);
        if *how == NotAtAll {
            let done = [(1, WcStatus::Success), (2, WcStatus::Success)];
            assert_eq!(pair.polled(0), done, "{read}");
            continue;
        }
        let failed = [(1, WcStatus::WrFlushErr), (2, WcStatus::LocProtErr)];
        assert_eq!(pair.polled(0), failed, "{how:?} {read}");
        assert_eq!(here.bytes(0, LARGE), [9; LARGE], "{how:?} {read}");
        assert_eq!(there.bytes(0, LARGE), [7; LARGE], "{how:?} {read}");
    }
}

/// What the peer has executed is not under way, though nobody has looked.
#[test]
fn requests_that_are_executed_survive_their_region() {
    for read in [true, false] {
        let (mut pair, qps) = connected(Way::Link);
        let (here, there) = (pair.buffer(0, LARGE), pair.buffer_with(1, LARGE, ALL_ACCESS));
        there.fill(0, &[7; LARGE]);
        let read_op = SendOp::Read { addr: there.addr(), rkey: there.key() };
        pair.send(0, qps[0], 1, SendOp::Send, &[]);
        pair.send(0, qps[0], 2, if read { read_op } else { SendOp::Send }, &[here.sge(0, LARGE)]);
        pair.recv(1, qps[1], 50, &[]);
        pair.recv(1, qps[1], 51, &[there.sge(0, LARGE)]);
        while pair.hosts[1].adapter.progress(pair.now) {}
        pair.hosts[0].adapter.dereg_mr(pair.now, here.region.id).unwrap();
        pair.run();
        assert_eq!(pair.polled(0), [(1, WcStatus::Success), (2, WcStatus::Success)], "{read}");
    }
}

/// The peer has its time from then on, however long nobody has called the adapter before.
#[test]
fn a_region_that_is_taken_back_waits_for_the_access_under_way() {
    let (mut pair, qps) = connected(Way::Link);
    let here = pair.buffer(0, LARGE);
    pair.send(0, qps[0], 1, SendOp::Send, &[here.sge(0, LARGE)]);
    pair.run();
    set_guard(&pair, 1, true);
    pair.now = Time(pair.now.0 + 60_000_000_000);
    pair.hosts[0].adapter.dereg_mr(pair.now, here.region.id).unwrap();
    pair.later(4_000_000_000);
    assert_eq!(pair.polled(0), [], "it may yet be read");
    set_guard(&pair, 1, false);
    pair.later(1_000_000);
    assert_eq!(pair.polled(0), [(1, WcStatus::LocProtErr)]);
}

/// Who writes without end is in the middle of an access whenever somebody looks, and is not cut off for one
/// that was over long ago.
#[test]
fn a_peer_has_its_time_for_each_access() {
    let (mut pair, qps) = connected(Way::Link);
    let (source, other) = (pair.buffer(0, LARGE), pair.buffer_with(0, LARGE, ALL_ACCESS));
    pair.send(0, qps[0], 1, SendOp::Send, &[source.sge(0, LARGE)]);
    pair.run();
    let enter = |pair: &Pair, word| {
        pair.segments[1].u32_at(GUARD_AT).unwrap().store(word, Ordering::SeqCst);
    };
    enter(&pair, 1);
    set_state(&mut pair, 0, qps[0], QpState::Err);
    pair.run_until(Time(pair.now.0 + 4_000_000_000));
    enter(&pair, 3);
    pair.hosts[0].adapter.dereg_mr(pair.now, other.region.id).unwrap();
    pair.run_until(Time(pair.now.0 + 4_000_000_000));
    assert_eq!(pair.polled(0), [], "it is not cut off");
    pair.run_until(Time(pair.now.0 + 4_000_000_000));
    assert_eq!(pair.polled(0), [(1, WcStatus::WrFlushErr)], "for this one it has had its time");
}
