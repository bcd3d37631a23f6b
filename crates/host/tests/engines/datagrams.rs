//! Datagrams between engines over the kernel's UDP, on the loopback.

use std::net::IpAddr;
use std::os::fd::AsRawFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::common::{Node, PATIENCE, engine};
use quipu_host::counters::observe::{ENGINE_METRICS, Sample};
use quipu_host::counters::samples;
use quipu_host::nic::{
    AddressVector, AhId, Completion, Gid, Payload, QpAttr, QpAttrMask, QpNum, QpState, QpType,
    SendFlags, SendOp, SendWr, To, WcExtra, WcStatus,
};
use quipu_host::{Config, Engine, SameHost};

const QKEY: u32 = 0x0123_4567;
const GRH: u64 = 40;

fn node(engine: &Arc<Engine>) -> Node {
    let node = Node::with_service(engine, 1 << 16, QpType::Ud);
    let attr = |state| QpAttr { state, port_num: 1, qkey: QKEY, ..QpAttr::default() };
    type M = QpAttrMask;
    for (state, mask) in [
        (QpState::Init, M::PKEY_INDEX | M::PORT | M::QKEY),
        (QpState::Rtr, M::empty()),
        (QpState::Rts, M::SQ_PSN),
    ] {
        engine.modify_qp(node.qp, &attr(state), mask | M::STATE).unwrap();
    }
    node
}

fn address(from: &Node, gid: Gid, traffic_class: u8) -> AhId {
    let av = AddressVector {
        dgid: gid,
        is_global: true,
        port_num: 1,
        traffic_class,
        hop_limit: 1,
        ..AddressVector::default()
    };
    from.engine.create_ah(from.pd, &av).unwrap()
}

fn send(from: &Node, to: To, imm: u32, len: u32) {
    let wr = SendWr {
        wr_id: 1,
        to,
        op: SendOp::SendImm(imm),
        flags: SendFlags::SIGNALED,
        payload: Payload::Sges(&[from.sge(0, len)]),
    };
    from.engine.post_send(from.qp, &wr).unwrap();
    assert_eq!(from.poll().status, WcStatus::Success);
}

fn exchange(here: &str, there: &str) -> Vec<u8> {
    let engines = [engine(here, SameHost::Auto), engine(there, SameHost::Auto)];
    let [a, b] = [node(&engines[0]), node(&engines[1])];
    let to = To::Datagram { ah: address(&a, b.engine.gid(), 0x28), qpn: b.num.0, qkey: QKEY };
    for (turn, len) in [0_u32, 1, 1000, 4096].into_iter().enumerate() {
        let bytes: Vec<u8> = (0..len).map(|i| (i * 31 + turn as u32) as u8).collect();
        a.fill(0, &bytes);
        b.receive(turn as u64, &[b.sge(0, GRH as u32 + len)]);
        send(&a, to, turn as u32, len);
        let got = b.poll();
        assert_eq!((got.wr_id, got.status, got.grh), (turn as u64, WcStatus::Success, true));
        assert_eq!((got.byte_len, got.src_qp), (GRH as u32 + len, a.num));
        assert_eq!(got.extra, WcExtra::Imm(turn as u32));
        assert_eq!(b.bytes(GRH as usize, len as usize), bytes);
    }
    b.bytes(0, GRH as usize)
}

#[test]
fn over_ipv4_with_the_addresses_it_came_from_and_went_to() {
    let grh = exchange("127.0.0.1", "127.0.0.2");
    assert_eq!(grh[20..22], [0x45, 0x28]);
    assert_eq!(grh[32..], [127, 0, 0, 1, 127, 0, 0, 2]);
    assert_ne!(grh[28], 0, "the time to live");
}

#[test]
fn over_ipv6() {
    if engine_is_refused("::1") {
        return;
    }
    let grh = exchange("::1", "::1");
    assert_eq!(grh[..2], [0x62, 0x80]);
    assert_eq!((grh[23], grh[39]), (1, 1));
    assert_ne!(grh[7], 0, "the hop limit");
}

