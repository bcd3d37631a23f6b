//! Adapters with several addresses: the row of the GID table decides from which one a peer is reached.

use std::net::IpAddr;

use quipu_nic::*;

use crate::pair::{Pair, TO_RTR, WAYS, Way};

/// The row of the second address.
const SECOND: u8 = 4;

/// The second address of a host whose first is 10.0.0.x.
fn second(first: Gid) -> Gid {
    let mut gid = first;
    gid.0[13] = 1;
    gid
}

/// Two hosts with two addresses each: 10.0.0.x and 10.1.0.x.
fn pair(way: Way) -> Pair {
    let mut pair = Pair::new(way);
    for host in &mut pair.hosts {
        let own = second(host.adapter.config().gid);
        host.adapter.set_gid_rows(&[own]);
    }
    pair
}

fn by_second(attr: &mut QpAttr) {
    attr.av.sgid_index = SECOND;
    attr.av.dgid = second(attr.av.dgid);
}

#[test]
fn queue_pairs_of_a_second_address_find_each_other() {
    for way in WAYS.into_iter().filter(|way| matches!(way, Way::Stream(_))) {
        let mut pair = pair(way);
        let qps = [pair.hosts[0].qp(), pair.hosts[1].qp()];
        pair.connect_with(qps, by_second);
        let [from, to] = [0, 1].map(|host| pair.buffer(host, 64));
        from.fill(0, b"by the other network");
        pair.recv(1, qps[1], 1, &[to.sge(0, 64)]);
        pair.send(0, qps[0], 2, SendOp::Send, &[from.sge(0, 20)]);
        pair.run();
        assert_eq!(pair.polled(0), [(2, WcStatus::Success)], "{way:?}");
        assert_eq!(pair.polled(1), [(1, WcStatus::Success)]);
        assert_eq!(to.bytes(0, 20), b"by the other network");
        assert_eq!(pair.streams(), 1);
    }
}

/// One link serves all addresses of an engine that has all of its host.
#[test]
fn a_link_serves_the_addresses_that_its_engine_has() {
    for everywhere in [true, false] {
        let mut pair = pair(Way::Link);
        pair.everywhere = everywhere;
        for host in 0..2 {
            let gid = pair.hosts[1 - host].adapter.config().gid;
            pair.hosts[host].adapter.set_host_addresses([gid, second(gid)]);
        }
        let qps = [pair.hosts[0].qp(), pair.hosts[1].qp()];
        pair.connect_with(qps, by_second);
        pair.send(0, qps[0], 2, SendOp::Send, &[]);
        pair.recv(1, qps[1], 1, &[]);
        pair.later(20_000_000_000);
        let expected = if everywhere { WcStatus::Success } else { WcStatus::RetryExcErr };
        assert_eq!(pair.polled(0), [(2, expected)]);
    }
}

#[test]
fn a_queue_pair_is_found_by_its_own_address_alone() {
    let mut pair = pair(Way::Stream(usize::MAX));
    let qps = [pair.hosts[0].qp(), pair.hosts[1].qp()];
    // The smaller end reaches out, by the second network; the other expects it on the first.
    pair.to_rtr(0, qps, &by_second);
    pair.to_rtr(1, qps, &|_: &mut QpAttr| {});
    for (host, qp) in qps.into_iter().enumerate() {
        pair.to_rts(host, qp, &|_: &mut QpAttr| {});
    }
    pair.send(0, qps[0], 2, SendOp::Send, &[]);
    pair.later(20_000_000_000);
    assert_eq!(pair.polled(0), [(2, WcStatus::RetryExcErr)]);
    assert_eq!(pair.state(1, qps[1]), QpState::Rts);
}

#[test]
fn what_cannot_be_reached_from_an_address_is_refused() {
    let mut pair = pair(Way::Stream(usize::MAX));
    let qp = pair.hosts[0].qp();
    pair.to_init(0, qp);
    let gid = |ip: &str| Gid::from(ip.parse::<IpAddr>().unwrap());
    let host = &mut pair.hosts[0];
    host.adapter.set_gid_rows(&[gid("fd00::1"), gid("127.0.0.1")]);
    let mut modify = |dgid: &str, sgid_index: u8| {
        let av = AddressVector {
            dgid: gid(dgid),
            sgid_index,
            is_global: true,
            port_num: 1,
            ..AddressVector::default()
        };
        let attr =
            QpAttr { state: QpState::Rtr, path_mtu: 5, dest_qp_num: 5, av, ..QpAttr::default() };
        let ah = host.adapter.create_ah(host.pd, &av).map(drop);
        assert_eq!(host.adapter.modify_qp(pair.now, qp, &attr, TO_RTR).err(), ah.err());
        ah
    };
    assert!(matches!(modify("fd00::2", 0), Err(Fault::Invalid(why)) if why.contains("families")));
    assert!(matches!(modify("10.0.0.2", 4), Err(Fault::Invalid(why)) if why.contains("families")));
    assert!(matches!(modify("10.0.0.2", 5), Err(Fault::Invalid(why)) if why.contains("loopback")));
    assert!(matches!(modify("10.0.0.2", 6), Err(Fault::Invalid(why)) if why.contains("no row")));
    assert_eq!(modify("127.0.0.9", 5), Ok(()));
}

#[test]
fn datagrams_are_sent_from_the_address_of_their_handle() {
    let mut pair = pair(Way::Stream(usize::MAX));
    let [here, there] = [0, 1].map(|host| pair.datagram_qp(host));
    let (from, to) = (pair.buffer(0, 64), pair.buffer(1, 128));
    let dgid = second(pair.hosts[1].adapter.config().gid);
    let ah = pair.ah_with(0, dgid, |av| av.sgid_index = SECOND);
    pair.recv(1, there, 1, &[to.sge(0, 128)]);
    let qpn = pair.number(1, there).0;
    let to_there = To::Datagram { ah, qpn, qkey: crate::pair::QKEY };
    let sges = [from.sge(0, 8)];
    let (op, flags) = (SendOp::Send, SendFlags::SIGNALED);
    let wr = SendWr { wr_id: 2, to: to_there, op, flags, payload: Payload::Sges(&sges) };
    pair.send_datagram(0, here, &wr).unwrap();
    pair.run();
    assert_eq!(pair.polled(1), [(1, WcStatus::Success)]);
    // The header of IPv4 ends with source and destination.
    assert_eq!(to.bytes(32, 8), [10, 1, 0, 1, 10, 1, 0, 2]);
}

#[test]
fn a_group_is_left_on_each_network_by_itself() {
    let mut pair = pair(Way::Stream(usize::MAX));
    let qp = pair.datagram_qp(0);
    let mgid = Gid::from(IpAddr::from([239, 1, 2, 3]));
    let adapter = &mut pair.hosts[0].adapter;
    let [first, other] = [0, SECOND].map(|sgid_index| GroupMember { qp, mgid, sgid_index });
    let group = adapter.group_from(mgid, SECOND).unwrap();
    adapter.attach_member(first).unwrap();
    assert!(adapter.has_group_on(group, 0) && !adapter.has_group_on(group, SECOND));
    adapter.attach_member(other).unwrap();
    assert_eq!(adapter.memberships_of(qp).len(), 2);
    assert_eq!(adapter.detach_member(first), Ok(true));
    assert!(adapter.detach_member(first).is_err() && adapter.has_group(group));
    assert_eq!(adapter.detach_member(other), Ok(true));
    assert!(!adapter.has_group(group));
    assert!(adapter.group_from(mgid, 5).is_err(), "no such row");
}
