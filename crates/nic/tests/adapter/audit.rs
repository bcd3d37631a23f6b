//! What the strict mode asks of the adapter: which receives name a region, and who has changed memory that is
//! lent.

use crate::pair::{Buffer, Pair, WAYS, Way, connected, statuses};
use quipu_nic::mem::Key;
use quipu_nic::*;

fn naming(pair: &Pair, key: u32) -> Vec<(Whose, u64)> {
    pair.hosts[1].adapter.receives_naming(Key(key))
}

fn modify(pair: &mut Pair, qp: QpId, state: QpState) {
    let attr = QpAttr { state, ..QpAttr::default() };
    pair.hosts[1].adapter.modify_qp(pair.now, qp, &attr, QpAttrMask::STATE).unwrap();
}

#[test]
fn a_receive_names_its_memory_until_it_is_filled() {
    for way in WAYS {
        let (mut pair, [qp, theirs]) = connected(way);
        let (from, to, other) = (pair.buffer(0, 64), pair.buffer(1, 64), pair.buffer(1, 64));
        pair.recv(1, theirs, 1, &[other.sge(0, 8)]);
        pair.recv(1, theirs, 2, &[other.sge(0, 0), to.sge(0, 8)]);
        pair.recv(1, theirs, 3, &[to.sge(8, 8), other.sge(8, 0)]);
        let whose = Whose::Receives(theirs);
        assert_eq!(naming(&pair, to.key()), [(whose, 2)], "{way:?}");
        assert_eq!(naming(&pair, other.key()), [(whose, 1)], "{way:?}");
        assert_eq!(naming(&pair, to.key() ^ 0x100), [], "{way:?}");
        for left in [vec![(whose, 2)], vec![(whose, 3)], vec![]] {
            pair.send(0, qp, 9, SendOp::Send, &[from.sge(0, 8)]);
            pair.run();
            assert_eq!(naming(&pair, to.key()), left, "{way:?}");
            assert_eq!(naming(&pair, other.key()), [], "elements of no bytes are none: {way:?}");
        }
    }
}

/// A message of which the beginning has come.
#[test]
fn a_receive_that_is_being_filled_names_its_memory() {
    let (mut pair, [qp, theirs]) = connected(Way::Stream(97));
    let (from, to) = (pair.buffer(0, 1 << 20), pair.buffer(1, 1 << 20));
    pair.recv(1, theirs, 1, &[to.sge(0, 1 << 20)]);
    from.fill(0, &[1; 1 << 20]);
    pair.send(0, qp, 9, SendOp::Send, &[from.sge(0, 1 << 20)]);
    while to.bytes(0, 1) == [0] {
        assert!(pair.step());
    }
    assert_eq!(to.bytes((1 << 20) - 1, 1), [0]);
    assert_eq!(naming(&pair, to.key()), [(Whose::Receives(theirs), 1)]);
    pair.run();
    assert_eq!(statuses(&pair.hosts[1].poll()), [(1, WcStatus::Success)]);
    assert_eq!(naming(&pair, to.key()), []);
}

#[test]
fn receives_of_which_nothing_comes_name_nothing() {
    let mut pair = Pair::new(Way::Link);
    let qps = [pair.hosts[0].qp(), pair.hosts[1].qp()];
    let (to, theirs) = (pair.buffer(1, 64), qps[1]);
    pair.to_init(1, theirs);
    pair.recv(1, theirs, 1, &[to.sge(0, 8)]);
    assert_eq!(naming(&pair, to.key()), [], "in INIT");
    modify(&mut pair, theirs, QpState::Reset);
    pair.connect(qps);
    pair.recv(1, theirs, 1, &[to.sge(0, 8)]);
    assert_eq!(naming(&pair, to.key()).len(), 1);
    modify(&mut pair, theirs, QpState::Err);
    assert_eq!(naming(&pair, to.key()), [], "flushed");
}