/// Some machines have no IPv6.
fn engine_is_refused(address: &str) -> bool {
    let address = Some(address.parse().unwrap());
    Engine::open(quipu_host::Config { address, ..quipu_host::Config::default() }).is_err()
}

#[test]
fn to_oneself() {
    let engine = engine("127.0.0.1", SameHost::Auto);
    let [a, b] = [node(&engine), node(&engine)];
    let to = To::Datagram { ah: address(&a, engine.gid(), 0), qpn: b.num.0, qkey: QKEY };
    a.fill(0, b"hello");
    b.receive(4, &[b.sge(0, 100)]);
    send(&a, to, 9, 5);
    assert_eq!(b.poll().wr_id, 4);
    assert_eq!(b.bytes(GRH as usize, 5), b"hello");
}

#[test]
fn a_program_that_sleeps_is_woken_by_a_datagram() {
    let engines = [engine("127.0.0.1", SameHost::Auto), engine("127.0.0.1", SameHost::Auto)];
    let [a, b] = [node(&engines[0]), node(&engines[1])];
    let to = To::Datagram { ah: address(&a, b.engine.gid(), 0), qpn: b.num.0, qkey: QKEY };
    b.receive(4, &[b.sge(0, 100)]);
    b.engine.req_notify_cq(b.cq, false).unwrap();
    std::thread::scope(|scope| {
        let waiter = scope.spawn(|| b.engine.wait_channel(b.channel).unwrap().context);
        send(&a, to, 1, 5);
        assert_eq!(waiter.join().unwrap(), 7);
    });
    assert_eq!(b.poll().wr_id, 4);
}

/// A question to epoll takes as long as ten polls that look at memory only.
#[test]
fn a_socket_that_has_had_nothing_for_long_is_asked_for_seldom() {
    const POLLS: u64 = 100_000;
    let own = IpAddr::from([127, 0, 0, 76]);
    let config = Config { address: Some(own.into()), counters: true, ..Config::default() };
    let engine = Engine::open(config).unwrap();
    let node = node(&engine);
    let mut out = [Completion::default()];
    for _ in 0..POLLS {
        assert_eq!(engine.poll_cq(node.cq, &mut out).unwrap(), 0);
    }
    // Polls alone are nothing new to show.
    let to = To::Datagram { ah: address(&node, engine.gid(), 0), qpn: node.num.0, qkey: QKEY };
    send(&node, to, 0, 1);
    let count = |name: &str| {
        let ours = |sample: &Sample| (sample.process, sample.address) == (std::process::id(), own);
        let sample = samples().into_iter().find(ours).unwrap();
        sample.engine[ENGINE_METRICS.iter().position(|metric| metric.name == name).unwrap()]
    };
    let end = Instant::now() + PATIENCE;
    while count("polls") < POLLS {
        assert!(Instant::now() < end, "the sample does not come");
        std::thread::yield_now();
    }
    let looks = count("epoll_looks");
    assert!((1..POLLS / 32).contains(&looks), "{looks} questions");
}

#[test]
fn a_burst_arrives_whole_and_in_order() {
    // All of it fits into what the least generous kernel keeps for a socket.
    const COUNT: u32 = 150;
    let engines = [engine("127.0.0.1", SameHost::Auto), engine("127.0.0.1", SameHost::Auto)];
    let [a, b] = [node(&engines[0]), node(&engines[1])];
    let to = To::Datagram { ah: address(&a, b.engine.gid(), 0), qpn: b.num.0, qkey: QKEY };
    for wr_id in 0..COUNT {
        b.receive(wr_id.into(), &[b.sge(u64::from(wr_id) * 100, 60)]);
    }
    let mut doorbell = a.engine.doorbell().unwrap();
    for imm in 0..COUNT {
        let (op, flags) = (SendOp::SendImm(imm), SendFlags::empty());
        let payload = Payload::Inline(b"one of many");
        doorbell.post_send(a.qp, &SendWr { wr_id: 0, to, op, flags, payload }).unwrap();
    }
    drop(doorbell);
    let mut seen = Vec::new();
    while seen.len() < COUNT as usize {
        seen.push(b.poll().extra);
    }
    assert_eq!(seen, (0..COUNT).map(WcExtra::Imm).collect::<Vec<_>>());
}

