//! An engine that has all addresses of its host: queue pairs of each address find each other, over TCP and by
//! shared memory, and an engine that the user has restricted to one address is reached by that one.

use std::net::IpAddr;
use std::sync::Arc;

use quipu_host::nic::{
    AddressVector, GID_ROWS, Gid, QpAttr, QpAttrMask, QpNum, QpState, SendOp, WcStatus,
};
use quipu_host::{Config, Engine, SameHost};

use crate::common::Node;

fn everywhere(same_host: SameHost) -> Arc<Engine> {
    Engine::open(Config { same_host, ..Config::default() }).unwrap()
}

/// Takes a queue pair to RTS, from an address of its engine towards a peer.
fn connect(node: &Node, sgid_index: u8, gid: Gid, num: QpNum) {
    type M = QpAttrMask;
    let attr = QpAttr { state: QpState::Init, port_num: 1, ..QpAttr::default() };
    let mask = M::STATE | M::PKEY_INDEX | M::PORT | M::ACCESS_FLAGS;
    node.engine.modify_qp(node.qp, &attr, mask).unwrap();
    let av = AddressVector {
        dgid: gid,
        sgid_index,
        is_global: true,
        port_num: 1,
        ..AddressVector::default()
    };
    let attr = QpAttr {
        state: QpState::Rtr,
        path_mtu: 5,
        dest_qp_num: num.0,
        min_rnr_timer: 12,
        av,
        ..QpAttr::default()
    };
    let mask = M::STATE
        | M::AV
        | M::PATH_MTU
        | M::DEST_QPN
        | M::RQ_PSN
        | M::MAX_DEST_RD_ATOMIC
        | M::MIN_RNR_TIMER;
    node.engine.modify_qp(node.qp, &attr, mask).unwrap();
    let attr = QpAttr { state: QpState::Rts, timeout: 18, retry_cnt: 7, rnr_retry: 7, ..attr };
    let mask =
        M::STATE | M::TIMEOUT | M::RETRY_CNT | M::RNR_RETRY | M::SQ_PSN | M::MAX_QP_RD_ATOMIC;
    node.engine.modify_qp(node.qp, &attr, mask).unwrap();
}

fn exchange(a: &Node, b: &Node, what: &str) {
    b.receive(1, &[b.sge(0, 8)]);
    a.fill(0, b"from row");
    a.post(2, SendOp::Send, &[a.sge(0, 8)]);
    assert_eq!(b.poll().status, WcStatus::Success, "{what}");
    assert_eq!(a.poll().status, WcStatus::Success, "{what}");
    assert_eq!(b.bytes(0, 8), b"from row");
}

#[test]
fn queue_pairs_of_every_address_find_each_other() {
    for same_host in [SameHost::Never, SameHost::Auto] {
        let [one, other] = [(); 2].map(|()| everywhere(same_host));
        let table = one.gid_table().unwrap();
        assert!(table.len() >= usize::from(GID_ROWS));
        assert!(table[..GID_ROWS.into()].iter().all(|row| row.ip == one.address().ip));
        for (index, row) in table.iter().enumerate() {
            let (a, b, gid) = (Node::new(&one, 64), Node::new(&other, 64), Gid::from(row.ip));
            connect(&a, index as u8, gid, b.num);
            connect(&b, index as u8, gid, a.num);
            exchange(&a, &b, &format!("{same_host:?}, row {index}, {}", row.ip));
        }
    }
}

#[test]
fn an_engine_with_one_address_meets_one_that_has_all() {
    let ip = IpAddr::from([127, 0, 0, 78]);
    for same_host in [SameHost::Never, SameHost::Auto] {
        let restricted =
            Engine::open(Config { address: Some(ip.into()), same_host, ..Config::default() });
        let restricted = restricted.unwrap();
        assert_eq!(restricted.gid_table().unwrap().len(), usize::from(GID_ROWS));
        assert!(restricted.gid_row(GID_ROWS).is_none());
        let open = everywhere(same_host);
        if !open.address().ip.is_ipv4() {
            continue;
        }
        let (a, b) = (Node::new(&restricted, 64), Node::new(&open, 64));
        connect(&a, 0, open.gid(), b.num);
        connect(&b, 0, ip.into(), a.num);
        exchange(&a, &b, "restricted");
    }
}
