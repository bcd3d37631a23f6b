//! What the strict mode asks of the adapter: which receives name a region.

use crate::pair::{Pair, WAYS, Way, connected, statuses};
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
    pair.hosts[1].adapter.post_srq_recv(srq, 5, &[to.sge(0, 8)]).unwrap();
    assert_eq!(naming(&pair, to.key()), []);
    pair.connect(qps);
    assert_eq!(naming(&pair, to.key()), [(Whose::Shared(srq), 5)]);
    modify(&mut pair, qps[1], QpState::Err);
    assert_eq!(naming(&pair, to.key()), []);
}