#[test]
fn strangers_are_dropped() {
    let engine = engine("127.0.0.1", SameHost::Auto);
    let b = node(&engine);
    b.receive(4, &[b.sge(0, 100)]);
    let socket = std::net::UdpSocket::bind("127.0.0.1:0").unwrap();
    let mut header = quipu_wire_header(b.num.0);
    socket.send_to(&header, ("127.0.0.1", b.num.port())).unwrap();
    socket.send_to(b"", ("127.0.0.1", b.num.port())).unwrap();
    socket.send_to(&[0xff; 9000], ("127.0.0.1", b.num.port())).unwrap();
    // This one says where it comes from.
    let port = socket.local_addr().unwrap().port();
    header[9..12].copy_from_slice(&[(port >> 8) as u8, port as u8, 7]);
    socket.send_to(&header, ("127.0.0.1", b.num.port())).unwrap();
    let got = b.poll();
    assert_eq!((got.src_qp.port(), got.byte_len), (port, GRH as u32));
    // The long one was cut by the kernel's buffer, and is not even looked at.
    assert_eq!(engine.datagram_drops().unwrap().malformed, 2);
    let mut none = [Completion::default()];
    let end = Instant::now() + PATIENCE.min(Duration::from_millis(20));
    while Instant::now() < end {
        assert_eq!(engine.poll_cq(b.cq, &mut none).unwrap(), 0);
    }
}

/// Who may send to the port of groups may not for that reason send to any queue pair.
#[test]
fn the_port_of_groups_leads_to_groups_only() {
    // Nobody else's, and kept so.
    let reserved = std::net::UdpSocket::bind("127.0.0.75:0").unwrap();
    let (multicast_port, yes) = (reserved.local_addr().unwrap().port(), 1i32);
    let (level, option, len) = (libc::SOL_SOCKET, libc::SO_REUSEADDR, size_of_val(&yes) as u32);
    // SAFETY: the kernel reads a live integer of that length.
    let set = unsafe {
        libc::setsockopt(reserved.as_raw_fd(), level, option, (&raw const yes).cast(), len)
    };
    assert_eq!(set, 0);
    let address = Some("127.0.0.1".parse().unwrap());
    let config = quipu_host::Config { address, multicast_port, ..quipu_host::Config::default() };
    let b = node(&Engine::open(config).unwrap());
    let group = Gid::from(std::net::IpAddr::from([239, 77, 1, 3]));
    b.engine.attach_multicast(b.qp, group).unwrap();
    for wr_id in 0..2 {
        b.receive(wr_id, &[b.sge(0, 100)]);
    }
    let socket = std::net::UdpSocket::bind("127.0.0.1:0").unwrap();
    let port = socket.local_addr().unwrap().port();
    let mut header = quipu_wire_header(b.num.0);
    header[9..11].copy_from_slice(&port.to_be_bytes());
    for (index, to) in [multicast_port, b.num.port()].into_iter().enumerate() {
        header[11] = index as u8;
        socket.send_to(&header, ("127.0.0.1", to)).unwrap();
    }
    assert_eq!(b.poll().src_qp, QpNum::new(port, 1));
    while b.engine.progress().unwrap() {}
    assert_eq!(b.engine.poll_cq(b.cq, &mut [Completion::default()]).unwrap(), 0);
    b.engine.detach_all(b.qp).unwrap();
}

/// An empty message for `qpn`, as `specs/quipu-datagram.md` has it.
fn quipu_wire_header(qpn: u32) -> [u8; 20] {
    let mut header = [0; 20];
    header[..4].copy_from_slice(&[b'Q', b'D', 1, 0x64]);
    header[4..8].copy_from_slice(&qpn.to_be_bytes());
    header[12..16].copy_from_slice(&QKEY.to_be_bytes());
    header
}

