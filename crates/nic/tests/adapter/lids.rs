//! A port of InfiniBand: peers that are named by LID alone.

use quipu_nic::*;

use crate::pair::{Pair, TO_RTR, WAYS, Way};

fn infiniband(config: &mut Config) {
    config.link_layer = LinkLayer::InfiniBand;
}

/// The same peer, named by LID.
fn by_lid(av: &mut AddressVector) {
    *av = AddressVector { dlid: av.dgid.lid(), port_num: 1, ..AddressVector::default() };
}

#[test]
fn queue_pairs_are_connected_by_lid_whatever_carries_them() {
    for way in WAYS {
        let mut pair = Pair::with(way, [infiniband; 2]);
        let qps = [pair.hosts[0].qp(), pair.hosts[1].qp()];
        pair.connect_with(qps, |attr| by_lid(&mut attr.av));
        let [from, to] = [pair.buffer(0, 64), pair.buffer(1, 64)];
        from.fill(0, b"by LID");
        pair.recv(1, qps[1], 7, &[to.sge(0, 64)]);
        pair.send(0, qps[0], 1, SendOp::Send, &[from.sge(0, 6)]);
        pair.run();
        assert_eq!(pair.polled(0), [(1, WcStatus::Success)]);
        assert_eq!(pair.polled(1), [(7, WcStatus::Success)]);
        assert_eq!(to.bytes(0, 6), b"by LID");
        // What the program gave is what it is told.
        let av = pair.hosts[0].adapter.query_qp(qps[0]).unwrap().attr.av;
        assert_eq!((av.is_global, av.dlid), (false, 2));
    }
}

#[test]
fn a_datagram_tells_the_lid_to_answer_to() {
    let mut pair = Pair::with(Way::Stream(usize::MAX), [infiniband; 2]);
    let qps = [pair.datagram_qp(0), pair.datagram_qp(1)];
    let [from, to] = [pair.buffer(0, 64), pair.buffer(1, 128)];
    let dgid = pair.hosts[1].adapter.config().gid;
    let ah = pair.ah_with(0, dgid, by_lid);
    from.fill(0, b"datagram");
    pair.recv(1, qps[1], 7, &[to.sge(0, 128)]);
    let sges = [from.sge(0, 8)];
    let wr = SendWr {
        wr_id: 1,
        to: To::Datagram { ah, qpn: pair.number(1, qps[1]).0, qkey: 0x1111_1111 },
        op: SendOp::Send,
        flags: SendFlags::SIGNALED,
        payload: Payload::Sges(&sges),
    };
    pair.send_datagram(0, qps[0], &wr).unwrap();
    pair.run();
    let [received] = pair.hosts[1].poll()[..] else { panic!("one completion") };
    assert_eq!((received.slid, received.sl, received.grh), (1, 0, true));
    // The route header is that of IPv6, with the GIDs of both.
    assert_eq!(to.bytes(0, 1), [0x60]);
    assert_eq!(to.bytes(8, 16), pair.hosts[0].adapter.config().gid.0);
    assert_eq!(to.bytes(24, 16), dgid.0);
    assert_eq!(to.bytes(40, 8), b"datagram");
}

#[test]
fn ethernet_has_no_lids() {
    let mut pair = Pair::new(Way::Stream(usize::MAX));
    let qp = pair.hosts[0].qp();
    pair.to_init(0, qp);
    let mut attr = QpAttr {
        state: QpState::Rtr,
        path_mtu: 5,
        dest_qp_num: 2,
        av: AddressVector { dlid: 2, port_num: 1, ..AddressVector::default() },
        ..QpAttr::default()
    };
    let host = &mut pair.hosts[0];
    assert_eq!(host.adapter.modify_qp(pair.now, qp, &attr, TO_RTR), Err(Fault::NoLids));
    assert_eq!(host.adapter.create_ah(host.pd, &attr.av), Err(Fault::NoLids));
    assert_eq!(host.adapter.query_qp(qp).unwrap().attr.state, QpState::Init);
    attr.av = AddressVector { dgid: Gid([9; 16]), is_global: true, ..attr.av };
    let elsewhere = host.adapter.modify_qp(pair.now, qp, &attr, TO_RTR);
    assert!(matches!(elsewhere, Err(Fault::Invalid(_))), "it is of IPv6, and the adapter of IPv4");
    attr.av.dgid = std::net::IpAddr::from([10, 0, 0, 9]).into();
    host.adapter.modify_qp(pair.now, qp, &attr, TO_RTR).unwrap();
}