#[test]
fn receives_of_a_shared_queue_are_its_own_while_somebody_takes_them() {
    let mut pair = Pair::new(Way::Link);
    let pd = pair.hosts[1].pd;
    let srq = pair.hosts[1].adapter.create_srq(pd, 16, 2, 0).unwrap();
    let qps = [pair.hosts[0].qp(), pair.hosts[1].qp_with(|init| init.srq = Some(srq))];
    let to = pair.buffer(1, 64);
    pair.hosts[1].adapter.post_srq_recv(pair.now, srq, 5, &[to.sge(0, 8)]).unwrap();
    assert_eq!(naming(&pair, to.key()), []);
    pair.connect(qps);
    assert_eq!(naming(&pair, to.key()), [(Whose::Shared(srq), 5)]);
    modify(&mut pair, qps[1], QpState::Err);
    assert_eq!(naming(&pair, to.key()), []);
}

/// The ways on which only the adapter of a host writes to its memory.
const OWN_WAYS: [Way; 3] = [Way::Stream(usize::MAX), Way::Stream(97), Way::LinkCopying];

/// A connected pair, of which both keep in mind what is lent, and a buffer at each.
fn lending(way: Way) -> (Pair, [QpId; 2], [Buffer; 2]) {
    let (mut pair, qps) = connected(way);
    pair.hosts.iter_mut().for_each(|host| host.adapter.watch_lent());
    let buffers = [0, 1].map(|host| pair.buffer(host, 1 << 17));
    (pair, qps, buffers)
}

/// Messages of every length, and writes of the peer to the same place, are no change; what the program does
/// there before they come, or behind them, is.
#[test]
fn memory_of_a_receive_is_changed_by_the_program_alone() {
    for way in OWN_WAYS {
        let (mut pair, [qp, theirs], [from, to]) = lending(way);
        let write = SendOp::Write { addr: to.addr(), rkey: to.key() };
        from.fill(0, &[7; 1 << 17]);
        for len in [1, 8, 64, 1000, 10_000, 65_536, 1 << 17] {
            for (before, behind) in [(false, false), (true, false), (false, true)] {
                let list = [to.sge(0, len)];
                let loan = pair.hosts[1].adapter.lend(Whose::Receives(theirs), &list).unwrap();
                pair.recv(1, theirs, 1, &list);
                to.fill(len / 2, &[if before { 5 } else { to.bytes(len / 2, 1)[0] }]);
                pair.send(0, qp, 8, write, &[from.sge(0, len)]);
                pair.send(0, qp, 9, SendOp::Send, &[from.sge(0, len)]);
                pair.run();
                pair.hosts[1].adapter.renew_lent();
                assert_eq!(to.bytes(0, len), vec![7; len], "{way:?}");
                to.fill(len - 1, &[if behind { 6 } else { 7 }]);
                let changed = pair.hosts[1].adapter.give_back(loan, len as u64);
                let seen = |at| (at < 1 << 16).then_some(at as u64);
                let expected = match (before, behind) {
                    (true, _) => seen(len / 2),
                    (_, true) => seen(len - 1),
                    _ => None,
                };
                assert_eq!(changed, expected, "{way:?}, {len} bytes");
                assert_eq!(statuses(&pair.hosts[1].poll()), [(1, WcStatus::Success)]);
            }
        }
        assert_eq!(pair.polled(0).len(), 42, "{way:?}");
    }
}

#[test]
fn what_a_read_or_an_atomic_fetches_is_changed_by_the_program_alone() {
    for way in OWN_WAYS {
        let (mut pair, [qp, _], [to, from]) = lending(way);
        let (addr, rkey) = (from.addr(), from.key());
        let read = SendOp::Read { addr, rkey };
        for (op, len) in [(read, 8), (read, 60_000), (SendOp::FetchAdd { addr, rkey, add: 1 }, 8)] {
            for change in [false, true] {
                let list = [to.sge(100, len)];
                let loan = pair.hosts[0].adapter.lend(Whose::Sends(qp), &list).unwrap();
                pair.send(0, qp, 1, op, &list);
                pair.hosts[0].adapter.renew_lent();
                let last = to.bytes(100 + len - 1, 1)[0];
                to.fill(100 + len - 1, &[last ^ u8::from(change)]);
                pair.run();
                let changed = pair.hosts[0].adapter.give_back(loan, u64::MAX);
                assert_eq!(changed, change.then_some(len as u64 - 1), "{way:?}, {op:?}");
                assert_eq!(pair.polled(0), [(1, WcStatus::Success)], "{way:?}, {op:?}");
            }
        }
    }
}