/// Two engines in one group, and one that is not; the bytes that arrive once at each that is.
fn to_a_group(address_of_all: &str, group: &str) {
    let engines: Vec<_> = (0..3).map(|_| engine(address_of_all, SameHost::Auto)).collect();
    let nodes: Vec<Node> = engines.iter().map(node).collect();
    let gid = Gid(group.parse::<std::net::Ipv6Addr>().unwrap().octets());
    for node in &nodes[..2] {
        node.engine.attach_multicast(node.qp, gid).unwrap();
    }
    for node in &nodes {
        for wr_id in 0..2 {
            node.receive(wr_id, &[node.sge(1000 * wr_id, 500)]);
        }
    }
    let to = To::Datagram { ah: address(&nodes[2], gid, 0), qpn: 0x00ff_ffff, qkey: QKEY };
    nodes[2].fill(4000, b"to all");
    let wr = SendWr {
        wr_id: 9,
        to,
        op: SendOp::Send,
        flags: SendFlags::SIGNALED,
        payload: Payload::Sges(&[nodes[2].sge(4000, 6)]),
    };
    nodes[2].engine.post_send(nodes[2].qp, &wr).unwrap();
    assert_eq!(nodes[2].poll().wr_id, 9);
    for node in &nodes[..2] {
        let got = node.poll();
        assert_eq!((got.wr_id, got.byte_len, got.src_qp), (0, 46, nodes[2].num));
        assert_eq!(node.bytes(GRH as usize, 6), b"to all");
    }
    // Who leaves hears nothing more; the other one shows when it would have come.
    nodes[0].engine.detach_multicast(nodes[0].qp, gid).unwrap();
    nodes[2].engine.post_send(nodes[2].qp, &wr).unwrap();
    assert_eq!(nodes[1].poll().wr_id, 1);
    let mut none = [Completion::default()];
    for node in [&nodes[0], &nodes[2]] {
        while node.engine.progress().unwrap() {}
        let found = node.engine.poll_cq(node.cq, &mut none).unwrap();
        assert!(found == 0 || none[0].wr_id == 9, "{none:?}");
    }
    assert!(nodes[1].engine.destroy_qp(nodes[1].qp).is_err(), "it is still attached");
    nodes[1].engine.detach_all(nodes[1].qp).unwrap();
    nodes[1].engine.destroy_qp(nodes[1].qp).unwrap();
}

#[test]
fn to_a_group_over_ipv4() {
    let [.., high, low] = std::process::id().to_be_bytes();
    to_a_group("127.0.0.1", &format!("::ffff:239.77.{high}.{low}"));
}

#[test]
fn to_a_group_over_ipv6() {
    if engine_is_refused("::1") {
        return;
    }
    // Most kernels have no way to IPv6 groups over the loopback; then nobody is attached for nothing.
    let node = node(&engine("::1", SameHost::Auto));
    let gid = Gid("ff0e::77:1:2".parse::<std::net::Ipv6Addr>().unwrap().octets());
    match node.engine.attach_multicast(node.qp, gid) {
        Ok(()) => {
            assert!(node.engine.destroy_qp(node.qp).is_err());
            to_a_group("::1", "ff0e::77:1:2");
        }
        Err(_) => drop(node.engine.destroy_qp(node.qp).unwrap()),
    }
}

#[test]
fn an_engine_may_be_in_more_groups_than_a_socket() {
    let node = node(&engine("127.0.0.1", SameHost::Auto));
    let gid = |last: u8| Gid::from(std::net::IpAddr::from([239, 78, 0, last]));
    for last in 0..50 {
        node.engine.attach_multicast(node.qp, gid(last)).unwrap();
    }
    for last in 0..50 {
        node.engine.detach_multicast(node.qp, gid(last)).unwrap();
    }
    assert!(node.engine.detach_multicast(node.qp, gid(0)).is_err());
}
