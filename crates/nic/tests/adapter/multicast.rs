//! Multicast groups that go by several names, and what comes back from them.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use crate::pair::{Pair, QKEY, Way};
use quipu_nic::*;

#[test]
fn each_name_by_which_a_queue_pair_is_attached_to_a_group_counts() {
    let names = ["::ffff:239.1.2.3", "ff0e::ffff:239.1.2.3"]
        .map(|name| Gid(name.parse::<Ipv6Addr>().unwrap().octets()));
    let mut pair = Pair::new(Way::Stream(usize::MAX));
    let (from, there) = (pair.datagram_qp(0), pair.buffer(1, 200));
    let [one, other] = [(); 2].map(|()| pair.datagram_qp(1));
    for (qp, wr_id) in [(one, 1), (other, 2)] {
        (0..8).for_each(|_| pair.recv(1, qp, wr_id, &[there.sge(0, 200)]));
    }
    for (qp, name) in [(one, 0), (other, 0), (one, 1), (one, 1)] {
        pair.hosts[1].adapter.attach_multicast(qp, names[name]).unwrap();
    }
    let ah = pair.ah_with(0, names[0], |_| {});
    let (to, op) = (To::Datagram { ah, qpn: 0x00ff_ffff, qkey: QKEY }, SendOp::Send);
    let (flags, payload) = (SendFlags::empty(), Payload::Sges(&[]));
    let reached = |pair: &mut Pair| {
        pair.send_datagram(0, from, &SendWr { wr_id: 0, to, op, flags, payload }).unwrap();
        pair.run();
        let mut reached: Vec<_> = pair.hosts[1].poll().iter().map(|wc| wc.wr_id).collect();
        reached.sort_unstable();
        reached
    };
    assert_eq!(reached(&mut pair), [1, 2], "each once");
    for (name, left) in [(names[0], [1, 2].as_slice()), (names[1], &[2])] {
        let adapter = &mut pair.hosts[1].adapter;
        assert_eq!(adapter.detach_multicast(one, name), Ok(false));
        assert!(adapter.detach_multicast(one, name).is_err(), "not by this name");
        assert_eq!(reached(&mut pair), left);
    }
    assert_eq!(pair.hosts[1].adapter.detach_multicast(other, names[0]), Ok(true));
}

/// Sends a message to a group, and takes it as it comes back to this host and as if `from` had sent it; which
/// receives it filled.
fn echoed(pair: &mut Pair, qp: QpId, mgid: Gid, from: Ipv4Addr) -> Vec<u64> {
    let ah = pair.ah_with(0, mgid, |_| {});
    let (to, op) = (To::Datagram { ah, qpn: 0x00ff_ffff, qkey: QKEY }, SendOp::Send);
    let (flags, payload) = (SendFlags::empty(), Payload::Sges(&[]));
    pair.send_datagram(0, qp, &SendWr { wr_id: 0, to, op, flags, payload }).unwrap();
    let (mut out, now) = ([0; 2048], pair.now);
    let host = &mut pair.hosts[0];
    let (id, number) = host.adapter.next_datagrams().unwrap();
    let departure = host.adapter.transmit_datagram(now, id, &mut out).unwrap();
    let from = SocketAddr::new(from.into(), number.port());
    let arrival = Arrival { from, to: departure.to.ip(), traffic_class: 0, hop_limit: 1 };
    host.adapter.handle_datagram(now, &arrival, &out[..departure.len]);
    let mut reached: Vec<_> = host.poll().iter().map(|wc| wc.wr_id).filter(|&id| id > 0).collect();
    reached.sort_unstable();
    reached
}

#[test]
fn a_queue_pair_can_be_spared_its_own_messages() {
    let mgid = Gid::from(IpAddr::from([239, 1, 2, 3]));
    let mut pair = Pair::new(Way::Stream(usize::MAX));
    pair.full[0] = true;
    let there = pair.buffer(0, 200);
    let [spared, other] = [(); 2].map(|()| pair.datagram_qp(0));
    pair.hosts[0].adapter.spare_own_multicast(spared).unwrap();
    for (qp, wr_id) in [(spared, 1), (other, 2)] {
        (0..8).for_each(|_| pair.recv(0, qp, wr_id, &[there.sge(0, 200)]));
        pair.hosts[0].adapter.attach_multicast(qp, mgid).unwrap();
    }
    let own = pair.hosts[0].address;
    assert_eq!(echoed(&mut pair, spared, mgid, own), [2]);
    assert_eq!(echoed(&mut pair, other, mgid, own), [1, 2]);
    let stranger = Ipv4Addr::new(10, 0, 0, 200);
    assert_eq!(echoed(&mut pair, spared, mgid, stranger), [1, 2], "one of the same number");
}
